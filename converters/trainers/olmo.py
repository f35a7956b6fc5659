"""OLMo-core's step folders as one state.

    step1000/model_and_optim/        a folder of dcp, {"model", "optim": flattened by parameter}, whose index names
                                     places with OLMo-core's own class (dcp/dcp_metadata.py)
    step1000/train/rank{r}.pt        each rank's {"global_step", "epoch", "data_loader", "callbacks", "rng", ...}
    step1000/.metadata.json          {"ephemeral", "version"}; written last, so a folder without it was not finished
    step1000/config.json             the experiment's own config, if its callback saves it: no config of transformers

All ranks save the same counters, so what rank 0 says counts, the RNG state is each rank's own, and anything else in
which a rank differs is kept as extra.per_rank.<rank>.<key>. A rank without a file resumes from rank 0's.

Sources: olmo_core/train/checkpoint.py (save, _save_train_state, dir_is_checkpoint), train/trainer.py (state_dict),
distributed/checkpoint/filesystem.py of ai2-olmo-core 3.0.0; fixtures/olmo_jobs.py.
"""

from __future__ import annotations

from ckpttool.program import Advice, Half, Program, SeenFolder, StateFile, Unfinished
from ckpttool.storage.source import Source

from .dialect import DATA, Dialect, DirectoryPart
from .filenames import match_numbered_names

__all__ = ["OLMO"]

_MODEL, _TRAIN, _LAST = "model_and_optim", "train", ".metadata.json"


def _is_olmo(source: Source) -> tuple[bool, str]:
    """Return whether a folder has model_and_optim/ in dcp, and .metadata.json or train/ of OLMo-core; and the reason as
    text."""
    names = source.list()
    if _MODEL not in names or ".metadata" not in source.list(_MODEL):
        return False, f"no {_MODEL}/.metadata"
    if _LAST in names or _TRAIN in names:
        return True, f"has {_MODEL}/ and {_LAST if _LAST in names else _TRAIN + '/'}"
    return False, f"{_MODEL}/, but no {_LAST} and no {_TRAIN}/"


def _list_rank_files(source: Source) -> list[tuple[str, int]]:
    """List (name in train/, rank) of the files that the ranks saved, by rank."""
    return list(match_numbered_names(source.list(_TRAIN), r"rank(\d{1,6})\.pt"))


def _list_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the folder of dcp, and the file of each rank."""
    out = [DirectoryPart(_MODEL, "dcp", "model", whole=True)]
    for i, (name, rank) in enumerate(_list_rank_files(source)):
        places = {"rng": ("rng", str(rank)), "data_loader": ("dataloader",)}
        out.append(DirectoryPart(f"{_TRAIN}/{name}", DATA, "trainer", places=places, rank=str(rank) if i else ""))
    return out


def _list_notes(source: Source) -> list[str]:
    """Return notes if the save did not finish, or if the file of a rank is missing; otherwise an empty list."""
    out = []
    if not source.exists(_LAST):
        out.append(
            f"no {_LAST}, which OLMo-core writes last: the save had not ended, and OLMo-core does not resume from it"
        )
    ranks = {rank for _, rank in _list_rank_files(source)}
    if lost := sorted(set(range(max(ranks, default=0))) - ranks):
        out.append(f"no {_TRAIN}/rank{lost[0]}.pt: OLMo-core gives that rank the counters of rank 0")
    return out


def _describe_next_step(advice: Advice) -> str:
    """Return advice: OLMo-core resumes at any world size; and the command that converts the checkpoint to dcp."""
    own = advice.convert("--to dcp -n RANKS")
    return f"resumes at any world size in OLMo-core; nothing to convert (for torch's own: {own})"


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: a folder has model_and_optim/ and no .metadata.json. None
    otherwise."""
    if _MODEL in folder.names and _LAST not in folder.names:
        return Unfinished(f"no {_LAST}, which OLMo-core writes last")
    return None


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[OLMo-core](docs/how-to/trainers/olmo.md) (**olmo**)",
            "`stepN`",
            "yes",
            "none saved",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**olmo**",
            (
                "OLMo-core's `stepN`: `model_and_optim/` (DCP, with OLMo-core's own class in its index), "
                "`train/rankR.pt`"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "OLMo-core's `stepN`",
            "`olmo`",
            "weights, optimizer, counters, callbacks and data loader once, RNG of every rank",
        ),
    ),
    "resumed": (
        (
            "OLMo-core",
            "yes",
            "not written; its own resumes at any world size",
            "yes",
            "a function of the step",
            "of every rank",
            "yes",
        ),
    ),
}
OLMO = Dialect(
    name="olmo",
    title="OLMo-core",
    detect=_is_olmo,
    parts=_list_parts,
    notes=_list_notes,
    aliases=("olmo-core",),
    world_size=lambda source: max((rank + 1 for _, rank in _list_rank_files(source)), default=None),
    program=Program(
        rows=_ROWS,
        next_step=_describe_next_step,
        halves=(Half(_MODEL, StateFile(f"{_TRAIN}/", "training progress and RNG", "trainer")),),
        part_folders=f"{_MODEL}|{_TRAIN}",
        is_part=lambda name, beside: name == _TRAIN and _MODEL in beside,
        unfinished=_find_unfinished_save,
    ),
)
