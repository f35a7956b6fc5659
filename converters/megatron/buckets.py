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

The precision-aware optimizer may have int16 remainders in `param` (engine/transform/remainders.py), of which no value
tells a weight. Then the order and the sizes of the whole model do, or nothing: read backwards, the weights must be what
the pipeline stages have in their buckets, last stage first, each of its size and none left over
(`_fit_segments_to_model`).
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
from ckpttool.printable import list_first
from ckpttool.storage.source import Source

from .keys import BUCKETS

__all__ = [
    "ALIGNED",
    "Bucket",
    "LocalBoxes",
    "Segment",
    "add_segment",
    "build_parameter_entries",
    "resolve_bucket_names",
    "slice_flat",
]

#: Parameters begin at multiples of this in a bucket.
ALIGNED = 64
_LAYER = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<i>\d+)\.(?P<rest>.+)", re.DOTALL)
Box = tuple[tuple[int, ...], tuple[int, ...]]


class LocalBoxes(NamedTuple):
    """A parameter as one group has it: boxes of a weight, one behind the other when flattened."""

    weight: str
    boxes: tuple[Box, ...]


@dataclass
class Segment:
    """Elements [first, last) of a bucket that are one parameter, the parameters that it can be, and the chosen one."""

    first: int
    last: int
    candidates: list[LocalBoxes]
    chosen: LocalBoxes | None = None


@dataclass
class Bucket:
    """One bucket; `slots` {slot: its 1-D tensor}."""

    name: str
    group: str
    slots: dict[str, TensorEntry]
    segments: list[Segment] = field(default_factory=list)

    @property
    def param(self) -> TensorEntry:
        """Return the slot that holds the fp32 copies of the weights."""
        return self.slots["param"]


def resolve_bucket_names(ckpt: Checkpoint, source: Source) -> tuple[dict[Path, TensorEntry], list[str]]:
    """Find which parameter each part of the optimizer's buckets belongs to.

    Args:
        ckpt: a checkpoint whose tensors all have their byte ranges in files.
        source: the source to read the values from.

    Returns:
        ({canonical path: tensor in the shape of its parameter} of everything in the buckets, notes for the user).

    Raises:
        Unsupported: a segment is not a weight, or may be one of several; the error names these.
        Corrupt: tensors of a bucket are not flat or not of equal lengths.
    """
    weights = {str(t.path[1]): t for t in ckpt.tensors.values() if t.path[0] == "model" and len(t.path) == 2}
    found = _collect_buckets(ckpt)
    if any("float" not in b.param.dtype for b in found):
        _fit_segments_to_model(found, weights)
        notes = [
            "the optimizer's segments have no names in this format (dp_reshardable), and its masters are remainders, "
            "which tell no weight by their values; they were named by the order of the model, which fits all of their "
            "sizes"
        ]
        return build_parameter_entries(found, weights, source, ckpt, notes), notes
    _find_segments(found, weights, source, ckpt)
    notes = [
        f"the optimizer's {sum(len(b.segments) for b in found)} segments have no names in this format "
        "(dp_reshardable); each was found by its value, the fp32 copy of a weight that rounds to it bit for bit"
    ]
    _assign_parameters(found, list(weights), notes)
    return build_parameter_entries(found, weights, source, ckpt, notes), notes


def _collect_buckets(ckpt: Checkpoint) -> list[Bucket]:
    """Return the buckets in a checkpoint, in the order of data-parallel group, buffer and number.

    Raises:
        Corrupt: tensors of a bucket are not flat or not of equal lengths.
    """
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
            raise Corrupt(f'"{b.name}" has not one flat tensor of each kind, of equal lengths.', code="CKPT0417")
    return sorted(of.values(), key=lambda b: [int(n) for n in re.findall(r"_idx_(\d+)", b.name)])


def _generate_possible_shards(name: str, t: TensorEntry) -> Iterable[LocalBoxes]:
    """Yield all that one group of ranks may hold of the weight `t` named `name`: all of it, or any tensor-parallel
    shard.

    Of a weight of stacked experts, these are yielded for each expert alone.
    """
    of = t.chunks.boxes()
    if len(t.shape) == 3 and re.search(r"\bexperts\b", name):
        for e in range(t.shape[0]):
            yield from _generate_tensor_shards(
                name, [(s, n) for s, n in of if s[0] == e and n[0] == 1], ((e, 0, 0), (1, *t.shape[1:]))
            )
        return
    yield from _generate_tensor_shards(name, of, ((0,) * len(t.shape), t.shape))


def _generate_tensor_shards(name: str, of: list[Box], whole: Box) -> Iterable[LocalBoxes]:
    """Yield a whole weight, then its shards for every tensor-parallel size that the boxes it is stored in allow.

    Args:
        name: the name of the weight.
        of: (start, shape) of the boxes that it is stored in.
        whole: (start, shape) of all of it.
    """
    yield LocalBoxes(name, (whole,))
    of = sorted(b for b in of if prod(b[1]))
    if len({n for _, n in of}) != 1:
        return
    for parts in range(2, len(of) + 1):
        if len(of) % parts == 0:
            for k in range(parts):  # gated matrices: each rank has its rows of both
                yield LocalBoxes(name, tuple(of[k::parts]))


def _count_elements(local: LocalBoxes) -> int:
    """Return the number of elements in all boxes of a parameter."""
    return sum(prod(n) for _, n in local.boxes)


def _find_segments(found: list[Bucket], weights: Mapping[str, TensorEntry], source: Source, ckpt: Checkpoint) -> None:
    """Find by value which elements of every bucket are one parameter, and add them to the bucket as segments.

    A stretch of a bucket is a parameter if, rounded to the dtype of a weight, its digest is that of the weight or a
    shard.

    Args:
        found: the buckets, whose segments are added.
        weights: {name: tensor} of the model, with byte ranges in files.
        source: the source to read the values from.
        ckpt: the checkpoint to which the tensors belong.

    Raises:
        Unsupported: a stretch has the values of no weight, or could end at several places.
        Corrupt: a chunk of a weight is compressed.
    """
    shards: dict[int, list[LocalBoxes]] = {}  # by number of elements
    for name, t in weights.items():
        for local in _generate_possible_shards(name, t):
            shards.setdefault(_count_elements(local), []).append(local)
    dtypes = {n: {weights[x.weight].dtype for x in some} for n, some in shards.items()}

    # digest every stretch that begins at an aligned chunk and has the length of some shard, and those shards
    jobs: dict[str, TensorEntry] = {}
    rounded_to: dict[str, str] = {}
    wanted: set[int] = set()
    for number, b in enumerate(found):
        ends = _list_chunk_ends(b)
        for first in sorted(s[0] for s, n in b.param.chunks.boxes() if n[0] and s[0] % ALIGNED == 0):
            for last in ends[bisect_right(ends, first) :]:
                for dtype in dtypes.get(last - first, ()):
                    name = f"{number}:{first}:{last}:{dtype}"
                    jobs[name], rounded_to[name] = slice_flat(b.param, first, last), dtype
                    wanted.add(last - first)
    for n in wanted:
        for local in shards[n]:
            jobs[_make_digest_name(local)] = _gather_boxes(weights[local.weight], local)
    digests = proof_digests(jobs, ckpt, source, rounded_to)
    by_digest: dict[tuple[str, str], list[LocalBoxes]] = {}
    for n in wanted:
        for local in shards[n]:
            by_digest.setdefault((weights[local.weight].dtype, digests[_make_digest_name(local)]), []).append(local)

    # walk through each bucket; from where one segment ends, exactly one has to follow
    for number, b in enumerate(found):
        at, ends = 0, _list_chunk_ends(b)
        while at < b.param.shape[0]:
            fitting = []
            for last in ends[bisect_right(ends, at) :]:
                for dtype in dtypes.get(last - at, ()):
                    digest = digests.get(f"{number}:{at}:{last}:{dtype}", "")
                    if candidates := by_digest.get((dtype, digest)):
                        fitting.append(Segment(at, last, candidates))
            if len(fitting) != 1:
                why = (
                    "could end at several places"
                    if fitting
                    else "is not a weight of the model: its fp32 values do not round to those of any"
                )
                raise Unsupported(
                    f'The optimizer\'s segment at element {at} of "{b.name}" {why}, so nothing tells whose moments '
                    "these are. Save with fully_reshardable, or convert the weights alone.",
                    code="CKPT0327",
                )
            b.segments.append(fitting[0])
            at = -(-fitting[0].last // ALIGNED) * ALIGNED


def _fit_segments_to_model(found: list[Bucket], weights: Mapping[str, TensorEntry]) -> None:
    """Find by the order and sizes of all weights which elements of every bucket are one parameter; add them as
    segments.

    The parameter of each segment is chosen, too.

    Args:
        found: the buckets, whose segments are added.
        weights: {name: tensor} of the model.

    Raises:
        Unsupported: the weights fit at no tensor-parallel size, or at several.
    """
    lines: dict[str, list[Bucket]] = {}
    for b in found:
        lines.setdefault(b.group, []).append(b)
    at = _find_model_positions(list(weights))
    names = sorted(weights, key=at.__getitem__, reverse=True)
    one_buffer = len({b.name.partition(".bucket_idx_")[0] for b in found}) == len(lines)
    sizes = [n for n in range(1, len(lines) + 1) if len(lines) % n == 0]
    several = any(re.search(r"\bexperts\b", n) for n in names) or not one_buffer
    fits = [] if several else [f for n in sizes if (f := _fit_stages(list(lines.values()), names, weights, n))]
    if len(fits) != 1:
        first = found[0]
        raise Unsupported(
            f'"{first.name}.param" is {first.param.dtype}: remainders of the weights (store_param_remainders), which '
            f"name no parameter, and the order of the model fits {'several ways' if fits else 'nowhere'}. Save with "
            "store_param_remainders=False, or convert the weights alone.",
            code="CKPT0327",
        )
    for b, segments in zip(found, fits[0], strict=True):
        b.segments = segments


def _fit_stages(
    groups: list[list[Bucket]], names: list[str], weights: Mapping[str, TensorEntry], tp: int
) -> list[list[Segment]] | None:
    """Return the segments of each bucket at a tensor-parallel size, in the order of the buckets; None if the weights do
    not fit.

    Args:
        groups: the buckets of each data-parallel group; tensor-parallel ranks of a pipeline stage are neighbours.
        names: the names of the weights, from the last in the model to the first.
        weights: {name: tensor}.
        tp: the tensor-parallel size.
    """
    out: dict[int, list[list[Segment]]] = {}
    at = 0
    for stage in reversed(range(len(groups) // tp)):
        used = set()
        for rank in range(tp):
            segments: list[list[Segment]] = []
            k = at
            for b in groups[stage * tp + rank]:
                segments.append([])
                ends, first = {*_list_chunk_ends(b)}, 0
                while first < b.param.shape[0]:
                    if k == len(names):
                        return None
                    local = _find_local_boxes(names[k], weights[names[k]], tp, rank)
                    last = first + _count_elements(local)
                    if last not in ends:
                        return None
                    segments[-1].append(Segment(first, last, [local], local))
                    first, k = -(-last // ALIGNED) * ALIGNED, k + 1
            out[stage * tp + rank] = segments
            used.add(k)
        if len(used) != 1:
            return None
        at = used.pop()
    return [s for g in range(len(groups)) for s in out[g]] if at == len(names) else None


def _find_local_boxes(name: str, t: TensorEntry, tp: int, rank: int) -> LocalBoxes:
    """Return what a tensor-parallel rank holds of a weight: its shard if the weight is stored in shards for all ranks,
    else all.

    Args:
        name: the name of the weight.
        t: the weight.
        tp: the tensor-parallel size.
        rank: the tensor-parallel rank.
    """
    of = sorted(b for b in t.chunks.boxes() if prod(b[1]))
    if tp > 1 and of and len(of) % tp == 0 and len({n for _, n in of}) == 1:
        return LocalBoxes(name, tuple(of[rank::tp]))
    return LocalBoxes(name, (((0,) * len(t.shape), t.shape),))


def _list_chunk_ends(b: Bucket) -> list[int]:
    """Return, ascending, the element after the end of each stored chunk of a bucket's fp32 weights."""
    return sorted(s[0] + n[0] for s, n in b.param.chunks.boxes() if n[0])


def _make_digest_name(local: LocalBoxes) -> str:
    """Return a name for a shard of a weight, its FQN and boxes as text, under which its digest is looked up."""
    return f"{local.weight}:{local.boxes}"


def slice_flat(t: TensorEntry, first: int, last: int) -> TensorEntry:
    """Return elements [first, last) of a 1-D tensor that has its byte ranges in files, with an empty path.

    Elements that no chunk of the tensor covers are not covered in the result either.
    """
    out, item = Chunks(1), ITEMSIZE[t.dtype]
    for row, ((start,), (n,)) in enumerate(t.chunks.boxes()):
        a, b = max(first, start), min(last, start + n)
        if a < b:
            out.add(
                (a - first,), (b - a,), t.chunks.file[row], t.chunks.offset[row] + (a - start) * item, (b - a) * item
            )
    return TensorEntry(t.dtype, (last - first,), (), out)


def _gather_boxes(t: TensorEntry, local: LocalBoxes) -> TensorEntry:
    """Return what a group of ranks has of a weight as one tensor: its boxes, stacked along the first axis.

    Raises:
        Corrupt: a chunk is compressed.
    """
    height = local.boxes[0][1][0] if local.boxes[0][1] else 1
    shape = (height * len(local.boxes), *local.boxes[0][1][1:]) if local.boxes[0][1] else ()
    out = Chunks(len(shape))
    for k, box in enumerate(local.boxes):
        for c in t.chunks:
            if (both := boxes.intersect((c.start, c.shape), box)) is None or not prod(both[1]):
                continue
            if c.zstd is not None:
                raise Corrupt("a chunk of Megatron-Core is compressed, which no version of it writes.", code="CKPT0406")
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


def _find_model_positions(names: list[str]) -> dict[str, tuple[int, int, int]]:
    """Return {weight: its position in the model, as a tuple that sorts in the order of the model}.

    The tuple is (index in `names` where the weight's list of layers begins, number of the layer, index where its name
    first occurs in a layer); for a weight outside of layers it is (index in `names`, -1, 0).
    """
    firsts: dict[str, int] = {}
    out = {}
    for k, name in enumerate(names):
        if m := _LAYER.fullmatch(name):
            head, rest = firsts.setdefault(m["head"], k), firsts.setdefault(f"{m['head']}.*.{m['rest']}", k)
            out[name] = head, int(m["i"]), rest
        else:
            out[name] = k, -1, 0
    return out


def _assign_parameters(found: list[Bucket], names: list[str], notes: list[str]) -> None:
    """Choose the parameter of every segment: by value, and among equal weights by the order of the model.

    Args:
        found: the buckets, whose segments are changed.
        names: the names of the weights, in the order of the model.
        notes: the list to which a note is added if the order was needed.

    Raises:
        Unsupported: the order does not determine the parameter either.
    """
    at = _find_model_positions(names)
    owners: dict[str, set[str]] = {}  # {weight: groups that certainly have a part of it}
    for b in found:
        for segment in b.segments:
            if len(segment.candidates) == 1:
                segment.chosen = segment.candidates[0]
                owners.setdefault(segment.chosen.weight, set()).add(b.group)
    lines: dict[str, list[tuple[Segment, Bucket]]] = {}
    for b in found:
        lines.setdefault(b.name.partition(".bucket_idx_")[0], []).extend((segment, b) for segment in b.segments)
    by_order = 0
    for line in lines.values():
        known = [at[segment.chosen.weight] for segment, _ in line if segment.chosen is not None]
        ordered = all(a >= b for a, b in pairwise(known))
        for gap, high, low in _find_ambiguous_gaps(line):
            if not ordered:
                raise _make_ambiguity_error(gap)
            _assign_by_order(gap, high and at[high.weight], low and at[low.weight], at, owners)
            by_order += len(gap)
    if by_order:
        notes.append(
            f"{by_order} of these segments fit several weights that are equal; which is which follows from the order "
            "of the model, since between their neighbours there is one place for each"
        )
    _refuse_shared_parameter(found)


def _find_ambiguous_gaps(
    line: list[tuple[Segment, Bucket]],
) -> Iterable[tuple[list[tuple[Segment, Bucket]], LocalBoxes | None, LocalBoxes | None]]:
    """Yield the runs of segments whose parameters values alone do not determine, with the parameters around each run.

    `line` is all segments of a buffer, each with its bucket.

    Yields:
        (the run, the parameter before it or None at the start of the buffer, the one after it or None at the end).
    """
    before: LocalBoxes | None = None
    gap: list[tuple[Segment, Bucket]] = []
    for segment, b in line:
        if segment.chosen is None:
            gap.append((segment, b))
            continue
        if gap:
            yield gap, before, segment.chosen
        gap, before = [], segment.chosen
    if gap:
        yield gap, before, None


def _assign_by_order(
    gap: list[tuple[Segment, Bucket]],
    high: tuple[int, int, int] | None,
    low: tuple[int, int, int] | None,
    at: Mapping[str, tuple[int, int, int]],
    owners: Mapping[str, set[str]],
) -> None:
    """Choose the parameters of a gap, a run of segments whose values do not determine them, by the order of the model.

    Buffers run backwards through the model, so the first segment has the highest position.

    Args:
        gap: the segments, each with its bucket.
        high: the position in the model of the parameter before the gap; None if the buffer begins with the gap.
        low: the position of the parameter after the gap; None if the buffer ends with it.
        at: {weight: its position}.
        owners: {weight: groups of ranks that certainly have a part of it}.

    Raises:
        Unsupported: there is not exactly one weight for each segment, or two could be exchanged.
    """
    group = gap[0][1].group
    elsewhere = [p for n, p in at.items() if n in owners and group not in owners[n]]  # of another pipeline stage, say
    if low is None:
        low = max((p for p in elsewhere if high is None or p < high), default=(-1, -1, -1))
    if high is None:
        high = min((p for p in elsewhere if p > low), default=(len(at), 0, 0))
    names = [n for n in sorted(at, key=at.__getitem__, reverse=True) if low < at[n] < high and n not in owners]
    if len(names) != len(gap):
        raise _make_ambiguity_error(gap)
    for k, (segment, _) in enumerate(gap):
        candidates = [x for x in segment.candidates if x.weight in names]
        if len(candidates) != 1 or candidates[0].weight != names[k]:
            raise _make_ambiguity_error(gap)
        segment.chosen = candidates[0]


def _make_ambiguity_error(gap: list[tuple[Segment, Bucket]]) -> Unsupported:
    """Return the error that the parameters of these segments cannot be determined; its text describes the first one."""
    segment, b = gap[0]
    names = list(dict.fromkeys(x.weight for x in segment.candidates))
    shown = list_first((f'"{n}"' for n in names), 4)
    return Unsupported(
        f'The optimizer\'s segment at element {segment.first} of "{b.name}" has no name in this format '
        "(dp_reshardable), "
        f"and it fits several weights that are equal: {shown}. Nothing proves whose moments these are. Save with "
        "fully_reshardable, or convert the weights alone.",
        code="CKPT0327",
    )


def _refuse_shared_parameter(found: list[Bucket]) -> None:
    """Refuse buckets in which one group of ranks has two segments of the same parameter.

    Raises:
        Unsupported: for the second of the segments.
    """
    seen: dict[tuple[str, LocalBoxes], Segment] = {}
    for b in found:
        for segment in b.segments:
            assert segment.chosen is not None
            if seen.setdefault((b.group, segment.chosen), segment) is not segment:
                raise _make_ambiguity_error([(segment, b)])


# -------------------------------------------------------------------------------------------------------- entries


def build_parameter_entries(
    found: list[Bucket], weights: Mapping[str, TensorEntry], source: Source, ckpt: Checkpoint, notes: list[str]
) -> dict[Path, TensorEntry]:
    """Return {canonical path: tensor in the shape of its parameter} of the slots of all segments.

    If several groups of ranks have a parameter, such as a norm, the copy of the first is used, as in Megatron-Core's
    other formats.

    Args:
        found: the buckets, with the parameter of each segment chosen.
        weights: {name: tensor} of the model, for the shapes.
        source: the source to read copies from, which are compared.
        ckpt: the checkpoint to which the tensors belong.
        notes: the list to which a note is added for every slot with different copies.

    Raises:
        Corrupt: a slot has different dtypes on different ranks.
    """
    out: dict[Path, TensorEntry] = {}
    copies: dict[tuple[LocalBoxes, str], list[TensorEntry]] = {}
    for b in found:
        for segment in b.segments:
            assert segment.chosen is not None
            for slot, t in b.slots.items():
                same = copies.setdefault((segment.chosen, slot), [])
                same.append(slice_flat(t, segment.first, segment.last))
                if len(same) > 1:
                    continue
                name, whole = segment.chosen.weight, weights[segment.chosen.weight].shape
                path: Path = ("extra", "master", name) if slot == "param" else ("optim", "state", name, slot)
                entry = out.get(path) or TensorEntry(t.dtype, whole, path, Chunks(len(whole)))
                if entry.dtype != t.dtype:
                    raise Corrupt(
                        f'"{joined(path)}" is {t.dtype} on some ranks, and {entry.dtype} on others.', code="CKPT0412"
                    )
                add_segment(entry.chunks, segment.chosen, t, segment)
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


def add_segment(out: Chunks, local: LocalBoxes, t: TensorEntry, segment: Segment) -> None:
    """Add a segment of a bucket to the chunks of its parameter.

    Args:
        out: the chunks of the parameter.
        local: the boxes of the parameter that the segment is, in its order.
        t: the flat tensor of the bucket.
        segment: which elements of it.
    """
    item = ITEMSIZE[t.dtype]
    for row, ((start,), (n,)) in enumerate(t.chunks.boxes()):
        at = segment.first
        for corner, shape in local.boxes:
            a, b = max(at, start), min(at + prod(shape), start + n)
            if a < b:
                offset = t.chunks.offset[row] + (a - start) * item
                for inner, size in boxes.flat_to_boxes(shape, a - at, b - at):
                    begin = tuple(x + y for x, y in zip(corner, inner, strict=True))
                    out.add(begin, size, t.chunks.file[row], offset, prod(size) * item)
                    offset += prod(size) * item
            at += prod(shape)
