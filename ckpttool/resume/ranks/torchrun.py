"""torch.distributed of the job that this process is a rank of, and the watch over a job that torchrun or srun started.

There no process sees all ranks, so they publish their beats in the store of the job, through a connection of its own.
Rank 0 looks at them, and rank 1 where rank 0 is silent. The one that finds a stall prints it, and every rank ends its
process: what waits in a collective cannot be interrupted, and NCCL's own watchdog does the same.

The command keeps its job and its watch (`lasting_job`) while rank 0 judges, so that all ranks end with the exit code of
its verdict, or learn that it hangs.

torchrun keeps one store for all attempts of --max-restarts, and with it what the ranks of an earlier attempt have left
there: addresses that nobody listens on, and the word that the job has stalled. So every attempt uses keys of its own
(`_keys_of_this_attempt`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, NoReturn

from ...errors import CkpttoolError, RankLost, UsageError, argument
from ...live.collectives import gather_objects
from ...printable import count_noun
from ..job.watchdog import Beat, Watch, beat_from_json, beat_to_json, choose_beat_period, enter_stage, publishing_beats
from ..request import Status
from ..trace.numerics import set_cuda_environment

__all__ = [
    "exit_process",
    "exit_together",
    "is_lost_peer_error",
    "is_rank_of_job",
    "joined_job",
    "lasting_job",
    "watched_job",
]

#: Seconds that collectives wait longer than the watch, which says more about what is wrong.
_LONGER = 60.0
#: How long ranks wait for rank 0, which judges and writes the reports. The watch ends them long before if that hangs.
_JUDGING = timedelta(days=1)


def is_rank_of_job() -> bool:
    """Tell whether this process is a rank of a job that torchrun or srun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def exit_process(status: int) -> NoReturn:
    """End this process at once, without Python's cleanup, in which threads of gloo sometimes abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _LastingJob:
    """The job of this process: whether it lasts, the group of its ranks that then ends it, and the watch over them."""

    wanted, group = False, None
    watch = ExitStack()


@contextmanager
def lasting_job() -> Iterator[None]:
    """While the block runs, keep the process group that `joined_job` makes until `exit_together`, or until the block
    fails.

    If it fails, the group is destroyed, so that ranks that wait for this one notice.
    """
    _LastingJob.wanted = True
    try:
        yield
    except BaseException:
        if _LastingJob.group is not None:
            import torch.distributed as dist

            dist.destroy_process_group()  # the ranks that wait for this one learn that it is gone
        raise
    finally:
        _LastingJob.watch.close()
        _LastingJob.wanted, _LastingJob.group = False, None


def exit_together(status: int) -> NoReturn:
    """End this process with the exit status of rank 0, as soon as that has one. A collective, in the block of
    `lasting_job`.

    A torchrun whose ranks have ended with 0 waits for those on other nodes, for 300 s if these end with another status.
    `status` is this rank's; only that of rank 0 counts.

    Raises:
        RankLost: rank 0 has ended.
    """
    import torch.distributed as dist

    sys.stdout.flush()
    # Python would see it only after rank 0 has ended; and torchrun, which sends it when the first rank ends, must not
    # change the status of a rank 0 that has written its reports
    signal.signal(signal.SIGTERM, signal.SIG_DFL if dist.get_rank() else signal.SIG_IGN)
    try:
        statuses = gather_objects(status, _LastingJob.group)
    except RuntimeError:  # gloo's errors are of this class
        raise RankLost(
            f"rank {dist.get_rank()} waited for the verdict of rank 0, but a rank ended before all had it. That rank's "
            "own message, or the table of torchrun, has the cause."
        ) from None
    exit_process(statuses[0])


@contextmanager
def joined_job(device: str, deterministic: bool, timeout: float, meeting: str | None = None) -> Iterator[None]:
    """While the block runs, keep this process in the process group of its job: NCCL on CUDA, gloo on CPU.

    If torch.distributed is initialised already, its group is used and kept.

    Args:
        device: "cuda" or "cpu".
        deterministic: whether to set environment variables for deterministic kernels.
        timeout: seconds that a rank may make no progress; collectives wait for 60 more.
        meeting: the file of a FileStore for ranks of one machine; None to use MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: MASTER_PORT is in use. CkpttoolError: this rank cannot reach rank 0.
    """
    enter_stage("joining the job")
    if deterministic:
        set_cuda_environment()
    import torch
    import torch.distributed as dist

    ours = not dist.is_initialized()
    if ours:
        if device == "cuda":
            torch.cuda.set_device(_choose_gpu(torch.cuda.device_count()))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        patience = timedelta(seconds=timeout + _LONGER)
        if meeting is not None:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = dist.FileStore(meeting, world)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
        else:
            try:
                store, rank, world = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
                store = _agree_on_store_prefix(store, rank, world, patience)
                dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)
            except dist.DistError as e:
                raise _make_join_error(e) from None
    try:
        yield
    except BaseException:
        if ours:
            dist.destroy_process_group()
        raise
    if ours and _LastingJob.wanted:
        _LastingJob.group = dist.new_group(backend="gloo", timeout=_JUDGING)
    elif ours:
        dist.destroy_process_group()


def _choose_gpu(count: int) -> int:
    """Choose the GPU of this rank: the number in LOCAL_RANK, else in srun's SLURM_LOCALID, else RANK modulo `count`.

    Args:
        count: number of GPUs that this rank can use.

    Raises:
        UsageError: there is no such GPU.
    """
    name = next((n for n in ("LOCAL_RANK", "SLURM_LOCALID") if os.environ.get(n)), None)
    if name is None:
        return int(os.environ["RANK"]) % count
    if (number := int(os.environ[name])) >= count and name == "LOCAL_RANK":
        raise UsageError(
            f"LOCAL_RANK is {number}, and this rank sees {count_noun(count, 'GPU')}. Start as many ranks on a machine "
            "as it has GPUs; where the scheduler gives each rank a GPU of its own, set LOCAL_RANK=0.",
            code="CKPT0219",
        )
    return number % count  # srun with a GPU for each task shows one


def _agree_on_store_prefix(store: Any, rank: int, world: int, patience: timedelta) -> Any:
    """Return a view of the store under a prefix that the ranks of this attempt share, and no earlier attempt has used.

    A collective. Each machine counts restarts for itself, so that count cannot be the prefix. Rank 0 answers every
    question until all ranks have received its answer, since some questions may come from an earlier attempt.

    Args:
        store: torch.distributed's store, which all ranks share.
        rank: number of this rank.
        world: number of ranks.
        patience: how long rank 0 waits for the other ranks.

    Raises:
        DistStoreError: a rank did not come in time.
    """
    import torch.distributed as dist

    mine = uuid.uuid4().hex
    chosen = mine
    if rank:
        store.set(f"ckpttool-asks-{rank}", mine)
        chosen = store.get(f"ckpttool-answer-{mine}").decode()
        store.add(f"ckpttool-heard-{chosen}", 1)
    elif world > 1:
        keys = [f"ckpttool-asks-{r}" for r in range(1, world)]
        store.wait(keys, patience)
        deadline, answered = time.monotonic() + patience.total_seconds(), set[bytes]()
        while (heard := store.add(f"ckpttool-heard-{mine}", 0)) < world - 1:
            for asked in {*store.multi_get(keys)} - answered:
                store.set(f"ckpttool-answer-{asked.decode()}", mine)
                answered.add(asked)
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"of {world} ranks, {world - 1 - heard} did not come")
            time.sleep(0.02)
    return dist.PrefixStore(chosen, store)  # type: ignore[attr-defined]


def _make_join_error(e: Exception) -> CkpttoolError:
    """Return the error that says why this rank could not join the job, and what to do; `e` is torch's error."""
    host, port, rank = (os.environ.get(k, "") for k in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    if "EADDRINUSE" in str(e):
        return UsageError(
            f"MASTER_PORT {port} is in use: another process of this machine listens on it, perhaps a job that has not "
            f"ended. `ss -ltnp 'sport = :{port}'` shows which. Set MASTER_PORT to a free port on every rank; or, for a "
            f"job on one machine, unset RANK and WORLD_SIZE and pass {argument('world_size')}, and ckpttool starts the "
            "ranks without a port.",
            code="CKPT0219",
        )
    said = " ".join(str(e).split())[:300]
    return CkpttoolError(
        f"rank {rank} could not join the job at MASTER_ADDR {host}, MASTER_PORT {port} ({said}). Check that rank 0 "
        "runs there, that this machine can reach it, and that every rank has the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE.",
        code="CKPT0103",
    )


def is_lost_peer_error(e: BaseException) -> bool:
    """Tell whether an error, as gloo and NCCL raise it, means that another rank is gone.

    NCCL raises one class for everything, also for an error of this rank's own GPU; its text names the other end.
    """
    import torch.distributed as dist

    if isinstance(e, dist.DistBackendError):
        return re.search(r"remote p|closed by|by peer|timeout|timed out", str(e), re.IGNORECASE) is not None
    return isinstance(e, dist.DistError) or "by peer" in str(e)


@contextmanager
def watched_job(timeout: float, status: Status) -> Iterator[None]:
    """While the block runs, watch the ranks of a job that torchrun or srun started; inside `lasting_job` until that
    ends.

    If the job stalls, its ranks print which one holds it up, and end with the exit code of `RankLost`. If the store of
    the job cannot be reached, nothing is watched, and `status` gets a line about it.

    Args:
        timeout: seconds that a rank may make no progress.
        status: called with a status line.
    """
    import torch.distributed as dist

    period = choose_beat_period(timeout)
    attempt = gather_objects(uuid.uuid4().hex)[0]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        patience = timedelta(seconds=max(5.0, 2 * period))
        store: Any = dist.TCPStore(host, port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    except dist.DistError as e:
        # the caller began the job by another way, or its store is gone
        status(
            f"nobody watches for silent ranks: no store at MASTER_ADDR {host}, MASTER_PORT {port} "
            f"({str(e).splitlines()[0]})"
        )
        yield
        return
    with ExitStack() as watch:
        observer = _BeatObserver(dist.PrefixStore(attempt, store), timeout)  # type: ignore[attr-defined]
        watch.enter_context(publishing_beats(dist.get_rank(), timeout, observer, 2))
        yield
        if _LastingJob.wanted:
            _LastingJob.watch = watch.pop_all()


class _BeatObserver:
    """Publishes the beats of this rank in the store, and looks at those of the others."""

    def __init__(self, store: Any, timeout: float) -> None:
        """Keep the arguments.

        Args:
            store: torch.distributed's, which all ranks share.
            timeout: seconds that a rank may make no progress.
        """
        import torch.distributed as dist

        self.store, self.timeout, self.period = store, timeout, choose_beat_period(timeout)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.watch, self.looked = Watch(dict.fromkeys(range(self.world), 0), timeout), time.monotonic()

    def __call__(self, beat: Beat) -> None:
        """Publish this rank's beat; on ranks 0 and 1, look for a stall, and end the process if there is one."""
        try:
            self.store.set(f"ckpttool-beat-{self.rank}", beat_to_json(beat))
            if self.store.check(["ckpttool-stalled"]):
                time.sleep(3 * self.period)  # the rank that prints it goes first, since torchrun then ends the rest
                os._exit(RankLost.exit_code)
            if self.rank > 1:
                return
            keys = [f"ckpttool-beat-{rank}" for rank in range(self.world)]
            there = [key for key in keys if self.store.check([key])]
            beats = {b.rank: b for b in (beat_from_json(text.decode()) for text in self.store.multi_get(there))}
        except RuntimeError as e:  # torch's errors of stores are of this class
            if beat.quiet >= self.timeout:
                where = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
                self._exit_with_error(
                    RankLost(
                        f"rank {self.rank} has made no progress for {beat.quiet:.0f} s in {beat.what!r}, and the store "
                        f"of the job at {where} does not answer: the process or the machine that serves it (rank 0, or "
                        f"torchrun) has stopped ({str(e).splitlines()[0]}).",
                        code="CKPT1301",
                    )
                )
            return
        now = time.monotonic()
        stall = self.watch.find_stall(beats, now - self.looked)
        self.looked = now
        if stall is None or (self.rank == 1 and 0 not in self.watch.frozen_ranks()):
            return
        self.store.set("ckpttool-stalled", "1")
        self._exit_with_error(stall.to_error())

    def _exit_with_error(self, e: RankLost) -> None:
        """Print an error and its notes, and end this process with the error's exit code."""
        print(f"error: rank {self.rank} of {self.world} says: {e}", file=sys.stderr)  # noqa: T201
        for note in getattr(e, "__notes__", ()):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201
        print(f"more: ckpttool explain {e.code}", file=sys.stderr)  # noqa: T201
        sys.stderr.flush()
        os._exit(e.exit_code)
