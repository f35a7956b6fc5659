"""The charts of report.html, as plain shapes: what to draw and where. The template turns them into SVG.

    draw_figure("loss", "loss", rows, with_reference=True) -> Figure

A figure has two panels over one axis of steps. The upper one shows the curves of run and reference; the lower one their
differences on a logarithmic axis, with the envelope. Colours are classes of the style sheet, so that light, dark and
print share the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..text import format_number
from .facts import ComparedStep

__all__ = ["Figure", "Shape", "draw_figure", "replace_nan_by_inf"]

#: The view box, and the places of the panels in it.
_WIDTH, _HEIGHT = 460, 400
_LEFT, _RIGHT = 58, 450
_TOP, _MIDDLE, _LOWER, _BOTTOM = 30, 192, 244, 356
#: With more steps than this, lines have no markers.
_MANY = 60

_UNITS = {"loss": "nats per token", "grad_norm": "L2 norm, before clipping", "update_norm": "L2 norm of the update"}


@dataclass(frozen=True)
class Shape:
    """One SVG element; `text` is its content, `title` the lines of its tooltip."""

    tag: str
    attributes: dict[str, object]
    text: str = ""
    title: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One chart; `label` describes it to screen readers."""

    name: str
    label: str
    width: int
    height: int
    shapes: list[Shape]


@dataclass(frozen=True)
class _Axis:
    """Maps a number to a place; `ticks` are (number, text)."""

    place: Callable[[float], float]
    ticks: list[tuple[float, str]] = field(default_factory=list)


def draw_figure(quantity: str, name: str, rows: Sequence[ComparedStep], with_reference: bool) -> Figure:
    """Draw the chart of one quantity over steps.

    Args:
        quantity: a key of `facts.QUANTITIES`.
        name: the quantity in words.
        rows: the steps, not empty.
        with_reference: whether there is a reference, whose numbers are drawn, too.
    """
    steps = [r.got.step for r in rows]
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        if first == last:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + 8 + (step - first) / (last - first) * (_RIGHT - _LEFT - 16)

    xs = list(map(x, steps))
    got: list[float | None] = [getattr(r.got, quantity) for r in rows]
    expected: list[float | None] = [getattr(r.expected, quantity) if r.expected is not None else None for r in rows]
    differences = [r.differences[quantity] for r in rows if quantity in r.differences]
    bottom, height = (_BOTTOM, _HEIGHT) if differences else (_MIDDLE, _MIDDLE + _HEIGHT - _BOTTOM)
    axis = _make_linear_axis([v for v in [*got, *expected] if v is not None])
    markers = len(rows) <= _MANY

    shapes = list(_draw_grid(axis, _TOP, _MIDDLE))
    if with_reference:
        shapes += _draw_curve("ref", xs, expected, axis)
        shapes += _draw_markers("ref", xs, expected, axis, markers)
    shapes += _draw_curve("run", xs, got, axis)
    shapes += _draw_markers("run", xs, got, axis, markers)
    if differences:
        shapes += _draw_lower_panel(quantity, rows, xs, markers)
    for step in sorted({steps[round(i * (len(steps) - 1) / 4)] for i in range(5)}):
        shapes.append(_make_text("tick", f"{x(step):.1f}", bottom + 17, str(step), "middle"))
    shapes.append(_make_text("axis", (_LEFT + _RIGHT) / 2, height - 6, "step", "middle"))
    shapes.append(_make_text("axis", 0, _TOP - 17, _UNITS[quantity]))
    if differences:
        shapes.append(_make_text("axis", 0, _LOWER - 17, "difference, relative to the reference"))
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(xs)), _RIGHT]
    for row, (left, right) in zip(rows, pairwise(edges), strict=True):
        shapes.append(_make_tooltip(quantity, row, left, right, bottom))
    label = f"{name} of {len(rows)} steps, {first} to {last}"
    if differences:
        label += f"; differences up to {format_number(max(map(replace_nan_by_inf, differences)), 2)}"
    return Figure(name, label, _WIDTH, height, shapes)


def replace_nan_by_inf(difference: float) -> float:
    """Return a difference for sorting: infinity for NaN, otherwise the difference itself."""
    return math.inf if math.isnan(difference) else difference


# ------------------------------------------------------------------------------------------------------------- elements


def _make_path(kind: str, d: str) -> Shape:
    """Make an SVG path; `kind` is its class in the style sheet, `d` its commands."""
    return Shape("path", {"class": kind, "d": d})


def _make_circle(kind: str, x: float, y: float, r: float) -> Shape:
    """Make an SVG circle with centre (x, y) and radius `r`; `kind` is its class in the style sheet."""
    return Shape("circle", {"class": kind, "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": r})


def _make_text(kind: str, x: object, y: object, text: str, anchor: str | None = None) -> Shape:
    """Make an SVG text at (x, y); `kind` is its class in the style sheet.

    `anchor` is "middle" or "end" if that part of the text is at (x, y); None if its start is.
    """
    return Shape("text", {"class": kind, "x": x, "y": y, "text-anchor": anchor}, text)


def _make_cross_mark(x: float, y: float) -> Shape:
    """Make a cross at (x, y), for a value that is outside of its bound or not finite."""
    return _make_path("out", f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8")


def _draw_grid(axis: _Axis, top: float, bottom: float) -> Iterator[Shape]:
    """Draw the frame of a panel, with grid lines and their numbers.

    Args:
        axis: maps a number to its y coordinate; its `ticks` are the grid lines.
        top: y coordinate of the panel's upper edge.
        bottom: y coordinate of the panel's lower edge.
    """
    yield _make_path("frame", f"M{_LEFT} {top}V{bottom}H{_RIGHT}")
    for value, text in axis.ticks:
        y = axis.place(value)
        if top - 1 <= y <= bottom + 1:
            yield _make_path("grid", f"M{_LEFT} {y:.1f}H{_RIGHT}")
            yield _make_text("tick", _LEFT - 7, f"{y + 4:.1f}", text, "end")


def _draw_curve(kind: str, xs: Sequence[float], values: Sequence[float | None], axis: _Axis) -> Iterator[Shape]:
    """Draw a curve, with gaps where a value is None or not finite.

    Args:
        kind: its class in the style sheet.
        xs: x coordinate of each value.
        values: the values.
        axis: maps a value to its y coordinate.
    """
    d, pen = [], False
    for x, v in zip(xs, values, strict=True):
        if v is None or not math.isfinite(v):
            pen = False
            continue
        d.append(f"{'L' if pen else 'M'}{x:.1f} {axis.place(v):.1f}")
        pen = True
    if d:
        yield _make_path(kind, "".join(d))


def _draw_markers(
    kind: str, xs: Sequence[float], values: Sequence[float | None], axis: _Axis, drawn: bool
) -> Iterator[Shape]:
    """Draw a mark for each value: a square for kind "ref" (the reference), else a dot; a cross if it is not finite.

    Args:
        kind: its class in the style sheet.
        xs: x coordinate of each value.
        values: the values; None has no mark.
        axis: maps a value to its y coordinate.
        drawn: False draws only the crosses.
    """
    for x, v in zip(xs, values, strict=True):
        if v is None:
            continue
        if not math.isfinite(v):
            yield _make_cross_mark(x, _TOP + 6)
        elif drawn and kind == "ref":
            y = axis.place(v)
            yield Shape("rect", {"class": kind, "x": f"{x - 4.5:.1f}", "y": f"{y - 4.5:.1f}", "width": 9, "height": 9})
        elif drawn:
            yield _make_circle(kind, x, axis.place(v), 3)


def _make_tooltip(quantity: str, row: ComparedStep, left: float, right: float, bottom: float) -> Shape:
    """Make an invisible rectangle from x = `left` to `right` that shows the numbers of its step as a tooltip."""
    lines = [f"step {row.got.step}", f"this run {format_number(getattr(row.got, quantity), 8)}"]
    if row.expected is not None:
        lines.append(f"reference {format_number(getattr(row.expected, quantity), 8)}")
    if quantity in row.differences:
        difference = row.differences[quantity]
        lines.append(f"difference {format_number(difference, 3)}" + (" (equal)" if difference == 0 else ""))
    if quantity in row.bounds:
        lines.append(f"allowed {format_number(row.bounds[quantity], 3)}")
    place = {"x": f"{left:.1f}", "y": _TOP, "width": f"{max(1.0, right - left):.1f}", "height": bottom - _TOP}
    return Shape("rect", {"class": "hit", **place}, title=tuple(lines))


# ---------------------------------------------------------------------------------------------------------- the panels


def _draw_lower_panel(
    quantity: str, rows: Sequence[ComparedStep], xs: Sequence[float], markers: bool
) -> Iterator[Shape]:
    """Draw the differences of a quantity on a logarithmic axis, with the bounds; zeros are drawn on a line below it.

    Args:
        quantity: a key of `facts.QUANTITIES`.
        rows: the steps.
        xs: x coordinate of each step.
        markers: mark each step; zeros and values outside of their bounds are always marked.
    """
    differences = [r.differences.get(quantity) for r in rows]
    bounds = [r.bounds.get(quantity) for r in rows]
    axis, zero = _make_log_axis([v for v in [*differences, *bounds] if v is not None])
    yield from _draw_grid(axis, _LOWER, _BOTTOM)
    if zero is not None:
        yield _make_path("grid", f"M{_LEFT} {zero}H{_RIGHT}")
        yield _make_text("tick", _LEFT - 7, zero + 4, "0", "end")

    def y(v: float) -> float:
        if v <= 0:
            return _BOTTOM - 8 if zero is None else zero
        return _LOWER if not math.isfinite(v) else min(_BOTTOM, max(_LOWER, axis.place(v)))

    known = [(x, y(b)) for x, b in zip(xs, bounds, strict=True) if b is not None]
    if known:
        known = [(_LEFT, known[0][1]), *known, (_RIGHT, known[-1][1])]
        points = " ".join(f"{a:.1f} {b:.1f}" for a, b in known)
        yield _make_path("band", f"M{_LEFT} {_BOTTOM}L{points}L{_RIGHT} {_BOTTOM}Z")
        yield _make_path("bound", f"M{points}")
    finite = [d if d is not None and math.isfinite(d) else None for d in differences]
    yield from _draw_curve("apart", xs, finite, _Axis(y))
    for row, x, d in zip(rows, xs, differences, strict=True):
        if d is None:
            continue
        if not d <= row.bounds.get(quantity, math.inf):
            yield _make_cross_mark(x, max(_LOWER + 4, y(d)))
        elif d == 0:
            yield _make_circle("zero", x, y(d), 3.6 if markers else 2.4)
        elif markers:
            yield _make_circle("apart", x, y(d), 3.4)


def _make_linear_axis(values: Sequence[float]) -> _Axis:
    """Make the axis of the upper panel between round numbers around the values; without ticks if the span overflows."""
    middle = _Axis(lambda v: (_MIDDLE + _TOP) / 2)
    finite = [v for v in values if math.isfinite(v)]
    lo, hi = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if hi - lo <= max(abs(lo), abs(hi)) * 1e-3:  # nearly equal: the lower panel shows how they differ
        pad = abs(hi) * 0.02 or 1.0
        lo, hi = lo - pad, hi + pad
    raw = hi / 4 - lo / 4  # halves first, since the difference of two large numbers may overflow
    if not math.isfinite(raw) or raw <= 0:
        return middle
    try:
        unit = 10.0 ** math.floor(math.log10(raw))
        many = next(m for m in (1, 2, 5, 10) if m * unit >= raw)
        step = many * unit
        first, last = math.floor(lo / step), math.ceil(hi / step)
        digits = math.ceil(math.log10(many * max(abs(first), abs(last), 1))) + 1
        ticks = [(i * step, _format_tick(i * step, digits)) for i in range(first, last + 1)]
        lo, hi = first * step, last * step
        span = hi - lo
    except (OverflowError, ValueError, ZeroDivisionError):
        return middle
    if not math.isfinite(span) or span <= 0:
        return middle
    return _Axis(lambda v: _MIDDLE - (v - lo) / span * (_MIDDLE - _TOP), ticks)


def _format_tick(x: float, digits: int) -> str:
    """Format a number of an axis with `digits` significant digits; with three if that takes more than 8 characters."""
    text = f"{x:.{digits}g}"
    return text if len(text) <= 8 else f"{x:.2e}"


def _make_log_axis(values: Sequence[float]) -> tuple[_Axis, float | None]:
    """Make the logarithmic axis of the lower panel: (axis, y coordinate of zeros; None if there are none)."""
    positive = [v for v in values if math.isfinite(v) and v > 0]
    bottom: float = _BOTTOM
    zero = None
    if any(v == 0 for v in values) or not positive:
        zero = bottom - 9
        bottom -= 22
    lo = math.floor(math.log10(min(positive)) - 0.3) if positive else -8
    hi = math.ceil(math.log10(max(positive))) if positive else -4
    lo, hi = max(lo, -40), min(max(hi, -39), 40)
    if hi - lo < 2:
        lo = hi - 2
    every = max(1, math.ceil((hi - lo) / 4))
    ticks = [(10.0**e, f"1e{e}" if e else "1") for e in range(hi, lo - 1, -every)]
    return _Axis(lambda v: bottom - (math.log10(v) - lo) / (hi - lo) * (bottom - _LOWER), ticks), zero
