"""Megatron-Core jobs with other rope and norms than transformers has, by their own arguments: the model of transformers has their logits and next
losses; what cannot be said there is refused, with the values of both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_map_jobs
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Unsupported
from fixtures import map_jobs

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
#: {job: the map of its model}
CONVERTED = {
    "mcore-qwen3+interleaved": "megatron", "mcore-qwen2+interleaved+1p": "megatron", "mcore-gpt2+learned": "megatron-gpt2",
}  # fmt: skip
QWEN2 = "mcore-qwen2+interleaved+1p"
REFUSED = "mcore-llama+percent"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each job wrote: ckpt, config.json, expected.safetensors, expected.json."""
    out = tmp_path_factory.mktemp("jobs")
    run_map_jobs(",".join((*CONVERTED, REFUSED)), out)
    return out


def iteration(job: Path) -> Path:
    """The checkpoint of a job."""
    return job / "ckpt" / "iter_0000003"


@pytest.mark.parametrize("case", CONVERTED)
def test_transformers_has_the_logits_of_the_live_model(case: str, jobs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ckpttool.convert(iteration(jobs / case), tmp_path / "hf", to="hf", config=str(jobs / case))
    said = load_file(jobs / case / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        off = (model(said["ids"]).logits - said["logits"]).abs().max()
    assert off <= 1e-6 * said["logits"].abs().max()


@pytest.mark.parametrize("case", CONVERTED)
def test_training_goes_on_with_the_losses_of_the_live_job(case: str, jobs: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    ckpttool.convert(iteration(jobs / case), tmp_path / "full.pt", map=CONVERTED[case], config=str(jobs / case))
    tree = torch.load(tmp_path / "full.pt", weights_only=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(jobs / case))
    assert model.load_state_dict(tree["model"], strict=False).missing_keys == (
        ["lm_head.weight"] if "gpt2" in case else []
    )
    model.tie_weights()
    names, optim = dict(model.named_parameters()), tree["optim"]
    optimizer = map_jobs.restored_optimizer(names, optim)
    losses = []
    for number in (map_jobs.STEPS, map_jobs.STEPS + 1):  # the second depends on the moments
        rows = map_jobs.batch(number)
        loss = map_jobs.loss_of(model(rows).logits, rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wanted = json.loads((jobs / case / "expected.json").read_text())["next"]
    assert losses == pytest.approx(wanted, abs=1e-6, rel=0)


@pytest.mark.parametrize("case", CONVERTED)
def test_the_way_back_has_the_job_s_own_order_and_norms(case: str, jobs: Path, tmp_path: Path) -> None:
    ckpttool.convert(iteration(jobs / case), tmp_path / "full.pt", map=CONVERTED[case], config=str(jobs / case))
    ckpttool.convert(
        tmp_path / "full.pt",
        tmp_path / "back",
        to="megatron",
        map=CONVERTED[case],
        config=str(jobs / case),
        world_size=1,
    )
    with ckpttool.open(iteration(jobs / case)) as job, ckpttool.open(tmp_path / "back") as back:
        for name in (n for n in job if n.startswith(("model.", "optim.state.", "extra.master.")) and n in back):
            a, b = job[name].torch(), back[name].torch()
            a = a[: len(b)] if a.dim() else a  # rows behind the vocabulary were cut
            if "1p" in case and "norm" in name and not name.startswith("optim"):
                assert torch.equal(a + 1, b + 1), name  # which is all that the job looks at
            else:
                assert torch.equal(a, b), name


def test_a_part_of_a_head_that_is_not_turned_is_refused(jobs: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"rotary_percent = 0\.5, and the map is right for 1 only"):
        ckpttool.convert(iteration(jobs / REFUSED), tmp_path / "hf", to="hf", config=str(jobs / REFUSED))
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, "num_attention_heads = 6, and .* num_attention_heads = 3"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, r"rotary_base = 10000, and .* rope_parameters.rope_theta = 500000.0"),
        ({"rope_theta": 5e5, "rope_parameters": None}, r"rotary_base = 10000, and .* rope_theta = 500000.0"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}}, "use_rope_scaling = False, and .* 'llama3'"),
        ({"rms_norm_eps": 1e-5}, "norm_epsilon = 1e-06, and .* rms_norm_eps = 1e-05"),
        ({"hidden_act": "gelu"}, "swiglu = True, and .* hidden_act = 'gelu'"),
        ({"tie_word_embeddings": True}, "untie_embeddings_and_output_weights = True, and .* tie_word_embeddings = True"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_job_is_refused_with_both_values(
    change: dict[str, Any], said: str, jobs: Path, tmp_path: Path
) -> None:
    case = jobs / QWEN2
    config = {**json.loads((case / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for how in ({"to": "hf"}, {"to": "full", "map": "megatron"}):
        with pytest.raises(Unsupported, match=said):
            ckpttool.convert(iteration(case), tmp_path / "out", config=str(tmp_path), **how)


def test_a_map_is_not_for_a_config_of_another_type(jobs: Path, tmp_path: Path) -> None:
    config = {**json.loads((jobs / QWEN2 / "config.json").read_text()), "model_type": "gemma"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=r"is for model_type llama.*'gemma'"):
        ckpttool.convert(iteration(jobs / QWEN2), tmp_path / "out.pt", map="megatron", config=str(tmp_path))
