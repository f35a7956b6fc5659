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
from ..engine.discover.unread_files import classify_state_file
from ..engine.doctor.checks import Examined, Request, run_checks
from ..engine.doctor.checks_files import DIFFERS, LOST, MISSING, UNREADABLE, make_refusal_finding
from ..engine.doctor.checks_numbers import NAN
from ..engine.doctor.checks_optimizer import read_optimizer_steps, read_trainer_state_step
from ..engine.doctor.examine import doctor
from ..engine.doctor.findings import DAMAGE, NOTE, Finding, FindingKind
from ..engine.opening import OpenOptions, open_checkpoint
from ..engine.verification import VerifyResult, compare_recorded_digests
from ..errors import CkpttoolError, Corrupt, Differs, Unsafe
from ..index.checkpoint import Checkpoint
from ..index.names import step_count
from ..options import Search
from .gentle import Pace
from .health import Portrait, compare_with_earlier, list_trained_weights, make_portrait
from .norms import Norms
from .saves import WatchedSave, list_files_below, to_name_family

__all__ = ["Examination", "compare_files", "examine_save", "list_damage"]


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


def examine_save(
    save: WatchedSave, options: OpenOptions, pace: Pace, earlier: Sequence[Portrait], norm_jump: float
) -> Examination:
    """Read a save completely and return its portrait, its digests and the findings on it: every byte is read once, fp32
    master weights and their weights twice.

    Args:
        save: the save.
        options: how the save is opened, such as its layout.
        pace: limits the rate of reading.
        earlier: portraits of proved earlier saves of the run, the nearest first.
        norm_jump: maximal factor by which the norm of a weight may grow since the save before.

    Raises:
        Corrupt, Unsafe: it is damaged. Differs: it does not match a recorded digest.
        SourceChanged: it was written to while it was read.
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
        counters = _read_step_counters(at)
        opened.source.assert_unchanged()
        verified = VerifyResult(save.path, ckpt.layout, len(ckpt.tensors), ckpt.nbytes, "ok", 0, [])
        compare_recorded_digests(opened, digests, verified)
        pace.drop_pages()
    portrait = make_portrait(ckpt, save.name, save.step, digests, norms.found(), counters)
    findings = [f for f in (_downgrade_buffer_infinities(f, ckpt, norms) for f in at.found) if f.severity == DAMAGE]
    findings += compare_with_earlier(portrait, ckpt, earlier, norm_jump, save.found.weights_only)
    return Examination(
        portrait, ckpt.layout, ckpt.nbytes, state_roots(ckpt, digests), findings,
        [r.name for r in ckpt.unread if r.component], verified.recorded,
    )  # fmt: skip


def _read_step_counters(at: Examined) -> dict[str, float]:
    """Return {"optimizer", "trainer", "scheduler": step}, each only if the checkpoint has that counter."""
    steps = read_optimizer_steps(at)
    state = read_trainer_state_step(at)
    epochs = at.ckpt.values.get("scheduler.last_epoch")
    found = {
        "optimizer": max(steps.values()) if steps else None,
        "trainer": step_count(at.ckpt.value) if state is None else state,
        "scheduler": None if epochs is None else epochs.data,
    }
    return {n: float(x) for n, x in found.items() if isinstance(x, (int, float))}


def _downgrade_buffer_infinities(finding: Finding, ckpt: Checkpoint, norms: Norms) -> Finding:
    """Return a finding of infinities as a note if they are in buffers alone, such as attention masks; unchanged
    otherwise. Buffers are weights for which the optimizer has no state, if it has state for others."""
    trained = list_trained_weights(ckpt)
    if finding.kind == NAN and trained:
        bad = [n for n in finding.tensors if norms.nan.get(n) or n in trained or ckpt.tensors[n].component != "model"]
        if not bad:
            return replace(finding, severity=NOTE)
    return finding


def list_damage(save: WatchedSave, options: OpenOptions, error: CkpttoolError, pace: Pace) -> list[Finding]:
    """Return the findings on a save that cannot be read, each with its file or tensors.

    Args:
        save: the save.
        options: how it was read.
        error: the error of that read.
        pace: limits the rate of reading.
    """
    names = {f.name for f in fields(options)} & Search.__annotations__.keys()
    found: list[Finding] = []
    with suppress(CkpttoolError):
        found = doctor(save.path, read_data=True, progress=pace, **{n: getattr(options, n) for n in names}).findings
    out = [_with_named_file(f, save) for f in found if f.severity == DAMAGE and f.kind != LOST]
    kind = "differs" if isinstance(error, Differs) else "unsafe" if isinstance(error, Unsafe) else None
    if m := re.match(r"no (\S+)$", save.found.lacks):
        out.insert(
            0, Finding(MISSING, DAMAGE, m[1], (), f"{m[1]} is missing; files of other ranks or shards are there")
        )
    elif kind is not None:
        out = [f for f in out if f.kind not in (UNREADABLE, DIFFERS)]  # which say the same
        out.insert(0, Finding(FindingKind(kind), DAMAGE, None, (), str(error)))
    elif not out:
        out.append(_with_named_file(make_refusal_finding(error), save))
    return out


def _with_named_file(finding: Finding, save: WatchedSave) -> Finding:
    """Return a finding whose `file` is the file of the save that the finding's text mentions; the finding itself if it
    has a file already, or if its text mentions none."""
    if finding.file is not None or not os.path.isdir(save.path):
        return finding
    text = finding.text
    files = [f for f in list_files_below(save.path) if os.path.join(save.path, f) in text or text.startswith(f"{f} ")]
    return replace(finding, file=max(files, key=len)) if files else finding


def compare_files(save: WatchedSave, before: str) -> Iterator[Finding]:
    """Compare the files of a damaged save with those of the save before it.

    Args:
        save: the damaged save.
        before: path of the save before it.

    Yields:
        A finding for each file that is missing, and for each file that is stale: equal byte for byte to the one of the
            save before, although it holds the optimizer or the scheduler, or although other files of its series (ranks
            or shards) changed.
    """
    here, there = (list_files_below(path) if os.path.isdir(path) else [] for path in (save.path, before))
    for file in sorted(set(there) - set(here)) if here else ():
        yield Finding(MISSING, DAMAGE, file, (), f"{file} is missing, which {before} has")
    series: dict[str, dict[str, bool]] = {}
    for file in here:
        kind = classify_state_file(os.path.basename(file))
        moves = kind is not None and kind[1] in ("optim", "scheduler")
        if moves or to_name_family(file) != file:
            with suppress(OSError):
                same = filecmp.cmp(os.path.join(save.path, file), os.path.join(before, file), shallow=False)
                series.setdefault(to_name_family(file), {"": False} if moves else {})[file] = same
    for of in series.values():
        if not all(of.values()):
            for file in (f for f, same in of.items() if same):
                text = f"{file} is, byte for byte, that of {before}, and training changes it with every step"
                yield Finding(FindingKind("stale-file"), DAMAGE, file, (), text)
