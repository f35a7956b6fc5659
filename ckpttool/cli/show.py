"""`ckpttool show`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import OpenOptions
from .completion import complete_entry_name
from .help import READING, about
from .shared_options import add_shared_options
from .terminal import Json, Latest, Meter, Src, find_newest, note, print_json, say

__all__ = ["show"]


@about(
    ("The ends of a tensor", "ckpttool show run/ckpt model.model.norm.weight"),
    ("A part of it, of which no more is read", "ckpttool show run/ckpt 'model.lm_head.weight[2:5, :8]'"),
    ("Values, too", "ckpttool show run/ckpt 'optim.param_groups.*.lr'"),
    ("For a script", "ckpttool show run/ckpt 'model.lm_head.weight[0]' --json"),
    exits=READING,
)
@add_shared_options()
def show(
    path: Src,
    names: Annotated[
        list[str],
        typer.Argument(
            help="Names or globs of tensors and values; behind a name, an index as numpy has it.",
            show_default=False,
            autocompletion=complete_entry_name,
        ),
    ],
    reading: OpenOptions,
    latest: Latest = False,
    as_json: Json = False,
) -> None:
    """Print values: of tensors, or of a slice of one, and plain ones, such as learning rates."""
    from ..engine.copy.tensor_digests import reporting
    from ..engine.opening import open_checkpoint
    from ..engine.show import select_entries

    path = find_newest(path, latest, as_json)
    with open_checkpoint(path, reading) as opened:
        with Meter(as_json) as meter, reporting(meter):
            opened.locate()
        rows = []
        for found in select_entries(opened, names):
            if found.note:
                note(found.note)
            if as_json:
                rows.append(found.to_json())
                continue
            for line in found.lines():
                say(line)
        opened.source.assert_unchanged()
    if as_json:
        print_json(rows)
