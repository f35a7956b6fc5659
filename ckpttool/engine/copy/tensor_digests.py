"""Digests of tensors that are read and not written; those that a layout needs before it can name its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from blake3 import blake3

from ...formats.stored_tensors import Inline
from ...index.checkpoint import Checkpoint, TensorEntry, Value, joined
from ...index.records import Records
from ...progress import receive_progress
from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ...storage.source import Source
from .fill import Progress, silent
from .stream import Block, Reader, StreamJob

__all__ = [
    "announce_proof_bytes",
    "digest_arrays_in_values",
    "proof_digests",
    "reporting",
    "tensor_digests",
    "tensor_digests_and_crcs",
]


@dataclass
class _Report:
    """Bytes that were read by `proof_digests`, and those that were announced."""

    progress: Progress
    passed: int = 0
    announced: int = 0


#: `Layout.locate` has no progress among its arguments: of all layouts, few read tensors there.
_REPORT: ContextVar[_Report | None] = ContextVar("report", default=None)


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Report progress to `progress` within the `with` block: `proof_digests` calls it with ("prove", bytes done, bytes
    in all), and so do functions that use `report_progress`, with their own words."""
    token = _REPORT.set(_Report(progress))
    try:
        with receive_progress(progress):
            yield
    finally:
        _REPORT.reset(token)


def announce_proof_bytes(nbytes: int) -> None:
    """Set how many bytes the next calls of `proof_digests` will read in total, for the total of their progress."""
    if (report := _REPORT.get()) is not None:
        report.announced = report.passed + nbytes


def proof_digests(
    tensors: dict[str, TensorEntry], ckpt: Checkpoint, source: Source, dtypes: dict[str, str] | None = None
) -> dict[str, str]:
    """Return {tensor: BLAKE3 hex digest} of tensors whose data a layout must read to identify them: segments without
    names, copies of one tensor on several ranks.

    Progress is reported to the function that was given to `reporting`, if any.

    Args:
        dtypes: {tensor: dtype that it is cast to before it is digested}; tensors not in it keep their own.

    Raises:
        Corrupt: bytes do not have the CRC32 that the source carries.
    """
    report = _REPORT.get() or _Report(silent)
    before = report.passed

    def progress(what: str, done: int, total: int) -> None:
        report.passed = before + done
        report.progress(what, report.passed, max(report.announced, before + total))

    return tensor_digests(tensors, source, ckpt.files, ckpt.records, progress, "prove", dtypes)


def tensor_digests(
    tensors: dict[str, TensorEntry],
    source: Source,
    files: list[str],
    records: Records,
    progress: Progress,
    what: str = "digest",
    dtypes: dict[str, str] | None = None,
    budget: IOBudget = DEFAULT_BUDGET,
    seen: Callable[[Block], None] | None = None,
) -> dict[str, str]:
    """Read tensors completely, check their CRC32s, and return {tensor: BLAKE3 hex digest of its canonical bytes}.

    Args:
        files: the source's files; the file numbers of chunks are indices into this list.
        records: byte ranges of these files with known CRC32s.
        progress: called with (`what`, bytes done, bytes in all).
        dtypes: {tensor: dtype that it is cast to before it is digested}; tensors not in it keep their own.
        seen: called with every block; None calls nothing.

    Raises:
        Corrupt, SourceChanged: bytes are missing, or do not have the CRC32 that the source carries.
    """
    reader = Reader(source, files, records, budget)
    out = _digest_tensors(reader, tensors, progress, what, dtypes, seen)
    reader.finish()
    return out


def tensor_digests_and_crcs(
    tensors: dict[str, TensorEntry],
    source: Source,
    files: list[str],
    records: Records,
    budget: IOBudget,
    seen: Callable[[Block], None] | None = None,
) -> dict[str, object]:
    """Digest some tensors of a checkpoint, for a process that digests them all: return {"digests": {tensor: BLAKE3 hex
    digest}, "seen": CRC32s of the ranges that were read of records with other tensors in them}.

    The records of which all was read are compared with their CRC32 here; `Reader.absorb` puts the ranges of the others
    together.

    Args:
        files: names of the checkpoint's files, in the order of their numbers.
        records: the records of zip files that the tensors are in, with their CRC32s.
        seen: called with every block that is read; None calls nothing.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to meanwhile.
    """
    reader = Reader(source, files, records, budget)
    digests = _digest_tensors(reader, tensors, silent, "digest", None, seen)
    source.assert_unchanged()
    return {"digests": digests, "seen": reader.crcs.parts_read()}


def _digest_tensors(
    reader: Reader,
    tensors: dict[str, TensorEntry],
    progress: Progress,
    what: str,
    dtypes: dict[str, str] | None,
    seen: Callable[[Block], None] | None,
) -> dict[str, str]:
    """Read tensors with `reader` and return {tensor: BLAKE3 hex digest}; the caller has to call `reader.finish()` to
    check the records that stay incomplete.

    Args:
        progress: called with (`what`, bytes done, bytes in all).
        dtypes: {tensor: dtype that it is cast to before it is digested}; tensors not in it, or None, keep their own.
        seen: called with every block; None calls nothing.
    """
    total, passed = sum(t.nbytes for t in tensors.values()), 0
    out: dict[str, str] = {}
    hasher: blake3 | None = None
    for block in reader.blocks((StreamJob(n, t, (dtypes or {}).get(n)) for n, t in tensors.items()), checked=False):
        hasher = hasher or blake3()
        for piece, _ in block.pieces(0, len(block.data)):
            hasher.update(piece)
        if seen is not None:
            seen(block)
        passed += block.source_bytes
        if block.last:
            out[block.name] = hasher.hexdigest()
            hasher = None
        progress(what, passed, total)
    return out


def digest_arrays_in_values(values: Mapping[str, Value]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return {name: (dtype, shape, BLAKE3 hex digest)} of the arrays inside values; the names are those that the arrays
    have where a layout writes them as tensors."""
    return {n: d for v in values.values() for n, d in _array_digests(joined(v.path), v.data)}


def _array_digests(name: str, x: object) -> Iterator[tuple[str, tuple[str, tuple[int, ...], str]]]:
    """Yield (name, (dtype, shape, BLAKE3 hex digest)) of the arrays inside nested dicts and lists; `name` is the dotted
    name of `x` itself."""
    if isinstance(x, Inline):
        yield name, (x.dtype, x.shape, blake3(x.data).hexdigest())
    elif type(x) is list or type(x) is dict:
        for key, inner in x.items() if type(x) is dict else enumerate(x):
            yield from _array_digests(f"{name}.{key}", inner)
