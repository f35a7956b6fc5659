"""`ckpttool inspect`: parse, call, draw."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from ..errors import UsageError, argument
from .help import READING, about
from .terminal import (  # fmt: skip
    Config,
    FlatLayout,
    From,
    Json,
    Like,
    Src,
    Tag,
    Wrap,
    comma,
    draw,
    print_json,
)

__all__ = ["inspect"]


@about(
    ("Layout, step, ranks, components, optimizer", "ckpttool inspect run/ckpt"),
    ("All names", "ckpttool inspect step3.pt --tree"),
    ("File and byte range of every chunk", "ckpttool inspect run/ckpt --tensor '*.mlp.down_proj.weight'"),
    exits=READING,
)
def inspect(
    path: Src,
    show_tree: Annotated[bool, typer.Option("--tree", help="Print all names as a tree.")] = False,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor", help="Print file and byte range of every chunk of the tensors that match.", metavar="GLOB"
        ),
    ] = None,
    from_: From = None,
    config: Config = None,
    like: Like = None,
    flat_layout: FlatLayout = None,
    wrap: Wrap = None,
    tag: Tag = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains and what it lacks; reads only headers."""
    import fnmatch

    from ..engine import inspect as look
    from ..engine.opening import open as open_checkpoint

    with open_checkpoint(
        path, source_layout=from_, config=config, like=like, flat_layout=flat_layout, wrap=comma(wrap), tag=tag,
        allow_equal_ranks=True, allow_mixed_steps=True,
    ) as opened:  # fmt: skip
        if tensor is not None:
            ckpt = opened.locate()
            names = [n for n in ckpt.tensors if fnmatch.fnmatchcase(n, tensor)]
            if not names:
                raise UsageError(_no_match(tensor, ckpt.tensors))
            rows = look.tensor_rows(ckpt, names)
            if as_json:
                print_json(rows)
                return
            for r in rows:
                print(f"{r['name']}  {r['dtype']} {r['shape']}  {look.human(r['bytes'])}, {r['chunks']} chunks")
                for c in r["where"]:
                    spans = ", ".join(f"{a}:{a + n}" for a, n in zip(c["start"], c["shape"], strict=True))
                    print(f"    [{spans}]  {c['file']} bytes {c['offset']}..{c['offset'] + c['length']}")
            return
        s = look.summarise(opened.checkpoint, path)
        if as_json:
            listed = {n: [t.dtype, list(t.shape)] for n, t in opened.checkpoint.tensors.items()} if show_tree else None
            print_json({**s.to_json(), **({} if listed is None else {"names": listed})})
            return
        draw(look.screen(s), *([look.tree(opened.checkpoint)] if show_tree else []))


def _no_match(pattern: str, names: Iterable[str]) -> str:
    """What to type instead of a pattern that no name matches."""
    from difflib import get_close_matches

    near = [n for n in names if pattern.strip("*").lower() in n.lower()]
    if near and pattern.strip("*"):
        hint = f"{'1 name contains' if len(near) == 1 else f'{len(near)} names contain'} it, first {near[0]}: use '*{pattern.strip('*')}*'"
    elif close := get_close_matches(pattern, list(names), 1, 0.5):
        hint = f"did you mean {close[0]!r}?"
    else:
        hint = f"the first is {next(iter(names), None)!r}"
    return f"{argument('tensor')} {pattern!r}: no tensor matches; {hint}."
