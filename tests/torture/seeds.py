"""Small checkpoints of every layout, for mutation: a few kilobytes each, so that a mutant takes some ten milliseconds.

`build(folder, names)` writes them below `folder`. They hold what is hard: shapes that three ranks do not divide, an empty
tensor, tensors without dimensions, tied weights, a transposed view, two param groups, bfloat16, bool, complex numbers.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

import ckpttool

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "converters"))

import test_accelerated
import test_llamafactory
import test_reinforcement
import test_scripts
import test_transformer_engine
import zero_files

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@dataclass(frozen=True)
class Seed:
    """`make(folder)` writes the checkpoint; `file` is its name where it is one file in that folder.

    `oracle` names a function of oracle.READERS, `how` are arguments of `ckpttool.open`, `deltas` is the folder in that one whose
    deltas are applied. A `large` one has its .metadata read as one of many megabytes is, by a child process.
    """

    oracle: str
    make: Callable[[Path], Any]
    file: str = ""
    how: dict[str, Any] = field(default_factory=dict)
    weight: float = 2
    deltas: str = ""
    large: bool = False

    def path(self, folder: Path) -> Path:
        """What is given to ckpttool."""
        return folder / self.file if self.file else folder

    def arguments(self, folder: Path) -> dict[str, Any]:
        """What `ckpttool.open` is given besides; with deltas, `ckpttool.convert`."""
        return {**self.how, "apply": [folder / self.deltas]} if self.deltas else self.how


# ------------------------------------------------------------------------------------------------------- the states


def weights() -> dict[str, Tensor]:
    """A model's state dict."""
    g = torch.Generator().manual_seed(13)
    embed = torch.randn(13, 4, generator=g)
    return {
        "embed.weight": embed, "fc.weight": torch.randn(7, 5, generator=g).T, "fc.bias": torch.randn(5, generator=g),
        "half": torch.randn(3, 3, generator=g).bfloat16(), "none": torch.empty(0, 4), "seen": torch.tensor(17),
        "lm_head.weight": embed,
    }  # fmt: skip


TRAINED = ("embed.weight", "fc.weight", "fc.bias")


def state() -> dict[str, Any]:
    """A training state under canonical names, so that a name is what its path says."""
    model = weights()
    slots = {n: {"step": torch.tensor(3.0), "exp_avg": model[n] * 2, "exp_avg_sq": model[n] ** 2} for n in TRAINED}
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "params": list(TRAINED[:1])},
        {"lr": 0.2, "betas": (0.9, 0.95), "foreach": False, "params": list(TRAINED[1:])},
    ]
    return {
        "model": model, "optim": {"state": slots, "param_groups": groups},
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2]}, "rng": torch.arange(16, dtype=torch.uint8),
        "trainer": {"step": 3, "name": "run", "loss": float("inf")},
        "extra": {"spectrum": torch.tensor([1 + 2j, 3 - 4j]), "mask": torch.tensor([True, False, True])},
    }  # fmt: skip


def numbered() -> dict[str, Any]:
    """What most scripts save: two state dicts, the optimizer's by number."""
    model = {n: t.contiguous() for n, t in weights().items() if n in TRAINED}
    slots = {
        i: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for i, t in enumerate(model.values())
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2]}]
    return {"model_state_dict": model, "optimizer_state_dict": {"state": slots, "param_groups": groups}, "epoch": 3}


def lightning() -> dict[str, Any]:
    """The tree of a Lightning checkpoint."""
    tree = numbered()
    return {
        "epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.5.0", "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"Saver": {"best": 0.5, "path": "x.ckpt"}}, "state_dict": {"net." + n: t for n, t in tree["model_state_dict"].items()},
        "optimizer_states": [tree["optimizer_state_dict"]], "lr_schedulers": [{"last_epoch": 3, "base_lrs": [0.1]}],
        "hparams_name": "kwargs", "hyper_parameters": {"width": 4},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ who writes them


def torch_file(tree: Callable[[], Any], **how: Any) -> Callable[[Path], None]:
    """torch.save."""
    return lambda folder: torch.save(tree(), folder / "x.pt", **how)


def torch_dcp(**how: Any) -> Callable[[Path], None]:
    """dcp.save of one rank, with as many files as `thread_count`."""

    def make(folder: Path) -> None:
        options = dict(how)
        if options.pop("zstd", False):
            from torch.distributed.checkpoint._extension import ZStandard

            options["_extensions"] = [ZStandard()]
        if options.pop("safetensors", False):
            from torch.distributed.checkpoint.filesystem import SerializationFormat

            options["serialization_format"] = SerializationFormat.SAFETENSORS
        tree = state()
        if options:  # neither of the two takes a tensor that is not contiguous; safetensors takes nothing but tensors
            tree["model"] = {n: t.contiguous().clone() for n, t in tree["model"].items()}
            tree["optim"]["state"]["fc.weight"] = {
                k: t.contiguous() for k, t in tree["optim"]["state"]["fc.weight"].items()
            }
        if "serialization_format" in options:
            tree = {"model": tree["model"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.INFO)
            dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
            logging.disable(logging.NOTSET)

    return make


def hf_sharded(folder: Path) -> None:
    """Two files and an index, as save_pretrained writes them."""
    tensors = {n: t.contiguous().clone() for n, t in weights().items() if n != "lm_head.weight"}
    parts = [list(tensors)[:2], list(tensors)[2:]]
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, part in zip(files, parts, strict=True):
        save_file({n: tensors[n] for n in part}, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {n: name for name, part in zip(files, parts, strict=True) for n in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def hf_single(folder: Path) -> None:
    """One file."""
    save_file({n: t.contiguous().clone() for n, t in weights().items()}, folder / "model.safetensors")


def fixture(name: str, *beside: str, inside: str = "ckpt", config: bool = False) -> Callable[[Path], None]:
    """A checkpoint that a real engine wrote, with some of the files beside it; with `config`, its config.json says how it is encoded."""

    def make(folder: Path) -> None:
        shutil.copytree(FIXTURES / name / inside, folder, ignore=shutil.ignore_patterns("truth.*"), dirs_exist_ok=True)
        for other in beside:
            shutil.copy(FIXTURES / name / other, folder)
        for file in (
            folder.rglob("config.json") if not config else ()
        ):  # transformers, in a child process, takes seconds
            file.unlink()

    return make


def packed_fixture(archive: str, inside: str) -> Callable[[Path], None]:
    """A folder in an archive of such."""

    def make(folder: Path) -> None:
        with tarfile.open(FIXTURES / archive) as files:
            files.extractall(folder.with_suffix(".all"), filter="data")
        shutil.copytree(folder.with_suffix(".all") / inside, folder, dirs_exist_ok=True)
        shutil.rmtree(folder.with_suffix(".all"))

    return make


def built(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """What another test builds as the program's own code does; it may want to make the folder itself."""

    def write(folder: Path) -> None:
        folder.rmdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.INFO)
            make(folder)
            logging.disable(logging.NOTSET)
        for file in folder.rglob("config.json"):
            file.unlink()

    return write


def ours(to: str, file: str = "", tree: Callable[[], Any] = state, **how: Any) -> Callable[[Path], None]:
    """What ckpttool itself writes."""

    def make(folder: Path) -> None:
        source = folder.parent / f"{folder.name}.pt"
        torch.save(tree(), source)
        try:
            folder.rmdir() if not file else None
            ckpttool.convert(source, folder / file if file else folder, to=to, drop=True, **how)
        finally:
            source.unlink()

    return make


def without_record(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same folder without ckpttool.json, whose digests would find most of what the fuzzer does."""

    def bare(folder: Path) -> None:
        make(folder)
        (folder / "ckpttool.json").unlink()

    return bare


def veomni(folder: Path) -> None:
    """VeOmni's step folder: weights and optimizer in one folder of DCP, and a file of each rank."""
    tree = trainable()
    dcp.save(
        {"model": tree["model"], "optimizer": tree["optim"]}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True
    )
    (folder / "extra_state").mkdir()
    for rank in range(2):
        state = {"global_step": 3, "lr_scheduler": tree["scheduler"], "train_dataloader": {"at": 10 + rank}}
        state["torch_rng_state"] = torch.arange(16, dtype=torch.uint8) + rank
        torch.save(state, folder / "extra_state" / f"extra_state_rank_{rank}.pt")


def encoded(folder: Path) -> None:
    """Weights in the encodings that the Hub has: fp8 with scales of blocks, MXFP4, int8, packed int4."""
    g = torch.Generator().manual_seed(7)

    def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(0, 120, shape, generator=g, dtype=torch.uint8).view(dtype)

    tensors = {
        "a.weight": codes(8, 8, dtype=torch.float8_e4m3fn), "a.weight_scale_inv": torch.rand(1, 1, generator=g),
        "b.weight_blocks": codes(4, 1, 16), "b.weight_scales": codes(4, 1),
        "c.weight": codes(8, 8, dtype=torch.int8), "c.weight_scale": torch.rand(8, 1, generator=g).bfloat16(),
        "d.weight_packed": codes(8, 4).view(torch.int32), "d.weight_scale": torch.rand(8, 1, generator=g).bfloat16(), "d.weight_shape": torch.tensor([8, 8]),
        "e.weight": codes(4, 4, dtype=torch.float8_e5m2), "norm.weight": torch.rand(8, generator=g).half(),
    }  # fmt: skip
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def trainable() -> dict[str, Any]:
    """A state that engines with flat tensors can hold."""
    tree = state()
    tree["model"] = {n: t.contiguous().float() for n, t in tree["model"].items() if n in TRAINED}
    tree["optim"]["state"] = {n: {k: v.contiguous() for k, v in s.items()} for n, s in tree["optim"]["state"].items()}
    return {k: tree[k] for k in ("model", "optim", "scheduler", "trainer")}


def of_one_group() -> dict[str, Any]:
    """A state that Megatron-Core can hold: all its groups have one learning rate."""
    tree = trainable()
    tree["optim"]["param_groups"] = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(TRAINED)}]
    return tree


def small() -> zero_files.Job:
    """Two groups, a tied and a frozen parameter, a buffer."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (13, 4), "fc.weight": (5, 3), "fc.bias": (5,), "lora": (3, 2)}
    tensors = {n: zero_files.numbers(n, s) for n, s in shapes.items()}
    tensors["lm_head.weight"] = tensors["embed.weight"]
    tensors["seen"] = torch.tensor(17)
    groups = [["fc.bias", "embed.weight"], ["fc.weight"]]
    return zero_files.Job(
        tensors, groups, buffers=["seen"], frozen=["lora"], tied={"lm_head.weight": "embed.weight"},
        client={"tag": "run"}, scheduler={"last_epoch": 3},
    )  # fmt: skip


SEEDS: dict[str, Seed] = {
    "full": Seed("torch", torch_file(state), "x.pt", weight=4),
    "full-legacy": Seed("torch", torch_file(state, _use_new_zipfile_serialization=False), "x.pt", weight=3),
    "full-numbered": Seed("torch", torch_file(numbered), "x.pt", weight=3),
    "full-lightning": Seed("torch", torch_file(lightning), "x.pt"),
    "full-weights": Seed("torch", torch_file(weights), "x.pt"),
    "full-ours": Seed("torch", ours("full", "x.pt"), "x.pt"),
    "dcp": Seed("dcp", torch_dcp(), weight=5),
    "dcp-files": Seed("dcp", torch_dcp(thread_count=3), weight=4),
    "dcp-large": Seed("dcp", torch_dcp(), weight=3, large=True),
    "dcp-zstd": Seed("dcp", torch_dcp(zstd=True)),
    "dcp-safetensors": Seed("dcp_safetensors", torch_dcp(safetensors=True)),
    "dcp-ranks": Seed("dcp", fixture("awkward_w3"), weight=1),
    "dcp-ours": Seed("dcp", ours("dcp", world_size=3), weight=3),
    "dcp-ours-bare": Seed("dcp", without_record(ours("dcp", world_size=3)), weight=4),
    "hf": Seed("hf", hf_single, weight=3),
    "hf-sharded": Seed("hf", hf_sharded, weight=4),
    "hf-ours": Seed("hf", ours("hf", options=ckpttool.HfOptions(max_shard_bytes=300))),
    "hf-training": Seed("hf_model", ours("hf", options=ckpttool.HfOptions(include_optimizer=True)), weight=3),
    "zero3": Seed("zero3", lambda f: zero_files.zero3(small(), f, 2), weight=4),
    "zero3-odd": Seed("zero3", lambda f: zero_files.zero3(small(), f, 3, most=20)),
    "zero2": Seed("zero12", lambda f: zero_files.zero12(small(), f, 2), weight=4),
    "zero1": Seed("zero12", lambda f: zero_files.zero12(small(), f, 3, stage=1)),
    "zero0": Seed("zero0", lambda f: zero_files.zero0(zero_files.plain(), f, 1, masters=True)),
    "universal": Seed("universal", lambda f: zero_files.universal(small(), f, 2, stage=2), weight=3),
    "zero3-ours": Seed("zero3", ours("zero3", tree=trainable, world_size=2)),
    "zero2-ours": Seed("zero12", without_record(ours("zero2", tree=trainable, world_size=3)), weight=3),
    "universal-ours": Seed("universal", without_record(ours("universal", tree=trainable))),
    "fsdp1-local": Seed("seed", fixture("fsdp1_w3_uop0", "flat_layout.json"), weight=2),
    "fsdp1-sharded": Seed("seed", fixture("fsdp1_w2_sharded"), weight=1),
    "fsdp1-ours": Seed("seed", without_record(ours("fsdp1", tree=trainable, world_size=2, wrap=["fc"])), weight=3),
    "checkpointing": Seed("seed", fixture("checkpointing/fsdp"), weight=2),
    "checkpointing-ours": Seed("seed", ours("torch_checkpointing", tree=trainable, world_size=3), weight=2),
    "audit": Seed("seed", ours("audit", "a.tar.zst"), "a.tar.zst", weight=3),
    "hf-encoded": Seed("hf", encoded),
    "adapter": Seed("adapter", fixture("trainer_ddp_lora_w2", inside="ckpt/checkpoint-3"), weight=0.4),
    "trainer": Seed("fsdp_parts", fixture("trainers/trainer_fsdp2_sharded", inside="ckpt/checkpoint-3"), weight=0.4),
    "trainer-full": Seed("fsdp_full", fixture("trainers/trainer_fsdp2_full", inside="ckpt/checkpoint-3"), weight=0.4),
    "accelerate": Seed("fsdp_parts", fixture("trainers/accelerate_fsdp1_sharded"), weight=0.4),
    "lightning": Seed("lightning", fixture("trainers/lightning_w2", inside=""), weight=0.4),
    "torchtitan": Seed("dcp_model", fixture("trainers/titan_w2", inside=""), weight=0.4),
    "olmo": Seed("olmo", fixture("trainers/olmo_core_w3", inside="step3"), weight=0.4),
    "veomni": Seed("dcp_model", veomni, weight=2),
    "verl": Seed("verl", fixture("trainers/verl_fsdp2_w3"), weight=0.4),
    "automodel": Seed("automodel", fixture("trainers/automodel_w2", inside="epoch_0_step_3"), weight=0.4),
    "transformers-sharded": Seed("transformers", fixture("trainers/transformers_w2"), weight=0.4),
    "torchtune": Seed("torchtune", fixture("trainers/torchtune_hf", inside=""), "epoch_0", weight=0.4),
    "torchtune-lora": Seed("torchtune", fixture("trainers/torchtune_lora", inside=""), "epoch_0", weight=0.4),
    "torchsnapshot": Seed("seed", fixture("trainers/torchsnapshot_w1", inside="ckpt/snap"), weight=0.4),
    "nanotron": Seed("seed", fixture("nanotron/zero1", inside="3"), weight=0.4),
    "megatron": Seed("seed", fixture("megatron/tp2_pp2", inside="ckpt/iter_0000003"), weight=0.4),
    "megatron-flat": Seed("seed", fixture("megatron/flat_ranges", inside="ckpt/iter_0000003"), weight=0.4, large=True),
    "megatron-verl": Seed("seed", fixture("megatron/verl", inside="ckpt/iter_0000003"), weight=0.4),
    "megatron-ours": Seed("seed", ours("megatron", tree=of_one_group), weight=0.4),
    "torchao": Seed("seed", fixture("torchao/adamw8bit_w2"), weight=0.4),
    "autotp-zero1": Seed("seed", packed_fixture("autotp/tp2_dp2_z1_bf16.tar.xz", "tp2_dp2_z1_bf16/ckpt")),
    "autotp-zero2": Seed("seed", packed_fixture("autotp/tp3_z2_fp32.tar.xz", "tp3_z2_fp32/ckpt")),
    "autotp-zero3": Seed("seed", packed_fixture("autotp/tp2_z3_bf16.tar.xz", "tp2_z3_bf16/ckpt")),
    **{
        f"deepspeed-{name}": Seed("seed", packed_fixture("deepspeed/parallel.tar.xz", f"{name}/ck"), weight=0.8)
        for name in ("moe_z0_ep2_w2", "moe_z1_ep2_w2", "moe_z2_ep2_w4", "autoep_z2_ep2_w4", "pipeline_z1_pp2_w4")
    },
    "deepspeed-pipeline_twice": Seed("seed", packed_fixture("deepspeed/pipelines.tar.xz", "pipeline_twice_pp2_w2/ck"), weight=0.4),
    "zero1-ours": Seed("zero12", ours("zero1", tree=trainable, world_size=3), weight=1),
    "remainders": Seed("torch", torch_file(test_transformer_engine.state), "x.pt"),
    "llamafactory": Seed("llamafactory", built(test_llamafactory.folder)),
    "llamafactory-ddp": Seed("seed", built(lambda f: test_llamafactory.folder(f, fsdp=False))),
    "skyrl": Seed("seed", built(test_reinforcement.skyrl), weight=0.4),
    "nemo-rl": Seed("nemo_rl", built(test_reinforcement.nemo_rl)),
    "prime-rl": Seed("prime_rl", built(test_reinforcement.prime_rl)),
    "xtuner": Seed("xtuner", built(test_reinforcement.xtuner)),
    "diffusers": Seed("seed", built(test_accelerated.diffusers)),
    "lerobot": Seed("lerobot", built(test_accelerated.lerobot)),
    "lerobot-one-device": Seed("seed", built(lambda f: test_accelerated.lerobot(f, sharded=False)), weight=1),
    "fairseq2": Seed("seed", built(test_accelerated.fairseq2)),
    "script": Seed("seed", built(test_scripts.script_folder)),
    "accelerate-zero3": Seed("zero3", fixture("trainers/accelerate_deepspeed_z3"), weight=0.4),
    "averages": Seed("seed", fixture("averages/diffusers_registered"), weight=1),
    "schedule-free": Seed("torch", fixture("averages", inside="schedulefree_adamw_bfloat16"), "ckpt.pt", weight=1),
    "compressed-tensors": Seed("hf", fixture("quantised/ct_w3_channel_asym", config=True), weight=1),
    "gptq": Seed("seed", fixture("packed/gptq_v2_3bit", inside="", config=True), weight=1),
    "bitsandbytes": Seed("seed", fixture("packed/bnb_nf4", inside="", config=True), weight=1),
    "deltas-skyrl": Seed("seed", packed_fixture("deltas/programs.tar.xz", "skyrl"), "base", deltas="sync"),
    "deltas-modelexpress": Seed("seed", packed_fixture("deltas/programs.tar.xz", "modelexpress"), "base", deltas="deltas"),
    "torchao-weights": Seed("seed", fixture("torchao/weights", inside="."), "weights.pt", weight=0.4),
}  # fmt: skip


def build(folder: Path, names: Iterable[str] = SEEDS) -> dict[str, Path]:
    """{name: folder with the checkpoint}; torch starts no threads for it, which a fork would lose."""
    torch.set_num_threads(1)
    out = {}
    for name in names:
        out[name] = folder / name
        out[name].mkdir(parents=True)
        SEEDS[name].make(out[name])
    return out
