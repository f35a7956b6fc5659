"""`ckpttool explain`: what the code of an error means, and what to do."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from .. import errors
from ..codes import get_code_prefix, load_codes
from ..errors import EXIT_CODES, UsageError
from .help import about
from .terminal import Json, print_json, say

__all__ = ["explain"]

#: How a code is printed: the heading of each part of its entry.
_PARTS = {"means": "What it means", "why": "Why it stops us", "do": "What to do"}


@about(
    ("What does this error mean?", "ckpttool explain CKPT0308"),
    ("All codes", "ckpttool explain"),
    ("Those of an exit code, or of a class of errors in Python", "ckpttool explain 4"),
    ("Those that speak of something", "ckpttool explain missing shard"),
    ("For a script", "ckpttool explain CKPT0308 --json"),
    exits=(0, 1, 2),
)
def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CODE]",
            help="The code of an error, an exit code, the name of an error class, or words to look for.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain the code of an error: what it means, why it stops ckpttool, and what to do."""
    rows = _find_entries(None if words is None else " ".join(words).strip())
    if as_json:
        print_json(rows)
        return
    if len({row["exit_code"] for row in rows}) == 1 and (len(rows) == 1 or str(rows[0]["code"]).endswith("00")):
        _print_code_entry(rows.pop(0))
        if rows:
            say()
            say("More particular codes:")
    for row in rows:
        say(f"{row['code']}  {row['title']}")


def _find_entries(asked: str | None) -> list[dict[str, object]]:
    """Return the entries of the catalogue of errors that a text asks for; None: all entries.

    A code gives its entry. A general code, an exit code or the name of an error class gives the general entry, then
    those of the same exit code. Other words give the entries that have all of them.

    Raises:
        UsageError: there is no such entry.
    """
    known = load_codes()
    rows = [{"code": code, "exit_code": int(code[4:6]) if code < "CKPT99" else 130, **e} for code, e in known.items()]
    if asked is None:
        return rows
    number = re.fullmatch(r"(?:ckpt)?[-_ ]?(\d+)", asked, re.IGNORECASE)
    kind = {n.lower(): getattr(errors, n) for n in errors.__all__}.get(asked.lower())
    if number and int(number[1]) in dict(EXIT_CODES) and len(number[1]) < 4:
        code = f"CKPT{get_code_prefix(int(number[1]))}00"
    elif number:
        code = f"CKPT{int(number[1]):04d}"
    else:
        code = getattr(kind, "code", "")
    found = [row for row in rows if code and str(row["code"]).startswith(code.removesuffix("00"))]
    if not code and asked:
        texts = [(row, " ".join(map(str, row.values())).lower()) for row in rows]
        found = [row for row, text in texts if all(word in text for word in asked.lower().split())]
        found.sort(key=lambda row: not all(word in str(row["title"]).lower() for word in asked.lower().split()))
    if not found:
        raise UsageError(
            f"No code is {asked!r}, and none has all of these words.{_suggest_code(asked, list(known))}",
            code="CKPT0207",
        )
    return found


def _suggest_code(asked: str, known: list[str]) -> str:
    """Return a sentence that suggests another argument for `ckpttool explain`.

    It is the general code of the same exit code or, if there is none, the error class whose name is most like the text.

    Args:
        asked: the text that no entry matches.
        known: all codes.
    """
    from difflib import get_close_matches

    general = re.sub(r"\D", "", asked).zfill(4)[:2] + "00"
    near = [code for code in known if code.endswith(general)] or get_close_matches(asked, errors.__all__, 1)
    return f" Try `ckpttool explain {near[0]}`." if near else " `ckpttool explain` lists all codes."


def _print_code_entry(row: dict[str, Any]) -> None:
    """Print one entry of the catalogue of errors, wrapped to the width of the terminal."""
    from shutil import get_terminal_size
    from textwrap import fill

    width = max(50, min(get_terminal_size().columns, 100))
    say(f"{row['code']}  {row['title']}")
    say(f"          exit code {row['exit_code']}: {dict(EXIT_CODES)[row['exit_code']]}")
    for part, heading in _PARTS.items():
        say()
        say(f"{heading}:")
        for line in fill(row[part], width - 2).split("\n"):
            say(f"  {line}")
    say()
    say("Commands that find out:")
    for line in row["commands"]:
        say(f"  {line}")
    if message := row.get("message"):
        say()
        say("For example:")
        for line in fill(f"error: {message}", width - 2).split("\n"):
            say(f"  {line}")
