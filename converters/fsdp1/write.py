"""What fsdp1 writes: local_rank{r}.pt, local_optim_rank{r}.pt, extra_rank0.pt, and flat_layout.json last.

The first two are what `model.state_dict()` under LOCAL_STATE_DICT and `optimizer.state_dict()` give on rank r of a job
with as many ranks and the same wrapped modules, so that they load there:

    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(torch.load(f"local_rank{r}.pt", weights_only=False), strict=not use_orig_params)
    optimizer.load_state_dict(torch.load(f"local_optim_rank{r}.pt"))

With use_orig_params=True FSDP1 does not know its own key "_flat_param" again, hence `strict`. One rank does not shard,
so its files hold whole tensors. extra_rank0.pt has everything else, under canonical names. Pads between parameters are
zeros; FSDP1 fills them with 42 and looks at neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ckpttool import bounded_json
from ckpttool.engine.conservation import list_changed_values
from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import Flat, FlatLayout, FlatPart
from ckpttool.engine.flat.placed_masters import with_masters_as_weights
from ckpttool.engine.flat.split_state import (
    TRAINED_ALONE,
    ParamGroup,
    Training,
    list_group_values,
    split_training_state,
    tensors_of,
)
from ckpttool.errors import UsageError, argument
from ckpttool.formats.sharded import ShardTable, make_sharded_tensor
from ckpttool.formats.stored_tensors import Inline, split_components
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Leaves, Path, TensorEntry, joined
from ckpttool.index.draft import Draft
from ckpttool.index.optimizers import describe_wide_slots
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from .plan import FlatPlan, plan_flat_parameters

__all__ = ["prepare", "write"]


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the state with its fp32 masters, the copies of the weights that the optimizer updates, as the weights,
    where the source has both.

    Raises:
        Unsupported: a master does not round to its weight.
    """
    return with_masters_as_weights(split_components(ckpt), source)


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Plan files that a job of `options.world_size` ranks, by default as many as the source had, loads with
    LOCAL_STATE_DICT and `optimizer.load_state_dict`.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: FSDP1's flat parameters cannot hold the state.
    """
    state = split_training_state(ckpt, source)
    world = options.world_size or ckpt.world_size
    if world is None or world < 1:
        raise UsageError(f"{argument('world_size')} is needed: every rank has a file of its own.", code="CKPT0209")
    plan = plan_flat_parameters(ckpt, state, options, world)
    out = _DraftFiles(ckpt, options, plan.layout, TorchFiles(), ShardTable(world), {}, {}, {})
    rest = {t.path: t for t in ckpt.tensors.values() if t.path[0] not in ("model", "optim")}
    values = {v.path: v.data for v in ckpt.values.values() if v.path[0] not in ("model", "optim")}
    if rest or values:
        _write_rest(out, rest, values)
    _write_model(out, state)
    if plan.groups is not None:
        _write_optimizer(out, state, plan)
    out.files.literal(flat_layout.RECORD, bounded_json.encode(flat_layout.to_json(plan.layout), indent=1) + b"\n")
    gone = {d.name for d in state.dropped}
    # a reader finds parameters in the place of flat parameters
    trained = [
        ParamGroup(tuple(flat_layout.list_trained_parameters(plan.layout, names)), hyper)
        for names, hyper in plan.groups or ()
    ]
    after = {n: v for n, v in list_group_values(trained).items() if n not in state.inlined}
    before = {n: v for n, v in ckpt.values.items() if v.path[:2] == ("optim", "param_groups")}
    kept = {n: v for n, v in ckpt.values.items() if n not in before and n not in gone} | after | state.inlined
    draft = out.files.draft(
        Checkpoint("fsdp1", options.target, world, [], [], out.tensors, kept),
        out.sources,
        dropped=state.dropped,
        aliases=out.same,
        synthesized_values={} if before else {n: v.data for n, v in after.items()},
        changed=list_changed_values(before, after, TRAINED_ALONE) if before else {},
        notes=[n for n in (*state.notes, *plan.notes) if plan.groups is not None or "param group" not in n],
    )
    draft.notes += describe_wide_slots(draft.checkpoint)
    return draft


@dataclass
class _DraftFiles:
    """A draft while its files are laid out."""

    ckpt: Checkpoint
    options: WriteOptions
    layout: FlatLayout
    files: TorchFiles
    table: ShardTable
    tensors: dict[str, TensorEntry]
    sources: dict[str, TensorEntry]
    same: dict[str, str]

    def dtype(self, name: str) -> str:
        """Return the dtype in which the tensor of the source with this name is written."""
        return self.options.cast(name, self.ckpt.tensors[name].dtype)

    def add_tensor(self, name: str, of: str, chunks: Chunks) -> None:
        """Add a tensor of the draft.

        Args:
            name: its name in the draft.
            of: the name of the tensor of the source that fills it.
            chunks: where its parts lie in the draft's files.
        """
        t = self.ckpt.tensors[of]
        path = t.path if name == of else (name.partition(".")[0], name.partition(".")[2])
        self.tensors[name] = TensorEntry(self.dtype(of), t.shape, path, chunks)
        self.sources[name] = t

    def slices(self, flat: Flat) -> list[tuple[int, int]]:
        """Return, for each rank, (first element, end) of its slice of a flat parameter."""
        return [flat_layout.find_rank_slice(flat.numel, self.layout.shards, r) for r in range(self.layout.shards)]


def _write_rest(out: _DraftFiles, tensors: dict[Path, TensorEntry], values: Leaves) -> None:
    """Add extra_rank0.pt to the draft: everything that is neither model nor optimizer, under canonical names.

    Args:
        out: the draft.
        tensors: {path: tensor} to write.
        values: {path: value} to write.
    """
    leaves: Leaves = dict(values)
    sizes: dict[str, int] = {}
    for k, (path, t) in enumerate(tensors.items()):
        dtype = out.dtype(joined(path))
        leaves[path] = TensorRef(dtype, t.shape, str(k), t.numel)
        sizes[str(k)] = t.numel * ITEMSIZE[dtype]
    file = out.files.add("extra_rank0.pt", nest(leaves), sizes)
    for k, (path, t) in enumerate(tensors.items()):
        where = out.files.offset(file, str(k))
        out.add_tensor(joined(path), joined(path), Chunks.whole(t.shape, file, where, sizes[str(k)]))


def _write_model(out: _DraftFiles, state: Training) -> None:
    """Add a file with `model.state_dict()` of every rank, local_rank<r>.pt, to the draft."""
    layout, world = out.layout, out.layout.shards
    flattened = {n for f in layout.flats for n in (*(p.name for p in f.parts), *(a for a, _ in f.shared))}
    # tensors that every rank has whole: buffers, and those inside extra states of modules
    whole = {n: t for n, t in state.tensors.items() if n not in flattened}
    first_replica = {**whole, **{joined(t.path[1:]): t for t in tensors_of(state.extra_states)}}
    buffers = list(first_replica)
    numbers: list[int] = []
    places: list[list[int]] = []  # by flat parameter, where each rank's slice begins in its file
    cut = [out.slices(f) for f in layout.flats]
    for r in range(world):
        tree: dict[str, object] = {}
        sizes: dict[str, int] = {}
        views: dict[str, object] = {}
        for flat, bounds in zip(layout.flats, cut, strict=True):
            a, b = bounds[r]
            dtype = flat.dtype or "float32"
            key = str(len(sizes))
            if world == 1:  # one rank does not shard: the model's own tensors
                for p in flat.parts:
                    key = str(len(sizes))
                    views[p.name] = TensorRef(dtype, p.shape, key, p.numel)
                    sizes[key] = p.numel * ITEMSIZE[dtype]
            else:
                if a < b:
                    sizes[key] = (b - a) * ITEMSIZE[dtype]
                for p in flat.parts:
                    x, y = max(a, p.first), min(b, p.first + p.numel)
                    part = TensorRef(dtype, (y - x,), key, b - a, x - a) if x < y else Inline(dtype, (0,), b"")
                    views[p.name] = part
                own = TensorRef(dtype, (b - a,), key, b - a) if a < b else None
                tree[flat.key] = make_sharded_tensor(out.table, flat.key, tuple(bounds), r, own, dtype)
            views.update((alias, views[owner]) for alias, owner in flat.shared)
        for n in buffers:
            key, t, dtype = str(len(sizes)), first_replica[n], out.dtype(f"model.{n}")
            views[n] = TensorRef(dtype, t.shape, key, t.numel)
            sizes[key] = t.numel * ITEMSIZE[dtype]
        listed = state.tensors if layout.use_orig_params or world == 1 else whole
        tree = {**{n: views[n] for n in layout.names or listed if n in listed and n in views}, **tree}
        tree |= {n: _replace_tensors_by_views(x, views) for n, x in state.extra_states.items()}
        numbers.append(out.files.add(f"local_rank{r}.pt", tree, sizes))
        places.append([out.files.offset(numbers[r], k) for k in sizes])
    _place_model_chunks(out, buffers, numbers, places, cut)


def _replace_tensors_by_views(tree: object, views: dict[str, object]) -> object:
    """Return a copy of a nested value in which every tensor entry is replaced by the reference to pickle for it.

    Args:
        tree: a dict, list or leaf, with entries of the model's tensors in it.
        views: {name of a tensor in the model: the reference}.
    """
    if isinstance(tree, TensorEntry):
        return views[joined(tree.path[1:])]
    if isinstance(tree, dict):
        return {k: _replace_tensors_by_views(x, views) for k, x in tree.items()}
    return [_replace_tensors_by_views(x, views) for x in tree] if isinstance(tree, list) else tree


def _place_model_chunks(
    out: _DraftFiles, buffers: list[str], numbers: list[int], places: list[list[int]], cut: list[list[tuple[int, int]]]
) -> None:
    """Record where each tensor of the model lies in the ranks' files, in the order of the storages in these.

    Args:
        out: the draft.
        buffers: the names of the tensors that every rank has completely.
        numbers: the number of each rank's file.
        places: for each rank, the byte of its file at which each storage begins.
        cut: for each flat parameter, (first element, end) of each rank's slice.
    """
    world = out.layout.shards
    at = [iter(p) for p in places]
    for flat, bounds in zip(out.layout.flats, cut, strict=True):
        item = ITEMSIZE[flat.dtype or "float32"]
        starts = [next(at[r]) if world > 1 and a < b else 0 for r, (a, b) in enumerate(bounds)]
        for p in flat.parts:
            if world == 1:
                chunks = Chunks.whole(p.shape, numbers[0], next(at[0]), p.numel * item)
            else:
                chunks = _build_part_chunks(p, bounds, numbers, starts, item)
            out.add_tensor(f"model.{p.name}", f"model.{p.name}", chunks)
        for alias, owner in flat.shared:
            out.add_tensor(f"model.{alias}", f"model.{alias}", out.tensors[f"model.{owner}"].chunks)
            out.same[f"model.{alias}"] = f"model.{owner}"
    for n in buffers:
        name = f"model.{n}"
        nbytes = out.ckpt.tensors[name].numel * ITEMSIZE[out.dtype(name)]
        for r in range(world):
            chunks = Chunks.whole(out.ckpt.tensors[name].shape, numbers[r], next(at[r]), nbytes)
            out.add_tensor(name if r == 0 else f"replica.{r}.{n}", name, chunks)


def _build_part_chunks(
    p: FlatPart, bounds: list[tuple[int, int]], numbers: list[int], starts: list[int], item: int
) -> Chunks:
    """Return the chunks of a parameter that lies in the ranks' slices of a flat parameter.

    Args:
        p: the parameter, as a part of the flat parameter.
        bounds: for each rank, (first element, end) of its slice of the flat parameter.
        numbers: the number of each rank's file.
        starts: the byte of each rank's file at which its slice begins.
        item: the size of an element in bytes.
    """
    chunks = Chunks(len(p.shape))
    for r, (a, b) in enumerate(bounds):
        for start, size, _, at in flat_layout.cut_part_into_boxes(p, a, b):
            chunks.add(start, size, numbers[r], starts[r] + (at - a) * item, prod(size) * item)
    if not p.numel:  # no bytes, but a place: files are written front to back
        held = [r for r, (a, b) in enumerate(bounds) if a < b]
        r = next((r for r in held if bounds[r][0] <= p.first < bounds[r][1]), held[-1] if held else 0)
        a, b = bounds[r]
        chunks.add((0,) * len(p.shape), p.shape, numbers[r], starts[r] + max(0, min(p.first, b) - a) * item, 0)
    return chunks


class _Stored(NamedTuple):
    """What the optimizer lists under one number: the flat parameter, the parts of it, and elements by rank."""

    flat: Flat
    parts: list[FlatPart]
    bounds: list[tuple[int, int]]
    numels: list[int]


def _write_optimizer(out: _DraftFiles, state: Training, plan: FlatPlan) -> None:
    """Add a file with `optimizer.state_dict()` of every rank, local_optim_rank<r>.pt, to the draft."""
    layout, world = out.layout, out.layout.shards
    copies = dict(layout.copies)
    by_key = {f.key: f for f in layout.flats}
    by_name = {p.name: (f, p) for f in layout.flats for p in f.parts}
    listed = [name for names, _ in plan.groups or [] for name in names]
    stored: list[_Stored] = []
    for name in listed:
        if layout.use_orig_params:
            flat, part = by_name[name]
            cut = [(max(a, part.first), min(b, part.first + part.numel)) for a, b in out.slices(flat)]
            stored.append(_Stored(flat, [part], cut, [max(0, b - a) for a, b in cut]))
        else:
            flat = by_key[name]
            step = -(-flat.numel // world)
            stored.append(_Stored(flat, list(flat.parts), out.slices(flat), [step] * world))
    numbers: list[int] = []
    places: list[dict[tuple[int, str], int]] = []
    for r in range(world):
        tree: dict[int, dict[str, object]] = {}
        sizes: dict[str, int] = {}
        keys: dict[tuple[int, str], str] = {}
        for i, x in enumerate(stored):
            owner = copies.get(x.parts[0].name, x.parts[0].name)
            slots: dict[str, object] = {}
            if x.numels[r] or not layout.use_orig_params or world == 1:
                slots.update(state.scalars.get(owner, {}))
                for slot in state.slots.get(owner, {}):
                    dtype = out.dtype(f"optim.state.{owner}.{slot}")
                    keys[i, slot] = str(len(sizes))
                    shape = x.parts[0].shape if layout.use_orig_params and world == 1 else (x.numels[r],)
                    slots[slot] = TensorRef(dtype, shape, keys[i, slot], x.numels[r])
                    sizes[keys[i, slot]] = x.numels[r] * ITEMSIZE[dtype]
            if slots:
                tree[i] = slots
        groups, first = [], 0
        for names, hyper in plan.groups or []:
            groups.append({**hyper, "params": list(range(first, first + len(names)))})
            first += len(names)
        numbers.append(out.files.add(f"local_optim_rank{r}.pt", {"state": tree, "param_groups": groups}, sizes))
        places.append({k: out.files.offset(numbers[r], key) for k, key in keys.items()})
    for i, x in enumerate(stored):
        sources = state.slots.get(copies.get(x.parts[0].name, x.parts[0].name), {})
        for slot in sources:
            for p in x.parts:
                owner = copies.get(p.name, p.name)
                of = f"optim.state.{owner}.{slot}"
                item = ITEMSIZE[out.dtype(of)]
                starts = [places[r].get((i, slot), 0) for r in range(world)]
                chunks = _build_part_chunks(p, x.bounds, numbers, starts, item)
                out.add_tensor(of if owner == p.name else f"replica.{p.name}.{slot}", of, chunks)
