"""A name map applied to the names and tensors of a checkpoint: which tensors each of its lines is about, and what they
become. name_maps.py reads the map, and knows of no checkpoint.

Names of one component are first put into groups: those of one line that have the same numbers (`group_names`). A group
is then resolved: the sizes of its axes, the names on the other side, and where each part is in the whole
(`resolve_group`); and its tensors become views of the tensors that are there (`make_views`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ..errors import Unsupported, argument
from .axes import PAD, AxesError, Compressed, Link, UnknownSize, link_part, place_chunks
from .checkpoint import Chunks, Path, TensorEntry, joined
from .name_maps import Ignored, MapLine, NameMap

__all__ = [
    "Key",
    "ResolvedGroup",
    "TensorGroup",
    "find_ignore_statement",
    "find_uncovered_names",
    "group_names",
    "make_views",
    "refuse_unknown_size",
    "rename_path",
    "resolve_group",
]

#: No map makes more tensors of one: a model of 1,000 layers with 1,000 experts each in one tensor.
_MOST_PARTS = 1 << 20

#: A tensor of a line: (its part, the numbers of the stacked variables); the whole is part -1.
Key = tuple[int, tuple[int, ...]]


@dataclass
class TensorGroup:
    """Tensors of one line with the same numbers: {(part, numbers of the stacked variables): name}; the whole is part
    -1. `numbers` has the text of {*}, too; `literal` counts the characters of the names that the line spells out."""

    line: MapLine
    numbers: dict[str, Any]
    from_whole: bool
    names: dict[Key, str] = field(default_factory=dict)
    literal: int = 0

    @property
    def stacked(self) -> list[str]:
        """List the stacked variables of the line (numbers in the names of the parts that are axes of the whole tensor),
        sorted."""
        return sorted(self.line.stacked)

    @property
    def first(self) -> str:
        """Return the name of its first tensor, for messages."""
        return next(iter(self.names.values()))


@dataclass
class ResolvedGroup:
    """What a group becomes: {name: the link of that part}, or of the whole; the sizes of its axes."""

    group: TensorGroup
    sizes: dict[str, int]
    links: dict[Key, Link]
    names: dict[Key, str]  # of the other side
    notes: list[str] = field(default_factory=list)

    @property
    def renames(self) -> bool:
        """Whether the group is one tensor that only gets another name, with the same shape and bytes."""
        return not self.links or (len(self.names) == len(self.group.names) == 1 and self._only_link.is_identity)

    @property
    def _only_link(self) -> Link:
        """Return the first of its links, for a group that has the whole tensor or only one part."""
        return next(iter(self.links.values()))

    def source_shape(self, key: Key) -> tuple[int, ...]:
        """Return the shape of the weight in the source to which a tensor of the group belongs; `key` is (number of
        the part, numbers of the stacked variables)."""
        return self._only_link.whole_shape if self.group.from_whole else self.links[key].part_shape


def group_names(
    names: Iterable[str], found: NameMap, component: str, forward: bool
) -> tuple[list[TensorGroup], list[str]]:
    """Group names of tensors by the lines of a name map that they match: (groups, names that no line matches).

    Args:
        names: without their component, such as "layers.0.wq.weight".
        found: the name map.
        component: "model" or "optim"; lines for the other one are passed over.
        forward: True if the names are those on the left side of the map, False for the right.
    """
    groups: dict[object, TensorGroup] = {}
    unmatched: list[str] = []
    rows = [
        (line, k, t, forward == line.flipped)
        for line in found.lines
        if line.component in (None, component)
        for k, t in enumerate(line.tensors(right=not forward))
    ]
    for name in names:
        for line, k, t, from_parts in rows:
            values = t.match(name)
            if values is None:
                continue
            shared = {v: n for v, n in values.items() if v not in line.stacked}
            group = groups.setdefault((id(line), *sorted(shared.items())), TensorGroup(line, shared, not from_parts))
            at = tuple(values[v] for v in group.stacked) if from_parts else ()
            group.names[k if from_parts else -1, at] = name
            group.literal += t.literal
            break
        else:
            unmatched.append(name)
    return list(groups.values()), unmatched


def find_uncovered_names(found: NameMap, names: Iterable[str], forward: bool) -> list[str]:
    """List the names of weights that a name map neither matches with a line nor leaves out, by an `ignore` statement or
    as copies of others.

    Args:
        found: the name map.
        names: names of weights without their component.
        forward: True if the names are those on the left side of the map, False for the right side.
    """
    _, unmatched = group_names(names, found, "model", forward)
    copies = [row.copy for row in found.copied if row.right != forward]
    left = [n for n in unmatched if not any(t.match(n) is not None for t in copies)]
    return [n for n in left if not (forward and find_ignore_statement(found, n))]


def find_ignore_statement(found: NameMap, name: str) -> Ignored | None:
    """Find the `ignore` statement by which a name map leaves out the tensor of this name on its left side; None if
    there is none."""
    return next((row for row in found.ignored if row.tensor.pattern.fullmatch(name)), None)


def _solve_sizes(
    group: TensorGroup,
    shapes: Mapping[Key, Sequence[int]],
    known: Mapping[str, int],
    told: Container[str],
) -> tuple[dict[str, int], list[str]]:
    """Compute the sizes of the axes of a group from the shapes of its tensors, and return ({axis: size}, notes).

    Args:
        group: the tensors of one line of a name map.
        shapes: {key: shape} of the tensors of the group; a key is (number of the part, or -1 for the whole; numbers of
            the stacked variables).
        known: {axis: size} of sizes that are known from elsewhere.
        told: the axes whose size config.json can give; UnknownSize names a missing one of these first.

    Raises:
        AxesError: a shape contradicts the sizes.
        UnknownSize: a size does not follow from the shapes.
    """
    line, notes = group.line, list[str]()
    whole = line.whole.axes
    assert whole is not None
    sizes = {
        a: n for a, n in known.items() if a in whole.atoms | {a for t in line.parts if t.axes for a in t.axes.atoms}
    }
    if not group.from_whole:
        for i, v in enumerate(group.stacked):
            sizes[v] = 1 + max(at[i] for _, at in group.names)
        for a in {a for f in whole.sums if (PAD,) in f for t in f for a in t}:
            sizes.pop(a, None)  # the rows that are there, however many are asked for
        sizes[PAD] = 0
    rows = [(line.whole.axes if k < 0 else line.parts[k].axes, shape) for (k, _), shape in shapes.items()]
    for _ in range(2):
        for axes, shape in rows:
            assert axes is not None
            axes.solve(shape, sizes)
    if any(t == (PAD,) for f in whole.sums for t in f) and PAD not in sizes:
        sizes[PAD] = 0
        for axes, shape in rows:
            assert axes is not None
            axes.solve(shape, sizes)
        notes.append(
            f"rows of padding, if there are some, are kept: {', '.join(sorted(whole.atoms - known.keys()))} is not "
            "known"
        )
    if missing := sorted(whole.atoms - sizes.keys()):
        raise UnknownSize(next((a for a in missing if a in told), missing[0]))
    return sizes, notes


def resolve_group(
    group: TensorGroup,
    shapes: Mapping[Key, Sequence[int]],
    known: Mapping[str, int],
    found: NameMap,
) -> ResolvedGroup:
    """Find what a group of tensors becomes under a name map: the new names, and where each part lies in the whole.

    Args:
        group: the tensors of one line of the map.
        shapes: {key: shape} of the tensors of the group; a key is (number of the part, or -1 for the whole; numbers of
            the stacked variables).
        known: {axis: size} of sizes that are known from elsewhere.
        found: the name map, for its sizes and for messages.

    Raises:
        Unsupported: a shape is not what the line says, a part is missing, a size is not known, or more parts than any
            model has would come out.
    """
    line = group.line
    others = line.parts if group.from_whole else (line.whole,)
    if line.whole.axes is None:
        only: Key = (0, ()) if group.from_whole else (-1, ())
        return ResolvedGroup(group, {}, {}, {only: others[0].named(group.numbers)})
    try:
        sizes, notes = _solve_sizes(group, shapes, known, found.sizes)
    except AxesError as e:
        key, shape = next(iter(shapes.items()))
        raise Unsupported(
            f'"{group.names.get(key, group.first)}" is {list(shape)}, and the map {found.name} says {line}: {e}.',
            code="CKPT0310",
        ) from None
    except UnknownSize as e:
        raise refuse_unknown_size(found, str(e), group.first) from None
    count = len(line.parts) * prod(sizes[v] for v in group.stacked)
    if group.from_whole and count > _MOST_PARTS:
        raise Unsupported(
            f'"{group.first}" would become {count:,} tensors by the line {line}, more than any model has.',
            code="CKPT0310",
        )
    every = (
        (k, at) for at in _iterate_stacked_indices([sizes[v] for v in group.stacked]) for k in range(len(line.parts))
    )
    if not group.from_whole and (missing := next((key for key in every if key not in group.names), None)):
        raise Unsupported(
            f'"{line.whole.named(group.numbers)}" is made of {count:,} tensors, and {count - len(group.names):,} of '
            f'them are not here, first "{_make_part_name(group, *missing)}".',
            code="CKPT0310",
        )
    keys = list(group.names) if not group.from_whole else list(every)
    links = {}
    for k, at in keys:
        axes = line.parts[k].axes
        assert axes is not None
        links[k, at] = link_part(axes, line.whole.axes, k, dict(zip(group.stacked, at, strict=True)), sizes)
    if group.from_whole:
        return ResolvedGroup(group, sizes, links, {key: _make_part_name(group, *key) for key in keys}, notes)
    return ResolvedGroup(group, sizes, links, {(-1, ()): line.whole.named(group.numbers)}, notes)


def refuse_unknown_size(found: NameMap, size: str, name: str) -> Unsupported:
    """Return the error that a map needs a size for the tensor `name`, which nothing tells."""
    what = found.sizes.get(size)
    need = f"{size} = {what}, of config.json" if what else f"the size of {size}; add a line size {size} = ..."
    return Unsupported(
        f'the map {found.name} needs {need} for "{name}". Give {argument("config")} a folder with the '
        "config.json of the model.",
        code="CKPT0312",
    )


def _iterate_stacked_indices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the stacked variables of all parts, the last variable running fastest; `sizes` has one size
    for each variable.

    They come one by one, since a name in a file may make them a billion.
    """
    if not sizes:
        yield ()
        return
    for i in range(sizes[0]):
        for rest in _iterate_stacked_indices(sizes[1:]):
            yield (i, *rest)


def _make_part_name(group: TensorGroup, k: int, at: tuple[int, ...]) -> str:
    """Return the name of part number `k` of the group's line, with the stacked variables at the indices `at`."""
    return group.line.parts[k].named({**group.numbers, **dict(zip(group.stacked, at, strict=True))})


def rename_path(path: Path, head: Path, name: str, tail: Path) -> Path:
    """Return the path of a tensor or value under a new name. Path elements below the parameter (an inner tensor of a
    tensor subclass, an extra state) stay elements of their own, if the new name ends with them.

    Args:
        path: the present path.
        head, tail: the elements of the path before and after the name.
        name: the new name.
    """
    below = path[len(head) + 1 : len(path) - len(tail)]
    kept = name.removesuffix("." + joined(below))
    return (*head, kept, *below, *tail) if below and kept != name else (*head, name, *tail)


def make_views(
    result: ResolvedGroup, entries: Mapping[Key, TensorEntry], head: Path, tail: Path
) -> dict[str, TensorEntry]:
    """Make the entries of the tensors that those of a group become, as views of their bytes: {full name: entry}.

    Args:
        result: what the group becomes.
        entries: {key of a tensor of the group: its entry}.
        head, tail: the elements of a path before and after the new name.

    Raises:
        Unsupported: the parts have several dtypes, or a chunk is compressed.
    """
    out: dict[str, TensorEntry] = {}
    first = next(iter(entries.values()))
    if result.renames:
        path = rename_path(first.path, head, next(iter(result.names.values())), tail)
        return {joined(path): replace(first, path=path)}
    if odd := [t for t in entries.values() if t.dtype != first.dtype]:
        raise Unsupported(
            f'"{joined(first.path)}" is {first.dtype} and "{joined(odd[0].path)}" is {odd[0].dtype}: the map joins '
            f"them to one tensor, which has one dtype. Cast them first: {argument('cast')}.",
            code="CKPT0310",
        )
    try:
        if result.group.from_whole:
            for key, name in result.names.items():
                shape = result.links[key].part_shape
                chunks = Chunks(len(shape))
                place_chunks(result.links[key], first, chunks, to_whole=False)
                path = (*head, name, *tail)
                out[joined(path)] = TensorEntry(first.dtype, shape, path, chunks)
        else:
            shape = next(iter(result.links.values())).whole_shape
            chunks = Chunks(len(shape))
            for key, t in entries.items():
                place_chunks(result.links[key], t, chunks, to_whole=True)
            path = (*head, next(iter(result.names.values())), *tail)
            out[joined(path)] = TensorEntry(first.dtype, shape, path, chunks)
    except Compressed:
        raise Unsupported(
            f'"{joined(first.path)}" is in compressed files, which cannot be cut. Convert to dcp first, then map the '
            "names.",
            code="CKPT0324",
        ) from None
    return out
