"""Checks of what the job computes besides its steps: the logits of the probe, and what needs no reference.

Each function gets the traces and returns a `Check`. Steps are judged by `dynamics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from ...printable import count_noun, list_first
from ..trace.model import Trace
from .bounds import Bound
from .differences import (
    compute_relative_deviation,
    find_job_obstacle,
    find_non_finite_values,
)
from .verdict import Check

__all__ = [
    "check_completed",
    "check_dead_gradients",
    "check_finite",
    "check_losses_of_ranks",
    "check_probe",
    "check_probe_ranks",
    "check_round_trip",
    "check_spike",
    "compare_logits",
]


#: A grad norm this many times the usual one is a spike.
SPIKE = 10.0


def compare_logits(reference: Trace, got: Trace) -> tuple[float, float | None, float | None] | str:
    """Compare the logits of the probes of two traces.

    Returns:
        (relative L2 distance, largest absolute difference, mean KL divergence), all NaN if a logit is NaN; from a
        recorded sketch only the first is known, and the others are None. If the logits cannot be compared, a text that
        says why.
    """
    import numpy as np

    if reference.probe.get("sketch"):
        return _compare_logit_sketches(reference, got)
    files = [str(t.probe.get("file") or "") for t in (reference, got)]
    if not all(files):
        why = reference.unrecorded.get("probe") if not files[0] else None
        return f"{'the run' if files[0] else 'the reference'} has no probe" + (f" ({why})" if why else "")
    batches = [t.probe.get("batch") for t in (reference, got)]
    if None not in batches and batches[0] != batches[1]:
        return "the probes were made with different batches"
    if why := find_job_obstacle(reference, got) or _find_copies_obstacle(reference, got):
        return why
    try:
        a, b = (np.load(f, mmap_mode="r", allow_pickle=False) for f in files)
    except (OSError, ValueError, EOFError) as e:
        return f"the logits cannot be read ({e})"
    if a.shape != b.shape or a.ndim < 2 or not a.size:
        return f"the logits have shape {list(b.shape)}, those of the reference {list(a.shape)}"
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    apart = total = divergence = largest = 0.0
    rows = max(1, (1 << 22) // a.shape[1])
    with np.errstate(all="ignore"):
        for k in range(0, len(a), rows):
            x, y = np.asarray(a[k : k + rows], "f8"), np.asarray(b[k : k + rows], "f8")
            gap = np.where(x == y, 0.0, y - x)  # an infinite logit that is the same on both sides is no difference
            apart += float(np.square(gap).sum())
            total += float(np.square(np.where(np.isinf(x), 0.0, x)).sum())
            largest = float(np.maximum(largest, np.abs(gap).max()))
            p, q = _log_softmax(x), _log_softmax(y)
            divergence += float(np.where(p == -np.inf, 0.0, np.exp(p) * (p - q)).sum())
    if math.isnan(apart):
        return math.nan, math.nan, math.nan
    number = 0.0 if apart == 0 else math.sqrt(apart / total) if total else math.inf
    return number, largest, divergence / len(a) if apart else 0.0


def _compare_logit_sketches(reference: Trace, got: Trace) -> tuple[float, None, None] | str:
    """Compare the sketch (a random projection) of a run's logits with a recorded one.

    Returns:
        (relative L2 distance, None, None), or a text that says why they cannot be compared.
    """
    ours = got.probe.get("recorded") or {"skipped": "the run did not compute the logits of the recorded rows"}
    if "skipped" in ours:
        return f"this job could not compute the logits of the recorded rows: {ours['skipped']}"
    if why := find_job_obstacle(reference, got) or _find_copies_obstacle(reference, got):
        return why
    theirs = reference.probe
    if list(theirs["shape"]) != list(ours["shape"]):
        return f"the logits have shape {ours['shape']}, those of the reference {theirs['shape']}"
    if theirs["not_finite"] != ours["not_finite"]:
        return math.inf, None, None
    a, b = ([v for row in side["sketch"] for v in row] for side in (theirs, ours))
    apart = math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
    size = math.sqrt(sum(x * x for x in a))
    return apart / size if size else math.inf if apart else 0.0, None, None


def _find_copies_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return a text if the probes were computed with the copies of a tensor that different ranks held; None if not."""
    for n in reference.variants.keys() & reference.state.keys() & got.state.keys():
        if got.state[n][2] != reference.state[n][2]:
            return (
                f"the ranks of the reference's job held different copies of {n}, and the checkpoint has that of "
                "another rank than the probe"
            )
    return None


def _log_softmax(x: Any) -> Any:
    """Compute the logarithm of the softmax of each row of a 2-d array."""
    import numpy as np

    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def check_probe(reference: Trace, got: Trace, bound: Bound) -> Check:
    """Check that the logits of the probe deviate from the reference's by no more than a bound."""
    name = "probe.logits"
    found = compare_logits(reference, got)
    if isinstance(found, str):
        return Check.unknown(name, found)
    if why := bound.obstacle():
        return Check.unknown(name, why)
    number, largest, divergence = found
    if math.isnan(number):
        return Check.of(name, False, "the logits contain NaN", None, bound.relative, bound.source)
    text = f"logits deviate by {number:.2g} (relative L2)"
    if largest is not None and divergence is not None:
        text += f"; largest difference {largest:.2g}, mean KL divergence {divergence:.2g}"
    if number == 0:
        text = "the logits are bit-equal"
    return Check.of(name, number <= bound.relative, text, number, bound.relative, bound.source)


def check_probe_ranks(got: Trace) -> Check:
    """Check that all ranks computed the same logits."""
    name, agree = "probe.ranks", got.probe.get("agree")
    if agree is None:
        return Check.unknown(name, "the ranks did not compare their logits")
    text = "all ranks have the same logits" if agree else "ranks have different logits for the same batch"
    return Check.of(name, bool(agree), text, source="exact")


# ------------------------------------------------------------------------------------------------------------------ run


def check_losses_of_ranks(got: Trace) -> Check:
    """Check that all ranks report the same loss in every step."""
    name = "run.ranks"
    known = [s for s in got.steps if s.losses]
    if not known:
        return Check.unknown(name, "the losses of the ranks were not gathered")
    for s in known:
        losses = s.losses or []
        if any(x != losses[0] and not (x != x and losses[0] != losses[0]) for x in losses):
            text = f"ranks report different losses in step {s.step}: {_describe_losses_by_value(losses)}"
            return Check.of(
                name,
                False,
                text,
                max(compute_relative_deviation(x, losses[0]) for x in losses),
                0,
                "exact",
                f"step {s.step}",
            )
    return Check.of(name, True, f"all ranks have the same loss, in {count_noun(len(known), 'step')}", 0, 0, "exact")


def _describe_losses_by_value(losses: Sequence[float]) -> str:
    """Return a text about which ranks report which loss, such as "2.5 on rank 0; 2.6 on rank 1".

    `losses` has the loss of each rank, in order.
    """
    ranks: dict[str, list[int]] = {}
    for rank, x in enumerate(losses):
        ranks.setdefault(repr(x), []).append(rank)
    return "; ".join(f"{x} on {list_first([f'rank {r}' for r in rs])}" for x, rs in list(ranks.items())[:4])


def check_finite(got: Trace) -> Check:
    """Check that the losses and norms of all steps are finite."""
    name = "run.finite"
    if not got.steps:
        return Check.unknown(name, "no step was run")
    for s in got.steps:
        found = list(find_non_finite_values(s))
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            text = f"{found[0][0]} is {found[0][1]} in step {s.step}{more}"
            return Check.of(name, False, text, source="exact", where=f"step {s.step}, {found[0][0]}")
    return Check.of(
        name, True, f"loss and norms are finite numbers in {count_noun(len(got.steps), 'step')}", source="exact"
    )


def check_completed(got: Trace) -> Check | None:
    """Return a failed check if the optimizer raised an error in a step; None if it did not."""
    if got.stopped is None:
        return None
    text = f"the optimizer fails in step {got.start + 1 + len(got.steps)}: {got.stopped}"
    return Check.of("run.completed", False, text, source="exact")


def check_spike(reference: Trace | None, got: Trace) -> Check:
    """Check that no grad norm is more than ten times the usual one: the reference's of the same step, or else the
    median of the steps before."""
    name = "run.spike"
    theirs = {s.step: s.grad_norm for s in reference.steps} if reference is not None else {}
    before: list[float] = []
    judged, worst, where, usual = 0, 0.0, None, 0.0
    for s in got.steps:
        norm = s.grad_norm
        if norm is None or not math.isfinite(norm):
            continue
        expected = theirs.get(s.step)
        if not expected or not math.isfinite(expected):
            expected = median(before) if len(before) >= 3 else None
        before.append(norm)
        if expected:
            judged += 1
            if norm / expected > worst:
                worst, where, usual = norm / expected, f"step {s.step}", expected
    if not judged:
        return Check.unknown(name, "too few steps have a grad norm to tell what is usual")
    text = f"the largest grad norm is {worst:.2g} times the usual one ({usual:.3g}), in {where}"
    return Check.of(name, worst <= SPIKE, text, worst, SPIKE, "given", where)


def check_dead_gradients(reference: Trace | None, got: Trace) -> Check:
    """Check that the grad norm is not 0 in any step, except where the reference's is 0 too.

    `reference` is None if there is none.
    """
    name = "run.dead"
    known = [s for s in got.steps if s.grad_norm is not None]
    if not known:
        return Check.unknown(name, "no grad norm was recorded")
    theirs = {s.step: s.grad_norm for s in reference.steps} if reference is not None else {}
    dead = [s.step for s in known if s.grad_norm == 0 and theirs.get(s.step) != 0]
    if dead:
        text = f"the grad norm is 0 in {count_noun(len(dead), 'step')}: nothing is learned"
        return Check.of(name, False, text, len(dead), 0, "exact", f"step {dead[0]}")
    return Check.of(name, True, "there is a gradient in every step", 0, 0, "exact")


def check_round_trip(got: Trace) -> Check:
    """Check that the job holds the same state after a save and a load."""
    name = "roundtrip.state"
    if "differing" not in got.roundtrip:
        return Check.unknown(name, f"no save and load: {got.roundtrip.get('skipped', 'it was not requested')}")
    wrong = [str(n) for n in got.roundtrip["differing"]]
    options = sum(n.startswith("optim.param_groups.") for n in wrong)
    kinds = (("tensor", len(wrong) - options), ("option", options))
    bad = f"{' and '.join(count_noun(n, kind) for kind, n in kinds if n)} changed by a save and a load"
    return Check.exact(name, wrong, "what was saved was loaded again, bit for bit", bad)
