"""VeOmni's global_step_{n}/ as one state, in the layout of release 0.1.12 and in the one after it.

    0.1.12   .metadata, __{rank}_{n}.distcp               a folder of dcp, {"model", "optimizer"}
             extra_state/extra_state_rank_{rank}.pt       {"global_step", "lr_scheduler", "train_dataloader",
                                                          "environ_meter", "channel_loss_callback", "torch_rng_state"}
    later    model/ckpt/, model/optimizer/                folders of dcp; one model: with several they are in
             model/{module}/ model/lr_scheduler.pt loader/rank_{rank}.pt, extra_state/rank_{rank}.pt
             checkpoint_manifest.json                     {"format_version", "global_step", "world_size", "modules"};
                                                          written last
             hf_ckpt/, lora_ckpt/                         exports: the weights again

The data loader and the RNG are each rank's own. Of the rest, what rank 0 says counts, and anything in which a rank
differs is kept as extra.per_rank.<rank>.<key>. Experts have the shape of the whole in the folder of dcp.

Sources: veomni/checkpoint/dcp_checkpointer.py and trainer/callbacks/checkpoint_callback.py of 0.1.12;
veomni/checkpoint/layout.py of github.com/ByteDance-Seed/VeOmni at 7ad95cc.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.errors import Unsupported
from ckpttool.program import Program, SeenFolder
from ckpttool.storage.source import Source

from .dialect import DATA, Dialect, DirectoryPart, make_resume_advice
from .filenames import match_numbered_names

__all__ = ["VEOMNI"]

_STATE, _MANIFEST = "extra_state", "checkpoint_manifest.json"


def _list_rank_files(source: Source, folder: str) -> list[tuple[str, int]]:
    """List (file, rank) of the files that the ranks saved in a folder, by rank; names are relative to the directory."""
    return [
        (f"{folder}/{n}", rank)
        for n, rank in match_numbered_names(source.list(folder), r"(?:extra_state_)?rank_(\d+)\.pt")
    ]


def _is_veomni(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a step of VeOmni, in the layout of 0.1.12 or of later releases; and the reason as
    text."""
    names = source.list()
    if ".metadata" in names and _STATE in names and (found := _list_rank_files(source, _STATE)):
        return True, f"has .metadata and {found[0][0]}"
    if "model" in names and (_MANIFEST in names or _STATE in names):
        inside = source.list("model")
        if "ckpt" in inside and ".metadata" in source.list("model/ckpt"):
            return True, f"has model/ckpt/.metadata and {_MANIFEST if _MANIFEST in names else _STATE + '/'}"
        if _MANIFEST in names and any(".metadata" in source.list(f"model/{m}/ckpt") for m in inside):
            return True, f"has {_MANIFEST} and model/<module>/ckpt/.metadata"
    return False, f"neither .metadata beside {_STATE}/ nor model/ckpt/.metadata beside {_MANIFEST}"


def _list_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: model, optimizer, data loaders, and what else each rank saved.

    Raises:
        Unsupported: the directory holds several models.
    """
    names = source.list()
    if ".metadata" in names:
        out = [DirectoryPart("", "dcp", "model", whole=True)]
    else:
        out = _list_parts_of_later_release(source)
    out += [DirectoryPart(name, DATA, "dataloader", (str(rank),)) for name, rank in _list_rank_files(source, "loader")]
    for i, (name, rank) in enumerate(_list_rank_files(source, _STATE)):
        places = {
            "lr_scheduler": ("scheduler",),
            "train_dataloader": ("dataloader", str(rank)),
            "torch_rng_state": ("rng", str(rank), "cpu"),
        }
        out.append(DirectoryPart(name, DATA, "trainer", places=places, rank=str(rank) if i else ""))
    return out


def _list_parts_of_later_release(source: Source) -> list[DirectoryPart]:
    """List the parts for model, optimizer and scheduler in the layout of releases after 0.1.12.

    Raises:
        Unsupported: the directory holds several models.
    """
    inside = source.list("model")
    if "ckpt" not in inside:
        modules = sorted(m for m in inside if "ckpt" in source.list(f"model/{m}"))
        raise Unsupported(
            f"{source.root} holds {len(modules)} models: {', '.join(modules)}. Convert the folders of one, "
            f"{source.root}/model/{modules[0]}/ckpt and its optimizer.",
            code="CKPT0328",
        )
    out = [DirectoryPart("model/ckpt", "dcp", "model")]
    if "optimizer" in inside and ".metadata" in source.list("model/optimizer"):
        out.append(DirectoryPart("model/optimizer", "dcp", "optim"))
    if "lr_scheduler.pt" in inside:
        out.append(DirectoryPart("model/lr_scheduler.pt", DATA, "scheduler"))
    return out


def _note_unfinished_save(source: Source) -> Sequence[str]:
    """Return one note if the manifest is missing, which VeOmni writes last; otherwise an empty sequence."""
    if ".metadata" in source.list() or source.exists(_MANIFEST):
        return ()
    return (f"no {_MANIFEST}, which VeOmni writes last: the save had not ended, and VeOmni does not resume from it",)


def _find_missing_manifest(folder: SeenFolder) -> Iterator[str]:
    """Yield a text if the manifest, which VeOmni writes last, is missing in a folder with a model."""
    if "model" in folder.names and _MANIFEST not in folder.names:
        yield f"no {_MANIFEST}, which VeOmni writes last"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "VeOmni (**veomni**), AReaL (**dcp**)",
            '`global_step_N`, both layouts; `{"dcp": ...}`',
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**veomni**",
            (
                "VeOmni's `global_step_N`: DCP with `extra_state/` (0.1.12), or `model/ckpt`, `model/optimizer`, "
                "`loader/`, `extra_state/` (later); of one model"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "VeOmni's `global_step_N`, of 0.1.12 and later",
            "`veomni`",
            "weights, optimizer, scheduler, counters and meters once, data loader and RNG of every rank",
        ),
    ),
    "resumed": (
        (
            "VeOmni",
            "yes; the format of its files, VeOmni itself was not run",
            "not written",
            "yes",
            "yes",
            "of every rank",
            "of every rank",
        ),
    ),
}
VEOMNI = Dialect(
    name="veomni",
    title="VeOmni",
    detect=_is_veomni,
    parts=_list_parts,
    notes=_note_unfinished_save,
    world_size=lambda source: len(_list_rank_files(source, _STATE)) or None,
    program=Program(rows=_ROWS, next_step=make_resume_advice("VeOmni", None), gaps=_find_missing_manifest),
)
