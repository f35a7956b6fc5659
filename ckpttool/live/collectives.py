"""What the ranks of a job do together; in a process without a job, alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CkpttoolError

__all__ = ["broadcast", "gathered", "of_all_ranks", "of_first_rank", "rank_and_world", "together"]

T = TypeVar("T")


def _joined() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank_and_world() -> tuple[int, int]:
    """(this rank, number of ranks); (0, 1) without a job."""
    if not _joined():
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def of_all_ranks(names: set[str]) -> set[str]:
    """The union of the names of all ranks; with pipeline parallelism each has a part of the model."""
    return set().union(*gathered(names))


def gathered(mine: Any, group: Any = None) -> list[Any]:
    """The objects of all ranks of a group, in the order of ranks; without a job, a list of this one."""
    if not _joined():
        return [mine]
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def broadcast(data: bytes | None, source: int) -> bytes:
    """The bytes that one rank has, on all of them."""
    if not _joined():
        assert data is not None
        return data
    import torch.distributed as dist

    box = [data]
    dist.broadcast_object_list(box, src=source)
    assert box[0] is not None
    return box[0]


def of_first_rank(make: Callable[[], T]) -> T:
    """What it returns on rank 0, on every rank; plain data. A collective."""
    made: T | None = None

    def act() -> None:
        nonlocal made
        if rank == 0:
            made = make()

    rank, _ = rank_and_world()
    together(act, "failed, so no rank goes on")
    found: T = pickle.loads(broadcast(pickle.dumps(made) if rank == 0 else None, 0))
    return found


def together(act: Callable[[], object], then: str = "cannot load the checkpoint, so no rank does") -> None:
    """Call it on every rank. If it fails on one, all raise, so that no rank waits for the others forever.

    `then` is what the others say of that rank.
    """
    error: Exception | None = None
    try:
        act()
    except Exception as e:
        error = e
    mine = None if error is None else (type(error) if isinstance(error, CkpttoolError) else CkpttoolError, str(error))
    errors = gathered(mine)
    if error is not None:
        raise error
    for rank, other in enumerate(errors):
        if other is not None:
            kind, text = other
            raise kind(f"rank {rank} {then}: {text}")
