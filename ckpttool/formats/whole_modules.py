"""State dicts of modules that were pickled whole, as `torch.save(model, path)` does. No class is imported.

Source: torch/nn/modules/module.py of 2.13. A module is pickled as its `__dict__`, in which `_parameters`, `_buffers`
and `_modules` are dicts by name. `state_dict()` lists the parameters of a module, then its buffers except those in
`_non_persistent_buffers_set`, then its modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Corrupt, Unsafe, Unsupported
from ..printable import count_noun
from .pickles import BackReference, Opaque, list_children
from .stored_tensors import iter_tensors

__all__ = ["replace_modules"]

_MOST_MODULES = 300_000


def replace_modules(tree: Any, what: str, notes: list[str]) -> object:
    """Return a tree of dicts and lists with the state dict, {FQN: tensor}, in the place of every module of torch.
    Modules without tensors, and those inside other objects, stay as they are.

    Args:
        tree: what a torch.save file holds.
        what: names the file in messages.
        notes: gets a sentence for each module.

    Raises:
        Unsupported: a module contains itself.
        Unsafe, Corrupt: it has too many modules, or two tensors of one name.
    """
    if type(tree) is list:
        return [replace_modules(x, what, notes) for x in tree]
    if isinstance(tree, dict):
        return type(tree)((k, replace_modules(x, what, notes)) for k, x in tree.items())
    if _get_module_attributes(tree) is None:
        return tree
    labelled = {x.label: x for x in _walk_values(tree) if isinstance(x, Opaque) and x.label is not None}
    entries = list(_iter_state_dict(tree, "", labelled, frozenset(), iter(range(_MOST_MODULES)), what))
    found = dict(entries)
    if len(found) < len(entries):
        raise Corrupt(
            f"{what}: a {tree.cls} has two tensors of one name, which no module of torch has.", code="CKPT0407"
        )
    if not found:
        return tree
    kept = {t.extent for t in iter_tensors(found, what)}
    others = {t.extent for t in iter_tensors(tree, what)} - kept
    left = (
        f"; {count_noun(len(others), 'tensor')} besides, such as buffers that are not persistent, are left out"
        if others
        else ""
    )
    notes.append(
        f"a whole {tree.cls} was pickled: its {len(found):,} parameters and buffers are read as its state dict, and "
        f"none of its code{left}. If its class changes state_dict(), names may differ from those"
    )
    return found


def _get_module_attributes(x: object) -> Mapping[str, Any] | None:
    """Return the `__dict__` of a pickled torch module; None for anything else."""
    state = x.state if isinstance(x, Opaque) else None
    if type(state) is tuple and state:  # of a class with slots: (its __dict__, its slots)
        state = state[0]
    parts = ("_parameters", "_buffers", "_modules")
    return state if isinstance(state, dict) and all(isinstance(state.get(k), dict) for k in parts) else None


def _iter_state_dict(
    module: object,
    prefix: str,
    labelled: Mapping[int, Opaque],
    around: frozenset[int],
    numbers: Iterator[int],
    what: str,
) -> Iterator[tuple[str, Any]]:
    """Yield (FQN, tensor) of a pickled module, in the order of its state dict; nothing if it is no module.

    Args:
        module: the module, or a `BackReference` to one.
        prefix: of the FQNs, with a dot at its end; "" for the outermost module.
        labelled: {label: the instance that a `BackReference` with it refers to}.
        around: ids of the modules that contain this one.
        numbers: an iterator with an item for each module that may still be visited.
        what: names the file in messages.

    Raises:
        Unsupported: the module contains itself.
        Unsafe: there are too many modules.
    """
    if next(numbers, None) is None:
        raise Unsafe(
            f"{what}: a pickled module has more than {_MOST_MODULES:,} modules, which no model has.", code="CKPT0704"
        )
    if isinstance(module, BackReference):
        module = labelled.get(module.label)
    if (attributes := _get_module_attributes(module)) is None:
        return
    if id(module) in around:
        raise Unsupported(
            f"{what}: the module {prefix.rstrip('.')!r} contains itself, so it has no state dict.", code="CKPT0307"
        )
    passing = attributes.get("_non_persistent_buffers_set")
    buffers = {n: x for n, x in attributes["_buffers"].items() if not isinstance(passing, set) or n not in passing}
    for name, x in (*attributes["_parameters"].items(), *buffers.items()):
        if x is not None:
            yield f"{prefix}{name}", x
    for name, inner in attributes["_modules"].items():
        yield from _iter_state_dict(inner, f"{prefix}{name}.", labelled, around | {id(module)}, numbers, what)


def _walk_values(x: object) -> Iterator[object]:
    """Yield a value and everything inside it, at any depth."""
    todo = [x]
    while todo:
        todo.extend(list_children(inside := todo.pop()))
        yield inside
