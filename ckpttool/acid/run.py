"""Runs a program of somebody over the cases of a kit, in processes of its own, and judges it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..bounded_json import encode, parse
from ..errors import NotRecognised, UsageError, argument
from ..storage.urls import make_path_absolute
from .kit import KIT_VERSION, Case, choose_cases, open_kit, read_expected_state
from .scoring import (
    FAILURES,
    PARTS,
    Answer,
    Row,
    judge_answers,
    list_called_functions,
    list_handled_parts,
    mark_unproven_refusals,
)

__all__ = ["AcidResult", "acid"]

#: Seconds in which a program has to be imported.
_IMPORT_SECONDS = 180


@dataclass(frozen=True)
class AcidResult:
    """The score card of a program.

    Attributes:
        program: its name.
        versions: {package: version}, as the program says.
        rows: the verdicts on each chosen case that the program handles.
        others: names of the chosen cases that it does not handle.
        also_run: names of whole cases that were not chosen and were run, to see whether the program reads what the
            chosen broken ones were made of. They have no rows.
    """

    program: str
    versions: Mapping[str, str]
    rows: list[Row]
    others: list[str]
    also_run: list[str]

    @property
    def summary(self) -> dict[str, dict[str, int]]:
        """Return {"golden": counts, "broken": counts}: how often each verdict was given, {verdict: number}, the most
        frequent first."""
        counted: dict[str, Counter[str]] = {"golden": Counter(), "broken": Counter()}
        for row in self.rows:
            counted["golden" if row.case.golden else "broken"].update(row.verdicts.values())
        return {kind: dict(c.most_common()) for kind, c in counted.items()}

    @property
    def passed(self) -> bool:
        """Whether no verdict is a failure: wrong, lost, accepted, ran code, crashed or hung."""
        return not any(v in FAILURES for row in self.rows for v in row.verdicts.values())

    def to_json(self) -> dict[str, object]:
        """Return the result as plain data, as --json prints it: the fields, with "cases" for `rows` and
        "not_its_layout" for `others`, and "kit_version", "passed" and "summary"."""
        return {
            "program": self.program,
            "versions": dict(self.versions),
            "kit_version": KIT_VERSION,
            "passed": self.passed,
            "summary": self.summary,
            "cases": [row.to_json() for row in self.rows],
            "not_its_layout": self.others,
            "also_run": self.also_run,
        }


class _Session:
    """A process in which a program is imported; each call of its functions is a fork of it."""

    def __init__(self, program: str, python: str) -> None:
        """Start the process, and read its first answer into `introduction`.

        Args:
            program: path of the program.
            python: the interpreter that runs it.

        Raises:
            UsageError: there is no such interpreter.
        """
        child = Path(__file__).with_name("child.py")
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(child), make_path_absolute(program)],
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

    def ask(self, case: Case, function: str, seconds: float) -> Answer:
        """Call a function of the tested program on a case.

        Args:
            function: "load", "save", "list" or "verify".
            seconds: time limit of the call.

        Returns:
            The answer of the process, as described in child.py; its "status" is "crashed" or "hung" if there was none.
        """
        request = {"function": function, "folder": str(case.folder), "path": case.path, "about": dict(case.about)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(request | {"seconds": seconds}) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"status": "crashed", "message": "its process ended in a call before this one"}
        return self._read(seconds + 60)

    def _read(self, seconds: float) -> Answer:
        """Read an answer of the process; the process is killed after `seconds`.

        Returns:
            The answer, or one with the status "crashed" or "hung" if the process gives none.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            hung = time.monotonic() >= end
            said = f"gave no answer in {seconds:g} s" if hung else "ended"
            return {"status": "hung" if hung else "crashed", "message": f"its process {said}"}
        answer: Answer = parse(line, "the answer of a program")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _refuse_untestable_program(program: str, said: Answer) -> None:
    """Raise UsageError if a program cannot be imported, or declares something that could not be tested.

    Args:
        program: path of the program.
        said: the first answer of its process (child.py).

    Raises:
        UsageError: it cannot be imported; it has some of `save`, `SAVES` and `load`, which a test of `save` needs, but
            not all; it claims an unknown part.
    """
    if said["status"] != "ok":
        raise UsageError(
            f"{program} cannot be imported: {said['message']}. Mend it, or give the interpreter that has its packages "
            f"with {argument('python')}.",
            code="CKPT0227",
        )
    there = {*said["functions"], *["SAVES"] * bool(said["saves"])}
    if there & {"save", "SAVES"} and not there >= {"save", "SAVES", "load"}:
        raise UsageError(
            f"{program} lacks {', '.join(sorted({'save', 'SAVES', 'load'} - there))}. A save is tested with three: the "
            "function save, the layouts that it writes (SAVES), and the function load, which reads them. Add what it "
            "lacks, or leave both save and SAVES out.",
            code="CKPT0227",
        )
    for layout, parts in (said["claims"] or {}).items():
        if odd := set(parts) - set(PARTS):
            raise UsageError(
                f"{program} has {min(odd)!r} of {layout} in CLAIMS. Parts are {', '.join(PARTS)}.", code="CKPT0227"
            )


def acid(
    program: str,
    kit: str | None = None,
    cases: tuple[str, ...] = (),
    seconds: float = 60,
    processes: int = 2,
    python: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AcidResult:
    """Run a program that reads checkpoints over the cases of a kit, and judge its answers on each.

    Args:
        program: a Python file with the functions load, save, list and verify, or some of them.
        kit: a .tar.xz or a folder; None: the one that comes with ckpttool.
        cases: globs for the names of cases; (): all cases.
        seconds: time limit of each call.
        processes: number of processes that share the cases.
        python: the interpreter that runs the program; None: the one that runs ckpttool.
        progress: called with (cases done, all cases).

    Raises:
        NotRecognised: the program does not exist, or the kit is not one.
        Unsupported: the kit is of another version.
        Corrupt: the kit is damaged.
        UsageError: the program cannot be imported, has no function to call, or claims none of the chosen cases; or a
            glob matches no case.
    """
    if not os.path.isfile(program):
        raise NotRecognised(
            f"{program}: there is no such file. Give a Python file with the function load.", code="CKPT0302"
        )
    with open_kit(kit) as every:
        chosen = choose_cases(every, cases)
        needed = {c.made_of for c in chosen} - {c.name for c in chosen}
        unlisted = [c for c in every if c.name in needed]
        total = len(unlisted) + len(chosen)
        waiting = iter(unlisted + chosen)  # of a list, which threads may share
        found: dict[str, Row | None] = {}

        def work(_: int) -> Answer:
            """Examine cases while there are some; return what the program says of itself."""
            session = _Session(program, python or sys.executable)
            try:
                _refuse_untestable_program(program, session.introduction)
                for case in waiting:
                    found[case.name] = _judge_case(session, case, seconds)
                    progress(len(found), total)
            finally:
                session.close()
            return session.introduction

        with ThreadPoolExecutor(processes) as pool:
            said, *_ = pool.map(work, range(min(processes, total)))
    rows = {name: row for name, row in found.items() if row is not None}
    mark_unproven_refusals(rows)
    result = AcidResult(
        program=said["name"],
        versions=said["versions"],
        rows=[rows[c.name] for c in chosen if c.name in rows],
        others=[c.name for c in chosen if c.name not in rows],
        also_run=[c.name for c in unlisted if c.name in rows],
    )
    if not any(row.verdicts for row in result.rows):
        claimed = "no CLAIMS" if said["claims"] is None else f"CLAIMS of {', '.join(said['claims']) or 'nothing'}"
        raise UsageError(
            f"{program} was asked for nothing. Of the functions load, list, verify and save, looked for at its top "
            f"level, it has {', '.join(said['functions']) or 'none'}, and {claimed}; the chosen cases are of "
            f"{', '.join(sorted({c.layout for c in chosen}))}. Define load(path, about) there, claim one of these "
            "layouts, or choose other cases.",
            code="CKPT0227",
        )
    return result


def _judge_case(session: _Session, case: Case, seconds: float) -> Row | None:
    """Call the program's functions on a case, and judge the answers.

    Args:
        session: the process of the program.
        seconds: time limit of each call.

    Returns:
        The verdicts; None if the program does not claim to handle the case.
    """
    said = session.introduction
    if not list_handled_parts(case, said["claims"]):
        return None
    answers = {f: session.ask(case, f, seconds) for f in list_called_functions(case, said)}
    return judge_answers(case, read_expected_state(case), said, answers)
