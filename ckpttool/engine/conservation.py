"""The law of a conversion: every entry of the source is kept, changed as declared, or dropped with a reason.

Writers declare, the engine judges. `Account.add_step` compares the index before and after each change that the engine
makes to a state (a name map, a cast); `Account.add_draft` compares it with what the writer has planned, before a byte
is written; `find_value_differences` compares the plan with what a reader finds in the result (verification.read_back
does that for the bytes of tensors).

    kept      same name; same shape, dtype and source bytes, or an equal value
    changed   another name, dtype, shape or value, for a stated reason
    dropped   not in the result, with the reason
    added     in the result, and not in the source: zeros for new parameters, counters that a trainer asks for

An entry in none of these is a fault of the layout that was written, and an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from ..by_fields import ByFields
from ..errors import Differs, argument
from ..formats.pickles import short
from ..formats.stored_tensors import flatten_tree
from ..index.checkpoint import Checkpoint, TensorEntry, Value, joined
from ..index.draft import Draft, Dropped
from ..printable import count_noun
from .copy.value_digests import data_digest, equal_values, split_into_leaves, split_lists, value_digest

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Account", "find_value_differences", "list_changed_values", "list_written_values"]

_SHOWN = 3
_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(eq=False, repr=False)
class Account(ByFields):
    """What becomes of every entry of a source; names are those of the source, but for `added`."""

    kept: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)  # {name: how}
    dropped: list[Dropped] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    set_values: list[str] = field(default_factory=list)  # names of values that the user set to other data

    def add_step(self, how: str, before: Checkpoint, after: Checkpoint, computed: bool = False) -> None:
        """Compare the index before and after one change, such as a name map, and record what became of each entry.

        An entry of `before` that `after` does not have counts as changed if its bytes, or an equal value, are in
        `after` under another name, or if `computed` is set; otherwise as dropped, with `how` as the reason.

        Args:
            how: what was done, as the reason: "filled from PATH".
            computed: whether the new entries of `after` were computed from those that are gone.
        """
        if after is before:
            return
        new = {n: t for n, t in after.tensors.items() if not _is_same_entry(t, before.tensors.get(n))}
        gone = {n: t for n, t in before.tensors.items() if not _is_same_entry(t, after.tensors.get(n))}
        here, there = _ByteRanges(gone.values()), _ByteRanges(new.values())
        # tensors of files that the source does not have are computed from some that are gone, one from each
        made = Counter((t.dtype, t.numel) for t in new.values() if min(t.chunks.file, default=0) >= len(before.files))
        for n, t in gone.items():
            derived = computed or n in after.tensors or n in after.values or there.hold(t)
            if not derived and made[t.dtype, t.numel]:
                made[t.dtype, t.numel] -= 1
                derived = True
            if derived:
                self.changed[n] = how
            else:
                self.dropped.append(Dropped(n, t.nbytes, how))
        for n, t in new.items():
            known = computed or n in before.tensors or n in before.values or here.hold(t)
            if not known and (made[t.dtype, t.numel] or min(t.chunks.file, default=0) < len(before.files)):
                self.added.append(n)
        self._compare_values(how, before, after)

    def _compare_values(self, how: str, before: Checkpoint, after: Checkpoint) -> None:
        """Compare the values of two indexes and record what became of each.

        A value that `after` does not have counts as changed if an equal one is there under a new name, or one for each
        of its keys; otherwise as dropped.

        Args:
            how: what was done, as the reason.
        """
        moved = {data_digest(v) for n, v in after.values.items() if n not in before.values}
        left = {data_digest(v) for n, v in before.values.items() if n not in after.values}
        for n, v in before.values.items():
            if n in after.tensors or (n in after.values and not equal_values(v, after.values[n])):
                self.changed[n] = how
            elif n not in after.values:
                keys = flatten_tree(v.data, v.path)
                apart = [data_digest(Value(p, x)) for p, x in keys.items()] if v.path not in keys else []
                if data_digest(v) in moved or (apart and moved.issuperset(apart)):
                    self.changed[n] = how
                    left.update(apart)
                else:
                    self.dropped.append(Dropped(n, 0, how))
        self.added += [
            n
            for n, v in after.values.items()
            if n not in before.values and n not in before.tensors and data_digest(v) not in left
        ]

    def add_draft(self, ckpt: Checkpoint, digests: Mapping[str, str], draft: Draft) -> None:
        """Compare a state with the draft that a layout made of it.

        Args:
            ckpt: the state that the layout was given.
            digests: {name of a value: its `value_digest`}, taken before the layout was given the state.
            draft: the plan of the destination's files.

        Raises:
            Differs: an entry is lost, altered or invented, and the draft does not say so.
        """
        layout = draft.checkpoint.layout
        faults: list[str] = []  # entries for which nobody has accounted
        dropped = {d.name for d in draft.dropped}
        there = draft.checkpoint
        sources = _ByteRanges(draft.sources.values())
        for n, t in ckpt.tensors.items():
            if n in dropped:
                continue
            if (entry := there.tensors.get(draft.aliases.get(n, n))) is not None:
                if entry.shape != t.shape:
                    faults.append(f'"{n}" has the shape {list(t.shape)}, and {list(entry.shape)} there')
                elif entry.dtype != t.dtype:
                    self.changed[n] = f"{t.dtype} became {entry.dtype}"
            elif n in there.values or n in draft.aliases:  # a number inside a pickle; the read-back compares its bytes
                continue
            elif sources.hold(t):
                self.changed[n] = f"stored under names of {layout}"
            else:
                faults.append(f'"{n}" is neither stored nor listed as dropped')
        for n in ckpt.values:
            if n in dropped:
                continue
            if n in there.values:
                if value_digest(there.values[n]) != digests[n]:
                    if n in draft.changed:
                        self.changed[n] = draft.changed[n]
                    else:
                        faults.append(f'"{n}" has another value there')
            elif n in draft.changed:
                self.changed[n] = draft.changed[n]
            elif n not in there.tensors:
                faults.append(f'"{n}" is neither stored nor listed as dropped')
        faults += [f'"{n}" is called new, and the source has it' for n in draft.synthesized_values if n in ckpt.values]
        for n in there.values:
            if n in ckpt.values or n in ckpt.tensors or n in draft.synthesized_values:
                continue
            if n in draft.changed:
                self.added.append(n)
            else:
                faults.append(f'"{n}" is not in the source')
        if faults:
            more = f"; and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
            raise Differs(
                f"what {layout} would write is not what the source holds: {'; '.join(faults[:_SHOWN])}{more}. Nothing "
                "was written. This is a fault of the layout: please report it.",
                code="CKPT0503",
            )
        self.added += [*draft.synthesized_tensors, *draft.synthesized_values]

    def close(self, source: Checkpoint, draft: Draft) -> None:
        """Complete the account: add the entries that the draft drops, and set `kept`.

        Args:
            source: the index before any change; its entries that are neither changed nor dropped are kept.
        """
        self.dropped = list({d.name: d for d in (*self.dropped, *draft.dropped)}.values())
        gone = {d.name for d in self.dropped}
        self.changed = {n: how for n, how in self.changed.items() if n not in gone}
        self.kept = [n for n in (*source.tensors, *source.values) if n not in gone and n not in self.changed]

    def list_values_set_in_vain(self) -> list[str]:
        """Return a list of one note on the values that the user set and that are not in the result, with the reason for
        the first of them; [] if there are none. To be called after `close`."""
        reasons = {d.name: d.why for d in self.dropped}
        vain = [n for n in self.set_values if n in reasons]
        if not vain:
            return []
        more = f" and {count_noun(len(vain) - 1, 'other value')}" if len(vain) > 1 else ""
        return [
            f'"{vain[0]}"{more}, which {argument("set_values")} changed, '
            f"{'are' if more else 'is'} not in the result: {reasons[vain[0]]}"
        ]


class _ByteRanges:
    """The byte ranges of files that some tensors consist of, merged."""

    def __init__(self, tensors: Iterable[TensorEntry]) -> None:
        """Take the tensors whose chunks are the byte ranges; these are merged at the first call of `hold`."""
        self._tensors = tensors

    def hold(self, t: TensorEntry) -> bool:
        """Tell whether the ranges contain every byte of the tensor `t`; True for a tensor without bytes."""
        import numpy as np

        files, first, last = _list_chunks([t])
        for file in np.unique(files):
            if int(file) not in self._merged:
                return False
            starts, ends = self._merged[int(file)]
            here = files == file
            k = np.searchsorted(starts, first[here], side="right") - 1
            if (k < 0).any() or (ends[k] < last[here]).any():
                return False
        return True

    @cached_property
    def _merged(self) -> dict[int, tuple[_Numbers, _Numbers]]:
        """Return {number of a file: (starts, ends) of the byte ranges in that file}, sorted by start; ranges that
        overlap or touch are merged."""
        import numpy as np

        merged: dict[int, tuple[_Numbers, _Numbers]] = {}
        files, first, last = _list_chunks(self._tensors)
        for file in np.unique(files):
            here = files == file
            order = np.argsort(first[here], kind="stable")
            starts, ends = first[here][order], np.maximum.accumulate(last[here][order])
            apart = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
            merged[int(file)] = starts[apart], ends[np.append(apart[1:] - 1, len(ends) - 1)]
        return merged


def _list_chunks(tensors: Iterable[TensorEntry]) -> tuple[_Numbers, _Numbers, _Numbers]:
    """List every chunk of these tensors that has bytes, as three arrays of equal length: the number of its file, its
    first byte there, and its end."""
    import numpy as np

    chunks = [t.chunks for t in tensors if t.numel]
    if not chunks:
        return (np.empty(0, "i8"),) * 3
    file, first, length = (
        np.concatenate([np.frombuffer(getattr(c, k), "i8") for c in chunks]) for k in ("file", "offset", "length")
    )
    held = length > 0
    return file[held], first[held], (first + length)[held]


def _is_same_entry(a: TensorEntry, b: TensorEntry | None) -> bool:
    """Tell whether two entries have equal dtypes and shapes and lie in the same bytes; never where `b` is None."""
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = a.chunks, b.chunks
    return x is y or all(getattr(x, k) == getattr(y, k) for k in x.__slots__)


def list_changed_values(before: Mapping[str, Value], after: Mapping[str, Value], how: str) -> dict[str, str]:
    """Return {name: `how`} of the values that differ between two states, or that only one of them has; this is what
    `Draft.changed` holds."""
    return {
        n: how
        for n in {**before, **after}
        if n not in before or n not in after or not equal_values(before[n], after[n])
    }


def list_written_values(draft: Draft, tensors: Container[str] = ()) -> dict[str, Value]:
    """Return the values of the source's state that the destination holds, {name: value}.

    Values that the layout added are left out.

    Args:
        tensors: names to leave out: tensors of one element that the draft has as values.
    """
    gone = {d.name for d in draft.dropped} | draft.synthesized_values.keys()
    return {n: v for n, v in draft.checkpoint.values.items() if n not in gone and n not in tensors}


def find_value_differences(
    found: Checkpoint, of_layout: Container[str], draft: Draft, digests: Mapping[str, str]
) -> list[str]:
    """Compare the values that a reader finds in a destination with those of its draft: types, bits of numbers, keys,
    order.

    Args:
        found: the index of the destination, as it was read back.
        of_layout: names of values that the layout added and that the reader recognised and left out of `found`.
        digests: {tensor: BLAKE3 in hex} of all tensors in `found`; an array inside a value may be a tensor there.

    Returns:
        One sentence for each difference; [] if all values are equal.
    """
    faults: list[str] = []
    expected: set[str] = set()
    written = list_written_values(draft)
    there = split_lists(found.values, written.keys() - found.values.keys()) if draft.dropped else found.values
    known = written.keys() | draft.synthesized_values.keys()
    if nested := {n: v for n, v in there.items() if n not in known and isinstance(v.data, (dict, list))}:
        # a JSON file, whose reader keeps values nested, of a state whose reader splits them
        there = {n: v for n, v in there.items() if n not in nested} | split_into_leaves(nested)
    for n, v in written.items():
        parts = {n: v} if n in there else split_into_leaves({n: v})
        expected.update(parts)  # `|=` of a view of keys copies the set
        for name, part in parts.items():
            if (other := there.get(name)) is not None:
                if not equal_values(part, other):
                    faults.append(f'"{name}" is {short(other.data)} instead of {short(part.data)}')
            elif name not in digests:  # whether it is that tensor, the digests tell
                faults.append(f'"{name}" is missing')
    gone = {d.name for d in draft.dropped}
    for n, v in there.items():
        if n in draft.synthesized_values:
            if not equal_values(v, Value(v.path, draft.synthesized_values[n])):
                faults.append(f'"{n}" is {short(v.data)} instead of {short(draft.synthesized_values[n])}')
        elif n in gone and v.is_optimizer_state:
            continue  # a flat tensor has one step for all of its parameters, also for one whose own was dropped
        elif n not in expected and not _is_left_by_dropped(v, draft.dropped):
            faults.append(f'"{n}" is new')
    faults += [f'"{n}" is missing' for n in draft.synthesized_values if n not in of_layout and n not in there]
    return faults


def _is_left_by_dropped(v: Value, dropped: Iterable[Dropped]) -> bool:
    """Return whether a value is a None in a list in place of an element that was dropped, as a whole or entry by entry.

    The None keeps the positions of the list's other elements.

    Args:
        v: the value; the last part of its path is its position if it is an element of a list.
        dropped: the entries that were dropped.
    """
    name = joined(v.path)
    return v.data is None and type(v.path[-1]) is int and any(f"{d.name}.".startswith(f"{name}.") for d in dropped)
