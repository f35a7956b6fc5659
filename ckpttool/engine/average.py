"""average: one model of several checkpoints of it, in any layouts; a conversion of a checkpoint whose weights are
computed (averaging.py). Everything that holds for `convert` holds for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Unpack

from ..errors import UsageError
from ..index.checkpoint import parse_floating_dtype
from ..options import AverageKeywords, AverageRequest, list_keywords, split_keywords
from ..storage.urls import make_absolute
from .adapter import choose_layout_or_hf
from .conversion import ConvertResult, run_conversion
from .destination import normalise_destination, refuse_overlapping_destination

__all__ = ["average", "make_average_request"]


def make_average_request(
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
    """Build the request that averages several checkpoints; the arguments are those of `average`.

    Returns:
        (path of the first checkpoint, the request with the other checkpoints and the numbers).

    Raises:
        UsageError: there is no checkpoint, the arguments contradict each other, or the destination is one of the
            checkpoints.
    """
    first, *others = [make_absolute(os.fspath(path)) for path in sources] or [""]
    if not first:
        raise UsageError("No checkpoint was given.", code="CKPT0202")
    scales = None if scale is None else (float(scale),) if isinstance(scale, (int, float)) else tuple(scale)
    request = AverageRequest(
        others=tuple(others),
        coefficients=None if coefficients is None else tuple(coefficients),
        linear=linear,
        ema_decay=ema_decay,
        base=None if base is None else make_absolute(os.fspath(base)),
        scale=scales,
        slerp=slerp,
        accumulate=parse_floating_dtype(accumulate),
    )
    for path in (*request.others, *([] if request.base is None else [request.base])):
        refuse_overlapping_destination(path, normalise_destination(dst))
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
        ema_decay: compute an EMA over the checkpoints in their order: a = decay * a + (1 - decay) * x, starting from
            the first checkpoint.
        base: a checkpoint, for task arithmetic: base + the sum of scale * (x - base).
        scale: with `base`: a number, or one for each checkpoint; None for 1.
        slerp: interpolate two checkpoints along the arc, tensor by tensor: 0 is the first checkpoint, 1 the second.
        accumulate: dtype of the computation, "fp64" or "fp32"; weights in float64 always use fp64.
        weights: which weights of each checkpoint are its model, as in `convert`.
        to: layout to write; None to infer it from the name of `dst`, or "hf" if that name does not tell.
        (the others): as `convert`; `source_layout` applies to those checkpoints that may be of this layout.

    Raises:
        Unsupported: the checkpoints differ in names, shapes or dtypes, or hold quantised weights.
    """
    reading, writing, running = split_keywords(keywords)
    src, request = make_average_request(
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
    writing = replace(writing, to=choose_layout_or_hf(writing.to, dst).name)
    return run_conversion(src, dst, replace(reading, average=request), writing, running)
