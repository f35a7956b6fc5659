"""`--help` as plain text, in sections, with examples and exit codes. Only the command that runs is built.

typer draws help with rich, whose markdown and traceback modules take longer to import than everything else that a
command needs to start, and it builds the options of every command before it knows which one is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import EXIT_CODES

__all__ = [
    "GROUPS",
    "HELP_FLAGS",
    "READING",
    "WRITING",
    "About",
    "App",
    "Command",
    "about",
    "get_about",
    "keep_called_command",
]

#: Exit codes of every command that reads a checkpoint.
READING = (0, 1, 2, 3, 4, 7, 8, 9, 14, 130)

#: {a heading of `ckpttool --help`: the commands below it, in order}.
GROUPS: dict[str, tuple[str, ...]] = {
    "Look": ("inspect", "show", "stats", "ls", "diff", "explain"),
    "Convert": ("convert", "apply", "average", "adapter", "delta", "layouts", "maps"),
    "Prove": ("verify", "doctor", "digest", "compare", "resume-verify", "watch", "acid"),
    "Keep": ("audit", "prune", "clean"),
    "Publish": ("push", "pull"),
}

#: Prefix of the titles of panels with layout options, which come last.
WRITING = "Writing "

#: What asks for help.
HELP_FLAGS = ("-h", "--help")

_WIDTH = 110  # of help, where the terminal is wider


F = TypeVar("F", bound=Callable[..., None])


@dataclass(frozen=True)
class About:
    """What --help and the man page say besides options: `examples` of (purpose, command line), `exits` {code:
    meaning}."""

    examples: tuple[tuple[str, str], ...]
    exits: Mapping[int, str]


def about(
    *examples: tuple[str, str], exits: Iterable[int], meaning: Mapping[int, str] | None = None
) -> Callable[[F], F]:
    """Return a decorator that attaches examples and exit codes to the function of a command, for --help and the man
    page.

    Args:
        examples: (purpose, command line) of each example.
        exits: exit codes that the command can end with.
        meaning: {exit code: its meaning for this command}, where `errors.EXIT_CODES` is too general; None: nowhere.
    """
    usual = dict(EXIT_CODES)
    said = About(examples, {code: (meaning or {}).get(code, usual[code]) for code in sorted(exits)})

    def decorate(function: F) -> F:
        """Attach them to a function, and return it."""
        function.__dict__["about"] = said
        return function

    return decorate


def get_about(command: Any) -> About | None:
    """Return the examples and exit codes that `about` attached to the function of a command, an object of typer; None
    if it has none."""
    return getattr(command.callback, "about", None)


def _write_examples(command: object, formatter: Any) -> None:
    """Write the examples and exit codes of a command, if it has some, with click's formatter."""
    said = get_about(command)
    if said is None:
        return
    with formatter.section("Examples"):
        for what, line in said.examples:
            formatter.write(f"{'':{formatter.current_indent}}# {what}\n{'':{formatter.current_indent}}{line}\n")
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), text) for code, text in said.exits.items()])


def _write_option_sections(command: Any, ctx: object, formatter: Any) -> None:
    """Write the arguments and options of a command to click's help formatter, in the sections that `rich_help_panel`
    names.

    Args:
        command: the command, an object of typer.
        ctx: click's context of the command.
        formatter: click's help formatter.
    """
    rows: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            rows.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    for title in sorted(rows, key=lambda t: (t != "Arguments", t.startswith(WRITING), t == "Options")):
        with formatter.section(title):
            formatter.write_dl(rows[title], col_max=34)


def _set_help_width(ctx: object, formatter: Any) -> None:
    """Set the width of click's help formatter to that of the terminal minus two columns, but at least 50 and at most
    108."""
    from shutil import get_terminal_size

    formatter.width = max(50, min(get_terminal_size().columns, _WIDTH) - 2)


class Command(TyperCommand):
    """A command whose help is plain text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write all of the help."""
        _set_help_width(ctx, formatter)
        super().format_help(ctx, formatter)

    def format_options(self, ctx: object, formatter: object) -> None:
        """Write the options in sections."""
        _write_option_sections(self, ctx, formatter)

    def format_epilog(self, ctx: object, formatter: object) -> None:
        """Write examples and exit codes."""
        _write_examples(self, formatter)


class _Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write all of the help."""
        _set_help_width(ctx, formatter)
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in sections, then the commands, in groups."""
        _write_option_sections(self, ctx, formatter)
        rows = {
            name: (found.help or "").partition("\n\n")[0].replace("\n", " ")
            for name in self.list_commands(ctx)
            if (found := self.get_command(ctx, name)) is not None and not found.hidden
        }
        width = max(map(len, rows))
        for title, names in {**(GROUPS if ctx.parent is None else {}), "Commands": tuple(rows)}.items():
            if here := [(f"{name:{width}s}", rows.pop(name)) for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl(here)

    def format_epilog(self, ctx: object, formatter: object) -> None:
        """Write examples and exit codes."""
        _write_examples(self, formatter)


class App(typer.Typer):
    """A group of commands whose help is plain text; the arguments are those of `typer.Typer`."""

    def __init__(self, **options: Any) -> None:
        """Make an empty group; `options` are those of `typer.Typer`."""
        super().__init__(cls=_Group, rich_markup_mode=None, pretty_exceptions_enable=False, **options)

    def command(self, *name: Any, **options: Any) -> Callable[[Any], Any]:
        """Decorate a function to add it as a command; the arguments are those of `typer.Typer.command`."""
        return super().command(*name, **{"cls": Command, **options})


def keep_called_command(app: typer.Typer, arguments: Sequence[str]) -> typer.Typer:
    """Return a copy of a program with only the command that the arguments call, and the groups that lead to it.

    Where the arguments ask for the list of commands, each has its name and help alone, since options take longest to
    build. If the first argument names no command or group, the program itself is returned.

    Args:
        app: the program, or one of its groups.
        arguments: those of the command line, without the program's name.
    """
    if not arguments:  # the shell asks so for completions
        return app
    word, out = arguments[0], copy(app)
    if word in HELP_FLAGS:
        return _drop_options(app)
    out.registered_commands = [c for c in app.registered_commands if _get_command_name(c) == word]
    out.registered_groups = [
        g for g in app.registered_groups if g.typer_instance and g.typer_instance.info.name == word
    ]
    if len(out.registered_commands) + len(out.registered_groups) != 1:
        return app
    for i, group in enumerate(out.registered_groups):
        out.registered_groups[i] = copy(group)
        assert group.typer_instance is not None
        out.registered_groups[i].typer_instance = keep_called_command(group.typer_instance, arguments[1:])
    return out


def _drop_options(app: typer.Typer) -> typer.Typer:
    """Return a copy of a program whose commands, and those of its groups, have names and help but no options."""
    out = copy(app)
    out.registered_commands = [_drop_command_options(c) for c in app.registered_commands]
    out.registered_groups = [copy(g) for g in app.registered_groups]
    for group in out.registered_groups:
        assert group.typer_instance is not None
        group.typer_instance = _drop_options(group.typer_instance)
    return out


def _drop_command_options(command: Any) -> Any:
    """Return a copy of a command, an object with which typer registers it, that has its help but no options."""

    def do_nothing() -> None: ...

    out = copy(command)
    do_nothing.__doc__, out.name, out.callback = command.callback.__doc__, _get_command_name(command), do_nothing
    return out


def _get_command_name(command: Any) -> str:
    """Return the word by which the command line calls a command, an object with which typer registers it."""
    return str(command.name or command.callback.__name__.replace("_", "-"))
