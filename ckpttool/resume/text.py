"""Formats numbers, changes and names of tensors for checks, causes and reports.

    format_number(0.00001234) == "1.23e-05"
    to_readable_name("model.layers.1.self_attn.q_proj.weight") == "layer 1, self_attn.q_proj"

The canonical name of a tensor is "model." and an FQN, or "optim.state.", an FQN and a slot of the optimizer. Names come
from checkpoints of others: where one is shown, characters that do not print are spelled out (`escape_unprintable`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from ..printable import escape_unprintable

__all__ = [
    "LAYER",
    "describe_changes",
    "describe_components",
    "describe_selection",
    "format_number",
    "is_step_counter",
    "parse_component",
    "parse_fqn",
    "parse_layer_number",
    "parse_slot",
    "to_readable_name",
]

T = TypeVar("T")

_STATE = "optim.state."

#: The layer number in a name.
LAYER = re.compile(r"(?:^|\.)(layers|h|blocks|block|layer)\.(\d+)\.")


def format_number(x: float | None, digits: int = 3) -> str:
    """Format a number for a table: format_number(0.00001234) == "1.23e-05".

    Args:
        x: None gives "", and what is no number gives its text, shortened.
        digits: significant digits; whole numbers below a million have all of theirs.
    """
    if x is None:
        return ""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return escape_unprintable(x, 24)
    if isinstance(x, int) or (x == int(x) if math.isfinite(x) and abs(x) < 1e6 else False):
        return str(int(x))
    return f"{x:.{digits}g}"


def describe_changes(found: Mapping[str, tuple[T, T]], show: Callable[[T], str] = repr) -> list[str]:
    """Return a sentence for each value that changed: {"lr": (0.1, 0.2)} gives ["lr is 0.2 and was 0.1"].

    Args:
        found: {what changed: (value before, value now)}.
        show: makes a text of a value.
    """
    return [f"{n} is {show(b)} and was {show(a)}" for n, (a, b) in found.items()]


# ----------------------------------------------------------------------------------------------------- names of tensors


def parse_slot(name: str) -> str:
    """Return the slot (such as "exp_avg") of a tensor of the optimizer state, from its canonical name; "weights" for
    others."""
    return name.rpartition(".")[2] if name.startswith(_STATE) else "weights"


def parse_fqn(name: str) -> str:
    """Return the FQN of the parameter in the canonical name of its tensor, or of a tensor in its optimizer state."""
    if name.startswith(_STATE):
        return name[len(_STATE) :].rpartition(".")[0]
    return name.removeprefix("model.")


def parse_component(name: str) -> Literal["weights", "optimizer"]:
    """Return "optimizer" for the canonical name of a tensor of the optimizer, otherwise "weights"."""
    return "optimizer" if name.startswith("optim.") else "weights"


def is_step_counter(name: str) -> bool:
    """Tell whether a canonical name is that of the step counter in a parameter's optimizer state."""
    return parse_slot(name) == "step" and parse_fqn(name) != ""


def parse_layer_number(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to, by its name; None outside of layers, as for an
    embedding."""
    m = LAYER.search(name)
    return int(m[2]) if m else None


def to_readable_name(name: str) -> str:
    """Shorten a tensor's canonical name for reports.

    "optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg" becomes "layer 1, self_attn.q_proj, exp_avg".
    """
    slot = parse_slot(name) if name.startswith(_STATE) else ""
    name = re.sub(r"^(model\.)+", "", parse_fqn(name))
    m = LAYER.search(name)
    rest = (name[m.end() :] if m else name).removesuffix(".weight")
    return (f"layer {m[2]}, " if m else "") + rest + (f", {slot}" if slot else "")


def describe_components(names: Iterable[str]) -> str:
    """Return "weights", "optimizer state" or "weights and optimizer state", for the canonical names of some tensors."""
    slots = {parse_slot(n) == "weights" for n in names}
    return "weights and optimizer state" if len(slots) == 2 else "weights" if True in slots else "optimizer state"


def describe_selection(names: Sequence[str], every: Sequence[str], what: str) -> str:
    """Describe some of many tensors in a few words: "2 weights of layer 1".

    Args:
        names: the tensors to describe, at least one.
        every: all tensors that they were chosen from.
        what: a plural for them, such as "weights".
    """
    if len(names) == 1:
        return to_readable_name(names[0])
    if len(names) == len(every):
        return f"all {len(names)} {what}"
    layers = {parse_layer_number(n) for n in names}
    if len(layers) == 1 and None not in layers:
        return f"{len(names)} {what} of layer {layers.pop()}"
    return f"{len(names)} of {len(every)} {what} (first: {to_readable_name(names[0])})"
