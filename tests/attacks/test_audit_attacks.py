"""Hostile and damaged audit archives: found, placed, refused in a line; nothing runs, nothing is left behind.

Archives are put together from altered parts by the functions that write sound ones, so that every check before the one
that is attacked has nothing to say.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from typer.testing import CliRunner

from ckpttool.audit import manifest as records
from ckpttool.audit import plan, planes, seekable, tarball, values
from ckpttool.audit.seekable import Cut, FrameWriter
from ckpttool.cli import app
from ckpttool.crc import crc32
from ckpttool.errors import CkpttoolError
from ckpttool.index import ITEMSIZE, Chunks, TensorEntry, Value, joined

# ------------------------------------------------------------------------------------------------ archives to measure


class Piece(NamedTuple):
    """A member of the tar: its header, its bytes as they are stored when unfolded and unmerged, its padding."""

    name: str
    head: bytes
    body: bytes
    pad: bytes


def piece(name: str, body: bytes, mtime: int = 0) -> Piece:
    return Piece(name, tarball.header(name, len(body), mtime), body, tarball.padding(len(body)))


def tensor(name: str, dtype: str, *shape: int) -> TensorEntry:
    path = tuple(name.split("."))
    assert joined(path) == name
    return TensorEntry(dtype, shape, path, Chunks(len(shape)))


def noise(n: int, seed: int) -> bytes:
    out = bytearray(blake3(seed.to_bytes(8, "little")).digest(length=n))
    out[: n // 3] = bytes(n // 3)
    return bytes(out)


@dataclass
class Kit:
    """What an archive is made of. What is None is made as an export makes it; a function alters what was made."""

    tensors: dict[str, TensorEntry]
    data: dict[str, bytes]
    values: dict[str, Any] = field(default_factory=lambda: {"trainer.step": 7, "trainer.lr": 0.25})
    provenance: dict[str, Any] = field(default_factory=lambda: {"schema": records.SCHEMA, "created": "2026-01-02T03:04:05Z"})
    retention: bytes | None = None
    signature: bytes | None = None
    shuffle: bool = False
    most: int = 300_000
    step: int | None = 7
    mtime: int = 0
    grouped: list[list[str]] | None = None
    entries: Callable[[list[dict[str, Any]]], Any] | None = None  # rows of tensors in the manifest
    manifest: Callable[[bytes], bytes] | None = None
    values_text: Callable[[bytes], bytes] | None = None
    provenance_text: Callable[[bytes], bytes] | None = None
    headers: Callable[[str, bytes], bytes] | None = None  # of safetensors members
    sums: Callable[[bytes], bytes] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    member_hashes: dict[str, str] = field(default_factory=dict)
    pieces: Callable[[list[Piece]], list[Piece]] | None = None
    end: bytes = tarball.END
    cuts: Callable[[list[Cut]], list[Cut]] | None = None
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


def parts(k: Kit) -> tuple[list[Piece], list[Cut]]:
    """The members of an archive, and where its frames begin."""
    readme = records.readme(k.shuffle)
    if k.readme:
        readme = k.readme(readme)
    grouped = k.grouped or plan.groups(k.tensors, k.most, k.shuffle)
    planned = plan.make(grouped, k.tensors, k.shuffle, k.mtime, readme)
    out = [piece(plan.README, readme, k.mtime)]
    hashes: dict[str, tuple[int, str]] = {plan.README: (len(readme), records.sha256(readme))}
    for names, (member, head) in zip(grouped, planned.headers.items(), strict=True):
        if k.headers:
            head = k.headers(member, head)
        stored = head + b"".join(bytes(planes.split(k.data[n], planned.places[n].item)) for n in names)
        out.append(piece(member, head + b"".join(k.data[n] for n in names), k.mtime))
        hashes[member] = (len(stored), records.sha256(stored))
    held = values.encode({n: Value(tuple(n.split(".")), v) for n, v in k.values.items()})
    if k.values_text:
        held = k.values_text(held)
    hashes[plan.VALUES] = (len(held), records.sha256(held))
    for name, h in k.member_hashes.items():
        hashes[name] = (hashes[name][0], h)
    digests = {n: blake3(d).hexdigest() for n, d in k.data.items()} | k.digests
    text = records.encode(records.Manifest(k.tensors, digests, grouped, hashes, k.shuffle, k.step), planned.places)
    if k.manifest:
        text = k.manifest(text)
    said = (json.dumps(k.provenance, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
    if k.provenance_text:
        said = k.provenance_text(said)
    smalls = [(plan.VALUES, held), (plan.MANIFEST, text), (plan.PROVENANCE, said)]
    if k.retention is not None:
        smalls.append((plan.RETENTION, k.retention))
    listed = [(n, h) for n, (_, h) in hashes.items() if n != plan.VALUES] + [(n, records.sha256(d)) for n, d in smalls]
    listed[-len(smalls)] = (plan.VALUES, hashes[plan.VALUES][1])
    sums = records.sums(listed)
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
    from ckpttool.store import Source

    raw = path.read_bytes()
    with Source(path.parent) as s:
        t = seekable.read_table(s, path.name)
    return [Frame(raw[a : a + n], m) for a, n, m in zip(t.offsets, t.sizes, t.lengths, strict=True)]


def assembled(path: Path, frames: Sequence[Frame], between: bytes = b"", checksums: bool = True) -> Path:
    """A file of these frames, with tables that fit."""
    crcs = array("I", [crc32(f.data) for f in frames])
    table = seekable._crc_table(crcs)
    sizes, lengths = array("I", [len(f.data) for f in frames]), array("I", [f.length for f in frames])
    sums = array("I", [int.from_bytes(f.data[-4:], "little") for f in frames])
    path.write_bytes(b"".join(f.data for f in frames) + between + table + seekable._seek_table(sizes, lengths, sums, len(table)))
    return path


# ------------------------------------------------------------------------------------------------ every command

RUNNER = CliRunner()


def run(*words: object) -> tuple[int, str]:
    """(exit code, what is said) of a command, as `ckpttool` would end; what is no refusal of ours is raised."""
    done = RUNNER.invoke(app, [str(w) for w in words])
    e = done.exception
    if isinstance(e, CkpttoolError):
        return e.exit_code, str(e)
    if e is not None and not isinstance(e, SystemExit):
        raise e
    return done.exit_code, done.output
