"""Fill objects of a store with any number of workers: the cells that no part filled, and the proof that all have
arrived.

cells = those of every object that no part has sent
have them sent (cell_fill.py), with the bytes between chunks, which are known by now
compare with what the store lists; what is missing or has been replaced is sent again
"""

from __future__ import annotations

import json
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import RemoteError
from ...index.draft import Draft, Written
from ...storage.destination_protocol import ParallelDestination
from ..copy.fill import Progress
from .dispatch import run_parts
from .executors import Workers
from .part_fill import bytes_between_chunks
from .parts import Part, least_part_bytes

__all__ = ["note_sent", "objects_of", "send_rest"]

_ROUNDS = 3
_Cell = tuple[int, int, int, list[tuple[int, int]], list[tuple[int, str]]]  # of cell_fill.send_cells


def objects_of(tree: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """What `ParallelDestination.share` gave, for those of the objects that a worker needs."""
    return {**tree, "objects": {name: found for name, found in tree["objects"].items() if name in names}}


def note_sent(sent: Mapping[str, dict[int, str]], results: Mapping[int, Mapping[str, Any]]) -> None:
    """Add what workers have sent to {file: {cell: ETag}}."""
    for found in results.values():
        for name, etags in found["cells"].items():
            sent[name].update((int(n), etag) for n, etag in etags.items())


def send_rest(
    draft: Draft,
    asked: Mapping[str, Any],
    written: Mapping[int, Sequence[Written]],
    digests: dict[str, str],
    sent: dict[str, dict[int, str]],
    destination: ParallelDestination,
    workers: Workers,
    progress: Progress,
) -> int:
    """Send every cell that is not in `sent`, {file: {cell: ETag}}, and every file without chunks; how often something
    was sent again.

    Args:
        asked: what all requests have in common.
        written: the chunks of every file, in order.

    Raises:
        CkpttoolError: what a worker raised. RemoteError: another run sends other parts of the same objects.
    """
    for i, f in enumerate(draft.files):
        if f.name not in sent:
            pieces, f.size = bytes_between_chunks(draft, i, (), digests, lambda a, b: True)
            destination.write_file(f.name, b"".join(data for _, data in pieces))
    again = 0
    for _ in range(_ROUNDS):
        cells = _missing(draft, written, digests, sent, destination.part_bytes)
        again += _send(draft, asked, cells, sent, workers, progress)
        lost = destination.find_missing_cells(sent, {f.name: f.size for f in draft.files})
        if not lost:
            return again
        for name, number in lost:
            sent[name].pop(number, None)
        again += len(lost)
    raise RemoteError(
        f"{destination.location}: parts that were sent have been replaced or lost. Another run sends to the same "
        "place; run the command again when it has ended."
    )


def _send(
    draft: Draft,
    asked: Mapping[str, Any],
    cells: Sequence[_Cell],
    sent: Mapping[str, dict[int, str]],
    workers: Workers,
    progress: Progress,
) -> int:
    """Have cells sent, and note them; how often some were submitted again."""
    parts = _grouped(cells)

    def request(number: int) -> str:
        chosen = cells[parts[number].first : parts[number].stop]
        tree = objects_of(asked["tree"], {draft.files[cell[0]].name for cell in chosen})
        return json.dumps({"cells": {**asked, "tree": tree, "cells": chosen}}, separators=(",", ":"))

    results: dict[int, dict[str, Any]] = {}
    again = run_parts(parts, results, request, workers, lambda done, total: progress("send", done, total))
    note_sent(sent, results)
    return again


def _grouped(cells: Sequence[_Cell]) -> list[Part]:
    """Runs of cells, as parts."""
    least = least_part_bytes(sum(cell[2] for cell in cells))
    out: list[Part] = []
    first = size = 0
    for k, cell in enumerate(cells):
        size += cell[2]
        if size >= least or k == len(cells) - 1:
            out.append(Part(len(out), first, k + 1, size))
            first, size = k + 1, 0
    return out


def _missing(
    draft: Draft,
    written: Mapping[int, Sequence[Written]],
    digests: dict[str, str],
    sent: Mapping[str, Mapping[int, str]],
    cell_bytes: int,
) -> list[_Cell]:
    """The cells that are not in `sent`; sets the sizes of the files."""
    tensors = draft.checkpoint.tensors
    index = {name: i for i, name in enumerate(tensors)}
    out: list[_Cell] = []
    for i, f in enumerate(draft.files):
        if f.name not in sent:
            continue
        done = sent[f.name]

        def needed(a: int, b: int, done: Mapping[int, str] = done) -> bool:
            return any(n not in done for n in range(a // cell_bytes, -(-b // cell_bytes)))

        pieces, f.size = bytes_between_chunks(draft, i, written[i], digests, needed)
        todo = [n for n in range(max(1, -(-f.size // cell_bytes))) if n not in done]
        rows: list[list[tuple[int, int]]] = [[] for _ in todo]
        literals: list[list[tuple[int, str]]] = [[] for _ in todo]
        for name, row, _crc in written[i]:
            c = tensors[name].chunks
            if c.length[row]:
                a, b = c.offset[row], c.offset[row] + c.length[row]
                for k in range(bisect_left(todo, a // cell_bytes), bisect_left(todo, -(-b // cell_bytes))):
                    rows[k].append((index[name], row))
        for at, data in pieces:
            end = at + len(data)
            for k in range(bisect_left(todo, at // cell_bytes), bisect_left(todo, -(-end // cell_bytes))):
                a, b = max(at, todo[k] * cell_bytes), min(end, (todo[k] + 1) * cell_bytes)
                literals[k].append((a, b64encode(data[a - at : b - at]).decode()))
        for k, n in enumerate(todo):
            out.append((i, n, min(cell_bytes, f.size - n * cell_bytes), rows[k], literals[k]))
    return out
