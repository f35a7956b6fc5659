"""How far two correct runs of one job differ: the bounds that judge.py uses, and where they come from.

The table was measured with a Llama of four layers (hidden 64, FSDP2, AdamW, clipping at 1.0, on CPU with gloo) whose
checkpoint was loaded at 1, 2, 3, 4 and 8 ranks, with other attention kernels, other orders of the samples, gradient
accumulation, and fused and for-loop AdamW; in fp32 and bf16 and at two learning rates. Bounds are 5 to 10 times the
largest deviation of those runs. All numbers are relative to the reference.

What the measurements showed:

* bf16 noise comes from the shape of the micro-batch, not from the world size. With the shape held (both sides know
  micro_batch and sequence, and they are equal) bf16 is as exact as fp32.
* Where the parameters themselves are bf16, gradients are rounded and added up in it: the noise is that of bf16 whatever
  is
  held, and an update is a whole number of quanta. That column was measured with the models of tests/live/herd.py,
  against the recording of each and against each other, with 1 to 12 rows a pass (`tests/README.md` says how).
* Step 1 is nearly exact: nothing has been updated yet. Noise grows from step to step, so later bounds are wider, and
  those of steps after the tenth, which were not measured as closely, grow in proportion to the number of the step.

fp32 with other kernels deviated no more than fp32 with the same ones, but that was one machine: the column has ten
times the bounds of fp32, which is a margin and was not measured. It assumes that TF32 is off on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import UsageError, argument
from ..trace.model import Trace

__all__ = [
    "AFTER",
    "CHAOTIC",
    "COLUMNS",
    "NOISE_FLOOR",
    "PROFILES",
    "QUANTA",
    "SIGNALS",
    "Bound",
    "choose_bounds",
    "choose_column",
    "find_compute_precision",
    "has_16bit_parameters",
    "have_same_micro_batch_shape",
]

#: The signals, as in names of checks, in the order in which they are judged.
SIGNALS = (
    "loss",
    "grad_norm",
    "worst_grad",
    "grad_direction",
    "update_norm",
    "worst_update",
    "update_direction",
)

#: Checks of floating tensors after the last step, and the rows of their bounds.
AFTER = {"after.weights": "weights", "after.optimizer": "moments", "after.buffers": "buffers"}

#: {column: {signal: (step 1, later)}}; the probe is before any step.
COLUMNS: dict[str, dict[str, tuple[float, float]]] = {
    "fp32": {
        "probe": (5e-6, 5e-6),
        "loss": (1e-6, 2e-6),
        "grad_norm": (1e-6, 2e-6),
        "update_norm": (1e-6, 1e-5),
        "worst_grad": (2e-6, 1e-5),
        "worst_update": (1e-5, 5e-5),
        "grad_direction": (1e-5, 5e-5),
        "update_direction": (6e-5, 1e-3),
        "weights": (5e-4, 5e-4),
        "moments": (1e-5, 1e-5),
        "buffers": (1e-5, 1e-5),
    },
    "fp32, other kernels": {
        "probe": (5e-5, 5e-5),
        "loss": (1e-5, 2e-5),
        "grad_norm": (1e-5, 2e-5),
        "update_norm": (1e-5, 1e-4),
        "worst_grad": (2e-5, 1e-4),
        "worst_update": (1e-4, 5e-4),
        "grad_direction": (1e-4, 5e-4),
        "update_direction": (6e-4, 1e-2),
        "weights": (5e-3, 5e-3),
        "moments": (1e-4, 1e-4),
        "buffers": (1e-4, 1e-4),
    },
    "bf16, micro-batch held": {
        "probe": (1e-6, 1e-6),
        "loss": (1e-6, 2e-6),
        "grad_norm": (1e-6, 2e-6),
        "update_norm": (1e-6, 1e-5),
        "worst_grad": (2e-6, 1e-5),
        "worst_update": (1e-5, 5e-5),
        "grad_direction": (2e-6, 1e-5),
        "update_direction": (1e-5, 5e-5),
        "weights": (5e-5, 5e-5),
        "moments": (1e-5, 1e-5),
        "buffers": (1e-5, 1e-5),
    },
    "bf16": {
        "probe": (1e-6, 1e-6),
        "loss": (2e-6, 1e-3),
        "grad_norm": (2e-3, 4e-3),
        "update_norm": (4e-4, 2e-3),
        "worst_grad": (2e-2, 5e-2),
        "worst_update": (1e-2, 1e-1),
        "grad_direction": (7e-2, 7e-1),
        "update_direction": (2e-2, 9e-1),
        "weights": (6e-1, 6e-1),
        "moments": (3e-1, 3e-1),
        "buffers": (3e-1, 3e-1),
    },
    "bf16, other kernels": {
        "probe": (2e-2, 2e-2),
        "loss": (2e-4, 1e-3),
        "grad_norm": (2e-3, 4e-3),
        "update_norm": (4e-4, 2e-3),
        "worst_grad": (2e-2, 5e-2),
        "worst_update": (1e-2, 1e-1),
        "grad_direction": (7e-2, 7e-1),
        "update_direction": (2e-2, 9e-1),
        "weights": (6e-1, 6e-1),
        "moments": (3e-1, 3e-1),
        "buffers": (3e-1, 3e-1),
    },
    "bf16 parameters": {
        "probe": (1e-6, 1e-6),
        "loss": (5e-5, 1e-3),
        "grad_norm": (4e-3, 4e-2),
        "update_norm": (2e-3, 5e-3),
        "worst_grad": (5e-2, 2.5e-1),
        "worst_update": (5e-2, 1.5e-1),
        "grad_direction": (6e-2, 6e-1),
        "update_direction": (2e-1, 5e-1),
        "weights": (1e-1, 1e-1),
        "moments": (2.5e-1, 2.5e-1),
        "buffers": (2.5e-1, 2.5e-1),
    },
    "bf16 parameters, other kernels": {
        "probe": (2e-2, 2e-2),
        "loss": (2e-4, 1e-3),
        "grad_norm": (4e-3, 4e-2),
        "update_norm": (2e-3, 5e-3),
        "worst_grad": (5e-2, 2.5e-1),
        "worst_update": (5e-2, 1.5e-1),
        "grad_direction": (7e-2, 7e-1),
        "update_direction": (2e-1, 9e-1),
        "weights": (6e-1, 6e-1),
        "moments": (3e-1, 3e-1),
        "buffers": (3e-1, 3e-1),
    },
    # NeMo AutoModel's relaxed profile (tests/functional_tests/checkpoint_robustness, resume_trajectory.py): 7.5e-3
    # relative and 1e-4 absolute in step 1, 7.5e-3 and 1e-2 after it, of the loss. The others were measured with
    # weights, and weights and moments, rounded to bf16, in jobs of fp32 and of bf16 parameters: three to five times the
    # largest deviation.
    "relaxed": {
        "probe": (1e-1, 1e-1),
        "loss": (7.5e-3, 7.5e-3),
        "grad_norm": (1.5e-2, 4e-2),
        "update_norm": (1e-2, 5e-2),
        "worst_grad": (2.5e-1, 2.5e-1),
        "worst_update": (4e-1, 8e-1),
        "grad_direction": (6e-1, 9e-1),
        "update_direction": (9e-1, 1.5),
        "weights": (1.0, 1.0),
        "moments": (6e-1, 6e-1),
        "buffers": (6e-1, 6e-1),
    },
}

#: Where Muon runs at another world size, or is compared with a recording: it multiplies shards of a momentum in bf16
#: and sums them over ranks, and a last bit of a gradient becomes one of bf16. Four to six times the deviations at 1, 2
#: and 3 ranks (update 2.7e-3, of a tensor 8.0e-3, in direction 4.0e-2; a step later loss 1.6e-5, gradient 4.1e-4, of a
#: tensor 1.6e-3, in direction 1.3e-2; then weights 1.7e-2, moments 1.2e-2).
_MUON: dict[str, tuple[float, float]] = {
    "loss": (0, 8e-5),
    "grad_norm": (0, 2e-3),
    "update_norm": (1e-2, 1e-2),
    "worst_grad": (0, 8e-3),
    "worst_update": (4e-2, 4e-2),
    "grad_direction": (0, 6e-2),
    "update_direction": (2e-1, 2e-1),
    "weights": (8e-2, 8e-2),
    "moments": (6e-2, 6e-2),
    "buffers": (6e-2, 6e-2),
}

#: Absolute parts of bounds, of the loss under the relaxed profile: (step 1, later).
_ABSOLUTE = (1e-4, 1e-2)

PROFILES: dict[str, str] = {
    "strict": "the state is equal bit for bit, and the job computes as the reference did",
    "standard": "the state is equal bit for bit; another type of GPU, attention kernel or version of torch",
    "relaxed": "tensors may have been rounded to another dtype; every name, shape and other value is there",
}

#: Tensors whose gradient is less than this part of the whole gradient's norm have a gradient of rounding noise (that of
#: a bias of k_proj is zero but for rounding, since softmax does not see it; Adam makes an update of usual size of it).
NOISE_FLOOR = {"fp32": 1e-6, "bf16": 1e-4, "bf16 parameters": 1e-3}

#: The update of a parameter of 16 bits is a whole number of its quanta (`Trace.quanta`), and an element whose update is
#: near half of one makes it or not as the last bit of a gradient has it. So a deviation is relative to this many quanta
#: at least.
QUANTA = 4.0

#: If two runs of one job differ by more than this, staying within such a bound proves nothing.
CHAOTIC = 1e-2

_CALIBRATION = 5.0
_OF_ANOTHER_PROGRAM = 2.0


class Bound(NamedTuple):
    """What passes: a deviation of at most `relative` + `absolute` / |reference|; `source` as in `Check`. If two runs of
    the job made the bound, it is `times` what they differed by."""

    relative: float
    source: str = "measured"
    absolute: float = 0.0
    times: float = _CALIBRATION
    chaotic: bool = False

    def at(self, reference: float, step: int = 1) -> float:
        """Return the largest relative deviation that passes; from the tenth step on it grows in proportion to the step.

        Args:
            reference: the reference's value; if it is 0, `absolute` does not count.
            step: number of the step after loading; the first is 1.
        """
        grown = max(1.0, step / 10)
        return (self.relative + (self.absolute / abs(reference) if reference else 0.0)) * grown

    def obstacle(self) -> str | None:
        """Return a text that says why staying within the bound would prove nothing; None if it proves something."""
        if not self.chaotic:
            return None
        return (
            f"two runs of this very job differ by {self.relative / self.times:.2g}, and a bound of {self.times:g} "
            "times that would prove nothing: turn off what is random, or compute deterministically; what amplifies "
            "every rounding has its first step to be judged by"
        )


def find_compute_precision(reference: Trace | None, got: Trace) -> str:
    """Return the precision that the runs compute in, "fp32" or "bf16"; "bf16" if the weights have 16 bits.

    It is "fp32" if every recorded dtype is; "bf16" if no dtype was recorded. fp16 is more precise than bf16 and uses
    its bounds. `reference` is None if there is none.
    """
    words = [t.dtype for t in (got, reference) if t is not None and t.dtype]
    if has_16bit_parameters(got):
        return "bf16"
    return "fp32" if words and all(w.removeprefix("torch.") in ("fp32", "float32", "float") for w in words) else "bf16"


def has_16bit_parameters(trace: Trace) -> bool:
    """Tell whether any weight of the model has 16 bits, so that gradients are rounded to 16 bits as they accumulate
    over forward passes."""
    return any(d in ("bfloat16", "float16") for n, (d, _, _) in trace.state.items() if n.startswith("model."))


def have_same_micro_batch_shape(reference: Trace, got: Trace) -> bool:
    """Tell whether every forward pass is known to have had the same shape on both sides, and gradients the same
    rounding.

    False on CUDA without deterministic kernels. resume-verify divides the loss of a micro-batch by the tokens of the
    global batch before the backward pass; a training loop with a `Recorder` divides it by the tokens of the
    micro-batch, and by the number of micro-batches afterwards. In bfloat16 the two give the same digits of the
    gradients only if the number of micro-batches of a step is a power of two (with three micro-batches the grad norm
    was off by 1.2e-4, measured).
    """
    if None in (got.micro_batch, got.sequence) or got.sequence != reference.sequence:
        return False
    if not got.micro_batch or got.micro_batch != reference.micro_batch:
        return False
    if got.device == "cuda" and got.environment.get("deterministic") is False:
        return False  # the backward pass of attention adds in any order
    recorded = "deterministic" not in reference.environment  # what every trace of the runner says
    if has_16bit_parameters(got) and (recorded or got.world_size != reference.world_size):
        return False
    passes = (reference.global_batch or got.global_batch or got.micro_batch) // got.micro_batch
    return not recorded or passes & (passes - 1) == 0


def choose_column(profile: str, reference: Trace, got: Trace) -> str:
    """Choose the column of `COLUMNS`, the table of measured bounds, that applies to two runs; return its key.

    Raises:
        UsageError: there is no such profile.
    """
    if profile not in PROFILES:
        raise UsageError(f"{argument('profile', profile)}: choose one of {', '.join(PROFILES)}.", code="CKPT0203")
    if profile == "relaxed":
        return "relaxed"
    kind = find_compute_precision(reference, got)
    if has_16bit_parameters(got):
        kind = "bf16 parameters"
    if profile == "standard":
        return f"{kind}, other kernels"
    return kind if kind == "fp32" or not have_same_micro_batch_shape(reference, got) else "bf16, micro-batch held"


def choose_bounds(
    profile: str, reference: Trace, got: Trace, noise: Mapping[str, float] | None = None
) -> dict[str, Bound]:
    """Choose the bounds for two runs.

    If the reference is a recording, another program computed it, which rounds gradients differently from the first step
    on: a bound is then ten times the noise, and the bounds of the first step's updates also follow from the noise of
    later steps.

    Args:
        profile: a key of `PROFILES`.
        reference, got: the traces of the two runs.
        noise: {name of a check: deviation between two runs of the same job}. It widens a bound to five times that
            deviation, and never narrows one; a bound that exceeds `CHAOTIC` as a result is marked. None if it was not
            measured.

    Returns:
        {name of a check: Bound}, for "probe.logits", "step1.<signal>", "steps.<signal>" and the names in `AFTER`.

    Raises:
        UsageError: there is no such profile.
    """
    chosen = choose_column(profile, reference, got)
    table = COLUMNS[chosen]
    out = {"probe.logits": Bound(table["probe"][0])}
    for signal in SIGNALS:
        for k, stage in enumerate(("step1", "steps")):
            absolute = _ABSOLUTE[k] if chosen == "relaxed" and signal == "loss" else 0.0
            out[f"{stage}.{signal}"] = Bound(table[signal][k], "measured", absolute)
    for name, key in AFTER.items():
        out[name] = Bound(table[key][1])
    if chosen in ("relaxed", "fp32, other kernels", "bf16 parameters, other kernels"):
        out = {n: b._replace(source="given") for n, b in out.items()}
    recorded = reference.layout is None
    if chosen != "relaxed" and _uses_muon(got) and (recorded or reference.world_size != got.world_size):
        for k, stage in enumerate(("step1", "steps")):
            found = {f"{stage}.{s}": _MUON[s][k] for s in SIGNALS} | {n: _MUON[key][k] for n, key in AFTER.items()}
            for name, bound in found.items():
                out[name] = out[name]._replace(relative=max(bound, out[name].relative))
    for name, deviation in (noise or {}).items():
        times = _CALIBRATION
        if recorded:
            times *= _OF_ANOTHER_PROGRAM
            later = (noise or {}).get(name.replace("step1.", "steps."), 0.0) if "update" in name else 0.0
            deviation = deviation if math.isnan(deviation) else max(deviation, later)
        wide = times * deviation
        if name in out and not wide <= out[name].relative:
            out[name] = out[name]._replace(relative=wide, source="calibrated", times=times, chaotic=not wide <= CHAOTIC)
    return out


def _uses_muon(trace: Trace) -> bool:
    """Tell whether an optimizer of the run is Muon, whose groups have `ns_steps`."""
    return any("ns_steps" in group for group in trace.groups)
