"""`change=`: tensors with numbers that a function of the caller computes, a page at a time.

    convert(src, dst, to="dcp", change={"model.*.weight": lambda page: page.values * 2})

A page is computed when it is read, so no tensor is in memory as a whole, and everything that holds for a conversion
holds for the result: the account lists what was changed, and it is read back and compared with what was computed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import Unsupported, UsageError, argument
from ...huggingface import encodings
from ...index import boxes
from ...index.checkpoint import FLOATING, Checkpoint, Chunks, TensorEntry, joined, tied_weights
from ...index.composites import find_composites
from ...printable import count_noun, list_first
from ...storage.overlay import ComputedSource
from ...storage.source import Source
from ..computed_files import BoxReader, ComputedFiles, cast_array, choose_page_size

if TYPE_CHECKING:
    from ..copy.dtypes import Array

__all__ = ["Page", "change_tensors"]


@dataclass(frozen=True)
class Page:
    """A box of a tensor, as `convert` gives it to a function of `change`.

    `name` is the canonical name of the tensor, `index` says which elements these are, one slice for each dimension, and
    `values` is a numpy array of them, [end - start of each slice], in the dtype of the tensor (that of ml_dtypes for
    bfloat16 and float8). `other[page.name][page.index]` reads the same elements of another open checkpoint.
    """

    name: str
    index: tuple[slice, ...]
    values: Array


def change_tensors(
    ckpt: Checkpoint, source: Source, beside: Source | None, changes: Mapping[str, Callable[[Page], object]]
) -> tuple[Checkpoint, Source]:
    """Replace the tensors whose names match by tensors that functions compute when they are read, and return (the new
    index, its files).

    Args:
        ckpt: the state, located.
        source: its files.
        beside: the folder of the checkpoint, which may contain a config; None for a single-file checkpoint.
        changes: {glob of names: function}; if several globs match a name, the last one counts.

    Raises:
        UsageError: a pattern matches no name, or only one of two tied weights.
        Unsupported: a tensor is a part of a quantised weight.
    """
    chosen: dict[str, Callable[[Page], object]] = {}
    for pattern, function in changes.items():
        names = fnmatch.filter(ckpt.tensors, pattern)
        if not names:
            first = next(iter(ckpt.tensors), "none")
            raise UsageError(
                f"change {pattern!r}: no tensor has such a name. The first name is {first}.", code="CKPT0207"
            )
        chosen |= dict.fromkeys(names, function)
    # parameters of an optimizer may share a step in a file, and are not tied by that
    tied = tied_weights({n: t for n, t in ckpt.tensors.items() if t.component == "model"})
    for name, kept in tied.items():
        if chosen.get(name) is not chosen.get(kept):
            raise UsageError(
                f'change: "{name}" and "{kept}" are one tensor under two names (tied weights). Change '
                "both with one function, so that they stay equal.",
                code="CKPT0223",
            )
    _refuse_quantised_tensors(ckpt, beside, chosen)
    files, reader, tensors = ComputedFiles(ckpt), BoxReader(ckpt, source), dict(ckpt.tensors)
    for name in (n for n in chosen if n not in tied):
        t = ckpt.tensors[name]
        compute = _make_computation(reader, name, t, chosen[name])
        place = files.add(f"{name} (changed)", t.dtype, t.shape, compute, choose_page_size([t]))
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, *place), coding="raw")
    for name in (n for n in chosen if n in tied):
        tensors[name] = replace(tensors[tied[name]], path=ckpt.tensors[name].path)
    # what was recorded of the others must still hold; an engine computes weights from their masters again
    notes = [f"{count_noun(len(chosen), 'tensor')} changed: {list_first(chosen)}"]
    masters = [n for n in chosen if (m := f"extra.master.{n.removeprefix('model.')}") in tensors and m not in chosen]
    if masters:
        notes.append(
            f"{count_noun(len(masters), 'weight')} of these have fp32 masters under extra.master, from which an engine "
            f'computes the weights again, and which were not changed; first "{masters[0]}"'
        )
    out = replace(
        ckpt,
        files=files.names,
        sizes=files.sizes,
        tensors=tensors,
        recorded={n: d for n, d in ckpt.recorded.items() if n not in chosen},
        rounded={n: t for n, t in ckpt.rounded.items() if n not in chosen},
        notes=[*ckpt.notes, *notes],
    )
    working = files.working_bytes + reader.working_bytes + source.working_bytes
    return out, ComputedSource(source, files.made, (), working)


def _refuse_quantised_tensors(ckpt: Checkpoint, beside: Source | None, chosen: Mapping[str, object]) -> None:
    """Raise an error if a tensor is a part of a quantised weight or of a tensor subclass (codes, scales), whose numbers
    mean nothing alone.

    Args:
        beside: the folder of the checkpoint; None for a single-file checkpoint.
        chosen: {name of a tensor that is to be changed: its function}.

    Raises:
        Unsupported: there is such a tensor; the message names the first.
    """
    codes = encodings.find_codes(ckpt, beside)
    parts = {joined(t.path) for c in find_composites(ckpt).values() for t in c.tensors.values()}
    for name in chosen:
        if name in parts or codes.describe(name):
            raise Unsupported(
                f'change: "{name}" holds codes or scales, whose numbers mean something only together. '
                f"{argument('dequantize', ['*'])} makes plain numbers of them first.",
                code="CKPT0318",
            )


def _make_computation(
    reader: BoxReader, name: str, t: TensorEntry, function: Callable[[Page], object]
) -> Callable[[int, int], Array]:
    """Return a function (first, end) that computes these elements of a tensor with the caller's function."""

    def compute(first: int, end: int) -> Array:
        """Compute elements [first, end), box by box."""
        import numpy as np

        out = [_compute_box(reader, name, t, function, box) for box in boxes.flat_to_boxes(t.shape, first, end)]
        return out[0] if len(out) == 1 else np.concatenate(out)

    return compute


def _compute_box(
    reader: BoxReader,
    name: str,
    t: TensorEntry,
    function: Callable[[Page], object],
    box: tuple[tuple[int, ...], tuple[int, ...]],
) -> Array:
    """Call the caller's function with a box (start, shape) of a tensor, and return the result as a flat array of the
    tensor's dtype.

    Raises:
        UsageError: the function returns another shape, or a dtype that cannot be cast.
        Unsupported: a number does not fit into the dtype.
    """
    import numpy as np

    start, shape = box
    index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    found = np.asarray(function(Page(name, index, reader.read(t, [box]).reshape(shape).copy())))
    if found.shape != shape:
        raise UsageError(
            f'change: the function made {list(found.shape)} of {list(shape)} of "{name}"; it has to '
            "return an array of the same shape.",
            code="CKPT0223",
        )
    flat, dtype = np.ascontiguousarray(found).reshape(-1), found.dtype.name
    if dtype != t.dtype and not {dtype, t.dtype} <= FLOATING:
        raise UsageError(f'change: the function made {dtype} of "{name}", which is {t.dtype}.', code="CKPT0223")
    out, lost = cast_array(flat, dtype, t.dtype)
    if lost:
        raise Unsupported(
            f'change: {count_noun(lost, "number")} of "{name}" {"does" if lost == 1 else "do"} not fit into {t.dtype}.',
            code="CKPT0332",
        )
    return out
