"""The optimizer in FSDP1's files: by FQN, or by number with slots that are 1-D slices of flat parameters.

Numbers are named only if the lengths of the slices leave exactly one way to do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import Flat, FlatLayout, FlatPart
from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats import stored_tensors
from ckpttool.formats.sharded import is_sharded
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.huggingface import model_names
from ckpttool.index.checkpoint import Leaves, Path, TensorEntry, joined, same_value
from ckpttool.index.optimizer_names import assign_names
from ckpttool.layouts import ReadOptions

from ..rank_files import (
    Column,
    Files,
    Rank,
    are_leaves_equal,
    assemble_slot,
    compare_replicas,
    format_step,
    merge_other_state,
    read_inline,
)
from .flat_params import ModelInfo, RankSlices, Spans, read_given_layout

__all__ = ["read_optimizer"]

#: {(name or number of a parameter, slot): what each rank has, None where nothing}.
_Slots = dict[tuple[Any, Any], Column]
#: The number of elements on each rank, of each parameter of each group; None of one without state.
_Lengths = Sequence[Sequence[tuple[int, ...] | None]]


def read_optimizer(
    files: Files, saved: list[list[Rank]], known: ModelInfo, options: ReadOptions, config: dict[str, object] | None
) -> Leaves:
    """Read the optimizer and return its leaves, {("optim", ...): tensor or value}.

    It may be saved twice, by FQN and as numbered slices; the one by FQN is then read.

    Args:
        files: the files read.
        saved: for each optimizer that was saved, at least one, what each rank has of it.
        known: what is known about the model.
        options: what the user states about the model.
        config: the model's config.json; None if there is none.

    Raises:
        Unsupported: there are two optimizers, or numbered parameters cannot be named with certainty.
        Corrupt: the ranks, or the two saved forms, contradict one another.
    """
    named = [r for r in saved if not _has_numbered_parameters(r[0].tree)]
    raw = [r for r in saved if _has_numbered_parameters(r[0].tree)]
    for kind in (named, raw):
        if len(kind) > 1:
            a, b = (files.names[k[0].file] for k in kind[:2])
            raise Unsupported(
                f"{files.source.root} holds more than one optimizer: {a} and {b}. Move one to a folder of its own.",
                code="CKPT0328",
            )
    chosen = (named or raw)[0]
    groups = _read_param_groups(files, chosen)
    if named and raw:
        _check_same_save(files, named[0], raw[0])
        files.notes.append(
            f"the optimizer is there twice; {files.names[chosen[0].file]} and its like are read, which name "
            f"parameters, {files.names[raw[0][0].file]} and its like say the same step and hyperparameters"
        )
    out: Leaves = {}
    for i, group in enumerate(groups):
        for k, v in group.items():
            raw, path = chosen[0].tree["param_groups"][i][k], ("optim", "param_groups", i, str(k))
            out.update(_read_tensor_option(files, chosen[0], path, raw) or {path: v})
    columns, rest = _collect_slots(chosen), _read_rest(files, chosen)
    if named:
        return {**out, **rest, **_assemble_slots(files, chosen, columns)}
    if _are_slots_flat(columns, known.layout is not None):
        return {**out, **rest, **_read_flat_optimizer(files, chosen, columns, groups, known, options, config)}
    out.update(_assemble_slots(files, chosen, columns))
    given = read_given_layout(files, options)
    if given is not None and given[0].use_orig_params and given[0].optimizer is not None:
        numbers = [list(g.get("params") or ()) for g in groups]
        if [len(g) for g in numbers] == [len(g) for g in given[0].optimizer]:
            names = {
                str(x): n for g, h in zip(numbers, given[0].optimizer, strict=True) for x, n in zip(g, h, strict=True)
            }
            out = {(*p[:2], names[str(p[2])], *p[3:]) if p[1] == "state" else p: x for p, x in out.items()}
            out.update({("optim", "param_groups", i, "params"): list(g) for i, g in enumerate(given[0].optimizer)})
    return {**out, **rest}


def _read_rest(files: Files, ranks: list[Rank]) -> Leaves:
    """Return {path: leaf} of an optimizer's entries besides param groups and slots.

    These are further keys of the state dict, and state that belongs to no parameter. An entry that differs between
    ranks is kept for each rank, with the rank in its path (`merge_other_state`).

    Args:
        files: the files read.
        ranks: what each rank has of the optimizer.
    """
    out: Leaves = {}
    for head, trees in (
        (("optim",), [{k: x for k, x in r.tree.items() if k not in ("state", "param_groups")} for r in ranks]),
        (("optim", "state"), [{k: x for k, x in r.tree["state"].items() if not isinstance(x, dict)} for r in ranks]),
    ):
        own = [r._replace(tree=tree) for r, tree in zip(ranks, trees, strict=True)]
        out.update({(*head, *p): x for p, x in merge_other_state(files, {"": own}, {}).items()})
    return out


def _has_numbered_parameters(tree: dict[Any, Any]) -> bool:
    """Return whether an optimizer's state dict identifies its parameters by numbers instead of names."""
    ids = [x for g in tree.get("param_groups") or () if isinstance(g, dict) for x in g.get("params") or ()]
    return any(type(x) is int for x in ids or tree.get("state") or ())


def _read_param_groups(files: Files, ranks: list[Rank]) -> list[dict[Any, Any]]:
    """Return the param groups, which all ranks must have in common; tensors in them are read.

    Raises:
        Corrupt: they differ, or a rank's file has none.
    """
    out: list[dict[Any, Any]] = []
    for r in ranks:
        groups = r.tree.get("param_groups")
        if (
            not isinstance(groups, list)
            or not all(isinstance(g, dict) for g in groups)
            or not isinstance(r.tree["state"], dict)
        ):
            raise Corrupt(f"{files.path(r.file)}: an optimizer without param_groups.", code="CKPT0417")
        groups = stored_tensors.inline_tensors(groups, files.reader(r.file), files.path(r.file))
        if r is ranks[0]:
            out = groups
        elif not same_value(groups, out):
            key = next(
                (
                    k
                    for a, b in zip(out, groups, strict=False)
                    for k in {**a, **b}
                    if not same_value(a.get(k), b.get(k))
                ),
                "params",
            )
            raise Corrupt(
                f"{files.path(r.file)}: its param groups differ from those in {files.names[ranks[0].file]}, first in "
                f'"{key}". The files are from different saves; fetch the files of one save.',
                code="CKPT0409",
            )
    return out


def _read_tensor_option(files: Files, r: Rank, path: Path, x: object) -> Leaves:
    """Return the leaves of an option of a param group that holds tensors, such as a learning rate; {} if it holds none.

    Prodigy's `d_numerator` is another such option.

    Args:
        files: the files read.
        r: the rank whose file has the option.
        path: the path of the option, with which the paths of the leaves begin.
        x: its value.
    """
    held = stored_tensors.iter_tensors(x, f"{files.path(r.file)}: {joined(path)}")
    return {} if next(held, None) is None else files.leaves(r.file, x, path)


def _collect_slots(ranks: list[Rank]) -> _Slots:
    """Return {(name or number of a parameter, slot): [what each rank has, None if it has nothing]}.

    A rank without elements of a parameter has no slot of it.

    Raises:
        Corrupt: ranks have different slots of a parameter.
    """
    out: _Slots = {}
    first: dict[object, tuple[Rank, dict[object, object]]] = {}
    for i, r in enumerate(ranks):
        for name, slots in r.tree["state"].items():
            if isinstance(slots, dict) and slots:
                other, has = first.setdefault(name, (r, slots))
                if odd := sorted(map(str, slots.keys() ^ has.keys())):
                    raise Corrupt(
                        f'The optimizer state of parameter {name} has a slot "{odd[0]}" in the file of rank '
                        f"{(r if odd[0] in map(str, slots) else other).rank} and not in that of rank "
                        f"{(other if odd[0] in map(str, slots) else r).rank}. The files are from different jobs, or "
                        "one was changed.",
                        code="CKPT0409",
                    )
                for slot, x in slots.items():
                    out.setdefault((name, slot), [None] * len(ranks))[i] = x
    return out


def _check_same_save(files: Files, a: list[Rank], b: list[Rank]) -> None:
    """Check that the two forms in which one optimizer was saved have the same hyperparameters and steps.

    `a` and `b` are what each rank has of the one form and of the other.

    Raises:
        Corrupt: they are from different saves.
    """

    def summary(ranks: list[Rank]) -> tuple[list[dict[object, object]], set[str]]:
        """Return (hyperparameters of each param group, {steps as text}) of an optimizer."""
        groups = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in _read_param_groups(files, ranks)
        ]
        steps = [
            read_inline(files, ranks[0].file, x)
            for (_, slot), c in _collect_slots(ranks[:1]).items()
            if slot == "step"
            for x in c
        ]
        return groups, {format_step(x) for x in steps}

    one, two = summary(a), summary(b)
    if one[1] and two[1] and one[1].isdisjoint(two[1]):
        raise Corrupt(
            f"{files.path(a[0].file)} is of step {', '.join(sorted(one[1]))}, {files.names[b[0].file]} of step "
            f"{', '.join(sorted(two[1]))}. They are from different saves; fetch the files of one save.",
            code="CKPT0409",
        )
    if one[0] != two[0]:
        raise Corrupt(
            f"{files.path(a[0].file)} and {files.names[b[0].file]} have other hyperparameters. Fetch all files of one "
            "save.",
            code="CKPT0409",
        )


def _are_slots_flat(columns: _Slots, known: bool) -> bool:
    """Return whether the slots of numbered parameters are slices of flat parameters.

    They are if all of them are 1-D tensors, apart from single numbers such as the step.

    Args:
        columns: {(number of a parameter, slot): what each rank has}.
        known: whether the model is known to have flat parameters; this decides if all slots are single numbers.
    """
    held = [x for c in columns.values() for x in c]
    wide = [x for x in held if is_sharded(x) or (isinstance(x, StoredTensor) and x.shape)]
    if not wide:
        return known and not any(isinstance(x, dict) for x in held)
    return all(isinstance(x, StoredTensor) and len(x.shape) == 1 for x in wide)


def _read_flat_optimizer(
    files: Files,
    ranks: list[Rank],
    columns: _Slots,
    groups: list[dict[Any, Any]],
    known: ModelInfo,
    options: ReadOptions,
    config: dict[str, object] | None,
) -> Leaves:
    """Return the leaves of state and groups, by FQN, of an optimizer whose slots are 1-D slices.

    Args:
        files: the files read.
        ranks: what each rank has of the optimizer.
        columns: {(number of a parameter, slot): what each rank has}.
        groups: the param groups.
        known: what is known about the model.
        options: what the user states about the model.
        config: the model's config.json; None if there is none.

    Raises:
        Unsupported: the numbered parameters cannot be named with certainty.
        Corrupt: slots of one parameter have different lengths.
    """
    ids = [list(g.get("params") or ()) for g in groups]
    lengths = _count_elements_by_number(files, ranks, columns)
    expected = [[lengths.get(x) for x in group] for group in ids]
    own = known.own if known.own.places else RankSlices([(i, len(ranks)) for i in range(len(ranks))], {})
    layout = known.layout
    resolved: list[list[str]] | None = None
    if layout is not None:
        resolved = _match_numbers(layout, own, expected)
    else:
        for guess in _generate_candidate_layouts(files, known, own, expected, options, config):
            resolved = _match_numbers(guess, own, expected)
            if resolved is not None:
                layout = guess
                break
        if resolved is None and own.shards == 1:  # use_orig_params, and all parameters have one dimension
            return _assemble_slots(files, ranks, columns)
    if layout is None or resolved is None:
        raise Unsupported(_explain_unresolved_numbers(files, ranks, ids, lengths, layout, known), code="CKPT0308")
    by_key = {f.key: f for f in layout.flats}
    by_name = {p.name: (f, p) for f in layout.flats for p in f.parts}
    copies = dict(layout.copies)
    by_number: dict[object, list[tuple[str, list[object]]]] = {}
    for (x, slot), column in columns.items():
        by_number.setdefault(x, []).append((str(slot), column))
    out: Leaves = {}
    for i, (numbers, names) in enumerate(zip(ids, resolved, strict=True)):
        for x, name in zip(numbers, names, strict=True):
            parts = [by_name[name]] if layout.use_orig_params else [(by_key[name], p) for p in by_key[name].parts]
            for slot, column in by_number.get(x, ()):
                whole = _count_elements(column) != lengths.get(x)
                out.update(_cut_slot(files, ranks, own, layout, parts, slot, f"{name}.{slot}", column, whole))
        out["optim", "param_groups", i, "params"] = flat_layout.list_trained_parameters(layout, names)
    return {path: leaf for path, leaf in out.items() if path[1] != "state" or path[2] not in copies}


def _assemble_slots(files: Files, ranks: list[Rank], columns: _Slots) -> Leaves:
    """Return the leaves of slots that each rank has completely, or as ShardedTensor or DTensor.

    They have the names or numbers of parameters that the files have. `columns` is {(name or number of a parameter,
    slot): what each rank has}.

    Raises:
        Corrupt: the ranks contradict one another.
        Unsupported: a slot is a dict of tensors, and ranks have different ones.
    """
    out: Leaves = {}
    for (x, slot), column in columns.items():
        path: Path = ("optim", "state", str(x), str(slot))
        if not any(isinstance(held, dict) for held in column):
            out[path] = assemble_slot(files, ranks, f"{x}.{slot}", column)
            continue
        found = [
            (r, files.leaves(r.file, held, path)) for r, held in zip(ranks, column, strict=True) if held is not None
        ]
        for r, leaves in found[1:]:
            if not are_leaves_equal(files, leaves, found[0][1]):
                raise Unsupported(
                    f'{files.path(r.file)}: "{joined(path)}" is a dict, as of an 8-bit optimizer of bitsandbytes, and '
                    f"differs from that of rank {found[0][0].rank}. ckpttool does not join such parts; "
                    f"{argument('only', ['model'])} leaves the optimizer out.",
                    code="CKPT0319",
                )
        out.update(found[0][1])
    return out


def _count_elements_by_number(files: Files, ranks: list[Rank], columns: _Slots) -> dict[object, tuple[int, ...]]:
    """Return {number of a parameter: the number of its elements on each rank}, the same for all slots.

    A slot with one element on every rank, where other slots have more, is a single number for the whole parameter and
    is ignored. `columns` is {(number of a parameter, slot): what each rank has}.

    Raises:
        Corrupt: slots of one parameter have different lengths, or the ranks have different dtypes.
    """
    out: dict[object, tuple[int, ...]] = {}
    slots: dict[object, str] = {}
    for (x, slot), column in columns.items():
        n = _count_elements(column)
        if sum(n) > sum(out.get(x, ())):
            out[x], slots[x] = n, str(slot)
    for (x, slot), column in columns.items():
        n = _count_elements(column)
        if n == out.get(x) or _is_single_number(column):
            continue
        k = next(i for i in range(len(n)) if n[i] != out[x][i])
        raise Corrupt(
            f'{files.path(ranks[k].file)}: "{slot}" of parameter {x} has {n[k]} elements, its "{slots[x]}" has '
            f"{out[x][k]}. The file is damaged or was changed.",
            code="CKPT0417",
        )
    for (x, slot), column in columns.items():
        kinds: dict[str, list[Rank]] = {}
        for r, t in zip(ranks, column, strict=True):
            if isinstance(t, StoredTensor):
                kinds.setdefault(t.dtype, []).append(r)
        if len(kinds) > 1:
            (a, most), (b, odd) = sorted(kinds.items(), key=lambda kv: -len(kv[1]))[:2]
            raise Corrupt(
                f'{files.path(odd[0].file)}: "{slot}" of parameter {x} is {b}, in {files.names[most[0].file]} it is '
                f"{a}. The files are from different runs, or one was changed.",
                code="CKPT0409",
            )
    return out


def _count_elements(column: Column) -> tuple[int, ...]:
    """Return the number of elements that each rank has of a slot; 0 if the slot is missing, a number or a 0-dim
    tensor."""
    return tuple(prod(t.shape) if isinstance(t, StoredTensor) and t.shape else 0 for t in column)


def _is_single_number(column: Column) -> bool:
    """Return whether a slot is a single number on every rank that has it, rather than a value for each element."""
    return all(not isinstance(t, StoredTensor) or prod(t.shape) == 1 for t in column)


def _list_expected_lengths(layout: FlatLayout, own: RankSlices) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, number of elements on each rank) of everything that the optimizer numbers, in the order of the
    model.

    These are parameters with use_orig_params, else flat parameters.
    """
    out = []
    for flat in layout.flats:
        if not layout.use_orig_params:
            step = -(-flat.numel // own.shards)
            out.append((flat.key, (step,) * len(own.places)))
            continue
        for p in flat.parts:
            cut = [flat_layout.find_rank_slice(flat.numel, own.shards, k) for k, _ in own.places]
            out.append((p.name, tuple(max(0, min(b, p.first + p.numel) - max(a, p.first)) for a, b in cut)))
    if layout.use_orig_params and layout.names is not None:
        place = {n: i for i, n in enumerate(layout.names)}
        out.sort(key=lambda x: place.get(x[0], len(place)))
    return out


def _match_numbers(layout: FlatLayout, own: RankSlices, expected: _Lengths) -> list[list[str]] | None:
    """Return, for each param group, the names of its numbered parameters; None unless exactly one assignment fits.

    The names that the layout lists for the optimizer are used if it lists them and they fit. Otherwise, parameters are
    matched by the number of elements that each rank has of them.

    Args:
        layout: the layout of the flat parameters.
        own: which slice of the flat parameters each rank has.
        expected: for each parameter of each group, the number of its elements on each rank; None for a parameter
            without state.
    """
    names = _list_expected_lengths(layout, own)
    if layout.optimizer is not None and [len(g) for g in layout.optimizer] == [len(g) for g in expected]:
        lengths = dict(names)
        if all(
            n in lengths and e in (lengths[n], None)
            for g, h in zip(layout.optimizer, expected, strict=True)
            for n, e in zip(g, h, strict=True)
        ):
            return [list(g) for g in layout.optimizer]
    return assign_names(names, expected)[0]


def _generate_candidate_layouts(
    files: Files,
    known: ModelInfo,
    own: RankSlices,
    expected: _Lengths,
    options: ReadOptions,
    config: dict[str, object] | None,
) -> Iterable[FlatLayout]:
    """Yield the flat layouts to try: the given one if there is one, else those that the model's names and shapes allow.

    Args:
        files: the files read.
        known: what is known about the model.
        own: which slice of a flat parameter each rank has.
        expected: for each parameter of each group, the number of its elements on each rank; None if it has no state.
        options: what the user states about the model.
        config: the model's config.json; None if there is none.
    """
    given = read_given_layout(files, options)
    if given is not None:
        yield given[0]
        return
    names, shapes = list(known.params), known.params
    paths = flat_layout.list_module_paths(names)
    wraps: list[list[str]] = []
    if options.wrap is not None:
        wraps.append(flat_layout.match_modules(paths, options.wrap))
    else:
        if config is not None:
            wraps.append([b for b in model_names.read_model_names(config).blocks if b in paths])
        wraps.append(flat_layout.match_modules(paths, flat_layout.find_block_patterns(names)))
        wraps.append([])
    wanted = {n for group in expected for n in group}
    tied = dict(options.like.tied) if options.like else {}
    tied = {**known.tied, **tied}
    if config is not None:
        tied = {**model_names.read_model_names(config).tied, **tied}
    for modules in wraps:
        inside = flat_layout.assign_params_to_modules(names, modules)
        for aligns in ((0,), *((a,) for a in (4, 8, 2, 16))):
            uop = aligns != (0,)
            made = []
            for module, members in inside.items():

                def fits(flat: Flat, uop: bool = uop) -> bool:
                    """Return whether the optimizer numbers something as long, on every rank, as each part of a flat
                    parameter."""
                    found = _list_expected_lengths(FlatLayout(uop, own.shards, (flat,)), own)
                    return all(n in wanted or None in wanted for _, n in found)

                flat = flat_layout.find_fitting_layout(
                    module, [(n, shapes[n]) for n in members], fits, aligns, own.shards, None, tied
                )
                if flat is None:
                    break
                made.append(flat)
            else:
                yield FlatLayout(uop, own.shards, tuple(made), tuple(names))


def _explain_unresolved_numbers(
    files: Files,
    ranks: list[Rank],
    ids: list[list[object]],
    lengths: dict[object, tuple[int, ...]],
    layout: FlatLayout | None,
    known: ModelInfo,
) -> str:
    """Return the text of the error that numbered parameters cannot be named, with advice on what the user can provide.

    Args:
        files: the files read.
        ranks: what each rank has of the optimizer.
        ids: the numbers in each param group.
        lengths: {number: its elements on each rank}.
        layout: the layout of the flat parameters; None if it is not known.
        known: what is known about the model.
    """
    count = sum(map(len, ids))
    first = next(iter(lengths.items()), (0, ()))
    text = (
        f"{files.path(ranks[0].file)}: the optimizer numbers its {count} parameters, and their state is flat: number "
        f"{first[0]} has {', '.join(map(str, first[1][:8]))} elements on the ranks. "
    )
    if layout is not None:
        has = len(_list_expected_lengths(layout, known.own))
        return text + (
            f"That fits no order of the {has} flat parameters of the model, or more than one. Give "
            f"{argument('flat_layout')} with the optimizer's order, ckpttool.describe_fsdp1(model, optimizer) in the "
            f"job, or {argument('only', ['model'])}."
        )
    return text + (
        "No wrapping that was tried gives such lengths. Name the modules that FSDP1 wrapped, such as "
        f"{argument('wrap', ['**.layers.*'])}, or give {argument('flat_layout')} (ckpttool.describe_fsdp1(model, "
        f"optimizer) in the job), or {argument('only', ['model'])}."
    )


def _cut_slot(
    files: Files,
    ranks: list[Rank],
    own: RankSlices,
    layout: FlatLayout,
    parts: list[tuple[Flat, FlatPart]],
    slot: str,
    name: str,
    column: Column,
    whole: bool,
) -> Leaves:
    """Return {path: leaf} of one slot of one numbered parameter, cut into one leaf for each FQN.

    Args:
        files: the files read.
        ranks: what each rank has of the optimizer.
        own: which slice of a flat parameter each rank has.
        layout: the layout of the flat parameters.
        parts: the FQNs' parts of the numbered parameter, each with its flat parameter.
        slot: the slot.
        name: how errors name it.
        column: what each of `ranks` has of it.
        whole: whether it is one value that all FQNs share, such as the step.

    Raises:
        Corrupt: the ranks contradict one another.
        Unsupported: a slice is not contiguous.
    """
    if whole:
        leaf = assemble_slot(files, ranks, name, column)
        return {("optim", "state", p.name, slot): leaf for _, p in parts}
    kept = {own.places[i][0]: i for i in own.first_ranks()}
    for i, t in enumerate(column):
        k = kept[own.places[i][0]]
        if i != k and isinstance(t, StoredTensor) and isinstance(column[k], StoredTensor):  # of HYBRID_SHARD
            compare_replicas(files, name, (ranks[k].file, column[k]), (ranks[i].file, t))
    flat, first = parts[0]
    at = first.first if layout.use_orig_params else 0
    found = [(ranks[i], column[i], own.places[i][0]) for i in own.first_ranks() if isinstance(column[i], StoredTensor)]
    if layout.use_orig_params:
        spans = Spans.joined(files, at, [(r, t) for r, t, _ in found])
    else:
        cut = [(r, t, flat_layout.find_rank_slice(flat.numel, own.shards, k)) for r, t, k in found]
        spans = Spans.joined(files, at, [(r, t._replace(shape=(b - a,))) for r, t, (a, b) in cut])
    return {("optim", "state", p.name, slot): TensorEntry(spans.dtype, p.shape, (), spans.chunks(p)) for _, p in parts}
