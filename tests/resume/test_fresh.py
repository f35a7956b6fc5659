"""`ckpttool resume-verify --fresh`: a job is trained from its start, saved, and resumed from that save at two world sizes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from ranks import ENVIRONMENT, NURSERIES, forked, one_at_a_time
from sampling import EVERY, sample

import ckpttool
from ckpttool.errors import NoSpace, UsageError
from ckpttool.resume.compare.fresh_checks import check_bit_equality, check_fresh_run
from ckpttool.resume.compare.judge import Judgement, judge_runs
from ckpttool.resume.compare.verdict import Check
from ckpttool.resume.job.build import Job
from ckpttool.resume.job.saving import save_job
from ckpttool.resume.job.user_job import call_build
from ckpttool.resume.plan import RunPlanner, choose_other_mesh
from ckpttool.resume.ranks.launch import launch_runs
from ckpttool.resume.request import RunSettings, make_request
from ckpttool.resume.trace.model import LIVE, Step, Trace

REPOSITORY = Path(__file__).resolve().parents[2]
JOBS = REPOSITORY / "tests" / "live" / "fresh_jobs.py"
#: Jobs in which nothing is wrong.
SOUND = sample(
    "sound jobs of --fresh",
    ("warmup", "muon", "soap", "batch_norm", "low", "schedule_free", "dropout", "milestones", "own_save", "wrapped", "own_sharding"),
    ("muon", "dropout", "own_save"),
)  # fmt: skip
#: Jobs with a fault of their own -> the checks that must fail first, and no others before them.
FAULTS = {
    "no_step": ["fresh.saved_step"],
    "other_step": ["fresh.saved_step"],
    "no_momentum": ["fresh.bit_equal", "state.digests", "step1.update_norm"],
    "spoiling_save": ["fresh.repeat", "state.digests"],
    "diverging": ["fresh.finite"],
}
SMALL = ["--device", "cpu", "--global-batch", 12, "--micro-batch", 2, "--steps", 5]


# --------------------------------------------------------------------------------------------------- real ranks, together


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judgement]:
    """{job: judgement} of all jobs, and {"job at 3": judgement} of the sound ones with 3 ranks in the second resume. Their runs
    share four launches, since a launch for each job would take minutes."""
    folder = tmp_path_factory.mktemp("fresh")
    plan: dict[str, RunSettings] = {}
    for name in (*SOUND, *FAULTS, "random_job"):
        (folder / name).mkdir()
        asked = make_request(None, {
            "fresh": True, "job": f"{JOBS}:{name}", "steps": 5, "device": "cpu", "global_batch": 12, "micro_batch": 2,
            "keep_dropout": name == "dropout",
        })  # fmt: skip
        runs = (
            RunPlanner(asked, "cpu", {"dp_shard": 2}, lambda name=name: str(folder / name), {"dp_shard": 1}).plan().runs
        )
        if name in FAULTS:
            del runs["second"]
        if name in SOUND:
            runs["third"] = replace(runs["second"], mesh={"dp_shard": 3})
        plan |= {f"{name}/{label}": s for label, s in runs.items()}
    plan = dict(sorted(plan.items(), key=lambda x: (x[1].fresh_steps == 0, x[1].world_size)))
    (folder / "runs").mkdir()
    with one_at_a_time(), forked():
        traces = launch_runs(plan, str(folder / "runs"), lambda text: None)
    out = {}
    for name in (*SOUND, *FAULTS, "random_job"):
        mine = {k.partition("/")[2]: t for k, t in traces.items() if k.startswith(f"{name}/")}
        third = mine.pop("third", None)
        out[name] = judge_runs(mine, None, "strict")
        if third is not None:
            out[f"{name} at 3"] = judge_runs({**mine, "second": third}, None, "strict")
    return out


def words(judgement: Judgement) -> dict[str, str]:
    return {c.name: c.verdict for c in judgement.checks}


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_job_passes_and_is_bit_equal_at_its_own_world_size(name: str, judged: dict[str, Judgement]) -> None:
    for key, other in ((name, 1), (f"{name} at 3", 3)):
        found = judged[key]
        # eigenvectors amplify every rounding; the command then measures that noise
        allowed = [f"at{other}.after.optimizer"] if name == "soap" else []
        assert [(c.name, c.text) for c in found.failed if c.name not in allowed] == []
        said = words(found)
        for check in ("repeat", "bit_equal", "falls", "finite", "ranks", "saved_step"):
            assert said[f"fresh.{check}"] == "pass", check
        assert said["step1.update_norm"] == said["steps.loss"] == "pass"
        # random states of two ranks are nothing to one or three
        assert said[f"at{other}.steps.loss"] == ("not comparable" if name == "dropout" else "pass")
        assert said[f"at{other}.state.digests"] == "pass"
        assert found.unsure is bool(found.failed) and found.noise is None


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_job_is_found_and_named(name: str, judged: dict[str, Judgement]) -> None:
    failed = [c.name for c in judged[name].failed]
    assert failed[: len(FAULTS[name])] == FAULTS[name], [(c.name, c.text) for c in judged[name].failed]
    text = judged[name].failed[0].text
    said = {
        "no_step": "says that it is of step 5: save the step", "other_step": "it is of step 4, and was saved after step 5",
        "no_momentum": "first in the update norm of step 6", "spoiling_save": "the save changes the training", "diverging": "loss is ",
    }[name]  # fmt: skip
    assert said in text


@pytest.mark.live
@pytest.mark.slow
def test_a_job_that_never_computes_the_same_numbers_twice_passes_with_bounds_of_its_own_noise(
    judged: dict[str, Judgement],
) -> None:
    found = judged["random_job"]
    assert [(c.name, c.text) for c in found.failed] == []
    said = words(found)
    assert said["fresh.repeat"] == said["fresh.bit_equal"] == "not comparable"
    assert said["steps.loss"] == said["state.digests"] == said["at1.steps.loss"] == "pass"
    assert found.noise is not None and 0 < found.noise["step1.grad_norm"] < 1e-4


# ------------------------------------------------------------------------------------------------------------- commands


def verify(*words: object) -> tuple[int, dict[str, Any], str]:
    """(exit code, what --json printed, stderr)."""
    with one_at_a_time(), forked():
        done = ckpttool_here("resume-verify", "--fresh", *words, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.live
@pytest.mark.slow
def test_the_loader_that_kept_milestones_as_text_is_found(tmp_path: Path) -> None:
    """F1: with --against both sides had it, and the rate never fell again."""
    code, report, _ = verify(
        "--job", f"{JOBS}:text_milestones", "-n", 2, *SMALL, "--junit", tmp_path / "j.xml", "--metrics", tmp_path / "m.prom",
        "--report", tmp_path / "report",
    )  # fmt: skip
    failed = [c["name"] for c in report["checks"] if c["verdict"] == "fail"]
    assert code == 10 and failed[:2] == ["fresh.bit_equal", "state.values"]
    assert {"steps.learning_rates", "at1.state.values", "at1.steps.learning_rates"} <= set(failed)
    (text,) = [c["text"] for c in report["checks"] if c["name"] == "state.values"]
    assert "scheduler.milestones.[3] is not in the job, and is in the run without a pause" in text
    assert "scheduler" in report["causes"][0]["text"]
    assert [s["step"] for s in report["reference"]["steps"]] == list(range(1, 11))
    assert [s["step"] for s in report["second"]["steps"]] == list(range(6, 11)) and report["second"]["world_size"] == 1
    assert {"save_seconds", "load_seconds", "reserved_gib", "headroom_gib"} <= report["metrics"].keys()
    stage = {c["name"]: c["stage"] for c in report["checks"]}
    assert stage["at1.step1.loss"] == "at 1 rank" and stage["fresh.falls"] == "smoke test"
    assert 'name="at1.steps.learning_rates"' in (tmp_path / "j.xml").read_text()
    assert 'name="at1.steps.learning_rates"} 0' in (tmp_path / "m.prom").read_text()
    page = re.sub(r"<[^>]+>", "", (tmp_path / "report" / "report.html").read_text())
    assert "at1.steps.learning_rates" in page and "at 1 rank" in page
    assert any(line.startswith("the job's own code that saves a checkpoint") for line in report["not_verified"])


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(
    not EVERY, reason="EVERY=1 runs it; test_the_loader_that_kept_milestones_as_text_is_found is its like"
)
def test_the_loader_that_counted_a_step_too_many_is_found() -> None:
    """F2: a schedule-free optimizer counts in its param groups."""
    code, report, _ = verify("--job", f"{JOBS}:counted_twice", "-n", 2, "--resume-world-size", 3, *SMALL)
    failed = [c["name"] for c in report["checks"] if c["verdict"] == "fail"]
    assert code == 10 and failed[:3] == ["fresh.bit_equal", "config.groups", "step1.update_norm"]
    assert "at3.config.groups" in failed
    assert report["causes"][0]["text"].startswith("k is 6 and was 5")


@pytest.mark.live
@pytest.mark.slow
def test_torchrun_needs_a_shared_folder_and_resumes_at_its_own_world_size(tmp_path: Path) -> None:
    words = ["-m", "ckpttool", "resume-verify", "--fresh", "--job", f"{JOBS}:warmup", *map(str, SMALL), "--json"]
    log = tmp_path / "log"
    (tmp_path / "shared").mkdir()
    more = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)}
    with one_at_a_time():
        refused = NURSERIES.launch(2, words, log, patience=5, **more)
        said = log.read_text()
        log.write_text("")
        statuses = NURSERIES.launch(2, [*words, "--quiet", "--scratch", str(tmp_path / "shared")], log, **more)
    assert refused == [2, 2] and "Pass --scratch, a folder that all of them share" in said
    assert statuses == [0, 0], log.read_text()
    report = json.loads(log.read_text()[log.read_text().index("{") :])
    assert report["verdict"] == "pass" and report["second"] is None
    assert report["not_verified"][-1].startswith("a resume at another world size, and one in new processes: torchrun")
    assert not os.listdir(tmp_path / "shared")


@pytest.mark.live
@pytest.mark.slow
def test_a_signal_during_the_save_leaves_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ckpttool", "resume-verify", "--fresh", "--job", f"{JOBS}:hanging_save", "-n", "2"]
    with (
        one_at_a_time(),
        subprocess.Popen(
            [*words, *map(str, SMALL), "--scratch", str(tmp_path)], env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as child,
    ):  # fmt: skip
        assert child.stderr is not None
        for text in child.stderr:
            if "saving the job" in text:
                break
        time.sleep(0.5)
        assert os.listdir(tmp_path)
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode == 130 and "Traceback" not in rest, rest
    assert not os.listdir(tmp_path)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "said"),
    [("on_meta", "is on the meta device, where it has none. Initialise the weights in build()"),
     ("no_optimizer", "build() returns no optimizer"),
     ("empty_save", "save(folder, step) of build() wrote nothing into the folder that it was given")],
)  # fmt: skip
def test_a_job_that_cannot_be_tested_is_refused_in_a_sentence(job: str, said: str) -> None:
    with one_at_a_time(), forked():
        done = ckpttool_here("resume-verify", "--fresh", "--job", f"{JOBS}:{job}", "-n", 1, *SMALL)
    assert done.returncode == 2 and said in done.stderr


# ------------------------------------------------------------------------------------------------------- without ranks


@pytest.mark.parametrize(
    ("source", "how", "said"),
    [(None, {}, "there is no checkpoint to verify. Give one, or fresh=True"), ("a", {"fresh": True}, "it does not take a checkpoint"),
     (None, {"fresh": True}, "needs job: only"), (None, {"fresh": True, "against": "b"}, "against='b' does not go with fresh"),
     (None, {"fresh": True, "reference": "b"}, "does not go with"), (None, {"fresh": True, "start_step": 3}, "start_step=3 does not"),
     ("a", {"resume_world_size": 3}, "goes with fresh=True"), (None, {"fresh": True, "job": "j", "fresh_steps": 0}, "at least 1"),
     (None, {"fresh": True, "job": f"{JOBS}:warmup", "mesh": "tp=2", "resume_world_size": 3}, "resume_world_size=3 is not a multiple of the 2")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_anything_runs(
    source: str | None, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as e:
        ckpttool.resume_verify(source, device="cpu", **how)
    assert said in str(e.value)


def test_the_command_names_its_options_in_what_it_refuses(tmp_path: Path) -> None:
    for words, said in (
        ((), "Give one, or --fresh to train a job"), (("--latest",), "--latest looks for the newest checkpoint below a folder"),
        (("--fresh",), "--fresh needs --job"), ((tmp_path, "--fresh"), "--fresh trains the job from its start"),
    ):  # fmt: skip
        done = ckpttool_here("resume-verify", *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_the_second_resume_has_one_shard_fewer_or_what_was_asked_for_where_the_machine_has_it() -> None:
    def shards(mesh: dict[str, int], ranks: int | None = None, device: str = "cpu", gpus: int = 0) -> int | None:
        found = choose_other_mesh(mesh, ranks, device, gpus)
        return None if found is None else found["dp_shard"]

    assert [shards({"dp_shard": n}) for n in (1, 2, 3, 8)] == [2, 1, 2, 7]
    assert shards({"dp_shard": 4}, 8) == 8 and shards({"dp_replicate": 2, "dp_shard": 2, "tp": 2}) == 1
    assert shards({"dp_shard": 2, "tp": 2}, 6) == 3
    assert shards({"dp_shard": 1}, None, "cuda", 1) is None and shards({"dp_shard": 2}, None, "cuda", 2) == 1
    with pytest.raises(UsageError, match="this machine has 2 GPUs"):
        choose_other_mesh({"dp_shard": 2}, 3, "cuda", 2)


def test_a_save_that_the_disk_has_no_room_for_is_not_begun(tmp_path: Path) -> None:
    model = torch.nn.Linear(1 << 30, 1 << 30, device="meta")
    job = Job(model, None, None, None, lambda: None, 0, 1, 1.0, None, [])  # type: ignore[arg-type, return-value]
    with pytest.raises(NoSpace, match=r"GB free, .* are to be saved\. Pass scratch,"):
        save_job(job, RunSettings(source=str(tmp_path / "save")), 5)
    assert not (tmp_path / "save").exists()


def test_a_save_of_build_must_be_a_function(tmp_path: Path) -> None:
    text = "import torch\ndef build():\n    return {'model': torch.nn.Linear(1, 1), 'save': 'folder'}\n"
    (tmp_path / "r.py").write_text(text)
    with pytest.raises(UsageError, match=r"the save is a str, not a function save\(folder, step\)"):
        call_build(RunSettings(source="", job=f"{tmp_path}/r.py:build"), None)
    (tmp_path / "s.py").write_text(text.replace("'folder'", "print"))
    assert call_build(RunSettings(source="", job=f"{tmp_path}/s.py:build"), None)[5] is print


def run(losses: list[float], start: int = 5, **more: Any) -> Trace:
    """A run without a pause."""
    steps = [Step(k, x, 1.0, 0.1, losses=[x, x]) for k, x in enumerate(losses, 1)]
    made = {
        "layout": LIVE,
        "start": start,
        "steps": steps,
        "environment": {"deterministic": True},
        "values": {"trainer.step": start},
    }
    return Trace(**{**made, **more})  # type: ignore[arg-type]


def check(name: str, a: Trace, b: Trace | None = None, got: Trace | None = None) -> Check:
    return next(c for c in check_fresh_run(a, b or a, got or a) if c.name == f"fresh.{name}")


def test_the_loss_must_fall_by_more_than_batches_differ() -> None:
    assert check("falls", run([5 - k / 10 for k in range(9)])).verdict == "pass"
    assert check("falls", run([5 + k / 10 for k in range(9)])).verdict == "fail"
    few = check("falls", run([5 - k / 10 for k in range(8)]))
    assert few.verdict == "not comparable" and few.text == "8 steps in all, and at least 9 are needed"
    flat = check("falls", run([5.0, 4.8, 5.2, 5, 5, 5, 5.0, 4.9, 5.3]))
    assert flat.verdict == "not comparable" and "within what single batches differ by" in flat.text
    assert check("falls", run([*[5.0] * 8, math.nan])).verdict == "not comparable"
    assert check("falls", run([5.0] * 9)).verdict == "not comparable", "nothing is learned, or not yet"


def test_two_runs_that_part_before_the_save_are_noise_and_after_it_the_save_is_to_blame() -> None:
    losses = [5 - k / 10 for k in range(9)]
    same = run(losses)
    early, late = (run([x + (k >= first) * 1e-9 for k, x in enumerate(losses)]) for first in (2, 6))
    assert check("repeat", same, run(losses)).verdict == "pass"
    noise = check("repeat", same, early)
    assert noise.verdict == "not comparable" and "first in the loss of step 3" in noise.text
    blamed = check("repeat", same, late)
    assert blamed.verdict == "fail" and blamed.where == "step 7" and "the save changes the training" in blamed.text
    loose = replace(same, environment={"deterministic": False})
    assert check("repeat", loose, late).verdict == "not comparable", "such kernels may part at any step"
    assert check_bit_equality(same, replace(same, steps=same.steps[5:]), True).verdict == "pass"
    assert check_bit_equality(same, replace(late, steps=late.steps[5:]), True).where == "step 7"
    ended = [replace(same, final={"model.w": mark, "model.bn": mark}, variants={"model.bn": []}) for mark in "ab"]
    at_the_end = check_bit_equality(*ended, True)
    assert at_the_end.verdict == "fail" and "first in the model.w at the end of step 9" in at_the_end.text
    assert (
        check_bit_equality(ended[0], replace(ended[0], final={"model.w": "a", "model.bn": "b"}), True).verdict == "pass"
    )
    assert check_bit_equality(same, early, False).verdict == "not comparable"
    assert check_bit_equality(replace(same, dropout=True), early, True).verdict == "not comparable"


def test_noise_is_measured_unasked_where_only_numbers_at_the_other_world_size_fail() -> None:
    late = Check("at 3 ranks", "at3.steps.loss", "fail", "", 1e-5, 2e-6, "measured")
    lost = Check("at 3 ranks", "at3.state.digests", "fail", "", 1, 0, "exact")
    assert Judgement([late], {}, None, False).unsure and not Judgement([late], {}, {"steps.loss": 1e-5}, False).unsure
    assert not Judgement([late, lost], {}, None, False).unsure and not Judgement([lost], {}, None, False).unsure


def test_the_step_is_that_of_the_trainer_or_of_the_optimizer() -> None:
    losses = [5 - k / 10 for k in range(9)]
    assert check("saved_step", run(losses)).verdict == "pass"
    for values, scalars, verdict in (
        ({}, {"optim.state.w.step": 5.0, "optim.state.b.step": 3.0}, "pass"),
        ({}, {}, "fail"), ({"trainer.step": 4}, {"optim.state.w.step": 5.0}, "fail"),
    ):  # fmt: skip
        assert check("saved_step", run(losses), got=run(losses, values=values, scalars=scalars)).verdict == verdict
    assert check("saved_step", run(losses), got=run(losses, failed="no")).verdict == "not comparable"
