"""Runs a program of somebody over the cases of a kit, in processes of its own, and judges it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bounded_json import encode, parse
from ..errors import NotRecognised, UsageError, argument
from .kit import KIT_VERSION, Case, open_kit, read_expected
from .scoring import FAILURES, Row, doubt_refusals, judge, list_functions, list_parts, summarise

__all__ = ["AcidResult", "acid"]

#: Seconds in which a program has to be imported.
_IMPORT_SECONDS = 180


@dataclass(frozen=True)
class AcidResult:
    """The score card of a program.

    Attributes:
        program: its name.
        versions: {package: version}, as the program says.
        rows: the verdicts on each case that the program handles.
        others: names of the cases that it does not handle.
    """

    program: str
    versions: Mapping[str, str]
    rows: list[Row]
    others: list[str]

    @property
    def passed(self) -> bool:
        """Return whether there is no failure: nothing wrong, lost, accepted, executed, crashed or hung."""
        return not any(v in FAILURES for row in self.rows for v in row.verdicts.values())

    def to_json(self) -> dict[str, Any]:
        """Return it as --json prints it."""
        return {
            "program": self.program,
            "versions": dict(self.versions),
            "kit_version": KIT_VERSION,
            "passed": self.passed,
            "summary": summarise(self.rows),
            "cases": [row.to_json() for row in self.rows],
            "not_its_layout": self.others,
        }


class _Session:
    """A process in which a program is imported; each call of its functions is a fork of it."""

    def __init__(self, program: str, python: str) -> None:
        """Start it.

        Args:
            program: path of the program.
            python: the interpreter that runs it.

        Raises:
            UsageError: there is no such interpreter, or the program cannot be imported.
        """
        child = Path(__file__).with_name("child.py")
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(child), os.path.abspath(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        except OSError as e:
            raise UsageError(
                f"{argument('python', python)} cannot be started ({e.strerror}). Give the path of an interpreter.",
                code="CKPT0203",
            ) from None
        self.introduction = self._read(_IMPORT_SECONDS)
        if "error" in self.introduction or self.introduction["status"] != "ok":
            said = self.introduction.get("error") or self.introduction["message"]
            self.close()
            raise UsageError(f"{program} cannot be imported by {python}: {said}.", code="CKPT0203")

    def ask(self, case: Case, function: str, seconds: float) -> dict[str, Any]:
        """Call a function of the program on a case: its answer (child.py)."""
        request = {
            "function": function,
            "folder": str(case.folder),
            "path": case.path,
            "about": dict(case.about),
            "layout": case.layout,
            "expected": str(case.folder / "expected.safetensors"),
            "seconds": seconds,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(request) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"status": "crashed", "message": "the program has ended the process that starts its functions"}
        return self._read(seconds + 60)

    def _read(self, seconds: float) -> dict[str, Any]:
        """Read an answer; "crashed" or "hung" if the process itself gives none."""
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            """End a process that does not answer."""
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            how = "hung" if late.is_set() else "crashed"
            return {"status": how, "message": "the process that starts the functions gave no answer"}
        answer: dict[str, Any] = {"status": "ok"} | parse(line, "the answer of a program")
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def acid(
    program: str,
    kit: str | None = None,
    cases: tuple[str, ...] = (),
    seconds: float = 60,
    processes: int = 2,
    python: str = sys.executable,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> AcidResult:
    """Run a program over the cases of a kit, and judge what it makes of each.

    Args:
        program: a Python file with the functions load, save, list and verify, or some of them.
        kit: a .tar.xz or a folder; None: the one that comes with ckpttool.
        cases: globs of the names of cases; none: all.
        seconds: the limit of each call.
        processes: how many processes share the cases.
        python: the interpreter that runs the program.
        progress: called with ("acid", cases done, all cases).

    Raises:
        NotRecognised: there is no such program, or it is no kit. Unsupported: it is a later one.
        Corrupt: the kit is damaged. UsageError: the program cannot be imported, or no case has such a name.
    """
    if not os.path.isfile(program):
        raise NotRecognised(
            f"{program}: there is no such file. Give a Python file with the function load.", code="CKPT0302"
        )
    with open_kit(kit, cases) as chosen:
        waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in chosen:
            waiting.put(case)
        rows: dict[str, Row] = {}
        sessions: list[_Session] = []
        done_cases: list[Case] = []

        def work() -> None:
            """Take cases while there are some."""
            session = _Session(program, python)
            sessions.append(session)
            try:
                while not waiting.empty():
                    case = waiting.get_nowait()
                    if row := _examine(session, case, seconds):
                        rows[case.name] = row
                    done_cases.append(case)
                    progress("acid", len(done_cases), len(chosen))
            except queue.Empty:
                pass
            finally:
                session.close()

        with ThreadPoolExecutor(processes) as pool:
            for done in [pool.submit(work) for _ in range(min(processes, len(chosen)))]:
                done.result()
    doubt_refusals(rows)
    said = sessions[0].introduction
    ordered = [rows[c.name] for c in chosen if c.name in rows]
    return AcidResult(said["name"], said["versions"], ordered, [c.name for c in chosen if c.name not in rows])


def _examine(session: _Session, case: Case, seconds: float) -> Row | None:
    """Call the program's functions on a case and judge the answers; None if the case is none of its own."""
    said = session.introduction
    if not list_parts(case, said["claims"]):
        return None
    answers = {f: session.ask(case, f, seconds) for f in list_functions(case, said)}
    return judge(case, read_expected(case), said, answers)
