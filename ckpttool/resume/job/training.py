"""The probe and the training step of one rank, with the measurements of both.

Every function is collective: all ranks of the job call it with the same arguments.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import UsageError
from ...live.collectives import gather_objects
from ..request import RunSettings
from ..trace import batches, fingerprint, probing
from ..trace.live_facts import StepNorms, compute_total_norm
from ..trace.model import Step, Trace
from ..trace.numerics import name_missing_kernel
from ..trace.records import LogitSketch, MemoryRecord
from .build import Job
from .watchdog import enter_stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["OptimizerStepError", "measure_memory", "measure_probe", "measure_recorded_probe", "train_step"]


class OptimizerStepError(Exception):
    """The optimizer's step raised an error, which may come of the options or the state that it got."""

    def __init__(self, error: Exception) -> None:
        """Say what the error is, and where it was raised."""
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(at.filename)}:{at.lineno} in {at.name}"
        super().__init__(f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')} (at {place})")
        self.error = error


def _stack_rows(rows: batches.Rows, first: int, last: int, device: torch.device) -> dict[str, Tensor]:
    """Stack consecutive samples of the data into a batch {key, such as "input_ids": tensor of shape (samples, ...)}.

    Args:
        rows: returns the sample of an index, {key: row}.
        first, last: index of the first sample, and of the one after the last.
        device: where the tensors go.
    """
    import torch

    samples = [rows(i) for i in range(first, last)]
    return {k: torch.stack([torch.as_tensor(s[k]) for s in samples]).to(device) for k in samples[0]}


def _get_device(settings: RunSettings) -> torch.device:
    """Return this rank's torch.device: its current GPU, or the CPU."""
    import torch

    return (
        torch.device(settings.device, torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
    )


def measure_probe(job: Job, rows: batches.Rows, settings: RunSettings, file: str, out: Trace) -> None:
    """Compute the logits of the first rows of the data, and compare those of all ranks; the result goes into
    `out.probe`. A collective.

    Args:
        rows: gives the sample of an index.
        file: .npy that rank 0 writes the logits to.
    """
    import numpy as np
    import torch
    import torch.distributed as dist

    modes = {m: m.training for m in job.model.modules()}
    job.model.eval()
    batch = _stack_rows(rows, 0, settings.micro_batch, _get_device(settings))
    with torch.no_grad():
        _, _, logits = job.loss(job.model, batch)
    # training loops begin with train(), which a model of from_pretrained() needs; of one that is in that mode already,
    # the modules that the job keeps in evaluation mode stay so
    job.model.train()
    for module, training in modes.items() if modes[job.model] else ():
        module.training = training
    if logits is None:
        out.probe = {"skipped": "the job gives no logits"}
        return
    found = probing.select_probe_logits(logits)
    each = torch.tensor(
        [fingerprint.fingerprint_flat(found.reshape(-1), 0) >> 1], dtype=torch.int64, device=found.device
    )
    every = [torch.empty_like(each) for _ in range(dist.get_world_size())]
    dist.all_gather(every, each)
    marks = [int(e.item()) for e in every]
    usual = max(marks, key=marks.count)
    out.probe = {"agree": len(set(marks)) == 1}
    if not out.probe["agree"] and 2 * marks.count(usual) > len(marks):
        out.probe["odd"] = [rank for rank, m in enumerate(marks) if m != usual]
    inputs = batches.digest_batch({k: x for k, x in batch.items() if k != "labels"})
    out.probe["batch"] = batches.make_batch_fields([inputs])["samples"]
    if dist.get_rank() == 0:
        np.save(file, found.cpu().numpy(), allow_pickle=False)
        out.probe["file"] = file


def measure_recorded_probe(job: Job, settings: RunSettings, out: Trace) -> None:
    """Sketch the logits of the rows with which a `Recorder` probed its job; the result goes into
    `out.probe["recorded"]`.

    A collective. If the model cannot compute them, the result has the reason as "skipped".
    """
    if not settings.probe:
        return
    batch = probing.make_probe_batch(settings.probe, _get_device(settings))
    why = probing.explain_unsupported_forward(job.model, batch)
    found: LogitSketch = {}
    if why is None:
        try:
            with probing.preserving_module_state(job.model):
                logits = probing.select_probe_logits(probing.compute_logits(job.model, batch))
            found = probing.sketch_logits(logits.cpu().numpy())
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as e:
            why = f"{type(e).__name__}: {e}"
    wrong = [text for text in gather_objects(why) if text is not None]
    out.probe["recorded"] = {"skipped": wrong[0]} if wrong else found


def train_step(job: Job, rows: batches.Rows, step: int, settings: RunSettings) -> Step:
    """Take one optimizer step on the global batch, and measure it. A collective.

    Args:
        rows: gives the sample of an index.
        step: its number in the whole training, from 1.

    Raises:
        UsageError: no token counts in the loss. OptimizerStepError: the optimizer fails. Errors of the model pass
            through.
    """
    import torch
    import torch.distributed as dist

    where = f"step {step - settings.start} of {settings.steps}"
    enter_stage(f"{where}, reading its rows")
    device = _get_device(settings)
    parts = batches.list_micro_batches(step, settings.global_batch, settings.micro_batch, job.rank, job.world)
    data = [(_stack_rows(rows, first, last, device), counts) for first, last, counts in parts]
    known = _gather_batch(data, settings)
    rates = _set_learning_rates(job, step, settings)
    measure = StepNorms(job.model)
    _synchronize_device(settings)
    began = time.perf_counter()
    total, tokens = _accumulate_gradients(job, [row for row, _, _ in parts], data, known, step, settings)
    _synchronize_device(settings)
    seconds = time.perf_counter() - began
    if dist.get_rank() % settings.mesh.get("tp", 1):
        total.zero_()  # ranks of one tensor-parallel group have the same rows
    dist.all_reduce(total)
    counted = float(total[1].item())
    if not counted > 0:
        raise UsageError(
            f"no token of step {step} counts in the loss: are all its labels {batches.IGNORED}?", code="CKPT0217"
        )
    if counted != tokens:  # the user's own loss counts in a way of its own
        for p in job.model.parameters():
            if p.grad is not None:
                fingerprint.get_local_shard(p.grad).mul_(tokens / counted)
    if settings.updates:
        job.peak_before_copies = job.peak_before_copies or _read_peak_memory(settings)
        measure.copy_parameters()
        job.copied_bytes = measure.copied_bytes
    measure.measure_gradients()
    norm = compute_total_norm(measure.grads)
    began = time.perf_counter()
    enter_stage(f"{where}, optimizer")
    _step_optimizer(job, norm, settings)
    _synchronize_device(settings)
    seconds += time.perf_counter() - began
    if settings.updates:
        measure.measure_updates()
    mine = torch.tensor([float(total[0].item()) / counted], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return Step(
        step,
        float(mine.item()),
        norm,
        compute_total_norm(measure.updates) if measure.updates else None,
        rates,
        tokens=round(counted),
        seconds=seconds,
        losses=[float(e.item()) for e in every],
        grads=measure.grads,
        updates=measure.updates,
        grad_sketches=measure.grad_sketches,
        update_sketches=measure.update_sketches,
        **known.fields,
    )


def _accumulate_gradients(
    job: Job,
    first_rows: Sequence[int],
    data: Sequence[tuple[dict[str, Tensor], bool]],
    known: _StepBatch,
    step: int,
    settings: RunSettings,
) -> tuple[Tensor, float]:
    """Run the forward and backward passes of this rank's micro-batches.

    Args:
        job: the job.
        first_rows: index of the first row of each micro-batch.
        data: (batch, whether it counts) of each micro-batch.
        known: what is known of the batch of all ranks.
        step: number of the step in the whole training, from 1.
        settings: of the run.

    Returns:
        (float64 tensor [summed loss, number of tokens] of this rank, number of tokens that the gradients were divided
        by).
    """
    import torch

    device = _get_device(settings)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    tokens: float = known.counts[0]
    first = step == settings.start + 1
    for i, (row, (batch, counts)) in enumerate(zip(first_rows, data, strict=True)):
        enter_stage(f"step {step - settings.start} of {settings.steps}, micro-batch {i + 1} of {len(data)}")
        if not settings.keep_dropout:
            _seed_generators(settings.seed, row)
        before = _read_generator_states(settings) if first else None
        loss, count, _ = job.loss(job.model, batch)
        if i == 0 and job.own_loss is not None:
            tokens = _find_loss_divisor(float(count), batch, sum(c for _, c in data), known)
        job.random = job.random or (first and before != _read_generator_states(settings))
        if counts:
            total += torch.stack([loss.detach().double(), count.detach().double().to(device)])
        # a pass that does not count still takes part in the collectives; nan * 0 would be nan
        (loss * (job.scale / tokens) if counts else torch.nan_to_num(loss) * 0.0).backward()
    return total, tokens


def _step_optimizer(job: Job, norm: float, settings: RunSettings) -> None:
    """Clip the gradients if the job does so, step optimizer and scheduler, and zero the gradients.

    `norm` is the L2 norm of all gradients.

    Raises:
        OptimizerStepError: the optimizer fails.
    """
    if settings.clip is not None:
        _clip_gradients(job.model, settings.clip, norm)
    try:
        with name_missing_kernel():
            job.optimizer.step()
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as e:
        raise OptimizerStepError(e) from e
    if job.scheduler is not None and not job.scheduler_waits:
        job.scheduler.step()
    job.optimizer.zero_grad()


def _seed_generators(seed: int, row: int) -> None:
    """Seed the generators of torch, numpy and Python by the index of a micro-batch's first row.

    The rank does not matter, so the forward pass of a micro-batch draws the same numbers at any world size.
    """
    import numpy as np
    import torch

    number = (seed * 1_000_003 + row) % (1 << 32)
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _read_generator_states(settings: RunSettings) -> tuple[object, ...]:
    """Return the states of all generators that a forward pass may use, in a form that only serves for ==
    comparisons."""
    import numpy as np
    import torch

    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if settings.device == "cuda" else [])]
    _, key, position, *rest = np.random.get_state(legacy=True)
    return [s.numpy().tobytes() for s in states], key.tobytes(), position, rest, random.getstate()  # type: ignore[union-attr]


class _StepBatch(NamedTuple):
    """What ranks know of a step's batch: the numbers that a loss may divide by (`_list_possible_counts`), and the
    fields of a `Step` about it."""

    counts: list[int]
    fields: dict[str, Any]


def _gather_batch(data: list[tuple[dict[str, Tensor], bool]], settings: RunSettings) -> _StepBatch:
    """Gather the numbers that a loss may divide by, and the digests, of a step's batch from all ranks. A collective.

    Args:
        data: (batch, whether it counts) of each micro-batch of this rank.
        settings: of the run.
    """
    import torch.distributed as dist

    copy = bool(dist.get_rank() % settings.mesh.get("tp", 1))
    mine = [batch for batch, counts in data if counts and not copy]
    digest = batches.add_digests([batches.digest_batch(batch) for batch in mine])
    parts = [p for p in gather_objects(([_list_possible_counts(b) for b in mine], digest, copy)) if not p[2]]
    totals = [sum(column) for column in zip(*(counts for part in parts for counts in part[0]), strict=True)]
    return _StepBatch([max(1, n) for n in totals], batches.make_batch_fields([p[1] for p in parts]))


def _list_possible_counts(batch: Mapping[str, Tensor]) -> list[int]:
    """List the numbers of tokens or samples of a micro-batch that a loss may divide by, in the same order for every
    batch.

    First the labels after the first that count, or the rows if samples are no token rows. Then for every integer tensor
    all elements, those that count, and those that count after the first. Finally the rows.
    """
    labels = batch.get("labels", batch.get("input_ids"))
    rows = len(next(iter(batch.values())))
    out = [rows if labels is None or labels.dim() < 2 else int((labels[:, 1:] != batches.IGNORED).sum().item())]
    for x in (batch[k] for k in sorted(batch)):
        if str(x.dtype) in ("torch.int64", "torch.int32") and x.dim():
            later = x[:, 1:] if x.dim() > 1 else x
            out += [x.numel(), int((x != batches.IGNORED).sum().item()), int((later != batches.IGNORED).sum().item())]
    return [*out, rows]


def _find_loss_divisor(count: float, batch: Mapping[str, Tensor], passes: int, step: _StepBatch) -> float:
    """Return the number by which the job's own loss divides a whole step, from what it counted in one micro-batch.

    A collective. In bfloat16 a gradient must be divided by that number before the backward pass: dividing by another
    one and correcting it afterwards rounds differently.

    Args:
        count: what the loss counted in this rank's first micro-batch.
        batch: that micro-batch.
        passes: how many micro-batches of this rank count.
        step: what is known of the batch of all ranks.
    """
    every = gather_objects(([n == count for n in _list_possible_counts(batch)], count * passes))
    right = [all(ways) for ways in zip(*(fits for fits, _ in every), strict=True)]
    return step.counts[right.index(True)] if True in right else max(1.0, sum(c for _, c in every))


def _set_learning_rates(job: Job, step: int, settings: RunSettings) -> list[float]:
    """Set the learning rates of a step, and return them, one for each param group.

    They are set only if no scheduler is stepped: from the second step after loading on, to the reference's rates if
    these are known.
    """
    given = settings.rates.get(step)
    groups = job.optimizer.param_groups
    idle = job.scheduler is None or job.scheduler_waits
    if idle and given is not None and step > settings.start + 1 and len(given) == len(groups):
        for group, rate in zip(groups, given, strict=True):
            group["lr"] = rate
    return [float(g["lr"]) for g in groups]


def _clip_gradients(model: torch.nn.Module, bound: float, norm: float) -> None:
    """Scale the gradients of a model down to the norm `bound`, if theirs is larger; parameters may be on several
    meshes.

    `norm` is the L2 norm of the whole gradient.
    """
    import torch

    factor = min(1.0, bound / (norm + 1e-6))
    grads = [fingerprint.get_local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(grads, factor)


def _synchronize_device(settings: RunSettings) -> None:
    """Wait for the GPU to finish, so that measured times include its work; on the CPU do nothing."""
    if settings.device == "cuda":
        import torch

        torch.cuda.synchronize()


def _read_peak_memory(settings: RunSettings) -> tuple[int, int]:
    """Return this rank's peak memory so far in bytes, (allocated, reserved): of its GPU, or on the CPU of its
    process."""
    import resource

    import torch

    if settings.device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak, peak


def measure_memory(job: Job, settings: RunSettings) -> list[MemoryRecord]:
    """Measure the peak memory of every rank in bytes, without the copy of the parameters that only measurements need.

    A collective. The peak without that copy is the larger of the peak before the first copy, and the overall peak minus
    the copy.
    """
    import torch

    before, peaks = job.peak_before_copies or (0, 0), _read_peak_memory(settings)
    allocated, reserved = (max(b, p - job.copied_bytes) for b, p in zip(before, peaks, strict=True))
    if settings.device == "cuda":
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    mine: MemoryRecord = {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "total_bytes": whole,
        "measuring_bytes": job.copied_bytes,
    }
    every: list[MemoryRecord] = gather_objects(mine)
    return [{"rank": r, **m} for r, m in enumerate(every)]
