"""How many cores, and how much memory, this process may use: its affinity mask, and the cgroups of its container or
job."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

__all__ = ["count_usable_cores", "find_usable_memory"]


def count_usable_cores() -> int:
    """Return how many cores this process may use, by its affinity mask and the CPU quotas of its cgroup and the parent
    cgroups; at least 1."""
    n = len(os.sched_getaffinity(0))
    return max(1, min(n, math.floor(min(_read_cpu_quotas(), default=n))))


def find_usable_memory() -> int | None:
    """Return how many bytes of memory this process may use: the smallest of the machine's available memory and the
    limits of its cgroups; None if unknown."""
    found = [
        int(m[1]) << 10
        for line in _read_lines("/proc/meminfo")
        if (m := re.fullmatch(r"MemAvailable: +(\d+) kB", line))
    ]
    return min([*found, *_read_memory_limits()], default=None)


def _read_memory_limits(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[int]:
    """Yield the memory limits, in bytes, of the cgroups that this process is in: cgroup v2, or the controller `memory`
    of v1.

    Args:
        root: where cgroups are mounted.
        membership: the file that lists the cgroups of the process.
    """
    for folder, v1 in _list_cgroup_folders("memory", root, membership):
        limit = _read_lines(f"{folder}/memory.limit_in_bytes" if v1 else f"{folder}/memory.max")
        if limit and limit[0].isdecimal():  # "max": none
            yield int(limit[0])


def _read_cpu_quotas(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[float]:
    """Yield the CPU quotas, in cores, of the cgroups that this process is in: cgroup v2, or the controller `cpu` of v1.

    Args:
        root: where cgroups are mounted.
        membership: the file that lists the cgroups of the process.
    """
    for folder, v1 in _list_cgroup_folders("cpu", root, membership):
        quota = _read_lines(f"{folder}/cpu.max")
        if v1:
            quota = _read_lines(f"{folder}/cpu.cfs_quota_us") + _read_lines(f"{folder}/cpu.cfs_period_us")
        if m := re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", " ".join(quota)):  # "max" and -1: none
            yield int(m[1]) / int(m[2])


def _list_cgroup_folders(controller: str, root: str, membership: str) -> Iterator[tuple[str, bool]]:
    """Yield (folder, whether it is of cgroup v1) of the cgroups with a controller that this process is in, and of their
    parents.

    Args:
        controller: "cpu" or "memory".
        root: where cgroups are mounted.
        membership: the file that lists the cgroups of the process.
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
    """Return the lines of a text file; [] where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []
