"""resume-verify sees what is wrong with a checkpoint, says what it is, and says nothing of one that is right.

A real FSDP2 job of 4 ranks (tests/live/faults.py) saves after 20 steps and goes on. Its checkpoint is spoiled in every way
of `faulty.FAULTS`, and each is resumed and judged three times: with everything known (--against the original), with the
numbers of the run alone, and against the recorded trajectory. `pytest tests/test_faults.py -s` prints the table.

Starting torch takes most of the time, so all runs of one world size share a launch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty import FAULTS, Fault
from live.faults import GLOBAL, MICRO, SAVED, SEQUENCE, TIED
from peers import FIXTURES, REPOSITORY
from test_live import one_at_a_time, torchrun

import ckpttool
from ckpttool.resume.blame import causes
from ckpttool.resume.judge import judge
from ckpttool.resume.launch import _launched
from ckpttool.resume.settings import Settings
from ckpttool.resume.trace import Trace, read_reference
from ckpttool.resume.verdict import Cause, Check

# in the worker of test_live, so that the others do not wait for the lock
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.xdist_group("live")]

JOB = str(REPOSITORY / "tests" / "live" / "faults.py")
STEPS = 2  # the first, and one after an update


@dataclass
class Original:
    """What tests/live/faults.py left."""

    folder: Path

    def state(self, name: str) -> dict[str, Any]:
        """The tree of one of its checkpoints, anew each time."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            ckpttool.convert(self.folder / name, path, to="full")
        tree: dict[str, Any] = torch.load(path, weights_only=True)
        return tree

    def recorded(self, name: str) -> Trace:
        """What its recorder wrote."""
        return read_reference(self.folder / f"{name}.jsonl")

    def by_job(self, world: int, build: str = "build", **more: Any) -> Settings:
        """A run with a scheduler, by --job."""
        mesh = {"dp_shard": world}
        return replace(
            Settings(
                source=str(self.folder / "ckpt"), mesh=mesh, job=f"{JOB}:{build}", steps=STEPS, start=SAVED,
                sequence=SEQUENCE, global_batch=GLOBAL, micro_batch=MICRO,
            ),
            **more,
        )  # fmt: skip

    def by_config(self, world: int, config: str = "config", **more: Any) -> Settings:
        """A run by --config; the learning rates are those of the recorded reference, as `launch` gives them."""
        known = self.recorded("reference")
        rates = {s.step: s.learning_rates for s in known.steps if s.learning_rates}
        return replace(
            self.by_job(world), job=None, config=str(self.folder / config), data=str(self.folder / "tokens.npy"),
            rates=rates, **more,
        )  # fmt: skip


@dataclass
class Runs:
    """Traces by name, and what was run."""

    plan: dict[str, Settings]
    traces: dict[str, Trace] = field(default_factory=dict)

    def launch(self, folder: Path) -> Runs:
        """Run everything; one launch for each world size."""
        folder.mkdir()
        with one_at_a_time():
            self.traces = _launched(self.plan, str(folder), lambda text: None)
        return self


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = tmp_path_factory.mktemp("original")
    said = torchrun(4, "faults.py", "--out", str(folder))
    assert (folder / "tokens.npy").exists(), said[-4000:]
    return Original(folder)


# -------------------------------------------------------------------------------------------------------------- faults


def spoiled(fault: Fault, original: Original, place: Path) -> Path:
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
def faulty(original: Original, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every fault, and the references of --against, on 2 ranks."""
    folder = tmp_path_factory.mktemp("faulty")
    tied = {"source": str(original.folder / "tied"), "start": TIED}
    plan = {
        "job": original.by_job(2, reread=False),
        "config": original.by_config(2, reread=False),
        "tied": original.by_job(2, "tied", reread=False, **tied),
    }
    for i, (name, fault) in enumerate(FAULTS.items()):
        run = original.by_job(2, fault.job) if fault.job else original.by_config(2)
        source = str(spoiled(fault, original, folder / str(i)))
        plan[name] = replace(run, **{**(tied if fault.tied else {}), **fault.settings, "source": source})
    return Runs(plan).launch(folder / "launch")


@dataclass
class Verdict:
    """What is said about a fault."""

    known: list[Check]
    causes: list[Cause]
    dynamic: list[Check]
    recorded: list[Check]
    recorded_causes: list[Cause]

    def row(self, name: str) -> str:
        """Its line of the table."""
        seen = first(self.dynamic)
        number = f" ({seen.number:.1e})" if seen is not None and seen.number else ""
        dynamic = "nothing" if seen is None else f"{seen.name}{number}"
        known = first(self.known)
        return f"| {name} | {'nothing' if known is None else known.name} | {dynamic} | {self.causes[0].text.split(': /')[0]} |"


def first(checks: list[Check]) -> Check | None:
    """The first that fails."""
    return next((c for c in checks if c.verdict == "fail"), None)


def name_of(check: Check | None) -> str | None:
    return None if check is None else check.name


def bare(trace: Trace) -> Trace:
    """What numbers of a run alone tell: the state that the job holds and its configuration are left out."""
    return replace(
        trace, state={}, stored={}, scalars={}, values={}, groups=[], config=None, tied=[], parameters=None, clip=None,
        environment={},
    )  # fmt: skip


def verdict_on(fault: Fault, name: str, runs: Runs, original: Original) -> Verdict:
    of = "tied" if fault.tied else "job" if fault.job else "config"
    reference, got = replace(runs.traces[of], **fault.reference), runs.traces[name]
    checks, _ = judge(reference, got)
    sources = runs.plan[of].source, runs.plan[name].source
    with ckpttool.open(sources[0]) as left, ckpttool.open(sources[1]) as right:
        found = causes(reference, got, checks, (left, right))
    dynamic, _ = judge(bare(reference), bare(got))
    trajectory = replace(original.recorded("tied" if fault.tied else "reference"), **fault.reference)
    recorded, _ = judge(trajectory, got)
    return Verdict(checks, found, dynamic, recorded, causes(trajectory, got, recorded))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_first_where_it_should_be_and_called_by_its_name(
    name: str, faulty: Runs, original: Original
) -> None:
    fault = FAULTS[name]
    found = verdict_on(fault, name, faulty, original)
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


def test_the_bytes_that_are_blamed_are_the_bytes_that_were_changed(faulty: Runs, original: Original) -> None:
    name = "shard of a weight zeroed"
    cause = verdict_on(FAULTS[name], name, faulty, original).causes[0]
    assert cause.place is not None
    file, _, rest = cause.place.partition(", bytes ")
    begin, end = map(int, rest.partition(",")[0].split(".."))
    data = (Path(faulty.plan[name].source) / file).read_bytes()[begin:end]
    assert data == bytes(12 * 48 * 4)
    assert f"first difference at byte {begin} " in cause.place


def test_a_trajectory_that_was_recorded_from_its_beginning_tells_where_the_data_is(
    faulty: Runs, original: Original
) -> None:
    said = {
        name: verdict_on(FAULTS[name], name, faulty, original).recorded_causes[0].kind
        for name in ("data one batch ahead", "data from the beginning", "other data")
    }
    assert list(said.values()) == ["data-offset", "data-restart", "data-other"]


def test_the_table_of_faults_has_at_least_forty_that_are_caught(faulty: Runs, original: Original) -> None:
    print("\n| fault | first check that fails | first one without the state | what is said |\n|---|---|---|---|")
    caught = 0
    for name, fault in FAULTS.items():
        found = verdict_on(fault, name, faulty, original)
        caught += first(found.known) is not None
        print(found.row(name))
    print(f"{caught} of {len(FAULTS)} caught")
    assert caught == len(FAULTS) > 40


# -------------------------------------------------------------------------------------------------------------- benign


def layouts(original: Original, folder: Path) -> dict[str, Path]:
    """The checkpoint in other layouts, and for other numbers of ranks."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "dcp of 3 ranks": ("dcp", {"world_size": 3}), "full": ("full", {}), "zero3": ("zero3", {"world_size": 3}),
        "universal": ("universal", {}), "fsdp1": ("fsdp1", {"world_size": 2, "wrap": ["**.layers.*"]}),
    }  # fmt: skip
    out = {}
    for name, (to, options) in ways.items():
        out[name] = folder / (f"{name}.pt" if to == "full" else name)
        ckpttool.convert(original.folder / "ckpt", out[name], to=to, **options)
    return out


@pytest.fixture(scope="module")
def benign(original: Original, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("benign")
    plan: dict[str, Settings] = {}
    for world in (1, 3, 4):
        here = {
            "fp32": original.by_job(world, steps=4, scratch=str(folder)),
            "bf16": original.by_job(world, steps=4, dtype="bf16"),
            "fp32, by config": original.by_config(world, steps=4),
        }
        if world == 1:
            here["fp32, 12 rows a pass"] = original.by_job(1, micro_batch=12)
            here["bf16, 12 rows a pass"] = original.by_job(1, micro_batch=12, dtype="bf16")
            here["fp32, checkpointing"] = original.by_job(1, activation_checkpointing=True)
            here["bf16, checkpointing"] = original.by_job(1, activation_checkpointing=True, dtype="bf16")
            here["fp32, tied"] = original.by_job(1, "tied", source=str(original.folder / "tied"), start=TIED)
            for name, path in layouts(original, folder).items():
                here[f"fp32, {name}"] = original.by_config(1, source=str(path))
        if world == 4:
            here["fp32, HSDP"] = original.by_job(4, mesh={"dp_replicate": 2, "dp_shard": 2})
            here["bf16, HSDP"] = original.by_job(4, mesh={"dp_replicate": 2, "dp_shard": 2}, dtype="bf16")
            here["fp32, TP"] = original.by_job(4, mesh={"dp_shard": 2, "tp": 2})
        plan |= {f"{world}: {name}": run for name, run in here.items()}
    return Runs(plan).launch(folder / "launch")


BENIGN = [
    *(f"{w}: {what}" for w in (1, 3, 4) for what in ("fp32", "bf16", "fp32, by config")),
    *(f"1: {d}, {what}" for d in ("fp32", "bf16") for what in ("12 rows a pass", "checkpointing")),
    "1: fp32, tied",
    *(f"1: fp32, {layout}" for layout in ("dcp of 3 ranks", "full", "zero3", "universal", "fsdp1")),
    "4: fp32, HSDP", "4: bf16, HSDP", "4: fp32, TP",
]  # fmt: skip


@pytest.mark.parametrize("name", BENIGN)
def test_a_run_with_nothing_wrong_passes_against_the_recorded_trajectory(
    name: str, benign: Runs, original: Original
) -> None:
    reference = original.recorded("tied" if "tied" in name else "bf16" if "bf16" in name else "reference")
    checks, _ = judge(reference, benign.traces[name])
    assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
    judged = {c.name for c in checks if c.verdict == "pass"}
    assert {"state.digests", "step1.loss", "step1.worst_update", "steps.loss", "config.groups"} <= judged


@pytest.mark.parametrize("name", BENIGN)
def test_a_run_with_nothing_wrong_passes_against_the_original_at_another_world_size(
    name: str, benign: Runs, faulty: Runs
) -> None:
    if "bf16" in name:
        reference = benign.traces["3: bf16" if name != "3: bf16" else "4: bf16"]
    else:
        reference = faulty.traces["tied" if "tied" in name else "config" if benign.plan[name].job is None else "job"]
    checks, _ = judge(reference, benign.traces[name])
    assert [f"{c.name}: {c.text}" for c in checks if c.verdict == "fail"] == []
    assert "probe.logits" in {c.name for c in checks if c.verdict == "pass"}
