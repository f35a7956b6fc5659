"""What commands print of a checkpoint with one tensor is in the singular."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from commands import ckpttool_here


def test_no_command_says_1_tensors(tmp_path: Path) -> None:
    for name, factor in (("a.pt", 1), ("b.pt", 2)):
        torch.save({"model": {"a.weight": torch.ones(2, 2) * factor}, "epoch": 1}, tmp_path / name)
    commands = [
        ("inspect", "a.pt"), ("verify", "a.pt", "--read-data"), ("diff", "a.pt", "b.pt"), ("doctor", "a.pt"),
        ("convert", "a.pt", "dcp", "--to", "dcp", "-n", "1"), ("convert", "a.pt", "hf", "--to", "hf", "--dry-run"),
        ("stats", "a.pt"), ("average", "a.pt", "b.pt", "c.pt"), ("audit", "export", "a.pt", "a.tar.zst"), ("audit", "verify", "a.tar.zst"),
    ]  # fmt: skip
    for command, *words in commands:
        paths = [str(tmp_path / w) if "." in w or w in ("dcp", "hf") else w for w in words]
        if command == "audit":
            paths = [words[0], *(str(tmp_path / w) for w in words[1:])]
        if "--to" in paths:
            paths[paths.index("--to") + 1] = words[words.index("--to") + 1]
        done = ckpttool_here(command, *paths)
        found = re.findall(
            r"\b1 (?:tensor|value|entrie|file|rank|weight|parameter|step)s\b.*", done.stdout + done.stderr
        )
        assert done.returncode in (0, 5) and not found, (command, done.stderr, found)
