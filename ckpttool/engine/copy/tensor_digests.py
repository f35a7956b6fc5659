"""Digests of tensors that are read and not written; those that a layout needs before it can name its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from ...formats.stored_tensors import Inline
from ...index.checkpoint import Checkpoint, Record, TensorEntry, Value, joined
from ...storage.buffers import DEFAULT_BUDGET, IOBudget
from ...storage.source import Source
from .fill import Progress, silent
from .stream import Block, Reader, StreamJob

__all__ = [
    "announce_proof",
    "digests_in_values",
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
    """Have `proof_digests` call `progress` with ("prove", bytes done, bytes in all) in this block."""
    token = _REPORT.set(_Report(progress))
    try:
        yield
    finally:
        _REPORT.reset(token)


def announce_proof(nbytes: int) -> None:
    """Say how many bytes the calls of `proof_digests` that follow are going to read together, where those are
    several."""
    if (report := _REPORT.get()) is not None:
        report.announced = report.passed + nbytes


def proof_digests(
    tensors: dict[str, TensorEntry], ckpt: Checkpoint, source: Source, dtypes: dict[str, str] | None = None
) -> dict[str, str]:
    """Digest, as `tensor_digests` does, what a layout has to read before it can say what its tensors are: segments
    without names, copies that ranks have of one tensor. Progress goes to whoever asked for it with `reporting`."""
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
    records: Sequence[Record],
    progress: Progress,
    what: str = "digest",
    dtypes: dict[str, str] | None = None,
    budget: IOBudget = DEFAULT_BUDGET,
    seen: Callable[[Block], None] | None = None,
) -> dict[str, str]:
    """Return {tensor: BLAKE3 hex digest of its canonical bytes}, reading everything and checking the CRCs on the way.

    `dtypes` names the dtype a tensor is digested in, where that is not its own. `seen` is called with every block.
    """
    reader = Reader(source, files, records, budget)
    out = _digest(reader, tensors, progress, what, dtypes, seen)
    reader.finish()
    return out


def tensor_digests_and_crcs(
    tensors: dict[str, TensorEntry], source: Source, files: list[str], records: Sequence[Record], budget: IOBudget
) -> dict[str, Any]:
    """Return {"digests": as `tensor_digests`, "seen": what was read of records that other tensors lie in, too, for
    `Reader.absorb`}."""
    reader = Reader(source, files, records, budget)
    digests = _digest(reader, tensors, silent, "digest", None, None)
    source.assert_unchanged()
    return {"digests": digests, "seen": reader.crcs.parts_read()}


def _digest(
    reader: Reader,
    tensors: dict[str, TensorEntry],
    progress: Progress,
    what: str,
    dtypes: dict[str, str] | None,
    seen: Callable[[Block], None] | None,
) -> dict[str, str]:
    """Digest tensors with a reader; what is still to be read of records is left to the caller."""
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


def digests_in_values(values: Mapping[str, Value]) -> dict[str, str]:
    """Return {name: digest} of arrays in values, which become tensors of these names where a layout writes them so."""
    return {n: d for v in values.values() for n, d in _array_digests(joined(v.path), v.data)}


def _array_digests(name: str, x: object) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of the arrays in a tree."""
    if isinstance(x, Inline):
        yield name, blake3(x.data).hexdigest()
    elif type(x) is list or type(x) is dict:
        for key, inner in x.items() if type(x) is dict else enumerate(x):
            yield from _array_digests(f"{name}.{key}", inner)
