"""Digests of tensors that are read and not written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from blake3 import blake3

from ..formats.stored_tensors import Inline
from ..index.checkpoint import TensorEntry, Value, joined
from ..storage.buffers import DEFAULT_BUDGET, IOBudget
from ..storage.source import Source
from .fill import Progress, silent
from .stream import Block, Reader, StreamJob

__all__ = ["digests_in_values", "tensor_digests", "tensor_digests_and_crcs"]


def tensor_digests(
    tensors: dict[str, TensorEntry],
    source: Source,
    files: list[str],
    records: Any,
    progress: Progress,
    what: str = "digest",
    dtypes: dict[str, str] | None = None,
    budget: IOBudget = DEFAULT_BUDGET,
    seen: Callable[[Block], None] | None = None,
) -> dict[str, str]:
    """{tensor: BLAKE3 hex digest of its canonical bytes}, reading everything and checking the CRCs on the way.

    `dtypes` names the dtype a tensor is digested in, where that is not its own. `seen` is called with every block.
    """
    reader = Reader(source, files, records, budget)
    out = _digested(reader, tensors, progress, what, dtypes, seen)
    reader.finish()
    return out


def tensor_digests_and_crcs(
    tensors: dict[str, TensorEntry], source: Source, files: list[str], records: Any, budget: IOBudget
) -> dict[str, Any]:
    """{"digests": as `tensor_digests`, "seen": what was read of records that other tensors lie in, too, for `Reader.absorb`}."""
    reader = Reader(source, files, records, budget)
    digests = _digested(reader, tensors, silent, "digest", None, None)
    source.assert_unchanged()
    return {"digests": digests, "seen": reader.crcs.seen()}


def _digested(
    reader: Reader,
    tensors: dict[str, TensorEntry],
    progress: Progress,
    what: str,
    dtypes: dict[str, str] | None,
    seen: Callable[[Block], None] | None,
) -> dict[str, str]:
    total, passed = sum(t.nbytes for t in tensors.values()), 0
    out: dict[str, str] = {}
    hasher: Any = None
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
    """{name: digest} of arrays in values, which become tensors of these names where a layout writes them so."""
    return {n: d for v in values.values() for n, d in _tensors_in(joined(v.path), v.data)}


def _tensors_in(name: str, x: Any) -> Iterator[tuple[str, str]]:
    if isinstance(x, Inline):
        yield name, blake3(x.data).hexdigest()
    elif type(x) in (list, dict):
        for key, inner in x.items() if type(x) is dict else enumerate(x):
            yield from _tensors_in(f"{name}.{key}", inner)
