"""The checkpoint to be.

A `Draft` is the index of the destination with the bytes still missing: `checkpoint.tensors` says where every chunk will
lie, `sources` which tensor of the source (or which part of one) fills it, `files` what else each file holds. It is the
plan: `--dry-run` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .checkpoint import Checkpoint, TensorEntry

__all__ = ["Draft", "DraftFile", "Dropped", "EarlierFile", "Framing", "Sink", "Written"]

#: (tensor, chunk of it, CRC32 of its bytes): a chunk of the destination that was written.
Written = tuple[str, int, int]
Framing = Callable[[str, TensorEntry, int, Sequence[Written]], bytes]


class Dropped(NamedTuple):
    """A part of the state that the target cannot hold."""

    name: str
    nbytes: int
    why: str


class Sink(Protocol):
    """What stands between the bytes of a file, as the draft has them, and those on the disk: compression, a cipher.

    `at` counts the bytes appended. Where `resumable`, `settle` hands everything on, and `state`, JSON-able, lets another
    sink that is given the same bytes from the beginning on check what this one has written instead of making it again.
    """

    @property
    def at(self) -> int: ...
    def append(self, data: bytes | memoryview) -> None: ...
    def resumable(self) -> bool: ...
    def settle(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class EarlierFile(NamedTuple):
    """What an earlier run left of a file: the state of its sink, and `read(offset, length)`, which may give fewer bytes.
    Neither is believed before the bytes are proved to be the right ones."""

    state: dict[str, Any]
    read: Callable[[int, int], bytes]


@dataclass
class DraftFile:
    """One file to be: `head` are its first bytes, or all of them where no chunk lies in it.

    `coded(write, jobs, earlier)` makes the sink of a file whose bytes on the disk are other ones. With `earlier`, `write`
    compares with the disk until the earlier run's last byte and raises `Altered`.
    """

    name: str
    size: int
    head: bytes | Callable[[], bytes] = b""
    coded: Callable[[Callable[[bytes | memoryview], None], int, EarlierFile | None], Sink] | None = None

    def first_bytes(self) -> bytes:
        """The literal bytes."""
        return self.head() if callable(self.head) else self.head


@dataclass
class Draft:
    """A destination whose tensor bytes are still missing.

    Files are written front to back in the order of `checkpoint.tensors`, which therefore lists, for every file, its
    chunks by ascending offset. `files[i]` is `checkpoint.files[i]`; the last one is the marker without which a reader
    does not take the folder for a checkpoint.

    `before(name, entry, row, written)` and `after(name, entry, row, written)` are the bytes around a chunk (a zip's
    local header and data descriptor, padding), `tail(file, written, digests)` those at the end of a file; `written` are
    the chunks of that file so far, in order, in `after` with the one it follows. None means none. A tensor under a name
    that no canonical one is ("replica...", "module...") is a further copy of its source.
    """

    checkpoint: Checkpoint
    sources: dict[str, TensorEntry]
    files: list[DraftFile]
    dropped: list[Dropped] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)  # name without bytes of its own -> the name that has them
    before: Framing | None = None
    after: Framing | None = None
    tail: Callable[[int, Sequence[Written], dict[str, Any]], bytes] | None = None
    notes: list[str] = field(default_factory=list)
    added: list[str] = field(
        default_factory=list
    )  # tensors that the layout has and the source has not: zeros, counters
    made: dict[str, Any] = field(default_factory=dict)  # values likewise: {name: data}
    lock: dict[str, Any] = field(default_factory=dict)  # arguments of an object lock, where the destination has such
    about: dict[str, Any] = field(default_factory=dict)  # what is known of the destination when its last byte is

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)
