"""Which rank is named when a job does not go on, from beats alone; and folders where no lock says who is alive.

test_operations.py has both with real ranks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpttool.errors import RankLost
from ckpttool.resume.job import watchdog as watch
from ckpttool.resume.job.watchdog import Beat, Stall, Watch
from ckpttool.resume.ranks.torchrun import _agree_on_store_prefix
from ckpttool.resume.ranks.workspace import temporary_workspace

TIMEOUT = 100.0
PERIOD = watch.choose_beat_period(TIMEOUT)


def after(beats: dict[int, Beat], seconds: float, dead: tuple[int, ...] = ()) -> Stall | None:
    """What a watch says after ranks have been silent for so long; the threads of `dead` ones do not run."""
    guard = Watch(dict.fromkeys(beats, 0), TIMEOUT)
    found = None
    for k in range(int(seconds / PERIOD) + 1):
        now = {r: b if r in dead else replace(b, count=k, quiet=k * PERIOD) for r, b in beats.items()}
        found = found or guard.find_stall(now, PERIOD)
    return found


def of(rank: int, position: int = 5, waits: str = "all_reduce", where: str = "training.py:1 in train_step") -> Beat:
    return Beat(rank, 0, "elsewhere", 0, position, f"step {position}", 0.0, waits, [where])


def text(found: Stall | None) -> str:
    assert found is not None
    error = found.to_error()
    assert isinstance(error, RankLost) and error.exit_code == 13
    return str(error)


def test_nothing_is_said_before_the_timeout() -> None:
    assert after({0: of(0), 1: of(1, waits="")}, TIMEOUT - 2 * PERIOD) is None
    assert after({0: of(0), 1: of(1, waits="")}, TIMEOUT + PERIOD) is not None


def test_the_rank_whose_threads_do_not_run_is_named_wherever_the_others_wait() -> None:
    found = after({0: of(0), 1: of(1, position=6), 2: of(2)}, 2 * TIMEOUT, dead=(1,))
    assert found is not None and found.culprits == [1]
    assert "Of the others, rank 0 and 1 more are waiting in all_reduce" in text(found)


def test_of_ranks_that_all_run_the_one_that_is_behind_is_named_even_if_it_waits() -> None:
    found = after({0: of(0), 1: of(1, position=4, waits="barrier"), 2: of(2)}, 2 * TIMEOUT)
    assert found is not None and found.culprits == [1]
    assert "rank 1 has made no progress for 100 s in 'step 4'" in text(found)


def test_of_ranks_in_one_stage_the_one_that_is_in_no_collective_is_named() -> None:
    found = after(
        {r: of(r, waits="" if r == 2 else "all_reduce", where=f"user.py:{r} in f") for r in range(4)}, 2 * TIMEOUT
    )
    assert found is not None and found.culprits == [2]
    assert "user.py:2 in f" in text(found) and "rank 0 and 2 more are waiting" in text(found)


def test_ranks_that_wait_in_different_collectives_are_all_named() -> None:
    found = after({0: of(0), 1: of(1, waits="all_gather_object")}, 2 * TIMEOUT)
    assert found is not None and found.culprits == [0, 1]
    said = text(found)
    assert said.startswith("no rank has made progress for 100 s")
    assert "rank 0 is waiting in all_reduce" in said and "rank 1 is waiting in all_gather_object" in said


def test_a_rank_that_waits_for_one_that_moves_is_not_silent() -> None:
    guard = Watch({0: 0, 1: 0}, TIMEOUT)
    for k in range(200):  # rank 1 loads for a long time
        beats = {0: replace(of(0), count=k, quiet=k * PERIOD), 1: replace(of(1, waits=""), count=k)}
        assert guard.find_stall(beats, PERIOD) is None


def test_a_job_that_was_suspended_as_a_whole_goes_on() -> None:
    guard = Watch({0: 0, 1: 0}, TIMEOUT)
    beats = {0: of(0), 1: of(1)}
    guard.find_stall(beats, PERIOD)
    assert guard.find_stall(beats, 3600.0) is None, "an hour in which this process did not run either"


def test_a_rank_that_never_began_is_named() -> None:
    found = after({0: Beat(0), 1: of(1)}, 2 * TIMEOUT, dead=(0,))
    assert found is not None and found.culprits == [0]
    assert "rank 0 has made no progress" in text(found) and "'starting Python'" in text(found)


def test_a_process_of_this_machine_is_looked_at() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    os.waitpid(child.pid, os.WUNTRACED)
    try:
        beat = replace(of(1), pid=child.pid, host="")
        assert f"process {child.pid} is stopped (state T; `kill -CONT {child.pid}`" in text(
            after({0: of(0), 1: beat}, 2 * TIMEOUT, dead=(1,))
        )
    finally:
        child.kill()
        child.wait()
    assert f"process {child.pid} is dead" in text(after({0: of(0), 1: beat}, 2 * TIMEOUT, dead=(1,)))


@pytest.mark.slow
def test_beats_say_the_stage_the_stack_and_how_long_nothing_moved(tmp_path: Path) -> None:
    published: list[Beat] = []
    watch.write_stages_to(str(tmp_path / "stage"))
    with (tmp_path / "stack").open("a") as stacks, watch.publishing_beats(3, 1.0, published.append, stacks):
        watch.enter_stage("a stage")
        time.sleep(0.55)
        watch.report_progress()
        time.sleep(0.25)
        with (tmp_path / "much").open("wb") as f:
            f.write(bytes(2 << 20))
        time.sleep(0.25)
    assert watch.get_current_stage() == "a stage"
    assert [b.count for b in published] == list(range(1, len(published) + 1)) and len(published) >= 6
    last = published[-1]
    assert (last.rank, last.pid, last.what, last.waits) == (3, os.getpid(), "a stage", "")
    assert any("in test_beats_say" in frame for frame in last.stack)
    falls = sum(b.quiet < a.quiet for a, b in pairwise(published))
    assert falls >= 2, [b.quiet for b in published]
    assert watch.read_later_stage(Beat(3), str(tmp_path / "stage")).what == "a stage"
    assert watch.beat_from_json(watch.beat_to_json(last)) == last
    ends = time.monotonic() + 30  # `beating` waits two periods, here 0.2 s, less than a busy machine may take
    while "ckpttool-pulse" in {t.name for t in threading.enumerate()} and time.monotonic() < ends:
        time.sleep(0.01)
    assert "ckpttool-pulse" not in {t.name for t in threading.enumerate()}


def test_a_stack_says_which_collective_it_waits_in() -> None:
    def frames(*names: tuple[str, str]) -> Any:
        frame = None
        for file, function in reversed(names):
            code = type("Code", (), {"co_filename": file, "co_name": function})
            frame = type("Frame", (), {"f_code": code, "f_lineno": 7, "f_back": frame})
        return frame

    torch = "/site-packages/torch"
    gather = (f"{torch}/distributed/distributed_c10d.py", "all_gather")
    wrapper = (f"{torch}/distributed/c10d_logger.py", "wrapper")
    objects = (f"{torch}/distributed/distributed_c10d.py", "all_gather_object")
    fsdp = (f"{torch}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "unshard")
    user = ("/home/me/job.py", "loss")
    assert watch._inspect_stack(frames(gather, wrapper, objects, user))[0] == "all_gather_object"
    assert watch._inspect_stack(frames(gather, wrapper, fsdp, user, fsdp)) == (
        "all_gather",
        [
            "distributed_c10d.py:7 in all_gather",
            "c10d_logger.py:7 in wrapper",
            "_fsdp_param_group.py:7 in unshard",
            "job.py:7 in loss",
            "_fsdp_param_group.py:7 in unshard",
        ],
    )
    assert watch._inspect_stack(frames(user, fsdp))[0] == "", "its own code, called by FSDP"
    saving = (f"{torch}/distributed/checkpoint/filesystem.py", "write_data")
    assert watch._inspect_stack(frames(saving, user))[0] == "", "it writes files"


def test_on_a_file_system_without_locks_a_run_works_and_removes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with temporary_workspace(str(tmp_path)) as one:
        os.utime(one, (0, 0))
        with temporary_workspace(str(tmp_path)) as two:
            assert sorted(os.listdir(tmp_path)) == sorted(map(os.path.basename, (one, two)))
    assert not os.listdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("computes", [True, False])
def test_a_judge_that_uses_its_cpu_is_not_silent_and_a_rank_that_may_only_poll_is(computes: bool) -> None:
    seen: list[Beat] = []
    watch.enter_stage("judging the run", computes=computes)
    with watch.publishing_beats(0, 2.0, seen.append, 2):
        began = time.process_time()
        while time.process_time() - began < 0.9:
            pass
    watch.enter_stage("nothing")
    assert len(seen) > 3
    quiet = sum(beat.quiet > 0 for beat in seen)  # a machine with other work may starve a beat or two
    assert quiet < len(seen) / 2 if computes else quiet > len(seen) / 2


@pytest.mark.slow
def test_an_attempt_of_torchrun_meets_under_keys_that_no_earlier_one_has_used() -> None:
    store = dist.HashStore()
    patience = timedelta(seconds=20)
    store.set("ckpttool-asks-1", "of a rank that was killed before it had an answer")
    store.set("0/address", "where nobody listens")
    for world in (3, 1, 3):  # the ranks of the last attempt find all that the first has left
        found: dict[int, Any] = {}

        def join(rank: int, world: int = world, found: dict[int, Any] = found) -> None:
            time.sleep(0.1 * (rank == 1))
            found[rank] = _agree_on_store_prefix(store, rank, world, patience)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not found[0].check(["0/address"])
        found[0].set("0/address", "here")
        assert [found[rank].get("0/address") for rank in range(world)] == [b"here"] * world


def test_a_rank_that_does_not_come_is_counted() -> None:
    store = dist.HashStore()
    store.set("ckpttool-asks-1", "of an earlier attempt")
    with pytest.raises(dist.DistStoreError, match="of 2 ranks, 1 did not come"):
        _agree_on_store_prefix(store, 0, 2, timedelta(seconds=0.1))
