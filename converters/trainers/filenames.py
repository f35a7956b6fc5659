"""Files that trainers and scripts call alike, by their names: models, optimizers, and small files with the rest of the
state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.errors import Corrupt
from ckpttool.storage.source import Source

from .dialect import DATA, DirectoryPart

__all__ = [
    "RANDOM_STATES",
    "RNG_KEYS",
    "RNG_STATE",
    "has_rank_loaders",
    "list_model_parts",
    "list_optimizer_parts",
    "list_other_parts",
    "list_state_parts",
    "match_numbered_names",
    "refuse_missing_shards",
]

#: {what Accelerate calls a part of a rank's RNG state: its canonical name, which is Trainer's}
RNG_KEYS = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}


def has_rank_loaders(source: Source) -> bool:
    """Return whether a folder has the data loader of each rank, in dataloader/rank_{r}.pt."""
    return "dataloader" in source.list() and any(match_numbered_names(source.list("dataloader"), r"rank_(\d{1,6})\.pt"))


def match_numbered_names(names: Sequence[str], pattern: str) -> Iterator[tuple[str, int]]:
    """Yield (name, number) of the names that a pattern matches in full, in the order of the numbers.

    Args:
        names: the names.
        pattern: a regular expression with one group, the number; where that group is absent or empty, the number is 0.
    """
    rows = [(name, int(m[1] or 0)) for name in names if (m := re.fullmatch(pattern, name))]
    yield from sorted(rows, key=lambda row: row[1])


def list_model_parts(names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold models, by number, among the names in a directory.

    `under` of each part is its model's number as text, in a tuple: the number comes after "model" in canonical paths.
    """
    for pattern, layout in (
        (r"pytorch_model_fsdp_(\d+)", "dcp"),
        (r"pytorch_model_fsdp(?:_(\d+))?\.bin", "full"),
        (r"(?:adapter_model|model)(?:_(\d+))?\.safetensors", "hf"),
        (r"(?:pytorch_model|adapter_model)(?:_(\d+))?\.bin", "full"),
    ):
        if found := list(match_numbered_names(names, pattern)):
            return [DirectoryPart(name, layout, "model", (str(i),)) for name, i in found]
    if "model.safetensors.index.json" in names:
        return [DirectoryPart("", "hf", "model", ("0",))]
    if shards := [n for n in names if re.fullmatch(r"pytorch_model-\d{5}-of-\d{5}\.bin", n)]:
        return [DirectoryPart(name, "full", "model", ("0",)) for name in shards]
    of_ranks = any(match_numbered_names(names, r"pytorch_model_fsdp_rank(\d+)\.bin"))
    return [DirectoryPart("", "fsdp1", "model", ("0",))] if of_ranks else []


def list_optimizer_parts(names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold optimizers, by number, among the names in a directory. Optimizer i belongs to model
    i."""
    for pattern, layout in ((r"optimizer_(\d+)", "dcp"), (r"optimizer(?:_(\d+))?\.(?:bin|pt)", "full")):
        if found := list(match_numbered_names(names, pattern)):
            return [DirectoryPart(name, layout, "optim", (str(i),)) for name, i in found]
    return []


def list_state_parts(names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold models and optimizers among the names in a directory. Their numbers (`under`) are left
    out if there is one model and at most one optimizer."""
    models, optimizers = list_model_parts(names), list_optimizer_parts(names)
    if len({part.under for part in models}) < 2 and len(optimizers) < 2:
        return [replace(part, under=()) for part in (*models, *optimizers)]
    return [*models, *optimizers]


def list_other_parts(names: Sequence[str], rng: str) -> list[DirectoryPart]:
    """List the parts besides models and optimizers: schedulers, scalers, data loaders, RNG states, registered objects.

    Args:
        names: the names in the directory.
        rng: pattern of the names of the files with RNG states; its group is the rank.
    """
    out: list[DirectoryPart] = []
    for pattern, component in (
        (r"scheduler(?:_(\d+))?\.(?:bin|pt)", "scheduler"),
        (r"scaler(?:_(\d+))?\.pt", "scaler"),
        (r"sampler(?:_(\d+))?\.bin", "dataloader"),
        (r"dl_state_dict(?:_(\d+))?\.bin", "dataloader"),
    ):
        found = list(match_numbered_names(names, pattern))
        for name, i in found:
            key = name.partition(".")[0] if component == "dataloader" else str(i)
            out.append(
                DirectoryPart(name, DATA, component, (key,) if len(found) > 1 or component == "dataloader" else ())
            )
    out += [DirectoryPart(name, DATA, "rng", (str(i),), RNG_KEYS) for name, i in match_numbered_names(names, rng)]
    out += [
        DirectoryPart(name, DATA, "extra", (name.partition(".")[0],))
        for name, _ in match_numbered_names(names, r"custom_checkpoint_(\d+)\.pkl")
    ]
    return out


RANDOM_STATES = r"random_states_(\d{1,6})\.pkl"
RNG_STATE = r"rng_state(?:_(\d{1,6}))?\.pth"


def refuse_missing_shards(source: Source) -> None:
    """Raise if one of the numbered pytorch_model-*.bin shards is missing. (Shards in safetensors are counted by layout
    hf.)

    Raises:
        Corrupt: with the first missing shard.
    """
    for name in (names := source.list()):
        if m := re.fullmatch(r"pytorch_model-(\d{5})-of-(\d{5})\.bin", name):
            for i in range(1, int(m[2]) + 1):
                if (other := f"pytorch_model-{i:05d}-of-{m[2]}.bin") not in names:
                    raise Corrupt(
                        f"{source.root}: {name} is one of {int(m[2])} shards, and {other} is missing. The copy is "
                        "incomplete; fetch the folder again.",
                        code="CKPT0401",
                    )
