"""Optimizers are known by their slots. The states are made by the optimizers themselves, as far as torch has them; the slots of
others are those that they wrote in real jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckpttool
from ckpttool.engine.opening import open as open_checkpoint
from ckpttool.index.optimizers import find_optimizers

MATRICES, VECTORS = ("a.weight", "b.weight"), ("a.bias", "b.bias")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def saved(path: Path, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> str:
    """A checkpoint after one step, with names in place of numbers; several optimizers are one state."""
    model(torch.ones(3, 6)).sum().backward()
    names = {id(p): n for n, p in model.named_parameters()}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        optimizer.step()
        for p, slots in optimizer.state.items():
            state[names[id(p)]] = dict(slots)
        groups += [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
    return written(path, model.state_dict(), state, groups)


def written(path: Path, model: dict[str, Tensor], state: dict[str, Any], groups: list[dict[str, Any]]) -> str:
    torch.save({"model": model, "optim": {"state": state, "param_groups": groups}}, path / "x.pt")
    return str(path / "x.pt")


def described(slots: dict[str, dict[str, Any]], path: Path, **options: Any) -> ckpttool.Summary:
    """The summary of a state with these slots, in one group."""
    model = {n: torch.zeros(4, 4) for n in slots}
    return ckpttool.inspect(written(path, model, slots, [{"lr": 0.1, **options, "params": list(slots)}]))


def kind(s: ckpttool.Summary) -> str:
    assert s.optimizer is not None
    return str(s.optimizer["kind"])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.AdamW(p), "AdamW or Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW or Adam"),
        (lambda p: torch.optim.NAdam(p), "NAdam"),
        (lambda p: torch.optim.Adamax(p), "Adamax"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), "RMSprop"),
        (lambda p: torch.optim.Adagrad(p), "Adagrad"),
        (lambda p: torch.optim.Adadelta(p), "Adadelta"),
        (lambda p: torch.optim.ASGD(p), "ASGD"),
        (lambda p: torch.optim.Rprop(p), "Rprop"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
    ],
)
def test_optimizers_of_torch(make: Any, name: str, tmp_path: Path) -> None:
    model = Model()
    found = ckpttool.inspect(saved(tmp_path, [make(model.parameters())], model))
    assert (kind(found), found.missing) == (name, [])


def test_muon_for_matrices_and_adamw_for_the_rest_are_both_there(tmp_path: Path) -> None:
    model = Model()
    of = dict(model.named_parameters())
    muon = torch.optim.Muon([of[n] for n in MATRICES])
    adam = torch.optim.AdamW([of[n] for n in VECTORS])
    found = ckpttool.inspect(saved(tmp_path, [muon, adam], model))
    assert kind(found) == "Muon (2 parameters), AdamW or Adam (2 parameters)"
    assert found.missing == [] and found.optimizer is not None
    assert found.optimizer["kinds"] == {"Muon": 2, "AdamW or Adam": 2}


T = torch.zeros(4, 4)
QUANTISED = {"state1": T, "qmap1": T, "absmax1": T, "state2": T, "qmap2": T, "absmax2": T}


@pytest.mark.parametrize(
    ("big", "small", "options", "name"),
    [
        ({"exp_avg": T}, {"exp_avg": T}, {"betas": (0.9, 0.99)}, "Lion"),
        ({"exp_avg": T, "exp_avg_sq": T, "GG": [T, T], "Q": [T, T]}, {"exp_avg": T, "exp_avg_sq": T}, {}, "SOAP"),
        ({"exp_avg_sq_row": T, "exp_avg_sq_col": T}, {"exp_avg_sq": T}, {}, "Adafactor"),
        ({"z": T, "exp_avg_sq": T}, {"z": T, "exp_avg_sq": T}, {}, "schedule-free AdamW"),
        (QUANTISED, {"state1": T, "state2": T}, {}, "bitsandbytes 8-bit AdamW or Adam"),
        ({"__bnb_optimizer_quant_state__": QUANTISED}, {"__bnb_optimizer_quant_state__": {"state1": T, "state2": T}}, {},
         "bitsandbytes 8-bit AdamW or Adam"),
        ({"state1": T, "state2": T}, {"state1": T, "state2": T}, {}, "bitsandbytes 32-bit AdamW or Adam"),
        ({"mystery": T}, {"mystery": T}, {}, "unknown"),
    ],
)  # fmt: skip
def test_optimizers_of_other_packages(
    big: dict[str, Any], small: dict[str, Any], options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    found = described({"a": big, "b": big, "c": small}, tmp_path, **options)
    assert (kind(found), found.missing) == (name, [])


def test_slots_are_counted_by_parameter(tmp_path: Path) -> None:
    found = described({"a": {"exp_avg": T, "exp_avg_sq": T, "GG": [T, T], "Q": [T, T]}}, tmp_path)
    assert found.optimizer is not None
    assert found.optimizer["slots"]["GG"] == {"parameters": 1, "bytes": 2 * T.nbytes}
    found = described({"a": {"__bnb_optimizer_quant_state__": QUANTISED}}, tmp_path)
    assert found.optimizer is not None and set(found.optimizer["slots"]) == set(QUANTISED)


@pytest.mark.parametrize(
    ("whole", "lost"),
    [
        ({"exp_avg": T, "exp_avg_sq": T}, "exp_avg_sq"),
        ({"step": T, "exp_avg": T, "exp_avg_sq": T}, "step"),
        ({"exp_avg": T, "exp_avg_sq": T, "max_exp_avg_sq": T}, "max_exp_avg_sq"),
        ({"exp_avg": T, "exp_avg_sq": T, "GG": [T], "Q": [T]}, "Q"),
        ({"row_var": T, "col_var": T}, "row_var"),
        (QUANTISED, "absmax2"),
        ({"mystery": T, "second": T}, "second"),
    ],
)
def test_a_lost_slot_is_still_named(whole: dict[str, Any], lost: str, tmp_path: Path) -> None:
    part = {k: v for k, v in whole.items() if k != lost}
    found = described({"a": whole, "b": whole, "c": part}, tmp_path)
    assert found.missing == [f"{lost} is missing for 1 of 3 parameters, first c"]


def test_a_slot_that_one_of_two_groups_of_an_optimizer_lost(tmp_path: Path) -> None:
    """Lion has no second moment; a group of AdamW that has none either is damaged, and not Lion."""
    adam = {"exp_avg": T, "exp_avg_sq": T}
    state = {"a": adam, "b": {"exp_avg": T}}
    groups = [{"lr": 0.1, "eps": 1e-8, "params": [n]} for n in state]
    found = ckpttool.inspect(written(tmp_path, {n: T for n in state}, state, groups))
    assert found.missing == ["exp_avg_sq is missing for 1 of 2 parameters, first b"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [(True, "are y, at which"), (False, "are x, the averaged"), (None, "do not say which")],
)
def test_schedule_free_says_which_weights_are_on_disk(mode: bool | None, words: str, tmp_path: Path) -> None:
    options = {} if mode is None else {"train_mode": mode}
    found = described({"a": {"z": T, "exp_avg_sq": T}}, tmp_path, **options)
    assert any(words in note for note in found.notes), found.notes
    assert not any("schedule-free" in note for note in described({"a": {"exp_avg": T}}, tmp_path).notes)


def test_parameters_outside_of_all_groups_are_looked_at_too(tmp_path: Path) -> None:
    path = written(tmp_path, {"a": T, "b": T}, {"a": {"exp_avg": T}, "b": {"sum": T}}, [{"lr": 1.0, "params": ["a"]}])
    with open_checkpoint(path) as opened:
        assert [(s.name, list(s.slots)) for s in find_optimizers(opened.checkpoint)] == [
            ("Lion", ["a"]),
            ("Adagrad", ["b"]),
        ]
