"""The settings of one run: a checkpoint, the job that it is loaded into, its batches. Workers get them as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..engine.opening import OpenOptions
from ..errors import UsageError, argument, flags_are_named

__all__ = ["Settings", "Status", "parse_mesh", "read_settings", "write_settings"]

#: Called with a sentence about what is being done.
Status = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """One run: a checkpoint, the job it is loaded into, its batches.

    `reading` is how the checkpoint is opened. `mesh` is {"dp_replicate": R, "dp_shard": S, "tp": T}; its product is the
    world size. `job` is module.py:function, `config` a Hugging Face folder; one of the two is given. `start` is the
    step of the checkpoint. `rates` {step: learning rate of each group} come from the reference, for jobs without a
    scheduler. `micro_batch` is rows of one forward pass, `sequence` tokens of a row (None: what the data has). `probe`
    are the rows of a recorded reference's probe, {"input_ids": rows of token ids}; {} without one. `module_prefix` is
    what the names of the checkpoint begin with and those of the job's model do not. `scratch` is a folder for the save
    of the round trip, that of rank 0 where they differ; None for none. `timeout` is for how many seconds a rank may
    make no progress. `dtypes` are those in which every tensor gets a fingerprint as well, since the other side may have
    rounded it. `flags` are the options of the command, None where messages name arguments of Python.
    """

    source: str
    reading: OpenOptions = field(default_factory=OpenOptions)
    mesh: dict[str, int] = field(default_factory=dict)
    config: str | None = None
    job: str | None = None
    steps: int = 10
    start: int = 0
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
    numerics: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    keep_dropout: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    cpu_offload: bool = False
    module_prefix: str = ""
    deterministic: bool = True
    reread: bool = True
    round_trip: bool = True
    scratch: str | None = None
    timeout: float = 600.0
    dtypes: list[str] = field(default_factory=list)
    flags: list[str] | None = field(default_factory=flags_are_named)

    def __post_init__(self) -> None:
        if self.dtype not in ("fp32", "bf16"):
            raise UsageError(f"{argument('dtype', self.dtype)}: choose fp32 or bf16.")
        if self.global_batch < 1 or self.micro_batch < 1 or self.global_batch % self.micro_batch:
            raise UsageError(
                f"{argument('global_batch', self.global_batch)} is not a multiple of "
                f"{argument('micro_batch', self.micro_batch)} rows."
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())


def parse_mesh(text: str | None, world_size: int) -> dict[str, int]:
    """--mesh dp_replicate=2,dp_shard=4,tp=2, or one dimension of all ranks.

    Raises:
        UsageError: another dimension, a number below 1, or a product that is not the world size.
    """
    if text is None:
        return {"dp_shard": world_size}
    out: dict[str, int] = {}
    for part in text.split(","):
        name, eq, size = part.strip().partition("=")
        if (
            name not in ("dp_replicate", "dp_shard", "tp")
            or not eq
            or not size.isdigit()
            or int(size) < 1
            or name in out
        ):
            raise UsageError(
                f"{argument('mesh', text)}: write dp_replicate=R,dp_shard=S,tp=T, each at most once, with numbers from "
                "1."
            )
        out[name] = int(size)
    return {"dp_shard": 1, **out} if "dp_shard" not in out else out


def write_settings(path: str, runs: list[Settings]) -> None:
    """Write them for the workers, which call `read_settings`."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump([asdict(r) for r in runs], f)


def read_settings(path: str) -> list[Settings]:
    """Read what `write_settings` wrote."""
    with open(path, encoding="utf-8") as f:
        data = json.load(f)
    known = {f.name for f in fields(Settings)}
    out = []
    for run in data:
        run["rates"] = {int(k): v for k, v in run["rates"].items()}
        run["reading"] = OpenOptions(**run["reading"])
        out.append(Settings(**{k: v for k, v in run.items() if k in known}))
    return out
