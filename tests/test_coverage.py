"""docs/reference/coverage.md: every cell that claims something has a test, and the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "coverage.md"
COLUMNS = ["version", "variant", "read", "reshard", "to hf", "optimizer carried", "write", "loads back"]
SECTIONS = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]


def rows_of(section: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.partition("\n")[0])
def test_every_cell_has_a_test_or_says_why_not(section: str) -> None:
    head, _, *rows = rows_of(section)
    assert head == COLUMNS and rows
    listed = dict(re.findall(r"(?m)^(\d+)\. `(tests/[\w/]+\.py::\w+)`$", section))
    used = set()
    for row in rows:
        assert len(row) == len(COLUMNS), row
        for column, cell in zip(COLUMNS[2:], row[2:], strict=True):
            numbers = set(re.findall(r"\((\d+)\)", cell))
            used |= numbers
            assert numbers <= set(listed), (row, column)
            if cell.startswith("by hand"):  # by a script that is here, with a package that the tests do not have
                script = re.match(r"by hand: `(fixtures/\w+\.py)[^`]*`: \S", cell)
                assert script and (ROOT / script[1]).exists(), (row[1], column, cell)
            elif not re.match(r"no: \S|no test$|none$", cell):
                assert numbers, (row[1], column, "names no test")
    assert used == set(listed), "a test that no cell names"
    for test in listed.values():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, test
