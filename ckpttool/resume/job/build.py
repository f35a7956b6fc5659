"""The live job: a model on the meta device, sharded with FSDP2, and an optimizer with the checkpoint's own param
groups.

Two ways to a job:

    --config    a Hugging Face folder. The model is transformers' AutoModelForCausalLM; parameters have the dtypes of
                the checkpoint; those that no param group lists do not train. LoRA layers of the checkpoint are PEFT's.
                The class of the optimizer follows from the slots that the checkpoint has, its options from the
                checkpoint's param groups.
    --job       module.py:build. The user's function gives (model, optimizer, scheduler, data) or fewer, or a dict of
                those, "loss" if the model has another one, and "save" for --fresh. It may ask for `mesh` and `device`
                by the names of its parameters. A model without DTensors is sharded here; one that is sharded already is
                left as it is.

Parameters are created on the meta device, sharded, and only then given memory, so that no rank ever holds the whole
model. Buffers that are in no checkpoint (rotary frequencies) are computed as the model is built.

`fully_shard` goes over each block (transformers' `_no_split_modules`, or the elements of the model's ModuleLists) and
over the root. Gradients are summed over ranks, not averaged: the loss of a micro-batch is divided by the tokens of the
global batch, so that no number depends on how many ranks there are.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...engine.opening import OpenCheckpoint
from ...errors import Unsupported, UsageError, argument
from ...index.checkpoint import Checkpoint
from ...live.job_optimizers import OWN_FLAGS, OptimizerList, ParamGroup, list_optimizers
from ...printable import count_noun
from ..request import RunSettings
from ..trace.live_facts import list_dropouts, named_parameters
from ..trace.state_after import needs_step_argument
from .peft_model import add_lora_layers
from .user_job import call_build

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    #: A micro-batch: {"input_ids": tensor (rows, tokens), ...}.
    Batch = Mapping[str, torch.Tensor]
    #: (loss summed over the tokens that count, their number, logits or None)
    SummedLoss = tuple[Any, torch.Tensor, torch.Tensor | None]
    LossFunction = Callable[[nn.Module, Batch], SummedLoss]

__all__ = ["Job", "build_job"]


@dataclass
class Job:
    """What is trained. `loss(model, batch)` returns (sum over the tokens that count, their number, logits or None).

    `rank` and `world` are those of the data: ranks of one tensor-parallel group read the same rows. `scale` is what the
    sum of gradients must be multiplied with: 1, or the world size where a wrapper averages them. `dropout_off` is the
    largest probability of a dropout that was switched off. `own_loss` and `save` are the loss and the
    save(folder, step) of build(), None where there is none. `copied_bytes` are those of the copy of this rank's
    parameters by which updates are measured, `peak_before_copies` the peak memory (allocated, reserved) before the
    first copy.
    """

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    data: object
    loss: LossFunction
    rank: int
    world: int
    scale: float
    vocabulary: int | None
    notes: list[str]
    dropout_off: float = 0.0
    own_loss: Callable[..., object] | None = None
    random: bool = False
    copied_bytes: int = 0
    peak_before_copies: tuple[int, int] | None = None
    save: Callable[[str, int], object] | None = None

    @property
    def scheduler_waits(self) -> bool:
        """Tell whether the scheduler's step() requires an argument that resume-verify does not have: a metric, as
        ReduceLROnPlateau does, or an epoch."""
        return self.scheduler is not None and needs_step_argument(self.scheduler)


def build_job(settings: RunSettings, opened: OpenCheckpoint | None) -> Job:
    """Build the job that the settings describe, on this rank, before anything is loaded. A collective.

    `opened` is the checkpoint, whose dtypes, LoRA layers and optimizer a job of `config` gets; None for a job of the
    user's own that is trained from its start.

    Raises:
        UsageError: --config or --job do not give a job, or a job without a checkpoint has no initial weights or no
            optimizer. Unsupported: the job needs what only --job can say.
            MissingPackage: peft is needed and not installed. Errors of the user's build() pass through.
    """
    from torch.distributed.device_mesh import init_device_mesh

    dims = {n: settings.mesh[n] for n in ("dp_replicate", "dp_shard", "tp") if n in settings.mesh}
    mesh = init_device_mesh(settings.device, tuple(dims.values()), mesh_dim_names=tuple(dims))
    notes: list[str] = []
    optimizer: Any
    scheduler = data = loss = save = None
    dropout_off = 0.0
    if settings.job is not None:
        model, optimizer, scheduler, data, loss, save = call_build(settings, mesh)
        model = _nest_under_prefix(model, settings)
        vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
        if opened is None:
            _check_trainable_from_start(model, optimizer)
    else:
        assert opened is not None, "a config says nothing of an optimizer"
        model, dropout_off = _build_model_from_config(settings)
        with _parameters_on_meta():
            model = add_lora_layers(model, settings, opened)
        model = _nest_under_prefix(model, settings)
        _match_model_to_checkpoint(model, opened.checkpoint, notes)
        optimizer = None
        vocabulary = model.config.vocab_size
    if not settings.keep_dropout:
        for module, name, p in list_dropouts(model):
            if p > 0:
                setattr(module, name, 0.0)
                dropout_off = max(dropout_off, p)
    names = {id(p): n for n, p in named_parameters(model).items()}
    if not _is_distributed_model(model):
        hooked = [n for n, p in named_parameters(model).items() if p._backward_hooks]
        notes += [
            f"sharding drops gradient hooks, first of {n}; shard the model in build() to keep them" for n in hooked[:1]
        ]
        _shard_model(model, mesh, settings)
    _materialise_model(model, settings)
    if settings.job is None and opened is not None:
        optimizer = _build_optimizer(model, opened.checkpoint, notes)
    else:
        optimizer = _bind_optimizer(optimizer, model, names)
    scheduler = _bind_scheduler(scheduler, optimizer, settings)
    scale = _set_gradient_summing(model, settings.world_size // settings.mesh.get("tp", 1))
    tp = settings.mesh.get("tp", 1)
    import torch.distributed as dist

    return Job(
        model,
        optimizer,
        scheduler,
        data,
        _make_loss_function(loss, settings.job is None),
        dist.get_rank() // tp,
        dist.get_world_size() // tp,
        scale,
        vocabulary,
        notes,
        dropout_off,
        loss,
        save=save,
    )


def _bind_optimizer(optimizer: Any, model: torch.nn.Module, names: Mapping[int, str]) -> Any:
    """Return the optimizer of the user's job, bound to the parameters that the model has after sharding.

    Args:
        optimizer: what build() returned: an optimizer, a list of several, a function of the model, or None.
        model: the model after sharding.
        names: {id of a parameter before sharding: its FQN}.
    """
    follows = optimizer is not None and (hasattr(optimizer, "param_groups") or not callable(optimizer))
    if optimizer is not None and not follows:
        optimizer = optimizer(model)
    if isinstance(optimizer, (list, tuple)):
        optimizer = OptimizerList(list_optimizers(optimizer))
    if follows:
        _replace_parameters(optimizer, names, named_parameters(model))
    return optimizer


def _bind_scheduler(scheduler: object, optimizer: torch.optim.Optimizer, settings: RunSettings) -> Any:
    """Return the scheduler of the user's own job; build() may have returned a function of the optimizer.

    Raises:
        UsageError: it is no scheduler.
    """
    if callable(scheduler) and not hasattr(scheduler, "state_dict"):
        scheduler = scheduler(optimizer)
    if scheduler is not None and not hasattr(scheduler, "state_dict"):
        raise UsageError(
            f"{argument('job', settings.job)}: the scheduler is a {type(scheduler).__name__}; return one object with "
            "step, state_dict and load_state_dict, which may hold several.",
            code="CKPT0215",
        )
    return scheduler


def _check_trainable_from_start(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model and optimizer of build() that cannot be trained without a checkpoint.

    Raises:
        UsageError: a parameter is on the meta device, or there is no optimizer.
    """
    fresh = argument("fresh", True)
    if (lost := next((n for n, p in model.named_parameters() if p.device.type == "meta"), None)) is not None:
        raise UsageError(
            f"{fresh} trains from the weights that build() gives, but {lost} is on the meta device, where it has none. "
            "Initialise the weights in build(): on the CPU, or by fully_shard, to_empty and your own initialisation.",
            code="CKPT0215",
        )
    if optimizer is None:
        raise UsageError(f"{fresh} trains the job, but build() returns no optimizer.", code="CKPT0215")


# ----------------------------------------------------------------------------------------------- where models come from


def _nest_under_prefix(model: torch.nn.Module, settings: RunSettings) -> Any:
    """Return a model whose parameter names begin with `settings.module_prefix`: empty modules around the given one, or
    that itself if the prefix is "".

    Raises:
        Unsupported: with tensor parallelism, whose plan has the model's own names.
    """
    from torch import nn

    if settings.module_prefix and settings.mesh.get("tp", 1) > 1:
        raise Unsupported(
            f"{argument('module_prefix', settings.module_prefix)} does not go with tensor parallelism, whose plan has "
            "the model's own names; apply both in build().",
            code="CKPT0339",
        )

    class Below(nn.Module):
        def __init__(self, name: str, inner: nn.Module) -> None:
            """Put the module `inner` under a name; its forward and its signature are those of `inner`."""
            super().__init__()
            self.add_module(name, inner)
            self.__dict__["inner"] = inner

            def forward(*args: object, **more: object) -> object:
                return inner(*args, **more)

            forward.__signature__ = inspect.signature(inner.forward)  # type: ignore[attr-defined]
            self.forward = forward

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if "inner" not in self.__dict__:
                    raise
                return getattr(self.__dict__["inner"], name)

    for name in reversed([part for part in settings.module_prefix.split(".") if part]):
        model = Below(name, model)
    return model


#: What transformers raises of a config.json whose numbers make no model.
_ILL = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, RuntimeError)


def _explain_build_error(folder: str, e: Exception) -> str:
    """Return a text that says that transformers cannot build the model of a folder, with its error `e`."""
    return (
        f"{argument('config', folder)}: transformers cannot build the model that it describes ({type(e).__name__}: "
        f"{e})."
    )


def _build_model_from_config(settings: RunSettings) -> tuple[torch.nn.Module, float]:
    """Build the model of `settings.config` on the meta device.

    Returns:
        (model, largest dropout probability that was set to 0; 0 if none was).

    Raises:
        UsageError: there is no config.json, or transformers cannot build a causal language model from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    folder = settings.config
    if folder is None:
        raise UsageError(
            f"{argument('config')} (a Hugging Face folder) or {argument('job')} (module.py:build) is needed to know "
            "the model.",
            code="CKPT0216",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise UsageError(
            f"{argument('config', folder)}: no model configuration ({str(e).splitlines()[0]}).", code="CKPT0216"
        ) from None
    except _ILL as e:
        raise UsageError(_explain_build_error(folder, e), code="CKPT0216") from e
    dropout_off = 0.0
    if not settings.keep_dropout:
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float) and value > 0:
                setattr(config, key, 0.0)
                dropout_off = max(dropout_off, value)
    try:
        with _parameters_on_meta(), no_init_weights():
            build: Any = AutoModelForCausalLM.from_config
            model = build(config, dtype=torch.float32, trust_remote_code=False)
    except ValueError as e:
        raise UsageError(
            f"{argument('config', folder)}: {config.model_type} is not a causal language model of transformers "
            f"({str(e).splitlines()[0]}). Give the job with {argument('job')}.",
            code="CKPT0216",
        ) from None
    except _ILL as e:
        raise UsageError(_explain_build_error(folder, e), code="CKPT0216") from e
    model.tie_weights()  # no_init_weights leaves it out
    return model, dropout_off


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While the block runs, every parameter that a module registers is put on the meta device, so that it takes no
    memory; buffers stay."""
    from torch import nn

    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _match_model_to_checkpoint(model: torch.nn.Module, ckpt: Checkpoint, notes: list[str]) -> None:
    """Give parameters and buffers the checkpoint's dtypes, and let only the parameters in its param groups require
    gradients.

    Without param groups all floating-point parameters require gradients. `notes` gets a line with the number of those
    that do not.
    """
    import torch

    groups = _list_stored_param_groups(ckpt)
    trained = {n for g in groups for n in g["params"]}
    done: dict[int, object] = {}
    idle = 0
    for prefix, module in model.named_modules():
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if id(param) not in done:
                entry = ckpt.tensors.get(f"model.{fqn}")
                dtype = getattr(torch, entry.dtype) if entry is not None else param.dtype
                trains = dtype.is_floating_point and (not trained or fqn in trained)
                idle += not trains
                done[id(param)] = torch.nn.Parameter(param.detach().to(dtype), requires_grad=trains)
            module._parameters[name] = done[id(param)]
        for name, buffer in module._buffers.items():
            entry = ckpt.tensors.get(f"model.{prefix}.{name}" if prefix else f"model.{name}")
            if buffer is not None and entry is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(getattr(torch, entry.dtype))
    if idle:
        notes.append(f"not trained: {count_noun(idle, 'parameter')} that no param group of the checkpoint lists")


# ------------------------------------------------------------------------------------------------------------ sharding


def _is_distributed_model(model: torch.nn.Module) -> bool:
    """Tell whether a model is wrapped in DistributedDataParallel or has DTensor parameters."""
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(model, DistributedDataParallel) or any(hasattr(p, "_local_tensor") for p in model.parameters())


def _list_repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules to shard one by one, such as transformer layers; those that share a parameter are left out."""
    from torch import nn

    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in names]
    if not found:
        found = [m for group in model.modules() if isinstance(group, nn.ModuleList) for m in group]
    inside = {id(inner) for m in found for inner in m.modules() if inner is not m}
    outer = [m for m in found if id(m) not in inside and any(True for _ in m.parameters())]
    # FSDP2 has each parameter in one group; what several blocks share is left to the root, with those blocks
    held = Counter(id(p) for m in outer for p in m.parameters())
    return [m for m in outer if all(held[id(p)] == 1 for p in m.parameters())]


def _shard_model(model: torch.nn.Module, mesh: DeviceMesh, settings: RunSettings) -> None:
    """Shard the blocks of a model and its root with FSDP2, after tensor parallelism, activation checkpointing and
    compilation.

    `mesh` is the DeviceMesh of the job.
    """
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    blocks = _list_repeated_blocks(model)
    if settings.mesh.get("tp", 1) > 1:
        _apply_tensor_parallelism(model, mesh["tp"])
    if settings.activation_checkpointing:
        _enable_activation_checkpointing(model, blocks)
    if settings.compile:
        for block in blocks:
            block.compile()
    options: dict[str, Any] = {"mesh": mesh["dp_shard"]}
    if "dp_replicate" in settings.mesh:
        options["mesh"] = mesh["dp_replicate", "dp_shard"]
    if settings.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if settings.cpu_offload and settings.device == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _enable_activation_checkpointing(model: Any, blocks: list[nn.Module]) -> None:
    """Let a model recompute the activations of its blocks in the backward pass."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = set(map(id, blocks))
    apply_activation_checkpointing(model, check_fn=lambda m: id(m) in chosen)


def _apply_tensor_parallelism(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model by the tensor-parallel plan that transformers has for its architecture, with torch's styles.

    `mesh` is the DeviceMesh of the tensor-parallel ranks.

    Raises:
        Unsupported: there is no such plan, or it has a style that ckpttool does not apply.
    """
    import re

    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),  # as transformers 4 called it
    }
    plan = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(model, "base_model_prefix", "")
    for pattern, style in (getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}).items():
        plan.setdefault(f"{base}.{pattern}" if base else pattern, style)
    if not plan:
        raise Unsupported(
            f"{type(model).__name__} has no tensor-parallel plan; apply one in build() of {argument('job')}.",
            code="CKPT0339",
        )
    odd = sorted(set(plan.values()) - styles.keys())
    if odd:
        raise Unsupported(
            f"the tensor-parallel plan of {type(model).__name__} has {', '.join(odd)}, which ckpttool does not apply; "
            f"apply it in build() of {argument('job')}.",
            code="CKPT0339",
        )
    chosen = {}
    for name, _ in model.named_modules():
        for pattern, style in plan.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                chosen[name] = styles[style]()
    parallelize_module(model, mesh, chosen)


def _materialise_model(model: Any, settings: RunSettings) -> None:
    """Allocate what is on the meta device, uninitialised, and move everything else to the device. Tied parameters stay
    tied.

    Raises:
        Unsupported: a buffer is on the meta device.
    """
    import torch

    lost = [n for n, b in model.named_buffers() if b.device.type == "meta"]
    if lost:
        raise Unsupported(
            f"buffer {lost[0]} of the model is on the meta device, and no checkpoint contains it. Build the model "
            "with buffers on the CPU (torch.device('meta') makes both).",
            code="CKPT0339",
        )
    tied: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                tied.setdefault(id(p), []).append((module, name))
    ours = settings.device if settings.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    home = "cpu" if settings.cpu_offload else ours

    def there(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(t, device=home) if t.device.type == "meta" else t.to(home)

    model._apply(there)
    for places in tied.values():
        first = places[0][0]._parameters[places[0][1]]
        for module, name in places[1:]:
            module._parameters[name] = first
    if home != ours:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(ours)


def _set_gradient_summing(model: torch.nn.Module, world: int) -> float:
    """Make FSDP2 sum gradients over ranks instead of averaging them, and return the factor for the loss.

    The factor is 1, or `world` (the number of data-parallel ranks) if gradients are averaged because torch or DDP
    cannot sum them.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    parts = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not all(hasattr(m, "set_force_sum_reduction_for_comms") for m in parts):  # torch < 2.9
        return float(world)
    if not parts:
        return float(world) if isinstance(model, DistributedDataParallel) else 1.0
    for m in parts:
        m.set_gradient_divide_factor(1.0)
        m.set_force_sum_reduction_for_comms(True)  # a factor of 1 would else be NCCL's PreMulSum, which gloo has not
    return 1.0


# ----------------------------------------------------------------------------------------------------------- optimizer


def _list_stored_param_groups(ckpt: Checkpoint) -> list[ParamGroup]:
    """List the param groups of a checkpoint as {option: value}, with FQNs under "params"; groups without FQNs are
    left out."""
    found: dict[int, ParamGroup] = {}
    for v in ckpt.values.values():
        if v.option is not None and len(v.path) == 4:
            found.setdefault(v.group, {})[str(v.path[3])] = v.data
    groups = [g for _, g in sorted(found.items()) if isinstance(g.get("params"), list)]
    return [g for g in groups if all(isinstance(n, str) for n in g["params"])]


def _build_optimizer(model: torch.nn.Module, ckpt: Checkpoint, notes: list[str]) -> torch.optim.Optimizer:
    """Build the Adam, AdamW or SGD optimizer that a checkpoint's slots (tensors kept for each parameter) and options
    fit.

    `notes` gets a line if the checkpoint has slots but no param groups.

    Raises:
        Unsupported: the slots and options are those of another optimizer.
    """
    import torch

    groups = _list_stored_param_groups(ckpt)
    slots = {str(t.path[3]) for t in ckpt.tensors.values() if t.is_optimizer_state and len(t.path) == 4}
    options = {k for g in groups for k in g}
    torchs = "maximize" in options  # what every optimizer of torch writes; RAdam and NAdam lack amsgrad
    adam = {"exp_avg", "exp_avg_sq"} <= slots <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    if (adam and ("amsgrad" in options or not torchs)) or (not slots and ("betas" in options or not options)):
        coupled = any(g.get("decoupled_weight_decay") is False for g in groups)
        cls: type[torch.optim.Adam | torch.optim.SGD] = torch.optim.Adam if coupled else torch.optim.AdamW
    elif slots <= {"momentum_buffer"} and ("momentum" in options or slots):
        cls = torch.optim.SGD
    else:
        raise Unsupported(
            f"the optimizer has slots {', '.join(sorted(slots)) or 'none'} and options {', '.join(sorted(options))}; "
            f"which identify no optimizer class of torch. Build the job yourself, with {argument('job')}.",
            code="CKPT0339",
        )
    params = dict(model.named_parameters())
    if not groups:
        if slots:
            notes.append(
                f"the checkpoint has optimizer state, but no param groups; torch's defaults of {cls.__name__} are used"
            )
        return cls([p for p in params.values() if p.requires_grad], lr=1e-3)
    accepted = set(inspect.signature(cls).parameters) - OWN_FLAGS
    firsts = dict(model.named_parameters(remove_duplicate=False))
    made = []
    for group in groups:
        mine = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items() if k in accepted and k != "params"}
        # a tied weight may be listed under its second name
        made.append({**mine, "params": [firsts[n] for n in group["params"] if n in firsts and firsts[n].requires_grad]})
    return cls([g for g in made if g["params"]] or made, lr=1e-3)


def _replace_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str], new: Mapping[str, object]) -> None:
    """Replace the parameters of an optimizer that was created before the model was sharded.

    Args:
        optimizer: its param groups are changed.
        names: {id of the old parameter: FQN}.
        new: {FQN: new parameter}.
    """
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            name = names.get(id(p))
            if name is not None and name in new:
                group["params"][i] = new[name]


# ---------------------------------------------------------------------------------------------------------------- loss


def _make_loss_function(given: Any, causal: bool) -> LossFunction:
    """Return loss(model, batch), which returns (loss summed over tokens, number of tokens, logits or None).

    Args:
        given: the loss of build(); None for the cross-entropy of the next token, or for the loss that the model
            returns.
        causal: whether the model is a causal one of transformers, which gets no labels then.
    """
    import torch
    import torch.nn.functional as F

    def language(model: torch.nn.Module, batch: Batch) -> SummedLoss:
        """Compute (sum of the cross-entropy of next tokens, number of tokens, logits), or from the model's own mean
        loss, then without logits."""
        labels = batch.get("labels", batch["input_ids"])
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if causal:
            out = model(**inputs, use_cache=False)
        else:
            wants = inspect.signature(getattr(model, "forward", model)).parameters
            out = model(**({**batch, "labels": labels} if "labels" in wants else inputs))
        target = labels[:, 1:].reshape(-1)
        count = (target != -100).sum()
        logits = getattr(out, "logits", out)
        if isinstance(logits, torch.Tensor) and logits.dim() == 3:
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), target, reduction="sum", ignore_index=-100)
            return each, count, logits
        mean = getattr(out, "loss", out)
        if not isinstance(mean, torch.Tensor) or mean.dim():
            raise UsageError(
                "the model of build() returns neither logits (rows, tokens, vocabulary) nor a loss; return a loss "
                "function, too.",
                code="CKPT0215",
            )
        return mean * count, count, None

    def own(model: torch.nn.Module, batch: Batch) -> SummedLoss:
        """Call the loss of build(), and check what it returns."""
        out = given(model, batch)
        if not isinstance(out, tuple) or len(out) not in (2, 3):
            raise UsageError(
                "loss(model, batch) of build() must return (sum over tokens, number of tokens[, logits]).",
                code="CKPT0215",
            )
        return out[0], torch.as_tensor(out[1]), out[2] if len(out) == 3 else None

    return own if given is not None else language
