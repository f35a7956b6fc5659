"""What a watcher knows, as metrics in Prometheus' text format: served at a port, or written to a file.

render_watch_metrics(watcher) -> str
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..engine.doctor.findings import DAMAGE
from ..errors import UsageError, argument, kind_of_failure
from ..resume.report.prometheus import format_metrics
from .watch import Watcher

__all__ = ["METRICS", "MetricsServer", "render_watch_metrics", "write_metrics"]

#: Every metric of `watch`, its type and its HELP. docs/how-to/watch.md says more, alerts.yml uses them.
METRICS = {
    "saves": ("gauge", "Saves that are in the folder of the run, by what is known of them."),
    "findings": ("gauge", "Findings of the saves in state failed, by kind."),
    "newest_step": ("gauge", "The step of the newest save."),
    "verified_step": ("gauge", "The step of the save that latest.verified leads to."),
    "verified_saved_timestamp_seconds": ("gauge", "When the save that latest.verified leads to was written."),
    "waiting_since_timestamp_seconds": ("gauge", "When the oldest save that waits to be read was written."),
    "look_timestamp_seconds": ("gauge", "When the last look at the run began."),
    "verdicts_total": ("counter", "Events of the journal, by kind."),
    "read_bytes_total": ("counter", "Bytes of tensors that were read since the start."),
    "cpu_seconds_total": ("counter", "CPU time of reading since the start."),
}
_STATES = ("verified", "failed", "unfinished", "unjudged", "skipped", "waiting")


def render_watch_metrics(watcher: Watcher) -> str:
    """Return the metrics of a watcher in Prometheus' text format; what is not known is left out."""
    found: dict[str, list[tuple[dict[str, object], float]]] = {}

    def add(metric: str, value: float | None, **labels: object) -> None:
        if value is not None:
            found.setdefault(metric, []).append((labels, float(value)))

    events = [e for save in watcher.saves if (e := watcher.journal.knows(save)) is not None]
    states = Counter(e["event"] for e in events)
    states["waiting"] = len(watcher.waiting)
    for state in _STATES:
        add("saves", states[state], state=state)
    kinds = Counter(
        f["kind"] for e in events if e["event"] == "failed" for f in e["findings"] if f["severity"] == DAMAGE
    )
    for kind, n in sorted(kinds.items()):
        add("findings", n, kind=kind)
    steps = [save.step for save in watcher.saves if save.step is not None]
    add("newest_step", max(steps, default=None))
    if (newest := watcher.newest_proved()) is not None:
        add("verified_step", newest.step)
        add("verified_saved_timestamp_seconds", newest.changed)
    add("waiting_since_timestamp_seconds", min((save.changed for save in watcher.waiting), default=None))
    add("look_timestamp_seconds", watcher.looked)
    for kind in ("verified", "failed", "unfinished", "changed", "deleted", "command"):
        add("verdicts_total", watcher.journal.counts.get(kind, 0), event=kind)
    add("read_bytes_total", watcher.costs["read_bytes"])
    add("cpu_seconds_total", watcher.costs["cpu_seconds"])
    return format_metrics("ckpttool_watch", METRICS, found, {"run": os.path.basename(watcher.run)})


def write_metrics(path: str, text: str) -> None:
    """Replace a file of metrics in one step.

    Raises:
        NoSpace, NotPermitted, CkpttoolError: it cannot be written.
    """
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(f"{path}.tmp", path)
    except OSError as e:
        raise kind_of_failure(e)(f"{path} cannot be written: {e.strerror}.") from e


class MetricsServer:
    """Serves `text`, which the watcher replaces, at http://ADDRESS:PORT/metrics, from a thread.

    Raises:
        UsageError: the port is in use, or this user may not listen there.
    """

    def __init__(self, address: str, port: int) -> None:
        self.text = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            """Answers GET /metrics."""

            server_version, sys_version = "ckpttool", ""
            timeout = 10

            def do_GET(self) -> None:
                """Send the metrics; 404 for any other path."""
                known = self.path.partition("?")[0] in ("/", "/metrics")
                data = outer.text.encode() if known else b"not found\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: stderr is for what the watcher finds."""

        try:
            self._server = ThreadingHTTPServer((address, port), Handler)
        except (OSError, OverflowError) as e:
            raise UsageError(
                f"{argument('job_metrics', port)}: {address}:{port} cannot be listened at: "
                f"{getattr(e, 'strerror', e)}. Give another port.",
                code="CKPT0203",
            ) from e
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="ckpttool-metrics", daemon=True).start()

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
