"""What `--to dcp` makes of a trainer's own checkpoint is loaded by that trainer, at another world size.

The fixtures were written by Lightning and torchtitan themselves, on two ranks (fixtures/trainer_jobs.py). Lightning goes on
live, on three. torchtitan is not installed here, since its datasets wants an fsspec that s3fs does not; torch's own
`dcp.load` is given a state dict with the very keys that torchtitan's CheckpointManager asks for. With torchtitan 0.3.0
installed, `fixtures/trainer_jobs.py titan OUT resume` on three ranks gave the losses of its own resume from two, bit for bit.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import FIXTURES, REPOSITORY, difference, load_dcp, load_full, same_value, tensors_of
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time
from safetensors.torch import load_file
from torch import Tensor

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, NotRecognised, Unsupported

TITAN, LIGHTNING = FIXTURES / "trainers" / "titan_w2", FIXTURES / "trainers" / "lightning_w2"
#: Of steps 3 to 5 by Lightning itself, on three ranks, from the folder that two ranks wrote.
NATIVE = [5.080857594807942, 5.095510482788086, 5.044637362162272]


@pytest.mark.live
@pytest.mark.slow
def test_lightning_goes_on_at_another_world_size_as_it_does_from_its_own_folder(tmp_path: Path) -> None:
    ckpttool.convert(LIGHTNING, tmp_path / "ckpt", to="dcp", world_size=3, drop=True)
    shutil.copy(LIGHTNING / "meta.pt", tmp_path / "ckpt")
    job = [str(REPOSITORY / "fixtures" / "trainer_jobs.py"), "lightning", str(tmp_path / "ckpt"), "resume"]
    with one_at_a_time():
        NURSERIES.launch(3, job, tmp_path / "log", **ENVIRONMENT, TORCHELASTIC_RUN_ID="resume")
    said = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"LOSSES (\[.*\])", said)
    assert found, said[-3000:]
    assert json.loads(found[1]) == pytest.approx(NATIVE, abs=1e-6)


def emptied(tree: Any) -> Any:
    """The same keys with nothing behind them."""
    if isinstance(tree, dict):
        return {k: emptied(v) for k, v in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, Tensor) else None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world", [1, 3])
def test_every_key_that_torchtitan_asks_for_is_there(world: int, tmp_path: Path) -> None:
    ckpttool.convert(TITAN, tmp_path / "out", to="dcp", world_size=world)
    wanted = load_dcp(TITAN)
    assert "tok_embeddings.weight" in wanted and "param_groups.norm.weight.lr" in wanted["optimizer"]
    asked = emptied({k: v for k, v in wanted.items() if k != "dataloader"})  # exclude_from_loading
    dcp.load(asked, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same_value(asked, {k: v for k, v in wanted.items() if k != "dataloader"})


@pytest.mark.parametrize("source", [TITAN, LIGHTNING], ids=["torchtitan", "Lightning"])
def test_keys_and_paths_of_the_index_are_those_of_the_trainer(source: Path, tmp_path: Path) -> None:
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3, drop=True)
    ckpttool.convert(source, tmp_path / "out.pt", to="full", drop=True)
    ckpttool.convert(tmp_path / "out.pt", tmp_path / "again", to="dcp", world_size=2)
    wanted = pickle.loads((source / ".metadata").read_bytes()).planner_data
    for folder in ("out", "again"):
        found = pickle.loads((tmp_path / folder / ".metadata").read_bytes()).planner_data
        assert found == wanted if source == TITAN else found.items() >= wanted.items()
    meta = torch.load(source / "meta.pt", weights_only=True) if source == LIGHTNING else {}
    assert same_value(load_full(tmp_path / "out.pt"), {**load_dcp(source), **meta})


@pytest.mark.parametrize("source", [TITAN, LIGHTNING], ids=["torchtitan", "Lightning"])
@pytest.mark.parametrize("to", ["dcp", "full"])
def test_canonical_keys_are_those_of_get_state_dict(source: Path, to: str, tmp_path: Path) -> None:
    """For a job of another kind: it asks for model and optim."""
    out = tmp_path / ("out.pt" if to == "full" else "out")
    how: dict[str, Any] = {"to": to, "world_size": 3 if to == "dcp" else None, "drop": True}
    done = ckpttool.convert(source, out, canonical_keys=True, **how)
    tree = load_full(out) if to == "full" else load_dcp(out)
    assert {"model", "optim"} <= tree.keys() and not tree.keys() & {"state_dict", "optimizer", "optimizer_0"}
    with ckpttool.open(source) as opened:
        names = {n.removeprefix("model.") for n in opened.checkpoint.tensors if n.startswith("model.")}
    assert tree["model"].keys() == names and tree["optim"]["state"].keys() <= names
    assert not any("canonical" in n for n in done.notes)
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    assert any("canonical_keys=True" in n for n in ckpttool.convert(source, out, **how).notes)


def test_canonical_keys_are_of_trees(tmp_path: Path) -> None:
    with pytest.raises(ckpttool.errors.UsageError, match="applies to dcp, full"):
        ckpttool.convert(TITAN, tmp_path / "out", to="zero3", world_size=2, canonical_keys=True, drop=True)


# ---------------------------------------------------------------------------------- optimizers whose slots are no moments


def trained(kind: str, width: int = 7) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model of several shapes after two steps."""
    from transformers.optimization import Adafactor

    torch.manual_seed(0)
    layers = (torch.nn.Linear(5, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 3, bias=False))
    model = torch.nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = {
        "Adafactor": lambda p: torch.optim.Adafactor(p),
        "Adafactor of transformers": lambda p: Adafactor(p, lr=None),
        "LBFGS": lambda p: torch.optim.LBFGS(p, history_size=3, max_iter=3),
    }[kind](model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        closure()
        optimizer.step(closure if kind == "LBFGS" else None)
    return model, optimizer


@pytest.mark.parametrize("kind", ["Adafactor", "Adafactor of transformers", "LBFGS"])
def test_numbers_are_named_where_slots_have_not_the_shapes_of_parameters(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b", to="dcp", world_size=1, canonical_keys=True)
    found = load_dcp(tmp_path / "b")["optim"]
    names = [n for n, _ in model.named_parameters()]
    assert found["param_groups"][0]["params"] == names
    assert same_value(found["state"], {names[i]: slots for i, slots in state["state"].items()})
    other, _ = trained(kind, width=8)
    torch.save({"model": other.state_dict(), "optim": state}, tmp_path / "c.pt")
    with pytest.raises(Unsupported, match="no order of the 5 tensors"):
        ckpttool.convert(tmp_path / "c.pt", tmp_path / "d", to="dcp", world_size=1)


# ------------------------------------------------------------------------------------------------------------------- verl

VERL = FIXTURES / "trainers" / "verl_fsdp2_w3"


def test_a_directory_of_verl_is_one_state_with_scheduler_and_rng_of_every_rank(tmp_path: Path) -> None:
    for to, load in (("dcp", load_dcp), ("full", load_full)):
        done = ckpttool.convert(VERL / "ckpt", tmp_path / to, to=to, world_size=2 if to == "dcp" else None)
        assert done.verified and not done.dropped
        tree = load(tmp_path / to)
        found = {k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}
        assert difference(found, load_file(VERL / "truth.safetensors")) == []
        for rank in range(3):
            saved = torch.load(VERL / "ckpt" / f"extra_state_world_size_3_rank_{rank}.pt", weights_only=False)
            assert same_value(tree["lr_scheduler"], saved["lr_scheduler"])
            ours, theirs = tree["rng"][str(rank)], saved["rng"]
            assert (
                ours.keys() == theirs.keys()
                and torch.equal(ours["cpu"], theirs["cpu"])
                and ours["random"] == theirs["random"]
            )
            assert ours["numpy"][1].tolist() == theirs["numpy"][1].tolist() and ours["numpy"][2:] == theirs["numpy"][2:]
    with ckpttool.open(VERL / "ckpt") as opened:
        assert (opened.checkpoint.trainer, opened.checkpoint.world_size, opened.checkpoint.unread) == ("verl", 3, [])


@pytest.mark.parametrize("same", (True, False))
def test_an_entry_of_extra_state_that_is_named_like_the_model_takes_no_place_of_it(tmp_path: Path, same: bool) -> None:
    folder, name = tmp_path / "step", "model.embed_tokens.weight"
    shutil.copytree(VERL / "ckpt", folder)
    before = ckpttool.digest(folder)
    with ckpttool.open(folder) as opened:
        values = opened.checkpoint.values
    for rank in range(3):
        file = folder / f"extra_state_world_size_3_rank_{rank}.pt"
        held = torch.load(file, weights_only=False)
        held["model"] = {name: torch.zeros(3) + (0 if same else rank), "n": 5}
        torch.save(held | {"optimizer": {"lr": 0.5}}, file)
    found = ckpttool.digest(folder)
    at = "extra.extra_state_world_size_3_rank_*.pt"
    shown = {f"{at}.model.{name}"} if same else {f"{at}.model.{k}.{name}" for k in range(3)}
    assert found.tensors == before.tensors | {n: found.tensors[n] for n in shown}, "none is lost or replaced"
    with ckpttool.open(folder) as opened:
        here = opened.checkpoint.values
    assert all(same_value(here[n].data, v.data) for n, v in values.items())
    assert here["extra.optimizer.lr"].data == 0.5


def test_an_extra_state_that_is_a_dict_and_differs_between_ranks_is_left_behind_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(VERL / "ckpt", folder)
    for rank in range(3):
        file = folder / f"model_world_size_3_rank_{rank}.pt"
        state = {"same._extra_state": {"k": 1}, "own._extra_state": {"k": rank, "t": torch.arange(2)}}
        torch.save(torch.load(file, weights_only=False) | state, file)
    done = ckpttool.convert(folder, tmp_path / "out.pt", to="full")
    lost = {name for name, *_ in done.dropped}
    assert lost == {f"extra.per_rank.{rank}.model.own._extra_state" for rank in (1, 2)}


@pytest.mark.parametrize("key", ["last_epoch", "mine"])
def test_schedulers_that_ranks_hold_differently_are_no_list_of_schedulers(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(VERL / "ckpt", folder)
    file = folder / "extra_state_world_size_3_rank_1.pt"
    held = torch.load(file, weights_only=False)
    held["lr_scheduler"][key] = 9
    torch.save(held, file)
    if key == "last_epoch":
        with pytest.raises(
            Corrupt, match=r'"lr_scheduler\.last_epoch" is 9, in .*_rank_0\.pt it is 3.*different steps'
        ):
            ckpttool.open(folder)
        return
    done = ckpttool.convert(folder, tmp_path / "out", to="accelerate", world_size=2)
    assert any("ranks differ in lr_scheduler" in n for n in done.notes)
    assert torch.load(tmp_path / "out" / "scheduler.bin", weights_only=True)["last_epoch"] == 3
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.values["extra.per_rank.1.lr_scheduler.mine"].data == 9


def test_a_scheduler_that_a_rank_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(VERL / "ckpt", folder)
    file = folder / "extra_state_world_size_3_rank_1.pt"
    held = torch.load(file, weights_only=False)
    del held["lr_scheduler"]
    torch.save(held, file)
    with ckpttool.open(folder) as opened:
        assert [n for n in opened.checkpoint.notes if "not every rank saved lr_scheduler;" in n]
        assert opened.checkpoint.values["scheduler.last_epoch"].data == 3


def test_what_an_optimizer_keeps_besides_slots_and_groups_is_carried(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(VERL / "ckpt", folder)
    for rank in range(3):
        file = folder / f"optim_world_size_3_rank_{rank}.pt"
        held = torch.load(file, weights_only=False)
        held["state"]["average"] = 5
        torch.save(held | {"same": {"k": 1}, "own": rank}, file)
    torch.save({}, folder / "extra_state_world_size_3_rank_2.pt")
    with ckpttool.open(folder) as opened:
        found = {n: v.data for n, v in opened.checkpoint.values.items()}
    assert (found["optim.same.k"], found["optim.state.average"]) == (1, 5)
    assert [found[f"optim.own.{rank}"] for rank in range(3)] == [0, 1, 2]
    assert found["scheduler.last_epoch"] == 3 and "rng.2.numpy" not in found  # an empty file of a rank


def global_step(path: Path, *models: str) -> Path:
    """What verl's trainer writes at a step: its models, and the state of torchdata's StatefulDataLoader."""
    for name in models:
        shutil.copytree(VERL / "ckpt", path / name)
    torch.save({"_snapshot": {"_snapshot_step": 3}, "_num_yielded": 3, "state": torch.arange(4)}, path / "data.pt")
    return path


def test_verl_s_data_loader_is_part_of_the_actor(tmp_path: Path) -> None:
    step = global_step(tmp_path / "global_step_3", "actor", "critic")
    for given in (step / "actor", step / "critic"):
        ckpttool.convert(given, tmp_path / "out", to="dcp", world_size=2, force=True)
        tree = load_dcp(tmp_path / "out")
        assert same_value(tree["dataloader"], torch.load(step / "data.pt", weights_only=True))
        assert len(tree["model"]) == 21 and len(tree["optim"]["state"]) == 21
        with ckpttool.open(given) as opened:
            assert (opened.checkpoint.layout, opened.checkpoint.unread) == ("verl", [])
    with pytest.raises(NotRecognised, match="2 checkpoints are below it; give") as refused:
        ckpttool.open(step)
    assert "actor" in str(refused.value) and "critic" in str(refused.value)


def test_a_step_of_verl_without_a_critic_is_the_actor(tmp_path: Path) -> None:
    step = global_step(tmp_path / "global_step_3", "actor")
    with ckpttool.open(step) as whole, ckpttool.open(step / "actor") as actor:
        assert whole.checkpoint.tensors.keys() == actor.checkpoint.tensors.keys()
        assert whole.checkpoint.values.keys() == actor.checkpoint.values.keys()
        assert (whole.checkpoint.layout, whole.checkpoint.world_size, whole.checkpoint.unread) == ("verl", 3, [])
    done = ckpttool.convert(step, tmp_path / "hf", to="hf")
    assert (tmp_path / "hf" / "config.json").exists() and done.verified


def test_only_the_weights_of_verl_do_not_need_the_optimizer(tmp_path: Path) -> None:
    shutil.copytree(VERL / "ckpt", tmp_path / "actor")
    for file in (tmp_path / "actor").glob("optim_*"):
        file.write_bytes(b"damaged")
    with pytest.raises(CkpttoolError):
        ckpttool.open(tmp_path / "actor")
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / "data.pt").write_bytes(b"damaged")
    shutil.copytree(VERL / "ckpt", tmp_path / "global_step_1" / "actor")
    with pytest.raises(Unsupported, match=r"data\.pt \(7 B, cannot be read"):
        ckpttool.convert(tmp_path / "global_step_1" / "actor", tmp_path / "out", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "global_step_1" / "actor", tmp_path / "out", to="dcp", world_size=2, only=["model"])


@pytest.mark.parametrize("to", ["accelerate", "trainer", "lightning", "torchtitan"])
def test_two_optimizers_of_lightning_are_refused_by_folders_that_have_one(to: str, tmp_path: Path) -> None:
    one = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    model = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(2, 3)}
    tree = {"state_dict": model, "optimizer_states": [one, one], "global_step": 3}
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=r'several optimizers, "optim\.0", "optim\.1"'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, only=["model"])
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back.pt", to="full")
    assert same_value(load_full(tmp_path / "back.pt"), tree)


def test_param_groups_without_names_and_slots_are_no_foreign_optimizer(tmp_path: Path) -> None:
    """A ZeRO-3 save before its first step, which Megatron-Core's folder holds without lists of parameters."""
    ckpttool.convert(FIXTURES / "zero3_w3_fresh" / "ckpt", tmp_path / "m", to="megatron", drop=True, world_size=2)
    done = ckpttool.convert(tmp_path / "m", tmp_path / "tune", to="torchtune", drop=True)
    assert done.verified
    with ckpttool.open(tmp_path / "tune") as opened:
        assert opened.checkpoint.values["optim.param_groups.0.lr"].data == 0.01
