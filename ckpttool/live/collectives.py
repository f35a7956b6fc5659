"""What the ranks of a job do together; in a process without a job, alone."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CkpttoolError

__all__ = [
    "broadcast_bytes",
    "do_all_ranks_meet",
    "gather_objects",
    "get_rank_and_world_size",
    "run_on_all_ranks",
    "run_on_first_rank",
    "union_over_ranks",
]

T = TypeVar("T")


def _is_in_job() -> bool:
    """Tell whether torch.distributed is initialised in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def get_rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) in a process without torch.distributed."""
    if not _is_in_job():
        return 0, 1
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def union_over_ranks(names: set[str]) -> set[str]:
    """Return the union of the sets of all ranks. A collective, which every rank has to call.

    With pipeline parallelism each rank knows only a part of the model's names.
    """
    return set().union(*gather_objects(names))


def gather_objects(mine: object, group: Any = None) -> list[Any]:
    """Return the objects of all ranks of a group, in the order of ranks; without a job, [mine]. A collective, which
    every rank of the group has to call.

    Args:
        mine: what this rank gives; it is pickled.
        group: process group of torch; None for all ranks.
    """
    if not _is_in_job():
        return [mine]
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


_met = itertools.count()


def do_all_ranks_meet(seconds: float) -> bool:
    """Whether every rank of the job calls this function within `seconds`. All ranks have to call it equally often.

    Unlike a collective, it does not wait longer for a rank that does not come, and returns False instead.
    """
    if not _is_in_job():
        return True
    import torch.distributed as dist

    store, key = dist.distributed_c10d._get_default_store(), f"ckpttool-met-{next(_met)}"
    count, deadline = store.add(key, 1), time.monotonic() + seconds
    while count < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
        count = store.add(key, 0)
    return bool(count >= dist.get_world_size())


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """Return the bytes of one rank on all ranks. A collective, which every rank has to call.

    Args:
        data: the bytes; None on ranks other than `source`.
        source: the rank that sends.
    """
    if not _is_in_job():
        assert data is not None
        return data
    import torch.distributed as dist

    box = [data]
    dist.broadcast_object_list(box, src=source)
    assert box[0] is not None
    return box[0]


def run_on_first_rank(make: Callable[[], T], then: str = "failed, so no rank goes on") -> T:
    """Call a function on rank 0 and return its result on every rank. A collective, which every rank has to call.

    Args:
        make: the function; its result is pickled and sent to the other ranks.
        then: how the error's message on the other ranks continues after "rank 0", if the function fails.

    Raises:
        CkpttoolError: the function failed, on every rank; rank 0 raises the error itself.
    """
    rank, _ = get_rank_and_world_size()
    made = run_on_all_ranks(lambda: make() if rank == 0 else None, then)
    found: T = pickle.loads(broadcast_bytes(pickle.dumps(made) if rank == 0 else None, 0))
    return found


def run_on_all_ranks(act: Callable[[], T], then: str = "cannot load the checkpoint, so no rank does") -> T:
    """Call a function on every rank, and return its result there. If it fails on one rank, all ranks raise, so that
    none waits for another forever. A collective, which every rank has to call.

    Args:
        act: the function.
        then: how the message of the other ranks continues after "rank N", the rank that failed.

    Raises:
        CkpttoolError: the function failed on another rank; of the same class if that error was a CkpttoolError. A rank
            on which it fails raises its own error.
    """
    try:
        made = act()
    except Exception as e:
        gather_objects((type(e) if isinstance(e, CkpttoolError) else CkpttoolError, str(e)))
        raise
    for rank, other in enumerate(gather_objects(None)):
        if other is not None:
            kind, text = other
            raise kind(f"rank {rank} {then}: {text}")
    return made
