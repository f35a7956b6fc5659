"""Modules planted in the current folder, beside the checkpoint and beside the config: no command runs one of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import REPOSITORY
from programs import mpiexec

sys.path.insert(0, str(REPOSITORY))

from tests.torture import planted

pytestmark = pytest.mark.slow

#: Writes the name of every module that any process of a command looks for, also of those that are nowhere.
RECORDER = """
import os, sys
class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None:
            with open(os.environ["RECORD"], "a") as f:
                f.write(name + "\\n")
sys.meta_path.insert(0, Recorder)
"""
COMMANDS = list(planted.COMMANDS)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[planted.Field, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("field")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(RECORDER)
    with planted.surroundings(folder) as environment:
        made = planted.Field(folder).prepare()
        made.plant(planted.names_for("-m"))
        yield made, {**environment, "PYTHONPATH": str(folder / "site"), "RECORD": str(folder / "record")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_nothing_that_was_planted(field: tuple[planted.Field, dict[str, str]], name: str) -> None:
    found, environment = field
    launcher, where = ("command", "-m")[COMMANDS.index(name) % 2], ("ck", "conf", "here")[COMMANDS.index(name) % 3]
    bad, said = found.run(name, launcher, where, environment)
    assert not bad, f"{bad}\n{said}"


def test_every_module_that_a_command_looks_for_was_planted(field: tuple[planted.Field, dict[str, str]]) -> None:
    """After the tests above, in the same process."""
    record = Path(field[1]["RECORD"])
    if not record.exists():
        pytest.skip("no command was run")
    theirs = {"ckpttool", "recipe", "beside", "sitecustomize"}
    missing = sorted(set(record.read_text().split()) - set(planted.NAMES) - theirs)
    assert not missing, " ".join(missing)


def test_a_planted_ckpttool_is_found_by_python_m_alone(field: tuple[planted.Field, dict[str, str]]) -> None:
    """Python's own rule, which the docs tell; the two other ways to start it do not follow it."""
    found, environment = field
    found.plant(["ckpttool"])
    try:
        assert found.run("layouts", "-m", "ck", environment)[0] != []
        for launcher in ("command", "-P -m"):
            assert found.run("layouts", launcher, "ck", environment)[0] == []
    finally:
        found.plant(planted.names_for("-m"))


# ------------------------------------------------------------------------------------------------- workers elsewhere


def digested(field: tuple[planted.Field, dict[str, str]], begin: tuple[str, ...], spec: str, **more: str) -> None:
    """Digest a checkpoint on workers, with everything planted in the current folder, which is its own."""
    found, environment = field
    found.canary.unlink(missing_ok=True)
    words = ["digest", found.words["ck"], "--workers", spec, "-q"]
    environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"} | more
    done = subprocess.run(
        [*begin, *planted.program("command"), *words],
        cwd=found.places["ck"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert not found.canary.exists(), found.canary.read_text()
    assert done.returncode == 0 and "blake3:" in done.stdout, done.stderr


def test_ranks_of_mpi_run_nothing_that_was_planted(field: tuple[planted.Field, dict[str, str]]) -> None:
    digested(field, mpiexec(3), "mpi")


def test_ranks_that_mpi4py_starts_itself_run_nothing_that_was_planted(
    field: tuple[planted.Field, dict[str, str]],
) -> None:
    digested(field, mpiexec(1), "mpi", MPI4PY_FUTURES_MAX_WORKERS="2")


def test_workers_of_dask_run_nothing_that_was_planted(
    field: tuple[planted.Field, dict[str, str]], tmp_path: Path
) -> None:
    """Scheduler and workers are started in the folder, too, as the page on workers has it."""
    pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    found, environment = field
    environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}
    file, dask = tmp_path / "dask.json", str(Path(sys.executable).with_name("dask"))
    options = ["--scheduler-file", str(file), "--no-dashboard"]
    found.canary.unlink(missing_ok=True)
    running = [
        subprocess.Popen(
            [dask, *words, *options], cwd=found.places["ck"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for words in (["scheduler", "--port", "0", "--host", "127.0.0.1"], ["worker", "--nthreads", "1", "--local-directory", str(tmp_path)])
    ]  # fmt: skip
    try:
        digested(field, (), f"dask:{file}")
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait()
    assert not found.canary.exists(), found.canary.read_text()


def test_workers_of_ray_run_nothing_that_was_planted(field: tuple[planted.Field, dict[str, str]]) -> None:
    """The driver is in the folder; Ray itself would put that on the path of its workers."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets have paths of at most 107 bytes
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    code = """
import os, subprocess, sys, ray
folder, place, words = sys.argv[1], sys.argv[2], sys.argv[3:]
address = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder).address_info["gcs_address"]
sys.exit(subprocess.run([*words, "--workers", "ray:" + address], cwd=place).returncode)
"""
    found, environment = field
    found.canary.unlink(missing_ok=True)
    environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"} | quiet
    words = [*planted.program("command"), "digest", found.words["ck"], "-q"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, folder, str(found.places["ck"]), *words], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not found.canary.exists(), found.canary.read_text()
    assert done.returncode == 0 and "blake3:" in done.stdout, done.stderr
