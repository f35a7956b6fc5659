"""average: one model of several checkpoints of it, in any layouts; a conversion of a checkpoint whose weights are
computed (averaging.py). Everything that holds for `convert` holds for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

from ..errors import UsageError
from ..index.checkpoint import floating_dtype
from ..options import AverageKeywords, AverageRequest, list_keywords, split_keywords
from .adapter import merge_target
from .conversion import ConvertResult, run_conversion
from .destination import normalise_destination, refuse_source
from .workers.part_requests import absolute_path

__all__ = ["average", "request_average"]


def request_average(
    sources: Iterable[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    coefficients: Iterable[float] | None = None,
    linear: bool = False,
    ema_decay: float | None = None,
    base: str | os.PathLike[str] | None = None,
    scale: float | Iterable[float] | None = None,
    slerp: float | None = None,
    accumulate: str = "fp64",
) -> tuple[str, AverageRequest]:
    """Return (the first checkpoint, the request that averages it with the others); the arguments are those of
    `average`.

    Raises:
        UsageError: they make no sense together, or the destination is one of the checkpoints.
    """
    first, *others = [absolute_path(os.fspath(path)) for path in sources] or [""]
    if not first:
        raise UsageError("No checkpoint was given.", code="CKPT0202")
    scales = None if scale is None else (float(scale),) if isinstance(scale, (int, float)) else tuple(scale)
    request = AverageRequest(
        others=tuple(others),
        coefficients=None if coefficients is None else tuple(coefficients),
        linear=linear,
        ema_decay=ema_decay,
        base=None if base is None else absolute_path(os.fspath(base)),
        scale=scales,
        slerp=slerp,
        accumulate=floating_dtype(accumulate),
    )
    for path in (*request.others, *([] if request.base is None else [request.base])):
        refuse_source(path, normalise_destination(dst))
    return first, request


@list_keywords
def average(
    sources: Iterable[str | os.PathLike[str]],
    dst: str | os.PathLike[str],
    *,
    coefficients: Iterable[float] | None = None,
    linear: bool = False,
    ema_decay: float | None = None,
    base: str | os.PathLike[str] | None = None,
    scale: float | Iterable[float] | None = None,
    slerp: float | None = None,
    accumulate: str = "fp64",
    **keywords: Unpack[AverageKeywords],
) -> ConvertResult:
    """Write the average of checkpoints of one model, in any layouts and for any world sizes; of weights only.

    Without more arguments it is the mean: the sum in the order given, divided once. A block of rows of each checkpoint
    is in memory at a time. Everything is computed in `accumulate`, and rounded once to the dtype of the weight.

    Args:
        sources: folders, files or URLs, in order.
        dst: path or URL of the result.
        coefficients: a factor for each checkpoint; they sum to 1.
        linear: with `coefficients`: they may have any sum.
        ema_decay: compute an EMA over the checkpoints in their order: a = decay * a + (1 - decay) * x, from the first.
        base: a checkpoint, for task arithmetic: base + the sum of scale * (x - base).
        scale: with `base`: a number, or one for each checkpoint; 1 where None.
        slerp: of two checkpoints: the part of the way from the first to the second, along the arc, tensor by tensor.
        accumulate: dtype of the computation, "fp64" or "fp32"; weights in float64 always take fp64.
        weights: which weights of each are its model, as `convert` takes it.
        to: layout to write; where None, the name of `dst` tells, and "hf" if that tells nothing. (the others): as
            `convert`; `source_layout` is that of those that may be of this one.

    Raises:
        Unsupported: the checkpoints have other names, shapes or dtypes, or hold codes.
    """
    reading, writing, running = split_keywords(keywords)
    src, request = request_average(
        sources,
        dst,
        coefficients=coefficients,
        linear=linear,
        ema_decay=ema_decay,
        base=base,
        scale=scale,
        slerp=slerp,
        accumulate=accumulate,
    )
    writing = replace(writing, to=merge_target(writing.to, dst).name)
    return run_conversion(src, dst, replace(reading, average=request), writing, running)
