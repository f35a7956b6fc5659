"""What a model-parallel rank of Megatron has of each parameter, from its name: the files of ranks hold nothing else
that tells.

A parameter of a rank is boxes of the whole, one behind the other along its first axis:

    column parallel   rows: linear_qkv, linear_fc1, the vocabulary; heads of one group lie together, so that ranks
                      follow one another
    gated linear_fc1  two boxes: the rank's rows of the gate, then its rows of the other matrix
    row parallel      columns: linear_proj, linear_fc2; their biases are whole on every rank
    replicated        norms, routers, position embeddings
    experts           the rank's own, as layers of one tensor [experts, ...]

Names become those of dist_checkpointing: layers by their number in the model, experts without number, fused norms, and
those of Megatron-LM's modules before Megatron-Core (language_model.encoder.layers.0.mlp.dense_h_to_4h.weight).

Sources: megatron/core/tensor_parallel/layers.py, transformer/{mlp,attention,multi_latent_attention}.py,
transformer/moe/experts.py and models/gpt/gpt_layer_specs.py of megatron-core 0.16.1; the older names are those of
megatron/legacy/model/language_model.py and transformer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short

from ..buckets import LocalBoxes

__all__ = [
    "LAYER",
    "Geometry",
    "ShardPlace",
    "count_local_experts",
    "flatten_state_dict",
    "has_older_names",
    "is_expert",
    "place_shard",
    "to_core_name",
    "to_global_name",
]

LAYER = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?P<i>\d{1,9})\.(?P<rest>.+)", re.DOTALL)
_OLDER = "language_model."
_OLDER_NAMES = tuple(
    (re.compile(a), b)
    for a, b in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^language_model\.(?:encoder|transformer)\.", "decoder."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(?:attention|self_attention)\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:attention|self_attention)\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_(?:layer)?norm\.", ".self_attention.linear_qkv.layer_norm_"),
        (r"\.post_attention_(?:layer)?norm\.", ".mlp.linear_fc1.layer_norm_"),
        (r"^decoder\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
    )
)
_LOCAL_EXPERT = re.compile(r"(?P<head>.*\.experts)\.local_experts\.(?P<e>\d{1,9})\.(?P<rest>.+)", re.DOTALL)
_GROUPED_EXPERT = re.compile(
    r"(?P<head>.*\.experts)\.(?P<rest>linear_fc[12]\.(?:weight|bias|_extra_state))(?P<e>\d{1,9})", re.DOTALL
)
_COLUMN = frozenset(
    (
        "linear_qkv",
        "linear_q",
        "linear_kv",
        "linear_q_proj",
        "linear_q_up_proj",
        "linear_kv_up_proj",
        "linear_fc1",
        "eh_proj",
        "word_embeddings",
        "output_layer",
    )
)
_ROW = frozenset(("linear_proj", "linear_fc2"))
#: Of MLA: cut where Megatron's own layers make it, whole on every rank where Transformer Engine's do; the arguments
#: tell which.
_DOWN = {"linear_q_down_proj": ("q_lora_rank",), "linear_kv_down_proj": ("kv_lora_rank", "qk_pos_emb_head_dim")}
_WHOLE = re.compile(
    r"(.*\.)?([a-z_]*norm|router|position_embeddings|tokentype_embeddings)\.\w+|.*\.layer_norm_(weight|bias)|.*\.gate_weight"
)


class Geometry(NamedTuple):
    """The parallel sizes of a job and of its experts, and its arguments."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    args: Mapping[str, object]

    @property
    def gated(self) -> bool:
        """Return whether linear_fc1 is two matrices, a gate and another, as the arguments say (swiglu, quick_geglu)."""
        return bool(self.args.get("swiglu") or self.args.get("quick_geglu"))


class ShardPlace(NamedTuple):
    """What a rank has of a parameter: `local` boxes of a tensor of `shape`. `known`: whether a rule says so, or only
    that nothing cuts it."""

    local: LocalBoxes
    shape: tuple[int, ...]
    known: bool = True


def flatten_state_dict(tree: Mapping[object, object], what: str, prefix: str = "") -> dict[str, object]:
    """Return {dotted name: leaf} of a state dict, which in older jobs is dicts in dicts.

    Args:
        tree: the state dict.
        what: how errors name its file.
        prefix: what goes in front of every name.

    Raises:
        Corrupt: a key is not text, or two keys make one name.
    """
    out: dict[str, object] = {}
    for k, x in tree.items():
        found = flatten_state_dict(x, what, f"{prefix}{k}.") if isinstance(x, dict) else {f"{prefix}{k}": x}
        if not isinstance(k, str) or found.keys() & out.keys():
            raise Corrupt(
                f"{what}: in its model, the key {short(k)} is not text, or makes a name that another key makes.",
                code="CKPT0416",
            )
        out |= found
    return out


def has_older_names(names: Iterable[str]) -> bool:
    """Return whether a model has names of parameters that Megatron-LM used before Megatron-Core."""
    return any(n.startswith(_OLDER) for n in names)


def to_core_name(name: str) -> str:
    """Return the name in Megatron-Core of a parameter that has a name of Megatron-LM before it; any other name
    unchanged."""
    for pattern, to in _OLDER_NAMES:
        name = pattern.sub(to, name)
    return name


def is_expert(name: str) -> bool:
    """Return whether a parameter, by the name that a rank gives it, belongs to one expert."""
    return _LOCAL_EXPERT.fullmatch(name) is not None or _GROUPED_EXPERT.fullmatch(name) is not None


def count_local_experts(names: Iterable[str]) -> int:
    """Return the number of experts that a rank has of one layer, from the rank's names of their parameters; 0
    without experts."""
    found = [m["e"] for n in names if (m := _LOCAL_EXPERT.fullmatch(n) or _GROUPED_EXPERT.fullmatch(n))]
    return 1 + max(map(int, found), default=-1)


def to_global_name(name: str, offset: int, fused: bool) -> tuple[str, int | None]:
    """Return (the name in the whole model of a rank's parameter, the number of its expert on the rank or None without
    one).

    Args:
        name: the name of the parameter on the rank.
        offset: the number of layers in the model before the rank's first one.
        fused: whether norms that are modules of their own get the names of fused ones, as `dist_checkpointing` stores
            those of layers without Transformer Engine.
    """
    if m := LAYER.fullmatch(name):
        name = f"{m['head']}.{int(m['i']) + offset}.{m['rest']}"
    if fused:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    if m := _LOCAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name):
        return f"{m['head']}.experts.{m['rest']}", int(m["e"])
    return name, None


def place_shard(
    name: str,
    shape: tuple[int, ...],
    geometry: Geometry,
    rank: int,
    expert: int | None,
    experts: int,
    columns: int | None = None,
) -> ShardPlace:
    """Find out which part of a parameter a rank has.

    Args:
        name: its name in the whole model.
        shape: its shape on the rank.
        geometry: the parallel sizes of the job.
        rank: the tensor-parallel rank.
        expert: the number in the model of the expert to which it belongs; None if it belongs to none.
        experts: the number of experts of a layer in the model; unused if `expert` is None.
        columns: for a linear_fc1, the number of columns on the rank of the linear_fc2 after it, which shows whether
            linear_fc1 is gated; None for any other parameter, or if the number is not known.

    Raises:
        Corrupt: it lacks the axis along which it is cut.
        Unsupported: names and arguments do not determine how it is cut.
    """
    size = geometry.tensor if expert is None else geometry.expert_tensor
    axis, known = _find_sharded_axis(name, shape, geometry, size) if size > 1 else (None, True)
    if axis is not None and axis >= len(shape):
        raise Corrupt(
            f'"{name}" has the shape {list(shape)} on a rank, and Megatron-Core cuts it along axis {axis}. The file is '
            "not as Megatron-LM wrote it.",
            code="CKPT0412",
        )
    rank %= size
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    whole = list(shape)
    if axis is None:
        boxes = [((0,) * len(shape), shape)]
    else:
        n = shape[axis]
        whole[axis] = n * size
        halves = 2 if axis == 0 and ".linear_fc1." in name and geometry.gated else 1
        if n % halves or (columns is not None and axis == 0 and n != halves * columns):
            raise Unsupported(
                f'"{name}" has {n} rows on a rank{"" if columns is None else f" and linear_fc2 {columns} columns"}, '
                f"which are not {'a gate and a matrix' if halves == 2 else 'one matrix without a gate'} as the "
                "arguments say (swiglu, quick_geglu). Load it in the Megatron-LM that wrote it, and save it with its "
                "options ckpt-convert-format torch_dist and ckpt-convert-save DIR.",
                code="CKPT0325",
            )
        k = n // halves
        boxes = []
        for half in range(halves):
            start = [0] * len(shape)
            start[axis] = half * k * size + rank * k
            boxes.append((tuple(start), (*shape[:axis], k, *shape[axis + 1 :])))
    if expert is not None:
        boxes = [((expert, *a), (1, *n)) for a, n in boxes]
        whole = [experts, *whole]
    return ShardPlace(LocalBoxes(name, tuple(boxes)), tuple(whole), known)


def _find_sharded_axis(name: str, shape: tuple[int, ...], geometry: Geometry, size: int) -> tuple[int | None, bool]:
    """Find the axis along which tensor-parallel ranks have shards of a parameter.

    Args:
        name: its name in the whole model.
        shape: its shape on a rank.
        geometry: the parallel sizes and arguments of the job.
        size: the number of tensor-parallel ranks.

    Returns:
        (the axis, or None if all ranks have the same; whether a rule for the name states this, False if none does).

    Raises:
        Unsupported: the arguments do not determine whether a down projection of MLA is cut.
    """
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    if leaf in ("weight", "bias") and module in _COLUMN:
        return 0, True
    if leaf == "weight" and module in _ROW:
        return 1, True
    if leaf == "bias" and module in _ROW:
        return None, True
    if leaf == "weight" and module in _DOWN:
        if not shape:
            return 0, True
        rows = [geometry.args.get(k) for k in _DOWN[module]]
        total = sum(n for n in rows if isinstance(n, int)) if all(isinstance(n, int) for n in rows) else None
        if total not in (shape[0], shape[0] * size):
            raise Unsupported(
                f'"{name}" has {shape[0]} rows on each of {size} tensor-parallel ranks, and its rows in the model are '
                f"{total if total is not None else 'not among the arguments'} ({' + '.join(_DOWN[module])}), so that "
                "nothing tells whether it is cut.",
                code="CKPT0325",
            )
        return (None if total == shape[0] else 0), True
    return None, _WHOLE.fullmatch(name) is not None
