"""What torch 2.15 wrote (fixtures/newer_torch_jobs.py), read and brought back to the torch of the test environment."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from peers import FIXTURES, difference, load_dcp, load_full, load_hf, tensors_of
from safetensors.torch import load_file

import ckpttool

SAVED = FIXTURES / "newer_torch"


def test_the_index_of_torch_2_15_has_a_field_that_an_older_torch_does_not_know() -> None:
    assert json.loads((SAVED / "versions.json").read_text()) == {"torch": "2.15.0+cu132", "fields": 6}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        with pytest.raises(ValueError, match="too many values to unpack"):
            pickle.loads((SAVED / "ckpt" / ".metadata").read_bytes())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_convert_is_the_way_back_to_an_older_torch(world: int, tmp_path: Path) -> None:
    """`fixtures/newer_torch_jobs.py load` in torch 2.15 took this folder, too."""
    ckpttool.convert(SAVED / "ckpt", tmp_path / "out", to="dcp", world_size=world)
    tree = load_dcp(tmp_path / "out")  # torch's own loader
    assert tree["step"] == 3
    found = {n: t for n, t in tensors_of(tree).items() if n.startswith(("model.", "optim."))}
    assert difference(found, load_file(SAVED / "truth.safetensors")) == []


@pytest.mark.parametrize("case", ["ckpt", "ranks"])
def test_to_hf_has_the_weights(case: str, tmp_path: Path) -> None:
    ckpttool.convert(SAVED / case, tmp_path / "out", to="hf")
    truth = {n: t for n, t in load_file(SAVED / "truth.safetensors").items() if n.startswith("model.")}
    assert difference({f"model.{n}": t for n, t in load_hf(tmp_path / "out").items()}, truth) == []


@pytest.mark.parametrize("world", [None, 1, 3])
def test_dtensors_that_ranks_pickled_with_torch_2_15_are_read(world: int | None, tmp_path: Path) -> None:
    out = tmp_path / ("out" if world else "out.pt")
    ckpttool.convert(SAVED / "ranks", out, to="dcp" if world else "full", world_size=world)
    found = tensors_of(load_dcp(out) if world else load_full(out))
    assert difference(found, load_file(SAVED / "truth.safetensors")) == []
