"""A training script's own folder: the weights in one file or folder, the optimizer in another.

    model.pt  weights.pth  pytorch_model.bin  model.safetensors  model/        one of them; a folder is one of dcp
    optimizer.pt  optim.bin  optimizer_state_dict.pth  optimizer/              one of them
    scheduler.pt  scaler.pt  rng_state.pt  dataloader.pt  train_state.pt       and others that say by their name what
                  they hold
    rng_state/rank_{r}.pt  dataloader/rank_{r}.pt                              the same of each rank
    .metadata, __{rank}_{n}.distcp with dataloader/rank_{r}.pt                 script_dcp: a folder of dcp

Everything goes by names that scripts use. Where there are two files of weights or of an
optimizer, which of them belong together nobody knows, and it is no checkpoint. An optimizer that numbers its parameters
where nothing tells their order is listed as a file that was not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckpttool.engine.recorded import RECORD
from ckpttool.program import Advice, Half, Program
from ckpttool.storage.source import Source

from .automodel import AUTOMODEL, TRANSFORMERS
from .dialect import DATA, Dialect, DirectoryPart
from .filenames import (
    RANDOM_STATES,
    RNG_STATE,
    has_rank_loaders,
    list_model_parts,
    match_numbered_names,
    refuse_missing_shards,
)
from .llamafactory import LLAMA_FACTORY
from .reinforcement import PRIME_RL

__all__ = ["SCRIPT", "SCRIPT_DCP"]

_END = r"(?:_state(?:_dict)?|_states)?"
_FILE = r"\.(?:pt|pth|bin|ckpt)"
_WEIGHTS = re.compile(rf"(?:model|net|weights|model_weights){_END}(?:{_FILE}|\.safetensors)")
_OPTIMIZER = re.compile(rf"(?:optimizer|optim|opt){_END}{_FILE}")
_FOLDERS = (re.compile(r"model|weights"), re.compile(rf"(?:optimizer|optim){_END}"))
_REST = (
    (re.compile(rf"(?:lr_)?sched(?:uler)?{_END}{_FILE}"), "scheduler"),
    (re.compile(rf"(?:grad_)?scaler{_END}{_FILE}"), "scaler"),
    (re.compile(rf"(?:rng|random){_END}{_FILE}"), "rng"),
    (re.compile(rf"(?:train_)?(?:dataloader|sampler){_END}{_FILE}"), "dataloader"),
    (re.compile(rf"(?:train|trainer|training){_END}(?:{_FILE}|\.json)|(?:step|progress){_FILE}"), "trainer"),
    (re.compile(rf"extra{_END}{_FILE}"), "extra"),
)
_OF_RANKS = {"rng_state": "rng", "rng_states": "rng", "dataloader": "dataloader", "dataloaders": "dataloader"}
_OF_RANK = r"rank_?(\d{1,6})\.(?:pt|pth|bin)"


def _list_weight_parts(source: Source, names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold weights: files, or a dcp folder. `names` are the names in the directory."""
    if found := [p for p in list_model_parts(names) if p.layout in ("hf", "full") and "fsdp" not in p.name]:
        return [DirectoryPart(p.name, p.layout, "model") for p in found]
    files = [n for n in names if _WEIGHTS.fullmatch(n)]
    folders = _iterate_dcp_folders(source, names, 0)
    return [DirectoryPart(n, "hf" if n.endswith(".safetensors") else "full", "model") for n in files] + [
        DirectoryPart(n, "dcp", "model") for n in folders
    ]


def _list_optimizer_parts(source: Source, names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold an optimizer: files, and dcp folders. `names` are the names in the directory."""
    files = [DirectoryPart(n, "full", "optim", optional=True) for n in names if _OPTIMIZER.fullmatch(n)]
    return files + [DirectoryPart(n, "dcp", "optim", optional=True) for n in _iterate_dcp_folders(source, names, 1)]


def _iterate_dcp_folders(source: Source, names: Sequence[str], which: int) -> Iterator[str]:
    """Yield the dcp folders among the names in a directory: those named for weights (`which` is 0) or for an optimizer
    (`which` is 1)."""
    return (n for n in names if _FOLDERS[which].fullmatch(n) and ".metadata" in source.list(n))


def _detect(source: Source) -> tuple[bool, str]:
    """Return whether a folder has exactly one model and one optimizer, under names that training scripts use, and no
    file of another layout; and the reason as text."""
    names = source.list()
    other = next((n for n in names if n in (".metadata", "latest", "trainer_state.json", "meta.pt", RECORD)), None)
    other = other or next(
        (
            n
            for n, _ in (
                *match_numbered_names(names, RANDOM_STATES),
                *match_numbered_names(names, r"(?:.*[._-])?rank[_-]?(\d+)\..*"),
            )
        ),
        None,
    )
    if other is not None:
        return False, f"has {other}, of another layout"
    if re.fullmatch(r"checkpoint-\d+", source.root.rstrip("/").rpartition("/")[2]):
        return False, "named as those of Trainer, and has no trainer_state.json"
    weights, optimizers = _list_weight_parts(source, names), _list_optimizer_parts(source, names)
    if weights and optimizers and any(d.detect(source)[0] for d in (AUTOMODEL, TRANSFORMERS, LLAMA_FACTORY)):
        return False, "of another trainer"
    whole = (
        {p.name for p in weights}
        if len({p.name for p in weights}) == 1
        else {re.sub(r"\d", "", p.name) for p in weights}
    )
    if len(whole) != 1 or len(optimizers) != 1:
        return False, "no weights and optimizer under names that scripts use (model.pt and optimizer.pt)"
    return True, f"has {weights[0].name or 'shards of a model'} and {optimizers[0].name}"


def _list_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, optimizer, files of ranks, and small files known by their names.

    Raises:
        Corrupt: a shard of the weights is missing.
    """
    refuse_missing_shards(source)
    names = source.list()
    out = [*_list_weight_parts(source, names), *_list_optimizer_parts(source, names)]
    ranks = [n for n, _ in match_numbered_names(names, RNG_STATE) if re.search(r"\d", n)]
    out += [DirectoryPart(n, DATA, "rng", (re.sub(r"\D", "", n),)) for n in ranks]
    for folder, component in _OF_RANKS.items():
        of_ranks = (
            match_numbered_names(source.list(folder), _OF_RANK) if folder in names and source.glance(folder)[0] else ()
        )
        out += [DirectoryPart(f"{folder}/{n}", DATA, component, (str(rank),)) for n, rank in of_ranks]
    for pattern, component in _REST:
        found = [n for n in names if pattern.fullmatch(n) and n not in ranks]
        for name in found:
            under = (name.partition(".")[0],) if len(found) > 1 or component == "extra" else ()
            out.append(DirectoryPart(name, DATA, component, under))
    return out


def _describe_next_step(advice: Advice) -> str:
    """Return advice: the commands that convert the folder for a job of several ranks, and for transformers."""
    job, model = advice.convert("--to dcp -n RANKS"), advice.convert("--to hf")
    return f"for a job of several ranks: {job}; for transformers: {model}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "layouts": (
        (
            "**script**",
            (
                "a folder with one file of weights (`model.pt`, `weights.pth`, `model.safetensors`, ...) or DCP "
                "folder `model/`, and one of the optimizer (`optimizer.pt`, `optim/`, ...); `scheduler.pt`, "
                "`scaler.pt`, `rng_state.pt`, `dataloader.pt`, `train_state.pt`, `extra.pt` beside them, "
                "`rng_state/` and `dataloader/` with a file of each rank"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "a script's own folder: `model.pt` and `optimizer.pt`, or the DCP folders `model/` and `optim/`",
            "`script`",
            "weights, optimizer, and scheduler, scaler, RNG, data loader, counters under names that scripts use",
        ),
    ),
}
SCRIPT = Dialect(
    name="script",
    title="a training script",
    detect=_detect,
    parts=_list_parts,
    program=Program(
        rows=_ROWS,
        next_step=_describe_next_step,
        halves=(
            Half("model|weights", belongs=lambda above, names, name: not {"optim", "optimizer"}.isdisjoint(names)),
        ),
        part_folders="model|weights|optim(izer)?",
    ),
)


def _is_script_dcp(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a dcp folder with dataloader/rank_{r}.pt in it, and not one of a known trainer; and
    the reason as text."""
    names = source.list()
    if ".metadata" not in names or not has_rank_loaders(source):
        return False, "no .metadata beside dataloader/rank_0.pt"
    if "extra_state" in names or PRIME_RL.detect(source)[0]:
        return False, "of another trainer"
    return True, "has .metadata beside dataloader/rank_0.pt"


SCRIPT_DCP = Dialect(
    name="script_dcp",
    title="a training script",
    detect=_is_script_dcp,
    own_keys=True,
    parts=lambda source: [
        DirectoryPart("", "dcp", "model", whole=True),
        *(
            DirectoryPart(f"dataloader/{n}", DATA, "dataloader", (str(rank),))
            for n, rank in match_numbered_names(source.list("dataloader"), _OF_RANK)
        ),
    ],
    program=Program(
        rows={
            "layouts": (
                ("**script_dcp**", "a DCP folder with `dataloader/rank_R.pt` of each rank inside", "not written"),
            ),
            "directories": (
                (
                    "a DCP folder with `dataloader/rank_R.pt` inside",
                    "`script_dcp`",
                    "what the DCP folder holds, and the data loader of every rank",
                ),
            ),
        },
        next_step=lambda advice: (
            f"resumes in the job that wrote it; at another world size: {advice.convert('--to dcp -n RANKS')}"
        ),
        part_folders="dataloader",
    ),
)
