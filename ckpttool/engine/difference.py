"""The difference of two checkpoints as a checkpoint, which the layout of archives keeps: a delta of ckpttool's own.

    A: dcp, 3 ranks    model.w --.
    B: hf              model.w --+-- ComputedSource: model.w = the bytes of A XOR those of B

A tensor that A does not have, or has with another dtype or shape, is that of B. The bytes that are equal become zeros,
which zstd takes next to no room for, after byte planes have brought together what changes seldom. `facts` fill up while
the bytes pass: {"base", "result": root digests, "base_tensors": {name: [dtype, shape, digest]}, "tensors": {name: [the
name of the tensor of A that it is the difference to, or None, and the digest of B's]}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from blake3 import blake3

from .. import layouts
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry, tied_weights
from ..index.digests import compute_component_roots
from ..options import OpenOptions
from ..printable import count_noun
from ..storage.overlay import ComputedSource
from ..storage.source import closed_on_error
from .computed_files import BoxReader, ComputedFiles, choose_page_size
from .copy.fill import silent
from .copy.tensor_digests import tensor_digests
from .opening import CheckpointPath, MergedCheckpoint, OpenCheckpoint, drop_unfit_source_layout, open_checkpoint

if TYPE_CHECKING:
    from .copy.dtypes import Array

__all__ = ["open_difference"]


def open_difference(src: CheckpointPath, options: OpenOptions, model: layouts.ModelHints) -> MergedCheckpoint:
    """Open the bytewise difference (XOR) of `src` and the checkpoint at `options.difference_to` as one checkpoint.

    Args:
        src: the newer checkpoint.
        model: what `model_of(options)` returns.

    Raises:
        CkpttoolError: one of the two cannot be read.
    """
    assert options.difference_to is not None
    plain, opened = replace(options, difference_to=None), list[OpenCheckpoint]()
    with closed_on_error(one.source for one in opened):
        for path in (src, options.difference_to):
            opened.append(open_checkpoint(path, drop_unfit_source_layout(path, plain), model, False))
        return _build_difference(*opened)


def _build_difference(new: OpenCheckpoint, old: OpenCheckpoint) -> MergedCheckpoint:
    """Build the difference of two checkpoints as one checkpoint; its tensors are computed when they are read.

    Tensors of `old` that no tensor of `new` is compared with are read here, for their digests.
    """
    after, before = new.locate(), old.locate()
    ties, files = tied_weights(after.tensors), ComputedFiles(after)
    facts, aliases = _Facts(after, before, ties), {n: [n] for n in after.tensors}
    for n, m in ties.items():
        aliases[m].append(n)
    readers = (BoxReader(after, new.source, 2), BoxReader(before, old.source, 2))
    tensors: dict[str, TensorEntry] = {}
    for name, t in ((n, t) for n, t in after.tensors.items() if n not in ties):
        origin = next((n for n in aliases[name] if n in before.tensors), None)
        of = None if origin is None else before.tensors[origin]
        if of is None or (of.dtype, of.shape) != (t.dtype, t.shape):
            origin, of = None, None
        facts.add(name, origin)
        page = choose_page_size([t] if of is None else [t, of])
        compute = _Difference(name, t, origin, of, readers, facts).compute
        place = files.add(f"{name} (delta)", t.dtype, t.shape, compute, page, 3 * ITEMSIZE[t.dtype])
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, *place))
    for name in after.tensors:
        tensors[name] = replace(tensors[ties.get(name, name)], path=after.tensors[name].path)
    unused = {n: before.tensors[n] for n in facts.list_unused()}
    for name, digest in tensor_digests(unused, old.source, before.files, before.records, silent).items():
        facts.note_old(name, digest)
    facts.complete()
    files.working_bytes += sum(r.working_bytes for r in readers) + new.source.working_bytes + old.source.working_bytes
    out = replace(
        after,
        files=files.names,
        sizes=files.sizes,
        tensors={n: tensors[n] for n in after.tensors},
        recorded={},
        rounded={},
        notes=[*after.notes, facts.describe(old.location)],
        derived={"delta": facts.data},
    )
    parts = ((new, frozenset(after.tensors)), (old, frozenset(facts.used)))
    source = ComputedSource(new.source, files.made, [old.source], files.working_bytes)
    return MergedCheckpoint.of(parts, out, source, {}, new.left_behind, new.selection)


class _Facts:
    """What a delta says of the two checkpoints; complete once all of its bytes have passed."""

    def __init__(self, after: Checkpoint, before: Checkpoint, ties: Mapping[str, str]) -> None:
        """Start with the digests of the tensors without elements alone.

        Args:
            after, before: the indexes of the new and of the old checkpoint.
            ties: {tensor of the new checkpoint: the tensor with the same bytes that is read in its place}.
        """
        empty = blake3().hexdigest()
        self.after, self.before, self.ties, self.used = after, before, ties, set[str]()
        self.old_ties = tied_weights(before.tensors)
        self.old = {n: empty for n, t in before.tensors.items() if not t.numel}
        self.new = {n: empty for n, t in after.tensors.items() if not t.numel}
        self.origins: dict[str, str | None] = {}
        self.data: dict[str, object] = {"base": "", "result": "", "base_tensors": {}, "tensors": {}}

    def add(self, name: str, origin: str | None) -> None:
        """Add a tensor of the new checkpoint.

        Args:
            origin: the tensor of the old checkpoint that it is XORed with; None if it is stored as it is.
        """
        self.origins[name] = origin
        if origin is not None:
            self.used.add(origin)

    def list_unused(self) -> list[str]:
        """List the tensors of the old checkpoint whose bytes are not XORed with any new tensor; empty tensors are
        left out."""
        read = {self.old_ties.get(n, n) for n in self.used}
        return [n for n in self.before.tensors if n not in self.old and self.old_ties.get(n, n) not in read]

    def note_old(self, name: str, digest: str) -> None:
        """Record the BLAKE3 hex digest of a tensor of the old checkpoint, also for the tensors tied to it."""
        same = self.old_ties.get(name, name)
        self.old |= dict.fromkeys([name, same, *(n for n, m in self.old_ties.items() if m == same)], digest)
        self.complete()

    def note_new(self, name: str, digest: str) -> None:
        """Record the BLAKE3 hex digest of a tensor of the new checkpoint."""
        self.new[name] = digest
        self.complete()

    def complete(self) -> None:
        """Fill `data` with root digests and digests of tensors, if those of all tensors are known; otherwise do
        nothing."""
        if len(self.old) < len(self.before.tensors) or len(self.new) + len(self.ties) < len(self.after.tensors):
            return
        digests = {n: self.new[self.ties.get(n, n)] for n in self.after.tensors}
        self.data["base"] = compute_component_roots(self.before.tensors, self.old)["all"]
        self.data["result"] = compute_component_roots(self.after.tensors, digests)["all"]
        self.data["base_tensors"] = {n: [t.dtype, list(t.shape), self.old[n]] for n, t in self.before.tensors.items()}
        self.data["tensors"] = {n: [self.origins[self.ties.get(n, n)], d] for n, d in digests.items()}

    def describe(self, where: str) -> str:
        """Return a note on what the delta was made from.

        Args:
            where: path of the old checkpoint.
        """
        whole = sum(origin is None for origin in self.origins.values())
        gone = len(self.before.tensors.keys() - self.after.tensors.keys())
        said = [f"the difference to {where}: {count_noun(len(self.origins), 'tensor')}"]
        said += [f"{whole} stored whole, since they are new or have another shape or dtype"] if whole else []
        said += [f"{gone} that are there are gone"] if gone else []
        return "; ".join(said)


class _Difference:
    """The bytes of a tensor XOR those of another one, and the digests of both."""

    def __init__(
        self,
        name: str,
        new: TensorEntry,
        origin: str | None,
        old: TensorEntry | None,
        readers: tuple[BoxReader, BoxReader],
        facts: _Facts,
    ) -> None:
        """Prepare to compute the XOR of one tensor.

        Args:
            name, new: name of the tensor in the new checkpoint, and its entry in the index.
            origin, old: the same of the tensor of the old checkpoint that it is XORed with; None if `new` is stored as
                it is.
            readers: (of the new checkpoint, of the old one).
            facts: gets the digests of both tensors.
        """
        self._name, self._new, self._old, self._readers, self._facts = name, new, old, readers, facts
        self._origin, self._at, self._hashes = origin, 0, (blake3(), blake3())

    def compute(self, first: int, end: int) -> Array:
        """Compute elements [first, end) of the XOR; calls from the first element to the last, in order, also hash
        both tensors."""
        if first == 0:
            self._at, self._hashes = 0, (blake3(), blake3())
        x = self._readers[0].read_range(self._new, first, end)
        self._update_digest(0, first, x)
        if self._old is not None:
            y = self._readers[1].read_range(self._old, first, end)
            self._update_digest(1, first, y)
            a = x.view("u1")
            a ^= y.view("u1")
        if first == self._at:
            self._at = end
            if end == self._new.numel:
                self._facts.note_new(self._name, self._hashes[0].hexdigest())
                if self._origin is not None:
                    self._facts.note_old(self._origin, self._hashes[1].hexdigest())
        return x

    def _update_digest(self, which: int, first: int, data: Array) -> None:
        """Add a page to the digest of the new tensor (`which` 0) or the old one (1), if it follows the previous
        page."""
        if first == self._at:
            self._hashes[which].update(data.view("u1").data)
