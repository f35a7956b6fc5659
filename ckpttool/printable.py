"""Texts with names from checkpoints, made safe to print.

    printable("a\\x1b[2J größe") == "a\\\\x1b[2J größe"

A name may hold anything: controls of a terminal, line ends that forge lines of ours, marks that turn the direction of
text. Whatever Python calls not printable (controls, formatting and bidirectional marks, invisible spaces, line
separators, bytes that are not UTF-8) is spelled out, and letters of every script stay as they are. Errors spell out
their own text; the command line does so with every line that it prints (`cli.terminal`), and reports with every name.
In JSON the escapes are JSON's, so that a name read back is the exact one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Shown", "printable", "printable_json", "printable_lines"]


def printable(text: str) -> str:
    """The text as one line: each character that does not print, line ends too, as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for a text of several lines, whose line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(data: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Data as JSON, indented; readable beyond ASCII, with \\u escapes for what does not print. `default` is that of
    json.dumps."""
    text = json.dumps(data, indent=1, ensure_ascii=False, default=default)
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


class Shown:
    """A result that people look at: its `lines` are its text, and what a notebook shows."""

    def lines(self) -> Iterator[str]:
        """What to print, line by line."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines()))

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.2">{html.escape(str(self))}</pre>'
