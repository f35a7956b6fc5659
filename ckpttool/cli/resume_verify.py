"""`ckpttool resume-verify`: parse, call, draw, write reports.

Its options are the fields of `VerifyRequest`, and those of every command that reads a checkpoint.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from ..errors import UsageError, kind_of_failure
from ..options import OpenOptions
from ..printable import printable
from ..resume.request import VerifyRequest
from ..storage.urls import make_path_absolute
from .help import READING, about
from .shared_options import EDITS, add_shared_options
from .terminal import (
    Json,
    Latest,
    Quiet,
    Src,
    draw,
    find_newest,
    make_console,
    note,
    print_json,
)

__all__ = ["resume_verify"]


@about(
    (
        "Does the converted checkpoint train as the original does?",
        "ckpttool resume-verify dcp3 --against run/ckpt --config llama --world-size 3 --against-world-size 4",
    ),
    (
        "Compare with what ckpttool.Recorder wrote in the original job",
        "ckpttool resume-verify zero3 --reference reference.jsonl --config llama --data tokens.npy",
    ),
    (
        "Smoke test of a recipe: train, save, resume at two world sizes, compare",
        "ckpttool resume-verify --fresh --job recipe.py:build --world-size 2",
    ),
    ("Your own job, and a report", "ckpttool resume-verify dcp3 --against run/ckpt --job job.py:build --report report"),
    exits=(*READING, 10, 11, 12, 13),
    meaning={
        10: "training does not continue as before, or that could not be judged",
        11: "a gate is not met",
        12: "the checkpoint does not fit the job",
    },
)
@add_shared_options("only", "weights", *EDITS)
def resume_verify(
    reading: OpenOptions,
    request: VerifyRequest,
    src: Annotated[str | None, *Src.__metadata__] = None,
    latest: Latest = False,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Write report.html and report.json to this folder.",
            metavar="DIR",
            rich_help_panel="Reports",
        ),
    ] = None,
    junit: Annotated[
        str | None, typer.Option("--junit", help="Write JUnit XML.", metavar="FILE", rich_help_panel="Reports")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Write Prometheus metrics.", metavar="FILE.prom", rich_help_panel="Reports"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on from a checkpoint in a live FSDP2 job, and check that it goes on as before; exit 10 if not.

    Exit 12: the checkpoint does not fit the job. With --fresh, train a job from its start, save it, and check that it
    resumes from that.
    """
    from ..resume.ranks.torchrun import exit_together, is_rank_of_job, lasting_job
    from ..resume.report.files import write_reports
    from ..resume.report.terminal import render_terminal
    from ..resume.verify import run_verify_request

    _check_report_paths(report, junit, metrics)
    gc.enable()  # a training job makes cycles
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from ..engine.workers.local_worker import die_with_parent

        die_with_parent(os.getppid())  # however torchrun ends
    if src is not None:
        src = find_newest(src, latest, quiet or as_json)
    elif latest:
        raise UsageError("--latest looks for the newest checkpoint below a folder: give that folder.", code="CKPT0204")
    progress = _Progress(quiet)
    with lasting_job():
        try:
            found = run_verify_request(replace(request, source=src or "", reading=reading, status=progress))
        finally:
            progress.close()
        if found is not None:  # None on other ranks than the first of a job that was started from outside
            if not as_json:
                draw(render_terminal(found))
                sys.stdout.flush()
            write_reports(found, folder=report, junit_file=junit, metrics_file=metrics)
            if as_json:
                print_json(found.to_json())
        if is_rank_of_job():
            exit_together(0 if found is None else found.exit_code)
    if found is not None and found.exit_code:
        raise typer.Exit(found.exit_code)


def _check_report_paths(report: str | None, junit: str | None, metrics: str | None) -> None:
    """Raise, before anything runs, if a report could not be written. The folder `report` is created.

    Args:
        report, junit, metrics: the folder and the two files that the command line names; None: no such report.

    Raises:
        UsageError, CkpttoolError: a folder does not exist and cannot be created, or a path is not a regular file.
    """
    if report is not None:
        try:
            os.makedirs(report, exist_ok=True)
        except OSError as e:
            raise kind_of_failure(e, UsageError)(f"--report {report}: {e.strerror or e}.") from None
    if metrics is not None and not os.path.isdir(folder := os.path.dirname(make_path_absolute(metrics))):
        raise UsageError(f"--metrics {metrics}: this folder does not exist: {folder}.", code="CKPT0212")
    for option, file in (("--junit", junit), ("--metrics", metrics)):
        if file is not None and os.path.exists(file) and not os.path.isfile(file):
            raise UsageError(f"{option} {file}: there is something that is not a regular file.", code="CKPT0212")


class _Progress:
    """Progress on stderr: one changing line on a terminal, one line per step in a log."""

    def __init__(self, quiet: bool) -> None:
        """Begin to measure time; with `quiet`, show nothing."""
        self.quiet, self.began, self.status = quiet, time.monotonic(), None

    status: Any

    def __call__(self, text: str) -> None:
        """Show what is being done now."""
        if self.quiet:
            return
        if not sys.stderr.isatty():
            note(f"[{time.monotonic() - self.began:6.1f} s] {text}")
            return
        if self.status is None:
            self.status = make_console(stderr=True).status("")
            self.status.start()
        from rich.text import Text

        self.status.update(Text(printable(text)))

    def close(self) -> None:
        """Take the line off the screen, if there is one."""
        if self.status is not None:
            self.status.stop()
            self.status = None
