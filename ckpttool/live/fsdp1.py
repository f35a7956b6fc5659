"""`describe_fsdp1`: what a checkpoint of a live FSDP1 model does not say about its flat parameters.

Runs in the job, on the model itself. The result is the JSON of flat_layout.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..engine.flat.flat_layout import Flat, FlatLayout, FlatPart, to_json
from ..errors import Unsupported, argument
from ..index.fqns import WRAPPERS

if TYPE_CHECKING:
    import torch

__all__ = ["describe_fsdp1"]


def _strip_wrappers(name: str) -> str:
    """Return the name of a module or parameter without the modules that wrappers (FSDP1, torch.compile, activation
    checkpointing) insert."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)


def describe_fsdp1(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, object]:
    """Describe the flat parameters of a live FSDP1 model, which its checkpoints do not, for --flat-layout. To be called
    on one rank.

        json.dump(ckpttool.describe_fsdp1(model, optimizer), open("flat_layout.json", "w"))

    With the optimizer, the result also lists the parameters of its param groups, in order.

    Raises:
        Unsupported: no module of the model is wrapped by FSDP1, or this version of torch stores its flat parameters in
            another way.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    flats: list[Flat] = []
    keys: dict[int, str] = {}
    uop, shards = False, 1
    for raw, module in model.named_modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        path, p = _strip_wrappers(raw), cast(Any, getattr(handle, "flat_param", None))
        fields = (
            "_fqns",
            "_shapes",
            "_strides",
            "_contiguities",
            "_numels_with_padding",
            "_is_padding_mask",
            "_shared_param_infos",
            "_unpadded_unsharded_size",
        )
        missing = [f for f in fields if not hasattr(p, f)]
        if missing:
            raise Unsupported(
                f"this torch keeps no {missing[0]} in its flat parameters; ckpttool knows torch 2.10 to 2.13. Give "
                f"{argument('like')} a checkpoint of the same model instead.",
                code="CKPT0329",
            )
        parts, at = [], 0
        described = zip(p._fqns, p._shapes, p._strides, p._contiguities, strict=True)
        for n, pad in zip(p._numels_with_padding, p._is_padding_mask, strict=True):
            if not pad:
                fqn, shape, steps, contiguous = next(described)
                parts.append(FlatPart(_join_fqn(path, fqn), tuple(shape), at, None if contiguous else tuple(steps)))
            at += n
        shared = tuple(
            (
                _join_fqn(path, f"{s.module_name}.{s.param_name}"),
                _join_fqn(path, f"{s.prim_module_name}.{s.prim_param_name}"),
            )
            for s in p._shared_param_infos
        )
        dtype = str(p.dtype).removeprefix("torch.")
        flats.append(Flat(path, tuple(parts), p._unpadded_unsharded_size.numel(), dtype, shared))
        keys[id(p)] = flats[-1].key
        uop = uop or bool(getattr(handle, "_use_orig_params", False))
        shards = int(handle.world_size) if handle.uses_sharded_strategy else 1
    if not flats:
        raise Unsupported(
            f"no module of the {type(model).__name__} is wrapped by torch.distributed.fsdp.FullyShardedDataParallel. "
            "A model that fully_shard was called on (FSDP2) needs no flat layout.",
            code="CKPT0337",
        )
    names: dict[str, None] = {}
    inside: dict[str, list[str]] = {}
    for f in flats:
        for name in (*(p.name for p in f.parts), *(a for a, _ in f.shared)):
            inside.setdefault(name.rpartition(".")[0], []).append(name)
    for raw, module in model.named_modules():
        path = _strip_wrappers(raw)
        temporary = getattr(module, "_non_persistent_buffers_set", ())
        own = [n for n, b in getattr(module, "_buffers", {}).items() if b is not None and n not in temporary]
        names |= dict.fromkeys([*inside.get(path, ()), *(_join_fqn(path, n) for n in own)])
    groups = None
    if optimizer is not None:
        keys |= {id(p): _strip_wrappers(n) for n, p in model.named_parameters() if id(p) not in keys}
        groups = tuple(tuple(keys.get(id(p), "?") for p in g["params"]) for g in optimizer.param_groups)
    return to_json(FlatLayout(uop, shards, tuple(flats), tuple(names), groups))


def _join_fqn(module: str, name: str) -> str:
    """Return the FQN of a parameter without wrapper modules.

    Args:
        module: name of its module, without wrapper modules; "" for the root.
        name: name of the parameter in that module.
    """
    name = _strip_wrappers(name)
    return f"{module}.{name}" if module else name
