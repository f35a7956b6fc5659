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

from .dialect import DATA, Dialect, DirectoryPart, make_resume_advice
from .filenames import RNG_STATE, list_other_parts

__all__ = ["AUTOMODEL", "TRANSFORMERS"]

_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_STEP = re.compile(r"epoch_\d+_step_\d+")
_RANK = re.compile(r"(?P<name>\w+?)(?:(?:_dp|_global)?_rank_(?P<rank>\d{1,6}))?\.pt")
_COMPONENTS = {"rng": "rng", "dataloader": "dataloader", "step_scheduler": "trainer"}
_MOST_FOLDERS = 8
_MARKER = ".incomplete"


def _detect_weights_layout(source: Source, folder: str) -> str | None:
    """Return the layout of the weights in a folder, "dcp" or "hf"; None where there are none."""
    names = source.list(folder)
    if ".metadata" in names and not any(map(_SHARD.fullmatch, names)):
        return "dcp"
    return "hf" if any(n.endswith(".safetensors") for n in names) else None


# ------------------------------------------------------------------------------------------------------ NeMo AutoModel


def _is_automodel(source: Source) -> tuple[bool, str]:
    """Return whether NeMo AutoModel wrote a folder, and the reason as text. It did if the folder has model/ with
    weights and optim/, and either another file of AutoModel or a name epoch_<n>_step_<n>."""
    names = source.list()
    if "model" not in names or "optim" not in names:
        return False, "no model/ and optim/"
    if ".metadata" not in source.list("optim") or _detect_weights_layout(source, "model") is None:
        return False, "model/ and optim/, but no weights in one or no .metadata in the other"
    found = next((n for n in names if n in ("step_scheduler.pt", "rng", "dataloader", "losses.json")), None)
    name = source.root.rstrip("/").rpartition("/")[2]
    if found is None and not _STEP.fullmatch(name):
        return False, "model/ and optim/, but no step_scheduler.pt and not named epoch_<n>_step_<n>"
    return True, f"has model/, optim/ and {found or 'the name of a step'}"


def _list_automodel_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, optimizer, other dcp folders, and the files that each rank saved (RNG, data loader,
    ...)."""
    out = [
        DirectoryPart("model", _detect_weights_layout(source, "model") or "hf", "model"),
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


def _note_unfinished_save(source: Source) -> Sequence[str]:
    """Return one note if the folder has the marker .incomplete, which AutoModel removes at the end of a save; an empty
    sequence otherwise."""
    if not source.exists(_MARKER):
        return ()
    return (
        f"has {_MARKER}, which NeMo AutoModel removes at the end of a save: it had not ended, and AutoModel does not "
        "resume from it",
    )


def _count_rng_ranks(source: Source) -> int | None:
    """Return the number of ranks that saved their RNG state; None where there are no such files."""
    found = [m for n in source.list("rng") if (m := _RANK.fullmatch(n))]
    return max((int(m["rank"] or 0) + 1 for m in found), default=None)


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: a folder whose layout is known has AutoModel's marker
    .incomplete. None if there is none."""
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
    parts=_list_automodel_parts,
    world_size=_count_rng_ranks,
    notes=_note_unfinished_save,
    aliases=("nemo-automodel",),
    program=Program(
        rows=_ROWS_OF_AUTOMODEL, next_step=make_resume_advice("NeMo AutoModel", None), unfinished=_find_unfinished_save
    ),
)

# -------------------------------------------------------------------------------------------------------- transformers


def _find_weights_and_optimizer(source: Source) -> tuple[str, str] | None:
    """Return (folder of the weights, folder of the optimizer), relative to the directory, "" for the directory itself;
    None if it does not hold exactly one of each."""
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
    """Return whether a folder has weights as `save_pretrained(distributed_checkpoint=True)` shards them, one dcp folder
    of an optimizer, and no files of another trainer; and the reason as text."""
    names = source.list()
    if "trainer_state.json" in names or _is_automodel(source)[0]:
        return False, "of another trainer"
    found = _find_weights_and_optimizer(source)
    if found is None:
        return False, "no shard-*-model-*.safetensors with a folder of an optimizer beside them"
    return True, f"has shards of a model in {found[0] or 'it'}/ and an optimizer in {found[1] or 'it'}/"


def _list_transformers_parts(source: Source) -> Sequence[DirectoryPart]:
    """List the parts: weights, optimizer, and small files in the directory, as scheduler.pt and RNG states."""
    weights, optimizer = _find_weights_and_optimizer(source) or ("", "")
    return [
        DirectoryPart(weights, "hf", "model"),
        DirectoryPart(optimizer, "dcp", "optim"),
        *list_other_parts(source.list(), RNG_STATE),
    ]


def _describe_transformers_next_step(advice: Advice) -> str:
    """Return advice: the two calls of transformers that load the directory at any world size. `advice` is not used."""
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
    parts=_list_transformers_parts,
    aliases=("transformers-sharded",),
    program=Program(rows=_ROWS_OF_TRANSFORMERS, next_step=_describe_transformers_next_step),
)
