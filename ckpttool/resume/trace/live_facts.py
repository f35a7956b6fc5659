"""What is read off a live model and its optimizer as plain data: names, param groups, configuration, norms of gradients
and updates.

`StepNorms.measure_gradients`, `StepNorms.measure_updates` and `is_same_on_all_ranks` are collective.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ...extras import get_installed_version
from ...live.collectives import gather_objects
from ...live.job_optimizers import OWN_FLAGS, OptimizerList, ParamGroup, list_fqns_by_parameter
from ...live.live_values import iterate_leaves
from .fingerprint import get_local_shard, is_counted_on_this_rank, sum_over_ranks
from .numerics import read_numerics
from .records import EnvironmentRecord
from .side_state import collect_side_state, make_array_mark
from .sketches import WIDE, encode_sketches, sketch_shard

if TYPE_CHECKING:
    import torch

__all__ = [
    "StepNorms",
    "as_float",
    "choose_collective_device",
    "collect_named_state",
    "compute_total_norm",
    "describe_environment",
    "get_dtype_name",
    "has_dropout",
    "is_same_on_all_ranks",
    "list_dropouts",
    "list_own_load_functions",
    "list_tied_names",
    "named_parameters",
    "read_held_values",
    "read_model_config",
    "read_one_element_values",
    "read_optimizer_numbers",
    "to_plain_param_groups",
]


class StepNorms:
    """Norms and sketches of the gradient and of the update of every trained parameter; `copy_parameters` before and
    `measure_updates` after the optimizer's step.

    `grads` and `updates` are {FQN: L2 norm}; `grad_sketches` and `update_sketches` have the sketches of the same
    tensors, each over its norm, in the same order (`sketches.encode_sketches`).

    A forgiving one measures nothing where a rank fails, or where ranks have different parameters, and says why in
    `trouble`; otherwise the error is raised, on the rank that has it.
    """

    def __init__(self, model: torch.nn.Module, forgiving: bool = False) -> None:
        """Prepare to measure a model.

        Args:
            model: the model, whose trained parameters are measured.
            forgiving: keep the text of an error as `trouble` instead of raising the error.
        """
        self.model, self.forgiving = model, forgiving
        self.grads: dict[str, float] = {}
        self.updates: dict[str, float] = {}
        self.grad_sketches = self.update_sketches = ""
        self.copied_bytes = 0
        self.trouble: str | None = None
        self._old: dict[str, torch.Tensor] = {}
        self._alike: bool | None = None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return {FQN: parameter} of the trained parameters, tied ones once."""
        return {n: p for n, p in named_parameters(self.model).items() if p.requires_grad}

    def copy_parameters(self) -> None:
        """Copy this rank's shards of the parameters, before the optimizer's step. If this object is forgiving, the
        first call is a collective."""
        if self._is_comparable():
            with self._keep_trouble():
                self._old = {n: get_local_shard(p).clone() for n, p in self.parameters().items()}
                self.copied_bytes = sum(t.nbytes for t in self._old.values())

    def measure_gradients(self) -> None:
        """Measure the gradients as they are now, into `grads` and `grad_sketches`; parameters without a gradient are
        left out. A collective."""
        self.grads, self.grad_sketches = self._measure(
            lambda n, p: None if p.grad is None else (p.grad, get_local_shard(p.grad))
        )

    def measure_updates(self) -> None:
        """Measure how far the parameters have moved since `copy_parameters`, into `updates` and `update_sketches`. A
        collective."""

        def moved(n: str, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new, old = get_local_shard(p), self._old.pop(n)
            return p, new.double() - old.double() if new.element_size() == 8 else new.float() - old.float()

        self.updates, self.update_sketches = self._measure(moved)

    def _measure(
        self, part: Callable[[str, torch.nn.Parameter], tuple[torch.Tensor, torch.Tensor] | None]
    ) -> tuple[dict[str, float], str]:
        """Compute norms and sketches of a tensor for each trained parameter. A collective.

        Args:
            part: maps (FQN, parameter) to (a tensor that is laid out over ranks as the measured one, this rank's
                elements of the measured one), or to None. Parameters for which every rank returns None are left out.

        Returns:
            ({FQN: L2 norm over all ranks}, encoded sketches). ({}, "") after an error on any rank, if this object is
            forgiving.
        """
        import torch

        if not self._is_comparable():
            return {}, ""
        params = self.parameters()
        squares, there = [0.0] * len(params), [0.0] * len(params)
        rows = [[0.0] * WIDE for _ in params]
        with self._keep_trouble():
            for k, (n, p) in enumerate(params.items()):
                found = part(n, p)
                if found is not None:
                    there[k] = 1.0
                    if is_counted_on_this_rank(found[0]):
                        squares[k] = float(torch.linalg.vector_norm(found[1], dtype=torch.float64).item()) ** 2
                        rows[k] = sketch_shard(found[1], found[0])
        wrong = 0.0 if self.trouble is None else 1.0
        mine = [*squares, *there, *(v for row in rows for v in row), wrong]
        total = sum_over_ranks(mine, integers=False, device=choose_collective_device(self.model))
        if total[-1]:
            self.trouble = self.trouble or "another rank could not measure its shards"
            return {}, ""
        count, norms, units = len(params), dict[str, float](), list[list[float]]()
        for k, n in enumerate(params):
            if total[count + k]:
                norms[n] = total[k] ** 0.5
                at = 2 * count + k * WIDE
                units.append([v / norms[n] if 0 < norms[n] < math.inf else 0.0 for v in total[at : at + WIDE]])
        return norms, encode_sketches(units)

    def _is_comparable(self) -> bool:
        """Tell whether all ranks have the same parameters; with pipeline parallelism they do not.

        True without a check unless this object is forgiving. A collective the first time.
        """
        if self._alike is None:
            self._alike = not self.forgiving or is_same_on_all_ranks(list(self.parameters()))
            if not self._alike:
                self.trouble = "ranks have different parameters, as with pipeline parallelism"
        return self._alike

    @contextmanager
    def _keep_trouble(self) -> Iterator[None]:
        """While the block runs, keep an error as `trouble` instead of raising it, if this object is forgiving."""
        try:
            yield
        except Exception as e:
            if not self.forgiving:
                raise
            self.trouble = f"{type(e).__name__}: {e}"


def compute_total_norm(norms: Mapping[str, float]) -> float:
    """Compute the L2 norm of several tensors together from their norms, {name: norm}."""
    return float(sum(v * v for v in norms.values()) ** 0.5)


def collect_named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | OptimizerList | None = None
) -> dict[str, torch.Tensor]:
    """Return {canonical name: tensor} of a live job: parameters, persistent buffers, and the optimizer's tensors.

    The optimizer's tensors are left out if `optimizer` is None.
    """
    from ...index.fqns import strip_wrappers

    found = {n: t for n, t in model.state_dict().items() if hasattr(t, "element_size")}
    clean = strip_wrappers(found)
    out = {f"model.{clean[n]}": t for n, t in found.items()}
    if optimizer is not None:
        for fqn, p in named_parameters(model).items():
            for slot, _, t in iterate_leaves(optimizer.state.get(p, {}), ()):
                if hasattr(t, "element_size"):
                    out[f"optim.state.{fqn}.{slot}"] = t
    return out


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return {FQN: parameter}, tied ones once; FQNs are without the parts that wrappers such as DDP add."""
    from ...index.fqns import strip_wrappers

    found = dict(model.named_parameters())
    clean = strip_wrappers(found)
    return {clean[n]: p for n, p in found.items()}


def to_plain_param_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer | OptimizerList) -> list[ParamGroup]:
    """Return the optimizer's param groups as plain data: {option: value}, with a list of FQNs under "params".

    A parameter that the model does not have is "?".
    """
    names = {id(p): n for n, p in named_parameters(model).items()}
    out = []
    for group in optimizer.param_groups:
        options = {k: _to_plain_option(v) for k, v in group.items() if k not in OWN_FLAGS and k != "params"}
        out.append({**options, "params": [names.get(id(p), "?") for p in group["params"]]})
    return out


def _to_plain_option(x: Any) -> object:
    """Return an option of a param group as plain data.

    A tensor of one element becomes a number, a larger one a text with its dtype, shape and fingerprint, and an unknown
    object the name of its class.
    """
    if hasattr(x, "element_size"):
        return as_float(x) if x.numel() == 1 else " ".join(map(str, make_array_mark(x)))
    if isinstance(x, (list, tuple)):
        return [_to_plain_option(v) for v in x]
    if isinstance(x, dict):
        return {str(k): _to_plain_option(v) for k, v in x.items()}
    return x if isinstance(x, (int, float, str, bool, type(None))) else type(x).__name__


def list_tied_names(model: torch.nn.Module) -> list[list[str]]:
    """List the FQNs of each parameter that has several: [["lm_head.weight", "model.embed_tokens.weight"]]."""
    return sorted(sorted(names) for names in list_fqns_by_parameter(model).values() if len(names) > 1)


def read_model_config(model: torch.nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a transformers model as plain data; None for a model without one."""
    inner = getattr(model, "module", model)
    config: object = getattr(inner, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return plain


def read_one_element_values(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return {name: value} of the tensors that have one element and are neither sharded nor complex."""
    return {
        n: float(t.item())
        for n, t in tensors.items()
        if t.numel() == 1 and not hasattr(t, "_local_tensor") and not t.is_complex()
    }


def read_optimizer_numbers(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | OptimizerList
) -> dict[str, float]:
    """Return {canonical name: number} of the plain numbers in the optimizer's state, such as the steps of some
    optimizers.

    Names are those that tensors would have: "optim.state.<FQN>.step".
    """
    return {
        f"optim.state.{fqn}.{slot}": float(x)
        for fqn, p in named_parameters(model).items()
        for slot, _, x in iterate_leaves(optimizer.state.get(p, {}), ())
        if isinstance(x, (bool, int, float))
    }


def read_held_values(model: torch.nn.Module, scheduler: Any) -> dict[str, object]:
    """Return the state of a scheduler, and the extra states of a model's modules, as flat plain data.

    Args:
        model: its extra states are what get_extra_state() of its modules returns.
        scheduler: an object with `state_dict()`; None if there is none.

    Returns:
        {name: plain value, or [dtype, shape, fingerprint] of what is no plain value}. Names are such as
        "scheduler.milestones.[3]", with brackets around a key that is not text.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model)
    states: dict[tuple[str, ...], object] = {("model", n): x for n, x in state.items() if n.endswith("_extra_state")}
    if scheduler is not None:
        states["scheduler",] = scheduler.state_dict()
    found = collect_side_state({path: _with_bracketed_keys(x) for path, x in states.items()})
    return {**found.values, **{n: list(mark) for n, mark in found.others.items()}}


def _with_bracketed_keys(x: Any) -> object:
    """Return a copy of nested dicts, lists and tuples in which keys that are not text become text in brackets: 3
    becomes "[3]"."""
    if isinstance(x, Mapping):
        return {k if isinstance(k, str) else f"[{k!r}]": _with_bracketed_keys(y) for k, y in x.items()}
    return type(x)(map(_with_bracketed_keys, x)) if type(x) in (list, tuple) else x


def has_dropout(model: torch.nn.Module) -> bool:
    """Tell whether any dropout probability of the model is above zero."""
    return any(p > 0 for _, _, p in list_dropouts(model))


def list_dropouts(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, float]]:
    """List every dropout of a model: [(module, name of the module's attribute with the probability, probability)].

    These are torch's dropout modules, and attributes of other modules that are named "drop".
    """
    from torch.nn.modules.dropout import _DropoutNd

    out: list[tuple[torch.nn.Module, str, float]] = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            out.append((module, "p", float(module.p)))
        else:
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    out.append((module, name, value))
    return out


#: Packages whose loading code does nothing to a tensor that was filled in place.
_KNOWN_LOADERS = ("torch", "transformers", "peft", "ckpttool")


def list_own_load_functions(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """List the job's own functions that torch calls to load state dicts, and that `ckpttool.load` does not call.

    These are load_state_dict and _load_from_state_dict of classes, and hooks, of modules and optimizers; a hook is
    listed with the first module that has it. Those of torch, transformers and peft are left out.
    """
    found: dict[Any, str] = {}
    for name, module in model.named_modules():
        for method in ("load_state_dict", "_load_from_state_dict"):
            found.setdefault(_unwrap_function(getattr(module, method)), "")
        for hook in (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()):
            found.setdefault(_unwrap_function(hook), f" (a hook of {name or 'the model'})")
    for optimizer in optimizers:
        found.setdefault(_unwrap_function(optimizer.load_state_dict), "")
        for kind in ("pre", "post"):
            for hook in getattr(optimizer, f"_optimizer_load_state_dict_{kind}_hooks", {}).values():
                found.setdefault(_unwrap_function(hook), f" (a hook of {type(optimizer).__name__})")
    return [
        f"{x.__module__}.{x.__qualname__}{of}"
        for x, of in found.items()
        if str(x.__module__).partition(".")[0] not in _KNOWN_LOADERS
    ]


def _unwrap_function(x: object) -> object:
    """Return the function inside a bound method, a partial or torch's wrapper of a hook; for another callable its
    class."""
    for inner in ("hook", "func", "__func__"):
        x = getattr(x, inner, x)
    return x if hasattr(x, "__qualname__") else type(x)


def get_dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype without "torch.": "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def describe_environment(device: str | None = None) -> EnvironmentRecord:
    """Return versions, devices and CUDA settings, which can change results though no checkpoint records them.

    Args:
        device: "cuda" or "cpu", where the job computes; for "cpu" the machine's GPUs are left out. None if it is not
            known: GPUs are then described if there are any.
    """
    import platform

    import torch

    from ..._version import __version__

    out: EnvironmentRecord = {
        "ckpttool": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _find_loaded_packages(),
    }
    if device != "cpu" and torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
        out["numerics"] = read_numerics()
        out["cuda"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            version: Callable[[], Iterable[object]] = torch.cuda.nccl.version
            out["nccl"] = ".".join(map(str, version()))
    return out


def _find_loaded_packages() -> dict[str, str]:
    """Return {name: version} of the packages that this process has imported under their installed names, sorted by
    name."""
    names = sorted({module.partition(".")[0] for module in list(sys.modules)} - sys.stdlib_module_names)
    return {name: version for name in names if (version := _get_cached_version(name)) is not None}


_get_cached_version = cache(get_installed_version)


def choose_collective_device(model: torch.nn.Module | None) -> torch.device:
    """Return the torch.device for collectives: that of the parameters, or with NCCL this rank's GPU if they are on
    the CPU, or if there is no model (None)."""
    import torch

    on = next((p.device for p in (model.parameters() if model is not None else ())), torch.device("cpu"))
    if torch.distributed.is_initialized() and "nccl" in str(torch.distributed.get_backend()) and on.type == "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return on


def as_float(x: Any) -> float:
    """Convert a number, a tensor of one element, or a DTensor of one (then a collective) to float."""
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    return float(x.detach().item() if hasattr(x, "detach") else x)


def is_same_on_all_ranks(x: object) -> bool:
    """Tell whether all ranks have the same plain data, by a hash of its repr(). A collective."""
    from blake3 import blake3

    return len(set(gather_objects(blake3(repr(x).encode()).hexdigest()))) == 1
