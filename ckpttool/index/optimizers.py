"""Which optimizer a state is of, by the slots that it keeps for each parameter: the table, and what a state lacks by
it.

Optimizers keep other slots for some parameters than for others: Adafactor for vectors, SOAP for what it does not
precondition, bitsandbytes for small tensors. Slots are compared within the groups that one optimizer has: those with
the same options. A job with Muon for matrices and AdamW for the rest has both kinds of groups in one state.

Sources: torch/optim/*.py of 2.13 (adam, adamax, nadam, _adafactor, _muon, rmsprop, adagrad, adadelta, asgd, rprop,
sgd), bitsandbytes/optim/optimizer.py of 0.50, schedulefree of 1.4, pytorch_optimizer of 4.1 (Lion, SOAP),
transformers/optimization.py (Adafactor).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..printable import count_noun
from .checkpoint import ITEMSIZE, Checkpoint, TensorEntry, joined
from .composites import find_composites
from .paths import WRAPPED_SLOTS

__all__ = [
    "OPTIMIZERS",
    "FoundOptimizer",
    "Optimizer",
    "describe_incomplete_state",
    "describe_lost_slots",
    "describe_wide_slots",
    "find_lost_slots",
    "find_optimizers",
    "find_unassigned_state",
]


class Optimizer(NamedTuple):
    """The state of one optimizer.

    Args:
        name: what people call it.
        slots: what it keeps for a parameter.
        others: what it keeps instead for some parameters.
        may: slots that depend on its options; one that some parameters have, all have.
        options: of its param groups, where slots do not tell it from another.
    """

    name: str
    slots: frozenset[str]
    others: tuple[frozenset[str], ...] = ()
    may: frozenset[str] = frozenset(("step",))
    options: frozenset[str] = frozenset()

    def fits(self, slots: frozenset[str], options: frozenset[str]) -> bool:
        """Whether a state can be of this optimizer: `slots` are the names of the slots of all parameters together,
        `options` those of the options of its param groups."""
        every = self.slots.union(self.may, *self.others)
        others = bool(self.options) and slots - self.may in self.others
        return self.options <= options and slots <= every and (self.slots <= slots or others)

    def lacks(self, slots: frozenset[str], every: frozenset[str]) -> frozenset[str]:
        """Return the names of the slots that one parameter lacks. `slots` are the slots that it has, `every` the
        slots that any parameter has."""
        own = slots - self.may
        form = own if own in self.others else self.slots
        return (form | (every & self.may)) - slots


def _slots(*slots: str) -> frozenset[str]:
    """Return names of slots as a set."""
    return frozenset(slots)


_BNB = _slots("step", "unorm_vec", "max1", "max2", "new_max1", "new_max2")
#: The first that fits is the optimizer.
OPTIMIZERS = (
    Optimizer(
        "SOAP",
        _slots("exp_avg", "exp_avg_sq", "GG", "Q"),
        (_slots("exp_avg", "exp_avg_sq"),),
        options=_slots("precondition_frequency"),
    ),
    Optimizer("SOAP", _slots("exp_avg", "exp_avg_sq", "GG", "Q"), (_slots("exp_avg", "exp_avg_sq"),)),
    Optimizer("AdamW or Adam", _slots("exp_avg", "exp_avg_sq"), may=_slots("step", "max_exp_avg_sq")),
    Optimizer("NAdam", _slots("exp_avg", "exp_avg_sq", "mu_product")),
    Optimizer("Adamax", _slots("exp_avg", "exp_inf")),
    Optimizer("schedule-free AdamW", _slots("z", "exp_avg_sq")),
    Optimizer("schedule-free SGD", _slots("z"), may=_slots("step", "momentum_buffer")),
    Optimizer("Lion", _slots("exp_avg")),
    Optimizer("Adafactor", _slots("row_var", "col_var"), (_slots("variance"),)),
    Optimizer("Adafactor", _slots("variance")),
    Optimizer(
        "Adafactor",
        _slots("exp_avg_sq_row", "exp_avg_sq_col"),
        (_slots("exp_avg_sq"),),
        _slots("step", "RMS", "exp_avg"),
        _slots("clip_threshold"),
    ),
    Optimizer(
        "Adafactor",
        _slots("exp_avg_sq_row", "exp_avg_sq_col"),
        (_slots("exp_avg_sq"),),
        _slots("step", "RMS", "exp_avg"),
    ),
    Optimizer("RMSprop", _slots("square_avg"), may=_slots("step", "momentum_buffer", "grad_avg")),
    Optimizer("Adadelta", _slots("square_avg", "acc_delta")),
    Optimizer("Adagrad", _slots("sum")),
    Optimizer("ASGD", _slots("eta", "mu", "ax")),
    Optimizer("Rprop", _slots("prev", "step_size")),
    Optimizer("Muon", _slots("momentum_buffer"), options=_slots("ns_steps")),
    Optimizer("Muon", _slots("momentum_buffer"), options=_slots("momentum_beta")),  # of NVIDIA's emerging_optimizers
    Optimizer("SGD", _slots("momentum_buffer")),
    Optimizer(
        "bitsandbytes 8-bit AdamW or Adam",
        _slots("state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"),
        (_slots("state1", "state2"),),
        _BNB,
    ),
    Optimizer("bitsandbytes 32-bit AdamW or Adam", _slots("state1", "state2"), may=_BNB),
    Optimizer("bitsandbytes 8-bit, with one moment", _slots("state1", "qmap1", "absmax1"), (_slots("state1"),), _BNB),
    Optimizer("bitsandbytes 32-bit, with one moment", _slots("state1"), may=_BNB),
)


class FoundOptimizer(NamedTuple):
    """The state of one optimizer: its name ("unknown" where the table has none), the slots of each parameter, and the
    parameters that lack a slot, by slot."""

    name: str
    slots: dict[str, frozenset[str]]
    missing: dict[str, list[str]]


def find_unassigned_state(ckpt: Checkpoint) -> list[TensorEntry]:
    """Find the tensors of the optimizer's state that are not of one parameter each by their names, such as the buckets
    of Megatron-Core, of which only their bytes tell the parameters."""
    return [
        t
        for t in ckpt.tensors.values()
        if t.component == "optim" and t.path[1:2] not in (("state",), ("param_groups",))
    ]


def find_optimizers(ckpt: Checkpoint) -> list[FoundOptimizer]:
    """Find the optimizers whose state a checkpoint has, in the order of their param groups; empty if it has none."""
    slots: dict[str, set[str]] = {}
    for t in ckpt.tensors.values():
        if (slot := t.slot) is not None:
            slots.setdefault(t.parameter, set()).add(slot)
    options: dict[int, set[str]] = {}
    members: dict[int, list[str]] = {}
    for v in ckpt.values.values():
        if v.option is not None:
            if v.option == "params":
                members[v.group] = [str(n) for n in v.data]
            else:
                options.setdefault(v.group, set()).add(str(v.path[3]))
    merged: dict[frozenset[str], list[str]] = {}
    for i in sorted(members):
        merged.setdefault(frozenset(options.get(i, ())), []).extend(n for n in members[i] if n in slots)
    rest = set(slots).difference(*merged.values())
    if rest:
        merged.setdefault(frozenset(), []).extend(n for n in slots if n in rest)
    return [
        _identify_optimizer({n: frozenset(slots[n]) for n in names}, keys) for keys, names in merged.items() if names
    ]


def _identify_optimizer(slots: Mapping[str, frozenset[str]], options: Iterable[str]) -> FoundOptimizer:
    """Find the optimizer that keeps these slots, {parameter: names of its slots}, in param groups with these options;
    its name is "unknown" where none fits."""
    every, keys = frozenset().union(*slots.values()), frozenset(options)
    found = next((o for o in OPTIMIZERS if o.fits(every, keys)), None)
    missing: dict[str, list[str]] = {}
    for name, have in slots.items():
        for slot in sorted(every - have if found is None else found.lacks(have, every)):
            missing.setdefault(slot, []).append(name)
    return FoundOptimizer(found.name if found else "unknown", dict(slots), missing)


#: Slots that have the shape of their weight; a projection (GaLore) has fewer rows or columns.
_AS_WEIGHTS = _slots("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def describe_incomplete_state(ckpt: Checkpoint) -> list[str]:
    """Return a sentence for each fact about the optimizer's state that stops a job which resumes from it, or that no
    training produces: slots that only some parameters have, moments of other shapes than their weights, no param
    groups, parameters that these list twice, and no moments at all."""
    out = [
        f"{slot} is missing for {len(gone)} of {len(state.slots)} parameters, first {min(gone)}"
        for state in find_optimizers(ckpt)
        for slot, gone in state.missing.items()
    ]
    trained = {t.parameter for t in ckpt.tensors.values() if t.slot is not None}
    if trained and not any(v.is_param_group for v in ckpt.values.values()):
        out.append(f"the optimizer has state of {count_noun(len(trained), 'parameter')}, and no param groups")
    inside = {joined(t.path) for found in find_composites(ckpt).values() for t in found.tensors.values()}
    for name, t in ckpt.tensors.items():
        weight = ckpt.tensors.get(f"model.{t.parameter}") if t.slot in _AS_WEIGHTS and name not in inside else None
        if weight is not None and weight.numel and not _is_within(t.shape, weight.shape):
            shapes = f"{list(t.shape)}, and its weight {list(weight.shape)}"
            out.append(f'"{name}" is {shapes}: are the two of one training run?')
            break
    listed = Counter(str(n) for v in ckpt.values.values() if v.option == "params" for n in v.data)
    if twice := [n for n, times in listed.items() if times > 1]:
        out.append(f'the param groups list {count_noun(len(twice), "parameter")} more than once, first "{twice[0]}"')
    counters = [ckpt.value(name) for name in ("trainer.step", "scheduler.last_epoch")]
    steps = max((n for n in counters if type(n) is int), default=0)
    adaptive = any(v.option == "betas" for v in ckpt.values.values())
    if adaptive and listed and steps > 0 and not any(t.component == "optim" for t in ckpt.tensors.values()):
        out.append(f"no parameter has moments, after {count_noun(steps, 'step')} with param groups that have betas")
    return out


def _is_within(slot: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Tell whether a moment may be of a weight: it has as many dimensions, and none that is larger."""
    return len(slot) == len(weight) and all(a <= b for a, b in zip(slot, weight, strict=True))


_SHOWN = 6  # slots in a message
_RANK_FILE = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


def find_lost_slots(ckpt: Checkpoint) -> dict[str, list[str]]:
    """Find optimizer state that was lost because every rank saved its own part under one name and DCP kept one rank's
    part: {parameter: names of its tensors}; {} if there is none.

    FSDP2 shards parameters and gradients as DTensors. An optimizer that makes plain tensors instead (bitsandbytes,
    SOAP, torchao's predecessors) has one tensor per rank under one name. DCP takes names to be unique, so it keeps one
    rank's tensor, not always the same rank's. Such a tensor has the shape of one rank's part of the parameter.
    """
    if not any(_RANK_FILE.fullmatch(f) for f in ckpt.files):
        return {}
    slots: dict[str, dict[str, TensorEntry]] = {}
    inside = {joined(t.path) for found in find_composites(ckpt).values() for t in found.tensors.values()}
    for name, t in ckpt.tensors.items():
        if t.slot is not None and t.numel > 1 and name not in inside:
            slots.setdefault(t.parameter, {})[name] = t
    out: dict[str, list[str]] = {}
    for fqn, of in slots.items():
        weight = ckpt.tensors.get(f"model.{fqn}")
        if weight is None or not weight.shape or len(weight.chunks) < 2:
            continue
        if any(len(t.chunks) > 1 or t.shape == weight.shape for t in of.values()):
            continue  # DTensors, or whole tensors
        parts = {shape for _, shape in weight.chunks.boxes()}
        if any(_is_shape_of_part(t.shape, part, weight.shape) for t in of.values() for part in parts):
            out[fqn] = sorted(of, key=lambda n: (of[n].shape not in parts, n))
    return out


def _is_shape_of_part(slot: tuple[int, ...], part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor of optimizer state has the shape of one rank's part of a parameter, or that part flattened, or
    is a square with as many rows as that part (SOAP's factors).

    Args:
        slot: shape of the optimizer's tensor.
        part: shape of the rank's part of the parameter.
        whole: shape of the parameter.
    """
    if slot == part and part != whole:
        return True
    n = 1
    for k in part:
        n *= k
    flat = len(whole) > 1 and slot == (n,)
    square = len(slot) == 2 and slot == (part[0], part[0]) and part[0] not in whole
    return flat or square


def _describe_kept_ranks(ckpt: Checkpoint, names: Iterable[str]) -> str:
    """Return a text on which ranks' tensors were kept, slot by slot: "GG.0: 2 of rank 0, 1 of rank 1; Q.0: 3 of rank
    1". `names` are names of tensors of optimizer state."""
    of: dict[str, dict[str, int]] = {}
    for n in names:
        t = ckpt.tensors[n]
        rank = next((m[1] for f in t.chunks.file if (m := _RANK_FILE.fullmatch(ckpt.files[f]))), "?")
        counts = of.setdefault(".".join(str(p) for p in t.path[3:] if p != WRAPPED_SLOTS), {})
        counts[rank] = counts.get(rank, 0) + 1
    rows = [
        f"{slot}: {', '.join(f'{n:,} of rank {r}' for r, n in sorted(counts.items()))}" for slot, counts in of.items()
    ]
    return "; ".join([*rows[:_SHOWN], *([f"{len(rows) - _SHOWN} more slots"] if len(rows) > _SHOWN else [])])


def describe_lost_slots(ckpt: Checkpoint, found: Mapping[str, list[str]]) -> str:
    """Return a text that says which optimizer state was lost when it was saved, and what to do; `found` is {parameter:
    names of its tensors}, not empty, as `find_lost_slots` returned it."""
    names = [n for slots in found.values() for n in slots]
    ranks = {m[1] for n in names for f in ckpt.tensors[n].chunks.file if (m := _RANK_FILE.fullmatch(ckpt.files[f]))}
    t = ckpt.tensors[names[0]]
    whole = ckpt.tensors[f"model.{next(iter(found))}"].shape
    mixed = (
        f", of ranks {', '.join(sorted(ranks, key=int))} mixed"
        if len(ranks) > 1
        else f", that of rank {next(iter(ranks), '?')}"
    )
    return (
        f"the optimizer state of {count_noun(len(found), 'parameter')} was lost when it was saved: "
        f"every rank had a part of its own under one name, and DCP has kept one of them{mixed} "
        f"({_describe_kept_ranks(ckpt, names)}). "
        f'"{names[0]}" is {list(t.shape)}, the parameter {list(whole)}. A job that resumes from it continues with '
        "wrong moments. Leave the optimizer out, so that it starts anew; to save it, use an optimizer whose state is "
        "DTensors (torch.optim, torchao), or write one file for each rank with torch.save"
    )


def describe_wide_slots(ckpt: Checkpoint) -> list[str]:
    """Return a note, as a list of one, if slots of the optimizer have a wider floating-point dtype than their weights,
    which torch's optimizers round when they load them; [] otherwise.

    Optimizer._process_value_according_to_param_policy (torch/optim/optimizer.py) casts every slot but `step` to the
    dtype of the job's parameter. bitsandbytes has its own.
    """
    own = {n for found in find_optimizers(ckpt) if found.name.startswith("bitsandbytes") for n in found.slots}
    pairs: Counter[tuple[str, str]] = Counter()
    for t in ckpt.tensors.values():
        weight = ckpt.tensors.get(f"model.{t.parameter}") if t.slot not in (None, "step") else None
        if weight is None or weight.shape != t.shape or not t.numel or t.parameter in own:
            continue
        if "float" in t.dtype and "float" in weight.dtype and ITEMSIZE[t.dtype] > ITEMSIZE[weight.dtype]:
            pairs[t.dtype, weight.dtype] += 1
    return [
        f"{count_noun(n, 'tensor')} of the optimizer {'is' if n == 1 else 'are'} {slot} beside {weight} weights: "
        "Optimizer.load_state_dict of torch casts slots to the dtype of the job's parameters without a word, so a job "
        f"with {weight} parameters goes on with rounded ones"
        for (slot, weight), n in pairs.most_common(1)
    ]
