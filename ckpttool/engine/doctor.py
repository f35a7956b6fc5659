"""What is wrong with a checkpoint, what of it is whole, and which command helps: `doctor`.

Errors that other commands raise are findings here. Nothing is written, no pickle is executed, and without `read_data` only headers
and pickles are read.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import layouts
from ..errors import CkpttoolError, NotRecognised, RemoteError, UsageError
from ..storage import urls
from ..storage.patched import PatchedSource
from . import salvage
from .fill import Progress, silent, tensor_digests
from .opening import CheckpointPath, OpenCheckpoint, OpenOptions, open_with, shown_path
from .verification import salvaged

__all__ = ["Diagnosis", "Finding", "doctor"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint, or worth knowing.

    `kind`      one word: "cut", "empty", "missing", "lfs-pointer", ...
    `severity`  "damage", or "note" of what does not make the checkpoint damaged
    `file`      relative to the checkpoint; None if it is about no single file
    `tensors`   their names, if it is about some
    `text`      what was found, and what it means
    `repair`    the command to type next; None if none helps
    """

    kind: str
    severity: str
    file: str | None
    tensors: tuple[str, ...]
    text: str
    repair: str | None = None


@dataclass
class Diagnosis:
    """What `doctor` found.

    `sound`    no finding is damage
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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def doctor(
    path: CheckpointPath,
    *,
    read_data: bool = False,
    source_layout: str | None = None,
    config: str | None = None,
    tag: str | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """What is wrong with a checkpoint, what of it is whole, and what to type next.

    Args:
        read_data: also read every byte of the tensors that seem whole, and compare it with the CRC32s that the files carry.
        progress: called with ("read", bytes done, bytes in all).
        (the others): as `open`.

    Raises:
        NotRecognised: there is nothing, or nothing that looks like a checkpoint. Damage is no error, but a finding.
    """
    name = shown_path(path)
    out = Diagnosis(urls.display_path(name), True, None, 0, 0)
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        found = salvage.problems(where)
    for p in found:
        out.findings.append(Finding(p.kind, "damage", p.file, (), f"{p.file} {p.text}", p.repair))
    usual = OpenOptions(source_layout=source_layout, config=config, tag=tag)
    refused: CkpttoolError | None = None
    try:
        with open_with(path, usual, check_hints=False) as opened:
            _look_at(opened, out, read_data, progress)
    except (UsageError, RemoteError):
        raise
    except CkpttoolError as e:
        refused = e
    if refused is not None:
        _what_is_left(
            path,
            OpenOptions(source_layout=source_layout, config=config, tag=tag, salvage=True),
            out,
            refused,
            read_data,
            progress,
        )
    out.sound = not any(f.severity == "damage" for f in out.findings)
    out.next += [f.repair for f in out.findings if f.repair and f.repair not in out.next]
    return out


def _look_at(opened: OpenCheckpoint, out: Diagnosis, read_data: bool, progress: Progress) -> None:
    """Fill in what can be seen of a checkpoint that opens."""
    ckpt = opened.locate()
    out.layout, out.exact, out.exact_bytes = ckpt.layout, len(ckpt.tensors), ckpt.nbytes
    if not isinstance(opened.source, PatchedSource) and (before := salvaged(opened)) is not None:
        out.missing, out.rebuilt = before["missing"], before["rebuilt"]
        out.exact -= len(out.rebuilt)
        text = (
            f"this is a salvaged copy: {before['exact']:,} of its tensors are exact, {len(out.rebuilt):,} were rebuilt, "
            f"{len(out.missing):,} are missing"
        )
        out.findings.append(Finding("salvaged", "note", None, (), text))
    if read_data:
        tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, progress, "read")
        opened.source.assert_unchanged()


def _what_is_left(
    path: CheckpointPath,
    options: OpenOptions,
    out: Diagnosis,
    refused: CkpttoolError,
    read_data: bool,
    progress: Progress,
) -> None:
    """Fill in what can be salvaged of a checkpoint that does not open: all that is whole, or the weights alone."""
    if not out.findings:
        if isinstance(refused, NotRecognised):
            raise refused
        out.findings.append(Finding("unreadable", "damage", None, (), str(refused)))
    why: list[str] = []
    for only in (None, ("model",)):
        try:
            with open_with(path, replace(options, only=only), check_hints=False) as opened:
                _look_at(opened, out, read_data, progress)
            break
        except RemoteError:
            raise
        except CkpttoolError as e:
            why.append(str(e))
    else:
        out.layout, out.exact, out.exact_bytes = None, 0, 0
        if all(why[0] not in f.text and f.text not in why[0] for f in out.findings):
            out.findings.append(Finding("unreadable", "damage", None, (), why[0]))
        return
    left = opened.checkpoint.salvage
    if left is None or not (left.missing or left.rebuilt or left.problems or why):
        return
    if why:
        out.findings.append(Finding("lost", "damage", None, (), f"all but the weights: {why[0]}"))
    out.missing, out.rebuilt = left.missing, left.rebuilt
    out.exact = len(opened.checkpoint.tensors) - len(left.rebuilt)
    for text in left.problems:
        if all(f.text != text for f in out.findings):
            out.findings.append(Finding("missing", "damage", text.partition(" ")[0], (), text))
    if left.missing:
        text = f"{len(left.missing):,} tensors or values are lost"
        out.findings.append(Finding("lost", "damage", None, tuple(left.missing), text))
    out.next = [_salvage(shown_path(path), opened)]


def _salvage(path: str, opened: OpenCheckpoint) -> str:
    """The command that writes what is left."""
    layout = opened.layout
    plain = path.rstrip("/")
    stem, dot = os.path.splitext(plain)
    file = layout.is_file or not opened.folder
    to = layout if layout.write is not None else layouts.find("dcp")
    target = f"{stem}-salvaged{dot}" if file and layout.write is not None else f"{plain}-salvaged"
    by_name = file and target.endswith((*to.suffixes, ".safetensors"))
    ranks = opened.checkpoint.world_size or 1
    world = ["-n", str(ranks)] if "world_size" in to.writer_uses and not by_name else []
    how = [] if by_name else ["--to", to.name, *world]
    how += ["--only", ",".join(opened.only)] if opened.only is not None else []
    return shlex.join(["ckpttool", "convert", path, target, *how, "--salvage"])
