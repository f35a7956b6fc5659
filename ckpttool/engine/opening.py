"""Open a checkpoint: detect its layout, read its index, prove it sound. No byte of a tensor is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from .. import layouts
from ..errors import CkpttoolError, Corrupt, NotRecognised, Unsupported, UsageError, argument
from ..formats.pickles import Refused, children
from ..formats.stored_tensors import flatten_like_dcp
from ..index.check import check
from ..index.checkpoint import Checkpoint, Salvage, Value, joined, ranks_without_rng_state, tied_weights
from ..index.draft import Dropped
from ..index.param_groups import names_by_group
from ..index.selection import NOT_RESUMED, EntrySelection, explain_no_match
from ..options import MergeRequest, OpenKeywords, OpenOptions, list_keywords
from ..printable import count_noun, list_first
from ..progress import log_detail, log_step
from ..storage.source import Source, raise_file_limit
from ..storage.urls import UNFINISHED
from .copy.value_digests import equal_values, split_lists, value_digests
from .discover import detection, unread_files
from .recorded import RECORD, Recorded, explain_missing, read_record
from .selecting import select_part, selection_of

if TYPE_CHECKING:
    from . import salvage
    from .handle import TensorHandle

__all__ = [
    "CheckpointPath",
    "MergeRequest",
    "MergedCheckpoint",
    "OpenCheckpoint",
    "OpenOptions",
    "drop_other_layout",
    "drop_unused_hints",
    "list_optimizer_order",
    "model_of",
    "open",
    "open_checkpoint",
    "refuse_unused",
    "show_path",
]


#: A folder or a file, or the place that it was found to be.
CheckpointPath = str | os.PathLike[str] | layouts.Place


def show_path(path: CheckpointPath) -> str:
    """Return the path or URL of a checkpoint, for people."""
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
    _locating: Any = field(default_factory=threading.RLock)

    @property
    def stored(self) -> Checkpoint:
        """Return the index of what was selected, as its files have it: before anything was renamed."""
        return self.changes[0][1] if self.changes else self.checkpoint

    @property
    def location(self) -> str:
        """Return the path of its folder, or of its first file if it is one file."""
        return self.source.root if self.folder else os.path.join(self.source.root, self.checkpoint.files[0])

    def recorded(self) -> Recorded | None:
        """Read what the ckpttool.json in the folder says, once; None where there is none."""
        if not self._record:
            self._record.append(read_record(self.source) if self.folder else None)
        return self._record[0]

    def expect_recorded(self, ignore: bool = False) -> None:
        """Make the digests in ckpttool.json those that this checkpoint must have (`Checkpoint.recorded`), as far as
        they are about it; `ignore` takes away those that it carries itself too. What cannot be compared is put into
        `notes`.

        Raises:
            Corrupt: names, dtypes or shapes are not those of the record.
        """
        ckpt, found = self.checkpoint, None if self.checkpoint.recorded and not ignore else self.recorded()
        stored = self.stored
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
        lost = ckpt.salvage or Salvage()  # of this damaged checkpoint itself
        if found.salvage:
            before = Salvage.of_states(found.salvage)
            ckpt.salvage = Salvage(lost.problems, before.missing | lost.missing, {**before.rebuilt, **lost.rebuilt})
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
        if new := [
            n for n in stored.tensors if n not in expected and n not in {*found.added, *found.tied, *found.salvage}
        ]:
            ckpt.notes.append(
                f'{len(new)} tensors are not listed in {RECORD}, first "{new[0]}", so no digest of them was compared'
            )
        ckpt.recorded = {self.renamed.get(n, n): digest for n, (_, _, digest) in expected.items()}
        if found.values is not None and ckpt.salvage is None:
            ckpt.recorded_values = found.values_of(self.selection)
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
        """Find the raw byte ranges of all tensors, and return the index with them, checked again; every item's framing
        has been looked into, once.

        Everything that reads bytes of tensors begins here: verify, convert, the handles of this mapping, and live
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

                        self.checkpoint = salvage.leave_out_lost(self.checkpoint, self.source.patched)
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

        self.checkpoint = mixups.compare_copies_of_ranks(self.checkpoint, self.source)
        if not self.allow_equal_ranks:
            mixups.refuse_equal_ranks(self.checkpoint, self.source)
            mixups.refuse_other_files(self.checkpoint, self.source)
        if not self.allow_mixed_steps:
            mixups.refuse_other_weights(self.checkpoint)
            mixups.refuse_mixed_steps(self.checkpoint, self.source)
            if self.source.patched is None:
                masters.refuse_other_masters(self.checkpoint, self.source)
                if self.whole is not None:
                    rest = masters.pairs_of_moments(self.whole, self.checkpoint)
                    masters.refuse_other_masters(self._locate_part(rest), self.source)

    def recheck(self) -> None:
        """Refuse files of ranks that do not belong together once more, by what is known of items that were looked into
        only when they were read.

        Raises:
            Corrupt: with the files, and what shows it.
        """
        if self.source.count_unproved()[1]:
            self._refuse_mixtures()

    def note_unproved(self, proved_by: str) -> list[str]:
        """Return a note that items in a store were not looked into, if there are such; `proved_by` says, as a main
        clause, what reads and proves all."""
        if not (count := self.source.count_unproved()[0]):
            return []
        looked = "only the first of each kind and of each file"
        return [f"{count:,} items in the store were not looked into, {looked}: {proved_by} reads and proves all"]

    def _locate_part(self, part: Checkpoint) -> Checkpoint:
        """Return a part of the index with its tensors located in files."""
        if self.located or self.layout.locate is None or not part.tensors:
            return part
        return self.layout.locate(part, self.source)

    def describe_sampled_masters(self, most: int = 32) -> str | None:
        """Look at elements of at most `most` masters (fp32 copies), or of 4 where every read is a request, and say
        which do not round to the weights beside them; None where all do, and where their bytes cannot be read, which
        is for `locate` to say."""
        ckpt = self.whole or self.checkpoint
        if self.source.patched is not None or not ckpt.has_masters:
            return None
        from .transform import masters

        ckpt = self.checkpoint
        if self.whole is not None and masters.pairs_of_moments(self.whole, ckpt).tensors:
            ckpt = self.whole
        some = masters.some_pairs(ckpt, 4 if self.source.is_remote else most)
        try:
            found = masters.sample_masters(some := self._locate_part(some), self.source)
        except CkpttoolError:
            return None
        count, every = len(masters.master_pairs(some)), len(masters.master_pairs(ckpt))
        head = f"of {every:,} fp32 masters {count:,} were looked at: " if count < every else ""
        return head + masters.describe_differences(some, found) if found else None

    def read(self, name: str) -> bytes:
        """Read all bytes, row-major, of the small tensor of this canonical name into memory.

        Raises:
            Corrupt: they do not have the source's CRC32.
        """
        from .copy.stream import small

        return small(self.locate(), self.source, [name])[name]

    def _index_with_names(self) -> Checkpoint:
        """Get the index with the names of the tensors. Layouts that do not frame items find names only in `locate`,
        which is called for them.

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

        self._index_with_names()
        return make_handle(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index_with_names().tensors)

    def __len__(self) -> int:
        return len(self._index_with_names().tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._index_with_names().tensors

    def keys(self) -> KeysView[str]:
        """List the canonical names of all tensors."""
        return self._index_with_names().tensors.keys()

    # one that is open is equal to none but itself
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __dir__(self) -> list[str]:
        """List what is public: the mapping, and what says where it is and what it holds."""
        return [*dir(Mapping), "checkpoint", "close", "layout", "location", "source"]

    def __repr__(self) -> str:
        ckpt = self.checkpoint
        return (
            f"<{type(self).__name__} {ckpt.layout} {ckpt.root}: {count_noun(len(ckpt.tensors), 'tensor')}, "
            f"{ckpt.nbytes:,} bytes>"
        )

    def __enter__(self) -> OpenCheckpoint:
        return self

    def close(self) -> None:
        """Close its files. Tensors cannot be read any more; what was read stays."""
        self.source.close()

    def __exit__(self, *_: object) -> None:
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
        """Make one of its parts, of which the first says how it was opened; the index is located."""
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
        """Make the digests recorded of the first part those that unchanged weights must have. The inputs of computed
        weights, with the digests recorded of them, go into `inputs`, to be compared later; with `ignore`, no digests
        are expected.

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
    """Read the index of a checkpoint in any layout and prove it sound; no tensor byte is read.

    Args:
        path: a folder, a file, or the URL of one.
        source_layout: its layout, where the files alone do not tell.
        only: what to keep: components, and names or globs of tensors and values (["model.layers.[0-3].*", "optim"]);
            all where None. A name stands for everything below it, too.
        drop_matching: names and globs of what to leave out.
        rename: {regular expression: replacement} for the names of parameters ("layers.0.weight"), in the model and in
            the optimizer, applied one after the other, as `re.sub` does; after `only`.
        weights: which weights are the model: the key of an average ("ema"), a file beside the checkpoint, or
            "schedule-free-x"; nothing else is in it then. As the trainer saved it where None.
        config: folder or id of a Hugging Face model with the same architecture.
        like: another checkpoint of the same model; it says about the parameters what this one does not: names, order,
            shapes. flat_layout, wrap: file with what `describe_fsdp1` returned in the job; patterns of the modules that
            FSDP1 wrapped, ["**.layers.*"].
        tag: which save, where a DeepSpeed folder holds several; the one that `latest` names where None.
        allow_equal_ranks: read it although one rank's file looks like a copy of another's.
        allow_mixed_steps: read it although its files look like those of different steps.

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. Two files of ranks that do not
            belong together are Corrupt when the checkpoint is located, not here: by the first read of a tensor at the
            latest.
        UsageError: an argument makes no sense.
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
    """Read the index of a checkpoint and prove it sound, as `open` does.

    Args:
        model: what `model_of(options)` returns; None if the caller has not called it, then it is called here.
        check_hints: whether to refuse hints that the reader does not use; a caller who may use them does so itself
            (`refuse_unused`).
        needed: called with the name of a component, tells whether an entry of it that cannot be read is an error;
            others are left out, with a note.
        prove_later: in a store, look into the first items of each kind only, and into each other item when it is read
            (storage/frames.py). All bytes have to be read through the source of what is returned.

    Raises:
        CkpttoolError: what `open` raises; the files are closed then.
    """
    if options.weights is not None:
        return _open_weights(path, options, options.weights, model, check_hints)
    selection = selection_of(options)
    only = selection.components
    model = model or model_of(options)
    raise_file_limit()
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
        ckpt, of_layout = _undo_values_of_layout(ckpt, record)
        # what it does not include
        if where == given or where.source.sibling_names:  # an archive holds nothing besides
            ckpt = _note_unread_files(ckpt, where, found)
        ckpt = _note_what_is_missing(ckpt, record, only is None or "rng" in only)
        ckpt = replace(ckpt, notes=[*ckpt.notes, *unused])
        # the part that was asked for, as far as it can be read
        whole = None if only is None else ckpt
        if only is not None:
            ckpt = _keep_components(ckpt, only, selection.only or ())
        ckpt, unreadable = _leave_unreadable(ckpt, needed)
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
    """Return (the layout of a place, the place that it reads there, notes on hints that it does not use).

    Args:
        check_hints: as of `open_checkpoint`.

    Raises:
        Corrupt: a conversion to a store was interrupted.
        Unsupported: the place has to be salvaged, and its layout has commands of its own for that.
        CkpttoolError: no layout, or several, have such a place; or a hint makes no sense.
    """
    if given.file is None and given.source.is_remote and UNFINISHED in given.source.list():
        raise Corrupt(
            f"{given.source.root}: a conversion to this place was interrupted while its files became visible. Run "
            "it again, or remove what is there.",
            code="CKPT0420",
        )
    found = layouts.find(options.source_layout) if options.source_layout else detection.detect(given)
    unused = refuse_unused(options, found.name, found.reader_uses) if check_hints else []
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
    """Return the index as the layout reads it, without what a salvage has lost.

    Args:
        where, given: the place that the layout reads, and the one that the caller named.
        damaged: what the salvage found; the tensors that it loses are added.

    Raises:
        CkpttoolError: whatever the layout refuses; a delta that is opened as a checkpoint.
    """
    reading = layouts.ReadOptions(
        config=model.config,
        like=model.like,
        flat_layout=model.flat_layout,
        wrap=model.wrap,
        only=selection_of(options).components,
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

    return salvage.leave_out_lost(ckpt, where.source.patched, damaged)


def _note_what_is_missing(ckpt: Checkpoint, record: Recorded | None, with_rng: bool) -> Checkpoint:
    """Return the index with notes on what it does not include: other models and optimizers in the place, what a
    selection left behind, and, `with_rng`, the random states of ranks."""
    notes: list[str] = []
    if ckpt.others:
        from .mixups import describe_left_out

        notes.append(describe_left_out(ckpt))
    if record is not None and record.selection is not None:
        notes.append(f"{RECORD}: a part of a checkpoint was written here, {record.selection}. {NOT_RESUMED}")
    if with_rng:
        notes += _note_missing_random_states(ckpt)
    return replace(ckpt, notes=[*ckpt.notes, *notes])


def _open_weights(
    path: CheckpointPath, options: OpenOptions, key: str, model: layouts.ModelHints | None, check_hints: bool
) -> OpenCheckpoint:
    """Open a checkpoint with the set of its weights that a key names as its model, and nothing else. Of a folder that
    is no checkpoint itself, open the one below it that has such a name, as diffusers has unet/ and unet_ema/.

    Args:
        model, check_hints: as of `open_checkpoint`.

    Raises:
        UsageError, Unsupported: there is no such set, or it is not whole.
        CkpttoolError: the checkpoint cannot be opened.
    """
    from ..index.weight_sets import match_key
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
        keys = match_key(key, names)
        if len(keys) != 1:
            raise
        opened = open_whole(names[keys[0]])
        opened.checkpoint.notes.append(f"the weights are those of {names[keys[0]]}, one of the models in the folder")
        return opened
    try:
        chosen = choose_weights(opened, key, open_beside)
        made = MergedCheckpoint.of(
            ((chosen.whole, chosen.inputs),), chosen.checkpoint, chosen.source, chosen.kept, chosen.left_behind
        )
        asked = selection_of(options)
        part = select_part(replace(made, selection=replace(asked, only=asked.only or ("model",))), options.rename or {})
        kept = ((part.renamed.get(n, n), there) for n, there in made.kept.items())
        part.kept = {n: there for n, there in kept if n in part.checkpoint.tensors}
        return part
    except BaseException:
        opened.source.close()
        raise


def _note_unread_files(ckpt: Checkpoint, where: layouts.Place, layout: layouts.Layout) -> Checkpoint:
    """Return the index with a list of the files beside it that belong to the checkpoint and that its layout does not
    read, and with a note on them."""
    saves = layout.saves
    if layout.of_trainer and saves is not None and not saves.pointers & set(where.source.list()):
        saves = None  # a trainer's directory without DeepSpeed inside
    known = {r.name for r in ckpt.unread}
    if where.source.patched is not None:
        known |= where.source.patched.patches.keys()
    beside = unread_files.unread(where.source, where.file, ckpt, saves)
    unread = [*ckpt.unread, *(r for r in beside if r.name not in known)]
    return replace(ckpt, unread=unread, notes=[*ckpt.notes, *unread_files.note(unread)])


def _note_missing_random_states(ckpt: Checkpoint) -> list[str]:
    """Return a note on ranks that have no random states where others have some; [] where there are none."""
    if not (ranks := ranks_without_rng_state(ckpt)):
        return []
    first = list_first(ranks, 8)
    return [
        f"rank{'s' * (len(ranks) > 1)} {first}: no random states, which other ranks have. A resumed job draws other "
        "random numbers there"
    ]


def _leave_unreadable(ckpt: Checkpoint, needed: Callable[[str], bool]) -> tuple[Checkpoint, list[Dropped]]:
    """Leave out the values that the reader could not read, with a note on the first; returns (the rest, what was left
    out).

    Args:
        needed: called with the name of a component, tells whether a value of it that cannot be read is an error.

    Raises:
        Unsupported: with the first whose component is needed.
    """
    out: list[Dropped] = []
    for name, v in ckpt.values.items():
        if (why := _find_unreadable(v.data)) is None:
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


def _find_unreadable(data: Any) -> str | None:
    """Return why a part of a value (nested dicts and lists) could not be read; None where all of it was."""
    todo = [data]
    while todo:
        x = todo.pop()
        if isinstance(x, Refused):
            return x.why
        todo.extend(children(x))
    return None


def refuse_unused(options: OpenOptions, here: str, used: Iterable[str]) -> list[str]:
    """Refuse a hint that nothing would look at. Those that are true of the model, whatever the layout, become notes,
    which are returned.

    Args:
        here: what the hint does not apply to, for messages: a layout, or "SOURCE -> TARGET".
        used: names of the hints that are looked at.

    Raises:
        UsageError: with the layouts that use it.
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


def drop_other_layout(path: CheckpointPath, options: OpenOptions) -> OpenOptions:
    """Return the options without their `source_layout`, unless the checkpoint at `path` has that layout: of two
    checkpoints that are compared, it may be that of one only."""
    if options.source_layout is None:
        return options
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        fits, _ = layouts.find(options.source_layout).detect(where)
    return options if fits else replace(options, source_layout=None)


def _undo_values_of_layout(ckpt: Checkpoint, record: Recorded | None) -> tuple[Checkpoint, set[str]]:
    """Remove the values that ckpttool had to add for the layout, put together those that the layout holds in pieces,
    and take apart lists that lost elements, as ckpttool.json says, where the files still have what was written.

    Args:
        record: what ckpttool.json says; None where there is none.

    Returns:
        (the index, the names of the values that were removed).
    """
    values, added = dict(ckpt.values), set[str]()
    if record is not None:
        for name, data in record.made.items():
            if name in values and equal_values(Value((), values[name].data), Value((), data)):
                del values[name]
                added.add(name)
        for name, value in record.whole.items():
            pieces = _split_as_dcp(value)
            held = _split_as_dcp(values[name]) if name in values else values
            if all(n in held and equal_values(held[n], piece) for n, piece in pieces.items()):
                values = {n: v for n, v in values.items() if n not in pieces} | {name: value}
    if known := ckpt.recorded_values or (record and record.values):  # whole values have no elements that could be gone
        values = _name_left_elements(values, known)
    return replace(ckpt, values=values), added


def _name_left_elements(values: dict[str, Value], known: Mapping[str, str]) -> dict[str, Value]:
    """Take apart lists of which elements were dropped, so that the rest has the names that were recorded, and leave out
    None in the place of an element that was dropped.

    Args:
        known: names in the record of all values; what they map to is not looked at.
    """
    if lost := known.keys() - values.keys():
        values = split_lists(values, lost)
    return {n: v for n, v in values.items() if v.data is not None or type(v.path[-1]) is not int or n in known}


def _split_as_dcp(value: Value) -> dict[str, Value]:
    """Split a value into the entries that torch's DCP makes of it, {name: value}."""
    return {joined(p): Value(p, x) for p, x in flatten_like_dcp(value.data, value.path).items()}


def _keep_components(ckpt: Checkpoint, components: frozenset[str], only: tuple[str, ...]) -> Checkpoint:
    """Keep some components; a note says if fp32 masters (unrounded copies of weights) are left out.

    Args:
        only: the patterns that were given, of which these are the components.

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


def model_of(options: OpenOptions) -> layouts.ModelHints:
    """Collect what these options say about the model; opens the checkpoint that `like` names.

    Raises:
        CkpttoolError: that cannot be opened.
    """
    known = None
    if options.like is not None:
        with open(options.like) as other:
            known = _describe_reference(other.checkpoint)
    flat_layout = None if options.flat_layout is None else os.fspath(options.flat_layout)
    return layouts.ModelHints(options.config, known, flat_layout, None if options.wrap is None else tuple(options.wrap))


def _describe_reference(ckpt: Checkpoint) -> layouts.ReferenceModel:
    """Describe the model of a checkpoint (shapes, dtypes, ties, order and param groups), for another one whose files do
    not tell that."""
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    return layouts.ReferenceModel(
        {n: (t.shape, t.dtype) for n, t in model.items()},
        tied_weights(model),
        list_optimizer_order(ckpt),
        names_by_group(ckpt),
        {n: t.chunks for n, t in model.items()},
        ckpt.tensor_parallel,
    )


def list_optimizer_order(ckpt: Checkpoint) -> tuple[str, ...] | None:
    """List the FQNs of parameters in the order in which the param groups list them; None where the groups list no
    names."""
    groups = names_by_group(ckpt)
    return tuple(n for g in groups for n in g) or None if groups is not None else None
