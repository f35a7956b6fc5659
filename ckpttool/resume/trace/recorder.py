"""Recorder: a few lines in any training loop that record the reference for a later resume-verify.

    recorder = ckpttool.Recorder("reference.jsonl", model, optimizer, scheduler=scheduler)    # on every rank
    recorder.state(step)                                                    # where the checkpoint is saved
    for step, batch in ...:
        ...
        recorder.step(step, loss=loss, batch=batch["input_ids"], grad_norm=norm)       # after optimizer.step()

Rank 0 writes one line per record (`trace` describes the format); the other ranks take part in the sums. Learning rates
and the norms of every tensor's gradient and update are measured in the optimizer's own step hooks. Numbers are never
rounded.

A recorder never changes a training, and never ends one: once it is made, whatever fails in it (a state_dict that
raises, a full disk) is a RuntimeWarning, and the recording says what it lacks and why. What one rank cannot measure is
left out on all, so that no rank waits for another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, argument
from ...live.collectives import gather_objects, get_rank_and_world_size
from ...live.job_optimizers import OptimizerList, list_optimizers
from ...printable import count_noun, list_first, printable
from .batches import BatchDigest, add_digests, digest_batch, make_batch_fields
from .fingerprint import can_fingerprint, fingerprint_each_rank, fingerprint_tensors
from .live_facts import (
    StepNorms,
    as_float,
    choose_collective_device,
    collect_named_state,
    compute_total_norm,
    describe_environment,
    get_dtype_name,
    has_dropout,
    is_same_on_all_ranks,
    list_tied_names,
    read_model_config,
    read_one_element_values,
    read_optimizer_numbers,
    to_plain_param_groups,
)
from .model import RECORD_VERSION, Step, format_record_line
from .numerics import read_small_buffers
from .probing import (
    compute_logits,
    explain_unsupported_forward,
    make_probe_batch,
    preserving_module_state,
    select_probe_logits,
    sketch_logits,
)
from .recorded_state import check_recorder_sources, gather_side_state
from .records import ProbeRecord, ScheduleRecord
from .state_after import copy_scheduler, read_state_after, step_scheduler_ahead

if TYPE_CHECKING:
    import torch

__all__ = ["Recorder"]


def _make_not_passed_entry(what: str) -> dict[str, str]:
    """Return {what: a text that it was not passed to Recorder}, an entry of `unrecorded`."""
    return {what: f"{what} was not passed to Recorder"}


class Recorder:
    """Records a training job, as the reference of a later `ckpttool resume-verify --reference`.

    Args:
        path: the JSONL file; records are appended. Only rank 0 opens it.
        model, optimizer: of the job, as they train (sharded, wrapped). Several optimizers that step after one backward
            pass (Muon beside AdamW) are a list. If the optimizer is not one of torch (DeepSpeed's engine has its own),
            pass None, and pass the learning rates to `step`.
        norms: whether to record the norms of every parameter's gradient and update in each step. This costs a copy of
            this rank's shards and two passes over them.
        scheduler, scaler, dataloader: whose state the checkpoint stores, too: objects with `state_dict()` (a list of
            them, if the checkpoint has a list), or functions that return that state. Every rank may have a dataloader
            of its own.
        extra: whatever else the checkpoint stores, by its keys at the root: {"ema": ema, "epoch": lambda: epoch, "rng":
            random_states}, where a value is an object with `state_dict()`, a function or data; or a function that
            returns such a dict. Tensors and arrays are recorded as fingerprints.
        probe: token ids (rows, sequence), the same on every rank, or a dict of them: `state` also records a sketch of
            the logits of model(input_ids=probe), of the model in evaluation mode. In bfloat16 with autocast, call
            `state` within it.
        group: the data-parallel group, if some ranks get the same data (tensor parallelism).
        rows: whether to record 8 characters for each row of a batch, which name the rows if a later job reads others.
        about: known fields of `model.Trace`: global_batch, micro_batch (rows of one forward pass), sequence, dtype
            ("bf16": computed in bfloat16), clip (the bound of gradient clipping; 0 is none), seed, data. In bfloat16,
            step 1 is compared more strictly if micro_batch and sequence are known and equal to those of the next job.

    Raises:
        UsageError: an argument is none of these. OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        *,
        scheduler: object = None,
        scaler: object = None,
        dataloader: object = None,
        extra: object = None,
        probe: Any = None,
        norms: bool = True,
        rows: bool = True,
        group: torch.distributed.ProcessGroup | None = None,
        **about: Any,
    ) -> None:
        """Hook into the steps of the optimizers, and write the first record; the class describes the arguments."""
        several = isinstance(optimizer, (list, tuple))
        given = optimizer if several else [] if optimizer is None else [optimizer]
        optimizers = list(map(_unwrap_optimizer, given))
        optimizer = OptimizerList(list_optimizers(optimizers)) if several else next(iter(optimizers), None)
        self._path, self._model, self._optimizer, self._group, self._rows = path, model, optimizer, group, rows
        self._sources = check_recorder_sources(scheduler=scheduler, scaler=scaler, dataloader=dataloader, extra=extra)
        if probe is not None and model is None:
            raise UsageError(f"{argument('probe')} needs the model whose logits are recorded.", code="CKPT0223")
        self._probe = None if probe is None else _parse_probe_rows(probe)
        self._measure = StepNorms(model, True) if norms and model is not None and optimizer is not None else None
        self._rates: list[float] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._optimizers = len(optimizers)
        self._stepped: list[int] = []  # id() of those that have begun the step that is being measured
        for one in optimizers:
            self._hooks += [
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            ]
        known: dict[str, Any] = {
            "world_size": get_rank_and_world_size()[1],
            "environment": describe_environment(_get_device_type(model)),
            **about,
        }
        if model is not None:
            known.setdefault("dropout", has_dropout(model))
            known.setdefault("parameters", sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()))
            known.setdefault("tied", list_tied_names(model))
            known.setdefault("config", read_model_config(model))
        if hasattr(scheduler, "state_dict"):
            known.setdefault("scheduler", type(scheduler).__name__)
        self._clip = known.get("clip")
        if get_rank_and_world_size()[0] == 0:
            _cut_incomplete_line(path)
            _append_text(path, format_record_line("start", **known))

    def state(self, step: int) -> None:
        """Record the job's state after `step` optimizer steps. A collective.

        It records fingerprints of model and optimizer, the state of scheduler, scaler, dataloader and `extra`, marks of
        every rank's random states, the probe, and the learning rates of the next 1,000 steps, by a copy of the
        scheduler.

        Call it right before or after the checkpoint is saved. A later job is compared with it, tensor by tensor and
        value by value. Call it again after the last step that is compared, so that the state after the steps is
        compared, too. It costs two passes over this rank's shards, and one forward pass if there is a probe.
        """
        with self._warn_instead(f"state of step {step}"):
            model, optimizer = self._model, self._optimizer
            device = choose_collective_device(model)
            found = gather_side_state(self._sources, device, model)
            lacks: dict[str, str] = {}
            for key in ("scheduler", "scaler", "dataloader", "extra"):
                if key not in self._sources:
                    lacks |= _make_not_passed_entry(key)
            lacks |= found.pop("unrecorded")
            tensors: dict[str, torch.Tensor] = {}
            numbers: dict[str, float] = {}
            if model is None:
                lacks |= _make_not_passed_entry("model")
            elif any(hasattr(p, "ds_tensor") for p in model.parameters()):
                lacks["model"] = "DeepSpeed's ZeRO-3 keeps the parameters apart from the model"
            else:
                tensors, why = self._read_tensors(lacks)
                if why is not None:
                    lacks["model"] = why
                prints, apart = fingerprint_tensors(tensors, device)
                found["variants"] |= fingerprint_each_rank({n: tensors[n] for n in apart})
                numbers = {} if optimizer is None or why is not None else read_optimizer_numbers(model, optimizer)
            if optimizer is None:
                lacks |= _make_not_passed_entry("optimizer")
            probe, why = self._run_probe(device)
            if why is not None:
                lacks["probe"] = why
                if self._probe is not None:
                    _warn(f"probe not recorded: {why}")
            schedule, why = self._read_schedule(step)
            if why is not None:
                lacks["schedule"] = why
            self._write_record(
                "state",
                version=RECORD_VERSION,
                step=step,
                state={n: (get_dtype_name(t), tuple(t.shape), prints[n]) for n, t in tensors.items()},
                scalars=read_one_element_values(tensors) | numbers,
                **found,
                probe=probe,
                unrecorded=lacks,
                buffers={} if model is None else read_small_buffers(model),
                groups=[] if model is None or optimizer is None else to_plain_param_groups(model, optimizer),
                after={} if "model" in lacks else read_state_after(model, optimizer, step),
                schedule=schedule,
            )

    def _read_schedule(self, step: int) -> tuple[ScheduleRecord, str | None]:
        """Step a copy of the scheduler ahead: (its learning rates, None), or ({}, why that failed).

        ({}, None) if there is no scheduler or no optimizer, which `unrecorded` tells already.
        """
        scheduler = self._sources.get("scheduler")
        if scheduler is None or self._optimizer is None:
            return {}, None  # which `unrecorded` says already
        try:
            copied = copy_scheduler(scheduler, self._model, self._optimizer)
            return ({}, copied) if isinstance(copied, str) else (step_scheduler_ahead(*copied, step), None)
        except Exception as e:
            return {}, f"a copy of the scheduler could not be stepped ahead ({type(e).__name__}: {e})"

    def _read_tensors(self, lacks: dict[str, str]) -> tuple[dict[str, torch.Tensor], str | None]:
        """Read the tensors of model and optimizer. A collective.

        Args:
            lacks: {what is not recorded: why}; gets an entry about tensors that have no fingerprint.

        Returns:
            ({canonical name: tensor}, None); ({}, why) if they cannot be recorded.
        """
        tensors: dict[str, torch.Tensor] = {}
        failed: str | None = None
        try:
            tensors = collect_named_state(self._model, self._optimizer)
            odd = [n for n, t in tensors.items() if not can_fingerprint(t)]
            tensors = {n: t for n, t in tensors.items() if n not in set(odd)}
            if odd:
                lacks["tensors"] = (
                    f"no fingerprint of {count_noun(len(odd), 'tensor')} of another class: {list_first(odd)}"
                )
        except Exception as e:
            failed = f"{type(e).__name__}: {e}"
        for rank, text in enumerate(gather_objects(failed)):
            if text is not None:
                return {}, f"its state could not be read on rank {rank} ({text})"
        if not is_same_on_all_ranks(list(tensors)):
            return {}, "ranks hold different tensors, as with pipeline parallelism"
        return tensors, None

    def _run_probe(self, device: torch.device | str) -> tuple[ProbeRecord, str | None]:
        """Run the probe: (its record, None), or ({}, why there is none). A collective."""
        if self._probe is None:
            return {}, _make_not_passed_entry("probe")["probe"]
        if not is_same_on_all_ranks(self._probe):
            return {}, "ranks were given different rows"
        out: ProbeRecord = {}
        try:
            batch = make_probe_batch(self._probe, device)
            why = explain_unsupported_forward(self._model, batch)
            if why is None:
                with preserving_module_state(self._model):
                    logits = select_probe_logits(compute_logits(self._model, batch))
                out = {"rows": self._probe, **sketch_logits(logits.cpu().numpy())}
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
        every = gather_objects(why)
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text is not None]
        return ({}, wrong[0]) if wrong else (out, None)

    def step(
        self,
        step: int,
        *,
        loss: object,
        batch: object = None,
        tokens: int | None = None,
        grad_norm: object = None,
        learning_rates: Sequence[float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Record an optimizer step, after it. A collective.

        Args:
            step: its number; the first of a training is 1.
            loss: mean over the tokens of this rank's rows, of all micro-batches of the step; or already that of the
                global batch, the same on every rank.
            batch: this rank's rows of the step, {key: tensor (rows, ...)} as the model gets them, or token ids alone:
                (rows, sequence); or a list of either for several micro-batches.
            tokens: tokens of this rank that count in the loss; None gives ranks equal weight.
            grad_norm: norm of the whole gradient before clipping, as clip_grad_norm_ returns it. If None, it is
                computed when the optimizer starts its step: of the clipped gradient, if the job clips.
            learning_rates: of each param group, if the recorder has no optimizer.
            seconds: time of the step.
        """
        with self._warn_instead(f"step {step}"):
            self._record_step(step, loss, batch, tokens, grad_norm, learning_rates, seconds)

    def _record_step(
        self,
        step: int,
        loss: object,
        batch: object,
        tokens: int | None,
        grad_norm: object,
        learning_rates: Sequence[float] | None,
        seconds: float | None,
    ) -> None:
        """Record a step, with the arguments of the public method `step`. A collective."""
        if self._stepped:  # one of several optimizers had no step
            self._measure_updates()
        found = self._gather_step(loss, tokens, batch)
        if found is None:
            return
        value, count, batches = found
        measured = self._measure
        total = None if grad_norm is None else as_float(grad_norm)
        grads: dict[str, float] = {}
        updates: dict[str, float] = {}
        if measured is not None and measured.trouble is not None:
            self._record_lost("norms", measured.trouble)
            measured.trouble = None
        if measured is not None and measured.grads:
            grads, updates = measured.grads, measured.updates
            applied = compute_total_norm(grads)
            if total is None:
                total = applied
            elif applied > 0:
                if applied < total * (1 - 1e-4) and not self._clip:
                    self._record_lost(
                        "clip",
                        f"the grad norm of step {step} is {total:.6g}, but the optimizer got gradients of norm "
                        f"{applied:.6g}. If the job clips, pass {argument('clip')}",
                    )
                    self._clip = applied
                grads = {n: v * (total / applied) for n, v in grads.items()}  # as they were before clipping
        out = Step(
            step,
            value,
            total,
            compute_total_norm(updates) if updates else None,
            self._rates if learning_rates is None else [float(r) for r in learning_rates],
            tokens=count,
            seconds=seconds,
            grads=grads,
            updates=updates,
            grad_sketches=measured.grad_sketches if grads and measured else None,
            update_sketches=measured.update_sketches if updates and measured else None,
            **batches,
        )
        self._write_record("step", **{k: v for k, v in vars(out).items() if v is not None and v not in ({}, [])})

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Recorder:
        """Return this recorder."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks from the optimizer, as `close` does; an error in the block is raised on."""
        self.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """Measure parameters and gradients before the step of the first optimizer; a hook of each optimizer.

        A closure is wrapped, so that gradients are measured after it.

        Args:
            optimizer: the optimizer that begins its step.
            args, how: positional and keyword arguments of its step().

        Returns:
            The new (args, how) with the wrapped closure, or None if they are not changed.
        """
        if id(optimizer) in self._stepped:
            self._stepped = []  # an earlier step in which not all took part
        self._stepped.append(id(optimizer))
        if len(self._stepped) > 1:
            return None
        self._rates = [float(g["lr"]) for g in self._optimizer.param_groups]  # a tensor, too
        measure = self._measure
        if measure is None:
            return None
        measure.copy_parameters()
        closure = how.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            measure.measure_gradients()
            return None

        def measured() -> Any:  # Lightning's closure has the backward pass in it
            out = closure()
            measure.measure_gradients()
            return out

        return (args[0], measured, *args[2:]) if len(args) > 1 else args, how if len(args) > 1 else {
            **how,
            "closure": measured,
        }

    def _after_step(self, *_: object) -> None:
        """Measure the updates after the step of the last optimizer, as a hook of each. A collective."""
        if len(self._stepped) == self._optimizers:
            self._measure_updates()

    def _measure_updates(self) -> None:
        """Measure the updates of the step that the optimizers have made. A collective."""
        self._stepped = []
        if self._measure is not None:
            self._measure.measure_updates()

    def _gather_step(
        self, loss: object, tokens: int | None, batch: object
    ) -> tuple[float, int | None, dict[str, Any]] | None:
        """Gather loss, tokens and batch of a step from all ranks. A collective.

        Args:
            loss: this rank's loss, a number or a tensor of one element.
            tokens: tokens of this rank that count in the loss; None if the caller did not tell.
            batch: this rank's rows, as for the public method `step`; None if the caller gave none.

        Returns:
            (loss, tokens, fields of a `Step` about the batch); None if a rank has no loss. The tokens are None if a
            rank gave none. The fields are {} if a rank gave no batch, and lack the marks of rows if these are not
            recorded.
        """
        mine: float | None = None
        seen: BatchDigest | None = None
        try:
            mine = as_float(loss)
        except Exception as e:
            self._record_lost("loss", f"loss={loss!r} is not a number ({type(e).__name__}: {e})")
        try:
            seen = None if batch is None else _digest_given_batch(batch)
        except Exception as e:
            self._record_lost(
                "batch", f"batch, a {type(batch).__name__}, is not rows of token ids ({type(e).__name__}: {e})"
            )
        parts = gather_objects((mine, tokens, seen), self._group)
        losses, counts, digests = zip(*parts, strict=True)
        if None in losses:
            return None
        known = all(c is not None for c in counts)
        weights = counts if known and sum(counts) else [1] * len(parts)
        value = sum(w * x for w, x in zip(weights, losses, strict=True) if w) / sum(weights)
        if len(set(losses)) == 1:
            value = losses[0]  # already the global one; no rounding of ours
        fields = {} if None in digests else make_batch_fields(digests)
        if not self._rows:
            fields.pop("rows", None)
        return value, sum(counts) if known else None, fields

    @contextmanager
    def _warn_instead(self, what: str) -> Iterator[None]:
        """While the block runs, turn any error into a warning, and a line in the recording; `what` names what is lost
        by it."""
        try:
            yield
        except Exception as e:
            self._record_lost(what, f"{type(e).__name__}: {e}")

    def _record_lost(self, what: str, why: str) -> None:
        """Warn that `what` was not recorded, and write a line with the reason `why` into the recording."""
        _warn(f"{what} not recorded: {why}")
        self._write_record("lost", what=what, why=why)

    def _write_record(self, kind: str, **record: object) -> None:
        """Append a record to the file, on rank 0 only; a failure is a warning. `kind` is "start", "state", "step" or
        "lost"."""
        if get_rank_and_world_size()[0] == 0:
            try:
                _append_text(self._path, format_record_line(kind, **record))
            except (OSError, TypeError, ValueError) as e:
                _warn(f"{os.fspath(self._path)} could not be written, and a line is lost: {e}")


def _warn(text: str) -> None:
    """Warn without ever raising; where warnings are errors, the text goes to stderr."""
    import warnings

    try:
        warnings.warn(f"ckpttool.Recorder: {printable(text)}", RuntimeWarning, stacklevel=5)
    except RuntimeWarning:  # the job has made errors of warnings
        print(f"ckpttool.Recorder: {printable(text)}", file=sys.stderr)  # noqa: T201


def _append_text(path: str | os.PathLike[str], text: str) -> None:
    """Append a text to a file.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "a", encoding="utf-8") as f:
        f.write(text)


def _parse_probe_rows(probe: object) -> dict[str, list[list[int]]]:
    """Return the token ids of a probe as plain data, {"input_ids": rows}; a dict keeps its further names.

    Raises:
        UsageError: it is something else than rows of integers, or a dict without input_ids.
    """
    out = {}
    for key, x in (probe if isinstance(probe, Mapping) else {"input_ids": probe}).items():
        plain = x.tolist() if hasattr(x, "tolist") else x
        rows = (
            [list(r) if isinstance(r, (list, tuple)) else r for r in plain] if isinstance(plain, (list, tuple)) else []
        )
        if not rows or not all(isinstance(r, list) and r and all(type(t) is int for t in r) for r in rows):
            raise UsageError(
                f"{argument('probe')}: {key} is not rows of token ids, integers of shape (rows, sequence).",
                code="CKPT0223",
            )
        out[str(key)] = rows
    if "input_ids" not in out:
        raise UsageError(
            f"{argument('probe')}: a dict needs input_ids; this one has {', '.join(out) or 'nothing'}.", code="CKPT0223"
        )
    return out


def _cut_incomplete_line(path: str | os.PathLike[str]) -> None:
    """Cut off an incomplete last line of a recording, which a killed job leaves; a missing file is no error."""
    if not os.path.isfile(path):
        return
    with open(path, "rb+") as f:
        text = f.read()
        f.truncate(text.rfind(b"\n") + 1)


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrapper of Accelerate or Lightning, whose own hooks are not called; another one
    as it is."""
    while type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _digest_given_batch(batch: object) -> BatchDigest:
    """Compute the digest of the `batch` that `Recorder.step` got: a dict of tensors, token ids, or a list of either.

    Raises:
        ValueError, TypeError: it is something else.
    """
    if isinstance(batch, (list, tuple)):
        return add_digests([_digest_given_batch(part) for part in batch])
    if not isinstance(batch, Mapping) and not getattr(batch, "ndim", 0):
        raise TypeError("neither a tensor nor a dict of tensors")
    return digest_batch(batch if isinstance(batch, Mapping) else {"input_ids": batch})


def _get_device_type(model: torch.nn.Module | None) -> str | None:
    """Return the type of the device that the parameters of a model are on, such as "cuda"; None without any."""
    return next((p.device.type for p in model.parameters()), None) if model is not None else None
