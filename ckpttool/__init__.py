"""ckpttool: move training checkpoints between layouts and world sizes, bit for bit, in constant memory.

>>> import ckpttool
>>> ckpttool.convert("runs/step-1000", "out/hf", to="hf", config="meta-llama/Llama-3.2-1B")      # doctest: +SKIP
>>> ckpttool.convert("runs/step-1000", "out/dcp", to="dcp", world_size=48)                       # doctest: +SKIP
>>> ckpttool.diff("runs/step-1000", "out/dcp").equal                                             # doctest: +SKIP
True

Nothing is imported until it is used; none of these imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .engine.conversion import convert, digest, open, plan, verify
    from .engine.diff import diff
    from .engine.flat_layout import describe_fsdp1
    from .engine.inspect import inspect
    from .errors import CkpttoolError
    from .index.checkpoint import Checkpoint
    from .live.load import load, storage_reader
    from .resume.launch import resume_verify
    from .resume.recorder import Recorder
    from .storage.partial import clean

__all__ = [
    "Checkpoint",
    "CkpttoolError",
    "Recorder",
    "__version__",
    "clean",
    "convert",
    "describe_fsdp1",
    "diff",
    "digest",
    "inspect",
    "load",
    "open",
    "plan",
    "resume_verify",
    "storage_reader",
    "verify",
]

_WHERE = {
    "Checkpoint": "index.checkpoint",
    "CkpttoolError": "errors",
    "Recorder": "resume.recorder",
    "clean": "storage.partial",
    "convert": "engine.conversion",
    "describe_fsdp1": "engine.flat_layout",
    "diff": "engine.diff",
    "digest": "engine.conversion",
    "inspect": "engine.inspect",
    "load": "live.load",
    "open": "engine.conversion",
    "plan": "engine.conversion",
    "resume_verify": "resume.launch",
    "storage_reader": "live.load",
    "verify": "engine.conversion",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
