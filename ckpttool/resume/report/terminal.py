"""The report on the terminal, for rich.

render_terminal(report)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...printable import escape_unprintable, list_first, shorten_middle
from ..compare.verdict import Check, Report
from ..text import format_number
from .facts import ComparedStep, describe_verdict, format_bound, list_facts, list_speed, pair_steps_with_reference

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType
    from rich.text import Text

__all__ = ["render_terminal"]


_STYLE = {
    "pass": "bold green",
    "fail": "bold white on red",
    "gate failed": "bold white on red",
    "not comparable": "bold black on yellow",
    "does not fit": "bold black on yellow",
    "no reference": "bold black on yellow",
}
#: More checks than this, and those that passed are counted; more steps than this, and some are left out.
_MANY_CHECKS, _MANY_STEPS = 100, 24


def render_terminal(report: Report) -> RenderableType:
    """Return the report for rich to print; what needs attention comes last, where a terminal stops scrolling."""
    return _Screen(report)


class _Screen:
    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the parts of the report from top to bottom, as rich calls it."""
        from rich.padding import Padding
        from rich.text import Text

        report, width = self.report, options.max_width
        # in a file nothing is wrapped, and "fold" would cut a line off
        fold: OverflowMethod = "ignore" if options.no_wrap else "fold"
        head = Text.assemble(
            (f" {report.word.upper()} ", _STYLE[report.word]), "  ", describe_verdict(report), overflow=fold
        )
        yield head
        yield Text()
        yield self._render_facts(width)
        yield Text()
        yield from self._render_checks(width)
        if report.candidate.steps:
            yield Text()
            yield from self._render_steps(width)
        if numbers := list_speed(report):
            yield Text()
            yield Text("   ".join(f"{what} {value}" for what, value in numbers), overflow=fold)
        notes = [*report.candidate.notes, *(report.reference.notes if report.reference is not None else [])]
        for note in dict.fromkeys(notes):
            yield Text.assemble(("note ", "blue"), escape_unprintable(note, max(20, width - 10)), overflow=fold)
        if report.causes and report.exit_code:
            yield Text()
            yield from self._render_causes(width)
        if report.not_verified:
            yield Text()
            yield Text("not verified by this run:", "bold yellow")
            for line in report.not_verified:
                yield Padding(Text(f"- {escape_unprintable(line, max(20, width - 6))}", overflow=fold), (0, 0, 0, 2))
        yield Text()
        yield Text(describe_verdict(report), overflow=fold)
        yield Text(report.word, style=_STYLE[report.word])

    def _render_facts(self, width: int) -> RenderableType:
        """Render the table of what was compared, for a terminal of `width` characters."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        with_reference = self.report.reference is not None
        table = Table(
            box=box.SIMPLE_HEAD if with_reference else None, pad_edge=False, show_edge=False, show_header=with_reference
        )
        table.add_column("", no_wrap=True)
        table.add_column("this run", overflow="fold")
        table.add_column("reference", overflow="fold")
        each = max(16, (width - 16) // (2 if with_reference else 1))
        for what, ours, theirs in list_facts(self.report):
            apart = with_reference and theirs != "" and ours != theirs and what != "source"
            style = "bold" if apart else ""
            table.add_row(
                Text(what, style="dim"),
                Text(escape_unprintable(ours, each), style),
                Text(escape_unprintable(theirs, each), style),
            )
        return table

    def _list_checks_by_stage(self) -> Iterator[tuple[str, list[Check], int]]:
        """Yield (stage, checks to list, how many are left out) for each stage, such as "state"."""
        stages: dict[str, list[Check]] = {}
        for c in self.report.checks:
            stages.setdefault(c.stage, []).append(c)
        for stage, checks in stages.items():
            listed = checks
            if len(self.report.checks) > _MANY_CHECKS:
                listed = [c for c in checks if c.verdict != "pass"][:_MANY_CHECKS]
            yield stage, listed, len(checks) - len(listed)

    def _render_checks(self, width: int) -> Iterator[RenderableType]:
        """Render the checks, for a terminal of `width` characters: as a table from 130 on, else each on two lines."""
        from rich import box
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        if width >= 130:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
            for title in ("stage", "verdict", "check", "found", "bound", ""):
                table.add_column(
                    title,
                    justify="right" if title == "found" else "left",
                    overflow="fold",
                    no_wrap=title in ("stage", "verdict", "found", "bound"),
                )
            for stage, checks, more in self._list_checks_by_stage():
                for i, c in enumerate(checks):
                    table.add_row(
                        Text("" if i else stage, "bold"),
                        _format_verdict(c),
                        Text(shorten_middle(escape_unprintable(c.name), 32)),
                        Text(format_number(c.number)),
                        Text(format_bound(c)),
                        Text(_format_check(c), "dim" if c.verdict == "pass" else ""),
                    )
                if more:
                    table.add_row(Text("" if checks else stage, "bold"), "", Text(f"{more:,} more"), "", "", "")
            yield table
            return
        for stage, checks, more in self._list_checks_by_stage():
            yield Text(stage, "bold")
            for c in checks:
                room = max(12, width - 18 - 10 - 20)
                line = Text.assemble("  ", _format_verdict(c), " " * (16 - len(c.verdict)))
                name = shorten_middle(escape_unprintable(c.name), room)
                line.append(f"{name:<{room}}{format_number(c.number):>10}  {format_bound(c)}")
                yield line
                yield Padding(Text(_format_check(c, 56), "dim" if c.verdict == "pass" else ""), (0, 0, 0, 18))
            if more:
                yield Text(f"  {more:,} more")

    def _render_steps(self, width: int) -> Iterator[RenderableType]:
        """Render the table of steps, for a terminal of `width` characters; it has more columns from 130 on."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        every = pair_steps_with_reference(self.report)
        compared = any(r.expected is not None for r in every)
        wide = width >= 130 and compared
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        titles = ["step", "reference", "loss", "diff"] if compared else ["step", "loss"]
        if wide:
            titles += [
                "bound",
                "grad norm",
                "diff",
                "bound",
                "update norm",
                "diff",
                "bound",
                "lr",
                "batch",
                "seconds",
            ]
        else:
            titles += ["grad norm", "update", "lr"] + (["batch"] if compared else ["seconds"])
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        for at, r in _select_rows(every):
            if r is None:
                table.add_row(Text(f"({at})", "dim"))
                continue
            e = r.expected
            cells: list[str | Text] = [str(r.got.step)]
            if compared:
                cells += [
                    format_number(e.loss, 6) if e is not None else "",
                    format_number(r.got.loss, 6),
                    _format_difference(r, "loss"),
                ]
            else:
                cells += [format_number(r.got.loss, 6)]
            lr = ", ".join(format_number(x) for x in (r.got.learning_rates or [])[:1])
            if r.got.learning_rates and len(set(r.got.learning_rates)) > 1:
                lr += " .."
            batch = Text("DIFFERS", "bold red") if r.batch is False else Text("ok" if r.batch else "")
            if wide:
                cells += [format_number(r.bounds.get("loss"))]
                for q in ("grad_norm", "update_norm"):
                    cells += [
                        format_number(getattr(r.got, q), 4),
                        _format_difference(r, q),
                        format_number(r.bounds.get(q)),
                    ]
                cells += [lr, batch, format_number(r.got.seconds)]
            else:
                cells += [
                    _format_difference(r, q, format_number(getattr(r.got, q), 4)) for q in ("grad_norm", "update_norm")
                ] + [lr]
                cells += [batch if compared else format_number(r.got.seconds)]
            table.add_row(*cells)
        yield table
        if any(r.outside for r in every):
            yield Text("! outside of the envelope", "dim")

    def _render_causes(self, width: int) -> Iterator[RenderableType]:
        """Render the likely causes with their evidence, for a terminal of `width` characters."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for i, cause in enumerate(self.report.causes):
            first = Text("or", "bold") if i else Text("likely cause", "bold red")
            table.add_row(first, Text(escape_unprintable(cause.text, width - 20), "bold"))
            for line in cause.evidence[:8]:
                table.add_row("", Text(f"- {escape_unprintable(line, width - 20)}"))
            if cause.tensors:
                names = list_first(shorten_middle(escape_unprintable(n), 60) for n in cause.tensors)
                table.add_row("", Text(f"tensors: {names}"))
            if cause.place:
                table.add_row("", Text(f"place: {escape_unprintable(cause.place, width - 20)}"))
        yield table


def _format_verdict(check: Check) -> Text:
    """Return the verdict of a check in its colour."""
    from rich.text import Text

    if check.verdict == "fail":
        return Text("FAIL", "bold white on red")
    return Text(check.verdict, "green" if check.verdict == "pass" else "yellow")


def _format_check(check: Check, word: int = 60) -> str:
    """Return the text of a check, with the tensor or step that it is about if the text does not name it.

    Words of more than `word` characters are shortened.
    """
    where = (
        f" [{shorten_middle(escape_unprintable(check.where), word - 2)}]"
        if check.where and check.where not in check.text
        else ""
    )
    return escape_unprintable(check.text, word) + where


def _format_difference(row: ComparedStep, quantity: str, text: str | None = None) -> Text:
    """Return the difference of a step from the reference, marked if it is larger than its bound; "" if it is not known.

    Args:
        row: the step.
        quantity: a key of `facts.QUANTITIES`.
        text: shown instead of the number; None shows the number.
    """
    from rich.text import Text

    d = row.differences.get(quantity)
    if d is None:
        return Text(f"{text} " if text else "")
    out = not d <= row.bounds.get(quantity, math.inf)
    return Text((format_number(d, 2) if text is None else text) + ("!" if out else " "), "bold red" if out else "")


def _select_rows(every: Sequence[ComparedStep]) -> Iterator[tuple[str, ComparedStep | None]]:
    """Yield ("", step) for the steps to show, and ("N more", None) where N steps are left out.

    Shown are the first and the last ones, and the first ones outside of their bounds.
    """
    keep = set(range(len(every)))
    if len(every) > _MANY_STEPS:
        third = _MANY_STEPS // 3
        odd = [i for i, r in enumerate(every) if r.outside][:third]
        keep = {*range(third), *range(len(every) - third, len(every)), *odd}
    left = 0
    for i, r in enumerate(every):
        if i not in keep:
            left += 1
            continue
        if left:
            yield f"{left} more", None
            left = 0
        yield "", r
