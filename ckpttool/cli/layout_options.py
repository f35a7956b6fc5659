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

__all__ = ["HfCommand", "LayoutCommand", "add_layout_options", "list_trainers"]

_META = "ckpttool.layout_options"


def list_trainers(called: bool = False) -> list[str]:
    """Return the names of trainers that `--for` accepts.

    Args:
        called: whether to append the other names of a trainer to its name, in parentheses.
    """
    from ..layouts import list_resuming_programs

    known = [program for _, program in list_resuming_programs().values() if not program.refused]
    return [p.name + (f" ({p.called})" if called and p.called else "") for p in known]


def add_layout_options(ctx: typer.Context, writing: WriteRequest, dst: str) -> WriteRequest:
    """Return a copy of a request with its layout, and with the options of that layout that the user passed.

    Args:
        ctx: click's context of the command, in which the layout options were stored.
        writing: the request; if it names no layout, that is chosen by `dst`.
        dst: the destination.

    Raises:
        UsageError: the layout is unknown, or an option belongs to other layouts.
    """
    from ..layouts import choose_target_layout, make_layout_options

    target = choose_target_layout(writing.to, dst)
    return replace(writing, to=target.name, options=make_layout_options(target, dict(ctx.meta.get(_META, {}))))


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
                    option.help = option.help.format(trainers=", ".join(list_trainers()))
            self._made = [*self._own, *(o for o in _make_layout_options(self.targets) if o.opts[0] not in self.without)]
        return self._made

    @params.setter
    def params(self, own: list[Any]) -> None:
        """Keep the command's own options; those of layouts are made again."""
        self._own, self._made = own, None

    _own: list[Any]
    _made: list[Any] | None


class HfCommand(LayoutCommand):
    """A command that writes hf."""

    targets = (HUB_LAYOUT,)


def _make_layout_options(targets: tuple[str, ...] | None) -> list[TyperOption]:
    """Return the command-line options of layouts: one for each flag, which may set a field of the options of several
    layouts.

    Args:
        targets: names of the layouts; None: all that can be written.

    Raises:
        UsageError: fields of the same flag have different types.
    """
    from .. import layouts

    of: dict[str, list[tuple[Layout, Field[Any]]]] = {}
    for layout in layouts.layouts().values():
        if layout.write is not None and (targets is None or layout.name in targets):
            for flag, f in layouts.list_layout_flags(layout).items():
                of.setdefault(flag, []).append((layout, f))
    return [_make_layout_option(flag, rows) for flag, rows in of.items()]


def _make_layout_option(flag: str, rows: list[tuple[Layout, Field[object]]]) -> TyperOption:
    """Return the command-line option `flag`.

    Args:
        rows: (layout, field of its options) of each field that the flag sets; at least one.

    Raises:
        UsageError: the fields have different types.
    """
    from .. import layouts

    names = ", ".join(layout.name for layout, _ in rows)
    kind, *others = {layouts.get_option_type(layout, f) for layout, f in rows}
    if others:
        raise UsageError(f"{names} have an option {flag}, but of different types. Rename it in one of them.")
    field = rows[0][1]
    size, default = field.metadata["size"], field.default
    text = " ".join(dict.fromkeys(f.metadata["help"] for _, f in rows))
    if size and isinstance(default, int):
        text += f"  [default: {default // 10**9}GB]"

    def keep(ctx: Any, param: object, value: Any) -> None:
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
