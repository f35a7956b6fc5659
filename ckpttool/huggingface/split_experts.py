"""The LoRA of stacked experts as that of each expert, under the names that the Hub has, as vLLM and SGLang load it.

    experts.base_layer.lora_A (n * r, in)     experts.0.gate_proj.lora_A (r, in),  experts.0.up_proj.lora_A (r, in), ...
    experts.base_layer.lora_B (out, r * n)    experts.0.gate_proj.lora_B (out / 2, r), experts.0.up_proj.lora_B ...

PEFT wraps the stack of transformers v5 (`target_parameters`); on the Hub each expert has tensors of its own. Those that
transformers joins to one matrix (gate and up) get the same lora_A, and the rows of lora_B that are theirs: the product
is the same. Views of the adapter's bytes; nothing is computed.

Sources: lora_changes.py; vllm/lora/model_manager.py, which takes either form by the model; names in hub_names.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import Unsupported
from ..index.axes import Axes, Compressed, link_part, place_chunks
from ..index.checkpoint import Checkpoint, Chunks, TensorEntry, joined
from ..printable import count_noun
from . import Config, adapters, hub_names, lora, lora_changes

__all__ = ["make_split_config", "split_experts"]

#: Axes of what a matrix's lora_A and lora_B are parts of: ("a" or "b" of the stack, its axes, those of the part). e
#: counts matrices, r the rank, i inputs; p, u and q are outputs before, in and behind the tensor of the Hub.
_STRAIGHT = {"A": ("a", "(e r) i", "r i"), "B": ("b", "(p+u+q) (r e)", "u r")}
_TRANSPOSED = {"A": ("b", "i (r e)", "r i"), "B": ("a", "(e r) (p+u+q)", "u r")}


def split_experts(ckpt: Checkpoint, config: Config, relation: hub_names.Relation) -> Checkpoint:
    """Split the LoRA of each parameter that is several modules on the Hub, such as stacked experts, into one LoRA per
    module.

    Args:
        ckpt: a checkpoint of an adapter alone, as PEFT saves it; it is not changed.
        config: its adapter_config.json.
        relation: how the names of the base model in memory and on the Hub differ.

    Returns:
        A checkpoint of the adapter with the module names of the Hub.

    Raises:
        Unsupported: the adapter has nothing to split, or it cannot be split.
        Corrupt: it does not fit the model, or its adapter_config.json.
    """
    tensors = {joined(t.path[1:]): t for t in ckpt.tensors.values()}
    wrappers = lora.group_by_wrapper(tensors)
    found = lora_changes.match_target_parameters(
        wrappers, {n: t.shape for n, t in tensors.items()}, config, relation.shapes
    )
    pieces, moved = hub_names.find_hub_modules(relation)
    joined_on_hub = {of: name for name, parts in relation.joined.items() for of, _ in parts}
    of_lora = {n for kinds in wrappers.values() for n in kinds.values()}
    out = {adapters.rename_adapter_tensor(n, moved): t for n, t in tensors.items() if n not in of_lora}
    split = 0
    for wrapper, kinds in wrappers.items():
        parameter, transposed = found.get(wrapper, (f"{lora.to_base_name(wrapper)}.weight", False))
        if parameter in joined_on_hub:
            raise Unsupported(
                f'"{parameter}" is a part of "{joined_on_hub[parameter]}" on the Hub, so its LoRA has no name there.',
                code="CKPT0322",
            )
        if parameter not in pieces:
            out |= {adapters.rename_adapter_tensor(n, moved): tensors[n] for n in kinds.values()}
            continue
        split += 1
        parts, whole = {kind: tensors[n] for kind, n in kinds.items()}, relation.shapes[parameter]
        if parts.keys() != {"a", "b"}:
            raise Unsupported(
                f'the LoRA of "{parameter}" is not lora_A and lora_B, and nothing else: it cannot be split.',
                code="CKPT0322",
            )
        sizes = {"e": whole[0] if len(whole) == 3 else 1, "i": whole[-1]}
        sizes["r"] = parts["a"].shape[0] // sizes["e"]
        lora.compute_scaling(config, parameter, sizes["r"])  # refuses the config of another adapter
        for piece in pieces[parameter]:
            sizes |= {"p": piece.first, "u": piece.rows, "q": whole[-2] - piece.first - piece.rows}
            out |= _cut_lora(piece, parts, sizes, transposed)
    if not split:
        raise Unsupported(
            "no LoRA of the adapter is of a parameter that is several tensors on the Hub, so there is nothing to "
            "split: programs that serve this model load the adapter as PEFT saves it.",
            code="CKPT0322",
        )
    new = {f"model.{n}": replace(t, path=("model", n)) for n, t in out.items()}
    kept = {n: d for n, d in ckpt.recorded.items() if n in new and new[n].chunks is ckpt.tensors[n].chunks}
    note = f"split the LoRA of {count_noun(split, 'stack')} into that of each tensor on the Hub"
    return replace(ckpt, tensors=new, recorded=kept, notes=[*ckpt.notes, note])


def make_split_config(config: Config, names: Iterable[str], relation: hub_names.Relation) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter that `split_experts` has split.

    Args:
        config: the config before the split.
        names: names of the adapter's tensors after the split.
        relation: how the names of the base model in memory and on the Hub differ.
    """
    pieces, wrappers = hub_names.find_hub_modules(relation)[0], lora.group_by_wrapper(names)
    made = {p.module: parameter for parameter, of in pieces.items() for p in of if p.module in wrappers}
    targets = config.get("target_modules") or []
    if not isinstance(targets, list):
        targets = [w for w in wrappers if w not in made]
    left = [n for n in config.get("target_parameters") or () if not any(f".{p}".endswith(f".{n}") for p in pieces)]
    out = {**config, "target_modules": sorted({*targets, *(m.rpartition(".")[2] for m in made)})}
    for field, usual in (("rank_pattern", config.get("r")), ("alpha_pattern", config.get("lora_alpha"))):
        values = {m: lora.look_up_pattern(config, field, parameter, usual) for m, parameter in made.items()}
        out[field] = {**(config.get(field) or {}), **{re.escape(m): v for m, v in values.items() if v != usual}}
    return {**out, "target_parameters": left or None}


def _cut_lora(
    piece: hub_names.Piece, parts: Mapping[str, TensorEntry], sizes: Mapping[str, int], transposed: bool
) -> dict[str, TensorEntry]:
    """Cut the LoRA of one module on the Hub out of the LoRA of a parameter, and return {name as PEFT saves it: tensor}.

    Args:
        piece: the module, and its rows in the parameter.
        parts: {"a", "b": tensor} of the parameter's LoRA.
        sizes: sizes of the axes of `_STRAIGHT`.
        transposed: lora_A has the columns where the parameter has rows, as before PEFT 0.19.

    Raises:
        Unsupported: the LoRA is compressed.
    """
    out: dict[str, TensorEntry] = {}
    for letter, (of, axes, part) in (_TRANSPOSED if transposed else _STRAIGHT).items():
        link = link_part(Axes.parse(part), Axes.parse(axes), 1, {"e": piece.matrix}, sizes)
        chunks = Chunks(2)
        try:
            place_chunks(link, parts[of], chunks, to_whole=False)
        except Compressed:
            raise Unsupported(
                f'the LoRA of "{piece.module}" is compressed and must be split; convert the checkpoint to dcp first.',
                code="CKPT0324",
            ) from None
        name = f"{lora.ROOT}{piece.module}.lora_{letter}.weight"
        out[name] = replace(parts[of], shape=link.part_shape, chunks=chunks)
    return out
