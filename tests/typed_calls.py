"""What a user's script calls, for mypy alone (pyproject.toml lists this file): each misspelt name is an error.

mypy --strict also refuses a `type: ignore` that ignores nothing, so a name that it no longer checks fails `make lint`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import ckpttool
from ckpttool.guard import Guard

done = ckpttool.convert("a", "b", to="zero3", world_size=4)
print(done.digest["all"], done.verified)
with ckpttool.open("a", source_layout="dcp") as opened:
    print(opened.checkpoint.nbytes)
    rows: np.ndarray[Any, Any] = opened["model.w"][2:5]
    whole: torch.Tensor = opened["model.w"].torch()
    step: int | None = opened.checkpoint.value("trainer.step", int)
    handles: list[ckpttool.TensorHandle] = [h for _, h in opened.items()]
    print(opened.get("model.w"), rows.shape, whole.shape, step, handles)
    print(rows.shapes)  # type: ignore[attr-defined]
    print(whole.shapes)  # type: ignore[attr-defined]
    text: str | None = opened.checkpoint.value("trainer.step", int)  # type: ignore[assignment]
try:
    ckpttool.verify("a")
except ckpttool.CkpttoolError as e:
    kind: str = e.kind
if ckpttool.diff("a", "b", rtol=1e-5):
    print(ckpttool.inspect("b").step)

print(ckpttool.CkpttoolError("a", code="CKPT0412").code)
ckpttool.CkpttoolError("a", code="CKPT4711")  # type: ignore[arg-type]
ckpttool.convert("a", "b", to="zero3", world_sze=4)  # type: ignore[call-arg]
print(done.verifyed)  # type: ignore[attr-defined]
ckpttool.diff("a", "b", rtoll=1e-5)  # type: ignore[call-arg]
ckpttool.open("a", layout="dcp")  # type: ignore[call-arg]
ckpttool.push("a", "hf://b/c", dtyp="bf16")  # type: ignore[call-arg]
ckpttool.export("a", "b.tar.zst", world_size=2)  # type: ignore[call-arg]  # an archive is of no world size
ckpttool.convert("a", "b", threads="2")  # type: ignore[arg-type]
with Guard(on_fault="raise", settle=1.0) as guard:
    guard.check("a")
    left: list[str] = guard.finish()
Guard(on_fault="stop")  # type: ignore[arg-type]
