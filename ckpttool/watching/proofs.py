"""What the process of `ckpttool.guard` runs: it looks at the saves that a training job names, and says what it finds.

The process answers one request after another (engine/workers/local_processes.py). Between them it keeps the watchers,
so that it knows for how long each save has rested. Nothing large is imported before the priority is lowered.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import CkpttoolError
from ..printable import printable
from .gentle import lower_priority

if TYPE_CHECKING:
    from .watch import Watcher

__all__ = ["judge_saves", "release_journals"]

#: A save that no layout knows is given up when it has rested for this many times `settle`.
_PATIENCE = 3

_watchers: dict[str, Watcher] = {}  # {folder of a run: its watcher}
_journals = ExitStack()  # those that are held


def judge_saves(text: str) -> str:
    """Look once at saves of a run, and read those that are finished.

    Args:
        text: JSON {"run": its folder, "names": names of the saves in it, "options": fields of `WatchRequest`}.

    Returns:
        JSON {name: {"event": event of the journal, "lines": its description, "proved": path of the newest proved save
            or null}} of the saves that are judged now.
    """
    asked = json.loads(text)
    run, names = asked["run"], frozenset(asked["names"])
    try:
        watcher = _watchers.get(run) or _start_watcher(run, asked["options"])
        watcher.only = names
        watcher.look()
    except CkpttoolError as e:  # such as a journal that another process holds
        return json.dumps({name: _make_answer(_make_unjudged_event(run, name, str(e)), None) for name in names})
    newest = watcher.newest_proved()
    proved = None if newest is None else newest.path
    return json.dumps({name: _make_answer(event, proved) for name, event in _list_verdicts(watcher)})


def release_journals(text: str) -> str:
    """Release the journals, so that other processes can open them. Argument and result are ""."""
    _watchers.clear()
    _journals.close()
    return text


def _start_watcher(run: str, options: Mapping[str, Any]) -> Watcher:
    """Open the journal of a run, and return a watcher for it, which is kept for later calls.

    Args:
        run: the folder of the run.
        options: fields of `WatchRequest`.

    Raises:
        CkpttoolError: as `open_journal`.
    """
    lower_priority()
    gc.enable()  # this process may live for days
    from .journal import open_journal
    from .request import WatchRequest
    from .watch import Watcher

    request = WatchRequest(**options)
    journal = _journals.enter_context(open_journal(request.folder_of(run), run))
    _watchers[run] = watcher = Watcher(run, request, journal, lambda event: None)
    return watcher


def _list_verdicts(watcher: Watcher) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield (name, event) of the requested saves that were judged with their present files, or that no layout
    recognises."""
    from .saves import take_fingerprint

    there = {save.name: save for save in watcher.saves}
    for name in watcher.only or ():
        if name in there:
            if (event := watcher.journal.knows(there[name])) is not None:
                yield name, event
            continue
        path = os.path.join(watcher.run, name)
        seen = take_fingerprint(path)
        if seen is not None and time.time() - seen[1] > _PATIENCE * watcher.request.settle:
            why = f"it is none of the saves that `ckpttool ls {shlex.quote(watcher.run)}` lists"
            yield (
                name,
                _make_unjudged_event(
                    watcher.run, name, f"{why}. `ckpttool inspect {shlex.quote(path)}` says what it is"
                ),
            )


def _make_unjudged_event(run: str, name: str, why: str) -> dict[str, object]:
    """Return an event that says why a save cannot be judged. It is not written to the journal."""
    return {"event": "unjudged", "name": name, "path": os.path.join(run, name), "why": why}


def _make_answer(event: Mapping[str, object], proved: str | None) -> dict[str, object]:
    """Return the answer for one save: {"event", "lines", "proved"}. `proved` is the path of the newest proved save, or
    None."""
    from .describe import describe_event

    return {"event": event, "lines": [printable(line) for line in describe_event(dict(event))], "proved": proved}
