"""Checks of the names and shapes of weights: prefixes of wrappers, weights without elements, tied weights, rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CkpttoolError
from ..formats import safetensors_header
from ..index.fqns import WRAPPERS
from .findings import NOTE, Examined, Finding

__all__ = ["wrapper_prefixes"]

#: Which wrapper has put a prefix there.
_WRAPPER = {
    "_orig_mod": "torch.compile", "module": "DistributedDataParallel", "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing", "_forward_module": "Lightning",
}  # fmt: skip


def _raw_names(at: Examined) -> Mapping[str, str]:
    """{name in the file: canonical name} of weights that are not called the same."""
    ckpt = at.ckpt
    out = {str(p[-1]): str(q[1]) for q, p in ckpt.origin.items() if q[0] == "model" and len(q) == 2}
    if ckpt.layout == "hf":
        clean = {str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model"}
        for file in ckpt.files:
            if file.endswith(".safetensors"):
                try:
                    out |= {n: "" for n in safetensors_header.slots(at.source, file) if n not in clean}
                except CkpttoolError:
                    continue
    return out


def _prefixes(raw: str, clean: str) -> list[str]:
    """The parts of a name that wrappers have put there."""
    parts = raw.split(".")[:-1]
    rest = [p for p in parts if p not in WRAPPERS]
    of_ddp = rest[:1] == ["module"] and not clean.startswith("module.")
    return [p for p in parts if p in WRAPPERS] + ["module"] * of_ddp


def wrapper_prefixes(at: Examined) -> list[Finding]:
    """Names that begin with what a wrapper module has put in front, "_orig_mod." or "module."; the plain model refuses them."""
    found: dict[str, list[str]] = {}
    for raw, clean in _raw_names(at).items():
        for part in dict.fromkeys(_prefixes(raw, clean)):
            found.setdefault(part, []).append(raw)
    return [
        Finding(
            "wrapper-prefix", NOTE, None, tuple(names),
            f'{len(names):,} weights have "{part}." of {_WRAPPER[part]} in their names, first "{names[0]}": a model without that '
            "wrapper finds missing and unexpected keys",
            at.copy("plain", *(["--strip-wrappers"] if at.opened.layout.own_keys else [])),
        )
        for part, names in found.items()
    ]  # fmt: skip
