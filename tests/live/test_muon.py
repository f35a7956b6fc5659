"""Megatron-Core's Muon with its Adam, whole and layer by layer on the data-parallel ranks, is read, written and resumed; live/muon.py has a stand-in
for NVIDIA's emerging_optimizers, which is in no registry, where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import torchrun
from safetensors.torch import load_file

import ckpttool

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live, pytest.mark.slow]
#: Megatron-Core 0.16.1 saves the layer-wise optimizer of bf16 jobs alone.
CASES = {
    "layer_wise-experts": ({"bf16": True, "experts": 2}, True),
    "whole-fp32": ({}, False),
}


def run(ranks: int, folder: Path, cases: list[dict[str, object]]) -> list[dict[str, object]]:
    """Have ranks carry out cases of live/muon.py, and return what they say of each."""
    (folder / "cases.json").write_text(json.dumps(cases))
    said = torchrun(ranks, "muon.py", str(folder / "cases.json"))
    found: list[dict[str, object]] = json.loads((folder / "cases.json").read_text())
    assert all("how" in c and "distributed" in c["how"] for c in found), said[-4000:]  # type: ignore[operator]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which three ranks save each case."""
    out = tmp_path_factory.mktemp("muon")
    cases: list[dict[str, object]] = [
        {"folder": str(out / case), "truth": str(out / f"{case}.safetensors"), "how": how, "layer_wise": layer_wise}
        for case, (how, layer_wise) in CASES.items()
    ]
    run(3, out, cases)
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_the_ranks_and_the_groups_of_both_optimizers_are_there(saved: Path, case: str) -> None:
    of = ckpttool.inspect(saved / case).optimizer
    assert of is not None and list(of["kinds"]) == ["Muon", "AdamW or Adam"]
    assert [g["parameters"] for g in of["groups"]] == [10 if case.endswith("experts") else 8, 2, 5]
    with ckpttool.open(saved / case) as found:
        for name, wanted in load_file(saved / f"{case}.safetensors").items():
            kind, _, rest = name.partition(".")
            key, _, slot = rest.rpartition(".")
            there = {"model": name, "master": f"extra.master.{rest}", "optim": f"optim.state.{key}.{slot}"}[kind]
            if (
                kind == "master" and case == "whole-fp32"
            ):  # which Megatron-Core has for its model in fp32, and saves once
                there = f"model.{rest}"
            assert torch.equal(found[there].torch(), wanted), there
        assert {float(found[n].torch()) for n in found if n.endswith(".step")} == {3.0}


def test_a_job_with_other_ranks_goes_on_from_what_is_written_as_from_its_own(saved: Path, tmp_path: Path) -> None:
    cases: list[dict[str, object]] = []
    for case, (how, layer_wise) in CASES.items():
        ckpttool.convert(saved / case, tmp_path / case, to="megatron", world_size=2)
        # DeepSpeed has fp32 weights alone, and a job in bf16 masters and rounded weights
        dtype = "bf16" if how.get("bf16") else None
        ckpttool.convert(saved / case, tmp_path / f"{case}-zero3", to="zero3", world_size=3)
        ckpttool.convert(tmp_path / f"{case}-zero3", tmp_path / f"{case}-back", to="megatron", dtype=dtype)
        for folder in (saved / case, tmp_path / case, tmp_path / f"{case}-back"):
            cases.append(
                {
                    "checkpoint": str(folder),
                    "truth": str(saved / f"{case}.safetensors"),
                    "how": how,
                    "layer_wise": layer_wise,
                }
            )
    found = run(2, tmp_path, cases)
    assert [c["different"] for c in found] == [[]] * 6
    for own, written, back in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert own["losses"] == written["losses"] == back["losses"]
