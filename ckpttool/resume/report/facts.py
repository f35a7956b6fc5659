"""What every form of the report shows: the verdict in a sentence, what was compared, the steps, the speed.

    describe_verdict(report)           the verdict, and the likely cause or the first failed check
    list_facts(report)                 run and reference side by side
    pair_steps_with_reference(report)  each step next to the reference's step of the same number, with the envelope
    list_speed(report)                 speed and memory, as far as known

Texts are printable (`text.escape_unprintable`). `terminal`, `junit`, `prometheus` and `html_page` lay them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...printable import count_noun, escape_unprintable, list_first
from ..compare.differences import collect_package_versions, compute_relative_deviation, find_package_differences
from ..compare.limits import compute_metrics
from ..compare.misfit import describe_misfit
from ..compare.side_state_differences import is_recording
from ..compare.verdict import Check, Report
from ..text import format_number
from ..trace.model import LIVE, OF_BUILD, Step, Trace
from ..trace.records import LoadCostRecord

__all__ = [
    "QUANTITIES",
    "ComparedStep",
    "compute_relative_difference",
    "count_checks",
    "describe_device",
    "describe_load_costs",
    "describe_verdict",
    "find_metric",
    "format_bound",
    "list_facts",
    "list_speed",
    "pair_steps_with_reference",
]

#: What is compared step by step: the field of Step, and its name in words.
QUANTITIES = {"loss": "loss", "grad_norm": "grad norm", "update_norm": "update norm"}


def describe_verdict(report: Report) -> str:
    """Return the verdict of a report in one to three sentences, with both environments if the sides ran different
    Pythons."""
    verdict, sides = _describe_verdict_alone(report), _describe_environments(report, 3)
    if sides is None or not _has_other_python(report):
        return verdict
    return f"{verdict} This run: {sides[0]}. Reference: {sides[1]}."


def _describe_verdict_alone(report: Report) -> str:
    """Return the verdict of a report in one to three sentences, without environments."""
    failed = [c for c in report.checks if c.verdict == "fail"]
    continuity = [c for c in failed if c.stage != "gate"]
    total, aside = len(report.checks), count_checks(report, "not comparable")
    left = f" {aside} could not be compared." if aside else ""
    if report.word == "does not fit":
        return (
            "The checkpoint does not fit the job, so nothing was judged. "
            f"{_as_sentence(describe_misfit(report.candidate), capital=True)}"
        )
    if report.word == "fail":
        if report.causes:
            return f"{len(failed)} of {total} checks failed. Likely cause: {_as_sentence(report.causes[0].text)}"
        return f"{len(failed)} of {total} checks failed. {_as_sentence(continuity[0].text, capital=True)}"
    if report.word == "not comparable":
        why = [c.text for c in report.checks if c.name == "step1.loss" and c.verdict == "not comparable"]
        why.append("there was neither optimizer state, nor an update, nor a loss after the first step to compare")
        return f"Run and reference could not be compared. {_as_sentence(why[0], capital=True)}"
    if report.word == "gate failed":
        goes_on = f"{_describe_training(report)}, but" if report.reference is not None else "The run is sound, but"
        return (
            f"{goes_on} {count_noun(len(failed), 'threshold was', 'thresholds were')} not met. "
            f"{_as_sentence(failed[0].text, capital=True)}"
        )
    if report.word == "no reference":
        return f"Without a reference, whether training goes on as before was not judged. {_count_passed(report)}{left}"
    return f"{_describe_training(report)}. {_count_passed(report)}{left}"


def _describe_training(report: Report) -> str:
    """Return a clause without a full stop, for a report that passed: "Training goes on as the reference does", or of a
    fresh job "Training resumed at 4 ranks goes on as without a pause"."""
    if report.reference is None or report.reference.layout != LIVE:
        return "Training goes on as the reference does"
    ranks = [t.world_size for t in (report.candidate, report.second) if t is not None]
    where = f"{ranks[0]} and {ranks[1]} ranks" if ranks[1:] else count_noun(ranks[0] or 0, "rank")
    return f"Training resumed at {where} goes on as without a pause"


def _as_sentence(text: str, capital: bool = False) -> str:
    """Return the text of a check or a cause with a full stop at its end; `capital` makes its first letter a capital."""
    text = escape_unprintable(text, 60)
    return (text[:1].upper() + text[1:] if capital else text) + ("" if text.endswith((".", "!", "?")) else ".")


def _count_passed(report: Report) -> str:
    """Return a sentence about how many checks passed."""
    return f"{count_checks(report, 'pass')} of {len(report.checks)} checks passed."


def count_checks(report: Report, verdict: str) -> int:
    """Count the checks with a verdict: "pass", "fail" or "not comparable"."""
    return sum(c.verdict == verdict for c in report.checks)


def format_bound(check: Check) -> str:
    """Format the bound of a check with its sign and source: "≤ 1e-05 measured"."""
    if check.bound is None or (check.source == "exact" and check.bound == 0):
        return check.source
    sign = "≥" if check.name.rpartition(".")[2].startswith("min") else "≤"
    return f"{sign} {format_number(check.bound)} {check.source}".rstrip()


def list_facts(report: Report) -> list[tuple[str, str, str]]:
    """List what was compared: [(what, value of this run, value of the reference)]; values are "" if not known."""
    ours = _collect_facts(report.candidate)
    theirs = _collect_facts(report.reference) if report.reference is not None else {}
    out = [(k, ours.get(k, ""), theirs.get(k, "")) for k in ours if ours[k] or theirs.get(k)]
    if sides := _describe_environments(report, 12):
        out.append(("environment", *sides))
    bounds = f"profile {escape_unprintable(report.profile)}" + (
        ", calibrated with this job" if report.calibrated else ""
    )
    return [*out, ("bounds", bounds, "")]


def _has_other_python(report: Report) -> bool:
    """Tell whether the reference is a run in another Python than this run."""
    reference = report.reference
    places = [t.environment.get("executable") for t in (report.candidate, reference) if t is not None]
    return reference is not None and not is_recording(reference) and len(set(places)) > 1


def _describe_environments(report: Report, most: int) -> tuple[str, str] | None:
    """Return texts about the environments of (run, reference): versions, and the path of Python.

    Of packages other than torch and transformers, at most `most` that differ are named. None if no version is known to
    differ and both ran in one Python.
    """
    reference, got = report.reference, report.candidate
    changed = {} if reference is None else find_package_differences(reference, got)
    if reference is None or not (changed or _has_other_python(report)):
        return None
    first = ("python", "torch", "transformers")
    texts = []
    for trace, side in ((got, 1), (reference, 0)):
        versions, path = collect_package_versions(trace), trace.environment.get("executable")
        known = [f"{name.replace('python', 'Python')} {versions[name]}" for name in first if name in versions]
        others = [f"{name} {v[side]}" for name, v in changed.items() if name not in first]
        text = ", ".join([*known, *([list_first(others, most)] if others else [])])
        texts.append(escape_unprintable(f"{text} ({path})" if path else text, 60))
    return texts[0], texts[1]


def _collect_facts(trace: Trace) -> dict[str, str]:
    """Return {what: text} about the job of one trace, such as "ranks"; a text is "" if it is not known."""
    mesh = " x ".join(f"{escape_unprintable(k, 24)} {v}" for k, v in trace.mesh.items())
    ranks = "" if trace.world_size is None else f"{trace.world_size}" + (f" ({mesh})" if mesh else "")
    batch = "" if trace.global_batch is None else f"{trace.global_batch} sequences"
    if trace.sequence is not None:
        batch += f" of {trace.sequence} tokens" if batch else f"sequences of {trace.sequence} tokens"
    if trace.micro_batch is not None:
        batch += f", {trace.micro_batch} at a time"
    return {
        "source": escape_unprintable(trace.source, 120),
        "layout": escape_unprintable(trace.layout or ""),
        "loaded by": _describe_loaders(trace),
        "step": f"{trace.start:,}",
        "ranks": ranks,
        "dtype": escape_unprintable(trace.dtype or ""),
        "device": escape_unprintable(describe_device(trace), 60),
        "parameters": "" if trace.parameters is None else f"{trace.parameters:,}",
        "batch": batch,
        "data": escape_unprintable(trace.data or "", 80)
        + ("" if trace.seed is None or trace.data == OF_BUILD else f", seed {trace.seed}"),
        "job": _describe_recipe(trace.recipe),
        "scheduler": escape_unprintable(trace.scheduler or "", 40),
        "clipping": "" if trace.clip is None else f"grad norm {format_number(trace.clip)}",
        "dropout": "on" if trace.dropout else "switched off" if trace.dropout_off else "",
    }


def _describe_recipe(recipe: str | None) -> str:
    """Return a text on what the job was built from: module.py:build, or the model of a configuration; "" for None."""
    shown = escape_unprintable(recipe or "", 80)
    return shown if not shown or ":" in shown else f"the model of config.json in {shown}"


def _describe_loaders(trace: Trace) -> str:
    """Return a text about which reader loaded what: "torch's dcp.load (model, optim), ckpttool (scheduler)".

    "" if that is not known; only the reader's name if one loaded everything.
    """
    by: dict[str, list[str]] = {}
    for component, reader in trace.loaders.items():
        by.setdefault(reader, []).append(component)
    return ", ".join(f"{who} ({', '.join(what)})" if len(by) > 1 else who for who, what in by.items())


def describe_device(trace: Trace) -> str:
    """Return the kind of device, with its model if known: "cuda, NVIDIA H100"; "" if nothing is known."""
    name = trace.environment.get("gpu")
    return ", ".join(str(x) for x in (trace.device, name) if x)


def compute_relative_difference(got: float | None, expected: float | None) -> float | None:
    """Return |got - expected| / |expected|, with the special cases of `compute_relative_deviation`; None if one of the
    numbers is None."""
    return None if got is None or expected is None else compute_relative_deviation(got, expected)


@dataclass
class ComparedStep:
    """One step of the run, with that of the reference if it has it. `bounds` and `differences` by quantity."""

    got: Step
    expected: Step | None = None
    bounds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def batch(self) -> bool | None:
        """Return whether run and reference used the same batch in this step; None if the reference lacks the step, or
        one of them did not record its batch."""
        if self.expected is None or self.got.batch is None or self.expected.batch is None:
            return None
        return self.got.batch == self.expected.batch

    @property
    def outside(self) -> bool:
        """Return whether the batches of run and reference differ, or a quantity by more than its bound."""
        return self.batch is False or any(not d <= self.bounds.get(q, math.inf) for q, d in self.differences.items())


def pair_steps_with_reference(report: Report) -> list[ComparedStep]:
    """Pair each step of the run with that of the reference, in order, with differences and bounds."""
    expected = {s.step: s for s in report.reference.steps} if report.reference is not None else {}
    out: list[ComparedStep] = []
    common = 0
    for step in report.candidate.steps:
        row = ComparedStep(step, expected.get(step.step))
        if row.expected is not None:
            for q in QUANTITIES:
                difference = compute_relative_difference(getattr(step, q), getattr(row.expected, q))
                if difference is not None:
                    row.differences[q] = difference
                bounds = report.envelope.get(q, [])
                if common < len(bounds):
                    row.bounds[q] = bounds[common]
            common += 1
        out.append(row)
    return out


def list_speed(report: Report) -> list[tuple[str, str]]:
    """List speed, memory and the costs of the load: [(what, value with its unit)], as far as known."""
    out: list[tuple[str, str]] = []
    for what, value, text in (
        ("MFU", find_metric(report, "mfu"), "{:.3f}"),
        ("tokens/s", find_metric(report, "tokens_per_second"), "{:,.0f}"),
        ("step", find_metric(report, "step_seconds"), "{:.3g} s"),
        ("load", find_metric(report, "load_seconds"), "{:.3g} s"),
        ("load rate", find_metric(report, "load_gb_per_second"), "{:.3g} GB/s"),
        ("save", find_metric(report, "save_seconds"), "{:.3g} s"),
        ("peak reserved", find_metric(report, "reserved_gib"), "{:.2f} GiB"),
        ("peak allocated", find_metric(report, "allocated_gib"), "{:.2f} GiB"),
        ("memory left", find_metric(report, "headroom_gib"), "{:.2f} GiB"),
    ):
        if value is not None:
            out.append((what, text.format(value)))
    return [*out, *describe_load_costs(report.candidate.loads)]


def describe_load_costs(loads: Sequence[LoadCostRecord]) -> list[tuple[str, str]]:
    """Describe what a load cost the ranks: [(what, text)] for time, bytes and peaks of memory.

    A text is the least, the median and the most of all ranks, each with its unit, and the rank with the most; only the
    number if the cost of one rank alone is known.

    Args:
        loads: the costs of each rank.
    """
    out: list[tuple[str, str]] = []
    read = max((m["bytes"] for m in loads), default=0)
    for what, key, unit, digits in (
        ("load time of a rank", "seconds", 1.0, "{:.3g} s"),
        ("bytes read by a rank", "bytes", *((1e9, "{:.3g} GB") if read >= 1e9 else (1e6, "{:.3g} MB"))),
        ("peak host memory of a load", "host_bytes", 2.0**30, "{:.3g} GiB"),
        ("peak device memory of a load", "device_bytes", 2.0**30, "{:.3g} GiB"),
    ):
        rows = [(float(x) / unit, m["rank"]) for m in loads if isinstance(x := m.get(key), (int, float))]
        if not rows:
            continue
        most, rank = max(rows, key=lambda row: row[0])
        if len(rows) == 1:
            out.append((what, digits.format(most)))
            continue
        least, middle = min(x for x, _ in rows), median(x for x, _ in rows)
        numbers = ", ".join(digits.format(x) for x in (least, middle, most))
        out.append((what, f"{numbers} (least, median, most: rank {rank})"))
    return out


def find_metric(report: Report, key: str) -> float | None:
    """Return a metric of a report, or else the same computed from the run's trace; None if it is not known.

    Args:
        report: the report.
        key: name of the metric as in `compute_metrics`; it ends with the unit, such as "step_seconds".
    """
    trace = report.candidate
    numbers = compute_metrics(trace) | report.metrics
    if key == "step_seconds" and key not in numbers:  # of a run with one step, the time of that, which warms up
        seconds = sorted(s.seconds for s in trace.steps[1:] or trace.steps if s.seconds is not None)
        return seconds[len(seconds) // 2] if seconds else None
    return numbers.get(key)
