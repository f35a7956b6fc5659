"""What a run of resume-verify did not verify, in short sentences: what no check could see, and what could not be
compared.

    list_not_verified(reference, got, checks) -> ["faults of job, data, loss or model configuration: both runs were
    built from llama", ...]

Every form of the report lists them, since a pass says nothing of what nobody looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...printable import count_noun, escape_unprintable, list_first
from ..text import fqn_of
from ..trace.model import LIVE, Trace
from .differences import ignored_config_keys, ignored_options, inputs_of_one_side, lost_options
from .side_state_differences import compare_side_state, is_recording, side_state_of
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
        return ["everything after loading: the checkpoint could not be loaded", *_unread_files(got)]
    out = [*_same_job(reference, got), *_not_run(reference), *_own_loading(got), *_switched_off(got)]
    out += [*_copies_not_saved(reference, got), *_idle_scheduler(reference, got)]
    out += [*_perhaps_lost(reference, got, checks), *_unused_state(reference, got)]
    out += [*_unread_files(got), *_partly_compared(reference, got), *_checks_not_judged(checks)]
    if reference is not None:
        seen = " ".join(c.text for c in checks)
        out += [
            f"{escape_unprintable(n)}: {escape_unprintable(why)}"
            for n, why in reference.unrecorded.items()
            if why not in seen
        ]
    return list(dict.fromkeys(out))


def _same_job(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield a sentence about the faults that both runs would share, or that there is no reference."""
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
        yield from _same_loader(reference)


def _same_loader(reference: Trace) -> Iterator[str]:
    """Yield sentences about the components that ckpttool loaded on both sides, and why no other reader did."""
    by: dict[str, list[str]] = {}
    for component, why in reference.unwitnessed.items():
        by.setdefault(why, []).append(_LOADED[component])
    for why, what in by.items():
        both = f"faults of ckpttool's loader in {list_first(what)}: it loaded both sides"
        yield f"{both}, since {escape_unprintable(why)}"
    if reference.loaders and not reference.unwitnessed and set(reference.loaders.values()) == {"ckpttool"}:
        yield "faults of ckpttool's loader: it loaded both sides, as asked"


def _not_run(reference: Trace | None) -> Iterator[str]:
    """Yield sentences about the parts of a job's own program that took no part, where it was trained from its start."""
    if reference is not None and reference.layout == LIVE:
        yield (
            "the job's own training loop, the order in which its data loader gives rows, and its code that loads a "
            "checkpoint: only what build() returns took part"
        )
        if not reference.roundtrip.get("own"):
            yield "the job's own code that saves a checkpoint: build() returns no save, so dcp.save wrote it"


def _switched_off(got: Trace) -> Iterator[str]:
    """Yield sentences about the randomness of the forward pass that did not take part."""
    if got.dropout_off:
        yield f"dropout (probability up to {got.dropout_off:g}): it was switched off"
    if got.environment.get("random") == "seeded":
        yield (
            "the random numbers that the forward pass draws: they were seeded, and not continued from the checkpoint's"
        )


def _own_loading(got: Trace) -> Iterator[str]:
    """Yield a sentence about the job's own code that loads state, which did not run."""
    if functions := got.environment.get("own_loading"):
        yield (
            "loading code of the job's own classes, which did not run, since ckpttool fills tensors in place: "
            f"{escape_unprintable(list_first(functions, 8))}"
        )


def _copies_not_saved(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield a sentence about the tensors whose copies a save and a load cannot vouch for."""
    live = [n for n in reference.variants if n in got.state] if reference and reference.layout == LIVE else []
    if apart := live or got.roundtrip.get("apart"):
        yield (
            f"whether a save keeps every rank's own copy of {count_noun(len(apart), 'tensor')}, first "
            f"{escape_unprintable(apart[0])}: torch saves one copy"
        )


def _idle_scheduler(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield a sentence that the scheduler was not seen at work, and where the learning rates come from, if so."""
    waits = bool(got.environment.get("scheduler_waits"))
    if waits or (
        got.scheduler is None and any(side_state_of(t, "scheduler") for t in (got, reference) if t is not None)
    ):
        recorded = reference is not None and is_recording(reference)
        rates = (
            "the later learning rates are the reference's" if recorded else "the learning rate stays the checkpoint's"
        )
        why = f"{escape_unprintable(got.scheduler, 40)} needs a metric for a step" if waits else "the job has none"
        yield f"the scheduler at work: {why}, so {rates}"


def _perhaps_lost(reference: Trace | None, got: Trace, checks: Sequence[Check]) -> Iterator[str]:
    """Yield sentences about what the checkpoint holds none of, where a recording does not tell whether its job's
    checkpoint did."""
    if reference is None or not is_recording(reference):
        return
    if reference.generators and not side_state_of(got, "rng"):
        yield from (
            _one_line(c.name, c.text) for c in checks if c.name == "config.rng" and c.verdict == "not comparable"
        )
    if not side_state_of(got, "trainer") and not compare_side_state(reference, got, "trainer").missing:
        yield (
            "counters of the trainer, such as step and epoch: the checkpoint holds none (HF Trainer keeps them in "
            "trainer_state.json), and the reference did not record those of its step"
        )


def _unused_state(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield sentences about what the checkpoint holds and this job does not use, so that at most the stored values were
    compared."""
    held = {c: what for c, what in _BESIDE.items() if side_state_of(got, c)}
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


def _unread_files(got: Trace) -> Iterator[str]:
    """Yield a sentence about the files beside the checkpoint that were not read, if there are any."""
    if got.unread:
        yield (
            "files beside the checkpoint that were not read: "
            f"{escape_unprintable(list_first([f'{n} ({what})' for n, what in got.unread]))}"
        )


def _partly_compared(reference: Trace | None, got: Trace) -> Iterator[str]:
    """Yield sentences about tensors, keys of the configuration and options of param groups that were left out of
    comparisons."""
    if got.stored:
        tied = {n for group in got.tied for n in group}
        rest = [n for n in got.state if n not in got.stored and fqn_of(n) not in tied]
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
        and (keys := ignored_config_keys(reference.config, got.config))
    ):
        what = escape_unprintable(list_first(keys))
        yield f"keys of the model's configuration that only one version of transformers writes: {what}"
    if keys := inputs_of_one_side(reference, got):
        yield f"what only one side has of the samples, so compared with nothing: {escape_unprintable(list_first(keys))}"
    if keys := lost_options(reference, got)[1]:
        yield (
            f"options of param groups that checkpoints of layout {got.layout} do not hold, so that the job's own were "
            f"used: {escape_unprintable(list_first(keys))}"
        )
    if keys := ignored_options(reference, got):
        yield f"options of param groups that only one version of torch writes: {escape_unprintable(list_first(keys))}"


def _checks_not_judged(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence for each reason why checks could not be judged, with their names."""
    by: dict[str, list[str]] = {}
    for c in checks:
        if c.verdict == "not comparable":
            by.setdefault(c.text, []).append(c.name)
    for why, names in by.items():
        yield _one_line(list_first(names), why)


def _one_line(names: str, why: str) -> str:
    """Return names and a reason as one printable line."""
    return f"{escape_unprintable(names)}: {escape_unprintable(why, 80)}"
