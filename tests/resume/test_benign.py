"""resume-verify says nothing of a run in which nothing is wrong: other world sizes, layouts, kernels, models and dtypes.

    EVERY=1 pytest tests/resume/test_benign.py -s           all of them (10 minutes), and the largest deviations by column

Without the variable those of `OF_CI` run. The jobs are tests/live/zoo.py and the models of tests/live/herd.py, trained and
saved by real FSDP2 at 2, 3 and 4 ranks. Each run is judged against the recording of its job, and against a run of the same
checkpoint on 2 ranks. The bounds for parameters of bf16 and for rounded weights (`ckpttool.resume.compare.bounds`) come from what
`-s` prints here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judged import Runs, Zoo, bare, first, name_of, save_tree, tree_of
from live import own_jobs
from live.faults import GLOBAL, MICRO, SEQUENCE, row
from live.herd import HERD, RECORDED
from live.herd import SAVED as HERD_SAVED
from live.own_jobs import SAVED as SAVED_OWN
from live.zoo import CLIP, TIED
from peers import REPOSITORY
from ranks import forked, one_at_a_time, torchrun
from sampling import EVERY, sample
from spoiling import Spoil, slot, weight, zero

import ckpttool
from ckpttool.resume.compare.bounds import SIGNALS, choose_column
from ckpttool.resume.compare.differences import with_stored_dtypes
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.misfit import describe_misfit
from ckpttool.resume.compare.not_verified import list_not_verified
from ckpttool.resume.compare.verdict import Report
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.request import RunSettings
from ckpttool.resume.trace.model import Trace, read_reference
from ckpttool.resume.verify import resume_verify

pytestmark = [pytest.mark.live, pytest.mark.slow]

STEPS = 4
LOW = "qwen2, bf16 parameters"
CHAOTIC = "qwen2 narrow, bf16 parameters"


@dataclass(frozen=True)
class Run:
    """A run of a job, with its world size; `how` replaces some of its settings, `layout` is what the checkpoint is converted
    to, "a, b" first to a. `build` is a function of the job's file. `standard` is judged under that profile."""

    job: str
    world: int = 1
    layout: str = ""
    build: str = ""
    standard: bool = False
    how: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """As in a report of the test."""
        how = ", ".join(f"{k} {v}" for k, v in self.how)
        parts = [f"W={self.world}", *filter(None, (self.layout and f"as {self.layout}", self.build, how))]
        return f"{self.job}: {', '.join(parts)}"


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dcp of 3": ("dcp", {"world_size": 3}), "dcp of 7": ("dcp", {"world_size": 7}), "full": ("full", {}),
    "zero3": ("zero3", {"world_size": 3}), "zero2": ("zero2", {"world_size": 2}), "zero1": ("zero1", {"world_size": 3}),
    "universal": ("universal", {}), "fsdp1": ("fsdp1", {"world_size": 2, "wrap": ["**.blocks.*", "**.layers.*"]}),
    "audit": ("audit", {}),
}  # fmt: skip
BF16, COMPILE, CHECKPOINTING = ("dtype", "bf16"), ("compile", True), ("activation_checkpointing", True)


def runs() -> Iterator[Run]:
    """All of them."""
    for world in (1, 2, 3, 4):
        yield from (Run("zoo", world), Run("zoo", world, how=(BF16,)), Run("zoo tied", world))
    for shape in ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}):
        yield Run("zoo", 4, how=(("mesh", shape),))
    yield Run("zoo", 4, how=(("mesh", {"dp_replicate": 2, "dp_shard": 2}), BF16))
    yield from (Run("zoo", 1, how=(("micro_batch", n),)) for n in (3, 12, 24))
    yield Run("zoo", 1, how=(("micro_batch", 2), BF16))
    yield from (Run("zoo", 1, build=b) for b in ("backwards", "loop", "fused", "regrouped", "other_rate"))
    yield Run("zoo", 2, build="backwards")
    yield from (Run("zoo", w, build="noisy") for w in (1, 3))
    yield Run("zoo", 1, how=(("deterministic", False),))
    yield from (Run("zoo", 1, how=(COMPILE,)), Run("zoo", 1, how=(COMPILE, BF16)))
    for layout in (
        "dcp of 3",
        "dcp of 7",
        "zero3",
        "zero2",
        "zero1",
        "fsdp1",
        "audit",
        "zero3, dcp of 3",
        "audit, dcp of 3",
    ):
        yield Run("zoo", 1, layout)
    yield from (Run("zoo", w, how=(CHECKPOINTING, *more)) for w in (1, 3) for more in ((), (BF16,)))
    for job, animal in HERD.items():
        if animal.narrow:
            continue
        worlds = (1, 2, 3, 4)
        if animal.lora:
            yield from (Run(job, w, build="lora") for w in worlds)
        yield from (Run(job, w) for w in worlds)
        if job != "llama bf16 held":
            yield from (Run(job, 1, layout) for layout in ("zero3", "full", "universal"))
        yield Run(job, 1, how=(("micro_batch", 2),))
    yield from (Run("llama amsgrad", w, build=b, standard=True) for w, b in ((1, "eager"), (3, "eager"), (1, "sdpa")))
    yield from (Run("llama amsgrad", 1, how=(CHECKPOINTING,)), Run("gpt2", 3, how=(CHECKPOINTING,)))
    yield Run("zoo", 2, build="two_threads")  # the last of its launch


#: Those that every CI run has, of as few jobs as possible.
OF_CI = {
    "zoo: W=1", "zoo tied: W=3", "zoo: W=1, as zero3", "zoo: W=3, activation_checkpointing True, dtype bf16",
    f"{LOW}: W=1, micro_batch 2", "llama groups: W=1, as universal", "zoo: W=3, noisy",
}  # fmt: skip
CHOSEN = {r.name: r for r in sample("benign runs", runs(), [r for r in runs() if r.name in OF_CI])}

# ------------------------------------------------------------------------------------------------------ what is run


@dataclass
class Herd:
    """The jobs of tests/live/herd.py that are needed, each with its folder in `folder`."""

    folder: Path

    def source(self, job: str) -> Path:
        """Its checkpoint."""
        return self.folder / job / "ckpt"

    def settings(self, job: str, world: int) -> RunSettings:
        """A run of it, by --config."""
        known = read_reference(self.folder / job / "reference.jsonl")
        rates = {s.step: s.learning_rates for s in known.steps if s.learning_rates}
        return RunSettings(
            source=str(self.source(job)), mesh={"dp_shard": world}, config=str(self.folder / job / "config"), steps=STEPS,
            data=str(self.folder / "tokens.npy"), start=HERD_SAVED, sequence=SEQUENCE, global_batch=GLOBAL,
            micro_batch=known.micro_batch or MICRO, dtype=known.dtype or "fp32", rates=rates,
        )  # fmt: skip


@pytest.fixture(scope="module")
def herd(tmp_path_factory: pytest.TempPathFactory) -> Herd:
    folder = tmp_path_factory.mktemp("herd")
    jobs = {CHAOTIC, *(r.job for r in CHOSEN.values())} & HERD.keys()
    for world in sorted({HERD[job].world for job in jobs}):
        names = sorted(job for job in jobs if HERD[job].world == world)
        said = torchrun(world, "herd.py", "--out", str(folder), *names)
        assert (folder / f"done-{world}").exists(), said[-4000:]
    np.save(folder / "tokens.npy", np.stack([row(i) for i in range((HERD_SAVED + RECORDED) * GLOBAL)]))
    return Herd(folder)


def settings_of(run: Run, zoo: Zoo, herd: Herd) -> RunSettings:
    """Those of a run, on the checkpoint as it was saved."""
    how = dict(run.how)
    if run.job.startswith("zoo"):
        tied = {"source": str(zoo.folder / "tied"), "start": TIED} if run.job == "zoo tied" else {}
        build = run.build or ("tied" if tied else "build")
        return replace(zoo.by_job(run.world, build, clip=CLIP, steps=STEPS), **{**tied, **how})
    out = herd.settings(run.job, run.world)
    if run.build:
        script = REPOSITORY / "tests" / "live" / "herd.py"
        out = replace(out, config=None, job=f"{script}:{run.build}", data="synthetic")
    return replace(out, **how)


def converted(source: Path, layout: str, folder: Path) -> Path:
    """A checkpoint in another layout, perhaps by way of a third."""
    for number, name in enumerate(layout.split(", ")):
        to, options = LAYOUTS[name]
        made = folder / f"{number}{ {'full': '.pt', 'audit': '.tar.zst'}.get(to, '') }"
        folder.mkdir(exist_ok=True)
        ckpttool.convert(source, made, to=to, **options)
        source = made
    return source


def shared(run: Run) -> tuple[tuple[str, Any], ...]:
    """What a run has in common with the one that it is compared with: compiled kernels round bf16 in their own way."""
    return tuple(x for x in run.how if BF16 in run.how and x in (BF16, COMPILE))


def reference_of(run: Run) -> str:
    """The name of the run on 2 ranks that it is compared with."""
    return f"{run.job}, {run.build if run.build in ('lora', 'eager', 'sdpa', 'noisy') else ''}, {shared(run)}"


def low_faults() -> dict[str, tuple[Spoil, str]]:
    """Faults of moments where parameters are of bf16: {name: (what is done, the first check that must see it)}"""
    q, bias = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.bias"
    norm = "model.layers.0.input_layernorm.weight"
    return {
        "exp_avg of a tensor zero": (slot(q, "exp_avg", torch.zeros_like), "step1.update_norm"),
        "exp_avg_sq of a tensor zero in rows": (slot(q, "exp_avg_sq", zero(slice(10, 20))), "step1.update_norm"),
        "exp_avg of a bias zero": (slot(bias, "exp_avg", torch.zeros_like), "step1.worst_update"),
        "exp_avg_sq of a norm a hundredth": (slot(norm, "exp_avg_sq", lambda t: t * 0.01), "step1.update_norm"),
    }


def relaxed_faults(attention: str, norm: str) -> dict[str, tuple[Spoil, str]]:
    """Faults on top of rounding to bf16: {name: (what is done, the kind of the first cause)}"""

    def shards(t: Any) -> Any:
        a, b, *rest = t.split(8)
        return torch.cat([b, a, *rest])

    return {
        "nothing": (lambda s, o: None, ""),
        "shards exchanged": (weight(attention, shards), "exchanged-rows"),
        "rows one on": (weight(attention, lambda t: t.roll(1, 0)), "shifted"),
        "norm reset": (weight(norm, torch.ones_like), "constant"),
        "an exponent bit": (weight(attention, lambda t: exponent(t)), "elements"),
    }  # fmt: skip


def exponent(t: Any) -> None:
    """Flip one of a tensor of bf16."""
    t.view(torch.int16)[3, 5] ^= 1 << 11


def rounded(source: Path, to: Path, spoil: Spoil) -> Path:
    """The weights rounded to bf16, and then spoiled."""
    tree = tree_of(source)
    tree["model"] = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tree["model"].items()}
    spoil(tree, tree)
    save_tree(tree, to)
    return to


RELAXED = {
    "llama groups": ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight"),
    "zoo": ("blocks.1.attn.wqkv.weight", "norm.weight"),
}


@pytest.fixture(scope="module")
def done(zoo_original: Zoo, herd: Herd, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("benign")
    plan: dict[str, RunSettings] = {}
    for i, (name, run) in enumerate(CHOSEN.items()):
        settings = settings_of(run, zoo_original, herd)
        if (label := reference_of(run)) not in plan:
            known = replace(run, world=2, how=shared(run))
            known = replace(known, build=run.build if run.build in ("lora", "eager", "noisy") else "")
            base = settings_of(
                replace(known, build="sdpa" if run.build == "eager" else known.build), zoo_original, herd
            )
            plan[label] = replace(
                base, reread=False, loader="origin", dtypes=["bfloat16"] if run.job in RELAXED else []
            )
        if run.layout:
            settings = replace(settings, source=str(converted(Path(settings.source), run.layout, folder / str(i))))
        plan[name] = settings
    for name, (spoil, _) in low_faults().items():
        tree = tree_of(herd.source(LOW))
        spoil(tree, tree)
        save_tree(tree, folder / name)
        plan[name] = replace(herd.settings(LOW, 1), source=str(folder / name), steps=2)
    for job, names in RELAXED.items():
        settings = settings_of(Run(job), zoo_original, herd)
        for name, (spoil, _) in relaxed_faults(*names).items():
            place = rounded(Path(settings.source), folder / f"{job}, {name}", spoil)
            plan[f"{job}, rounded: {name}"] = replace(settings, source=str(place))
    last = {n for n in plan if "two_threads" in n}
    by_world = sorted(plan.items(), key=lambda item: (item[1].world_size, item[0] in last))
    return Runs(dict(by_world)).launch(folder / "launch")


def recording_of(run: Run, zoo: Zoo, herd: Herd) -> Trace:
    if run.job.startswith("zoo"):
        return zoo.recorded("tied" if run.job == "zoo tied" else "reference")
    return read_reference(herd.folder / run.job / "reference.jsonl")


# ------------------------------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize("name", CHOSEN)
def test_nothing_is_said_of_a_run_in_which_nothing_is_wrong(
    name: str, done: Runs, zoo_original: Zoo, herd: Herd
) -> None:
    run, got = CHOSEN[name], done.traces[name]
    profile = "standard" if run.standard else "strict"
    recording = recording_of(run, zoo_original, herd)
    for reference in (recording, done.traces[reference_of(run)]):
        if reference is recording and "dtype" in dict(run.how):
            continue  # which was recorded in fp32
        if reference is recording and run.build == "noisy":
            continue  # which was recorded without noise
        checks = judge_single_run(reference, got, profile).checks
        failed = {c.name: c.text for c in checks if c.verdict == "fail"}
        if run.build == "regrouped":
            # a scheduler has the rates of its groups in the order of the save; at the turn of the cosine they are used
            assert "from step 42 on" in failed.pop("after.schedule")
        assert failed == {}
        judged = {c.name for c in checks if c.verdict == "pass"}
        assert {"state.loaded", "state.digests", "step1.loss", "step1.worst_update", "steps.loss"} <= judged


def numbers_of(trace: Trace) -> Trace:
    """What numbers alone tell, and the dtypes of the parameters."""
    return replace(bare(trace), state={n: (dtype, shape, "") for n, (dtype, shape, _) in trace.state.items()})


@pytest.mark.parametrize("name", low_faults())
def test_updates_of_bf16_parameters_still_show_what_is_wrong_with_moments(name: str, done: Runs) -> None:
    reference = done.traces[reference_of(Run(LOW))]
    checks = judge_single_run(numbers_of(reference), numbers_of(done.traces[name])).checks
    by_name = {c.name: c for c in checks}
    assert choose_column("strict", reference, done.traces[name]) == "bf16 parameters"
    assert name_of(first(checks)) == low_faults()[name][1], [f"{c.name} {c.number}" for c in checks]
    assert by_name["step1.worst_update"].verdict == "fail"


@pytest.mark.parametrize("job", RELAXED)
@pytest.mark.parametrize("name", relaxed_faults("", ""))
def test_rounded_weights_pass_where_that_is_allowed_and_a_fault_on_top_has_its_name(
    job: str, name: str, done: Runs
) -> None:
    label = f"{job}, rounded: {name}"
    reference, got = done.traces[reference_of(Run(job))], done.traces[label]
    checks = judge_single_run(reference, got, "relaxed").checks
    kind = relaxed_faults(*RELAXED[job])[name][1]
    by_name = {c.name: c for c in checks}
    if not kind:
        assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
        assert "exactly the reference's rounded to bfloat16" in by_name["state.digests"].text
        return
    assert name_of(first(checks)) == "state.digests"
    sources = done.plan[reference_of(Run(job))].source, done.plan[label].source
    with ckpttool.open(sources[0]) as left, ckpttool.open(sources[1]) as right:
        found = find_causes(*with_stored_dtypes(reference, got), checks, (left, right))
    assert found[0].kind == kind, [c.text for c in found]
    assert found[0].tensors == [f"model.{RELAXED[job][name == 'norm reset']}"]


# ------------------------------------------------------------------------------------------------- jobs of one's own

OWN = REPOSITORY / "tests" / "live" / "own_jobs.py"
OWN_JOBS = ("pictures", "translation", "translation16", "several", "soap")
#: {function of the job's file: (the job, what its samples have otherwise)}
OTHER_INPUTS = {"masked_otherwise": ("soap", "attention_mask"), "flipped": ("pictures", "pixels")}


def spoiled_own() -> dict[str, tuple[str, Spoil, str, str]]:
    """What is lost or changed in files of jobs of one's own: {name: (job, what is done, the check that fails, the text)}"""

    def without(*keys: str) -> Spoil:
        return lambda s, o: [g.pop(k, None) for g in s["optim"]["param_groups"] for k in keys] and None

    groups, values = "config.groups", "config.values"
    return {
        "lr": ("several", without("lr"), groups, "has lost lr of its param groups, for 16 parameters"),
        "weight_decay": ("several", without("weight_decay"), groups, "has lost weight_decay of its param groups"),
        "lr_mult": ("several", without("lr_mult"), groups, "lost lr_mult of its param groups, for 1 parameter, first embedding.weight"),
        "all groups": ("several", lambda s, o: s["optim"].pop("param_groups"), groups, "lost its param groups, for 16 parameters"),
        "a SOAP option": ("soap", without("precondition_frequency"), groups, "lost precondition_frequency of its param groups"),
        "a text": ("soap", lambda s, o: s.update(pad="<eos>"), values, "extra.pad is '<eos>' and was '<pad>'"),
        "tags": ("soap", lambda s, o: s["dataloader"].update(tags=["<b>", "<a>"]), "config.dataloader", "['<b>', '<a>'] and was ['<a>', '<b>']"),
        "a sampler": ("soap", lambda s, o: s["sampler"].update(seed=18), values, "extra.sampler.seed is 18 and was 17"),
        "an extra state": ("soap", lambda s, o: s["model"]["blocks.1._extra_state"].update(recipe="other"), values, "recipe is 'other' and was 'delayed'"),
        "a tensor of one": ("soap", lambda s, o: s["model"]["blocks.0._extra_state"]["amax"].mul_(2), values, "_extra_state.amax (float32 [3]) has other contents"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each job with default options on the ranks that saved it and on more, and what is spoiled; two launches."""
    folder = tmp_path_factory.mktemp("own")
    said = torchrun(2, OWN.name, str(folder), *OWN_JOBS)
    assert (folder / "done").exists(), said[-4000:]
    plan: dict[str, RunSettings] = {}
    for name in OWN_JOBS:
        known = read_reference(folder / f"{name}.jsonl", SAVED_OWN)
        for world in (2, 3):
            plan[f"{name} {world}"] = RunSettings(
                source=str(folder / name), mesh={"dp_shard": world}, job=f"{OWN}:build_{name.removesuffix('16')}", steps=3, start=SAVED_OWN,
                sequence=known.sequence, global_batch=12, micro_batch=3, dtype=known.dtype or "fp32", scratch=str(folder),
                probe=known.probe.get("rows", {}),
            )  # fmt: skip
    brief: dict[str, Any] = {"round_trip": False, "steps": 1}
    for build, (name, _) in OTHER_INPUTS.items():
        plan[build] = replace(plan[f"{name} 2"], job=f"{OWN}:{build}", **brief)
    for i, (what, (name, spoil, *_)) in enumerate(spoiled_own().items()):
        tree = tree_of(folder / name)
        spoil(tree, tree)
        save_tree(tree, folder / f"spoiled-{i}")
        plan[what] = replace(plan[f"{name} 2"], source=str(folder / f"spoiled-{i}"), **brief)
    tree = tree_of(folder / "soap")
    for group in tree["optim"]["param_groups"]:
        group["precondition_frequency"] = 0
    save_tree(tree, folder / "zero")
    plan["an option with which a step fails"] = replace(plan["soap 2"], source=str(folder / "zero"))
    save_tree(unsharded(own_jobs.build_adafactor()), folder / "adafactor")
    at = {"source": str(folder / "adafactor"), "job": f"{OWN}:build_adafactor"}
    plan["adafactor"] = replace(plan["soap 2"], **at, start=1)
    by_world = sorted(plan.items(), key=lambda item: item[1].world_size)
    return Runs(dict(by_world)).launch(folder / "launch")


def unsharded(job: dict[str, Any]) -> dict[str, Any]:
    """What a job on one device saves after a step."""
    model, optimizer = job["model"], job["optimizer"]
    samples = [job["data"](i) for i in range(12)]
    loss, count, _ = own_jobs.usual_loss(
        model, {k: torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in samples[0]}
    )
    (loss / count).backward()
    optimizer.step()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    state = {names[id(p)]: s for p, s in optimizer.state.items()}
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}, "step": 1}


def references_of(name: str, own: Runs) -> tuple[Trace, Trace]:
    """The recording of a job, and the run on its own ranks."""
    run = own.traces[f"{name} 2"]
    return read_reference(Path(run.source).with_suffix(".jsonl"), SAVED_OWN), run


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", OWN_JOBS)
def test_nothing_is_said_of_a_job_of_ones_own_in_which_nothing_is_wrong(name: str, world: int, own: Runs) -> None:
    """BatchNorm, a loss that counts its own tokens (also in bf16), two optimizers, lists in their state, extra states."""
    got = own.traces[f"{name} {world}"]
    for reference in references_of(name, own):
        checks = judge_single_run(reference, got).checks
        assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
        judged = {c.name for c in checks if c.verdict == "pass"}
        assert {
            "state.loaded",
            "state.digests",
            "config.groups",
            "config.values",
            "config.dataloader",
            "step1.batch",
        } <= judged
        assert {"step1.loss", "step1.worst_update", "steps.loss", "steps.worst_grad", "roundtrip.state"} <= judged
        probe = next(c for c in checks if c.name == "probe.logits")
        if probe.verdict != "pass":  # of a recording without one, or whose ranks have statistics of their own
            assert not reference.layout and (
                "no probe" in probe.text or "held different copies of model.norm" in probe.text
            )
        assert not [
            x for x in list_not_verified(reference, got, checks) if "compared with nothing" in x or "own classes" in x
        ]


def test_bf16_with_a_loss_of_its_own_is_judged_by_the_narrow_bounds(own: Runs) -> None:
    recording, run = references_of("translation16", own)
    assert choose_column("strict", recording, run) == "bf16, micro-batch held"
    assert {c.bound for c in judge_single_run(recording, run).checks if c.name == "step1.grad_norm"} == {1e-6}
    assert [s.tokens for s in run.steps] == [12 * 12] * 3, "every label counts, and the usual count is 11 of 12"


@pytest.mark.parametrize("build", OTHER_INPUTS)
def test_tensors_of_samples_that_differ_are_named(build: str, own: Runs) -> None:
    name, key = OTHER_INPUTS[build]
    for reference in references_of(name, own):
        got = own.traces[build]
        checks = judge_single_run(reference, got).checks
        check = next(c for c in checks if c.name == "step1.batch")
        assert check.verdict == "fail" and check.text.startswith(f"{key} of the samples differs"), check.text
        (cause,) = find_causes(reference, got, checks)
        assert cause.kind == "data-inputs" and key in cause.text


@pytest.mark.parametrize("what", spoiled_own())
def test_what_the_files_of_a_job_of_ones_own_have_lost_is_found(what: str, own: Runs) -> None:
    name, _, wanted, text = spoiled_own()[what]
    for reference in references_of(name, own):
        checks = judge_single_run(reference, own.traces[what]).checks
        check = first(checks)
        assert check is not None and check.name == wanted and text in check.text, check
        causes = find_causes(reference, own.traces[what], checks)
        assert len(causes) == 1 and causes[0].kind == {"config.groups": "options-lost", "config.values": "values"}.get(
            wanted, "dataloader"
        )


def test_an_option_with_which_the_step_fails_is_the_cause(own: Runs) -> None:
    got = own.traces["an option with which a step fails"]
    assert got.stopped is not None and "ZeroDivisionError" in got.stopped and got.steps == []
    for reference in references_of("soap", own):
        checks = judge_single_run(reference, got).checks
        assert [c.name for c in checks if c.verdict == "fail"] == ["config.groups", "run.completed"]
        causes = find_causes(reference, got, checks)
        assert [c.kind for c in causes] == ["option-precondition-frequency", "step-failed"]
        assert causes[0].text == "precondition_frequency is 0 and was 2 for all parameters"


def test_an_optimizer_that_cannot_train_shards_is_the_fault_of_the_job(own: Runs) -> None:
    got = own.traces["adafactor"]
    recording = Trace(start=1, state={n: (d, s, "ab") for n, (d, s, _) in got.state.items()})
    for reference in (got, recording, None):
        report = Report(got, reference, "strict", judge_single_run(reference, got).checks)
        assert (report.word, report.exit_code) == ("does not fit", 12)
    text = describe_misfit(got)
    assert text.startswith(
        "the model fits, the optimizer or the scheduler does not: Adafactor of the job creates no state"
    )


def test_a_job_that_amplifies_every_rounding_is_said_to_do_so_and_does_not_fail(herd: Herd) -> None:
    """It was trained at a high rate on few words, and goes on with others: ten steps later its grad norms differ by half."""
    told: list[str] = []
    with one_at_a_time(), forked():
        found = resume_verify(
            herd.source(CHAOTIC), against=herd.source(CHAOTIC), config=str(herd.folder / CHAOTIC / "config"), world_size=1,
            against_world_size=3, sequence=SEQUENCE, steps=10, device="cpu", round_trip=False, status=told.append,
        )  # fmt: skip
    assert found is not None
    assert [line for line in told if "the noise of this job is measured" in line]
    checks = {c.name: c for c in found.checks}
    assert found.word == "pass", [c.text for c in found.checks if c.verdict == "fail"]
    assert checks["steps.grad_norm"].verdict == "not comparable"
    assert "two runs of this very job differ by" in checks["steps.grad_norm"].text
    # its directions, and the worst update of one tensor, are noise on either side of what is still judged, by the CPU
    noisy = {"grad_direction", "worst_update", "update_direction"}
    assert {checks[f"step1.{s}"].verdict for s in SIGNALS if s not in noisy} == {"pass"}
    assert {checks[f"step1.{s}"].verdict for s in noisy} <= {"pass", "not comparable"}


def test_the_largest_deviations(done: Runs, zoo_original: Zoo, herd: Herd) -> None:
    """By column, of runs with nothing wrong: a bound is five to ten times the largest, or was when it was measured."""
    most: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, run in CHOSEN.items():
        for reference in (recording_of(run, zoo_original, herd), done.traces[reference_of(run)]):
            of = choose_column("standard" if run.standard else "strict", reference, done.traces[name])
            for check in judge_single_run(reference, done.traces[name])[0]:
                if check.number is not None and check.name.partition(".")[2] in (
                    *SIGNALS,
                    "logits",
                    "weights",
                    "optimizer",
                    "buffers",
                ):
                    most[of][check.name] = max(most[of][check.name], check.number)
    print(f"\n{len(CHOSEN)} runs")
    for of, found in sorted(most.items()):
        print(f"{of}: " + ", ".join(f"{n} {x:.1e}" for n, x in sorted(found.items())))
    assert not EVERY or len(CHOSEN) >= 100
