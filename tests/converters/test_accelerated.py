"""diffusers, lerobot and fairseq2: one state each, or refused by name. The cases have the files that these programs write; none was run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import FIXTURES, load_dcp, same_value
from safetensors.torch import save_file
from test_scripts import job
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.engine.discover import detection
from ckpttool.errors import NotRecognised, Unsupported
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def diffusers(path: Path) -> None:
    model, optimizer, scheduler = job()
    average = {n: t + 1 for n, t in model.state_dict().items()}
    for folder, weights in (("unet", model.state_dict()), ("unet_ema", average)):
        (path / folder).mkdir(parents=True)
        save_file(weights, path / folder / "diffusion_pytorch_model.safetensors")
        (path / folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save(scheduler.state_dict(), path / "scheduler.bin")
    random_states = {"step": 3, "numpy_random_seed": np.random.get_state(), "torch_manual_seed": torch.get_rng_state()}
    torch.save(random_states, path / "random_states_0.pkl")


def lerobot(path: Path, sharded: bool = True) -> None:
    model, optimizer, _ = job()
    weights, moments = get_state_dict(model, optimizer)
    policy, state = path / "pretrained_model", path / "training_state"
    if sharded:
        dcp.save({"model": weights}, checkpoint_id=policy / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": moments}, checkpoint_id=state / "optimizer_0")
    else:
        policy.mkdir(parents=True), state.mkdir()
        save_file(model.state_dict(), policy / "model.safetensors")
        flat = {f"state/{i}/{k}": t for i, s in optimizer.state_dict()["state"].items() for k, t in s.items()}
        save_file(flat, state / "optimizer_state.safetensors")
    (policy / "config.json").write_text('{"type": "act"}')
    save_file({"torch_rng_state": torch.get_rng_state()}, state / "rng_state.safetensors")
    (state / "scheduler_state.json").write_text(json.dumps({"last_epoch": 3}))
    (state / "training_step.json").write_text(json.dumps({"step": 5000}))


def fairseq2(path: Path) -> None:
    model, optimizer, _ = job()
    files = {
        "model/pp_00/tp_00/sdp_00.pt": model.state_dict(), "optimizer/pp_00/tp_00/sdp_00.pt": optimizer.state_dict(),
        "trainer/rank_00.pt": {"step_nr": 3}, "trainer/rank_01.pt": {"step_nr": 3, "own": 1},
        "data_reader/dp_00.pt": {"at": 3}, "data_reader/dp_01.pt": {"at": 4},
    }  # fmt: skip
    for name, tree in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(tree, path / name)


def test_a_folder_of_diffusers_is_one_state_with_the_average_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-500"
    diffusers(source)
    model, optimizer, _ = job()
    average = {n: t + 1 for n, t in model.state_dict().items()}
    (row,) = detection.find_checkpoints(Source(tmp_path)).checkpoints
    assert (row.layout, row.complete, row.step) == ("diffusers", True, 500)
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)
    assert not done.dropped
    tree = load_dcp(tmp_path / "out")
    assert same_value(tree["model"], dict(model.state_dict())) and same_value(tree["extra"]["unet_ema"], average)
    for (name, p), slots in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        assert p.requires_grad and same_value(tree["optim"]["state"][name], slots)
    assert torch.equal(
        tree["rng"]["0"]["cpu"], torch.load(source / "random_states_0.pkl", weights_only=False)["torch_manual_seed"]
    )


@pytest.mark.parametrize("sharded", [True, False])
def test_a_step_of_lerobot_is_one_state_and_says_what_was_not_read(sharded: bool, tmp_path: Path) -> None:
    source = tmp_path / "005000"
    lerobot(source, sharded)
    weights, moments = get_state_dict(*job()[:2])
    state = source / "training_state"
    (row,) = detection.find_checkpoints(Source(tmp_path)).checkpoints
    assert (row.layout, row.complete, row.step) == ("lerobot", True, 5000)
    lost = {"training_state/rng_state.safetensors"} | (
        set() if sharded else {"training_state/optimizer_state.safetensors"}
    )
    with pytest.raises(Unsupported, match=r"rng_state\.safetensors"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, drop=True)
    assert {name for name, *_ in done.dropped} == lost
    tree = load_dcp(tmp_path / "out")
    assert same_value(tree["model"], dict(weights)) and tree["scheduler"]["last_epoch"] == 3
    assert ("optim" in tree) == sharded and (not sharded or same_value(tree["optim"]["state"], moments["state"]))
    if not sharded:
        with pytest.raises(NotRecognised):  # the state of a job is no model
            ckpttool.open(state)


def test_a_step_of_fairseq2_is_one_state_and_shards_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "step_3"
    fairseq2(source)
    model, optimizer, _ = job()
    (row,) = detection.find_checkpoints(Source(tmp_path)).checkpoints
    assert (row.layout, row.complete, row.step) == ("fairseq2", True, 3)
    assert not ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1).dropped
    tree = load_dcp(tmp_path / "out")
    assert same_value(tree["model"], dict(model.state_dict()))
    assert [tree["dataloader"][r]["at"] for r in "01"] == [3, 4] and tree["trainer"]["step_nr"] == 3
    for (name, _), slots in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        assert same_value(tree["optim"]["state"][name], slots)
    torch.save(model.state_dict(), source / "model/pp_00/tp_00/sdp_01.pt")
    with pytest.raises(Unsupported, match=r"holds 2 shards, sdp_00\.pt to sdp_01\.pt"):
        ckpttool.open(source)


def test_the_data_source_of_slime_is_listed_beside_the_step(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "megatron" / "tp2_pp2" / "ckpt", tmp_path / "run")
    (tmp_path / "run" / "rollout").mkdir()
    torch.save({"epoch_id": 0}, tmp_path / "run" / "rollout" / "global_dataset_state_dict_3.pt")
    (row,) = detection.find_checkpoints(Source(tmp_path / "run")).checkpoints
    assert (row.name, row.layout) == ("iter_0000003", "megatron")
    with ckpttool.open(tmp_path / "run" / "iter_0000003") as opened:
        assert [(u.name, u.component) for u in opened.checkpoint.unread] == [("../rollout/", "dataloader")]


@pytest.mark.parametrize("length", [3, 4, 25, 29, 30, 60])
def test_a_file_of_a_rank_that_ends_in_its_first_header_is_named(length: int, tmp_path: Path) -> None:
    fairseq2(tmp_path)
    (file,) = tmp_path.rglob("dp_01.pt")
    file.write_bytes(file.read_bytes()[:length])
    with ckpttool.open(tmp_path) as ckpt:
        assert [n for n in ckpt.locate().notes if "not read, so not carried: data_reader/dp_01.pt" in n]
