"""An Executor of processes on this machine, for functions that take one text and return one.

`concurrent.futures.ProcessPoolExecutor` has three faults here: its workers import the caller's `__main__` again, one worker that
dies fails all futures, and workers outlive a parent that was killed. Here each worker is a new interpreter that runs
`local_worker`, and a thread waits for its answers. When the worker dies, that thread fails the one future that the worker had
with WorkerDied, and starts another process for the next request.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from typing import Any

from .. import errors
from .local_worker import RAISED, REQUEST, RETURNED, message, read_message

__all__ = ["LocalProcesses", "WorkerDied"]

#: sys.path comes first, so that workers import what this process would: an editable install, PYTHONPATH, what a program added.
_CODE = """
import sys
file = open(int(sys.argv[1]), "rb")
sys.path[:] = file.read(int(sys.argv[2])).decode("utf-8", "surrogateescape").split("\\0")
from ckpttool.engine.local_worker import main
main(file, int(sys.argv[3]))
"""

#: Seconds that a worker may take to end by itself once its socket is closed.
_PATIENCE = 0.5


class WorkerDied(BrokenExecutor):
    """A worker process ended before it answered. Other requests are not affected."""


class LocalProcesses(Executor):
    """Up to `count` worker processes; each is started when there is work for it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: queue.SimpleQueue[tuple[Future[Any], str, str] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = self._cancelled = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of `fn(text)`, where `fn` is a function of a module and both texts are str.

        The future fails with WorkerDied if the process ends, with the same class if `fn` raised an error of ckpttool, and with
        RuntimeError if it raised anything else.
        """
        if kwargs or len(args) != 1 or fn.__module__ == "__main__" or "." in fn.__qualname__:
            raise ValueError(f"{fn.__module__}.{fn.__qualname__}{args}: only functions of modules, with one text.")
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("submit after shutdown")
            self._tasks.put((future, f"{fn.__module__}:{fn.__name__}", args[0]))
            if len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._serve, daemon=True, name="ckpttool-worker"))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers when all is done; with `cancel_futures`, kill them now."""
        with self._lock:
            self._closed = True
            self._cancelled |= cancel_futures
            for _ in self._threads:
                self._tasks.put(None)
            for worker in self._workers if cancel_futures else ():
                worker.process.kill()
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        """One thread: start a worker, and give it one request after another."""
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None:
            future, name, text = task
            if self._cancelled:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is not None and worker.process.poll() is not None:  # died while it had nothing to do
                    self._end(worker)
                    worker = None
                worker = worker or self._start()
                kind, answer = worker.call(name, text)
            except BaseException as e:
                self._end(worker)
                worker = None
                future.set_exception(e)
            else:
                if kind == RETURNED:
                    future.set_result(answer)
                else:
                    future.set_exception(_raised(answer))
        self._end(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._cancelled:
                raise WorkerDied("the workers were stopped")
            worker = _Worker()
            self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


class _Worker:
    """One process, and our end of its socket pair."""

    def __init__(self) -> None:
        path = "\0".join(map(str, sys.path)).encode("utf-8", "surrogateescape")
        self.stderr = os.fdopen(os.memfd_create("stderr-of-worker"), "r+b")  # in memory: a full disk loses no message
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", _CODE,
                 str(theirs.fileno()), str(len(path)), str(os.getpid()), "ckpttool-worker"],
                stdin=subprocess.DEVNULL, stdout=self.stderr, stderr=self.stderr, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.file = self.socket.makefile("rb")
        self._first = path

    def call(self, name: str, text: str) -> tuple[bytes, str]:
        """(RETURNED or RAISED, text) of one request.

        Raises:
            WorkerDied: with how it ended, and what it wrote to standard error.
        """
        answer, why = None, ""
        try:
            self.socket.sendall(self._first + message(REQUEST, name) + message(REQUEST, text))
            self._first = b""
            answer = read_message(self.file, RETURNED + RAISED)
        except OSError:  # a reset connection: it died with requests unread
            pass
        except ValueError as e:
            why = f" after it sent {e}"
        if answer is None:
            raise WorkerDied(f"worker process {self.process.pid} {self._end()}{why}{self._last_words()}")
        os.ftruncate(self.stderr.fileno(), 0)  # of this request; both processes share the position
        os.lseek(self.stderr.fileno(), 0, os.SEEK_SET)
        return answer

    def close(self) -> None:
        """End the process and wait for it."""
        self._end()
        self.file.close()
        self.socket.close()
        self.stderr.close()

    def _end(self) -> str:
        """Close its socket, and kill it if it does not end then; how it ended, in words."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        try:
            code = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"exited with code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _last_words(self) -> str:
        size = os.fstat(self.stderr.fileno()).st_size
        text = os.pread(self.stderr.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f": {text}" if text else ""


def _raised(answer: str) -> Exception:
    """The exception that a worker describes."""
    kind, text, trace = answer.split("\0", 2)
    if kind in errors.__all__ and isinstance(cls := getattr(errors, kind), type):
        return cls(text)  # type: ignore[no-any-return]
    e = RuntimeError(f"{kind}: {text}")
    e.add_note(trace)
    return e
