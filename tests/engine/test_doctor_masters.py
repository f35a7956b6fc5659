"""`doctor --read-data` on fp32 masters. torch rounds them here, and says which elements differ from the weights."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_files
from peers import FIXTURES
from torch import Tensor

import ckpttool
from ckpttool.engine import checks_masters
from ckpttool.engine.doctor import doctor
from ckpttool.engine.findings import Finding
from ckpttool.engine.stream import Reader

#: {checkpoint that a trainer wrote: how many of its weights have an fp32 master}
SOUND = {
    **{f"megatron/{case}/ckpt/iter_0000003": 15 for case in (
        "stacked_pp2_bf16", "flat_ranges", "buckets_tp2", "buckets_dp3", "buckets_ones", "buckets_pp2_stacked", "plain_optimizer", "verl")},
    "nanotron/zero1/3": 6, "zero2_w3_bf16/ckpt": 16, "megatron/tp2_pp2/ckpt/iter_0000003": 0, "zero2_w2_roundrobin/ckpt": 0, "zero3_w2_fp16/ckpt": 0,
}  # fmt: skip


def masters(path: Path, **how: Any) -> list[Finding]:
    return [f for f in doctor(path, read_data=True, **how).findings if f.kind == "masters"]


@pytest.mark.parametrize("case", SOUND)
def test_masters_of_every_trainer_round_to_their_weights(case: str) -> None:
    assert masters(FIXTURES / case) == []
    with ckpttool.open(FIXTURES / case) as opened:
        opened.locate()
        assert len(checks_masters._pairs(opened.checkpoint)) == SOUND[case]


def state(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    masters = {
        "a.weight": torch.randn(131, 17),
        "b.weight": torch.randn(40, 3, 5),
        "c": torch.randn(()),
        "none": torch.zeros(0, 4),
    }
    model = {n: t.to(dtype) for n, t in masters.items()}
    model |= {"frozen": torch.randn(7).to(dtype), "norm": torch.ones(5)}
    masters["norm"] = torch.full((5,), 1 + 2.0**-20)  # beside a float32 weight, which is no rounded one
    return {"model": model, "extra": {"master": masters}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_elements_that_do_not_round_are_counted_and_the_first_is_named(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Reader.__init__

    def small_blocks(self: Reader, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.block_bytes = 512

    monkeypatch.setattr(Reader, "__init__", small_blocks)
    tree, path = state(dtype), tmp_path / "a.pt"
    torch.save(tree, path)
    assert doctor(path, read_data=True).findings == []
    copies: dict[str, Tensor] = tree["extra"]["master"]
    copies["a.weight"][60:] *= 1.01
    copies["c"] += 1
    torch.save(tree, path)
    assert doctor(path).findings == []
    wrong = copies["a.weight"].to(dtype) != tree["model"]["a.weight"]
    first = torch.nonzero(wrong)[0].tolist()
    (one,) = masters(path)
    assert one.tensors == ("model.a.weight", "model.c") and one.severity == "damage"
    assert f"{int(wrong.sum()):,} of {wrong.numel():,} elements, the first at {first}, in a.pt" in one.text
    at = tuple(first)
    assert (
        f"rounds to {copies['a.weight'].to(dtype)[at].item():.9g}, and the weight is {tree['model']['a.weight'][at].item():.9g}"
        in one.text
    )
    assert "2 of 3 fp32 masters" in one.text


def test_a_save_that_megatron_core_itself_gets_wrong_is_found(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "megatron" / "wrong" / "buckets.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (one,) = masters(tmp_path / "ckpt" / "iter_0000003")
    ckpttool.convert(tmp_path / "ckpt" / "iter_0000003", tmp_path / "a.pt")
    tree = torch.load(tmp_path / "a.pt", weights_only=False)
    wrong = [n for n, t in tree["extra"]["master"].items() if not torch.equal(t.bfloat16(), tree["model"][n])]
    assert len(wrong) == 10 and set(one.tensors) == {f"model.{n}" for n in wrong}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_round_as_torch_does_are_no_finding(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(-(1 << 31), 1 << 31, 4093).to(torch.int32)  # of every exponent, with ties, NaN and infinity
    wide = torch.cat(
        [
            bits.view(torch.float32),
            torch.tensor([0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-130, torch.nan, torch.inf]),
        ]
    )
    weight = wide.to(dtype)
    flushed = weight.clone()
    flushed[wide.abs() < 2.0**-126] = 0.0  # by kernels with fast math
    for w in (weight, flushed):
        torch.save({"model": {"w": w}, "extra": {"master": {"w": wide}}}, tmp_path / "a.pt")
        assert masters(tmp_path / "a.pt") == []
    weight[-4] = 1.0  # of 1 + 3/256
    torch.save({"model": {"w": weight}, "extra": {"master": {"w": wide}}}, tmp_path / "a.pt")
    (one,) = masters(tmp_path / "a.pt")
    assert f"1 of {wide.numel():,} elements" in one.text


def test_weights_that_were_cast_to_the_other_half_are_no_finding(tmp_path: Path) -> None:
    ckpttool.convert(FIXTURES / "megatron/stacked_pp2_bf16/ckpt/iter_0000003", tmp_path / "a.pt", dtype="fp16")
    tree = torch.load(tmp_path / "a.pt")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    copy, weight = tree["extra"]["master"][name], tree["model"][name]
    assert weight.dtype == torch.float16 and not torch.equal(copy.half(), weight)
    assert masters(tmp_path / "a.pt") == []


def test_weights_of_deepspeed_that_are_of_another_step_than_the_masters_are_found(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2_w3_bf16" / "ckpt", tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").rglob("mp_rank_00_model_states.pt")
    with ckpttool.open(tmp_path / "ckpt") as opened:
        name = next(
            n for n, t in opened.checkpoint.tensors.items() if n in opened.checkpoint.rounded and len(t.shape) > 1
        )
        master = opened[name].torch()
    torch.save({"step": 3}, tmp_path / "ckpt" / "random_states_0.pkl")  # as Accelerate saves an engine of DeepSpeed
    with ckpttool.open(tmp_path / "ckpt") as opened:
        assert opened.checkpoint.layout == "accelerate"
    assert masters(tmp_path / "ckpt") == []
    changed = 0

    def change(tree: Any) -> None:
        nonlocal changed
        weight = tree["module"][name.removeprefix("model.")]
        weight[1:] += 0.25
        changed = int((weight != master.bfloat16()).sum())

    zero_files.edit(file, change)
    (one,) = masters(tmp_path / "ckpt")
    assert one.tensors == (name,) and f"{changed:,} of {master.numel():,} elements, the first at [1, 0]" in one.text
