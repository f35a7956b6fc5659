"""Layers of multi-token prediction in Megatron-Core's saves of DeepSeek V3 and GLM 4.5: the same weights under the names of the Hub, in layers that
are made of transformers' own, have the logits of the live job and go on with its losses; and the way back is what the job wrote.

transformers has no such layers. What they compute is that of the DeepSeek V3 report, 2.2, as vLLM serves it: each joins the embedding of the next
token to the output of the layer before, projects both to the model's size, and is a decoder layer with a norm and the model's output layer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_map_jobs
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Unsupported
from fixtures import map_jobs

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
#: {job: the map of its model}
CASES = {"mcore-deepseek-v3+mtp": "megatron-mla", "mcore-glm4-moe+mtp": "megatron-glm4-moe"}
#: Layers of the model, further ones behind them, and the weight of their losses.
LAYERS, FURTHER, SCALE = 2, 2, 0.3


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each job wrote: ckpt, config.json, expected.safetensors, expected.json."""
    out = tmp_path_factory.mktemp("jobs")
    run_map_jobs(",".join(CASES), out)
    return out


@pytest.fixture(scope="module", params=CASES)
def job(request: pytest.FixtureRequest, jobs: Path) -> Path:
    """The folder of a job that has run."""
    return jobs / str(request.param)


@pytest.fixture(scope="module")
def mapped(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole state under the names of transformers."""
    out = tmp_path_factory.mktemp("mapped") / "full.pt"
    ckpttool.convert(iteration(job), out, map=CASES[job.name], config=str(job))
    return out


def iteration(job: Path) -> Path:
    """The checkpoint of a job."""
    return job / "ckpt" / "iter_0000003"


def model_with_further_layers(job: Path) -> Any:
    """The model of transformers with layers behind its own, which its forward leaves out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job))
    inside, size = model.model, model.config.hidden_size
    layer, norm = type(inside.layers[-1]), type(inside.norm)
    for number in range(LAYERS, LAYERS + FURTHER):
        more = layer(model.config, number)
        more.enorm, more.hnorm = (norm(size, eps=model.config.rms_norm_eps) for _ in "eh")
        more.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        more.embed_tokens = inside.embed_tokens
        more.shared_head = torch.nn.Module()
        more.shared_head.norm, more.shared_head.head = norm(size, eps=model.config.rms_norm_eps), model.lm_head
        inside.layers.append(more)
    return model


def logits_of(model: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the next token, then of those that each further layer predicts."""
    found = model.model(input_ids=rows).last_hidden_state
    out = [model.lm_head(found)]
    positions = torch.arange(rows.shape[1])[None]
    turns = model.model.rotary_emb(found, positions)
    for layer in model.model.layers[LAYERS:]:
        rows = torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], 1)
        both = torch.cat([layer.enorm(layer.embed_tokens(rows)), layer.hnorm(found)], -1)
        found = layer(layer.eh_proj(both), position_embeddings=turns, position_ids=positions, attention_mask=None)
        found = layer.shared_head.norm(found)
        out.append(layer.shared_head.head(found))
    return out


def test_the_further_layers_have_the_logits_of_the_live_job(job: Path, mapped: Path) -> None:
    model = model_with_further_layers(job)
    model.load_state_dict(torch.load(mapped, weights_only=True)["model"])
    live = load_file(job / "expected.safetensors")
    with torch.no_grad():
        found = logits_of(model.eval(), live["ids"])
    wanted = [live["logits"], *(live[f"ahead.{k}"] for k in range(FURTHER))]
    assert all(t.abs().max() > 0.1 for t in wanted)
    assert len({float(t.sum()) for t in wanted}) == 1 + FURTHER
    assert [(a - b).abs().max().item() <= 1e-6 for a, b in zip(found, wanted, strict=True)] == [True] * (1 + FURTHER)


def test_training_goes_on_with_the_losses_of_the_live_job(job: Path, mapped: Path) -> None:
    tree = torch.load(mapped, weights_only=True)
    model = model_with_further_layers(job)
    model.load_state_dict(tree["model"])
    shared = ("shared_head.head.weight", *(f"{n}.embed_tokens.weight" for n in range(LAYERS, LAYERS + FURTHER)))
    named = model.named_parameters(remove_duplicate=False)
    names, optim = {n: p for n, p in named if not n.endswith(shared)}, tree["optim"]
    assert set(optim["state"]) == set(names)
    optimizer = map_jobs.restored_optimizer(names, optim)
    losses = []
    for number in (map_jobs.STEPS, map_jobs.STEPS + 1):  # the second depends on the moments
        rows = map_jobs.batch(number)
        first, *further = logits_of(model, rows)
        loss = map_jobs.loss_of(first, rows)
        losses.append(loss.item())
        for k, logits in enumerate(further, 1):
            loss = loss + SCALE / FURTHER * map_jobs.loss_of(logits[:, :-k], rows[:, k:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wanted = json.loads((job / "expected.json").read_text())["next"]
    assert losses == pytest.approx(wanted, abs=1e-6, rel=0)


def test_the_way_back_is_what_the_job_wrote(job: Path, mapped: Path, tmp_path: Path) -> None:
    how = {"map": CASES[job.name], "config": str(job)}
    ckpttool.convert(mapped, tmp_path / "back", to="dcp", world_size=1, **how)
    found = ckpttool.diff(iteration(job), tmp_path / "back")
    assert (found.data, found.shapes, found.dtypes, found.only_in_a, found.only_in_b) == ([], {}, {}, [], [])


@pytest.mark.slow
def test_megatron_core_goes_on_from_the_way_back_as_from_its_own(jobs: Path, tmp_path: Path) -> None:
    """Two runs of Megatron-Core, 6 s each."""
    case = "mcore-deepseek-v3+mtp"
    job, how = jobs / case, {"map": CASES[case], "config": str(jobs / case)}
    ckpttool.convert(iteration(job), tmp_path / "full.pt", **how)
    ckpttool.convert(tmp_path / "full.pt", tmp_path / "iter_0000003", to="megatron", world_size=1, **how)
    runs = [
        json.loads(next(line for line in run_map_jobs(case, job, "back", at).splitlines() if line.startswith("{")))
        for at in (tmp_path / "iter_0000003", iteration(job))
    ]
    assert runs[0]["logits"] == 0.0 and runs[0] == runs[1]


def test_the_folder_for_the_hub_has_them_behind_the_layers_of_the_model(job: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ckpttool.convert(iteration(job), tmp_path / "hf", to="hf", config=str(job))
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    beyond = tuple(f"model.layers.{LAYERS + k}." for k in range(FURTHER))
    further = {n for n in written if n.startswith(beyond)}
    assert not said["missing_keys"] and not said["mismatched_keys"]
    assert said["unexpected_keys"] and all(n.startswith(beyond) for n in said["unexpected_keys"])
    live = load_file(job / "expected.safetensors")
    with torch.no_grad():
        assert (model.eval()(live["ids"]).logits - live["logits"]).abs().max().item() <= 1e-6
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.norm.weight", "shared_head.head.weight"}  # fmt: skip
    of_last = {n.removeprefix("model.layers.1.") for n in written if n.startswith("model.layers.1.")}
    assert "mlp.experts.3.gate_proj.weight" in of_last
    for prefix in beyond:
        assert {n.removeprefix(prefix) for n in further if n.startswith(prefix)} == of_last | own
        assert torch.equal(written[f"{prefix}embed_tokens.weight"], written["model.embed_tokens.weight"])
        assert torch.equal(written[f"{prefix}shared_head.head.weight"], written["lm_head.weight"])
    # and back, from files in which these are bytes of their own
    ckpttool.convert(tmp_path / "hf", tmp_path / "back.pt", map=CASES[job.name], config=str(job))
    assert ckpttool.diff(iteration(job), tmp_path / "back.pt", only=["model"]).equal
    ckpttool.convert(
        tmp_path / "hf", tmp_path / "iter_0000003", to="megatron", map=CASES[job.name], config=str(job), world_size=1
    )
    if job.name.startswith("mcore-deepseek"):  # of whose model the arguments of Megatron-LM are known
        common = torch.load(tmp_path / "iter_0000003" / "common.pt", weights_only=False)
        assert common["args"].mtp_num_layers == FURTHER
    # a folder without some of them, or all
    for kept, count in ((beyond[:1], 1), ((), 0)):
        few = {n: t for n, t in written.items() if not n.startswith(beyond) or n.startswith(kept)}
        (tmp_path / f"few{count}").mkdir()
        save_file(few, tmp_path / f"few{count}" / "model.safetensors", {"format": "pt"})
        shutil.copy(tmp_path / "hf" / "config.json", tmp_path / f"few{count}")
        ckpttool.convert(tmp_path / f"few{count}", tmp_path / f"few{count}.pt", map=CASES[job.name])
        found = ckpttool.diff(iteration(job), tmp_path / f"few{count}.pt", only=["model"])
        assert (found.data, found.only_in_b) == ([], [])
        assert {n.split(".")[3] for n in found.only_in_a} == {str(k) for k in range(count, FURTHER)}
    written[f"{beyond[1]}shared_head.head.weight"][3, 1] += 1
    save_file(written, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "ckpttool.json").unlink()
    with pytest.raises(
        Unsupported, match=r'"model.model.layers.3.shared_head.head.weight" and "model.lm_head.weight" differ'
    ):
        ckpttool.convert(tmp_path / "hf", tmp_path / "no.pt", map=CASES[job.name], config=str(job))


def test_a_config_with_another_number_of_them_is_refused(job: Path, tmp_path: Path) -> None:
    config = json.loads((job / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(Unsupported, match=r"mtp_num_layers = 2, and .* num_nextn_predict_layers = 1"):
        ckpttool.convert(iteration(job), tmp_path / "out", to="hf", config=str(tmp_path))
