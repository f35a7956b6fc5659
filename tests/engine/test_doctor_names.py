"""`doctor` on names and shapes of weights. The judge of every printed command is the plain module, which loads what it writes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from safetensors.torch import load_file, save_file

from ckpttool.engine.doctor import Diagnosis, doctor
from ckpttool.engine.findings import Finding


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))


def of_kind(found: Diagnosis, kind: str) -> list[Finding]:
    return [f for f in found.findings if f.kind == kind]


def run(line: str) -> None:
    """A command that doctor printed."""
    program, *words = shlex.split(line)
    assert program == "ckpttool"
    done = ckpttool_here(*words)
    assert done.returncode == 0, done.stderr


def trained(prefix: str, named: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(the plain module, what a script that wrapped it saves): keys of its own, and `prefix` in names of the model."""
    model = net()
    optimizer = torch.optim.AdamW(list(model.named_parameters()) if named else model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    weights = {prefix + n: t for n, t in model.state_dict().items()}
    return model, {"net": 1, "model_state_dict": weights, "optimizer_state_dict": optimizer.state_dict(), "epoch": 4}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_named_and_the_printed_command_removes_them(tmp_path: Path, prefix: str) -> None:
    model, tree = trained(prefix)
    torch.save(tree, tmp_path / "it's.pt")
    found = doctor(tmp_path / "it's.pt")
    assert found.sound
    named = of_kind(found, "wrapper-prefix")
    assert {f.text.partition('"')[2].partition('"')[0] for f in named} == {p + "." for p in prefix.split(".") if p}
    assert named[0].repair is not None and len(named[0].tensors) == 4
    run(named[0].repair)
    copy = torch.load(tmp_path / "it's-plain.pt", weights_only=False)
    model.load_state_dict(copy["model_state_dict"])  # strict
    assert copy.keys() == tree.keys() and copy["epoch"] == 4
    torch.optim.AdamW(model.parameters()).load_state_dict(copy["optimizer_state_dict"])
    assert not of_kind(doctor(tmp_path / "it's-plain.pt"), "wrapper-prefix")


@pytest.mark.filterwarnings("ignore")
def test_prefixes_in_safetensors_and_dcp(tmp_path: Path) -> None:
    model = net()
    weights = {"_orig_mod." + n: t for n, t in model.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "d")
    for path, copy in (("w.safetensors", "w-plain.safetensors"), ("d", "d-plain")):
        (one,) = of_kind(doctor(tmp_path / path), "wrapper-prefix")
        assert one.repair is not None
        run(one.repair)
        if path == "d":
            dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / copy)
        else:
            model.load_state_dict(load_file(tmp_path / copy))
        assert not doctor(tmp_path / copy).findings
