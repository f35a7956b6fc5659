"""What a job holds after the last step, and the schedule that follows: faults that no step shows are seen, and runs in which
nothing is wrong raise no alarm at other world sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judged import Runs
from live.after_job import GLOBAL, MICRO, SAVED, SEQUENCE, STEPS
from peers import REPOSITORY
from ranks import torchrun

from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.not_verified import list_not_verified
from ckpttool.resume.compare.verdict import Check
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.request import RunSettings
from ckpttool.resume.trace.model import Trace, read_reference
from ckpttool.resume.trace.state_after import copy_scheduler, decode_rates, step_scheduler_ahead

pytestmark = pytest.mark.live

JOB = REPOSITORY / "tests" / "live" / "after_job.py"
#: {fault: (checks that fail, kind of the first cause, words of it)}; each is run on 2 ranks, as it was recorded.
FAULTS: dict[str, tuple[set[str], str, str]] = {
    "late": ({"after.schedule"}, "schedule-ahead", "will be 0.01 and was to be 0.001, from step 21 on"),
    "momentum": ({"after.buffers"}, "buffers", "norm.running_"),
    "unbalanced": ({"after.buffers"}, "buffers", "routed."),
    "decaying": ({"after.counters", "after.groups"}, "state-after", "is 16 and was 15"),
    "meddling": ({"after.optimizer"}, "state-after", "blocks.0.weight.exp_avg deviates by"),
    "failing": ({"after.schedule"}, "schedule-ahead", "this schedule has no more steps"),
}  # fmt: skip


@dataclass
class Made:
    folder: Path
    runs: Runs

    def recorded(self, world: int) -> Trace:
        """The recording, of the step of the save and of the last one."""
        return read_reference(self.folder / f"recorded-{world}.jsonl", SAVED, STEPS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("after")
    for world in (1, 2):
        said = torchrun(world, "after_job.py", "--out", str(folder))
        assert (folder / f"done-{world}").exists(), said[-4000:]

    def settings(world: int, saved: int, build: str = "build", **more: Any) -> RunSettings:
        return RunSettings(
            source=str(folder / f"ckpt-{saved}"), mesh={"dp_shard": world}, job=f"{JOB}:{build}", steps=STEPS, start=SAVED,
            sequence=SEQUENCE, global_batch=GLOBAL, micro_batch=MICRO, **more,
        )  # fmt: skip

    plan = {f"{saved} to {world}": settings(world, saved) for world in (1, 2) for saved in (1, 2)}
    plan |= {build: settings(2, 2, build) for build in FAULTS}
    plan |= {"without updates": settings(1, 1, updates=False), "momentum alone": settings(1, 1, "momentum")}
    by_world = dict(sorted(plan.items(), key=lambda item: item[1].world_size))
    return Made(folder, Runs(by_world).launch(folder / "launch"))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {c.name: c for c in checks}


def failed(checks: list[Check]) -> dict[str, str]:
    return {c.name: c.text for c in checks if c.verdict == "fail"}


@pytest.mark.parametrize("name", FAULTS)
def test_what_no_step_shows_is_seen_after_the_last_one_and_called_by_its_name(name: str, made: Made) -> None:
    names, kind, said = FAULTS[name]
    got = made.runs.traces[name]
    for reference in (made.recorded(2), made.runs.traces["2 to 2"]):
        if reference.layout is None and name == "momentum":
            continue  # a checkpoint holds the statistics of one rank, which may be another than the first
        checks = judge_single_run(reference, got).checks
        assert failed(checks).keys() >= names, failed(checks)
        assert failed(checks).keys() == names or name == "unbalanced"  # whose tokens go to other experts
        causes = find_causes(reference, got, checks)
        assert causes[0].kind == kind and said in causes[0].text, causes


def test_running_statistics_are_seen_on_one_rank_as_well(made: Made) -> None:
    checks = judge_single_run(made.recorded(1), made.runs.traces["momentum alone"]).checks
    assert failed(checks).keys() == {"after.buffers"}


def test_a_bit_that_no_sketch_shows_is_seen_between_two_runs_whose_steps_are_bit_equal(made: Made) -> None:
    reference = made.runs.traces["2 to 2"]
    sound = by_name(judge_single_run(reference, reference).checks)
    assert all("bit-equal after the last step" in sound[f"after.{n}"].text for n in ("weights", "optimizer"))
    for kind in ("model.", "optim."):
        name = next(n for n in reference.final if n.startswith(kind) and not n.endswith("step"))
        got = replace(reference, final={**reference.final, name: "another"})
        found = failed(judge_single_run(reference, got).checks)
        assert list(found) == [{"model.": "after.weights", "optim.": "after.optimizer"}[kind]] and name in str(found)
    # a recording has no fingerprints of its last step, and does not say that anything is bit-equal
    checks = by_name(judge_single_run(made.recorded(2), reference).checks)
    assert checks["after.weights"].verdict == "pass" and "by sketches" in checks["after.weights"].text


@pytest.mark.parametrize("saved", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_a_sound_run_raises_no_alarm_and_what_depends_on_the_ranks_is_not_compared(
    saved: int, world: int, made: Made
) -> None:
    got = made.runs.traces[f"{saved} to {world}"]
    for reference in (made.recorded(saved), made.runs.traces[f"{saved} to {saved}"]):
        checks = by_name(judge_single_run(reference, got).checks)
        assert failed(list(checks.values())) == {}
        after = {n: c.verdict for n, c in checks.items() if n.startswith("after.")}
        loose = after.pop("after.buffers") == "not comparable"
        assert set(after.values()) == {"pass"}, [c.text for c in checks.values()]
        if saved == world == 1 or (reference.world_size == got.world_size and reference.layout):
            assert not loose, checks["after.buffers"].text
        assert loose or saved == world
        if loose:
            text = checks["after.buffers"].text
            assert "model.norm.running_mean" in text and "routed" not in text
            assert any(
                "model.norm.running_mean" in line for line in list_not_verified(reference, got, [*checks.values()])
            )


def test_a_recording_that_ends_with_the_save_leaves_the_state_after_the_steps_unverified(made: Made) -> None:
    got = made.runs.traces["2 to 2"]
    reference = read_reference(made.folder / "recorded-2.jsonl", SAVED)
    checks = by_name(judge_single_run(reference, got).checks)
    assert reference.after["step"] == SAVED
    assert {checks[f"after.{n}"].verdict for n in ("weights", "optimizer", "buffers", "counters", "groups")} == {
        "not comparable"
    }
    assert checks["after.schedule"].verdict == "pass"
    assert any("Recorder.state(15) does" in line for line in list_not_verified(reference, got, [*checks.values()]))
    old = replace(reference, after={}, schedule={})
    assert not failed(judge_single_run(old, got).checks)
    assert by_name(judge_single_run(old, got).checks)["after.schedule"].verdict == "not comparable"


def test_without_updates_no_copy_of_the_parameters_is_made_and_their_checks_say_so(made: Made) -> None:
    reference, got = made.runs.traces["1 to 1"], made.runs.traces["without updates"]
    assert [m["measuring_bytes"] for m in got.memory] == [0]
    assert reference.memory[0]["measuring_bytes"] == 4 * (reference.parameters or 0)
    checks = by_name(judge_single_run(reference, got).checks)
    assert not failed(list(checks.values()))
    for name in ("step1.update_norm", "step1.worst_update", "step1.update_direction"):
        assert checks[name].verdict == "not comparable" and "updates" in checks[name].text
    assert checks["step1.grad_direction"].verdict == "pass" and checks["after.optimizer"].verdict == "pass"


def test_a_copy_of_a_scheduler_walks_ahead_and_the_training_does_not_notice() -> None:
    of = torch.optim.lr_scheduler
    model = torch.nn.Linear(2, 2)
    makers = {
        "one cycle": lambda o: of.OneCycleLR(o, 0.1, total_steps=50),
        "chained": lambda o: of.ChainedScheduler([of.LinearLR(o), of.ExponentialLR(o, 0.99)]),
        "sequential": lambda o: of.SequentialLR(o, [of.LinearLR(o), of.MultiStepLR(o, [5, 30])], [4]),
        "lambda": lambda o: of.LambdaLR(o, lambda step: 1 / (1 + step)),
    }
    for name, make in makers.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler: Any = make(optimizer)
        before = repr((scheduler.state_dict(), optimizer.state_dict()))
        copied = copy_scheduler(scheduler, model, optimizer)
        assert not isinstance(copied, str)
        record = step_scheduler_ahead(*copied, 0)
        assert repr((scheduler.state_dict(), optimizer.state_dict())) == before, name
        (rates,) = decode_rates(record)
        assert len(rates) == (51 if name == "one cycle" else 1000) and ("stopped" in record) == (name == "one cycle")
        for rate in rates[:40]:
            assert rate == optimizer.param_groups[0]["lr"], name
            optimizer.step()
            scheduler.step()
    plateau = of.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "needs a metric" in str(copy_scheduler(plateau, model, plateau.optimizer))
