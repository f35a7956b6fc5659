"""Checks of one checkpoint: how one is written and registered, and what it is given.

A check is a function of an `Examined` that returns findings, in any module of this folder that is named checks_*.py:

    EMPTY_ROWS = define_kind("empty-rows", 250, "rows of an embedding that are all zero", "rows-of-the-vocabulary")

    @check(EMPTY_ROWS)
    def find_empty_rows(at: Examined) -> list[Finding]: ...

Nothing else needs to know of it. The checkpoint is open when a check is called, so a check never opens it again. With
`reads_data`, it only runs where the user asked for all bytes to be read. One that has to look at every block is a
class, registered with `block_check`: all of them share one pass over the data.
"""

from __future__ import annotations

import os
import pkgutil
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import NamedTuple, Protocol, TypeVar

from ... import layouts
from ...errors import CkpttoolError
from ...huggingface import model_files, model_names
from ...index.checkpoint import Checkpoint, TensorEntry
from ...options import DEFAULT_LAYOUT
from ...storage.source import Source
from ..copy.fill import Progress, silent
from ..copy.stream import Block
from ..copy.tensor_digests import tensor_digests
from ..opening import OpenCheckpoint
from .findings import KINDS, Finding, FindingKind

__all__ = [
    "CHECKS",
    "BlockCheck",
    "DoctorCheck",
    "Examined",
    "Request",
    "block_check",
    "check",
    "list_kinds_from_data",
    "load_checks",
    "make_copy_command",
    "run_checks",
]


class DoctorCheck(NamedTuple):
    """A registered check.

    `find`        returns what it finds
    `kinds`       what it may find, the first in order first
    `reads_data`  it runs only where all bytes are read
    `needs_whole` it does not run on what is left of a damaged checkpoint
    """

    find: Callable[[Examined], list[Finding]]
    kinds: tuple[FindingKind, ...]
    reads_data: bool
    needs_whole: bool


class BlockCheck(Protocol):
    """A check that looks at every block of every tensor while the data is read once."""

    def __init__(self, ckpt: Checkpoint) -> None: ...

    def add(self, block: Block) -> None:
        """Check one block of a tensor. The block's data is valid only during the call, so keep no reference to it."""

    def findings(self) -> list[Finding]:
        """Return the findings of this check about all tensors; called once every block was passed to `add`."""


#: Every check that was registered, as they were defined.
CHECKS: list[DoctorCheck] = []
#: Classes of checks that look at blocks.
BLOCK_CHECKS: list[type[BlockCheck]] = []

FindFunction = TypeVar("FindFunction", bound="Callable[[Examined], list[Finding]]")
BlockClass = TypeVar("BlockClass", bound=type[BlockCheck])


def check(
    *kinds: FindingKind, reads_data: bool = False, needs_whole: bool = False
) -> Callable[[FindFunction], FindFunction]:
    """Register the decorated function as a check.

    Args:
        kinds: the kinds of findings it may return; the order of the first one decides when it runs.
        reads_data: whether it runs only if all bytes are read.
        needs_whole: whether to skip it for the remains of a damaged checkpoint.
    """

    def register(find: FindFunction) -> FindFunction:
        CHECKS.append(DoctorCheck(find, kinds, reads_data, needs_whole))
        return find

    return register


def block_check(*kinds: FindingKind) -> Callable[[BlockClass], BlockClass]:
    """Register the decorated class as a check that looks at every block of the data.

    Args:
        kinds: the kinds of findings it may return; the order of the first one decides when it runs.
    """

    def register(cls: BlockClass) -> BlockClass:
        BLOCK_CHECKS.append(cls)
        CHECKS.append(DoctorCheck(lambda at: at.block_checks[cls].findings(), kinds, True, False))
        return cls

    return register


def load_checks() -> None:
    """Import the modules of this folder that define checks and kinds of findings, so that they are registered."""
    folder = os.path.dirname(__file__)
    for module in pkgutil.iter_modules([folder]):
        if module.name.startswith("checks_"):
            import_module(f"{__package__}.{module.name}")


def list_kinds_from_data() -> set[FindingKind]:
    """Return the kinds of findings that only checks with `reads_data` report."""
    without = {kind for each in CHECKS if not each.reads_data for kind in each.kinds}
    return {kind for each in CHECKS if each.reads_data for kind in each.kinds} - without


def run_checks(at: Examined) -> None:
    """Run every check that applies, in the order of their first kinds, and add what they find to `at.found`."""
    load_checks()
    whole = at.source.patched is None
    for each in sorted(CHECKS, key=lambda c: KINDS[c.kinds[0]].order):
        if (whole or not each.needs_whole) and (at.request.read_data or not each.reads_data):
            at.found += each.find(at)


class Request(NamedTuple):
    """What the user asked about a checkpoint.

    `path`       as it was given
    `read_data`  whether every byte is to be read
    `config`     what `--config` named
    `like`       the checkpoint that `--like` named
    `given`      all options of the command line that say how to read the checkpoint
    """

    path: str
    read_data: bool = False
    config: str | None = None
    like: str | None = None
    progress: Progress = silent
    given: tuple[str, ...] = ()


@dataclass
class Examined:
    """A checkpoint that is open, what was asked about it, and the findings so far."""

    opened: OpenCheckpoint
    request: Request
    found: list[Finding] = field(default_factory=list)
    #: called with every block, too, while the data is read
    also: Callable[[Block], None] | None = None

    @property
    def ckpt(self) -> Checkpoint:
        """Get the index of the checkpoint."""
        return self.opened.checkpoint

    @property
    def source(self) -> Source:
        """Get the files of the checkpoint."""
        return self.opened.source

    @property
    def weights(self) -> dict[str, TensorEntry]:
        """Get the weights of the model, {FQN: tensor}, without extra states of modules."""
        return {str(t.path[1]): t for t in self.ckpt.tensors.values() if t.path[0] == "model" and len(t.path) == 2}

    @cached_property
    def model_config(self) -> dict[str, object] | None:
        """Get the model's config.json as a dict: the one that `--config` names, else the one that the layout has read,
        else the one in the folder. None where there is none that can be read.

        Raises:
            CkpttoolError: the one that `--config` names cannot be read.
        """
        if self.request.config is not None:
            return model_names.load_config(self.request.config)
        if self.ckpt.config is not None or not self.opened.folder:
            return self.ckpt.config
        try:
            return model_files.read_config_json(self.source) if "config.json" in self.source.list() else None
        except CkpttoolError:
            return None

    @cached_property
    def block_checks(self) -> Mapping[type[BlockCheck], BlockCheck]:
        """Get the block checks, {class: its instance}, after every block of every tensor was passed to all of them."""
        return self._read_everything[0]

    @property
    def digests(self) -> dict[str, str] | None:
        """Get {canonical name of a tensor: BLAKE3 of its bytes, in hex}; None if the request says not to read the
        data."""
        return self._read_everything[1] if self.request.read_data else None

    @cached_property
    def _read_everything(self) -> tuple[dict[type[BlockCheck], BlockCheck], dict[str, str]]:
        """Read every tensor once, and get the pair ({class of a block check: its instance, to which every block was
        passed}, {canonical name of a tensor: BLAKE3 of its bytes, in hex}).

        Raises:
            Corrupt, SourceChanged: bytes do not match their CRC32, or were written meanwhile.
        """
        ckpt = self.ckpt
        checks = {cls: cls(ckpt) for cls in BLOCK_CHECKS}

        def add(block: Block) -> None:
            for each in checks.values():
                each.add(block)
            if self.also is not None:
                self.also(block)

        digests = tensor_digests(
            ckpt.tensors, self.source, ckpt.files, ckpt.records, self.request.progress, "read", seen=add
        )
        self.source.assert_unchanged()
        return checks, digests

    def copy_with(self, ending: str, *options: str) -> str:
        """Return the shell command that writes a copy of the checkpoint with further options.

        Args:
            ending: word that the copy's name has behind the checkpoint's name and "-", before the suffix of a file.
            options: words of the command line, besides those that say how to read the checkpoint: "--only", "model".
        """
        return make_copy_command(self.opened, self.request.path, ending, (*self.request.given, *options))


def make_copy_command(
    opened: OpenCheckpoint, path: str, ending: str, options: tuple[str, ...], *, whole: bool = False
) -> str:
    """Return the shell command that writes a copy of a checkpoint: in the same layout, or in dcp if ckpttool does not
    write the layout.

    Args:
        path: the checkpoint, as the user gave it.
        ending: word that the copy's name has behind the checkpoint's name and "-", before the suffix of a file.
        options: further words of the command line.
        whole: whether to also copy the components that were not opened.
    """
    layout = opened.layout
    plain = path.rstrip("/")
    stem, dot = os.path.splitext(plain)
    file = layout.is_file or not opened.folder
    to = layout if layout.write is not None else layouts.find(DEFAULT_LAYOUT)
    target = f"{stem}-{ending}{dot}" if file and layout.write is not None else f"{plain}-{ending}"
    # a target whose name tells its layout needs neither --to nor a number of ranks
    by_name = file and target.endswith((*to.suffixes, ".safetensors"))
    ranks = opened.checkpoint.world_size or 1
    world = ["-n", str(ranks)] if "world_size" in to.writer_uses and not by_name else []
    how = [] if by_name else ["--to", to.name, *world]
    only = opened.selection.only
    how += ["--only", ",".join(only)] if only is not None and not whole else []
    return shlex.join(["ckpttool", "convert", path, target, *how, *options])
