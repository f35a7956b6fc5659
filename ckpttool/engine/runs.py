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
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from .. import layouts
from ..bounded_json import parse
from ..errors import CkpttoolError, Corrupt, NotPermitted, NotRecognised, Unsafe
from ..index.checkpoint import Checkpoint, Value
from ..layouts import Place
from ..options import OpenOptions
from ..printable import Shown, count_noun, quote_path
from ..storage import urls
from ..storage.source import Source
from .discover import detection
from .discover.detection import FoundCheckpoint
from .discover.next_steps import next_step
from .discover.unread_files import human
from .opening import OpenCheckpoint, open_checkpoint
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
    "place_step",
    "try_open_step",
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
        """Return the step, or the epoch if the name has no step; None if it has neither."""
        return self.epoch if self.step is None else self.step

    def with_error(self, error: Exception | None) -> RunStep:
        """Return the step with the error that opening it raised; unchanged for None.

        Damaged files become its `problem`; an error about something that is only needed to read it becomes its
        `next_step`.
        """
        text = str(error).split("\n")[0]
        if isinstance(error, Corrupt | Unsafe | NotPermitted | OSError):
            return replace(self, problem=text)
        return self if error is None else replace(self, next_step=text)

    @property
    def state(self) -> str:
        """Return in words whether the step is complete, and what it lacks otherwise."""
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
    """The steps of a run, oldest first, and what names some of them.

    `left_out` is the number of folders that were not looked into; `not_listed` are those that could not be listed, each
    by its name relative to the run, with the reason of the system: {"step-3": "Permission denied"}.
    """

    path: str
    steps: list[RunStep]
    pointers: list[Pointer]
    left_out: int = 0
    not_listed: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> RunStep | None:
        """Return the newest complete step that a job can resume from; None where there is none, where there are several
        runs, or where a folder that may be a later step could not be listed."""
        found = [s for s in self.steps if s.newest]
        return found[0] if len(found) == 1 else None

    def to_json(self) -> dict[str, object]:
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
            "not_listed": self.not_listed,
        }

    def lines(self) -> Iterator[str]:
        """Yield lines of text: the table of steps, warnings, and what resumes from the steps."""
        yield from self.table()
        yield from (f"warning: {text}" for text in self.warnings())
        yield from self.next_steps()

    def table(self) -> Iterator[str]:
        """Yield the steps as lines of a table, the names of the columns first."""
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
        """Yield sentences on pointers with problems, and on folders that were not searched."""
        yield from (f"{p.name} {p.problem}" for p in self.pointers if p.problem)
        yield from detection.describe_not_listed(self.not_listed)
        if self.left_out:
            yield f"{count_noun(self.left_out, 'folder')} not looked into"

    def next_steps(self) -> Iterator[str]:
        """Yield lines of text on what resumes from the steps; steps with the same answer share a line."""
        same: dict[str, list[RunStep]] = {}
        for s in self.steps:
            if s.next_step:
                same.setdefault(s.next_step.replace(quote_path(s.path), "PATH"), []).append(s)
        for steps in same.values():
            first, last = steps[0], steps[-1]
            which = (
                (last.name or os.path.basename(last.path))
                if first is last
                else f"{first.name} to {last.name}, {count_noun(len(steps), 'step')}"
            )
            yield f"next  {which}: {last.next_step}"


def list_run(path: str | os.PathLike[str], *, look: bool = True) -> Run:
    """List the checkpoints of a run, oldest first: those in a folder or URL, and up to two levels below.

    A path that is a checkpoint itself is a run of one step.

    Args:
        path: a folder, or the URL of one (s3://, gs://, az://, hf://).
        look: open the newest of the steps with equal files, at most eight in all, to find world sizes and what resumes
            from them; otherwise only names are read, and `world_size`, `next_step` and `problem` are empty.

    Returns:
        The run; its `steps` are `RunStep`s. To follow a run, call this again with `look=False`, and use the steps that
        are `complete` and not `being_written`.

    Raises:
        NotRecognised: there is no checkpoint.
        NotPermitted: a folder may not be listed.
        RemoteError: the store fails.
    """
    with (where := layouts.place(path)).source as source:
        run = list_steps(where)
        if not look:
            return run
        steps, more = _open_one_of_each_kind(source, run.steps, run.not_listed)
        pointers = [*run.pointers, *more]
        return replace(run, steps=[_mark_step(s, pointers) for s in steps], pointers=pointers)


def list_steps(where: Place) -> Run:
    """List the checkpoints at a place, as `list_run` does by names alone.

    Raises:
        NotRecognised: there is none.
    """
    source, found = where.source, _find_checkpoints(where)
    steps = [_make_run_step(source, c) for c in found.checkpoints]
    pointers = find_pointers(source, steps)
    steps = _read_digests(source, [_mark_step(s, pointers) for s in steps])
    return Run(found.path, steps, pointers, found.left_out, found.not_listed)


def _find_checkpoints(where: Place) -> detection.Checkpoints:
    """Return the checkpoints at a place: those below a folder, or the place itself.

    Raises:
        NotRecognised: there is none.
    """
    if where.file is None:
        found = detection.find_checkpoints(where.source, _MOST_FOLDERS if where.source.list_ahead() else None)
        if any(c.step is not None or c.epoch is not None for c in found.checkpoints):
            return found
    else:
        found = None
    row = detection.describe_place(where)
    hides = row is not None and not layouts.get_program_of(row.layout).is_stray(where.source.list())
    if row is not None and (hides or found is None or not found.checkpoints):
        return detection.Checkpoints(row.path, [replace(row, newest=row.complete)])
    if found is not None and found.checkpoints:
        return found
    detection.detect(where)  # says what was looked for
    raise NotRecognised(
        f"{urls.display_path(where.source.root)} holds no checkpoint, two levels down.", code="CKPT0304"
    )


def _make_run_step(source: Source, c: FoundCheckpoint) -> RunStep:
    """Return a checkpoint as a step of the run, with the time of its last change and, if its path is a link, where the
    link leads.

    Args:
        source: the folder of the run.
    """
    names = [c.name, *(_join_path(c.name, n) for n in _list_step_entries(source, c.name))]
    times = [t for n in names if (t := source.modified(n)) is not None]
    link = None
    if source.local:
        here, real = os.path.join(source.root, c.name), os.path.realpath(source.root)
        link = None if (at := os.path.realpath(here)) == os.path.normpath(os.path.join(real, c.name)) else at
    known = {f.name: getattr(c, f.name) for f in fields(c)}
    return RunStep(**known, modified=max(times, default=None), link=link)


def _list_step_entries(source: Source, name: str) -> Iterator[str]:
    """Yield the paths of everything in the folder of a step, two levels deep and relative to it; nothing for a file."""
    if _is_folder(source, name):
        for inner in source.list(name):
            yield inner
            if source.glance(_join_path(name, inner))[0]:
                yield from (f"{inner}/{n}" for n in source.list(_join_path(name, inner)))


def _is_folder(source: Source, name: str) -> bool:
    """Tell whether a step is a folder; "" is the source itself."""
    return not name or source.glance(name)[0]


def _join_path(folder: str, name: str) -> str:
    """Return FOLDER/NAME, relative to the source; `name` alone for the folder "", which is the source itself."""
    return f"{folder}/{name}" if folder else name


# ------------------------------------------------------------------------------------------------------------ pointers


def find_pointers(source: Source, steps: Sequence[FoundCheckpoint]) -> list[Pointer]:
    """Find links to steps, and small files that name one: their names begin with latest, last, newest or best.

    Only the run's folder and the folders that hold steps are searched.
    """
    out: list[Pointer] = []
    for folder in dict.fromkeys(["", *(s.name.rpartition("/")[0] for s in steps)]):
        for name in source.list(folder):
            path = _join_path(folder, name)
            here = os.path.join(source.root, path)
            if source.local and os.path.islink(here):
                if (step := _find_step_at(source, os.path.realpath(here), steps)) not in (None, path):
                    out.append(_make_pointer(path, os.readlink(here), step, steps))
                continue
            is_folder, size = source.glance(path)
            if not is_folder and size and size <= _MOST_POINTER and re.fullmatch(_POINTER, name):
                out += _read_pointer(source, folder, path, steps)
    return out


def _read_pointer(source: Source, folder: str, path: str, steps: Sequence[FoundCheckpoint]) -> list[Pointer]:
    """Return the pointers in a small file: the number, name or path of a step, or a text with names of steps.

    [] if it holds something else.

    Args:
        folder: the folder that the file is in.
        path: the file.
    """
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
        if of_newest or any(
            _mask_numbers(last) == _mask_numbers(os.path.basename(s.name)) for s in beside
        ):  # else a number, say
            return [Pointer(path, text, None, f"names {text}, which is not here")]
    return [_make_pointer(path, text, name, steps) for name in named]


def _mask_numbers(name: str) -> str:
    """Return a name with "#" in place of each number."""
    return re.sub(r"\d+", "#", name)


def _make_pointer(name: str, says: str, step: str, steps: Iterable[FoundCheckpoint]) -> Pointer:
    """Return the pointer to a step; it has a problem if the step is incomplete.

    Args:
        name: the pointer's path, relative to the run.
        says: what the pointer contains, as it stands there.
        step: name of the step that the pointer names, which is one of `steps`.
        steps: all steps of the run.
    """
    of = next(s for s in steps if s.name == step)
    return Pointer(name, says, step, "" if of.complete else f"names {step}, which is incomplete: {of.lacks}")


def _find_step_at(source: Source, real: str, steps: Iterable[FoundCheckpoint]) -> str | None:
    """Return the name, relative to the run, of the step that a path is or lies in; None if there is no such step.

    Args:
        real: the path, absolute and with links resolved.
    """
    for s in steps:
        at = os.path.realpath(os.path.join(source.root, s.name))
        if real == at or real.startswith(at + "/"):
            return s.name
    return None


def find_pointers_in_values(ckpt: Checkpoint, step: RunStep, steps: Sequence[RunStep]) -> Iterator[Pointer]:
    """Yield pointers for values of a checkpoint that name a step of the run, such as the path of the best checkpoint.

    Args:
        step: the step of that checkpoint; values that name it are skipped.
        steps: all steps.
    """
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
            elif last != own and _mask_numbers(last) == _mask_numbers(own):
                yield Pointer(f"{step.name}: {name}", text, None, f"names {text}, which is not here")


def _mark_step(s: RunStep, pointers: Iterable[Pointer]) -> RunStep:
    """Return a copy of a step with two fields set: `named_by`, the names of the pointers to it, and `being_written`."""
    named = tuple(dict.fromkeys(p.name for p in pointers if p.step == s.name))
    young = s.modified is not None and time.time() - s.modified < _WRITING
    return replace(s, named_by=named, being_written=young and (not s.complete or _is_ahead_of_pointer(s, pointers)))


def _is_ahead_of_pointer(s: RunStep, pointers: Iterable[Pointer]) -> bool:
    """Tell whether a step is later than the one that its trainer's pointer file (such as `latest`) names."""
    folder = s.name.rpartition("/")[0]
    for p in pointers:
        at, _, name = p.name.rpartition("/")
        if at == folder and re.match(r"(?i)latest|last", name) and p.step is not None and ":" not in p.name:
            number = detection.find_step(p.step)
            return number is not None and s.step is not None and s.step > number
    return False


# ------------------------------------------------------------------------------------------------- records and indexes


def _read_digests(source: Source, steps: list[RunStep]) -> list[RunStep]:
    """Return the steps with the root digests in their ckpttool.json.

    The newest are read first, up to 64 MiB in all. A record about files of other sizes is ignored.
    """
    left = _MOST_RECORDS
    out = list(steps)
    for i, s in reversed(list(enumerate(steps))):
        if not _is_folder(source, s.name) or RECORD not in source.list(s.name):
            continue
        size = source.glance(_join_path(s.name, RECORD))[1]
        if size is None or size > left:
            continue
        left -= size
        try:
            found = parse(source.read_all(_join_path(s.name, RECORD), size), RECORD)
            sizes = {str(n): f["bytes"] for n, f in found["files"].items()}
            if all(source.glance(_join_path(s.name, n))[1] == size for n, size in sizes.items()):
                out[i] = replace(s, digest={str(k): str(d) for k, d in found["digest"].items()})
        except (CkpttoolError, LookupError, TypeError, AttributeError, ValueError):
            continue
    return out


def _open_one_of_each_kind(
    source: Source, steps: list[RunStep], not_listed: Collection[str]
) -> tuple[list[RunStep], list[Pointer]]:
    """Open the newest complete step of each kind (`_make_kind_key`), and apply what is found to all steps of that kind.

    If it is damaged, earlier steps of its kind are tried; at most eight steps are opened in all, three on a store.

    Args:
        not_listed: names of the folders that could not be listed.

    Returns:
        (the steps, pointers in values of the newest step).
    """
    kinds: dict[object, list[int]] = {}
    for i, s in enumerate(steps):
        if s.complete:
            kinds.setdefault(_make_kind_key(source, s), []).append(i)
    out, pointers, looks = list(steps), list[Pointer](), 3 if source.is_remote else _MOST_LOOKS
    for same in sorted(kinds.values(), key=lambda same: same[-1], reverse=True):
        for i in reversed(same):
            if not looks or len(same) - same.index(i) > _MOST_TRIES:
                break
            looks -= 1
            s = steps[i]
            opened, error = try_open_step(source, s)
            if opened is None:
                out[i] = s.with_error(error)
                if out[i].problem:
                    continue
                break
            ckpt, wrong = opened.checkpoint, opened.describe_sampled_masters() is not None
            text = next_step(ckpt, s.path, place_step(source, s).source.exists, wrong)
            for j in [i] if wrong else (j for j in same if out[j].next_step is None):
                said = text.replace(quote_path(s.path), quote_path(steps[j].path))
                out[j] = replace(out[j], world_size=ckpt.world_size, next_step=said if not out[j].problem else None)
            if s.newest:
                pointers += find_pointers_in_values(ckpt, s, steps)
            if not wrong:  # else an earlier one tells what resumes from the others
                break
    return _move_newest_mark(out, not_listed), pointers


def _move_newest_mark(steps: list[RunStep], not_listed: Collection[str]) -> list[RunStep]:
    """Return the steps with the mark `newest` moved to an earlier complete step, if the marked one cannot be opened.
    None gets it if one of the folders that could not be listed may be a later step than that."""
    out = list(steps)
    for i, s in enumerate(steps):
        if s.newest and s.problem:
            out[i] = replace(s, newest=False)
            before = (j for j in range(i - 1, -1, -1) if detection.find_run_key(steps[j]) == detection.find_run_key(s))
            if (j := next((j for j in before if steps[j].complete and not steps[j].problem), None)) is not None:
                out[j] = replace(out[j], newest=not detection.find_later_folders(not_listed, steps[j]))
    return out


def place_step(source: Source, s: FoundCheckpoint) -> Place:
    """Return the place from which a step is read: its folder, or its file and the folder that this lies in.

    Args:
        source: the folder of the run.
    """
    folder, _, name = s.name.rpartition("/")
    return Place(source.below(s.name), None) if _is_folder(source, s.name) else Place(source.below(folder), name)


def try_open_step(source: Source, s: FoundCheckpoint) -> tuple[OpenCheckpoint | None, Exception | None]:
    """Open a step, which checks its index and headers.

    Returns:
        (the step, None), or (None, the error that opening it raised).
    """
    where, options = place_step(source, s), OpenOptions(allow_equal_ranks=True, allow_mixed_steps=True)
    try:
        return open_checkpoint(where, options, check_hints=False, needed=lambda component: False), None
    except (CkpttoolError, OSError) as e:
        return None, e


def _make_kind_key(source: Source, s: RunStep) -> object:
    """Return a key that is equal for steps of one kind: those with the same layout, the same names of files apart from
    the step in them, and nearly the same size (within 6 %)."""
    names = frozenset(map(detection.strip_steps, _list_step_entries(source, s.name)))
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
