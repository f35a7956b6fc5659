"""What a long run tells: a bar from Python, lines that fit the terminal, and records of the logger "ckpttool"."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import FIXTURES

import ckpttool
from ckpttool.huggingface import hub_names

DCP = FIXTURES / "fsdp2_w3" / "ckpt"


def on_terminal(code: str, columns: int, *arguments: str | Path) -> str:
    """What a Python program prints on a terminal of that width, controls of the terminal included."""
    ours, theirs = pty.openpty()
    env = os.environ | {"COLUMNS": str(columns), "LINES": "20", "TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    out = b""
    while True:
        try:
            if not (data := os.read(ours, 65536)):
                break
        except OSError:  # the other end is closed
            break
        out += data
    os.close(ours)
    assert child.wait() == 0, out.decode()
    return out.decode()


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_bar_from_python_fits_the_terminal_and_is_taken_off(columns: int, tmp_path: Path) -> None:
    torch.save({"model": {f"layer.{i}.weight": torch.randn(512, 1024) for i in range(8)}}, tmp_path / "a.pt")
    code = (
        "import sys, ckpttool\n"
        "ckpttool.convert(sys.argv[1], sys.argv[2], to='dcp', world_size=2, progress=ckpttool.progress_bar())\n"
        "print('DONE')\n"
    )
    said = on_terminal(code, columns, tmp_path / "a.pt", tmp_path / "out")
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", said)]
    bars = [line for line in drawn if "MB" in line]
    assert bars and all(line.lstrip().startswith(("copy", "read back", "verify")) for line in bars), bars
    up = "\x1b[1A\x1b[2K"
    assert max(map(len, bars)) <= columns and 2 * up not in said  # bars of one line
    assert ("peak" in said) == (columns >= 80) and "DONE" in drawn[-3:]


def test_a_failed_run_leaves_no_bar(tmp_path: Path) -> None:
    code = (
        "import sys, ckpttool\n"
        "def stop(page): raise ZeroDivisionError\n"
        "bar = ckpttool.progress_bar()\n"
        "try: ckpttool.convert(sys.argv[1], sys.argv[2], to='dcp', world_size=1, change={'*': stop}, progress=bar)\n"
        "except ZeroDivisionError: print('bar', bar.bar)\n"
    )
    torch.save({"model": {"layer.weight": torch.ones(512, 512)}}, tmp_path / "a.pt")
    assert "bar None" in on_terminal(code, 80, tmp_path / "a.pt", tmp_path / "out")


def test_steps_and_notes_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ckpttool"):
        result = ckpttool.convert(DCP, tmp_path / "hf", to="hf")
    assert {r.name for r in caplog.records} == {"ckpttool"}
    info = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert info[0].startswith(f"opened {DCP}: dcp, ") and any(m.startswith("planned dcp -> hf: ") for m in info)
    order = ["opened ", "planned ", "wrote ", "read back from the disk: equal", f"committed {tmp_path / 'hf'}"]
    at = [next(i for i, m in enumerate(info) if m.startswith(step)) for step in order]
    assert at == sorted(at)
    assert [m.removeprefix("note: ") for m in info if m.startswith("note: ")] == result.notes
    details = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert sum(m.startswith("left behind: ") for m in details) == len(result.dropped) > 0
    assert all(os.path.basename(r.pathname) != "progress.py" for r in caplog.records)


def test_a_question_to_transformers_is_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub_names._ask_child.cache_clear()  # which another test may have asked the same
    stages: list[tuple[str, int, int]] = []
    ckpttool.convert(FIXTURES / "hf_llama" / "ckpt", tmp_path / "a.pt")
    with caplog.at_level(logging.INFO, "ckpttool"):
        ckpttool.convert(
            tmp_path / "a.pt",
            tmp_path / "hf",
            to="hf",
            config=str(FIXTURES / "hf_llama" / "ckpt"),
            progress=lambda *stage: stages.append(stage),
        )
    assert stages[:2] == [("transformers", 0, 1), ("transformers", 1, 1)]
    assert any("asking transformers" in r.getMessage() for r in caplog.records)
    assert all(total > 0 for _, _, total in stages)  # callers divide by it


def test_nothing_is_logged_where_nobody_listens() -> None:
    code = (
        "import sys, ckpttool\nwith ckpttool.open(sys.argv[1]) as opened: print(len(opened), 'logging' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, DCP], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False" and done.stderr == ""


def test_peak_memory_is_not_that_of_the_process_that_started_the_command(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "large = bytearray(400 << 20)\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'ckpttool', 'convert', *sys.argv[1:], '--to', 'dcp', '-n', '2', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code, DCP, tmp_path / "out"], capture_output=True, check=True)
    assert 20 < json.loads(done.stdout)["peak_memory_mib"] < 200
