"""resume-verify of jobs whose live objects are more than tensors: milestones, counters in param groups, lists in the optimizer's state,
extra states, several optimizers, running statistics of each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import ckpttool_here
from ranks import forked, one_at_a_time, torchrun

JOB = Path(__file__).resolve().parents[1] / "live" / "live_objects_job.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both checkpoints and the recording."""
    folder = tmp_path_factory.mktemp("objects")
    log = torchrun(2, JOB.name, str(folder))
    assert (folder / "counting.jsonl").exists() and (folder / "several").exists(), log[-4000:]
    return folder


def verify(folder: Path, name: str, *reference: Any) -> tuple[int, dict[str, Any]]:
    """(exit code, report)"""
    words = ["--job", f"{JOB}:build_{name}", "-n", 2, "--global-batch", 8, "--micro-batch", 4, "--steps", 3]
    with one_at_a_time(), forked():
        done = ckpttool_here("resume-verify", folder / name, *reference, *words, "--json", "--scratch", folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.live
@pytest.mark.slow
def test_a_job_goes_on_as_after_torchs_own_load(saved: Path) -> None:
    code, report = verify(saved, "counting", "--reference", saved / "counting.jsonl")
    assert code == 0, [c for c in report["checks"] if c["verdict"] == "fail"]
    rates = [s["learning_rates"] for s in report["candidate"]["steps"]]
    assert rates == [[0.1], [0.05], [0.025]], "the milestones are 3 and 4, and two steps were made before"
    assert report["candidate"]["roundtrip"]["differing"] == []
    assert "optim.state.embedding.weight.GG.0" in report["candidate"]["state"]


@pytest.mark.live
@pytest.mark.slow
def test_several_optimizers_and_the_own_statistics_of_each_rank(saved: Path) -> None:
    code, report = verify(saved, "several", "--against", saved / "several")
    assert code == 0, [c for c in report["checks"] if c["verdict"] == "fail"]
    got = report["candidate"]
    assert len(got["groups"]) == 2 and got["groups"][1]["betas"] == [0.9, 0.999]
    assert got["roundtrip"]["differing"] == []
    assert got["roundtrip"]["apart"] == ["model.norm.running_mean", "model.norm.running_var"]
    assert any(
        "own copy of 2 tensors, first model.norm.running_mean: torch saves one copy" in t
        for t in report["not_verified"]
    )
