"""What is wrong with a checkpoint, what of it is whole, and which command helps: `doctor`.

Errors that other commands raise are findings here. Nothing is written, no pickle is executed, and without `read_data`
only headers and pickles are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Unpack

from ... import layouts
from ...errors import CkpttoolError, IncompleteWeights, NotRecognised, RemoteError, Unsupported, UsageError, argument
from ...options import Search, list_reading_keywords
from ...printable import Shown
from ...storage import urls
from ...storage.source import Source
from .. import salvage
from ..copy.fill import Progress, silent
from ..copy.tensor_digests import reporting, tensor_digests
from ..discover import detection
from ..discover.unread_files import human
from ..opening import CheckpointPath, OpenCheckpoint, OpenOptions, open_with, shown_path
from ..verification import salvaged
from . import checks_names, checks_numbers, checks_optimizer
from .findings import DAMAGE, MISMATCH, NOTE, Examined, Finding, copy_command

#: What is looked at in every checkpoint that opens.
CHECKS = (
    checks_names.wrapper_prefixes,
    checks_names.empty_weights,
    checks_names.vocabulary_rows,
    checks_names.lost_random_states,
    checks_names.encoded_weights,
    checks_optimizer.per_rank_state,
    checks_optimizer.other_copies,
    checks_optimizer.mixed_ranks,
    checks_optimizer.mixed_steps,
)
#: And in one that is whole.
CHECKS_OF_WHOLE = (checks_optimizer.orphaned_state, checks_optimizer.leftover_files)

__all__ = ["Diagnosis", "Finding", "doctor"]


_SHOWN = 10  # names of what is lost


@dataclass
class Diagnosis(Shown):
    """What `doctor` found.

    `sound`    no finding is damage
    `fits`     no finding is a mismatch with the checkpoint that `like` names; None where none was named
    `layout`   None if no layout could read it
    `exact`    how many tensors are whole
    `missing`  {tensor or value: why it is lost}
    `rebuilt`  {tensor: how it can be put together with the help of another checkpoint}
    `next`     commands, the most useful one first
    """

    path: str
    sound: bool
    layout: str | None
    exact: int
    exact_bytes: int
    missing: dict[str, str] = field(default_factory=dict)
    rebuilt: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    next: list[str] = field(default_factory=list)
    fits: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """What was found, and the first names of what is lost; with `verbose` all of them."""
        state = (
            "damaged"
            if not self.sound
            else "sound"
            if self.fits is not False
            else f"sound, but it does not fit {argument('like')}"
        )
        yield f"{self.path}: {state}"
        for f in self.findings:
            yield f"  {f.kind}: {f.text}"
        if self.layout is not None:
            lost = f", {len(self.missing):,} lost" if self.missing else ""
            made = f", {len(self.rebuilt):,} can be rebuilt" if self.rebuilt else ""
            yield f"{self.layout}: {self.exact:,} tensors are whole, {human(self.exact_bytes)}{made}{lost}"
        elif not self.sound:
            yield "nothing of it can be read"
        names = list(self.missing.items())
        for name, why in names if verbose else names[:_SHOWN]:
            yield f"  lost: {name}: {why}"
        if len(names) > _SHOWN and not verbose:
            yield f"  ... {len(names) - _SHOWN:,} more; {argument('verbose', True)} names them"
        for line in self.next:
            yield f"next: {line}"


@list_reading_keywords
def doctor(
    path: CheckpointPath,
    *,
    read_data: bool = False,
    progress: Progress = silent,
    **reading: Unpack[Search],
) -> Diagnosis:
    """What is wrong with a checkpoint, what of it is whole, and what to type next.

    Args:
        read_data: also read every byte of the tensors that seem whole, and compare it with the CRC32s that the files
        carry.
        like: a checkpoint of the job that refuses to load this one; its param groups are compared with those here. It
        also says
            what this one does not about its parameters, as in `open`, where nothing else does.
        progress: called with ("read", bytes done, bytes in all), and before with "prove" if tensors have no names until
        they are read. (the others): as `open`.

    Raises:
        NotRecognised: there is nothing, or nothing that looks like a checkpoint. Damage is a finding, not an error.
        Unsupported: it is not damaged, as far as can be seen, but ckpttool cannot read it, or needs hints for that.
    """
    name = shown_path(path)
    out = Diagnosis(urls.display_path(name), True, None, 0, 0)
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        found = salvage.problems(where)
    for p in found:
        out.findings.append(Finding(p.kind, DAMAGE, p.file, (), f"{p.file} {p.text}", p.repair))
    like = reading.pop("like", None)  # where nothing else helps, `_with_less` reads with it
    usual = OpenOptions(allow_mixed_steps=True, **reading)
    asked = _Asked(name, read_data, usual.config, None if like is None else os.fspath(like), progress, _given(usual))
    refused: CkpttoolError | None = None
    try:
        with reporting(progress), open_with(path, usual, check_hints=False) as opened:
            _look_at(opened, out, asked)
    except (UsageError, RemoteError):
        raise
    except CkpttoolError as e:
        refused = e
    if isinstance(refused, Unsupported) and not out.findings:
        _with_less(path, usual, out, refused, asked)
    elif refused is not None:
        _what_is_left(
            path,
            replace(usual, salvage=True),
            out,
            refused,
            asked,
        )
    out.findings = list(dict.fromkeys(out.findings))  # what was looked at twice
    out.sound = not any(f.severity == DAMAGE for f in out.findings)
    out.fits = None if like is None else not any(f.severity == MISMATCH for f in out.findings)
    out.next = list(dict.fromkeys([*out.next, *(f.repair for f in out.findings if f.repair)]))
    return out


class _Asked(NamedTuple):
    path: str
    read_data: bool
    config: str | None
    like: str | None
    progress: Progress
    given: tuple[str, ...]


def _given(options: OpenOptions) -> tuple[str, ...]:
    """The options of the command line that say how to read a checkpoint."""
    flags = {
        "--from": options.source_layout,
        "--config": options.config,
        "--flat-layout": options.flat_layout,
        "--tag": options.tag,
        "--wrap": None if options.wrap is None else ",".join(options.wrap),
    }
    return tuple(os.fspath(word) for flag, value in flags.items() if value is not None for word in (flag, value))


def _look_at(opened: OpenCheckpoint, out: Diagnosis, asked: _Asked) -> None:
    """Fill in what can be seen of a checkpoint that opens."""
    ckpt = opened.locate()
    out.layout, out.exact, out.exact_bytes = ckpt.layout, len(ckpt.tensors), ckpt.nbytes
    if opened.source.patched is None and (before := salvaged(opened)) is not None:
        out.missing, out.rebuilt = before["missing"], before["rebuilt"]
        out.exact -= len(out.rebuilt)
        text = (
            f"this is a salvaged copy: {before['exact']:,} of its tensors are exact, {len(out.rebuilt):,} were "
            f"rebuilt, {len(out.missing):,} are missing"
        )
        out.findings.append(Finding("salvaged", "note", None, (), text))
    at = Examined(opened, asked.path, asked.config, asked.given)
    for look in (*CHECKS, *CHECKS_OF_WHOLE) if opened.source.patched is None else CHECKS:
        out.findings += look(at)
    known = {f.file for f in out.findings}
    out.findings += [
        Finding("unreadable", DAMAGE, r.name, (), f"{r.name} {r.what}")
        for r in ckpt.unread
        if r.damaged and r.name not in known
    ]
    if asked.like is not None:
        with open_with(asked.like, OpenOptions(allow_equal_ranks=True, allow_mixed_steps=True)) as other:
            out.findings += checks_optimizer.param_groups(at, other.checkpoint, asked.like)
    digests = None
    if asked.read_data:
        numbers = checks_numbers.Numbers(ckpt)
        digests = tensor_digests(
            ckpt.tensors, opened.source, ckpt.files, ckpt.records, asked.progress, "read", seen=numbers.add
        )
        opened.source.assert_unchanged()
        out.findings += numbers.findings()
        out.findings += checks_numbers.other_masters(at, asked.progress)
    out.findings += checks_names.tied_weights(at, digests)


def _with_less(path: CheckpointPath, options: OpenOptions, out: Diagnosis, refused: Unsupported, asked: _Asked) -> None:
    """Fill in what can be seen of a checkpoint that is not damaged but cannot be read as it is: with the help of
    `like`, the weights alone, or the safetensors files that a folder has beside another layout.

    Raises:
        Unsupported: not even those.
    """
    ways = [replace(options, like=asked.like)] if asked.like is not None else []
    by_itself = [replace(options, source_layout="hf")] if options.source_layout is None else []
    for way in (*ways, replace(options, only=("model",)), *by_itself):
        try:
            with open_with(path, way, check_hints=False) as opened:
                _look_at(opened, out, asked)
        except CkpttoolError:
            continue
        if way.source_layout != options.source_layout:
            out.findings.append(
                Finding("not-read", NOTE, None, (), f"only the safetensors files were looked at: {refused}")
            )
        elif way.only:
            out.findings.append(Finding("not-read", NOTE, None, (), f"only the weights were looked at: {refused}"))
        return
    raise refused


def _what_is_left(
    path: CheckpointPath,
    options: OpenOptions,
    out: Diagnosis,
    refused: CkpttoolError,
    asked: _Asked,
) -> None:
    """Fill in what can be salvaged of a checkpoint that does not open: all that is whole, or the weights alone."""
    if not out.findings:
        if isinstance(refused, NotRecognised):
            raise refused
        out.findings.append(Finding("unreadable", DAMAGE, None, (), str(refused)))
    why: list[str] = []
    opened: OpenCheckpoint | None = None
    for only in (None, ("model",)):
        try:
            with open_with(path, replace(options, only=only), check_hints=False) as found:
                _look_at(found, out, asked)
            opened = found
            break
        except RemoteError:
            raise
        except IncompleteWeights as e:
            why = [str(e)]
            opened = None
            break
        except CkpttoolError as e:
            why.append(str(e))
    if opened is None:
        out.layout, out.exact, out.exact_bytes = None, 0, 0
        if all(why[0] not in f.text and f.text not in why[0] for f in out.findings):
            out.findings.append(Finding("unreadable", DAMAGE, None, (), why[0]))
        return
    left = opened.checkpoint.salvage
    if left is None or not (left.missing or left.rebuilt or left.problems or why):
        return
    if why:
        out.findings.append(Finding("lost", DAMAGE, None, (), f"all but the weights: {why[0]}"))
    out.missing, out.rebuilt = left.missing, left.rebuilt
    out.exact = len(opened.checkpoint.tensors) - len(left.rebuilt)
    for text in left.problems:
        if all(f.text != text for f in out.findings):
            out.findings.append(Finding("missing", DAMAGE, text.partition(" ")[0], (), text))
    if left.missing:
        text = "1 entry is lost" if len(left.missing) == 1 else f"{len(left.missing):,} tensors or values are lost"
        out.findings.append(Finding("lost", DAMAGE, None, tuple(left.missing), text))
    out.next = [copy_command(opened, shown_path(path), "salvaged", (*asked.given, "--salvage"))]
    if left.missing and (other := _other_step(opened)) is not None:
        out.next.append(
            copy_command(
                opened, shown_path(path), "filled", (*asked.given, "--salvage", "--fill-from", other), whole=True
            )
        )


def _other_step(opened: OpenCheckpoint) -> str | None:
    """The newest complete checkpoint beside this one whose name differs in numbers alone: another step of the run."""
    if opened.source.is_remote or not opened.folder:
        return None
    parent, name = os.path.split(os.path.abspath(opened.source.root))
    alike = re.sub(r"\d+", "#", name)
    if alike == name:
        return None
    with Source(parent) as above:
        rows = detection.below(above).checkpoints
    names = [c.name for c in rows if c.complete and c.name != name and re.sub(r"\d+", "#", c.name) == alike]
    return os.path.join(parent, names[-1]) if names else None
