"""The digest of a state: a Merkle tree over its tensors.

The digest of a tensor is BLAKE3 over its row-major little-endian bytes, whatever layout they lie in. The digest of a
checkpoint, or of one component of it, is the root of a Merkle tree whose leaves are BLAKE3 over (name, dtype, shape,
digest), sorted by name: equal digests are the same state at any world size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from blake3 import blake3

from .checkpoint import TensorEntry

__all__ = ["merkle_root", "roots"]


def merkle_root(leaves: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Root of (name, dtype, shape, digest) leaves, sorted by name; hex.

    A leaf is BLAKE3(0x00 | JSON of the four), a node BLAKE3(0x01 | left | right); an odd one moves up as it is.
    """
    level = [
        blake3(b"\x00" + json.dumps([n, d, list(s), h], separators=(",", ":"), ensure_ascii=True).encode()).digest()
        for n, d, s, h in sorted(leaves)
    ]
    if not level:
        return blake3(b"").hexdigest()
    while len(level) > 1:
        pairs = [blake3(b"\x01" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0].hex()


def roots(tensors: Mapping[str, TensorEntry], digests: Mapping[str, str]) -> dict[str, str]:
    """{"all": root, "model": root, "optim": root, ...}."""
    leaves = {n: (n, t.dtype, t.shape, digests[n]) for n, t in tensors.items()}
    parts: dict[str, list[tuple[str, str, Sequence[int], str]]] = {}
    for n, t in tensors.items():
        parts.setdefault(str(t.path[0]), []).append(leaves[n])
    return {"all": merkle_root(leaves.values()), **{k: merkle_root(v) for k, v in sorted(parts.items())}}
