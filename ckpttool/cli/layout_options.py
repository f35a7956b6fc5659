"""Options of the command line that belong to a layout, made from the fields of `Layout.options` when a command needs
them.

A `LayoutCommand` has its own options and those of every layout that it can write, one panel per layout; `given(ctx)`
returns the values that the user passed. `ckpttool --help` and other commands import no layout.
"""

from __future__ import annotations

from dataclasses import Field
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperOption

from ..errors import UsageError
from .help import WRITING, Command
from .terminal import bytes_of

if TYPE_CHECKING:
    from ..layouts import Layout

__all__ = ["HfCommand", "LayoutCommand", "given"]

_META = "ckpttool.layout_options"


def given(ctx: typer.Context) -> dict[str, Any]:
    """{flag: value} of the layout options that the user passed."""
    return dict(ctx.meta.get(_META, {}))


class LayoutCommand(Command):
    """A command that takes the options of every layout that can be written."""

    targets: tuple[str, ...] | None = None  # of all layouts where None
    without: tuple[str, ...] = ()  # options that the command has itself, or that make no sense for it

    @property
    def params(self) -> list[Any]:
        """The command's own options, then those of layouts."""
        if self._made is None:
            self._made = [*self._own, *(o for o in _options(self.targets) if o.opts[0] not in self.without)]
        return self._made

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._own, self._made = own, None

    _own: list[Any]
    _made: list[Any] | None


class HfCommand(LayoutCommand):
    """A command that writes hf."""

    targets = ("hf",)


def _options(targets: tuple[str, ...] | None) -> list[TyperOption]:
    """One option per field; layouts share an option of the same name."""
    from .. import layouts

    of: dict[str, list[tuple[Layout, Field[Any]]]] = {}
    for layout in layouts.layouts().values():
        if layout.write is not None and (targets is None or layout.name in targets):
            for flag, f in layouts.flags_of(layout).items():
                of.setdefault(flag, []).append((layout, f))
    return [_option(flag, rows) for flag, rows in of.items()]


def _option(flag: str, rows: list[tuple[Layout, Field[Any]]]) -> TyperOption:
    from .. import layouts

    names = ", ".join(layout.name for layout, _ in rows)
    kind, *others = {layouts.type_of(layout, f) for layout, f in rows}
    if others:
        raise UsageError(f"{names} have an option {flag}, but of different types. Rename it in one of them.")
    field = rows[0][1]
    size, default = field.metadata["size"], field.default
    text = " ".join(dict.fromkeys(f.metadata["help"] for _, f in rows))
    if size and isinstance(default, int):
        text += f"  [default: {default // 10**9}GB]"

    def keep(ctx: Any, param: Any, value: Any) -> None:
        if value is not None:  # 0 and False are values
            ctx.meta.setdefault(_META, {})[flag] = bytes_of(value) if size else value

    is_flag = kind is bool
    no = f"/--no-{flag[2:]}" if is_flag and default is True else ""
    return TyperOption(
        param_decls=[flag + no],
        type=None if is_flag else str if size else kind,
        is_flag=is_flag,
        default=None,
        help=text,
        metavar="SIZE" if size else field.metadata["metavar"],
        expose_value=False,
        callback=keep,
        rich_help_panel=f"{WRITING}{names}",
        show_default=False,
    )
