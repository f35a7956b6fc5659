"""`Draft`: the index of a destination whose bytes are still missing.

`checkpoint.tensors` says where every chunk will be, `sources` which tensor of the source (or which part of one) fills
it, `files` what else each file contains. The draft is the plan: `--dry-run` prints it. `checkpoint.values` are those
that a reader will find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..by_fields import ByFields
from .checkpoint import Checkpoint, Path, TensorEntry, Value, joined

__all__ = [
    "Draft",
    "DraftFile",
    "Dropped",
    "EarlierFile",
    "Framing",
    "Sink",
    "Written",
    "turn_positions_into_keys",
]

#: (tensor, chunk of it, CRC32 of its bytes): a chunk of the destination that was written.
Written = tuple[str, int, int]
Framing = Callable[[str, TensorEntry, int, Sequence[Written]], bytes]


class Dropped(NamedTuple):
    """A part of the state that the target cannot hold."""

    name: str
    nbytes: int
    why: str


class Sink(Protocol):
    """Transforms the bytes of a file on their way to the disk: compression, encryption.

    `append` takes the next bytes, which may stay in a buffer, and `at` counts them. If `resumable`, `flush` writes
    everything that is buffered. A later sink that gets the same bytes from the beginning can use `state` (JSON) to
    check what this one has written instead of writing it again. `finish` writes the end of the file; `close` stops its
    threads, also after a failure.
    """

    @property
    def at(self) -> int: ...
    def append(self, data: bytes | memoryview) -> None: ...
    def resumable(self) -> bool: ...
    def flush(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class EarlierFile(NamedTuple):
    """What an earlier run left of a file: the state of its sink, and `read(offset, length)`, which may give fewer
    bytes. Neither is trusted before the bytes are proved to be right."""

    state: dict[str, Any]
    read: Callable[[int, int], bytes]


@dataclass(eq=False, repr=False)
class DraftFile(ByFields):
    """A file of the destination: `head` are its first bytes, or all of them if it contains no chunk.

    `coded(write, jobs, earlier)` makes the sink of a file that is transformed on its way to the disk. With `earlier`,
    `write` compares with the disk until the earlier run's last byte and raises `Altered`.

    `record_at(offset)`: the first byte of the record that a byte of a chunk lies in. What `Draft.before` gives for the
    next chunk of the file follows from the chunks of that record, so that whoever writes all of them can write the
    bytes between, too.

    `frames_alone`: what `Draft.before` and `Draft.after` give for a chunk of it follows from that chunk and its CRC32
    alone, so that whoever writes the chunk can write the bytes around it, too.
    """

    name: str
    size: int
    head: bytes | list[bytes] | Callable[[], bytes] = b""
    coded: Callable[[Callable[[bytes | memoryview], None], int, EarlierFile | None], Sink] | None = None
    frames_alone: bool = False
    record_at: Callable[[int], int] | None = None

    def first_bytes(self) -> bytes:
        """Return `head` as bytes: the function's result if it is a function, joined if it is a list."""
        head = self.head() if callable(self.head) else self.head
        return head if isinstance(head, bytes) else b"".join(head)


@dataclass(eq=False, repr=False)
class Draft(ByFields):
    """A destination whose tensor bytes are still missing.

    Files are written front to back in the order of `checkpoint.tensors`, which therefore lists, for every file, its
    chunks by ascending offset. `files[i]` is `checkpoint.files[i]`; the last one is the marker without which a reader
    does not take the folder for a checkpoint.

    `before(name, entry, row, written)` and `after(name, entry, row, written)` are the bytes around a chunk (a zip's
    local header and data descriptor, padding), `tail(file, written, digests)` those at the end of a file; `written` are
    the chunks of that file so far, in order, in `after` with the one it follows. A tensor whose name is not canonical
    ("replica...", "module...") is another copy of its source.
    """

    checkpoint: Checkpoint
    sources: dict[str, TensorEntry]
    files: list[DraftFile]
    dropped: list[Dropped] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # name without bytes of its own -> the name that has them
    before: Framing | None = None
    after: Framing | None = None
    tail: Callable[[int, Sequence[Written], dict[str, str]], bytes] | None = None
    notes: list[str] = field(default_factory=list)
    averages: frozenset[str] = frozenset()  # tensors that are averages of squares: `fill` refuses numbers below 0
    # tensors and values that the layout needs but the source lacks: zeros, counters
    synthesized_tensors: list[str] = field(default_factory=list)
    synthesized_values: dict[str, object] = field(default_factory=dict)
    changed: dict[str, str] = field(
        default_factory=dict
    )  # {value that `checkpoint` has otherwise than the source: how}
    taken_apart: dict[str, Value] = field(
        default_factory=dict
    )  # values that the files hold as several; the record has them whole
    object_lock: dict[str, object] = field(default_factory=dict)  # S3's arguments of an object lock; {} for none
    summary: dict[str, Any] = field(default_factory=dict)  # facts about the destination, known after its last byte
    # known after its last byte, too: {tensor: {"dtype", "infinite", "nan", "cut"}}, the numbers that a cast to that
    # dtype could not hold
    lost: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a short text for people: the layout, the numbers of tensors and files, and the bytes of all files."""
        tensors = len(self.checkpoint.tensors)
        return (
            f"<Draft {self.checkpoint.layout}: {tensors:,} tensors, {len(self.files):,} files, {self.nbytes:,} bytes>"
        )

    @property
    def nbytes(self) -> int:
        """Count the bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def needed_bytes(self) -> int:
        """Count the bytes that the destination needs on the disk: those of its files, and 1 MiB for ckpttool.json and
        the journal."""
        return self.nbytes + (1 << 20)


def turn_positions_into_keys(draft: Draft, paths: Iterable[Path], *, back: bool = False) -> None:
    """Turn the position in a list, as the second element of a value's path, into a text key, for a layout that writes
    one file for each rank or scheduler and reads the file's number back as a key.

    Args:
        draft: the draft; the values of its checkpoint get new paths under the same names, and `changed` a note on each.
        paths: canonical paths; one without a value or without a position is ignored.
        back: turn such keys into positions, for a layout that writes a list.
    """
    of_list, of_file = "its position in a list", "the number of its file"
    why = f"{of_file} is {of_list}" if back else f"{of_list} is the number of a file"
    for path in paths:
        held = draft.checkpoint.values.get(joined(path))
        if held is not None and isinstance(path[1], str if back else int):
            second = int(path[1]) if back else str(path[1])
            draft.checkpoint.values[joined(path)] = Value((path[0], second, *path[2:]), held.data)
            draft.changed[joined(path)] = why
