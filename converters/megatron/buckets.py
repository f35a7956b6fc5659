"""The buckets of Megatron-Core's DistributedOptimizer (`dp_reshardable`): whose state each segment is.

A bucket is a run of parameters of one data-parallel group, flattened, each at a multiple of 64 elements, the last
parameter of the model first (distributed/param_and_grad_buffer.py). It is stored as 1-D tensors `param`, `exp_avg` and
`exp_avg_sq`, in which every parameter and every gap is a chunk, or several where data-parallel ranks part it. No name
is stored. Gaps hold whatever the memory held. What lies where follows from the values:

    A segment is the fp32 copy of a parameter that, rounded, is the weight in the model, bit for bit (by BLAKE3, one
    pass over both).

A weight may be whole in a group or cut by tensor parallelism, which the chunks of the weight show; an expert is a
parameter of its own. Where several weights are equal (norms that are still ones), values do not tell. Then the order
does, under conditions: all weights that values tell are in the order of the model, and between two of them there is for
each segment one weight and for each weight one segment, and none could be exchanged. Otherwise the weights are refused
by name.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ckpttool.engine.copy.tensor_digests import proof_digests
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.index import boxes
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Path, TensorEntry, joined
from ckpttool.storage.source import Source

from .keys import BUCKETS

__all__ = ["ALIGNED", "Bucket", "Local", "Run", "entries", "place", "resolve"]

#: Parameters begin at multiples of this in a bucket.
ALIGNED = 64
_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<i>\d+)\.(?P<rest>.+)", re.DOTALL)
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Local(NamedTuple):
    """A parameter as one group has it: boxes of a weight, one behind the other when flattened."""

    weight: str
    boxes: tuple[Box, ...]


@dataclass
class Run:
    """Elements [first, last) of a bucket that are one parameter, and who that can be."""

    first: int
    last: int
    fits: list[Local]
    chosen: Local | None = None


@dataclass
class Bucket:
    """One bucket; `slots` {slot: its 1-D tensor}."""

    name: str
    group: str
    slots: dict[str, TensorEntry]
    runs: list[Run] = field(default_factory=list)

    @property
    def param(self) -> TensorEntry:
        """The fp32 copies."""
        return self.slots["param"]


def resolve(ckpt: Checkpoint, source: Source) -> tuple[dict[Path, TensorEntry], list[str]]:
    """({canonical path: tensor} of everything in the buckets of a located checkpoint, notes).

    Raises:
        Unsupported: a segment is no weight, or it cannot be told which of several; with their names.
    """
    weights = {str(t.path[1]): t for t in ckpt.tensors.values() if t.path[0] == "model" and len(t.path) == 2}
    found = _buckets(ckpt)
    locals_of = {name: list(_locals(name, t)) for name, t in weights.items()}
    _find_runs(found, weights, locals_of, source, ckpt)
    notes = [
        f"the optimizer's {sum(len(b.runs) for b in found)} segments have no names in this format (dp_reshardable); "
        "each was found by its value, the fp32 copy of a weight that rounds to it bit for bit"
    ]
    _choose(found, list(weights), notes)
    return entries(found, weights, source, ckpt, notes), notes


def _buckets(ckpt: Checkpoint) -> list[Bucket]:
    """The buckets by group, buffer and number."""
    of: dict[str, Bucket] = {}
    for t in ckpt.tensors.values():
        if BUCKETS not in t.path:
            continue
        at = t.path.index(BUCKETS)
        name, slot = str(t.path[at + 1]), str(t.path[at + 2])
        group = name.partition(".gbuf_idx_")[0]
        of.setdefault(name, Bucket(name, group, {})).slots[slot] = t
    for b in of.values():
        if "param" not in b.slots or any(len(t.shape) != 1 or t.shape != b.param.shape for t in b.slots.values()):
            raise Corrupt(f'"{b.name}" has not one flat tensor of each kind, of equal lengths.')
        if "float" not in b.param.dtype:
            raise Unsupported(
                f'"{b.name}.param" is {b.param.dtype}: the remainders of the weights (store_param_remainders), which '
                "name no parameter. Save with fully_reshardable, or convert the weights alone."
            )
    return sorted(of.values(), key=lambda b: [int(n) for n in re.findall(r"_idx_(\d+)", b.name)])


def _locals(name: str, t: TensorEntry) -> Iterable[Local]:
    """What a group may have of a weight: all of it, or a part of tensor parallelism; of experts, those of one."""
    of = t.chunks.boxes()
    if len(t.shape) == 3 and re.search(r"\bexperts\b", name):
        for e in range(t.shape[0]):
            yield from _cuts(name, [(s, n) for s, n in of if s[0] == e and n[0] == 1], ((e, 0, 0), (1, *t.shape[1:])))
        return
    yield from _cuts(name, of, ((0,) * len(t.shape), t.shape))


def _cuts(name: str, of: list[Box], whole: Box) -> Iterable[Local]:
    yield Local(name, (whole,))
    of = sorted(b for b in of if prod(b[1]))
    if len({n for _, n in of}) != 1:
        return
    for parts in range(2, len(of) + 1):
        if len(of) % parts == 0:
            for k in range(parts):  # gated matrices: each rank has its rows of both
                yield Local(name, tuple(of[k::parts]))


def _size(local: Local) -> int:
    return sum(prod(n) for _, n in local.boxes)


def _find_runs(
    found: list[Bucket],
    weights: Mapping[str, TensorEntry],
    locals_of: Mapping[str, list[Local]],
    source: Source,
    ckpt: Checkpoint,
) -> None:
    """Find the runs of every bucket by value."""
    sizes: dict[int, list[Local]] = {}
    for some in locals_of.values():
        for local in some:
            sizes.setdefault(_size(local), []).append(local)
    jobs: dict[str, TensorEntry] = {}
    dtypes: dict[str, str] = {}
    wanted: set[int] = set()
    kinds = {n: {weights[x.weight].dtype for x in some} for n, some in sizes.items()}
    for number, b in enumerate(found):
        ends = sorted(s[0] + n[0] for s, n in b.param.chunks.boxes() if n[0])
        for first in sorted(s[0] for s, n in b.param.chunks.boxes() if n[0] and s[0] % ALIGNED == 0):
            for last in ends[bisect_right(ends, first) :]:
                for dtype in kinds.get(last - first, ()):
                    name = f"{number}:{first}:{last}:{dtype}"
                    jobs[name], dtypes[name] = _flat(b.param, first, last), dtype
                    wanted.add(last - first)
    for n in wanted:
        for local in sizes[n]:
            jobs[_called(local)] = _of_weight(weights[local.weight], local)
    digests = proof_digests(jobs, ckpt, source, dtypes)
    by_digest: dict[tuple[str, str], list[Local]] = {}
    for n in wanted:
        for local in sizes[n]:
            by_digest.setdefault((weights[local.weight].dtype, digests[_called(local)]), []).append(local)
    for number, b in enumerate(found):
        at, size = 0, b.param.shape[0]
        ends = sorted(s[0] + n[0] for s, n in b.param.chunks.boxes() if n[0])
        while at < size:
            runs = []
            for last in ends[bisect_right(ends, at) :]:
                for dtype in kinds.get(last - at, ()):
                    digest = digests.get(f"{number}:{at}:{last}:{dtype}", "")
                    if fits := by_digest.get((dtype, digest)):
                        runs.append(Run(at, last, fits))
            if len(runs) != 1:
                why = (
                    "is not a weight of the model: its fp32 values do not round to those of any"
                    if not runs
                    else "could end at several places"
                )
                raise Unsupported(
                    f'The optimizer\'s segment at element {at} of "{b.name}" {why}, so nothing tells whose moments '
                    "these are. Save with fully_reshardable, or convert the weights alone."
                )
            b.runs.append(runs[0])
            at = -(-runs[0].last // ALIGNED) * ALIGNED


def _called(local: Local) -> str:
    return f"{local.weight}:{local.boxes}"


def _flat(t: TensorEntry, first: int, last: int) -> TensorEntry:
    """Elements [first, last) of a 1-D tensor."""
    out, item = Chunks(1), ITEMSIZE[t.dtype]
    for row, ((start,), (n,)) in enumerate(t.chunks.boxes()):
        a, b = max(first, start), min(last, start + n)
        if a < b:
            out.add(
                (a - first,), (b - a,), t.chunks.file[row], t.chunks.offset[row] + (a - start) * item, (b - a) * item
            )
    return TensorEntry(t.dtype, (last - first,), (), out)


def _of_weight(t: TensorEntry, local: Local) -> TensorEntry:
    """What a group has of a weight, as a tensor: its boxes, stacked along the first axis."""
    height = local.boxes[0][1][0] if local.boxes[0][1] else 1
    shape = (height * len(local.boxes), *local.boxes[0][1][1:]) if local.boxes[0][1] else ()
    out = Chunks(len(shape))
    for k, box in enumerate(local.boxes):
        for c in t.chunks:
            if (both := boxes.intersect((c.start, c.shape), box)) is None or not prod(both[1]):
                continue
            if c.zstd is not None:
                raise Corrupt("a chunk of Megatron-Core is compressed, which no version of it writes.")
            inside = [a - b for a, b in zip(both[0], c.start, strict=True)]
            steps = c.strides or boxes.strides(c.shape)
            offset = c.extent.offset + sum(a * s for a, s in zip(inside, steps, strict=True)) * ITEMSIZE[t.dtype]
            flat = boxes.is_row_major(both[1], steps)
            start = [a - b for a, b in zip(both[0], box[0], strict=True)]
            if start:
                start[0] += k * height
            length = (prod(both[1]) if flat else boxes.span(both[1], steps)) * ITEMSIZE[t.dtype]
            out.add(start, both[1], c.extent.file, offset, length, None if flat else tuple(steps))
    return TensorEntry(t.dtype, shape, (), out)


# -------------------------------------------------------------------------------------------------------- choosing


def _positions(names: list[str]) -> dict[str, tuple[int, int, int]]:
    """The place of each weight in the order of the model: layers by number, inside a layer as the checkpoint lists
    them."""
    firsts: dict[str, int] = {}
    out = {}
    for k, name in enumerate(names):
        if m := _LAYER.fullmatch(name):
            head, rest = firsts.setdefault(m["head"], k), firsts.setdefault(f"{m['head']}.*.{m['rest']}", k)
            out[name] = head, int(m["i"]), rest
        else:
            out[name] = k, -1, 0
    return out


def _choose(found: list[Bucket], names: list[str], notes: list[str]) -> None:
    """Give every run its parameter."""
    at = _positions(names)
    owners: dict[str, set[str]] = {}  # {weight: groups that certainly have a part of it}
    for b in found:
        for run in b.runs:
            if len(run.fits) == 1:
                run.chosen = run.fits[0]
                owners.setdefault(run.chosen.weight, set()).add(b.group)
    lines: dict[str, list[tuple[Run, Bucket]]] = {}
    for b in found:
        lines.setdefault(b.name.partition(".bucket_idx_")[0], []).extend((run, b) for run in b.runs)
    told = 0
    for line in lines.values():
        known = [at[run.chosen.weight] for run, _ in line if run.chosen is not None]
        ordered = all(a >= b for a, b in pairwise(known))
        for gap, high, low in _gaps(line):
            if not ordered:
                raise _untold(gap)
            told += _fill_gap(gap, high and at[high.weight], low and at[low.weight], at, owners)
    if told:
        notes.append(
            f"{told} of these segments fit several weights that are equal; which is which follows from the order of "
            "the model, since between their neighbours there is one place for each"
        )
    _refuse_twice(found)


def _gaps(line: list[tuple[Run, Bucket]]) -> Iterable[tuple[list[tuple[Run, Bucket]], Local | None, Local | None]]:
    """Runs that values do not tell apart, with the parameter before and behind them."""
    before: Local | None = None
    gap: list[tuple[Run, Bucket]] = []
    for run, b in line:
        if run.chosen is None:
            gap.append((run, b))
            continue
        if gap:
            yield gap, before, run.chosen
        gap, before = [], run.chosen
    if gap:
        yield gap, before, None


def _fill_gap(
    gap: list[tuple[Run, Bucket]],
    high: tuple[int, int, int] | None,
    low: tuple[int, int, int] | None,
    at: Mapping[str, tuple[int, int, int]],
    owners: Mapping[str, set[str]],
) -> int:
    """Choose for the runs of a gap, whose weights lie between two positions, the higher one first."""
    group = gap[0][1].group
    elsewhere = [p for n, p in at.items() if n in owners and group not in owners[n]]  # of another pipeline stage, say
    if low is None:
        low = max((p for p in elsewhere if high is None or p < high), default=(-1, -1, -1))
    if high is None:
        high = min((p for p in elsewhere if p > low), default=(len(at), 0, 0))
    names = [n for n in sorted(at, key=at.__getitem__, reverse=True) if low < at[n] < high and n not in owners]
    if len(names) != len(gap):
        raise _untold(gap)
    for k, (run, _) in enumerate(gap):
        fits = [x for x in run.fits if x.weight in names]
        if len(fits) != 1 or fits[0].weight != names[k]:
            raise _untold(gap)
        run.chosen = fits[0]
    return len(gap)


def _untold(gap: list[tuple[Run, Bucket]]) -> Unsupported:
    run, b = gap[0]
    names = list(dict.fromkeys(x.weight for x in run.fits))
    shown = ", ".join(f'"{n}"' for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Unsupported(
        f'The optimizer\'s segment at element {run.first} of "{b.name}" has no name in this format (dp_reshardable), '
        f"and it fits several weights that are equal: {shown}. Nothing proves whose moments these are. Save with "
        "fully_reshardable, or convert the weights alone."
    )


def _refuse_twice(found: list[Bucket]) -> None:
    """Refuse two segments of one group that were found to be the same parameter."""
    seen: dict[tuple[str, Local], Run] = {}
    for b in found:
        for run in b.runs:
            assert run.chosen is not None
            if seen.setdefault((b.group, run.chosen), run) is not run:
                raise _untold([(run, b)])


# -------------------------------------------------------------------------------------------------------- entries


def entries(
    found: list[Bucket], weights: Mapping[str, TensorEntry], source: Source, ckpt: Checkpoint, notes: list[str]
) -> dict[Path, TensorEntry]:
    """The state of every parameter in its shape. Of a parameter that several groups have, such as the norms of
    tensor-parallel ranks, that of the first is taken, as Megatron-Core does in its other formats; whether the others
    are equal is looked at."""
    out: dict[Path, TensorEntry] = {}
    copies: dict[tuple[Local, str], list[TensorEntry]] = {}
    for b in found:
        for run in b.runs:
            assert run.chosen is not None
            for slot, t in b.slots.items():
                same = copies.setdefault((run.chosen, slot), [])
                same.append(_flat(t, run.first, run.last))
                if len(same) > 1:
                    continue
                name, whole = run.chosen.weight, weights[run.chosen.weight].shape
                path: Path = ("extra", "master", name) if slot == "param" else ("optim", "state", name, slot)
                entry = out.get(path) or TensorEntry(t.dtype, whole, path, Chunks(len(whole)))
                if entry.dtype != t.dtype:
                    raise Corrupt(f'"{joined(path)}" is {t.dtype} on some ranks, and {entry.dtype} on others.')
                place(entry.chunks, run.chosen, t, run)
                out[path] = entry
    several = {f"{k}:{i}": t for k, some in enumerate(copies.values()) if len(some) > 1 for i, t in enumerate(some)}
    digests = proof_digests(several, ckpt, source)
    for k, (local, slot) in enumerate(copies):
        if len({digests[n] for n in (f"{k}:{i}" for i in range(len(copies[local, slot]))) if n in digests}) > 1:
            notes.append(
                f'"{local.weight}": ranks that share it have different {slot}; that of the first is taken, as '
                "Megatron-Core does"
            )
    return out


def place(out: Chunks, local: Local, t: TensorEntry, run: Run) -> None:
    """Add a run of a bucket to the chunks of its parameter."""
    item = ITEMSIZE[t.dtype]
    for row, ((start,), (n,)) in enumerate(t.chunks.boxes()):
        at = run.first
        for corner, shape in local.boxes:
            a, b = max(at, start), min(at + prod(shape), start + n)
            if a < b:
                offset = t.chunks.offset[row] + (a - start) * item
                for inner, size in boxes.flat_to_boxes(shape, a - at, b - at):
                    begin = tuple(x + y for x, y in zip(corner, inner, strict=True))
                    out.add(begin, size, t.chunks.file[row], offset, prod(size) * item)
                    offset += prod(size) * item
            at += prod(shape)
