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

__all__ = ["compute_component_roots", "compute_value_root", "merkle_root"]


#: What json.dumps(..., separators=(",", ":")) does, without making an encoder for each leaf.
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


def merkle_root(leaves: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Compute the Merkle root, in hex, of leaves (name, dtype, shape, digest in hex), which are sorted by name first.

    A leaf is BLAKE3(0x00 | JSON of the four), a node BLAKE3(0x01 | left | right). The last node of a level with an
    uneven number of nodes moves up unchanged.
    """
    return _hash_up_to_root([_hash_leaf(*leaf) for leaf in sorted(leaves)])


def _hash_leaf(name: str, dtype: str, shape: Sequence[int], digest: str) -> bytes:
    """Hash the leaf of a tensor; `digest` is hex."""
    return blake3(b"\x00" + _json([name, dtype, list(shape), digest]).encode()).digest()


def _hash_up_to_root(level: list[bytes]) -> str:
    """Hash the nodes of one level of a Merkle tree pairwise up to the root, and return the root in hex; for no
    nodes, the hash of no bytes."""
    if not level:
        return blake3(b"").hexdigest()
    while len(level) > 1:
        pairs = [blake3(b"\x01" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0].hex()


def compute_component_roots(tensors: Mapping[str, TensorEntry], digests: Mapping[str, str]) -> dict[str, str]:
    """Return the Merkle roots, in hex, of all tensors and of those of each component: {"all": root, "model": root,
    "optim": root, ...}. `digests` is {name of a tensor: its digest in hex}."""
    leaves: list[bytes] = []
    parts: dict[str, list[bytes]] = {}
    for n, t in sorted(tensors.items()):
        leaf = _hash_leaf(n, t.dtype, t.shape, digests[n])
        leaves.append(leaf)
        parts.setdefault(t.component, []).append(leaf)
    return {"all": _hash_up_to_root(leaves), **{k: _hash_up_to_root(v) for k, v in sorted(parts.items())}}


def compute_value_root(digests: Mapping[str, str]) -> str:
    """Return the Merkle root, in hex, of the values of a checkpoint; `digests` is {name of a value: its digest in hex}.

    A leaf is BLAKE3(0x02 | JSON of [name, digest]), so no value can pass for a tensor. Leaves are sorted by name.
    """
    return _hash_up_to_root([blake3(b"\x02" + _json([n, d]).encode()).digest() for n, d in sorted(digests.items())])
