"""How a job computes on CUDA, where that decides the last bits: deterministic kernels, TF32, sums in bf16, buffers
outside the checkpoint.

Two runs of one job are equal bit for bit only with the same kernels. By default torch picks cuDNN's attention on an
H100, whose backward pass adds in any order; `use_deterministic_algorithms(True, warn_only=True)` does not change that,
and without `warn_only` torch picks flash attention in its deterministic form
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_cudnn_deterministic`, and attention_backward.cu; measured
on an H100). A recorded job is compared with a run that computes as it did.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ...errors import Unsupported, argument
from .records import NumericsRecord

if TYPE_CHECKING:
    import torch

__all__ = [
    "NO_KERNEL",
    "name_missing_kernel",
    "read_numerics",
    "read_small_buffers",
    "set_cuda_environment",
    "use_numerics",
    "use_recorded_buffers",
]

#: How the error of `name_missing_kernel` begins.
NO_KERNEL = "torch has no deterministic kernel for"

#: Bytes of the largest buffer that a recording has. Frequencies of rotary embeddings have some hundred.
_SMALL = 4096


def set_cuda_environment() -> None:
    """Set the environment variables that must be set before CUDA starts, unless they are set: those for deterministic
    kernels, and one algorithm for collectives, so that sums have one order at one world size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")


def read_numerics() -> NumericsRecord:
    """Return the settings of this process that decide which kernels CUDA runs.

    TF32 is read by `fp32_precision` (torch 2.9), since `allow_tf32` raises RuntimeError once that was set.
    """
    import torch

    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, cudnn = torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn)
    return {
        "deterministic": strict,
        "tf32": matmul.fp32_precision == "tf32",
        "cudnn_tf32": cudnn.conv.fp32_precision == "tf32",
        "bf16_reduced_precision": bool(matmul.allow_bf16_reduced_precision_reduction),
    }


def use_numerics(deterministic: bool, recorded: NumericsRecord) -> None:
    """Set which kernels torch uses in this process.

    Args:
        deterministic: whether kernels must be deterministic; otherwise torch chooses them.
        recorded: settings of the recorded job for TF32 and for reduced-precision sums in bf16; settings that it lacks
            are turned off, but a recording without `cudnn_tf32` is an older one, of torch's default, which is on. If it
            is empty and `deterministic` is False, torch's own settings are kept.
    """
    import torch

    torch.use_deterministic_algorithms(deterministic)
    if not deterministic and not recorded:
        return
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    cudnn, in_convolutions = cast("Any", torch.backends.cudnn), bool(recorded.get("cudnn_tf32", bool(recorded)))
    # by the older names, so that a job may use either; for cuDNN torch.backends.fp32_precision overrules them
    torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32 = bool(recorded.get("tf32")), in_convolutions
    if (cudnn.conv.fp32_precision == "tf32") != in_convolutions:
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if in_convolutions else "ieee"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bool(recorded.get("bf16_reduced_precision"))


@contextmanager
def name_missing_kernel() -> Iterator[None]:
    """While the block runs, turn torch's refusal to compute without a deterministic kernel into an error that names the
    operation.

    torch says "NAME does not have a deterministic implementation, but you set
    'torch.use_deterministic_algorithms(True)'", and of cuBLAS "Deterministic behavior was enabled with ..., but this
    operation is not deterministic because it uses CuBLAS", where CUBLAS_WORKSPACE_CONFIG has another value.

    Raises:
        Unsupported: there is such an operation. Other errors pass through.
    """
    try:
        yield
    except RuntimeError as e:
        name, found, _ = str(e).partition(" does not have a deterministic implementation")
        if found:
            name = name.split()[-1]
        elif str(e).startswith("Deterministic behavior was enabled"):
            name = f"cuBLAS with CUBLAS_WORKSPACE_CONFIG={os.environ.get('CUBLAS_WORKSPACE_CONFIG', '')}"
        else:
            raise
        raise Unsupported(
            f"{NO_KERNEL} {name}, which this job computes. Pass {argument('deterministic', False)}; bounds "
            "are wider then.",
            code="CKPT0339",
        ) from e


def _collect_non_persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: buffer} of the buffers that no state dict holds, except those on the meta device.

    Names lack the parts that wrappers such as DDP add.
    """
    from ...index.fqns import strip_wrappers

    found = {}
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.device.type != "meta":
                found[f"{prefix}.{name}" if prefix else name] = buffer
    clean = strip_wrappers(found)
    return {clean[n]: b for n, b in found.items()}


def read_small_buffers(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Return {name: [dtype, shape, bytes in hex]} of the buffers of at most 4 KiB that no checkpoint holds, such as
    frequencies of rotary embeddings.

    They are computed when the model is built, on the GPU or the CPU, whose powers differ in the last bit.
    """
    import torch

    out = {}
    for name, buffer in _collect_non_persistent_buffers(model).items():
        if buffer.numel() * buffer.element_size() <= _SMALL:
            raw = buffer.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
            out[name] = [str(buffer.dtype).removeprefix("torch."), list(buffer.shape), raw.numpy().tobytes().hex()]
    return out


def use_recorded_buffers(model: torch.nn.Module, recorded: Mapping[str, Any]) -> list[str]:
    """Fill buffers that no checkpoint holds with the recorded numbers; return a note for each buffer that changed.

    `recorded` is {name: [dtype, shape, bytes in hex]}; a buffer with another dtype or shape is left as it is.
    """
    import torch

    notes = []
    mine, live = read_small_buffers(model), _collect_non_persistent_buffers(model)
    for name, (dtype, shape, hexed) in recorded.items():
        if name not in mine or mine[name] == [dtype, list(shape), hexed] or mine[name][:2] != [dtype, list(shape)]:
            continue
        stored = torch.frombuffer(bytearray.fromhex(hexed), dtype=getattr(torch, dtype)).reshape(shape)
        there = live[name]
        apart = (there.detach().cpu().double() - stored.double()).abs().max().item()
        there.copy_(stored)
        notes.append(
            f"buffer {name} is in no checkpoint, and the recorded job had other numbers (largest difference "
            f"{apart:.1e}): its numbers are used"
        )
    return notes
