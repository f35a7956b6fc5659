"""Deletes the steps of a run that no policy keeps: `ckpttool prune`.

A trainer may be saving into the same folder. So a step is deleted only if a later one of its run is complete and could
be opened, if it is complete itself (or, where that is asked for, incomplete for a long time), if no pointer of a
trainer names it, no file of a step that stays leads into it, and nothing in it has changed since it was looked at. All
that is looked at again right before. It is deleted by one rename to a name under which nobody finds a checkpoint, so a
run that is killed leaves each step whole or gone; the next one deletes the rest of what was renamed
(storage/removal.py).

Archives have retention and holds, which `ckpttool audit prune` knows; they are not touched here.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

from .. import layouts
from ..errors import Corrupt, Locked, NotRecognised, SourceChanged, UsageError, argument, note_change
from ..layouts import Place
from ..options import Progress, silent
from ..printable import Shown, count_noun, printable
from ..storage import urls
from ..storage.removal import Remover, convert_os_errors, find_leftovers, has_no_leftovers
from ..storage.source import Source
from .discover import detection
from .discover.unread_files import human
from .runs import RunStep, find_pointers, find_pointers_in_values, list_steps, place_step, try_open_step
from .step_metrics import find_best_steps, read_metrics

__all__ = ["PrunedRun", "prune_run"]

_ARCHIVE = "audit"
_GONE = "somebody else deleted it meanwhile"
_BACK = 60.0  # seconds by which a step must be younger than a later one, to have been written after it
_INDEX = r"(?i)(.*\.)?metadata(\.json)?|.*\.(json|ya?ml|index|txt)"
_MOST_INDEX = 256 << 20  # bytes
_BLOCK = 1 << 20


@dataclass(frozen=True)
class PrunedRun(Shown):
    """The result of `prune_run`: paths of steps relative to the run, and why others are still there.

    `kept` are those that a policy keeps, or that the run needs; `refused` are those that no policy keeps and that must
    not be deleted, or cannot be judged, and folders that cannot be listed. `freed` are bytes; of a file with several
    names, once the last is deleted. `leftovers` is the number of steps that an interrupted run had begun to delete,
    `left_out` the number of folders that were not looked into.
    """

    path: str
    dry_run: bool
    deleted: tuple[str, ...] = ()
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    freed: int = 0
    leftovers: int = 0
    left_out: int = 0

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield a line of text for each step: deleted, kept and why, or refused and why."""
        for name in self.deleted:
            yield f"{'would delete' if self.dry_run else 'deleted':13s}{name}"
        for name, reasons in self.kept.items():
            yield f"{'kept':13s}{name}: {', '.join(reasons)}"
        for name, why in self.refused.items():
            yield f"{'refused':13s}{name}: {why}"

    @property
    def summary(self) -> str:
        """Return a line of text: how many steps were (or would be) deleted, and the bytes that this frees."""
        what = f"{count_noun(len(self.deleted), 'step')}, {human(self.freed)}"
        left = f"; {count_noun(self.leftovers, 'step')} that an interrupted run had begun to delete" * bool(
            self.leftovers
        )
        left += f"; {count_noun(self.left_out, 'folder')} not looked into" * bool(self.left_out)
        return f"{what} {'would be freed; nothing was touched' if self.dry_run else 'freed'}{left}"


class _Entry(NamedTuple):
    """A file or folder of a step: its path in the step, and what the system says of it. `size` is that of a file."""

    path: str
    identity: tuple[int, int]
    mode: int
    size: int
    mtime_ns: int
    links: int

    @classmethod
    def of(cls, path: str, st: os.stat_result) -> _Entry:
        """Make the entry of a path from its `os.stat_result`."""
        size = st.st_size if stat.S_ISREG(st.st_mode) else 0
        return cls(path, (st.st_dev, st.st_ino), st.st_mode, size, st.st_mtime_ns, st.st_nlink)


class _Contents(NamedTuple):
    """What a step was when it was looked at.

    `digest` is over all entries but not over the number of their names, which changes when another step with the same
    file is deleted. `written` is when the largest file was, in seconds since 1970: the tensors, and not the results
    of a later evaluation. `shared` are the files that have several names.
    """

    identity: tuple[int, int]
    size: int
    digest: str
    written: float
    shared: tuple[_Entry, ...]


@dataclass
class _Save:
    """What is deleted or kept as one: the folder or file whose name has the step, with the checkpoints in it."""

    name: str
    run: tuple[str, str]
    steps: list[RunStep]
    keeps: list[str] = field(default_factory=list)
    refused: str = ""
    contents: _Contents | None = None

    @property
    def number(self) -> int | None:
        """Get the number of the save's step, or of its epoch if its name has no step; None if it has neither."""
        return self.steps[0].number

    @property
    def complete(self) -> bool:
        """Tell whether all checkpoints in the save are complete and without a known problem."""
        return all(s.complete and not s.problem for s in self.steps)

    @property
    def of_weights(self) -> bool:
        """Tell whether the save's layouts hold the weights of a model alone, as an export beside the steps of a run."""
        return all(
            (layout := layouts.find_by_checkpoint_layout(s.layout)) is not None and layout.of_weights
            for s in self.steps
        )

    @property
    def modified(self) -> float:
        """Get the time of the last change in the save, in seconds since 1970; 0.0 if unknown."""
        return max((s.modified or 0.0 for s in self.steps), default=0.0)


def prune_run(
    path: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_best_mode: str | None = None,
    drop_incomplete: timedelta | None = None,
    dry_run: bool = True,
    progress: Progress = silent,
) -> PrunedRun:
    """Delete the steps of a run that no policy keeps. A trainer may be saving into the folder at the same time.

    A folder with several runs below it is pruned run by run. Always kept are the newest complete step of a run, later
    steps, steps that are being written, and steps that a pointer of the trainer or a link names or that another step
    needs, or may need since it cannot be listed.

    Args:
        path: the folder of a run; not a URL.
        keep_last: keep this many of the newest complete steps. For each policy, None means that it is not used.
        keep_every: keep steps that are a multiple of it, or epochs if names have no steps.
        keep_best: "FILE:KEY": keep the step with the best number; `step_metrics` says what FILE and KEY are.
        keep_best_mode: "min" or "max"; None for "min" if the key contains "loss", "perplexity" or "ppl", and otherwise
            for both the smallest and the largest number.
        drop_incomplete: also delete incomplete steps before the newest complete one that have not changed for this
            time.
        dry_run: change nothing, only say what would be deleted.
        progress: called with ("delete", bytes done, bytes in all).

    Raises:
        UsageError: there is no policy, or a wrong one; the path is a URL, a checkpoint or a file; the numbers of
            `keep_best` are missing or ambiguous.
        NotRecognised: there is no checkpoint.
        Corrupt: no step is complete; nothing was deleted.
        Locked: another run deletes in this folder.
        NotPermitted: the user may not delete there.
    """
    _check_policies(path, keep_last, keep_every, keep_best, keep_best_mode, drop_incomplete)
    with _open_run(path) as source, convert_os_errors(source.root):
        plan = _Plan(source)
        plan.protect(drop_incomplete)
        plan.apply_policies(keep_last, keep_every, keep_best, keep_best_mode)
        plan.keep_what_others_need()
        return plan.carry_out(urls.display_path(path), dry_run, progress)


def _check_policies(
    path: str | os.PathLike[str], last: int | None, every: int | None, best: str | None, mode: str | None,
    age: timedelta | None,
) -> None:  # fmt: skip
    """Check the arguments of `prune_run`.

    Raises:
        UsageError: the path is a URL, there is no policy, or one has a wrong value.
    """
    if urls.is_url(path):
        raise UsageError(
            f"{urls.display_path(path)}: steps are deleted in a folder only. A store cannot rename a step out of the "
            "way, so a job that starts meanwhile could find half of one. Delete there with the store's own tools, of "
            "each step the file that its trainer writes last (.metadata, trainer_state.json) first.",
            code="CKPT0214",
        )
    if last is None and every is None and best is None:
        raise UsageError(
            f"Say what to keep: {argument('keep_last')}, {argument('keep_every')}, {argument('keep_best')} or several.",
            code="CKPT0204",
        )
    if any(n is not None and n < 1 for n in (last, every)) or (age is not None and age <= timedelta(0)):
        raise UsageError(
            f"{argument('keep_last')}, {argument('keep_every')} and {argument('drop_incomplete')} must be greater than "
            "zero.",
            code="CKPT0203",
        )
    if mode not in (None, "min", "max") or (mode and not best):
        raise UsageError(
            f"{argument('keep_best_mode')} is min or max, and goes with {argument('keep_best')}.", code="CKPT0204"
        )


def _open_run(path: str | os.PathLike[str]) -> Source:
    """Return a source for the folder of a run, links in its path followed.

    Raises:
        UsageError: it is a file.
    """
    where = layouts.place(path)
    if where.file is not None:
        where.source.close()
        raise UsageError(f"{os.fspath(path)} is a file; give the folder of the run.", code="CKPT0205")
    return Source(os.path.realpath(where.source.root))


class _Plan:
    """Which saves of a run go, and why the others stay."""

    def __init__(self, source: Source) -> None:
        """List the saves in a folder, and open those of each run, from the newest on, until a complete one opens.

        Raises:
            UsageError: the folder is a checkpoint itself.
            NotRecognised: no checkpoint in it has a step or an epoch in its name.
            Corrupt: no step is complete.
        """
        self.source = source
        found = list_steps(Place(source, None))
        if [s.name for s in found.steps] == [""]:
            raise UsageError(
                f"{source.root} is a checkpoint itself. Give the folder that holds the steps of the run; to delete one "
                "checkpoint, use rm.",
                code="CKPT0205",
            )
        self.saves: dict[str, _Save] = {}
        for s in found.steps:
            name = detection.find_step_path(s)
            run = os.path.dirname(name), "" if s.step is not None else "epoch" if s.epoch is not None else s.name
            self.saves.setdefault(name, _Save(name, run, [])).steps.append(s)
        if not any(save.number is not None for save in self.saves.values()):
            raise NotRecognised(
                f"No checkpoint in {source.root} has a step in its name, so none is older than another. Give the "
                "folder that holds the steps of the run.",
                listing="\n".join(map(printable, found.table())),
                code="CKPT0304",
            )
        self.pointers, self.left_out, self.not_listed = list(found.pointers), found.left_out, found.not_listed
        #: of each run, the newest complete save that could be opened
        self.newest: dict[tuple[str, str], _Save] = {}
        trains = {s.run for s in self.saves.values() if s.complete and not s.of_weights}
        for save in self._list_newest_first():
            if save.run in self.newest or save.number is None or not save.complete:
                continue
            if not (save.of_weights and save.run in trains) and self._can_resume_from(save):
                self.newest[save.run] = save
        if not self.newest:
            raise Corrupt(
                f"No step in {source.root} is complete, so nothing was deleted.",
                listing="\n".join(map(printable, found.table())),
                code="CKPT0430",
            )

    def _list_newest_first(self) -> list[_Save]:
        """List the saves by step, the highest first."""
        return sorted(self.saves.values(), key=lambda s: (s.number or 0, s.modified, s.name), reverse=True)

    def _can_resume_from(self, save: _Save) -> bool:
        """Tell whether the checkpoints of a save can be opened, and a job can resume from them; opens them.

        Checkpoints that only lack something to be read, such as a config, count as openable. Steps that their values
        name are added to `pointers`.
        """
        for i, s in enumerate(save.steps):
            if s.weights_only:
                return False
            opened, error = try_open_step(self.source, s)
            save.steps[i] = s.with_error(error)
            if save.steps[i].problem:
                return False
            if opened is not None:
                every = [x for other in self.saves.values() for x in other.steps]
                self.pointers += find_pointers_in_values(opened.checkpoint, s, every)
        return True

    def protect(self, drop_incomplete: timedelta | None) -> None:
        """Set for each save why it must not be deleted (`refused`) or is kept (`keeps`), whatever the policies.

        Args:
            drop_incomplete: an incomplete save may be deleted if it has not changed for this time; None to refuse all
                of them.
        """
        for save in self.saves.values():
            save.refused = self._explain_refusal(save, drop_incomplete)
            newest = self.newest.get(save.run)
            if save.number is None:
                continue
            if newest is None:
                save.keeps.append("no step of its run is complete")
            elif save.number == newest.number:
                known = " of those that can be listed" if self._find_later_folder(save) is not None else ""
                why = f"the newest complete one{known}" if save is newest else f"of the same step as {newest.name}"
                save.keeps.append(why)
            elif not save.complete or save.refused:
                pass
            elif save.number > (newest.number or 0):
                save.keeps.append(f"later than {newest.name}")
            elif self._get_contents(save).written > self._get_contents(newest).written + _BACK:
                save.keeps.append(f"written after {newest.name}, as if the job had gone back")
            for p in self.pointers:
                if p.step is not None and any(s.name == p.step for s in save.steps):
                    save.keeps.append(f"{p.name} names it")

    def _get_contents(self, save: _Save) -> _Contents:
        """Return the contents of a save as of the first call for it.

        Raises:
            FileNotFoundError: something in it disappeared while it was read.
        """
        if save.contents is None:
            save.contents = _read_contents(self.source.root, save.name)
        return save.contents

    def _explain_refusal(self, save: _Save, drop_incomplete: timedelta | None) -> str:
        """Return why a save must not be deleted; "" if it may be."""
        if save.number is None:
            return "no name has its step"
        if any(s.layout == _ARCHIVE for s in save.steps):
            return "an archive; `ckpttool audit prune` minds its retention and holds"
        if link := next((s.link for s in save.steps if s.link), None):
            return f"a link leads to {link}; nothing is deleted through a link"
        if not save.complete:
            newest = self.newest.get(save.run)
            words = save.steps[0].state if len(save.steps) == 1 else "incomplete"
            if drop_incomplete is None or any(s.being_written for s in save.steps):
                return words
            if newest is None or save.number >= (newest.number or 0):
                return f"{words}; no later step is complete"
            if time.time() - save.modified < drop_incomplete.total_seconds():
                return f"{words}; it changed too lately"
        elif any(s.being_written for s in save.steps):
            return save.steps[0].state
        if foreign := self._explain_foreign_contents(save):
            return foreign
        later = self._find_later_folder(save)
        return f"{later} cannot be listed, and may need it" if later is not None else ""

    def _find_later_folder(self, save: _Save) -> str | None:
        """Return the name of a folder that cannot be listed and may be a later step than a save; None if there is
        none."""
        return next((n for s in save.steps for n in detection.find_later_folders(self.not_listed, s)), None)

    def _explain_foreign_contents(self, save: _Save) -> str:
        """Return what else than its own checkpoint the folder of a save holds; "" if nothing."""
        inside = [other.name for other in self.saves.values() if other.name.startswith(f"{save.name}/")]
        if inside:
            return f"it holds another checkpoint, {inside[0]}"
        rows = {s.name for s in save.steps}
        if save.name not in rows:  # global_step_3 with actor/ and critic/
            other = [n for n in self.source.list(save.name) if f"{save.name}/{n}" not in rows]
            if folders := [n for n in other if self.source.glance(f"{save.name}/{n}")[0]]:
                return f"it holds {folders[0]}, which is no checkpoint"
        suffixes = layouts.find(_ARCHIVE).suffixes
        for folder, _, names in os.walk(os.path.join(self.source.root, save.name)):
            if archive := next((n for n in names if n.endswith(suffixes)), None):
                return f"it holds the archive {archive}; `ckpttool audit prune` minds its retention and holds"
            step = detection.find_step(os.path.basename(folder))
            if any(x.saves and x.saves.folder in os.path.basename(folder) for x in layouts.layouts().values()):
                continue  # a save inside a trainer's, which may count other steps
            if step is not None and step != save.steps[0].step and save.steps[0].step is not None and names:
                return f"it holds {os.path.relpath(folder, self.source.root)}, of another step"
        return ""

    def apply_policies(self, last: int | None, every: int | None, best: str | None, mode: str | None) -> None:
        """Add to each save the policies that keep it; each run is judged separately.

        Args:
            last, every, best, mode: `keep_last`, `keep_every`, `keep_best` and `keep_best_mode` of `prune_run`; None if
                not given.

        Raises:
            UsageError: the numbers of `best` are missing or ambiguous.
        """
        for run in self.newest:
            judged = [s for s in self._list_newest_first() if s.run == run and s.number is not None and s.complete]
            numbers = list(dict.fromkeys(s.number for s in judged))
            for s in judged:
                if last is not None and s.number in numbers[:last]:
                    s.keeps.append(f"one of the last {last}")
                if every is not None and s.number is not None and s.number % every == 0:
                    s.keeps.append(
                        f"{'step' if s.steps[0].step is not None else 'epoch'} {s.number} is a multiple of {every}"
                    )
        if best is None:
            return
        problems: list[UsageError] = []
        for run in self.newest:
            steps = {
                s.name: s.number for s in self.saves.values() if s.run == run and s.complete and s.number is not None
            }
            try:
                values = read_metrics(self.source, best, steps, by_epoch=run[1] == "epoch")
            except UsageError as e:
                problems.append(e)
                continue
            for name, why in find_best_steps(values, steps, best.rpartition(":")[2], mode).items():
                self.saves[name].keeps.append(why)
        if problems:
            raise problems[0]

    def list_unkept(self) -> list[_Save]:
        """List the saves that are neither kept nor refused, the oldest first."""
        return [s for s in reversed(self._list_newest_first()) if not s.keeps and not s.refused]

    def keep_what_others_need(self) -> None:
        """Keep each save that a remaining save or the run needs, because a link or the path in an index leads into it.

        This repeats until no more saves are needed.
        """
        needs = list(_find_dependencies(self.source.root, self.saves))
        while True:
            going = {s.name for s in self.list_unkept()}
            found = [(of, by, how) for of, by, how in needs if of in going and by not in going]
            if not found:
                return
            for of, by, how in found:
                self.saves[of].keeps.append(f"{by or 'the run'} needs it: {how}")

    # ------------------------------------------------------------------------------------------------------- deleting

    def carry_out(self, path: str, dry_run: bool, progress: Progress) -> PrunedRun:
        """Delete the saves that are neither kept nor refused, one after the other, and return the result.

        Args:
            path: the folder of the run, for the result.
            dry_run: only count what would be deleted.
        """
        for save in self.list_unkept():
            try:
                self._get_contents(save)
            except FileNotFoundError:
                save.refused = _GONE
        going = self.list_unkept()
        total = sum(self._get_contents(s).size for s in going)
        folders = dict.fromkeys(os.path.dirname(s.name) for s in (*self.saves.values(), *going))
        leftovers = [f for folder in folders for f in find_leftovers(self.source.root, folder)]
        gone: list[str] = []
        done = freed = 0

        def count(size: int, links: int) -> None:
            nonlocal done, freed
            done, freed = done + size, freed + (size if links == 1 else 0)
            progress("delete", min(done, total), total)

        if dry_run:
            gone, freed = [s.name for s in going], _count_freed_bytes(map(self._get_contents, going))
        else:
            for folder in folders:
                here = [s for s in going if os.path.dirname(s.name) == folder]
                if not here and has_no_leftovers(self.source.root, folder):
                    continue
                with Remover(self.source.root, folder, count).hold() as remover:
                    for save in here:
                        save.refused = self._delete(save, remover)
                        if not save.refused:
                            gone.append(save.name)
                            note_change(
                                f"{count_noun(len(gone), 'step')} of {len(going)} are deleted; the same command again "
                                "deletes the rest."
                            )
        rest = [s for s in self._list_newest_first() if s.name not in gone]
        return PrunedRun(
            path,
            dry_run,
            tuple(gone),
            {s.name: tuple(dict.fromkeys(s.keeps)) for s in rest if s.keeps},
            {n or ".": f"cannot be listed: {why}" for n, why in self.not_listed.items()}
            | {s.name: s.refused for s in rest if not s.keeps},
            freed,
            len(leftovers),
            self.left_out,
        )

    def _delete(self, save: _Save, remover: Remover) -> str:
        """Delete a save, unless it has changed since its contents were read.

        Returns:
            "" if it was deleted, otherwise why not.

        Raises:
            SourceChanged: the newest complete step of its run no longer exists, or is no longer complete.
        """
        root = self.source.root
        with Source(root) as now:  # which has read nothing yet
            _check_still_complete(now, self.newest[save.run])
            if named := [p.name for p in find_pointers(now, save.steps) if p.step is not None]:
                return f"{named[0]} names it by now"
        try:
            if _read_contents(root, save.name)[:3] != self._get_contents(save)[:3]:
                return "it changed meanwhile"
            remover.remove(os.path.basename(save.name), self._get_contents(save).identity)
        except FileNotFoundError:
            return _GONE
        except (SourceChanged, Locked) as e:
            return str(e)
        return ""


def _check_still_complete(source: Source, save: _Save) -> None:
    """Check by the names of its files that the newest complete step of a run still exists and is complete.

    Raises:
        SourceChanged: it is not.
    """
    for s in save.steps:
        there = source.glance(s.name)[0] or source.exists(s.name)
        row = detection.describe_place(place_step(source, s)) if there else None
        if row is None or not row.complete:
            lacks = "is gone" if row is None else f"is not complete any more: {row.lacks}"
            raise SourceChanged(
                f"{s.path} {lacks}. Nothing more was deleted, since it was the newest complete step.", code="CKPT0430"
            )


def _walk_entries(root: str, name: str) -> Iterator[_Entry]:
    """Yield an entry of the run and, if it is a folder, everything in it, sorted by name; links are not followed.

    Args:
        root, name: the folder of the run, and the path of the entry in it.

    Raises:
        FileNotFoundError: something disappeared while it was read.
    """
    top = os.path.join(root, name)
    entry = _Entry.of("", os.lstat(top))
    yield entry
    stack = [top] if stat.S_ISDIR(entry.mode) else []
    while stack:
        folder = stack.pop()
        for found in sorted(os.scandir(folder), key=lambda e: e.name):
            entry = _Entry.of(os.path.relpath(found.path, top), found.stat(follow_symlinks=False))
            yield entry
            if stat.S_ISDIR(entry.mode):
                stack.append(found.path)


def _read_contents(root: str, name: str) -> _Contents:
    """Return size, digest and times of a file or folder of the run, from the metadata of all files in it.

    Args:
        root, name: the folder of the run, and the path of the entry in it.

    Raises:
        FileNotFoundError: something disappeared while it was read.
    """
    digest, size, shared = hashlib.blake2b(), 0, list[_Entry]()
    entries = _walk_entries(root, name)
    largest = top = next(entries)
    for entry in chain([top], entries):
        digest.update(repr(entry._replace(links=0)).encode("utf-8", "surrogatepass"))
        size += entry.size
        largest = max(largest, entry, key=lambda e: e.size)
        if entry.size and entry.links > 1:
            shared.append(entry)
    return _Contents(top.identity, size, digest.hexdigest(), largest.mtime_ns / 1e9, tuple(shared))


def _count_freed_bytes(looked: Iterable[_Contents]) -> int:
    """Return the bytes that deleting these saves would free; a hard-linked file counts if all its links are deleted."""
    freed, seen = 0, dict[tuple[int, int], int]()
    for contents in looked:
        freed += contents.size
        for entry in contents.shared:
            seen[entry.identity] = seen.get(entry.identity, 0) + 1
            freed -= entry.size * (seen[entry.identity] < entry.links)
    return freed


def _find_dependencies(root: str, saves: Mapping[str, _Save]) -> Iterator[tuple[str, str, str]]:
    """Find what leads into a save from elsewhere: links, and indexes that name a file in it.

    Yields:
        (name of the save, name of the save that needs it or "" for the run itself, description).
    """
    real = {os.path.join(root, name): name for name in saves}

    def save_of(path: str) -> str | None:
        """Return the save that a real path is, or lies in."""
        while len(path) > len(root):
            if path in real:
                return real[path]
            path = os.path.dirname(path)
        return None

    beside = os.path.dirname(root)
    for folder, folders, files in chain([next(os.walk(beside), (beside, [], []))], os.walk(root)):
        of = save_of(folder)
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            by = of or save_of(path)
            if os.path.islink(path):
                target = save_of(os.path.realpath(path))
                if target is not None and target != by:
                    yield target, by or "", f"{os.path.relpath(path, root)} is a link into it"
            elif by is not None and re.fullmatch(_INDEX, name) and folder != beside and name in files:
                for target in _find_saves_named_in(path, root, saves):
                    if target != by:
                        yield target, by, f"{os.path.relpath(path, root)} names files in it"


def _find_saves_named_in(path: str, root: str, saves: Mapping[str, _Save]) -> set[str]:
    """Return the names of the saves that a file names.

    An index names files in a save by an absolute path or one with "../"; the config of an adapter names its base model.

    Args:
        path: the file; nothing is found if it is larger than 256 MiB or cannot be read.
    """
    found: set[str] = set()
    try:
        with open(path, "rb") as f:
            if os.fstat(f.fileno()).st_size > _MOST_INDEX:
                return found
            before = b""
            while block := f.read(_BLOCK):
                text = before + block
                if b"../" in text or os.fsencode(root) in text or b"base_model_name" in text:
                    for name in saves:
                        last = os.fsencode(os.path.basename(name))
                        ends = (b"../" + last + b"/", os.fsencode(os.path.join(root, name)) + b"/")
                        base = rb'"base_model_name_or_path"\s*:\s*"[^"]*(?<![^/"])' + re.escape(last) + rb'/?"'
                        if any(end in text for end in ends) or re.search(base, text):
                            found.add(name)
                before = text[-4096:]
    except OSError:
        pass
    return found
