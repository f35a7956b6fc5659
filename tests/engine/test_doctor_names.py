"""`doctor` on names and shapes of weights. The judge of every printed command is the plain module, which loads what it writes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from safetensors.torch import load_file, save_file

from ckpttool.engine.doctor.examine import Diagnosis, doctor
from ckpttool.engine.doctor.findings import Finding


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))


def of_kind(found: Diagnosis, kind: str) -> list[Finding]:
    return [f for f in found.findings if f.kind == kind]


def run(line: str) -> None:
    """A command that doctor printed."""
    program, *words = shlex.split(line)
    assert program == "ckpttool"
    done = ckpttool_here(*words)
    assert done.returncode == 0, done.stderr


def trained(prefix: str, named: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    """(the plain module, what a script that wrapped it saves): keys of its own, and `prefix` in names of the model."""
    model = net()
    optimizer = torch.optim.AdamW(list(model.named_parameters()) if named else model.parameters())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    weights = {prefix + n: t for n, t in model.state_dict().items()}
    return model, {"net": 1, "model_state_dict": weights, "optimizer_state_dict": optimizer.state_dict(), "epoch": 4}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_named_and_the_printed_command_removes_them(tmp_path: Path, prefix: str) -> None:
    model, tree = trained(prefix)
    torch.save(tree, tmp_path / "it's.pt")
    found = doctor(tmp_path / "it's.pt")
    assert found.sound
    named = of_kind(found, "wrapper-prefix")
    assert {f.text.partition('"')[2].partition('"')[0] for f in named} == {p + "." for p in prefix.split(".") if p}
    assert named[0].repair is not None and len(named[0].tensors) == 4
    run(named[0].repair)
    copy = torch.load(tmp_path / "it's-plain.pt", weights_only=False)
    model.load_state_dict(copy["model_state_dict"])  # strict
    assert copy.keys() == tree.keys() and copy["epoch"] == 4
    torch.optim.AdamW(model.parameters()).load_state_dict(copy["optimizer_state_dict"])
    assert not of_kind(doctor(tmp_path / "it's-plain.pt"), "wrapper-prefix")


def test_prefixes_in_the_names_of_the_optimizer(tmp_path: Path) -> None:
    """As torch names parameters for an optimizer that was given `named_parameters()` of a compiled module, or FQNs."""
    model, tree = trained("_orig_mod.")
    names = [n for n, _ in model.named_parameters()]
    state = tree["optimizer_state_dict"]
    fqns = {"state": {f"_orig_mod.{names[i]}": s for i, s in state["state"].items()}, "param_groups": [{**state["param_groups"][0], "params": [f"_orig_mod.{n}" for n in names]}]}  # fmt: skip
    listed = {**state, "param_groups": [{**state["param_groups"][0], "param_names": [f"_orig_mod.{n}" for n in names]}]}
    for kind, optimizer in (("fqns", fqns), ("listed", listed)):
        torch.save({**tree, "optimizer_state_dict": optimizer}, tmp_path / f"{kind}.pt")
        (one,) = of_kind(doctor(tmp_path / f"{kind}.pt"), "wrapper-prefix")
        assert one.repair is not None
        run(one.repair)
        copy = torch.load(tmp_path / f"{kind}-plain.pt", weights_only=False)
        model.load_state_dict(copy["model_state_dict"])
        got = copy["optimizer_state_dict"]
        first = got["state"][names[0] if kind == "fqns" else 0]
        assert torch.equal(first["exp_avg"], state["state"][0]["exp_avg"])
        assert got["param_groups"][0]["params"] == (names if kind == "fqns" else [0, 1, 2, 3])
        assert got["param_groups"][0].get("param_names", names) == names


@pytest.mark.filterwarnings("ignore")
def test_prefixes_in_safetensors_and_dcp(tmp_path: Path) -> None:
    model = net()
    weights = {"_orig_mod." + n: t for n, t in model.state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "d")
    for path, copy in (("w.safetensors", "w-plain.safetensors"), ("d", "d-plain")):
        (one,) = of_kind(doctor(tmp_path / path), "wrapper-prefix")
        assert one.repair is not None
        run(one.repair)
        if path == "d":
            dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / copy)
        else:
            model.load_state_dict(load_file(tmp_path / copy))
        assert not doctor(tmp_path / copy).findings


def hub_model(folder: Path, vocab: int = 96, tie: bool = False) -> Any:
    """A small Llama that transformers has saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=tie, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": tie}))
    return model


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.slow
def test_empty_weights_point_at_the_engines_folder_beside_them(tmp_path: Path) -> None:
    """What save_pretrained writes of a ZeRO-3 model, beside the real folder of DeepSpeed."""
    fixture = peers.FIXTURES / "zero3_w2_tied"
    folder = tmp_path / "run 1" / "checkpoint-3"
    shutil.copytree(fixture / "hf_ref", folder)
    assert not doctor(folder).findings
    truth = load_file(folder / "model.safetensors")
    changed(folder, lambda w: {n: torch.zeros(0, dtype=t.dtype) for n, t in w.items()})
    alone = doctor(folder)
    (one,) = of_kind(alone, "empty-weights")
    assert not alone.sound and one.repair is None and len(one.tensors) >= len(truth)
    for place in ("inside", "beside"):
        engine = folder / "global_step3" if place == "inside" else folder.parent / "engine"
        shutil.copytree(fixture / "ckpt" / "global_step3" if place == "inside" else fixture / "ckpt", engine)
        (one,) = of_kind(doctor(folder), "empty-weights")
        assert one.repair is not None and engine.name in one.text
        run(one.repair)
        got = load_file(folder.parent / "checkpoint-3-hf" / "model.safetensors")
        assert got.keys() == truth.keys() and all(torch.equal(got[n].float(), truth[n].float()) for n in truth)
        shutil.rmtree(folder.parent / "checkpoint-3-hf")
        shutil.rmtree(engine)


@pytest.mark.slow
def test_one_empty_weight_is_told_by_the_model_of_the_config(tmp_path: Path) -> None:
    hub_model(tmp_path / "m")
    changed(tmp_path / "m", lambda w: {**w, "model.norm.weight": torch.zeros(0)})
    (one,) = of_kind(doctor(tmp_path / "m"), "empty-weights")
    assert one.tensors == ("model.norm.weight",)


@pytest.mark.slow
def test_weights_that_the_config_ties_and_that_differ(tmp_path: Path) -> None:
    hub_model(tmp_path / "m", tie=True)
    assert not doctor(tmp_path / "m", read_data=True).findings
    changed(tmp_path / "m", lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] + 1})
    assert not doctor(tmp_path / "m").findings  # bytes alone tell
    (one,) = doctor(tmp_path / "m", read_data=True).findings
    assert (one.kind, one.severity) == ("tied-weights", "damage") and one.repair is not None
    assert ckpttool_here("convert", tmp_path / "m", tmp_path / "no", "--to", "hf").returncode == 3
    run(one.repair)
    model, said = peers.from_pretrained(tmp_path / "m-untied")
    truth = load_file(tmp_path / "m" / "model.safetensors")
    assert not said["missing_keys"] and torch.equal(model.lm_head.weight, truth["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, truth["model.embed_tokens.weight"])
    assert not doctor(tmp_path / "m-untied", read_data=True).findings


def test_an_output_layer_that_is_missing(tmp_path: Path) -> None:
    hub_model(tmp_path / "m")
    assert not doctor(tmp_path / "m", read_data=True).findings
    changed(tmp_path / "m", lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"})
    (one,) = doctor(tmp_path / "m").findings
    assert (one.kind, one.severity) == ("tied-weights", "damage") and "random" in one.text
    assert peers.from_pretrained(tmp_path / "m")[1]["missing_keys"] == {"lm_head.weight"}


def test_untied_without_a_config_is_refused(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.pt")
    done = ckpttool_here("convert", tmp_path / "w.pt", tmp_path / "x", "--to", "hf", "--untie")
    assert done.returncode == 3 and "config" in done.stderr
