"""The index of a save of ZeRO, of any stage; zero.py says what is in its files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Path, Replica, Salvage, TensorEntry, joined
from ckpttool.index.records import Records
from ckpttool.layouts import Place, ReadOptions
from ckpttool.printable import count_noun

from . import files as ds
from .experts import EXPERT_NAME, Experts, read_expert_files, read_stage0_experts
from .files import File, FlatRange
from .geometry import FlatPlace, Groups, elements_per_rank, partition_parameters
from .module_state import DERIVED, SaveReader
from .pipeline import is_pipeline, load_stages
from .tensor_cuts import INFO
from .tensor_parallel import read_tensor_ranks

__all__ = ["read"]

#: What an optimizer file holds under optimizer_state_dict: state that is read, or what follows from it and the config.
_READ = frozenset(
    (
        *("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "zero_stage", "ds_version", "partition_count"),
        *("base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "group_paddings"),
        *("param_alignment_paddings", "param_slice_mappings", "optimizer_state_dict", "fp32_flat_groups", INFO),
    )
)


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a save of any stage.

    Raises:
        Corrupt: files of ranks are missing, duplicated, or of different saves.
        Unsupported: the save does not state how the ranks' parts are joined, or its optimizer state was on NVMe.
        UsageError: there are several saves, and none is named.
    """
    reading = SaveReader(where, options)
    if is_pipeline(reading.save):
        return _read_pipeline(reading)
    return read_tensor_ranks(where, options, _read_tensor_rank)


def _read_tensor_rank(reading: SaveReader, models: list[File]) -> Checkpoint:
    """Return the index of the state of one tensor-parallel rank; without tensor parallelism, that of the whole save.

    `models` are the rank's model files: one for each data-parallel rank at stage 3, else a single one.
    """
    if not reading.save.files(ds.MODEL, 1):
        return _read_stage3(reading, models)
    (model,) = models
    experts = read_expert_files(reading, model)
    if reading.save.files(ds.OPTIM, 2) or model.tree.get("param_shapes") is not None:  # at stage 0 there are none
        return _read_stage12(reading, model, experts)
    return (
        read_stage0_experts(reading, model, experts)
        if experts.counts or experts.stacked
        else _read_stage0(reading, model)
    )


class _Optim(NamedTuple):
    """The optimizer file of a rank, its `optimizer_state_dict`, and of that: masters by flat tensor, state of the base
    optimizer, its param groups, and what else the base optimizer saved."""

    file: File
    whole: dict[str, object]
    masters: list[StoredTensor]
    state: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]] | None
    rest: dict[str, Any]


def _load_optimizer_files(
    reading: SaveReader, world: int, flats: str, base: str, count: int, experts: Experts | None = None
) -> list[_Optim]:
    """Load the optimizer files, in the order of the ranks, each checked by itself and against that of rank 0.

    Args:
        reading: the reader of the save.
        world: the number of ranks.
        flats: the key of the masters.
        base: the key of the state of the base optimizer.
        count: the number of flat tensors that param_shapes says.
        experts: the experts that have files of their own, which are partitioned over fewer ranks; None: there are none.

    Raises:
        Corrupt: a file is missing, or contradicts the others or param_shapes.
        Unsupported: experts are partitioned by themselves, or the optimizer keeps more than ranks agree on.
    """
    out: list[_Optim] = []
    for name in reading.files_of_ranks(ds.OPTIM, 2, world, "optimizer"):
        f = reading.load(name)
        whole = f.get("optimizer_state_dict", dict)
        if "ds_zero_partition_groups" in whole:
            raise Unsupported(
                f"{f.what}: experts are partitioned over other ranks than the rest (AutoEP).", code="CKPT0325"
            )
        stated = f.get("partition_count", (int, list), whole)
        if stated not in (world, [world] * count) and (
            not (experts and (experts.counts or experts.stacked)) or (out and stated != out[0].whole["partition_count"])
        ):
            raise Corrupt(
                f"{f.what}: partition_count is {short(stated)}, the save is of {world} ranks. The files are of "
                "different saves.",
                code="CKPT0409",
            )
        _check_stage(f, whole, flats)
        masters = f.get(flats, list, whole)
        if len(masters) != count or not all(_is_flat_float_tensor(t) for t in masters):
            raise Corrupt(f"{f.what}: {flats} are not {count} flat tensors, as param_shapes says.", code="CKPT0412")
        if out and [t.dtype for t in masters] != [t.dtype for t in out[0].masters]:
            raise Corrupt(
                f"{f.what}: {flats} have other dtypes than rank 0's. The files are from different saves.",
                code="CKPT0409",
            )
        found, rest = f.get(base, (dict, list), whole), dict[str, Any]()
        if isinstance(found, list):  # elastic_checkpoint: the state of each group, no param_groups
            state, groups = dict(enumerate(found)), None
        else:
            state, groups = f.get("state", dict, found), f.get("param_groups", list, found)
            rest = {str(k): x for k, x in found.items() if k not in ("state", "param_groups")}
        if (
            any(type(k) is not int for k in state)
            or not all(isinstance(v, dict) for v in state.values())
            or not all(isinstance(g, dict) for g in groups or ())
        ):
            raise Corrupt(
                f"{f.what}: its optimizer state is not a state and param groups of a torch optimizer.", code="CKPT0417"
            )
        if any(k not in range(count) for k in state):
            raise Corrupt(
                f"{f.what}: optimizer state for {short(list(state))}, but there are {count} flat tensors.",
                code="CKPT0417",
            )
        out.append(_Optim(f, whole, masters, state, groups, rest))
        _refuse_unlike_optimizers(out[0], out[-1], reading.options.only)
    reading.rest.update(ds.read_loss_scaler(out[0].whole))
    if unknown := sorted({str(k) for o in out for k in o.whole} - _READ):
        reading.notes.append(
            f"the optimizer files hold {', '.join(unknown)} too, which no known DeepSpeed writes: left out"
        )
    return out


def _refuse_unlike_optimizers(first: _Optim, own: _Optim, only: Collection[str] | None) -> None:
    """Refuse the optimizer file of a rank that differs from rank 0's where all ranks agree.

    Args:
        first, own: rank 0's, and that of the rank.
        only: the components to read; None for all. What an optimizer keeps besides state and param groups is compared
            only if the optimizer is to be read.

    Raises:
        Corrupt: param groups, slots or loss scalers differ. Unsupported: what else the optimizer keeps does.
    """
    same_slots = _list_slot_names(first.state) == _list_slot_names(own.state)
    if not ds.are_values_equal(first.groups, own.groups) or not same_slots:
        what = "param_groups" if same_slots else "the slots of the optimizer"
        raise Corrupt(
            f"{own.file.what}: {what} differ from rank 0's. The files are from different saves.", code="CKPT0409"
        )
    asked = only is None or "optim" in only
    if asked and not ds.are_values_equal(first.rest, own.rest, first.file, own.file):
        raise Unsupported(
            f"{own.file.what}: the optimizer keeps {', '.join(sorted(first.rest | own.rest))} beside its state and "
            "param groups, and ranks differ in it, so it is cut in a way that only the job that wrote it knows. "
            f"{argument('only', ['model'])} leaves the optimizer out.",
            code="CKPT0327",
        )
    # ranks agree on every overflow
    if not ds.are_values_equal(ds.read_loss_scaler(first.whole), ds.read_loss_scaler(own.whole)):
        raise Corrupt(
            f"{own.file.what}: the loss scaler differs from rank 0's. The files are from different saves.",
            code="CKPT0409",
        )


def _check_stage(f: File, whole: dict[str, object], flats: str) -> None:
    """Check that an optimizer file states a stage whose masters lie under the key `flats`.

    BF16_Optimizer, whose masters lie where those of stages 1 and 2 do, states none.

    Args:
        f: the optimizer file.
        whole: its `optimizer_state_dict`.
        flats: the key of `whole` under which the fp32 masters lie.

    Raises:
        Corrupt: it states another stage, or none at stage 3.
    """
    sharded = flats == "fp32_flat_groups"
    stated = f.get("zero_stage", int, whole) if sharded or "zero_stage" in whole else 1
    if (stated == 3) != sharded:
        raise Corrupt(
            f"{f.what}: zero_stage is {short(stated)}, and its masters are {flats}, as at another stage.",
            code="CKPT0417",
        )


def _is_flat_float_tensor(x: object) -> bool:
    """Return whether data from a pickle is a contiguous 1-D tensor of floats."""
    return isinstance(x, StoredTensor) and len(x.shape) == 1 and x.contiguous and "float" in x.dtype


def _list_slot_names(state: dict[int, dict[str, object]]) -> dict[int, set[str]]:
    """Return {number of a flat tensor: names of its slots} of the base optimizer's `state`."""
    return {g: set(slots) for g, slots in state.items()}


def _join_parts(
    reading: SaveReader, files: Sequence[File], flats: Sequence[Any], p: FlatPlace, path: Path
) -> TensorEntry:
    """Build the entry of a parameter, or of a slot of one, from its parts in the flat tensors of all ranks.

    Args:
        reading: the reader of the save.
        files: the optimizer file of each rank.
        flats: the flat tensor in each of them.
        p: where the parameter lies in these.
        path: the path of the entry.
    """
    dtype = flats[0].dtype
    ranges = []
    for rank, first, last, at in p.parts:
        begin = reading.keep_crc(files[rank], flats[rank]).extent[0]
        ranges.append(FlatRange(first, last, files[rank].number, begin + at * ITEMSIZE[dtype]))
    return ds.build_entry_from_ranges(p.shape, dtype, path, ranges)


def _add_masters(reading: SaveReader, optims: list[_Optim], flats: dict[str, FlatPlace]) -> None:
    """Add the masters, the fp32 copies that the optimizer updates, as the weights of all parameters that are trained.

    Args:
        reading: the reader of the save.
        optims: the optimizer file of each rank.
        flats: {parameter: where it lies in the flat tensors}.
    """
    files = [o.file for o in optims]
    for name, p in flats.items():
        reading.masters[name] = _join_parts(reading, files, [o.masters[p.group] for o in optims], p, ("model", name))


def _add_optimizer(
    reading: SaveReader, optims: list[_Optim], flats: dict[str, FlatPlace], members: list[list[str]], lengths: Any
) -> None:
    """Add the optimizer: a flat slot is cut like the masters, a step is shared by the parameters of its group.

    Args:
        reading: the reader of the save.
        optims: the optimizer file of each rank.
        flats: {parameter: where it lies in the flat tensors}.
        members: the parameters of each flat tensor, in the order of the optimizer.
        lengths: called as lengths(rank, number of the flat tensor), returns the set of lengths that a slot may have.

    Raises:
        Corrupt: the ranks contradict one another, or a slot has another length.
    """
    files = [o.file for o in optims]
    for g in sorted(optims[0].state):
        for slot, found in optims[0].state[g].items():
            if not isinstance(slot, str):
                raise Corrupt(
                    f"{files[0].what}: flat tensor {g} has an optimizer slot {short(slot)}, which is not a name.",
                    code="CKPT0417",
                )
            everyone = [o.state[g].get(slot) for o in optims]
            if not isinstance(found, StoredTensor) or not found.shape:
                entry = _read_shared_counter(reading, files, everyone, f"{slot} of flat tensor {g}")
                for name in members[g]:
                    reading.add_slot(name, slot, entry)
                continue
            for rank, (f, t) in enumerate(zip(files, everyone, strict=True)):
                if not isinstance(t, StoredTensor) or not _is_flat_float_tensor(t) or t.dtype != found.dtype:
                    raise Corrupt(
                        f"{f.what}: {slot} of flat tensor {g} is {short(t)}, unlike rank 0's.", code="CKPT0417"
                    )
                if t.shape[0] not in lengths(rank, g):
                    raise Corrupt(
                        f"{f.what}: {slot} of flat tensor {g} has {t.shape[0]} elements instead of "
                        f"{' or '.join(map(str, sorted(lengths(rank, g))))}.",
                        code="CKPT0417",
                    )
            for name in members[g]:
                path: Path = ("optim", "state", name, slot)
                reading.optim[path] = _join_parts(reading, files, everyone, flats[name], path)
    for key, x in optims[0].rest.items():
        reading.add_leaves(("optim", key), x, files[0])
    groups, step = optims[0].groups, _read_elastic_step(optims)
    reading.add_param_groups(
        files[0], [{**step, "params": [g]} for g in range(len(members))] if groups is None else groups, members
    )
    if groups is None:
        reading.notes.append(
            "elastic_checkpoint keeps no hyperparameters: learning rate, betas and so on come from the next job's own "
            "optimizer"
        )


def _read_elastic_step(optims: list[_Optim]) -> dict[str, object]:
    """Return {"step": the step that all param groups share}, which elastic_checkpoint keeps of them where the optimizer
    counts by group; {} where it has none. `optims` are the optimizer files of all ranks.

    Raises:
        Corrupt: ranks have different ones.
    """
    steps = [o.whole.get("base_optimizer_state_step") for o in optims]
    for o, step in zip(optims, steps, strict=True):
        if not ds.are_values_equal(step, steps[0], o.file, optims[0].file):
            raise Corrupt(
                f"{o.file.what}: base_optimizer_state_step is {short(step)}, rank 0 has {short(steps[0])}. The files "
                "are from different saves; fetch all of one save again.",
                code="CKPT0409",
            )
    return {} if steps[0] is None else {"step": steps[0]}


def _read_shared_counter(reading: SaveReader, files: list[File], values: list[object], what: str) -> object:
    """Return a counter on which all ranks must agree: the entry of rank 0's tensor, or the value itself if it is no
    tensor.

    Args:
        reading: the reader of the save.
        files: the optimizer file of each rank.
        values: the counter in each of them.
        what: how errors name it.

    Raises:
        Corrupt: ranks have different ones, or it is neither a tensor nor a number.
    """
    first = values[0]
    if not isinstance(first, (StoredTensor, int, float, str, type(None))):
        raise Corrupt(f"{files[0].what}: {what} is {short(first)}, neither a tensor nor a number.", code="CKPT0417")
    seen = [
        f.scalar(v) if isinstance(v, StoredTensor) and not v.shape else v for f, v in zip(files, values, strict=True)
    ]
    for f, value in zip(files, seen, strict=True):
        if not ds.are_values_equal(value, seen[0]):
            raise Corrupt(
                f"{f.what}: {what} is {short(value)}, rank 0 has {short(seen[0])}. The files are from different saves; "
                "fetch all of one save again.",
                code="CKPT0409",
            )
    return reading.whole_tensor(files[0], first, ()) if isinstance(first, StoredTensor) else first


def _read_stage3(reading: SaveReader, models: list[File]) -> Checkpoint:
    """Read a save of stage 3, whose ranks have a part of every parameter, and return its index. `models` are the model
    files, in the order of the ranks.

    Raises:
        Corrupt: files are missing, or contradict one another.
        Unsupported: the optimizer state was on NVMe.
    """
    world = len(models)
    shapes = ds.param_shapes(models[0])
    flats, lengths = partition_parameters(shapes, world)
    optims = _load_optimizer_files(reading, world, "fp32_flat_groups", "optimizer_state_dict", len(shapes))
    for o in optims:
        for g, t in enumerate(o.masters):
            if t.shape[0] == 0 and lengths[g]:
                raise Unsupported(
                    f"{o.file.what}: flat tensor {g} is empty: its optimizer state was on NVMe. {ds.OF_SWAPPED}",
                    code="CKPT0326",
                )
            if t.shape[0] != lengths[g]:
                raise Corrupt(
                    f"{o.file.what}: flat tensor {g} has {t.shape[0]} elements; the {len(shapes[g])} parameters that "
                    f"param_shapes puts into it have {lengths[g]} on each of {world} ranks. The files are of different "
                    "saves.",
                    code="CKPT0409",
                )
    _add_masters(reading, optims, flats)
    reading.add_model_state(models)
    _add_optimizer(reading, optims, flats, [list(g) for g in shapes], lambda rank, g: {lengths[g]})
    return reading.build_checkpoint("zero3", world)


def _read_stage12(reading: SaveReader, model: File, experts: Experts) -> Checkpoint:
    """Read a save of stage 1 or 2, whose ranks have a range of every param group, and return its index. `model` is its
    only model file; `experts` are those with files of their own.

    Raises:
        Corrupt: files are missing, or contradict one another.
    """
    world = model.get("dp_world_size", int)
    if world < 1 or world > 1 << 20:
        raise Corrupt(f"{model.what}: dp_world_size is {world}.", code="CKPT0406")
    lost = world - len(reading.save.files(ds.OPTIM, 2))
    if lost > 0 and reading.options.salvage:
        return _salvage_weights(reading, model, world, lost)
    stage = _add_stage12(reading, model, experts)[0]
    reading.add_model_state([model])
    return reading.build_checkpoint(f"zero{stage}", world)


def _read_pipeline(reading: SaveReader) -> Checkpoint:
    """Return the index of a save of a pipeline, each stage of which is a job of ZeRO-1 with the parameters of its
    layers.

    Raises:
        Corrupt: files are missing, or contradict one another.
        Unsupported: it is without ZeRO, or its stages have different param groups.
    """
    stages, pipeline = load_stages(reading)
    whole, members, first = reading.save, list[list[str]](), None
    known: dict[str, Any] = {}
    twice: list[str] = []
    replicas: list[Replica] = []
    for number, (model, save) in enumerate(stages):
        reading.save = save
        before = dict(reading.masters), dict(reading.optim)
        _, own, optim = _add_stage12(reading, model, Experts.none(model.get("dp_world_size", int)))
        copies = dict.fromkeys(n for g in own for n in g if n in before[0])
        twice += copies
        both = [(before[0][n], reading.masters[n]) for n in copies]
        both += [(x, reading.optim[p]) for p, x in before[1].items() if isinstance(x, TensorEntry) and p[2] in copies]
        replicas += [Replica(joined(a.path), number, a, b) for a, b in both if isinstance(b, TensorEntry)]
        reading.masters.update(before[0])  # tied layers: those of the first stage
        reading.optim.update(before[1])
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optim.groups or [{} for _ in own]]
        shared = {"param_groups": groups, "loss_scaler": ds.read_loss_scaler(optim.whole), **optim.rest}
        if first is None:
            first, known, members = optim, shared, [[] for _ in own]
        for key in known | shared:
            if not ds.are_values_equal(known.get(key), shared.get(key), first.file, optim.file):
                raise Unsupported(
                    f"{optim.file.what}: {key} differs from that of the first stage, so it is not one of the whole "
                    "model.",
                    code="CKPT0325",
                )
        members = [a + [n for n in b if n not in twice] for a, b in zip(members, own, strict=True)]
    reading.save = whole
    assert first is not None
    reading.add_model_state([model for model, _ in stages])
    reading.tensor_ranks = len(stages)  # files are numbered as theirs are
    numbered = [{**g, "params": [k]} for k, g in enumerate(first.groups or known["param_groups"])]
    reading.add_param_groups(first.file, numbered, members)
    if twice:
        reading.notes.append(
            f"{len(twice)} weights of tied layers are on several stages, first {twice[0]}: those of the first are read"
        )
    out = reading.build_checkpoint("zero1", len(stages) * stages[0].model.get("dp_world_size", int))
    out.replicas, out.pipeline = replicas, pipeline
    return out


def _add_stage12(reading: SaveReader, model: File, experts: Experts) -> tuple[int, list[list[str]], _Optim]:
    """Add the masters and the optimizer of a save of stage 1 or 2 to the reader.

    Args:
        reading: the reader of the save.
        model: the model file.
        experts: the experts that have files of their own, and which rank has which.

    Returns:
        (the stage, [names of the parameters of each param group], the optimizer file of rank 0).

    Raises:
        Corrupt: files are missing, or contradict one another.
    """
    world, shapes = experts.ranks.world, ds.param_shapes(model)
    optims = _load_optimizer_files(
        reading, world, "single_partition_of_fp32_groups", "base_optimizer_state", len(shapes), experts
    )
    replicas = experts.check_groups(optims[0].file.what, shapes, optims[0].whole["partition_count"])
    parts, paddings = _compute_part_sizes(optims, shapes, replicas)
    flats = experts.place(shapes, parts, paddings, replicas, model.what)
    if experts.counts or experts.stacked:
        _check_expert_parts(optims, flats, experts, replicas)
    raw = [sum(map(prod, s.values())) + sum(paddings[g]) for g, s in enumerate(shapes)]

    def lengths(rank: int, g: int) -> set[int]:
        """Return the lengths that a flat tensor of a rank may have: with the padding at the end of the group, and
        without."""
        part = experts.ranks.split(rank, replicas[g])[1]
        return {parts[g], max(0, min(parts[g], raw[g] - part * parts[g]))}

    for rank, o in enumerate(optims):
        for g, t in enumerate(o.masters):
            if t.shape[0] not in lengths(rank, g):
                raise Corrupt(
                    f"{o.file.what}: flat tensor {g} has {t.shape[0]} elements; the {len(shapes[g])} parameters that "
                    f"param_shapes puts into it leave {' or '.join(map(str, sorted(lengths(rank, g))))} for rank "
                    f"{rank} of {world}. The files are from different saves.",
                    code="CKPT0409",
                )
    _add_masters(reading, optims, flats)
    members = [
        experts.members(
            _order_group_members(reading, optims, g, list(s), model.get("module", dict)), world // replicas[g]
        )
        for g, s in enumerate(shapes)
    ]
    _add_optimizer(reading, optims, flats, members, lengths)
    # BF16_Optimizer states no stage; it is what stage 1 is with fp32 gradients
    stage = optims[0].whole.get("zero_stage", 1)
    return stage if stage in (1, 2) else 1, members, optims[0]


def _salvage_weights(reading: SaveReader, model: File, world: int, lost: int) -> Checkpoint:
    """Return the index of a damaged save of stage 1 or 2 without its optimizer.

    Its weights are those that the engine computes with, which the model file has completely. Every rank's optimizer
    file has a part of each master and slot, so none of these is complete where `lost` of the `world` files are missing.
    """
    reading.add_model_state([model])
    out = reading.build_checkpoint("zero1", world)
    why = f"{lost} of the {world} optimizer files are lost, and each has a part of everything in it"
    out.salvage = Salvage([why], {"optim": why})
    trained = {n for group in ds.param_shapes(model) for n in group}
    trained |= {alias for alias, owner in ds.read_tied_names([model]).items() if owner in trained}
    for name, t in out.tensors.items():
        # of experts, param_shapes has those of rank 0
        local = EXPERT_NAME.sub(r"\1.0.\3", str(t.path[-1]))
        if t.path[0] == "model" and local in trained and t.dtype in ("bfloat16", "float16"):
            out.salvage.rebuilt[name] = f"the {t.dtype} weight that the engine computes with; its fp32 master is lost"
    return out


def _order_group_members(
    reading: SaveReader, optims: list[_Optim], g: int, shapes: list[str], module: dict[str, object]
) -> list[str]:
    """Return the parameters of group `g` in the order of the optimizer; a note is added if param_shapes has another
    order.

    round_robin_gradients shuffles them in the flat tensor, and param_shapes with them; param_slice_mappings keep the
    order the optimizer was given, which is what the next engine will have.

    Args:
        reading: the reader of the save.
        optims: the optimizer file of each rank.
        g: the number of the group.
        shapes: its names in param_shapes, in their order.
        module: the state dict in the model file, in the order of the model.
    """
    listed: dict[str, None] = {}
    for o in optims:
        found = o.whole.get("param_slice_mappings")
        own = found[g] if isinstance(found, list) and len(found) > g else None
        listed.update(dict.fromkeys(own if isinstance(own, dict) else ()))
    known = listed.keys() == set(shapes)
    if list(listed) == shapes or not (
        known or ds.get_zero_setting(optims[0].file.tree.get("ds_config"), "round_robin_gradients")
    ):
        return shapes
    reading.notes.append(
        f"the parameters of group {g} lie shuffled (round_robin_gradients); their order is taken from "
        + ("param_slice_mappings" if known else "the module")
    )
    return list(listed) if known else [n for n in module if n in set(shapes)]


def _check_expert_parts(
    optims: list[_Optim], flats: dict[str, FlatPlace], experts: Experts, replicas: list[int]
) -> None:
    """Check that the parts that param_slice_mappings list for each rank are those of its expert parallel rank.

    With round_robin_gradients, which makes these lists wrong, nothing is checked.

    Args:
        optims: the optimizer file of each rank.
        flats: {parameter: its place in the flat tensors}.
        experts: the experts of the save.
        replicas: for each group, the number of ranks that partition it.

    Raises:
        Corrupt: a rank lists other parts.
    """
    if ds.get_zero_setting(optims[0].file.tree.get("ds_config"), "round_robin_gradients"):
        return
    for rank, o in enumerate(optims):
        found = o.whole.get("param_slice_mappings")
        for g, size in enumerate(len(optims) // n for n in replicas):
            own = found[g] if isinstance(found, list) and len(found) > g else None
            if not isinstance(own, dict):
                continue
            expert_rank = experts.ranks.split(rank, replicas[g])[0]
            there = {n for n, p in flats.items() if p.group == g and any(r == rank for r, *_ in p.parts)}
            named = [experts.global_name(n, expert_rank, size) for n in own if isinstance(n, str)]
            if len(named) != len(own) or set(named) != there:
                raise Corrupt(
                    f"{o.file.what}: rank {rank} lists other parts of flat tensor {g} than those of expert parallel "
                    f"rank {expert_rank} of {size}. The files were exchanged, or are of different saves.",
                    code="CKPT0409",
                )


def _compute_part_sizes(optims: list[_Optim], shapes: Groups, replicas: list[int]) -> tuple[list[int], list[list[int]]]:
    """Return ([elements of one rank's part of each group], [padding elements after each parameter, for each group]).

    Args:
        optims: the optimizer file of each rank.
        shapes: [{name: shape}], the parameters in each group.
        replicas: for each group, the number of ranks that partition it.

    Raises:
        Corrupt: the parts are too long for the parameters, or the paddings are of another form or differ between ranks.
    """
    whole = optims[0].whole
    key = "param_alignment_paddings"
    stated = whole.get(key) or [[0] * len(s) for s in shapes]
    if any(o.whole.get(key) != whole.get(key) for o in optims):
        raise Corrupt(
            f"{optims[0].file.what}: {key} differs between ranks. The files are from different saves.", code="CKPT0409"
        )
    if (
        not isinstance(stated, list)
        or not all(isinstance(p, list) and all(type(k) is int and k >= 0 for k in p) for p in stated)
        or [len(p) for p in stated] != [len(s) for s in shapes]
    ):
        raise Corrupt(f"{optims[0].file.what}: {key} is {short(stated)}.", code="CKPT0406")
    parts = []
    for g, group in enumerate(shapes):
        raw = sum(map(prod, group.values())) + sum(stated[g])
        part = elements_per_rank(raw, replicas[g])
        have = max(o.masters[g].shape[0] for o in optims)
        if have > part:
            raise Corrupt(
                f"{optims[0].file.what}: a rank holds {have} elements of flat tensor {g}, but the {len(group)} "
                f"parameters that param_shapes puts into it are {raw}, {part} a rank. The files are from different "
                "saves.",
                code="CKPT0409",
            )
        parts.append(part)
    return parts, stated


def _read_stage0(reading: SaveReader, model: File) -> Checkpoint:
    """Read a save without ZeRO, and return its index: everything is in one model file, the optimizer with numbers for
    parameters.

    Raises:
        Corrupt: the file is damaged, or another program changed it.
        Unsupported: the masters are flat, in an order that the file does not hold.
    """
    if "optimizer" not in model.tree:
        raise Corrupt(
            f'{model.what} has no "optimizer", which DeepSpeed writes into every file of model states and its engine '
            "asks for. The file is damaged, or another program changed it; fetch it again.",
            code="CKPT0406",
        )
    found = model.tree["optimizer"]
    if isinstance(found, dict):
        reading.add_leaves(("scaler",), ds.read_stage0_scaler(found), model)
    reading.add_model_state([model])
    if found is None:
        return reading.build_checkpoint("zero0", None)
    state = model.get("optimizer", dict)
    inner = model.get("optimizer_state_dict", dict, state) if "optimizer_state_dict" in state else state
    model.get("state", dict, inner)  # there, or the file is damaged
    reading.add_leaves(("optim",), inner, model)
    masters = state.get("fp32_groups")
    if masters is None and "fp32_groups_flat" in state:
        raise Unsupported(
            f"{model.what}: flat masters of a fused fp16 optimizer, whose order the file does not hold.",
            code="CKPT0327",
        )
    if masters is None and "optimizer_state_dict" in state:  # deepspeed/runtime/fp16/unfused_optimizer.py, state_dict
        raise Corrupt(
            f"{model.what}: the optimizer has no fp32_groups, the masters that DeepSpeed writes beside its "
            "optimizer_state_dict. The file is damaged, or another program changed it; fetch it again.",
            code="CKPT0417",
        )
    aliases = ds.read_tied_names([model])
    own = [n for n in reading.model if n not in set(model.tree.get("buffer_names") or ()) | aliases.keys()]
    groups = model.get("param_groups", list, inner)
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups) or any(
        type(k) is not int for g in groups for k in g["params"]
    ):
        raise Corrupt(f"{model.what}: its param_groups are not those of a torch optimizer.", code="CKPT0417")
    numbered = [k for g in groups for k in g["params"]]
    # one group of all parameters is in the order of the module; several are told apart by shapes
    like = tuple(own) if len(groups) == 1 and len(numbered) == len(own) else None
    out = reading.build_checkpoint("zero0", model.get("dp_world_size", int), like)
    if masters is not None:
        _replace_weights_by_masters(out, reading, model, masters)
    _share_steps_of_fused_adam(out)
    return out


def _share_steps_of_fused_adam(out: Checkpoint) -> None:
    """Give all parameters of a group of FusedAdam the step that their job computed with, in the index `out`.

    FusedAdam counts in the state of the last parameter of a group that had a gradient, and hands that to the kernel for
    all of them; the others keep the step they began with (deepspeed/ops/adam/fused_adam.py, step).
    """
    shared: dict[str, int] = {}
    for v in list(out.values.values()):
        if v.option != "params" or out.value(joined((*v.path[:3], "bias_correction"))) is None:
            continue
        names = [joined(("optim", "state", fqn, "step")) for fqn in v.data]
        steps = [(n, data) for n in names if type(data := out.value(n)) is int]
        if len(steps) > 1 and steps[-1][1] > max(data for _, data in steps[:-1]):
            shared |= {n: steps[-1][1] for n, _ in steps[:-1]}
    out.values |= {n: out.values[n]._replace(data=step) for n, step in shared.items()}
    if shared:
        out.notes.append(
            f"{count_noun(len(shared), 'parameter')} of FusedAdam have the step of the last one of their group, with "
            "which the job computed: it counts there alone"
        )


def _replace_weights_by_masters(out: Checkpoint, reading: SaveReader, model: File, masters: Any) -> None:
    """Replace the weights in the index `out` by their masters, the fp32 copies that a stage 0 bf16 engine has in its
    optimizer.

    `masters` is [[tensor]], in the order of the param groups.

    Raises:
        Corrupt: they do not fit the param groups or the shapes of the weights.
    """
    params = [
        v.data for v in out.values.values() if v.path[:2] == ("optim", "param_groups") and v.path[3:] == ("params",)
    ]
    lists = isinstance(masters, list) and all(isinstance(m, list) for m in masters)
    if not lists or [len(m) for m in masters] != [len(p) for p in params]:
        raise Corrupt(f"{model.what}: fp32_groups does not fit the param groups.", code="CKPT0417")
    for names, tensors in zip(params, masters, strict=True):
        for name, t in zip(names, tensors, strict=True):
            old = out.tensors.get(f"model.{name}")
            if old is None or not isinstance(t, StoredTensor) or t.shape != old.shape:
                raise Corrupt(
                    f'{model.what}: the master of "{name}" in fp32_groups has another shape than its weight.',
                    code="CKPT0417",
                )
            out.tensors[f"model.{name}"] = reading.whole_tensor(model, t, old.path)
            out.rounded[f"model.{name}"] = old
    for alias, owner in ds.read_tied_names([model]).items():
        if f"model.{owner}" in out.tensors:
            out.tensors[f"model.{alias}"] = replace(out.tensors[f"model.{owner}"], path=("model", alias))
    out.records = Records(reading.files.records.values())
    out.notes.append(DERIVED)
