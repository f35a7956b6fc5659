"""`ckpttool layouts`: the table of layouts."""

from __future__ import annotations

from typing import Any

from .help import about
from .terminal import (  # fmt: skip
    Json,
    print_json,
)

__all__ = ["layouts"]


@about(
    ("A table", "ckpttool layouts"),
    ("For a script", "ckpttool layouts --json"),
    exits=(0, 1, 2),
)
def layouts(as_json: Json = False) -> None:
    """List the layouts ckpttool knows."""
    from ..layouts import layouts as known

    rows: list[dict[str, Any]] = [
        {
            "name": x.name, "title": x.title, "reads": True, "writes": x.write is not None,
            "holds": sorted(x.holds(None)) or "everything",
        }
        for x in known().values()
    ]  # fmt: skip
    if as_json:
        print_json(rows)
        return
    for r in rows:
        verbs = "read, write" if r["writes"] else "read"
        holds = r["holds"] if isinstance(r["holds"], str) else ", ".join(r["holds"])
        print(f"{r['name']:10s} {r['title']:44s} {verbs:12s} holds {holds}")
