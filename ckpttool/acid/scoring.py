"""What a program's answers on a case are worth. docs/explanation/acid-test.md says what each verdict means.

The rules are the same for every program. One that says it handles a layout, or weights alone, is judged by that, and a
fault in what it does not handle is not counted against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..printable import list_first
from .kit import Case, Expected

__all__ = [
    "FAILURES",
    "PARTS",
    "Answer",
    "Row",
    "judge_answers",
    "list_called_functions",
    "list_handled_parts",
    "mark_unproven_refusals",
]

PARTS = ("weights", "optimizer", "values")
#: What a program says: an object of JSON, whose entries may be missing or of any type.
Answer = Mapping[str, Any]
#: Verdicts that a program should never get.
FAILURES = frozenset(("wrong", "lost", "accepted", "ran code", "crashed", "hung"))
#: Verdicts on a whole checkpoint that was not read, so that a refusal of a broken one made of it proves nothing.
_NOT_READ = frozenset(("refused", "crashed", "hung"))


@dataclass
class Row:
    """The verdicts on one case.

    Attributes:
        case: the case.
        verdicts: {column: verdict}: of the golden ones "weights", "optimizer", "values", "list", "verify" and "save";
            of the broken ones "load" and "verify", and "list" where that executed, crashed or hung.
        reasons: {column: why it is not right}.
    """

    case: Case
    verdicts: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, columns: Sequence[str], verdict: str, reason: str = "") -> None:
        """Set the verdict of columns.

        Args:
            columns: the columns that get the verdict.
            verdict: such as "right", "refused" or "crashed".
            reason: why it is not "right", kept for the first column; "": none.
        """
        self.verdicts |= dict.fromkeys(columns, verdict)
        if reason:
            self.reasons |= dict.fromkeys(columns[:1], reason)

    def to_json(self) -> dict[str, object]:
        """Return the row as plain data, as --json prints it: "case" (its name), "kind" ("golden" or "broken"),
        "layout", "fault" (None for a golden case), "verdicts" and "reasons"."""
        return {
            "case": self.case.name,
            "kind": "golden" if self.case.golden else "broken",
            "layout": self.case.layout,
            "fault": self.case.fault or None,
            "verdicts": self.verdicts,
            "reasons": self.reasons,
        }


def list_handled_parts(case: Case, claims: Mapping[str, Iterable[str]] | None) -> tuple[str, ...]:
    """Return the parts of a case ("weights", "optimizer", "values") that a program claims to handle.

    () if it does not handle the layout, or none of the parts that contain the fault of a broken case.

    Args:
        claims: {layout: parts} that the program declares; None: it handles everything.
    """
    said = PARTS if claims is None else tuple(claims.get(case.layout, ()))
    parts = tuple(p for p in PARTS if p in said and (p == "values" or p in case.parts))
    return parts if case.golden or set(parts) & set(case.touches) else ()


def list_called_functions(case: Case, introduction: Answer) -> list[str]:
    """Return the names of the program's functions that are called on a case.

    These are load, list and verify, as far as the program has them. Save is added for a golden case that has to be
    loaded, if the program has both save and load, and writes the layout.

    Args:
        introduction: the first answer of the program's process (child.py).
    """
    there = [f for f in ("load", "list", "verify") if f in introduction["functions"]]
    saves = "save" in introduction["functions"] and "load" in there and case.golden and case.expect == "state"
    return [*there, "save"] if saves and case.layout in introduction["saves"] else there


def judge_answers(
    case: Case,
    expected: Expected | None,
    introduction: Answer,
    answers: Mapping[str, Answer],
) -> Row:
    """Judge a program's answers on a case.

    Args:
        expected: the state of the case; None if the case has to be refused.
        introduction: the first answer of the program's process (child.py).
        answers: {function: its answer}.

    Returns:
        The verdicts.
    """
    row = Row(case)
    parts = list_handled_parts(case, introduction["claims"])
    for function, answer in answers.items():
        columns = [function]
        if function == "load" and case.golden and expected is not None:  # one answer, and a verdict on each part
            columns = [p for p in parts if _get_expected_entries(expected, p)]
        if answer.get("canary"):
            row.add(columns, "ran code", "it executed what the checkpoint says")
        elif answer["status"] in ("crashed", "hung"):
            row.add(columns, answer["status"], answer["message"])
        elif function == "list" and not case.golden:
            continue  # names may be listed or not, whatever the numbers are
        elif answer["status"] == "error" and case.golden and case.expect == "state":
            row.add(columns, "refused", answer["message"])
        elif answer["status"] == "error" or (function == "verify" and expected is not None):
            row.add(columns, "right")
        elif expected is None:
            row.add(columns, "accepted", f"it found nothing wrong, though: {case.what}")
        elif function == "list":
            _judge_names(row, expected, parts, answer["names"])
        else:
            _judge_state(row, function, expected, parts, answer, introduction["widens"])
    return row


def mark_unproven_refusals(rows: Mapping[str, Row]) -> None:
    """Change the verdict "right" on a broken case to "unproven" if the program does not read the golden case, either.

    That is the case of which the broken one was made; a refusal of the broken one then proves nothing.

    Args:
        rows: {name of a case: its row}, which are changed.
    """
    for row in rows.values():
        if (whole := rows.get(row.case.made_of)) is None:
            continue
        for column in [c for c, verdict in row.verdicts.items() if verdict == "right"]:
            of_whole = PARTS if column == "load" else (column,)
            if unread := next((c for c in of_whole if whole.verdicts.get(c) in _NOT_READ), None):
                why = f"{whole.verdicts[unread]}, {whole.reasons[unread]}"
                row.add([column], "unproven", f"{whole.case.name}, the whole one that it was made of: {why}")


def _judge_names(row: Row, expected: Expected, parts: tuple[str, ...], names: list[str]) -> None:
    """Set the verdict of `list`: "right" if it returned the names of all tensors of the handled parts, otherwise
    "lost".

    Args:
        row: the row of the case, which is changed.
        parts: the parts that the program claims to handle.
        names: what `list` returned.
    """
    wanted = {name for part in parts if part != "values" for name in _get_expected_entries(expected, part, names)}
    missing = _list_missing_names(row.case, wanted, names)
    row.add(["list"], *(("lost", f"missing: {list_first(sorted(missing), 1)}") if missing else ("right",)))


def _judge_state(
    row: Row, function: str, expected: Expected, parts: tuple[str, ...], answer: Answer, widens: bool
) -> None:
    """Set the verdicts on a state that was loaded: one for each part or, for `save` or a broken case, one for all
    parts.

    Args:
        row: the row of the case, which is changed.
        function: "load", or "save" if the state was saved by the program before it was loaded.
        parts: the parts that the program claims to handle.
        answer: the program's answer, with "entries" and "left_out".
        widens: whether the program declares that it returns some or all tensors as float32.
    """
    entries, verdicts = answer["entries"], {}
    wide = expected.widened if widens else {}
    strange = min((k for k, v in entries.items() if isinstance(v, list) and not _get_part_of_tensor(k)), default="")
    for part in parts:
        wanted = _get_expected_entries(expected, part, entries)
        if not wanted or (function == "save" and part == "values"):  # save is given tensors
            continue
        invented = {k for k in entries if _get_part_of_tensor(k) == part} - wanted.keys()
        other = {k for k, t in wanted.items() if k in entries and entries[k] not in (t, wide.get(k, t))}
        missing = _list_missing_names(row.case, wanted, entries)
        if other:
            how = _describe_difference(entries[min(other)], wanted[min(other)])
            verdicts[part] = "wrong", f"{list_first(sorted(other), 1)}: {how}"
        elif invented:
            verdicts[part] = "wrong", f"not in the checkpoint: {list_first(sorted(invented), 1)}"
        elif missing:
            why = f"missing: {list_first(sorted(missing), 1)}" + (f"; it gave {strange}, of no part" if strange else "")
            verdicts[part] = "named" if missing <= set(answer["left_out"]) else "lost", why
        else:
            verdicts[part] = "right", ""
    if function == "load" and row.case.golden:
        for part, (verdict, reason) in verdicts.items():
            row.add([part], verdict, reason)
    else:
        row.add([function], *next((v for v in verdicts.values() if v[0] != "right"), ("right", "")))


def _get_expected_entries(expected: Expected, part: str, found: Collection[str] = ()) -> Mapping[str, object]:
    """Return {name: its digest or value} of the entries of a part that are expected.

    Args:
        found: the names that the program returned. Names as they are in the files are expected if there are some and
            `found` has all of them, otherwise the names of the state in memory.
    """
    if part == "values":
        return expected.values
    stored = expected.stored if expected.stored.keys() <= set(found) else {}
    return {k: t for k, t in (stored or expected.tensors).items() if _get_part_of_tensor(k) == part}


def _get_part_of_tensor(name: str) -> str:
    """Return the part to which a tensor belongs by its name, "weights" or "optimizer"; "" if it belongs to neither."""
    return "weights" if name.startswith("model.") else "optimizer" if name.startswith("optim.state.") else ""


def _list_missing_names(case: Case, wanted: Collection[str], found: Collection[str]) -> set[str]:
    """Return the expected names that a program did not return, except those that are tied to a name that it returned.

    Args:
        wanted: the expected names.
        found: the names that the program returned.
    """
    tied = {name for names in case.tied if set(names) & set(found) for name in names}
    return set(wanted) - set(found) - tied


def _describe_difference(found: object, wanted: object) -> str:
    """Return, as text for a reason, how an entry differs from the expected one.

    Args:
        found, wanted: the entry that the program returned, and the expected one: [dtype, shape, SHA-256] of a tensor,
            or a plain value.
    """
    if isinstance(found, list) and isinstance(wanted, list) and found[:2] == wanted[:2]:
        return "other elements"
    texts = [f"{t[0]} {t[1]}" if isinstance(t, list) else str(t) for t in (found, wanted)]
    return f"{texts[0]}, not {texts[1]}"
