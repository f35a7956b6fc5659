"""Adding a trainer adds one file: a dialect that this test defines is known wherever a trainer is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ckpttool.converters.options import DirectoryOptions
from ckpttool.converters.trainers.dialect import DATA, Dialect, DirectoryPart
from ckpttool.converters.trainers.join import (
    SmallFile,
    collect_left_over_state,
    draft_model_and_optimizer,
    draft_small_files,
    join_drafts,
)
from commands import ckpttool_here as run
from peers import FIXTURES, hooks

import ckpttool
from ckpttool import layouts
from ckpttool.engine.discover.detection import find_checkpoints
from ckpttool.index.checkpoint import Checkpoint
from ckpttool.index.checkpoint import Path as Keys
from ckpttool.index.draft import Draft
from ckpttool.index.trainer_trees import TrainerTree
from ckpttool.layouts import WriteOptions
from ckpttool.program import Advice, ForTrainer, Half, Program, SeenFolder, StateFile, Unfinished
from ckpttool.storage.source import Source

# ------------------------------------------------------- what the file of a trainer would hold

LAST = "acme.json"
FOLDERS = ("acme_weights", "acme_adam")


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    counters = {("trainer", *p[1:]): leaf for p, leaf in ckpt.leaves().items() if p[0] == "trainer"}
    rest, notes = collect_left_over_state(ckpt, set[Keys](counters))
    small = [*rest, SmallFile(LAST, {p[1:]: leaf for p, leaf in counters.items()})]
    parts = [
        *draft_model_and_optimizer(ckpt, source, options, {"sharded": FOLDERS}),
        ("", draft_small_files(ckpt, small, options)),
    ]
    out = join_drafts("acme", ckpt, parts, options, options.ranks(ckpt))
    out.notes += notes
    return out


def next_step(advice: Advice) -> str:
    return f"resumes in Acme; elsewhere: {advice.convert('--to dcp -n RANKS')}"


def unfinished(folder: SeenFolder) -> Unfinished | None:
    begun = FOLDERS[0] in folder.names and LAST not in folder.names
    return Unfinished(f"no {LAST}, which Acme writes last", "acme") if begun else None


ACME = Dialect(
    name="acme",
    title="Acme",
    detect=lambda source: (LAST in source.list(), f"has {LAST}" if LAST in source.list() else f"no {LAST}"),
    parts=lambda source: [
        DirectoryPart(FOLDERS[0], "dcp", "model"),
        DirectoryPart(FOLDERS[1], "dcp", "optim"),
        DirectoryPart(LAST, DATA, "trainer"),
    ],
    write=write,
    options=DirectoryOptions,
    program=Program(
        next_step=next_step,
        state_files=(StateFile(r"acme_curriculum\.acme", "curriculum", "dataloader"),),
        halves=(Half("|".join(FOLDERS)),),
        part_folders="|".join(FOLDERS),
        is_part=lambda name, beside: name in FOLDERS,
        unfinished=unfinished,
        resumed_by=(ForTrainer("acme", "Acme Trainer"),),
        tree=TrainerTree("Acme", frozenset(("acme_run",))),
        rows={
            "readme-trainers": (("Acme (**acme**)", "its folders", "yes", "none saved", "none saved", "none saved"),),
            "layouts": (("**acme**", "two DCP folders", "the same"),),
            "for": (("two DCP folders", "`acme.resume(DIR)`"),),
        },
    ),
)

# --------------------------------------------------------------------------------- who knows it


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(LAYOUTS=(ACME.layout(),)))
    monkeypatch.setattr(layouts, "BUILT_IN", (*layouts.BUILT_IN, "acme"))
    yield


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """run/step-3, as `convert --for acme` writes it, with a file beside the parts that no layout reads."""
    out = tmp_path / "run" / "step-3"
    out.parent.mkdir()
    done = run(
        "convert", FIXTURES / "fsdp2_w3" / "ckpt", out, "--for", "acme", "-n", "2", "--only", "model,optim,trainer"
    )
    assert done.returncode == 0, done.stderr
    assert {*FOLDERS, LAST} <= {p.name for p in out.iterdir()}
    (out / "acme_curriculum.acme").write_bytes(b"x")
    return out


def test_for_writes_it_and_its_state_is_the_same(saved: Path) -> None:
    done = run("diff", FIXTURES / "fsdp2_w3" / "ckpt", saved, "--only", "model,optim")
    assert done.returncode == 0, done.stdout + done.stderr
    said = run("convert", saved, saved.parent / "x", "--for", "nobody").stderr
    assert "acme (Acme Trainer)" in said


def test_inspect_says_what_resumes_from_it_and_which_files_it_did_not_read(saved: Path) -> None:
    found = ckpttool.inspect(saved)
    assert (found.layout, found.trainer) == ("acme", "Acme")
    assert found.next == f"resumes in Acme; elsewhere: ckpttool convert {saved} OUT --to dcp -n RANKS"
    assert any("acme_curriculum.acme (1 B, curriculum)" in note for note in found.notes)
    weights = ckpttool.inspect(saved / FOLDERS[0])
    assert any("../acme_curriculum.acme" in note and f"../{FOLDERS[1]}" not in note for note in weights.notes)


def test_a_file_in_a_part_is_answered_with_the_directory(saved: Path) -> None:
    said = run("inspect", saved / FOLDERS[0] / ".metadata").stderr
    assert f"is one file of the acme checkpoint {saved}; give that folder" in said


def test_a_folder_of_saves_lists_it_and_says_what_an_unfinished_one_lacks(saved: Path) -> None:
    (saved.parent / "step-6").mkdir()
    (saved / FOLDERS[0]).rename(saved.parent / "step-6" / FOLDERS[0])
    rows = find_checkpoints(layouts.place(saved.parent).source).checkpoints
    lacking = next(row for row in rows if row.name == "step-6")
    assert (lacking.layout, lacking.trainer, lacking.lacks) == ("acme", "Acme", f"no {LAST}, which Acme writes last")
    assert [row.name for row in rows] == ["step-3", "step-6"]


def test_a_tree_with_its_keys_names_it(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "acme_run": {"round": 1}}, tmp_path / "tree.pt")
    assert ckpttool.inspect(tmp_path / "tree.pt").trainer == "Acme"


def test_the_tables_of_the_documents_have_its_rows() -> None:
    assert "| Acme (**acme**) | its folders | yes | yes | none saved | none saved | none saved |" in hooks().rows_table(
        "readme-trainers"
    )
    assert "| **acme** | two DCP folders | the same |" in hooks().rows_table("layouts")
    assert "| `acme` | two DCP folders | `acme.resume(DIR)` |" in hooks().rows_table("for")
    assert re.search(r"\| `acme` \| directory of Acme \| everything \|", hooks().layouts_table())
