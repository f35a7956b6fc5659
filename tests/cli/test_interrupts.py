"""A signal at any moment: the program says what happened and what is there, exits with 130, and leaves nothing of no use.

`sitecustomize.py` sends the signal at the K-th event that Python audits (imports, opened files, renames, threads, ...), so that each
run is stopped at another place of the program, the same one in every repetition.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_SITE = """
import os, sys
count, begun, at, number = 0, False, int(os.environ["AT"]), int(os.environ["NUMBER"])
again = at + int(os.environ["AGAIN"] or 1 << 60)
def hook(event, args):
    global count, begun
    if not begun and event == "import" and str(args[0]).startswith("ckpttool.cli"):
        begun = True
    if begun:
        count += 1
        if count in (at, again):
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
if at < 0:
    import atexit
    atexit.register(lambda: open(os.environ["COUNT"], "w").write(str(count)))
"""

COMMANDS = [
    "inspect s.pt", "verify s.pt --read-data", "diff s.pt s.pt --json", "digest s.pt", "doctor s.pt --read-data", "layouts", "maps",
    "convert s.pt out --to dcp -n 2", "convert s.pt out.pt --force --json", "convert s.pt out --to dcp -n 2 --workers 2",
    "convert s.pt out --to zero3 -n 2 --dry-run", "audit export s.pt store/out.tar.zst", "audit list store", "audit verify store/a.tar.zst",
    "audit hold store/a.tar.zst why", "audit prune store --keep-last 1", "audit ledger verify store", "audit restore store/a.tar.zst out --to full",
    "clean .", "resume-verify s.pt --against s.pt --config nothing", "push s.pt hf://nobody/nothing --dry-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupts")
    weights = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(3)}
    slots = {n: {"step": torch.tensor(3.0), "exp_avg": t, "exp_avg_sq": t * t} for n, t in weights.items()}
    torch.save(
        {"model": weights, "optim": {"state": slots, "param_groups": [{"lr": 0.1, "params": list(weights)}]}},
        folder / "s.pt",
    )
    (folder / "out.pt").write_bytes((folder / "s.pt").read_bytes())
    (folder / "store").mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(_SITE)
    subprocess.run(
        [sys.executable, "-m", "ckpttool", "audit", "export", "s.pt", "store/a.tar.zst", "-q"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


def ran(
    made: Path, work: Path, command: str, at: int, number: int = signal.SIGINT, again: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A command in a copy of the folder, with a signal at its `at`-th event, and another one `again` events later; with -1 the events are
    counted."""
    shutil.copytree(made, work)
    env = {
        **os.environ, "PYTHONPATH": str(work / "site"), "AT": str(at), "NUMBER": str(int(number)), "AGAIN": str(again or ""), "COUNT": str(work / "count"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "ckpttool", *command.split()],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_at_any_moment_is_answered_with_what_is_there(made: Path, tmp_path: Path, command: str) -> None:
    whole = ran(made, tmp_path / "whole", command, -1)
    events = int((tmp_path / "whole" / "count").read_text())
    draw = random.Random(command)
    seen = 0
    for k in range(4):
        at = 1 if k == 0 else draw.randrange(1, events)
        number = draw.choice([signal.SIGINT, signal.SIGTERM])
        done = ran(made, tmp_path / str(k), command, at, number)
        where = (command, at, events, number, done)
        assert "Traceback" not in done.stderr and "ignored" not in done.stderr, where
        if done.returncode != 130:  # after the last thing to be done
            assert (done.returncode, done.stdout) == (whole.returncode, whole.stdout) or at > events * 0.5, where
            continue
        seen += 1
        assert re.search(r"^error: (interrupted|stopped)", done.stderr, re.MULTILINE), where
        if "--json" in command and done.stdout.count("{"):
            printed = json.loads(done.stdout)  # the result of a command that was interrupted after it, or the error
            assert printed.get("error", {"exit_code": 130})["exit_code"] == 130, where
        _as_it_says(tmp_path / str(k), done.stderr)
        shutil.rmtree(tmp_path / str(k))
    assert seen >= 2


def _as_it_says(work: Path, said: str) -> None:
    """The folder is as the message says, and nothing useless is left."""
    left = [
        p.name
        for p in (*work.iterdir(), *(work / "store").iterdir())
        if ".partial" in p.name or p.name.startswith(".out")
    ]
    assert bool(left) == ("to continue" in said), (left, said)
    there = (work / "out").exists() or (work / "store" / "out.tar.zst").exists()
    assert there == ("in place" in said or "is whole" in said or "export of out" in said), said
    lines = (work / "store" / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == (2 if "was written" in said and "Line" in said else 1), (lines, said)


def test_a_signal_before_anything_is_imported_has_a_line_too(made: Path, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        done = ran(made, tmp_path / str(number), "inspect s.pt --json", 1, number)
        said = "error: interrupted; nothing was changed.\nmore: ckpttool explain CKPT9900\n"
        assert (done.returncode, done.stderr) == (130, said)
        assert json.loads(done.stdout)["error"]["exit_code"] == 130


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["convert s.pt out --to dcp -n 2", "convert s.pt out.pt --force", "audit export s.pt store/out.tar.zst"]
)
def test_another_signal_while_the_first_one_is_answered(made: Path, tmp_path: Path, command: str) -> None:
    ran(made, tmp_path / "whole", command, -1)
    events = int((tmp_path / "whole" / "count").read_text())
    draw = random.Random(command)
    for k in range(3):
        at, again = draw.randrange(events // 2, events), draw.choice([1, 2, 5, 20])
        done = ran(made, tmp_path / str(k), command, at, signal.SIGINT, again)
        where = (command, at, again, events, done)
        assert "Traceback" not in done.stderr and "ignored" not in done.stderr and done.returncode in (0, 130), where
        assert done.returncode == 0 or re.search(r"^error: (interrupted|stopped)", done.stderr, re.MULTILINE), where
        subprocess.run(
            [sys.executable, "-m", "ckpttool", *command.split(), *([] if "--force" in command or done.returncode else ["--force"])],
            cwd=tmp_path / str(k), check=done.returncode == 130 and "in place" not in done.stderr and "whole" not in done.stderr, capture_output=True,
        )  # fmt: skip
        assert [p.name for p in (tmp_path / str(k)).iterdir() if ".partial" in p.name] == []
