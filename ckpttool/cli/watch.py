"""`ckpttool watch`: parse, call, print."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Annotated

import typer

from ..errors import Interrupted
from ..options import OpenOptions
from ..printable import printable
from ..storage.urls import make_path_absolute
from ..watching.request import WatchRequest
from .help import about
from .shared_options import EDITS, add_shared_options
from .terminal import Json, Quiet, note, say

__all__ = ["watch"]


@about(
    ("Beside a training job", "ckpttool watch run"),
    ("With metrics, at 200 MB/s at most", "ckpttool watch run --job-metrics 9400 --max-rate 200MB/s"),
    ("Once, in cron or CI", "ckpttool watch run --once --json"),
    ("Archive every 1,000th step that is proved", "ckpttool watch run --every 1000 --then "
     "'ckpttool audit export {path} /archive/{name}.tar.zst'"),
    exits=(0, 1, 2, 3, 4, 5, 6, 8, 14, 130),
    meaning={0: "ended by a signal; with --once: no save that is there is bad",
             3: "with --once: a save could not be judged", 4: "with --once: a save is damaged or sick",
             5: "with --once: a save is not what was recorded of it",
             130: "with --once: stopped by a signal; the same command continues"},
)  # fmt: skip
@add_shared_options("only", "weights", "tag", *EDITS)
def watch(
    run: Annotated[str, typer.Argument(help="Folder that a trainer saves in.", show_default=False)],
    request: WatchRequest,
    reading: OpenOptions,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prove each save of a running job: bytes, numbers and steps; latest.verified leads to the newest good one."""
    from ..watching.describe import describe_event
    from ..watching.gentle import lower_priority
    from ..watching.journal import open_journal
    from ..watching.metrics import MetricsServer, render_watch_metrics, write_metrics
    from ..watching.watch import Watcher

    request = replace(request, reading=reading)
    folder = request.folder_of(run)
    gc.enable()  # this process may live for months
    lower_priority()

    with ExitStack() as held:
        journal = held.enter_context(open_journal(folder, run))
        note(f"watching {make_path_absolute(run)}; journal and latest.verified in {folder}", quiet)
        server = None
        if request.job_metrics is not None:
            server = held.enter_context(closing(MetricsServer(request.metrics_address, request.job_metrics)))
            note(f"metrics at http://{request.metrics_address}:{server.port}/metrics", quiet)

        def publish() -> None:
            """Render the metrics as they are now."""
            if server is not None or request.metrics is not None:
                text = render_watch_metrics(watcher)
                if server is not None:
                    server.text = text
                if request.metrics is not None:
                    write_metrics(request.metrics, text)

        def report(event: dict[str, object]) -> None:
            """Print an event on stdout, as a line of JSON or for people; the metrics have it then."""
            publish()
            for line in [json.dumps(event)] if as_json else map(printable, describe_event(event)):
                say(line)
            sys.stdout.flush()

        watcher = Watcher(run, request, journal, report)
        try:
            publish()
            if request.once:
                watcher.watch_once()
                publish()
            else:
                watcher.watch(publish)
        except KeyboardInterrupt:
            if request.once:
                raise Interrupted("stopped; the same command continues where this one stopped.") from None
            note("stopped; the same command continues where this one stopped")  # the usual end of a watch
        if request.once and (code := watcher.exit_code()):
            raise typer.Exit(code)
