"""An optimizer whose state is a plain tensor for each rank, saved by torch's own DCP on two ranks: what is lost is named."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import ranks
import torch
from commands import ckpttool_here

import ckpttool
from ckpttool.engine.doctor.examine import doctor


def test_state_of_which_dcp_has_kept_one_rank_is_said_to_be_lost(tmp_path: Path) -> None:
    said = ranks.torchrun(2, "per_rank_state.py", str(tmp_path))
    assert (tmp_path / "adamw" / ".metadata").exists(), said
    assert not doctor(tmp_path / "adamw").findings
    local = tmp_path / "local"
    found = doctor(local)
    (one,) = found.findings
    assert (one.kind, one.severity, found.sound) == ("per-rank-state", "damage", False)
    assert re.search(r"DCP has kept one of them, .*rank.* \(\w+.*: \d of rank [01]", one.text)
    assert "lost when it was saved" in one.text and re.search(r"\[[67], 8\], the parameter \[13, 8\]", one.text)
    assert {n.split(".state.")[1].rpartition(".")[0] for n in one.tensors} >= {"0.weight", "1.weight"}
    for words in (("inspect", local, "--json"), ("convert", local, tmp_path / "x.pt", "--json")):
        assert any("lost when it was saved" in n for n in json.loads(ckpttool_here(*words).stdout)["notes"]), words
    assert one.repair is not None
    assert ckpttool_here(*shlex.split(one.repair)[1:]).returncode == 0
    with ckpttool.open(tmp_path / "local-without-optimizer") as opened:
        assert set(opened) == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
        assert opened["model.0.weight"].torch().shape == torch.Size([13, 8])
