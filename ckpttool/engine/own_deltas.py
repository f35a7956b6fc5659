"""Deltas that ckpttool has made (difference.py), applied to a checkpoint: the state that is the result has the tensors
that the last delta lists, each of them bytes of the base XOR those of all deltas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from .. import layouts
from ..errors import Corrupt, Unsupported
from ..index.checkpoint import ITEMSIZE, Chunks, TensorEntry, tied_weights
from ..index.draft import Dropped
from ..index.selection import EntrySelection
from ..options import ARCHIVE_LAYOUT, OpenOptions
from ..printable import count_noun
from ..storage.overlay import ComputedSource
from ..storage.source import Source
from .computed_files import BoxReader, ComputedFiles, choose_page_size
from .opening import MergedCheckpoint, OpenCheckpoint, open_checkpoint
from .weights import remove_optimizer_notes

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["apply_own_deltas", "get_delta_facts", "open_own_delta"]

_LEFT = "the delta does not hold this part of the state, and it belongs to that of before"


def open_own_delta(where: layouts.Place) -> OpenCheckpoint | None:
    """Open the delta of ckpttool at a place; None if it is something else, such as an archive of a state.

    Raises:
        Corrupt, Unsafe: it is damaged.
    """
    if where.file is None or not layouts.find(ARCHIVE_LAYOUT).detect(where)[0]:
        return None
    opened = open_checkpoint(where, OpenOptions(as_delta=True, allow_equal_ranks=True, allow_mixed_steps=True))
    if opened.checkpoint.derived is None:
        return None
    if get_delta_facts(opened)["tensors"].keys() != opened.checkpoint.tensors.keys():
        raise Corrupt(
            f"{opened.source.root}: PROVENANCE.json lists other tensors than the archive has.", code="CKPT0425"
        )
    return opened


def get_delta_facts(delta: OpenCheckpoint) -> dict[str, Any]:
    """Return the facts in a delta about the two checkpoints it was made from, as the module `difference` describes
    them."""
    facts: dict[str, Any] = (delta.checkpoint.derived or {})["delta"]
    return facts


def apply_own_deltas(base: OpenCheckpoint, deltas: list[OpenCheckpoint], sources: list[Source]) -> MergedCheckpoint:
    """Return a checkpoint with deltas applied in their order; its tensors are computed when they are read.

    Args:
        sources: the files of the deltas, which closing the result closes.

    Raises:
        Unsupported: a delta was not made from the base, or from the result of the delta before it.
        Corrupt: a delta names a tensor of another dtype or shape as the base of one of its tensors.
    """
    located = base.locate()
    remove_optimizer_notes(base)
    last = deltas[-1].checkpoint
    parts = {str(t.path[0]) for t in last.tensors.values()} | {str(v.path[0]) for v in last.values.values()}
    held = {n: t for n, t in located.tensors.items() if str(t.path[0]) in parts}
    _refuse_other_base(base, held, deltas[0])
    chain = {
        n: _Steps((t.dtype, t.shape), t, [], get_delta_facts(deltas[0])["base_tensors"][n][2]) for n, t in held.items()
    }
    for before, delta in zip([None, *deltas], deltas, strict=False):
        if before is not None:
            _refuse_other_version(before, delta)
        chain = _extend_steps(delta, chain)
    files, reader, ties = ComputedFiles(located), BoxReader(located, base.source), tied_weights(last.tensors)
    tensors: dict[str, TensorEntry] = {}
    for name, t in ((n, t) for n, t in last.tensors.items() if n not in ties):
        tensor = _Applied(name, base.location, t, reader, chain[name])
        place = files.add(
            f"{name} (patched)", t.dtype, t.shape, tensor.compute, choose_page_size([t]), 2 * ITEMSIZE[t.dtype]
        )
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, *place))
    tensors = {n: replace(tensors[ties.get(n, n)], path=t.path) for n, t in last.tensors.items()}
    files.working_bytes += reader.working_bytes + base.source.working_bytes + (4 << 20) * len(deltas)
    facts = get_delta_facts(deltas[-1])
    out = replace(
        located,
        files=files.names,
        sizes=files.sizes,
        tensors=tensors,
        values=last.values,
        origin=last.origin,
        trainer=None if parts == {"model"} else last.trainer,
        recorded={n: digest for n, (_, digest) in facts["tensors"].items()},
        rounded={},
        notes=[*located.notes, *(_describe_applied_delta(base, d) for d in deltas)],
        derived={"applied": {"deltas": [_make_delta_record(d) for d in deltas]}},
    )
    behind = [Dropped(n, t.nbytes, _LEFT) for n, t in located.tensors.items() if n not in held]
    behind += [Dropped(n, 0, _LEFT) for n, v in located.values.items() if str(v.path[0]) not in parts]
    return _AppliedCheckpoint.of(
        ((base, frozenset(held)),),
        out,
        ComputedSource(base.source, files.made, sources, files.working_bytes),
        {},
        behind,
        EntrySelection(tuple(sorted(parts))),
    )


class _AppliedCheckpoint(MergedCheckpoint):
    """A checkpoint with deltas applied, which say what digests it must have."""

    def expect_recorded(self, ignore: bool = False) -> None:
        """Set the digests that tensors must have when they are read: of those that a delta changed, the digest in the
        last delta; of the base's, that in its ckpttool.json.

        Args:
            ignore: expect no digests of the base.
        """
        recorded = self.checkpoint.recorded
        super().expect_recorded(ignore)
        self.checkpoint.recorded = recorded


def _refuse_other_base(base: OpenCheckpoint, held: Mapping[str, TensorEntry], delta: OpenCheckpoint) -> None:
    """Refuse a base with other tensors than the delta was made from, or with other digests in its ckpttool.json.

    Raises:
        Unsupported: with the first difference.
    """
    wanted, record = get_delta_facts(delta)["base_tensors"], base.recorded()
    known = {} if record is None or record.problem or not record.about(base.checkpoint) else record.tensors
    for name in [*wanted, *held]:
        t, (dtype, shape, digest) = held.get(name), wanted.get(name, ("", (), ""))
        if name not in wanted or t is None:
            said = f'"{name}" is {"not in it" if t is None else "new there"}'
        elif (t.dtype, list(t.shape)) != (dtype, list(shape)):
            said = f'"{name}" is {t.dtype} {list(t.shape)} there, and {dtype} {list(shape)} in the delta'
        elif name in known and known[name] != (dtype, tuple(shape), digest):
            said = f'"{name}" has the digest {known[name][2][:16]} in its ckpttool.json, and the delta {digest[:16]}'
        else:
            continue
        raise Unsupported(
            f"{delta.source.root} was not made from {base.location}: {said}. Give the checkpoint that it was made "
            "from.",
            code="CKPT0342",
        )


def _refuse_other_version(before: OpenCheckpoint, delta: OpenCheckpoint) -> None:
    """Refuse a delta that was not made from the result of the one before it.

    Raises:
        Unsupported: with the two digests.
    """
    have, wanted = get_delta_facts(before)["result"], get_delta_facts(delta)["base"]
    if have != wanted:
        raise Unsupported(
            f"{delta.source.root} was made from a checkpoint with the digest {wanted[:16]}, and {before.source.root} "
            f"makes one with {have[:16]}. Give them in the order in which they were made.",
            code="CKPT0342",
        )


@dataclass
class _Steps:
    """What the bytes of a tensor are made of: those of the base, None for zeros, XOR those of some deltas. `digest` is
    that of the base's, `kind` the dtype and shape of the tensor."""

    kind: tuple[str, tuple[int, ...]]
    base: TensorEntry | None
    deltas: list[tuple[OpenCheckpoint, TensorEntry]]
    digest: str


def _extend_steps(delta: OpenCheckpoint, chain: Mapping[str, _Steps]) -> dict[str, _Steps]:
    """Return how each tensor is computed after one more delta, {name: steps}.

    Args:
        chain: the same before this delta.

    Raises:
        Corrupt: the delta names a tensor of another dtype or shape as the base of one of its tensors.
    """
    out: dict[str, _Steps] = {}
    for name, (origin, _) in get_delta_facts(delta)["tensors"].items():
        t = delta.checkpoint.tensors[name]
        of = _Steps((t.dtype, t.shape), None, [], "") if origin is None else chain.get(origin)
        if of is None or of.kind != (t.dtype, t.shape):
            raise Corrupt(
                f'{delta.source.root}: "{name}" is {t.dtype} {list(t.shape)}, and said to be the difference to '
                f'"{origin}", which is another.',
                code="CKPT0425",
            )
        out[name] = _Steps(of.kind, of.base, [*of.deltas, (delta, t)], of.digest)
    return out


@dataclass
class _Applied:
    """A tensor of the result, from front to back; a page that is not the next one has no part in the base's digest."""

    name: str
    where: str  # the base
    tensor: TensorEntry
    reader: BoxReader
    steps: _Steps
    at: int = 0
    hasher: Any = None

    def compute(self, first: int, end: int) -> Array:
        """Compute elements [first, end) of the tensor after all deltas, and return their bytes as a uint8 array.

        Raises:
            Corrupt: the base's tensor, after all of it was read in order, does not have the digest that the delta was
                made from.
        """
        import numpy as np

        item, t = ITEMSIZE[self.tensor.dtype], self.steps.base
        if t is None:
            x = np.zeros((end - first) * item, "u1")
        else:
            x = self.reader.read_range(t, first, end).view("u1")
            self._check_base_digest(first, end, x)
        for delta, stored in self.steps.deltas:
            file, offset = stored.chunks.file[0], stored.chunks.offset[0] + first * item
            x ^= np.frombuffer(delta.source.read(delta.checkpoint.files[file], offset, len(x)), "u1")
        return x

    def _check_base_digest(self, first: int, end: int, data: Array) -> None:
        """Add bytes of the base to its digest, if they follow the previous ones, and compare the digest after the last.

        Raises:
            Corrupt: the digest is not that of the tensor that the delta was made from.
        """
        if first == 0:
            self.at, self.hasher = 0, blake3()
        if first != self.at or self.hasher is None:
            return
        self.hasher.update(data.data)
        self.at = end
        if end == self.tensor.numel and (found := self.hasher.hexdigest()) != self.steps.digest:
            raise Corrupt(
                f'{self.where}: "{self.name}" has the digest {found[:16]}, and the delta was made from one with '
                f"{self.steps.digest[:16]}: the base is another version, or was damaged.",
                code="CKPT0432",
            )


def _describe_applied_delta(base: OpenCheckpoint, delta: OpenCheckpoint) -> str:
    """Return a note on a delta that is applied."""
    facts = get_delta_facts(delta)
    return (
        f"{delta.source.root}, a delta of ckpttool from {facts['base'][:16]} to {facts['result'][:16]}, is applied to "
        f"{base.location}: the digests of {count_noun(len(facts['tensors']), 'tensor')} are compared"
    )


def _make_delta_record(delta: OpenCheckpoint) -> dict[str, Any]:
    """Return the entry of ckpttool.json for a delta that was applied."""
    facts = get_delta_facts(delta)
    return {
        "program": "ckpttool",
        "name": os.path.basename(delta.source.root),
        "version": facts["result"],
        "base_version": facts["base"],
        "tensors": len(facts["tensors"]),
        "checksums": ["blake3"],
    }
