"""What is asked for: of `resume_verify` as a whole (VerifyRequest), and of one run (RunSettings, which the ranks get as
JSON).

Each field of a VerifyRequest that is made with `verify_option` is an option of `ckpttool resume-verify` and a keyword
of `ckpttool.resume_verify`: both are made from it. `VerifyKeywords` is the same again for type checkers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from ..by_fields import ByFields
from ..errors import UsageError, argument, get_named_flags
from ..options import OpenOptions, ReadKeywords, option
from .trace.records import NumericsRecord

__all__ = [
    "RunSettings",
    "Status",
    "VerifyKeywords",
    "VerifyRequest",
    "make_request",
    "parse_mesh",
    "read_settings",
    "write_settings",
]

#: Called with a sentence about what is being done.
Status = Callable[[str], None]

F = TypeVar("F", bound=Callable[..., Any])


def ignore_status(text: str) -> None:
    """Ignore a status line; the default for callers that want none."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyRequest(ByFields):
    """What `resume_verify` is asked to do; that function explains the fields."""

    source: str | os.PathLike[str] = ""
    reading: OpenOptions = field(default_factory=OpenOptions)
    against: str | os.PathLike[str] | None = option(
        None, "The original checkpoint, in any layout: the reference.", "Reference", metavar="PATH"
    )
    against_python: str | os.PathLike[str] | None = option(
        None,
        "Run the reference in this Python, with its torch and packages; without --against, on the checkpoint itself.",
        "Reference",
        metavar="PYTHON",
    )
    reference: str | os.PathLike[str] | None = option(
        None, "What ckpttool.Recorder wrote in the original job (JSONL).", "Reference"
    )
    reference_loader: str = option(
        "origin",
        "Who loads the reference of --against: origin (torch, safetensors or DeepSpeed, which wrote it) or ckpttool.",
        "Reference",
    )
    fresh: bool = option(
        False,
        "Smoke test of a job before a long run, without SOURCE: train from its start, save, go on, and resume from "
        "that save.",
        "Fresh",
    )
    fresh_steps: int = option(5, "Optimizer steps before that save.", "Fresh", least=1)
    resume_world_size: int | None = option(
        None, "Ranks of the second resume; by default one shard fewer, or two of one.", "Fresh", least=1
    )
    job: str | None = option(
        None,
        "Your own job: a function that builds it. That file, and the modules beside it, run as your code.",
        "Job",
        metavar="MODULE.PY:BUILD",
    )
    world_size: int | None = option(
        None, "Ranks of the job; by default one per GPU.", "Job", flag="--world-size/-n", least=1
    )
    mesh: str | None = option(None, "Mesh of the job.", "Job", metavar="dp_replicate=R,dp_shard=S,tp=T")
    against_world_size: int | None = option(
        None, "Ranks of the reference run; by default the same.", "Reference", least=1
    )
    steps: int = option(10, "Optimizer steps to run.", "Batches", least=1)
    start_step: int | None = option(None, "Step of the checkpoint, if the files do not say.", "Batches", least=0)
    data: str = option("synthetic", "Token rows: a .npy or .jsonl file, or synthetic.", "Batches", metavar="FILE")
    seed: int = option(0, "Seed of synthetic data.", "Batches")
    sequence: int | None = option(None, "Tokens of a row.", "Batches", flag="--seq-len/--sequence", least=2)
    global_batch: int | None = option(None, "Rows of one optimizer step, over all ranks.", "Batches", least=1)
    micro_batch: int | None = option(
        None, "Rows of one forward pass; the same at every world size.", "Batches", least=1
    )
    dtype: str | None = option(None, "Compute dtype: fp32, or bf16 with gradients reduced in fp32.", "Job")
    device: str = option("auto", "auto, cuda (NCCL) or cpu (gloo).", "Job")
    clip: float | None = option(
        None,
        "Largest gradient norm; larger ones are scaled down. 0 is no limit.",
        "Job",
        flag="--max-grad-norm/--clip",
        least=0,
    )
    profile: str | None = option(
        None,
        "Strictness: strict, standard or relaxed. By default strict, with --against-python standard.",
        "Judgement",
    )
    calibrate: bool = option(False, "Measure the noise of this job first, with one more run.", "Judgement")
    keep_dropout: bool = option(False, "Leave dropout on; comparable only at the saved world size.", "Job")
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass.", "Job")
    compile: bool = option(False, "torch.compile every block.", "Job")
    cpu_offload: bool = option(False, "Parameters and optimizer state in host memory.", "Job")
    module_prefix: str | None = option(
        None,
        "Prefix that the names of the checkpoint have and those of the job's model do not, such as net. of a "
        "LightningModule.",
        "Job",
        metavar="NAME.",
    )
    deterministic: bool | None = option(
        None,
        "Use deterministic kernels and collectives. By default as the job of --reference did; otherwise if torch has "
        "them.",
        "Job",
        flag="--deterministic/--no-deterministic",
    )
    reread: bool = option(
        True,
        "Read the files again and compare them with the state of the job.",
        "Judgement",
        flag="--reread/--no-reread",
    )
    round_trip: bool = option(
        True, "Save after the first step, load that, and continue.", "Judgement", flag="--round-trip/--no-round-trip"
    )
    updates: bool = option(
        True,
        "Measure the update of every tensor, for which a step keeps a copy of the parameters.",
        "Judgement",
        flag="--updates/--no-updates",
    )
    scratch: str | os.PathLike[str] | None = option(
        None, "Folder that all ranks share, for the saves of --round-trip and --fresh.", "Judgement", metavar="DIR"
    )
    timeout: float = option(
        600.0,
        "Seconds without progress after which the job ends and the silent rank is named.",
        "Job",
        metavar="SECONDS",
        least=1,
    )
    min_mfu: float | None = option(None, "Gate: minimum MFU.", "Gates", least=0, most=1)
    peak_tflops: float | None = option(
        None, "Peak of one GPU for the MFU, if ckpttool does not know it.", "Gates", least=0
    )
    max_reserved_gib: float | None = option(None, "Gate: maximum memory reserved on a rank.", "Gates", least=0)
    max_step_seconds: float | None = option(None, "Gate: maximum median step time.", "Gates", least=0)
    max_load_seconds: float | None = option(None, "Gate: maximum load time.", "Gates", least=0)
    status: Status = ignore_status

    @property
    def strictness(self) -> str:
        """The profile: that which was asked for, or else "strict", and "standard" for another Python, whose torch may
        have other kernels."""
        return self.profile or ("strict" if self.against_python is None else "standard")


class VerifyKeywords(ReadKeywords, total=False):
    """The keywords of `resume_verify`."""

    against: str | os.PathLike[str] | None
    against_python: str | os.PathLike[str] | None
    reference: str | os.PathLike[str] | None
    reference_loader: str
    fresh: bool
    fresh_steps: int
    resume_world_size: int | None
    job: str | None
    world_size: int | None
    mesh: str | None
    against_world_size: int | None
    steps: int
    start_step: int | None
    data: str
    seed: int
    sequence: int | None
    global_batch: int | None
    micro_batch: int | None
    dtype: str | None
    device: str
    clip: float | None
    profile: str | None
    calibrate: bool
    keep_dropout: bool
    activation_checkpointing: bool
    compile: bool
    cpu_offload: bool
    module_prefix: str | None
    deterministic: bool | None
    reread: bool
    round_trip: bool
    updates: bool
    scratch: str | os.PathLike[str] | None
    timeout: float
    min_mfu: float | None
    peak_tflops: float | None
    max_reserved_gib: float | None
    max_step_seconds: float | None
    max_load_seconds: float | None
    status: Status


def make_request(source: str | os.PathLike[str] | None, keywords: Mapping[str, Any]) -> VerifyRequest:
    """Make the request from the arguments of `resume_verify`; those about reading go into an `OpenOptions`.

    Raises:
        TypeError: there is no such argument.
    """
    reading = {n: x for n, x in keywords.items() if n in ReadKeywords.__annotations__}
    others = {n: x for n, x in keywords.items() if n not in reading}
    return VerifyRequest(source=source or "", reading=OpenOptions(**reading), **others)


@dataclass(frozen=True, eq=False, repr=False)
class RunSettings(ByFields):
    """One run: a checkpoint, the job it is loaded into, its batches.

    `reading` is how the checkpoint is opened. `mesh` is {"dp_replicate": R, "dp_shard": S, "tp": T}; its product is the
    world size. `job` is module.py:function, `config` a Hugging Face folder; one of the two is given. `start` is the
    step of the checkpoint. A run with `fresh_steps` loads nothing: it takes so many steps from the job's own start,
    saves into the folder `source` ("" for no save), and goes on. `rates` {step: learning rate of each group} come from
    the reference, for jobs without a scheduler. `micro_batch` is rows of one forward pass, `sequence` tokens of a row
    (None: what the data has). `probe` are the rows of a recorded reference's probe, {"input_ids": rows of token ids};
    {} without one. `module_prefix` is what the names of the checkpoint begin with and those of the job's model do not.
    `scratch` is a folder for the save of the round trip, that of rank 0 where they differ; None for none. `timeout` is
    for how many seconds a rank may make no progress. `python` is the program that runs the ranks, None for that of the
    command. `dtypes` are those in which every tensor gets a fingerprint as well, since the other side may have rounded
    it. `loader` is "origin" where the checkpoint's own program reads it, as far as it can, and else "ckpttool". `flags`
    are the options of the command, None where messages name arguments of Python.
    """

    source: str
    reading: OpenOptions = field(default_factory=OpenOptions)
    mesh: dict[str, int] = field(default_factory=dict)
    config: str | None = None
    job: str | None = None
    steps: int = 10
    start: int = 0
    fresh_steps: int = 0
    data: str = "synthetic"
    seed: int = 0
    sequence: int | None = None
    global_batch: int = 8
    micro_batch: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    clip: float | None = None
    rates: dict[int, list[float]] = field(default_factory=dict)
    probe: dict[str, list[list[int]]] = field(default_factory=dict)
    numerics: NumericsRecord = field(default_factory=NumericsRecord)
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    keep_dropout: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    cpu_offload: bool = False
    module_prefix: str = ""
    deterministic: bool = True
    reread: bool = True
    round_trip: bool = True
    updates: bool = True
    scratch: str | None = None
    timeout: float = 600.0
    python: str | None = None
    dtypes: list[str] = field(default_factory=list)
    loader: str = "ckpttool"
    flags: list[str] | None = field(default_factory=get_named_flags)

    def __post_init__(self) -> None:
        """Check the dtype and the two batch sizes.

        Raises:
            UsageError: the dtype is neither fp32 nor bf16, or the global batch is no multiple of the micro-batch.
        """
        if self.dtype not in ("fp32", "bf16"):
            raise UsageError(f"{argument('dtype', self.dtype)}: choose fp32 or bf16.", code="CKPT0203")
        if self.global_batch < 1 or self.micro_batch < 1 or self.global_batch % self.micro_batch:
            raise UsageError(
                f"{argument('global_batch', self.global_batch)} is not a multiple of "
                f"{argument('micro_batch', self.micro_batch)} rows.",
                code="CKPT0204",
            )

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of the mesh."""
        return math.prod(self.mesh.values())


def parse_mesh(text: str | None, world_size: int) -> dict[str, int]:
    """Parse "dp_replicate=2,dp_shard=4,tp=2" into {dimension: ranks}; dp_shard is 1 if the text does not have it.

    The product is not checked.

    Args:
        text: None for one dimension, dp_shard, of `world_size` ranks.
        world_size: used only if `text` is None.

    Raises:
        UsageError: another dimension, one twice, or a number below 1.
    """
    if text is None:
        return {"dp_shard": world_size}
    out: dict[str, int] = {}
    for part in text.split(","):
        name, eq, size = part.strip().partition("=")
        if (
            name not in ("dp_replicate", "dp_shard", "tp")
            or not eq
            or not size.isdecimal()
            or int(size) < 1
            or name in out
        ):
            raise UsageError(
                f"{argument('mesh', text)}: write dp_replicate=R,dp_shard=S,tp=T, each at most once, with numbers from "
                "1.",
                code="CKPT0203",
            )
        out[name] = int(size)
    return {"dp_shard": 1, **out} if "dp_shard" not in out else out


def write_settings(path: str, runs: list[RunSettings]) -> None:
    """Write the settings of runs to a JSON file, for the worker processes."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump([asdict(r) for r in runs], f)


def read_settings(path: str) -> list[RunSettings]:
    """Read the settings of runs from the JSON file that `write_settings` wrote."""
    with open(path, encoding="utf-8") as f:
        data = json.load(f)
    known = {f.name for f in fields(RunSettings)}
    out = []
    for run in data:
        run["rates"] = {int(k): v for k, v in run["rates"].items()}
        run["reading"] = OpenOptions(**run["reading"])
        out.append(RunSettings(**{k: v for k, v in run.items() if k in known}))
    return out
