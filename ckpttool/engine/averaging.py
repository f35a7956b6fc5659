"""Checkpoints of one model as one, whose weights are computed from those of all when they are read.

    A: dcp, 3 ranks     model.w --.
    B: zero3, 2 ranks   model.w --+-- ComputedSource: model.w = (A + B + C) / 3, a block of rows at a time
    C: hf               model.w --'

Every layout writes such a checkpoint as any other. What is computed, for each element, in the order of the checkpoints
and in the dtype of accumulation, float64 or float32:

    mean           ((x1 + x2) + x3) / n                        one division
    coefficients   (c1*x1 + c2*x2) + c3*x3                     each product is rounded, then the sum
    EMA            a = x1; a = a*d + x2*(1-d); ...             as torch's get_ema_avg_fn(d)
    task           b + s1*(x1 - b) + s2*(x2 - b)               from the left
    SLERP          c1*x1 + c2*x2, c from the angle of the two tensors, which is computed in float64

and at the end one cast to the dtype of the weight, as torch rounds it. Only weights are in the result. Tensors without
fractions are those of the last checkpoint: all must have the same, but for counters of one element, such as
num_batches_tracked.

Sources: torch/optim/swa_utils.py of 2.13; the formula of SLERP is that of Shoemake, "Animating rotation with quaternion
curves" (1985), and near 0 and 180 degrees a straight line, as in mergekit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import acos, sin, sqrt
from typing import TYPE_CHECKING, Any

from .. import layouts
from ..errors import Unsupported
from ..huggingface import encodings
from ..index.checkpoint import FLOATING, Checkpoint, Chunks, TensorEntry, same_bytes, tied_weights
from ..index.composites import find_composites
from ..index.digests import compute_component_roots
from ..index.draft import Dropped
from ..index.names import step_count
from ..options import AverageRequest, OpenOptions
from ..printable import count_noun, list_first
from ..storage.overlay import ComputedSource
from ..storage.source import closed_on_error
from .computed_files import BoxReader, ComputedFiles, cast_array, choose_page_size
from .copy.fill import silent
from .copy.tensor_digests import tensor_digests
from .copy.value_digests import value_digests
from .opening import (
    CheckpointPath,
    MergedCheckpoint,
    OpenCheckpoint,
    drop_unfit_source_layout,
    open_checkpoint,
    show_path,
)
from .weights import find_equal_tensors, remove_optimizer_notes

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["open_average"]

_STRAIGHT = 0.9995  # the cosine from which two tensors are taken for parallel
_CALLED = {
    "mean": "mean",
    "coefficients": "linear combination",
    "ema_decay": "EMA",
    "task": "task arithmetic",
    "slerp": "SLERP",
}
_LEFT = "an average has weights only"


@dataclass
class _Input:
    """One of the checkpoints: its path, its weights by FQN, and the digests of those that were read from end to end."""

    opened: OpenCheckpoint
    where: str
    reader: BoxReader
    tensors: dict[str, TensorEntry]
    facts: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)  # {name that is not read: the one with the same bytes}
    unread: set[str] = field(default_factory=set)  # names that have no digest yet
    name: str = ""  # of the tensor that is being read
    at: int = 0  # its elements that were
    hasher: Any = None

    def read(self, name: str, first: int, end: int, dtype: str) -> Array:
        """Read elements [first, end) of a weight as a flat array of `dtype`.

        Reads that follow each other from element 0 to the last one also hash the weight; `note_digest` then gets the
        digest.
        """
        from blake3 import blake3

        t = self.tensors[name]
        x = self.reader.read_range(t, first, end)
        if first == 0:
            self.name, self.at, self.hasher = name, 0, blake3()
        if (self.name, self.at) == (name, first):
            self.hasher.update(x.view("u1").data)
            self.at += len(x)
            if self.at == t.numel:
                self.note_digest(name, self.hasher.hexdigest())
        return cast_array(x, t.dtype, dtype)[0]

    def note_digest(self, name: str, digest: str) -> None:
        """Record the BLAKE3 digest (hex) of a weight; after the last weight, set `facts["digest"]` to the root
        digest of all."""
        from blake3 import blake3

        self.digests[name] = digest
        self.unread.discard(name)
        if not self.unread:
            empty, named = blake3().hexdigest(), {f"model.{n}": t for n, t in self.tensors.items()}
            digests = {f"model.{n}": self.digests.get(self.ties.get(n, n), empty) for n in self.tensors}
            self.facts["digest"] = compute_component_roots(named, digests)["model"]


def open_average(
    src: CheckpointPath, options: OpenOptions, request: AverageRequest, model: layouts.ModelHints
) -> MergedCheckpoint:
    """Open the average of `src` and the other checkpoints of a request as one checkpoint.

    Args:
        options: how each of the checkpoints is opened; without an average request.
        model: what `model_of(options)` returns.

    Raises:
        Unsupported: the checkpoints are not of one model, or hold weights that cannot be averaged.
        CkpttoolError: one of them cannot be read.
    """
    paths = [src, *request.others, *([] if request.base is None else [request.base])]
    opened: list[OpenCheckpoint] = []
    with closed_on_error(part.source for part in opened):
        for path in paths:
            one = drop_unfit_source_layout(path, options)
            opened.append(open_checkpoint(path, one, model, False, needed=lambda component: component == "model"))
        places = [show_path(path).rstrip("/") for path in paths]
        return _build_average([_make_input(*pair, len(paths)) for pair in zip(opened, places, strict=True)], request)


def _make_input(opened: OpenCheckpoint, where: str, count: int) -> _Input:
    """Make the input of an average from an open checkpoint.

    Args:
        where: path of the checkpoint, for messages.
        count: number of inputs of the average, which share the memory for buffers.

    Raises:
        Unsupported: the checkpoint holds no weights, or quantised ones.
    """
    ckpt = opened.locate()
    remove_optimizer_notes(opened)
    tensors = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    if not tensors:
        raise Unsupported(f"{where} holds no weights.", code="CKPT0317")
    codes = encodings.find_codes(ckpt, opened.source)
    objects = (n for n, c in find_composites(ckpt).items() if c.path[0] == "model")
    others = (n for n, t in tensors.items() if t.dtype not in FLOATING and _is_float_or_complex(t.dtype))
    odd = next((n for names in (others, codes.weights, objects) for n in names), None)
    if odd is not None:
        raise Unsupported(
            f'{where}: "{odd}" holds codes, or numbers of a dtype that has no average. Dequantise the weights first.',
            code="CKPT0318",
        )
    facts: dict[str, Any] = {
        "name": os.path.basename(where),
        "layout": ckpt.layout,
        "world_size": ckpt.world_size,
        "step": step_count(_get_full_index(opened).value),
        "digest": None,
    }
    return _Input(opened, where, BoxReader(ckpt, opened.source, count), tensors, facts | (ckpt.derived or {}))


def _get_full_index(opened: OpenCheckpoint) -> Checkpoint:
    """Return the index of the full checkpoint; `opened` may be a model made from some of its weights (`weights`)."""
    return opened.parts[0][0].checkpoint if isinstance(opened, MergedCheckpoint) else opened.checkpoint


def _is_float_or_complex(dtype: str) -> bool:
    """Tell from the name of a dtype whether its numbers are floating-point or complex."""
    return "float" in dtype or "complex" in dtype or dtype.startswith("f")


def _build_average(inputs: list[_Input], request: AverageRequest) -> MergedCheckpoint:
    """Build the averaged checkpoint; its weights are computed when they are read.

    Raises:
        Unsupported: the inputs are not of one model.
    """
    averaged = inputs if request.base is None else inputs[:-1]
    last = averaged[-1]
    names = list(dict.fromkeys(n for one in (last, *inputs) for n in one.tensors))
    ties = _find_ties(inputs, last, names)
    for one in inputs:
        one.ties, one.unread = ties, {n for n, t in one.tensors.items() if t.numel and n not in ties}
    _refuse_different_models(inputs, last, [n for n in names if n not in ties])
    kept = _select_integer_weights(inputs, last, ties)
    ckpt = last.opened.checkpoint
    files = ComputedFiles(ckpt)
    tensors: dict[str, TensorEntry] = {}
    for name in (n for n in names if n not in ties):
        t = last.tensors[name]
        if name not in kept:
            file, page = f"{name} (average)", choose_page_size([one.tensors[name] for one in inputs])
            place = files.add(file, t.dtype, t.shape, _make_average_function(inputs, name, request), page)
            t = replace(t, chunks=Chunks.whole(t.shape, *place))
        tensors[name] = t
    tensors = {f"model.{n}": replace(tensors[ties.get(n, n)], path=("model", n)) for n in names}
    files.working_bytes += sum(one.reader.working_bytes + one.opened.source.working_bytes for one in inputs)
    notes = _describe_average(inputs, averaged, request, kept, ties)
    behind = _list_dropped_state(inputs, notes)
    facts = {
        "method": request.method,
        "accumulate": request.accumulate,
        "inputs": [one.facts for one in averaged],
        **request.numbers(),
        **({"base": inputs[-1].facts} if request.base is not None else {}),
    }
    out = replace(
        ckpt.without_source_facts(),
        files=files.names,
        sizes=files.sizes,
        tensors=tensors,
        values={n: v for n, v in ckpt.values.items() if v.component == "model"},
        notes=[*ckpt.notes, *notes],
        derived={"average": facts},
    )
    ordered = [last, *(one for one in inputs if one is not last)]
    computed = frozenset(names) - kept.keys() - ties.keys()
    return MergedCheckpoint.of(
        tuple((one.opened, frozenset(f"model.{n}" for n in computed)) for one in ordered),
        out,
        ComputedSource(last.opened.source, files.made, [one.opened.source for one in ordered[1:]], files.working_bytes),
        {f"model.{n}": f"model.{n}" for n in kept},
        behind,
    )


# ------------------------------------------------------------------------------------------------------- one model


def _find_ties(inputs: list[_Input], last: _Input, names: list[str]) -> dict[str, str]:
    """Find tied weights that some inputs store under one name and others under two, as the Hub and trainers do.

    Args:
        last: the last averaged input, in which tied weights are looked up.
        names: the names of weights that any input has.

    Returns:
        {name: the name it is tied to}, for names whose tensor equals that of the other name in every input that has it.
    """
    tied = tied_weights(last.tensors)
    common = [n for n in names if all(n in one.tensors for one in inputs) and n not in tied]
    out: dict[str, str] = {}
    for name in names:
        have = [one for one in inputs if name in one.tensors]
        if name in tied or len(have) < len(inputs):
            others = [n for n in common if n == tied.get(name, n)]
            for one in have:
                t, near = one.tensors[name], {n: one.tensors[n] for n in others}
                same = [n for n in others if same_bytes(t, near[n])]
                others = same or list(find_equal_tensors(one.opened, {name: t}, near).values())
            if others:
                out[name] = others[0]
    return out


def _refuse_different_models(inputs: list[_Input], last: _Input, names: list[str]) -> None:
    """Raise if an input does not have the names, shapes and dtypes of `last`.

    Args:
        names: the names of weights to compare.

    Raises:
        Unsupported: the message has the first three differences.
    """
    mine = last.where
    for one in inputs:
        where = one.where
        odd: list[str] = []
        for n in names:
            a, b = one.tensors.get(n), last.tensors.get(n)
            if a is None or b is None:
                odd.append(f'"{n}" is not in {where if a is None else mine}')
            elif (a.dtype, a.shape) != (b.dtype, b.shape):
                odd.append(f'"{n}" is {a.dtype} {list(a.shape)} in {where} and {b.dtype} {list(b.shape)} in {mine}')
        if odd:
            more = f"; and {len(odd) - 3:,} more" if len(odd) > 3 else ""
            raise Unsupported(
                f"{where} and {mine} are not of one model: {'; '.join(odd[:3])}{more}. Where only dtypes differ, "
                "convert one of the two to the dtype of the other first; where names do, give it a name map.",
                code="CKPT0336",
            )


def _select_integer_weights(inputs: list[_Input], last: _Input, ties: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return the integer and boolean weights, which are not averaged: {FQN: tensor of the last input}.

    Raises:
        Unsupported: the inputs differ in such a weight, and it has more than one element, so it is no counter.
    """
    kept = {n: t for n, t in last.tensors.items() if t.dtype not in FLOATING and n not in ties}
    for one in inputs if kept else []:
        ckpt = one.opened.checkpoint
        mine = {n: one.tensors[n] for n in kept}
        for name, digest in tensor_digests(mine, one.opened.source, ckpt.files, ckpt.records, silent).items():
            one.note_digest(name, digest)
    for name, t in kept.items():
        other = next((one for one in inputs if one.digests[name] != last.digests[name]), None)
        if other is not None and t.numel > 1:
            raise Unsupported(
                f'"{name}" is {t.dtype} {list(t.shape)}, has no average, and is not the same in '
                f"{other.where} and {last.where}: a mask or an index by which the two are "
                "different models.",
                code="CKPT0336",
            )
    return kept


# ------------------------------------------------------------------------------------------------------- computing


def _compute_slerp_factors(inputs: list[_Input], name: str, t: float) -> tuple[float, float]:
    """Return the factors (of the first tensor, of the second) of spherical linear interpolation.

    They are (1 - t, t) if the tensors are almost parallel or opposite, or one of them is 0.

    Args:
        inputs: the two checkpoints.
        name: the weight; it is read completely from both.
        t: position on the arc from the first tensor (0) to the second (1).
    """
    import numpy as np

    count, page = inputs[0].tensors[name].numel, choose_page_size([one.tensors[name] for one in inputs])
    dot = left = right = 0.0
    for first in range(0, count, max(1, page)):
        x, y = (one.read(name, first, min(first + page, count), "float64") for one in inputs)
        with np.errstate(all="ignore"):
            dot, left, right = dot + float(np.dot(x, y)), left + float(np.dot(x, x)), right + float(np.dot(y, y))
    cosine = dot / sqrt(left * right) if left * right > 0 else 1.0
    if not abs(cosine) < _STRAIGHT:
        return 1 - t, t
    angle = acos(cosine)
    return sin((1 - t) * angle) / sin(angle), sin(t * angle) / sin(angle)


def _make_average_function(inputs: list[_Input], name: str, request: AverageRequest) -> Callable[[int, int], Array]:
    """Return a function that computes elements [first, end) of the average of a weight, in the dtype of the weight."""
    dtype, base = inputs[0].tensors[name].dtype, [] if request.base is None else inputs[-1:]
    averaged = inputs[: len(inputs) - len(base)]
    wide = "float64" if dtype == "float64" else request.accumulate

    @cache
    def factors() -> tuple[float, ...] | None:
        """Return the factors of the inputs; None for a mean."""
        return (
            request.factors(len(averaged))
            if request.slerp is None
            else _compute_slerp_factors(inputs, name, request.slerp)
        )

    def compute(first: int, end: int) -> Array:
        """Compute elements [first, end).

        Raises:
            Unsupported: a number does not fit into the dtype.
        """
        import numpy as np

        arrays = (one.read(name, first, end, wide) for one in (*base, *averaged))
        with np.errstate(all="ignore"):
            sum_ = _combine_arrays(arrays, request, factors(), len(averaged))
        out, lost = cast_array(sum_, wide, dtype)
        if lost:
            raise Unsupported(
                f'"{name}": {count_noun(lost, "number")} of the result do not fit into {dtype}. The factors are too '
                "large, or give the checkpoints in float32.",
                code="CKPT0332",
            )
        return out

    return compute


def _combine_arrays(
    arrays: Iterator[Array], request: AverageRequest, factors: tuple[float, ...] | None, count: int
) -> Array:
    """Combine one array of each checkpoint by the method of a request; the first array may be changed in place.

    Args:
        arrays: arrays of one dtype, in the order of the checkpoints; that of the base first, if the request has one.
        factors: one for each checkpoint but the base; None for a mean.
        count: number of checkpoints without the base: the divisor of a mean.
    """
    out = next(arrays)
    number = out.dtype.type
    if request.base is not None:
        base = out.copy()
        for x, scale in zip(arrays, factors or (), strict=True):
            x -= base
            x *= number(scale)
            out += x
    elif request.ema_decay is not None:
        for x in arrays:
            out *= number(request.ema_decay)
            x *= number(1 - request.ema_decay)
            out += x
    elif factors is None:
        for x in arrays:
            out += x
        out /= number(count)
    else:
        out *= number(factors[0])
        for x, factor in zip(arrays, factors[1:], strict=True):
            x *= number(factor)
            out += x
    return out


# ------------------------------------------------------------------------------------------------------- describing


def _describe_average(
    inputs: list[_Input],
    averaged: list[_Input],
    request: AverageRequest,
    kept: Mapping[str, TensorEntry],
    ties: Mapping[str, str],
) -> list[str]:
    """Return notes, as sentences, on what is computed and which tensors are not averaged.

    Args:
        averaged: the inputs without the base.
        kept: {FQN: tensor} of the integer weights.
        ties: {name: the name it is tied to}.
    """
    listed = ", ".join(f"{one.facts['name']} ({one.facts['layout']})" for one in averaged)
    numbers = {**({"scale": (1.0,)} if request.base is not None else {}), **request.numbers()}
    given = [f"{k} {', '.join(f'{x:g}' for x in v) if isinstance(v, tuple) else v}" for k, v in numbers.items()]
    base = f" over {inputs[-1].facts['name']}" if request.base is not None else ""
    about = f" ({'; '.join(given)})" if given else ""
    notes = [
        f"{_CALLED[request.method]}{about} of {listed}{base}, computed in "
        f"{request.accumulate} in this order and rounded once to the dtype of each weight"
    ]
    steps = [one.facts["step"] for one in averaged]
    known = [s for s in steps if s is not None]
    if request.ema_decay is not None and known != sorted(known):
        notes.append(
            f"the steps are {list_first(steps, 8)}: an EMA goes over the checkpoints in the order in which they were "
            "given"
        )
    if kept:
        differ = [n for n in kept if any(one.digests[n] != averaged[-1].digests[n] for one in inputs)]
        more = f"; {list_first(differ, 4)} differ" if differ else ""
        notes.append(
            f"{count_noun(len(kept), 'tensor')} of integers or booleans are those of {averaged[-1].facts['name']}{more}"
        )
    values = [value_digests(one.opened.checkpoint.only(["model"]).values) for one in (averaged[-1], *inputs)]
    if named := dict.fromkeys(n for found in values for n in found):
        differ = [n.removeprefix("model.") for n in named if len({found.get(n) for found in values}) > 1]
        more = f"; {list_first(differ, 4)} differ" if differ else ""
        notes.append(f"{count_noun(len(named), 'value')} of the model are those of {averaged[-1].facts['name']}{more}")
    statistics = [n for n in averaged[-1].tensors if n.rpartition(".")[2] in ("running_mean", "running_var")]
    if statistics:
        notes.append(
            f"{len(statistics)} running statistics of normalisation are averaged as weights are, first "
            f"{statistics[0]}: torch.optim.swa_utils.update_bn computes those of the averaged model from data"
        )
    if ties:
        notes.append(f"tied weights stay tied: {list_first([f'{n} to {m}' for n, m in ties.items()], 4)}")
    return notes


def _list_dropped_state(inputs: list[_Input], notes: list[str]) -> list[Dropped]:
    """List the entries of the inputs that are not weights, as dropped, and append a note on them to `notes`."""
    rows: dict[str, Dropped] = {}
    for one in inputs:
        states = (_get_full_index(one.opened), one.opened.checkpoint)
        for state in states:
            rows |= {n: Dropped(n, t.nbytes, _LEFT) for n, t in state.tensors.items() if t.component != "model"}
            rows |= {n: Dropped(n, 0, _LEFT) for n, v in state.values.items() if v.component != "model"}
    if rows:
        parts = ", ".join(dict.fromkeys(n.partition(".")[0] for n in rows))
        notes.append(f"{_LEFT}: {parts} of the checkpoints are left behind")
    return list(rows.values())
