"""The kinds of causes that a report names: one table.

A member of `CauseKind` is a row: its name (the `kind` of a cause in JSON), what it says in a sentence, and what else it
explains, so that later rules are silent about it. Causes about values of tensors are of the kinds in
engine/tensor_faults/tensor_kinds.py. The index in docs/explanation/faults.md is made from both (docs/_hooks.py).

    context.add(CauseKind.STEP_RESET, "the optimizer's step is 0 on all tensors")
    context.add(CauseKind.OPTION, "lr is 0.1 and was 0.2 for all parameters", name="lr")         # "option-lr"
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from ...engine.tensor_faults.tensor_kinds import TensorKind

__all__ = ["CauseKind", "Topic", "format_kind_name", "list_kinds"]

#: What a cause explains besides itself.
Topic = Literal["weights", "optimizer", "gradients", "data", "rates"]

_OPTIMIZER: tuple[Topic, ...] = ("optimizer",)
_STATE: tuple[Topic, ...] = ("weights", "optimizer")
_RATES: tuple[Topic, ...] = ("rates", "optimizer")
_DATA: tuple[Topic, ...] = ("data",)


class CauseKind(Enum):
    """Kinds of causes, in the order of the rules that find them.

    `label` is the name, followed by "-" and the name of an option for OPTION. `sentence` says what it is. `explains`
    are the topics that it explains; None stands for those of its tensors, weights or optimizer.
    """

    LOAD_FAILED = "load-failed", "The checkpoint could not be loaded into the job.", _STATE
    COPIES_DIFFER = "copies-differ", "Ranks that should hold the same tensor do not.", _STATE
    ROUNDED_ON_LOAD = "rounded-on-load", "The job holds a tensor in a less precise dtype than the files."
    LOADING = "loading", "Loading changed tensors: the job does not hold what the files contain.", None
    LOADED_VALUES = "loaded-values", "Loading changed what the scheduler or a module's extra state holds."
    OPTIMIZER_MISSING = "optimizer-missing", "The checkpoint has no optimizer state.", _OPTIMIZER
    TENSOR_MISSING = "tensor-missing", "Weights of the reference are not in the checkpoint.", ("weights",)
    MOMENTS_MISSING = "moments-missing", "The optimizer state of some parameters is missing.", _OPTIMIZER
    TENSOR_EXTRA = "tensor-extra", "The checkpoint has tensors that the reference does not have."
    SHAPE = "shape", "Tensors have another shape.", _STATE
    VOCABULARY = "vocabulary", "Rows of the vocabulary were cut off, or padding was added.", _STATE
    MOMENTS_EXCHANGED = "moments-exchanged", "Moments stand under each other's names.", None
    LAYERS_EXCHANGED = "layers-exchanged", "Layers are in another order.", None
    EXCHANGED = "exchanged", "Two tensors, or the files of two ranks, are in each other's place.", None
    ONE_FILE = "one-file", "Every difference lies in one file, which the report names with its rank.", None
    STEP_RESET = "step-reset", "The optimizer's step is 0.", _OPTIMIZER
    STEP_DIFFERS = "step-differs", "The optimizer's steps differ, by different numbers.", _OPTIMIZER
    STEP_OFFSET = "step-offset", "The optimizer's step is some steps off; its moments are right.", _OPTIMIZER
    OTHER_CHECKPOINT = "other-checkpoint", "Weights and optimizer state are from another checkpoint.", _STATE
    OPTIMIZER_STALE = "optimizer-stale", "The optimizer's state is from another step.", _OPTIMIZER
    WEIGHTS_DIFFER = "weights-differ", "Weights hold other values; their files were not read.", ("weights",)
    MOMENTS_DIFFER = "moments-differ", "The optimizer holds other values; its files were not read.", _OPTIMIZER
    SCHEDULER_MISSING = "scheduler-missing", "The checkpoint has no scheduler state.", _RATES
    UNTIED = "untied", "Weights are tied on one side alone.", _STATE
    MODEL_CONFIGURATION = "model-configuration", "The model's configuration, or its kernels, differ.", ("weights",)
    OPTIONS_LOST = "options-lost", "The checkpoint has lost options of its param groups, or all groups.", _OPTIMIZER
    OPTION = "option", "An option of a param group has another value.", _OPTIMIZER
    WEIGHT_DECAY_ON_NORMS = "weight-decay-on-norms", "Norms and biases decay that did not.", _OPTIMIZER
    OPTIMIZER_MEMBERS = "optimizer-members", "The optimizer has other parameters.", _OPTIMIZER
    SCHEDULER_RESET = "scheduler-reset", "The scheduler starts over.", _RATES
    SCHEDULER_OFFSET = "scheduler-offset", "The scheduler is some steps off.", _RATES
    SCHEDULER_STATE = "scheduler-state", "The scheduler's state has other values.", _RATES
    SCHEDULER_INCOMPLETE = "scheduler-incomplete", "A part of the scheduler's state is missing.", _RATES
    SCHEDULER_LOST = "scheduler-lost", "The learning rate stays where it is: no scheduler changes it.", _RATES
    LEARNING_RATE = "learning-rate", "The learning rate is another one, or 0.", _RATES
    CLIPPING = "clipping", "Gradients are clipped at another norm, or on one side alone.", _OPTIMIZER
    COUNTERS = "counters", "The trainer's counters, such as step and epoch, differ."
    RNG = "rng", "The stored random states differ, or are lost."
    DATALOADER = "dataloader", "The dataloader's stored state differs, or is lost."
    SCALER = "scaler", "The grad scaler's stored state differs, or is lost."
    VALUES = "values", "Other stored values differ, or are lost."
    GLOBAL_BATCH = "global-batch", "The global batch has another size.", _DATA
    SEQUENCE = "sequence", "Sequences have another length.", _DATA
    DATA_INPUTS = "data-inputs", "Masks, positions, labels or other tensors of the samples differ.", _DATA
    DATA_ROWS = "data-rows", "Ranks read the rows of others, or the data is some samples off.", _DATA
    DATA_RESTART = "data-restart", "The data starts over.", _DATA
    DATA_OFFSET = "data-offset", "The data is some steps off.", _DATA
    DATA_ORDER = "data-order", "The same rows or batches come in a different order.", _DATA
    DATA_OTHER = "data-other", "None of the batches is in the reference.", _DATA
    STATE_ODD = "state-odd", "The optimizer's state is one that no training produces.", _OPTIMIZER
    RANK_DISAGREES = "rank-disagrees", "A rank computes other logits or another loss.", ("weights", "gradients")
    GRADIENT_SCALE = "gradient-scale", "Gradients are summed instead of averaged.", ("gradients", "optimizer")
    WEIGHTS = "weights", "Logits or loss differ before any update.", ("weights",)
    DROPOUT = "dropout", "Dropout, or its random numbers, differ."
    LOSS_COMPUTATION = "loss-computation", "The loss is computed differently from equal logits.", ("weights",)
    DATA = "data", "Another batch, or another computation of the loss."
    FROZEN = "frozen", "Parameters that were updated in the reference are not.", _OPTIMIZER
    GRADIENTS = "gradients", "The loss is equal and gradients are not."
    OPTIMIZER = "optimizer", "Gradients are equal and updates are not."
    OPTIMIZER_GROUP = "optimizer-group", "The updates of one param group differ."
    MOMENTS = "moments", "The updates of some tensors differ."
    LATER_STEPS = "later-steps", "The first step agrees and later ones do not."
    SCHEDULE_AHEAD = "schedule-ahead", "The rates of later steps differ: a decay begins elsewhere.", _RATES
    BUFFERS = "buffers", "Buffers that training changes, such as running statistics, are updated otherwise."
    STATE_AFTER = "state-after", "The steps agree and what they leave does not."
    STEP_FAILED = "step-failed", "The optimizer's step raises an error with the state that it got."
    NO_GRADIENT = "no-gradient", "No gradient arrives."
    SPIKE = "spike", "The grad norm leaps."
    SAVE_OR_LOAD = "save-or-load", "What was saved is not what is loaded again."
    DOES_NOT_FIT = "does-not-fit", "The checkpoint is of another model than the job."
    UNKNOWN = "unknown", "No known fault looks like this; the failed checks are the evidence."

    def __init__(self, label: str, sentence: str, explains: tuple[Topic, ...] | None = ()) -> None:
        """Keep the parts of a kind's value.

        Args:
            label: the name of the kind, such as "shape".
            sentence: what the fault is.
            explains: the topics that such a cause explains; None for those of the cause's tensors, weights or
                optimizer.
        """
        self.label, self.sentence, self.explains = label, sentence, explains


def format_kind_name(kind: CauseKind | TensorKind, name: str = "") -> str:
    """Return the name that a cause of some kind has in JSON, such as "option-lr".

    Args:
        kind: the kind of cause.
        name: the option or the dtype that the cause is about; "" for none.
    """
    return f"{kind.label}-{name}" if name else kind.label


def list_kinds() -> dict[str, str]:
    """Return {name: sentence} of all kinds, causes first; the anchor of each in faults.md is its name."""
    suffixes: dict[CauseKind | TensorKind, str] = {CauseKind.OPTION: "NAME", TensorKind.ROUNDED: "DTYPE"}
    return {format_kind_name(k, suffixes.get(k, "")): k.sentence for k in (*CauseKind, *TensorKind)}
