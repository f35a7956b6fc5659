"""`stats`: what the numbers of a checkpoint are like, tensor by tensor or folded by layer, in one streamed pass.

With `against`, a second pass over both measures how far each tensor moved: |a - b| relative to |b|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from ..errors import UsageError, argument
from ..huggingface import encodings
from ..index.fqns import mask_name_numbers
from ..options import OpenKeywords, list_keywords
from ..printable import Shown, count_noun, printable, replace_non_finite_numbers
from .copy.fill import Progress, silent
from .copy.tensor_digests import reporting
from .copy.tensor_statistics import StatisticsCounter, TensorStatistics, merge_statistics
from .copy.value_digests import state_roots
from .diff import measure_relative_distances
from .opening import CheckpointPath, OpenOptions, drop_unfit_source_layout, open_checkpoint
from .workers.coordinator import digest_with_workers, workers_for_reading
from .workers.executors import WorkersSpec

if TYPE_CHECKING:
    from rich.table import Table

    from ..index.checkpoint import Checkpoint

__all__ = ["COLUMNS", "Statistics", "StatisticsRow", "stats"]

#: What rows may be sorted by, and the columns of CSV.
COLUMNS = (
    "name", "tensors", "dtype", "shape", "elements", "norm", "mean", "std", "min", "max", "zeros", "nan", "infinite",
    "moved",
)  # fmt: skip


@dataclass
class StatisticsRow:
    """A tensor, or several that are alike but for the numbers in their names.

    `dtype` and `shape` are None where the tensors of a row have several. `codes` is the scheme of numbers that mean
    nothing without their scales; `moved` is |this - the other| / |the other|, None where there is no other.
    """

    name: str
    tensors: int
    dtype: str | None
    shape: tuple[int, ...] | None
    numbers: TensorStatistics
    codes: str | None = None
    moved: float | None = None

    def cell(self, column: str) -> Any:
        """Return the row's value in one of `COLUMNS`: a text, a number or a shape; None if there is none."""
        return getattr(self, column) if column in self.__dict__ else getattr(self.numbers, column)


@dataclass(repr=False)
class Statistics(Shown):
    """What `stats` found, in rows for each tensor in the order of the checkpoint; `folded` and `sorted_by` make other
    ones.

    `digest` {"all", "model", ...: Merkle root in hex} is that of `digest`, of the same bytes; `only_here` and
    `only_there` are tensors that one of the two has, `not_compared` those of other shapes, of packed dtypes or of
    quantised codes; `not_read` files that belong to the checkpoint and were not looked at.
    """

    rows: list[StatisticsRow]
    digest: dict[str, str]
    not_read: list[dict[str, object]]
    only_here: list[str] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    index: Checkpoint | None = field(default=None, compare=False)  # the checkpoint itself, without bytes of tensors

    def folded(self) -> Statistics:
        """Return a copy in which tensors whose names differ only in numbers are one row: "layers.#.mlp.weight"."""
        groups: dict[tuple[str, str | None], list[StatisticsRow]] = {}
        for row in self.rows:
            groups.setdefault((mask_name_numbers(row.name), row.codes), []).append(row)
        return replace(self, rows=[_fold_rows(name, codes, rows) for (name, codes), rows in groups.items()])

    def sorted_by(self, column: str) -> Statistics:
        """Return a copy with the rows sorted by one of `COLUMNS`: names and dtypes ascending, numbers descending, and
        rows without a number last.

        Raises:
            UsageError: there is no such column.
        """
        if column not in COLUMNS:
            raise UsageError(
                f"{argument('sort', column)}: there is no such column. There are {', '.join(COLUMNS)}.", code="CKPT0203"
            )
        if column in ("name", "dtype"):
            rows = sorted(self.rows, key=lambda row: str(row.cell(column)))
        else:
            rows = sorted(self.rows, key=lambda row: _make_descending_key(row.cell(column)))
        return replace(self, rows=rows)

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; numbers that are infinite become text."""
        rows = [
            {k: v for k, v in {**asdict(r), **asdict(r.numbers)}.items() if k not in ("numbers", "exponents")}
            | ({"exponents": r.numbers.exponents} if r.numbers.exponents else {})
            for r in self.rows
        ]
        return {
            "rows": replace_non_finite_numbers(rows),
            **{k: getattr(self, k) for k in ("digest", "not_read", "only_here", "only_there", "not_compared")},
        }

    def csv(self) -> Iterator[str]:
        """Yield the rows as lines of CSV, the first of them with the names of `COLUMNS`."""
        import csv
        import io

        for cells in (COLUMNS, *([row.cell(c) for c in COLUMNS] for row in self.rows)):
            out = io.StringIO()
            csv.writer(out, lineterminator="").writerow(
                ["x".join(map(str, c)) if isinstance(c, tuple) else "" if c is None else c for c in cells]
            )
            yield out.getvalue()

    def headline(self) -> str:
        """Return how many rows and tensors there are."""
        return f"{len(self.rows):,} rows of {count_noun(sum(row.tensors for row in self.rows), 'tensor')}"

    def lines(self) -> Iterator[str]:
        """Yield the table as text."""
        from rich.console import Console

        screen = Console(width=10_000, color_system=None, force_jupyter=False)
        with screen.capture() as drawn:
            screen.print(self.draw())
        yield from (line.rstrip() for line in drawn.get().splitlines())

    def draw(self) -> Table:
        """Return the rows as a table of rich."""
        from rich.table import Table

        moved = any(row.moved is not None for row in self.rows)
        several = any(row.tensors > 1 for row in self.rows)
        odd = [c for c in ("nan", "infinite") if any(row.cell(c) for row in self.rows)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        columns = ["name", *(["tensors"] if several else []), "dtype", "shape", "norm", "mean", "std", "min", "max",
                   "zeros", *odd, *(["moved"] if moved else [])]  # fmt: skip
        for column in columns:
            text = column in ("name", "dtype", "shape")
            table.add_column(column, justify="left" if text else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(printable(_format_cell(row, c)) for c in columns))
        return table


def _make_descending_key(x: Any) -> tuple[bool, object]:
    """Return a sort key that puts large numbers first, and None and NaN last; a shape counts as its number of elements.

    Args:
        x: a value of `StatisticsRow.cell`: a number, a shape, or None.
    """
    if isinstance(x, tuple):
        x = math.prod(x)
    return (x is None or math.isnan(x), 0 if x is None or math.isnan(x) else -x)


def _format_cell(row: StatisticsRow, column: str) -> str:
    """Return a cell as text: floats with four digits, zeros as a percentage, "-" if there is no value."""
    x = row.cell(column)
    if column == "name" and row.codes is not None:
        return f"{x} (codes: {row.codes})"
    if x is None:
        return "-" if column != "shape" else "several"
    if column == "shape":
        return "x".join(map(str, x)) or "1 number"
    if column == "zeros":
        return f"{x / row.numbers.elements:.1%}" if x and row.numbers.elements else str(x)
    return f"{x:.4g}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def _fold_rows(name: str, codes: str | None, rows: list[StatisticsRow]) -> StatisticsRow:
    """Combine several rows into one row with this name, as if their tensors were one.

    `moved` is the L2 norm of all differences divided by that of all tensors.

    Args:
        codes: scheme of the rows' numbers if they are codes; None otherwise.
    """
    dtypes, shapes = {r.dtype for r in rows}, {r.shape for r in rows}
    moved = None
    if all(r.moved is not None and r.numbers.norm is not None for r in rows):
        others = [(r.moved or 0.0, r.numbers.norm or 0.0) for r in rows]
        size = math.hypot(*(n for _, n in others))
        moved = math.hypot(*(m * n for m, n in others)) / size if size else max(m for m, _ in others)
    return StatisticsRow(
        name,
        sum(r.tensors for r in rows),
        dtypes.pop() if len(dtypes) == 1 else None,
        shapes.pop() if len(shapes) == 1 else None,
        merge_statistics(r.numbers for r in rows),
        codes,
        moved,
    )


@list_keywords
def stats(
    path: CheckpointPath,
    *,
    against: CheckpointPath | None = None,
    exponents: bool = False,
    only: Iterable[str] | None = None,
    weights: str | None = None,
    workers: WorkersSpec = None,
    progress: Progress = silent,
    **reading: Unpack[OpenKeywords],
) -> Statistics:
    """Compute norm, mean, standard deviation, smallest and largest number, zeros, NaN and infinities of every tensor,
    in float64 and constant memory; every byte is read.

    Args:
        against: an earlier checkpoint of the same model, in any layout, to measure how far each tensor moved since. It
            is read with the same arguments, but without `weights`, as it was saved.
        exponents: also count the numbers of every tensor by their binary exponent.
        workers: processes that read the data, as in `convert`; they do not compare with `against`.
        progress: called with ("stats", bytes done, bytes in all); after that with "compare" for `against`, and before
            with "prove" if tensors have no names until they are read.
        (the others): as `open`.

    Raises:
        CkpttoolError: one of the checkpoints cannot be read.
    """
    options = OpenOptions(only=only, weights=weights, **reading)
    with open_checkpoint(path, options) as opened, workers_for_reading(workers, path, opened.checkpoint.nbytes) as crew:
        with reporting(progress):
            ckpt = opened.locate()
        counter = StatisticsCounter(ckpt.tensors, exponents)
        digests = digest_with_workers(opened, path, options, crew, progress, "stats", statistics=counter)
        opened.source.assert_unchanged()
        codes = encodings.find_codes(ckpt, opened.source if opened.folder else None)
        rows = [
            StatisticsRow(
                n, 1, t.dtype, t.shape, counter.found.get(n, TensorStatistics()),
                codes.weights[codes.belongs[n]].scheme if codes.belongs.get(n) in codes.weights else None,
            )
            for n, t in ckpt.tensors.items()
        ]  # fmt: skip
        out = Statistics(rows, state_roots(ckpt, digests), [r.to_json() for r in ckpt.unread], index=ckpt)
        if against is not None:
            hints = replace(drop_unfit_source_layout(against, options), weights=None)
            with open_checkpoint(against, hints, check_hints=False) as other:
                with reporting(progress):
                    other.locate()
                moved = measure_relative_distances(opened, other, progress)
                other.source.assert_unchanged()
                out.only_here = [n for n in ckpt.tensors if n not in other.checkpoint.tensors]
                out.only_there = [n for n in other.checkpoint.tensors if n not in ckpt.tensors]
                both = ckpt.tensors.keys() & other.checkpoint.tensors.keys()
            for row in rows:
                row.moved = None if row.codes else moved.get(row.name)
            out.not_compared = [row.name for row in rows if row.moved is None and row.name in both]
    return out
