"""`--for verl`: files of ranks with DTensors, as FSDPCheckpointManager of verl loads them (tests/live/test_resume_pairs.py resumes)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import FIXTURES, same_value

import ckpttool
from ckpttool.errors import Unsupported, UsageError

VERL = FIXTURES / "trainers" / "verl_fsdp2_w3" / "ckpt"
CONFIG = VERL / "huggingface"
WORLD = 3


def loaded(step: Path, what: str, rank: int, world: int = WORLD) -> Any:
    return torch.load(step / "actor" / f"{what}_world_size_{world}_rank_{rank}.pt", weights_only=False)


def state() -> dict[str, Any]:
    """A tied weight, one of bf16, one with fewer rows than ranks, a frozen one, a buffer, a 0-dimensional tensor; two groups."""
    torch.manual_seed(5)
    weights = {
        "embed.weight": torch.randn(131, 3), "b.weight": torch.randn(7, 2, 2).bfloat16(), "b.bias": torch.randn(1), "frozen.weight": torch.randn(5, 2),
        "norm.running_mean": torch.randn(4), "scale": torch.tensor(2.5),
    }  # fmt: skip
    weights["head.weight"] = weights["embed.weight"]
    trained = ["embed.weight", "b.weight", "b.bias"]
    slots = {n: {"step": torch.tensor(4.0), "exp_avg": torch.randn_like(weights[n])} for n in trained}
    groups = [{"lr": 0.1, "params": ["embed.weight", "frozen.weight"]}, {"lr": 0.2, "params": ["b.weight", "b.bias"]}]
    rng = {
        str(r): {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        for r in (0, 2)
    }
    return {
        "model": weights, "optim": {"state": slots, "param_groups": groups}, "scheduler": {"last_epoch": 4}, "rng": rng,
        "dataloader": {"_num_yielded": 4, "_snapshot": {"rows": 12}}, "epoch": 1,
    }  # fmt: skip


def test_every_rank_finds_its_rows_and_reading_again_gives_the_same_state(tmp_path: Path) -> None:
    tree = state()
    torch.save(tree, tmp_path / "a.pt")
    own = ckpttool.VerlOptions(mesh_device="cpu")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "step", to="verl", world_size=WORLD, options=own)
    rows: dict[str, list[torch.Tensor]] = {}
    for rank in range(WORLD):
        model = loaded(tmp_path / "step", "model", rank)
        for name, whole in tree["model"].items():
            if name in ("norm.running_mean", "scale"):
                assert same_value(model[name], whole)
                continue
            x = model[name]
            assert (x.shape, x.device_mesh.device_type, x.device_mesh.mesh_dim_names) == (
                whole.shape,
                "cpu",
                ("fsdp",),
            )
            assert x.device_mesh.mesh.tolist() == [0, 1, 2] and list(x.device_mesh.get_coordinate()) == [rank]
            assert x.placements == (torch.distributed.tensor.Shard(0),)
            rows.setdefault(name, []).append(x._local_tensor)
        assert model["head.weight"]._local_tensor.data_ptr() == model["embed.weight"]._local_tensor.data_ptr()
        optim = loaded(tmp_path / "step", "optim", rank)
        assert [g["params"] for g in optim["param_groups"]] == [[0, 1], [2, 3]]
        assert set(optim["state"]) == {0, 2, 3} and optim["state"][2]["step"] == 4.0
        rows.setdefault("exp_avg of b.weight", []).append(optim["state"][2]["exp_avg"]._local_tensor)
        extra = loaded(tmp_path / "step", "extra_state", rank)
        assert extra["lr_scheduler"] == {"last_epoch": 4} and ("rng" in extra) == (rank != 1)
        if rank != 1:
            assert extra["rng"]["random"] == tree["rng"][str(rank)]["python"] and extra["rng"].keys() == {
                "cpu",
                "numpy",
                "random",
            }
    for name, parts in rows.items():
        whole = tree["model"].get(name, tree["optim"]["state"]["b.weight"]["exp_avg"])
        assert torch.equal(torch.cat(parts), whole) and [len(p) for p in parts] == [len(c) for c in _chunks(whole)]
    assert same_value(torch.load(tmp_path / "step" / "data.pt"), tree["dataloader"])
    back = ckpttool.convert(tmp_path / "step", tmp_path / "b.pt")
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    assert (
        back.verified
        and same_value(again["model"], tree["model"])
        and same_value(again["optim"]["state"], tree["optim"]["state"])
    )


def _chunks(x: torch.Tensor) -> list[torch.Tensor]:
    parts = list(x.chunk(WORLD))
    return parts + [x[:0]] * (WORLD - len(parts))


def test_on_gpus_an_rng_state_without_that_of_the_gpu_is_kept_beside_verl_s_files(tmp_path: Path) -> None:
    """`load_rng_state` of verl asks for rng[device] and would end in a KeyError."""
    tree = state()
    tree["rng"]["2"]["cuda"] = torch.arange(16, dtype=torch.uint8)
    torch.save(tree, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "step", to="verl", world_size=WORLD)
    states = [loaded(tmp_path / "step", "extra_state", rank) for rank in range(WORLD)]
    assert ["rng" in s for s in states] == [False, False, True] and "cuda" in states[2]["rng"]
    assert {
        p.device_mesh.device_type for p in loaded(tmp_path / "step", "model", 1).values() if hasattr(p, "device_mesh")
    } == {"cuda"}
    assert not done.dropped and any("RNG states of 1 of 3 ranks" in note for note in done.notes)
    with ckpttool.open(tmp_path / "step") as opened:
        assert "rng.0.cpu" in opened.checkpoint.tensors


def test_verl_s_own_files_at_another_world_size(tmp_path: Path) -> None:
    ckpttool.convert(VERL, tmp_path / "step", to="verl", world_size=2, config=str(CONFIG))
    theirs, ours = loaded_whole(VERL, 3), loaded_whole(tmp_path / "step" / "actor", 2)
    assert same_value(ours, theirs)


def test_an_optimizer_before_its_first_step_has_the_state_that_torch_asks_for(tmp_path: Path) -> None:
    ckpttool.convert(FIXTURES / "zero3_w3_fresh" / "ckpt", tmp_path / "step", to="verl", world_size=2)
    tree = loaded(tmp_path / "step", "optim", 1, 2)
    numbers = [n for g in tree["param_groups"] for n in g["params"]]
    optimizer = torch.optim.AdamW([torch.zeros(1) for _ in numbers])
    assert tree["state"] == {} and numbers == list(range(len(numbers))) and len(tree["param_groups"]) == 1
    optimizer.load_state_dict(tree)
    assert optimizer.param_groups[0]["lr"] == tree["param_groups"][0]["lr"]


def loaded_whole(folder: Path, world: int) -> dict[str, torch.Tensor]:
    parts = [torch.load(folder / f"model_world_size_{world}_rank_{r}.pt", weights_only=False) for r in range(world)]
    return {n: torch.cat([p[n]._local_tensor for p in parts]) for n in parts[0]}


def test_what_verl_cannot_resume_from_is_refused(tmp_path: Path) -> None:
    tree = state()
    tree["model"] = dict(sorted(tree["model"].items()))
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(Unsupported, match=r"verl numbers the 4 parameters .* Give config the folder") as e:
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "step", to="verl", world_size=WORLD)
    assert "state_dict_type" not in str(e.value)
    tree["scheduler"]["rate"] = torch.ones(2)
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(Unsupported, match=r"scheduler\.rate.* is a tensor"):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "step", to="verl", world_size=WORLD)
    with pytest.raises(UsageError, match="choose cuda, npu or cpu"):
        ckpttool.VerlOptions(mesh_device="tpu")
    assert not (tmp_path / "step").exists()


def test_param_groups_without_parameters_are_not_dropped_in_silence(tmp_path: Path) -> None:
    """Megatron-Core's before its first step, of which verl's file, whose groups hold numbers, cannot be made."""
    ckpttool.convert(FIXTURES / "zero3_w3_fresh" / "ckpt", tmp_path / "m", to="megatron", world_size=2)
    with pytest.raises(Unsupported, match="list no parameters, which verl numbers"):
        ckpttool.convert(tmp_path / "m", tmp_path / "no", to="verl", world_size=2)
    done = ckpttool.convert(tmp_path / "m", tmp_path / "v", to="verl", world_size=2, drop=True)
    assert {n.split(".")[0] for n, _, _ in done.dropped} == {"optim"}


@pytest.mark.parametrize("world", [1, 2])
def test_random_states_of_ranks_with_one_seed_are_those_of_ranks(world: int, tmp_path: Path) -> None:
    """Trainer seeds all ranks alike, and a job of one rank is alone."""
    tree = state()
    tree["rng"] = {str(r): tree["rng"]["0"] for r in range(world)}
    torch.save(tree, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "step", to="verl", world_size=world)
    ckpttool.convert(tmp_path / "step", tmp_path / "out", to="accelerate", world_size=world)
    for rank in range(world):
        found = torch.load(tmp_path / "out" / f"random_states_{rank}.pkl", weights_only=False)
        assert found["random_state"] == tree["rng"]["0"]["python"]
