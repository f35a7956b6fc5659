"""The part of a checkpoint that was asked for (`only`, `drop_matching`), under the names that were asked for
(`rename`).

What is left out and what is renamed is decided by the names that a located index has: those of some layouts (buckets of
Megatron, stacked experts of the Hub) are not known before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..errors import Unsupported, UsageError, argument
from ..index.checkpoint import Checkpoint, TensorEntry, Value
from ..index.draft import Dropped
from ..index.fqns import rename_parameters
from ..index.selection import NOT_RESUMED, EntrySelection, explain_no_match, find_unmatched_patterns
from ..options import OpenOptions
from ..printable import count_noun

if TYPE_CHECKING:
    from .opening import MergedCheckpoint, OpenCheckpoint

__all__ = ["make_selection", "select_merged_part", "select_part"]

Opened = TypeVar("Opened", bound="OpenCheckpoint")

#: No longer name is renamed: the time of a regular expression grows with the text, that of some with its square and
#: worse.
_LONGEST = 1_000


def make_selection(options: OpenOptions) -> EntrySelection:
    """Return the part of a checkpoint that `only` and `drop_matching` of the options select."""
    return EntrySelection(
        None if options.only is None else tuple(options.only),
        () if options.drop_matching is None else tuple(options.drop_matching),
    )


def select_part(opened: Opened, rules: Mapping[str, str]) -> Opened:
    """Return a checkpoint reduced to its `selection` and renamed.

    It is located first, unless the selection is of complete components and nothing is renamed. Parameters that are left
    out are also removed from the param groups.

    Args:
        rules: {regular expression: replacement} for names of parameters.

    Raises:
        UsageError: a pattern selects nothing, a rule is wrong or matches no name, or nothing is left.
        Unsupported: two entries would have one name.
        CkpttoolError: it cannot be located.
    """
    selection = opened.selection
    if not selection.by_component:
        before = opened.locate()
        _refuse_unmatched_patterns(selection, [*before.tensors, *before.values])
        after = before.part(selection.holds)
        opened = replace(opened, checkpoint=after, unwanted=_list_dropped_by_pattern(before, selection))
        after.notes = [*after.notes, _describe_left_out(before, after, selection)]
        cut, gone = _cut_param_groups(before, after)
        if gone:
            how = "without the parameters that were left out"
            cut.notes.append(f"the param groups list {count_noun(len(gone), 'parameter')} less, which were left out")
            opened = replace(opened, checkpoint=cut, changes=[(how, after, cut)])
    if rules:
        before = opened.locate()
        after, renamed = _rename_by_rules(before, rules)
        how = f"renamed by {argument('rename')}"
        opened = replace(opened, checkpoint=after, changes=[*opened.changes, (how, before, after)], renamed=renamed)
    return opened


def select_merged_part(made: MergedCheckpoint, options: OpenOptions) -> MergedCheckpoint:
    """Return the part of a computed state that `options` select, under the names that they give; without a selection,
    the components that it has.

    Raises:
        UsageError, Unsupported: as `select_part`.
    """
    asked = make_selection(options)
    selection = replace(asked, only=asked.only or made.selection.only)
    part = select_part(replace(made, selection=selection), options.rename or {})
    kept = ((part.renamed.get(n, n), there) for n, there in made.kept.items())
    part.kept = {n: there for n, there in kept if n in part.checkpoint.tensors}
    return part


def _refuse_unmatched_patterns(selection: EntrySelection, names: list[str]) -> None:
    """Raise if a pattern of the selection matches none of `names`, or nothing is selected.

    Raises:
        UsageError: with the first such pattern, and names like it.
    """
    for option, patterns in (("only", selection.only or ()), ("drop_matching", selection.left_out)):
        for pattern in find_unmatched_patterns(patterns, names):
            raise UsageError(f"{argument(option, [pattern])}: {explain_no_match(pattern, names)}", code="CKPT0207")
    if not any(map(selection.holds, names)):
        raise UsageError(
            f"{argument('drop_matching', selection.left_out)}: nothing is left of the checkpoint.", code="CKPT0207"
        )


def _list_dropped_by_pattern(before: Checkpoint, selection: EntrySelection) -> list[Dropped]:
    """List the entries that `only` selects and `drop_matching` leaves out, as dropped."""
    asked = replace(selection, left_out=())
    why = f"left out by {argument('drop_matching')}"
    sizes = {n: t.nbytes for n, t in before.tensors.items()} | dict.fromkeys(before.values, 0)
    return [Dropped(n, size, why) for n, size in sizes.items() if asked.holds(n) and not selection.holds(n)]


def _describe_left_out(before: Checkpoint, after: Checkpoint, selection: EntrySelection) -> str:
    """Return a note on how many tensors and values of the selected components were left out."""
    looked_at = ", ".join(sorted(selection.components or ()))
    tensors, values = len(before.tensors) - len(after.tensors), len(before.values) - len(after.values)
    parts = [
        f"{gone:,} of {whole:,} {noun}"
        for gone, whole, noun in ((tensors, len(before.tensors), "tensors"), (values, len(before.values), "values"))
        if gone
    ]
    if parts:
        left = " and ".join(parts) + (f" of {looked_at}" if looked_at else "")
    else:
        left = f"everything but {looked_at}" if looked_at else "nothing"
    return f"left out as asked: {left}. {NOT_RESUMED}"


def _cut_param_groups(before: Checkpoint, after: Checkpoint) -> tuple[Checkpoint, set[str]]:
    """Remove parameters whose state or weight was left out from the param groups, since loaders expect state for all of
    them.

    If no optimizer state, or no weights, were selected at all, their parameters stay.

    Args:
        before, after: the index before and after the selection.

    Returns:
        (the index with shorter lists, the names that were removed).
    """
    had, have = _list_parameters_with_state(before), _list_parameters_with_state(after)
    weights, kept = ({t.parameter for t in x.tensors.values() if t.component == "model"} for x in (before, after))
    gone = (had - have if have else set()) | (weights - kept - have if kept else set())
    values, cut = dict(after.values), set[str]()
    for n, v in after.values.items():
        if v.option in ("params", "param_names") and isinstance(v.data, list):
            listed = {x for x in v.data if isinstance(x, str) and x in gone}
            cut |= listed
            values[n] = Value(v.path, [x for x in v.data if x not in listed]) if listed else v
    return replace(after, values=values, notes=[*after.notes]), cut


def _list_parameters_with_state(ckpt: Checkpoint) -> set[str]:
    """Return the names of the parameters that have optimizer state."""
    leaves: Iterable[TensorEntry | Value] = [*ckpt.tensors.values(), *ckpt.values.values()]
    return {t.parameter for t in leaves if t.slot is not None}


def _rename_by_rules(ckpt: Checkpoint, rules: Mapping[str, str]) -> tuple[Checkpoint, dict[str, str]]:
    """Rename the parameters of a checkpoint by rules of `rename`.

    Returns:
        (the new index, {old name of an entry: its new name} for those that changed).

    Raises:
        UsageError: a rule is wrong, matches no name, or would make a part of a name empty.
        Unsupported: two entries would have one name, a name is too long, or the checkpoint is being salvaged.
    """
    if ckpt.salvage is not None and (ckpt.salvage.missing or ckpt.salvage.rebuilt):
        raise Unsupported(
            "what was salvaged of a damaged checkpoint keeps its names. Salvage it first, then rename the copy.",
            code="CKPT0310",
        )
    substitutes = [_compile_rule(pattern, new) for pattern, new in rules.items()]
    matched: set[int] = set()
    seen: dict[str, str] = {}

    def new_name(name: str) -> str:
        """Return the new name of a parameter.

        Raises:
            UsageError: a part of it would be empty.
        """
        if name not in seen:
            if len(name) > _LONGEST:
                raise Unsupported(
                    f'"{name[:60]}..." has {len(name):,} characters; names of up to {_LONGEST:,} are renamed.',
                    code="CKPT0310",
                )
            out = name
            for k, substitute in enumerate(substitutes):
                out, count = substitute(out)
                matched.update([k] * bool(count))
            if out != name and not all(out.split(".")):
                raise UsageError(
                    f'{argument("rename")}: "{name}" would become "{out}", in which a part is empty. Does the pattern '
                    "lack a dot?",
                    code="CKPT0203",
                )
            seen[name] = out
        return seen[name]

    out, renamed = rename_parameters(ckpt, new_name)
    for k, pattern in enumerate(rules):
        if k not in matched:
            raise UsageError(
                f"{argument('rename')} {pattern!r}: no name matches. The first is {next(iter(seen), None)!r}; names "
                "are those of parameters, without model or optim.",
                code="CKPT0207",
            )
    changed = sum(a != b for a, b in seen.items())
    note = f"{argument('rename')}: {changed:,} of {count_noun(len(seen), 'name')} of parameters changed"
    out.notes = [*out.notes, note]
    return out, renamed


def _compile_rule(pattern: str, new: str) -> Callable[[str], tuple[str, int]]:
    """Return a function that replaces all matches of a regular expression in a text; returns (new text, number of
    matches).

    Args:
        new: the replacement.

    Raises:
        UsageError: the expression is not valid, or the replacement refers to a group that it does not have.
    """
    try:
        compiled = re.compile(pattern)
        compiled.sub(new, "")  # which reads the replacement, whatever the text is
    except (re.error, IndexError) as e:
        raise UsageError(
            f"{argument('rename')} {pattern!r}={new!r}: {e}. It is a regular expression of Python and its replacement, "
            r"in which \1 is its first group.",
            code="CKPT0203",
        ) from None
    return lambda text: compiled.subn(new, text)
