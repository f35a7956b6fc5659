"""Which step of the training a checkpoint is of, so that the next one is the first to be compared."""

from __future__ import annotations

import math
import os
import re

from ..engine.copy.stream import small
from ..engine.opening import OpenCheckpoint
from ..formats.stored_tensors import number_in
from ..index.names import step_count

__all__ = ["step_of"]

_MOST = 256  # counters that are read


def step_of(opened: OpenCheckpoint) -> int:
    """How many optimizer steps were taken before a checkpoint; 0 if nothing says so.

    Without a counter it is the largest step of a parameter in the optimizer, since a parameter without a gradient skips
    steps. If they differ and one of them is the number at the end of the folder's name, it is that: a file of a later
    save may be among them.
    """
    ckpt = opened.checkpoint
    if (step := step_count(ckpt.value)) is not None:
        return step
    found = {
        int(v.data)
        for v in ckpt.values.values()
        if v.is_optimizer_state and v.path[-1] == "step" and isinstance(v.data, (int, float))
    }
    if not found:
        names = [
            n
            for n, t in ckpt.tensors.items()
            if t.path[-1] == "step" and t.component in ("optim", "trainer") and t.numel == 1
        ]
        raw = small(opened.locate(), opened.source, names[:: 1 + len(names) // _MOST]) if names else {}
        numbers = (number_in(ckpt.tensors[n].dtype, data) for n, data in raw.items())
        found = {int(x) for x in numbers if x is not None and math.isfinite(x)}
    named = re.search(r"(\d{1,15})$", os.path.basename(opened.source.root))
    if named is not None and int(named[1]) in found:
        return int(named[1])
    return max(found, default=0)
