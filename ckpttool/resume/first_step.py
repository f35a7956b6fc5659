"""Which step of the training a checkpoint is of, so that the next one is the first to be compared."""

from __future__ import annotations

import math
import os
import re

from ..engine.opening import OpenCheckpoint
from ..index.checkpoint import Value
from ..index.names import step_count

__all__ = ["step_of"]

_MOST = 256  # counters that are read


def step_of(opened: OpenCheckpoint) -> int:
    """How many optimizer steps were taken before a checkpoint; 0 if nothing says so.

    Without a counter it is the largest step of a parameter in the optimizer, since a parameter without a gradient skips steps. If
    they differ and one of them is the number at the end of the folder's name, it is that: a file of a later save may be among them.
    """
    ckpt = opened.checkpoint
    if (step := step_count(ckpt.value)) is not None:
        return step
    found = {int(v.data) for v in ckpt.values.values() if _counts(v) and isinstance(v.data, (int, float))}
    if not found:
        names = [
            n
            for n, t in ckpt.tensors.items()
            if t.path[-1] == "step" and t.path[0] in ("optim", "trainer") and t.numel == 1
        ]
        found = {_number(ckpt.tensors[n].dtype, opened.read(n)) for n in names[:: 1 + len(names) // _MOST]}
    named = re.search(r"(\d{1,15})$", os.path.basename(opened.source.root.rstrip("/")))
    if named is not None and int(named[1]) in found:
        return int(named[1])
    return max(found, default=0)


def _counts(v: Value) -> bool:
    return v.path[:2] == ("optim", "state") and v.path[-1] == "step"


def _number(dtype: str, data: bytes) -> int:
    import numpy as np

    from ..engine.dtypes import numpy_dtype

    value = float(np.frombuffer(data, dtype=numpy_dtype(dtype))[0])
    return int(value) if math.isfinite(value) else 0
