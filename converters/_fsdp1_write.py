"""What fsdp1 writes: local_rank{r}.pt, local_optim_rank{r}.pt, extra_rank0.pt, and flat_layout.json last.

The first two are what `model.state_dict()` under LOCAL_STATE_DICT and `optimizer.state_dict()` give on rank r of a job
with as many ranks and the same wrapped modules, so that they load there:

    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(torch.load(f"local_rank{r}.pt", weights_only=False), strict=not use_orig_params)
    optimizer.load_state_dict(torch.load(f"local_optim_rank{r}.pt"))

With use_orig_params=True FSDP1 does not know its own key "_flat_param" again, hence `strict`. One rank does not shard, so
its files hold whole tensors. extra_rank0.pt has everything else, under canonical names. Pads between parameters are
zeros; FSDP1 fills them with 42 and looks at neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.engine import flat_layout
from ckpttool.engine.flat_layout import Flat, FlatLayout, Part
from ckpttool.engine.training import Training, taken_apart
from ckpttool.errors import Unsupported, UsageError
from ckpttool.formats.sharded import Table, sharded_tensor
from ckpttool.formats.stored_tensors import Inline
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.huggingface import model_names
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Path, TensorEntry, floating_dtype, joined
from ckpttool.index.draft import Draft
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions, option
from ckpttool.storage.source import Source

__all__ = ["write"]


@dataclass(frozen=True)
class Fsdp1Options:
    """How FSDP1 is called in the job that will load the files."""

    use_orig_params: bool = option(False, "For a job that calls FSDP(use_orig_params=True).")
    precision: str | None = option(None, "Precision of the job that will load it: bf16, fp16 or fp32.")


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Files that a job of `world_size` ranks loads with LOCAL_STATE_DICT and `optimizer.load_state_dict`.

    Raises:
        UsageError: no world size. Unsupported: FSDP1 cannot hold the state in such flat parameters.
    """
    state = taken_apart(ckpt, source)
    world = options.world_size or ckpt.world_size
    if world is None or world < 1:
        raise UsageError("--world-size is needed: every rank has a file of its own.")
    plan = _planned(ckpt, state, options, world)
    out = _Writing(ckpt, options, plan.layout, TorchFiles(), Table(world), {}, {}, {})
    rest = {t.path: t for t in ckpt.tensors.values() if t.path[0] not in ("model", "optim")}
    values = {v.path: v.data for v in ckpt.values.values() if v.path[0] not in ("model", "optim")}
    if rest or values:
        _write_rest(out, rest, values)
    _write_model(out, state)
    if plan.groups is not None:
        _write_optimizer(out, state, plan)
    record = json.dumps(flat_layout.as_json(plan.layout), indent=1, ensure_ascii=False) + "\n"
    out.files.literal(flat_layout.RECORD, record.encode())
    gone = {d.name for d in state.dropped}
    kept = {n: v for n, v in ckpt.values.items() if n not in gone}
    draft = out.files.draft(
        Checkpoint("fsdp1", options.target, world, [], [], out.tensors, kept), out.sources,
        state.dropped, out.same, [n for n in (*state.notes, *plan.notes) if plan.groups is not None or "param group" not in n],
    )  # fmt: skip
    return draft


@dataclass
class _Writing:
    """A draft while its files are laid out."""

    ckpt: Checkpoint
    options: WriteOptions
    layout: FlatLayout
    files: TorchFiles
    table: Table
    tensors: dict[str, TensorEntry]
    sources: dict[str, TensorEntry]
    same: dict[str, str]

    def dtype(self, name: str) -> str:
        """What a tensor of the source is written as."""
        return self.options.cast(name, self.ckpt.tensors[name].dtype)

    def put(self, name: str, of: str, chunks: Chunks) -> None:
        """A tensor of the draft, filled from one of the source."""
        t = self.ckpt.tensors[of]
        path = t.path if name == of else (name.partition(".")[0], name.partition(".")[2])
        self.tensors[name] = TensorEntry(self.dtype(of), t.shape, path, chunks)
        self.sources[name] = t

    def slices(self, flat: Flat) -> list[tuple[int, int]]:
        """What each rank has of a flat parameter."""
        return [flat_layout.slice_of(flat.numel, self.layout.shards, r) for r in range(self.layout.shards)]


@dataclass
class _Plan:
    """`groups` are (what the optimizer lists, hyperparameters); None where there is no optimizer."""

    layout: FlatLayout
    groups: list[tuple[list[str], dict[str, Any]]] | None
    notes: list[str] = field(default_factory=list)


def _planned(ckpt: Checkpoint, state: Training, options: WriteOptions, world: int) -> _Plan:
    """Which flat parameters there will be, and what the optimizer lists."""
    notes: list[str] = []
    own = options.of(Fsdp1Options)
    groups = _listed_by_group(ckpt, state)
    group_of = {n: i for i, (names, _) in enumerate(groups) for n in names}
    params = {*group_of, *state.frozen, *state.tied, *(n for g in state.groups for n in g.params)}
    given = flat_layout.read_file(options.flat_layout) if options.flat_layout is not None else None
    if given is not None:
        flats = _flats_given(given, state, params, options, world)
        names = given.names or tuple(state.tensors)
        why = _mixed(flats, state, group_of)
        if not given.use_orig_params and (why or own.use_orig_params):
            raise Unsupported(
                f"--flat-layout {options.flat_layout} is of a job with use_orig_params=False; "
                + (why or "--use-orig-params contradicts it.")
            )
        uop = given.use_orig_params
    else:
        names = _model_order(ckpt, state, options)
        ordered = [n for n in names if n in params]
        modules = _wrapped(ckpt, ordered, options, notes)
        if ignored := _ignored(ordered, modules, state, options):
            ordered = [n for n in ordered if n not in ignored]
            notes.append(
                f"{len(ignored)} frozen parameters have another dtype than the trained ones of their module, which FSDP1 does "
                f"not flatten together; they are whole in every file, for FSDP(ignored_states=...): {', '.join(sorted(ignored)[:4])}"
                + (", ..." if len(ignored) > 4 else "")
            )
        flats = _flats(ordered, modules, state, options, 0, world, notes)
        why = _mixed(flats, state, group_of)
        uop = own.use_orig_params or why is not None
        if uop:
            precision = None if own.precision is None else floating_dtype(own.precision)
            flats = _flats(
                ordered, modules, state, options, 16 // ITEMSIZE[precision] if precision else None, world, []
            )
        if why and not own.use_orig_params:
            notes.append(f"written for FSDP1(use_orig_params=True): {why}")
        elif not uop:
            notes.append("written for FSDP1(use_orig_params=False), its default; --use-orig-params for the other")
    in_flats = {p.name for f in flats for p in f.parts}
    copies = tuple((a, b) for a, b in state.tied.items() if a in in_flats)
    for a, b in copies:
        notes.append(
            f'"{a}" and "{b}" are tied and lie in two wrapped modules, where FSDP1 makes two parameters of them'
        )
    listed: list[tuple[list[str], dict[str, Any]]] | None = None
    if any(path[0] == "optim" for path in (x.path for c in (ckpt.tensors, ckpt.values) for x in c.values())):
        listed = []
        for i, (_, hyper) in enumerate(groups):
            inside = [n for n in names if n in in_flats and group_of.get(dict(copies).get(n, n)) == i]
            if not uop:
                inside = [f.key for f in flats if any(p.name in set(inside) for p in f.parts)]
            listed.append((inside, hyper))
        if given is not None and given.optimizer is not None:
            listed = _as_given(given.optimizer, listed, notes)
    said = None if listed is None else tuple(tuple(g) for g, _ in listed)
    return _Plan(FlatLayout(uop, world, tuple(flats), tuple(names), said, copies), listed, notes)


def _listed_by_group(ckpt: Checkpoint, state: Training) -> list[tuple[list[str], dict[str, Any]]]:
    """(FQNs that the source lists, hyperparameters) of every param group, those without state too; owners of tied ones."""
    out = []
    for i, g in enumerate(state.groups):
        value = ckpt.values.get(f"optim.param_groups.{i}.params")
        names = list(value.data) if value is not None else list(g.params)
        out.append((list(dict.fromkeys(state.tied.get(n, n) for n in names if n in state.tensors)), g.options))
    return out


def _as_given(
    given: tuple[tuple[str, ...], ...], made: list[tuple[list[str], dict[str, Any]]], notes: list[str]
) -> list[tuple[list[str], dict[str, Any]]]:
    """The order of the job's own optimizer, where it lists the same."""
    if [set(g) for g in given] == [set(g) for g, _ in made]:
        return [(list(g), hyper) for g, (_, hyper) in zip(given, made, strict=True)]
    notes.append(
        "the optimizer of the flat layout lists other parameters than the source's; the order is that of the model"
    )
    return made


def _model_order(ckpt: Checkpoint, state: Training, options: WriteOptions) -> tuple[str, ...]:
    """All names of the model in the order in which FSDP1 meets them.

    Raises:
        Unsupported: no source of names keeps that order.
    """
    own = list(state.tensors)
    told: list[str] | None = None
    if options.like is not None and options.like.shapes:
        told, where = list(options.like.shapes), "--like"
    elif options.config is not None or (own == sorted(own) and ckpt.config is not None):
        config = model_names.config_of(options.config) if options.config is not None else ckpt.config
        told, where = (list(model_names.names_of(config).shapes), "the config") if config else (None, "")
    if told is not None:
        flat_layout.refuse_alphabet(told, where)
        if missing := [n for n in own if n not in set(told)]:
            raise Unsupported(
                f'"{missing[0]}" and {len(missing) - 1} other tensors are not among the names of {where}. {flat_layout.OTHER}'
            )
        return tuple(n for n in told if n in state.tensors)
    flat_layout.refuse_alphabet(own, f"{ckpt.layout} sources")
    return tuple(own)


def _wrapped(ckpt: Checkpoint, names: list[str], options: WriteOptions, notes: list[str]) -> list[str]:
    """The modules that the job wraps."""
    paths = flat_layout.module_paths(names)
    if options.wrap is not None:
        found = flat_layout.matching(paths, options.wrap)
        if not found and options.wrap:
            notes.append(
                f"--wrap {','.join(options.wrap)} names no module, so only the root is wrapped; there are "
                f"{flat_layout.listed(paths[1:])}. * is one component of the path, ** any number"
            )
        return found
    patterns = flat_layout.blocks(names)
    if options.config is not None:
        config = model_names.config_of(options.config)
        inside = set(paths)
        if found := [b for b in model_names.names_of(config).blocks if b in inside]:
            notes.append(f"wrapped modules, by the config: {flat_layout.listed(found)}, and the root")
            return found
    found = flat_layout.matching(paths, patterns)
    if found:
        notes.append(
            f"wrapped modules, by the repeated blocks of the model: {', '.join(patterns)}, and the root; --wrap names others"
        )
    else:
        notes.append("only the root is wrapped, since no repeated blocks were found; --wrap names modules")
    return found


def _ignored(names: list[str], modules: list[str], state: Training, options: WriteOptions) -> set[str]:
    """Frozen parameters of another dtype than the trained ones beside them: what FSDP1 must be told to leave alone."""
    trained = {n for g in state.groups for n in g.params}
    out: set[str] = set()
    for members in flat_layout.assigned(names, modules).values():
        kinds = {n: options.cast(f"model.{n}", state.tensors[n].dtype) for n in members}
        floats = {kinds[n] for n in members if state.tied.get(n, n) in trained}
        if len(floats) == 1:
            out |= {n for n in members if kinds[n] not in floats and state.tied.get(n, n) not in trained}
    return out


def _flats(
    names: list[str],
    modules: list[str],
    state: Training,
    options: WriteOptions,
    align: int | None,
    world: int,
    notes: list[str],
) -> list[Flat]:
    """The flat parameters of a wrapping. `align` None is the alignment of the parameters' own dtype."""
    out = []
    for module, members in flat_layout.assigned(names, modules).items():
        owners = [n for n in members if state.tied.get(n) not in members]
        shared = [(n, state.tied[n]) for n in members if state.tied.get(n) in members]
        kinds = {options.cast(f"model.{n}", state.tensors[n].dtype): n for n in owners}
        if len(kinds) > 1:
            (a, one), (b, two) = list(kinds.items())[:2]
            raise Unsupported(
                f'"{one}" is {a} and "{two}" is {b}, and FSDP1 flattens parameters of one dtype only; both lie in module '
                f'"{module}". Wrap them apart with --wrap, or cast one with --cast.'
            )
        dtype = next(iter(kinds))
        if "float" not in dtype:
            raise Unsupported(f'"{owners[0]}" is {dtype}; FSDP1 flattens floating-point parameters only.')
        if world > 1 and not any(state.tensors[n].numel for n in owners):
            raise Unsupported(
                f'No parameter of module "{module}" has an element (first "{owners[0]}"), so that no rank has a shard of its '
                "flat parameter. Wrap it together with its parent with --wrap."
            )
        step = 16 // ITEMSIZE[dtype] if align is None else align
        sized = [(n, state.tensors[n].shape) for n in owners]
        out.append(flat_layout.lay_out(module, sized, step, world, dtype, shared))
    return out


def _flats_given(given: FlatLayout, state: Training, params: set[str], options: WriteOptions, world: int) -> list[Flat]:
    """Those of --flat-layout, after comparing them with the model; the pads at the end are for another world size.

    Raises:
        Unsupported: it is of another model.
    """
    where = f"--flat-layout {options.flat_layout}"
    out = []
    for flat in given.flats:
        for p in flat.parts:
            if p.strides is not None:
                raise Unsupported(
                    f'{where}: "{p.name}" is not contiguous in memory (strides {p.strides}); ckpttool reads such flat '
                    "parameters, it does not write them. Call .contiguous() on it before FSDP wraps the model."
                )
            t = state.tensors.get(p.name)
            if t is None or t.shape != p.shape:
                raise Unsupported(
                    f'{where} has "{p.name}" {p.shape}, the source has {t.shape if t else "no such tensor"}. {flat_layout.OTHER}'
                )
        end = max((p.first + p.numel for p in flat.parts), default=0)
        dtype = (
            options.cast(f"model.{flat.parts[0].name}", state.tensors[flat.parts[0].name].dtype) if flat.parts else None
        )
        out.append(flat._replace(numel=end + (-end % world if given.use_orig_params else 0), dtype=dtype))
    inside = {n for f in out for n in (*(p.name for p in f.parts), *(a for a, _ in f.shared))}
    if missing := sorted(params - inside):
        raise Unsupported(
            f'{where} lacks "{missing[0]}" and {len(missing) - 1} other parameters of the source. {flat_layout.OTHER}'
        )
    return out


def _mixed(flats: list[Flat], state: Training, group_of: Mapping[str, int]) -> str | None:
    """Why use_orig_params=False, one tensor for all of a module, cannot hold a state; None where it can."""
    for flat in flats:
        names = [state.tied.get(p.name, p.name) for p in flat.parts]
        first = names[0] if names else ""
        where = f'module "{flat.module}"' if flat.module else "the root module"
        for n in names[1:]:
            if group_of.get(n) != group_of.get(first):
                a, b = (
                    f"in param group {group_of[x]}" if x in group_of else "not in the optimizer" for x in (first, n)
                )
                return f'in {where} "{first}" is {a}, "{n}" {b}, and one flat parameter is in one group and trained as a whole'
            one, two = state.slots.get(first, {}), state.slots.get(n, {})
            if {k: t.dtype for k, t in one.items()} != {k: t.dtype for k, t in two.items()}:
                return f'in {where} "{first}" and "{n}" have not the same optimizer state ({_slot_names(one)}; {_slot_names(two)})'
            if state.scalars.get(first, {}) != state.scalars.get(n, {}):
                return f'in {where} "{first}" and "{n}" are at different steps, and one flat parameter has one'
    return None


def _slot_names(slots: Mapping[str, TensorEntry]) -> str:
    return ", ".join(f"{k} {t.dtype}" for k, t in slots.items()) or "none"


def _write_rest(out: _Writing, tensors: dict[Path, TensorEntry], values: dict[Path, Any]) -> None:
    """All that is neither model nor optimizer, in one file, under canonical names."""
    leaves: dict[Path, Any] = dict(values)
    sizes: dict[str, int] = {}
    for k, (path, t) in enumerate(tensors.items()):
        dtype = out.dtype(joined(path))
        leaves[path] = TensorRef(dtype, t.shape, str(k), t.numel)
        sizes[str(k)] = t.numel * ITEMSIZE[dtype]
    file = out.files.add("extra_rank0.pt", nest(leaves), sizes)
    for k, (path, t) in enumerate(tensors.items()):
        where = out.files.offset(file, str(k))
        out.put(joined(path), joined(path), Chunks.whole(t.shape, file, where, sizes[str(k)]))


def _write_model(out: _Writing, state: Training) -> None:
    layout, world = out.layout, out.layout.shards
    flattened = {n for f in layout.flats for n in (*(p.name for p in f.parts), *(a for a, _ in f.shared))}
    buffers = [n for n in state.tensors if n not in flattened]
    numbers: list[int] = []
    places: list[list[int]] = []  # by flat parameter, where each rank's slice begins in its file
    cut = [out.slices(f) for f in layout.flats]
    for r in range(world):
        tree: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        views: dict[str, Any] = {}
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
                    whole = TensorRef(dtype, (y - x,), key, b - a, x - a) if x < y else Inline(dtype, (0,), b"")
                    views[p.name] = whole
                own = TensorRef(dtype, (b - a,), key, b - a) if a < b else None
                tree[flat.key] = sharded_tensor(out.table, tuple(bounds), r, own, dtype)
            views.update((alias, views[owner]) for alias, owner in flat.shared)
        for n in buffers:
            key, t, dtype = str(len(sizes)), state.tensors[n], out.dtype(f"model.{n}")
            views[n] = TensorRef(dtype, t.shape, key, t.numel)
            sizes[key] = t.numel * ITEMSIZE[dtype]
        listed = state.tensors if layout.use_orig_params or world == 1 else buffers
        tree = {**{n: views[n] for n in layout.names or listed if n in listed and n in views}, **tree}
        numbers.append(out.files.add(f"local_rank{r}.pt", tree, sizes))
        places.append([out.files.offset(numbers[r], k) for k in sizes])
    _place_model(out, buffers, numbers, places, cut)


def _place_model(
    out: _Writing, buffers: list[str], numbers: list[int], places: list[list[int]], cut: list[list[tuple[int, int]]]
) -> None:
    """The chunks of the model, in the order of the storages."""
    world = out.layout.shards
    at = [iter(p) for p in places]
    for flat, bounds in zip(out.layout.flats, cut, strict=True):
        item = ITEMSIZE[flat.dtype or "float32"]
        starts = [next(at[r]) if world > 1 and a < b else 0 for r, (a, b) in enumerate(bounds)]
        for p in flat.parts:
            if world == 1:
                chunks = Chunks.whole(p.shape, numbers[0], next(at[0]), p.numel * item)
            else:
                chunks = _cut_up(p, bounds, numbers, starts, item)
            out.put(f"model.{p.name}", f"model.{p.name}", chunks)
        for alias, owner in flat.shared:
            out.put(f"model.{alias}", f"model.{alias}", out.tensors[f"model.{owner}"].chunks)
            out.same[f"model.{alias}"] = f"model.{owner}"
    for n in buffers:
        name = f"model.{n}"
        nbytes = out.ckpt.tensors[name].numel * ITEMSIZE[out.dtype(name)]
        for r in range(world):
            chunks = Chunks.whole(out.ckpt.tensors[name].shape, numbers[r], next(at[r]), nbytes)
            out.put(name if r == 0 else f"replica.{r}.{n}", name, chunks)


def _cut_up(p: Part, bounds: list[tuple[int, int]], numbers: list[int], starts: list[int], item: int) -> Chunks:
    chunks = Chunks(len(p.shape))
    for r, (a, b) in enumerate(bounds):
        for start, size, _, at in flat_layout.pieces(p, a, b):
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
    parts: list[Part]
    bounds: list[tuple[int, int]]
    numels: list[int]


def _write_optimizer(out: _Writing, state: Training, plan: _Plan) -> None:
    """`optimizer.state_dict()` of every rank."""
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
        tree: dict[int, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        keys: dict[tuple[int, str], str] = {}
        for i, x in enumerate(stored):
            owner = copies.get(x.parts[0].name, x.parts[0].name)
            slots: dict[str, Any] = {}
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
        slots = state.slots.get(copies.get(x.parts[0].name, x.parts[0].name), {})
        for slot in slots:
            for p in x.parts:
                owner = copies.get(p.name, p.name)
                of = f"optim.state.{owner}.{slot}"
                item = ITEMSIZE[out.dtype(of)]
                starts = [places[r].get((i, slot), 0) for r in range(world)]
                chunks = _cut_up(p, x.bounds, numbers, starts, item)
                out.put(of if owner == p.name else f"replica.{p.name}.{slot}", of, chunks)
