"""Tables of cases of which `make test` runs a sample; `make test-all`, and EVERY=1 before pytest, run every row."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar
from zlib import crc32

Row = TypeVar("Row")

EVERY = os.environ.get("EVERY") == "1"
#: {table: (rows that this run leaves out, all its rows)}, which the summary of pytest shows.
LEFT_OUT: dict[str, tuple[int, int]] = {}
#: Files whose parametrized tests take longest, a second or so a row: one row in three of each test is run.
SAMPLED = (
    "attacks/test_audit_attacks.py", "attacks/test_kinds.py", "attacks/test_planted.py", "attacks/test_printed_names.py",
    "cli/test_interrupts.py", "converters/test_matrix.py", "converters/test_megatron.py", "engine/test_adapter.py", "engine/test_averaging.py",
    "engine/test_casts.py", "engine/test_conservation.py", "engine/test_logits.py", "engine/test_parts.py",
    "huggingface/test_name_maps.py", "live/test_live.py", "live/test_newer_maps.py", "live/test_precision_aware.py",
    "live/test_reader.py", "resume/test_operations.py", "storage/test_crash.py", "storage/test_lying_servers.py",
    "storage/test_remote.py", "storage/test_shared_objects.py",
)  # fmt: skip


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
    chosen = [row for row in rows if EVERY or row in keep or (one_in is not None and _is_chosen(str(row), one_in))]
    LEFT_OUT[table] = (len(rows) - len(chosen), len(rows))
    return chosen


def find_left_out(tests: Iterable[tuple[str, str]]) -> set[str]:
    """Return the ids of the tests that this run leaves out: rows of the files in `SAMPLED`, but at least one row of every test
    is run.

    Args:
        tests: (path of the file below tests/, id of the test such as "tests/a/test_b.py::test_c[row]").
    """
    of_test: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, name in tests:
        if path in SAMPLED:
            of_test[path, name.partition("[")[0]].append(name)
    out: set[str] = set()
    for (path, _), rows in of_test.items():
        left = [] if EVERY else [row for row in rows if not _is_chosen(row, 3)]
        left = left[1:] if len(left) == len(rows) else left
        out.update(left)
        before = LEFT_OUT.get(f"rows of {path}", (0, 0))
        LEFT_OUT[f"rows of {path}"] = (before[0] + len(left), before[1] + len(rows))
    return out


def _is_chosen(row: str, one_in: int) -> bool:
    return crc32(row.encode()) % one_in == 0
