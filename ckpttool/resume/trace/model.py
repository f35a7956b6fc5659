"""The data of one run: the state in the job after loading, the probe, every step; and its JSON.

    Trace(source, world_size, ..., state, groups, probe, steps, ...)
    Step(step, loss, grad_norm, update_norm, learning_rates, batch, ..., grads, updates)

A trace comes from a run of `resume-verify`, or from the lines that a `Recorder` wrote in a user's own training loop;
these know less, and unknown fields are None or empty. Everything is plain data, so traces of jobs with different world
sizes can be compared as files.

Recorded lines (JSONL), one object each:

    {"ckpttool": 1, "kind": "start", ...}    fields of Trace, as far as known; a later one replaces an earlier one
    {"kind": "state", "version": 2, "step": 300, "state": {...}, "scalars": {...}, "groups": [...],
     "values": {...}, "others": {...}, "variants": {...}, "generators": [...], "probe": {...}, "unrecorded": {...},
     "after": {...}, "schedule": {...}}
                                                                                          what the job held at a step
    {"kind": "step", "step": 301, "loss": 2.25, ...}                                     fields of Step
    {"kind": "lost", "what": "norms", "why": "..."}                                      what could not be recorded

Recordings of earlier versions have fewer fields; whatever a recording lacks is in `Trace.unrecorded`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ...bounded_json import parse
from ...errors import Corrupt, Unsafe, Unsupported, UsageError, argument, kind_of_failure
from .batches import split_marks
from .records import (
    AfterRecord,
    EnvironmentRecord,
    LoadCostRecord,
    MemoryRecord,
    MisfitRecord,
    ProbeRecord,
    RoundTripRecord,
    ScheduleRecord,
)
from .side_state import Mark, make_object_mark

__all__ = [
    "LIVE",
    "OF_BUILD",
    "RECORD_VERSION",
    "SCHEMA",
    "Step",
    "Trace",
    "format_record_line",
    "read_reference",
    "read_trace",
    "spell_non_finite",
    "trace_to_json",
]

SCHEMA = 1
#: `Trace.layout` of a run that loaded nothing, but trained a job from its start.
LIVE = "live job"
#: Of the records of a state, whose `version` is 1 if they have none.
RECORD_VERSION = 2
#: `Trace.data` of a run whose rows came from the user's build().
OF_BUILD = "given by build()"


@dataclass
class Step:
    """One optimizer step. Norms are L2, of the whole tensor over all ranks; None or empty where not recorded.

    `step` counts from 1 over the whole training, so that the one after a checkpoint of step n is n + 1. `loss` is the
    mean over the tokens of the global batch. `grad_norm` and `grads` {FQN: norm} are before clipping, `updates` {FQN:
    norm} and `update_norm` of what the optimizer added to the parameters. `learning_rates` has the one used in this
    step for each param group. `batch` is the digest of the global batch's input_ids
    (`batches.digest_and_mark_rows`), `inputs` {key: digest} those of its other tensors, and `samples` that of whole
    samples (`batches.digest_batch`). `rows` are the marks of the rows of each data-parallel rank
    (`batches.split_marks`). `losses` is the global loss as each rank has it. `grad_sketches` and `update_sketches` are
    the sketches of the tensors of `grads` and `updates`, in their order, each over the tensor's norm (sketches.py).
    `seconds` is forward, backward, clipping and the optimizer, without the measurements.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    update_norm: float | None = None
    learning_rates: list[float] | None = None
    batch: str | None = None
    tokens: int | None = None
    seconds: float | None = None
    losses: list[float] | None = None
    grads: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    grad_sketches: str | None = None
    update_sketches: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    samples: str | None = None


@dataclass
class Trace:
    """The data of one run.

    The dicts of `misfit`, `environment`, `probe`, `roundtrip`, `loads`, `memory`, `after` and `schedule` are described
    in records.py.

    failed: why the checkpoint could not be loaded into the job; then only `start` and the names in `state` are set,
        without fingerprints. `misfit` is how names and shapes differ, if that is why.
    stopped: why the training ended early: the error of the optimizer's step, on every rank; None if it did not.
    state: {canonical name: (dtype, shape, fingerprint)} of the tensors in the job after loading, at step `start`.
    final: {canonical name: fingerprint} of the tensors in the job after its last step.
    others: the same for tensors and arrays that no job holds (scaler, dataloader, random states, averages of weights),
        from the files, and for what else is no plain value (side_state.py).
    stored: fingerprints of the same tensors in the files, in the dtype of the job, if these were read a second time.
    stored_as: {name: (dtype, fingerprint)} of those that the files have in another dtype than the job.
    rounded: {dtype: {name: fingerprint}} of what the job holds, rounded to a dtype.
    scalars: the values of tensors with one element.
    values: the other plain data of the checkpoint (side_state.py).
    variants: {name: [...]} of values and others that the ranks of a recorded job held differently.
    generators: marks of the random states of each rank of a recorded job, {"torch": mark, "cuda", "numpy", "python"},
        and "numpy_position".
    unrecorded: {what: why} of what a `Recorder` did not record.
    buffers: {name: [dtype, shape, bytes in hex]} of small buffers of a recorded job that no checkpoint holds.
    quanta: {FQN: L2 norm} of the distance from each element of a parameter of 16 bits to the next number.
    groups: the optimizer's param groups as the job holds them: options, and "params": [FQN, ...].
    stored_groups: the param groups of the files: "options", the names of their options, and "params": [FQN, ...]. None
        where no files were looked at, as for a recording.
    tied: the names of each parameter that has more than one.
    loaders: {component: who loaded it into the job}: "ckpttool", or a reader of the program that wrote the checkpoint.
    unwitnessed: {component: why ckpttool loaded it}, of a run that was to be loaded by such readers.
    held: {name: value, or mark} of what the scheduler and the modules' get_extra_state() hold after loading; keys that
        are no text have brackets.
    recipe: what the job was built from: module.py:build, or the folder of a configuration.
    scheduler: the class of the scheduler that ran.
    dropout_off: the largest probability of a dropout that was switched off.
    after: what the job held after the last step; of a recording, after the step that was asked for.
    schedule: the learning rates that the scheduler gives from then on; of a recording, from step `start` on.
    unread: (file, component) of state beside the checkpoint that its layout does not read.
    load_seconds, load_bytes: of the slowest rank, and of all ranks.
    """

    source: str = ""
    layout: str | None = None
    failed: str | None = None
    stopped: str | None = None
    misfit: MisfitRecord | None = None
    start: int = 0
    world_size: int | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    seed: int | None = None
    data: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    sequence: int | None = None
    clip: float | None = None
    dropout: bool = False
    dropout_off: float = 0.0
    loaders: dict[str, str] = field(default_factory=dict)
    unwitnessed: dict[str, str] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    scheduler: str | None = None
    unread: list[tuple[str, str]] = field(default_factory=list)
    parameters: int | None = None
    state: dict[str, tuple[str, tuple[int, ...], str]] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    others: dict[str, tuple[str, tuple[int, ...], str]] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    stored_as: dict[str, tuple[str, str]] = field(default_factory=dict)
    rounded: dict[str, dict[str, str]] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, list[Any]] = field(default_factory=dict)
    buffers: dict[str, list[Any]] = field(default_factory=dict)
    generators: list[dict[str, Any]] = field(default_factory=list)
    unrecorded: dict[str, str] = field(default_factory=dict)
    quanta: dict[str, float] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    stored_groups: list[dict[str, list[str]]] | None = None
    tied: list[list[str]] = field(default_factory=list)
    config: dict[str, Any] | None = None
    probe: ProbeRecord = field(default_factory=ProbeRecord)
    steps: list[Step] = field(default_factory=list)
    after: AfterRecord = field(default_factory=AfterRecord)
    schedule: ScheduleRecord = field(default_factory=ScheduleRecord)
    roundtrip: RoundTripRecord = field(default_factory=RoundTripRecord)
    load_seconds: float | None = None
    load_bytes: int | None = None
    loads: list[LoadCostRecord] = field(default_factory=list)
    memory: list[MemoryRecord] = field(default_factory=list)
    environment: EnvironmentRecord = field(default_factory=EnvironmentRecord)
    notes: list[str] = field(default_factory=list)


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """Return a trace as plain data; NaN and infinities are the strings "nan", "inf" and "-inf", since JSON has no such
    numbers."""
    plain = spell_non_finite(asdict(trace))
    return {"ckpttool": SCHEMA, **plain}


def format_record_line(kind: str, **record: object) -> str:
    """Return one record of a `Recorder` as a line of JSON.

    `kind` is "start", "state", "step" or "lost"; `record` has its fields.
    """
    return json.dumps({"ckpttool": SCHEMA, "kind": kind, **spell_non_finite(record)}, ensure_ascii=False) + "\n"


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a JSON file that holds what `trace_to_json` returned."""
    with open(path, encoding="utf-8") as f:
        return _parse_trace(_parse_non_finite(json.load(f)))


def read_reference(path: str | os.PathLike[str], at: int | None = None, later: int = 0) -> Trace:
    """Read the trace that a `Recorder` wrote as lines of JSON. If a step was recorded several times, the last record
    counts.

    Args:
        path: the recording.
        at: the step whose state is wanted; if None, or if its state was not recorded, the last recorded state is taken.
        later: number of steps after that at which the final state (`Trace.after`) is wanted.

    Raises:
        UsageError: there is no such file. Corrupt: a line is not a record, or no step is recorded. Unsupported: it
            is of a newer ckpttool. Where a disk or a network fails, the error says that.
    """
    out = Trace(source=os.fspath(path))
    steps: dict[int, Step] = {}
    states: dict[int, dict[str, Any]] = {}
    every_after: dict[int, AfterRecord] = {}
    lost: dict[str, str] = {}
    try:
        lines = list(_read_records(path))
    except OSError as e:
        raise kind_of_failure(e, UsageError)(f"{argument('reference', os.fspath(path))}: {e.strerror or e}.") from None
    for number, record in lines:
        if (version := record.get("version", 1)) not in range(1, RECORD_VERSION + 1):
            raise Unsupported(
                f"{os.fspath(path)}, line {number}, is of version {str(version)[:20]}; this ckpttool reads "
                f"recordings of versions 1 to {RECORD_VERSION}. Use a newer ckpttool.",
                code="CKPT0329",
            )
        try:
            kind = record.pop("kind", "step")
            if kind == "start":
                known = {f.name for f in fields(Trace)} - {"steps", "source"}
                for key in known & record.keys():
                    kind = _KINDS.get(key, lambda x: x)
                    setattr(out, key, None if record[key] is None else kind(record[key]))
            elif kind == "state":
                states[int(record["step"])] = _parse_state(record)
                every_after[int(record["step"])] = _parse_after(record.get("after", {}))
            elif kind == "lost":
                lost[str(record["what"])] = str(record["why"])
            elif kind == "step":
                step = _parse_step(record)
                steps[step.step] = step
        except (TypeError, ValueError, LookupError, AttributeError) as e:
            raise Corrupt(
                f"{os.fspath(path)}, line {number}: not a record of ckpttool.Recorder ({e!r}).", code="CKPT0429"
            ) from None
    if not steps:
        raise Corrupt(f"{os.fspath(path)}: it records no step.", code="CKPT0429")
    out.steps = [steps[k] for k in sorted(steps)]
    out.clip = out.clip or None  # 0 is how trainers turn clipping off
    if out.global_batch is None:
        out.global_batch = sum(len(split_marks([rank])[0]) for rank in out.steps[0].rows) or None
    if states:
        out.start = at if at in states else list(states)[-1]
        for key, value in states[out.start].items():
            setattr(out, key, value)
        out.after = every_after.get((out.start if at is None else at) + later, {})
    else:
        out.unrecorded = {
            k: f"Recorder.state was not called, which records {k}" for k in ("model", "optimizer", *_EARLIER)
        }
    out.unrecorded |= lost
    return out


def _parse_state(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field of `Trace`: value} from a record of a state.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is no such record.
    """
    values, objects = _separate_objects(record.get("values", {}), record.get("version", 1))
    buffers = record.get("buffers", {}).items()
    return {
        "state": _parse_marks(record["state"]),
        "others": {**objects, **_parse_marks(record.get("others", {}))},
        "variants": {str(n): list(v) for n, v in record.get("variants", {}).items()},
        "generators": [dict(g) for g in record.get("generators", [])],
        "probe": _parse_probe(record.get("probe", {})),
        "buffers": {str(n): [str(b[0]), list(map(int, b[1])), str(b[2])] for n, b in buffers},
        "unrecorded": {str(k): str(v) for k, v in record.get("unrecorded", _EARLIER).items()},
        "scalars": _parse_floats(record.get("scalars", {})),
        "groups": [dict(g) for g in record.get("groups", [])],
        "schedule": _parse_schedule(record.get("schedule", {})),
        **({"values": values} if "values" in record else {}),
    }


#: What a recording lacks that an earlier version wrote.
_EARLIER = {
    k: f"the ckpttool that made the recording could not record {k}"
    for k in ("scheduler", "scaler", "dataloader", "extra", "probe")
}


def _parse_probe(x: Any) -> ProbeRecord:
    """Return a recorded probe with its types checked; {} if `x` is empty, since none was recorded.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is no such record.
    """
    if not x:
        return {}
    rows = {str(k): [[int(t) for t in row] for row in v] for k, v in x["rows"].items()}
    numbers = [[float(v) for v in row] for row in x["sketch"]]
    return {"rows": rows, "sketch": numbers, "shape": [int(n) for n in x["shape"]], "not_finite": int(x["not_finite"])}


def _parse_after(x: Any) -> AfterRecord:
    """Return what a job held after a step, with its types checked; {} if `x` is empty, as earlier versions left it.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is no such record.
    """
    if not x:
        return {}
    return {
        "step": int(x["step"]),
        "sketches": {str(n): (str(dtype), str(sketch)) for n, (dtype, sketch) in x["sketches"].items()},
        "buffers": [str(n) for n in x["buffers"]],
        "apart": [str(n) for n in x["apart"]],
        "scalars": _parse_floats(x["scalars"]),
        "groups": [dict(g) for g in x["groups"]],
    }


def _parse_schedule(x: Any) -> ScheduleRecord:
    """Return the learning rates that the scheduler will give after the recorded step, with types checked: {"first": the
    step of the first rate, "curves": encoded rates, "groups": number of the curve of each param group, "stopped": why
    the scheduler stopped, if it did}; {} if `x` is empty.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is no such record.
    """
    if not x:
        return {}
    out: ScheduleRecord = {
        "first": int(x["first"]),
        "curves": [str(c) for c in x["curves"]],
        "groups": [int(k) for k in x["groups"]],
    }
    return {**out, "stopped": str(x["stopped"])} if "stopped" in x else out


def _separate_objects(values: Any, version: int) -> tuple[dict[str, object], dict[str, Mark]]:
    """Split recorded values into ({name: plain value}, {name: mark of an object of another class}).

    Recordings before `RECORD_VERSION` 2 store such an object as the text "<module.Class>", so in those any text that
    begins with "<" is taken for one.

    Raises:
        TypeError, ValueError, AttributeError: it is something else.
    """
    plain = dict(values)
    objects = {n: v for n, v in plain.items() if version < 2 and isinstance(v, str) and v.startswith("<")}
    return {n: v for n, v in plain.items() if n not in objects}, {n: make_object_mark(v) for n, v in objects.items()}


def _parse_marks(x: Any) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return {name: (dtype, shape, fingerprint)} of a record, with types checked.

    Raises:
        TypeError, ValueError, AttributeError: it is something else.
    """
    return {str(n): (str(d), tuple(map(int, s)), str(h)) for n, (d, s, h) in x.items()}


def _parse_floats(x: Any) -> dict[str, float]:
    """Return {name: float} of a record, with types checked.

    Raises:
        TypeError, ValueError, AttributeError: it is something else.
    """
    return {str(k): float(v) for k, v in x.items()}


#: The types of the recorded fields that are compared.
_KINDS: dict[str, Callable[[Any], object]] = {
    "world_size": int,
    "global_batch": int,
    "micro_batch": int,
    "sequence": int,
    "parameters": int,
    "seed": int,
    "clip": float,
    "environment": dict,
    "config": dict,
    "values": dict,
    "mesh": dict,
    "dtype": str,
    "data": str,
    "dropout": bool,
    "recipe": str,
    "scheduler": str,
    "dropout_off": float,
    "tied": lambda x: [[str(n) for n in g] for g in x],
    "notes": list,
}


def _read_records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) of a recording; an incomplete last line is left out.

    Raises:
        OSError: the file cannot be read. Corrupt: a complete line is not a JSON object.
    """
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                record = parse(line, f"{os.fspath(path)}, line {number}")
            except (Corrupt, Unsafe):
                record = None
            if not isinstance(record, dict):
                if not line.endswith(b"\n"):
                    continue  # the job was killed while it wrote this
                raise Corrupt(f"{os.fspath(path)}, line {number}: not a JSON object.", code="CKPT0429")
            yield number, _parse_non_finite(record)


def _parse_trace(data: dict[str, Any]) -> Trace:
    """Make a trace from the plain data that `trace_to_json` made of it; keys of other versions are ignored."""
    known = {f.name for f in fields(Trace)}
    out = Trace(**{k: v for k, v in data.items() if k in known})
    out.steps = [_parse_step(s) for s in data.get("steps", [])]
    out.state, out.others = _parse_marks(out.state), _parse_marks(out.others)
    out.stored_as = {n: (dtype, mark) for n, (dtype, mark) in out.stored_as.items()}
    out.unread = [(name, component) for name, component in out.unread]
    return out


def _parse_step(data: dict[str, Any]) -> Step:
    """Make a step from the plain data of its record; keys of other versions are ignored.

    Raises:
        TypeError, ValueError, AttributeError: it is no such record.
    """
    known = {f.name for f in fields(Step)}
    out = Step(**{k: v for k, v in data.items() if k in known})
    out.step, out.loss = int(out.step), float(out.loss)
    for key in ("grad_norm", "update_norm", "seconds"):
        value = getattr(out, key)
        setattr(out, key, None if value is None else float(value))
    for key in ("learning_rates", "losses"):
        value = getattr(out, key)
        setattr(out, key, None if value is None else [float(v) for v in value])
    out.grads, out.updates = _parse_floats(out.grads), _parse_floats(out.updates)
    out.rows = [str(r) for r in out.rows]
    for key in ("grad_sketches", "update_sketches"):
        value = getattr(out, key)
        setattr(out, key, None if value is None else str(value))
    out.inputs = {str(k): str(v) for k, v in out.inputs.items()}
    return out


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
#: Fields whose strings "nan" and "inf" are numbers; elsewhere they are just strings.
_NUMBERS = {
    "loss",
    "grad_norm",
    "update_norm",
    "learning_rates",
    "losses",
    "grads",
    "updates",
    "scalars",
    "seconds",
}


def spell_non_finite(x: object) -> Any:
    """Return plain data with the strings "nan", "inf" and "-inf" in place of NaN and infinities."""
    if isinstance(x, float) and not math.isfinite(x):
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    if isinstance(x, dict):
        return {k: spell_non_finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [spell_non_finite(v) for v in x]
    return x


def _parse_non_finite(x: object, number: bool = False) -> Any:
    """Return plain data with NaN and infinities in place of "nan", "inf" and "-inf", in the fields that hold numbers.

    `number` tells whether `x` is in such a field.
    """
    if isinstance(x, str) and number:
        return _WORDS.get(x, x)
    if isinstance(x, dict):
        return {k: _parse_non_finite(v, number or k in _NUMBERS) for k, v in x.items()}
    if isinstance(x, list):
        return [_parse_non_finite(v, number) for v in x]
    return x
