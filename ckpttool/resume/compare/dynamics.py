"""Compares the steps of a run with those of a reference.

    StepComparison(reference, got, "strict", limits).checks()

Steps are matched by number, and the first one after loading ("step1") is judged separately from the later ones
("steps"). First comes the question whether the two are meant to compute the same: batches, precision, random numbers.
Then every signal (the loss, norms, the worst single tensor) is measured in every common step, relative to the
reference; the check of a stage reports the step that uses most of its bound. Batches and learning rates are compared
exactly, even if numbers cannot be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ...errors import argument
from ...printable import count_noun, list_first
from ..trace.batches import split_marks
from ..trace.model import Step, Trace
from . import bounds as table
from .bounds import SIGNALS, Bound
from .differences import (
    compute_relative_deviation,
    find_job_obstacle,
    list_differing_inputs,
    measure_tensor_deviations,
    pair_common_steps,
    pair_learning_rates,
)
from .side_state_differences import is_recording
from .verdict import Check

__all__ = ["StepComparison", "count_common_rows", "count_row_marks"]

#: Signals in messages, and what to pass to a Recorder so that it records them.
_WORDS = {
    "loss": "the loss",
    "grad_norm": "the grad norm",
    "worst_grad": "the gradient of a tensor",
    "grad_direction": "the direction of a tensor's gradient",
    "update_norm": "the norm of the update",
    "worst_update": "the update of a tensor",
    "update_direction": "the direction of a tensor's update",
    "batch": "the batch",
    "learning_rates": "the learning rates",
}
#: Signals of single tensors, and the field of a step that they need.
_OF_TENSORS = {
    "worst_grad": "grads",
    "worst_update": "updates",
    "grad_direction": "grad_sketches",
    "update_direction": "update_sketches",
}
_HINTS = {
    "grad_norm": "pass grad_norm to Recorder.step, or give Recorder the model and the optimizer",
    "worst_grad": "give Recorder the model and the optimizer, with norms=True",
    "grad_direction": "this version's Recorder records it, with norms=True",
    "update_direction": "this version's Recorder records it, with norms=True",
    "update_norm": "give Recorder the model and the optimizer, with norms=True",
    "worst_update": "give Recorder the model and the optimizer, with norms=True",
    "batch": "pass batch to Recorder.step",
    "learning_rates": "give Recorder the optimizer, or pass learning_rates to Recorder.step",
}


@dataclass
class _Worst:
    """The deviation of one signal in one step; `order` counts steps after loading, from 1."""

    step: int
    order: int
    deviation: float
    expected: float
    got: float
    tensor: str | None = None
    left_out: int = 0


def _find_data_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return why the batches of the two runs are expected to differ, as a text; None if they are not.

    If the first common batches are equal, names of data files do not matter.
    """
    both = pair_common_steps(reference, got)
    if both and list_differing_inputs(*both[0]) == []:
        return None
    if None not in (reference.data, got.data) and reference.data != got.data:
        return f"the data is {got.data}, the reference used {reference.data}"
    if (
        got.data == reference.data == "synthetic"
        and None not in (reference.seed, got.seed)
        and reference.seed != got.seed
    ):
        return f"the synthetic data has seed {got.seed}, the reference used {reference.seed}"
    return None


def _find_randomness_obstacle(reference: Trace, got: Trace) -> str | None:
    """Return why the forward passes of the two runs draw different random numbers, as a text; None if they do not."""
    dropout, drawn = reference.dropout or got.dropout, got.environment.get("random")
    if not dropout and not drawn:
        return None
    restored = got.environment.get("rng_restored") is True
    if restored and got.world_size is not None and got.world_size == reference.world_size:
        return None
    if not dropout:
        same = (reference.seed, reference.micro_batch) == (got.seed, got.micro_batch)
        if drawn == "seeded" == reference.environment.get("random") and same:
            return None
        return (
            "the forward pass draws random numbers, such as noise or a dropout that is not a module, and they are not "
            "those of the reference: switch them off in both, or restore the random states at the same world size"
        )
    return (
        "dropout is on, and the random states are not those of the reference: switch dropout off in both, or restore "
        "the states at the same world size"
    )


@dataclass
class StepComparison:
    """Two traces, step by step. `limits` are `bounds` of the profile; `floor` is the one of
    `measure_tensor_deviations`."""

    reference: Trace
    got: Trace
    profile: str
    limits: Mapping[str, Bound]

    def __post_init__(self) -> None:
        """Pair the steps, and choose the floor below which gradients are rounding noise.

        Raises:
            UsageError: there is no such profile.
        """
        self.pairs = pair_common_steps(self.reference, self.got)
        column = table.choose_column(self.profile, self.reference, self.got)
        tight = column.startswith("fp32") or column.endswith("held")
        rounded = table.has_16bit_parameters(self.got) or self.profile == "relaxed"
        loose = "bf16 parameters" if rounded else table.find_compute_precision(self.reference, self.got)
        self.floor = table.NOISE_FLOOR["fp32" if tight else loose]

    def _list_stage_steps(self, stage: str) -> list[tuple[int, Step, Step]]:
        """Return [(number of the step after loading, from 1; expected step; found step)] for the common steps of a
        stage.

        `stage` is "step1" or "steps".
        """
        if not self.got.steps:
            return []
        first = self.got.steps[0].step
        part = [(b.step - first + 1, a, b) for a, b in self.pairs]
        return [p for p in part if (p[0] == 1) == (stage == "step1")]

    def _explain_no_common_step(self, stage: str) -> str | None:
        """Return why run and reference share no step of a stage ("step1" or "steps"), as a text; None if they do."""
        if self.got.failed is not None:
            return "the checkpoint could not be loaded"
        if self.reference.failed is not None:
            return "the reference could not be loaded"
        if not self.got.steps:
            return "no step was run"
        if not self.reference.steps:
            return "the reference has no steps"
        if not self.pairs:
            a, b = self.reference.steps, self.got.steps
            return (
                f"no step is on both sides: the reference has steps {a[0].step} to {a[-1].step}, this run "
                f"{b[0].step} to {b[-1].step}"
            )
        if not self._list_stage_steps(stage):
            if stage == "step1":
                return f"the reference does not have step {self.got.steps[0].step}"
            return "only one step is on both sides" if len(self.pairs) == 1 else "no later step is on both sides"
        return None

    def numbers_obstacle(self, stage: str) -> str | None:
        """Return a text that says why the numbers of a stage ("step1" or "steps") cannot be compared; None if they
        can."""
        if why := self._explain_no_common_step(stage) or find_job_obstacle(self.reference, self.got):
            return why
        a, b = self.reference, self.got
        if None not in (a.global_batch, b.global_batch) and a.global_batch != b.global_batch:
            return f"the global batch is {b.global_batch}, that of the reference {a.global_batch}"
        return _find_data_obstacle(a, b) or _find_randomness_obstacle(a, b)

    def noise_tensors(self) -> set[str]:
        """Return the FQNs of tensors whose gradient was rounding noise on both sides in a step that both have."""
        out: set[str] = set()
        for a, b in self.pairs:
            least = self.floor * math.hypot(*(v for v in a.grads.values() if math.isfinite(v)))
            both = {n: (v, b.grads.get(n, 0.0)) for n, v in a.grads.items()}
            out |= {n for n, pair in both.items() if max(pair) < least and any(pair)}
        return out

    def measure_deviations(self, stage: str, signal: str) -> list[_Worst]:
        """Measure the deviation of a signal in every step of a stage in which both sides have the signal.

        Args:
            stage: "step1" or "steps".
            signal: one of `bounds.SIGNALS`.

        Returns:
            One item for each step; for a signal of single tensors that of the tensor that deviates most. [] if the
            steps cannot be compared.
        """
        if self.numbers_obstacle(stage):
            return []
        out = []
        for order, expected, got in self._list_stage_steps(stage):
            if signal in _OF_TENSORS:
                updates, direction = "update" in signal, "direction" in signal
                if not (expected.updates and got.updates if updates else expected.grads and got.grads):
                    continue
                every, left_out = measure_tensor_deviations(
                    self.reference, self.got, expected, got, updates, self.floor, direction
                )
                if every:
                    n = max(every, key=lambda n: math.inf if math.isnan(every[n][0]) else every[n][0])
                    out.append(_Worst(got.step, order, *every[n], n, left_out))
            else:
                x, y = getattr(expected, signal), getattr(got, signal)
                if x is not None and y is not None:
                    out.append(_Worst(got.step, order, compute_relative_deviation(y, x), x, y))
        return out

    def checks(self) -> list[Check]:
        """Make the checks of the first step after loading and of the later ones: batches, learning rates and the
        signals."""
        out = []
        for stage in ("step1", "steps"):
            out += [self._check_batches(stage), self._check_rates(stage)]
            out += [self._check_signal(stage, s) for s in SIGNALS]
        return out

    def envelope(self) -> dict[str, list[float]]:
        """Return the bounds of the common steps, {"loss": [bound of each step], "grad_norm": [...], "update_norm":
        [...]}.

        Lists are empty if the steps are not compared.
        """
        out: dict[str, list[float]] = {}
        for signal in ("loss", "grad_norm", "update_norm"):
            out[signal] = []
            if not self.pairs or self.numbers_obstacle("step1" if self._list_stage_steps("step1") else "steps"):
                continue
            first = self.got.steps[0].step
            for a, b in self.pairs:
                order = b.step - first + 1
                value = getattr(a, signal)
                bound = self.limits[f"{'step1' if order == 1 else 'steps'}.{signal}"]
                out[signal].append(bound.at(value if value is not None else math.nan, order))
        return out

    def _check_signal(self, stage: str, signal: str) -> Check:
        """Check one signal (such as "loss") in one stage ("step1" or "steps"), by the step that uses most of its
        bound."""
        name = f"{stage}.{signal}"
        bound = self.limits[name]
        if why := self.numbers_obstacle(stage):
            return Check.unknown(name, why)
        every = self.measure_deviations(stage, signal)
        if not every:
            return Check.unknown(name, self._explain_missing_signal(stage, signal))
        if why := bound.obstacle():
            return Check.unknown(name, why)

        def excess(w: _Worst) -> float:
            return math.inf if math.isnan(w.deviation) else w.deviation / bound.at(w.expected, w.order)

        worst = max(every, key=excess)
        most = bound.at(worst.expected, worst.order)
        where = f"step {worst.step}" + (f", {worst.tensor}" if worst.tensor else "")
        of = "with a norm of " if "direction" in signal else ""
        what = (
            f"{_WORDS[signal]} deviates by {worst.deviation:.2g}: {of}{worst.got!r} and was {worst.expected!r}, in "
            f"{where}"
        )
        if worst.deviation == 0:
            span = "" if stage == "step1" else f" in {count_noun(len(every), 'step')}"
            what = f"{_WORDS[signal]} is bit-equal{span}"
        if worst.left_out:
            what += f"; {count_noun(worst.left_out, 'tensor')} whose gradient is rounding noise not counted"
        shown = None if worst.deviation == 0 else where
        return Check.of(name, worst.deviation <= most, what, worst.deviation, most, bound.source, shown)

    def _explain_missing_signal(self, stage: str, signal: str) -> str:
        """Return a text about which side did not record a signal in a stage, and how to record it."""
        attribute = _OF_TENSORS.get(signal, signal)
        steps = [a for _, a, _ in self._list_stage_steps(stage)]
        bare = [a for a in steps if getattr(a, attribute) in (None, {}, [], "")]
        if signal == "batch":
            bare = [a for a in steps if a.batch is None and not a.inputs]
        who = "the reference" if bare else "the run"
        hint = f": {_HINTS[signal]}" if bare and signal in _HINTS and is_recording(self.reference) else ""
        if not bare and "update" in signal:
            hint = f": {argument('updates', False)} was given"
        return f"{who} does not have {_WORDS[signal]}{hint}"

    def _check_batches(self, stage: str) -> Check:
        """Check that both sides had the same batches in a stage ("step1" or "steps")."""
        name = f"{stage}.batch"
        if why := self._explain_no_common_step(stage) or _find_data_obstacle(self.reference, self.got):
            return Check.unknown(name, why)
        pairs = [(a, b, list_differing_inputs(a, b)) for _, a, b in self._list_stage_steps(stage)]
        known = [(a, b, keys) for a, b, keys in pairs if keys is not None]
        if not known:
            sides = [[s.batch is None and not s.inputs for s in two] for *two, _ in pairs]
            if not any(map(any, sides)):
                return Check.unknown(name, "the samples of the two sides have no key in common")
            return Check.unknown(name, self._explain_missing_signal(stage, "batch"))
        wrong = [x for x in known if x[2]]
        if not wrong:
            return Check.of(name, True, f"the same batch in {count_noun(len(known), 'step')}", 0, 0, "exact")
        expected, got, keys = wrong[0]
        text = f"batches that differ from the reference's in {len(wrong)} of {count_noun(len(known), 'step')}"
        if keys != ["input_ids"]:
            few = f"{len(wrong)} of {count_noun(len(known), 'step')}"
            verb = "differs" if len(keys) == 1 else "differ"
            text = f"{list_first(keys)} of the samples {verb} from the reference's in {few}"
        if "input_ids" in keys and (rows := count_common_rows(expected, got)) is not None:
            text += f"; {rows[0]} of the {count_noun(rows[1], 'row')} of step {got.step} are the reference's"
        return Check.of(name, False, text, len(wrong), 0, "exact", f"step {got.step}")

    def _check_rates(self, stage: str) -> Check:
        """Check that both sides had the same learning rates in a stage ("step1" or "steps")."""
        name = f"{stage}.learning_rates"
        if why := self._explain_no_common_step(stage):
            return Check.unknown(name, why)
        known = [(a, b) for _, a, b in self._list_stage_steps(stage) if a.learning_rates and b.learning_rates]
        if not known:
            return Check.unknown(name, self._explain_missing_signal(stage, "learning_rates"))
        worst, where, text = 0.0, None, f"the same learning rates in {count_noun(len(known), 'step')}"
        for a, b in known:
            for label, x, y in pair_learning_rates(self.reference, self.got, a, b):
                d = compute_relative_deviation(y, x)
                if not d <= worst:
                    worst, where = d, f"step {b.step}, {label}"
                    text = f"the learning rate is {y!r} and was {x!r} in step {b.step}, {label}"
            if not math.isfinite(worst):
                break
        return Check.of(name, worst == 0, text, worst, 0, "exact", where)


def count_row_marks(step: Step) -> Counter[str]:
    """Return {mark: how often it occurs} over all ranks of a step; a mark is 8 characters that identify a row of
    tokens."""
    return Counter(chain.from_iterable(split_marks(step.rows)))


def count_common_rows(expected: Step, got: Step) -> tuple[int, int] | None:
    """Count the rows of the run's step: (those that the reference's step has too, all).

    None if a side did not record rows, or if only one side has rows of token ids.
    """
    if not expected.rows or not got.rows or (expected.batch is None) != (got.batch is None):
        return None
    ours = count_row_marks(got)
    return (count_row_marks(expected) & ours).total(), ours.total()
