"""hf with `adapter`: a folder as PEFT's save_pretrained writes it, and what can be written of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.huggingface import hub_names, lora, model_files
from ckpttool.index.checkpoint import Checkpoint, TensorEntry, joined
from ckpttool.index.draft import Draft, DraftFile
from ckpttool.layouts import WriteOptions
from ckpttool.printable import quote_path
from ckpttool.storage.source import Source

from ..options import HfOptions
from .shards import ADAPTER, draft_shard, refuse_unsupported_dtypes

__all__ = ["find_adapter_config", "read_base_relation", "refuse_adapter_alone", "write_adapter"]

_ADAPTER_CONFIG = model_files.ADAPTER_CONFIG


def find_adapter_config(
    source: Source, options: WriteOptions, notes: list[str], *, one_of_several: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """Return (adapter_config.json, {name: bytes} of files to copy); None if the user gave `lora_alpha` instead of a
    config.

    Args:
        source: the checkpoint; the config may be in the same folder.
        options: those of the conversion.
        notes: gets where files were found.
        one_of_several: the source holds several adapters, of which this is one.

    Raises:
        Unsupported: there is none, and no alpha was given. UsageError: there is one, and an alpha too.
    """
    own = options.of(HfOptions)
    name = own.adapter_name
    given, asked = (own.adapter_config, "adapter_config") if own.adapter_config else (options.config, "config")
    found = model_files.find_adapter_files(source, given, notes, name, one_of_several=one_of_several)
    if found is None and own.split_experts and asked == "config":  # the folder of the base model, which has none
        found = model_files.find_adapter_files(source, None, notes, name, one_of_several=one_of_several)
    if own.lora_alpha is None:
        if found is None:
            raise model_files.make_missing_config_error(given, asked)
        return found
    if found is not None:
        raise UsageError(
            f"{argument('lora_alpha', own.lora_alpha)}: there is an adapter_config.json, which says "
            f"{str(found[0].get('lora_alpha'))[:40]}. Leave the option out, or take that file away if it is of another "
            "adapter.",
            code="CKPT0205",
        )
    return None


def read_base_relation(source: Source, options: WriteOptions) -> hub_names.Relation:
    """Return how the names of the base model in memory and on the Hub differ, by its config.json.

    Raises:
        Unsupported: there is no config.json, or transformers does not know the architecture. MissingPackage:
            transformers is not installed.
    """
    config = model_files.find_model_files(source, options.config, [])[0]
    if config is None:
        raise Unsupported(
            f"{argument('split_experts', True, 'HfOptions')} needs the config.json of the base model, which tells how "
            f"the Hub names its experts. Give {argument('config')} its folder or id.",
            code="CKPT0312",
        )
    return hub_names.relate_to_hub(config, None)


def write_adapter(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft a folder that PEFT loads. The checkpoint must hold an adapter and nothing else
    (adapters.keep_adapter_only).

    Raises:
        Unsupported: safetensors has no such dtype, or there is neither an adapter_config.json nor an alpha.
        UsageError: there are both.
    """
    notes: list[str] = []
    own = options.of(HfOptions)
    stored = {joined(t.path[1:]): t for t in ckpt.tensors.values()}
    config = find_adapter_config(source, options, notes)
    extra = {} if config is None else config[1]
    if own.split_experts and config is not None:
        from ckpttool.huggingface.split_experts import make_split_config

        extra[_ADAPTER_CONFIG] = lora.encode_adapter_config(
            make_split_config(config[0], stored, read_base_relation(source, options))
        )
    model = {k: replace(t, dtype=options.cast("model." + k, t.dtype)) for k, t in stored.items()}
    refuse_unsupported_dtypes(model)
    tensors: dict[str, TensorEntry] = {}
    files = [draft_shard(ADAPTER, 0, list(model), model, tensors)]
    if config is None:
        assert own.lora_alpha is not None
        made = lora.make_adapter_config(
            {k: t.shape for k, t in stored.items()},
            lora_alpha=own.lora_alpha,
            rslora=own.rslora,
            base_model=own.base_model,
        )
        extra = {_ADAPTER_CONFIG: lora.encode_adapter_config(made)}
        notes.append(
            f"made adapter_config.json: r {made['r']}, lora_alpha {made['lora_alpha']}, {len(made['target_modules'])} "
            "target modules, and otherwise PEFT's defaults (no dropout, no trained biases of the base model)"
        )
    extra[_ADAPTER_CONFIG] = extra.pop(_ADAPTER_CONFIG)  # last
    files += [DraftFile(n, len(data), data) for n, data in extra.items()]
    out = Checkpoint("hf", options.target, None, [f.name for f in files], [f.size for f in files], tensors, {})
    return Draft(out, {n: ckpt.tensors[n] for n in tensors}, files, notes=notes)


def refuse_adapter_alone(ckpt: Checkpoint, notes: list[str]) -> None:
    """Raise if the checkpoint holds an adapter alone, which from_pretrained would take for a model without its weights.
    A model with an adapter inside is only added to `notes`.

    Raises:
        Unsupported: with the commands that extract the adapter, or merge it.
    """
    found = lora.find_lora(ckpt)
    if found is not None and not found.alone:
        notes.append(
            f"the weights have the names of a model that PEFT wrapped ({found}), which from_pretrained does not load: "
            "ckpttool adapter merge writes the model with the adapter in its weights"
        )
    if found is not None and found.alone:
        path = quote_path(ckpt.root)
        raise Unsupported(
            f"{ckpt.root} holds an adapter only ({found}), which from_pretrained cannot load alone. For PEFT: ckpttool "
            f"adapter extract {path} DST (or {argument('adapter', True, 'HfOptions')}). Merged into its base "
            f"model: ckpttool adapter merge BASE {path} DST.",
            code="CKPT0321",
        )
