"""Hostile and damaged audit archives: found, placed, refused in a line; nothing runs, nothing is left behind.

Archives are put together from altered parts by the functions that write sound ones, so that every check before the one
that is attacked has nothing to say.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
import zstandard
from blake3 import blake3
from click.testing import CliRunner
from sampling import sample

from ckpttool.audit import archive_plan as plan
from ckpttool.audit import byte_planes, frame_format, ledger, signing, tarball
from ckpttool.audit import manifest as records
from ckpttool.audit.archive import Archive
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.archive_verification import verify_archive
from ckpttool.audit.export import export, restore
from ckpttool.audit.frame_writer import FrameWriter, SplitPoint
from ckpttool.audit.verify_in_store import verify
from ckpttool.cli.main import _print_and_exit, app
from ckpttool.engine.copy import fill
from ckpttool.engine.opening import open as open_checkpoint
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, name_flags
from ckpttool.formats import values
from ckpttool.formats.crc import crc32
from ckpttool.index.checkpoint import Chunks, TensorEntry, Value, joined
from ckpttool.index.names import COMPONENTS
from ckpttool.storage.source import Source

# ------------------------------------------------------------------------------------------------ archives to measure


TIME = 1767323045
CREATED = "2026-01-02T03:04:05Z"


class Piece(NamedTuple):
    """A member of the tar: its header, its bytes as they are stored when unfolded and unmerged, its padding."""

    name: str
    head: bytes
    body: bytes
    pad: bytes


def piece(name: str, body: bytes, mtime: int = TIME) -> Piece:
    return Piece(name, tarball.make_header(name, len(body), mtime), body, tarball.make_padding(len(body)))


def tensor(name: str, dtype: str, *shape: int) -> TensorEntry:
    path = tuple(name.split("."))
    assert joined(path) == name
    return TensorEntry(dtype, shape, path, Chunks(len(shape)))


def noise(n: int, seed: int) -> bytes:
    out = bytearray(blake3(seed.to_bytes(8, "little")).digest(length=n))
    out[: n // 3] = bytes(n // 3)
    return bytes(out)


STORY = {
    "schema": records.SCHEMA, "tool": "ckpttool", "version": "0.1.0", "created": CREATED, "only": None,
    "meta": {}, "git_commit": None,
}  # fmt: skip


@dataclass
class Kit:
    """What an archive is made of. What is None is made as an export makes it; a function alters what was made."""

    tensors: dict[str, TensorEntry]
    data: dict[str, bytes]
    values: dict[str, Any] = field(default_factory=lambda: {"trainer.step": 7, "trainer.lr": 0.25})
    provenance: dict[str, Any] = field(default_factory=lambda: dict(STORY))
    retention: bytes | None = None
    signature: bytes | None = None
    shuffle: bool = False
    most: int = 300_000
    step: int | None = 7
    mtime: int = TIME
    grouped: list[list[str]] | None = None
    manifest: Callable[[bytes], bytes] | None = None
    values_text: Callable[[bytes], bytes] | None = None
    provenance_text: Callable[[bytes], bytes] | None = None
    headers: Callable[[str, bytes], bytes] | None = None  # of safetensors members
    sums: Callable[[bytes], bytes] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    member_hashes: dict[str, str] = field(default_factory=dict)
    pieces: Callable[[list[Piece]], list[Piece]] | None = None
    end: bytes = tarball.END
    cuts: Callable[[list[SplitPoint]], list[SplitPoint]] | None = None
    readme: Callable[[bytes], bytes] | None = None


def kit(**change: Any) -> Kit:
    """A sound one of two members with tensors, of every size that is treated differently."""
    shapes = {
        "model.a": ("float32", (10, 4)), "model.big": ("bfloat16", (300, 500)), "model.n": ("int64", (3,)),
        "model.twin": ("int64", (3,)), "model.z": ("float32", (0, 5)), "optim.state.a.m": ("float32", (281, 300)),
    }  # fmt: skip
    tensors = {n: tensor(n, d, *s) for n, (d, s) in shapes.items()}
    data = {n: noise(t.nbytes, i) for i, (n, t) in enumerate(tensors.items())}
    data["model.twin"] = data["model.n"]
    return replace(Kit(tensors, data), **change)


def parts(k: Kit) -> tuple[list[Piece], list[SplitPoint]]:
    """The members of an archive, and where its frames begin."""
    readme = records.make_readme(k.shuffle)
    if k.readme:
        readme = k.readme(readme)
    grouped = k.grouped or plan.group_tensors_by_member(k.tensors, k.most, k.shuffle)
    planned = plan.make_plan(grouped, k.tensors, k.shuffle, k.mtime, readme)
    out = [piece(plan.README, readme, k.mtime)]
    hashes: dict[str, tuple[int, str]] = {plan.README: (len(readme), records.sha256_hex(readme))}
    for names, (member, head) in zip(grouped, planned.headers.items(), strict=True):
        if k.headers:
            head = k.headers(member, head)
        stored = head + b"".join(bytes(byte_planes.split(k.data[n], planned.places[n].item)) for n in names)
        out.append(piece(member, head + b"".join(k.data[n] for n in names), k.mtime))
        hashes[member] = (len(stored), records.sha256_hex(stored))
    held = values.encode({n: Value(tuple(n.split(".")), v) for n, v in k.values.items()})
    if k.values_text:
        held = k.values_text(held)
    hashes[plan.VALUES] = (len(held), records.sha256_hex(held))
    for name, h in k.member_hashes.items():
        hashes[name] = (hashes[name][0], h)
    digests = {n: blake3(d).hexdigest() for n, d in k.data.items()} | k.digests
    text = records.encode_manifest(
        records.Manifest(k.tensors, digests, grouped, hashes, k.shuffle, k.step), planned.places
    )
    if k.manifest:
        text = k.manifest(text)
    said = (json.dumps(k.provenance, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    if k.provenance_text:
        said = k.provenance_text(said)
    smalls = [(plan.VALUES, held), (plan.MANIFEST, text), (plan.PROVENANCE, said)]
    if k.retention is not None:
        smalls.append((plan.RETENTION, k.retention))
    listed = [(n, h) for n, (_, h) in hashes.items() if n != plan.VALUES] + [
        (n, records.sha256_hex(d)) for n, d in smalls
    ]
    listed[-len(smalls)] = (plan.VALUES, hashes[plan.VALUES][1])
    sums = records.encode_sums(listed)
    smalls.append((plan.SUMS, k.sums(sums) if k.sums else sums))
    if k.signature is not None:
        smalls.append((plan.SIGNATURE, k.signature))
    out += [piece(n, d, k.mtime) for n, d in smalls]
    return (k.pieces(out) if k.pieces else out), (k.cuts(planned.cuts) if k.cuts else planned.cuts)


def build(path: Path, k: Kit | None = None, level: int = 1) -> Path:
    """Write an archive."""
    pieces, cuts = parts(k or kit())
    with path.open("wb") as f:
        w = FrameWriter(f.write, cuts, [], level=level, jobs=1)
        try:
            for p in pieces:
                w.append(p.head + p.body + p.pad)
            w.append((k or kit()).end)
            w.finish()
        finally:
            w.close()
    return path


class Frame(NamedTuple):
    data: bytes
    length: int


def frames_of(path: Path) -> list[Frame]:
    raw = path.read_bytes()
    with Source(path.parent) as s:
        t = frame_format.read_frame_table(s, path.name)
    return [Frame(raw[a : a + n], m) for a, n, m in zip(t.offsets, t.sizes, t.lengths, strict=True)]


def assembled(path: Path, frames: Sequence[Frame], between: bytes = b"") -> Path:
    """A file of these frames, with tables that fit."""
    crcs = array("I", [crc32(f.data) for f in frames])
    table = frame_format.make_crc_table(crcs)
    sizes, lengths = array("I", [len(f.data) for f in frames]), array("I", [f.length for f in frames])
    sums = array("I", [int.from_bytes(f.data[-4:], "little") for f in frames])
    seek = frame_format.make_seek_table(sizes, lengths, sums, len(table))
    path.write_bytes(b"".join(f.data for f in frames) + between + table + seek)
    return path


def kit_of(path: Path) -> Kit:
    """What an archive that an export wrote is made of; the members that were not altered come out as they were."""
    with Source(path.parent) as source:
        a = Archive(source, path.name)

        def text(name: str) -> bytes:
            return a.read_all(name, 1 << 24)

        held, tensors = text(plan.VALUES), dict(a.manifest.tensors)
        places = a.plan.places.items()
        return Kit(
            tensors, {n: a.read(p.member, p.offset, p.nbytes) for n, p in places},
            provenance=json.loads(text(plan.PROVENANCE)), step=a.manifest.step, mtime=a.mtime, grouped=a.manifest.grouped,
            shuffle=a.manifest.shuffle, retention=text(plan.RETENTION) if a.exists(plan.RETENTION) else None,
            signature=text(plan.SIGNATURE) if a.signed else None, values_text=lambda _: held,
        )  # fmt: skip


def altered(path: Path, **change: Any) -> Path:
    """Write an archive anew, consistently, with something in it altered."""
    return build(path, replace(kit_of(path), **change))


# ------------------------------------------------------------------------------------------------ every command

RUNNER, COMMAND = CliRunner(), typer.main.get_command(app)
REFUSALS = {3, 4, 5, 7}


def run(*words: object) -> tuple[int, str]:
    """(exit code, what is said) of a command, as `ckpttool` would end; what is no refusal of ours is raised."""
    with name_flags():
        done = RUNNER.invoke(COMMAND, [str(w) for w in words])
    e = done.exception
    if isinstance(e, CkpttoolError):
        with redirect_stderr(io.StringIO()) as told, pytest.raises(SystemExit):
            _print_and_exit(e)
        return e.exit_code, told.getvalue()
    if e is not None and not isinstance(e, SystemExit):
        raise e
    return done.exit_code, done.output


def refused(*words: object) -> str:
    """A command refuses, in a line; which is returned."""
    code, said = run(*words)
    assert code in REFUSALS, (words, code, said)
    line, _, more = said.strip().partition("\n")
    assert words[0] == "inspect" or line.isprintable(), said  # that one lists what each layout looked for
    assert words[0] == "inspect" or re.fullmatch(r"more: ckpttool explain CKPT\d{4}", more), said
    return said


def below(folder: Path) -> set[str]:
    return {os.path.join(r, f) for r, ds, fs in os.walk(folder) for f in [*ds, *fs]}


def listed(path: Path) -> dict[str, Any]:
    code, said = run("audit", "list", path.parent, "--json")
    assert code == 0, said
    rows: list[dict[str, Any]] = json.loads(said)
    return next(r for r in rows if r["name"] == path.name)


def attack(path: Path, reads: str = "restore", lists: bool = True) -> None:
    """Every command refuses an archive, or lists it as damaged.

    `reads` is how it is taken, "" where that may be; `lists` says whether its records alone tell.
    """
    home = path.parent / "home"
    home.mkdir()
    before = below(path.parent)
    refused("audit", "verify", path, "-q")
    if reads:
        out = home / "out.pt"
        refused(*{"restore": ("audit", "restore"), "convert": ("convert",)}[reads], path, out, "--to", "full", "-q")
    if lists:
        refused("audit", "verify", "--quick", path, "-q")
        if reads:
            refused("inspect", path)
        assert listed(path)["damaged"]
    assert below(path.parent) == before, "something was left behind"


# ------------------------------------------------------------------------------------------------ what is refused


def raw(name: str, kind: bytes, size: int = 0, link: str = "", **fields: Any) -> Piece:
    """A member with any header."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode, info.mtime = kind, size, link, 0o644, TIME
    how = tarfile.GNU_FORMAT
    if fields:
        info.pax_headers, how = fields, tarfile.PAX_FORMAT
    return Piece(name, info.tobuf(how), b"x" * size, tarball.make_padding(size))


def summed_again(head: bytes) -> bytes:
    """A tar header with the checksum of its bytes."""
    return head[:148] + b"%06o\0 " % (sum(head) - sum(head[148:156]) + 8 * 32) + head[156:]


def resized(head: bytes, size: bytes) -> bytes:
    """A tar header with another size, as 12 bytes."""
    return summed_again(head[:124] + size + head[136:])


A_LONG_NAME = Piece(
    "d", summed_again(tarball.make_header("././@LongLink", 11, TIME)[:156] + b"L" + tarball.make_header("././@LongLink", 11, TIME)[157:]), b"../../../x\0",
    tarball.make_padding(11),
)  # fmt: skip


def before(name: str, *new: Piece) -> Kit:
    """Members put before another, or at the end."""

    def put(old: list[Piece]) -> list[Piece]:
        at = next((i for i, p in enumerate(old) if p.name == name), len(old))
        return [*old[:at], *new, *old[at:]]

    return kit(pieces=put)


def without(name: str) -> Kit:
    return kit(pieces=lambda old: [p for p in old if p.name != name])


def at_time(name: str) -> Kit:
    return kit(pieces=lambda old: [piece(p.name, p.body, 99) if p.name == name else p for p in old])


def padded(name: str) -> Kit:
    return kit(pieces=lambda old: [p._replace(pad=b"x" * len(p.pad)) if p.name == name else p for p in old])


def entry(k: int, **change: Any) -> Kit:
    """A row of a tensor in the manifest says something else; the spelling stays that of the manifest."""

    def act(text: bytes) -> bytes:
        lines = text.decode().split("\n")
        at = lines.index(' "tensors": [') + 1 + k
        row = json.loads(lines[at].rstrip(",")) | change
        lines[at] = "  " + json.dumps(row, ensure_ascii=True) + "," * lines[at].endswith(",")
        return "\n".join(lines).encode()

    return kit(manifest=act)


def in_manifest(old: bytes, new: bytes) -> Kit:
    def act(text: bytes) -> bytes:
        assert old in text
        return text.replace(old, new, 1)

    return kit(manifest=act)


def story(**change: Any) -> Kit:
    return kit(provenance=STORY | change)


def value(text: str, name: str = "trainer.x", path: str = '"trainer", "x"') -> Kit:
    line = f'{{\n"{name}": {{"path": [{path}], "data": {text}}}\n}}\n'
    return kit(values_text=lambda _: line.encode(), step=None)


def retained(**change: Any) -> Kit:
    said = {"schema": "ckpttool.retention/1", "retain_until": None, "retain": None, "legal_hold": None} | change
    return kit(retention=json.dumps(said, indent=1).encode() + b"\n")


def config(name: str, **change: Any) -> Kit:
    return story(config_files={name: {"sha256": records.sha256_hex(b"1"), "text": "1"} | change})


def header_with(old: bytes, new: bytes) -> Kit:
    """Another safetensors header, of the same length."""
    assert len(old) >= len(new)
    return kit(headers=lambda _, head: head.replace(old, new + b" " * (len(old) - len(new)), 1))


def summed(act: Callable[[bytes], bytes]) -> Kit:
    return kit(sums=act)


HASH = "0" * 64
EVERYWHERE: dict[str, Callable[[], Kit]] = {
    # names and kinds of members
    "a member twice": lambda: before(plan.MANIFEST, piece(plan.VALUES, b"{}")),
    "a data member twice": lambda: before(plan.VALUES, piece("tensors-00001.safetensors", b"")),
    "names that differ by case": lambda: before(plan.MANIFEST, piece("VALUES.JSON", b"{}")),
    "composed and decomposed": lambda: before(plan.VALUES, piece("\u00e9", b""), piece("e\u0301", b"")),
    "a name that leads out": lambda: before("", piece("../../x", b"1")),
    "an absolute name": lambda: before(plan.README, piece("/etc/x", b"1")),
    "a name of 5,000 characters": lambda: before(plan.VALUES, raw("n" * 5000, b"0")),
    "a name of 5,000 characters, pax": lambda: before(plan.VALUES, raw("n" * 5000, b"0", 0, "", comment="x")),
    "a link's target of 5,000 characters": lambda: before("", raw("l", tarfile.SYMTYPE, 0, "n" * 5000)),
    "a symbolic link": lambda: before(plan.VALUES, raw("out", tarfile.SYMTYPE, 0, "/var"), piece("out/x", b"1")),
    "a hard link": lambda: before(plan.VALUES, raw("out", tarfile.LNKTYPE, 0, "/etc/passwd")),
    "a link in the place of a record": lambda: kit(pieces=lambda old: [raw(p.name, tarfile.SYMTYPE, 0, "/etc/passwd") if p.name == plan.PROVENANCE else p for p in old]),
    "a device": lambda: before("", raw("d", tarfile.CHRTYPE)),
    "a block device": lambda: before("", raw("d", tarfile.BLKTYPE)),
    "a pipe": lambda: before("", raw("d", tarfile.FIFOTYPE)),
    "a folder": lambda: before("", raw("d", tarfile.DIRTYPE)),
    "a sparse file": lambda: before("", raw("d", tarfile.GNUTYPE_SPARSE)),
    "a contiguous file": lambda: before("", raw("d", tarfile.CONTTYPE)),
    "a file of an old tar": lambda: before("", raw("d", tarfile.AREGTYPE)),
    "a pax header": lambda: before(plan.VALUES, raw("d", b"0", 0, "", comment="hidden")),
    "a global pax header": lambda: before(plan.README, Piece("", tarfile.TarInfo.create_pax_global_header({"comment": "x"}), b"", b"")),
    "a pax header that gives a record another name": lambda: before(plan.PROVENANCE, raw("d", b"0", 0, "", path="values.json")),
    "a pax header of a sparse file": lambda: before(plan.VALUES, raw("d", b"0", 0, "", **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)})),
    "a long name of GNU that leads out": lambda: before(plan.VALUES, A_LONG_NAME),
    "a size below zero, in base 256": lambda: kit(pieces=lambda old: [p._replace(head=resized(p.head, b"\xff" * 11 + b"\0")) if p.name == plan.VALUES else p for p in old]),
    "a size beyond any file, in base 256": lambda: kit(pieces=lambda old: [p._replace(head=resized(p.head, b"\x80" + b"\xff" * 11)) if p.name == plan.VALUES else p for p in old]),
    "the size in another spelling": lambda: kit(pieces=lambda old: [p._replace(head=resized(p.head, b"\x80" + len(p.body).to_bytes(11, "big"))) if p.name == plan.VALUES else p for p in old]),
    "a name that goes on behind a zero": lambda: kit(pieces=lambda old: [p._replace(head=summed_again(b"values.json\0../../x" + p.head[19:])) if p.name == plan.VALUES else p for p in old]),
    "a member that nothing lists": lambda: before(plan.MANIFEST, piece("more.bin", b"1")),
    "a data member that nothing lists": lambda: before(plan.VALUES, piece("tensors-00005.safetensors", b"1")),
    "members in another order": lambda: kit(pieces=lambda old: [*old[:-2], old[-1], old[-2]]),
    **{f"no {n}": lambda n=n: without(n) for n in (plan.README, "tensors-00001.safetensors", "tensors-00004.safetensors", plan.VALUES, plan.MANIFEST, plan.PROVENANCE, plan.SUMS)},  # type: ignore[misc]
    **{f"another time of {n}": lambda n=n: at_time(n) for n in (plan.README, "tensors-00002.safetensors", plan.VALUES, plan.SUMS)},  # type: ignore[misc]
    # hidden in the tar
    "bytes in the padding of a record": lambda: padded(plan.VALUES),
    "bytes in the padding of tensors": lambda: padded("tensors-00001.safetensors"),
    "half an end": lambda: kit(end=bytes(512)),
    "no end": lambda: kit(end=b""),
    "a longer end": lambda: kit(end=bytes(10240)),
    "bytes behind the end": lambda: kit(end=tarball.END + b"x" * 512),
    "a member behind the end": lambda: kit(end=tarball.END + b"".join(piece("x", b"1")[1:]) + tarball.END),
    "a readme of 100 kB": lambda: kit(readme=lambda text: text + bytes(100_000)),
    # safetensors headers
    "a word in the metadata of a member": lambda: header_with(b'"format":"pt"', b'"format":"PT"'),
    "a tensor in a header by another name": lambda: header_with(b"model.twin", b"model.twiN"),
    "a tensor in a header that overlaps": lambda: header_with(b"[24,48]", b"[00,24]"),
    "a tensor in a header beyond the member": lambda: header_with(b"[24,48]", b"[24,99]"),
    "a tensor in a header of another dtype": lambda: header_with(b'"I64"', b'"F64"'),
    "a header of more bytes than it has": lambda: kit(headers=lambda _, head: struct.pack("<Q", 1 << 40) + head[8:]),
    # the manifest
    "no JSON": lambda: kit(manifest=lambda _: bytes(1000)),
    "an empty manifest": lambda: kit(manifest=lambda _: b""),
    "a list": lambda: kit(manifest=lambda _: b"[]\n"),
    "null": lambda: kit(manifest=lambda _: b"null\n"),
    "lists in lists": lambda: kit(manifest=lambda _: b"[" * 200_000),
    "dicts in dicts": lambda: kit(manifest=lambda _: b'{"a":' * 100_000),
    "a key twice": lambda: in_manifest(b'"schema"', b'"schema": "x", "schema"'),
    "a number of 5,000 digits": lambda: in_manifest(b'"step": 7', b'"step": ' + b"9" * 5000),
    "a step that is NaN": lambda: in_manifest(b'"step": 7', b'"step": NaN'),
    "a step that is true": lambda: in_manifest(b'"step": 7', b'"step": true'),
    "another schema": lambda: in_manifest(records.SCHEMA.encode(), b"ckpttool.audit/9"),
    "a billion tensors": lambda: in_manifest(b'"tensor_count": 6', b'"tensor_count": 1000000000'),
    "another Merkle root": lambda: in_manifest(b'"merkle_root": "', b'"merkle_root": "0'),
    "another spelling": lambda: kit(manifest=lambda text: text + b" "),
    "a member ../x": lambda: in_manifest(b'"name": "tensors-00001.safetensors"', b'"name": "../x"'),
    "a tensor of a member ../x": lambda: entry(0, member="../x"),
    "a tensor of a list": lambda: entry(0, member=["x"]),
    "a member's hash is another's": lambda: kit(manifest=lambda text: re.sub(rb'"sha256": "[0-9a-f]{64}"', b'"sha256": "' + HASH.encode() + b'"', text, count=2)),
    "half of a character in a name": lambda: entry(0, name="model.\ud800", path=["model", "\ud800"]),
    "a name that is null": lambda: entry(0, name=None),
    "a name that is not its path": lambda: entry(0, name="model.b"),
    "a path that is text": lambda: entry(0, path="model.a"),
    "a path of a list": lambda: entry(0, path=[["model"], "a"]),
    "a path of no component": lambda: entry(0, name="evil.a", path=["evil", "a"]),
    "an empty path": lambda: entry(0, name="", path=[]),
    "a dtype that is a list": lambda: entry(0, dtype=["float32"]),
    "another dtype of that size": lambda: entry(0, dtype="int32"),
    "another dtype": lambda: entry(0, dtype="float64"),
    "elements beyond any number": lambda: entry(0, shape=[1 << 40, 1 << 40]),
    "elements that overflow to none": lambda: entry(0, shape=[1 << 32, 1 << 32]),
    "elements that are negative": lambda: entry(0, shape=[-10, -4]),
    "elements of a terabyte": lambda: entry(0, shape=[1 << 38]),
    "a shape of 65 dimensions": lambda: entry(0, shape=[1] * 65),
    "a shape of fractions": lambda: entry(0, shape=[10.0, 4]),
    "a shape of truth": lambda: entry(0, shape=[40, True]),
    "an offset beyond the member": lambda: entry(0, offset=1 << 40),
    "an offset of another tensor": lambda: entry(1, offset=104),
    "an offset in the header": lambda: entry(0, offset=0),
    "bytes of another number": lambda: entry(0, bytes=1 << 62),
    "planes where there are none": lambda: entry(0, planes=4),
    "planes of another size": lambda: replace(entry(2, planes=4), shuffle=True),
    "planes for none": lambda: replace(in_manifest(b'"coding": "byte planes', b'"coding": "plain'), shuffle=True),
    "a digest in capitals": lambda: entry(0, digest="A" * 64),
    "a digest that is a number": lambda: entry(0, digest=5),
    # SHA256SUMS
    "a sum with an escaped name": lambda: summed(lambda text: text.replace(b"values.json", b"\\values.json")),
    "a sum of a name that leads out": lambda: summed(lambda text: text + HASH.encode() + b"  ../../x\n"),
    "a sum less": lambda: summed(lambda text: text.partition(b"\n")[2]),
    "sums in another order": lambda: summed(lambda text: b"".join(sorted(text.splitlines(True)))),
    "sums of binary files": lambda: summed(lambda text: text.replace(b"  ", b" *")),
    "sums with other ends": lambda: summed(lambda text: text.replace(b"\n", b"\r\n")),
    "sums with ends of Unicode": lambda: summed(lambda text: text.replace(b"\n", "\u2028".encode())),
    "a sum twice": lambda: summed(lambda text: text + text.splitlines(True)[0]),
    "a record with another hash": lambda: summed(lambda text: re.sub(rb"[0-9a-f]{64}(?=  PROV)", HASH.encode(), text)),
    # PROVENANCE.json
    "a provenance that is a list": lambda: kit(provenance_text=lambda _: b"[]\n"),
    "a deep provenance": lambda: kit(provenance_text=lambda _: b"[" * 100_000),
    "a provenance with a key twice": lambda: kit(provenance_text=lambda text: text.replace(b'"tool"', b'"schema"')),
    "a provenance in another spelling": lambda: kit(provenance_text=lambda text: text + b" " * 100),
    "a provenance with more": lambda: story(more="hidden"),
    **{f"a provenance without {key}": lambda key=key: kit(provenance={k: v for k, v in STORY.items() if k != key}) for key in STORY},  # type: ignore[misc]
    "a source that is text": lambda: story(source="x"),
    "a source that is a list": lambda: story(source=[1]),
    "meta that is a list": lambda: story(meta=[1]),
    "meta of lists": lambda: story(meta={"run": [1]}),
    "a time that is a list": lambda: story(created=[1]),
    "components that are text": lambda: story(only="model"),
    "components that are a number": lambda: story(only=5),
    "components that are lists": lambda: story(only=[["model"]]),
    "components that do not exist": lambda: story(only=["evil"]),
    "configuration ../../x": lambda: config("../../x"),
    "configuration MANIFEST.json": lambda: config(plan.MANIFEST),
    "configuration with an absolute name": lambda: config("/etc/x"),
    "configuration without a name": lambda: config(""),
    "configuration with a zero in its name": lambda: config("a\0b"),
    "configuration with a backslash": lambda: config("..\\x"),
    "configuration that is a number": lambda: story(config_files={"config.json": 5}),
    "configuration that is a list": lambda: story(config_files=[1]),
    "configuration with another hash": lambda: config("config.json", sha256=HASH),
    "configuration of numbers": lambda: config("config.json", text=5),
    "tied that is a list": lambda: story(tied=[1]),
    "tied to lists": lambda: story(tied={"model.a": ["x"]}),
    "an origin that is text": lambda: story(origin="abc"),
    "an origin of numbers": lambda: story(origin=[[1, 2]]),
    "an origin of three": lambda: story(origin=[[["model", "a"], ["a"], ["b"]]]),
    "an origin that is empty": lambda: story(origin=[[["model", "a"], []]]),
    "an origin of null": lambda: story(origin=[[["model", "a"], [None]]]),
    "an origin of dicts": lambda: story(origin=[[["model", "a"], [{"a": 1}]]]),
    "an origin of 5,000 parts": lambda: story(origin=[[["model", "a"], ["x"] * 5000]]),
    "an origin below zero": lambda: story(origin=[[["model", "a"], ["model", -5]]]),
    "an order that is a number": lambda: story(order=5),
    "an order of numbers": lambda: story(order=[1]),
}  # fmt: skip


def named(name: str) -> Kit:
    """A tensor of any name, whose digest is another."""
    t = TensorEntry("float32", (3,), ("model", name), Chunks(1))
    return kit(tensors={f"model.{name}": t}, data={f"model.{name}": bytes(12)}, digests={f"model.{name}": HASH})


#: What a restored state does not depend on.
KEPT: dict[str, Callable[[], Kit]] = {
    "a retention that says nothing": lambda: kit(retention=b"{}\n"),
    "a retention that is a list": lambda: kit(retention=b"[]\n"),
    "a deep retention": lambda: kit(retention=b"[" * 100_000),
    "a retention that is no time": lambda: retained(retain_until="9999", retain="x"),
    "a retention that is a number": lambda: retained(retain_until=5, retain="x"),
    "a hold that is a number": lambda: retained(legal_hold=5),
    "a hold without a reason": lambda: retained(legal_hold={"reason": " ", "since": "2026-01-01T00:00:00Z"}),
    "a signature that is nonsense": lambda: kit(signature=b"nonsense"),
    "a deep signature": lambda: kit(signature=b"[" * 100_000),
    "an empty signature": lambda: kit(signature=b""),
}  # fmt: skip

#: What only those see that look into values.json, the signature or the tensors: listing an archive does not.
DATA: dict[str, Callable[[], Kit]] = {
    "a tensor with another digest": lambda: kit(digests={"model.a": HASH}),
    "a tensor without elements, with a digest": lambda: kit(digests={"model.z": HASH}),
    "a name of two lines": lambda: named("x\x1b[2J\na.tar.zst: sound (every hash)"),
    "a name that runs backwards": lambda: named("\u202etxet"),
    "other values": lambda: kit(values_text=lambda _: b""),
    "values that are a list": lambda: kit(values_text=lambda _: b"[]\n"),
    "values in another spelling": lambda: kit(values_text=lambda text: text.replace(b": ", b":")),
    "values with a key twice": lambda: kit(values_text=lambda text: text.replace(b"trainer.lr", b"trainer.step")),
    "deep values": lambda: value("[" * 50_000 + "]" * 50_000),
    "deep tuples": lambda: value('{"$tuple": [' * 5_000 + "]}" * 5_000),
    "deep tuples, within the parser's limit": lambda: value('{"$tuple": [' * 480 + "]}" * 480),
    "a value that would be evaluated": lambda: value('{"$eval": "1"}'),
    "a set of lists": lambda: value('{"$set": [[1]]}'),
    "a dict whose keys are lists": lambda: value('{"$dict": [[[1], 2]]}'),
    "a number that is none": lambda: value('{"$int": "zz"}'),
    "bytes that are none": lambda: value('{"$bytes": "A"}'),
    "text that is none": lambda: value('{"$str": "ff"}'),
    "NaN as JavaScript has it": lambda: value("NaN"),
    "a tensor of more elements than it has": lambda: value('{"$tensor": {"dtype": "float32", "shape": [4611686018427387904, 4], "data": ""}}'),
    "a value at a list's place": lambda: value("1", "trainer.x", '"trainer", ["x"]'),
    "a value of no component": lambda: value("1", "evil.x", '"evil", "x"'),
    "a value below a number": lambda: value("1", "5", "5"),
    "a value with the name of a tensor": lambda: value("1", "model.a", '"model", "a"'),
    "a value in a tensor": lambda: value("1", "model.a.b", '"model", "a", "b"'),
    "a value above tensors": lambda: value("1", "model", '"model"'),
    "other steps than the manifest's": lambda: kit(values={"trainer.step": 9}),
    "another step than that of the values": lambda: kit(step=8),
    "components said to be others": lambda: story(only=["trainer"]),
    "components said to be fewer": lambda: story(only=["model"]),
}  # fmt: skip


def test_the_builder_writes_what_an_export_writes(tmp_path: Path) -> None:
    for i, k in enumerate((kit(), kit(shuffle=True), replace(value("1"), step=None), retained())):
        path = build(tmp_path / "a.tar.zst", k)
        for words in (["audit", "verify"], ["audit", "verify", "--quick"], ["inspect"]):
            assert run(*words, path)[0] == 0
        assert run("convert", path, tmp_path / f"{i}.pt", "--to", "full", "-q")[0] == 0
        assert listed(path)["damaged"] is None
    for i, more in enumerate(([], ["--shuffle"], ["--retain", "7y", "--legal-hold", "case 5"])):
        path = tmp_path / f"of {i}" / "b.tar.zst"
        path.parent.mkdir()
        assert run("audit", "export", tmp_path / "0.pt", path, "-q", *more)[0] == 0
        data = path.read_bytes()
        assert altered(path).read_bytes() == data
        for words in (["verify", path], ["verify", "--quick", path], ["verify", path, "--deep"]):
            assert run("audit", *words, "-q")[0] == 0
        assert listed(path)["damaged"] is None


@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_every_command_refuses(name: str, tmp_path: Path) -> None:
    reads = ("restore", "convert")[list(EVERYWHERE).index(name) % 2]  # the second is the first without a key
    attack(build(tmp_path / "a.tar.zst", EVERYWHERE[name]()), reads)


@pytest.mark.parametrize("name", DATA)
def test_what_is_refused_by_who_looks(name: str, tmp_path: Path) -> None:
    attack(build(tmp_path / "a.tar.zst", DATA[name]()), lists=False)


@pytest.mark.parametrize("name", KEPT)
def test_a_retention_or_signature_that_is_none(name: str, tmp_path: Path) -> None:
    path = build(tmp_path / "a.tar.zst", KEPT[name]())
    attack(path, reads="", lists="signature" not in name)


HINTS: dict[str, dict[str, Any]] = {
    "tied, of another dtype": {"tied": {"model.floats": "model.n"}},
    "tied, of other bytes": {"tied": {"model.a": "model.big"}},
    "tied, to nothing": {"tied": {"model.x": "model.y", "model.a": "model.y"}},
    "tied to itself": {"tied": {"model.a": "model.a"}},
    "keys exchanged": {"origin": [[["model", "n"], ["model", "a"]], [["model", "a"], ["model", "n"]]]},
    "keys that lead out": {"origin": [[["model", "a"], ["..", "..", "x"]]]},
    "keys that collide": {"origin": [[["model", "a"], ["k"]], [["model", "n"], ["k"]]]},
    "a key that is another's": {"origin": [[["model", "a"], ["model", "n"]]]},
    "a key above others": {"origin": [[["model", "a"], ["model"]]]},
    "a key of a list that does not end": {"origin": [[["model", "a"], ["model", 10**12]]]},
    "keys of nothing": {"origin": [[["model", "nobody"], ["x"]]]},
    "two keys of one": {"origin": [[["model", "a"], ["b"]], [["model", "a"], ["c"]]]},
    "an order of others": {"order": ["model.a"] * 7},
}


@pytest.mark.parametrize("name", HINTS)
def test_hints_of_the_provenance_change_nothing(name: str, tmp_path: Path) -> None:
    k = kit(provenance=STORY | HINTS[name])
    k.tensors["model.floats"], k.data["model.floats"] = tensor("model.floats", "float64", 3), k.data["model.n"]
    path = build(tmp_path / "a.tar.zst", k)
    assert run("audit", "verify", path, "-q")[0] == 0
    for words in (["--to", "full"], ["--to", "dcp", "--world-size", 2]):
        out = tmp_path / ("out.pt" if "full" in words else "out")
        code, said = run("audit", "restore", path, out, *words, "-q")
        assert code == 0 or (code in {4, 7} and not out.exists()), said
        if code == 0:
            with open_checkpoint(out) as opened:
                have = {n: (t.dtype, t.shape) for n, t in opened.checkpoint.tensors.items()}
                assert have == {n: (t.dtype, t.shape) for n, t in k.tensors.items()}
                assert {n: opened.read(n) for n in have} == k.data
    assert set(os.listdir(tmp_path)) <= {"a.tar.zst", "out.pt", "out"}


#: Those that are the same in every header; names, sizes and times are compared with the manifest.
HEADER = {
    "mode": (100, 8), "uid": (108, 8), "gid": (116, 8), "type": (156, 1), "link": (157, 100), "magic": (257, 8), "user": (265, 32),
    "group": (297, 32), "major": (329, 8), "minor": (337, 8), "prefix": (345, 155), "rest": (500, 12),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADER)
def test_a_field_of_a_tar_header_has_one_spelling(name: str) -> None:
    """Whatever else it says, with a right checksum."""
    good = tarball.make_header(plan.VALUES, 1234, TIME)
    at, n = HEADER[name]
    rng = random.Random(name)
    others = {
        good[at : at + n].replace(b"\0", b" "),
        good[at : at + n].lstrip(b"0"),
        good[at : at + n - 1] + b"x",
        bytes(n),
        b" " * n,
        b"\xff" * n,
    }
    others |= {
        b"-1",
        b"+1",
        b"0x1",
        b"../x",
        b"7" * n,
        b"\x80" + bytes(n),
        *(bytes(rng.randrange(256) for _ in range(n)) for _ in range(200)),
    }
    for text in {text[:n].ljust(n, b"\0") for text in others} - {good[at : at + n]}:
        with pytest.raises((Corrupt, Unsafe)):
            tarball.parse_header(summed_again(good[:at] + text + good[at + n :]), "it")


# ------------------------------------------------------------------------------------------------ the file itself


def blocks(data: bytes, first: bytes = b"") -> bytes:
    """A frame of raw blocks, after those that are given."""
    out = first
    for at in range(0, len(data), 1 << 17):
        part = data[at : at + (1 << 17)]
        out += struct.pack("<I", len(part) << 3 | (at + len(part) == len(data)))[:3] + part
    return out


def skip(data: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50, len(data)) + data


def unfolded(f: Frame) -> bytes:
    data: bytes = zstandard.ZstdDecompressor().decompress(f.data)
    return data


def folded(data: bytes) -> Frame:
    return Frame(zstandard.ZstdCompressor(write_checksum=True).compress(data), len(data))


Files = Callable[[list[Frame], int], list[Frame]]


def other(new: Callable[[bytes, bytes, bytes], bytes], lies: int = 0) -> Files:
    """The largest frame is another: of its header, blocks and checksum."""

    def act(frames: list[Frame], k: int) -> list[Frame]:
        n = len(frame_format.make_frame_header(frames[k].length))
        data = frames[k].data
        frames[k] = Frame(new(data[:n], data[n:-4], data[-4:]), frames[k].length + lies)
        return frames

    return act


def window(*head: int) -> bytes:
    return struct.pack("<I", 0xFD2FB528) + bytes(head)


RLE = (struct.pack("<I", 131072 << 3 | 2)[:3] + b"\0") * 999 + struct.pack("<I", 131072 << 3 | 3)[:3] + b"\0"
#: {name: (what happens to the frames, bytes before the file, between frames and tables, after the file)}
FRAMES: dict[str, tuple[Files, bytes, bytes, bytes]] = {
    "a window of 2 GiB": (other(lambda h, b, c: window(0x04, 0xA8) + b + c), b"", b"", b""),
    "a window of 2 GiB, and a size": (other(lambda h, b, c: window(0x84, 0xA8) + h[5:] + b + c), b"", b"", b""),
    "a terabyte of content": (other(lambda h, b, c: window(0xE4) + struct.pack("<Q", 1 << 40) + b + c), b"", b"", b""),
    "no size of the content": (other(lambda h, b, c: window(0x04, 0x60) + b + c), b"", b"", b""),
    "no checksum": (other(lambda h, b, c: window(h[4] & ~4) + h[5:] + b), b"", b"", b""),
    "a dictionary": (other(lambda h, b, c: window(h[4] | 1, 7) + h[5:] + b + c), b"", b"", b""),
    "a size that is too small": (other(lambda h, b, c: frame_format.make_frame_header(1000) + b + c), b"", b"", b""),
    "a frame that decompresses to 128 MiB": (other(lambda h, b, c: h + RLE + c), b"", b"", b""),
    "a frame that ends within a block": (other(lambda h, b, c: h + b[:-100] + c), b"", b"", b""),
    "a frame with another checksum": (other(lambda h, b, c: h + b + bytes(4)), b"", b"", b""),
    "a block of a kind that is none": (other(lambda h, b, c: h + b"\x06\0\0" + b + c), b"", b"", b""),
    "bytes behind a frame": (other(lambda h, b, c: h + b + c + b"junk"), b"", b"", b""),
    "a skippable frame behind a frame": (other(lambda h, b, c: h + b + c + skip(b"hidden")), b"", b"", b""),
    "a skippable frame for a frame": (other(lambda h, b, c: skip(b"hidden")), b"", b"", b""),
    "a length that lies": (other(lambda h, b, c: h + b + c, 1), b"", b"", b""),
    "a length of 4 GiB": (lambda f, k: [*f[:k], Frame(f[k].data, (1 << 32) - 1), *f[k + 1 :]], b"", b"", b""),
    "two frames as one": (lambda f, k: [Frame(f[0].data + f[1].data, f[0].length + f[1].length), *f[2:]], b"", b"", b""),
    "a frame cut in two": (lambda f, k: [*f[:k], folded(unfolded(f[k])[:999]), folded(unfolded(f[k])[999:]), *f[k + 1 :]], b"", b"", b""),
    "an empty frame": (lambda f, k: [*f, folded(b"")], b"", b"", b""),
    "a frame more": (lambda f, k: [*f, folded(b"x")], b"", b"", b""),
    "frames exchanged": (lambda f, k: [f[1], f[0], *f[2:]], b"", b"", b""),
    "a frame twice": (lambda f, k: [*f[:2], *f[1:]], b"", b"", b""),
    "a frame less": (lambda f, k: [*f[:2], *f[3:]], b"", b"", b""),
    "no frame": (lambda f, k: [], b"", b"", b""),
    "bytes before": (lambda f, k: f, b"junk", b"", b""),
    "a skippable frame before": (lambda f, k: f, skip(b"hidden"), b"", b""),
    "bytes before the tables": (lambda f, k: f, b"", b"junk", b""),
    "a skippable frame before the tables": (lambda f, k: f, b"", skip(b"hidden"), b""),
    "bytes after": (lambda f, k: f, b"", b"", b"junk"),
    "a frame after": (lambda f, k: f, b"", b"", folded(b"x").data),
    "a skippable frame after": (lambda f, k: f, b"", b"", skip(b"hidden")),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_no_export_writes(name: str, tmp_path: Path) -> None:
    act, first, between, last = FRAMES[name]
    path = build(tmp_path / "a.tar.zst")
    frames = frames_of(path)
    most = max(range(len(frames)), key=lambda k: frames[k].length)
    assembled(path, act(frames, most), between)
    path.write_bytes(first + path.read_bytes() + last)
    attack(path, lists=False)


# ------------------------------------------------------------------------------------------------ flipped bits


def flips(path: Path, bits: Sequence[int]) -> None:
    """Every one of these bits, flipped, is found, and said to be where it is."""
    with Source(path.parent) as source:
        a = Archive(source, path.name)
        t, places = a.table, a.plan.places
    tables = t.offsets[-1] + t.sizes[-1]
    with path.open("r+b", buffering=0) as f:
        data = f.read()
        for bit in bits:
            at = bit // 8
            f.seek(at)
            f.write(bytes([data[at] ^ 1 << bit % 8]))
            with Source(path.parent) as source:
                found = verify_archive(source, path.name, jobs=1).findings
            f.seek(at)
            f.write(data[at : at + 1])
            hit = [x for x in found if x.file_start is not None and x.file_end and x.file_start <= at < x.file_end]
            assert hit, (bit, len(data), found)
            if at >= tables:
                continue
            k = bisect_right(t.offsets, at) - 1
            start, end = t.starts[k], t.starts[k] + t.lengths[k]
            want = {
                (
                    n,
                    p.member,
                    max(p.at, start) - p.at,
                    min(p.at + p.nbytes, end) - p.at,
                    p.offset + max(start - p.at, 0),
                )
                for n, p in places.items()
                if p.at < end and start < p.at + p.nbytes
            }
            assert {(x.tensor, x.member, x.tensor_start, x.tensor_end, x.start) for x in found if x.tensor} == want, bit
    with Source(path.parent) as source:
        assert verify_archive(source, path.name, jobs=1).findings == []


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.pem, mine.pub, other.pem and other.pub."""
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
        (folder / f"{name}.pem").write_bytes(private)
        public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


def state_of(path: Path, tensors: int = 5, seed: int = 1, rows: int = 300) -> Path:
    g = torch.Generator().manual_seed(seed)
    model = {f"l{i}.w": torch.randn(rows, 600, generator=g) for i in range(tensors)}
    model["half"], model["short"] = (
        torch.randn(400, 500, generator=g).bfloat16(),
        torch.randn(99, generator=g).bfloat16(),
    )
    torch.save({"model": model, "step": 3, "lr": 0.1}, path)
    return path


@pytest.mark.parametrize("how", [(), ("--shuffle",), ("--shuffle", "--sign-key")], ids=["plain", "planes", "signed"])
def test_a_flipped_bit_anywhere(how: tuple[str, ...], tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "a.tar.zst"
    more = [*how, keys / "mine.pem"] if "--sign-key" in how else how
    words = ["audit", "export", state_of(tmp_path / "s.pt"), path, "--member-size", "1MiB", "--no-ledger", "-q", *more]
    assert run(*words)[0] == 0
    with Source(tmp_path) as source:
        t = Archive(source, path.name).table
    end, size = t.offsets[-1] + t.sizes[-1], path.stat().st_size
    dice = random.Random(len(how))
    flips(
        path,
        [
            dice.randrange(a * 8, b * 8)
            for a, b, n in ((0, end, 80), (t.offsets[-3], end, 20), (end, size, 30))
            for _ in range(n)
        ],
    )


def test_every_byte_of_a_small_archive(tmp_path: Path) -> None:
    k = Kit({"model.a": tensor("model.a", "float32", 3)}, {"model.a": noise(12, 1)})
    path = build(tmp_path / "a.tar.zst", k)
    every = [8 * at + at % 8 for at in range(path.stat().st_size)]
    flips(path, sample("bytes of a small archive", every, every[::5]))


# ------------------------------------------------------------------------------------------------ altered consistently


@dataclass
class Shop:
    """A store with an archive of a state, in a ledger, signed; and the state."""

    live: Path
    path: Path
    root: str
    keys: Path

    def verify(self, *words: object) -> int:
        return run("audit", "verify", self.path, "-q", "--no-ledger", *words)[0]


@pytest.fixture
def shop(tmp_path: Path, keys: Path) -> Shop:
    live, path = state_of(tmp_path / "s.pt", 2), tmp_path / "store" / "a.tar.zst"
    path.parent.mkdir()
    assert run("audit", "export", live, path, "-q", "--sign-key", keys / "mine.pem")[0] == 0
    out = Shop(live, path, listed(path)["facts"]["merkle_root"], keys)
    told = (["--deep"], ["--root", out.root], ["--against", live], ["--public-key", keys / "mine.pub"])
    assert [out.verify(*words) for words in told] == [0, 0, 0, 0]
    return out


def other_data(k: Kit) -> None:
    k.data["model.short"] = bytes(len(k.data["model.short"]))


def other_value(k: Kit) -> None:
    held = (k.values_text or bytes)(b"")
    assert b"0.1" in held
    k.values_text = lambda _: held.replace(b"0.1", b"9.9")


def other_meta(k: Kit) -> None:
    k.provenance |= {"meta": {"who": "somebody else"}}


def less(k: Kit) -> None:
    del k.tensors["model.short"], k.data["model.short"]
    k.grouped = [[n for n in names if n != "model.short"] for names in k.grouped or []]


def lies_of_its_parts(k: Kit) -> None:
    other_data(k)
    k.provenance |= {"only": ["trainer"]}


def values_alone(k: Kit) -> None:
    k.tensors, k.data, k.grouped = {}, {}, []
    held = {name.partition(".")[0] for name in json.loads((k.values_text or bytes)(b""))}
    k.provenance |= {"only": sorted(held, key=COMPONENTS.index), "order": [], "tied": {}, "origin": []}


@pytest.mark.parametrize(
    ("act", "by_root", "by_live"),
    [(other_data, 5, 5), (less, 5, 5), (other_value, 0, 5), (other_meta, 0, 0), (lies_of_its_parts, 5, 5)],
)
def test_what_is_altered_everywhere_is_told_by_what_lies_elsewhere(
    shop: Shop, act: Callable[[Kit], None], by_root: int, by_live: int
) -> None:
    k = kit_of(shop.path)
    act(k)
    build(shop.path, k)
    assert shop.verify() in {4, 5}  # by the ledger beside it
    assert shop.verify("--deep") in {4, 5}
    (shop.path.parent / "ledger.jsonl").unlink()
    if act is lies_of_its_parts:  # which the archive itself contradicts
        assert shop.verify() == 4
    else:
        assert shop.verify() == 0
        assert shop.verify("--root", shop.root) == by_root
        assert shop.verify("--against", shop.live) == by_live
    assert shop.verify("--public-key", shop.keys / "mine.pub") in {4, 5}


def test_an_archive_of_less_says_so_when_compared(shop: Shop) -> None:
    k = kit_of(shop.path)
    values_alone(k)
    build(shop.path, k)
    assert (shop.verify(), shop.verify("--deep")) == (5, 5)
    (shop.path.parent / "ledger.jsonl").unlink()
    assert shop.verify() == 0
    code, said = run("audit", "verify", shop.path, "--against", shop.live)
    assert code == 5 or "trainer" in said  # what was compared, and that it was not all


def test_signatures(shop: Shop, tmp_path: Path) -> None:
    mine, others = shop.keys / "mine.pub", shop.keys / "other.pub"
    assert shop.verify("--quick", "--public-key", mine) == 0
    assert shop.verify("--public-key", others) == 5
    second = tmp_path / "b.tar.zst"
    assert (
        run("audit", "export", state_of(tmp_path / "t.pt", 2, 9), second, "-q", "--sign-key", shop.keys / "mine.pem")[0]
        == 0
    )
    good = shop.path.read_bytes()
    altered(shop.path, signature=kit_of(second).signature)
    assert (shop.verify("--public-key", mine), shop.verify("--quick", "--public-key", mine)) == (5, 5)
    shop.path.write_bytes(good)
    altered(shop.path, signature=None)
    assert shop.verify("--public-key", mine) == 5
    bundle = json.loads(kit_of(second).signature or b"")
    for part, key, junk in [
        ("dsseEnvelope", "payload", "AAAA"), ("dsseEnvelope", "payload", 5), ("dsseEnvelope", "signatures", []),
        ("dsseEnvelope", "signatures", [{"sig": "AAAA"}]), ("dsseEnvelope", "payloadType", "x"),
        ("verificationMaterial", "publicKey", {"hint": ["x"]}), ("verificationMaterial", "publicKey", {"hint": "ab"}),
        ("verificationMaterial", "publicKey", None),
    ]:  # fmt: skip
        text = json.dumps(bundle | {part: bundle[part] | {key: junk}}).encode()
        build(tmp_path / "c.tar.zst", replace(kit_of(second), signature=text))
        assert run("audit", "verify", tmp_path / "c.tar.zst", "--public-key", mine, "-q")[0] in {3, 4, 5, 7}, junk


# The attacks of a hostile tester. Each archive is written anew, in the form that an export gives it.


def bit_flipped(path: Path, _: Shop) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 8
    path.write_bytes(data)


def cut_in_half(path: Path, _: Shop) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_byte_more(path: Path, _: Shop) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def tensor_alone(path: Path, _: Shop) -> None:
    k = kit_of(path)
    with Source(path.parent) as source:
        k.digests = {"model.short": Archive(source, path.name).manifest.digests["model.short"]}
    other_data(k)
    build(path, k)


def tensor_and_every_hash(path: Path, _: Shop) -> None:
    k = kit_of(path)
    other_data(k)
    build(path, k)


def value_and_sums(path: Path, _: Shop) -> None:
    k = kit_of(path)
    with Source(path.parent) as source:
        was = Archive(source, path.name).manifest.hashes[plan.VALUES]
    other_value(k)
    held = (k.values_text or bytes)(b"")
    k.manifest = lambda text: text.replace(records.sha256_hex(held).encode(), was[1].encode())
    build(path, k)


def value_and_every_hash(path: Path, _: Shop) -> None:
    k = kit_of(path)
    other_value(k)
    build(path, k)


def another_step(path: Path, _: Shop) -> None:
    altered(path, step=4)


def retention_shorter(path: Path, _: Shop) -> None:
    said = json.loads(kit_of(path).retention or b"") | {"retain_until": "2026-01-03T00:00:00Z", "retain": "1d"}
    altered(path, retention=json.dumps(said, indent=1).encode() + b"\n")


def retention_removed(path: Path, _: Shop) -> None:
    altered(path, retention=None)


def provenance_edited(path: Path, _: Shop) -> None:
    altered(path, provenance=kit_of(path).provenance | {"meta": {"who": "somebody else"}})


def signature_stripped(path: Path, _: Shop) -> None:
    altered(path, signature=None)


def signed_by_another(path: Path, shop: Shop) -> None:
    with Source(path.parent) as source:
        files = Archive(source, path.name).signed_files()
    altered(path, signature=signing.sign_files(files, path.name, key=str(shop.keys / "other.pem")))


def tensor_and_no_signature(path: Path, shop: Shop) -> None:
    tensor_and_every_hash(path, shop)
    signature_stripped(path, shop)


def tensor_and_another_signature(path: Path, shop: Shop) -> None:
    tensor_and_every_hash(path, shop)
    signed_by_another(path, shop)


def rolled_back(path: Path, _: Shop) -> None:
    shutil.copy(path.with_name("old.tar.zst"), path)


#: (attack, exit code of a plain verify that has neither ledger nor key, with a key alone)
ATTACKS = [
    (bit_flipped, 4, 4), (cut_in_half, 4, 4), (a_byte_more, 4, 4), (tensor_alone, 4, 4), (value_and_sums, 4, 4),
    (another_step, 4, 4), (value_and_every_hash, 0, 5), (tensor_and_every_hash, 0, 5), (retention_shorter, 0, 5),
    (retention_removed, 0, 5), (provenance_edited, 0, 5), (signature_stripped, 0, 5), (signed_by_another, 0, 5),
    (tensor_and_no_signature, 0, 5), (tensor_and_another_signature, 0, 5), (rolled_back, 0, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Shop:
    """A store of two signed archives, old and a, with retention and a ledger."""
    folder = tmp_path_factory.mktemp("market")
    live, store = state_of(folder / "s.pt", 1, 1, 20), folder / "store"
    store.mkdir()
    more = ["-q", "--sign-key", keys / "mine.pem", "--retain", "7y"]
    assert run("audit", "export", state_of(folder / "old.pt", 1, 2, 20), store / "old.tar.zst", *more)[0] == 0
    assert run("audit", "export", live, store / "a.tar.zst", *more)[0] == 0
    return Shop(live, store / "a.tar.zst", "", keys)


@pytest.mark.parametrize(("act", "alone", "by_key"), ATTACKS)
def test_the_table_of_attacks(
    act: Callable[[Path, Shop], None], alone: int, by_key: int, market: Shop, tmp_path: Path
) -> None:
    """Where there is a ledger, every depth finds what was altered. What it says without one is in docs/how-to/archive.md."""
    store = shutil.copytree(market.path.parent, tmp_path / "store")
    path, key = store / "a.tar.zst", market.keys / "mine.pub"
    for words in ([], ["--quick"], ["--deep"], ["--public-key", key]):
        code, said = run("audit", "verify", path, *words)
        assert code == 0 and "recorded on" in said, said
    act(path, market)
    want = 4 if alone == 4 else 5
    for words in ([], ["--deep"], ["--public-key", key], ["--deep", "--public-key", key], ["--no-ledger"]):
        assert run("audit", "verify", path, "-q", *words)[0] == want, words
    if alone == 0:  # what a look at the structure alone shows as well
        assert run("audit", "verify", path, "-q", "--quick")[0] == 5
        assert listed(path)["ledger"] == "differs" and listed(path)["verified"] is None
    assert not any(e["sound"] for e in ledger.read_entries(str(store))[6:] if e["event"] == "verify")
    (store / "ledger.jsonl").unlink()
    assert run("audit", "verify", path, "-q")[0] == alone
    assert run("audit", "verify", path, "-q", "--public-key", key)[0] == by_key


def test_words_of_a_verdict(tmp_path: Path) -> None:
    """`audit verify` does not send people to `audit verify`, and counts like people do."""
    path = build(tmp_path / "a.tar.zst")
    good = path.read_bytes()
    with Source(tmp_path) as source:
        table = frame_format.read_frame_table(source, path.name)
    at = table.offsets[-1] + table.sizes[-1] + 20  # in the table of CRC32s
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    code, said = run("audit", "verify", path, "-q")
    assert code == 4 and "table" in said and "audit verify" not in said
    assert "run `ckpttool audit verify` to see what is left of it" in refused("inspect", path)
    flips = bytearray(good)
    seen = set()
    for k in range(3):
        flips[table.offsets[k] + table.sizes[k] // 2] ^= 1
        path.write_bytes(flips)
        _, said = run("audit", "verify", path, "-q")
        found = re.search(r"\(and (\d+) more (findings?)\)", said)
        seen.add(found and (found[1] == "1", found[2]))
    assert (True, "finding") in seen and (False, "findings") in seen and len(seen - {None}) == 2


def test_what_the_command_line_says_without_a_ledger(market: Shop, tmp_path: Path) -> None:
    store = shutil.copytree(market.path.parent, tmp_path / "store")
    assert run("audit", "hold", store / "a.tar.zst", "case 9")[0] == 0
    (store / "ledger.jsonl").unlink()
    code, said = run("audit", "list", store)
    assert code == 0 and "has no ledger" in said and "case 9" in said
    code, said = run("audit", "verify", store / "a.tar.zst")
    assert code == 0 and "ledger      none beside it" in said
    assert run("audit", "ledger", "verify", store)[0] == 4
    for more in ([], ["--dry-run"], ["--json"]):
        code, said = run("audit", "prune", store, "--keep-every", 1000, *more)
        assert code == 4 and "legal hold" in said and "--no-ledger" in said
    assert {p.name for p in store.iterdir()} == {"a.tar.zst", "a.tar.zst.hold.json", "old.tar.zst"}
    code, said = run("audit", "prune", store, "--keep-every", 1000, "--no-ledger")  # both are under retention
    assert code == 0 and "under legal hold: case 9" in said and "0 archives" in said


def test_an_archive_of_another_name_is_told_and_one_of_nowhere_too(market: Shop, tmp_path: Path) -> None:
    store = shutil.copytree(market.path.parent, tmp_path / "store")
    (store / "a.tar.zst").rename(store / "moved.tar.zst")
    code, said = run("audit", "verify", store / "moved.tar.zst")
    assert code == 0 and "recorded as a.tar.zst by line 2" in said
    assert listed(store / "moved.tar.zst")["ledger"] == "renamed"
    build(store / "stray.tar.zst")
    code, said = run("audit", "verify", store / "stray.tar.zst")
    assert code == 0 and "does not know this archive" in said
    assert listed(store / "stray.tar.zst")["ledger"] == "unknown"
    assert listed(store / "old.tar.zst")["ledger"] == "match" and not listed(store / "old.tar.zst")["warnings"]
    for name in ("moved", "stray"):
        assert run("audit", "ledger", "add", store / f"{name}.tar.zst")[0] == 0
        assert run("audit", "verify", store / f"{name}.tar.zst", "--deep", "-q")[0] == 0
    lines = len(ledger.read_entries(str(store)))
    assert (
        run("audit", "ledger", "add", store / "stray.tar.zst")[0] == 0 and len(ledger.read_entries(str(store))) == lines
    )
    shutil.copy(store / "old.tar.zst", store / "stray.tar.zst")
    assert run("audit", "ledger", "add", store / "stray.tar.zst")[0] == 5


def nightly() -> str:
    """The script of docs/how-to/archive.md."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "archive.md").read_text(encoding="utf-8")
    return text.partition("cat > nightly.sh <<'END'\n")[2].partition("\nEND\n")[0]


def ledger_cut(path: Path, _: Shop) -> None:
    book = path.with_name("ledger.jsonl")
    book.write_bytes(b"".join(book.read_bytes().splitlines(True)[:1]))


def rolled_back_and_ledger_cut(path: Path, shop: Shop) -> None:
    rolled_back(path, shop)
    ledger_cut(path, shop)


def no_change(path: Path, shop: Shop) -> None:
    pass


def ledger_gone(path: Path, _: Shop) -> None:
    path.with_name("ledger.jsonl").unlink()


def test_a_rollback_with_the_ledger_cut_shows_by_the_head(market: Shop, tmp_path: Path) -> None:
    """What docs/how-to/archive.md says of the last row of its table."""
    store = shutil.copytree(market.path.parent, tmp_path / "store")
    head = ledger.verify_chain(str(store))["head"]
    rolled_back_and_ledger_cut(store / "a.tar.zst", market)
    code, said = run("audit", "verify", store / "a.tar.zst", "--public-key", market.keys / "mine.pub", "--no-ledger")
    assert code == 0 and "recorded as old.tar.zst by line 1" in said
    assert run("audit", "verify", store / "a.tar.zst", "--deep", "--no-ledger")[0] == 2
    assert run("audit", "ledger", "verify", store, "--head", head)[0] == 5


@pytest.mark.parametrize(
    ("act", "want"),
    [(rolled_back, 5), (tensor_and_every_hash, 5), (signature_stripped, 5), (ledger_cut, 5), (ledger_gone, 4),
     (no_change, 0)],
)  # fmt: skip
def test_the_nightly_check_of_the_docs(
    act: Callable[[Path, Shop], None], want: int, market: Shop, tmp_path: Path
) -> None:
    store = shutil.copytree(market.path.parent, tmp_path / "store")
    (tmp_path / "nightly.sh").write_text(nightly())
    (tmp_path / "head.txt").write_text(str(ledger.verify_chain(str(store))["head"]) + "\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    act(store / "a.tar.zst", market)
    before = sorted(p.name for p in store.iterdir())
    done = subprocess.run(
        ["sh", "nightly.sh", "store", "head.txt", market.keys / "mine.pub"],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == want, done.stderr
    assert sorted(p.name for p in store.iterdir()) == before
    if want == 0:
        assert (tmp_path / "head.txt").read_text().strip() == ledger.verify_chain(str(store))["head"]


def test_a_ciphertext_with_another_sidecar(tmp_path: Path) -> None:
    pyrage = pytest.importorskip("pyrage")
    from ckpttool.audit import sidecar

    path = tmp_path / "a.tar.zst.age"
    recipient = pyrage.x25519.Identity.generate().to_public()
    words = ["audit", "export", state_of(tmp_path / "s.pt", 1), path, "-q", "--encrypt-to", recipient, "--retain", "1d"]
    assert run(*words)[0] == 0
    beside = tmp_path / "a.tar.zst.age.json"
    good = json.loads(beside.read_text())
    data = path.read_bytes()
    path.write_bytes(data[:-500] + bytes(500))
    assert run("audit", "verify", path, "-q", "--no-ledger")[0] == 4
    with Source(tmp_path) as source:
        found = sidecar.hash_ciphertext(source, path.name, lambda *_: None)
    beside.write_text(json.dumps(good | {"ciphertext": found}))
    assert (
        run("audit", "verify", path, "-q", "--deep", "--no-ledger")[0] == 5
    )  # the ledger has the hash of what was exported
    path.write_bytes(data)
    for key, junk in [
        ("created", 5), ("step", "x"), ("legal_hold", ["a"]), ("legal_hold", 5), ("meta", "x"), ("meta", {"run": [1]}),
        ("components", 5), ("components", [5]), ("retain_until", 5), ("merkle_root", [1]),
        ("manifest_sha256", None), ("tensors", "x"), ("signed", "x"), ("more", 1), ("layout", ["[/x]"]),
    ]:  # fmt: skip
        beside.write_text(json.dumps(good | {"archive": good["archive"] | {key: junk}}))
        assert listed(path)["damaged"], key
        assert listed(path)["retain_until"] == good["archive"]["retain_until"]
        assert run("audit", "list", tmp_path)[0] == 0
        assert json.loads(run("audit", "prune", tmp_path, "--keep-every", 1000, "--json")[1])["deleted"] == []
    for text in (
        json.dumps(good | {"ciphertext": {"blocks": 5}}),
        json.dumps(good | {"ciphertext": 5}),
        "[" * 100_000,
        "{}",
    ):
        beside.write_text(text)
        assert run("audit", "verify", path, "-q", "--no-ledger")[0] in REFUSALS


def test_a_header_of_age_with_thousands_of_recipients(tmp_path: Path) -> None:
    """pyrage's time grows with the square of their number: 15 s of CPU for a header of 1 MB."""
    pyrage = pytest.importorskip("pyrage")
    key, path = pyrage.x25519.Identity.generate(), tmp_path / "a.tar.zst.age"
    (tmp_path / "key").write_text(f"{key}\n")
    data = pyrage.encrypt(b"x" * 1000, [key.to_public()])
    end = data.index(b"\n--- ")
    path.write_bytes(data[:end] + (b"\n-> X25519 " + b"A" * 43 + b"\n" + b"A" * 43) * 10_000 + data[end:])
    began = time.process_time()
    said = refused("audit", "restore", path, tmp_path / "o.pt", "--to", "full", "--identity", tmp_path / "key", "-q")
    assert "does not end within 262144 bytes" in said and time.process_time() - began < 2
    (tmp_path / "all").write_text(f"{key.to_public()}\n" * 3_000)
    state = state_of(tmp_path / "s.pt", 1, 1, 20)
    code, said = run("audit", "export", state, tmp_path / "b.tar.zst.age", "--encrypt-to", tmp_path / "all", "-q")
    assert code == 2 and "3000 recipients are too many" in said


# ------------------------------------------------------------------------------------------------ replays


def test_what_the_ledger_retains_is_never_pruned(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    a, b, z = (store / f"{n}.tar.zst" for n in "abz")
    assert (
        run(
            "audit",
            "export",
            state_of(tmp_path / "1.pt", 1, 1, 20),
            a,
            "-q",
            "--retain",
            "7y",
            "--legal-hold",
            "see [/x]",
        )[0]
        == 0
    )
    assert run("audit", "export", state_of(tmp_path / "2.pt", 1, 2, 20), b, "-q", "--retain", "1d")[0] == 0
    good, later = a.read_bytes(), b.read_bytes()
    soon = {
        "schema": "ckpttool.retention/1",
        "retain_until": "2026-01-03T00:00:00Z",
        "retain": "1d",
        "legal_hold": None,
    }

    def deleted() -> list[str]:
        assert run("audit", "list", store)[0] == 0
        code, said = run("audit", "prune", store, "--keep-every", 1000, "--json")
        assert code == 0
        return list(json.loads(said)["deleted"])

    assert deleted() == []
    altered(a, retention=None)
    assert deleted() == []
    altered(a, retention=json.dumps(soon, indent=1).encode() + b"\n")
    assert deleted() == []
    a.rename(z)  # under another name
    assert deleted() == []
    altered(z, provenance=kit_of(z).provenance | {"created": "2020-01-01T00:00:00Z"})  # and of another time
    assert deleted() == []
    z.unlink()
    a.write_bytes(later)  # the second in the place of the first
    assert deleted() == []
    a.unlink()
    b.write_bytes(good)  # the first in the place of the second, whose retention ends sooner
    altered(b, retention=None)
    assert deleted() == []
    assert run("audit", "verify", b, "-q", "--deep")[0] == 5
    assert {p.name for p in store.iterdir()} == {"b.tar.zst", "ledger.jsonl"}


@pytest.mark.parametrize("words", [["audit", "export"], ["convert", "--to", "audit"]], ids=["export", "convert"])
def test_nothing_replaces_what_is_held(words: list[str], tmp_path: Path) -> None:
    state, a = state_of(tmp_path / "1.pt", 1, 1, 20), tmp_path / "a.tar.zst"
    assert run("audit", "export", state, a, "-q", "--legal-hold", "case")[0] == 0
    data = a.read_bytes()
    code, said = run(words[0], *words[1:], state, a, "--force", "-q")
    assert code in {2, 6} and "hold" in said
    assert a.read_bytes() == data


@pytest.mark.parametrize(
    "facts",
    [
        {"event": "release", "released": 5}, {"event": "release", "released": [[1]]}, {"event": "export", "retain_until": 5},
        {"event": "export", "legal_hold": ["x"]}, {"event": "export", "legal_hold": "[/x]"},
        {"event": "hold", "reason": {"a": 1}}, {"event": "hold", "reason": "\x1b[2J"}, {"event": "verify", "sound": 5},
        {"event": "export", "merkle_root": 5}, {"event": "nothing"}, {"event": "export", "manifest_sha256": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_lines_of_a_ledger_that_no_run_writes(facts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    assert run("audit", "export", state_of(tmp_path / "1.pt", 1, 1, 20), path, "-q", "--retain", "7y")[0] == 0
    first = json.loads((tmp_path / "ledger.jsonl").read_text())
    more = {k: first[k] for k in ("manifest_sha256", "created") if k not in facts}
    ledger.append_entry(
        str(tmp_path), facts["event"], path.name, **{k: v for k, v in facts.items() if k != "event"}, **more
    )
    for words in (["list", tmp_path], ["prune", tmp_path, "--keep-every", 9999], ["ledger", "show", tmp_path]):
        assert run("audit", *words)[0] in REFUSALS | {0}
    assert run("audit", "verify", path, "--deep", "-q", "--no-ledger")[0] in REFUSALS | {0}
    assert path.exists()


# ------------------------------------------------------------------------------------------------ without bound

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from ckpttool.cli import main as cli
try:
    cli.main()
finally:
    with open("/proc/self/status") as f:
        print(next(line for line in f if line.startswith("VmHWM")).split()[1], file=sys.stderr)
"""


def limited(*words: object) -> str:
    """What a command says that ends soon, in little memory, with a refusal."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    # a process forked from this one would begin with this one's peak of memory
    start = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", LIMITED, *map(str, words)]
    done = subprocess.run(start, capture_output=True, text=True, check=False, env=env)
    *said, peak = done.stderr.splitlines()
    assert done.returncode in REFUSALS, (done.returncode, done.stderr[-500:])
    assert int(peak) < 700 << 10, f"{int(peak) >> 10} MiB"
    return "\n".join(said)


def many_members(path: Path) -> None:
    """40,000 members of nothing."""
    with path.open("wb") as f:
        w = FrameWriter(f.write, [SplitPoint(0, 1, False)], [], level=1, jobs=1)
        w.append(tarball.make_header(plan.README, 0, 0))
        for i in range(40_000):
            w.append(tarball.make_header(f"tensors-{i + 1:05d}.safetensors", 0, 0))
        w.append(tarball.END)
        w.finish()
        w.close()


def many_tables(path: Path) -> None:
    """Bytes that seem to begin a table of half of the file, every 32."""
    count = (1 << 20) - 9
    unit = struct.pack("<II8sI", 0x184D2A5C, 4 * count + 16, b"CKPTCRC1", count)
    path.write_bytes(bytes(8) + (unit + bytes(12)) * (1 << 18))


BOMBS: dict[str, Callable[[Path], object]] = {
    "100 MB of lists in a manifest": lambda p: build(p, kit(manifest=lambda _: b'{"tensors": [' + b"[]," * 33_000_000 + b"0]}")),
    "100 MB of lists in values.json": lambda p: build(p, value("[" + "[]," * 33_000_000 + "0]")),
    "100 MB of lists in a provenance": lambda p: build(p, kit(provenance_text=lambda t: t.replace(b"{}", b"[" + b"[]," * 33_000_000 + b"0]"))),
    "50 million sums": lambda p: build(p, summed(lambda _: b"a\n" * 50_000_000)),
    "40,000 members": many_members,
    "tables in tables": many_tables,
    "a hole": lambda p: (p.touch(), os.truncate(p, 1 << 26)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_would_take_much(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    BOMBS[name](path)
    limited("audit", "verify", path, "-q")


def test_attacks_cause_no_event_by_which_a_process_acts(tmp_path: Path, canary: Path) -> None:
    """Objects of values.json are never made, whatever they say that they are; no other archive makes anything happen."""
    acts = f"open({str(canary)!r}, 'w').close()"
    calls = [
        {"$object": {"class": ["builtins", "exec"], "call": True, "args": [acts]}},
        {"$object": {"class": ["builtins", "eval"], "state": acts}},
        {"$object": {"class": ["os", "system"], "call": True, "args": [f"touch {canary}"]}},
        {
            "$object": {
                "class": ["collections", "OrderedDict"],
                "call": True,
                "dict": [["a", {"$global": ["os", "system"]}]],
            }
        },
        {"$global": ["os", "system"]},
    ]
    kits = [value(json.dumps(c)) for c in calls] + [make() for make in list((EVERYWHERE | DATA).values())[::3]]
    paths = []
    for i, k in enumerate(kits):
        (tmp_path / str(i)).mkdir()
        paths.append(str(build(tmp_path / str(i) / "a.tar.zst", k)))
    home = tmp_path / "home"
    home.mkdir()
    script = """
        import json, os, sys
        import ckpttool, ckpttool.layouts
        from ckpttool.audit.verify_in_store import verify
        from ckpttool.audit.archive_store import list_archives
        ckpttool.layouts.layouts()
        home, paths = sys.argv[1], json.load(sys.stdin)
        for first in (True, False):  # what is imported lazily is imported in the first round
            events, listening = [], False
            def hook(event, args):
                if not listening:
                    return
                if event == "open" and (set(args[1] or "") & set("wax+") or args[2] & (os.O_WRONLY | os.O_RDWR)):
                    if not str(args[0]).startswith(home):
                        events.append([event, str(args)])
                elif event in ("exec", "compile", "import", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen",
                               "pickle.find_class", "marshal.loads", "socket.connect", "os.symlink", "os.link", "os.chmod"):
                    events.append([event, str(args)[:200]])
                elif event in ("os.rename", "os.remove", "os.mkdir", "shutil.rmtree"):
                    inside = event == "os.remove" and args[1] != -1  # of a folder that shutil.rmtree was given
                    if not inside and not str(args[0]).startswith(home):
                        events.append([event, str(args)[:200]])
            if first:
                sys.addaudithook(lambda e, a: hook(e, a))
            for i, path in enumerate(paths):
                listening = not first
                for act in (
                    lambda: verify(path), lambda: ckpttool.inspect(path), lambda: list_archives(os.path.dirname(path)),
                    lambda: ckpttool.convert(path, f"{home}/{first}{i}.pt", to="full", drop=True),
                    lambda: ckpttool.convert(path, f"{home}/{first}{i}", to="dcp", world_size=2, drop=True),
                ):
                    try:
                        act()
                    except ckpttool.CkpttoolError:
                        pass
                listening = False
        print(json.dumps(events))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(home)], input=json.dumps(paths), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------ interrupted, raced

JOURNALLED = """
from ckpttool.cli import main as cli
from ckpttool.engine.copy import fill
fill._JOURNAL_BYTES, fill._JOURNAL_SECONDS = 1, 0
cli.main()
"""


def test_killed_at_any_time(tmp_path: Path) -> None:
    state = state_of(tmp_path / "s.pt", 16, rows=1000)
    words = [
        "audit",
        "export",
        str(state),
        "a.tar.zst",
        "--member-size",
        "2MB",
        "--shuffle",
        "--reproducible",
        "-q",
        "--json",
    ]

    def start(folder: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", JOURNALLED, *words],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def finished(folder: Path) -> Any:
        process = start(folder)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return json.loads(out)

    whole, folder = tmp_path / "whole", tmp_path / "k"
    whole.mkdir()
    began = time.monotonic()
    finished(whole)
    takes = time.monotonic() - began
    want = (whole / "a.tar.zst").read_bytes()
    dice, continued = random.Random(4), 0
    for k in range(6):
        folder.mkdir()
        process = start(folder)
        if k % 2:  # at a moment of which something is left to continue
            while process.poll() is None and not any(b'"done"' in p.read_bytes() for p in folder.glob(".*/journal")):
                time.sleep(0.005)
        else:
            time.sleep(dice.uniform(0.5, 0.95) * takes if k else 0.4 * takes)
        process.kill()
        process.communicate()
        left = {"a.tar.zst", "ledger.jsonl"}
        if not (folder / "a.tar.zst").exists():
            continued += any("continued" in n for n in finished(folder)["notes"])
        else:  # killed after the rename, and perhaps before the lock's file was removed
            left |= {".a.tar.zst.partial-lock"}
        assert (folder / "a.tar.zst").read_bytes() == want
        assert {p.name for p in folder.iterdir()} <= left
        shutil.rmtree(folder)
    assert continued


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_call_that_fails(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "_JOURNAL_BYTES", 1)
    how = ArchiveOptions(reproducible=True, shuffle=True, member_bytes=1 << 20)
    state = str(state_of(tmp_path / "s.pt", 3))
    want, dst = tmp_path / "want.tar.zst", tmp_path / "k" / "want.tar.zst"
    dst.parent.mkdir()
    export(state, str(want), how, in_ledger=False)
    failed, n, threads = 0, 1, threading.active_count()
    names = ["write", "pwrite", "fsync", "mkdir", "ftruncate", *(["preadv", "pread"] if error == errno.EIO else [])]
    while True:
        count = 0

        def step_count(real: Any, n: int = n) -> Any:
            def call(*args: Any, **how: Any) -> Any:
                nonlocal count
                count += 1
                if count == n:
                    raise OSError(error, os.strerror(error))
                return real(*args, **how)

            return call

        with monkeypatch.context() as m:
            for name in names:
                m.setattr(os, name, step_count(getattr(os, name)))
            try:
                export(state, str(dst), how, in_ledger=False)
            except CkpttoolError:
                failed += 1
        if count < n:
            break
        if not dst.exists():
            export(state, str(dst), how, in_ledger=False)
        assert dst.read_bytes() == want.read_bytes(), n
        assert threading.active_count() == threads
        dst.unlink()
        n += 3
    assert failed > 5


def replaced(path: Path, by: Path) -> None:
    shutil.copy(by, path.parent / "new")
    os.replace(path.parent / "new", path)


def overwritten(path: Path, by: Path) -> None:
    with path.open("r+b") as f:
        f.write(by.read_bytes())


def cut_off(path: Path, by: Path) -> None:
    os.truncate(path, 1000)


def removed(path: Path, by: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("act", [replaced, overwritten, cut_off, removed])
def test_what_changes_while_it_is_read(act: Callable[[Path, Path], None], tmp_path: Path) -> None:
    first, second = state_of(tmp_path / "1.pt", 3, 1), state_of(tmp_path / "2.pt", 3, 2)
    for p in (first, second):
        export(str(p), str(p.with_suffix(".tar.zst")), ArchiveOptions(), in_ledger=False)
    home = tmp_path / "home"
    home.mkdir()

    def meanwhile(path: Path, by: Path) -> Callable[[str, int, int], None]:
        done: list[str] = []

        def hook(what: str, n: int, total: int) -> None:
            if what in ("copy", "verify") and 2 * n >= total and not done:
                done.append(what)
                act(path, by)

        return hook

    victim, victim2 = tmp_path / "v.pt", tmp_path / "v.tar.zst"
    shutil.copy(first, victim)
    with pytest.raises(Corrupt):
        export(
            str(victim), str(home / "a.tar.zst"), ArchiveOptions(), in_ledger=False, progress=meanwhile(victim, second)
        )
    shutil.copy(first.with_suffix(".tar.zst"), victim2)
    hook = meanwhile(victim2, second.with_suffix(".tar.zst"))
    with pytest.raises(Corrupt):
        restore(str(victim2), home / "d", to="dcp", world_size=2, progress=hook)
    shutil.copy(first.with_suffix(".tar.zst"), victim2)
    try:
        assert verify(
            str(victim2), in_ledger=False, progress=meanwhile(victim2, second.with_suffix(".tar.zst"))
        ).findings
    except Corrupt:
        pass
    assert list(home.iterdir()) == []


# ------------------------------------------------------------------------------------------------ what makes no sense


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    state, a = state_of(tmp_path / "s.pt", 1, 1, 20), tmp_path / "a.tar.zst"
    nowhere = tmp_path / "nowhere"
    for more in (
        ["--meta", "x"], ["--meta", "=x"], ["--meta", "a=1", "--meta", "a=2"], ["--retain", "2001-01-01"],
        ["--retain", "0d"], ["--retain", "soon"], ["--retain", "999999y"], ["--retain", ""], ["--level", "0"],
        ["--level", "20"], ["--level", "x"], ["--member-size", "-1"], ["--member-size", "nan"], ["--member-size", "1e400"],
        ["--member-size", "1KB"], ["--member-size", ""], ["--lock-mode", "x"], ["--sign-cert", "x"], ["--cert-chain", "x"],
        ["--sign-key", nowhere], ["--sign-key", tmp_path], ["--sign-key", state], ["--sign-key", ""],
        ["--encrypt-to", "nonsense"], ["--legal-hold", " "], ["--jobs", "0"], ["--max-memory", "x"], ["--max-memory", "1"],
        ["--only", "evil"], ["--dtype", "x"], ["--from", "x"],
    ):  # fmt: skip
        assert run("audit", "export", state, a, "-q", *more)[0] == 2, more
    sealed = tmp_path / "a.tar.zst.age"
    for dst, more in [
        (sealed, []), (sealed, ["--encrypt-to", "age1qqqq"]), (sealed, ["--encrypt-to", nowhere]), (tmp_path / "a.tar", []),
        (nowhere / "a.tar.zst", []), (sealed, ["--encrypt-to", ""]),
    ]:  # fmt: skip
        assert run("audit", "export", state, dst, "-q", *more)[0] == 2, (dst, more)
    assert set(os.listdir(tmp_path)) == {"s.pt"}
    assert run("audit", "export", state, a, "-q")[0] == 0
    for words in (
        ["verify", "--quick", "--deep", a], ["verify", "--quick", "--root", "0" * 64, a], ["verify", tmp_path],
        ["verify", a, "--root", "zz"], ["verify", a, "--root", ""], ["prune", tmp_path], ["prune", tmp_path, "--keep-last", 0],
        ["prune", tmp_path, "--keep-within", "x"], ["prune", tmp_path, "--keep-within", "0d"], ["hold", a, " "],
        ["release", a, "x"], ["hold", nowhere, "x"], ["ledger", "verify", nowhere], ["ledger", "verify", tmp_path, "--head", "x"],
        ["restore", a, nowhere], ["export", a, a],
    ):  # fmt: skip
        assert run("audit", *words)[0] == 2, words


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    (tmp_path / "empty.tar.zst").touch()
    (tmp_path / "short.tar.zst").write_bytes(b"x" * 100)
    (tmp_path / "folder.tar.zst").mkdir()
    os.mkfifo(tmp_path / "pipe.tar.zst")
    (tmp_path / "out").write_bytes(b"")
    os.symlink("/etc/passwd", tmp_path / "link.tar.zst")
    os.symlink("loop.tar.zst", tmp_path / "loop.tar.zst")
    (tmp_path / "[red]x[/y].tar.zst").mkdir(parents=True)
    for path in [p for p in tmp_path.iterdir() if p.name.endswith(".tar.zst")]:
        for words in (["audit", "verify"], ["audit", "verify", "--quick"], ["inspect"]):
            assert run(*words, path)[0] in REFUSALS | {2}, (words, path)
    for words in (
        ["list", tmp_path],
        ["list", tmp_path, "--json"],
        ["prune", tmp_path, "--keep-last", 1, "--no-ledger"],
    ):
        assert run("audit", *words)[0] == 0
    assert (tmp_path / "empty.tar.zst").exists()


def test_names_and_words_that_are_no_utf_8(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff")
    folder = tmp_path / f"src{odd}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system wants UTF-8")
    state, a = state_of(folder / "s.pt", 1, 1, 20), tmp_path / "a.tar.zst"
    words = ["--meta", f"k={odd}", "--git-commit", odd, "--legal-hold", odd]
    assert run("audit", "export", state, a, "-q", "--no-verify", *words)[0] == 0
    assert run("audit", "verify", a, "-q")[0] == 0
    for how in ([], ["--json"]):  # a process of its own, whose output is what the environment says
        env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
        command = [sys.executable, "-m", "ckpttool", "audit", "list", str(tmp_path), *how]
        assert subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0
    code, _ = run("audit", "export", state, tmp_path / f"{odd}.tar.zst", "-q")
    assert code in {0, 2, 3}


def test_the_same_bytes_whatever_hashes_and_threads(tmp_path: Path) -> None:
    state, found = state_of(tmp_path / "s.pt", 2), set()
    for seed, jobs, more in (("0", "1", []), ("1", "3", ["--max-memory", "80MB"]), ("77", "2", ["--no-verify"])):
        path = tmp_path / seed / "a.tar.zst"
        path.parent.mkdir()
        words = ["audit", "export", str(state), str(path), "--shuffle", "--reproducible", "-q", "-j", jobs, *more]
        env = os.environ | {"PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": "1700000000", "TZ": "Asia/Kathmandu"}
        subprocess.run([sys.executable, "-m", "ckpttool", *words], env=env, check=True, capture_output=True)
        found.add(path.read_bytes())
    assert len(found) == 1
