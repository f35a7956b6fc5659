"""One failed comparison and the causes found so far: what every rule of the diagnosis gets.

A rule reads `reference`, `got` and `failed`, and calls `add` for each cause, with what that explains: "weights",
"optimizer", "gradients", "data", "rates". Later rules say nothing about what is already `explained`, so the order in
which `diagnosis` calls them is the order of likelihood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...engine.opening import OpenCheckpoint
from ..compare.verdict import Cause, Check
from ..trace.model import Trace

__all__ = ["Context"]


@dataclass
class Context:
    """Two traces, the checks of continuity by name, and the open checkpoints (the reference's first)."""

    reference: Trace | None
    got: Trace
    checks: dict[str, Check]
    opened: tuple[OpenCheckpoint, OpenCheckpoint] | None = None
    explained: set[str] = field(default_factory=set)
    out: list[Cause] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.failed = {n: c for n, c in self.checks.items() if c.verdict == "fail"}

    def passed(self, name: str) -> bool:
        """Whether a check was run and passed."""
        return name in self.checks and self.checks[name].verdict == "pass"

    def seen(self, *names: str) -> list[str]:
        """Evidence: the texts of those of these checks that failed."""
        return [f"{n}: {self.failed[n].text}" for n in names if n in self.failed]

    def add(
        self,
        kind: str,
        text: str,
        evidence: Sequence[str] = (),
        tensors: Sequence[str] = (),
        place: str | None = None,
        explains: Iterable[str] = (),
    ) -> None:
        """Add a cause, less likely than those before it."""
        self.explained.update(explains)
        self.out.append(Cause(kind, text, list(evidence), list(tensors), place))
