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

__all__ = ["describe_value", "main"]

#: The file that code in a malicious checkpoint makes, in the folder in which a function runs.
CANARY = "acid-canary"


def describe_value(value: object) -> object:
    """Convert a value that the tested program has loaded to plain data, which can be compared.

    Returns:
        [dtype, shape, SHA-256 of the elements, row-major] of a tensor of torch or an array of numpy; str, bool, int,
        float and None unchanged; at most 200 characters of `repr` for anything else.
    """
    if hasattr(value, "detach"):  # torch's, also a subclass that lies elsewhere
        import torch

        plain = value.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return [str(plain.dtype).removeprefix("torch."), list(plain.shape), hashlib.sha256(data).hexdigest()]
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and hasattr(value, "shape"):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return value if isinstance(value, str | bool | int | float | None) else repr(value)[:200]


def _import_program(path: str) -> object:
    """Import the Python file at `path`, and return the module.

    Raises:
        ImportError: it is not a Python file. Anything that the file raises.
    """
    spec = importlib.util.spec_from_file_location("acid_program", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module


def _describe_program(module: object, path: str) -> dict[str, object]:
    """Return the first answer of this process, which describes the tested program.

    Args:
        module: the module of the program.
        path: the program's file, whose stem is its name if it has no NAME.

    Returns:
        {"status": "ok", "name", "versions": {package: version}, "functions": those of load, save, list and verify that
        it has, "claims": {layout: parts} that it handles, None if it declares none, "saves": the layouts that it
        writes, "widens": whether it returns tensors as float32}.
    """
    return {
        "status": "ok",
        "name": str(getattr(module, "NAME", Path(path).stem)),
        "versions": {str(k): str(v) for k, v in getattr(module, "VERSIONS", {}).items()},
        "functions": [f for f in ("load", "save", "list", "verify") if callable(getattr(module, f, None))],
        "claims": {k: _as_list_of_texts(v) for k, v in module.CLAIMS.items()} if hasattr(module, "CLAIMS") else None,
        "saves": _as_list_of_texts(getattr(module, "SAVES", ())),
        "widens": bool(getattr(module, "WIDENS", False)),
    }


def _as_list_of_texts(given: Any) -> list[str]:
    """Return `given` as a list of strings: [given] if it is one string, otherwise its elements.

    A program may declare ("weights"), which is a string and not a tuple.
    """
    return [given] if isinstance(given, str) else list(given)


def _read_expected_tensors(folder: str) -> dict[str, object]:
    """Return {name: tensor} of a case, for the function `save` of the tested program.

    The tensors are those of torch if the program has imported it, otherwise arrays of numpy.

    Args:
        folder: the folder of the case.
    """
    read = importlib.import_module("safetensors.torch" if "torch" in sys.modules else "safetensors.numpy").load_file
    return dict(read(os.path.join(folder, "expected.safetensors")))


def _call_function(module: Any, request: Mapping[str, Any]) -> dict[str, object]:
    """Call the function of the tested program that a request names, and return what it returned.

    Returns:
        {"entries", "left_out"} of load, and of save, after which load is called on the result; {"names"} of list; {} of
        verify.

    Raises:
        TypeError: the function returned something else than it has to.
        Exception: anything that the function raises.
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
        module.save(_read_expected_tensors(request["folder"]), path, request["about"]["layout"])
    found, left_out = module.load(path, request["about"]), []
    if isinstance(found, tuple):
        found, left_out = found
    if not isinstance(found, Mapping):
        raise TypeError(f"load returned {type(found).__name__}, not a dict of names to tensors")
    return {"entries": {str(k): describe_value(v) for k, v in found.items()}, "left_out": sorted(map(str, left_out))}


def _shorten_error(error: BaseException) -> str:
    """Return the class and the message of an exception, without the middle of a message that has 1000 characters or
    more."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 1000 else f"{text[:400]} ...\n{text[-600:]}"


def _answer_in_fork(module: object, request: Mapping[str, object], report: str) -> None:
    """Answer a request in this process, a fork, and end the process.

    Args:
        report: the file to which the answer is written, as JSON.
    """
    os.setsid()
    with open(os.devnull, "r+b") as null:  # what the program prints is no part of the protocol
        for number in (0, 1, 2):
            os.dup2(null.fileno(), number)
    try:
        answer = {"status": "ok", **_call_function(module, request)}
    except BaseException as e:
        answer = {"status": "error", "message": _shorten_error(e)}
    with open(report + ".part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(report + ".part", report)
    os._exit(0)


def _wait_for_process(child: int, seconds: float) -> tuple[bool, int]:
    """Wait for a process; after `seconds`, kill it and its children.

    Returns:
        (whether it ended by itself, its status as `os.waitpid` returns it).
    """
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


def _answer_request(module: Any, request: dict[str, Any]) -> dict[str, object]:
    """Copy the case to a temporary folder, call the program's function there in a fork, and look for the canary.

    The canary is a file that code in a malicious checkpoint makes.

    Args:
        module: the tested program.
        request: {"function", "folder": of the case, "path": of the checkpoint in that folder, "about", "seconds": time
            limit}; "path" and a path in "about" are changed to those in the copy.

    Returns:
        {"status": "ok", "canary": whether there is one, and what `_call_function` returned}; with "message" instead of
        the latter if the status is "error", "hung" or "crashed".
    """
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
                _answer_in_fork(module, request, report)
            finally:
                os._exit(1)
        ended, status = _wait_for_process(child, request["seconds"])
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
    """Import the program at `path`, print its description, and answer requests from stdin until that ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        module = _import_program(path)
        introduction = _describe_program(module, path)
    except BaseException as e:  # also sys.exit of a script that is not made to be imported
        return print(json.dumps({"status": "error", "message": _shorten_error(e)}), file=answers)
    print(json.dumps(introduction), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer_request(module, json.loads(line))), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
