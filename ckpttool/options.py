"""Options as fields of dataclasses, each declared once: its default, its help and its flag.

    OpenOptions    how a checkpoint is read
    WriteRequest   what is written
    RunOptions     how a conversion is carried out

The command line is made from these fields (cli/shared_options.py); functions of the Python interface list them as
keywords (`list_keywords`) and get the three requests back from `split_keywords`. The TypedDicts below are the same
fields again for type checkers: one for each set of keywords that some function takes. So a new option is a field, a
line in a TypedDict, and its use. Layouts declare options of their own in the same way.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from .by_fields import ByFields
from .errors import UsageError, argument
from .printable import count_noun

if TYPE_CHECKING:
    from .engine.transform.changing import Page
    from .engine.workers.executors import WorkersSpec

__all__ = [
    "ARCHIVE_LAYOUT",
    "DEFAULT_LAYOUT",
    "HUB_LAYOUT",
    "MOST_RANKS",
    "ApplyKeywords",
    "AverageKeywords",
    "AverageRequest",
    "CompareKeywords",
    "CompareRequest",
    "ConvertKeywords",
    "DeltaKeywords",
    "ExportKeywords",
    "ExtractKeywords",
    "Hints",
    "MergeKeywords",
    "MergeRequest",
    "OpenKeywords",
    "OpenOptions",
    "PlanKeywords",
    "Progress",
    "PullKeywords",
    "PushKeywords",
    "ReadKeywords",
    "RestoreKeywords",
    "RunOptions",
    "Search",
    "SearchPart",
    "SizeRequest",
    "WriteRequest",
    "list_keywords",
    "option",
    "parse_size",
    "silent",
    "split_keywords",
]

#: The layout that is written where none was asked for: a job with any number of ranks loads it.
DEFAULT_LAYOUT = "dcp"
#: The layout of a repository on the Hub.
HUB_LAYOUT = "hf"
#: The layout of the archives that `audit` makes.
ARCHIVE_LAYOUT = "audit"
#: Ranks of the largest job that anything is written for: each has a file.
MOST_RANKS = 1 << 17

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

#: What is told of a long run: (what is done, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Ignore a report of progress; this function is the `Progress` for callers that want no reports.

    Args:
        what: name of the stage, such as "load".
        done: bytes done so far.
        total: bytes in all.
    """


def parse_size(text: str) -> int:
    """Return the number of bytes of a size or a rate in text: 5GB, 500MiB, 200MB/s or 1000000.

    Raises:
        UsageError: it is not a size, or so small that a unit was forgotten.
    """
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(?:/s)?\s*", text.lower())
    if not m:
        raise UsageError(f"{text!r} is not a size; write 5GB or 500MiB.", code="CKPT0203")
    if float(m[1]) < 1024 and not m[2] and "b" not in text.lower():
        raise UsageError(
            f"{text!r} would be {text.strip()} bytes; write {text.strip()}GB or {text.strip()}MB.", code="CKPT0203"
        )
    return int(float(m[1]) * (1024 if m[3] else 1000) ** " kmgt".index(m[2] or " "))


def option(
    default: object,
    help: str,
    panel: str | None = None,
    *,
    flag: str | None = None,
    size: bool = False,
    metavar: str | None = None,
    least: float | None = None,
    most: float | None = None,
    repeated: bool = False,
    commas: bool = False,
) -> Any:
    """Return a dataclass field for an option, with its default and its description for the command line and the
    documentation.

    A switch that is on by default is turned off by its flag, or has two: "--round-trip/--no-round-trip".

    Args:
        default: the default value.
        help: one sentence, with the unit of a number.
        panel: the panel of --help that it is in; None for the panel of all options.
        flag: the option of the command line, with other names behind slashes; by default the name of the field with
            dashes.
        size: the number is in bytes, and the command line takes 5GB and 500MiB for it.
        metavar: placeholder of the value in help texts.
        least, most: the smallest and the largest number that the command line takes.
        repeated: a list whose members are given one by one, and not in one text with commas.
        commas: with `repeated`: members may also be given in one text with commas.

    Examples:
        >>> @dataclass(frozen=True)
        ... class MyOptions:
        ...     rows: int = option(64, "Rows of a file.")
    """
    said = {"help": help, "panel": panel, "flag": flag, "size": size, "metavar": metavar, "least": least, "most": most}
    return field(default=default, metadata=said | {"repeated": repeated, "commas": commas})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MergeRequest(ByFields):
    """An adapter to merge into the checkpoint that is opened (engine/merging.py).

    `adapter` is the checkpoint that holds it, None where it is in the same state; `names` of those to merge, in order,
    where there are several; `config` the folder with adapter_config.json, where it is not beside the adapter;
    `lora_alpha` and `rslora` stand for an adapter without that file.
    """

    adapter: str | os.PathLike[str] | None = None
    names: tuple[str, ...] = ()
    config: str | None = None
    lora_alpha: float | None = None
    rslora: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AverageRequest(ByFields):
    """Checkpoints to average with the one that is opened (engine/averaging.py).

    `others` are the further ones, in order. Without more it is their mean; `coefficients` has one number for each; they
    sum to 1 unless `linear`; `ema_decay` is that of an EMA over them in their order; `base` and `scale`, one number or
    one for each, are of task arithmetic; `slerp` is the part of the way from the first of two to the second.
    `accumulate` is the dtype of the computation.
    """

    others: tuple[str, ...]
    coefficients: tuple[float, ...] | None = None
    linear: bool = False
    ema_decay: float | None = None
    base: str | None = None
    scale: tuple[float, ...] | None = None
    slerp: float | None = None
    accumulate: str = "float64"

    def __post_init__(self) -> None:
        """Check that the request asks for one kind of average, with numbers that fit the checkpoints.

        Raises:
            UsageError: it does not.
        """
        count, given = len(self.others) + 1, self.numbers()
        if len({*given} - {"scale", "linear"} | ({"base"} if self.base is not None else set())) > 1:
            names = ", ".join(argument(name) for name in ("coefficients", "ema_decay", "base", "slerp"))
            raise UsageError(f"Give one of {names} at most: each is another average.", code="CKPT0204")
        for name, numbers in (("coefficients", self.coefficients), ("scale", self.scale)):
            if numbers is not None and not all(map(isfinite, numbers)):
                raise UsageError(f"{argument(name, list(numbers))}: not all of them are finite.", code="CKPT0203")
        if count < (1 if self.base is not None else 2):
            raise UsageError("One checkpoint has no average. Give at least two, and the destination.", code="CKPT0204")
        if self.coefficients is not None and len(self.coefficients) != count:
            raise UsageError(
                f"{argument('coefficients', list(self.coefficients))} are {len(self.coefficients)}, and {count} "
                "checkpoints were given.",
                code="CKPT0203",
            )
        if self.linear and self.coefficients is None:
            raise UsageError(f"{argument('linear', True)} goes with {argument('coefficients')}.", code="CKPT0204")
        if self.coefficients is not None and not self.linear and abs(sum(self.coefficients) - 1) > 1e-6:
            raise UsageError(
                f"{argument('coefficients', list(self.coefficients))} sum to {sum(self.coefficients):g}, so the result "
                f"is no average. {argument('linear', True)} computes the combination as it is.",
                code="CKPT0203",
            )
        if self.ema_decay is not None and not 0 <= self.ema_decay <= 1:
            raise UsageError(f"{argument('ema_decay', self.ema_decay)}: it is between 0 and 1.", code="CKPT0203")
        if self.scale is not None and (self.base is None or len(self.scale) not in (1, count)):
            raise UsageError(
                f"{argument('scale', list(self.scale))} goes with {argument('base')}, and is one number, or one for "
                f"each of the {count_noun(count, 'checkpoint')}.",
                code="CKPT0204",
            )
        if self.slerp is not None and (count != 2 or not 0 <= self.slerp <= 1):
            raise UsageError(
                f"{argument('slerp', self.slerp)} is between 0 and 1, and goes with two checkpoints.", code="CKPT0203"
            )
        if self.accumulate not in ("float64", "float32"):
            raise UsageError(f"{argument('accumulate', self.accumulate)}: it is fp64 or fp32.", code="CKPT0203")

    @property
    def method(self) -> str:
        """Return the kind of average: "mean", "coefficients", "ema_decay", "slerp", or "task" (task arithmetic)."""
        if self.base is not None:
            return "task"
        return next((m for m in ("coefficients", "ema_decay", "slerp") if getattr(self, m) is not None), "mean")

    def numbers(self) -> dict[str, Any]:
        """Return {name of a field: value} of those of `coefficients`, `linear`, `ema_decay`, `scale` and `slerp` that
        were given."""
        names = ("coefficients", "linear", "ema_decay", "scale", "slerp")
        return {name: value for name in names if (value := getattr(self, name)) not in (None, False)}

    def factors(self, count: int) -> tuple[float, ...] | None:
        """Return the factor of each of `count` checkpoints: `coefficients`, or for task arithmetic `scale`; None if the
        average has no fixed factors."""
        if self.base is None:
            return self.coefficients
        return (self.scale or (1.0,)) * (1 if len(self.scale or (1.0,)) == count else count)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenOptions(ByFields):
    """How a checkpoint is read; the arguments of `open`, which explains them.

    Fields that are made with `option` are options of every command that reads one.
    """

    source_layout: str | None = option(
        None, "Layout of the source, if it cannot be detected.", flag="--source-layout/--from", metavar="LAYOUT"
    )
    only: Iterable[str] | None = option(
        None,
        "What to use: components (model, optim, scheduler, scaler, rng, dataloader, trainer, extra), names, and globs "
        "such as 'model.layers.[0-3].*'; may be repeated.",
        metavar="model,GLOB,...",
        repeated=True,
        commas=True,
    )
    drop_matching: Iterable[str] | None = option(
        None,
        "Leave out the tensors and values whose names match; may be repeated.",
        metavar="GLOB",
        repeated=True,
        commas=True,
    )
    rename: Mapping[str, str] | None = option(
        None,
        "Replace what matches in the names of parameters, in model and optimizer, as Python's re.sub does; may be "
        "repeated.",
        metavar="REGEX=NEW",
        repeated=True,
    )
    weights: str | None = option(
        None,
        "Which weights are the model: the key of averages that the trainer keeps (ema, ...), a file beside the "
        "checkpoint, or schedule-free-x. `ckpttool inspect` lists them.",
        metavar="KEY",
    )
    config: str | None = option(
        None,
        "Hugging Face model of the same architecture: a folder with config.json, or a model id.",
        metavar="DIR|HF_ID",
    )
    like: str | os.PathLike[str] | None = option(
        None,
        "Another checkpoint of the same model, for what the source does not say about its parameters.",
        metavar="PATH",
    )
    flat_layout: str | os.PathLike[str] | None = option(
        None, "JSON file with the result of ckpttool.describe_fsdp1(model) in the job.", metavar="FILE"
    )
    wrap: Iterable[str] | None = option(
        None, "Modules that FSDP1 wrapped; * matches one name, ** any number.", metavar="PATTERN,..."
    )
    tag: str | None = option(None, "DeepSpeed save to read, if a folder holds several.", metavar="TAG")
    allow_equal_ranks: bool = option(False, "Read it even if one rank's file looks like a copy of another's.")
    allow_mixed_steps: bool = option(False, "Read it even if its files seem to come from different steps.")
    salvage: bool = False  # what is left of a damaged checkpoint: engine/salvage.py
    merge: MergeRequest | None = None  # with an adapter merged into it: engine/merging.py
    average: AverageRequest | None = None  # averaged with others: engine/averaging.py
    difference_to: str | os.PathLike[str] | None = None  # its difference to another one: engine/difference.py
    as_delta: bool = False  # a delta of ckpttool as the tensors that it holds, which are no state
    apply: Iterable[str] | None = None  # with deltas applied to its weights, in this order: engine/patching.py
    fill_from: str | os.PathLike[str] | None = (
        None  # another checkpoint of the run, which has what is lost: engine/fill_from.py
    )

    def __post_init__(self) -> None:
        """Convert lists to tuples and paths to text, and check that the options go together.

        Raises:
            UsageError: an option is a string in place of a list, or two options contradict each other.
        """
        for name in ("only", "drop_matching", "wrap", "apply"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(
                    f"{name}={value!r} is a string; give a list of strings, such as [{value!r}].", code="CKPT0203"
                )
            if value is not None:
                object.__setattr__(self, name, tuple(map(os.fspath, value)))
        object.__setattr__(self, "rename", dict(self.rename) if self.rename else None)
        if self.weights is not None and (
            self.salvage or {p.partition(".")[0] for p in self.only or ("model",)} != {"model"}
        ):
            raise UsageError(
                f"{argument('weights', self.weights)} makes a model of weights alone; it goes with neither "
                f"{argument('salvage', True)} nor components other than the model in {argument('only')}.",
                code="CKPT0204",
            )
        if self.apply and (self.salvage or self.weights is not None):
            raise UsageError(
                f"{argument('apply', self.apply)} changes the weights of a whole checkpoint; it goes with neither "
                f"{argument('salvage', True)} nor {argument('weights')}.",
                code="CKPT0204",
            )
        if self.fill_from is not None and not self.salvage:
            raise UsageError(
                f"{argument('fill_from')} fills in what a damaged checkpoint has lost; it goes with "
                f"{argument('salvage', True)}.",
                code="CKPT0204",
            )
        for name in ("like", "flat_layout", "fill_from", "difference_to"):  # plan_id compares them as text
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, os.fspath(value))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareRequest(ByFields):
    """What two models compute, and how far apart they may be; the arguments of `compare`, which explains them."""

    prompts: str | os.PathLike[str] | None = option(
        None,
        "File of prompts, one a line: token ids as a JSON list, or text, for which --config needs a tokenizer. Without "
        "one, ids are drawn from the vocabulary.",
        metavar="FILE",
    )
    seed: int = option(0, "Seed of the ids and pixels that are drawn.", least=0)
    dtype: str = option("fp32", "dtype to compute in: fp32, bf16, fp16 or fp64.", metavar="DTYPE")
    device: str = option("cpu", "Device to compute on: cpu, cuda or cuda:1.", metavar="DEVICE")
    max_kl: float | None = option(
        None,
        "KL divergence in nats, at the worst position, that counts as equal; by default only the measured bound does.",
        metavar="NATS",
        least=0,
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WriteRequest(ByFields):
    """What a conversion is asked to write; the arguments of `convert`, which explains them.

    Fields that are made with `option` are options of every command that writes a checkpoint.
    """

    to: str | None = option(
        None,
        "Layout to write: dcp, full, hf, zero3, zero2, zero1, universal, fsdp1, torch_checkpointing, audit, "
        "accelerate, trainer, llamafactory, lightning, torchtitan, torchtune, verl, xtuner or megatron.",
        metavar="LAYOUT",
    )
    options: object = None  # what only that layout understands: an instance of `Layout.options`
    world_size: int | None = option(
        None,
        "Ranks of the job that will load it; by default those of the source, if it has any.",
        flag="--world-size/-n",
        least=1,
        most=MOST_RANKS,
    )
    dtype: str | None = option(None, "dtype of floating-point weights: bf16, fp16, fp32 or keep.", metavar="DTYPE")
    cast: Mapping[str, str] | None = option(
        None, "dtype of the tensors whose names match; may be repeated.", metavar="GLOB=DTYPE", repeated=True
    )
    canonical_keys: bool = option(
        False, "dcp, full: write plain FQNs under model and optim instead of the source's own keys."
    )
    keys: Mapping[str, str] | None = option(
        None,
        "dcp, full: the key under which a job looks for a component, as in optim=optimizer or model=app.model; may be "
        "repeated.",
        metavar="COMPONENT=KEY",
        repeated=True,
    )
    drop: bool = option(False, "Convert without state that the target cannot hold and files that are not read.")
    strip_wrappers: bool = option(
        False, "dcp, full: leave _orig_mod., module. and other wrappers out of the source's own keys."
    )
    vocab_size: int | None = option(
        None,
        "Rows of the embedding and the output layer: pad with zeros, or cut rows that hold nothing.",
        metavar="N",
    )
    regroup: bool = option(False, "Give the optimizer the param groups of the checkpoint that --like names.")
    dequantize: Iterable[str] | None = option(
        None,
        "Write quantised tensors whose names match as plain numbers; may be repeated. Weights (fp8, int8, int4, nvfp4, "
        "mxfp4, mxfp8) have the numbers of the library that made them, in the dtype of --dtype or of the model: '*'. "
        "torchao's 8-bit, 4-bit and fp8 optimizers become float32; to move to plain AdamW: 'optim.*'. Masters that are "
        "stored as remainders of bf16 weights become float32: '*master*'.",
        metavar="GLOB",
        repeated=True,
    )
    quantize: str | None = option(
        None,
        "hf: write the weights of linear layers as fp8-block: fp8 codes with a scale for each block of 128 x 128, as "
        "DeepSeek-V3 has them.",
        metavar="SCHEME",
    )
    # a name map: its file, its text, or the name of one that comes with ckpttool; "none" applies none
    map: str | os.PathLike[str] | None = option(
        None,
        "Names and order of another program, for weights and optimizer: a map of `ckpttool maps`, a file, or none.",
        metavar="NAME|FILE",
    )
    ignore_recorded_digests: bool = option(False, "Do not compare the source with its recorded digests.")
    set_values: Mapping[str, object] | None = option(
        None,
        "Give values (learning rates, counters, ...) whose names match another number or text; may be repeated.",
        flag="--set",
        metavar="GLOB=VALUE",
        repeated=True,
    )
    reset: Iterable[str] | None = option(
        None,
        "Leave out state that the job is to start new: components (scheduler, optim, ...), or names or globs; may be "
        "repeated.",
        metavar="scheduler,GLOB,...",
        repeated=True,
        commas=True,
    )
    expected: Mapping[str, str] | None = None  # {tensor: BLAKE3 in hex} that the source must have
    change: Mapping[str, Callable[[Page], object]] | None = None  # {glob: what computes the tensor's numbers}

    def __post_init__(self) -> None:
        """Check the numbers, and convert lists to tuples, empty lists and dicts to None, and paths to text, so that
        equal requests have equal fields.

        Raises:
            UsageError: a number is out of its range, or an option is a string in place of a list.
        """
        for name in ("world_size", "vocab_size"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise UsageError(f"{argument(name, number)}: it must be an integer of at least 1.", code="CKPT0203")
        if (self.world_size or 0) > MOST_RANKS:
            raise UsageError(
                f"{argument('world_size', self.world_size)}: it must be at most {MOST_RANKS:,}.", code="CKPT0209"
            )
        # one way to say so, since plan_id compares requests
        for name in ("dequantize", "reset"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r} is a string; give a list, such as [{value!r}].", code="CKPT0203")
            object.__setattr__(self, name, tuple(value) if value else None)
        for name in ("cast", "keys", "set_values"):
            object.__setattr__(self, name, dict(getattr(self, name)) if getattr(self, name) else None)
        object.__setattr__(self, "expected", None if self.expected is None else dict(self.expected))
        object.__setattr__(self, "map", None if self.map is None else os.fspath(self.map))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SizeRequest(ByFields):
    """A job whose memory is computed; the arguments of `inspect`, which explains them."""

    fits: str | None = option(
        None,
        "Devices of a job, such as 8x80GB, or 4x8x80GB for 4 nodes: print what training takes on each.",
        "Memory of a job",
        metavar="[NODESx]NxSIZE",
    )
    strategy: Iterable[str] | None = option(
        None, "Only these: ddp, zero1, zero2, zero3, fsdp2, hsdp.", "Memory of a job", metavar="NAME,..."
    )
    precision: str = option(
        "saved",
        "Dtypes of the job: saved (those of the checkpoint), fp32, mixed or bf16.",
        "Memory of a job",
        metavar="PRECISION",
    )
    optimizer: str | None = option(
        None,
        "Optimizer of the job: saved, adamw, sgd or none; by default that of the checkpoint, or adamw if it has none.",
        "Memory of a job",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        """Check that `strategy` and `optimizer` are only given together with `fits`.

        Raises:
            UsageError: one of them is given without it.
        """
        if self.fits is None and (given := [n for n in ("strategy", "optimizer") if getattr(self, n) is not None]):
            raise UsageError(
                f"{argument(given[0])} is about the memory of a job; it goes with {argument('fits')}.", code="CKPT0204"
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunOptions(ByFields):
    """How a conversion is carried out; the arguments of `convert`, which explains them.

    Fields that are made with `option` are options of every command that copies tensors.
    """

    force: bool = option(False, "Replace an existing destination as a whole.")
    verify: bool = option(True, "Do not read the result back from disk.", flag="--no-verify")
    max_memory_bytes: int | None = option(
        None,
        "Memory budget of each process, for Python and the buffers.",
        flag="--max-memory",
        size=True,
        metavar="SIZE",
    )
    threads: int = option(
        2,
        "Number of threads that read, and of threads that write. With 1, one thread does everything: less CPU time, "
        "more wall time.",
        flag="--jobs/-j",
        least=1,
    )
    workers: WorkersSpec = option(
        None,
        "Who does the work: N processes here, or the workers of a dask, Ray or MPI cluster. Default: half of the "
        "cores, at most 8, from 4 GB on.",
        metavar="N|dask:ADDRESS|ray:auto|mpi|MODULE:FACTORY",
    )
    prove_logits: bool = option(
        False,
        "Before the result is committed, run it and the source on the same tokens, and fail unless they compute the "
        "same; needs transformers and config.json.",
    )
    progress: Progress = silent


# The same options as keywords of functions: `def f(path, **reading: Unpack[ReadKeywords])`. First those of reading.


class Hints(TypedDict, total=False):
    """What the files do not say of the model."""

    config: str | None
    like: str | os.PathLike[str] | None
    flat_layout: str | os.PathLike[str] | None
    wrap: Iterable[str] | None


class PartKeywords(TypedDict, total=False):
    """Which part of a checkpoint is read, besides `only`, and under which names."""

    drop_matching: Iterable[str] | None
    rename: Mapping[str, str] | None


class Search(Hints, total=False):
    """`Hints`, and which checkpoint of a path is meant."""

    source_layout: str | None
    tag: str | None


class ReadKeywords(Search, total=False):
    """`Search`, and what is read although it looks wrong."""

    allow_equal_ranks: bool
    allow_mixed_steps: bool


class OpenKeywords(PartKeywords, ReadKeywords, total=False):
    """Keywords of `open`, and of what reads checkpoints as it does."""


class SearchPart(PartKeywords, Search, total=False):
    """Keywords of `inspect` and `diff`, which refuse nothing."""


# Those of writing, each class with what the one before it lacks.


class _Copying(TypedDict, total=False):
    dtype: str | None
    ignore_recorded_digests: bool


class _Dropping(_Copying, total=False):
    drop: bool


class _Casting(_Dropping, total=False):
    options: object
    cast: Mapping[str, str] | None


class _ForRanks(_Casting, total=False):
    world_size: int | None


class _ToLayout(_ForRanks, total=False):
    to: str | None


class _Writing(_ToLayout, total=False):
    canonical_keys: bool
    keys: Mapping[str, str] | None
    strip_wrappers: bool
    vocab_size: int | None
    regroup: bool
    dequantize: Iterable[str] | None
    quantize: str | None
    map: str | os.PathLike[str] | None
    set_values: Mapping[str, object] | None
    reset: Iterable[str] | None
    expected: Mapping[str, str] | None
    change: Mapping[str, Callable[[Page], object]] | None


# Those of running.


class _Filling(TypedDict, total=False):
    force: bool
    max_memory_bytes: int | None
    threads: int
    progress: Progress


class _Running(_Filling, total=False):
    verify: bool


# All keywords of a function that converts.


class PlanKeywords(_Writing, OpenKeywords, total=False):
    """Keywords of `plan`."""

    only: Iterable[str] | None
    weights: str | None
    salvage: bool
    fill_from: str | os.PathLike[str] | None
    apply: Iterable[str] | None


class ConvertKeywords(PlanKeywords, _Running, total=False):
    """Keywords of `convert`."""

    workers: WorkersSpec
    prove_logits: bool


class ApplyKeywords(TypedDict, total=False):
    """Keywords of `apply`."""

    max_memory_bytes: int | None
    threads: int
    workers: WorkersSpec
    progress: Progress


class ExtractKeywords(_Copying, _Running, ReadKeywords, total=False):
    """Keywords of `adapter_extract` that `convert` has, too."""


class MergeKeywords(_ToLayout, _Running, ReadKeywords, total=False):
    """Keywords of `adapter_merge` that `convert` has, too."""

    only: Iterable[str] | None
    prove_logits: bool


class AverageKeywords(_ToLayout, _Running, ReadKeywords, total=False):
    """Keywords of `average` that `convert` has, too."""

    weights: str | None


class DeltaKeywords(_Running, ReadKeywords, total=False):
    """Keywords of `delta` that `convert` has, too."""

    only: Iterable[str] | None


class CompareKeywords(Search, total=False):
    """Keywords of `compare`."""

    weights: str | None
    prompts: str | os.PathLike[str] | None
    seed: int
    dtype: str
    device: str
    max_kl: float | None
    map: str | os.PathLike[str] | None
    progress: Progress


class ExportKeywords(_Dropping, _Running, ReadKeywords, total=False):
    """Keywords of `export` that `convert` has, too."""


class RestoreKeywords(_Running, Hints, total=False):
    """Keywords of `restore` that `convert` has, too."""

    to: str | None
    options: object
    world_size: int | None
    only: Iterable[str] | None
    dtype: str | None
    drop: bool


class PushKeywords(_Casting, ReadKeywords, total=False):
    """Keywords of `push` that `convert` has, too."""

    weights: str | None
    progress: Progress


class PullKeywords(_ForRanks, _Filling, ReadKeywords, total=False):
    """Keywords of `pull` that `convert` has, too; `to` has another default there."""

    only: Iterable[str] | None
    canonical_keys: bool


def split_keywords(keywords: Mapping[str, object]) -> tuple[OpenOptions, WriteRequest, RunOptions]:
    """Make the three requests of a conversion from its keywords: (how to read, what to write, how to carry it out). A
    keyword that is missing has the default of its field, and one that is no field of theirs is ignored.

    Raises:
        UsageError: the value of one makes no sense.
    """

    def make(kind: Callable[..., R]) -> R:
        own: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]
        return kind(**{f.name: keywords[f.name] for f in own if f.name in keywords})

    return make(OpenOptions), make(WriteRequest), make(RunOptions)


def list_keywords(function: F, others: tuple[Any, ...] = ()) -> F:
    """Decorate a function that takes `**keywords: Unpack[K]`: its signature then lists these keywords one by one, for
    help() and completion. Any other keyword raises a TypeError that names the function.

    K is a TypedDict whose keys are fields of OpenOptions, WriteRequest or RunOptions; defaults come from these fields.

    Args:
        function: the function.
        others: further dataclasses whose fields may be keys of K; they take precedence.
    """
    own = inspect.signature(function)
    explicit = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    (unpacked,) = (p for p in own.parameters.values() if p.kind is p.VAR_KEYWORD)
    kind = function.__globals__[str(unpacked.annotation).removeprefix("Unpack[").removesuffix("]")]
    every: dict[str, Field[Any]] = {}
    for request in (*others, WriteRequest, RunOptions, OpenOptions):
        for f in fields(request):
            every.setdefault(f.name, f)
    listed = [f for name, f in every.items() if name in kind.__annotations__]
    keywords = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in listed
    ]
    names = {p.name for p in (*explicit, *keywords)}

    @wraps(function)
    def call(*arguments: object, **given: object) -> Any:
        for name in given:
            if name not in names:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*arguments, **given)

    call.__dict__["__signature__"] = own.replace(parameters=[*explicit, *keywords])
    call.__annotations__ = {
        **{k: v for k, v in function.__annotations__.items() if k != unpacked.name},
        **{f.name: f.type for f in listed},
    }
    return call  # type: ignore[return-value]
