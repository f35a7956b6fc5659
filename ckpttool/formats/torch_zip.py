"""Reads torch.save files: a tree of plain values with tensors as byte ranges, without torch.

Zip form (torch >= 1.6): records `<root>/data.pkl` (protocol 2; storages are persistent ids
("storage", FloatStorage, key, location, numel)), `<root>/data/<key>` raw little-endian storage bytes, `byteorder`,
`version`, and some torch ignores; all stored, never deflated, each with a CRC32 that torch writes and never checks.
Legacy form: magic number, protocol, system info, the object, the storage keys, five pickles in a row; then for every
storage its int64 element count and its bytes; no CRCs.

Sources: torch/serialization.py, torch/_utils.py (`_rebuild_*`), caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ..errors import Corrupt, Unsafe, Unsupported, argument
from ..index.checkpoint import ITEMSIZE, MAX_NUMEL, MixupNote, Path, joined
from ..storage.overlay import LostBytes
from ..storage.source import ReadAt
from . import other_files
from .common_lists import CommonLists
from .crc import crc32
from .pickles import Global, Opaque, Refused, Truncated, is_dangerous, load, short
from .stored_tensors import Size, Storage, StoredTensor, map_tensors
from .subclasses import REBUILD, TRANSFORMER_ENGINE, WRAPPER, convert_transformer_engine_args, get_dense_tensor
from .zip_bytes import ZipRecord, is_zip, read_first_record_name, read_zip_records, torchscript_error

__all__ = [
    "MAX_PICKLE_BYTES",
    "STORAGE_NAMES",
    "drop_attributes",
    "find_storages",
    "make_size_stand_in",
    "read",
    "read_directory",
    "read_name_at_save",
    "rebuild_from_type",
    "refuse_copied_file",
    "refuse_file_of_other_rank",
]

#: torch's storage classes by dtype (torch/storage.py, _dtype_to_storage_type_map); newer dtypes have none and are
#: pickled as UntypedStorage with `_rebuild_tensor_v3`.
STORAGE_NAMES: dict[str, str] = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
_DTYPE_OF_STORAGE = {v: k for k, v in STORAGE_NAMES.items()}

#: Longest pickle read from a torch file. A genuine one holds names and shapes only.
MAX_PICKLE_BYTES = 256 << 20
MAX_FORMAT_VERSION = 10  # of torch 2.13, which writes 3


def _malformed_error(what: str, problem: str) -> Corrupt:
    """Return, without raising it, the error for a file that torch.save cannot have written.

    Args:
        what: names the file.
        problem: what is wrong with it, a clause.
    """
    return Corrupt(
        f"{what}: {problem}. torch.save does not write that: the file is damaged. Use another copy.", code="CKPT0407"
    )


def read_name_at_save(read_at: ReadAt, length: int) -> str | None:
    """Return the name, without extension, under which torch.save wrote a file: the root folder of its records. None for
    a legacy file, and for one that was saved to a file object ("archive").

    Source: caffe2/serialize/inline_container.cc, PyTorchStreamWriter::setup.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
    """
    head = read_at(0, min(length, 300))
    if len(head) < 30 or not is_zip(head):  # a local header has 30 bytes
        return None
    root = read_first_record_name(head).partition("/")[0]
    return None if root == "archive" else root


def refuse_file_of_other_rank(read_at: ReadAt, length: int, what: str, allow_equal_ranks: bool) -> list[str]:
    """Refuse a rank's file if torch.save wrote it under a name that differs from its own in numbers only, such as
    rng_state_1 in rng_state_0.pth; return [] if it is right.

    Args:
        read_at: reads bytes (offset, length) of the file.
        length: size of the file in bytes.
        what: path of the file.
        allow_equal_ranks: return a note instead of refusing the file.

    Raises:
        Corrupt: another rank wrote it, without `allow_equal_ranks`.
    """
    first, stem = read_name_at_save(read_at, length), what.rpartition("/")[2].rpartition(".")[0]
    if first is None or first == stem or re.sub(r"\d+", "0", first) != re.sub(r"\d+", "0", stem):
        return []
    return refuse_copied_file(
        f"{what} was saved under the name {short(first)}, by another rank, and copied over the file of this rank or "
        "exchanged with it",
        allow_equal_ranks,
    )


def refuse_copied_file(found: str, allow_equal_ranks: bool) -> list[str]:
    """Refuse a rank's file that is a copy of another rank's; with `allow_equal_ranks`, return a list with one note
    instead.

    Args:
        found: the sentence that says so, without a full stop; it becomes the note.
        allow_equal_ranks: whether such files are accepted.

    Raises:
        Corrupt: they are not.
    """
    if allow_equal_ranks:
        return [MixupNote(found)]
    raise Corrupt(
        f"{found}. Fetch the files again. If files are renamed on purpose, use {argument('allow_equal_ranks', True)}.",
        code="CKPT0410",
    )


def read_directory(read_at: ReadAt, base: int, length: int, what: str) -> dict[str, ZipRecord] | None:
    """Read the zip directory of a torch.save file: {name of a record without the root folder: record}; None for a
    legacy file, which is no zip.

    Args:
        read_at: reads bytes (offset, length) of the file that contains the torch.save file.
        base, length: offset and size of the torch.save file in that, in bytes.
        what: names the file in messages.

    Raises:
        Corrupt, Unsafe: as `read_zip_records` raises them; or torch.save did not write the zip.
        Unsupported: it is a TorchScript file, or of another format.
    """
    head = read_at(base, min(other_files.HEAD_BYTES, length))
    if not is_zip(head):
        return None
    other_files.refuse_foreign_format(head, what)
    records = read_zip_records(read_at, base, length, what)
    if "constants.pkl" in records:
        raise torchscript_error(what)
    if "data.pkl" not in records:
        raise Corrupt(f"{what}: this zip has no data.pkl, so torch.save did not write it.", code="CKPT0407")
    return records


def read(
    read_at: ReadAt,
    base: int,
    length: int,
    what: str,
    stand_ins: dict[tuple[str, str], object] | None = None,
    later: bool = False,
    lists: CommonLists | None = None,
    records: dict[str, ZipRecord] | None = None,
) -> Any:
    """Read the object in a torch.save file, zip or legacy, with a `StoredTensor` for every tensor.

    Args:
        read_at: reads bytes (offset, length) of the file that contains the torch.save file.
        base, length: offset and size of the torch.save file in that, in bytes.
        what: names the file in messages.
        stand_ins: {(module, name): what replaces that class or function}, besides those for torch's tensors; None for
            none.
        later: return a tensor of an unsupported kind as a `Refused`, for the caller to raise if the tensor is needed.
        lists: long lists of earlier files that were read with the same stand-ins, for `pickles.load`; None for none.
        records: what `read_directory` returned for the file; None to read the directory here.

    Raises:
        Corrupt: incomplete or damaged.
        Unsafe: it would run code, or readers would differ on it.
        Unsupported: TorchScript, big-endian, another format, or, without `later`, a tensor of an unsupported kind.
    """
    records = read_directory(read_at, base, length, what) if records is None else records
    if records is None:
        return _read_legacy(read_at, base, length, what, stand_ins or {}, later)
    _check_small_records(read_at, records, what)
    pkl = records["data.pkl"]
    if pkl.length > MAX_PICKLE_BYTES:
        raise Unsafe(f"{what}: data.pkl has {pkl.length} bytes.", code="CKPT0704")
    data = read_at(pkl.offset, pkl.length)
    if pkl.crc32 and crc32(data) != pkl.crc32:
        raise Corrupt(f"{what}: data.pkl does not match its CRC32; the file is damaged.", code="CKPT0405")

    kinds: dict[str, str] = {}
    unread: list[tuple[object, str]] = []

    def persistent(pid: object) -> Storage:
        """Find the record of a storage by its persistent id, and compare its length.

        Raises:
            Corrupt: there is none, or it has another length or dtype.
            Unsupported: torch has no such storage.
        """
        dtype, key, numel = _parse_storage_id(pid, what)
        if kinds.setdefault(key, dtype or "uint8") != (dtype or "uint8"):
            raise Corrupt(
                f"{what}: storage {key!r} is declared as {kinds[key]} and as {dtype}; torch reads both as the first.",
                code="CKPT0407",
            )
        record = records.get(f"data/{key}")
        if record is None:
            raise _malformed_error(what, f"storage {key!r} is missing from the archive")
        itemsize = ITEMSIZE[dtype] if dtype else 1
        if numel * itemsize != record.length:
            raise Corrupt(
                f"{what}: storage {key!r} holds {record.length} bytes, but the pickle declares {numel} elements of "
                f"{dtype or 'one byte'}.",
                code="CKPT0407",
            )
        return Storage(dtype, record.offset, record.length, record.crc32 or None)

    known = {**_make_tensor_stand_ins(what, unread, later), **(stand_ins or {})}
    tree = load(data, known, persistent, what=what, lists=lists)[0]
    return _refuse_unread_tensors(tree, unread, what, later)


def _check_small_records(read_at: ReadAt, records: dict[str, ZipRecord], what: str) -> None:
    """Check the records beside the pickle and the storages that torch.load reads: `byteorder`, `.storage_alignment`,
    `version` (1 to 10, kMaxSupportedFileFormatVersion of inline_container.cc) and `.data/serialization_id` (UTF-8).

    Args:
        read_at: reads bytes (offset, length) of the file.
        records: those of the file; all but `version` may be missing.
        what: names the file in messages.

    Raises:
        Corrupt: torch.load refuses one of them.
        Unsupported: the file is big-endian, or of a later format.
    """
    found = {
        name: read_at(record.offset, min(record.length, 64))
        for name in ("byteorder", ".storage_alignment", "version", ".data/serialization_id")
        if (record := records.get(name)) is not None
    }
    order = found.get("byteorder", b"little")
    if order == b"big":
        raise Unsupported(
            f"{what}: it was written on a big-endian machine. Load and save it there with torch as little-endian.",
            code="CKPT0306",
        )
    if order != b"little":
        raise _malformed_error(what, f"its byte order is {order!r}")
    if not found.get(".storage_alignment", b"64").isdigit():
        raise _malformed_error(what, "its .storage_alignment is no number")
    version = re.match(rb"\s*\+?(\d+)", found.get("version", b""))
    if version is None or not int(version[1]):
        raise _malformed_error(what, f"its version is {found.get('version')!r}")
    if int(version[1]) > MAX_FORMAT_VERSION:
        raise Unsupported(
            f"{what}: its format has version {version[1].decode()}, and torch up to 2.13 reads "
            f"{MAX_FORMAT_VERSION} at most. Save it with an older torch.",
            code="CKPT0306",
        )
    try:
        found.get(".data/serialization_id", b"").decode()
    except UnicodeDecodeError:
        raise _malformed_error(what, "its .data/serialization_id is not UTF-8") from None


def find_storages(
    data: bytes, start: int, what: str, stand_ins: dict[tuple[str, str], object] | None = None
) -> tuple[dict[str, tuple[int, int]], int]:
    """List the storages that a pickle refers to: ({key: (number of elements, bytes)} in the order of the pickle,
    position after the pickle).

    Unknown calls are neither executed nor refused; `read` refuses them.

    Args:
        data: bytes in which the pickle begins at `start`.
        start: position of the pickle in `data`.
        what: names the file in messages.
        stand_ins: {(module, name): what replaces that class or function}, besides those for torch's tensors; None for
            none.

    Raises:
        Truncated: the bytes end before the pickle does.
        Corrupt: it is damaged.
        Unsafe: it holds an instance of a class that acts when it is created, or exceeds a bound.
        Unsupported: it has a storage class that torch lacks, or a tensor of an unsupported kind.
    """
    found: dict[str, tuple[int, int]] = {}

    def persistent(pid: object) -> Storage:
        """Remember the size of a storage, given by its persistent id.

        Raises:
            Corrupt: it is declared twice with different sizes.
            Unsupported: torch has no such storage.
        """
        dtype, key, numel = _parse_storage_id(pid[:5] if isinstance(pid, tuple) else pid, what)
        n = numel * (ITEMSIZE[dtype] if dtype else 1)
        if found.setdefault(key, (numel, n)) != (numel, n):
            raise _malformed_error(what, f"storage {key!r} is declared twice with different sizes")
        return Storage(dtype, 0, n, None)

    end = load(data, {**_make_tensor_stand_ins(what, []), **(stand_ins or {})}, persistent, start, what, inert=True)[1]
    return found, end


def _parse_storage_id(pid: object, what: str) -> tuple[str | None, str, int]:
    """Parse the persistent id by which a pickle refers to a storage: (torch's name of the dtype, None for an untyped
    storage; key of the storage; number of elements, which are bytes for an untyped storage).

    Args:
        pid: the persistent id, ("storage", class, key, device, number of elements).
        what: names the file in messages.

    Raises:
        Corrupt: torch does not write such an id.
        Unsupported: the storage class is unknown.
    """
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], Global)):
        raise _malformed_error(what, "the pickle has an unknown kind of reference")
    cls, key, _, numel = pid[1:5]
    if cls.name == "UntypedStorage":
        dtype = None
    elif cls.module == "torch" and cls.name in _DTYPE_OF_STORAGE:
        dtype = _DTYPE_OF_STORAGE[cls.name]
    else:
        raise Unsupported(f"{what}: storage of class {cls}.", code="CKPT0319")
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel <= MAX_NUMEL:
        raise _malformed_error(what, f"a storage has {short(numel)} elements")
    return dtype, key, numel


#: How the names of dtypes begin whose tensors can have gradients.
_WITH_GRAD = ("float", "bfloat", "complex")

#: Attributes of a tensor that are its numbers, or that make others of them.
_ACTING = frozenset(("data", "real", "imag", "__class__", "__dict__"))

_MEANING = {
    "conj": (
        "is a conjugated view (conj bit): torch flips the sign of the imaginary parts when it reads it",
        "resolve_conj",
    ),
    "neg": ("is a negated view (neg bit): torch flips the sign of the numbers when it reads it", "resolve_neg"),
}


def drop_attributes(x: object, state: object, what: str) -> object:
    """Return the tensor `x` without the Python attributes that torch would set on it (torch/_utils.py, _set_obj_state),
    after checking that none of them changes its numbers.

    Args:
        x: the tensor.
        state: the pickled attributes.
        what: names the file in messages.

    Raises:
        Corrupt: `x` is not a tensor.
        Unsupported: an attribute replaces the tensor's numbers.
    """
    if not isinstance(x, (StoredTensor, Opaque)):  # a DTensor or ShardedTensor is an Opaque
        raise _malformed_error(what, f"a tensor is made of {short(x)}")
    for part in state if isinstance(state, tuple) else (state,):
        for name in part if isinstance(part, dict) else ():
            if name in _ACTING:
                raise Unsupported(
                    f"{what}: a tensor has an attribute {name!r}, which puts other numbers in the place of its own. "
                    "Save plain tensors.",
                    code="CKPT0319",
                )
    return x


def rebuild_from_type(what: str, func: object, cls: object, args: object, state: object) -> object:
    """Return a tensor from the pickled call of torch._tensor._rebuild_from_type_v2: a `StoredTensor` if it has a
    storage, or if its class is a training wrapper around a dense tensor; otherwise the call as an `Opaque`.

    Python attributes of a plain tensor (such as DeepSpeed's flat groups have) are dropped.

    Args:
        what: names the file in messages.
        func: the function that rebuilds the tensor: a stand-in of ours, or `WRAPPER` for a tensor subclass.
        cls: the class of the tensor.
        args: the arguments of `func`, a tuple.
        state: the pickled attributes of the tensor.

    Raises:
        Unsupported: it is one rank's part of a tensor, or nested, or has an attribute that replaces its numbers.
        Unsafe: its class is not one of tensors.
        Corrupt: it contradicts the tensor inside, or is no tensor.
    """
    if func == WRAPPER and isinstance(cls, Global) and isinstance(args, tuple):
        args = tuple(_check_size(x, what) if isinstance(x, Opaque) and x.cls == _SIZE else x for x in args)
        if is_dangerous(cls):
            raise Unsafe(
                f"{what}: the pickle makes a tensor of class {cls}, which is not training state.", code="CKPT0701"
            )
        if cls.module.startswith("torch.") and cls.name in ("DTensor", "ShardedTensor"):
            raise Unsupported(
                f"{what}: holds a {cls.name}, which is one rank's part of a tensor. Save the whole state with "
                "torch.distributed.checkpoint, or tensor.full_tensor().",
                code="CKPT0319",
            )
        if cls.name == "NestedTensor":
            raise Unsupported(
                f"{what}: holds a nested (jagged) tensor; ckpttool moves dense ones. Convert it to dense first.",
                code="CKPT0319",
            )
        dense = get_dense_tensor(cls, state)
        if isinstance(dense, StoredTensor):
            if args[1:3] != (Global("torch", dense.dtype), dense.shape):
                raise Corrupt(
                    f"{what}: a {cls} of {short(args[1:3])} holds a {dense.dtype} tensor of {list(dense.shape)}.",
                    code="CKPT0407",
                )
            return dense._replace(wrapper=cls.name)
        return Opaque(REBUILD, (func, cls, args, state), call=True)
    if isinstance(func, Global) or not callable(func) or not isinstance(args, tuple):
        raise Unsafe(f"{what}: the pickle calls {short(func)}.", code="CKPT0701")
    return drop_attributes(func(*args), state, what)


def _describe_tensor_metadata(bits: object) -> str:
    """Return a clause that says how the metadata of a tensor changes its numbers, and what to do (torch/_utils.py,
    set_tensor_metadata; a key acts whatever its value).

    Args:
        bits: the metadata, {"conj" or "neg": anything}.
    """
    if not isinstance(bits, dict):
        return f"has metadata {short(bits)}, which is not a dict"
    other = [k for k in bits if k not in _MEANING]
    if other:
        return f"has metadata {short(other[0])}, which ckpttool does not know, and which may change its numbers"
    meanings, calls = zip(*(_MEANING[k] for k in bits), strict=True)
    return f"{' and '.join(meanings)}. Save {''.join(f'.{c}()' for c in calls)} of it"


_NAMED = 16  # tensors whose place in the tree is looked for


def _refuse_unread_tensors(tree: object, unread: list[tuple[object, str]], what: str, later: bool) -> object:
    """Return a tree if it holds no tensor whose numbers differ from the bytes of its storage; with `later`, return it
    with a `Refused` in place of each such tensor.

    Args:
        tree: what the file holds.
        unread: (tensor, reason) of all such tensors.
        what: names the file in messages.
        later: do not raise.

    Raises:
        Unsupported: there is such a tensor, without `later`; the message gives its path.
    """
    if unread and later:
        reasons = {
            id(tensor): _describe_unread_tensor(tree if i < _NAMED else None, tensor, why, what)
            for i, (tensor, why) in enumerate(unread)
        }
        return map_tensors(tree, lambda t: Refused(reasons[id(t)]) if id(t) in reasons else t)
    if unread:
        raise Unsupported(_describe_unread_tensor(tree, *unread[0], what), code="CKPT0307")
    return tree


def _describe_unread_tensor(tree: object, tensor: object, why: str, what: str) -> str:
    """Return the sentence that says which tensor is refused, and why.

    Args:
        tree: where the path of the tensor is looked up; None to leave the path out.
        tensor: the tensor.
        why: the reason, to follow "the tensor".
        what: names the file.
    """
    name = joined(_find_path(tree, tensor) or ())
    return f'{what}: {f"""tensor "{name}" """ if name else "a tensor "}{why}.'


def _find_path(tree: Any, wanted: object) -> Path | None:
    """Return the path of the object `wanted` in nested dicts, lists and tuples; None if it is not there. For an object
    inside an `Opaque`, the path is that of the `Opaque`."""
    if tree is wanted:
        return ()
    if isinstance(tree, Opaque):  # a DTensor: its name is where it lies
        return () if any(_find_path(x, wanted) is not None for x in tree.parts()) else None
    if isinstance(tree, dict):
        inside: Any = tree.items()
    else:
        inside = enumerate(tree) if type(tree) in (list, tuple) else ()
    for key, x in inside:
        if (found := _find_path(x, wanted)) is not None:
            return (str(key), *found)
    return None


class _TensorBuilder:
    """Stand-ins for torch's functions that put a tensor together, with the arguments that those take.

    `what` names the file in messages. Tensors whose numbers would be others than the bytes of their storage are put
    into `unread`, with the reason.
    """

    def __init__(self, what: str, unread: list[tuple[Any, str]]) -> None:
        self.what, self.unread = what, unread

    def stand_ins(self) -> dict[tuple[str, str], Callable[..., object]]:
        """Return {(module, function of torch): what stands for it}."""
        return {
            **{("torch._utils", name): self._make_refusal(kind) for name, kind in _NOT_DENSE.items()},
            ("torch._utils", "_rebuild_tensor"): self.tensor_v1,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self.tensor_v3,
            ("torch._utils", "_rebuild_parameter"): self.parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self.parameter_with_state,
            REBUILD: lambda *call: rebuild_from_type(self.what, *call),
            **{call: partial(self.quantised, name) for call, name in TRANSFORMER_ENGINE.items()},
            ("torch.serialization", "_get_layout"): self.memory_layout,
        }

    def quantised(self, name: str, *args: object) -> Any:
        """Return what `rebuild_from_type` returns for a quantised tensor of TransformerEngine.

        Args:
            name: name of its class.
            args: the arguments of the pickled call.
        """
        return rebuild_from_type(self.what, *convert_transformer_engine_args(name, args, self.what))

    def _tensor(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        grad: object = False,
        hooks: object = None,
        bits: object = None,
        dtype: str | None = None,
    ) -> StoredTensor:
        """Return a tensor as a byte range of its storage, from the arguments of torch's functions.

        Args:
            storage: its `Storage`.
            offset: index of its first element in the storage.
            size, stride: its shape, and its strides in elements.
            grad, hooks: whether it requires gradients, and its backward hooks.
            bits: metadata that changes its numbers (conj, neg); None or {} for none.
            dtype: torch's name of it; None for that of the storage.

        Raises:
            Corrupt: it contradicts its storage.
            Unsupported: it is expanded to much more than its storage.
        """
        what = self.what
        if not isinstance(storage, Storage):
            raise _malformed_error(what, "a tensor has no storage")
        kind = dtype or storage.dtype
        if kind is None:
            raise _malformed_error(what, "a tensor has no dtype")
        size, stride = _check_size(size, what), _check_size(stride, what)
        if len(size) != len(stride) or type(offset) is not int or offset < 0:
            raise _malformed_error(what, f"a tensor has size {size}, stride {stride}, offset {short(offset)}")
        if any(n < 0 or n > MAX_NUMEL for n in (*size, *stride)) or prod(size) > MAX_NUMEL:
            raise _malformed_error(what, f"a tensor has size {size}, stride {stride}")
        at = offset * ITEMSIZE[kind]
        out = StoredTensor(kind, size, stride, storage, at)
        if 0 in stride and prod(size) * ITEMSIZE[kind] > max(1 << 30, 64 * storage.length):
            raise Unsupported(
                f"{what}: a tensor of size {size} expanded from {storage.length} bytes; save a contiguous one.",
                code="CKPT0319",
            )
        if at + out.span > storage.length:
            raise Corrupt(
                f"{what}: a tensor of size {size}, stride {stride}, offset {offset} reaches past its storage of "
                f"{storage.length} bytes.",
                code="CKPT0407",
            )
        self._check_grad(out, grad)
        if bits:
            self.unread.append((out, _describe_tensor_metadata(bits)))
        self._record_hooks(out, hooks)
        return out

    def tensor_v3(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        grad: object,
        hooks: object,
        dtype: object,
        bits: object = None,
    ) -> StoredTensor:
        """Return a tensor from the arguments of `_rebuild_tensor_v3`, of which one is the dtype.

        Raises:
            Corrupt: it contradicts its storage, or torch has no such dtype.
            Unsupported: it is expanded to much more than its storage.
        """
        if not (isinstance(dtype, Global) and dtype.module == "torch" and dtype.name in ITEMSIZE):
            raise _malformed_error(self.what, f"a tensor has dtype {short(dtype)}")
        return self._tensor(storage, offset, size, stride, grad, hooks, bits, dtype.name)

    def tensor_v2(
        self,
        storage: object,
        offset: object,
        size: object,
        stride: object,
        grad: object,
        hooks: object,
        bits: object = None,
    ) -> StoredTensor:
        """Return a tensor from the arguments of `_rebuild_tensor_v2`; its dtype is that of the storage.

        Raises:
            Corrupt: it contradicts its storage.
            Unsupported: it is expanded to much more than its storage.
        """
        return self._tensor(storage, offset, size, stride, grad, hooks, bits)

    def tensor_v1(self, storage: object, offset: object, size: object, stride: object) -> StoredTensor:
        """Return a tensor from the arguments of `_rebuild_tensor`, which have neither gradient nor hooks.

        Raises:
            Corrupt: it contradicts its storage.
            Unsupported: it is expanded to much more than its storage.
        """
        return self._tensor(storage, offset, size, stride)

    def parameter(self, data: object, grad: object, hooks: object) -> Any:
        """Return the tensor in a Parameter, from the arguments of `_rebuild_parameter`.

        Raises:
            Corrupt: it is no tensor, or requires gradients although its dtype cannot.
        """
        return self.parameter_with_state(data, grad, hooks, None)

    def parameter_with_state(self, data: object, grad: object, hooks: object, state: object) -> object:
        """Return the tensor in a Parameter, from the arguments of `_rebuild_parameter_with_state`; its Python
        attributes, `state`, are dropped.

        Raises:
            Corrupt: it is no tensor, or requires gradients although its dtype cannot.
            Unsupported: an attribute replaces the tensor's numbers.
        """
        self._check_grad(data, grad)
        self._record_hooks(data, hooks)
        return drop_attributes(data, state, self.what)

    def memory_layout(self, name: object) -> Global:
        """Return torch.strided, or another memory layout, by its name, the argument of `_get_layout`.

        Raises:
            Corrupt: the name is no text.
        """
        if not isinstance(name, str):
            raise _malformed_error(self.what, f"a tensor has the memory layout {short(name)}")
        return Global("torch", name.rpartition(".")[2])

    def _check_grad(self, x: object, grad: object) -> None:
        """Check the `requires_grad` of a tensor as torch does.

        Args:
            x: the tensor.
            grad: its `requires_grad`.

        Raises:
            Corrupt: it is not a bool, or is True for a tensor of integers or bools.
        """
        if type(grad) is not bool or (grad and isinstance(x, StoredTensor) and not x.dtype.startswith(_WITH_GRAD)):
            raise _malformed_error(self.what, f"{short(x)} has requires_grad {short(grad)}, which torch refuses")

    def _record_hooks(self, x: object, hooks: object) -> None:
        """Record a tensor that has backward hooks in `unread`."""
        if hooks:
            self.unread.append((x, "has backward hooks, which are code"))

    def _make_refusal(self, kind: str) -> Callable[..., object]:
        """Make a stand-in that raises Unsupported for tensors of a kind, such as "sparse"."""

        def refuse(*_: object) -> object:
            raise Unsupported(
                f"{self.what}: holds a {kind} tensor; ckpttool moves dense ones. Convert it to dense first.",
                code="CKPT0319",
            )

        return refuse


#: Functions in torch._utils that put together tensors that are not dense, and the kind.
_NOT_DENSE = {
    "_rebuild_sparse_tensor": "sparse",
    "_rebuild_qtensor": "quantized",
    "_rebuild_nested_tensor": "nested",
    "_rebuild_meta_tensor_no_storage": "meta (without data)",
    "_rebuild_device_tensor_from_numpy": "device (XLA, MTIA)",
    "_rebuild_device_tensor_from_cpu_tensor": "device (XLA, MTIA)",
    "_rebuild_xla_tensor": "device (XLA)",
}


def _make_tensor_stand_ins(
    what: str, unread: list[tuple[object, str]], later: bool = False
) -> dict[tuple[str, str], Any]:
    """Return the stand-ins for torch's functions that rebuild tensors: {(module, function): the function that replaces
    it}.

    Args:
        what: names the file in messages.
        unread: gets (tensor, reason) for each tensor whose numbers differ from the bytes of its storage.
        later: return a refused tensor as a `Refused` instead of raising Unsupported.
    """
    calls = _TensorBuilder(what, unread).stand_ins()
    return {name: _defer_refusals(f) for name, f in calls.items()} if later else calls


def _defer_refusals(f: Callable[..., object]) -> Callable[..., Any]:
    """Return a wrapper of `f` that returns a `Refused` instead of raising Unsupported; if an argument is a `Refused`
    already, it returns that."""

    def call(*args: object) -> Any:
        """Call the function, unless an argument is refused already."""
        for x in args:
            if isinstance(x, Refused):
                return x
        try:
            return f(*args)
        except Unsupported as e:
            return Refused(str(e))

    return call


_SIZE = Global("torch", "Size")


def make_size_stand_in(what: str) -> dict[tuple[str, str], object]:
    """Return the stand-in for torch.Size, {("torch", "Size"): function that makes a `Size`}, for a format that stores
    sizes itself; `what` names the file in messages."""
    return {_SIZE: lambda items=(): Size(_check_size(items, what))}


def _check_size(x: object, what: str) -> tuple[int, ...]:
    """Return the size or the strides of a tensor, as pickled, as a tuple; `what` names the file in messages.

    Raises:
        Corrupt: it is not up to 64 integers.
    """
    if isinstance(x, Opaque) and x.cls == _SIZE:
        x = x.args[0] if x.args else ()
    if isinstance(x, (tuple, list)) and len(x) <= 64 and all(type(n) is int for n in x):
        return tuple(x)
    raise _malformed_error(what, f"the size of a tensor is {short(x)}, not up to 64 integers")


def _read_legacy(
    read_at: ReadAt, base: int, length: int, what: str, stand_ins: dict[tuple[str, str], object], later: bool
) -> object:
    """Read a legacy torch.save file, written with `_use_new_zipfile_serialization=False` (torch/serialization.py,
    _legacy_save), and return its object with a `StoredTensor` for every tensor.

    Args:
        read_at: reads bytes (offset, length) of the file that contains the torch.save file.
        base, length: offset and size of the torch.save file in that, in bytes.
        what: names the file in messages.
        stand_ins: {(module, name): what replaces that class or function}, besides those for torch's tensors.
        later: return a tensor of an unsupported kind as a `Refused`.

    Raises:
        Corrupt: incomplete, damaged, or no torch.save file.
        Unsafe: it would run code.
        Unsupported: big-endian, a plain pickle or another format, or, without `later`, a tensor of an unsupported kind.
    """
    magic = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # LONG1 of 0x1950a86a20f9469cfc6c
    head = read_at(base, min(length, 32))
    if magic not in head:
        if length == 0:
            raise Corrupt(f"{what}: the file is empty.", code="CKPT0404")
        # a bare pickle: look at it, so that one that runs code is named for what it is
        if head[:1] in (b"\x80", b"c", b"("):
            load(read_at(base, min(length, MAX_PICKLE_BYTES)), what=what)
            raise Unsupported(
                f"{what} is a plain pickle, which torch.save does not write. Load it where it was made, and save its "
                "state dict with torch.save.",
                code="CKPT0306",
            )
        other_files.refuse_foreign_file(read_at(base, min(other_files.HEAD_BYTES, length)), what)
        raise _malformed_error(what, "it is neither a zip nor a legacy torch.save file")
    for window in (4 << 20, 32 << 20, MAX_PICKLE_BYTES):  # the pickles come first and are small, the storages are not
        try:
            return _parse_legacy(
                _read_first_bytes(read_at, base, min(length, window)), read_at, base, length, what, stand_ins, later
            )
        except _Cut:
            if window >= length:
                break
    raise Corrupt(
        f"{what}: the file ends within its pickles. The copy is incomplete; fetch the file again.", code="CKPT0403"
    )


def _read_first_bytes(read_at: ReadAt, base: int, length: int) -> bytes:
    """Read `length` bytes at `base`, or fewer if the file was cut off and repaired and has lost the others.

    Raises:
        LostBytes: none of them exists.
    """
    try:
        return read_at(base, length)
    except LostBytes as e:
        if e.present <= base:
            raise
        return read_at(base, e.present - base)


class _Cut(Exception):
    """The pickles do not end within the bytes at hand."""


def _parse_legacy(
    data: bytes,
    read_at: ReadAt,
    base: int,
    length: int,
    what: str,
    stand_ins: dict[tuple[str, str], object],
    later: bool,
) -> object:
    """Parse the pickles of a legacy torch.save file and locate its storages: the object, with a `StoredTensor` for
    every tensor.

    Args:
        data: the first bytes of the torch.save file.
        read_at: reads bytes (offset, length) of the file that contains it.
        base, length: offset and size of the torch.save file in that, in bytes.
        what: names the file in messages.
        stand_ins: {(module, name): what replaces that class or function}, besides those for torch's tensors.
        later: return a tensor of an unsupported kind as a `Refused`.

    Raises:
        _Cut: the pickles do not end within `data`.
        Corrupt: pickles and storages disagree, or the file is damaged.
        Unsafe: it would run code.
        Unsupported: big-endian, of torch < 0.4, or, without `later`, a tensor of an unsupported kind.
    """
    wanted: dict[str, tuple[str | None, int]] = {}
    numbers: dict[str, int] = {}
    unread: list[tuple[object, str]] = []

    def persistent(pid: object) -> object:
        """Remember a storage, given by its persistent id; where its bytes are is known after the pickles.

        Raises:
            Corrupt: it is declared twice with different types, or torch does not write it.
            Unsupported: it is of torch < 0.4, or of an unknown class.
        """
        if isinstance(pid, tuple) and len(pid) == 6 and pid[5] is not None:
            raise Unsupported(f"{what}: a storage view of torch < 0.4.", code="CKPT0306")
        if isinstance(pid, tuple) and pid[:1] == ("module",) and len(pid) == 4 and isinstance(pid[1], Global):
            return pid[1]  # the class of a module that was pickled whole, followed by its source code
        dtype, key, numel = _parse_storage_id(pid[:5] if isinstance(pid, tuple) and len(pid) == 6 else None, what)
        if wanted.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise _malformed_error(what, f"storage {key!r} is declared twice with different types")
        number = numbers.setdefault(key, len(numbers))
        return Storage(dtype, -1 - number, numel * (ITEMSIZE[dtype] if dtype else 1), None)

    at = 0
    try:
        for _ in range(3):  # magic, protocol, system info
            info, at = load(data, start=at, what=what)
        if isinstance(info, dict) and info.get("little_endian") is False:
            raise Unsupported(
                f"{what}: it was written on a big-endian machine. Load and save it there with torch as little-endian.",
                code="CKPT0306",
            )
        obj, at = load(
            data, {**_make_tensor_stand_ins(what, unread, later), **stand_ins}, persistent, start=at, what=what
        )
        obj = _refuse_unread_tensors(obj, unread, what, later)
        keys, at = load(data, start=at, what=what)
    except Truncated as e:
        raise _Cut from e
    if not isinstance(keys, list) or not all(type(k) is str for k in keys) or sorted(keys) != sorted(wanted):
        raise _malformed_error(what, "the list of storages disagrees with the pickle")
    places: list[int] = [0] * len(keys)
    for key in keys:
        dtype, numel = wanted[key]
        raw = read_at(base + at, 8) if at + 8 <= length else b""
        if len(raw) != 8:
            raise Corrupt(
                f"{what}: the file ends before storage {key!r}. The copy is incomplete; fetch the file again.",
                code="CKPT0403",
            )
        count = struct.unpack("<q", raw)[0]
        if count != numel:
            raise _malformed_error(what, f"storage {key!r} has {count} elements, but the pickle declares {numel}")
        places[numbers[key]] = base + at + 8
        at += 8 + numel * (ITEMSIZE[dtype] if dtype else 1)
    if at != length:
        raise _malformed_error(what, f"the file has {length} bytes, but its storages end at {at}")
    return map_tensors(obj, lambda t: t._replace(storage=t.storage._replace(offset=places[-1 - t.storage.offset])))
