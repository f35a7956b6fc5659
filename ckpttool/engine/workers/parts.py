"""Parts of a draft: runs of consecutive tensors, each of which any worker can fill by itself.

A draft lists its tensors so that every file is written front to back (index/draft.py). A run of them is therefore one
range of bytes in each file that it touches, and the next run begins where it ends. The cut depends on the draft alone,
so the bytes, the digests and the plan are the same for one worker and for a thousand.

A tensor is never cut: its digest is a BLAKE3 of all its bytes, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...index.checkpoint import TensorEntry
from ...index.draft import Draft

__all__ = ["Part", "cut_draft", "cut_tensors", "least_part_bytes"]

_MOST_BYTES = 1 << 30
_LEAST_BYTES = 16 << 20
_PARTS = 64  # as many at least, where that leaves _LEAST_BYTES for each
_LEAST_BYTES_OF_A_FILE = 8 << 20

#: Of a file that is sent to a store, a part has so many cells on average, at least and at most: those at its ends are
#: read twice.
_CELLS_OF_A_FILE = 2, 8


class Part(NamedTuple):
    """Tensors [first, stop) of a draft, or frames of an archive, and their bytes."""

    number: int
    first: int
    stop: int
    nbytes: int


def cut_tensors(tensors: Mapping[str, TensorEntry]) -> list[Part]:
    """Cut tensors that are read into parts, whatever files they lie in."""
    return _cut(tensors, {}, 0)


def cut_draft(draft: Draft, cell_bytes: int = 0) -> list[Part]:
    """Cut a draft into parts. A part ends as soon as it has

    1 GiB, or a 64th of the whole but at least 16 MiB
    8 MiB on average for each file that the next part goes on with; 2 to 8 cells of `cell_bytes` in a store
    """
    of_a_file = _LEAST_BYTES_OF_A_FILE
    if cell_bytes:
        fewest, most = (n * cell_bytes for n in _CELLS_OF_A_FILE)
        of_a_file = max(fewest, min(most, draft.nbytes // _PARTS // len(draft.files)))
    return _cut(draft.checkpoint.tensors, draft.aliases, of_a_file)


def least_part_bytes(whole: int) -> int:
    """Return the least size, in bytes, of every part but the last, where there are `whole` bytes in all."""
    return min(_MOST_BYTES, max(_LEAST_BYTES, whole // _PARTS))


def _cut(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], of_a_file: int) -> list[Part]:
    """Cut tensors into parts that have at least `of_a_file` bytes for each file that the next part goes on with."""
    least = least_part_bytes(sum(t.nbytes for n, t in tensors.items() if n not in aliases))
    last: dict[int, int] = {}  # the tensor that ends a file
    for i, (name, t) in enumerate(tensors.items() if of_a_file else ()):
        if name not in aliases:
            last.update(dict.fromkeys(t.chunks.file, i))
    out: list[Part] = []
    first = size = 0
    files: set[int] = set()
    for i, (name, t) in enumerate(tensors.items()):
        if name in aliases:
            continue
        size += t.nbytes
        if of_a_file:
            files.update(t.chunks.file)
        if size >= least and size >= of_a_file * sum(last[f] > i for f in files):
            out.append(Part(len(out), first, i + 1, size))
            first, size, files = i + 1, 0, set()
    if first < len(tensors):
        out.append(Part(len(out), first, len(tensors), size))
    return out
