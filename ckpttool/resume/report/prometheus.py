"""The report as metrics in Prometheus' text format, for the textfile collector of node_exporter.

render_metrics(report) -> str
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence

from ..._version import __version__
from ...printable import escape_unprintable, shorten_middle
from ..compare.verdict import Report
from .facts import count_checks, describe_device, find_metric, pair_steps_with_reference

__all__ = ["METRICS", "format_metrics", "render_metrics"]


#: Every metric, and its HELP; all are gauges. docs/how-to/metrics.md says more, alerts.yml uses them.
METRICS = {
    "verdict": "1 for the verdict of the last run, 0 for the others.",
    "check": "Whether a check passed (1) or failed (0); absent where it could not be judged.",
    "checks_failed": "How many checks failed.",
    "checks_not_comparable": "How many checks could not be judged.",
    "not_verified": "How many things the run did not verify; report.json lists them.",
    "timestamp_seconds": "When the run was judged, in seconds since 1970.",
    "checkpoint_step": "The step of the checkpoint that was loaded.",
    "steps": "How many steps were run after loading.",
    "steps_not_finite": "How many of these steps had a loss or a grad norm that is not finite.",
    "loss": "The loss of the last step.",
    "loss_difference_ratio": "The largest difference between losses of run and reference, relative to the reference.",
    "grad_norm": "The largest grad norm before clipping.",
    "grad_norm_expected": "The mean grad norm of the reference in the same steps, or else of the other steps of the "
    "run.",
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
_WORDS = ("pass", "fail", "does not fit", "gate failed", "not comparable", "no reference")
#: Labels of info that two runs must share for their times to be compared.
_SAME_JOB = ("world_size", "device", "dtype", "parameters", "global_batch", "micro_batch", "sequence")


def render_metrics(report: Report, *, training: str = "", now: float | None = None, previous: str | None = None) -> str:
    """Return the metrics of a report in Prometheus' text format, for the textfile collector of node_exporter. What is
    not known is left out.

    Args:
        training: a label on everything, so that files of several trainings can lie in one folder; "" for none.
        now: time of the report, in seconds since 1970; None for the time of the call.
        previous: the text that this one replaces, whose step time is carried on if it was of the same job; None if
            there is none.
    """
    trace = report.candidate
    every = pair_steps_with_reference(report)
    found: dict[str, list[tuple[dict[str, object], float]]] = {}

    def add(metric: str, value: object, **labels: object) -> None:
        if isinstance(value, (int, float)):
            found.setdefault(metric, []).append((labels, float(value)))

    for word in _WORDS:
        add("verdict", word == report.word, verdict=word)
    for c in report.checks:
        if c.verdict != "not comparable":
            add("check", c.verdict == "pass", stage=c.stage, name=c.name)
    add("checks_failed", count_checks(report, "fail"))
    add("checks_not_comparable", count_checks(report, "not comparable"))
    add("not_verified", len(report.not_verified))
    add("timestamp_seconds", round(time.time() if now is None else now, 3))
    add("checkpoint_step", trace.start)
    add("steps", len(every))
    if every:
        numbers = [(s.loss, s.grad_norm if s.grad_norm is not None else 0.0) for s in trace.steps]
        add("steps_not_finite", sum(not all(map(math.isfinite, pair)) for pair in numbers))
        add("loss", trace.steps[-1].loss)
    add("loss_difference_ratio", _find_largest([r.differences["loss"] for r in every if "loss" in r.differences]))
    norms = [s.grad_norm for s in trace.steps if s.grad_norm is not None]
    add("grad_norm", _find_largest(norms))
    expected = [r.expected.grad_norm for r in every if r.expected is not None and r.expected.grad_norm is not None]
    expected = [x for x in expected or sorted(norms)[:-1] if math.isfinite(x)]
    add("grad_norm_expected", sum(expected) / len(expected) if expected else None)
    for key in ("step_seconds", "tokens_per_second", "mfu", "load_seconds", "save_seconds"):
        add(key, find_metric(report, key))
    rate = find_metric(report, "load_gb_per_second")
    add("load_bytes_per_second", None if rate is None else rate * 1e9)
    for m in trace.memory:
        for name, key in (("peak_reserved", "reserved"), ("peak_allocated", "allocated"), ("device_memory", "total")):
            add(f"{name}_bytes", m.get(f"{key}_bytes"), rank=m.get("rank", ""))
    info = {
        "version": report.versions.get("ckpttool", __version__),
        "torch": trace.environment.get("torch"),
        "source": trace.source,
        "layout": trace.layout,
        "profile": report.profile,
        "world_size": trace.world_size,
        "device": describe_device(trace),
        "dtype": trace.dtype,
        "parameters": trace.parameters,
        "global_batch": trace.global_batch,
        "micro_batch": trace.micro_batch,
        "sequence": trace.sequence,
        "reference": report.reference.source if report.reference is not None else None,
        "reference_world_size": report.reference.world_size if report.reference is not None else None,
        "reference_torch": report.reference.environment.get("torch") if report.reference is not None else None,
    }
    add("info", 1, **{k: v for k, v in info.items() if v not in (None, "")})
    if previous is not None:
        labels, before = _parse_previous_metrics(previous)
        if all(labels.get(k, "") == _escape_label("" if info[k] is None else info[k]) for k in _SAME_JOB):
            add("previous_step_seconds", before)
    kinds = {name: ("gauge", text) for name, text in METRICS.items()}
    return format_metrics("ckpttool_resume", kinds, found, {"training": training} if training else {})


def format_metrics(
    prefix: str,
    metrics: Mapping[str, tuple[str, str]],
    found: Mapping[str, Sequence[tuple[Mapping[str, object], float]]],
    common: Mapping[str, object],
) -> str:
    """Return samples in Prometheus' text format.

    Args:
        prefix: what all names begin with.
        metrics: {name: (type, HELP)}, in the order of the text.
        found: {name: [(labels, value)]}; metrics without a sample are left out.
        common: labels on everything.
    """
    lines: list[str] = []
    for name, (kind, text) in metrics.items():
        if name in found:
            full = f"{prefix}_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            for labels, value in found[name]:
                inside = ",".join(f'{k}="{_escape_label(v)}"' for k, v in {**common, **labels}.items())
                lines.append(
                    f"{full}{{{inside}}} {_format_value(value)}" if inside else f"{full} {_format_value(value)}"
                )
    return "\n".join(lines) + "\n"


def _escape_label(x: object) -> str:
    """Return the text of a label's value, escaped for Prometheus, of at most 200 characters before that."""
    return shorten_middle(escape_unprintable(x), 200).replace("\\", r"\\").replace('"', r"\"")


def _format_value(x: float) -> str:
    """Format a number as Prometheus reads it: "NaN", "+Inf", "-Inf", or digits."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "+Inf" if x > 0 else "-Inf"
    return repr(int(x)) if x == int(x) and abs(x) < 2**53 else repr(x)


def _find_largest(numbers: Sequence[float]) -> float | None:
    """Return the largest number; NaN if one is NaN, None if there is none."""
    if any(math.isnan(x) for x in numbers):
        return math.nan
    return max(numbers, default=None)


def _parse_previous_metrics(text: str) -> tuple[dict[str, str], float | None]:
    """Parse metrics that `render_metrics` made: ({label of the info metric: its escaped value}, step seconds or
    None)."""
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
