"""Directories of real trainers (fixtures/trainers, which Accelerate and transformers' Trainer wrote) are one whole state."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from commands import ckpttool_here
from peers import FIXTURES, difference, load_dcp, load_full, same_value, tensors_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import _nested_dict, _traverse
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import ckpttool
from ckpttool.errors import Corrupt, MissingPackage, Unsafe, Unsupported, UsageError
from ckpttool.huggingface import model_names
from ckpttool.index.optimizer_names import iterate_possible_orders
from ckpttool.layouts import list_resuming_programs

TRAINERS = FIXTURES / "trainers"
CASES = sorted(p.parent.name for p in TRAINERS.glob("*/case.json"))
RANKS = 2
#: What Accelerate calls the parts of an RNG state that Trainer has too.
ACCELERATES = {"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "cpu"}


def folder(case: str) -> Path:
    """What a user has: checkpoint-3 of Trainer, the folder given to `save_state` of Accelerate."""
    ckpt = TRAINERS / case / "ckpt"
    return ckpt / "checkpoint-3" if case.startswith("trainer_") else ckpt


def config(case: str, tmp_path: Path) -> dict[str, Any]:
    """What has to be given besides: the model's config, where flat parameters need it."""
    if case != "accelerate_fsdp1_local":
        return {}
    said = json.loads((TRAINERS / case / "case.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said["model"]["config"]))
    return {"config": str(tmp_path)}


def truth(case: str) -> dict[str, torch.Tensor]:
    """The live job's tensors; of an adapter those that PEFT saves, under the names it saves them by."""
    found = load_file(TRAINERS / case / "truth.safetensors")
    if "lora" in case:
        found = {k.replace(".default.", "."): t for k, t in found.items() if "lora_" in k}
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_directory_is_its_model_and_its_optimizer_bit_for_bit(case: str, tmp_path: Path) -> None:
    how = config(case, tmp_path)
    for to, load in (("dcp", load_dcp), ("full", load_full)):
        out = tmp_path / f"out_{to}"
        done = ckpttool.convert(folder(case), out, to=to, world_size=3 if to == "dcp" else None, **how)
        assert done.verified and not done.dropped
        found = {k: t for k, t in tensors_of(load(out)).items() if k.startswith(("model.", "optim."))}
        assert difference(found, truth(case)) == []


@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_the_state_is_carried_as_data(case: str, tmp_path: Path) -> None:
    how = config(case, tmp_path)
    ckpttool.convert(folder(case), tmp_path / "out", to="dcp", world_size=3, **how)
    tree = load_dcp(tmp_path / "out")
    scheduler, rng = (
        ("scheduler.pt", "rng_state_{}.pth")
        if case.startswith("trainer_")
        else ("scheduler.bin", "random_states_{}.pkl")
    )
    assert same_value(tree["scheduler"], torch.load(folder(case) / scheduler, weights_only=False))
    ranks = [r for r in range(RANKS) if (folder(case) / rng.format(r)).exists()]
    assert sorted(tree["rng"]) == [str(r) for r in ranks] and (len(ranks) == RANKS or "deepspeed" in case)
    for rank in ranks:
        original = torch.load(folder(case) / rng.format(rank), weights_only=False)
        renamed = {ACCELERATES.get(key, key): x for key, x in original.items()}
        assert same_value(plain(tree["rng"][str(rank)]), plain(renamed))
    if case.startswith("trainer_"):
        assert tree["trainer"] == json.loads((folder(case) / "trainer_state.json").read_text())
    with ckpttool.open(folder(case), **how) as opened:
        assert opened.checkpoint.world_size == RANKS
        assert opened.checkpoint.trainer == ("Hugging Face Trainer" if case.startswith("trainer_") else "Accelerate")
        assert {r.component for r in opened.checkpoint.unread} <= {""}, "arguments, weights in another form"


def plain(x: Any) -> Any:
    """numpy arrays as lists."""
    if hasattr(x, "tolist") and not isinstance(x, torch.Tensor):
        return x.tolist()
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    return type(x)(map(plain, x)) if isinstance(x, (list, tuple)) else x


def test_numpy_arrays_are_tensors_where_torch_refuses_numpy(tmp_path: Path) -> None:
    done = ckpttool.convert(folder("trainer_ddp"), tmp_path / "out.pt", to="full")
    (note,) = [n for n in done.notes if "numpy" in n]
    assert "numpy arrays and scalars in 2 values, first rng.0.numpy" in note
    found = torch.load(tmp_path / "out.pt", weights_only=True)["rng"]["1"]["numpy"]
    original = torch.load(folder("trainer_ddp") / "rng_state_1.pth", weights_only=False)["numpy"]
    assert found[1].dtype == torch.uint32 and found[1].tolist() == original[1].tolist()
    assert (found[0], *found[2:]) == (original[0], *original[2:])


# ---------------------------------------------------------------------------------------------------- with DeepSpeed

DEEPSPEED = TRAINERS / "accelerate_deepspeed_z3" / "ckpt"


def trainer_with_deepspeed(path: Path) -> Path:
    """What Trainer writes with DeepSpeed: a save of the engine beside the trainer's own files."""
    shutil.copytree(DEEPSPEED / "pytorch_model", path / "global_step3")
    (path / "latest").write_text("global_step3")
    shutil.copy(DEEPSPEED / "scheduler.bin", path / "scheduler.pt")
    for name in ("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"):
        shutil.copy(folder("trainer_fsdp2_full") / name, path / name)
    return path


def test_trainer_with_deepspeed_is_one_state(tmp_path: Path) -> None:
    source = trainer_with_deepspeed(tmp_path / "checkpoint-3")
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3)
    assert not done.dropped and any("DeepSpeed, zero3" in n for n in done.notes)
    tree = load_dcp(tmp_path / "out")
    wanted = truth("accelerate_deepspeed_z3")
    assert difference({k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}, wanted) == []
    engine = {"global_steps": 3, "global_samples": 36, "skipped_steps": 0}
    assert tree["trainer"] == engine | json.loads((source / "trainer_state.json").read_text())
    assert same_value(tree["scheduler"], torch.load(source / "scheduler.pt", weights_only=False))
    assert set(tree["rng"]) == {"0", "1"}
    with ckpttool.open(source) as opened:
        ckpt = opened.checkpoint
        assert (ckpt.layout, ckpt.trainer, ckpt.world_size, ckpt.unread) == ("trainer", "Hugging Face Trainer", 2, [])
    with ckpttool.open(source / "latest") as opened:  # the save alone
        assert opened.checkpoint.layout == "zero3"


def test_the_scheduler_that_the_engine_steps_is_read_once(tmp_path: Path) -> None:
    source = trainer_with_deepspeed(tmp_path / "checkpoint-3")
    for file in (source / "global_step3").glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        torch.save(state | {"lr_scheduler": {"last_batch_iteration": 2}}, file)
    with ckpttool.open(source) as opened:
        found = {n: v.data for n, v in opened.checkpoint.values.items() if n.startswith("scheduler.")}
        assert found == {"scheduler.last_batch_iteration": 2}
        assert [(r.name, r.component) for r in opened.checkpoint.unread] == [("scheduler.pt", "")]


def test_only_the_weights_of_a_save_of_deepspeed(tmp_path: Path) -> None:
    source = trainer_with_deepspeed(tmp_path / "checkpoint-3")
    with ckpttool.open(source, only=["model"], tag="global_step3") as opened:
        assert len(opened.checkpoint.tensors) == 21 and not opened.checkpoint.values
    with pytest.raises(Corrupt, match="global_step4"):
        ckpttool.open(source, tag="global_step4")


def test_several_engines_of_accelerate_are_told_apart_by_number(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(DEEPSPEED, source)
    shutil.copytree(source / "pytorch_model", source / "pytorch_model_1")
    (source / "latest").write_text("pytorch_model_1")
    with ckpttool.open(source) as opened:
        names = list(opened.checkpoint.tensors)
        for number in ("0", "1"):
            assert sum(n.startswith(f"model.{number}.") for n in names) == 21
            assert sum(n.startswith(f"optim.{number}.state.") for n in names) == 63
        assert not opened.checkpoint.unread
    with pytest.raises(UsageError, match=r"one of several saves.*pytorch_model_1 for one of them"):
        ckpttool.open(source, tag="pytorch_model_1")


# -------------------------------------------------------------------------------------------------- numbers and names


def test_numbers_need_the_order_of_the_module_and_not_that_of_the_file(tmp_path: Path) -> None:
    """model.safetensors is sorted by name; the ids of optimizer.pt follow the module, decayed weights first."""
    alone = tmp_path / "checkpoint-3"
    shutil.copytree(folder("trainer_ddp"), alone)
    (alone / "config.json").rename(tmp_path / "config.json")
    said = r"numbers its 21 parameters.*nothing here shows.*config"
    with ckpttool.open(alone) as opened:  # kept as it is, where nobody asks for names
        assert {opened.checkpoint.component(n) for n in opened} >= {"model", "extra"}
        assert any(re.search(said, n) for n in opened.checkpoint.notes)
    for to in ("dcp", "zero3", "universal", "trainer"):
        with pytest.raises(Unsupported, match=said):
            ckpttool.convert(alone, tmp_path / "out", to=to, world_size=None if to == "universal" else 2)
    with pytest.raises(Unsupported, match=said):
        ckpttool.open(alone, only=["model", "optim"])
    with ckpttool.open(alone, only=["model"]) as opened:
        assert len(opened.checkpoint.tensors) == 21
    with ckpttool.open(alone, config=str(tmp_path)) as opened, ckpttool.open(folder("trainer_ddp")) as whole:
        assert opened.checkpoint.tensors.keys() == whole.checkpoint.tensors.keys()
    with ckpttool.open(alone, like=folder("trainer_fsdp2_full")) as opened:
        assert opened.checkpoint.tensors.keys() == whole.checkpoint.tensors.keys()
    with ckpttool.open(alone, like=alone / "model.safetensors") as opened:  # the alphabet again
        assert any("nothing here shows the order" in n for n in opened.checkpoint.notes)


def test_a_config_that_does_not_help_stops_only_who_needs_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers is not installed, or does not know the model."""

    def missing(*_: Any) -> Any:
        raise MissingPackage("needs transformers, which is not installed: pip install 'ckpttool[hf]'")

    monkeypatch.setattr(model_names, "sort_by_module_order", missing)
    case = folder("trainer_ddp")
    said = ckpttool.inspect(case)
    assert said.components["model"]["tensors"] == 21 and any("pip install" in n for n in said.notes)
    assert "without FSDP" in said.next, "its own trainer resumes from it all the same"
    with pytest.raises(Unsupported, match="nothing here shows the order"):
        ckpttool.convert(case, tmp_path / "out", to="dcp", world_size=2)
    with pytest.raises(MissingPackage):
        ckpttool.open(case, config=str(case))


def test_an_adapter_s_numbers_are_named_where_shapes_leave_one_order(tmp_path: Path) -> None:
    case = FIXTURES / "trainer_ddp_lora_w2" / "ckpt" / "checkpoint-3"
    ckpttool.convert(case, tmp_path / "out", to="dcp", world_size=2)
    state = load_dcp(tmp_path / "out")["optim"]["state"]
    model = load_dcp(tmp_path / "out")["model"]
    assert state.keys() == model.keys() and len(state) == 8
    for name, slots in state.items():
        assert slots["exp_avg"].shape == model[name].shape
    # q_proj and v_proj of shapes that do not differ leave two orders
    twin = tmp_path / "checkpoint-3"
    shutil.copytree(case, twin)
    weights = load_file(twin / "adapter_model.safetensors")
    save_file(
        {k: t[:4].contiguous() if "lora_B" in k else t for k, t in weights.items()}, twin / "adapter_model.safetensors"
    )
    optimizer = torch.load(twin / "optimizer.pt", weights_only=True)
    for slots in optimizer["state"].values():
        for slot in ("exp_avg", "exp_avg_sq"):
            if slots[slot].shape[1] == 4:
                slots[slot] = slots[slot][:4].clone()
    torch.save(optimizer, twin / "optimizer.pt")
    with pytest.raises(Unsupported, match="more than one order"):
        ckpttool.convert(twin, tmp_path / "twin", to="dcp", world_size=2)


def test_possible_orders_hold_that_of_a_real_module() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.out = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.layers = torch.nn.Embedding(3, 2), torch.nn.ModuleList(Block() for _ in range(12))

    names = [n for n, _ in Net().named_parameters()]
    orders = list(iterate_possible_orders(sorted(names)))
    assert names in orders and sorted(names) not in orders, "layers.10 comes after layers.2"
    assert len(orders) == 2 * 6 and len({tuple(o) for o in orders}) == 12
    assert all(sorted(o) == sorted(names) for o in orders)
    odd = ["..", ".", "", "a", "a.b", "a..b", "1.x", "١.x"]
    assert all(sorted(order) == sorted(odd) for order in iterate_possible_orders(odd)), (
        "no name is lost, whatever it is"
    )
    assert list(iterate_possible_orders(odd)) and not list(iterate_possible_orders(["a" + ".a" * 5000]))
    assert not list(iterate_possible_orders([f"{c}.weight" for c in "abcdefghij"])), "ten factorial is too many to try"


def test_an_optimizer_alone_is_an_optimizer() -> None:
    with ckpttool.open(folder("accelerate_fsdp2_full") / "optimizer.bin") as opened:
        assert {opened.checkpoint.component(n) for n in opened.checkpoint.tensors} == {"optim"}
    with ckpttool.open(folder("trainer_ddp") / "optimizer.pt") as opened:
        assert {opened.checkpoint.component(n) for n in opened.checkpoint.tensors} == {"extra"}
        assert any("keeps its numbers" in n for n in opened.checkpoint.notes)


def test_an_optimizer_alone_keeps_its_keys(tmp_path: Path) -> None:
    source = folder("accelerate_fsdp2_full") / "optimizer.bin"
    ckpttool.convert(source, tmp_path / "out.pt", to="full", drop=True)
    found, original = (torch.load(p, weights_only=True) for p in (tmp_path / "out.pt", source))
    assert found.keys() == original.keys() == {"state", "param_groups"}
    assert same_value(found, original)


# ------------------------------------------------------------------------------------------------ weights in other files


def with_other_weights(source: Path, out: Path, kind: str) -> Path:
    """The same directory, its weights as transformers and Accelerate write large ones, or without safetensors."""
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    with ckpttool.open(source) as opened:  # torch.save keeps the order of the module, safetensors sorts
        groups = [v.data for n, v in opened.checkpoint.values.items() if n.endswith(".params")]
    decayed, others = map(set, groups)
    order = json.loads((out / "config.json").read_text()) and module_order(out)
    assert set(order) == set(weights) == decayed | others
    (out / "model.safetensors").unlink()
    if kind == "pytorch_model.bin":
        torch.save({n: weights[n] for n in order}, out / "pytorch_model.bin")
        return out
    suffix, stem = (".bin", "pytorch_model") if "bin" in kind else (".safetensors", "model")
    parts = [order[:8], order[8:15], order[15:]]
    places = {}
    for i, part in enumerate(parts):
        name = f"{stem}-{i + 1:05d}-of-00003{suffix}"
        places |= dict.fromkeys(part, name)
        tensors = {n: weights[n] for n in part}
        torch.save(tensors, out / name) if suffix == ".bin" else save_file(tensors, out / name, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": places}
    (out / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return out


def module_order(folder: Path) -> list[str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return [n for n, _ in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).named_parameters()]


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "shards of bin", "shards of safetensors"])
def test_weights_in_shards_and_in_bin_files_are_the_model(kind: str, tmp_path: Path) -> None:
    source = with_other_weights(folder("trainer_ddp"), tmp_path / "checkpoint-3", kind)
    if kind != "shards of safetensors":  # the files have the order of the module, so no config is needed
        (source / "config.json").unlink()
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3)
    found = {k: t for k, t in tensors_of(load_dcp(tmp_path / "out")).items() if k.startswith(("model.", "optim."))}
    assert difference(found, truth("trainer_ddp")) == []
    with ckpttool.open(source) as opened:
        assert {r.component for r in opened.checkpoint.unread} <= {""}
    state = tmp_path / "state"  # as Accelerate has them
    shutil.copytree(source, state)
    (state / "trainer_state.json").unlink()
    for rank in range(RANKS):
        (state / f"rng_state_{rank}.pth").rename(state / f"random_states_{rank}.pkl")
    with ckpttool.open(state) as opened:
        names = opened.checkpoint.tensors
        assert opened.checkpoint.layout == "accelerate" and set(truth("trainer_ddp")) == {
            n.replace("optim.state.", "optim.", 1) for n in names if n.startswith(("model.", "optim."))
        }


@pytest.mark.parametrize("kind", ["shards of bin", "shards of safetensors"])
def test_a_missing_shard_is_named(kind: str, tmp_path: Path) -> None:
    source = with_other_weights(folder("trainer_ddp"), tmp_path / "checkpoint-3", kind)
    next(source.glob("*-00002-of-00003.*")).unlink()
    with pytest.raises(Corrupt, match=r"-00002-of-00003\.\w+ is missing"):
        ckpttool.open(source)


# ------------------------------------------------------------------------------------------------------ broken folders


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def test_data_that_cannot_be_read_stops_and_drop_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(folder("trainer_ddp"), source)
    (source / "rng_state_1.pth").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(Unsupported, match=r"rng_state_1\.pth \([^)]*cannot be read"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2, drop=True)
    assert [n for n, _, _ in done.dropped] == ["rng_state_1.pth"]


def test_a_damaged_optimizer_is_an_error_and_only_model_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(folder("trainer_fsdp2_full"), source)
    (source / "optimizer.bin").write_bytes(b"x" * 9)
    with pytest.raises(Corrupt, match=r"optimizer\.bin"):
        ckpttool.open(source)
    (source / "optimizer.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(Unsafe):
        ckpttool.open(source)
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2, only=["model"])


def test_a_part_without_tensors_is_named(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(folder("trainer_fsdp2_sharded"), source)
    shutil.rmtree(source / "pytorch_model_fsdp_0")
    ckpttool.convert(
        folder("trainer_fsdp2_sharded"), source / "pytorch_model_fsdp_0", to="dcp", world_size=2, only=["rng"]
    )
    with ckpttool.open(source) as opened:
        assert "weights" in " ".join(opened.checkpoint.notes) or not any(
            n.startswith("model.") for n in opened.checkpoint.tensors
        )


def test_several_models_are_told_apart_by_number(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(folder("accelerate_fsdp2_full"), source)
    shutil.copy(source / "pytorch_model_fsdp.bin", source / "pytorch_model_fsdp_1.bin")
    shutil.copy(source / "optimizer.bin", source / "optimizer_1.bin")
    shutil.copy(source / "scheduler.bin", source / "scheduler_1.bin")
    with ckpttool.open(source) as opened:
        names = [n for n in opened.checkpoint.tensors if n.startswith("model.")]
        assert len(names) == 42 and {n.split(".")[1] for n in names} == {"0", "1"}
        assert {n.split(".")[1] for n in opened.checkpoint.values if n.startswith("scheduler.")} == {"0", "1"}
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3)
    tree = load_dcp(tmp_path / "out")
    assert tree["model"].keys() == tree["optim"].keys() == tree["scheduler"].keys() == {"0", "1"}
    for to in ("accelerate", "trainer", "lightning", "torchtitan"):
        with pytest.raises(Unsupported, match="holds 2 models"):
            ckpttool.convert(source, tmp_path / to, to=to, world_size=2)
        with pytest.raises(Unsupported, match=r'"model\.layer\.float8\.weight" is a tensor of several parts'):
            ckpttool.convert(FIXTURES / "torchao/weights/weights.pt", tmp_path / to, to=to, world_size=2)


@pytest.mark.parametrize("models", [2, 1])
def test_numbers_of_an_optimizer_get_the_names_of_the_model_it_belongs_to(models: int, tmp_path: Path) -> None:
    """Two equal models, each with its optimizer; and one model with two."""
    states, source = [], tmp_path / "state"
    source.mkdir()
    torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, source / "random_states_0.pkl")
    for i, mark in enumerate(("", "_1")):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.full((1, 3), i + 1.0)).sum().backward()
        optimizer.step()
        if i < models:
            save_file(model.state_dict(), source / f"model{mark}.safetensors")
        torch.save(optimizer.state_dict(), source / f"optimizer{mark}.bin")
        states.append({n: optimizer.state[p] for n, p in model.named_parameters()})
    ckpttool.convert(source, tmp_path / "out.pt", to="full")
    tree = load_full(tmp_path / "out.pt")
    assert [same_value(tree["optim"][str(i)]["state"], state) for i, state in enumerate(states)] == [True, True]
    assert tree["optim"]["1"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_inspect_says_whose_it_is() -> None:
    done = ckpttool_here("inspect", folder("trainer_fsdp2_sharded"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["layout"], found["trainer"], found["step"], found["ranks"]) == (
        "trainer",
        "Hugging Face Trainer",
        3,
        2,
    )
    assert found["optimizer"]["kind"] and not any("optimizer" in text for text in found["missing"])


# ------------------------------------------------------------------------------------------------------------ writing


def dcp_keys(path: Path) -> dict[str, tuple[Any, ...]]:
    """The keys that a job can ask a DCP folder for, with their places in the tree."""
    found: dict[str, tuple[Any, ...]] = pickle.loads((path / ".metadata").read_bytes()).planner_data
    return found


@pytest.mark.parametrize("case", [c for c in CASES if "sharded" in c])
def test_a_sharded_directory_has_the_keys_that_the_trainer_wrote(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    to = "trainer" if case.startswith("trainer_") else "accelerate"
    ckpttool.convert(folder(case), out, to=to, world_size=3)
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert dcp_keys(out / part) == dcp_keys(folder(case) / part)
        assert len(list((out / part).glob("*.distcp"))) == 3
        ours, theirs = load_dcp(out / part), load_dcp(folder(case) / part)
        assert same_value(ours, theirs)
    assert {p.name for p in out.iterdir()} == {p.name for p in folder(case).iterdir()} | {"ckpttool.json"}
    for name in {p.name for p in folder(case).iterdir() if p.suffix in (".pt", ".bin", ".pth", ".pkl")}:
        ours, theirs = (torch.load(p / name, weights_only=False) for p in (out, folder(case)))
        assert same_value(plain(ours), plain(theirs)), name
    if to == "trainer":
        assert json.loads((out / "trainer_state.json").read_text()) == json.loads(
            (folder(case) / "trainer_state.json").read_text()
        )


def test_a_full_directory_has_the_files_that_the_trainer_wrote(tmp_path: Path) -> None:
    for case, to in (("accelerate_fsdp2_full", "accelerate"), ("trainer_fsdp2_full", "trainer")):
        options = ckpttool.DirectoryOptions(state_dict_type="full")
        ckpttool.convert(folder(case), tmp_path / to, to=to, world_size=2, options=options)
        for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
            ours, theirs = (torch.load(p / name, weights_only=True) for p in (tmp_path / to, folder(case)))
            assert same_value(ours, theirs)


def test_a_directory_of_a_job_without_fsdp_has_the_numbers_that_the_trainer_wrote(tmp_path: Path) -> None:
    said = json.loads((TRAINERS / "trainer_ddp" / "case.json").read_text())["model"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(said | {"model_type": "llama"}))
    ckpttool.convert(folder("trainer_ddp"), tmp_path / "dcp", to="dcp", world_size=3, config=str(tmp_path))
    how = ckpttool.DirectoryOptions(state_dict_type="ddp")
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="trainer", world_size=2, options=how, config=str(tmp_path))
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    named = [n for g in found["param_groups"] for n in g.pop("param_names")]
    assert same_value(found, torch.load(folder("trainer_ddp") / "optimizer.pt", weights_only=True))
    slots = {n: found["state"][i]["exp_avg"] for i, n in enumerate(named)}
    assert all(torch.equal(slots[n], truth("trainer_ddp")[f"optim.{n}.exp_avg"]) for n in slots) and len(slots) == 21
    weights = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert same_value(dict(sorted(weights.items())), load_file(folder("trainer_ddp") / "model.safetensors"))


@pytest.mark.parametrize("by_way_of_a_file", [False, True])
def test_a_directory_of_a_job_without_fsdp_keeps_the_numbers_of_its_source(
    by_way_of_a_file: bool, tmp_path: Path
) -> None:
    """Names are sorted in model.safetensors, so that only the numbers tell the order of the modules."""
    source: Path = folder("trainer_ddp")
    said = json.loads((TRAINERS / "trainer_ddp" / "case.json").read_text())["model"]["config"]
    shutil.copytree(source, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(said | {"model_type": "llama"}))
    here = tmp_path / "ckpt"
    if by_way_of_a_file:
        names = load_file(here / "model.safetensors")
        state = {"model": names, "optimizer": torch.load(here / "optimizer.pt", weights_only=True)}
        here = tmp_path / "state.pt"
        torch.save(state, here)
    how = ckpttool.DirectoryOptions(state_dict_type="ddp")
    hints: dict[str, Any] = {"config": str(tmp_path / "ckpt")} if by_way_of_a_file else {}
    result = ckpttool.convert(here, tmp_path / "out", to="trainer", world_size=2, options=how, **hints)
    assert not any("a job with FSDP" in n for n in result.notes)
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    names = [n for g in found["param_groups"] for n in g.pop("param_names")]
    assert names[0] == "model.embed_tokens.weight" and len(names) == 21
    assert same_value(found, torch.load(source / "optimizer.pt", weights_only=True))


def test_a_trainers_directory_is_said_to_be_for_fsdp(tmp_path: Path) -> None:
    result = ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "out", to="accelerate", world_size=2)
    assert any("for a job with FSDP; DirectoryOptions(state_dict_type='ddp')" in n for n in result.notes)


def test_numbers_are_refused_where_the_order_of_the_modules_is_not_known(tmp_path: Path) -> None:
    def save(name: str, names: list[str], groups: list[list[str]]) -> Path:
        state = {n: {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), float(i))} for i, n in enumerate("bac")}
        tree = {
            "model": {n: torch.ones(2) for n in names},
            "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": g} for g in groups]},
        }
        torch.save(tree, tmp_path / name)
        return tmp_path / name

    how: dict[str, Any] = {
        "to": "trainer",
        "options": ckpttool.DirectoryOptions(state_dict_type="ddp"),
        "world_size": 1,
    }
    live = save("live.pt", ["b", "a", "c"], [["c"], ["b", "a"]])
    ckpttool.convert(live, tmp_path / "out", **how)
    for names, groups in ((["a", "b", "c"], [["a", "b", "c"]]), (["b", "a", "c"], [["a", "b"], ["c"]])):
        unknown = save("unknown.pt", names, groups)
        with pytest.raises(Unsupported, match=r"does not tell that order\. Give config .* or like"):
            ckpttool.convert(unknown, tmp_path / "refused", **how)
        assert not (tmp_path / "refused").exists()
    ckpttool.convert(unknown, tmp_path / "told", like=live, **how)
    for name, ids in (("out", [[0], [1, 2]]), ("told", [[0, 1], [2]])):
        found = torch.load(tmp_path / name / "optimizer.pt", weights_only=True)
        assert [g["params"] for g in found["param_groups"]] == ids
        values = [found["state"][i]["exp_avg"][0].item() for i in range(3)]
        assert values == ([2, 0, 1] if name == "out" else [0, 1, 2])


def test_an_adapter_is_refused_where_the_trainer_would_not_look_for_it(tmp_path: Path) -> None:
    how: dict[str, Any] = {"options": ckpttool.DirectoryOptions(state_dict_type="ddp"), "world_size": 1}
    for to in ("trainer", "accelerate"):
        with pytest.raises(
            Unsupported, match=r"those of an adapter, first .*lora_A.weight.*reads them from adapter_model"
        ):
            ckpttool.convert(folder("trainer_fsdp2_sharded_lora"), tmp_path / "out", to=to, **how)


@pytest.mark.parametrize("to", ["accelerate", "trainer", "lightning", "torchtitan"])
def test_weights_alone_become_a_directory_that_is_read_again(to: str, tmp_path: Path) -> None:
    """Without files of an optimizer and of random states, ckpttool.json tells what wrote the folder."""
    source = FIXTURES / "hf_llama" / "ckpt"
    ckpttool.convert(source, tmp_path / "out", to=to, world_size=2)
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.layout == {"torchtitan": "dcp"}.get(to, to)
    found = ckpttool.diff(source, tmp_path / "out")
    assert found.tensors and not (found.only_in_a or found.data or found.dtypes or found.shapes)


def test_what_a_trainer_has_no_file_for_is_kept(tmp_path: Path) -> None:
    """Counters of Trainer in a directory of Accelerate, and ranks that the new job does not have."""
    source = folder("trainer_fsdp2_sharded")
    done = ckpttool.convert(source, tmp_path / "one", to="accelerate", world_size=1)
    assert any("ckpttool_state.pt" in n and "rng, trainer" in n for n in done.notes)
    assert not (tmp_path / "one" / "random_states_1.pkl").exists()
    assert not ckpttool.diff(source, tmp_path / "one").only_in_a
    ckpttool.convert(tmp_path / "one", tmp_path / "back", to="trainer", world_size=2)
    assert ckpttool.diff(source, tmp_path / "back").equal
    assert json.loads((tmp_path / "back" / "trainer_state.json").read_text()) == json.loads(
        (source / "trainer_state.json").read_text()
    )
    assert (tmp_path / "back" / "rng_state_1.pth").exists() and not (tmp_path / "back" / "ckpttool_state.pt").exists()


#: A state of torch.amp.GradScaler.
SCALER = {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 1}
#: {layout: what only ckpttool's own file has of a state with a scheduler, a scaler, random states and counters of the user's own}
LEFT_OVER = {
    "accelerate": {"trainer.step", "trainer.epoch", "extra.args.lr"},
    "trainer": {"trainer.step", "extra.args.lr"},
    "lightning": {*(f"scaler.{k}" for k in SCALER), "trainer.step", "extra.args.lr"},
}


@pytest.mark.parametrize("to", [*LEFT_OVER, "torchtitan"])
def test_an_entry_is_in_one_file_and_files_have_what_the_trainer_asks_for(to: str, tmp_path: Path) -> None:
    w = torch.ones(3, 2)
    slots = {"w": {"exp_avg": w, "exp_avg_sq": w, "step": torch.tensor(3.0)}}
    torch.save(
        {
            "model": {"w": w}, "optim": {"state": slots, "param_groups": [{"lr": 0.1, "params": ["w"]}]}, "step": 3, "epoch": 1,
            "scheduler": {"last_epoch": 3}, "scaler": dict(SCALER), "args": {"lr": 0.1},
            "rng": {"0": {"torch": torch.arange(9, dtype=torch.uint8)}}, **({"dataloader": {}} if to == "torchtitan" else {}),
            **({"dataloader": {"sampler": {"seed": 3}}, "custom_checkpoint_0": {"a": 1}} if to == "accelerate" else {}),
        },
        tmp_path / "in.pt",
    )  # fmt: skip
    out = tmp_path / "out"
    ckpttool.convert(tmp_path / "in.pt", out, to=to, world_size=2)
    if to == "torchtitan":
        tree = load_dcp(out)
        assert tree["optimizer"]["param_groups.w.lr"] == 0.1 and tree["train_state"]["ntokens_seen"] == 0
        return
    own = torch.load(out / "ckpttool_state.pt", weights_only=False)
    assert {".".join(path) for path, _ in own["values"]} == LEFT_OVER[to]
    assert {".".join(path) for path in own["paths"]} == {
        "rng.0.torch"
    }  # no trainer loads it without those of Python and numpy
    if to == "trainer":
        said = json.loads((out / "trainer_state.json").read_text())
        assert (
            said["train_batch_size"] == 1
            and said["stateful_callbacks"]["TrainerControl"]["args"]["should_save"] is False
        )
    if to == "lightning":
        meta = torch.load(out / "meta.pt", weights_only=False)
        assert meta["pytorch-lightning_version"] and meta["callbacks"] == {} and meta["loops"]["fit_loop"]
    if to != "lightning":
        assert torch.load(out / "scaler.pt") == SCALER


def test_a_moment_without_its_path_is_not_taken_for_a_weight(tmp_path: Path) -> None:
    shutil.copytree(TRAINERS / "accelerate_fsdp1_sharded" / "ckpt", tmp_path / "in")
    index = tmp_path / "in" / "optimizer_0" / ".metadata"
    meta = pickle.loads(index.read_bytes())
    del meta.planner_data[next(k for k in meta.planner_data if k.endswith(".exp_avg_sq"))]
    index.write_bytes(pickle.dumps(meta))
    with pytest.raises(Corrupt, match="has the paths of other entries, and none for 1 of"):
        ckpttool.convert(tmp_path / "in", tmp_path / "out.pt", to="full")


@pytest.mark.parametrize("to", ["accelerate", "trainer"])
def test_numbered_state_without_names_is_kept_and_a_directory_without_weights_is_refused(
    to: str, tmp_path: Path
) -> None:
    slots = {0: {"exp_avg": torch.ones(7)}, 1: {"exp_avg": torch.ones(5)}}  # of no parameter of this model
    tree = {"optimizer": {"state": slots, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, "step": 3}
    torch.save({"model": {"w": torch.ones(3, 2)}, **tree}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, drop=True)
    own = torch.load(tmp_path / "out" / "ckpttool_state.pt", weights_only=False)
    assert ("extra", "optimizer", "state", "0", "exp_avg") in own["paths"]
    torch.save(tree, tmp_path / "bare.pt")
    with pytest.raises(Unsupported, match="no model weights"):
        ckpttool.convert(tmp_path / "bare.pt", tmp_path / "other", to=to, world_size=2, drop=True)


def test_lightning_gets_its_own_files_back(tmp_path: Path) -> None:
    source = TRAINERS / "lightning_w2"
    ckpttool.convert(source, tmp_path / "out", to="lightning", world_size=3)
    assert dcp_keys(tmp_path / "out") == dcp_keys(source)
    ours, theirs = (torch.load(p / "meta.pt", weights_only=True) for p in (tmp_path / "out", source))
    assert same_value(ours, theirs) and same_value(load_dcp(tmp_path / "out"), load_dcp(source))
    assert not (tmp_path / "out" / "ckpttool_state.pt").exists()


def test_torchtitan_gets_its_own_keys_back_and_those_it_asks_for(tmp_path: Path) -> None:
    source = TRAINERS / "titan_w2"
    done = ckpttool.convert(source, tmp_path / "out", to="torchtitan", world_size=3)
    assert dcp_keys(tmp_path / "out") == dcp_keys(source) and same_value(load_dcp(tmp_path / "out"), load_dcp(source))
    assert any("exclude_from_loading" in n for n in done.notes)
    assert not any(
        "exclude" in n for n in ckpttool.convert(source, tmp_path / "two", to="torchtitan", world_size=2).notes
    )
    ckpttool.convert(folder("trainer_fsdp2_sharded"), tmp_path / "other", to="torchtitan", world_size=2)
    tree = load_dcp(tmp_path / "other")
    assert {"model.norm.weight", "lm_head.weight", "optimizer", "lr_scheduler", "train_state"} <= tree.keys()
    assert tree["optimizer"]["param_groups.model.norm.weight.weight_decay"] == 0.0
    assert tree["train_state"]["step"] == 3 and tree["lr_scheduler"]["last_epoch"] == 3


@pytest.mark.parametrize("name", ["model", "optimizer", "state_dict"])
def test_a_weight_that_has_the_name_of_a_component_is_refused_for_torchtitan(name: str, tmp_path: Path) -> None:
    weights = {name: torch.randn(3), "fc.weight": torch.randn(2, 3)}
    state = {"state": {n: {"exp_avg": w, "step": torch.tensor(1.0)} for n, w in weights.items()}}
    groups = [{"params": list(weights), "lr": 0.1}]
    torch.save({"model": weights, "optim": state | {"param_groups": groups}}, tmp_path / "in.pt")
    with pytest.raises(ckpttool.CkpttoolError, match="at the root of its state dict"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torchtitan", world_size=2)
    assert not (tmp_path / "out").exists()


def test_a_learning_rate_of_nan_divides_no_group_for_torchtitan(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(3), "b.weight": torch.randn(2, 3)}
    state = {"state": {n: {"exp_avg": w, "step": torch.tensor(1.0)} for n, w in weights.items()}}
    groups = [{"params": list(weights), "lr": float("nan")}]
    torch.save({"model": weights, "optim": state | {"param_groups": groups}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torchtitan", world_size=2)
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.value("optim.param_groups.0.params") == list(weights)


def test_for_chooses_the_layout(tmp_path: Path) -> None:
    source = folder("accelerate_fsdp2_full")
    for trainer, (layout, program) in list_resuming_programs().items():
        if program.refused:
            continue
        part = ("--only", "model") if trainer == "megatron" else ()  # the groups have learning rates of their own
        if trainer == "torchtune":
            part = ("--map", "torchtune-llama3", "--config", TRAINERS.parent / "maps" / "tune-llama3")
        done = ckpttool_here("convert", source, tmp_path / trainer, "--for", trainer, "-n", "2", "--json", *part)
        assert done.returncode == 0 and json.loads(done.stdout)["layout_to"] == layout.name, done.stderr
    assert load_dcp(tmp_path / "torch").keys() >= {"model", "optim", "scheduler"}
    for words, why in (
        (["--for", "keras"], "Choose one of: accelerate"),
        (["--for", "torch", "--to", "dcp"], "leave --to"),
    ):
        done = ckpttool_here("convert", source, tmp_path / "no", *words, "-n", "2")
        assert done.returncode == 2 and why in done.stderr
    done = ckpttool_here(
        "convert", source, tmp_path / "no", "--for", "trainer", "-n", "2", "--state-dict-type", "local"
    )
    assert done.returncode == 2 and "choose sharded, full or ddp" in done.stderr


def test_a_source_without_counters_gets_the_optimizer_s_steps(tmp_path: Path) -> None:
    ckpttool.convert(
        folder("accelerate_fsdp1_sharded"), tmp_path / "a", to="dcp", world_size=2, only=["model", "optim"]
    )
    done = ckpttool.convert(tmp_path / "a", tmp_path / "b", to="trainer", world_size=2)
    state = json.loads((tmp_path / "b" / "trainer_state.json").read_text())
    assert state["global_step"] == 3 and "TrainerControl" in state["stateful_callbacks"]
    assert any("scheduler" in n for n in done.notes) and any("RNG" in n for n in done.notes)


@pytest.mark.parametrize("source", ["deepspeed", "torch", "trainer-full"])
def test_tensors_of_an_optimizer_share_no_storage(source: str, tmp_path: Path) -> None:
    """An optimizer adds to `step` in place, and `load_state_dict` keeps the tensor: ZeRO's files have one for all parameters."""
    ckpttool.convert(TRAINERS / "jobs" / source, tmp_path / "out.pt", to="full")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["optim"]["state"]
    places = [t.untyped_storage().data_ptr() for slots in state.values() for t in slots.values()]
    assert len(state) == 10 and len(places) == 30 == len(set(places))


@pytest.mark.parametrize("case", ["trainer_fsdp2_sharded", "accelerate_fsdp1_local", "trainer_ddp"])
def test_from_pretrained_gives_the_live_model(case: str, tmp_path: Path) -> None:
    """A directory that was trained becomes a model for from_pretrained, whose logits are those of the live one, bit for bit."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    said = json.loads((TRAINERS / case / "case.json").read_text())["model"]["config"]
    (tmp_path / "config.json").write_text(
        json.dumps(said | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    ckpttool.convert(folder(case), tmp_path / "hf", to="hf", config=str(tmp_path))
    found, answer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not answer["missing_keys"] and not answer["unexpected_keys"]
    live = LlamaForCausalLM(LlamaConfig(**said))
    live.load_state_dict({k.removeprefix("model."): t for k, t in truth(case).items() if k.startswith("model.")})
    ids = torch.arange(24).reshape(3, 8)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, live(ids).logits)


def test_state_of_another_shape_and_other_counters_are_kept(tmp_path: Path) -> None:
    """A scheduler that is no dict, RNG that is not by rank, two counters of which a trainer has room for one; a cast of small tensors."""
    tree = {
        "model": {"w": torch.ones(4, 2)}, "rng": {"all": torch.arange(3)}, "step": 3, "global_step": 7,
        "args": {"custom_checkpoint_0": {"ema": torch.ones(2)}},
    }  # fmt: skip
    for to, scheduler in (("accelerate", 5), ("trainer", 5), ("lightning", 5), ("lightning", [])):
        torch.save(tree | {"scheduler": scheduler}, tmp_path / "in.pt")
        ckpttool.convert(tmp_path / "in.pt", tmp_path / to, to=to, world_size=2, cast={"extra.*": "bf16"}, force=True)
        with ckpttool.open(tmp_path / to) as opened:
            values, tensors = opened.checkpoint.values, opened.checkpoint.tensors
            assert values["scheduler"].data == scheduler and not opened.checkpoint.unread and "rng.all" in tensors
            assert {values["trainer.step"].data, values["trainer.global_step"].data} == {3, 7}
            assert {t.dtype for n, t in tensors.items() if n.endswith("ema")} == {"bfloat16"}


@pytest.mark.parametrize(
    "state",
    [
        {"state": {0: {"seen": 1}, 2: {"seen": None}}, "step": 3},
        {"state": {0: {"m": torch.ones(2)}, 5: {"m": 1.0}}, "param_groups": [{"params": [0, 1], "lr": 0.1}], "of": "d"},
    ],
)
def test_numbers_as_keys_of_registered_state_stay_numbers(state: dict[str, Any], tmp_path: Path) -> None:
    """Under the key "state", which an optimizer has too, whose parameters get names."""
    source = tmp_path / "state"
    shutil.copytree(folder("accelerate_fsdp2_full"), source)
    torch.save(state, source / "custom_checkpoint_0.pkl")
    ckpttool.convert(source, tmp_path / "by", to="trainer", world_size=2)
    ckpttool.convert(tmp_path / "by", tmp_path / "back", to="accelerate", world_size=2)
    found = torch.load(tmp_path / "back" / "custom_checkpoint_0.pkl", weights_only=True)
    assert same_value(found, state)
    if "param_groups" not in state:  # of an optimizer, both are numbers of parameters
        text = {**state, "state": {str(k): v for k, v in state["state"].items()}}
        torch.save(text, tmp_path / "back" / "custom_checkpoint_0.pkl")
        one, other = (ckpttool.digest(p).digest["values"] for p in (source, tmp_path / "back"))
        assert one != other


def test_two_entries_of_a_file_with_one_name_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(folder("accelerate_fsdp2_full"), source)
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, source / "custom_checkpoint_0.pkl")
    with pytest.raises(Unsupported, match=r'two entries of .*custom_checkpoint_0\.pkl are named "extra\.a\.b"'):
        ckpttool.convert(source, tmp_path / "out", to="accelerate", world_size=2)


@pytest.mark.parametrize("by", ["full", "dcp"])
def test_nested_counters_of_trainer_come_back_by_way_of_a_state_dict(by: str, tmp_path: Path) -> None:
    """The log and the callbacks' states, which a reader of state dicts takes apart; older transformers have no batch size."""
    source = tmp_path / "checkpoint-3"
    shutil.copytree(folder("trainer_fsdp2_sharded"), source)
    counters = json.loads((source / "trainer_state.json").read_text())
    early = {"args": {"early_stopping_patience": 3}, "attributes": {"early_stopping_patience_counter": 2}}
    counters["stateful_callbacks"]["EarlyStoppingCallback"] = early
    counters |= {"log_history": [{"loss": 2.5, "step": 1}, {}], "trial_params": {"lr": [{"a": None}]}}
    (source / "trainer_state.json").write_text(json.dumps(counters | {"train_batch_size": None}))
    middle = tmp_path / ("by.pt" if by == "full" else "by")
    ckpttool.convert(source, middle, to=by, world_size=2 if by == "dcp" else None)
    ckpttool.convert(middle, tmp_path / "back", to="trainer", world_size=2)
    found = json.loads((tmp_path / "back" / "trainer_state.json").read_text())
    assert found == counters | {"train_batch_size": 1}
    assert ckpttool.diff(source, tmp_path / "back").only_in_a == []


@pytest.mark.parametrize("by", ["lightning", "dcp"])
def test_lightning_gets_back_what_a_job_saved_under_keys_of_its_own(by: str, tmp_path: Path) -> None:
    """Of its precision plugin and data module, and what a module added, though it looks like weights or counters."""
    source = tmp_path / "job.ckpt"
    shutil.copytree(TRAINERS / "lightning_w2", source)
    meta = torch.load(source / "meta.pt", weights_only=True)
    meta |= {
        "FSDPPrecision": {"scale": 2.0, "_growth_tracker": 1}, "Rows": {"seen": 3}, "queue": torch.arange(3),
        "ema": {"net.weight": torch.ones(2)}, "step": 5, "train_dataloader": {"at": 1}, "extra": {"a": None},
        "optimizer": {"state": {}, "param_groups": []},
    }  # fmt: skip
    torch.save(meta, source / "meta.pt")
    ckpttool.convert(source, tmp_path / "by", to=by, world_size=2)
    ckpttool.convert(tmp_path / "by", tmp_path / "back", to="lightning", world_size=2)
    assert same_value(torch.load(tmp_path / "back" / "meta.pt", weights_only=True), meta)
    assert not (tmp_path / "back" / "ckpttool_state.pt").exists()


def test_two_schedulers_go_to_lightning_and_back(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(folder("accelerate_fsdp2_full"), source)
    torch.save({"last_epoch": 1}, source / "scheduler_1.bin")
    ckpttool.convert(source, tmp_path / "by", to="lightning", world_size=2)
    listed = torch.load(tmp_path / "by" / "meta.pt", weights_only=True)["lr_schedulers"]
    assert listed[1] == {"last_epoch": 1} and listed[0] == torch.load(source / "scheduler.bin", weights_only=True)
    ckpttool.convert(tmp_path / "by", tmp_path / "back", to="accelerate", world_size=2)
    assert torch.load(tmp_path / "back" / "scheduler_1.bin", weights_only=True) == listed[1]


def test_a_scheduler_around_another_is_one(tmp_path: Path) -> None:
    """Several are numbered, or named by class."""
    state = {"inner": {"last_epoch": 3}}
    torch.save({"model": {"w": torch.ones(2)}, "scheduler": state}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="accelerate", world_size=1)
    assert torch.load(tmp_path / "out" / "scheduler.bin", weights_only=True) == state


def test_counters_of_trainer_come_back_from_a_directory_of_lightning(tmp_path: Path) -> None:
    """Lightning counts whole epochs; Trainer's half of one is kept beside its own."""
    source = folder("trainer_fsdp2_sharded")
    ckpttool.convert(source, tmp_path / "ckpt", to="lightning", world_size=2)
    assert torch.load(tmp_path / "ckpt" / "meta.pt", weights_only=True)["epoch"] == 0
    with ckpttool.open(tmp_path / "ckpt") as opened:
        assert opened.checkpoint.values["trainer.epoch"].data == 0.5 and not opened.checkpoint.unread


def test_an_object_whose_state_is_no_dict_comes_back_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "state"
    shutil.copytree(folder("accelerate_fsdp2_full"), source)
    states = {
        "custom_checkpoint_0.pkl": 7,
        "custom_checkpoint_1.pkl": [1, "two"],
        "custom_checkpoint_2.pkl": torch.arange(5),
        "sampler.bin": (3, 4),
    }
    for name, state in states.items():
        torch.save(state, source / name)
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back", to="accelerate", world_size=2)
    for name, state in states.items():
        assert same_value(torch.load(tmp_path / "back" / name, weights_only=True), state)


def test_two_adapters_of_the_same_parameters_keep_their_names_with_a_note(tmp_path: Path) -> None:
    """PEFT leaves the name of an adapter out, which two of them would then share."""
    w = torch.ones(2, 2)
    names = [f"base_model.model.q.lora_{x}.{a}.weight" for a in ("default", "other") for x in "AB"]
    torch.save({"model": dict.fromkeys(names[:2], w), "step": 3}, tmp_path / "one.pt")
    torch.save({"model": {n: w.clone() for n in names}, "step": 3}, tmp_path / "two.pt")
    for source, expected in (("one", 0), ("two", 1)):
        done = ckpttool.convert(tmp_path / f"{source}.pt", tmp_path / source, to="trainer", world_size=2)
        assert sum("several adapters" in n for n in done.notes) == expected
        with ckpttool.open(tmp_path / source) as opened:
            assert len(opened.checkpoint.tensors) == (2 if source == "one" else 4)
    with ckpttool.open(tmp_path / "two") as opened:
        assert {n.removeprefix("model.") for n in opened.checkpoint.tensors} == set(names)


def test_components_that_share_a_file_may_be_asked_for_alone() -> None:
    """meta.pt of Lightning holds counters, loops and schedulers."""
    source = FIXTURES / "trainers" / "lightning_w2"
    for only in ("trainer", "extra"):
        with ckpttool.open(source, only=[only]) as opened:
            assert {opened.checkpoint.component(n) for n in opened.checkpoint.values} == {only}


def test_an_item_at_the_root_of_lightning_s_dcp_keeps_its_name(tmp_path: Path) -> None:
    """It is no buffer of the model, whose file is another matter."""
    shutil.copytree(FIXTURES / "trainers" / "lightning_w2", tmp_path / "a")
    name = "optimizer_0.state.net.norm.bias.exp_avg"
    file = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data[name] = (name,)
    file.write_bytes(pickle.dumps(metadata))
    with ckpttool.open(tmp_path / "a") as opened:
        assert f"extra.{name}" in opened.checkpoint.tensors


def test_a_buffer_named_as_a_counter_is_the_model_s(tmp_path: Path) -> None:
    """As ema_pytorch's EMA has `step` and `initted` at its root."""
    shutil.copytree(FIXTURES / "trainers" / "accelerate_fsdp2_full", tmp_path / "a")
    (found,) = (tmp_path / "a").rglob("pytorch_model_fsdp.bin")
    weights = {**torch.load(found), "step": torch.tensor(7), "epoch": torch.tensor([2.0])}
    torch.save(weights, found)
    with ckpttool.open(found.parent) as opened:
        assert "trainer.step" not in opened.checkpoint.tensors
        assert opened["model.step"][...] == 7 and opened["model.epoch"][0] == 2.0
    ckpttool.convert(found.parent, tmp_path / "hf", to="hf", drop=True)
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[n], weights[n]) for n in weights)


@pytest.mark.parametrize("name", ["model", "optimizer", "scaler", "step", "trainer"])
def test_a_weight_that_has_the_name_of_a_component_is_written_for_llamafactory(name: str, tmp_path: Path) -> None:
    """The folder model/ of LLaMA-Factory has weights at the root of its state dict, and nothing else."""
    weights = {name: torch.randn(3), "fc.weight": torch.randn(2, 3)}
    torch.save({"model": weights}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="llamafactory", world_size=2)
    read = load_dcp(tmp_path / "out" / "model")
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[n], w) for n, w in weights.items())
    assert ckpttool.digest(tmp_path / "out") == ckpttool.digest(tmp_path / "in.pt")


@pytest.mark.parametrize("to", ["accelerate", "trainer", "lightning", "verl", "llamafactory", "xtuner"])
@pytest.mark.parametrize("counts_in", ["last_epoch", "num_steps"])
def test_a_schedule_that_no_scheduler_of_torch_would_go_on_with_is_said(
    to: str, counts_in: str, tmp_path: Path
) -> None:
    """torch's scheduler takes over the state of Megatron-Core's or DeepSpeed's without an error, and begins at step 0."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {counts_in: 7, "max_lr": 0.1}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler.load_state_dict({**state, "lr_lambdas": [None]})
    goes_on = scheduler.last_epoch == 7
    weights, moments = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optim": moments, "scheduler": state, "step": 7}, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", to=to, world_size=2, drop=True)
    said = [n for n in done.notes if "has no last_epoch" in n]
    assert len(said) == (not goes_on), done.notes


@pytest.mark.parametrize("to", ["accelerate", "trainer", "lightning", "verl", "llamafactory", "xtuner"])
def test_where_a_lambda_lr_stops_at_the_scheduler_s_state_a_note_says_so(to: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedulers = torch.optim.lr_scheduler
    cosine, by_lambda = schedulers.CosineAnnealingLR(optimizer, 9), schedulers.LambdaLR(optimizer, lambda step: 1.0)
    states = [cosine.state_dict(), {"num_steps": 7}, {"last_batch_iteration": 7}, by_lambda.state_dict()]
    weights, moments = get_state_dict(model, optimizer)
    for i, state in enumerate(states):
        torch.save({"model": weights, "optim": moments, "scheduler": dict(state), "step": 7}, tmp_path / "in.pt")
        stops = False
        try:
            by_lambda.load_state_dict(dict(state))
        except KeyError as e:
            stops = e.args == ("lr_lambdas",)
        done = ckpttool.convert(tmp_path / "in.pt", tmp_path / str(i), to=to, world_size=2)
        said = [n for n in done.notes if "stops with KeyError 'lr_lambdas'" in n]
        scripts_own = to in ("lightning", "xtuner") and i != 1  # a scheduler of the source's class is as likely
        assert len(said) == (stops and not scripts_own), done.notes
        assert len([n for n in done.notes if "begin at step 0" in n or "start over at step 0" in n]) == (i in (1, 2))


def trained_job() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model after a step of AdamW, that optimizer, and the two as a checkpoint with the step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return model, optimizer, {"model": weights, "optim": moments, "step": 7}


def notes_of(tree: dict[str, Any], tmp_path: Path, to: str, **options: Any) -> str:
    """The notes of a conversion of a tree, joined."""
    torch.save(tree, tmp_path / "in.pt")
    if to not in ("full", "universal"):
        options.setdefault("world_size", 2)
    out = tmp_path / ("out.pt" if to == "full" else "out")
    return "; ".join(ckpttool.convert(tmp_path / "in.pt", out, to=to, force=True, **options).notes)


@pytest.mark.parametrize(
    ("to", "without"),
    [
        ("accelerate", "load_state stops without scheduler.bin"),
        ("trainer", "resumes an optimizer only where scheduler.pt is there"),
        ("lightning", "the job's own begins at step 0"),
        ("llamafactory", "the job's own begins at step 0"),
        ("verl", "the job's own begins at step 0"),
        ("zero2", "an engine that has one loads with load_lr_scheduler_states=False"),
        ("universal", "an engine that has one loads with load_lr_scheduler_states=False"),
    ],
)
def test_what_a_job_does_without_the_state_of_its_scheduler_is_said(to: str, without: str, tmp_path: Path) -> None:
    _, optimizer, tree = trained_job()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9).state_dict()
    none = notes_of(tree, tmp_path, to)
    assert "the source has no scheduler: " in none and without in none
    assert without not in notes_of({**tree, "scheduler": cosine}, tmp_path, to)
    by_class = notes_of({**tree, "scheduler": {"A": cosine, "B": cosine}}, tmp_path, to)
    assert "the source has several schedulers" in by_class and "has no lr_lambdas" not in by_class, by_class
    both = notes_of({**tree, "scheduler": [cosine, cosine]}, tmp_path, to)
    takes_several = to in ("accelerate", "lightning")
    assert ("the source has several schedulers" in both) == (not takes_several), both
    assert ("has no lr_lambdas" in both) == (to == "accelerate"), both
    if to != "trainer":  # no job resumes an optimizer that is not there
        assert "scheduler" not in notes_of({"model": tree["model"]}, tmp_path, to)


def test_a_scheduler_that_was_completed_is_equal_to_its_source(tmp_path: Path) -> None:
    """torchtitan saves last_epoch alone, and the rest follows from that and the param groups."""
    source = TRAINERS / "titan_w2"
    ckpttool.convert(source, tmp_path / "a", to="accelerate", world_size=2)
    for one, other in ((tmp_path / "a", source), (source, tmp_path / "a")):
        against = ckpttool.verify(one, against=other).against
        assert against["verdict"] == "equal" and "scheduler" in against["components"]
    ckpttool.convert(source, tmp_path / "b", to="accelerate", world_size=2, set_values={"scheduler.last_epoch": 2})
    with pytest.raises(ckpttool.CkpttoolError, match="not equal"):
        ckpttool.verify(source, against=tmp_path / "b")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(("to", "held"), [("trainer", "scheduler.pt"), ("zero2", None), ("fsdp1", None), ("dcp", None)])
def test_dicts_that_older_torch_keeps_as_one_item_are_found(
    to: str, held: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP of torch until 2.3 flattens only what has tensors; torch finds both forms."""
    _, optimizer, tree = trained_job()
    del tree["step"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    tree |= {"scheduler": scheduler, "trainer": {"step": 9, "epoch": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(_nested_dict, "traverse_state_dict", _traverse.traverse_state_dict_v_2_3)
        dcp.save(tree, checkpoint_id=str(tmp_path / "in"), no_dist=True)
    assert {"scheduler", "trainer"} < dcp.FileSystemReader(tmp_path / "in").read_metadata().state_dict_metadata.keys()
    done = ckpttool.convert(tmp_path / "in", tmp_path / "out", to=to, world_size=2)
    assert not done.dropped and not any("no scheduler" in n for n in done.notes)
    if held is not None:
        assert torch.load(tmp_path / "out" / held) == scheduler
        assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 9
    assert ckpttool.verify(tmp_path / "out", against=tmp_path / "in").against["verdict"] == "equal"
    with ckpttool.open(tmp_path / "out") as opened:
        whole = opened.checkpoint.values.get("scheduler")
        assert (whole.data if to == "dcp" else nest_values(opened.checkpoint.values, "scheduler")) == scheduler
        assert to == "dcp" or opened.checkpoint.value("trainer.step") == 9


def nest_values(values: dict[str, Any], head: str) -> dict[str, Any]:
    """The values below a name of one level."""
    return {str(v.path[1]): v.data for v in values.values() if v.path[0] == head}


def test_a_chained_scheduler_counts_in_those_that_it_is_made_of(tmp_path: Path) -> None:
    _, optimizer, tree = trained_job()
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.ConstantLR(optimizer), schedulers.StepLR(optimizer, 2)]
    chained = schedulers.ChainedScheduler(parts).state_dict()
    assert "last_epoch" not in chained
    assert "last_epoch" not in notes_of({**tree, "scheduler": chained}, tmp_path, "xtuner")
    assert "a scheduler of the source's class loads it" in notes_of({**tree, "scheduler": chained}, tmp_path, "trainer")


def test_a_schedule_that_was_made_for_another_engine_is_not_said_to_be_deepspeed_s(tmp_path: Path) -> None:
    *_, tree = trained_job()
    tree["scheduler"] = {"last_batch_iteration": 7}
    assert "deepspeed.runtime.lr_schedules" not in notes_of(tree, tmp_path, "megatron")
    assert "deepspeed.runtime.lr_schedules" in notes_of(tree, tmp_path, "dcp")


def test_steps_and_data_loaders_that_no_source_has_are_not_said_to_come_from_one(tmp_path: Path) -> None:
    *_, tree = trained_job()
    bare = {"model": tree["model"]}
    assert "global_step 0, since the source counts no steps" in notes_of(bare, tmp_path, "trainer")
    assert "global_steps is 0: the checkpoint does not give it" in notes_of(bare, tmp_path, "zero2")
    assert "the source has no data loader of torchtitan" in notes_of(tree, tmp_path, "torchtitan")
    loaders = {"dataloader": {f"dp_rank_{r}": b"" for r in range(4)} | {"world_size": 4}}
    assert "torchtitan cannot move the state of its data loader to 2 ranks" in notes_of(
        tree | loaders, tmp_path, "torchtitan"
    )


def test_state_with_a_copy_in_the_trainer_s_files_is_not_said_to_have_no_file(tmp_path: Path) -> None:
    *_, tree = trained_job()
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    scaler = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 3}
    tree |= {"rng": {"0": states, "1": states}, "scaler": scaler}
    for to, copied, without in (("accelerate", "rng", "trainer"), ("lightning", "scaler", "rng, trainer")):
        assert (
            f"keeps what this trainer has no file for: {without}; and the source's own form of {copied}, which this "
            "trainer loads in another"
        ) in notes_of(tree, tmp_path, to)


@pytest.mark.parametrize("to", ["full", "dcp", "accelerate", "fsdp1", "zero2", "megatron"])
def test_moments_that_torch_s_optimizer_rounds_are_said_to_be_rounded(to: str, tmp_path: Path) -> None:
    model, optimizer, tree = trained_job()
    half = torch.nn.Linear(3, 2).to(torch.bfloat16)
    loaded = torch.optim.AdamW(half.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert {s["exp_avg"].dtype for s in loaded.state.values()} == {torch.bfloat16}  # what the note says
    assert {s["step"].dtype for s in loaded.state.values()} == {torch.float32}
    said = notes_of({**tree, "model": model.to(torch.bfloat16).state_dict()}, tmp_path, to)
    own = to in ("zero2", "megatron")  # whose optimizers keep fp32
    assert ("4 tensors of the optimizer are float32 beside bfloat16 weights" in said) == (not own)
    assert "beside" not in notes_of({**tree, "model": model.to(torch.float32).state_dict()}, tmp_path, to)


@pytest.mark.parametrize("to", ["accelerate", "trainer", "llamafactory", "verl"])
def test_rng_states_that_a_trainer_does_not_load_are_not_called_missing(to: str, tmp_path: Path) -> None:
    tree = {
        "model": {"w": torch.ones(4, 3)},
        "optim": {"state": {"w": {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
        "trainer": {"global_step": 3},
    }
    if to == "verl":
        del tree["optim"]  # its numbers would need a config
    torch.save(tree, tmp_path / "none.pt")
    torch.save({**tree, "rng": {"shard_0.0_0": {"cpu": torch.get_rng_state()}}}, tmp_path / "megatron.pt")
    said = {
        name: "; ".join(ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / f"{name}-{to}", to=to, world_size=2).notes)
        for name in ("none", "megatron")
    }
    assert "the source has no RNG state" in said["none"]
    assert "RNG states are not those that this trainer loads (rng.shard_0.0_0.cpu)" in said["megatron"], said


@pytest.mark.parametrize("to", ["lightning", "verl", "xtuner", "llamafactory", "trainer", "accelerate"])
def test_an_adapter_has_the_names_by_which_the_trainer_finds_it(to: str, tmp_path: Path) -> None:
    """Accelerate and Trainer save what PEFT gives them, and the others the state dict of the live module."""
    live = [f"base_model.model.{m}.lora_{x}.default.weight" for m in "qk" for x in ("A", "B", "magnitude_vector")]
    state = {n: {"exp_avg": torch.ones(4, 2), "exp_avg_sq": torch.ones(4, 2), "step": torch.tensor(3.0)} for n in live}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": live}]}
    torch.save({"model": {n: torch.ones(4, 2) for n in live}, "optim": optim}, tmp_path / "in.pt")
    saved = [n.replace(".default", "").replace("vector.weight", "vector") for n in live]
    source = tmp_path / "in.pt"
    (tmp_path / "out").mkdir()
    for number, folder_of in enumerate((to, "trainer", to)):  # from the live names, and from those that Trainer saves
        done = ckpttool.convert(
            source, tmp_path / "out" / str(number), to=folder_of, world_size=2, like=tmp_path / "in.pt"
        )
        assert done.verified and not done.dropped
        source = tmp_path / "out" / str(number)
        with ckpttool.open(source) as opened:
            found = {n.removeprefix("model.") for n in opened.checkpoint.tensors if n.startswith("model.")}
        assert found == set(saved if folder_of in ("trainer", "accelerate") else live)


def test_a_written_directory_is_compared_with_the_record_beside_its_files(tmp_path: Path) -> None:
    """Its .pt files carry digests of the tensors in them alone; random states and counters are in others."""
    job = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(job.parameters())
    job(torch.ones(1, 2)).sum().backward()
    adam.step()
    state = {"model": job.state_dict(), "optim": adam.state_dict(), "rng": {"torch": torch.arange(4)}, "step": 1}
    torch.save(state, tmp_path / "s.pt")
    ckpttool.convert(tmp_path / "s.pt", tmp_path / "t", to="trainer", world_size=1)
    assert ckpttool.verify(tmp_path / "t", read_data=True).recorded == "equal"
    counters = tmp_path / "t" / "trainer_state.json"
    whole = counters.read_text()
    counters.write_text(json.dumps(json.loads(whole) | {"global_step": 9}))
    with pytest.raises(ckpttool.CkpttoolError, match=r"trainer\.global_step|trainer\.step"):
        ckpttool.verify(tmp_path / "t", read_data=True)
    counters.write_text(whole)
    (tmp_path / "t" / "ckpttool.json").unlink()
    told = ckpttool.verify(tmp_path / "t", read_data=True)
    assert told.recorded == "equal" and any("were not compared" in note for note in told.notes)


# ------------------------------------------------------------------------------------------- random states, scaler, GPUs


def rng_state(**parts: Any) -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state(), **parts}


def with_rng(ranks: dict[str, Any], path: Path) -> Path:
    w = torch.ones(4, 3)
    optim = {"state": {"w": {"exp_avg": w, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": w}, "optim": optim, "scheduler": {"last_epoch": 3}, "step": 3, "rng": ranks}, path)
    return path


GPU = torch.arange(16, dtype=torch.uint8)
#: {trainer: (name of the file of rank 0 in a job of one rank and in one of more, what it calls the state of GPUs)}
RNG_FILES = {
    "accelerate": ("random_states_0.pkl", "random_states_0.pkl", "torch_cuda_manual_seed"),
    "trainer": ("rng_state.pth", "rng_state_0.pth", "cuda"),
    "llamafactory": ("rng_state/rank_0.pt", "rng_state/rank_0.pt", "accelerator"),
}


@pytest.mark.parametrize("to", RNG_FILES)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("saved", [1, [1], [1, 2], [1, 2, 3]])
def test_the_state_of_gpus_is_loaded_in_its_form_or_kept(to: str, world: int, saved: Any, tmp_path: Path) -> None:
    """Accelerate, LLaMA-Factory and a distributed Trainer hand it to set_rng_state_all, which takes a list, and a Trainer alone to
    set_rng_state, which takes a tensor. LLaMA-Factory stops where the list is longer than the GPUs that there are."""
    state = rng_state(cuda=[GPU + i for i in saved] if isinstance(saved, list) else GPU + saved)
    source = with_rng({str(r): state for r in range(world)}, tmp_path / "in.pt")
    done = ckpttool.convert(source, tmp_path / "out", to=to, world_size=world, like=source)
    assert done.verified and not done.dropped
    alone, several, key = RNG_FILES[to]
    found = torch.load(tmp_path / "out" / (alone if world == 1 else several), weights_only=False)
    one = to == "trainer" and world == 1
    fits = (saved in (1, [1]) if world == 1 else isinstance(saved, list)) or (not one and isinstance(saved, list))
    fits = fits and not (to == "llamafactory" and isinstance(saved, list) and len(saved) > world)
    assert (key in found) == fits
    notes = [n for n in done.notes if n.startswith("rng.0.cuda is the RNG state of")]
    assert len(notes) == (not fits), done.notes
    if fits:
        wanted = GPU + 1 if one else [GPU + i for i in (saved if isinstance(saved, list) else [saved])]
        assert same_value(found[key], wanted)
    with ckpttool.open(tmp_path / "out") as opened:
        kept = [t for n, t in opened.checkpoint.tensors.items() if n.startswith("rng.0.cuda")]
        assert len(kept) == (len(saved) if isinstance(saved, list) else 1)


def test_a_job_of_the_same_ranks_gets_the_states_of_all_gpus_of_its_nodes(tmp_path: Path) -> None:
    source = with_rng({r: rng_state(cuda=[GPU, GPU + 1, GPU + 2]) for r in "01"}, tmp_path / "in.pt")
    ckpttool.convert(source, tmp_path / "a", to="accelerate", world_size=2)
    ckpttool.convert(tmp_path / "a", tmp_path / "b", to="llamafactory", world_size=2)
    found = torch.load(tmp_path / "b" / "rng_state" / "rank_0.pt", weights_only=False)
    assert len(found["accelerator"]) == 3


@pytest.mark.parametrize("lacking", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("to", ["accelerate", "trainer"])
def test_an_rng_state_that_lacks_a_part_is_kept_beside_the_trainer_s_files(
    to: str, lacking: str, tmp_path: Path
) -> None:
    """Trainer stops with a KeyError in `_load_rng_state`, and Accelerate loads what comes before that part alone."""
    partial = rng_state()
    del partial[lacking]
    source = with_rng({"0": rng_state(), "1": partial}, tmp_path / "in.pt")
    done = ckpttool.convert(source, tmp_path / "out", to=to, world_size=2)
    assert any("RNG states of 1 of 2 ranks" in n for n in done.notes) and not done.dropped
    names = sorted(p.name for p in (tmp_path / "out").iterdir() if p.name.startswith("r"))
    assert names == [RNG_FILES[to][1]]
    with ckpttool.open(tmp_path / "out") as opened:
        assert {*opened.checkpoint.values, *opened.checkpoint.tensors} >= {f"rng.1.{p}" for p in partial}


@pytest.mark.parametrize("world", [1, 2])
def test_trainer_itself_loads_the_state_that_a_script_calls_torch(world: int, tmp_path: Path) -> None:
    state = rng_state()
    state["torch"] = state.pop("cpu")
    source = with_rng({str(r): state for r in range(2)}, tmp_path / "in.pt")
    done = ckpttool.convert(source, tmp_path / "out", to="trainer", world_size=world, like=source)
    assert done.verified and not done.dropped
    args = SimpleNamespace(world_size=world, process_index=0, parallel_mode=None)
    torch.rand(3), random.random(), np.random.rand()
    transformers.Trainer._load_rng_state(SimpleNamespace(args=args), str(tmp_path / "out"))  # type: ignore[arg-type]
    state["cpu"] = state.pop("torch")
    assert same_value(plain(rng_state()), plain(state))
    again = ckpttool.diff(source, tmp_path / "out")
    assert not (again.only_in_a or again.data) and not any(n.startswith("rng.") for n in again.only_in_b)


def test_olmo_core_s_random_states_are_those_of_trainer_without_the_versions(tmp_path: Path) -> None:
    source = TRAINERS / "olmo_core_w3" / "step3"
    done = ckpttool.convert(source, tmp_path / "out", to="trainer", world_size=3)
    assert done.verified and not done.dropped
    for rank in range(3):
        saved = torch.load(source / "train" / f"rank{rank}.pt", weights_only=False)["rng"]
        found = torch.load(tmp_path / "out" / f"rng_state_{rank}.pth", weights_only=False)
        for theirs, ours in {"python": "python", "numpy": "numpy", "torch": "cpu"}.items():
            assert same_value(plain(found[ours]), plain(saved[theirs]["state"]))
    assert not ckpttool.diff(source, tmp_path / "out").only_in_a


#: Other programs' scalers: DeepSpeed's DynamicLossScaler, Megatron-Core's DynamicGradScaler.
SCALERS = [
    {"dynamic": True, "cur_scale": 256.0, "cur_iter": 3},
    {"scale": 2.0, "growth_tracker": 1, "hysteresis_tracker": 2},
]


@pytest.mark.parametrize("to", ["accelerate", "trainer"])
def test_scaler_pt_is_written_of_a_grad_scaler_alone(to: str, tmp_path: Path) -> None:
    for i, saved in enumerate([SCALER, *SCALERS]):
        tree = torch.load(with_rng({}, tmp_path / "in.pt"))
        torch.save({**tree, "scaler": dict(saved)}, tmp_path / "in.pt")
        out = tmp_path / str(i)
        done = ckpttool.convert(tmp_path / "in.pt", out, to=to, world_size=2)
        assert not done.dropped and ("scaler.pt" in " ".join(done.notes)) == (i > 0 or to == "trainer")
        assert (out / "scaler.pt").exists() == (i == 0)
        with ckpttool.open(out) as opened:
            assert {n: v.data for n, v in opened.checkpoint.values.items() if n.startswith("scaler.")} == {
                f"scaler.{k}": x for k, x in saved.items()
            }
    accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    for kept in ("0", "1", "2"):
        transformers.Trainer._load_scaler(SimpleNamespace(accelerator=accelerator), str(tmp_path / kept))  # type: ignore[arg-type]
    assert accelerator.scaler.get_scale() == 2.0
    accelerator.scaler = None  # with bf16; what the note is about
    with pytest.raises(AttributeError):
        transformers.Trainer._load_scaler(SimpleNamespace(accelerator=accelerator), str(tmp_path / "0"))  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [False, True])
def test_lightning_finds_a_grad_scaler_under_the_name_of_its_plugin(version: bool, tmp_path: Path) -> None:
    """FSDPStrategy has FSDPPrecision, which hands the entry of its name to its scaler (lightning 2.6)."""
    tree = torch.load(with_rng({}, tmp_path / "in.pt"))
    own = {"extra": {"pytorch-lightning_version": "2.6.0"}} if version else {}
    for i, saved in enumerate([SCALER, *SCALERS]):
        torch.save({**tree, **own, "scaler": dict(saved)}, tmp_path / f"{i}.pt")
        done = ckpttool.convert(tmp_path / f"{i}.pt", tmp_path / str(i), to="lightning", world_size=2)
        meta = torch.load(tmp_path / str(i) / "meta.pt", weights_only=False)
        assert not done.dropped and meta.get("FSDPPrecision") == (None if i else saved)
        ckpttool.convert(tmp_path / str(i), tmp_path / f"{i}-again", to="lightning", world_size=1)
        meta = torch.load(tmp_path / f"{i}-again" / "meta.pt", weights_only=False)
        assert meta.get("FSDPPrecision") == (None if i else saved)
        assert ckpttool.diff(tmp_path / str(i), tmp_path / f"{i}-again").equal
        with ckpttool.open(tmp_path / str(i)) as opened:
            values = opened.checkpoint.values
            assert {n: v.data for n, v in values.items() if n.startswith(("scaler.", "extra.FSDP"))} == {
                f"scaler.{k}": x for k, x in saved.items()
            }


@pytest.mark.parametrize("plugin", ["MixedPrecision", "FSDPPrecision"])
@pytest.mark.parametrize("to", ["accelerate", "trainer"])
def test_a_scaler_of_lightning_is_in_scaler_pt(to: str, plugin: str, tmp_path: Path) -> None:
    tree = torch.load(with_rng({}, tmp_path / "in.pt"))
    torch.save({**tree, "extra": {plugin: dict(SCALER)}}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    assert not done.dropped and torch.load(tmp_path / "out" / "scaler.pt") == SCALER
    against = ckpttool.verify(tmp_path / "out", against=tmp_path / "in.pt", read_data=True).against
    assert against is not None and against["verdict"] == "equal"
    with ckpttool.open(tmp_path / "out") as opened:
        names = {n for n in opened.checkpoint.values if n.startswith(("scaler", "extra"))}
        assert names == {f"extra.{plugin}.{k}" for k in SCALER}


def adamw_job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fused_adam_state(path: Path) -> Path:
    """What a job has after a step of DeepSpeed's FusedAdam: its options, and steps that are integers."""
    model, optimizer = adamw_job()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer)
    for slots in optim["state"].values():
        slots["step"] = 1
    own = {"lr": 0.05, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    optim["param_groups"] = [own | {"params": optim["param_groups"][0]["params"]}]
    torch.save({"model": weights, "optim": optim, "step": 1}, path)
    return path


#: {trainer: (folder of the optimizer's dcp, its key there, whether its state dict is flattened by parameter)}
STRICT = {
    "accelerate": ("optimizer_0", "optimizer", False),
    "trainer": ("optimizer_0", "optimizer", False),
    "llamafactory": ("optimizer", None, False),
    "xtuner": ("weights", "optimizer", False),
    "lightning": ("", "optimizer_0", False),
    "torchtitan": ("", "optimizer", True),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("to", STRICT)
def test_a_job_with_adamw_loads_what_fused_adam_left(to: str, tmp_path: Path) -> None:
    """These trainers load by `dcp.load(get_optimizer_state_dict(...))`, which raises for an option that is not there."""
    done = ckpttool.convert(fused_adam_state(tmp_path / "in.pt"), tmp_path / "out", to=to, world_size=2)
    (note,) = [n for n in done.notes if "was taken for AdamW" in n]
    assert "amsgrad False" in note and "decoupled_weight_decay True" in note and not done.dropped
    assert "optim.param_groups.0.amsgrad" in done.added
    folder_of, key, flat = STRICT[to]
    model, optimizer = adamw_job()
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    dcp.load({key: state} if key else state, checkpoint_id=tmp_path / "out" / folder_of, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=how)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["amsgrad"], group["decoupled_weight_decay"]) == (0.05, False, True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert {int(slots["step"]) for slots in optimizer.state.values()} == {2}


def test_groups_with_options_of_torch_or_without_bias_correction_get_none(tmp_path: Path) -> None:
    tree = torch.load(fused_adam_state(tmp_path / "in.pt"))
    for i, own in enumerate(({"bias_correction": False}, {"momentum_decay": 0.1, "maximize": False})):
        group = {k: x for k, x in tree["optim"]["param_groups"][0].items() if k != "bias_correction"} | own
        torch.save({**tree, "optim": {**tree["optim"], "param_groups": [group]}}, tmp_path / f"{i}.pt")
        for to in ("accelerate", "dcp"):
            done = ckpttool.convert(tmp_path / f"{i}.pt", tmp_path / f"{i}-{to}", to=to, world_size=2)
            assert not any("amsgrad" in n for n in (*done.notes, *done.added))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("to", [*STRICT, "dcp"])
def test_a_job_with_adamw_loads_what_that_of_an_older_torch_left(to: str, tmp_path: Path) -> None:
    """Older releases have no decoupled_weight_decay in the groups, and still older ones no fused and differentiable."""
    tree = torch.load(fused_adam_state(tmp_path / "in.pt"))
    (group,) = tree["optim"]["param_groups"]
    del group["bias_correction"]
    group |= {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
    torch.save(tree, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    model, optimizer = adamw_job()
    if to == "dcp":
        assert any("lack differentiable, fused, decoupled_weight_decay, for which" in n for n in done.notes)
        ckpttool.load(model, optimizer, tmp_path / "out")
        return
    (note,) = [n for n in done.notes if "was taken for AdamW" in n]
    assert "(differentiable False, fused None, decoupled_weight_decay True)" in note
    folder_of, key, flat = STRICT[to]
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    dcp.load({key: state} if key else state, checkpoint_id=tmp_path / "out" / folder_of, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=how)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("to", ["accelerate", "torchtitan", "dcp"])
@pytest.mark.parametrize("kind", ["bitsandbytes", "SOAP", "schedule-free", "Adan", "OneBitAdam", "Lamb"])
def test_optimizers_other_than_adam_get_none_of_its_options(kind: str, to: str, tmp_path: Path) -> None:
    tree = torch.load(fused_adam_state(tmp_path / "in.pt"))
    if kind == "Lamb":
        tree["optim"]["param_groups"][0]["max_coeff"] = 10.0
    else:
        if kind != "OneBitAdam":
            del tree["optim"]["param_groups"][0]["bias_correction"]
        new = {
            "bitsandbytes": ("state1", "state2"),
            "SOAP": ("exp_avg", "exp_avg_sq", "GG", "Q"),
            "schedule-free": ("z", "exp_avg_sq"),
            "Adan": ("exp_avg", "exp_avg_sq", "exp_avg_diff"),
            "OneBitAdam": ("exp_avg", "exp_avg_sq", "worker_error"),
        }[kind]
        for fqn, slots in tree["optim"]["state"].items():
            tree["optim"]["state"][fqn] = {slot: slots["exp_avg_sq"].clone() for slot in new}
    torch.save(tree, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    assert not any("AdamW" in n or "amsgrad" in n for n in (*done.notes, *done.added))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_stays_as_it_is_and_says_how_a_job_with_adamw_loads_it(tmp_path: Path) -> None:
    done = ckpttool.convert(fused_adam_state(tmp_path / "in.pt"), tmp_path / "out", to="dcp", world_size=2)
    (note,) = [n for n in done.notes if "lack amsgrad, maximize," in n]
    assert "ckpttool.load(model, optimizer, DIR)" in note and "allow_partial_load=True" in note and not done.added
    for way in ("ckpttool", "partial", "strict"):
        model, optimizer = adamw_job()
        if way == "ckpttool":
            ckpttool.load(model, optimizer, tmp_path / "out")
        else:
            state = {"optim": get_optimizer_state_dict(model, optimizer)}
            planner = DefaultLoadPlanner(allow_partial_load=way == "partial")
            if way == "strict":
                with pytest.raises(CheckpointException, match=r"Missing key.*optim\.param_groups\.0\.amsgrad"):
                    dcp.load(state, checkpoint_id=tmp_path / "out", planner=planner, no_dist=True)
                continue
            dcp.load(state, checkpoint_id=tmp_path / "out", planner=planner, no_dist=True)
            set_optimizer_state_dict(model, optimizer, state["optim"])
        assert optimizer.param_groups[0]["lr"] == 0.05 and optimizer.param_groups[0]["amsgrad"] is False
        assert {int(slots["step"]) for slots in optimizer.state.values()} == {1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("to", STRICT)
def test_a_job_with_a_scheduler_loads_groups_that_had_none(to: str, tmp_path: Path) -> None:
    """A scheduler of torch puts initial_lr into the groups before the load, and DeepSpeed's and Megatron-Core's do
    not."""
    model, optimizer = sgd_job()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, optim = get_state_dict(model, optimizer)
    own: dict[str, Any] = {"scheduler": {"base_lrs": [0.5, 0.25], "last_epoch": 1}, "step": 1}
    torch.save({"model": weights, "optim": optim, **own}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    assert any("initial_lr" in n and "0.5, 0.25 was added" in n for n in done.notes) and not done.dropped
    folder_of, key, flat = STRICT[to]
    model, optimizer = sgd_job()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=how)
    dcp.load({key: state} if key else state, checkpoint_id=tmp_path / "out" / folder_of, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state, options=how)
    assert [(g["lr"], g["initial_lr"]) for g in optimizer.param_groups] == [(0.1, 0.5), (0.1, 0.25)]
    again = ckpttool.diff(tmp_path / "in.pt", tmp_path / "out")
    assert not again.only_in_a and not [n for n in again.data if n.startswith("optim.")]


def sgd_job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters())} for layer in model]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("scheduler", [{"last_batch_iteration": 2}, None])
def test_dcp_says_that_a_job_with_a_scheduler_asks_for_initial_lr(
    scheduler: dict[str, Any] | None, tmp_path: Path
) -> None:
    """A source without a scheduler is of a job that had none, and goes on so."""
    model, optimizer = sgd_job()
    weights, optim = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": optim, "step": 1} | ({"scheduler": scheduler} if scheduler else {})
    torch.save(tree, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=2)
    assert len([n for n in done.notes if "the param groups lack initial_lr" in n]) == (scheduler is not None)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    ckpttool.load(model, optimizer, tmp_path / "out")
    assert all(group["initial_lr"] == 0.1 for group in optimizer.param_groups)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("to", [*STRICT, "ddp", "verl", "dcp"])
def test_a_job_with_adamw_goes_on_at_the_step_that_fused_adam_had_in_a_group(to: str, tmp_path: Path) -> None:
    """FusedAdam of Apex and of TransformerEngine counts by group; torch's AdamW needs a step of each parameter."""
    tree = torch.load(fused_adam_state(tmp_path / "in.pt"))
    tree["optim"]["param_groups"][0]["step"] = 7
    for slots in tree["optim"]["state"].values():
        del slots["step"]
    torch.save(tree, tmp_path / "in.pt")
    layout, world = ("trainer", 1) if to == "ddp" else (to, 2)
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=layout, world_size=world)
    model, optimizer = adamw_job()
    if to == "dcp":
        assert any("the steps of the optimizer (7) are in its param groups alone" in n for n in done.notes)
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=tmp_path / "out", planner=planner, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        for slots in optimizer.state.values():
            slots["step"] = torch.tensor(7.0)
    else:
        assert "optim.state.0.weight.step" in done.added and any("counts its steps by" in n for n in done.notes)
        again = ckpttool.diff(tmp_path / "in.pt", tmp_path / "out")
        assert not again.only_in_a and not [n for n in again.data if n.startswith("optim.state.")]
    if to == "ddp":
        optimizer.load_state_dict(torch.load(tmp_path / "out" / "optimizer.pt"))
    elif to == "verl":
        own = torch.load(next((tmp_path / "out").rglob("optim_world_size_2_rank_0.pt")), weights_only=False)
        assert {slots["step"] for slots in own["state"].values()} == {7}
        return
    elif to != "dcp":
        folder_of, key, flat = STRICT[to]
        how = StateDictOptions(flatten_optimizer_state_dict=flat)
        saved = get_optimizer_state_dict(model, optimizer, options=how)
        dcp.load({key: saved} if key else saved, checkpoint_id=tmp_path / "out" / folder_of, no_dist=True)
        set_optimizer_state_dict(model, optimizer, saved, options=how)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert {int(slots["step"]) for slots in optimizer.state.values()} == {8}


def test_a_lightning_folder_stays_one_of_its_strategy(tmp_path: Path) -> None:
    """FSDPStrategy asks dcp for model.*, ModelParallelStrategy for state_dict.*."""
    source = FIXTURES / "fsdp2_w3" / "ckpt"
    keys = {"optim": "optimizer_0"}
    ckpttool.convert(source, tmp_path / "fsdp", to="dcp", world_size=2, keys=keys, only=["model", "optim"])
    done = ckpttool.convert(source, tmp_path / "mp.ckpt", to="lightning", world_size=2)
    assert any("FSDPStrategy asks for the weights under model" in note for note in done.notes)
    shutil.copy(tmp_path / "mp.ckpt" / "meta.pt", tmp_path / "fsdp")
    for name, key in (("fsdp", "model"), ("mp.ckpt", "state_dict")):
        again = ckpttool.convert(tmp_path / name, tmp_path / f"again {name}", to="lightning", world_size=3)
        names = dcp.FileSystemReader(tmp_path / f"again {name}").read_metadata().state_dict_metadata
        assert again.verified and {n.partition(".")[0] for n in names} == {key, "optimizer_0"}
