"""The fp32 masters of a Megatron-Core job in bf16 are those of a real DeepSpeed engine that loads what ckpttool made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peers import FIXTURES
from ranks import torchrun
from safetensors.torch import load_file

import ckpttool

pytest.importorskip("deepspeed", reason="DeepSpeed is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
JOB = FIXTURES / "megatron" / "stacked_pp2_bf16"


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_has_the_masters_and_computes_with_their_rounding(stage: int, tmp_path: Path) -> None:
    done = ckpttool.convert(
        JOB / "ckpt" / "iter_0000003",
        tmp_path / "zero",
        to=f"zero{stage}",
        world_size=2,
        only=["model", "optim", "extra"],
    )
    truth = load_file(JOB / "truth.safetensors")
    masters = {n.removeprefix("master."): t for n, t in truth.items() if n.startswith("master.")}
    assert any(
        n.startswith(f"{len(masters)} fp32 masters (extra.master) are the weights of the result") for n in done.notes
    )
    with ckpttool.open(tmp_path / "zero") as back:
        groups = [back.checkpoint.value(f"optim.param_groups.{i}.params") for i in range(2)]
        assert not any("extra.master" in n for n in back)
    job = {"checkpoint": str(tmp_path / "zero"), "stage": stage, "shapes": {n: list(t.shape) for n, t in masters.items()}, "groups": groups,
           "out": str(tmp_path / "held.safetensors")}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    said = torchrun(2, "zero_masters.py", str(tmp_path / "job.json"))
    assert (tmp_path / "held.safetensors").exists(), said[-4000:]
    held = load_file(tmp_path / "held.safetensors")
    for name, master in masters.items():
        assert torch.equal(held[f"model.{name}"], master), name
        low = held[f"module.{name}"]
        assert low.dtype == torch.bfloat16 and torch.equal(low, truth[f"model.{name}"]), name
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[f"optim.{name}.{slot}"], truth[f"optim.{name}.{slot}"]), name
