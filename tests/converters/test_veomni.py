"""Folders of VeOmni, AReaL and Composer: torch's own dcp.save and torch.save under the names and keys of their published code (VeOmni 0.1.12 and
layout.py after it, AReaL 1.0.4, Composer 0.32.1). The packages themselves were not run: they want GPUs, or an older torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import difference, load_dcp, load_hf, same_value, tensors_of
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def job() -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """(model, optimizer, truth) after a step."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(131, 5), "out": torch.nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model["out"](model["emb"](torch.arange(7))).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    truth = {f"model.{n}": t.clone() for n, t in weights.items()}
    truth |= {f"optim.{n}.{slot}": t.clone() for n, slots in moments["state"].items() for slot, t in slots.items()}
    return weights, moments, truth


def extra(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "global_step": 3, "environ_meter": {"consume_tokens": 96}, "torch_rng_state": torch.arange(16, dtype=torch.uint8) + rank, **more,
    }  # fmt: skip


def old(folder: Path) -> dict[str, torch.Tensor]:
    weights, moments, truth = job()
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder), no_dist=True)
    (folder / "extra_state").mkdir()
    for rank in range(2):
        state = extra(
            rank, lr_scheduler={"last_epoch": 3}, train_dataloader={"at": 10 + rank}, channel_loss_callback={}
        )
        torch.save(state, folder / "extra_state" / f"extra_state_rank_{rank}.pt")
    return truth


def new(folder: Path) -> dict[str, torch.Tensor]:
    weights, moments, truth = job()
    dcp.save({"model": weights}, checkpoint_id=str(folder / "model" / "ckpt"), no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=str(folder / "model" / "optimizer"), no_dist=True)
    torch.save({"last_epoch": 3}, folder / "model" / "lr_scheduler.pt")
    for name in ("loader", "extra_state"):
        (folder / name).mkdir()
        for rank in range(2):
            torch.save({"at": 10 + rank} if name == "loader" else extra(rank), folder / name / f"rank_{rank}.pt")
    (folder / "checkpoint_manifest.json").write_text(
        json.dumps({"format_version": 1, "global_step": 3, "world_size": 2, "modules": []})
    )
    return truth


def weights_in_hf(source: Path, out: Path, truth: dict[str, torch.Tensor]) -> bool:
    """Whether `--to hf` has the weights bit for bit."""
    ckpttool.convert(source, out, to="hf")
    found = {f"model.{n}": t for n, t in load_hf(out).items()}
    return difference(found, {n: t for n, t in truth.items() if n.startswith("model.")}) == []


@pytest.mark.parametrize("save", [old, new], ids=["0.1.12", "later"])
def test_a_step_is_one_state(save: Any, tmp_path: Path) -> None:
    truth = save(tmp_path / "global_step_3")
    done = ckpttool.convert(tmp_path / "global_step_3", tmp_path / "out", to="dcp", world_size=3)
    assert done.verified and not done.dropped and not any("not every rank" in n for n in done.notes)
    tree = load_dcp(tmp_path / "out")
    found = {n: t for n, t in tensors_of(tree).items() if n.startswith(("model.", "optim."))}
    assert difference(found, truth) == []
    assert tree["scheduler"] == {"last_epoch": 3} and tree["trainer"]["global_step"] == 3
    assert tree["trainer"]["environ_meter"] == {"consume_tokens": 96}
    for rank in range(2):
        assert same_value(tree["rng"][str(rank)]["cpu"], extra(rank)["torch_rng_state"])
        assert tree["dataloader"][str(rank)] == {"at": 10 + rank}
    assert weights_in_hf(tmp_path / "global_step_3", tmp_path / "hf", truth)


def test_a_rank_with_a_number_where_the_other_has_a_dict_keeps_its_own(tmp_path: Path) -> None:
    old(tmp_path / "step")
    file = tmp_path / "step" / "extra_state" / "extra_state_rank_0.pt"
    torch.save({**torch.load(file, weights_only=False), "lr_scheduler": 0.5}, file)
    ckpttool.convert(tmp_path / "step", tmp_path / "out", to="dcp", world_size=1)
    tree = load_dcp(tmp_path / "out")
    assert tree["scheduler"] == 0.5 and tree["extra"]["per_rank"] == {"1": {"scheduler": {"last_epoch": 3}}}


@pytest.mark.parametrize("save", [old, new], ids=["0.1.12", "later"])
def test_inspect_names_veomni_and_lists_its_steps(save: Any, tmp_path: Path) -> None:
    for step in (3, 6):
        save(tmp_path / f"global_step_{step}")
    found = json.loads(ckpttool_here("inspect", tmp_path / "global_step_3", "--json").stdout)
    assert (found["layout"], found["trainer"], found["ranks"], found["step"]) == ("veomni", "VeOmni", 2, 3)
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert [(c["name"], c["trainer"]) for c in found["checkpoints"]] == [
        ("global_step_3", "VeOmni"),
        ("global_step_6", "VeOmni"),
    ]
    assert found["newest"] == str(tmp_path / "global_step_6")


def test_a_save_without_its_manifest_had_not_ended(tmp_path: Path) -> None:
    for step in (3, 6):
        new(tmp_path / f"global_step_{step}")
    (tmp_path / "global_step_6" / "checkpoint_manifest.json").unlink()
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert found["newest"] == str(tmp_path / "global_step_3")
    with ckpttool.open(tmp_path / "global_step_6") as opened:
        assert any("VeOmni does not resume from it" in n for n in opened.checkpoint.notes)


def test_several_models_are_refused_with_their_names(tmp_path: Path) -> None:
    new(tmp_path / "step")
    (tmp_path / "step" / "model").rename(tmp_path / "moved")
    (tmp_path / "step" / "model").mkdir()
    (tmp_path / "moved").rename(tmp_path / "step" / "model" / "vit")
    with pytest.raises(Unsupported, match=r"holds 1 models: vit\. Convert the folders of one, .*model/vit/ckpt"):
        ckpttool.open(tmp_path / "step")


def test_areal_keeps_everything_under_one_key(tmp_path: Path) -> None:
    weights, moments, truth = job()
    dcp.save({"dcp": {"model": weights, "optim": moments}}, checkpoint_id=str(tmp_path / "areal"), no_dist=True)
    ckpttool.convert(tmp_path / "areal", tmp_path / "out", to="dcp", world_size=3, canonical_keys=True)
    found = {n: t for n, t in tensors_of(load_dcp(tmp_path / "out")).items() if n.startswith(("model.", "optim."))}
    assert difference(found, truth) == []
    ckpttool.convert(tmp_path / "areal", tmp_path / "own", to="dcp", world_size=2)  # for AReaL itself: its own key
    assert load_dcp(tmp_path / "own").keys() == {"dcp"}
    assert weights_in_hf(tmp_path / "areal", tmp_path / "hf", truth)


@pytest.mark.parametrize("as_file", [False, True], ids=["sharded", "one file"])
def test_composer_keeps_model_and_optimizers_under_state(as_file: bool, tmp_path: Path) -> None:
    weights, moments, truth = job()
    state = {
        "model": weights, "optimizers": {"DecoupledAdamW": moments}, "schedulers": {"LambdaLR": {"last_epoch": 3}},
        "timestamp": {"Timestamp": {"epoch": 0, "batch": 3}}, "run_name": "llm",
    }  # fmt: skip
    tree = {"state": state, "rng": [{"python": (3, (1, 2), None), "torch": torch.arange(8, dtype=torch.uint8)}]}
    source = tmp_path / ("ep0-ba3-rank0.pt" if as_file else "ep0-ba3")
    if as_file:
        torch.save(tree, source)
    else:
        dcp.save(tree, checkpoint_id=str(source), no_dist=True)
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3)
    assert done.verified and not done.dropped
    tree = load_dcp(tmp_path / "out")
    found = {n: t for n, t in tensors_of(tree).items() if n.startswith(("model.", "optim."))}
    assert difference(found, truth) == []
    assert tree["scheduler"] == {"last_epoch": 3} and tree["extra"]["run_name"] == "llm"
    assert tree["trainer"]["timestamp"]["Timestamp"]["batch"] == 3
    with ckpttool.open(source) as opened:
        assert opened.checkpoint.trainer == "Composer"
    assert weights_in_hf(source, tmp_path / "hf", truth)


def test_several_optimizers_and_schedulers_of_composer_are_said_to_be_several(tmp_path: Path) -> None:
    weights, moments, _ = job()
    two = {"LambdaLR": {"last_epoch": 3, "x": 0}, "StepLR": {"last_epoch": 4}}
    state = {"model": weights, "optimizers": {"A": moments, "B": moments}, "schedulers": two, "timestamp": {"batch": 3}}
    torch.save({"state": state, "rng": []}, tmp_path / "c.pt")
    assert not any("no optimizer state" in text for text in ckpttool.inspect(tmp_path / "c.pt").missing)
    with pytest.raises(ckpttool.CkpttoolError, match="several optimizers"):
        ckpttool.convert(tmp_path / "c.pt", tmp_path / "t", to="trainer", world_size=1)
    state["optimizers"] = {"A": moments}
    state |= {f"user_{i}": i for i in range(9)}
    torch.save({"state": state, "rng": []}, tmp_path / "c.pt")
    notes = " ".join(ckpttool.convert(tmp_path / "c.pt", tmp_path / "t", to="trainer", world_size=1).notes)
    assert "the source has several schedulers" in notes and "and 4 more" in notes
    torch.save({"state": {**state, "scheduler": {"LambdaLR": {"x": 1}}}, "rng": []}, tmp_path / "c.pt")
    with pytest.raises(ckpttool.CkpttoolError, match=r"scheduler\.LambdaLR\.x"):
        ckpttool.inspect(tmp_path / "c.pt")
