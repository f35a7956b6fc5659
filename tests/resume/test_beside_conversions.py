"""Conversions raise no false alarm about state beside model and optimizer, in any layout, one hop or two; a loss does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.verdict import Check
from ckpttool.resume.trace.model import Trace
from ckpttool.resume.trace.side_state import collect_side_state

CHECKS = ("config.scheduler", "config.rng", "config.dataloader", "config.scaler", "config.values")


def trained() -> dict[str, Any]:
    """A tree as a job of 3 ranks saves it, with what layouts keep in different ways."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)],
        milestones=[2],
    )
    for _ in range(3):
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    names = [n for n, _ in model.named_parameters()]
    optim = optimizer.state_dict()
    return {
        "model": model.state_dict(),
        "optim": {
            "state": {names[i]: s for i, s in optim["state"].items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in optim["param_groups"]],
        },
        "scheduler": scheduler.state_dict(), "step": 3, "epoch": None, "best": None, "scaler": {"scale": 65536.0, "_growth_tracker": 3},
        "rng": {
            str(r): {
                "torch": torch.get_rng_state() + 0, "python": random.Random(r).getstate(), "numpy": np.random.RandomState(r).get_state(),
            } for r in range(3)
        },
        "dataloader": {
            "position": 17, "order": (3, 1, 2), "long": list(range(5000)), "shuffle": torch.arange(6), "one": torch.tensor(5), "epoch": None,
            "nested": {"a": (1, 2), "b": [], "c": {}}, "flag": True, "rate": 0.1, "word": "x", "workers": [{"at": 1}, {"at": None}],
        },
        "curve": np.arange(4.0), "half": np.float32(0.5), "history": [np.arange(3), {"loss": np.ones(2, np.float32)}, 7],
        "ema": {"0.weight": torch.ones(7, 5), "decay": 0.999},
    }  # fmt: skip


def trace_of(path: Path) -> Trace:
    """What a run knows of a checkpoint beside model and optimizer."""
    with ckpttool.open(path) as opened:
        ckpt = opened.locate()
        found = collect_side_state({v.path: v.data for v in ckpt.values.values() if v.path[0] != "optim"})
        rest = {n: t for n, t in ckpt.tensors.items() if t.path[0] not in ("model", "optim")}
        tensors = {n: collect_side_state({t.path: opened[n].torch()}).others[n] for n, t in rest.items()}
        return Trace(layout=opened.layout.name, values=found.values, others=found.others | tensors)


def checks(reference: Trace, got: Trace) -> dict[str, Check]:
    return {c.name: c for c in judge_single_run(reference, got)[0] if c.name in CHECKS}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "full.pt"
    torch.save(trained(), path)
    return path


LAYOUTS: dict[str, int | None] = {
    "dcp": 3, "full": None, "zero3": 2, "zero1": 2, "universal": None, "fsdp1": 2, "trainer": 2, "accelerate": 2, "lightning": 2
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("to", LAYOUTS)
def test_a_conversion_there_and_on_loses_and_changes_nothing(source: Path, tmp_path: Path, to: str) -> None:
    there, on = tmp_path / ("x.pt" if to == "full" else "x"), tmp_path / "dcp"
    ckpttool.convert(source, there, to=to, world_size=LAYOUTS[to])
    ckpttool.convert(there, on, to="dcp", world_size=4)
    first, second, third = map(trace_of, (source, there, on))
    for reference, got in ((first, second), (second, third), (first, third)):
        assert {n: (c.verdict, c.text) for n, c in checks(reference, got).items() if c.verdict != "pass"} == {}


@pytest.mark.slow
def test_an_archive_holds_it_all(source: Path, tmp_path: Path) -> None:
    ckpttool.export(source, str(tmp_path / "x.tar.zst"), ckpttool.ArchiveOptions(), in_ledger=False)
    found = checks(trace_of(source), trace_of(tmp_path / "x.tar.zst"))
    assert {c.verdict for c in found.values()} == {"pass"}


def test_a_layout_of_weights_alone_has_lost_it(source: Path, tmp_path: Path) -> None:
    ckpttool.convert(source, tmp_path / "hf", to="hf")
    found = checks(trace_of(source), trace_of(tmp_path / "hf"))
    assert {c.verdict for c in found.values()} == {"fail"}
    assert found["config.rng"].text.startswith("the checkpoint has lost random states: rng.0.python.0")


def test_another_stage_of_zero_is_no_difference(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "fixtures" / "zero3_w2_fp16" / "ckpt"
    ckpttool.convert(source, tmp_path / "x", to="zero1", world_size=2)
    a, b = trace_of(source), trace_of(tmp_path / "x")
    stage = "extra.ds_config.zero_optimization.stage"
    assert (a.values[stage], b.values[stage]) == (3, 1)
    found = checks(a, b)
    assert found["config.values"].verdict == "pass" and "fail" not in {c.verdict for c in found.values()}
