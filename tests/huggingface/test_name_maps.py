"""The maps that come with ckpttool, on checkpoints that the other programs wrote (fixtures/map_jobs.py): the real transformers model of
what is converted has the logits of the real other model, goes on with its losses, and the way back is what the other program wrote, bit for bit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import peers
import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Unsupported
from ckpttool.huggingface import maps
from fixtures import map_jobs

FOLDER, SMALL = peers.FIXTURES / "maps", peers.FIXTURES / "maps_small"


def folder_of(name: str) -> Path:
    """The fixture."""
    return next(f / name for f in (FOLDER, SMALL) if (f / name).exists())


class Case(NamedTuple):
    """A fixture, the map from it and the one back to it, and the most that a logit differs where the arithmetic is another."""

    name: str
    forth: str
    back: str
    logits: float

    @property
    def path(self) -> Path:
        """The checkpoint."""
        inside = {"tune": "epoch_0", "titan": "ckpt", "mcore": "ckpt/iter_0000003"}
        return folder_of(self.name) / inside[self.name.partition("-")[0]]


CASES = (
    Case("titan-llama3", "torchtitan-llama3", "torchtitan-llama3", 5e-7),
    Case("titan-llama3-fused", "torchtitan-llama3", "torchtitan-llama3-fused", 5e-7),
    Case("titan-qwen3-fused", "torchtitan-qwen3", "torchtitan-qwen3-fused", 5e-7),
    Case("titan-qwen3-moe", "torchtitan-qwen3", "torchtitan-qwen3", 5e-7),
    Case("titan-deepseek-v3", "torchtitan-deepseek-v3", "torchtitan-deepseek-v3", 5e-7),
    Case("tune-llama3", "torchtune-llama3", "torchtune-llama3", 5e-7),
    Case("tune-qwen2", "torchtune-qwen2", "torchtune-qwen2", 5e-7),
    Case("tune-llama3-2", "torchtune-llama3", "torchtune-llama3", 5e-7),
    Case("tune-mistral", "torchtune-llama3", "torchtune-llama3", 5e-7),
    Case("tune-qwen3", "torchtune-qwen3", "torchtune-qwen3", 5e-7),
    Case("titan-gpt-oss", "torchtitan-gpt-oss", "torchtitan-gpt-oss", 5e-7),
    Case("titan-llama4", "torchtitan-llama4", "torchtitan-llama4", 5e-7),
    Case("tune-phi3", "torchtune-phi3", "torchtune-phi3", 5e-7),
    Case("tune-gemma", "torchtune-gemma", "torchtune-gemma", 5e-7),
    Case("mcore-llama", "megatron", "megatron", 5e-7),
    Case("mcore-qwen2", "megatron", "megatron", 5e-7),
    Case("mcore-qwen3", "megatron", "megatron", 5e-7),
    Case("mcore-mixtral", "megatron", "megatron", 5e-7),
    Case("mcore-qwen3-moe", "megatron", "megatron", 5e-7),
    Case("mcore-deepseek-v3", "megatron-mla", "megatron-mla", 5e-7),
)

#: Maps that are not found by the trainer which wrote the checkpoint: names of torchtune's Phi and Gemma are those of its Llama.
BY_HAND = {m: m for m in ("torchtune-phi3", "torchtune-gemma")}


def test_every_map_has_a_fixture() -> None:
    # live/test_megatron_premises.py, live/test_newer_maps.py
    elsewhere = {
        "meta-llama",
        "megatron-gpt2",
        "megatron-glm4-moe",
        "megatron-t5",
        "torchtitan-qwen3-5",
        "torchtitan-kimi-k25",
        "torchtitan-muse-glimmer",
    }
    assert {c.forth for c in CASES} | {c.back for c in CASES} == set(maps.list_map_names()) - elsewhere
    assert {p.name for f in (FOLDER, SMALL) for p in f.iterdir()} == {c.name for c in CASES}


@pytest.fixture(scope="module", params=CASES, ids=lambda c: c.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@cache
def expected(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What the program that wrote a fixture says: tensors, and losses."""
    return load_file(folder_of(name) / "expected.safetensors"), json.loads(
        (folder_of(name) / "expected.json").read_text()
    )


@pytest.fixture(scope="module")
def mapped(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole state under the names of transformers."""
    out = tmp_path_factory.mktemp("mapped") / "full.pt"
    ckpttool.convert(case.path, out, map=case.forth, config=str(folder_of(case.name)))
    return out


@pytest.mark.slow
def test_the_model_of_transformers_has_the_logits_of_the_other(case: Case, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    said, _ = expected(case.name)
    done = ckpttool.convert(
        case.path, tmp_path / "hf", to="hf", config=str(folder_of(case.name)), map=BY_HAND.get(case.forth)
    )
    assert any(f"by the map {case.forth}" in n for n in done.notes)
    got = load_file(tmp_path / "hf" / "model.safetensors")
    hub = {n.removeprefix("hub."): t for n, t in said.items() if n.startswith("hub.")}
    if not case.name.startswith("mcore") and (FOLDER / case.name).exists():  # as its own export has them
        assert got.keys() == hub.keys() and all(torch.equal(got[n], t) for n, t in hub.items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert (model(said["ids"]).logits - said["logits"]).abs().max().item() <= case.logits


def test_the_next_steps_have_the_losses_of_the_other(case: Case, mapped: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder_of(case.name)))
    tree = torch.load(mapped, weights_only=True)
    model.load_state_dict(tree["model"], strict=not model.config.tie_word_embeddings)
    names = dict(model.named_parameters())
    optim = tree["optim"]
    optimizer = map_jobs.restored_optimizer(names, optim)
    assert set(optim["state"]) == set(names)
    losses = []
    for number in (map_jobs.STEPS, map_jobs.STEPS + 1):  # the second depends on the moments
        rows = map_jobs.batch(number, model.config.vocab_size)
        loss = map_jobs.loss_of(model(rows).logits, rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == pytest.approx(expected(case.name)[1]["next"], abs=1e-6, rel=0)


@pytest.mark.slow
def test_the_way_back_is_what_the_other_wrote(case: Case, mapped: Path, tmp_path: Path) -> None:
    ckpttool.convert(mapped, tmp_path / "back", map=case.back, config=str(folder_of(case.name)), to="dcp", world_size=1)
    found = ckpttool.diff(case.path, tmp_path / "back")
    if case.name.startswith("mcore"):  # rows behind the vocabulary were cut
        with ckpttool.open(case.path) as theirs, ckpttool.open(tmp_path / "back") as back:
            cut = list(found.shapes)
            assert {n.split(".")[-2 if n.endswith("weight") else -3] for n in cut} == {
                "word_embeddings",
                "output_layer",
            }
            assert all(theirs[n].shape[0] == 144 and torch.equal(theirs[n].torch()[:131], back[n].torch()) for n in cut)
        found.shapes = {}
    assert found.data == [] and found.shapes == {} and found.dtypes == {} and found.only_in_b == []
    assert found.only_in_a == []
    assert set(found.values) <= {
        "optim.param_groups.0.params",
        "optim.param_groups.1.params",
    }  # w1, w3, w2: in the order of the joined


@pytest.mark.slow
def test_without_a_config_it_says_what_is_missing_and_an_export_beside_it_tells(tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    name = "titan-llama3"
    step = tmp_path / "checkpoint" / "step-3"
    shutil.copytree(FOLDER / name / "ckpt", step)
    with pytest.raises(Unsupported, match=r"needs half = head_dim / 2 .*, of config.json.*map='none' writes the names"):
        ckpttool.convert(step, tmp_path / "hf", to="hf")
    hub = {n.removeprefix("hub."): t for n, t in expected(name)[0].items() if n.startswith("hub.")}
    (tmp_path / "checkpoint" / "step-4").mkdir()
    save_file(hub, tmp_path / "checkpoint" / "step-4" / "model.safetensors")
    done = ckpttool.convert(step, tmp_path / "hf", to="hf")
    assert any("a head has 4 rows: so q and k of a layer become those of ../step-4" in n for n in done.notes)
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(got[n], t) for n, t in hub.items())
    hub["model.layers.0.self_attn.q_proj.weight"] += 1  # of another step
    save_file(hub, tmp_path / "checkpoint" / "step-4" / "model.safetensors")
    with pytest.raises(Unsupported, match="needs half"):
        ckpttool.convert(step, tmp_path / "again", to="hf")


def test_phi_4_of_the_hub_is_refused_since_torchtune_turns_it_by_another_base(tmp_path: Path) -> None:
    config = json.loads((SMALL / "tune-phi3" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 250000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Unsupported, match=r"right for 10000 only, and config.json .* has rope_parameters.rope_theta = 250000"
    ):
        ckpttool.convert(
            SMALL / "tune-phi3" / "epoch_0", tmp_path / "hf", to="hf", map="torchtune-phi3", config=str(tmp_path)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"no_rope_layers": []}, {"no_rope_layers": [1, 1, 1, 0]}, {"use_qk_norm": True}, {"attn_temperature_tuning": True}, {"model_type": "llama4"},
    ],
)  # fmt: skip
def test_llama_4_that_torchtitan_does_not_have_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    case = SMALL / "titan-llama4"
    config = json.loads((case / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(Unsupported, match=f"torchtitan-llama4 is not right for this model: .*{next(iter(changed))}"):
        ckpttool.convert(case / "ckpt", tmp_path / "out.pt", map="torchtitan-llama4", config=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "no_rope_layers": [1, 1, 1, 1]}))
    ckpttool.convert(case / "ckpt", tmp_path / "out.pt", map="torchtitan-llama4", config=str(tmp_path))


@pytest.mark.slow
def test_llama_of_meta_and_back(tmp_path: Path) -> None:
    """The weights as torchtune exports them for Meta's code, which has no package here."""
    said, _ = expected("tune-llama3")
    meta = {n.removeprefix("meta."): t for n, t in said.items() if n.startswith("meta.")}
    hub = {n.removeprefix("hub."): t for n, t in said.items() if n.startswith("hub.")}
    torch.save({**meta, "rope.freqs": torch.ones(2)}, tmp_path / "consolidated.00.pth")
    config = str(FOLDER / "tune-llama3")
    ckpttool.convert(tmp_path / "consolidated.00.pth", tmp_path / "hf", to="hf", map="meta-llama", config=config)
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert got.keys() == hub.keys() and all(torch.equal(got[n], t) for n, t in hub.items())
    ckpttool.convert(tmp_path / "hf", tmp_path / "back.pth", map="meta-llama")
    back = torch.load(tmp_path / "back.pth")["model"]
    assert back.keys() == meta.keys() and all(torch.equal(back[n], t) for n, t in meta.items())


def test_torchtune_s_optimizer_gets_the_names_and_the_order_of_weights_that_have_those_of_the_hub(
    tmp_path: Path,
) -> None:
    """Its checkpointer for the Hub writes weights for transformers and the recipe's own optimizer."""
    case = peers.FIXTURES / "trainers" / "torchtune_hf"
    ckpttool.convert(case / "epoch_0", tmp_path / "step.pt", map="torchtune-llama3")
    got = torch.load(tmp_path / "step.pt", weights_only=True)
    weights = load_file(next(iter((case / "epoch_0").glob("*.safetensors"))))
    assert all(torch.equal(got["model"][n], t) for n, t in weights.items())
    own = torch.load(case / "recipe_state" / "recipe_state.pt", weights_only=False)["optimizer"]["state"]
    mine = got["optim"]["state"]
    assert set(mine) == set(weights)
    q, k = "model.layers.1.self_attn.q_proj.weight", "layers.1.attn.q_proj.weight"
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(mine[q][slot], own[k][slot].view(4, 5, 2, 40).transpose(1, 2).reshape(40, 40))
        assert torch.equal(mine["model.norm.weight"][slot], own["norm.scale"][slot])
    assert mine[q]["step"] == own[k]["step"]
    assert set(got["optim"]["param_groups"][0]["params"]) == set(weights)


@pytest.mark.slow
def test_a_model_of_transformers_goes_into_another_program_without_an_optimizer(case: Case, tmp_path: Path) -> None:
    """From a folder of the Hub, whose names transformers itself translates."""
    ckpttool.convert(case.path, tmp_path / "hf", to="hf", config=str(folder_of(case.name)), map=BY_HAND.get(case.forth))
    ckpttool.convert(tmp_path / "hf", tmp_path / "back.pt", map=case.back)
    got = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    with ckpttool.open(case.path, only=["model"]) as opened:
        assert {f"model.{n}" for n in got} >= set(opened)
        for n in opened:
            mine = got[n.removeprefix("model.")]
            assert torch.equal(mine, opened[n].torch()[: len(mine)])  # rows behind the vocabulary were cut
