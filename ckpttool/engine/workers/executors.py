"""Who does the work: what `--workers` and `workers=` name, as `Workers`.

The only Executor written here is `local_processes`; the others are in clusters.py, or the caller's own. To every
Executor, the coordinator submits one function of ckpttool with one text, and gets one text back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

from ...errors import UsageError, argument
from ...printable import count_noun
from . import clusters
from .clusters import Workers
from .cores import usable_cores, usable_memory
from .local_processes import LocalProcesses

__all__ = [
    "SMALL",
    "Workers",
    "WorkersSpec",
    "default_count",
    "describe_workers",
    "serve_if_worker",
    "workers_of",
]

WorkersSpec = Executor | int | str | None

#: Bytes below which a second process costs more than it saves.
SMALL = 4_000_000_000

#: What a worker may take besides what others of its machine need: its buffers, Python, and an index.
_WORKER_BYTES = 512 << 20


def workers_of(spec: WorkersSpec, nbytes: int = 0) -> AbstractContextManager[Workers]:
    """Return a context manager of the workers that `spec` names; entering it starts or connects them. At its end,
    requests that are not done are cancelled, and processes started here end.

    Args:
        spec: a number of local processes, as int or text; `dask:ADDRESS` or `dask:FILE.json`; `ray:auto` or
            `ray:ADDRESS`; `mpi`; `package.module:factory`, a function that returns an Executor; an Executor, which
            stays open; None for `default_count(nbytes)` local processes.
        nbytes: how many bytes there are to read.

    Raises:
        UsageError: it names nothing that can be used.
        MissingPackage: only when entered: its engine is not installed.
        RemoteError: only when entered: the cluster does not answer, or has no workers.
    """
    if isinstance(spec, Executor):
        return _callers_executor(spec)
    text = str(default_count(nbytes) if spec is None else spec).strip()
    engine, _, where = text.partition(":")
    if re.fullmatch(r"\d{1,4}", text) and int(text) > 0:
        return _local_workers(int(text))
    if engine == "dask" and where:
        return clusters.dask_workers(where)
    if engine == "ray" and where:
        return clusters.ray_workers(where)
    if text == "mpi":
        return clusters.mpi_workers()
    if re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*", text) and engine not in ("dask", "ray", "mpi"):
        return _made_by_factory(engine, where)
    raise UsageError(
        f"{argument('workers', spec)}: give a number of local processes from 1 to 9999, dask:tcp://HOST:8786, "
        "dask:FILE.json, ray:auto, ray:ADDRESS, mpi, or MODULE:FACTORY, a function that returns a "
        "concurrent.futures.Executor.",
        code="CKPT0220",
    )


# ------------------------------------------------------------------------------------------------------- this machine


@contextmanager
def _local_workers(count: int) -> Iterator[Workers]:
    """While the block runs, have up to `count` local processes as workers; at its end, they are stopped."""
    executor = LocalProcesses(count)
    try:
        yield Workers(executor, count, False, _count_processes(count))
    finally:
        executor.shutdown(cancel_futures=True)


def _count_processes(count: int) -> str:
    return count_noun(count, "process", "processes")


def default_count(nbytes: int) -> int:
    """Choose how many local processes copy `nbytes` bytes: half of the cores, at most 8, and at most one for each 512
    MiB of memory; one for less than 4 GB, or on fewer than 4 cores.

    Half, since each process also has threads that read and write. More than 8 wait for most disks.
    """
    n = usable_cores()
    if nbytes < SMALL or n < 4:
        return 1
    room = usable_memory()
    return max(1, min(n // 2, 8, 8 if room is None else room // _WORKER_BYTES))


def describe_workers(spec: WorkersSpec, nbytes: int) -> tuple[str, int | None, bool]:
    """Return (name, number, whether they may be on other machines) of the workers that `spec` names; none is started.
    The number is None where the engine would have to be asked.

    Args:
        spec: the workers as the user named them; None for the usual number of local processes.
        nbytes: how many bytes there are to read.

    Raises:
        UsageError: it names nothing that can be used.
    """
    if isinstance(spec, Executor):
        return type(spec).__name__, _count_of(spec), _may_be_remote(spec)
    workers_of(spec, nbytes)
    text = str(default_count(nbytes) if spec is None else spec).strip()
    if not text.isdecimal():
        return text, None, True
    return _count_processes(int(text)), int(text), False


# ------------------------------------------------------------------------------------------- an Executor of the caller


@contextmanager
def _callers_executor(inner: Executor) -> Iterator[Workers]:
    """While the block runs, use an Executor that the caller has made; at its end, cancel what is not done there, and
    leave it open."""
    shared = clusters.SharedExecutor(inner, argument("workers", type(inner).__name__))
    try:
        yield Workers(shared, _count_of(inner), _may_be_remote(inner), type(inner).__name__)
    finally:
        shared.shutdown()


@contextmanager
def _made_by_factory(module: str, name: str) -> Iterator[Workers]:
    """While the block runs, use the Executor that a user's function makes, if its workers have this version of
    ckpttool; at the end, shut it down.

    Args:
        module: the module of the function; `name` is its name there.

    Raises:
        UsageError: there is no such function, it fails or returns something else, or the workers cannot run this
            version.
        RemoteError: no worker answers.
    """
    said = argument("workers", f"{module}:{name}")
    try:
        made = getattr(import_module(module), name)()
    except ModuleNotFoundError as e:
        raise UsageError(
            f"{said}: {e}. Install it next to ckpttool, or put its folder on PYTHONPATH.", code="CKPT0220"
        ) from e
    except (AttributeError, TypeError) as e:
        raise UsageError(
            f"{said}: {type(e).__name__}: {e}. It must be a function without arguments.", code="CKPT0220"
        ) from e
    except Exception as e:
        raise UsageError(f"{said} failed: {type(e).__name__}: {e}. Nothing was begun.", code="CKPT0220") from e
    if not isinstance(made, Executor):
        raise UsageError(f"{said} returned {type(made).__name__}, not a concurrent.futures.Executor.", code="CKPT0220")
    try:
        version = clusters.ask_worker(made, said, clusters.version_of_worker)
        clusters.refuse_other_version(said, "a worker", version)
        yield Workers(made, _count_of(made), _may_be_remote(made), f"{module}:{name}")
    finally:
        try:
            made.shutdown(wait=False, cancel_futures=True)
        except TypeError:  # Executors from before Python 3.9 do not have it
            made.shutdown(wait=False)


def _count_of(executor: Executor) -> int | None:
    """Return how many workers an Executor has, if it tells as those of the standard library do; else None."""
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else None


def _may_be_remote(executor: Executor) -> bool:
    """Tell whether the workers of an Executor may be on other machines: those of any but the standard library's and
    ours."""
    return not (type(executor).__module__.startswith("concurrent.futures.") or isinstance(executor, LocalProcesses))


def serve_if_worker(spec: WorkersSpec) -> None:
    """Serve in a worker process of `mpi` under `mpiexec` or `srun`: this does not return in ranks other than 0, which
    serve until rank 0 ends and then exit with 0.

    To be called before anything that only one process may do. In rank 0, and with all other specs, it returns at once.

    Raises:
        SystemExit: in ranks other than 0, with code 0.
        UsageError: the launcher and mpi4py do not belong to the same MPI, or there is one process only.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    if isinstance(spec, str) and spec.strip() == "mpi":
        clusters.mpi_executor()
