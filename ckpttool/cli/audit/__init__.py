"""`ckpttool audit ...`: one module per command, or per few that belong together."""

from __future__ import annotations

from ..help import App
from ..layout_options import LayoutCommand
from . import ledger_commands, store_commands
from .export_command import export
from .restore_command import restore
from .verify_command import verify

__all__ = ["app"]

app = App(
    name="audit",
    help="Keep checkpoints for years, in archives that anyone can check, with signatures, retention and a ledger.",
    no_args_is_help=True,
)
ledger_app = App(name="ledger", help="The hash-chained log of a store.", no_args_is_help=True)
app.add_typer(ledger_app)
app.command()(export)
app.command()(verify)
app.command(cls=LayoutCommand)(restore)
app.command("list")(store_commands.list_)
app.command()(store_commands.prune)
app.command()(store_commands.hold)
app.command()(store_commands.release)
ledger_app.command("verify")(ledger_commands.verify)
ledger_app.command("add")(ledger_commands.add)
ledger_app.command("show")(ledger_commands.show)
