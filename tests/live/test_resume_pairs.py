"""Any trainer resumes from the checkpoint of any other, at another world size, as if it had never stopped.

fixtures/trainers/jobs holds what the trainers wrote after three steps of one and the same job on two ranks
(fixtures/resume_jobs.py). EVERY=1 runs every pair; without it each trainer is the source of one pair.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time
from sampling import sample

pytestmark = [pytest.mark.live, pytest.mark.slow]

JOBS = FIXTURES / "trainers" / "jobs"
#: Losses of steps 3 to 5 of the job that was never stopped; every trainer has the same ones.
UNINTERRUPTED = [5.068902492523193, 5.127249717712402, 5.210421085357666]
SOURCES = ("accelerate", "trainer", "trainer-full", "lightning", "torchtitan", "torch", "deepspeed")
TARGETS = (
    "accelerate", "accelerate-full", "accelerate-ddp", "trainer", "trainer-full", "trainer-ddp", "lightning", "torchtitan", "torch",
    "deepspeed", "llamafactory", "llamafactory-ddp", "verl",
)  # fmt: skip
SOME = (
    ("lightning", "accelerate-full"), ("accelerate", "trainer-full"), ("deepspeed", "lightning"), ("trainer", "torchtitan"),
    ("torchtitan", "torch"), ("trainer-full", "deepspeed"), ("torch", "llamafactory"),
)  # fmt: skip
#: Programs whose own code saves the checkpoint here, at two ranks (fixtures/foreign_jobs.py): {program: a module of it}.
PROGRAMS = {
    "verl": "verl", "skyrl": "skyrl", "nemo-rl": "nemo_rl.utils", "prime-rl": "prime_rl", "xtuner": "xtuner.v1", "veomni": "veomni",
    "automodel": "nemo_automodel",
}  # fmt: skip
PAIRS = sample("pairs of trainers", [(s, t) for s in SOURCES for t in TARGETS], SOME)


def is_installed(module: str) -> bool:
    """Whether a module can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{s}-to-{t}" for s, t in PAIRS])
def test_a_trainer_goes_on_from_the_checkpoint_of_another(source: str, target: str, tmp_path: Path) -> None:
    convert(JOBS / source, tmp_path / "out", *arguments(target))
    assert losses(target, tmp_path / "out", 3) == pytest.approx(UNINTERRUPTED, abs=2e-6)


@pytest.mark.parametrize("target", ["trainer", "verl", "torchtitan"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trainer_goes_on_from_what_the_code_of_a_program_saves(program: str, target: str, tmp_path: Path) -> None:
    if not is_installed(PROGRAMS[program]):
        pytest.skip(f"{program} is not installed")
    step = tmp_path / program / "step_3"
    step.parent.mkdir()
    saved = losses(program, step, 2, "resume_jobs.py" if program == "verl" else "foreign_jobs.py", resume=False)
    assert saved == pytest.approx(UNINTERRUPTED, abs=2e-6)
    numbered = ["--like", JOBS / "torch"] if program in ("verl", "skyrl") else []
    convert(step, tmp_path / "out", *arguments(target), *numbered)
    assert losses(target, tmp_path / "out", 3) == pytest.approx(UNINTERRUPTED, abs=2e-6)


@pytest.mark.skipif(not is_installed("skyrl"), reason="SkyRL is not installed")
def test_skyrl_goes_on_from_files_written_for_verl(tmp_path: Path) -> None:
    """It has verl's files of ranks, in policy/."""
    convert(JOBS / "torch", tmp_path / "out", *arguments("verl"))
    (tmp_path / "out" / "actor").rename(tmp_path / "out" / "policy")
    assert losses("skyrl", tmp_path / "out", 3, "foreign_jobs.py") == pytest.approx(UNINTERRUPTED, abs=2e-6)


@pytest.mark.skipif(not is_installed("xtuner.v1"), reason="xtuner is not installed")
@pytest.mark.parametrize("source", ["torch", "trainer"])
def test_the_code_of_xtuner_goes_on_from_what_is_written_for_it(source: str, tmp_path: Path) -> None:
    convert(JOBS / source, tmp_path / "out", *arguments("xtuner"))
    assert losses("xtuner", tmp_path / "out", 3, "foreign_jobs.py") == pytest.approx(UNINTERRUPTED, abs=2e-6)


def arguments(target: str) -> list[str]:
    """Those of `convert` for a kind of job at three ranks."""
    trainer, _, kind = target.partition("-")
    device = ["--mesh-device", "cpu"] if trainer == "verl" else []
    return ["--for", trainer, "-n", "3", *(["--state-dict-type", kind] if kind else []), *device]


def test_a_trainer_of_one_process_goes_on_without_fsdp(tmp_path: Path) -> None:
    convert(JOBS / "trainer", tmp_path / "out", "--for", "trainer", "-n", "1")
    assert losses("trainer-ddp", tmp_path / "out", 1) == pytest.approx(UNINTERRUPTED, abs=2e-6)


def test_there_and_back(tmp_path: Path) -> None:
    """docs/how-to/trainers.md: the sharded checkpoint of Trainer becomes one of DeepSpeed, and that one of Trainer at three ranks."""
    convert(JOBS / "trainer", tmp_path / "zero3", "--for", "deepspeed", "-n", "2")
    assert losses("deepspeed", tmp_path / "zero3", 2) == pytest.approx(UNINTERRUPTED, abs=2e-6)
    convert(tmp_path / "zero3", tmp_path / "back", "--for", "trainer", "-n", "3")
    assert losses("trainer", tmp_path / "back", 3) == pytest.approx(UNINTERRUPTED, abs=2e-6)


def convert(*words: str | Path) -> None:
    done = ckpttool_here("convert", *words)
    assert done.returncode == 0, done.stderr


def losses(kind: str, path: Path, ranks: int, jobs: str = "resume_jobs.py", resume: bool = True) -> list[float]:
    """Of steps 3 to 5 of a job that resumes, or that saves before them and goes on."""
    log = path.with_name(f"{path.name}.log")
    job = [str(REPOSITORY / "fixtures" / jobs), kind, str(path), *(["resume"] if resume else [])]
    with one_at_a_time():
        NURSERIES.launch(ranks, job, log, **ENVIRONMENT, TORCHELASTIC_RUN_ID="resume")
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"LOSSES (\[.*\])", text)
    assert found, text[-3000:]
    return list(json.loads(found[1]))
