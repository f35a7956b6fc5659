"""What the elements of an entry's path say: component, parameter, slot, param group.

A path is a plain tuple, and entries answer for their own: `entry.component`, `entry.slot`. A subclass of tuple would
answer too, but an index has a million paths: making them takes four times as long then, and pickling them to workers
three times, since CPython has a short form for tuples alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

__all__ = [
    "EXTRA_STATE",
    "WRAPPED_SLOTS",
    "HasPath",
    "Number",
    "Path",
    "is_number_text",
    "is_optimizer_state",
    "is_param_group",
    "joined",
    "keep_extra_state_trees",
    "list_own_keys",
    "split_extra_state",
]

#: str elements are keys of dicts, int elements are positions in lists.
Path = tuple[str | int, ...]

#: The last part of the key under which `Module.state_dict()` has what `get_extra_state()` returns
#: (torch/nn/modules/module.py).
EXTRA_STATE = "_extra_state"

#: The key under which bitsandbytes keeps the slots of a parameter since 0.49, so that FSDP does not shard them.
WRAPPED_SLOTS = "__bnb_optimizer_quant_state__"


class Number(str):
    """An element of a path that is an integer key of a dict: {0: ...}. In DCP, whose keys are text, it is text."""

    __slots__ = ()


def is_number_text(text: str) -> bool:
    """Whether a text is a whole number that `int` reads. `int` refuses other digits ("²") and texts of thousands of
    digits."""
    return text.isdecimal() and len(text) < 20


def joined(path: Path) -> str:
    """Join the elements of a path to a name: joined(("model", "norm.weight")) == "model.norm.weight"."""
    return ".".join(map(str, path))


def is_optimizer_state(path: Path) -> bool:
    """Whether a path is that of an optimizer's state: optim.state..."""
    return path[:2] == ("optim", "state")


def is_param_group(path: Path) -> bool:
    """Whether a path is that of an optimizer's param groups: optim.param_groups..."""
    return path[:2] == ("optim", "param_groups")


class HasPath:
    """The elements of an entry's path by what they mean."""

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def path(self) -> Path: ...

    @property
    def component(self) -> str:
        """Return the first element of the path: "model", "optim", "scheduler", ..."""
        return str(self.path[0])

    @property
    def local_name(self) -> str:
        """Return the name without its component: of a weight, its FQN."""
        return joined(self.path[1:])

    @property
    def is_optimizer_state(self) -> bool:
        """Whether the path is that of an optimizer's state: optim.state..."""
        return self.path[:2] == ("optim", "state")

    @property
    def is_param_group(self) -> bool:
        """Whether the path is that of an optimizer's param groups: optim.param_groups..."""
        return self.path[:2] == ("optim", "param_groups")

    @property
    def parameter(self) -> str:
        """Return the FQN of the weight that the entry is, or whose optimizer state it is; "" for any other entry."""
        at = 1 if self.path[0] == "model" else 2 if self.is_optimizer_state else len(self.path)
        return str(self.path[at]) if at < len(self.path) else ""

    @property
    def slot(self) -> str | None:
        """Return the slot of the optimizer's state that the entry holds, such as "exp_avg"; None unless its path is
        optim.state.<FQN>.<slot>."""
        if not self.is_optimizer_state or len(self.path) < 4:
            return None
        return str(self.path[4] if self.path[3] == WRAPPED_SLOTS and len(self.path) > 4 else self.path[3])

    @property
    def group(self) -> int:
        """Return the number of the param group that the entry belongs to; only for an entry that has an `option`."""
        return int(self.path[2])

    @property
    def option(self) -> str | None:
        """Return the name of the param group's option that the entry holds ("lr", "params"); None unless its path is
        optim.param_groups.<number>.<key>."""
        if not self.is_param_group or len(self.path) < 4 or not is_number_text(str(self.path[2])):
            return None
        return joined(self.path[3:])


def split_extra_state(name: str) -> tuple[str, str] | None:
    """Split the name of a model entry into (FQN of a module's extra state, rest of the name, "" if there is none); None
    for an entry that is no extra state.

    >>> split_extra_state("layers.0._extra_state.amax.0")
    ('layers.0._extra_state', 'amax.0')
    """
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return None
    cut = parts.index(EXTRA_STATE) + 1
    return ".".join(parts[:cut]), ".".join(parts[cut:])


def keep_extra_state_trees(origin: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return the entries that keep the extra state of each module one tree under its FQN, as `load_state_dict` asks for
    it: {canonical path: ("model", FQN of the extra state, *keys below it)}, without keys of the trainer's own.

    Args:
        origin: {canonical path, or its beginning: path in the trainer's tree}, as `Checkpoint.origin`.
    """
    out: dict[Path, Path] = {}
    for q, p in origin.items():
        split = split_extra_state(joined(q[1:])) if q[0] == "model" else None
        below = next((i for i, key in enumerate(p, 1) if str(key).rpartition(".")[2] == EXTRA_STATE), len(p))
        if split is not None and p[below:]:
            out[q] = ("model", split[0], *p[below:])
    return out


def list_own_keys(origin: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return the part of an `origin` (`Checkpoint`) with keys of the trainer's own: all that `keep_extra_state_trees`
    does not keep."""
    return dict(origin.items() - keep_extra_state_trees(origin).items())
