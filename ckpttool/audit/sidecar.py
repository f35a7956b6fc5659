"""NAME.tar.zst.age.json: what is known of an encrypted archive without its key.

    {"schema", "archive": {what a listing shows}, "ciphertext": {"bytes", "sha256", "blake3", "block_bytes", "blocks"}}

BLAKE3 is a hash tree over the ciphertext; `blocks` are the SHA-256 of every 64 MiB of it, so that damage has a place. The
hash tree over the plain bytes is the Merkle root, in "archive".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from ..errors import Corrupt, UsageError
from ..fill import Progress
from ..jsontext import parse
from ..store import Source

__all__ = ["BLOCK", "ciphertext", "encode", "name", "read"]

BLOCK = 64 << 20
_SCHEMA = "ckpttool.sealed/1"
_PIECE = 4 << 20


def name(file: str) -> str:
    """What the sidecar of an encrypted archive is called."""
    return file + ".json"


def ciphertext(source: Source, file: str, progress: Progress) -> dict[str, Any]:
    """The hashes of a file as it lies there."""
    whole, tree = hashlib.sha256(), blake3()
    blocks = []
    size = source.size(file)
    for a in range(0, size, BLOCK):
        block = hashlib.sha256()
        for b in range(a, min(size, a + BLOCK), _PIECE):
            data = source.read(file, b, min(_PIECE, size - b))
            for h in (whole, tree, block):
                h.update(data)
            progress("hash", b + len(data), size)
        blocks.append(block.hexdigest())
    return {
        "bytes": size, "sha256": whole.hexdigest(), "blake3": tree.hexdigest(), "block_bytes": BLOCK, "blocks": blocks,
    }  # fmt: skip


def encode(archive: Mapping[str, Any], hashes: Mapping[str, Any]) -> bytes:
    """The sidecar of an archive with these facts and hashes."""
    said = {"schema": _SCHEMA, "archive": dict(archive), "ciphertext": dict(hashes)}
    return (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode()


def read(source: Source, file: str) -> dict[str, Any]:
    """What lies beside an encrypted archive.

    Raises:
        UsageError: nothing does. Corrupt, Unsafe: it is damaged.
    """
    what = f"{source.root}/{name(file)}"
    if not source.exists(name(file)):
        raise UsageError(f"{what} is missing; it says what is in {file}. Look inside with --identity instead.")
    said = parse(source.read_all(name(file), 256 << 20), what)
    parts = ("archive", "ciphertext")
    if (
        not isinstance(said, dict)
        or said.get("schema") != _SCHEMA
        or not all(isinstance(said.get(p), dict) for p in parts)
    ):
        raise Corrupt(f"{what} is no sidecar of an encrypted archive.")
    told = said["ciphertext"]
    blocks = told.get("blocks")
    if (
        not isinstance(blocks, list)
        or not all(isinstance(b, str) for b in blocks)
        or type(told.get("bytes")) is not int
    ):
        raise Corrupt(f"{what} is damaged: it does not say the hashes of the ciphertext.")
    return said
