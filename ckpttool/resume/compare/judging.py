"""What the runs of one plan say, and whether that is enough: `judge` on their traces, with the noise of the job if it
was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..trace.model import Trace
from .verdict import Check

__all__ = ["MEASURING", "Judged", "judged_runs"]

#: The status before a run that nobody asked for.
MEASURING = "nothing but updates and numbers of later steps fails, so the noise of this job is measured"

_UPDATES = ("step1.update_norm", "step1.worst_update")


class Judged(NamedTuple):
    """What `judge` gave, with the noise if that was measured; `random` if the job's numbers depend on its
    micro-batches."""

    checks: list[Check]
    envelope: dict[str, list[float]]
    calibration: dict[str, float] | None
    random: bool

    @property
    def failed(self) -> list[Check]:
        return [c for c in self.checks if c.verdict == "fail"]

    @property
    def unsure(self) -> bool:
        """Whether nothing fails but numbers of later steps or the first update, as they also do in a job that amplifies
        every
        rounding: Muon orthogonalises its updates in bf16, and Adagrad makes full-size updates of rounding noise."""
        failed = self.failed
        numbers = (c.source in ("measured", "given") and (c.stage == "steps" or c.name in _UPDATES) for c in failed)
        return self.calibration is None and bool(failed) and not self.random and all(numbers)


def judged_runs(traces: Mapping[str, Trace], recorded: Trace | None, profile: str) -> Judged:
    """The verdict on the run "candidate", compared with the run "reference" or the recorded one. "noise" is a second
    run of the reference."""
    from .judge import judge, measure_noise

    got, reference = traces["candidate"], traces.get("reference") or recorded
    calibration: dict[str, float] | None = None
    if "noise" in traces:
        calibration = measure_noise(got if recorded is not None else traces.get("reference", got), traces["noise"])
    return Judged(*judge(reference, got, profile, calibration), calibration, "random" in got.environment)
