"""An Executor of processes on this machine, for functions that take one text and return one.

`concurrent.futures.ProcessPoolExecutor` has three faults here: its workers import the caller's `__main__` again, one
worker that dies fails all futures, and workers outlive a parent that was killed. Here each worker is a new interpreter
that runs `local_worker`, and a thread waits for its answers. When the worker dies, that thread fails the one future
that the worker had with WorkerDied, and starts another process for the next request.

After `prepare`, workers are copies of one process that has done what all of them need, such as reading a large index.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, Protocol

from ... import errors
from .local_worker import (
    FORK,
    RAISED,
    REQUEST,
    RETURNED,
    WAIT,
    encode_message,
    encode_template_message,
    read_message,
    serve_as_template,
    serve_as_worker,
)

__all__ = ["LocalProcesses", "WorkerDied"]

#: sys.path comes first, so that workers import what this process would: an editable install, PYTHONPATH, what a program
#: added. The current folder, which `python -c`, a prompt or a notebook has on it, is left out: it may be that of a
#: checkpoint.
_CODE = """
import os, sys
file = open(int(sys.argv[1]), "rb")
given, own = file.read(int(sys.argv[2])).decode("utf-8", "surrogateescape").split("\\0"), set(sys.path)
sys.path[:] = [p for p in given if p in own or (p and not (os.path.exists(p) and os.path.samefile(p, ".")))]
from ckpttool.engine.workers import local_worker
getattr(local_worker, sys.argv[3])(file, int(sys.argv[4]))
"""

#: Seconds that a worker may take to end by itself once its socket is closed.
_PATIENCE = 0.5

#: Seconds that a template may take to make a worker. One that takes longer is stopped, and is killed.
_ANSWERS = 10.0


class WorkerDied(BrokenExecutor):
    """A worker process ended before it answered. Other requests are not affected."""


class LocalProcesses(Executor):
    """Up to `count` worker processes; each is started when there is work for it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: queue.SimpleQueue[tuple[Future[object], str, str] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: set[_Worker] = set()
        self._lock = threading.Lock()
        self._closed = self._cancelled = False
        self._template: _Template | None = None
        self._serving = 0

    def prepare(self, fn: Callable[[str], str], text: str) -> None:
        """Call `fn(text)` once in a template process, of which all workers that start from now on are copies.

        If the call fails, or leaves a thread or a connection behind, workers start without it. Workers that were copied
        from an earlier template are killed, so no request may be running. The calling thread must not end before the
        workers do.
        """
        made = _Template()
        try:
            answer = made.call(f"{fn.__module__}:{fn.__name__}", text)
            os.close(os.pidfd_open(os.getpid()))
        except (WorkerDied, OSError):  # OSError: a kernel before 5.3
            answer = RAISED, ""
        if answer != (RETURNED, "ready"):
            made.close()
            return
        # workers that were copied from an earlier template do not know what this one has prepared
        with self._lock:
            earlier, self._template = self._template, made
            copies = [w.process for w in self._workers if isinstance(w.process, _Copy)]
        if earlier is not None:
            for process in copies:
                process.kill()
                process.wait()  # while the template is there, which knows how its copies ended
            earlier.close()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: object) -> Future[Any]:
        """Return the future of `fn(text)`, where `fn` is a function of a module and both texts are str.

        The future fails with WorkerDied if the process ends, with the same class if `fn` raised an error of ckpttool,
        and with RuntimeError if it raised anything else.

        Raises:
            ValueError: `fn` is no function of a module, or there is not just one argument.
            RuntimeError: `shutdown` was called before.
        """
        if kwargs or len(args) != 1 or fn.__module__ == "__main__" or "." in fn.__qualname__:
            raise ValueError(f"{fn.__module__}.{fn.__qualname__}{args}: only functions of modules, with one text.")
        future: Future[object] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("submit after shutdown")
            self._tasks.put((future, f"{fn.__module__}:{fn.__name__}", args[0]))
            if len(self._threads) < self._count:
                self._serving += 1
                self._threads.append(threading.Thread(target=self._serve_requests, daemon=True, name="ckpttool-worker"))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers when all requests are done; with `cancel_futures`, kill them now. With `wait`, return only
        when they have ended."""
        with self._lock:
            self._closed = True
            self._cancelled |= cancel_futures
            for _ in self._threads:
                self._tasks.put(None)
            for worker in self._workers if cancel_futures else ():
                worker.process.kill()
            if not self._serving:
                self._end_template()
        for thread in self._threads if wait else ():
            thread.join()

    def _serve_requests(self) -> None:
        """Take requests from the queue and have one worker, which is started when it is needed, answer them one after
        another. This is the loop of one thread."""
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
                worker = worker or self._start_worker()
                kind, answer = worker.call(name, text)
            except BaseException as e:
                self._end(worker)
                worker = None
                future.set_exception(e)
            else:
                if kind == RETURNED:
                    future.set_result(answer)
                else:
                    future.set_exception(_decode_exception(answer))
        self._end(worker)
        with self._lock:
            self._serving -= 1
            if self._closed and not self._serving:
                self._end_template()

    def _start_worker(self) -> _Worker:
        """Start a worker and return it.

        Raises:
            WorkerDied: `shutdown` has cancelled the work.
        """
        with self._lock:
            if self._cancelled:
                raise WorkerDied("the workers were stopped")
            worker = _Worker(self._make_process)
            self._workers.add(worker)
        return worker

    def _make_process(self, theirs: socket.socket, stderr: BinaryIO) -> tuple[_Process, bytes]:
        """Make a process that serves requests at a socket: a copy of the template, or a new one if there is no
        template. The caller holds the lock.

        Args:
            theirs: the end of the socket pair that the process gets.
            stderr: the file for its standard output and standard error.

        Returns:
            (the process, bytes that are sent to it before the first request).
        """
        if self._template is not None:
            try:
                return self._template.copy(theirs, stderr), b""
            except (WorkerDied, OSError):  # the kernel ends its workers with it
                self._end_template()
        return _spawn_process(serve_as_worker, theirs, stderr)

    def _end_template(self) -> None:
        """End the template, the process that workers are copied from, if there is one."""
        made, self._template = self._template, None
        if made is not None:
            made.close()

    def _end(self, worker: _Worker | None) -> None:
        """End a worker and remove it from the set of workers; do nothing for None."""
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


class _Process(Protocol):
    """What we use of a process: of subprocess.Popen, or of `_Copy`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def _spawn_process(serve: Callable[..., None], theirs: socket.socket, stderr: BinaryIO) -> tuple[_Process, bytes]:
    """Start a new Python process that runs a function of `local_worker`.

    Args:
        serve: the function.
        theirs: the end of the socket pair that the process gets.
        stderr: the file for its standard output and standard error.

    Returns:
        (the process, bytes that are sent to it before the first request: its sys.path).
    """
    path = "\0".join(map(str, sys.path)).encode("utf-8", "surrogateescape")
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-X",
            "faulthandler",
            "-c",
            _CODE,
            str(theirs.fileno()),
            str(len(path)),
            serve.__name__,
            str(os.getpid()),
            "ckpttool-worker",
        ],
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        pass_fds=[theirs.fileno()],
    )
    return process, path


class _Worker:
    """One process, and our end of its socket pair."""

    def __init__(self, made: Callable[[socket.socket, BinaryIO], tuple[_Process, bytes]]) -> None:
        """Start the process.

        Args:
            made: starts it, given its end of the socket pair and the file for its standard error; returns (the process,
                bytes to send to it before the first request).
        """
        self.stderr = os.fdopen(os.memfd_create("stderr-of-worker"), "r+b")  # in memory: a full disk loses no message
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process, self._first = made(theirs, self.stderr)
        self.file = self.socket.makefile("rb")

    def call(self, name: str, text: str) -> tuple[bytes, str]:
        """Have the process call a function with a text, and return (RETURNED or RAISED, the answer).

        Args:
            name: the function, "module:function".

        Raises:
            WorkerDied: the process ended; the message says how, and what it wrote to standard error.
        """
        answer, why = None, ""
        try:
            self.socket.sendall(self._first + encode_message(REQUEST, name) + encode_message(REQUEST, text))
            self._first = b""
            answer = read_message(self.file, RETURNED + RAISED)
        except OSError:  # a reset connection: it died with requests unread
            pass
        except ValueError as e:
            why = f" after it sent {e}"
        if answer is None:
            raise WorkerDied(f"worker process {self.process.pid} {self._end()}{why}{self._describe_stderr()}")
        os.ftruncate(self.stderr.fileno(), 0)  # of this request; both processes share the position
        os.lseek(self.stderr.fileno(), 0, os.SEEK_SET)
        return answer

    def close(self) -> None:
        """End the process, wait for it, and close the files to it."""
        self._end()
        self.file.close()
        self.socket.close()
        self.stderr.close()

    def _end(self) -> str:
        """Close the socket, kill the process if it does not end in time, and return how it ended, in words."""
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

    def _describe_stderr(self) -> str:
        """Return the last 4000 bytes that the process wrote to standard error, as the end of a message, ": TEXT"; "" if
        it wrote nothing."""
        size = os.fstat(self.stderr.fileno()).st_size
        text = os.pread(self.stderr.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f": {text}" if text else ""


class _Template(_Worker):
    """A process that has prepared what workers need, and makes them."""

    def __init__(self) -> None:
        super().__init__(partial(_spawn_process, serve_as_template))
        self._lock = threading.Lock()
        self._silent = False  # whether an answer is overdue, so that the next one might be that

    def copy(self, theirs: socket.socket, stderr: BinaryIO) -> _Copy:
        """Fork the template process into a worker that serves at a socket, and return the worker's process.

        Args:
            theirs: the end of the socket pair that the worker gets.
            stderr: the file for its standard output and standard error.

        Raises:
            TimeoutError: the template does not answer.
            WorkerDied, OSError: the template has ended, or could not fork.
        """
        with self._lock:
            socket.send_fds(self.socket, [encode_template_message(FORK, 0)], [theirs.fileno(), stderr.fileno()])
            return _Copy(self, int(self._read_answer()))

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a worker that has ended, negative for a signal, like Popen.returncode.

        Args:
            pid: the process id of the worker.
        """
        with self._lock:
            try:
                self.socket.sendall(encode_template_message(WAIT, pid))
                return int(self._read_answer())
            except (WorkerDied, OSError):
                return -signal.SIGKILL  # what the kernel does to the workers of a template that has ended

    def _read_answer(self) -> str:
        """Return the text of the template's next answer.

        Raises:
            TimeoutError: this or an earlier answer did not come within `_ANSWERS` seconds.
            WorkerDied: the template has ended.
        """
        if self._silent or not select.select([self.socket], [], [], _ANSWERS)[0]:
            self._silent = True
            raise TimeoutError("the process that makes workers does not answer")
        answer = read_message(self.file, RETURNED)
        if answer is None:
            raise WorkerDied("the process that makes workers has ended")
        return answer[1]


class _Copy:
    """A worker that a template has made: its child, not ours."""

    def __init__(self, made_by: _Template, pid: int) -> None:
        """Take the template that forked the process, and the id of the process, which must not have been waited for
        yet."""
        self.pid, self._template = pid, made_by
        self._code: int | None = None
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit code of the worker process, negative for a signal; None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit code; `timeout` is in seconds, None waits for ever.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._code is None:
            if not select.select([self._fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            self._code = self._template.exit_code(self.pid)
            os.close(self._fd)
        return self._code

    def kill(self) -> None:
        """Kill the process, if it is not known to have ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def _decode_exception(answer: str) -> Exception:
    """Return the exception that a worker's answer describes: class name, message and traceback, separated by null
    bytes. A class that is none of ckpttool's errors becomes RuntimeError."""
    kind, text, trace = answer.split("\0", 2)
    if kind in errors.__all__ and isinstance(cls := getattr(errors, kind), type):
        return cls(text)  # type: ignore[no-any-return]
    e = RuntimeError(f"{kind}: {text}")
    e.add_note(trace)
    return e
