"""hf folders with a training state beside the weights: the whole state there and back, and nothing taken on trust; and
adapters, as PEFT itself saves and loads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_hub import Hub
from huggingface_hub.utils import close_session
from peers import FIXTURES, FLAT, ORIGINALS, Original, difference, files_of, load_hf
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.cli.main import app
from ckpttool.engine import planning
from ckpttool.engine.inspect import summarise
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported, UsageError
from ckpttool.storage import retries

WITHOUT_OPTIMIZER = ("safetensors", "hf_shards", "hf", "hf_with_index")
STATES = [o for o in [*ORIGINALS, *FLAT] if o.saved_as not in WITHOUT_OPTIMIZER and o.path.name != "views.pt"]
GROUPS = FIXTURES / "fsdp2_w2_groups" / "ckpt"
INDEX = "training_state/index.json"


def config_of(original: Original) -> str | None:
    """Where its config is; not that of the fused experts, of which transformers must be asked (tests/converters/test_hf.py)."""
    return original.config if original.case != "fsdp2_w3_moe" else None


@pytest.mark.parametrize("original", STATES, ids=[o.label for o in STATES])
def test_a_state_that_went_through_an_hf_folder_becomes_the_very_bytes_it_becomes_at_once(
    original: Original, tmp_path: Path
) -> None:
    done = ckpttool.convert(
        original.path, tmp_path / "hf", to="hf", options=ckpttool.HfOptions(include_optimizer=True, max_shard_bytes=60_000), config=config_of(original),
        verify=original.case.endswith(("tied", "w3", "w1")), **original.how,
    )  # fmt: skip
    assert not done.dropped
    assert {p.suffix for p in (tmp_path / "hf").rglob("*") if p.is_file()} == {".safetensors", ".json"}
    held = load_hf(tmp_path / "hf" / "training_state")
    assert not [n for n in held if n.startswith("model.")]
    wanted = {k.replace("optim.", "optim.state.", 1): t for k, t in original.truth().items() if k.startswith("optim.")}
    assert difference({n: held[n] for n in wanted if n in held}, wanted) == []
    ranks = json.loads((tmp_path / "hf" / INDEX).read_text())["source"]["world_size"]
    world = None if ranks else 2  # where the source has ranks, the folder knows how many
    for name, source, how in (("a", tmp_path / "hf", {}), ("b", original.path, original.how)):
        found = ckpttool.convert(source, tmp_path / name, to="dcp", world_size=world, verify=False, **how)
        assert found.digest == done.digest
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert [n for n in a if a[n] != b[n]] == []


def awkward() -> dict[str, Any]:
    """What makes trouble: dtypes that safetensors lacks, no dimension, no elements, dots and digits in keys."""
    bits = torch.arange(96, dtype=torch.uint8)
    return {
        "model": {"w": bits.view(torch.float32).reshape(4, 6).clone(), "extra_state": (1, 2)},
        "optim": {
            "state": {"w": {"exp_avg": torch.ones(4, 6, dtype=torch.bfloat16), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["w"]}],
        },
        "mine": {"a.b": {"1": torch.tensor(True)}, "list": [torch.empty(0, 4), {"x": torch.arange(6, dtype=torch.int16)}],
                 "wide": torch.complex(bits[:8].double(), bits[8:16].double()), "raw": b"\x00\xff", "odd": (1, None, "\u00fc")},
        "epoch": 7,
    }  # fmt: skip


def test_every_dtype_shape_and_key_survives(tmp_path: Path) -> None:
    torch.save(awkward(), tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "hf", to="hf", options=ckpttool.HfOptions(include_optimizer=True))
    ckpttool.convert(tmp_path / "hf", tmp_path / "y.pt")
    assert ckpttool.diff(tmp_path / "hf", tmp_path / "x.pt").equal
    wanted, found = (torch.load(tmp_path / n, weights_only=True) for n in ("x.pt", "y.pt"))
    assert repr(found) == repr(wanted)  # bit by bit is what digests were compared for
    assert load_file(tmp_path / "hf" / "training_state" / "state.safetensors")["extra.mine.wide"].dtype is torch.uint8


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    for state, text in (
        ({"\ud83d": 1}, "half of a surrogate pair"),
        ({"mine": {"s": ({},) * 240_000}}, "fill the memory"),
    ):
        torch.save({**awkward(), **state}, tmp_path / "x.pt")
        with pytest.raises(Unsupported, match=text):
            ckpttool.convert(
                tmp_path / "x.pt", tmp_path / "hf", to="hf", options=ckpttool.HfOptions(include_optimizer=True)
            )
        assert not (tmp_path / "hf").exists()


def test_weights_in_training_may_be_cast_and_the_rest_keeps_its_dtype(tmp_path: Path) -> None:
    ckpttool.convert(
        GROUPS,
        tmp_path / "hf",
        to="hf",
        options=ckpttool.HfOptions(include_optimizer=True),
        dtype="bf16",
        cast={"optim.*.exp_avg": "fp16"},
    )
    assert {t.dtype for t in load_hf(tmp_path / "hf").values() if t.is_floating_point()} == {torch.bfloat16}
    held = load_hf(tmp_path / "hf" / "training_state")
    assert {t.dtype for n, t in held.items() if n.endswith(".exp_avg")} == {torch.float16}
    assert {t.dtype for n, t in held.items() if n.endswith(".exp_avg_sq")} == {torch.float32}
    assert ckpttool.verify(tmp_path / "hf", read_data=True).recorded == "equal"


def test_without_a_training_state_the_optimizer_is_left_behind_and_said_so(tmp_path: Path) -> None:
    done = ckpttool.convert(GROUPS, tmp_path / "hf", to="hf")
    assert {name.partition(".")[0] for name, _, _ in done.dropped} == {"optim", "scheduler", "trainer", "rng", "extra"}
    assert not (tmp_path / "hf" / "training_state").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An hf folder with a training state in several shards."""
    out = tmp_path_factory.mktemp("folder") / "hf"
    ckpttool.convert(
        GROUPS,
        out,
        to="hf",
        options=ckpttool.HfOptions(include_optimizer=True, max_shard_bytes=60_000, allow_name_mismatch=True),
        config=str(FIXTURES / "fsdp2_w3" / "hf_ref"),  # the config has two layers, the state one
    )
    return out  # fmt: skip


def test_inspect_verify_and_only_know_of_all_components(folder: Path, tmp_path: Path) -> None:
    with ckpttool.open(folder) as opened, ckpttool.open(GROUPS) as source:
        mine, theirs = summarise(opened, folder), summarise(source, GROUPS)
        assert (mine.components, mine.step) == (theirs.components, theirs.step)
        assert opened.checkpoint.world_size == 2
    found = ckpttool.verify(folder, read_data=True, against=GROUPS)
    assert found.against is not None and (found.recorded, found.against["verdict"]) == ("equal", "equal")
    assert found.against["components"] == ["extra", "model", "optim", "rng", "scheduler", "trainer"]
    for only in (["optim"], ["trainer", "scheduler"], ["model"]):
        assert ckpttool.diff(folder, GROUPS, only=only).equal
    ckpttool.convert(
        folder,
        tmp_path / "again",
        to="hf",
        options=ckpttool.HfOptions(include_optimizer=True, allow_name_mismatch=True),
        only=["model", "trainer"],
    )
    assert sorted(os.listdir(tmp_path / "again" / "training_state")) == ["index.json", "values.json"]
    assert ckpttool.diff(tmp_path / "again", GROUPS, only=["model", "trainer"]).equal


def test_the_marker_is_the_last_file_of_the_training_state(tmp_path: Path) -> None:
    planned = planning.plan(
        GROUPS, tmp_path / "x", to="hf", options=ckpttool.HfOptions(include_optimizer=True, max_shard_bytes=60_000)
    )
    opened, draft = planned.opened, planned.draft
    opened.source.close()
    names = [f.name for f in draft.files]
    assert names[-3:] == ["training_state/values.json", INDEX, "model.safetensors.index.json"]
    assert all(f.size < 70_000 for f in draft.files if f.name.endswith(".safetensors"))


def test_the_whole_state_is_read_from_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path)
        hub.upload("org/name", folder)
        assert ckpttool.diff("hf://org/name", GROUPS).equal
        hub.commit("org/name", {"training_state/values.json": None})
        with pytest.raises(Corrupt, match=r"values\.json is missing"):
            ckpttool.open("hf://org/name")
        close_session()


# ------------------------------------------------------------------------------------------------- nothing on trust

Damage = Callable[[Path, dict[str, Any]], None]


def shard(at: Path, number: int = 1) -> Path:
    return sorted(at.glob("training_state/state-*"))[number - 1]


def resave(file: Path, index: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> None:
    """A shard with other tensors, whose length the index tells."""
    held = load_file(file)
    change(held)
    save_file(held, file, metadata={"format": "pt"})
    index["files"][file.name]["bytes"] = file.stat().st_size


def lost(at: Path, index: dict[str, Any]) -> None:
    shard(at, 2).unlink()


def extra(at: Path, index: dict[str, Any]) -> None:
    shutil.copy(shard(at), at / "training_state" / "state.safetensors")


def outside(at: Path, index: dict[str, Any]) -> None:
    index["files"]["../model.safetensors"] = {"bytes": 1}


def odd_name(at: Path, index: dict[str, Any]) -> None:
    (at / "training_state" / "state.pt").write_bytes(b"x")
    index["files"]["state.pt"] = {"bytes": 1}


def twice(at: Path, index: dict[str, Any]) -> None:
    name, data = next(iter(load_file(shard(at)).items()))
    resave(shard(at, 2), index, lambda held: held.update({name: data}))


def weight(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.update({"model.norm.weight": torch.ones(2)}))
    index["tensors"]["model.norm.weight"] = ["float32", [2], ["model", "norm.weight"]]


def unlisted(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.update({"extra.x": torch.ones(2)}))


def gone(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.popitem())


def other_shape(at: Path, index: dict[str, Any]) -> None:
    row = next(iter(index["tensors"].values()))
    row[1] = [*row[1], 1]


def other_dtype(at: Path, index: dict[str, Any]) -> None:
    next(r for r in index["tensors"].values() if r[0] == "float32")[0] = "int32"


def other_path(at: Path, index: dict[str, Any]) -> None:
    next(iter(index["tensors"].values()))[2][0] = "extra"


def stranger(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.update({"secrets.x": torch.ones(2)}))
    index["tensors"]["secrets.x"] = ["float32", [2], ["secrets", "x"]]


def inside(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.update({"trainer.step.x": torch.ones(2)}))
    index["tensors"]["trainer.step.x"] = ["float32", [2], ["trainer", "step", "x"]]


def same_as_value(at: Path, index: dict[str, Any]) -> None:
    resave(shard(at), index, lambda held: held.update({"trainer.step": torch.ones(2)}))
    index["tensors"]["trainer.step"] = ["float32", [2], ["trainer", "step"]]


def flipped(at: Path, index: dict[str, Any]) -> None:
    file = at / "training_state" / "values.json"
    file.write_bytes(file.read_bytes().replace(b'"data": 4', b'"data": 5'))


def spelled(at: Path, index: dict[str, Any]) -> None:
    file = at / "training_state" / "values.json"
    file.write_bytes(file.read_bytes().replace(b'"data": 4', b'"data":  4'))
    index["files"]["values.json"] = {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}


def value_unlisted(at: Path, index: dict[str, Any]) -> None:
    index["values"].pop()


def cut(at: Path, index: dict[str, Any]) -> None:
    shard(at).write_bytes(shard(at).read_bytes()[:-8])


def other_weights(at: Path, index: dict[str, Any]) -> None:
    index["weights"][-1] = "lm_head.bias"


def weights_twice(at: Path, index: dict[str, Any]) -> None:
    index["weights"].append(index["weights"][0])


def tied_to_nothing(at: Path, index: dict[str, Any]) -> None:
    index["tied"] = {index["weights"][0]: "nothing"}


def tied_list(at: Path, index: dict[str, Any]) -> None:
    index["tied"] = [1]


def no_files(at: Path, index: dict[str, Any]) -> None:
    index["files"] = {}


def newer(at: Path, index: dict[str, Any]) -> None:
    index["version"] = 2


def keyless(at: Path, index: dict[str, Any]) -> None:
    del index["origin"]


def odd_origin(at: Path, index: dict[str, Any]) -> None:
    index["origin"] = [[["trainer"], []]]


def unhashable(at: Path, index: dict[str, Any]) -> None:
    next(iter(index["tensors"].values()))[0] = ["float32"]


DAMAGES: list[tuple[Damage, type[CkpttoolError], str]] = [
    (lost, Corrupt, r"state-00002\S+ is missing"),
    (extra, Corrupt, r"state\.safetensors is not listed"),
    (outside, Unsafe, "leads out of training_state"),
    (odd_name, Corrupt, "not a file of a training state"),
    (twice, Corrupt, "is in state-00001\\S+ and in state-00002"),
    (weight, Corrupt, '"model.norm.weight" is a weight'),
    (unlisted, Corrupt, '"extra.x" is in the files, but not in index.json'),
    (gone, Corrupt, "is in index.json, but in no file"),
    (other_shape, Corrupt, "They are not from one save"),
    (other_dtype, Corrupt, "They are not from one save"),
    (other_path, Corrupt, "has the path"),
    (stranger, Corrupt, '"secrets.x" is of no component'),
    (inside, Corrupt, '"trainer.step.x" is of no component, or lies in another'),
    (same_as_value, Corrupt, "a value has the name of a tensor"),
    (flipped, Corrupt, r"values\.json was altered"),
    (spelled, Corrupt, "not spelled as ckpttool spells"),
    (value_unlisted, Corrupt, "other values than index.json lists"),
    (cut, Corrupt, "not what index.json says"),
    (other_weights, Corrupt, 'with other weights than lie beside it: 2 names differ, first "lm_head.bias"'),
    (weights_twice, Corrupt, "one is there twice"),
    (tied_to_nothing, Corrupt, "tied weights that are not listed"),
    (tied_list, Corrupt, "tied weights that are not listed"),
    (no_files, Corrupt, r"does not list values\.json"),
    (newer, Unsupported, "version 2"),
    (keyless, Corrupt, "not an index of a training state"),
    (odd_origin, Corrupt, "is not a path"),
    (unhashable, Corrupt, "is damaged"),
]


@pytest.mark.parametrize(("damage", "error", "text"), DAMAGES, ids=[d.__name__ for d, _, _ in DAMAGES])
def test_what_does_not_agree_is_refused(
    damage: Damage, error: type[CkpttoolError], text: str, folder: Path, tmp_path: Path
) -> None:
    at = tmp_path / "hf"
    shutil.copytree(folder, at)
    index = json.loads((at / INDEX).read_text())
    damage(at, index)
    (at / INDEX).write_text(json.dumps(index))
    with pytest.raises(error, match=text), ckpttool.open(at) as opened:
        opened.locate()


def test_files_without_their_index_a_key_twice_and_links_that_lead_out_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("a", "b", "c", "d"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "a" / INDEX).unlink()
    with pytest.raises(Corrupt, match=r"has no index\.json"):
        ckpttool.open(tmp_path / "a")
    text = (tmp_path / "b" / INDEX).read_text()
    (tmp_path / "b" / INDEX).write_text(text.replace('"version":1', '"version":1,"version":1'))
    with pytest.raises(Unsafe, match="is there twice"):
        ckpttool.open(tmp_path / "b")
    file = shard(tmp_path / "c")
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsafe, match="outside the checkpoint's folder"):
        ckpttool.open(tmp_path / "c")
    (tmp_path / "d" / INDEX).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(Unsafe):
        ckpttool.open(tmp_path / "d")


def test_keys_of_a_tree_that_do_not_lead_back_are_not_put_into_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    index = json.loads((folder / INDEX).read_text())
    index["origin"] = [[["trainer"], ["model"]]]
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    assert ckpttool.diff(tmp_path / "hf", GROUPS).equal
    ckpttool.convert(tmp_path / "hf", tmp_path / "x.pt")
    assert ckpttool.diff(tmp_path / "x.pt", GROUPS).equal


# --------------------------------------------------------------------------------------------------------- adapters


def lora_state(name: str = "odd-name") -> dict[str, torch.Tensor]:
    """What PEFT's model has in memory, with a base model and a second adapter around the one that is meant."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    names = {
        f"{layer}.base_layer.weight": None, f"{layer}.lora_A.{name}.weight": f"{layer}.lora_A.weight",
        f"{layer}.lora_B.{name}.weight": f"{layer}.lora_B.weight", "base_model.model.lora_head.weight": None,
        "base_model.model.lm_head.original_module.weight": None,
        f"base_model.model.lm_head.modules_to_save.{name}.weight": "base_model.model.lm_head.weight",
    }  # fmt: skip
    return {k: torch.full((2, 3), float(i)) for i, k in enumerate(names)}


def adapter_config(at: Path, **other: Any) -> str:
    at.mkdir(exist_ok=True)
    said = {"peft_type": "LORA", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], **other}
    (at / "adapter_config.json").write_text(json.dumps(said))
    return str(at)


def test_an_adapter_comes_from_any_layout_under_the_names_of_its_file(tmp_path: Path) -> None:
    torch.save({"model": lora_state(), "optim": awkward()["optim"], "step": 3}, tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=3)
    adapter_config(tmp_path)  # in the folder above the checkpoint
    done = ckpttool.convert(
        tmp_path / "dcp", tmp_path / "out", to="hf", options=ckpttool.HfOptions(adapter=True), dtype="bf16"
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "adapter_model.safetensors", "ckpttool.json"]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {k: (t.dtype, float(t[0, 0])) for k, t in found.items()} == {
        f"{layer}.lora_A.weight": (torch.bfloat16, 1.0), f"{layer}.lora_B.weight": (torch.bfloat16, 2.0),
        "base_model.model.lm_head.weight": (torch.bfloat16, 5.0),
    }  # fmt: skip
    assert any('the adapter "odd-name" alone: 3 tensors; 9 others are left behind' in n for n in done.notes), done.notes
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"
    again = ckpttool.convert(tmp_path / "out", tmp_path / "again", to="hf", options=ckpttool.HfOptions(adapter=True))
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out") and again.digest == done.digest


def test_adapters_that_are_not_there_or_not_clear_are_refused(tmp_path: Path) -> None:
    config = adapter_config(tmp_path / "config")
    state = lora_state()

    def refused(
        model: dict[str, torch.Tensor], text: str, error: type[CkpttoolError] = Unsupported, **how: Any
    ) -> None:
        torch.save({"model": model}, tmp_path / "x.pt")
        with pytest.raises(error, match=text):
            ckpttool.convert(
                tmp_path / "x.pt",
                tmp_path / "out",
                **{"to": "hf", "options": ckpttool.HfOptions(adapter=True), "config": config, **how},
            )
        assert not (tmp_path / "out").exists()

    refused({"w": torch.ones(2)}, "has no adapter")
    refused({"w": torch.ones(2)}, "has no adapter.*ckpttool convert SRC DST --to hf", config=None)
    refused(state, r"beside the source there is no adapter_config\.json", config=None)
    refused(state, r"has no adapter_config\.json", config=str(FIXTURES / "hf_llama" / "ckpt"))
    refused({**state, **lora_state("b")}, r"holds 2 adapters \(b, odd-name\)")
    refused(state, "describes a 'VERA' adapter", config=adapter_config(tmp_path / "vera", peft_type="VERA"))
    refused(state, "describes a 'None' adapter", config=adapter_config(tmp_path / "none", peft_type=None))
    refused(
        state,
        "trainable_token_indices",
        Corrupt,
        config=adapter_config(tmp_path / "tokens", trainable_token_indices=[1]),
    )
    refused({**state, "base_model.model.q.lora_new.odd-name.weight": torch.ones(2)}, "fits no LORA adapter")
    refused(state, "does not apply to dcp", UsageError, to="dcp")
    # the directories of trainers leave out the adapter's name
    unnamed = {n.replace("A.odd-name", "A").replace("B.odd-name", "B"): t for n, t in state.items()}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in unnamed
    for model in (state, unnamed):
        torch.save({"model": model}, tmp_path / "x.pt")
        ckpttool.convert(
            tmp_path / "x.pt",
            tmp_path / f"out{len(os.listdir(tmp_path))}",
            to="hf",
            options=ckpttool.HfOptions(adapter=True),
            config=config,
        )
    one, other = (files_of(tmp_path / n) for n in sorted(os.listdir(tmp_path)) if n.startswith("out"))
    assert one == other
    both = {**state, **lora_state("default")}
    torch.save({"model": both}, tmp_path / "x.pt")
    done = ckpttool.convert(
        tmp_path / "x.pt", tmp_path / "out", to="hf", options=ckpttool.HfOptions(adapter=True), config=config
    )
    assert any('the adapter "default" alone' in n for n in done.notes)


def test_the_command_line_has_both(tmp_path: Path) -> None:
    torch.save({"model": lora_state(), "step": 3}, tmp_path / "x.pt")
    config = adapter_config(tmp_path / "config")
    args = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "out"), "--to", "hf", "--dry-run", "--json"]
    done = CliRunner().invoke(_command(), [*args, "--adapter", "--config", config])
    assert [f["name"] for f in json.loads(done.stdout)["files"]] == ["adapter_model.safetensors", "adapter_config.json"]
    done = CliRunner().invoke(_command(), [*args, "--include-optimizer"])
    assert [f["name"] for f in json.loads(done.stdout)["files"]] == [
        "model.safetensors", "training_state/values.json", INDEX,
    ]  # fmt: skip
    assert json.loads(done.stdout)["dropped"] == []


def _command() -> Any:
    import typer.main

    return typer.main.get_command(app)


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    import warnings

    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("peft", reason="needs peft")


def tiny(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False, attention_bias=True,
    ))  # fmt: skip


def adapters(peft: Any) -> dict[str, tuple[Any, str]]:
    def lora(**how: Any) -> Any:
        return peft.LoraConfig(r=4, task_type="CAUSAL_LM", **how)

    return {
        "modules to save": (
            lora(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head", "norm"]),
            "my_odd-name",
        ),
        "all linear": (lora(target_modules="all-linear", use_rslora=True), "default"),
        "dora": (lora(target_modules=["q_proj", "k_proj"], use_dora=True), "default"),
        "embeddings": (lora(target_modules=["q_proj", "embed_tokens", "lm_head"]), "default"),
        "pattern": (lora(target_modules=r".*(q_proj|embed_tokens)"), "default"),
        "all biases": (lora(target_modules=["q_proj"], bias="all"), "default"),
        "its biases": (lora(target_modules=["q_proj"], bias="lora_only", lora_bias=True), "other"),
        "ia3": (peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "default"),
        "loha": (peft.LoHaConfig(r=4, target_modules=["k_proj"]), "x"),
        "lokr": (peft.LoKrConfig(r=4, target_modules=["k_proj"]), "default"),
        "hra": (peft.HRAConfig(r=4, target_modules=["k_proj"]), "default"),
    }


@pytest.mark.filterwarnings("ignore")
def test_the_file_is_that_of_peft_byte_for_byte_and_peft_loads_it(peft: Any, tmp_path: Path) -> None:
    for label, (config, name) in adapters(peft).items():
        at = tmp_path / label
        model = peft.get_peft_model(tiny(0), config, adapter_name=name)
        for p in model.parameters():
            torch.nn.init.normal_(p)
        model.save_pretrained(at / "theirs")
        theirs = at / "theirs" if name == "default" else at / "theirs" / name
        wrapped, bare = dict(model.state_dict()), peft.get_peft_model_state_dict(model, adapter_name=name)
        for given, state in {"wrapped": wrapped, "bare": bare}.items():
            torch.save({"model": state, "step": 3}, at / f"{given}.pt")
            ckpttool.convert(
                at / f"{given}.pt",
                at / given,
                to="hf",
                options=ckpttool.HfOptions(adapter=True),
                config=str(theirs),
                verify=given == "wrapped",
            )
            found, wanted = files_of(at / given), files_of(theirs)
            assert sorted(found) == ["adapter_config.json", "adapter_model.safetensors"]
            assert [n for n in found if found[n] != wanted[n]] == [], (label, given)
    for label in ("modules to save", "embeddings"):
        at = tmp_path / label
        loaded = peft.PeftModel.from_pretrained(tiny(1), at / "wrapped", adapter_name="z")
        wanted = {f"{k}": t for k, t in load_file(at / "wrapped" / "adapter_model.safetensors").items()}
        assert difference(dict(peft.get_peft_model_state_dict(loaded, adapter_name="z")), wanted) == []
