"""The dicts inside a trace, with the types of their keys. They are plain data, as traces and recordings have them in
JSON; keys that a run or an earlier version did not write are absent."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

__all__ = [
    "AfterRecord",
    "EnvironmentRecord",
    "LoadCostRecord",
    "LogitSketch",
    "MemoryRecord",
    "MisfitRecord",
    "NumericsRecord",
    "ProbeRecord",
    "RoundTripRecord",
    "ScheduleRecord",
]


class NumericsRecord(TypedDict, total=False):
    """What decides which kernels CUDA runs. `deterministic` is False with `warn_only`, where attention stays as it is;
    `tf32` is about matrix products, `cudnn_tf32` about convolutions."""

    deterministic: bool
    tf32: bool
    cudnn_tf32: bool
    bf16_reduced_precision: bool


class EnvironmentRecord(TypedDict, total=False):
    """Versions and devices, how a run computed, and what was noticed on the way.

    `executable` is the path of Python, `packages` {name: version} those that it had imported. `random` says that the
    forward pass draws random numbers: "restored" from the checkpoint, or "seeded". `rng_restored` is whether the
    checkpoint had generators for as many ranks. `copies_differ` are tensors whose copies on several ranks differ,
    `rounded` those that the job holds less precisely than the files. `as_stored` and `not_rounded` are set by
    `differences.with_stored_dtypes`. `own_loading` are functions of the job that torch calls as it loads a state dict,
    and `ckpttool.load` does not (`live_facts.list_own_load_functions`).
    """

    ckpttool: str
    torch: str
    python: str
    executable: str
    packages: dict[str, str]
    gpu: str
    cuda: str | None
    nccl: str
    attention: str
    numerics: NumericsRecord
    deterministic: bool
    compile: bool
    scheduler_waits: bool
    dropout_probabilities: list[float]
    random: str
    rng_restored: bool
    copies_differ: list[str]
    rounded: list[str]
    as_stored: list[str]
    not_rounded: list[str]
    own_loading: list[str]


class LogitSketch(TypedDict, total=False):
    """A sketch of logits (probing.py), and their shape; or why there is none, as `skipped`."""

    sketch: list[list[float]]
    shape: list[int]
    not_finite: int
    skipped: str


class ProbeRecord(LogitSketch, total=False):
    """The logits of a fixed batch.

    Of a run: `file` is a .npy of logits (positions, vocabulary) in float32, `agree` whether every rank has the same,
    `odd` the ranks that differ from most, `batch` the digest of the rows. `recorded` is the sketch for the rows of a
    recorded reference. Of a recording: `rows` {"input_ids": [...]} and their sketch.
    """

    file: str
    agree: bool
    odd: list[int]
    batch: str
    recorded: LogitSketch
    rows: dict[str, list[list[int]]]


class RoundTripRecord(TypedDict, total=False):
    """The save after the first step, and its load; or why there was none, as `skipped`. `differing` are the names that
    changed, `apart` the tensors of which every rank has a copy of its own. Of a job that was
    trained from its start, its save; `own` is whether the job's own code saved it."""

    save_seconds: float
    load_seconds: float
    bytes: int
    differing: list[str]
    apart: list[str]
    own: bool
    skipped: str


class MisfitRecord(TypedDict):
    """How the names and shapes of checkpoint and job differ, see `misfit.compare_names_and_shapes`."""

    missing: list[str]
    surplus: list[str]
    shapes: dict[str, list[list[int]]]
    prefix: NotRequired[str]
    job_prefix: NotRequired[str]
    rows: NotRequired[list[int]]
    adapter: NotRequired[str]


class LoadCostRecord(TypedDict):
    """What a load cost a rank. Peaks are of resident memory and of the device's; the latter is None on CPU."""

    rank: NotRequired[int]
    seconds: float
    bytes: int
    host_bytes: int
    device_bytes: int | None


class MemoryRecord(TypedDict, total=False):
    """Peaks of the memory of a rank's device, or on CPU of its process. `reserved_bytes` is without `measuring_bytes`,
    those of the copy of the parameters by which updates are measured."""

    rank: int
    measuring_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int


class AfterRecord(TypedDict, total=False):
    """What the job held after a step. `sketches` {canonical name: (dtype, sketch)} are of all tensors, also of buffers
    that no checkpoint holds; those of `buffers` are no parameters. `apart` are tensors of which every rank has a copy
    of its own: the sketch is rank 0's. `scalars` and `groups` are as in a trace. `loaded` {name: sketch} are the
    buffers of a run before its first step."""

    step: int
    sketches: dict[str, tuple[str, str]]
    buffers: list[str]
    apart: list[str]
    scalars: dict[str, float]
    groups: list[dict[str, Any]]
    loaded: dict[str, str]


class ScheduleRecord(TypedDict, total=False):
    """The learning rates that a scheduler gives from step `first` on (state_after.py). `groups` has the number of its
    curve for each param group. `stopped` is the error that ended them before the last one; `skipped` says why there are
    none."""

    first: int
    curves: list[str]
    groups: list[int]
    stopped: str
    skipped: str
