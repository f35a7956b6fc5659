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
    "get_padding_after_tensors",
    "group_tensors_by_member",
    "make_plan",
    "make_small_member",
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


def group_tensors_by_member(tensors: Mapping[str, TensorEntry], most: int, shuffle: bool) -> list[list[str]]:
    """Assign tensors to the members (files) of an archive, and return the names of the tensors of each member.

    Tensors are sorted by component and name and fill a member up to `most` bytes; a larger tensor gets a member of its
    own. In a member, names are in the order that safetensors uses. The layout and the world size of the source have no
    influence.

    Args:
        tensors: {name: tensor}.
        most: maximum bytes of tensors in a member.
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
        names.sort(key=lambda k: safetensors_header.sort_key(k, _get_stored_type(tensors[k], shuffle)[0]))
    return out


def count_planes(t: TensorEntry, shuffle: bool) -> int:
    """Return the number of byte planes in which a tensor is stored: the bytes of an element, or 1 if it is not split.

    Args:
        shuffle: whether large tensors are stored in byte planes.
    """
    return ITEMSIZE[t.dtype] if shuffle and t.nbytes >= LARGE else 1


def _get_stored_type(t: TensorEntry, shuffle: bool) -> tuple[str, tuple[int, ...]]:
    """Return (dtype, shape) that the safetensors header gives a tensor.

    These are its own, or uint8 and its number of bytes, if it is stored in byte planes or safetensors does not have its
    dtype.

    Args:
        shuffle: whether large tensors are stored in byte planes.
    """
    if count_planes(t, shuffle) > 1 or t.dtype not in safetensors_header.CODES:
        return "uint8", (t.nbytes,)
    return t.dtype, t.shape


def make_plan(
    grouped: Sequence[Sequence[str]], tensors: Mapping[str, TensorEntry], shuffle: bool, mtime: int, readme: bytes
) -> ArchivePlan:
    """Compute where every member, tensor and frame of an archive begins, up to the end of the last member with tensors.

    Args:
        grouped: the names of the tensors of each member, as `group_tensors_by_member` returns them.
        tensors: {name: tensor}.
        shuffle: whether large tensors are stored in byte planes.
        mtime: modification time of all members, in seconds.
        readme: the content of README.txt.
    """
    head = tarball.make_header(README, len(readme), mtime) + readme + tarball.make_padding(len(readme))
    plan = ArchivePlan(
        {}, [Member(README, tarball.BLOCK, tarball.BLOCK + len(readme))], [SplitPoint(0, 1, False)], {}, head, {}, 0
    )
    at, between = len(head), b""
    for i, names in enumerate(grouped):
        member = f"tensors-{i + 1:05d}.safetensors"
        text = _make_safetensors_header(names, tensors, shuffle)
        plan.headers[member] = text
        size = len(text) + sum(tensors[n].nbytes for n in names)
        front = tarball.make_header(member, size, mtime) + text
        if i == 0:
            plan.head += front
        else:
            plan.before[names[0]] = between + front
        _add_split_point(plan, at, 1, False)
        start = at + tarball.BLOCK
        at += len(front)
        for n in names:
            t = tensors[n]
            item = count_planes(t, shuffle)
            if t.nbytes >= LARGE:
                _add_split_point(plan, at, item, True)
            plan.places[n] = TensorPlace(member, at - start, at, t.nbytes, item)
            at += t.nbytes
            if t.nbytes >= LARGE:
                _add_split_point(plan, at, 1, True)
        plan.members.append(Member(member, start, at))
        _add_split_point(plan, at, 1, False)
        between = tarball.make_padding(size)
        at += len(between)
    if not grouped:
        _add_split_point(plan, at, 1, False)  # where the small files begin
    plan.end = at
    return plan


def _add_split_point(plan: ArchivePlan, at: int, item: int, fast: bool) -> None:
    """Add a split point to a plan: a frame begins at tar offset `at`. It replaces an earlier one at the same offset.

    Args:
        item: number of byte planes of the content from there on; 1 if it is not split into planes.
        fast: whether that content is numbers, not text.
    """
    while plan.cuts and plan.cuts[-1].offset == at:
        plan.cuts.pop()
    plan.cuts.append(SplitPoint(at, item, fast))


def _make_safetensors_header(names: Sequence[str], tensors: Mapping[str, TensorEntry], shuffle: bool) -> bytes:
    """Return the safetensors header of a member that holds the tensors `names`. For tensors that are stored as uint8,
    its metadata has their own dtype and shape."""
    rows = [(n, *_get_stored_type(tensors[n], shuffle)) for n in names]
    other = {
        n: {"dtype": tensors[n].dtype, "shape": list(tensors[n].shape), "planes": count_planes(tensors[n], shuffle)}
        for n, dtype, _ in rows
        if dtype != tensors[n].dtype
    }
    meta = {"format": "pt"} if not other else {"format": "pt", "ckpttool.coded": json.dumps(other, sort_keys=True)}
    return safetensors_header.encode_header(rows, meta)


def get_padding_after_tensors(plan: ArchivePlan) -> bytes:
    """Return the zero bytes that fill the last tar block of the last member with tensors; b"" if no member has
    tensors."""
    last = plan.members[-1]
    return b"" if last.name == README else tarball.make_padding(last.end - last.start)


def make_small_member(name: str, data: bytes, mtime: int) -> bytes:
    """Return a complete tar member with this content: header, data and padding. `mtime` is its modification time in
    seconds."""
    return tarball.make_header(name, len(data), mtime) + data + tarball.make_padding(len(data))
