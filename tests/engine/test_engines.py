"""Every layout as target, filled by local processes or by ranks of MPI, every third one by dask and Ray: the bytes of one
process.

Real clusters, each on this machine. What a worker does with a part does not depend on who sent it. With EVERY=1, local
processes and ranks of MPI fill all layouts, each.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import TESTS, mpiexec, script
from sampling import sample
from test_parts import FSDP2, SUFFIX, TARGETS, contents, convert

import ckpttool

pytestmark = pytest.mark.slow

CONVERT_ALL = """
import json, sys
from pathlib import Path
from ckpttool.engine.workers import parts
from ckpttool.engine.workers.executors import serve_if_worker

def convert_all(spec, out):
    serve_if_worker(spec)
    from test_engines import filled_by
    from test_parts import FSDP2, convert
    parts._LEAST_BYTES, parts._LEAST_BYTES_OF_A_FILE = 8 << 10, 1 << 10
    found = [convert(FSDP2, Path(out, to + suffix), to, workers=spec).workers for to, suffix in filled_by(spec).items()]
    print(json.dumps(found))
"""
RAY = """
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=sys.argv[2])
"""
FILLED = {to: SUFFIX.get(to, "") for to in TARGETS if to != "audit"}  # an archive is written by one process


def filled_by(spec: str) -> dict[str, str]:
    """{layout: suffix of its files} of the targets that these workers fill."""
    every = list(FILLED)
    if spec.startswith(("dask", "ray")):
        return {to: FILLED[to] for to in every[::3]}
    first = 1 if spec == "mpi" else 2  # so that the three kinds of workers fill all of them
    return {to: FILLED[to] for to in sample(f"layouts filled by --workers {spec}", every, every[first::3])}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """{layout: {file: bytes}} as one process writes them."""
    out = tmp_path_factory.mktemp("one")
    for to, suffix in FILLED.items():
        convert(FSDP2, out / (to + suffix), to, workers=1)
    return {to: contents(out / (to + suffix)) for to, suffix in FILLED.items()}


def run(tmp_path: Path, spec: str, code: str = "", *arguments: str, before: tuple[str, ...] = (), **env: str) -> Any:
    """What the workers of each conversion say, in a program that converts to every layout."""
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "engine")]), **env}
    code = f"{CONVERT_ALL}{code}convert_all({spec!r}, sys.argv[1])\n"
    program = script(code, tmp_path, *arguments, before=before, env=env)
    out, err = program.communicate(timeout=100)
    assert program.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def check(
    tmp_path: Path, wanted: dict[str, dict[str, bytes]], spec: str, count: int, found: list[dict[str, Any]]
) -> None:
    assert len(found) == len(filled_by(spec)) >= 5 and {w["count"] for w in found} == {count}
    assert max(w["parts"] for w in found) > 8 and {w["again"] for w in found} == {0}
    for to, suffix in filled_by(spec).items():
        assert contents(tmp_path / (to + suffix)) == wanted[to], to


def test_local_processes(tmp_path: Path, wanted: dict[str, dict[str, bytes]]) -> None:
    assert len(FILLED) >= 14
    check(tmp_path, wanted, "2", 2, run(tmp_path, "2"))


def test_mpiexec(tmp_path: Path, wanted: dict[str, dict[str, bytes]]) -> None:
    check(tmp_path, wanted, "mpi", 3, run(tmp_path, "mpi", before=mpiexec(4)))


@pytest.fixture
def dask() -> Iterator[str]:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    with distributed.LocalCluster(
        n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as found:
        yield f"dask:{found.scheduler_address}"


@pytest.mark.filterwarnings("ignore")
def test_dask(tmp_path: Path, wanted: dict[str, dict[str, bytes]], dask: str) -> None:
    check(tmp_path, wanted, dask, 4, run(tmp_path, dask))


def test_ray(tmp_path: Path, wanted: dict[str, dict[str, bytes]]) -> None:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets have paths of at most 107 bytes
    try:
        found = run(tmp_path, "ray:auto", RAY, folder, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check(tmp_path, wanted, "ray:auto", 4, found)


def test_the_command_under_mpiexec_prints_once(tmp_path: Path) -> None:
    code = "from ckpttool.cli.main import main; main()"
    words = [str(FSDP2), "--workers", "mpi", "--json"]
    program = script(code, "digest", *words, before=mpiexec(3))
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    assert json.loads(out)["digest"] == ckpttool.digest(FSDP2).digest
    program = script(code, "digest", str(tmp_path / "nothing"), *words[1:], before=mpiexec(3))
    out, err = program.communicate(timeout=60)
    assert program.returncode == 3 and err.count("error:") == 1
    assert json.loads(out)["error"]["exit_code"] == 3
