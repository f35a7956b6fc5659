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

__all__ = ["FAILURES", "PARTS", "Row", "doubt_refusals", "judge", "list_functions", "list_parts"]

PARTS = ("weights", "optimizer", "values")
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
        """Note one verdict in columns, and with the first of them the reason, if there is one."""
        self.verdicts |= dict.fromkeys(columns, verdict)
        if reason:
            self.reasons |= dict.fromkeys(columns[:1], reason)

    def to_json(self) -> dict[str, Any]:
        """Return it as --json prints it."""
        return {
            "case": self.case.name,
            "kind": "golden" if self.case.golden else "broken",
            "layout": self.case.layout,
            "fault": self.case.fault or None,
            "verdicts": self.verdicts,
            "reasons": self.reasons,
        }


def list_parts(case: Case, claims: Mapping[str, Iterable[str]] | None) -> tuple[str, ...]:
    """Return which parts of a case a program says it handles: () where the layout, or what is broken, is none of them.

    Args:
        claims: {layout: parts}, as the program says; None: everything.
    """
    said = PARTS if claims is None else tuple(claims.get(case.layout, ()))
    parts = tuple(p for p in PARTS if p in said and (p == "values" or p in case.parts))
    return parts if case.golden or set(parts) & set(case.touches) else ()


def list_functions(case: Case, introduction: Mapping[str, Any]) -> list[str]:
    """Return which functions of a program are called on a case: those that it has, and save for layouts it writes."""
    there = [f for f in ("load", "list", "verify") if f in introduction["functions"]]
    saves = "save" in introduction["functions"] and "load" in there and case.golden and case.expect == "state"
    return [*there, "save"] if saves and case.layout in introduction["saves"] else there


def judge(
    case: Case,
    expected: Expected | None,
    introduction: Mapping[str, Any],
    answers: Mapping[str, Mapping[str, Any]],
) -> Row:
    """Judge a program's answers on a case.

    Args:
        expected: its state; None if it has to be refused.
        introduction: what the program says of itself (child.py).
        answers: {function: its answer}.
    """
    row = Row(case)
    parts = list_parts(case, introduction["claims"])
    for function, answer in answers.items():
        columns = [function]
        if function == "load" and case.golden and expected is not None:  # one answer, and a verdict on each part
            columns = [p for p in parts if _list_wanted(expected, p)]
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


def doubt_refusals(rows: Mapping[str, Row]) -> None:
    """Set the verdict of load or verify on a broken case to "unproven" where it was right and the same function did not
    read the golden case that the broken one was made of, either.

    Args:
        rows: {name of a case: its row}.
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
    """Note the verdict on the names that list returned: those of all tensors of the parts that the program handles."""
    wanted = {name for part in parts if part != "values" for name in _list_wanted(expected, part, names)}
    missing = _list_missing(row.case, wanted, names)
    row.add(["list"], *(("lost", f"missing: {list_first(sorted(missing), 1)}") if missing else ("right",)))


def _judge_state(
    row: Row, function: str, expected: Expected, parts: tuple[str, ...], answer: Mapping[str, Any], widens: bool
) -> None:
    """Note the verdict on the state that load returned, or that it returned of what save wrote: for each part, or one
    for all of them where the function is save or the case is broken.

    Args:
        widens: whether the program says that it returns tensors as float32, or some of them.
    """
    entries, verdicts = answer["entries"], {}
    wide = expected.widened if widens else {}
    strange = min((k for k, v in entries.items() if isinstance(v, list) and not _part_of(k)), default="")
    for part in parts:
        wanted = _list_wanted(expected, part, entries)
        if not wanted or (function == "save" and part == "values"):  # save is given tensors
            continue
        invented = {k for k in entries if _part_of(k) == part} - wanted.keys()
        other = {k for k, t in wanted.items() if k in entries and entries[k] not in (t, wide.get(k, t))}
        missing = _list_missing(row.case, wanted, entries)
        if other:
            how = _tell_apart(entries[min(other)], wanted[min(other)])
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


def _list_wanted(expected: Expected, part: str, found: Collection[str] = ()) -> Mapping[str, Any]:
    """Return what is expected of a part: {name: its digest, or the value}.

    Args:
        found: the names that a program gave. If there are names of the files, and all of these are among them, tensors
            are expected under these, and else under those in memory.
    """
    if part == "values":
        return expected.values
    stored = expected.stored if expected.stored.keys() <= set(found) else {}
    return {k: t for k, t in (stored or expected.tensors).items() if _part_of(k) == part}


def _part_of(name: str) -> str:
    """Return the part that a tensor is of, "weights" or "optimizer"; "" if it is of none."""
    return "weights" if name.startswith("model.") else "optimizer" if name.startswith("optim.state.") else ""


def _list_missing(case: Case, wanted: Collection[str], found: Collection[str]) -> set[str]:
    """Return the names that are wanted and were not found, but for those that are tied to a found one."""
    tied = {name for names in case.tied if set(names) & set(found) for name in names}
    return set(wanted) - set(found) - tied


def _tell_apart(found: Any, wanted: Any) -> str:
    """Return in what a digest or value that was found is not the one that is wanted."""
    if isinstance(found, list) and isinstance(wanted, list) and found[:2] == wanted[:2]:
        return "other elements"
    texts = [f"{t[0]} {t[1]}" if isinstance(t, list) else str(t) for t in (found, wanted)]
    return f"{texts[0]}, not {texts[1]}"
