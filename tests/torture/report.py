"""What came of it: the table, and the JSON from which every failure can be done again."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import fuzz

WANTED = {"mutants": 20_000, "faults": 2_000, "kills": 500, "conserved": 10_000}


#: Why a real reader refuses what we accept, as it says itself: what it wants beyond the numbers, or cannot hold.
ALLOWED = {
    r"Weights only load failed|WeightsUnpickler|with weights_only": "a class that torch.load(weights_only=True) does not know: carried as data, never built",
    r"has no attribute|not subscriptable|not iterable|unsupported operand|cannot be interpreted|must be": "DeepSpeed's script wants another "
    "type at a place that is no tensor of the state: kept as a value, or not needed",
    r"KeyError: 'shared_params'": "DeepSpeed before 0.9 wrote no shared_params: accepted where nothing in the file could be tied",
    r"No such file|is a directory": "a file that the script wants and the state does not need",
    r"Stopped": "its reader is slow, and was stopped",
    r"is a FIFO": "a FIFO in the place of a file beside the state, which is listed as not read",
}


class Row(NamedTuple):
    """A line of the table; `bad` says whether its count must be 0."""

    what: str
    count: int
    result: str = ""
    bad: bool = False


def lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of JSONL files."""
    return [json.loads(line) for path in sorted(paths) for line in path.read_text().splitlines()]


def of_mutants(done: list[dict[str, Any]]) -> list[Row]:
    """Rows of the fuzzer."""
    status = Counter(r["status"] for r in done)
    seeds = {r["id"].split(":")[1] for r in done}
    converted = Counter(r["converted"] for r in done if "converted" in r)
    out = [Row("structure-aware mutants, with an oracle", len(done), f"{len(seeds)} seeds")]
    out += [Row(f"- {s}", status[s]) for s in (fuzz.REFUSED, fuzz.EQUAL, fuzz.OTHER, fuzz.ALONE, fuzz.UNJUDGED)]
    out.append(
        Row(
            "- of these converted, and read back by the real reader",
            sum(converted.values()),
            ", ".join(sorted(converted)),
        )
    )
    out.append(
        Row(
            "- refused, though the real reader reads it (of a sample)", sum(r.get("oracle") == "reads it" for r in done)
        )
    )
    out += [Row(f"- {s}", status[s], bad=True) for s in fuzz.FAILURES]
    return out


def of_others(done: list[dict[str, Any]]) -> list[Row]:
    """Rows of faults, kills and races."""
    of: dict[str, list[dict[str, Any]]] = {
        k: [r for r in done if r["id"].startswith(k)]
        for k in ("fault", "kill", "race", "conserved", "holds", "planted", "servers", "terminal")
    }
    codes = Counter(r["code"] for r in of["fault"])
    killed = [r for r in of["kill"] if r["killed"]]
    out = [
        Row("system calls that failed, each with a rerun", len(of["fault"]), "exit " + ", ".join(f"{c}: {n}" for c, n in sorted(codes.items()))),
        Row("- bad: half-written, hang, traceback, a message that is not so, a rerun that fails", sum(r["bad"] for r in of["fault"]), bad=True),
        Row("conversions killed, each with a rerun", len(killed), f"{len(of['kill']) - len(killed)} more ended before the kill"),
        Row("- bad: half-written, a rerun that fails, something left behind", sum(r["bad"] for r in of["kill"]), bad=True),
        Row("generated states through two layouts, every entry accounted for", len(of["conserved"]),
            f"{sum(r['status'] == 'refused' for r in of['conserved'])} refused"),
        Row("- bad: an entry lost, altered or in no list", sum(r["bad"] for r in of["conserved"]), bad=True),
        Row("exports, holds, releases and deletions by four processes at one store", sum(r["operations"] for r in of["holds"]), f"{len(of['holds'])} stores"),
        Row("- bad: stores where a held archive is gone or another, or a line is not so", sum(r["bad"] for r in of["holds"]), bad=True),
        Row("commands beside planted modules", len(of["planted"]), f"{len({r['id'].split(':')[1] for r in of['planted']})} commands"),
        Row("- bad: a planted module ran, or the command failed", sum(r["bad"] for r in of["planted"]), bad=True),
        Row("lies of servers (web, S3, GCS, Hub)", len(of["servers"]), f"at most {max((r['seconds'] for r in of['servers']), default=0):.0f} s, "
            f"{max((r['mib'] for r in of['servers']), default=0)} MiB"),
        Row("- bad: believed, half-written, too late, too much memory, a credential elsewhere", sum(r["bad"] for r in of["servers"]), bad=True),
        Row("checkpoints with names that control a terminal, several commands on each", len(of["terminal"]), f"{sum(r['commands'] for r in of['terminal'])} commands"),
        Row("- bad: a character that does not print, a line that a name has made, JSON with other names", sum(r["bad"] for r in of["terminal"]), bad=True),
    ]  # fmt: skip
    for name in dict.fromkeys(r["said"] for r in of["race"]):
        mine = [r for r in of["race"] if r["said"] == name]
        skipped = {r["status"] for r in mine if r["status"].startswith("skipped")}
        out.append(Row(f"races: {name}", len(mine), "; ".join(skipped) or f"bad: {sum(r['bad'] for r in mine)}"))
    return out


def short_of(mutants: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """What there is less of than half an hour should have."""
    have = {
        "mutants": len(mutants), "faults": sum(r["id"].startswith("fault") for r in others),
        "kills": sum(r["id"].startswith("kill") and r["killed"] for r in others),
        "conserved": sum(r["id"].startswith("conserved") for r in others),
    }  # fmt: skip
    return ", ".join(f"{have[k]:,} {k} of {n:,}" for k, n in WANTED.items() if have[k] < n)


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    body = [f"| {r.what} | {r.count:,} | {r.result} |" for r in rows]
    return "\n".join(["| what | count | result |", "|---|---|---|", *body])


def reason(r: dict[str, Any]) -> str | None:
    """Why its reader refuses what was accepted; None where the table has no such reason."""
    return next((why for said, why in ALLOWED.items() if re.search(said, r["detail"])), None)


def alone(done: list[dict[str, Any]], most: int = 30) -> str:
    """What we accept and the real reader refuses, by reason; what has none, one by one."""
    mine = [r for r in done if r["status"] == fuzz.ALONE]
    known = Counter(reason(r) for r in mine)
    out = [f"{n:5}  {why}" for why, n in known.most_common() if why]
    out += [f"    1  {r['id']}: {r['said'][:100]}: {r['detail'][:150]}" for r in mine if reason(r) is None][:most]
    return "\n".join(out)


def failures(done: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that must not be."""
    return [
        r
        for r in done
        if r["status"] in fuzz.FAILURES or r.get("bad") or (r["status"] == fuzz.ALONE and reason(r) is None)
    ]
