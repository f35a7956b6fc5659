"""ckpttool: move training checkpoints between layouts and world sizes, bit for bit, in constant memory.

>>> import ckpttool
>>> ckpttool.convert("runs/step-1000", "out/hf", to="hf", config="meta-llama/Llama-3.2-1B")      # doctest: +SKIP
>>> ckpttool.convert("runs/step-1000", "out/dcp", to="dcp", world_size=48)                       # doctest: +SKIP
>>> ckpttool.diff("runs/step-1000", "out/dcp").equal                                             # doctest: +SKIP
True

Nothing is imported until it is used; none of these imports torch. Not even a module of Python's own library: `python -m
ckpttool` has the current folder on its path until `__main__` takes it off.
"""

from __future__ import annotations

from ._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .audit.archive_options import ArchiveOptions
    from .audit.export import Exported, export, restore
    from .cli.terminal import progress_bar
    from .converters.options import (  # type: ignore[import-not-found,unused-ignore]
        DirectoryOptions,
        Fsdp1Options,
        HfOptions,
        UniversalOptions,
        VerlOptions,
        ZeroOptions,
    )
    from .engine.adapter import adapter_extract, adapter_merge
    from .engine.apply import apply
    from .engine.average import average
    from .engine.conversion import ConvertResult, convert
    from .engine.diff import Difference, diff
    from .engine.discover.detection import newest
    from .engine.doctor.examine import Diagnosis, doctor
    from .engine.handle import TensorHandle
    from .engine.inspect import Summary, inspect
    from .engine.logits.compare import compare
    from .engine.logits.compare_logits import LogitComparison
    from .engine.make_delta import delta
    from .engine.opening import OpenCheckpoint, open
    from .engine.planning import Plan, plan
    from .engine.run_pruning import PrunedRun, prune_run
    from .engine.runs import Run, list_run
    from .engine.stats import Statistics, stats
    from .engine.transform.changing import Page
    from .engine.verification import DigestResult, VerifyResult, digest, verify
    from .errors import CkpttoolError
    from .hub.pull import Pulled, pull
    from .hub.push import Pushed, push
    from .index.checkpoint import Checkpoint
    from .live.fsdp1 import describe_fsdp1
    from .live.load import Loaded, load, storage_reader
    from .resume.compare.verdict import Report
    from .resume.trace.recorder import Recorder
    from .resume.verify import resume_verify
    from .storage.partial import clean

#: Where each public name is defined.
_WHERE = {
    "ArchiveOptions": "audit.archive_options",
    "Checkpoint": "index.checkpoint",
    "CkpttoolError": "errors",
    "ConvertResult": "engine.conversion",
    "Diagnosis": "engine.doctor.examine",
    "Difference": "engine.diff",
    "DigestResult": "engine.verification",
    "DirectoryOptions": "converters.options",
    "Exported": "audit.export",
    "Fsdp1Options": "converters.options",
    "HfOptions": "converters.options",
    "Loaded": "live.load",
    "LogitComparison": "engine.logits.compare_logits",
    "OpenCheckpoint": "engine.opening",
    "Page": "engine.transform.changing",
    "Plan": "engine.planning",
    "PrunedRun": "engine.run_pruning",
    "Pulled": "hub.pull",
    "Pushed": "hub.push",
    "Recorder": "resume.trace.recorder",
    "Report": "resume.compare.verdict",
    "Run": "engine.runs",
    "Statistics": "engine.stats",
    "Summary": "engine.inspect",
    "TensorHandle": "engine.handle",
    "UniversalOptions": "converters.options",
    "VerifyResult": "engine.verification",
    "VerlOptions": "converters.options",
    "ZeroOptions": "converters.options",
    "adapter_extract": "engine.adapter",
    "adapter_merge": "engine.adapter",
    "apply": "engine.apply",
    "average": "engine.average",
    "clean": "storage.partial",
    "compare": "engine.logits.compare",
    "convert": "engine.conversion",
    "delta": "engine.make_delta",
    "describe_fsdp1": "live.fsdp1",
    "diff": "engine.diff",
    "digest": "engine.verification",
    "doctor": "engine.doctor.examine",
    "export": "audit.export",
    "inspect": "engine.inspect",
    "list_run": "engine.runs",
    "load": "live.load",
    "newest": "engine.discover.detection",
    "open": "engine.opening",
    "plan": "engine.planning",
    "progress_bar": "cli.terminal",
    "prune_run": "engine.run_pruning",
    "pull": "hub.pull",
    "push": "hub.push",
    "restore": "audit.export",
    "resume_verify": "resume.verify",
    "stats": "engine.stats",
    "storage_reader": "live.load",
    "verify": "engine.verification",
}

__all__ = [
    "ArchiveOptions",
    "Checkpoint",
    "CkpttoolError",
    "ConvertResult",
    "Diagnosis",
    "Difference",
    "DigestResult",
    "DirectoryOptions",
    "Exported",
    "Fsdp1Options",
    "HfOptions",
    "Loaded",
    "LogitComparison",
    "OpenCheckpoint",
    "Page",
    "Plan",
    "PrunedRun",
    "Pulled",
    "Pushed",
    "Recorder",
    "Report",
    "Run",
    "Statistics",
    "Summary",
    "TensorHandle",
    "UniversalOptions",
    "VerifyResult",
    "VerlOptions",
    "ZeroOptions",
    "__version__",
    "adapter_extract",
    "adapter_merge",
    "apply",
    "average",
    "clean",
    "compare",
    "convert",
    "delta",
    "describe_fsdp1",
    "diff",
    "digest",
    "doctor",
    "export",
    "inspect",
    "list_run",
    "load",
    "newest",
    "open",
    "plan",
    "progress_bar",
    "prune_run",
    "pull",
    "push",
    "restore",
    "resume_verify",
    "stats",
    "storage_reader",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Return the public function or class `name` of ckpttool; the module that defines it is imported only when it is
    asked for.

    Raises:
        AttributeError: ckpttool has no public name `name`.
    """
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names of ckpttool (`__all__`), which `dir(ckpttool)` lists."""
    return __all__
