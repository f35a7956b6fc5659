"""The folder of a watcher: what it has found out, so that it continues from there after a kill.

    journal.jsonl      an event a line, appended and made durable before it is printed
    records/ID.json    of the newest proved saves: digest and norm of every tensor, which the next save is compared with
    latest.verified    a link to the newest proved save that is there

A torn last line is removed, since its event was never printed. A record is written before the line that needs it, and
the link is set after it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from blake3 import blake3

from ..errors import CkpttoolError, Corrupt, UsageError, argument, kind_of_failure
from ..storage.local_file import sync_folder
from ..storage.lock import take_lock, unlock
from ..storage.partial import LeftoverFiles
from .saves import WatchedSave, to_name_family

__all__ = ["LINK", "Event", "WatchJournal", "open_journal"]

Event = dict[str, Any]

LINK = "latest.verified"
_FILE, _RECORDS = "journal.jsonl", "records"
_KEPT = 4  # records of proved saves
#: Events that are the last word on a save, as its files were.
_ABOUT_SAVE = ("verified", "failed", "unfinished", "unjudged", "skipped", "changed", "deleted")


@contextmanager
def open_journal(folder: str, run: str) -> Iterator[WatchJournal]:
    """Lock the folder of a watcher while the block runs, and yield its journal. The folder is made if it does not
    exist.

    Args:
        folder: the folder of the watcher.
        run: the folder of the run that the journal is for.

    Raises:
        Locked: another watcher holds it. UsageError: it is of another run, or a file is in its place.
        Corrupt: the journal is damaged. NotPermitted, NoSpace, CkpttoolError: it cannot be written.
    """
    try:
        os.makedirs(os.path.join(folder, _RECORDS), exist_ok=True)
        leftovers = LeftoverFiles(os.path.join(folder, _FILE))
        lock = take_lock(leftovers)
    except OSError as e:
        raise kind_of_failure(e, UsageError if e.errno in (errno.ENOTDIR, errno.EEXIST) else CkpttoolError)(
            f"{folder} cannot be written: {e.strerror}. Give a folder of yours: {argument('state')}."
        ) from e
    try:
        journal = WatchJournal(folder)
        try:
            journal.begin(os.path.realpath(run))
            yield journal
        finally:
            journal.close()
    finally:
        unlock(leftovers, lock)


class WatchJournal:
    """The events of a run, and the state of its saves that follows from them.

    `last` {save: the last event about it}; `proved` {save: the last event that proved it}, also of deleted saves;
    `counts` {event: how often}.
    """

    def __init__(self, folder: str) -> None:
        """Open the journal in a watcher's folder, or make a new one, and read its events.

        Args:
            folder: the folder of the watcher, which must exist and be locked.

        Raises:
            Corrupt: a line is no event.
        """
        self.folder = folder
        self.last: dict[str, Event] = {}
        self.proved: dict[str, Event] = {}
        self.counts: dict[str, int] = {}
        self._commands: set[tuple[str, str, str]] = set()
        self.fd = os.open(os.path.join(folder, _FILE), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._run = self._read_events()
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the journal."""
        os.close(self.fd)

    def _read_events(self) -> str | None:
        """Read all events, remove an incomplete last line, and return the path of the run that the journal is for; None
        for a new journal.

        Raises:
            Corrupt: a line is no event.
        """
        run, end = None, 0
        with open(self.fd, "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    event = json.loads(line)
                    if event["event"] != "unjudged":  # whatever the reason was, it is tried again
                        self._apply_event(event)
                    run = run or event.get("run")
                except (ValueError, TypeError, LookupError, AttributeError):
                    raise Corrupt(
                        f"{self.folder}/{_FILE}: line {number} is no event. It was damaged or edited; move the folder "
                        "away, and every save is read again.",
                        code="CKPT0406",
                    ) from None
                end += len(line)
        os.ftruncate(self.fd, end)
        return run

    def begin(self, run: str) -> None:
        """Record the run of a new journal, or check that the journal is of this run.

        Raises:
            UsageError: it is of another one.
        """
        if self._run is None:
            self.append({"event": "begun", "run": run})
        elif self._run != run:
            raise UsageError(
                f"{self.folder} is of the run {self._run}, and {run} was given. Give another folder, or move this one "
                "away.",
                code="CKPT0211",
            )

    def append(self, event: Event) -> Event:
        """Write an event with the time to the journal, durably, and return it.

        Raises:
            NoSpace, NotPermitted, CkpttoolError: it cannot be written.
        """
        event = {"event": event["event"], "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **event}
        line = json.dumps(event).encode() + b"\n"
        try:
            start = os.fstat(self.fd).st_size
            if os.write(self.fd, line) != len(line):
                os.ftruncate(self.fd, start)
                raise OSError(28, "No space left on device")
            os.fsync(self.fd)
        except OSError as e:
            raise kind_of_failure(e, CkpttoolError)(f"{self.folder}/{_FILE} cannot be written: {e.strerror}.") from e
        self._apply_event(event)
        return event

    def _apply_event(self, event: Event) -> None:
        """Update `last`, `proved`, `counts` and the commands that were run by an event."""
        kind = event["event"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind in _ABOUT_SAVE:
            self.last[event["name"]] = event
            if kind == "verified":
                self.proved.pop(event["name"], None)  # in the order in which they were proved
                self.proved[event["name"]] = event
        elif kind == "command":
            self._commands.add((event["name"], event["fingerprint"], event["for"]))

    def knows(self, save: WatchedSave) -> Event | None:
        """Return the last event about a save, if its files have not changed since; None otherwise."""
        event = self.last.get(save.name)
        return event if event is not None and event.get("fingerprint") == save.fingerprint else None

    def was_run(self, event: Event) -> bool:
        """Tell whether the command for an event has ended."""
        return (event["name"], event["fingerprint"], event["event"]) in self._commands

    # ------------------------------------------------------------------------------------------------------ records

    def _get_record_path(self, name: str) -> str:
        """Return the path of the record of a save, whose name is `name`."""
        key = blake3(name.encode("utf-8", "surrogatepass")).hexdigest(length=12)
        return os.path.join(self.folder, _RECORDS, f"{key}.json")

    def write_record(self, name: str, record: Mapping[str, object]) -> None:
        """Write the record of a save, durably.

        Args:
            name: of the save, relative to the run.
            record: {"fingerprint": of the save's files, "portrait": what `Portrait.to_json` returned}.

        Raises:
            NoSpace, NotPermitted, CkpttoolError: it cannot be written.
        """
        path = self._get_record_path(name)
        try:
            with open(f"{path}.tmp", "w") as out:
                json.dump(record, out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(f"{path}.tmp", path)
            sync_folder(os.path.dirname(path))
        except OSError as e:
            raise kind_of_failure(e)(f"{path} cannot be written: {e.strerror}.") from e

    def list_earlier(self, save: WatchedSave) -> list[Event]:
        """Return the records, {"fingerprint", "portrait"}, of proved saves before this one, the nearest first.

        Only saves count whose names differ from this save's name in numbers alone. The portraits of all but the first
        record come without tensors.
        """
        same = [
            e
            for e in self.proved.values()
            if to_name_family(e["name"]) == to_name_family(save.name) and tuple(e["age"]) < save.age
        ]
        out: list[Event] = []
        for event in sorted(same, key=lambda e: tuple(e["age"]), reverse=True):
            try:
                with open(self._get_record_path(event["name"])) as text:
                    record = json.load(text)
            except (OSError, ValueError):
                continue
            if record["fingerprint"] == event["fingerprint"]:
                if out:  # of those further back, no tensor is compared, and they take memory
                    record["portrait"]["tensors"] = {}
                out.append(record)
        return out

    def forget_records(self) -> None:
        """Remove all records, except those of the last proved saves of each family of names."""
        kept: dict[str, list[str]] = {}
        for name in self.proved:
            kept.setdefault(to_name_family(name), []).append(os.path.basename(self._get_record_path(name)))
        names = {name for group in kept.values() for name in group[-_KEPT:]}
        folder = os.path.join(self.folder, _RECORDS)
        for name in os.listdir(folder):
            if name not in names:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    # --------------------------------------------------------------------------------------------------------- link

    def point_to(self, path: str | None) -> None:
        """Make the link latest.verified lead to a save, atomically; None removes the link.

        Raises:
            NotPermitted, CkpttoolError: the link cannot be made.
        """
        link = os.path.join(self.folder, LINK)
        target = None if path is None else os.path.relpath(os.path.realpath(path), os.path.realpath(self.folder))
        try:
            now = os.readlink(link) if os.path.islink(link) else None
            if now == target:
                return
            if target is None:
                os.unlink(link)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(f"{link}.tmp")
                os.symlink(target, f"{link}.tmp")
                os.replace(f"{link}.tmp", link)
            sync_folder(self.folder)
        except OSError as e:
            raise kind_of_failure(e)(f"{link} cannot be made: {e.strerror}.") from e
