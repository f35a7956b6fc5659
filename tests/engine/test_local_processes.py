"""Worker processes on this machine: what becomes of requests when one dies, and of workers when their parent does."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_functions as functions
from programs import TESTS, alive, announced, script, wait_for

from ckpttool.engine.workers import local_processes
from ckpttool.engine.workers.executors import open_workers
from ckpttool.engine.workers.local_processes import LocalProcesses, WorkerDied
from ckpttool.errors import Corrupt


@pytest.fixture
def local() -> Iterator[LocalProcesses]:
    executor = LocalProcesses(4)
    yield executor
    executor.shutdown(cancel_futures=True)


@pytest.fixture(params=["spawned", "copied"])
def either(request: pytest.FixtureRequest, local: LocalProcesses) -> LocalProcesses:
    """Workers that begin by themselves, and copies of a template."""
    if request.param == "copied":
        local.prepare(functions.remember, "x")
        assert local._template is not None
    return local


def test_four_processes_work_at_the_same_time(tmp_path: Path) -> None:
    with open_workers("4") as workers:
        assert (workers.count, workers.remote, workers.name) == (4, False, "4 processes")
        pids = [workers.executor.submit(functions.meet, f"{tmp_path}:4") for _ in range(4)]
        found = {int(f.result()) for f in pids}
    assert len(found) == 4 and os.getpid() not in found
    assert alive(list(found)) == []


def test_processes_are_started_when_there_is_work_and_used_again(local: LocalProcesses) -> None:
    one = {local.submit(functions.pid, "").result() for _ in range(3)}
    assert len(one) <= 3
    assert len({local.submit(functions.pid, "").result() for _ in range(20)} | one) <= 4


def test_a_worker_imports_neither_torch_nor_numpy(local: LocalProcesses) -> None:
    found = set(local.submit(functions.modules, "").result().split())
    assert "worker_functions" in found  # which it finds as this process does, by sys.path
    assert not found & {"torch", "transformers", "numpy", "typer", "rich"}


def test_workers_have_the_path_of_the_parent_without_the_current_folder(
    local: LocalProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `python -c`, a prompt and a notebook have it, and as a program may add it."""
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for entry in ("", ".", str(tmp_path), str(tmp_path / "link"), str(other)):
        monkeypatch.syspath_prepend(entry)
    monkeypatch.chdir(tmp_path)
    found = local.submit(functions.path, "").result().split("\0")
    assert found[0] == str(other) and not {"", ".", str(tmp_path), str(tmp_path / "link")} & set(found)
    assert str(TESTS) in found


def test_workers_have_the_environment_and_the_folder_of_the_parent(
    local: LocalProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOMETHING", "x")
    monkeypatch.chdir(tmp_path)
    assert local.submit(functions.environment, "SOMETHING").result() == f"x {tmp_path}"


@pytest.mark.slow
def test_two_hundred_answers_of_a_megabyte(either: LocalProcesses) -> None:
    futures = [either.submit(functions.big, str(i % 10)) for i in range(200)]
    assert all(f.result() == str(i % 10) * 1_000_000 for i, f in enumerate(futures))
    assert either.submit(functions.long_names, "ab\udcff\0é" * 500_000).result() == "é\0\udcffba" * 500_000


@pytest.mark.slow
def test_a_killed_worker_fails_its_own_future_only(either: LocalProcesses, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    others = [either.submit(functions.sleep, "0.7") for _ in range(3)]
    killed = either.submit(functions.die_once, f"{tmp_path}/died")
    with pytest.raises(WorkerDied, match=r"was ended by SIGKILL \(out of memory\?\): last words$"):
        killed.result()
    assert either.submit(functions.die_once, f"{tmp_path}/died").result() not in {f.result() for f in others}
    assert len({f.result() for f in others}) == 3
    assert len({f.result() for f in [either.submit(functions.meet, f"{tmp_path}/meet:4") for _ in range(4)]}) == 4


def test_kill_9_from_outside_ends_one_future(either: LocalProcesses, tmp_path: Path) -> None:
    futures = [either.submit(functions.announce_and_sleep, str(tmp_path)) for _ in range(2)]
    pids = announced(tmp_path, 2)
    os.kill(int(pids[0]), signal.SIGKILL)
    done = wait_for(lambda: [f for f in futures if f.done()], 2)
    assert len(done) == 1
    with pytest.raises(WorkerDied, match=f"worker process {pids[0]} was ended by SIGKILL"):
        done[0].result()
    assert either.submit(functions.pid, "").result() not in pids


@pytest.mark.slow
def test_a_worker_that_died_without_work_is_replaced_silently(either: LocalProcesses) -> None:
    pids = {either.submit(functions.pid, "").result() for _ in range(30)}
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    assert wait_for(lambda: not alive([int(p) for p in pids]), 10)
    assert either.submit(functions.pid, "").result() not in pids


def test_what_a_worker_prints_does_not_disturb(either: LocalProcesses) -> None:
    assert [either.submit(functions.noise, str(i)).result() for i in range(20)] == [str(i) for i in range(20)]


@pytest.mark.slow
def test_garbage_in_the_socket_is_the_death_of_that_worker(either: LocalProcesses) -> None:
    other = either.submit(functions.sleep, "0.5")
    with pytest.raises(WorkerDied, match=r"exited with code 0 after it sent b'garbageg.* instead of a message"):
        either.submit(functions.garbage, "").result()
    assert other.result()


def test_errors_of_ours_keep_their_class_and_others_their_traceback(either: LocalProcesses) -> None:
    with pytest.raises(Corrupt, match=r"^x\.pt is damaged\.$"):
        either.submit(functions.corrupt, "x.pt").result()
    with pytest.raises(RuntimeError, match=r"^KeyError: 'x'") as e:
        either.submit(functions.fault, "x").result()
    assert "in fault" in e.value.__notes__[0]
    with pytest.raises(RuntimeError, match="No module named 'nonsense'"):
        functions_of_nobody = type(functions.pid)(functions.pid.__code__, {}, "pid")
        functions_of_nobody.__module__ = "nonsense"
        either.submit(functions_of_nobody, "").result()


def test_copies_have_what_the_template_prepared(local: LocalProcesses, tmp_path: Path) -> None:
    local.prepare(functions.remember, "index")
    assert len({f.result() for f in [local.submit(functions.meet, f"{tmp_path}:4") for _ in range(4)]}) == 4
    found = [f.result().split() for f in [local.submit(functions.recall, "") for _ in range(20)]]
    assert len({parent for _, parent, _ in found}) == 1 and {what for *_, what in found} == {"index"}
    assert os.getpid() not in {int(parent) for _, parent, _ in found}


@pytest.mark.slow
def test_what_is_prepared_again_takes_the_place_of_what_was_and_nothing_is_left(
    local: LocalProcesses, tmp_path: Path
) -> None:
    """As the read-back of a conversion prepares its own plan with the same workers."""
    seen: set[int] = set()
    for text in ("index", "another", "third"):
        (tmp_path / text).mkdir()
        local.prepare(functions.remember, text)
        assert "alone" not in [
            f.result() for f in [local.submit(functions.meet, f"{tmp_path}/{text}:4") for _ in range(4)]
        ]
        found = [f.result().split() for f in [local.submit(functions.recall, "") for _ in range(20)]]
        assert {what for *_, what in found} == {text}
        now = {int(pid) for row in found for pid in row[:2]}
        assert not seen & now and alive(list(seen)) == [], "workers that hold what was prepared before have ended"
        seen |= now
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local.shutdown()
        gc.collect()
    assert wait_for(lambda: not alive(list(seen)), 2)


@pytest.mark.slow
def test_a_template_that_is_killed_is_not_missed(local: LocalProcesses) -> None:
    local.prepare(functions.remember, "index")
    _, template, what = local.submit(functions.recall, "").result().split()
    assert what == "index"
    os.kill(int(template), signal.SIGKILL)
    assert wait_for(lambda: not alive([int(template)]), 2)
    found = []
    for _ in range(20):  # requests fail while the kernel has not ended all of its workers
        try:
            found.append(local.submit(functions.recall, "").result().split())
        except WorkerDied:
            pass
    assert found[-1][1:] == [str(os.getpid())]


@pytest.mark.slow
def test_a_template_that_is_stopped_is_ended_with_its_workers(
    local: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_processes, "_ANSWERS", 0.3)
    local.prepare(functions.remember, "index")
    first, template = map(int, local.submit(functions.recall, "").result().split()[:2])
    os.kill(template, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    assert wait_for(lambda: not alive([first]), 2)
    assert local.submit(functions.recall, "").result().split()[1:] == [str(os.getpid())]
    assert not alive([template])


@pytest.mark.parametrize(
    "fn", [functions.fault, functions.die_once, functions.leave_a_thread, functions.leave_a_connection]
)
def test_without_a_template_workers_begin_by_themselves(local: LocalProcesses, fn: Any, tmp_path: Path) -> None:
    local.prepare(fn, f"{tmp_path}/x")
    assert local._template is None
    assert local.submit(functions.recall, "").result().split()[1:] == [str(os.getpid())]


def test_only_functions_of_modules_with_one_text(local: LocalProcesses) -> None:
    for fn, arguments in ((lambda text: text, ("x",)), (functions.pid, ()), (functions.pid, ("a", "b"))):
        with pytest.raises(ValueError, match="only functions of modules, with one text"):
            local.submit(fn, *arguments)


def test_cancelling_kills_within_a_second_and_no_process_is_left(tmp_path: Path) -> None:
    executor = LocalProcesses(3)
    futures = [executor.submit(functions.announce_and_sleep, str(tmp_path)) for _ in range(8)]
    pids = [int(p) for p in announced(tmp_path, 3)]
    began = time.monotonic()
    executor.shutdown(cancel_futures=True)
    assert time.monotonic() - began < 1 and alive(pids) == []
    assert [f.cancelled() for f in futures] == [False] * 3 + [True] * 5
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(functions.pid, "")


@pytest.mark.slow
def test_shutdown_without_cancelling_waits_for_the_work() -> None:
    executor = LocalProcesses(2)
    futures = [executor.submit(functions.sleep, "0.2") for _ in range(4)]
    executor.shutdown()
    assert all(f.done() and f.result() for f in futures)


PARENT = """
import sys
import worker_functions as functions
from ckpttool.engine.workers.executors import open_workers
try:
    with open_workers(3) as workers:
        if sys.argv[2] == "copied":
            workers.prepare(functions.remember, "x")
            assert workers.executor._template is not None
        futures = [workers.executor.submit(functions.announce_and_sleep, sys.argv[1]) for _ in range(5)]
        futures[0].result()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how", ["spawned", "copied"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(signum: int, how: str, tmp_path: Path) -> None:
    parent = script(PARENT, tmp_path, how)
    pids = [int(p) for p in announced(tmp_path, 3)]
    assert alive(pids) == pids
    parent.send_signal(signum)
    parent.communicate()
    assert wait_for(lambda: not alive(pids), 2)


@pytest.mark.parametrize("how", ["spawned", "copied"])
def test_a_worker_without_the_help_of_the_kernel_ends_with_its_parent_too(how: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\nclass Without:\n    def __init__(self, name): pass\n    def prctl(self, *args): return -1\nctypes.CDLL = Without\n"
    )
    (tmp_path / "pids").mkdir()
    parent = script(PARENT, tmp_path / "pids", how, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS}"})
    pids = [int(p) for p in announced(tmp_path / "pids", 3)]
    parent.kill()
    parent.communicate()
    assert wait_for(lambda: not alive(pids), 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawned", "copied"])
def test_ctrl_c_prints_no_traceback_of_a_worker(how: str, tmp_path: Path) -> None:
    parent = script(PARENT, tmp_path, how)
    pids = [int(p) for p in announced(tmp_path, 3)]
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    began = time.monotonic()
    out, err = parent.communicate()
    assert (parent.returncode, out, err) == (130, "", "")
    assert time.monotonic() - began < 2 and alive(pids) == []
