"""Jobs with the real torchao resume from what we write (fixtures/torchao_jobs.py); skipped without .venv-torchao (see the Makefile)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from peers import FIXTURES, REPOSITORY, difference
from ranks import one_at_a_time
from safetensors.torch import load_file

import ckpttool

PYTHON = REPOSITORY / ".venv-torchao" / "bin" / "python"
TORCHAO = FIXTURES / "torchao"
JOBS = REPOSITORY / "fixtures" / "torchao_jobs.py"

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not PYTHON.exists(), reason="make .venv-torchao/.done installs torchao, which this needs"),
]


def run(world: int, *words: object) -> None:
    """The script, on so many ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else []
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    with one_at_a_time():
        done = subprocess.run(
            [PYTHON, *launch, JOBS, *map(str, words)], env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]


def outcome(out: Path) -> tuple[list[float], dict[str, str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses, classes of the state, the state as it was loaded, the weights at the end)."""
    said = json.loads(Path(f"{out}.json").read_text())
    return said["losses"], said["kinds"], load_file(f"{out}.loaded.safetensors"), load_file(f"{out}.next.safetensors")


def uninterrupted(case: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = TORCHAO / case
    losses = json.loads((folder / "case.json").read_text())["losses_after"]
    return losses, load_file(folder / "truth.safetensors"), load_file(folder / "next.safetensors")


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether weights after three steps are those of the fixture; another type of CPU may round their last digit otherwise (6e-8)."""
    return a.keys() == b.keys() and all((a[n] - t).abs().max() <= 2e-7 for n, t in b.items())


def test_two_ranks_go_on_as_if_they_had_never_stopped(tmp_path: Path) -> None:
    cases = ["adamw8bit_w2", "adamwfp8_w2", "adamw8bit_mixed_w2"]
    words: list[object] = []
    for case in cases:
        source = TORCHAO / case / "ckpt"
        if "mixed" not in case:
            ckpttool.convert(source, tmp_path / f"{case}.pt", to="full")
            source = tmp_path / f"{case}.pt"
        ckpttool.convert(source, tmp_path / case, to="dcp", world_size=2)
        words += [case, tmp_path / case, tmp_path / f"{case}-out"]
    run(2, "resume", *words)
    for case in cases:
        losses, kinds, loaded, final = outcome(tmp_path / f"{case}-out")
        expected, truth, end = uninterrupted(case)
        assert kinds["embed.weight.exp_avg"].startswith("OptimState") and kinds["small.weight.exp_avg"] == "Tensor"
        assert difference(loaded, truth) == [] and losses == expected and near(final, end)


def test_one_process_goes_on_from_one_file_and_from_a_folder(tmp_path: Path) -> None:
    ckpttool.convert(TORCHAO / "adamw4bit_w1" / "ckpt.pt", tmp_path / "same.pt", to="full")
    ckpttool.convert(TORCHAO / "adamw4bit_w1" / "ckpt.pt", tmp_path / "same", to="dcp", world_size=1)
    ckpttool.convert(TORCHAO / "adamw8bit_w2" / "ckpt", tmp_path / "joined.pt", to="full")
    words: list[object] = []
    for case, path in [("adamw4bit_w1", "same.pt"), ("adamw4bit_w1", "same"), ("adamw8bit_w2", "joined.pt")]:
        words += [case, tmp_path / path, tmp_path / f"{path}-out"]
    run(1, "resume", *words)
    expected, truth, end = uninterrupted("adamw4bit_w1")
    for path in ("same.pt", "same"):
        losses, kinds, loaded, final = outcome(tmp_path / f"{path}-out")
        assert kinds["embed.weight.exp_avg"] == "OptimState4bit"
        assert difference(loaded, truth) == [] and losses == expected and near(final, end)
    losses, kinds, loaded, _ = outcome(tmp_path / "joined.pt-out")
    expected, truth, _ = uninterrupted("adamw8bit_w2")
    assert kinds["embed.weight.exp_avg"] == "OptimState8bit" and difference(loaded, truth) == []
    assert losses == pytest.approx(expected, rel=1e-5)  # gradients of 24 rows instead of twice 12


def test_three_ranks_go_on_from_two(tmp_path: Path) -> None:
    """Their parts are too small for torchao to quantise, so it puts the numbers into plain tensors."""
    ckpttool.convert(TORCHAO / "adamw8bit_w2" / "ckpt", tmp_path / "three", to="dcp", world_size=3)
    run(3, "resume", "adamw8bit_w2", tmp_path / "three", tmp_path / "out")
    losses, kinds, loaded, _ = outcome(tmp_path / "out")
    expected, truth, _ = uninterrupted("adamw8bit_w2")
    assert kinds["embed.weight.exp_avg"] == "Tensor" and difference(loaded, truth) == []
    assert losses == pytest.approx(expected, rel=1e-4)


def test_objects_of_every_class_of_weights_have_their_numbers(tmp_path: Path) -> None:
    ckpttool.convert(TORCHAO / "weights" / "weights.pt", tmp_path / "out.pt", to="full")
    run(1, "numbers", tmp_path / "out.pt", tmp_path / "numbers.safetensors")
    assert (
        difference(load_file(tmp_path / "numbers.safetensors"), load_file(TORCHAO / "weights" / "truth.safetensors"))
        == []
    )


def test_transformers_loads_the_quantised_model_and_computes_the_same(tmp_path: Path) -> None:
    llama = TORCHAO / "llama_int8"
    ckpttool.convert(llama / "model.pt", tmp_path / "hf", to="hf", config=str(llama / "config"))
    run(1, "logits", tmp_path / "hf", tmp_path / "logits.safetensors")
    assert difference(load_file(tmp_path / "logits.safetensors"), load_file(llama / "logits.safetensors")) == []


def test_torchao_puts_the_weights_in_safetensors_together(tmp_path: Path) -> None:
    ckpttool.convert(TORCHAO / "weights" / "writable.pt", tmp_path / "a.safetensors", to="hf")
    run(1, "unflatten", tmp_path / "a.safetensors", tmp_path / "numbers.safetensors")
    truth = load_file(TORCHAO / "weights" / "truth.safetensors")
    found = load_file(tmp_path / "numbers.safetensors")
    assert torch.equal(found.pop("model.layer.norm.bias"), torch.ones(3))
    assert len(found) == 6 and difference(found, {n: truth[n] for n in found}) == []
