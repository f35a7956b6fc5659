"""What --workers names: dask, Ray, MPI, factories, and how many local processes; what happens when a cluster loses a worker."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import worker_functions as functions
from programs import mpiexec, script, wait_for

from ckpttool import extras
from ckpttool.engine.workers import clusters, executors
from ckpttool.engine.workers import cores as cores_module
from ckpttool.engine.workers.executors import choose_process_count, open_workers
from ckpttool.errors import Corrupt, MissingPackage, RemoteError, UsageError, name_flags

# --------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    "spec", ["", "0", "-1", "1.5", "many", "dask", "dask:", "ray", "mpi:4", "a b:c", "os:", ":f", 0, -2, True], ids=repr
)
def test_a_spec_that_names_nothing_is_refused_with_what_there_is(spec: Any) -> None:
    with pytest.raises(UsageError, match=r"dask:tcp://HOST:8786.*ray:auto.*mpi.*MODULE:FACTORY"), open_workers(spec):
        pass


def test_a_factory_makes_an_executor_that_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ThreadPoolExecutor] = []
    monkeypatch.setattr(functions, "factory", lambda: made.append(ThreadPoolExecutor(3)) or made[0], raising=False)
    with open_workers("worker_functions:factory") as workers:
        assert (workers.count, workers.remote, workers.name) == (3, False, "worker_functions:factory")
        assert workers.executor.submit(functions.pid, "").result() == str(os.getpid())
    with pytest.raises(RuntimeError, match="after shutdown"):
        made[0].submit(functions.pid, "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "nonsense:factory",
            "No module named 'nonsense'. Install it next to ckpttool, or put its folder on PYTHONPATH",
        ),
        ("worker_functions:nonsense", "AttributeError: .*It must be a function without arguments"),
        ("worker_functions:pid", "TypeError: .*It must be a function without arguments"),
        ("worker_functions:no_cluster", r"failed: OSError: no nodes\. Nothing was begun"),
        ("os:getcwd", "returned str, not a concurrent.futures.Executor"),
    ],
)
def test_a_factory_that_makes_no_executor_is_refused(spec: str, message: str) -> None:
    with name_flags(), pytest.raises(UsageError, match=f"^--workers {spec}:? ?{message}"), open_workers(spec):
        pass


@pytest.mark.slow
def test_an_executor_of_the_caller_stays_open(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as mine:
        with open_workers(mine) as workers:
            assert (workers.count, workers.remote) == (1, False)
            running = workers.executor.submit(functions.sleep, "0.3")
            waiting = workers.executor.submit(functions.pid, "")
        assert waiting.cancelled() and not running.cancelled()
        assert mine.submit(functions.pid, "").result() == str(os.getpid())


def test_workers_of_another_version_or_without_ckpttool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as mine:
        monkeypatch.setattr(functions, "factory", lambda: mine, raising=False)
        monkeypatch.setattr(clusters, "get_worker_version", lambda text: "0.0.1")
        with (
            pytest.raises(
                UsageError, match=r"a worker has ckpttool 0\.0\.1, this is .*Install the same version everywhere"
            ),
            open_workers("worker_functions:factory"),
        ):
            pass
    with ThreadPoolExecutor(1) as mine:
        monkeypatch.setattr(functions, "factory", lambda: mine, raising=False)
        monkeypatch.setattr(clusters, "get_worker_version", functions.fault)
        with (
            pytest.raises(UsageError, match=r"a worker cannot run ckpttool \(KeyError.*Install ckpttool==.* where"),
            open_workers("worker_functions:factory"),
        ):
            pass


class Deaf(ThreadPoolExecutor):
    """An engine whose first worker never answers."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        return Future() if self.asked == 1 else super().submit(fn, *args, **kwargs)


@pytest.mark.slow
def test_another_worker_is_asked_when_the_first_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "WAIT", 1.2)
    with Deaf() as deaf:
        monkeypatch.setattr(functions, "factory", lambda: deaf, raising=False)
        with open_workers("worker_functions:factory") as workers:
            assert deaf.asked == 2 and workers.count == 2


@pytest.mark.slow
def test_an_engine_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "WAIT", 0.2)
    with ThreadPoolExecutor(1) as mine:
        frozen = clusters.Workers(mine, 3, True, "a cluster", lambda: time.sleep(2) or 3)
        with pytest.raises(
            RemoteError, match=r"a cluster has not answered for 0 seconds: its scheduler is stopped, or"
        ):
            frozen.count_now()

        def lost() -> int:
            raise OSError("refused")

        gone = clusters.Workers(mine, 3, True, "a cluster", lost)
        assert gone.count_now() == 3  # as far as is known
        time.sleep(0.25)
        with pytest.raises(RemoteError, match=r"its scheduler is gone \(OSError: refused\)\. When it answers again"):
            gone.count_now()


@pytest.mark.parametrize(
    ("spec", "package", "extra"),
    [("dask:tcp://h:1", "distributed", "dask"), ("ray:auto", "ray", "ray"), ("mpi", "mpi4py", "mpi")],
)
def test_a_missing_package_is_named_with_its_extra(
    spec: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else object())
    with (
        pytest.raises(
            MissingPackage, match=rf"needs {package}, which is not installed: pip install 'ckpttool\[{extra}\]'"
        ),
        open_workers(spec),
    ):
        pass


# ----------------------------------------------------------------------------------------------------- how many cores


@pytest.mark.parametrize(
    ("cores", "nbytes", "count"),
    [
        (2, 10**12, 1),
        (3, 10**12, 1),
        (4, 10**12, 2),
        (4, 3 * 10**9, 1),
        (12, 10**12, 6),
        (128, 10**12, 8),
        (128, 10**8, 1),
    ],
)
def test_the_default_follows_from_the_machine_and_the_work(
    cores: int, nbytes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "count_usable_cores", lambda: cores)
    monkeypatch.setattr(executors, "find_usable_memory", lambda: None)
    assert choose_process_count(nbytes) == count
    with open_workers(None, nbytes) as workers:
        assert workers.count == count and not workers.remote


@pytest.mark.parametrize(("room", "count"), [(1 << 40, 8), (3 << 30, 6), (600 << 20, 1), (1 << 20, 1), (None, 8)])
def test_the_default_leaves_memory_for_each_worker(
    room: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "count_usable_cores", lambda: 64)
    monkeypatch.setattr(executors, "find_usable_memory", lambda: room)
    assert choose_process_count(10**12) == count


def test_memory_is_that_of_the_machine_or_of_the_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def limits(root: Path, text: str) -> list[int]:
        (tmp_path / "membership").write_text(text)
        return list(cores_module._read_memory_limits(str(root), str(tmp_path / "membership")))

    v2 = tmp_path / "v2"
    (v2 / "pod" / "job").mkdir(parents=True)
    (v2 / "pod" / "memory.max").write_text("2147483648\n")
    (v2 / "pod" / "job" / "memory.max").write_text("max\n")
    assert limits(v2, "0::/pod/job\n") == [2 << 30] and limits(v2, "0::/other\n") == []
    v1 = tmp_path / "v1" / "memory" / "a"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("1073741824\n")
    assert limits(tmp_path / "v1", "5:memory:/a\n4:cpu,cpuacct:/a\n") == [1 << 30]
    machine = cores_module.find_usable_memory()
    assert machine is not None and machine > 1 << 20
    monkeypatch.setattr(cores_module, "_read_memory_limits", lambda: iter([1 << 20]))
    assert cores_module.find_usable_memory() == 1 << 20


def test_cores_are_those_of_the_affinity_mask_and_the_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    def quotas(root: Path, text: str) -> list[float]:
        (tmp_path / "membership").write_text(text)
        return list(cores_module._read_cpu_quotas(str(root), str(tmp_path / "membership")))

    v2 = tmp_path / "v2"
    (v2 / "slurm" / "job").mkdir(parents=True)
    (v2 / "slurm" / "cpu.max").write_text("650000 100000\n")
    (v2 / "slurm" / "job" / "cpu.max").write_text("max 100000\n")
    assert quotas(v2, "0::/slurm/job\n") == [6.5]
    assert quotas(v2, "0::/elsewhere/on/the/host\n") == []
    (v2 / "cpu.max").write_text("50000 100000\n")
    assert quotas(v2, "0::/elsewhere/on/the/host\n") == [0.5]
    v1 = tmp_path / "v1"
    (v1 / "cpu" / "a").mkdir(parents=True)
    for name, text in (("cpu.cfs_quota_us", "400000\n"), ("cpu.cfs_period_us", "100000\n")):
        (v1 / "cpu" / "a" / name).write_text(text)
        (v1 / "cpu" / name).write_text("-1\n" if "quota" in name else text)
    assert quotas(v1, "5:memory:/a\n4:cpu,cpuacct:/a\n") == [4.0]
    for found, cores in (([6.5], 6), ([0.5], 1), ([64.0], 16), ([], 16)):
        monkeypatch.setattr(cores_module, "_read_cpu_quotas", lambda found=found: iter(found))
        assert cores_module.count_usable_cores() == cores


# ---------------------------------------------------------------------------------------------------------------- dask


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    with distributed.LocalCluster(
        n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as found:
        yield found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_works_with_four_workers_and_survives_the_death_of_one(cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": cluster.scheduler_address}))
    (tmp_path / "meet").mkdir()
    with open_workers(f"dask:{cluster.scheduler_address}") as workers:
        assert (workers.count, workers.remote) == (4, True)
        assert workers.name == f"dask {cluster.scheduler_address}"
        found = {f.result() for f in [workers.executor.submit(functions.meet, f"{tmp_path}/meet:4") for _ in range(4)]}
        assert len(found) == 4 and "alone" not in found
        with pytest.raises(Corrupt, match=r"x is damaged"):
            workers.executor.submit(functions.corrupt, "x").result()
        # the scheduler gives what the dead worker had to another one
        assert workers.executor.submit(functions.die_once, f"{tmp_path}/died").result()
    with open_workers(f"dask:{file}") as workers:
        first, again = (workers.executor.submit(functions.pid, "same").result() for _ in range(2))
        assert first and again
        pending = workers.executor.submit(functions.sleep, "30")
    assert pending.cancelled()


@pytest.mark.slow
def test_a_dask_worker_that_is_stopped_is_named_and_gets_no_request_twice(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clusters, "PROMPT", 1.0)
    assert wait_for(lambda: len(cluster.scheduler.workers) == 4, 30), (
        "the one that an earlier test killed is started again"
    )
    # one whose address is known: that of the one that was started again may still be the old one
    stopped = next(w for w in cluster.workers.values() if w.worker_address in cluster.scheduler.workers)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        with (
            pytest.warns(clusters.FrozenWorkers, match=rf"1 of 4 workers do not answer: {stopped.worker_address}\."),
            open_workers(f"dask:{cluster.scheduler_address}") as workers,
        ):
            first = [workers.submit(functions.sleep, "0.1") for _ in range(4)]
            assert wait_for(lambda: any(f.done() for f in first), 10)
            time.sleep(1)
            silent = [f for f in first if not f.done()]  # one or more, as dask spreads them
            assert silent
            again = [workers.submit(functions.pid, "", silent) for _ in range(4)]
            assert stopped.pid not in [int(f.result(20)) for f in again]
    finally:
        os.kill(stopped.pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_workers_without_ckpttool_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "__version__", "9.9")
    with (
        pytest.raises(UsageError, match=r"the scheduler has ckpttool \d.*, this is 9\.9"),
        open_workers(f"dask:{cluster.scheduler_address}"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_that_loses_its_workers_or_its_scheduler_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    monkeypatch.setattr(clusters, "WAIT", 3.0)
    monkeypatch.setattr(clusters, "GONE", 0.3)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50) as lost,
        open_workers(f"dask:{lost.scheduler_address}") as workers,
    ):
        assert workers.count == workers.count_now() == 2
        lost.scale(1)
        assert wait_for(lambda: workers.count_now() == 1, 5)
        lost.scale(0)
        assert wait_for(lambda: workers.count_now() is None, 5)
        time.sleep(0.4)
        with pytest.raises(RemoteError, match=r"has had no worker for 0 seconds\. Start workers, then run the same"):
            workers.count_now()
        waiting = workers.executor.submit(functions.pid, "")
        lost.close()
        with pytest.raises(CancelledError):
            waiting.result(8)
        with pytest.raises(RemoteError, match=r"takes no more work \(.*\)\. Run the same command again"):
            for _ in range(80):  # until the client no longer tries to connect again
                time.sleep(0.1)
                workers.executor.submit(functions.pid, "")
        assert workers.count_now() == 2  # as far as is known


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_dask_without_scheduler_or_workers_says_what_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    monkeypatch.setattr(clusters, "WAIT", 0.5)
    for spec, message in (
        ("dask:tcp://127.0.0.1:9", r"no scheduler answers \(.*Start one with `dask scheduler`"),
        (
            f"dask:{tmp_path}/s.json",
            r"s\.json: no scheduler file after 0 seconds. Start one: dask scheduler --scheduler-file",
        ),
    ):
        with pytest.raises(RemoteError, match=message), open_workers(spec):
            pass
    with pytest.raises(UsageError, match="unknown address scheme 'foo'"), open_workers("dask:foo://127.0.0.1:9"):
        pass
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None, silence_logs=50) as empty,
        pytest.raises(RemoteError, match=r"no worker took a request in 0 seconds\. Start workers"),
        open_workers(f"dask:{empty.scheduler_address}"),
    ):
        pass


# ----------------------------------------------------------------------------------------------------------------- Ray

RAY = """
import os, sys, time
import ray
import worker_functions as functions
from ckpttool.engine.workers.executors import open_workers
from ckpttool.errors import Corrupt, RemoteError

try:
    with open_workers("ray:127.0.0.1:9"): pass
except RemoteError as e:
    assert "no Ray cluster answers" in str(e) and "ray start --head" in str(e), e
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=sys.argv[2])
with open_workers("ray:auto") as workers:
    assert (workers.count, workers.remote, workers.name) == (4, True, "Ray at auto")
    found = {f.result() for f in [workers.executor.submit(functions.meet, sys.argv[1] + "/meet:4") for _ in range(4)]}
    assert len(found) == 4 and "alone" not in found, found
    e = workers.executor.submit(functions.corrupt, "x").exception()
    assert isinstance(e, Corrupt) and "x is damaged" in str(e), e
    e = workers.executor.submit(functions.die_once, sys.argv[1] + "/died").exception()
    assert type(e).__name__ == "WorkerCrashedError", e
    assert workers.executor.submit(functions.die_once, sys.argv[1] + "/died").result()
    os.mkdir(sys.argv[1] + "/pids")
    workers.executor.submit(functions.announce_and_sleep, sys.argv[1] + "/pids")
    while not os.listdir(sys.argv[1] + "/pids"): time.sleep(0.01)
assert ray.is_initialized()  # it is the caller's
pid = os.listdir(sys.argv[1] + "/pids")[0]
end = time.monotonic() + 3
while os.path.exists("/proc/" + pid) and time.monotonic() < end: time.sleep(0.02)
assert not os.path.exists("/proc/" + pid)
print("ok")
"""


@pytest.mark.slow
def test_ray_works_with_four_workers_and_fails_the_future_of_one_that_dies(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    import shutil
    import tempfile

    (tmp_path / "meet").mkdir()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets have paths of at most 107 bytes
    try:
        program = script(RAY, tmp_path, folder, env={"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
        out, err = program.communicate(timeout=60)
        said = out.splitlines()[-1:]  # Ray may report the death of the worker before it
        assert (program.returncode, said) == (0, ["ok"]), (out, err)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------- MPI

MPI = """
import os, sys, time
import typer
import worker_functions as functions
from ckpttool.cli.shared_options import Workers
from ckpttool.engine.workers.executors import open_workers
from ckpttool.errors import Corrupt

def command(folder: str, then: str, workers: Workers = None, n: int = 3) -> None:
    print("in the command", flush=True)
    if then == "early":
        sys.exit(4)
    for again in ("a", "b"):
        with open_workers(workers) as found:
            assert found.count == n and found.remote and "MPI" in found.name, found
            os.mkdir(f"{folder}/{again}")
            pids = {f.result() for f in [found.executor.submit(functions.meet, f"{folder}/{again}:{n}") for _ in range(n)]}
            assert len(pids) == n and not pids & {"alone", str(os.getpid())}, pids
            e = found.executor.submit(functions.corrupt, "x").exception()
            assert isinstance(e, Corrupt), e
            if then == "late":
                sys.exit(5)
            if then == "die":
                found.executor.submit(functions.die_once, f"{folder}/died").result()
            if then == "interrupt":
                found.executor.submit(functions.announce_and_sleep, f"{folder}/pids").result()

if __name__ == "__main__":
    typer.run(command)
"""


def mpi(n: int, *arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return script(MPI, *arguments, before=mpiexec(n) if n else (), env=env or {})


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("", 0), ("early", 4), ("late", 5)])
def test_mpiexec_runs_the_command_once_and_the_other_ranks_work(then: str, code: int, tmp_path: Path) -> None:
    program = mpi(4, tmp_path, then, "--workers", "mpi")
    out, err = program.communicate(timeout=60)
    assert program.returncode == code, err
    assert out.count("in the command") == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    program = mpi(4, tmp_path, "die", "--workers", "mpi")
    out, _ = program.communicate(timeout=60)
    assert program.returncode != 0 and out.count("in the command") == 1


@pytest.mark.slow
def test_a_rank_that_is_stopped_does_not_keep_the_command_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    code = """
import os, signal, sys
import worker_functions as functions
from ckpttool.engine.workers import clusters
from ckpttool.engine.workers.executors import serve_if_worker, open_workers
clusters.PROMPT = 0.5
serve_if_worker("mpi")
with open_workers("mpi") as found:
    found.submit(functions.announce_and_sleep, sys.argv[1])
    while not os.listdir(sys.argv[1]): pass
    os.kill(int(os.listdir(sys.argv[1])[0]), signal.SIGSTOP)
    print(found.submit(functions.sleep, "0").result() != "", flush=True)
clusters.end_mpi_ranks(7)
"""
    program = script(code, tmp_path / "pids", before=mpiexec(3))
    out, err = program.communicate(timeout=30)
    assert (program.returncode, out) == (7, "True\n") and "a rank of MPI has not answered for" in err, err


@pytest.mark.slow
def test_mpi_spawns_workers_where_one_process_was_started(tmp_path: Path) -> None:
    program = mpi(0, tmp_path, "", "--workers", "mpi", env={"MPI4PY_FUTURES_MAX_WORKERS": "3"})
    out, err = program.communicate(timeout=60)
    assert (program.returncode, out.count("in the command")) == (0, 1), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "there is one process only. Start it with mpiexec"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "8 processes were started"),
    ],
)
def test_mpi_that_does_not_connect_the_processes_is_refused(env: dict[str, str], message: str, tmp_path: Path) -> None:
    _, err = mpi(0, tmp_path, "", "--workers", "mpi", env=env).communicate(timeout=60)
    assert "UsageError" in err and message in " ".join(err.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_logs_that_have_tracebacks_of_a_lost_scheduler_are_silent_until_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Which logs these are, `python -m tests.torture.frozen --engine dask` has shown: a scheduler is killed there."""
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    names = ("distributed.client", "tornado.application", "concurrent.futures")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, silence_logs=50
        ) as cluster,
        clusters.dask_workers(cluster.scheduler_address),
    ):
        assert not any(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in names)
    assert all(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in names)
