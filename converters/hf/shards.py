"""Files of weights for hf: their names, which tensors go into which shard, and the header of each."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.errors import Unsupported, argument
from ckpttool.formats import safetensors_header
from ckpttool.index.checkpoint import Chunks, TensorEntry
from ckpttool.index.draft import DraftFile

__all__ = ["ADAPTER", "INDEX", "SALVAGE", "WHOLE", "draft_shard", "refuse_unsupported_dtypes", "split_shards"]

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
#: Key of the metadata of one file in which `ckpttool.json` has no place: {name: "exact", "rebuilt: how", "missing:
#: why"} as JSON.
SALVAGE = "ckpttool_salvage"


def draft_shard(
    file: str,
    i: int,
    names: list[str],
    model: dict[str, TensorEntry],
    tensors: dict[str, TensorEntry],
    metadata: Mapping[str, str] | None = None,
) -> DraftFile:
    """Draft one safetensors file of weights.

    Args:
        file: its name.
        i: its number among the files of the destination.
        names: names of the weights in it; sorted in place, as safetensors sorts them.
        model: {name: weight, with the dtype to write}.
        tensors: gets {name with "model.": weight with its place in the file}.
        metadata: entries of `__metadata__` besides "format"; None for none.
    """
    names.sort(key=lambda k: safetensors_header.sort_key(k, model[k].dtype))
    head = safetensors_header.encode_header(
        [(k, model[k].dtype, model[k].shape) for k in names], {"format": "pt", **(metadata or {})}
    )
    at = len(head)
    for k in names:
        t = model[k]
        tensors["model." + k] = TensorEntry(t.dtype, t.shape, ("model", k), Chunks.whole(t.shape, i, at, t.nbytes))
        at += t.nbytes
    return DraftFile(file, at, head)


def refuse_unsupported_dtypes(model: dict[str, TensorEntry]) -> None:
    """Raise if a weight has a dtype that safetensors cannot store.

    Raises:
        Unsupported: with the first of them.
    """
    for name, t in model.items():
        if t.dtype not in safetensors_header.CODES:
            raise Unsupported(
                f'"{name}" is {t.dtype}, which safetensors cannot store. Cast it with {argument("cast")}.',
                code="CKPT0332",
            )


def split_shards(model: dict[str, TensorEntry], most: int, together: dict[str, str]) -> list[list[str]]:
    """Split weights into shards as huggingface_hub does: fill one until the next tensor does not fit; larger tensors
    get a file of their own.

    Args:
        model: {name: weight}.
        most: maximal bytes of a shard.
        together: {name: name of the first of the weights with which it shares a storage when transformers saves them};
            these stay in one shard.

    Returns:
        The names in each shard.
    """
    units: dict[str, list[str]] = {}
    for name in model:
        first = together.get(name, name)
        units.setdefault(first if first in model else name, []).append(name)
    groups: list[list[str]] = []
    current: list[str] = []
    size = 0
    for names in units.values():
        n = sum(model[k].nbytes for k in names)
        if n > most:
            groups.append(names)
            continue
        if size + n > most:
            groups.append(current)
            current, size = [], 0
        current.extend(names)
        size += n
    return [*groups, current] if current else groups
