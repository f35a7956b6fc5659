"""The report of `compare`: report.json and report.html, with a row for each layer."""

from __future__ import annotations

import os
from pathlib import Path

from ...engine.logits.compare_logits import LogitComparison
from ...pages.render import make_environment, render_page
from ...printable import printable_json
from ...storage.whole_file import write_text_file

__all__ = ["write_comparison"]


def write_comparison(found: LogitComparison, a: str, b: str, folder: str | os.PathLike[str]) -> None:
    """Write report.json and report.html of a comparison of logits into a folder, which is made if it is missing.

    Args:
        found: the comparison.
        a, b: names of the two checkpoints, for the page.
        folder: the folder.

    Raises:
        UsageError: a file cannot be written there. NoSpace: the disk is full.
    """
    numbers = {
        "KL divergence, mean": found.kl_mean,
        "KL divergence, worst position": found.kl_max,
        "largest logit difference": found.largest,
        "bound": found.bound,
    }
    page = render_page(
        make_environment("ckpttool.resume.report"),
        "logits.html.j2",
        title=f"{found.word}: {Path(a).name} and {Path(b).name}",
        command="compare",
        word=found.word,
        found=found,
        a=a,
        b=b,
        kind="pass" if found.equal else "fail",
        tiles=[
            *((name, f"{value:.3g}") for name, value in numbers.items() if value is not None),
            ("top-1 agrees", "" if found.top1_equal is None else f"{found.top1_equal:,} of {found.tokens:,}"),
        ],
    )
    write_text_file(Path(folder) / "report.json", printable_json(found.to_json(), default=str) + "\n")
    write_text_file(Path(folder) / "report.html", page)
