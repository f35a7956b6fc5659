"""data.pkl of torch.save files, and small torch.save files as a whole: written without torch."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..index import boxes
from ..index.checkpoint import ITEMSIZE
from .crc import crc32
from .pickle_writer import dump_pieces
from .pickles import Global, Opaque, map_children
from .stored_tensors import Inline
from .torch_zip import STORAGE_NAMES
from .zip_bytes import make_central_directory, make_local_header

__all__ = ["TensorRef", "make_head", "make_head_pieces", "pickle_pieces", "pickle_tree", "save_small_file"]


class TensorRef(NamedTuple):
    """A tensor to be written into a pickle, row-major: its storage's key and elements, and its own first among them."""

    dtype: str
    shape: tuple[int, ...]
    key: str
    numel: int
    first: int = 0

    def reduce(self) -> tuple[Global, tuple[object, ...]]:
        """Return the call by which torch rebuilds the tensor: (function, arguments)."""
        hooks = Opaque(Global("collections", "OrderedDict"), (), call=True)
        rest = (self.first, self.shape, boxes.strides(self.shape), False, hooks)
        if self.dtype in STORAGE_NAMES:
            return Global("torch._utils", "_rebuild_tensor_v2"), (_StorageRef(self), *rest)
        return Global("torch._utils", "_rebuild_tensor_v3"), (_StorageRef(self), *rest, Global("torch", self.dtype), {})


class _StorageRef(NamedTuple):
    tensor: TensorRef


def pickle_tree(tree: object) -> bytes:
    """Return data.pkl, the pickle in a torch.save file, as bytes.

    Args:
        tree: plain values, with a `TensorRef` for every tensor.

    Raises:
        TypeError: an object in it is of a type that no checkpoint has.
    """
    return b"".join(pickle_pieces(tree))


def pickle_pieces(tree: object) -> list[bytes]:
    """Return data.pkl, the pickle in a torch.save file, in pieces to be joined (`dump_pieces`).

    Args:
        tree: plain values, with a `TensorRef` for every tensor.

    Raises:
        TypeError: an object in it is of a type that no checkpoint has.
    """

    def persistent(x: object) -> tuple[object, ...] | None:
        """Return the persistent id of a storage; None for anything else."""
        if type(x) is not _StorageRef:
            return None
        t = x.tensor
        if t.dtype in STORAGE_NAMES:
            return ("storage", Global("torch", STORAGE_NAMES[t.dtype]), t.key, "cpu", t.numel)
        return ("storage", Global("torch.storage", "UntypedStorage"), t.key, "cpu", t.numel * ITEMSIZE[t.dtype])

    return dump_pieces(tree, persistent)


def save_small_file(value: object) -> bytes:
    """Return the bytes of a complete torch.save file that holds a value; `Inline` tensors become tensors.

    Raises:
        TypeError: an object in it is of a type that no checkpoint has.
    """
    data: list[bytes] = []

    def one(x: object) -> Any:
        """Replace each tensor in a value by a reference to a record of its own."""
        if isinstance(x, Inline):
            data.append(x.data)
            return TensorRef(x.dtype, x.shape, str(len(data) - 1), prod(x.shape))
        return map_children(x, one)

    pkl = pickle_tree(one(value))
    out = bytearray()
    records: list[tuple[str, int, int, int, bool]] = []
    members = [("data.pkl", pkl), ("byteorder", b"little"), ("version", b"3\n")]
    for name, body in members[:2] + [(f"data/{i}", b) for i, b in enumerate(data)] + members[2:]:
        crc = crc32(body)
        records.append((f"archive/{name}", len(out), len(body), crc, False))
        out += make_local_header(f"archive/{name}", len(body), crc, len(out), 64) + body
    return bytes(out + make_central_directory(records, len(out)))


def make_head(root: str, pkl: bytes) -> tuple[bytes, list[tuple[str, int, int, int, bool]]]:
    """Return the first records of a torch.save file as `make_head_pieces` does, but joined: (bytes, directory entries).

    Args:
        root: the folder in the zip that all records are in.
        pkl: the bytes of data.pkl.
    """
    pieces, records = make_head_pieces(root, [pkl])
    return b"".join(pieces), records


def make_head_pieces(root: str, pkl: list[bytes]) -> tuple[list[bytes], list[tuple[str, int, int, int, bool]]]:
    """Return the first records of a torch.save file, data.pkl and some small ones: (bytes in pieces, directory entries
    (name, offset of the local header, bytes, CRC32, False), as `make_central_directory` takes them).

    Args:
        root: the folder in the zip that all records are in.
        pkl: the bytes of data.pkl, in pieces.
    """
    out: list[bytes] = []
    records: list[tuple[str, int, int, int, bool]] = []
    small = {"byteorder": b"little", ".storage_alignment": b"64", "version": b"3\n"}
    at = 0
    for name, body in (("data.pkl", pkl), *((name, [text]) for name, text in small.items())):
        size, crc = sum(map(len, body)), 0
        for piece in body:
            crc = crc32(piece, crc)
        records.append((f"{root}/{name}", at, size, crc, False))
        header = make_local_header(f"{root}/{name}", size, crc, at, 64)
        out += [header, *body]
        at += len(header) + size
    return out, records
