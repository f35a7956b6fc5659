"""How many cores, and how much memory, this process may use: its affinity mask, and the cgroups of its container or
job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

__all__ = ["usable_cores", "usable_memory"]


def usable_cores() -> int:
    """Count the cores that this process may use, by its affinity mask and by the CPU quotas of its cgroup and of those
    above; at least 1."""
    n = len(os.sched_getaffinity(0))
    return max(1, min(n, math.floor(min(_quotas(), default=n))))


def usable_memory() -> int | None:
    """Return the bytes of memory that this process may take: what the machine has available, or the least limit of the
    cgroups that the process is in; None if nothing says so."""
    found = [
        int(m[1]) << 10
        for line in _read_lines("/proc/meminfo")
        if (m := re.fullmatch(r"MemAvailable: +(\d+) kB", line))
    ]
    return min([*found, *_memory_limits()], default=None)


def _memory_limits(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[int]:
    """Yield the limits, in bytes, of the cgroups that this process is in: cgroup v2, or v1's controller `memory`."""
    for folder, v1 in _cgroup_folders("memory", root, membership):
        limit = _read_lines(f"{folder}/memory.limit_in_bytes" if v1 else f"{folder}/memory.max")
        if limit and limit[0].isdecimal():  # "max": none
            yield int(limit[0])


def _quotas(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[float]:
    """Yield the quotas, in cores, of the cgroups that this process is in: cgroup v2, or v1's controller `cpu`."""
    for folder, v1 in _cgroup_folders("cpu", root, membership):
        quota = _read_lines(f"{folder}/cpu.max")
        if v1:
            quota = _read_lines(f"{folder}/cpu.cfs_quota_us") + _read_lines(f"{folder}/cpu.cfs_period_us")
        if m := re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", " ".join(quota)):  # "max" and -1: none
            yield int(m[1]) / int(m[2])


def _cgroup_folders(controller: str, root: str, membership: str) -> Iterator[tuple[str, bool]]:
    """Yield (folder, whether of cgroup v1) of the cgroups with a controller that this process is in, and of those
    above.

    Args:
        controller: "cpu" or "memory".
        root: where cgroups are mounted.
        membership: the file that says which ones the process is in.
    """
    for line in _read_lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = os.path.join(root, controller) if controllers else root
        while True:  # in a container, the path may be that of the host; its root is there in any case
            yield os.path.join(base, path.strip("/")), bool(controllers)
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def _read_lines(path: str) -> list[str]:
    """Read the lines of a file; none where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []
