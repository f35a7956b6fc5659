"""The last line of `inspect`: what to do next, by trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ckpttool_here as run
from peers import FIXTURES

import ckpttool

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
