"""A third suite of faults, of converters, trainers, schedulers and storage, that neither of the other two has.

A real FSDP2 job of 2 ranks (tests/live/hybrid.py: state space, grouped attention, separate experts, buffers that every
step changes) saves after 7 and 8 steps and goes on; its checkpoint, or the job, is spoiled in every way of
`hybrid_faults.FAULTS`, sampled and judged as in test_zoo.py. `EVERY=1 pytest tests/resume/test_hybrid.py -s` prints the
table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faulty
import pytest
import zoo_faults
from hybrid_faults import BENIGN, FAULTS, NOT_EXPLAINED
from judged import Runs, Verdict, Zoo, assert_verdict, said_of, save_tree, verdict
from live.faults import GLOBAL
from live.hybrid import CLIP, RECORDED, SAVED, STALE
from peers import REPOSITORY
from ranks import torchrun
from sampling import sample
from spoiling import Spoil, State, one_of_each_kind

import ckpttool
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.trace.model import Trace, read_reference

pytestmark = [pytest.mark.live, pytest.mark.slow]

CHOSEN = {
    name: FAULTS[name]
    for name in sample(
        "faults of the third suite",
        FAULTS,
        {*one_of_each_kind(FAULTS, [*faulty.FAULTS.values(), *zoo_faults.FAULTS.values()]), *NOT_EXPLAINED},
    )
}
#: The reference of --against.
JOB = "job"


class Hybrid(Zoo):
    """Its recording has the state of the save, and what two steps leave."""

    def recorded(self, name: str) -> Trace:
        """What its recorder wrote."""
        return read_reference(self.folder / f"{name}.jsonl", at=self.step, later=RECORDED)


@pytest.fixture(scope="module")
def hybrid_original(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """What the job of tests/live/hybrid.py leaves."""
    folder = tmp_path_factory.mktemp("hybrid")
    said = torchrun(2, "hybrid.py", "--out", str(folder))
    assert (folder / "done").exists(), said[-4000:]
    return Hybrid(folder, str(REPOSITORY / "tests" / "live" / "hybrid.py"), str(SAVED), SAVED)


def spoiled(spoil: Spoil | None, shards: bool, original: Zoo, old: State, place: Path) -> str:
    """The checkpoint with the fault; in the shards of its two ranks where one of them is to blame. `old` is only read."""
    if spoil is None:
        return str(original.folder / original.saved)
    tree = original.state(original.saved)
    spoil(tree, old)
    save_tree(tree, place)
    if not shards:
        return str(place)
    ckpttool.convert(place, place.with_suffix(".2"), to="dcp", world_size=2)
    return str(place.with_suffix(".2"))


@pytest.fixture(scope="module")
def hybrid(hybrid_original: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The reference of --against on 2 ranks, faults of shards on 2, all others on 1."""
    folder = tmp_path_factory.mktemp("faulty")
    probe = hybrid_original.recorded("reference").probe["rows"]
    old = hybrid_original.state(str(STALE))
    # as many rows in a forward pass as the job had
    common: dict[str, Any] = {"clip": CLIP, "micro_batch": GLOBAL // 2}
    plan = {}
    for i, (name, (build, spoil)) in enumerate(BENIGN.items()):
        source = spoiled(spoil, False, hybrid_original, old, folder / f"benign{i}")
        plan[name] = hybrid_original.by_job(1, build, source=source, probe=probe, **common)
    for i, (name, fault) in enumerate(CHOSEN.items()):
        source = spoiled(fault.spoil, fault.rank is not None, hybrid_original, old, folder / f"{i}")
        plan[name] = hybrid_original.by_job(1 if fault.rank is None else 2, fault.job, source=source, **common)
    plan[JOB] = hybrid_original.by_job(2, reread=False, loader="origin", probe=probe, **common)
    by_world = sorted(plan.items(), key=lambda item: item[1].world_size)  # neighbours share a launch
    return Runs(dict(by_world)).launch(folder / "launch")


def verdict_on(name: str, runs: Runs, original: Zoo) -> Verdict:
    """What is said about a fault, each way; asked once."""
    if name not in runs.verdicts:
        runs.verdicts[name] = verdict(runs, name, JOB, original.recorded("reference"), FAULTS[name].reference)
    return runs.verdicts[name]


@pytest.mark.parametrize("name", CHOSEN)
def test_each_fault_of_the_third_suite_has_its_verdict(name: str, hybrid: Runs, hybrid_original: Zoo) -> None:
    fault = FAULTS[name]
    found = verdict_on(name, hybrid, hybrid_original)
    assert_verdict(fault, found)


@pytest.mark.parametrize("name", [JOB, *BENIGN])
def test_nothing_is_said_of_what_is_no_fault(name: str, hybrid: Runs, hybrid_original: Zoo) -> None:
    references = [hybrid_original.recorded("reference")] + [hybrid.traces[JOB]] * (name != JOB)
    for reference in references:
        checks = judge_single_run(reference, hybrid.traces[name]).checks
        assert not [(c.name, c.text) for c in checks if c.verdict == "fail"]
        passed = {c.name for c in checks if c.verdict == "pass"}
        assert {"state.digests", "config.scheduler", "probe.logits", "step1.update_norm", "after.buffers"} <= passed


def test_the_third_table(hybrid: Runs, hybrid_original: Zoo) -> None:
    print("\n| fault | first check that fails | first one without the state | what is said |\n|---|---|---|---|")
    caught = numbers = recorded = right = 0
    for name, fault in CHOSEN.items():
        found = verdict_on(name, hybrid, hybrid_original)
        said = said_of(fault, found)
        caught += said["check"] is not None
        numbers += said["dynamic"] is not None
        recorded += said["recorded"]
        as_expected = all(said[key] == getattr(fault, key) for key in ("kind", "tensors", "said"))
        right += as_expected and name not in NOT_EXPLAINED
        print(found.row(name))
    print(f"caught of {len(CHOSEN)}: {caught}, {numbers} by numbers, {recorded} by the recording; {right} causes right")
    # dropout of the embeddings is in no trace
    assert caught == recorded == len(CHOSEN) - 1
    assert right == len(CHOSEN) - len(NOT_EXPLAINED)
    assert numbers >= 0.62 * len(CHOSEN)
