"""`ckpttool layouts`: the table of layouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .help import about
from .terminal import (
    Json,
    print_json,
    say,
)

__all__ = ["layouts"]


@dataclass(frozen=True)
class LayoutRow:
    """One layout; `holds` are components, or "everything"."""

    name: str
    title: str
    reads: bool
    writes: bool
    holds: list[str] | str


@about(
    ("A table", "ckpttool layouts"),
    ("For a script", "ckpttool layouts --json"),
    exits=(0, 1, 2),
)
def layouts(as_json: Json = False) -> None:
    """List the layouts that ckpttool reads and writes."""
    from ..layouts import layouts as known

    rows = [
        LayoutRow(x.name, x.title, True, x.write is not None, sorted(x.holds(None)) or "everything")
        for x in known().values()
    ]
    if as_json:
        print_json([asdict(r) for r in rows])
        return
    name, title = (max(len(text) for text in column) for column in zip(*((r.name, r.title) for r in rows), strict=True))
    for r in rows:
        verbs = "read, write" if r.writes else "read"
        holds = r.holds if isinstance(r.holds, str) else ", ".join(r.holds)
        say(f"{r.name:{name}s}  {r.title:{title}s}  {verbs:11s}  holds {holds}")
