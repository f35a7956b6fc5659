"""report.html: one file that needs nothing else, for a browser.

    page(report) -> str

Charts are SVG made here, coloured by the style sheet, so that light, dark and print share them. The script shows what
lies under the pointer and filters the table of checks; without it everything is still there. Names come from
checkpoints that others made: every text goes through `_h`, and the policy of the page lets it load nothing.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .contents import QUANTITIES, Row, facts, limit, relative, rows, sentence, speed
from .verdict import Check, Report
from .words import clean, number

__all__ = ["page"]

#: What a page shows at most; report.json has all of it.
_STEPS, _TABLE, _CHECKS, _RANKS, _TENSORS, _NAMES = 400, 200, 2000, 64, 10, 100
#: A longer table of checks scrolls in itself.
_TALL = 60

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_CLASS = {
    "pass": "pass", "fail": "fail", "gate failed": "fail", "not comparable": "aside", "no reference": "aside",
}  # fmt: skip
#: Shapes, so that nothing is said by colour alone: a check mark, a cross, a dash.
_MARK = {
    "pass": '<path d="M4 10.5l4 4 8-9"/>',
    "fail": '<path d="M5 5l10 10M15 5L5 15"/>',
    "aside": '<path d="M4 10h12"/>',
}


def page(report: Report) -> str:
    """The report as one HTML file without anything from elsewhere."""
    every = rows(report)
    title = f"{report.word}: {clean(report.candidate.source, 80)} at step {report.candidate.start}"
    parts = [
        _verdict(report, every),
        _causes(report),
        _compared(report),
        _curves(report, every),
        _checks(report),
        _worst(every),
        _memory(report),
        _steps(every),
        _environment(report),
    ]
    body = "\n".join(p for p in parts if p)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{_h(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f'<main>\n{body}\n</main>\n<div id="tip" hidden></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


def _h(text: object, word: int = 160) -> str:
    return html.escape(clean(text, word))


def _name(text: object, word: int = 100) -> str:
    """A name, which may be broken behind its dots."""
    return _h(text, word).replace(".", ".<wbr>")


def _mark(kind: str) -> str:
    return f'<svg class="mark" viewBox="0 0 20 20" aria-hidden="true">{_MARK[kind]}</svg>'


def _section(name: str, title: str, inner: str, aside: str = "") -> str:
    tail = f'<span class="aside-text">{aside}</span>' if aside else ""
    return f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{title}{tail}</h2>\n{inner}</section>'


# -------------------------------------------------------------------------------------------------------------- the top


def _verdict(report: Report, every: Sequence[Row]) -> str:
    kind = _CLASS[report.word]
    trace, reference = report.candidate, report.reference
    ranks = "" if trace.world_size is None else str(trace.world_size)
    if ranks and reference is not None and reference.world_size is not None:
        ranks = (
            f"{reference.world_size} → {ranks}" if reference.world_size != trace.world_size else f"{ranks}, as before"
        )
    steps = [r.got.step for r in every]
    tiles = [("checkpoint at step", f"{trace.start:,}"), ("ranks", ranks)]
    tiles.append(("steps run", f"{len(steps)}" if steps else "none"))
    for q, what in (("loss", "loss differs by"), ("update_norm", "update norm differs by")):
        apart = [r.differences[q] for r in every if q in r.differences]
        if apart:
            worst = math.nan if any(math.isnan(x) for x in apart) else max(apart)
            tiles.append((what, "0 (exact)" if worst == 0 else number(worst, 2)))
    tiles += [(what, value) for what, value in speed(report) if what in ("MFU", "tokens/s", "peak reserved", "load")]
    source = f'<p class="source"><code>{_h(trace.source)}</code></p>' if trace.source else ""
    shown = "".join(f"<div><dt>{_h(k)}</dt><dd>{_h(v)}</dd></div>" for k, v in tiles if v)
    return (
        f'<header class="{kind}"><p class="what">ckpttool resume-verify</p>'
        f'<h1 id="verdict">{_mark(kind)}<span>{_h(report.word)}</span></h1>'
        f'<p class="sentence">{_h(sentence(report))}</p>{source}'
        f'<dl class="tiles">{shown}</dl></header>'
    )


def _causes(report: Report) -> str:
    if not report.causes or not report.exit_code:
        return ""
    items = []
    for i, cause in enumerate(report.causes):
        inner = f'<h3><span class="rank">{"Likely cause" if not i else "Or"}</span> {_h(cause.text)}</h3>'
        inner += f'<p class="kind"><code>{_h(cause.kind)}</code></p>'
        if cause.evidence:
            inner += "<ul>" + "".join(f"<li>{_h(line)}</li>" for line in cause.evidence[:20]) + "</ul>"
        if cause.tensors:
            names = [f"<li><code>{_h(n)}</code></li>" for n in cause.tensors[:_NAMES]]
            more = len(cause.tensors) - _NAMES
            names += [f"<li>and {more:,} more</li>"] if more > 0 else []
            word = "tensor" if len(cause.tensors) == 1 else "tensors"
            inner += f'<p class="label">{len(cause.tensors):,} {word} concerned</p>'
            inner += f'<ul class="names">{"".join(names[:3])}</ul>'
            if names[3:]:
                rest = f'<ul class="names">{"".join(names[3:])}</ul>'
                inner += f"<details><summary>{len(cause.tensors) - 3:,} more</summary>{rest}</details>"
        if cause.place:
            inner += f'<p class="label">Where its bytes lie</p><p><code>{_h(cause.place)}</code></p>'
        items.append(f'<div class="cause{"" if i else " first"}">{inner}</div>')
    return _section("causes", "What is likely wrong", "".join(items))


def _compared(report: Report) -> str:
    with_reference = report.reference is not None
    head = '<th scope="col"><span class="hide">what</span></th><th scope="col">this run</th>'
    head += '<th scope="col">reference</th>' if with_reference else ""
    body = []
    for what, ours, theirs in facts(report):
        apart = with_reference and theirs and theirs != ours and what != "source"
        cells = f'<th scope="row">{_h(what)}</th><td class="wrap">{_h(ours)}</td>'
        if with_reference:
            cells += f'<td class="wrap">{_h(theirs)}{" <em>differs</em>" if apart else ""}</td>'
        body.append(f"<tr>{cells}</tr>")
    table = f'<div class="scroll"><table class="facts"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    if not with_reference:
        table += (
            '<p class="hint">No reference was given: curves below are of this run alone. Give one with '
            "<code>--reference</code> to have them judged.</p>"
        )
    return _section("compared", "What was compared" if with_reference else "What was run", table)


# --------------------------------------------------------------------------------------------------------------- curves

#: The view box of a chart, and where its panels lie in it.
_W, _H = 460, 400
_LEFT, _RIGHT = 58, 450
_TOP, _MIDDLE, _LOWER, _BOTTOM = 30, 192, 244, 356


@dataclass
class _Axis:
    """Numbers to places. `ticks` are (number, text)."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def _curves(report: Report, every: Sequence[Row]) -> str:
    shown = _thinned(every, _STEPS)
    if not shown:
        return _section("curves", "Steps", '<p class="hint">No step was run.</p>')
    figures = []
    for q, name in QUANTITIES.items():
        if any(getattr(r.got, q) is not None for r in shown):
            figures.append(_figure(q, name, shown, report.reference is not None))
    legend = '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="run" d="M1 6h32"/><circle class="run" cx="17" cy="6" r="3.2"/></svg>this run</span>'
    if report.reference is not None:
        legend += '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="ref" d="M1 6h32"/><rect class="ref" x="13.5" y="2.5" width="7" height="7"/></svg>reference</span>'
        legend += '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="apart" d="M1 6h32"/><circle class="apart" cx="17" cy="6" r="3.2"/></svg>difference</span>'
        legend += '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><circle class="zero" cx="17" cy="6" r="3.2"/></svg>equal bit for bit</span>'
        if report.envelope:
            legend += '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><rect class="band" y="0" width="34" height="12"/><path class="bound" d="M0 1h34"/></svg>envelope: what may pass</span>'
        if any(r.outside for r in shown):
            legend += '<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="out" d="M13 2l8 8M21 2l-8 8"/></svg>outside, or no number</span>'
    where = "calibrated with this very job" if report.calibrated else f"profile {_h(report.profile)}"
    note = f" · {len(every):,} steps, {len(shown)} drawn" if len(shown) < len(every) else ""
    inner = f'<p class="legend">{legend}</p><div class="figures">{"".join(figures)}</div>'
    return _section("curves", "Step by step", inner, (f"envelope: {where}" if report.envelope else "") + note)


def _thinned(every: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows, evenly taken, with the one that lies farthest apart of each stretch."""
    if len(every) <= most:
        return list(every)
    cuts = [len(every) * i // most for i in range(most + 1)]
    return [max(every[a:b], key=_badness) for a, b in pairwise(cuts)]


def _badness(row: Row) -> float:
    values = [math.inf if math.isnan(d) else d for d in row.differences.values()]
    return math.inf if not math.isfinite(row.got.loss) else max(values, default=0.0)


def _figure(q: str, name: str, shown: Sequence[Row], with_reference: bool) -> str:
    from functools import partial

    steps = [r.got.step for r in shown]
    lo, hi = min(steps), max(steps)

    def x(step: float) -> float:
        return (_LEFT + _RIGHT) / 2 if lo == hi else _LEFT + 8 + (step - lo) / (hi - lo) * (_RIGHT - _LEFT - 16)

    got: list[float | None] = [getattr(r.got, q) for r in shown]
    expected: list[float | None] = [getattr(r.expected, q) if r.expected is not None else None for r in shown]
    apart = [r.differences.get(q) for r in shown]
    lower = any(d is not None for d in apart)
    bottom = _BOTTOM if lower else _MIDDLE
    height = _H if lower else _MIDDLE + _H - _BOTTOM
    up = _linear([v for v in [*got, *expected] if v is not None], _MIDDLE, _TOP)
    out = [_grid(up, _TOP, _MIDDLE)]
    xs = list(map(x, steps))
    many = len(shown) > 60
    if with_reference:
        out.append(_line("ref", xs, expected, up))
        out += _dots("ref", xs, expected, up, _TOP, many)
    out.append(_line("run", xs, got, up))
    out += _dots("run", xs, got, up, _TOP, many)
    if lower:
        out += _differences(q, shown, xs, many)
    out += _ticks_of_steps(steps, x, bottom)
    out.append(f'<text class="axis" x="{(_LEFT + _RIGHT) / 2}" y="{height - 6}" text-anchor="middle">step</text>')
    unit = {"loss": "nats per token", "grad_norm": "L2 norm, before clipping"}.get(q, "L2 norm of what a step adds")
    out.append(f'<text class="axis" x="0" y="{_TOP - 17}">{unit}</text>')
    if lower:
        out.append(f'<text class="axis" x="0" y="{_LOWER - 17}">difference, relative to the reference</text>')
    out += map(partial(_hit, q, top=_TOP, bottom=bottom), shown, *_edges(xs))
    worst = max((_badness_of(d) for d in apart if d is not None), default=None)
    said = f"{name} of {len(shown)} steps, {lo} to {hi}"
    if worst is not None:
        said += f"; differences up to {number(worst, 2)}"
    return (
        f'<figure><figcaption>{_h(name)}</figcaption><svg class="chart" viewBox="0 0 {_W} {height}" role="img" '
        f'aria-label="{_h(said)}">{"".join(out)}</svg></figure>'
    )


def _badness_of(d: float) -> float:
    return math.inf if math.isnan(d) else d


def _differences(q: str, shown: Sequence[Row], xs: Sequence[float], many: bool) -> Iterator[str]:
    """The lower panel: differences on an axis of decades; zeros in a row of their own under it."""
    apart = [r.differences.get(q) for r in shown]
    bounds = [r.bounds.get(q) for r in shown]
    axis, zero = _decades([v for v in [*apart, *bounds] if v is not None], _BOTTOM, _LOWER)
    yield _grid(axis, _LOWER, _BOTTOM)
    if zero is not None:
        yield f'<path class="grid" d="M{_LEFT} {zero}H{_RIGHT}"/>'
        yield f'<text class="tick" x="{_LEFT - 7}" y="{zero + 4}" text-anchor="end">0</text>'

    def y(v: float) -> float:
        if v <= 0:
            return _BOTTOM - 8 if zero is None else zero
        return _LOWER if not math.isfinite(v) else min(_BOTTOM, max(_LOWER, axis.place(v)))

    known = [(at, y(b)) for at, b in zip(xs, bounds, strict=True) if b is not None]
    if known:
        known = [(_LEFT, known[0][1]), *known, (_RIGHT, known[-1][1])]
        points = " ".join(f"{a:.1f} {b:.1f}" for a, b in known)
        yield f'<path class="band" d="M{_LEFT} {_BOTTOM}L{points}L{_RIGHT} {_BOTTOM}Z"/>'
        yield f'<path class="bound" d="M{points}"/>'
    finite = [d if d is not None and math.isfinite(d) else None for d in apart]
    yield _line("apart", xs, finite, _Axis(y, []))
    for r, at, d in zip(shown, xs, apart, strict=True):
        if d is None:
            continue
        if not d <= r.bounds.get(q, math.inf):
            yield _cross(at, max(_LOWER + 4, y(d)))
        elif d == 0:
            yield f'<circle class="zero" cx="{at:.1f}" cy="{y(d):.1f}" r="{2.4 if many else 3.6}"/>'
        elif not many:
            yield f'<circle class="apart" cx="{at:.1f}" cy="{y(d):.1f}" r="3.4"/>'


def _linear(values: Sequence[float], bottom: float, top: float) -> _Axis:
    finite = [v for v in values if math.isfinite(v)]
    lo, hi = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if hi - lo <= max(abs(lo), abs(hi)) * 1e-3:  # as good as equal: what differs is seen in the panel below
        pad = abs(hi) * 0.02 or 1.0
        lo, hi = lo - pad, hi + pad
    raw = hi / 4 - lo / 4  # halves first, since the difference of two large numbers may overflow
    if not math.isfinite(raw) or raw <= 0:
        return _Axis(lambda v: (bottom + top) / 2, [])
    try:
        unit = 10.0 ** math.floor(math.log10(raw))
        many = next(m for m in (1, 2, 5, 10) if m * unit >= raw)
        step = many * unit
        first, last = math.floor(lo / step), math.ceil(hi / step)
        digits = math.ceil(math.log10(many * max(abs(first), abs(last), 1))) + 1
        ticks = [(i * step, _tick(i * step, digits)) for i in range(first, last + 1)]
        lo, hi = first * step, last * step
        span = hi - lo
    except (OverflowError, ValueError, ZeroDivisionError):
        return _Axis(lambda v: (bottom + top) / 2, [])
    if not math.isfinite(span) or span <= 0:
        return _Axis(lambda v: (bottom + top) / 2, [])
    return _Axis(lambda v: bottom - (v - lo) / span * (bottom - top), ticks)


def _tick(x: float, digits: int) -> str:
    text = f"{x:.{digits}g}"
    return text if len(text) <= 8 else f"{x:.2e}"


def _decades(values: Sequence[float], bottom: float, top: float) -> tuple[_Axis, float | None]:
    """An axis of decades over the values, and where zeros are drawn, if there are any."""
    some = [v for v in values if math.isfinite(v) and v > 0]
    zero = None
    if any(v == 0 for v in values) or not some:
        zero = bottom - 9
        bottom -= 22
    lo = math.floor(math.log10(min(some)) - 0.3) if some else -8
    hi = math.ceil(math.log10(max(some))) if some else -4
    lo, hi = max(lo, -40), min(max(hi, -39), 40)
    if hi - lo < 2:
        lo = hi - 2
    every = max(1, math.ceil((hi - lo) / 4))
    ticks = [(10.0**e, f"1e{e}" if e else "1") for e in range(hi, lo - 1, -every)]
    return _Axis(lambda v: bottom - (math.log10(v) - lo) / (hi - lo) * (bottom - top), ticks), zero


def _grid(axis: _Axis, top: float, bottom: float) -> str:
    out = [f'<path class="frame" d="M{_LEFT} {top}V{bottom}H{_RIGHT}"/>']
    for value, text in axis.ticks:
        y = axis.place(value)
        if top - 1 <= y <= bottom + 1:
            out.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
            out.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_h(text)}</text>')
    return "".join(out)


def _ticks_of_steps(steps: Sequence[int], x: Callable[[float], float], y: float) -> Iterator[str]:
    picked = sorted({steps[round(i * (len(steps) - 1) / 4)] for i in range(5)})
    for s in picked:
        yield f'<text class="tick" x="{x(s):.1f}" y="{y + 17}" text-anchor="middle">{s}</text>'


def _line(kind: str, xs: Sequence[float], values: Sequence[float | None], axis: _Axis) -> str:
    """A path with gaps where there is no number."""
    d, pen = [], False
    for x, v in zip(xs, values, strict=True):
        if v is None or not math.isfinite(v):
            pen = False
            continue
        d.append(f"{'L' if pen else 'M'}{x:.1f} {axis.place(v):.1f}")
        pen = True
    return f'<path class="{kind}" d="{"".join(d)}"/>' if d else ""


def _dots(
    kind: str, xs: Sequence[float], values: Sequence[float | None], axis: _Axis, top: float, many: bool
) -> Iterator[str]:
    for x, v in zip(xs, values, strict=True):
        if v is None:
            continue
        if not math.isfinite(v):
            yield _cross(x, top + 6)
        elif kind == "ref" and not many:
            y = axis.place(v)
            yield f'<rect class="ref" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'
        elif not many:
            yield f'<circle class="{kind}" cx="{x:.1f}" cy="{axis.place(v):.1f}" r="3"/>'


def _cross(x: float, y: float) -> str:
    return f'<path class="out" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'


def _edges(xs: Sequence[float]) -> tuple[list[float], list[float]]:
    """Left and right end of the strip of each step."""
    cuts = [_LEFT, *((a + b) / 2 for a, b in pairwise(xs)), _RIGHT]
    return [float(c) for c in cuts[:-1]], [float(c) for c in cuts[1:]]


def _hit(q: str, row: Row, left: float, right: float, *, top: float, bottom: float) -> str:
    """A strip that answers the pointer with the numbers of a step."""
    told = [f"step {row.got.step}", f"this run {number(getattr(row.got, q), 8)}"]
    if row.expected is not None:
        told.append(f"reference {number(getattr(row.expected, q), 8)}")
    if q in row.differences:
        told.append(f"difference {number(row.differences[q], 3)}" + (" (equal)" if row.differences[q] == 0 else ""))
    if q in row.bounds:
        told.append(f"allowed {number(row.bounds[q], 3)}")
    text = html.escape("\n".join(told))
    return (
        f'<rect class="hit" x="{left:.1f}" y="{top}" width="{max(1.0, right - left):.1f}" height="{bottom - top}">'
        f"<title>{text}</title></rect>"
    )


# --------------------------------------------------------------------------------------------------------------- tables


def _checks(report: Report) -> str:
    if not report.checks:
        return _section("checks", "Checks", '<p class="hint">Nothing was checked.</p>')
    ordered = report.checks
    left = 0
    if len(ordered) > _CHECKS:
        bad = [c for c in ordered if c.verdict != "pass"][:_CHECKS]
        left = len(ordered) - len(bad)
        ordered = bad
    body = map(_check, ordered)
    counts = {v: sum(c.verdict == v for c in report.checks) for v in ("fail", "not comparable", "pass")}
    told = ", ".join(f"{n:,} {w}" for w, n in (("failed", counts["fail"]), ("not comparable", counts["not comparable"]), ("passed", counts["pass"])) if n)  # fmt: skip
    tools = (
        '<div class="tools" role="group" aria-label="Which checks are shown">'
        + "".join(
            f'<button type="button" data-show="{v}" aria-pressed="{"true" if v == "all" else "false"}">{text} '
            f"<b>{n:,}</b></button>"
            for v, text, n in (
                ("all", "all", len(report.checks)),
                ("fail", "failed only", counts["fail"]),
                ("aside", "not comparable", counts["not comparable"]),
            )
        )
        + '<label>find <input type="search" id="find" placeholder="name or text" autocomplete="off"></label></div>'
    )
    titles = ("verdict", "stage", "check", "found", "bound", "in words")
    head = "".join(f'<th scope="col"{" class=num" if t == "found" else ""}>{t}</th>' for t in titles)
    tall = ' tall" tabindex="0" role="region" aria-label="table of checks"' if len(ordered) > _TALL else '"'
    more = f'<p class="hint">{left:,} checks that passed are not shown; report.json has them.</p>' if left else ""
    table = f'<div class="scroll{tall}><table class="checks" id="checktable"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    return _section("checks", "Checks", tools + table + '<p class="hint" id="nothing" hidden>No check is like that.</p>' + more, told)  # fmt: skip


def _check(c: Check) -> str:
    kind = _CLASS[c.verdict]
    where = ""
    if c.where and c.where not in c.text:
        where = f' <code class="where">{_h(c.where, 100)}</code>'
    return (
        f'<tr class="check {kind}"><td class="v">{_mark(kind)}{_h(c.verdict)}</td><td class="s">{_h(c.stage)}</td>'
        f'<th scope="row"><code>{_name(c.name, 60)}</code></th><td class="num">{_h(number(c.number))}</td>'
        f'<td class="b">{_h(limit(c))}</td><td class="wrap text">{_h(c.text, 100)}{where}</td></tr>'
    )


def _steps(every: Sequence[Row]) -> str:
    if not every:
        return ""
    compared = any(r.expected is not None for r in every)
    shown = _thinned(every, _TABLE)
    titles = ["step"]
    for name in QUANTITIES.values():
        titles += [name, *(["reference", "difference"] if compared else [])]
    titles += ["lr", *(["batch"] if compared else []), "seconds"]
    head = "".join(f'<th scope="col" class="num">{_h(t)}</th>' for t in titles)
    body = []
    for r in shown:
        cells = [f'<th scope="row" class="num">{r.got.step}</th>']
        for q in QUANTITIES:
            cells.append(_td(number(getattr(r.got, q), 6)))
            if compared:
                cells.append(_td(number(getattr(r.expected, q), 6) if r.expected is not None else ""))
                d = r.differences.get(q)
                bad = d is not None and not d <= r.bounds.get(q, math.inf)
                cells.append(_td(number(d, 2) + (" outside" if bad else ""), "num bad" if bad else "num"))
        lr = sorted({number(v) for v in (r.got.learning_rates or [])})
        cells.append(_td(", ".join(lr[:3]) + (" .." if len(lr) > 3 else "")))
        if compared:
            text = {None: "", True: "same", False: "differs"}[r.batch]
            cells.append(_td(text, "num bad" if r.batch is False else "num"))
        cells.append(_td(number(r.got.seconds)))
        body.append(f"<tr{' class=bad' if r.outside else ''}>{''.join(cells)}</tr>")
    note = f" ({len(shown)} of {len(every):,})" if len(shown) < len(every) else ""
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    return _section("steps", "All numbers", f"<details><summary>Steps as a table{note}</summary>{table}</details>")


def _td(text: str, kind: str = "num", of: str = "") -> str:
    """A cell; `of` is its column's title, shown in it where the table is too narrow for columns."""
    return f'<td class="{kind}" data-of="{of}">{_h(text)}</td>' if of else f'<td class="{kind}">{_h(text)}</td>'


def _worst(every: Sequence[Row]) -> str:
    first = next((r for r in every if r.expected is not None), None)
    if first is None or first.expected is None:
        return ""
    tables = []
    for q, title in (("grads", "Gradients"), ("updates", "Updates")):
        got, expected = getattr(first.got, q), getattr(first.expected, q)
        apart = {n: d for n in got if (d := relative(got[n], expected.get(n))) is not None}
        if not apart:
            continue
        worst = sorted(apart, key=lambda n: -_badness_of(apart[n]))[:_TENSORS]
        exact = sum(d == 0 for d in apart.values())
        finite = [apart[n] for n in worst if math.isfinite(apart[n]) and apart[n] > 0]
        body = []
        for n in worst:
            d = apart[n]
            share = 100.0 if not math.isfinite(d) else 100 * (d / max(finite)) if d > 0 and finite else 0.0
            body.append(
                f'<tr><th scope="row" class="wrap"><code>{_name(n, 70)}</code></th>'
                f"{_td(number(expected[n], 4), of='reference')}{_td(number(got[n], 4), of='this run')}"
                f"{_td(number(d, 3), of='difference')}"
                f'<td class="barcell"><span class="bar" style="width:{share:.1f}%"></span></td></tr>'
            )
        head = "".join(f'<th scope="col"{"" if t == "tensor" else " class=num"}>{t}</th>' for t in ("tensor", "reference", "this run", "difference"))  # fmt: skip
        head += '<th scope="col"><span class="hide">difference, as a bar</span></th>'
        tables.append(
            f"<div><h3>{title} <span class='aside-text'>{exact:,} of {len(apart):,} equal</span></h3>"
            f'<div class="scroll"><table class="worst"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div></div>'
        )
    if not tables:
        return ""
    inner = f'<div class="two">{"".join(tables)}</div>'
    return _section("worst", "Tensors that differ most", inner, f"L2 norms in step {first.got.step}")


def _memory(report: Report) -> str:
    def of(m: dict[str, Any], key: str) -> int:
        value = m.get(key)
        return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0

    ranks = [m for m in report.candidate.memory if of(m, "reserved_bytes") or of(m, "allocated_bytes")]
    if not ranks:
        return ""
    left = ""
    if len(ranks) > _RANKS:
        most = sorted(ranks, key=lambda m: -of(m, "reserved_bytes"))[:_RANKS]
        left = f'<p class="hint">The {_RANKS} ranks with the most, of {len(ranks):,}.</p>'
        ranks = sorted(most, key=lambda m: of(m, "rank"))
    total = max(of(m, "total_bytes") for m in ranks)
    peak = max(max(of(m, "reserved_bytes"), of(m, "allocated_bytes")) for m in ranks)
    full = max(total, peak, 1)
    if peak < total / 20:
        full = peak  # bars of a pixel would tell nothing
    bars = []
    for m in ranks:
        allocated, reserved = of(m, "allocated_bytes"), of(m, "reserved_bytes")
        text = f"{_gib(allocated)} allocated, {_gib(reserved)} reserved" + (
            f" of {_gib(of(m, 'total_bytes'))}" if of(m, "total_bytes") else ""
        )
        bars.append(
            f'<li title="rank {of(m, "rank")}: {text}"><span class="r">{of(m, "rank")}</span><span class="track">'
            f'<span class="reserved" style="width:{100 * reserved / full:.1f}%"></span>'
            f'<span class="allocated" style="width:{100 * allocated / full:.1f}%"></span></span>'
            f'<span class="n">{_gib(reserved or allocated)}<span class="hide"> of rank {of(m, "rank")}: {text}</span></span></li>'
        )
    legend = (
        '<p class="legend"><span class="key"><i class="allocated"></i>allocated</span>'
        '<span class="key"><i class="reserved"></i>reserved</span>'
        f'<span class="key">a full bar is {_gib(full)}{", the whole device" if full == total else ""}</span></p>'
    )
    inner = legend + f'<ol class="bars{" many" if len(ranks) > 12 else ""}">{"".join(bars)}</ol>{left}'
    return _section("memory", "Peak memory of each rank", inner)


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 / 10 else f"{n / 2**20:.1f} MiB"


def _environment(report: Report) -> str:
    groups: list[tuple[str, dict[str, object]]] = [
        ("Where it was started", {**({"judged": report.time} if report.time else {}), **report.versions}),
        ("Environment of the run", dict(report.candidate.environment)),
        ("Environment of the reference", dict(report.reference.environment) if report.reference is not None else {}),
        ("Speed and memory", dict(speed(report))),
    ]
    lists = []
    for title, values in groups:
        if values:
            items = "".join(
                f'<tr><th scope="row" class="wrap">{_h(k, 60)}</th><td class="wrap">{_h(_plain(v), 100)}</td></tr>'
                for k, v in list(values.items())[:100]
            )
            lists.append(f"<div><h3>{title}</h3><table><tbody>{items}</tbody></table></div>")
    notes = [("this run", n) for n in report.candidate.notes]
    notes += [("reference", n) for n in (report.reference.notes if report.reference is not None else [])]
    told = "".join(f"<li><b>{who}</b> {_h(n)}</li>" for who, n in notes[:200])
    inner = (f'<h3>Notes</h3><ul class="notes">{told}</ul>' if told else "") + (
        f'<div class="two">{"".join(lists)}</div>' if lists else ""
    )
    return _section("environment", "Environment and notes", inner) if inner else ""


def _plain(x: object) -> str:
    return x if isinstance(x, str) else json.dumps(x, default=str)[:2000]


# ------------------------------------------------------------------------------------------------------ style and script

_STYLE = """
:root{--bg:#f5f6f8;--card:#fff;--ink:#16191d;--soft:#555d68;--line:#d9dde3;--grid:#e8ebef;--code:#eef0f3;
--run:#0060a8;--ref:#c65400;--apart:#6a3d9a;--band:#d8ebe4;--bound:#00745a;--out:#b3001b;
--pass:#116b3a;--passbg:#e4f4ea;--fail:#a80d20;--failbg:#fdeaec;--aside:#7a5200;--asidebg:#fdf3d8;--solid:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#101317;--card:#191d23;--ink:#e8eaed;--soft:#a3acb8;--line:#343b45;
--grid:#282e37;--code:#262c34;--run:#5cb8ff;--ref:#ffab5e;--apart:#cda8ff;--band:#17352d;--bound:#4fd1a9;--out:#ff7b86;
--pass:#63d394;--passbg:#14301f;--fail:#ff8b95;--failbg:#3d171c;--aside:#f0c45c;--asidebg:#362a0d;--solid:#191d23}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px 16px 48px}
header,section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 22px;margin:0 0 16px}
header{border-left-width:8px}
header.pass{border-left-color:var(--pass)}header.fail{border-left-color:var(--fail)}header.aside{border-left-color:var(--aside)}
h1{margin:2px 0 8px;font-size:34px;line-height:1.15;text-transform:uppercase;letter-spacing:.01em;display:flex;gap:12px;align-items:center}
header.pass h1{color:var(--pass)}header.fail h1{color:var(--fail)}header.aside h1{color:var(--aside)}
h2{font-size:18px;margin:0 0 14px;display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline}
h3{font-size:15px;margin:0 0 8px}
p{margin:0 0 10px}
.what{color:var(--soft);margin:0;font-size:13px}
.sentence{font-size:17px;max-width:75ch;overflow-wrap:anywhere}
.source{overflow-wrap:anywhere;margin-bottom:16px}
.aside-text,.hint,.label,.kind{color:var(--soft);font-size:13px;font-weight:400}
.hint{margin:12px 0 0}.label{margin:10px 0 4px}
.mark{width:1em;height:1em;flex:none;fill:none;stroke:currentColor;stroke-width:3;stroke-linecap:round;stroke-linejoin:round}
code{font:.92em/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--code);padding:1px 5px;border-radius:4px;overflow-wrap:anywhere}
.tiles{display:flex;flex-wrap:wrap;gap:14px 34px;margin:0;padding-top:14px;border-top:1px solid var(--line)}
.tiles dt{color:var(--soft);font-size:13px}.tiles dd{margin:0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.cause{border-left:4px solid var(--line);padding:2px 0 2px 14px;margin:0 0 16px}.cause:last-child{margin-bottom:0}
.cause.first{border-left-color:var(--fail)}
.cause h3{overflow-wrap:anywhere}.cause.first h3{font-size:17px}.cause .kind{margin:-4px 0 6px}
.rank{color:var(--soft);font-weight:600;font-size:13px;display:block}.cause.first .rank{color:var(--fail)}
ul{margin:0 0 8px;padding-left:20px}li{overflow-wrap:anywhere}
.names{list-style:none;padding:0}.names li{margin-bottom:3px}
.notes b{color:var(--soft);font-weight:600;margin-right:6px}
.scroll{overflow-x:auto}.tall{max-height:80vh;overflow:auto}.tall thead th{position:sticky;top:0;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 14px 5px 0;vertical-align:top;border-bottom:1px solid var(--grid);font-weight:400}
thead th{color:var(--soft);font-size:13px;border-bottom-color:var(--line);white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
th[scope=row]{color:var(--soft);white-space:nowrap}
th[scope=row].wrap,.wrap{white-space:normal;overflow-wrap:anywhere}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.facts th[scope=row]{width:120px}.facts td{width:45%}#environment th{width:34%}em{font-style:normal;font-size:12px;color:var(--aside);background:var(--asidebg);padding:1px 6px;border-radius:8px;margin-left:6px}
.checks th[scope=row]{color:inherit;white-space:normal;min-width:170px}.checks th code{background:none;padding:0}
.checks .b{white-space:nowrap;color:var(--soft)}.checks .text{min-width:220px;width:45%}
.v{white-space:nowrap;font-weight:600}.v .mark{margin-right:7px;vertical-align:-2px}
.check.pass .v{color:var(--pass)}.check.fail .v{color:var(--fail)}.check.aside .v{color:var(--aside)}
.check.fail>*{background:var(--failbg)}.checks tr>:first-child{padding-left:8px}.s{color:var(--soft);white-space:nowrap}
td.bad,tr.bad th{color:var(--fail);font-weight:600}
.tools{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:0 0 10px}
.tools label{margin-left:auto;color:var(--soft);font-size:13px}
button,input{font:inherit;font-size:13px;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:7px;padding:5px 11px}
input{width:180px;max-width:50vw}
button{cursor:pointer}button[aria-pressed=true]{background:var(--ink);color:var(--card);border-color:var(--ink)}
:focus-visible{outline:3px solid var(--run);outline-offset:2px}
.legend{display:flex;flex-wrap:wrap;gap:6px 20px;font-size:13px;color:var(--soft);margin:0 0 10px}
.key{display:inline-flex;gap:7px;align-items:center}.key svg{width:34px;height:12px;flex:none}
.figures{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:18px}
@media (max-width:1000px){.figures{grid-template-columns:minmax(0,1fr)}.chart{max-width:620px}}
figure{margin:0;min-width:0}figcaption{font-weight:600;margin-bottom:4px}
.chart{display:block;width:100%;height:auto;overflow:visible}
.chart text{fill:var(--soft);font-size:14px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid);fill:none}.frame{stroke:var(--line);fill:none}
path.run,path.ref,path.apart{fill:none;stroke-width:2;stroke-linejoin:round}
path.run{stroke:var(--run)}path.ref{stroke:var(--ref);stroke-width:4;stroke-dasharray:7 5;opacity:.75}path.apart{stroke:var(--apart);stroke-width:1.5}
circle.run{fill:var(--run)}rect.ref{fill:var(--solid);stroke:var(--ref);stroke-width:2}
circle.apart{fill:var(--apart)}circle.zero{fill:var(--solid);stroke:var(--apart);stroke-width:1.8}
.band{fill:var(--band)}.bound{fill:none;stroke:var(--bound);stroke-width:2;stroke-dasharray:2 3}
.out{fill:none;stroke:var(--out);stroke-width:3;stroke-linecap:round}
.hit{fill:transparent}.hit:hover{fill:var(--ink);fill-opacity:.07}
#tip{position:fixed;z-index:9;background:var(--ink);color:var(--card);padding:8px 11px;border-radius:7px;font-size:13px;white-space:pre;pointer-events:none;font-variant-numeric:tabular-nums}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:24px 36px}.two>*{min-width:0}
.worst th code{background:none;padding:0}.barcell{width:64px;min-width:56px}.worst tr>:last-child{padding-right:0}.bar{display:block;height:10px;margin-top:6px;min-width:1px;background:var(--apart);border-radius:2px}
.bars{list-style:none;margin:0;padding:0;display:grid;gap:6px 30px}
.bars.many{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.bars li{display:grid;grid-template-columns:34px minmax(0,1fr) 84px;gap:8px;align-items:center;font-size:13px;font-variant-numeric:tabular-nums}
.bars .r{color:var(--soft);text-align:right}.track{position:relative;height:14px;background:var(--grid);border-radius:3px;overflow:hidden}
.track span{position:absolute;left:0;top:0;bottom:0}
.reserved{background:var(--ref);opacity:.55}.allocated{background:var(--run)}
i.reserved,i.allocated{width:14px;height:12px;border-radius:2px;display:inline-block}
details summary{cursor:pointer;margin-bottom:8px;color:var(--soft);font-size:14px}
.hide{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
[hidden]{display:none!important}
@media (max-width:640px){header,section{padding:16px 14px}main{padding:10px 8px 32px}h1{font-size:28px}.tiles{gap:12px 24px}.tools label{margin-left:0}
.checks,.checks tbody,.checks tr{display:block}.checks thead{display:none}
.checks .check{display:grid;grid-template-columns:auto minmax(0,1fr);gap:0 12px;padding:9px 0;border-bottom:1px solid var(--grid)}
.checks .check>*{border:0;padding:1px 8px;min-width:0;width:auto;text-align:left}.checks .check.fail{background:var(--failbg)}
.checks .b{white-space:normal}.checks .text{grid-column:1/-1}
.worst,.worst tbody{display:block}.worst thead{display:none}.worst tr{display:grid;grid-template-columns:1fr 1fr 1fr 56px;border-bottom:1px solid var(--grid);padding:5px 0}
.worst tr>*{border:0;padding:1px 8px 1px 0}.worst th[scope=row]{grid-column:1/-1}.worst .barcell{width:auto;min-width:0}.worst td{text-align:left}.worst td[data-of]::before{content:attr(data-of);display:block;color:var(--soft);font-size:12px}
.chart text{font-size:15px}}
@media print{body{background:#fff}header,section{break-inside:avoid;border-color:#bbb}.tools,#tip{display:none}
#checks,#steps{break-inside:auto}tr,figure,.cause{break-inside:avoid}.scroll,.tall{overflow:visible;max-height:none}main{max-width:none;padding:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""

_SCRIPT = """
(function(){
'use strict';
var tip=document.getElementById('tip');
function place(x,y){var w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(x+14,document.documentElement.clientWidth-w-4))+'px';
tip.style.top=(y+18+h>window.innerHeight?Math.max(4,y-h-10):y+18)+'px';}
document.querySelectorAll('.hit').forEach(function(hit){
var title=hit.querySelector('title'),text=title.textContent;title.remove();
hit.addEventListener('pointermove',function(e){tip.textContent=text;tip.hidden=false;place(e.clientX,e.clientY);});
hit.addEventListener('pointerleave',function(){tip.hidden=true;});});
window.addEventListener('scroll',function(){tip.hidden=true;},{passive:true});
window.addEventListener('beforeprint',function(){document.querySelectorAll('details').forEach(function(d){d.open=true;});});
var table=document.getElementById('checktable');if(!table)return;
var show='all',find=document.getElementById('find'),buttons=document.querySelectorAll('[data-show]');
var all=Array.prototype.map.call(table.tBodies[0].rows,function(r){return {row:r,text:r.textContent.toLowerCase()};});
function filter(){var words=find.value.toLowerCase(),any=false;
all.forEach(function(a){var on=(show==='all'||a.row.classList.contains(show))&&a.text.indexOf(words)>=0;
a.row.hidden=!on;any=any||on;});
document.getElementById('nothing').hidden=any;}
buttons.forEach(function(b){b.addEventListener('click',function(){show=b.dataset.show;
buttons.forEach(function(o){o.setAttribute('aria-pressed',String(o===b));});filter();});});
find.addEventListener('input',filter);
})();
"""
