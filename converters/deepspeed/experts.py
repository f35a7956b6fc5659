"""Experts of DeepSpeed's MoE layers, which a save of stage 0, 1 or 2 keeps in files of their own.

    DIR/<tag>/layer_<l>_expert_<e>_mp_rank_00_model_states.pt   one expert of the l-th MoE layer: its state dict
    DIR/<tag>/expp_rank_<r>_mp_rank_00_optim_states.pt          stage 0: the optimizer of expert parallel rank r

The ranks of a job are divided into expert parallel groups of N ranks (`ep_size`), and of E experts each rank of a group
has E / N. In its optimizer an expert has the number that it has on its rank; in its own file, and in the names here,
that among all of the layer:

    <layer>.deepspeed_moe.experts.deepspeed_experts.<number>.<parameter>

Expert n of rank r is expert r * E / N + n. Experts of different ranks thus have the same names in param_shapes, and
each param group with experts ("moe": True, "name": "ep_size_<N>") is partitioned over the W / N ranks that have the
same ones; partition_count has that number for each group. Rank r of W is rank r % N of its expert parallel group and
has part r // N; with use_data_before_expert_parallelism, rank r // (W / N) and part r % (W / N).

The model file has no experts, `num_experts` is the number of them in each MoE layer. DeepSpeed's ds_to_universal.py
joins what has one name on several ranks: of MoE layers on more than one expert parallel rank it reads the parts of
different experts as one tensor and stops ("shape ... is invalid for input of size", 0.19.8), and before
deepspeedai/DeepSpeed#8198 it left the moments of AutoEP's experts stale (issue #8147).

AutoEP has a stack of the experts in place of modules: `<module>.experts.w1` is [E, ...] in the model and [E / N, ...]
on a rank, in param_shapes and in the optimizer; the file of expert e has `<module>.experts.w1.<e>`. Its layers are in
ds_autoep_layers, with the experts of each rank (expert_placement).

Sources: deepspeed 0.19.8, runtime/engine.py (_save_moe_checkpoint, load_moe_state_dict), utils/groups.py
(_create_expert_and_data_parallel), runtime/zero/stage_1_and_2.py (_configure_moe_settings), moe/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index.checkpoint import Checkpoint
from ckpttool.index.optimizer_names import assign_names

from .files import (
    EXPERT,
    EXPERT_OPTIM,
    File,
    FlatRange,
    are_values_equal,
    build_entry_from_ranges,
    read_stage0_scaler,
)
from .geometry import FlatPlace, Groups, concatenate_parameters
from .module_state import SaveReader

__all__ = [
    "AUTOEP",
    "DATA_FIRST",
    "EXPERT_NAME",
    "GROUP_NAME",
    "ExpertRanks",
    "Experts",
    "Placements",
    "parse_autoep_layers",
    "read_expert_files",
    "read_stage0_experts",
]

#: (layer, number, parameter) of an expert's parameter.
EXPERT_NAME = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts)\.(\d+)\.(.+)")
#: The name of a param group of experts on so many ranks.
GROUP_NAME = re.compile(r"ep_size_(\d+)")
#: In a model file: the layers of AutoEP.
AUTOEP = "ds_autoep_layers"
#: In ds_config: the ranks with the same experts are neighbours.
DATA_FIRST = "use_data_before_expert_parallelism"


class ExpertRanks(NamedTuple):
    """How the ranks of a job share experts: `world` ranks; `data_first`, whether those with the same experts are
    neighbours."""

    world: int
    data_first: bool

    def split(self, rank: int, replicas: int) -> tuple[int, int]:
        """Return (expert parallel rank, number of the optimizer partition) of a rank.

        Args:
            rank: the rank in the job.
            replicas: the number of ranks that have the same experts, and among which the optimizer state of these is
                partitioned.
        """
        if self.data_first:
            return divmod(rank, replicas)
        part, expert_rank = divmod(rank, self.world // replicas)
        return expert_rank, part

    def join(self, expert_rank: int, part: int, replicas: int) -> int:
        """Return the rank in the job that holds a partition of some experts' optimizer state; the inverse of `split`.

        Args:
            expert_rank: the expert parallel rank that has the experts.
            part: the number of the partition.
            replicas: the number of ranks that have the same experts, and among which the optimizer state of these is
                partitioned.
        """
        return expert_rank * replicas + part if self.data_first else part * (self.world // replicas) + expert_rank


#: {name of a stack of experts: the experts of each expert parallel rank, in the order of its stack}.
Placements = dict[str, list[list[int]]]


class Experts:
    """The experts of a save: how many each layer has, and which rank has which."""

    def __init__(self, ranks: ExpertRanks, counts: dict[str, int], names: list[str], stacked: Placements) -> None:
        """Describe the experts.

        Args:
            ranks: how the ranks share them.
            counts: {layer, as its experts' names begin: number of experts}.
            names: what the experts have, as it is called in the whole model, in the order of the module.
            stacked: which experts are in the stack of each expert parallel rank, by the name of the stack.
        """
        self.ranks, self.counts, self.names, self.stacked = ranks, counts, names, stacked

    @classmethod
    def none(cls, world: int) -> Experts:
        """Return the experts of a job of `world` ranks that has none."""
        return cls(ExpertRanks(world, False), {}, [], {})

    def global_name(self, name: str, expert_rank: int, size: int) -> str:
        """Return the name in the whole model of a parameter that a rank calls `name`; `name` itself if it is not an
        expert's.

        Args:
            name: the name on the rank.
            expert_rank: the rank's number in its expert parallel group.
            size: the number of ranks in such a group.
        """
        m = EXPERT_NAME.fullmatch(name)
        if m is None or m[1] not in self.counts:
            return name
        return f"{m[1]}.{int(m[2]) + expert_rank * self.counts[m[1]] // size}.{m[3]}"

    def local_name(self, name: str, size: int) -> tuple[int, str]:
        """Return (expert parallel rank that has the parameter `name` of the whole model, the parameter's name on that
        rank).

        `size` is the number of ranks in an expert parallel group. If the parameter is not an expert's: (0, `name`).
        """
        m = EXPERT_NAME.fullmatch(name)
        if m is None or m[1] not in self.counts:
            return 0, name
        expert_rank, number = divmod(int(m[2]), self.counts[m[1]] // size)
        return expert_rank, f"{m[1]}.{number}.{m[3]}"

    def members(self, names: Sequence[str], size: int) -> list[str]:
        """Return the names in the whole model of a param group's parameters on all expert parallel ranks.

        They are in the order of the module if every rank's group has them in that order, else rank by rank.

        Args:
            names: the group's parameters, by the names that each rank gives them.
            size: the number of ranks in an expert parallel group.
        """
        out = list(dict.fromkeys(self.global_name(n, r, size) for r in range(size) for n in names))
        wanted = set(out)
        ordered = [n for n in self.names if n in wanted]
        first = [n for r, n in (self.local_name(n, size) for n in ordered) if r == 0]
        return ordered if first == list(names) else out

    def place(
        self, shapes: Groups, parts: list[int], paddings: list[list[int]] | None, replicas: list[int], what: str
    ) -> dict[str, FlatPlace]:
        """Place the parameters of all ranks in the flat tensors of stages 1 and 2; return {name in the whole model:
        place}.

        Args:
            shapes: [{name on a rank: shape}], the parameters in each flat tensor.
            parts: for each flat tensor, the number of its elements that one rank holds.
            paddings: for each flat tensor, the number of padding elements after each parameter; None: no padding.
            replicas: for each flat tensor, the number of ranks that partition it.
            what: names the model file in messages.

        Raises:
            Corrupt: the model file gives a stack another number of experts than there are files of.
        """
        out: dict[str, FlatPlace] = {}
        local = concatenate_parameters(shapes, parts, paddings)
        for g, group in enumerate(shapes):
            size = self.ranks.world // replicas[g]
            for expert_rank in range(size):
                for name in group:
                    p = self._place_in_stack(local[name], name, expert_rank, what)
                    cuts = [
                        (self.ranks.join(expert_rank, part, replicas[g]), first, last, at)
                        for part, first, last, at in p.parts
                    ]
                    known = out.get(whole := self.global_name(name, expert_rank, size))
                    out[whole] = FlatPlace(g, p.shape, (known.parts if known else []) + cuts)
        return out

    def _place_in_stack(self, p: FlatPlace, name: str, expert_rank: int, what: str) -> FlatPlace:
        """Return the place of a rank's tensor within the stack of all experts; `p` itself if `name` is not a stack of
        experts.

        Args:
            p: the place of the rank's own tensor.
            name: its name.
            expert_rank: the rank's number in its expert parallel group.
            what: names the model file in messages.

        Raises:
            Corrupt: the model file gives the tensor another number of experts than the files of experts are.
        """
        if name not in self.stacked:
            return p
        own = self.stacked[name][expert_rank]
        if p.shape[:1] != (len(own),):
            raise Corrupt(
                f'{what}: param_shapes gives the stack of experts "{name}" the shape {list(p.shape)} on each rank, and '
                f"there are files of {len(own)} experts for it. The files are of different saves, or damaged.",
                code="CKPT0409",
            )
        one = prod(p.shape[1:])
        cuts = []
        for rank, first, last, at in p.parts:
            while first < last:
                k, inside = divmod(first, one)
                end = min(last, (k + 1) * one)
                begin = own[k] * one + inside
                cuts.append((rank, begin, begin + end - first, at))
                at, first = at + end - first, end
        return FlatPlace(p.group, (sum(map(len, self.stacked[name])), *p.shape[1:]), cuts)

    def check_groups(self, what: str, shapes: Groups, replicas: object) -> list[int]:
        """Check partition_count of an optimizer file; return it as a list: the number of ranks that partition each flat
        tensor.

        Args:
            what: the path of the file, for errors.
            shapes: [{name on a rank: shape}], the parameters in each flat tensor.
            replicas: partition_count, as the file has it.

        Raises:
            Corrupt: it does not fit the number of ranks, or a layer's experts on a rank are not those that follow from
                it.
        """
        world = self.ranks.world
        found = [replicas] * len(shapes) if type(replicas) is int else replicas
        if (
            not isinstance(found, list)
            or len(found) != len(shapes)
            or not all(type(n) is int and 0 < n <= world and not world % n for n in found)
        ):
            raise Corrupt(
                f"{what}: partition_count is {short(replicas)}, the save is of {world} ranks and {len(shapes)} param "
                "groups. The files are of different saves.",
                code="CKPT0409",
            )
        for g, group in enumerate(shapes):
            size = world // found[g]
            mine = [n for n in group if EXPERT_NAME.fullmatch(n) or len(self.stacked.get(n, [])) == size]
            if size > 1 and (dense := next((n for n in group if n not in set(mine)), None)):
                raise Corrupt(
                    f"{what}: flat tensor {g} is partitioned over {found[g]} of {world} ranks, as experts are, and has "
                    f'"{dense}", which is no expert\'s.',
                    code="CKPT0412",
                )
        # a large group is divided into several
        for size in {world // n for n in found}:
            names = [n for g, group in enumerate(shapes) for n in group if world // found[g] == size]
            for layer, numbers in _group_expert_numbers(names).items():
                have = self.counts.get(layer, 0)
                if have % size or any(n != set(range(have // size)) for n in numbers.values()):
                    raise Corrupt(
                        f'{what}: the param groups have other experts of "{layer}" than the {have} that have files '
                        f"leave for each of {size} expert parallel ranks. The files are of different saves.",
                        code="CKPT0409",
                    )
        return found


def _group_expert_numbers(names: Iterable[str]) -> dict[str, dict[str, set[int]]]:
    """Return {layer: {parameter: set of the numbers of the experts that have it}} of the experts' names among
    `names`."""
    out: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if m := EXPERT_NAME.fullmatch(name):
            out.setdefault(m[1], {}).setdefault(m[3], set()).add(int(m[2]))
    return out


# ------------------------------------------------------------------------------------------------- files of experts


def read_expert_files(reading: SaveReader, model: File) -> Experts:
    """Read the files of all experts, and add their entries to `module` of the model file; return the description of
    them.

    Args:
        reading: the reader of the save.
        model: the model file, which is changed: its `module` becomes that of the whole model.

    Raises:
        Corrupt: a file is missing, or has an entry that is not its expert's.
        Unsupported: an expert's weight is tied to another, or an expert of AutoEP is on several ranks or on none.
    """
    found: dict[int, dict[int, str]] = {}
    for name in reading.save.names:
        if m := EXPERT.fullmatch(name):
            found.setdefault(int(m[1]), {})[int(m[2])] = name
    stated = model.tree.get("num_experts")
    if not found and not (isinstance(stated, list) and AUTOEP in model.tree):
        stated = []  # no MoE layers; the key may be the user's own
    if not isinstance(stated, list) or not all(type(n) is int and n > 0 for n in stated):
        raise Corrupt(
            f"{model.what}: num_experts is {short(stated)}, and there are files of {sum(map(len, found.values()))} "
            "experts. The files are of different saves.",
            code="CKPT0409",
        )
    counts: dict[str, int] = {}
    entries: dict[str, dict[str, tuple[File, StoredTensor]]] = {}
    config = model.tree.get("ds_config")
    ranks = ExpertRanks(model.get("dp_world_size", int), bool(isinstance(config, dict) and config.get(DATA_FIRST)))
    layers, stacked = parse_autoep_layers(model.what, model.tree.get(AUTOEP), stated), Placements()
    for layer, count in enumerate(stated):
        files = found.pop(layer, {})
        if lost := count - sum(e < count for e in files):
            missing = next(e for e in range(count) if e not in files)
            raise Corrupt(
                f"{reading.where}: MoE layer {layer} has {count} experts, and the files of {lost} are missing, "
                f"first layer_{layer}_expert_{missing}_mp_rank_00_model_states.pt. Fetch them.",
                code="CKPT0402",
            )
        if more := [n for e, n in files.items() if e >= count]:
            raise Corrupt(
                f"{reading.where}{more[0]}: MoE layer {layer} has {count} experts. The file is from another save.",
                code="CKPT0409",
            )
        if layer in layers:
            stacked |= _load_expert_stacks(reading, [files[e] for e in range(count)], *layers[layer])
            continue
        prefix, own = _load_experts(reading, [files[e] for e in range(count)])
        counts[prefix], entries[prefix] = count, own
    if found or len(counts) + len(layers) != len(stated):
        raise Corrupt(
            f"{reading.where}: files of experts of {len(found) + len(counts) + len(layers)} MoE layers; num_experts "
            f"says {len(stated)}. The files are from different saves.",
            code="CKPT0409",
        )
    _insert_experts(reading, model, entries)
    for name in reading.save.names if not stated or model.tree.get("param_shapes") is not None else ():
        # with ZeRO, earlier releases write them with None
        if EXPERT_OPTIM.fullmatch(name) and (f := reading.load(name)).tree.get("optimizer") is not None:
            raise Corrupt(
                f"{f.what} has an optimizer, and so have other files of this save. It is of another save.",
                code="CKPT0409",
            )
    return Experts(ranks, counts, [n for own in entries.values() for n in own], stacked)


def parse_autoep_layers(what: str, stated: object, counts: list[int]) -> dict[int, tuple[str, list[list[int]]]]:
    """Return {number of an MoE layer: (module of its experts, [experts of each expert parallel rank])} of AutoEP's
    layers.

    Args:
        what: the path of the file, for errors.
        stated: ds_autoep_layers of the model file.
        counts: the number of experts of each MoE layer.

    Raises:
        Corrupt: ds_autoep_layers has another form, or contradicts `counts`.
        Unsupported: an expert is on several ranks, or on none.
    """
    out: dict[int, tuple[str, list[list[int]]]] = {}
    for entry in stated if isinstance(stated, list) else ():
        layer, size, local = (
            entry.get(k) if isinstance(entry, dict) else None for k in ("moe_layer_id", "ep_size", "num_local_experts")
        )
        if (
            type(layer) is not int
            or type(size) is not int
            or type(local) is not int
            or not 0 <= layer < len(counts)
            or not 0 < size * local <= counts[layer]
            or entry.get("num_experts") != counts[layer]
            or layer in out
        ):
            raise Corrupt(f"{what}: {AUTOEP} has {short(entry)}.", code="CKPT0406")
        prefix = str(entry.get("expert_key_prefix"))
        found = entry.get("expert_placement")  # where it is missing, the ranks have one expert after the other
        ranks = found.get("ranks") if isinstance(found, dict) else None
        placement = [list(range(r * local, (r + 1) * local)) for r in range(size)]
        if ranks is not None:
            by_rank = {r.get("rank"): r.get("experts") for r in ranks if isinstance(r, dict)}
            placement = [by_rank.get(r) for r in range(size)]  # type: ignore[misc]
        if not all(isinstance(own, list) for own in placement) or sorted(
            e for own in placement for e in own if type(e) is int
        ) != list(range(counts[layer])):
            raise Unsupported(
                f"{what}: expert_placement of {prefix} is {short(placement)}: not each of {counts[layer]} "
                "experts on one expert parallel rank.",
                code="CKPT0325",
            )
        out[layer] = prefix, placement
    return out


def _load_expert_stacks(reading: SaveReader, names: list[str], prefix: str, placement: list[list[int]]) -> Placements:
    """Load the files of the experts of one AutoEP layer, add the stacks of all experts to the save, and list the
    stacks.

    Args:
        reading: the reader of the save, to whose `stacks` they are added.
        names: the files, in the order of the experts.
        prefix: the module of the experts.
        placement: the experts of each expert parallel rank.

    Returns:
        {name of a stack: `placement`}.

    Raises:
        Corrupt: a file has an entry that is not a tensor of its expert, or an expert lacks one that others have.
    """
    found: dict[str, list[tuple[File, StoredTensor]]] = {}
    for e, name in enumerate(names):
        f = reading.load(name)
        for key, t in f.tree.items():
            stack, _, number = str(key).rpartition(".")
            own = found.setdefault(stack, [])
            same = isinstance(t, StoredTensor) and (not own or (t.shape, t.dtype) == (own[0][1].shape, own[0][1].dtype))
            if not stack.startswith(prefix + ".") or number != str(e) or len(own) != e or not same or not t.contiguous:
                raise Corrupt(
                    f"{f.what} holds {short(t)} under {short(key)}, which is no tensor of expert {e} of {prefix}.",
                    code="CKPT0412",
                )
            own.append((f, t))
    for stack, own in found.items():
        shape, n = own[0][1].shape, own[0][1].numel
        cuts = [
            FlatRange(e * n, (e + 1) * n, f.number, reading.keep_crc(f, t).extent[0]) for e, (f, t) in enumerate(own)
        ]
        reading.stacks[stack] = build_entry_from_ranges((len(names), *shape), own[0][1].dtype, ("model", stack), cuts)
        if len(own) != len(names):
            raise Corrupt(f'{own[0][0].what}: only {len(own)} experts have "{stack}".', code="CKPT0412")
    return dict.fromkeys(found, placement)


def _load_experts(reading: SaveReader, names: list[str]) -> tuple[str, dict[str, tuple[File, StoredTensor]]]:
    """Load the files of the experts of one layer.

    Args:
        reading: the reader of the save.
        names: names of the files, in the order of the experts.

    Returns:
        (the layer, which is the prefix of its experts' names; {name of a parameter of one expert: (its file, its
            tensor)}).

    Raises:
        Corrupt: a file has an entry that is not a tensor of its expert, or experts have different parameters.
    """
    prefix, out = "", {}
    first: set[str] = set()
    for e, name in enumerate(names):
        f = reading.load(name)
        own: set[str] = set()
        for key, t in f.tree.items():
            m = EXPERT_NAME.fullmatch(key) if isinstance(key, str) else None
            prefix = prefix or (m[1] if m else "")
            if m is None or m[1] != prefix or int(m[2]) != e or not isinstance(t, StoredTensor):
                raise Corrupt(
                    f"{f.what} holds {short(t)} under {short(key)}, which is no tensor of expert {e} of its layer.",
                    code="CKPT0412",
                )
            own.add(m[3])
            out[key] = f, t
        first = first or own
        if own != first or not own:
            raise Corrupt(
                f"{f.what} has {len(own)} tensors, and {names[0]} has {len(first)} others. The experts of a layer are "
                "copies of one module; one of the files is damaged or of another save.",
                code="CKPT0409",
            )
    return prefix, out


def _insert_experts(reading: SaveReader, model: File, layers: dict[str, dict[str, tuple[File, StoredTensor]]]) -> None:
    """Add the experts of all layers to `module` of the model file, after the other entries of their MoE layer.

    Lists in the model file that have the experts of rank 0 under rank 0's names are corrected.

    Args:
        reading: the reader of the save, which records the file of each entry.
        model: the model file, which is changed.
        layers: {layer: {name: (file, tensor)}}.

    Raises:
        Unsupported: an expert's weight is tied to another.
    """
    module = dict(model.get("module", dict))
    order = list(module)
    for prefix, own in layers.items():
        beside = prefix.removesuffix("experts.deepspeed_experts")
        at = max(
            (i for i, n in enumerate(order) if isinstance(n, str) and n.startswith(beside)), default=len(order) - 1
        )
        order[at + 1 : at + 1] = own
        module.update({n: t for n, (_, t) in own.items()})
        reading.homes.update({n: f for n, (f, _) in own.items()})
    model.tree["module"] = {n: module[n] for n in order}
    shared = model.tree.get("shared_params")
    if odd := next(
        (n for kv in (shared if isinstance(shared, dict) else {}).items() for n in kv if _is_expert_name(n)), None
    ):
        raise Unsupported(
            f'{model.what}: "{odd}" is tied to another weight; which experts of other ranks are, no file says.',
            code="CKPT0325",
        )
    if listed := model.buffer_names():
        rest = _group_expert_numbers(listed)
        buffers = [
            n for own in layers.values() for n in own if (m := EXPERT_NAME.fullmatch(n)) and m[3] in rest.get(m[1], ())
        ]
        model.tree["buffer_names"] = [n for n in listed if not _is_expert_name(n)] + buffers
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if isinstance(frozen := model.tree.get(key), dict):
            model.tree[key] = {n: x for n, x in frozen.items() if not _is_expert_name(n)}


def _is_expert_name(name: object) -> bool:
    """Return whether `name`, any value from a pickle, is the name of an expert's parameter or buffer."""
    return isinstance(name, str) and EXPERT_NAME.fullmatch(name) is not None


# ----------------------------------------------------------------------------------------------------- without ZeRO


def read_stage0_experts(reading: SaveReader, model: File, experts: Experts) -> Checkpoint:
    """Return the index of a save without ZeRO that has one optimizer file for each expert parallel rank.

    Args:
        reading: the reader of the save.
        model: the model file, whose `module` has the experts of all ranks.
        experts: the experts of the save.

    Raises:
        Corrupt: a file is missing, or contradicts another.
        Unsupported: the order of the parameters in the param groups cannot be determined.
    """
    world = experts.ranks.world
    if reading.options.only is not None and "optim" not in reading.options.only:
        reading.add_model_state([model])
        return reading.build_checkpoint("zero0", world)
    if experts.stacked:
        raise Unsupported(
            f"{reading.where}: AutoEP without ZeRO, whose optimizer numbers its parameters in an order that no file "
            f"says. Convert the weights alone ({argument('only', ['model'])}), or save once with ZeRO stage 1, whose "
            "files have names.",
            code="CKPT0327",
        )
    files = [reading.load(n) for names in reading.save.files(EXPERT_OPTIM, 1).values() for n in names]
    if model.tree.get("optimizer") is None and not files:
        reading.add_model_state([model])
        return reading.build_checkpoint("zero0", world)
    parts = [_parse_stage0_optimizer(f) for f in files]
    groups = parts[0].groups if parts else []
    sizes = [_parse_expert_parallel_size(files[0], g) for g in groups]
    most = max(sizes, default=1)
    if world % most or any(n % size for n in experts.counts.values() for size in sizes):
        raise Corrupt(
            f"{files[0].what}: experts on {most} of {world} ranks, and layers of {short(experts.counts)}. The files "
            "are of different saves.",
            code="CKPT0409",
        )
    if len(files) != most:
        raise Corrupt(
            f"{reading.where}: experts on {most} expert parallel ranks, whose optimizers are in "
            f"expp_rank_0 to {most - 1}; {len(files)} such files are here. Fetch all.",
            code="CKPT0402",
        )
    copy = model.tree.get("optimizer")  # of rank 0, whose file of an expert parallel rank has it too
    if copy is not None and not are_values_equal(copy, files[0].tree["optimizer"], model, files[0]):
        raise Corrupt(
            f"{model.what}: its optimizer is not that of {files[0].name}, and rank 0 wrote both. The files are from "
            "different saves; fetch all of one save again.",
            code="CKPT0409",
        )
    like = _merge_optimizers(reading, model, experts, files, parts, sizes)
    if parts:
        reading.add_leaves(("scaler",), parts[0].scaler, files[0])
    reading.add_model_state([model])
    for key, x in parts[0].rest.items():
        reading.add_leaves(("optim", key), x, files[0])
    return reading.build_checkpoint("zero0", world, tuple(like))


class _Stage0(NamedTuple):
    """The optimizer of an expert parallel rank: the loss scaler, {} where it has none, the state by number,
    the param groups, the masters by group, None where it has none, and what else the optimizer saved."""

    scaler: dict[str, Any]
    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    masters: list[list[Any]] | None
    rest: dict[str, Any]


def _parse_stage0_optimizer(f: File) -> _Stage0:
    """Return the parts of the optimizer in a file of a save without ZeRO.

    Raises:
        Corrupt: it is not the state dict of an optimizer of torch.
        Unsupported: its masters are flat.
    """
    whole = f.get("optimizer", dict)
    inner = f.get("optimizer_state_dict", dict, whole) if "optimizer_state_dict" in whole else whole
    state, groups, masters = f.get("state", dict, inner), f.get("param_groups", list, inner), whole.get("fp32_groups")
    if "fp32_groups_flat" in whole:
        raise Unsupported(
            f"{f.what}: flat masters of a fused fp16 optimizer, whose order the file does not hold.", code="CKPT0327"
        )
    good = all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    if good and masters is not None:
        good = isinstance(masters, list) and [len(m) if isinstance(m, list) else -1 for m in masters] == [
            len(g["params"]) for g in groups
        ]
    if not good or not all(isinstance(x, dict) for x in state.values()):
        raise Corrupt(f"{f.what}: its optimizer is not one of torch, or its masters do not fit it.", code="CKPT0417")
    rest = {str(k): x for k, x in inner.items() if k not in ("state", "param_groups")}
    return _Stage0(read_stage0_scaler(whole), state, groups, masters, rest)


def _parse_expert_parallel_size(f: File, group: dict[str, object]) -> int:
    """Return the number of ranks over which the experts of a param group are spread; 1 for a group without experts.

    Raises:
        Corrupt: the group has experts, and its name does not state that number.
    """
    if not group.get("moe"):
        return 1
    m = GROUP_NAME.fullmatch(str(group.get("name")))
    if m is None or int(m[1]) < 1:
        raise Corrupt(f"{f.what}: the name of a param group of experts is {short(group.get('name'))}.", code="CKPT0417")
    return int(m[1])


def _merge_optimizers(
    reading: SaveReader, model: File, experts: Experts, files: list[File], parts: list[_Stage0], sizes: list[int]
) -> list[str]:
    """Join the optimizers of all expert parallel ranks into one, whose state and param groups are added to `reading`
    under new numbers of the parameters; fp32 masters go to `reading.masters`.

    Args:
        reading: the reader of the save.
        model: the model file.
        experts: the experts of the save.
        files: the optimizer file of each expert parallel rank.
        parts: the optimizer in each of them.
        sizes: for each param group, the number of ranks over which its experts are spread.

    Returns:
        The names of the parameters, in the order of their new numbers.

    Raises:
        Corrupt: the ranks' param groups or loss scalers differ.
        Unsupported: the order of the parameters in the param groups cannot be determined.
    """
    groups, ranks, most = parts[0].groups, experts.ranks, max(sizes)
    for f, own in zip(files, parts, strict=True):
        mine, theirs = ({"loss scaler": x.scaler, "param_groups": x.groups, **x.rest} for x in (parts[0], own))
        for key in mine | theirs:
            if not are_values_equal(mine.get(key), theirs.get(key), files[0], f):
                raise Corrupt(
                    f"{f.what}: {key} differs from that of {files[0].name}. The files are from different saves.",
                    code="CKPT0409",
                )
    names = _match_group_names(model, experts, files[0], parts[0], sizes)
    like: list[str] = []
    unlike: set[str] = set()
    for i, group in enumerate(groups):
        size = sizes[i]
        members = experts.members(names[i], size)
        number_of = {n: k for k, n in enumerate(members, len(like))}
        like += members
        # the files are of the ranks with part 0 in groups of `most` ranks
        home = [ranks.split(ranks.join(r, 0, ranks.world // most), ranks.world // size)[0] for r in range(most)]
        for k, (f, own) in enumerate(zip(files, parts, strict=True)):
            first = home.index(home[k])
            for j, (number, local) in enumerate(zip(group["params"], names[i], strict=True)):
                name = experts.global_name(local, home[k], size)
                if first != k:
                    a, b = ((x.state.get(number), x.masters and x.masters[i][j]) for x in (parts[first], own))
                    if not are_values_equal(a, b, files[first], f):
                        unlike.add(name)
                    continue
                if own.masters is not None and isinstance(t := own.masters[i][j], StoredTensor):
                    reading.masters[name] = reading.whole_tensor(f, t, ("model", name))
                if number in own.state:
                    reading.add_leaves(("optim", "state", number_of[name]), own.state[number], f)
        reading.add_leaves(("optim", "param_groups", i), {**group, "params": list(number_of.values())}, files[0])
    if unlike:
        reading.notes.append(
            f"expert parallel ranks differ in the state of {len(unlike)} parameters that all of them have, first "
            f"{min(unlike)}: that of the first rank is read"
        )
    return like


def _match_group_names(model: File, experts: Experts, f: File, part: _Stage0, sizes: list[int]) -> list[list[str]]:
    """Return the names of the parameters of each param group, as rank 0 names them, by matching shapes in the module's
    order.

    Args:
        model: the model file.
        experts: the experts of the save.
        f: the optimizer file of rank 0.
        part: the optimizer in it.
        sizes: for each param group, the number of ranks over which its experts are spread.

    Raises:
        Unsupported: no order fits the shapes, or several do.
    """
    buffers = set(model.buffer_names())
    module = [(n, t.shape) for n, t in model.get("module", dict).items() if isinstance(t, StoredTensor)]
    module = [(n, s) for n, s in module if n not in buffers]
    flagged = [bool(g.get("moe")) for g in part.groups]
    out: list[list[str]] = [[] for _ in part.groups]
    for moe in (False, True):
        mine = [i for i, yes in enumerate(flagged) if yes == moe]
        if not mine:
            continue
        size = max(sizes[i] for i in mine)
        known = [(n, s) for n, s in module if not any(flagged) or _is_expert_name(n) == moe]
        if len({sizes[i] for i in mine}) == 1:
            local = [(experts.local_name(n, size), s) for n, s in known]
            known = [(n, s) for (r, n), s in local if r == 0]
        shapes = [[_find_parameter_shape(part, i, k) for k in part.groups[i]["params"]] for i in mine]
        found = assign_names(known, shapes)[0] if len({sizes[i] for i in mine}) == 1 else None
        if found is None:
            raise Unsupported(
                f"{f.what}: the optimizer numbers its parameters, and more than one order of the "
                f"{'experts' if moe else 'weights'} fits the shapes, or none. Convert the weights alone "
                f"({argument('only', ['model'])}), or save once with ZeRO stage 1, whose files have names.",
                code="CKPT0327",
            )
        for i, names in zip(mine, found, strict=True):
            out[i] = names
    return out


def _find_parameter_shape(part: _Stage0, group: int, number: object) -> tuple[int, ...] | None:
    """Return the shape of parameter `number` in param group `group`: its master's, or that of one of its slots; None
    if unknown."""
    if part.masters is not None:
        t = part.masters[group][part.groups[group]["params"].index(number)]
        return t.shape if isinstance(t, StoredTensor) else None
    slots = part.state.get(number, {}).values()
    return next((t.shape for t in slots if isinstance(t, StoredTensor) and t.shape), None)
