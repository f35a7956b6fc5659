"""`Guard`: proves the saves of a training job in a process of low priority, and tells the job what was found.

    training thread   check() -> saves that wait    poll() <- what was found
    a thread          waits for asynchronous saves, asks the process again and again, and logs each verdict
    a process         watching/proofs.py: a look of `ckpttool watch`, with its journal; it ends when nothing waits

A step waits for none of it. The kernel kills the process when the job ends, however that ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ..engine.workers.local_processes import LocalProcesses
from ..errors import CkpttoolError, Corrupt, UsageError, argument
from ..storage.urls import make_path_absolute
from ..watching.proofs import judge_saves, release_journals
from ..watching.request import WatchRequest

__all__ = ["Guard"]

_log = logging.getLogger("ckpttool")
_MOST_FINDINGS = 3  # in a message; the journal has all


@dataclass
class _Save:
    """A save that waits: since when, in seconds of the monotonic clock, the future of one that is still being written,
    and whether it was there already."""

    path: str
    since: float
    future: Any
    existed: bool


class Guard:
    """Proves the saves of a training job in the background, as `ckpttool watch` does, and warns of those that are bad.

    Rank 0 alone acts; the other ranks may call everything, and nothing happens. A save that is bad is a warning of the
    logger `ckpttool`, and a line of the journal beside the run, RUN.ckpttool-watch/journal.jsonl, where RUN is the
    folder that holds the save.

    Args:
        on_fault: "warn" does no more; "raise" raises Corrupt in the training thread, at the next `poll`, `check` or
            `finish`; a function is called there with the event of the journal.
        strict: raise there, too, if a save cannot be proved; otherwise that is a warning.
        timeout: seconds that `finish` waits for the last proofs.
        state: the folder of the journal; None for the one beside the run.
        settle: seconds for which no file of a save may change before it is read.
        stall: seconds that a save may take to be finished.
        max_rate: bytes a second to read at most; None for no limit.
        norm_jump: how many times its last norm a weight may have.

    Raises:
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        *,
        on_fault: Literal["warn", "raise"] | Callable[[dict[str, Any]], object] = "warn",
        strict: bool = False,
        timeout: float = 300.0,
        state: str | os.PathLike[str] | None = None,
        settle: float = 5.0,
        stall: float = 1800.0,
        max_rate: int | None = None,
        norm_jump: float = 10.0,
    ) -> None:
        """Make a guard; nothing is verified before `check` is called. The docstring of the class explains the
        arguments.

        Raises:
            UsageError: an argument makes no sense.
        """
        if on_fault not in ("warn", "raise") and not callable(on_fault):
            raise UsageError(
                f"{argument('on_fault', on_fault)}: it must be 'warn', 'raise' or a function.", code="CKPT0203"
            )
        self._on_fault, self._strict, self._timeout = on_fault, strict, timeout
        self._options = {
            "state": None if state is None else make_path_absolute(state),
            "settle": settle, "stall": stall, "max_rate": max_rate, "norm_jump": norm_jump,
        }  # fmt: skip
        self._request = WatchRequest(**self._options)  # type: ignore[arg-type]
        self._waiting: dict[str, _Save] = {}
        self._appeared: dict[str, float] = {}  # {run: `since` of the newest save that came to be while it waited}
        self._found: deque[dict[str, object] | CkpttoolError] = deque()
        self._lock = threading.Lock()  # of _waiting, _thread and _pool
        self._thread: threading.Thread | None = None
        self._pool: LocalProcesses | None = None
        self._stop = threading.Event()
        self._process = 0  # the id of the one that the thread is in; a fork has no such thread

    # --------------------------------------------------------------------------------------------- in the training job

    def check(self, path: str | os.PathLike[str], future: Any = None) -> None:
        """Queue a save to be verified in the background, and return at once. On ranks other than 0, nothing is
        verified.

        Args:
            path: the folder or file that was saved, or that is being written.
            future: the future, or the AsyncSaveResponse, that `dcp.async_save` returned for this save; None if the save
                is finished, or if its files show when it is.

        Raises:
            CkpttoolError: for an earlier save, as `poll`.
        """
        self.poll()
        name = os.fspath(path)
        try:
            if not _is_first_rank():
                return
            self._request.folder_of(os.path.dirname(name) or ".")
            real = os.path.realpath(name)
            save = _Save(real, time.monotonic(), getattr(future, "upload_completion", future), os.path.lexists(real))
            with self._lock:
                self._waiting[real] = save
                if self._thread is None or self._process != os.getpid():
                    self._start()
        except Exception as e:
            self._report_unproved_save(name, str(e))

    def poll(self) -> None:
        """Report the faults that were found in saves since the last call, and return at once. The first fault that is
        to be raised is raised; where `on_fault` is a function, it is called with the event of the journal (a dict) for
        each bad save.

        Raises:
            Corrupt: with on_fault="raise", a save is bad.
            CkpttoolError: with `strict`, a save could not be verified.
        """
        while self._found:
            found = self._found.popleft()
            if isinstance(found, CkpttoolError):
                raise found
            if callable(self._on_fault):
                self._on_fault(found)

    def finish(self, timeout: float | None = None) -> list[str]:
        """Wait until all saves are verified, or until the time limit, and stop verifying. A warning names each save
        that was not read.

        Args:
            timeout: seconds to wait; None for the `timeout` of the guard.

        Returns:
            The absolute paths of the saves that were not read by then; [] if all were.

        Raises:
            CkpttoolError: as `poll`.
        """
        thread = self._thread
        if thread is not None and self._process == os.getpid():
            thread.join(self._timeout if timeout is None else timeout)
        left = self.stop()
        self.poll()
        return left

    def stop(self) -> list[str]:
        """Stop verifying, without waiting for saves that are not read yet. Return the absolute paths of these saves,
        after a warning for each."""
        if self._process != os.getpid():
            return []
        atexit.unregister(self.stop)
        with self._lock:
            thread, pool = self._thread, self._pool
            self._stop.set()
        if thread is not None and pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
            thread.join(5)
        with self._lock:
            left, self._waiting, self._thread = list(self._waiting), {}, None
        for path in left:
            self._report_unproved_save(path, "the job ended before it was read")
        return left

    def __enter__(self) -> Guard:
        """Return the guard itself, for a `with` block around the training."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call `finish` if the `with` block ended without an exception, otherwise `stop`; the exception is raised.

        Args:
            kind: class of the exception that ended the block; None if there was none.
        """
        if kind is None:
            self.finish()
        else:
            self.stop()

    # ------------------------------------------------------------------------------------------------ in its own thread

    def _start(self) -> None:
        """Start the thread that verifies saves. The caller holds the lock."""
        self._process, self._stop = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._prove_all, args=(self._stop,), daemon=True, name="ckpttool-guard")
        atexit.register(self.stop)
        self._thread.start()

    def _prove_all(self, stop: threading.Event) -> None:
        """Verify saves until none is waiting or `stop` is set; this is what the thread runs.

        If the process that reads them fails, its saves get a warning and are given up, and a new process is started.
        """
        while True:
            pool = LocalProcesses(1)
            with self._lock:
                self._pool = pool
                if stop.is_set() or not self._waiting:
                    self._thread = None if self._stop is stop else self._thread
                    return
            try:
                self._prove_waiting_saves(pool, stop)
            except Exception as e:  # a bug of ours must not end the training
                for save in [] if stop.is_set() else list(self._waiting.values()):
                    self._remove_from_waiting(save)
                    self._report_unproved_save(save.path, f"{type(e).__name__}: {e}")
            finally:
                pool.shutdown(cancel_futures=True)

    def _prove_waiting_saves(self, pool: LocalProcesses, stop: threading.Event) -> None:
        """Have the process verify the waiting saves, again and again, until none is waiting or `stop` is set.

        Args:
            pool: the process, as a pool of one.
        """
        poll = min(2.0, max(0.05, self._request.settle / 4))
        while not stop.is_set():
            began = time.monotonic()
            with self._lock:
                waiting = list(self._waiting.values())
            if not waiting:
                pool.submit(release_journals, "").result()
                return
            runs: dict[str, list[_Save]] = {}
            for save in waiting:
                if self._is_written(save):
                    runs.setdefault(os.path.dirname(save.path), []).append(save)
            for run, saves in runs.items():
                names = [os.path.basename(s.path) for s in saves]
                asked = json.dumps({"run": run, "names": names, "options": self._options})
                answers = json.loads(pool.submit(judge_saves, asked).result())
                for save, name in zip(saves, names, strict=True):
                    self._handle_answer(save, answers.get(name))
            stop.wait(min(10.0, max(poll, time.monotonic() - began)))  # to list a large run takes a file server time

    def _is_written(self, save: _Save) -> bool:
        """Return whether a save is finished, as far as its future says. One whose future has failed is given up, with a
        warning."""
        if save.future is None:
            return True
        if not save.future.done():
            return False
        try:
            save.future.result()
        except Exception as e:
            self._remove_from_waiting(save)
            self._report_unproved_save(save.path, f"it was not saved: {e}")
            return False
        save.existed = True
        return True

    def _handle_answer(self, save: _Save, answer: Mapping[str, Any] | None) -> None:
        """Log the verdict on a save or warn of it, and stop waiting for the save.

        Args:
            save: the save.
            answer: what `judge_saves` returned for it in the other process, {"event", "lines", "proved"}; None if it
                has no verdict yet. A save that was deleted, or not written in time, is given up then.
        """
        run, there = os.path.dirname(save.path), os.path.lexists(save.path)
        if there and not save.existed:
            save.existed = True
            self._appeared[run] = max(self._appeared.get(run, 0.0), save.since)
        # a trainer writes its saves in turn, so one that is not there when a later one is was deleted
        deleted = not there and (save.existed or save.since < self._appeared.get(run, 0.0))
        late = not there and time.monotonic() - save.since >= self._request.stall
        if answer is None and not deleted and not late:
            return
        if not self._remove_from_waiting(save):
            return  # it was saved again meanwhile
        if answer is None:
            if deleted:
                _log.info("%s was deleted before it was read", save.path)
            else:
                self._report_unproved_save(save.path, f"it was not written for {self._request.stall:g} s")
            return
        event = dict(answer["event"])
        if event["event"] == "verified":
            _log.info("%s", "\n".join(answer["lines"]))
        elif event["event"] == "failed":
            self._report_bad_save(event, answer["proved"])
        else:
            self._report_unproved_save(save.path, str(event.get("why", event["event"])))

    def _remove_from_waiting(self, save: _Save) -> bool:
        """Remove a save from those that wait, and return True; False if a newer save of this path is waiting
        instead."""
        with self._lock:
            same = self._waiting.get(save.path) is save
            if same:
                del self._waiting[save.path]
        return same

    def _report_bad_save(self, event: dict[str, Any], proved: str | None) -> None:
        """Log a warning of a bad save, and keep the fault for the training thread unless on_fault="warn".

        Args:
            event: the event of the journal, with its findings.
            proved: path of the newest save that is good; None if there is none.
        """
        bad = [f for f in event["findings"] if f["severity"] != "note"]
        what = "; ".join(f"{f['kind']}: {f['text'].rstrip('.')}" for f in bad[:_MOST_FINDINGS])
        more = f"; and {len(bad) - _MOST_FINDINGS} more" if len(bad) > _MOST_FINDINGS else ""
        good = f"The newest proved save is {proved}" if proved else "No save of the run is proved"
        error = Corrupt(f"{event['path']} is bad: {what}{more}. {good}.", code="CKPT0433")
        _log.warning("%s: %s", error.code, error)
        if self._on_fault != "warn":
            self._found.append(error if self._on_fault == "raise" else event)

    def _report_unproved_save(self, path: str, why: str) -> None:
        """Log a warning of a save that could not be verified, because of `why`; with `strict`, keep it for the training
        thread."""
        error = CkpttoolError(f"{path} is not proved: {why.rstrip('.')}.", code="CKPT0104")
        _log.warning("%s: %s", error.code, error)
        if self._strict:
            self._found.append(error)


def _is_first_rank() -> bool:
    """Return whether this process is rank 0, or not part of a distributed job."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    with suppress(ValueError):
        return int(os.environ.get("RANK", "0")) == 0
    return True
