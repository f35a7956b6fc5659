"""The results of a judgement: Check, Cause, Report.

judge.py, limits.py and diagnosis/ make them; report/ shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...printable import list_first
from ..trace.model import SCHEMA, Trace, spell_non_finite, trace_to_json
from .misfit import does_not_fit_job

__all__ = ["Cause", "Check", "Report", "Word"]

Word = Literal["pass", "fail", "not comparable"]

#: {first part of a check's name: its stage}
_STAGES = {
    "state": "state",
    "config": "configuration",
    "probe": "probe",
    "step1": "step 1",
    "steps": "steps",
    "after": "after the steps",
    "run": "run",
    "fresh": "smoke test",
    "roundtrip": "round trip",
    "gate": "gate",
}


@dataclass
class Check:
    """One check and its result.

    `stage` is "state", "configuration", "probe", "step 1", "steps", "after the steps", "run", "round trip" or "gate",
    in this order; with --fresh also "smoke test", which comes first, and "at 3 ranks", of the second resume.
    `name` is unique in a report ("step1.update_norm"). `number` is what was found and `bound` the largest that passes
    (the smallest, for gates that begin with min); `source` says where the bound is from: "exact", "measured",
    "calibrated" or "given". `where` names the worst tensor or step. `text` is one sentence.
    """

    stage: str
    name: str
    verdict: Word
    text: str
    number: float | None = None
    bound: float | None = None
    source: str = ""
    where: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        verdict: Word | bool,
        text: str,
        number: float | None = None,
        bound: float | None = None,
        source: str = "",
        where: str | None = None,
    ) -> Check:
        """Make a check whose stage follows from its name.

        Args:
            name: such as "step1.update_norm".
            verdict: True for "pass", False for "fail", or the word.
            number, bound: what was found, and what passes at most (or at least); None, or not finite, if they appear
                only in the text.
            source: "exact", "measured", "calibrated" or "given": where the bound is from; "" for none.
            where: the worst tensor or step.
        """
        word: Word = ("pass" if verdict else "fail") if isinstance(verdict, bool) else verdict
        number, bound = (None if x is None or not math.isfinite(x) else x for x in (number, bound))
        return cls(_STAGES[name.partition(".")[0]], name, word, text, number, bound, source, where)

    @classmethod
    def exact(cls, name: str, problems: Sequence[str], good: str, bad: str) -> Check:
        """Make a check that passes if a list of problems is empty.

        Args:
            name: name of the check, such as "state.names".
            problems: what is wrong: names, or texts that begin with the name and say what is wrong about it.
            good: the text of the check if there is no problem.
            bad: the beginning of the text otherwise; a colon and the first problems follow.
        """
        if not problems:
            return cls.of(name, True, good, 0, 0, "exact")
        first = problems[0].split(" ")[0]
        text = f"{bad}: {list_first(problems)}"
        return cls.of(name, False, text, len(problems), 0, "exact", first if "." in first else None)

    @classmethod
    def unknown(cls, name: str, why: str) -> Check:
        """Make a check whose verdict is "not comparable".

        Args:
            name: name of the check.
            why: why it could not be judged, which becomes its text.
        """
        return cls.of(name, "not comparable", why)


@dataclass
class Cause:
    """What is likely wrong, in words, most likely first.

    `kind` is a short name of the fault ("optimizer-missing", "step-reset"). `evidence` are the observations behind
    it, `tensors` the affected tensors, the first differing one first; `place` is where its bytes are: file, byte range
    and the rank whose shard that is, if known.
    """

    kind: str
    text: str
    evidence: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    place: str | None = None


@dataclass
class Report:
    """The result of a run of resume-verify.

    `envelope` {"loss": [bound of each step], "grad_norm": [...], "update_norm": [...]}, relative to the reference, for
    the steps that both traces have, in order. `second` is the trace of the second resume of --fresh, None for none.
    `calibrated` says whether the noise of this very job was measured.
    """

    candidate: Trace
    reference: Trace | None
    profile: str
    checks: list[Check]
    causes: list[Cause] = field(default_factory=list)
    envelope: dict[str, list[float]] = field(default_factory=dict)
    calibrated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)  # `limits.compute_metrics`
    versions: dict[str, str] = field(default_factory=dict)  # of the launching process
    not_verified: list[str] = field(default_factory=list)  # what no check could see
    second: Trace | None = None
    time: str = ""  # when it was judged, UTC, ISO 8601

    @property
    def word(self) -> str:
        """Return the verdict of the run: "pass", "fail", "does not fit", "gate failed", "not comparable", or "no
        reference" if only the checks that need no reference were run."""
        if does_not_fit_job(self.reference, self.candidate):
            return "does not fit"
        if any(c.verdict == "fail" and c.stage != "gate" for c in self.checks):
            return "fail"
        passed = {c.name for c in self.checks if c.verdict == "pass"}
        # the first loss says nothing about the optimizer: its state, an update or a later loss must be known
        if self.reference is not None and not (
            "step1.loss" in passed and passed & {"state.digests", "step1.update_norm", "steps.loss"}
        ):
            return "not comparable"
        if any(c.verdict == "fail" for c in self.checks):
            return "gate failed"
        return "pass" if self.reference is not None else "no reference"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command: 10 if continuity failed, or could not be judged despite a reference; 11
        if a gate failed; 12 if the checkpoint does not fit the job; otherwise 0."""
        return {"fail": 10, "not comparable": 10, "gate failed": 11, "does not fit": 12}.get(self.word, 0)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data, as in --json and report.json; NaN and infinities are strings, as in a
        trace."""
        data = {
            "ckpttool": SCHEMA,
            "verdict": self.word,
            "exit_code": self.exit_code,
            "profile": self.profile,
            "calibrated": self.calibrated,
            "checks": [asdict(c) for c in self.checks],
            "causes": [asdict(c) for c in self.causes],
            "not_verified": self.not_verified,
            "envelope": self.envelope,
            "metrics": self.metrics,
            "versions": self.versions,
            "time": self.time,
            "candidate": trace_to_json(self.candidate),
            "reference": None if self.reference is None else trace_to_json(self.reference),
            "second": None if self.second is None else trace_to_json(self.second),
        }
        out: dict[str, Any] = spell_non_finite(data)
        return out
