"""Small files next to an archive: the facts of an encrypted one, readable without its key, and legal holds.

NAME.tar.zst.age.json

    {"schema", "archive": {what a listing shows}, "ciphertext": {"bytes", "sha256", "blake3", "block_bytes", "blocks"}}

BLAKE3 is a hash tree over the ciphertext; `blocks` are the SHA-256 of every 64 MiB of it, so that damage can be
located. The hash tree over the plain bytes is the Merkle root, in "archive". "open" is the command that decrypts it
without ckpttool.

NAME.hold.json (NAME as the archive has it, with its .tar.zst)

    {"schema", "archive": NAME, "holds": [{"reason", "since", "by", "manifest_sha256", "created"}]}

The legal holds that `audit hold` placed, so that they survive the loss of the ledger and are copied along with the
folder. The ledger records them, too; a hold in either one counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from .. import bounded_json
from ..errors import CkpttoolError, Corrupt, RemoteError, UsageError, argument
from ..storage import urls
from ..storage.source import Source

if TYPE_CHECKING:
    from ..engine.copy.fill import Progress

__all__ = [
    "BLOCK",
    "HOLD",
    "HOLD_SCHEMA",
    "SEALED_SCHEMA",
    "encode_holds",
    "encode_sidecar",
    "get_hold_file_name",
    "get_sidecar_name",
    "hash_ciphertext",
    "read_holds",
    "read_sidecar",
    "write_small_file",
]

BLOCK = 64 << 20
HOLD = ".hold.json"
SEALED_SCHEMA, HOLD_SCHEMA = "ckpttool.sealed/1", "ckpttool.hold/1"
_MOST_HOLDS = 16 << 20  # bytes of a file of holds
_PIECE = 4 << 20


def get_sidecar_name(file: str) -> str:
    """Return the name of the sidecar of an encrypted archive, the JSON file next to it."""
    return file + ".json"


def hash_ciphertext(source: Source, file: str, progress: Progress) -> dict[str, Any]:
    """Hash an encrypted archive.

    Args:
        source, file: the store, and the name of the archive in it.
        progress: called with ("hash", bytes done, bytes in all).

    Returns:
        {"bytes": its size, "sha256", "blake3": of the complete file, "block_bytes": 64 MiB, "blocks": the SHA-256 of
        each block of that size}.
    """
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
        "bytes": size,
        "sha256": whole.hexdigest(),
        "blake3": tree.hexdigest(),
        "block_bytes": BLOCK,
        "blocks": blocks,
    }


def encode_sidecar(archive: Mapping[str, Any], hashes: Mapping[str, object]) -> bytes:
    """Return the content of the sidecar of an encrypted archive.

    Args:
        archive: the facts of the archive, the fields of `ArchiveFacts`.
        hashes: those of the file, as `hash_ciphertext` returns them.
    """
    parsed = {
        "schema": SEALED_SCHEMA,
        "open": f"age -d -i SECRET.key -o {archive['name'].removesuffix('.age')} {archive['name']}",
        "archive": dict(archive),
        "ciphertext": dict(hashes),
    }
    return bounded_json.encode(parsed, indent=1) + b"\n"


def read_sidecar(source: Source, file: str) -> dict[str, Any]:
    """Read and check the sidecar of the encrypted archive `file`.

    Returns:
        {"archive": facts, "ciphertext": hashes, ...}, as `encode_sidecar` writes it.

    Raises:
        UsageError: there is no sidecar.
        Corrupt, Unsafe: it is damaged.
    """
    what = f"{source.root}/{get_sidecar_name(file)}"
    if not source.exists(get_sidecar_name(file)):
        raise UsageError(
            f"{what} is missing; it says what is in {file}. To look inside, pass {argument('identities')}.",
            code="CKPT0218",
        )
    parsed = bounded_json.parse(source.read_all(get_sidecar_name(file), 256 << 20), what)
    parts = ("archive", "ciphertext")
    if (
        not isinstance(parsed, dict)
        or parsed.get("schema") != SEALED_SCHEMA
        or not all(isinstance(parsed.get(p), dict) for p in parts)
    ):
        raise Corrupt(f"{what} is not the sidecar of an encrypted archive.", code="CKPT0425")
    hashes = parsed["ciphertext"]
    blocks = hashes.get("blocks")
    if (
        not isinstance(blocks, list)
        or not all(isinstance(b, str) for b in (*blocks, hashes.get("sha256"), hashes.get("blake3")))
        or not all(type(hashes.get(k)) is int for k in ("bytes", "block_bytes"))
    ):
        raise Corrupt(f"{what} is damaged: the hashes of the ciphertext are missing.", code="CKPT0425")
    return parsed


def get_hold_file_name(file: str) -> str:
    """Return the name of the hold file of an archive, the file next to it that lists its legal holds."""
    return file + HOLD


def encode_holds(file: str, held: Sequence[Mapping[str, object]]) -> bytes:
    """Return the content of the file with the legal holds of the archive `file`.

    Args:
        held: {"reason", "since", "by", "manifest_sha256", "created"} of each hold; missing ones are written as null.
    """
    parsed = {"schema": HOLD_SCHEMA, "archive": file, "holds": [{k: h.get(k) for k in _HELD} for h in held]}
    return bounded_json.encode(parsed, indent=1) + b"\n"


_HELD = ("reason", "since", "by", "manifest_sha256", "created")


def read_holds(source: Source, file: str) -> list[dict[str, Any]]:
    """Return the legal holds in the hold file of the archive `file`; that file must exist.

    Each is {"reason", "since", "by", "manifest_sha256", "created"}. A damaged hold file counts as one hold, which has
    only a "reason".

    Raises:
        RemoteError: the store fails.
    """
    beside = get_hold_file_name(file)
    try:
        parsed = bounded_json.parse(source.read_all(beside, _MOST_HOLDS), beside)
        held = parsed["holds"]
        if parsed["schema"] != HOLD_SCHEMA or not held or not all(_is_hold(h) for h in held):
            raise ValueError
    except RemoteError:
        raise
    except (CkpttoolError, LookupError, TypeError, ValueError):
        return [{"reason": f"unknown, {beside} is damaged"}]
    return [{k: h[k] for k in _HELD} for h in held]


def _is_hold(h: object) -> bool:
    """Return whether an entry of a hold file has the right fields and types."""
    return (
        isinstance(h, dict)
        and h.keys() == set(_HELD)
        and isinstance(h["reason"], str)
        and all(v is None or isinstance(v, str) for v in h.values())
    )


def write_small_file(folder: str, name: str, data: bytes) -> None:
    """Write or replace a small file in a store, a folder or the URL of one, atomically.

    Raises:
        CkpttoolError: it cannot be written.
    """
    if urls.is_url(folder):
        from ..storage import upload

        up = upload.ObjectUpload(f"{folder}/{name}", force=True)
        up.append(data)
        up.commit()
        return
    from ..storage.local_file import replace_file

    replace_file(os.path.join(folder, name), data)
