"""What transformers answers to one question, asked once in a run of the tests.

Hub names and descriptions of flat parameters come from a child process that imports transformers, 5 s of CPU each time. A
question is a text, and its answer depends on nothing else. Here a fork of one process that has imported transformers
answers it, and every other test that has the question, in whichever worker or rank, gets the same bytes. Commands that
tests start as processes of their own ask the real child.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

from ckpttool.formats import sandbox
from ckpttool.huggingface import hub_names, model_names

_answering: list[subprocess.Popen[bytes]] = []


def asked_once(function: str, argument: str, work_bytes: int, text: bytes = b"") -> bytes:
    """`sandbox.run_in_child`, with a memory in the folder $ANSWERS. What fails is asked of the real child, each time."""
    question = hashlib.sha256(repr((function, argument, text)).encode()).hexdigest()
    with open(Path(os.environ["ANSWERS"]) / question, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        answer = file.read()
        if not answer:
            answer = _asked(function, argument, text, file.name + ".new")
            if not answer:
                answer = sandbox.run_in_child(function, argument, work_bytes, text)
            file.write(answer)
    return answer


def remember() -> None:
    """Make this process ask so."""
    hub_names.run_in_child = model_names.run_in_child = asked_once


def _asked(function: str, argument: str, text: bytes, out: str) -> bytes:
    """The answer of a fork of our own process with transformers; nothing where it failed."""
    if not _answering:
        child = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _answering.append(child)
        atexit.register(_end, child)
    (child,) = _answering
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps([function, argument, text.decode(), out]).encode() + b"\n")
    child.stdin.flush()
    status = child.stdout.readline()
    assert status, "the process that answers has ended"
    try:
        return Path(out).read_bytes() if status == b"0\n" else b""
    finally:
        Path(out).unlink(missing_ok=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:  # a fork of this process has kept the pipe
        child.kill()
        child.wait()
    child.stdout.close()


def _answer(function: str, argument: str, text: str, out: str) -> None:
    module, _, name = function.partition(":")
    sys.stdin = SimpleNamespace(buffer=io.BytesIO(text.encode()))  # type: ignore[assignment]
    Path(out).write_bytes(getattr(importlib.import_module(module), name)(argument))


def main() -> None:
    """Fork for every line of stdin; the answer is the exit status of the fork."""
    import transformers.core_model_loading
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # and torch._dynamo, which every model imports
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    gc.collect()
    gc.freeze()  # so that no collection of a fork touches the pages that it shares
    for line in sys.stdin.buffer:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _answer(*json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
