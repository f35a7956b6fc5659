"""The loop of `watch`: find finished saves, read each, write down what was found, and report it.

Each look compares the folder with the journal, so a watcher that was killed continues with what is missing there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from ..engine.doctor.findings import DAMAGE, Finding
from ..errors import CkpttoolError, Corrupt, Differs, NotPermitted, NotRecognised, SourceChanged, Unsafe
from ..storage.urls import make_path_absolute
from .commands import run_command, split_command
from .examine import Examination, compare_files, examine_save, list_damage
from .gentle import Pace
from .health import Portrait
from .journal import Event, WatchJournal
from .request import WatchRequest
from .saves import WatchedSave, list_saves, take_fingerprint, to_name_family

__all__ = ["Watcher"]

_MOST_NAMES = 20  # tensors in a finding of the journal
_MOST_FINDINGS = 50


class Watcher:
    """Watches one run.

    Args:
        run: its folder.
        request: the options of `watch`.
        journal: the open journal of the run.
        report: called with every event after it was written to the journal, and with {"event": "trouble"}, which is not
            written.

    `only` are the names of the saves to read, None for all. `saves` are those that the last look found, at the time
    `looked`; `waiting` those of them that are still to be read; `costs` is the cost of reading since the start: bytes
    of tensors, seconds of CPU time.
    """

    def __init__(self, run: str, request: WatchRequest, journal: WatchJournal, report: Callable[[Event], None]) -> None:
        self.run, self.request, self.journal, self._report = make_path_absolute(run), request, journal, report
        self.pace = Pace(request.max_rate)
        self.only: Collection[str] | None = None
        self.saves: list[WatchedSave] = []
        self.waiting: list[WatchedSave] = []
        self.looked = self._rechecked = time.time()
        self.costs = {"read_bytes": 0.0, "cpu_seconds": 0.0}
        self._seen: dict[str, tuple[WatchedSave, float]] = {}  # {name: (the save, when it was first seen as it is)}
        self._doubted: set[str] = set()  # fingerprints of saves that were read once and look bad
        self._accepted = request.accept  # until it was read
        self._trouble = ""  # why the last look failed
        self._commands = {
            "verified": split_command("then", request.then),
            "failed": split_command("on_failure", request.on_failure),
        }

    # ------------------------------------------------------------------------------------------------------ the loop

    def watch(self, after_look: Callable[[], None]) -> None:
        """Look at the run repeatedly until a signal ends the process; `after_look` is called after every look."""
        while True:
            self.look()
            after_look()
            time.sleep(self.request.poll)

    def watch_once(self) -> None:
        """Look at the run repeatedly until every finished save was read."""
        self.look()
        while self.waiting:
            time.sleep(min(self.request.poll, max(0.05, self.request.settle / 4)))
            self.look()

    def look(self) -> None:
        """Look at the run once: read the finished saves, and record which saves are deleted or changed.

        Raises:
            CkpttoolError: the journal cannot be written; with `once`, the folder cannot be listed.
        """
        self.looked = time.time()
        try:
            if self.request.once and not os.path.isdir(self.run):
                raise NotRecognised(f"{self.run}: no such folder.", code="CKPT0302")
            self.saves = list_saves(self.run, self.journal.folder)
        except (CkpttoolError, OSError) as e:
            if self.request.once:
                raise
            if str(e) != self._trouble:  # of a file system that may come back
                self._report({"event": "trouble", "why": str(e)})
            self._trouble = str(e)
            return
        self._trouble = ""
        if os.path.isdir(self.run):  # else nothing is mounted there
            self._record_deleted()
        self._record_changed()
        self._update_link()
        self._run_commands()
        for save in self._choose_saves():
            self._judge_save(save)
        self._recheck_newest()

    def _choose_saves(self) -> list[WatchedSave]:
        """Return the saves to read now, the oldest first, and update `waiting`. Saves that do not finish, and saves
        that are skipped, are recorded."""
        ready = []
        self.waiting = []
        for save in self.saves:
            if self.only is not None and save.name not in self.only:
                continue
            rested, watched = self._measure_rest(save)
            event = self.journal.knows(save)
            if event is not None and not (event["event"] == "failed" and save.name == self._accepted):
                continue
            if save.begun:
                self._record_unfinished(save, rested)
                continue
            self.waiting.append(save)
            if (watched if save.fingerprint in self._doubted else rested) >= self.request.settle:
                ready.append(save)
        most = self.request.last or len(ready)
        for save in ready[:-most]:
            self._record_event({**_describe_save(save), "event": "skipped", "why": f"only the newest {most} are read"})
            self.waiting.remove(save)
        return ready[-most:]

    def _measure_rest(self, save: WatchedSave) -> tuple[float, float]:
        """Return two durations in seconds for which the files of a save have not changed: (the longer one of those by
        the files' times and by earlier looks; the one by earlier looks alone, since the clock of a file server may
        differ)."""
        now = time.time()
        before = self._seen.get(save.name)
        if before is None or before[0].fingerprint != save.fingerprint:
            self._seen[save.name] = before = (save, now)
        watched = now - before[1]
        return max(watched, now - save.changed), watched

    # ---------------------------------------------------------------------------------------------------- one save

    def _judge_save(self, save: WatchedSave) -> None:
        """Read a save and record the verdict; record nothing if it changes or is deleted during the read."""
        earlier = [Portrait.from_json(r["portrait"]) for r in self.journal.list_earlier(save)]
        with self._measure_costs() as costs:
            try:
                found, findings = self._examine_save(save, earlier)
                why = ""
            except SourceChanged:
                return
            except CkpttoolError as e:
                found, findings, why = None, [], str(e)
            except Exception as e:  # a bug of ours must not end the watch
                found, findings, why = None, [], f"unexpected {type(e).__name__}: {e}. This is a bug of ckpttool."
        bad = any(f.severity == DAMAGE for f in findings)
        if not self._is_unchanged(save) or (bad and self._must_read_again(save)):
            return  # the next look sees it as it is then
        self.waiting.remove(save)
        event = {**_describe_save(save), **costs}
        if earlier:
            digest = self.journal.proved[earlier[0].name]["digest"]
            event["previous"] = {"name": earlier[0].name, "step": earlier[0].step, "digest": digest["all"]}
        if found is not None:
            event |= {"layout": found.layout, "digest": found.digest, "not_read": found.not_read}
            event |= {"recorded": found.recorded} if found.recorded is not None else {}
        if why:
            self._record_event({**event, "event": "unjudged", "why": why})
        elif found is not None and (not bad or save.name == self._accepted):
            record = {"fingerprint": save.fingerprint, "portrait": found.portrait.to_json()}
            self.journal.write_record(save.name, record)
            accepted = {"accepted": True} if bad else {}
            self._record_event({**event, "event": "verified", **accepted, "findings": _shorten_findings(findings)})
            self.journal.forget_records()
        else:
            self._record_event({**event, "event": "failed", "findings": _shorten_findings(findings)})
        self._accepted = None if save.name == self._accepted else self._accepted
        self._update_link()
        self._run_commands()

    def _examine_save(self, save: WatchedSave, earlier: Sequence[Portrait]) -> tuple[Examination | None, list[Finding]]:
        """Read a save, and return (what was found, or None if it is too damaged; all findings). The findings on a
        damaged save include a comparison of its files with those of the save before.

        Raises:
            SourceChanged: it is written to or deleted during the read.
            CkpttoolError: it cannot be judged.
        """
        found, findings = None, []
        try:
            if save.found.problem:
                raise NotPermitted(f"{save.path} {save.found.problem}.", code="CKPT1401")
            if not save.found.complete:
                raise Corrupt(f"{save.path} is not complete: {save.found.lacks}.", code="CKPT0401")
            found = examine_save(save, self.request.reading, self.pace, earlier, self.request.norm_jump)
            findings = found.findings
        except (Corrupt, Differs, Unsafe) as e:
            if isinstance(e, SourceChanged) or not self._is_unchanged(save):
                raise SourceChanged(str(e)) from e
            findings = list_damage(save, self.request.reading, e, self.pace)
        kin = [
            other
            for other in self.saves
            if other.age < save.age and to_name_family(other.name) == to_name_family(save.name)
        ]
        if kin and any(f.severity == DAMAGE for f in findings):
            known = {(f.kind, f.file) for f in findings}
            findings += [f for f in compare_files(save, kin[-1].path) if (f.kind, f.file) not in known]
        return found, findings

    def _is_unchanged(self, save: WatchedSave) -> bool:
        """Tell whether the files of a save are those that the last look saw."""
        return take_fingerprint(save.path) == (save.fingerprint, save.changed)

    def _must_read_again(self, save: WatchedSave) -> bool:
        """Return whether a save that looks damaged must rest longer and be read again before it is judged; its trainer
        may still be writing it."""
        self._doubted.add(save.fingerprint)
        return self._measure_rest(save)[1] < self.request.settle

    @contextmanager
    def _measure_costs(self) -> Iterator[dict[str, float]]:
        """Measure what the block reads and how long it takes. Yields a dict that gets "read_bytes", "seconds" and
        "cpu_seconds" when the block ends."""
        began, cpu = time.monotonic(), time.process_time()
        costs: dict[str, float] = {}
        self.pace.start(None)
        try:
            yield costs
        finally:
            costs["read_bytes"] = self.pace.read_bytes
            costs["seconds"] = round(time.monotonic() - began, 3)
            costs["cpu_seconds"] = round(time.process_time() - cpu, 3)
            for key in self.costs:
                self.costs[key] += costs[key]

    def _recheck_newest(self) -> None:
        """If a recheck is due, read the save that latest.verified leads to again, and compare its digest."""
        hours, save = self.request.recheck, self.newest_proved()
        if hours is None or save is None or time.time() - self._rechecked < hours * 3600:
            return
        self._rechecked = time.time()
        event = self.journal.last[save.name]
        findings: list[Finding] = []
        with self._measure_costs() as costs:
            try:
                digest = examine_save(save, self.request.reading, self.pace, (), self.request.norm_jump).digest
                if digest != event["digest"]:
                    raise Differs(
                        f"{save.path}: its digest is blake3:{digest['all']}, and was blake3:{event['digest']['all']} "
                        "when it was proved, although no file was written to since. The disk, or memory, is failing.",
                        code="CKPT0501",
                    )
            except SourceChanged:
                return
            except (Corrupt, Differs, Unsafe) as e:
                findings = list_damage(save, self.request.reading, e, self.pace)
            except CkpttoolError:
                return
        if self._is_unchanged(save):
            found = {"event": "failed", "findings": _shorten_findings(findings)} if findings else {"event": "rechecked"}
            self._record_event({**_describe_save(save), **costs, **found})
            self._update_link()
            self._run_commands()

    # ------------------------------------------------------------------------------------------------- other events

    def _record_deleted(self) -> None:
        """Record which saves were deleted, including saves that were never read."""
        there = {save.name for save in self.saves}
        known = {name: _describe_save(save) for name, (save, _) in self._seen.items()} | self.journal.last
        for name, event in known.items():
            if name in there or event.get("event") == "deleted" or os.path.lexists(event["path"]):
                continue
            self._seen.pop(name, None)
            was = event.get("event", "not read")
            self._record_event(
                {k: event[k] for k in ("name", "step", "path", "age")} | {"event": "deleted", "was": was}
            )

    def _record_changed(self) -> None:
        """Record which judged saves have changed files since."""
        for save in self.saves:
            event = self.journal.last.get(save.name)
            if event and event["event"] in ("verified", "failed", "unjudged") and self.journal.knows(save) is None:
                self._record_event(
                    {**_describe_save(save), "event": "changed", "fingerprint": None, "was": event["event"]}
                )

    def _record_unfinished(self, save: WatchedSave, rested: float) -> None:
        """Record that a save is unfinished, if nothing was written to it for long, or a newer save of its kind is
        finished. `rested` is the time without a change, in seconds."""
        newer = any(
            other.found.complete and other.age > save.age and to_name_family(other.name) == to_name_family(save.name)
            for other in self.saves
        )
        if rested >= self.request.stall or (newer and rested >= self.request.settle):
            why = save.found.lacks or "its trainer does not name it"
            self._record_event({**_describe_save(save), "event": "unfinished", "why": why})

    def _record_event(self, event: Event) -> None:
        """Write an event into the journal, and report it."""
        self._report(self.journal.append(event))

    # ---------------------------------------------------------------------------------------------------- what is good

    def newest_proved(self) -> WatchedSave | None:
        """Return the newest save that was proved with its present files and that a job can resume from; None if there
        is none."""
        proved = [
            save
            for save in self.saves
            if (event := self.journal.knows(save)) and event["event"] == "verified" and not save.found.weights_only
        ]
        return max(proved, key=lambda save: save.age, default=None)

    def _update_link(self) -> None:
        """Make the link latest.verified lead to the newest proved save, or remove it."""
        save = self.newest_proved()
        self.journal.point_to(None if save is None else save.path)

    def exit_code(self) -> int:
        """Return the exit code of `--once`: 0 if no present save is bad; 5 if all damage is that saves differ from
        recorded digests; 4 for any other damage; 3 if a save could not be judged."""
        events = [event for save in self.saves if (event := self.journal.knows(save)) is not None]
        failed = [f for event in events if event["event"] == "failed" for f in event["findings"]]
        if failed:
            return 5 if all(f["kind"] == "differs" for f in failed if f["severity"] == DAMAGE) else 4
        return 3 if any(event["event"] == "unjudged" for event in events) else 0

    def _run_commands(self) -> None:
        """Run the commands of events for which no command has ended yet, including events of earlier processes."""
        for save in self.saves:
            event = self.journal.knows(save)
            words = self._commands.get(event["event"]) if event else None
            if event is None or words is None or self.journal.was_run(event):
                continue
            if event["event"] == "verified" and self.request.every and (save.step or 0) % self.request.every:
                continue
            done = run_command(words, event, self.journal.folder)
            self._record_event({**_describe_save(save), "event": "command", "for": event["event"], **done})


def _describe_save(save: WatchedSave) -> Event:
    """Return the fields of an event that identify its save."""
    return {
        "name": save.name,
        "step": save.step,
        "path": save.path,
        "fingerprint": save.fingerprint,
        "age": list(save.age),
        "saved": round(save.changed, 3),
    }


def _shorten_findings(findings: Sequence[Finding]) -> list[dict[str, object]]:
    """Return the first findings as plain data, each with the first of its tensors and `tensors_in_all`, their
    number."""
    rows = ((asdict(f), f.tensors) for f in findings[:_MOST_FINDINGS])
    return [{**row, "tensors": list(names[:_MOST_NAMES]), "tensors_in_all": len(names)} for row, names in rows]
