"""diff: where two checkpoints differ, whatever their layouts, in constant memory.

Both are streamed tensor by tensor in row-major order. Of equal bytes only the norm is computed; for the others the
count of differing elements, the largest absolute and relative difference, the largest distance in units in the last
place, the relative L2 norm and the place of the first and the worst one are kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..errors import Differs, UsageError, argument
from ..formats.stored_tensors import Inline, decode_number
from ..huggingface import lora
from ..index import boxes
from ..index.checkpoint import NOT_TORCHS, PACKED, Checkpoint, TensorEntry
from ..index.fqns import mask_name_numbers
from ..options import SearchPart, list_keywords
from ..printable import Shown, count_noun, replace_non_finite_numbers
from ..storage import urls
from .copy.dtypes import numbers
from .copy.fill import Progress, silent
from .copy.stream import Block, Reader, StreamJob, pair_stream_pieces, read_small_tensors
from .copy.tensor_digests import reporting
from .copy.tensor_statistics import StatisticsCounter, sum_squares
from .copy.value_digests import equal_values
from .map_choice import rename_opened
from .mixups import describe_dropped_replicas
from .opening import (
    CheckpointPath,
    OpenCheckpoint,
    OpenOptions,
    compare_configs,
    drop_unfit_source_layout,
    open_checkpoint,
    refuse_unused_hints,
    show_path,
)
from .workers.coordinator import digest_with_workers, workers_for_reading
from .workers.executors import WorkersSpec

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = [
    "SORTS",
    "ComponentDifference",
    "Difference",
    "TensorDifference",
    "diff",
    "measure_relative_distances",
    "stream_blocks",
]

#: What `Difference.sorted_by` sorts by.
SORTS = ("moved", "abs", "rel", "ulp", "name")
_MOST_ULP = 1_000_000  # a larger distance says only that numbers are far apart, and is in JSON alone
#: {count of `ComponentDifference`: its words}
_COUNTS = {
    "equal": "equal", "close": "within the tolerance", "changed": "changed", "other_shape": "of another shape",
    "only_in_a": "only in A", "only_in_b": "only in B",
}  # fmt: skip
V = TypeVar("V")


@dataclass
class TensorDifference:
    """How one tensor differs, or several whose names differ only in numbers.

    `max_ulp` is the largest distance of two numbers in units in the last place; None for dtypes without such units.
    Numbers of which one is above and one below zero are counted in `opposite_signs` instead. `norm`
    is the L2 norm of the finite numbers of B, `distance` that of A - B, `moved` their quotient; `first` and `worst`
    are indices of elements, and `worst_name` the tensor that the latter is one of.
    """

    name: str
    elements: int
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None
    first: tuple[int, ...] = ()
    worst: tuple[int, ...] = ()
    nan_mismatch: int = 0
    opposite_signs: int = 0
    distance: float = 0.0
    norm: float = 0.0
    moved: float = 0.0
    tensors: int = 1
    worst_name: str = ""

    def __str__(self) -> str:
        """Return one line of text: the name, how many elements differ, the largest differences, and the indices of the
        first and the worst element."""
        several = f" ({self.tensors:,} tensors)" if self.tensors > 1 else ""
        parts = [
            f"{self.name}{several}: {self.differing:,} of {self.elements:,} elements differ",
            f"max abs {self.max_abs:.3g}",
            f"max rel {self.max_rel:.3g}",
            f"relative L2 {self.moved:.3g}",
        ]
        if self.max_ulp is not None and self.max_ulp <= _MOST_ULP:
            parts.append(f"{self.max_ulp:,} ulp")
        if self.opposite_signs:
            parts.append(f"{self.opposite_signs:,} of opposite signs")
        if self.nan_mismatch:
            parts.append(f"{self.nan_mismatch} NaN on one side only")
        if self.tensors == 1:
            return ", ".join([*parts, f"first at {list(self.first)}", f"worst at {list(self.worst)}"])
        return ", ".join([*parts, f"worst in {self.worst_name} at {list(self.worst)}"])


@dataclass
class ComponentDifference:
    """How a component differs: how many of its tensors are equal, within the tolerances (`close`), changed, of another
    shape, or in one of the two alone; the largest differences; and the L2 norm of A - B relative to that of B, over all
    tensors that both have in one shape."""

    equal: int = 0
    close: int = 0
    changed: int = 0
    other_shape: int = 0
    only_in_a: int = 0
    only_in_b: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    distance: float = 0.0
    norm: float = 0.0
    moved: float = 0.0

    def add(self, found: TensorDifference, close: bool) -> None:
        """Add the comparison of a tensor that both checkpoints have: count it, and update the largest differences and
        the norms.

        Args:
            close: whether all its differences are within the tolerances.
        """
        kind = "equal" if not found.differing else "close" if close else "changed"
        setattr(self, kind, getattr(self, kind) + 1)
        self.max_abs, self.max_rel = max(self.max_abs, found.max_abs), max(self.max_rel, found.max_rel)
        self.distance, self.norm = math.hypot(self.distance, found.distance), math.hypot(self.norm, found.norm)
        self.moved = _divide_norms(self.distance, self.norm)

    def __str__(self) -> str:
        """Return one line of text: how many tensors are equal, changed, in one checkpoint alone, ..., and the largest
        differences if values differ."""
        counts = ", ".join(f"{getattr(self, k):,} {words}" for k, words in _COUNTS.items() if getattr(self, k))
        numbers = f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}, relative L2 {self.moved:.3g}"
        return f"{counts}; {numbers}" if self.close or self.changed else counts


@dataclass(repr=False)
class Difference(Shown):
    """What `diff` found; `equal` is True when nothing is listed, or all of it lies within the tolerances.

    `configs` has what differs in the config.json and adapter_config.json beside both, {"config.json: rope_theta": (text
    of A's value, of B's)}; it is no state and does not count for `equal`.
    `notes` are sentences on what was not compared, besides the files in `not_read_a` and `not_read_b`.
    `data` has the tensors with other values, and `changed` says how many those are, also where `data` was folded or
    cut; `components` {"model": how its tensors differ, ...}.
    """

    equal: bool = True
    tensors: int = 0
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    configs: dict[str, tuple[str, str]] = field(default_factory=dict)
    data: list[TensorDifference] = field(default_factory=list)
    within_tolerance: int = 0
    not_read_a: list[dict[str, object]] = field(default_factory=list)  # files of each that were not compared
    not_read_b: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    adapter_a: str | None = None  # of one that holds an adapter and no base model: "r=8, 14 modules"
    adapter_b: str | None = None
    changed: int = 0
    components: dict[str, ComponentDifference] = field(default_factory=dict)
    a: str = ""  # what was compared, for people
    b: str = ""
    index: Checkpoint | None = field(default=None, compare=False)  # A, without bytes of tensors; not in JSON

    def __bool__(self) -> bool:
        """Return True if the two checkpoints differ by more than the tolerances allow, the opposite of `equal`."""
        return not self.equal

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; numbers that are infinite or NaN become text."""
        plain: dict[str, object] = replace_non_finite_numbers(asdict(replace(self, index=None)))
        return {k: v for k, v in plain.items() if k != "index"}

    def sorted_by(self, order: str) -> Difference:
        """Return a copy with `data` sorted by name, or from the largest difference to the smallest.

        Args:
            order: one of `SORTS`: "name", "moved" (relative L2), "abs", "rel" or "ulp"; for "ulp", tensors with numbers
                of opposite signs come first.

        Raises:
            UsageError: there is no such order.
        """
        if order not in SORTS:
            said = f"{argument('sort', order)}: there is no such order. There are {', '.join(SORTS)}."
            raise UsageError(said, code="CKPT0207")
        keys: dict[str, Callable[[TensorDifference], str | float | tuple[int, int]]] = {
            "name": lambda t: t.name,
            "ulp": lambda t: (-t.opposite_signs, -(t.max_ulp or 0)),
            "moved": lambda t: -t.moved,
            "abs": lambda t: -t.max_abs,
            "rel": lambda t: -t.max_rel,
        }
        return replace(self, data=sorted(self.data, key=keys[order]))

    def folded(self) -> Difference:
        """Return a copy in which tensors whose names differ only in numbers are one row: "layers.#.mlp.weight"."""
        groups: dict[str, list[TensorDifference]] = {}
        for t in self.data:
            groups.setdefault(mask_name_numbers(t.name), []).append(t)
        return replace(
            self,
            data=[_fold_differences(name, found) for name, found in groups.items()],
            only_in_a=list(dict.fromkeys(map(mask_name_numbers, self.only_in_a))),
            only_in_b=list(dict.fromkeys(map(mask_name_numbers, self.only_in_b))),
            dtypes=_fold_equal_entries(self.dtypes),
            shapes=_fold_equal_entries(self.shapes),
        )

    def lines(self, most: int = 50) -> Iterator[str]:
        """Yield lines of text: what differs, a summary of each component, and the headline; long lists are cut.

        Args:
            most: rows of `data` to show.
        """
        for name, adapter in (("A", self.adapter_a), ("B", self.adapter_b)):
            if adapter:
                yield f"{name} holds an adapter only: {adapter}"
        yield from _iterate_first("only in A", self.only_in_a)
        yield from _iterate_first("only in B", self.only_in_b)
        for n, (x, y) in self.shapes.items():
            yield f"shape: {n}: {list(x)} | {list(y)}"
        yield from _iterate_first("dtype", [f"{n}: {a} | {b}" for n, (a, b) in self.dtypes.items()])
        for n, values in self.values.items():
            yield f"value: {n}: {values[0]} | {values[1]}"
        yield from _iterate_first("not counted", [f"{n}: {a} | {b}" for n, (a, b) in self.configs.items()])
        for t in self.data[:most]:
            yield f"data: {t}"
        if left := self.changed - sum(t.tensors for t in self.data[:most]):
            yield f"data: ... {left:,} more tensors"
        for name, found in self.components.items():
            if self.changed or found.equal < sum(getattr(found, k) for k in _COUNTS):
                yield f"{name}: {found}"
        yield self.headline()

    def headline(self) -> str:
        """Return one line of text: whether the checkpoints are equal, how many tensors both have, and how many of these
        differ."""
        close = f" ({self.within_tolerance} within the tolerance)" if self.within_tolerance else ""
        word = "equal" if self.equal else "different"
        return f"{word}: {count_noun(self.tensors, 'tensor')} in both, {self.changed:,} with other values{close}"


def _iterate_first(title: str, rows: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of the first 20 rows, with a title, and one that counts the others."""
    yield from (f"{title}: {row}" for row in rows[:20])
    if len(rows) > 20:
        yield f"{title}: ... {len(rows) - 20} more"


def _divide_norms(distance: float, norm: float) -> float:
    """Return distance / norm, the relative L2 difference of a tensor: 0 if `distance` is 0, else infinite if `norm`
    is 0."""
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


def _fold_equal_entries(found: dict[str, V]) -> dict[str, V]:
    """Merge entries whose names differ only in numbers and whose values are equal into one, named "layers.#.weight".

    An entry with another value keeps its name.
    """
    out: dict[str, V] = {}
    for name, value in found.items():
        folded = mask_name_numbers(name)
        out[folded if out.get(folded, value) == value else name] = value
    return out


def _fold_differences(name: str, found: list[TensorDifference]) -> TensorDifference:
    """Combine the rows of several tensors into one row with this name, as if they were one tensor."""
    worst = max(found, key=lambda t: t.max_abs)
    ulps = [t.max_ulp for t in found if t.max_ulp is not None]
    distance, norm = math.hypot(*(t.distance for t in found)), math.hypot(*(t.norm for t in found))
    sums = {k: sum(getattr(t, k) for t in found) for k in ("elements", "differing", "nan_mismatch", "opposite_signs")}
    return replace(
        worst,
        name=name,
        **sums,
        max_rel=max(t.max_rel for t in found),
        max_ulp=max(ulps, default=None),
        first=found[0].first,
        distance=distance,
        norm=norm,
        moved=_divide_norms(distance, norm),
        tensors=len(found),
        worst_name=worst.name,
    )


@list_keywords
def diff(
    a: CheckpointPath,
    b: CheckpointPath,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: Iterable[str] | None = None,
    weights: str | None = None,
    map: str | os.PathLike[str] | None = None,
    workers: WorkersSpec = None,
    progress: Progress = silent,
    **reading: Unpack[SearchPart],
) -> Difference:
    """Compare two checkpoints by names, dtypes, shapes and values.

    Two elements are close when |x - y| <= atol + rtol * |y|; without tolerances bytes must be equal, so that NaN equals
    NaN of the same bits and 0.0 is not -0.0. Values are equal if their types, their bits and the keys of their dicts
    are. Components that only one of the two holds are listed by name.

    Args:
        a, b: two folders, files or URLs.
        rtol, atol: relative and absolute tolerance; 0 if not given.
        only, drop_matching: what to compare, as `open`, by the names in each of the two; None for all.
        rename: as `open`; applies to `a` alone.
        weights: which weights of `a` are its model, as in `open`; they are compared with the model of `b`.
        source_layout: layout of those of the two that may have it, if the files alone do not tell.
        config, like, flat_layout, wrap, tag: as `open`, for those of the two whose layout uses them.
        map: a name map, as in `convert`, that is applied to `a` first; then one process compares everything.
        workers: processes that first compute the digests of both, as in `convert`; only tensors with different digests
            are then compared element by element.
        progress: called with ("compare", bytes done, bytes in all); before with "digest" if workers compute digests,
            and with "prove" if tensors have no names until they are read.

    Raises:
        CkpttoolError: one of the two cannot be read. Differs: a tensor of six-bit numbers has different bytes, whose
            numbers cannot be compared.
    """
    # to look at copies and mixtures is what diff is for
    options = OpenOptions(only=only, weights=weights, allow_equal_ranks=True, allow_mixed_steps=True, **reading)
    of_each = _choose_options(a, b, options)
    with (
        open_checkpoint(a, of_each[0], check_hints=False, prove_later=True) as x,
        open_checkpoint(b, of_each[1], check_hints=False, prove_later=True) as y,
    ):
        both = x, y
        used = {*x.layout.reader_uses, *y.layout.reader_uses, *(["config"] if map is not None else [])}
        refuse_unused_hints(options, f"{x.layout.name} | {y.layout.name}", used)
        with reporting(progress):
            left, right = x.locate(), y.locate()
        if map is not None:
            x = rename_opened(x, map, options.config)
            left = x.checkpoint
        aside = [[r.to_json() for r in ckpt.unread] for ckpt in (left, right)]
        out = Difference(
            tensors=len(left.tensors.keys() & right.tensors.keys()), not_read_a=aside[0], not_read_b=aside[1],
            a=urls.display_path(show_path(a)), b=urls.display_path(show_path(b)), index=left,
        )  # fmt: skip
        for name, ckpt in ((out.a, left), (out.b, right)):
            out.notes += [f"{name}: {text}" for text in describe_dropped_replicas(ckpt)]
        common = _compare_indexes(x, y, out)
        configs = compare_configs(x, y)
        out.configs = {n: (_format_value(p), _format_value(q)) for n, (p, q) in configs.items()}
        equal: dict[str, float] = {}
        if map is None:
            equal = _find_equal_by_digest((a, of_each[0], x), (b, of_each[1], y), common, workers, progress)
        for n, norm in equal.items():
            out.components[left.component(n)].add(TensorDifference(n, left.tensors[n].numel, norm=norm), False)
        common = [n for n in common if n not in equal]
        for found, close in _compare_tensors(x, y, common, rtol, atol, progress):
            out.components[left.component(found.name)].add(found, close)
            if close:
                out.within_tolerance += 1
            elif found.differing:
                out.data.append(found)
        out.changed = len(out.data)
        for side in both:
            side.recheck()
            side.source.assert_unchanged()
    tolerant = bool(rtol or atol)
    out.equal = not (out.only_in_a or out.only_in_b or out.shapes or out.values or out.data) and (
        tolerant or not out.dtypes
    )
    return out


def _choose_options(a: CheckpointPath, b: CheckpointPath, options: OpenOptions) -> tuple[OpenOptions, OpenOptions]:
    """Return the options with which each of the two is opened: a layout only for those that may have it, new names and
    other weights only for `a`.

    Raises:
        UsageError: neither of them may be of the layout in `options`.
    """
    of_a, of_b = (drop_unfit_source_layout(path, options) for path in (a, b))
    if options.source_layout is not None and not (of_a.source_layout or of_b.source_layout):
        raise UsageError(
            f"{argument('source_layout', options.source_layout)}: neither {a} nor {b} is of this layout.",
            code="CKPT0205",
        )
    only = of_b.only if options.weights is None else of_b.only or ("model",)
    return of_a, replace(of_b, only=only, weights=None, rename=None)


def _compare_indexes(x: OpenCheckpoint, y: OpenCheckpoint, out: Difference) -> list[str]:
    """Note in `out` which names, adapters, values, shapes and dtypes differ between two indexes; return the names of
    the tensors that both have and whose elements can be compared."""
    left, right = x.checkpoint, y.checkpoint
    out.only_in_a = [n for n in [*left.tensors, *left.values] if n not in right.tensors and n not in right.values]
    out.only_in_b = [n for n in [*right.tensors, *right.values] if n not in left.tensors and n not in left.values]
    adapters = [lora.find_lora(ckpt) for ckpt in (left, right)]
    out.adapter_a, out.adapter_b = (str(found) if found and found.alone else None for found in adapters)
    for side, key, ckpt in ((out.only_in_a, "only_in_a", left), (out.only_in_b, "only_in_b", right)):
        for n in side:
            if n in ckpt.tensors:
                part = out.components.setdefault(ckpt.component(n), ComponentDifference())
                setattr(part, key, getattr(part, key) + 1)
    for n, v in left.values.items():
        if n in right.values and not equal_values(v, right.values[n]):
            out.values[n] = (_format_value(v.data), _format_value(right.values[n].data))
    for n in _find_unlike_values(y, left):
        out.values[n] = (_format_value(left.values[n].data), _describe_tensor(right.tensors[n]))
    for n in _find_unlike_values(x, right):
        out.values[n] = (_describe_tensor(left.tensors[n]), _format_value(right.values[n].data))
    common: list[str] = []
    for n in left.tensors:
        if n not in right.tensors:
            continue
        s, t = left.tensors[n], right.tensors[n]
        part = out.components.setdefault(s.component, ComponentDifference())
        if s.shape != t.shape:
            out.shapes[n] = (s.shape, t.shape)
        elif s.dtype != t.dtype and (s.dtype in PACKED or t.dtype in PACKED):
            out.shapes[n] = (_unpack_shape(s), _unpack_shape(t))
        else:
            common.append(n)
        part.other_shape += n in out.shapes
        if s.dtype != t.dtype:
            out.dtypes[n] = (s.dtype, t.dtype)
    return common


def _find_equal_by_digest(
    a: tuple[CheckpointPath, OpenOptions, OpenCheckpoint],
    b: tuple[CheckpointPath, OpenOptions, OpenCheckpoint],
    names: list[str],
    spec: WorkersSpec,
    progress: Progress,
) -> dict[str, float]:
    """Find the tensors that need no comparison of elements, since their dtypes and digests are equal.

    Args:
        a, b: the two checkpoints, each as (path, options it was opened with, the open checkpoint).
        names: the tensors to look at.
        spec: the workers that compute the digests, as `diff` takes them.

    Returns:
        {name: L2 norm} of the equal ones; {} if there are no workers.
    """
    left, right = (opened.checkpoint.tensors for *_, opened in (a, b))
    counter = StatisticsCounter(right, False)
    digests = []
    for (path, options, opened), statistics in ((a, None), (b, counter)):
        with workers_for_reading(spec, path, opened.checkpoint.nbytes) as workers:
            if workers is None:
                return {}
            digests.append(
                digest_with_workers(opened, path, options, workers, progress, "digest", statistics=statistics)
            )
    equal = [n for n in names if left[n].dtype == right[n].dtype and digests[0][n] == digests[1][n]]
    return {n: (counter.found[n].norm if n in counter.found else None) or 0.0 for n in equal}


def _unpack_shape(t: TensorEntry) -> tuple[int, ...]:
    """Return the shape counted in numbers instead of elements, which differ for packed dtypes (float4_e2m1fn_x2)."""
    return (*t.shape[:-1], t.shape[-1] * PACKED.get(t.dtype, 1)) if t.shape else ()


def _find_unlike_values(opened: OpenCheckpoint, other: Checkpoint) -> list[str]:
    """Return the names of the values in `other` that are tensors in `opened` and not equal there: a small tensor may
    hold the same array, or the same number, since some programs keep a step as a tensor and some as a number."""
    tensors = opened.checkpoint.tensors
    mixed = {n: v.data for n, v in other.values.items() if n in tensors}
    small = [
        n
        for n, data in mixed.items()
        if (isinstance(data, Inline) and (tensors[n].dtype, tensors[n].shape) == (data.dtype, data.shape))
        or (type(data) in (int, float) and tensors[n].numel == 1)
    ]
    held = read_small_tensors(opened.checkpoint, opened.source, small)
    unlike = []
    for n, data in mixed.items():
        if n not in held:
            unlike.append(n)
        elif isinstance(data, Inline):
            unlike += [n] if held[n] != data.data else []
        else:
            number = decode_number(tensors[n].dtype, held[n])
            unlike += [n] if type(number) is not type(data) or number != data else []
    return unlike


def _describe_tensor(t: TensorEntry) -> str:
    """Return "a tensor DTYPE SHAPE", which is shown if the other checkpoint has a value of the same name."""
    return f"a tensor {t.dtype} {list(t.shape)}"


def _format_value(x: object) -> str:
    """Write a value as its repr, cut to 60 characters."""
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


def _compare_tensors(
    x: OpenCheckpoint, y: OpenCheckpoint, names: list[str], rtol: float, atol: float, progress: Progress
) -> Iterator[tuple[TensorDifference, bool]]:
    """Compare the bytes of tensors that both checkpoints have.

    Yields:
        For every tensor: (how it differs, whether it does differ but only within the tolerances).

    Raises:
        Differs: the bytes differ in a dtype that neither numpy nor torch has.
        Corrupt, SourceChanged: bytes are missing, damaged or were changed.
    """
    left, right = x.checkpoint, y.checkpoint
    total = sum(left.tensors[n].nbytes for n in names)
    passed = 0
    streams = [stream_blocks(x, names), stream_blocks(y, names)]
    for name in names:
        s, t = left.tensors[name], right.tensors[name]
        found = TensorDifference(name, s.numbers)
        close, squares = True, [0.0, 0.0]  # of A - B, and of B
        for first, p, q in pair_stream_pieces(streams, s, t):
            passed += len(p)
            if t.dtype not in NOT_TORCHS:
                squares[1] += sum_squares(numbers(q, t.dtype))
            if s.dtype == t.dtype and _are_buffers_equal(p, q):
                continue
            measured, apart = _measure_differences(found, first, p, q, s, t, rtol, atol)
            close, squares[0] = measured and close, squares[0] + apart
            progress("compare", passed, total)
        found.distance, found.norm = map(math.sqrt, squares)
        found.moved = _divide_norms(found.distance, found.norm)
        yield found, bool(found.differing) and close and bool(rtol or atol)
        progress("compare", passed, total)


def measure_relative_distances(a: OpenCheckpoint, b: OpenCheckpoint, progress: Progress) -> dict[str, float]:
    """Return {tensor: L2 norm of A - B divided by that of B} for tensors that both have in one shape.

    Where B is all zeros, that is 0 if A is, too, and infinite if it is not. Tensors of packed and six-bit dtypes are
    left out.
    """
    left, right = a.checkpoint.tensors, b.checkpoint.tensors
    names = [n for n, t in left.items() if n in right and t.shape == right[n].shape]
    names = [n for n in names if not {left[n].dtype, right[n].dtype} & {*NOT_TORCHS, *PACKED}]
    return {found.name: found.moved for found, _ in _compare_tensors(a, b, names, 0, 0, progress)}


def _are_buffers_equal(p: memoryview, q: memoryview) -> bool:
    """Tell whether two buffers hold the same bytes; numpy does it faster than memoryview's own comparison."""
    import numpy as np

    return bool(np.array_equal(np.frombuffer(p, "u1"), np.frombuffer(q, "u1")))


def stream_blocks(opened: OpenCheckpoint, names: list[str]) -> Iterator[Block]:
    """Read the tensors `names` of an open checkpoint, in this order, and yield them as blocks (pieces of one tensor
    each)."""
    ckpt = opened.checkpoint
    jobs = (StreamJob(n, ckpt.tensors[n]) for n in names)
    return Reader(opened.source, ckpt.files, ckpt.records).blocks(jobs)


def _measure_differences(
    out: TensorDifference,
    first: int,
    p: memoryview,
    q: memoryview,
    s: TensorEntry,
    t: TensorEntry,
    rtol: float,
    atol: float,
) -> tuple[bool, float]:
    """Compare a piece of a tensor in two checkpoints and add its differences to `out`.

    Args:
        first: flat index of the first element of the piece.
        p, q: bytes of the piece in the first and in the second checkpoint.
        s, t: the tensor's entries in the two indexes.
        rtol, atol: |p - q| may be atol + rtol * |q|.

    Returns:
        (whether all of the piece is within the tolerances, the sum of the squares of the differences).

    Raises:
        Differs: neither numpy nor torch has the dtype.
    """
    import numpy as np

    if s.dtype in NOT_TORCHS:
        raise Differs(
            f'"{out.name}" has other bytes on the two sides. It is {s.dtype}, numbers of six bits, which ckpttool '
            "copies and does not read, so it cannot say how far they are apart."
        )
    a, b = numbers(p, s.dtype), numbers(q, t.dtype)
    several = PACKED.get(s.dtype, 1)
    first, wholes = first * several, _unpack_shape(s)
    raw_equal = s.dtype == t.dtype
    wide: Any = np.complex128 if "complex" in s.dtype + t.dtype else np.float64
    all_close, squares = True, 0.0
    for k in range(0, len(a), 1 << 18):  # in pieces that stay in the cache
        u, v = a[k : k + (1 << 18)], b[k : k + (1 << 18)]
        if raw_equal:
            bits = f"V{u.dtype.itemsize}" if u.dtype.itemsize > 8 else f"u{u.dtype.itemsize}"
            where = np.flatnonzero(u.view(bits) != v.view(bits))
        else:
            where = np.arange(len(u))
        if not len(where):
            continue
        with np.errstate(all="ignore"):
            f, g = u[where].astype(wide), v[where].astype(wide)
            gap = np.abs(f - g)
            nans = np.isnan(f) != np.isnan(g)
            both = np.isnan(f) & np.isnan(g)
            infs = (f == g) & ~both
            if raw_equal and u.dtype.kind in "iu":
                gap = _subtract_exactly(u[where], v[where]).astype(
                    np.float64
                )  # beyond 2**53 float64 cannot tell neighbours apart
                infs = np.zeros(len(where), dtype=bool)
            gap = np.where(infs | both, 0.0, gap)
            rel = np.where(gap == 0, 0.0, gap / np.maximum(np.abs(g), np.finfo(np.float64).tiny))
        if not raw_equal:
            keep = (gap > 0) | nans
            where, f, g, gap, rel, nans, both = (z[keep] for z in (where, f, g, gap, rel, nans, both))
            if not len(where):
                continue
        if not out.differing:
            out.first = _unravel_index(wholes, first + k + int(where[0]))
        out.differing += len(where)
        out.nan_mismatch += int(nans.sum())
        finite = np.where(np.isnan(gap), -1.0, gap)
        top = int(finite.argmax())
        if finite[top] > out.max_abs or not out.worst:
            out.worst = _unravel_index(wholes, first + k + int(where[top]))
        out.max_abs = max(out.max_abs, float(finite[top]))
        out.max_rel = max(out.max_rel, float(np.where(np.isnan(rel), 0, rel).max()))
        if raw_equal and "float" in s.dtype and u.dtype.itemsize in (1, 2, 4, 8):
            _add_ulp_distance(out, u[where], v[where], f, g)
        with np.errstate(all="ignore"):
            ok = (np.isfinite(gap) & (gap <= atol + rtol * np.abs(g))) | both  # no tolerance reaches infinity
            known = gap[~np.isnan(gap)]
            squares += float(np.einsum("i,i->", known, known))
        all_close = all_close and bool(ok.all()) and not nans.any()
    return all_close, squares


def _add_ulp_distance(out: TensorDifference, u: Array, v: Array, f: Array, g: Array) -> None:
    """Update `out.max_ulp` with the distances between elements of two float arrays, and count opposite signs.

    Args:
        u, v: the elements, in one dtype.
        f, g: the same in float64.
    """
    import numpy as np
    from ml_dtypes import finfo

    # of opposite signs, subnormal numbers alone are so close that their distance means something
    smallest = float(finfo(u.dtype).smallest_normal)  # type: ignore[no-untyped-call]
    opposite = (np.sign(f) * np.sign(g) < 0) & (np.maximum(np.abs(f), np.abs(g)) >= smallest)
    out.opposite_signs += int(np.count_nonzero(opposite))
    if not opposite.all():
        out.max_ulp = max(out.max_ulp or 0, _measure_max_ulp(u[~opposite], v[~opposite]))


def _measure_max_ulp(u: Array, v: Array) -> int:
    """Return the largest distance between elements of two float arrays of one dtype, in units in the last place."""
    import numpy as np

    n = u.dtype.itemsize
    top = 1 << (8 * n - 1)
    keys = []
    for x in (u, v):
        bits = x.view(f"u{n}").astype(np.uint64)
        keys.append(np.where(bits & top, np.int64(0) - (bits & (top - 1)).astype(np.int64), bits.astype(np.int64)))
    return int(_subtract_exactly(*keys).max())


def _subtract_exactly(a: Array, b: Array) -> Any:
    """Return |a - b| of two integer arrays of one dtype, exact, as uint64."""
    import numpy as np

    kind = "u8" if a.dtype.kind == "u" else "i8"
    high, low = (f(a, b).astype(kind).view("u8") for f in (np.maximum, np.minimum))
    return high - low


def _unravel_index(shape: tuple[int, ...], flat: int) -> tuple[int, ...]:
    """Convert the flat index of an element to its index in each dimension."""
    out = []
    for s in boxes.strides(shape):
        out.append(flat // s if s else 0)
        flat -= out[-1] * s if s else 0
    return tuple(out)
