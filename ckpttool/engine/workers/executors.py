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
from .cores import count_usable_cores, find_usable_memory
from .local_processes import LocalProcesses

__all__ = [
    "SMALL",
    "Workers",
    "WorkersSpec",
    "choose_process_count",
    "describe_workers",
    "open_workers",
    "serve_if_worker",
]

WorkersSpec = Executor | int | str | None

#: Bytes below which a second process costs more than it saves.
SMALL = 4_000_000_000

#: What a worker may take besides what others of its machine need: its buffers, Python, and an index.
_WORKER_BYTES = 512 << 20


def open_workers(spec: WorkersSpec, nbytes: int = 0) -> AbstractContextManager[Workers]:
    """Return a context manager of the workers that `spec` names; entering it starts or connects them. At its end,
    unfinished requests are cancelled, and processes that were started here end.

    Args:
        spec: a number of local processes, as int or text; `dask:ADDRESS` or `dask:FILE.json`; `ray:auto` or
            `ray:ADDRESS`; `mpi`; `package.module:factory`, a function that returns an Executor; an Executor, which
            stays open; None for `choose_process_count(nbytes)` local processes.
        nbytes: how many bytes there are to read.

    Raises:
        UsageError: it names nothing that can be used.
        MissingPackage: only when entered: its engine is not installed.
        RemoteError: only when entered: the cluster does not answer, or has no workers.
    """
    if isinstance(spec, Executor):
        return _callers_executor(spec)
    text = str(choose_process_count(nbytes) if spec is None else spec).strip()
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
        return _executor_from_factory(engine, where)
    raise UsageError(
        f"{argument('workers', spec)}: give a number of local processes from 1 to 9999, dask:tcp://HOST:8786, "
        "dask:FILE.json, ray:auto, ray:ADDRESS, mpi, or MODULE:FACTORY, a function that returns a "
        "concurrent.futures.Executor.",
        code="CKPT0220",
    )


# ------------------------------------------------------------------------------------------------------- this machine


@contextmanager
def _local_workers(count: int) -> Iterator[Workers]:
    """Provide up to `count` local processes as workers in the `with` block; they are stopped at its end."""
    executor = LocalProcesses(count)
    try:
        yield Workers(executor, count, False, _count_processes(count))
    finally:
        executor.shutdown(cancel_futures=True)


def _count_processes(count: int) -> str:
    """Return the name of local workers in messages: "1 process", "8 processes"."""
    return count_noun(count, "process", "processes")


def choose_process_count(nbytes: int) -> int:
    """Return how many local processes should copy `nbytes` bytes: half of the cores, at most 8, and at most one for
    each 512 MiB of memory; one for less than 4 GB, or on fewer than 4 cores.

    Half, since each process also has threads that read and write; most disks cannot serve more than 8.
    """
    n = count_usable_cores()
    if nbytes < SMALL or n < 4:
        return 1
    room = find_usable_memory()
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
        return type(spec).__name__, _count_workers(spec), _may_be_remote(spec)
    open_workers(spec, nbytes)
    text = str(choose_process_count(nbytes) if spec is None else spec).strip()
    if not text.isdecimal():
        return text, None, True
    return _count_processes(int(text)), int(text), False


# ------------------------------------------------------------------------------------------- an Executor of the caller


@contextmanager
def _callers_executor(inner: Executor) -> Iterator[Workers]:
    """Use the caller's Executor for the `with` block; at its end, cancel what was submitted and has not started, and
    leave the Executor open."""
    shared = clusters.SharedExecutor(inner, argument("workers", type(inner).__name__))
    try:
        yield Workers(shared, _count_workers(inner), _may_be_remote(inner), type(inner).__name__)
    finally:
        shared.shutdown()


@contextmanager
def _executor_from_factory(module: str, name: str) -> Iterator[Workers]:
    """Use the Executor that a user's function returns for the `with` block, if its workers have this version of
    ckpttool; shut it down at the end.

    Args:
        module: the module of the function.
        name: the name of the function.

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
        version = clusters.ask_worker(made, said, clusters.get_worker_version)
        clusters.check_version(said, "a worker", version)
        yield Workers(made, _count_workers(made), _may_be_remote(made), f"{module}:{name}")
    finally:
        try:
            made.shutdown(wait=False, cancel_futures=True)
        except TypeError:  # Executors from before Python 3.9 do not have it
            made.shutdown(wait=False)


def _count_workers(executor: Executor) -> int | None:
    """Return how many workers an Executor has, from the attribute that those of the standard library have; None if
    unknown."""
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else None


def _may_be_remote(executor: Executor) -> bool:
    """Tell whether the workers of an Executor may be on other machines: False for the executors of the standard library
    and for `LocalProcesses`."""
    return not (type(executor).__module__.startswith("concurrent.futures.") or isinstance(executor, LocalProcesses))


def serve_if_worker(spec: WorkersSpec) -> None:
    """Under `mpiexec` or `srun` with workers `mpi`, serve as a worker in ranks other than 0: they do not return from
    here, but serve until rank 0 ends and then exit with code 0.

    Call it before anything that only one process may do. In rank 0, and with all other specs, it returns at once.

    Raises:
        SystemExit: in ranks other than 0, with code 0.
        UsageError: the launcher and mpi4py do not belong to the same MPI, or there is one process only.
        MissingPackage: mpi4py or MPI itself is not installed.
    """
    if isinstance(spec, str) and spec.strip() == "mpi":
        clusters.get_mpi_executor()
