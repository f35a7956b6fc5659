"""Speed and memory of a run, and the limits that the user set for them.

    metrics(trace, peak_tflops)                         {"mfu": 0.43, "step_seconds": 1.8, "reserved_gib": 61.2, ...}
    gates(trace, numbers, min_mfu=0.40, ...)            a Check for each limit

MFU is 6 x parameters x tokens of a step / (seconds of a step x ranks x peak of a device): the arithmetic of a dense
model's matrices, forward and backward, without attention and without what activation checkpointing recomputes (as in
PaLM, arXiv 2204.02311, without its term for attention). The peak is that of dense bf16. If it is neither known nor
given, there is no MFU; it is never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import median

from ...errors import argument
from ..trace.model import Trace
from .bounds import find_compute_precision
from .verdict import Check

__all__ = ["PEAKS", "check_gates", "compute_metrics", "find_peak_flops"]

#: (pattern of the name that CUDA gives a device, dense bf16 FLOP/s, where the number is published). First match counts.
#: Numbers with sparsity are halved. Not listed: devices without bf16 (V100, T4), H20 (no data sheet was found), and
#: H100 NVL (its data sheets disagree: 1671 TFLOPS, and before that 3958 for two).
PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"\bGB200\b", 2500e12, "NVIDIA GB200 NVL72 data sheet: 5 PFLOPS a GPU with sparsity"),
    (r"\bB200\b", 2250e12, "NVIDIA Blackwell data sheet, HGX B200: 4.5 PFLOPS a GPU with sparsity"),
    (r"\bGH200\b", 989e12, "NVIDIA GH200 data sheet: 1979 TFLOPS with sparsity"),
    (r"\bH200 NVL\b", 835e12, "NVIDIA H200 data sheet, H200 NVL: 1671 TFLOPS with sparsity"),
    (r"\bH200\b", 989e12, "NVIDIA H200 data sheet, H200 SXM: 1979 TFLOPS with sparsity"),
    (r"\bH100 PCIe\b", 756e12, "NVIDIA H100 data sheet of 2022, H100 PCIe: 1513 TFLOPS with sparsity"),
    (r"\bH100\b.*\bHBM3\b|\bH100 SXM", 989e12, "NVIDIA H100 data sheet, H100 SXM: 1979 TFLOPS with sparsity"),
    (r"\bA100\b", 312e12, "NVIDIA A100 data sheet: 312 TFLOPS"),
    (r"\bA40\b", 149.7e12, "NVIDIA A40 data sheet: 149.7 TFLOPS"),
    (r"\bA30\b", 165e12, "NVIDIA A30 data sheet: 165 TFLOPS"),
    (r"\bA10\b", 125e12, "NVIDIA A10 data sheet: 125 TFLOPS"),
    (r"\bL40S\b", 362e12, "NVIDIA L40S data sheet: 362.05 TFLOPS"),
    (r"\bL40\b", 181e12, "NVIDIA L40 data sheet: 181.05 TFLOPS"),
    (r"\bL4\b", 121e12, "NVIDIA L4 data sheet: 242 TFLOPS with sparsity"),
    (r"\bRTX 4090\b(?! D| Laptop)", 165.2e12, "NVIDIA Ada architecture paper: 165.2 TFLOPS, accumulated in fp32"),
    (r"\bRTX 3090\b(?! Ti)", 71e12, "NVIDIA GA102 architecture paper: 71 TFLOPS, accumulated in fp32"),
    (r"\bMI300X\b|\bMI325X\b", 1307.4e12, "AMD Instinct MI300X and MI325X data sheets: 1307.4 TFLOPS"),
)


def find_peak_flops(device: str | None) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOP/s, by its CUDA device name; None if `PEAKS` lacks it, for a part of a
    GPU (MIG), or if `device` is None."""
    for pattern, flops, _ in PEAKS:
        if device and " MIG " not in device and re.search(pattern, device):
            return flops
    return None


def compute_metrics(trace: Trace, peak_tflops: float | None = None) -> dict[str, float]:
    """Compute speed and memory of a run, {"step_seconds": 0.5, ...}, as far as known; keys end in their unit, "mfu" is
    from 0 to 1.

    step_seconds is the median without the first step, which warms up. Memory is that of the rank that took most;
    headroom_gib is what is left on the fullest device.

    Args:
        trace: the run.
        peak_tflops: peak of one device in the dtype of the run, in TFLOP/s; None: of dense bf16, by the device's name.
    """
    out: dict[str, float] = {}
    seconds = [s.seconds for s in trace.steps[1:] if s.seconds is not None and s.seconds > 0]
    tokens = _count_tokens_per_step(trace)
    if seconds:
        out["step_seconds"] = median(seconds)
        if tokens:
            out["tokens_per_second"] = tokens / out["step_seconds"]
        peak = peak_tflops * 1e12 if peak_tflops is not None else _find_run_peak_flops(trace)
        if tokens and peak and trace.parameters and trace.world_size:
            out["mfu"] = 6 * trace.parameters * tokens / (out["step_seconds"] * trace.world_size * peak)
    if trace.load_seconds is not None:
        out["load_seconds"] = trace.load_seconds
        if trace.load_bytes and trace.load_seconds > 0:
            out["load_gb_per_second"] = trace.load_bytes / trace.load_seconds / 1e9
    if isinstance(save := trace.roundtrip.get("save_seconds"), (int, float)):
        out["save_seconds"] = float(save)
    for what in ("reserved", "allocated"):
        peaks = [x for m in trace.memory if isinstance(x := m.get(f"{what}_bytes"), int)]
        if peaks:
            out[f"{what}_gib"] = max(peaks) / 2**30
    left = [
        m["total_bytes"] - m["reserved_bytes"] for m in trace.memory if {"total_bytes", "reserved_bytes"} <= m.keys()
    ]
    if left:
        out["headroom_gib"] = min(left) / 2**30
    return out


def _count_tokens_per_step(trace: Trace) -> float | None:
    """Return the tokens of one step over all ranks; None if unknown. It is the median if only single steps are
    known."""
    if trace.global_batch and trace.sequence:
        return float(trace.global_batch * trace.sequence)
    known = [s.tokens for s in trace.steps if s.tokens]
    return float(median(known)) if known else None


def _find_device_name(trace: Trace) -> str | None:
    """Return the CUDA name of the run's GPU, or "cuda" or "cpu" if that was not recorded; None if nothing was."""
    name = trace.environment.get("gpu") or trace.device
    return str(name) if name else None


def _find_run_peak_flops(trace: Trace) -> float | None:
    """Return the dense bf16 peak of the run's device in FLOP/s; None if it is not known, or if the run is not in
    bf16."""
    if trace.dtype is None or find_compute_precision(None, trace) != "bf16":
        return None  # fp32 has another peak, TF32 yet another
    return find_peak_flops(_find_device_name(trace))


def check_gates(
    trace: Trace,
    metrics: Mapping[str, float],
    *,
    min_mfu: float | None = None,
    max_reserved_gib: float | None = None,
    max_step_seconds: float | None = None,
    max_load_seconds: float | None = None,
) -> list[Check]:
    """Check the user's limits (gates) that are not None. A gate fails if its number is not known.

    Args:
        trace: the run.
        metrics: what `compute_metrics` returned for the run.
        min_mfu: least model FLOPs utilisation, from 0 to 1.
        max_reserved_gib, max_step_seconds, max_load_seconds: largest values, in the unit that the name ends in.
    """
    out = []
    for name, key, limit, unit in (
        ("min_mfu", "mfu", min_mfu, ""),
        ("max_reserved_gib", "reserved_gib", max_reserved_gib, " GiB"),
        ("max_step_seconds", "step_seconds", max_step_seconds, " s"),
        ("max_load_seconds", "load_seconds", max_load_seconds, " s"),
    ):
        if limit is None:
            continue
        found = metrics.get(key)
        least = name.startswith("min")
        word = "at least" if least else "at most"
        if found is None or not math.isfinite(found):
            text = f"{_WHAT[key]} is not known: {_explain_unknown_metric(trace, key)}"
            out.append(Check.of(f"gate.{name}", False, text, None, limit, "given"))
            continue
        good = found >= limit if least else found <= limit
        text = f"{_WHAT[key]} is {found:.4g}{unit}, {word} {limit:g}{unit} is required"
        copied = max((m.get("measuring_bytes", 0) for m in trace.memory), default=0)
        if key == "reserved_gib" and copied:
            text += f" (without {copied / 2**30:.2g} GiB for the copy of the parameters that measures updates)"
        out.append(Check.of(f"gate.{name}", good, text, found, limit, "given"))
    return out


_WHAT = {
    "mfu": "MFU",
    "reserved_gib": "peak reserved memory",
    "step_seconds": "the time of a step",
    "load_seconds": "the time of loading",
}


def _explain_unknown_metric(trace: Trace, key: str) -> str:
    """Return why a metric of a run is not known and which option would help, as a text.

    `key` is a key of what `compute_metrics` returns.
    """
    if key == "reserved_gib":
        return "no rank reported the memory of a device; run on GPUs"
    if key == "load_seconds":
        return "the run did not time the load"
    if not any(s.seconds for s in trace.steps[1:]):
        return f"the first step warms up; run at least two steps ({argument('steps', 2)})"
    if not _count_tokens_per_step(trace):
        return (
            f"the run does not say how many tokens a step has; give {argument('global_batch')} and "
            f"{argument('sequence')}"
        )
    if not trace.parameters or not trace.world_size:
        return "the run does not say how many parameters and ranks it has"
    device = _find_device_name(trace) or "no device"
    return (
        f"the peak of {device} in {trace.dtype or 'an unknown dtype'} is not in the list; give "
        f"{argument('peak_tflops')}"
    )
