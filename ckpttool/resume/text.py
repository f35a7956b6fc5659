"""Formats numbers, lists and names of tensors for checks, causes and reports.

    number(0.00001234) == "1.23e-05"        plural(2, "step") == "2 steps"
    spoken("model.layers.1.self_attn.q_proj.weight") == "layer 1, self_attn.q_proj"

The canonical name of a tensor is "model." and an FQN, or "optim.state.", an FQN and a slot of the optimizer. Names come
from checkpoints of others: where one is shown, characters that do not print are spelled out (`clean`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..printable import printable

__all__ = [
    "LAYER",
    "changed",
    "clean",
    "component_of",
    "fqn_of",
    "is_step",
    "kinds",
    "layer_of",
    "listed",
    "middle",
    "number",
    "plural",
    "scope",
    "slot_of",
    "spoken",
]

_STATE = "optim.state."

#: The layer number in a name.
LAYER = re.compile(r"(?:^|\.)(layers|h|blocks|block|layer)\.(\d+)\.")


def clean(text: object, word: int = 0) -> str:
    """The text, with characters that do not print spelled out: clean("a\\n") == "a\\\\n".

    `word` > 0 shortens longer words in the middle, where tensor names differ least.
    """
    out = printable(str(text))
    if word:
        out = re.sub(rf"\S{{{word + 1},}}", lambda m: middle(m[0], word), out)
    return out


def middle(text: str, width: int) -> str:
    """The text, shortened in the middle if it is longer than that."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def number(x: float | None, digits: int = 3) -> str:
    """A number for a table: number(0.00001234) == "1.23e-05"; "" for None."""
    if x is None:
        return ""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return clean(x, 24)
    if isinstance(x, int) or (x == int(x) if math.isfinite(x) and abs(x) < 1e6 else False):
        return str(int(x))
    return f"{x:.{digits}g}"


def listed(names: Iterable[str], most: int = 3) -> str:
    """listed(["a", "b", "c", "d"]) == "a, b, c and 1 more" """
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def changed(found: Mapping[str, tuple[Any, Any]], show: Callable[[Any], str] = repr) -> list[str]:
    """changed({"lr": (0.1, 0.2)}) == ["lr is 0.2 and was 0.1"], of {what: (expected, found)}"""
    return [f"{n} is {show(b)} and was {show(a)}" for n, (a, b) in found.items()]


def plural(n: int, what: str) -> str:
    """plural(1, "tensor") == "1 tensor" """
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# ----------------------------------------------------------------------------------------------------- names of tensors


def slot_of(name: str) -> str:
    """ "weights", or the slot of the optimizer's state."""
    return name.rpartition(".")[2] if name.startswith(_STATE) else "weights"


def fqn_of(name: str) -> str:
    """The FQN of the parameter that a tensor is, or is the state of."""
    if name.startswith(_STATE):
        return name[len(_STATE) :].rpartition(".")[0]
    return name.removeprefix("model.")


def component_of(name: str) -> str:
    """ "weights" or "optimizer"."""
    return "optimizer" if name.startswith("optim.") else "weights"


def is_step(name: str) -> bool:
    """Whether a tensor is the `step` in the optimizer state of a parameter."""
    return slot_of(name) == "step" and fqn_of(name) != ""


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for an embedding."""
    m = LAYER.search(name)
    return int(m[2]) if m else None


def spoken(name: str) -> str:
    """spoken("optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg") == "layer 1, self_attn.q_proj, exp_avg" """
    slot = slot_of(name) if name.startswith(_STATE) else ""
    name = re.sub(r"^(model\.)+", "", fqn_of(name))
    m = LAYER.search(name)
    rest = (name[m.end() :] if m else name).removesuffix(".weight")
    return (f"layer {m[2]}, " if m else "") + rest + (f", {slot}" if slot else "")


def kinds(names: Iterable[str]) -> str:
    """ "weights", "optimizer state" or "weights and optimizer state"."""
    slots = {slot_of(n) == "weights" for n in names}
    return "weights and optimizer state" if len(slots) == 2 else "weights" if True in slots else "optimizer state"


def scope(names: Sequence[str], every: Sequence[str], what: str) -> str:
    """Which of `every` tensors these are, in a few words."""
    if len(names) == 1:
        return spoken(names[0])
    if len(names) == len(every):
        return f"all {len(names)} {what}"
    layers = {layer_of(n) for n in names}
    if len(layers) == 1 and None not in layers:
        return f"{len(names)} {what} of layer {layers.pop()}"
    return f"{len(names)} of {len(every)} {what} (first: {spoken(names[0])})"
