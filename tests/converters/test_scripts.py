"""model.pt and optimizer.pt of a training script in one folder are one state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peers import FIXTURES, load_dcp, load_full, same_value
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.engine.discover import detection
from ckpttool.errors import CkpttoolError, NotRecognised, Unsupported
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """A frozen parameter, a buffer, and no two parameters of one shape, so that numbers have one meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(3, affine=False)


def job() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model.out(model.norm(model.embed(torch.arange(5)))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def script_folder(path: Path) -> Path:
    model, optimizer, scheduler = job()
    path.mkdir()
    torch.save(model.state_dict(), path / "model.pt")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(scheduler.state_dict(), path / "scheduler.pt")
    torch.save({"torch": torch.get_rng_state()}, path / "rng_state.pt")
    torch.save({"step": 3, "best": 0.5}, path / "train_state.pt")
    return path


def test_a_folder_of_files_is_one_state(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "step3")
    for to, load in (("dcp", load_dcp), ("full", load_full)):
        done = ckpttool.convert(source, tmp_path / to, to=to, world_size=2 if to == "dcp" else None)
        assert not done.dropped
        tree = load(tmp_path / to)
        model, optimizer, scheduler = job()
        assert same_value(tree["model"], dict(model.state_dict()))
        names, state = [n for n, _ in model.named_parameters()], optimizer.state_dict()
        assert same_value(tree["optim"]["state"], {names[i]: slots for i, slots in state["state"].items()})
        assert same_value(tree["scheduler"], scheduler.state_dict())
        assert tree["trainer"] == {"step": 3, "best": 0.5}
        assert torch.equal(tree["rng"]["torch"], torch.load(source / "rng_state.pt")["torch"])
    with ckpttool.open(source) as opened:
        assert (opened.checkpoint.layout, opened.checkpoint.unread) == ("script", [])
    ckpttool.convert(source, tmp_path / "zero", to="zero3", world_size=2, drop=True)
    with ckpttool.open(tmp_path / "zero") as opened:
        assert len([n for n in opened.checkpoint.tensors if n.endswith(".exp_avg")]) == 3
    listed = {c.name: c for c in detection.find_checkpoints(Source(tmp_path)).checkpoints}
    assert (listed["step3"].layout, listed["step3"].step) == ("script", 3)


@pytest.mark.parametrize("names", [("model.safetensors", "optim.bin"), ("weights.pth", "optimizer_state_dict.pth")])
def test_other_names(names: tuple[str, str], tmp_path: Path) -> None:
    source = script_folder(tmp_path / "step3")
    weights, optimizer = names
    tensors = torch.load(source / "model.pt")
    (source / "model.pt").unlink()
    save_file(tensors, source / weights) if weights.endswith(".safetensors") else torch.save(tensors, source / weights)
    (source / "optimizer.pt").rename(source / optimizer)
    with ckpttool.open(source) as opened:
        assert sum(n.startswith("optim.state.") for n in opened.checkpoint.tensors) == 9


def test_a_folder_of_dcp_each(tmp_path: Path) -> None:
    model, optimizer, _ = job()
    names = [n for n, _ in model.named_parameters()]
    state = {names[i]: slots for i, slots in optimizer.state_dict()["state"].items()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": names}]
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "run" / "model", no_dist=True)
    dcp.save({"state": state, "param_groups": groups}, checkpoint_id=tmp_path / "run" / "optim", no_dist=True)
    ckpttool.convert(tmp_path / "run", tmp_path / "out", to="dcp", world_size=2)
    tree = load_dcp(tmp_path / "out")
    assert same_value(tree["model"], dict(model.state_dict()))
    assert same_value(tree["optim"]["state"], state)


def test_an_optimizer_whose_numbers_cannot_be_named_is_listed(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "step3")
    twins = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([twins[1].weight])  # or twins[0].weight, for all that the files tell
    twins(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(twins.state_dict(), source / "model.pt")
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    with ckpttool.open(source) as opened:
        (row,) = [r for r in opened.checkpoint.unread if r.component == "optim"]
        assert row.name == "optimizer.pt" and "numbers its 1 parameters" in row.what
    with pytest.raises(Unsupported, match=r"optimizer\.pt .*numbers its 1 parameters"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    ckpttool.convert(source, tmp_path / "weights.safetensors")


def test_two_models_are_no_checkpoint(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "step3")
    torch.save({"w": torch.ones(2)}, source / "net.pt")
    with pytest.raises(NotRecognised):
        ckpttool.open(source)


def test_what_trainers_write_stays_theirs(tmp_path: Path) -> None:
    source = script_folder(tmp_path / "checkpoint-3")
    with pytest.raises(CkpttoolError):  # Trainer's, interrupted before trainer_state.json
        ckpttool.open(source)
    with ckpttool.open(FIXTURES / "trainers" / "accelerate_fsdp2_full" / "ckpt") as opened:
        assert opened.checkpoint.layout == "accelerate"


def test_a_data_loader_in_a_folder_of_dcp_is_not_left_without_a_word(tmp_path: Path) -> None:
    model, optimizer, _ = job()
    weights, moments = get_state_dict(model, optimizer)
    source = tmp_path / "trainer"
    dcp.save({"model": weights, "optimizers": moments, "progress": {"step": 3}}, checkpoint_id=source)
    (source / "dataloader").mkdir()
    (source / "dataloader" / "data.py").touch()  # programs are no state
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)
    assert not done.dropped
    torch.save({"pos": 3}, source / "dataloader" / "state.pt")
    with pytest.raises(Unsupported, match=r"dataloader/ \(.*data loader\)"):
        ckpttool.convert(source, tmp_path / "two", to="dcp", world_size=1)
    assert [n for n, *_ in ckpttool.convert(source, tmp_path / "two", to="dcp", world_size=1, drop=True).dropped] == [
        "dataloader/"
    ]


def test_an_optimizer_with_a_key_that_is_no_text_is_listed(tmp_path: Path) -> None:
    folder = script_folder(tmp_path / "job")
    tree = torch.load(folder / "optimizer.pt")
    torch.save({0: tree["state"], "param_groups": tree["param_groups"]}, folder / "optimizer.pt")
    with ckpttool.open(folder) as ckpt:
        assert [n for n in ckpt.locate().notes if n.startswith("not read, so not carried: optimizer.pt")]
