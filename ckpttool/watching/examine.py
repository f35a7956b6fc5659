"""One save, read once: its structure, every byte, what `doctor` finds in it, and how it compares with those before."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from ..engine.copy.tensor_digests import reporting
from ..engine.copy.value_digests import state_roots
from ..engine.discover.unread_files import kind_of
from ..engine.doctor.checks import Examined, Request, run_checks
from ..engine.doctor.checks_files import LOST, MISSING, UNREADABLE, explain_refusal
from ..engine.doctor.checks_numbers import NAN
from ..engine.doctor.checks_optimizer import read_optimizer_steps, read_trainer_state_step
from ..engine.doctor.examine import doctor
from ..engine.doctor.findings import DAMAGE, NOTE, Finding, FindingKind
from ..engine.opening import OpenOptions, open_checkpoint
from ..engine.verification import VerifyResult, compare_recorded
from ..errors import CkpttoolError, Corrupt, Differs, Unsafe
from ..index.checkpoint import Checkpoint
from ..index.names import step_count
from ..options import Search
from .gentle import Pace
from .health import Portrait, compare_with_earlier, list_trained, make_portrait
from .norms import Norms
from .saves import WatchedSave, family, list_files

__all__ = ["Examination", "compare_files", "describe_damage", "examine"]


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
    save: WatchedSave, options: OpenOptions, pace: Pace, earlier: Sequence[Portrait], norm_jump: float
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
            raise Corrupt(f"{save.path}: {damaged[0].name} {damaged[0].what}", code="CKPT0405")
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


def describe_damage(save: WatchedSave, options: OpenOptions, error: CkpttoolError, pace: Pace) -> list[Finding]:
    """Find out what is wrong with a save that cannot be read, with the file or the tensors of each finding.

    Args:
        error: why it cannot.
    """
    names = {f.name for f in fields(options)} & Search.__annotations__.keys()
    found: list[Finding] = []
    with suppress(CkpttoolError):
        found = doctor(save.path, read_data=True, progress=pace, **{n: getattr(options, n) for n in names}).findings
    out = [_add_file(f, save) for f in found if f.severity == DAMAGE and f.kind != LOST]
    kind = "differs" if isinstance(error, Differs) else "unsafe" if isinstance(error, Unsafe) else None
    if m := re.match(r"no (\S+)$", save.found.lacks):
        out.insert(
            0, Finding(MISSING, DAMAGE, m[1], (), f"{m[1]} is missing; files of other ranks or shards are there")
        )
    elif kind is not None:
        out = [f for f in out if f.kind != UNREADABLE]  # which says the same
        out.insert(0, Finding(FindingKind(kind), DAMAGE, None, (), str(error)))
    elif not out:
        out.append(_add_file(explain_refusal(error), save))
    return out


def _add_file(finding: Finding, save: WatchedSave) -> Finding:
    """Return a finding with the file of the save that its text names."""
    if finding.file is not None or not os.path.isdir(save.path):
        return finding
    text = finding.text
    files = [f for f in list_files(save.path) if os.path.join(save.path, f) in text or text.startswith(f"{f} ")]
    return replace(finding, file=max(files, key=len)) if files else finding


def compare_files(save: WatchedSave, before: str) -> Iterator[Finding]:
    """Compare the files of a save that is bad with those of the save before it, at the path `before`, and yield a
    finding for each file that is not there any more, and for each that is, byte for byte, the one of the save before,
    although it is of the optimizer or the scheduler, or others of its series of ranks or shards are not."""
    here, there = (list_files(path) if os.path.isdir(path) else [] for path in (save.path, before))
    for file in sorted(set(there) - set(here)) if here else ():
        yield Finding(MISSING, DAMAGE, file, (), f"{file} is missing, which {before} has")
    series: dict[str, dict[str, bool]] = {}
    for file in here:
        kind = kind_of(os.path.basename(file))
        moves = kind is not None and kind[1] in ("optim", "scheduler")
        if moves or family(file) != file:
            with suppress(OSError):
                same = filecmp.cmp(os.path.join(save.path, file), os.path.join(before, file), shallow=False)
                series.setdefault(family(file), {"": False} if moves else {})[file] = same
    for of in series.values():
        if not all(of.values()):
            for file in (f for f, same in of.items() if same):
                text = f"{file} is, byte for byte, that of {before}, and training changes it with every step"
                yield Finding(FindingKind("stale-file"), DAMAGE, file, (), text)
