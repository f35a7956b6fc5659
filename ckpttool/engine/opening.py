"""Open a checkpoint: detect its layout, read its index, prove it sound. No byte of a tensor is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from .. import layouts
from ..errors import CkpttoolError, Corrupt, NotRecognised, Unsupported, UsageError, argument
from ..formats.pickles import Refused, list_children
from ..formats.stored_tensors import flatten_like_dcp
from ..index.check import check
from ..index.checkpoint import Checkpoint, Salvage, Value, find_ranks_without_rng_state, joined, tied_weights
from ..index.draft import Dropped
from ..index.param_groups import list_names_by_group
from ..index.selection import NOT_RESUMED, EntrySelection, explain_no_match
from ..options import MergeRequest, OpenKeywords, OpenOptions, list_keywords
from ..printable import count_noun, list_first, printable
from ..progress import log_detail, log_step
from ..storage.source import Source, closed_on_error, raise_open_file_limit
from ..storage.urls import UNFINISHED
from .copy.value_digests import are_equal_data, split_lists, value_digests
from .discover import detection, unread_files
from .recorded import RECORD, Recorded, explain_missing, read_record
from .selecting import make_selection, select_merged_part, select_part

if TYPE_CHECKING:
    from . import salvage
    from .handle import TensorHandle

__all__ = [
    "CheckpointPath",
    "MergeRequest",
    "MergedCheckpoint",
    "OpenCheckpoint",
    "OpenOptions",
    "collect_model_hints",
    "compare_configs",
    "drop_unfit_source_layout",
    "drop_unused_hints",
    "list_optimizer_order",
    "open",
    "open_checkpoint",
    "refuse_unused_hints",
    "show_path",
]


#: A folder or a file, or the place that it was found to be.
CheckpointPath = str | os.PathLike[str] | layouts.Place


def show_path(path: CheckpointPath) -> str:
    """Return the path or URL of a checkpoint as text, for messages."""
    return os.path.join(path.source.root, path.file or "") if isinstance(path, layouts.Place) else os.fspath(path)


@dataclass(repr=False, eq=False)
class OpenCheckpoint(Mapping[str, "TensorHandle"]):
    """A checkpoint that was read and checked, with the files it lies in. It is a mapping of names to tensors.

    Examples:
        >>> with ckpttool.open("runs/step-1000") as opened:  # doctest: +SKIP
        ...     for name in opened:
        ...         print(name, opened[name].dtype, opened[name].shape)
        ...     rows = opened["model.embed.weight"][2:5]

    Its files are closed at the end of the `with`, or by `close()`; a read after that is a UsageError. If it is dropped
    open, they are closed with a ResourceWarning.
    """

    checkpoint: Checkpoint
    source: Source
    layout: layouts.Layout
    folder: bool  # whether it is a folder of its own, and not one file among others
    located: bool = False
    # what `locate` does not refuse
    allow_equal_ranks: bool = False
    allow_mixed_steps: bool = False
    selection: EntrySelection = field(default_factory=EntrySelection)  # the part that was asked for
    # what was changed as it was opened, (how, the index before, the index after), and {entry there: its name here}
    changes: list[tuple[str, Checkpoint, Checkpoint]] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    unwanted: list[Dropped] = field(default_factory=list)  # what was left out, entry by entry, as it was asked for
    # where tensors are computed from others: those, as far as digests were recorded of them, and what is not in the
    # result
    inputs: tuple[OpenCheckpoint, ...] = ()
    left_behind: list[Dropped] = field(default_factory=list)
    whole: Checkpoint | None = None  # the index before components were left out
    # values that ckpttool had to add when it wrote the files, and that are no part of the state
    of_layout: set[str] = field(default_factory=set)
    _record: list[Recorded | None] = field(default_factory=list)
    _locating: threading.RLock = field(default_factory=threading.RLock)

    @property
    def stored(self) -> Checkpoint:
        """Get the index of the opened part as it was read, before names or param groups were changed on opening."""
        return self.changes[0][1] if self.changes else self.checkpoint

    @property
    def location(self) -> str:
        """Get the path or URL of the checkpoint's folder, or of its first file if the checkpoint is no folder."""
        return self.source.root if self.folder else os.path.join(self.source.root, self.checkpoint.files[0])

    def recorded(self) -> Recorded | None:
        """Return the content of the ckpttool.json in the checkpoint's folder, which is read once; None if there is
        none, or if the checkpoint is no folder."""
        if not self._record:
            self._record.append(read_record(self.source) if self.folder else None)
        return self._record[0]

    def expect_recorded(self, ignore: bool = False) -> None:
        """Set `Checkpoint.recorded` to the digests in ckpttool.json that this checkpoint must have, and compare those
        of values.

        What cannot be compared, and why, is added to the notes of the checkpoint.

        Args:
            ignore: expect no digests instead, not even those that the checkpoint carries itself.

        Raises:
            Corrupt: names, dtypes, shapes or values are not those of the record.
        """
        ckpt, found = self.checkpoint, None if self.checkpoint.recorded and not ignore else self.recorded()
        stored, lost = self.stored, ckpt.salvage or Salvage()  # of this damaged checkpoint itself
        if found is not None and found.salvage and found.about(ckpt):
            before = Salvage.of_states(found.salvage)
            ckpt.salvage = Salvage(lost.problems, before.missing | lost.missing, {**before.rebuilt, **lost.rebuilt})
        if ignore:
            if ckpt.recorded or found is not None:
                ckpt.notes.append(
                    "the digests that were recorded of it were not compared: "
                    f"{argument('ignore_recorded_digests', True)}"
                )
                ckpt.recorded, ckpt.recorded_values, ckpt.ignored_digests = {}, {}, True
            return
        if found is None:
            self._check_recorded_values()
            return
        if found.problem is not None:
            ckpt.notes.append(f"the digests in {RECORD} were not compared, since it is damaged: {found.problem}")
            return
        if not found.about(ckpt):
            ckpt.notes.append(
                f"the digests in {RECORD} were not compared: it describes other files than {ckpt.files[0]}, which this "
                "checkpoint lies in"
            )
            return
        expected = found.expected(stored, self.selection)
        if lost.missing or lost.rebuilt or lost.problems:  # what is left of it must have the digests, and no more
            expected = {n: e for n, e in expected.items() if n in stored.tensors and n not in lost.rebuilt}
        if gone := [n for n in expected if n not in stored.tensors]:
            raise explain_missing(ckpt, gone, len(expected))
        for n, (dtype, shape, _) in expected.items():
            t = stored.tensors[n]
            if (t.dtype, t.shape) != (dtype, shape):
                raise Corrupt(
                    f'{ckpt.root}: "{n}" is {t.dtype} {list(t.shape)}, but {RECORD} lists it as {dtype} {list(shape)}: '
                    "it was changed after the record was written. Take another copy. If it was on purpose, use "
                    f"{argument('ignore_recorded_digests', True)}, or remove {RECORD}.",
                    code="CKPT0414",
                )
        known = {*expected, *found.added_or_dropped, *found.tied, *found.salvage}
        if new := [n for n in stored.tensors if n not in known]:
            ckpt.notes.append(
                f'{len(new)} tensors are not listed in {RECORD}, first "{new[0]}", so no digest of them was compared'
            )
        ckpt.recorded = {self.renamed.get(n, n): digest for n, (_, _, digest) in expected.items()}
        if found.values is not None:
            damaged = lost.missing or lost.problems
            ckpt.recorded_values = {
                n: d for n, d in found.values_of(self.selection).items() if not damaged or n in stored.values
            }
        self._check_recorded_values()

    def _check_recorded_values(self) -> None:
        """Compare the values with the digests that were recorded of them.

        Raises:
            Corrupt: with the first value that is missing or has another digest.
        """
        ckpt = self.checkpoint
        found = value_digests(self.stored.values) if ckpt.recorded_values else {}
        for name, digest in ckpt.recorded_values.items():
            if found.get(name) != digest:
                what = "is not there, as it was" if name not in found else "is not what it was"
                raise Corrupt(
                    f'{ckpt.root}: the value "{name}" {what} when {RECORD} was written. It was damaged or changed '
                    "afterwards. Take another copy. If it was changed on purpose, use "
                    f"{argument('ignore_recorded_digests', True)}, or remove {RECORD}.",
                    code="CKPT0414",
                )

    def locate(self) -> Checkpoint:
        """Find the raw byte ranges of all tensors, and return the index with them.

        The first call checks the framing of every item and refuses mixed files; later calls return the same index.
        Everything that reads bytes of tensors calls this first: verify, convert, the handles of this mapping, and live
        loads.

        Raises:
            Corrupt: an item is damaged, or files of ranks do not belong together.
        """
        with self._locating:
            if not self.located:
                if self.layout.locate is not None:
                    self.checkpoint = self.layout.locate(self.checkpoint, self.source)
                    if self.source.patched is not None:
                        from . import salvage

                        self.checkpoint = salvage.drop_lost_tensors(self.checkpoint, self.source.patched)
                    check(self.checkpoint)
                self._refuse_mixtures()
                self.located = True
            return self.checkpoint

    def _refuse_mixtures(self) -> None:
        """Refuse files of ranks that do not belong together, unless `allow_equal_ranks` and `allow_mixed_steps` let
        them pass.

        Raises:
            Corrupt: with the files, and what shows it.
        """
        from . import mixups
        from .transform import masters

        self.checkpoint = mixups.compare_saved_replicas(self.checkpoint, self.source)
        if not self.allow_equal_ranks:
            mixups.refuse_equal_ranks(self.checkpoint, self.source)
            mixups.refuse_misplaced_files(self.checkpoint, self.source)
        if not self.allow_mixed_steps:
            mixups.refuse_diverged_replicas(self.checkpoint)
            mixups.refuse_mixed_steps(self.checkpoint, self.source)
            if self.source.patched is None:
                masters.refuse_differing_masters(self.checkpoint, self.source)
                if self.whole is not None:
                    rest = masters.select_pairs_of_moments(self.whole, self.checkpoint)
                    masters.refuse_differing_masters(self._locate_part(rest), self.source)

    def recheck(self) -> None:
        """Check again whether files of ranks belong together, if items in a store were checked only as they were read.

        Raises:
            Corrupt: with the files, and what shows it.
        """
        if self.source.count_unproved()[1]:
            self._refuse_mixtures()

    def note_unproved(self, proved_by: str) -> list[str]:
        """Return a list with one note if items in a store have not been checked yet; else [].

        Args:
            proved_by: what reads and checks all items, as the subject of a sentence: "the conversion".
        """
        if not (count := self.source.count_unproved()[0]):
            return []
        looked = "only the first of each kind and of each file"
        return [f"{count:,} items in the store were not looked into, {looked}: {proved_by} reads and proves all"]

    def _locate_part(self, part: Checkpoint) -> Checkpoint:
        """Return a part of the index with the raw byte ranges of its tensors."""
        if self.located or self.layout.locate is None or not part.tensors:
            return part
        return self.layout.locate(part, self.source)

    def describe_sampled_masters(self) -> str | None:
        """Compare samples of fp32 masters with the weights that they should round to, and describe those that do not.
        At most 32 masters are sampled, on a remote source 4.

        Returns:
            A sentence; None if all samples round to their weights, there are no masters, or their bytes cannot be read
            (`locate` then raises).
        """
        ckpt = self.whole or self.checkpoint
        if self.source.patched is not None or not ckpt.has_masters:
            return None
        from .transform import masters

        ckpt = self.checkpoint
        if self.whole is not None and masters.select_pairs_of_moments(self.whole, ckpt).tensors:
            ckpt = self.whole
        some = masters.select_some_pairs(ckpt, 4 if self.source.is_remote else 32)
        try:
            found = masters.sample_masters(some := self._locate_part(some), self.source)
        except CkpttoolError:
            return None
        count, every = len(masters.find_master_pairs(some)), len(masters.find_master_pairs(ckpt))
        head = f"of {every:,} fp32 masters {count:,} were looked at: " if count < every else ""
        return head + masters.describe_differing_masters(some, found) if found else None

    def read(self, name: str) -> bytes:
        """Read all bytes, row-major, of the small tensor of this canonical name into memory.

        Raises:
            Corrupt: they do not have the source's CRC32.
        """
        from .copy.stream import read_small_tensors

        return read_small_tensors(self.locate(), self.source, [name])[name]

    def _get_named_index(self) -> Checkpoint:
        """Return the index with the names of all tensors, after `locate` if the layout finds names only there.

        Raises:
            Corrupt: `locate` finds damage.
        """
        names_later = self.layout.locate is not None and not self.located
        if names_later and all(t.coding == "raw" for t in self.checkpoint.tensors.values()):
            self.locate()
        return self.checkpoint

    def __getitem__(self, name: str) -> TensorHandle:
        """Get a tensor by its canonical name, "model.embed.weight"; its bytes are read when the handle is indexed.

        The first read of a checkpoint locates all of it, so that files of ranks that do not belong together are
        refused.

        Raises:
            UnknownTensor: a KeyError that suggests similar names.
        """
        from .handle import make_handle

        self._get_named_index()
        return make_handle(self, name)

    def __iter__(self) -> Iterator[str]:
        """Yield the canonical names of all tensors, in the order of the checkpoint."""
        return iter(self._get_named_index().tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._get_named_index().tensors)

    def __contains__(self, name: object) -> bool:
        """Tell whether the checkpoint has a tensor of this canonical name."""
        return name in self._get_named_index().tensors

    def keys(self) -> KeysView[str]:
        """List the canonical names of all tensors."""
        return self._get_named_index().tensors.keys()

    # one that is open is equal to none but itself
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __dir__(self) -> list[str]:
        """List what is public: the mapping, and what says where it is and what it holds."""
        return [*dir(Mapping), "checkpoint", "close", "layout", "location", "source"]

    def __repr__(self) -> str:
        """Return a line with layout, place, number of tensors and bytes."""
        ckpt = self.checkpoint
        return (
            f"<{type(self).__name__} {ckpt.layout} {printable(ckpt.root)}: {count_noun(len(ckpt.tensors), 'tensor')}, "
            f"{ckpt.nbytes:,} bytes>"
        )

    def __enter__(self) -> OpenCheckpoint:
        """Return the checkpoint itself; the end of the `with` block closes its files."""
        return self

    def close(self) -> None:
        """Close the checkpoint's files. Tensors cannot be read any more; arrays that were read stay valid."""
        self.source.close()

    def __exit__(self, *_: object) -> None:
        """Close the checkpoint's files."""
        self.close()


@dataclass(repr=False, eq=False)
class MergedCheckpoint(OpenCheckpoint):
    """A checkpoint that is made of others: merged, averaged, or with other weights as its model.

    `parts`  the checkpoints that it is made of, and which of their tensors weights are computed from
    `kept`   {tensor of the first of them that stays as it is: its name there}
    """

    parts: tuple[tuple[OpenCheckpoint, frozenset[str]], ...] = ()
    kept: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        parts: tuple[tuple[OpenCheckpoint, frozenset[str]], ...],
        checkpoint: Checkpoint,
        source: Source,
        kept: dict[str, str],
        left_behind: list[Dropped],
        selection: EntrySelection = EntrySelection(("model",)),  # noqa: B008
    ) -> MergedCheckpoint:
        """Make a checkpoint from others.

        Args:
            parts: the checkpoints that it is made of, each with the names of its tensors that weights are computed
                from; the first also gives layout and options.
            checkpoint, source: the located index, and its files.
            kept: {name of an unchanged tensor in the new checkpoint: its name in the first part}.
            left_behind: entries of the parts that the new checkpoint does not have.
            selection: the part of the state that the new checkpoint has.
        """
        first = parts[0][0]
        return cls(
            checkpoint,
            source,
            first.layout,
            first.folder,
            True,
            first.allow_equal_ranks,
            first.allow_mixed_steps,
            selection=selection,
            left_behind=left_behind,
            parts=parts,
            kept=kept,
        )

    def expect_recorded(self, ignore: bool = False) -> None:
        """Expect the recorded digests of the first part for unchanged weights.

        The tensors that weights are computed from, with their recorded digests, are added to `inputs`, to be compared
        later.

        Args:
            ignore: expect no digests.

        Raises:
            Corrupt: names, dtypes or shapes are not those of a record.
        """
        ckpt = self.checkpoint
        for part, used in self.parts:
            part.expect_recorded(ignore)
            old = part.checkpoint
            ckpt.notes += [n for n in old.notes if n not in ckpt.notes]
            ckpt.ignored_digests = ckpt.ignored_digests or old.ignored_digests
            self.inputs += (
                replace(part, checkpoint=replace(old, tensors={n: old.tensors[n] for n in used & old.recorded.keys()})),
            )
        recorded = self.parts[0][0].checkpoint.recorded
        ckpt.recorded = {n: recorded[there] for n, there in self.kept.items() if there in recorded}


@list_keywords
def open(
    path: CheckpointPath,
    *,
    only: Iterable[str] | None = None,
    weights: str | None = None,
    **reading: Unpack[OpenKeywords],
) -> OpenCheckpoint:
    """Read the index of a checkpoint in any layout and check it; no tensor byte is read.

    Args:
        path: a folder, a file, or the URL of one.
        source_layout: its layout, if the files alone do not tell.
        only: what to keep: components, and names or globs of tensors and values (["model.layers.[0-3].*", "optim"]);
            None for all. A name includes everything below it.
        drop_matching: names and globs of what to leave out.
        rename: {regular expression: replacement} for the names of parameters ("layers.0.weight"), in the model and in
            the optimizer, applied one after the other, as `re.sub` does; after `only`.
        weights: which weights are the model: the key of an average ("ema"), a file beside the checkpoint, or
            "schedule-free-x"; the result then has nothing else. None for the model as the trainer saved it.
        config: folder or id of a Hugging Face model with the same architecture.
        like: another checkpoint of the same model, for what this one does not say about the parameters: names, order,
            shapes.
        flat_layout: file with what `describe_fsdp1` returned in the job.
        wrap: patterns of the modules that FSDP1 wrapped, ["**.layers.*"].
        tag: which save, if a DeepSpeed folder holds several; None for the one that `latest` names.
        allow_equal_ranks: read it although one rank's file looks like a copy of another's.
        allow_mixed_steps: read it although its files look like those of different steps.

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. Files of ranks that do not belong
            together raise Corrupt not here, but when a tensor is first read (`locate`).
        UsageError: an argument has a wrong value, or does not apply to the layout.
    """
    options = OpenOptions(only=only, weights=weights, **reading)
    opened = open_checkpoint(path, options)
    opened.source.is_users = True
    return opened


def open_checkpoint(
    path: CheckpointPath,
    options: OpenOptions,
    model: layouts.ModelHints | None = None,
    check_hints: bool = True,
    needed: Callable[[str], bool] = lambda component: True,
    prove_later: bool = False,
) -> OpenCheckpoint:
    """Read the index of a checkpoint and check it, as `open` does.

    Args:
        model: what `collect_model_hints(options)` returns; None to call it here.
        check_hints: whether to refuse hints that the reader does not use; a caller that may use them calls
            `refuse_unused_hints` itself.
        needed: tells, for the name of a component, whether an entry of it that cannot be read is an error; otherwise
            the entry is left out, with a note.
        prove_later: in a store, check only the first items of each kind now, and each other item when it is read
            (storage/frames.py). The caller must read all bytes through the source of what is returned.

    Raises:
        CkpttoolError: what `open` raises; the files are closed then.
    """
    if options.weights is not None:
        return _open_chosen_weights(path, options, options.weights, model, check_hints)
    selection = make_selection(options)
    only = selection.components
    model = model or collect_model_hints(options)
    raise_open_file_limit()
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    folder = where.file is None
    where.source.prove_later(prove_later and not options.salvage)
    damaged: list[salvage.Problem] = []
    if options.salvage:
        from . import salvage

        where, damaged = salvage.patch_place(where)
    given = where
    try:
        found, where, unused = _choose_layout(given, options, check_hints)
        ckpt = _read_index(found, where, given, options, model, damaged)
        record = read_record(where.source) if folder else None
        ckpt, of_layout = _restore_original_values(ckpt, record)
        # what it does not include
        if where == given or where.source.sibling_names:  # an archive holds nothing besides
            ckpt = _note_unread_files(ckpt, where, found)
        ckpt = _add_notes_on_missing(ckpt, record, only is None or "rng" in only, where.source.patched is not None)
        ckpt = replace(ckpt, notes=[*ckpt.notes, *unused])
        # the part that was asked for, as far as it can be read
        whole = None if only is None else ckpt
        if only is not None:
            ckpt = _keep_components(ckpt, only, selection.only or ())
        ckpt, unreadable = _drop_unreadable_values(ckpt, needed)
        check(ckpt)
        opened = OpenCheckpoint(
            checkpoint=ckpt,
            source=where.source,
            layout=found,
            folder=folder,
            allow_equal_ranks=options.allow_equal_ranks,
            allow_mixed_steps=options.allow_mixed_steps,
            selection=selection,
            left_behind=unreadable,
            whole=whole,
            of_layout=of_layout,
            _record=[record],
        )
        opened = select_part(opened, options.rename or {})
    except BaseException:
        where.source.close()
        raise
    ckpt, shown = opened.checkpoint, show_path(where).rstrip("/")
    log_step("opened %s: %s, %d tensors, %d bytes", shown, ckpt.layout, len(ckpt.tensors), ckpt.nbytes)
    for text in ckpt.notes:
        log_detail("%s: %s", shown, text)
    return opened


def _choose_layout(
    given: layouts.Place, options: OpenOptions, check_hints: bool
) -> tuple[layouts.Layout, layouts.Place, list[str]]:
    """Find the layout of a place.

    Args:
        check_hints: as in `open_checkpoint`.

    Returns:
        (the layout, the place that it reads there, notes on hints that it does not use).

    Raises:
        Corrupt: a conversion to a store was interrupted.
        Unsupported: the place is to be salvaged, and its layout has its own commands for that.
        CkpttoolError: no layout, or several, match the place; or a hint does not apply.
    """
    if given.file is None and given.source.is_remote and UNFINISHED in given.source.list():
        raise Corrupt(
            f"{given.source.root}: a conversion to this place was interrupted while its files became visible. Run "
            "it again, or remove what is there.",
            code="CKPT0420",
        )
    found = layouts.find(options.source_layout) if options.source_layout else detection.detect(given)
    unused = refuse_unused_hints(options, found.name, found.reader_uses) if check_hints else []
    where = found.mount(given)
    if options.salvage and where != given:
        raise Unsupported(
            f"{given.source.root}: {found.name} is checked by its own commands; try `ckpttool audit verify`."
        )
    return found, where, unused


def _read_index(
    found: layouts.Layout,
    where: layouts.Place,
    given: layouts.Place,
    options: OpenOptions,
    model: layouts.ModelHints,
    damaged: list[salvage.Problem],
) -> Checkpoint:
    """Return the index as the layout reads it; when salvaging, without the tensors that are lost.

    Args:
        where, given: the place that the layout reads, and the one that the caller named.
        damaged: problems of files that the salvage found.

    Raises:
        CkpttoolError: whatever the layout raises; or the place is a delta and not a checkpoint.
    """
    reading = layouts.ReadOptions(
        config=model.config,
        like=model.like,
        flat_layout=model.flat_layout,
        wrap=model.wrap,
        only=make_selection(options).components,
        tag=options.tag,
        allow_equal_ranks=options.allow_equal_ranks,
        salvage=options.salvage,
    )
    ckpt = found.read(where, reading)
    if ckpt.derived is not None and not options.as_delta:
        raise Unsupported(
            f"{show_path(given)} is a delta of ckpttool, and not a checkpoint: it holds changes to another one. "
            f"Convert that one with {argument('apply', [show_path(given)])}.",
            code="CKPT0341",
        )
    if where.source.patched is None:
        return ckpt
    from . import salvage

    return salvage.drop_lost_tensors(ckpt, where.source.patched, damaged)


def _add_notes_on_missing(ckpt: Checkpoint, record: Recorded | None, with_rng: bool, patched: bool) -> Checkpoint:
    """Return the index with notes on what it lacks: diverged replicas, what a conversion left out, and random states.

    Args:
        with_rng: whether to note ranks without random states.
        patched: whether it is being salvaged. Ranks without random states are in `ckpt.salvage` then; otherwise a note
            says that it is a salvaged copy, where it is one.
    """
    notes: list[str] = []
    if ckpt.others:
        from .mixups import describe_dropped_replicas

        notes += describe_dropped_replicas(ckpt)
    if record is not None and record.selection is not None:
        notes.append(f"{RECORD}: a part of a checkpoint was written here, {record.selection}. {NOT_RESUMED}")
    left = ckpt.salvage
    if record is not None and record.salvage and record.about(ckpt):
        left = Salvage.of_states(record.salvage)
    if left is not None and not patched:
        notes.append(
            f"salvaged: this is a copy of what was left of a damaged checkpoint, {len(left.missing):,} entries of it "
            f"are missing and {len(left.rebuilt):,} are rebuilt; `ckpttool verify` names them"
        )
    if with_rng:
        notes += _note_missing_random_states(ckpt)
        if patched and ckpt.salvage is not None:
            for rank in find_ranks_without_rng_state(ckpt):
                if not any(n.startswith(f"rng.{rank}.") for n in ckpt.salvage.missing):
                    ckpt.salvage.missing[f"rng.{rank}"] = "no file has the random states of this rank"
    return replace(ckpt, notes=[*ckpt.notes, *notes])


def _open_chosen_weights(
    path: CheckpointPath, options: OpenOptions, key: str, model: layouts.ModelHints | None, check_hints: bool
) -> OpenCheckpoint:
    """Open a checkpoint with a chosen set of its weights as its model, and nothing else.

    If the folder is no checkpoint itself, open the checkpoint in it that the key names, such as unet_ema/ of diffusers.

    Args:
        key: names the set of weights.
        model, check_hints: as in `open_checkpoint`.

    Raises:
        UsageError, Unsupported: there is no such set, or it is incomplete.
        CkpttoolError: the checkpoint cannot be opened.
    """
    from ..index.weight_sets import find_matching_keys
    from .weights import choose_weights

    whole = replace(options, weights=None, only=None, drop_matching=None, rename=None)

    def open_whole(place: CheckpointPath) -> OpenCheckpoint:
        """Open a checkpoint as it was saved, without what cannot be read of all but its model."""
        return open_checkpoint(place, whole, model, check_hints, lambda component: component == "model")

    def open_beside(place: str) -> OpenCheckpoint:
        """Open a checkpoint beside it."""
        return open_checkpoint(place, OpenOptions(config=options.config), check_hints=False)

    try:
        opened = open_whole(path)
    except NotRecognised as e:
        below = e.below.checkpoints if isinstance(e.below, detection.Checkpoints) else []
        names = {os.path.basename(found.path): found.path for found in below}
        keys = find_matching_keys(key, names)
        if len(keys) != 1:
            raise
        opened = open_whole(names[keys[0]])
        opened.checkpoint.notes.append(f"the weights are those of {names[keys[0]]}, one of the models in the folder")
        return opened
    with closed_on_error([opened.source]):
        chosen = choose_weights(opened, key, open_beside)
        made = MergedCheckpoint.of(
            ((chosen.whole, chosen.inputs),), chosen.checkpoint, chosen.source, chosen.kept, chosen.left_behind
        )
        return select_merged_part(made, options)


def _note_unread_files(ckpt: Checkpoint, where: layouts.Place, layout: layouts.Layout) -> Checkpoint:
    """Return the index with the files of the checkpoint that its layout does not read in `unread`, and a note on
    them."""
    saves = layout.saves
    if layout.of_trainer and saves is not None and not saves.pointers & set(where.source.list()):
        saves = None  # a trainer's directory without DeepSpeed inside
    known = {r.name for r in ckpt.unread}
    if where.source.patched is not None:
        known |= where.source.patched.patches.keys()
    beside = unread_files.list_unread_files(where.source, where.file, ckpt, saves)
    unread = [*ckpt.unread, *(r for r in beside if r.name not in known)]
    return replace(ckpt, unread=unread, notes=[*ckpt.notes, *unread_files.make_unread_note(unread)])


def _note_missing_random_states(ckpt: Checkpoint) -> list[str]:
    """Return a list with one note on ranks without random states, if other ranks have some; else []."""
    if not (ranks := find_ranks_without_rng_state(ckpt)):
        return []
    first = list_first(ranks, 8)
    return [
        f"rank{'s' * (len(ranks) > 1)} {first}: no random states, which other ranks have. A resumed job draws other "
        "random numbers there"
    ]


def _drop_unreadable_values(ckpt: Checkpoint, needed: Callable[[str], bool]) -> tuple[Checkpoint, list[Dropped]]:
    """Leave out the values that the reader could not read, with a note on the first.

    Args:
        needed: tells, for the name of a component, whether a value of it that cannot be read is an error.

    Returns:
        (the index without them, what was left out).

    Raises:
        Unsupported: with the first whose component is needed.
    """
    out: list[Dropped] = []
    for name, v in ckpt.values.items():
        if (why := _explain_unreadable(v.data)) is None:
            continue
        component = str(v.path[0])
        if needed(component):
            others = sorted({ckpt.component(n) for n in ckpt.tensors} - {component})
            way = f" {argument('only', others)} leaves it out." if others else ""
            raise Unsupported(f'"{name}" cannot be read: {why}{way}')
        out.append(Dropped(name, 0, f"it cannot be read: {why}"))
    if not out:
        return ckpt, []
    gone = {d.name for d in out}
    more = f" ({len(out) - 1} more cannot be read)" if len(out) > 1 else ""
    note = f'"{out[0].name}" was left out: {out[0].why.rstrip(".")}{more}'
    values = {n: v for n, v in ckpt.values.items() if n not in gone}
    return replace(ckpt, values=values, notes=[*ckpt.notes, note]), out


def _explain_unreadable(data: object) -> str | None:
    """Return why a part of a value (nested dicts and lists) could not be read; None if all of it was."""
    todo = [data]
    while todo:
        x = todo.pop()
        if isinstance(x, Refused):
            return x.why
        todo.extend(list_children(x))
    return None


def refuse_unused_hints(options: OpenOptions, here: str, used: Iterable[str]) -> list[str]:
    """Raise if a hint was given that nothing uses.

    Args:
        here: what the hint does not apply to, for messages: a layout, or "SOURCE -> TARGET".
        used: names of the hints that are used.

    Returns:
        Notes on unused hints that are harmless: `config` and `like`.

    Raises:
        UsageError: with the layouts that use the hint.
    """
    known = layouts.layouts().values()
    notes: list[str] = []
    for name in layouts.READ_HINTS:
        if getattr(options, name) is None or name in used:
            continue
        if name in ("config", "like"):
            notes.append(f"{argument(name)} was not needed for {here}, and was not looked at")
            continue
        readers = [x.name for x in known if name in x.reader_uses]
        writers = [x.name for x in known if name in x.writer_uses and x.write is not None]
        uses = [f"to {verb} {', '.join(rows)}" for verb, rows in (("read", readers), ("write", writers)) if rows]
        uses = [f"to read or write {', '.join(readers)}"] if readers == writers else uses
        raise UsageError(
            f"{argument(name)} does not apply to {here}; it is used {' and '.join(uses)}. Leave it out.",
            code="CKPT0205",
        )
    return notes


def drop_unused_hints(path: CheckpointPath, options: OpenOptions) -> OpenOptions:
    """Return the options without the hints that the layout of the checkpoint at `path` does not use.

    Raises:
        CkpttoolError: there is no checkpoint whose layout can be told.
    """
    if options.source_layout:
        found = layouts.find(options.source_layout)
    else:
        where = path if isinstance(path, layouts.Place) else layouts.place(path)
        with where.source:
            found = detection.detect(where)
    unused: dict[str, Any] = dict.fromkeys(k for k in layouts.READ_HINTS if k not in found.reader_uses)
    return replace(options, **unused)


def compare_configs(a: OpenCheckpoint, b: OpenCheckpoint) -> dict[str, tuple[object, object]]:
    """Return what differs in the config.json and adapter_config.json beside two checkpoints: {"config.json: KEY":
    (value of `a`, value of `b`)}, None for a key that one lacks; {} if the layout of one of the two keeps no configs in
    its folder."""
    from ..huggingface.model_files import list_config_differences

    both = a.layout.keeps_config and b.layout.keeps_config
    return list_config_differences(a.source, b.source) if both else {}


def drop_unfit_source_layout(path: CheckpointPath, options: OpenOptions) -> OpenOptions:
    """Return the options without `source_layout` if the checkpoint at `path` does not have that layout.

    For commands with several checkpoints, in which the option may apply to one only.
    """
    if options.source_layout is None:
        return options
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        fits, _ = layouts.find(options.source_layout).detect(where)
    return options if fits else replace(options, source_layout=None)


def _restore_original_values(ckpt: Checkpoint, record: Recorded | None) -> tuple[Checkpoint, set[str]]:
    """Restore the values of the source, where ckpttool.json says that a conversion changed their form for the layout.

    Values that the layout required are removed, values that it splits are joined, and lists that lost elements are
    split. Only values that are still as ckpttool wrote them are touched.

    Args:
        record: the content of ckpttool.json; None if there is none.

    Returns:
        (the index, the names of the values that were removed).
    """
    values, added = dict(ckpt.values), set[str]()
    if record is not None:
        for name, data in record.made.items():
            if name in values and are_equal_data(values[name].data, data):
                del values[name]
                added.add(name)
        for name, value in record.whole.items():
            pieces = _split_as_dcp(value)
            held = _split_as_dcp(values[name]) if name in values else values
            # by names and data: a reader may take the pieces of a model's value for entries of the model
            if all(n in held and are_equal_data(held[n].data, piece.data) for n, piece in pieces.items()):
                values = {n: v for n, v in values.items() if n not in pieces} | {name: value}
    if known := ckpt.recorded_values or (record and record.values):  # whole values have no elements that could be gone
        values = _split_shortened_lists(values, known)
    return replace(ckpt, values=values), added


def _split_shortened_lists(values: dict[str, Value], known: Mapping[str, str]) -> dict[str, Value]:
    """Return the values with each list that lost elements in a conversion split into its elements, so that the elements
    that remain have the names that were recorded.

    None at the place of a dropped element is left out.

    Args:
        values: {canonical name: value}.
        known: {canonical name: digest} of the values before the conversion; only the names are used.
    """
    if lost := known.keys() - values.keys():
        values = split_lists(values, lost)
    return {n: v for n, v in values.items() if v.data is not None or type(v.path[-1]) is not int or n in known}


def _split_as_dcp(value: Value) -> dict[str, Value]:
    """Split a value into the entries that torch's DCP makes of it, {name: value}."""
    return {joined(p): Value(p, x) for p, x in flatten_like_dcp(value.data, value.path).items()}


def _keep_components(ckpt: Checkpoint, components: frozenset[str], only: tuple[str, ...]) -> Checkpoint:
    """Return the index with some components only; a note says if fp32 masters of a kept optimizer are left out.

    Args:
        only: the patterns that the user gave; `components` are theirs.

    Raises:
        UsageError: the checkpoint does not have one of them.
    """
    wanted = [w for w in only if w in components]
    have = {ckpt.component(n) for n in [*ckpt.tensors, *ckpt.values]}
    missing = [p for p in only if p.partition(".")[0] not in have]
    if missing:
        names = [*ckpt.tensors, *ckpt.values]
        raise UsageError(f"{argument('only', missing)}: {explain_no_match(missing[0], names)}", code="CKPT0207")
    out = ckpt.only(components)
    masters = [t for t in ckpt.tensors.values() if t.path[:2] == ("extra", "master")]
    if masters and "optim" in wanted and "extra" not in wanted:
        out.notes = [
            *out.notes,
            f"{len(masters):,} fp32 masters (extra.master) are left out: an optimizer that keeps some starts from the "
            f"weights, which are rounded. {argument('only', [*only, 'extra'])} keeps them",
        ]
    return out


def collect_model_hints(options: OpenOptions) -> layouts.ModelHints:
    """Collect what the options say about the model; opens the checkpoint that `like` names.

    Raises:
        CkpttoolError: that checkpoint cannot be opened.
    """
    known = None
    if options.like is not None:
        with open(options.like) as other:
            known = _describe_reference_model(other.checkpoint)
    flat_layout = None if options.flat_layout is None else os.fspath(options.flat_layout)
    return layouts.ModelHints(options.config, known, flat_layout, None if options.wrap is None else tuple(options.wrap))


def _describe_reference_model(ckpt: Checkpoint) -> layouts.ReferenceModel:
    """Describe the model of a checkpoint (shapes, dtypes, ties, order, param groups), to read another one whose
    files lack that."""
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    return layouts.ReferenceModel(
        {n: (t.shape, t.dtype) for n, t in model.items()},
        tied_weights(model),
        list_optimizer_order(ckpt),
        list_names_by_group(ckpt),
        {n: t.chunks for n, t in model.items()},
        ckpt.tensor_parallel,
        ckpt.pipeline,
    )


def list_optimizer_order(ckpt: Checkpoint) -> tuple[str, ...] | None:
    """List the FQNs of parameters in the order in which the param groups list them; None where the groups list no
    names."""
    groups = list_names_by_group(ckpt)
    return tuple(n for g in groups for n in g) or None if groups is not None else None
