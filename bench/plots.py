"""Draw the plots of docs/benchmarks.md: `python bench/plots.py`, with the extra `bench` installed.

The numbers are those of bench/measured.json, which has what the tables of that page say: after a new run of bench/run.py, put its
numbers into both and run this. A test compares them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "plots"

#: Conversions that another tool does, too; those are drawn.
PEERS = ("DCP8 -> hf, 3.1 GB", "torch's HF shards -> hf, 3.1 GB", "ZeRO-3 W=8 -> hf, weights of 3.0 GB")
#: {file: (column, title, whether its axis is logarithmic)}
MEASURES = {
    "wall": ("wall_s", "wall time until the bytes are on the disk, seconds", False),
    "cpu": ("cpu_s_per_gb", "CPU seconds of all processes per GB", False),
    "memory": ("peak_mib", "peak memory of the largest process, MiB (logarithmic)", True),
}
#: Colours that stand out from a white page and from a black one: the pictures cannot know which they are on.
OURS, PEER, COPY, TEXT = "#5c6bc0", "#a1887f", "#90a4ae", "#767676"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "ckpttool", "font.family": "sans-serif", "font.size": 10,
    "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.edgecolor": TEXT,
}  # fmt: skip


def colour(tool: str) -> str:
    """The colour of a tool's bar."""
    return OURS if tool.startswith(("ckpttool", "to ")) else COPY if tool.startswith(("cp -r", "floor")) else PEER


def draw_bars(ax: Any, rows: list[tuple[str, float]], title: str, log: bool = False) -> None:
    """Draw one bar for each (tool, number), the first on top, with the number at its end."""
    tools, numbers = [tool for tool, _ in rows], [number for _, number in rows]
    bars = ax.barh(range(len(rows)), numbers, color=[colour(tool) for tool in tools], height=0.7)
    ax.set_yticks(range(len(rows)), tools)
    ax.invert_yaxis()
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
    ax.bar_label(bars, labels=[f"{number:g}" for number in numbers], padding=3, color=TEXT)
    ax.margins(x=0.12)
    if log:
        ax.set_xscale("log")
        ax.set_xlim(left=1, right=max(numbers) * 3)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.tick_params(axis="x", bottom=False, labelbottom=False, which="both")
    ax.tick_params(axis="y", length=0)


def save(figure: Any, name: str) -> None:
    """Write the picture, without what differs from run to run."""
    path = OUT / f"{name}.svg"
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    # Coordinates, which lie in attributes: a tenth of a point is enough.
    text = re.sub(r'"[^"]*"', lambda a: re.sub(r"-?\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}", a[0]), text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Draw all."""
    measured = json.loads((ROOT / "bench" / "measured.json").read_text(encoding="utf-8"))
    OUT.mkdir(exist_ok=True)
    drawn = [task for task in measured["conversions"] if task["task"] in PEERS]
    with plt.rc_context(STYLE):
        for name, (column, title, log) in MEASURES.items():
            heights = [len(task["rows"]) for task in drawn]
            figure, axes = plt.subplots(
                len(drawn),
                figsize=(6.2, 0.32 * sum(heights) + 0.5 * len(drawn)),
                height_ratios=heights,
                layout="constrained",
            )
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
            for ax, task in zip(axes, drawn, strict=True):
                draw_bars(ax, [(row["tool"], row[column]) for row in task["rows"]], task["task"], log)
            save(figure, name)
        figure, ax = plt.subplots(figsize=(6.2, 0.34 * len(measured["floor"]) + 0.5), layout="constrained")
        draw_bars(
            ax, [(row["tool"], row["cpu_s"]) for row in measured["floor"]], "CPU seconds for 3.1 GB, without read-back"
        )
        save(figure, "floor")


if __name__ == "__main__":
    main()
