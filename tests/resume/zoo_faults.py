"""The faults of tests/resume/test_zoo.py, on the job of tests/live/zoo.py, whose state is everything that a job may save.

A state is {"model", "optim", "scheduler", "scaler", "rng", "dataloader", "ema", "best", "curve", "step", "epoch"}. At the
world size of the save, 4, the fused qkv of 96 rows has 24 on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from live.zoo import FEED, GLOBAL, HEADS, LAYERS, SAVED, SCALE, WIDTH, WORDS
from spoiling import (
    Fault,
    Spoil,
    State,
    every_slot,
    exchange,
    flip,
    in_turn,
    model,
    moment,
    option,
    put,
    rounded,
    slot,
    weight,
    without,
    zero,
)  # fmt: skip

BOTH = ("exp_avg", "exp_avg_sq")
QKV = [f"blocks.{i}.attn.wqkv.weight" for i in range(LAYERS)]
WO = [f"blocks.{i}.attn.wo.weight" for i in range(LAYERS)]
N1, N2 = "blocks.0.n1", "blocks.0.n2"
GATE_UP, W2 = "blocks.0.mlp.gate_up.weight", "blocks.0.mlp.w2.weight"
EXPERTS_1, EXPERTS_2 = "blocks.1.mlp.w1", "blocks.1.mlp.w2"
ROUTER, SELECT, TOKENS = "blocks.1.mlp.router", "blocks.1.mlp.select_bias", "blocks.1.mlp.tokens_per_expert"
BASE, LORA_A, LORA_B = ([f"blocks.{i}.adapter.{n}.weight" for i in range(LAYERS)] for n in ("base", "lora_A", "lora_B"))
EMBEDDING, HEAD, FREQUENCIES = "emb.weight", "head.weight", "rope.inv_freq"
BUFFERS = ("select_bias", "tokens_per_expert", "inv_freq", "seen")
RANK1, RANK2 = slice(24, 48), slice(48, 72)


# -------------------------------------------------------------------------------------------------- what is done to it


def moments(fqns: Sequence[str], act: Callable[[Any], Any]) -> Spoil:
    """Act on both moments of some parameters."""
    return in_turn(*(slot(f, s, act) for f in fqns for s in BOTH))


def weight_and_moments(fqns: Sequence[str], act: Callable[[Any], Any]) -> Spoil:
    """Act on some weights and on their moments."""
    return in_turn(*(weight(f, act) for f in fqns), moments(fqns, act))


def interleaved(t: Any) -> Any:
    """q, k and v of each head together, as Megatron has them."""
    return t.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)


def exchanged(size: int, dim: int = 0) -> Callable[[Any], Any]:
    """The first two parts of such a size are exchanged."""

    def act(t: Any) -> Any:
        a, b, *rest = t.split(size, dim)
        return torch.cat([b, a, *rest], dim)

    return act


def columns(a: int, b: int, size: int, back: bool) -> Callable[[Any], Any]:
    """Columns from `b` on are those from `a` on, and perhaps the other way round."""

    def act(t: Any) -> None:
        old = t.clone()
        t[:, b : b + size] = old[:, a : a + size]
        if back:
            t[:, a : a + size] = old[:, b : b + size]

    return act


def rope(t: Any) -> Any:
    """q and k from halves to pairs, in each head of 8."""
    turned = t[: 2 * WIDTH].unflatten(0, (2 * HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)
    return torch.cat([turned, t[2 * WIDTH :]])


def merged(state: State, old: State) -> None:
    """LoRA is in the base as well."""
    for base, a, b in zip(BASE, LORA_A, LORA_B, strict=True):
        state["model"][base] += 2.0 * state["model"][b] @ state["model"][a]


def factors(of: Callable[[State, str], tuple[float, float]]) -> Spoil:
    """Each moment times a factor."""

    def spoil(state: State, old: State) -> None:
        for fqn, slots in state["optim"]["state"].items():
            for name, factor in zip(BOTH, of(state, fqn), strict=True):
                slots[name] = slots[name] * factor

    return spoil


def corrected(state: State, fqn: str) -> tuple[float, float]:
    """The factors of Adam's bias correction."""
    (betas,) = (g["betas"] for g in state["optim"]["param_groups"] if fqn in g["params"])
    return 1 / (1 - betas[0] ** SAVED), 1 / (1 - betas[1] ** SAVED)


def blockwise(t: Any) -> Any:
    """Eight bits, with a scale for each 32 elements."""
    flat = torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % 32)).reshape(-1, 32)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((flat / scale).round() * scale).reshape(-1)[: t.numel()].reshape(t.shape)


def earlier(weights: bool = False, slots: Sequence[str] = ()) -> Spoil:
    """Parameters, or slots of the optimizer, of the step before."""

    def spoil(state: State, old: State) -> None:
        for fqn in old["model"]:
            if weights and not fqn.endswith(BUFFERS):
                state["model"][fqn] = old["model"][fqn]
            for name in slots if fqn in old["optim"]["state"] else ():
                if name in old["optim"]["state"][fqn]:
                    state["optim"]["state"][fqn][name] = old["optim"]["state"][fqn][name]

    return spoil


def rows_of(rank: int, t: Any) -> slice:
    """What a rank of 4 has of a tensor, as FSDP2 cuts it."""
    each = -(-t.shape[0] // 4)
    return slice(rank * each, (rank + 1) * each)


def stale_file(state: State, old: State) -> None:
    """Whatever is sharded, of the step before on rank 1."""

    def act(t: Any, before: Any) -> None:
        if t.ndim:
            t[rows_of(1, t)] = before[rows_of(1, t)]

    for fqn, t in state["model"].items():
        if not fqn.endswith(BUFFERS):
            act(t, old["model"][fqn])
    for fqn, slots in state["optim"]["state"].items():
        for name, t in slots.items():
            act(t, old["optim"]["state"][fqn][name])
    for fqn, t in state["ema"].items():
        act(t, old["ema"][fqn])


def stale_shard(state: State, old: State) -> None:
    state["model"][QKV[1]][RANK2] = old["model"][QKV[1]][RANK2]


def rows_on(t: Any) -> None:
    """The rows of rank 1 are those one row before."""
    t[RANK1] = t[23:47].clone()


def leaked(t: Any) -> Any:
    """Three elements of padding in the middle, as a wrong cut of a flat buffer leaves them."""
    flat, middle = t.reshape(-1), t.numel() // 2
    return torch.cat([flat[:middle], torch.zeros(3), flat[middle:-3]]).reshape(t.shape)


def swapped_bytes(t: Any) -> Any:
    return torch.from_numpy(t.numpy().byteswap())


def options_exchanged(state: State, old: State) -> None:
    a, b = state["optim"]["param_groups"][:2]
    a["params"], b["params"] = b["params"], a["params"]
    state["optim"]["param_groups"][:2] = [b, a]


def lr_of_group_0(state: State, old: State) -> None:
    for g in state["optim"]["param_groups"]:
        g["lr"] = state["optim"]["param_groups"][0]["lr"]


def lr_of_next_step(state: State, old: State) -> None:
    for g in state["optim"]["param_groups"]:
        g["lr"] *= (1 + math.cos(math.pi * 9 / 36)) / (1 + math.cos(math.pi * 8 / 36))


def no_amsgrad(*, option_too: bool, option_gone: bool = False) -> Spoil:
    """The slot is lost, and perhaps the option that asks for it."""

    def spoil(state: State, old: State) -> None:
        for slots in state["optim"]["state"].values():
            slots.pop("max_exp_avg_sq", None)
        group = state["optim"]["param_groups"][3]
        if option_gone:
            del group["amsgrad"]
        elif option_too:
            group["amsgrad"] = False

    return spoil


def lost_member(state: State, old: State) -> None:
    state["optim"]["param_groups"][0]["params"].remove(WO[2])


def inner(which: int, **changed: Any) -> Spoil:
    """A scheduler inside the sequence."""
    return lambda state, old: state["scheduler"]["_schedulers"][which].update(changed)


def of_old(*path: str) -> Spoil:
    """An entry is that of the earlier step."""

    def spoil(state: State, old: State) -> None:
        for key in path[:-1]:
            state, old = state[key], old[key]
        state[path[-1]] = old[path[-1]]

    return spoil


def averages_as_weights(state: State, old: State) -> None:
    """The averages of block 0, under the names of the weights."""
    for fqn, t in state["ema"].items():
        if fqn.startswith("blocks.0."):
            state["model"][fqn] = t.clone()


def rotated(state: State, old: State) -> None:
    """Attention of layer 0 in 2, of 2 in 3, of 3 in 0."""
    for tree in (state["model"], state["optim"]["state"]):
        for name in ("wqkv.weight", "wqkv.bias", "wo.weight"):
            a, b, c = (f"blocks.{i}.attn.{name}" for i in (0, 2, 3))
            tree[b], tree[c], tree[a] = tree[a], tree[b], tree[c]


def stage_local(state: State, old: State) -> None:
    """A pipeline's second stage has counted its blocks from 0, and was saved over the first."""
    for tree in (state["model"], state["optim"]["state"]):
        for fqn in [f for f in tree if f.startswith(("blocks.2.", "blocks.3."))]:
            tree[fqn.replace("blocks.2.", "blocks.0.").replace("blocks.3.", "blocks.1.")] = tree.pop(fqn)


def biases_lost(state: State, old: State) -> None:
    for fqn, t in state["model"].items():
        if fqn.endswith(("n1.bias", "n2.bias", "norm.bias")):
            t.zero_()


def gamma_less_one(state: State, old: State) -> None:
    for fqn, t in state["model"].items():
        if fqn.endswith(("n1.weight", "n2.weight", "norm.weight")):
            t -= 1


def noise(t: Any) -> Any:
    """As newly made."""
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) * 0.1


def moved(t: Any) -> None:
    t += 0.01 * noise(t)


def page(t: Any) -> None:
    t.reshape(-1)[1024:2048] = 0


def garbage(t: Any) -> None:
    t[WORDS:] = 20 * noise(t[WORDS:])


def head_is_stale(state: State, old: State) -> None:
    state["model"][HEAD] = state["model"][EMBEDDING] * 0.99


def embedding_is_stale(state: State, old: State) -> None:
    state["model"][EMBEDDING] = state["model"][EMBEDDING] * 0.99


def rotate(t: Any) -> Any:
    return t.roll(1, 0)


def lora(act: Callable[[Any], Any]) -> Spoil:
    return in_turn(*(weight(f, act) for f in LORA_B))


LOADED, NAMES, DIGESTS, GROUPS = "state.loaded", "state.names", "state.digests", "config.groups"
SCHEDULER, VALUES, RANDOM = "config.scheduler", "config.values", "config.rng"
LOADER, SCALER = "config.dataloader", "config.scaler"
PROBE, UPDATE, WORST, BATCH = "probe.logits", "step1.update_norm", "step1.worst_update", "step1.batch"
RATES, LATER_RATES, LOSS = "step1.learning_rates", "steps.learning_rates", "step1.loss"

FAULTS: dict[str, Fault] = {
    # fused and stacked weights
    "fused qkv interleaved per head, 1 layer (w+b+moments)": Fault(DIGESTS, "interleaved-rows", PROBE, (model(QKV[1]),), weight_and_moments([QKV[1], QKV[1][:-6] + "bias"], interleaved)),
    "fused qkv: q and k blocks exchanged": Fault(DIGESTS, "exchanged-rows", PROBE, (model(QKV[1]),), weight_and_moments([QKV[1], QKV[1][:-6] + "bias"], exchanged(WIDTH))),
    "fused gate/up halves exchanged (w+moments)": Fault(DIGESTS, "exchanged-rows", PROBE, (model(GATE_UP),), weight_and_moments([GATE_UP], exchanged(FEED))),
    "fused gate/up halves exchanged in moments only": Fault(DIGESTS, "exchanged-rows", UPDATE, (moment(GATE_UP, "exp_avg"),), moments([GATE_UP], exchanged(FEED))),
    "rope order of q,k rows inside fused qkv": Fault(DIGESTS, "rope", PROBE, (model(QKV[1]),), weight_and_moments([QKV[1], QKV[1][:-6] + "bias"], rope)),
    "exp_avg of square wo transposed": Fault(DIGESTS, "transposed", UPDATE, (moment(WO[1], "exp_avg"),), slot(WO[1], "exp_avg", lambda t: t.T)),
    "TP column shards of w2 exchanged": Fault(DIGESTS, "exchanged-columns", PROBE, (model(W2),), weight(W2, columns(6, 12, 6, True))),
    "TP column shard of w2 twice": Fault(DIGESTS, "copied-columns", PROBE, (model(W2),), weight(W2, columns(6, 12, 6, False))),
    "TP head shards of wo (columns) exchanged": Fault(DIGESTS, "exchanged-columns", PROBE, (model(WO[2]),), weight(WO[2], columns(8, 16, 8, True))),
    "experts rotated in w1 only (router not)": Fault(DIGESTS, "permuted-rows", PROBE, (model(EXPERTS_1),), weight(EXPERTS_1, rotate)),
    "experts 0,1 exchanged in w1,w2+moments, router not": Fault(DIGESTS, "exchanged-rows", PROBE, (model(EXPERTS_1),), weight_and_moments([EXPERTS_1, EXPERTS_2], exchanged(1))),
    "router bias lost (zero)": Fault(DIGESTS, "zero", PROBE, (model(ROUTER + ".bias"),), weight(ROUTER + ".bias", torch.zeros_like)),
    "router rows permuted": Fault(DIGESTS, "permuted-rows", PROBE, (model(ROUTER + ".weight"),), weight(ROUTER + ".weight", lambda t: t[[2, 0, 3, 1]])),
    "buffer: select_bias reset": Fault(DIGESTS, "zero", PROBE, (model(SELECT),), weight(SELECT, torch.zeros_like)),
    "buffer: int tokens_per_expert reset": Fault(DIGESTS, "zero", None, (model(TOKENS),), weight(TOKENS, torch.zeros_like)),
    "buffer: inv_freq through bf16": Fault(DIGESTS, "rounded-bfloat16", PROBE, (model(FREQUENCIES),), weight(FREQUENCIES, rounded(torch.bfloat16))),
    "buffer: inv_freq of another theta": Fault(DIGESTS, "elements", PROBE, (model(FREQUENCIES),), weight(FREQUENCIES, lambda t: 500000.0 ** (-torch.arange(0, 8, 2).float() / 8))),
    "head: padded vocabulary rows garbage (inert)": Fault(DIGESTS, "unrelated", UPDATE, (model(HEAD),), weight(HEAD, garbage)),
    "emb: padded vocabulary rows zeroed (inert)": Fault(DIGESTS, "zero-rows", UPDATE, (model(EMBEDDING),), weight(EMBEDDING, zero(slice(WORDS, None)))),
    "LoRA B lost (zero, as new)": Fault(DIGESTS, "zero", PROBE, (model(LORA_B[0]),), lora(torch.zeros_like)),
    "LoRA B scaled by alpha/r twice": Fault(DIGESTS, "scaled", PROBE, (model(LORA_B[0]),), lora(lambda t: 2 * t)),
    "LoRA merged into base, adapters kept": Fault(DIGESTS, "lora-merged", PROBE, (model(BASE[0]),), merged),
    # optimizer
    "moments of layer 0 wqkv are those of layer 3": Fault(DIGESTS, "copied", UPDATE, (moment(QKV[0], "exp_avg"),), lambda s, o: s["optim"]["state"].update({QKV[0]: {k: t.clone() for k, t in s["optim"]["state"][QKV[3]].items()}})),
    "exp_avg and exp_avg_sq exchanged in one tensor": Fault(DIGESTS, "moments-exchanged", UPDATE, (moment(QKV[1], "exp_avg"),), lambda s, o: (m := s["optim"]["state"][QKV[1]]).update(exp_avg=m["exp_avg_sq"], exp_avg_sq=m["exp_avg"])),
    "exp_avg_sq holds its square root, all": Fault(DIGESTS, "root", UPDATE, (), every_slot("exp_avg_sq", torch.sqrt)),
    "exp_avg_sq holds its square root, one tensor": Fault(DIGESTS, "root", UPDATE, (moment(QKV[1], "exp_avg_sq"),), slot(QKV[1], "exp_avg_sq", torch.sqrt)),
    "moments still multiplied by the loss scale": Fault(DIGESTS, "scaled", UPDATE, (), factors(lambda s, f: (SCALE, SCALE**2)), said="32768"),
    "moments of gradients summed over 4 ranks": Fault(DIGESTS, "scaled", UPDATE, (), factors(lambda s, f: (4, 16)), said="16"),
    "moments saved with bias correction applied": Fault(DIGESTS, "scaled", UPDATE, (), factors(corrected), said="bias correction"),
    "moments of one tensor through bf16": Fault(DIGESTS, "rounded-bfloat16", UPDATE, (moment(QKV[1], "exp_avg"),), moments([QKV[1]], rounded(torch.bfloat16))),
    "exp_avg_sq through fp16 (underflows)": Fault(DIGESTS, "rounded-float16", UPDATE, (), every_slot("exp_avg_sq", rounded(torch.float16))),
    "exp_avg through 8-bit blockwise quantisation": Fault(DIGESTS, "quantised", UPDATE, (), every_slot("exp_avg", blockwise)),
    "exp_avg negated, all": Fault(DIGESTS, "negated", UPDATE, (), every_slot("exp_avg", torch.neg)),
    "step off by one in the router group only": Fault(DIGESTS, "step-offset", UPDATE, (moment(ROUTER + ".weight", "step"),), lambda s, o: [slot(f, "step", lambda t: t - 1)(s, o) for f in s["optim"]["param_groups"][2]["params"]]),
    "moments one step old, steps and weights right": Fault(DIGESTS, "close", UPDATE, (), earlier(slots=(*BOTH, "max_exp_avg_sq")), said="moments"),
    "weights one step old, optimizer right": Fault(DIGESTS, "close", PROBE, (), earlier(weights=True)),
    "weights and optimizer of the step before, counters right": Fault(DIGESTS, "other-checkpoint", PROBE, (), earlier(True, (*BOTH, "max_exp_avg_sq", "step"))),
    # shards
    "one weight's shard one step old (rank 2)": Fault(DIGESTS, "close", PROBE, (model(QKV[1]),), stale_shard, 2),
    "everything of rank 1 one step old (stale file)": Fault(DIGESTS, "one-file", PROBE, (), stale_file, 1, said="__1_0.distcp"),
    "rank 1's rows one row on": Fault(DIGESTS, "shifted", PROBE, (model(QKV[2]),), weight(QKV[2], rows_on), 1),
    "flat padding of 3 leaked in the middle": Fault(DIGESTS, "shifted", PROBE, (model(GATE_UP),), weight(GATE_UP, leaked)),
    # param groups and scheduler
    "betas changed in one group (ckpt)": Fault(GROUPS, "option-betas", UPDATE, (), option("betas", (0.9, 0.98), 1)),
    "eps 1e-6 in one group (ckpt)": Fault(GROUPS, "option-eps", UPDATE, (), option("eps", 1e-6, 1)),
    "amsgrad lost with its slot": Fault(NAMES, "moments-missing", UPDATE, (moment(LORA_A[0], "max_exp_avg_sq"),), no_amsgrad(option_too=True)),
    "amsgrad option key gone, slot gone": Fault(LOADED, "moments-missing", LOADED, (moment(LORA_A[0], "max_exp_avg_sq"),), no_amsgrad(option_too=False, option_gone=True)),
    "max_exp_avg_sq lost, amsgrad kept": Fault(LOADED, "moments-missing", LOADED, (moment(LORA_A[0], "max_exp_avg_sq"),), no_amsgrad(option_too=False)),
    "max_exp_avg_sq reset to zero": Fault(DIGESTS, "zero", UPDATE, (moment(LORA_A[0], "max_exp_avg_sq"),), every_slot("max_exp_avg_sq", torch.zeros_like)),
    "options of groups 0 and 1 exchanged": Fault(GROUPS, "option-weight-decay", UPDATE, (), options_exchanged),
    "all groups get the lr of group 0": Fault(GROUPS, "option-lr", RATES, (), lr_of_group_0),
    "lr of the next step in the groups": Fault(GROUPS, "option-lr", RATES, (), lr_of_next_step),
    "a param lost from its group (ckpt), state kept": Fault(LOADED, "load-failed", LOADED, (), lost_member),
    "decoupled_weight_decay False (Adam) in ckpt": Fault(GROUPS, "option-decoupled-weight-decay", UPDATE, (), option("decoupled_weight_decay", False)),
    "maximize True in ckpt": Fault(GROUPS, "option-maximize", UPDATE, (), option("maximize", True)),
    "scheduler: base_lrs of the inner one wrong": Fault(SCHEDULER, "scheduler-state", None, (), inner(1, base_lrs=[0.001] * 4)),
    "scheduler: inner last_epoch off by one, outer right": Fault(SCHEDULER, "scheduler-offset", LATER_RATES, (), inner(1, last_epoch=7)),
    "scheduler: milestones changed": Fault(SCHEDULER, "scheduler-state", None, (), put(lambda: [5], "scheduler", "_milestones")),
    "scheduler: T_max of the inner one": Fault(SCHEDULER, "scheduler-state", LATER_RATES, (), inner(1, T_max=24)),
    # what is beside model and optimizer
    "grad scaler lost": Fault(SCALER, "scaler", None, (), without("scaler")),
    "grad scaler's scale other": Fault(SCALER, "scaler", None, (), put(65536.0, "scaler", "scale")),
    "grad scaler's growth tracker reset": Fault(SCALER, "scaler", None, (), put(0, "scaler", "_growth_tracker")),
    "RNG states lost": Fault(RANDOM, "rng", None, (), without("rng")),
    "RNG states of another step": Fault(RANDOM, "rng", None, (), of_old("rng"), oldest=True),
    "dataloader position one batch back": Fault(LOADER, "dataloader", None, (), put((SAVED - 1) * GLOBAL, "dataloader", "position")),
    "dataloader state lost": Fault(LOADER, "dataloader", None, (), without("dataloader")),
    "dataloader tensor (shuffle state) other": Fault(LOADER, "dataloader", None, (), of_old("dataloader", "shuffle"), oldest=True),
    "dataloader order list other": Fault(LOADER, "dataloader", None, (), of_old("dataloader", "order")),
    "EMA weights lost": Fault(VALUES, "values", None, (), without("ema")),
    "EMA weights one step old": Fault(VALUES, "values", None, (), of_old("ema")),
    "numpy array in extra other": Fault(VALUES, "values", None, (), put(lambda: np.arange(12) / 5, "curve")),
    "a value None instead of... (best None -> 3.0)": Fault(VALUES, "values", None, (), put(3.0, "best")),
    "epoch lost": Fault(VALUES, "counters", None, (), without("epoch")),
    "EMA loaded as weights (block 0)": Fault(DIGESTS, "copied", PROBE, (), averages_as_weights, said="extra.ema"),
    # rounding and damage
    "one weight tensor through bf16": Fault(DIGESTS, "rounded-bfloat16", PROBE, (model(QKV[1]),), weight(QKV[1], rounded(torch.bfloat16))),
    "one moment tensor in bf16 (dtype)": Fault(DIGESTS, "rounded-bfloat16", UPDATE, (moment(QKV[1], "exp_avg"),), slot(QKV[1], "exp_avg", lambda t: t.bfloat16())),
    "middle mantissa bit of one weight": Fault(DIGESTS, "elements", None, (model(QKV[1]),), weight(QKV[1], flip(12, (30, 5)))),
    "last bit of one exp_avg_sq element": Fault(DIGESTS, "elements", None, (moment(QKV[1], "exp_avg_sq"),), slot(QKV[1], "exp_avg_sq", flip(0, (30, 5)))),
    "top exponent bit of one exp_avg element": Fault(DIGESTS, "elements", UPDATE, (moment(QKV[1], "exp_avg"),), slot(QKV[1], "exp_avg", flip(30, (30, 5)))),
    "two bits of one weight (ECC double)": Fault(DIGESTS, "elements", PROBE, (model(QKV[1]),), in_turn(weight(QKV[1], flip(20, (30, 5))), weight(QKV[1], flip(22, (30, 5))))),
    "a 4 KiB page of a weight zero": Fault(DIGESTS, "zero-rows", PROBE, (model(QKV[1]),), weight(QKV[1], page)),
    "byte-swapped tensor (endianness)": Fault(DIGESTS, "byte-order", PROBE, (model(QKV[1]),), weight(QKV[1], swapped_bytes)),
    # names
    "attention of layers rotated 0->2->3->0 (w+moments)": Fault(DIGESTS, "copied", PROBE, (), rotated),
    "stage-local names: blocks 2,3 saved as 0,1 (lost)": Fault(LOADED, "tensor-missing", LOADED, (), stage_local),
    "LayerNorm weight and bias exchanged (n1 of layer 0)": Fault(DIGESTS, "exchanged", PROBE, (model(N1 + ".weight"), model(N1 + ".bias")), exchange(["model"], [(N1 + ".weight", N1 + ".bias")])),
    "n1 and n2 of a layer exchanged (w+moments)": Fault(DIGESTS, "exchanged", PROBE, (model(N1 + ".weight"),), exchange(["model", "optim"], [(f"{N1}.{x}", f"{N2}.{x}") for x in ("weight", "bias")])),
    "all biases of LayerNorms lost (zero)": Fault(DIGESTS, "zero", PROBE, (), biases_lost),
    "Megatron's 1+gamma norms (weight - 1)": Fault(DIGESTS, "offset", PROBE, (), gamma_less_one),
    "frozen base weight has moved": Fault(DIGESTS, "close", PROBE, (model(BASE[1]),), weight(BASE[1], moved)),
    "tied: file has a stale copy under the head's name": Fault(LOADED, "load-failed", LOADED, (), head_is_stale, job="tied", tied=True),
    "tied: embedding stale, head right": Fault(LOADED, "load-failed", LOADED, (), embedding_is_stale, job="tied", tied=True),
    # the job
    "job: LoRA alpha halved": Fault(PROBE, "model-configuration", PROBE, (), job="alpha"),
    "job: eps of the final norm": Fault(PROBE, "model-configuration", PROBE, (), job="eps"),
    "job: frozen base thawed": Fault(LOADED, "load-failed", LOADED, (), job="thawed"),
    "job: router frozen": Fault("step1.grad_norm", "frozen", "step1.grad_norm", (), job="unrouted"),
    "job: rank 1 reads rank 0's rows": Fault(BATCH, "data-rows", BATCH, (), job="same_rows"),
    "job: data one sample on": Fault(BATCH, "data-rows", BATCH, (), job="one_on"),
    "job: 4 labels of each row masked": Fault(LOSS, "loss-computation", LOSS, (), job="few_labels"),
    "job: labels masked in every second row": Fault(LOSS, "loss-computation", LOSS, (), job="every_second"),
    "job: z-loss added": Fault(LOSS, "loss-computation", LOSS, (), job="z_loss"),
    "job: label smoothing": Fault(LOSS, "loss-computation", LOSS, (), job="smoothed"),
    "job: mean over all tokens, not S-1": Fault(LOSS, "loss-computation", LOSS, (), job="all_tokens"),
    "job: no scheduler object": Fault(LATER_RATES, "scheduler-lost", LATER_RATES, (), job="unscheduled"),
    "job: clip 0.25 instead of 1.0": Fault(VALUES, "clipping", UPDATE, (), settings={"clip": 0.25}),
}  # fmt: skip
