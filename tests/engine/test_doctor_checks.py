"""A check of `doctor` is registered where it is defined: one that is defined here runs, in order, in text, JSON and docs, and
nothing else in the product knows of it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import peers
import pytest
import torch

from ckpttool.engine.copy.stream import Block
from ckpttool.engine.doctor import checks, findings
from ckpttool.engine.doctor.checks import Examined, block_check, check
from ckpttool.engine.doctor.checks_files import FILE_KINDS
from ckpttool.engine.doctor.examine import doctor
from ckpttool.engine.doctor.findings import DAMAGE, NOTE, Finding, define_kind
from ckpttool.engine.salvage import ProblemKind
from ckpttool.index.checkpoint import Checkpoint

PAGE = peers.REPOSITORY / "docs" / "how-to" / "doctor.md"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered in a test is forgotten after it."""
    checks.load_checks()
    monkeypatch.setattr(checks, "CHECKS", list(checks.CHECKS))
    monkeypatch.setattr(checks, "BLOCK_CHECKS", list(checks.BLOCK_CHECKS))
    monkeypatch.setattr(findings, "KINDS", dict(findings.KINDS))
    monkeypatch.setattr(checks, "KINDS", findings.KINDS)


def hooks() -> ModuleType:
    found = importlib.util.spec_from_file_location("_hooks", peers.REPOSITORY / "docs" / "_hooks.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("registered")
def test_a_check_that_is_defined_here_runs_in_order_and_is_in_json_and_docs(tmp_path: Path) -> None:
    early = define_kind("odd-shape", 105, "weights of 7 rows", "what-is-recognised")
    late = define_kind("too-large", 260, "numbers above 100", "what-is-recognised")

    @check(early)
    def find_seven_rows(at: Examined) -> list[Finding]:
        names = tuple(n for n, t in at.weights.items() if t.shape[:1] == (7,))
        return [Finding(early, NOTE, None, names, f"{len(names)} weights have 7 rows")] if names else []

    @block_check(late)
    class LargeNumbers:
        def __init__(self, ckpt: Checkpoint) -> None:
            self.large: list[str] = []

        def add(self, block: Block) -> None:
            if torch.frombuffer(bytearray(block.data), dtype=torch.float32).max() > 100:
                self.large.append(block.name)

        def findings(self) -> list[Finding]:
            return [Finding(late, DAMAGE, None, tuple(self.large), "numbers above 100")] if self.large else []

    model = {"_orig_mod.a.weight": torch.ones(7, 16), "_orig_mod.b.weight": torch.randn(4, 16)}
    model["_orig_mod.b.weight"][2, 3] = 1000.0
    torch.save({"model": model}, tmp_path / "x.pt")

    kinds = [f.kind for f in doctor(tmp_path / "x.pt").findings]
    assert kinds == ["odd-shape", "wrapper-prefix"]  # not what reads the data

    found = doctor(tmp_path / "x.pt", read_data=True)
    assert [f.kind for f in found.findings] == ["odd-shape", "wrapper-prefix", "constant", "too-large"]
    assert not found.sound and "  too-large: numbers above 100" in list(found.lines())
    first, *_, last = json.loads(json.dumps(found.to_json()))["findings"]
    assert (first["kind"], first["severity"], first["tensors"]) == ("odd-shape", "note", ["a.weight"])
    assert (last["kind"], last["severity"], last["tensors"]) == ("too-large", "damage", ["model.b.weight"])

    rows = re.findall(r"^\| \[`(.+?)`\]\(#(.+?)\) \| (.+?) \| (yes)? *\|$", hooks().findings_table(), re.MULTILINE)
    names = [row[0] for row in rows]
    assert names.index("odd-shape") == names.index("wrapper-prefix") - 1
    assert names.index("too-large") == names.index("tied-weights") + 1
    assert ("too-large", "what-is-recognised", "numbers above 100", "yes") in rows
    assert ("odd-shape", "what-is-recognised", "weights of 7 rows", "") in rows


@pytest.mark.usefixtures("registered")
def test_a_kind_has_one_definition() -> None:
    with pytest.raises(ValueError, match='"nan" is defined twice'):
        define_kind("nan", 1, "", "what-is-recognised")


@pytest.mark.slow
def test_mypy_refuses_a_kind_that_nobody_has_defined(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    path = tmp_path / "kinds.py"
    path.write_text(
        "from ckpttool.engine.doctor.checks_numbers import NAN\n"
        "from ckpttool.engine.doctor.findings import NOTE, Finding\n\n"
        "Finding(NAN, NOTE, None, (), '')\n"
        "Finding('nann', NOTE, None, (), '')\n"
        "Finding(NAN, 'bad', None, (), '')\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(peers.REPOSITORY / "pyproject.toml"), str(path)]
    ran = subprocess.run(command, cwd=peers.REPOSITORY, capture_output=True, text=True)
    assert re.findall(r"kinds\.py:(\d+): error: .*\[arg-type\]", ran.stdout) == ["5", "6"], ran.stdout + ran.stderr


def test_every_kind_is_in_the_section_of_the_page_that_the_table_links_to() -> None:
    checks.load_checks()
    text = PAGE.read_text(encoding="utf-8")
    assert "<!-- findings -->" in text
    sections = {
        re.sub(r"[^a-z0-9]+", "-", title.lower()): body
        for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    }
    wrong = [k for k, info in findings.KINDS.items() if f"`{k}`" not in sections[info.section]]
    assert len(findings.KINDS) > 25 and wrong == []


def test_every_problem_of_a_file_is_a_kind() -> None:
    assert {*FILE_KINDS} == {*get_args(ProblemKind)}
    reported = {kind for c in checks.CHECKS for kind in c.kinds}
    assert reported <= findings.KINDS.keys()
