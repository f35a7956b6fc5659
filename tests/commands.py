"""`ckpttool` as a program, run inside the process of the test: the same entry point, streams and exit status.

A process of its own takes half a second of CPU more. What is about a process (signals, closed streams, limits, kills) starts
one; so does tests/cli/test_cli.py once for each kind of outcome.
"""

from __future__ import annotations

import gc
import io
import logging
import signal
import subprocess
import sys
import warnings

import pytest

from ckpttool.cli.main import main


def ckpttool_here(*words: object) -> subprocess.CompletedProcess[str]:
    """What `ckpttool WORDS` prints, and its exit status."""
    args = ["ckpttool", *map(str, words)]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    status = 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", args)
        patch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
        patch.setattr(sys.modules["__main__"], "__package__", None)  # click's name of the program is argv[0] then
        patch.setattr(
            "ckpttool.watching.gentle.lower_priority", list
        )  # the process of the tests could not take it back
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        try:
            main()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
        finally:
            gc.enable()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    said = [stream.buffer.getvalue().decode() for stream in streams if isinstance(stream.buffer, io.BytesIO)]
    return subprocess.CompletedProcess(args, status, *said)
