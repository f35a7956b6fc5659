"""report.html: one file that a browser shows without loading anything else.

    render_html(report) -> str

The HTML and the script are files in templates/, which the package contains, and `pages` has what all pages share; here
is what they show. Without its script everything is still visible.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from ...pages.render import include_file, make_environment, mark_as_html, render_page
from ...printable import escape_unprintable
from ..compare.verdict import Report
from ..text import format_number
from ..trace.records import MemoryRecord
from .charts import Figure, draw_figure, replace_nan_by_inf
from .facts import (
    QUANTITIES,
    ComparedStep,
    compute_relative_difference,
    describe_verdict,
    format_bound,
    list_facts,
    list_speed,
    pair_steps_with_reference,
)

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

__all__ = ["render_html"]

#: What a page shows at most; report.json has everything.
_STEPS, _TABLE, _CHECKS, _RANKS, _TENSORS, _NAMES = 400, 200, 2000, 64, 10, 100
#: What the first screen shows of what was not verified; the rest unfolds.
_UNSEEN = 5
#: A longer table of checks gets its own scroll bar.
_TALL = 60

#: The class of each verdict in the style sheet.
_KINDS = {
    "pass": "pass",
    "fail": "fail",
    "gate failed": "fail",
    "not comparable": "aside",
    "no reference": "aside",
    "does not fit": "aside",
}


def render_html(report: Report) -> str:
    """Return the report as one HTML file that refers to no other."""
    every = pair_steps_with_reference(report)
    environment = _make_jinja_environment()
    return render_page(
        environment,
        "report.html.j2",
        script=include_file(environment, "report.js"),
        newline=mark_as_html("\n"),
        title=f"{report.word}: {escape_unprintable(report.candidate.source, 80)} at step {report.candidate.start}",
        command="resume-verify",
        word=report.word,
        report=report,
        kind=_KINDS[report.word],
        kinds=_KINDS,
        sentence=describe_verdict(report),
        facts=list_facts(report),
        tiles=_list_tiles(report, every),
        most_names=_NAMES,
        most_unseen=_UNSEEN,
        tall=_TALL,
        **_make_curves_context(report, every),
        **_make_checks_context(report),
        **_make_worst_context(every),
        **_make_steps_context(every),
        memory=_make_memory_context(report),
        notes=_list_notes(report),
        groups=_list_closing_tables(report),
    )


# ----------------------------------------------------------------------------------------------------------------
# jinja2


@cache
def _make_jinja_environment() -> Environment:
    """Return jinja2's environment with the templates and filters of this folder; it is made once."""
    environment = make_environment("ckpttool.resume.report")
    environment.filters |= {
        "breakable": _format_breakable_name,
        "number": format_number,
        "gib": _format_bytes,
        "plain": _as_text,
        "limit": format_bound,
    }
    return environment


def _format_breakable_name(name: str, word: int) -> Markup:
    """Return a name as HTML that the browser may break after dots; words longer than `word` characters are
    shortened."""
    return mark_as_html(".<wbr>").join(escape_unprintable(name, word).split("."))


def _format_bytes(n: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 / 10 else f"{n / 2**20:.1f} MiB"


def _as_text(x: object) -> str:
    """Return a text as it is, and JSON of anything else, of at most 2000 characters."""
    return x if isinstance(x, str) else json.dumps(x, default=str)[:2000]


# -------------------------------------------------------------------------------------------------------- what is shown


def _list_tiles(report: Report, every: Sequence[ComparedStep]) -> list[tuple[str, str]]:
    """List the large numbers at the top of the page: [(name, value as text)]; `every` has all steps of the run."""
    trace, reference = report.candidate, report.reference
    ranks = "" if trace.world_size is None else str(trace.world_size)
    if ranks and reference is not None and reference.world_size is not None:
        same = reference.world_size == trace.world_size
        ranks = f"{ranks}, as before" if same else f"{reference.world_size} → {ranks}"
    tiles = [("checkpoint at step", f"{trace.start:,}"), ("ranks", ranks), ("steps run", f"{len(every) or 'none'}")]
    for quantity, name in (("loss", "loss differs by"), ("update_norm", "update norm differs by")):
        differences = [r.differences[quantity] for r in every if quantity in r.differences]
        if differences:
            largest = math.nan if any(map(math.isnan, differences)) else max(differences)
            tiles.append((name, "0 (exact)" if largest == 0 else format_number(largest, 2)))
    return tiles + [
        (name, value) for name, value in list_speed(report) if name in ("MFU", "tokens/s", "peak reserved", "load")
    ]


def _make_curves_context(report: Report, every: Sequence[ComparedStep]) -> dict[str, object]:
    """Return the template's variables for the charts; `every` has all steps of the run.

    Returns:
        {"figures": the charts, "curves_note": a text about bounds and steps that are not drawn, "outside": whether any
        drawn step is outside of its bounds}.
    """
    drawn = _thin_out_steps(every, _STEPS)
    figures: list[Figure] = []
    for quantity, name in QUANTITIES.items():
        if any(getattr(r.got, quantity) is not None for r in drawn):
            figures.append(draw_figure(quantity, name, drawn, report.reference is not None))
    source = "calibrated with this very job" if report.calibrated else f"profile {report.profile}"
    note = f"envelope: {source}" if report.envelope else ""
    if len(drawn) < len(every):
        note += f" · {len(every):,} steps, {len(drawn)} drawn"
    return {"figures": figures, "curves_note": note, "outside": any(r.outside for r in drawn)}


def _thin_out_steps(every: Sequence[ComparedStep], most: int) -> list[ComparedStep]:
    """Return at most `most` of the steps `every`: all of them if they are so few, otherwise of each of `most`
    consecutive ranges the step that differs most from the reference."""
    if len(every) <= most:
        return list(every)
    cuts = [len(every) * i // most for i in range(most + 1)]
    return [max(every[a:b], key=_find_largest_difference) for a, b in pairwise(cuts)]


def _find_largest_difference(row: ComparedStep) -> float:
    """Return the largest difference of a step from the reference, for sorting; infinity if the run's loss is not
    finite."""
    values = map(replace_nan_by_inf, row.differences.values())
    return math.inf if not math.isfinite(row.got.loss) else max(values, default=0.0)


def _make_checks_context(report: Report) -> dict[str, object]:
    """Return the template's variables for the table of checks.

    Returns:
        {"checks": those that are listed, "checks_left": number of the others, "counted": a text with the number of
        checks of each verdict, "buttons": [(key, label, number of checks)]}.
    """
    shown = report.checks
    if len(shown) > _CHECKS:
        shown = [c for c in shown if c.verdict != "pass"][:_CHECKS]
    counts = {v: sum(c.verdict == v for c in report.checks) for v in ("fail", "not comparable", "pass")}
    words = {"fail": "failed", "not comparable": "not comparable", "pass": "passed"}
    return {
        "checks": shown,
        "checks_left": len(report.checks) - len(shown),
        "counted": ", ".join(f"{n:,} {words[v]}" for v, n in counts.items() if n),
        "buttons": [
            ("all", "all", len(report.checks)),
            ("fail", "failed only", counts["fail"]),
            ("aside", "not comparable", counts["not comparable"]),
        ],
    }


def _make_worst_context(every: Sequence[ComparedStep]) -> dict[str, object]:
    """Return the template's variables for the tensors whose gradient and update differ most from the reference.

    Args:
        every: all steps of the run; the first one that the reference has, too, is taken.

    Returns:
        {"worst": a table for gradients and one for updates, as far as known, "worst_step": number of the step, or
        None if the reference has no step of the run}.
    """
    first = next((r for r in every if r.expected is not None), None)
    tables: list[dict[str, object]] = []
    for quantity, title in (("grads", "Gradients"), ("updates", "Updates")):
        got, expected = (getattr(x, quantity) if x else {} for x in (first and first.got, first and first.expected))
        differences = {n: d for n in got if (d := compute_relative_difference(got[n], expected.get(n))) is not None}
        if not differences:
            continue
        names = sorted(differences, key=lambda n: -replace_nan_by_inf(differences[n]))[:_TENSORS]
        largest = max((differences[n] for n in names if math.isfinite(differences[n])), default=0.0)
        tables.append(
            {
                "title": title,
                "equal": sum(d == 0 for d in differences.values()),
                "total": len(differences),
                "rows": [
                    {
                        "name": n,
                        "expected": expected[n],
                        "got": got[n],
                        "difference": differences[n],
                        "share": _compute_bar_percent(differences[n], largest),
                    }
                    for n in names
                ],
            }
        )
    return {"worst": tables, "worst_step": first.got.step if first else None}


def _compute_bar_percent(difference: float, largest: float) -> float:
    """Return the length of a bar in percent of that of the largest difference; 100 if the difference is not finite."""
    if not math.isfinite(difference):
        return 100.0
    return 100 * (difference / largest) if difference > 0 else 0.0


def _make_memory_context(report: Report) -> dict[str, object] | None:
    """Return the template's variables for the memory of ranks, in bytes; None if no rank recorded any.

    The keys are "ranks", "all" (number of ranks), "full" (bytes of a full bar) and "device" (bytes of the device).
    """

    def of(memory: MemoryRecord, key: str) -> int:
        value = memory.get(key)
        return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0

    every = [
        {
            "rank": of(m, "rank"),
            "allocated": of(m, "allocated_bytes"),
            "reserved": of(m, "reserved_bytes"),
            "total": of(m, "total_bytes"),
        }
        for m in report.candidate.memory
    ]
    every = [m for m in every if m["reserved"] or m["allocated"]]
    if not every:
        return None
    ranks = every
    if len(every) > _RANKS:
        ranks = sorted(every, key=lambda m: -m["reserved"])[:_RANKS]
        ranks.sort(key=lambda m: m["rank"])
    device = max(m["total"] for m in ranks)
    peak = max(max(m["reserved"], m["allocated"]) for m in ranks)
    full = peak if peak < device / 20 else max(device, peak)  # bars of a pixel would show nothing
    return {"ranks": ranks, "all": len(every), "full": full, "device": device}


def _make_steps_context(every: Sequence[ComparedStep]) -> dict[str, object]:
    """Return the template's variables for the table of steps; `every` has all steps of the run.

    Returns:
        {"steps": [{"step": number, "outside": whether it is outside of its bounds, "cells": [(text, whether this cell
        is outside)]}], "all_steps": number of all steps, "step_columns": titles}.
    """
    compared = any(r.expected is not None for r in every)
    columns = ["step"]
    for name in QUANTITIES.values():
        columns += [name, *(["reference", "difference"] if compared else [])]
    columns += ["lr", *(["batch"] if compared else []), "seconds"]
    table = []
    for r in _thin_out_steps(every, _TABLE):
        cells: list[tuple[str, bool]] = []
        for quantity in QUANTITIES:
            cells.append((format_number(getattr(r.got, quantity), 6), False))
            if compared:
                cells.append((format_number(getattr(r.expected, quantity), 6) if r.expected is not None else "", False))
                difference = r.differences.get(quantity)
                bad = difference is not None and not difference <= r.bounds.get(quantity, math.inf)
                cells.append((format_number(difference, 2) + (" outside" if bad else ""), bad))
        rates = sorted({format_number(v) for v in (r.got.learning_rates or [])})
        cells.append((", ".join(rates[:3]) + (" .." if len(rates) > 3 else ""), False))
        if compared:
            cells.append(({None: "", True: "same", False: "differs"}[r.batch], r.batch is False))
        cells.append((format_number(r.got.seconds), False))
        table.append({"step": r.got.step, "outside": r.outside, "cells": cells})
    return {"steps": table, "all_steps": len(every), "step_columns": columns}


def _list_notes(report: Report) -> list[tuple[str, str]]:
    """List the notes of both runs: [("this run" or "reference", note)], at most 200."""
    notes = [("this run", n) for n in report.candidate.notes]
    notes += [("reference", n) for n in (report.reference.notes if report.reference is not None else [])]
    return notes[:200]


def _list_closing_tables(report: Report) -> list[tuple[str, list[tuple[str, object]]]]:
    """List the tables at the end of the page: [(title, [(name, value)])]."""
    groups: list[tuple[str, dict[str, object]]] = [
        ("Where it was started", {**({"judged": report.time} if report.time else {}), **report.versions}),
        ("Environment of the run", dict(report.candidate.environment)),
        ("Environment of the reference", dict(report.reference.environment) if report.reference is not None else {}),
        ("Speed and memory", dict(list_speed(report))),
    ]
    return [(title, list(values.items())[:100]) for title, values in groups if values]
