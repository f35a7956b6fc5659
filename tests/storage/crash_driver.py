"""Runs one conversion again and again and lets its Nth system call that can fail be the last one, or fail, for every N.

    python crash_driver.py WORK SRC TO OLD|- kill|ENOSPC|EIO|... [STEP]          with STEP for every STEPth N alone

Each round is a conversion of SRC to WORK/out in a forked child, with a line in the journal after every tensor, and files
finished as soon as three of them have all their chunks. With `kill` the child ends by os._exit just before the Nth call,
as SIGKILL would end it; with the name of an errno that call fails. Then WORK/out must be as before (absent, or a copy of
OLD) or complete. After `kill` the same conversion runs again in another child; after an error, which must be a
CkpttoolError, it runs again in the same process. It must succeed and leave nothing beside WORK/out. The last line
printed is JSON: {"calls": N, "continued": reruns that went on from the journal, "failed": rounds that ended in an error}.

The driver imports no torch and has one thread, so it can fork.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import ckpttool
from ckpttool.engine.copy import fill
from ckpttool.storage import partial
from ckpttool.storage.local_destination import LocalDestination

WRITES = (
    "open", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir",
)  # fmt: skip
READS = ("pread", "preadv")
DONE, CONTINUED, KILLED, FAILED, SURVIVED = 0, 10, 77, 11, 12


def files_of(path: Path) -> dict[str, bytes] | None:
    """{relative name: bytes}, or None where nothing is."""
    if not path.exists():
        return None
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "ckpttool.json"
    }


class Fault:
    """The nth of the counted calls ends the process, or fails once."""

    def __init__(self, n: int, error: int | None) -> None:
        self.n, self.error, self.count = n, error, 0
        names = WRITES + (READS if error else ())
        self.real: list[tuple[Any, str, Any]] = [(os, name, getattr(os, name)) for name in names]
        self.real += [(builtins, "open", builtins.open), (partial, "rename2", partial.rename_with_flags)]
        for module, name, real in self.real:
            setattr(module, name, self._counted(real))

    @property
    def met(self) -> bool:
        """Whether the call was reached."""
        return self.count >= self.n

    def _counted(self, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.n:
                if self.error is None:
                    os._exit(KILLED)
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        return call

    def lift(self) -> None:
        """No more fault."""
        for module, name, real in self.real:
            setattr(module, name, real)


def convert(src: str, out: Path, to: str, force: bool) -> int:
    """DONE, or CONTINUED when a journal was found."""
    done = ckpttool.convert(
        src,
        out,
        to=to,
        force=force,
        world_size=None if to in ("full", "hf", "universal") else 2,
        max_memory_bytes=72 << 20,
    )
    return CONTINUED if any("continued" in note for note in done.notes) else DONE


def attempt(src: str, out: Path, to: str, force: bool, fault: Fault | None) -> int:
    """One conversion with a fault and, when that was an error, one more without."""
    try:
        status = convert(src, out, to, force)
        return SURVIVED if fault and fault.met else status
    except ckpttool.CkpttoolError as e:
        if fault is None:
            raise
        fault.lift()
        wanted = os.strerror(fault.error or 0)
        assert wanted in str(e) or "cut off" in str(e), f"the error does not say {wanted!r}: {e}"
        before = files_of(out)
        again = convert(src, out, to, force or before is not None)
        assert again in (DONE, CONTINUED)
        return FAILED


def in_child(src: str, out: Path, to: str, force: bool, n: int | None, error: int | None) -> int:
    """Exit status of a child that does `attempt`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fill._JOURNAL_BYTES, LocalDestination.max_open_finished = 1, 3
            status = attempt(src, out, to, force, Fault(n, error) if n is not None else None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """All rounds."""
    work, src, to, old, kind = sys.argv[1:6]
    step = int(sys.argv[6]) if len(sys.argv) > 6 else 1
    error = None if kind == "kill" else getattr(errno, kind)
    out = Path(work) / "out"
    convert(src, out, to, False)  # also imports everything, so that children are quick
    new, before = files_of(out), files_of(Path(old)) if old != "-" else None
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    counts = {"calls": 0, "continued": 0, "failed": 0}
    for n in range(1, 10_000, step):
        if old != "-":
            (shutil.copytree if Path(old).is_dir() else shutil.copy)(old, out)
        status = in_child(src, out, to, old != "-", n, error)
        finished = status == DONE  # the call was not reached
        found = files_of(out)
        where = f"call {n}, {kind}: "
        assert status in (DONE, KILLED, FAILED, SURVIVED), f"{where}exit {status}"
        assert found in (before, new), f"{where}neither as before nor complete: {sorted(found or ())}"
        if status == KILLED:
            status = in_child(src, out, to, found is not None, None, None)
            counts["continued"] += status == CONTINUED
            assert status in (DONE, CONTINUED), f"{where}the rerun ended with {status}"
        counts["failed"] += status == FAILED
        assert files_of(out) == new, f"{where}the rerun wrote something else"
        left = [x for x in os.listdir(work) if x != out.name]
        assert not left or status == SURVIVED, f"{where}left behind {left}"
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        for x in os.listdir(work):
            shutil.rmtree(Path(work) / x) if (Path(work) / x).is_dir() else (Path(work) / x).unlink()
        if finished:
            counts["calls"] = n - 1
            break
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
