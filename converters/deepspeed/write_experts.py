"""Where the experts of DeepSpeed's MoE layers go when zero1 and zero2 are written (deepspeed/experts.py describes the
files), and what no layout of DeepSpeed's is written for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import groupby

from ckpttool.engine.flat.split_state import ParamGroup, Training
from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.index.checkpoint import Checkpoint, TensorEntry

from .experts import AUTOEP, EXPERT_NAME, GROUP_NAME, ExpertRanks, Experts, Placements, parse_autoep_layers
from .files import LAYER
from .geometry import Groups
from .tensor_cuts import INFO, cut_equally, encode_cut
from .write_common import SavePlan

#: An engine divides a param group of experts that has more elements on a rank (deepspeed 0.19.8, moe/utils.py,
#: split_params_into_different_moe_groups_for_optimizer).
MOST_IN_GROUP = 178956971

__all__ = ["MOST_IN_GROUP", "plan_experts", "refuse_experts", "refuse_pipeline", "to_local_groups"]


def refuse_pipeline(ckpt: Checkpoint) -> None:
    """Refuse a save of a pipeline, whose engine loads weights by layer and the optimizer by stage.

    Raises:
        Unsupported: it is one.
    """
    if any(LAYER.fullmatch(n.rpartition("/")[2]) for n in ckpt.files):
        raise Unsupported(
            "the source is a pipeline of DeepSpeed, whose engine would not load a save of one model: it asks for files "
            "of layers, and for the optimizer of the layers that the job gives each stage. Write zero1, which has "
            "these; dcp, full and hf keep the state under the names of the layers.",
            code="CKPT0316",
        )


def refuse_experts(state: Training, asked: int | None, layout: str) -> None:
    """Refuse a state with experts of DeepSpeed's MoE layers or of AutoEP, or an expert parallel size, for a layout
    without experts.

    Args:
        state: the state to write.
        asked: the expert parallel size that the user gave; None: none.
        layout: how errors name what is to be written.

    Raises:
        Unsupported: the state has such experts.
        UsageError: a size was given.
    """
    if name := next((n for n in state.tensors if EXPERT_NAME.fullmatch(n)), None):
        raise Unsupported(
            f'"{name}" is of an expert of one of DeepSpeed\'s MoE layers, and {layout} has no place for experts on '
            "several ranks. Write zero1 or zero2.",
            code="CKPT0316",
        )
    if state.rest.get(AUTOEP):
        raise Unsupported(
            f"the experts of the source are stacks, as AutoEP trains them, and {layout} has no place for experts on "
            "several ranks. Write zero1 or zero2.",
            code="CKPT0316",
        )
    if asked is not None:
        raise UsageError(f"{argument('expert_parallel', asked)} is for zero1 and zero2.", code="CKPT0203")


def plan_experts(plan: SavePlan, world: int, asked: int | None) -> tuple[Experts, list[int]]:
    """Plan which rank has which expert, and name the param groups of experts so that an engine finds their ranks.

    Args:
        plan: what all files of the save have in common; the options of its param groups are changed.
        world: the number of ranks.
        asked: the expert parallel size; None: that of the source, or 1.

    Returns:
        (the experts; for each param group, the number of ranks that partition it).

    Raises:
        Unsupported: DeepSpeed cannot train the experts in these param groups, or would not load them unchanged.
        UsageError: the size does not divide the ranks or the experts.
    """
    state = plan.state
    counts: dict[str, int] = {}
    names = [n for n in state.tensors if EXPERT_NAME.fullmatch(n)]
    for name in names:
        if m := EXPERT_NAME.fullmatch(name):
            counts[m[1]] = max(counts.get(m[1], 0), int(m[2]) + 1)
    stacked = _plan_stacks(plan, world, asked)
    experts = Experts(ExpertRanks(world, plan.data_first), counts, names, stacked)
    there = {*names, *stacked}
    if stack := next((n for g in state.groups if g.options.get("moe") for n in g.params if n not in there), None):
        raise Unsupported(
            f'"{stack}" is a stack of experts, as AutoEP trains them, and the state has no {AUTOEP}, by which an '
            "engine finds its layer: convert the save of the AutoEP job itself. The state can be written as dcp, full "
            "or hf.",
            code="CKPT0316",
        )
    if not there:
        refuse_experts(state, asked, "a model without experts")
        return experts, [world] * len(state.groups)
    if counts and stacked:
        raise Unsupported(
            "some experts are modules and others stacks, as AutoEP trains them, and no file says which layer is "
            "which. The state can be written as dcp, full or hf.",
            code="CKPT0316",
        )
    _refuse_unsupported_experts(plan, counts, [*names, *stacked])
    if counts:
        plan.rest["num_experts"] = list(counts.values())
    of_experts = [g for g in state.groups if there & set(g.params)]
    for _, run in groupby(of_experts, lambda g: g.options):
        _refuse_other_groups(experts, list(run), asked or 0, plan.tensors)
    replicas = []
    for g, group in enumerate(state.groups):
        mine = [n for n in group.params if n in there]
        if not mine:
            replicas.append(world)
            continue
        if len(mine) != len(group.params):
            raise Unsupported(
                f'param group {g} has "{mine[0]}", which is an expert\'s, and weights that are not. DeepSpeed '
                "trains them in groups of their own (configure_moe_param_groups).",
                code="CKPT0316",
            )
        known = GROUP_NAME.fullmatch(str(group.options.get("name")))
        size = len(next(iter(stacked.values()), ())) or asked or (int(known[1]) if known else 1)
        _refuse_unequal_parts(size, world, counts.values())
        group.options.update(moe=True, name=f"ep_size_{size}")
        replicas.append(world // size)
    before = {
        n.data for k, n in plan.ckpt.values.items() if k.startswith("optim.param_groups.") and k.endswith(".name")
    }
    after = {g.options.get("name") for g in state.groups}
    if new := sorted(str(n) for n in after - before):
        plan.about_groups = f"groups of experts have the name of their ranks, {', '.join(new)}"
    return experts, replicas


def _refuse_other_groups(
    experts: Experts, run: list[ParamGroup], size: int, tensors: Mapping[str, TensorEntry]
) -> None:
    """Refuse param groups of experts that an engine of another expert parallel size divides elsewhere.

    Args:
        experts: the experts of the job that will load them.
        run: param groups one after the other with the same options, those of the source.
        size: the expert parallel size of the job; 0: that of the source.
        tensors: {name: weight}.

    Raises:
        Unsupported: the source has the groups that its engine made, and the job has others.
    """
    known = GROUP_NAME.fullmatch(str(run[0].options.get("name")))
    before = int(known[1]) if known else 0
    if not size or not before or any(n % before for n in experts.counts.values()):
        return

    def divide(groups: list[ParamGroup], size: int) -> list[int]:
        """Return how many parameters of a rank are in each group that an engine makes of these."""
        out, elements = [0], 0
        for n in (n for g in groups for n in g.params if experts.local_name(n, size)[0] == 0):
            mine = tensors[n].numel // (size if n in experts.stacked else 1)
            if out[-1] and elements + mine > MOST_IN_GROUP:
                out, elements = [*out, 0], 0
            out[-1] += 1
            elements += mine
        return out

    made, fits = (divide(run, n) == [sum(divide([g], n)) for g in run] for n in (before, size))
    if made and not fits:
        raise Unsupported(
            f"with {argument('expert_parallel', size)} an engine divides the experts into other param groups than "
            f"those of the source, since DeepSpeed begins another one at {MOST_IN_GROUP:,} elements on a rank. Give a "
            f"save of the job that will load it, of any step, with {argument('like')}, and "
            f"{argument('regroup', True)}.",
            code="CKPT0316",
        )


def _refuse_unequal_parts(size: int, world: int, counts: Collection[int]) -> None:
    """Refuse an expert parallel size that does not divide `world`, the number of ranks, and `counts`, the numbers of
    experts of the layers; raise UsageError."""
    if world % size or any(n % size for n in counts):
        raise UsageError(
            f"{argument('expert_parallel', size)} for {world} ranks and layers of "
            f"{', '.join(map(str, sorted(set(counts))))} experts; it must divide both.",
            code="CKPT0203",
        )


def _plan_stacks(plan: SavePlan, world: int, asked: int | None) -> Placements:
    """Plan which rank has which experts of AutoEP's layers, as an engine places them: one after the other.

    Args:
        plan: what all files of the save have in common; its `stacks`, and what it says of AutoEP, are changed.
        world: the number of ranks.
        asked: the expert parallel size; None: that of the source.

    Returns:
        {name of a stack: the experts of each expert parallel rank}; {} if the state is not of AutoEP.

    Raises:
        Corrupt: what the state says of AutoEP has another form than DeepSpeed's.
        Unsupported: a stack is missing, or has another shape.
        UsageError: the size does not divide the ranks or the experts.
    """
    stated, counts = plan.rest.get(AUTOEP), plan.rest.get("num_experts")
    if not isinstance(stated, list) or not isinstance(counts, list) or not all(type(n) is int for n in counts):
        return {}
    layers = parse_autoep_layers(plan.ckpt.root, stated, counts)
    size = asked or max((len(placement) for _, placement in layers.values()), default=1)
    _refuse_unequal_parts(size, world, counts)
    out, entries, info = Placements(), [], plan.rest.get(INFO)
    for entry in stated:
        layer = entry["moe_layer_id"]
        (prefix, _), count, local = layers[layer], counts[layer], counts[layer] // size
        own = [f"{prefix}.{w}" for w in ("w1", "w2", "w3")]
        shapes = {n: plan.tensors[n].shape if n in plan.tensors else () for n in own}
        if odd := next((n for n, s in shapes.items() if len(s) != 3 or s[0] != count), None):
            raise Unsupported(
                f'{AUTOEP} says that "{odd}" is a stack of {count} experts, and it is '
                f"{list(shapes[odd]) if shapes[odd] else 'missing'}. The state can be written as dcp, full or hf.",
                code="CKPT0316",
            )
        placement = [list(range(r * local, (r + 1) * local)) for r in range(size)]
        out |= dict.fromkeys(own, placement)
        plan.stacks[layer] = own
        cuts = {n: cut_equally(s, 0, [count], size) for n, s in shapes.items()}
        ranks = [{"rank": r, "experts": mine} for r, mine in enumerate(placement)]
        entries.append(
            {
                **entry,
                "num_local_experts": local,
                "ep_size": size,
                "expert_placement": {"version": 1, "num_experts": count, "ep_size": size, "ranks": ranks},
                "affine_maps": {"version": 1, "params": {n: encode_cut(c) for n, c in cuts.items() if c is not None}},
                "ep_group_name": f"ep_size_{size}",
                "ep_rank": 0,
                "expert_data_parallel_rank": 0,
                "expert_data_parallel_world_size": world // size,
                "global_expert_start": 0,
                "global_expert_end": local,
            }
        )
    plan.rest[AUTOEP] = entries
    if isinstance(info, dict) and AUTOEP in info:
        plan.rest[INFO] = {**info, AUTOEP: entries}
    if isinstance(section := plan.ds_config.get("expert_parallel"), dict):
        plan.ds_config = {**plan.ds_config, "expert_parallel": {**section, "autoep_size": size}}
    return out


def _refuse_unsupported_experts(plan: SavePlan, counts: dict[str, int], names: list[str]) -> None:
    """Refuse experts that an engine of DeepSpeed would not load unchanged.

    Args:
        plan: what all files of the save have in common.
        counts: {layer: number of experts}.
        names: the names of all tensors of experts.

    Raises:
        Unsupported: a tensor is missing, is tied, or is frozen at stage 2.
    """
    state, there = plan.state, set(names)
    for name in names:
        m = EXPERT_NAME.fullmatch(name)
        lost = [e for e in range(counts[m[1]]) if f"{m[1]}.{e}.{m[3]}" not in there] if m else []
        if m and lost:
            raise Unsupported(
                f'expert {lost[0]} of "{m[1]}" has no "{m[3]}", and others have. All experts of a layer are copies of '
                "one module.",
                code="CKPT0316",
            )
    if tied := next((n for kv in state.tied.items() for n in kv if n in there), None):
        raise Unsupported(f'"{tied}" is tied to another weight, which files of experts cannot say.', code="CKPT0316")
    if plan.stage == 2 and (frozen := next((n for n in state.frozen if n in there), None)):
        raise Unsupported(
            f'"{frozen}" is frozen, and an engine of stage 2 loads the frozen experts of rank 0 on every rank. Write '
            "zero1.",
            code="CKPT0316",
        )


def to_local_groups(experts: Experts, groups: Groups, replicas: list[int]) -> Groups:
    """Return [{name on a rank: shape}], the parameters of each param group with the names that every rank gives them.

    Args:
        experts: which rank has which expert.
        groups: [{name in the whole model: shape}] of each param group.
        replicas: for each param group, the number of ranks that partition it.

    Raises:
        Unsupported: expert parallel ranks would have different parameters, or in different orders.
    """
    out: Groups = []
    for g, group in enumerate(groups):
        size = experts.ranks.world // replicas[g]
        found: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(size)]
        for name, shape in group.items():
            for rank, mine in enumerate(experts.stacked.get(name, ())):
                found[rank].append((name, (len(mine), *shape[1:])))
            if name not in experts.stacked:
                rank, local = experts.local_name(name, size)
                found[rank].append((local, shape))
        if odd := next((r for r, own in enumerate(found) if own != found[0]), None):
            raise Unsupported(
                f"param group {g} has other experts' parameters for expert parallel rank {odd} than for rank 0, or in "
                "another order. DeepSpeed trains the same of every expert of a layer.",
                code="CKPT0316",
            )
        out.append(dict(found[0]))
    return out
