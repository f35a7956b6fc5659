"""Run one of our own functions in a child process with limited memory and time, and get its bytes back.

Two things need that. The C unpickler is fifty times faster than our own on a 100 MB `.metadata`, but has no bounds of
its own. And what transformers knows of a model's names costs an import of torch, which the process that copies must
not carry. The child gets no more than a path or a text and gives back bytes; it is not trusted to be well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, cast

from ..errors import CkpttoolError, Corrupt, Unsafe

if TYPE_CHECKING:
    from ..codes import Code

__all__ = ["run_in_child"]

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
    sys.stderr.write(f"{e.code} {e}"); sys.stderr.flush(); sys.exit(100 + e.exit_code)
except MemoryError:
    sys.stderr.write("not enough memory"); sys.exit(120)
except Exception as e:
    sys.stderr.write(f"{type(e).__name__}: {e}"); sys.exit(121)
sys.stdout.buffer.write(out); sys.stdout.buffer.flush()
import os; os._exit(0)
"""


def run_in_child(function: str, argument: str, work_bytes: int, text: bytes = b"") -> bytes:
    """Call a function of ours with one string in a child process of limited time and memory, and return the bytes that
    it returns.

    Args:
        function: "module:function".
        argument: the string, which messages begin with.
        work_bytes: bytes of input, which bound its time and memory; 0 for 20 seconds and no bound of memory.
        text: what the child reads from stdin.

    Raises:
        CkpttoolError: as the function raised it.
        Unsafe: it took more than its limits.
        Corrupt: it failed.
    """
    seconds = 20 + work_bytes // (2 << 20)
    memory = (1 << 30) + 24 * work_bytes if work_bytes else 0
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CODE, function, argument, str(seconds), str(memory)],
        input=text,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        return done.stdout
    if done.returncode < 0 or done.returncode == 120:
        if not work_bytes:
            raise Unsafe(
                f"{argument[:200]} took more than {seconds} s for what config.json describes, which no model that is "
                "trained does.",
                code="CKPT0704",
            )
        raise Unsafe(
            f"{argument[:200]}: reading it took more than {seconds} s or {memory >> 20} MiB, which nothing genuine of "
            f"{work_bytes} bytes does.",
            code="CKPT0704",
        )
    kinds: list[type[CkpttoolError]] = [Unsafe, Corrupt, *CkpttoolError.__subclasses__()]
    for kind in kinds:
        if kind.exit_code == done.returncode - 100:
            code, _, said = message.partition(" ")
            raise kind(f"{argument[:200]}: {said}", code=cast("Code", code))
    raise Corrupt(f"{argument[:200]}: {message[-2000:] or 'the reader failed'}")
