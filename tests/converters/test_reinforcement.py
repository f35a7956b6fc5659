"""Steps of SkyRL, NeMo-RL, prime-rl and xtuner are one state each. The cases have the files that these programs write, made here with
the same calls of torch; the programs need GPUs, and were not run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import FIXTURES, load_dcp, same_value
from safetensors.torch import load_file
from test_scripts import job
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.engine.discover import detection
from ckpttool.errors import CkpttoolError, Unsupported
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
VERL = FIXTURES / "trainers" / "verl_fsdp2_w3"


def skyrl(path: Path) -> Path:
    shutil.copytree(VERL / "ckpt", path / "policy")
    torch.save({"_snapshot": {"rows": 12}}, path / "data.pt")
    torch.save({"global_step": 3, "config": {"trainer": {"lr": 0.5}}}, path / "trainer_state.pt")
    return path


def nemo_rl(path: Path) -> Path:
    model, optimizer, scheduler = job()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=path / "policy" / "weights")
    dcp.save(
        {"optim": {"optim": moments, "sched": scheduler.state_dict()}}, checkpoint_id=path / "policy" / "optimizer"
    )
    torch.save({"_index": 12}, path / "train_dataloader.pt")
    (path / "training_info.json").write_text(json.dumps({"step": 3, "consumed_samples": 48}))
    (path / "config.yaml").write_text("grpo: 1\n")
    return path


def prime_rl(path: Path) -> Path:
    model, optimizer, scheduler = job()
    weights, moments = get_state_dict(model, optimizer)
    progress = {"step": 3, "total_tokens": 9, "total_samples": 3}
    app = {"model": weights, "optimizers": moments, "scheduler": scheduler.state_dict(), "progress": progress}
    dcp.save({"app": app}, checkpoint_id=path / "trainer")
    (path / "trainer" / "dataloader").mkdir()
    for rank in range(3):
        torch.save({"at": 3 + rank}, path / "trainer" / "dataloader" / f"rank_{rank}.pt")
    (path / "orchestrator").mkdir()
    torch.save({"progress": {"step": 3}, "train_source": {"seed": 1}}, path / "orchestrator" / "progress.pt")
    return path


#: What its Dataloader.get_state_dict gives for a ParallelSampler over a dataset without a state.
LOADER_OF_XTUNER = {
    "sampler": {"epoch": 0, "step": 6, "world_size": 2, "shuffle": True},
    "dataset": {},
    "total_consumed_samples": 6,
}


def xtuner(path: Path) -> Path:
    model, optimizer, scheduler = job()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path / "weights")
    torch.save(LOADER_OF_XTUNER, path / "dataloader")
    torch.save(scheduler.state_dict(), path / "lr_scheduler")
    (path / "train_state.json").write_text(json.dumps({"cur_step": 3, "cur_epoch": 0, "total_consumed_tokens": 9}))
    return path


CASES = {
    "skyrl": (skyrl, "global_step_3", {"dataloader", "trainer", "rng", "scheduler"}),
    "nemo_rl": (nemo_rl, "step_3", {"dataloader", "trainer", "scheduler"}),
    "prime_rl": (prime_rl, "step_3", {"dataloader", "scheduler", "extra"}),
    "xtuner": (xtuner, "epoch-0-step-3", {"dataloader", "scheduler", "trainer"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_state(name: str, tmp_path: Path) -> None:
    make, called, components = CASES[name]
    source = make(tmp_path / "run" / called)
    with ckpttool.open(source) as opened:
        assert (opened.checkpoint.layout, opened.checkpoint.unread) == (name, [])
        found = {str(p[0]) for p in opened.checkpoint.leaves()}
        assert found == components | {"model", "optim"}
    (row,) = detection.find_checkpoints(Source(tmp_path / "run")).checkpoints
    assert (row.layout, row.complete, row.step) == (name, True, 3)
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, canonical_keys=True)
    assert not done.dropped
    tree = load_dcp(tmp_path / "out")
    if name == "skyrl":
        truth = load_file(VERL / "truth.safetensors")
        assert len(tree["model"]) == 21 and all(torch.equal(t, truth[f"model.{n}"]) for n, t in tree["model"].items())
        assert (tree["dataloader"], tree["trainer"]["global_step"]) == ({"_snapshot": {"rows": 12}}, 3)
        return
    model, optimizer, scheduler = job()
    weights, moments = get_state_dict(model, optimizer)
    assert same_value(tree["model"], dict(weights))
    assert same_value(tree["optim"]["state"], moments["state"])
    assert tree["scheduler"]["last_epoch"] == scheduler.last_epoch
    loaders = {
        "nemo_rl": {"_index": 12},
        "xtuner": LOADER_OF_XTUNER,
        "prime_rl": {str(r): {"at": 3 + r} for r in range(3)},
    }
    assert tree["dataloader"] == loaders[name]


def test_the_model_of_skyrl_has_the_files_of_its_step_and_a_critic_is_another(tmp_path: Path) -> None:
    source = skyrl(tmp_path / "global_step_3")
    with ckpttool.open(source / "policy") as opened:
        assert (opened.checkpoint.layout, opened.checkpoint.unread) == ("skyrl", [])
        assert "dataloader._snapshot.rows" in opened.checkpoint.values
    shutil.copytree(source / "policy", source / "critic")
    rows = detection.find_checkpoints(Source(source)).checkpoints
    assert {(c.name, c.layout) for c in rows} == {("policy", "skyrl"), ("critic", "skyrl")}


def test_the_folder_of_prime_rl_keeps_its_own_keys(tmp_path: Path) -> None:
    source = prime_rl(tmp_path / "step_3") / "trainer"
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    ours, theirs = load_dcp(tmp_path / "out")["app"], load_dcp(source)["app"]
    assert same_value({k: ours[k] for k in theirs}, theirs)
    assert ours["dataloader"]["2"] == {"at": 5}


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    source = nemo_rl(tmp_path / "step_3")
    shutil.rmtree(source / "policy" / "weights")
    (source / "policy" / "weights" / "model").mkdir(parents=True)
    with pytest.raises(Unsupported, match=r"policy/weights holds model, and no .metadata: .*Automodel worker"):
        ckpttool.open(source)


def test_what_is_written_for_xtuner_has_the_files_that_it_loads(tmp_path: Path) -> None:
    """As load_dcp, _load_checkpoint and _resume_dataloader of its Trainer ask for them."""
    source = xtuner(tmp_path / "epoch-0-step-3")
    ckpttool.convert(source, tmp_path / "again", to="xtuner", world_size=2)
    ours, theirs = load_dcp(tmp_path / "again" / "weights"), load_dcp(source / "weights")
    assert ours.keys() == {"model", "optimizer"} and same_value(ours, theirs)
    for name in ("dataloader", "lr_scheduler"):
        assert same_value(torch.load(tmp_path / "again" / name), torch.load(source / name))
    state = json.loads((tmp_path / "again" / "train_state.json").read_text())
    assert state == {"cur_step": 3, "cur_epoch": 0, "total_consumed_tokens": 9, "train_time_offset": 0.0}
    with ckpttool.open(tmp_path / "again") as opened:
        assert (opened.checkpoint.layout, opened.checkpoint.unread) == ("xtuner", [])


def test_a_state_of_another_program_is_written_for_xtuner_with_what_it_lacks(tmp_path: Path) -> None:
    ckpttool.convert(
        FIXTURES / "trainers" / "jobs" / "accelerate",
        tmp_path / "full.pt",
        to="full",
        drop=True,
        only=["model", "optim"],
    )
    done = ckpttool.convert(tmp_path / "full.pt", tmp_path / "out", to="xtuner", world_size=3)
    assert any("load_dataset=False" in n for n in done.notes) and any("load_scheduler=False" in n for n in done.notes)
    assert json.loads((tmp_path / "out" / "train_state.json").read_text())["cur_step"] == 3
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"weights", "train_state.json", "ckpttool.json"}


def test_an_epoch_that_is_no_number_becomes_0_for_xtuner(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "epoch": float("nan"), "step": 2}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="xtuner", world_size=2, drop=True)
    state = json.loads((tmp_path / "out" / "train_state.json").read_text())
    assert (state["cur_epoch"], state["cur_step"]) == (0, 2)


def test_an_unfinished_save_of_xtuner_is_said_to_be_one(tmp_path: Path) -> None:
    source = xtuner(tmp_path / "epoch-0-step-3")
    (source / "train_state.json").unlink()
    (row,) = detection.find_checkpoints(Source(tmp_path)).checkpoints
    assert (row.layout, row.complete) == ("xtuner", False)
    with ckpttool.open(source) as opened:
        assert any("no train_state.json" in n for n in opened.checkpoint.notes)


def test_an_optimizer_without_its_index_is_damage_and_not_a_step_without_optimizer(tmp_path: Path) -> None:
    source = nemo_rl(tmp_path / "step_3")
    (source / "policy" / "optimizer" / ".metadata").unlink()
    with pytest.raises(CkpttoolError, match=r"policy/optimizer"):
        ckpttool.open(source)
