"""A store of archives: what is promised for a time is there until then, whatever policies, clocks and others do."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import stores
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import EVERY
from stores import Flaky, first
from typer.main import get_command

from ckpttool.audit import archive_store, holds, ledger, pruning, retention
from ckpttool.audit.archive import ArchiveFacts
from ckpttool.cli.main import app
from ckpttool.errors import CkpttoolError, Corrupt, DestinationExists, Differs, Locked, NoSpace, RemoteError, UsageError
from ckpttool.storage import objects, remote, retries
from ckpttool.storage.source import Source

NOW = datetime(2031, 3, 1, 12, 0, 0, tzinfo=UTC)


def day(n: int) -> datetime:
    return NOW - timedelta(days=n)


def about(name: str, **what: Any) -> ArchiveFacts:
    base = ArchiveFacts(
        name=name, bytes=10, created="2031-01-01T00:00:00Z", step=None, layout="dcp", trainer=None, world_size=4,
        tensors=1, tensor_bytes=8, components=("model",), merkle_root="a" * 64, manifest_sha256="", meta={},
        retain_until=None, legal_hold=None, signed=False, encrypted=name.endswith(".age"),
    )  # fmt: skip
    return replace(base, **{"manifest_sha256": f"sha of {name}", **what})


@dataclass
class Shelf:
    """A store whose archives are a table: what `facts` would read out of files is said here."""

    path: str
    table: dict[str, ArchiveFacts | str] = field(default_factory=dict)

    def add(self, name: str, damaged: str = "", logged: bool = False, **what: Any) -> ArchiveFacts:
        known = about(name, **what)
        self.table[name] = damaged or known
        Path(self.path, name).write_bytes(b"0123456789")
        if logged:
            self.export(known)
        return known

    def export(self, known: ArchiveFacts) -> None:
        said = {k: v for k, v in known.__dict__.items() if k != "name"}
        ledger.append_entry(self.path, "export", known.name, **said)

    def facts(self, source: Source, file: str) -> ArchiveFacts:
        source.size(file)
        found = self.table.get(file, f"{file} is no archive")
        if isinstance(found, str):
            raise Corrupt(found)
        return found

    def prune(self, **how: Any) -> pruning.Pruned:
        """Of archives that need not be in the ledger: what that protects has tests of its own."""
        return pruning.prune(self.path, **{"now": NOW, "no_ledger": True, **how})

    def here(self) -> list[str]:
        return sorted(n for n in os.listdir(self.path) if n != "ledger.jsonl" and not n.endswith(".hold.json"))

    def events(self) -> list[tuple[str, str]]:
        return [(e["event"], e["archive"]) for e in ledger.read_entries(self.path)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    it = Shelf(str(tmp_path))
    monkeypatch.setattr(archive_store, "read_facts", it.facts)
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    return it


# ----------------------------------------------------------------------------------------------------------- durations


START = datetime(2024, 2, 29, 10, 20, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1y", "2025-02-28T10:20:30Z"), ("4y", "2028-02-29T10:20:30Z"), ("7y", "2031-02-28T10:20:30Z"),
        ("12m", "2025-02-28T10:20:30Z"), ("1m", "2024-03-29T10:20:30Z"), ("10m", "2024-12-29T10:20:30Z"),
        ("18m", "2025-08-29T10:20:30Z"), ("90d", "2024-05-29T10:20:30Z"), ("2w", "2024-03-14T10:20:30Z"),
        ("1d", "2024-03-01T10:20:30Z"), ("2033-01-01", "2033-01-01T00:00:00Z"), ("20330101", "2033-01-01T00:00:00Z"),
        ("2033-01-01T12:00", "2033-01-01T12:00:00Z"), ("2033-01-01T00:30:00+02:00", "2032-12-31T22:30:00Z"),
        ("2033-01-01T00:00:00Z", "2033-01-01T00:00:00Z"), ("2024-02-29T10:20:30.5", "2024-02-29T10:20:31Z"),
    ],
)  # fmt: skip
def test_until(text: str, want: str) -> None:
    assert retention.format_time(retention.parse_retention(text, START)) == want


def test_months_end_where_months_end() -> None:
    start = datetime(2026, 1, 31, tzinfo=UTC)
    ends = [retention.parse_retention(f"{n}m", start) for n in range(1, 6)]
    assert [(e.month, e.day) for e in ends] == [(2, 28), (3, 31), (4, 30), (5, 31), (6, 30)]
    local = datetime.fromisoformat("2026-01-31T23:30:00-05:00")  # already February where time is counted
    assert retention.parse_retention("1m", local) == datetime(2026, 3, 1, 4, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    ["", "y", "7", "-7y", "7 y", "7Y", "0d", "0y", "1.5y", "7y ", "7years", "9999y", "9999999d", "999999m", "12h", "٧y",
     "forever", "2033-13-01", "2033-02-30", "2024-02-29", "2024-02-29T10:20:30Z", "2020-01-01", "0001-01-01", "9999-12-31T23:59:59.5", "9999-12-31T23:59:59-01:00",
     "1234567y"],
)  # fmt: skip
def test_no_retention(text: str) -> None:
    with pytest.raises(UsageError) as e:
        retention.parse_retention(text, START)
    assert len(str(e.value)) < 200


@given(st.integers(1, 2000), st.sampled_from("dwmy"), st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)))
def test_until_is_later_and_not_early(n: int, unit: str, start: datetime) -> None:
    start = start.replace(tzinfo=UTC)
    end = retention.parse_retention(f"{n}{unit}", start)
    least = {"d": 1, "w": 7, "m": 28, "y": 365}[unit] * n
    assert timedelta(days=least) <= end - start <= retention.parse_age(f"{n}{unit}")
    assert retention.parse_time(retention.format_time(end)) >= end


@pytest.mark.parametrize(
    ("text", "days"), [("90d", 90), ("2w", 14), ("18m", 558), ("7y", 2562), ("12h", 0.5), ("999999y", 365999634)]
)
def test_age(text: str, days: float) -> None:
    assert retention.parse_age(text) == timedelta(days=days)


@pytest.mark.parametrize("text", ["", "0d", "90", "-1d", "2033-01-01", "d", "90 d", "1s"])
def test_no_age(text: str) -> None:
    with pytest.raises(UsageError, match="not an age"):
        retention.parse_age(text)


def test_record() -> None:
    assert retention.encode_retention(None, None, START) is None
    data = retention.encode_retention("7y", "case 4711", START)
    assert data is not None and json.loads(data) == {
        "schema": "ckpttool.retention/1",
        "retain_until": "2031-02-28T10:20:30Z",
        "retain": "7y",
        "legal_hold": {"reason": "case 4711", "since": "2024-02-29T10:20:30Z"},
    }
    said = retention.decode_retention(data, "x")
    assert retention.make_object_lock_arguments(said) == {
        "ObjectLockMode": "GOVERNANCE",
        "ObjectLockRetainUntilDate": datetime(2031, 2, 28, 10, 20, 30, tzinfo=UTC),
        "ObjectLockLegalHoldStatus": "ON",
    }
    assert retention.make_object_lock_arguments(said, "COMPLIANCE")["ObjectLockMode"] == "COMPLIANCE"
    only = retention.decode_retention(retention.encode_retention(None, "why", START) or b"", "x")
    assert only["retain_until"] is None and retention.make_object_lock_arguments(only) == {
        "ObjectLockLegalHoldStatus": "ON"
    }
    assert retention.make_object_lock_arguments(None) == {}
    only = retention.decode_retention(retention.encode_retention("1d", None, START) or b"", "x")
    assert only["legal_hold"] is None and set(retention.make_object_lock_arguments(only)) == {
        "ObjectLockMode",
        "ObjectLockRetainUntilDate",
    }
    for hold in ("", " \n"):
        with pytest.raises(UsageError, match="reason"):
            retention.encode_retention(None, hold, START)
    with pytest.raises(UsageError, match="passed"):
        retention.encode_retention("2020-01-01", None, START)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "ckpttool.retention/2"}, {"retain_until": "2033-01-01"}, {"retain_until": 7}, {"retain_until": None},
        {"retain": None}, {"retain": 7}, {"legal_hold": "why"}, {"legal_hold": {"reason": "why"}}, {"legal_hold": []},
        {"legal_hold": {"reason": "", "since": "2024-01-01T00:00:00Z"}},
        {"legal_hold": {"reason": "x", "since": "now"}},
        {"legal_hold": {"reason": "x", "since": "2024-01-01T00:00:00Z", "until": ""}}, {"more": 1},
        {"retain_until": "2033-13-01T00:00:00Z"}, {"retain_until": "2033-01-01T00:00:00Z\n"},
    ],
)  # fmt: skip
def test_strict(change: dict[str, Any]) -> None:
    said = json.loads(retention.encode_retention("7y", "x", START) or b"")
    with pytest.raises(Corrupt, match="WHERE"):
        retention.decode_retention(json.dumps(said | change).encode(), "WHERE")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff", b"{" * 9, b'{"schema":"ckpttool.retention/1"}'])
def test_no_record(data: bytes) -> None:
    with pytest.raises(Corrupt, match="WHERE"):
        retention.decode_retention(data, "WHERE")


# ------------------------------------------------------------------------------------------------------------- listing


def test_listing(store: Shelf) -> None:
    store.add("a.tar.zst", created="2030-01-01T00:00:00Z", step=5)
    store.add("b.tar.zst", created="2030-06-01T00:00:00Z", retain_until="2040-01-01T00:00:00Z", legal_hold="case 1")
    store.add("c.tar.zst.age", created="2029-01-01T00:00:00Z", logged=True)
    store.add("d.tar.zst", created="")
    store.add("e.tar.zst", damaged="cut short")
    store.add("f.tar.zst", created="2030-01-01T00:00:00Z", step=7)
    store.add("g.tar.zst", created="2030-01-01T00:00:00Z", step=7)
    for other in ("notes.txt", "c.tar.zst.age.json", "x.tar", ".a.tar.zst.partial-1"):
        Path(store.path, other).write_bytes(b"")
    ledger.append_entry(
        store.path,
        "verify",
        "c.tar.zst.age",
        sound=True,
        manifest_sha256="sha of c.tar.zst.age",
        created="2029-01-01T00:00:00Z",
    )
    rows = archive_store.list_archives(store.path)
    assert [r.name[0] for r in rows] == ["b", "g", "f", "a", "c", "d", "e"]
    by = {r.name[0]: r for r in rows}
    assert by["b"].held == ("case 1",) and by["b"].retain_until == "2040-01-01T00:00:00Z"
    assert by["e"].damaged == "cut short" and by["e"].facts is None
    assert by["a"].facts == store.table["a.tar.zst"] and by["a"].held == () and by["a"].verified is None
    assert by["c"].verified is not None


def test_verified(store: Shelf) -> None:
    known = store.add("a.tar.zst", logged=True)
    said = {"manifest_sha256": known.manifest_sha256, "created": known.created}

    def seen() -> str | None:
        return archive_store.list_archives(store.path)[0].verified

    ledger.append_entry(store.path, "verify", "a.tar.zst", sound=False, **said)
    ledger.append_entry(store.path, "verify", "a.tar.zst", sound=True, **{**said, "manifest_sha256": "another"})
    ledger.append_entry(store.path, "verify", "b.tar.zst", sound=True)
    assert seen() is None
    e = ledger.append_entry(store.path, "verify", "a.tar.zst", sound=True, **said)
    assert seen() == e["time"]


def test_retention_is_the_longest_that_was_promised(store: Shelf) -> None:
    """An archive put in the place of another, with a shorter retention, does not shorten it."""
    early, late = "2032-01-01T00:00:00Z", "2040-01-01T00:00:00Z"
    known = store.add("a.tar.zst", retain_until=late, legal_hold="case 1", logged=True)
    store.add("a.tar.zst", retain_until=early, manifest_sha256="swapped")
    row = archive_store.list_archives(store.path)[0]
    assert (row.retain_until, row.held) == (late, ("case 1",))
    store.add("a.tar.zst", damaged="garbage")
    row = archive_store.list_archives(store.path)[0]
    assert (row.retain_until, row.held) == (late, ("case 1",))
    # nor does another name of the same file
    os.rename(os.path.join(store.path, "a.tar.zst"), os.path.join(store.path, "z.tar.zst"))
    store.table = {"z.tar.zst": replace(known, name="z.tar.zst", retain_until=None, legal_hold=None)}
    row = archive_store.list_archives(store.path)[0]
    assert (row.name, row.retain_until, row.held) == ("z.tar.zst", late, ("case 1",))
    # and the archive's own counts where the ledger says less, or nothing
    store.add("y.tar.zst", retain_until=late)
    assert archive_store.list_archives(store.path)[0].retain_until == late
    store.export(about("y.tar.zst", retain_until=early))
    assert archive_store.list_archives(store.path)[0].retain_until == late


def test_a_name_used_again(store: Shelf) -> None:
    """After a deletion, a new export of that name starts anew; a copy put back by hand does not."""
    store.add("a.tar.zst", legal_hold="case 1", retain_until="2031-02-01T00:00:00Z", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    holds.hold(archive, "case 2")
    assert archive_store.list_archives(store.path)[0].held == ("case 1", "case 2")
    holds.release(archive, "closed")
    assert archive_store.list_archives(store.path)[0].held == ()
    assert store.prune(keep_within=timedelta(days=1)).deleted == ("a.tar.zst",)
    store.add("a.tar.zst", legal_hold="case 1")  # the same manifest and date: the file of old, released
    assert archive_store.list_archives(store.path)[0].held == ()
    store.add("a.tar.zst", legal_hold="case 1", manifest_sha256="new", created="2031-02-02T00:00:00Z", logged=True)
    assert archive_store.list_archives(store.path)[0].held == ("case 1",)


def test_only_a_deletion_ends_what_was_promised(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another export over the same name (--force) does not, nor a deletion that failed."""
    past = "2031-02-01T00:00:00Z"
    store.add("a.tar.zst", retain_until=past, logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    holds.hold(archive, "case 1")
    store.add("a.tar.zst", manifest_sha256="new", created="2031-01-02T00:00:00Z", logged=True)
    row = archive_store.list_archives(store.path)[0]
    assert (row.held, row.retain_until) == (("case 1",), past)
    holds.release(archive, "closed")
    with monkeypatch.context() as m:
        m.setattr(os, "unlink", lambda path: os.listdir(path))  # "not a directory"
        assert store.prune(keep_within=timedelta(days=1)).refused
    store.add("a.tar.zst", manifest_sha256="newer", created="2031-01-03T00:00:00Z", logged=True)
    assert archive_store.list_archives(store.path)[0].retain_until == past
    assert store.prune(keep_within=timedelta(days=1)).deleted == ("a.tar.zst",)
    store.add("a.tar.zst", manifest_sha256="newest", created="2031-01-04T00:00:00Z", logged=True)
    assert archive_store.list_archives(store.path)[0].retain_until is None


def test_what_is_missing(store: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    """Removed by another program: a row, a line of `ledger verify`, and an exit code on request."""
    late = "2040-01-01T00:00:00Z"
    store.add("a.tar.zst", retain_until=late, logged=True)
    store.add("b.tar.zst", logged=True)
    store.add("c.tar.zst")
    holds.hold(os.path.join(store.path, "c.tar.zst"), "case 1")
    store.add("d.tar.zst", logged=True)
    store.add("e.tar.zst", logged=True, created="2031-02-28T00:00:00Z")
    store.add("f.tar.zst")
    ledger.append_entry(store.path, "verify", "f.tar.zst", sound=True)  # is no promise
    assert archive_store.list_missing_archives(store.path) == []
    assert store.prune(keep_last=1).deleted == ("f.tar.zst", "d.tar.zst", "b.tar.zst")
    store.add("b.tar.zst", logged=True)
    for name in "abce":
        os.unlink(os.path.join(store.path, f"{name}.tar.zst"))
    store.add("z.tar.zst", manifest_sha256="sha of e.tar.zst", created="2031-02-28T00:00:00Z")  # e, renamed
    gone = archive_store.list_missing_archives(store.path)
    assert [(r.name[0], r.retain_until, r.held) for r in gone] == [
        ("a", late, ()),
        ("b", None, ()),
        ("c", None, ("case 1",)),
    ]
    assert archive_store.list_archives(store.path)[1:] == gone[::-1]
    assert gone[2].warnings == (
        "it is missing although it is under legal hold: case 1. Line 3 of the ledger has it, and ckpttool did not delete it",
    )
    for words in (["list"], ["ledger", "verify"]):
        for more, code in (([], 0), (["--fail-if-missing"], 5), (["--fail-if-missing", "--json"], 5)):
            done = CliRunner().invoke(get_command(app), ["audit", *words, store.path, *more])
            assert done.exit_code == code
            assert (
                "--json" in more or "a.tar.zst: it is missing although it is under retention until 2040" in done.output
            )
            if "--json" in more:
                said = json.loads(done.output)
                rows = said if words == ["list"] else said["missing"]
                assert [r["name"][0] for r in rows if r.get("missing", True)] in (["a", "b", "c"], ["c", "b", "a"])
    os.unlink(os.path.join(store.path, "ledger.jsonl"))
    assert [r.name[0] for r in archive_store.list_missing_archives(store.path)] == ["c"]  # by its hold file


@pytest.mark.parametrize("added", [False, True])
def test_what_was_renamed_is_not_missing_also_if_it_is_added_to_the_ledger(store: Shelf, added: bool) -> None:
    known = store.add("a.tar.zst", logged=True)
    os.rename(os.path.join(store.path, "a.tar.zst"), os.path.join(store.path, "b.tar.zst"))
    store.table["b.tar.zst"] = known
    if added:
        archive_store.add_to_ledger(os.path.join(store.path, "b.tar.zst"))
    assert archive_store.list_missing_archives(store.path) == []
    os.unlink(os.path.join(store.path, "b.tar.zst"))
    assert "a.tar.zst" in [r.name for r in archive_store.list_missing_archives(store.path)]


@pytest.mark.parametrize("left", ["link", "folder"])
def test_a_folder_or_dead_link_does_not_stand_for_an_archive(store: Shelf, left: str) -> None:
    store.add("a.tar.zst", logged=True)
    path = Path(store.path, "a.tar.zst")
    path.unlink()
    path.mkdir() if left == "folder" else path.symlink_to("nowhere")
    assert [r.name for r in archive_store.list_missing_archives(store.path)] == ["a.tar.zst"]


@pytest.mark.parametrize("begun", [True, False])
def test_a_deletion_ends_nothing_that_came_after_it_began(store: Shelf, begun: bool) -> None:
    """In an object store, others write lines while a deletion goes on."""
    for event in ("export", "delete", "export", "hold"):
        ledger.append_entry(store.path, event, "a.tar.zst", manifest_sha256="x", reason="case 1")
    ledger.append_entry(store.path, "deleted", "a.tar.zst", **({"begun": 2} if begun else {}))
    gone = archive_store.list_missing_archives(store.path)
    held = archive_store.find_holds_in_ledger(ledger.read_entries(store.path), "a.tar.zst")[0]
    assert ([r.name for r in gone], list(held)) == ((["a.tar.zst"], ["case 1"]) if begun else ([], []))


def test_many_lines_of_other_archives_cost_nothing(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is that of the lines plus that of the archives, not their product."""
    for name in "abcdefgh":
        store.add(f"{name}.tar.zst", logged=True)
    seen = 0
    apply = archive_store.RetentionStatus._apply

    def counted(self: archive_store.RetentionStatus, e: ledger.LedgerEntry, known: ArchiveFacts | None) -> None:
        nonlocal seen
        seen += 1
        apply(self, e, known)

    monkeypatch.setattr(archive_store.RetentionStatus, "_apply", counted)
    history = archive_store.History.of(store.path)
    assert [len(history.list_events(n, store.table[n])) for n in store.table] == [1] * 8  # type: ignore[arg-type]
    assert len(archive_store.list_archives(store.path)) == 8 and seen == 8


def test_what_is_deleted_or_exported_meanwhile_is_not_missing(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst", logged=True)
    look = archive_store.list_archive_names

    def late(where: str) -> list[str]:
        store.prune(keep_every=1)
        there = look(where)
        store.add("b.tar.zst", logged=True)
        return there

    monkeypatch.setattr(archive_store, "list_archive_names", late)
    assert archive_store.list_archives(store.path) == []


# --------------------------------------------------------------------------------------------------------------- holds


def test_hold_and_release(store: Shelf) -> None:
    known = store.add("a.tar.zst", legal_hold="own", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    entry = holds.hold(archive, "case 1")
    assert entry["event"] == "hold" and entry["reason"] == "case 1" and entry["object_lock"] is False
    assert entry["merkle_root"] == known.merkle_root and entry["manifest_sha256"] == known.manifest_sha256
    holds.hold(archive, "case 2")
    assert archive_store.list_archives(store.path)[0].held == ("own", "case 1", "case 2")
    assert store.prune(keep_within=timedelta(days=1)).refused == {"a.tar.zst": "under legal hold: own; case 1; case 2"}
    entry = holds.release(archive, "all closed")
    assert entry["released"] == ["own", "case 1", "case 2"] and entry["reason"] == "all closed"
    assert archive_store.list_archives(store.path)[0].held == ()
    with pytest.raises(UsageError, match="not under a legal hold"):
        holds.release(archive, "again")
    holds.hold(archive, "own")
    assert archive_store.list_archives(store.path)[0].held == ("own",)


def test_a_release_is_of_one_archive(store: Shelf) -> None:
    store.add("a.tar.zst", legal_hold="case 1")
    holds.release(os.path.join(store.path, "a.tar.zst"), "closed")
    store.add("a.tar.zst", legal_hold="case 1", manifest_sha256="another")  # put there by hand
    assert archive_store.list_archives(store.path)[0].held == ("case 1",)
    store.add("a.tar.zst", legal_hold="case 2")
    assert archive_store.list_archives(store.path)[0].held == ("case 2",)


@pytest.mark.parametrize("logged", [False, True])
def test_a_release_does_not_reach_another_copy(store: Shelf, logged: bool) -> None:
    """Neither a copy with cp nor an export of the same state in the same second is the archive that was released."""
    same = {"legal_hold": "case 1", "manifest_sha256": "x"}
    store.add("a.tar.zst", logged=True, **same)
    store.add("b.tar.zst", logged=logged, **same)
    holds.release(os.path.join(store.path, "b.tar.zst"), "the copy is not needed")
    assert {r.name[0]: r.held for r in archive_store.list_archives(store.path)} == {"a": ("case 1",), "b": ()}
    for _ in range(2):  # once more where b is gone
        done = store.prune(keep_within=timedelta(days=1))
        assert done.refused == {"a.tar.zst": "under legal hold: case 1"}
    assert store.here() == ["a.tar.zst"]


@pytest.mark.parametrize("renamed", [False, True])
def test_nor_if_the_released_copy_is_removed_by_hand(store: Shelf, renamed: bool) -> None:
    """The ledger does not record the copy, which then is no former name of the other."""
    known = store.add("a.tar.zst", legal_hold="case 1")
    path = {n: os.path.join(store.path, f"{n}.tar.zst") for n in "abc"}
    archive_store.add_to_ledger(path["a"])
    if renamed:
        os.rename(path["a"], path["c"])
        store.table["c.tar.zst"] = known
    shutil.copy(path["c" if renamed else "a"], path["b"])
    store.table["b.tar.zst"] = known
    holds.release(path["b"], "the copy is not needed")
    os.unlink(path["b"])
    assert [r.held for r in archive_store.list_archives(store.path)] == [("case 1",)]
    assert store.prune(keep_within=timedelta(days=1)).deleted == ()


def test_a_hold_under_a_name_in_between_is_not_missing(store: Shelf) -> None:
    known = store.add("a.tar.zst", logged=True)
    for old, new in ("ab", "bc"):
        os.rename(os.path.join(store.path, f"{old}.tar.zst"), os.path.join(store.path, f"{new}.tar.zst"))
        store.table[f"{new}.tar.zst"] = known
        if new == "b":
            holds.hold(os.path.join(store.path, "b.tar.zst"), "case 1")
    assert [(r.name, r.held) for r in archive_store.list_archives(store.path)] == [("c.tar.zst", ("case 1",))]


def test_a_release_goes_along_when_an_archive_is_renamed(store: Shelf) -> None:
    known = store.add("a.tar.zst", logged=True, legal_hold="case 1")
    holds.release(os.path.join(store.path, "a.tar.zst"), "closed")
    os.rename(os.path.join(store.path, "a.tar.zst"), os.path.join(store.path, "b.tar.zst"))
    store.table["b.tar.zst"] = known
    assert archive_store.list_archives(store.path)[0].held == ()
    store.add("a.tar.zst", legal_hold="case 1")  # now b is a copy
    assert [r.held for r in archive_store.list_archives(store.path) if r.name[0] == "b"] == [("case 1",)]


def test_hold_of_what_is_damaged(store: Shelf) -> None:
    store.add("a.tar.zst", damaged="cut short")
    holds.hold(os.path.join(store.path, "a.tar.zst"), "case 1")
    assert archive_store.list_archives(store.path)[0].held == ("case 1",)


@pytest.mark.parametrize("reason", ["", " "])
def test_holds_need_reasons(store: Shelf, reason: str) -> None:
    store.add("a.tar.zst")
    for call in (holds.hold, holds.release):
        with pytest.raises(UsageError, match="reason"):
            call(os.path.join(store.path, "a.tar.zst"), reason)
        with pytest.raises(UsageError, match="does not exist"):
            call(os.path.join(store.path, "b.tar.zst"), "x")
        with pytest.raises(UsageError, match="not named like"):
            call(os.path.join(store.path, "ledger.jsonl"), "x")
    assert store.events() == []


# ------------------------------------------------------------------------------------------- what a lost ledger leaves


def hold_file(store: Shelf, name: str) -> Path:
    return Path(store.path, f"{name}.hold.json")


def test_a_lost_ledger_does_not_let_prune_delete_what_was_held(store: Shelf) -> None:
    """Finding A1: a hold lay in the ledger alone, and prune began a new one."""
    for name in ("a.tar.zst", "b.tar.zst"):
        store.add(name, logged=True)
    holds.hold(os.path.join(store.path, "a.tar.zst"), "case 9")
    os.unlink(os.path.join(store.path, "ledger.jsonl"))
    for how in ({}, {"dry_run": True}):
        with pytest.raises(Corrupt, match=r"2 archives and no ledger\.jsonl.*legal hold.*no_ledger=True"):
            store.prune(keep_within=timedelta(days=1), no_ledger=False, **how)
    assert not os.path.exists(os.path.join(store.path, "ledger.jsonl")) and len(store.here()) == 2
    rows = {r.name[0]: r for r in archive_store.list_archives(store.path)}
    assert (rows["a"].ledger, rows["a"].held) == ("missing", ("case 9",)) and rows["a"].warnings == ()
    # --no-ledger means it, and the file of holds still counts
    done = store.prune(keep_within=timedelta(days=1), no_ledger=True)
    assert done.deleted == ("b.tar.zst",) and done.refused == {"a.tar.zst": "under legal hold: case 9"}
    # that began a ledger, which says nothing of the hold: the file counts, and the listing says what does not fit
    (row,) = archive_store.list_archives(store.path)
    assert (row.held, row.ledger) == (("case 9",), "unknown") and "does not record it" in row.warnings[1]
    assert holds.release(os.path.join(store.path, "a.tar.zst"), "closed")["released"] == ["case 9"]
    assert not hold_file(store, "a.tar.zst").exists() and archive_store.list_archives(store.path)[0].held == ()


def test_what_a_new_ledger_does_not_know_is_not_pruned(store: Shelf) -> None:
    store.add("a.tar.zst")  # copied from elsewhere, or of a ledger that was lost
    store.add("b.tar.zst", logged=True)
    done = store.prune(keep_within=timedelta(days=1), no_ledger=False)
    assert done.deleted == ("b.tar.zst",)
    assert "does not know this archive" in done.refused["a.tar.zst"] and "ledger add" in done.refused["a.tar.zst"]
    entry = archive_store.add_to_ledger(os.path.join(store.path, "a.tar.zst"))
    assert entry["event"] == "add" and archive_store.add_to_ledger(os.path.join(store.path, "a.tar.zst")) == entry
    assert store.prune(keep_within=timedelta(days=1), no_ledger=False).deleted == ("a.tar.zst",)


def test_what_was_added_keeps_its_promises(store: Shelf) -> None:
    store.add("a.tar.zst", legal_hold="case 1", retain_until="2040-01-01T00:00:00Z")
    archive_store.add_to_ledger(os.path.join(store.path, "a.tar.zst"))
    store.add("a.tar.zst", damaged="cut short")
    (row,) = archive_store.list_archives(store.path)
    assert (row.held, row.retain_until) == (("case 1",), "2040-01-01T00:00:00Z")


def test_an_empty_store_needs_no_ledger(store: Shelf) -> None:
    assert store.prune(keep_last=1, no_ledger=False).deleted == ()


def test_an_archive_in_the_place_of_another_is_not_pruned(store: Shelf) -> None:
    store.add("a.tar.zst", logged=True)
    store.add("b.tar.zst", logged=True)
    store.table["b.tar.zst"] = replace(about("b.tar.zst"), manifest_sha256="sha of a.tar.zst")
    ledger.append_entry(store.path, "verify", "b.tar.zst", sound=True, manifest_sha256="sha of a.tar.zst",
                  created="2031-01-01T00:00:00Z")  # fmt: skip
    row = {r.name[0]: r for r in archive_store.list_archives(store.path)}["b"]
    assert (row.ledger, row.verified) == ("differs", None)
    assert "line 2 of the ledger has sha of b.tar.zst" in row.warnings[0] and "line 1 records as a" in row.warnings[0]
    for flag in (False, True):
        done = store.prune(keep_every=1, dry_run=True, no_ledger=flag)
        assert done.deleted == ("a.tar.zst",) and "another archive" in done.refused["b.tar.zst"]
    with pytest.raises(Differs, match="another archive"):
        archive_store.add_to_ledger(os.path.join(store.path, "b.tar.zst"))


def test_a_hold_goes_along_when_the_folder_is_copied(store: Shelf, tmp_path_factory: pytest.TempPathFactory) -> None:
    store.add("a.tar.zst", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    holds.hold(archive, "case 1")
    holds.hold(archive, "case 2")
    holds.hold(archive, "case 1")  # again: one of each
    said = json.loads(hold_file(store, "a.tar.zst").read_text())
    assert said["schema"] == "ckpttool.hold/1" and said["archive"] == "a.tar.zst"
    assert [h["reason"] for h in said["holds"]] == ["case 2", "case 1"]
    assert said["holds"][0]["manifest_sha256"] == "sha of a.tar.zst" and said["holds"][0]["by"].count("@") == 1
    elsewhere = Shelf(str(tmp_path_factory.mktemp("copy")), store.table)
    for n in ("a.tar.zst", "a.tar.zst.hold.json"):
        shutil.copy(os.path.join(store.path, n), elsewhere.path)
    elsewhere.add("b.tar.zst", logged=True)  # which begins a ledger there
    assert {r.name[0]: r.held for r in archive_store.list_archives(elsewhere.path)}["a"] == ("case 2", "case 1")
    assert "legal hold" in elsewhere.prune(keep_every=1).refused["a.tar.zst"]
    # under another name, by its manifest
    os.rename(os.path.join(elsewhere.path, "a.tar.zst"), os.path.join(elsewhere.path, "z.tar.zst"))
    store.table["z.tar.zst"] = replace(about("a.tar.zst"), name="z.tar.zst")
    assert "legal hold" in elsewhere.prune(keep_every=1).refused["z.tar.zst"]
    holds.release(os.path.join(elsewhere.path, "z.tar.zst"), "closed")
    assert {r.name[0]: r.held for r in archive_store.list_archives(elsewhere.path)}["z"] == ()


def test_the_stricter_of_ledger_and_file_counts_and_both_are_told(store: Shelf) -> None:
    store.add("a.tar.zst", logged=True)
    archive, beside = os.path.join(store.path, "a.tar.zst"), hold_file(store, "a.tar.zst")
    holds.hold(archive, "case 1")
    text = beside.read_bytes()
    assert archive_store.list_archives(store.path)[0].warnings == ()
    beside.unlink()  # the ledger alone
    (row,) = archive_store.list_archives(store.path)
    assert row.held == ("case 1",) and "lost with the ledger" in row.warnings[0]
    holds.release(archive, "closed")
    assert archive_store.list_archives(store.path)[0].warnings == ()
    beside.write_bytes(text)  # the file alone: a release killed before it removed it, or a file put back
    (row,) = archive_store.list_archives(store.path)
    assert row.held == ("case 1",) and "the ledger ended it in line 3" in row.warnings[0]
    assert "legal hold" in store.prune(keep_every=1).refused["a.tar.zst"]
    holds.release(archive, "closed again")
    assert not beside.exists() and archive_store.list_archives(store.path)[0].held == ()


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"schema": "ckpttool.hold/1", "holds": []}',
                                  b'{"schema": "ckpttool.hold/1", "holds": [{"reason": 5}]}', b"[" * 100_000])  # fmt: skip
def test_a_damaged_file_of_holds_is_a_hold(store: Shelf, text: bytes) -> None:
    store.add("a.tar.zst", logged=True)
    hold_file(store, "a.tar.zst").write_bytes(text)
    assert "hold.json is damaged" in store.prune(keep_every=1).refused["a.tar.zst"]
    holds.release(os.path.join(store.path, "a.tar.zst"), "looked into it")
    assert store.prune(keep_every=1).deleted == ("a.tar.zst",)


def test_a_link_or_pipe_in_the_place_of_a_file_of_holds(store: Shelf) -> None:
    for name in ("a", "b"):
        store.add(f"{name}.tar.zst", logged=True)
    os.mkfifo(hold_file(store, "a.tar.zst"))
    hold_file(store, "b.tar.zst").symlink_to("/etc/hostname")
    assert names(store.prune(keep_every=1).refused) == "ab"
    holds.hold(os.path.join(store.path, "b.tar.zst"), "case")
    assert not hold_file(store, "b.tar.zst").is_symlink() and Path("/etc/hostname").stat().st_size < 1000


def test_a_file_of_holds_meanwhile_wins(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst", logged=True)
    append = ledger.Turn.append

    def late(turn: ledger.Turn, event: str, archive: str, **facts: Any) -> dict[str, Any]:
        hold_file(store, archive).write_bytes(b"{}")
        return append(turn, event, archive, **facts)

    monkeypatch.setattr(ledger.Turn, "append", late)
    assert "damaged" in store.prune(keep_every=1).refused["a.tar.zst"]


def test_a_name_that_is_too_long_for_a_file_of_holds(store: Shelf) -> None:
    for n, fits in ((228, True), (240, False), (245, False), (255, False)):
        name = "ü" * 10 + "n" * (n - 28) + ".tar.zst"
        store.add(name)
        if fits:
            assert holds.hold(f"{store.path}/{name}", "case")["event"] == "hold"
            continue
        with pytest.raises(UsageError, match=f"its name has {n} bytes.*its name has 228 bytes at most"):
            holds.hold(f"{store.path}/{name}", "case")
    assert len(store.events()) == 1, "nothing is recorded of what cannot be done"


def test_a_hold_whose_file_cannot_be_written_says_so(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", full)
        with pytest.raises(NoSpace, match="held by line 2 of the ledger, but the hold would be lost with the ledger"):
            holds.hold(archive, "case")
    assert sorted(os.listdir(store.path)) == ["a.tar.zst", "ledger.jsonl"]
    assert archive_store.list_archives(store.path)[0].held == ("case",)
    holds.hold(archive, "case")
    assert archive_store.list_archives(store.path)[0].warnings == ()


def test_a_deletion_that_failed_ends_no_hold(store: Shelf) -> None:
    """Whatever comes between its two lines: a release, or an export that is late with its line."""
    store.add("a.tar.zst", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    holds.hold(archive, "case 1")
    begun = ledger.append_entry(store.path, "delete", "a.tar.zst")["seq"]
    store.export(about("a.tar.zst"))
    ledger.append_entry(store.path, "delete-failed", "a.tar.zst", begun=begun, why="under legal hold")
    os.unlink(hold_file(store, "a.tar.zst"))
    (row,) = archive_store.list_archives(store.path)
    assert row.held == ("case 1",) and "line 2 of the ledger holds it (case 1)" in row.warnings[0]
    begun = ledger.append_entry(store.path, "delete", "a.tar.zst")["seq"]
    holds.release(archive, "closed")
    ledger.append_entry(store.path, "delete-failed", "a.tar.zst", begun=begun, why="under legal hold")
    (row,) = archive_store.list_archives(store.path)
    assert row.held == () and row.warnings == ()


# ------------------------------------------------------------------------------------------------------------ policies


def names(found: Iterable[str]) -> str:
    return "".join(sorted(n[0] for n in found))


def test_policies(store: Shelf) -> None:
    for k, name in enumerate("abcdefgh"):
        store.add(
            f"{name}.tar.zst",
            created=retention.format_time(day(10 * k + 1)),
            step=8000 - 500 * k,
            meta={"run": "r"} if k % 2 else {},
        )
    done = store.prune(keep_last=1, dry_run=True)
    assert (names(done.kept), names(done.deleted)) == ("ab", "cdefgh")  # the newest of run r, and of those without
    assert done.kept == {"a.tar.zst": ("one of the last 1",), "b.tar.zst": ("one of the last 1 of run r",)}
    done = store.prune(keep_within=timedelta(days=21), dry_run=True)
    assert (names(done.kept), names(done.deleted)) == ("abc", "defgh")
    done = store.prune(keep_within=timedelta(days=21) - timedelta(seconds=1), dry_run=True)
    assert names(done.kept) == "ab"
    done = store.prune(keep_every=1000, dry_run=True)
    assert (names(done.kept), names(done.deleted)) == ("aceg", "bdfh")
    done = store.prune(keep_last=2, keep_within=timedelta(days=1), keep_every=5000, dry_run=True)
    assert (names(done.kept), names(done.deleted)) == ("abcdg", "efh")
    assert done.kept["a.tar.zst"] == ("one of the last 2", "exported within 1 day")
    assert done.kept["g.tar.zst"] == ("step 5000 is a multiple of 5000",)
    assert done.refused == {} and done.freed == 30
    assert len(store.here()) == 8 and store.events() == []  # dry
    assert store.prune(keep_last=2, keep_within=timedelta(days=1), keep_every=5000) == done
    assert names(store.here()) == "abcdg"
    assert store.events() == [(event, f"{n}.tar.zst") for n in "efh" for event in ("delete", "deleted")]
    assert store.prune(keep_within=retention.parse_age("999999y")).deleted == ()


@pytest.mark.parametrize(
    ("text", "want"), [("12h", "12 hours"), ("1h", "1 hour"), ("1d", "1 day"), ("90d", "90 days"), ("36h", "36 hours")]
)
def test_how_an_age_is_said(store: Shelf, text: str, want: str) -> None:
    store.add("a.tar.zst", created=retention.format_time(NOW))
    done = store.prune(keep_within=retention.parse_age(text), dry_run=True)
    assert done.kept == {"a.tar.zst": (f"exported within {want}",)}


def test_ties(store: Shelf) -> None:
    for name, step in (("a", 1), ("b", 2), ("c", 2), ("d", None)):
        store.add(f"{name}.tar.zst", step=step)
    for n, want in ((1, "c"), (2, "bc"), (3, "abc"), (4, "abcd")):
        assert names(store.prune(keep_last=n, dry_run=True).kept) == want


@pytest.mark.parametrize(
    "how",
    [{}, {"dry_run": True}, {"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0}, {"keep_within": timedelta(0)},
     {"keep_within": timedelta(days=-1)}, {"keep_last": 5, "keep_every": -1}],
)  # fmt: skip
def test_no_policy(store: Shelf, how: dict[str, Any]) -> None:
    store.add("a.tar.zst")
    with pytest.raises(UsageError):
        store.prune(**how)
    assert store.here() == ["a.tar.zst"]


def test_what_cannot_be_judged(store: Shelf) -> None:
    store.add("a.tar.zst", created="")
    store.add("b.tar.zst", damaged="cut short")
    store.add("c.tar.zst", created=retention.format_time(NOW + timedelta(seconds=1)))
    store.add("d.tar.zst", created="yesterday")
    store.add("e.tar.zst", retain_until="2031-03-01T12:00:01Z")
    store.add("f.tar.zst", retain_until="2031-03-01T12:00:00Z")
    store.add("g.tar.zst", retain_until="whenever")
    Path(store.path, "h.tar.zst").mkdir()
    Path(store.path, "i.tar.zst").symlink_to("/etc/hostname")
    done = store.prune(keep_within=timedelta(seconds=1))
    assert done.deleted == ("f.tar.zst",)
    assert names(done.refused) == "abcdeghi" and done.kept == {}
    assert "no date" in done.refused["a.tar.zst"] and "cut short" in done.refused["b.tar.zst"]
    assert "in the future" in done.refused["c.tar.zst"] and "until 2031-03-01T12:00:01Z" in done.refused["e.tar.zst"]
    assert "not a time" in done.refused["g.tar.zst"]
    assert store.prune(keep_last=1, dry_run=True).kept == {"g.tar.zst": ("one of the last 1",)}  # those do not count


def test_sidecars_go_along(store: Shelf) -> None:
    store.add("a.tar.zst.age")
    store.add("b.tar.zst")
    for n in ("a.tar.zst.age.json", "b.tar.zst.json", "a.tar.zst.sig", "other.json"):
        Path(store.path, n).write_bytes(b"{}")
    assert store.prune(keep_within=timedelta(days=1)).deleted == ("b.tar.zst", "a.tar.zst.age")
    assert store.here() == ["a.tar.zst.sig", "b.tar.zst.json", "other.json"]


def test_the_ledger_is_first(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    known = store.add("a.tar.zst")
    unlink = os.unlink

    def look(path: str) -> None:
        assert b'"event":"delete"' in Path(store.path, "ledger.jsonl").read_bytes()  # which is locked
        unlink(path)

    monkeypatch.setattr(os, "unlink", look)
    store.prune(keep_within=timedelta(days=1))
    entry, end = ledger.read_entries(store.path)
    assert (end["event"], end["begun"]) == ("deleted", entry["seq"])
    assert {
        k: entry[k] for k in ("merkle_root", "manifest_sha256", "bytes", "created")
    } == archive_store.get_identifying_fields(known)
    assert store.here() == []


def test_no_ledger_no_deletion(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst")
    store.add("b.tar.zst", logged=True)
    path = Path(store.path, "ledger.jsonl")
    text = path.read_bytes()
    path.write_bytes(text.replace(b"dcp", b"hf"))
    with pytest.raises(Corrupt, match="line 1 was altered"):
        store.prune(keep_within=timedelta(days=1))
    with pytest.raises(Corrupt, match="line 1 was altered"):
        archive_store.list_archives(store.path)
    path.write_bytes(text)

    def full(*_: Any, **__: Any) -> dict[str, Any]:
        raise CkpttoolError("no space")

    monkeypatch.setattr(ledger.Turn, "append", full)
    with pytest.raises(CkpttoolError, match="no space"):
        store.prune(keep_within=timedelta(days=1))
    assert store.here() == ["a.tar.zst", "b.tar.zst"]


def test_a_failed_removal_is_told(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst")
    store.add("b.tar.zst")
    unlink = os.unlink

    def stuck(path: str) -> None:
        if path.endswith("b.tar.zst"):
            raise PermissionError(13, "Permission denied", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", stuck)
    done = store.prune(keep_within=timedelta(days=1))
    assert done.deleted == ("a.tar.zst",) and "Permission denied" in done.refused["b.tar.zst"] and done.freed == 10
    assert store.events() == [
        ("delete", "b.tar.zst"), ("delete-failed", "b.tar.zst"), ("delete", "a.tar.zst"), ("deleted", "a.tar.zst"),
    ]  # fmt: skip
    assert "Permission denied" in ledger.read_entries(store.path)[1]["why"]


def test_a_hold_meanwhile_wins(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the store and the deletion, somebody holds one archive and writes another anew."""
    store.add("a.tar.zst")
    store.add("b.tar.zst")
    store.add("c.tar.zst")
    turn, append, seen = ledger.take_turn, ledger.append_entry, []

    def late(path: str) -> AbstractContextManager[ledger.Turn]:
        seen.append(path)
        if len(seen) == 1:
            with monkeypatch.context() as m:
                m.setattr(ledger, "take_turn", turn)
                append(path, "hold", "c.tar.zst", reason="case 1")
                append(path, "hold", "a.tar.zst", reason="case 2")
            Path(path, "b.tar.zst").write_bytes(b"9876543210")
        return turn(path)

    monkeypatch.setattr(ledger, "take_turn", late)
    done = store.prune(keep_within=timedelta(days=1))
    assert done.deleted == () and store.here() == ["a.tar.zst", "b.tar.zst", "c.tar.zst"]
    assert "case 1" in done.refused["c.tar.zst"] and "case 2" in done.refused["a.tar.zst"]
    assert "changed" in done.refused["b.tar.zst"]
    assert [r.held for r in archive_store.list_archives(store.path)] == [("case 1",), (), ("case 2",)]


def test_hold_of_what_is_just_deleted(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst")
    append = ledger.Turn.append

    def late(turn: ledger.Turn, event: str, archive: str, **facts: Any) -> dict[str, Any]:
        Path(turn.store, "a.tar.zst").unlink(missing_ok=True)
        return append(turn, event, archive, **facts)

    monkeypatch.setattr(ledger.Turn, "append", late)
    with pytest.raises(UsageError, match="does not exist"):
        holds.hold(os.path.join(store.path, "a.tar.zst"), "case 1")


def while_pruning(store: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, wait: float) -> tuple[Any, Any]:
    """What `act` and prune give, or raise, when `act` begins between prune's line and its deletion, which goes on `wait` seconds later."""
    remove, begun, ended = pruning.remove_file, threading.Event(), threading.Event()

    def slow(where: str, name: str) -> None:
        begun.set()
        ended.wait(wait)
        remove(where, name)

    monkeypatch.setattr(pruning, "remove_file", slow)
    with ThreadPoolExecutor(1) as pool:
        pruned = pool.submit(pruning.prune, store, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
        assert begun.wait(20)
        try:
            done = act()
        except CkpttoolError as e:
            done = e
        ended.set()
        return done, pruned.result()


def test_a_hold_after_the_line_of_a_deletion_waits_for_its_end(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("a.tar.zst", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    held, pruned = while_pruning(store.path, lambda: holds.hold(archive, "case 1"), monkeypatch, 0.3)
    assert isinstance(held, UsageError) and "does not exist" in str(held)
    assert pruned.deleted == ("a.tar.zst",) and sorted(os.listdir(store.path)) == ["ledger.jsonl"]
    assert [e for e, _ in store.events()] == ["export", "delete", "deleted"]


def test_a_killed_deletion_in_a_folder_keeps_nobody_from_holding(store: Shelf) -> None:
    store.add("a.tar.zst", logged=True)
    ledger.append_entry(store.path, "delete", "a.tar.zst")
    holds.hold(os.path.join(store.path, "a.tar.zst"), "case 1")
    assert store.prune(keep_within=timedelta(days=1)).refused == {"a.tar.zst": "under legal hold: case 1"}


def test_an_archive_is_not_replaced_after_a_hold(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold that comes while --force writes the new archive, and one that comes while it gets its name."""
    store.add("a.tar.zst", logged=True)
    archive = os.path.join(store.path, "a.tar.zst")
    archive_store.refuse_protected(archive)  # the look before the work
    holds.hold(archive, "case 1")
    with pytest.raises(DestinationExists, match="under legal hold: case 1"), archive_store.replacing(archive):
        raise AssertionError
    holds.release(archive, "closed")
    with ThreadPoolExecutor(1) as pool:
        with archive_store.replacing(archive):
            late = pool.submit(holds.hold, archive, "case 2")
            assert wait([late], 0.2).not_done
            Path(archive).write_bytes(b"the new one")
        assert late.result(20)["reason"] == "case 2"


# ---------------------------------------------------------------------------------------- nothing protected is deleted


TIMES = st.sampled_from([None, -400, -1, 0, 1, 400])


@st.composite
def archives(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Archives with every mixture of what may protect one, and what happened to them, in any order."""
    out = []
    for _ in range(draw(st.integers(1, 7))):
        moment = draw(st.sampled_from(["", "soon", *range(0, 900, 90)]))
        times = {"": "", "soon": retention.format_time(NOW + timedelta(days=1))}
        out.append({
            "created": times[moment] if isinstance(moment, str) else retention.format_time(day(moment)),
            "step": draw(st.sampled_from([None, 0, 500, 1000, 1500])),
            "run": draw(st.sampled_from([None, "r", "s"])),
            "own": draw(TIMES), "told": draw(TIMES), "hold": draw(st.booleans()),
            "damaged": draw(st.integers(0, 9)) == 0,
            "events": draw(st.lists(st.sampled_from(["export", "hold", "release", "verify", "swap"]), max_size=4)),
        })  # fmt: skip
    return out


@settings(max_examples=400 if EVERY else 150)
@given(
    archives(),
    st.one_of(st.none(), st.integers(1, 4)),
    st.one_of(st.none(), st.integers(1, 900)),
    st.one_of(st.none(), st.sampled_from([1, 500, 1000])),
    st.data(),
)
def test_prune_never_deletes_what_is_protected(
    what: list[dict[str, Any]], last: int | None, within: int | None, every: int | None, data: st.DataObject
) -> None:
    """A model of its own, simpler and slower, says what each archive is promised; every policy is tried on it."""
    if last is within is every is None:
        last = 1
    mp = pytest.MonkeyPatch()
    folder = tempfile.mkdtemp()
    try:
        store = Shelf(folder)
        mp.setattr(archive_store, "read_facts", store.facts)
        mp.setattr(os, "fsync", lambda _: None)
        protected, dated = set(), {}
        for k, w in enumerate(what):
            name = f"{k}.tar.zst"
            own, told = (
                retention.format_time(NOW + timedelta(days=t)) if t is not None else None for t in (w["own"], w["told"])
            )
            meta = {"run": w["run"]} if w["run"] else {}
            known = store.add(
                name,
                created=w["created"],
                step=w["step"],
                meta=meta,
                retain_until=own,
                legal_hold="own" if w["hold"] else None,
            )
            until, reasons, swapped, listed = [own], {"own"} if w["hold"] else set(), False, ""
            for e in w["events"]:
                if e == "export":
                    store.export(replace(known, retain_until=told))
                    until.append(told)
                    listed = known.manifest_sha256
                    if w["hold"]:
                        reasons.add("own")
                elif e == "hold":
                    holds.hold(os.path.join(folder, name), "case")
                    reasons.add("case")
                elif e == "release" and reasons:
                    holds.release(os.path.join(folder, name), "closed")
                    reasons.clear()
                elif e == "verify":
                    ledger.append_entry(
                        folder, "verify", name, sound=True, **archive_store.get_identifying_fields(known)
                    )
                elif e == "swap" and not swapped and "export" in w["events"][: w["events"].index("swap")]:
                    # another archive of that name, with nothing promised, put there by hand
                    swapped = True
                    known = store.add(
                        name, created=w["created"], step=w["step"], meta=meta, manifest_sha256=f"swapped {k}"
                    )
                    until = [told]
            if w["damaged"]:
                store.table[name] = "cut short"
            if reasons or any(u is not None and u > retention.format_time(NOW) for u in until):
                protected.add(name)
            if listed not in ("", known.manifest_sha256):
                protected.add(name)  # the ledger has another archive under this name
            if w["damaged"] or not w["created"] or w["created"] > retention.format_time(NOW):
                protected.add(name)
            else:
                dated[name] = known
        how = {"keep_last": last, "keep_within": timedelta(days=within) if within else None, "keep_every": every}
        before = set(store.here())
        dry = store.prune(**how, dry_run=True)
        assert set(store.here()) == before
        done = store.prune(**how)
        assert done == dry
        left = set(store.here())
        assert protected <= left
        assert before - left == set(done.deleted) and not set(done.deleted) & protected
        assert set(done.kept) | set(done.refused) == left and not set(done.kept) & set(done.refused)
        # what no policy keeps and nothing protects is gone
        order = sorted(
            dated, key=lambda n: (dated[n].created, -1 if dated[n].step is None else dated[n].step, n), reverse=True
        )
        kept = set()
        for n in order:
            f = dated[n]
            same = [m for m in order if dated[m].meta == f.meta]
            if last is not None and same.index(n) < last:
                kept.add(n)
            if within is not None and f.created >= retention.format_time(day(within)):
                kept.add(n)
            if every is not None and f.step is not None and f.step % every == 0:
                kept.add(n)
        assert set(done.kept) == kept
        assert set(done.deleted) == before - kept - protected
        entries = ledger.read_entries(folder)
        assert [e["archive"] for e in entries if e["event"] == "delete"] == list(done.deleted)
        assert store.prune(**how).deleted == ()
    finally:
        mp.undo()
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------------------- buckets


def fill(store: Shelf, bucket: str, **archives: dict[str, Any]) -> None:
    client = stores.moto().client()
    for name, what in archives.items():
        known = about(f"{name}.tar.zst", **what)
        store.table[known.name] = known
        client.put_object(Bucket=bucket[5:], Key=f"audit/{known.name}", Body=b"0123456789")


def test_in_a_bucket(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    moto = stores.moto()
    bucket = moto.bucket(monkeypatch, lock=True)
    place = f"{bucket}/audit"
    fill(store, bucket, a={}, b={"retain_until": "2040-01-01T00:00:00Z"}, c={}, d={})
    assert holds.hold(f"{place}/c.tar.zst", "case 1")["object_lock"] is True
    assert "c.tar.zst.hold.json" in remote.RemoteSource(place).list()
    client, line = moto.client(), {"Bucket": bucket[5:], "Key": "audit/ledger.jsonl"}
    kept = client.get_object(**line)["Body"].read()
    client.delete_object(**line)  # the ledger is lost, the hold is not
    with pytest.raises(Corrupt, match=r"4 archives and no ledger\.jsonl"):
        pruning.prune(place, keep_within=timedelta(days=1), now=NOW)
    assert [(r.ledger, r.held) for r in archive_store.list_archives(place)][1] == ("missing", ("case 1",))
    client.put_object(**line, Body=kept)
    moto.client().put_object_legal_hold(Bucket=bucket[5:], Key="audit/d.tar.zst", LegalHold={"Status": "ON"})
    assert [(r.name[0], r.held) for r in archive_store.list_archives(place)] == [
        ("d", ()),
        ("c", ("case 1",)),
        ("b", ()),
        ("a", ()),
    ]
    done = pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
    assert done.deleted == ("a.tar.zst",) and names(done.refused) == "bcd"
    assert "AccessDenied" in done.refused["d.tar.zst"]  # the store knows what the ledger does not
    events = [(e["event"], e["archive"][0]) for e in ledger.read_entries(place)]
    assert events == [("hold", "c"), ("delete", "d"), ("delete-failed", "d"), ("delete", "a"), ("deleted", "a")]
    assert holds.release(f"{place}/c.tar.zst", "closed")["released"] == ["case 1"]
    moto.client().put_object_legal_hold(Bucket=bucket[5:], Key="audit/d.tar.zst", LegalHold={"Status": "OFF"})
    assert names(pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True).deleted) == "cd"
    assert remote.RemoteSource(place).list() == ["b.tar.zst", "ledger.jsonl"]  # no file of holds is left


def test_in_a_bucket_without_locks(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = stores.moto().bucket(monkeypatch)
    place = f"{bucket}/audit"
    fill(store, bucket, a={})
    assert holds.hold(f"{place}/a.tar.zst", "case 1")["object_lock"] is False
    assert pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True).refused == {
        "a.tar.zst": "under legal hold: case 1"
    }


def test_a_hold_after_the_line_of_a_deletion_in_a_bucket(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be kept waiting there: the hold is refused."""
    bucket = stores.moto().bucket(monkeypatch)
    place = f"{bucket}/audit"
    fill(store, bucket, a={})
    held, pruned = while_pruning(place, lambda: holds.hold(f"{place}/a.tar.zst", "case 1"), monkeypatch, 20)
    assert isinstance(held, Locked) and "not held: since line 1 of the ledger" in str(held)
    assert pruned.deleted == ("a.tar.zst",) and remote.RemoteSource(place).list() == ["ledger.jsonl"]
    assert [e["event"] for e in ledger.read_entries(place)] == ["delete", "deleted"]


def test_a_hold_after_the_line_of_a_deletion_in_a_bucket_with_locks(
    store: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the store itself refuses the deletion, so the hold succeeds."""
    bucket = stores.moto().bucket(monkeypatch, lock=True)
    place = f"{bucket}/audit"
    fill(store, bucket, a={})
    held, pruned = while_pruning(place, lambda: holds.hold(f"{place}/a.tar.zst", "case 1"), monkeypatch, 20)
    assert held["object_lock"] is True and "AccessDenied" in pruned.refused["a.tar.zst"]
    assert remote.RemoteSource(place).list() == ["a.tar.zst", "a.tar.zst.hold.json", "ledger.jsonl"]
    assert [e["event"] for e in ledger.read_entries(place)] == ["delete", "hold", "delete-failed"]
    (row,) = archive_store.list_archives(place)
    assert row.held == ("case 1",) and row.warnings == (
        "the ledger does not know this archive: no line records a.tar.zst",
    )


def test_a_killed_deletion_in_a_bucket(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prune again ends it; or an hour does, since no prune deletes so long after its line."""
    bucket = stores.moto().bucket(monkeypatch)
    place = f"{bucket}/audit"
    fill(store, bucket, a={}, b={})
    ledger.append_entry(place, "delete", "a.tar.zst")
    ledger.append_entry(place, "delete", "b.tar.zst")
    with pytest.raises(Locked):
        holds.hold(f"{place}/a.tar.zst", "case 1")
    with monkeypatch.context() as m:
        m.setattr(ledger, "_DEAD_AFTER", timedelta(0))
        holds.hold(f"{place}/a.tar.zst", "case 1")
    done = pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
    assert done.deleted == ("b.tar.zst",) and done.refused == {"a.tar.zst": "under legal hold: case 1"}
    fill(store, bucket, c={})
    monkeypatch.setattr(ledger, "_ACTS_WITHIN", timedelta(0))
    done = pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
    assert "comes too late" in done.refused["c.tar.zst"] and ledger.read_entries(place)[-1]["event"] == "delete-failed"


def test_a_deletion_that_the_store_may_still_do_has_no_end(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    moto = stores.moto()
    bucket = moto.bucket(monkeypatch)
    place = f"{bucket}/audit"
    fill(store, bucket, a={})
    with Flaky(moto.endpoint, lambda method, path: 500 if method == "DELETE" else None) as proxy:
        moto.environment(monkeypatch, proxy.endpoint)
        done = pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
    moto.environment(monkeypatch)
    assert "may still delete it" in done.refused["a.tar.zst"]
    with pytest.raises(Locked):
        holds.hold(f"{place}/a.tar.zst", "case 1")


def test_an_object_is_not_replaced_after_a_hold(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = stores.moto().bucket(monkeypatch)
    place, archive = f"{bucket}/audit", f"{bucket}/audit/a.tar.zst"
    fill(store, bucket, a={})
    with archive_store.replacing(archive):
        pass  # a store without a ledger gets none
    assert not ledger.read_entries(place)
    holds.hold(archive, "case 1")
    with pytest.raises(DestinationExists, match="under legal hold"), archive_store.replacing(archive):
        raise AssertionError
    holds.release(archive, "closed")
    with archive_store.replacing(archive), pytest.raises(Locked, match="is about to replace it"):
        holds.hold(archive, "case 2")
    with pytest.raises(NoSpace), archive_store.replacing(archive):
        raise NoSpace("full")
    holds.hold(archive, "case 2")
    events = [e["event"] for e in ledger.read_entries(place)]
    assert events == ["hold", "release", "replace", "replaced", "replace", "replace-failed", "hold"]


def test_nothing_is_replaced_while_it_is_deleted_nor_deleted_while_it_is_replaced(
    store: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = stores.moto().bucket(monkeypatch)
    place, archive = f"{bucket}/audit", f"{bucket}/audit/a.tar.zst"
    fill(store, bucket, a={}, b={})
    ledger.append_entry(place, "delete", "a.tar.zst")
    with pytest.raises(Locked, match="not replaced: since line 1 of the ledger"), archive_store.replacing(archive):
        raise AssertionError
    ledger.append_entry(place, "replace", "b.tar.zst")
    done = pruning.prune(place, keep_within=timedelta(days=1), now=NOW, no_ledger=True)
    assert done.deleted == ("a.tar.zst",) and "is about to replace it" in done.refused["b.tar.zst"]


def test_a_prefix_with_archives_is_not_replaced(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = stores.moto().bucket(monkeypatch)
    fill(store, bucket, a={})
    for below in ("", "/audit"):
        with pytest.raises(DestinationExists, match=r"a\.tar\.zst in it"):
            archive_store.refuse_protected(f"{bucket}{below}")
    archive_store.refuse_protected(f"{bucket}/elsewhere")


def test_a_folder_with_other_files_that_are_named_like_archives_is_replaced(store: Shelf, tmp_path: Path) -> None:
    for name in ("code.tar.zst", "x.hold.json"):
        (tmp_path / name).write_bytes(b"x")
    archive_store.refuse_protected(store.path)
    store.add("a.tar.zst")
    with pytest.raises(DestinationExists, match=r"a\.tar\.zst in it"):
        archive_store.refuse_protected(store.path)


def test_a_hold_while_another_is_released_in_a_bucket(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the release removes may be of the hold that came after its line: it is put back."""
    moto = stores.moto()
    bucket = moto.bucket(monkeypatch, lock=True)
    place, archive = f"{bucket}/audit", f"{bucket}/audit/a.tar.zst"
    fill(store, bucket, a={})
    holds.hold(archive, "case 1")
    remove = holds.remove_file

    def late(where: str, name: str) -> None:
        monkeypatch.setattr(holds, "remove_file", remove)
        holds.hold(archive, "case 2")
        remove(where, name)

    monkeypatch.setattr(holds, "remove_file", late)
    assert holds.release(archive, "closed")["released"] == ["case 1"]
    assert [h["reason"] for h in archive_store.read_hold_events(remote.RemoteSource(place), "a.tar.zst")] == ["case 2"]
    status = moto.client().get_object_legal_hold(Bucket=bucket[5:], Key="audit/a.tar.zst")["LegalHold"]["Status"]
    assert archive_store.list_archives(place)[0].held == ("case 2",) and status == "ON"


def test_a_release_that_the_store_did_not_hear(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    moto = stores.moto()
    bucket = moto.bucket(monkeypatch, lock=True)
    archive = f"{bucket}/audit/a.tar.zst"
    fill(store, bucket, a={})
    holds.hold(archive, "case 1")
    with Flaky(moto.endpoint, lambda method, path: 403 if method == "PUT" and "legal-hold" in path else None) as proxy:
        moto.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match="does not allow"):
            holds.release(archive, "closed")
    moto.environment(monkeypatch)
    with pytest.raises(RemoteError, match="AccessDenied"):
        objects.delete_object_versions(archive)
    assert holds.release(archive, "closed")["event"] == "release"  # again, and no second entry
    assert [e["event"] for e in ledger.read_entries(f"{bucket}/audit")] == ["hold", "release"]
    objects.delete_object_versions(archive)


def test_a_bucket_that_fails_is_no_damage(store: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that cannot be reached is not listed as damaged, and nothing goes by half a look."""
    moto = stores.moto()
    bucket = moto.bucket(monkeypatch)
    fill(store, bucket, a={}, b={})
    with Flaky(
        moto.endpoint, lambda method, path: 500 if method == "HEAD" and path.endswith("a.tar.zst") else None
    ) as proxy:
        moto.environment(monkeypatch, proxy.endpoint)
        for call in (
            lambda p: archive_store.list_archives(p),
            lambda p: pruning.prune(p, keep_within=timedelta(days=1), now=NOW, no_ledger=True),
        ):
            with pytest.raises(RemoteError, match="no answer"):
                call(f"{bucket}/audit")
    with Flaky(moto.endpoint, first(4, 500)) as proxy:
        moto.environment(monkeypatch, proxy.endpoint)
        assert (
            names(pruning.prune(f"{bucket}/audit", keep_within=timedelta(days=1), now=NOW, no_ledger=True).deleted)
            == "ab"
        )
