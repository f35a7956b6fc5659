"""LLaMA-Factory v1's checkpoint-{step}/ as one state.

    metadata.json               {"global_step", "epoch", "num_training_steps"}; written first
    model/, optimizer/          FSDP2: folders of dcp, whose root is the state dict
    model/, optimizer/state_dict.pt
                                DDP and one GPU: a folder of save_pretrained, or pytorch_model.bin, which is loaded
                                too; and an optimizer with numbers
    scheduler.pt
    dataloader/rank_{rank}.pt   {"buffer", "data_provider"}, the rank's own
    rng_state/rank_{rank}.pt    {"python", "numpy", "torch", "accelerator"}
    hf_model/                   the weights once more, if the job exports them
    CHECKPOINT_COMPLETE         empty; written last. The program resumes from no folder without it, and deletes it

With DeepSpeed the folder is what Accelerate writes, and is read as that.

Source: src/llamafactory/v1/core/utils/checkpoint.py and plugins/trainer_plugins/distributed/{fsdp2,deepspeed}.py of
github.com/hiyouga/LLaMA-Factory, August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpttool import bounded_json, layouts
from ckpttool.errors import CkpttoolError
from ckpttool.program import Advice, ForTrainer, Half, Program, SeenFolder, Unfinished
from ckpttool.storage.source import Source

from ..options import DirectoryOptions
from .dialect import DATA, Dialect, DirectoryPart
from .filenames import match_numbered_names

__all__ = ["LLAMA_FACTORY"]

_COUNTERS, _COMPLETE = "metadata.json", "CHECKPOINT_COMPLETE"
_BIN, _OPTIMIZER = "model/pytorch_model.bin", "optimizer/state_dict.pt"
_RANK = r"rank_(\d{1,6})\.pt"
#: {what LLaMA-Factory calls a part of a rank's RNG state: its canonical name}
_RNG_KEYS = {"torch": "cpu", "accelerator": "cuda"}
_NOT_ENDED = f"no {_COMPLETE}, which LLaMA-Factory writes last"


def _has_counters(source: Source) -> bool:
    """Return whether a folder has metadata.json with the counters of LLaMA-Factory."""
    if not source.exists(_COUNTERS) or source.size(_COUNTERS) > 1 << 16:
        return False
    try:
        tree = bounded_json.parse(source.read_all(_COUNTERS, 1 << 16), _COUNTERS)
    except CkpttoolError:
        return False
    return isinstance(tree, dict) and {"global_step", "epoch"} <= tree.keys()


def _detect_model_layout(source: Source) -> str | None:
    """Return the layout of model/: "dcp", "hf", or "full" for one file of torch.save; None if it has no weights."""
    names = source.list("model")
    if ".metadata" in names:
        return "dcp"
    if any(n.endswith(".safetensors") for n in names):
        return "hf"
    return "full" if _BIN.partition("/")[2] in names else None


def _detect(source: Source) -> tuple[bool, str]:
    """Return whether a folder has weights in model/ and LLaMA-Factory's counters in metadata.json, and the reason as
    text."""
    names = source.list()
    if _COUNTERS not in names or "model" not in names or "latest" in names:
        return False, f"no {_COUNTERS} beside model/"
    if _detect_model_layout(source) is None or not (_COMPLETE in names or _has_counters(source)):
        return False, f"model/ without weights, or a {_COUNTERS} of something else"
    return True, f"has model/ and {_COUNTERS} with global_step"


def _list_rank_files(source: Source, folder: str) -> list[tuple[str, int]]:
    """List (file, rank) of the files rank_N.pt in a folder, by rank; names are relative to the directory. Empty if
    there is no such folder."""
    if not source.glance(folder)[0]:
        return []
    return [(f"{folder}/{n}", rank) for n, rank in match_numbered_names(source.list(folder), _RANK)]


def _list_parts(source: Source) -> Sequence[DirectoryPart]:
    """List the parts: weights, optimizer, scheduler, counters, and the files of ranks."""
    names = source.list()
    layout = _detect_model_layout(source) or "dcp"
    out = [DirectoryPart(_BIN if layout == "full" else "model", layout, "model")]
    if any(n == ".metadata" or n.endswith(".distcp") for n in source.list("optimizer")):
        out.append(DirectoryPart("optimizer", "dcp", "optim"))
    elif source.exists(_OPTIMIZER):
        out.append(DirectoryPart(_OPTIMIZER, "full", "optim", optional=True))
    if "scheduler.pt" in names:
        out.append(DirectoryPart("scheduler.pt", DATA, "scheduler"))
    out.append(DirectoryPart(_COUNTERS, DATA, "trainer"))
    out += [DirectoryPart(n, DATA, "rng", (str(r),), _RNG_KEYS) for n, r in _list_rank_files(source, "rng_state")]
    out += [DirectoryPart(n, DATA, "dataloader", (str(r),)) for n, r in _list_rank_files(source, "dataloader")]
    return out


def _list_notes(source: Source) -> Sequence[str]:
    """Return notes if the save did not finish, or if the RNG or data loader file of a rank is missing; otherwise an
    empty list."""
    out = [] if source.exists(_COMPLETE) else [f"{_NOT_ENDED}: the save had not ended, and no job resumes from it"]
    ranks = [{r for _, r in _list_rank_files(source, folder)} for folder in ("rng_state", "dataloader")]
    world = max((r + 1 for r in set.union(*ranks)), default=0)
    for folder, found in zip(("rng_state", "dataloader"), ranks, strict=True):
        if lost := sorted(set(range(world)) - found):
            out.append(f"no {folder}/rank_{lost[0]}.pt: LLaMA-Factory resumes without it, with a warning")
    return out


def _describe_next_step(advice: Advice) -> str:
    """Return advice on how LLaMA-Factory resumes from the directory: with FSDP2, without FSDP, or not at all if the
    save did not finish."""
    model, again = advice.export_advice(), advice.convert("--for llamafactory -n RANKS")
    if any(n.startswith(_NOT_ENDED) for n in advice.ckpt.notes):
        return f"LLaMA-Factory does not resume from it; if it is whole all the same: {again} ({model})"
    if _OPTIMIZER in advice.ckpt.files:
        return f"resumes in LLaMA-Factory without FSDP; for a job with FSDP2: {again} ({model})"
    return f"resumes at any world size in LLaMA-Factory with FSDP2; nothing to convert ({model})"


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: a folder checkpoint-N has LLaMA-Factory's counters and no
    CHECKPOINT_COMPLETE. None otherwise."""
    if not re.fullmatch(r"checkpoint-\d+", folder.name) or "trainer_state.json" in folder.names:
        return None
    if _COMPLETE in folder.names or _COUNTERS not in folder.names or not _has_counters(folder.source):
        return None
    return Unfinished(_NOT_ENDED, "llamafactory")


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[LLaMA-Factory v1](docs/how-to/trainers/llamafactory.md) (**llamafactory**)",
            "`checkpoint-N`: FSDP2, DDP",
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**llamafactory**",
            (
                "LLaMA-Factory v1's `checkpoint-N`: `model/` and `optimizer/` (DCP; without FSDP safetensors and "
                "`state_dict.pt`), `rng_state/`, `dataloader/`"
            ),
            "what it resumes from, with FSDP2 or, with `--state-dict-type ddp`, without",
        ),
    ),
    "directories": (
        (
            "LLaMA-Factory v1's `checkpoint-N`: FSDP2, DDP, one GPU",
            "`llamafactory`",
            "weights, optimizer, scheduler, counters, RNG and data loader of every rank",
        ),
    ),
    "for": (
        (
            "`model/`, `optimizer/`, `scheduler.pt`, `metadata.json`, `rng_state/`, `CHECKPOINT_COMPLETE`",
            "`resume_from_checkpoint: DIR` of LLaMA-Factory v1",
        ),
    ),
    "resumed": (
        (
            "LLaMA-Factory v1: FSDP2, DDP",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "of the ranks that the source has",
            "of the same ranks",
        ),
    ),
}
LLAMA_FACTORY = Dialect(
    name="llamafactory",
    title="LLaMA-Factory v1",
    detect=_detect,
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_llamafactory"),
    options=DirectoryOptions,
    parts=_list_parts,
    notes=_list_notes,
    aliases=("llama-factory",),
    world_size=lambda source: max(
        (r + 1 for folder in ("rng_state", "dataloader") for _, r in _list_rank_files(source, folder)), default=None
    ),
    program=Program(
        rows=_ROWS,
        next_step=_describe_next_step,
        halves=(Half("model", belongs=lambda above, names, name: _COUNTERS in names),),
        part_folders="model|optimizer|dataloader|rng_state",
        is_part=lambda name, beside: name in ("optimizer", "hf_model") and _COUNTERS in beside,
        unfinished=_find_unfinished_save,
        resumed_by=(ForTrainer("llamafactory", "LLaMA-Factory v1"),),
        saves_every_rng=True,
    ),
)
