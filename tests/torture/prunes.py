"""SIGKILL in the middle of `prune`: at a random call that opens, creates, renames, deletes or lists something.

    python -m tests.torture.prunes 100

After every kill, each step is whole or gone, those that policies keep are there, and the newest one is the same for `ls`,
`inspect --latest`, and transformers' get_last_checkpoint. The same command then succeeds and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool.engine.run_pruning import prune_run
from ckpttool.engine.runs import list_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.fwalk", "os.chmod"}
STEPS = range(100, 1300, 100)
Contents = dict[str, bytes]


def contents(folder: Path) -> Contents:
    """{path: bytes} of all files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def make_trainer(run: Path) -> None:
    """checkpoint-N of Hugging Face's Trainer, whose states name their step; best_metric is smallest at 400."""
    for step in STEPS:
        here = run / f"checkpoint-{step}"
        shutil.copytree(FIXTURES / "trainers" / "trainer_ddp" / "ckpt" / "checkpoint-3", here)
        state = json.loads((here / "trainer_state.json").read_text())
        state |= {"global_step": step, "best_metric": abs(step - 400) / 100 + 1}
        (here / "trainer_state.json").write_text(json.dumps(state))
    (run / "runs").mkdir()
    (run / "runs" / "events").write_text("x")


def make_deepspeed(run: Path) -> None:
    """global_stepN of ZeRO-3 at two ranks, a `latest` that names 1100, and a step whose file is a link into another one."""
    for step in STEPS:
        shutil.copytree(FIXTURES / "zero3_w2_tied" / "ckpt" / "global_step3", run / f"global_step{step}")
        (run / f"global_step{step}" / "note.txt").write_text(str(step))
    (run / "latest").write_text("global_step1100")
    (run / "global_step1200" / "note.txt").unlink()
    (run / "global_step1200" / "note.txt").symlink_to("../global_step300/note.txt")


def make_files(run: Path) -> None:
    """step_N.pt of a loop of one's own, of which two are names of one file."""
    for step in STEPS:
        shutil.copy(FIXTURES / "full_w1" / "ckpt" / "fqn.pt", run / f"step_{step}.pt")
    (run / "step_200.pt").unlink()
    os.link(run / "step_100.pt", run / "step_200.pt")


#: {kind of run: (what makes it, policies, steps that stay)}.
RUNS: dict[str, tuple[Callable[[Path], None], dict[str, Any], set[int]]] = {
    "trainer": (
        make_trainer,
        {"keep_last": 2, "keep_every": 500, "keep_best": "trainer_state.json:best_metric", "keep_best_mode": "min"},
        {400, 500, 1000, 1100, 1200},
    ),
    "deepspeed": (make_deepspeed, {"keep_last": 1}, {300, 1100, 1200}),
    "files": (make_files, {"keep_last": 3, "keep_every": 600}, {600, 1000, 1100, 1200}),
}


def in_child(run: Path, policies: dict[str, Any], kill_at: int) -> tuple[int, list[int]]:
    """`prune_run` in a forked process that is killed before its `kill_at`th call; (its status, [number of the first call
    that changes something, calls in all], both 0 where it was killed)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        count = first = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count, first
            if event in EVENTS:
                count += 1
                if event == "os.mkdir":
                    first = first or count
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(hook)
            prune_run(run, dry_run=False, **policies)
            status = 0
        finally:
            os.write(writing, f"{first} {count}".encode())
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), [int(n) for n in (said or "0 0").split()]


def step_of(name: str) -> int:
    """The step in a name."""
    return int(re.findall(r"\d+", name)[-1])


def find_last_as_transformers(run: Path) -> str | None:
    """What transformers' Trainer would resume from."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(run))


def judge(kind: str, run: Path, before: Contents, stays: set[int], finders: bool) -> list[str]:
    """What is wrong with a run after a kill."""
    bad = []
    now = contents(run)
    listed = list_run(run, look=False).steps
    for s in listed:
        part = {n: b for n, b in before.items() if n == s.name or n.startswith(f"{s.name}/")}
        here = {n: b for n, b in now.items() if n == s.name or n.startswith(f"{s.name}/")}
        if part != here:
            bad.append(f"{s.name} is listed ({s.state}), and has {len(here)} of {len(part)} files")
    if lost := stays - {s.step for s in listed if s.complete}:
        bad.append(f"steps {sorted(lost)} are not there")
    if other := [n for n, b in before.items() if "/" not in n and not re.search(r"\d", n) and now.get(n) != b]:
        bad.append(f"{other} changed")
    newest = run if kind == "deepspeed" else run / max((s.name for s in listed), key=step_of)
    if ckpttool.newest(run) != str(newest):  # DeepSpeed's folder is the save that its `latest` names
        bad.append(f"the newest is {ckpttool.newest(run)}")
    if kind == "trainer" and finders and find_last_as_transformers(run) != str(run / "checkpoint-1200"):
        bad.append(f"transformers finds {find_last_as_transformers(run)}")
    return bad


def kill(kind: str, number: int, work: Path, calls: dict[str, list[int]], finders: bool) -> list[str]:
    """One kill, judged: what is wrong, [] if nothing."""
    make, policies, stays = RUNS[kind]
    shutil.rmtree(work, ignore_errors=True)
    run = work / "run"
    run.mkdir(parents=True)
    make(run)
    before = contents(run)
    if kind not in calls:  # how many there are
        code, calls[kind] = in_child(run, policies, 0)
        return ([] if code == 0 else [f"prune ends with {code}"]) + judge(kind, run, before, stays, finders)
    first, last = calls[kind]
    at = random.Random(number).randint(first - 5, last)  # before, it only reads
    code, _ = in_child(run, policies, at)
    bad = judge(kind, run, before, stays, finders)
    done = prune_run(run, dry_run=False, **policies)
    if {s.step for s in list_run(run, look=False).steps} != stays or (done.deleted and code == 0):
        bad.append(f"the same command leaves {sorted(p.name for p in run.iterdir())}")
    if left := [p.name for p in run.iterdir() if p.name.startswith(".")]:
        bad.append(f"it leaves {left}")
    if prune_run(run, dry_run=False, **policies).deleted:
        bad.append("a third one deletes more")
    return [f"{kind}, killed at call {at} of {last} (status {code}): {b}" for b in bad]


def torture(points: int, first: int = 0, finders: bool = True) -> list[str]:
    """That many kills over all kinds of runs; what is wrong. `finders`: ask transformers, whose import takes seconds."""
    calls: dict[str, list[int]] = {}
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        for kind in RUNS:
            bad += kill(kind, 0, Path(work), calls, finders)
        for n in range(points):
            bad += kill(list(RUNS)[n % len(RUNS)], first + n, Path(work), calls, finders)
    return bad


if __name__ == "__main__":
    began = time.time()
    wrong = torture(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n".join(wrong) or f"{sys.argv[1]} kills, nothing wrong, {time.time() - began:.0f} s")
    sys.exit(bool(wrong))
