"""Who does the work: what `--workers` and `workers=` name, as one `concurrent.futures.Executor`.

Scheduling, restarts and transport are the engine's own (dask, Ray, MPI). The only Executor written here is
`local_processes`. To every Executor, the caller submits one function of ckpttool with one text, and gets one text back.
What dask, Ray and MPI use between their processes is pickle, so a cluster is trusted like the account that runs it; no
pickle comes from a checkpoint.

Under `mpiexec` each rank runs the command. `serve_if_worker` turns all ranks but 0 into workers before they do anything
else.
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
from contextlib import AbstractContextManager, chdir, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO, cast

from ..._version import __version__
from ...errors import CkpttoolError, RemoteError, UsageError, argument
from ...extras import missing, need
from .cores import cores, memory
from .local_processes import LocalProcesses

__all__ = [
    "SMALL",
    "Workers",
    "WorkersSpec",
    "default_count",
    "named",
    "serve_if_worker",
    "version_of_worker",
    "workers_of",
]

WorkersSpec = Executor | int | str | None

#: Bytes below which a second process costs more than it saves.
SMALL = 4_000_000_000

#: What a worker may take besides what others of its machine need: its buffers, Python, and an index.
_WORKER_BYTES = 512 << 20

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
        """Call `fn(text)` once for all workers, where they are several processes of this machine. Otherwise each begins
        by itself."""
        if isinstance(self.executor, LocalProcesses) and (self.count or 0) > 1:
            self.executor.prepare(fn, text)

    def count_now(self) -> int | None:
        """How many requests they work on at the same time, by now; None if the engine does not say.

        Raises:
            RemoteError: there have been none for `GONE` seconds.
        """
        try:
            return self.recount() if self.recount else self.count
        except CkpttoolError:
            raise
        except Exception:  # a cluster that is gone: the next request fails, and says so
            return self.count


@contextmanager
def workers_of(spec: WorkersSpec, nbytes: int = 0) -> Iterator[Workers]:
    """The workers that `spec` names. At the end, requests that are not done are cancelled, and processes started here
    end.

    Args:
        spec: a number of local processes, as int or text; `dask:ADDRESS` or `dask:FILE.json`; `ray:auto` or
        `ray:ADDRESS`; `mpi`;
            `package.module:factory`, a function that returns an Executor; an Executor, which stays open; None for
            `default_count(nbytes)` local processes.

    Raises:
        UsageError: it names nothing that can be used. MissingPackage: its engine is not installed.
        RemoteError: the cluster does not answer, or has no workers.
    """
    with _engine(spec, nbytes) as workers:
        yield workers


def _engine(spec: WorkersSpec, nbytes: int) -> AbstractContextManager[Workers]:
    if isinstance(spec, Executor):
        return _executor(spec)
    text = str(default_count(nbytes) if spec is None else spec).strip()
    engine, _, where = text.partition(":")
    if re.fullmatch(r"\d{1,4}", text) and int(text) > 0:
        return _local(int(text))
    if engine == "dask" and where:
        return _dask(where)
    if engine == "ray" and where:
        return _ray(where)
    if text == "mpi":
        return _mpi()
    if re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*", text) and engine not in ("dask", "ray", "mpi"):
        return _factory(engine, where)
    raise UsageError(
        f"{argument('workers', spec)}: give a number of local processes from 1 to 9999, dask:tcp://HOST:8786, "
        "dask:FILE.json, ray:auto, ray:ADDRESS, mpi, or MODULE:FACTORY, a function that returns a "
        "concurrent.futures.Executor."
    )


# ------------------------------------------------------------------------------------------------------- this machine


@contextmanager
def _local(count: int) -> Iterator[Workers]:
    executor = LocalProcesses(count)
    try:
        yield Workers(executor, count, False, _processes(count))
    finally:
        executor.shutdown(cancel_futures=True)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def default_count(nbytes: int) -> int:
    """How many local processes copy `nbytes`: half of the cores, at most 8, and at most one for each 512 MiB of memory;
    one for less than 4 GB, or on fewer than 4 cores.

    Half, since each process also has threads that read and write. More than 8 wait for most disks.
    """
    n = cores()
    if nbytes < SMALL or n < 4:
        return 1
    room = memory()
    return max(1, min(n // 2, 8, 8 if room is None else room // _WORKER_BYTES))


def named(spec: WorkersSpec, nbytes: int) -> tuple[str, int | None, bool]:
    """(name, number, whether they may be on other machines) of the workers that `spec` names, as `Workers` has them;
    none is started.

    Raises:
        UsageError: it names nothing that can be used.
    """
    if isinstance(spec, Executor):
        return type(spec).__name__, _count_of(spec), _may_be_remote(spec)
    _engine(spec, nbytes)
    text = str(default_count(nbytes) if spec is None else spec).strip()
    if not text.isdecimal():
        return text, None, True
    return _processes(int(text)), int(text), False


# ------------------------------------------------------------------------------------------- an Executor of the caller


class _Shared(Executor):
    """An Executor that others may use, too: shutdown cancels what was submitted here, and leaves it open."""

    def __init__(self, inner: Executor, said: str) -> None:
        self._inner, self._said = inner, said
        self._futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of `fn(text)`.

        Raises:
            RemoteError: the engine is gone.
        """
        try:
            future = self._inner.submit(fn, *args, **kwargs)
        except Exception as e:
            raise RemoteError(
                f"{self._said} takes no more work ({type(e).__name__}: {str(e)[:300]}). Run the same command again: "
                "what is done is kept."
            ) from e
        self._futures.add(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what has not begun."""
        for future in list(self._futures):
            future.cancel()


@contextmanager
def _executor(inner: Executor) -> Iterator[Workers]:
    shared = _Shared(inner, argument("workers", type(inner).__name__))
    try:
        yield Workers(shared, _count_of(inner), _may_be_remote(inner), type(inner).__name__)
    finally:
        shared.shutdown()


@contextmanager
def _factory(module: str, name: str) -> Iterator[Workers]:
    said = argument("workers", f"{module}:{name}")
    try:
        made = getattr(import_module(module), name)()
    except ModuleNotFoundError as e:
        raise UsageError(f"{said}: {e}. Install it next to ckpttool, or put its folder on PYTHONPATH.") from e
    except (AttributeError, TypeError) as e:
        raise UsageError(f"{said}: {type(e).__name__}: {e}. It must be a function without arguments.") from e
    except Exception as e:
        raise UsageError(f"{said} failed: {type(e).__name__}: {e}. Nothing was begun.") from e
    if not isinstance(made, Executor):
        raise UsageError(f"{said} returned {type(made).__name__}, not a concurrent.futures.Executor.")
    try:
        _refuse_other_version(said, "a worker", _ask(made, said, version_of_worker))
        yield Workers(made, _count_of(made), _may_be_remote(made), f"{module}:{name}")
    finally:
        try:
            made.shutdown(wait=False, cancel_futures=True)
        except TypeError:  # Executors from before Python 3.9 do not have it
            made.shutdown(wait=False)


def _count_of(executor: Executor) -> int | None:
    """As the Executors of the standard library, and those modelled on them, have it."""
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else None


def _may_be_remote(executor: Executor) -> bool:
    return not (type(executor).__module__.startswith("concurrent.futures.") or isinstance(executor, LocalProcesses))


def version_of_worker(text: str) -> str:
    """Called in a worker before its first request: proves that it is there and has ckpttool."""
    return __version__


def _ask(executor: Executor, said: str, fn: Callable[[str], str]) -> str:
    """What a worker answers.

    Raises:
        RemoteError: there is none. UsageError: it failed.
    """
    future = executor.submit(fn, "")
    try:
        return str(future.result(WAIT))
    except TimeoutError:
        future.cancel()
        raise RemoteError(
            f"{said}: no worker took a request in {WAIT:.0f} seconds. Start workers, then run this again."
        ) from None
    except Exception as e:
        raise UsageError(
            f"{said}: a worker cannot run ckpttool ({type(e).__name__}: {str(e)[:300]}). Install "
            f"ckpttool=={__version__} where the workers run."
        ) from e


def _refuse_other_version(said: str, who: str, found: str | None) -> None:
    if found != __version__:
        raise UsageError(
            f"{said}: {who} has {f'ckpttool {found}' if found else 'no ckpttool'}, this is {__version__}. Install the "
            "same version everywhere."
        )


# ---------------------------------------------------------------------------------------------------------------- dask


@contextmanager
def _dask(where: str) -> Iterator[Workers]:
    said = argument("workers", f"dask:{where}")
    need(said, "distributed")
    from distributed import Client

    file = where.endswith(".json")
    deadline = time.monotonic() + WAIT
    while file and not os.path.exists(where):  # dask would wait for it for ever
        if time.monotonic() > deadline:
            raise RemoteError(
                f"{where}: no scheduler file after {WAIT:.0f} seconds. Start one: dask scheduler --scheduler-file "
                f"{where}"
            )
        time.sleep(0.1)
    try:
        given = {"scheduler_file" if file else "address": where}
        client = Client(**given, timeout=min(WAIT, 30), set_as_default=False, name="ckpttool")
    except (OSError, TimeoutError) as e:
        raise RemoteError(
            f"{said}: no scheduler answers ({e}). Start one with `dask scheduler`, or correct the address."
        ) from e
    except Exception as e:
        raise UsageError(f"{said}: {type(e).__name__}: {e}. Write dask:tcp://HOST:8786 or dask:FILE.json.") from e
    # pure=False: the same request again is another task; retries=0: whoever submits decides about those
    executor = _Shared(client.get_executor(retries=0, pure=False), said)
    log = logging.getLogger("distributed.client")
    level = log.level
    log.setLevel(logging.CRITICAL)  # tracebacks of its own about a scheduler that is gone; we say so
    try:
        _ask(executor, said, str)  # a function that every worker has: dask never answers where one cannot be imported
        versions = client.get_versions(packages=["ckpttool"])
        for who, has in {"the scheduler": versions["scheduler"], **versions["workers"]}.items():
            _refuse_other_version(said, who, has["packages"]["ckpttool"])

        seen = time.monotonic()

        def count() -> int | None:
            nonlocal seen
            n = sum(worker["nthreads"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
            if n:
                seen = time.monotonic()
            elif time.monotonic() - seen > GONE:
                raise RemoteError(
                    f"{said} has had no worker for {GONE:.0f} seconds. Start workers, then run the same command again: "
                    "what is done is kept."
                )
            return n or None

        yield Workers(executor, count(), True, f"dask {client.scheduler.addr}", count)
    finally:
        executor.shutdown()
        client.close(timeout=5)
        log.setLevel(level)


# ----------------------------------------------------------------------------------------------------------------- Ray


class _Ray(Executor):
    """Tasks of one CPU each on a Ray cluster, spread over its nodes."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote: dict[Callable[..., Any], Any] = {}
        self._references: weakref.WeakKeyDictionary[Future[Any], Any] = weakref.WeakKeyDictionary()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of `fn(text)`; it fails with Ray's WorkerCrashedError if the worker dies."""
        if fn not in self._remote:
            self._remote[fn] = self._ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(fn)
        reference = self._remote[fn].remote(*args, **kwargs)
        future: Future[Any] = reference.future()
        self._references[future] = reference
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what is not done."""
        for future, reference in list(self._references.items()) if cancel_futures else ():
            if future.cancelled() or not future.done():
                self._ray.cancel(reference, force=True)


class _Stdout:
    """Standard output without what Ray's threads print about its workers; that goes to standard error."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Like the method of a text file."""
        by_ray = threading.current_thread().name.startswith("ray_")
        return int((sys.stderr if by_ray else self._file).write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _ray(where: str) -> Iterator[Workers]:
    said = argument("workers", f"ray:{where}")
    need(said, "ray")
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
            "or correct the address."
        ) from e
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray's own would end the process where we clean up
    executor = _Ray(ray)
    stdout, sys.stdout = sys.stdout, cast("TextIO", _Stdout(sys.stdout))
    try:
        _refuse_other_version(said, "a worker", _ask(executor, said, version_of_worker))

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
def _mpi() -> Iterator[Workers]:
    inner, count = _mpi_executor()
    shared = _Shared(inner, argument("workers", "mpi"))
    try:
        yield Workers(shared, count, True, "MPI" if count is None else f"{count} MPI ranks")
    finally:
        shared.shutdown()


def serve_if_worker(spec: WorkersSpec) -> None:
    """For `mpi` under `mpiexec` or `srun`: does not return in ranks other than 0, which serve until rank 0 ends and
    then exit with 0.

    To be called before anything that only one process may do. In rank 0, and with all other specs, it returns at once.

    Raises:
        SystemExit: in ranks other than 0, with code 0. UsageError: the launcher and mpi4py do not belong to the same
        MPI.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    if isinstance(spec, str) and spec.strip() == "mpi":
        _mpi_executor()


def _mpi_executor() -> tuple[Executor, int | None]:
    global _mpi_pool
    if _mpi_pool is not None:
        return _mpi_pool
    said = argument("workers", "mpi")
    need(said, "mpi4py")
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor, MPIPoolExecutor
    except (ImportError, RuntimeError) as e:  # mpi4py finds MPI itself only now
        raise missing(said, "mpi4py", why=f"{e}; it needs MPI: load the cluster's module, or pip install mpich") from e
    world = MPI.COMM_WORLD
    launched = max(
        int(os.environ.get(name) or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    )
    if world.size == 1 and launched > 1:
        raise UsageError(
            f"{said}: {launched} processes were started, but for mpi4py each is alone: the launcher belongs to another "
            f"MPI than mpi4py ({MPI.Get_library_version().splitlines()[0].split(',')[0].strip()}). Use the mpiexec of "
            "that MPI, or another `srun --mpi=` (srun --mpi=list)."
        )
    if world.size == 1:
        if not (os.environ.get("MPI4PY_FUTURES_MAX_WORKERS") or (world.Get_attr(MPI.UNIVERSE_SIZE) or 1) > 1):
            raise UsageError(
                f"{said}: there is one process only. Start it with mpiexec -n 4 ckpttool ..., or srun --mpi=pmix -n 4."
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
