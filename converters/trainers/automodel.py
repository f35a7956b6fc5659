"""Directories with the weights in one folder and the optimizer in another.

automodel        NeMo AutoModel: epoch_{e}_step_{s}/

    model/                       shards of torch's HuggingFaceStorageWriter, a folder of dcp, or PEFT's
                                 adapter_model.safetensors
    model/consolidated/          the same weights once more, as save_pretrained writes them: for its config.json only
    optim/                       a folder of dcp: {"optim": flattened by parameter, "sched"}
    {name}/{name}_dp_rank_{r}.pt each data-parallel rank's state of the data loader, ...; one {name}.pt in older
    releases
    rng/rng_global_rank_{r}.pt   the RNG of every rank, since 0.7; rng_dp_rank_{r}.pt before
    {name}/                      a folder of dcp: state with shards, such as an EMA
    step_scheduler.pt            {"step", "epoch"}
    .incomplete                  while the save has not ended, since 0.7

transformers     a model that transformers sharded itself, with any names of folders

    {weights}/                   save_pretrained(distributed_checkpoint=True):
                                 shard-0000k-model-00001-of-00001.safetensors, config.json
    {optimizer}/                 save_optimizer_distributed: a folder of dcp, {"optimizer": flattened by parameter}

Sources: nemo_automodel/components/checkpoint/{checkpointing,stateful_wrappers}.py, docs/guides/checkpointing.md;
transformers/distributed/checkpoint.py of 5.23; fixtures/transformers_jobs.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpttool.program import Advice, Program, SeenFolder, Unfinished
from ckpttool.storage.source import Source

from .dialect import DATA, Dialect, DirectoryPart
from .filenames import RNG_STATE, rest_in

__all__ = ["AUTOMODEL", "TRANSFORMERS"]

_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_STEP = re.compile(r"epoch_\d+_step_\d+")
_RANK = re.compile(r"(?P<name>\w+?)(?:(?:_dp|_global)?_rank_(?P<rank>\d{1,6}))?\.pt")
_COMPONENTS = {"rng": "rng", "dataloader": "dataloader", "step_scheduler": "trainer"}
_MOST_FOLDERS = 8
_MARKER = ".incomplete"


def _layout_of_weights(source: Source, folder: str) -> str | None:
    """Return the layout of the weights in a folder, "dcp" or "hf"; None where there are none."""
    names = source.list(folder)
    if ".metadata" in names and not any(map(_SHARD.fullmatch, names)):
        return "dcp"
    return "hf" if any(n.endswith(".safetensors") for n in names) else None


# ------------------------------------------------------------------------------------------------------ NeMo AutoModel


def _is_automodel(source: Source) -> tuple[bool, str]:
    """Return whether a folder has weights, an optimizer and what else AutoModel writes, or the name that it gives; and,
    as text, why or why not."""
    names = source.list()
    if "model" not in names or "optim" not in names:
        return False, "no model/ and optim/"
    if ".metadata" not in source.list("optim") or _layout_of_weights(source, "model") is None:
        return False, "model/ and optim/, but no weights in one or no .metadata in the other"
    found = next((n for n in names if n in ("step_scheduler.pt", "rng", "dataloader", "losses.json")), None)
    name = source.root.rstrip("/").rpartition("/")[2]
    if found is None and not _STEP.fullmatch(name):
        return False, "model/ and optim/, but no step_scheduler.pt and not named epoch_<n>_step_<n>"
    return True, f"has model/, optim/ and {found or 'the name of a step'}"


def _automodel_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, optimizer, other folders of dcp, and the files of ranks."""
    out = [
        DirectoryPart("model", _layout_of_weights(source, "model") or "hf", "model"),
        DirectoryPart("optim", "dcp", "optim", renamed="base_model.model."),
    ]
    for name in source.list():
        is_folder, _ = source.glance(name)
        if is_folder and name not in ("model", "optim") and ".metadata" in source.list(name):
            out.append(DirectoryPart(name, "dcp", "extra", (name,)))
            continue
        files = [f"{name}/{f}" for f in source.list(name)] if is_folder and name not in ("model", "optim") else [name]
        for file in files:
            m = _RANK.fullmatch(file.rpartition("/")[2])
            if m is None or (is_folder and m["name"] != name):
                continue
            component = _COMPONENTS.get(m["name"], "extra")
            under = (m["name"],) if component == "extra" else ()
            rank = (m["rank"],) if m["rank"] else ("0",) if component == "rng" else ()
            out.append(DirectoryPart(file, DATA, component, (*under, *rank)))
    return out


def _automodel_notes(source: Source) -> Sequence[str]:
    """Return a note that the save had not ended; empty where it had."""
    if not source.exists(_MARKER):
        return ()
    return (
        f"has {_MARKER}, which NeMo AutoModel removes at the end of a save: it had not ended, and AutoModel does not "
        "resume from it",
    )


def _automodel_world_size(source: Source) -> int | None:
    """Return the number of ranks that saved their RNG state; None where there are no such files."""
    found = [m for n in source.list("rng") if (m := _RANK.fullmatch(n))]
    return max((int(m["rank"] or 0) + 1 for m in found), default=None)


def _next_step_of_automodel(advice: Advice) -> str:
    """Return a text: AutoModel resumes at the same world size."""
    return f"resumes in NeMo AutoModel at {advice.ranks}; for torch's own: {advice.convert('--to dcp -n RANKS')}"


def _unfinished(folder: SeenFolder) -> Unfinished | None:
    """Return what shows that a save did not end: a folder, known as of some layout, has AutoModel's marker. None where
    nothing does."""
    if folder.layout is not None and not folder.is_temporary and _MARKER in folder.names:
        return Unfinished(f"has {_MARKER}: the save did not finish")
    return None


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_AUTOMODEL = {
    "readme-trainers": (
        (
            "[NeMo AutoModel](docs/how-to/trainers/automodel.md) (**automodel**)",
            "`epoch_E_step_S`, PEFT",
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**automodel**",
            (
                "NeMo AutoModel's `epoch_E_step_S`: `model/` (shards of torch's writer, DCP, or PEFT's adapter), "
                "`optim/`, RNG and data loader of every rank, `step_scheduler.pt`"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "NeMo AutoModel's `epoch_E_step_S`",
            "`automodel`",
            (
                "weights or adapter, optimizer, scheduler, RNG and data loader of every rank, step; not "
                "`model/consolidated`, which is the weights again"
            ),
        ),
    ),
    "resumed": (
        (
            "NeMo AutoModel",
            "yes; the format of its files, AutoModel itself was not run",
            "not written",
            "yes",
            "yes",
            "of every rank",
            "read",
        ),
    ),
}
AUTOMODEL = Dialect(
    name="automodel",
    title="NeMo AutoModel",
    detect=_is_automodel,
    parts=_automodel_parts,
    world_size=_automodel_world_size,
    notes=_automodel_notes,
    aliases=("nemo-automodel",),
    program=Program(rows=_ROWS_OF_AUTOMODEL, next_step=_next_step_of_automodel, unfinished=_unfinished),
)

# -------------------------------------------------------------------------------------------------------- transformers


def _find_pair(source: Source) -> tuple[str, str] | None:
    """Return (folder of the weights, folder of the optimizer), "" for the directory itself; None where they are not
    there."""
    names = source.list()
    here = any(map(_SHARD.fullmatch, names))
    if here and ".metadata" in names:
        return "", ""
    if not any("optim" in n.lower() for n in names):
        return None
    folders = [n for n in names if not n.startswith(".") and source.glance(n)[0]][: _MOST_FOLDERS + 1]
    if len(folders) > _MOST_FOLDERS:
        return None
    inside = {n: source.list(n) for n in folders}
    optimizers = [n for n in folders if "optim" in n.lower() and ".metadata" in inside[n]]
    weights = [""] if here else [n for n in folders if any(map(_SHARD.fullmatch, inside[n])) and n not in optimizers]
    return (weights[0], optimizers[0]) if len(weights) == len(optimizers) == 1 else None


def _is_transformers(source: Source) -> tuple[bool, str]:
    """Return whether a folder holds shards of a model with the folder of an optimizer beside them, and is of no
    trainer; and, as text, why or why not."""
    names = source.list()
    if "trainer_state.json" in names or _is_automodel(source)[0]:
        return False, "of another trainer"
    found = _find_pair(source)
    if found is None:
        return False, "no shard-*-model-*.safetensors with a folder of an optimizer beside them"
    return True, f"has shards of a model in {found[0] or 'it'}/ and an optimizer in {found[1] or 'it'}/"


def _transformers_parts(source: Source) -> Sequence[DirectoryPart]:
    """List the parts: weights, optimizer, and small files beside them."""
    weights, optimizer = _find_pair(source) or ("", "")
    return [
        DirectoryPart(weights, "hf", "model"),
        DirectoryPart(optimizer, "dcp", "optim"),
        *rest_in(source.list(), RNG_STATE),
    ]


def _next_step_of_transformers(advice: Advice) -> str:
    """Return a text on which two calls of transformers load the folder. `advice` is not used."""
    return (
        "resumes at any world size with from_pretrained(distributed_config=...) and load_optimizer_distributed; "
        "nothing to convert"
    )


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_TRANSFORMERS = {
    "readme-trainers": (
        (
            "[transformers](docs/how-to/trainers/transformers.md) (**transformers_sharded**)",
            "weights and optimizer folders",
            "yes",
            "none saved",
            "none saved",
            "none saved",
        ),
    ),
    "layouts": (
        (
            "**transformers_sharded**",
            (
                "a folder with the shards of `save_pretrained(distributed_checkpoint=True)` and the DCP folder of "
                "`save_optimizer_distributed`, in it or each in a folder of its own"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            (
                "transformers' own sharded save: the folders of `save_pretrained(distributed_checkpoint=True)` and "
                "`save_optimizer_distributed` in one folder"
            ),
            "`transformers_sharded`",
            "weights and optimizer, and `scheduler.pt`, `rng_state*.pth` beside them",
        ),
    ),
    "resumed": (
        (
            "transformers, `distributed_checkpoint=True`",
            "yes",
            "not written; its own resumes at any world size",
            "yes",
            "if your loop saves it",
            "if your loop saves it",
            "if your loop saves it",
        ),
    ),
}
TRANSFORMERS = Dialect(
    name="transformers_sharded",
    title="transformers, distributed_checkpoint=True",
    detect=_is_transformers,
    parts=_transformers_parts,
    aliases=("transformers-sharded",),
    program=Program(rows=_ROWS_OF_TRANSFORMERS, next_step=_next_step_of_transformers),
)
