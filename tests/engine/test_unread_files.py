"""Files of a checkpoint that a layout does not read are named by every command, and a conversion stops at them."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, ranks_for
from safetensors.torch import save_file
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.main import app
from ckpttool.engine import conversion, opening, verification
from ckpttool.engine.discover import unread_files
from ckpttool.engine.inspect import inspect
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.hub.push import push
from ckpttool.index.checkpoint import Checkpoint, Value, find_ranks_without_rng_state

DCP = FIXTURES / "fsdp2_w2_groups" / "ckpt"
ZERO3 = FIXTURES / "zero3_w3_groups" / "ckpt"
LORA = FIXTURES / "trainer_ddp_lora_w2" / "ckpt" / "checkpoint-3"  # Trainer of transformers 5.23, two ranks, DDP
OTHERS = ("full_w1", "trainer_ddp_lora_w2")  # files that are checkpoints each; a folder in the folder
WEIGHTS = {"model.a.weight": torch.arange(131.0), "model.b.weight": torch.ones(3, 2).bfloat16()}
OPTIMIZER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(131)}},
    "param_groups": [{"params": [0, 1]}],
}


def bytes_at(path: Path, n: int = 9) -> None:
    """A file whose content nobody may look at: no pickle, no tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * n)


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    save_file(WEIGHTS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def trainer(path: Path, optimizer: str) -> Path:
    """Files that trainers write beside weights, without trainer_state.json, by which HF Trainer's own folder is known."""
    model_folder(path)
    for name in (optimizer, "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin", "scaler.pt"):
        bytes_at(path / name)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                 "special_tokens_map.json", "chat_template.jinja", "README.md", "LICENSE", ".gitattributes"):  # fmt: skip
        (path / name).write_text("{}")
    return path


def dcp_into(path: Path) -> Path:
    shutil.copytree(DCP, path)
    return path


def rows(path: Path, **how: Any) -> dict[str, tuple[int | None, str, str]]:
    with opening.open(path, **how) as opened:
        return {r.name: (r.bytes, r.what, r.component) for r in opened.checkpoint.unread}


def stops(path: Path, tmp_path: Path, to: str = "dcp", **how: Any) -> str:
    """The message of a conversion that stops and leaves nothing."""
    out = tmp_path / "out" / "x"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(Unsupported, match="does not include these files") as e:
        conversion.convert(path, out, to=to, **ranks_for(to, 2), **how)
    assert not list(out.parent.iterdir())
    return str(e.value)


@pytest.mark.parametrize("optimizer", ["optimizer.bin", "optimizer.pt"])
@pytest.mark.parametrize("to", ["dcp", "full", "zero3"])
def test_a_trainer_s_folder_stops_and_names_its_optimizer(optimizer: str, to: str, tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", optimizer)
    said = stops(source, tmp_path, to)
    for word in (f"{optimizer} (9 B, optimizer)", "scheduler.pt (9 B, scheduler)", "rng_state_0.pth and 1 more (18 B, RNG)",
                 "scaler.pt",  "drop=True", "only=['model']", str(source)):  # fmt: skip
        assert word in said
    assert "training_args.bin" not in said and "tokenizer" not in said


def test_drop_goes_on_and_lists_them_everywhere(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    done = conversion.convert(source, tmp_path / "out", to="dcp", world_size=2, drop=True)
    gone = {"optimizer.bin", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "scaler.pt"}
    assert {n for n, _, _ in done.dropped} == gone
    assert {r["name"] for r in done.not_read} == gone | {"training_args.bin"}
    record = json.loads((tmp_path / "out" / "ckpttool.json").read_text())
    assert {n for n, _, _ in record["not_carried"]} == gone
    assert verification.verify(tmp_path / "out", read_data=True).recorded == "equal"
    assert ckpttool.diff(source, tmp_path / "out").equal


def test_what_only_and_hf_ask_for_is_not_stopped(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.pt")
    done = conversion.convert(source, tmp_path / "a", to="dcp", world_size=2, only=["model"])
    assert not done.dropped and done.not_read
    done = conversion.convert(source, tmp_path / "b", to="hf")
    assert not done.dropped and any("optimizer.pt" in n for n in done.notes)
    assert "optimizer.pt" in stops(source, tmp_path, "hf", options=ckpttool.HfOptions(include_optimizer=True))


def test_inspect_names_them_and_never_says_that_there_is_no_optimizer(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    found = inspect(source)
    assert {
        "name": "optimizer.bin",
        "bytes": 9,
        "what": "optimizer",
        "component": "optim",
        "damaged": False,
    } in found.not_read
    assert any("optimizer.bin" in text for text in found.missing)
    assert not any("no optimizer state" in text for text in found.missing)
    (source / "optimizer.bin").rename(source / "state.pt")
    assert not any("a new optimizer" in text for text in inspect(source).missing)
    os.unlink(source / "state.pt")
    assert any("a new optimizer" in text for text in inspect(source).missing), "now there is none"


def test_the_real_folder_of_a_trainer_with_an_adapter(tmp_path: Path) -> None:
    assert {n: c for n, (_, _, c) in rows(LORA).items()} == {"training_args.bin": ""}, "the others are parts of it"
    as_hf = rows(LORA, source_layout="hf")
    assert as_hf["optimizer.pt"] == (os.path.getsize(LORA / "optimizer.pt"), "optimizer", "optim")
    assert "optimizer.pt (16.2 kB, optimizer)" in stops(LORA, tmp_path, source_layout="hf")
    done = conversion.convert(LORA, tmp_path / "hf", to="hf", options=ckpttool.HfOptions(adapter=True))
    assert done.tensors == 8 and {why for _, _, why in done.dropped} == {"as hf keeps it"}
    assert all(name.startswith(("optim.", "scheduler.", "rng.", "trainer.")) for name, _, _ in done.dropped)


@pytest.mark.parametrize("harm", [False, True])
def test_peft_s_copy_of_an_adapter_stops_nothing_where_the_weights_have_it(harm: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    q, head = "base_model.model.q_proj", "base_model.model.lm_head"
    adapter = {
        f"{q}.lora_A.weight": torch.ones(2, 6),
        f"{q}.lora_B.weight": torch.zeros(5, 2),
        f"{head}.weight": torch.ones(7, 6),
    }
    live = {f"{q}.lora_A.default.weight": torch.ones(2, 6), f"{q}.lora_B.default.weight": torch.zeros(5, 2)}
    live |= {f"{head}.modules_to_save.default.weight": torch.ones(7, 6), f"{q}.base_layer.weight": torch.ones(5, 6)}
    torch.save(live, folder / "pytorch_model_fsdp.bin")
    trained = list(live)[:3]
    moments = {n: {"exp_avg": live[n] * 2} for n in trained}
    torch.save({"state": moments, "param_groups": [{"lr": 0.1, "params": trained}]}, folder / "optimizer.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'
    )
    if harm:
        adapter[f"{q}.lora_B.weight"] = torch.zeros(5, 3)
    save_file(adapter, folder / "adapter_model.safetensors")
    assert rows(folder)["adapter_model.safetensors"][2] == ("adapter" if harm else "")
    if harm:
        assert "adapter_model.safetensors" in stops(folder, tmp_path)
    else:
        assert conversion.convert(folder, tmp_path / "out", to="dcp", world_size=2).tensors == 7


@pytest.mark.slow
def test_commands_print_them(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    out = str(tmp_path / "out")
    for command in (["verify", source], ["digest", source], ["diff", source, source], ["convert", source, out, "--to", "hf", "--dry-run"],
                    ["convert", source, out, "--to", "dcp", "-n", "2", "--drop"], ["inspect", source]):  # fmt: skip
        done = CliRunner().invoke(app, [str(a) for a in command])
        assert done.exit_code == 0, done.output
        assert "not read, so not carried: optimizer.bin (9 B, optimizer)" in done.output.replace("\n", ""), command
    for command in (["verify", source], ["digest", source], ["inspect", source], ["convert", source, out + "2", "--to", "dcp", "-n", "2", "--drop"],
                    ["convert", source, out + "9", "--to", "dcp", "-n", "2", "--drop", "--dry-run"]):  # fmt: skip
        said = json.loads(CliRunner().invoke(app, [*(str(a) for a in command), "--json"]).stdout)
        assert "optimizer.bin" in {r["name"] for r in said["not_read"]}, command
    done = CliRunner().invoke(app, ["convert", str(source), out + "3", "--to", "dcp", "-n", "2", "--dry-run"])
    assert isinstance(done.exception, Unsupported), "a dry run stops where the run would"
    quiet = CliRunner().invoke(app, ["verify", str(source), "-q"])
    assert "not read" not in quiet.output


@pytest.mark.slow
def test_an_export_stops_and_drop_lets_it_go_on(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    command = ["audit", "export", str(source), str(tmp_path / "a.tar.zst"), "--no-ledger"]
    assert isinstance(CliRunner().invoke(app, command).exception, Unsupported)
    done = CliRunner().invoke(app, [*command, "--drop", "--json"])
    assert done.exit_code == 0 and any(r["name"] == "optimizer.bin" for r in json.loads(done.stdout)["not_read"])


def test_a_push_of_the_whole_state_stops_before_the_hub_is_asked(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    with pytest.raises(Unsupported, match=r"optimizer\.bin"):
        push(str(source), "hf://org/name", options=ckpttool.HfOptions(include_optimizer=True))


def test_a_live_job_is_told(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, source / "model.safetensors")
    bytes_at(source / "optimizer.pt")
    done = ckpttool.load(torch.nn.Linear(3, 2), None, source)
    assert any("optimizer.pt (9 B, cannot be read" in n for n in done.notes)


# ------------------------------------------------------------------------------------------------- where they may lie


def test_accelerate_s_folders_of_model_and_optimizer(tmp_path: Path) -> None:
    step = tmp_path / "step"
    model = dcp_into(step / "pytorch_model_fsdp_0")
    with opening.open(model) as opened:  # as Accelerate has it: no optimizer in this one
        assert not opened.checkpoint.unread
    conversion.convert(DCP, step / "pytorch_model_fsdp_1", to="dcp", only=["model"])
    shutil.rmtree(model)
    (step / "pytorch_model_fsdp_1").rename(model)
    dcp_into(step / "optimizer_0")
    for name in ("scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "custom_checkpoint_0.pkl", "other.pt"):
        bytes_at(step / name)
    found = rows(model)
    size = sum(f.stat().st_size for f in (step / "optimizer_0").iterdir())
    assert found["../optimizer_0/"] == (size, "optimizer", "optim")
    assert set(found) == {"../optimizer_0/", "../scheduler.bin", "../random_states_0.pkl", "../random_states_1.pkl",
                          "../custom_checkpoint_0.pkl"}  # fmt: skip
    assert "../optimizer_0/" in stops(model, tmp_path)


def test_accelerate_s_files_of_model_and_optimizer(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model_fsdp.bin")
    torch.save(OPTIMIZER, tmp_path / "optimizer.bin")
    for name in ("scheduler.bin", "random_states_0.pkl", "scaler.pt", "dl_state_dict.bin"):
        bytes_at(tmp_path / name)
    found = rows(tmp_path / "pytorch_model_fsdp.bin")
    assert [c for _, _, c in found.values()] == ["optim", "scheduler", "scaler", "rng", "dataloader"]
    assert "optimizer.bin" in stops(tmp_path / "pytorch_model_fsdp.bin", tmp_path)


def test_lightning_s_meta(tmp_path: Path) -> None:
    source = dcp_into(tmp_path / "step3.ckpt")
    bytes_at(source / "meta.pt")
    assert rows(source)["meta.pt"][2] == "trainer"
    assert "meta.pt" in stops(source, tmp_path)


def test_torchtune_s_recipe_state_is_that_of_the_last_epoch(tmp_path: Path) -> None:
    for k in (0, 1, 10):
        model_folder(tmp_path / f"epoch_{k}")
    bytes_at(tmp_path / "recipe_state" / "recipe_state.pt")
    assert not rows(tmp_path / "epoch_0") and not rows(tmp_path / "epoch_1")
    assert rows(tmp_path / "epoch_10")["../recipe_state/recipe_state.pt"][0] == 9
    assert "recipe_state.pt (9 B, cannot be read" in stops(tmp_path / "epoch_10", tmp_path)
    bytes_at(tmp_path / "epoch_0" / "adapter_model.pt")
    assert "adapter_model.pt (9 B, cannot be read" in stops(tmp_path / "epoch_0", tmp_path)


@pytest.mark.parametrize("tag", [True, False])
def test_a_deepspeed_save_in_a_trainer_s_folder(tag: bool, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(ZERO3, source)
    name = (source / "latest").read_text()
    shutil.copytree(source / name, source / "global_step9")  # another save
    for other in ("rng_state_0.pth", "rng_state_1.pth", "training_args.bin", "random.bin"):
        bytes_at(source / other)
    before = rows(ZERO3 / name if tag else ZERO3)
    assert before == {}
    found = rows(source / name) if tag else rows(source)
    wanted = (
        {"../rng_state_0.pth", "../rng_state_1.pth"}
        if tag
        else {"rng_state_0.pth", "rng_state_1.pth", "training_args.bin", "random.bin"}
    )
    assert set(found) == wanted
    if tag:
        assert "rng_state_0.pth and 1 more" in stops(source / name, tmp_path)
    else:  # the trainer's own files are read, and nine bytes are no RNG state
        assert "rng_state_1.pth (9 B, cannot be read" in stops(source, tmp_path)


def test_verl_s_data_loader_and_olmo_s_progress(tmp_path: Path) -> None:
    actor = dcp_into(tmp_path / "global_step_4" / "actor")
    bytes_at(tmp_path / "global_step_4" / "data.pt")
    bytes_at(tmp_path / "global_step_4" / "unrelated.pt")
    assert set(rows(actor)) == {"../data.pt"}
    model = dcp_into(tmp_path / "step3" / "model_and_optim")
    bytes_at(tmp_path / "step3" / "train" / "rank0.pt")
    assert set(rows(model)) == {"../train/"}


def test_a_file_under_no_known_name_in_the_checkpoint_s_own_folder(tmp_path: Path) -> None:
    source = dcp_into(tmp_path / "a")
    bytes_at(source / "my_state.pkl")
    bytes_at(source / "__9_0.distcp")
    bytes_at(source / "notes.json")
    found = rows(source)
    assert {n: c for n, (_, _, c) in found.items()} == {"my_state.pkl": "extra", "__9_0.distcp": "", "notes.json": ""}
    assert "my_state.pkl (9 B, unknown)" in stops(source, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("numbered", [False, True])
def test_another_whole_checkpoint_of_the_same_model_is_listed_and_stops_nothing(numbered: bool, tmp_path: Path) -> None:
    source = dcp_into(tmp_path / "a")
    with ckpttool.open(source) as opened:
        model = {
            n.removeprefix("model."): torch.zeros(t.shape)
            for n, t in opened.checkpoint.tensors.items()
            if n[:6] == "model."
        }
    state = {i if numbered else n: {"exp_avg": torch.zeros_like(t)} for i, (n, t) in enumerate(model.items())}
    whole = {"model": model, "optim": {"state": state, "param_groups": [{"params": list(state)}]}}
    torch.save(whole, source / "ckpt.pt")
    assert rows(source)["ckpt.pt"][1:] == ("another checkpoint of the same model", "")
    done = ckpttool.convert(source, tmp_path / "converted", to="dcp", world_size=2)
    assert any("ckpt.pt" in n for n in done.notes) and not done.dropped
    others = {
        "ema.pt": model, "state.pt": {"step": 3, "kept": torch.zeros(99)}, "small.pt": whole | {"model": {"w": torch.zeros(999)}},
    }  # fmt: skip
    for name, tree in others.items():  # averages are state, and so is anything small
        torch.save(tree, source / name)
        assert rows(source)[name][1:] == ("unknown", "extra")
        assert f"{name} (" in stops(source, tmp_path)
        (source / name).unlink()


def test_in_an_object_store_the_listing_tells(tmp_path: Path) -> None:
    import fsspec

    store, name = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    step = trainer(tmp_path / "checkpoint-3", "optimizer.pt")
    dcp_into(step / "pytorch_model_fsdp_0")
    bytes_at(step / "optimizer_0" / "x.distcp", 7)
    store.put(str(step), name, recursive=True)
    try:
        for path in (step, step / "model.safetensors", step / "pytorch_model_fsdp_0"):
            how: dict[str, Any] = {"source_layout": "hf"} if path == step else {}
            there = opening.open(f"memory:/{name}/{path.relative_to(step)}".removesuffix("/."), **how)
            with there, opening.open(path, **how) as here:
                assert there.checkpoint.unread == here.checkpoint.unread != []
                assert set(there.source.identities()) == set(here.source.identities()), "nothing else was looked at"
    finally:
        store.rm(name, recursive=True)


# ------------------------------------------------------------------------------------------------------ false alarms


def test_downloads_and_steps_side_by_side_are_not_one_checkpoint(tmp_path: Path) -> None:
    for name in ("model.pt", "step1.pt", "step2.pt"):
        torch.save({"model": WEIGHTS}, tmp_path / name)
    for name in ("somebody.pt", "resnet50.pth", "x.pkl", "training_args.bin", "model.safetensors"):
        bytes_at(tmp_path / name)
    for name in ("model.pt", "step1.pt"):
        assert rows(tmp_path / name) == {}


def test_an_optimizer_file_beside_a_file_that_has_an_optimizer_is_not_its_own(tmp_path: Path) -> None:
    conversion.convert(DCP, tmp_path / "step.pt", to="full")
    bytes_at(tmp_path / "optimizer.pt")
    assert rows(tmp_path / "step.pt") == {}


def test_a_scheduler_that_the_checkpoint_has_is_listed_and_stops_nothing(tmp_path: Path) -> None:
    source = dcp_into(tmp_path / "a")
    bytes_at(source / "optimizer.pt")
    assert rows(source) == {"optimizer.pt": (9, "optimizer", "")}
    conversion.convert(source, tmp_path / "out", to="dcp")


def test_what_is_published_with_weights_stops_nothing(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.gguf", "consolidated.00.pth", "training_args.bin",
                 "onnx/model.onnx", "onnx/weight.bin", "original/consolidated.00.pth", "runs/events.out.tfevents.1",
                 "checkpoint-500/optimizer.pt", "checkpoint-500/model.safetensors", "all_results.json"):  # fmt: skip
        bytes_at(source / name)
    (source / "trainer_state.json").write_text('{"global_step": 500}')  # which is read
    found = rows(source)
    assert set(found) == {"pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.gguf", "consolidated.00.pth",
                          "training_args.bin", "onnx/", "original/"}  # fmt: skip
    done = conversion.convert(source, tmp_path / "out", to="dcp", world_size=2)
    assert not done.dropped


def test_a_snapshot_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    model_folder(blobs)
    bytes_at(blobs / "scheduler.pt")
    snapshot.mkdir(parents=True)
    for f in blobs.iterdir():
        (snapshot / f.name).symlink_to(os.path.relpath(f, snapshot))
    assert set(rows(snapshot)) == {"scheduler.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "full", "hf", "zero3", "zero1", "universal", "fsdp1", "audit"])
def test_what_ckpttool_writes_has_nothing_beside_it(to: str, tmp_path: Path) -> None:
    out = tmp_path / ("x.pt" if to == "full" else "x.tar.zst" if to == "audit" else "x")
    how: dict[str, Any] = {"options": ckpttool.HfOptions(include_optimizer=True)} if to == "hf" else {}
    conversion.convert(
        DCP, out, to=to, world_size=None if to in ("full", "hf", "audit", "universal") else 3, drop=True, **how
    )
    bytes_at(tmp_path / "other.pt")
    assert rows(out) == {}
    if to in ("dcp", "zero3", "fsdp1"):
        assert rows(out, only=["model"]) == {}


@pytest.mark.parametrize("name", sorted(p.parent.name for p in FIXTURES.glob("*/ckpt") if p.parent.name not in OTHERS))
def test_the_fixtures_have_nothing_beside_them(name: str) -> None:
    flat = FIXTURES / name / "flat_layout.json"
    how: dict[str, Any] = {"flat_layout": flat} if flat.exists() else {}
    assert rows(FIXTURES / name / "ckpt", **how) == {}


# ------------------------------------------------------------------------------------------------------------ bounds


def test_the_files_are_never_opened(tmp_path: Path) -> None:
    source = trainer(tmp_path / "checkpoint-3", "optimizer.bin")
    os.mkfifo(source / "state.pt")  # opening it would wait for ever
    (source / "broken.pt").symlink_to("nowhere")
    (source / "away.pt").symlink_to("/etc/hostname")
    with opening.open(source) as opened:
        assert set(opened.source.identities()) == {"model.safetensors", "config.json"}
        assert {"state.pt", "broken.pt", "away.pt"} <= {r.name for r in opened.checkpoint.unread}


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    bytes_at(source / "a\x1b[31m\n.pt")
    (source / os.fsdecode(b"\xff.pt")).write_bytes(b"x")
    found = rows(source)
    assert set(found) == {r"a\x1b[31m\n.pt", r"\udcff.pt"}
    done = conversion.convert(source, tmp_path / "out", to="dcp", world_size=2, drop=True)
    assert len(done.dropped) == 2


@pytest.mark.slow
def test_very_many_files_are_quick_and_a_short_list(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    for i in range(5_000):
        os.close(os.open(source / f"part{i}.pt", os.O_CREAT | os.O_WRONLY))
    began = time.process_time()
    with opening.open(source) as opened:
        took = time.process_time() - began
        assert len(opened.checkpoint.unread) == 1001
        assert opened.checkpoint.unread[-1].name == "4000 more files"
        assert len(opened.checkpoint.notes[-1]) < 400
    assert took < 2
    assert len(unread_files.describe_files(opened.checkpoint.unread)) < 400


@pytest.mark.parametrize(
    ("folder", "file", "rank"),
    [
        ("nanotron/zero1/3", "random/tp-1-of-2_dp-1-of-2_pp-0-of-1.pt", 3), ("checkpointing/fsdp/ckpt", "rng_2.pt", 2),
        ("trainers/olmo_core_w3/step3", "train/rank2.pt", 2), ("trainers/automodel_w2/epoch_0_step_3", "rng/rng_dp_rank_1.pt", 1),
        ("trainers/trainer_ddp/ckpt/checkpoint-3", "rng_state_0.pth", 0), ("trainers/trainer_ddp/ckpt/checkpoint-3", "rng_state_1.pth", 1),
    ],
)  # fmt: skip
def test_a_rank_without_random_states_is_named(tmp_path: Path, folder: str, file: str, rank: int) -> None:
    shutil.copytree(FIXTURES / folder, source := tmp_path / Path(folder).name)
    said = f"rank {rank}: no random states, which other ranks have"
    assert not any(said in note for note in inspect(source).notes)
    (source / file).unlink()
    assert any(said in note for note in inspect(source).notes)
    assert not any(said in note for note in inspect(source, only=["model"]).notes)
    assert any(said in note for note in conversion.convert(source, tmp_path / "x.pt", to="full").notes)


def test_a_directory_of_trainer_that_has_lost_its_scheduler_says_what_trainer_does_with_it(tmp_path: Path) -> None:
    shutil.copytree(
        FIXTURES / "trainers" / "trainer_ddp" / "ckpt" / "checkpoint-3", source := tmp_path / "checkpoint-3"
    )
    assert not any("scheduler.pt" in note for note in inspect(source).notes)
    (source / "scheduler.pt").unlink()
    assert any("no scheduler.pt" in note and "resumes neither" in note for note in inspect(source).notes)


def test_a_scheduler_that_was_cut_is_damage_to_verify_and_doctor_and_is_not_carried(tmp_path: Path) -> None:
    shutil.copytree(
        FIXTURES / "trainers" / "trainer_ddp" / "ckpt" / "checkpoint-3", source := tmp_path / "checkpoint-3"
    )
    (source / "scheduler.pt").write_bytes((source / "scheduler.pt").read_bytes()[:700])
    assert [r["name"] for r in inspect(source).not_read if r["damaged"]] == ["scheduler.pt"]
    with pytest.raises(Corrupt, match=r"scheduler\.pt cannot be read: .* The index of everything else is sound"):
        ckpttool.verify(source)
    assert ckpttool.verify(source, only=["model", "optim"]).structure == "ok"
    assert not ckpttool.doctor(source).sound
    with pytest.raises(Unsupported, match=r"scheduler\.pt .*drop"):
        conversion.convert(source, tmp_path / "x.pt", to="full")


def test_a_world_size_that_no_job_has_is_not_counted_through() -> None:
    rng = {"rng.1.cpu": Value(("rng", "1", "cpu"), 3)}
    found = find_ranks_without_rng_state(Checkpoint("full", "x", 10**15, [], [], {}, rng))
    assert found[:2] == [0, 2] and len(found) < 1 << 16


def test_a_link_to_nothing_is_listed_once(tmp_path: Path) -> None:
    shutil.copytree(
        FIXTURES / "trainers" / "trainer_ddp" / "ckpt" / "checkpoint-3", source := tmp_path / "checkpoint-3"
    )
    (source / "scheduler.pt").unlink()
    (source / "scheduler.pt").symlink_to(tmp_path / "nowhere")
    rows = [r for r in inspect(source).not_read if r["name"] == "scheduler.pt"]
    assert [r["damaged"] for r in rows] == [True]
