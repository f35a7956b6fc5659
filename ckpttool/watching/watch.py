"""The loop of `watch`: find finished saves, read each, write down what was found, and tell those who listen.

    look(journal)  one look at the run: Event after Event
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..engine.doctor.findings import DAMAGE, Finding
from ..errors import (
    CkpttoolError,
    Corrupt,
    Differs,
    SourceChanged,
    Unsafe,
    UsageError,
    argument,
)
from .examine import Examination, compare_files, describe_damage, examine
from .gentle import Pace
from .health import Portrait
from .journal import Event, Journal
from .request import WatchRequest
from .saves import Save, family, list_saves, take_fingerprint

__all__ = ["Watcher"]

_MOST_NAMES = 20  # of tensors in a finding of the journal
_MOST_FINDINGS = 50


class Watcher:
    """Watches one run.

    Args:
        run: its folder.
        tell: called with every event, after that is in the journal.

    `waiting` are the saves that are there and not yet judged, as far as their files are complete; `looked` is when the
    last look began; `costs` counts what was read since the start.
    """

    def __init__(self, run: str, request: WatchRequest, journal: Journal, tell: Callable[[Event], None]) -> None:
        self.run, self.request, self.journal, self._tell = os.path.abspath(run), request, journal, tell
        self.pace = Pace(request.max_rate)
        self.saves: list[Save] = []
        self.waiting: list[Save] = []
        self.looked = time.time()
        self.costs = {"read_bytes": 0, "cpu_seconds": 0.0, "seconds": 0.0}
        self._seen: dict[str, tuple[str, float]] = {}  # {save: (fingerprint, when it was first seen so)}
        self._rechecked = time.time()
        for command in (request.then, request.on_failure):
            _split_command(command or "true")

    # ------------------------------------------------------------------------------------------------------ the loop

    def watch(self, after_look: Callable[[], None]) -> None:
        """Look again and again, until a signal ends it.

        Args:
            after_look: called after every look.
        """
        while True:
            self.look()
            after_look()
            time.sleep(self.request.poll)

    def watch_once(self) -> None:
        """Look until no finished save waits to be judged."""
        while True:
            self.look()
            if not self.waiting:
                return
            time.sleep(min(self.request.poll, max(0.05, self.request.settle / 4)))

    def look(self) -> None:
        """Look at the run once: judge what is finished, and note what is gone."""
        self.looked = time.time()
        try:
            self.saves = list_saves(self.run, self.journal.folder)
        except (CkpttoolError, OSError) as e:
            if self.request.once:
                raise
            self._tell({"event": "trouble", "why": str(e)})  # of a file system that may come back
            return
        self._note_deleted()
        self._note_changed()
        self._point()
        self._finish_commands()
        ready: list[Save] = []
        self.waiting = []
        for save in self.saves:
            quiet = self._measure_quiet(save)
            if self.journal.knows(save) is not None:
                continue
            if save.begun:
                self._note_unfinished(save, quiet)
            else:
                self.waiting.append(save)
                if quiet >= self.request.settle:
                    ready.append(save)
        if self.request.last is not None:
            for save in ready[: -self.request.last]:
                self._say({**_about(save), "event": "skipped", "why": f"only the newest {self.request.last} are read"})
                self.waiting.remove(save)
            ready = ready[-self.request.last :]
        for save in ready:
            self._judge(save)
        self._recheck_newest()

    def _measure_quiet(self, save: Save) -> float:
        """Return for how many seconds the files of a save have not changed, by what was seen, or by their own times."""
        now = time.time()
        before = self._seen.get(save.name)
        if before is None or before[0] != save.fingerprint:
            self._seen[save.name] = before = (save.fingerprint, now if before else min(now, save.changed))
        return now - before[1]

    # ---------------------------------------------------------------------------------------------------- one save

    def _judge(self, save: Save) -> None:
        """Read a save, and say what was found of it; nothing, where it changes or goes meanwhile."""
        earlier = [Portrait.from_json(r["portrait"]) for r in self.journal.list_earlier(save)]
        began, cpu = time.monotonic(), time.process_time()
        found: Examination | None = None
        findings: list[Finding] = []
        why = ""
        options = self.request.reading
        try:
            if not save.found.complete:
                raise Corrupt(f"{save.path} is not complete: {save.found.lacks}.")
            found = examine(save, options, self.pace, earlier, self.request.norm_jump)
            findings = found.findings
        except SourceChanged:
            return
        except (Corrupt, Differs, Unsafe) as e:
            if take_fingerprint(save.path) == (save.fingerprint, save.changed):
                findings = describe_damage(save, options, e, self.pace)
        except CkpttoolError as e:
            why = str(e)
        except Exception as e:  # a bug of ours must not end the watch
            why = f"unexpected {type(e).__name__}: {e}. This is a bug of ckpttool."
        finally:
            self._count(began, cpu)
        if take_fingerprint(save.path) != (save.fingerprint, save.changed):
            return  # it is written to, or deleted: the next look sees it as it is then
        self.waiting.remove(save)
        event = {**_about(save), **self._describe_costs(began, cpu)}
        if earlier:
            event["previous"] = {"name": earlier[0].name, "step": earlier[0].step, "digest": self._digest_of(earlier[0])}
        if found is not None:
            event |= {"layout": found.layout, "digest": found.digest, "not_read": found.not_read}
            event |= {} if found.recorded is None else {"recorded": found.recorded}
        event["findings"] = [_shorten(f) for f in findings[:_MOST_FINDINGS]]
        if why:
            self._say({**event, "event": "unjudged", "why": why})
        elif found is None or any(f.severity == DAMAGE for f in findings):
            if (before := self._path_before(save)) is not None:
                known = {(f.kind, f.file) for f in findings}
                findings += [f for f in compare_files(save, before) if (f.kind, f.file) not in known]
            self._say({**event, "event": "failed", "findings": [_shorten(f) for f in findings[:_MOST_FINDINGS]]})
        else:
            record = {"fingerprint": save.fingerprint, "portrait": found.portrait.to_json()}
            self.journal.write_record(save.name, record)
            self._say({**event, "event": "verified"})
            self.journal.forget_records()
            self._point()
        self._finish_commands()
        gc.collect()

    def _path_before(self, save: Save) -> str | None:
        """Return the path of the save before another one that is there; None where there is none."""
        earlier = [other for other in self.saves if other.age < save.age and family(other.name) == family(save.name)]
        return earlier[-1].path if earlier else None

    def _count(self, began: float, cpu: float) -> None:
        """Add what a read has cost since these readings of the clocks."""
        self.costs["read_bytes"] += self.pace.read_bytes
        self.costs["cpu_seconds"] += time.process_time() - cpu
        self.costs["seconds"] += time.monotonic() - began

    def _describe_costs(self, began: float, cpu: float) -> dict[str, Any]:
        """Return what the read of a save has cost, for its event."""
        return {
            "read_bytes": self.pace.read_bytes,
            "seconds": round(time.monotonic() - began, 3),
            "cpu_seconds": round(time.process_time() - cpu, 3),
        }

    def _digest_of(self, portrait: Portrait) -> str | None:
        """Return the digest of an earlier save, as its event has it."""
        digest = self.journal.proved.get(portrait.name, {}).get("digest", {}).get("all")
        return digest if isinstance(digest, str) else None

    def _recheck_newest(self) -> None:
        """Read the save that latest.verified leads to again, if it is time to, and compare its digest."""
        hours, save = self.request.recheck, self.newest_proved()
        if hours is None or save is None or time.time() - self._rechecked < hours * 3600:
            return
        self._rechecked = time.time()
        event, cpu, began = self.journal.last[save.name], time.process_time(), time.monotonic()
        findings: list[Finding] = []
        try:
            digest = examine(save, self.request.reading, self.pace, (), self.request.norm_jump).digest
            if digest != event["digest"]:
                raise Differs(
                    f"{save.path}: its digest is blake3:{digest['all']}, and was blake3:{event['digest']['all']} when it "
                    "was proved, although no file was written to since. The disk, or memory, is failing."
                )
        except SourceChanged:
            return
        except (Corrupt, Differs, Unsafe) as e:
            findings = describe_damage(save, self.request.reading, e, self.pace)
        finally:
            self._count(began, cpu)
        if take_fingerprint(save.path) == (save.fingerprint, save.changed):
            outcome = {"event": "failed", "findings": [_shorten(f) for f in findings]} if findings else {"event": "rechecked"}
            self._say({**_about(save), **self._describe_costs(began, cpu), **outcome})
            self._point()
            self._finish_commands()

    # ----------------------------------------------------------------------------------------------- other events

    def _note_deleted(self) -> None:
        """Note which saves are gone."""
        there = {save.name for save in self.saves}
        if not os.path.isdir(self.run):
            return  # the whole run is not mounted
        for name, event in list(self.journal.last.items()):
            if event["event"] != "deleted" and name not in there and not os.path.lexists(event["path"]):
                self._say({k: event[k] for k in ("name", "step", "path", "age")} | {"event": "deleted"})

    def _note_changed(self) -> None:
        """Note which saves are no longer what was judged."""
        for save in self.saves:
            event = self.journal.last.get(save.name)
            judged = event is not None and event["event"] not in ("changed", "deleted", "unfinished", "skipped")
            if judged and self.journal.knows(save) is None:
                self._say({**_about(save), "event": "changed", "fingerprint": None})

    def _note_unfinished(self, save: Save, quiet: float) -> None:
        """Report a save that lacks what is written last, if nothing was written to it for long, or a newer one is
        finished."""
        newer = any(other.found.complete and other.age > save.age for other in self.saves)
        if quiet >= self.request.stall or (newer and quiet >= self.request.settle):
            self._say({**_about(save), "event": "unfinished", "why": save.found.lacks})

    def _say(self, event: Event) -> None:
        """Write an event into the journal, and tell it."""
        self._tell(self.journal.append(event))

    # --------------------------------------------------------------------------------------------- the newest proved

    def newest_proved(self) -> Save | None:
        """Return the newest save that is there as it was proved, and from which a job can resume; None where there is
        none."""
        proved = [
            save for save in self.saves
            if (event := self.journal.knows(save)) is not None and event["event"] == "verified" and not save.found.weights_only
        ]  # fmt: skip
        return max(proved, key=lambda save: save.age, default=None)

    def _point(self) -> None:
        """Let latest.verified lead to the newest proved save."""
        save = self.newest_proved()
        self.journal.point_to(None if save is None else save.path)

    def exit_code(self) -> int:
        """Return what `--once` exits with: 0 if no save that is there is bad; 5 if those that are bad differ from what
        was recorded of them, 4 if one is damaged or sick; 3 if one could not be judged."""
        events = [event for save in self.saves if (event := self.journal.knows(save)) is not None]
        failed = [event for event in events if event["event"] == "failed"]
        if failed:
            return 5 if all(f["kind"] == "differs" for e in failed for f in e["findings"] if f["severity"] == DAMAGE) else 4
        return 3 if any(event["event"] == "unjudged" for event in events) else 0

    # ----------------------------------------------------------------------------------------------------- commands

    def _finish_commands(self) -> None:
        """Run the commands that events ask for and that have not ended, also those of before this process."""
        for save in self.saves:
            event = self.journal.knows(save)
            command = {"verified": self.request.then, "failed": self.request.on_failure}.get(event["event"]) if event else None
            if event is None or command is None or self.journal.was_run(event):
                continue
            if event["event"] == "verified" and self.request.every and (save.step or 0) % self.request.every:
                continue
            words = {"path": save.path, "name": save.name, "state": self.journal.folder, "event": event["event"],
                     "step": "" if save.step is None else str(save.step), "digest": event.get("digest", {}).get("all", "")}  # fmt: skip
            argv = [_fill(word, words) for word in _split_command(command)]
            environment = {**os.environ, "CKPTTOOL_EVENT": json.dumps(event)}
            try:
                status = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), env=environment, check=False).returncode
            except OSError as e:
                status, argv = 127, [*argv, f"({e.strerror})"]
            self._say({**_about(save), "event": "command", "for": event["event"], "command": argv, "status": status})


def _about(save: Save) -> Event:
    """Return what every event says of its save."""
    return {"name": save.name, "step": save.step, "path": save.path, "fingerprint": save.fingerprint, "age": list(save.age),
            "saved": round(save.changed, 3)}  # fmt: skip


def _shorten(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data, with the first of its tensors and how many there are."""
    row = asdict(finding)
    return {**row, "tensors": list(finding.tensors[:_MOST_NAMES]), "tensors_in_all": len(finding.tensors)}


def _split_command(command: str) -> list[str]:
    """Split a command into words, as a shell does; nothing is expanded.

    Raises:
        UsageError: a quote is not closed, or there is no word.
    """
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise UsageError(f"{argument('then')}: {command!r} is not a command: {e}.") from None
    if not words:
        raise UsageError(f"{argument('then')}: {command!r} is not a command.")
    return words


def _fill(word: str, values: dict[str, str]) -> str:
    """Replace "{path}" and the other names in braces in a word."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word
