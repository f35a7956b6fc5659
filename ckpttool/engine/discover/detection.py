"""Which checkpoint a path is, and what to type where it is one level too high or too low.

    detect(where)      the layout of a place; the error names the folder of a file, or lists the checkpoints below a
                       folder
    below(source)      the checkpoints in a folder and in its folders, by step, with what the incomplete ones lack
    newest(path)       the path of the newest complete one: `--latest`

Folders are judged by the names in them, as `Layout.detect` does, so that a bucket is only listed; of local files the
first bytes are read too. `Checkpoints` prints itself as the list that `inspect` shows.

One module, since the answer for one path and the list below it judge by the same evidence.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile

from ... import layouts
from ...by_fields import ByFields
from ...errors import CkpttoolError, NotPermitted, NotRecognised, Unreadable, UsageError, argument
from ...formats import other_files
from ...index.paths import is_number_text
from ...layouts import Layout, Place
from ...options import DEFAULT_LAYOUT
from ...printable import printable
from ...program import SeenFolder
from ...storage import urls
from ...storage.source import Source
from ...storage.sources import open_source
from .unread_files import classify_state_file, human

__all__ = [
    "Checkpoints",
    "FoundCheckpoint",
    "describe_not_listed",
    "describe_place",
    "detect",
    "find_checkpoints",
    "find_later_folders",
    "find_latest_checkpoint",
    "find_run_key",
    "find_step",
    "find_step_path",
    "newest",
    "strip_steps",
]

_DEPTH = 2
_MOST_FOREIGN = 16  # folders that are looked into for another program's files
_MOST = 1000  # folders that are listed on a disk
_MOST_EXPORTS = 2  # weights alone at the end of a run, as torchtitan saves them at its last step
_MOST_REMOTE = 200  # and on a store, where each takes a request


@dataclass(frozen=True, eq=False, repr=False)
class FoundCheckpoint(ByFields):
    """A checkpoint below a folder.

    `name` is relative to that folder; `step` is None where no name has it; `trainer` is None where names alone do not
    tell; `complete` is whether the file is there that the trainer writes last, and every rank and shard has its own;
    `lacks` is what is not there; `files` and `bytes` are those of the folder and the folders in it; `newest` is whether
    it is the newest complete one of its run; `weights_only` is whether it is newer than that, but a job cannot resume
    from it: an export at the end of a run, say.
    """

    path: str
    name: str
    step: int | None
    epoch: int | None
    layout: str
    trainer: str | None
    complete: bool
    lacks: str
    files: int
    bytes: int
    newest: bool = False
    weights_only: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Checkpoints(ByFields):
    """The checkpoints below a folder, oldest first.

    `left_out` is the number of folders that were not looked into; `not_listed` are those that could not be listed, each
    by its name relative to that folder, with the reason of the system: {"step-3": "Permission denied"}.
    """

    path: str
    checkpoints: list[FoundCheckpoint]
    left_out: int = 0
    not_listed: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> list[FoundCheckpoint]:
        """List the newest complete checkpoint of each run: one, unless several runs or models lie below."""
        return [c for c in self.checkpoints if c.newest]

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data for JSON, plus "newest", the path of the newest complete checkpoint; None
        where there is none, or where there are several runs."""
        answer = self.newest
        return {
            "path": self.path,
            "checkpoints": [asdict(c) for c in self.checkpoints],
            "newest": answer[0].path if len(answer) == 1 else None,
            "left_out": self.left_out,
            "not_listed": self.not_listed,
        }

    def __str__(self) -> str:
        """Return a table as text, with a line for each checkpoint: step or epoch, name, layout, size, and whether it is
        complete.

        The last lines name the folders that could not be listed, and count those that were not looked into.
        """
        rows = [
            (
                f"step {c.step:,}" if c.step is not None else f"epoch {c.epoch}" if c.epoch is not None else "",
                printable(c.name),
                c.layout + (f" ({c.trainer})" if c.trainer else ""),
                human(c.bytes),
                "newest complete"
                if c.newest
                else "weights only"
                if c.weights_only
                else ""
                if c.complete
                else f"incomplete: {printable(c.lacks)}",
            )
            for c in self.checkpoints
        ]
        wide = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines = [
            "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(r, wide, strict=False)), r[4]]).rstrip() for r in rows
        ]
        lines += [f"  {text}" for text in describe_not_listed(self.not_listed)]
        if self.left_out:
            lines.append(f"  {self.left_out} more folders were not looked into")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- one place


def detect(where: Place) -> Layout:
    """Return the one layout of a place.

    Raises:
        NotRecognised: the place is a part of a checkpoint (the message names the folder to give), a folder that
            contains checkpoints (the message lists them, and the error's `below` is the `Checkpoints`), or no
            checkpoint (the message says what each layout looked for).
        NotPermitted: a folder may not be listed.
        Unsupported: more than one layout matches.
    """
    if where.file is not None:
        _refuse_part_of_checkpoint(where.source, where.file)
    elif (
        _is_rank_folder(_folder_name(where.source)) and (whole := _find_enclosing_checkpoint(where.source)) is not None
    ):
        raise _make_part_error(where, *whole)
    try:
        layout = layouts.detect(where)
    except NotRecognised as e:
        if where.file is not None:
            if (folder := _find_enclosing_checkpoint(where.source)) is not None:
                raise _make_part_error(where, *folder) from None
            _refuse_foreign_checkpoint(where.source, where.file)
            raise
        found = find_checkpoints(where.source)
        if not found.checkpoints:
            if (closed := next(iter(found.not_listed), None)) is not None:
                raise _make_listing_error(found, closed, "What it holds is not known.") from None
            _refuse_foreign_checkpoint(where.source, None)
            raise
        if all(
            c.step is None and c.epoch is None for c in found.checkpoints
        ):  # no run: what was looked for matters too
            error = NotRecognised(
                *e.args,
                listing=f"{e.listing}\n{_count_checkpoints(found)} below it; give the path of one:\n{found}",
                code=e.code,
            )
        else:
            answer = found.newest
            hint = f" The newest complete one is {answer[0].path}." if len(answer) == 1 else ""
            error = NotRecognised(
                f"{found.path} is not a checkpoint itself; {_count_checkpoints(found)} below it. Give the path of "
                f"one.{hint}",
                listing=str(found),
                code="CKPT0303",
            )
        error.below = found
        raise error from None
    if where.file is None and layout.program.is_stray(where.source.list()):
        found = find_checkpoints(where.source)
        if any(c.layout != layout.name for c in found.checkpoints):
            raise _stray_files_error(where.source, found)
    return layout


def _stray_files_error(source: Source, found: Checkpoints) -> NotRecognised:
    """Return the error for a folder that contains both checkpoints, `found`, and safetensors files without a
    config.json."""
    files = [n for n in source.list() if n.endswith(".safetensors")]
    error = NotRecognised(
        f"{_display_path(source, '')} holds safetensors files without a config.json, first {files[0]}, and "
        f"{_count_checkpoints(found)} "
        f"below it. Give the path of one:\n{found}",
        code="CKPT0303",
    )
    error.below = found
    return error


def _refuse_foreign_checkpoint(source: Source, file: str | None) -> None:
    """Raise an error if the name of a file, or of a file in a folder or its subfolders, shows that it is a checkpoint
    of a program that ckpttool does not read.

    Args:
        file: the file in `source`; None to look at the folder and its subfolders.

    Raises:
        NotRecognised: it is a checkpoint of such a program.
    """
    if file is not None:
        beside = () if source.root.startswith("http") else source.list()  # a server may have no listing of the folder
        other_files.refuse_foreign_checkpoint([file], beside, _display_path(source, file))
        return
    names = source.list()
    folders = [n for n in names if source.glance(n)[0]]
    for folder in ["", *folders[:_MOST_FOREIGN]]:
        here = source.list(folder) if folder else names
        files = [n for n in here if not source.glance(f"{folder}/{n}" if folder else n)[0]]
        other_files.refuse_foreign_checkpoint(files, here, _display_path(source, folder))


def _explain_failed_listing(source: Source, folder: str) -> str | None:
    """Return why a folder of a source cannot be listed or entered, as the system says it: "Permission denied". None if
    it can, if it is no folder, or if the source is not local."""
    if not source.local:
        return None
    here = os.path.join(source.root, folder)
    try:
        os.scandir(here).close()
    except (FileNotFoundError, NotADirectoryError):  # it has gone
        return None
    except OSError as e:
        return e.strerror
    return None if os.access(here, os.X_OK) else os.strerror(errno.EACCES)


def describe_not_listed(not_listed: Mapping[str, str]) -> list[str]:
    """Return a sentence without its full stop for each of `Checkpoints.not_listed`."""
    return [
        f"{printable(name or '.')} cannot be listed: {why}; what it holds is not known"
        for name, why in not_listed.items()
    ]


def _make_listing_error(found: Checkpoints, name: str, so: str) -> CkpttoolError:
    """Return the error about a folder that could not be listed.

    Args:
        found: the list that lacks it.
        name: which of its `not_listed`.
        so: a sentence on what follows from it.
    """
    why, path = found.not_listed[name], f"{found.path.rstrip('/')}/{name}" if name else found.path
    if why == os.strerror(errno.EACCES):
        return NotPermitted(f"{path} cannot be listed: {why}. {so}", code="CKPT1401")
    return Unreadable(f"{path} cannot be listed: {why}. {so}")


def _count_checkpoints(found: Checkpoints) -> str:
    """Return the number of checkpoints with its verb: "1 checkpoint is", "3 checkpoints are"."""
    n = len(found.checkpoints)
    return "1 checkpoint is" if n == 1 else f"{n} checkpoints are"


# Patterns are text here: re compiles each at its first use and keeps it, and most commands need few of them.
_RANK = r"(?P<head>.*?(?:rank|shard)[_-]?)(?P<number>\d{1,6})(?P<tail>(?:[._-].*)?\.(?:pt|pth|bin|ckpt|tar))"
_SHARD = r"(?P<head>.+)-(?P<number>\d{5})-of-(?P<of>\d{5})(?P<tail>\.(?:safetensors|bin))"
_SHARD_OF_RANK = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"


def _matches_any(patterns: Iterable[str | None], name: str) -> bool:
    """Tell whether one of several regular expressions matches a whole name; a pattern of None matches nothing."""
    return any(p is not None and re.fullmatch(p, name) is not None for p in patterns)


def _is_rank_folder(name: str) -> bool:
    """Tell whether the name of a folder says that it holds the files of one rank, so that it is no checkpoint by
    itself."""
    return _matches_any((x.program.rank_folders for x in layouts.layouts().values()), name)


def _is_part_of_checkpoint(source: Source, name: str) -> bool:
    """Tell whether a file holds only a part of a checkpoint, even if a layout could read it alone."""
    if any(layout.program.is_piece(source, name) for layout in layouts.layouts().values()):
        return True
    if source.root.startswith("http"):  # a server may have no listing of the folder
        return False
    if re.fullmatch(_SHARD_OF_RANK, name):
        return sum(1 for n in source.list() if re.fullmatch(_SHARD_OF_RANK, n)) > 1
    if m := re.fullmatch(_SHARD, name):
        names = source.list()
        shards = sum(_is_same_series(_SHARD, n, m, "of") for n in names)  # of an incomplete copy each may be read alone
        return m["of"] != "00001" and (shards == int(m["of"]) or any(n.endswith(".index.json") for n in names))
    kind = classify_state_file(name)
    if kind is not None and kind[1] in ("scheduler", "rng", "scaler", "dataloader", "trainer"):
        return True
    m = re.fullmatch(_RANK, name)
    return m is not None and any(n != name and _is_same_series(_RANK, n, m) for n in source.list())


def _folder_name(source: Source) -> str:
    """Return the last part of the path of a source's folder."""
    return source.root.rstrip("/").rpartition("/")[2]


def _is_same_series(pattern: str, name: str, m: re.Match[str], *more: str) -> bool:
    """Tell whether `name` matches `pattern` and differs from the already matched name `m` only in its number, i.e. has
    equal groups "head", "tail" and `more`."""
    other = re.fullmatch(pattern, name)
    return other is not None and all(other[k] == m[k] for k in ("head", "tail", *more))


def _refuse_part_of_checkpoint(source: Source, name: str) -> None:
    """Raise an error that names the folder to give, if a file is only a part of a checkpoint.

    Raises:
        NotRecognised: it is a part.
    """
    if not _is_part_of_checkpoint(source, name):
        return
    if (folder := _find_enclosing_checkpoint(source)) is not None:
        raise _make_part_error(Place(source, name), *folder)
    dcp = layouts.find(DEFAULT_LAYOUT)
    if dcp.program.is_piece(source, name):
        why = dcp.detect(Place(source, None))[1]
        raise NotRecognised(
            f"{_display_path(source, name)} is one file of a {dcp.name} checkpoint, and its folder cannot be read "
            "either: "
            f"{why}.",
            code="CKPT0303",
        )


def _find_enclosing_checkpoint(source: Source) -> tuple[str, Layout] | None:
    """Return (path, layout) of the parent folder's checkpoint if this folder is a part of one, else of this folder's
    own checkpoint; None where neither is a checkpoint."""
    parent, _, name = source.root.rpartition("/")
    parts = (x.program.part_folders for x in layouts.layouts().values())
    if _matches_any(parts, name) or _is_rank_folder(name):
        try:
            with open_source(parent) as above:
                layout = layouts.detect(Place(above, None))
            if layout.of_trainer:
                return urls.display_path(parent), layout
        except CkpttoolError:
            pass
    try:
        return urls.display_path(source.root), layouts.detect(Place(source, None))
    except CkpttoolError:
        return None


def _make_part_error(where: Place, folder: str, layout: Layout) -> NotRecognised:
    """Return the error for a file or folder that is only a part of a checkpoint.

    Args:
        folder: the path of the checkpoint.
        layout: the checkpoint's layout.
    """
    path = _display_path(where.source, where.file or "")
    kind = "file" if where.file else "folder"
    return NotRecognised(
        f"{path} is one {kind} of the {layout.name} checkpoint {folder}; give that folder.", code="CKPT0303"
    )


def _display_path(source: Source, name: str) -> str:
    """Return the path of an entry of a folder as messages show it; an entry "" means the folder itself."""
    return urls.display_path(f"{source.root.rstrip('/')}/{name}" if name else source.root)


# ----------------------------------------------------------------------------------------------------- many places

#: Folders that are no checkpoints, whatever lies in them.
_NO_CHECKPOINT = r"(?s)\..*|lost\+found|runs|logs|wandb|tensorboard|lightning_logs|__pycache__|.*\.ckpttool-watch"
_TEMPORARY = r"(?s)tmp[-_.].*|.*[-_.](tmp|incomplete|partial)"
_STEP = r"(?i)(?:step|checkpoint|ckpt|iter|iteration|batch)s?[-_=]?(\d{1,15})(?!\d)"
_NAMED_STEP = r"(?i)steps?[-_=]?(\d{1,15})(?!\d)"
_EPOCH = r"(?i)(?:epoch|(?<![a-z])ep)[-_=]?(\d{1,9})(?!\d)"


def find_checkpoints(source: Source, most: int | None = None) -> Checkpoints:
    """Find the checkpoints in a folder and its subfolders; they are sorted from the oldest to the newest, and the
    newest complete one of each run is marked, unless a later folder of the run could not be listed.

    Args:
        most: how many folders to look into at most; None means a default that takes seconds.
    """
    walk = _Walk(source, most)
    if (why := _explain_failed_listing(source, "")) is not None:
        walk.not_listed[""] = why
    rows = sorted(walk.rows(""), key=_sort_key_by_age)
    runs: dict[tuple[str, str], list[FoundCheckpoint]] = {}
    for c in rows:
        if c.complete:
            runs.setdefault(find_run_key(c), []).append(c)
    chosen: set[int] = set()
    exports: set[int] = set()
    for saves in runs.values():
        last = saves[::-1][: _MOST_EXPORTS + 1]
        newer = list(takewhile(lambda c: layouts.get_program_of(c.layout).is_export(source.below(c.name)), last))
        if newer == last:  # the run saves its weights apart from the rest
            newer = []
        exports |= {id(c) for c in newer}
        best = saves[-1 - len(newer)]
        equal = any(c is not best and _sort_key_by_age(c)[:2] == _sort_key_by_age(best)[:2] for c in saves)
        if not equal and not find_later_folders(walk.not_listed, best):  # else it may not be the newest
            chosen.add(id(best))
    rows = [replace(c, newest=id(c) in chosen, weights_only=id(c) in exports) for c in rows]
    return Checkpoints(_display_path(source, ""), rows, walk.left_out, walk.not_listed)


def find_later_folders(not_listed: Iterable[str], than: FoundCheckpoint) -> list[str]:
    """Return those of the folders that could not be listed that are named like saves of a checkpoint's run, or parts of
    saves, at a step that is not before its own.

    Args:
        not_listed: names of folders, as `Checkpoints.not_listed` has them.
        than: the checkpoint.
    """

    def mask(path: str) -> str:
        """Return a path without steps, and with "#" for parts that are numbers alone."""
        return "/".join("#" if is_number_text(part) else strip_steps(part) for part in path.split("/")) + "/"

    kind, out = mask(than.name), []
    for name in not_listed:
        step, epoch = _find_last_step_and_epoch(name)
        if step is None and epoch is None:
            step = next((int(part) for part in reversed(name.split("/")) if is_number_text(part)), None)
        known = step is not None or epoch is not None
        age = -1 if step is None else step, -1 if epoch is None else epoch
        if known and (kind.startswith(mask(name)) or mask(name).startswith(kind)) and age >= _sort_key_by_age(than)[:2]:
            out.append(name)
    return out


def describe_place(where: Place) -> FoundCheckpoint | None:
    """Return the `FoundCheckpoint` of a file or folder that is a checkpoint itself; None if it is no checkpoint.

    Its `name` is relative to the source: "" for the source's own folder.
    """
    walk = _Walk(where.source, None)
    if where.file is not None:
        return next(walk.look_at_file("", where.file, where.file, where.source.list()), None)
    name = _folder_name(where.source)
    row = walk.look_at_folder("", name)
    step, epoch = _find_step_and_epoch(name)
    return row and replace(row, step=step, epoch=epoch)


def find_step_path(c: FoundCheckpoint) -> str:
    """Return the part of a checkpoint's `name` up to the folder or file that names the step: "global_step_3" of
    global_step_3/actor. The whole `name` where none names a step or epoch."""
    parts = c.name.split("/")
    for n in range(len(parts), 0, -1):
        if _find_step_and_epoch(parts[n - 1]) != (None, None) or is_number_text(parts[n - 1]):
            return "/".join(parts[:n])
    return c.name


def strip_steps(name: str) -> str:
    """Return a name without its step and epoch numbers: strip_steps("run-checkpoint-100") == "run-step"."""
    return re.sub(_EPOCH, "epoch", re.sub(_STEP, "step", name))


def find_step(name: str) -> int | None:
    """Return the step that the last part of a path with a step names; None where no part does."""
    return next(
        (step for part in reversed(name.split("/")) if (step := _find_step_and_epoch(part)[0]) is not None), None
    )


def _sort_key_by_age(c: FoundCheckpoint) -> tuple[int, int, str]:
    """Return the key that sorts checkpoints from the oldest to the newest: (step, epoch, name), with -1 for an unknown
    step or epoch."""
    return (-1 if c.step is None else c.step, -1 if c.epoch is None else c.epoch, c.name)


def find_run_key(c: FoundCheckpoint) -> tuple[str, str]:
    """Return a key that is equal for all checkpoints of one run.

    Returns:
        (folder that contains the checkpoint, "") if the last part of its `name` has a step or epoch. Otherwise (that
        folder with "#" for each number, the last part): ("global_step_#", "actor") for global_step_3/actor; ("", "") if
        no folder is named.
    """
    folder, _, name = c.name.rpartition("/")
    if _find_step_and_epoch(name) == (None, None):
        return re.sub(r"\d+", "#", folder), name if folder else ""
    return folder, ""


def _find_last_step_and_epoch(path: str) -> tuple[int | None, int | None]:
    """Return (step, epoch) from the last part of a path whose name has a step or an epoch; (None, None) if none has."""
    found = (_find_step_and_epoch(part) for part in reversed(path.split("/")))
    return next((pair for pair in found if pair != (None, None)), (None, None))


def _find_step_and_epoch(name: str) -> tuple[int | None, int | None]:
    """Return (step, epoch) from a file or folder name, each None where the name does not contain it."""
    steps, epochs = re.findall(_NAMED_STEP, name) or re.findall(_STEP, name), re.findall(_EPOCH, name)
    return (int(steps[-1]) if steps else None), (int(epochs[-1]) if epochs else None)


class _Walk:
    """A look into a folder, its folders and theirs."""

    def __init__(self, source: Source, most: int | None) -> None:
        """Prepare to look for checkpoints in a source.

        Args:
            most: how many folders to look into at most; None for a default, which is smaller for a remote source.
        """
        self.source, self.left_out = source, 0
        self.not_listed: dict[str, str] = {}
        self.known = layouts.layouts()  # asking for them looks for other packages
        self.listings = most or (_MOST_REMOTE if source.is_remote else _MOST)

    def rows(self, folder: str) -> Iterator[FoundCheckpoint]:
        """Yield the checkpoints in a folder and in its subfolders, down to `_DEPTH` levels below the source.

        Args:
            folder: path in the source; "" for the source itself.
        """
        names = self.source.list(folder)
        complete: set[str] = set()  # the layouts of which a complete save is here, so that those beside it should be
        out: list[FoundCheckpoint] = []
        for name in sorted(
            names, key=lambda n: [-1 if x is None else x for x in _find_step_and_epoch(n)], reverse=True
        ):
            path = f"{folder}/{name}" if folder else name
            if self._is_link_to_sibling(path, names) or any(
                x.program.is_part(name, names) for x in self.known.values()
            ):
                continue
            if not self.source.glance(path)[0]:
                out += self.look_at_file(folder, path, name, names)
                continue
            if re.fullmatch(_NO_CHECKPOINT, name):
                continue
            if self.listings <= 0:
                self.left_out += 1
                continue
            self.listings -= 1
            if (why := _explain_failed_listing(self.source, path)) is not None:
                self.not_listed[path] = why
                continue
            found = self.look_at_folder(path, name)
            deeper = path.count("/") + 1 < _DEPTH
            if found is None:
                yield from self.rows(path) if deeper else ()
                continue
            # files that may be there by chance hide no checkpoints below them
            if deeper and layouts.get_program_of(found.layout).is_stray(self.source.list(path)):
                inner = list(self.rows(path))
                if any(c.layout != found.layout for c in inner):
                    yield from inner
                    continue
            if found.complete:
                complete.add(found.layout)
            out.append(found)
        for c in out:
            gaps = (self.known[n].program.gap_beside(os.path.basename(c.name)) for n in complete if n in self.known)
            lacks = next((gap for gap in gaps if gap is not None), None)
            if lacks is not None and self.known[c.layout].of_weights:
                c = replace(c, complete=False, lacks=lacks)
            yield c

    def _is_link_to_sibling(self, path: str, names: Iterable[str]) -> bool:
        """Tell whether an entry is a symbolic link to another entry of its folder: LATEST of NeMo AutoModel, last.ckpt
        of Lightning.

        Args:
            path: the entry, relative to the source.
            names: the entries of its folder.
        """
        here = os.path.join(self.source.root, path)
        if not self.source.local or not os.path.islink(here):
            return False
        folder, _, name = os.path.realpath(here).rpartition("/")
        return name in names and folder == os.path.realpath(os.path.dirname(here))

    def look_at_folder(self, path: str, name: str) -> FoundCheckpoint | None:
        """Return the `FoundCheckpoint` of a folder that is a complete or incomplete checkpoint; None where it is
        neither.

        Args:
            path: the folder, relative to the source.
            name: the last part of `path`.
        """
        inside = self.source.below(path)
        names = self.source.list(path)
        layout = _find_layout(Place(inside, None), self.known.values())
        temporary = re.fullmatch(_TEMPORARY, name) is not None
        seen = SeenFolder(inside, names, name, layout.name if layout else None, temporary)
        begun = (x.program.unfinished(seen) for x in self.known.values())
        unfinished = next((found for found in begun if found is not None), None)
        if unfinished is not None:
            lacks = unfinished.lacks
            layout = self.known[unfinished.layout] if unfinished.layout else layout
        elif layout is None:
            return None
        else:
            lacks = next(_list_gaps(seen, layout), "")
        if lacks:  # which may lie where this user may not look
            for inner in (n for n in names if inside.glance(n)[0]):
                if (why := _explain_failed_listing(inside, inner)) is not None:
                    self.not_listed[f"{path}/{inner}" if path else inner] = why
                    lacks = f"{inner} cannot be listed: {why}"
        sizes = [size for _, size in _list_files(inside, names)]
        known = layout.name if layout else DEFAULT_LAYOUT
        return self._make_found_checkpoint(path, known, layout, lacks, len(sizes), sum(sizes))

    def look_at_file(self, folder: str, path: str, name: str, names: Iterable[str]) -> Iterator[FoundCheckpoint]:
        """Yield the `FoundCheckpoint` of a file that is a checkpoint; nothing if its name or its folder says that it is
        a part of a checkpoint or holds no weights.

        Args:
            folder: the path of its folder in the source, "" for the source itself.
            path: the path of the file in the source.
            name: the last part of `path`.
            names: the entries of the folder.
        """
        kind = classify_state_file(name)
        of_suffix = (x.name for x in self.known.values() if x.is_file and x.suffixes and name.endswith(x.suffixes))
        layout = next(of_suffix, None)
        if layout is None or name.startswith(".") or re.fullmatch(_SHARD, name) or re.fullmatch(_RANK, name):
            return
        if kind is not None and not kind[0].startswith("weights"):
            return
        if any(x.saves and re.fullmatch(x.saves.files, name) for x in self.known.values()):
            return
        if not self.source.is_remote:
            inside = self.source.below(folder) if folder else self.source
            found = _find_layout(Place(inside, name), self.known.values())
            layout = found.name if found else None
        if layout is not None:
            size = self.source.glance(path)[1] or 0
            lacks = "" if size else "the file is empty"
            yield self._make_found_checkpoint(
                path,
                layout,
                None,
                lacks or (SeenFolder.STILL_WRITTEN if re.fullmatch(_TEMPORARY, name) else ""),
                1,
                size,
            )

    def _make_found_checkpoint(
        self, path: str, layout: str, of: Layout | None, lacks: str, files: int, size: int
    ) -> FoundCheckpoint:
        """Return the `FoundCheckpoint` of a path, with the step and the epoch that the path names.

        Args:
            layout: the layout's name.
            of: the layout, from which the trainer's name is taken; None to leave the trainer unknown.
            lacks: what is missing, "" where the checkpoint is complete.
            files, size: how many files it has, and their bytes.
        """
        step, epoch = _find_last_step_and_epoch(path)
        name = path.rpartition("/")[2]
        if step is None and layouts.get_program_of(layout).step_word == "" and is_number_text(name):
            step = int(name)
        trainer = None
        if of is not None:
            trainer = of.title.removeprefix("directory of ") if of.of_trainer else of.saves.engine if of.saves else None
        return FoundCheckpoint(
            _display_path(self.source, path),
            path,
            step,
            epoch,
            layout,
            trainer,
            not lacks,
            lacks,
            files,
            size,
        )


def _find_layout(where: Place, known: Iterable[Layout]) -> Layout | None:
    """Return the layout that matches a place, None where none does. Of several, the first one that belongs to a
    trainer, or else the first."""
    yes = []
    for layout in known:
        try:
            if layout.detect(where)[0]:
                yes.append(layout)
        except (CkpttoolError, OSError):
            continue
    return next((x for x in yes if x.of_trainer), yes[0] if yes else None)


def _list_files(inside: Source, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield (path, bytes) of the files among `names`, entries of a folder, and of the files in folders among them."""
    for name in names:
        is_folder, size = inside.glance(name)
        if not is_folder:
            yield name, size or 0
            continue
        for inner in inside.list(name):
            below_it, size = inside.glance(f"{name}/{inner}")
            if not below_it:
                yield f"{name}/{inner}", size or 0


def _list_gaps(seen: SeenFolder, layout: Layout) -> Iterator[str]:
    """Yield texts on what a folder of a layout lacks of a complete checkpoint, the most informative first."""
    if seen.is_temporary:
        yield seen.STILL_WRITTEN
    yield from layout.program.gaps(seen)
    tags = [""]
    saves = layout.saves
    if saves is not None and not any(re.fullmatch(saves.files, n) for n in seen.names):
        folders = [n for n in seen.names if seen.source.glance(n)[0]]
        tags = [n for n in folders if any(re.fullmatch(saves.files, x) for x in seen.source.list(n))] or tags
        if tags != [""] and saves.pointers.isdisjoint(seen.names):
            yield f"no latest, which {saves.engine} writes last"
    for tag in tags:
        here = seen.source.list(tag) if tag else seen.names
        yield from _list_missing_files(here)
        for n in here:
            is_folder, size = seen.source.glance(f"{tag}/{n}" if tag else n)
            if not is_folder and size == 0 and (n.endswith((".safetensors", ".pt", ".bin", ".metadata"))):
                yield f"{n} is empty"


def _list_missing_files(names: Iterable[str]) -> Iterator[str]:
    """Yield "no NAME" for each missing rank or shard file, inferred from the numbers in the names of the existing
    files."""
    ranks: dict[str, dict[str, set[int]]] = {}
    shards: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if m := re.fullmatch(_SHARD, name):
            shards.setdefault((m["head"], m["of"], m["tail"]), set()).add(int(m["number"]))
        elif m := re.fullmatch(_RANK, name):
            ranks.setdefault(m["head"], {}).setdefault(m["tail"], set()).add(int(m["number"]))
    for (head, of, tail), have in shards.items():
        for i in range(1, int(of) + 1):
            if i not in have:
                yield f"no {head}-{i:05d}-of-{of}{tail}"
    for head, groups in ranks.items():
        world = re.search(r"world_size_(\d{1,6})", head)
        n = int(world[1]) if world else max(max(have) for have in groups.values()) + 1
        for tail, have in groups.items():
            for rank in range(n):
                if rank not in have:
                    yield f"no {head}{rank}{tail}"


def newest(path: str | os.PathLike[str]) -> str:
    """Return the path of the newest complete checkpoint below a folder, from which a job can resume; the folder itself
    where it is a checkpoint.

    Folders are looked into two levels down.

    Raises:
        NotRecognised: there is none, or several runs lie below. UsageError: the path is a file.
        NotPermitted, Unreadable: a folder that may be a newer one cannot be listed.
    """
    return find_latest_checkpoint(path)[0]


def find_latest_checkpoint(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Find the newest complete checkpoint from which a job can resume; the folder itself where it is a training
    checkpoint.

    Returns:
        (path of the checkpoint, note that lists newer checkpoints with weights alone and folders that could not be
        listed, "" where there are none).

    Raises:
        UsageError: `path` is a file.
        NotRecognised: there is no checkpoint, none is the newest complete one, or there are several runs.
        NotPermitted, Unreadable: a folder that may be a newer one cannot be listed.
    """
    where = layouts.place(path)
    if where.file is not None:
        raise UsageError(
            f"{argument('latest', True)} asks for a folder of checkpoints; {os.fspath(path)} is a file. Leave it out.",
            code="CKPT0205",
        )
    with where.source as source:
        itself = _find_layout(Place(source, None), layouts.layouts().values())
        if itself is not None and not itself.of_weights:
            return os.fspath(path), ""
        found = find_checkpoints(source)
    answer = found.newest
    last = {find_run_key(c): c for c in found.checkpoints if c.complete and not c.weights_only}
    unsure = [c for key, c in last.items() if key not in map(find_run_key, answer)]
    if later := [name for c in unsure for name in find_later_folders(found.not_listed, c)]:
        error = _make_listing_error(found, later[0], "It may be the newest checkpoint. Give the path of one:")
        error.listing = str(found)
        raise error
    if len(answer) == 1:
        newer = [c.path for c in found.checkpoints if c.weights_only]
        notes = [f"newer, but weights only: {', '.join(newer)}"] if newer else []
        return answer[0].path, "; ".join(notes + describe_not_listed(found.not_listed))
    if itself is not None:
        return os.fspath(path), ""
    if len(answer) > 1:
        raise NotRecognised(
            f"Several runs lie below {found.path}, so that none of their checkpoints is the newest. Give the folder of "
            "one:",
            listing=str(found),
            code="CKPT0304",
        )
    if found.checkpoints:
        raise NotRecognised(
            f"No checkpoint below {found.path} is complete and newer than the others. Give the path of one:",
            listing=str(found),
            code="CKPT0304",
        )
    if (closed := next(iter(found.not_listed), None)) is not None:
        raise _make_listing_error(found, closed, "What it holds is not known.")
    raise NotRecognised(f"No checkpoint is in {found.path} or in its folders, two levels down.", code="CKPT0304")
