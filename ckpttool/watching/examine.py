"""One save, read once: its structure, every byte, what `doctor` finds in it, and how it compares with those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..engine.copy.tensor_digests import reporting
from ..engine.copy.value_digests import state_roots
from ..engine.doctor.checks import Examined, Request, run_checks
from ..engine.doctor.checks_numbers import NAN
from ..engine.doctor.checks_optimizer import read_optimizer_steps, read_trainer_state_step
from ..engine.doctor.examine import doctor
from ..engine.doctor.findings import DAMAGE, NOTE, Finding, FindingKind
from ..engine.opening import OpenOptions, open_checkpoint
from ..engine.verification import VerifyResult, compare_recorded
from ..errors import CkpttoolError, Corrupt, Differs, Unsafe, kind_of
from ..index.checkpoint import Checkpoint
from ..index.names import step_count
from ..options import Search
from .gentle import Pace
from .health import Portrait, compare_with_earlier, list_trained, make_portrait
from .norms import Norms
from .saves import Save

__all__ = ["Examination", "describe_damage", "examine"]


@dataclass(frozen=True)
class Examination:
    """What was found in a save. `not_read` are files that belong to it and were not looked at; `recorded` is "equal"
    where digests were recorded beside it, as of `VerifyResult`; `nbytes` are those of its tensors."""

    portrait: Portrait
    layout: str
    nbytes: int
    digest: dict[str, str]
    findings: list[Finding]
    not_read: list[str]
    recorded: str | None


def examine(
    save: Save, options: OpenOptions, pace: Pace, earlier: Sequence[Portrait], norm_jump: float
) -> Examination:
    """Read a save: every byte once, and masters and their weights a second time.

    Args:
        earlier: portraits of proved saves of the run, from the nearest back.
        norm_jump: how many times its last norm a weight may have.

    Raises:
        Corrupt, Unsafe: it is damaged. Differs: it is not what was recorded of it.
        SourceChanged: it was written to meanwhile.
        NotRecognised, Unsupported: it cannot be read.
    """
    with reporting(pace), open_checkpoint(save.path, options, check_hints=False) as opened:
        pace.start(opened.source)
        ckpt = opened.locate()
        if damaged := [r for r in ckpt.unread if r.damaged]:
            raise Corrupt(f"{save.path}: {damaged[0].name} {damaged[0].what}")
        norms = Norms(ckpt)
        at = Examined(opened, Request(save.path, True, progress=pace), also=norms.add)
        run_checks(at)
        digests = at.digests or {}
        counters = _read_counters(at)
        opened.source.assert_unchanged()
        verified = VerifyResult(save.path, ckpt.layout, len(ckpt.tensors), ckpt.nbytes, "ok", 0, [])
        compare_recorded(opened, digests, verified)
        pace.drop_pages()
    portrait = make_portrait(ckpt, save.name, save.step, digests, norms.found(), counters)
    findings = [f for f in (_excuse_buffers(f, ckpt, norms) for f in at.found) if f.severity == DAMAGE]
    findings += compare_with_earlier(portrait, ckpt, earlier, norm_jump, save.found.weights_only)
    return Examination(
        portrait, ckpt.layout, ckpt.nbytes, state_roots(ckpt, digests), findings,
        [r.name for r in ckpt.unread if r.component], verified.recorded,
    )  # fmt: skip


def _read_counters(at: Examined) -> dict[str, float]:
    """Read how far the optimizer, the trainer and the scheduler are, as far as they say so."""
    steps = read_optimizer_steps(at)
    state = read_trainer_state_step(at)
    epochs = at.ckpt.values.get("scheduler.last_epoch")
    found = {
        "optimizer": max(steps.values()) if steps else None,
        "trainer": step_count(at.ckpt.value) if state is None else state,
        "scheduler": None if epochs is None else epochs.data,
    }
    return {n: float(x) for n, x in found.items() if isinstance(x, (int, float))}


def _excuse_buffers(finding: Finding, ckpt: Checkpoint, norms: Norms) -> Finding:
    """Make a note of infinities that are in buffers alone, such as masks of attention, where the optimizer says which
    weights are trained."""
    trained = list_trained(ckpt)
    if finding.kind == NAN and trained:
        bad = [n for n in finding.tensors if norms.nan.get(n) or n in trained or ckpt.tensors[n].component != "model"]
        if not bad:
            return replace(finding, severity=NOTE)
    return finding


def describe_damage(save: Save, options: OpenOptions, error: CkpttoolError, pace: Pace) -> list[Finding]:
    """Find out what is wrong with a save that `examine` has refused, with the file or the tensors of each finding.

    Args:
        error: what `examine` has raised.
    """
    names = {f.name for f in fields(options)} & Search.__annotations__.keys()
    try:
        found = doctor(save.path, read_data=True, progress=pace, **{n: getattr(options, n) for n in names}).findings
    except CkpttoolError as e:
        found, error = [], e
    out = [f for f in found if f.severity == DAMAGE]
    if out and not isinstance(error, (Differs, Unsafe)):
        return out
    kind = {"Differs": "differs", "Unsafe": "unsafe"}.get(kind_of(error), "damaged")
    return [*out, Finding(FindingKind(kind), DAMAGE, None, (), str(error))]
