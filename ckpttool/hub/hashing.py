"""The first of the two times that a push reads its source: SHA-256 of every file and BLAKE3 of every tensor, in one
pass.

Files are hashed in parallel; for each, one thread reads ahead, one computes SHA-256 and one BLAKE3 of the same block.
CRC32s of the source are checked along the way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1, sha256
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from ..engine.copy.dtypes import NOTHING, CastLosses
from ..engine.copy.fill import Progress
from ..engine.copy.record_crcs import CrcVerifier
from ..engine.copy.stream import Reader
from ..engine.opening import OpenCheckpoint
from ..errors import Interrupted
from .virtual_files import Content

__all__ = ["ByteCounter", "FileHashes", "compute_git_oid", "hash_contents", "hash_paths"]

A = TypeVar("A")
B = TypeVar("B")

_LARGE = 64 << 10  # a block of fewer bytes is hashed faster than handed to another thread


class FileHashes(NamedTuple):
    """The hashes of a file: its SHA-256, and the BLAKE3 of every tensor in it, in hex; and {tensor: what its cast could
    not hold}."""

    sha256: str
    tensors: dict[str, str]
    lost: dict[str, CastLosses]


def compute_git_oid(data: bytes) -> str:
    """Return the id that git gives a file with these bytes, in hex."""
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


def hash_contents(
    opened: OpenCheckpoint,
    files: Sequence[Content],
    jobs: int,
    progress: Progress,
    keep: Callable[[str, FileHashes], None],
) -> dict[str, FileHashes]:
    """Hash files that are made from a checkpoint, `jobs` at a time; returns {file: its hashes}.

    Args:
        opened: the checkpoint.
        files: the files, whose bytes are read from the checkpoint.
        progress: called with ("hash", bytes done, bytes in all).
        keep: called with (name, hashes) of each finished file, by one thread at a time.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to in the meantime. RemoteError: it cannot be
            read.
    """
    ckpt = opened.checkpoint
    crcs = CrcVerifier(ckpt.records)
    counter = ByteCounter("hash", sum(f.source_bytes for f in files), progress)

    def hash_one(content: Content) -> FileHashes:
        """Return the hashes of one file, after giving them to `keep`."""
        done = _hash_content(content, crcs, counter.add)
        with counter.lock:
            keep(content.name, done)
        return done

    out = dict(zip([f.name for f in files], _map_in_threads(hash_one, files, jobs, counter), strict=True))
    if next(crcs.missing_parts(), None) is not None:
        reader = Reader(opened.source, ckpt.files, ckpt.records)
        reader.crcs = crcs
        reader.finish()
    return out


def _hash_content(content: Content, crcs: CrcVerifier, count: Callable[[int], None]) -> FileHashes:
    """Hash one file and its tensors in one pass, and return the hashes.

    Args:
        content: the file.
        crcs: compares the CRC32s of the source during the pass.
        count: called with the number of source bytes that were hashed, block by block.

    Raises:
        Corrupt, SourceChanged: the source is damaged, or was written to. Interrupted: another thread has failed.
    """
    whole, tensors = sha256(content.head), {}
    lost: dict[str, CastLosses] = {}
    part: Any = None
    with ThreadPoolExecutor(1, "ckpttool-sha256") as helper:
        for block in content.blocks(crcs=crcs) if content.jobs else ():
            part = part or blake3()
            if len(block.data) >= _LARGE:
                other = helper.submit(whole.update, block.data)
                part.update(block.data)
                other.result()
            else:
                whole.update(block.data)
                part.update(block.data)
            if block.lost != NOTHING:
                lost[block.name] = lost.get(block.name, NOTHING).plus(block.lost)
            if block.last:
                tensors[block.name] = part.hexdigest()
                part = None
            n = block.source_bytes
            count(n)
    return FileHashes(whole.hexdigest(), tensors, lost)


def hash_paths(paths: dict[str, str], jobs: int, progress: Progress) -> dict[str, str]:
    """Hash files on the disk, and return {name: SHA-256 in hex}.

    Args:
        paths: {name: path}.
        jobs: number of files that are hashed at the same time.
        progress: called with ("hash", bytes done, bytes in all).

    Raises:
        OSError: a file cannot be read.
    """
    counter = ByteCounter("hash", sum(map(os.path.getsize, paths.values())), progress)

    def hash_one(path: str) -> str:
        """Return the SHA-256, in hex, of the file at this path."""
        whole, buffer = sha256(), memoryview(bytearray(4 << 20))
        with open(path, "rb", buffering=0) as f:
            while n := f.readinto(buffer):
                whole.update(buffer[:n])
                counter.add(n)
        return whole.hexdigest()

    return dict(zip(paths, _map_in_threads(hash_one, list(paths.values()), jobs, counter), strict=True))


class ByteCounter:
    """Adds up the bytes that several threads have dealt with, and reports them as progress.

    Once `stop` is set, `add` raises Interrupted, so that the other threads end when one has failed.
    """

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        """Count up to `total` bytes; `progress` is called with (`what`, bytes done, `total`)."""
        self.what, self.total, self.progress = what, total, progress
        self.passed = 0
        self.lock, self.stop = threading.Lock(), threading.Event()

    def add(self, n: int) -> None:
        """Add `n` bytes to the count, and report the progress; raises Interrupted once `stop` is set."""
        if self.stop.is_set():
            raise Interrupted("the hashing was stopped.")
        with self.lock:
            self.passed += n
            self.progress(self.what, self.passed, self.total)


def _map_in_threads(call: Callable[[A], B], items: Sequence[A], jobs: int, counter: ByteCounter) -> list[B]:
    """Call a function with each item, in `jobs` threads, and return the results in order. The first error is raised,
    and sets `counter.stop`, which ends the other threads."""
    with ThreadPoolExecutor(max(1, min(jobs, len(items))), "ckpttool-hash") as pool:
        try:
            return list(pool.map(call, items))
        except BaseException:
            counter.stop.set()
            raise
