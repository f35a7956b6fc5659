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
from ckpttool.engine.copy.stream import Reader
from ckpttool.engine.doctor.examine import doctor
from ckpttool.engine.doctor.findings import Finding
from ckpttool.engine.runs import list_run
from ckpttool.engine.transform import masters as compared
from ckpttool.errors import Corrupt

#: {checkpoint that a trainer wrote: how many of its weights have an fp32 master}
SOUND = {
    **{f"megatron/{case}/ckpt/iter_0000003": 15 for case in (
        "stacked_pp2_bf16", "flat_ranges", "buckets_tp2", "buckets_dp3", "buckets_ones", "buckets_pp2_stacked", "plain_optimizer", "verl")},
    "nanotron/zero1/3": 6, "zero2_w3_bf16/ckpt": 16, "megatron/tp2_pp2/ckpt/iter_0000003": 15, "zero2_w2_roundrobin/ckpt": 0, "zero3_w2_fp16/ckpt": 0,
}  # fmt: skip


def masters(path: Path, **how: Any) -> list[Finding]:
    return [f for f in doctor(path, read_data=True, **how).findings if f.kind == "masters"]


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND)
def test_masters_of_every_trainer_round_to_their_weights(case: str) -> None:
    assert masters(FIXTURES / case) == []
    with ckpttool.open(FIXTURES / case) as opened:
        opened.locate()
        assert len(compared.find_master_pairs(opened.checkpoint)) == SOUND[case]


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
    masters["norm"] = torch.full((5,), 1 + 2.0**-20)  # beside a float32 weight that was bfloat16 once
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
    assert [f.kind for f in doctor(path).findings] == ["masters"]  # by a sample
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
    assert "2 of 4 fp32 masters" in one.text


@pytest.mark.slow
def test_a_save_that_megatron_core_itself_gets_wrong_is_found(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "megatron" / "wrong" / "buckets.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (one,) = masters(tmp_path / "ckpt" / "iter_0000003")
    source = tmp_path / "ckpt" / "iter_0000003"
    for command in (lambda: ckpttool.convert(source, tmp_path / "a.pt"), lambda: ckpttool.verify(source)):
        with pytest.raises(Corrupt, match=r"10 of 15 fp32 masters.*fully_reshardable.*allow_mixed_steps"):
            command()
    # the moments are of the wrong places, too, also where the masters were not asked for; the weights are not
    for only in (["optim"], ["model", "optim"], ["optim", "extra"]):
        with pytest.raises(Corrupt, match=r"10 of 15 fp32 masters"):
            ckpttool.convert(source, tmp_path / "a.pt", only=only)
    assert not (tmp_path / "a.pt").exists()
    assert ckpttool.convert(source, tmp_path / "weights.pt", only=["model"])
    assert [f.kind for f in doctor(source).findings if f.severity == "damage"] == ["masters"]
    said = f"take another copy; of the weights alone: ckpttool convert {source} OUT --only model --to dcp -n RANKS"
    for part in (None, ["optim"]):
        found = ckpttool.inspect(source, only=part)
        assert any("10 of 15 fp32 masters do not round" in n for n in found.notes)
        assert found.next == said or part
    assert list_run(tmp_path / "ckpt").steps[0].next_step == said
    assert not any("masters" in n for n in ckpttool.inspect(source, only=["model"]).notes)
    ckpttool.convert(source, tmp_path / "a.pt", allow_mixed_steps=True)
    tree = torch.load(tmp_path / "a.pt", weights_only=False)
    wrong = [n for n, t in tree["extra"]["master"].items() if not torch.equal(t.bfloat16(), tree["model"][n])]
    assert len(wrong) == 10 and set(one.tensors) == {f"model.{n}" for n in wrong}


@pytest.mark.slow
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


def test_a_master_is_equal_to_a_weight_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    master = torch.randn(70, 30)
    for weight in (master, master.bfloat16().float(), master.half().float(), master.clone().fill_(torch.nan)):
        wide = weight if weight.isnan().all() else master
        torch.save({"model": {"w": weight}, "extra": {"master": {"w": wide}}}, tmp_path / "a.pt")
        assert masters(tmp_path / "a.pt") == []
        assert ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", force=True)
    weight = master.clone()
    weight[69] += 2.0**-20
    torch.save({"model": {"w": weight}, "extra": {"master": {"w": master}}}, tmp_path / "a.pt")
    (one,) = masters(tmp_path / "a.pt")
    changed = int((weight != master).sum())
    assert f"{changed} of 2,100 elements, the first at [69, 0]" in one.text
    assert f"the master is {master[69, 0].item():.9g}, and the weight is {weight[69, 0].item():.9g}" in one.text


def test_inspect_looks_at_some_of_many_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    masters = {f"w{i:03}": torch.randn(9, 5) for i in range(200)}
    weights = {n: m.bfloat16() + (n > "w120") for n, m in masters.items()}
    torch.save({"model": weights, "extra": {"master": masters}}, tmp_path / "a.pt")
    assert any(
        n.startswith("of 200 fp32 masters 32 were looked at: 12 of 32 ")
        for n in ckpttool.inspect(tmp_path / "a.pt").notes
    )


@pytest.mark.parametrize("shape", [(300, 700), (100000,), (3, 40, 2000), (1, 50000, 3)])
def test_a_conversion_looks_at_a_sample_and_verify_at_all(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    master, path = torch.randn(shape), tmp_path / "a.pt"

    def saved(first: int, last: int) -> Tensor:
        weight = master.bfloat16().reshape(-1)
        weight[first:last] += 1
        torch.save({"model": {"w": weight.reshape(shape)}, "extra": {"master": {"w": master}}}, path)
        return weight

    saved(0, 0)
    found = ckpttool.verify(path, read_data=True)
    assert (found.numbers, found.compared) == ("ok", {"masters": 1, "averages": 0})
    assert "numbers ok: compared 1 master with the weights" in found.lines()
    saved(0, master.numel())
    with pytest.raises(Corrupt, match=r"that were looked at, the first at \[0"):
        ckpttool.convert(path, tmp_path / "out.pt")
    for first in (master.numel() - 1, 0):  # both ends are looked at
        saved(first, first + 1)
        with pytest.raises(Corrupt, match="1 of "):
            ckpttool.convert(path, tmp_path / "out.pt")


@pytest.mark.slow
def test_verify_reads_what_the_sample_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    master, path = torch.randn(1000, 500), tmp_path / "a.pt"
    weight = master.bfloat16()
    weight[17, 23] += 1
    tree = {"model": {"w": weight}, "extra": {"master": {"w": master}}}
    torch.save(tree, path)
    assert ckpttool.verify(path).numbers is None
    weights = ckpttool.verify(path, read_data=True, only=["model"])
    assert weights.numbers is weights.compared is None and not any("numbers" in line for line in weights.lines())
    for how in ({}, {"workers": 2}):
        with pytest.raises(Corrupt, match=r"1 of 500,000 elements, the first at \[17, 23\]"):
            ckpttool.verify(path, read_data=True, **how)
    found = ckpttool.verify(path, read_data=True, allow_mixed_steps=True)
    assert found.numbers == "contradict" and any("[17, 23]" in n for n in found.notes)


def test_a_sample_of_a_tensor_of_many_chunks_is_that_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    master = torch.randn(600, 40)
    weight = master.bfloat16()
    weight[599] += 1
    torch.save({"model": {"w": weight}, "extra": {"master": {"w": master}}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "many", to="dcp", world_size=40, allow_mixed_steps=True)
    with pytest.raises(
        Corrupt,
        match=r"40 of 16,\d+ elements that were looked at, the first at \[599, 0\], in __39_0\.distcp of rank 39",
    ):
        ckpttool.verify(tmp_path / "many")


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
