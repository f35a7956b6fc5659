"""Megatron-FSDP's `fsdp_dtensor`, trained and saved by Megatron-Core's own code on CPU; live/megatron_fsdp.py says what stands in for a GPU: streams,
NCCL, and TransformerEngine's FusedAdam. Megatron-LM's few calls around it, which are in no package, are repeated there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import torchrun
from safetensors.torch import load_file

import ckpttool

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live, pytest.mark.slow]
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
#: {case: (arguments of jobs.Job, whether linear_fc1 is gated, arguments of DistributedDataParallelConfig)}; fp32 is without a gate since
#: handle_swiglu_in_state_dict of 0.16.1 looks for its weights below a Float16Module.
CASES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "gated": ({"bf16": True}, True, SHARDED),
    "fp32": ({}, False, SHARDED),
    "experts": ({"bf16": True, "experts": 4, "ep": 2}, True, SHARDED),
    "tensor_parallel": ({"bf16": True, "tp": 2}, True, SHARDED),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """(the folder in which two ranks save each case, {case: what they said of it})."""
    out = tmp_path_factory.mktemp("megatron_fsdp")
    cases = [
        {"folder": str(out / case), "truth": str(out / f"{case}.safetensors"), "how": how, "gated": gated, "ddp": ddp}
        for case, (how, gated, ddp) in CASES.items()
    ]
    cases.append({"folder": str(out / "standalone"), "truth": str(out / "standalone.safetensors")})
    (out / "cases.json").write_text(json.dumps(cases))
    printed = torchrun(2, "megatron_fsdp.py", str(out / "cases.json"))
    said = dict(zip([*CASES, "standalone"], json.loads((out / "cases.json").read_text()), strict=True))
    assert (out / "standalone.safetensors").exists(), printed[-4000:]
    return out, said


def step_folder(out: Path, case: str) -> Path:
    return out / case / "iter_0000003"


def differing(found: ckpttool.OpenCheckpoint, truth: dict[str, torch.Tensor]) -> list[str]:
    """The weights and moments that are not those of the ranks, on either side. The weights of a checkpoint are the fp32 ones of the
    optimizer, and those that the model computes with are the same, rounded."""
    wanted = {}
    for name, t in truth.items():
        kind, _, rest = name.partition(".")
        key, _, slot = rest.rpartition(".")
        if kind == "model":
            wanted[name] = master = truth.get(f"master.{rest}", t)
            assert torch.equal(master.to(t.dtype), t)
        elif kind == "optim":
            wanted[f"optim.state.{key}.{slot}"] = t
    got = {n: found[n].torch() for n in found if n.startswith(("model.", "optim."))}
    equal = {
        n for n in got.keys() & wanted.keys() if got[n].dtype == wanted[n].dtype and torch.equal(got[n], wanted[n])
    }
    return sorted((got.keys() | wanted.keys()) - equal)


@pytest.mark.parametrize("to", [None, "full", "dcp", "megatron"])
@pytest.mark.parametrize("case", CASES)
def test_weights_moments_and_settings_of_the_ranks_are_there_exactly(
    saved: tuple[Path, dict[str, dict[str, Any]]], case: str, to: str | None, tmp_path: Path
) -> None:
    out, said = saved
    where = step_folder(out, case)
    if to is not None:
        done = ckpttool.convert(where, tmp_path / "out", to=to, world_size=None if to == "full" else 2)
        assert done.verified and not done.dropped
        where = tmp_path / "out"
    with ckpttool.open(where) as found:
        assert differing(found, load_file(out / f"{case}.safetensors")) == []
        leaves = found.checkpoint.leaves()
    groups = [leaves["optim", "param_groups", i, "params"] for i in range(2)]
    settings = {
        name: [leaves["optim", "param_groups", i, key] for key in ("weight_decay", "step")]
        for i, names in enumerate(groups)
        for name in names
    }
    assert settings == said[case]["groups"]
    assert {p[1]: x for p, x in leaves.items() if p[0] == "scheduler"} == said[case]["scheduler"]
    assert leaves["trainer", "iteration"] == 3


def test_megatron_core_s_distributed_optimizer_loads_them_and_trains_on(
    saved: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """At other tensor- and expert-parallel sizes. With the sizes of the save, the next losses are those of the Megatron-FSDP job."""
    out, said = saved
    to: list[tuple[str, dict[str, Any]]] = [
        ("gated", {"bf16": True}),
        ("gated", {"bf16": True, "tp": 2, "padded": 144}),
        ("experts", {"bf16": True, "experts": 4}),
        ("tensor_parallel", {"bf16": True, "padded": 160}),
    ]
    cases = []
    for case, how in to:
        if not (tmp_path / case).exists():
            ckpttool.convert(step_folder(out, case), tmp_path / case, to="megatron", world_size=2)
        cases.append(
            {
                "checkpoint": str(tmp_path / case),
                "truth": str(out / f"{case}.safetensors"),
                "how": how,
                "override": True,
            }
        )
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    printed = torchrun(2, "megatron_resume.py", str(tmp_path / "cases.json"))
    found = json.loads((tmp_path / "cases.json").read_text())
    assert [x.get("different") for x in found] == [[]] * len(to), printed[-4000:]
    assert found[0]["losses"] == said["gated"]["losses"]


@pytest.mark.parametrize("to", [None, "full", "dcp"])
def test_a_model_of_fully_shard_is_read_as_plain_dcp(
    saved: tuple[Path, dict[str, dict[str, Any]]], to: str | None, tmp_path: Path
) -> None:
    """Its optimizer numbers the parameters."""
    where = saved[0] / "standalone"
    if to is not None:
        ckpttool.convert(where, tmp_path / "out", to=to, world_size=None if to == "full" else 2)
        where = tmp_path / "out"
    with ckpttool.open(where) as found:
        assert differing(found, load_file(saved[0] / "standalone.safetensors")) == []


def test_a_job_of_fully_shard_loads_what_is_written_for_another_world_size(
    saved: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    ckpttool.convert(saved[0] / "standalone", tmp_path / "out", to="dcp", world_size=3)
    case = {"load": str(tmp_path / "out"), "truth": str(tmp_path / "found.safetensors")}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    printed = torchrun(3, "megatron_fsdp.py", str(tmp_path / "cases.json"))
    assert (tmp_path / "found.safetensors").exists(), printed[-4000:]
    found, wanted = load_file(tmp_path / "found.safetensors"), load_file(saved[0] / "standalone.safetensors")
    assert found.keys() == wanted.keys()
    assert [n for n, t in wanted.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)] == []
