"""Which elements of which tensor a tensor is made of, found by watching torch as it computes on the meta device.

transformers joins, splits and permutes weights with a few operations (cat, stack, chunk, transpose, reshape). `Trace`
sees those that run within it and says of each result what it consists of: `Part`s, each a strided set of elements of
one tensor that was named before. Any other operation makes a result that nothing is known of.

For a child process that has imported torch; nothing here imports it at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ..index import boxes
from ..index.axes import AxisRun

__all__ = ["Part", "make_trace"]

Shape = tuple[int, ...]


class Part(NamedTuple):
    """Elements of the tensor `of`, from index `at` on, that stand in the result from index `start` on; `runs` lead from
    the result to that tensor."""

    of: str
    at: Shape
    start: Shape
    runs: tuple[AxisRun, ...]


class _Untraceable(Exception):
    """A result is no strided part of its sources."""


def _permute_parts(parts: Iterable[Part], order: Sequence[int]) -> list[Part]:
    """Return the parts of a permuted tensor, whose dimension i is dimension order[i] of the tensor with `parts`."""
    place = {d: i for i, d in enumerate(order)}
    return [
        p._replace(start=tuple(p.start[d] for d in order), runs=tuple(r._replace(dim=place[r.dim]) for r in p.runs))
        for p in parts
    ]


def _reshape_parts(parts: Iterable[Part], before: Shape, after: Shape) -> list[Part]:
    """Return the parts of a tensor of shape `before` after it was reshaped to `after`.

    Raises:
        _Untraceable: the elements of a part are not strided in the new shape.
    """
    old, new, out = boxes.strides(before), boxes.strides(after), []
    for p in parts:
        left, start = sum(i * s for i, s in zip(p.start, old, strict=True)), []
        for s in new:
            start.append(left // s)
            left %= s
        todo = [(r.size, r.step * old[r.dim], r) for r in p.runs if r.size > 1]
        runs: list[AxisRun] = []
        while todo:
            size, linear, r = todo.pop()
            d = next((d for d, s in enumerate(new) if s <= linear and after[d] > 1), None)
            if d is None or linear % new[d]:
                raise _Untraceable
            step = linear // new[d]
            if step >= after[d] or step * size > after[d]:  # the rest of it moves along a dimension before
                inner = after[d] // step if after[d] % step == 0 else 0
                if inner < 2 or size % inner:
                    raise _Untraceable
                todo.append((size // inner, linear * inner, r._replace(other_step=r.other_step * inner)))
                size = inner
            runs.append(AxisRun(size, d, step, r.other_dim, r.other_step))
        last = [a + sum((r.size - 1) * r.step for r in runs if r.dim == d) for d, a in enumerate(start)]
        if any(i >= n for i, n in zip(last, after, strict=True)):
            raise _Untraceable
        out.append(Part(p.of, p.at, tuple(start), tuple(runs)))
    return out


def _narrow_parts(parts: Iterable[Part], dim: int, first: int, last: int) -> list[Part]:
    """Return the parts of a tensor that is cut to the indices [first, last) of dimension `dim`; `parts` are those of
    the tensor before the cut."""
    out = []
    for p in parts:
        rest = tuple(r for r in p.runs if r.dim != dim)
        here = sorted((r for r in p.runs if r.dim == dim), key=lambda r: -r.step)
        for begin, at, runs in _iterate_cut_runs(p.start[dim], p.at, here, first, last):
            out.append(Part(p.of, at, (*p.start[:dim], begin - first, *p.start[dim + 1 :]), rest + runs))
    return out


def _iterate_cut_runs(
    begin: int, at: Shape, runs: Sequence[AxisRun], first: int, last: int
) -> Iterator[tuple[int, Shape, tuple[AxisRun, ...]]]:
    """Cut the runs of one dimension to the interval [first, last), and yield (index in the result, index in the source,
    runs) of each remaining piece.

    Args:
        begin: index in the result at which the runs begin.
        at: index in the source at which they begin.
        runs: the runs, the largest step first.
        first, last: the interval, in indices of the result.
    """
    span = sum((r.size - 1) * r.step for r in runs)
    if begin >= last or begin + span < first:
        return
    if first <= begin and begin + span < last:
        yield begin, at, tuple(runs)
        return
    r, rest = runs[0], runs[1:]
    span -= (r.size - 1) * r.step
    low = max(0, -(-(first - begin) // r.step))
    high = min(r.size, (last - 1 - span - begin) // r.step + 1)

    def moved(i: int) -> Shape:
        """Return the index in the source of number i of the outer run."""
        return tuple(a + i * r.other_step * (d == r.other_dim) for d, a in enumerate(at))

    if low < high:
        yield begin + low * r.step, moved(low), (r._replace(size=high - low), *rest)
    for i in (i for i in range(r.size) if not low <= i < high):
        yield from _iterate_cut_runs(begin + i * r.step, moved(i), rest, first, last)


def _split_parts(parts: list[Part], dim: int, sizes: Iterable[int]) -> list[list[Part]]:
    """Return, for a tensor that is split into pieces of these sizes along a dimension, the parts of each piece."""
    ends = list(accumulate(sizes))
    return [_narrow_parts(parts, dim, a, b) for a, b in zip([0, *ends], ends, strict=False)]


def _concatenate_parts(several: Iterable[tuple[list[Part], Shape]], dim: int) -> list[Part]:
    """Return the parts of the concatenation of tensors, given as (parts, shape), along a dimension."""
    out, at = [], 0
    for parts, shape in several:
        out += [p._replace(start=(*p.start[:dim], p.start[dim] + at, *p.start[dim + 1 :])) for p in parts]
        at += shape[dim]
    return out


#: Operations of torch whose result has the elements of their input in the same order, perhaps in another shape.
_SAME = frozenset(
    ("clone", "detach", "alias", "_to_copy", "view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze")
)


def _trace_operation(
    name: str, given: list[Part], shape: Shape, out: Any, args: Sequence[Any], dim_of: Callable[[int], int]
) -> Any:
    """Find out what the result of a torch operation on one tensor is made of.

    Args:
        name: name of the operation, such as "transpose".
        given: parts of the tensor.
        shape: shape of the tensor.
        out: the result: a tensor, or a list of tensors.
        args: the arguments after the tensor.
        dim_of: converts the number of a dimension that may count from the end.

    Returns:
        A list of `Part`; a list of such lists, one for each tensor, if the operation splits its input; None if the
            origin of the elements is not known.
    """
    if name in _SAME:
        return _reshape_parts(given, shape, tuple(out.shape))
    if name in ("transpose", "t", "permute"):
        order = list(range(len(shape)))
        a, b = (0, 1) if name == "t" else (dim_of(args[0]), dim_of(args[1])) if name == "transpose" else (0, 0)
        order[a], order[b] = order[b], order[a]
        return _permute_parts(given, [dim_of(d) for d in args[0]] if name == "permute" else order)
    if name in ("split", "split_with_sizes", "unbind"):
        dim = dim_of((args if name == "unbind" else args[1:] or (0,))[0] if args else 0)
        pieces = _split_parts(given, dim, [1] * len(out) if name == "unbind" else [t.shape[dim] for t in out])
        return [
            _reshape_parts(p, (*shape[:dim], 1, *shape[dim + 1 :]), tuple(t.shape)) if name == "unbind" else p
            for p, t in zip(pieces, out, strict=True)
        ]
    if name in ("slice", "select"):
        dim = dim_of(args[0] if args else 0)
        first = (args[1] if len(args) > 1 else 0) or 0
        first += shape[dim] if first < 0 else 0
        if name == "select":
            cut = _narrow_parts(given, dim, first, first + 1)
            return _reshape_parts(cut, (*shape[:dim], 1, *shape[dim + 1 :]), tuple(out.shape))
        return _narrow_parts(given, dim, first, first + out.shape[dim]) if len(args) < 4 or args[3] == 1 else None
    return None


def make_trace(named: dict[str, Any]) -> Any:
    """Make a context manager that watches torch operations and remembers the origin of their results' elements.

    Its `parts_of(tensor)` returns a list of `Part`, which say what the tensor was made of within the context, or None
    if that is not known.

    Args:
        named: the source tensors, {name: tensor}.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Watches the operations that move elements of tensors."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.found: dict[object, list[Part]] = {}
            self.alive: list[object] = []  # so that no storage gets the address of another
            for name, t in named.items():
                zero = (0,) * t.ndim
                runs = tuple(AxisRun(n, d, 1, d, 1) for d, n in enumerate(t.shape) if n > 1)
                self._note(t, [Part(name, zero, zero, runs)] if prod(t.shape) else [])

        def _note(self, t: object, parts: list[Part]) -> None:
            self.found[self._key(t)] = parts
            self.alive.append(t)

        @staticmethod
        def _key(t: Any) -> object:
            return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride()

        def parts_of(self, t: object) -> list[Part] | None:
            """Return what a tensor was made of; None where that is not known."""
            return self.found.get(self._key(t))

        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            try:
                if name in ("cat", "stack"):
                    self._join(name, out, args[0], args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0))
                elif args and hasattr(args[0], "untyped_storage") and (given := self.parts_of(args[0])) is not None:
                    shape = tuple(args[0].shape)
                    found = _trace_operation(name, given, shape, out, args[1:], lambda d: d % max(1, len(shape)))
                    several = isinstance(out, (list, tuple))
                    for t, parts in zip(out, found, strict=True) if several and found else [(out, found)]:
                        if parts is not None:
                            self._note(t, parts)
            except _Untraceable:
                pass
            return out

        def _join(self, name: str, out: Any, given: Any, dim: int) -> None:
            parts = [(self.parts_of(t), tuple(t.shape)) for t in given]
            if any(p is None for p, _ in parts):
                return
            dim %= out.ndim
            if name == "stack":
                wide = [(*s[:dim], 1, *s[dim:]) for _, s in parts]
                parts = [(_reshape_parts(p or [], s, w), w) for (p, s), w in zip(parts, wide, strict=True)]
            self._note(out, _concatenate_parts([(p or [], s) for p, s in parts], dim))

    return Trace()
