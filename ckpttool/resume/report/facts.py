"""What every form of the report shows: the verdict in a sentence, what was compared, the steps, the speed.

    sentence(report)     the verdict, and the likely cause or the first failed check
    facts(report)        run and reference side by side
    rows(report)         each step next to the reference's step of the same number, with the envelope
    speed(report)        speed and memory, as far as known

Texts are clean (`text.clean`). `terminal`, `junit`, `prometheus` and `page` lay them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..compare.differences import deviation
from ..compare.misfit import advice
from ..compare.verdict import Check, Report
from ..job.load_cost import spread
from ..text import clean, number
from ..trace.model import OF_BUILD, Step, Trace

__all__ = [
    "QUANTITIES",
    "Row",
    "count",
    "device_of",
    "facts",
    "known",
    "limit",
    "relative",
    "rows",
    "sentence",
    "speed",
]

#: What is compared step by step: the field of Step, and its name in words.
QUANTITIES = {"loss": "loss", "grad_norm": "grad norm", "update_norm": "update norm"}


def sentence(report: Report) -> str:
    """The verdict in a sentence."""
    failed = [c for c in report.checks if c.verdict == "fail"]
    continuity = [c for c in failed if c.stage != "gate"]
    total, aside = len(report.checks), count(report, "not comparable")
    left = f" {aside} could not be compared." if aside else ""
    if report.word == "does not fit":
        return (
            "The checkpoint does not fit the job, so nothing was judged. "
            f"{_said(advice(report.candidate), capital=True)}"
        )
    if report.word == "fail":
        if report.causes:
            return f"{len(failed)} of {total} checks failed. Likely cause: {_said(report.causes[0].text)}"
        return f"{len(failed)} of {total} checks failed. {_said(continuity[0].text, capital=True)}"
    if report.word == "not comparable":
        why = [c.text for c in report.checks if c.name == "step1.loss" and c.verdict == "not comparable"]
        why.append("there was neither optimizer state, nor an update, nor a loss after the first step to compare")
        return f"Run and reference could not be compared. {_said(why[0], capital=True)}"
    if report.word == "gate failed":
        goes_on = (
            "Training goes on as the reference does, but" if report.reference is not None else "The run is sound, but"
        )
        return (
            f"{goes_on} {_plural(len(failed), 'threshold was', 'thresholds were')} not met. "
            f"{_said(failed[0].text, capital=True)}"
        )
    if report.word == "no reference":
        return f"Without a reference, whether training goes on as before was not judged. {_passed(report)}{left}"
    return f"Training goes on as the reference does. {_passed(report)}{left}"


def _said(text: str, capital: bool = False) -> str:
    """The text of a check or a cause as the end of a sentence, or as one."""
    text = clean(text, 60)
    return (text[:1].upper() + text[1:] if capital else text) + ("" if text.endswith((".", "!", "?")) else ".")


def _passed(report: Report) -> str:
    return f"{count(report, 'pass')} of {len(report.checks)} checks passed."


def _plural(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def count(report: Report, verdict: str) -> int:
    """How many checks have a verdict."""
    return sum(c.verdict == verdict for c in report.checks)


def limit(check: Check) -> str:
    """The bound of a check with its sign and source: "≤ 1e-05 measured"."""
    if check.bound is None or (check.source == "exact" and check.bound == 0):
        return check.source
    sign = "≥" if check.name.rpartition(".")[2].startswith("min") else "≤"
    return f"{sign} {number(check.bound)} {check.source}".rstrip()


def facts(report: Report) -> list[tuple[str, str, str]]:
    """What was compared: (what, of this run, of the reference), "" if not known."""
    ours = _facts(report.candidate)
    theirs = _facts(report.reference) if report.reference is not None else {}
    out = [(k, ours.get(k, ""), theirs.get(k, "")) for k in ours if ours[k] or theirs.get(k)]
    bounds = f"profile {clean(report.profile)}" + (", calibrated with this job" if report.calibrated else "")
    return [*out, ("bounds", bounds, "")]


def _facts(trace: Trace) -> dict[str, str]:
    mesh = " x ".join(f"{clean(k, 24)} {v}" for k, v in trace.mesh.items())
    ranks = "" if trace.world_size is None else f"{trace.world_size}" + (f" ({mesh})" if mesh else "")
    batch = "" if trace.global_batch is None else f"{trace.global_batch} sequences"
    if trace.sequence is not None:
        batch += f" of {trace.sequence} tokens" if batch else f"sequences of {trace.sequence} tokens"
    if trace.micro_batch is not None:
        batch += f", {trace.micro_batch} at a time"
    return {
        "source": clean(trace.source, 120),
        "layout": clean(trace.layout or ""),
        "step": f"{trace.start:,}",
        "ranks": ranks,
        "dtype": clean(trace.dtype or ""),
        "device": clean(device_of(trace), 60),
        "parameters": "" if trace.parameters is None else f"{trace.parameters:,}",
        "batch": batch,
        "data": clean(trace.data or "", 80)
        + ("" if trace.seed is None or trace.data == OF_BUILD else f", seed {trace.seed}"),
        "job": clean(trace.recipe or "", 80),
        "scheduler": clean(trace.scheduler or "", 40),
        "clipping": "" if trace.clip is None else f"grad norm {number(trace.clip)}",
        "dropout": "on" if trace.dropout else "switched off" if trace.dropout_off else "",
    }


def device_of(trace: Trace) -> str:
    """The kind of device, with its name if known."""
    name = trace.environment.get("gpu")
    return ", ".join(str(x) for x in (trace.device, name) if x)


def relative(got: float | None, expected: float | None) -> float | None:
    """|got - expected| / |expected|; None if one of them is not known, NaN if one is NaN."""
    return None if got is None or expected is None else deviation(got, expected)


@dataclass
class Row:
    """One step of the run, with that of the reference if it has it. `bounds` and `differences` by quantity."""

    got: Step
    expected: Step | None = None
    bounds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def batch(self) -> bool | None:
        """Whether both used the same batch; None if not known."""
        if self.expected is None or self.got.batch is None or self.expected.batch is None:
            return None
        return self.got.batch == self.expected.batch

    @property
    def outside(self) -> bool:
        """Whether a value is outside of the envelope."""
        return self.batch is False or any(not d <= self.bounds.get(q, math.inf) for q, d in self.differences.items())


def rows(report: Report) -> list[Row]:
    """The steps of the run, in order."""
    expected = {s.step: s for s in report.reference.steps} if report.reference is not None else {}
    out: list[Row] = []
    common = 0
    for step in report.candidate.steps:
        row = Row(step, expected.get(step.step))
        if row.expected is not None:
            for q in QUANTITIES:
                difference = relative(getattr(step, q), getattr(row.expected, q))
                if difference is not None:
                    row.differences[q] = difference
                bounds = report.envelope.get(q, [])
                if common < len(bounds):
                    row.bounds[q] = bounds[common]
            common += 1
        out.append(row)
    return out


def speed(report: Report) -> list[tuple[str, str]]:
    """Speed and memory as (what, value with its unit), as far as known."""
    out: list[tuple[str, str]] = []
    for what, value, text in (
        ("MFU", known(report, "mfu"), "{:.3f}"),
        ("tokens/s", known(report, "tokens_per_second"), "{:,.0f}"),
        ("step", known(report, "step_seconds"), "{:.3g} s"),
        ("load", known(report, "load_seconds"), "{:.3g} s"),
        ("load rate", known(report, "load_gb_per_second"), "{:.3g} GB/s"),
        ("save", known(report, "save_seconds"), "{:.3g} s"),
        ("peak reserved", known(report, "reserved_gib"), "{:.2f} GiB"),
        ("peak allocated", known(report, "allocated_gib"), "{:.2f} GiB"),
        ("memory left", known(report, "headroom_gib"), "{:.2f} GiB"),
    ):
        if value is not None:
            out.append((what, text.format(value)))
    return [*out, *spread(report.candidate.loads)]


def known(report: Report, key: str) -> float | None:
    """One of the metrics, as computed for the gates, or else from the trace."""
    value: Any = report.metrics.get(key)
    trace = report.candidate
    if value is None and key == "load_seconds":
        value = trace.load_seconds
    if value is None and key == "load_gb_per_second" and trace.load_bytes and trace.load_seconds:
        value = trace.load_bytes / trace.load_seconds / 1e9
    if value is None and key == "save_seconds":
        value = trace.roundtrip.get("save_seconds")
    if value is None and key == "step_seconds":
        seconds = sorted(
            s.seconds for s in trace.steps[1:] or trace.steps if s.seconds is not None
        )  # the first warms up
        value = seconds[len(seconds) // 2] if seconds else None
    if value is None and key in ("reserved_gib", "allocated_gib"):
        peaks = [m[key.replace("gib", "bytes")] for m in trace.memory if m.get(key.replace("gib", "bytes")) is not None]
        value = max(peaks) / 2**30 if peaks else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
