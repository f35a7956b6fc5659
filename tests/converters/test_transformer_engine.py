"""What TransformerEngine's FusedAdam leaves in a checkpoint, and its quantised tensors.

TransformerEngine cannot be installed without CUDA, so its rules are written here once more from its source, 2.20 (common/multi_tensor/adam.cu,
pytorch/optimizers/fused_adam.py, pytorch/tensor): `split` is what its kernel stores of an fp32 master, `join` how it gets the master back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import load_dcp
from torch import Tensor

import ckpttool
from ckpttool.engine.transform.remainders import join_halves
from ckpttool.errors import Unsupported

SHAPES = {"embed.weight": (131, 9), "layers.0.up.weight": (7, 9), "layers.0.norm.weight": (9,), "scale": (), "empty": (0, 4)}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 weight, int16 remainder), number by number as the kernel does it in registers of 16 bits."""
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    high = (((bits >> 16) & 0xFFFF) + (low < 0)) & 0xFFFF
    signed = ((high ^ 0x8000) - 0x8000).to(torch.int16)
    return signed.view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master, as the kernel puts it together before it updates it."""
    high = weight.contiguous().view(torch.int16).to(torch.int64)
    high = torch.where(remainder < 0, high - 1, high) & 0xFFFF
    return ((high << 16) | (remainder.to(torch.int64) & 0xFFFF)).to(torch.int32).view(torch.float32)


def masters() -> dict[str, Tensor]:
    """fp32 masters of odd shapes, among them numbers halfway between two bf16, infinities, NaN and zeros."""
    torch.manual_seed(0)
    out = {n: torch.randn(shape) for n, shape in SHAPES.items()}
    odd = [1 + 2.0**-8, -(1 + 2.0**-8), 1 + 3 * 2.0**-8, 3.4e38, -0.0, 2.0**-140, torch.inf, torch.nan]
    out["layers.0.norm.weight"][: len(odd)] = torch.tensor(odd)
    return out


def state(**how: Any) -> dict[str, Any]:
    """The state of a job with FusedAdam(master_weights=True, store_param_remainders=True), by names."""
    halves = {n: split(m) for n, m in masters().items()}
    slots = {
        n: {"exp_avg": torch.randn(SHAPES[n]), "exp_avg_sq": torch.rand(SHAPES[n]), "master_param": low}
        for n, (_, low) in halves.items()
    }
    group = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 3}
    return {
        "model": {n: weight for n, (weight, _) in halves.items()},
        "optim": {"state": slots, "param_groups": [{**group, "params": list(SHAPES)}]},
        **how,
    }


def same(a: Tensor, b: Tensor) -> bool:
    flat = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


# ------------------------------------------------------------------------------------------------------ store_param_remainders


def test_every_weight_and_the_edges_of_remainders_are_joined_as_the_kernel_does_it() -> None:
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for low in (0, 1, 0x7FFF, -0x8000, -0x7FFF, -1, 0x1234, -0x1234):
        remainder = torch.full_like(weight, low, dtype=torch.int16)
        found = join_halves(weight.view(torch.int16).numpy(), remainder.numpy())
        assert same(torch.from_numpy(found), join(weight, remainder))
    bits = torch.arange(-(1 << 31), 1 << 31, 4093).to(torch.int32)
    edges = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64) << 16
    bits = torch.cat([bits, *[(edges + k).to(torch.int32) for k in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]])
    halves = [x.view(torch.int16).numpy() for x in split(bits.view(torch.float32))]
    assert np.array_equal(join_halves(*halves).view("i4"), bits.numpy())


@pytest.fixture(params=["full", "dcp"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "full":
        torch.save(state(), tmp_path / "a.pt")
        return tmp_path / "a.pt"
    dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    return tmp_path / "a"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["full", "dcp"])
def test_remainders_stay_as_they_are_and_that_is_said(saved: Path, to: str, tmp_path: Path) -> None:
    done = ckpttool.convert(saved, tmp_path / "out", to=to, world_size=3 if to == "dcp" else None)
    assert any("5 fp32 masters" in n and "stay as they are stored" in n for n in done.notes)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            weight, low = (opened[f"{k}"].torch() for k in (f"model.{n}", f"optim.state.{n}.master_param"))
            assert low.dtype == torch.int16 and same(join(weight, low), master)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["full", "dcp"])
def test_dequantize_joins_them_exactly(saved: Path, to: str, tmp_path: Path) -> None:
    done = ckpttool.convert(
        saved, tmp_path / "out", to=to, world_size=3 if to == "dcp" else None, dequantize=["*.master_param"], dtype="fp16"
    )
    assert any("5 fp32 masters" in n and "joined from bf16 weights and int16 remainders" in n for n in done.notes)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            assert same(opened[f"optim.state.{n}.master_param"].torch(), master), n
            assert opened[f"model.{n}"].dtype == "float16"
            assert opened[f"optim.state.{n}.exp_avg"].dtype == "float32"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "universal", "fsdp1"])
def test_engines_whose_weights_are_masters_get_the_joined_ones(saved: Path, to: str, tmp_path: Path) -> None:
    how = {"universal": {}, "fsdp1": {"world_size": 3, "wrap": ["*"]}}.get(to, {"world_size": 3})
    ckpttool.convert(saved, tmp_path / "out", to=to, drop=True, **how)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            assert same(opened[f"model.{n}"].torch(), master), n
        assert not any("master" in n for n in opened)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_cast_of_the_weights_would_lose_them_and_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r'"model.embed.weight" in float32: its fp32 master is stored as the int16'):
        ckpttool.convert(saved, tmp_path / "out.pt", to="full", dtype="fp32")
    ckpttool.convert(saved, tmp_path / "out.pt", to="full", dtype="fp32", only=["model"])
    ckpttool.convert(saved, tmp_path / "keep.pt", to="full", dtype="bf16")


def test_an_int16_tensor_that_fits_no_weight_is_no_remainder(tmp_path: Path) -> None:
    tree = state()
    tree["model"]["embed.weight"] = tree["model"]["embed.weight"].float()
    torch.save(tree, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert any("4 fp32 masters" in n for n in done.notes)
