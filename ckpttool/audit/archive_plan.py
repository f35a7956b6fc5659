"""The place of everything in an archive: arithmetic over names, dtypes and shapes, for writer and reader.

    tar:     README.txt | tensors-00001.safetensors | ... | values.json | MANIFEST.json | PROVENANCE.json | ...
    member:  tar header 512 B | safetensors header | tensors | padding to 512 B

The members with tensors are planned before a byte is copied. What follows them is small, and its length is known only
when it is written. The reader plans again from the manifest and refuses an archive that differs from the plan by a
byte, so nothing can be hidden in it.

Frames (frame_format.py) begin at the tar header of every member and at every tensor of at least `LARGE` bytes, so that
one tensor can be decompressed without its neighbours, and at the end of every member, where an interrupted export can
continue. Byte planes (byte_planes.py) are made of large tensors only. Such a tensor is stored as one of bytes (U8) with
its dtype and shape in the metadata of its file, so that the planes are not taken for numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..formats import safetensors_header
from ..index.checkpoint import ITEMSIZE, TensorEntry
from ..index.names import COMPONENTS
from . import tarball
from .frame_writer import Member, SplitPoint

__all__ = [
    "LARGE",
    "MANIFEST",
    "PROVENANCE",
    "README",
    "RETENTION",
    "SIGNATURE",
    "SUMS",
    "VALUES",
    "ArchivePlan",
    "TensorPlace",
    "group_by_member",
    "make_plan",
    "padding_after",
    "small_member",
]

README, VALUES, MANIFEST, PROVENANCE = "README.txt", "values.json", "MANIFEST.json", "PROVENANCE.json"
RETENTION, SUMS, SIGNATURE = "RETENTION.json", "SHA256SUMS", "model.sig"
#: A tensor of so many bytes begins a frame of its own.
LARGE = 256 << 10


class TensorPlace(NamedTuple):
    """The place of a tensor: its member, its first byte there, and its first byte in the tar.

    `item` is the bytes of an element if they are in planes, else 1.
    """

    member: str
    offset: int
    at: int
    nbytes: int
    item: int


@dataclass
class ArchivePlan:
    """The first part of the tar, up to the end of the last member with tensors.

    `before[name]` are the bytes that stand before a tensor which is the first of its member; `head` those at the very
    beginning; `end` the length of all of it, padding included.
    """

    places: dict[str, TensorPlace]
    members: list[Member]
    cuts: list[SplitPoint]
    before: dict[str, bytes]
    head: bytes
    headers: dict[str, bytes]
    end: int


def group_by_member(tensors: Mapping[str, TensorEntry], most: int, shuffle: bool) -> list[list[str]]:
    """Return the names of the tensors of each member (file in the archive).

    Tensors are taken in the order of components and names until a member would have more than `most` bytes; a larger
    one gets a member of its own. In a member they are in the order of safetensors. The layout and the world size of the
    source do not matter.

    Args:
        most: bytes of tensors in a member.
        shuffle: whether large tensors are stored in byte planes, which changes their dtype in the file.
    """
    out: list[list[str]] = []
    size = 0
    for name in sorted(tensors, key=lambda n: (COMPONENTS.index(str(tensors[n].path[0])), n)):
        n = tensors[name].nbytes
        if not out or size + n > most:
            out.append([])
            size = 0
        out[-1].append(name)
        size += n
    for names in out:
        names.sort(key=lambda k: safetensors_header.sort_key(k, _stored_type(tensors[k], shuffle)[0]))
    return out


def plane_count(t: TensorEntry, shuffle: bool) -> int:
    """Return the number of byte planes of a tensor, which is the bytes of an element; 1 if it is stored as it is.

    Args:
        shuffle: whether large tensors are stored in byte planes.
    """
    return ITEMSIZE[t.dtype] if shuffle and t.nbytes >= LARGE else 1


def _stored_type(t: TensorEntry, shuffle: bool) -> tuple[str, tuple[int, ...]]:
    """Return (dtype, shape) that the safetensors header gives a tensor: its own, or uint8 and its bytes, if it is
    stored in byte planes or safetensors does not have its dtype."""
    if plane_count(t, shuffle) > 1 or t.dtype not in safetensors_header.CODES:
        return "uint8", (t.nbytes,)
    return t.dtype, t.shape


def make_plan(
    grouped: Sequence[Sequence[str]], tensors: Mapping[str, TensorEntry], shuffle: bool, mtime: int, readme: bytes
) -> ArchivePlan:
    """Return the place of everything in an archive, up to the end of the last member with tensors.

    Args:
        grouped: the names of the tensors of each member, of `group_by_member`.
        tensors: {name: tensor}.
        shuffle: whether large tensors are stored in byte planes.
        mtime: time of all members, in seconds.
        readme: the content of README.txt.
    """
    head = tarball.make_header(README, len(readme), mtime) + readme + tarball.padding(len(readme))
    plan = ArchivePlan(
        {}, [Member(README, tarball.BLOCK, tarball.BLOCK + len(readme))], [SplitPoint(0, 1, False)], {}, head, {}, 0
    )
    at, between = len(head), b""
    for i, names in enumerate(grouped):
        member = f"tensors-{i + 1:05d}.safetensors"
        text = _header(names, tensors, shuffle)
        plan.headers[member] = text
        size = len(text) + sum(tensors[n].nbytes for n in names)
        front = tarball.make_header(member, size, mtime) + text
        if i == 0:
            plan.head += front
        else:
            plan.before[names[0]] = between + front
        _add_split(plan, at, 1, False)
        start = at + tarball.BLOCK
        at += len(front)
        for n in names:
            t = tensors[n]
            item = plane_count(t, shuffle)
            if t.nbytes >= LARGE:
                _add_split(plan, at, item, True)
            plan.places[n] = TensorPlace(member, at - start, at, t.nbytes, item)
            at += t.nbytes
            if t.nbytes >= LARGE:
                _add_split(plan, at, 1, True)
        plan.members.append(Member(member, start, at))
        _add_split(plan, at, 1, False)
        between = tarball.padding(size)
        at += len(between)
    plan.end = at
    return plan


def _add_split(plan: ArchivePlan, at: int, item: int, fast: bool) -> None:
    """Let a frame begin at offset `at` of the tar, and remove an earlier split at the same place.

    Args:
        item: number of byte planes from there on; 1: none.
        fast: whether numbers follow, not text.
    """
    while plan.cuts and plan.cuts[-1].offset == at:
        plan.cuts.pop()
    plan.cuts.append(SplitPoint(at, item, fast))


def _header(names: Sequence[str], tensors: Mapping[str, TensorEntry], shuffle: bool) -> bytes:
    """Return the safetensors header of a member with these tensors. Of those stored as bytes, it has the own dtype and
    shape in its metadata."""
    rows = [(n, *_stored_type(tensors[n], shuffle)) for n in names]
    other = {
        n: {"dtype": tensors[n].dtype, "shape": list(tensors[n].shape), "planes": plane_count(tensors[n], shuffle)}
        for n, dtype, _ in rows
        if dtype != tensors[n].dtype
    }
    meta = {"format": "pt"} if not other else {"format": "pt", "ckpttool.coded": json.dumps(other, sort_keys=True)}
    return safetensors_header.header(rows, meta)


def padding_after(plan: ArchivePlan) -> bytes:
    """Return the zeros between the last member with tensors and what follows; b"" if no member has tensors."""
    last = plan.members[-1]
    return b"" if last.name == README else tarball.padding(last.end - last.start)


def small_member(name: str, data: bytes, mtime: int) -> bytes:
    """Return a whole small member with this content: tar header, data, padding. `mtime` is its time in seconds."""
    return tarball.make_header(name, len(data), mtime) + data + tarball.padding(len(data))
