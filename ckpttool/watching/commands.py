"""Commands that a user has a watcher run for events, without a shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

from ..errors import UsageError, argument
from .journal import Event

__all__ = ["run_command", "split_command"]


def split_command(option: str, command: str | None) -> list[str] | None:
    """Split the command of an option into words, as a shell does; nothing is expanded. None stays None.

    Raises:
        UsageError: a quote is not closed, or there is no word.
    """
    if command is None:
        return None
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise UsageError(f"{argument(option, command)} is not a command: {e}.", code="CKPT0203") from None
    if not words:
        raise UsageError(f"{argument(option, command)} is not a command.", code="CKPT0203")
    return words


def run_command(words: list[str], event: Event, state: str) -> Event:
    """Run a command for an event and wait for it. Its output goes to stderr; $CKPTTOOL_EVENT holds the event as JSON.

    Args:
        words: words of the command; {path}, {name}, {step}, {digest} and {state} are replaced in each.
        event: the event of the journal.
        state: the folder of the journal.

    Returns:
        {"command": words that were run, "status": exit status; 127 if it cannot be started, then with "why"}.
    """
    digest = event.get("digest", {}).get("all", "")
    step = "" if event["step"] is None else str(event["step"])
    values = {"path": event["path"], "name": event["name"], "step": step, "digest": digest, "state": state}
    filled = [_fill_placeholders(word, values) for word in words]
    environment = {**os.environ, "CKPTTOOL_EVENT": json.dumps(event)}
    try:
        sys.stderr.flush()
        done = subprocess.run(filled, stdin=subprocess.DEVNULL, stdout=2, env=environment, check=False)
    except OSError as e:
        return {"command": filled, "status": 127, "why": e.strerror}
    return {"command": filled, "status": done.returncode}


def _fill_placeholders(word: str, values: Mapping[str, str]) -> str:
    """Replace "{name}" in a word by the value of each name in `values`. Braces inside an inserted value are not
    replaced."""
    out, rest = "", word
    while rest:
        name = next((n for n in values if rest.startswith("{" + n + "}")), None)
        out += rest[0] if name is None else values[name]
        rest = rest[1 if name is None else len(name) + 2 :]
    return out
