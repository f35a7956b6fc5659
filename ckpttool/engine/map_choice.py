"""Which name map a conversion goes through: the one that was asked for, or that of the trainer which wrote the source.

Sizes of axes that shapes do not tell (heads) are in config.json. Where there is none, a Hub export of the same weights
in the next folder, as torchtitan writes at its last step, tells the size of a head: exactly one makes q and k of a
layer equal to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from ..errors import CkpttoolError, Unsupported, argument
from ..huggingface import maps, model_files
from ..index.check import check
from ..index.checkpoint import Checkpoint
from ..index.expressions import evaluate_size
from ..index.map_groups import find_uncovered_names
from ..index.name_maps import NameMap
from ..options import HUB_LAYOUT
from ..storage.source import Source
from .copy.fill import silent
from .copy.tensor_digests import tensor_digests
from .opening import OpenCheckpoint, OpenOptions, open_checkpoint
from .transform.mapping import apply_map
from .transform.premises import check_premises, read_job_arguments

__all__ = ["NO_MAP", "apply_name_map", "rename_opened", "resolve_map_argument"]

NO_MAP = "none"


def resolve_map_argument(asked: str) -> str:
    """Return the name map that the user gave, so that it can be used without the user's file: the name of a map that
    comes with ckpttool and "none" are returned as they are, for the path of a file the file's text is returned.

    Args:
        asked: the name of a map that comes with ckpttool, "none" for no map, or the path of a file with a map.

    Raises:
        UsageError: there is no such map.
    """
    return asked if asked == NO_MAP or asked in maps.list_map_names() else maps.read_shipped_or_own_map(asked)


def apply_name_map(
    ckpt: Checkpoint,
    source: Source,
    asked: str | None,
    config: str | None,
    *,
    vocab_size: int | None = None,
    to_hub: bool = False,
) -> tuple[Checkpoint, Source]:
    """Rename and reorder the tensors of a checkpoint by a name map.

    Args:
        ckpt, source: the index and its files.
        asked: the map that the user chose; "none" for no map. None for no map either, except with `to_hub`: then the
            map of the trainer that wrote the checkpoint, if one fits.
        config: folder or id of the model, as `open` takes it; None if none was given.
        vocab_size: rows of the vocabulary in the result; None for those in config.json.
        to_hub: whether the result is for the Hub.

    Returns:
        (the new index, its files); both unchanged if there is no map.

    Raises:
        UsageError: there is no such map, or it cannot be parsed.
        Unsupported: the map does not fit the names, the shapes or the model.
    """
    if asked == NO_MAP or (asked is None and not (to_hub and ckpt.trainer)):  # maps of trainers are found by its name
        return ckpt, source
    known = ckpt.config if config is None else None
    if known is None:
        known = model_files.find_model_files(source, config, [])[0]
    found = _choose_trainer_map(ckpt, known) if asked is None else maps.load_map(asked)
    if found is None:
        return ckpt, source
    whole = known or {}
    text = whole.get("text_config")
    known = {**whole, **(text if isinstance(text, dict) else {})}
    if whole.get("model_type") in found.models:  # the map is of the whole model, vision with text
        known["model_type"] = whole["model_type"]
    job = read_job_arguments(ckpt, source)
    notes = check_premises(found, job, known, config)
    found = found.of_job(job[0])
    facts: dict[str, Any] = {**job[0], **known}
    if (
        any(evaluate_size(e, facts) is None for e in found.sizes.values())
        and (told := _find_head_sizes(ckpt, source, found)) is not None
    ):
        heads, where = told
        facts = {**heads, **facts}
        notes.append(f"a head has {heads['head_dim']} rows: so q and k of a layer become those of {where}, bit for bit")
    if vocab_size is not None:
        facts["vocab_size"] = vocab_size
    try:
        out, files = apply_map(ckpt, source, found, facts)
    except Unsupported as e:
        if asked is None:
            raise Unsupported(f"{e} {argument('map', NO_MAP)} writes the names as they are.", code="CKPT0310") from None
        raise
    check(out)
    out.notes += notes
    return out, files


def rename_opened(opened: OpenCheckpoint, asked: str | os.PathLike[str], config: str | None) -> OpenCheckpoint:
    """Return an open checkpoint with its tensors renamed by a name map; it uses the files of `opened`, which closes
    them.

    Args:
        asked: the name or the file of a map, or "none".
        config: folder or id of the model; None if none was given.

    Raises:
        UsageError, Unsupported: there is no such map, or it does not fit.
    """
    ckpt, source = apply_name_map(opened.checkpoint, opened.source, resolve_map_argument(os.fspath(asked)), config)
    return replace(opened, checkpoint=ckpt, source=source)


def _choose_trainer_map(ckpt: Checkpoint, config: Mapping[str, object] | None) -> NameMap | None:
    """Choose the map from the names of the trainer that wrote a checkpoint to those of its Hugging Face model.

    Args:
        config: the content of config.json; None if there is none.

    Returns:
        None if no map covers all weights. If maps of that trainer exist, a note in `ckpt` then says so, unless the
        names are those of the Hub already.
    """
    names = [t.local_name for t in ckpt.tensors.values() if t.component == "model"]
    model = (config or {}).get("model_type")
    every = [maps.load_map(name) for name in maps.list_map_names()]
    own = [found for found in every if names and (ckpt.trainer or "").lower() in found.trainers]
    for found in own:
        of_model = model is None or model in found.models
        if of_model and found.fits(names) and not find_uncovered_names(found, names, forward=True):
            return found
    if own and all(find_uncovered_names(found, names, forward=False) for found in own):
        of = "" if model is None else f" to model_type {model}"
        ckpt.notes.append(
            f"no name map that comes with ckpttool is from these weights of {ckpt.trainer}{of}: names are kept"
        )
    return None


def _find_head_sizes(ckpt: Checkpoint, source: Source, found: NameMap) -> tuple[dict[str, int], str] | None:
    """Find the sizes of attention heads with the help of an export of the same weights in a folder beside the
    checkpoint.

    Args:
        found: the map to the names of the export.

    Returns:
        ({key of config.json: number}, the export's folder, "../NAME"); None if no folder is such an export.
    """
    if not source.local_folder:
        return None
    above = os.path.dirname(os.path.abspath(source.root))
    for folder in sorted(os.listdir(above)):
        path = os.path.join(above, folder)
        if (
            path == os.path.abspath(source.root)
            or not os.path.isdir(path)
            or not any(f.endswith(".safetensors") for f in os.listdir(path))
        ):
            continue
        try:
            with open_checkpoint(path, OpenOptions(source_layout=HUB_LAYOUT, only=("model",))) as export:
                there = export.locate()
                wanted = {
                    n: t
                    for n in ("q", "k")
                    if (t := there.tensors.get(f"model.model.layers.0.self_attn.{n}_proj.weight"))
                }
                if (
                    len(wanted) == 2
                    and (heads := _fit_head_sizes(ckpt, source, found, there, export.source)) is not None
                ):
                    return heads, f"../{folder}"
        except CkpttoolError:
            continue
    return None


def _fit_head_sizes(
    ckpt: Checkpoint, source: Source, found: NameMap, there: Checkpoint, export: Source
) -> dict[str, int] | None:
    """Find the sizes of attention heads with which a map turns q and k of the first layer into those of an export.

    Args:
        found: the map to the names of the export.
        there, export: the index of the export, and its files.

    Returns:
        {key of config.json: number}; None if no size fits, or several do.
    """
    q, k = (f"model.model.layers.0.self_attn.{n}_proj.weight" for n in ("q", "k"))
    wanted = {n: there.tensors[n] for n in (q, k)}
    digests = tensor_digests(wanted, export, there.files, there.records, silent)
    layer = {
        n: t
        for n, t in ckpt.tensors.items()
        if t.component == "model" and t.local_name.startswith("layers.0.") and t.numel and len(t.shape) == 2
    }
    of_layer = replace(ckpt, tensors=layer, values={}, recorded={}, notes=[])
    rows = (wanted[q].shape[0], wanted[k].shape[0])
    fitting = []
    for size in range(2, gcd(*rows) + 1, 2):
        if gcd(*rows) % size:
            continue
        heads = {"head_dim": size, "num_attention_heads": rows[0] // size, "num_key_value_heads": rows[1] // size}
        try:
            one, _ = apply_map(of_layer, source, found, heads)
        except CkpttoolError:
            return None
        if {q, k} <= one.tensors.keys() and tensor_digests(
            {n: one.tensors[n] for n in (q, k)}, source, ckpt.files, ckpt.records, silent
        ) == digests:
            fitting.append(heads)
    return fitting[0] if len(fitting) == 1 else None
