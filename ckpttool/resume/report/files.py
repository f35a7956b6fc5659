"""Writes a report to files: report.json and report.html in a folder, JUnit XML, Prometheus metrics.

    write_reports(report, folder="report", junit_file="junit.xml", metrics_file="resume.prom")

Each file is complete or is not written. `terminal`, `junit`, `prometheus` and `html_page` lay out what `facts` says.
Names of tensors come from checkpoints of others: everywhere, characters that do not print are spelled out
(`escape_unprintable`), so that no name can control a terminal or break a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...storage.whole_file import write_text_file
from ..compare.verdict import Report
from .html_page import render_html
from .junit import render_junit
from .prometheus import render_metrics

__all__ = ["write_reports"]


def write_reports(
    report: Report,
    *,
    folder: str | os.PathLike[str] | None = None,
    junit_file: str | os.PathLike[str] | None = None,
    metrics_file: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write the files that are asked for, and return their paths; an argument that is None writes none.

    Each file is made beside its place and renamed, so that nobody reads half of one. The label `training` of the
    metrics is the file's name without ".prom".

    Args:
        folder: gets report.json and report.html; it is made if missing.
        junit_file: JUnit XML; its folder is made if missing.
        metrics_file: metrics for Prometheus; its folder must be there, since a collector reads it.

    Raises:
        UsageError: a file cannot be written there. NoSpace: the disk is full.
    """
    out: list[Path] = []
    if folder is not None:
        text = json.dumps(report.to_json(), indent=1, allow_nan=False, default=str)
        out += [
            write_text_file(Path(folder) / "report.json", text + "\n"),
            write_text_file(Path(folder) / "report.html", render_html(report)),
        ]
    if junit_file is not None:
        out.append(write_text_file(Path(junit_file), render_junit(report)))
    if metrics_file is not None:
        path = Path(metrics_file)
        try:
            previous = path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, ValueError):
            previous = None
        training = path.name.removesuffix(".prom")
        out.append(write_text_file(path, render_metrics(report, training=training, previous=previous), make=False))
    return out
