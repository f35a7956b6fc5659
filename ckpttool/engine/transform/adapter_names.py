"""A LoRA adapter, alone or in the model that PEFT wrapped, under the names of another program.

A map is about the base model, so a tensor of an adapter follows the weight that it changes:

    layers.{i}.wo.weight = model.layers.{i}.self_attn.o_proj.weight
    base_model.model.layers.0.wo.lora_A.weight -> base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight

That is so where the map only renames the weight. What it joins, splits, permutes or transposes has no such adapter.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ...errors import Unsupported
from ...huggingface import lora
from ...index.checkpoint import Checkpoint
from ...index.fqns import rename_parameters
from ...index.map_groups import TensorGroup, group_names
from ...index.name_maps import NameMap
from ...printable import list_first

__all__ = ["has_lines_for_adapter", "map_adapter"]

#: Where PEFT's own names begin behind that of a module.
_PEFT = re.compile(r"\.(?:lora_|token_adapter\.|base_layer\.|original_module\.|modules_to_save\.[^.]+\.)")


class _Wrapped(NamedTuple):
    """The name of a parameter in a model that PEFT wrapped: `prefix` + `module` + `tail`; `leaf` is that of the weight
    of the base model which it follows."""

    prefix: str
    module: str
    tail: str
    leaf: str

    @property
    def base(self) -> str:
        """Return the name that the weight has in the base model, without PEFT: "MODULE.LEAF", or "LEAF" alone."""
        return f"{self.module}.{self.leaf}" if self.module else self.leaf


def has_lines_for_adapter(ckpt: Checkpoint, found: NameMap) -> bool:
    """Tell whether the lines of a map match all names of the adapter's own tensors ("...lora_A.weight"), as those of a
    map that removes a prefix do. Lines `{*} = {*}`, which keep any name, do not count.

    Args:
        ckpt: the adapter.
        found: the map.
    """
    names = [t.local_name for t in ckpt.tensors.values() if t.component == "model"]
    for forward in (True, False):
        groups, unmatched = group_names(names, found, "model", forward)
        kept = (g for g in groups if all(t.name == "{*}" for t in (g.line.whole, *g.line.parts)))
        if not unmatched and next(kept, None) is None:
            return True
    return False


def map_adapter(ckpt: Checkpoint, found: NameMap, of_optimizer: Iterable[str]) -> Checkpoint:
    """Return a state whose adapter has the names of the other side of a map: weights, optimizer state and param groups.

    Args:
        found: the map.
        of_optimizer: the names of the optimizer's parameters.

    Raises:
        Unsupported: the map has no line for a weight that has an adapter, or does more than rename it.
    """
    of_model = (str(e.path[1]) for e in (*ckpt.tensors.values(), *ckpt.values.values()) if e.component == "model")
    split = {n: _split_wrapped_name(n) for n in sorted({*of_model, *of_optimizer})}
    moved, forward = _map_base_names({w.base for w in split.values()}, found)
    new: dict[str, str] = {}
    modules: dict[tuple[str, str], str] = {}
    for name, w in split.items():
        module, _, leaf = moved[w.base].rpartition(".")
        if leaf != w.leaf or modules.setdefault((w.prefix, w.module), module) != module:
            raise Unsupported(
                f'"{name}" is in a module that PEFT wrapped, and the map {found.name} makes its weight '
                f'"{moved[w.base]}", which is not in the module that the others go to.',
                code="CKPT0322",
            )
        new[name] = w.prefix + (f"{module}{w.tail}" if module else w.tail.removeprefix("."))
    out, renamed = rename_parameters(ckpt, lambda name: new.get(name, name))
    here, there = found.sides if forward else found.sides[::-1]
    note = (
        f"names of {here} became those of {there} by the map {found.name}, with those of the adapter after their base "
        f"weights: {len(renamed):,} names changed. An adapter_config.json has the old names of its modules; "
        "`ckpttool adapter extract --lora-alpha` makes one for the new"
    )
    return replace(out, origin={}, trainer=None, notes=[*out.notes, note])


def _split_wrapped_name(name: str) -> _Wrapped:
    """Split the name of a parameter, "PREFIX.MODULE.lora_A.weight", at the module that PEFT wrapped. A name without a
    part of PEFT's is split at its last dot."""
    head, root, inner = name.partition(lora.ROOT)
    prefix, inner = (head + root, inner) if root else ("", name)
    m = _PEFT.search(inner)
    if m is None:
        module, _, leaf = inner.rpartition(".")
        return _Wrapped(prefix, module, f".{leaf}", leaf)
    is_base = not m[0].startswith((".lora_", ".token_adapter."))
    return _Wrapped(prefix, inner[: m.start()], inner[m.start() :], inner[m.end() :] if is_base else "weight")


def _map_base_names(names: set[str], found: NameMap) -> tuple[dict[str, str], bool]:
    """Map the names of the base model's weights.

    Returns:
        ({name: new name}, whether the names are those of the left side of the map).

    Raises:
        Unsupported: the names belong to neither side, or the map does more than rename a weight.
    """
    ways = {forward: group_names(sorted(names), found, "model", forward) for forward in (True, False)}
    forward = min(ways, key=lambda way: (len(ways[way][1]), -sum(g.literal for g in ways[way][0])))
    groups, unmatched = ways[forward]
    if unmatched:
        raise Unsupported(
            f"the map {found.name} is between {found.sides[0]} and {found.sides[1]}, and {len(unmatched):,} weights "
            f"that have an adapter, or stand beside it, are not names of {found.sides[not forward]}: "
            f"{list_first(unmatched, 5)}. Add lines for them.",
            code="CKPT0310",
        )
    for group in groups:
        others = group.line.parts if group.from_whole else (group.line.whole,)
        lefts = group.names.values() if forward else [t.named(group.numbers) for t in others if _is_pure_rename(group)]
        shifted = any(fnmatch.fnmatchcase(n, a.pattern) for a in found.added_one for n in lefts)
        if not _is_pure_rename(group) or shifted:
            raise Unsupported(
                f'"{group.first}" is more than renamed by the map {found.name}, which says {group.line}: its LoRA '
                "cannot follow. Merge it first: `ckpttool adapter merge`.",
                code="CKPT0322",
            )
    return {
        name: (group.line.parts[0] if group.from_whole else group.line.whole).named(group.numbers)
        for group in groups
        for name in group.names.values()
    }, forward


def _is_pure_rename(group: TensorGroup) -> bool:
    """Tell whether the line of a group only renames its one tensor."""
    line = group.line
    return len(line.parts) == 1 and not line.stacked and line.parts[0].axes == line.whole.axes
