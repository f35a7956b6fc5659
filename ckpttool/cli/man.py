"""The man page ckpttool.1, made from the same declarations as --help. setup.py writes it while a wheel is built:
`python -m ckpttool.cli.man`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from .._version import __version__
from .help import about_of
from .main import build_app, commands

__all__ = ["page"]


def page() -> str:
    """The text of ckpttool.1, in roff."""
    program: Any = typer.main.get_command(build_app())
    lines = [
        f'.TH CKPTTOOL 1 "" "ckpttool {__version__}" "User Commands"',
        ".SH NAME",
        f"ckpttool \\- {_text(program.help).rstrip('.')}",
        ".SH SYNOPSIS",
        ".B ckpttool",
        ".I COMMAND",
        "[OPTIONS] [ARGUMENTS]",
        *_about(program),
        ".SH COMMANDS",
    ]
    for name, command in commands(program):
        lines += _command(name, command)
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> list[str]:
    ctx = command.make_context(name, [], resilient_parsing=True)
    arguments = [p for p in command.get_params(ctx) if p.param_type_name == "argument"]
    usage = " ".join(_text(p.make_metavar(ctx)) for p in arguments)
    lines = [f".SS ckpttool {_text(name)} [OPTIONS] {usage}".rstrip()]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [".PP", _text(" ".join(paragraph.split()))]
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            lines += [".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1])]
    return lines + _about(command)


def _about(command: Any) -> list[str]:
    said = about_of(command)
    if said is None:
        return []
    lines = [".PP", "Examples:"]
    for what, line in said.examples:
        lines += [".PP", ".nf", f"# {_text(what)}", _text(line), ".fi"]
    codes = "; ".join(f"{code} {text}" for code, text in said.exits.items())
    return [*lines, ".PP", _text(f"Exit codes: {codes}.")]


def _text(text: str) -> str:
    """A text in roff: dashes can be copied, and no line begins with a roff command."""
    out = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{out}" if out[:1] in (".", "'") else out


if __name__ == "__main__":
    sys.stdout.write(page())
