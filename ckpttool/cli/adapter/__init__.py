"""`ckpttool adapter ...`: one module per command."""

from __future__ import annotations

from ..help import App
from .extract import extract
from .merge import MergeCommand, merge

__all__ = ["app"]

app = App(
    name="adapter",
    help="LoRA adapters: take one out of a checkpoint, or merge it into its base model.",
    no_args_is_help=True,
)
app.command()(extract)
app.command(cls=MergeCommand)(merge)
