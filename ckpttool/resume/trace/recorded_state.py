"""What the ranks of a training job hold beside model and optimizer, gathered for a `Recorder`.

    given = check_recorder_sources(scheduler=scheduler, extra={"ema": ema.state_dict, "epoch": lambda: epoch})
    found = gather_side_state(given, device)  # on every rank: values, others, variants, generators, unrecorded

An object that fails on one rank (its state_dict raises, say) is left out on all, and named in `unrecorded`; no rank
waits for another that has gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, argument
from ...index.checkpoint import Path
from ...index.fqns import EXTRA_STATE, strip_wrappers
from ...live.collectives import gather_objects
from ...printable import count_noun, list_first
from . import fingerprint
from .side_state import collect_side_state, flatten_side_state, make_array_mark

if TYPE_CHECKING:
    import torch

__all__ = ["check_recorder_sources", "gather_side_state"]

_MODEL_KEYS = frozenset(("model", "optim", "optimizer", "state_dict"))


def check_recorder_sources(*, scheduler: object, scaler: object, dataloader: object, extra: object) -> dict[str, Any]:
    """Check the arguments of a `Recorder` for side state, and return them as a dict by their names.

    Args:
        scheduler, scaler, dataloader: an object with `state_dict()`, a function without arguments that returns the
            state, the state itself as a dict, or a list of such; None for none.
        extra: {key at the root of the checkpoint: object with `state_dict()`, function or data}, or a function that
            returns such a dict; None for none.

    Returns:
        {"scheduler", "scaler", "dataloader", "extra": the argument as it was given}, without those that are None.

    Raises:
        UsageError: an argument is something else, or `extra` has a key of the model, the optimizer or another argument.
    """
    out: dict[str, Any] = {}
    for key, source in (("scheduler", scheduler), ("scaler", scaler), ("dataloader", dataloader)):
        if source is None:
            continue
        for one in source if isinstance(source, (list, tuple)) else [source]:
            if not (hasattr(one, "state_dict") or callable(one) or isinstance(one, Mapping)):
                raise UsageError(
                    f"{argument(key)} is a {type(one).__name__}, which has no state_dict(). Pass the object whose "
                    "state the checkpoint stores, or a function that returns that state.",
                    code="CKPT0223",
                )
        out[key] = source
    if extra is not None and not callable(extra):
        if not isinstance(extra, Mapping):
            raise UsageError(
                f"{argument('extra')} is a {type(extra).__name__}. Pass a dict {{key at the root of the checkpoint: "
                "state, or object with state_dict(), or function}, or a function that returns such a dict.",
                code="CKPT0223",
            )
        _check_extra_keys(extra, out)
    if extra is not None:
        out["extra"] = extra
    return out


def _check_extra_keys(extra: Mapping[str, object], others: Collection[str]) -> Mapping[str, object]:
    """Return `extra`, unless it has keys of model and optimizer, or of `others`.

    Raises:
        UsageError: it has such a key, or one that is no text.
    """
    odd = [k for k in extra if not isinstance(k, str) or k in _MODEL_KEYS or k in others]
    if odd:
        raise UsageError(
            f"{argument('extra')} has the key {odd[0]!r}, which is not the name of a further entry of the checkpoint: "
            "model and optimizer are arguments of their own, and so are scheduler, scaler and dataloader.",
            code="CKPT0223",
        )
    return extra


def _read_state_dict(source: object) -> Any:
    """Return the state_dict() of an object or of each of a list, or what a function returns; anything else as it is."""
    if hasattr(source, "state_dict"):
        return source.state_dict()
    if isinstance(source, (list, tuple)) and any(hasattr(x, "state_dict") for x in source):
        return [_read_state_dict(x) for x in source]
    return source() if callable(source) else source


def gather_side_state(
    given: Mapping[str, Any], device: torch.device | str, model: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Gather the fields of a state record from all ranks. A collective.

    Values that only some ranks hold (such as each rank's own dataloader) are all included. If ranks hold different
    values under one name, a checkpoint may have any of them: `variants` lists all. State that cannot be read raises no
    error.

    Args:
        given: what `check_recorder_sources` returned.
        device: of the tensors that collectives send.
        model: the extra states of its modules are gathered, too; None for none.

    Returns:
        {"values": {name: plain value}, "others": {name: mark (dtype, shape, fingerprint)}, "variants": {name: differing
        values or marks}, "generators": marks of random states, a dict for each rank, "unrecorded": {what could not be
        read: why}}.
    """
    wrong: dict[str, str] = {}
    tree: dict[str, Any] = {}
    mine = collect_side_state({})
    for key, source in given.items():
        try:
            if key == "extra":
                extra = source() if callable(source) else source
                found = {k: _read_state_dict(v) for k, v in _check_extra_keys(extra, given.keys() - {"extra"}).items()}
            else:
                found = {key: _read_state_dict(source)}
            flatten_side_state(found)
        except Exception as e:
            wrong[key] = f"{type(e).__name__}: {e}"
            continue
        tree |= found
    # all keys together, since a second one of a kind (dataloader and sampler) has another place
    makers: dict[str, Callable[[], Mapping[Path, object]]] = {
        "extra": partial(flatten_side_state, tree) if tree else dict,
        "extra states": partial(_collect_extra_states, model),
    }
    for key, make in makers.items():
        try:
            part = collect_side_state(make())
        except Exception as e:
            wrong[key] = f"{type(e).__name__}: {e}"
            continue
        for ours, new in zip(mine, part, strict=True):
            ours.update(new)
    parts = gather_objects((mine.values, mine.others, sorted(mine.sharded), wrong, _mark_generators()))
    unrecorded: dict[str, str] = {}
    for rank, part in enumerate(parts):
        for key, why in part[3].items():
            unrecorded.setdefault(key, f"its state could not be read on rank {rank} ({why})")
    variants: dict[str, list[object]] = {}
    values = _merge_rank_values([p[0] for p in parts], variants)
    others = _merge_rank_values([p[1] for p in parts], variants)
    if len({tuple(p[2]) for p in parts}) == 1:
        names = sorted(mine.sharded)
        tensors = {n: mine.sharded[n] for n in names}
        prints, _ = fingerprint.fingerprint_tensors(tensors, device)
        others |= {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape), prints[n]) for n, t in tensors.items()}
    else:
        names = sorted(set().union(*(p[2] for p in parts)))
        unrecorded["extra"] = (
            f"ranks hold different sharded tensors, of {count_noun(len(names), 'tensor')}: {list_first(names)}"
        )
    for key in unrecorded.keys() & given.keys() - {"extra"}:  # what the other ranks have is not the whole
        for found_ in (values, others, variants):
            for n in [n for n in found_ if n.partition(".")[0] == key]:
                del found_[n]
    return {
        "values": values,
        "others": others,
        "variants": variants,
        "generators": [p[4] for p in parts],
        "unrecorded": unrecorded,
    }


def _collect_extra_states(model: torch.nn.Module | None) -> dict[Path, object]:
    """Return {canonical path: result of get_extra_state()} of the modules of a model that define it; {} for None.

    Tensors are left out, since they are among those of the model.
    """
    from torch.nn import Module

    if model is None:
        return {}
    found = {
        f"{name}.{EXTRA_STATE}".removeprefix("."): module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not Module.get_extra_state
    }
    clean = strip_wrappers([*found, *(n for n, _ in model.named_parameters())])
    return {("model", clean[n]): x for n, x in found.items() if not hasattr(x, "element_size")}


def _merge_rank_values(parts: list[dict[str, object]], variants: dict[str, list[object]]) -> dict[str, object]:
    """Merge {name: value} of each rank into one; if ranks differ, the first value counts.

    `variants` then gets {name: all different values}.
    """
    out: dict[str, object] = {}
    for part in parts:
        for name, value in part.items():
            if repr(out.setdefault(name, value)) != repr(value):
                seen = variants.setdefault(name, [out[name]])
                if all(repr(v) != repr(value) for v in seen):
                    seen.append(value)
    return out


def _mark_generators() -> dict[str, object]:
    """Return the marks (dtype, shape, fingerprint) of this rank's global generators by "torch", "cuda", "numpy" and
    "python".

    "numpy_position" is how many numbers of numpy's current block have been used.
    """
    import numpy as np
    import torch

    out: dict[str, object] = {"torch": make_array_mark(torch.get_rng_state())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a job on the CPU starts no GPU
        out["cuda"] = make_array_mark(torch.cuda.get_rng_state())
    found = collect_side_state({("python",): random.getstate(), ("numpy",): np.random.get_state(legacy=True)})
    out["python"], out["numpy"] = found.others["python.1"], found.others["numpy.1"]
    return {**out, "numpy_position": found.values["numpy.2"]}
