"""A checkpoint under the names of another program, by a name map (index/name_maps.py): weights, optimizer state, param
groups.

Every tensor of the result is chunks of the source, so nothing is computed and nothing is read, but for rows of padding
that are cut, which are looked at, and norms that one side stores less one (added_one.py). The state of a parameter goes
through the map of its weight where it has the weight's shape; a number of steps is copied to the parts of its
parameter, or must be the same in all parts that are joined; a slot of another shape, such as the factors of Adafactor,
only goes along where its parameter is renamed as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from ...errors import Unsupported, UsageError, argument
from ...huggingface import Config, lora, maps
from ...index.axes import PAD, AxesError, UnknownSize, link_part, place_chunks
from ...index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Path, TensorEntry, Value, joined
from ...index.expressions import evaluate_size
from ...index.map_groups import (
    Key,
    ResolvedGroup,
    TensorGroup,
    find_ignore_statement,
    group_names,
    make_views,
    refuse_unknown_size,
    rename_path,
    resolve_group,
)
from ...index.name_maps import MapLine, NameMap
from ...printable import list_first
from ...storage.overlay import ENDLESS, ZEROS, ComputedSource, JoinedSource, PagedFile
from ...storage.source import Source
from ..copy.fill import silent
from ..copy.stream import read_small_tensors
from ..copy.tensor_digests import tensor_digests
from .adapter_names import has_lines_for_adapter, map_adapter
from .added_one import FILE, add_one_to_norms
from .vocabulary_size import find_unequal_rows

__all__ = ["apply_map"]

_SHOWN = 5
_MASTER: Path = ("extra", "master")
_NAME_LISTS: tuple[Path, ...] = (("params",), ("param_names",))


def apply_map(ckpt: Checkpoint, source: Source, found: NameMap, config: Config) -> tuple[Checkpoint, Source]:
    """Return (the same state with the names of the other side of a map, its files). The present names tell which side
    they are of.

    Args:
        found: the map, with the lines that apply to this job (`NameMap.of_job`).
        config: config.json of the text model, for sizes of axes that shapes do not tell.

    Raises:
        Unsupported: the map lacks names of weights or of the optimizer, a shape contradicts it, a size is unknown, or
            an optimizer slot cannot be cut as its parameter is.
        UsageError: there are no weights and no optimizer that names parameters.
    """
    sizes = {a: n for a, e in found.sizes.items() if (n := evaluate_size(e, config)) is not None}
    found, unplaced = found.with_sizes(sizes)
    if lora.find_lora(ckpt) is not None and not has_lines_for_adapter(ckpt, found):
        return map_adapter(ckpt, found, _list_state_names(ckpt)), source
    mapping = _Mapping(ckpt, source, found, sizes, unplaced)
    out = mapping.run()
    files = JoinedSource(source) if ZEROS in mapping.made else source
    if FILE in mapping.made:
        data = mapping.made[FILE]
        pages = PagedFile(len(data), len(data), lambda _: memoryview(data))
        files = ComputedSource(files, {FILE: pages}, (), len(data))
    return out, files


def _with_torchtune_optimizer(ckpt: Checkpoint) -> Checkpoint:
    """Return the same state with torchtune's optimizer moved from "extra" to "optim"; other states are returned
    unchanged.

    The reader leaves that optimizer in "extra", since its names are not those of the weights.
    """
    head = next(
        (t.path[:3] for t in ckpt.tensors.values() if t.component == "extra" and t.path[2:4] == ("optimizer", "state")),
        None,
    )
    if head is None or any(t.component == "optim" for t in ckpt.tensors.values()):
        return ckpt

    def move(path: Path) -> Path:
        """Return a path, with what leads to torchtune's optimizer replaced by "optim"."""
        return ("optim", *path[3:]) if path[:3] == head else path

    tensors = {joined(p): replace(t, path=p) for t in ckpt.tensors.values() for p in [move(t.path)]}
    values = {joined(p): Value(p, v.data) for v in ckpt.values.values() for p in [move(v.path)]}
    recorded = {joined(move(t.path)): ckpt.recorded[n] for n, t in ckpt.tensors.items() if n in ckpt.recorded}
    return replace(ckpt, tensors=tensors, values=values, recorded=recorded)


def _list_state_names(ckpt: Checkpoint) -> list[str]:
    """List the names of the optimizer's parameters: those with state, and those that a group lists."""
    out: dict[str, None] = {}
    leaves: list[TensorEntry | Value] = [*ckpt.tensors.values(), *ckpt.values.values()]
    for t in leaves:
        if t.slot is not None:
            out[t.parameter] = None
    for v in ckpt.values.values():
        if v.is_param_group and v.path[3:] in _NAME_LISTS and isinstance(v.data, list):
            out |= dict.fromkeys(n for n in v.data if isinstance(n, str))
    return list(out)


class _Mapping:
    """One state on its way through a map.

    `tensors`, `values`, `recorded`, `notes`  the result so far
    `ways`    as `_choose_sides` gives them
    `state`   groups of parameters of the optimizer that the map makes others of
    `sizes`   {axis: size} by the map and config.json; `unplaced` lines of the map that lack one of these
    `copies`  {weight that the source has a second time: that weight}
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        source: Source,
        found: NameMap,
        sizes: Mapping[str, int],
        unplaced: Iterable[MapLine],
    ) -> None:
        """Prepare the mapping of a state: choose the sides of the map, and group the names of the optimizer.

        Args:
            ckpt, source: the state and its files.
            found: the map.
            sizes: {axis: size} by the map and config.json.
            unplaced: lines of the map that lack one of these sizes.

        Raises:
            Unsupported: names belong to neither side of the map.
            UsageError: there are no weights and no optimizer that names parameters.
        """
        ckpt = _with_torchtune_optimizer(ckpt)
        self.ckpt, self.source, self.map, self.sizes, self.unplaced = ckpt, source, found, sizes, unplaced
        self.weights = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
        # what is no tensor, such as _extra_state
        self.plain = {v.local_name: v for v in ckpt.values.values() if v.component == "model"}
        self.notes: list[str] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.values: dict[str, Value] = {}
        self.recorded: dict[str, str] = {}
        self.made: dict[str, bytes] = {}  # {file that is not of the source: its bytes, if they are not just zeros}
        self.copies = {
            n: of
            for row in found.copied
            for n in self.weights
            if (m := row.copy.match(n)) is not None and (of := row.of.named(m)) in self.weights
        }
        for n in self.copies:
            del self.weights[n]
        self.ways = self._choose_sides()
        way = self.ways["optim"]
        self.state: list[TensorGroup] = (
            [] if way is None else group_names(_list_state_names(self.ckpt), found, "optim", way)[0]
        )
        self.of_weight: dict[str, list[str]] = {}  # {a weight: what it becomes, or becomes part of}
        self.renamed: dict[str, tuple[str, ...]] = {}  # {first name of a group of the optimizer: its new names}

    def _leave_out_copies(self) -> None:
        """Leave out of the source every weight that the map calls a copy of another weight, after comparing the bytes
        of the two.

        Raises:
            Unsupported: a copy has other bytes, so the other side of the map has no place for it.
        """
        tensors = self.ckpt.tensors
        for copy, of in self.copies.items():
            a, b = tensors[f"model.{copy}"], tensors[f"model.{of}"]
            pair = {} if list(a.chunks) == list(b.chunks) else {copy: a, of: b}
            digests = tensor_digests(pair, self.source, self.ckpt.files, self.ckpt.records, silent)
            if (a.dtype, a.shape) != (b.dtype, b.shape) or len(set(digests.values())) > 1:
                raise Unsupported(
                    f'"model.{copy}" and "model.{of}" differ, and the map {self.map.name} takes the first for a copy '
                    "of the second, which is all that the other side has. "
                    f"{argument('drop_matching', ['model.' + copy])} leaves it out.",
                    code="CKPT0310",
                )
        if self.copies:
            left = {f"model.{n}" for n in self.copies}
            self.ckpt = replace(self.ckpt, tensors={n: t for n, t in tensors.items() if n not in left})
            self.notes.append(
                f'copies of other weights, left out after a comparison of bytes: {len(left):,}, first "{min(left)}"'
            )

    def _add_copies(self) -> None:
        """Add to the result each tensor that, by the map, is a copy of a weight on the result's side of the map."""
        made = {}
        for row in self.map.copied if self.ways["model"] is not None else ():
            for t in self.tensors.values() if row.right == self.ways["model"] else ():
                m = row.along.match(t.local_name) if t.component == "model" else None
                if m is not None and (of := self.tensors.get(f"model.{row.of.named(m)}")) is not None:
                    path = ("model", row.copy.named(m))
                    made[joined(path)] = replace(of, path=path)
        if made:
            self.tensors |= made
            self.notes.append(
                f"copies of other weights, added since {self.map.sides[bool(self.ways['model'])]} has them: "
                f'{len(made):,}, first "{min(made)}"'
            )

    def _choose_sides(self) -> dict[str, bool | None]:
        """Find out which side of the map the present names are of, for the weights and for the optimizer.

        Returns:
            {"model": side of the weights' names, "optim": side of the optimizer's}: True for the left side, whose
                names become those of the right one; False for the opposite; None for names of the right side that are
                kept. That is so where weights and optimizer have names of two sides, as torchtune saves them: then
                both get the names of the right side.

        Raises:
            Unsupported: names belong to neither side.
            UsageError: there are no names.
        """
        names = {"model": [*self.weights, *self.plain], "optim": _list_state_names(self.ckpt)}
        if not any(names.values()):
            raise UsageError(
                f"{argument('map')}: the checkpoint holds no weights and no optimizer that names parameters.",
                code="CKPT0205",
            )
        # what each side of the map does not know of the weights, and of the optimizer
        grouped = {
            (component, forward): group_names(rows, self.map, component, forward)
            for component, rows in names.items()
            for forward in (True, False)
        }
        unknown = {
            (component, forward): [
                n for n in rest if not (forward and component == "model" and find_ignore_statement(self.map, n))
            ]
            for (component, forward), (_, rest) in grouped.items()
        }
        fits = [forward for forward in (True, False) if not any(unknown[component, forward] for component in names)]
        if len(fits) == 2 and self.map.has_rest:  # the side that spells out more of the names
            fits.sort(key=lambda forward: -sum(g.literal for c in names for g in grouped[c, forward][0]))
        if fits:
            return dict.fromkeys(names, fits[0])
        if all(not unknown[component, True] or not unknown[component, False] for component in names):
            return {component: None if unknown[component, True] else True for component in names}
        # refuse, with what the side that knows more does not know
        forward = sum(len(unknown[c, True]) for c in names) <= sum(len(unknown[c, False]) for c in names)
        for line in self.unplaced:
            for n in (*unknown["model", forward], *unknown["optim", forward]):
                if any(t.match(n) is not None for t in line.tensors(right=not forward)):
                    raise refuse_unknown_size(self.map, line.sizes[0], n)
        unmatched = [f"model.{n}" for n in unknown["model", forward]]
        unmatched += [f"optim.state.{n}" for n in unknown["optim", forward]]
        shown = list_first((f'"{n}"' for n in unmatched), _SHOWN)
        total = sum(map(len, names.values()))
        raise Unsupported(
            f"the map {self.map.name} is between {self.map.sides[0]} and {self.map.sides[1]}, and {len(unmatched):,} "
            f"of {total:,} names are not names of {self.map.sides[not forward]}: {shown}. "
            + (
                f"Write a map with lines for them; `ckpttool maps {self.map.name}` prints this one to start from."
                if self.map.name in maps.list_map_names()
                else "Add lines for them."
            ),
            code="CKPT0310",
        )

    def run(self) -> Checkpoint:
        """Map weights, masters, optimizer and the lists of names, in this order, and return the mapped state.

        Raises:
            Unsupported: the map does not fit a name, a shape or a slot, or the state is a salvaged one.
        """
        if (ckpt := self.ckpt).salvage is not None and (ckpt.salvage.missing or ckpt.salvage.rebuilt):
            raise Unsupported(
                "what was salvaged of a damaged checkpoint keeps its names. Salvage it first, then map the copy.",
                code="CKPT0310",
            )
        self._check_groups_stay_joined()  # before rows of padding are read
        self._leave_out_copies()
        if self.ways["model"]:  # norms that are stored less one have the left names
            new = self._add_one(self.ckpt.tensors, 1)
            recorded = {n: d for n, d in self.ckpt.recorded.items() if n not in new}
            self.ckpt = replace(self.ckpt, tensors={**self.ckpt.tensors, **new}, recorded=recorded)
            self.weights |= {t.local_name: t for t in new.values() if t.component == "model"}
        self._map_weights()
        self._add_zero_tensors()
        self._add_copies()
        self._map_masters()
        if self.ways["model"] is False:
            new = self._add_one(self.tensors, -1)
            self.tensors |= new
            self.recorded = {n: d for n, d in self.recorded.items() if n not in new}
        self._map_optimizer()
        self._map_name_lists()
        self._copy_other_tensors()
        if any(t.path[:2] == ("extra", "adapter") for t in ckpt.tensors.values()):
            self.notes.append("the adapter beside the weights (extra.adapter) keeps its names")
        # say what became of names and recorded digests
        ckpt = self.ckpt
        kept = len([n for n in ckpt.tensors if joined(ckpt.tensors[n].path) in ckpt.recorded])
        if kept > len(self.recorded):
            self.notes.append(
                f"the recorded digests of {kept - len(self.recorded)} tensors were not compared, since the map cuts, "
                "joins or permutes them"
            )
        here, there = self.map.sides if True in self.ways.values() else self.map.sides[::-1]
        changed = sum(n not in ckpt.tensors for n in self.tensors)
        said = (
            f"names and order of {here} became those of {there} by the map {self.map.name}: {changed:,} of "
            f"{len(self.tensors):,} tensors have other names"
        )
        return replace(
            ckpt,
            tensors=self.tensors,
            values=self.values,
            recorded=self.recorded,
            origin={},
            trainer=None,
            notes=[*ckpt.notes, said, *dict.fromkeys(self.notes)],
        )

    def _add_one(self, tensors: Mapping[str, TensorEntry], by: int) -> dict[str, TensorEntry]:
        """Add `by` (1 or -1) to the norm weights that the left side stores less one, and to their masters; return
        {name: new tensor}.

        Raises:
            Unsupported: such a weight has no floating-point dtype.
        """
        if not self.map.added_one:
            return {}
        new, data, note = add_one_to_norms(self.ckpt, self.source, tensors, (a.pattern for a in self.map.added_one), by)
        if new:
            self._add_file(FILE, len(data), data)
            self.notes += [
                note,
                *self._warn_of_weight_decay({t.local_name for t in new.values() if t.component == "model"}),
            ]
        return new

    def _warn_of_weight_decay(self, names: set[str]) -> list[str]:
        """Return a list with one note if the optimizer applies weight decay to some of these parameters; else [].

        Args:
            names: FQNs of norm weights that the left side of the map stores less one, so that decay toward 0 means
                another thing on each side.
        """
        for v in self.ckpt.values.values():
            if v.is_param_group and v.path[3:] in _NAME_LISTS and isinstance(v.data, list):
                decay = self.ckpt.value(joined((*v.path[:3], "weight_decay")))
                if decay and (few := names.intersection(n for n in v.data if isinstance(n, str))):
                    return [
                        f"{len(few)} of these have a weight decay of {decay}: it draws what {self.map.sides[0]} stores "
                        f"to 0, and so the weight of {self.map.sides[1]} to 1; the next job would draw its own to 0"
                    ]
        return []

    def _add_file(self, name: str, size: int, data: bytes = b"") -> None:
        """Add a file to the index that the source does not have.

        Args:
            size: in bytes.
            data: its content; empty for a file of zeros.
        """
        self.made[name] = data
        self.ckpt = replace(self.ckpt, files=[*self.ckpt.files, name], sizes=[*self.ckpt.sizes, size])

    def _add_views(
        self, result: ResolvedGroup, entries: Mapping[Key, TensorEntry], head: Path, tail: Path = ()
    ) -> None:
        """Add the tensors that a group of the source's tensors becomes; the recorded digest of a tensor is kept if it
        is only renamed.

        Args:
            result: the group.
            entries: its tensors.
            head, tail: what the paths of the new tensors have before and behind the parameter's name.

        Raises:
            Unsupported: the result already has one of these names.
        """
        new = make_views(result, entries, head, tail)
        for name, t in new.items():
            if name in self.tensors:
                raise Unsupported(f'the map {self.map.name} makes two tensors of the name "{name}".', code="CKPT0310")
            self.tensors[name] = t
        if result.renames:
            for name in (joined(t.path) for t in entries.values()):
                if name in self.ckpt.recorded:
                    self.recorded[next(iter(new))] = self.ckpt.recorded[name]

    def _map_weights(self) -> None:
        """Map the weights and the model's values that are no tensors; add notes about entries that are left out.

        Raises:
            Unsupported: the map does not fit a shape, or leaves out a tensor that is not 0.
        """
        way = self.ways["model"]
        if way is None:
            self._copy_component("model")
            return
        groups, unmatched = group_names(self.weights, self.map, "model", way)
        for group in groups:
            entries = {key: self.weights[n] for key, n in group.names.items()}
            result = resolve_group(group, {key: t.shape for key, t in entries.items()}, self.sizes, self.map)
            self._add_views(result, entries, ("model",))
            self.of_weight |= {n: list(result.names.values()) for n in group.names.values()}
            self.notes += result.notes
            if result.sizes.get(PAD):
                self._describe_padding(result, group.first)
        groups, others = group_names(self.plain, self.map, "model", way)
        for group in groups:
            if group.line.whole.axes is not None:
                raise Unsupported(
                    f'"{group.first}" is not a tensor, and the map {self.map.name} says {group.line}.', code="CKPT0310"
                )
            new = next(iter(resolve_group(group, {}, self.sizes, self.map).names.values()))
            path = rename_path(self.plain[group.first].path, ("model",), new, ())
            self.values[joined(path)] = Value(path, self.plain[group.first].data)
        left: dict[str, list[str]] = {}
        for n in [*unmatched, *others]:
            row = find_ignore_statement(self.map, n)
            assert row is not None  # `_choose_sides` has refused the others
            if row.zero and n in self.weights and any(self._read_small([self.weights[n]])[f"model.{n}"]):
                raise Unsupported(
                    f'"{n}" is not 0, and {self.map.sides[1]} has nothing to put it in: {row.why}.', code="CKPT0310"
                )
            left.setdefault(row.why, []).append(n)
        self.notes += [f'{len(rows)} entries were left out, first "{rows[0]}": {why}' for why, rows in left.items()]

    def _add_zero_tensors(self) -> None:
        """Add the tensors of zeros that the left side has and the right side lacks, as the map says.

        Raises:
            Unsupported: the shape of one cannot be inferred, or its name exists already.
        """
        if self.ways["model"] is not False:
            return
        made: dict[str, TensorEntry] = {}
        for row in self.map.ignored:
            if row.along is None or row.dtype is None:
                continue
            before = len(made)
            for t in list(self.tensors.values()):
                m = row.along.match(t.local_name) if t.component == "model" else None
                if m is None:
                    continue
                assert row.tensor.axes is not None and row.along.axes is not None
                sizes = {a: n for a, n in self.sizes.items() if a in row.along.axes.atoms}
                try:
                    row.along.axes.solve(t.shape, sizes)
                    shape = row.tensor.axes.shape(sizes)
                except (AxesError, UnknownSize) as e:
                    why = (
                        e if isinstance(e, AxesError) else f"the size of {e} does not follow; add a line size {e} = ..."
                    )
                    raise Unsupported(
                        f'"{t.local_name}" is {list(t.shape)}, and the map {self.map.name} says {row.along}: {why}.',
                        code="CKPT0310",
                    ) from None
                path = ("model", row.tensor.named(m))
                chunks = Chunks(len(shape))
                chunks.add((0,) * len(shape), shape, len(self.ckpt.files), 0, prod(shape) * ITEMSIZE[row.dtype])
                if joined(path) in self.tensors or joined(path) in made:
                    raise Unsupported(
                        f'the map {self.map.name} makes two tensors of the name "{joined(path)}".', code="CKPT0310"
                    )
                made[joined(path)] = TensorEntry(row.dtype, shape, path, chunks)
            if new := list(made)[before:]:
                self.notes.append(f'{len(new)} tensors of zeros were added, first "{new[0]}": {row.why}')
        if made:
            self.tensors |= made
            self._add_file(ZEROS, ENDLESS)

    def _map_masters(self) -> None:
        """Map the fp32 master weights under extra.master, where Megatron-Core's reader puts them.

        Raises:
            Unsupported: the map does not fit a shape.
        """
        copies = {joined(t.path[2:]): t for t in self.ckpt.tensors.values() if t.path[:2] == _MASTER}
        way = self.ways["model"]
        if way is None or not copies:
            return
        groups, unmatched = group_names(copies, self.map, "model", way)
        for name in unmatched:
            self.tensors[joined((*_MASTER, name))] = copies[name]
        for group in groups:
            entries = {key: copies[n] for key, n in group.names.items()}
            result = resolve_group(group, {key: t.shape for key, t in entries.items()}, self.sizes, self.map)
            self._add_views(result, entries, _MASTER)

    def _copy_component(self, component: str) -> None:
        """Copy a component of the source to the result unchanged."""
        self.tensors |= {n: t for n, t in self.ckpt.tensors.items() if t.component == component}
        self.values |= {n: v for n, v in self.ckpt.values.items() if v.component == component}
        self.recorded |= {n: d for n, d in self.ckpt.recorded.items() if n.partition(".")[0] == component}

    def _describe_padding(self, result: ResolvedGroup, fqn: str) -> None:
        """Add a note on the padding rows that are cut from a weight: whether something was learned in them.

        Args:
            result: the group that the weight was mapped in.
            fqn: the weight's name in the source.
        """
        whole = result.group.line.whole.axes
        assert whole is not None
        terms = whole.sums[0]
        tail = link_part(whole.term(len(terms) - 1), whole, len(terms) - 1, {}, result.sizes)
        kept, rows = sum(tail.start), result.sizes[PAD]

        def padding_of(t: TensorEntry) -> TensorEntry:
            """Return the rows of padding of a tensor that is shaped as the weight, as a tensor."""
            chunks = Chunks(len(tail.part_shape))
            place_chunks(tail, t, chunks, to_whole=False)
            return TensorEntry(t.dtype, tail.part_shape, t.path, chunks)

        weight = self.weights[fqn]
        unlike, _ = find_unequal_rows(self.ckpt, self.source, padding_of(weight))
        moments = [
            t
            for t in self.ckpt.tensors.values()
            if t.path[:3] == ("optim", "state", fqn)
            and t.shape == weight.shape
            and str(t.path[-1]).startswith("exp_avg")
        ]
        moved = {row for t in moments for row in find_unequal_rows(self.ckpt, self.source, padding_of(t))[1]}
        if not unlike:
            what = "all equal, so nothing was learned in them"
        elif moments and not moved:
            what = "with moments of 0, so nothing was learned in them"
        elif moments:
            what = f"of which {len(moved):,} have moments that are not 0: what was learned in them is not carried"
        else:
            what = "which differ from each other; without an optimizer nothing tells whether they were trained"
        self.notes.append(f'"{fqn}": {rows:,} rows behind the {kept:,} of the vocabulary were cut, {what}')

    def _map_optimizer(self) -> None:
        """Map the state of parameters, slot by slot.

        Raises:
            Unsupported: of the parameters that the map joins, some have state or a slot and others do not, or a slot
                cannot be mapped.
        """
        slots: dict[str, dict[Path, TensorEntry | Value]] = {}
        leaves: list[TensorEntry | Value] = [*self.ckpt.tensors.values(), *self.ckpt.values.values()]
        for leaf in leaves:
            if leaf.slot is not None:
                slots.setdefault(leaf.parameter, {})[leaf.path[3:]] = leaf
        if self.ways["optim"] is None:
            self._copy_component("optim")
            return
        for group in self.state:
            have = {key: slots[n] for key, n in group.names.items() if n in slots}
            if not have:
                continue
            if len(have) < len(group.names):
                none = next(n for n in group.names.values() if n not in slots)
                raise Unsupported(
                    f'the optimizer has state for "{group.first}" and none for "{none}", which the map joins to one '
                    "parameter.",
                    code="CKPT0310",
                )
            result = resolve_group(group, self._find_weight_shapes(group, have), self.sizes, self.map)
            self.renamed[group.first] = tuple(result.names.values())
            for tail in dict.fromkeys(p for found in have.values() for p in found):
                of_tail = {key: found.get(tail) for key, found in have.items()}
                if lost := [key for key, leaf in of_tail.items() if leaf is None]:
                    raise Unsupported(
                        f'"{group.names[lost[0]]}" has no {joined(tail)}, and the parameters that the map joins it '
                        "with have.",
                        code="CKPT0310",
                    )
                self._map_slot(result, tail, {key: leaf for key, leaf in of_tail.items() if leaf is not None})

    def _find_weight_shapes(
        self, group: TensorGroup, have: Mapping[Key, Mapping[Path, TensorEntry | Value]]
    ) -> dict[Key, tuple[int, ...]]:
        """Return {part of a group: shape of its weight}; where there is no weight, the shape of its largest slot.

        Args:
            have: {part: {path within the parameter's state: slot}}.
        """
        out = {}
        for key, name in group.names.items():
            if name in self.weights:
                out[key] = self.weights[name].shape
            else:
                found = [leaf.shape for leaf in have[key].values() if isinstance(leaf, TensorEntry)]
                out[key] = max(found, key=lambda s: (len(s), s), default=())
        return out

    def _map_slot(self, result: ResolvedGroup, tail: Path, leaves: Mapping[Key, TensorEntry | Value]) -> None:
        """Map one slot of a group: like the weight, or copied to all parts if it is a single number.

        Args:
            tail: the path of the slot within the state of its parameter.
            leaves: {part of the group: its slot}.

        Raises:
            Unsupported: its shape is not that of the weight and the map does more than rename, or the parts have
                different numbers.
        """
        tensors = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, TensorEntry)}
        head: Path = ("optim", "state")
        if len(tensors) == len(leaves):
            whole = result.renames or all(t.shape == result.source_shape(key) for key, t in tensors.items())
            if whole:
                self._add_views(result, tensors, head, tail)
                return
            if odd := [t for t in tensors.values() if t.numel != 1]:
                raise Unsupported(
                    f'"{joined(odd[0].path)}" is {list(odd[0].shape)}, and its parameter is not: the map '
                    f"{self.map.name} cuts, joins or permutes that parameter, and what becomes of this slot is not "
                    f"known. Leave the optimizer out with {argument('only', ['model'])}.",
                    code="CKPT0310",
                )
            self._check_equal(self._read_small(tensors.values()))
            first: TensorEntry | Value = next(iter(tensors.values()))
        elif tensors:
            raise Unsupported(
                f'"{joined(tail)}" is a tensor of one and a value of another parameter that the map joins.',
                code="CKPT0310",
            )
        else:
            self._check_equal({joined(leaf.path): leaf.data for leaf in leaves.values() if isinstance(leaf, Value)})
            first = next(iter(leaves.values()))
        for name in result.names.values():
            path = (*head, name, *tail)
            if isinstance(first, Value):
                self.values[joined(path)] = Value(path, first.data)
            else:
                self.tensors[joined(path)] = replace(first, path=path)

    def _read_small(self, tensors: Iterable[TensorEntry]) -> dict[str, bytes]:
        """Read small tensors of the source completely, and return {canonical name: row-major bytes}.

        Raises:
            Corrupt: bytes do not have the CRC32 that the source says.
        """
        return read_small_tensors(self.ckpt, self.source, [joined(t.path) for t in tensors])

    def _check_equal(self, found: Mapping[str, object]) -> None:
        """Check that values which the map joins to one are equal.

        Args:
            found: {name of a value or slot: its data}.

        Raises:
            Unsupported: two differ.
        """
        first = next(iter(found))
        for name, data in found.items():
            if data != found[first]:
                raise Unsupported(
                    f'"{first}" and "{name}" differ, and the map joins their parameters to one, which has one of them.',
                    code="CKPT0310",
                )

    def _is_name_list(self, v: Value) -> bool:
        """Tell whether a value is a param group's list of parameters, and the optimizer state has names to map."""
        in_group = v.is_param_group and v.path[3:] in _NAME_LISTS
        return bool(self.state) and in_group and isinstance(v.data, list)

    def _check_groups_stay_joined(self) -> None:
        """Check that the map does not join parameters of different param groups.

        Raises:
            Unsupported: two parameters of different groups are joined.
        """
        together = {n: group for group in self.state for n in group.names.values()}
        for v in self.ckpt.values.values():
            if not self._is_name_list(v):
                continue
            here = set(map(str, v.data))
            for n in v.data:
                if isinstance(n, str) and (apart := [o for o in together[n].names.values() if o not in here]):
                    raise Unsupported(
                        f'"{n}" and "{apart[0]}" are in different param groups, and the map joins them to one '
                        "parameter.",
                        code="CKPT0310",
                    )

    def _map_name_lists(self) -> None:
        """Copy the values to the result, with new names in those that list names: the param groups and DeepSpeed's
        buffer_names."""
        new_names: dict[str, tuple[str, ...]] = {}  # {name: what stands at its place}
        for group in self.state:
            names = self.renamed.get(group.first) or self._map_stateless_names(group)
            for k, n in enumerate(group.names.values()):
                new_names[n] = names if k == 0 else ()
        for name, v in self.ckpt.values.items():
            if v.component == "model" or v.slot is not None:
                continue
            if self._is_name_list(v):
                done: list[object] = []
                for n in v.data:
                    done += new_names[n] if isinstance(n, str) else [n]
                v = Value(v.path, done)
            elif v.path == ("extra", "buffer_names") and isinstance(v.data, list):  # DeepSpeed's
                v = Value(v.path, [m for n in v.data for m in self.of_weight.get(n, [n])])
            self.values[name] = v

    def _map_stateless_names(self, group: TensorGroup) -> tuple[str, ...]:
        """Return the new names of a group of parameters without optimizer state.

        Raises:
            Unsupported: it is a stacked parameter, and no weight tells how many parts it has.
        """
        shapes = {key: self.weights[n].shape for key, n in group.names.items() if n in self.weights}
        if group.from_whole and group.line.stacked and not shapes:
            raise Unsupported(
                f'how many parts "{group.first}" has is not known: the checkpoint has no weight of that name.',
                code="CKPT0310",
            )
        if group.from_whole and group.line.stacked:
            return tuple(resolve_group(group, shapes, self.sizes, self.map).names.values())
        return tuple(t.named(group.numbers) for t in (group.line.parts if group.from_whole else (group.line.whole,)))

    def _copy_other_tensors(self) -> None:
        """Copy the tensors that are neither weights nor state of a parameter to the result, under their names."""
        kept = []
        for name, t in self.ckpt.tensors.items():
            mapped_master = t.path[:2] == _MASTER and self.ways["model"] is not None
            if t.component != "model" and not mapped_master and t.slot is None:
                self.tensors[name] = t
                if name in self.ckpt.recorded:
                    self.recorded[name] = self.ckpt.recorded[name]
                if t.component == "extra":
                    kept.append(name)
        if kept:
            self.notes.append(f'{len(kept)} tensors besides weights and optimizer keep their names, first "{kept[0]}"')
