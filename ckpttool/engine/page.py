"""The page of `inspect`: one HTML file about a checkpoint, which a browser shows without a network.

    render_checkpoint(summary, statistics=None, difference=None) -> str

What is short is HTML, made by the templates in `pages`. Everything about single tensors is JSON in columns, from which
the page's script draws the treemap, the list and the details; `describe_tensors` makes it. A name in a checkpoint may
be anything: JSON is ASCII and has no "<", and the script writes text only, never HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..index.checkpoint import Checkpoint, Chunks, tied_weights
from ..pages.render import include_file, make_environment, mark_as_html, render_page
from ..printable import count_noun
from .discover.unread_files import human

if TYPE_CHECKING:
    from .diff import Difference
    from .inspect import Summary
    from .stats import Statistics

__all__ = ["describe_tensors", "render_checkpoint"]

_BOXES = 300_000  # of all tensors together; a page with more would be slow to open
_BOXES_OF_ONE = 2048
_GROUPS, _LINES = 64, 100  # param groups, and names or values in a list of differences
_STATISTICS = ("norm", "mean", "std", "min", "max", "zeros", "nan", "infinite", "elements")
_MEASURES = ("moved", "max_abs", "max_rel", "max_ulp", "differing", "opposite_signs", "nan_mismatch")


def render_checkpoint(
    summary: Summary, statistics: Statistics | None = None, difference: Difference | None = None
) -> str:
    """Return a page about a checkpoint as one HTML file that loads no other file.

    Args:
        statistics: what `stats` returned for it, with exponents for histograms; None to show none.
        difference: what `diff` returned for it and another checkpoint; None to show none.

    Raises:
        UsageError: `statistics` or `difference` is of another checkpoint.
    """
    environment = make_environment("ckpttool.pages")
    environment.filters |= {"human": human, "counted": count_noun}
    # tensors of some layouts have no names until they are read, as the other two have done
    indices = [x.index for x in (statistics, difference, summary) if x is not None and x.index is not None]
    for one, what in ((statistics, "statistics"), (difference, "difference")):
        if one is not None and (one.index is None or one.index.root != indices[-1].root):
            raise UsageError(f"{what}: it is of another checkpoint than {summary.path}.", code="CKPT0223")
    data = describe_tensors(indices[0], statistics, difference)
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    groups = (summary.optimizer or {}).get("groups", [])
    parameters = summary.components.get("model", {}).get("elements")
    tiles = [
        ("step", "" if summary.step is None else f"{summary.step:,}"),
        ("written by", summary.trainer or ""),
        ("ranks", f"{summary.ranks:,}" if summary.ranks else ""),
        ("tensors", f"{summary.tensors:,}"),
        ("bytes of tensors", human(summary.bytes)),
        ("on disk", f"{human(summary.file_bytes)}, {count_noun(summary.files, 'file')}"),
        ("numbers in the model", f"{parameters:,}" if parameters else ""),
        ("optimizer", (summary.optimizer or {}).get("kind", "")),
    ]
    return render_page(
        environment,
        "inspect.html.j2",
        title=f"{summary.path}: {summary.layout} checkpoint",
        command="inspect",
        kind="plain",
        summary=summary,
        tiles=tiles,
        printed=str(summary).splitlines(),
        full=max([1, *(c["bytes"] for c in summary.components.values())]),
        groups=groups[:_GROUPS],
        options=list(dict.fromkeys(k for g in groups[:_GROUPS] for k in g if k != "parameters")),
        difference=difference,
        most=_LINES,
        data=mark_as_html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")),
        own_style=include_file(environment, "inspect.css"),
        script=include_file(environment, "inspect.js"),
    )


def describe_tensors(
    ckpt: Checkpoint, statistics: Statistics | None = None, difference: Difference | None = None
) -> dict[str, object]:
    """Return the data of a page about single tensors and files, as plain data.

    Lists with an entry for each tensor, in the order of the checkpoint: "names", "bytes", "chunks" (how many), "dtype"
    (index into "dtypes"), "shape" (index into "shapes"), "group" (param group, -1 without one), and "place" (index into
    "places", -1 if there are too many chunks). A place says where the chunks of a tensor are: [number of dimensions
    that are cut, the first of them, file numbers, starts, sizes].

    "tied" is {tensor: the tensor with the same bytes}, by index. "files" is {"names", "bytes", "ranks", "components":
    {component: bytes in each file}}. "statistics" and "difference" are None if the argument is. Numbers are rounded to
    7 digits; NaN and infinite ones are text.

    Raises:
        UsageError: `statistics` or `difference` is of another checkpoint.
    """
    names = list(ckpt.tensors)
    dtypes: dict[str, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    tied = tied_weights(ckpt.tensors)
    index = {name: i for i, name in enumerate(names)}
    group_of = {
        fqn: v.group for v in ckpt.values.values() if v.option == "params" for fqn in v.data if isinstance(fqn, str)
    }
    places = _Places(ckpt)
    for name, t in ckpt.tensors.items():
        dtypes.setdefault(t.dtype, len(dtypes))
        shapes.setdefault(t.shape, len(shapes))
        places.add(t.component, t.chunks, 0 if name in tied else t.nbytes / max(1, t.numel), t.shape)
    of_parameters = ("model", "optim")
    return {
        "names": names,
        "dtypes": list(dtypes),
        "dtype": [dtypes[t.dtype] for t in ckpt.tensors.values()],
        "shapes": list(shapes),
        "shape": [shapes[t.shape] for t in ckpt.tensors.values()],
        "bytes": [t.nbytes for t in ckpt.tensors.values()],
        "chunks": [len(t.chunks) for t in ckpt.tensors.values()],
        "group": [group_of.get(t.parameter, -1) if t.component in of_parameters else -1 for t in ckpt.tensors.values()],
        "place": places.of_tensors,
        "places": places.found,
        "tied": {index[name]: index[first] for name, first in tied.items()},
        "files": {
            "names": ckpt.files,
            "bytes": ckpt.sizes,
            "ranks": [ckpt.ranks.get(i, -1) for i in range(len(ckpt.files))],
            "components": {name: [round(n) for n in found] for name, found in places.bytes_of.items()},
        },
        "statistics": None if statistics is None else _list_statistics(names, statistics),
        "difference": None if difference is None else _list_differences(index, difference),
    }


class _Places:
    """Where the chunks of tensors lie: each arrangement once, since layers are alike."""

    def __init__(self, ckpt: Checkpoint) -> None:
        """Begin without tensors; of `ckpt`, only the number of files is used."""
        self._files, self._boxes = len(ckpt.files), 0
        self._known: dict[object, int] = {}
        self._numbers: dict[object, dict[int, int]] = {}
        self.of_tensors: list[int] = []
        self.found: list[object] = []
        self.bytes_of: dict[str, list[float]] = {}

    def add(self, component: str, chunks: Chunks, item: float, shape: tuple[int, ...]) -> None:
        """Add the next tensor: append the number of its arrangement to `of_tensors`, and count its bytes in each file.

        Args:
            component: the component whose bytes the tensor is counted in.
            chunks, shape: where the tensor's elements lie, and its shape.
            item: bytes of an element; 0 if the tensor's bytes are counted for another one that it is tied to.
        """
        key = (chunks.ndim, shape, *(column.tobytes() for column in (chunks.start, chunks.shape, chunks.file)))
        if key not in self._known:
            self._known[key] = self._add_place(chunks, shape)
            numbers: dict[int, int] = {}
            for row, file in enumerate(chunks.file):
                numbers[file] = numbers.get(file, 0) + math.prod(chunks.shape_of(row))
            self._numbers[key] = numbers
        self.of_tensors.append(self._known[key])
        in_files = self.bytes_of.setdefault(component, [0.0] * self._files)
        for file, count in self._numbers[key].items():
            in_files[file] += count * item

    def _add_place(self, chunks: Chunks, shape: tuple[int, ...]) -> int:
        """Add an arrangement of chunks to `found` and return its number; -1 if there are too many chunks."""
        count = len(chunks)
        if count > _BOXES_OF_ONE or self._boxes + count > _BOXES:
            return -1
        self._boxes += count
        n = chunks.ndim
        cut = [d for d in range(n) if any(x != shape[d] for x in chunks.shape[d::n])]
        first, last = (cut[0], cut[-1] + 1) if cut else (0, min(n, 1))
        starts, sizes = (
            [x for k in range(count) for x in column[k * n + first : k * n + last]]
            for column in (chunks.start, chunks.shape)
        )
        self.found.append([last - first, first, list(chunks.file), starts, sizes])
        return len(self.found) - 1


def _shorten_number(x: float | None) -> float | str | None:
    """Return a float rounded to 7 digits, or as text if it is NaN or infinite; integers and None are unchanged."""
    if x is None or isinstance(x, int):
        return x
    return float(f"{x:.7g}") if math.isfinite(x) else str(x)


def _list_statistics(names: list[str], statistics: Statistics) -> dict[str, object]:
    """Return the statistics of all tensors as columns, {column: list}.

    "exponents" has [smallest exponent, counts of it and the following ones] for each tensor; None if they were not
    counted.

    Raises:
        UsageError: the statistics are of another checkpoint.
    """
    rows = statistics.rows
    if odd := next(((n, r) for n, r in zip_longest(names, (r.name for r in rows)) if n != r), None):
        raise UsageError(
            f"The statistics are not of this checkpoint's tensors: {odd[1]} stands for {odd[0]}.", code="CKPT0223"
        )
    exponents = []
    for row in rows:
        counts = row.numbers.exponents
        low = min(counts, default=0)
        exponents.append([low, [counts.get(e, 0) for e in range(low, max(counts) + 1)]] if counts else None)
    columns: dict[str, object] = {k: [_shorten_number(getattr(r.numbers, k)) for r in rows] for k in _STATISTICS}
    return {**columns, "codes": [r.codes for r in rows], "exponents": exponents if any(exponents) else None}


def _list_differences(index: dict[str, int], difference: Difference) -> dict[str, object]:
    """Return a difference as plain data, with tensors as indices.

    Args:
        index: {name of a tensor: its index}.

    Returns:
        {"measures": names of the numbers in "changed", "changed": {tensor: numbers}, "dtypes" and "shapes": {tensor:
        that of the other checkpoint}, "only_here": indices, "only_there": names}.

    Raises:
        UsageError: the difference is of another checkpoint.
    """

    def find(names: Iterable[str]) -> dict[str, int]:
        """Return {name: index} of names that are all tensors of the checkpoint."""
        try:
            return {name: index[name] for name in names}
        except KeyError as e:
            said = f"The difference is not one of this checkpoint: it has no tensor {e}."
            raise UsageError(said, code="CKPT0223") from None

    data = {t.name: t for t in difference.data}
    return {
        "measures": _MEASURES,
        "changed": {i: [_shorten_number(getattr(data[n], k)) for k in _MEASURES] for n, i in find(data).items()},
        "dtypes": {i: difference.dtypes[n][1] for n, i in find(difference.dtypes).items()},
        "shapes": {i: difference.shapes[n][1] for n, i in find(difference.shapes).items()},
        "only_here": [index[n] for n in difference.only_in_a if n in index],
        "only_there": difference.only_in_b,
    }
