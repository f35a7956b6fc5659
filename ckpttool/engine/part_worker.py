"""What a worker runs: one function, from a request of the coordinator to an answer, both JSON (part_requests.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

from ..errors import CkpttoolError
from ..storage.buffers import IOBudget
from ..storage.shared_tree import SharedTree
from .part_fill import fill_part
from .part_requests import encoded_error, read_job
from .parts import Part
from .planning import Plan, plan_id, plan_with

__all__ = ["run"]


def run(request: str) -> str:
    """Fill one part of a conversion; an error of ours is an answer, too."""
    asked = json.loads(request)
    try:
        planned = _planned(json.dumps(asked["job"], sort_keys=True))
        ckpt = planned.opened.checkpoint
        done = fill_part(
            planned.draft, planned.opened.source, ckpt.files, ckpt.records, Part(*asked["part"]), SharedTree(asked["tree"]),
            IOBudget(asked["threads"], asked["buffer_bytes"]), there=asked["there"],
        )  # fmt: skip
        return json.dumps(done, separators=(",", ":"))
    except CkpttoolError as e:
        return encoded_error(e)


@lru_cache(1)
def _planned(job: str) -> Plan:
    """The plan of a conversion; that of the last one is kept, since a worker fills many parts of it.

    Raises:
        CkpttoolError: this worker plans something else.
    """
    said = json.loads(job)
    src, dst, reading, writing = read_job(said)
    planned = plan_with(src, dst, reading, writing)
    mine = plan_id(planned.opened.source, planned.draft, planned.target, reading, replace(writing, drop=False))
    if mine != said["plan"]:
        raise CkpttoolError(
            f"this worker plans the conversion of {src} otherwise than the process that asked: another version of ckpttool, or files that "
            "differ between the machines. Install the same version everywhere, on a file system that all of them see."
        )
    return planned
