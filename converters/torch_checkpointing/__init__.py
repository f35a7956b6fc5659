"""torch_checkpointing: folders of Meta's package of that name, a file an item and rank.

    DIR/metadata.pkl               which part of each tensor every rank has (item_metadata.py); of items with a
                                   resharder only
    DIR/<item>_<rank>.pt           torch.save of the item's value on that rank: state dicts with DTensors or plain
                                   tensors, values
    DIR/<item>_<rank>.safetensors  local tensors, keys joined by dots; the path is in metadata.pkl and may be another
                                   one
    DIR/<item>_<rank>.json         values; any other file <item>_<rank>.<ext> of all ranks is raw bytes
    tmp_DIR/                       a save that has not ended; renamed to DIR at its end

Items are the keys of the payload: model, optimizer, train_state, ... An item without metadata.pkl is read by what its
files say: DTensors know their place. Plain tensors of an item that several ranks saved otherwise may be copies or
parts, and nothing tells.

Written: model and optimizer as plain local tensors, `torch.chunk` along dim 0, described by metadata.pkl, so that
CheckpointManager.load with the package's DefaultResharder takes them at any world size; other items in the file of
every rank, since each rank of a job reads its own. The mesh in metadata.pkl has a dimension named "ckpttool": the
manager compares meshes, and would read the file of a rank as it is where they are equal, but such files hold DTensors,
whose pickles are of one version of torch.

Sources: torch_checkpointing/{checkpoint_writer,checkpoint_reader,checkpoint_layout,default_resharder}.py of 0.1.1, and
fixtures/checkpointing, which it wrote (fixtures/checkpointing_jobs.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckpttool.index.names import ROLES
from ckpttool.layouts import Layout, Place, late
from ckpttool.program import Advice, Program, SeenFolder, Unfinished
from ckpttool.storage.source import Source

from .filenames import FILE, METADATA

__all__ = ["LAYOUTS"]


def detect(where: Place) -> tuple[bool, str]:
    """Return (whether a place is a folder of torch_checkpointing; why or why not, as text).

    It is one if it has metadata.pkl and a file of rank 0, or model_0.pt and files of rank 0 of other items.
    """
    if where.file is not None:
        return False, "a folder; this is a file"
    names = where.source.list()
    if METADATA in names:
        first = next(_find_rank0_files(where.source, names), None)
        return first is not None, f"has {METADATA} and {first}" if first else f"{METADATA}, but no <item>_0.pt"
    items = {
        m["item"]
        for n in names
        if (m := FILE.fullmatch(n)) and int(m["rank"]) == 0 and m["ext"] in ("pt", "safetensors")
    }
    if any(ROLES.get(i) == "model" for i in items) and len(items) > 1:
        return True, f"has {', '.join(sorted(f'{i}_0' for i in items))} and no {METADATA}"
    return False, f"no {METADATA}, no <item>_<rank>.pt of a model and of other items"


def _find_rank0_files(source: Source, names: list[str]) -> Iterator[str]:
    """Yield the paths of the files of rank 0 in the folder or in one of its subfolders; `names` are the names in the
    folder."""
    for name in names:
        if (m := FILE.fullmatch(name)) and int(m["rank"]) == 0:
            yield name
    for name in names:
        if "." not in name and source.glance(name)[0]:
            yield from (f"{name}/{n}" for n in source.list(name) if (m := FILE.fullmatch(n)) and int(m["rank"]) == 0)


#: The file of an item and a rank.
_ITEM = re.compile(r"[A-Za-z0-9_-]+_\d{1,7}\.(pt|safetensors|json)|metadata\.pkl")


def _next_step(advice: Advice) -> str:
    """Return advice for the user: whether the package's manager loads the folder, and the command for another world
    size."""
    again = advice.convert("--to torch_checkpointing -n RANKS")
    if METADATA in advice.ckpt.files:
        return (
            f"torch_checkpointing's CheckpointManager loads it on up to {advice.ranks} with DefaultResharder, "
            f"nothing to convert; on more: {again}"
        )
    return f"resumes in its job at {advice.ranks}; at another world size: {again}"


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: a folder with files of items still has its temporary name.
    Else None."""
    if folder.layout is None and folder.is_temporary and any(map(_ITEM.fullmatch, folder.names)):
        return Unfinished(folder.STILL_WRITTEN, "torch_checkpointing")
    return None


def _is_piece(source: Source, name: str) -> bool:
    """Return whether a file is that of one item and rank, in a folder with metadata.pkl."""
    # a server may have no listing of the folder
    return bool(_ITEM.fullmatch(name)) and not source.root.startswith("http") and METADATA in source.list()


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**torch_checkpointing**",
            "[folder of Meta's torch_checkpointing](docs/how-to/trainers/torch-checkpointing.md)",
            "`.pt`, safetensors and JSON items",
            "everything",
        ),
    ),
    "layouts": (
        (
            "**torch_checkpointing**",
            (
                "folders of Meta's torch_checkpointing 0.1: `metadata.pkl` (DTensor placements, also strided ones; "
                "`default_tensor_v1`) with items of torch.save, safetensors, JSON and raw bytes; without "
                "`metadata.pkl` what DTensors in the files tell"
            ),
            (
                "model and optimizer cut along dim 0, for its CheckpointManager with DefaultResharder; every other "
                "item on every rank, RNG states each on its own. See "
                "[torch_checkpointing](../how-to/trainers/torch-checkpointing.md)"
            ),
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="torch_checkpointing",
        title="folder of torch_checkpointing's CheckpointManager",
        detect=detect,
        read=late("ckpttool.converters.torch_checkpointing.read_items:read"),
        write=late("ckpttool.converters.torch_checkpointing.write_items:write"),
        aliases=("torch-checkpointing", "checkpointing"),
        own_keys=True,
        reader_uses=("config", "like"),
        writer_uses=("world_size",),
        needs_named_optimizer=True,
        sharding="fsdp2",
        program=Program(rows=_ROWS, next_step=_next_step, unfinished=_find_unfinished_save, is_piece=_is_piece),
    ),
)
