"""The loop of `watch`: find finished saves, read each, write down what was found, and report it.

Each look compares the folder with the journal, so a watcher that was killed continues with what is missing there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ..engine.doctor.findings import DAMAGE, Finding
from ..errors import CkpttoolError, Corrupt, Differs, NotRecognised, SourceChanged, Unsafe
from .commands import run_command, split_command
from .examine import Examination, compare_files, describe_damage, examine
from .gentle import Pace
from .health import Portrait
from .journal import Event, WatchJournal
from .request import WatchRequest
from .saves import WatchedSave, family, list_saves, take_fingerprint

__all__ = ["Watcher"]

_MOST_NAMES = 20  # tensors in a finding of the journal
_MOST_FINDINGS = 50


class Watcher:
    """Watches one run.

    Args:
        run: its folder.
        report: called with every event, after it is in the journal; {"event": "trouble"} is not written there.

    `only` are the names of the saves that are to be read, None for all. `saves` are those that the last look found, at
    the time `looked`; `waiting` those of them that are to be read; `costs` is what reading has cost since the start:
    bytes of tensors, seconds of CPU time.
    """

    def __init__(self, run: str, request: WatchRequest, journal: WatchJournal, report: Callable[[Event], None]) -> None:
        self.run, self.request, self.journal, self._report = os.path.abspath(run), request, journal, report
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
        """Look again and again, until a signal ends it; `after_look` is called after every look."""
        while True:
            self.look()
            after_look()
            time.sleep(self.request.poll)

    def watch_once(self) -> None:
        """Look until no finished save waits to be read."""
        self.look()
        while self.waiting:
            time.sleep(min(self.request.poll, max(0.05, self.request.settle / 4)))
            self.look()

    def look(self) -> None:
        """Look at the run once: read what is finished, and note what is gone.

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
            self._note_deleted()
        self._note_changed()
        self._point()
        self._run_commands()
        for save in self._choose():
            self._judge(save)
        self._recheck_newest()

    def _choose(self) -> list[WatchedSave]:
        """Return the saves that are to be read now, the oldest first; note those that never end, and those that are
        passed over."""
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
                self._note_unfinished(save, rested)
                continue
            self.waiting.append(save)
            if (watched if save.fingerprint in self._doubted else rested) >= self.request.settle:
                ready.append(save)
        most = self.request.last or len(ready)
        for save in ready[:-most]:
            self._say({**_about(save), "event": "skipped", "why": f"only the newest {most} are read"})
            self.waiting.remove(save)
        return ready[-most:]

    def _measure_rest(self, save: WatchedSave) -> tuple[float, float]:
        """Return for how many seconds the files of a save have not changed: by their times, or by what was seen; and by
        what was seen alone, since the clock of a file server may be another."""
        now = time.time()
        before = self._seen.get(save.name)
        if before is None or before[0].fingerprint != save.fingerprint:
            self._seen[save.name] = before = (save, now)
        watched = now - before[1]
        return max(watched, now - save.changed), watched

    # ---------------------------------------------------------------------------------------------------- one save

    def _judge(self, save: WatchedSave) -> None:
        """Read a save, and say what was found; nothing, where it changes or goes meanwhile."""
        earlier = [Portrait.from_json(r["portrait"]) for r in self.journal.list_earlier(save)]
        with self._measure_costs() as costs:
            try:
                found, findings = self._examine(save, earlier)
                why = ""
            except SourceChanged:
                return
            except CkpttoolError as e:
                found, findings, why = None, [], str(e)
            except Exception as e:  # a bug of ours must not end the watch
                found, findings, why = None, [], f"unexpected {type(e).__name__}: {e}. This is a bug of ckpttool."
        bad = any(f.severity == DAMAGE for f in findings)
        if not self._is_as_it_was(save) or (bad and self._doubt(save)):
            return  # the next look sees it as it is then
        self.waiting.remove(save)
        event = {**_about(save), **costs}
        if earlier:
            digest = self.journal.proved[earlier[0].name]["digest"]
            event["previous"] = {"name": earlier[0].name, "step": earlier[0].step, "digest": digest["all"]}
        if found is not None:
            event |= {"layout": found.layout, "digest": found.digest, "not_read": found.not_read}
            event |= {"recorded": found.recorded} if found.recorded is not None else {}
        if why:
            self._say({**event, "event": "unjudged", "why": why})
        elif found is not None and (not bad or save.name == self._accepted):
            record = {"fingerprint": save.fingerprint, "portrait": found.portrait.to_json()}
            self.journal.write_record(save.name, record)
            accepted = {"accepted": True} if bad else {}
            self._say({**event, "event": "verified", **accepted, "findings": _shorten(findings)})
            self.journal.forget_records()
        else:
            self._say({**event, "event": "failed", "findings": _shorten(findings)})
        self._accepted = None if save.name == self._accepted else self._accepted
        self._point()
        self._run_commands()

    def _examine(self, save: WatchedSave, earlier: Sequence[Portrait]) -> tuple[Examination | None, list[Finding]]:
        """Read a save; return what was found, None where it is too damaged for that, and all findings. Those of a bad
        one include what a comparison with the files of the one before shows.

        Raises:
            SourceChanged: it is written to, or goes, meanwhile.
            CkpttoolError: it cannot be judged.
        """
        found, findings = None, []
        try:
            if not save.found.complete:
                raise Corrupt(f"{save.path} is not complete: {save.found.lacks}.", code="CKPT0401")
            found = examine(save, self.request.reading, self.pace, earlier, self.request.norm_jump)
            findings = found.findings
        except (Corrupt, Differs, Unsafe) as e:
            if isinstance(e, SourceChanged) or not self._is_as_it_was(save):
                raise SourceChanged(str(e)) from e
            findings = describe_damage(save, self.request.reading, e, self.pace)
        kin = [other for other in self.saves if other.age < save.age and family(other.name) == family(save.name)]
        if kin and any(f.severity == DAMAGE for f in findings):
            known = {(f.kind, f.file) for f in findings}
            findings += [f for f in compare_files(save, kin[-1].path) if (f.kind, f.file) not in known]
        return found, findings

    def _is_as_it_was(self, save: WatchedSave) -> bool:
        """Tell whether the files of a save are those that the last look saw."""
        return take_fingerprint(save.path) == (save.fingerprint, save.changed)

    def _doubt(self, save: WatchedSave) -> bool:
        """Tell whether a save that looks bad has to rest longer, before it is read again and judged: its files may only
        look old."""
        self._doubted.add(save.fingerprint)
        return self._measure_rest(save)[1] < self.request.settle

    @contextmanager
    def _measure_costs(self) -> Iterator[dict[str, float]]:
        """Measure what the block reads and how long it takes; yields the numbers for an event, which it has at the
        end."""
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
        """Read the save that latest.verified leads to again, if it is time to, and compare its digest."""
        hours, save = self.request.recheck, self.newest_proved()
        if hours is None or save is None or time.time() - self._rechecked < hours * 3600:
            return
        self._rechecked = time.time()
        event = self.journal.last[save.name]
        findings: list[Finding] = []
        with self._measure_costs() as costs:
            try:
                digest = examine(save, self.request.reading, self.pace, (), self.request.norm_jump).digest
                if digest != event["digest"]:
                    raise Differs(
                        f"{save.path}: its digest is blake3:{digest['all']}, and was blake3:{event['digest']['all']} "
                        "when it was proved, although no file was written to since. The disk, or memory, is failing.",
                        code="CKPT0501",
                    )
            except SourceChanged:
                return
            except (Corrupt, Differs, Unsafe) as e:
                findings = describe_damage(save, self.request.reading, e, self.pace)
            except CkpttoolError:
                return
        if self._is_as_it_was(save):
            found = {"event": "failed", "findings": _shorten(findings)} if findings else {"event": "rechecked"}
            self._say({**_about(save), **costs, **found})
            self._point()
            self._run_commands()

    # ------------------------------------------------------------------------------------------------- other events

    def _note_deleted(self) -> None:
        """Note which saves are gone, also those that were never read."""
        there = {save.name for save in self.saves}
        known = {name: _about(save) for name, (save, _) in self._seen.items()} | self.journal.last
        for name, event in known.items():
            if name in there or event.get("event") == "deleted" or os.path.lexists(event["path"]):
                continue
            self._seen.pop(name, None)
            was = event.get("event", "not read")
            self._say({k: event[k] for k in ("name", "step", "path", "age")} | {"event": "deleted", "was": was})

    def _note_changed(self) -> None:
        """Note which saves are no longer what was judged."""
        for save in self.saves:
            event = self.journal.last.get(save.name)
            if event and event["event"] in ("verified", "failed", "unjudged") and self.journal.knows(save) is None:
                self._say({**_about(save), "event": "changed", "fingerprint": None, "was": event["event"]})

    def _note_unfinished(self, save: WatchedSave, rested: float) -> None:
        """Report a save that lacks what is written last, if nothing was written to it for long, or a newer one of its
        kind is finished."""
        newer = any(
            other.found.complete and other.age > save.age and family(other.name) == family(save.name)
            for other in self.saves
        )
        if rested >= self.request.stall or (newer and rested >= self.request.settle):
            why = save.found.lacks or "its trainer does not name it"
            self._say({**_about(save), "event": "unfinished", "why": why})

    def _say(self, event: Event) -> None:
        """Write an event into the journal, and report it."""
        self._report(self.journal.append(event))

    # ---------------------------------------------------------------------------------------------------- what is good

    def newest_proved(self) -> WatchedSave | None:
        """Return the newest save that is there as it was proved, and that a job can resume from; None where there is
        none."""
        proved = [
            save
            for save in self.saves
            if (event := self.journal.knows(save)) and event["event"] == "verified" and not save.found.weights_only
        ]
        return max(proved, key=lambda save: save.age, default=None)

    def _point(self) -> None:
        """Let latest.verified lead to the newest proved save."""
        save = self.newest_proved()
        self.journal.point_to(None if save is None else save.path)

    def exit_code(self) -> int:
        """Return what `--once` exits with: 0 if no save that is there is bad; 5 if those that are bad differ from what
        was recorded of them, 4 if one is damaged or sick; 3 if one could not be judged."""
        events = [event for save in self.saves if (event := self.journal.knows(save)) is not None]
        failed = [f for event in events if event["event"] == "failed" for f in event["findings"]]
        if failed:
            return 5 if all(f["kind"] == "differs" for f in failed if f["severity"] == DAMAGE) else 4
        return 3 if any(event["event"] == "unjudged" for event in events) else 0

    def _run_commands(self) -> None:
        """Run the commands that events ask for and that have not ended, also those of before this process."""
        for save in self.saves:
            event = self.journal.knows(save)
            words = self._commands.get(event["event"]) if event else None
            if event is None or words is None or self.journal.was_run(event):
                continue
            if event["event"] == "verified" and self.request.every and (save.step or 0) % self.request.every:
                continue
            done = run_command(words, event, self.journal.folder)
            self._say({**_about(save), "event": "command", "for": event["event"], **done})


def _about(save: WatchedSave) -> Event:
    """Return what every event says of its save."""
    return {
        "name": save.name,
        "step": save.step,
        "path": save.path,
        "fingerprint": save.fingerprint,
        "age": list(save.age),
        "saved": round(save.changed, 3),
    }


def _shorten(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as plain data, each with the first of its tensors and how many there are."""
    rows = ((asdict(f), f.tensors) for f in findings[:_MOST_FINDINGS])
    return [{**row, "tensors": list(names[:_MOST_NAMES]), "tensors_in_all": len(names)} for row, names in rows]
