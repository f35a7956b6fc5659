"""Functions that workers run in tests: text -> text, as `ckpttool.engine.workers.part_worker.run`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ckpttool.errors import Corrupt


def no_cluster() -> None:
    raise OSError("no nodes")


def pid(text: str) -> str:
    return str(os.getpid())


def meet(text: str) -> str:
    """`FOLDER:N`: the process id, once N calls have come here at the same time; "alone" if they do not."""
    folder, _, n = text.rpartition(":")
    Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()
    for _ in range(800):
        if len(os.listdir(folder)) >= int(n):
            return str(os.getpid())
        time.sleep(0.01)
    return "alone"


def sleep(text: str) -> str:
    time.sleep(float(text))
    return str(os.getpid())


def announce_and_sleep(text: str) -> str:
    """Leaves a file with the name of this process in a folder, and stays."""
    Path(text, str(os.getpid())).touch()
    time.sleep(60)
    return ""


def die_once(text: str) -> str:
    """Killed at the first call with this path; returns the process id at the next."""
    if not os.path.exists(text):
        Path(text).touch()
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return str(os.getpid())


def big(text: str) -> str:
    return text * 1_000_000


def corrupt(text: str) -> str:
    raise Corrupt(f"{text} is damaged.")


def fault(text: str) -> str:
    raise KeyError(text)


def noise(text: str) -> str:
    """Prints, from Python and from below it, and reads standard input, as a child process might."""
    print("noise")
    os.write(1, b"more noise\n")
    assert os.read(0, 1) == b""
    return text


def garbage(text: str) -> str:
    """Writes into the sockets that this process has."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, b"garbage" * 10)
        except OSError:
            pass
    time.sleep(60)
    return ""


def modules(text: str) -> str:
    return " ".join({name.partition(".")[0] for name in sys.modules})


def environment(text: str) -> str:
    return f"{os.environ.get(text)} {os.getcwd()}"


def path(text: str) -> str:
    return "\0".join(sys.path)


def long_names(text: str) -> str:
    return text[::-1]


REMEMBERED: list[str] = []
LEFT: list[socket.socket] = []


def remember(text: str) -> str:
    """What a template does for its workers."""
    REMEMBERED.append(text)
    return ""


def recall(text: str) -> str:
    return " ".join((str(os.getpid()), str(os.getppid()), *REMEMBERED))


def leave_a_connection(text: str) -> str:
    LEFT.extend(socket.socketpair())
    return remember(text)


def leave_a_thread(text: str) -> str:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return remember(text)
