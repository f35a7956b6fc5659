"""`doctor --read-data` on numbers. torch itself says where the first bad element is."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.engine.copy.stream import Reader
from ckpttool.engine.doctor import checks_numbers
from ckpttool.engine.doctor.examine import Diagnosis, doctor
from ckpttool.engine.doctor.findings import Finding
from ckpttool.errors import Corrupt

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def only(found: Diagnosis, kind: str) -> Finding:
    (one,) = [f for f in found.findings if f.kind == kind]
    return one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_element_that_is_no_number_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weights = {
        "a.weight": torch.randn(9, 20).to(dtype),
        "b.weight": torch.randn(7, 11, 13).to(dtype),
        "ids": torch.arange(5),
    }
    save_file(weights, tmp_path / "w.safetensors")
    assert not doctor(tmp_path / "w.safetensors", read_data=True).findings
    bad = torch.randn(7, 11, 13)
    bad[4, 5, 6] = torch.nan
    bad[6, 0, 0] = torch.inf
    bad[6, 1, 0] = -torch.nan
    weights["b.weight"] = bad.to(dtype)
    save_file(weights, tmp_path / "w.safetensors")
    wrong = ~torch.isfinite(weights["b.weight"].float())
    first = torch.nonzero(wrong)[0].tolist()
    assert not doctor(tmp_path / "w.safetensors").findings
    found = doctor(tmp_path / "w.safetensors", read_data=True)
    one = only(found, "nan")
    assert not found.sound and one.tensors == ("model.b.weight",)
    assert f"{int(wrong.sum())} of 1,001 elements, the first at {first}, in w.safetensors" in one.text


def test_infinity_is_no_fault_in_a_single_number_of_a_callback(tmp_path: Path) -> None:
    def kinds(state: dict[str, Any]) -> list[str]:
        torch.save({"state_dict": {"w": torch.ones(3, 2)}, **state}, tmp_path / "x.ckpt")
        return [f.kind for f in doctor(tmp_path / "x.ckpt", read_data=True).findings]

    inf, nan = torch.tensor(torch.inf), torch.tensor(torch.nan)
    assert kinds({"callbacks": {"ModelCheckpoint": {"kth_value": inf, "best": -inf.double()}}}) == []
    assert kinds({"callbacks": {"ModelCheckpoint": {"current_score": nan}}}) == ["nan"]
    assert kinds({"callbacks": {"Average": {"w": torch.tensor([1.0, torch.inf])}}}) == ["nan"]
    assert kinds({"state_dict": {"w": torch.ones(3, 2), "scale": inf}}) == ["nan"]


@pytest.mark.parametrize(
    ("place", "value"),
    [("optim.param_groups.0.lr", math.nan), ("optim.param_groups.0.betas", (0.9, math.nan)), ("scheduler.base_lrs", [math.nan]), ("scaler.scale", math.nan)],
)  # fmt: skip
def test_a_number_beside_tensors_that_is_none_is_named(tmp_path: Path, place: str, value: object) -> None:
    tree: Any = {"model": {"w": torch.ones(2)}, "optim": {"state": {}, "param_groups": [{"params": ["w"]}]}, "scheduler": {"best": math.inf}, "scaler": {}}  # fmt: skip
    torch.save(tree, tmp_path / "a.pt")
    assert doctor(tmp_path / "a.pt", read_data=True).sound
    component, *path, key = place.split(".")
    inner = tree[component]
    for part in path:
        inner = inner[int(part) if part.isdigit() else part]
    inner[key] = value
    torch.save(tree, tmp_path / "a.pt")
    (finding,) = doctor(tmp_path / "a.pt", read_data=True).findings
    assert (finding.kind, finding.severity, finding.tensors) == ("nan", "damage", (place,))


def test_the_rank_of_a_bad_element_and_blocks_that_are_smaller_than_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(peers.FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "d")
    with ckpttool.open(tmp_path / "d") as opened:
        ckpt = opened.locate()
        t = max((t for t in ckpt.tensors.values() if t.path[0] == "model"), key=lambda t: t.nbytes)
        chunk = next(c for c in t.chunks if c.start[0] > 0)
        name, rank_file = ".".join(map(str, t.path)), ckpt.files[chunk.extent.file]
    data = bytearray((tmp_path / "d" / rank_file).read_bytes())
    item = chunk.extent.length // (chunk.shape[0] * chunk.shape[1])
    nan = {4: np.float32("nan").tobytes(), 2: b"\xc0\x7f"}[item]
    at = chunk.extent.offset + item * (chunk.shape[1] + 2)
    data[at : at + item] = nan
    (tmp_path / "d" / rank_file).write_bytes(data)
    init = Reader.__init__

    def small_blocks(self: Reader, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.block_bytes = 4096

    monkeypatch.setattr(Reader, "__init__", small_blocks)
    # the CRC32 of the record is wrong now: that is found first, so numbers are looked at without it
    with ckpttool.open(tmp_path / "d") as opened:
        ckpt = opened.locate()
        numbers = checks_numbers.NumbersCheck(ckpt)
        for block in Reader(opened.source, ckpt.files).blocks(checks_numbers_jobs(ckpt.tensors)):
            numbers.add(block)
    (one,) = numbers.findings()
    index = [chunk.start[0] + 1, 2]
    assert one.tensors == (name,) and f"the first at {index}, in {rank_file} of rank {rank_file[2]}" in one.text
    assert not doctor(tmp_path / "d", read_data=True).sound


def checks_numbers_jobs(tensors: dict[str, Any]) -> list[Any]:
    from ckpttool.engine.copy.stream import StreamJob

    return [StreamJob(n, t) for n, t in tensors.items()]


def test_second_moments_below_zero_and_weights_of_one_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    path = tmp_path / "w.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert not doctor(path, read_data=True).findings
    tree = torch.load(path)
    tree["optimizer"]["state"][0]["exp_avg_sq"][3, 4] = -1e-9
    tree["optimizer"]["state"][0]["exp_avg_sq"][3, 3] = -0.0
    tree["model"]["0.weight"].fill_(0.0)
    tree["model"]["2.weight"].fill_(0.25)
    tree["model"]["0.bias"].fill_(0.0)  # as many models begin
    torch.save(tree, path)
    found = doctor(path, read_data=True)
    assert {f.kind for f in found.findings} == {"negative-moment", "all-zero", "constant"}
    one = only(found, "negative-moment")
    assert one.tensors == ("optim.state.0.weight.exp_avg_sq",) and "1 of 128 elements, the first at [3, 4]" in one.text
    assert only(found, "all-zero").tensors == ("model.0.weight",) and only(found, "all-zero").severity == "note"
    assert only(found, "constant").tensors == ("model.2.weight",)
    assert not found.sound


@pytest.mark.slow
@pytest.mark.parametrize("to", ["full", "dcp", "zero1", "zero3", "universal", "fsdp1", "torch_checkpointing"])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_conversion_stops_at_an_average_of_squares_below_zero(to: str, workers: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(70, 30)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(4, 70)).square().sum().backward()
    optimizer.step()
    names = dict(enumerate(n for n, _ in model.named_parameters()))
    optim = {
        "state": {names[i]: s for i, s in optimizer.state_dict()["state"].items()},
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    optim["param_groups"][0]["params"] = list(names.values())
    tree: dict[str, Any] = {"model": model.state_dict(), "optim": optim}
    path, ranks = tmp_path / "a.pt", {} if to in ("full", "universal") else {"world_size": 2}
    moment = tree["optim"]["state"]["weight"]["exp_avg_sq"]
    moment[0, 0], moment[1, 1], moment[2, 2] = -0.0, torch.nan, torch.inf
    torch.save(tree, path)
    assert ckpttool.convert(path, tmp_path / "out", to=to, workers=workers, drop=True, **ranks).verified
    moment[13, 7] = -1e-30
    torch.save(tree, path)
    with pytest.raises(Corrupt, match=r'"optim\.state\.weight\.exp_avg_sq": .*allow_mixed_steps'):
        ckpttool.convert(path, tmp_path / "two", to=to, workers=workers, drop=True, **ranks)
    assert not (tmp_path / "two").exists()
    with pytest.raises(Corrupt, match=r"1 of 2,100 elements, the first at \[13, 7\]"):
        ckpttool.verify(path, read_data=True, workers=workers)
    assert ckpttool.convert(
        path, tmp_path / "two", to=to, workers=workers, drop=True, allow_mixed_steps=True, **ranks
    ).verified
