"""A job and its checkpoints, runs that resume them, and the three verdicts on each: what the tests of faults share.

A fault is judged with everything known (--against the original), with the numbers of the run alone, and against the
recorded trajectory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from live.faults import GLOBAL, MICRO, SEQUENCE
from live.zoo import SAVED
from peers import REPOSITORY
from ranks import forked, one_at_a_time, torchrun
from spoiling import Fault
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save

import ckpttool
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.verdict import Cause, Check
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.ranks.launch import launch_runs
from ckpttool.resume.request import RunSettings
from ckpttool.resume.trace.model import Trace, read_reference

STEPS = 2  # the first, and one after an update


@dataclass
class Original:
    """What a job left in `folder`: its checkpoint `saved`, of step `step`, among others. `job` is the file of the job."""

    folder: Path
    job: str
    saved: str
    step: int

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

    def by_job(self, world: int, build: str = "build", **more: Any) -> RunSettings:
        """A run by --job."""
        mesh = {"dp_shard": world}
        return replace(
            RunSettings(
                source=str(self.folder / self.saved), mesh=mesh, job=f"{self.job}:{build}", steps=STEPS,
                start=self.step, sequence=SEQUENCE, global_batch=GLOBAL, micro_batch=MICRO,
            ),
            **more,
        )  # fmt: skip


class Zoo(Original):
    """Its state is read by torch itself, since no other layout has all of it."""

    def state(self, name: str) -> dict[str, Any]:
        """The tree of one of its checkpoints, anew each time."""
        return tree_of(self.folder / name)


def tree_of(folder: Path) -> dict[str, Any]:
    """The tree that torch reads from a folder of its own, anew each time."""
    path = folder.with_name(f"{folder.name}.pt")
    if not path.exists():
        dcp_to_torch_save(folder, path)
    tree: dict[str, Any] = torch.load(path, weights_only=False)  # numpy arrays, and from our own job
    return tree


def save_tree(tree: dict[str, Any], folder: Path) -> None:
    """Write a tree as torch's DCP does on one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(tree, checkpoint_id=folder, no_dist=True)


def zoo_in(folder: Path) -> Zoo:
    """What the job of tests/live/zoo.py leaves in a folder."""
    said = torchrun(4, "zoo.py", "--out", str(folder))
    assert (folder / "done").exists(), said[-4000:]
    return Zoo(folder, str(REPOSITORY / "tests" / "live" / "zoo.py"), str(SAVED), SAVED)


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
        number = f" ({seen.number:.1e})" if seen is not None and seen.number and seen.name != "step1.batch" else ""
        dynamic = "nothing" if seen is None else f"{seen.name}{number}"
        known = first(self.known)
        said = self.causes[0].text.split(": /")[0] if self.causes else "nothing"
        return f"| {name} | {'nothing' if known is None else known.name} | {dynamic} | {said} |"


@dataclass
class Runs:
    """Traces by name, and what was run."""

    plan: dict[str, RunSettings]
    traces: dict[str, Trace] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def launch(self, folder: Path) -> Runs:
        """Run everything; one launch for each world size."""
        folder.mkdir()
        with one_at_a_time(), forked():
            self.traces = launch_runs(self.plan, str(folder), lambda text: None)
        return self


def first(checks: list[Check]) -> Check | None:
    """The first that fails."""
    return next((c for c in checks if c.verdict == "fail"), None)


def name_of(check: Check | None) -> str | None:
    return None if check is None else check.name


def bare(trace: Trace) -> Trace:
    """What numbers of a run alone tell: the state that the job holds and its configuration are left out."""
    return replace(
        trace, state={}, others={}, stored={}, scalars={}, values={}, held={}, groups=[], config=None, tied=[], parameters=None,
        clip=None, after={}, schedule={}, environment={k: v for k, v in trace.environment.items() if k == "deterministic"},
    )  # fmt: skip


def verdict(runs: Runs, name: str, known: str, recorded: Trace, changed: Mapping[str, Any]) -> Verdict:
    """On the run `name`, against the run `known` and a recording; `changed` replaces fields of both references."""
    reference, got = replace(runs.traces[known], **changed), runs.traces[name]
    checks = judge_single_run(reference, got).checks
    with ckpttool.open(runs.plan[known].source) as left, ckpttool.open(runs.plan[name].source) as right:
        found = find_causes(reference, got, checks, (left, right))
    dynamic = judge_single_run(bare(reference), bare(got)).checks
    trajectory = replace(recorded, **changed)
    judged = judge_single_run(trajectory, got).checks
    return Verdict(checks, found, dynamic, judged, find_causes(trajectory, got, judged))


def said_of(fault: Fault, found: Verdict) -> dict[str, Any]:
    """What the test compares, by the names of `Fault`."""
    cause = found.causes[0] if found.causes else None
    return {
        "check": name_of(first(found.known)), "kind": None if cause is None else cause.kind,
        "tensors": () if cause is None else tuple(cause.tensors[: len(fault.tensors)]),
        "said": fault.said if cause is not None and fault.said in cause.text else "",
        "dynamic": name_of(first(found.dynamic)), "recorded": first(found.recorded) is not None,
    }  # fmt: skip


def assert_verdict(fault: Fault, found: Verdict) -> None:
    """What is said about a fault is what its row says, and a fault of a rank's shard lies in that rank's file."""
    wanted = {key: getattr(fault, key) for key in ("check", "kind", "tensors", "said", "dynamic", "recorded")}
    assert said_of(fault, found) == wanted, [c.text for c in found.causes]
    if fault.rank is not None:
        place = found.causes[0].place
        assert place is not None
        assert place.startswith(f"__{fault.rank}_0.distcp, bytes "), place
