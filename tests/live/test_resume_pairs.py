"""Any trainer resumes from the checkpoint of any other, at another world size, as if it had never stopped.

fixtures/trainers/jobs holds what the trainers wrote after three steps of one and the same job on two ranks
(fixtures/resume_jobs.py). PAIRS=all runs every pair; without it there is one for each trainer and state dict type.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time

pytestmark = [pytest.mark.live, pytest.mark.slow]

JOBS = FIXTURES / "trainers" / "jobs"
#: Losses of steps 3 to 5 of the job that was never stopped; every trainer has the same ones.
UNINTERRUPTED = [5.068902492523193, 5.127249717712402, 5.210421085357666]
SOURCES = ("accelerate", "trainer", "trainer-full", "lightning", "torchtitan", "torch", "deepspeed")
TARGETS = ("accelerate", "accelerate-full", "trainer", "trainer-full", "lightning", "torchtitan", "torch", "deepspeed")
SOME = (
    ("trainer", "accelerate"), ("lightning", "accelerate-full"), ("torch", "trainer"), ("accelerate", "trainer-full"),
    ("deepspeed", "lightning"), ("trainer", "torchtitan"), ("torchtitan", "torch"), ("trainer-full", "deepspeed"),
)  # fmt: skip
PAIRS = [(s, t) for s in SOURCES for t in TARGETS] if os.environ.get("PAIRS") == "all" else SOME


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{s}-to-{t}" for s, t in PAIRS])
def test_a_trainer_goes_on_from_the_checkpoint_of_another(source: str, target: str, tmp_path: Path) -> None:
    trainer, _, kind = target.partition("-")
    words = ["convert", JOBS / source, tmp_path / "out", "--for", trainer, "-n", "3"]
    done = ckpttool_here(*words, *(["--state-dict-type", kind] if kind else []))
    assert done.returncode == 0, done.stderr
    job = [str(REPOSITORY / "fixtures" / "resume_jobs.py"), target, str(tmp_path / "out"), "resume"]
    with one_at_a_time():
        NURSERIES.launch(3, job, tmp_path / "log", **ENVIRONMENT, TORCHELASTIC_RUN_ID="resume")
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"LOSSES (\[.*\])", log)
    assert found, log[-3000:]
    assert json.loads(found[1]) == pytest.approx(UNINTERRUPTED, abs=2e-6)
