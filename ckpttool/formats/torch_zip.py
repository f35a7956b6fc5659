"""torch.save files: a tree of plain values with tensors as byte ranges, read and written without torch.

Zip form (torch >= 1.6): records `<root>/data.pkl` (protocol 2; storages are persistent ids
("storage", FloatStorage, key, location, numel)), `<root>/data/<key>` raw little-endian storage bytes, `byteorder`,
`version`, and some torch ignores; all stored, never deflated, each with a CRC32 that torch writes and never checks.
Legacy form: magic number, protocol, system info, the object, the storage keys, five pickles in a row; then for every
storage its int64 element count and its bytes; no CRCs.

`read` takes the central directory for the truth, but only when nothing else can be: every record's local header must
agree with it, no two records share a name or a byte, all lie under one root folder. What another zip reader could see
differently is refused, so a scanner and we always see the same pickle.

Sources: torch/serialization.py, caffe2/serialize/inline_container.cc (records, 64-byte alignment by an extra field
"FB"), torch/_utils.py (`_rebuild_*`), PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsafe, Unsupported
from ..index import boxes
from ..index.checkpoint import ITEMSIZE, MAX_NUMEL, Chunks, Extent, Number, Path, Record, TensorEntry, joined
from ..storage.source import FileBytes
from .crc import crc32
from .pickles import Global, Opaque, Truncated, dump, load, short

__all__ = [
    "DATA_DESCRIPTOR_BYTES", "STORAGE_NAMES", "Inline", "StoredTensor", "ZipRecord", "central_directory",
    "is_zip", "leaves", "local_header", "number_in", "read", "saved_as", "small_zip", "with_attributes", "zip_records",
]  # fmt: skip

ReadAt = Callable[[int, int], bytes]

#: torch's storage classes by dtype (torch/storage.py, _dtype_to_storage_type_map); newer dtypes have none and are
#: pickled as UntypedStorage with `_rebuild_tensor_v3`.
STORAGE_NAMES: dict[str, str] = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}  # fmt: skip
_DTYPE_OF_STORAGE = {v: k for k, v in STORAGE_NAMES.items()}

#: Longest pickle read from a torch file. A genuine one holds names and shapes only.
MAX_PICKLE_BYTES = 256 << 20


class Storage(NamedTuple):
    """A record of raw elements; `crc32` is None where the file carries none."""

    dtype: str | None
    offset: int
    length: int
    crc32: int | None


class StoredTensor(NamedTuple):
    """A tensor of a torch file: element 0 is `at` bytes into its storage."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: Storage
    at: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        return boxes.is_row_major(self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        return boxes.span(self.shape, self.strides) * ITEMSIZE[self.dtype]

    @property
    def extent(self) -> tuple[int, int]:
        """(offset in the file, length) of the span."""
        return self.storage.offset + self.at, self.span


class Inline(NamedTuple):
    """A small tensor inside a value that is not taken apart (in a tuple, say), with its bytes, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class ZipRecord(NamedTuple):
    """One stored record of a zip: where its bytes are in the file."""

    name: str
    offset: int
    length: int
    crc32: int


def is_zip(head: bytes) -> bool:
    """Whether a file starts like a zip."""
    return head[:4] == b"PK\x03\x04"


def saved_as(read_at: ReadAt, length: int) -> str | None:
    """The name under which torch.save wrote a file, without its ending: the root folder of its records. None for a legacy
    file, and for one that was written to an open file ("archive").

    Source: caffe2/serialize/inline_container.cc, PyTorchStreamWriter::setup.
    """
    head = read_at(0, min(length, 300))
    if not is_zip(head):
        return None
    n: int = _LOCAL.unpack(head[:30])[9]
    root = head[30 : 30 + n].partition(b"/")[0].decode("utf-8", "replace")
    return None if root == "archive" else root


# --------------------------------------------------------------------------------------------------------- reading

_EOCD = struct.Struct("<4s4H2IH")
_EOCD64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")


def zip_records(read_at: ReadAt, base: int, length: int, what: str) -> dict[str, ZipRecord]:
    """The records of the zip in bytes [base, base + length), by name without the root folder.

    Raises:
        Corrupt: not a whole zip.
        Unsafe: one that different readers would read differently.
    """
    tail_length = min(length, 22 + 20 + 56)
    tail = read_at(base + length - tail_length, tail_length)
    if len(tail) < 22 or tail[-22:-18] != b"PK\x05\x06":
        if b"PK\x05\x06" in tail:
            raise Unsafe(f"{what}: bytes follow the end of the zip.")
        raise Corrupt(
            f"{what}: the zip has no end record in its last bytes. It was cut off or overwritten while it was "
            "written; fetch the file again."
        )
    _, disk, cd_disk, here, count, cd_size, cd_offset, comment = _EOCD.unpack(tail[-22:])
    if 0xFFFF in (here, count) or 0xFFFFFFFF in (cd_size, cd_offset) or tail[-42:-38] == b"PK\x06\x07":
        if tail[-42:-38] != b"PK\x06\x07" or tail[-98:-94] != b"PK\x06\x06":
            raise Corrupt(f"{what}: the zip64 end record is missing.")
        _, _, at64, disks = _LOCATOR64.unpack(tail[-42:-22])
        _, size64, _, _, disk, cd_disk, here, count, cd_size, cd_offset = _EOCD64.unpack(tail[-98:-42])
        if size64 != 44 or disks > 1 or at64 != length - 98:
            raise Unsafe(f"{what}: the zip64 end record is not where it says.")
        end_of_directory = length - 98
    else:
        end_of_directory = length - 22
    if comment or disk or cd_disk or here != count or cd_offset + cd_size != end_of_directory:
        raise Unsafe(f"{what}: the zip's directory is not where its end record says.")
    directory = read_at(base + cd_offset, cd_size)
    out: dict[str, ZipRecord] = {}
    spans: list[tuple[int, int]] = []
    root, at = None, 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\x01\x02" or at + 46 > cd_size:
            raise Corrupt(f"{what}: the zip's directory is damaged at entry {len(out)}.")
        (_, _, _, flags, method, _, _, crc, packed, size, n, extra_n, comment_n, _, _, attributes, header) = (
            _CENTRAL.unpack(directory[at : at + 46])
        )
        raw_name = directory[at + 46 : at + 46 + n]
        extra = directory[at + 46 + n : at + 46 + n + extra_n]
        at += 46 + n + extra_n + comment_n
        packed, size, header = _zip64(extra, packed, size, header, what)
        try:
            name = raw_name.decode("utf-8")
        except UnicodeDecodeError:
            raise Unsafe(f"{what}: a record name is not UTF-8.") from None
        if method != 0 or packed != size:
            raise Unsafe(
                f"{what}: record {name!r} is compressed ({packed} -> {size} bytes). torch never does that; refused, "
                "since it could unfold without bound."
            )
        if flags & 0x2041:
            raise Unsafe(f"{what}: record {name!r} is encrypted.")
        folder, _, short = name.partition("/")
        root = root if root is not None else folder
        if folder != root or not short or ".." in short.split("/") or "\\" in name or "\0" in name:
            raise Unsafe(f"{what}: record {name!r} lies outside the folder {root!r} of the archive.")
        if attributes & 0x10 or name.endswith("/"):
            raise Unsafe(
                f"{what}: record {name!r} is marked as a folder. torch then reads nothing from it and leaves memory as it was, "
                "other readers see its bytes; take another copy of the file."
            )
        if short in out:
            raise Unsafe(f"{what}: two records are named {name!r}; readers differ on which counts.")
        out[short] = ZipRecord(short, header, size, crc)  # offset is the header's until _settle
        spans.append((header, n))
    if at != cd_size:
        raise Unsafe(f"{what}: {cd_size - at} bytes of the zip's directory belong to no entry.")
    return _settle(read_at, base, out, spans, cd_offset, root or "", what)


def _zip64(extra: bytes, packed: int, size: int, header: int, what: str) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        tag, n = struct.unpack_from("<HH", extra, at)
        if tag == 1 and at + 4 + n <= len(extra):
            fields = iter(struct.unpack_from(f"<{n // 8}Q", extra, at + 4))
            try:
                size = next(fields) if size == 0xFFFFFFFF else size
                packed = next(fields) if packed == 0xFFFFFFFF else packed
                header = next(fields) if header == 0xFFFFFFFF else header
            except StopIteration:
                raise Corrupt(f"{what}: a zip64 field is too short.") from None
        at += 4 + n
    return packed, size, header


def _settle(
    read_at: ReadAt,
    base: int,
    found: dict[str, ZipRecord],
    spans: list[tuple[int, int]],
    end: int,
    root: str,
    what: str,
) -> dict[str, ZipRecord]:
    """Turn header offsets into data offsets, after comparing every local header with the directory."""
    out: dict[str, ZipRecord] = {}
    previous = 0
    ordered = sorted(zip(found.values(), spans, strict=True), key=lambda x: x[1][0])
    if isinstance(read_at, FileBytes):  # in an object store every read is a round trip
        read_at.prefetch((base + header, 30 + n) for _, (header, n) in ordered)
    for record, (header, n) in ordered:
        if header < previous or header + 30 + n > end:
            raise Unsafe(f"{what}: record {record.name!r} overlaps another one.")
        head = read_at(base + header, 30 + n)
        sig, _, flags, method, _, _, crc, _, size, name_n, extra_n = _LOCAL.unpack(head[:30])
        stated = f"{root}/{record.name}".encode()
        if sig != b"PK\x03\x04" or method != 0 or name_n != n or head[30:] != stated:
            raise Unsafe(f"{what}: the local header of {record.name!r} disagrees with the zip's directory.")
        if not flags & 8 and (crc != record.crc32 or size not in (record.length, 0xFFFFFFFF)):
            raise Unsafe(f"{what}: the local header of {record.name!r} has another size or CRC than the directory.")
        data = header + 30 + n + extra_n
        if data + record.length > end:
            raise Corrupt(f"{what}: record {record.name!r} reaches past the data of the zip.")
        previous = data + record.length
        out[record.name] = record._replace(offset=base + data)
    return out


def read(
    read_at: ReadAt, base: int, length: int, what: str, stand_ins: dict[tuple[str, str], Any] | None = None
) -> Any:
    """The object in a torch.save file, zip or legacy, with `StoredTensor` for every tensor.

    `read_at(offset, n)` reads the file; the torch file is its bytes [base, base + length).

    Raises:
        Corrupt: incomplete or damaged. Unsafe: it would run code. Unsupported: TorchScript.
    """
    head = read_at(base, min(4, length))
    if not is_zip(head):
        return _read_legacy(read_at, base, length, what, stand_ins or {})
    records = zip_records(read_at, base, length, what)
    if "constants.pkl" in records or any(k.startswith("code/") for k in records):
        raise Unsupported(f"{what}: a TorchScript archive, which is a program. Save model.state_dict() instead.")
    if "data.pkl" not in records:
        raise Corrupt(f"{what}: a zip without data.pkl; torch.save did not write it.")
    order = records.get("byteorder")
    if order is not None:
        value = read_at(order.offset, min(order.length, 16))
        if value == b"big":
            raise Unsupported(f"{what}: written on a big-endian machine.")
        if value != b"little":
            raise Corrupt(f"{what}: byteorder is {value!r}.")
    pkl = records["data.pkl"]
    if pkl.length > MAX_PICKLE_BYTES:
        raise Unsafe(f"{what}: data.pkl has {pkl.length} bytes.")
    data = read_at(pkl.offset, pkl.length)
    if pkl.crc32 and crc32(data) != pkl.crc32:
        raise Corrupt(f"{what}: data.pkl does not match its CRC32; the file is damaged.")

    kinds: dict[str, str] = {}
    unread: list[tuple[Any, str]] = []

    def persistent(pid: Any) -> Storage:
        dtype, key, numel = _storage_id(pid, what)
        if kinds.setdefault(key, dtype or "uint8") != (dtype or "uint8"):
            raise Corrupt(
                f"{what}: storage {key!r} is declared as {kinds[key]} and as {dtype}; torch reads both as the first."
            )
        record = records.get(f"data/{key}")
        if record is None:
            raise Corrupt(f"{what}: storage {key!r} is missing from the archive.")
        itemsize = ITEMSIZE[dtype] if dtype else 1
        if numel * itemsize != record.length:
            raise Corrupt(
                f"{what}: storage {key!r} holds {record.length} bytes, but the pickle declares {numel} elements of "
                f"{dtype or 'one byte'}."
            )
        return Storage(dtype, record.offset, record.length, record.crc32 or None)

    tree = load(data, {**_rebuilds(what, unread), **(stand_ins or {})}, persistent, what=what)[0]
    _refuse_unread(tree, unread, what)
    return tree


def _storage_id(pid: Any, what: str) -> tuple[str | None, str, int]:
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], Global)):
        raise Corrupt(f"{what}: an unknown kind of reference in the pickle.")
    cls, key, _, numel = pid[1:5]
    if cls.name == "UntypedStorage":
        dtype = None
    elif cls.module == "torch" and cls.name in _DTYPE_OF_STORAGE:
        dtype = _DTYPE_OF_STORAGE[cls.name]
    else:
        raise Unsupported(f"{what}: storage of class {cls}.")
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel <= MAX_NUMEL:
        raise Corrupt(f"{what}: a storage of {short(numel)} elements.")
    return dtype, key, numel


#: Attributes of a tensor that are its numbers, or that make others of them.
_ACTING = frozenset(("data", "real", "imag", "__class__", "__dict__"))

_MEANING = {
    "conj": ("is a conjugated view (conj bit): torch flips the sign of the imaginary parts when it reads it", "resolve_conj"),
    "neg": ("is a negated view (neg bit): torch flips the sign of the numbers when it reads it", "resolve_neg"),
}  # fmt: skip


def with_attributes(x: Any, state: Any, what: str) -> Any:
    """A tensor to which torch would give the attributes in `state` (torch/_utils.py, _set_obj_state): they are dropped.

    Raises:
        Corrupt: it is not a tensor. Unsupported: an attribute is the tensor's numbers.
    """
    if not isinstance(x, (StoredTensor, Opaque)):  # a DTensor or ShardedTensor is an Opaque
        raise Corrupt(f"{what}: a tensor made of {short(x)}.")
    for part in state if isinstance(state, tuple) else (state,):
        for name in part if isinstance(part, dict) else ():
            if name in _ACTING:
                raise Unsupported(
                    f"{what}: a tensor has an attribute {name!r}, which puts other numbers in the place of its own. Save plain "
                    "tensors."
                )
    return x


def _bits(bits: Any) -> str:
    """What the metadata of a tensor means (torch/_utils.py, set_tensor_metadata; a key acts whatever its value)."""
    if not isinstance(bits, dict):
        return f"has metadata {short(bits)}, which is not a dict"
    other = [k for k in bits if k not in _MEANING]
    if other:
        return f"has metadata {short(other[0])}, which ckpttool does not know, and which may change its numbers"
    said, calls = zip(*(_MEANING[k] for k in bits), strict=True)
    return f"{' and '.join(said)}. Save {''.join(f'.{c}()' for c in calls)} of it"


def _refuse_unread(tree: Any, unread: list[tuple[Any, str]], what: str) -> None:
    """Refuse a file with a tensor whose numbers are not those of its storage.

    Raises:
        Unsupported: with the name of the tensor, where it lies in dicts and lists.
    """
    if unread:
        tensor, why = unread[0]
        name = joined(_path_to(tree, tensor) or ())
        raise Unsupported(f'{what}: {f"""tensor "{name}" """ if name else "a tensor "}{why}.')


def _path_to(tree: Any, wanted: Any) -> Path | None:
    if tree is wanted:
        return ()
    if isinstance(tree, Opaque):  # a DTensor: its name is where it lies
        return () if any(_path_to(x, wanted) is not None for x in tree.parts()) else None
    if isinstance(tree, dict):
        inside: Any = tree.items()
    else:
        inside = enumerate(tree) if type(tree) in (list, tuple) else ()
    for key, x in inside:
        if (found := _path_to(x, wanted)) is not None:
            return (str(key), *found)
    return None


def _rebuilds(what: str, unread: list[tuple[Any, str]]) -> dict[tuple[str, str], Any]:
    """Stand-ins for torch's functions that put a tensor together. Those whose numbers would be others than the bytes of
    their storage are put into `unread`, with the reason."""

    def tensor(
        storage: Any, offset: Any, size: Any, stride: Any, grad: Any = False, hooks: Any = None, bits: Any = None,
        *, dtype: str | None = None,
    ) -> StoredTensor:  # fmt: skip
        if not isinstance(storage, Storage):
            raise Corrupt(f"{what}: a tensor without a storage.")
        kind = dtype or storage.dtype
        if kind is None:
            raise Corrupt(f"{what}: a tensor without a dtype.")
        size, stride = _sizes(size, what), _sizes(stride, what)
        if len(size) != len(stride) or type(offset) is not int or offset < 0:
            raise Corrupt(f"{what}: a tensor of size {size}, stride {stride}, offset {short(offset)}.")
        if any(n < 0 or n > MAX_NUMEL for n in (*size, *stride)) or prod(size) > MAX_NUMEL:
            raise Corrupt(f"{what}: a tensor of size {size}, stride {stride}.")
        at = offset * ITEMSIZE[kind]
        out = StoredTensor(kind, size, stride, storage, at)
        if 0 in stride and prod(size) * ITEMSIZE[kind] > max(1 << 30, 64 * storage.length):
            raise Unsupported(
                f"{what}: a tensor of size {size} expanded from {storage.length} bytes; save a contiguous one."
            )
        if at + out.span > storage.length:
            raise Corrupt(
                f"{what}: a tensor of size {size}, stride {stride}, offset {offset} reaches past its storage of "
                f"{storage.length} bytes."
            )
        if bits:
            unread.append((out, _bits(bits)))
        if hooks:
            unread.append((out, "has backward hooks, which are code"))
        return out

    def v3(
        storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        if not (isinstance(dtype, Global) and dtype.module == "torch" and dtype.name in ITEMSIZE):
            raise Corrupt(f"{what}: a tensor of dtype {short(dtype)}.")
        return tensor(storage, offset, size, stride, grad, hooks, bits, dtype=dtype.name)

    def parameter(data: Any, grad: Any = False, hooks: Any = None, state: Any = None) -> Any:
        if hooks:
            unread.append((data, "has backward hooks, which are code"))
        return with_attributes(data, state, what)

    def from_type(_func: Any, _cls: Any, args: Any, _state: Any) -> Any:
        # a tensor with Python attributes (DeepSpeed's flat groups): the attributes are not tensor data
        rebuild = _func
        if isinstance(rebuild, Global) or not callable(rebuild) or not isinstance(args, tuple):
            raise Unsafe(f"{what}: the pickle calls {short(rebuild)}.")
        return with_attributes(rebuild(*args), _state, what)

    def layout(name: Any) -> Global:
        if not isinstance(name, str):
            raise Corrupt(f"{what}: a memory layout named {short(name)}.")
        return Global("torch", name.rpartition(".")[2])

    def refused(kind: str) -> Callable[..., Any]:
        def refuse(*_: Any) -> Any:
            raise Unsupported(f"{what}: holds a {kind} tensor; ckpttool moves dense ones. Convert it to dense first.")

        return refuse

    return {
        ("torch._utils", "_rebuild_sparse_tensor"): refused("sparse"),
        ("torch._utils", "_rebuild_qtensor"): refused("quantized"),
        ("torch._utils", "_rebuild_nested_tensor"): refused("nested"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): refused("meta (without data)"),
        ("torch._utils", "_rebuild_wrapper_subclass"): refused("wrapper subclass"),
        ("torch._utils", "_rebuild_device_tensor_from_numpy"): refused("device (XLA, MTIA)"),
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): refused("device (XLA, MTIA)"),
        ("torch._utils", "_rebuild_xla_tensor"): refused("device (XLA)"),
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_tensor"): tensor,
        ("torch._utils", "_rebuild_tensor_v3"): v3,
        ("torch._utils", "_rebuild_parameter"): parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): from_type,
        ("torch", "Size"): lambda items=(): _sizes(items, what),
        ("torch.serialization", "_get_layout"): layout,
    }


def _sizes(x: Any, what: str) -> tuple[int, ...]:
    if isinstance(x, (tuple, list)) and len(x) <= 64 and all(type(n) is int for n in x):
        return tuple(x)
    raise Corrupt(f"{what}: a size that is not up to 64 integers: {short(x)}.")


def _read_legacy(read_at: ReadAt, base: int, length: int, what: str, stand_ins: dict[tuple[str, str], Any]) -> Any:
    """`torch.save(..., _use_new_zipfile_serialization=False)`; torch/serialization.py, _legacy_save."""
    magic = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # LONG1 of 0x1950a86a20f9469cfc6c
    head = read_at(base, min(length, 32))
    if magic not in head:
        if length == 0:
            raise Corrupt(f"{what}: the file is empty.")
        # a bare pickle: look at it, so that one that runs code is named for what it is
        if head[:1] in (b"\x80", b"c", b"("):
            load(read_at(base, min(length, MAX_PICKLE_BYTES)), what=what)
        raise Corrupt(f"{what}: neither a zip nor a legacy torch.save file.")
    for window in (4 << 20, 32 << 20, MAX_PICKLE_BYTES):  # the pickles come first and are small, the storages are not
        try:
            return _parse_legacy(read_at(base, min(length, window)), read_at, base, length, what, stand_ins)
        except _Cut:
            if window >= length:
                break
    raise Corrupt(f"{what}: the file ends within its pickles.")


class _Cut(Exception):
    """The pickles do not end within the bytes at hand."""


def _parse_legacy(
    data: bytes, read_at: ReadAt, base: int, length: int, what: str, stand_ins: dict[tuple[str, str], Any]
) -> Any:
    wanted: dict[str, tuple[str | None, int]] = {}
    numbers: dict[str, int] = {}
    unread: list[tuple[Any, str]] = []

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 6 and pid[5] is not None:
            raise Unsupported(f"{what}: a storage view of torch < 0.4.")
        dtype, key, numel = _storage_id(pid[:5] if isinstance(pid, tuple) else pid, what)
        if wanted.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise Corrupt(f"{what}: storage {key!r} is declared twice, differently.")
        number = numbers.setdefault(key, len(numbers))
        return Storage(dtype, -1 - number, numel * (ITEMSIZE[dtype] if dtype else 1), None)

    at = 0
    try:
        for _ in range(3):  # magic, protocol, system info
            info, at = load(data, start=at, what=what)
        if isinstance(info, dict) and info.get("little_endian") is False:
            raise Unsupported(f"{what}: written on a big-endian machine.")
        obj, at = load(data, {**_rebuilds(what, unread), **stand_ins}, persistent, start=at, what=what)
        _refuse_unread(obj, unread, what)
        keys, at = load(data, start=at, what=what)
    except Truncated as e:
        raise _Cut from e
    if not isinstance(keys, list) or not all(type(k) is str for k in keys) or sorted(keys) != sorted(wanted):
        raise Corrupt(f"{what}: the list of storages does not agree with the pickle.")
    places: list[int] = [0] * len(keys)
    for key in keys:
        dtype, numel = wanted[key]
        raw = read_at(base + at, 8) if at + 8 <= length else b""
        if len(raw) != 8:
            raise Corrupt(f"{what}: the file ends before storage {key!r}.")
        count = struct.unpack("<q", raw)[0]
        if count != numel:
            raise Corrupt(f"{what}: storage {key!r} holds {count} elements, the pickle declares {numel}.")
        places[numbers[key]] = base + at + 8
        at += 8 + numel * (ITEMSIZE[dtype] if dtype else 1)
    if at != length:
        raise Corrupt(f"{what}: the file has {length} bytes, its storages end at {at}.")
    return _map(obj, lambda t: t._replace(storage=t.storage._replace(offset=places[-1 - t.storage.offset])))


def _map(x: Any, f: Callable[[StoredTensor], Any]) -> Any:
    """The same tree with every StoredTensor replaced."""
    if isinstance(x, StoredTensor):
        return f(x)
    if isinstance(x, dict):
        return {k: _map(v, f) for k, v in x.items()}
    if isinstance(x, list):
        return [_map(v, f) for v in x]
    if type(x) is tuple:
        return tuple(_map(v, f) for v in x)
    if isinstance(x, Opaque):
        out = Opaque(x.cls, _map(x.args, f), x.call)
        out.state, out.list_items, out.dict_items = _map(x.state, f), _map(x.list_items, f), _map(x.dict_items, f)
        return out
    return x


def tensors_in(x: Any) -> Iterator[StoredTensor]:
    """Every StoredTensor inside a value."""
    found: list[StoredTensor] = []
    _map(x, lambda t: found.append(t))
    return iter(found)


def leaves(tree: Any, path: Path, file: int, read_at: ReadAt, what: str) -> tuple[dict[Path, Any], list[Record]]:
    """The leaves of a tree below `path`, {path: TensorEntry or plain value}, and the CRC32s of their storages.

    Dicts with string keys, and lists that hold tensors or dicts, are taken apart, as DCP does; anything else is one
    value, whose tensors are read (`inlined`).
    """
    found: dict[Path, Any] = {}
    _flatten(path, tree, found)
    records: dict[int, Record] = {}
    for at, leaf in found.items():
        if isinstance(leaf, StoredTensor):
            chunks = Chunks.whole(leaf.shape, file, *leaf.extent, None if leaf.contiguous else leaf.strides)
            found[at] = TensorEntry(leaf.dtype, leaf.shape, at, chunks)
            s = leaf.storage
            if s.crc32 is not None:
                records[s.offset] = Record(Extent(file, s.offset, s.length), s.crc32)
        else:
            found[at] = inlined(leaf, read_at, f"{what}: {joined(at)}")
    return found, list(records.values())


def _flatten(path: Path, x: Any, out: dict[Path, Any]) -> bool:
    """Put the leaves of `x` into `out`, and return whether it was taken apart.

    A list is, where that takes an item of it apart or an item is a tensor; DCP's planner has no key for the items of
    another list, such as [{}], [{6: 1}] or [[[1]]].
    """
    if isinstance(x, dict) and x and all(isinstance(k, str) for k in x):
        for k, v in x.items():
            _flatten((*path, k), v, out)
        return True
    if _is_optimizer_state(path, x):
        for k, v in x.items():
            _flatten((*path, Number(str(k))), v, out)
        return True
    if isinstance(x, list) and any(isinstance(v, (dict, list, StoredTensor)) for v in x):
        apart = [_flatten((*path, i), v, out) or isinstance(v, StoredTensor) for i, v in enumerate(x)]
        if any(apart):
            return True
        for i in range(len(x)):
            del out[(*path, i)]
    out[path] = x
    return False


def _is_optimizer_state(path: Path, x: Any) -> bool:
    """{0: {"exp_avg": ...}}: integer keys, named later."""
    return (
        isinstance(x, dict)
        and bool(x)
        and path[-1:] == ("state",)
        and all(type(k) is int for k in x)
        and all(isinstance(v, dict) for v in x.values())
    )


def inlined(x: Any, read_at: ReadAt, what: str, most: int = 64 << 20) -> Any:
    """A value whose tensors are `Inline`: bytes instead of byte ranges.

    Raises:
        Unsupported: they have more than `most` bytes together.
    """
    total = sum(max(t.storage.length, prod(t.shape) * ITEMSIZE[t.dtype]) for t in tensors_in(x))
    if total > most:
        raise Unsupported(f"{what}: {total} bytes of tensors inside a container that is not a dict or list of tensors.")

    def one(t: StoredTensor) -> Inline:
        whole = read_at(t.storage.offset, t.storage.length)
        if t.storage.crc32 is not None and crc32(whole) != t.storage.crc32:
            raise Corrupt(f"{what}: a tensor inside it does not match its CRC32; the file is damaged.")
        raw = whole[t.at : t.at + t.span]
        return Inline(t.dtype, t.shape, raw if t.contiguous else gather(raw, t))

    return _map(x, one)


_NUMBERS = {"float64": "<d", "float32": "<f", "float16": "<e", "int64": "<q", "int32": "<i"}


def number_in(dtype: str, data: bytes) -> float | int | None:
    """The number that the bytes of one element are, None for a dtype that no counter has, or for more or fewer bytes."""
    if dtype == "bfloat16" and len(data) == 2:
        dtype, data = "float32", b"\0\0" + data
    code = _NUMBERS.get(dtype)
    found: float | int | None = struct.unpack(code, data)[0] if code and len(data) == struct.calcsize(code) else None
    return found


def gather(raw: bytes, t: StoredTensor) -> bytes:
    """Row-major bytes of a strided tensor whose span is `raw`."""
    import numpy as np

    item = ITEMSIZE[t.dtype]
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(raw, dtype=f"V{item}"), t.shape, tuple(s * item for s in t.strides), writeable=False
    )
    return np.ascontiguousarray(view).tobytes()


# --------------------------------------------------------------------------------------------------------- writing

DATA_DESCRIPTOR_BYTES = 24  # signature, CRC32 and two 64-bit sizes, behind a record whose CRC is known only afterwards


def local_header(name: str, size: int, crc: int | None, at: int, align: int = 1) -> bytes:
    """The header before a stored record that starts at file offset `at`; the record itself is aligned.

    With crc None the CRC follows the record in a data descriptor. Sizes of 4 GiB and more take the zip64 field.
    """
    raw = name.encode()
    big = crc is None or size >= 0xFFFFFFFF  # descriptors are written with 64-bit sizes, which needs the zip64 field
    extra = struct.pack("<HHQQ", 1, 16, size if crc is not None else 0, size if crc is not None else 0) if big else b""
    here = at + 30 + len(raw) + len(extra)
    if align > 1 and here % align:
        pad = -(here + 4) % align
        extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    word = 0xFFFFFFFF if big else size
    flags = 0x0800 | (8 if crc is None else 0)
    return (
        _LOCAL.pack(b"PK\x03\x04", 45 if big else 20, flags, 0, 0, 0x21, crc or 0, word, word, len(raw), len(extra))
        + raw
        + extra
    )


def data_descriptor(size: int, crc: int) -> bytes:
    """What follows a record whose local header had no CRC yet."""
    return struct.pack("<4sIQQ", b"PK\x07\x08", crc, size, size)


def central_directory(records: list[tuple[str, int, int, int, bool]], at: int) -> bytes:
    """Directory and end record, written at file offset `at`, of (name, header offset, size, crc, descriptor) records."""
    out = bytearray()
    for name, header, size, crc, descriptor in records:
        raw = name.encode()
        wide = [n for n in (size, size) if size >= 0xFFFFFFFF] + ([header] if header >= 0xFFFFFFFF else [])
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        word, where = min(size, 0xFFFFFFFF), min(header, 0xFFFFFFFF)
        flags = 0x0800 | (8 if descriptor else 0)
        version = 45 if wide or descriptor else 20
        out += _CENTRAL.pack(
            b"PK\x01\x02", version, version, flags, 0, 0, 0x21, crc, word, word, len(raw), len(extra), 0, 0, 0, 0, where
        )  # fmt: skip
        out += raw + extra
    n, size = len(records), len(out)
    if n >= 0xFFFF or size >= 0xFFFFFFFF or at >= 0xFFFFFFFF:
        out += _EOCD64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, n, n, size, at)
        out += _LOCATOR64.pack(b"PK\x06\x07", 0, at + size, 1)
    out += _EOCD.pack(
        b"PK\x05\x06", 0, 0, min(n, 0xFFFF), min(n, 0xFFFF), min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF), 0
    )
    return bytes(out)


class TensorRef(NamedTuple):
    """A tensor to be written into a pickle, row-major: its storage's key and elements, and its own first among them."""

    dtype: str
    shape: tuple[int, ...]
    key: str
    numel: int
    first: int = 0

    def reduce(self) -> tuple[Global, tuple[Any, ...]]:
        """The call by which torch puts the tensor together."""
        hooks = Opaque(Global("collections", "OrderedDict"), (), call=True)
        rest = (self.first, self.shape, boxes.strides(self.shape), False, hooks)
        if self.dtype in STORAGE_NAMES:
            return Global("torch._utils", "_rebuild_tensor_v2"), (_StorageRef(self), *rest)
        return Global("torch._utils", "_rebuild_tensor_v3"), (_StorageRef(self), *rest, Global("torch", self.dtype), {})


class _StorageRef(NamedTuple):
    tensor: TensorRef


def pickled(tree: Any) -> bytes:
    """data.pkl of a tree with `TensorRef` for every tensor."""

    def persistent(x: Any) -> tuple[Any, ...] | None:
        if type(x) is not _StorageRef:
            return None
        t = x.tensor
        if t.dtype in STORAGE_NAMES:
            return ("storage", Global("torch", STORAGE_NAMES[t.dtype]), t.key, "cpu", t.numel)
        return ("storage", Global("torch.storage", "UntypedStorage"), t.key, "cpu", t.numel * ITEMSIZE[t.dtype])

    return dump(tree, persistent)


def small_zip(value: Any) -> bytes:
    """A whole torch.save file of a value; `Inline` tensors become tensors."""
    data: list[bytes] = []

    def one(x: Any) -> Any:
        if isinstance(x, Inline):
            data.append(x.data)
            return TensorRef(x.dtype, x.shape, str(len(data) - 1), prod(x.shape))
        if isinstance(x, dict):
            return {k: one(v) for k, v in x.items()}
        if isinstance(x, list):
            return [one(v) for v in x]
        if type(x) is tuple:
            return tuple(one(v) for v in x)
        if isinstance(x, Opaque):
            out = Opaque(x.cls, one(x.args), x.call)
            out.state, out.list_items, out.dict_items = one(x.state), one(x.list_items), one(x.dict_items)
            return out
        return x

    pkl = pickled(one(value))
    out = bytearray()
    records: list[tuple[str, int, int, int, bool]] = []
    members = [("data.pkl", pkl), ("byteorder", b"little"), ("version", b"3\n")]
    for name, body in members[:2] + [(f"data/{i}", b) for i, b in enumerate(data)] + members[2:]:
        crc = crc32(body)
        records.append((f"archive/{name}", len(out), len(body), crc, False))
        out += local_header(f"archive/{name}", len(body), crc, len(out), 64) + body
    return bytes(out + central_directory(records, len(out)))


def head_records(root: str, pkl: bytes) -> tuple[bytes, list[tuple[str, int, int, int, bool]]]:
    """The first bytes of a torch.save file: data.pkl and the small records, and their directory entries."""
    out = bytearray()
    records: list[tuple[str, int, int, int, bool]] = []
    for name, body in (("data.pkl", pkl), ("byteorder", b"little"), (".storage_alignment", b"64"), ("version", b"3\n")):
        crc = crc32(body)
        records.append((f"{root}/{name}", len(out), len(body), crc, False))
        out += local_header(f"{root}/{name}", len(body), crc, len(out), 64) + body
    return bytes(out), records
