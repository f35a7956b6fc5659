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

__all__ = ["adapter_extract", "adapter_merge", "merge_target"]


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
        src: a checkpoint that holds an adapter: of the whole model that PEFT wrapped, or the adapter alone.
        dst: the folder to write, with adapter_model.safetensors and adapter_config.json.
        adapter_name: which adapter, where there are several; "default" where None.
        adapter_config: folder with adapter_config.json, where it is neither beside the checkpoint nor one folder above
            it.
        config: as `open`; where `adapter_config` is None, the folder with adapter_config.json too.
        lora_alpha: of the LoraConfig, where there is no adapter_config.json; one is made of it, and of names and
            shapes.
        rslora: with `lora_alpha`: use_rslora of the LoraConfig.
        base_model: with `lora_alpha`: base_model_name_or_path of adapter_config.json.
        split_experts: write the LoRA of stacked experts (target_parameters) as that of each expert, under the names of
            the Hub, as vLLM and SGLang load it; `config` is then that of the base model.
        strip_prefix: modules that names of weights begin with, to leave out ("net.").
        dtype: floating-point dtype of the adapter; that of the source where None. (the others): as `convert`.

    Raises:
        Unsupported: there is no adapter, no adapter_config.json and no `lora_alpha`, or a kind whose names are not
            known; or with `split_experts` nothing can be split.
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

    One weight with its adapter is in memory at a time. Optimizer, scheduler and other state of the adapter's training
    is not carried; the notes of the result say by how much the adapter was scaled. torch computes, and must be
    installed.

    Args:
        src: the base model, in any layout; or, without `adapter`, a checkpoint that holds base model and adapter.
        dst: path or URL of the merged model.
        adapter: the checkpoint that holds the adapter: PEFT's folder, or any other layout. Its fp16 and bf16 tensors
            are taken to fp32 first, as PeftModel.from_pretrained does; those in the state of a job keep their dtype.
        adapter_name: which adapter, or which ones in this order, where there are several.
        adapter_config: folder with adapter_config.json, where it is neither beside the adapter nor one folder above it.
        lora_alpha, rslora: of the LoraConfig, where there is no adapter_config.json.
        to: layout to write; where None, the name of `dst` tells, and "hf" if that tells nothing.
        config: the base model's config, for the names of its weights and the files that are copied. (the others): as
            `convert`; `source_layout` to `wrap` are about `src`.

    Raises:
        Unsupported: what cannot be merged exactly, by its name (IA3, LoHa, groups of a convolution); or state of
            the training would be left out, and neither `drop` nor `only` is set.
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
    writing = replace(writing, to=merge_target(writing.to, dst).name)
    return run_conversion(src, dst, replace(reading, merge=merge), writing, running)


def merge_target(to: str | None, dst: str | os.PathLike[str]) -> layouts.Layout:
    """Choose the layout of a merged model: the one named `to`; where that is None, the one that the destination's name
    tells, or else hf.

    Raises:
        UsageError: there is no layout of that name, or it does not go with the destination.
    """
    if to is None:
        try:
            return layouts.target_of(None, dst)
        except UsageError:
            to = HUB_LAYOUT
    return layouts.target_of(to, dst)
