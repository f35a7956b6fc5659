"""Compare digests: of a checkpoint with its record or with another one, and of a destination with its source.

What a digest is, digests.py says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Unpack

from .. import layouts
from ..errors import Corrupt, Differs, Unreadable, UsageError, argument
from ..formats import safetensors_header
from ..index.checkpoint import Checkpoint, Salvage, TensorEntry
from ..index.draft import Draft
from ..index.schedulers import complete_scheduler_state
from ..index.selection import EntrySelection
from ..options import OpenKeywords, Progress, WriteRequest, list_keywords, silent
from ..printable import Shown, count_noun, list_first
from ..storage import urls
from ..storage.buffers import IOBudget
from .conservation import find_value_differences
from .copy.averages import EXPONENT, Averages, describe_negative_averages, find_nonnegative_state
from .copy.stream import Block, Reader, StreamJob
from .copy.tensor_digests import digest_arrays_in_values, reporting, tensor_digests
from .copy.value_digests import digest_values_without_arrays, state_roots
from .discover.unread_files import human, make_unread_note
from .mixups import describe_dropped_replicas
from .opening import CheckpointPath, OpenCheckpoint, OpenOptions, compare_configs, open_checkpoint, show_path
from .planning import make_dtype_chooser
from .recorded import RECORD, explain_other_digests
from .transform import masters
from .workers.coordinator import digest_with_workers, workers_for_reading
from .workers.executors import Workers, WorkersSpec

__all__ = [
    "DigestResult",
    "VerifyResult",
    "check_source_digests",
    "compare_recorded_digests",
    "digest",
    "read_back",
    "summarise_salvage",
    "verify",
]

_SALVAGED = 5  # names of a salvaged copy that are shown


@dataclass(frozen=True, repr=False)
class DigestResult(Shown):
    """`digest` {"all", "model", ...: Merkle root}, `tensors` {name: BLAKE3}, both in hex; `not_read` files that belong
    to the checkpoint and are no part of the digest, as `Unread.to_json` has them; `notes` sentences on what else is
    none."""

    digest: dict[str, str]
    tensors: dict[str, str]
    not_read: list[dict[str, object]]
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a line of text for each component: its root digest and its name."""
        for component, root in self.digest.items():
            yield f"blake3:{root}  {component}"


@list_keywords
def digest(
    path: CheckpointPath,
    *,
    only: Iterable[str] | None = None,
    weights: str | None = None,
    workers: WorkersSpec = None,
    progress: Progress = silent,
    **reading: Unpack[OpenKeywords],
) -> DigestResult:
    """Compute the digest of a state, which is the same in every layout and at every world size; reads all bytes of its
    tensors.

    Args:
        workers: processes that read the data, as in `convert`.
        progress: called with ("digest", bytes done, bytes in all), and before with "prove" if tensors have no names
            until they are read.
        (the others): as `open`.
    """
    options = OpenOptions(only=only, weights=weights, **reading)
    with (
        open_checkpoint(path, options, prove_later=True) as opened,
        workers_for_reading(workers, path, opened.checkpoint.nbytes) as crew,
    ):
        with reporting(progress):
            ckpt = opened.locate()
        found = digest_with_workers(opened, path, options, crew, progress, "digest")
        opened.source.assert_unchanged()
        aside = [r.to_json() for r in ckpt.unread]
        return DigestResult(state_roots(ckpt, found), found, aside, describe_dropped_replicas(ckpt))


@dataclass(repr=False)
class VerifyResult(Shown):
    """What `verify` found; sizes in bytes. What was not asked for is None.

    `crc32_covered_bytes` are those that CRC32s in the files themselves cover. `recorded` is "equal", "damaged" (the
    record cannot be read) or "other files" (it is about others). `numbers` is "ok" or "contradict", and `compared`
    counts the {"masters", "averages"} that were compared with their weights and with 0; both None if there are neither.
    `against` is {"path", "components", "verdict"}, and `salvage` {"exact": how many tensors, "rebuilt": {name: how},
    "missing": {name: why}} of a copy of what was left of a damaged checkpoint.
    """

    path: str
    layout: str
    tensors: int
    bytes: int
    structure: str
    crc32_covered_bytes: int
    not_read: list[dict[str, object]]
    data: str | None = None
    digest: dict[str, str] | None = None
    recorded: str | None = None
    numbers: str | None = None
    compared: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    against: dict[str, Any] | None = None
    salvage: dict[str, Any] | None = None

    def to_json(self) -> dict[str, object]:
        """Convert to plain data, without the fields of checks that were not requested."""
        return {k: v for k, v in asdict(self).items() if v is not None and (k != "notes" or v)}

    def lines(self) -> Iterator[str]:
        """Yield lines of text: what was checked, with what result, and the digests."""
        yield f"{self.layout}: {count_noun(self.tensors, 'tensor')}, {human(self.bytes)}: structure ok"
        if self.salvage is not None:
            lost, made = self.salvage["missing"], self.salvage["rebuilt"]
            yield (
                f"salvaged: {self.salvage['exact']:,} tensors are exact, {len(made):,} rebuilt, {len(lost):,} missing"
            )
            for word, names in (("rebuilt", made), ("missing", lost)):
                for name, why in list(names.items())[:_SALVAGED]:
                    yield f"  {word}: {name}: {why}"
                if len(names) > _SALVAGED:
                    yield f"  ... {len(names) - _SALVAGED:,} more; the JSON has them"
        if self.data is not None:
            covered = self.crc32_covered_bytes
            more = f", {human(covered)} covered by CRC32s of the files themselves" if covered else ""
            yield f"data ok: every byte read{more}"
            if self.recorded == "equal":
                yield "equal to the digests that were recorded when it was written"
            if self.numbers == "ok" and self.compared:
                of_weights, of_squares = self.compared["masters"], self.compared["averages"]
                pairs = [f"{count_noun(of_weights, 'master')} with the weights"] if of_weights else []
                pairs += [f"{count_noun(of_squares, 'average')} of squares with 0"] if of_squares else []
                yield f"numbers ok: compared {' and '.join(pairs)}"
            for component, root in (self.digest or {}).items():
                yield f"digest {component:10s} blake3:{root}"
        if self.against is not None:
            yield f"equal to {self.against['path']}: {', '.join(self.against['components'])}"


@list_keywords
def verify(
    path: CheckpointPath,
    *,
    read_data: bool = False,
    against: CheckpointPath | None = None,
    only: Iterable[str] | None = None,
    workers: WorkersSpec = None,
    progress: Progress = silent,
    **reading: Unpack[OpenKeywords],
) -> VerifyResult:
    """Check a checkpoint: its structure and every item's framing.

    Args:
        read_data: also read every byte, and compare it with the CRC32s and with the recorded digests.
        against: also compare every tensor and value with another checkpoint, in any layout.
        workers: processes that read the data, as in `convert`.
        progress: called with ("read", bytes done, bytes in all); before with "prove" if tensors have no names until
            they are read, and after with "compare" for fp32 masters.
        (the others): as `open`.

    Raises:
        Corrupt, Unsafe: it is damaged. Differs: it is not what was recorded, or not equal to the checkpoint at
            `against`.
        UsageError: `workers` is set, but no data is to be read.
    """
    options = OpenOptions(only=only, **reading)
    with reporting(progress), open_checkpoint(path, options, prove_later=True) as opened:
        ckpt = opened.locate()
        out = VerifyResult(
            urls.display_path(show_path(path)),
            ckpt.layout,
            len(ckpt.tensors),
            ckpt.nbytes,
            "ok",
            sum(r.extent.length for r in ckpt.records),
            [r.to_json() for r in ckpt.unread],
        )
        out.salvage = summarise_salvage(opened)
        out.notes += describe_dropped_replicas(ckpt)
        if damaged := [r for r in ckpt.unread if r.damaged]:
            raise Corrupt(
                f"{out.path}: {damaged[0].name} {damaged[0].what.rstrip('.')}"
                + (f"; and {len(damaged) - 1:,} more such files" if len(damaged) > 1 else "")
                + ". The index of everything else is sound.",
                code="CKPT0405",
            )
        if not read_data and against is None:
            if workers is not None:
                raise UsageError(
                    f"{argument('workers', workers)}: only the structure was asked for, which one process reads. Give "
                    f"{argument('read_data', True)} too, or leave it out.",
                    code="CKPT0204",
                )
            out.notes += opened.note_unproved(argument("read_data", True))
            return out
        found = _verify_data(opened, path, options, workers, progress, out)
        if against is not None:
            _verify_against(opened, found, against, workers, progress, out)
    return out


def _verify_against(
    opened: OpenCheckpoint,
    found: Mapping[str, str],
    against: CheckpointPath,
    workers: WorkersSpec,
    progress: Progress,
    out: VerifyResult,
) -> None:
    """Compare every tensor and value with another checkpoint, and record the result in `out`.

    Args:
        found: {tensor: BLAKE3 in hex} of `opened`.
        against: the other checkpoint.
        workers: the workers that read it, as `verify` takes them; None for the default number.

    Raises:
        Differs: the two are not equal.
        CkpttoolError: the other checkpoint cannot be read.
    """
    ckpt, name = opened.checkpoint, show_path(against)
    record, part = opened.recorded(), opened.selection
    if part == EntrySelection() and record is not None and record.selection is not None:
        part = record.selection
    likewise = OpenOptions(
        only=None if part.by_component else part.only,  # of whole components, those that both have are compared
        drop_matching=part.left_out,
        allow_equal_ranks=True,
        allow_mixed_steps=True,
    )
    with (
        open_checkpoint(against, likewise, prove_later=True) as other,
        workers_for_reading(workers, against, other.checkpoint.nbytes) as crew,
    ):
        with reporting(progress):
            second = other.locate()
        digests = digest_with_workers(other, against, likewise, crew, progress, "read")
        out.notes += [
            f"{name}: {text}" for text in (*describe_dropped_replicas(second), *make_unread_note(second.unread))
        ]
        shared = _list_components(ckpt) & _list_components(second)
        excused = {*_list_changed_values(opened), *_list_changed_values(other)}
        configs = compare_configs(opened, other)
    if not shared:
        parts = (", ".join(sorted(_list_components(held))) or "nothing" for held in (ckpt, second))
        raise Differs(
            f"nothing was compared with {name}: {' and '.join(parts)} have no component in common. Give two "
            "checkpoints that both hold the state to compare.",
            code="CKPT0501",
        )
    # what conversions to other trainers make of a scheduler that its trainer saves in part
    ckpt, second = complete_scheduler_state(ckpt), complete_scheduler_state(second)
    apart = tuple(f"{n}." for n in excused if n not in ckpt.values or n not in second.values)  # an entry for each key
    mine, yours = (
        {n: d for n, d in held.items() if n not in excused and _get_component(n) in shared and not n.startswith(apart)}
        for held in (_describe_entries(ckpt, found), _describe_entries(second, digests))
    )
    _refuse_unequal_digests(mine, yours, name)
    if unequal := sorted(n for n in excused if _get_component(n) in shared and n in {**ckpt.values, **second.values}):
        out.notes.append(
            f"not compared, since a conversion changed them, as ckpttool.json says: {len(unequal)} of the values, "
            f"first {unequal[0]}"
        )
    if configs:
        out.notes.append(
            f"configs are not part of the state, and those beside the two differ: {list_first(configs, 5)}"
        )
    asked = part.only if part.by_component else None  # other components were left out on purpose
    alone = sorted(c for c in _list_components(ckpt) ^ _list_components(second) if asked is None or c in asked)
    if alone:
        out.notes.append(f"not compared, since only one of the two has it: {', '.join(alone)}")
    out.against = {"path": urls.display_path(name), "components": sorted(shared), "verdict": "equal"}


def _describe_entries(ckpt: Checkpoint, found: Mapping[str, str]) -> dict[str, object]:
    """Describe every entry by what has to be equal in another checkpoint of the same state: {name: (dtype, shape,
    BLAKE3 in hex)} of tensors and of arrays inside values, {name: BLAKE3 in hex} of other values.

    Args:
        found: {tensor: BLAKE3 in hex} of `ckpt`.
    """
    return {
        **{n: (t.dtype, t.shape, found[n]) for n, t in ckpt.tensors.items()},
        **digest_arrays_in_values(ckpt.values),
        **digest_values_without_arrays(ckpt.values),
    }


def _get_component(name: str) -> str:
    """Return the component that a canonical name begins with, such as "optim". The name need not be in the index: it
    may be that of an array inside a value."""
    return name.partition(".")[0]


def _list_components(ckpt: Checkpoint) -> set[str]:
    """List the components that a checkpoint has tensors or values of."""
    return {ckpt.component(n) for n in (*ckpt.tensors, *ckpt.values)}


def _list_changed_values(opened: OpenCheckpoint) -> set[str]:
    """Return the names of values that a conversion changed when it wrote this checkpoint, as its ckpttool.json says."""
    record = opened.recorded()
    return set() if record is None else {n for n in record.changed if n not in opened.checkpoint.tensors}


def summarise_salvage(opened: OpenCheckpoint) -> dict[str, Any] | None:
    """Summarise what was lost of a salvaged checkpoint: {"exact": how many tensors, "rebuilt": {name: how}, "missing":
    {name: why}}; None of any other checkpoint."""
    record = opened.recorded()
    states = record.salvage if record is not None and record.about(opened.checkpoint) else {}
    if not states and opened.checkpoint.salvage is not None:
        states = opened.checkpoint.salvage.states(opened.checkpoint.tensors, opened.checkpoint.values)
    if not states:
        return None
    found = Salvage.of_states(states)
    exact = sum(state.partition(": ")[0] == "exact" for state in states.values())
    return {"exact": exact, "rebuilt": found.rebuilt, "missing": found.missing}


def _verify_data(
    opened: OpenCheckpoint,
    path: CheckpointPath,
    options: OpenOptions,
    workers: WorkersSpec,
    progress: Progress,
    out: VerifyResult,
) -> dict[str, str]:
    """Read every byte, compare digests and numbers, and record the result in `out`.

    Args:
        path, options: what `opened` was opened with; workers open it again.
        workers: the workers, as `verify` takes them; None for the default number.

    Returns:
        {tensor: BLAKE3 in hex}.

    Raises:
        Corrupt: it is damaged, or its numbers contradict each other.
        SourceChanged: it changed while it was read.
        Differs: it is not what was recorded.
    """
    ckpt = opened.checkpoint
    averages = Averages(find_nonnegative_state(ckpt.tensors))

    def seen(block: Block) -> None:
        """Count the negative elements in a block of an average of squares."""
        averages.add(block.name, ckpt.tensors[block.name].dtype, block.first, block.data)

    with workers_for_reading(workers, path, opened.checkpoint.nbytes) as crew:
        found = digest_with_workers(opened, path, options, crew, progress, "read", seen=seen)
    if crew is not None:  # who have read them
        for block in Reader(opened.source, ckpt.files).blocks(
            StreamJob(n, t) for n, t in ckpt.tensors.items() if n in averages.names
        ):
            seen(block)
    opened.source.assert_unchanged()
    out.data = "ok"
    out.digest = state_roots(ckpt, found)
    compare_recorded_digests(opened, found, out)
    _verify_numbers(opened, averages, progress, out)
    return found


def _verify_numbers(opened: OpenCheckpoint, averages: Averages, progress: Progress, out: VerifyResult) -> None:
    """Check that fp32 masters round to their weights and that averages of squares are not negative; record it in `out`.

    Args:
        averages: what was seen of the averages of squares while the data was read.

    Raises:
        Corrupt: the numbers contradict each other, and `allow_mixed_steps` is not set.
    """
    ckpt = opened.checkpoint
    of_squares = sum(ckpt.tensors[n].dtype in EXPONENT for n in averages.names)
    out.compared = {"masters": len(masters.find_master_pairs(ckpt)), "averages": of_squares}
    if not any(out.compared.values()):
        out.compared = None
        return
    texts = []
    if averages.found:
        name, (_, first) = next(iter(averages.found.items()))
        texts.append(
            describe_negative_averages(
                averages.found, ckpt.tensors, masters.describe_element_place(ckpt, ckpt.tensors[name], first)
            )
        )
    if odd := masters.find_differing_masters(ckpt, opened.source, progress):
        texts.append(masters.describe_differing_masters(ckpt, odd))
    if texts and not opened.allow_mixed_steps:
        raise Corrupt(
            f"{out.path}: {'. '.join(texts)}. To pass over it, use {argument('allow_mixed_steps', True)}.",
            code="CKPT0415",
        )
    out.numbers = "contradict" if texts else "ok"
    out.notes += texts


def compare_recorded_digests(opened: OpenCheckpoint, found: Mapping[str, str], out: VerifyResult) -> None:
    """Compare digests with the recorded ones, in ckpttool.json or in the checkpoint itself, and record the result in
    `out`.

    Args:
        found: {tensor: BLAKE3 in hex} of `opened`.

    Raises:
        Differs: they are not equal.
    """
    ckpt, record = opened.stored, opened.recorded()
    held = digest_values_without_arrays(ckpt.values)
    found = {n: found[opened.renamed.get(n, n)] for n in ckpt.tensors}
    if ckpt.recorded:
        rebuilt = ckpt.salvage.rebuilt if ckpt.salvage is not None else {}
        here = {n: d for n, d in found.items() if n not in rebuilt or n in ckpt.recorded}
        here |= {n: d for n, d in held.items() if n in ckpt.recorded_values}
        if opened.folder and (beside := here.keys() - ckpt.recorded.keys() - ckpt.recorded_values.keys()):
            here = {n: d for n, d in here.items() if n not in beside}
            out.notes.append(
                f"{count_noun(len(beside), 'tensor')} in files that carry no digests of their own, first "
                f"{min(beside)}, were not compared, since there is no {RECORD}"
            )
        _refuse_unequal_digests(here, {**ckpt.recorded, **ckpt.recorded_values}, "the digests it carries itself")
    elif record is None:
        return
    elif record.problem is not None:
        out.recorded = "damaged"
        out.notes.append(f"digests were not compared: {record.problem}")
        return
    elif not record.about(ckpt):
        out.recorded = "other files"
        out.notes.append(f"digests were not compared: {RECORD} describes other files than {ckpt.files[0]}")
        return
    else:
        expected: dict[str, object] = {**record.expected(ckpt, opened.selection)}
        rebuilt_alone = not expected and bool(record.salvage)
        mine: dict[str, object] = {
            n: (ckpt.tensors[n].dtype, ckpt.tensors[n].shape, d)
            for n, d in found.items()
            if n not in record.added_or_dropped and not record.salvage.get(n, "").startswith("rebuilt")
        }
        if record.values is not None:
            mine |= {n: d for n, d in held.items() if n not in expected}
            expected |= record.values_of(opened.selection)
        _refuse_unequal_digests(mine, expected, f"the digests in {RECORD}")
        if rebuilt_alone:
            return  # of its tensors nothing is recorded
    out.recorded = "equal"


def _refuse_unequal_digests(mine: Mapping[str, object], theirs: Mapping[str, object], what: str) -> None:
    """Raise an error if two sides do not have the same names with equal digests.

    Args:
        mine, theirs: {name of a tensor or value: its digest, or a tuple that includes it}.
        what: names the side of `theirs` in the message.

    Raises:
        Differs: they do not; the message has counts, and the first name.
    """
    wrong = sorted(n for n in mine if n in theirs and mine[n] != theirs[n])
    missing, extra = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
    if wrong or missing or extra:
        first = (wrong or missing or extra)[0]
        raise Differs(
            f"not equal to {what}: {len(wrong)} tensors or values are others, {len(missing)} are missing, {len(extra)} "
            f'are new; first "{first}". `ckpttool diff` shows how.',
            code="CKPT0501",
        )


def check_source_digests(
    opened: OpenCheckpoint,
    draft: Draft,
    digests: dict[str, str],
    writing: WriteRequest,
    progress: Progress,
    budget: IOBudget,
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Check, after a draft was filled, that its source is unchanged and has its recorded digests.

    Args:
        digests: {tensor of the draft: BLAKE3 in hex}.
        writing: the request, for the dtypes of casts.

    Returns:
        (the source's tensors that the destination holds, with their dtypes there; their digests by canonical name).

    Raises:
        SourceChanged: the source changed during the conversion.
        Corrupt: a tensor does not have its recorded digest.
    """
    opened.source.assert_unchanged()
    wanted = _select_held_tensors(opened.checkpoint, draft, make_dtype_chooser(writing.dtype, writing.cast or {}))
    digests = _collect_source_digests(opened, draft, wanted, digests, progress, budget)
    _check_recorded_digests(opened, wanted, digests, progress, budget)
    for part in opened.inputs:
        _check_input_digests(part, progress, budget)
    return wanted, digests


def _check_input_digests(part: OpenCheckpoint, progress: Progress, budget: IOBudget) -> None:
    """Read tensors that others were computed from once more, and check that they have their recorded digests.

    Args:
        part: the part of a source that has just these tensors; each has a recorded digest.
        progress: called with ("digest", bytes done, bytes in all).
        budget: memory and threads.

    Raises:
        Corrupt: a tensor has another digest; the message names the first.
    """
    ckpt = part.checkpoint
    if not ckpt.tensors:
        return
    found = tensor_digests(ckpt.tensors, part.source, ckpt.files, ckpt.records, progress, "digest", None, budget)
    if wrong := sorted(n for n, digest in found.items() if digest != ckpt.recorded[n]):
        raise explain_other_digests(ckpt, wrong, len(found))


def _select_held_tensors(ckpt: Checkpoint, draft: Draft, cast: layouts.Cast) -> dict[str, TensorEntry]:
    """Return {canonical name in the source: tensor} of those tensors of the source that the destination contains, each
    with the dtype that it has in the destination.

    Args:
        ckpt: the index of the source.
        draft: the destination.
        cast: returns the dtype in the destination, from the name and the dtype in the source; for tensors that have
            another name in the destination.
    """
    there = {n: t.dtype for n, t in draft.checkpoint.tensors.items()}
    there |= {n: dtype for n, (dtype, _, _) in digest_arrays_in_values(draft.checkpoint.values).items()}  # not cast
    there |= {n: there[o] for n, o in draft.aliases.items() if o in there}
    gone = {d.name for d in draft.dropped}
    return {
        n: replace(t, dtype=there[n] if n in there else cast(n, t.dtype))
        for n, t in ckpt.tensors.items()
        if n not in gone
    }


def _collect_source_digests(
    opened: OpenCheckpoint,
    draft: Draft,
    wanted: dict[str, TensorEntry],
    digests: dict[str, str],
    progress: Progress,
    budget: IOBudget,
) -> dict[str, str]:
    """Return the digests of the source's tensors, as they are in the destination, {canonical name: BLAKE3 in hex}.

    Tensors that the destination splits are read again.

    Args:
        wanted: the source's tensors that the destination holds, with their dtypes there.
        digests: {tensor of the draft: BLAKE3 in hex}.
    """
    ckpt = opened.checkpoint
    out = {
        n: digests[n] for n in wanted if n in digests and (n in draft.aliases or draft.sources[n] == ckpt.tensors[n])
    }
    rest = {n: ckpt.tensors[n] for n in wanted if n not in out}
    if rest:
        dtypes = {n: wanted[n].dtype for n in rest}
        out.update(tensor_digests(rest, opened.source, ckpt.files, ckpt.records, progress, "digest", dtypes, budget))
    return out


def _check_recorded_digests(
    opened: OpenCheckpoint,
    wanted: Mapping[str, TensorEntry],
    digests: Mapping[str, str],
    progress: Progress,
    budget: IOBudget,
) -> None:
    """Check that the tensors that were copied have the digests recorded for the source; cast tensors are read again.

    Args:
        wanted: the source's tensors that the destination holds, with their dtypes there.
        digests: {canonical name: BLAKE3 in hex}.

    Raises:
        Corrupt: with the first tensor that has another digest.
    """
    ckpt = opened.checkpoint
    named = {n for n in ckpt.recorded if n in wanted}
    cast = {n: ckpt.tensors[n] for n in sorted(named) if wanted[n].dtype != ckpt.tensors[n].dtype}
    found = dict(digests)
    if cast:
        found |= tensor_digests(cast, opened.source, ckpt.files, ckpt.records, progress, "digest", None, budget)
    wrong = sorted(n for n in named if found[n] != ckpt.recorded[n])
    if wrong:
        raise explain_other_digests(ckpt, wrong, len(named))


def read_back(
    path: str,
    target: layouts.Layout,
    draft: Draft,
    digests: dict[str, str],
    config: str | None,
    progress: Progress,
    budget: IOBudget,
    workers: Workers | None = None,
) -> None:
    """Open the destination as any reader would, and compare every digest and value with what was written.

    Args:
        path: the destination.
        target, draft: its layout and its draft.
        digests: {tensor of the draft: BLAKE3 in hex} of what was written.
        config: folder or id of a Hugging Face model; None if none was given.
        workers: the workers that read it; None for this process.

    Raises:
        Differs: with the first tensor or value that is not what was written.
        Corrupt: it cannot be read.
    """
    options = OpenOptions(
        source_layout=target.name,
        config=None if target.keeps_config or "config" not in target.reader_uses else config,
        allow_equal_ranks=True,
        allow_mixed_steps=True,
        as_delta=draft.checkpoint.derived is not None,
    )
    try:
        with open_checkpoint(path, options, prove_later=True) as back:
            safetensors_header.check_with_library(back.source, back.checkpoint.files)
            if back.checkpoint.config is None and draft.checkpoint.config is not None:
                back.checkpoint.config = draft.checkpoint.config  # one file has none beside it to tell its names
                workers = None  # who would not know it
            back.locate()
            found = digest_with_workers(back, path, options, workers, progress, "verify", budget)
            values = find_value_differences(back.checkpoint, back.of_layout, draft, found)
    except Unreadable as e:  # what was written there would fail the next run too
        raise Corrupt(f"the destination cannot be read back: {e}", code="CKPT0421") from e
    inside = digest_arrays_in_values(draft.checkpoint.values)
    gone = {d.name for d in draft.dropped}  # a reader may find something else under their names
    digests = digests | {n: d for n, (*_, d) in inside.items() if n in found and n not in gone}
    missing = sorted(set(digests) - set(found) - set(draft.aliases))
    extra = sorted(set(found) - set(digests) - gone - set(draft.synthesized_tensors))
    written, there = draft.checkpoint.tensors, back.checkpoint.tensors
    wrong = sorted(
        n
        for n in digests
        if n in found
        and (
            found[n] != digests[n]
            or (n in written and (written[n].dtype, written[n].shape) != (there[n].dtype, there[n].shape))
        )
    )
    if missing or extra or wrong or values:
        first = f'"{(wrong or missing or extra)[0]}"' if wrong or missing or extra else values[0]
        left = f"Remove {urls.redact_url(path)}." if urls.is_url(path) else "Nothing was left there."
        cause = "ckpttool does not find in it what it wrote: please report this."
        if wrong:
            cause = "The disk may be failing; if it is not, please report this."
            if urls.is_url(path):
                cause = "The store returns other bytes than were sent; ask its operators."
        raise Differs(
            f"the destination, read back, differs from the source: {len(wrong)} tensors have other bytes, "
            f"{len(missing)} are missing, {len(extra)} are new, {len(values)} values differ; first {first}. {left} "
            f"{cause}",
            code="CKPT0503",
        )
