"""`--fill-from`: what a salvaged checkpoint has lost, from another checkpoint of the same run, most often an older
step.

Whole tensors are taken, never parts: half a tensor of one step and half of another is of no step. Each counts as
rebuilt, so no digest of it is recorded.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ..errors import Unsupported, argument
from ..index.checkpoint import Checkpoint, Salvage
from ..index.names import step_count
from ..index.records import Records
from ..storage.overlay import JoinedSource, name_in_joined
from ..storage.source import closed_on_error
from .opening import OpenCheckpoint, OpenOptions, open_checkpoint, show_path

__all__ = ["fill_missing_entries"]


def fill_missing_entries(opened: OpenCheckpoint, path: str, only: tuple[str, ...] | None) -> OpenCheckpoint:
    """Return a salvaged checkpoint with the tensors and values that it lacks, taken from the one at `path`.

    Closing the result closes both.

    Args:
        only: components to fill in; None for all.

    Raises:
        Unsupported: the checkpoint at `path` is of another model, or was salvaged itself.
        CkpttoolError: it cannot be opened.
    """
    ckpt = opened.locate()
    other = open_checkpoint(path, OpenOptions(only=None))
    with closed_on_error([other.source]):
        theirs = other.locate()
        _refuse_unfit_filler(ckpt, theirs, path)
    step = step_count(theirs.value)
    how = f"from {os.path.basename(show_path(path).rstrip('/'))}" + ("" if step is None else f", step {step:,}")
    n = len(ckpt.files)
    left = ckpt.salvage or Salvage()
    mine = {ckpt.component(x) for x in (*ckpt.tensors, *ckpt.values)}

    def wanted(component: str) -> bool:
        """Tell whether a component is to be filled in."""
        return only is None or component in only

    def lost_as(name: str) -> list[str]:
        """List the entries of `left.missing` that a name is, or is below."""
        ends = [i for i, c in enumerate(name) if c == "."]
        return [x for x in (*(name[:i] for i in ends), name) if x in left.missing]

    taken = {x: t for x, t in theirs.tensors.items() if x not in ckpt.tensors and wanted(t.component)}
    values = {
        x: v
        for x, v in theirs.values.items()
        if x not in ckpt.values
        and x not in ckpt.tensors
        and wanted(v.component)
        and (lost_as(x) or v.component not in mine)
    }
    for gone in {y for x in (*taken, *values) for y in lost_as(x)}:
        del left.missing[gone]
    new = {t.component for t in taken.values()} - mine
    left.rebuilt |= dict.fromkeys([*taken, *values], how)
    origin = {q: p for q, p in theirs.origin.items() if q[0] in new}
    tensors = {x: replace(t, chunks=t.chunks.moved(n)) for x, t in taken.items()}
    notes = [x for x in ckpt.notes if not x.startswith(("salvaged: ", "rebuilt: "))]
    notes.append(
        f"{len(taken):,} tensors are {how}, of another step than the rest: they count as rebuilt, and no digests of "
        "them are recorded" + (f"; so are {len(values):,} values, first {next(iter(values))}" if values else "")
    )
    if left.missing:
        notes.append(f'{len(left.missing):,} are in neither checkpoint, first "{next(iter(left.missing))}"')
    filled = replace(
        ckpt,
        tensors=ckpt.tensors | tensors,
        values=ckpt.values | values,
        files=[*ckpt.files, *map(name_in_joined, theirs.files)],
        sizes=[*ckpt.sizes, *theirs.sizes],
        records=Records([*ckpt.records, *(r.moved(n) for r in theirs.records)]),
        origin=ckpt.origin | origin,
        salvage=left,
        notes=notes,
    )
    return replace(opened, checkpoint=filled, source=JoinedSource(opened.source, other.source))


def _refuse_unfit_filler(ckpt: Checkpoint, theirs: Checkpoint, path: str) -> None:
    """Raise if missing entries cannot be filled from a checkpoint.

    Args:
        ckpt: the checkpoint that is to be filled.
        theirs: the checkpoint to fill it from; `path` is its path, for messages.

    Raises:
        Unsupported: `theirs` is of another model, or was salvaged itself.
    """
    if theirs.salvage is not None and (theirs.salvage.missing or theirs.salvage.rebuilt):
        raise Unsupported(
            f"{argument('fill_from', path)} is a salvaged copy itself, of which not all tensors are what was "
            "saved. Give a whole one.",
            code="CKPT0336",
        )
    for name, t in ckpt.tensors.items():
        of = theirs.tensors.get(name)
        if of is not None and of.shape != t.shape:
            raise Unsupported(
                f'{argument("fill_from", path)} is not from the same run: "{name}" is {list(of.shape)} there and '
                f"{list(t.shape)} here. Give another step of this run.",
                code="CKPT0336",
            )
    if not ckpt.tensors.keys() & theirs.tensors.keys():
        raise Unsupported(
            f"{argument('fill_from', path)} is not from the same run: it has no tensor of this checkpoint. Give "
            "another step of this run.",
            code="CKPT0336",
        )
