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

__all__ = ["component_roots", "merkle_root", "value_root"]


#: What json.dumps(..., separators=(",", ":")) does, without making an encoder for each leaf.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


def merkle_root(leaves: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Compute the root of (name, dtype, shape, digest) leaves, sorted by name; hex.

    A leaf is BLAKE3(0x00 | JSON of the four), a node BLAKE3(0x01 | left | right); an odd one moves up as it is.
    """
    return _hash_root([_hash_leaf(*leaf) for leaf in sorted(leaves)])


def _hash_leaf(name: str, dtype: str, shape: Sequence[int], digest: str) -> bytes:
    """Hash the leaf of a tensor; `digest` is hex."""
    return blake3(b"\x00" + _json([name, dtype, list(shape), digest]).encode()).digest()


def _hash_root(level: list[bytes]) -> str:
    """Hash a level of a Merkle tree pairwise up to its root, and return that in hex; of no nodes, the hash of
    nothing."""
    if not level:
        return blake3(b"").hexdigest()
    while len(level) > 1:
        pairs = [blake3(b"\x01" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0].hex()


def component_roots(tensors: Mapping[str, TensorEntry], digests: Mapping[str, str]) -> dict[str, str]:
    """Return the root over all tensors and over those of each component, in hex: {"all": root, "model": root, "optim":
    root, ...}. `digests` is {name of a tensor: its digest in hex}."""
    leaves: list[bytes] = []
    parts: dict[str, list[bytes]] = {}
    for n, t in sorted(tensors.items()):
        leaf = _hash_leaf(n, t.dtype, t.shape, digests[n])
        leaves.append(leaf)
        parts.setdefault(t.component, []).append(leaf)
    return {"all": _hash_root(leaves), **{k: _hash_root(v) for k, v in sorted(parts.items())}}


def value_root(digests: Mapping[str, str]) -> str:
    """Compute the root of {name of a value: its digest}, sorted by name; hex.

    A leaf is BLAKE3(0x02 | JSON of [name, digest]), so no value can pass for a tensor.
    """
    return _hash_root([blake3(b"\x02" + _json([n, d]).encode()).digest() for n, d in sorted(digests.items())])
