"""The hashes of a push, kept between runs, so that an interrupted push does not compute them again.

A file of lines, each with a checksum and JSON, below $XDG_CACHE_HOME/ckpttool/push (or ~/.cache), named by
`plan_files.compute_plan_id`, which covers the identity of every source file and every option. A line describes a
completely hashed file, the record of all files, or a folder that was converted to disk. Damaged lines are ignored;
journals older than thirty days are removed. Hashes are not secret, but the journal contains names of tensors, so only
the owner may read it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from hashlib import sha256
from typing import Any

from ..engine.copy.dtypes import CastLosses
from .hashing import FileHashes

__all__ = ["Journal"]

_KEPT_SECONDS = 30 * 86400


class Journal:
    """The journal of one plan (None: nothing is kept); `files` {name: hashes}, `record` the content of ckpttool.json,
    once the pass is complete, `staged` {folder: {"files": {name: [SHA-256, size, mtime_ns]}, "record": ...}}."""

    def __init__(self, plan: str | None) -> None:
        """Read the journal of a plan, if there is one.

        Args:
            plan: hash of the source's files and all options, which names the journal's file; None to keep no journal.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self.folder = os.path.join(cache, "ckpttool", "push")
        self.path = None if plan is None else os.path.join(self.folder, f"{plan[:40]}.jsonl")
        self.files: dict[str, FileHashes] = {}
        self.record: dict[str, Any] | None = None
        self.staged: dict[str, dict[str, Any]] = {}
        for line in self._read_lines():
            self._apply_line(line)

    def _read_lines(self) -> list[dict[str, object]]:
        """Return the entries of the journal's file whose checksum is right; [] if there is no file."""
        if self.path is None:
            return []
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as f:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return []
                lines = f.read().split(b"\n")[:-1]
        except OSError:
            return []
        parts = (line.partition(b" ") for line in lines)
        return [json.loads(entry) for sum_, _, entry in parts if entry and sum_ == _compute_checksum(entry)]

    def _apply_line(self, line: dict[str, Any]) -> None:
        """Put the content of an entry into `files`, `record` or `staged`."""
        if "file" in line:
            lost = {n: CastLosses(*counts) for n, counts in line.get("lost", {}).items()}
            self.files[line["file"]] = FileHashes(line["sha256"], line["tensors"], lost)
        elif "record" in line:
            self.record = line["record"]
        elif "staged" in line:
            self.staged[line["staged"]] = line["of"]

    def drop(self) -> None:
        """Delete the file of the journal, if there is one."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)

    def add_hashes(self, name: str, done: FileHashes) -> None:
        """Add the hashes of the file `name` to the journal."""
        self._append_line({"file": name, "sha256": done.sha256, "tensors": done.tensors, "lost": done.lost})

    def add_record(self, record: dict[str, object]) -> None:
        """Add the content of ckpttool.json, which is known after all files were hashed, to the journal."""
        self._append_line({"record": record})

    def add_staged(self, folder: str, of: dict[str, object]) -> None:
        """Add a staging folder, whose files were written and hashed, to the journal.

        Args:
            folder: absolute path of the folder.
            of: {"files": {name: [SHA-256, size in bytes, time of modification in ns]}, "record": content of
                ckpttool.json}.
        """
        self._append_line({"staged": folder, "of": of})

    def _append_line(self, line: dict[str, object]) -> None:
        """Apply an entry, and append it to the journal's file; failure to write is ignored."""
        self._apply_line(line)
        if self.path is None:
            return
        try:
            if not os.path.exists(self.path):
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                self._remove_old_journals()
            fd = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                entry = json.dumps(line, separators=(",", ":")).encode()
                with open(fd, "ab", closefd=False) as f:
                    f.write(b"\n%b %b\n" % (_compute_checksum(entry), entry))  # a line before may be cut off
            finally:
                os.close(fd)
        except OSError:
            pass  # a home that cannot be written to: the next run hashes again

    def _remove_old_journals(self) -> None:
        """Delete the files of journals that are older than thirty days."""
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            if name.endswith(".jsonl") and os.lstat(path).st_mtime < time.time() - _KEPT_SECONDS:
                os.unlink(path)


def _compute_checksum(data: bytes) -> bytes:
    """Return the checksum of an entry's JSON: the first 32 hex digits of its SHA-256."""
    return sha256(data).hexdigest()[:32].encode()
