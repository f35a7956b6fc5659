"""What a job holds after its last step, and the learning rates that its scheduler would give it from there on.

    read_state_after(model, optimizer, step)        a sketch of every tensor, values, param groups; no copies
    step_scheduler_ahead(scheduler, groups, step)   the rates of the next 1,000 steps

Faults that no step shows are seen here: buffers that training changes, such as running statistics, and a schedule that
decays later than the steps that were run.
"""

from __future__ import annotations

import base64
import inspect
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from .fingerprint import can_fingerprint
from .live_facts import (
    as_float,
    choose_collective_device,
    collect_named_state,
    get_dtype_name,
    is_same_on_all_ranks,
    read_one_element_values,
    read_optimizer_numbers,
    to_plain_param_groups,
)
from .records import AfterRecord, ScheduleRecord
from .sketches import sketch_tensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "copy_scheduler",
    "decode_rates",
    "needs_step_argument",
    "read_state_after",
    "sketch_buffers",
    "step_scheduler_ahead",
]

#: How many steps a scheduler is stepped ahead.
_AHEAD = 1000


def _collect_named_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {canonical name: buffer} of a model, including those that no checkpoint holds, except on the meta
    device."""
    from ...index.fqns import strip_wrappers

    found = {n: b for n, b in model.named_buffers() if b.device.type != "meta"}
    clean = strip_wrappers(found)
    return {f"model.{clean[n]}": b for n, b in found.items()}


def sketch_buffers(model: torch.nn.Module) -> dict[str, str]:
    """Return {canonical name: sketch} of the model's buffers. A collective."""
    return sketch_tensors(_collect_named_buffers(model), choose_collective_device(model))[0]


def read_state_after(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> AfterRecord:
    """Read a job's state after a step. A collective.

    Args:
        model: the model of the job.
        optimizer: its optimizer; None if the job has none.
        step: number of optimizer steps that were taken; it is only recorded.

    Returns:
        Sketches of all tensors, values of tensors with one element, and param groups; {} if ranks hold different
        tensors.
    """
    buffers = _collect_named_buffers(model)
    tensors = {n: t for n, t in {**collect_named_state(model, optimizer), **buffers}.items() if can_fingerprint(t)}
    if not is_same_on_all_ranks(list(tensors)):
        return {}
    sketches, apart = sketch_tensors(tensors, choose_collective_device(model))
    return {
        "step": step,
        "sketches": {n: (get_dtype_name(t), sketches[n]) for n, t in tensors.items()},
        "buffers": [n for n in buffers if n in tensors],
        "apart": apart,
        "scalars": read_one_element_values(tensors)
        | ({} if optimizer is None else read_optimizer_numbers(model, optimizer)),
        "groups": [] if optimizer is None else to_plain_param_groups(model, optimizer),
    }


# ------------------------------------------------------------------------------------------------------- the scheduler


class _Follower:
    """Stands for the optimizer of a scheduler's copy: param groups without parameters, and a step that does nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the options of the optimizer's param groups, without their parameters."""
        self.param_groups = [
            {k: [] if k == "params" else deepcopy(v) for k, v in g.items()} for g in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """Do nothing."""


def needs_step_argument(scheduler: Any) -> bool:
    """Tell whether a scheduler's step() requires an argument: a metric, as ReduceLROnPlateau's does, or an epoch."""
    needed = inspect.signature(scheduler.step).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed)


def copy_scheduler(
    scheduler: object, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[object, list[dict[str, object]]] | str:
    """Copy a scheduler so that stepping the copy does not affect the training.

    Only schedulers of torch itself are copied, since others may hold any object; functions that they hold are shared.

    Args:
        scheduler: the scheduler.
        model: the model of the job, which is not copied.
        optimizer: the optimizer of the scheduler; the copy gets param groups without parameters in its place.

    Returns:
        (copy, the param groups whose learning rates it sets); or a sentence that says why the scheduler is not copied.
    """
    if not type(scheduler).__module__.startswith("torch.optim."):
        return f"{type(scheduler).__name__} is no scheduler of torch, so no copy of it was stepped ahead"
    if needs_step_argument(scheduler):
        return f"{type(scheduler).__name__} needs a metric for a step, so it was not stepped ahead"
    follower = _Follower(optimizer)
    memo: dict[int, object] = {id(optimizer): follower, id(model): model}
    return deepcopy(scheduler, memo), follower.param_groups


def step_scheduler_ahead(
    scheduler: Any, groups: Sequence[Mapping[str, object]], step: int, tick: Callable[[], None] = lambda: None
) -> ScheduleRecord:
    """Step a scheduler up to 1,000 steps ahead, and record the learning rates of its param groups.

    If the scheduler raises an error, as OneCycleLR does after its last step, the rates end there.

    Args:
        scheduler: the scheduler, which is changed.
        groups: the param groups that it sets.
        step: number of optimizer steps that were taken.
        tick: called after every step.
    """
    every: list[list[float]] = []
    stopped, groups = None, list(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer makes no step
        try:
            for _ in range(_AHEAD):
                every.append([as_float(g["lr"]) for g in groups])
                scheduler.step()
                tick()
        except (Exception, SystemExit) as e:
            stopped = f"{type(e).__name__}: {' '.join(str(e).split())}"
    curves = [_encode_rates(column) for column in zip(*every, strict=True)]
    distinct = list(dict.fromkeys(curves))
    out: ScheduleRecord = {"first": step + 1, "curves": distinct, "groups": [distinct.index(c) for c in curves]}
    return out if stopped is None else {**out, "stopped": stopped}


def _encode_rates(rates: Sequence[float]) -> str:
    """Return learning rates as base64 of zlib-compressed float64."""
    import numpy as np

    return base64.b64encode(zlib.compress(np.asarray(rates, "<f8").tobytes())).decode()


def decode_rates(record: ScheduleRecord) -> list[list[float]]:
    """Return the learning rates of each param group, one for each step from `first` on; [] if the record has none.

    Raises:
        ValueError: the record is damaged.
    """
    import numpy as np

    try:
        curves = [np.frombuffer(zlib.decompress(base64.b64decode(c)), "<f8").tolist() for c in record.get("curves", [])]
        return [curves[k] for k in record.get("groups", [])]
    except (zlib.error, IndexError) as e:
        raise ValueError(f"no rates of a schedule: {e}") from None
