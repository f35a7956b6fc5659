"""`Workers`, and those on other machines: of a dask scheduler, of a Ray cluster, or the ranks of MPI.

What dask, Ray and MPI use between their processes is pickle, so a cluster is trusted like the account that runs it; no
pickle comes from a checkpoint. Scheduling, restarts and transport are the engine's own.

Under `mpiexec` each rank runs the command; `get_mpi_executor` turns all ranks but 0 into workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO, TypeVar, cast

from ..._version import __version__
from ...errors import RemoteError, UsageError, argument
from ...extras import explain_missing_package, require_packages
from ...printable import list_first
from .local_processes import LocalProcesses

__all__ = [
    "FrozenWorkers",
    "SharedExecutor",
    "Workers",
    "ask_worker",
    "check_version",
    "dask_workers",
    "end_mpi_ranks",
    "get_mpi_executor",
    "get_worker_version",
    "mpi_workers",
    "ray_workers",
]

T = TypeVar("T")

#: Seconds to wait for a scheduler, and then for a first worker: those of a Slurm job do not start at once.
WAIT = 60.0

#: Seconds that each worker has to say which version it has, and an engine to end.
PROMPT = 10.0

#: Seconds that a cluster may be without a worker before a run gives up.
GONE = 300.0


class FrozenWorkers(UserWarning):
    """Workers that do not answer; others do their work if there are any."""


def call_within(seconds: float, fn: Callable[[], T]) -> T:
    """Call `fn` in a thread of its own and return what it returns. If it takes longer than `seconds`, the thread is
    left running.

    Raises:
        TimeoutError: it takes longer.
        Exception: what `fn` raises; its own TimeoutError becomes a RuntimeError.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(fn())
        except TimeoutError as e:
            future.set_exception(RuntimeError(f"TimeoutError: {e}"))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=call, daemon=True, name="ckpttool-ask").start()
    return future.result(seconds)


@dataclass
class Workers:
    """The workers of one run.

    Args:
        executor: `submit(fn, text)` gives a future of a text; `fn` is a function of a module that workers can import.
        count: how many requests they work on at the same time, at the beginning; None if the engine does not say.
        remote: whether they may be on other machines, where local paths, device numbers and inodes can differ.
        name: in messages and progress.
        recount: asks the engine again, where workers come and go; 0 for none.
    """

    executor: Executor
    count: int | None
    remote: bool
    name: str
    recount: Callable[[], int | None] | None = None
    # since when the engine could not be asked, or had no workers, if that is so now
    _failing: float | None = field(default=None, init=False)
    _empty: float | None = field(default=None, init=False)

    def prepare(self, fn: Callable[[str], str], text: str) -> None:
        """Have one process call `fn(text)`, and start all workers as copies of that process, so that the work of the
        call is done once. Do nothing unless the workers are several processes of this machine.

        Args:
            fn: a function of a module; what it returns is ignored.
            text: its argument.
        """
        if isinstance(self.executor, LocalProcesses) and (self.count or 0) > 1:
            self.executor.prepare(fn, text)

    def submit(self, fn: Callable[[str], str], text: str, others: Collection[Future[str]] = ()) -> Future[str]:
        """Have a worker call `fn(text)`, and return the future of what `fn` returns.

        Args:
            fn: a function of a module that workers can import.
            text: the request, its argument.
            others: futures of earlier submissions of the same request. It goes to a worker that works on none of
                them, if the engine can choose the worker (dask can).
        """
        return _submit_to_another(self.executor, fn, text, others)

    def count_now(self) -> int | None:
        """Ask the engine how many requests the workers can work on at the same time now; None if the engine does not
        say, or has no worker at the moment.

        Raises:
            RemoteError: there have been no workers for `GONE` seconds, or the engine has not answered for `WAIT`
                seconds.
        """
        if self.recount is None:
            return self.count
        now, why = time.monotonic(), "stopped, or the connection to it is lost"
        try:
            found = call_within(WAIT, self.recount)
        except Exception as e:
            if not isinstance(e, TimeoutError):  # it may be started again, and then it answers
                self._failing = self._failing or now
                if now - self._failing < WAIT:
                    return self.count
                why = f"gone ({type(e).__name__}: {str(e)[:300]})"
            raise RemoteError(
                f"{self.name} has not answered for {WAIT:.0f} seconds: its scheduler is {why}. When it answers again, "
                "run the same command again: what is done is kept.",
                code="CKPT0907",
            ) from None
        self._failing, self._empty = None, None if found else self._empty or now
        if self._empty is not None and now - self._empty > GONE:
            raise RemoteError(
                f"{self.name} has had no worker for {GONE:.0f} seconds. Start workers, then run the same command "
                "again: what is done is kept.",
                code="CKPT0907",
            )
        return found or None


class SharedExecutor(Executor):
    """An Executor that others may use, too: shutdown cancels what was submitted here, and leaves it open.

    `said` is how the user named it, for messages.
    """

    def __init__(self, inner: Executor, said: str) -> None:
        self._inner, self._said = inner, said
        self._futures: weakref.WeakSet[Future[object]] = weakref.WeakSet()

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        """Have the shared Executor call `fn`, and return the future of what it returns.

        Args:
            fn, args: the function and its arguments.
            kwargs: passed to the `submit` of the shared Executor.

        Raises:
            RemoteError: the engine takes no more work.
        """
        try:
            future = self._inner.submit(fn, *args, **kwargs)
        except Exception as e:
            raise RemoteError(
                f"{self._said} takes no more work ({type(e).__name__}: {str(e)[:300]}). Run the same command again: "
                "what is done is kept.",
                code="CKPT0907",
            ) from e
        self._futures.add(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the futures that were submitted here and have not started; the shared Executor stays open.

        `wait` and `cancel_futures` are ignored.
        """
        for future in list(self._futures):
            future.cancel()


def get_worker_version(text: str) -> str:
    """Return the version of ckpttool in this process, such as "1.2.0". A worker calls it before its first request.

    Args:
        text: ignored; every function that a worker calls takes a text.
    """
    return __version__


def _submit_to_another(
    executor: Executor, fn: Callable[[str], str], text: str, others: Collection[Future[str]]
) -> Future[str]:
    """Have a worker call `fn(text)`, and return the future of what `fn` returns.

    Args:
        executor: the workers.
        fn, text: a function of a module, and its argument.
        others: futures of earlier submissions of the same request; the request goes to a worker that works on none of
            them. Only dask can choose the worker; other executors ignore this.
    """
    if others and isinstance(executor, _DaskExecutor):
        return executor.submit(fn, text, workers=executor.list_workers_without(others))
    return executor.submit(fn, text)


def ask_worker(executor: Executor, said: str, fn: Callable[[str], str]) -> str:
    """Have a worker call `fn("")`, and return its answer as text.

    While none answers, further workers are asked after 1, 2, 4, ... more seconds, since one may be frozen; the first
    answer counts.

    Args:
        executor: the workers.
        said: how the user named the workers, for messages.
        fn: a function of a module that workers can import.

    Raises:
        RemoteError: no worker answers in `WAIT` seconds, or none can be asked.
        UsageError: the call failed in the worker.
    """
    futures: list[Future[str]] = []
    end, pause = time.monotonic() + WAIT, 1.0
    while (left := end - time.monotonic()) > 0:
        futures.append(_submit_to_another(executor, fn, "", futures))
        if done := wait_for_futures(futures, min(pause, left), FIRST_COMPLETED).done:
            break
        pause *= 2
    for future in futures:
        future.cancel()
    if not done:
        raise RemoteError(
            f"{said}: no worker took a request in {WAIT:.0f} seconds. Start workers, then run this again.",
            code="CKPT0907",
        )
    try:
        return str(done.pop().result())
    except Exception as e:
        raise UsageError(
            f"{said}: a worker cannot run ckpttool ({type(e).__name__}: {str(e)[:300]}). Install "
            f"ckpttool=={__version__} where the workers run.",
            code="CKPT0220",
        ) from e


def check_version(said: str, who: str, found: str | None) -> None:
    """Check that workers have the version of ckpttool that this process has.

    Args:
        said: how the user named the workers, for the message.
        who: the worker, or part of the cluster, that was asked ("the scheduler"), for the message.
        found: the version that `who` has; None if ckpttool is not installed there.

    Raises:
        UsageError: the version is another.
    """
    if found != __version__:
        raise UsageError(
            f"{said}: {who} has {f'ckpttool {found}' if found else 'no ckpttool'}, this is {__version__}. Install the "
            "same version everywhere.",
            code="CKPT0220",
        )


# ---------------------------------------------------------------------------------------------------------------- dask


#: They log tracebacks when a scheduler is gone, which we say in a sentence: dask's client, its event loop where a
#: result is fetched, and futures that cannot be cancelled.
_LOGS_OF_A_LOST_SCHEDULER = ("distributed.client", "tornado.application", "concurrent.futures")


class _DaskExecutor(SharedExecutor):
    """The workers of a dask client, which can be named when work is submitted."""

    def __init__(self, client: Any, said: str) -> None:
        # pure=False: the same request again is another task; retries=0: whoever submits decides about those
        super().__init__(client.get_executor(retries=0, pure=False), said)
        self._client = client
        self._keys: weakref.WeakKeyDictionary[Future[object], str] = weakref.WeakKeyDictionary()

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        """Have a worker of the dask cluster call `fn(*args)`, and return the future of what `fn` returns.

        Args:
            fn, args: the function and its arguments.
            kwargs: `workers`, a list of the addresses of the workers that may make the call; None, or left out, for
                any worker.

        Raises:
            RemoteError: the scheduler takes no more work.
        """
        key = f"ckpttool-{os.urandom(16).hex()}"
        future = super().submit(fn, *args, key=key, **kwargs)
        self._keys[future] = key
        return future

    def list_workers_without(self, futures: Collection[Future[Any]]) -> list[str] | None:
        """List the addresses of the workers that were given none of these futures to work on; None where every worker
        has one of them, or the scheduler does not answer."""
        keys = {self._keys.get(f) for f in futures}
        try:
            found = self._client.sync(self._client.scheduler.processing, workers=None, callback_timeout=PROMPT)
        except Exception:  # it is gone or stopped: the next count of workers says so
            return None
        return [address for address, has in found.items() if keys.isdisjoint(has)] or None

    def versions(self) -> dict[str, str | None]:
        """Ask the scheduler and all workers which version of ckpttool is installed there.

        Returns:
            {"the scheduler", or the address of a worker: the version, None if ckpttool is not installed there}.
                Whoever does not answer in `PROMPT` seconds is left out, and a warning names those workers.
        """

        async def ask() -> dict[str, Any]:
            scheduler, message = self._client.scheduler, {"op": "versions", "packages": ["ckpttool"]}
            addresses = list((await scheduler.identity(n_workers=-1))["workers"])
            asked = (scheduler.broadcast(msg=message, workers=[a], on_error="ignore") for a in addresses)
            first = scheduler.versions(packages=["ckpttool"])
            answers = await asyncio.gather(
                *(asyncio.wait_for(question, PROMPT) for question in (first, *asked)), return_exceptions=True
            )
            silent = [a for a, found in zip(addresses, answers[1:], strict=True) if isinstance(found, BaseException)]
            if silent:
                warnings.warn(
                    f"{self._said}: {len(silent)} of {len(addresses)} workers do not answer: {list_first(silent)}.",
                    FrozenWorkers,
                    stacklevel=2,
                )
            found = {"the scheduler": answers[0]}
            for answer in answers[1:]:
                found |= answer if isinstance(answer, dict) else {}
            return found

        found = self._client.sync(ask, callback_timeout=WAIT)
        return {who: has["packages"]["ckpttool"] for who, has in found.items() if isinstance(has, dict)}


@contextmanager
def dask_workers(where: str) -> Iterator[Workers]:
    """Connect to the workers of a dask scheduler for the `with` block.

    Args:
        where: the address of the scheduler, or its file, FILE.json.

    Raises:
        RemoteError: no scheduler or no worker answers.
        UsageError: the address or the version is wrong.
        MissingPackage: dask's package distributed is not installed.
    """
    said = argument("workers", f"dask:{where}")
    require_packages(said, "distributed")
    from distributed import Client

    # connect
    file = where.endswith(".json")
    deadline = time.monotonic() + WAIT
    while file and not os.path.exists(where):  # dask would wait for it for ever
        if time.monotonic() > deadline:
            raise RemoteError(
                f"{where}: no scheduler file after {WAIT:.0f} seconds. Start one: dask scheduler --scheduler-file "
                f"{where}",
                code="CKPT0907",
            )
        time.sleep(0.1)
    try:
        given = {"scheduler_file" if file else "address": where}
        client = Client(**given, timeout=min(WAIT, 30), set_as_default=False, name="ckpttool")
    except (OSError, TimeoutError) as e:
        raise RemoteError(
            f"{said}: no scheduler answers ({e}). Start one with `dask scheduler`, or correct the address.",
            code="CKPT0907",
        ) from e
    except Exception as e:
        raise UsageError(
            f"{said}: {type(e).__name__}: {e}. Write dask:tcp://HOST:8786 or dask:FILE.json.", code="CKPT0220"
        ) from e
    # ask for a worker, and for everyone's version
    executor = _DaskExecutor(client, said)
    logs = [logging.getLogger(name) for name in _LOGS_OF_A_LOST_SCHEDULER]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        ask_worker(
            executor, said, str
        )  # a function that every worker has: dask never answers where one cannot be imported
        for who, version in executor.versions().items():
            check_version(said, who, version)

        def count() -> int:
            """Count the workers' threads."""
            return sum(worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())

        yield Workers(executor, count() or None, True, f"dask {client.scheduler.addr}", count)
    finally:
        executor.shutdown()
        client.close(timeout=5)
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


# ----------------------------------------------------------------------------------------------------------------- Ray


class _RayExecutor(Executor):
    """Tasks of one CPU each on a Ray cluster, spread over its nodes."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote: dict[Callable[..., object], Any] = {}
        self._references: weakref.WeakKeyDictionary[Future[object], object] = weakref.WeakKeyDictionary()

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        """Return the future of `fn(*args, **kwargs)`; it fails with Ray's WorkerCrashedError if the worker dies."""
        if fn not in self._remote:
            self._remote[fn] = self._ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(fn)
        reference = self._remote[fn].remote(*args, **kwargs)
        future: Future[object] = reference.future()
        self._references[future] = reference
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the futures that are not done, if `cancel_futures` is set; else do nothing."""
        for future, reference in list(self._references.items()) if cancel_futures else ():
            if future.cancelled() or not future.done():
                self._ray.cancel(reference, force=True)


class _StdoutWithoutRay:
    """Standard output without what Ray's threads print about its workers; that goes to standard error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write text to standard output, or to standard error in a thread of Ray; returns the number of characters."""
        by_ray = threading.current_thread().name.startswith("ray_")
        return int((sys.stderr if by_ray else self._file).write(text))

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute, such as `flush` or `encoding`, from the wrapped file."""
        return getattr(self._file, name)


@contextmanager
def ray_workers(where: str) -> Iterator[Workers]:
    """Connect to the workers of a Ray cluster for the `with` block.

    Args:
        where: the address of the cluster; "auto" for the one of this machine.

    Raises:
        RemoteError: no cluster or no worker answers.
        UsageError: its workers have another version of ckpttool.
        MissingPackage: ray is not installed.
    """
    said = argument("workers", f"ray:{where}")
    require_packages(said, "ray")
    import ray

    ours = not ray.is_initialized()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if ours:
            # Ray would wait for minutes, and then end this process
            if address := re.fullmatch(r"(?:ray://)?(.+):(\d+)", where):
                socket.create_connection((address[1], int(address[2])), 10).close()
            with chdir(os.path.dirname(os.__file__)):  # Ray puts the current folder on the path of its workers
                ray.init(address=where, log_to_driver=False, logging_level="error")
    except Exception as e:
        ray.shutdown()
        raise RemoteError(
            f"{said}: no Ray cluster answers ({type(e).__name__}: {str(e)[:300]}). Start one with `ray start --head`, "
            "or correct the address.",
            code="CKPT0907",
        ) from e
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process where we clean up
    # what Ray prints about its workers is no output of the command
    executor = _RayExecutor(ray)
    stdout, sys.stdout = sys.stdout, cast("TextIO", _StdoutWithoutRay(sys.stdout))
    try:
        check_version(said, "a worker", ask_worker(executor, said, get_worker_version))

        def count() -> int:
            return int(ray.cluster_resources().get("CPU", 0))

        yield Workers(executor, count() or None, True, f"Ray at {where}", count)
    finally:
        executor.shutdown(cancel_futures=True)
        if ours:
            ray.shutdown()
        sys.stdout = stdout


# ----------------------------------------------------------------------------------------------------------------- MPI

#: (executor, ranks that work) of this process. It lasts until the process ends, since ranks that have left cannot come
#: back.
_mpi_pool: tuple[Executor, int | None] | None = None


@contextmanager
def mpi_workers() -> Iterator[Workers]:
    """Use the MPI ranks other than 0 as workers in the `with` block. In those ranks this never returns
    (`get_mpi_executor`).

    Raises:
        SystemExit: in ranks other than 0, with code 0.
        UsageError: the launcher and mpi4py do not belong to the same MPI, or there is one process only.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    inner, count = get_mpi_executor()
    shared = SharedExecutor(inner, argument("workers", "mpi"))
    try:
        yield Workers(shared, count, True, "MPI" if count is None else f"{count} MPI ranks")
    finally:
        shared.shutdown()


def end_mpi_ranks(status: int) -> None:
    """End the other MPI ranks, if this process has used them, before it exits with `status`.

    If a rank does not answer in `PROMPT` seconds, MPI would wait for ever: all ranks, including this one, are then
    aborted with `status`.
    """
    if _mpi_pool is None:
        return
    try:
        call_within(PROMPT, partial(_mpi_pool[0].shutdown, wait=True))
    except TimeoutError:
        from mpi4py import MPI

        warnings.warn(
            f"the run has ended, and a rank of MPI has not answered for {PROMPT:.0f} seconds: it is aborted.",
            FrozenWorkers,
            stacklevel=2,
        )
        sys.stderr.flush()
        time.sleep(0.5)  # mpiexec forwards what a rank has printed, and passes over what it gets with the abort
        MPI.COMM_WORLD.Abort(status)


def get_mpi_executor() -> tuple[Executor, int | None]:
    """Return (an Executor, number of ranks that work for it) in rank 0; the number is None where MPI starts them on
    demand. In the other ranks this does not return: they serve until rank 0 ends, and then exit with code 0.

    Raises:
        SystemExit: in ranks other than 0, with code 0.
        UsageError: the launcher and mpi4py do not belong to the same MPI, or there is one process only.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    global _mpi_pool
    if _mpi_pool is not None:
        return _mpi_pool
    said = argument("workers", "mpi")
    require_packages(said, "mpi4py")
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor, MPIPoolExecutor
    except (ImportError, RuntimeError) as e:  # mpi4py finds MPI itself only now
        raise explain_missing_package(
            said, "mpi4py", why=f"{e}; it needs MPI: load the cluster's module, or pip install mpich"
        ) from e
    world = MPI.COMM_WORLD
    # the launcher tells how many processes it has started, and mpi4py how many it sees
    launched = max(
        int(os.environ.get(name) or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    )
    if world.size == 1 and launched > 1:
        raise UsageError(
            f"{said}: {launched} processes were started, but for mpi4py each is alone: the launcher belongs to another "
            f"MPI than mpi4py ({MPI.Get_library_version().splitlines()[0].split(',')[0].strip()}). Use the mpiexec of "
            "that MPI, or another `srun --mpi=` (srun --mpi=list).",
            code="CKPT0220",
        )
    if world.size == 1:
        if not (os.environ.get("MPI4PY_FUTURES_MAX_WORKERS") or (world.Get_attr(MPI.UNIVERSE_SIZE) or 1) > 1):
            raise UsageError(
                f"{said}: there is one process only. Start it with mpiexec -n 4 ckpttool ..., or srun --mpi=pmix -n 4.",
                code="CKPT0220",
            )
        spawned = MPIPoolExecutor(main=False, python_args=["-P"])
        _mpi_pool = spawned, spawned.num_workers
        return _mpi_pool
    if world.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # not left: at its end rank 0 lets mpi4py stop the others, also if it fails before it has any work for them
    executor = MPICommExecutor(world, root=0, main=False).__enter__()
    if executor is None:
        raise SystemExit(0)
    _mpi_pool = executor, world.size - 1
    return _mpi_pool
