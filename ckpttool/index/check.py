"""What must be true of an index before a byte is copied."""

from __future__ import annotations

from math import prod

from ..errors import Corrupt
from ..options import ARCHIVE_LAYOUT, HUB_LAYOUT
from . import boxes
from .checkpoint import ITEMSIZE, MAX_NUMEL, NOT_TORCHS, Checkpoint, Chunk, Chunks, TensorEntry
from .trees import check_no_leaf_inside_leaf

__all__ = ["check", "check_chunk"]


def check(ckpt: Checkpoint) -> None:
    """Check that an index is consistent, before a byte is copied.

    No name belongs to both a tensor and a value, and no entry is inside another one. The chunks of a tensor cover every
    element exactly once. Every extent lies inside its file, every raw extent is as long as dtype and shape need, and no
    number overflows.

    Raises:
        Corrupt: for the first problem, with the tensor, the file and the numbers.
    """
    if twice := min(ckpt.tensors.keys() & ckpt.values.keys(), default=None):
        raise Corrupt(
            f'"{twice}" is a tensor and a plain value at once: its files are not of one save. Take another copy.',
            code="CKPT0416",
        )
    check_no_leaf_inside_leaf({t.path for t in ckpt.tensors.values()} | {v.path for v in ckpt.values.values()})
    ends = [0] * len(ckpt.files)
    for name, t in ckpt.tensors.items():
        _check_tensor(ckpt, name, t)
        for file, offset, length in zip(t.chunks.file, t.chunks.offset, t.chunks.length, strict=True):
            if offset + length > ends[file]:
                ends[file] = offset + length
                if ends[file] > ckpt.sizes[file]:
                    raise Corrupt(
                        f'{ckpt.files[file]}: "{name}" needs bytes {offset}..{offset + length} but the file ends at '
                        f"{ckpt.sizes[file]}. The copy is incomplete; fetch the file again.",
                        code="CKPT0403",
                    )


def check_chunk(name: str, dtype: str, chunk: Chunk, file: str, file_bytes: int) -> None:
    """Check a chunk whose extent was found only after `check` had run: its bytes must lie inside the file, and a raw
    chunk must be as long as its box needs.

    Args:
        name, dtype: name and dtype of the tensor.
        chunk: the chunk; a compressed one may have any length.
        file, file_bytes: the file's name for messages, and its size.

    Raises:
        Corrupt: the chunk fails the check.
    """
    _, offset, length = chunk.extent
    if offset < 0 or offset + length > file_bytes:
        raise Corrupt(
            f'{file}: "{name}" needs bytes {offset}..{offset + length}, but the file ends at {file_bytes}. The copy is '
            "incomplete; fetch the file again.",
            code="CKPT0403",
        )
    needed = (boxes.span(chunk.shape, chunk.strides) if chunk.strides else prod(chunk.shape)) * ITEMSIZE[dtype]
    if chunk.zstd is None and length != needed:
        raise Corrupt(
            f'{file}: a chunk of "{name}" is {length} bytes long, but {dtype} {list(chunk.shape)} needs {needed}. The '
            "file and its index do not belong to the same checkpoint.",
            code="CKPT0412",
        )


def _check_tensor(ckpt: Checkpoint, name: str, t: TensorEntry) -> None:
    """Prove that the chunks of the tensor `name` cover it exactly once and have the bytes that its dtype needs.

    Raises:
        Corrupt: they do not, or torch cannot hold such a dtype or shape; with the tensor, the file and the numbers.
    """
    item = ITEMSIZE.get(t.dtype)
    if item is None or (t.dtype in NOT_TORCHS and ckpt.layout not in (HUB_LAYOUT, ARCHIVE_LAYOUT)):
        raise Corrupt(f'"{name}" has dtype {t.dtype!r}, which torch does not have.', code="CKPT0406")
    numel = t.numel
    counted = numel or prod(n or 1 for n in t.shape)  # torch computes strides of empty tensors too
    if counted > MAX_NUMEL or (t.shape and min(t.shape) < 0):
        raise Corrupt(
            f'"{name}" has shape {t.shape}: sizes below 0, or more elements or larger strides than torch can count.',
            code="CKPT0406",
        )
    c = t.chunks
    if c.ndim != len(t.shape):
        raise Corrupt(f'"{name}": chunks have {c.ndim} dimensions, the tensor has {len(t.shape)}.', code="CKPT0406")
    if len(c.file) == 1 and c.shape.tolist() == list(t.shape) and not any(c.start):
        want = [numel * item]  # most tensors of most layouts: one chunk, all of it
    elif _rows_cover_shape(c, t.shape):
        row = prod(t.shape[1:]) * item
        want = [n * row for n in c.shape[0 :: c.ndim]]
    else:
        reason = boxes.find_cover_problem(t.shape, c.boxes())
        if reason:
            raise Corrupt(f'"{name}" {t.shape}: {reason}.', code="CKPT0408")
        want = [prod(k) * item for _, k in c.boxes()]
    for k, (n, offset, length) in enumerate(zip(want, c.offset, c.length, strict=True)):
        if not 0 <= offset < 1 << 62 or not 0 <= length < 1 << 62:
            raise Corrupt(f'"{name}" has a chunk at bytes {offset}..+{length}; the index is damaged.', code="CKPT0406")
        if t.coding == "raw" and k in c.strides:
            n = boxes.span(c[k].shape, c.strides[k]) * item
        if (length != n and k not in c.zstd) if t.coding == "raw" else (length < n and t.coding == "torch.save"):
            raise Corrupt(
                f'{ckpt.files[c.file[k]]}: a chunk of "{name}" is {length} bytes long, but {t.dtype} '
                f"{c[k].shape} needs {n}. The file and its index do not belong to the same checkpoint.",
                code="CKPT0412",
            )


def _rows_cover_shape(c: Chunks, shape: tuple[int, ...]) -> bool:
    """Whether the chunks are ranges of whole rows (indices of dimension 0) that cover a tensor of `shape` without gaps
    or overlaps.

    Only columns are compared, which is fast. False may also mean that the chunks are not ranges of rows, so that the
    general proof has to decide.
    """
    order = c.rows_in_order() if len(c) and c.ndim else None
    if order is None or c.shape[1 : c.ndim].tolist() != list(shape[1:]):
        return False
    first, size = c.start[0 :: c.ndim], c.shape[0 :: c.ndim]
    if min(size) < 0 or min(first) < 0 or max(first) > shape[0]:
        return False
    at = 0
    for k in order:
        if first[k] != at:
            return False
        at += size[k]
    return at == shape[0]
