"""The man page ckpttool.1, made from the same declarations as --help. setup.py writes it while a wheel is built:
`python -m ckpttool.cli.man`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from .._version import __version__
from .help import get_about
from .main import build_app, list_commands

__all__ = ["make_man_page"]


def make_man_page() -> str:
    """Return the text of the man page ckpttool.1, in roff."""
    program: Any = typer.main.get_command(build_app())
    lines = [
        f'.TH CKPTTOOL 1 "" "ckpttool {__version__}" "User Commands"',
        ".SH NAME",
        f"ckpttool \\- {_escape_roff(program.help.splitlines()[0]).rstrip('.')}",
        ".SH SYNOPSIS",
        ".B ckpttool",
        ".I COMMAND",
        "[OPTIONS] [ARGUMENTS]",
        *_describe_examples(program),
        ".SH COMMANDS",
    ]
    for name, command in list_commands(program):
        lines += _describe_command(name, command)
    return "\n".join(lines) + "\n"


def _describe_command(name: str, command: Any) -> list[str]:
    """Return the lines of roff that describe a command: usage, help, options, examples and exit codes.

    Args:
        name: all words of the command after "ckpttool".
        command: the command, an object of typer.
    """
    ctx = command.make_context(name, [], resilient_parsing=True)
    arguments = [p for p in command.get_params(ctx) if p.param_type_name == "argument"]
    usage = " ".join(_escape_roff(p.make_metavar(ctx)) for p in arguments)
    lines = [f".SS ckpttool {_escape_roff(name)} [OPTIONS] {usage}".rstrip()]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [".PP", _escape_roff(" ".join(paragraph.split()))]
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            lines += [".TP", f"\\fB{_escape_roff(record[0])}\\fR", _escape_roff(record[1])]
    return lines + _describe_examples(command)


def _describe_examples(command: object) -> list[str]:
    """Return the lines of roff with the examples and exit codes of a command; [] if it has none."""
    said = get_about(command)
    if said is None:
        return []
    lines = [".PP", "Examples:"]
    for what, line in said.examples:
        lines += [".PP", ".nf", f"# {_escape_roff(what)}", _escape_roff(line), ".fi"]
    codes = "; ".join(f"{code} {text}" for code, text in said.exits.items())
    return [*lines, ".PP", _escape_roff(f"Exit codes: {codes}.")]


def _escape_roff(text: str) -> str:
    """Return a text for roff: on one line, with dashes that can be copied, and escaped where roff would read a
    command."""
    out = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{out}" if out[:1] in (".", "'") else out


if __name__ == "__main__":
    sys.stdout.write(make_man_page())
