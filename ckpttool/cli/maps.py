"""`ckpttool maps`: the name maps that come with ckpttool, and the text of one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ..errors import UsageError, argument
from .help import READING, about
from .terminal import Json, Meter, Quiet, note, print_json, say

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
    ("A proposal for your own model", "ckpttool maps run/ckpt --derive llama"),
    ("For a script", "ckpttool maps --json"),
    exits=(*READING, 5),
    meaning={5: "--derive left something undecided"},
)
def maps(
    name: Annotated[
        str | None,
        typer.Argument(help="The map to print; with --derive, the checkpoint to start from.", show_default=False),
    ] = None,
    derive: Annotated[
        str | None,
        typer.Option(
            "--derive",
            help="Propose a map from the checkpoint NAME to this model: another checkpoint, or a config.json.",
            metavar="PATH|HF_ID",
        ),
    ] = None,
    prove_logits: Annotated[
        bool,
        typer.Option("--prove-logits", help="With --derive: compare what NAME computes with and without the map."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the name maps, by which `convert --map` renames keys for other model code; print one; or propose one."""
    if derive is not None:
        _print_derived_map(name, derive, prove_logits, as_json, quiet)
        return
    if prove_logits:
        raise UsageError(
            f"{argument('prove_logits', True)} needs --derive, which says what to compare with.", code="CKPT0204"
        )
    from ..huggingface import maps as known

    found = [known.load_map(n) for n in (known.list_map_names() if name is None else [name])]
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


def _print_derived_map(name: str | None, other: str, prove_logits: bool, as_json: bool, quiet: bool) -> None:
    """Derive a name map from two models, and print it; exit with status 5 if some names have no counterpart yet.

    Args:
        name: the checkpoint whose names are on the left side; None is an error.
        other: the model whose names are on the right side: another checkpoint, or a config.json.
        prove_logits: compare the logits with and without the map.
        as_json: print JSON.
        quiet: print no progress and no notes.

    Raises:
        UsageError: `name` is None.
    """
    from ..engine.map_proposals import derive_map

    if name is None:
        raise UsageError(
            f"{argument('derive', other)}: a map has two sides. Give the checkpoint to start from as well: `ckpttool "
            f"maps CHECKPOINT --derive {other}`.",
            code="CKPT0204",
        )
    with Meter(quiet) as meter:
        found = derive_map(name, other, prove_logits=prove_logits, progress=meter)
    if as_json:
        print_json({**asdict(found), "complete": found.complete})
    else:
        for line in found.text.splitlines():
            say(line)
        for text in (*found.notes, found.headline()):
            note(text, quiet)
    if not found.complete:
        raise typer.Exit(5)
