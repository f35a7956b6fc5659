"""Run one of our own functions in a child process with limited memory and time, and get its bytes back.

Two things need that. The C unpickler is fifty times faster than our own on a 100 MB `.metadata`, but has no bounds of
its own. And what transformers knows of a model's names costs an import of torch, which the process that copies must
not carry. The child gets no more than a path or a text and gives back bytes; it is not trusted to be well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeVar, cast

from .. import errors
from ..errors import CkpttoolError, Corrupt, Unsafe

if TYPE_CHECKING:
    from ..codes import Code

__all__ = ["run_in_child", "stream_from_child"]

T = TypeVar("T")

_CODE = """
import sys
try:
    import resource
    seconds, memory = int(sys.argv[3]), int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if memory: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
except (ImportError, ValueError, OSError):
    pass
from importlib import import_module
from ckpttool.errors import CkpttoolError
module, _, name = sys.argv[1].partition(":")
import gc; gc.disable()
try:
    out = getattr(import_module(module), name)(sys.argv[2])
except CkpttoolError as e:
    kind = next(c.__name__ for c in type(e).__mro__ if c.__module__ == "ckpttool.errors")
    sys.stderr.write(f"\\0{kind} {e.code} {e}"); sys.stderr.flush(); sys.exit(119)
except MemoryError:
    sys.stderr.write("not enough memory"); sys.exit(120)
except Exception as e:
    sys.stderr.write(f"{type(e).__name__}: {e}"); sys.exit(121)
for part in [out] if isinstance(out, bytes) else out: sys.stdout.buffer.write(part)
sys.stdout.buffer.flush()
import os; os._exit(0)
"""


def run_in_child(function: str, argument: str, work_bytes: int, text: bytes = b"") -> bytes:
    """Call a function of ours with one string in a child process of limited time and memory, and return the bytes that
    it returns. Errors are those of `stream_from_child`.

    Args:
        function: "module:function"; it reads all of stdin first, and then returns bytes or yields parts of them.
        argument: the string, with which messages begin.
        work_bytes: size of the input in bytes, which determines the limits; 0 for 20 seconds and unlimited memory.
        text: what the child reads from stdin.
    """
    return stream_from_child(function, argument, work_bytes, [text], lambda out: out.read())


def stream_from_child(
    function: str, argument: str, work_bytes: int, data: Iterable[bytes], receive: Callable[[IO[bytes]], T]
) -> T:
    """Call a function of ours with one string in a child process of limited time and memory, and return what `receive`
    makes of its output, which is read while it arrives.

    Args:
        function: "module:function"; it reads all of stdin first, and then returns bytes or yields parts of them.
        argument: the string, with which messages begin.
        work_bytes: size of the input in bytes, which determines the limits; 0 for 20 seconds and unlimited memory.
        data: what the child reads from stdin, in blocks.
        receive: reads the output of the function; raises EOFError if it ends too early.

    Raises:
        CkpttoolError: as the function raised it.
        Unsafe: it exceeded its limits.
        Corrupt: it failed otherwise.
    """
    from tempfile import TemporaryFile  # inspect starts sooner without

    seconds = 20 + work_bytes // (2 << 20)
    memory = (1 << 30) + 24 * work_bytes if work_bytes else 0
    with TemporaryFile() as stderr:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, function, argument, str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError), child.stdin as to:
                for block in data:
                    to.write(block)
            complete = False
            with child.stdout as out, suppress(EOFError):  # which is the child's, and it says why
                found, complete = receive(out), True
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").strip()
    if child.returncode or not complete:
        raise _make_child_error(child.returncode, said, argument, work_bytes, seconds, memory)
    return found


def _make_child_error(
    status: int, message: str, argument: str, work_bytes: int, seconds: int, memory: int
) -> CkpttoolError:
    """Return the error that a child process failed with.

    Args:
        status: its exit status; 0 where it returned too few bytes.
        message: what it wrote on stderr.
        argument, work_bytes: as `stream_from_child` was given them.
        seconds, memory: its limits, in seconds of CPU and in bytes.
    """
    if (status < 0 or status == 120) and not work_bytes:
        return Unsafe(
            f"{argument[:200]} took more than {seconds} s for what config.json describes, which no model that is "
            "trained does.",
            code="CKPT0704",
        )
    if status < 0 or status == 120:
        return Unsafe(
            f"{argument[:200]}: reading it took more than {seconds} s or {memory >> 20} MiB, which nothing genuine of "
            f"{work_bytes} bytes does.",
            code="CKPT0704",
        )
    if status == 119:
        kind, code, said = message.rpartition("\0")[2].split(" ", 2)  # libraries may have warned before it
        begins = "" if said.startswith(argument) else f"{argument[:200]}: "
        made: CkpttoolError = getattr(errors, kind)(f"{begins}{said}", code=cast("Code", code))
        return made
    return Corrupt(f"{argument[:200]}: {message[-2000:] or 'the reader failed'}")
