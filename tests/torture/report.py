"""What came of it: the table, and the JSON from which every failure can be done again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import fuzz

WANTED = {"mutants": 20_000, "faults": 2_000, "kills": 500}


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


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    body = [f"| {r.what} | {r.count:,} | {r.result} |" for r in rows]
    return "\n".join(["| what | count | result |", "|---|---|---|", *body])


def alone(done: list[dict[str, Any]], most: int = 30) -> str:
    """What we accept and the real reader refuses, by kind of reader and its reason."""
    reasons = Counter((r["id"].split(":")[1], r["detail"][:110]) for r in done if r["status"] == fuzz.ALONE)
    return "\n".join(f"{n:5}  {seed}: {why}" for (seed, why), n in reasons.most_common(most))


def failures(done: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that must not be."""
    return [r for r in done if r["status"] in fuzz.FAILURES or r.get("bad")]
