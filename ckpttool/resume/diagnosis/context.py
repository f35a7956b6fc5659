"""One failed comparison and the causes found so far: what every rule of the diagnosis gets.

A rule reads `reference`, `got` and `failed`, and calls `add` for each cause. Later rules say nothing about what is
already `explained`, so the order in which causes.py calls them is the order of likelihood.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...engine.opening import OpenCheckpoint
from ...engine.tensor_faults.tensor_kinds import TensorKind
from ..compare.verdict import Cause, Check
from ..text import parse_component
from ..trace.model import Trace
from .kinds import CauseKind, Topic, format_kind_name

__all__ = ["Context"]


@dataclass
class Context:
    """Two traces, the checks of continuity by name, and the open checkpoints (the reference's first)."""

    reference: Trace | None
    got: Trace
    checks: dict[str, Check]
    opened: tuple[OpenCheckpoint, OpenCheckpoint] | None = None
    explained: set[Topic] = field(default_factory=set)
    out: list[Cause] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Set `failed` to {name: check} of the checks that failed."""
        self.failed = {n: c for n, c in self.checks.items() if c.verdict == "fail"}

    @property
    def expected(self) -> Trace:
        """Return the reference; only for rules that are not called without one."""
        assert self.reference is not None
        return self.reference

    def passed(self, name: str) -> bool:
        """Tell whether a check was run and passed."""
        return name in self.checks and self.checks[name].verdict == "pass"

    def failed_texts(self, *names: str) -> list[str]:
        """Return "name: text" for each check of these names that failed, to be used as evidence of a cause."""
        return [f"{n}: {self.failed[n].text}" for n in names if n in self.failed]

    def add(
        self,
        kind: CauseKind | TensorKind,
        text: str,
        evidence: Sequence[str] = (),
        tensors: Sequence[str] = (),
        place: str | None = None,
        *,
        name: str = "",
        explains: Iterable[Topic] | None = None,
    ) -> None:
        """Add a cause, less likely than those before it.

        Args:
            kind: what kind of fault it is.
            text: what is wrong, a sentence.
            evidence: the observations behind it.
            tensors: canonical names of the affected tensors.
            place: where the bytes of the first difference are; None if not known.
            name: the option or the dtype that the kind is about; "" for none.
            explains: the topics that later rules need not explain; None for those of the kind, or else of the tensors.
        """
        if explains is None:
            explains = kind.explains
        self.explained.update({parse_component(n) for n in tensors} if explains is None else explains)
        self.out.append(Cause(format_kind_name(kind, name), text, list(evidence), list(tensors), place))
