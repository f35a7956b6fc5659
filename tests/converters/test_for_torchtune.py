"""`--for torchtune`: a recipe's files, read back, and loaded into an optimizer as the distributed recipes do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peers import FIXTURES, same_value

import ckpttool
from ckpttool.errors import Unsupported

TUNE = FIXTURES / "maps" / "tune-llama3"


@pytest.mark.parametrize("by_way_of_the_hub", [True, False])
def test_a_recipe_finds_what_its_own_checkpointer_wrote(by_way_of_the_hub: bool, tmp_path: Path) -> None:
    """torchtune 0.6.1 resumed from this with the same losses, at 1 and 3 processes; it is not installed here."""
    source, how = TUNE / "epoch_0", {}
    if by_way_of_the_hub:
        how = {"map": "torchtune-llama3", "config": str(TUNE)}
        ckpttool.convert(source, tmp_path / "hub.pt", **how)
        source = tmp_path / "hub.pt"
        with pytest.raises(Unsupported, match=r"first \"model\.embed_tokens.*map='torchtune-llama3'"):
            ckpttool.convert(source, tmp_path / "epoch_0", to="torchtune")
    done = ckpttool.convert(source, tmp_path / "epoch_0", to="torchtune", **how)
    assert any("begins epoch 0 at its first row" in n for n in done.notes)
    pairs = (("model-00001-of-00001.bin", "epoch_0"), ("recipe_state.pt", "recipe_state"))
    for name, folder in pairs:
        ours, theirs = (torch.load(p, weights_only=True) for p in (tmp_path / "epoch_0" / name, TUNE / folder / name))
        assert same_value(dict(ours), dict(theirs)), name
    with ckpttool.open(tmp_path / "epoch_0") as opened:
        assert opened.checkpoint.layout == "torchtune" and not opened.checkpoint.unread


@pytest.mark.parametrize("epoch", [float("nan"), float("inf")])
def test_an_epoch_that_is_no_number_counts_as_none_run(epoch: float, tmp_path: Path) -> None:
    torch.save({"model": {"tok_embeddings.weight": torch.ones(5, 3)}, "epoch": epoch}, tmp_path / "state.pt")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "out", to="torchtune", map="none")
    assert torch.load(tmp_path / "out" / "recipe_state.pt", weights_only=True)["epochs_run"] == 0


def test_counters_that_a_recipe_asks_for_are_made_and_the_rest_is_kept(tmp_path: Path) -> None:
    weights = {"tok_embeddings.weight": torch.ones(5, 3), "layers.0.sa_norm.scale": torch.ones(3)}
    state = {n: {"step": torch.tensor(2.0), "exp_avg": t * 2} for n, t in weights.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    tree = {"model": weights, "optim": optim, "epoch": 4, "scheduler": {"last_epoch": 2}}
    torch.save(tree, tmp_path / "state.pt")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "out", to="torchtune", world_size=3)
    recipe = torch.load(tmp_path / "out" / "recipe_state.pt", weights_only=True)
    counters = {k: recipe[k] for k in ("epochs_run", "total_epochs", "seed", "max_steps_per_epoch")}
    assert counters == {"epochs_run": 4, "total_epochs": 5, "seed": None, "max_steps_per_epoch": None}
    assert same_value(recipe["optimizer"], optim)
    with ckpttool.open(tmp_path / "out") as opened:  # a folder of any name
        found = opened.checkpoint.values
    assert found["scheduler.last_epoch"].data == 2 and found["trainer.epoch"].data == 4
