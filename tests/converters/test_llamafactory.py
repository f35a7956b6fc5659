"""LLaMA-Factory v1's checkpoint-N is one state, and is written so that the program's own functions read it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import load_dcp
from safetensors.torch import save_file
from test_scripts import Net, job
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

import ckpttool
from ckpttool.engine.discover import detection
from ckpttool.errors import NotRecognised, Unsupported, UsageError
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def folder(path: Path, *, fsdp: bool = True, ranks: int = 2) -> Path:
    """As llamafactory/v1/core/utils/checkpoint.py writes it; random states and data loaders of ranks differ."""
    model, optimizer, scheduler = job()
    if fsdp:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save(weights, checkpoint_id=path / "model")
        dcp.save(moments, checkpoint_id=path / "optimizer")
    else:
        for name in ("model", "optimizer"):
            (path / name).mkdir(parents=True)
        save_file(model.state_dict(), path / "model" / "model.safetensors")
        torch.save(optimizer.state_dict(), path / "optimizer" / "state_dict.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    for rank in range(ranks):
        random.seed(rank)
        state = {
            "python": random.getstate(),
            "numpy": np.random.RandomState(rank).get_state(),
            "torch": torch.get_rng_state(),
            "accelerator": None,
        }
        loader = {"buffer": {"tokens": [rank]}, "data_provider": {"step": 3}}
        for name, tree in (("rng_state", state), ("dataloader", loader)):
            (path / name).mkdir(exist_ok=True)
            torch.save(tree, path / name / f"rank_{rank}.pt")
    (path / "metadata.json").write_text(json.dumps({"global_step": 3, "epoch": 1, "num_training_steps": 30}))
    (path / "CHECKPOINT_COMPLETE").touch()
    return path


def test_a_folder_is_one_state_with_the_random_states_of_all_ranks(tmp_path: Path) -> None:
    source = folder(tmp_path / "checkpoint-3")
    with ckpttool.open(source) as opened:
        assert (opened.checkpoint.layout, opened.checkpoint.unread) == ("llamafactory", [])
        assert opened.checkpoint.world_size == 2
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)
    assert not done.dropped
    tree = load_dcp(tmp_path / "out")
    for rank in range(2):
        saved = torch.load(source / "rng_state" / f"rank_{rank}.pt", weights_only=False)
        random.setstate(tree["rng"][str(rank)]["python"])
        assert random.getstate() == saved["python"]
        assert np.array_equal(tree["rng"][str(rank)]["numpy"][1], saved["numpy"][1])
        assert tree["dataloader"][str(rank)]["buffer"] == {"tokens": [rank]}
    assert tree["trainer"]["global_step"] == 3


def test_an_unfinished_save_is_said_to_be_one(tmp_path: Path) -> None:
    source = folder(tmp_path / "checkpoint-3")
    for complete in (True, False):
        rows = detection.find_checkpoints(Source(tmp_path)).checkpoints
        assert [(c.layout, c.step, c.complete) for c in rows] == [("llamafactory", 3, complete)]
        (source / "CHECKPOINT_COMPLETE").unlink(missing_ok=True)
    with ckpttool.open(source) as opened:
        assert any("no CHECKPOINT_COMPLETE" in n and "no job resumes" in n for n in opened.checkpoint.notes)
    (source / "model" / ".metadata").unlink()  # not even the weights were ready
    (row,) = detection.find_checkpoints(Source(tmp_path)).checkpoints
    assert (row.layout, row.complete) == ("llamafactory", False)
    with pytest.raises(NotRecognised):
        ckpttool.open(source)


def test_random_states_are_no_checkpoint_and_a_half_lists_what_is_beside_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "checkpoint-3")
    with pytest.raises(NotRecognised, match="hold neither weights nor an optimizer"):
        ckpttool.open(source / "rng_state")
    with pytest.raises(Unsupported) as e:
        ckpttool.convert(source / "model", tmp_path / "out", to="dcp", world_size=1)
    for name in ("../optimizer/", "../scheduler.pt", "../rng_state/", "../dataloader/", "drop=True"):
        assert name in str(e.value)


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_written_is_what_the_program_loads(fsdp: bool, world: int, tmp_path: Path) -> None:
    source = folder(tmp_path / "checkpoint-3", fsdp=fsdp)
    done = ckpttool.convert(source, tmp_path / "out", to="llamafactory", world_size=world)
    out = tmp_path / "out"
    model, optimizer, _ = job()
    fresh = Net()
    slots = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    if world == 1:  # without FSDP
        state = torch.load(out / "model" / "pytorch_model.bin", weights_only=True)
        assert not fresh.load_state_dict(state, strict=False).missing_keys
        slots.load_state_dict(torch.load(out / "optimizer" / "state_dict.pt", weights_only=True))
    else:
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=out / "model")
        fresh.load_state_dict(state)
        moments = get_optimizer_state_dict(model, optimizer)
        for entry in moments["state"].values():
            entry.update({k: torch.full_like(t, float("nan")) for k, t in entry.items()})
        dcp.load(moments, checkpoint_id=out / "optimizer")
        ours: dict[str, Any] = {n: moments["state"][n] for n, _ in model.named_parameters()}
        slots.load_state_dict(
            {"state": dict(enumerate(ours.values())), "param_groups": optimizer.state_dict()["param_groups"]}
        )
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    for mine, theirs in zip(optimizer.state.values(), slots.state.values(), strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    counters = json.loads((out / "metadata.json").read_text())
    assert counters == {"global_step": 3, "epoch": 1, "num_training_steps": 30}
    assert (out / "CHECKPOINT_COMPLETE").stat().st_size == 0
    assert torch.load(out / "scheduler.pt", weights_only=True)["last_epoch"] == 3
    for rank in range(min(world, 2)):
        saved, found = (torch.load(p / f"rng_state/rank_{rank}.pt", weights_only=False) for p in (source, out))
        assert found["python"] == saved["python"] and torch.equal(found["torch"], saved["torch"])
    assert (out / "dataloader").exists() == (world == 2)
    assert any("begins the epoch again" in n for n in done.notes) == (world != 2)
    found = ckpttool.diff(source, out)
    assert found.tensors and not (found.only_in_a or found.data or found.dtypes or found.shapes)


def test_a_state_of_one_device_or_without_numpy_is_not_given_to_it(tmp_path: Path) -> None:
    """It hands `accelerator` to set_rng_state_all, and asks for numpy: either would stop the job."""
    model, optimizer, _ = job()
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.ones(4),
    }
    tree = {"model": weights, "optim": moments, "rng": {"0": state, "1": {k: state[k] for k in ("python", "cpu")}}}
    torch.save(tree, tmp_path / "state.pt")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "out", to="llamafactory", world_size=2)
    assert [p.name for p in (tmp_path / "out" / "rng_state").iterdir()] == ["rank_0.pt"]
    found = torch.load(tmp_path / "out" / "rng_state" / "rank_0.pt", weights_only=False)
    assert found.keys() == {"python", "numpy", "torch"}
    left = torch.load(tmp_path / "out" / "ckpttool_state.pt", weights_only=False)
    assert {tuple(map(str, p))[:3] for p in left["paths"]} >= {("rng", "0", "cuda"), ("rng", "1", "cpu")}


def test_a_full_state_dict_is_refused_and_another_trainers_metadata_json_is_not_taken_for_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "checkpoint-3")
    how = ckpttool.DirectoryOptions(state_dict_type="full")
    with pytest.raises(UsageError, match="choose sharded or ddp"):
        ckpttool.convert(source, tmp_path / "out", to="llamafactory", world_size=1, options=how)
    other = shutil.copytree(source, tmp_path / "step3")
    (other / "CHECKPOINT_COMPLETE").unlink()
    (other / "metadata.json").write_text('{"run": "mine"}')
    with ckpttool.open(other) as opened:
        assert opened.checkpoint.layout == "script"
