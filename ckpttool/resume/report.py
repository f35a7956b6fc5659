"""A Report is shown: on the terminal, as JUnit, as metrics for Prometheus; and written to files.

    screen(report)       for rich                    junit(report), prometheus(report)   text
    write(report, ...)   report.json and report.html in a folder, JUnit, metrics; each file whole or not at all

What is said is in `contents`, here is how it is laid out. Names of tensors come from checkpoints, which others made:
wherever a name is shown, characters that do not print are spelled out (`clean`), so that none of them steers a terminal
or breaks a file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._version import __version__
from ..errors import NoSpace, UsageError
from .contents import Row, count, device_of, facts, known, limit, rows, sentence, speed
from .page import page
from .verdict import Check, Report
from .words import clean, middle, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

__all__ = ["METRICS", "junit", "prometheus", "screen", "write"]


# ------------------------------------------------------------------------------------------------------------ terminal

_STYLE = {
    "pass": "bold green", "fail": "bold white on red", "gate failed": "bold white on red",
    "not comparable": "bold black on yellow", "no reference": "bold black on yellow",
}  # fmt: skip
#: More checks than this, and those that passed are counted; more steps than this, and some are left out.
_MANY_CHECKS, _MANY_STEPS = 60, 24


def screen(report: Report) -> RenderableType:
    """The report as a person reads it; what needs attention stands at the end, where a terminal stops scrolling."""
    return _Screen(report)


class _Screen:
    def __init__(self, report: Report) -> None:
        self.report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        report, width = self.report, options.max_width
        head = Text.assemble((f" {report.word.upper()} ", _STYLE[report.word]), "  ", sentence(report), overflow="fold")
        yield head
        yield Text()
        yield self._facts(width)
        yield Text()
        yield from self._checks(width)
        if report.candidate.steps:
            yield Text()
            yield from self._steps(width)
        if told := speed(report):
            yield Text()
            yield Text("   ".join(f"{what} {value}" for what, value in told), overflow="fold")
        for note in [*report.candidate.notes, *(report.reference.notes if report.reference is not None else [])]:
            yield Text.assemble(("note ", "blue"), clean(note, max(20, width - 10)), overflow="fold")
        if report.causes and report.exit_code:
            yield Text()
            yield from self._causes(width)
        yield Text()
        yield Text(f"{sentence(report)}", overflow="fold") if report.exit_code else Text(sentence(report))
        yield Text(report.word, style=_STYLE[report.word])

    def _facts(self, width: int) -> RenderableType:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        with_reference = self.report.reference is not None
        table = Table(box=box.SIMPLE_HEAD if with_reference else None, pad_edge=False, show_edge=False,
                      show_header=with_reference)  # fmt: skip
        table.add_column("", no_wrap=True)
        table.add_column("this run", overflow="fold")
        table.add_column("reference", overflow="fold")
        each = max(16, (width - 16) // (2 if with_reference else 1))
        for what, ours, theirs in facts(self.report):
            apart = with_reference and theirs != "" and ours != theirs and what != "source"
            style = "bold" if apart else ""
            table.add_row(Text(what, style="dim"), Text(clean(ours, each), style), Text(clean(theirs, each), style))
        return table

    def _shown(self) -> Iterator[tuple[str, list[Check], int]]:
        """(stage, checks to be listed, how many passed besides)."""
        stages: dict[str, list[Check]] = {}
        for c in self.report.checks:
            stages.setdefault(c.stage, []).append(c)
        for stage, checks in stages.items():
            listed = checks
            if len(self.report.checks) > _MANY_CHECKS:
                listed = [c for c in checks if c.verdict != "pass"][:_MANY_CHECKS]
            yield stage, listed, len(checks) - len(listed)

    def _checks(self, width: int) -> Iterator[RenderableType]:
        from rich import box
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        if width >= 130:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
            for title in ("stage", "verdict", "check", "found", "bound", ""):
                table.add_column(title, justify="right" if title == "found" else "left", overflow="fold",
                                 no_wrap=title in ("stage", "verdict", "found", "bound"))  # fmt: skip
            for stage, checks, more in self._shown():
                for i, c in enumerate(checks):
                    table.add_row(
                        Text("" if i else stage, "bold"), _verdict(c), Text(middle(clean(c.name), 32)),
                        Text(number(c.number)), Text(limit(c)), Text(_told(c), "dim" if c.verdict == "pass" else ""),
                    )  # fmt: skip
                if more:
                    table.add_row(Text("" if checks else stage, "bold"), "", Text(f"{more:,} more"), "", "", "")
            yield table
            return
        for stage, checks, more in self._shown():
            yield Text(stage, "bold")
            for c in checks:
                room = max(12, width - 18 - 10 - 20)
                line = Text.assemble("  ", _verdict(c), " " * (16 - len(c.verdict)))
                line.append(f"{middle(clean(c.name), room):<{room}}{number(c.number):>10}  {limit(c)}")
                yield line
                yield Padding(Text(_told(c, 56), "dim" if c.verdict == "pass" else ""), (0, 0, 0, 18))
            if more:
                yield Text(f"  {more:,} more")

    def _steps(self, width: int) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        every = rows(self.report)
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
        for at, r in _some(every):
            if r is None:
                table.add_row(Text(f"({at})", "dim"))
                continue
            e = r.expected
            cells: list[str | Text] = [str(r.got.step)]
            if compared:
                cells += [number(e.loss, 6) if e is not None else "", number(r.got.loss, 6), _diff(r, "loss")]
            else:
                cells += [number(r.got.loss, 6)]
            lr = ", ".join(number(x) for x in (r.got.learning_rates or [])[:1])
            if r.got.learning_rates and len(set(r.got.learning_rates)) > 1:
                lr += " .."
            batch = Text("DIFFERS", "bold red") if r.batch is False else Text("ok" if r.batch else "")
            if wide:
                cells += [number(r.bounds.get("loss"))]
                for q in ("grad_norm", "update_norm"):
                    cells += [number(getattr(r.got, q), 4), _diff(r, q), number(r.bounds.get(q))]
                cells += [lr, batch, number(r.got.seconds)]
            else:
                cells += [_diff(r, q, number(getattr(r.got, q), 4)) for q in ("grad_norm", "update_norm")] + [lr]
                cells += [batch if compared else number(r.got.seconds)]
            table.add_row(*cells)
        yield table
        if any(r.outside for r in every):
            yield Text("! outside of the envelope", "dim")

    def _causes(self, width: int) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for i, cause in enumerate(self.report.causes):
            first = Text("or", "bold") if i else Text("likely cause", "bold red")
            table.add_row(first, Text(clean(cause.text, width - 20), "bold"))
            for line in cause.evidence[:8]:
                table.add_row("", Text(f"- {clean(line, width - 20)}"))
            if cause.tensors:
                names = ", ".join(middle(clean(n), 60) for n in cause.tensors[:3])
                more = f" and {len(cause.tensors) - 3:,} more" if len(cause.tensors) > 3 else ""
                table.add_row("", Text(f"tensors: {names}{more}"))
            if cause.place:
                table.add_row("", Text(f"place: {clean(cause.place, width - 20)}"))
        yield table


def _verdict(check: Check) -> Text:
    from rich.text import Text

    if check.verdict == "fail":
        return Text("FAIL", "bold white on red")
    return Text(check.verdict, "green" if check.verdict == "pass" else "yellow")


def _told(check: Check, word: int = 60) -> str:
    where = f" [{middle(clean(check.where), word - 2)}]" if check.where and check.where not in check.text else ""
    return clean(check.text, word) + where


def _diff(row: Row, quantity: str, text: str | None = None) -> Text:
    """The difference of a step, or another text about it, marked where it lies outside of the envelope."""
    from rich.text import Text

    d = row.differences.get(quantity)
    if d is None:
        return Text(f"{text} " if text else "")
    out = not d <= row.bounds.get(quantity, math.inf)
    return Text((number(d, 2) if text is None else text) + ("!" if out else " "), "bold red" if out else "")


def _some(every: Sequence[Row]) -> Iterator[tuple[str, Row | None]]:
    """The first and the last steps and the first ones outside of the envelope; (how many are left out, None) between."""
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


# --------------------------------------------------------------------------------------------------------------- JUnit


def junit(report: Report) -> str:
    """JUnit XML: a test case a check; what could not be compared is skipped.

    Where the verdict as a whole is "not comparable" there is one more test case with an error, since a file in which
    everything is skipped would look like success.
    """
    from xml.etree import ElementTree as Xml

    failed, aside = count(report, "fail"), count(report, "not comparable")
    unjudged = report.word == "not comparable"
    tests = {
        "name": "ckpttool resume-verify", "tests": str(len(report.checks) + unjudged), "failures": str(failed),
        "errors": str(int(unjudged)), "skipped": str(aside),
    }  # fmt: skip
    root = Xml.Element("testsuites", tests)
    suite = Xml.SubElement(root, "testsuite", tests)
    properties = Xml.SubElement(suite, "properties")
    given: dict[str, object] = {"verdict": report.word, "profile": report.profile, "calibrated": report.calibrated}
    for what, ours, theirs in facts(report):
        given[what] = ours
        if theirs:
            given[f"reference {what}"] = theirs
    given |= dict(speed(report)) | report.versions | report.candidate.environment
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        Xml.SubElement(properties, "property", {"name": clean(key, 200), "value": clean(text, 1000)})
    for c in report.checks:
        case = Xml.SubElement(suite, "testcase", {"classname": f"resume.{clean(c.stage)}", "name": clean(c.name)})
        if c.verdict == "not comparable":
            Xml.SubElement(case, "skipped", {"message": clean(c.text)})
        elif c.verdict == "fail":
            failure = Xml.SubElement(case, "failure", {"message": clean(c.text), "type": clean(c.stage)})
            failure.text = "\n".join(_explained(report, c))
    if unjudged:
        case = Xml.SubElement(suite, "testcase", {"classname": "resume", "name": "verdict"})
        Xml.SubElement(case, "error", {"message": sentence(report), "type": "not comparable"})
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _explained(report: Report, check: Check) -> Iterator[str]:
    yield clean(check.text)
    if check.number is not None:
        yield f"found {number(check.number, 6)}" + (f", bound {limit(check)}" if check.bound is not None else "")
    if check.where:
        yield f"where: {clean(check.where)}"
    for cause in report.causes:
        yield f"likely cause: {clean(cause.text)}"
        yield from (f"  - {clean(line)}" for line in cause.evidence)
        if cause.tensors:
            more = f" and {len(cause.tensors) - 10} more" if len(cause.tensors) > 10 else ""
            yield "  tensors: " + ", ".join(clean(n) for n in cause.tensors[:10]) + more
        if cause.place:
            yield f"  place: {clean(cause.place)}"


# ---------------------------------------------------------------------------------------------------------- Prometheus

#: Every metric, and its HELP; all are gauges. docs/how-to/metrics.md says more, alerts.yml uses them.
METRICS = {
    "verdict": "1 for the verdict of the last run, 0 for the others.",
    "check": "Whether a check passed (1) or failed (0); absent where it could not be judged.",
    "checks_failed": "How many checks failed.",
    "checks_not_comparable": "How many checks could not be judged.",
    "timestamp_seconds": "When the run was judged, in seconds since 1970.",
    "checkpoint_step": "The step of the checkpoint that was loaded.",
    "steps": "How many steps were run after loading.",
    "steps_not_finite": "How many of these steps had a loss or a grad norm that is not finite.",
    "loss": "The loss of the last step.",
    "loss_difference_ratio": "The largest difference between losses of run and reference, relative to the reference.",
    "grad_norm": "The largest grad norm before clipping.",
    "grad_norm_expected": "The mean grad norm of the reference in the same steps, or else of the other steps of the run.",
    "step_seconds": "The median time of a step, without the first.",
    "previous_step_seconds": "step_seconds of the run before, where that was the same job on the same device.",
    "tokens_per_second": "Tokens trained on, over all ranks.",
    "mfu": "Model FLOPs utilisation, 0 to 1.",
    "load_seconds": "How long loading the checkpoint took.",
    "load_bytes_per_second": "How fast the checkpoint was loaded.",
    "save_seconds": "How long saving the checkpoint took.",
    "peak_reserved_bytes": "Peak of the memory that the allocator of a rank held on its device.",
    "peak_allocated_bytes": "Peak of the memory that tensors of a rank took on its device.",
    "device_memory_bytes": "Memory of the device of a rank.",
    "info": "What was run, as labels; always 1.",
}
_WORDS = ("pass", "fail", "gate failed", "not comparable", "no reference")
#: Labels of info that two runs must share for their times to be compared.
_SAME_JOB = ("world_size", "device", "dtype", "parameters", "global_batch", "micro_batch", "sequence")


def prometheus(report: Report, *, training: str = "", now: float | None = None, previous: str | None = None) -> str:
    """Metrics in the text format, for the textfile collector of node_exporter. What is not known is left out.

    `training` is a label on everything, so that files of several trainings can lie in one folder. `previous` is the
    text that this one replaces; the step time in it is carried on where it was of the same job.
    """
    trace = report.candidate
    every = rows(report)
    found: dict[str, list[tuple[dict[str, object], float]]] = {}

    def add(metric: str, value: object, **labels: object) -> None:
        if isinstance(value, (int, float)):
            found.setdefault(metric, []).append((labels, float(value)))

    for word in _WORDS:
        add("verdict", word == report.word, verdict=word)
    for c in report.checks:
        if c.verdict != "not comparable":
            add("check", c.verdict == "pass", stage=c.stage, name=c.name)
    add("checks_failed", count(report, "fail"))
    add("checks_not_comparable", count(report, "not comparable"))
    add("timestamp_seconds", round(time.time() if now is None else now, 3))
    add("checkpoint_step", trace.start)
    add("steps", len(every))
    if every:
        numbers = [(s.loss, s.grad_norm if s.grad_norm is not None else 0.0) for s in trace.steps]
        add("steps_not_finite", sum(not all(map(math.isfinite, pair)) for pair in numbers))
        add("loss", trace.steps[-1].loss)
    add("loss_difference_ratio", _largest([r.differences["loss"] for r in every if "loss" in r.differences]))
    norms = [s.grad_norm for s in trace.steps if s.grad_norm is not None]
    add("grad_norm", _largest(norms))
    expected = [r.expected.grad_norm for r in every if r.expected is not None and r.expected.grad_norm is not None]
    expected = [x for x in expected or sorted(norms)[:-1] if math.isfinite(x)]
    add("grad_norm_expected", sum(expected) / len(expected) if expected else None)
    for key in ("step_seconds", "tokens_per_second", "mfu", "load_seconds", "save_seconds"):
        add(key, known(report, key))
    rate = known(report, "load_gb_per_second")
    add("load_bytes_per_second", None if rate is None else rate * 1e9)
    for m in trace.memory:
        for name, key in (("peak_reserved", "reserved"), ("peak_allocated", "allocated"), ("device_memory", "total")):
            add(f"{name}_bytes", m.get(f"{key}_bytes"), rank=m.get("rank", ""))
    info = {
        "version": report.versions.get("ckpttool", __version__), "torch": report.versions.get("torch"),
        "source": trace.source, "layout": trace.layout, "profile": report.profile, "world_size": trace.world_size,
        "device": device_of(trace), "dtype": trace.dtype, "parameters": trace.parameters,
        "global_batch": trace.global_batch, "micro_batch": trace.micro_batch, "sequence": trace.sequence,
        "reference": report.reference.source if report.reference is not None else None,
        "reference_world_size": report.reference.world_size if report.reference is not None else None,
    }  # fmt: skip
    add("info", 1, **{k: v for k, v in info.items() if v not in (None, "")})
    if previous is not None:
        labels, before = _read_back(previous)
        if all(labels.get(k, "") == _label("" if info[k] is None else info[k]) for k in _SAME_JOB):
            add("previous_step_seconds", before)
    lines: list[str] = []
    for name, text in METRICS.items():
        if name in found:
            full = f"ckpttool_resume_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
            for labels_, value in found[name]:
                shown = {**({"training": training} if training else {}), **labels_}
                inside = ",".join(f'{k}="{_label(v)}"' for k, v in shown.items())
                lines.append(f"{full}{{{inside}}} {_value(value)}" if inside else f"{full} {_value(value)}")
    return "\n".join(lines) + "\n"


def _label(x: object) -> str:
    """A label's value, escaped. Names are spelled out and no longer than a database likes them."""
    return middle(clean(x), 200).replace("\\", r"\\").replace('"', r"\"")


def _value(x: float) -> str:
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "+Inf" if x > 0 else "-Inf"
    return repr(int(x)) if x == int(x) and abs(x) < 2**53 else repr(x)


def _largest(numbers: Sequence[float]) -> float | None:
    """NaN where one is NaN."""
    if any(math.isnan(x) for x in numbers):
        return math.nan
    return max(numbers, default=None)


def _read_back(text: str) -> tuple[dict[str, str], float | None]:
    """The labels of info, as they are escaped, and step_seconds, of metrics that `prometheus` made."""
    labels: dict[str, str] = {}
    seconds: float | None = None
    if m := re.search(r"^ckpttool_resume_info\{(.*)\} 1$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', m[1]))
    if m := re.search(r"^ckpttool_resume_step_seconds(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        try:
            seconds = float(m[1])
        except ValueError:
            pass
    return labels, seconds


# --------------------------------------------------------------------------------------------------------------- files


def write(
    report: Report,
    *,
    folder: str | os.PathLike[str] | None = None,
    junit_file: str | os.PathLike[str] | None = None,
    metrics_file: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write what is asked for: report.json and report.html into `folder`, JUnit, metrics. The files that were written.

    Each file is made beside its place and renamed, so that nobody reads half of one. `folder` and the folder of
    `junit_file` are made where they are missing; that of `metrics_file` must be there, since a collector reads it.
    The label `training` of the metrics is the file's name without its end.

    Raises:
        UsageError: a file cannot be written there. NoSpace: the disk is full.
    """
    out: list[Path] = []
    if folder is not None:
        text = json.dumps(report.to_json(), indent=1, allow_nan=False, default=str)
        out += [_put(Path(folder) / "report.json", text + "\n"), _put(Path(folder) / "report.html", page(report))]
    if junit_file is not None:
        out.append(_put(Path(junit_file), junit(report)))
    if metrics_file is not None:
        path = Path(metrics_file)
        try:
            previous = path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, ValueError):
            previous = None
        training = path.name.removesuffix(".prom")
        out.append(_put(path, prometheus(report, training=training, previous=previous), make=False))
    return out


def _put(path: Path, text: str, make: bool = True) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # no .prom at its end: a collector would read it
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path}: there is something that is not a regular file.")
        try:
            with open(draft, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as e:
        kind = NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"{path} cannot be written: {e.strerror or e}.") from None
    return path
