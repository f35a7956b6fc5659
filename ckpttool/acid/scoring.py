"""What a program's answers on a case are worth. The rules are the same for every program.

    golden    right     every tensor that the program says it handles, bit for bit
              wrong     a tensor has other bytes, another dtype or shape, or is of no such name
              lost      state is missing, and nothing was said
              named     state is missing, and the program has named it
              refused   an error
    broken    right     refused; or, where the case allows it, the state as it is stored
              accepted  state was returned, or verify was content
    either    ran code  the canary of a malicious case was made, whatever was answered
              crashed   the process ended without an answer
              hung      it took longer than the limit
              unproven  it refuses a broken one, but also the golden one that this was made of

A program that says it handles a layout, or weights alone, is judged by that, and a fault in what it does not handle is
not counted against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .kit import Case, Expected

__all__ = ["FAILURES", "PARTS", "Row", "doubt_refusals", "judge", "list_functions", "list_parts", "summarise"]

PARTS = ("weights", "optimizer", "values")
#: Verdicts that a program should never get.
FAILURES = frozenset(("wrong", "lost", "accepted", "ran code", "crashed", "hung"))


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

    def add(self, column: str, verdict: str, reason: str = "") -> None:
        """Note a verdict, and why."""
        self.verdicts[column] = verdict
        if reason:
            self.reasons[column] = reason

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
        if answer.get("canary"):
            row.add(function, "ran code", "it executed what the checkpoint says")
        elif answer["status"] in ("crashed", "hung"):
            row.add(function, answer["status"], answer["message"])
        elif function == "list" and not case.golden:
            continue  # names may be listed or not, whatever the numbers are
        elif answer["status"] == "error":
            _judge_refusal(row, function, answer["message"])
        elif case.expect == "refused" or expected is None:
            row.add(function, "accepted", f"it found nothing wrong, though: {case.what}")
        elif function == "verify":
            row.add("verify", "right")
        elif function == "list":
            _judge_names(row, expected, parts, answer["names"])
        else:
            _judge_state(row, function, expected, parts, answer, widens=introduction["widens"])
    if case.golden and expected is not None and "load" in row.verdicts:  # one answer, which is that of each part
        verdict, reason = row.verdicts.pop("load"), row.reasons.pop("load", "")
        for k, part in enumerate(p for p in parts if _list_wanted(expected, p)):
            row.add(part, verdict, "" if k else reason)
    return row


def doubt_refusals(rows: Mapping[str, Row]) -> None:
    """Set the verdict on a broken case to "unproven" where the program refuses the golden one that it was made of, too.

    Args:
        rows: {name of a case: its row}.
    """
    for row in rows.values():
        whole = rows.get(row.case.made_of)
        if whole is not None and set(whole.verdicts[p] for p in PARTS if p in whole.verdicts) == {"refused"}:
            row.verdicts |= {c: "unproven" for c, v in row.verdicts.items() if v == "right"}


def _judge_refusal(row: Row, function: str, message: str) -> None:
    """Note the verdict on an error, with its message: right if the case is broken."""
    if row.case.golden and row.case.expect == "state":
        row.add(function, "refused", message)
    else:
        row.add(function, "right")


def _judge_names(row: Row, expected: Expected, parts: tuple[str, ...], names: list[str]) -> None:
    """Note the verdict on the names that list returned: those of all tensors of the parts that the program handles."""
    wanted = {name for name in expected.tensors if _part_of(name) in parts}
    missing = _list_missing(row.case, wanted, set(names))
    if expected.stored and set(expected.stored) <= set(names):
        missing = set()
    row.add("list", "lost" if missing else "right", _describe(missing))


def _judge_state(
    row: Row, function: str, expected: Expected, parts: tuple[str, ...], answer: Mapping[str, Any], widens: bool
) -> None:
    """Note the verdict on the state that load returned, or that it returned of what save wrote: for each part, or one
    for all of them where the function is save or the case is broken.

    Args:
        widens: whether the program says that it returns tensors as float32, or some of them.
    """
    entries, verdicts = answer["entries"], {}
    reference = expected.stored if expected.stored and set(expected.stored) <= set(entries) else expected.tensors
    wide = expected.widened if widens else {}
    for part in parts:
        if part == "values":
            wanted: Mapping[str, Any] = expected.values if function == "load" else {}  # save is given tensors
            invented: set[str] = set()
        else:
            wanted = {k: t for k, t in reference.items() if _part_of(k) == part}
            invented = {k for k in entries if _part_of(k) == part} - set(wanted)
        if not wanted:
            continue
        other = {k for k in wanted if k in entries and entries[k] not in (wanted[k], wide.get(k))}
        missing = _list_missing(row.case, set(wanted), set(entries))
        if other or invented:
            verdicts[part] = "wrong", _describe(other | invented)
        elif missing:
            verdicts[part] = "named" if missing <= set(answer["left_out"]) else "lost", _describe(missing)
        else:
            verdicts[part] = "right", ""
    if function == "load" and row.case.golden:
        for part, (verdict, reason) in verdicts.items():
            row.add(part, verdict, reason)
        return
    worst = next((v for v in verdicts.values() if v[0] != "right"), ("right", ""))
    row.add(function, *worst)


def _list_wanted(expected: Expected, part: str) -> Mapping[str, Any]:
    """Return what is expected of a part: {name: its digest, or the value}."""
    return expected.values if part == "values" else {k: t for k, t in expected.tensors.items() if _part_of(k) == part}


def _part_of(name: str) -> str:
    """Return the part that a tensor is of, "weights" or "optimizer"; "" if it is of none."""
    return "weights" if name.startswith("model.") else "optimizer" if name.startswith("optim.state.") else ""


def _list_missing(case: Case, wanted: set[str], found: set[str]) -> set[str]:
    """Return the names that are wanted and were not found, but for those that are tied to a found one."""
    tied = {name for names in case.tied if found & set(names) for name in names}
    return wanted - found - tied


def _describe(names: set[str]) -> str:
    """Return a text that names the first of some names and counts the others; "" for none."""
    if not names:
        return ""
    first = min(names)
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def summarise(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Count the verdicts: {"golden" or "broken": {verdict: how many}}, the most frequent first."""
    out = {}
    for kind, golden in (("golden", True), ("broken", False)):
        counted = Counter(v for row in rows if row.case.golden == golden for v in row.verdicts.values())
        out[kind] = dict(counted.most_common())
    return out
