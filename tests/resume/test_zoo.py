"""A second suite of faults: 102 that hostile testers found likely, in a job with everything that a job may save.

A real FSDP2 job of 4 ranks (tests/live/zoo.py) saves after 6, 11 and 12 steps and goes on; its checkpoint, or the job, is
spoiled in every way of `zoo_faults.FAULTS`, and each is judged as in test_faults.py. `pytest tests/resume/test_zoo.py -s`
prints the table.

What the product does not see today, or calls by another name than it should, is in `zoo_faults.MISSED`: a verdict that
gets better or worse without that table being changed fails here.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import Original, Runs, Verdict, first, name_of, verdict
from live.zoo import CLIP, OLDEST, SAVED, STALE, TIED
from peers import REPOSITORY
from ranks import torchrun
from spoiling import Fault
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save
from zoo_faults import BATCH, DIGESTS, FAULTS, LOADER, MISSED, PROBE, RANDOM, SCALER, SCHEDULER, VALUES

import ckpttool
from ckpttool.resume.judge import judge

pytestmark = [pytest.mark.live, pytest.mark.slow]

#: Faults that only another rank shows.
ABOUT_RANKS = ("job: rank 1 reads rank 0's rows",)


class Zoo(Original):
    """Its state is read by torch itself, since no other layout has all of it."""

    def state(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.pt"
        if not path.exists():
            dcp_to_torch_save(self.folder / name, path)
        tree: dict[str, Any] = torch.load(path, weights_only=False)  # numpy arrays, and from our own job
        return tree


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("zoo")
    said = torchrun(4, "zoo.py", "--out", str(folder))
    assert (folder / "done").exists(), said[-4000:]
    return Zoo(folder, str(REPOSITORY / "tests" / "live" / "zoo.py"), str(SAVED), SAVED)


def spoiled(fault: Fault, original: Zoo, place: Path) -> Path:
    """The checkpoint with the fault; in the shards of 4 ranks where one of them is to blame."""
    name = "tied" if fault.tied else str(SAVED)
    if fault.spoil is None:
        return original.folder / name
    tree = original.state(name)
    fault.spoil(tree, original.state(str(OLDEST if fault.oldest else STALE)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(tree, checkpoint_id=place, no_dist=True)
    if fault.rank is None:
        return place
    ckpttool.convert(place, place.with_suffix(".4"), to="dcp", world_size=4)
    return place.with_suffix(".4")


@pytest.fixture(scope="module")
def zoo(original: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The references of --against on 2 ranks, faults of shards and of ranks on 2, all other faults on 1."""
    folder = tmp_path_factory.mktemp("faulty")
    tied = {"source": str(original.folder / "tied"), "start": TIED}
    plan = {
        "job": original.by_job(2, reread=False, clip=CLIP, probe=original.recorded("reference").probe["rows"]),
        "tied": original.by_job(2, "tied", reread=False, clip=CLIP, **tied),
    }
    for i, (name, fault) in enumerate(FAULTS.items()):
        world = 2 if fault.rank is not None or name in ABOUT_RANKS else 1
        run = original.by_job(world, fault.job, clip=CLIP)
        source = str(spoiled(fault, original, folder / f"{i}"))
        plan[name] = replace(run, **{**(tied if fault.tied else {}), **fault.settings, "source": source})
    by_world = sorted(plan.items(), key=lambda item: item[1].world_size)  # neighbours share a launch
    return Runs(dict(by_world)).launch(folder / "launch")


def verdict_on(name: str, runs: Runs, original: Zoo) -> Verdict:
    """What is said about a fault, each way; asked once."""
    if name not in runs.verdicts:
        fault = FAULTS[name]
        recorded = original.recorded("tied" if fault.tied else "reference")
        runs.verdicts[name] = verdict(runs, name, "tied" if fault.tied else "job", recorded, fault.reference)
    return runs.verdicts[name]


def said_of(fault: Fault, found: Verdict) -> dict[str, Any]:
    """What the test compares, by the names of `Fault`."""
    cause = found.causes[0] if found.causes else None
    return {
        "check": name_of(first(found.known)), "kind": None if cause is None else cause.kind,
        "tensors": () if cause is None else tuple(cause.tensors[: len(fault.tensors)]),
        "said": fault.said if cause is not None and fault.said in cause.text else "",
        "dynamic": name_of(first(found.dynamic)), "recorded": first(found.recorded) is not None,
    }  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_the_second_suite_has_its_verdict(name: str, zoo: Runs, original: Zoo) -> None:
    fault = FAULTS[name]
    found = verdict_on(name, zoo, original)
    wanted = {key: getattr(fault, key) for key in ("check", "kind", "tensors", "said", "dynamic", "recorded")}
    missed = MISSED.get(name, {})
    assert not {k: v for k, v in missed.items() if wanted[k] == v}, "MISSED has what is wanted"
    assert said_of(fault, found) == {**wanted, **missed}, [c.text for c in found.causes]
    if fault.rank is not None:
        place = found.causes[0].place
        assert place is not None
        assert place.startswith(f"__{fault.rank}_0.distcp, bytes "), place


def test_the_checkpoint_itself_passes_against_the_recording_of_its_own_job(zoo: Runs, original: Zoo) -> None:
    checks, _ = judge(original.recorded("reference"), zoo.traces["job"])
    assert not [(c.name, c.text) for c in checks if c.verdict == "fail"]
    passed = {c.name for c in checks if c.verdict == "pass"}
    assert {SCHEDULER, SCALER, LOADER, RANDOM, VALUES, PROBE, BATCH, DIGESTS} <= passed


def test_the_second_table(zoo: Runs, original: Zoo) -> None:
    print("\n| fault | first check that fails | first one without the state | what is said |\n|---|---|---|---|")
    caught = numbers = recorded = right = 0
    for name, fault in FAULTS.items():
        found = verdict_on(name, zoo, original)
        said = said_of(fault, found)
        caught += said["check"] is not None
        numbers += said["dynamic"] is not None
        recorded += said["recorded"]
        right += all(said[key] == getattr(fault, key) for key in ("kind", "tensors", "said"))
        print(found.row(name))
    print(f"caught of {len(FAULTS)}: {caught}, {numbers} by numbers, {recorded} by the recording; {right} causes right")
    assert len(FAULTS) == 102
    assert caught >= 95
    assert recorded >= 100
