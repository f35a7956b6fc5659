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
    """Run a command for an event, with what it prints on stderr, and wait for it.

    Args:
        words: of the command, with {path}, {name}, {step}, {digest} and {state} to be replaced in each.
        state: the folder of the journal.

    Returns:
        {"command": its words, "status": its exit status; 127 where it cannot be started}.
    """
    digest = event.get("digest", {}).get("all", "")
    step = "" if event["step"] is None else str(event["step"])
    values = {"path": event["path"], "name": event["name"], "step": step, "digest": digest, "state": state}
    filled = [_fill(word, values) for word in words]
    environment = {**os.environ, "CKPTTOOL_EVENT": json.dumps(event)}
    try:
        sys.stderr.flush()
        done = subprocess.run(filled, stdin=subprocess.DEVNULL, stdout=2, env=environment, check=False)
    except OSError as e:
        return {"command": filled, "status": 127, "why": e.strerror}
    return {"command": filled, "status": done.returncode}


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Replace "{path}" and the other names in braces in a word; what is put in is not looked at again."""
    out, rest = "", word
    while rest:
        name = next((n for n in values if rest.startswith("{" + n + "}")), None)
        out += rest[0] if name is None else values[name]
        rest = rest[1 if name is None else len(name) + 2 :]
    return out
