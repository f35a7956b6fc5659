"""Recorder: a few lines in any training loop that record the reference for a later resume-verify.

    recorder = ckpttool.Recorder("reference.jsonl", model, optimizer)      # on every rank, after the job is built
    recorder.state(step)                                                    # where the checkpoint is saved
    for step, batch in ...:
        ...
        recorder.step(step, loss=loss, batch=batch["input_ids"], grad_norm=norm)       # after optimizer.step()

Rank 0 writes one line per record (`trace` describes the format); the other ranks take part in the sums. Learning rates and the
norms of every tensor's gradient and update are measured in the optimizer's own step hooks. Numbers are never rounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..live.collectives import gathered
from ..live.live_job import OWN_FLAGS
from .trace import Step, line

__all__ = [
    "Measure", "Recorder", "config_of", "device_of", "dropouts", "dtype_of", "environment", "has_dropout", "named_state",
    "plain_groups", "root_of_squares", "scalars_of", "tied_names",
]  # fmt: skip


class Recorder:
    """Records a training job, as the reference of a later `ckpttool resume-verify --reference`.

    Args:
        path: the JSONL file; records are appended. Only rank 0 opens it.
        model, optimizer: of the job, as they train (sharded, wrapped). If the optimizer is not one of torch (DeepSpeed's
            engine has its own), pass None, and pass the learning rates to `step`.
        norms: whether to record the norms of every parameter's gradient and update in each step. This costs a copy of this
            rank's shards and two passes over them.
        group: the data-parallel group, if some ranks get the same data (tensor parallelism).
        about: known fields of `trace.Trace`: global_batch, micro_batch (rows of one forward pass), sequence, dtype
            ("bf16": computed in bfloat16), clip (the bound of gradient clipping), seed, data. In bfloat16, step 1 is
            compared more strictly if micro_batch and sequence are known and equal to those of the next job.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        *,
        norms: bool = True,
        group: Any = None,
        **about: Any,
    ) -> None:
        optimizer = _unwrapped(optimizer)
        self._path, self._model, self._optimizer, self._group = path, model, optimizer, group
        self._measure = Measure(model) if norms and model is not None and optimizer is not None else None
        self._rates: list[float] | None = None
        self._hooks: list[Any] = []
        if optimizer is not None:
            self._hooks = [
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            ]
        known: dict[str, Any] = {"world_size": _world(), "environment": environment(), **about}
        if model is not None:
            known.setdefault("dropout", has_dropout(model))
            known.setdefault("parameters", sum(p.numel() for p in model.parameters()))
            known.setdefault("tied", tied_names(model))
            known.setdefault("config", config_of(model))
        if _rank() == 0:
            _cut_half_line(path)
        self._write("start", **known)

    def state(self, step: int) -> None:
        """Record fingerprints of what the job holds after `step` optimizer steps. A collective.

        A later job is compared with them tensor by tensor. It costs one pass over this rank's shards.
        """
        from .fingerprint import in_memory

        if self._model is None:
            raise ValueError("Recorder.state needs the model: Recorder(path, model, optimizer)")
        tensors = named_state(self._model, self._optimizer)
        prints, _ = in_memory(tensors, device_of(self._model))
        self._write(
            "state", step=step,
            state={n: (dtype_of(t), tuple(t.shape), prints[n]) for n, t in tensors.items()},
            scalars=scalars_of(tensors),
            groups=[] if self._optimizer is None else plain_groups(self._model, self._optimizer),
        )  # fmt: skip

    def step(
        self,
        step: int,
        *,
        loss: Any,
        batch: Any = None,
        tokens: int | None = None,
        grad_norm: Any = None,
        learning_rates: Sequence[float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record an optimizer step, after it. A collective.

        Args:
            step: its number; the first of a training is 1.
            loss: mean over the tokens of this rank's rows, of all micro-batches of the step; or already that of the
                global batch, the same on every rank.
            batch: this rank's token ids of the step: (rows, sequence), or a list of such for several micro-batches.
            tokens: tokens of this rank that count in the loss; None gives ranks equal weight.
            grad_norm: norm of the whole gradient before clipping, as clip_grad_norm_ returns it. If None, it is
                computed when the optimizer starts its step: of the clipped gradient, if the job clips.
            learning_rates: of each param group, if the recorder has no optimizer.
            seconds: time of the step.
        """
        measured = self._measure
        total = None if grad_norm is None else _number(grad_norm)
        grads: dict[str, float] = {}
        updates: dict[str, float] = {}
        if measured is not None and measured.grads:
            grads, updates = measured.grads, measured.updates
            applied = root_of_squares(grads)
            if total is None:
                total = applied
            elif applied > 0:
                grads = {n: v * (total / applied) for n, v in grads.items()}  # as they were before clipping
        value, count, rows = self._together(_number(loss), tokens, _rows(batch))
        out = Step(
            step, value, total, root_of_squares(updates) if updates else None,
            self._rates if learning_rates is None else [float(r) for r in learning_rates], rows, count, seconds,
            None, grads, updates,
        )  # fmt: skip
        self._write("step", **{k: v for k, v in vars(out).items() if v is not None and v != {}})

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before(self, optimizer: Any, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        self._rates = [float(g["lr"]) for g in optimizer.param_groups]
        measure = self._measure
        if measure is None:
            return None
        measure.before()
        closure = how.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            measure.gradients()
            return None

        def measured() -> Any:  # Lightning's closure has the backward pass in it
            out = closure()
            measure.gradients()
            return out

        return (args[0], measured, *args[2:]) if len(args) > 1 else args, how if len(args) > 1 else {
            **how,
            "closure": measured,
        }

    def _after(self, *_: Any) -> None:
        if self._measure is not None:
            self._measure.after()

    def _together(
        self, loss: float, tokens: int | None, rows: Iterable[Any] | None
    ) -> tuple[float, int | None, str | None]:
        """(loss, tokens, digest of the batch) over all ranks."""
        from .batches import digest

        mine = (loss, tokens, None if rows is None else digest(rows))
        parts = gathered(mine, self._group)
        losses, counts, digests = zip(*parts, strict=True)
        known = all(c is not None for c in counts)
        weights = counts if known and sum(counts) else [1] * len(parts)
        value = sum(w * x for w, x in zip(weights, losses, strict=True) if w) / sum(weights)
        if len(set(losses)) == 1:
            value = loss  # already the global one; no rounding of ours
        together = f"{sum(digests) % (1 << 128):032x}" if all(d is not None for d in digests) else None
        return value, sum(counts) if known else None, together

    def _write(self, kind: str, **record: Any) -> None:
        if _rank() == 0:
            with open(self._path, "a", encoding="utf-8") as f:
                f.write(line(kind, **record))


def _cut_half_line(path: str | os.PathLike[str]) -> None:
    """Cut off the line that a killed job was writing."""
    if not os.path.isfile(path):
        return
    with open(path, "rb+") as f:
        text = f.read()
        f.truncate(text.rfind(b"\n") + 1)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrapper of Accelerate or Lightning, which do not call their own hooks."""
    while type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class Measure:
    """Norms of the gradient and of the update of every trained parameter; `before` and `after` the optimizer's step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.grads: dict[str, float] = {}
        self.updates: dict[str, float] = {}
        self._old: dict[str, Any] = {}

    def parameters(self) -> dict[str, Any]:
        """{FQN: parameter} of the trained parameters, tied ones once."""
        return {n: p for n, p in _first_names(self.model).items() if p.requires_grad}

    def before(self) -> None:
        """Copy the parameters."""
        from .fingerprint import local

        self._old = {n: local(p).clone() for n, p in self.parameters().items()}

    def gradients(self) -> None:
        """Measure the gradients as they are now. A collective."""
        from .fingerprint import norms

        found = {n: p.grad for n, p in self.parameters().items() if p.grad is not None}
        self.grads = norms(found, device_of(self.model))

    def after(self) -> None:
        """Measure the difference to the copy. A collective."""
        import torch

        from .fingerprint import combine, local, owned

        params = self.parameters()
        squares = []
        for n, p in params.items():
            new, old = local(p), self._old.pop(n)
            moved = new.double() - old.double() if new.element_size() == 8 else new.float() - old.float()
            squares.append(float(torch.linalg.vector_norm(moved, dtype=torch.float64).item()) ** 2 if owned(p) else 0.0)
        total = combine(squares, integers=False, device=device_of(self.model))
        self.updates = {n: v**0.5 for n, v in zip(params, total, strict=True)}


def root_of_squares(norms: Mapping[str, float]) -> float:
    """The norm of the whole from the norms of its parts."""
    return float(sum(v * v for v in norms.values()) ** 0.5)


def named_state(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """{canonical name: tensor} of a live job: parameters, persistent buffers, the optimizer's tensors."""
    from ..index.fqns import strip_wrappers

    found = {n: t for n, t in model.state_dict().items() if hasattr(t, "element_size")}
    clean = strip_wrappers(found)
    out = {f"model.{clean[n]}": t for n, t in found.items()}
    if optimizer is not None:
        for fqn, p in _first_names(model).items():
            for slot, t in optimizer.state.get(p, {}).items():
                if hasattr(t, "element_size"):
                    out[f"optim.state.{fqn}.{slot}"] = t
    return out


def _first_names(model: Any) -> dict[str, Any]:
    from ..index.fqns import strip_wrappers

    found = dict(model.named_parameters())
    clean = strip_wrappers(found)
    return {clean[n]: p for n, p in found.items()}


def plain_groups(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    """Param groups as plain data: options, and FQNs for parameters."""
    names = {id(p): n for n, p in _first_names(model).items()}
    out = []
    for group in optimizer.param_groups:
        options = {k: _plain(v) for k, v in group.items() if k not in OWN_FLAGS and k != "params"}
        out.append({**options, "params": [names.get(id(p), "?") for p in group["params"]]})
    return out


def _plain(x: Any) -> Any:
    if hasattr(x, "element_size"):
        return _number(x) if x.numel() == 1 else "tensor"
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    return x if isinstance(x, (int, float, str, bool, type(None))) else type(x).__name__


def tied_names(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    from ..index.fqns import strip_wrappers

    names: dict[int, list[str]] = {}
    every = dict(model.named_parameters(remove_duplicate=False))
    clean = strip_wrappers(every)
    for n, p in every.items():
        names.setdefault(id(p), []).append(clean[n])
    return sorted(sorted(n) for n in names.values() if len(n) > 1)


def config_of(model: Any) -> dict[str, Any] | None:
    """The configuration of a transformers model, as plain data; None if it has none."""
    inner = getattr(model, "module", model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return plain


def scalars_of(tensors: Mapping[str, Any]) -> dict[str, float]:
    """The values of tensors with one element that are not sharded."""
    return {
        n: float(t.item())
        for n, t in tensors.items()
        if t.numel() == 1 and not hasattr(t, "_local_tensor") and not t.is_complex()
    }


def has_dropout(model: Any) -> bool:
    """Whether any dropout probability of the model is above zero."""
    return any(p > 0 for _, _, p in dropouts(model))


def dropouts(model: Any) -> list[tuple[Any, str, float]]:
    """(module, attribute, probability) of every dropout."""
    from torch.nn.modules.dropout import _DropoutNd

    out = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            out.append((module, "p", float(module.p)))
        else:
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float):
                    out.append((module, name, value))
    return out


def dtype_of(tensor: Any) -> str:
    """torch's name of a dtype: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def environment() -> dict[str, Any]:
    """Versions and devices: causes of differences that no checkpoint records."""
    import platform

    import torch

    from .._version import __version__

    out: dict[str, Any] = {"ckpttool": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = torch.version.cuda
        if torch.distributed.is_nccl_available():
            version: Any = torch.cuda.nccl.version
            out["nccl"] = ".".join(map(str, version()))
    return out


def _rows(batch: Any) -> Iterable[Any] | None:
    if batch is None:
        return None
    if isinstance(batch, (list, tuple)):
        return (row for part in batch for row in _rows(part) or ())
    array = batch.detach().cpu().numpy() if hasattr(batch, "detach") else batch
    return iter(array if getattr(array, "ndim", 2) > 1 else [array])


def _number(x: Any) -> float:
    if hasattr(x, "full_tensor"):
        x = x.full_tensor()
    return float(x.detach().item() if hasattr(x, "detach") else x)


def device_of(model: Any) -> Any:
    """The device for collectives: NCCL needs the GPU, even if parameters are offloaded."""
    import torch

    on = next((p.device for p in model.parameters()), torch.device("cpu"))
    if torch.distributed.is_initialized() and "nccl" in str(torch.distributed.get_backend()) and on.type == "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return on


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
