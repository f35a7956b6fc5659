"""How many cores, and how much memory, this process may use: its affinity mask, and the cgroups of its container or
job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

__all__ = ["cores", "memory"]


def cores() -> int:
    """Cores that this process may use: its affinity mask, and the CPU quota of its cgroup and of those above."""
    n = len(os.sched_getaffinity(0))
    return max(1, min(n, math.floor(min(_quotas(), default=n))))


def memory() -> int | None:
    """Bytes that the machine has available, or the least limit of the cgroups that this process is in; None if nothing
    says so."""
    found = [
        int(m[1]) << 10 for line in _lines("/proc/meminfo") if (m := re.fullmatch(r"MemAvailable: +(\d+) kB", line))
    ]
    return min([*found, *_memory_limits()], default=None)


def _memory_limits(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[int]:
    """The limits, in bytes, of the cgroups that this process is in: cgroup v2, or v1's controller `memory`."""
    for folder, v1 in _folders("memory", root, membership):
        limit = _lines(f"{folder}/memory.limit_in_bytes" if v1 else f"{folder}/memory.max")
        if limit and limit[0].isdecimal():  # "max": none
            yield int(limit[0])


def _quotas(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[float]:
    """The quotas, in cores, of the cgroups that this process is in: cgroup v2, or v1's controller `cpu`."""
    for folder, v1 in _folders("cpu", root, membership):
        quota = _lines(f"{folder}/cpu.max")
        if v1:
            quota = _lines(f"{folder}/cpu.cfs_quota_us") + _lines(f"{folder}/cpu.cfs_period_us")
        if m := re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", " ".join(quota)):  # "max" and -1: none
            yield int(m[1]) / int(m[2])


def _folders(controller: str, root: str, membership: str) -> Iterator[tuple[str, bool]]:
    """(folder, whether of cgroup v1) of the cgroups with a controller that this process is in, and of those above."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = os.path.join(root, controller) if controllers else root
        while True:  # in a container, the path may be that of the host; its root is there in any case
            yield os.path.join(base, path.strip("/")), bool(controllers)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []
