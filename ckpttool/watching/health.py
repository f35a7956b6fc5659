"""Compare a save with those before it: files and counters that did not advance, norms that jump, weights that became
zero or did not move, tied weights that diverged, state that is gone.

What is compared is the `Portrait` of each: digest and norm of every tensor, and a digest of the CRC32s of every file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from blake3 import blake3

from ..engine.doctor.findings import DAMAGE, NOTE, Finding, FindingKind, Severity
from ..index.checkpoint import Checkpoint
from ..printable import list_first

__all__ = ["KINDS", "Portrait", "SeenTensor", "compare_with_earlier", "list_trained_weights", "make_portrait"]

#: {kind: what it means}, of the findings that doctor does not have; docs/how-to/watch.md lists them.
KINDS = {
    "differs": "not what was recorded beside it, or when it was proved",
    "unsafe": "content that would run code",
    "not-advanced": "the step, the optimizer or the scheduler is where it was at an earlier save",
    "went-back": "a counter is lower than at the save before",
    "stale-file": "a file holds what it held at an earlier save",
    "gone": "a component that the save before had",
    "fewer-tensors": "tensors that the save before had",
    "norm-jump": "a weight whose norm is many times what it was, and larger than all were",
    "became-zero": "a matrix that was trained, and is zero now",
    "unmoved": "a weight that did not change, while its optimizer state did",
    "diverged-tie": "weights that were equal and moved together, and differ now",
}
_LEAST = 64  # elements of weights that are compared as ties
_MOST_SHOWN = 3


class SeenTensor(NamedTuple):
    """BLAKE3 of a tensor in hex; its norm, None where it holds no floating-point numbers; its elements."""

    digest: str
    norm: float | None
    numel: int

    @property
    def rms(self) -> float:
        """Return the root mean square of the tensor's elements; 0 if the tensor has no norm (no floating-point numbers)
        or no elements."""
        return self.norm / math.sqrt(self.numel) if self.norm and self.numel else 0.0


@dataclass(frozen=True)
class Portrait:
    """Facts of a save that are kept, so that later saves can be compared with it.

    `files` {file: digest of its content}, for the files of which one is known; `counters` {"optimizer", "trainer",
    "scheduler": step}; `rate` the lowest learning rate of the param groups, None if it is not known; `ties` groups of
    weights that were equal in two saves, between which they changed.
    """

    name: str
    step: int | None
    tensors: dict[str, SeenTensor]
    files: dict[str, str]
    counters: dict[str, float]
    components: list[str]
    rate: float | None
    ties: list[list[str]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return {name of a field: its value} of all fields, as data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Portrait:
        """Return the portrait of which `data` is the dict from `to_json`, also after a round trip through JSON."""
        tensors = {n: SeenTensor(*row) for n, row in data["tensors"].items()}
        return cls(**{**{k: data[k] for k in cls.__dataclass_fields__}, "tensors": tensors})

    @property
    def where(self) -> str:
        """Return the name of the save for messages: its step, or the name of its folder."""
        return f"step {self.step:,}" if self.step is not None else self.name


def make_portrait(
    ckpt: Checkpoint,
    name: str,
    step: int | None,
    digests: Mapping[str, str],
    norms: Mapping[str, float],
    counters: dict[str, float],
) -> Portrait:
    """Make the portrait of a save that was read.

    Args:
        ckpt: index of the save.
        name, step: of the save; `step` is None if its name has none.
        digests, norms: {tensor: BLAKE3 in hex}, {tensor: norm}.
        counters: {"optimizer", "trainer", "scheduler": step}.
    """
    rates = [v.data for v in ckpt.values.values() if v.option == "lr"]
    return Portrait(
        name,
        step,
        {n: SeenTensor(digests[n], norms.get(n), t.numel) for n, t in ckpt.tensors.items()},
        {_to_relative_name(ckpt.files[f], name): s for f, s in _digest_files(ckpt, digests).items()},
        counters,
        sorted({ckpt.component(n) for n in (*ckpt.tensors, *ckpt.values)}),
        min(rates) if rates and all(isinstance(r, (int, float)) for r in rates) else None,
    )


def _to_relative_name(file: str, save: str) -> str:
    """Return the name of a file relative to the folder of its save; "" if the save is that one file.

    Args:
        file: name of the file, which begins with the last component of the save's name.
        save: name of the save, relative to the run.
    """
    own = save.rpartition("/")[2]
    return "" if file == own else file.removeprefix(f"{own}/")


def _digest_files(ckpt: Checkpoint, digests: Mapping[str, str]) -> dict[int, str]:
    """Return {number of a file in the index: digest of the file's content}. The digest is made of all CRC32s in the
    file or, where it has none, of the digests of its tensors. A file without CRC32s that holds only a part of some
    tensor has no digest.

    Args:
        ckpt: index of the save.
        digests: {tensor: BLAKE3 in hex}.
    """
    parts: dict[int, list[tuple[object, ...]]] = {}
    for r in ckpt.records:
        parts.setdefault(r.extent.file, []).append((r.extent.offset, r.extent.length, r.crc32))
    summed, cut = set(parts), set()
    for n, t in ckpt.tensors.items():
        inside = set(t.chunks.file) - summed
        if len(inside) == 1:
            parts.setdefault(min(inside), []).append((n, digests[n]))
        cut |= inside if len(set(t.chunks.file)) > 1 else set()
    return {
        f: blake3(repr(sorted(p, key=repr)).encode()).hexdigest(length=16) for f, p in parts.items() if f not in cut
    }


def list_trained_weights(ckpt: Checkpoint) -> frozenset[str]:
    """Return the names, in the index, of the weights that the optimizer has state for; empty without such state."""
    fqns = {t.parameter for t in ckpt.tensors.values() if t.slot is not None}
    return frozenset(n for n, t in ckpt.tensors.items() if t.component == "model" and t.local_name in fqns)


def compare_with_earlier(
    now: Portrait, ckpt: Checkpoint, earlier: Sequence[Portrait], norm_jump: float, weights_only: bool
) -> Iterator[Finding]:
    """Yield findings from the comparison of a save with earlier saves of its run.

    Args:
        now: portrait of the save; gets its `ties`.
        ckpt: index of the save.
        earlier: portraits of proved earlier saves, the nearest first; without one there are no findings.
        norm_jump: maximal factor by which the norm of a weight may grow since the save before.
        weights_only: whether the save is an export at the end of a run.
    """
    if not earlier:
        return
    before = earlier[0]
    yield from _compare_counters(now, earlier)
    stale = list(_find_stale_files(now, ckpt, earlier))
    yield from stale
    if not weights_only:
        yield from _find_missing_parts(now, before)
    yield from _compare_norms(now, ckpt, before, norm_jump)
    if not stale:
        yield from _find_unmoved(now, ckpt, before)
    yield from _compare_ties(now, before)


def _make_finding(
    kind: str, severity: Severity, text: str, names: Sequence[str] = (), file: str | None = None
) -> Finding:
    """Return a finding whose kind is one of `KINDS`; `names` are its tensors."""
    assert kind in KINDS
    return Finding(FindingKind(kind), severity, file, tuple(names), text)


def _compare_counters(now: Portrait, earlier: Sequence[Portrait]) -> Iterator[Finding]:
    """Yield a finding for each counter that did not advance, or went back.

    A scheduler may count epochs. So a counter other than the optimizer's is only expected to advance if it has advanced
    by as much as another counter between the two saves before.
    """
    before = earlier[0]
    ahead = {what: count - before.counters.get(what, count) for what, count in now.counters.items()}
    kept_up: set[str] = set()
    if len(earlier) > 1:
        was = {what: before.counters[what] - n for what, n in earlier[1].counters.items() if what in before.counters}
        kept_up = {a for a, n in was.items() if n > 0 and any(b != a and m == n for b, m in was.items())}
    for what, count in now.counters.items():
        if what not in before.counters:
            continue
        old = before.counters[what]
        if count == old and (what == "optimizer" or (what in kept_up and any(n > 0 for n in ahead.values()))):
            text = f"the {what} is at step {count:,.0f}, as at {before.where}: it did not advance, or is of that save"
            yield _make_finding("not-advanced", DAMAGE, text)
        elif count < old:
            text = f"the {what} is at step {count:,.0f}, and was at {old:,.0f} at {before.where}: it was reset"
            yield _make_finding("went-back", NOTE, text)


def _find_stale_files(now: Portrait, ckpt: Checkpoint, earlier: Sequence[Portrait]) -> Iterator[Finding]:
    """Yield a finding for each file with state that training changes, if an earlier save had a file with the same name
    and content."""
    moving: dict[str, list[str]] = {}
    trained, rate = list_trained_weights(ckpt), earlier[0].rate or 0.0
    for n, t in ckpt.tensors.items():
        if (t.slot not in (None, "step") or (n in trained and t.dtype == "float32" and rate > 0)) and now.tensors[
            n
        ].norm:
            for f in set(t.chunks.file):
                moving.setdefault(_to_relative_name(ckpt.files[f], now.name), []).append(n)
    for file, names in moving.items():
        for old in earlier:
            if file in now.files and old.files.get(file) == now.files[file]:
                what = file or now.name
                text = (
                    f"{what} holds what it held at {old.where}: {list_first(names, _MOST_SHOWN)}. Training moves that "
                    "with every step, so the file was left from that save, or copied from it"
                )
                yield _make_finding("stale-file", DAMAGE, text, names, what)
                break


def _find_missing_parts(now: Portrait, before: Portrait) -> Iterator[Finding]:
    """Yield a finding for each component that the save before had and this one lacks, and one for tensors of the other
    components that are missing."""
    for part in before.components:
        if part not in now.components:
            text = f'there is no "{part}", which {before.where} had: a file is missing, or it is no longer saved'
            yield _make_finding("gone", DAMAGE, text)
    lost = [n for n in before.tensors if n not in now.tensors and n.partition(".")[0] in now.components]
    lost = [n for n in lost if n.partition(".")[0] in ("model", "optim")]
    if lost:
        text = f"{len(lost):,} tensors of {before.where} are not there: {list_first(lost, _MOST_SHOWN)}"
        yield _make_finding("fewer-tensors", NOTE, text, lost)


def _compare_norms(now: Portrait, ckpt: Checkpoint, before: Portrait, norm_jump: float) -> Iterator[Finding]:
    """Yield a finding for each weight whose norm jumped, and for each matrix that became zero."""
    weights = [n for n, t in ckpt.tensors.items() if t.component == "model" or t.path[:2] == ("extra", "master")]
    weights = [n for n in weights if n in before.tensors and before.tensors[n].norm]
    largest = max((before.tensors[n].rms for n in weights), default=0.0)
    trained = list_trained_weights(ckpt)
    for n in weights:
        new, old = now.tensors[n], before.tensors[n]
        if new.rms > norm_jump * old.rms and new.rms > largest:
            text = f'the norm of "{n}" is {new.norm:.4g}, and was {old.norm:.4g} at {before.where}'
            yield _make_finding("norm-jump", DAMAGE, text, (n,))
        elif not new.norm and len(ckpt.tensors[n].shape) > 1 and (n in trained or not trained):
            text = f'"{n}" is zero in every element, and had the norm {old.norm:.4g} at {before.where}'
            yield _make_finding("became-zero", DAMAGE, text, (n,))


def _find_unmoved(now: Portrait, ckpt: Checkpoint, before: Portrait) -> Iterator[Finding]:
    """Yield a finding on weights that did not change although their optimizer state did, at a learning rate above 0."""
    if not before.rate:
        return
    slots: dict[str, list[str]] = {}
    for n, t in ckpt.tensors.items():
        if t.slot not in (None, "step") and now.tensors[n].norm:
            slots.setdefault(t.parameter, []).append(n)

    def same(n: str) -> bool:
        """Tell whether a tensor is what it was."""
        return n in before.tensors and before.tensors[n].digest == now.tensors[n].digest

    names = [
        n for n in list_trained_weights(ckpt)
        if same(n) and (of := slots.get(ckpt.tensors[n].local_name)) and not any(map(same, of))
    ]  # fmt: skip
    if names := sorted(names):
        text = (
            f"{len(names):,} weights are what they were at {before.where}, bit for bit, while their optimizer state "
            f"moved: {list_first(names, _MOST_SHOWN)}. Updates round to nothing in {ckpt.tensors[names[0]].dtype}, or "
            "the weights are not those that are trained"
        )
        yield _make_finding("unmoved", NOTE, text, names)


def _compare_ties(now: Portrait, before: Portrait) -> Iterator[Finding]:
    """Yield a finding for each group of tied weights that differ now.

    `now.ties` gets the groups that are still equal, and new groups of weights that were equal in the save before,
    changed since, and are equal now.

    Args:
        now: portrait of the save.
        before: portrait of the save before.
    """
    for group in before.ties:
        here = [n for n in group if n in now.tensors]
        if len({now.tensors[n].digest for n in here}) > 1:
            text = f"{', '.join(here)} were one at {before.where} and before, moved together, and are different now"
            yield _make_finding("diverged-tie", DAMAGE, text, here)
        elif len(here) > 1:
            now.ties.append(here)
    known = {n for group in now.ties for n in group}
    groups: dict[tuple[str, str], list[str]] = {}
    for n, seen in now.tensors.items():
        old = before.tensors.get(n)
        if old and seen.norm and seen.numel >= _LEAST and old.digest != seen.digest and n not in known:
            groups.setdefault((old.digest, seen.digest), []).append(n)
    now.ties.extend(
        group for group in groups.values()
        if len(group) > 1 and all(n.startswith(("model.", "extra.master.")) for n in group)
    )  # fmt: skip
