"""ckpttool compare on a GPU: a model against its conversion, and against one with a planted fault, one layer in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import ckpttool

CONFIG = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 210 million parameters in bf16, as transformers saves it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("compare") / "hf"
    with torch.device("cuda"):
        made = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    made.save_pretrained(folder)
    return folder


def compare(*args: Any) -> tuple[int, dict[str, Any]]:
    """(exit code, JSON) of one command."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", "compare", *map(str, args), "--device", "cuda", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_conversion_computes_the_same_bits_on_the_gpu(dtype: str, model: Path, tmp_path: Path) -> None:
    ckpttool.convert(model, tmp_path / "dcp", to="dcp", world_size=3)
    code, found = compare(model, tmp_path / "dcp", "--config", model, "--dtype", dtype)
    print(
        "\ncompare:",
        {k: found.get(k) for k in ("device", "dtype", "largest", "kl_max", "bound", "noise", "layer_bytes", "seconds")},
    )
    assert code == 0 and found["device"].startswith("cuda") and found["largest"] == 0.0


def test_exchanged_gate_and_up_are_named_on_the_gpu(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    gate, up = (f"model.layers.5.mlp.{n}_proj.weight" for n in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up].clone(), tensors[gate].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    code, found = compare(model, tmp_path)
    print("\nplanted:", found["first_layer"], found["causes"], found["kl_max"])
    assert code == 5 and found["first_layer"] == "model.layers.5"
    assert [c["name"] for c in found["causes"]] == [gate, up]
