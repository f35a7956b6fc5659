"""`Finding`: one thing that is wrong with a checkpoint; `Examined`: what the checks of checks_*.py look at.

A check is a function of an `Examined` that returns findings. The index is open and sound when it is called, so a check
never opens the checkpoint again.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ... import layouts
from ...errors import CkpttoolError
from ...huggingface import model_files, model_names
from ...index.checkpoint import Checkpoint
from ...storage.source import Source
from ..opening import OpenCheckpoint

__all__ = ["DAMAGE", "MISMATCH", "NOTE", "Examined", "Finding", "copy_command"]

DAMAGE, MISMATCH, NOTE = "damage", "mismatch", "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a checkpoint, or worth knowing.

    `kind`      one word: "cut", "empty", "missing", "lfs-pointer", ...; docs/how-to/doctor.md lists them
    `severity`  "damage"; "mismatch" with the checkpoint that `--like` names; or "note" of what is neither
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
class Examined:
    """A checkpoint that is open, and what was asked.

    `path` is how the user gave it, `config` what `--config` named, `given` all options of the command line that say how
    to read it.
    """

    opened: OpenCheckpoint
    path: str
    config: str | None = None
    given: tuple[str, ...] = ()

    @property
    def ckpt(self) -> Checkpoint:
        """Its index."""
        return self.opened.checkpoint

    @property
    def source(self) -> Source:
        """Its files."""
        return self.opened.source

    @cached_property
    def model_config(self) -> dict[str, Any] | None:
        """The config.json of the model: that of `--config`, the one the layout has read, or the one in the folder."""
        if self.config is not None:
            return model_names.config_of(self.config)
        if self.ckpt.config is not None or not self.opened.folder:
            return self.ckpt.config
        try:
            return model_files.read_config(self.source) if "config.json" in self.source.list() else None
        except CkpttoolError:
            return None

    def copy(self, ending: str, *options: str) -> str:
        """The command that writes a copy named PATH-ENDING in the same layout, with these options."""
        return copy_command(self.opened, self.path, ending, (*self.given, *options))


def copy_command(
    opened: OpenCheckpoint, path: str, ending: str, options: tuple[str, ...], *, whole: bool = False
) -> str:
    """The command that writes a copy of a checkpoint named PATH-ENDING: in the same layout, or in dcp if that is only
    read; with `whole`, also components that were not opened."""
    layout = opened.layout
    plain = path.rstrip("/")
    stem, dot = os.path.splitext(plain)
    file = layout.is_file or not opened.folder
    to = layout if layout.write is not None else layouts.find("dcp")
    target = f"{stem}-{ending}{dot}" if file and layout.write is not None else f"{plain}-{ending}"
    by_name = file and target.endswith((*to.suffixes, ".safetensors"))
    ranks = opened.checkpoint.world_size or 1
    world = ["-n", str(ranks)] if "world_size" in to.writer_uses and not by_name else []
    how = [] if by_name else ["--to", to.name, *world]
    how += ["--only", ",".join(opened.only)] if opened.only is not None and not whole else []
    return shlex.join(["ckpttool", "convert", path, target, *how, *options])
