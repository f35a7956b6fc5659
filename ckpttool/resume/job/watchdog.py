"""What every rank is doing, and which one holds up the others.

A rank says where it is (`enter_stage`) and that it moves (`report_progress`). A thread of it, the pulse, publishes that
as a `Beat` every few seconds, with the collective that it waits in and its Python stack. Whoever sees the beats of all
ranks asks `Watch.find_stall`: the command that started the ranks reads them from files; in a job that torchrun or srun
started, ranks 0 and 1 read them from the store of the job.

The rank that waits in a collective is not the one to name, so the order is: a rank whose threads do not run (it is
stopped, or hangs in native code that holds Python's lock); then, of the ranks that are furthest behind, those that are
in no collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import IO

from ...errors import RankLost, argument

__all__ = [
    "Beat",
    "Stall",
    "Watch",
    "beat_from_json",
    "beat_to_json",
    "choose_beat_period",
    "enter_stage",
    "get_current_stage",
    "publishing_beats",
    "read_later_stage",
    "report_progress",
    "write_stages_to",
]

_FRAMES = 12  # of a stack, innermost first
_MOVED_BYTES = 1 << 20  # a rank that read or wrote so many bytes since the last beat is not silent
_BUSY = 0.05  # of the time between two beats, on a CPU, is a computation
_LINE = 240  # bytes of a stage in its file
_MISSED = 3  # beats, after which threads do not run

#: Files of torch whose frames wait for other ranks, or for a GPU that does.
_WAITING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/",
    "torch/distributed/tensor/",
    "torch/cuda/",
)
_WRAPPERS = ("torch/distributed/c10d_logger.py", "torch/_ops.py", "torch/utils/_contextlib.py")


@dataclass(frozen=True)
class Beat:
    """What one rank published.

    `count` numbers the beats of its thread, `position` the stages that it has begun; both only grow. `what` is the
    stage. `quiet` is for how many seconds it has not moved. `waits` is the collective that it waits in, "" for none.
    `stack` is its main thread's, innermost frame first: "file.py:12 in function".
    """

    rank: int
    pid: int = 0
    host: str = ""
    count: int = 0
    position: int = 0
    what: str = "starting Python"
    quiet: float = 0.0
    waits: str = ""
    stack: list[str] = field(default_factory=list)


def beat_to_json(beat: Beat) -> str:
    """Return a beat as JSON, for `beat_from_json`."""
    return json.dumps(asdict(beat))


def beat_from_json(text: str) -> Beat:
    """Make a beat from the JSON that `beat_to_json` returned.

    Raises:
        ValueError, TypeError: it is something else.
    """
    return Beat(**json.loads(text))


def choose_beat_period(timeout: float) -> float:
    """Return how many seconds lie between two beats of a rank: a tenth of the timeout, at most 5.

    Args:
        timeout: seconds that a rank may make no progress.
    """
    return min(5.0, timeout / 10)


# ------------------------------------------------------------------------------------------------------------- a rank


class _Here:
    """Where this rank is."""

    def __init__(self) -> None:
        """Begin before the first stage, without a file to write stages to."""
        self.position, self.moves, self.what, self.computes = 0, 0, Beat.what, False
        self.file: int | None = None
        self.wake = threading.Event()


_here = _Here()


def enter_stage(what: str, computes: bool = False) -> None:
    """Begin a stage of this rank, such as "building the model"; all ranks begin the same stages in the same order.

    Args:
        what: its name, for people.
        computes: whether the main thread computes alone and on the CPU, so that it makes progress while it uses that.
            In other stages it may use the CPU while it waits for others.
    """
    _here.what, _here.computes = what, computes
    _here.position += 1
    if _here.file is not None:
        os.pwrite(_here.file, f"{_here.position} {what}".encode()[:_LINE].ljust(_LINE), 0)
    else:
        _here.wake.set()


def report_progress() -> None:
    """Report that this rank makes progress within its stage, so that it does not count as silent."""
    _here.moves += 1


def get_current_stage() -> str:
    """Return the name of the stage that this rank is in."""
    return _here.what


def write_stages_to(path: str) -> None:
    """Let `enter_stage` write each later stage to a file, which can still be read if the rank is killed.

    A write takes 2 microseconds.
    """
    _here.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)


def read_later_stage(beat: Beat, path: str) -> Beat:
    """Return a beat with the stage that its rank wrote to the file `path` (`write_stages_to`), if that is later than
    the beat's.

    A file that is missing or damaged changes nothing.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            position, _, what = f.read().partition(" ")
        return replace(beat, position=int(position), what=what.strip()) if int(position) > beat.position else beat
    except (OSError, ValueError):
        return beat


class _Pulse(threading.Thread):
    """The thread that publishes the beats of this rank.

    It counts time in beats, not by the clock: a job that a scheduler suspends as a whole is not silent when it goes on.
    """

    def __init__(self, rank: int, timeout: float, publish: Callable[[Beat], None], stacks: IO[str] | int) -> None:
        """Keep the arguments.

        Args:
            rank: this rank.
            timeout: seconds that it may make no progress.
            publish: called with each beat; its OSErrors are ignored.
            stacks: a text file or a file descriptor for stacks of a hanging rank.
        """
        super().__init__(name="ckpttool-pulse", daemon=True)
        self.rank, self.timeout, self.period = rank, timeout, choose_beat_period(timeout)
        self.publish, self.stacks = publish, stacks
        self.over = threading.Event()
        self.main = threading.main_thread().ident

    def run(self) -> None:
        """Publish a beat every period, or sooner at a new stage, until `over` is set.

        If native code holds the GIL for almost `timeout`, so that no beat is possible, faulthandler writes the stacks
        to `stacks`.
        """
        count, quiet, before, bytes_before, used_before = 0, 0.0, (0, 0), 0, 0.0
        while True:
            done, used, now = _count_bytes_moved(), _read_cpu_seconds(), (_here.position, _here.moves)
            computed = _here.computes and used - used_before >= _BUSY * self.period
            still = now == before and done - bytes_before < _MOVED_BYTES and not computed
            quiet = quiet + self.period if still and count else 0.0
            before, bytes_before, used_before, count = now, done, used, count + 1
            waits, stack = _inspect_stack(sys._current_frames().get(self.main or 0))
            # a rank whose native code holds Python's lock does not come here in time, and its stack is written without
            # it
            if not isinstance(self.stacks, int):
                self.stacks.truncate(0)
            faulthandler.dump_traceback_later(max(self.timeout - 2 * self.period, self.period), file=self.stacks)
            with suppress(OSError):
                host = socket.gethostname()
                self.publish(Beat(self.rank, os.getpid(), host, count, _here.position, _here.what, quiet, waits, stack))
            self.over.wait(self.period / 10)  # as often as that, if stages are short
            _here.wake.wait(self.period * 0.9)
            _here.wake.clear()
            if self.over.is_set():
                break
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def publishing_beats(
    rank: int, timeout: float, publish: Callable[[Beat], None], stacks: IO[str] | int
) -> Iterator[None]:
    """While the block runs, publish regularly what this rank does.

    Args:
        rank: this rank.
        timeout: seconds that it may make no progress.
        publish: called with each beat, on another thread.
        stacks: a text file or a file descriptor that gets the stacks if native code holds the GIL for almost `timeout`.
    """
    pulse = _Pulse(rank, timeout, publish, stacks)
    pulse.start()
    try:
        yield
    finally:
        pulse.over.set()
        _here.wake.set()
        pulse.join(2 * pulse.period)


def _count_bytes_moved() -> int:
    """Return how many bytes this process has read and written so far; 0 if the system does not tell.

    A long save or load has no stages, but moves bytes.
    """
    try:
        with open("/proc/self/io", encoding="ascii") as f:
            numbers = dict(line.split(": ") for line in f.read().splitlines())
        return sum(int(numbers[k]) for k in ("rchar", "wchar", "read_bytes"))
    except (OSError, ValueError, KeyError):
        return 0


def _read_cpu_seconds() -> float:
    """Return how many seconds of CPU time the main thread of this process has used; 0 if the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat", encoding="ascii", errors="replace") as f:
            user, system = f.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _inspect_stack(frame: FrameType | None) -> tuple[str, list[str]]:
    """Return (function of the collective that a thread waits in, its frames), from its innermost frame.

    The first is "" if it waits in none. At most 12 frames are returned, innermost first. `frame` is None if there is
    none.
    """
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    stack = [f"{os.path.basename(name)}:{line} in {function}" for name, line, function in frames[:_FRAMES]]
    inner = [f for f in frames if not any(f[0].endswith(w) for w in _WRAPPERS)]
    waits = ""
    for name, _, function in inner:
        if not any(w in name for w in _WAITING):
            break
        if not waits or name.endswith("distributed_c10d.py"):
            waits = function
    return waits, stack


# ---------------------------------------------------------------------------------------------------- who sees them all


@dataclass(frozen=True)
class Stall:
    """A job that does not go on: `culprits` are the ranks that the others wait for, all of them if that cannot be
    told."""

    culprits: list[int]
    frozen: set[int]
    beats: dict[int, Beat]
    seconds: float

    def to_error(self) -> RankLost:
        """Return the error that tells which ranks hold the job up and where; stacks are its notes."""
        first = self.beats[self.culprits[0]]
        if len(self.culprits) == len(self.beats) > 1:
            text = (
                f"no rank has made progress for {self.seconds:.0f} s, and none is behind the others: "
                f"{_describe_places(self.beats)}."
            )
        else:
            who = f"rank {first.rank}" if len(self.culprits) == 1 else f"ranks {', '.join(map(str, self.culprits))}"
            have = "has" if len(self.culprits) == 1 else "have"
            doing = self._describe_state(first)
            text = f"{who} {have} made no progress for {self.seconds:.0f} s in {first.what!r}: {doing}."
            others = {r: b for r, b in self.beats.items() if r not in self.culprits}
            if others:
                text += f" Of the others, {_describe_places(others)}."
        out = RankLost(
            f"{text} If the job is only slow there, allow more time: {argument('timeout', 1800)}.", code="CKPT1301"
        )
        for rank in [*self.culprits, *(r for r in self.beats if r not in self.culprits)][:4]:
            if self.beats[rank].stack:
                out.add_note(f"rank {rank} was last seen at {' < '.join(self.beats[rank].stack[:6])}")
        return out

    def _describe_state(self, beat: Beat) -> str:
        """Return a text about what a culprit's process does, as far as the kernel or its last beat tells."""
        if not beat.count and not beat.pid:
            return "nothing was heard of it"
        letter, place = _read_process_state(beat)
        if letter in ("T", "t"):
            return f"process {beat.pid} is stopped (state {letter}; `kill -CONT {beat.pid}` lets it go on)"
        if letter in ("Z", "X"):
            return f"process {beat.pid} is dead (state {letter})"
        if letter == "D":
            return (
                f"process {beat.pid} waits in the kernel (state D, {place}), as for a disk, a network file system or a "
                "GPU driver"
            )
        if beat.rank in self.frozen:
            known = f" (state {letter}, {place})" if letter else f" on {beat.host}" if beat.host else ""
            return (
                f"process {beat.pid}{known} does not run Python: stopped, gone, or hung in native code; the log has "
                "its stack if it runs"
            )
        if beat.waits:
            return f"it waits in {beat.waits}"
        return f"it is at {beat.stack[0]}" if beat.stack else "it has not said where it is"


def _describe_places(beats: Mapping[int, Beat]) -> str:
    """Return a text about where ranks are, {rank: its last beat}; those at the same place together."""
    places: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        doing = f"waiting in {beat.waits}" if beat.waits else f"at {beat.stack[0]}" if beat.stack else "silent"
        places.setdefault(f"{doing} ({beat.what!r})", []).append(rank)
    found = []
    for place, ranks in places.items():
        who = f"{ranks[0]} is" if len(ranks) == 1 else f"{ranks[0]} and {len(ranks) - 1} more are"
        found.append(f"rank {who} {place}")
    return ", ".join(found[:4])


def _read_process_state(beat: Beat) -> tuple[str, str]:
    """Read the kernel's state of a beat's process: (state letter, such as "T" for stopped; kernel function that it
    waits in).

    ("", "") for a process of another machine, ("X", "") if the process no longer exists.
    """
    if not beat.pid or beat.host not in ("", socket.gethostname()):
        return "", ""
    try:
        with open(f"/proc/{beat.pid}/stat", encoding="utf-8", errors="replace") as f:
            letter = f.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X", ""
    try:
        with open(f"/proc/{beat.pid}/wchan", encoding="ascii") as f:
            place = f.read().strip("0\n")
    except OSError:
        place = ""
    return letter, place or "place unknown"


class Watch:
    """Finds that a job does not go on, from the beats of its ranks."""

    def __init__(self, ranks: Mapping[int, int], timeout: float) -> None:
        """Keep the ranks to watch.

        Args:
            ranks: {rank: process id on this machine, 0 where that is not known}.
            timeout: seconds that a rank may make no progress.
        """
        self.timeout, self.period = timeout, choose_beat_period(timeout)
        self._beats = {rank: Beat(rank, pid) for rank, pid in ranks.items()}
        self._since = dict.fromkeys(ranks, 0.0)  # their last beats, in seconds

    def find_stall(self, beats: Mapping[int, Beat], seconds: float) -> Stall | None:
        """Find which ranks hold up the job; None if none has made no progress for the timeout.

        Also None while all ranks without progress only wait for others in collectives, and some others make progress.

        Args:
            beats: {rank: its latest beat}, as far as known.
            seconds: time since the last call.
        """
        for rank in self._beats:
            if rank in beats and beats[rank] != self._beats[rank]:
                self._beats[rank], self._since[rank] = beats[rank], 0.0
            else:
                self._since[rank] += min(seconds, 2 * self.period)  # this process may have been suspended with the job
        frozen = self.frozen_ranks()
        quiet = {r: b.quiet + self._since[r] for r, b in self._beats.items()}
        silent = {r for r, seconds in quiet.items() if seconds >= self.timeout}
        if not any(r in frozen or not self._beats[r].waits for r in silent) and len(silent) < len(quiet):
            return None
        if not silent:
            return None
        culprits = silent & frozen
        if not culprits:
            least = min(self._beats[r].position for r in silent)
            behind = {r for r in silent if self._beats[r].position == least}
            culprits = {r for r in behind if not self._beats[r].waits} or behind
        return Stall(sorted(culprits), frozen, dict(self._beats), max(quiet[r] for r in culprits))

    def frozen_ranks(self) -> set[int]:
        """Return the ranks that have published no beat for three periods, so that not even their threads seem to
        run."""
        return {r for r, since in self._since.items() if since >= _MISSED * self.period}
