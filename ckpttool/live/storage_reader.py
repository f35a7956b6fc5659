"""Loads any layout into a live job's state dict: a StorageReader for `torch.distributed.checkpoint.load`.

    dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/zero3"))

torch's planner asks for one box of one tensor per local shard, because the metadata it gets shows one chunk per tensor,
the whole of it. `LiveReader` (reader.py) finds the chunks of the index that meet the box and reads those bytes, so a
rank reads what it needs and little more (scatter.py).

    name_lookup.py     the names that a job may use for entries of the checkpoint
    plain_values.py    values as plain Python objects; dtypes
    shared_index.py    one rank reads the index, the others get it
    scatter.py         byte ranges of files -> boxes of tensors
    reader.py          an open checkpoint: names, values and boxes of tensors
    torch_reader.py    torch's StorageReader on top of it
    load.py            a whole job: model, optimizer, param groups, scheduler and step
    live_job.py        compares that job with the checkpoint, and makes the state dict to fill
    live_values.py     values in the form that a live object has for them; differences
    job_optimizers.py  several optimizers, the step that creates state, options of param groups
    collectives.py     what all ranks do together
    fsdp1.py           describe_fsdp1

torch_reader, reader, scatter and live_job import torch when they are loaded, so they are imported inside functions.

Invariants. Nothing of a checkpoint is unpickled: values are the inert data of `pickles`, checked to be plain, and reach
torch's planner in pickles that were made here. Names, classes of values, framing and bounds are checked before the
first byte is written. A name that could mean two entries is an error.

Sources: torch/distributed/checkpoint/{storage,default_planner,planner_helpers,state_dict_loader}.py (2.10 to 2.13).
"""

from __future__ import annotations

import os
from typing import Any, Unpack

from ..engine import opening
from ..engine.copy.fill import Progress
from ..extras import require_packages
from ..options import ReadKeywords, list_keywords

__all__ = ["storage_reader"]


@list_keywords
def storage_reader(
    path: str | os.PathLike[str],
    *,
    ignore_recorded_digests: bool = False,
    progress: Progress | None = None,
    shared: bool = False,
    **reading: Unpack[ReadKeywords],
) -> Any:
    """Make a StorageReader of torch.distributed.checkpoint for a checkpoint in any layout.

    The arguments are those of `open`, and `progress`, which is called with ("load", bytes, bytes in all) of this rank.

    Where digests were recorded (ckpttool.json, or in the checkpoint itself), every tensor that is loaded is compared
    with its own, unless `ignore_recorded_digests`. A tensor that lies whole in the memory of one rank is hashed there.
    The others (sharded ones, and those on a GPU or in another dtype) are shared out among the ranks and read once more,
    so the job reads up to twice as many bytes, the second time mostly from the page cache. Where a digest differs,
    dcp.load fails on every rank, and the job's tensors are then partly overwritten.

    Examples:
        >>> dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/step-1000"))  # doctest: +SKIP

    The index is read here: on every rank or, with `shared`, on one, which sends it to the others; this call is then a
    collective of all ranks of the job. Each rank then reads the bytes of its own shards. Names are understood as
    `NameLookup` says; one that is not in the checkpoint is missing in torch's eyes too (allow_partial_load, or its
    error).

    Files of ranks that do not belong together are refused, as `verify` does: here, if this process is alone or `shared`
    is given, otherwise by the coordinator of dcp.load, on all ranks. With `shared`, the ranks divide that work among
    them.

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. What goes wrong inside dcp.load
            comes in torch's CheckpointException.
    """
    require_packages("loading into a live job", "torch")
    options = opening.OpenOptions(**reading)
    from .shared_index import open_alone, open_together
    from .torch_reader import AnyLayoutReader

    def open_path(at: str | os.PathLike[str]) -> opening.OpenCheckpoint:
        """Open a checkpoint as the first one: on this rank or, with `shared`, together with the others."""
        return (open_together if shared else open_alone)(at, options, ignore_recorded_digests)

    return AnyLayoutReader(path, open_path(path), progress, open_path)
