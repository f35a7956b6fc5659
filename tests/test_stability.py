"""Files that earlier versions wrote are read by this one, and files of later ones are refused by name. fixtures/versions.tar.xz has what
the program of four earlier days made of state.pt, each in a folder of its day; nothing of it is made again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, same_value

import ckpttool
from ckpttool import layouts
from ckpttool.audit import manifest
from ckpttool.errors import Unsupported
from ckpttool.formats import pickles, torch_zip, torch_zip_writer
from ckpttool.index import composites, names
from ckpttool.resume.trace.model import RECORD_VERSION, read_reference

VERSIONS = FIXTURES / "versions"
STATE = VERSIONS / "state.pt"
DAYS = sorted(p.name for p in VERSIONS.iterdir() if p.is_dir())
CHECKPOINTS = [
    p.relative_to(VERSIONS)
    for day in DAYS
    for p in sorted((VERSIONS / day).iterdir())
    if p.suffix not in (".json", ".jsonl")
]
LAYOUTS = {"dcp", "full.pt", "hf", "tc", "a.tar.zst", "zero3", "fsdp1", "universal"}


def test_there_is_something_of_each_version() -> None:
    assert len(DAYS) >= 4 and {p.name for p in CHECKPOINTS} == LAYOUTS
    assert len(CHECKPOINTS) >= 29


@pytest.mark.parametrize("path", CHECKPOINTS, ids=str)
def test_a_checkpoint_of_an_earlier_version_has_its_digests_and_the_state(path: Path, tmp_path: Path) -> None:
    verified = ckpttool.verify(VERSIONS / path, read_data=True)
    assert verified.recorded and not verified.notes, "its record is compared with every tensor"
    out = tmp_path / "out.pt"
    ckpttool.convert(VERSIONS / path, out, to="full")
    assert same_value(torch.load(out)["model"], torch.load(STATE)["model"])
    assert ckpttool.diff(VERSIONS / path, STATE).equal, "moments, steps, param groups, scheduler and values, too"


@pytest.mark.parametrize("day", DAYS)
def test_an_archive_and_its_ledger_are_sound_and_a_hold_stands(day: str, tmp_path: Path) -> None:
    store = Path(shutil.copytree(VERSIONS / day, tmp_path / "store"))
    done = ckpttool_here("audit", "verify", str(store / "a.tar.zst"), "--deep", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["sound"]
    assert len(found["warnings"]) == (day == DAYS[0]), "which had no file of holds beside an archive"
    (row,) = json.loads(ckpttool_here("audit", "list", str(store), "--json").stdout)
    assert row["held"] == ["case 1"]
    assert ckpttool_here("audit", "ledger", "verify", str(store), "--json").returncode == 0


@pytest.mark.parametrize("path", sorted(VERSIONS.glob("*/recording.jsonl")), ids=lambda p: p.parent.name)
def test_a_recording_of_an_earlier_version_has_its_steps_and_states(path: Path) -> None:
    trace = read_reference(path)
    assert [s.step for s in trace.steps] == [1, 2, 3] and trace.start == 3
    assert {"embedding.weight", "head.bias"} <= {n.removeprefix("model.") for n in trace.state}
    assert trace.groups


def test_what_a_later_version_writes_is_refused_or_said(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(VERSIONS / DAYS[-1] / "dcp", tmp_path / "dcp"))
    record = json.loads((folder / "ckpttool.json").read_text())
    (folder / "ckpttool.json").write_text(json.dumps({**record, "schema": "ckpttool.record/2"}))
    notes = ckpttool.verify(folder, read_data=True).notes
    assert any("'ckpttool.record/2'; this ckpttool knows 'ckpttool.record/1'" in n for n in notes)
    lines = (VERSIONS / DAYS[-1] / "recording.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "state")
    lines[at] = json.dumps({**json.loads(lines[at]), "version": RECORD_VERSION + 1})
    (tmp_path / "later.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        Unsupported, match=f"is of version {RECORD_VERSION + 1}; this ckpttool reads recordings of versions 1 to"
    ):
        read_reference(tmp_path / "later.jsonl")


def test_a_plan_is_of_one_version(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    asked = (
        "convert",
        str(STATE),
        str(tmp_path / "out"),
        "--to",
        "dcp",
        "--world-size",
        "2",
        "--dry-run",
        "--plan",
        str(plan),
    )
    assert ckpttool_here(*asked).returncode == 0
    plan.write_text(plan.read_text().replace(f'"ckpttool": "{ckpttool.__version__}"', '"ckpttool": "0.0.9"', 1))
    done = ckpttool_here("apply", str(plan))
    assert done.returncode == 5 and 'planned was "0.0.9"' in done.stderr and not (tmp_path / "out").exists()


def test_the_program_says_its_formats() -> None:
    def ran(*words: str) -> Any:
        return subprocess.run([sys.executable, "-m", "ckpttool", *words], capture_output=True, text=True)

    said = json.loads(ran("--version", "--json").stdout)
    assert said["ckpttool"] == ckpttool.__version__ and said["packages"]["torch"] == torch.__version__
    assert said["formats"]["archive"] == manifest.SCHEMA and said["formats"]["recording"] == RECORD_VERSION
    page = (FIXTURES.parent / "docs" / "explanation" / "stability.md").read_text()
    assert all(f"| {name} |" in page for name in said["formats"])
    assert ran("--json", "--version").stdout == ran("--version", "--json").stdout
    assert ran("--json", "layouts").returncode == 2


def test_what_the_guide_to_layouts_names_is_there() -> None:
    """CHANGELOG promises these names to layouts of other packages."""
    page = (FIXTURES.parent / "docs" / "how-to" / "write-a-layout.md").read_text(encoding="utf-8")
    modules = (layouts, names, composites, torch_zip, torch_zip_writer, pickles)
    by_name = {m.__name__.rpartition(".")[2]: m for m in modules}
    named = {(m[1], m[2]) for m in re.finditer(r"\b(\w+)\.(\w+)\b", page) if m[1] in by_name}
    assert {("names", "canonical"), ("composites", "shape_of"), ("layouts", "option")} <= named
    assert [(m, n) for m, n in sorted(named) if not hasattr(by_name[m], n)] == []
