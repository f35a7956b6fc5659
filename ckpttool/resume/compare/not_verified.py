"""What a run of resume-verify did not verify, in short sentences: what no check could see, and what could not be
compared.

    list_not_verified(reference, got, checks) -> ["faults of job, data, loss or model configuration: both runs were
    built from llama", ...]

Every form of the report lists them, since a pass says nothing of what nobody looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...printable import count_noun, escape_unprintable, list_first
from ..text import parse_fqn
from ..trace.model import LIVE, Trace
from .differences import find_lost_options, list_ignored_config_keys, list_ignored_options, list_one_sided_inputs
from .side_state_differences import compare_side_state, is_recording, select_side_state
from .verdict import Check

__all__ = ["list_not_verified"]

#: Components that are loaded into the job, in words.
_LOADED = {"model": "model", "optim": "optimizer", "scheduler": "scheduler"}

#: Components beside model and optimizer, in words.
_BESIDE = {
    "rng": "random states",
    "dataloader": "dataloader",
    "scaler": "grad scaler",
    "extra": "other values",
    "model": "extra states of modules",
    "optim": "optimizer state of parameters that this job does not train",
}


def list_not_verified(reference: Trace | None, got: Trace, checks: Sequence[Check]) -> list[str]:
    """List in short sentences what the run did not verify, what matters most first.

    Args:
        reference: None if there is none.
        got: the run.
        checks: the checks of `judge` for these two.
    """
    if got.failed is not None:
        return ["everything after loading: the checkpoint could not be loaded", *_describe_unread_files(got)]
    out = [
        *_describe_shared_faults(reference, got),
        *_describe_unused_job_code(reference),
        *_describe_unused_load_code(got),
        *_describe_disabled_randomness(got),
    ]
    out += [*_describe_unsaved_copies(reference, got), *_describe_idle_scheduler(reference, got)]
    out += [*_describe_possibly_lost_state(reference, got, checks), *_describe_unused_state(reference, got)]
    out += [
        *_describe_unread_files(got),
        *_describe_partial_comparisons(reference, got),
        *_describe_unjudged_checks(checks),
    ]
    if reference is not None:
        seen = " ".join(c.text for c in checks)
        out += [
            f"{escape_unprintable(n)}: {escape_unprintable(why)}"
            for n, why in reference.unrecorded.items()
            if why not in seen
        ]
    return list(dict.fromkeys(out))


def _describe_shared_faults(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield sentences about the faults that both runs would share, or one about a missing reference."""
    if reference is None:
        yield "whether training goes on as before: there is no reference"
    elif not is_recording(reference):
        same = reference.recipe == got.recipe
        what = "job, data, loss or model configuration" if same else "data or loss"
        recipe = (
            f"both runs were built from {escape_unprintable(got.recipe, 80)}"
            if same and got.recipe
            else "both runs have the same"
        )
        yield f"faults of {what}: {recipe}"
        if got.source and reference.source == got.source:
            yield "faults of the checkpoint itself: both runs loaded it"
        yield from _describe_shared_loader(reference)


def _describe_shared_loader(reference: Trace) -> Iterator[str]:
    """Yield sentences about the components that ckpttool's loader loaded on both sides, and why no other reader did."""
    by: dict[str, list[str]] = {}
    for component, why in reference.unwitnessed.items():
        by.setdefault(why, []).append(_LOADED[component])
    for why, what in by.items():
        both = f"faults of ckpttool's loader in {list_first(what)}: it loaded both sides"
        yield f"{both}, since {escape_unprintable(why)}"
    if reference.loaders and not reference.unwitnessed and set(reference.loaders.values()) == {"ckpttool"}:
        yield "faults of ckpttool's loader: it loaded both sides, as asked"


def _describe_unused_job_code(reference: Trace | None) -> Iterator[str]:
    """Yield sentences about the parts of a fresh job's own program that the run did not use, such as its training
    loop."""
    if reference is not None and reference.layout == LIVE:
        yield (
            "the job's own training loop, the order in which its data loader gives rows, and its code that loads a "
            "checkpoint: only what build() returns took part"
        )
        if not reference.roundtrip.get("own"):
            yield "the job's own code that saves a checkpoint: build() returns no save, so dcp.save wrote it"


def _describe_disabled_randomness(got: Trace) -> Iterator[str]:
    """Yield sentences about dropout that was switched off, and about random numbers that were not restored."""
    if got.dropout_off:
        yield f"dropout (probability up to {got.dropout_off:g}): it was switched off"
    if got.environment.get("random") == "seeded":
        yield (
            "the random numbers that the forward pass draws: they were seeded, and not continued from the checkpoint's"
        )


def _describe_unused_load_code(got: Trace) -> Iterator[str]:
    """Yield a sentence about the loading code of the job's own classes, which did not run; nothing if there is none."""
    if functions := got.environment.get("own_loading"):
        yield (
            "loading code of the job's own classes, which did not run, since ckpttool fills tensors in place: "
            f"{escape_unprintable(list_first(functions, 8))}"
        )


def _describe_unsaved_copies(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield a sentence about tensors of which each rank has its own copy, though torch saves only one of them."""
    live = [n for n in reference.variants if n in got.state] if reference and reference.layout == LIVE else []
    if apart := live or got.roundtrip.get("apart"):
        yield (
            f"whether a save keeps every rank's own copy of {count_noun(len(apart), 'tensor')}, first "
            f"{escape_unprintable(apart[0])}: torch saves one copy"
        )


def _describe_idle_scheduler(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield a sentence about a scheduler that was not stepped, and where the later learning rates come from."""
    waits = bool(got.environment.get("scheduler_waits"))
    if waits or (
        got.scheduler is None and any(select_side_state(t, "scheduler") for t in (got, reference) if t is not None)
    ):
        recorded = reference is not None and is_recording(reference)
        rates = (
            "the later learning rates are the reference's" if recorded else "the learning rate stays the checkpoint's"
        )
        why = f"{escape_unprintable(got.scheduler, 40)} needs a metric for a step" if waits else "the job has none"
        yield f"the scheduler at work: {why}, so {rates}"


def _describe_possibly_lost_state(reference: Trace | None, got: Trace, checks: Sequence[Check]) -> Iterator[str]:
    """Yield sentences about random states and counters that the checkpoint lacks, if the reference is a recording.

    A recording does not tell whether its job's own checkpoint held them.
    """
    if reference is None or not is_recording(reference):
        return
    if reference.generators and not select_side_state(got, "rng"):
        yield from (
            _format_line(c.name, c.text) for c in checks if c.name == "config.rng" and c.verdict == "not comparable"
        )
    if not select_side_state(got, "trainer") and not compare_side_state(reference, got, "trainer").missing:
        yield (
            "counters of the trainer, such as step and epoch: the checkpoint holds none (HF Trainer keeps them in "
            "trainer_state.json), and the reference did not record those of its step"
        )


def _describe_unused_state(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield sentences about state in the checkpoint that the job does not use, and whether it was compared."""
    held = {c: what for c, what in _BESIDE.items() if select_side_state(got, c)}
    if got.environment.get("rng_restored"):
        held.pop("rng", None)
    loaded = held.pop("model", None) if any(n.startswith("model.") for n in got.held) else None
    apart = (
        {}
        if reference is None
        else {c: compare_side_state(reference, got, c) for c in (*_BESIDE, "scheduler", "trainer")}
    )
    compared = [what for c, what in held.items() if c in apart and apart[c].compared]
    if compared:
        yield f"compared as stored, but not used by this job: {', '.join(compared)}"
    if rest := [what for what in held.values() if what not in compared]:
        yield f"not used by this job, and compared with nothing: {', '.join(rest)}"
    if loaded and not ("model" in apart and apart["model"].compared):
        yield f"{loaded}, which were loaded: compared with nothing"
    extra = [n for found in apart.values() if found.compared for n in found.extra]
    if extra:
        yield f"only in this checkpoint, so compared with nothing: {escape_unprintable(list_first(extra))}"
    if unknown := [n for found in apart.values() for n in found.unknown]:
        yield f"objects of classes that ckpttool does not build: {escape_unprintable(list_first(unknown))}"


def _describe_unread_files(got: Trace) -> Iterator[str]:
    """Yield a sentence about the files next to the checkpoint that were not read; nothing if there are none."""
    if got.unread:
        yield (
            "files beside the checkpoint that were not read: "
            f"{escape_unprintable(list_first([f'{n} ({what})' for n, what in got.unread]))}"
        )


def _describe_partial_comparisons(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield sentences about tensors, keys and options that comparisons left out."""
    if got.stored:
        tied = {n for group in got.tied for n in group}
        rest = [n for n in got.state if n not in got.stored and parse_fqn(n) not in tied]
        if rest:
            yield (
                f"{count_noun(len(rest), 'tensor')} of another dtype in the files, so not compared with them: "
                f"{escape_unprintable(list_first(rest))}"
            )
    if reference is None:
        return
    if (
        reference.config is not None
        and got.config is not None
        and (keys := list_ignored_config_keys(reference.config, got.config))
    ):
        what = escape_unprintable(list_first(keys))
        yield f"keys of the model's configuration that only one version of transformers writes: {what}"
    if keys := list_one_sided_inputs(reference, got):
        yield f"what only one side has of the samples, so compared with nothing: {escape_unprintable(list_first(keys))}"
    if keys := find_lost_options(reference, got)[1]:
        yield (
            f"options of param groups that checkpoints of layout {got.layout} do not hold, so that the job's own were "
            f"used: {escape_unprintable(list_first(keys))}"
        )
    if keys := list_ignored_options(reference, got):
        yield f"options of param groups that only one version of torch writes: {escape_unprintable(list_first(keys))}"


def _describe_unjudged_checks(checks: Sequence[Check]) -> Iterator[str]:
    """Yield, for each reason why checks could not be judged, a line with their names and the reason."""
    by: dict[str, list[str]] = {}
    for c in checks:
        if c.verdict == "not comparable":
            by.setdefault(c.text, []).append(c.name)
    for why, names in by.items():
        yield _format_line(list_first(names), why)


def _format_line(names: str, why: str) -> str:
    """Return "<names>: <why>" with unprintable characters escaped, as one line."""
    return f"{escape_unprintable(names)}: {escape_unprintable(why, 80)}"
