"""Another Python for the ranks of a run: what it must have, and how it comes to this ckpttool.

    check_interpreter("/venvs/old/bin/python", "cpu", folder, 600.0, transformers=True)
    make_rank_environment(folder)     the environment variables of its ranks

It has a torch and packages of its own. Of ours it gets ckpttool alone, from a folder that has nothing else.

`python -P -m ckpttool.resume.ranks.interpreter PACKAGE...` is what `check_interpreter` starts: it prints
{"packages": {name: version or null}}, imports torch, and prints {"gpu": bool}.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from typing import Any

from ...errors import CkpttoolError, MissingPackage, UsageError, argument

__all__ = ["check_interpreter", "make_rank_environment", "naming_interpreter"]

#: What draws for people, which no rank does.
_OF_THE_COMMAND = ("rich", "typer")


def make_rank_environment(folder: str) -> dict[str, str]:
    """Return the environment variables for ranks in another Python: this process's, with this ckpttool first on
    PYTHONPATH.

    A folder of links to ckpttool's files is made in `folder` for that; it must not exist yet.
    """
    package, converters = (import_module(name).__path__[0] for name in ("ckpttool", "ckpttool.converters"))
    links = {name: os.path.join(package, name) for name in os.listdir(package)} | {"converters": converters}
    code = os.path.join(folder, "code")
    os.makedirs(os.path.join(code, "ckpttool"))
    for name, path in links.items():
        os.symlink(os.path.abspath(path), os.path.join(code, "ckpttool", name))
    own = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([code, *([own] if own else [])])}


def check_interpreter(python: str, device: str, folder: str, timeout: float, transformers: bool) -> None:
    """Refuse a Python that cannot run ranks of this ckpttool; it is started once, and imports its torch.

    Args:
        python: the program, as the user named it.
        device: where the ranks compute, "cuda" or "cpu".
        folder: an existing folder for files.
        timeout: seconds that it may take.
        transformers: whether the ranks need that package.

    Raises:
        UsageError: there is no such program, it is no Python from 3.11 on, its torch cannot be imported or sees no GPU.
            MissingPackage: packages are missing or too old.
    """
    said = argument("against_python", python)
    if shutil.which(python) is None:
        raise UsageError(
            f"{said}: there is no such program. Name the python of another environment, such as /venvs/old/bin/python.",
            code="CKPT0224",
        )
    needed = dict(_list_needed_packages(transformers))
    words = [python, "-P", "-m", __spec__.name, *needed]
    try:
        done = subprocess.run(
            words, env=make_rank_environment(folder), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UsageError(f"{said}: it cannot be run: {e}.", code="CKPT0224") from None
    out, err = (text.decode(errors="replace").strip().splitlines() for text in (done.stdout, done.stderr))
    found: dict[str, Any] = {}
    for line in out:
        with suppress(ValueError, TypeError):  # what else its start prints
            found |= json.loads(line)
    why = err[-1].rstrip(".") if err else "it is no Python"
    if "packages" not in found:
        why = "it is older than Python 3.11" if err and "nknown option" in err[0] else why
        raise UsageError(f"{said}: it cannot run the reference: {why}.", code="CKPT0224")
    versions: dict[str, str | None] = found["packages"]
    absent = [n for n in needed if versions[n] is None]
    old = [n for n in needed if _split_version(versions[n] or needed[n]) < _split_version(needed[n])]
    if absent or old:
        wrong = [f"{', '.join(absent)} not installed"] if absent else []
        wrong += [f"{n} is {versions[n]}, and {needed[n]} is the oldest that ckpttool knows" for n in old]
        install = shlex.join([python, "-m", "pip", "install", *(f"{n}>={needed[n]}" for n in (*absent, *old))])
        raise MissingPackage(f"{said}: it cannot run the reference: {'; '.join(wrong)}. Type: {install}")
    if "gpu" not in found:
        raise UsageError(f"{said}: it cannot import torch: {why}.", code="CKPT0224")
    if device == "cuda" and not found["gpu"]:
        raise UsageError(
            f"{said}: its torch sees no GPU. Install a build of torch for CUDA there, or pass "
            f"{argument('device', 'cpu')}.",
            code="CKPT0224",
        )


def _list_needed_packages(transformers: bool) -> Iterator[tuple[str, str]]:
    """Yield (package, least version) of what ranks of this ckpttool need, as its own metadata has them; nothing where
    that is not installed.

    `transformers` is whether they need that package.
    """
    lines: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        lines = metadata.requires("ckpttool") or []
    for line in lines:
        found = re.match(r"([\w.-]+)>=([\d.]+)[^;]*(?:;.*extra == .(\w+))?", line)
        if found is None or found[1] in _OF_THE_COMMAND:
            continue
        if found[3] is None or (found[3], found[1]) in (("torch", "torch"), ("torch", "transformers" * transformers)):
            yield found[1], found[2]


def _split_version(version: str) -> list[int]:
    """Return the numbers of a version, for comparisons: [2, 10, 0] for "2.10.0"."""
    return [int(x) for x in re.findall(r"\d+", version)]


@contextmanager
def naming_interpreter(python: str | None) -> Iterator[None]:
    """While the block runs, add a note that names the Python of the ranks to ckpttool's errors; none if `python` is
    None."""
    try:
        yield
    except CkpttoolError as e:
        if python is not None:
            e.add_note(f"the ranks of the reference run in {python} ({argument('against_python')})")
        raise


def _print_versions(packages: list[str]) -> None:
    """Print the versions of packages, and then, once torch is imported, whether it sees a GPU: JSON for
    `check_interpreter`."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    print(json.dumps({"packages": versions}), flush=True)  # noqa: T201
    import torch

    print(json.dumps({"gpu": torch.cuda.is_available()}))  # noqa: T201


if __name__ == "__main__":
    _print_versions(sys.argv[1:])
