"""The logits of a fixed batch: which of them are kept, a sketch of them, and how a training job computes them unharmed.

A recording has no place for logits (64 positions of a vocabulary of 128k are 33 MB), so it holds their sketch: each
position times `_WIDE` columns of random signs, over the root of `_WIDE`. The relative L2 distance of two sketches is
that of the logits within about 5 % (Johnson and Lindenstrauss), and equal logits have equal sketches.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .records import ProbeRecord

if TYPE_CHECKING:
    import torch

__all__ = [
    "compute_logits",
    "explain_unsupported_forward",
    "make_probe_batch",
    "preserving_module_state",
    "select_probe_logits",
    "sketch_logits",
]

_ROWS = 64  # positions of logits that are kept
_WIDE = 16


def select_probe_logits(logits: torch.Tensor) -> Any:
    """Return the logits of up to 64 positions, spread evenly over all: float32, (positions, vocabulary).

    `logits` is a tensor (..., vocabulary).
    """
    import torch

    flat = logits.reshape(-1, logits.shape[-1])
    chosen = torch.linspace(0, flat.shape[0] - 1, min(_ROWS, flat.shape[0])).round().long().to(flat.device)
    return flat[chosen].float().contiguous()


def sketch_logits(logits: object) -> ProbeRecord:
    """Project a numpy array of logits (positions, vocabulary) onto 16 fixed random directions, for later comparisons.

    Infinite and NaN logits count as 0 in the sketch.

    Returns:
        {"sketch": a list of 16 numbers for each position, "shape": of the logits, "not_finite": number of such logits}.
    """
    import numpy as np

    x = np.asarray(logits, "f8")
    wrong = ~np.isfinite(x)
    signs = np.random.Generator(np.random.Philox(key=[0, x.shape[1]])).integers(
        0, 2, (x.shape[1], _WIDE), dtype=np.int8
    )
    out = np.where(wrong, 0.0, x) @ ((2.0 * signs - 1.0) / _WIDE**0.5)
    return {"sketch": out.tolist(), "shape": list(x.shape), "not_finite": int(wrong.sum())}


def make_probe_batch(rows: Mapping[str, list[list[int]]], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return {"input_ids": int64 tensor (rows, sequence), ...} on a device, from the token ids of a recorded probe."""
    import torch

    return {k: torch.tensor(v, dtype=torch.int64, device=device) for k, v in rows.items()}


def explain_unsupported_forward(model: torch.nn.Module, names: Mapping[str, object]) -> str | None:
    """Return why the model cannot be called with some keyword arguments, as a text; None if it can, or if that is not
    known.

    Only the keys of `names` count.
    """
    inner = getattr(model, "module", model)
    try:
        signature = inspect.signature(getattr(inner, "forward", inner))
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as e:
        called = f"forward({', '.join(f'{n}=...' for n in names)})"
        return f"the model is called as {called}, but {type(inner).__name__} has forward{signature}: {e}"
    return None


def compute_logits(model: torch.nn.Module, batch: Mapping[str, object]) -> torch.Tensor:
    """Compute the logits (rows, sequence, vocabulary) of model(**batch), unsharded on every rank.

    A collective if the model is sharded.

    Raises:
        ValueError: the model returns something else. Errors of the model pass through.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        model = model.module  # after a pass without gradients, the wrapper leaves out its next broadcast of buffers
    config = getattr(getattr(model, "module", model), "config", None)
    known = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
    out = model(**batch, **known)
    if isinstance(out, (tuple, list)):
        out = out[0]
    logits = getattr(out, "logits", out)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(f"the model returns {type(logits).__name__}, not logits (rows, sequence, vocabulary)")
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits


@contextmanager
def preserving_module_state(model: torch.nn.Module) -> Iterator[None]:
    """While the block runs, the model is in evaluation mode and torch computes no gradients; afterwards mode, buffers,
    generators and FSDP2's shards are as before, even in the middle of a training."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    modes = [(m, m.training) for m in model.modules()]
    buffers = [(m, n, b, b.detach().clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    with preserving_generators(), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                buffer.copy_(content)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


@contextmanager
def preserving_generators() -> Iterator[None]:
    """After the block, the global generators of torch (CPU and this rank's GPU), numpy and Python have the states they
    had before it."""
    import numpy as np
    import torch

    ours, of_numpy = random.getstate(), np.random.get_state()
    here, on_gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(of_numpy)
        torch.set_rng_state(here)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
