"""Runs as a launch of their own: the ranks as child processes, whose traces, status, beats and errors come back as
files.

The ranks of one machine need no rendezvous: they meet at a file, so no port can be busy. The kernel kills them when the
thread that started them ends, however it ends, and `_Ranks.kill` kills the process group of each, which also ends what
is stopped or hangs.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

from ... import errors
from ...errors import CkpttoolError, Interrupted, RankLost
from ...printable import count_noun
from ..job.watchdog import Beat, Watch, beat_from_json, read_later_stage
from ..request import RunSettings, Status, write_settings
from ..trace.model import Trace, read_trace
from .interpreter import make_rank_environment, naming_interpreter

__all__ = ["forward_status_lines", "launch_runs", "raise_rank_error", "run_ranks", "start_rank"]

_GRACE = 3.0  # seconds in which the other ranks of a failed job can leave their errors
_PATIENCE = 20.0  # seconds for killed processes to end


def launch_runs(plan: Mapping[str, RunSettings], folder: str, status: Status) -> dict[str, Trace]:
    """Make runs on ranks of this machine, one after the other, and return {label: trace}.

    Consecutive runs with the same world size and Python share a launch, the processes of all ranks; but no run that
    resumes shares one with a run that trains from the start.

    Args:
        plan: {label: settings of a run}.
        folder: an existing folder for the files of the ranks.
        status: called with what is being done.

    Raises:
        CkpttoolError: a rank failed, or ended before the end of its runs. RankLost: one was killed, or made no
            progress. Interrupted: Ctrl-C or SIGTERM.
    """
    out: dict[str, Trace] = {}
    waiting = list(plan.items())
    number = 0
    while waiting:
        kind = world, python, _ = _find_launch_key(waiting[0][1])
        together = []
        while waiting and _find_launch_key(waiting[0][1]) == kind:
            together.append(waiting.pop(0))
        inner = os.path.join(folder, f"launch-{number}")
        number += 1
        os.mkdir(inner)
        write_settings(os.path.join(inner, "runs.json"), [s for _, s in together])
        labels = ", ".join(label for label, _ in together)
        status(f"starting {count_noun(world, 'rank')}: {labels}" + ("" if python is None else f" ({python})"))
        with naming_interpreter(python):
            run_ranks(inner, world, together[0][1], status)
            for i, (label, _) in enumerate(together):
                trace = os.path.join(inner, f"trace-{i}.json")
                if not os.path.exists(trace):
                    where = _read_beats(inner).get(0, Beat(0)).what
                    raise _attach_log(
                        CkpttoolError(
                            f"rank 0 ended with status 0 in {where!r}, before the end of the run: the job must not end "
                            "its process.",
                            code="CKPT0103",
                        ),
                        inner,
                    )
                out[label] = read_trace(trace)
    return out


def _find_launch_key(settings: RunSettings) -> tuple[int, str | None, bool]:
    """Return what all runs of one launch have in common: (world size, Python program, whether they train from the
    start)."""
    return settings.world_size, settings.python, bool(settings.fresh_steps)


def run_ranks(folder: str, world: int, settings: RunSettings, status: Status) -> None:
    """Start `world` processes that make the runs in runs.json of `folder`, wait for them, and forward their status
    lines.

    Args:
        folder: the folder of the launch.
        world: number of ranks.
        settings: those of the first run, for the device and the timeout.
        status: called with what is being done.

    Raises:
        CkpttoolError: a rank failed. RankLost: one was killed, or made no progress for `settings.timeout` seconds.
            Interrupted: Ctrl-C or SIGTERM. No rank is left running.
    """
    ranks = _Ranks(folder)
    try:
        ranks.start(world, settings)
        watch = Watch({rank: child.pid for rank, child in ranks.children.items()}, settings.timeout)
        seen, looked = 0, time.monotonic()
        while not ranks.have_ended():
            time.sleep(0.1)
            seen = forward_status_lines(folder, seen, status)
            if (now := time.monotonic()) - looked >= watch.period:
                stall = watch.find_stall(_read_beats(folder), now - looked)
                looked = now
                if stall is not None:
                    raise _attach_log(stall.to_error(), folder)
        forward_status_lines(folder, seen, status)
    except KeyboardInterrupt:
        raise Interrupted("stopped; nothing was written to the checkpoint.") from None
    finally:
        ranks.kill()
    if any(ranks.statuses.values()):
        raise_rank_error(folder, ranks.statuses)


def start_rank(words: list[str], environment: Mapping[str, str], log: str, python: str) -> subprocess.Popen[bytes]:
    """Start a process `PYTHON -P WORDS`, whose modules never come from the current folder.

    It is in a session of its own, so that a Ctrl-C of the terminal reaches only the command that starts it.

    Args:
        words: the arguments of Python.
        environment: all of its environment variables.
        log: the file that its output is appended to.
        python: the program.
    """
    with open(log, "ab") as f:
        return subprocess.Popen(
            [python, "-P", *words],
            stdin=subprocess.DEVNULL,
            stdout=f,
            stderr=f,
            env=environment,
            start_new_session=True,
        )


class _Ranks:
    """The processes of a launch. `statuses` are those of the ranks that have ended by themselves."""

    def __init__(self, folder: str) -> None:
        """Begin without processes.

        Args:
            folder: the folder of the launch, which has runs.json and where ranks write their files.
        """
        self.folder = folder
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.statuses: dict[int, int] = {}
        self._failed: float | None = None

    def start(self, world: int, settings: RunSettings) -> None:
        """Start `world` ranks, which share the cores of this machine; `settings` are those of their first run."""
        threads = max(1, (os.cpu_count() or 1) // world) if settings.device == "cpu" else 8
        common = {
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            **(os.environ if settings.python is None else make_rank_environment(self.folder)),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        words = ["-m", "ckpttool.resume.ranks.worker", self.folder, str(os.getpid())]
        for rank in range(world):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            log, python = os.path.join(self.folder, "log"), settings.python or sys.executable
            self.children[rank] = start_rank(words, environment, log, python)

    def have_ended(self) -> bool:
        """Tell whether all ranks have ended, or one failed over 3 seconds ago, so that others had time to leave
        errors."""
        for rank, child in self.children.items():
            if rank not in self.statuses and (status := _read_exit_status(child.pid)) is not None:
                self.statuses[rank] = status
        if self._failed is None and (any(self.statuses.values()) or _list_error_files(self.folder)):
            self._failed = time.monotonic()
        late = self._failed is not None and time.monotonic() - self._failed > _GRACE
        return late or len(self.statuses) == len(self.children)

    def kill(self) -> None:
        """Kill the ranks that still run, and all that any rank has started: loaders of data outlive their rank.

        Waits up to 20 seconds for them to end.
        """
        for child in self.children.values():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        deadline = time.monotonic() + _PATIENCE
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):  # it is in the kernel, and ends when that lets it go
                child.wait(max(0.1, deadline - time.monotonic()))


def _read_exit_status(pid: int) -> int | None:
    """Return the exit status of a child process, or minus the signal that killed it; None while it runs.

    The child is not reaped: it keeps its process id, which is also that of its process group.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def forward_status_lines(folder: str, seen: int, status: Status) -> int:
    """Call `status` with each complete new line in the file "events", to which rank 0 writes; return the byte offset in
    that file from which the next call reads on.

    Args:
        folder: the folder of the launch.
        seen: the offset that the last call returned; 0 at first.
        status: called with each line.
    """
    try:
        with open(os.path.join(folder, "events"), encoding="utf-8") as f:
            f.seek(seen)
            text = f.read()
    except OSError:
        return seen
    whole = text[: text.rfind("\n") + 1]
    for sentence in whole.splitlines():
        status(sentence)
    return seen + len(whole.encode())


def _read_beats(folder: str) -> dict[int, Beat]:
    """Return {rank: its last beat, with the stage that it was in last} of the ranks that have begun."""
    out = {}
    for path in glob.glob(os.path.join(glob.escape(folder), "stage-*")):
        rank = int(path.rpartition("-")[2])
        out[rank] = Beat(rank)
        with suppress(OSError), open(os.path.join(folder, f"beat-{rank}.json"), encoding="utf-8") as f:
            out[rank] = beat_from_json(f.read())
        out[rank] = read_later_stage(out[rank], path)
    return out


def _list_error_files(folder: str) -> list[str]:
    """List the files in which ranks left their errors, in the folder of a launch."""
    return glob.glob(os.path.join(glob.escape(folder), "error-*.json"))


def raise_rank_error(folder: str, statuses: Mapping[int, int]) -> None:
    """Raise the error that made a job fail: that a rank was killed, or else the error that a rank left in a file.

    There must be one of these. Errors of ranks that lost a peer are not the cause, since they follow its death. SIGABRT
    comes last: libraries for collectives end their process with it when a peer is gone.

    Args:
        folder: the folder of the launch.
        statuses: {rank: exit status, or minus a signal} of the ranks that ended by themselves.

    Raises:
        RankLost: a rank was killed. CkpttoolError: a rank failed; the class is that of its error.
    """
    found = []
    for path in _list_error_files(folder):
        with open(path, encoding="utf-8") as f:
            found.append(json.load(f))
    found.sort(key=lambda error: (not error["known"], error["lost_peer"], error["time"]))
    silent = {r: s for r, s in statuses.items() if s and r not in {error["rank"] for error in found}}
    killed = [r for r, s in silent.items() if s < 0 and s != -signal.SIGABRT]
    if killed or (silent and (not found or found[0]["lost_peer"])):
        rank = min(killed or silent)
        where = _read_beats(folder).get(rank, Beat(rank)).what
        raise _attach_log(_make_death_error(rank, silent[rank], where), folder)
    first = found[0]
    text = first["text"] if first["kind"] == "NotRecognised" else " ".join(first["text"].split())
    if first["known"]:
        kinds = {c: getattr(errors, c) for c in errors.__all__ if c != "EXIT_CODES"}
        raise kinds.get(first["kind"], CkpttoolError)(text, code=first["code"])
    full = "\n".join(f"rank {error['rank']}:\n{error['traceback']}" for error in found)
    raise _attach_log(
        CkpttoolError(f"rank {first['rank']} failed: {first['kind']}: {text.rstrip('.')}.", code="CKPT0103"),
        folder,
        full,
    )


def _make_death_error(rank: int, status: int, where: str) -> CkpttoolError:
    """Return the error about a rank that ended without leaving one.

    Args:
        rank: the rank.
        status: its exit status, or minus a signal.
        where: the stage that it was in.
    """
    if status > 0:
        return CkpttoolError(
            f"rank {rank} ended with status {status} in {where!r}, without an error message.", code="CKPT0103"
        )
    number = -status
    causes: dict[int, str] = {
        signal.SIGKILL: "The kernel's out-of-memory killer does that; `dmesg -T`, or `kubectl describe pod`, shows it. "
        "If memory ran out, use a smaller micro-batch, or fewer ranks on this machine.",
        signal.SIGBUS: "A full /dev/shm does that, or a file that became shorter while it was read.",
        signal.SIGTERM: "Somebody, or a scheduler, ended it.",
    }
    name = signal.Signals(number).name if number in set(signal.Signals) else "real-time signal"
    cause = causes.get(number, "Native code crashed; its Python stack is in the log.")
    return RankLost(f"rank {rank} was killed by signal {number} ({name}) in {where!r}. {cause}", code="CKPT1302")


def _attach_log(e: CkpttoolError, folder: str, more: str = "") -> CkpttoolError:
    """Return a copy of an error that names a saved log: what ranks printed, their stacks, and the text `more`.

    `folder` is the folder of the launch.
    """
    kept = os.path.join(tempfile.mkdtemp(prefix="ckpttool-failed-"), "log")
    shutil.copyfile(os.path.join(folder, "log"), kept)
    with open(kept, "a", encoding="utf-8") as f:
        for rank, beat in sorted(_read_beats(folder).items()):
            f.write(
                f"\nrank {rank} in {beat.what!r}; where it was last seen, innermost first:\n"
                + "\n".join(f"  {frame}" for frame in beat.stack)
            )
            with suppress(OSError), open(os.path.join(folder, f"stack-{rank}"), encoding="utf-8") as stack:
                f.write("\n" + stack.read())
        f.write(f"\n{more}\n")
    out = type(e)(f"{e} The log is {kept}.", code=e.code)
    for note in getattr(e, "__notes__", ()):
        out.add_note(note)
    return out
