"""The benchmarks of large indexes run: their code is text that no other check reads."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import REPOSITORY


def run(tmp_path: Path, script: str, *words: str) -> list[dict[str, float]]:
    """The lines of numbers that it prints."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "bench" / script, "--work", tmp_path, *words], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_million_chunks(tmp_path: Path) -> None:
    phases, whole = run(tmp_path, "million.py", "--ranks", "3", "--tensors", "7", "--to", "dcp --world-size 2")
    assert phases["chunks"] == 21 and whole["cpu_s"] > 0
    assert phases["peak_mib"] < 100 and whole["peak_mib"] < 100  # the script has torch in memory


def test_an_index(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "index.py", "--ranks", "2")
    assert found["chunks"] > 4000 and found["planned_chunks"] > 0 and found["peak_mib"] < 150


def test_a_large_parent_is_not_measured() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from measure import measured\n"
        "large = bytearray(300 << 20)\n"
        "child = [sys.executable, '-c', 'import subprocess, sys; bytearray(100 << 20);'\n"
        '         \'subprocess.Popen([sys.executable, "-c", "for i in range(6000000): pass"])\']\n'
        "small, loop = measured([sys.executable, '-c', 'pass']), measured(child)\n"
        "print(small.peak_mib, loop.peak_mib, loop.cpu - small.cpu)\n"
    )
    out = subprocess.run([sys.executable, "-c", code, REPOSITORY / "bench"], capture_output=True, text=True, check=True)
    small, large, cpu = map(float, out.stdout.split())
    assert small < 50 and 100 < large < 150
    assert cpu > 0.05  # of a process that nobody waited for


def test_an_exponent_is_that_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    from exponents import exponent

    assert exponent([(1, 0.01), (2, 0.02), (4, 0.2), (8, 0.8), (16, 3.2)]) == pytest.approx(2)
    assert exponent([(1, 0.01), (2, 0.05), (4, 0.2), (8, 0.8)]) == pytest.approx(2)  # 0.05 s are noise
    assert exponent([(1, 0.01), (2, 0.02), (4, 0.04)]) is None


def test_the_plots_show_the_numbers_of_the_page() -> None:
    """bench/plots.py needs matplotlib, so the pictures are looked at as they are checked in."""
    page = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    measured = json.loads((REPOSITORY / "bench" / "measured.json").read_text(encoding="utf-8"))
    task, rows, floor = "", {}, {}
    for line in page.replace("`", "").replace("*", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and line.startswith("|") and re.fullmatch(r"[\d.]+", cells[4]):
            task = cells[0] or task
            rows[task, cells[1].partition(" / cp")[0]] = [cells[2].partition(" ")[0], cells[4], cells[5]]
        if len(cells) == 5 and line.startswith("|") and re.fullmatch(r"[\d.]+", cells[1]):
            floor[cells[0]] = float(cells[1])
    told = {
        (t["task"], r["tool"]): [r["wall_s"], r["cpu_s_per_gb"], r["peak_mib"]]
        for t in measured["conversions"] for r in t["rows"]
    }  # fmt: skip
    in_tables = {key: [float(x) for x in numbers] for key, numbers in rows.items() if key in told}
    assert told == in_tables and len(told) > 20
    assert {r["tool"]: r["cpu_s"] for r in measured["floor"]}.items() <= floor.items()
    for column, name in enumerate(("wall", "cpu", "memory")):
        drawn = (REPOSITORY / "docs" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        texts = [html.unescape(t) for t in re.findall(r"<text[^>]*>([^<]*)</text>", drawn)]
        for (task, _), numbers in told.items():
            assert task not in texts or f"{numbers[column]:g}" in texts, (name, task)


def test_the_costs_follow_from_the_benchmarks() -> None:
    pages = REPOSITORY / "docs"
    measured = (pages / "benchmarks.md").read_text(encoding="utf-8")
    checked = 0
    for line in (pages / "how-to" / "cost.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for seconds, hours in zip(cells[1::2], cells[2::2], strict=False):
            if len(cells) == 5 and re.fullmatch(r"\d\.\d\d", seconds):
                assert hours == f"{float(seconds) / 3.6:.2f}" and f" {seconds} " in measured, line
                checked += 1
        if len(cells) == 5 and cells[1].isdigit() and cells[3].isdigit():
            small, large, each = (int(cell) for cell in cells[1:4])
            assert each == round((large - small) / 0.558), line
            checked += 1
    assert checked == 20
