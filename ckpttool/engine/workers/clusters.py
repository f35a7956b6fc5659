"""`Workers`, and those on other machines: of a dask scheduler, of a Ray cluster, or the ranks of MPI.

What dask, Ray and MPI use between their processes is pickle, so a cluster is trusted like the account that runs it; no
pickle comes from a checkpoint. Scheduling, restarts and transport are the engine's own.

Under `mpiexec` each rank runs the command; `mpi_executor` turns all ranks but 0 into workers.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, cast

from ..._version import __version__
from ...errors import CkpttoolError, RemoteError, UsageError, argument
from ...extras import explain_missing_package, require_packages
from .local_processes import LocalProcesses

__all__ = [
    "SharedExecutor",
    "Workers",
    "ask_worker",
    "dask_workers",
    "mpi_executor",
    "mpi_workers",
    "ray_workers",
    "refuse_other_version",
    "version_of_worker",
]

#: Seconds to wait for a scheduler, and then for a first worker: those of a Slurm job do not start at once.
WAIT = 60.0

#: Seconds that a cluster may be without a worker before a run gives up.
GONE = 300.0


@dataclass(frozen=True)
class Workers:
    """The workers of one run.

    Args:
        executor: `submit(fn, text)` gives a future of a text; `fn` is a function of a module that workers can import.
        count: how many requests they work on at the same time, at the beginning; None if the engine does not say.
        remote: whether they may be on other machines, where local paths, device numbers and inodes can differ.
        name: in messages and progress.
        recount: asks the engine again, where workers come and go.
    """

    executor: Executor
    count: int | None
    remote: bool
    name: str
    recount: Callable[[], int | None] | None = None

    def prepare(self, fn: Callable[[str], str], text: str) -> None:
        """Call `fn(text)` once for all workers, where they are several processes of this machine, copied from one.
        Other workers begin without it, each by itself."""
        if isinstance(self.executor, LocalProcesses) and (self.count or 0) > 1:
            self.executor.prepare(fn, text)

    def count_now(self) -> int | None:
        """Count the requests that the workers can work on at the same time now; None if the engine does not say.

        Raises:
            RemoteError: there have been no workers for `GONE` seconds.
        """
        try:
            return self.recount() if self.recount else self.count
        except CkpttoolError:
            raise
        except Exception:  # a cluster that is gone: the next request fails, and says so
            return self.count


class SharedExecutor(Executor):
    """An Executor that others may use, too: shutdown cancels what was submitted here, and leaves it open.

    `said` is how the user named it, for messages.
    """

    def __init__(self, inner: Executor, said: str) -> None:
        self._inner, self._said = inner, said
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of `fn(*args)`, which the shared Executor runs.

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
        """Cancel what was submitted here and has not begun; the shared Executor stays open. The arguments are not
        looked at."""
        for future in list(self._futures):
            future.cancel()


def version_of_worker(text: str) -> str:
    """Return the worker's version of ckpttool; called in a worker before its first request, whatever the text."""
    return __version__


def ask_worker(executor: Executor, said: str, fn: Callable[[str], str]) -> str:
    """Have a worker call `fn("")`, and return its answer as text; `said` is how the user named the workers.

    Raises:
        RemoteError: no worker answers in `WAIT` seconds, or none can be asked.
        UsageError: the call failed in the worker.
    """
    future = executor.submit(fn, "")
    try:
        return str(future.result(WAIT))
    except TimeoutError:
        future.cancel()
        raise RemoteError(
            f"{said}: no worker took a request in {WAIT:.0f} seconds. Start workers, then run this again.",
            code="CKPT0907",
        ) from None
    except Exception as e:
        raise UsageError(
            f"{said}: a worker cannot run ckpttool ({type(e).__name__}: {str(e)[:300]}). Install "
            f"ckpttool=={__version__} where the workers run.",
            code="CKPT0220",
        ) from e


def refuse_other_version(said: str, who: str, found: str | None) -> None:
    """Refuse workers that have another version of ckpttool, or none.

    Args:
        said: how the user named the workers.
        who: which of them has that version, for the message.
        found: the version; None for none.

    Raises:
        UsageError: the version is not that of this process.
    """
    if found != __version__:
        raise UsageError(
            f"{said}: {who} has {f'ckpttool {found}' if found else 'no ckpttool'}, this is {__version__}. Install the "
            "same version everywhere.",
            code="CKPT0220",
        )


# ---------------------------------------------------------------------------------------------------------------- dask


@contextmanager
def dask_workers(where: str) -> Iterator[Workers]:
    """While the block runs, stay connected to the workers of a dask scheduler, given by its address or by its file,
    FILE.json.

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
    # ask for a worker, and for everyone's version.
    # pure=False: the same request again is another task; retries=0: whoever submits decides about those
    executor = SharedExecutor(client.get_executor(retries=0, pure=False), said)
    log = logging.getLogger("distributed.client")
    level = log.level
    log.setLevel(logging.CRITICAL)  # tracebacks of its own about a scheduler that is gone; we say so
    try:
        ask_worker(
            executor, said, str
        )  # a function that every worker has: dask never answers where one cannot be imported
        versions = client.get_versions(packages=["ckpttool"])
        for who, has in {"the scheduler": versions["scheduler"], **versions["workers"]}.items():
            refuse_other_version(said, who, has["packages"]["ckpttool"])

        seen = time.monotonic()

        def count() -> int | None:
            """Count the workers' threads; None while there are none.

            Raises:
                RemoteError: there have been none for `GONE` seconds.
            """
            nonlocal seen
            n = sum(worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
            if n:
                seen = time.monotonic()
            elif time.monotonic() - seen > GONE:
                raise RemoteError(
                    f"{said} has had no worker for {GONE:.0f} seconds. Start workers, then run the same command again: "
                    "what is done is kept.",
                    code="CKPT0907",
                )
            return n or None

        yield Workers(executor, count(), True, f"dask {client.scheduler.addr}", count)
    finally:
        executor.shutdown()
        client.close(timeout=5)
        log.setLevel(level)


# ----------------------------------------------------------------------------------------------------------------- Ray


class _RayExecutor(Executor):
    """Tasks of one CPU each on a Ray cluster, spread over its nodes."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote: dict[Callable[..., Any], Any] = {}
        self._references: weakref.WeakKeyDictionary[Future[Any], Any] = weakref.WeakKeyDictionary()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of `fn(*args, **kwargs)`; it fails with Ray's WorkerCrashedError if the worker dies."""
        if fn not in self._remote:
            self._remote[fn] = self._ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(fn)
        reference = self._remote[fn].remote(*args, **kwargs)
        future: Future[Any] = reference.future()
        self._references[future] = reference
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what is not done, if `cancel_futures` is set; else do nothing."""
        for future, reference in list(self._references.items()) if cancel_futures else ():
            if future.cancelled() or not future.done():
                self._ray.cancel(reference, force=True)


class _StdoutWithoutRay:
    """Standard output without what Ray's threads print about its workers; that goes to standard error."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write text to standard output, or to standard error in a thread of Ray; returns the number of characters."""
        by_ray = threading.current_thread().name.startswith("ray_")
        return int((sys.stderr if by_ray else self._file).write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def ray_workers(where: str) -> Iterator[Workers]:
    """While the block runs, stay connected to a Ray cluster at an address, or to the one of this machine where it is
    "auto".

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
        refuse_other_version(said, "a worker", ask_worker(executor, said, version_of_worker))

        def count() -> int | None:
            return int(ray.cluster_resources().get("CPU", 0)) or None

        yield Workers(executor, count(), True, f"Ray at {where}", count)
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
    """While the block runs, use the ranks of MPI but this one, which is rank 0; the others never return from here
    (`mpi_executor`).

    Raises:
        SystemExit: in ranks other than 0, with code 0.
        UsageError: the launcher and mpi4py do not belong to the same MPI, or there is one process only.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    inner, count = mpi_executor()
    shared = SharedExecutor(inner, argument("workers", "mpi"))
    try:
        yield Workers(shared, count, True, "MPI" if count is None else f"{count} MPI ranks")
    finally:
        shared.shutdown()


def mpi_executor() -> tuple[Executor, int | None]:
    """Return (an Executor, how many ranks work for it) in rank 0; the number is None where MPI starts them. In the
    other ranks, do not return: they serve until rank 0 ends, and then exit with 0.

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
