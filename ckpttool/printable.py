"""Texts with names from checkpoints, made safe to print.

    printable("a\\x1b[2J größe") == "a\\\\x1b[2J größe"

A name may hold anything: controls of a terminal, line ends that forge lines of ours, marks that turn the direction of
text. Whatever Python calls not printable (controls, formatting and bidirectional marks, invisible spaces, line
separators, bytes that are not UTF-8) is spelled out, and letters of every script stay as they are. Errors spell out
their own text; the command line does so with every line that it prints (`cli.terminal`), and reports with every name.
In JSON the escapes are JSON's, so that a name read back is the exact one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = [
    "Shown",
    "count_noun",
    "escape_unprintable",
    "list_first",
    "printable",
    "printable_json",
    "printable_lines",
    "quote_path",
    "replace_non_finite_numbers",
    "shorten_middle",
]


def printable(text: str) -> str:
    """Return a text as one line: each character that does not print, line ends too, becomes an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def quote_path(path: str) -> str:
    """Return a path, quoted for a shell; "./" comes before a dash, which would begin an option."""
    from shlex import quote

    return quote(f"./{path}" if path.startswith("-") else path)


def escape_unprintable(text: object, word: int = 0) -> str:
    """Return a text with its unprintable characters spelled out: escape_unprintable("a\\n") == "a\\\\n".

    Args:
        text: any object; what str() makes of it is used.
        word: the most characters of one word, which is shortened in the middle, where tensor names differ least; 0 for
            no limit.
    """
    out = printable(str(text))
    if word:
        out = re.sub(rf"\S{{{word + 1},}}", lambda m: shorten_middle(m[0], word), out)
    return out


def shorten_middle(text: str, width: int) -> str:
    """Shorten a text to `width` characters, by an ellipsis in its middle; one that is not longer is returned as it
    is."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def printable_lines(text: str) -> str:
    """Return a text of several lines with an escape for each character that does not print; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(data: object, default: Callable[[object], object] | None = None, depth: int | None = None) -> str:
    """Return data as indented JSON: letters of every script stay as they are, and what does not print becomes an escape
    of JSON.

    Args:
        data: dicts, lists, strings, numbers, True, False and None; without `depth` also objects that `default`
            converts.
        default: returns plain data for an object that JSON has no form for, as in `json.dumps`; None to raise a
            TypeError for such an object. It is not used with `depth`.
        depth: how many levels of containers get a line for each entry; deeper containers are on one line each. None for
            all levels.
    """
    if depth is None:
        text = json.dumps(data, indent=1, ensure_ascii=False, default=default)
    else:
        text = "".join(_iterate_json_pieces(data, depth, 1))
    return "\n".join(line if line.isprintable() else _escape_as_json(line) for line in text.split("\n"))


def _iterate_json_pieces(data: object, depth: int, level: int) -> Iterator[str]:
    """Yield pieces of text that together are data as JSON.

    Args:
        data: plain data.
        depth: how many levels of containers get a line for each entry; deeper containers are on one line each.
        level: the level of `data` itself, by which its entries are indented; 1 for the outermost container.
    """
    if depth < level or not data or not isinstance(data, (dict, list)):
        yield json.dumps(data, ensure_ascii=False)
        return
    opening, closing = "{}" if isinstance(data, dict) else "[]"
    for i, key in enumerate(data):
        yield f"{',' if i else opening}\n{' ' * level}"
        if isinstance(data, dict):
            yield json.dumps(key, ensure_ascii=False) + ": "
        yield from _iterate_json_pieces(data[key] if isinstance(data, dict) else key, depth, level + 1)
    yield f"\n{' ' * (level - 1)}{closing}"


def _escape_as_json(line: str) -> str:
    """Return a line of JSON with a JSON escape for each character that does not print."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def replace_non_finite_numbers(data: object) -> Any:
    """Return plain data in which numbers that JSON does not have (infinities and NaN) are replaced by text."""
    if isinstance(data, dict):
        return {k: replace_non_finite_numbers(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [replace_non_finite_numbers(v) for v in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def count_noun(n: int, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun; `plural` where that is not the noun with an s.

    >>> count_noun(1, "rank"), count_noun(1024, "rank"), count_noun(0, "entry", "entries")
    ('1 rank', '1,024 ranks', '0 entries')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def list_first(names: Iterable[object], most: int = 3) -> str:
    """List the first `most` names, and say how many there are besides.

    >>> list_first("abcd", 2), list_first("ab", 2)
    ('a, b and 2 more', 'a, b')
    """
    every = list(map(str, names))
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


class Shown:
    """A result that people look at: its `lines` are its text, and what a notebook shows; its repr is one line."""

    def lines(self) -> Iterator[str]:
        """Yield the text of the result, line by line, without line ends. Subclasses define it."""
        raise NotImplementedError

    def headline(self) -> str:
        """Return the result in one line: the first of its text, unless a subclass knows a better one."""
        return next(self.lines(), "")

    def __str__(self) -> str:
        """Return the whole text of the result, with an escape for each character that does not print."""
        return "\n".join(map(printable, self.lines()))

    def __repr__(self) -> str:
        """Return the class and the headline of the result, on one line."""
        return f"<{type(self).__name__}: {printable(self.headline())}>"

    def _repr_html_(self) -> str:
        """Return the text of the result as HTML, which a notebook shows."""
        import html  # half of what it takes is a table of entities

        return f'<pre style="line-height:1.2">{html.escape(str(self))}</pre>'
