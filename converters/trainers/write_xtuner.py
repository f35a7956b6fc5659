"""Writes the checkpoint that a Trainer of xtuner v1 loads; reinforcement.py describes its files."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.index.checkpoint import Checkpoint, Path, joined
from ckpttool.index.draft import Draft
from ckpttool.index.schedulers import explain_missing_scheduler
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from ..dcp.write_dcp import write as write_dcp
from .join import SmallFile, add_missing_options, collect_left_over_state, draft_small_files, join_drafts
from .write_directories import (
    count_steps,
    describe_other_schedulers,
    make_scheduler_file,
    refuse_missing_weights,
    refuse_unfit_optimizer,
    select_leaves_below,
    strip_paths,
)

__all__ = ["write"]

#: What its Dataloader asks a state for.
_LOADER = frozenset(("sampler", "dataset", "total_consumed_samples"))


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft the checkpoint of xtuner v1. A job of any world size loads its dcp folder.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: there are no weights, or several optimizers.
    """
    refuse_unfit_optimizer(ckpt, "xtuner")
    refuse_missing_weights(ckpt, "xtuner asks for them")
    world, placed = options.ranks(ckpt), set[Path]()
    ckpt, groups, notes = add_missing_options(ckpt)
    weights = replace(ckpt.only(("model", "optim")), origin={}, ranks={}, notes=[])
    draft = write_dcp(weights, source, replace(options, target="weights", own=None, tree=_to_xtuner_tree))

    # the files beside the weights, without which a Trainer stops unless it is told not to load them
    small: list[SmallFile] = []
    loader = select_leaves_below(ckpt, "dataloader")
    if {p[1] for p in loader} >= _LOADER:
        small.append(SmallFile("dataloader", strip_paths(loader, 1)))
        placed |= loader.keys()
    else:
        notes.append("the source has no data loader of xtuner's: load with LoadCheckpointConfig(load_dataset=False)")
    small += (scheduler := make_scheduler_file(ckpt, placed, "lr_scheduler"))
    if not scheduler:
        notes.append(f"{explain_missing_scheduler(ckpt)}: load with LoadCheckpointConfig(load_scheduler=False)")
    epoch = ckpt.value("trainer.epoch")
    counters = {
        "cur_step": count_steps(ckpt, source),
        "cur_epoch": int(epoch) if isinstance(epoch, (int, float)) and 0 <= epoch < 1 << 53 else 0,
        "total_consumed_tokens": 0,
        "train_time_offset": 0.0,
    }
    own = {n: ckpt.value(f"trainer.{n}") for n in counters}
    counters |= {n: x for n, x in own.items() if type(x) in (int, float)}
    placed |= {("trainer", n) for n, x in counters.items() if own[n] is not None and own[n] == x}
    rest, kept = collect_left_over_state(ckpt, placed)
    state = SmallFile("train_state.json", {(n,): x for n, x in counters.items()})
    files = draft_small_files(ckpt, [*rest, *small, state], options)

    out = join_drafts("xtuner", ckpt, [("weights/", draft), ("", files)], options, world)
    out.notes += [*describe_other_schedulers(ckpt, own=True), *notes, *kept]
    made = {("trainer", n): x for n, x in counters.items() if own[n] is None}
    out.synthesized_values |= groups | {joined(p): x for p, x in made.items()}
    return out


def _to_xtuner_tree(leaves: dict[Path, object]) -> dict[Path, object]:
    """Return {path in xtuner's state dict: leaf} of {canonical path: leaf}."""
    return {(("optimizer", *p[1:]) if p[0] == "optim" else p): leaf for p, leaf in leaves.items()}
