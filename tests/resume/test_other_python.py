"""`ckpttool resume-verify --against-python`: the reference runs in another interpreter, with other versions of packages.

Both interpreters are environments of their own with the torch of these tests, and each with another version of trainer_kit, a package
that is made here; only the one that runs the command has ckpttool. docs/how-to/upgrade.md has a run with two versions of torch.
A run takes 20 s, since it starts the command and its ranks without forking: it is their start that is tested.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import ckpttool_here
from peers import REPOSITORY
from ranks import ENVIRONMENT, LIVE, one_at_a_time

from ckpttool.resume.ranks.interpreter import make_rank_environment

SOURCE = REPOSITORY / "fixtures" / "fsdp2_w2_groups" / "ckpt"
JOB = LIVE / "upgraded_job.py"

pytestmark = [pytest.mark.live, pytest.mark.slow]


class Pythons(NamedTuple):
    """The interpreter that the command runs in, another one, and a folder for whatever they write."""

    new: Path
    old: Path
    folder: Path


def make_python(folder: Path, path: Sequence[str], **packages: tuple[str, str]) -> Path:
    """Make an environment with other folders on its path, and packages {name: (version, text of the module)}."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text("\n".join(path))
    for name, (version, text) in packages.items():
        (site / f"{name}.py").write_text(text)
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Pythons:
    folder = tmp_path_factory.mktemp("pythons")
    path = [p for p in sys.path if p.endswith("site-packages")]
    code = make_rank_environment(str(folder))["PYTHONPATH"].partition(os.pathsep)[0]
    for name in ("torch", "json", "ckpttool"):  # none of them may be imported from the current folder
        (folder / f"{name}.py").write_text("raise SystemExit('planted')\n")
    return Pythons(
        make_python(folder / "new", [*path, code], trainer_kit=("2.0", "SCALE = 1.001\n")),
        make_python(folder / "old", path, trainer_kit=("1.0", "SCALE = 1.0\n")),
        folder,
    )


def verify(pythons: Pythons, job: str, *words: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, what --json printed, stderr) of two ranks, unless `words` say otherwise, and two steps."""
    command = [
        str(pythons.new), "-P", "-m", "ckpttool", "resume-verify", str(SOURCE), "--against-python", str(pythons.old), "--job", f"{JOB}:{job}",
        "--world-size", "2", "--steps", "2", "--global-batch", "8", "--micro-batch", "2", "--json", *words,
    ]  # fmt: skip
    with one_at_a_time():
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=pythons.folder, env={**os.environ, **ENVIRONMENT}
        )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_the_reference_and_its_noise_run_in_the_other_python_and_the_candidate_in_this_one(pythons: Pythons) -> None:
    junit = pythons.folder / "junit.xml"
    code, report, said = verify(pythons, "same", "--calibrate", "--junit", str(junit), "--report", str(pythons.folder))
    assert code == 0, said
    assert f"starting 2 ranks: reference, noise ({pythons.old})" in said and "starting 2 ranks: candidate\n" in said
    for side, python, version in (("candidate", pythons.new, "2.0"), ("reference", pythons.old, "1.0")):
        environment = report[side]["environment"]
        assert environment["executable"] == str(python)
        assert environment["packages"]["trainer_kit"] == version
        assert environment["packages"]["torch"] == environment["torch"]
    assert report["profile"] == "standard" and report["reference"]["source"] == report["candidate"]["source"]
    assert "faults of the checkpoint itself: both runs loaded it" in report["not_verified"]
    for text in (junit.read_text(), (pythons.folder / "report.html").read_text()):
        for version, python in (("2.0", pythons.new), ("1.0", pythons.old)):  # long paths are cut in the middle
            assert f"trainer_kit {version} (" in text and f"{python})"[-24:] in text
    assert not list((pythons.folder / "old").rglob("ckpttool*")), "it has our code only while it runs"


def test_a_job_whose_result_depends_on_the_version_of_a_package_fails_and_the_versions_are_named(
    pythons: Pythons,
) -> None:
    code, report, said = verify(pythons, "scaled", "--no-round-trip", "--world-size", "1")
    assert code == 10, said
    failed = {c["name"]: c for c in report["checks"] if c["verdict"] == "fail"}
    assert {"step1.loss", "step1.grad_norm"} <= failed.keys()
    assert failed["step1.loss"]["number"] == pytest.approx(0.001, rel=1e-3)
    assert any("trainer_kit is 2.0 and was 1.0" in line for cause in report["causes"] for line in cause["evidence"])


def test_a_rank_that_is_killed_there_is_named_with_its_python(pythons: Pythons) -> None:
    code, _, said = verify(pythons, "killed")
    assert code == 13, said
    error, note, _ = said.splitlines()[-3:]
    assert "error: rank 1 was killed by signal 9 (SIGKILL) in 'probing'. " in error, said
    assert note == f"note: the ranks of the reference run in {pythons.old} (--against-python)", said


OLD_TORCH = {"torch": ("2.9.1", "raise ImportError('it is not even imported')\n")}  # stands for a real one, of 2 GB


@pytest.mark.parametrize(
    ("path", "packages", "why"),
    [
        (False, {}, "zstandard, torch not installed. Type: {python} -m pip install 'blake3>=1.0' "),
        (True, OLD_TORCH, "torch is 2.9.1, and 2.10 is the oldest that ckpttool knows. Type: {python} -m pip install 'torch>=2.10'\n"),
        (True, {"torch": ("2.10.0", "raise OSError('libcudart.so.12: cannot open shared object file')")},
         "it cannot import torch: OSError: libcudart.so.12: cannot open shared object file.\n"),
    ],
    ids=["no torch", "an old torch", "a broken torch"],
)  # fmt: skip
def test_a_python_that_cannot_run_the_reference_is_refused_before_any_rank_starts(
    path: bool, packages: dict[str, tuple[str, str]], why: str, tmp_path: Path
) -> None:
    folders = [p for p in sys.path if p.endswith("site-packages")] if path else []
    python = make_python(tmp_path / "other", folders, **packages)
    error = refusal(python)
    assert error.startswith(f"error: --against-python {python}: ") and why.format(python=python) in error, error


def refusal(python: object, *words: str) -> str:
    """The one line that the command says."""
    done = ckpttool_here("resume-verify", SOURCE, "--job", f"{LIVE / 'operations_job.py'}:healthy", "--against-python", python, *words)  # fmt: skip
    error, more = done.stderr.splitlines(keepends=True)
    assert done.returncode == 2 and more.startswith("more: ckpttool explain CKPT02"), done.stderr
    return error


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "there is no such program. Name the python of another environment"),
        ("#!/bin/sh\nexit 0\n", "it is no Python.\n"),
        ("no script\n", "it cannot be run: [Errno 8] Exec format error"),
        # what Python 3.10 says
        ("#!/bin/sh\necho 'Unknown option: -P' >&2\necho 'usage: python3' >&2\nexit 2\n", "it is older than Python 3.11."),
    ],
)  # fmt: skip
def test_what_is_no_python_is_refused(script: str | None, why: str, tmp_path: Path) -> None:
    if script is not None:
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
    assert why in refusal(tmp_path / "python")


def test_a_recording_has_no_use_for_another_python(tmp_path: Path) -> None:
    said = refusal(sys.executable, "--reference", str(tmp_path / "recording.jsonl"))
    assert "--reference was recorded in its own Python, so --against-python would run nothing." in said


def test_a_rank_of_a_job_cannot_choose_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    said = refusal(sys.executable)
    assert "torchrun or srun started this job" in said and "pass --reference" in said


def test_every_package_that_ranks_need_is_checked(tmp_path: Path) -> None:
    """So that no requirement of pyproject.toml is passed over because it is written in another way."""
    import tomllib

    with open(REPOSITORY / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["project"]
    wanted = {line.partition(">=")[0] for line in [*project["dependencies"], "torch>=", "transformers>="]}
    python = make_python(tmp_path / "other", [])
    done = ckpttool_here(
        "resume-verify", SOURCE, "--config", SOURCE.parents[1] / "hf_llama" / "ckpt", "--against-python", python
    )
    words = shlex.split(done.stderr.splitlines()[0].partition(" -m pip install ")[2])
    assert {w.partition(">=")[0] for w in words} == wanted - {"rich", "typer"}, done.stderr
