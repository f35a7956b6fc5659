"""Which weights explain that a layer of two models computes something else, and what was done to them.

Looked for, in this order: weights that another name of the first model has (a layer that is stale, matrices or layers
that are exchanged, an output layer that is no longer the embedding); experts in each other's place; rows in another
order, factors, zeros, rounding (tensor_faults); a factor for each row or block, as wrong scales leave it. Where all
weights of the layer are equal, the keys of config.json that differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...printable import count_noun, list_first
from ..tensor_faults.tensor_diff import VAGUE, compare_tensors
from .sides import ModelSide
from .streaming import StreamedModel

if TYPE_CHECKING:
    from ..tensor_faults.tensor_bits import Array

__all__ = ["LayerCause", "explain_layer", "find_config_differences"]

#: Of so many weights of a layer it is said what was done to them.
_MOST = 16
#: Keys of a config that change nothing that a model computes.
_SILENT = re.compile(
    r"(^|\.)(transformers_version|_name_or_path|dtype|torch_dtype|use_cache|architectures|quantization_config|"
    r"(bos|eos|pad|sep|cls)_token_id|initializer_\w+|\w*dropout\w*|[\w_]*_pdrop|id2label|label2id|return_dict|"
    r"output_attentions|output_hidden_states|problem_type|_attn_implementation|attn_implementation|auto_map)(\.|$)"
)
#: What weights that are fused have, by their names.
_PARTS = (
    (re.compile(r"gate_up"), ("gate", "up")),
    (re.compile(r"qkv|c_attn|query_key_value|in_proj_weight|Wqkv"), ("q", "k", "v")),
)
#: Sizes of blocks that share a scale, along the last dimension or as squares.
_BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class LayerCause:
    """What explains a difference: a weight, a layer, or a key of config.json, and how it differs."""

    name: str
    how: str


def explain_layer(model: StreamedModel, a: ModelSide, b: ModelSide, layer: str) -> list[LayerCause]:
    """Find what explains that a layer computes something else in B than in A: differing weights, or else differing keys
    of config.json.

    Args:
        model: the model of A; both sides have been run.
        a, b: the weights and configs of the two checkpoints; A is the reference.
        layer: the path of the layer's module, with "#2" behind it for its second call in a run.
    """
    layer = layer.partition("#")[0]
    above = [name for name in model.layers if name != layer and (not name or layer.startswith(f"{name}."))]
    names = [n for name in (layer, *above) for n in model.layers.get(name, ())]
    wrong = [n for n in names if _get_digest(model, a, n) != _get_digest(model, b, n)]
    if not wrong:
        differing = find_config_differences(a.config, b.config)
        return [LayerCause(key, f"is {x!r} in A's config.json and {y!r} in B's") for key, (x, y) in differing.items()]
    if (whole := _find_layer_with_same_weights(model, a, b, layer, wrong)) is not None:
        return [whole]
    causes = [LayerCause(n, _describe_weight(model, a, b, n)) for n in wrong[:_MOST]]
    if len(wrong) > _MOST:
        causes.append(LayerCause(layer, f"{len(wrong) - _MOST} more of its weights differ"))
    return causes


def find_config_differences(x: Mapping[str, object], y: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return {key: (value in x, value in y)} of the keys whose values differ and that may change what a model computes.
    Nested keys are joined with dots; None stands for a missing key."""
    a, b = dict(_flatten_config("", x)), dict(_flatten_config("", y))
    keys = [k for k in dict.fromkeys((*a, *b)) if a.get(k) != b.get(k) and not _SILENT.search(k)]
    return {k: (a.get(k), b.get(k)) for k in keys}


def _flatten_config(above: str, config: Mapping[str, object]) -> list[tuple[str, object]]:
    """List (key joined with dots, value) of a nested config.

    Args:
        above: prefix of the keys, "" or ending with a dot.
    """
    out: list[tuple[str, object]] = []
    for key, value in config.items():
        out += _flatten_config(f"{above}{key}.", value) if isinstance(value, dict) else [(above + key, value)]
    return out


def _get_digest(model: StreamedModel, side: ModelSide, name: str) -> str | None:
    """Return the digest of a weight that was read from a side, given the name of the model's parameter; None if the
    side has no such weight, or it has not been read."""
    stored = model.name_in(side, name)
    return None if stored is None else side.digests.get(stored)


def _find_layer_with_same_weights(
    model: StreamedModel, a: ModelSide, b: ModelSide, layer: str, wrong: list[str]
) -> LayerCause | None:
    """Find another layer of A that has all the differing weights of B's `layer`, and describe it; None where there is
    none.

    Args:
        wrong: the weights that differ between A's `layer` and B's.
    """
    parent = layer.rpartition(".")[0]
    inside = [n for n in wrong if n.startswith(f"{layer}.")]
    if len(inside) < len(wrong) or len(wrong) < 2:
        return None
    for other in model.layers:
        if other == layer or other.rpartition(".")[0] != parent:
            continue
        theirs = {n: other + n.removeprefix(layer) for n in inside}
        if all(_get_digest(model, b, n) == _get_digest(model, a, o) is not None for n, o in theirs.items()):
            back = all(_get_digest(model, a, n) == _get_digest(model, b, o) for n, o in theirs.items())
            how = f"holds the weights of A's {other}, all {len(inside)} that differ"
            return LayerCause(
                layer, how + (f", and {other} those of A's {layer}: the two are exchanged" if back else "")
            )
    return None


def _describe_weight(model: StreamedModel, a: ModelSide, b: ModelSide, name: str) -> str:
    """Describe how a weight of B differs from A's, as the end of a sentence that begins with its name."""
    mine, theirs = (model.name_in(side, name) for side in (a, b))
    if mine is None or theirs is None:  # models of two architectures
        return f"is no weight of {'A' if mine is None else 'B'}"
    shape = a.tensors[mine].shape
    found = b.digests.get(theirs)
    tied = model.tied.get(name)
    if tied and _get_digest(model, a, name) == _get_digest(model, a, tied) and found != _get_digest(model, b, tied):
        return f'is tied to "{tied}" in A, and in B it holds other values than that'
    for other, digest in a.digests.items():
        if digest == found and other != name and a.tensors[other].shape == shape:
            both = b.digests.get(other) == a.digests.get(mine)
            return f'is exchanged with "{other}"' if both else f'holds the values of A\'s "{other}"'
    return _describe_values(name, _read_array(a, mine), _read_array(b, theirs))


def _read_array(side: ModelSide, name: str) -> Array:
    """Read a weight as a numpy array; numbers of fewer than 32 bits become float32."""
    import torch

    found = side.read(name)
    wide = torch.promote_types(found.dtype, torch.float32) if found.is_floating_point() else found.dtype
    array: Array = found.to(wide).numpy()
    return array


def _describe_values(name: str, x: Array, y: Array) -> str:
    """Describe how the values of a weight differ between A (`x`) and B (`y`)."""
    if x.ndim == 3 and x.shape[0] > 1:
        return _describe_experts(name, x, y)
    found = compare_tensors(x, y)
    if found is None:
        return "holds equal values in another dtype"
    if found.way in VAGUE and (scaled := _describe_scaled_parts(x, y)):
        return scaled
    text = (
        found.text.replace("holds the reference ", "holds A's values ")
        .replace("the reference's", "A's")
        .replace("the reference", "A")
    )
    return text + _name_exchanged_parts(name, found.detail.get("ranges"), x.shape)


def _describe_experts(name: str, x: Array, y: Array) -> str:
    """Describe how the experts in a 3-D weight differ between A (`x`) and B (`y`)."""
    places: dict[bytes, int] = {}
    for k in range(x.shape[0]):
        places.setdefault(x[k].tobytes(), k)
    wrong = [k for k in range(x.shape[0]) if x[k].tobytes() != y[k].tobytes()]
    moved = {k: places[y[k].tobytes()] for k in wrong if y[k].tobytes() in places}
    if len(moved) == len(wrong):
        return list_first((f"expert {k} holds A's expert {of}" for k, of in moved.items()), 8)
    first = next(k for k in wrong if k not in moved)
    which = f"in {count_noun(len(wrong), 'expert')} of {x.shape[0]}, the first of them {first}: it"
    return f"differs {which} {_describe_values(name, x[first], y[first])}"


def _name_exchanged_parts(name: str, ranges: Any, shape: tuple[int, ...]) -> str:
    """Return the names of two exchanged parts of a fused weight, " (q and k)"; "" where they have no names.

    Args:
        name: the weight's name.
        ranges: the two parts, as [(start, end), (start, end)] along the fused dimension; None for any other fault.
        shape: the shape of the weight, whose longest dimension is tried first.
    """
    for pattern, parts in _PARTS:
        if ranges is None or not pattern.search(name):
            continue
        for length in dict.fromkeys((max(shape, default=0), *shape)):
            size = length // len(parts)
            cuts = {(k * size, (k + 1) * size): part for k, part in enumerate(parts)}
            found = [cuts.get(tuple(r)) for r in ranges]
            if all(found) and length == size * len(parts):
                return f" ({found[0]} and {found[1]})"
    return ""


def _describe_scaled_parts(x: Array, y: Array) -> str | None:
    """Describe the factors if each row, column or block of `y` is that of the matrix `x` times its own factor, as when
    scales are left out or divided by; None if not.

    Differences within a part may be up to 2 %, as after rounding to bfloat16.
    """
    import numpy as np

    if x.ndim != 2 or not x.size:
        return None
    with np.errstate(all="ignore"):
        ratio = np.where((x != 0) & (y != 0), y.astype("f8") / x, np.nan)
    if np.isnan(ratio).mean() > 0.5:
        return None
    rows, columns = x.shape
    shapes = {f"block of {n} by {n}": (n, n) for n in reversed(_BLOCKS) if min(x.shape) > n}
    shapes |= {f"group of {n} numbers of a row": (1, n) for n in reversed(_BLOCKS) if columns > n}
    for what, (height, width) in {"row": (1, columns), "column": (rows, 1), **shapes}.items():
        factors = []
        for i in range(0, rows, height):
            band = ratio[i : i + height]
            pieces = [band[:, j : j + width] for j in range(0, columns, width)]
            factors += [(np.nanmin(p), np.nanmax(p)) for p in pieces if not np.isnan(p).all()]
        low, high = np.array(factors).T
        if np.isfinite(low).all() and np.isfinite(high).all() and ((high - low) <= 2e-2 * np.abs(high)).all():
            return (
                f"holds A's values times a factor for each {what}, {low.min():.3g} to {high.max():.3g}: as where "
                "scales are left out, or multiplied with in the place of divided by"
            )
    return None
