"""What a user may ask of the layouts that are written: `Layout.options`, without the modules that write."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from ckpttool.by_fields import ByFields
from ckpttool.errors import UsageError, argument
from ckpttool.layouts import option
from ckpttool.storage.urls import make_path_absolute

from .meshes import Mesh

__all__ = [
    "DirectoryOptions",
    "Fsdp1Options",
    "HfOptions",
    "MeshOptions",
    "UniversalOptions",
    "VerlOptions",
    "ZeroOptions",
]

_MAX_PLAN = 1 << 20  # characters of a plan


@dataclass(frozen=True, eq=False, repr=False)
class HfOptions(ByFields):
    """The content of an hf folder."""

    max_shard_bytes: int = option(
        5_000_000_000, "Maximum size of a file of weights.", flag="--max-shard-size", size=True
    )
    adapter: bool = option(False, "Write only the adapter, as PEFT saves it.")
    adapter_name: str | None = option(
        None, "Which adapter, if there are several; by default the one named default.", metavar="NAME"
    )
    adapter_config: str | None = option(
        None, "Folder with the adapter's adapter_config.json, if it is not that of --config.", metavar="DIR"
    )
    lora_alpha: float | None = option(
        None, "lora_alpha of an adapter without adapter_config.json, which is then made.", metavar="NUMBER"
    )
    rslora: bool = option(False, "With --lora-alpha: the adapter is scaled by alpha / sqrt(r).")
    base_model: str | None = option(
        None, "With --lora-alpha: path or id of the base model, for adapter_config.json.", metavar="MODEL"
    )
    split_experts: bool = option(
        False, "Write the LoRA of stacked experts as that of each expert, as the Hub names them; needs --config."
    )
    include_optimizer: bool = option(False, "Write the optimizer and all other state, too.")
    strip_prefix: str | None = option(
        None, "Prefix to remove from the names of weights; names without it stay as they are.", metavar="PREFIX"
    )
    allow_name_mismatch: bool = option(
        False, "Write weights that the model of the config does not have, or has in other shapes."
    )
    untie: bool = option(
        False, "Write both of the weights that config.json ties, and set tie_word_embeddings to false."
    )

    def __post_init__(self) -> None:
        """Refuse options that contradict one another or are out of range, and make `adapter_config` an absolute path if
        it exists.

        Raises:
            UsageError: `adapter` is combined with `include_optimizer`; an option about adapters is given without
                `adapter`, or one for `lora_alpha` without it; `lora_alpha` is not a finite number above 0, or
                `max_shard_bytes` is below 1.
        """
        if self.adapter_config and os.path.lexists(self.adapter_config):  # workers may be in another folder
            object.__setattr__(self, "adapter_config", make_path_absolute(self.adapter_config))
        if self.adapter and self.include_optimizer:
            raise UsageError(
                f"{argument('adapter', True)} writes the adapter alone; it cannot be combined with "
                f"{argument('include_optimizer', True)}.",
                code="CKPT0204",
            )
        of_adapter = {
            "adapter_name": self.adapter_name,
            "adapter_config": self.adapter_config,
            "lora_alpha": self.lora_alpha,
            "split_experts": self.split_experts or None,
        }
        for name, value in of_adapter.items():
            if value is not None and not self.adapter:
                raise UsageError(
                    f"{argument(name, value)} is about an adapter; give {argument('adapter', True)} too.",
                    code="CKPT0204",
                )
        for name, value in (("rslora", self.rslora or None), ("base_model", self.base_model)):
            if value is not None and self.lora_alpha is None:
                raise UsageError(
                    f"{argument(name, value)} is for the adapter_config.json that {argument('lora_alpha')} makes; give "
                    "both.",
                    code="CKPT0204",
                )
        if self.lora_alpha is not None and not (math.isfinite(self.lora_alpha) and self.lora_alpha > 0):
            raise UsageError(
                f"{argument('lora_alpha', self.lora_alpha)}: it must be a number above 0.", code="CKPT0203"
            )
        if self.max_shard_bytes < 1:
            raise UsageError(
                f"{argument('max_shard_bytes', self.max_shard_bytes)}: it must be at least 1.", code="CKPT0203"
            )


@dataclass(frozen=True, eq=False, repr=False)
class ZeroOptions(ByFields):
    """The configuration of the DeepSpeed engine that will load the save; None: as in the source, or DeepSpeed's
    default."""

    sub_group_size: int | None = option(
        None, "sub_group_size in the config of the engine that will load it; DeepSpeed's default is 1e9 elements."
    )
    precision: str | None = option(None, "Precision of the job that will load it: bf16, fp16 or fp32.")
    write_tag: str | None = option(None, "Name of the save to write, instead of global_step<N>.")
    expert_parallel: int | None = option(
        None,
        "zero1, zero2: ep_size of the MoE layers, or autoep_size, in the job that will load it; that of the source, or "
        "1.",
    )

    tensor_parallel: int | None = option(
        None,
        "zero1, zero2, zero3: autotp_size of the job that will load it, which divides --world-size; by default 1, "
        "whole weights. The source, or a save of such a job that --like names, says how parameters are cut.",
    )

    def __post_init__(self) -> None:
        """Raise UsageError if `sub_group_size`, `expert_parallel` or `tensor_parallel` is given and below 1."""
        for name in ("sub_group_size", "expert_parallel", "tensor_parallel"):
            if (n := getattr(self, name)) is not None and n < 1:
                raise UsageError(f"{name} is {n}; it must be at least 1.", code="CKPT0203")


@dataclass(frozen=True, eq=False, repr=False)
class UniversalOptions(ZeroOptions):
    """As `ZeroOptions`, and the stage: files of stage 3 differ from those of 1 and 2."""

    stage: int | None = option(
        None, "ZeRO stage of the engine that will load it: 1, 2 or 3; that of the source, or 3.", flag="--zero-stage"
    )

    def __post_init__(self) -> None:
        """Check the options of ZeRO, too, and raise UsageError for a stage other than 1, 2, 3 or None."""
        super().__post_init__()
        if self.stage not in (None, 1, 2, 3):
            raise UsageError(f"The ZeRO stage is {self.stage}; it must be 1, 2 or 3.", code="CKPT0203")


@dataclass(frozen=True, eq=False, repr=False)
class MeshOptions(ByFields):
    """The mesh of the job that will load a folder of DCP; None: one dimension, over which FSDP divides."""

    mesh: str | None = option(
        None,
        "Mesh of the job that will load it, as torchtitan names its dimensions (pp, dp_replicate, dp_shard, cp, tp, "
        "ep): each rank finds its part of every tensor in one file.",
        metavar="dp_shard=N,tp=M,...",
    )
    tp_plan: str | None = option(
        None,
        "With --mesh: file that says which tensors tensor and expert parallelism divide, and how; by default the "
        "checkpoint of --like or the model of --config says it.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        """Check the mesh, and replace the path of a plan by its text, since workers may be elsewhere.

        Raises:
            UsageError: the text of a mesh is not one, or a plan has no mesh, or is no file.
        """
        if self.mesh is None:
            if self.tp_plan is not None:
                raise UsageError(
                    f"{argument('tp_plan')} says how the dimensions of {argument('mesh')} divide tensors; give both.",
                    code="CKPT0204",
                )
            return
        Mesh.parse(self.mesh)
        if self.tp_plan is not None and "\n" not in self.tp_plan:
            if os.path.exists(self.tp_plan) and not os.path.isfile(self.tp_plan):  # reading a FIFO would wait for ever
                raise UsageError(f"{argument('tp_plan', self.tp_plan)} is not a regular file.", code="CKPT0202")
            try:
                with open(self.tp_plan, encoding="utf-8") as f:
                    text = f.read(_MAX_PLAN + 1)
            except (OSError, ValueError) as e:
                raise UsageError(f"{argument('tp_plan', self.tp_plan)} cannot be read: {e}.", code="CKPT0202") from None
            if len(text) > _MAX_PLAN:
                raise UsageError(
                    f"{argument('tp_plan', self.tp_plan)} has more than {_MAX_PLAN:,} characters.", code="CKPT0202"
                )
            object.__setattr__(self, "tp_plan", text + "\n")

    @property
    def sizes(self) -> Mesh | None:
        """Return the sizes of the mesh; None where none was given."""
        return None if self.mesh is None else Mesh.parse(self.mesh)

    @property
    def world_size(self) -> int | None:
        """Count the ranks of the job; None where no mesh was given."""
        return None if self.sizes is None else self.sizes.world


@dataclass(frozen=True, eq=False, repr=False)
class Fsdp1Options(ByFields):
    """The arguments of FSDP1 in the job that will load the files."""

    use_orig_params: bool = option(False, "For a job that calls FSDP(use_orig_params=True).")
    precision: str | None = option(None, "Precision of the job that will load it: bf16, fp16 or fp32.")


@dataclass(frozen=True, eq=False, repr=False)
class DirectoryOptions(ByFields):
    """How a trainer's directory is laid out."""

    state_dict_type: str | None = option(
        None,
        "What the FSDP plugin of the job asks for: sharded (SHARDED_STATE_DICT) or full (FULL_STATE_DICT); ddp for a "
        "job without FSDP, on one GPU or more. By default ddp for one process, sharded for several.",
        metavar="sharded|full|ddp",
    )

    def __post_init__(self) -> None:
        """Raise UsageError if `state_dict_type` is not sharded, full, ddp or None."""
        if self.state_dict_type not in ("sharded", "full", "ddp", None):
            raise UsageError(
                f"{argument('state_dict_type', self.state_dict_type)}: choose sharded, full or ddp.", code="CKPT0203"
            )


@dataclass(frozen=True, eq=False, repr=False)
class VerlOptions(ByFields):
    """The devices of the job of verl that will load the files."""

    mesh_device: str = option(
        "cuda", "Type of the devices of the job of verl that will load it: cuda, npu or cpu.", metavar="cuda|npu|cpu"
    )

    def __post_init__(self) -> None:
        """Raise UsageError if `mesh_device` is not cuda, npu or cpu."""
        if self.mesh_device not in ("cuda", "npu", "cpu"):
            raise UsageError(f"{argument('mesh_device', self.mesh_device)}: choose cuda, npu or cpu.", code="CKPT0203")
