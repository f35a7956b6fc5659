"""Deltas of weights that RL trainers hand to their generators, as three programs write them: which tensors change, and
where the bytes of the changes are. `delta_streams` applies them.

    SkyRL         delta-00000003/manifest.json   {version, base_version, tensors: [{name, dtype, shape,
                                                 uncompressed_num_bytes, compressed_num_bytes, payload_file,
                                                 payload_key, checksum, checksum_algorithm}]}
                  *.safetensors                  a U8 tensor for each that changes: one zstd frame of old XOR new
    ModelExpress  *.safetensors.index.json       {metadata: {version, base_version, delta_encoding: "xor",
                                                 compression_format, checksum_format}, weight_map}
                  *.safetensors                  as SkyRL's; __metadata__ has the checksum of each tensor
    TRL           step_000003.safetensors        NAME.indices, NAME.values (or .idx, .val): flat positions in ascending
                                                 order, and the new numbers there; __metadata__ has the version

A checksum is that of the tensor after the delta was applied, so it proves base and delta together, and neither alone.
TRL's gaps (`encoding` "gap_delta") are position - previous position - 1, of 16 or 32 bits; its first format has one
SHA-256 of all weights, in the order of their names, and its second has none.

Sources: SkyRL's weight_sync/delta_checkpoint.py of 2026-08; modelexpress 0.7.0, modelexpress_rl/train/methods/
canonical_delta.py and inference/receiver.py; the branches of TRL's pull requests 5417, 5932 and 5937, which were closed
unmerged: trl/experimental/async_grpo/delta_engine.py, delta_codec.py, weight_diff.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..bounded_json import parse
from ..errors import Corrupt, Unsupported, argument
from ..index.checkpoint import ITEMSIZE
from ..storage.source import Source
from .safetensors_header import Slot, read_header

__all__ = [
    "MODELEXPRESS",
    "SKYRL",
    "TRL",
    "Delta",
    "Payload",
    "TensorPatch",
    "find_delta",
    "find_deltas_below",
    "refuse_delta",
]

SKYRL, MODELEXPRESS, TRL = "SkyRL", "ModelExpress", "TRL"
_MANIFEST, _INDEX, _TENSORS = "manifest.json", ".safetensors.index.json", ".safetensors"
_MOST_JSON = 256 << 20  # as many tensors as ckpttool.json may list
_MOST_FOLDERS = 100_000
_GLANCED = {"file": 1, "folder": 4}  # that are looked into where none of them is a delta
_PAIRS = ((".indices", ".values"), (".idx", ".val"))
_WIDTHS = {"raw": ("int32",), "gap_delta": ("uint16", "uint32")}
_OF_EMPTY = "__empty_delta__"  # TRL's patch in which nothing changes: safetensors files hold at least one tensor


@dataclass(frozen=True)
class Payload:
    """A tensor of a safetensors file that holds a change, or a part of one."""

    file: str
    slot: Slot


@dataclass(frozen=True)
class TensorPatch:
    """The change of one tensor: one payload, a zstd frame of the bytes to XOR it with; or two, positions and numbers.

    `dtype`, `shape` and `nbytes` are those of the tensor, None where the format does not say; `checksum` is (algorithm,
    hex) of the tensor after the change; `gaps` whether positions are stored as the gaps between them.
    """

    name: str
    payloads: tuple[Payload, ...]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    checksum: tuple[str, str] | None = None
    gaps: bool = False

    @property
    def stored_bytes(self) -> int:
        """Return the total size of the payloads in bytes."""
        return sum(p.slot.length for p in self.payloads)


@dataclass(frozen=True)
class Delta:
    """One version as the changes to another. `version` and `base_version` are as the program wrote them, None where it
    wrote none; `sha256` is that of all weights after it, in the order of their names."""

    program: str
    where: str  # its path, for messages
    source: Source
    patches: Mapping[str, TensorPatch] = field(default_factory=dict)
    version: str | None = None
    base_version: str | None = None
    sha256: str | None = None

    @property
    def title(self) -> str:
        """Return what it is, in one phrase: "a delta of SkyRL, version 3 on version 2"."""
        on = f" on version {self.base_version}" if self.base_version is not None else ""
        return f"a delta of {self.program}" + (f", version {self.version}{on}" if self.version is not None else "")


def find_delta(source: Source, file: str | None, where: str) -> Delta | None:
    """Read the delta in a folder or file; None if none of the three programs wrote it.

    Args:
        source: the folder.
        file: name of the file that was given; None if the folder was given.
        where: path of the folder or file, for messages.

    Raises:
        Corrupt, Unsafe: it is a delta, but a file is missing, incomplete or contradicts another.
        Unsupported: it is a delta in an encoding that ckpttool does not read.
    """
    if file is not None:
        return _read_trl(source, file, where) if file.endswith(_TENSORS) and source.exists(file) else None
    names = source.list()
    if "config.json" in names:  # a model, whatever else is there
        return None
    if _MANIFEST in names and (found := _read_skyrl(source, where)) is not None:
        return found
    indices = [n for n in names if n.endswith(_INDEX)]
    if len(indices) == 1:
        return _read_modelexpress(source, indices[0], where)
    files = [n for n in names if n.endswith(_TENSORS)]
    return _read_trl(source, files[0], where) if len(files) == 1 and not indices else None


def refuse_delta(source: Source, file: str | None) -> None:
    """Refuse a delta that was given as a checkpoint; do nothing for anything else.

    Args:
        source: the folder.
        file: name of the file that was given; None if the folder was given.

    Raises:
        Unsupported: it is a delta; the message says what to do. Or it is one in an encoding that ckpttool does not
            read.
    """
    where = os.path.join(source.root, file or "").rstrip("/")
    found = None
    with suppress(Corrupt):  # a file of another program, which is refused by its own name
        found = find_delta(source, file, where)
        names = source.list() if found is None and file is None else []
        if "config.json" not in names and (first := next((n for n in names if n.endswith(_TENSORS)), None)):
            found = _read_trl(source, first, where)
    if found is not None:
        raise Unsupported(
            f"{where} is {found.title}, and not a checkpoint: it holds changes to the weights of another one. Convert "
            f"that one with {argument('apply', [where])}.",
            code="CKPT0341",
        )


def find_deltas_below(source: Source, where: str) -> list[Delta]:
    """Read all deltas among the files and subfolders of a folder, in the order of their names; [] if the folder is a
    model. Until the first delta is found, at most one file and four subfolders are examined, since each folder of a
    store takes a request.

    Args:
        source: the folder.
        where: its path, for messages.

    Raises:
        Corrupt, Unsafe, Unsupported: one of them cannot be read.
    """
    names = source.list()[:_MOST_FOLDERS]
    out: list[Delta] = []
    if "config.json" in names or any(n.endswith(_INDEX) for n in names):
        return out
    others = {"file": 0, "folder": 0}
    for name in names:
        path, kind = os.path.join(where, name), "file" if name.endswith(_TENSORS) else "folder"
        if (others[kind] >= _GLANCED[kind] and not out) or (kind == "folder" and not source.glance(name)[0]):
            continue
        found = _read_trl(source, name, path) if kind == "file" else find_delta(source.below(name), None, path)
        if found is not None:
            out.append(found)
        else:
            others[kind] += 1
    return out


# ------------------------------------------------------------------------------------------------------------- SkyRL


def _read_skyrl(source: Source, where: str) -> Delta | None:
    """Read a delta of SkyRL from its manifest.json; None if another program wrote the manifest.

    Args:
        source: the folder.
        where: its path, for messages.

    Raises:
        Corrupt, Unsafe: it is damaged, or the files hold other payloads than the manifest lists.
    """
    what = os.path.join(where, _MANIFEST)
    found = parse(source.read_all(_MANIFEST, _MOST_JSON), what)
    if not isinstance(found, dict) or not {"version", "base_version", "tensors"} <= found.keys():
        return None
    try:
        rows = [_parse_manifest_row(row) for row in found["tensors"]]
        version, base = int(found["version"]), int(found["base_version"])
        files = {*found.get("payload_files", ()), *(file for _, file, _, _ in rows)}
    except (TypeError, LookupError, ValueError, AttributeError) as e:
        raise Corrupt(f"{what}: not as SkyRL writes it ({type(e).__name__}: {str(e)[:80]}).", code="CKPT0406") from None
    held = _read_payload_headers(source, files, where)
    out: dict[str, TensorPatch] = {}
    for patch, file, key, stored in rows:
        slot = _find_payload(held, file, key, where)
        if slot.length != stored or patch.name in out:
            said = "is listed twice" if patch.name in out else f"has {slot.length} bytes, and {stored} in {_MANIFEST}"
            raise Corrupt(f'{where}: the change of "{patch.name}" {said}.', code="CKPT0406")
        size = prod(patch.shape or ()) * ITEMSIZE.get(patch.dtype or "", 0)
        if size != patch.nbytes:
            raise Corrupt(
                f'{what}: "{patch.name}" is {patch.dtype} {list(patch.shape or ())} and has {patch.nbytes} bytes; '
                f"{size} would fit.",
                code="CKPT0406",
            )
        out[patch.name] = _with_payload(patch, file, slot)
    _refuse_unlisted_payloads(held, {(file, key) for _, file, key, _ in rows}, where)
    return Delta(SKYRL, where, source, out, str(version), str(base))


def _parse_manifest_row(row: Any) -> tuple[TensorPatch, str, str, int]:
    """Parse the entry of one tensor in SkyRL's manifest: (its change, without payload; name of the payload's file; key
    of the payload in that; bytes of the payload). A manifest from before July 2026 has "sha256" instead of checksum and
    algorithm.

    Raises:
        TypeError, KeyError, ValueError: the entry is malformed.
    """
    checksum = (row["checksum_algorithm"], row["checksum"]) if "checksum" in row else ("sha256", row["sha256"])
    texts = (row["name"], row["dtype"], row["payload_file"], row["payload_key"], *checksum)
    numbers = (*row["shape"], row["uncompressed_num_bytes"], row["compressed_num_bytes"])
    if not all(type(x) is str for x in texts) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("a tensor has entries of other types")
    patch = TensorPatch(texts[0], (), texts[1], tuple(row["shape"]), numbers[-2], (checksum[0], checksum[1]))
    return patch, texts[2], texts[3], numbers[-1]


# ------------------------------------------------------------------------------------------------------ ModelExpress


def _read_modelexpress(source: Source, index: str, where: str) -> Delta | None:
    """Read a delta of ModelExpress from its index; None if the index is that of a model.

    Args:
        source: the folder.
        index: name of the index file.
        where: path of the folder, for messages.

    Raises:
        Corrupt, Unsafe: it is damaged.
        Unsupported: its encoding is one that ckpttool does not read.
    """
    what = os.path.join(where, index)
    found = parse(source.read_all(index, _MOST_JSON), what)
    about = found.get("metadata") if isinstance(found, dict) else None
    if not isinstance(about, dict) or "delta_encoding" not in about:
        return None
    wanted = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
    if odd := [key for key, value in wanted.items() if about.get(key) != value]:
        raise Unsupported(
            f"{what}: {odd[0]} {about.get(odd[0])!r}; ckpttool reads {wanted[odd[0]]!r}, which modelexpress 0.7 "
            "writes.",
            code="CKPT0343",
        )
    files = found.get("weight_map")
    if not isinstance(files, dict) or not all(type(f) is str for f in files.values()):
        raise Corrupt(f"{what}: weight_map is not {{tensor: file}}.", code="CKPT0406")
    held = _read_payload_headers(source, files.values(), where)
    out: dict[str, TensorPatch] = {}
    for name, file in files.items():
        checksum = held[file][1].get(name)
        if checksum is None:
            raise Corrupt(f'{where}/{file}: no checksum of "{name}" is in its metadata.', code="CKPT0406")
        patch = TensorPatch(name, (), checksum=("adler32", checksum))
        out[name] = _with_payload(patch, file, _find_payload(held, file, name, where))
    _refuse_unlisted_payloads(held, {(file, name) for name, file in files.items()}, where)
    version, base = (None if about.get(key) is None else str(about[key]) for key in ("version", "base_version"))
    return Delta(MODELEXPRESS, where, source, out, version, base)


_Held = dict[str, tuple[dict[str, Slot], dict[str, str]]]


def _read_payload_headers(source: Source, files: Iterable[str], where: str) -> _Held:
    """Read the headers of safetensors files that hold payloads: {file: ({key: slot}, metadata)}.

    Args:
        source: the folder.
        files: names of the files.
        where: path of the folder, for messages.

    Raises:
        Corrupt, Unsafe: a file is missing, damaged or in another folder.
    """
    out: _Held = {}
    for file in sorted(set(files), key=str):
        if not isinstance(file, str) or os.path.basename(file) != file or not source.exists(file):
            raise Corrupt(f"{where}: {str(file)[:120]!r} is not there. The copy is incomplete.", code="CKPT0401")
        out[file] = read_header(source, file)
    return out


def _find_payload(held: _Held, file: str, key: str, where: str) -> Slot:
    """Return the slot of a payload, its dtype, shape and byte range.

    Args:
        held: {file: ({key: slot}, metadata)}.
        file, key: the file of the payload, and its key in that.
        where: path of the folder, for messages.

    Raises:
        Corrupt: the file has no such key, or it is not a uint8 tensor.
    """
    slot = held[file][0].get(key)
    if slot is None or slot.dtype != "uint8":
        raise Corrupt(f'{where}/{file} does not hold the change of "{key}": it is another version\'s.', code="CKPT0406")
    return slot


def _refuse_unlisted_payloads(held: _Held, listed: set[tuple[str, str]], where: str) -> None:
    """Refuse files that hold a payload which the delta does not list.

    Args:
        held: {file: ({key: slot}, metadata)}.
        listed: (file, key) of all listed payloads.
        where: path of the folder, for messages.

    Raises:
        Corrupt: there is one; the message names it.
    """
    for file, (slots, _) in held.items():
        if odd := [key for key in slots if (file, key) not in listed]:
            raise Corrupt(
                f'{where}/{file} holds a change of "{odd[0]}", which is not listed: it is another version\'s.',
                code="CKPT0406",
            )


def _with_payload(patch: TensorPatch, file: str, slot: Slot) -> TensorPatch:
    """Return a copy of a change with one payload: the tensor `slot` of `file`."""
    return TensorPatch(patch.name, (Payload(file, slot),), patch.dtype, patch.shape, patch.nbytes, patch.checksum)


# --------------------------------------------------------------------------------------------------------------- TRL


def _read_trl(source: Source, file: str, where: str) -> Delta | None:
    """Read a delta of TRL, positions and values in a safetensors file; None if the file holds other tensors.

    Args:
        source: the folder.
        file: name of the file.
        where: path of the file, for messages.

    Raises:
        Corrupt, Unsafe: it is damaged.
        Unsupported: its positions are compressed by nvCOMP.
    """
    slots, about = read_header(source, file)
    ends = next((pair for pair in _PAIRS if slots and all(n.endswith(pair) or n == _OF_EMPTY for n in slots)), None)
    if ends is None or (_OF_EMPTY in slots and about.get("format") != "sparse_weight_patch"):
        return None
    encoding = about.get("encoding", "raw")
    if encoding not in _WIDTHS:
        raise Unsupported(
            f"{where}: positions in the encoding {encoding!r}, which only a GPU decodes. ckpttool reads "
            f"{' and '.join(_WIDTHS)}.",
            code="CKPT0343",
        )
    out = {p.name: p for p in _pair_positions_with_values(slots, file, ends, encoding, where)}
    base = about.get("prev_model_version")
    return Delta(TRL, where, source, out, about.get("model_version"), base, about.get("checksum_sha256") or None)


def _pair_positions_with_values(
    slots: Mapping[str, Slot], file: str, ends: tuple[str, str], encoding: str, where: str
) -> Iterator[TensorPatch]:
    """Yield the change of each tensor in a file of TRL.

    Args:
        slots: {key: slot} of the file.
        file: its name.
        ends: the suffixes of the keys of positions and of values.
        encoding: of the positions: "raw" or "gap_delta".
        where: path of the file, for messages.

    Raises:
        Corrupt: positions and values of a tensor do not match.
    """
    for name in dict.fromkeys(n.rpartition(".")[0] for n in slots if n != _OF_EMPTY):
        at, values = (slots.get(name + end) for end in ends)
        if at is None or values is None or at.shape != values.shape or len(at.shape) != 1:
            raise Corrupt(f'{where}: "{name}" does not have as many positions as numbers.', code="CKPT0406")
        if at.dtype not in (*_WIDTHS[encoding], "int64"):
            raise Corrupt(f'{where}: positions of "{name}" are {at.dtype}, as {encoding} has none.', code="CKPT0406")
        yield TensorPatch(name, (Payload(file, at), Payload(file, values)), values.dtype, gaps=encoding == "gap_delta")
