"""Any layout into a live job's state dict: a StorageReader for `torch.distributed.checkpoint.load`.

    dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/zero3"))

What drives it: torch's planner asks for one box of one tensor per local shard, since the metadata it is shown has one
chunk a tensor, the whole of it. The box is met with the chunks of the index (numpy, by columns), every part becomes
pieces of at most `_STAGE` bytes, and pieces that are neighbours in a file are read with one preadv: straight into the
target's memory where the bytes are contiguous in both and the dtype is the same, else into a staging buffer and from
there by `copy_`. So a rank reads what it needs, and no more than `_GAP` bytes in vain at a time.

Invariants. Nothing of a checkpoint is unpickled: values are the inert data of `pickles`, checked to be plain, and
travel to torch's planner in pickles that were made here. Whatever can be known before a byte is written is checked
before: names, classes of values, framing, bounds. A name that means two things is an error, never a guess.

Items of DCP are looked into (`Layout.locate`) only where this rank needs them, since a look costs more than the read.

Sources: torch/distributed/checkpoint/{storage,default_planner,planner_helpers,state_dict_loader}.py (2.10 to 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ..engine import conversion
from ..engine.fill import Progress
from ..extras import need

__all__ = ["storage_reader"]


def storage_reader(
    path: str | os.PathLike[str],
    *,
    source_layout: str | None = None,
    config: str | None = None,
    like: str | os.PathLike[str] | None = None,
    flat_layout: str | os.PathLike[str] | None = None,
    wrap: Iterable[str] | None = None,
    tag: str | None = None,
    allow_equal_ranks: bool = False,
    allow_mixed_steps: bool = False,
    ignore_recorded_digests: bool = False,
    progress: Progress | None = None,
) -> Any:
    """A StorageReader of torch.distributed.checkpoint for a checkpoint in any layout.

    The arguments are those of `open`, and `progress`, which is called with ("load", bytes, bytes in all) of this rank.

    Where digests were recorded (ckpttool.json, or in the checkpoint itself), every tensor that is loaded is compared with
    its own, unless `ignore_recorded_digests`. A tensor that lies whole in the memory of one rank is hashed there. The
    others (sharded ones, and those on a GPU or in another dtype) are shared out among the ranks and read once more, so
    the job reads up to twice as many bytes, the second time mostly from the page cache. Where a digest differs, dcp.load
    fails on every rank, and the job's tensors are then partly overwritten.

    >>> dcp.load(state_dict, storage_reader=ckpttool.storage_reader("runs/step-1000"))             # doctest: +SKIP

    The index is read here, on every rank; each rank then reads the bytes of its own shards. Names are understood as
    `Names` says; one that is not in the checkpoint is missing in torch's eyes too (allow_partial_load, or its error).

    Raises:
        NotRecognised, Unsupported, Corrupt, Unsafe: as errors.py tells them apart. What goes wrong inside dcp.load
            comes in torch's CheckpointException.
    """
    need("loading into a live job", "torch")
    options = conversion.OpenOptions(
        source_layout=source_layout, config=config, like=like, flat_layout=flat_layout, wrap=wrap, tag=tag,
        allow_equal_ranks=allow_equal_ranks, allow_mixed_steps=allow_mixed_steps,
    )  # fmt: skip
    from .torch_reader import AnyLayoutReader

    return AnyLayoutReader(path, options, progress, ignore_recorded_digests)
