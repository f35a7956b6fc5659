"""Runs as a launch of their own: torchrun with one worker a rank, whose traces, status and errors come back as files."""

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

from .. import errors
from ..errors import CkpttoolError, Interrupted
from .settings import Settings, Status, write_settings
from .trace import Trace, read_trace

__all__ = ["launch_runs", "pass_on_status", "raise_error_of", "run_torchrun"]


def launch_runs(plan: Mapping[str, Settings], folder: str, status: Status) -> dict[str, Trace]:
    """The traces of these runs. Consecutive runs with the same world size share a launch."""
    out: dict[str, Trace] = {}
    waiting = list(plan.items())
    number = 0
    while waiting:
        world = waiting[0][1].world_size
        together = []
        while waiting and waiting[0][1].world_size == world:
            together.append(waiting.pop(0))
        inner = os.path.join(folder, f"launch-{number}")
        number += 1
        os.mkdir(inner)
        write_settings(os.path.join(inner, "runs.json"), [s for _, s in together])
        status(f"starting {world} rank{'s' if world > 1 else ''}: {', '.join(label for label, _ in together)}")
        run_torchrun(inner, world, together[0][1], status)
        for i, (label, _) in enumerate(together):
            out[label] = read_trace(os.path.join(inner, f"trace-{i}.json"))
    return out


def run_torchrun(folder: str, world: int, settings: Settings, status: Status) -> None:
    """Run the worker on `world` ranks, with the runs that `folder` describes, and pass on what they do.

    Raises:
        CkpttoolError: a rank failed. Interrupted: Ctrl-C or SIGTERM; no rank is left behind.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--log-dir", folder,
        "-m", "ckpttool.resume.worker", folder,
    ]  # fmt: skip
    environment = dict(os.environ)
    environment.setdefault(
        "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)) if settings.device == "cpu" else "8"
    )
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    with open(os.path.join(folder, "log"), "wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    seen = 0
    try:
        while child.poll() is None:
            time.sleep(0.1)
            seen = pass_on_status(folder, seen, status)
            if _error_files(folder):
                _wait_and_stop(child)
        pass_on_status(folder, seen, status)
    except BaseException as e:
        _stop(child)
        if isinstance(e, KeyboardInterrupt):
            raise Interrupted("stopped; nothing was written to the checkpoint.") from None
        raise
    if child.returncode:
        raise_error_of(folder, child.returncode)


def pass_on_status(folder: str, seen: int, status: Status) -> int:
    """Pass on the lines that rank 0 wrote after byte `seen` of its log of events; the byte to continue from."""
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


def _error_files(folder: str) -> list[str]:
    return glob.glob(os.path.join(folder, "error-*.json"))


def _wait_and_stop(child: subprocess.Popen[bytes]) -> None:
    """Wait for torchrun to end the other ranks after one has failed, but not forever."""
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if child.poll() is None:
            try:
                os.killpg(child.pid, sign)
                child.wait(patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def raise_error_of(folder: str, status: int) -> None:
    """Raise the error that the ranks left in files: the first of ckpttool's own errors, or else the first of all."""
    found = []
    for path in _error_files(folder):
        with open(path, encoding="utf-8") as f:
            found.append((path, json.load(f)))
    found.sort(key=lambda pair: (not pair[1]["known"], pair[1]["time"]))
    if found and found[0][1]["known"]:
        kinds = {c: getattr(errors, c) for c in errors.__all__ if c != "EXIT_CODES"}
        raise kinds.get(found[0][1]["kind"], CkpttoolError)(found[0][1]["text"])
    kept = os.path.join(tempfile.mkdtemp(prefix="ckpttool-failed-"), "log")
    shutil.copyfile(os.path.join(folder, "log"), kept)
    if not found:
        raise CkpttoolError(f"the job ended with status {status} and no error message; its log is {kept}.")
    path, error = found[0]
    rank = os.path.basename(path)[len("error-") : -len(".json")]
    with open(kept, "a", encoding="utf-8") as f:
        f.write(f"\nrank {rank}:\n{error['traceback']}")
    raise CkpttoolError(f"rank {rank} failed: {error['kind']}: {error['text']}\nThe log with the traceback is {kept}.")
