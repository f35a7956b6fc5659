"""`ckpttool watch`: every fault of a save by a real FSDP2 job of three ranks; kills; saves that are written, overwritten,
deleted; commands, metrics, and that nothing of the run is touched.

python -m tests.torture.watched is the whole of it: 100 saves by three trainers while they run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from pages import program

from ckpttool.errors import Corrupt, Locked, UsageError
from ckpttool.watching import journal as journal_module
from ckpttool.watching import watch as watch_module
from ckpttool.watching.describe import describe_event
from ckpttool.watching.gentle import Pace
from ckpttool.watching.journal import open_journal
from ckpttool.watching.request import WatchRequest
from ckpttool.watching.watch import Watcher

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.torture.watched_faults import FAULTS, change_in_dcp, flip, put_nan

JOBS = Path(__file__).parents[1] / "torture" / "watched_jobs.py"


class Job:
    """A loop that trains a little and saves with DCP, in one process: tied weights in bf16, fp32 masters, AdamW."""

    def __init__(self, run: Path) -> None:
        torch.manual_seed(0)
        self.run, self.step = run, 0
        self.schedules: Container[int] = range(1000)  # steps at which the scheduler advances
        self.model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(131, 8), "up": torch.nn.Linear(8, 13)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))

    def train(self) -> None:
        self.step += 1
        x = self.model["up"](self.model["embed"](torch.arange(131)))
        (x.square().sum() + self.model["embed"].weight.sum()).backward()
        self.optimizer.step()
        if self.step in self.schedules:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self, folder: str | None = None) -> Path:
        self.train()
        masters = {n: w.detach().clone() for n, w in self.model.state_dict().items()}
        masters["head.weight"] = masters["embed.weight"].clone()
        state = {
            "model": {n: w.to(torch.bfloat16) for n, w in masters.items()}, "master": masters, "step": self.step,
            "scheduler": self.scheduler.state_dict(),
            "optim": {
                "state": {n: self.optimizer.state[p] for n, p in self.model.named_parameters()},
                "param_groups": [{**self.optimizer.param_groups[0], "params": [n for n, _ in self.model.named_parameters()]}],
            },
        }  # fmt: skip
        path = self.run / (folder or f"step-{self.step}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is one process
            dcp.save(state, checkpoint_id=path, no_dist=True)
        return path


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "run").mkdir()
    return Job(tmp_path / "run")


def look(run: Path, times: int = 1, **options: Any) -> list[dict[str, Any]]:
    """What a watcher says that is started, looks and ends."""
    request = WatchRequest(**{"settle": 0, "once": True, **options})
    said: list[dict[str, Any]] = []
    with open_journal(request.folder_of(str(run)), str(run)) as journal:
        watcher = Watcher(str(run), request, journal, said.append)
        for _ in range(times):
            watcher.look()
    return said


def words(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(e["name"], e["event"]) for e in events]


def link(run: Path) -> str | None:
    """The save that latest.verified leads to."""
    at = Path(f"{run}.ckpttool-watch") / "latest.verified"
    return at.resolve().name if at.is_symlink() else None


def tree(folder: Path) -> dict[str, Any]:
    """All that a write to a folder would change."""
    files = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}
    stats = {p: p.lstat() for p in [folder, *folder.rglob("*")]}
    return {
        str(p): (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_mode, files.get(p)) for p, s in stats.items()
    }


# ------------------------------------------------------------------------------------------------------ faults


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three saves of an FSDP2 job at three ranks."""
    run = tmp_path_factory.mktemp("fsdp2") / "run"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(JOBS), "fsdp2", run, "3", "0"],
        check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return run


@pytest.mark.live
def test_every_fault_of_a_save_is_named_and_nothing_of_the_run_is_touched(fsdp2: Path, tmp_path: Path) -> None:
    run, state = tmp_path / "run", tmp_path / "run.ckpttool-watch"
    for step in (1, 2):
        shutil.copytree(fsdp2 / f"step-{step}", run / f"step-{step}")
    good = look(run)
    assert words(good) == [("step-1", "verified"), ("step-2", "verified")] and not [
        f for e in good for f in e["findings"]
    ]
    shutil.copytree(state, tmp_path / "state", symlinks=True)
    for fault in FAULTS["fsdp2"]:
        shutil.copytree(fsdp2 / "step-3", run / "step-3")
        hit = fault.do(run / "step-3", run / "step-2")
        before = tree(run)
        (bad,) = look(run)
        assert bad["event"] == "failed", fault
        named = [f for f in bad["findings"] if f["kind"] in fault.kinds]
        assert named, (fault, bad)
        said = " ".join(f"{f['file']} {f['tensors']} {f['text']}" for f in named)
        assert any(word.removeprefix("master.") in said for word in hit.split()), (fault, said)
        assert link(run) == "step-2" and tree(run) == before
        shutil.rmtree(run / "step-3")
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "state", state, symlinks=True)
    shutil.copytree(fsdp2 / "step-3", run / "step-3")
    assert [(e["event"], e["findings"]) for e in look(run)] == [("verified", [])]


def test_a_flipped_exponent_of_safetensors_shows_and_a_low_bit_cannot(tmp_path: Path) -> None:
    """The files have no checksum: what a weight should be, only its norm tells. docs/how-to/watch.md says so."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(32, 16), "norm.weight": torch.ones(16)}
    for step in (1, 2, 3, 4):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        weights = {n: w + 1e-3 for n, w in weights.items()}
        save_file(weights, tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")
    for step, bit in ((2, 0), (3, 30)):
        path = tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors"
        flip(path, path.stat().st_size - 4 * 100 + bit // 8, bit % 8)
    events = look(tmp_path / "run")
    assert [e["event"] for e in events] == ["verified", "verified", "failed", "verified"]
    assert events[2]["findings"][0]["kind"] in ("norm-jump", "nan")


def test_the_newest_proved_save_is_read_again_and_compared_with_its_digest(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives other bytes, with right CRC32s, under the times of the file, cannot be had; another digest in the
    journal is as good."""
    first, second = job.save(), job.save()
    assert words(look(job.run)) == [("step-1", "verified"), ("step-2", "verified")]
    now = time.time() + 7200
    monkeypatch.setattr(watch_module.time, "time", lambda: now)

    def recheck() -> tuple[list[dict[str, Any]], int]:
        events: list[dict[str, Any]] = []
        request = WatchRequest(settle=0, recheck=1)
        with open_journal(request.folder_of(str(job.run)), str(job.run)) as journal:
            watcher = Watcher(str(job.run), request, journal, events.append)
            watcher._rechecked = 0.0
            watcher.look()
            watcher.look()
            return events, watcher.exit_code()

    events, code = recheck()
    assert words(events) == [("step-2", "rechecked")] and code == 0 and link(job.run) == second.name
    path = Path(f"{job.run}.ckpttool-watch") / "journal.jsonl"
    path.write_text(path.read_text().replace(json.loads(path.read_text().splitlines()[2])["digest"]["all"], "0" * 64))
    events, code = recheck()
    assert words(events) == [("step-2", "failed")] and code == 5 and link(job.run) == first.name
    assert [f["kind"] for f in events[0]["findings"]] == ["differs"]


# ---------------------------------------------------------------------------------------------- saves that change


def test_a_save_that_is_being_written_is_not_damaged(job: Job) -> None:
    job.save()
    path = job.save()
    (path / ".metadata").rename(job.run.parent / "metadata")
    assert words(look(job.run, 3)) == [("step-1", "verified")]
    os.truncate(path / "__0_0.distcp", 1000)
    assert look(job.run, 2) == [] and link(job.run) == "step-1"
    assert words(look(job.run, stall=0)) == [("step-2", "unfinished")] and look(job.run, stall=0) == []
    job.save()
    assert words(look(job.run)) == [("step-3", "verified")]
    shutil.rmtree(path)
    job.step = 1
    job.save()
    assert words(look(job.run)) == [("step-2", "verified")] and link(job.run) == "step-3"


def test_what_was_not_read_is_said_with_the_verdict(job: Job) -> None:
    torch.save(torch.get_rng_state(), job.save() / "rng_state_0.pth")
    (event,) = look(job.run)
    assert event["not_read"] == ["rng_state_0.pth"]
    assert describe_event(event)[1:] == ["  warning: not read, so not proved: rng_state_0.pth"]


def test_files_that_look_old_are_doubted_before_damage_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a file server may be behind: what is being written there looks as if it had rested."""
    path = job.save()
    whole = (path / "__0_0.distcp").read_bytes()
    os.truncate(path / "__0_0.distcp", 1000)
    now = time.time()
    monkeypatch.setattr(watch_module.time, "time", lambda: now + 3600)
    said: list[dict[str, Any]] = []
    request = WatchRequest(settle=30)
    with open_journal(request.folder_of(str(job.run)), str(job.run)) as journal:
        watcher = Watcher(str(job.run), request, journal, said.append)
        watcher.look()
        assert said == [] and len(watcher.waiting) == 1
        (path / "__0_0.distcp").write_bytes(whole)
        now += 100
        watcher.look()
    assert words(said) == [("step-1", "verified")]


def test_a_save_is_read_again_when_it_is_overwritten_and_its_deletion_is_said(job: Job) -> None:
    job.save("last")
    job.save()
    assert words(look(job.run)) == [("last", "verified"), ("step-2", "verified")]
    shutil.rmtree(job.run / "last")
    job.save("last")
    again = look(job.run)
    assert words(again) == [("last", "changed"), ("last", "verified")] and again[1]["previous"]["name"] == "last"
    shutil.rmtree(job.run / "step-2")
    assert words(look(job.run)) == [("step-2", "deleted")] and link(job.run) == "last"
    assert look(job.run, 2) == []


def test_a_save_that_goes_while_it_is_read_is_no_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        job.save()
    real = watch_module.examine_save

    def examine(save: Any, *more: Any) -> Any:
        if save.name == "step-1":
            shutil.rmtree(save.path)
        return real(save, *more)

    monkeypatch.setattr(watch_module, "examine_save", examine)
    events = look(job.run, 2)
    assert words(events) == [("step-2", "verified"), ("step-1", "deleted")] and events[1]["was"] == "not read"


def test_what_was_equal_and_moved_together_is_a_tie_from_the_third_save_on(job: Job) -> None:
    for _ in range(2):
        job.save()
    assert {e["event"] for e in look(job.run)} == {"verified"}
    change = change_in_dcp(put_nan, "optim.state.up.weight.exp_avg")
    change(job.save(), job.run)
    assert [f["kind"] for f in look(job.run)[0]["findings"]] == ["nan"]
    job.save()
    (event,) = look(job.run)
    assert event["event"] == "verified" and event["previous"]["name"] == "step-2"  # the last that was good

    def shift(t: torch.Tensor) -> None:
        t += 1.0

    change_in_dcp(shift, "master.head.weight", "model.head.weight")(job.save(), job.run)
    (event,) = look(job.run)
    assert {f["kind"] for f in event["findings"]} == {"diverged-tie"}
    (event,) = look(job.run, accept="step-5")
    assert event["event"] == "verified" and event["accepted"] and link(job.run) == "step-5"


def test_a_scheduler_of_epochs_may_stand_still_and_one_of_steps_may_not(job: Job) -> None:
    job.schedules = (4, 8)
    for _ in range(4):
        job.train()
        job.save()
    events = look(job.run)
    assert [e["event"] for e in events] == ["verified"] * 4 and not [f for e in events for f in e["findings"]]
    job.schedules = (9, 10)
    for _ in range(2):
        job.train()
        job.save()
    good, bad = look(job.run)
    assert good["event"] == "verified" and bad["event"] == "failed"
    assert [(f["kind"], "scheduler" in f["text"]) for f in bad["findings"]] == [("not-advanced", True)]


# ------------------------------------------------------------------------------------------------- kills and locks


class Killed(BaseException):
    """The process ends here, and nothing of it runs any more."""


def test_wherever_it_is_killed_it_goes_on_and_says_nothing_twice(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before and after each call that changes its folder, also in the middle of a line of the journal."""
    job.save()
    put = change_in_dcp(put_nan, "optim.state.up.weight.exp_avg")
    put(job.save(), job.run)
    state = Path(f"{job.run}.ckpttool-watch")
    real, count, stop = os, 0, 0

    class Dying:
        """The module os, of which one call is the last."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(real, name)
            return (
                self.wrap(found) if name in ("write", "fsync", "replace", "symlink", "unlink", "ftruncate") else found
            )

        def wrap(self, found: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal count
                count += 1
                if count == stop and found is real.write:
                    found(args[0], args[1][: len(args[1]) // 2])
                if count >= stop:
                    raise Killed
                return found(*args, **more)

            return call

    kills = 0
    for stop in range(1, 200):
        shutil.rmtree(state, ignore_errors=True)
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "os", Dying())
            patch.setattr(journal_module, "sync_folder", Dying().wrap(journal_module.sync_folder))
            try:
                look(job.run)
                break
            except Killed:
                kills += 1
        lines = [json.loads(line) for line in _whole_lines(state / "journal.jsonl")]
        proved = {e["name"] for e in lines if e["event"] == "verified"}
        assert link(job.run) in {None, *proved}, stop
        look(job.run)
        lines = [json.loads(line) for line in _whole_lines(state / "journal.jsonl")]
        verdicts = [(e["name"], e["event"]) for e in lines if e["event"] != "begun"]
        assert sorted(verdicts) == [("step-1", "verified"), ("step-2", "failed")], stop
        assert link(job.run) == "step-1"
        assert (state / "journal.jsonl").read_bytes().endswith(b"\n")
    assert kills >= 12


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")] if path.exists() else []


@pytest.mark.slow
def test_kill_9_at_any_time(job: Job, tmp_path: Path) -> None:
    for _ in range(6):
        job.save()
    state = Path(f"{job.run}.ckpttool-watch")
    command = [sys.executable, "-m", "ckpttool", "watch", job.run, "--settle", "0", "--poll", "0.05", "-q"]
    for number in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.45 + 0.06 * number)
        process.kill()
        process.wait()
        proved = [json.loads(line) for line in _whole_lines(state / "journal.jsonl")]
        assert link(job.run) in {None, *(e["name"] for e in proved if e["event"] == "verified")}
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in _whole_lines(state / "journal.jsonl")]
    assert sorted(e["name"] for e in lines if e["event"] == "verified") == [f"step-{k}" for k in range(1, 7)], done
    assert link(job.run) == "step-6"


def test_one_watcher_at_a_time_and_for_one_run(job: Job, tmp_path: Path) -> None:
    job.save()
    folder = str(tmp_path / "state")
    with open_journal(folder, str(job.run)), pytest.raises(Locked, match="process"), open_journal(folder, str(job.run)):
        pass
    (tmp_path / "other").mkdir()
    with pytest.raises(UsageError, match="is of the run"), open_journal(folder, str(tmp_path / "other")):
        pass
    (tmp_path / "state" / "journal.jsonl").write_text("nonsense\n")
    with pytest.raises(Corrupt, match="line 1 is no event"), open_journal(folder, str(job.run)):
        pass
    for run in (tmp_path / "run" / "step-1" / ".metadata", "s3://bucket/run"):
        with pytest.raises(UsageError):
            WatchRequest().folder_of(str(run))
    with pytest.raises(UsageError, match="run's own folder"):
        WatchRequest(state=str(job.run)).folder_of(str(job.run))


# ------------------------------------------------------------------------------------------------- the command


def test_once_has_the_exit_codes_and_lines_of_json(job: Job) -> None:
    done = ckpttool_here("watch", job.run, "--once", "--settle", "0")
    assert (done.returncode, done.stdout) == (0, "")
    job.save()
    job.save()
    done = ckpttool_here("watch", job.run, "--once", "--settle", "0", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and words(events) == [("step-1", "verified"), ("step-2", "verified")]
    digest = json.loads(ckpttool_here("digest", job.run / "step-2", "--json").stdout)["digest"]
    assert events[1]["digest"] == digest and events[1]["previous"]["digest"] == events[0]["digest"]["all"]
    os.truncate(job.save() / "__0_0.distcp", 3000)
    for _ in range(2):
        done = ckpttool_here("watch", job.run, "--once", "--settle", "0", "-q")
        assert done.returncode == 4
    assert ckpttool_here("watch", job.run, "--every", "3").returncode == 2
    assert ckpttool_here("watch", job.run.parent / "nothing", "--once").returncode == 3


def test_commands_run_once_for_each_event_also_after_a_kill(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save()
    put = change_in_dcp(put_nan, "optim.state.up.weight.exp_avg")
    put(job.save(), job.run)
    script = tmp_path / "note.py"
    script.write_text(
        "import json, os, sys\nprint(*sys.argv[2:], json.loads(os.environ['CKPTTOOL_EVENT'])['event'], file=open(sys.argv[1], 'a'))\n"
    )
    out = tmp_path / "noted"
    options = {
        "then": f"{sys.executable} {script} {out} then {{step}} '{{path}}' $HOME",
        "on_failure": f"{sys.executable} {script} {out} bad {{name}}",
    }
    real = watch_module.run_command
    monkeypatch.setattr(watch_module, "run_command", lambda *a: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        look(job.run, **options)
    monkeypatch.setattr(watch_module, "run_command", real)
    for _ in range(2):
        look(job.run, **options)
    assert sorted(out.read_text().splitlines()) == ["bad step-2 failed", f"then 1 {job.run}/step-1 $HOME verified"]
    job.save()
    assert words(look(job.run, every=2, **options)) == [("step-3", "verified")]
    job.save()
    events = look(job.run, then="no-such-program {digest}", every=2)
    assert [e["event"] for e in events] == ["verified", "command"] and events[1]["status"] == 127
    assert events[1]["command"][1] == events[0]["digest"]["all"]


def test_metrics_are_served_and_written(job: Job, tmp_path: Path) -> None:
    job.save()
    os.truncate(job.save() / "__0_0.distcp", 3000)
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpttool", "watch", job.run, "--settle", "0", "--poll", "0.1", "--job-metrics", "0", "--metrics", tmp_path / "w.prom"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        port = [process.stderr.readline() for _ in range(2)][1].rpartition(":")[2].partition("/")[0]
        assert "step-1: verified" in process.stdout.readline() and "FAILED" in process.stdout.readline()
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=10)
    finally:
        process.terminate()
    assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()
    for line in (
        'ckpttool_watch_saves{run="run",state="verified"} 1', 'ckpttool_watch_saves{run="run",state="failed"} 1',
        'ckpttool_watch_findings{run="run",kind="cut"} 1', 'ckpttool_watch_verified_step{run="run"} 1', 'ckpttool_watch_newest_step{run="run"} 2',
    ):  # fmt: skip
        assert line in text.splitlines(), text
    names = {
        line.split("{")[0].removeprefix("ckpttool_watch_")
        for line in (tmp_path / "w.prom").read_text().splitlines()
        if line[0] != "#"
    }
    from ckpttool.watching.metrics import METRICS

    assert names <= METRICS.keys() and METRICS.keys() - names == {"waiting_since_timestamp_seconds"}


def test_a_rate_is_kept_and_the_oldest_are_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    pace, slept = Pace(1000), []
    monkeypatch.setattr(time, "sleep", slept.append)
    pace.start(None)
    pace("read", 500, 4000)
    pace("read", 4000, 4000)
    pace("compare", 1000, 1000)
    assert pace.read_bytes == 5000 and [round(s, 1) for s in slept] == [0.5, 4.0, 5.0]
    for _ in range(3):
        job.save()
    assert words(look(job.run, last=1)) == [("step-1", "skipped"), ("step-2", "skipped"), ("step-3", "verified")]
    assert len(list((Path(f"{job.run}.ckpttool-watch") / "records").iterdir())) == 1


def test_few_records_are_kept(job: Job) -> None:
    for _ in range(journal_module._KEPT + 1):
        job.save()
    look(job.run)
    assert len(list((Path(f"{job.run}.ckpttool-watch") / "records").iterdir())) == journal_module._KEPT


# --------------------------------------------------------------------------------------------------------- the page

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "watch.md"
ALERTS = Path(watch_module.__file__).with_name("alerts.yml")


def test_every_command_of_the_page_runs_and_prints_what_it_shows(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archive").mkdir()
    (tmp_path / "runs").mkdir()
    job.run = tmp_path / "runs" / "llama"
    for step in (100, 200, 300):
        path = job.save(f"step-{step}")
    change_in_dcp(put_nan, "optim.state.up.weight.exp_avg")(path, path)
    for path in job.run.rglob("*"):
        os.utime(path, (time.time() - 60,) * 2)
    now = time.time() + 60  # the times of inodes cannot be set
    monkeypatch.setattr(watch_module.time, "time", lambda: now)
    monkeypatch.setattr(watch_module.Watcher, "_must_read_again", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    printed = [ckpttool_here(*shlex.split(line)[1:]) for line in lines]
    assert [done.returncode for done in printed] == [4, 0, 4, 4, 4], [done.stderr for done in printed]

    def plain(said: str) -> list[str]:
        return re.sub(r"blake3:\w+(\.\.\.)?|[\d.]+ s\b", "#", said).splitlines()

    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for line, said in zip(plain(shown), plain(printed[0].stdout), strict=True):
        assert said == line or (line.endswith("...") and said.startswith(line[:-3])), (line, said)
    assert sorted(p.name for p in (tmp_path / "archive").iterdir() if p.suffix == ".zst") == [
        "step-100.tar.zst",
        "step-200.tar.zst",
    ]


def test_the_page_and_the_alerts_are_about_what_there_is() -> None:
    from ckpttool.engine.doctor.findings import KINDS as OF_DOCTOR
    from ckpttool.watching.health import KINDS
    from ckpttool.watching.metrics import METRICS

    page, rules = PAGE.read_text(), ALERTS.read_text()
    assert {*KINDS} <= {*re.findall(r"`([a-z-]+)`", page)}
    rows = re.findall(r"^\| [^|]*\| [^|]*\| ((?:`[a-z-]+`(?:, )?)+) \|$", page, re.MULTILINE)
    assert {kind for row in rows for kind in re.findall(r"`([a-z-]+)`", row)} <= {*KINDS, *OF_DOCTOR}
    assert set(re.findall(r"^\| `ckpttool_watch_(\w+)`", page, re.MULTILINE)) == METRICS.keys()
    assert set(re.findall(r"ckpttool_watch_(\w+)", rules)) <= METRICS.keys()
    alerts = dict(re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", rules, re.DOTALL))
    assert dict(re.findall(r"^\| `(Checkpoint\w+)` \| (\w+) \|", page, re.MULTILINE)) == alerts and len(alerts) == 5


@pytest.mark.slow
def test_promtool_accepts_the_alerts_and_they_fire() -> None:
    tests = Path(__file__).with_name("alerts_test.yml")
    for what in (["check", "rules", "--lint-fatal", ALERTS], ["test", "rules", tests]):
        done = subprocess.run([program("promtool"), *what], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for alert in re.findall(r"- alert: (\w+)", ALERTS.read_text()):
        asked = re.findall(rf'alertname="{alert}",alertstate="firing"}}\n.*\n\s+exp_samples:(.*)', tests.read_text())
        assert "" in asked and " []" in asked, alert  # it fires, and it does not
