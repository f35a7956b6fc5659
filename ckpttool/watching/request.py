"""`WatchRequest`: the options of `watch`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..by_fields import ByFields
from ..errors import UsageError, argument
from ..options import OpenOptions, option
from ..storage import urls

__all__ = ["WatchRequest"]

_COMMANDS = "Commands"
_METRICS = "Metrics"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WatchRequest(ByFields):
    """How a run is watched. Times are in seconds.

    `state` is the folder of the journal; None for the one beside the run. `reading` is how each save is opened.
    """

    state: str | None = option(
        None, "Folder of the journal, the records and latest.verified; beside RUN by default.", metavar="DIR"
    )
    once: bool = option(
        False, "Look at the finished saves that are there, and exit: 0, or 4 or 5 if one that is there is bad."
    )
    poll: float = option(10.0, "Seconds between two looks at the folder.", metavar="SECONDS", least=0.05)
    settle: float = option(
        30.0, "Seconds for which no file of a save may change before it is read.", metavar="SECONDS", least=0
    )
    stall: float = option(
        1800.0, "Seconds without a change after which a save that lacks what is written last is reported.",
        metavar="SECONDS", least=0,
    )  # fmt: skip
    last: int | None = option(
        None, "Of the saves that wait, read the newest N and pass over the others.", metavar="N", least=1
    )
    max_rate: int | None = option(None, "Bytes a second to read at most: 200MB/s.", metavar="SIZE", size=True)
    norm_jump: float = option(
        10.0, "How many times its last norm a weight may have, if it is larger than all weights were.",
        metavar="FACTOR", least=1,
    )  # fmt: skip
    accept: str | None = option(
        None,
        "Take this save, which failed, for good, if it can be read: later ones are compared with it.",
        metavar="NAME",
    )
    recheck: float | None = option(
        None, "Hours after which the save of latest.verified is read again.", metavar="HOURS", least=0
    )
    then: str | None = option(
        None,
        "Run this for each proved save, without a shell; {path}, {name}, {step}, {digest} and {state} are replaced.",
        _COMMANDS,
        metavar="COMMAND",
    )
    every: int | None = option(
        None, "Run --then for steps that are multiples of N alone.", _COMMANDS, metavar="N", least=1
    )
    on_failure: str | None = option(
        None, "Run this for each save that is bad; the event is in $CKPTTOOL_EVENT.", _COMMANDS, metavar="COMMAND"
    )
    job_metrics: int | None = option(
        None, "Serve metrics for Prometheus at this port of 127.0.0.1.", _METRICS, metavar="PORT", least=0, most=65535
    )
    metrics_address: str = option(
        "127.0.0.1", "Address that the metrics are served at; 0.0.0.0 lets other machines read them.", _METRICS,
        metavar="ADDRESS",
    )  # fmt: skip
    metrics: str | None = option(
        None, "File for the metrics, for the textfile collector of node_exporter.", _METRICS, metavar="FILE.prom"
    )
    reading: OpenOptions = field(default_factory=OpenOptions)

    def __post_init__(self) -> None:
        """Check that `every` is given together with `then`.

        Raises:
            UsageError: it is given alone.
        """
        if self.every is not None and self.then is None:
            raise UsageError(f"{argument('every', self.every)} goes with {argument('then')}.", code="CKPT0204")

    def folder_of(self, run: str) -> str:
        """Return the absolute path of the journal's folder for a run.

        Raises:
            UsageError: the run is in a store, or a file; or the folder is the run's own or contains it.
        """
        if urls.is_url(run):
            raise UsageError(
                f"{urls.display_path(run)}: watch reads a folder on this machine. `ckpttool verify URL --read-data` "
                "proves one save of a store.",
                code="CKPT0214",
            )
        real = os.path.realpath(run)
        if os.path.isfile(real):
            raise UsageError(f"{run} is a file. Give the folder that the trainer saves it in.", code="CKPT0203")
        folder = os.path.realpath(self.state) if self.state is not None else f"{real}.ckpttool-watch"
        if real == folder or real.startswith(folder.rstrip("/") + "/"):
            raise UsageError(
                f"{argument('state', self.state)} is the run's own folder, or holds it. Give another one.",
                code="CKPT0211",
            )
        return folder
