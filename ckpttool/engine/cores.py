"""How many cores this process may use, as its affinity mask and the cgroups of its container or job allow."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

__all__ = ["cores"]


def cores() -> int:
    """Cores that this process may use: its affinity mask, and the CPU quota of its cgroup and of those above."""
    n = len(os.sched_getaffinity(0))
    return max(1, min(n, math.floor(min(_quotas(), default=n))))


def _quotas(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> Iterator[float]:
    """The quotas, in cores, of the cgroups that this process is in: cgroup v2, or v1's controller `cpu`."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = os.path.join(root, "cpu") if controllers else root
        while True:  # in a container, the path may be that of the host; its root is there in any case
            folder = os.path.join(base, path.strip("/"))
            quota = _lines(f"{folder}/cpu.max") or _lines(f"{folder}/cpu.cfs_quota_us") + _lines(
                f"{folder}/cpu.cfs_period_us"
            )
            if m := re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", " ".join(quota)):  # "max" and -1: none
                yield int(m[1]) / int(m[2])
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read().splitlines()
    except OSError:
        return []
