"""Single values set, and parts of a state left out for a job to start them new, as the user asks (`set_values`,
`reset`)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UsageError, argument
from ...formats.pickles import short
from ...index.checkpoint import Checkpoint, Value
from ...index.selection import EntrySelection, explain_no_match, find_unmatched_patterns
from ...printable import count_noun

__all__ = ["reset_state", "set_values"]

_PLAIN = (bool, int, float, str)


def set_values(ckpt: Checkpoint, wanted: Mapping[str, object]) -> tuple[Checkpoint, dict[str, str]]:
    """Set values to new data.

    Args:
        wanted: {glob of names of values: number, text, None, or a list of these}; if several globs match a name, the
            last one counts. The type must be that of the old data, and a list must have the length of the old one.

    Returns:
        (the new state, {name of a changed value: text with its new and old data}).

    Raises:
        UsageError: no value has such a name, it is a tensor or a list of parameter names, its data is no plain data, or
            the type differs.
    """
    values, names = dict(ckpt.values), [*ckpt.tensors, *ckpt.values]
    for pattern, data in wanted.items():
        found = [n for n in names if n == pattern or fnmatch.fnmatchcase(n, pattern)]
        if not found:
            raise UsageError(
                f"{argument('set_values')} {pattern!r}: {explain_no_match(pattern, list(ckpt.values))}", code="CKPT0207"
            )
        for n in found:
            if n in ckpt.tensors:
                raise UsageError(
                    f'{argument("set_values")} {pattern!r}: "{n}" is a tensor. Only values are set.', code="CKPT0205"
                )
            v = values[n]
            if v.option in ("params", "param_names"):
                raise UsageError(
                    f'{argument("set_values")} {pattern!r}: "{n}" lists parameters; {argument("rename")} renames them.',
                    code="CKPT0205",
                )
            try:
                values[n] = Value(v.path, _convert_to_type_of(ckpt.values[n].data, data))
            except ValueError as e:
                raise UsageError(
                    f'{argument("set_values")} {pattern!r}: "{n}" is {short(v.data)}, {e}.', code="CKPT0203"
                ) from None
    changed = {
        n: f"set to {short(v.data)}, was {short(ckpt.values[n].data)}"
        for n, v in values.items()
        if v is not ckpt.values[n] and repr(v.data) != repr(ckpt.values[n].data)
    }
    out = replace(ckpt, values=values, notes=[*ckpt.notes])
    rates = [n for n in changed if values[n].is_param_group and values[n].option == "lr"]
    if rates and any(v.component == "scheduler" for v in values.values()):
        out.notes.append(
            f'"{rates[0]}" was set, and the scheduler is kept: LambdaLR, OneCycleLR and those of engines compute it '
            "again at the next step, from rates of their own, and others of torch go on from it; "
            f"{argument('reset', ['scheduler'])} leaves the scheduler out"
        )
    return out, changed


def _convert_to_type_of(old: Any, new: object) -> object:
    """Return `new` in the type of `old`: an integer becomes a float, a list a tuple.

    Raises:
        ValueError: it has another type or length, or `old` is no plain data. The message continues a sentence.
    """
    if type(old) in (list, tuple):
        if not isinstance(new, (list, tuple)) or len(new) != len(old):
            raise ValueError(f"which takes a list of {count_noun(len(old), 'element')}")
        return type(old)(_convert_to_type_of(a, b) for a, b in zip(old, new, strict=True))
    if old is not None and type(old) not in _PLAIN:
        raise ValueError("which is no number, text or list of these: what is inside an object is not set")
    if old is None and (new is None or type(new) in _PLAIN):
        return new
    if type(old) is float and type(new) is int:
        return float(new)
    if type(new) is not type(old):
        raise ValueError(f"and {new!r} is no {type(old).__name__}")
    return new


def reset_state(ckpt: Checkpoint, patterns: tuple[str, ...]) -> tuple[Checkpoint, str]:
    """Remove the entries that patterns select, so that a job initialises them, and return (the new state, the reason
    for the list of dropped entries).

    Raises:
        UsageError: a pattern selects nothing, or weights.
    """
    names = [*ckpt.tensors, *ckpt.values]
    for pattern in find_unmatched_patterns(patterns, names):
        raise UsageError(f"{argument('reset', [pattern])}: {explain_no_match(pattern, names)}", code="CKPT0207")
    asked = EntrySelection(patterns)
    gone = [n for n in names if asked.holds(n)]
    if weights := [n for n in gone if ckpt.component(n) == "model"]:
        raise UsageError(
            f'{argument("reset", patterns)}: "{weights[0]}" is of the model, and no job starts with new weights. '
            f"{argument('drop_matching')} leaves it out.",
            code="CKPT0205",
        )
    out = ckpt.part(lambda n: not asked.holds(n))
    parts = ", ".join(dict.fromkeys(ckpt.component(n) for n in gone))
    out.notes = [
        *out.notes,
        f"reset: {count_noun(len(gone), 'entry', 'entries')} of {parts} left out. The job starts with new state there, "
        "and must not ask for it in the checkpoint",
    ]
    return out, f"reset by {argument('reset')}: a job starts it new"
