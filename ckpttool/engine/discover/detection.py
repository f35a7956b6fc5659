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

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile

from ... import layouts
from ...errors import CkpttoolError, NotPermitted, NotRecognised, UsageError, argument
from ...formats import other_files
from ...index.paths import is_number_text
from ...layouts import Layout, Place
from ...options import DEFAULT_LAYOUT
from ...printable import printable
from ...program import SeenFolder
from ...storage import urls
from ...storage.source import Source
from ...storage.sources import open_source
from .unread_files import human, kind_of

__all__ = [
    "Checkpoints",
    "FoundCheckpoint",
    "below",
    "describe_place",
    "detect",
    "find_step",
    "latest",
    "newest",
    "run_of",
    "step_path",
    "strip_steps",
]

_DEPTH = 2
_MOST_FOREIGN = 16  # folders that are looked into for another program's files
_MOST = 1000  # folders that are listed on a disk
_MOST_EXPORTS = 2  # weights alone at the end of a run, as torchtitan saves them at its last step
_MOST_REMOTE = 200  # and on a store, where each takes a request


@dataclass(frozen=True)
class FoundCheckpoint:
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


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints below a folder, oldest first. `left_out` is the number of folders that were not looked into."""

    path: str
    checkpoints: list[FoundCheckpoint]
    left_out: int = 0

    @property
    def newest(self) -> list[FoundCheckpoint]:
        """List the newest complete checkpoint of each run: one, unless several runs or models lie below."""
        return [c for c in self.checkpoints if c.newest]

    def to_json(self) -> dict[str, object]:
        """Return plain data; "newest" is the path of the newest complete checkpoint, None where there is none or where
        there are several runs."""
        answer = self.newest
        return {
            "path": self.path,
            "checkpoints": [asdict(c) for c in self.checkpoints],
            "newest": answer[0].path if len(answer) == 1 else None,
            "left_out": self.left_out,
        }

    def __str__(self) -> str:
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
        if self.left_out:
            lines.append(f"  {self.left_out} more folders were not looked into")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- one place


def detect(where: Place) -> Layout:
    """Return the one layout of a place.

    Raises:
        NotRecognised: a file of a folder, with the folder to give; a folder of checkpoints, with their list, also as
            `below` of the error; or anything else, with what each layout looked for.
        NotPermitted: a folder may not be listed.
        Unsupported: more than one layout matches.
    """
    if where.file is not None:
        _refuse_piece(where.source, where.file)
    elif _is_folder_of_rank(_name(where.source)) and (whole := _checkpoint_around(where.source)) is not None:
        raise _piece_error(where, *whole)
    try:
        layout = layouts.detect(where)
    except NotRecognised as e:
        if where.file is not None:
            if (folder := _checkpoint_around(where.source)) is not None:
                raise _piece_error(where, *folder) from None
            _refuse_foreign(where.source, where.file)
            raise
        found = below(where.source)
        if not found.checkpoints:
            if (closed := _find_closed_folder(where.source)) is not None:
                raise NotPermitted(
                    f"{closed} cannot be listed: Permission denied. What it holds is not known.", code="CKPT1401"
                ) from None
            _refuse_foreign(where.source, None)
            raise
        if all(
            c.step is None and c.epoch is None for c in found.checkpoints
        ):  # no run: what was looked for matters too
            error = NotRecognised(
                *e.args,
                listing=f"{e.listing}\n{_count(found)} below it; give the path of one:\n{found}",
                code=e.code,
            )
        else:
            answer = found.newest
            hint = f" The newest complete one is {answer[0].path}." if len(answer) == 1 else ""
            error = NotRecognised(
                f"{found.path} is not a checkpoint itself; {_count(found)} below it. Give the path of one.{hint}",
                listing=str(found),
                code="CKPT0303",
            )
        error.below = found
        raise error from None
    if where.file is None and layout.program.is_stray(where.source.list()):
        found = below(where.source)
        if any(c.layout != layout.name for c in found.checkpoints):
            raise _stray_files_error(where.source, found)
    return layout


def _stray_files_error(source: Source, found: Checkpoints) -> NotRecognised:
    """Return the error for a folder with checkpoints below it, `found`, and beside them safetensors files that are no
    model."""
    files = [n for n in source.list() if n.endswith(".safetensors")]
    error = NotRecognised(
        f"{_shown(source, '')} holds safetensors files without a config.json, first {files[0]}, and {_count(found)} "
        f"below it. Give the path of one:\n{found}",
        code="CKPT0303",
    )
    error.below = found
    return error


def _refuse_foreign(source: Source, file: str | None) -> None:
    """Refuse a file, or a folder and those in it (a run), of a program whose checkpoints ckpttool does not read, by its
    name.

    Args:
        file: the file in `source`; None for the folder.

    Raises:
        NotRecognised: it is of such a program.
    """
    if file is not None:
        beside = () if source.root.startswith("http") else source.list()  # a server may have no listing of the folder
        other_files.refuse_foreign_checkpoint([file], beside, _shown(source, file))
        return
    names = source.list()
    folders = [n for n in names if source.glance(n)[0]]
    for folder in ["", *folders[:_MOST_FOREIGN]]:
        here = source.list(folder) if folder else names
        files = [n for n in here if not source.glance(f"{folder}/{n}" if folder else n)[0]]
        other_files.refuse_foreign_checkpoint(files, here, _shown(source, folder))


def _find_closed_folder(source: Source) -> str | None:
    """Return the path of this folder, or of one in it, that this user may not look into; None where there is none, or
    where the source is not a local folder."""
    if not source.local:
        return None
    folders = [source.root, *(os.path.join(source.root, n) for n in source.list() if source.glance(n)[0])]
    return next((f for f in folders if not os.access(f, os.R_OK | os.X_OK)), None)


def _count(found: Checkpoints) -> str:
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


def _is_folder_of_rank(name: str) -> bool:
    """Tell whether a folder of this name holds files of one rank, and by itself is no checkpoint."""
    return _matches_any((x.program.rank_folders for x in layouts.layouts().values()), name)


def _is_piece(source: Source, name: str) -> bool:
    """Tell whether a file holds only a part of a checkpoint, although a layout may take it for one by itself."""
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
    kind = kind_of(name)
    if kind is not None and kind[1] in ("scheduler", "rng", "scaler", "dataloader", "trainer"):
        return True
    m = re.fullmatch(_RANK, name)
    return m is not None and any(n != name and _is_same_series(_RANK, n, m) for n in source.list())


def _name(source: Source) -> str:
    """Return the name of the folder that a source is opened at."""
    return source.root.rstrip("/").rpartition("/")[2]


def _is_same_series(pattern: str, name: str, m: re.Match[str], *more: str) -> bool:
    """Tell whether `name` matches `pattern` and differs from the name in the match `m` in its number alone: its groups
    "head", "tail" and those in `more` are equal."""
    other = re.fullmatch(pattern, name)
    return other is not None and all(other[k] == m[k] for k in ("head", "tail", *more))


def _refuse_piece(source: Source, name: str) -> None:
    """Refuse a file that is a part of a checkpoint, naming the folder to give.

    Raises:
        NotRecognised: it is such a file.
    """
    if not _is_piece(source, name):
        return
    if (folder := _checkpoint_around(source)) is not None:
        raise _piece_error(Place(source, name), *folder)
    dcp = layouts.find(DEFAULT_LAYOUT)
    if dcp.program.is_piece(source, name):
        why = dcp.detect(Place(source, None))[1]
        raise NotRecognised(
            f"{_shown(source, name)} is one file of a {dcp.name} checkpoint, and its folder cannot be read either: "
            f"{why}.",
            code="CKPT0303",
        )


def _checkpoint_around(source: Source) -> tuple[str, Layout] | None:
    """Return (path, layout) of the checkpoint that this folder is, or of the one above if this is a part of that; None
    where there is none."""
    parent, _, name = source.root.rpartition("/")
    parts = (x.program.part_folders for x in layouts.layouts().values())
    if _matches_any(parts, name) or _is_folder_of_rank(name):
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


def _piece_error(where: Place, folder: str, layout: Layout) -> NotRecognised:
    """Return the error for a file or a folder that is one piece of the checkpoint at the path `folder`."""
    path = _shown(where.source, where.file or "")
    kind = "file" if where.file else "folder"
    return NotRecognised(
        f"{path} is one {kind} of the {layout.name} checkpoint {folder}; give that folder.", code="CKPT0303"
    )


def _shown(source: Source, name: str) -> str:
    """Return the path of an entry of a folder as messages show it; of the folder itself where `name` is ""."""
    return urls.display_path(f"{source.root.rstrip('/')}/{name}" if name else source.root)


# ----------------------------------------------------------------------------------------------------- many places

#: Folders that are no checkpoints, whatever lies in them.
_NO_CHECKPOINT = r"(?s)\..*|runs|logs|wandb|tensorboard|lightning_logs|__pycache__|.*\.ckpttool-watch"
_TEMPORARY = r"(?s)tmp[-_.].*|.*[-_.](tmp|incomplete|partial)"
_STEP = r"(?i)(?:step|checkpoint|ckpt|iter|iteration|batch)s?[-_=]?(\d{1,15})(?!\d)"
_NAMED_STEP = r"(?i)steps?[-_=]?(\d{1,15})(?!\d)"
_EPOCH = r"(?i)(?:epoch|(?<![a-z])ep)[-_=]?(\d{1,9})(?!\d)"


def below(source: Source, most: int | None = None) -> Checkpoints:
    """List the checkpoints in a folder and in its folders, oldest first, with the newest complete one of each run
    marked.

    Args:
        most: folders to look into; None for a number that takes seconds.
    """
    walk = _Walk(source, most)
    rows = sorted(walk.rows(""), key=_age)
    runs: dict[tuple[str, str], list[FoundCheckpoint]] = {}
    for c in rows:
        if c.complete:
            runs.setdefault(run_of(c), []).append(c)
    chosen: set[int] = set()
    exports: set[int] = set()
    for saves in runs.values():
        last = saves[::-1][: _MOST_EXPORTS + 1]
        newer = list(takewhile(lambda c: layouts.program_of(c.layout).is_export(source.below(c.name)), last))
        if newer == last:  # the run saves its weights apart from the rest
            newer = []
        exports |= {id(c) for c in newer}
        best = saves[-1 - len(newer)]
        if not any(c is not best and _age(c)[:2] == _age(best)[:2] for c in saves):  # else neither is the newest
            chosen.add(id(best))
    rows = [replace(c, newest=id(c) in chosen, weights_only=id(c) in exports) for c in rows]
    return Checkpoints(_shown(source, ""), rows, walk.left_out)


def describe_place(where: Place) -> FoundCheckpoint | None:
    """Return the row of a place that is a checkpoint itself, as `below` lists those in a folder; `name` is relative to
    the source, "" for its own folder. None where it is no checkpoint."""
    walk = _Walk(where.source, None)
    if where.file is not None:
        return next(walk.look_at_file("", where.file, where.file, where.source.list()), None)
    name = _name(where.source)
    row = walk.look_at_folder("", name)
    step, epoch = _step_and_epoch(name)
    return row and replace(row, step=step, epoch=epoch)


def step_path(c: FoundCheckpoint) -> str:
    """Return the path of the folder or file whose name has the step of a checkpoint: of global_step_3/actor,
    "global_step_3". The checkpoint's own path where no name has one."""
    parts = c.name.split("/")
    for n in range(len(parts), 0, -1):
        if _step_and_epoch(parts[n - 1]) != (None, None) or is_number_text(parts[n - 1]):
            return "/".join(parts[:n])
    return c.name


def strip_steps(name: str) -> str:
    """Return a name without the numbers of steps and epochs in it."""
    return re.sub(_EPOCH, "epoch", re.sub(_STEP, "step", name))


def find_step(name: str) -> int | None:
    """Return the step in a path; None where it has none."""
    return next((step for part in reversed(name.split("/")) if (step := _step_and_epoch(part)[0]) is not None), None)


def _age(c: FoundCheckpoint) -> tuple[int, int, str]:
    """Return the key by which saves are sorted, the oldest first: (step, epoch, name), -1 for a step or epoch that is
    not known."""
    return (-1 if c.step is None else c.step, -1 if c.epoch is None else c.epoch, c.name)


def run_of(c: FoundCheckpoint) -> tuple[str, str]:
    """Return what the saves of one run have in common, (folder that they are in, ""); of global_step_3/actor,
    ("global_step_#", "actor")."""
    folder, _, name = c.name.rpartition("/")
    if _step_and_epoch(name) == (None, None):
        return re.sub(r"\d+", "#", folder), name if folder else ""
    return folder, ""


def _step_and_epoch(name: str) -> tuple[int | None, int | None]:
    """Find the step and the epoch in a name: (step, epoch), each None where the name does not have it."""
    steps, epochs = re.findall(_NAMED_STEP, name) or re.findall(_STEP, name), re.findall(_EPOCH, name)
    return (int(steps[-1]) if steps else None), (int(epochs[-1]) if epochs else None)


class _Walk:
    """A look into a folder, its folders and theirs."""

    def __init__(self, source: Source, most: int | None) -> None:
        self.source, self.left_out = source, 0
        self.known = layouts.layouts()  # asking for them looks for other packages
        self.listings = most or (_MOST_REMOTE if source.is_remote else _MOST)

    def rows(self, folder: str) -> Iterator[FoundCheckpoint]:
        """Yield the checkpoints in a folder, given by its path in the source ("" for the source itself), and, down to
        `_DEPTH`, in its folders."""
        names = self.source.list(folder)
        complete: set[str] = set()  # the layouts of which a complete save is here, so that those beside it should be
        out: list[FoundCheckpoint] = []
        for name in sorted(names, key=lambda n: [-1 if x is None else x for x in _step_and_epoch(n)], reverse=True):
            path = f"{folder}/{name}" if folder else name
            if self._leads_to_another(path, names) or any(x.program.is_part(name, names) for x in self.known.values()):
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
            found = self.look_at_folder(path, name)
            deeper = path.count("/") + 1 < _DEPTH
            if found is None:
                yield from self.rows(path) if deeper else ()
                continue
            # files that may be there by chance hide no checkpoints below them
            if deeper and layouts.program_of(found.layout).is_stray(self.source.list(path)):
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

    def _leads_to_another(self, path: str, names: Iterable[str]) -> bool:
        """Tell whether an entry is a link to another one of its folder: LATEST of NeMo AutoModel, last.ckpt of
        Lightning.

        Args:
            path: the entry, relative to the source.
            names: what its folder holds.
        """
        here = os.path.join(self.source.root, path)
        if not self.source.local or not os.path.islink(here):
            return False
        folder, _, name = os.path.realpath(here).rpartition("/")
        return name in names and folder == os.path.realpath(os.path.dirname(here))

    def look_at_folder(self, path: str, name: str) -> FoundCheckpoint | None:
        """Return the row of a folder that is a checkpoint, or the beginning of one; None where it is neither. `name` is
        the last part of `path`."""
        inside = self.source.below(path)
        names = self.source.list(path)
        layout = _first_match(Place(inside, None), self.known.values())
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
            lacks = next(_gaps(seen, layout), "")
        sizes = [size for _, size in _list_files(inside, names)]
        known = layout.name if layout else DEFAULT_LAYOUT
        return self._make_row(path, known, layout, lacks, len(sizes), sum(sizes))

    def look_at_file(self, folder: str, path: str, name: str, names: Iterable[str]) -> Iterator[FoundCheckpoint]:
        """Yield the row of a file that is a checkpoint, unless names say that it is a part of one or no state of a
        model.

        Args:
            folder: the path of its folder in the source, "" for the source itself.
            path: that of the file; `name` is its last part.
            names: what the folder holds.
        """
        kind = kind_of(name)
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
            found = _first_match(Place(inside, name), self.known.values())
            layout = found.name if found else None
        if layout is not None:
            size = self.source.glance(path)[1] or 0
            lacks = "" if size else "the file is empty"
            yield self._make_row(
                path,
                layout,
                None,
                lacks or (SeenFolder.STILL_WRITTEN if re.fullmatch(_TEMPORARY, name) else ""),
                1,
                size,
            )

    def _make_row(
        self, path: str, layout: str, of: Layout | None, lacks: str, files: int, size: int
    ) -> FoundCheckpoint:
        """Make the row of a checkpoint, with the step and the epoch that its path names.

        Args:
            layout: the layout's name.
            of: the layout, for the name of its trainer; None where that is not to be told.
            lacks: what is not there, "" where it is complete.
            files, size: how many files it has, and their bytes.
        """
        step = epoch = None
        for part in reversed(path.split("/")):
            step, epoch = _step_and_epoch(part)
            if step is not None or epoch is not None:
                break
        name = path.rpartition("/")[2]
        if step is None and layouts.program_of(layout).step_word == "" and is_number_text(name):
            step = int(name)
        trainer = None
        if of is not None:
            trainer = of.title.removeprefix("directory of ") if of.of_trainer else of.saves.engine if of.saves else None
        return FoundCheckpoint(
            _shown(self.source, path),
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


def _first_match(where: Place, known: Iterable[Layout]) -> Layout | None:
    """Return the layout of a place: of several that match, that of a trainer, or else the first; None where none
    does."""
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


def _gaps(seen: SeenFolder, layout: Layout) -> Iterator[str]:
    """Yield sentences on what a folder of a layout lacks of a complete checkpoint, the most telling first."""
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
        yield from _missing_numbers(here)
        for n in here:
            is_folder, size = seen.source.glance(f"{tag}/{n}" if tag else n)
            if not is_folder and size == 0 and (n.endswith((".safetensors", ".pt", ".bin", ".metadata"))):
                yield f"{n} is empty"


def _missing_numbers(names: Iterable[str]) -> Iterator[str]:
    """Yield "no NAME" of the ranks and shards that should be among some names, by the numbers of the others."""
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
    """
    return latest(path)[0]


def latest(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return (path of the newest complete checkpoint, note on newer ones that hold weights alone); the note is "" where
    there are none. Where the folder is a checkpoint of a job itself, its own path is returned.

    Raises:
        UsageError: `path` is a file.
        NotRecognised: there is no checkpoint, none that is newest, or there are several runs.
    """
    where = layouts.place(path)
    if where.file is not None:
        raise UsageError(
            f"{argument('latest', True)} asks for a folder of checkpoints; {os.fspath(path)} is a file. Leave it out.",
            code="CKPT0205",
        )
    with where.source as source:
        itself = _first_match(Place(source, None), layouts.layouts().values())
        if itself is not None and not itself.of_weights:
            return os.fspath(path), ""
        found = below(source)
    answer = found.newest
    if len(answer) == 1:
        newer = [c.path for c in found.checkpoints if c.weights_only]
        return answer[0].path, f"newer, but weights only: {', '.join(newer)}" if newer else ""
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
    raise NotRecognised(f"No checkpoint is in {found.path} or in its folders, two levels down.", code="CKPT0304")
