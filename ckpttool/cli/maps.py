"""`ckpttool maps`: the name maps that come with ckpttool, and the text of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from .help import about
from .terminal import (
    Json,
    print_json,
    say,
)

__all__ = ["maps"]


@dataclass(frozen=True)
class MapRow:
    """One name map: what its two sides are called, and the model types of config.json that it is for."""

    name: str
    left: str
    right: str
    models: list[str]
    about: str


@about(
    ("A table", "ckpttool maps"),
    ("The text of one, to start your own from", "ckpttool maps torchtitan-llama3"),
    ("For a script", "ckpttool maps --json"),
    exits=(0, 1, 2),
)
def maps(
    name: Annotated[str | None, typer.Argument(help="Print the text of this map.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """List the name maps, by which `convert --map` renames keys for other model code, or print one."""
    from ..huggingface import maps as known

    found = [known.load(n) for n in (known.names() if name is None else [name])]
    rows = [MapRow(m.name, *m.sides, list(m.models), m.about) for m in found]
    if name is not None:
        text = known.read_shipped_or_own_map(name)
        if as_json:
            print_json({**asdict(rows[0]), "text": text})
            return
        for line in text.splitlines():
            say(line)
        return
    if as_json:
        print_json([asdict(r) for r in rows])
        return
    for r in rows:
        say(f"{r.name:28s} {r.left} <-> {r.right}: {', '.join(r.models)}")
