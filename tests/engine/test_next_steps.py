"""The last line of `inspect`: what to do next, by trainer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import ckpttool_here as run
from peers import FIXTURES
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Unsupported

TRAINERS = FIXTURES / "trainers"
STEP = "ckpt/checkpoint-3"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (TRAINERS / "trainer_fsdp2_full" / STEP, "resumes at any world size in Trainer with FSDP; nothing to convert"),
        (TRAINERS / "trainer_fsdp2_sharded" / STEP, "saved with FSDP2, it resumes at any world size in Trainer, nothing to convert; "
         "saved with FSDP1, Trainer resumes from it with other losses, but not from this: "
         "ckpttool convert PATH OUT --for trainer --state-dict-type full -n RANKS"),
        (TRAINERS / "trainer_ddp" / STEP, "resumes in Trainer without FSDP; for a job with FSDP: ckpttool convert PATH OUT --for trainer -n RANKS"),
        (TRAINERS / "accelerate_fsdp2_full" / "ckpt", "resumes at any world size in Accelerate with FSDP; nothing to convert"),
        (TRAINERS / "accelerate_fsdp1_sharded" / "ckpt", "saved with FSDP2, it resumes at any world size in Accelerate, nothing to convert; "
         "saved with FSDP1, convert it to whole files: ckpttool convert PATH OUT --for accelerate --state-dict-type full -n RANKS"),
        (TRAINERS / "lightning_w2", "resumes at any world size in Lightning; nothing to convert (for transformers: ckpttool convert PATH OUT "
         "--to hf --config MODEL)"),
        (FIXTURES / "zero3_w4" / "ckpt", "resumes in DeepSpeed at 4 ranks; at another world size: ckpttool convert PATH OUT --to zero3 -n RANKS"),
        (FIXTURES / "zero2_w3_bf16" / "ckpt", "resumes in DeepSpeed at 3 ranks; at another world size: ckpttool convert PATH OUT --to zero2 -n RANKS"),
        (FIXTURES / "zero0_w2" / "ckpt", "resumes in DeepSpeed at 2 ranks; at another world size: ckpttool convert PATH OUT --to zero1 -n RANKS"),
        (FIXTURES / "fsdp2_w3" / "ckpt", "torch.distributed.checkpoint reads it at any world size; for transformers: "
         "ckpttool convert PATH OUT --to hf --config MODEL"),
        (FIXTURES / "hf_llama" / "ckpt", "from_pretrained reads it; for a training job: ckpttool convert PATH OUT --to dcp -n RANKS"),
        (FIXTURES / "full_w1" / "ckpt" / "fqn.pt", "for a job of several ranks: ckpttool convert PATH OUT --to dcp -n RANKS; for transformers: "
         "ckpttool convert PATH OUT --to hf --config MODEL"),
    ],
)  # fmt: skip
def test_what_to_do_next(path: Path, words: str) -> None:
    assert ckpttool.inspect(path).next == words.replace("PATH", str(path))


def test_torchtitan_resumes_at_any_world_size_without_its_data_loader() -> None:
    found = ckpttool.inspect(TRAINERS / "titan_w2")
    assert found.trainer == "torchtitan" and found.next.startswith("resumes at any world size in torchtitan")
    assert ("exclude_from_loading" in found.next) == ("dataloader" in found.components)


def test_what_trainers_ask_for_and_a_state_lacks_is_in_the_line(tmp_path: Path) -> None:
    """Trainer takes the optimizer only with scheduler.pt; torchtitan asks for its data loader's state."""
    state = {
        "state": {"w.weight": {"exp_avg": torch.ones(4, 2)}},
        "param_groups": [{"lr": 0.1, "params": ["w.weight"]}],
    }
    torch.save({"model": {"w.weight": torch.ones(4, 2)}, "optim": state}, tmp_path / "in.pt")
    for to, said in (
        ("trainer", "without scheduler.pt Trainer starts with a new optimizer"),
        ("torchtitan", "resumes at any world size in torchtitan with CheckpointManager.Config(exclude_from_loading"),
    ):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / to, to=to, world_size=2)
        assert ckpttool.inspect(tmp_path / to).next.startswith(said)


@pytest.mark.parametrize(
    ("case", "one", "other"),
    [("zero2_w3_bf16", "*/*zero_pp_rank_0*optim*", "*/*zero_pp_rank_1*optim*"), ("nanotron/zero1/3", "random/tp-0*dp-0*", "random/tp-0*dp-1*"),
     ("fsdp1_w3_uop0", "*optim*rank*0.pt", "*optim*rank*1.pt"), ("trainers/trainer_ddp", "*/rng_state_0.pth", "*/rng_state_1.pth")],
)  # fmt: skip
def test_no_job_is_said_to_resume_from_a_copy_of_another_rank_s_file(
    case: str, one: str, other: str, tmp_path: Path
) -> None:
    genuine = FIXTURES / case
    folder = tmp_path / "run" / "checkpoint-3"
    shutil.copytree(genuine / "ckpt" if (genuine / "ckpt").is_dir() else genuine, folder)
    shutil.copy(next(folder.glob(one)), next(folder.glob(other)))
    place = folder / "checkpoint-3" if "trainer" in case else folder
    if (genuine / "flat_layout.json").exists():
        shutil.copy(genuine / "flat_layout.json", place)
    found = ckpttool.inspect(place)
    assert any("saved" in n and "cop" in n for n in found.notes)
    assert "resumes" not in found.next and "fetch that file again" in found.next


@pytest.mark.parametrize(("case", "latest"), [("zero3_w4", "latest"), ("universal_z1_w2", "latest_universal")])
def test_a_save_that_deepspeed_finds_only_by_its_tag_is_said_to_be_one(case: str, latest: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / case / "ckpt", tmp_path / "in")
    assert not [n for n in ckpttool.inspect(tmp_path / "in").notes if "latest" in n]
    tag = (tmp_path / "in" / latest).read_text()
    (tmp_path / "in" / latest).unlink()
    said = f'there is no file {latest}, so DeepSpeed\'s load_checkpoint finds this save only with tag="{tag}"'
    assert [n for n in ckpttool.inspect(tmp_path / "in").notes if n.startswith(said)]
    assert not [n for n in ckpttool.inspect(tmp_path / "in" / tag).notes if "latest" in n]


def test_a_sparse_update_of_weights_is_no_model(tmp_path: Path) -> None:
    state = {"model.a.weight.indices": torch.arange(4), "model.a.weight.values": torch.ones(4)}
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(FIXTURES / "hf_llama" / "ckpt" / "config.json", tmp_path)
    said = ckpttool.inspect(tmp_path).next
    assert said.startswith("an update of 1 weight (.values at .indices) and no model")
    assert "from_pretrained" not in said
    (tmp_path / "config.json").unlink()
    with pytest.raises(Unsupported, match="is a delta of TRL, and not a checkpoint"):
        ckpttool.open(tmp_path)


def test_a_folder_without_config_json_is_not_one_that_from_pretrained_reads(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", tmp_path / "a")
    (tmp_path / "a" / "config.json").unlink()
    assert ckpttool.inspect(tmp_path / "a").next.startswith("from_pretrained needs a config.json beside it")


def test_an_adapter_without_its_config_is_not_one_that_peft_loads(tmp_path: Path) -> None:
    source = FIXTURES / "trainer_ddp_lora_w2" / STEP
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    assert ckpttool.inspect(tmp_path).next.startswith("PeftModel.from_pretrained loads it; merged")
    (tmp_path / "adapter_config.json").unlink()
    assert ckpttool.inspect(tmp_path).next.startswith(
        "PeftModel.from_pretrained needs an adapter_config.json beside it; merged"
    )


def test_half_of_a_checkpoint_names_the_other() -> None:
    assert "no weights" in ckpttool.inspect(TRAINERS / "trainer_fsdp2_sharded" / STEP / "optimizer_0").next


def test_it_is_the_last_line_and_in_the_json() -> None:
    path = TRAINERS / "trainer_fsdp2_full" / STEP
    assert run("inspect", path).stdout.splitlines()[-1] == f"next {ckpttool.inspect(path).next}"
    assert json.loads(run("inspect", path, "--json").stdout)["next"] == ckpttool.inspect(path).next


@pytest.mark.parametrize(
    "case",
    ["trainer_fsdp2_sharded/ckpt/checkpoint-3", "trainer_ddp/ckpt/checkpoint-3", "accelerate_fsdp1_sharded/ckpt"],
)
def test_the_commands_run(case: str, tmp_path: Path) -> None:
    line = ckpttool.inspect(TRAINERS / case).next
    command = line[line.index("ckpttool convert") :].rstrip(")").split()[1:]
    words = [
        {"OUT": str(tmp_path / "out"), "RANKS": "3", "MODEL": str(TRAINERS / "trainer_ddp" / STEP)}.get(w, w)
        for w in command
    ]
    done = run(*words)
    assert done.returncode == 0, done.stderr


def with_file_of_nobody(at: Path) -> Path:
    shutil.copytree(TRAINERS / "trainer_ddp" / STEP, at / "checkpoint-3")
    torch.save({"shadow": torch.ones(3)}, at / "checkpoint-3" / "ema.pt")
    return at / "checkpoint-3"


def with_numbers(at: Path) -> Path:
    """One of two weights of one shape is trained; "NAMED_CHECKPOINT" says which."""
    weights = {"a.weight": torch.ones(4, 2), "b.weight": torch.ones(4, 2)}
    slots = {"exp_avg": torch.ones(4, 2), "exp_avg_sq": torch.ones(4, 2), "step": torch.tensor(1.0)}
    for file, key in (("named.pt", "b.weight"), ("in.pt", 0)):
        groups = [{"lr": 0.1, "params": [key]}]
        torch.save({"model": weights, "optim": {"state": {key: slots}, "param_groups": groups}}, at / file)
    return at / "in.pt"


def with_two_adapters(at: Path) -> Path:
    layer = "base_model.model.layers.0.q_proj"
    tree = {f"{layer}.base_layer.weight": torch.ones(4, 4)}
    for name in ("my policy", "ref"):
        tree |= {f"{layer}.lora_A.{name}.weight": torch.ones(2, 4), f"{layer}.lora_B.{name}.weight": torch.ones(4, 2)}
    torch.save({"model": tree}, at / "in.pt")
    return at / "in.pt"


ADAPTER = "--adapter-name 'my policy' --lora-alpha ALPHA"


@pytest.mark.parametrize(
    ("make", "commands"),
    [
        (with_file_of_nobody, ["convert PATH OUT --for trainer -n RANKS --drop"]),
        (with_numbers, ["convert PATH OUT --to dcp -n RANKS --like NAMED_CHECKPOINT"]),
        (with_two_adapters, [f"adapter extract PATH OUT {ADAPTER}", f"adapter merge PATH OUT {ADAPTER}"]),
        (lambda at: FIXTURES / "fsdp1_w2_noshard" / "ckpt", ["convert PATH OUT --to dcp -n RANKS --flat-layout FILE"]),
        (lambda at: FIXTURES / "fsdp1_w4_hsdp_mesh" / "ckpt", ["convert PATH OUT --for verl -n RANKS"]),
        (lambda at: FIXTURES / "fsdp1_w2_sharded" / "ckpt", ["convert PATH OUT --for verl -n RANKS --config MODEL"]),
        (lambda at: FIXTURES / "qlora" / "job.pt", ["adapter extract PATH OUT --lora-alpha ALPHA"]),
        (lambda at: FIXTURES / "maps" / "tune-llama3", ["convert PATH OUT --to dcp -n RANKS --only model"]),
    ],
    ids=["ema", "numbers", "adapters", "flat", "order", "no-order", "qlora", "recipe"],
)  # fmt: skip
def test_the_commands_have_the_options_that_this_checkpoint_needs(
    make: Callable[[Path], Path], commands: list[str], tmp_path: Path
) -> None:
    path = make(tmp_path)
    said = ckpttool.inspect(path).next.replace(str(path), "PATH")
    found = [c for c in re.findall(r"ckpttool ((?:convert|adapter) [^;,)]*)", said) if "--to hf" not in c]
    assert found == commands
    values = {"RANKS": "3", "ALPHA": "4", "NAMED_CHECKPOINT": str(tmp_path / "named.pt"), "PATH": str(path),
              "FILE": str(FIXTURES / "fsdp1_w2_noshard" / "flat_layout.json")}  # fmt: skip
    for i, command in enumerate(commands):
        words = [values.get(w, str(tmp_path / f"out{i}") if w == "OUT" else w) for w in shlex.split(command)]
        done = run(*words[: words.index("--config") if "MODEL" in words else None])  # there is no such model
        assert (done.returncode == 0) == ("MODEL" not in words), done.stderr
        assert "MODEL" not in words or "CKPT0308" in done.stderr


def test_an_adapter_without_an_optimizer_is_offered_to_peft_and_not_to_transformers(tmp_path: Path) -> None:
    source = FIXTURES / "trainer_ddp_lora_w2" / STEP
    for name in ("trainer_state.json", "adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    assert ckpttool.inspect(tmp_path).next == (
        f"Trainer starts with a new optimizer from these weights; for PEFT: ckpttool adapter extract {tmp_path} OUT"
    )


def test_only_the_components_that_were_asked_for_are_looked_at() -> None:
    found = ckpttool.inspect(FIXTURES / "fsdp2_w3" / "ckpt", only=["model"])
    assert list(found.components) == ["model"] and "only model was looked at" in found.notes
    assert found.missing == [], "what was left out is not missing"
    assert found.next.startswith("only a part was looked at; of the whole: ckpttool inspect")


@pytest.mark.parametrize(
    "to", ["accelerate", "trainer", "llamafactory", "lightning", "verl", "xtuner", "zero2", "megatron"]
)
def test_weights_without_an_optimizer_are_not_said_to_resume(to: str, tmp_path: Path) -> None:
    torch.save({"model": {"w.weight": torch.ones(4, 2)}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    found = ckpttool.inspect(tmp_path / "out")
    assert "resumes in" not in found.next and "resumes at" not in found.next, found.next
    with_new = "Trainer starts with a new optimizer" if to == "trainer" else "weights without an optimizer: a job that"
    assert found.next.startswith(with_new), found.next


def test_weights_under_another_key_come_with_the_line_that_makes_a_model_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"a.weight": torch.ones(2, 3)}
    average = {"decay": 0.9, "shadow": {"a.weight": torch.zeros(2, 3)}}
    torch.save({"model": model, "ema": average, "step": 3}, tmp_path / "ema.pt")
    said = run("convert", tmp_path / "ema.pt", tmp_path / "out", "--to", "hf", "--only", "extra").stderr
    line = said.partition("as a model: ")[2].partition("\n")[0].removesuffix(".")
    assert line == "torch.save({\"model\": torch.load(FILE)['ema']['shadow']}, \"model.pt\")"
    monkeypatch.chdir(tmp_path)
    exec(line, {"torch": torch, "FILE": "ema.pt"})
    assert run("convert", "model.pt", "out", "--to", "hf").returncode == 0
    assert not load_file(tmp_path / "out" / "model.safetensors")["a.weight"].any()


def test_a_salvaged_copy_is_not_promised_to_resume(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "a")
    (tmp_path / "a" / "__1_0.distcp").unlink()
    ckpttool.convert(tmp_path / "a", tmp_path / "b", to="lightning", world_size=2, salvage=True)
    said = ckpttool.inspect(tmp_path / "b").next
    assert f"ckpttool verify {tmp_path / 'b'} names both" in said and "resumes at any" not in said, said
