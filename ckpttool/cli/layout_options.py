"""Options of the command line that belong to a layout, made from the fields of `Layout.options` when a command needs
them.

A `LayoutCommand` has its own options and those of every layout that it can write, one panel per layout;
`add_layout_options` takes over the values that the user passed. `ckpttool --help` and other commands import no layout.
"""

from __future__ import annotations

from dataclasses import Field, replace
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperOption

from ..errors import UsageError
from ..options import HUB_LAYOUT, WriteRequest, parse_size
from .help import WRITING, Command

if TYPE_CHECKING:
    from ..layouts import Layout

__all__ = ["HfCommand", "LayoutCommand", "add_layout_options", "trainers"]

_META = "ckpttool.layout_options"


def trainers(called: bool = False) -> list[str]:
    """Return the names that `--for` takes; with `called`, each followed by what else people call it, in parentheses."""
    from ..layouts import for_trainers

    known = [program for _, program in for_trainers().values() if not program.refused]
    return [p.name + (f" ({p.called})" if called and p.called else "") for p in known]


def add_layout_options(ctx: typer.Context, writing: WriteRequest, dst: str) -> WriteRequest:
    """Return a request with its layout and the options of that, which the user passed.

    Args:
        ctx: click's context of the command, where these options were kept.
        writing: the request; if it names no layout, `dst` tells it.
        dst: the destination.

    Raises:
        UsageError: there is no such layout, or an option is for others.
    """
    from ..layouts import options_of, target_of

    target = target_of(writing.to, dst)
    return replace(writing, to=target.name, options=options_of(target, dict(ctx.meta.get(_META, {}))))


class LayoutCommand(Command):
    """A command that takes the options of every layout that can be written."""

    targets: tuple[str, ...] | None = None  # of all layouts where None
    without: tuple[str, ...] = ()  # options that the command has itself, or that make no sense for it

    @property
    def params(self) -> list[Any]:
        """Return the command's own options, then those of layouts, which are made when they are first asked for."""
        if self._made is None:
            for option in self._own:
                if "{trainers}" in (option.help or ""):
                    option.help = option.help.format(trainers=", ".join(trainers()))
            self._made = [*self._own, *(o for o in _make_options(self.targets) if o.opts[0] not in self.without)]
        return self._made

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._own, self._made = own, None

    _own: list[Any]
    _made: list[Any] | None


class HfCommand(LayoutCommand):
    """A command that writes hf."""

    targets = (HUB_LAYOUT,)


def _make_options(targets: tuple[str, ...] | None) -> list[TyperOption]:
    """Return the command-line options of layouts: one for each field of their options, or for fields of the same name.

    Args:
        targets: names of these layouts; None: all that can be written.

    Raises:
        UsageError: fields of the same name have different types.
    """
    from .. import layouts

    of: dict[str, list[tuple[Layout, Field[Any]]]] = {}
    for layout in layouts.layouts().values():
        if layout.write is not None and (targets is None or layout.name in targets):
            for flag, f in layouts.flags_of(layout).items():
                of.setdefault(flag, []).append((layout, f))
    return [_make_option(flag, rows) for flag, rows in of.items()]


def _make_option(flag: str, rows: list[tuple[Layout, Field[Any]]]) -> TyperOption:
    """Return the command-line option `flag`.

    Args:
        rows: (layout, field of its options) that it sets; one or more.

    Raises:
        UsageError: the fields are of different types.
    """
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
        """Keep the value that the user passed, in click's context, for `add_layout_options`; None: nothing was
        passed."""
        if value is not None:  # 0 and False are values
            ctx.meta.setdefault(_META, {})[flag] = parse_size(value) if size else value

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
