"""What to do next with a checkpoint: the last line of `inspect`.

A claim that a trainer resumes at any world size stands here only where that was run and gave the losses of a job that
was never stopped (docs/how-to/trainers.md has the table); of anything else the line names the command that makes it so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from ...huggingface import hub_names, lora
from ...index.checkpoint import Checkpoint, MixupNote, joined, unnamed_optimizer_state
from ...index.names import describe_weights_elsewhere
from ...printable import count_noun

__all__ = ["next_step"]

_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_OF_DEEPSPEED = re.compile(r"(.*/)?(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+.*_states\.pt")


def next_step(ckpt: Checkpoint, path: str) -> str:
    """One line: whether its trainer resumes from it as it is, and the command for what it does not do."""
    out = f"ckpttool convert {shlex.quote(path)} OUT"
    if any(isinstance(note, MixupNote) for note in ckpt.notes):
        return (
            "no job should resume from it, since a rank's file is in another's place: fetch that file again; ckpttool "
            f"doctor {shlex.quote(path)}"
        )
    parts = {str(t.path[0]) for t in ckpt.tensors.values()}
    if "model" not in parts:
        both = (
            ", or move this folder and that of the weights into one"
            if ckpt.layout == "dcp" and "optim" in parts
            else ""
        )
        if instead := describe_weights_elsewhere(ckpt):
            return f"holds no model that ckpttool knows.{instead}"
        return f"holds no weights: give the directory of the trainer that they are in, if there is one{both}"
    if ckpt.layout in _OF_TRAINER:
        return _OF_TRAINER[ckpt.layout](ckpt, out, "optim" in parts or bool(unnamed_optimizer_state(ckpt)))
    found = lora.find_lora(ckpt)
    if found is not None and found.alone:
        into = f"merged into its base model: ckpttool adapter merge BASE {shlex.quote(path)} OUT"
        if any(f.endswith("adapter_model.safetensors") for f in ckpt.files):
            return f"PeftModel.from_pretrained loads it; {into}"
        return f"for PEFT: ckpttool adapter extract {shlex.quote(path)} OUT; {into}"
    if ckpt.layout.startswith("zero"):
        return f"resumes in DeepSpeed at {_ranks(ckpt)}; at another world size: {out} --to {ckpt.layout} -n RANKS"
    if ckpt.layout == "dcp" and ckpt.trainer == "torchtitan":
        return _torchtitan(ckpt)
    if ckpt.layout == "dcp" and ckpt.trainer == "Lightning":
        return f"Lightning resumes from a folder with meta.pt, which is not here: {out} --for lightning -n RANKS"
    if ckpt.layout in ("dcp", "full") and found is not None:
        return (
            f"its adapter for PEFT: ckpttool adapter extract {shlex.quote(path)} OUT; merged: ckpttool adapter merge "
            f"{shlex.quote(path)} OUT"
        )
    if ckpt.layout == "dcp":
        return (
            f"torch.distributed.checkpoint reads it at any world size; for transformers: {out} --to hf --config MODEL"
        )
    if ckpt.layout == "fsdp1":
        return f"resumes in its job at {_ranks(ckpt)}; at another world size: {out} --to dcp -n RANKS"
    if ckpt.layout == "torch_checkpointing":
        if "metadata.pkl" in ckpt.files:
            return (
                f"torch_checkpointing's CheckpointManager loads it on up to {_ranks(ckpt)} with DefaultResharder, "
                f"nothing to convert; on more: {out} --to torch_checkpointing -n RANKS"
            )
        return f"resumes in its job at {_ranks(ckpt)}; at another world size: {out} --to torch_checkpointing -n RANKS"
    if ckpt.layout == "universal":
        return f"resumes in DeepSpeed with load_universal; without it: {out} --to zero3 -n RANKS"
    if ckpt.layout == "hf" and (changed := _sparse(ckpt)):
        return (
            f"an update of {count_noun(changed, 'weight')} (.values at .indices) and no model: apply it to the "
            "weights that it was made from, with the program that made it, and give those"
        )
    if ckpt.layout == "hf" and (odd := _contradicted(ckpt)) is not None:
        return (
            f"config.json is of another model than the weights ({odd}): from_pretrained would fill what is missing "
            f"with random numbers. With the config of this very model: {out} --to hf --config MODEL"
        )
    if ckpt.layout == "hf" and any(_SHARD.fullmatch(f.rpartition("/")[2]) for f in ckpt.files) and "optim" not in parts:
        return (
            "from_pretrained reads it; if save_optimizer_distributed wrote an optimizer, move both folders into one "
            f"and give that; weights alone for a training job: {out} --to dcp -n RANKS"
        )
    if ckpt.layout == "hf":
        reads = "reads it" if ckpt.config is not None else "needs a config.json beside it"
        return f"from_pretrained {reads}; for a training job: {out} --to dcp -n RANKS"
    if ckpt.layout == "audit":
        return f"ckpttool audit restore {shlex.quote(path)} OUT --to dcp -n RANKS"
    if ckpt.layout == "full":
        return f"for a job of several ranks: {out} --to dcp -n RANKS; for transformers: {out} --to hf --config MODEL"
    return f"for transformers: {out} --to hf --config MODEL"


def _sparse(ckpt: Checkpoint) -> int:
    """How many weights are there as the elements that an update changes, and not themselves."""
    names = {joined(t.path[1:]) for t in ckpt.tensors.values() if t.path[0] == "model"}
    return sum(f"{n.removesuffix('.values')}.indices" in names for n in names if n.endswith(".values"))


def _contradicted(ckpt: Checkpoint) -> str | None:
    """What shows that the weights are not of the model of config.json."""
    shapes = {joined(t.path[1:]): t.shape for t in ckpt.tensors.values() if t.path[0] == "model"}
    return None if ckpt.config is None else hub_names.find_contradiction(ckpt.config, shapes)


def _for_hf(ckpt: Checkpoint, out: str, more: str = "") -> str:
    """The command for transformers, or for PEFT if the weights are an adapter only."""
    found = lora.find_lora(ckpt)
    if found is not None and found.alone:
        return f"for PEFT: {out.replace('convert', 'adapter extract', 1)}"
    return f"for transformers: {out} --to hf{more}"


def _ranks(ckpt: Checkpoint) -> str:
    if ckpt.world_size is None:
        return "the world size that wrote it"
    return count_noun(ckpt.world_size, "rank")


def _directory(name: str, trainer: str) -> Callable[[Checkpoint, str, bool], str]:
    """The line of a directory of Trainer or Accelerate, by the files that it is made of."""

    def line(ckpt: Checkpoint, out: str, optimizer: bool) -> str:
        def has(pattern: str) -> bool:
            return any(re.match(pattern, n) for n in ckpt.files)

        if any(_OF_DEEPSPEED.fullmatch(n) for n in ckpt.files):
            return (
                f"resumes in {trainer} with DeepSpeed at {_ranks(ckpt)}; at another world size: {out} --for deepspeed "
                "-n RANKS"
            )
        if not optimizer:
            return f"{trainer} starts with a new optimizer from these weights; {_for_hf(ckpt, out)}"
        if has(r"pytorch_model_fsdp_rank\d+\.bin"):
            return f"resumes in {trainer} at {_ranks(ckpt)}; at another world size: {out} --for {name} -n RANKS"
        if has(r"pytorch_model_fsdp_\d+/"):
            return (
                f"saved with FSDP2, it resumes at any world size in {trainer}, nothing to convert; saved with FSDP1, "
                f"{_OF_FSDP1[name]}: {out} --for {name} --state-dict-type full -n RANKS"
            )
        if has(r"optimizer(_\d+)?\.bin" if name == "trainer" else r"pytorch_model_fsdp(_\d+)?\.bin"):
            return f"resumes at any world size in {trainer} with FSDP; nothing to convert"
        return f"resumes in {trainer} without FSDP; for a job with FSDP: {out} --for {name} -n RANKS"

    return line


#: What to know where FSDP1 has written the same SHARDED directory, which its files do not tell.
_OF_FSDP1 = {
    "trainer": "Trainer resumes from it with other losses, but not from this",
    "accelerate": "convert it to whole files",
}


def _lightning(ckpt: Checkpoint, out: str, optimizer: bool) -> str:
    if not optimizer:
        return f"Lightning starts with a new optimizer from these weights; {_for_hf(ckpt, out, ' --config MODEL')}"
    return f"resumes at any world size in Lightning; nothing to convert ({_for_hf(ckpt, out, ' --config MODEL')})"


def _torchtitan(ckpt: Checkpoint) -> str:
    if not any(ckpt.component(n) == "dataloader" for n in (*ckpt.tensors, *ckpt.values)):
        return "resumes at any world size in torchtitan; nothing to convert"
    return (
        "resumes at any world size in torchtitan, nothing to convert; at another one, load with "
        'CheckpointManager.Config(exclude_from_loading=["dataloader"])'
    )


def _torchtune(ckpt: Checkpoint, out: str, optimizer: bool) -> str:
    if not any("recipe_state.pt" in n for n in ckpt.files):
        return f"torchtune starts with a new optimizer from these weights; for transformers: {out} --to hf"
    return f"resumes in torchtune with should_load_recipe_state=True; for transformers: {out} --to hf"


_OF_TRAINER: dict[str, Callable[[Checkpoint, str, bool], str]] = {
    "trainer": _directory("trainer", "Trainer"),
    "accelerate": _directory("accelerate", "Accelerate"),
    "lightning": _lightning,
    "transformers_sharded": lambda ckpt, out, optimizer: (
        "resumes at any world size with from_pretrained(distributed_config=...) and load_optimizer_distributed; "
        "nothing to convert"
    ),
    "megatron": lambda ckpt, out, optimizer: (
        f"resumes in Megatron-Core; at any other TP and PP size: {out} --to megatron -n FILES; for torch's own, under "
        f"Megatron's names: {out} --to dcp -n RANKS"
    ),
    "nanotron": lambda ckpt, out, optimizer: f"resumes in nanotron; for a job of torch's own: {out} --to dcp -n RANKS",
    "veomni": lambda ckpt, out, optimizer: (
        f"resumes in VeOmni at {_ranks(ckpt)}; for torch's own: {out} --to dcp -n RANKS"
    ),
    "olmo": lambda ckpt, out, optimizer: (
        f"resumes at any world size in OLMo-core; nothing to convert (for torch's own: {out} --to dcp -n RANKS)"
    ),
    "automodel": lambda ckpt, out, optimizer: (
        f"resumes in NeMo AutoModel at {_ranks(ckpt)}; for torch's own: {out} --to dcp -n RANKS"
    ),
    "script": lambda ckpt, out, optimizer: (
        f"for a job of several ranks: {out} --to dcp -n RANKS; for transformers: {out} --to hf"
    ),
    "torchtune": _torchtune,
    "verl": lambda ckpt, out, optimizer: f"resumes in verl at {_ranks(ckpt)}; for transformers: {out} --to hf",
}
