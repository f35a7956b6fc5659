"""Fingerprints and L2 norms of tensors that are sharded over many ranks.

    fingerprint(tensor) = sum over elements i of mix(bits of element i, i)  mod 2^64

i is the flat row-major index in the whole tensor, so the sum does not depend on which rank holds which shard, or in
which order: every rank sums its own shards, and one all-reduce completes the sum. A changed or moved element changes
the sum, with a chance of 2^-64 that it does not. This is not a cryptographic digest (collisions can be constructed);
`ckpttool digest` is. It does not depend on the tensor's name, so a tensor that holds another's bytes is recognised.

It runs on the device of the tensor, in blocks of 2^20 elements. torch's integer arithmetic wraps around on CPU and
CUDA alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ...index.boxes import box_is_flat, flat_start, strides
from ...live.collectives import gather_objects

if TYPE_CHECKING:
    from torch import Tensor, device, dtype
    from torch.distributed.device_mesh import DeviceMesh

    from ...engine.opening import OpenCheckpoint

__all__ = [
    "can_fingerprint",
    "compute_16bit_spacing",
    "compute_global_norms",
    "find_shard_offset",
    "fingerprint_each_rank",
    "fingerprint_files",
    "fingerprint_flat",
    "fingerprint_tensors",
    "get_local_shard",
    "is_counted_on_this_rank",
    "sum_over_ranks",
]

_BLOCK = 1 << 20
_A, _B, _C = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64 (Steele, Lea, Flood 2014)


def _as_int64(x: int) -> int:
    """Return the signed number with the same 64 bits as the unsigned `x`."""
    return x - (1 << 64) if x >> 63 else x


def _sum_mixed(bits: Tensor, index: Tensor) -> int:
    """Return the sum over a block of mix(bits[i], index[i]) mod 2^64, where mix is splitmix64's finaliser.

    Args:
        bits: the elements as int64; overwritten.
        index: their flat indices in the whole tensor, int64; overwritten.
    """
    index.mul_(_as_int64(_A))
    z = bits.add_(1).mul_(_as_int64(_C)).add_(index)
    for shift, factor in ((30, _B), (27, _C)):
        # >> keeps the sign in torch; the mask takes it off
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_as_int64(factor))
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    return int(z.sum().item()) % (1 << 64)


def _view_as_integers(tensor: Tensor) -> Tensor:
    """View the elements of a contiguous 1-d tensor as integers of their size, each complex128 as two.

    Raises:
        KeyError: elements have another size than 1, 2, 4, 8 or 16 bytes.
    """
    import torch

    of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return tensor.view(of[tensor.element_size()])


def can_fingerprint(tensor: Tensor) -> bool:
    """Tell whether a fingerprint can be taken of a tensor: not of sparse and quantised ones and many subclasses."""
    try:
        _view_as_integers(get_local_shard(tensor).new_empty(0))
    except (RuntimeError, TypeError, NotImplementedError, KeyError, AttributeError):
        return False
    return True


def fingerprint_flat(tensor: Tensor, first: int) -> int:
    """Return the fingerprint, mod 2^64, of a contiguous 1-d tensor whose first element has the flat index `first` in
    its whole tensor."""
    import torch

    bits = _view_as_integers(tensor)
    first *= 2 if tensor.element_size() == 16 else 1
    total = 0
    for a in range(0, bits.numel(), _BLOCK):
        part = bits[a : a + _BLOCK].to(torch.int64, copy=True)
        index = torch.arange(first + a, first + a + part.numel(), dtype=torch.int64, device=part.device)
        total += _sum_mixed(part, index)
    return total % (1 << 64)


def _fingerprint_shard(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> int:
    """Return the contribution of a shard to the fingerprint of its tensor, mod 2^64.

    Args:
        tensor: the shard, a box of the unsharded tensor.
        offset: index of its first element in the unsharded tensor, by dimension.
        shape: of the unsharded tensor.
    """
    if not tensor.numel():
        return 0
    if box_is_flat(shape, offset, tuple(tensor.shape)):
        return fingerprint_flat(tensor.reshape(-1), flat_start(shape, offset))
    return _fingerprint_scattered_shard(tensor, offset, strides(shape))


def _fingerprint_scattered_shard(tensor: Tensor, offset: Sequence[int], steps: Sequence[int]) -> int:
    """Return the contribution of a shard to the fingerprint of its tensor, mod 2^64, if it is no single range when
    flattened.

    Args:
        tensor: the shard, not empty.
        offset: index of its first element in the unsharded tensor, by dimension.
        steps: strides of the unsharded tensor, in elements.
    """
    import torch

    total, rows = 0, max(1, _BLOCK * tensor.shape[0] // tensor.numel())
    for a in range(0, tensor.shape[0], rows):
        part = tensor[a : a + rows]
        index = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for d, (o, s) in enumerate(zip(offset, steps, strict=True)):
            start = o + (a if d == 0 else 0)
            along = torch.arange(start, start + part.shape[d], dtype=torch.int64, device=tensor.device) * s
            index = index + along.reshape([-1 if e == d else 1 for e in range(part.dim())])
        index = index.reshape(-1)
        bits = _view_as_integers(part.reshape(-1)).to(torch.int64, copy=True)
        if tensor.element_size() == 16:
            index = (2 * index).repeat_interleave(2)
            index[1::2] += 1
        total += _sum_mixed(bits, index.contiguous())
    return total % (1 << 64)


# -------------------------------------------------------------------------------------------------- pieces and owners


def get_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached from autograd: the local shard of a DTensor, otherwise the tensor
    itself."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def find_shard_offset(tensor: Any) -> Any:
    """Return the index of the first element of this rank's shard in the unsharded tensor, one number for each
    dimension.

    Zeros for a plain tensor or an empty shard.
    """
    if not hasattr(tensor, "_local_tensor") or not get_local_shard(tensor).numel():
        return (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(int(o) for o in chunk.offsets)


def is_counted_on_this_rank(tensor: Any) -> bool:
    """Tell whether this rank contributes to sums over ranks for a tensor: of ranks with the same shard, only the first
    does.

    Along replicated dimensions of a DTensor's mesh that is the rank with coordinate 0, and of several submeshes with
    copies of the tensor only the one that has rank 0 contributes. A plain tensor is on every rank, and counts on rank
    0.
    """
    import torch.distributed as dist

    if not hasattr(tensor, "_local_tensor"):
        return not dist.is_initialized() or dist.get_rank() == 0
    mesh = tensor.device_mesh
    at = mesh.get_coordinate()
    if at is None or not _has_rank_0(mesh, dist.get_rank()):
        return False
    return all(c == 0 for c, placement in zip(at, tensor.placements, strict=True) if placement.is_replicate())


@lru_cache
def _has_rank_0(mesh: DeviceMesh, rank: int) -> bool:
    """Tell whether rank 0 is in a DeviceMesh; cached, since each access to the mesh's tensor of ranks computes that
    tensor.

    `rank`, that of this process, is part of the cache's key: a submesh has other ranks on another rank, but compares
    equal.
    """
    return bool((mesh.mesh == 0).any())


def sum_over_ranks(values: Sequence[float], *, integers: bool, device: device | str) -> list[float]:
    """Sum numbers over all ranks, each with those at the same position; every rank passes as many. A collective.

    Args:
        values: this rank's numbers.
        integers: sum mod 2^64 and return int; otherwise float64 and float.
        device: of the tensor that is sent, as the process group needs it.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [int(v) % (1 << 64) for v in values] if integers else list(values)
    if integers:
        together = torch.tensor([_as_int64(int(v) % (1 << 64)) for v in values], dtype=torch.int64, device=device)
    else:
        together = torch.tensor(list(values), dtype=torch.float64, device=device)
    if len(values):
        dist.all_reduce(together)
    return [v % (1 << 64) for v in together.tolist()] if integers else list(together.tolist())


def fingerprint_tensors(
    tensors: Mapping[str, Tensor], device: device | str, dtype: dtype | None = None
) -> tuple[dict[str, str], list[str]]:
    """Take the fingerprints of live tensors. A collective.

    Copies are compared without sending them: the sum over all ranks must be the sum over the ranks that count, times
    the number of copies.

    Args:
        tensors: {name: tensor}, the same names in the same order on every rank.
        device: of the tensor that is sent, as the process group needs it.
        dtype: convert every tensor to it first; None takes them as they are.

    Returns:
        ({name: fingerprint in hex}, names of the tensors whose copies differ between ranks).
    """
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = [
        _fingerprint_shard(get_local_shard(t).to(dtype or t.dtype), find_shard_offset(t), tuple(t.shape))
        for t in tensors.values()
    ]
    owner = [v if is_counted_on_this_rank(t) else 0 for v, t in zip(mine, tensors.values(), strict=True)]
    total = sum_over_ranks([*owner, *mine], integers=True, device=device)
    out, apart = {}, []
    for k, (name, tensor) in enumerate(tensors.items()):
        out[name] = f"{total[k]:016x}"
        if total[k] * (world // _count_shards(tensor)) % (1 << 64) != total[len(tensors) + k]:
            apart.append(name)
    return out, apart


def fingerprint_each_rank(tensors: Mapping[str, Tensor]) -> dict[str, list[tuple[str, tuple[int, ...], str]]]:
    """Take the fingerprints of every rank's copies of plain tensors; DTensors are left out. A collective.

    Args:
        tensors: {name: tensor}, the same names in the same order on every rank.

    Returns:
        {name: [(dtype, shape, fingerprint in hex) for each rank]}.
    """
    whole = {n: t for n, t in tensors.items() if not hasattr(t, "_local_tensor")}
    every = gather_objects(
        [f"{_fingerprint_shard(t.detach(), (0,) * t.dim(), tuple(t.shape)):016x}" for t in whole.values()]
    )
    return {
        n: [(str(t.dtype).removeprefix("torch."), tuple(t.shape), prints[k]) for prints in every]
        for k, (n, t) in enumerate(whole.items())
    }


def _count_shards(tensor: Any) -> int:
    """Count the different shards that a tensor is cut into, without copies; 1 for a plain tensor."""
    if not hasattr(tensor, "_local_tensor"):
        return 1
    sizes = tensor.device_mesh.shape
    return prod(n for n, placement in zip(sizes, tensor.placements, strict=True) if not placement.is_replicate())


def compute_16bit_spacing(tensor: Tensor) -> Tensor:
    """Return for each element of a float16 or bfloat16 tensor the distance to the next larger number, in float32; 0
    for 0."""
    import torch

    exponent = tensor.float().frexp().exponent
    return torch.where(tensor == 0, 0.0, exponent.float().exp2() * (torch.finfo(tensor.dtype).eps / 2))


def compute_global_norms(
    tensors: Mapping[str, Tensor], device: device | str, of: Callable[[Tensor], Tensor] = lambda t: t
) -> dict[str, float]:
    """Compute {name: L2 norm over all ranks} of tensors, summed in float64. A collective.

    Args:
        tensors: {name: tensor}, the same names in the same order on every rank.
        device: of the tensor that is sent, as the process group needs it.
        of: maps this rank's shard to the tensor whose norm is computed; by default the shard itself.
    """
    import torch

    mine = [
        float(torch.linalg.vector_norm(of(get_local_shard(t)), dtype=torch.float64).item()) ** 2
        if is_counted_on_this_rank(t) and get_local_shard(t).numel()
        else 0.0
        for t in tensors.values()
    ]
    total = sum_over_ranks(mine, integers=False, device=device)
    return {n: v**0.5 for n, v in zip(tensors, total, strict=True)}


def fingerprint_files(
    opened: OpenCheckpoint,
    names: Sequence[str],
    rank: int,
    world: int,
    device: device | str,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    dtypes: Mapping[str, dtype] | None = None,
) -> dict[str, str]:
    """Return {name: fingerprint in hex} of tensors in a checkpoint's files, read by other code than the load. A
    collective.

    Every rank reads a part of the tensors, which are assigned by size, the largest first.

    Args:
        opened: the checkpoint.
        names: canonical names of the tensors, the same on every rank.
        rank, world: number of this rank, and of ranks.
        device: where fingerprints are computed and summed.
        progress: called with ("compare", bytes that this rank has read, bytes that it reads in all).
        dtypes: {name: torch dtype} to convert tensors to first; others keep the dtype of the files. None converts none.

    Raises:
        CkpttoolError: a file cannot be read, or is damaged.
    """
    import torch

    from ...engine.copy.stream import Reader, StreamJob

    ckpt = opened.locate()
    load, mine = [0] * world, []
    for n in sorted(names, key=lambda n: (-ckpt.tensors[n].nbytes, n)):
        least = load.index(min(load))
        load[least] += ckpt.tensors[n].nbytes + 4096
        if least == rank:
            mine.append(n)
    order = {n: k for k, n in enumerate(ckpt.tensors)}
    mine.sort(key=order.__getitem__)
    sums = dict.fromkeys(names, 0)
    reader = Reader(opened.source, ckpt.files, ckpt.records)
    done, total = 0, sum(ckpt.tensors[n].nbytes for n in mine)
    for block in reader.blocks(StreamJob(n, ckpt.tensors[n]) for n in mine):
        if block.count:
            dtype = getattr(torch, ckpt.tensors[block.name].dtype)
            data = torch.frombuffer(bytearray(block.data), dtype=dtype)
            sums[block.name] += fingerprint_flat(data.to(device, (dtypes or {}).get(block.name, dtype)), block.first)
        done += block.source_bytes
        progress("compare", done, total)
    reader.finish()
    whole = sum_over_ranks(list(sums.values()), integers=True, device=device)
    return {n: f"{v:016x}" for n, v in zip(sums, whole, strict=True)}
