"""What a load does to the optimizers of a job: lets them create their state, and sets the options of their param
groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..errors import DoesNotFit, UsageError
from ..index.fqns import strip_wrappers
from .live_values import fit_to_live

if TYPE_CHECKING:
    import torch

    Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None

__all__ = [
    "OWN_FLAGS",
    "OptimizerList",
    "ParamGroup",
    "Plans",
    "create_optimizer_state",
    "get_saved_groups_and_state",
    "is_machine_error",
    "list_fqns_by_parameter",
    "list_optimizers",
    "make_options_restorer",
    "map_parameters_to_optimizers",
    "select_loaded_options",
    "set_options",
]

#: Options that choose an implementation of the optimizer and not its result: never loaded, never compared.
OWN_FLAGS = frozenset(("foreach", "fused", "capturable", "differentiable"))
#: A param group as torch has it: {option: value}.
ParamGroup = dict[str, Any]
#: [(live param group, the checkpoint's group with its options)]
Plans = Sequence[tuple[ParamGroup, ParamGroup]]


def list_fqns_by_parameter(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return {id() of a parameter: its FQNs, of which a tied parameter has several}."""
    raw = list(model.named_parameters(remove_duplicate=False))
    clean = strip_wrappers(n for n, _ in raw)
    out: dict[int, list[str]] = {}
    for n, p in raw:
        out.setdefault(id(p), []).append(clean[n])
    return out


def is_machine_error(error: Exception) -> bool:
    """Tell whether an error of torch is of the machine and not of the checkpoint: a GPU without memory or with a failed
    kernel, or a lost rank."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError))


def list_optimizers(optimizer: Optimizers) -> tuple[Any, ...]:
    """Return the optimizers of a job as a tuple, () where there is none.

    Args:
        optimizer: None, an optimizer, or several in an iterable, as get_state_dict takes them.

    Raises:
        UsageError: it is none of these.
    """
    if optimizer is None:
        return ()
    several = isinstance(optimizer, (list, tuple)) or not hasattr(optimizer, "param_groups")
    found = (optimizer,) if not several else tuple(optimizer) if isinstance(optimizer, Iterable) else ()
    if not found or not all(hasattr(o, "param_groups") and hasattr(o, "state") for o in found):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}; give an optimizer, a list of optimizers, or None for the "
            "weights only.",
            code="CKPT0223",
        )
    return found


class OptimizerList(list["torch.optim.Optimizer"]):
    """Several optimizers, each over its own parameters (Muon beside AdamW), which step together. torch's get_state_dict
    and ckpttool.load take it as the list that it is."""

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Return the param groups of all optimizers in one list, in the order in which torch's get_state_dict
        numbers them."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        """Return {parameter: state} of all optimizers."""
        return {p: state for optimizer in self for p, state in optimizer.state.items()}

    def step(self) -> None:
        """Call `step()` of each optimizer."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self) -> None:
        """Call `zero_grad()` of each optimizer."""
        for optimizer in self:
            optimizer.zero_grad()


def map_parameters_to_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
    """Return {id() of a parameter: its optimizer}.

    Raises:
        UsageError: a parameter is in two of the optimizers.
    """
    out: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if out.setdefault(id(p), optimizer) is not optimizer:
                raise UsageError(
                    "a parameter is in two of the optimizers, and a checkpoint has one state for it.", code="CKPT0223"
                )
    return out


def select_loaded_options(group: Mapping[str, object]) -> ParamGroup:
    """Return those options of a param group that a checkpoint may set, {option: value}: all but its parameters, their
    names, and foreach, fused, capturable and differentiable."""
    return {k: v for k, v in group.items() if k not in OWN_FLAGS and k not in ("params", "param_names")}


def get_saved_groups_and_state(optimizer: torch.optim.Optimizer) -> tuple[list[ParamGroup], dict[int, Any]]:
    """Return (param groups, {id() of a parameter: its state}) as an optimizer would save them, from its
    state_dict(). If that has an unusual form, return the optimizer's live groups and state instead."""
    saved, groups = optimizer.state_dict(), optimizer.param_groups
    try:
        pairs = [
            (p, i)
            for g, q in zip(groups, saved["param_groups"], strict=True)
            for p, i in zip(g["params"], q["params"], strict=True)
        ]
        return saved["param_groups"], {id(p): saved["state"].get(i, {}) for p, i in pairs}
    except (LookupError, TypeError, ValueError, AttributeError):
        return groups, {id(p): state for p, state in optimizer.state.items()}


def make_options_restorer(groups: Iterable[dict[str, object]]) -> Callable[[], None]:
    """Return a function that restores the present options of these param groups. A tensor among the options (such as
    a learning rate) stays the same object and gets its present value again."""
    import torch

    before = [(g, {k: (v, _copy_mutable(v)) for k, v in g.items() if k != "params"}) for g in groups]

    @torch.no_grad()
    def restore() -> None:
        """Give the groups the options that they had; options that were added since are removed."""
        for group, old in before:
            for k in [k for k in group if k != "params" and k not in old]:
                del group[k]
            for k, (held, value) in old.items():
                group[k] = held.copy_(value) if isinstance(held, torch.Tensor) else _copy_mutable(value)

    return restore


def _copy_mutable(x: Any) -> Any:
    """Return a copy of a tensor or container, which a step may change in place; any other object itself."""
    if hasattr(x, "copy_"):
        return x.detach().clone()
    return deepcopy(x) if isinstance(x, (dict, list, set, deque)) else x


def set_options(group: dict[str, object], stored: Mapping[str, object]) -> ParamGroup:
    """Set the options of a param group to those of a checkpoint, converted to the types that the group has, and return
    {name: value} of what was set.

    Args:
        group: the live param group; a tensor among its options is filled in place.
        stored: the checkpoint's param group.
    """
    import torch

    want = {k: fit_to_live(x, group.get(k)) for k, x in select_loaded_options(stored).items()}
    for k, x in want.items():
        held = group.get(k)
        if isinstance(held, torch.Tensor) and isinstance(x, torch.Tensor) and held.shape == x.shape:
            # such as a learning rate that a compiled step reads
            with torch.no_grad():
                held.copy_(x)
        else:
            group[k] = _copy_mutable(x)
    return want


def create_optimizer_state(optimizer: torch.optim.Optimizer, wanted: Sequence[object], plans: Plans) -> None:
    """Let an optimizer create the state of some parameters, by a step that changes nothing else.

    Gradients and the learning rate are zero, as in torch's own _init_optim_state, so weights keep their values. The
    step uses the options of the checkpoint, since the slots depend on them (amsgrad, momentum). If that fails, as for a
    schedule-free optimizer that was saved in evaluation mode, the step uses the options of the job. The options are
    restored afterwards, since some optimizers count their steps in them.

    Args:
        optimizer: the optimizer, whose state is cleared first.
        wanted: the parameters that get a state.
        plans: [(live param group, the checkpoint's group with its options)].

    Raises:
        DoesNotFit: the step fails, also with the job's own options.
    """
    import torch

    chosen = set(map(id, wanted))
    gradients = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
    restore = make_options_restorer(optimizer.param_groups)

    def step() -> None:
        """Make a step of the optimizer with a learning rate of zero."""
        for g in optimizer.param_groups:
            if "lr" in g:
                g["lr"] = torch.zeros_like(g["lr"]) if isinstance(g["lr"], torch.Tensor) else 0.0
        optimizer.state.clear()
        type(optimizer).step(optimizer)

    try:
        for p, _ in gradients:
            p.grad = torch.zeros_like(p) if id(p) in chosen else None
        try:
            for group, stored in plans:
                set_options(group, stored)
            step()
        except Exception:
            restore()
            step()
    except Exception as e:
        if is_machine_error(e):
            raise
        raise DoesNotFit(
            f"{type(optimizer).__name__} of the job creates no state: its step fails with zero gradients "
            f"({type(e).__name__}: {str(e).partition('. ')[0].rstrip('.')}). Give the job an optimizer that can train "
            "its parameters as they are sharded, or load with dcp.load, storage_reader and your own state dict.",
            code="CKPT1201",
        ) from e
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        restore()
