"""What ckpttool writes as `megatron` is loaded by Megatron-Core itself, at other tensor and pipeline parallel sizes than those of the save,
and trains on with the losses of the job that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from ranks import torchrun
from safetensors.torch import load_file, save_file

import ckpttool

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
MEGATRON = FIXTURES / "megatron"
#: {fixture: how the job that loads is built, on two ranks}; the padding of the vocabulary is part of the loss
JOBS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"padded": 160},
    "stacked_pp2_bf16": {"bf16": True, "tp": 2, "padded": 144},
    "buckets_dp3": {"bf16": True, "pp": 2},
    "moe": {"experts": 4},
}


FOREIGN = "another trainer's"
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "intermediate_size": 20, "vocab_size": 131, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def of_another_trainer(out: Path) -> dict[str, Any]:
    """The state of tp2_pp2 under the names of transformers, without anything of Megatron-Core, and what `--for megatron` makes of it: the
    case for megatron_resume.py."""
    source, vocab = MEGATRON / "tp2_pp2", 131
    (out / "config").mkdir()
    (out / "config" / "config.json").write_text(json.dumps(CONFIG))
    ckpttool.convert(source / "ckpt" / "iter_0000003", out / "a.pt", map="megatron", config=str(out / "config"))
    tree = torch.load(out / "a.pt", weights_only=False)
    names = list(tree["model"])
    group = {"lr": 0.007, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": names}
    optim = {"state": tree["optim"]["state"], "param_groups": [group]}
    torch.save({"model": tree["model"], "optim": optim, "scheduler": {"last_epoch": 3}, "step": 3}, out / "b.pt")
    said = ckpttool_here(
        "convert", out / "b.pt", out / "iter_0000003", "--for", "megatron", "-n", 3, "--map", "megatron",
        "--config", out / "config", "--vocab-size", 160,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    truth = {
        n: t[:vocab].clone() if "word_embeddings" in n or "output_layer" in n else t
        for n, t in load_file(source / "truth.safetensors").items()
    }
    save_file(truth, out / "truth.safetensors")
    return {
        "checkpoint": str(out / "iter_0000003"), "truth": str(out / "truth.safetensors"), "how": {"tp": 2, "padded": 160}, "override": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks say of each case."""
    out = tmp_path_factory.mktemp("megatron")
    cases = []
    for case, how in JOBS.items():
        ckpttool.convert(MEGATRON / case / "ckpt" / "iter_0000003", out / case, to="megatron", world_size=3)
        same = (how.get("tp", 1), how.get("pp", 1)) == tuple(
            json.loads((MEGATRON / case / "job.json").read_text())["how"].get(k, 1) for k in ("tp", "pp")
        )
        truth = str(MEGATRON / case / "truth.safetensors")
        cases.append({"checkpoint": str(out / case), "truth": truth, "how": how, "rng": same})
    cases.append(of_another_trainer(out))
    path = out / "cases.json"
    path.write_text(json.dumps(cases))
    said = torchrun(2, "megatron_resume.py", str(path))
    found = json.loads(path.read_text())
    assert all("losses" in c for c in found), said[-4000:]
    return dict(zip((*JOBS, FOREIGN), found, strict=True))


def test_a_job_accepts_what_is_written_of_another_trainer_s_state(loaded: dict[str, Any], tmp_path: Path) -> None:
    found = loaded[FOREIGN]
    assert found["different"] == [] and found["iteration"] == 3
    common = torch.load(Path(found["checkpoint"]) / "common.pt", weights_only=False)
    args = common["args"]
    # what load_checkpoint of Megatron-LM compares, and what it decides by
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (2, 16, 4) and args.no_save_rng
    assert (args.num_query_groups, args.group_query_attention, args.kv_channels, args.ffn_hidden_size) == (
        2,
        True,
        6,
        20,
    )
    assert (args.swiglu, args.normalization, args.position_embedding_type, args.rotary_base) == (
        True,
        "RMSNorm",
        "rope",
        10000.0,
    )
    assert (args.untie_embeddings_and_output_weights, args.add_bias_linear, args.padded_vocab_size) == (
        True,
        False,
        160,
    )
    assert common["opt_param_scheduler"]["max_lr"] == 0.007 and common["ckpttool"]["scheduler"] == {"last_epoch": 3}
    # and back: what was made for Megatron-Core is no part of the state
    ckpttool.convert(
        found["checkpoint"], tmp_path / "c.pt", map="megatron", config=str(Path(found["checkpoint"]).parent / "config")
    )
    tree = torch.load(tmp_path / "c.pt", weights_only=False)
    assert tree["scheduler"] == {"last_epoch": 3} and "args" not in tree.get("extra", {})


@pytest.mark.parametrize("case", JOBS)
def test_megatron_loads_it_at_another_parallel_size_bit_for_bit(case: str, loaded: dict[str, Any]) -> None:
    found = loaded[case]
    assert found["different"] == []
    assert found["iteration"] == 3 and found["args"] == [2, "AttnBackend.auto"]
    assert found.get("rng_bytes", 64) == 64


@pytest.mark.parametrize("case", JOBS)
def test_it_trains_on_as_the_job_that_was_never_stopped(case: str, loaded: dict[str, Any]) -> None:
    wanted = json.loads((MEGATRON / case / "job.json").read_text())["losses_after"]
    assert loaded[case]["losses"] == pytest.approx(wanted, rel=5e-5 if JOBS[case].get("bf16") else 2e-6)
