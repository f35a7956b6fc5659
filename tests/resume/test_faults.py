"""resume-verify sees what is wrong with a checkpoint, says what it is, and says nothing of one that is right.

A real FSDP2 job of 4 ranks (tests/live/faults.py) saves after 20 steps and goes on. Its checkpoint is spoiled in every way
of `faulty.FAULTS`, of which `make test` has one of each kind, and each is resumed and judged three times: with everything
known (--against the original), with the numbers of the run alone, and against the recorded trajectory.
`EVERY=1 pytest tests/resume/test_faults.py -s` prints the table.

Starting torch takes most of the time, so all runs of one world size share a launch. A run costs 0.5 s of CPU at world
size 1 and 1.8 s at 2: a fault that is about ranks runs at 2, any other at 1. The real command is in test_resume.py.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid_faults
import numpy as np
import pytest
import torch
import zoo_faults
from commands import ckpttool_here
from faulty import FAULTS, IN_BF16
from judged import STEPS, Original, Runs, Verdict, bare, first, name_of, verdict
from live.faults import GLOBAL, MICRO, SAVED, SEQUENCE, TIED
from peers import REPOSITORY
from ranks import forked, one_at_a_time, torchrun
from sampling import sample
from spoiling import Fault, one_of_each_kind

import ckpttool
from ckpttool.resume.compare.bounds import choose_column
from ckpttool.resume.compare.judge import judge_single_run, measure_noise
from ckpttool.resume.compare.side_state_differences import compare_side_state
from ckpttool.resume.compare.verdict import Report
from ckpttool.resume.request import RunSettings
from ckpttool.resume.trace import batches
from ckpttool.resume.trace.model import Trace, read_reference
from ckpttool.resume.trace.side_state import collect_side_state
from ckpttool.resume.verify import resume_verify
from fixtures import jobs

pytestmark = [pytest.mark.live, pytest.mark.slow]

JOB = str(REPOSITORY / "tests" / "live" / "faults.py")


class Llama(Original):
    """With a configuration of transformers."""

    def by_config(self, world: int, config: str = "config", **more: Any) -> RunSettings:
        """A run by --config; the learning rates are those of the recorded reference, as `launch` gives them."""
        known = self.recorded("reference")
        rates = {s.step: s.learning_rates for s in known.steps if s.learning_rates}
        return replace(
            self.by_job(world), job=None, config=str(self.folder / config), data=str(self.folder / "tokens.npy"),
            rates=rates, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("original")
    said = torchrun(4, "faults.py", "--out", str(folder))
    assert (folder / "tokens.npy").exists(), said[-4000:]
    return Llama(folder, JOB, "ckpt", SAVED)


# -------------------------------------------------------------------------------------------------------------- faults

#: Faults of no single shard that another number of ranks could hide.
ABOUT_RANKS = ("gradients summed", "half the global batch", "data one batch ahead", "untied, with equal values")
#: Where a trajectory that was recorded from its beginning tells that the data is.
DATA = {"data one batch ahead": "data-offset", "data from the beginning": "data-restart", "other data": "data-other"}
CHOSEN = {
    name: FAULTS[name]
    for name in sample(
        "faults of the first suite",
        FAULTS,
        {*one_of_each_kind(FAULTS), *ABOUT_RANKS, *DATA, "shard of a weight zeroed"},
    )
}
CHOSEN_IN_BF16 = [name for name in IN_BF16 if name in CHOSEN]


def spoiled(fault: Fault, original: Llama, place: Path) -> Path:
    """The checkpoint with the fault; in the shards of 4 ranks where one of them is to blame."""
    name = "tied" if fault.tied else "ckpt"
    if fault.spoil is None:
        return original.folder / name
    tree = original.state(name)
    fault.spoil(tree, original.state("stale"))
    torch.save(tree, place.with_suffix(".pt"))
    if fault.rank is None:
        return place.with_suffix(".pt")
    ckpttool.convert(place.with_suffix(".pt"), place, to="dcp", world_size=4)
    return place


@pytest.fixture(scope="module")
def faulty(original: Llama, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The references of --against on 2 ranks, faults of shards and of ranks on 2, all other faults on 1."""
    folder = tmp_path_factory.mktemp("faulty")
    tied = {"source": str(original.folder / "tied"), "start": TIED}
    plan = {
        "job": original.by_job(2, reread=False, loader="origin"),
        "config": original.by_config(2, reread=False, loader="origin"),
        "tied": original.by_job(2, "tied", reread=False, loader="origin", **tied),
    }
    for i, (name, fault) in enumerate(CHOSEN.items()):
        world = 2 if fault.rank is not None or name in ABOUT_RANKS else 1
        run = original.by_job(world, fault.job) if fault.job else original.by_config(world)
        source = str(spoiled(fault, original, folder / str(i)))
        plan[name] = replace(run, **{**(tied if fault.tied else {}), **fault.settings, "source": source})
    plan["job, bf16"] = replace(plan["job"], dtype="bf16")
    plan |= {f"{name}, bf16": replace(plan[name], dtype="bf16", reread=False) for name in CHOSEN_IN_BF16}
    by_world = sorted(plan.items(), key=lambda item: item[1].world_size)  # neighbours share a launch
    return Runs(dict(by_world)).launch(folder / "launch")


def verdict_on(name: str, runs: Runs, original: Llama) -> Verdict:
    """What is said about a fault, each way; asked once."""
    if name not in runs.verdicts:
        fault = FAULTS[name]
        known = "tied" if fault.tied else "job" if fault.job else "config"
        recorded = original.recorded("tied" if fault.tied else "reference")
        runs.verdicts[name] = verdict(runs, name, known, recorded, fault.reference)
    return runs.verdicts[name]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_is_seen_first_where_it_should_be_and_called_by_its_name(
    name: str, faulty: Runs, original: Llama
) -> None:
    fault = FAULTS[name]
    found = verdict_on(name, faulty, original)
    assert name_of(first(found.known)) == fault.check
    cause = found.causes[0]
    assert cause.kind == fault.kind, [c.text for c in found.causes]
    assert tuple(cause.tensors[: len(fault.tensors)]) == fault.tensors
    if fault.rank is not None:
        assert cause.place is not None
        assert cause.place.startswith(f"__{fault.rank}_0.distcp, bytes "), cause.place
        assert f"rank {fault.rank}'s shard" in cause.place
    assert name_of(first(found.dynamic)) == fault.dynamic
    assert (first(found.recorded) is not None) is fault.recorded


@pytest.mark.parametrize("name", CHOSEN_IN_BF16)
def test_in_bf16_with_the_micro_batch_held_numbers_show_what_they_show_in_fp32(name: str, faulty: Runs) -> None:
    reference, got = faulty.traces["job, bf16"], faulty.traces[f"{name}, bf16"]
    checks = judge_single_run(bare(reference), bare(got)).checks
    assert name_of(first(checks)) == IN_BF16[name]


def test_the_bytes_that_are_blamed_are_the_bytes_that_were_changed(faulty: Runs, original: Llama) -> None:
    name = "shard of a weight zeroed"
    cause = verdict_on(name, faulty, original).causes[0]
    assert cause.place is not None
    file, _, rest = cause.place.partition(", bytes ")
    begin, end = map(int, rest.partition(",")[0].split(".."))
    data = (Path(faulty.plan[name].source) / file).read_bytes()[begin:end]
    assert data == bytes(12 * 48 * 4)
    assert f"first difference at byte {begin} " in cause.place


def test_a_trajectory_that_was_recorded_from_its_beginning_tells_where_the_data_is(
    faulty: Runs, original: Llama
) -> None:
    assert {name: verdict_on(name, faulty, original).recorded_causes[0].kind for name in DATA} == DATA


def test_every_fault_of_the_table_is_caught(faulty: Runs, original: Llama) -> None:
    print("\n| fault | first check that fails | first one without the state | what is said |\n|---|---|---|---|")
    caught = 0
    for name in CHOSEN:
        found = verdict_on(name, faulty, original)
        caught += first(found.known) is not None
        print(found.row(name))
    print(f"{caught} of {len(CHOSEN)} caught")
    assert caught == len(CHOSEN)


def test_there_are_as_many_faults_as_the_documentation_says() -> None:
    assert [len(faults) for faults in (FAULTS, zoo_faults.FAULTS, hybrid_faults.FAULTS)] == [81, 102, 80]


# -------------------------------------------------------------------------------------------------------------- benign


def layouts(original: Llama, folder: Path) -> dict[str, Path]:
    """The checkpoint in other layouts, and for other numbers of ranks."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "dcp of 3 ranks": ("dcp", {"world_size": 3}), "full": ("full", {}), "zero3": ("zero3", {"world_size": 3}),
        "universal": ("universal", {}), "fsdp1": ("fsdp1", {"world_size": 2, "wrap": ["**.layers.*"]}),
        "audit": ("audit", {}),
    }  # fmt: skip
    out = {}
    for name, (to, options) in ways.items():
        out[name] = folder / (name + {"full": ".pt", "audit": ".tar.zst"}.get(to, ""))
        ckpttool.convert(original.folder / "ckpt", out[name], to=to, **options)
    return out


@pytest.fixture(scope="module")
def benign(original: Llama, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("benign")
    plan: dict[str, RunSettings] = {}
    for world in (1, 3, 4):
        here = {"fp32": original.by_job(world, steps=4, scratch=str(folder))}
        if world < 4:
            here["bf16"] = original.by_job(world, steps=4, dtype="bf16")
            here["fp32, by config"] = original.by_config(world, steps=4)
        if world == 1:
            here["fp32, 12 rows a pass"] = original.by_job(1, micro_batch=12)
            here["bf16, 12 rows a pass"] = original.by_job(1, micro_batch=12, dtype="bf16")
            here["fp32, checkpointing"] = original.by_job(1, activation_checkpointing=True)
            here["bf16, checkpointing"] = original.by_job(1, activation_checkpointing=True, dtype="bf16")
            tied = {"source": str(original.folder / "tied"), "start": TIED}
            here["fp32, tied"] = original.by_job(1, "tied", **tied)
            rates = {s.step: s.learning_rates for s in original.recorded("tied").steps if s.learning_rates}
            here["fp32, tied, by config"] = replace(original.by_config(1, "config-tied", **tied), rates=rates)
            ckpttool.convert(original.folder / "ckpt", folder / "hf", to="hf", config=original.folder / "config")
            ckpttool.convert(folder / "hf", folder / "weights", to="dcp", world_size=3)
            here["weights in hf"] = original.by_config(1, source=str(folder / "hf"), start=0)
            here["weights in dcp"] = original.by_config(1, source=str(folder / "weights"), start=0)
            for name, path in layouts(original, folder).items():
                here[f"fp32, {name}"] = original.by_config(1, source=str(path))
        if world == 4:
            here["bf16, HSDP"] = original.by_job(4, mesh={"dp_replicate": 2, "dp_shard": 2}, dtype="bf16")
            here["fp32, TP"] = original.by_job(4, mesh={"dp_shard": 2, "tp": 2})
        names = {name: f"{world}: {name}" for name in here}
        plan |= {names[name]: run for name, run in here.items() if names[name] in BENIGN or "weights" in name}
    return Runs(plan).launch(folder / "launch")


ALL_BENIGN = [
    *(f"{w}: {what}" for w in (1, 3) for what in ("fp32", "bf16", "fp32, by config")), "4: fp32",
    *(f"1: {d}, {what}" for d in ("fp32", "bf16") for what in ("12 rows a pass", "checkpointing")),
    "1: fp32, tied", "1: fp32, tied, by config",
    *(f"1: fp32, {layout}" for layout in ("dcp of 3 ranks", "full", "zero3", "universal", "fsdp1", "audit")),
    "4: bf16, HSDP", "4: fp32, TP",
]  # fmt: skip
BENIGN = sample(
    "benign runs of the first suite",
    ALL_BENIGN,
    ["1: fp32", "1: bf16", "3: bf16", "3: fp32, by config", "4: fp32", "1: fp32, 12 rows a pass", "1: bf16, checkpointing",
     "1: fp32, tied, by config", "1: fp32, universal", "1: fp32, audit", "4: fp32, TP"],
)  # fmt: skip


@pytest.mark.parametrize("name", BENIGN)
def test_a_run_with_nothing_wrong_passes_against_the_recorded_trajectory(
    name: str, benign: Runs, original: Llama
) -> None:
    reference = original.recorded("tied" if "tied" in name else "bf16" if "bf16" in name else "reference")
    checks = judge_single_run(reference, benign.traces[name]).checks
    assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
    judged = {c.name for c in checks if c.verdict == "pass"}
    assert {"state.digests", "step1.loss", "step1.worst_update", "steps.loss", "config.groups"} <= judged


@pytest.mark.parametrize("name", BENIGN)
def test_a_run_with_nothing_wrong_passes_against_the_original_at_another_world_size(
    name: str, benign: Runs, faulty: Runs
) -> None:
    if "bf16" in name:
        reference = benign.traces["3: bf16" if name != "3: bf16" else "1: bf16"]
    else:
        reference = faulty.traces["tied" if "tied" in name else "config" if benign.plan[name].job is None else "job"]
    checks = judge_single_run(reference, benign.traces[name]).checks
    assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
    if "12 rows" not in name:  # whose probe is of other rows
        assert "probe.logits" in {c.name for c in checks if c.verdict == "pass"}


def test_weights_alone_pass_from_hf_to_dcp(benign: Runs) -> None:
    checks = judge_single_run(benign.traces["1: weights in hf"], benign.traces["1: weights in dcp"]).checks
    assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
    assert {"state.digests", "probe.logits", "steps.loss"} <= {c.name for c in checks if c.verdict == "pass"}


def test_a_loop_in_bf16_is_compared_as_sharply_as_the_runner_only_where_it_computes_the_same_digits() -> None:
    def told(micro: int, **more: Any) -> Trace:
        return Trace(dtype="bf16", global_batch=24, micro_batch=micro, sequence=16, **more)

    runner = {"environment": {"deterministic": True}}
    assert choose_column("strict", told(6), told(6, **runner)) == "bf16, micro-batch held"
    assert choose_column("strict", told(8), told(8, **runner)) == "bf16", "a third is no power of two"
    assert choose_column("strict", told(8, **runner), told(8, **runner)) == "bf16, micro-batch held"


def test_calibration_between_two_accumulations_leaves_the_bounds_as_sharp_as_they_are_in_fp32(benign: Runs) -> None:
    found = measure_noise(benign.traces["1: fp32"], benign.traces["1: fp32, 12 rows a pass"])
    assert "probe.logits" not in found, "another number of rows is another probe"
    assert max(found.values()) < 1e-5
    checks = judge_single_run(benign.traces["4: fp32"], benign.traces["1: fp32"], "strict", found).checks
    assert not [c.name for c in checks if c.verdict == "fail"]


# -------------------------------------------------------------------------------------------------------- command line


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """`ckpttool resume-verify`, with ranks from the nurseries."""
    with one_at_a_time(), forked():
        return ckpttool_here(
            "resume-verify", *words, "--device", "cpu", "--steps", STEPS, "--global-batch", GLOBAL,
            "--micro-batch", MICRO, "--sequence", SEQUENCE,
        )  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_command_passes_a_converted_checkpoint_at_another_world_size(
    world: int, original: Llama, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    ckpttool.convert(original.folder / "ckpt", made, to="dcp", world_size=world)
    config = original.folder / "config"
    if world == 3:
        reference = original.folder / "reference.jsonl"
        told: tuple[object, ...] = ("--reference", reference, "--data", original.folder / "tokens.npy")
    else:
        told = ("--against", original.folder / "ckpt")
    done = command(made, *told, "--config", config, "--world-size", world, "--json")
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    said = json.loads(done.stdout)
    assert (said["verdict"], said["profile"], said["causes"]) == ("pass", "strict", [])
    passed = {c["name"] for c in said["checks"] if c["verdict"] == "pass"}
    assert {
        "state.loaded",
        "state.digests",
        "config.groups",
        "step1.worst_update",
        "steps.loss",
        "roundtrip.state",
    } <= passed
    assert ("probe.logits" in passed) is (world < 3)
    assert said["candidate"]["world_size"] == world


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shard of exp_avg_sq zeroed", "rank 2's shard"),
        ("betas of another AdamW", "betas is [0.9, 0.999] and was [0.9, 0.95]"),
        ("a weight missing", "layer 1, mlp.up_proj not in the checkpoint"),
    ],
)
def test_the_command_fails_a_spoiled_checkpoint_and_says_why(
    name: str, said: str, original: Llama, tmp_path: Path
) -> None:
    made = spoiled(FAULTS[name], original, tmp_path / "made")
    done = command(
        made, "--against", original.folder / "ckpt", "--config", original.folder / "config", "--world-size", 1
    )
    assert done.returncode == 10, (done.stdout[-2000:], done.stderr[-2000:])
    assert said in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------- trainers of others


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-3 job of DeepSpeed on 2 ranks that recorded itself as docs/how-to/record.md says, and its data."""
    folder = tmp_path_factory.mktemp("recipes")
    said = torchrun(2, "recipes.py", "deepspeed", "--out", str(folder))
    made = folder / "deepspeed"
    assert (made / "losses.json").exists(), said[-4000:]
    np.save(made / "tokens.npy", np.concatenate([jobs.batch(step).numpy() for step in range(9)]))
    return made


@pytest.mark.parametrize("world", [1, 3])
def test_a_zero3_folder_of_deepspeed_goes_on_in_fsdp2_as_deepspeed_did(world: int, zero3: Path) -> None:
    found = verified(zero3 / "ckpt", zero3, world)
    assert found.word == "pass", [c.text for c in found.checks if c.verdict == "fail"]
    judged = {c.name for c in found.checks if c.verdict == "pass"}
    assert {
        "state.loaded",
        "step1.batch",
        "step1.learning_rates",
        "step1.loss",
        "step1.grad_norm",
        "steps.loss",
        "probe.logits",
    } <= judged


def test_a_zero3_folder_whose_optimizer_counts_otherwise_does_not_go_on_as_before(zero3: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "ckpt"
    shutil.copytree(zero3 / "ckpt", spoiled)
    for path in spoiled.glob("*/*optim_states.pt"):
        assert rewritten(path, struct.pack("<f", 3.0), struct.pack("<f", 6.0)) == 1
    found = verified(spoiled, zero3, 1)
    assert found.word == "fail"
    wrong = [c.name for c in found.checks if c.verdict == "fail"]
    assert "steps.loss" in wrong
    assert "step1.loss" not in wrong, "the first loss does not know the step"
    assert found.causes[0].kind == "optimizer", found.causes[0].text


def rewritten(path: Path, before: bytes, after: bytes) -> int:
    """How many tensors of a torch.save file had these bytes and now have others, as if it had been saved so."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    found = [name for name, data in members.items() if "/data/" in name and data == before]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, after if name in found else data)
    return len(found)


def verified(checkpoint: Path, job: Path, world: int) -> Report:
    """As `ckpttool resume-verify --reference` does it."""
    with one_at_a_time(), forked():
        found = resume_verify(
            checkpoint, reference=job / "reference.jsonl", config=str(job / "config"), data=str(job / "tokens.npy"),
            world_size=world, micro_batch=4, steps=3, device="cpu", dtype="fp32",
        )  # fmt: skip
    assert found is not None
    return found


def beside_the_model(saved: Path, config: str) -> Trace:
    """What a trainer's own checkpoint holds beside model and optimizer, of step 4."""
    with ckpttool.open(saved, config=config) as opened:
        ckpt = opened.checkpoint
        found = collect_side_state({v.path: v.data for v in ckpt.values.values() if v.path[0] != "optim"})
        arrays = collect_side_state(
            {t.path: opened[n].torch() for n, t in ckpt.tensors.items() if t.path[0] not in ("model", "optim")}
        )
    return Trace(layout="full", start=4, values=found.values, others=found.others | arrays.others)


def test_the_recipes_of_the_documentation_record_what_the_trainers_themselves_say(tmp_path: Path) -> None:
    names = {"accelerate": 4, "trainer": 4, "lightning": 4}  # the step of the last save
    said = torchrun(1, "recipes.py", *names, "--out", str(tmp_path))
    for name in names:
        losses = tmp_path / name / "losses.json"
        assert losses.exists(), said[-4000:]
        reference = read_reference(tmp_path / name / "reference.jsonl")
        assert [s.loss for s in reference.steps] == pytest.approx(json.loads(losses.read_text()), rel=1e-4)
        assert [s.step for s in reference.steps] == [1, 2, 3, 4]
        assert reference.start == names[name] and reference.generators and reference.state
        scheduled = [n for n in reference.values if n.startswith("scheduler.")]
        assert bool(scheduled) == (name != "lightning"), "the module of that recipe has none"
        for step in reference.steps:
            assert step.learning_rates and step.batch, name
            assert step.grad_norm is not None and step.grad_norm > 0
            assert step.update_norm is not None and step.update_norm > 0
            assert len(step.grads) == len(step.updates) == 21
        if name != "lightning":
            saved = tmp_path / name / ("step-4" if name == "accelerate" else "out/checkpoint-4")
            got = beside_the_model(saved, str(tmp_path / "trainer" / "out" / "checkpoint-4"))
            for component, least in (("scheduler", 4), ("rng", 3)):
                found = compare_side_state(reference, got, component)
                assert not found.problems and found.compared >= least, (name, component)
        if name != "trainer":  # which shuffles
            digests = [f"{batches.digest_and_mark_rows(jobs.batch(s).numpy())[0]:032x}" for s in range(4)]
            assert [s.batch for s in reference.steps] == digests
