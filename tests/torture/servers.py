"""Servers that lie (tests/lying_servers.py): every lie of every kind of server, from the first request on and from later ones."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lying_servers import case

__all__ = ["case", "run"]


def run(lab: Any, until: float, log: Path, part: int, parts: int, most: int, first: int) -> None:
    """Every `parts`-th case from number `first` on, into `log`, until a time or a number of them."""
    with log.open("a") as lines:
        for number in range(first + part, first + part + parts * most, parts):
            if time.time() > until:
                return
            lines.write(json.dumps(case(number, lab.out.parent / f"servers{part}")) + "\n")
            lines.flush()
