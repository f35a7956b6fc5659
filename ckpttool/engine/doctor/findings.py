"""`Finding`: one thing that is wrong with a checkpoint, and `KINDS`: the table of what kinds of findings there are.

A kind is defined where it is found, with `define_kind`, which adds it to the table. docs/_hooks.py prints the table in
docs/how-to/doctor.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, NewType

__all__ = ["DAMAGE", "KINDS", "MISMATCH", "NOTE", "Finding", "FindingKind", "Severity", "define_kind", "ordered_kinds"]

Severity = Literal["damage", "mismatch", "note"]
DAMAGE: Final = "damage"
MISMATCH: Final = "mismatch"
NOTE: Final = "note"

#: The name of a kind. Only `define_kind` makes one, so mypy refuses a plain string.
FindingKind = NewType("FindingKind", str)

Section = Literal["what-is-recognised", "what-is-whole-and-yet-does-not-load", "rows-of-the-vocabulary"]


class KindInfo(NamedTuple):
    """What the table says of a kind.

    `order`    kinds and the checks that report them come by this number, and then as they are defined
    `meaning`  a sentence for the docs, without a full stop
    `section`  the anchor in docs/how-to/doctor.md of the text that says more
    """

    order: int
    meaning: str
    section: Section


#: {kind: what is known of it}, as they were defined.
KINDS: dict[FindingKind, KindInfo] = {}


def define_kind(name: str, order: int, meaning: str, section: Section) -> FindingKind:
    """Add a kind of finding to the table `KINDS`, and return it.

    Args:
        name: one word, which findings show.
        order: the place of the kind, and of the checks that report it.
        meaning: a sentence for the docs, without a full stop.
        section: the anchor in docs/how-to/doctor.md of the text that says more.

    Raises:
        ValueError: another kind has this name.
    """
    kind = FindingKind(name)
    if kind in KINDS:
        raise ValueError(f'the kind of finding "{name}" is defined twice')
    KINDS[kind] = KindInfo(order, meaning, section)
    return kind


def ordered_kinds() -> list[FindingKind]:
    """List all kinds in the order of the table."""
    return sorted(KINDS, key=lambda kind: KINDS[kind].order)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint, or worth knowing.

    `kind`      one word of the table `KINDS`: "cut", "empty", "missing", "lfs-pointer", ...
    `severity`  "damage"; "mismatch" with the checkpoint that `--like` names; or "note" of what is neither
    `file`      relative to the checkpoint; None if it is about no single file
    `tensors`   their names, if it is about some
    `text`      what was found, and what it means
    `repair`    the command to type next; None if none helps
    """

    kind: FindingKind
    severity: Severity
    file: str | None
    tensors: tuple[str, ...]
    text: str
    repair: str | None = None
