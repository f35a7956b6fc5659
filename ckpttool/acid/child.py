"""The process that runs a program of somebody: it calls functions of a Python file on checkpoints, each call in a fork.

It is started by its path, `python child.py PROGRAM`, and imports nothing of ckpttool, so that a program may have a
Python with other packages. It reads one request a line from stdin and writes one answer a line to stdout, both JSON:

    first answer  {"status": "ok", "name", "versions", "functions", "claims", "saves", "widens"}, or {"status": "error",
                  "message"} if it cannot be imported
    request       {"function", "folder", "path", "about", "seconds"}
    answer        {"status": "ok", "error", "crashed" or "hung", "message", "canary", "entries", "left_out", "names"}

`message` says why the status is not "ok". `entries` has {name: [dtype, shape, SHA-256 of the elements]} of tensors and
{name: the value} of others. A program's functions may print, end the process, or do anything: each runs in a fork with
a folder of its own and a time limit.
"""

from __future__ import annotations

import hashlib
import importlib
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
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module


def _introduce(module: Any, path: str) -> dict[str, Any]:
    """Return what a program says of itself: the first answer."""
    return {
        "status": "ok",
        "name": str(getattr(module, "NAME", Path(path).stem)),
        "versions": {str(k): str(v) for k, v in getattr(module, "VERSIONS", {}).items()},
        "functions": [f for f in ("load", "save", "list", "verify") if callable(getattr(module, f, None))],
        "claims": {k: _list_texts(v) for k, v in module.CLAIMS.items()} if hasattr(module, "CLAIMS") else None,
        "saves": _list_texts(getattr(module, "SAVES", ())),
        "widens": bool(getattr(module, "WIDENS", False)),
    }


def _list_texts(given: Any) -> list[str]:
    """Return a list of texts, of which one may be given alone: ("weights") is no tuple."""
    return [given] if isinstance(given, str) else list(given)


def _read_expected(folder: str) -> dict[str, Any]:
    """Return the tensors that a case holds, for a program to save: of torch, if the program has imported that, or else
    of numpy."""
    read = importlib.import_module("safetensors.torch" if "torch" in sys.modules else "safetensors.numpy").load_file
    return dict(read(os.path.join(folder, "expected.safetensors")))


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
        module.save(_read_expected(request["folder"]), path, request["about"]["layout"])
    found, left_out = module.load(path, request["about"]), []
    if isinstance(found, tuple):
        found, left_out = found
    if not isinstance(found, Mapping):
        raise TypeError(f"load returned {type(found).__name__}, not a dict of names to tensors")
    return {"entries": {str(k): describe(v) for k, v in found.items()}, "left_out": sorted(map(str, left_out))}


def _shorten(error: BaseException) -> str:
    """Return the class and the text of an error, without the middle of a long one."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 1000 else f"{text[:400]} ...\n{text[-600:]}"


def _run_in_fork(module: Any, request: Mapping[str, Any], report: str) -> None:
    """Answer a request in a process that ends with it; the answer is written to the file `report`."""
    os.setsid()
    with open(os.devnull, "r+b") as null:  # what the program prints is no part of the protocol
        for number in (0, 1, 2):
            os.dup2(null.fileno(), number)
    try:
        answer = {"status": "ok", **_call(module, request)}
    except BaseException as e:
        answer = {"status": "error", "message": _shorten(e)}
    with open(report + ".part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(report + ".part", report)
    os._exit(0)


def _wait(child: int, seconds: float) -> tuple[bool, int]:
    """Wait for a process, and kill it and its children after `seconds`: (whether it ended by itself, its status)."""
    end, ended, status = time.monotonic() + seconds, 0, 0
    try:
        while not ended and time.monotonic() < end:
            time.sleep(0.005)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:
        if not ended:
            for kill in (os.killpg, os.kill):  # its group is there once it has called setsid
                with suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return bool(ended), status


def _answer(module: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: copy the case to a folder of its own, call the function there, and look for the canary."""
    with tempfile.TemporaryDirectory(prefix="acid-") as work:
        case = os.path.join(work, "case")
        shutil.copytree(request["folder"], case, ignore=shutil.ignore_patterns("case.json", "expected*"))
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
            answer: dict[str, Any] = {"status": "hung", "message": f"no answer in {request['seconds']:g} s"}
        elif not os.path.exists(report):
            code = os.waitstatus_to_exitcode(status)
            how = f"status {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"
            answer = {"status": "crashed", "message": f"its process ended with {how}"}
        else:
            answer = json.loads(Path(report).read_text(encoding="utf-8"))
        answer["canary"] = os.path.exists(os.path.join(work, CANARY))
    return answer


def main(path: str) -> None:
    """Introduce the program in the file at `path`, and answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        module = _import_program(path)
        introduction = _introduce(module, path)
    except BaseException as e:  # also sys.exit of a script that is not made to be imported
        return print(json.dumps({"status": "error", "message": _shorten(e)}), file=answers)
    print(json.dumps(introduction), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(module, json.loads(line))), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
