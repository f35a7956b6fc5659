"""--to hf with a config: weights that its model would not load are refused, by name, with what to do."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, difference, from_pretrained, load_hf
from torch import Tensor

import ckpttool
from ckpttool.errors import Corrupt, Unsupported, UsageError
from ckpttool.huggingface import hub_names

LLAMA = FIXTURES / "hf_llama" / "ckpt"
MOE = FIXTURES / "hf_moe" / "ckpt"


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """transformers is asked in this process, which has imported it already; gives the questions."""
    asked: list[bytes] = []

    def here(function: str, argument: str, work_bytes: int, text: bytes) -> bytes:
        asked.append(text)
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "contiguous", torch.Tensor.contiguous)  # which `_answer` replaces
            m.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
            try:
                return hub_names._compute_relation(argument)
            except Exception as e:
                raise Corrupt(f"{type(e).__name__}: {e}") from None

    monkeypatch.setattr(hub_names, "run_in_child", here)
    hub_names._ask_child.cache_clear()
    yield asked
    hub_names._ask_child.cache_clear()


def saved(tmp_path: Path, tree: dict[str, Any]) -> Path:
    path = tmp_path / "state.pt"
    torch.save(tree, path)
    return path


def config(tmp_path: Path, of: Path, **changed: Any) -> str:
    folder = tmp_path / "config"
    folder.mkdir()
    said = json.loads((of / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None}))
    return str(folder)


def in_memory(folder: Path) -> dict[str, Tensor]:
    """The state dict of the model in a folder."""
    return dict(from_pretrained(folder)[0].state_dict())


def assert_loads(folder: Path, wanted: dict[str, Tensor]) -> None:
    model, said = from_pretrained(folder)
    assert not any(said[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), said
    assert difference(dict(model.state_dict()), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("of", [LLAMA, MOE], ids=["names as in memory", "fused in memory, many on the Hub"])
def test_a_prefix_of_all_weights_is_left_out(of: Path, tmp_path: Path) -> None:
    """As in a state of Lightning whose module keeps the model in `self.net`."""
    state = in_memory(of)
    source = saved(tmp_path, {"state_dict": {f"net.{k}": t for k, t in state.items()}, "epoch": 1})
    for prefix in (None, "net", "net."):
        out = tmp_path / f"{prefix}".replace(".", "_")
        options = ckpttool.HfOptions(strip_prefix=prefix)
        done = ckpttool.convert(source, out, to="hf", config=str(of), options=options)
        assert_loads(out, state)
        assert difference(load_hf(out), load_hf(of)) == []
        assert any('"net." was left out of the names of all weights' in n for n in done.notes) == (prefix is None)
    wrong = {f"net.{k}": t for k, t in state.items()} | {"loss.weight": torch.ones(2)}
    with pytest.raises(Unsupported, match="weights are not its own, first") as e:
        ckpttool.convert(saved(tmp_path, wrong), tmp_path / "out", to="hf", config=str(of))
    assert f"{len(state)} of its {len(state)} tensors are missing" in str(e.value) and not (tmp_path / "out").exists()


def test_a_prefix_of_some_weights_is_offered(tmp_path: Path) -> None:
    state = in_memory(LLAMA)
    some = {(f"net.{k}" if "layers" in k else k): t for k, t in state.items()}
    with pytest.raises(Unsupported, match=r"without the prefix \"net\.\": add HfOptions\(strip_prefix='net'\)\."):
        ckpttool.convert(saved(tmp_path, some), tmp_path / "out", to="hf", config=str(LLAMA))
    options = ckpttool.HfOptions(strip_prefix="net")
    ckpttool.convert(saved(tmp_path, some), tmp_path / "out", to="hf", config=str(LLAMA), options=options)
    assert_loads(tmp_path / "out", state)


def test_a_prefix_goes_from_the_optimizer_too(tmp_path: Path) -> None:
    state = in_memory(LLAMA)
    optim = {
        "state": {f"net.{k}": {"exp_avg": torch.ones_like(t)} for k, t in state.items()},
        "param_groups": [{"lr": 1.0, "params": [f"net.{k}" for k in state]}],
    }
    source = saved(tmp_path, {"model": {f"net.{k}": t for k, t in state.items()}, "optim": optim})
    ckpttool.convert(
        source,
        tmp_path / "out",
        to="hf",
        config=str(LLAMA),
        options=ckpttool.HfOptions(strip_prefix="net", include_optimizer=True),
    )
    with ckpttool.open(tmp_path / "out") as opened:
        ckpt = opened.locate()
        assert {f"optim.state.{k}.exp_avg" for k in state} <= set(ckpt.tensors)
        assert ckpt.value("optim.param_groups.0.params") == list(state)


def test_a_prefix_that_no_weight_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no weight has a name that begins so, first of all is"):
        ckpttool.convert(LLAMA, tmp_path / "out", to="hf", options=ckpttool.HfOptions(strip_prefix="nett"))
    with pytest.raises(UsageError, match="does not apply to dcp"):
        ckpttool.convert(
            LLAMA, tmp_path / "out", to="dcp", world_size=2, options=ckpttool.HfOptions(strip_prefix="model")
        )


@pytest.mark.slow
def test_names_of_another_architecture_are_refused(tmp_path: Path) -> None:
    titan = {
        "tok_embeddings.weight": torch.ones(131, 36),
        "layers.0.attention.sinks": torch.ones(40, 36),
    }  # no map has that
    tree = {**titan, "optimizer": {"state.norm.weight.step": torch.tensor(3.0)}, "train_state": {"step": 3}}
    with pytest.raises(Unsupported, match="torchtitan's own names"):
        ckpttool.convert(saved(tmp_path, tree), tmp_path / "out", to="hf", config=str(LLAMA))
    tree["layers.0.attention.wq.weight"] = tree.pop("layers.0.attention.sinks")
    with pytest.raises(Unsupported, match=r'are missing, first "lm_head.weight"'):  # a map has all of these names
        ckpttool.convert(saved(tmp_path, tree), tmp_path / "out", to="hf", config=str(LLAMA))
    with pytest.raises(Unsupported, match=r"are missing, first .* Give the config of this very model"):
        ckpttool.convert(LLAMA, tmp_path / "out", to="hf", config=str(MOE))
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_is_refused_and_its_option_named(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(Unsupported, match=r"ckpttool adapter extract .*HfOptions\(adapter=True\)"):
        ckpttool.convert(
            saved(tmp_path, {"model": {name: torch.ones(4, 36)}}), tmp_path / "out", to="hf", config=str(LLAMA)
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 40}, r"have other shapes, first \"[a-z_.0-9]+\" is \[.*\], the model has \[.*\]"),
        ({"num_hidden_layers": 3}, r"of its \d+ tensors are missing, first \"model.layers.2"),
        ({"num_hidden_layers": 1}, r"weights are not its own, first \"model.layers.1"),
        ({"vocab_size": 144}, r"have other shapes, first \"lm_head.weight\" is \[131"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"LlamaForSequenceClassification.* first \"score.weight\"",
        ),
    ],
    ids=["wider", "deeper", "shallower", "padded vocabulary", "another head"],
)
def test_the_config_of_another_model_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = config(tmp_path, LLAMA, **changed)
    with pytest.raises(Unsupported, match=said):
        ckpttool.convert(LLAMA, tmp_path / "out", to="hf", config=given)
    done = ckpttool.convert(
        LLAMA, tmp_path / "out", to="hf", config=given, options=ckpttool.HfOptions(allow_name_mismatch=True)
    )
    assert any(n.startswith("config.json describes a") for n in done.notes)
    assert difference(load_hf(tmp_path / "out"), load_hf(LLAMA)) == []


def test_a_value_head_of_ones_own_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    state = {**in_memory(LLAMA), "v_head.summary.weight": torch.ones(1, 36)}
    source = saved(tmp_path, {"model": state})
    with pytest.raises(Unsupported, match=r'1 of the [0-9]+ weights are not its own, first "v_head.summary.weight"'):
        ckpttool.convert(source, tmp_path / "out", to="hf", config=str(LLAMA))
    ckpttool.convert(
        source, tmp_path / "out", to="hf", config=str(LLAMA), options=ckpttool.HfOptions(allow_name_mismatch=True)
    )
    assert difference(load_hf(tmp_path / "out"), state) == []


def test_a_tied_head_may_be_absent(tmp_path: Path) -> None:
    of = FIXTURES / "hf_tied" / "ckpt"
    state = in_memory(of)
    without = {k: t for k, t in state.items() if k != "lm_head.weight"}
    ckpttool.convert(saved(tmp_path, {"model": without}), tmp_path / "out", to="hf", config=str(of))
    assert_loads(tmp_path / "out", state)
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


def test_transformers_is_started_once_and_not_at_all_for_a_known_architecture_without_config(
    tmp_path: Path, asked_here: list[bytes]
) -> None:
    ckpttool.convert(LLAMA, tmp_path / "dcp", to="dcp", world_size=3)
    ckpttool.convert(LLAMA, tmp_path / "own", to="hf")
    assert asked_here == []
    ckpttool.convert(tmp_path / "dcp", tmp_path / "given", to="hf", config=str(LLAMA))
    assert len(asked_here) == 1


def test_a_config_that_transformers_does_not_know_is_no_reason_to_stop(tmp_path: Path) -> None:
    given = config(tmp_path, LLAMA, model_type="of_our_own" + "x" * 20_000, architectures=["OfOurOwn"])
    done = ckpttool.convert(LLAMA, tmp_path / "out", to="hf", config=given)
    said = next(n for n in done.notes if "not compared with those of the model" in n)
    assert said.endswith("does not know this model_type") and "'of_our_ownxx" in said and len(said) < 400


def test_a_model_type_that_is_no_text_is_no_model_of_ours() -> None:
    assert hub_names.find_contradiction({"model_type": ["llama"]}, {"w": (2,)}) is None


def own_model(folder: Path) -> Path:
    """Weights of nobody's model, in a folder of their own, with a config.json of a Llama above it."""
    (folder / "run").mkdir()
    torch.save(
        {"emb.weight": torch.ones(3, 2), "layers.0.w": torch.ones(2), "head.weight": torch.ones(3, 2)},
        folder / "run" / "own.pt",
    )
    shutil.copy(LLAMA / "config.json", folder)
    return folder / "run" / "own.pt"


def test_a_config_that_lies_beside_weights_of_another_model_is_refused_as_if_it_was_given(tmp_path: Path) -> None:
    src = own_model(tmp_path)
    shutil.copy(LLAMA / "config.json", src.parent)
    for config in (None, str(src.parent)):
        with pytest.raises(Unsupported, match=r"describes a LlamaForCausalLM.* 21 of its 21 tensors are missing"):
            ckpttool.convert(src, tmp_path / "out", to="hf", config=config)
    with pytest.raises(Unsupported, match="was found beside the source: give"):
        ckpttool.convert(src, tmp_path / "out.safetensors")
    assert not (tmp_path / "out").exists()


def test_a_config_above_weights_of_another_model_is_left_there_and_said(tmp_path: Path) -> None:
    done = ckpttool.convert(own_model(tmp_path), tmp_path / "out", to="hf")
    assert any(
        n.startswith("config.json in '..' is of another model and was not taken: 21 of its 21") for n in done.notes
    )
    assert not (tmp_path / "out" / "config.json").exists() and not any("taken from" in n for n in done.notes)
    told = ckpttool_here("inspect", str(tmp_path / "out")).stdout
    assert "from_pretrained needs a config.json beside it" in " ".join(told.split())
    shutil.copy(LLAMA / "model.safetensors", tmp_path / "run" / "llama.safetensors")
    done = ckpttool.convert(tmp_path / "run" / "llama.safetensors", tmp_path / "fits", to="hf")
    assert (
        any("taken from '..', from the source" in n for n in done.notes)
        and (tmp_path / "fits" / "config.json").exists()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [({"num_hidden_layers": 3}, "have 2 layers, and the model has 3"), ({"hidden_size": 48}, "and a token of the model has 48 numbers"),
     ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "no weight has the name of its embedding")],
)  # fmt: skip
def test_inspect_does_not_promise_that_weights_are_loaded_which_are_not_of_the_config(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(LLAMA, tmp_path / "hf")
    kept = json.loads((folder / "config.json").read_text())
    assert "from_pretrained reads it" in ckpttool_here("inspect", str(folder)).stdout
    (folder / "config.json").write_text(json.dumps({**kept, **change}))
    told = " ".join(ckpttool_here("inspect", str(folder)).stdout.split())
    assert said in told and "from_pretrained reads it" not in told and "random numbers" in told
    with pytest.raises(Unsupported, match=r"of another model|describes a"):
        ckpttool.convert(folder, tmp_path / "out", to="hf")


def test_a_config_of_more_layers_than_weights_is_not_built(tmp_path: Path) -> None:
    """transformers would build them all: 20 s of CPU for 200,000."""
    config = json.loads((FIXTURES / "hf_moe" / "ckpt" / "config.json").read_text()) | {"num_hidden_layers": 200_000}
    with pytest.raises(Unsupported, match=r"describes 200,000 layers for 1 weights; it is that of another model"):
        hub_names.relate_to_hub(config, {"w": (1,)})
    shutil.copytree(FIXTURES / "hf_moe" / "ckpt", tmp_path / "ck")
    (tmp_path / "ck" / "config.json").write_text(json.dumps(config))
    ckpttool.verify(tmp_path / "ck")
