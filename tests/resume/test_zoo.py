"""A second suite of faults: 102 that hostile testers found likely, in a job with everything that a job may save.

A real FSDP2 job of 4 ranks (tests/live/zoo.py) saves after 6, 11 and 12 steps and goes on; its checkpoint, or the job, is
spoiled in every way of `zoo_faults.FAULTS`, of which `make test` has those of kinds that the first suite has not, and each
is judged as in test_faults.py. `EVERY=1 pytest tests/resume/test_zoo.py -s` prints the table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import faulty
import pytest
from judged import Runs, Verdict, Zoo, assert_verdict, said_of, save_tree, verdict
from live.zoo import CLIP, OLDEST, SAVED, STALE, TIED
from sampling import sample
from spoiling import Fault, one_of_each_kind
from zoo_faults import BATCH, DIGESTS, FAULTS, LOADER, PROBE, RANDOM, SCALER, SCHEDULER, VALUES

import ckpttool
from ckpttool.resume.compare.judge import judge_single_run

pytestmark = [pytest.mark.live, pytest.mark.slow]

#: Faults that only another rank shows.
ABOUT_RANKS = ("job: rank 1 reads rank 0's rows",)
CHOSEN = {
    name: FAULTS[name]
    for name in sample(
        "faults of the second suite", FAULTS, {*one_of_each_kind(FAULTS, faulty.FAULTS.values()), *ABOUT_RANKS}
    )
}


def spoiled(fault: Fault, zoo_original: Zoo, place: Path) -> Path:
    """The checkpoint with the fault; in the shards of 4 ranks where one of them is to blame."""
    name = "tied" if fault.tied else str(SAVED)
    if fault.spoil is None:
        return zoo_original.folder / name
    tree = zoo_original.state(name)
    fault.spoil(tree, zoo_original.state(str(OLDEST if fault.oldest else STALE)))
    save_tree(tree, place)
    if fault.rank is None:
        return place
    ckpttool.convert(place, place.with_suffix(".4"), to="dcp", world_size=4)
    return place.with_suffix(".4")


@pytest.fixture(scope="module")
def zoo(zoo_original: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The references of --against on 2 ranks, faults of shards and of ranks on 2, all other faults on 1."""
    folder = tmp_path_factory.mktemp("faulty")
    tied = {"source": str(zoo_original.folder / "tied"), "start": TIED}
    plan = {
        "job": zoo_original.by_job(
            2, reread=False, loader="origin", clip=CLIP, probe=zoo_original.recorded("reference").probe["rows"]
        ),
        "tied": zoo_original.by_job(2, "tied", reread=False, loader="origin", clip=CLIP, **tied),
    }
    for i, (name, fault) in enumerate(CHOSEN.items()):
        world = 2 if fault.rank is not None or name in ABOUT_RANKS else 1
        run = zoo_original.by_job(world, fault.job, clip=CLIP)
        source = str(spoiled(fault, zoo_original, folder / f"{i}"))
        plan[name] = replace(run, **{**(tied if fault.tied else {}), **fault.settings, "source": source})
    by_world = sorted(plan.items(), key=lambda item: item[1].world_size)  # neighbours share a launch
    return Runs(dict(by_world)).launch(folder / "launch")


def verdict_on(name: str, runs: Runs, zoo_original: Zoo) -> Verdict:
    """What is said about a fault, each way; asked once."""
    if name not in runs.verdicts:
        fault = FAULTS[name]
        recorded = zoo_original.recorded("tied" if fault.tied else "reference")
        runs.verdicts[name] = verdict(runs, name, "tied" if fault.tied else "job", recorded, fault.reference)
    return runs.verdicts[name]


@pytest.mark.parametrize("name", CHOSEN)
def test_each_fault_of_the_second_suite_has_its_verdict(name: str, zoo: Runs, zoo_original: Zoo) -> None:
    fault = FAULTS[name]
    found = verdict_on(name, zoo, zoo_original)
    assert_verdict(fault, found)


def test_the_checkpoint_itself_passes_against_the_recording_of_its_own_job(zoo: Runs, zoo_original: Zoo) -> None:
    checks = judge_single_run(zoo_original.recorded("reference"), zoo.traces["job"]).checks
    assert not [(c.name, c.text) for c in checks if c.verdict == "fail"]
    passed = {c.name for c in checks if c.verdict == "pass"}
    assert {SCHEDULER, SCALER, LOADER, RANDOM, VALUES, PROBE, BATCH, DIGESTS} <= passed


def test_the_second_table(zoo: Runs, zoo_original: Zoo) -> None:
    print("\n| fault | first check that fails | first one without the state | what is said |\n|---|---|---|---|")
    caught = numbers = recorded = right = 0
    for name, fault in CHOSEN.items():
        found = verdict_on(name, zoo, zoo_original)
        said = said_of(fault, found)
        caught += said["check"] is not None
        numbers += said["dynamic"] is not None
        recorded += said["recorded"]
        right += all(said[key] == getattr(fault, key) for key in ("kind", "tensors", "said"))
        print(found.row(name))
    print(f"caught of {len(CHOSEN)}: {caught}, {numbers} by numbers, {recorded} by the recording; {right} causes right")
    assert caught == recorded == right == len(CHOSEN)
    assert numbers >= 0.78 * len(CHOSEN)
