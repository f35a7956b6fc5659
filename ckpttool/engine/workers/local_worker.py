"""What a worker process of `local_processes` runs: it takes requests from a socket pair, and puts answers into it.

A message is a kind (one byte), a length (eight bytes, little-endian) and that many bytes of UTF-8. A request is two
messages: the name of a function, `module:name`, and its argument. The answer is one: R and what the function returned,
or E and what it raised. Nothing is pickled. Standard input and output are not used, since libraries and child processes
may use them.

A template is such a process that answers one request, which prepares what all workers need, and then makes workers by
fork: they have it at once, and share its memory. It never has a second thread, so a fork finds no lock that another
thread holds.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import struct
import threading
from importlib import import_module
from typing import BinaryIO

__all__ = [
    "FORK",
    "RAISED",
    "REQUEST",
    "RETURNED",
    "WAIT",
    "die_with_parent",
    "encode_message",
    "encode_template_message",
    "read_message",
    "serve_as_template",
    "serve_as_worker",
]

REQUEST, RETURNED, RAISED = b"Q", b"R", b"E"
FORK, WAIT = b"F", b"W"  # to a template: with two descriptors, make a worker; say how the worker of this number ended

_HEADER = struct.Struct("<cQ")
_LONGEST = 1 << 32  # a longer message is not one of ours


def encode_message(kind: bytes, text: str) -> bytes:
    """Encode a message with a text, as it is sent: REQUEST, RETURNED or RAISED."""
    data = text.encode("utf-8", "surrogatepass")
    return _HEADER.pack(kind, len(data)) + data


def encode_template_message(kind: bytes, number: int) -> bytes:
    """Encode a message to a template, the process that forks workers: FORK or WAIT with a number. The number of WAIT is
    the process id of the worker to wait for; that of FORK is not used."""
    return _HEADER.pack(kind, number)


def read_message(file: BinaryIO, kinds: bytes) -> tuple[bytes, str] | None:
    """Read the next message and return (kind, text); None at the end of the file, even in the middle of a message.

    Args:
        kinds: the kinds that may come, one byte each.

    Raises:
        ValueError: the bytes are no message of one of these kinds.
    """
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return None
    kind, length = _HEADER.unpack(head)
    if kind not in kinds or length > _LONGEST:
        raise ValueError(f"{head!r} instead of a message")
    data = file.read(length)
    return None if len(data) < length else (kind, data.decode("utf-8", "surrogatepass"))


def serve_as_worker(file: BinaryIO, parent: int) -> None:
    """Answer requests until the other end of the socket pair is closed, or the parent process ends; then end this
    process.

    Args:
        file: the socket.
        parent: the id of the process that started this one.
    """
    _set_up_process(file, parent)
    _answer_requests(file)


def serve_as_template(file: BinaryIO, parent: int) -> None:
    """Answer one request, then fork workers on demand, until the other end of the socket pair is closed or the parent
    process ends; then end this process.

    The answer is "ready", or empty if workers cannot be copies, because the request left a thread or a connection that
    all of them would share.

    Args:
        file: the socket.
        parent: the id of the process that started this one.
    """
    _set_up_process(file, parent)
    name, argument = read_message(file, REQUEST), read_message(file, REQUEST)
    if name is None or argument is None:
        os._exit(0)
    answer = _call_by_name(name[1], argument[1])
    if answer.startswith(RETURNED):
        answer = encode_message(RETURNED, "ready" if _can_be_forked(file.fileno()) else "")
    gc.freeze()  # a worker that collects garbage would copy the pages of all that it shares
    control = socket.socket(fileno=os.dup(file.fileno()))
    control.sendall(answer)
    me = os.getpid()
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, _HEADER.size, 2, socket.MSG_WAITALL)
        if len(head) < _HEADER.size:
            os._exit(0)
        kind, number = _HEADER.unpack(head)
        if kind == WAIT:
            answer = encode_message(RETURNED, str(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
        elif (pid := os.fork()) == 0:
            theirs, stderr = descriptors
            os.dup2(stderr, 1)
            os.dup2(stderr, 2)
            os.close(stderr)
            control.close()
            file.close()
            made = open(theirs, "rb")  # noqa: SIM115
            _set_up_process(made, me)
            _answer_requests(made)
        else:
            answer = encode_message(RETURNED, str(pid))
            for fd in descriptors:
                os.close(fd)
        control.sendall(answer)


def _can_be_forked(served: int) -> bool:
    """Tell whether this process can be forked: it has one thread, and no socket except for the one with the file
    descriptor `served`."""
    with os.scandir("/proc/self/fd") as open_files:
        sockets = [e.name for e in open_files if os.readlink(e.path).startswith("socket:")]
    return sockets == [str(served)] and len(os.listdir("/proc/self/task")) == 1


def _set_up_process(file: BinaryIO, parent: int) -> None:
    """Set up a serving process: ignore Ctrl-C, disable garbage collection, and end when the process `parent`, which
    started it, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    gc.disable()  # as in the command: a large index is millions of objects that live until the end
    die_with_parent(parent)
    os.set_inheritable(file.fileno(), False)


def _answer_requests(file: BinaryIO) -> None:
    """Answer requests from a socket's file one after another; end the process when there are no more."""
    requests: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(file, requests), daemon=True).start()
    while True:
        answer = memoryview(_call_by_name(*requests.get()))
        try:
            while answer:
                answer = answer[os.write(file.fileno(), answer) :]
        except OSError:  # the parent has closed its end
            os._exit(0)


def _read_requests(file: BinaryIO, requests: queue.SimpleQueue[tuple[str, str]]) -> None:
    """Read requests, (function, argument), into a queue, and end the process at the end of the file. It runs in a
    thread of its own, so that a busy worker ends with its parent, too."""
    try:
        while (name := read_message(file, REQUEST)) and (argument := read_message(file, REQUEST)):
            requests.put((name[1], argument[1]))
    finally:
        os._exit(0)


def _call_by_name(name: str, argument: str) -> bytes:
    """Call the function `module:name` with a text, and return the encoded message with its result, or with the
    exception that it raised."""
    try:
        module, _, function = name.partition(":")
        return encode_message(RETURNED, getattr(import_module(module), function)(argument))
    except BaseException as e:
        import traceback

        return encode_message(RAISED, "\0".join((type(e).__name__, str(e), "".join(traceback.format_exception(e)))))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit at once if the parent process has
    already ended.

    Args:
        parent: the id of the process that started this one.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(0)
