"""diagnosis: what is likely wrong, in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume.test_judge import (
    FAULTS,
    FQNS,
    edit_state,
    job,
    mark,
    rate,
    recorded,
    reference_of,
    scaled,
    shape_of,
    with_probe,
)

import ckpttool
from ckpttool.engine.tensor_faults.tensor_kinds import TensorKind
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.verdict import Cause
from ckpttool.resume.diagnosis import causes as rules
from ckpttool.resume.diagnosis import files as inspection
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.diagnosis.files import describe_element_place
from ckpttool.resume.diagnosis.kinds import CauseKind, list_kinds
from ckpttool.resume.text import to_readable_name
from ckpttool.resume.trace.model import Trace


def blamed(reference: Trace | None, got: Trace, **how: Any) -> list[Cause]:
    checks = judge_single_run(reference, got).checks
    return find_causes(reference, got, checks, **how)


def kinds(reference: Trace | None, got: Trace, **how: Any) -> list[str]:
    return [c.kind for c in blamed(reference, got, **how)]


def first(reference: Trace | None, got: Trace, **how: Any) -> Cause:
    return blamed(reference, got, **how)[0]


def blind(trace: Trace) -> Trace:
    """The same with nothing but numbers of steps, as somebody's own loop records them."""
    trace.state, trace.scalars, trace.groups, trace.values = {}, {}, [], {}
    trace.config, trace.stored, trace.clip, trace.tied = None, {}, None, []
    return trace


# --------------------------------------------------------------------------------------------------- the table of kinds


def test_every_kind_has_a_name_of_its_own_and_a_rule_that_finds_it() -> None:
    assert len(list_kinds()) == len(CauseKind) + len(TensorKind)
    source = "".join(path.read_text() for path in Path(rules.__file__).parents[2].rglob("*.py"))
    assert [k for k in (*CauseKind, *TensorKind) if str(k) not in source] == []


def test_the_kinds_of_the_faults_in_the_docs_are_in_the_table() -> None:
    assert {kind.removeprefix("option-") for kind, _ in CAUSES.values()} <= {*list_kinds(), "betas"}


# --------------------------------------------------------------------------------------------------- from two traces

CAUSES = {
    "weights": ("weights-differ", "layer 1, self_attn.q_proj holds other values"),
    "optimizer dropped": ("optimizer-missing", "the checkpoint has no optimizer state"),
    "step reset": (
        "step-reset", "the optimizer's step is 0 on all tensors: the moments were restored, the step was not",
    ),
    "step off by one": ("step-offset", "the optimizer's step is 1 more on all tensors"),
    "schedule reset": ("scheduler-reset", "the scheduler starts over: its last_epoch is 0 and was 300"),
    "one shard of moments": ("moments-differ", "layer 1, mlp.up_proj, exp_avg holds other values"),
    "moments rounded": ("moments-differ", "all 78 tensors of the optimizer hold other values"),
    "betas": ("option-betas", "betas is [0.9, 0.999] and was [0.9, 0.95] for all parameters, which is the default"),
    "decay on norms": ("weight-decay-on-norms", "weight decay (0.1) is applied to 9 norms and biases that had none"),
    "gradients summed": ("gradient-scale", "4 times those of the reference (its number of ranks): summed"),
    "another batch": ("data-offset", "the data is 1 step ahead of the reference"),
    "half a batch": ("global-batch", "the global batch is 12 and was 24"),
    "untied": ("untied", "lm_head.weight and model.embed_tokens.weight were tied and are not"),
    "rope theta": ("model-configuration", "rope_theta is 500000.0 and was 10000.0"),
    "clipping off": ("clipping", "gradient clipping is off and was at 1.0"),
    "NaN in a moment": ("moments-differ", "layer 0, self_attn.v_proj, exp_avg holds other values"),
    "frozen": ("frozen", "layer 0, mlp.down_proj not updated in step 301"),
    "one bit of a weight": ("weights-differ", "layer 0, self_attn.k_proj holds other values"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAULTS)
def test_every_family_of_faults_has_its_name_first(family: str) -> None:
    found = first(reference_of(family), FAULTS[family][0](reference_of(family)))
    kind, words = CAUSES[family]
    assert found.kind == kind, found
    assert words in found.text
    assert found.evidence


@pytest.mark.slow
@pytest.mark.parametrize("family", FAULTS)
def test_a_fault_has_few_causes_and_none_that_is_made_up(family: str) -> None:
    found = kinds(reference_of(family), FAULTS[family][0](reference_of(family)))
    allowed = {"NaN in a moment": ["not-finite"]}
    assert found[1:] == allowed.get(family, []), found


BLIND = {
    "weights": ("weights", "the loss differs in the first step"),
    "optimizer dropped": ("optimizer", "gradients are equal, the updates of all 39 tensors are not: moments dropped"),
    "step reset": ("optimizer", "a step that was reset"),
    "schedule reset": ("scheduler-reset", "the learning rates are those of the training's first steps"),
    "one shard of moments": ("moments", "gradients are equal, the update of layer 1, mlp.up_proj"),
    "betas": ("optimizer", "or other betas"),
    "decay on norms": ("optimizer-group", "the updates of one param group (9 tensors) are not: its options"),
    "gradients summed": ("gradient-scale", "4 times"),
    "another batch": ("data-offset", "1 step ahead"),
    "rope theta": ("weights", "weights, the model's configuration or the batch"),
    "frozen": ("frozen", "layer 0, mlp.down_proj not updated"),
    "untied": ("untied", "only the gradient of model.embed_tokens.weight differs"),
    "NaN in a moment": ("not-finite", "its moments hold NaN, or negative squares"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", BLIND)
def test_numbers_alone_tell_the_part_that_is_wrong(family: str) -> None:
    a = blind(job(first=1))
    b = FAULTS[family][0](reference_of(family))
    if family in ("rope theta", "weights"):
        b.steps[0].batch = None
    if family in ("optimizer dropped", "step reset"):
        b = blind(b)  # its state shows it without a reference
    found = first(a, b)
    kind, words = BLIND[family]
    assert (found.kind, words in found.text) == (kind, True), found


@pytest.mark.slow
def test_nothing_is_blamed_where_nothing_failed() -> None:
    assert blamed(job(), job()) == []
    assert blamed(None, job()) == []


def test_moments_are_not_blamed_for_updates_where_they_are_equal() -> None:
    def some(n: str) -> bool:
        return "layers.1." in n

    cause = first(job(), scaled(job(), update=0.02, tensors=some))
    assert cause.kind == "optimizer"
    assert cause.text.endswith(
        "is not: the optimizer's options, or what is done to gradients before its step, such as clipping, since its "
        "state is equal"
    )
    assert first(blind(job()), blind(scaled(job(), update=0.02, tensors=some))).kind == "moments"


@pytest.mark.slow
def test_what_fits_nothing_is_unknown_and_lists_what_was_seen() -> None:
    b = job()
    b.steps[8].grad_norm = 100.0
    a = recorded()
    found = blamed(a, b)
    assert [c.kind for c in found] == ["spike"]
    b = job()
    b.steps[5].grad_norm = (b.steps[5].grad_norm or 0) * 1.01
    (found_,) = blamed(job(), b)
    assert found_.kind == "later-steps"
    b.groups[0]["eps"] = 1e-6
    assert kinds(job(), b) == ["option-eps"]
    b = job()
    b.state["model.extra"] = ("float32", (1,), "00")
    assert kinds(job(), b) == ["tensor-extra"]


# -------------------------------------------------------------------------------------- tensors that hold others' bytes


def swap(x: str, y: str) -> Callable[[str], str]:
    return lambda n: n.replace(x, "\0").replace(y, x).replace("\0", y)


def exchanged(x: str, y: str, only: str = "") -> Trace:
    return edit_state(
        job(), lambda n: (x in n or y in n) and n.startswith(only) and not n.endswith(".step"), swap(x, y)
    )


@pytest.mark.parametrize(
    ("got", "kind", "text"),
    [
        (exchanged("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj", "model."), "exchanged",
         "self_attn.k_proj and self_attn.q_proj are exchanged in layer 1 (weights)"),
        (exchanged("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj", "optim."), "exchanged",
         "self_attn.k_proj and self_attn.q_proj are exchanged in layer 1 (optimizer state)"),
        (exchanged("gate_proj", "up_proj"), "exchanged",
         "mlp.gate_proj and mlp.up_proj are exchanged in layers 0, 1, 2, 3 (weights and optimizer state)"),
        (exchanged("layers.1.", "layers.2."), "layers-exchanged",
         "layers 1 and 2 are exchanged (weights and optimizer state)"),
        (exchanged("layers.1.", "layers.2.", "optim."), "layers-exchanged",
         "layers 1 and 2 are exchanged (optimizer state)"),
        (exchanged("exp_avg_sq", "exp_avg"), "moments-exchanged",
         "exp_avg and exp_avg_sq are exchanged, of 39 parameters, first embed_tokens"),
        (exchanged("layers.0.mlp.up_proj", "layers.3.mlp.up_proj", "model."), "exchanged",
         "layer 0, mlp.up_proj and layer 3, mlp.up_proj are exchanged"),
        (edit_state(job(), lambda n: n == "model.lm_head.weight", lambda n: "model.model.embed_tokens.weight"),
         "copied",
         "lm_head holds the bytes of embed_tokens"),
    ],
)  # fmt: skip
def test_a_tensor_that_holds_the_bytes_of_another_is_named_with_it(got: Trace, kind: str, text: str) -> None:
    (found,) = blamed(job(), got)
    assert (found.kind, found.text) == (kind, text)
    assert found.tensors and "fingerprint" in found.evidence[0]


def test_a_part_of_layers_in_other_layers_is_one_cause() -> None:
    order = {0: 3, 2: 0, 3: 2}

    def moved(n: str) -> str:
        i = int(n.split(".layers.")[1].split(".")[0])
        return n.replace(f".layers.{i}.", f".layers.{order[i]}.")

    b = edit_state(job(), lambda n: "self_attn" in n and ".layers.1." not in n and not n.endswith(".step"), moved)
    (found,) = blamed(job(), b)
    assert (found.kind, found.text) == (
        "copied", "self_attn is that of another layer (weights and optimizer state): that of layer 0 is layer 3's, that of "
        "layer 2 is layer 0's, that of layer 3 is layer 2's",
    )  # fmt: skip
    assert len(found.tensors) == 3 * 12


def test_moments_that_went_to_the_next_parameter_are_one_cause() -> None:
    norms = [n for n in FQNS if n.endswith("layernorm.weight")]
    after = dict(zip(norms, norms[1:] + norms[:1], strict=True))

    def moved(n: str) -> str:
        fqn, _, slot = n.removeprefix("optim.state.").rpartition(".")
        return f"optim.state.{after[fqn]}.{slot}"

    b = edit_state(job(), lambda n: n.startswith("optim.") and "layernorm" in n and not n.endswith(".step"), moved)
    (found,) = blamed(job(), b)
    assert found.kind == "copied"
    assert found.text.startswith(
        "16 tensors (optimizer state) hold the bytes of others: layer 0, input_layernorm, exp_avg holds "
    )
    assert len(found.tensors) == 16


def test_layers_sorted_as_words_are_recognised() -> None:
    a, b = Trace(start=300), Trace(start=300)
    order = sorted(range(12), key=str)  # 0, 1, 10, 11, 2, ...
    for i in range(12):
        for leaf in ("q", "k", "v"):
            name = f"model.layers.{{}}.{leaf}.weight"
            a.state[name.format(i)] = ("float32", (4,), mark((i, leaf)))
            b.state[name.format(i)] = ("float32", (4,), mark((order[i], leaf)))
    (found,) = blamed(a, b)
    assert found.kind == "layers-exchanged"
    assert found.text.startswith(
        "layers are in another order (weights): layer 2 holds layer 10, layer 3 holds layer 11"
    )
    assert found.text.endswith("this is the order of their numbers sorted as text")


def test_bytes_that_several_tensors_have_are_no_trace_of_another_tensor() -> None:
    """All norms of a fresh model are ones: a norm that was reset to ones holds the bytes of many others."""
    a, b = job(), job()
    for t in (a, b):
        for n in ("model.layers.2.input_layernorm.weight", "model.layers.3.input_layernorm.weight"):
            t.state[f"model.{n}"] = ("float32", (64,), "01")
    b.state["model.model.norm.weight"] = ("float32", (64,), "01")
    b.stored = {}
    (found,) = blamed(a, b)
    assert found.kind == "weights-differ"
    assert found.tensors == ["model.model.norm.weight"]


@pytest.mark.slow
def test_an_optimizer_state_of_another_step_is_told_from_a_step_that_is_wrong() -> None:
    b = job()
    b.scalars = dict.fromkeys(b.scalars, 290.0)
    edit_state(b, lambda n: n.startswith("optim."))
    assert first(job(), b).text == "the optimizer's state is from another step, 10 steps earlier"
    edit_state(b, lambda n: n.startswith("model."))
    assert first(job(), b).text == "weights and optimizer state are from another checkpoint, 10 steps earlier"
    b = job()
    of = [n for n in FQNS if ".layers.2." in n]
    b.scalars.update({f"optim.state.{n}.step": 290.0 for n in of})
    edit_state(b, lambda n: n.startswith("optim.state.model.layers.2."))
    found = blamed(job(), b)
    assert (found[0].kind, found[0].text) == (
        "optimizer-stale", "the optimizer's state of layer 2 is from another step, 10 steps earlier",
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_missing_is_named() -> None:
    b = job()
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        del b.state[f"optim.state.{FQNS[4]}.{slot}"], b.stored[f"optim.state.{FQNS[4]}.{slot}"]
    found = first(job(), b)
    assert found.text == "the optimizer's state of 1 parameter is missing, first layer 0, self_attn.o_proj"
    b = job()
    del b.state[f"model.{FQNS[4]}"], b.stored[f"model.{FQNS[4]}"]
    assert first(job(), b).text == (
        "layer 0, self_attn.o_proj not in the checkpoint: a new job would start with random values"
    )
    b = job()
    b.stored = {}
    b.state["model.lm_head.weight"] = ("float32", (260, 64), "00")
    assert first(job(), b).text.endswith("the vocabulary was padded by 4 rows")
    b.state["model.lm_head.weight"] = ("float32", (64, 256), "00")
    assert first(job(), b).kind == "transposed"
    b.state["model.lm_head.weight"] = ("float32", (256, 65), "00")
    found = first(job(), b)
    assert (found.kind, found.text) == ("shape", "lm_head: shape [256, 65] instead of [256, 64]")
    b.state["model.lm_head.weight"] = ("bfloat16", (256, 64), "00")
    assert first(job(), b).text == "lm_head: bfloat16 instead of float32"


def test_a_load_that_changed_tensors_is_blamed_before_the_files() -> None:
    b = job()
    q, k = "model.model.layers.1.self_attn.q_proj.weight", "model.model.layers.1.self_attn.k_proj.weight"
    b.state[q] = (*b.state[q][:2], b.stored[k])
    found = first(None, b)
    assert found.kind == "loading"
    assert f"{q} holds what the files have for {k}" in found.evidence
    assert kinds(job(), b)[0] == "loading"
    b = Trace(start=300, failed="rank 1: Unsupported: nothing fits")
    assert first(job(), b).kind == "load-failed"


# --------------------------------------------------------------------------------------------------- rates, data, ranks


@pytest.mark.slow
def test_learning_rates_tell_what_became_of_the_scheduler() -> None:
    def with_rates(of: Callable[[int], float]) -> Trace:
        b = job()
        b.values = {n: v for n, v in b.values.items() if not n.startswith("scheduler")}
        for s in b.steps:
            s.learning_rates = [of(s.step)] * 2
        return b

    a = job(first=1)
    a.values = {n: v for n, v in a.values.items() if not n.startswith("scheduler")}
    assert first(a, with_rates(lambda s: rate(s - 300))).kind == "scheduler-reset"
    late = first(a, with_rates(lambda s: rate(s - 1)))
    assert (late.kind, late.text) == ("scheduler-offset", "the learning rates are those of 1 step earlier")
    lost = first(a, with_rates(lambda s: 3e-3))
    assert lost.text == "the learning rate stays at 0.003, which is where the schedule begins: no scheduler changes it"
    half = first(a, with_rates(lambda s: rate(s) / 2))
    assert (half.kind, "0.5 times" in half.text) == ("learning-rate", True)


@pytest.mark.slow
def test_batches_that_the_reference_had_in_another_step_are_found() -> None:
    def with_batches(of: Callable[[int], object]) -> Trace:
        b = scaled(job(), loss=2e-2, later=2e-2)
        for s in b.steps:
            s.batch = mark(("batch", of(s.step)))
        return b

    a = job(first=1, steps=20)
    assert first(a, with_batches(lambda s: s - 3)).text == "the data is 3 steps behind the reference"
    assert first(a, with_batches(lambda s: s - 300)).kind == "data-restart"
    assert first(a, with_batches(lambda s: 611 - s)).kind == "data-order"
    assert first(a, with_batches(lambda s: "x")).kind == "data-other"
    b = with_batches(lambda s: ("x", s))
    b.global_batch = None
    for s in b.steps:
        s.tokens = 12 * 48
    assert "a step has 576 tokens and had 1152 (0.5 times)" in first(a, b).text


def test_a_rank_that_disagrees_is_named() -> None:
    b = job()
    for s in b.steps[2:]:
        s.losses = [s.loss, s.loss, s.loss + 1e-9, s.loss]
    assert first(None, b).text == "rank 2 disagrees with the others on the loss, from step 303 on"
    b.steps[0].losses = [1.0, 2.0, 3.0, 4.0]
    assert "not reduced over all of them" in first(None, b).text


def test_a_rank_with_another_model_is_named_before_the_loss_that_follows() -> None:
    got = scaled(job(probe={"agree": False, "odd": [1]}), loss=1e-3, grad=1e-3)
    found = blamed(job(), got)
    assert [c.kind for c in found] == ["rank-disagrees"]
    assert found[0].text.startswith("rank 1 computes other logits than the others from one batch: another model there")
    got.probe = {"agree": False}
    assert first(job(), got).text.startswith("ranks compute different logits from one batch")


@pytest.mark.parametrize(("factor", "words"), [(4, "4 times"), (8, "8 times"), (1 / 2, "1/2 of those")])
def test_gradients_that_are_summed_or_divided_twice(factor: float, words: str) -> None:
    found = first(job(), scaled(job(), grad=factor - 1))
    assert (found.kind, words in found.text) == ("gradient-scale", True)


@pytest.mark.parametrize("factor", [1.47, 2.1, 1.003, 0.6])
def test_other_ratios_of_gradients_are_not_called_a_sum(factor: float) -> None:
    assert "gradient-scale" not in kinds(job(), scaled(job(), grad=factor - 1))


@pytest.mark.slow
def test_equal_weights_with_other_logits_are_a_matter_of_configuration_or_kernels(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 8))
    a = with_probe(job(environment={"torch": "2.10"}), tmp_path / "a.npy", logits)
    b = with_probe(job(environment={"torch": "2.13"}), tmp_path / "b.npy", logits * 1.01)
    found = first(a, b)
    assert found.kind == "model-configuration"
    assert "torch is 2.13 and was 2.10" in found.evidence
    assert kinds(blind(a), b)[0] == "weights"
    b = with_probe(scaled(job(), loss=1e-3), tmp_path / "b.npy", logits)
    assert first(a, b).kind == "loss-computation"


def test_moments_that_make_nan_are_blamed_though_loss_and_gradients_are_finite() -> None:
    b = exchanged("exp_avg_sq", "exp_avg")
    b.steps[0].updates = dict.fromkeys(b.steps[0].updates, math.nan)
    b.steps[0].update_norm = math.nan
    found = blamed(job(), b)
    assert [c.kind for c in found] == ["moments-exchanged", "not-finite"]
    assert "all 39 tensors is not finite in step 301, though loss and gradients are" in found[1].text


def test_steps_of_zero_are_blamed_without_a_reference() -> None:
    b = job()
    b.scalars = dict.fromkeys(b.scalars, 0.0)
    assert first(None, b).text == (
        "the optimizer's step is 0 on all tensors: the moments were restored, the step was not"
    )
    b = job()
    b.state = {n: v for n, v in b.state.items() if n.startswith("model.")}
    b.stored, b.scalars = {}, {}
    assert first(None, b).kind == "optimizer-missing"
    b = job(roundtrip={"differing": ["model.lm_head.weight"]})
    assert kinds(None, b) == ["save-or-load"]


def test_names_are_spoken_as_people_do() -> None:
    assert (
        to_readable_name("optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg")
        == "layer 1, self_attn.q_proj, exp_avg"
    )
    assert to_readable_name("model.model.embed_tokens.weight") == "embed_tokens"
    assert to_readable_name("model.transformer.h.11.attn.c_attn.bias") == "layer 11, attn.c_attn.bias"


# ------------------------------------------------------------------------------------------------------- with the files


def files(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """A checkpoint in DCP for four ranks."""
    g = torch.Generator().manual_seed(0)
    model = {n: torch.randn(shape_of(n), generator=g) for n in FQNS}
    state = {
        n: {"step": torch.tensor(300.0), **{s: torch.rand(shape_of(n), generator=g) for s in ("exp_avg", "exp_avg_sq")}}
        for n in FQNS
    }
    tree = {"model": model, "optim": {"state": state, "param_groups": [{"lr": 1e-3, "params": FQNS}]}}
    if change is not None:
        change(tree)
    torch.save(tree, tmp_path / f"{name}.pt")
    ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / name, to="dcp", world_size=4)
    return ckpttool.open(tmp_path / name)


def both(tmp_path: Path, change: Callable[[dict[str, Any]], Any], names: Callable[[str], bool]) -> list[Cause]:
    with files(tmp_path, "a") as a, files(tmp_path, "b", change) as b:
        return blamed(job(), edit_state(job(), names), opened=(a, b))


@pytest.mark.slow
def test_a_zeroed_shard_is_named_with_its_rows_its_file_its_bytes_and_its_rank(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    (found,) = both(tmp_path, lambda t: t["model"][name][16:32].zero_(), lambda n: n == f"model.{name}")
    assert (found.kind, found.text) == ("zero-rows", "layer 1, mlp.down_proj has zeros in rows 16:32 of 64")
    assert found.tensors == [f"model.{name}"]
    assert found.place is not None
    assert found.place.startswith("__1_0.distcp, bytes ")
    assert found.place.endswith("(rank 1's shard, [16:32, 0:64] of [64, 64])")
    begin = int(found.place.split("bytes ")[1].split("..")[0])
    assert f"first difference at byte {begin})" in found.place + ")" or f"byte {begin} " in found.place
    with open(tmp_path / "b" / "__1_0.distcp", "rb") as f:
        f.seek(begin)
        assert f.read(16 * 64 * 4) == bytes(16 * 64 * 4)


@pytest.mark.slow
def test_rounding_of_all_weights_is_one_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_MORE", 0)

    def rounded(tree: dict[str, Any]) -> None:
        tree["model"] = {n: t.bfloat16().float() for n, t in tree["model"].items()}

    (found,) = both(tmp_path, rounded, lambda n: n.startswith("model."))
    assert (found.kind, found.text) == (
        "rounded-bfloat16", "all 39 weights hold exactly the reference's values rounded to bfloat16",
    )  # fmt: skip
    assert len(found.tensors) == 39
    assert "31 tensors of the same kind differ and were not read" in found.evidence


@pytest.mark.slow
def test_one_flipped_bit_of_a_moment_is_found_with_its_byte(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.v_proj.weight"

    def flip(tree: dict[str, Any]) -> None:
        tree["optim"]["state"][name]["exp_avg_sq"].view(torch.int32)[40, 3] ^= 1 << 24

    (found,) = both(tmp_path, flip, lambda n: n == f"optim.state.{name}.exp_avg_sq")
    assert found.kind == "elements"
    assert "element [40, 3]" in found.text
    assert "exponent bit 1 flipped" in found.text
    assert found.place is not None and found.place.startswith("__2_0.distcp")
    byte = int(found.place.split("at byte ")[1].split()[0])
    with open(tmp_path / "b" / "__2_0.distcp", "rb") as f:
        f.seek(byte)
        value = np.frombuffer(f.read(4), "<f4")[0]
    assert f"{float(value)!r} instead of" in found.text


@pytest.mark.slow
def test_files_that_are_equal_leave_the_loading(tmp_path: Path) -> None:
    name = "model.lm_head.weight"
    (found,) = both(tmp_path, lambda t: None, lambda n: n == name)
    assert found.kind == "loading"
    assert "equal in both checkpoints' files" in found.text


@pytest.mark.slow
def test_moments_that_are_others_without_signs_are_not_called_close(tmp_path: Path) -> None:
    def signed(tree: dict[str, Any]) -> None:
        for s in tree["optim"]["state"].values():
            s["exp_avg"] -= 0.25

    def exchange(tree: dict[str, Any]) -> None:
        signed(tree)
        for s in tree["optim"]["state"].values():
            s["exp_avg"], s["exp_avg_sq"] = s["exp_avg_sq"], s["exp_avg"].abs()

    b = edit_state(job(), lambda n: n.endswith(".exp_avg"), lambda n: f"{n}_sq")
    edit_state(b, lambda n: n.endswith(".exp_avg_sq"))
    with files(tmp_path, "a", signed) as left, files(tmp_path, "b", exchange) as right:
        found = blamed(job(), b, opened=(left, right))
    assert [(c.kind, c.text) for c in found] == [
        ("moments-copied", "exp_avg holds exp_avg_sq, of 39 parameters, first embed_tokens"),
        ("moments-copied", "all 39 exp_avg_sq tensors hold the values of exp_avg without their signs"),
    ]
    assert found[1].place is not None and found[1].place.startswith("__0_0.distcp")


@pytest.mark.slow
def test_two_kinds_of_difference_are_two_causes(tmp_path: Path) -> None:
    q = "model.layers.0.self_attn.q_proj.weight"

    def change(tree: dict[str, Any]) -> None:
        tree["model"][q] = tree["model"][q].T.contiguous()
        for n in FQNS:
            tree["optim"]["state"][n]["exp_avg"].zero_()

    found = both(tmp_path, change, lambda n: n == f"model.{q}" or n.endswith(".exp_avg"))
    assert len(found[1].tensors) == 39
    assert [(c.kind, c.text) for c in found] == [
        ("transposed", "layer 0, self_attn.q_proj holds the reference transposed"),
        ("zero", "all 39 exp_avg tensors are all zeros"),
    ]


@pytest.mark.slow
def test_tensors_that_were_not_read_are_not_said_to_be_like_others_of_two_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_MORE", 0)

    def change(tree: dict[str, Any]) -> None:
        for k, n in enumerate(FQNS):
            tree["model"][n] = -tree["model"][n] if k % 2 else tree["model"][n] * 0

    found = both(tmp_path, change, lambda n: n.startswith("model."))
    assert [(c.kind, len(c.tensors)) for c in found] == [("zero", 4), ("negated", 4), ("weights-differ", 31)]
    monkeypatch.undo()
    (tmp_path / "again").mkdir()
    found = both(tmp_path / "again", change, lambda n: n.startswith("model."))
    assert [(c.kind, len(c.tensors)) for c in found] == [("zero", 20), ("negated", 19)]


def test_the_place_of_an_element_is_that_of_its_chunk(tmp_path: Path) -> None:
    with files(tmp_path, "a") as a:
        ckpt = a.locate()
        assert describe_element_place(ckpt, "model.nothing", 0) is None
        text = describe_element_place(ckpt, "model.lm_head.weight", 200 * 64 + 1) or ""
    assert text.startswith("__3_0.distcp")
    assert "(rank 3's shard, [192:256, 0:64] of [256, 64])" in text


def test_the_byte_of_an_element_in_a_chunk_that_is_not_row_major(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    torch.save({"model": {"w": w.t(), "v": w}}, tmp_path / "a.pt")
    with ckpttool.open(tmp_path / "a.pt") as opened:
        text = describe_element_place(opened.locate(), "model.w", 4) or ""  # w.t()[1, 1] == 5
    byte = int(text.split("at byte ")[1].split()[0])
    assert np.frombuffer((tmp_path / "a.pt").read_bytes()[byte : byte + 4], "<f4")[0] == 5.0


def test_a_tied_parameter_that_goes_by_its_other_name_is_not_frozen() -> None:
    ties = [["lm_head.weight", "model.embed_tokens.weight"]]
    a, b = job(tied=ties), scaled(job(tied=ties), update=1e-3)
    for t, gone in ((a, "lm_head.weight"), (b, "model.embed_tokens.weight")):
        for s in t.steps:
            del s.grads[gone], s.updates[gone]
    assert "frozen" not in kinds(a, b)


def test_updates_of_a_part_of_a_group_are_not_blamed_on_its_options() -> None:
    b = scaled(job(), update=0.25, tensors=lambda n: "norm" in n and "layers.1" in n)
    assert first(blind(job()), b).kind == "moments"
    assert "its options" not in first(blind(job()), b).text


@pytest.mark.parametrize(
    ("case", "rank"),
    [
        ("zero3_w4", True),
        ("fsdp1_w4_uop1", True),
        ("hf_llama", False),
        ("full_w1", False),
        ("zero2_w2_roundrobin", True),
    ],
)
def test_names_of_files_tell_ranks_where_they_do(case: str, rank: bool) -> None:
    folder = Path(__file__).parents[2] / "fixtures" / case
    where = folder / "ckpt" if (folder / "ckpt").exists() else folder
    how = {"flat_layout": str(folder / "flat_layout.json")} if case.startswith("fsdp1") else {}
    opened = ckpttool.open(where / "fqn.pt" if case == "full_w1" else where, **how)
    with opened:
        ckpt = opened.locate()
        names = [n for n, t in ckpt.tensors.items() if t.numel > 1 and (not rank or n.startswith("optim.state."))]
        places = [describe_element_place(ckpt, n, 0) for n in names]
    assert all(places)
    assert ("rank " in "".join(map(str, places))) is rank


# -------------------------------------------------------------------------------------------------------- failed loads


def not_loaded(text: str, gone: Callable[[str], bool] = lambda n: False, more: tuple[str, ...] = ()) -> Trace:
    """What a run leaves whose load failed: names in the files, without fingerprints."""
    out = Trace(start=300, failed=text)
    out.state = {n: (d, s, "") for n, (d, s, _) in job().state.items() if not gone(n)}
    out.state |= {n: ("float32", (64,), "") for n in more}
    return out


def test_the_error_of_the_load_is_the_first_cause_if_names_and_shapes_do_not_explain_it() -> None:
    text = "lm_head.weight and model.embed_tokens.weight are one parameter of the job, but differ in the checkpoint"
    found = blamed(job(), not_loaded(text))
    assert [(c.kind, c.text) for c in found] == [("load-failed", f"the checkpoint could not be loaded: {text}")]
    found = blamed(job(), not_loaded(text, more=("model.model.layers.1.input_layernorm.bias",)))
    assert [c.kind for c in found] == ["load-failed", "tensor-extra"]


def test_what_is_missing_comes_before_the_error_of_the_load_that_is_about_it() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    found = blamed(job(), not_loaded(f"the checkpoint does not have {name}", lambda n: name in n))
    assert [c.kind for c in found] == ["tensor-missing", "load-failed"]
    assert f"the checkpoint could not be loaded: the checkpoint does not have {name}" in found[0].evidence
    found = blamed(job(), not_loaded("another cause", lambda n: name in n))
    assert [c.kind for c in found] == ["load-failed", "tensor-missing"]


def test_a_lost_scheduler_is_named_as_such_where_the_job_has_one() -> None:
    text = "ckpt has no scheduler state, and the job has a scheduler. Leave the scheduler out, and set it up"
    reference = job()
    reference.values["scheduler.last_epoch"] = 300
    found = blamed(reference, not_loaded(text))
    assert [c.kind for c in found] == ["scheduler-missing", "load-failed"]
    assert found[0].text == "the checkpoint has lost the scheduler's state, which the reference holds"
    empty = not_loaded(text)
    empty.values["scheduler"] = []  # as Lightning's meta.pt has it
    assert [c.kind for c in blamed(reference, empty)] == ["scheduler-missing", "load-failed"]
    reference.values = {}
    assert [c.kind for c in blamed(reference, not_loaded(text))] == ["load-failed"], "it never had one"


@pytest.mark.slow
def test_clipping_that_only_the_recorded_job_did_is_the_first_cause() -> None:
    a, b = job(), job()
    a.clip = b.clip = None
    b.steps[3].update_norm = 1.5 * (a.steps[3].update_norm or 0)
    assert "clipping" not in kinds(a, b)
    a.unrecorded["clip"] = "the grad norm of step 303 is 1.02, but the optimizer got gradients of norm 1"
    found = blamed(a, b)
    assert found[0].kind == "clipping" and "step 303" in found[0].text
    b.clip = 1.0
    assert "clipping" not in kinds(a, b)


def test_rows_that_the_run_made_itself_are_said_to_be() -> None:
    a, b = job(), job()
    a.data, b.data = None, "synthetic"
    for step in b.steps:
        step.batch = f"{step.step:032x}"
    assert "pass data with the rows of the recorded job" in blamed(a, b)[0].text


def test_moments_of_a_weight_that_is_missing_are_not_a_second_cause() -> None:
    b = job()
    for n in [n for n in b.state if ".layers.2." in n]:
        del b.state[n], b.stored[n]
    b.scalars = {n: v for n, v in b.scalars.items() if ".layers.2." not in n}
    assert kinds(job(), b)[0] == "tensor-missing"
    assert "moments-missing" not in kinds(job(), b)


def test_a_checkpoint_of_another_step_is_one_though_frozen_weights_are_the_same() -> None:
    frozen = {n for n in FQNS if ".layers.0." in n or ".layers.1." in n}

    def lora(trace: Trace) -> Trace:
        trace.state = {
            n: x for n, x in trace.state.items() if not any(n.startswith(f"optim.state.{f}.") for f in frozen)
        }
        trace.scalars = {n: v for n, v in trace.scalars.items() if n in trace.state}
        trace.stored = {}
        return trace

    b = edit_state(lora(job()), lambda n: not n.endswith(".step") and not any(f in n for f in frozen))
    b.scalars = dict.fromkeys(b.scalars, 299.0)
    assert first(lora(job()), b).text == "weights and optimizer state are from another checkpoint, 1 step earlier"


# ------------------------------------------------------------------------------------------- losses with equal weights


def test_a_loss_that_follows_from_logits_within_their_bound_is_a_matter_of_configuration(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(40, 8))
    a = with_probe(job(dtype="bf16"), tmp_path / "a.npy", logits)
    b = with_probe(scaled(job(dtype="bf16"), loss=2e-6), tmp_path / "b.npy", logits * (1 + 8e-7))
    found = first(a, b)
    assert found.kind == "model-configuration"
    assert "eps of the norms" in found.text
    b = with_probe(scaled(job(dtype="bf16"), loss=1e-3), tmp_path / "b.npy", logits * (1 + 8e-7))
    assert first(a, b).kind == "loss-computation", "no such logits make such a loss"
    b = with_probe(scaled(job(dtype="bf16"), loss=2e-6), tmp_path / "b.npy", logits)
    assert first(a, b).kind == "loss-computation", "equal logits"


@pytest.mark.parametrize(
    ("reference", "got", "text"),
    [
        ((True, [0.1]), (False, []), "dropout is off in this job and was on in the reference"),
        ((True, [0.1]), (True, [0.2]), "dropout is 0.2 and was 0.1"),
        (
            (True, [0.1]),
            (True, [0.1]),
            "dropout is on, and its random numbers are not the reference's: random states of",
        ),
    ],
)
def test_dropout_is_blamed_where_it_is_on(
    reference: tuple[bool, list[float]], got: tuple[bool, list[float]], text: str, tmp_path: Path
) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 8))
    a, b = (
        with_probe(
            job(dropout=on, environment={"rng_restored": True, "dropout_probabilities": p}), tmp_path / "a.npy", logits
        )
        for on, p in (reference, got)
    )
    assert blamed(a, b) == []
    (found,) = blamed(a, scaled(b, loss=1e-2, later=1e-2, grad=1e-2))
    assert (found.kind, found.text.startswith(text)) == ("dropout", True)


def test_dropout_is_not_blamed_for_other_weights(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 8))
    how = {"dropout": True, "environment": {"rng_restored": True}}
    a = with_probe(job(**how), tmp_path / "a.npy", logits)
    b = with_probe(scaled(job(**how), loss=1e-2), tmp_path / "b.npy", logits * 1.1)
    edit_state(b, lambda n: n == "model.lm_head.weight")
    assert kinds(a, b) == ["weights-differ"]


# ------------------------------------------------------------------------------------------------- inputs and options


def with_inputs(trace: Trace, **more: str) -> Trace:
    """The trace with masks and positions in its batches."""
    for s in trace.steps:
        s.inputs, s.samples = {"attention_mask": "aa", "positions": "bb", **more}, repr(more)
    return trace


def test_masks_and_positions_that_differ_are_called_that_and_not_the_configuration() -> None:
    reference, got = with_inputs(job()), scaled(with_inputs(job(), positions="cc"), loss=1e-3, later=1e-3)
    (found,) = blamed(reference, got)
    assert (found.kind, found.text) == (
        "data-inputs", "positions of the samples differs from step 301 on, and input_ids, attention_mask do not"
    )  # fmt: skip
    got = with_inputs(job())
    for s in got.steps:
        s.samples = "other"
    (found,) = blamed(reference, got)
    assert found.text.endswith("of the samples are those of the reference, but not together with each other")


def test_batches_without_token_ids_are_found_in_other_steps() -> None:
    reference, got = job(), job()
    for trace, ahead in ((reference, 0), (got, 1)):
        for s in trace.steps:
            s.batch, s.inputs, s.samples = (
                None,
                {"pixels": f"{s.step + ahead}", "y": f"{s.step + ahead}"},
                f"{s.step + ahead}",
            )
    (found,) = blamed(reference, got)
    assert (found.kind, found.text) == ("data-offset", "the data is 1 step ahead of the reference")


def test_options_that_were_lost_are_the_cause_once(tmp_path: Path) -> None:
    reference, got = job(), job()
    for t in (reference, got):
        t.stored_groups = [{"options": ["lr", "lr_mult"], "params": FQNS}]
    got.stored_groups = [{"options": ["lr"], "params": FQNS}]
    (found,) = blamed(reference, got)
    assert found.kind == "options-lost" and found.tensors == FQNS
    assert found.text.startswith("the checkpoint has lost lr_mult of its param groups, for 39 parameters")
    dropped = FAULTS["optimizer dropped"][0](job())
    dropped.stored_groups = []
    assert kinds(reference, dropped) == ["optimizer-missing"], "which says that its groups are gone as well"
