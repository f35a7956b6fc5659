"""fp32 masters beside the weights that a model computes with: each rounds to its weight, bit for bit, and is equal to
one in float32.

Trainers with masters update them and round the result into the weights (`Tensor.copy_`; TransformerEngine's kernel for
remainders rounds halfway numbers away from zero instead of to even), so the two differ only where
they are of different steps, or where the save itself went wrong (Megatron-Core's `fully_reshardable` with tied
embeddings and pipeline parallelism). Megatron-Core and nanotron load both again; of DeepSpeed's, the index has the
masters as the weights, and what its engine computes with in `Checkpoint.rounded`. Trainers that round at random
(torchao's bf16_stochastic_round) keep no masters.

    find_numeric_remainders(...)  float32 tensors in the place of masters that are no masters (remainders.py)
    find_differing_masters(...)   all elements of all pairs, reading both
    refuse_differing_masters(...) a sample of every pair, before anything else is read
    sample_masters(...)           how those differ in it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ... import layouts
from ...errors import Corrupt, argument
from ...index import boxes
from ...index.checkpoint import Checkpoint, TensorEntry, joined
from ...options import Progress
from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ...storage.source import Source
from ..copy.dtypes import cast, numpy_dtype
from ..copy.stream import Reader, StreamJob, pair_stream_pieces, read_small_tensors
from ..handle import cut_chunks

if TYPE_CHECKING:
    from ..copy.dtypes import Array

__all__ = [
    "describe_differing_masters",
    "describe_element_place",
    "find_differing_masters",
    "find_master_pairs",
    "find_numeric_remainders",
    "refuse_differing_masters",
    "sample_masters",
    "select_pairs_of_moments",
    "select_some_pairs",
]

_RANK_FILE = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
_HALF = ("bfloat16", "float16")
_SHOWN = 3
#: Below, kernels that are compiled with fast math take a float32 for zero.
_LEAST_NORMAL = 2.0**-126
_PLACES, _ELEMENTS = 8, 2048  # of a sample: boxes of a tensor, elements of a box; 64 KiB of a master

_Pair = tuple[TensorEntry, TensorEntry]


@dataclass
class MasterDifference:
    """Elements of a master that do not round to those of the weight: how many (`count` of `looked_at`), and the flat
    index and the numbers of the first."""

    count: int
    first: int
    master: float
    rounded: float
    weight: float
    looked_at: int = 0


def find_master_pairs(ckpt: Checkpoint) -> dict[str, _Pair]:
    """Return {name of a weight: (its fp32 master, the weight)} of the pairs that can be compared."""
    out = {}
    for name, t in ckpt.tensors.items():
        if t.path[:2] == ("extra", "master") and name not in ckpt.numeric_remainders:
            of = joined(("model", *t.path[2:]))
            if (weight := ckpt.tensors.get(of)) is not None:
                out[of] = (t, weight)
        elif (low := ckpt.rounded.get(name)) is not None:
            out[name] = (t, low)
    return {
        n: (t, w)
        for n, (t, w) in out.items()
        if t.dtype == "float32" and w.dtype in (*_HALF, "float32") and t.shape == w.shape and t.numel
    }


def find_differing_masters(ckpt: Checkpoint, source: Source, progress: Progress) -> dict[str, MasterDifference]:
    """Compare all fp32 masters with their weights, and return {weight: how its master differs} of those that do not
    round to their weight.

    Args:
        progress: called with ("compare", bytes of masters done, bytes in all).

    Raises:
        Corrupt, SourceChanged: bytes are missing or were changed.
    """
    pairs = find_master_pairs(ckpt)
    found: dict[str, MasterDifference] = {}
    passed, total = 0, sum(t.nbytes for t, _ in pairs.values())
    for nbytes in _compare_parts(
        ckpt, source, [(name, 0, pair) for name, pair in pairs.items()], found, DEFAULT_BUDGET
    ):
        passed += nbytes
        progress("compare", passed, total)
    return found


def select_pairs_of_moments(whole: Checkpoint, part: Checkpoint) -> Checkpoint:
    """Return the part of `whole` that has the masters and weights of the parameters with optimizer state in `part`; an
    empty part if `part` has them all already.

    A save that stored masters at wrong places stored the moments there, too.
    """
    trained = {t.parameter for t in part.tensors.values() if t.slot is not None}
    pairs = {n: pair for n, pair in find_master_pairs(whole).items() if pair[1].parameter in trained}
    wanted = {joined(t.path) for pair in pairs.values() for t in pair}
    return whole.part(wanted.__contains__ if wanted - part.tensors.keys() else lambda name: False)


def select_some_pairs(ckpt: Checkpoint, most: int) -> Checkpoint:
    """Return the part of a checkpoint with at most `most` pairs of a master and its weight, spread over its names."""
    pairs = list(find_master_pairs(ckpt).values())
    n = min(most, len(pairs))
    wanted = {joined(t.path) for k in range(n) for t in pairs[k * len(pairs) // n]}
    return ckpt.part(wanted.__contains__)


def sample_masters(ckpt: Checkpoint, source: Source) -> dict[str, MasterDifference]:
    """Compare a few places of each fp32 master with its weight, one place if the source is remote, and return {weight:
    how its master differs}.

    Compressed tensors are skipped: they would have to be read completely.

    Raises:
        Corrupt, SourceChanged: bytes are missing or were changed.
    """
    rows = []
    for name, (master, weight) in find_master_pairs(ckpt).items():
        if not (master.chunks.zstd or weight.chunks.zstd):
            for box in _choose_sample_boxes(master.shape, 1 if source.is_remote else _PLACES):
                rows.append(
                    (name, boxes.flat_start(master.shape, box[0]), (_cut_box(master, box), _cut_box(weight, box)))
                )
    extents = (c.extent for _, _, both in rows for t in both for c in t.chunks)
    source.prefetch((ckpt.files[e.file], e.offset, e.length) for e in extents)
    found: dict[str, MasterDifference] = {}
    for _ in _compare_parts(ckpt, source, rows, found, IOBudget(1, 256 << 10)):
        pass
    return found


def refuse_differing_masters(ckpt: Checkpoint, source: Source) -> None:
    """Raise an error if a sample of the fp32 masters does not round to the weights.

    Raises:
        Corrupt: a master differs; the message has counts, the first tensors, their numbers, and possible causes.
    """
    if found := sample_masters(ckpt, source):
        raise Corrupt(
            f"{ckpt.root}: {describe_differing_masters(ckpt, found)}. The weights alone: "
            f"{argument('only', ['model'])}. To "
            f"keep both as they are, use {argument('allow_mixed_steps', True)}.",
            code="CKPT0415",
        )


def find_numeric_remainders(ckpt: Checkpoint, source: Source) -> frozenset[str]:
    """Return the names of the float32 masters whose numbers are in fact int16 remainders of the weights, by a sample of
    each.

    They are remainders if all numbers of all samples are integers of 16 bits and some do not round to their weights;
    else the result is empty. Megatron-Core writes remainders like this where it gathers the state of ranks.

    Args:
        ckpt: the index, located.
    """
    import numpy as np

    found, other = set[str](), False
    for master, weight in find_master_pairs(ckpt).values():
        if weight.dtype != "bfloat16":
            continue
        box = _choose_sample_boxes(master.shape, 1)[0]
        both = {"master": _cut_box(master, box), "weight": _cut_box(weight, box)}
        data = read_small_tensors(replace(ckpt, tensors=both), source, both)
        numbers = np.frombuffer(data["master"], "<f4")
        if not ((numbers >= -(1 << 15)) & (numbers < 1 << 15) & (numbers == np.trunc(numbers))).all():
            return frozenset()
        found.add(joined(master.path))
        other |= _compare_piece(memoryview(data["master"]), memoryview(data["weight"]), weight.dtype) is not None
    return frozenset(found) if other else frozenset()


def _choose_sample_boxes(shape: tuple[int, ...], most: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return at most `most` boxes, as (start, shape), spread over a tensor of this shape; each is a contiguous range of
    at most `_ELEMENTS` elements. A small tensor is one box."""
    if prod(shape) <= _ELEMENTS * most:
        return [((0,) * len(shape), shape)]
    # a box has part of the dimension `split`, all of those behind it, and one of those before it
    split = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= _ELEMENTS)
    n = min(shape[split], _ELEMENTS // prod(shape[split + 1 :]))
    size = (*[1] * split, n, *shape[split + 1 :])
    # the first box is at the beginning and the last at the end, in all dimensions; the others in other mixtures
    room = [a - b for a, b in zip(shape, size, strict=True)]
    steps = [[k if k in (0, most - 1) else (k + d) % most for d in range(len(shape))] for k in range(most)]
    starts = {tuple(r * step // max(1, most - 1) for r, step in zip(room, row, strict=True)): None for row in steps}
    return [(start, size) for start in starts]


def _cut_box(t: TensorEntry, box: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorEntry:
    """Return a part of a tensor as a tensor of its own, which refers to the same bytes.

    Args:
        t: the tensor.
        box: (index of the part's first element in each dimension, shape of the part).
    """
    return replace(t, shape=box[1], chunks=cut_chunks(t, box))


def _compare_parts(
    ckpt: Checkpoint,
    source: Source,
    rows: Sequence[tuple[str, int, _Pair]],
    found: dict[str, MasterDifference],
    budget: IOBudget,
) -> Iterator[int]:
    """Compare parts of fp32 masters with the same parts of their weights, step by step; yield after each step how many
    bytes of the master it compared.

    Args:
        rows: (name of the weight, flat index of the part's first element, (part of the master, part of the weight)).
        found: {weight: how its master differs}, which is filled in.
    """
    streams = [
        Reader(source, ckpt.files, None, budget).blocks([StreamJob(n, both[k]) for n, _, both in rows])
        for k in range(2)
    ]
    looked_at: dict[str, int] = {}
    for name, start, (master, weight) in rows:
        for first, wide, low in pair_stream_pieces(streams, master, weight):
            looked_at[name] = looked_at.get(name, 0) + len(wide) // 4
            odd = _compare_piece(wide, low, weight.dtype)
            if odd is not None and name in found:
                found[name].count += odd.count
            elif odd is not None:
                odd.first += start + first
                found[name] = odd
            if name in found:
                found[name].looked_at = looked_at[name]
            yield len(wide)


def describe_differing_masters(ckpt: Checkpoint, found: Mapping[str, MasterDifference]) -> str:
    """Return a text about masters that do not round to their weights: counts, the first elements, and what to do.

    Args:
        found: {weight: how its master differs}.
    """
    pairs = find_master_pairs(ckpt)
    rows = [
        f'"{n}": {o.count:,} of {o.looked_at:,} '
        f"elements{' that were looked at' if o.looked_at < pairs[n][0].numel else ''}, the first "
        f"{describe_element_place(ckpt, pairs[n][0], o.first)}: {_describe_numbers(o)}"
        for n, o in list(found.items())[:_SHOWN]
    ]
    more = f"; and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    known = layouts.get_program_of(ckpt.layout).about_masters
    return (
        f"{len(found):,} of {len(pairs):,} fp32 masters do not round to the weights beside them. {'; '.join(rows)}"
        f"{more}. The model computes with the weights, and training goes on from the masters, so they are from "
        "different steps, or one of the two was changed or restored in part. Take another copy of this step, or an "
        f"earlier step{known}"
    )


def _describe_numbers(o: MasterDifference) -> str:
    """Write the numbers of the first element that differs: of the master, of what it rounds to, and of the weight."""
    rounds = (
        f"the master {o.master:.9g} rounds to {o.rounded:.9g}"
        if o.rounded != o.master
        else f"the master is {o.master:.9g}"
    )
    return f"{rounds}, and the weight is {o.weight:.9g}"


def describe_element_place(ckpt: Checkpoint, t: TensorEntry, flat: int) -> str:
    """Return a text that says where an element of a tensor is stored: "at [3, 4], in FILE of rank 1".

    Args:
        flat: flat index of the element.
    """
    index = list(boxes.flat_to_boxes(t.shape, flat, flat + 1)[0][0])
    for (start, shape), file in zip(t.chunks.boxes(), t.chunks.file, strict=True):
        if all(a <= i < a + k for i, a, k in zip(index, start, shape, strict=True)):
            name = ckpt.files[file]
            m = _RANK_FILE.fullmatch(name)
            rank = ckpt.ranks.get(file, int(m[1]) if m else None)
            return f"at {index}, in {name}" + (f" of rank {rank}" if rank is not None else "")
    return f"at {index}"


def _compare_piece(wide: memoryview, low: memoryview, dtype: str) -> MasterDifference | None:
    """Compare elements of a master with those of its weight, which may have been cast since from one 16-bit float dtype
    to the other, or to float32.

    Args:
        wide: bytes of elements of the master, in float32.
        low: bytes of the same elements of the weight.
        dtype: the dtype of the weight.

    Returns:
        How they differ, with `first` counted from the first of these elements; None where they agree.
    """
    import numpy as np

    f, w = np.frombuffer(wide, "<f4"), np.frombuffer(low, numpy_dtype(dtype))
    r = _cast_array_like_torch(f, "float32", dtype)
    bits = "u4" if dtype == "float32" else "u2"
    wrong = r.view(bits) != w.view(bits)
    if not wrong.any():
        return None
    # no difference: two NaNs; a zero for a number that fast kernels flush; a number halfway that is rounded away from
    # zero; what rounds through another half
    with np.errstate(all="ignore"):
        a, b = r.astype("f4"), w.astype("f4")
        wrong &= ~(np.isnan(a) & np.isnan(b))
        wrong &= ~((b == 0) & (np.abs(f) < _LEAST_NORMAL))
    if dtype == "bfloat16":
        wrong &= ((f.view("u4") + 0x8000) >> 16).astype("u2") != w.view("u2")
    for other in _HALF:
        if other != dtype:
            wrong &= _cast_array_like_torch(_cast_array_like_torch(f, "float32", other), other, dtype).view(
                bits
            ) != w.view(bits)
    if not wrong.any():
        return None
    k = int(wrong.argmax())
    return MasterDifference(int(np.count_nonzero(wrong)), k, float(f[k]), float(a[k]), float(b[k]))


def _cast_array_like_torch(x: Array, dtype: str, to: str) -> Array:
    """Return the elements `x`, of torch dtype `dtype`, in the torch dtype `to`, rounded as torch does."""
    import numpy as np

    out = np.empty(x.shape, numpy_dtype(to))
    cast(x.view("u1").data, dtype, out.view("u1").data, to)
    return out
