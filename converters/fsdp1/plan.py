"""Plans the flat parameters of the written files, and what their optimizer lists: the wrapping, and the order of
names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import Flat, FlatLayout
from ckpttool.engine.flat.split_state import ParamGroup, Training
from ckpttool.errors import Unsupported, argument
from ckpttool.huggingface import encodings, model_names
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, TensorEntry, parse_floating_dtype
from ckpttool.layouts import WriteOptions

from ..options import Fsdp1Options

__all__ = ["FlatPlan", "plan_flat_parameters"]


@dataclass
class FlatPlan:
    """The flat parameters to write, and the param groups; `params` of a group are what the optimizer lists. None where
    there is no optimizer."""

    layout: FlatLayout
    groups: list[ParamGroup] | None
    notes: list[str] = field(default_factory=list)


def plan_flat_parameters(ckpt: Checkpoint, state: Training, options: WriteOptions, world: int) -> FlatPlan:
    """Plan the flat parameters to write for a job of `world` ranks, and the param groups of its optimizer.

    Raises:
        Unsupported: FSDP1 cannot flatten the parameters, or the given flat layout does not fit the state.
    """
    notes: list[str] = []
    own = options.of(Fsdp1Options)
    groups = _list_group_params(ckpt, state)
    group_of = {n: i for i, (names, _) in enumerate(groups) for n in names}
    params = {*group_of, *state.frozen, *state.tied, *(n for g in state.groups for n in g.params)}
    given = flat_layout.read_layout_file(options.flat_layout) if options.flat_layout is not None else None
    if given is not None:
        flats = _check_given_flats(given, state, params, options, world)
        names = given.names or tuple(state.tensors)
        why = _explain_original_params(flats, state, group_of)
        if not given.use_orig_params and (why or own.use_orig_params):
            raise Unsupported(
                f"{argument('flat_layout', options.flat_layout)} is of a job with use_orig_params=False; "
                + (why or f"{argument('use_orig_params', True, 'Fsdp1Options')} contradicts it."),
                code="CKPT0309",
            )
        uop = given.use_orig_params
    else:
        names = _find_model_order(ckpt, state, options)
        ordered = [n for n in names if n in params]
        modules = _choose_wrapped_modules(ordered, options, notes)
        flats, uop = _lay_out_modules(ordered, modules, state, options, group_of, world, notes)

    in_flats = {p.name for f in flats for p in f.parts}
    copies = tuple((a, b) for a, b in state.tied.items() if a in in_flats)
    for a, b in copies:
        notes.append(
            f'"{a}" and "{b}" are tied and lie in two wrapped modules, where FSDP1 makes two parameters of them'
        )
    listed: list[ParamGroup] | None = None
    paths = [x.path for entries in (ckpt.tensors, ckpt.values) for x in entries.values()]
    if any(path[0] == "optim" for path in paths):
        owners = dict(copies)
        group = {n: group_of.get(owners.get(n, n)) for n in names if n in in_flats}
        listed = _list_optimizer_params(groups, group, flats, uop)
        if given is not None and given.optimizer is not None:
            listed = _order_groups_as_given(given.optimizer, listed, notes)
    optimizer = None if listed is None else tuple(g.params for g in listed)
    return FlatPlan(FlatLayout(uop, world, tuple(flats), tuple(names), optimizer, copies), listed, notes)


def _lay_out_modules(
    names: list[str],
    modules: list[str],
    state: Training,
    options: WriteOptions,
    group_of: Mapping[str, int],
    world: int,
    notes: list[str],
) -> tuple[list[Flat], bool]:
    """Lay out the parameters of the wrapped modules, for use_orig_params=True or False.

    It is True if the user asked for that, or if use_orig_params=False cannot hold the state.

    Args:
        names: the parameters, in the order of the model.
        modules: the modules that the job wraps.
        state: the state to write.
        options: what the user asks for.
        group_of: {parameter: number of its param group}.
        world: the number of ranks.
        notes: the list to which notes for the user are added.

    Returns:
        (the flat parameters, whether they are for use_orig_params=True).

    Raises:
        Unsupported: FSDP1 cannot flatten the parameters of a module together.
    """
    own = options.of(Fsdp1Options)
    if ignored := _find_ignored_parameters(names, modules, state, options):
        names = [n for n in names if n not in ignored]
        notes.append(
            f"{len(ignored)} frozen parameters have another dtype than the trained ones of their module, which "
            "FSDP1 does not flatten together; they are whole in every file, for FSDP(ignored_states=...): "
            f"{', '.join(sorted(ignored)[:4])}" + (", ..." if len(ignored) > 4 else "")
        )
    flats = _lay_out_flats(names, modules, state, options, 0, world)
    why = _explain_original_params(flats, state, group_of)
    if why is None and not own.use_orig_params:
        notes.append(
            "written for FSDP1(use_orig_params=False), its default; "
            f"{argument('use_orig_params', True, 'Fsdp1Options')} for the other"
        )
        return flats, False
    if not own.use_orig_params:
        notes.append(f"written for FSDP1(use_orig_params=True): {why}")
    # with use_orig_params, parameters are aligned to 16 bytes of the dtype that the job computes in
    precision = None if own.precision is None else parse_floating_dtype(own.precision)
    align = 16 // ITEMSIZE[precision] if precision else None
    return _lay_out_flats(names, modules, state, options, align, world), True


def _list_optimizer_params(
    groups: list[ParamGroup], group: Mapping[str, int | None], flats: list[Flat], uop: bool
) -> list[ParamGroup]:
    """Return the param groups as the job's optimizer has them: with parameters if use_orig_params, else flat
    parameters.

    Args:
        groups: the param groups of the source.
        group: {parameter: number of its param group, None if it is in none}, in the order of the model.
        flats: the flat parameters.
        uop: whether the job uses use_orig_params=True.
    """
    inside: dict[int | None, list[str]] = {}
    if uop:
        for n, i in group.items():
            inside.setdefault(i, []).append(n)
    else:
        for f in flats:
            for i in dict.fromkeys(group[p.name] for p in f.parts if p.name in group):
                inside.setdefault(i, []).append(f.key)
    return [ParamGroup(tuple(inside.get(i, ())), g.options) for i, g in enumerate(groups)]


def _list_group_params(ckpt: Checkpoint, state: Training) -> list[ParamGroup]:
    """Return the param groups with the FQNs of all parameters that the source has in each, even of those without state.

    Tied weights are listed once, under the name that owns them.
    """
    out = []
    for i, g in enumerate(state.groups):
        value = ckpt.values.get(f"optim.param_groups.{i}.params")
        names = list(value.data) if value is not None else list(g.params)
        out.append(
            ParamGroup(tuple(dict.fromkeys(state.tied.get(n, n) for n in names if n in state.tensors)), g.options)
        )
    return out


def _order_groups_as_given(
    given: tuple[tuple[str, ...], ...], made: list[ParamGroup], notes: list[str]
) -> list[ParamGroup]:
    """Return the param groups with their parameters in the order of the job's own optimizer.

    If that optimizer has other parameters, the groups are returned unchanged, and a note is added.

    Args:
        given: the names in each group of the job's optimizer, from the flat layout.
        made: the param groups in the order of the model.
        notes: the list to which the note is added.
    """
    if [set(g) for g in given] == [set(g) for g, _ in made]:
        return [ParamGroup(names, g.options) for names, g in zip(given, made, strict=True)]
    notes.append(
        "the optimizer of the flat layout lists other parameters than the source's; the order is that of the model"
    )
    return made


def _find_model_order(ckpt: Checkpoint, state: Training, options: WriteOptions) -> tuple[str, ...]:
    """Return all names of the model in the order in which FSDP1 visits them: from --like or the config, else the
    source.

    Raises:
        Unsupported: none of these keeps that order, or a tensor of the source is not among the names.
    """
    own = list(state.tensors)
    order: list[str] | None = None
    if options.like is not None and options.like.shapes:
        order, where = list(options.like.shapes), argument("like")
    elif options.config is not None or (own == sorted(own) and ckpt.config is not None):
        config = model_names.load_config(options.config) if options.config is not None else ckpt.config
        order, where = (list(model_names.read_model_names(config).shapes), "the config") if config else (None, "")
    if order is not None:
        flat_layout.refuse_sorted_names(order, where)
        if missing := [n for n in own if n not in set(order)]:
            raise Unsupported(
                f'"{missing[0]}" and {len(missing) - 1} other tensors are not among the names of {where}. '
                f"{flat_layout.OTHER}",
                code="CKPT0309",
            )
        return tuple(n for n in order if n in state.tensors)
    flat_layout.refuse_sorted_names(own, f"{ckpt.layout} sources")
    return tuple(own)


def _choose_wrapped_modules(names: list[str], options: WriteOptions, notes: list[str]) -> list[str]:
    """Return the modules that the job wraps besides the root, and add notes on how they were chosen.

    They are those that --wrap names, else those of the config, else the repeated blocks of the model. `names` are the
    parameters, in the order of the model.
    """
    paths = flat_layout.list_module_paths(names)
    if options.wrap is not None:
        found = flat_layout.match_modules(paths, options.wrap)
        if not found and options.wrap:
            notes.append(
                f"{argument('wrap', options.wrap)} names no module, so only the root is wrapped; there are "
                f"{flat_layout.describe_modules(paths[1:])}. * is one component of the path, ** any number"
            )
        return found
    patterns = flat_layout.find_block_patterns(names)
    if options.config is not None:
        config = model_names.load_config(options.config)
        inside = set(paths)
        if found := [b for b in model_names.read_model_names(config).blocks if b in inside]:
            notes.append(f"wrapped modules, by the config: {flat_layout.describe_modules(found)}, and the root")
            return found
    found = flat_layout.match_modules(paths, patterns)
    if found:
        notes.append(
            f"wrapped modules, by the repeated blocks of the model: {', '.join(patterns)}, and the root; "
            f"{argument('wrap')} names others"
        )
    else:
        notes.append(f"only the root is wrapped, since no repeated blocks were found; {argument('wrap')} names modules")
    return found


def _find_ignored_parameters(names: list[str], modules: list[str], state: Training, options: WriteOptions) -> set[str]:
    """Return the frozen parameters whose dtype differs from that of the trained ones in the same wrapped module.

    FSDP1 cannot flatten both together, so the job must have these ignored (ignored_states).

    Args:
        names: the parameters, in the order of the model.
        modules: the modules that the job wraps.
        state: the state to write.
        options: which dtype each parameter is written in.
    """
    trained = {n for g in state.groups for n in g.params}
    out: set[str] = set()
    for members in flat_layout.assign_params_to_modules(names, modules).values():
        kinds = {n: options.cast(f"model.{n}", state.tensors[n].dtype) for n in members}
        floats = {kinds[n] for n in members if state.tied.get(n, n) in trained}
        if len(floats) == 1:
            out |= {n for n in members if kinds[n] not in floats and state.tied.get(n, n) not in trained}
    return out


def _lay_out_flats(
    names: list[str],
    modules: list[str],
    state: Training,
    options: WriteOptions,
    align: int | None,
    world: int,
) -> list[Flat]:
    """Lay out one flat parameter for the root and every wrapped module that has parameters of its own.

    Args:
        names: the parameters, in the order of the model.
        modules: the modules that the job wraps.
        state: the state to write.
        options: which dtype each parameter is written in.
        align: each parameter is aligned to a multiple of this number of elements, 0 for no alignment; None: 16 bytes in
            the dtype of the parameters.
        world: the number of ranks.

    Raises:
        Unsupported: FSDP1 cannot flatten the parameters of a module together.
    """
    out = []
    for module, members in flat_layout.assign_params_to_modules(names, modules).items():
        owners = [n for n in members if state.tied.get(n) not in members]
        shared = [(n, state.tied[n]) for n in members if state.tied.get(n) in members]
        kinds = {options.cast(f"model.{n}", state.tensors[n].dtype): n for n in owners}
        if len(kinds) > 1:
            (a, one), (b, two) = list(kinds.items())[:2]
            codes = encodings.find_in_tensors(state.tensors)
            if said := codes.describe(one) or codes.describe(two):
                raise Unsupported(
                    f"{said}, and FSDP1 flattens numbers that it trains, not codes. {encodings.advise_dequantizing()}",
                    code="CKPT0318",
                )
            raise Unsupported(
                f'"{one}" is {a} and "{two}" is {b}, and FSDP1 flattens parameters of one dtype only; both lie in '
                f'module "{module}". Wrap them apart with {argument("wrap")}, or cast one with {argument("cast")}.',
                code="CKPT0316",
            )
        dtype = next(iter(kinds))
        if "float" not in dtype:
            raise Unsupported(
                f'"{owners[0]}" is {dtype}; FSDP1 flattens floating-point parameters only.', code="CKPT0316"
            )
        if world > 1 and not any(state.tensors[n].numel for n in owners):
            raise Unsupported(
                f'No parameter of module "{module}" has an element (first "{owners[0]}"), so that no rank has a shard '
                f"of its flat parameter. Wrap it together with its parent with {argument('wrap')}.",
                code="CKPT0316",
            )
        step = 16 // ITEMSIZE[dtype] if align is None else align
        sized = [(n, state.tensors[n].shape) for n in owners]
        out.append(flat_layout.lay_out_flat_parameter(module, sized, step, world, dtype, shared))
    return out


def _check_given_flats(
    given: FlatLayout, state: Training, params: set[str], options: WriteOptions, world: int
) -> list[Flat]:
    """Compare the flat layout that the user gave with the model; return its flat parameters, with
    use_orig_params padded at the end to a multiple of `world`.

    `params` are the names of all parameters, trained or frozen.

    Raises:
        Unsupported: it is of another model, or has a parameter that is not contiguous.
    """
    where = argument("flat_layout", options.flat_layout)
    out = []
    for flat in given.flats:
        for p in flat.parts:
            if p.strides is not None:
                raise Unsupported(
                    f'{where}: "{p.name}" is not contiguous in memory (strides {p.strides}); ckpttool reads such flat '
                    "parameters, it does not write them. Call .contiguous() on it before FSDP wraps the model.",
                    code="CKPT0316",
                )
            t = state.tensors.get(p.name)
            if t is None or t.shape != p.shape:
                raise Unsupported(
                    f'{where} has "{p.name}" {p.shape}, the source has {t.shape if t else "no such tensor"}. '
                    f"{flat_layout.OTHER}",
                    code="CKPT0309",
                )
        end = max((p.first + p.numel for p in flat.parts), default=0)
        dtype = (
            options.cast(f"model.{flat.parts[0].name}", state.tensors[flat.parts[0].name].dtype) if flat.parts else None
        )
        out.append(flat._replace(numel=end + (-end % world if given.use_orig_params else 0), dtype=dtype))
    inside = {n for f in out for n in (*(p.name for p in f.parts), *(a for a, _ in f.shared))}
    if missing := sorted(params - inside):
        raise Unsupported(
            f'{where} lacks "{missing[0]}" and {len(missing) - 1} other parameters of the source. {flat_layout.OTHER}',
            code="CKPT0309",
        )
    return out


def _explain_original_params(flats: list[Flat], state: Training, group_of: Mapping[str, int]) -> str | None:
    """Return why use_orig_params=False, with one tensor for a whole module, cannot hold a state, as text; None if it
    can.

    `group_of` is {parameter: number of its param group}.
    """
    for flat in flats:
        names = [state.tied.get(p.name, p.name) for p in flat.parts]
        first = names[0] if names else ""
        where = f'module "{flat.module}"' if flat.module else "the root module"
        for n in names[1:]:
            if group_of.get(n) != group_of.get(first):
                a, b = (
                    f"in param group {group_of[x]}" if x in group_of else "not in the optimizer" for x in (first, n)
                )
                return (
                    f'in {where} "{first}" is {a}, "{n}" {b}, and one flat parameter is in one group and trained as a '
                    "whole"
                )
            one, two = state.slots.get(first, {}), state.slots.get(n, {})
            if {k: t.dtype for k, t in one.items()} != {k: t.dtype for k, t in two.items()}:
                return (
                    f'in {where} "{first}" and "{n}" have not the same optimizer state ({_format_slots(one)}; '
                    f"{_format_slots(two)})"
                )
            if state.scalars.get(first, {}) != state.scalars.get(n, {}):
                return f'in {where} "{first}" and "{n}" are at different steps, and one flat parameter has one'
    return None


def _format_slots(slots: Mapping[str, TensorEntry]) -> str:
    """Return slots with their dtypes as text, such as "exp_avg float32, exp_avg_sq float32"; "none" if there are
    none."""
    return ", ".join(f"{k} {t.dtype}" for k, t in slots.items()) or "none"
