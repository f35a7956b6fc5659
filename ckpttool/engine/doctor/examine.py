"""What is wrong with a checkpoint, what of it is whole, and which command helps: `doctor`.

Errors that other commands raise are findings here. Nothing is written, no pickle is executed, and without `read_data`
only headers and pickles are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Unpack

from ... import layouts
from ...errors import CkpttoolError, IncompleteWeights, NotRecognised, RemoteError, Unsupported, UsageError, argument
from ...options import HUB_LAYOUT, Search, list_keywords
from ...printable import Shown, count_noun
from ...storage import urls
from ...storage.source import Source
from .. import salvage
from ..copy.fill import Progress, silent
from ..copy.tensor_digests import reporting
from ..discover import detection
from ..discover.unread_files import human
from ..opening import CheckpointPath, OpenCheckpoint, OpenOptions, open_checkpoint, show_path
from ..verification import summarise_salvage
from .checks import Examined, Request, make_copy_command, run_checks
from .checks_files import LOST, MISSING, NOT_READ, SALVAGED, UNREADABLE, make_file_finding, make_refusal_finding
from .findings import DAMAGE, MISMATCH, NOTE, Finding

__all__ = ["Diagnosis", "Finding", "doctor"]

_SHOWN = 10  # names of what is lost


@dataclass(repr=False)
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

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data for JSON."""
        return asdict(self)

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """Yield the lines of the report: the state, the findings, the first `_SHOWN` lost tensors or values (all with
        `verbose`), and the next commands."""
        state = "sound" if self.sound else "damaged"
        if self.sound and self.fits is False:
            state = f"sound, but it does not fit {argument('like')}"
        yield f"{self.path}: {state}"
        for f in self.findings:
            yield f"  {f.kind}: {f.text}"
        if self.layout is not None:
            lost = f", {len(self.missing):,} lost" if self.missing else ""
            made = f", {len(self.rebuilt):,} can be rebuilt" if self.rebuilt else ""
            whole = count_noun(self.exact, "tensor is", "tensors are")
            yield f"{self.layout}: {whole} whole, {human(self.exact_bytes)}{made}{lost}"
        elif not self.sound:
            yield "nothing of it can be read"
        names = list(self.missing.items())
        for name, why in names if verbose else names[:_SHOWN]:
            yield f"  lost: {name}: {why}"
        if len(names) > _SHOWN and not verbose:
            yield f"  ... {len(names) - _SHOWN:,} more; {argument('verbose', True)} names them"
        for line in self.next:
            yield f"next: {line}"


@list_keywords
def doctor(
    path: CheckpointPath,
    *,
    read_data: bool = False,
    progress: Progress = silent,
    **reading: Unpack[Search],
) -> Diagnosis:
    """Find out what is wrong with a checkpoint, what of it is whole, and what to type next.

    Args:
        read_data: also read every byte of the tensors that seem whole, and compare it with the CRC32s that the files
            carry.
        like: a checkpoint of the job that refuses to load this one; its param groups are compared with those here. It
            also says what this one does not about its parameters, as in `open`, where nothing else does.
        progress: called with ("read", bytes done, bytes in all), and before with "prove" if tensors have no names until
            they are read.
        (the others): as `open`.

    Raises:
        NotRecognised: there is nothing, or nothing that looks like a checkpoint. Damage is a finding, not an error.
        Unsupported: it is not damaged, as far as can be seen, but ckpttool cannot read it, or needs hints for that.
    """
    name = show_path(path)
    out = Diagnosis(urls.display_path(name), True, None, 0, 0)
    # damaged files first: by them alone, or beside what the checks of the whole find
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        found = salvage.find_problems(where)
    out.findings += [make_file_finding(problem) for problem in found]
    like = reading.pop("like", None)  # where nothing else helps, `_examine_readable_part` reads with it
    usual = OpenOptions(allow_mixed_steps=True, **reading)
    request = Request(
        name, read_data, usual.config, None if like is None else os.fspath(like), progress, _list_reading_options(usual)
    )
    # the checks need a checkpoint that opens: as it is, with less of it, or what can be salvaged
    refused: CkpttoolError | None = None
    try:
        with reporting(progress), open_checkpoint(path, usual, check_hints=False) as opened:
            _run_checks_on(opened, out, request)
    except (UsageError, RemoteError):
        raise
    except CkpttoolError as e:
        refused = e
    if isinstance(refused, Unsupported) and not out.findings:
        _examine_readable_part(path, usual, out, refused, request)
    elif refused is not None:
        _examine_salvageable_part(path, replace(usual, salvage=True), out, refused, request)
    out.findings = list(dict.fromkeys(out.findings))  # what was looked at twice
    out.sound = not any(f.severity == DAMAGE for f in out.findings)
    out.fits = None if like is None else not any(f.severity == MISMATCH for f in out.findings)
    out.next = list(dict.fromkeys([*out.next, *(f.repair for f in out.findings if f.repair)]))
    return out


def _list_reading_options(options: OpenOptions) -> tuple[str, ...]:
    """Return the command-line words that say how to read a checkpoint: ("--config", "FOLDER", ...)."""
    flags = {
        "--from": options.source_layout,
        "--config": options.config,
        "--flat-layout": options.flat_layout,
        "--tag": options.tag,
        "--wrap": None if options.wrap is None else ",".join(options.wrap),
    }
    return tuple(os.fspath(word) for flag, value in flags.items() if value is not None for word in (flag, value))


def _run_checks_on(opened: OpenCheckpoint, out: Diagnosis, request: Request) -> None:
    """Run the checks on an opened checkpoint, and put its counts and the findings into `out`."""
    ckpt = opened.locate()
    out.layout, out.exact, out.exact_bytes = ckpt.layout, len(ckpt.tensors), ckpt.nbytes
    if opened.source.patched is None and (before := summarise_salvage(opened)) is not None:
        out.missing, out.rebuilt = before["missing"], before["rebuilt"]
        out.exact = before["exact"]
        text = (
            f"this is a salvaged copy: {before['exact']:,} of its tensors are exact, {len(out.rebuilt):,} were "
            f"rebuilt, {len(out.missing):,} are missing"
        )
        out.findings.append(Finding(SALVAGED, NOTE, None, (), text))
    run_checks(Examined(opened, request, out.findings))


def _examine_readable_part(
    path: CheckpointPath, options: OpenOptions, out: Diagnosis, refused: Unsupported, request: Request
) -> None:
    """Examine a part of a checkpoint that is not damaged but cannot be read as it is, and put the result into `out`.

    Three ways are tried: with the help of `like`, the weights alone, and only the safetensors files of the folder.

    Args:
        options: the options with which opening failed.
        refused: the error that opening raised.

    Raises:
        Unsupported: `refused`, where none of these ways works.
    """
    ways = [replace(options, like=request.like)] if request.like is not None else []
    by_itself = [replace(options, source_layout=HUB_LAYOUT)] if options.source_layout is None else []
    for way in (*ways, replace(options, only=("model",)), *by_itself):
        try:
            with open_checkpoint(path, way, check_hints=False) as opened:
                _run_checks_on(opened, out, request)
        except CkpttoolError:
            continue
        if way.source_layout != options.source_layout:
            out.findings.append(
                Finding(NOT_READ, NOTE, None, (), f"only the safetensors files were looked at: {refused}")
            )
        elif way.only:
            out.findings.append(Finding(NOT_READ, NOTE, None, (), f"only the weights were looked at: {refused}"))
        return
    raise refused


def _examine_salvageable_part(
    path: CheckpointPath,
    options: OpenOptions,
    out: Diagnosis,
    refused: CkpttoolError,
    request: Request,
) -> None:
    """Examine what can be salvaged of a checkpoint that does not open, all complete tensors or else the weights alone,
    and put the result and the commands that salvage it into `out`.

    Args:
        options: how to open it, with `salvage`.
        refused: the error of opening it without.

    Raises:
        NotRecognised: `refused`, where no file was found damaged.
        RemoteError: a store or server fails.
    """
    if not out.findings:
        if isinstance(refused, NotRecognised):
            raise refused
        out.findings.append(make_refusal_finding(refused))
    # open what is whole, or the weights of it alone
    why: list[str] = []
    opened: OpenCheckpoint | None = None
    for only in (None, ("model",)):
        try:
            with open_checkpoint(path, replace(options, only=only), check_hints=False) as found:
                _run_checks_on(found, out, request)
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
            out.findings.append(Finding(UNREADABLE, DAMAGE, None, (), why[0]))
        return
    # say what is lost, in a finding for each reason
    left = opened.checkpoint.salvage
    if left is None or not (left.missing or left.rebuilt or left.problems or why):
        return
    if why:
        out.findings.append(Finding(LOST, DAMAGE, None, (), f"all but the weights: {why[0]}"))
    out.missing, out.rebuilt = left.missing, left.rebuilt
    out.exact = len(opened.checkpoint.tensors.keys() - left.rebuilt.keys())
    for text in left.problems:
        if all(f.text != text for f in out.findings):
            out.findings.append(Finding(MISSING, DAMAGE, text.partition(" ")[0], (), text))
    if left.missing:
        text = "1 entry is lost" if len(left.missing) == 1 else f"{len(left.missing):,} tensors or values are lost"
        out.findings.append(Finding(LOST, DAMAGE, None, tuple(left.missing), text))
    # name the commands that write what is left
    options_given = (*request.given, "--salvage")
    out.next = [make_copy_command(opened, request.path, "salvaged", options_given)]
    if left.missing and (other := _find_other_step(opened)) is not None:
        filling = (*options_given, "--fill-from", other)
        out.next.append(make_copy_command(opened, request.path, "filled", filling, whole=True))


def _find_other_step(opened: OpenCheckpoint) -> str | None:
    """Return the path of the newest complete checkpoint in the parent folder whose name differs only in numbers, i.e.
    another step of the run; None where there is none."""
    if opened.source.is_remote or not opened.folder:
        return None
    parent, name = os.path.split(os.path.abspath(opened.source.root))
    alike = re.sub(r"\d+", "#", name)
    if alike == name:
        return None
    with Source(parent) as above:
        rows = detection.find_checkpoints(above).checkpoints
    names = [c.name for c in rows if c.complete and c.name != name and re.sub(r"\d+", "#", c.name) == alike]
    return os.path.join(parent, names[-1]) if names else None
