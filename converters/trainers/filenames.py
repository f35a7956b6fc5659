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
    "has_loaders",
    "models_in",
    "numbered",
    "optimizers_in",
    "refuse_missing_shards",
    "rest_in",
    "state_in",
]

#: {what Accelerate calls a part of a rank's RNG state: its canonical name, which is Trainer's}
RNG_KEYS = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "cpu",
    "torch_cuda_manual_seed": "cuda",
}


def has_loaders(source: Source) -> bool:
    """Return whether a folder has the data loader of each rank, in dataloader/rank_{r}.pt."""
    return "dataloader" in source.list() and any(numbered(source.list("dataloader"), r"rank_(\d{1,6})\.pt"))


def numbered(names: Sequence[str], pattern: str) -> Iterator[tuple[str, int]]:
    """Yield (name, its number) of the names that a pattern with one group matches whole, by number; it is 0 where the
    group matches nothing."""
    rows = [(name, int(m[1] or 0)) for name in names if (m := re.fullmatch(pattern, name))]
    yield from sorted(rows, key=lambda row: row[1])


def models_in(names: Sequence[str]) -> list[DirectoryPart]:
    """List the models among the names in a directory, by number: each has its number as the path below its
    component."""
    found: list[DirectoryPart] = []
    for pattern, layout in (
        (r"pytorch_model_fsdp_(\d+)", "dcp"),
        (r"pytorch_model_fsdp(?:_(\d+))?\.bin", "full"),
        (r"(?:adapter_model|model)(?:_(\d+))?\.safetensors", "hf"),
        (r"(?:pytorch_model|adapter_model)(?:_(\d+))?\.bin", "full"),
    ):
        found = [DirectoryPart(name, layout, "model", (str(i),)) for name, i in numbered(names, pattern)]
        if found:
            break
    else:
        if "model.safetensors.index.json" in names:
            found = [DirectoryPart("", "hf", "model", ("0",))]
        elif shards := [n for n in names if re.fullmatch(r"pytorch_model-\d{5}-of-\d{5}\.bin", n)]:
            found = [DirectoryPart(name, "full", "model", ("0",)) for name in shards]
        elif any(numbered(names, r"pytorch_model_fsdp_rank(\d+)\.bin")):
            found = [DirectoryPart("", "fsdp1", "model", ("0",))]
    return found


def optimizers_in(names: Sequence[str]) -> list[DirectoryPart]:
    """List the optimizers among the names in a directory, by number; that of number i is the optimizer of model i."""
    for pattern, layout in ((r"optimizer_(\d+)", "dcp"), (r"optimizer(?:_(\d+))?\.(?:bin|pt)", "full")):
        found = [DirectoryPart(name, layout, "optim", (str(i),)) for name, i in numbered(names, pattern)]
        if found:
            return found
    return []


def state_in(names: Sequence[str]) -> list[DirectoryPart]:
    """List models and optimizers among the names in a directory; a single model needs no number."""
    models, optimizers = models_in(names), optimizers_in(names)
    if len({part.under for part in models}) < 2 and len(optimizers) < 2:
        return [replace(part, under=()) for part in (*models, *optimizers)]
    return [*models, *optimizers]


def rest_in(names: Sequence[str], rng: str) -> list[DirectoryPart]:
    """List schedulers, scalers, data loaders, RNG states and registered objects among the names in a directory. `rng`
    is the pattern of the files with RNG states, whose group is the rank."""
    out: list[DirectoryPart] = []
    for pattern, component in (
        (r"scheduler(?:_(\d+))?\.(?:bin|pt)", "scheduler"),
        (r"scaler(?:_(\d+))?\.pt", "scaler"),
        (r"sampler(?:_(\d+))?\.bin", "dataloader"),
        (r"dl_state_dict(?:_(\d+))?\.bin", "dataloader"),
    ):
        found = list(numbered(names, pattern))
        for name, i in found:
            key = name.partition(".")[0] if component == "dataloader" else str(i)
            out.append(
                DirectoryPart(name, DATA, component, (key,) if len(found) > 1 or component == "dataloader" else ())
            )
    out += [DirectoryPart(name, DATA, "rng", (str(i),), RNG_KEYS) for name, i in numbered(names, rng)]
    out += [
        DirectoryPart(name, DATA, "extra", (name.partition(".")[0],))
        for name, _ in numbered(names, r"custom_checkpoint_(\d+)\.pkl")
    ]
    return out


RANDOM_STATES = r"random_states_(\d{1,6})\.pkl"
RNG_STATE = r"rng_state(?:_(\d{1,6}))?\.pth"


def refuse_missing_shards(source: Source) -> None:
    """Refuse a model of which not all numbered *.bin shards are there. Those of safetensors the layout hf counts.

    Raises:
        Corrupt: with the first that is missing.
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
