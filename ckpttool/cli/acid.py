"""`ckpttool acid`: parse, call, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import Differs
from ..printable import list_first
from .help import about
from .terminal import Json, Meter, Quiet, note, print_json, say

if TYPE_CHECKING:
    from ..acid.run import AcidResult

__all__ = ["acid"]

_COLUMNS = ("weights", "optimizer", "values", "load", "list", "verify", "save")


@about(
    ("What does this program make of whole and broken checkpoints?", "ckpttool acid reader.py"),
    ("Some cases, with another Python", "ckpttool acid reader.py --case 'zero3*' --python venv/bin/python"),
    ("For a script", "ckpttool acid reader.py --json"),
    exits=(0, 1, 2, 3, 4, 5, 8, 14, 130),
    meaning={
        2: "usage, or the program has nothing to test",
        3: "no such program, or no kit",
        5: "something is wrong, lost, accepted, executed, crashed or hung",
    },
)
def acid(
    program: Annotated[
        str,
        typer.Argument(
            help="A Python file with functions load(path, about), list(path, about), verify(path, about) and "
            "save(state, path, layout), or some of them.",
            show_default=False,
        ),
    ],
    kit: Annotated[
        str | None,
        typer.Option("--kit", help="Another kit: a .tar.xz or a folder.  [default: ckpttool's own]", metavar="PATH"),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", help="Run the cases of these names; repeatable.", metavar="GLOB")
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", help="Seconds after which a call counts as hung.", min=0.1, max=86_400)
    ] = 60,
    processes: Annotated[int, typer.Option("--processes", help="Processes that share the cases.", min=1)] = 2,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            help="The interpreter, 3.11 or later, that runs the program.  [default: ckpttool's own]",
            metavar="PATH",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a program that reads checkpoints over small whole and broken ones, and print what it makes of each."""
    from ..acid.run import acid as run

    def progress(cases: int, total: int) -> None:
        """Print a line for every tenth case."""
        if cases % 10 == 0 or cases == total:
            note(f"{cases} of {total} cases", quiet or as_json)

    with Meter(quiet=True) as meter:
        done = run(
            program,
            kit=kit,
            cases=tuple(case or ()),
            seconds=limit,
            processes=processes,
            python=python,
            progress=progress,
        )
    if as_json:
        print_json(done.to_json())
    else:
        _print_score_card(done, quiet)
        note(f"took {meter.seconds:.0f} s", quiet)
    if not done.passed:
        raise typer.Exit(Differs.exit_code)


def _print_score_card(done: AcidResult, quiet: bool) -> None:
    """Print the verdicts on each case, the reasons of those that are not "right", and the number of each verdict."""
    width = max((len(row.case.name) for row in done.rows), default=0)
    for row in done.rows:
        verdicts = [f"{c} {row.verdicts[c]}" for c in _COLUMNS if c in row.verdicts]
        say(f"{row.case.name:{width}s}  {', '.join(verdicts) or 'no verdict'}")
        for column, reason in row.reasons.items():
            first, *more = reason.splitlines()
            say(f"{'':{width}s}    {column}: {first}{' ... (--json has all of it)' if more else ''}")
    for kind, counted in done.summary.items():
        say(f"{kind}: {', '.join(f'{n} {verdict}' for verdict, n in counted.items()) or 'no verdicts'}")
    if done.others:
        note(f"left out, as CLAIMS has nothing of them: {list_first(done.others)}", quiet)
    if done.also_run:
        note(f"also run, but not listed, since broken ones were made of it: {', '.join(done.also_run)}", quiet)
