"""delta: what changed between two checkpoints, as one archive; a conversion of their difference (difference.py).
Everything that holds for `convert` holds for it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from .. import layouts
from ..options import ARCHIVE_LAYOUT, DeltaKeywords, list_keywords, split_keywords
from ..storage.urls import make_absolute
from .conversion import ConvertResult, run_conversion
from .destination import normalise_destination, refuse_overlapping_destination
from .opening import OpenCheckpoint
from .own_deltas import get_delta_facts, open_own_delta

__all__ = ["delta"]


def _open_written_delta(dst: str | os.PathLike[str]) -> OpenCheckpoint:
    """Open the delta that `delta` has just written to the path or URL `dst`."""
    made = open_own_delta(layouts.place(dst))
    assert made is not None
    return made


@list_keywords
def delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    level: int = 3,
    **keywords: Unpack[DeltaKeywords],
) -> ConvertResult:
    """Write the delta between two checkpoints, in any layouts, from which `convert(old, ..., apply=[dst])` writes the
    new one, bit for bit.

    It is an archive of the bytes of both XORed, in byte planes and zstd, with the digests of every tensor of both.

    Args:
        old: the checkpoint that the delta will be applied to.
        new: the checkpoint that the delta produces.
        dst: the file or URL to write, named *.tar.zst.
        level: compression level of zstd, from 1 to 19.
        only: components to compare; None for the weights, ["model"]; ["model", "optim", ...] for more of the state,
            with the values of the new one.
        (the others): as `convert`.

    Returns:
        The result of writing `dst`; its `digest` has the root digests of both: {"base", "result"}.

    Raises:
        CkpttoolError: one of the two cannot be read, or the delta cannot be written.
    """
    reading, writing, running = split_keywords(keywords)
    before = make_absolute(os.fspath(old))
    refuse_overlapping_destination(before, normalise_destination(dst))
    kind = layouts.find(ARCHIVE_LAYOUT).options
    assert kind is not None
    reading = replace(reading, difference_to=before, only=reading.only or ("model",))
    writing = replace(writing, to=ARCHIVE_LAYOUT, options=kind(level=level, shuffle=True))
    done = run_conversion(new, dst, reading, writing, running)
    with _open_written_delta(dst) as made:
        facts = get_delta_facts(made)
    return replace(done, digest={"base": facts["base"], "result": facts["result"]})
