"""`doctor --report`: what a bug report needs, and nothing that the checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here

import ckpttool
from ckpttool.engine.doctor import bundle, examine
from ckpttool.errors import NotPermitted
from ckpttool.options import OpenOptions
from ckpttool.storage.source import Source

SECRETS = ("hunter2", "s3cr3t", "31337", "acme-project")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint below a folder of a secret project, with secrets in texts, numbers, configs and objects."""
    state = {
        "model": {"fc.weight": torch.full((5, 3), 31337.0), "mask": torch.ones(2, dtype=torch.bool)},
        "trainer": {"step": 31337, "token": "hunter2", "config": {"password": "s3cr3t", "list": ["hunter2"]}},
        "extra": {"blob": b"s3cr3t", "none": None},
    }
    out = tmp_path / "acme-project" / "ckpt"
    out.parent.mkdir()
    torch.save(state, tmp_path / "s.pt")
    ckpttool.convert(tmp_path / "s.pt", out, to="dcp", world_size=3)
    (out / "config.json").write_text('{"_name_or_path": "hunter2"}')
    return out


def reported(path: Path, file: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = ckpttool_here("doctor", str(path), "--report", str(file), *words)
    assert "read it before you send it" in done.stderr
    text = file.read_text()
    assert not [s for s in SECRETS if s in text] and str(path.parent) not in text
    found: dict[str, Any] = json.loads(text)
    return done.returncode, found


def test_it_has_names_shapes_and_sizes_and_no_value(folder: Path, tmp_path: Path) -> None:
    code, found = reported(folder, tmp_path / "r.json")
    assert code == 0 and (found["layout"], found["world_size"]) == ("dcp", 3)
    assert found["tensors"]["model.fc.weight"] == "float32 [5, 3], 3 chunks"
    assert found["values"]["trainer.token"] == "str of length 7" and found["values"]["extra.none"] == "NoneType"
    assert found["files"]["config.json"] == 28 and found["files"][".metadata"] == (folder / ".metadata").stat().st_size
    assert found["ckpttool"] == ckpttool.__version__ and found["formats"] and "error" not in found


@pytest.mark.parametrize(("file", "kind"), [(".metadata", "unreadable"), ("__1_0.distcp", "cut")])
def test_of_a_damaged_one_it_has_the_kinds_of_findings_and_where_it_was_refused(
    file: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    raw = (folder / file).read_bytes()
    (folder / file).write_bytes(raw[: len(raw) // 2])
    code, found = reported(folder, tmp_path / "r.json", "--json")
    assert code == 4 and found["findings"][0]["kind"] == kind
    assert found["error"]["code"].startswith("CKPT") and all(".py:" in place for place in found["error"]["raised"])


def test_what_is_no_checkpoint_is_reported_too(tmp_path: Path) -> None:
    (tmp_path / "acme-project").mkdir()
    (tmp_path / "acme-project" / "notes.txt").write_text("hunter2")
    code, found = reported(tmp_path / "acme-project", tmp_path / "r.json")
    assert code == 3 and found["error"]["kind"] == "NotRecognised" and found["files"] == {"notes.txt": 7}


def test_a_folder_that_cannot_be_listed_is_reported_too(folder: Path, tmp_path: Path) -> None:
    def refuse(source: Source, name: str = "") -> list[str]:
        raise NotPermitted(f"{source.root}/{name}: permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "list", refuse)
        assert bundle.describe_checkpoint(str(folder), OpenOptions(), KeyError())["files"] == {}


def test_a_bug_of_ours_is_reported_with_the_lines_it_came_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("hunter2")

    monkeypatch.setattr(examine.salvage, "find_problems", fail)
    code, found = reported(folder, tmp_path / "r.json")
    assert code == 1 and (found["error"]["kind"], found["error"]["code"]) == ("KeyError", None)
    assert any("examine.py" in place for place in found["error"]["raised"]) and found["tensors"]
