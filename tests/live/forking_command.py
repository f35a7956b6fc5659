"""`ckpttool` as a program whose ranks are forked from it, with torch imported, instead of started as new interpreters.

    forking_command.py resume-verify ...

Sessions, parents, signals and exit statuses are as the real command makes them; tests/resume/test_resume.py runs that.
"""

import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic, sleep

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpttool.cli.main import main
from ckpttool.resume.ranks import launch as ranks


class Forked:
    """What the command uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = monotonic() + timeout
        while (status := self.poll()) is None:
            if monotonic() > deadline:
                raise TimeoutExpired("rank", timeout)
            sleep(0.01)
        return status


def started(words: list[str], environment: Mapping[str, str], log: str, python: str) -> Forked:
    """In place of `ranks.started`."""
    child = os.fork()
    if child:
        return Forked(child)
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    tempfile.tempdir = None  # what this was forked from has asked for it
    ranks.start_rank = started  # type: ignore[assignment]
    main()
