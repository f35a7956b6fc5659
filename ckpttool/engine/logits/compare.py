"""compare: whether two checkpoints, in any layouts, are one model, by what they compute."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from typing import Unpack

from ...errors import UsageError, argument
from ...extras import require_packages
from ...options import (
    HUB_LAYOUT,
    CompareKeywords,
    CompareRequest,
    MergeRequest,
    OpenOptions,
    WriteRequest,
    list_keywords,
    split_keywords,
)
from ..opening import CheckpointPath, drop_unfit_source_layout, show_path
from .compare_logits import LogitComparison, compare_sides
from .sides import ModelSide, has_own_config, open_side

__all__ = ["compare"]


@partial(list_keywords, others=(CompareRequest,))
def compare(
    a: CheckpointPath,
    b: CheckpointPath,
    *,
    config_a: str | None = None,
    config_b: str | None = None,
    adapter_a: str | os.PathLike[str] | None = None,
    adapter_b: str | os.PathLike[str] | None = None,
    **keywords: Unpack[CompareKeywords],
) -> LogitComparison:
    """Compare what the models of two checkpoints compute from the same tokens, layer by layer, with one layer in
    memory.

    Args:
        a, b: two folders, files or URLs, in any layouts; `a` is the reference. Quantised weights are dequantised.
        config: folder or id of the Hugging Face model, for checkpoints without a config.json of their own.
        config_a, config_b: the same for one of them, even if it has a config.json.
        adapter_a, adapter_b: an adapter (LoRA) that is merged into one of them as it is read.
        weights: which weights of `a` are its model, as `open` takes it.
        prompts: file of prompts, one a line: token ids as a JSON list, or text, which needs a tokenizer beside the
            config. If None, ids are drawn from the vocabulary.
        seed: of the ids and pixels that are drawn.
        dtype: what to compute in ("fp32", "bf16", "fp16", "fp64"); weights are converted to it.
        device: what to compute on ("cpu", "cuda").
        max_kl: KL divergence in nats, at the worst position, that counts as equal. If None, only the measured bound
            counts: ten times what the first one differs from itself with other kernels.
        map: a name map, as `convert` takes it, for those of the two that are not hf; None means that of the trainer
            which wrote them.
        source_layout, like, flat_layout, wrap, tag: as `open`, for those of the two whose layout uses them.
        progress: called with ("compare", bytes read, bytes in all).

    Raises:
        MissingPackage: torch or transformers is not installed.
        Unsupported: a model cannot be built, or is run on other inputs than tokens and images.
        UsageError: an argument makes no sense, or there is no config.json.
        CkpttoolError: one of the two cannot be read.
    """
    require_packages("ckpttool compare", "torch", "transformers")
    request = CompareRequest(**{f.name: keywords[f.name] for f in fields(CompareRequest) if f.name in keywords})  # type: ignore[literal-required]
    if request.max_kl is not None and not request.max_kl >= 0:
        raise UsageError(f"{argument('max_kl', request.max_kl)}: it must be a number, and at least 0.", code="CKPT0203")
    reading, _, running = split_keywords({k: v for k, v in keywords.items() if k != "dtype"})
    writing = WriteRequest(to=HUB_LAYOUT, map=keywords.get("map"))
    with ExitStack() as stack:
        sides: list[ModelSide] = []
        for label, path, config, adapter in (("A", a, config_a, adapter_a), ("B", b, config_b, adapter_b)):
            given = config or (None if has_own_config(path) else reading.config)
            merge = None if adapter is None else MergeRequest(adapter=adapter)
            weights = reading.weights if label == "A" else None
            own = {"config": given, "merge": merge, "weights": weights}
            options = OpenOptions(**{**vars(drop_unfit_source_layout(path, reading)), **own})
            sides.append(open_side(label, path, options, writing))
            stack.callback(sides[-1].opened.close)
        tokenizer = config_a or reading.config or show_path(a)
        return compare_sides(sides[0], sides[1], request, running.progress, tokenizer)
