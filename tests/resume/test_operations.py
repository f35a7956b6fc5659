"""What happens to a `resume-verify` on a node: ranks that fail, die, stop or hang; signals; kills. Nothing may be left.

Processes are real, and so are their jobs; ranks are forked from the command (live/forking_command.py), since their imports would take
most of the time. test_resume.py has the command as it is started by users.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import ckpttool_here
from peers import REPOSITORY
from ranks import ENVIRONMENT, LIVE, NURSERIES, one_at_a_time

from ckpttool.resume.ranks.workspace import temporary_workspace

SOURCE = REPOSITORY / "fixtures" / "awkward_w3" / "ckpt"
BATCHES = ["--global-batch", "4", "--micro-batch", "2"]

pytestmark = [pytest.mark.live, pytest.mark.slow]


def of(job: str) -> list[str]:
    """The words of a command on a job of operations_job.py."""
    return [
        "resume-verify",
        str(SOURCE),
        "--job",
        f"{LIVE / 'operations_job.py'}:{job}",
        *BATCHES,
    ]


def processes(folder: Path) -> list[int]:
    """The processes that work in a folder, stopped ones included."""
    found = set()
    # of each thread: they do not end at once, and share the open files
    for link in Path("/proc").glob("[0-9]*/task/[0-9]*/cwd"):
        try:
            if os.readlink(link) == str(folder):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return sorted(found)


def none_left(folder: Path) -> bool:
    """Whether all processes of a folder end, which the kernel may take a moment for."""
    deadline = time.monotonic() + 3
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not processes(folder)


@dataclass
class Command:
    """A command that runs in a folder of its own."""

    pid: int
    ended: Callable[[], int]
    folder: Path

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def until(self, text: str) -> None:
        """Wait until it has said something."""
        deadline = time.monotonic() + 60
        while text not in self.said():
            assert time.monotonic() < deadline and os.path.exists(f"/proc/{self.pid}"), self.said()
            time.sleep(0.02)

    def rank(self, rank: int) -> int:
        """The process of a rank, from what it has published."""
        (folder,) = self.left()
        return int(json.loads((self.folder / "tmp" / folder / "launch-0" / f"beat-{rank}.json").read_text())["pid"])

    def stop_rank(self, rank: int) -> None:
        os.kill(self.rank(rank), signal.SIGSTOP)

    def left(self) -> list[str]:
        """What is in the folder for temporary files."""
        return [name for name in os.listdir(self.folder / "tmp") if name.startswith("ckpttool")]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that begins a command with two ranks on a job."""
    with one_at_a_time():
        begun: list[Command] = []

        def run(job: str, *words: str) -> Command:
            (tmp_path / "tmp").mkdir()
            (tmp_path / "log").touch()
            pid, ended = NURSERIES.begin(
                [str(LIVE / "forking_command.py"), *of(job), "--world-size", "2", "--steps", "1000000", *words],
                tmp_path / "log", tmp_path, **ENVIRONMENT, TMPDIR=str(tmp_path / "tmp"),
            )  # fmt: skip
            begun.append(Command(pid, functools.cache(ended), tmp_path))
            return begun[0]

        yield run
        for command in begun:
            for pid in processes(tmp_path):
                os.kill(pid, signal.SIGKILL)
            command.ended()


OUTCOMES = {
    "killed": (13, "rank 1 was killed by signal 9 (SIGKILL) in 'probing'. The kernel's out-of-memory killer"),
    "fails": (1, "rank 1 failed: ValueError: the labels are of another vocabulary. The log is "),
    "leaves": (1, " failed: SystemExit: 3. The log is "),
    "crashes": (
        13,
        "rank 1 was killed by signal 6 (SIGABRT) in 'probing'. Native code crashed; its Python stack is in the log.",
    ),
    "ends": (
        1,
        "rank 1 ended with status 7 in 'step 1 of 1000000, micro-batch 1 of 1', without an error message. The log is ",
    ),
    "loader": (2, "DataLoader"),
}


@pytest.mark.parametrize("job", OUTCOMES)
@pytest.mark.filterwarnings("default")
def test_the_rank_that_failed_is_named_with_what_ended_it(job: str, begin: Callable[..., Command]) -> None:
    command = begin(job)
    code, text = OUTCOMES[job]
    assert command.ended() == code, command.said()
    error, more = command.said().splitlines()[-2:]
    assert more.startswith("more: ckpttool explain CKPT")
    assert text in error and "\\n" not in error, command.said()
    assert none_left(command.folder)
    kept = re.search(r"The log is (\S+)\.$", error)
    assert command.left() == ([Path(kept[1]).parent.name] if kept else [])
    if kept:
        assert "last seen" in Path(kept[1]).read_text()
        assert {"fails": "another vocabulary", "leaves": "sys.exit(3)", "crashes": "Fatal Python error: Aborted"}.get(
            job, "rank 1 in '"
        ) in Path(kept[1]).read_text()


def test_a_verdict_leaves_no_folder_since_the_report_has_everything_and_no_process_that_a_rank_has_started(
    begin: Callable[..., Command],
) -> None:
    command = begin("helped", "--steps", "1", "--min-mfu", "0.9", "--peak-tflops", "1000")
    assert command.ended() == 11, command.said()
    assert none_left(command.folder) and command.left() == []


SILENT = {
    "stopped": (
        "rank 1",
        "in 'step 1 of 1000000, micro-batch 1 of 1'",
        "is stopped (state T;",
        "rank 0 is waiting in ",
    ),
    "hung_in_native_code": ("rank 0", "in 'probing'", "hung in native code", "rank 1 is waiting in "),
    "hung_in_python": (
        "rank 1",
        "in 'step 1 of 1000000, reading its rows'",
        "operations_job.py",
        "rank 0 is waiting in ",
    ),
}


@pytest.mark.parametrize("job", SILENT)
def test_the_silent_rank_is_named_and_not_the_one_that_waits_for_it(job: str, begin: Callable[..., Command]) -> None:
    who, where, how, other = SILENT[job]
    command = begin(job, "--timeout", "3")
    assert command.ended() == 13, command.said()
    error = next(line for line in command.said().splitlines() if line.startswith("error:"))
    assert f"error: {who} has made no progress for " in error, error
    assert where in error and how in error and f"Of the others, {other}" in error, error
    assert none_left(command.folder)
    kept = re.search(r"The log is (\S+)\.$", error)
    assert kept is not None and command.left() == [Path(kept[1]).parent.name]
    log = Path(kept[1]).read_text()
    assert "rank 0 in " in log and "rank 1 in " in log
    assert {"hung_in_native_code": "in call\n", "hung_in_python": "in slow_row\n", "stopped": ""}[job] in log, log


@pytest.mark.parametrize(
    ("name", "state"), [("SIGINT", "healthy"), ("SIGINT", "stopped"), ("SIGTERM", "healthy"), ("SIGHUP", "stopped")]
)
def test_a_signal_ends_every_rank_also_a_stopped_one(name: str, state: str, begin: Callable[..., Command]) -> None:
    command = begin("healthy")
    command.until("step 2 of")
    if state == "stopped":
        command.stop_rank(1)
    began = time.monotonic()
    os.kill(command.pid, getattr(signal, name))
    assert command.ended() == 130, command.said()
    assert time.monotonic() - began < 5
    assert command.said().splitlines()[-2:] == [
        "error: stopped; nothing was written to the checkpoint.", "more: ckpttool explain CKPT9900"
    ]  # fmt: skip
    assert none_left(command.folder) and not command.left()


def test_a_killed_command_takes_its_ranks_along_and_the_next_one_removes_its_folder(
    begin: Callable[..., Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = begin("healthy")
    command.until("step 2 of")
    command.stop_rank(1)
    os.kill(command.pid, signal.SIGKILL)
    assert command.ended() == -signal.SIGKILL
    assert none_left(command.folder), "the healthy rank and the stopped one"
    (left,) = command.left()
    monkeypatch.setattr("tempfile.tempdir", str(command.folder / "tmp"))
    with temporary_workspace() as one:
        assert os.path.basename(one) in command.left() and left in command.left(), "a new folder may be one that begins"
        for folder in (left, os.path.basename(one)):
            os.utime(command.folder / "tmp" / folder, (0, 0))
        with temporary_workspace() as two:
            assert sorted(command.left()) == sorted(map(os.path.basename, (one, two)))
    assert command.left() == []


def test_in_a_job_that_others_started_the_ranks_watch_each_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with one_at_a_time():
        statuses = NURSERIES.launch(
            2, ["-m", "ckpttool", *of("stopped"), "--timeout", "3"], log, patience=1, **ENVIRONMENT, PYTHONPATH=str(REPOSITORY)
        )  # fmt: skip
    assert statuses == [13, -signal.SIGKILL], log.read_text()
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert error.startswith("error: rank 0 of 2 says: rank 1 has made no progress for ")
    assert "is stopped (state T;" in error and "Of the others, rank 0 is waiting in " in error


def test_a_rank_0_that_hangs_while_it_judges_is_named_and_the_next_attempt_of_torchrun_has_a_verdict(
    tmp_path: Path,
) -> None:
    store = NURSERIES.store(2)

    def attempt(job: str) -> tuple[list[int], str]:
        log = tmp_path / job
        words = ["-m", "ckpttool", *of(job), "--steps", "1", "--timeout", "3", "--no-round-trip"]
        statuses = NURSERIES.launch(2, words, log, store=store, **ENVIRONMENT, PYTHONPATH=str(REPOSITORY))
        return statuses, log.read_text()

    with one_at_a_time():
        (statuses, said), (again, verdict) = attempt("hung_judge"), attempt("healthy")
    assert statuses == [13, 13], said
    (error,) = [line for line in said.splitlines() if line.startswith("error: rank 0 of 2 says: ")]
    assert "rank 0 has made no progress for " in error, error
    assert "in 'judging the run': it is at operations_job.py" in error, error
    assert "rank 1 is waiting in all_gather_object ('waiting for the verdict of rank 0')" in error, error
    assert again == [0, 0], verdict


def test_a_report_that_cannot_be_written_ends_the_ranks_that_wait_for_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    words = [*of("healthy"), "--steps", "1", "--no-round-trip", "--report", str(tmp_path)]
    with one_at_a_time():
        statuses = NURSERIES.launch(
            2, ["-m", "ckpttool", *words], tmp_path / "log", **ENVIRONMENT, PYTHONPATH=str(REPOSITORY)
        )
    said = (tmp_path / "log").read_text()
    assert statuses == [2, 13], said
    assert "report.html: there is something that is not a regular file" in said
    assert "error: rank 1 waited for the verdict of rank 0, but a rank ended before all had it." in said


def test_the_ranks_of_a_killed_torchrun_end_also_a_stopped_one(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node=2", "-m", "ckpttool", *of("healthy"), "--steps", "1000000"]
    with one_at_a_time():
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **ENVIRONMENT},
        )  # fmt: skip
        with torchrun:
            assert torchrun.stderr is not None
            try:
                assert any("step 2 of" in line for line in torchrun.stderr)
                ranks = [pid for pid in processes(tmp_path) if pid != torchrun.pid]
                assert len(ranks) == 2
                os.kill(ranks[0], signal.SIGSTOP)
            finally:
                torchrun.kill()
            torchrun.stderr.read()
        assert none_left(tmp_path)


def test_a_busy_port_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as busy:
        port = str(busy.getsockname()[1])
        for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(key, value)
        done = ckpttool_here(*of("healthy"))
    assert done.returncode == 2
    assert f"MASTER_PORT {port} is in use" in done.stderr and f"sport = :{port}" in done.stderr
    assert "bug" not in done.stderr


def test_a_model_that_nothing_describes_is_told_before_anything_starts() -> None:
    began = time.monotonic()
    done = ckpttool_here("resume-verify", SOURCE)
    assert done.returncode == 2 and "Pass --config" in done.stderr and "--job" in done.stderr
    assert "starting" not in done.stderr and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--config", "/nowhere/model"], "--config /nowhere/model: no such folder."),
        (["--config", "{empty}"], "this folder has no config.json"),
        (  # with a job, the folder may have a tokenizer alone
            ["--job", f"{LIVE}/operations_job.py:healthy", "--config", "{empty}", "--data", "/nowhere.npy"],
            "--data /nowhere.npy: no such file",
        ),
        (["--job", f"{LIVE}/operations_job.py:healthy", "--junit", "{empty}"], "not a regular file"),
    ],
)
def test_what_is_not_there_is_told_before_anything_starts(words: list[str], why: str, tmp_path: Path) -> None:
    done = ckpttool_here("resume-verify", SOURCE, *(word.format(empty=tmp_path) for word in words))
    assert done.returncode == 2 and why in done.stderr and "starting" not in done.stderr


def test_a_job_that_ends_its_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os\n\ndef build():\n    os._exit(0)\n")
    done = ckpttool_here("resume-verify", SOURCE, "--job", f"{tmp_path}/job.py:build", "--world-size", 1)
    assert done.returncode == 1
    assert "rank 0 ended with status 0 in 'building the model', before the end of the run" in done.stderr


def test_a_config_that_transformers_cannot_build_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    done = ckpttool_here("resume-verify", SOURCE, "--config", tmp_path, "--world-size", 1)
    assert done.returncode == 2
    assert "transformers cannot build the model that it describes (ZeroDivisionError" in done.stderr
