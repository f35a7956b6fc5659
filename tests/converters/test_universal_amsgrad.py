"""Param groups whose parameters have slots that others do not have, AMSGrad's or Muon's, as a universal checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import same_value
from ranks import torchrun
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.errors import Corrupt, Unsupported


def saved(folder: Path, where: str) -> Path:
    """The state of a job whose first or last group has AMSGrad, in one file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1, "amsgrad": where == "first"},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0, "amsgrad": where == "last"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optim": moments}, folder / f"{where}.pt")
    return folder / f"{where}.pt"


def trained(folder: Path, kind: Any, **options: Any) -> Path:
    """The state of a job with an optimizer of this class, in one file."""
    model = nn.Linear(6, 7)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optim": moments}, folder / f"{kind.__name__}.pt")
    return folder / f"{kind.__name__}.pt"


def universal(source: Path, stage: int) -> Any:
    """Its conversion."""
    target = source.with_name(f"{source.stem}-{stage}")
    return ckpttool.convert(source, target, to="universal", options=ckpttool.UniversalOptions(stage=stage))


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_there_and_back(where: str, stage: int, tmp_path: Path) -> None:
    source = saved(tmp_path, where)
    done = universal(source, stage)
    ckpttool.convert(tmp_path / f"{where}-{stage}", tmp_path / "back.pt", to="full")
    a, b = (torch.load(p, weights_only=False) for p in (source, tmp_path / "back.pt"))
    assert same_value(dict(a["model"]), b["model"]) and same_value(a["optim"]["state"], b["optim"]["state"])
    odd = "0.weight" if where == "first" else "0.bias"
    said = [n for n in done.notes if f"2 of 4 parameters, first {odd}, also have max_exp_avg_sq" in n]
    assert len(said) == (stage == 3), done.notes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_and_the_adam_beside_it_have_their_own_slots(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    named = dict(model.named_parameters())
    muon = torch.optim.Muon([p for p in named.values() if p.ndim == 2], lr=0.02)
    adam = torch.optim.AdamW([p for p in named.values() if p.ndim == 1], lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    weights, moments = get_state_dict(model, [muon, adam])
    torch.save({"model": weights, "optim": moments}, tmp_path / "a.pt")
    universal(tmp_path / "a.pt", stage)
    ckpttool.convert(tmp_path / f"a-{stage}", tmp_path / "back.pt", to="full")
    back = torch.load(tmp_path / "back.pt", weights_only=False)
    assert same_value(dict(weights), back["model"]) and same_value(moments["state"], back["optim"]["state"])
    (folder,) = (p for p in (tmp_path / f"a-{stage}").glob("*/zero"))
    (folder / "1.weight" / "momentum_buffer.pt").unlink()
    with pytest.raises(Corrupt, match=r'momentum_buffer\.pt is there for only one of "0.weight" and "1.weight"'):
        ckpttool.open(tmp_path / f"a-{stage}")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_scalar_that_deepspeed_cannot_load_is_refused_before_a_file_is_written(stage: int, tmp_path: Path) -> None:
    """NAdam's mu_product, of which universal_checkpoint.py asks ["param"] and the shape of the parameter."""
    source = trained(tmp_path, torch.optim.NAdam)
    with pytest.raises(Unsupported, match=f"'weight' also has mu_product, a number.*Write zero{stage}"):
        universal(source, stage)
    assert os.listdir(tmp_path) == [source.name]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            torch.optim.SGD,
            {},
            "2 of 2 parameters, first weight, have no exp_avg, exp_avg_sq, step. Write zero3, or for an engine",
        ),
        (torch.optim.SGD, {"momentum": 0.9}, "first weight, have no exp_avg, exp_avg_sq, step. Write zero3"),
        (torch.optim.Adagrad, {}, "first weight, have no exp_avg, exp_avg_sq. Write zero3"),
        (
            torch.optim.NAdam,
            {},
            "2 of 2 parameters, first weight, also have mu_product, without which its first step fails or is another. Write zero3",
        ),
        (torch.optim.AdamW, {}, None),
    ],
)
def test_stage_3_says_what_deepspeed_does_not_find_or_restore(
    kind: Any, options: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    done = universal(trained(tmp_path, kind, **options), 3)
    notes = [n for n in done.notes if "engine of stage 3" in n]
    assert [said in n and ("mu_" in said) == n.endswith("zero3") for n in notes] == [True] if said else not notes, (
        done.notes
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("number", [True, False])
def test_an_engine_with_adam_of_torch_is_warned_of_steps_that_are_numbers(
    number: bool, stage: int, tmp_path: Path
) -> None:
    source = trained(tmp_path, torch.optim.AdamW)
    tree = torch.load(source, weights_only=False)
    for own in tree["optim"]["state"].values():
        own["step"] = int(own["step"]) if number else own["step"]
    torch.save(tree, source)
    said = [n for n in universal(source, stage).notes if "API has changed" in n]
    assert [n.endswith(f"write zero{stage}") for n in said] == [True] * number


def test_groups_with_steps_of_their_own_are_told_of_the_one_step_of_stage_3(tmp_path: Path) -> None:
    source = saved(tmp_path, "first")
    tree = torch.load(source, weights_only=False)
    assert not [n for n in universal(source, 3).notes if "the step of the first" in n]
    for name in ("0.bias", "1.bias"):
        tree["optim"]["state"][name]["step"] += 1
    torch.save(tree, tmp_path / "later.pt")
    notes = universal(tmp_path / "later.pt", 3).notes
    assert [n for n in notes if "the step of the first" in n] and [n for n in notes if "API has changed" in n]
    ckpttool.convert(tmp_path / "later-3", tmp_path / "back.pt", to="full")
    assert same_value(tree["optim"]["state"], torch.load(tmp_path / "back.pt", weights_only=False)["optim"]["state"])
    ckpttool.verify(tmp_path / "later-3", read_data=True, against=tmp_path / "later.pt")


def test_a_file_that_is_gone_is_still_missed(tmp_path: Path) -> None:
    universal(saved(tmp_path, "last"), 2)
    (folder,) = (p.parent for p in (tmp_path / "last-2").glob("*/zero"))
    (folder / "zero" / "1.bias" / "max_exp_avg_sq.pt").rename(tmp_path / "away")
    with pytest.raises(Corrupt, match=r'max_exp_avg_sq\.pt is there for only one of "0.bias" and "1.bias"'):
        ckpttool.open(tmp_path / "last-2")
    (tmp_path / "away").rename(folder / "zero" / "1.bias" / "max_exp_avg_sq.pt")
    (folder / "zero" / "1.bias" / "exp_avg.pt").unlink()
    with pytest.raises(Corrupt, match=r"exp_avg\.pt is there for only one of"):
        ckpttool.open(tmp_path / "last-2")


@pytest.mark.live
@pytest.mark.slow
def test_deepspeed_itself_restores_it_at_stages_1_and_2(tmp_path: Path) -> None:
    for where in ("first", "last"):
        source = saved(tmp_path, where)
        for stage in (1, 2):
            universal(source, stage)
    said = torchrun(2, "amsgrad_universal.py", str(tmp_path))
    assert (tmp_path / "found.json").exists(), said[-4000:]
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "first-1": [], "first-2": [], "last-1": [], "last-2": [],
    }  # fmt: skip
