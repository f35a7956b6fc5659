"""What is kept of a push between runs: the hashes of its files, so that a push that was cut does not read its source for
them again.

A file of JSON lines below $XDG_CACHE_HOME/ckpttool/push (or ~/.cache), named by `conversion.plan_id`, which covers the
identity of every source file and every option. A line speaks of a file that was hashed to its end, of the record of all
of them, or of a folder that was converted to the disk. A line that was cut off counts for nothing; files that nobody
wrote to for thirty days are removed. Hashes are no secrets, but the names of tensors are there: only the owner may read.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from .hashing import Hashed

__all__ = ["Journal"]

_KEPT_SECONDS = 30 * 86400


class Journal:
    """The lines of one plan; `files` {name: hashes}, `record` what ckpttool.json says, where the pass was finished,
    `staged` {folder: {"files": {name: [SHA-256, size, mtime_ns]}, "record": ...}}."""

    def __init__(self, plan: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self.folder = os.path.join(cache, "ckpttool", "push")
        self.path = os.path.join(self.folder, f"{plan[:40]}.jsonl")
        self.files: dict[str, Hashed] = {}
        self.record: dict[str, Any] | None = None
        self.staged: dict[str, dict[str, Any]] = {}
        for line in self._lines():
            self._take(line)

    def _lines(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        try:
            with open(self.path, encoding="utf-8", errors="replace") as f:
                lines = f.read().split("\n")[:-1]
        except OSError:
            return out
        for line in lines:
            try:
                said = json.loads(line) if line else None
            except ValueError:
                continue
            if isinstance(said, dict):
                out.append(said)
        return out

    def _take(self, line: dict[str, Any]) -> None:
        try:
            if "file" in line:
                self.files[str(line["file"])] = Hashed(str(line["sha256"]), dict(line["tensors"]))
            elif "record" in line:
                self.record = dict(line["record"])
            elif "staged" in line:
                self.staged[str(line["staged"])] = dict(line["of"])
        except (KeyError, TypeError, ValueError):
            pass

    def hashed(self, name: str, done: Hashed) -> None:
        """A file was hashed."""
        self._add({"file": name, "sha256": done.sha256, "tensors": done.tensors})

    def settled(self, record: dict[str, Any]) -> None:
        """All were, and this is what ckpttool.json will say."""
        self._add({"record": record})

    def stage(self, folder: str, of: dict[str, Any]) -> None:
        """A folder was converted and hashed."""
        self._add({"staged": folder, "of": of})

    def _add(self, line: dict[str, Any]) -> None:
        self._take(line)
        try:
            if not os.path.exists(self.path):
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                self._prune()
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, f"\n{json.dumps(line, separators=(',', ':'))}\n".encode())  # a line before may be cut off
            finally:
                os.close(fd)
        except OSError:
            pass  # a home that cannot be written to: the next run hashes again

    def _prune(self) -> None:
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if name.endswith(".jsonl") and os.lstat(path).st_mtime < time.time() - _KEPT_SECONDS:
                os.unlink(path)
