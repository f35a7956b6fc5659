"""The process that runs a program of somebody: it calls functions of a Python file on checkpoints, each call in a fork.

It is started by its path, `python child.py PROGRAM`, and imports nothing of ckpttool, so that a program may have a
Python with other packages. It reads one request a line from stdin and writes one answer a line to stdout, both JSON:

    first answer  {"name", "versions", "functions", "claims", "saves", "widens"}, or {"error"} if it cannot be imported
    request       {"function", "folder", "path", "about", "layout", "expected", "seconds"}
    answer        {"status": "ok", "error", "crashed" or "hung", "message", "canary", "entries", "left_out", "names"}

`entries` has {name: [dtype, shape, SHA-256 of the elements]} of tensors and {name: the value} of others. A program's
functions may print, end the process, or do anything: each runs in a fork with a folder of its own and a time limit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["describe", "main"]

FUNCTIONS = ("load", "save", "list", "verify")
#: The file that code in a malicious checkpoint makes, in the folder in which a function runs.
CANARY = "acid-canary"


def describe(value: Any) -> Any:
    """Return [dtype, shape, SHA-256 of the elements, row-major] of a tensor of torch or an array of numpy, and any
    other value as JSON has it, or as its text."""
    if hasattr(value, "detach"):  # torch's, also a subclass that lies elsewhere
        import torch

        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return [str(plain.dtype).removeprefix("torch."), list(plain.shape), hashlib.sha256(data).hexdigest()]
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "shape"):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return value if isinstance(value, str | bool | int | float | None) else repr(value)[:200]


def _import_program(path: str) -> Any:
    """Return the module in the file at `path`."""
    spec = importlib.util.spec_from_file_location("acid_program", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module


def _introduce(module: Any, path: str) -> dict[str, Any]:
    """Return what a program says of itself: the first answer."""
    return {
        "name": str(getattr(module, "NAME", Path(path).stem)),
        "versions": {str(k): str(v) for k, v in getattr(module, "VERSIONS", {}).items()},
        "functions": [f for f in FUNCTIONS if callable(getattr(module, f, None))],
        "claims": {k: list(v) for k, v in module.CLAIMS.items()} if hasattr(module, "CLAIMS") else None,
        "saves": list(getattr(module, "SAVES", ())),
        "widens": bool(getattr(module, "WIDENS", False)),
    }


def _read_expected(path: str) -> dict[str, Any]:
    """Return the tensors of expected.safetensors for a program to save: of torch, if the program has imported that, or
    else of numpy."""
    from importlib import import_module

    read = import_module("safetensors.torch" if "torch" in sys.modules else "safetensors.numpy").load_file
    return dict(read(path))


def _call(module: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call the function that a request names, and return what it gave: `entries` and `left_out` of load and save, where
    save is followed by a load, `names` of list, nothing of verify.

    Raises:
        Exception: whatever the function raises. TypeError: it returned something else than it has to.
    """
    function = request["function"]
    if function == "verify":
        module.verify(request["path"], request["about"])
        return {}
    if function == "list":
        return {"names": sorted(map(str, module.list(request["path"], request["about"])))}
    path = request["path"]
    if function == "save":
        path = os.path.join(os.getcwd(), "saved")
        module.save(_read_expected(request["expected"]), path, request["layout"])
    found, left_out = module.load(path, request["about"]), []
    if isinstance(found, tuple):
        found, left_out = found
    if not isinstance(found, Mapping):
        raise TypeError(f"load returned {type(found).__name__}, not a dict of names to tensors")
    return {"entries": {str(k): describe(v) for k, v in found.items()}, "left_out": sorted(map(str, left_out))}


def _run_in_fork(module: Any, request: Mapping[str, Any], report: str) -> None:
    """Answer a request in a process that ends with it; the answer is written to the file `report`."""
    os.setsid()
    with open(os.devnull, "r+b") as null:  # what the program prints is no part of the protocol
        for number in (0, 1, 2):
            os.dup2(null.fileno(), number)
    try:
        answer = {"status": "ok", **_call(module, request)}
    except BaseException as e:
        text = f"{type(e).__name__}: {e}"
        answer = {"status": "error", "message": text if len(text) < 1000 else f"{text[:400]} ...\n{text[-600:]}"}
    with open(report + ".part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(report + ".part", report)
    os._exit(0)


def _wait(child: int, seconds: float) -> tuple[bool, int]:
    """Wait for a process, and kill it and its children after `seconds`: (whether it ended by itself, its status)."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return True, status
            time.sleep(0.005)
    except KeyboardInterrupt:
        _kill(child)
        raise
    _kill(child)
    return False, os.waitpid(child, 0)[1]


def _kill(child: int) -> None:
    """Kill a process, and its group, which there is once it has called setsid."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _answer(module: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: copy the case to a folder of its own, call the function there, and look for the canary."""
    with tempfile.TemporaryDirectory(prefix="acid-") as work:
        case = os.path.join(work, "case")
        hidden = shutil.ignore_patterns("case.json", "expected.*")
        shutil.copytree(request["folder"], case, ignore=hidden)
        request["path"] = os.path.join(case, request["path"])
        about = request["about"]
        if "flat_layout" in about:
            about["flat_layout"] = os.path.join(case, about["flat_layout"])
        os.chdir(work)
        report = os.path.join(work, "report.json")
        child = os.fork()
        if not child:
            try:
                _run_in_fork(module, request, report)
            finally:
                os._exit(1)
        ended, status = _wait(child, request["seconds"])
        os.chdir("/")
        if not ended:
            answer: dict[str, Any] = {"status": "hung", "message": f"no answer in {request['seconds']} s"}
        elif not os.path.exists(report):
            answer = {
                "status": "crashed",
                "message": f"the process ended with status {os.waitstatus_to_exitcode(status)}",
            }
        else:
            answer = json.loads(Path(report).read_text(encoding="utf-8"))
        answer["canary"] = os.path.exists(os.path.join(work, CANARY))
    return answer


def main(path: str) -> None:
    """Introduce the program in the file at `path`, and answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        """Write an answer."""
        answers.write(json.dumps(answer) + "\n")

    try:
        module = _import_program(path)
        introduction = _introduce(module, path)
    except Exception as e:
        return say({"error": f"{type(e).__name__}: {e}"[:500]})
    say(introduction)
    for line in sys.stdin:
        say(_answer(module, json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
