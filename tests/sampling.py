"""Tables of cases of which `make test` runs a sample; `make test-all`, and EVERY=1 before pytest, run every row."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar
from zlib import crc32

Row = TypeVar("Row")

EVERY = os.environ.get("EVERY") == "1"
#: {table: (rows that this run leaves out, all its rows)}, which the summary of pytest shows.
LEFT_OUT: dict[str, tuple[int, int]] = {}


def sample(table: str, rows: Iterable[Row], one_in: int | None, keep: Iterable[Row] = ()) -> list[Row]:
    """Return the rows of a table that this run tests, in their order.

    A row is chosen by a hash of its str(), so that a new row does not move the others.

    Args:
        table: its name in the summary.
        one_in: about one in so many rows is chosen; None for those of `keep` alone.
        keep: rows that every run tests.
    """
    rows, keep = list(rows), list(keep)
    assert all(row in rows for row in keep), f"{table} has not all of {keep}"
    chosen = [
        row for row in rows if EVERY or row in keep or (one_in is not None and crc32(str(row).encode()) % one_in == 0)
    ]
    LEFT_OUT[table] = (len(rows) - len(chosen), len(rows))
    return chosen
