"""Run a command and measure it, and nothing else: `measured([...])`, or `python bench/measure.py COMMAND...`, which prints JSON.

Linux counts into a process's ru_maxrss what the process that started it had in memory, so a benchmark that has made a large
source would report itself. A fresh interpreter of 12 MiB, this file, starts the command: what it reports is the peak (VmHWM) of
the largest process of the command, or 12 MiB if that is less.

CPU seconds are those of the whole tree, also of processes that nobody waited for: those of a cgroup that is made for the command,
where the machine lets us, and otherwise of all processes, which become children of this interpreter when their parents end.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import NamedTuple

_CGROUPS = "/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup"  # of version 1 and 2
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Measured(NamedTuple):
    """Seconds of wall time and of CPU time of a command, the peak of its largest process, and where the CPU time is from."""

    wall: float
    cpu: float
    peak_mib: float
    by: str


def measured(command: list[str], env: dict[str, str] | None = None) -> Measured:
    """Run a command from a fresh process.

    Raises:
        RuntimeError: it failed; with the end of what it printed on stderr.
    """
    out, into = os.pipe()
    launcher = [sys.executable, "-I", "-S", __file__, "--to", str(into), *map(str, command)]
    with open(out, encoding="ascii") as answer:
        done = subprocess.run(
            launcher, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=[into], env=env, check=False
        )
        os.close(into)
        text = answer.read()
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
    return Measured(**json.loads(text))


class Cgroup:
    """A cgroup for the children of this process; `folder` is None where none can be made."""

    def __init__(self) -> None:
        self.folder: str | None = None
        for top in _CGROUPS:
            folder = f"{top}/ckpttool-bench-{os.getpid()}"
            try:
                if os.access(f"{top}/cgroup.procs", os.W_OK):
                    os.mkdir(folder)
                    self.folder = folder
                    return
            except OSError:
                continue

    def enter(self) -> None:
        """Move this process into it, just before it becomes the command."""
        with open(f"{self.folder}/cgroup.procs", "w") as f:
            f.write(str(os.getpid()))

    def cpu_seconds(self) -> float:
        """CPU seconds of all that was ever in it."""
        try:
            with open(f"{self.folder}/cpuacct.usage") as f:
                return int(f.read()) / 1e9
        except FileNotFoundError:
            with open(f"{self.folder}/cpu.stat") as f:
                return next(int(line.split()[1]) / 1e6 for line in f if line.startswith("usage_usec"))


def main(arguments: list[str]) -> int:
    """Run the command, and print what it took, or write it to a file descriptor (--to N)."""
    to, command = (int(arguments[1]), arguments[2:]) if arguments[0] == "--to" else (1, arguments)
    import ctypes

    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    group = Cgroup()
    if to == 1:
        to = os.dup(1)  # what the command prints goes to stderr
        os.dup2(2, 1)
    os.set_inheritable(to, False)
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            if group.folder:
                group.enter()
            os.execvp(command[0], command)
        except OSError as e:
            os.write(2, f"{command[0]}: {e}\n".encode())
            os._exit(127)
    _, status, _ = os.wait4(pid, 0)
    wall = time.monotonic() - began
    try:
        while True:  # what the command left behind has become ours
            os.wait()
    except ChildProcessError:
        pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, by = used.ru_utime + used.ru_stime, "processes"
    if group.folder:
        cpu, by = group.cpu_seconds(), "cgroup"
        os.rmdir(group.folder)
    os.write(to, json.dumps(Measured(wall, cpu, used.ru_maxrss / 1024, by)._asdict()).encode() + b"\n")
    return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
