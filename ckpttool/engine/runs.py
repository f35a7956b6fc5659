"""The steps of a run: `ckpttool ls`, and what `prune` and `watch` choose from.

    list_run("run")     the checkpoints below a folder or URL: what each lacks, who names it, what resumes from it

`discover/detection.py` finds the checkpoints by the names of their files. Added here: ages, what is being written,
pointers (links, and files such as DeepSpeed's `latest`), recorded digests. To say what resumes from a step, its index
has to be read, which takes long for 500 steps: so steps of one layout whose files have equal names and about equal
sizes are looked into once, at the newest of them.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .. import layouts
from ..bounded_json import parse
from ..errors import CkpttoolError, Corrupt, NotPermitted, NotRecognised, Unsafe
from ..index.checkpoint import Checkpoint, Value
from ..layouts import Place
from ..options import OpenOptions
from ..printable import Shown, count_noun
from ..storage import urls
from ..storage.source import Source
from .discover import detection
from .discover.detection import FoundCheckpoint
from .discover.next_steps import next_step
from .discover.unread_files import human
from .opening import open_checkpoint
from .recorded import RECORD

__all__ = [
    "Pointer",
    "Run",
    "RunStep",
    "describe_age",
    "find_pointers",
    "find_pointers_in_values",
    "list_run",
    "list_steps",
    "look_into",
]

_MOST_FOLDERS = 20_000  # that are looked into, where that sends no request
_MOST_LOOKS = 8  # indexes that are read; 3 on a store
_MOST_TRIES = 3  # of steps with equal files, until one can be opened
_MOST_RECORDS = 64 << 20  # bytes of ckpttool.json that are read, the newest first
_WRITING = 600.0  # seconds: an incomplete step that changed later than that is being written
_POINTER = r"(?i)(latest|last|newest|best)([._-].*)?"
_MOST_POINTER = 4096  # bytes


@dataclass(frozen=True)
class RunStep(FoundCheckpoint):
    """A step of a run: a `FoundCheckpoint` and what else is known of it.

    `modified` is when a file of it was last written to, in seconds since 1970, None where the store does not tell;
    `being_written` is whether it lacks something, or its trainer does not name it yet, and it changed in the last ten
    minutes; `link` is where the path leads, of a link; `named_by` are the pointers that name it.

    `world_size` is the number of ranks that saved it, `next_step` what resumes from it; both None where that was not
    looked at, or the files do not tell. `problem` is why the step cannot be opened, "" where it can or was not.
    `digest` are the root digests {component: BLAKE3 in hex} that its ckpttool.json records, None without one.
    """

    world_size: int | None = None
    modified: float | None = None
    being_written: bool = False
    link: str | None = None
    named_by: tuple[str, ...] = ()
    digest: dict[str, str] | None = None
    next_step: str | None = None
    problem: str = ""

    @property
    def number(self) -> int | None:
        """Return the step, or the epoch of a step that is named by that alone."""
        return self.epoch if self.step is None else self.step

    def with_error(self, error: Exception | None) -> RunStep:
        """Return the step with what opening it said: a problem if its files are damaged; what is needed to read it, as
        its next step, if it lacks only that."""
        text = str(error).split("\n")[0]
        if isinstance(error, Corrupt | Unsafe | NotPermitted | OSError):
            return replace(self, problem=text)
        return self if error is None else replace(self, next_step=text)

    @property
    def state(self) -> str:
        """Return in words whether it is complete, and why not."""
        if not self.complete:
            return f"{'being written' if self.being_written else 'incomplete'}: {self.lacks}"
        if self.problem:
            return f"does not open: {self.problem}"
        words = "newest complete" if self.newest else "weights only" if self.weights_only else "complete"
        return words + (", not named by its trainer yet" if self.being_written else "")


@dataclass(frozen=True)
class Pointer:
    """What a trainer, or somebody else, left to name a step: a link, a file such as `latest`, a value of a checkpoint.

    `name` is relative to the run; `says` is what it names, as it stands there; `step` is the name of that step, None
    where there is no such step; `problem` is what is wrong, "" where nothing is.
    """

    name: str
    says: str
    step: str | None
    problem: str = ""


@dataclass(frozen=True)
class Run(Shown):
    """The steps of a run, oldest first, and what names some of them. `left_out` is the number of folders that were not
    looked into."""

    path: str
    steps: list[RunStep]
    pointers: list[Pointer]
    left_out: int = 0

    @property
    def newest(self) -> RunStep | None:
        """Return the newest complete step that a job can resume from; None where there is none, or several runs."""
        found = [s for s in self.steps if s.newest]
        return found[0] if len(found) == 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; "age" is in seconds, "newest" the path of the newest complete step or None."""
        now = time.time()
        return {
            "path": self.path,
            "newest": self.newest.path if self.newest else None,
            "steps": [
                {**asdict(s), "age": None if s.modified is None else round(max(0.0, now - s.modified), 1)}
                for s in self.steps
            ],
            "pointers": [asdict(p) for p in self.pointers],
            "left_out": self.left_out,
        }

    def lines(self) -> Iterator[str]:
        """Yield a table of the steps, then what is wrong with the pointers, and what resumes from the steps."""
        yield from self.table()
        yield from (f"warning: {text}" for text in self.warnings())
        yield from self.next_steps()

    def table(self) -> Iterator[str]:
        """Yield a line for each step, below one with the names of the columns."""
        rows = [("step", "name", "layout", "ranks", "size", "age", "state")]
        for s in self.steps:
            number = f"{s.step:,}" if s.step is not None else f"epoch {s.epoch}" if s.epoch is not None else ""
            layout = s.layout + (f" ({s.trainer})" if s.trainer else "")
            ranks = "" if s.world_size is None else f"{s.world_size:,}"
            named = "".join(f"; {name} names it" for name in s.named_by) + (f"; link to {s.link}" if s.link else "")
            digest = next(iter((s.digest or {}).values()), "")
            recorded = f"; digest {digest[:12]}" if digest else ""
            name = s.name or os.path.basename(s.path)
            rows.append(
                (number, name, layout, ranks, human(s.bytes), describe_age(s.modified), s.state + named + recorded)
            )
        wide = [max(len(r[i]) for r in rows) for i in range(6)]
        for r in rows:
            cells = [
                c.rjust(w) if i in (0, 3, 4, 5) else c.ljust(w) for i, (c, w) in enumerate(zip(r, wide, strict=False))
            ]
            yield "  ".join([*cells, r[6]]).rstrip()

    def warnings(self) -> Iterator[str]:
        """Yield what is wrong with the pointers, and how many folders were not looked into."""
        yield from (f"{p.name} {p.problem}" for p in self.pointers if p.problem)
        if self.left_out:
            yield f"{count_noun(self.left_out, 'folder')} not looked into"

    def next_steps(self) -> Iterator[str]:
        """Yield what resumes from the steps, once for steps of which the same is true."""
        same: dict[str, list[RunStep]] = {}
        for s in self.steps:
            if s.next_step:
                same.setdefault(s.next_step.replace(shlex.quote(s.path), "PATH"), []).append(s)
        for steps in same.values():
            first, last = steps[0], steps[-1]
            which = (
                (last.name or os.path.basename(last.path))
                if first is last
                else f"{first.name} to {last.name}, {count_noun(len(steps), 'step')}"
            )
            yield f"next  {which}: {last.next_step}"


def list_run(path: str | os.PathLike[str], *, look: bool = True) -> Run:
    """List the checkpoints of a run, oldest first: those in a folder or URL, in its folders and in theirs.

    A path that is a checkpoint itself is a run of one step.

    Args:
        path: a folder, or the URL of one (s3://, gs://, az://, hf://).
        look: open the newest of the steps with equal files, at most eight, to find world sizes and what resumes from
            them; otherwise only names are read, and `world_size`, `next_step` and `problem` are empty.

    Returns:
        The steps; each is a `RunStep`. To follow a run, call it again with `look=False`, and take the steps that are
        `complete` and not `being_written`.

    Raises:
        NotRecognised: there is no checkpoint.
        NotPermitted: a folder may not be listed.
        RemoteError: the store fails.
    """
    with (where := layouts.place(path)).source as source:
        run = list_steps(where)
        if not look:
            return run
        steps, more = _look_at_kinds(source, run.steps)
        pointers = [*run.pointers, *more]
        return replace(run, steps=[_mark(s, pointers) for s in steps], pointers=pointers)


def list_steps(where: Place) -> Run:
    """List the checkpoints at a place, as `list_run` does by names alone.

    Raises:
        NotRecognised: there is none.
    """
    source, found = where.source, _find(where)
    steps = [_describe_step(source, c) for c in found.checkpoints]
    pointers = find_pointers(source, steps)
    return Run(found.path, _read_digests(source, [_mark(s, pointers) for s in steps]), pointers, found.left_out)


def _find(where: Place) -> detection.Checkpoints:
    """Return the checkpoints at a place: those below a folder, or the place itself.

    Raises:
        NotRecognised: there is none.
    """
    if where.file is None:
        found = detection.below(where.source, _MOST_FOLDERS if where.source.list_ahead() else None)
        if any(c.step is not None or c.epoch is not None for c in found.checkpoints):
            return found
    else:
        found = None
    row = detection.describe_place(where)
    hides = row is not None and not layouts.program_of(row.layout).is_stray(where.source.list())
    if row is not None and (hides or found is None or not found.checkpoints):
        return detection.Checkpoints(row.path, [replace(row, newest=row.complete)])
    if found is not None and found.checkpoints:
        return found
    detection.detect(where)  # says what was looked for
    raise NotRecognised(
        f"{urls.display_path(where.source.root)} holds no checkpoint, two levels down.", code="CKPT0304"
    )


def _describe_step(source: Source, c: FoundCheckpoint) -> RunStep:
    """Return a checkpoint with the time of its last change, and where it leads if it is a link."""
    names = [c.name, *(_join(c.name, n) for n in _list_names(source, c.name))]
    times = [t for n in names if (t := source.modified(n)) is not None]
    link = None
    if source.local:
        here, real = os.path.join(source.root, c.name), os.path.realpath(source.root)
        link = None if (at := os.path.realpath(here)) == os.path.normpath(os.path.join(real, c.name)) else at
    known = {f.name: getattr(c, f.name) for f in fields(c)}
    return RunStep(**known, modified=max(times, default=None), link=link)


def _list_names(source: Source, name: str) -> Iterator[str]:
    """Yield the names in a folder of the source, and in its folders, relative to it; none for a file."""
    if _is_folder(source, name):
        for inner in source.list(name):
            yield inner
            if source.glance(_join(name, inner))[0]:
                yield from (f"{inner}/{n}" for n in source.list(_join(name, inner)))


def _is_folder(source: Source, name: str) -> bool:
    """Tell whether a step is a folder; "" is the source itself."""
    return not name or source.glance(name)[0]


def _join(folder: str, name: str) -> str:
    """Return the path of an entry of a folder of the source; "" is the source itself."""
    return f"{folder}/{name}" if folder else name


# ------------------------------------------------------------------------------------------------------------ pointers


def find_pointers(source: Source, steps: Sequence[FoundCheckpoint]) -> list[Pointer]:
    """Find what names a step in the folders that hold the steps: links, and small files whose names begin with latest,
    last, newest or best."""
    out: list[Pointer] = []
    for folder in dict.fromkeys(["", *(s.name.rpartition("/")[0] for s in steps)]):
        for name in source.list(folder):
            path = _join(folder, name)
            here = os.path.join(source.root, path)
            if source.local and os.path.islink(here):
                if (step := _step_at(source, os.path.realpath(here), steps)) not in (None, path):
                    out.append(_make_pointer(path, os.readlink(here), step, steps))
                continue
            is_folder, size = source.glance(path)
            if not is_folder and size and size <= _MOST_POINTER and re.fullmatch(_POINTER, name):
                out += _read_pointer(source, folder, path, steps)
    return out


def _read_pointer(source: Source, folder: str, path: str, steps: Sequence[FoundCheckpoint]) -> list[Pointer]:
    """Return the pointers that a small file holds: a number of a step, the name or the path of one, or a text that
    names some. [] where it holds something else."""
    try:
        text = source.read_all(path, _MOST_POINTER).decode().strip()
    except (CkpttoolError, UnicodeDecodeError):
        return []
    beside = [s for s in steps if s.name.rpartition("/")[0] == folder or s.name.split("/")[0] == folder or not folder]
    words = set(re.split(r"[\s\"'/\\,:{}\[\]]+", text))
    named = [s.name for s in beside if not words.isdisjoint(s.name.split("/"))]
    if text.isascii() and text.isdigit():
        named = [s.name for s in beside if s.step == int(text)] or named
    last = text.rpartition("/")[2]
    if not named and last not in source.list(folder) and len(text.split()) == 1 and not set(text) & set("{}[]\"'"):
        of_newest = re.match(r"(?i)latest|last", os.path.basename(path)) is not None
        if of_newest or any(_shape(last) == _shape(os.path.basename(s.name)) for s in beside):  # else a number, say
            return [Pointer(path, text, None, f"names {text}, which is not here")]
    return [_make_pointer(path, text, name, steps) for name in named]


def _shape(name: str) -> str:
    """Return a name with "#" for each number."""
    return re.sub(r"\d+", "#", name)


def _make_pointer(name: str, says: str, step: str, steps: Iterable[FoundCheckpoint]) -> Pointer:
    """Return a pointer to a step by its name, with a problem if that is incomplete."""
    of = next(s for s in steps if s.name == step)
    return Pointer(name, says, step, "" if of.complete else f"names {step}, which is incomplete: {of.lacks}")


def _step_at(source: Source, real: str, steps: Iterable[FoundCheckpoint]) -> str | None:
    """Return the name of the step that a real path is, or lies in; None where it is in none."""
    for s in steps:
        at = os.path.realpath(os.path.join(source.root, s.name))
        if real == at or real.startswith(at + "/"):
            return s.name
    return None


def find_pointers_in_values(ckpt: Checkpoint, step: RunStep, steps: Sequence[RunStep]) -> Iterator[Pointer]:
    """Yield what the values of a checkpoint name among the other steps, as the path of the best one."""
    others = {s.name.rpartition("/")[2]: s for s in steps if s.name != step.name}
    own = step.name.rpartition("/")[2]
    for name, entry in (*ckpt.values.items(), *ckpt.tensors.items()):
        texts = [entry.data] if isinstance(entry, Value) and isinstance(entry.data, str) else []
        for text in [*texts, *(p for p in entry.path if isinstance(p, str) and "/" in p)]:
            last = text.rstrip("/").rpartition("/")[2]
            if last.isdigit():  # it may count anything
                continue
            if last in others:
                yield _make_pointer(f"{step.name}: {name}", text, others[last].name, steps)
            elif last != own and _shape(last) == _shape(own):
                yield Pointer(f"{step.name}: {name}", text, None, f"names {text}, which is not here")


def _mark(s: RunStep, pointers: Iterable[Pointer]) -> RunStep:
    """Return a step with the pointers that name it, and whether it is being written."""
    named = tuple(dict.fromkeys(p.name for p in pointers if p.step == s.name))
    young = s.modified is not None and time.time() - s.modified < _WRITING
    return replace(s, named_by=named, being_written=young and (not s.complete or _is_ahead(s, pointers)))


def _is_ahead(s: RunStep, pointers: Iterable[Pointer]) -> bool:
    """Tell whether the trainer keeps a file that names its newest step, and has not named this one, a later one."""
    folder = s.name.rpartition("/")[0]
    for p in pointers:
        at, _, name = p.name.rpartition("/")
        if at == folder and re.match(r"(?i)latest|last", name) and p.step is not None and ":" not in p.name:
            number = detection.find_step(p.step)
            return number is not None and s.step is not None and s.step > number
    return False


# ------------------------------------------------------------------------------------------------- records and indexes


def _read_digests(source: Source, steps: list[RunStep]) -> list[RunStep]:
    """Return the steps with the root digests that their ckpttool.json records, the newest first, as far as reading the
    records takes seconds. A record about files of other sizes says nothing of these."""
    left = _MOST_RECORDS
    out = list(steps)
    for i, s in reversed(list(enumerate(steps))):
        if not _is_folder(source, s.name) or RECORD not in source.list(s.name):
            continue
        size = source.glance(_join(s.name, RECORD))[1]
        if size is None or size > left:
            continue
        left -= size
        try:
            found = parse(source.read_all(_join(s.name, RECORD), size), RECORD)
            sizes = {str(n): f["bytes"] for n, f in found["files"].items()}
            if all(source.glance(_join(s.name, n))[1] == size for n, size in sizes.items()):
                out[i] = replace(s, digest={str(k): str(d) for k, d in found["digest"].items()})
        except (CkpttoolError, KeyError, TypeError, AttributeError, ValueError):
            continue
    return out


def _look_at_kinds(source: Source, steps: list[RunStep]) -> tuple[list[RunStep], list[Pointer]]:
    """Open the newest of the complete steps whose files have equal names and about equal sizes; return the steps with
    what was found, and the steps that values of the newest name."""
    kinds: dict[object, list[int]] = {}
    for i, s in enumerate(steps):
        if s.complete:
            kinds.setdefault(_kind_of(source, s), []).append(i)
    out, pointers, looks = list(steps), list[Pointer](), 3 if source.is_remote else _MOST_LOOKS
    for same in sorted(kinds.values(), key=lambda same: same[-1], reverse=True):
        for i in reversed(same):
            if not looks or len(same) - same.index(i) > _MOST_TRIES:
                break
            looks -= 1
            s = steps[i]
            ckpt, error = look_into(source, s)
            if ckpt is None:
                out[i] = s.with_error(error)
                if out[i].problem:
                    continue
                break
            text = next_step(ckpt, s.path)
            for j in same:
                said = text.replace(shlex.quote(s.path), shlex.quote(steps[j].path))
                out[j] = replace(out[j], world_size=ckpt.world_size, next_step=said if not out[j].problem else None)
            if s.newest:
                pointers += find_pointers_in_values(ckpt, s, steps)
            break
    return _pass_on_newest(out), pointers


def _pass_on_newest(steps: list[RunStep]) -> list[RunStep]:
    """Return the steps with the newest complete one of each run marked, where that cannot be opened: the one before
    it."""
    out = list(steps)
    for i, s in enumerate(steps):
        if s.newest and s.problem:
            out[i] = replace(s, newest=False)
            before = (j for j in range(i - 1, -1, -1) if detection.run_of(steps[j]) == detection.run_of(s))
            if (j := next((j for j in before if steps[j].complete and not steps[j].problem), None)) is not None:
                out[j] = replace(out[j], newest=True)
    return out


def look_into(source: Source, s: FoundCheckpoint) -> tuple[Checkpoint | None, Exception | None]:
    """Open a step, and prove by its index and headers that its files are whole; return (its index, None), or (None, why
    it cannot be opened)."""
    folder, _, name = s.name.rpartition("/")
    is_folder = _is_folder(source, s.name)
    where = Place(source.below(s.name), None) if is_folder else Place(source.below(folder), name)
    options = OpenOptions(allow_equal_ranks=True, allow_mixed_steps=True)
    try:
        return open_checkpoint(where, options, check_hints=False, needed=lambda component: False).checkpoint, None
    except (CkpttoolError, OSError) as e:
        return None, e


def _kind_of(source: Source, s: RunStep) -> object:
    """Return what steps have in common of which one is looked into for all: layout, names of the files without the
    step, and sizes within 6 %."""
    names = frozenset(map(detection.strip_steps, _list_names(source, s.name)))
    return s.layout, s.weights_only, names, int(s.bytes).bit_length(), (s.bytes << 4) >> int(s.bytes).bit_length()


def describe_age(modified: float | None) -> str:
    """Return how long ago something changed, in words: "40 s", "5 min", "3 h", "12 d"; "" where it is not known."""
    if modified is None:
        return ""
    seconds = max(0, int(time.time() - modified))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
