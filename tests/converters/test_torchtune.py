"""torchtune's epoch folders are one state with the recipe's state in the folder above (fixtures/trainers/torchtune_*, which
torchtune 0.6.1 wrote)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, load_dcp, load_full, same_value
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkpttoolError, Unsafe, Unsupported, UsageError
from ckpttool.storage.overlay import SiblingsSource
from ckpttool.storage.source import Source

HF, LORA = FIXTURES / "trainers" / "torchtune_hf", FIXTURES / "trainers" / "torchtune_lora"


def recipe_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run / "recipe_state" / "recipe_state.pt", weights_only=True)
    return found


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(run / "epoch_0" / "model-00001-of-00001.safetensors")
    return found | {"lm_head.weight": found["model.embed_tokens.weight"]}  # tied by config.json


def epochs(run: Path, numbers: list[int], **state: int) -> Path:
    """A run with these epochs, and a recipe state that counts so."""
    for k in numbers:
        shutil.copytree(HF / "epoch_0", run / f"epoch_{k}")
    (run / "recipe_state").mkdir()
    torch.save(recipe_of(HF) | state, run / "recipe_state" / "recipe_state.pt")
    return run


@pytest.mark.parametrize("to", ["dcp", "full"])
def test_an_epoch_is_its_weights_and_the_recipe_s_state_bit_for_bit(to: str, tmp_path: Path) -> None:
    done = ckpttool.convert(HF / "epoch_0", tmp_path / "out", to=to, world_size=3 if to == "dcp" else None)
    assert done.verified and not done.dropped
    tree = (load_dcp if to == "dcp" else load_full)(tmp_path / "out")
    recipe = recipe_of(HF)
    assert same_value(tree["model"], weights_of(HF))
    assert same_value(tree["extra"].pop("recipe_state"), {"optimizer": recipe["optimizer"]})
    assert tree["extra"] == {k: recipe[k] for k in ("seed", "max_steps_per_epoch")}
    assert tree["trainer"] == {k: recipe[k] for k in ("epochs_run", "total_epochs")}
    assert "optim" not in tree


def test_a_file_of_weights_in_the_place_of_the_recipe_s_state_adds_none_to_the_model(tmp_path: Path) -> None:
    shutil.copytree(LORA, tmp_path / "run")
    shutil.copy(LORA / "epoch_0" / "adapter_model.pt", tmp_path / "run" / "recipe_state" / "recipe_state.pt")
    with pytest.raises(CkpttoolError, match="looks like a weight"):
        ckpttool.convert(tmp_path / "run" / "epoch_0", tmp_path / "out.pt", to="full")
    ckpttool.convert(tmp_path / "run" / "epoch_0", tmp_path / "out.pt", to="full", drop=True)
    assert load_full(tmp_path / "out.pt")["model"].keys() == weights_of(LORA).keys()


def test_the_adapter_of_a_lora_recipe_is_carried_beside_the_weights(tmp_path: Path) -> None:
    done = ckpttool.convert(LORA / "epoch_0", tmp_path / "out.pt", to="full")
    assert not done.dropped
    tree = load_full(tmp_path / "out.pt")
    assert same_value(tree["model"], weights_of(LORA))
    assert same_value(tree["extra"]["adapter"], load_file(LORA / "epoch_0" / "adapter_model.safetensors"))
    assert tree["extra"]["adapter_config"] == json.loads((LORA / "epoch_0" / "adapter_config.json").read_text())
    assert same_value(tree["extra"]["recipe_state"]["optimizer"], recipe_of(LORA)["optimizer"])
    with ckpttool.open(LORA / "epoch_0") as opened:  # the adapter again, under torchtune's names
        assert [(r.name, r.component) for r in opened.checkpoint.unread] == [("adapter_model.pt", "")]


def test_adapter_weights_alone_are_the_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(LORA, run)
    for name in ("model-00001-of-00001.safetensors", "model.safetensors.index.json"):
        (run / "epoch_0" / name).unlink()
    with ckpttool.open(run / "epoch_0") as opened:
        model = {n.removeprefix("model.") for n in opened.checkpoint.tensors if n.startswith("model.")}
    assert model == set(load_file(run / "epoch_0" / "adapter_model.safetensors"))


def test_where_the_weights_have_torchtune_s_names_the_optimizer_is_that_of_the_model(tmp_path: Path) -> None:
    recipe = recipe_of(HF)
    weights = {n: torch.randn_like(slots["exp_avg"]) for n, slots in recipe["optimizer"]["state"].items()}
    (tmp_path / "epoch_0").mkdir()
    torch.save(weights, tmp_path / "epoch_0" / "model-00001-of-00001.bin")
    shutil.copytree(HF / "recipe_state", tmp_path / "recipe_state")
    ckpttool.convert(tmp_path / "epoch_0", tmp_path / "out", to="dcp", world_size=2)
    tree = load_dcp(tmp_path / "out")
    assert same_value(tree["model"], weights) and same_value(tree["optim"], recipe["optimizer"])
    ckpttool.convert(tmp_path / "epoch_0", tmp_path / "zero", to="zero3", world_size=2, drop=True)
    with ckpttool.open(tmp_path / "zero") as opened:
        assert len([n for n in opened.checkpoint.tensors if n.endswith(".exp_avg")]) == 20


@pytest.mark.parametrize("to", ["zero3", "universal", "fsdp1", "trainer", "lightning", "torchtitan"])
def test_an_engine_that_needs_the_moments_by_name_is_refused(to: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {} if to == "universal" else {"world_size": 2}
    how |= {"wrap": ["model.layers.*"]} if to == "fsdp1" else {}
    with pytest.raises(Unsupported, match=r"needs the optimizer under the names of the weights, and 60 of its tensors"):
        ckpttool.convert(HF / "epoch_0", tmp_path / "out", to=to, **how)
    ckpttool.convert(HF / "epoch_0", tmp_path / "out", to=to, only=["model"], **how)
    if to == "zero3":  # also by way of a layout that carries all
        ckpttool.convert(HF / "epoch_0", tmp_path / "dcp", to="dcp", world_size=2)
        with pytest.raises(Unsupported, match="60 of its tensors"):
            ckpttool.convert(tmp_path / "dcp", tmp_path / "again", to=to, **how)


def test_the_recipe_s_state_belongs_to_the_epoch_that_it_counts(tmp_path: Path) -> None:
    """The last epoch of a run that has ended writes no state: that of the one before is still there."""
    run = epochs(tmp_path / "ended", [0, 1], epochs_run=1, total_epochs=2)
    with ckpttool.open(run / "epoch_0") as opened:
        assert any(n.startswith("extra.recipe_state.optimizer") for n in opened.checkpoint.tensors)
    with ckpttool.open(run / "epoch_1") as opened:
        assert not any(n.startswith("extra.") for n in opened.checkpoint.tensors)
        assert any("recipe_state.pt is that of epoch_0: it was not read" in n for n in opened.checkpoint.notes)
        assert opened.checkpoint.unread == []
    run = epochs(tmp_path / "kept_last", [1], epochs_run=1, total_epochs=2)
    with ckpttool.open(run / "epoch_1") as opened:
        assert not any(n.startswith("extra.") for n in opened.checkpoint.tensors)
    run = epochs(tmp_path / "goes_on", [0, 1], epochs_run=2, total_epochs=5)
    with ckpttool.open(run / "epoch_1") as opened, ckpttool.open(run / "epoch_0") as first:
        assert any(n.startswith("extra.recipe_state.optimizer") for n in opened.checkpoint.tensors)
        assert any("is that of epoch_1" in n for n in first.checkpoint.notes)


def test_weights_alone_and_hf_do_without_the_recipe(tmp_path: Path) -> None:
    with ckpttool.open(HF / "epoch_0", only=["model"]) as opened:
        assert {opened.checkpoint.component(n) for n in opened.checkpoint.tensors} == {"model"}
    done = ckpttool.convert(HF / "epoch_0", tmp_path / "out", to="hf")
    theirs = load_file(HF / "epoch_0" / "model-00001-of-00001.safetensors")
    assert same_value(load_file(tmp_path / "out" / "model.safetensors"), theirs)
    assert any(name.startswith("extra.recipe_state") for name, _, _ in done.dropped)
    with pytest.raises(UsageError, match="holds extra, model, trainer"):
        ckpttool.open(HF / "epoch_0", only=["optim"])


def test_an_epoch_without_the_recipe_s_state_is_hf(tmp_path: Path) -> None:
    shutil.copytree(HF / "epoch_0", tmp_path / "epoch_0")
    with ckpttool.open(tmp_path / "epoch_0") as opened:
        assert opened.checkpoint.layout == "hf"
    shutil.copytree(HF / "recipe_state", tmp_path / "elsewhere" / "recipe_state")
    shutil.copytree(HF / "epoch_0", tmp_path / "elsewhere" / "weights")
    with ckpttool.open(tmp_path / "elsewhere" / "weights") as opened:
        assert opened.checkpoint.layout == "hf"


def test_inspect_says_whose_it_is_and_a_run_is_listed() -> None:
    found = json.loads(ckpttool_here("inspect", HF / "epoch_0", "--json").stdout)
    assert (found["layout"], found["trainer"]) == ("torchtune", "torchtune")
    assert "resumes in torchtune" in found["next"]
    (missing,) = found["missing"]
    assert "its 60 tensors are carried as data" in missing
    done = ckpttool_here("inspect", HF)
    assert done.returncode == 0 and "epoch_0  torchtune" in done.stdout


def test_only_the_siblings_that_were_named_are_there(tmp_path: Path) -> None:
    for name in ("in/a", "data.pt", "other.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    with SiblingsSource(Source(tmp_path / "in"), ["data.pt"]) as source:
        assert source.read("../data.pt", 0, 7) == b"data.pt" and source.read("a", 0, 4) == b"in/a"
        assert source.list() == ["a"] and set(source.identities()) == {"../data.pt", "a"}
        for name in ("../other.pt", "../../data.pt", "../data.pt/../other.pt", "a/../../data.pt"):
            with pytest.raises((Unsafe, ckpttool.errors.Corrupt)):
                source.read(name, 0, 1)
        (tmp_path / "data.pt").write_bytes(b"changed")
        with pytest.raises(ckpttool.errors.SourceChanged):
            source.assert_unchanged()


def test_an_index_cannot_name_other_files_of_the_folder_above(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(HF, run)
    shutil.copy(run / "epoch_0" / "model-00001-of-00001.safetensors", run / "recipe_state" / "x.safetensors")
    index = run / "epoch_0" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00001.safetensors", "../recipe_state/x.safetensors"))
    with pytest.raises(ckpttool.errors.CkpttoolError, match=r"recipe_state/x\.safetensors") as refused:
        ckpttool.open(run / "epoch_0")
    assert isinstance(refused.value, (Unsafe, ckpttool.errors.Corrupt))
    (run / "recipe_state" / "recipe_state.pt").unlink()
    shutil.copytree(HF / "epoch_0", run / "epoch_0", dirs_exist_ok=True)
    outside = tmp_path / "outside.pt"
    shutil.copy(HF / "recipe_state" / "recipe_state.pt", outside)
    (run / "recipe_state" / "recipe_state.pt").symlink_to(outside)
    with pytest.raises(Unsupported, match="outside the checkpoint's folder"):
        ckpttool.convert(run / "epoch_0", tmp_path / "out", to="dcp", world_size=2)


def test_what_is_left_of_a_cut_off_epoch_has_the_recipe_s_state(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(HF, run)
    file = run / "epoch_0" / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:90_000])
    done = ckpttool_here("convert", run / "epoch_0", tmp_path / "out", "--to", "dcp", "-n", "2", "--salvage")
    assert done.returncode == 0, done.stderr
    tree = load_dcp(tmp_path / "out")
    assert 0 < len(tree["model"]) < 21
    assert same_value(tree["extra"]["recipe_state"]["optimizer"], recipe_of(HF)["optimizer"])


@pytest.mark.parametrize("which", ["torchtune", "verl"])
def test_what_is_beside_the_folder_is_read_from_an_object_store_too(which: str, tmp_path: Path) -> None:
    import fsspec

    here = tmp_path / "run"
    if which == "torchtune":
        shutil.copytree(HF, here)
        path = "epoch_0"
    else:
        shutil.copytree(FIXTURES / "trainers" / "verl_fsdp2_w3" / "ckpt", here / "global_step_3" / "actor")
        torch.save({"_num_yielded": 3}, here / "global_step_3" / "data.pt")
        path = "global_step_3/actor"
    store, name = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    store.put(str(here), name, recursive=True)
    try:
        with ckpttool.open(f"memory:/{name}/{path}") as there, ckpttool.open(here / path) as local:
            assert there.checkpoint.layout == which and there.checkpoint.unread == local.checkpoint.unread == []
            assert there.checkpoint.tensors.keys() == local.checkpoint.tensors.keys()
            assert any(n.startswith("../") for n in there.checkpoint.files)
        one, two = (ckpttool.digest(p) for p in (f"memory:/{name}/{path}", here / path))
        assert one == two
    finally:
        store.rm(name, recursive=True)
