"""What a load costs a rank: time, bytes that it read, and the most memory that it had meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

__all__ = ["LoadCost", "describe_load_costs"]


class LoadCost:
    """Measures from now on. `bytes` are those of tensors that this rank read, to be set by the caller."""

    def __init__(self, device: str) -> None:
        self.bytes = 0
        self._on_gpu, self._began = device == "cuda", time.monotonic()
        # on Linux; elsewhere the peak is that of the whole process
        with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as f:
            f.write("5")
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def measured(self) -> dict[str, Any]:
        """{"seconds", "bytes", "host_bytes", "device_bytes"}: peaks of resident and of allocated memory, the latter
        None on CPU."""
        device = None
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            device = torch.cuda.max_memory_allocated()
        seconds = time.monotonic() - self._began
        return {"seconds": seconds, "bytes": self.bytes, "host_bytes": _peak_host_bytes(), "device_bytes": device}


def _peak_host_bytes() -> int:
    """The most resident memory since it was last cleared, in bytes."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", encoding="ascii", errors="replace") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def describe_load_costs(loads: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Time, bytes and memory over the ranks as (what, minimum, median and maximum, and which rank has it)."""
    out: list[tuple[str, str]] = []
    read = max((m["bytes"] for m in loads), default=0)
    for what, key, unit, digits in (
        ("load time of a rank", "seconds", 1.0, "{:.3g} s"),
        ("bytes read by a rank", "bytes", *((1e9, "{:.3g} GB") if read >= 1e9 else (1e6, "{:.3g} MB"))),
        ("peak host memory of a load", "host_bytes", 2.0**30, "{:.3g} GiB"),
        ("peak device memory of a load", "device_bytes", 2.0**30, "{:.3g} GiB"),
    ):
        rows = [(float(m[key]) / unit, m["rank"]) for m in loads if m.get(key) is not None]
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
