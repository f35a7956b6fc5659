"""`describe_event`: the lines that say an event of the journal to people."""

from __future__ import annotations

import shlex

from ..printable import list_first
from .journal import Event

__all__ = ["describe_event"]

_MOST_FILES = 4  # names in a line
_WORDS = {
    "failed": "FAILED",
    "rechecked": "read again, and equal",
    "unfinished": "not finished",
    "skipped": "passed over",
    "unjudged": "not judged",
    "deleted": "deleted",
    "changed": "changed, and read again when its files rest",
}


def describe_event(event: Event) -> list[str]:
    """Return the lines of text that describe an event of the journal; empty for "begun"."""
    from ..engine.inspect import human

    kind = event["event"]
    if kind in ("begun", "trouble"):
        return [f"trouble: {event['why']}"] if kind == "trouble" else []
    what = event["name"]
    if kind == "command":
        return [f"{what}: `{shlex.join(event['command'])}` ended with {event['status']}"]
    if kind in ("deleted", "changed"):
        return [f"{what}: {_WORDS[kind]} (was {event['was']})"]
    if kind in ("unfinished", "skipped", "unjudged"):
        return [f"{what}: {_WORDS[kind]}: {event['why']}"]
    cost = f"{human(event['read_bytes'])} in {event['seconds']:.1f} s"
    lines = [f"{what}: {_WORDS.get(kind, kind)}, {cost}"]
    if kind == "verified":
        before = event.get("previous")
        compared = f"compared with {before['name']}" if before else "nothing to compare it with"
        accepted = " (accepted)" if event.get("accepted") else ""
        lines = [f"{what}: verified{accepted}, {event['layout']}, {cost}, {compared}, blake3:{event['digest']['all']}"]
    if aside := event.get("not_read"):
        lines.append(f"  warning: not read, so not proved: {list_first(aside, _MOST_FILES)}")
    return lines + [
        f"  {'warning: ' if f['severity'] == 'note' else ''}{f['kind']}: {f['text']}" for f in event.get("findings", ())
    ]
