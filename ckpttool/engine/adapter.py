"""adapter_extract, adapter_merge: the LoRA of a checkpoint as PEFT's files, and a model with its LoRA merged in any
layout.

Both are conversions: one of the part of the weights that PEFT saves, one of a checkpoint whose merged weights are
computed (merging.py). Everything that holds for `convert` holds for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

from .. import layouts
from ..errors import UsageError
from ..options import HUB_LAYOUT, ExtractKeywords, MergeKeywords, MergeRequest, list_keywords, split_keywords
from .conversion import ConvertResult, run_conversion
from .opening import CheckpointPath

__all__ = ["adapter_extract", "adapter_merge", "choose_layout_or_hf"]


@list_keywords
def adapter_extract(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    *,
    adapter_name: str | None = None,
    adapter_config: str | None = None,
    lora_alpha: float | None = None,
    rslora: bool = False,
    base_model: str | None = None,
    split_experts: bool = False,
    strip_prefix: str | None = None,
    **keywords: Unpack[ExtractKeywords],
) -> ConvertResult:
    """Write the adapter in a checkpoint of any layout as PEFT's own folder, byte for byte as its save_pretrained does.

    Args:
        src: a checkpoint that holds an adapter: of the complete model that PEFT wrapped, or the adapter alone.
        dst: the folder to write, with adapter_model.safetensors and adapter_config.json.
        adapter_name: which adapter, if the checkpoint has several; None for "default".
        adapter_config: folder with adapter_config.json, if it is neither beside the checkpoint nor one folder above it.
        config: as `open`; if `adapter_config` is None, also the folder with adapter_config.json.
        lora_alpha: lora_alpha of the LoraConfig, if there is no adapter_config.json; the other fields of the LoraConfig
            are derived from names and shapes.
        rslora: with `lora_alpha`: use_rslora of the LoraConfig.
        base_model: with `lora_alpha`: base_model_name_or_path of adapter_config.json.
        split_experts: write the LoRA of stacked experts (target_parameters) as one LoRA for each expert, under the
            names of the Hub, as vLLM and SGLang load it; `config` is then that of the base model.
        strip_prefix: leading module names to remove from the names of weights ("net.").
        dtype: floating-point dtype of the adapter; None for that of the source.
        (the others): as `convert`.

    Raises:
        Unsupported: there is no adapter, or neither adapter_config.json nor `lora_alpha`; the adapter is of a kind
            whose names are not known; or `split_experts` is set and nothing can be split.
    """
    config = keywords.get("config")
    if config is not None and os.path.isdir(config) and not os.path.exists(os.path.join(config, "config.json")):
        adapter_config, keywords["config"] = adapter_config or config, None  # no reader can use it
    hf = layouts.find(HUB_LAYOUT)
    assert hf.options is not None
    options = hf.options(
        adapter=True,
        adapter_name=adapter_name,
        adapter_config=adapter_config,
        lora_alpha=lora_alpha,
        rslora=rslora,
        base_model=base_model,
        split_experts=split_experts,
        strip_prefix=strip_prefix,
    )
    reading, writing, running = split_keywords(keywords)
    return run_conversion(src, dst, reading, replace(writing, to=HUB_LAYOUT, options=options), running)


@list_keywords
def adapter_merge(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    *,
    adapter: str | os.PathLike[str] | None = None,
    adapter_name: str | Iterable[str] | None = None,
    adapter_config: str | None = None,
    lora_alpha: float | None = None,
    rslora: bool = False,
    **keywords: Unpack[MergeKeywords],
) -> ConvertResult:
    """Write a model with its LoRA merged: W + scaling * B @ A, with the bits that PEFT's merge_and_unload gives on a
    CPU.

    One weight with its adapter is in memory at a time. Optimizer, scheduler and other training state of the adapter is
    not written; the notes of the result say by how much the adapter was scaled. torch does the arithmetic, and must be
    installed.

    Args:
        src: the base model, in any layout; or, without `adapter`, a checkpoint that holds base model and adapter.
        dst: path or URL of the merged model.
        adapter: the checkpoint that holds the adapter: PEFT's folder, or any other layout. Its fp16, bf16 and float8
            tensors are converted to fp32 first, as PeftModel.from_pretrained does; an adapter inside `src` keeps its
            dtype.
        adapter_name: which adapter, or which ones in this order, if there are several.
        adapter_config: folder with adapter_config.json, if it is neither beside the adapter nor one folder above it.
        lora_alpha, rslora: of the LoraConfig, if there is no adapter_config.json.
        to: layout to write; None to infer it from the name of `dst`, or "hf" if that name does not tell.
        config: the base model's config, for the names of its weights and the files that are copied.
        (the others): as `convert`; `source_layout` to `wrap` are about `src`.

    Raises:
        Unsupported: the adapter cannot be merged exactly (the message names why: IA3, LoHa, groups of a convolution);
            or training state would be left out, and neither `drop` nor `only` is set.
        Corrupt: adapter and base model do not fit. MissingPackage: torch is not installed.
    """
    reading, writing, running = split_keywords(keywords)
    merge = MergeRequest(
        adapter=None if adapter is None else os.fspath(adapter),
        names=(adapter_name,) if isinstance(adapter_name, str) else tuple(adapter_name or ()),
        config=adapter_config,
        lora_alpha=lora_alpha,
        rslora=rslora,
    )
    writing = replace(writing, to=choose_layout_or_hf(writing.to, dst).name)
    return run_conversion(src, dst, replace(reading, merge=merge), writing, running)


def choose_layout_or_hf(to: str | None, dst: str | os.PathLike[str]) -> layouts.Layout:
    """Return the layout to write: the one named `to`; if None, the one inferred from the destination's name, else hf.

    Raises:
        UsageError: there is no layout of that name, or it does not go with the destination.
    """
    if to is None:
        try:
            return layouts.choose_target_layout(None, dst)
        except UsageError:
            to = HUB_LAYOUT
    return layouts.choose_target_layout(to, dst)
