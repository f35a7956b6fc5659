"""The faults of tests/resume/test_faults.py: what is done to a checkpoint or to a job, and what must be said about it.

A state is the tree of a full checkpoint of the job in tests/live/faults.py, {"model", "optim", "scheduler", "step"}; what
is done to it is a function of (the state, that of step 10). At the world size of the save, 4, a matrix of 48 rows has 12
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spoiling import (
    Fault,
    State,
    every_slot,
    every_weight,
    exchange,
    flip,
    in_turn,
    model,
    moment,
    option,
    put,
    rounded,
    shift,
    slot,
    weight,
    without,
    zero,
)  # fmt: skip

LAYER1, LAYER2 = "model.layers.1.", "model.layers.2."
Q, K = LAYER1 + "self_attn.q_proj.weight", LAYER1 + "self_attn.k_proj.weight"
GATE, UP = LAYER1 + "mlp.gate_proj.weight", LAYER1 + "mlp.up_proj.weight"
O = LAYER1 + "self_attn.o_proj.weight"  # noqa: E741
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
UP2 = LAYER2 + "mlp.up_proj.weight"
BOTH = ("exp_avg", "exp_avg_sq")
RANK1, RANK2 = slice(12, 24), slice(24, 36)


# -------------------------------------------------------------------------------------------------- what is done to it


def swap_rows(t: Any) -> None:
    """The shards of ranks 1 and 2 are exchanged."""
    t[12:36] = torch.cat([t[24:36], t[12:24]])


def copy_rows(t: Any) -> None:
    """The shard of rank 1 is that of rank 2 as well."""
    t[RANK2] = t[RANK1].clone()


def to_bf16(t: Any) -> Any:
    return t.bfloat16() if t.ndim else t


def nan(t: Any) -> None:
    t.reshape(-1)[700] = float("nan")


def rope(t: Any) -> Any:
    """From halves to interleaved pairs, in each head of 12."""
    return t.reshape(4, 2, 6, t.shape[1]).transpose(1, 2).reshape(t.shape)


def stale(which: Callable[[str], bool], weights: bool, optimizer: bool) -> Callable[[State, State], Any]:
    """What some parameters had ten steps earlier."""

    def spoil(state: State, old: State) -> None:
        for fqn in old["model"]:
            if which(fqn):
                if weights:
                    state["model"][fqn] = old["model"][fqn]
                if optimizer:
                    state["optim"]["state"][fqn] = old["optim"]["state"][fqn]

    return spoil


def stale_rows(state: State, old: State) -> None:
    """The shard of rank 3 was not written again."""
    state["model"][Q][36:] = old["model"][Q][36:]


def moments_exchanged(absolute: bool) -> Callable[[State, State], Any]:
    def spoil(state: State, old: State) -> None:
        for s in state["optim"]["state"].values():
            s["exp_avg"], s["exp_avg_sq"] = s["exp_avg_sq"], s["exp_avg"].abs() if absolute else s["exp_avg"]

    return spoil


def renamed_layers(state: State) -> list[tuple[str, str]]:
    return [(f, f.replace(LAYER1, LAYER2)) for f in state["model"] if f.startswith(LAYER1)]


def layers_exchanged(*parts: str) -> Callable[[State, State], Any]:
    return lambda state, old: exchange(parts, renamed_layers(state))(state, old)


def schedule(steps: int) -> Callable[[State, State], Any]:
    """The scheduler, and the learning rate that it left in the groups, of another step."""

    def spoil(state: State, old: State) -> None:
        from live.faults import RATE, rate

        found = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": [RATE * rate(steps)] * 2}
        state["scheduler"].update(found)
        option("lr", RATE * rate(steps))(state, old)

    return spoil


def untie(head: Callable[[Any], Any], with_state: bool) -> Callable[[State, State], Any]:
    """The head has a weight of its own, and perhaps moments."""

    def spoil(state: State, old: State) -> None:
        state["model"][HEAD] = head(state["model"][EMBEDDING].clone())
        if with_state:
            state["optim"]["state"][HEAD] = {k: t.clone() for k, t in state["optim"]["state"][EMBEDDING].items()}
        state["optim"]["param_groups"][0]["params"].append(HEAD)

    return spoil


def noise(t: Any) -> Any:
    """As newly made."""
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) * 0.02


def everything(fqn: str) -> bool:
    return True


def first_layer(fqn: str) -> bool:
    return fqn.startswith(LAYER1)


DIGESTS, SCALARS, GROUPS = "state.digests", "state.scalars", "config.groups"


def rotate(t: Any) -> Any:
    """Turned by 1e-4 towards a tensor at a right angle to it; its norm stays."""
    aside = torch.randn(t.shape, generator=torch.Generator().manual_seed(9))
    aside -= t * ((aside * t).sum() / (t * t).sum())
    turned = t + aside * (1e-4 * t.norm() / aside.norm())
    return turned * (t.norm() / turned.norm())


PROBE, UPDATE, WORST = "probe.logits", "step1.update_norm", "step1.worst_update"

FAULTS: dict[str, Fault] = {
    # weights
    "shard of a weight zeroed": Fault(DIGESTS, "zero-rows", PROBE, (model(Q),), weight(Q, zero(RANK2)), 2),
    "shards of a weight exchanged": Fault(DIGESTS, "exchanged-rows", PROBE, (model(Q),), weight(Q, swap_rows), 1),
    "shard of a weight twice": Fault(DIGESTS, "copied-rows", PROBE, (model(Q),), weight(Q, copy_rows), 2),
    "stale shard of a weight": Fault(DIGESTS, "close", PROBE, (model(Q),), stale_rows, 3),
    "stale weights": Fault(DIGESTS, "close", PROBE, (), stale(everything, True, False)),
    "stale weights of a layer": Fault(DIGESTS, "close", PROBE, (model(LAYER1 + "self_attn.q_proj.weight"),), stale(first_layer, True, False)),
    "stale checkpoint": Fault(DIGESTS, "other-checkpoint", PROBE, (), stale(everything, True, True)),
    "q and k exchanged, weights": Fault(DIGESTS, "exchanged", PROBE, (model(Q), model(K)), exchange(["model"], [(Q, K)])),
    "q and k exchanged, weights and moments": Fault(DIGESTS, "exchanged", PROBE, (model(Q), model(K)), exchange(["model", "optim"], [(Q, K)])),
    "gate and up exchanged, weights and moments": Fault(DIGESTS, "exchanged", PROBE, (model(GATE), model(UP)), exchange(["model", "optim"], [(GATE, UP)])),
    "o transposed": Fault(DIGESTS, "transposed", PROBE, (model(O),), weight(O, lambda t: t.T)),
    "layers 1 and 2 exchanged": Fault(DIGESTS, "layers-exchanged", PROBE, (), layers_exchanged("model", "optim")),
    "norms of a layer reset": Fault(DIGESTS, "constant", PROBE, (model(LAYER1 + "input_layernorm.weight"),), in_turn(*(weight(LAYER1 + n, torch.ones_like) for n in ("input_layernorm.weight", "post_attention_layernorm.weight")))),
    "final norm reset": Fault(DIGESTS, "constant", PROBE, (model(NORM),), weight(NORM, torch.ones_like), 0),
    "weights rounded to bf16": Fault(DIGESTS, "rounded-bfloat16", PROBE, (), every_weight(rounded(torch.bfloat16))),
    "weights rounded to fp16": Fault(DIGESTS, "rounded-float16", PROBE, (), every_weight(rounded(torch.float16))),
    "weights and moments stored in bf16": Fault("state.shapes", "dtype", PROBE, (), in_turn(every_weight(to_bf16), *(every_slot(s, to_bf16) for s in BOTH)), job=""),
    "rope permuted in all layers": Fault(DIGESTS, "rope", PROBE, (), lambda s, o: [weight(f, rope)(s, o) for f in s["model"] if "q_proj" in f or "k_proj" in f]),
    "rope permuted in a layer": Fault(DIGESTS, "rope", PROBE, (model(Q), model(K)), in_turn(weight(Q, rope), weight(K, rope))),
    "an exponent bit of a weight": Fault(DIGESTS, "elements", PROBE, (model(Q),), weight(Q, flip(27, (30, 5))), 2),
    "the sign of a weight": Fault(DIGESTS, "elements", PROBE, (model(Q),), weight(Q, flip(31, (13, 5))), 1),
    "the last bit of a weight": Fault(DIGESTS, "elements", None, (model(Q),), weight(Q, flip(0, (47, 47))), 3),
    "a NaN in a weight": Fault(DIGESTS, "elements", PROBE, (model(Q),), weight(Q, nan), 1),
    "a weight one element on": Fault(DIGESTS, "shifted", PROBE, (model(UP),), weight(UP, shift)),
    "last rows of the vocabulary zero": Fault(DIGESTS, "zero-rows", PROBE, (model(HEAD),), weight(HEAD, zero(slice(127, 131))), 3),
    "a weight newly made": Fault(DIGESTS, "unrelated", PROBE, (model(UP),), weight(UP, noise)),
    "a weight missing": Fault("state.loaded", "tensor-missing", "state.loaded", (model(UP),), without("model", UP)),
    "a weight too many": Fault("state.loaded", "tensor-extra", "state.loaded", (model(LAYER1 + "self_attn.q_proj.bias"),), put(lambda: torch.zeros(48), "model", LAYER1 + "self_attn.q_proj.bias")),
    "vocabulary padded": Fault("state.loaded", "vocabulary", "state.loaded", (model(HEAD),), weight(HEAD, lambda t: torch.cat([t, torch.zeros(5, 48)]))),
    "a weight does not train": Fault("step1.grad_norm", "frozen", "step1.grad_norm", (UP2,), job="frozen"),
    # optimizer
    "optimizer dropped": Fault("state.plausible", "optimizer-missing", "step1.learning_rates", (), without("optim")),
    "moments dropped": Fault("state.plausible", "optimizer-missing", UPDATE, (), lambda s, o: s["optim"]["state"].clear(), job=""),
    "moments exchanged": Fault(DIGESTS, "moments-exchanged", UPDATE, (), moments_exchanged(False)),
    "moments exchanged, without signs": Fault(DIGESTS, "moments-copied", UPDATE, (), moments_exchanged(True)),
    "optimizer's step reset": Fault("state.plausible", "step-reset", UPDATE, (), every_slot("step", torch.zeros_like)),
    "optimizer's step off by one": Fault(DIGESTS, "step-offset", UPDATE, (), every_slot("step", lambda t: t - 1)),
    "optimizer's step off by one, on one tensor": Fault("state.plausible", "step-offset", WORST, (moment(Q, "step"),), slot(Q, "step", lambda t: t - 1)),
    "shard of exp_avg zeroed": Fault(DIGESTS, "zero-rows", UPDATE, (moment(Q, "exp_avg"),), slot(Q, "exp_avg", zero(RANK2)), 2),
    "shard of exp_avg_sq zeroed": Fault(DIGESTS, "zero-rows", UPDATE, (moment(Q, "exp_avg_sq"),), slot(Q, "exp_avg_sq", zero(RANK2)), 2),
    "shards of exp_avg exchanged": Fault(DIGESTS, "exchanged-rows", UPDATE, (moment(Q, "exp_avg"),), slot(Q, "exp_avg", swap_rows), 1),
    "shards of exp_avg_sq exchanged": Fault(DIGESTS, "exchanged-rows", UPDATE, (moment(Q, "exp_avg_sq"),), slot(Q, "exp_avg_sq", swap_rows), 1),
    "stale optimizer": Fault(DIGESTS, "optimizer-stale", UPDATE, (), stale(everything, False, True)),
    "stale optimizer of a layer": Fault(DIGESTS, "optimizer-stale", UPDATE, (), stale(first_layer, False, True)),
    "q and k exchanged, moments": Fault(DIGESTS, "exchanged", UPDATE, (moment(Q, "exp_avg"),), exchange(["optim"], [(Q, K)])),
    "layers 1 and 2 exchanged, moments": Fault(DIGESTS, "layers-exchanged", UPDATE, (), layers_exchanged("optim")),
    "moments rounded to bf16": Fault(DIGESTS, "rounded-bfloat16", UPDATE, (), in_turn(*(every_slot(s, rounded(torch.bfloat16)) for s in BOTH))),
    "gradient of one weight 3e-5 too large": Fault("step1.worst_grad", "gradients", "step1.worst_grad", (Q,), job="one_gradient"),
    "exp_avg rotated by 1e-4 at the same norm": Fault(DIGESTS, "close", "step1.update_direction", (moment(Q, "exp_avg"),), slot(Q, "exp_avg", rotate)),
    "an exponent bit of exp_avg_sq": Fault(DIGESTS, "elements", WORST, (moment(Q, "exp_avg_sq"),), slot(Q, "exp_avg_sq", flip(27, (30, 5))), 2),
    "a NaN in exp_avg": Fault(DIGESTS, "elements", UPDATE, (moment(Q, "exp_avg"),), slot(Q, "exp_avg", nan), 1),
    "exp_avg one element on": Fault(DIGESTS, "shifted", UPDATE, (moment(UP, "exp_avg"),), slot(UP, "exp_avg", shift)),
    "moments of one weight missing": Fault("state.names", "moments-missing", UPDATE, (moment(Q, "step"),), without("optim", "state", Q)),
    "exp_avg zeroed": Fault(DIGESTS, "zero", UPDATE, (), every_slot("exp_avg", torch.zeros_like)),
    "exp_avg_sq zeroed": Fault(DIGESTS, "zero", UPDATE, (), every_slot("exp_avg_sq", torch.zeros_like)),
    "betas of another AdamW": Fault(GROUPS, "option-betas", UPDATE, (), option("betas", (0.9, 0.999))),
    "weight decay 0.01": Fault(GROUPS, "option-weight-decay", UPDATE, (), option("weight_decay", 0.01, 0)),
    "weight decay on norms": Fault(GROUPS, "weight-decay-on-norms", UPDATE, (), option("weight_decay", 0.1, 1)),
    "eps 1e-6": Fault(GROUPS, "option-eps", UPDATE, (), option("eps", 1e-6)),
    "learning rate": Fault(GROUPS, "option-lr", "step1.learning_rates", (), option("lr", 2e-3)),
    "a weight in no param group": Fault("state.names", "optimizer-members", UPDATE, (UP2,), job="unlisted"),
    # scheduler
    "scheduler reset": Fault(GROUPS, "scheduler-reset", "step1.learning_rates", (), schedule(0)),
    "scheduler off by one": Fault(GROUPS, "scheduler-offset", "step1.learning_rates", (), schedule(19)),
    "scheduler begins anew": Fault("config.scheduler", "scheduler-reset", "steps.learning_rates", (), lambda s, o: s["scheduler"].update(last_epoch=0, _step_count=1)),
    "scheduler missing": Fault("config.scheduler", "scheduler-missing", None, (), without("scheduler"), job="", recorded=False),
    "scheduler missing, the job has one": Fault("state.loaded", "scheduler-missing", "state.loaded", (), without("scheduler")),
    "scheduler lost, highest rate": Fault("state.loaded", "load-failed", "state.loaded", (), job="own_schedule"),
    # data
    "data one batch ahead": Fault("step1.batch", "data-offset", "step1.batch", (), job="ahead"),
    "data from the beginning": Fault("step1.batch", "data-other", "step1.batch", (), job="again"),
    "other data": Fault("step1.batch", "data-other", "step1.batch", (), job="another"),
    "half the global batch": Fault("step1.batch", "global-batch", "step1.batch", (), settings={"global_batch": 12}),
    # gradients and losses
    "gradients summed": Fault("step1.grad_norm", "gradient-scale", "step1.grad_norm", (), job="summed"),
    "clipping that bites": Fault("config.values", "clipping", UPDATE, (), settings={"clip": 0.1}, reference={"clip": 1.0}),
    "clipping dropped, before it ever acted": Fault("config.values", "clipping", None, (), reference={"clip": 1.0}),
    "labels not shifted": Fault("step1.loss", "loss-computation", "step1.loss", (), job="unshifted"),
    # configuration
    "rope theta": Fault("config.model", "model-configuration", PROBE, (), job="theta"),
    "eps of the norms": Fault("config.model", "model-configuration", PROBE, (), job="eps"),
    "trainer's step lost": Fault("config.values", "counters", None, (), without("step"), recorded=False),
    "trainer's step off by one": Fault("config.values", "counters", None, (), put(19, "step"), recorded=False),
    # tied weights
    "untied, with equal values": Fault("config.tied", "untied", "step1.grad_norm", (), untie(lambda t: t, True), tied=True),
    "untied, without moments": Fault("config.tied", "untied", "step1.grad_norm", (), untie(lambda t: t, False), tied=True),
    "untied, a new head": Fault(DIGESTS, "unrelated", PROBE, (model(HEAD),), untie(noise, True), tied=True),
}  # fmt: skip

#: {fault: the first check that sees it without the state} in mixed precision, with the rows of a forward pass held.
IN_BF16: dict[str, str | None] = {
    "stale shard of a weight": PROBE, "weights rounded to bf16": "step1.update_direction", "weights rounded to fp16": PROBE,
    "an exponent bit of a weight": PROBE, "the last bit of a weight": None, "optimizer's step off by one": UPDATE,
    "shards of exp_avg exchanged": UPDATE, "moments rounded to bf16": UPDATE, "an exponent bit of exp_avg_sq": WORST,
    "weight decay 0.01": UPDATE, "eps 1e-6": UPDATE, "eps of the norms": PROBE, "gradients summed": "step1.grad_norm",
    "stale optimizer of a layer": UPDATE, "exp_avg rotated by 1e-4 at the same norm": "step1.update_direction",
    "gradient of one weight 3e-5 too large": "step1.worst_grad",
}  # fmt: skip
