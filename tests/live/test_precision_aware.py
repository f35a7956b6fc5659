"""Megatron-Core's precision-aware optimizer, saved by Megatron-Core itself in every sharding that 0.16.1 writes; live/precision_aware.py has a
stand-in for TransformerEngine's FusedAdam, which needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import torchrun
from safetensors.torch import load_file, save_file

import ckpttool

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
HALVES = {"store_param_remainders": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
WIDE = {"store_param_remainders": False, "exp_avg_dtype": "float16", "exp_avg_sq_dtype": "bfloat16"}
CASES = {
    "fully_reshardable-halves": ({"bf16": True}, HALVES),
    "dp_reshardable-halves": ({"bf16": True, "sharding": "dp_reshardable"}, HALVES),
    "dp_reshardable-wide": ({"bf16": True, "sharding": "dp_reshardable"}, WIDE),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which three ranks save each case."""
    out = tmp_path_factory.mktemp("precision_aware")
    cases = [
        {"folder": str(out / case), "truth": str(out / f"{case}.safetensors"), "how": how, "optimizer": optimizer}
        for case, (how, optimizer) in CASES.items()
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    said = torchrun(3, "precision_aware.py", str(out / "cases.json"))
    assert all((out / f"{case}.safetensors").exists() for case in CASES), said[-4000:]
    return out


def truth(saved: Path, case: str) -> dict[str, torch.Tensor]:
    """What the ranks held: weights, moments as they compute with them, and masters, joined here where they are remainders."""
    out = load_file(saved / f"{case}.safetensors")
    for name, low in [(n, t) for n, t in out.items() if n.startswith("master.") and t.dtype == torch.int16]:
        high = out[f"model.{name.removeprefix('master.')}"].view(torch.int16).to(torch.int32) - (low < 0).to(
            torch.int32
        )
        out[name] = ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)
    return out


def differing(found: ckpttool.OpenCheckpoint, wanted: dict[str, torch.Tensor], masters: str) -> list[str]:
    """The tensors that are not those of the ranks; `masters` is the prefix of the names of masters in the checkpoint."""
    out = []
    for name, t in wanted.items():
        kind, _, rest = name.partition(".")
        key, _, slot = rest.rpartition(".")
        there = {"model": f"model.{rest}", "master": f"{masters}.{rest}", "optim": f"optim.state.{key}.{slot}"}[kind]
        got = found[there].torch()
        if got.dtype != t.dtype or not torch.equal(got, t):
            out.append(there)
    return out


@pytest.mark.parametrize("to", ["dcp", "full", "zero3", "megatron"])
def test_masters_and_moments_of_the_ranks_are_there_exactly(saved: Path, to: str, tmp_path: Path) -> None:
    for case in CASES:
        done = ckpttool.convert(
            saved / case, tmp_path / case, to=to, world_size=None if to == "full" else 2,
            only=["model", "optim", "extra"] if to == "zero3" else None,
        )  # fmt: skip
        joined = case == "fully_reshardable-halves" or (case.endswith("halves") and to in ("zero3", "megatron"))
        assert any("joined from bf16 weights and int16" in n for n in done.notes) == joined
        assert any("named by the order of the model" in n for n in done.notes) == (case == "dp_reshardable-halves")
        with ckpttool.open(tmp_path / case) as found:
            wanted = truth(saved, case) if joined or case.endswith("wide") else load_file(saved / f"{case}.safetensors")
            if to == "zero3":
                wanted = {n: t for n, t in wanted.items() if not n.startswith("model.")}
            assert differing(found, wanted, "model" if to == "zero3" else "extra.master") == []
        ckpttool.verify(tmp_path / case, read_data=True)


def test_megatron_core_loads_the_joined_masters_at_another_tensor_parallel_size(saved: Path, tmp_path: Path) -> None:
    """With torch's AdamW, whose masters are fp32: no job loads remainders out of fully_reshardable."""
    case = "dp_reshardable-halves"
    ckpttool.convert(saved / case, tmp_path / "out", to="megatron", world_size=2)
    save_file(truth(saved, case), tmp_path / "truth.safetensors")
    how = {"bf16": True, "tp": 2, "padded": 144}
    job = {"checkpoint": str(tmp_path / "out"), "truth": str(tmp_path / "truth.safetensors"), "how": how}
    (tmp_path / "cases.json").write_text(json.dumps([job]))
    said = torchrun(2, "megatron_resume.py", str(tmp_path / "cases.json"))
    (found,) = json.loads((tmp_path / "cases.json").read_text())
    assert found.get("different") == [], said[-4000:]
