"""Headers of safetensors files, read and written without the library, so that no tensor byte is touched. What was
written is opened once with the library.

    8 bytes   length n of the header, little-endian
    n bytes   JSON {name: {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__": {str: str}}
    the rest  tensor bytes, row-major, little-endian; offsets count from here; no hole, no overlap, nothing behind

Source: the format section of the safetensors README and `Metadata::validate` in safetensors/src/tensor.rs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from ..bounded_json import encode as encode_json
from ..bounded_json import parse
from ..errors import Corrupt, Unsafe, Unsupported
from ..index.checkpoint import ITEMSIZE, MAX_NUMEL, PACKED
from ..storage.source import Source
from . import other_files

__all__ = ["CODES", "Slot", "check_with_library", "encode_header", "prefetch_headers", "read_slots", "sort_key"]

#: safetensors' dtype code by torch's name, in the order the library sorts by (safetensors/src/tensor.rs, enum Dtype).
CODES: dict[str, str] = {
    "bool": "BOOL",
    "float4_e2m1fn_x2": "F4",
    "f6_e2m3_x4": "F6_E2M3",
    "f6_e3m2_x4": "F6_E3M2",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_NAMES = {v: k for k, v in CODES.items()}
_RANK = {k: i for i, k in enumerate(CODES)}
MAX_HEADER_BYTES = 100_000_000
_MOST_TENSORS = 100_000  # and one for every 64 bytes: each takes 20 microseconds, whatever its size
_USUAL_HEADER_BYTES = 64 << 10


class Slot(NamedTuple):
    """A tensor of a safetensors file, with its absolute byte range."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def read_header(source: Source, file: str) -> tuple[dict[str, Slot], dict[str, str]]:
    """Read and check the header of a safetensors file: ({tensor name: slot}, in the order of their bytes; the texts of
    __metadata__, {} if there are none).

    Args:
        source: the folder.
        file: name of the file.

    Raises:
        Corrupt: it is not a complete safetensors file.
        Unsafe: readers would differ on it, or its header is too large.
        Unsupported: it is of another format, or has a dtype that torch lacks.
    """
    what = f"{source.root}/{file}"
    size = source.size(file)
    if size < 8:
        raise Corrupt(f"{what} has {size} bytes; the copy is incomplete.", code="CKPT0403")
    n = struct.unpack("<Q", source.read(file, 0, 8))[0]
    if n > MAX_HEADER_BYTES:
        other_files.refuse_foreign_file(source.read(file, 0, min(other_files.HEAD_BYTES, size)), what)
        raise Unsafe(f"{what}: a header of {n} bytes; safetensors allows {MAX_HEADER_BYTES}.", code="CKPT0704")
    if 8 + n > size:
        raise Corrupt(
            f"{what}: the header needs {n} bytes but the file has {size}. The copy is incomplete.", code="CKPT0403"
        )
    text = source.read(file, 8, n)
    if text[:1] != b"{":
        raise Corrupt(f"{what}: not a safetensors file (its header does not begin with {{).", code="CKPT0406")
    if (most := _MOST_TENSORS + (size - 8 - n) // 64) < (count := text.count(b'"data_offsets"')):
        raise Unsafe(
            f"{what}: {count:,} tensors in {size - 8 - n:,} bytes; no checkpoint has more than {most:,} there.",
            code="CKPT0704",
        )
    data = parse(text, what)
    meta = data.pop("__metadata__", None) or {}
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise Corrupt(f"{what}: __metadata__ is not a map of strings.", code="CKPT0406")
    out: list[tuple[int, int, str, Slot]] = []
    for name, t in data.items():
        if not name.isascii():
            _check_encodable(name, what)
        out.append(_parse_slot(name, t, 8 + n, what))
    out.sort(key=lambda x: x[:2])
    at = 0
    for begin, end, name, _ in out:
        if begin != at:
            raise Corrupt(
                f'{what}: "{name}" begins at byte {begin} of the data, {at} was expected (hole or overlap).',
                code="CKPT0408",
            )
        at = end
    if 8 + n + at > size:
        raise Corrupt(
            f"{what} has {size} bytes, its tensors need {8 + n + at}. The copy is incomplete.", code="CKPT0403"
        )
    if 8 + n + at < size:
        raise Unsafe(
            f"{what}: {size - 8 - n - at} bytes follow the last tensor; something else is hidden in the file.",
            code="CKPT0703",
        )
    return {name: slot for _, _, name, slot in out}, meta


def check_with_library(source: Source, files: Iterable[str]) -> None:
    """Check that the safetensors library, which every loader uses, can open files; the library reads only their
    headers. Other files than .safetensors are skipped, and nothing is done if the source is not local.

    Args:
        source: the folder.
        files: names of the files.

    Raises:
        Corrupt: the library refuses one.
    """
    names = [f for f in files if f.endswith(".safetensors")]
    if not names or not source.local:
        return
    from safetensors import SafetensorError, safe_open

    for name in names:
        path = os.path.join(source.root, name)
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as e:
            raise Corrupt(
                f"{path}: the safetensors library cannot open what was written ({e}).", code="CKPT0421"
            ) from e


def _check_encodable(name: str, what: str) -> None:
    """Check that the name of a tensor can be encoded as UTF-8; `what` names the file in messages.

    Raises:
        Corrupt: it contains a lone surrogate, half of a character.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Corrupt(
            f"{what}: the name {name!a} is half of a character and cannot be written.", code="CKPT0406"
        ) from None


def _parse_slot(name: str, t: object, base: int, what: str) -> tuple[int, int, str, Slot]:
    """Check the header's entry of one tensor and parse it: (first byte and end of its data, relative to `base`; its
    name; its slot, with its byte range in the file).

    Args:
        name: of the tensor.
        t: the entry, as parsed from JSON.
        base: offset in the file at which the data of all tensors begins.
        what: names the file in messages.

    Raises:
        Corrupt: the entry is damaged.
        Unsupported: torch has no such dtype, or not with that shape.
    """
    if not isinstance(t, dict) or set(t) != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f'{what}: the entry of "{name}" is damaged.', code="CKPT0406")
    dtype, shape, offsets = t["dtype"], t["shape"], t["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NAMES:
        raise Unsupported(f'{what}: "{name}" has dtype {repr(dtype)[:40]}, which torch does not have.', code="CKPT0332")
    if not isinstance(shape, list) or not all(type(k) is int and 0 <= k <= MAX_NUMEL for k in shape) or len(shape) > 64:
        raise Corrupt(f'{what}: "{name}" has shape {str(shape)[:80]}.', code="CKPT0406")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(k) is int and k >= 0 for k in offsets):
        raise Corrupt(f'{what}: "{name}" has data_offsets {str(offsets)[:80]}.', code="CKPT0406")
    if (several := PACKED.get(_NAMES[dtype])) is not None and shape:  # the file counts numbers
        if shape[-1] % several:
            raise Unsupported(
                f'{what}: "{name}" is {dtype} {shape}: {several} numbers share bytes, and the last dimension is no '
                "multiple of that.",
                code="CKPT0332",
            )
        shape = [*shape[:-1], shape[-1] // several]
    begin, end = offsets
    need = prod(shape) * ITEMSIZE[_NAMES[dtype]]
    if end - begin != need:
        raise Corrupt(
            f'{what}: "{name}" is {dtype} {shape}, {need} bytes, but its range has {end - begin}.', code="CKPT0406"
        )
    return begin, end, name, Slot(_NAMES[dtype], tuple(shape), base + begin, need)


def prefetch_headers(source: Source, files: Iterable[str]) -> None:
    """Tell the source that the headers of these files will soon be read."""
    source.prefetch((f, 0, min(source.size(f), _USUAL_HEADER_BYTES)) for f in files)


def read_slots(source: Source, file: str) -> dict[str, Slot]:
    """Read the tensors in the header of a safetensors file: {tensor name: slot, its dtype, shape and byte range}, in
    the order of their bytes.

    Raises:
        Corrupt: it is not a complete safetensors file.
        Unsafe: readers would differ on it, or its header is too large.
        Unsupported: it is of another format, or has a dtype that torch lacks.
    """
    return read_header(source, file)[0]


def sort_key(name: str, dtype: str) -> tuple[int, str]:
    """Return the key by which tensors are sorted as the library writes them: widest dtypes first, then by name, so that
    every tensor is aligned."""
    return -_RANK[dtype], name


def encode_header(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file, from its first byte on, byte for byte as the library writes it.

    Args:
        tensors: (name, dtype, shape) of each, in the order of their bytes.
        metadata: the texts of `__metadata__`; {} leaves it out.

    Raises:
        Unsupported: a tensor is named "__metadata__", which the format reserves.
    """
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        if name == "__metadata__":
            raise Unsupported(
                'A tensor is named "__metadata__", which safetensors keeps for the metadata of a file. Rename it in '
                "the source.",
                code="CKPT0316",
            )
        n = prod(shape) * ITEMSIZE[dtype]
        file_shape = [*shape[:-1], PACKED.get(dtype, 1) * shape[-1]] if shape else []
        entries[name] = {"dtype": CODES[dtype], "shape": file_shape, "data_offsets": [at, at + n]}
        at += n
    text = encode_json(entries, separators=(",", ":"))
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
