"""judge: what a run showed against a reference. The runs are made up; their numbers are those that were measured."""

from __future__ import annotations

import copy
import json
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.resume.compare.bounds import COLUMNS, PROFILES, choose_bounds, choose_column
from ckpttool.resume.compare.differences import (
    are_equal_values,
    compute_relative_deviation,
    find_model_config_differences,
    list_ignored_config_keys,
    list_ignored_options,
    pair_learning_rates,
)
from ckpttool.resume.compare.judge import ORDER, judge_runs, judge_single_run, measure_noise
from ckpttool.resume.compare.verdict import Check, Report
from ckpttool.resume.text import describe_changes
from ckpttool.resume.trace.model import Step, Trace, trace_to_json
from ckpttool.resume.trace.sketches import WIDE, decode_sketches, encode_sketches
from ckpttool.resume.trace.state_after import step_scheduler_ahead
from ckpttool.resume.verify import Outcome, _refuse_failed_job

LAYERS = 4
HIDDEN = 64
MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
FQNS = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{m}.weight" for i in range(LAYERS) for m in (*MATRICES, *NORMS)),
    "model.norm.weight",
    "lm_head.weight",
]


def mark(text: object) -> str:
    """A fingerprint that only depends on what it is of."""
    return f"{zlib.crc32(repr(text).encode()):016x}"


def shape_of(fqn: str) -> tuple[int, ...]:
    return (HIDDEN,) if "norm" in fqn else (256, HIDDEN) if "embed" in fqn or "lm_head" in fqn else (HIDDEN, HIDDEN)


def unit(text: object) -> list[float]:
    """What a sketch of a tensor is over its norm."""
    drawn = np.random.default_rng(zlib.crc32(repr(text).encode())).normal(size=WIDE)
    return list(drawn / np.linalg.norm(drawn) * WIDE**0.5)


def rate(step: int) -> float:
    return 3e-3 * (0.5 + 0.5 * math.cos(step / 400))


def job(start: int = 300, steps: int = 10, *, first: int | None = None, **fields: Any) -> Trace:
    """A run with everything that a run can know. `first` is the first step in it, where that is not the next one."""
    state: dict[str, tuple[str, tuple[int, ...], str]] = {}
    scalars: dict[str, float] = {}
    for n in FQNS:
        state[f"model.{n}"] = ("float32", shape_of(n), mark(n))
    for n in FQNS:
        for slot in ("exp_avg", "exp_avg_sq"):
            state[f"optim.state.{n}.{slot}"] = ("float32", shape_of(n), mark((n, slot)))
        state[f"optim.state.{n}.step"] = ("float32", (), mark(("step", start)))
        scalars[f"optim.state.{n}.step"] = float(start)
    plain = {"lr": rate(start), "initial_lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "foreach": None, "fused": False}
    groups = [
        {**plain, "weight_decay": 0.1, "params": [n for n in FQNS if "norm" not in n]},
        {**plain, "weight_decay": 0.0, "params": [n for n in FQNS if "norm" in n]},
    ]
    out = Trace(
        source="somewhere", layout="dcp", start=start, world_size=4, device="cpu", dtype="fp32", seed=0,
        data="tokens.npy", scheduler="LambdaLR", global_batch=24, micro_batch=6, sequence=48, clip=1.0,
        parameters=sum(math.prod(shape_of(n)) for n in FQNS),
        state=state, stored={n: h for n, (_, _, h) in state.items()}, scalars=scalars, groups=groups,
        held={"scheduler.last_epoch": start}, loaders={"scheduler": "ckpttool"},
        values={
            "trainer.step": start, "trainer.epoch": 1, "scheduler.last_epoch": start,
            "scheduler._step_count": start + 1,
            "scheduler.base_lrs": [3e-3, 3e-3], "scheduler.lr_lambdas": [None, None], "extra.args.name": "a",
            "rng.0.python.0": 3, "rng.0.python.2": None, "dataloader.position": start, "dataloader.order": [2, 0, 1],
            "scaler.scale": 65536.0, "scaler._growth_tracker": 7, "extra.best": None,
        },
        others={
            "rng.0.torch": ("uint8", (5056,), mark("rng 0")), "rng.1.torch": ("uint8", (5056,), mark("rng 1")),
            "rng.0.python.1": ("list", (625,), mark("python")), "rng.0.numpy.1": ("uint32", (624,), mark("numpy")),
            "dataloader.shuffle": ("int64", (9,), mark("shuffle")), "extra.losses": ("float64", (4,), mark("losses")),
        },
        config={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_size": HIDDEN, "transformers_version": "5.0"},
        roundtrip={"save_seconds": 1.0, "load_seconds": 1.0, "bytes": 1, "differing": []},
    )  # fmt: skip
    begin = start + 1 if first is None else first
    for step in range(begin, start + 1 + steps):
        loss = 2.5 - step / 1000
        grads = {n: 0.1 + 0.001 * k + step / 10000 for k, n in enumerate(FQNS)}
        updates = {n: rate(step) * math.prod(shape_of(n)) ** 0.5 for n in FQNS}
        out.steps.append(Step(
            step, loss, norm(grads), norm(updates), [rate(step), rate(step)], mark(("batch", step)), 24 * 48, 0.5,
            [loss] * 4, grads, updates, [], encode_sketches([unit(("grad", step, n)) for n in grads]),
            encode_sketches([unit(("update", step, n)) for n in updates]),
        ))  # fmt: skip
    last = start + steps
    out.after = {
        "step": last, "buffers": ["model.seen"], "apart": [], "loaded": {"model.seen": encode_sketches([unit("old")], "f8")},
        "sketches": {n: ("float32", encode_sketches([unit((n, last))], "f8")) for n in (*state, "model.seen")},
        "scalars": {n: float(last) for n in scalars}, "groups": groups,
    }  # fmt: skip
    ahead = Follower(groups)
    out.schedule = step_scheduler_ahead(ahead, ahead.groups, last)
    for key, value in fields.items():
        setattr(out, key, value)
    return out


class Follower:
    """A scheduler of the rates of the job."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups, self.at = [dict(g) for g in groups], 300

    def step(self) -> None:
        self.at += 1
        for g in self.groups:
            g["lr"] = rate(self.at)


def norm(every: dict[str, float]) -> float:
    return math.sqrt(sum(v * v for v in every.values()))


def recorded(start: int = 300, steps: int = 10) -> Trace:
    """What a Recorder knows that was given a path and nothing else: losses."""
    return Trace(source="reference.jsonl", steps=[Step(s.step, s.loss) for s in job(start, steps).steps])


def scaled(
    trace: Trace, *, loss: float = 0.0, later: float = 0.0, grad: float = 0.0, update: float = 0.0,
    tensors: Callable[[str], bool] = lambda n: True,
) -> Trace:  # fmt: skip
    """The trace with relative deviations: of the loss in step 1 and later, of gradients and updates of some tensors."""
    for k, s in enumerate(trace.steps):
        s.loss *= 1 + (loss if k == 0 else later)
        s.losses = [s.loss] * 4
        s.grads = {n: v * (1 + grad) if tensors(n) else v for n, v in s.grads.items()}
        s.updates = {n: v * (1 + update) if tensors(n) else v for n, v in s.updates.items()}
        s.grad_norm, s.update_norm = norm(s.grads), norm(s.updates)
    return trace


def with_probe(trace: Trace, path: Path, logits: np.ndarray) -> Trace:
    np.save(path, logits.astype(np.float32))
    trace.probe = {"file": str(path), "agree": True}
    return trace


def verdicts(reference: Trace | None, got: Trace, profile: str = "strict", **how: Any) -> dict[str, str]:
    return {c.name: c.verdict for c in judge_single_run(reference, got, profile, **how)[0]}


def failing(reference: Trace | None, got: Trace, profile: str = "strict", **how: Any) -> set[str]:
    return {n for n, v in verdicts(reference, got, profile, **how).items() if v == "fail"}


def one(name: str, reference: Trace | None, got: Trace, profile: str = "strict", **how: Any) -> Check:
    return next(c for c in judge_single_run(reference, got, profile, **how)[0] if c.name == name)


def test_a_trace_against_itself_passes_everything(tmp_path: Path) -> None:
    a = with_probe(job(), tmp_path / "p.npy", np.eye(8))
    checks, envelope = judge_single_run(a, copy.deepcopy(a))[:2]
    assert [c.name for c in checks] == [n for n in ORDER if n != "run.completed"], "of a run that fails in a step"
    assert {c.verdict for c in checks} == {"pass"}, [c for c in checks if c.verdict != "pass"]
    assert {c.number for c in checks if c.stage in ("probe", "step 1", "steps")} <= {0.0, None}
    assert {k: len(v) for k, v in envelope.items()} == {"loss": 10, "grad_norm": 10, "update_norm": 10}
    assert envelope["loss"] == [1e-6] + [2e-6] * 9
    assert Report(a, a, "strict", checks).word == "pass"
    json.dumps([vars(c) for c in checks], allow_nan=False)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from(sorted(PROFILES)))
@settings(max_examples=25, deadline=None)
def test_whatever_is_known_a_trace_against_itself_never_fails(seed: int, profile: str) -> None:
    chance = random.Random(seed)
    a = job(steps=chance.choice([0, 1, 2, 5]))
    for key in (
        "state",
        "stored",
        "scalars",
        "values",
        "groups",
        "config",
        "probe",
        "roundtrip",
        "data",
        "dtype",
        "clip",
        "after",
        "schedule",
    ):
        if chance.random() < 0.3:
            setattr(a, key, getattr(Trace(), key))
    for s in a.steps:
        for key in (
            "grad_norm",
            "update_norm",
            "learning_rates",
            "batch",
            "losses",
            "grads",
            "updates",
            "update_sketches",
        ):
            if chance.random() < 0.3:
                setattr(s, key, getattr(Step(0, 0.0), key))
    checks = judge_single_run(a, copy.deepcopy(a), profile).checks
    made = [c.name for c in checks]
    assert made == [n for n in ORDER if n in made] and set(ORDER) - set(made) <= {
        "state.values",
        "state.reference",
        "run.completed",
    }
    assert not [c for c in checks if c.verdict == "fail"]
    assert all(c.text for c in checks)


def test_without_a_reference_only_what_the_run_shows_by_itself_is_judged() -> None:
    checks, envelope = judge_single_run(None, job())[:2]
    assert [c.name for c in checks] == [
        "state.loaded", "state.plausible", "state.values", "probe.ranks", "run.ranks", "run.finite", "run.spike", "run.dead",
        "roundtrip.state",
    ]  # fmt: skip
    assert not envelope
    assert {c.verdict for c in checks} == {"pass", "not comparable"}
    assert Report(job(), None, "strict", checks).word == "no reference"


def test_a_run_that_could_not_load_fails_at_once_and_says_which_names_are_not_there() -> None:
    a = job()
    b = Trace(start=300, failed="rank 0: Unsupported: no such tensor")
    b.state = {n: (d, s, "") for n, (d, s, _) in a.state.items() if "lm_head" not in n}
    found = verdicts(a, b)
    assert found["state.loaded"] == found["state.names"] == "fail"
    assert {v for n, v in found.items() if not n.startswith("state.")} <= {"not comparable"}
    assert "no such tensor" in one("state.loaded", a, b).text
    assert one("state.names", a, b).number == 4


# ------------------------------------------------------------------------------------------------------- benign noise

#: The largest deviations that were measured: (probe, loss 1, later, grad 1, update 1, worst grad 1, worst update 1).
NOISE = {
    "fp32": (2e-7, 1.2e-7, 1.9e-7, 8e-8, 4e-8, 1e-7, 3e-7),
    "bf16, micro-batch held": (0.0, 0.0, 0.0, 2.5e-7, 1.5e-16, 8e-12, 6e-16),
    "bf16": (0.0, 1.9e-7, 1.5e-4, 2.7e-4, 3.6e-5, 2.5e-3, 1.1e-3),
    "bf16, other kernels": (5.5e-3, 5e-5, 1.4e-4, 1.4e-4, 4e-5, 3.5e-3, 1.2e-3),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOISE)
def test_noise_as_it_was_measured_raises_no_alarm(kind: str, tmp_path: Path) -> None:
    probe, loss, later, grad, update, worst_grad, worst_update = NOISE[kind]
    a, b = job(), job()
    a.dtype = b.dtype = kind.partition(",")[0]
    b.micro_batch = 6 if kind.endswith("held") else 3
    b.world_size = 8
    profile = "standard" if kind.endswith("kernels") else "strict"
    assert choose_column(profile, a, b) == kind
    scaled(b, loss=loss, later=later)
    for s in b.steps:
        s.grad_norm, s.update_norm = (s.grad_norm or 0) * (1 - grad), (s.update_norm or 0) * (1 + update)
        s.grads[FQNS[5]] *= 1 + worst_grad
        s.updates[FQNS[5]] *= 1 - worst_update
    logits = np.random.default_rng(0).normal(size=(16, 32))
    with_probe(a, tmp_path / "a.npy", logits)
    with_probe(b, tmp_path / "b.npy", logits * (1 + probe))
    assert failing(a, b, profile) == set()
    assert not [n for n, v in verdicts(a, b, profile).items() if v != "pass"]


def test_with_the_shape_of_the_micro_batch_held_bf16_is_as_sharp_as_fp32() -> None:
    a, b = job(dtype="bf16"), scaled(job(dtype="bf16"), later=1e-4)
    assert failing(a, b) == {"steps.loss"}
    b.micro_batch = 3
    assert failing(a, b) == set()
    a.micro_batch = b.micro_batch = None
    assert choose_column("strict", a, b) == "bf16"


def rotated(trace: Trace, angle: float, step: int = 0, field: str = "update_sketches") -> Trace:
    """The trace, with a tensor of a step rotated at the same norm."""
    s = trace.steps[step]
    rows = decode_sketches(getattr(s, field), len(FQNS))
    assert rows is not None
    aside = np.array(unit("aside"))
    aside -= rows[3] * (aside @ rows[3]) / (rows[3] @ rows[3])
    turned = rows[3] + angle * aside
    rows[3] = turned * np.linalg.norm(rows[3]) / np.linalg.norm(turned)
    setattr(s, field, encode_sketches(rows))
    return trace


@pytest.mark.slow
def test_a_tensor_of_equal_norm_that_is_rotated_is_seen() -> None:
    for field, name, angle in (("update_sketches", "update", 1e-4), ("grad_sketches", "grad", 3e-5)):
        for step, stage, times in ((0, "step1", 1), (4, "steps", 20)):
            found = one(f"{stage}.{name}_direction", job(), rotated(job(), angle * times, step, field))
            assert found.verdict == "fail" and FQNS[3] in found.text, found
            assert found.number == pytest.approx(angle * times, rel=0.3)
            assert failing(job(), rotated(job(), angle * times, step, field)) == {found.name}
    assert failing(job(), rotated(job(), 1e-6)) == set()


def test_a_reference_of_an_earlier_recorder_is_judged_by_norms_and_the_report_says_so() -> None:
    a = job(after={}, schedule={})
    for s in a.steps:
        s.grad_sketches = s.update_sketches = None
    assert failing(a, rotated(job(), 1e-2)) == set()
    for name in ("step1.grad_direction", "steps.update_direction"):
        found = one(name, replace(a, layout=None), job())
        assert found.verdict == "not comparable" and "this version's Recorder records it" in found.text
    assert failing(a, scaled(job(), update=1e-3)) == {
        f"{stage}.{name}" for stage in ("step1", "steps") for name in ("update_norm", "worst_update")
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "optimizer", "buffers"])
def test_what_is_left_after_the_steps_is_equal_on_the_same_ranks_and_within_a_bound_on_others(kind: str) -> None:
    name = {"weights": f"model.{FQNS[2]}", "optimizer": f"optim.state.{FQNS[2]}.exp_avg", "buffers": "model.seen"}[kind]

    def moved(by: float, **fields: Any) -> Trace:
        out = job(**fields)
        rows = decode_sketches(out.after["sketches"][name][1], 1, "f8")
        assert rows is not None
        out.after["sketches"][name] = ("float32", encode_sketches(rows + by * np.array([unit("by")]), "f8"))
        return out

    check = f"after.{kind}"
    assert failing(job(), moved(1e-9)) == {check} and one(check, job(), moved(1e-9)).source == "exact"
    assert "bit-equal" in one(check, job(), moved(1e-9)).text
    assert failing(job(), moved(1e-9, world_size=3)) == set()
    assert failing(job(), moved(0.1, world_size=3)) == {check}


def test_tensors_whose_gradient_is_rounding_noise_raise_no_alarm() -> None:
    """A bias of k_proj: its gradient is zero but for rounding, and Adam makes a full update of the sign of that."""
    a, b = job(), job()
    bias = "model.layers.0.self_attn.k_proj.bias"
    for x, y in zip(a.steps, b.steps, strict=True):
        x.grads[bias], y.grads[bias] = 1e-9, 3e-9
        x.updates[bias], y.updates[bias] = 0.02, 0.03
    found = one("step1.worst_update", a, b)
    assert found.verdict == "pass"
    assert "1 tensor whose gradient is rounding noise not counted" in found.text
    assert verdicts(a, b)["step1.worst_grad"] == "pass"
    for x, y in zip(a.steps, b.steps, strict=True):
        x.grads[bias], y.grads[bias] = 0.1, 0.1
    assert failing(a, b) == {"step1.worst_update", "steps.worst_update"}


@pytest.mark.slow
def test_noise_grows_after_the_tenth_step_and_so_do_bounds() -> None:
    a, b = job(steps=50), job(steps=50)
    b.steps[49].loss *= 1 + 9e-6  # measured at step 50 of fp32: 1.1e-6; bound 2e-6 * 5
    assert failing(a, b) == set()
    b.steps[8].loss *= 1 + 9e-6
    assert failing(a, b) == {"steps.loss"}
    assert one("steps.loss", a, b).where == "step 309"
    assert judge_single_run(a, b)[1]["loss"][49] == pytest.approx(1e-5)


# ------------------------------------------------------------------------------------------------------------- faults


def edit_state(trace: Trace, choose: Callable[[str], bool], to: Callable[[str], str] | None = None) -> Trace:
    """Other bytes for some tensors, in files and job alike: fingerprints are those of names, or new ones."""
    original = {n: h for n, (_, _, h) in trace.state.items()}
    for n, (d, s, h) in list(trace.state.items()):
        if choose(n):
            trace.state[n] = (d, s, original[to(n)] if to else mark(("other", h)))
            trace.stored[n] = trace.state[n][2]
    return trace


def weights_wrong(t: Trace) -> Trace:
    edit_state(t, lambda n: n == "model.model.layers.1.self_attn.q_proj.weight")
    return scaled(t, loss=2.6e-4, later=6.6e-4, grad=9.7e-3, update=8.3e-4)


def optimizer_dropped(t: Trace) -> Trace:
    t.state = {n: v for n, v in t.state.items() if not n.startswith("optim.")}
    t.stored = {n: v for n, v in t.stored.items() if not n.startswith("optim.")}
    t.scalars = {}
    return scaled(t, later=1.9e-3, update=3.3)


def step_reset(t: Trace) -> Trace:
    t.scalars = dict.fromkeys(t.scalars, 0.0)
    edit_state(t, lambda n: n.endswith(".step"))
    return scaled(t, later=9.9e-4, update=1.2)


def step_off_by_one(t: Trace) -> Trace:
    t.scalars = dict.fromkeys(t.scalars, 301.0)
    return edit_state(t, lambda n: n.endswith(".step"))


def rates_reset(t: Trace) -> Trace:
    t.values["scheduler.last_epoch"] = 0
    t.held["scheduler.last_epoch"] = 0
    for k, s in enumerate(t.steps):
        s.learning_rates = [rate(k + 1)] * 2
    return scaled(t, later=9.6e-4, update=0.94)


def one_moment_shard(t: Trace) -> Trace:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_state(t, lambda n: n == f"optim.state.{name}.exp_avg")
    return scaled(t, later=8.2e-6, update=0.1, tensors=lambda n: n == name)


def moments_rounded(t: Trace) -> Trace:
    edit_state(t, lambda n: n.endswith((".exp_avg", ".exp_avg_sq")))
    return scaled(t, later=6.1e-8, update=9.3e-4, tensors=lambda n: n == FQNS[4])


def betas(t: Trace) -> Trace:
    for g in t.groups:
        g["betas"] = [0.9, 0.999]
    return scaled(t, later=4.5e-4, update=0.49)


def decay_on_norms(t: Trace) -> Trace:
    t.groups[1]["weight_decay"] = 0.1
    return scaled(t, later=4.6e-6, update=0.25, tensors=lambda n: "norm" in n)


def summed(t: Trace) -> Trace:
    return scaled(t, later=1.9e-4, grad=3.0, update=5.1e-2)


def other_batch(t: Trace) -> Trace:
    for s in t.steps:
        s.batch = mark(("batch", s.step + 1))
    return scaled(t, loss=2.2e-2, later=1.1e-2, grad=6.5e-2, update=1.8e-3)


def half_batch(t: Trace) -> Trace:
    t.global_batch = 12
    for s in t.steps:
        s.batch, s.tokens = mark(("half", s.step)), 12 * 48
    return scaled(t, loss=1.2e-2, later=2.5e-4, grad=0.47, update=4.4e-2)


def untied(t: Trace) -> Trace:
    t.tied = []
    return scaled(t, later=2.3e-5, grad=0.42, tensors=lambda n: "embed" in n)


def theta(t: Trace) -> Trace:
    t.config = {**(t.config or {}), "rope_theta": 500000.0}
    return scaled(t, loss=4.1e-3, later=3.9e-3, grad=1.1e-2, update=3e-3)


def no_clipping(t: Trace) -> Trace:
    t.clip = None
    return t


def not_a_number(t: Trace) -> Trace:
    edit_state(t, lambda n: n == f"optim.state.{FQNS[3]}.exp_avg")
    t.steps[0].updates[FQNS[3]] = t.steps[0].update_norm = math.nan  # type: ignore[assignment]
    for s in t.steps[1:]:
        s.loss, s.losses = math.nan, [math.nan] * 4
        s.grad_norm = s.update_norm = math.nan
        s.grads, s.updates = dict.fromkeys(s.grads, math.nan), dict.fromkeys(s.updates, math.nan)
    return t


def frozen(t: Trace) -> Trace:
    for s in t.steps:
        s.updates[FQNS[7]] = 0.0
        s.update_norm = norm(s.updates)
    return scaled(t, later=1.9e-5)


def one_bit(t: Trace) -> Trace:
    return edit_state(t, lambda n: n == f"model.{FQNS[2]}")


STEP1 = {"step1.grad_norm", "step1.worst_grad", "step1.update_norm", "step1.worst_update"}
LATER = {"steps.grad_norm", "steps.worst_grad", "steps.update_norm", "steps.worst_update", "steps.loss"}
NUMBERS = STEP1 | LATER | {"step1.loss"}
UPDATES = {"step1.update_norm", "step1.worst_update", "steps.update_norm", "steps.worst_update"}

#: family: (what happens to the run, checks that fail)
FAULTS: dict[str, tuple[Callable[[Trace], Trace], set[str]]] = {
    "weights": (weights_wrong, {"state.digests"} | NUMBERS),
    "optimizer dropped": (optimizer_dropped, {"state.names", "state.plausible", "steps.loss"} | UPDATES),
    "step reset": (step_reset, {"state.plausible", "state.digests", "state.scalars", "steps.loss"} | UPDATES),
    "step off by one": (step_off_by_one, {"state.digests", "state.scalars"}),
    "schedule reset": (
        rates_reset,
        {"config.scheduler", "step1.learning_rates", "steps.learning_rates", "steps.loss"} | UPDATES,
    ),
    "one shard of moments": (one_moment_shard, {"state.digests", "steps.loss"} | UPDATES),
    "moments rounded": (moments_rounded, {"state.digests"} | UPDATES),
    "betas": (betas, {"config.groups", "steps.loss"} | UPDATES),
    "decay on norms": (decay_on_norms, {"config.groups", "steps.loss"} | UPDATES),
    "gradients summed": (summed, STEP1 | LATER),
    "another batch": (other_batch, {"step1.batch", "steps.batch"} | NUMBERS),
    "half a batch": (half_batch, {"step1.batch", "steps.batch"}),
    "untied": (
        untied,
        {"config.tied", "steps.loss", "step1.grad_norm", "step1.worst_grad", "steps.grad_norm", "steps.worst_grad"},
    ),
    "rope theta": (theta, {"config.model"} | NUMBERS),
    "clipping off": (no_clipping, {"config.values"}),
    "NaN in a moment": (not_a_number, {"state.digests", "run.finite"} | LATER | UPDATES),
    "frozen": (frozen, {"steps.loss"} | UPDATES),
    "one bit of a weight": (one_bit, {"state.digests"}),
}


def reference_of(family: str) -> Trace:
    ties = [["lm_head.weight", "model.embed_tokens.weight"]] if family == "untied" else []
    return job(tied=ties)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAULTS)
def test_every_family_of_faults_fails_the_checks_that_see_it_and_no_others(family: str) -> None:
    change, expected = FAULTS[family]
    found = failing(reference_of(family), change(reference_of(family)))
    directions = {n for n in found if n.endswith("_direction")}
    assert found - directions == expected
    # the difference of two tensors is at least that of their norms
    norms = {stage.replace("_direction", "") for stage in directions}
    assert norms <= {n.replace("worst_", "") for n in expected}
    assert {n for n in norms if n.startswith("step1")} == {
        n.replace("worst_", "") for n in expected if n.startswith("step1.worst")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", sorted(set(FAULTS) - {"clipping off", "one bit of a weight", "step off by one", "untied"})
)
def test_numbers_alone_see_all_but_the_faults_that_have_not_acted_yet(family: str) -> None:
    """Against lines of a Recorder, without state, groups, values or configuration."""
    a = reference_of(family)
    a.state, a.scalars, a.groups, a.values, a.config, a.stored, a.clip, a.tied = {}, {}, [], {}, None, {}, None, []
    assert failing(a, FAULTS[family][0](reference_of(family))) & (NUMBERS | {"step1.batch"})


def test_numbers_that_are_nan_on_both_sides_are_not_equal() -> None:
    a = job()
    a.steps[3].loss = math.nan
    a.steps[3].losses = [math.nan] * 4
    assert failing(a, copy.deepcopy(a)) == {"steps.loss", "run.finite"}
    found = one("steps.loss", a, copy.deepcopy(a))
    assert found.number is None
    assert "nan" in found.text


# -------------------------------------------------------------------------------------------------------------- state


def test_the_job_must_hold_what_the_files_say() -> None:
    b = job()
    b.stored[f"model.{FQNS[0]}"] = "0" * 16
    found = one("state.loaded", None, b)
    assert (found.verdict, found.number, found.bound, found.where) == ("fail", 1, 0, f"model.{FQNS[0]}")
    b.stored = {}
    assert one("state.loaded", None, b).verdict == "not comparable"
    b.environment["copies_differ"] = ["model.x"]
    assert one("state.loaded", None, b).verdict == "fail"


@pytest.mark.parametrize(
    ("change", "good"),
    [
        (lambda t: None, True),
        (lambda t: t.scalars.update(dict.fromkeys(t.scalars, 0.0)), False),
        (lambda t: t.scalars.update({"optim.state.lm_head.weight.step": 0.0}), False),
        # a head that got its first gradient later, and an expert that no token was sent to
        (lambda t: t.scalars.update({"optim.state.lm_head.weight.step": 100.0}), True),
        (lambda t: t.scalars.update({"optim.state.model.layers.0.mlp.experts.3.up_proj.weight.step": 7.0}), True),
        (lambda t: t.scalars.update({"optim.state.model.layers.1.input_layernorm.weight.step": 100.0}), True),
        # one projection of an attention that was trained less than its neighbours
        (lambda t: t.scalars.update({"optim.state.model.layers.1.self_attn.q_proj.weight.step": 290.0}), False),
        (lambda t: t.scalars.update({"optim.state.lm_head.weight.step": math.nan}), False),
        (lambda t: t.scalars.update({"model.scale": math.inf}), True),
        (lambda t: t.state.pop("optim.state.lm_head.weight.exp_avg"), False),
        # parameters that never got a gradient have no state at all
        (lambda t: [t.state.pop(f"optim.state.lm_head.weight.{s}") for s in ("exp_avg", "exp_avg_sq", "step")], True),
    ],
)  # fmt: skip
def test_a_state_is_plausible_or_no_training_leaves_it(change: Callable[[Trace], Any], good: bool) -> None:
    b = job()
    change(b)
    assert (one("state.plausible", None, b).verdict == "pass") is good


def test_steps_of_zero_are_right_before_the_first_step_and_sgd_has_no_moments() -> None:
    fresh = job(start=0)
    assert one("state.plausible", None, fresh).verdict == "pass"
    sgd = job()
    sgd.state = {n: v for n, v in sgd.state.items() if not n.startswith("optim.")}
    sgd.scalars = {}
    assert one("state.plausible", None, sgd).verdict == "fail"
    sgd.groups = [{"lr": 0.1, "momentum": 0.0, "params": FQNS}]
    assert one("state.plausible", None, sgd).verdict == "pass"


@pytest.mark.slow
def test_missing_and_extra_tensors_are_counted_and_tied_names_are_not() -> None:
    a, b = job(), job()
    del b.state[f"model.{FQNS[0]}"]
    b.state["model.new.weight"] = ("float32", (2,), "00")
    found = one("state.names", a, b)
    assert (found.verdict, found.number) == ("fail", 2)
    assert "1 tensor missing, 1 that the reference does not have" in found.text
    a, b = job(), job()
    a.state["rng.3.torch"] = ("uint8", (5056,), "01")  # of a rank that this job does not have
    assert one("state.names", a, b).verdict == "pass"
    a = job(tied=[["lm_head.weight", "model.embed_tokens.weight"]])
    b = job(tied=[["lm_head.weight", "model.embed_tokens.weight"]])
    for n in [n for n in b.state if "lm_head" in n]:
        del b.state[n]
    assert one("state.names", a, b).verdict == "pass"


@pytest.mark.slow
def test_rounded_tensors_are_a_failure_but_for_the_relaxed_profile() -> None:
    a, b = job(), job()
    for n, (_, s, _) in list(b.state.items()):
        if n.startswith("model."):
            b.state[n] = ("bfloat16", s, mark(("rounded", n)))
            b.stored[n] = b.state[n][2]
    scaled(b, loss=2e-3, later=5e-3, update=5e-3)
    assert failing(a, b) > {"state.shapes"}
    assert failing(a, b, "standard") > {"state.shapes"}
    assert failing(a, b, "relaxed") == set()
    assert one("state.digests", a, b).number == 0
    assert (
        "39 tensors of another dtype in the files, as the profile allows" in one("state.shapes", a, b, "relaxed").text
    )
    assert "39 of another dtype are not compared" in one("state.digests", a, b, "relaxed").text
    a.rounded = {"bfloat16": {n: mark(("rounded", n)) for n in b.state}}
    assert "39 of them are exactly the reference's rounded to bfloat16" in one("state.digests", a, b, "relaxed").text
    name = f"model.{FQNS[3]}"
    a.rounded["bfloat16"][name] = mark("another")
    assert failing(a, b, "relaxed") == {"state.digests"}
    assert one("state.digests", a, b, "relaxed").where == name
    a.rounded["bfloat16"][name] = mark(("rounded", name))
    del b.state[f"model.{FQNS[0]}"], b.stored[f"model.{FQNS[0]}"]
    assert failing(a, b, "relaxed") == {"state.names"}


@pytest.mark.slow
def test_a_state_recorded_at_another_step_is_not_compared() -> None:
    a, b = job(start=200, steps=110), job()
    found = verdicts(a, b)
    assert {found[f"state.{n}"] for n in ("names", "shapes", "digests", "scalars")} == {"not comparable"}
    assert found["config.groups"] == "not comparable"
    assert found["step1.loss"] == found["steps.worst_update"] == "pass"


# ------------------------------------------------------------------------------------------------------ configuration


def test_groups_are_compared_by_their_parameters_and_not_by_their_order() -> None:
    a, b = job(), job()
    b.groups.reverse()
    for g in b.groups:
        g["betas"], g["fused"], g["foreach"] = tuple(g["betas"]), True, False
    assert one("config.groups", a, b).verdict == "pass"
    b.groups[1]["eps"] = 1e-6
    found = one("config.groups", a, b)
    assert found.verdict == "fail"
    assert "eps is 1e-06 and was 1e-08 for 30 parameters" in found.text
    b = job()
    b.groups[0]["params"].remove("lm_head.weight")
    assert "1 parameter not in the optimizer, first lm_head.weight" in one("config.groups", a, b).text


def stored(trace: Trace) -> list[dict[str, list[str]]]:
    """What the files of a run have of its param groups."""
    return [{"options": [k for k in g if k != "params"], "params": list(g["params"])} for g in trace.groups]


@pytest.mark.slow
@pytest.mark.parametrize("recording", [False, True])
def test_options_that_the_files_have_lost_are_found_though_the_job_has_its_own(recording: bool) -> None:
    a, b = job(), job()
    a.stored_groups, b.stored_groups = stored(a), stored(b)
    if recording:
        a.layout, a.stored_groups = None, None
    for key in ("foreach", "fused"):  # how a job computes, which it chooses itself
        b.stored_groups[0]["options"].remove(key)
    assert one("config.groups", a, b).verdict == "pass"
    b.stored_groups[1]["options"].remove("eps")
    found = one("config.groups", a, b)
    assert found.verdict == "fail" and found.where == "model.layers.0.input_layernorm.weight"
    assert "the checkpoint has lost eps of its param groups, for 9 parameters" in found.text
    b.stored_groups[0]["params"].remove("lm_head.weight")  # as where it is frozen, in layouts of what trains
    assert "for 9 parameters" in one("config.groups", a, b).text
    b.stored_groups = []
    assert "the checkpoint has lost its param groups, for 39 parameters" in one("config.groups", a, b).text
    b.layout = "hf"
    assert one("config.groups", a, b).verdict == "pass", "its files hold none; not_verified says so"
    b.stored_groups = None  # of an earlier run
    assert one("config.groups", a, b).verdict == "pass"


def test_the_state_of_the_scheduler_is_compared_and_functions_in_it_are_not() -> None:
    a, b = job(), job()
    b.others["scheduler.lr_lambdas"] = ("object", (), "builtins.function")
    b.values["scheduler._get_lr_called_within_step"] = True
    a.values["scheduler._get_lr_called_within_step"] = False
    assert one("config.scheduler", a, b).verdict == "pass"
    b.values["scheduler._step_count"] = 1
    assert one("config.scheduler", a, b).where == "scheduler._step_count"
    b.values = {n: v for n, v in b.values.items() if not n.startswith("scheduler.")}
    del b.others["scheduler.lr_lambdas"]
    assert one("config.scheduler", a, b).text == "the checkpoint has no scheduler state, but the reference has"


def test_counters_must_be_there_and_other_values_that_one_side_has_are_listed() -> None:
    a, b = job(), job()
    b.values["extra.note"], b.values["dataloader.more"] = "x", 3
    found = one("config.values", a, b)
    assert found.verdict == "pass" and found.text.endswith("only here: extra.note")
    assert one("config.dataloader", a, b).text.endswith("only here: dataloader.more")
    del b.values["trainer.step"]
    assert one("config.values", a, b).verdict == "fail"


#: {what is done to the values and marks of the checkpoint: (the check that fails, and it alone; a part of its text)}
BESIDE: dict[str, tuple[Any, str, str]] = {
    "all random states lost": (lambda v, o: drop(v, o, "rng."), "config.rng", "the checkpoint has lost random states"),
    "those of one rank lost": (lambda v, o: drop(v, o, "rng.1."), "config.rng", "rng.1.torch is missing"),
    "the generator of torch of another step": (lambda v, o: o.update({"rng.0.torch": ("uint8", (5056,), mark("x"))}), "config.rng", "rng.0.torch (uint8 [5056]) has other contents"),
    "that of python": (lambda v, o: o.update({"rng.0.python.1": ("list", (625,), mark("x"))}), "config.rng", "rng.0.python.1"),
    "that of numpy": (lambda v, o: o.update({"rng.0.numpy.1": ("uint32", (624,), mark("x"))}), "config.rng", "rng.0.numpy.1"),
    "dataloader lost": (lambda v, o: drop(v, o, "dataloader."), "config.dataloader", "has lost the dataloader's state"),
    "its position": (lambda v, o: v.update({"dataloader.position": 299}), "config.dataloader", "is 299 and was 300"),
    "its tensor": (lambda v, o: o.update({"dataloader.shuffle": ("int64", (9,), mark("x"))}), "config.dataloader", "dataloader.shuffle"),
    "its tensor of another length": (lambda v, o: o.update({"dataloader.shuffle": ("int64", (8,), mark("x"))}), "config.dataloader", "is int64 [8] and was int64 [9]"),
    "its tensor lost": (lambda v, o: drop(v, o, "dataloader.shuffle"), "config.dataloader", "dataloader.shuffle is missing"),
    "scaler lost": (lambda v, o: drop(v, o, "scaler."), "config.scaler", "has lost the grad scaler's state"),
    "scaler's scale": (lambda v, o: v.update({"scaler.scale": 1.0}), "config.scaler", "is 1.0 and was 65536.0"),
    "None is a number now": (lambda v, o: v.update({"extra.best": 3.0}), "config.values", "extra.best is 3.0 and was None"),
    "None lost": (lambda v, o: drop(v, o, "extra.best"), "config.values", "extra.best is missing"),
    "a value of the user lost": (lambda v, o: drop(v, o, "extra.args.name"), "config.values", "extra.args.name is missing"),
    "an array of the user": (lambda v, o: o.update({"extra.losses": ("float64", (4,), mark("x"))}), "config.values", "extra.losses"),
    "counter lost": (lambda v, o: drop(v, o, "trainer.epoch"), "config.values", "trainer.epoch is missing"),
}  # fmt: skip


def drop(values: dict[str, Any], others: dict[str, Any], start: str) -> None:
    for held in (values, others):
        for n in [n for n in held if n.startswith(start)]:
            del held[n]


@pytest.mark.slow
@pytest.mark.parametrize("fault", BESIDE)
def test_state_beside_model_and_optimizer_that_is_lost_or_other_fails_its_check_alone(fault: str) -> None:
    spoil, check, text = BESIDE[fault]
    a, b = job(), job()
    spoil(b.values, b.others)
    assert failing(a, b) == {check}
    assert text in one(check, a, b).text
    a.layout = None  # a recording that knows as much sees as much
    assert failing(a, b) == {check}


@pytest.mark.slow
def test_a_recording_that_knows_nothing_beside_the_optimizer_compares_nothing_there() -> None:
    a, b = job(layout=None, values={}, others={}, unrecorded={"rng": "the ranks of this job have none"}), job()
    names = ("config.scheduler", "config.rng", "config.dataloader", "config.scaler")
    assert {one(n, a, b).verdict for n in names} == {"not comparable"} and failing(a, b) == set()
    assert one("config.rng", a, b).text.endswith("did not record random states (the ranks of this job have none)")


def test_a_number_that_another_layout_holds_as_a_tensor_is_the_same_number() -> None:
    import torch

    from ckpttool.resume.trace import side_state as beside

    a, b = job(), job()
    del b.values["scaler.scale"]
    b.others["scaler.scale"] = beside.make_array_mark(torch.tensor(65536.0))
    assert one("config.scaler", a, b).verdict == "pass"
    b.others["scaler.scale"] = beside.make_array_mark(torch.tensor(32768.0))
    assert "scaler.scale is float32 [] and was 65536.0" in one("config.scaler", a, b).text


def test_objects_of_unknown_classes_are_neither_equal_nor_different() -> None:
    a, b = job(), job()
    for t in (a, b):
        t.others |= {n: ("object", (), "user.Thing") for n in ("extra.callback", "rng.0.extra")}
    b.others["extra.callback"] = ("object", (), "user.Other")
    assert failing(a, b) == set()
    only = {"values": {}, "others": {"rng.x": ("object", (), "user.Generator")}}
    assert one("config.rng", job(**only), job(**only)).verdict == "not comparable"


def test_text_that_looks_like_a_tag_is_text() -> None:
    a, b = job(), job()
    for t in (a, b):
        t.values |= {"extra.pad": "<pad>", "extra.added": ["<a>", "<b>"]}
    assert failing(a, b) == set()
    b.values |= {"extra.pad": "<|im_end|>", "extra.added": ["<b>", "<a>"]}
    found = one("config.values", a, b)
    assert found.verdict == "fail" and "extra.pad is '<|im_end|>' and was '<pad>'" in found.text
    assert "extra.added is ['<b>', '<a>']" in found.text


def test_values_are_alike_whatever_holds_them_but_true_is_not_one() -> None:
    assert are_equal_values((0.9, [1, "a"]), [0.9, (1.0, "a")])
    assert are_equal_values({"a": math.nan}, {"a": math.nan})
    assert not are_equal_values(True, 1)
    assert not are_equal_values([1], [1, 2])
    assert not are_equal_values({"a": 1}, {"a": 1, "b": 2})


def test_a_number_is_equal_to_a_tensor_that_holds_it_and_to_no_other() -> None:
    import torch

    from ckpttool.resume.trace import side_state as beside

    for number, held, equal in (
        (3, torch.tensor(3), True), (3.0, torch.tensor(3), True), (3.5, torch.tensor(3), False), (0.1, torch.tensor(0.1), True),
        (2, torch.tensor(True), False), (1, torch.tensor(True), True), (1 << 70, torch.tensor(3), False), (-1, torch.tensor(255, dtype=torch.uint8), False),
    ):  # fmt: skip
        a, b = (
            Trace(layout="dcp", values={"extra.n": number}),
            Trace(layout="dcp", others={"extra.n": beside.make_array_mark(held)}),
        )
        (check,) = [c for c in judge_single_run(a, b)[0] if c.name == "config.values"]
        assert check.verdict == ("pass" if equal else "fail"), (number, held)


def test_keys_of_a_configuration_that_say_nothing_about_the_computation_are_ignored() -> None:
    a = {"rope_theta": 1e4, "torch_dtype": "float32", "use_cache": True, "text": {"eps": 1e-6, "dtype": "x"}, "new": 1}
    a["transformers_version"] = "4.57"
    b = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "torch_dtype": "bfloat16", "use_cache": False}
    assert find_model_config_differences(a, {**b, "text": {"eps": 1e-6, "dtype": "y"}}) == {}
    assert find_model_config_differences(a, {**b, "text": {"eps": 1e-5}}) == {"text.eps": (1e-6, 1e-5)}
    assert find_model_config_differences(a, {"rope_parameters": {"rope_theta": 5e5}}) == {"rope_theta": (1e4, 5e5)}
    assert list_ignored_config_keys(a, b) == ["new", "rope_parameters.rope_type", "text.eps"]


def test_a_key_that_one_configuration_lacks_differs_where_the_same_transformers_wrote_both() -> None:
    a: dict[str, Any] = {"hidden_size": 8, "sliding_window": 4096, "pad_token_id": None, "transformers_version": "5.0"}
    b = {k: a[k] for k in ("hidden_size", "transformers_version")}
    assert describe_changes(find_model_config_differences(a, b)) == ["sliding_window is missing and was 4096"]
    assert describe_changes(find_model_config_differences(b, a)) == ["sliding_window is 4096 and was missing"]
    assert find_model_config_differences(a, {**b, "transformers_version": "4.57"}) == {}


def test_an_option_that_one_param_group_lacks_differs_but_for_those_that_another_torch_writes() -> None:
    a, b = job(environment={"torch": "2.13.0"}), job(environment={"torch": "2.13.0"})
    for g in a.groups:
        g |= {"lr_mult": 0.5, "decoupled_weight_decay": True}
    assert "decoupled_weight_decay is missing and was True" in one("config.groups", a, b).text
    b.environment = {"torch": "2.10.0"}
    assert one("config.groups", a, b).text.startswith("param groups differ: lr_mult is missing and was 0.5 for")
    assert list_ignored_options(a, b) == ["decoupled_weight_decay"]
    assert "lr_mult is 0.5 and was missing" in one("config.groups", b, a).text


def test_a_head_that_the_configuration_ties_must_be_tied_even_without_a_reference() -> None:
    b = job(config={"tie_word_embeddings": True})
    assert failing(None, b) == {"config.tied"}
    b.tied = [["lm_head.weight", "model.embed_tokens.weight"]]
    assert failing(None, b) == set()


# -------------------------------------------------------------------------------------------------------------- probe


@pytest.mark.slow
def test_the_probe_gives_relative_l2_largest_difference_and_kl(tmp_path: Path) -> None:
    a = with_probe(job(), tmp_path / "a.npy", np.array([[3.0, 0.0], [0.0, 4.0]]))
    b = with_probe(job(), tmp_path / "b.npy", np.array([[3.0, 0.5], [0.0, 4.0]]))
    found = one("probe.logits", a, b)
    assert (found.verdict, found.number) == ("fail", pytest.approx(0.1))
    p = math.exp(3) / (math.exp(3) + 1)
    q = math.exp(3) / (math.exp(3) + math.exp(0.5))
    kl = (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))) / 2
    assert f"largest difference 0.5, mean KL divergence {kl:.2g}" in found.text
    logits = np.random.default_rng(0).normal(size=(64, 64))
    with_probe(a, tmp_path / "a.npy", logits)
    assert one("probe.logits", a, with_probe(b, tmp_path / "b.npy", logits * (1 + 4e-6))).verdict == "pass"
    assert one("probe.logits", a, with_probe(b, tmp_path / "b.npy", logits * (1 + 7e-6))).verdict == "fail"
    with_probe(a, tmp_path / "a.npy", np.array([[3.0, 0.0], [0.0, 4.0]]))
    with_probe(b, tmp_path / "b.npy", np.array([[3.0, 0.0], [0.0, math.nan]]))
    assert one("probe.logits", a, b).verdict == "fail"
    with_probe(b, tmp_path / "b.npy", np.zeros((2, 3)))
    assert one("probe.logits", a, b).verdict == "not comparable"
    b.probe["agree"] = False
    assert one("probe.ranks", a, b).verdict == "fail"
    (tmp_path / "b.npy").write_bytes(b"no array")
    assert one("probe.logits", a, b).verdict == "not comparable"


# -------------------------------------------------------------------------------------------------------------- steps

DYNAMIC = {
    f"{s}.{n}" for s in ("step1", "steps") for n in ("loss", "grad_norm", "worst_grad", "update_norm", "worst_update")
}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dtype": "bf16"}, "this run computes in bf16, the reference computed in fp32"),
        ({"sequence": 64}, "sequences have 64 tokens"),
        ({"global_batch": 48}, "the global batch is 48"),
        ({"dropout": True}, "dropout is on"),
    ],
)
def test_jobs_that_are_not_the_same_are_not_compared(fields: dict[str, Any], why: str) -> None:
    a, b = job(), job(**fields)
    found = verdicts(a, b)
    assert {found[n] for n in DYNAMIC} == {"not comparable"}
    assert why in one("step1.loss", a, b).text
    assert found["step1.learning_rates"] == found["step1.batch"] == "pass"
    checks, envelope = judge_single_run(a, b)[:2]
    assert envelope == {"loss": [], "grad_norm": [], "update_norm": []}
    assert Report(b, a, "strict", checks).word == "not comparable"


def test_dropout_is_compared_at_one_world_size_with_its_random_numbers_restored() -> None:
    a, b = job(dropout=True), job(dropout=True, environment={"rng_restored": True})
    assert failing(a, b) == set()
    assert verdicts(a, b)["step1.loss"] == "pass"
    b.world_size = 2
    assert verdicts(a, b)["step1.loss"] == "not comparable"


@pytest.mark.slow
def test_inputs_beside_the_tokens_are_compared_key_by_key() -> None:
    a, b = job(), job()
    for t in (a, b):
        for s in t.steps:
            s.inputs, s.samples = {"attention_mask": "aa", "positions": "bb"}, "cc"
    assert one("step1.batch", a, b).verdict == "pass"
    b.steps[0].inputs["attention_mask"] = "dd"
    found = one("step1.batch", a, b)
    assert found.text == "attention_mask of the samples differs from the reference's in 1 of 1 step"
    b.steps[0].inputs, b.steps[0].samples = {"positions": "bb", "more": "ee"}, "ff"
    assert one("step1.batch", a, b).verdict == "pass", "what one side has alone is compared with nothing"
    for t in (a, b):
        t.steps[0].batch, t.steps[0].inputs = None, {"pixels": "aa", "y": "bb"}
    found = one("step1.batch", a, b)
    assert found.text == "pixels, y of the samples differ from the reference's in 1 of 1 step", (
        "each is there, not together"
    )
    b.steps[0].inputs = {"images": "aa"}
    assert one("step1.batch", a, b).text == "the samples of the two sides have no key in common"


def test_other_data_by_name_is_not_compared_unless_the_batches_are_equal() -> None:
    a, b = job(), job(data="copy/of/tokens.npy")
    assert verdicts(a, b)["step1.loss"] == "pass"
    other_batch(b)
    assert verdicts(a, b)["step1.loss"] == verdicts(a, b)["step1.batch"] == "not comparable"
    b.data = None  # the one side that does not say leaves it a fault
    assert verdicts(a, b)["step1.batch"] == "fail"


@pytest.mark.slow
def test_steps_are_matched_by_number() -> None:
    a, b = job(first=1), job()
    assert failing(a, b) == set()
    assert verdicts(a, b)["step1.loss"] == "pass"
    a.steps = [s for s in a.steps if s.step >= 303]
    found = verdicts(a, b)
    assert (found["step1.loss"], found["steps.loss"]) == ("not comparable", "pass")
    assert len(judge_single_run(a, b)[1]["loss"]) == 8
    a.steps = [s for s in job(first=1).steps if s.step < 300]
    assert one("step1.loss", a, b).text == (
        "no step is on both sides: the reference has steps 1 to 299, this run 301 to 310"
    )


def test_what_the_reference_did_not_record_is_not_comparable_and_the_words_say_what_to_add() -> None:
    a, b = recorded(), job()
    assert verdicts(a, b)["step1.loss"] == "pass"
    assert failing(a, b) == set()
    assert "norms=True" in one("step1.update_norm", a, b).text
    assert "pass batch to Recorder.step" in one("step1.batch", a, b).text
    a.layout = "dcp"  # no recorder can be told to
    assert one("step1.batch", a, b).text == "the reference does not have the batch"
    a.layout = None
    assert "Recorder.state" in one("state.digests", a, b).text
    assert failing(recorded(), scaled(job(), loss=1e-4)) == {"step1.loss"}


@pytest.mark.slow
def test_learning_rates_are_exact_and_belong_to_parameters() -> None:
    a, b = job(), job()
    b.steps[4].learning_rates = [math.nextafter(rate(305), 1), rate(305)]
    assert failing(a, b) == {"steps.learning_rates"}
    a, b = job(), job()
    for s, t in zip(a.steps, b.steps, strict=True):
        s.learning_rates, t.learning_rates = [1e-3, 2e-3], [2e-3, 1e-3]
    assert failing(a, b) == {"step1.learning_rates", "steps.learning_rates"}
    b.groups.reverse()
    assert failing(a, b) == set()
    x, y = Step(1, 0.0, learning_rates=[1e-3]), Step(1, 0.0, learning_rates=[1e-3, 1e-3])
    assert pair_learning_rates(Trace(), Trace(), x, y) == [("all groups", 1e-3, 1e-3)]


def test_a_tensor_that_one_side_does_not_have_is_far_away() -> None:
    a, b = job(), job()
    for s in b.steps:
        del s.updates["lm_head.weight"]
    assert one("step1.worst_update", a, b).number == 1.0
    assert one("step1.worst_update", a, b).where == "step 301, lm_head.weight"
    assert one("step1.worst_update", b, a).verdict == "fail"


# -------------------------------------------------------------------------------------------------------- calibration


@pytest.mark.slow
def test_noise_of_the_job_itself_widens_bounds_to_five_times_and_never_narrows_them() -> None:
    a, b = job(dtype="bf16"), scaled(job(dtype="bf16"), loss=4e-6, later=1e-5)
    measured = measure_noise(a, b)
    assert measured["step1.loss"] == pytest.approx(4e-6)
    assert measured["steps.loss"] == pytest.approx(1e-5)
    assert measured["step1.update_norm"] == 0
    got = scaled(job(dtype="bf16"), loss=1.9e-5, later=4.9e-5)
    assert failing(a, got) == {"step1.loss", "steps.loss"}
    found = one("step1.loss", a, got, noise=measured)
    assert (found.verdict, found.source, found.bound) == ("pass", "calibrated", pytest.approx(2e-5))
    assert one("step1.update_norm", a, got, noise=measured).source == "measured"
    assert failing(a, scaled(job(dtype="bf16"), loss=2.1e-5), noise=measured) == {"step1.loss"}


@pytest.mark.slow
def test_a_run_with_too_much_noise_of_its_own_proves_nothing() -> None:
    found = one("step1.loss", job(), job(), noise={"step1.loss": 2.1e-3})
    assert found.verdict == "not comparable"
    assert "two runs of this very job" in found.text
    assert one("step1.loss", job(), job(), noise={"step1.loss": 1.9e-3}).verdict == "pass"
    assert one("step1.loss", job(), job(), noise={"step1.loss": math.inf}).verdict == "not comparable"


def test_profiles_widen_bounds_from_strict_to_relaxed_and_others_do_not_exist() -> None:
    a, b = job(dtype="bf16"), job(dtype="bf16", micro_batch=3)
    each = [choose_bounds(p, a, b) for p in PROFILES]
    for name in each[0]:
        assert each[0][name].relative <= each[1][name].relative <= each[2][name].relative or name.endswith("grad_norm")
    assert set(COLUMNS) == {
        "fp32",
        "fp32, other kernels",
        "bf16, micro-batch held",
        "bf16",
        "bf16, other kernels",
        "bf16 parameters",
        "bf16 parameters, other kernels",
        "relaxed",
    }
    assert each[2]["steps.loss"].at(2.0) == pytest.approx(7.5e-3 + 5e-3)
    with pytest.raises(UsageError, match="profile='loose': choose one of strict, standard, relaxed"):
        judge_single_run(a, b, "loose")


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True))
def test_a_deviation_is_zero_for_equal_numbers_only(x: float, y: float) -> None:
    d = compute_relative_deviation(x, y)
    assert (d == 0) == (x == y) or (d == 0 and abs(x - y) / abs(y) == 0)
    assert math.isnan(d) == (math.isnan(x) or math.isnan(y))
    assert not d < 0


# ---------------------------------------------------------------------------------------------------------------- run


def test_every_rank_reports_the_same_loss_to_the_last_bit() -> None:
    b = job()
    b.steps[2].losses = [b.steps[2].loss] * 3 + [math.nextafter(b.steps[2].loss, 9)]
    found = one("run.ranks", None, b)
    assert (found.verdict, found.where) == ("fail", "step 303")
    assert "rank 3" in found.text
    b.steps[2].losses = [math.nan] * 4
    assert one("run.ranks", None, b).verdict == "pass"


def test_numbers_that_are_not_finite_are_named() -> None:
    b = job()
    b.steps[1].grads[FQNS[3]] = math.inf
    found = one("run.finite", None, b)
    assert (found.verdict, found.text) == ("fail", f"gradient of {FQNS[3]} is inf in step 302")


@pytest.mark.slow
def test_a_spike_is_ten_times_what_is_usual_and_the_reference_says_what_is() -> None:
    b = job()
    b.steps[6].grad_norm = 11 * (b.steps[5].grad_norm or 0)
    assert one("run.spike", None, b).verdict == "fail"
    assert one("run.spike", recorded(), b).verdict == "fail"
    assert one("run.spike", b, copy.deepcopy(b)).verdict == "pass"
    b = scaled(job(), grad=10.5)
    assert one("run.spike", None, b).verdict == "pass"
    assert one("run.spike", job(), b).verdict == "fail"
    assert one("run.spike", None, job(steps=3)).verdict == "not comparable"


def test_a_grad_norm_of_zero_is_dead() -> None:
    b = scaled(job(), grad=-1.0)
    assert one("run.dead", None, b).verdict == "fail"
    assert one("run.dead", b, copy.deepcopy(b)).verdict == "pass"


def test_the_round_trip_must_give_back_what_was_saved() -> None:
    assert one("roundtrip.state", None, job(roundtrip={"differing": ["model.x"]})).verdict == "fail"
    found = one("roundtrip.state", None, job(roundtrip={"skipped": "no room"}))
    assert (found.verdict, found.text) == ("not comparable", "no save and load: no room")
    json.dumps(trace_to_json(job()), allow_nan=False)


# ------------------------------------------------------------------------------------------- what a hostile tester found


def test_tensors_that_no_job_holds_are_compared_between_two_checkpoints_and_not_with_a_recording() -> None:
    mark = {"extra.ema.w": ("float32", (2,), "ab")}
    reference = Trace(layout="dcp", others=mark)
    for others, failed in ((mark, False), ({}, True), ({"extra.ema.w": ("float32", (2,), "cd")}, True)):
        checks = {c.name: c for c in judge_single_run(reference, Trace(layout="dcp", others=others))[0]}
        assert (checks["config.values"].verdict == "fail") is failed
    checks = {c.name: c for c in judge_single_run(Trace(), Trace(layout="dcp", others=mark))[0]}
    assert checks["config.values"].verdict == "not comparable"


def test_a_part_of_the_scheduler_that_is_missing_fails() -> None:
    whole = {"scheduler.last_epoch": 3, "scheduler._step_count": 4, "scheduler.lr_lambdas": [None]}
    part = {k: v for k, v in whole.items() if k != "scheduler.last_epoch"}
    (check,) = [c for c in judge_single_run(Trace(values=whole), Trace(values=part))[0] if c.name == "config.scheduler"]
    assert check.verdict == "fail" and "last_epoch" in check.text


def test_tensors_that_the_job_rounds_fail_but_for_the_relaxed_profile() -> None:
    got = Trace(environment={"rounded": ["optim.state.w.exp_avg"]})
    verdicts = {p: judge_single_run(None, got, p)[0][0].verdict for p in ("strict", "standard", "relaxed")}
    assert verdicts == {"strict": "fail", "standard": "fail", "relaxed": "not comparable"}


def test_parameters_of_16_bits_are_judged_as_such_and_are_not_held_at_another_world_size() -> None:
    from ckpttool.resume.compare import bounds

    def trace(world: int, dtype: str) -> Trace:
        return Trace(world_size=world, dtype="fp32", micro_batch=1, sequence=8, state={"model.w": (dtype, (2,), "ab")}, environment={"deterministic": True})  # fmt: skip

    assert bounds.choose_column("strict", trace(1, "float32"), trace(2, "float32")) == "fp32"
    assert bounds.choose_column("strict", trace(2, "bfloat16"), trace(2, "bfloat16")) == "bf16, micro-batch held"
    assert bounds.choose_column("strict", trace(1, "bfloat16"), trace(2, "bfloat16")) == "bf16 parameters"
    recorded = replace(trace(2, "bfloat16"), environment={})
    assert bounds.choose_column("strict", recorded, trace(2, "bfloat16")) == "bf16 parameters"
    assert (
        bounds.choose_column("standard", trace(1, "bfloat16"), trace(2, "bfloat16")) == "bf16 parameters, other kernels"
    )


def test_an_update_of_16_bits_is_judged_by_its_quanta() -> None:
    """That of a norm's weight, near half a quantum, is made by some elements and not by others; a whole one is seen."""

    def trace(world: int, update: float, quanta: float = 0.5) -> Trace:
        steps = [Step(1, 2.0, 1.0, update, [1e-3], "ab", 8, grads={"w": 1.0}, updates={"w": update})]
        return Trace(world_size=world, dtype="fp32", steps=steps, state={"model.w": ("bfloat16", (64,), "ab")}, quanta={"w": quanta})  # fmt: skip

    def found(reference: Trace, got: Trace) -> Check:
        return next(c for c in judge_single_run(reference, got)[0] if c.name == "step1.worst_update")

    assert found(trace(1, 0.02), trace(2, 0.1)).verdict == "pass"
    assert found(trace(1, 0.02, 0.05), trace(2, 0.1, 0.05)).verdict == "fail"
    assert found(trace(1, 2.0), trace(2, 1.5)).verdict == "fail"
    assert found(trace(1, 2.0), trace(2, 0.0)).number == 1.0


@pytest.mark.slow
def test_what_the_reference_holds_as_well_is_plausible() -> None:
    late = {n: 4.0 for n in job().scalars if "layers.1.self_attn.q_proj" in n}  # frozen until four steps ago

    def of(trace: Trace) -> Trace:
        return replace(trace, scalars=trace.scalars | late)

    assert verdict_of("state.plausible", None, of(job())) == "fail"
    assert verdict_of("state.plausible", of(job()), of(job())) == "pass"
    assert verdict_of("state.plausible", of(job(first=302)), of(job())) == "pass"
    assert verdict_of("state.plausible", job(), of(job())) == "fail"
    assert verdict_of("state.plausible", of(job(299)), of(job())) == "fail", "of another step"


def verdict_of(name: str, reference: Trace | None, got: Trace, profile: str = "strict") -> str:
    return next(c.verdict for c in judge_single_run(reference, got, profile)[0] if c.name == name)


def test_a_buffer_may_hold_nan_and_a_number_of_the_optimizer_may_not() -> None:
    buffer, counter = {"model.best_loss": math.nan}, {"optim.state.lm_head.weight.gain": math.nan}
    assert verdict_of("state.plausible", None, job(scalars=job().scalars | buffer)) == "pass"
    assert verdict_of("state.plausible", None, job(scalars=job().scalars | counter)) == "fail"


@pytest.mark.slow
def test_random_numbers_of_the_forward_pass_are_compared_where_both_runs_draw_the_same() -> None:
    seeded = {"random": "seeded"}
    a, b = job(environment=seeded), job(environment=seeded, world_size=3)
    assert verdict_of("step1.loss", a, b) == "pass"
    for other in (replace(a, seed=1), replace(a, micro_batch=3), job(layout=None)):
        assert verdict_of("step1.loss", other, b) == "not comparable"
    restored = {"random": "restored", "rng_restored": True}
    assert verdict_of("step1.loss", job(layout=None), job(environment=restored)) == "pass"
    assert verdict_of("step1.loss", job(layout=None), job(environment=restored, world_size=3)) == "not comparable"


@pytest.mark.slow
def test_a_buffer_that_ranks_hold_differently_is_one_of_theirs_and_the_probe_is_of_the_first() -> None:
    n, sketch = "model.bn.running_mean", {"sketch": [[1.0]], "shape": [2, 1], "not_finite": 0}
    copies = [("float32", (2,), "a"), ("float32", (2,), "b")]

    def of(mark: str, **more: Any) -> Trace:
        out = job(state=job().state | {n: ("float32", (2,), mark)}, **more)
        return replace(out, stored=out.stored | {n: mark})

    reference = of("a", layout=None, variants={n: copies}, probe={"rows": {"input_ids": [[1]]}, **sketch})
    for mark, digests, logits in (
        ("a", "pass", "pass"),
        ("b", "pass", "not comparable"),
        ("c", "fail", "not comparable"),
    ):
        got = of(mark, probe={"recorded": sketch, "agree": True})
        assert verdict_of("state.digests", reference, got) == digests
        assert verdict_of("probe.logits", reference, got) == logits


@pytest.mark.slow
def test_a_dict_among_the_options_is_compared_but_for_what_an_earlier_recorder_wrote_of_it() -> None:
    def of(value: Any) -> Trace:
        return job(groups=[{**g, "plan": value} for g in job().groups])

    assert verdict_of("config.groups", of({"warm": 3}), of({"warm": 3})) == "pass"
    assert verdict_of("config.groups", of({"warm": 3}), of({"warm": 4})) == "fail"
    assert verdict_of("config.groups", of("dict"), of({"warm": 4})) == "pass"


@pytest.mark.slow
def test_of_a_long_list_the_element_that_differs_is_shown() -> None:
    def of(values: list[int]) -> Trace:
        return job(values=job().values | {"extra.merges": values})

    (check,) = [
        c
        for c in judge_single_run(of([*range(99)]), of([*range(50), 0, *range(51, 98), 0]))[0]
        if c.name == "config.values"
    ]
    assert "extra.merges[50] is 0 and was 50, and 1 more of its 99 values differ" in check.text
    (check,) = [c for c in judge_single_run(of([*range(99)]), of([*range(98)]))[0] if c.name == "config.values"]
    assert "extra.merges has 98 values and had 99" in check.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "unsure"),
    [
        ({"update_norm": 1 + 1e-4}, True),
        ({"update_norm": 1 + 1e-4, "loss": 1 + 1e-4}, False),
        ({}, False),
    ],
)
def test_a_first_update_that_deviates_alone_is_measured_unless_the_job_is_random(
    changes: dict[str, float], unsure: bool
) -> None:
    got = job()
    got.steps[0] = replace(got.steps[0], **{k: getattr(got.steps[0], k) * f for k, f in changes.items()})
    assert judge_runs({"reference": job(), "candidate": got}, None, "strict").unsure == unsure
    seeded = {"environment": {"random": "seeded"}}
    runs = {"reference": job(**seeded), "candidate": replace(got, **seeded)}
    assert not judge_runs(runs, None, "strict").unsure
    assert not judge_runs({"reference": job(), "candidate": got, "noise": job()}, None, "strict").unsure


def test_noise_counts_double_against_a_recording_and_that_of_later_steps_for_the_first_update() -> None:
    noise = {"step1.update_norm": 1e-7, "steps.update_norm": 1e-5, "step1.loss": 1e-6, "steps.loss": 1e-4}
    ours = choose_bounds("strict", job(), job(), noise)
    theirs = choose_bounds("strict", job(layout=None), job(), noise)
    found = [b[f"step1.{s}"].relative for b in (ours, theirs) for s in ("update_norm", "loss")]
    assert found == pytest.approx([1e-6, 5e-6, 1e-4, 1e-5])
    chaos = choose_bounds("strict", job(layout=None), job(), {"steps.loss": 2e-3})["steps.loss"].obstacle()
    assert chaos is not None and "differ by 0.002, and a bound of 10 times that" in chaos


@pytest.mark.slow
def test_updates_of_muon_deviate_at_another_world_size_and_at_the_same_they_do_not() -> None:
    def of(**more: Any) -> Trace:
        return job(groups=[{**g, "ns_steps": 5} for g in job().groups], **more)

    got = of(world_size=3)
    got.steps[0] = replace(got.steps[0], update_norm=(got.steps[0].update_norm or 0) * 1.002)
    assert verdict_of("step1.update_norm", of(), got) == "pass"
    assert verdict_of("step1.update_norm", of(world_size=3), got) == "fail"
    assert verdict_of("step1.update_norm", job(), replace(got, groups=job().groups)) == "fail"


def test_a_step_that_fails_is_a_verdict_where_options_differ_and_else_an_error_of_the_job() -> None:
    def outcome(a: Trace, b: Trace) -> Outcome:
        return Outcome({}, {"reference": a, "candidate": b}, judge_single_run(a, b))

    a, b = job(), job(stopped="RuntimeError: no such step (at soap.py:3 in step)", after={}, schedule={})
    b.steps = []
    found = one("run.completed", a, b)
    assert found.verdict == "fail" and found.text.startswith(
        "the optimizer fails in step 301: RuntimeError: no such step"
    )
    with pytest.raises(CkpttoolError, match=r"fails in step 301 of the candidate: RuntimeError: no such step"):
        _refuse_failed_job(outcome(a, b))
    b.groups[0]["eps"] = 1.0
    _refuse_failed_job(outcome(a, b))
    assert failing(a, b) == {"config.groups", "run.completed"}
    with pytest.raises(CkpttoolError, match="of the reference"):
        _refuse_failed_job(outcome(b, a))
