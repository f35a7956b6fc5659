"""The ledger: no edit of it goes unseen, no entry is lost, whoever else writes and whatever kills the writer."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import stores
from hypothesis import assume, example, given
from hypothesis import strategies as st
from stores import Flaky, first

from ckpttool.audit import ledger
from ckpttool.errors import (
    CkpttoolError,
    Corrupt,
    Differs,
    Locked,
    NoSpace,
    RemoteError,
    Unsafe,
    Unsupported,
    UsageError,
)
from ckpttool.storage import objects, retries


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))


def filled(store: Path, n: int = 5) -> Path:
    for k in range(n):
        ledger.append_entry(
            str(store), ("export", "verify", "hold", "release", "delete")[k % 5], f"a{k}.tar.zst", bytes=k, why="ü\n"
        )
    return store / "ledger.jsonl"


# ------------------------------------------------------------------------------------------------------------ the form


def test_a_line_is_what_the_docs_say(tmp_path: Path) -> None:
    entry = ledger.append_entry(
        str(tmp_path), "export", "a.tar.zst", bytes=7, meta={"b": [1, None], "a": 0.5}, note="ü"
    )
    text = (tmp_path / "ledger.jsonl").read_bytes()
    assert text.endswith(b"\n") and text.count(b"\n") == 1 and text.isascii()
    said = json.loads(text)
    assert said == entry
    assert set(said) == {"seq", "time", "event", "archive", "by", "prev", "hash", "bytes", "meta", "note"}
    assert (said["seq"], said["event"], said["archive"], said["prev"]) == (1, "export", "a.tar.zst", "0" * 64)
    assert said["by"].count("@") == 1
    # anyone can check it, with nothing of ours
    rest = {k: v for k, v in said.items() if k != "hash"}
    assert said["hash"] == sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    again = ledger.append_entry(str(tmp_path), "verify", "a.tar.zst")
    assert (again["seq"], again["prev"]) == (2, said["hash"])
    assert ledger.read_entries(str(tmp_path)) == [entry, again]


def test_verify(tmp_path: Path) -> None:
    assert ledger.read_entries_or_none(str(tmp_path)) is None and ledger.read_entries(str(tmp_path)) == []
    with pytest.raises(Corrupt, match="no ledger"):
        ledger.verify_chain(str(tmp_path))
    filled(tmp_path)
    entries = ledger.read_entries(str(tmp_path))
    assert [e["seq"] for e in entries] == [1, 2, 3, 4, 5]
    want = {"entries": 5, "head": entries[-1]["hash"], "first": entries[0]["time"], "last": entries[-1]["time"],
            "backwards": []}  # fmt: skip
    assert ledger.verify_chain(str(tmp_path)) == want
    for e in entries:  # a hash that was written down earlier stands for all lines before it
        assert ledger.verify_chain(str(tmp_path), e["hash"]) == want


def test_a_cut_tail_shows_by_the_head_alone(tmp_path: Path) -> None:
    path = filled(tmp_path)
    head = ledger.verify_chain(str(tmp_path))["head"]
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:3]))
    assert ledger.verify_chain(str(tmp_path))["entries"] == 3
    with pytest.raises(Differs, match=f"{head}.*cut off"):
        ledger.verify_chain(str(tmp_path), head)
    path.write_bytes(b"")
    nothing = {"entries": 0, "head": "0" * 64, "first": None, "last": None, "backwards": []}
    assert ledger.verify_chain(str(tmp_path)) == nothing
    with pytest.raises(Differs):
        ledger.verify_chain(str(tmp_path), head)


def test_a_ledger_written_anew_shows_by_the_head_alone(tmp_path: Path) -> None:
    path = filled(tmp_path)
    head = ledger.verify_chain(str(tmp_path))["head"]
    path.unlink()
    filled(tmp_path, 4)
    assert ledger.verify_chain(str(tmp_path))["entries"] == 4
    with pytest.raises(Differs):
        ledger.verify_chain(str(tmp_path), head)


def test_times_that_go_back_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five minutes are what clocks of machines may differ by; the chain is whole either way."""

    class Clock(datetime):
        at = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.at

    monkeypatch.setattr(ledger, "datetime", Clock)
    for minutes in (0, -5, 60, -60 * 24 * 365, -60 * 24 * 365 + 1):
        Clock.at = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC) + timedelta(minutes=minutes)
        ledger.append_entry(str(tmp_path), "verify", "a.tar.zst")
    assert ledger.verify_chain(str(tmp_path))["backwards"] == [
        {"line": 4, "time": "2025-11-22T12:00:00Z", "before": "2026-11-22T13:00:00Z", "seconds": 365 * 86400 + 3600}
    ]
    entries = ledger.read_entries(str(tmp_path))
    assert ledger.describe_clock_error(entries[:2]) is not None and ledger.describe_clock_error(entries) is None
    assert ledger.describe_clock_error([]) is None
    Clock.at = datetime(2026, 11, 22, 11, 50, 0, tzinfo=UTC)
    assert ledger.describe_clock_error(entries[:2]) is None  # five minutes before a line of 11:55
    Clock.at -= timedelta(seconds=1)
    assert "11:49:59Z, and the last line of the ledger was written at 2026-11-22T11:55:00Z" in str(
        ledger.describe_clock_error(entries[:2])
    )


@pytest.mark.parametrize("head", ["", "0" * 63, "g" * 64, "A" * 64, "0" * 65])
def test_head_must_be_a_hash(tmp_path: Path, head: str) -> None:
    filled(tmp_path, 1)
    with pytest.raises(UsageError, match="not the hash of a line"):
        ledger.verify_chain(str(tmp_path), head)


@pytest.mark.parametrize("facts", [{"seq": 1}, {"hash": ""}, {"prev": ""}, {"time": ""}, {"by": "me"}])
def test_own_fields(tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="own"):
        ledger.append_entry(str(tmp_path), "export", "a", **facts)


@pytest.mark.parametrize(
    "fact", [float("nan"), float("inf"), object(), b"x", {1, 2}, "x" * (1 << 20), "\ud800" * (1 << 18)]
)
def test_facts_are_plain_and_bounded(tmp_path: Path, fact: Any) -> None:
    with pytest.raises(UsageError):
        ledger.append_entry(str(tmp_path), "export", "a", fact=fact)
    assert ledger.read_entries(str(tmp_path)) == []


@pytest.mark.parametrize("archive", ["", "a/b", "/a"])
def test_archive_is_a_file_name(tmp_path: Path, archive: str) -> None:
    with pytest.raises(UsageError, match="file name"):
        ledger.append_entry(str(tmp_path), "export", archive)


def test_the_longest_line(tmp_path: Path) -> None:
    """Appending looks for the last line from the end of the file; lines may be as long as they may."""
    short = len(json.dumps(ledger.append_entry(str(tmp_path), "e", "a", fact=""), separators=(",", ":"))) + 1
    for k in range(3):
        ledger.append_entry(str(tmp_path), "e", "a", fact="x" * ((1 << 20) - short))
        assert (tmp_path / "ledger.jsonl").stat().st_size == short + (k + 1 << 20)
    with pytest.raises(UsageError, match=r"1,048,577 bytes; it may have 1,048,576"):
        ledger.append_entry(str(tmp_path), "e", "a", fact="x" * ((1 << 20) - short + 1))
    ledger.append_entry(str(tmp_path), "e", "a")
    assert ledger.verify_chain(str(tmp_path))["entries"] == 5


# --------------------------------------------------------------------------------------------------------------- edits

_LINES: list[bytes] = []


def whole() -> bytes:
    if not _LINES:
        with tempfile.TemporaryDirectory() as folder:
            _LINES.extend(filled(Path(folder)).read_bytes().splitlines(True))
    return b"".join(_LINES)


def edited(store: Path, data: bytes) -> None:
    (store / "ledger.jsonl").write_bytes(data)


@given(st.data())
def test_any_byte_changed_inserted_or_removed_is_found(tmp_path: Path, data: st.DataObject) -> None:
    text = whole()
    at = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["change", "insert", "remove"]))
    byte = bytes([data.draw(st.integers(0, 255))])
    new = {
        "change": text[:at] + byte + text[at + 1 :],
        "insert": text[:at] + byte + text[at:],
        "remove": text[:at] + text[at + 1 :],
    }[how]
    assume(new != text)
    edited(tmp_path, new)
    line = text[:at].count(b"\n") + 1
    with pytest.raises(Corrupt) as e:
        ledger.verify_chain(str(tmp_path))
    assert f"line {line} " in str(e.value) or f"line {line + 1} " in str(e.value)


def test_every_single_bit(tmp_path: Path) -> None:
    text = whole()
    for at in range(len(text)):
        with pytest.raises(Corrupt):
            ledger._parse_chain(text[:at] + bytes([text[at] ^ (1 << at % 8)]) + text[at + 1 :], "x")


@given(st.data())
def test_any_lines_removed_inserted_swapped_or_doubled_are_found(tmp_path: Path, data: st.DataObject) -> None:
    whole()
    picks = data.draw(st.lists(st.integers(0, 4), max_size=8))
    new = b"".join(_LINES[k] for k in picks)
    edited(tmp_path, new)
    if picks == list(range(len(picks))):
        assert ledger.verify_chain(str(tmp_path))["entries"] == len(
            picks
        )  # a cut tail is the one thing a chain cannot see
        return
    bad = next(k for k, pick in enumerate(picks) if pick != k) + 1
    with pytest.raises(Corrupt, match=rf"line {bad} does not follow"):
        ledger.verify_chain(str(tmp_path))


@given(st.integers(1, 10_000))
@example(1)
def test_any_torn_tail_is_found(tmp_path: Path, cut: int) -> None:
    text = whole()
    cut = cut % len(text) or 1
    new = text[:-cut]
    edited(tmp_path, new)
    if not new or new.endswith(b"\n"):
        assert ledger.verify_chain(str(tmp_path))["entries"] == new.count(b"\n")
        return
    for call in (lambda: ledger.verify_chain(str(tmp_path)), lambda: ledger.append_entry(str(tmp_path), "verify", "a")):
        with pytest.raises(Corrupt, match=r"line (\d) is torn") as e:
            call()
        keep = new.rfind(b"\n") + 1
        assert e.match(f"line {new.count(bytes([10])) + 1} is torn")
        assert f"truncate -s {keep} " in str(e.value)
    assert (tmp_path / "ledger.jsonl").read_bytes() == new  # nothing mends itself
    edited(tmp_path, new[:keep])  # what the message says to do
    assert ledger.append_entry(str(tmp_path), "verify", "a")["seq"] == new.count(b"\n") + 1
    ledger.verify_chain(str(tmp_path))


@pytest.mark.parametrize(
    "field",
    ["seq", "time", "event", "archive", "by", "prev", "bytes", "why", "new field", "no time", "seq type", "event type"],
)
def test_lines_forged_with_a_hash_of_their_own(tmp_path: Path, field: str) -> None:
    """Who alters a line and hashes it again must do so with all that follow; the last line needs its types."""
    path = filled(tmp_path)
    for k in (1, 4):
        rows = [json.loads(r) for r in _fresh(path)]
        row = rows[k]
        changes = {
            "seq": {"seq": 9}, "time": {"time": "2020-01-01T00:00:00Z"}, "event": {"event": "verify!"},
            "archive": {"archive": "b"}, "by": {"by": "x@y"}, "prev": {"prev": "1" * 64}, "bytes": {"bytes": -1},
            "why": {"why": ""}, "new field": {"x": 1}, "no time": {"time": "yesterday"}, "seq type": {"seq": True},
            "event type": {"event": 1},
        }  # fmt: skip
        row |= changes[field]
        row["hash"] = ledger._hash_entry(row)
        edited(tmp_path, b"".join(ledger._encode_canonical_json(r) + b"\n" for r in rows))
        if k == 4 and field in ("time", "event", "archive", "by", "bytes", "why", "new field"):
            assert (
                ledger.verify_chain(str(tmp_path))["entries"] == 5
            )  # the last line is bound by a head written down alone
            continue
        with pytest.raises(Corrupt, match=r"line [235] "):
            ledger.verify_chain(str(tmp_path))


def _fresh(path: Path) -> list[bytes]:
    whole()
    path.write_bytes(b"".join(_LINES))
    return list(_LINES)


@pytest.mark.parametrize(
    "line",
    [
        b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\n", b"{" * 100_000 + b"\n", b'{"a":1,"a":2}\n',
        b"[" * 5000 + b"]" * 5000 + b"\n",
        b'{"seq":1e999}\n', b"\0" * 100 + b"\n", b"9" * 5000 + b"\n",
    ],
)  # fmt: skip
def test_foreign_lines(tmp_path: Path, line: bytes) -> None:
    path = filled(tmp_path, 2)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(Corrupt, match="line 3 "):
        ledger.read_entries(str(tmp_path))
    with pytest.raises(Corrupt, match="line 3 "):
        ledger.append_entry(str(tmp_path), "verify", "a")


def test_a_line_without_end(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b"x" * (3 << 20) + b"\n")
    with pytest.raises(Corrupt):
        ledger.append_entry(str(tmp_path), "verify", "a")


# ---------------------------------------------------------------------------------------------------- many, and killed


def _write(store: str, who: int, n: int) -> None:
    for k in range(n):
        ledger.append_entry(store, "verify", f"a{who}", k=k)


def test_four_processes_at_once(tmp_path: Path) -> None:
    mp = multiprocessing.get_context("forkserver")
    workers = [mp.Process(target=_write, args=(str(tmp_path), who, 50)) for who in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert [w.exitcode for w in workers] == [0] * 4
    entries = ledger.read_entries(str(tmp_path))
    assert len(entries) == 200
    for who in range(4):
        assert [e["k"] for e in entries if e["archive"] == f"a{who}"] == list(range(50))


_LOOP = """
import sys
from ckpttool.audit import ledger
k = 0
while True:
    ledger.append_entry(sys.argv[1], "verify", "a", k=k)
    print(k, flush=True)
    k += 1
"""


def test_kill_in_the_middle(tmp_path: Path) -> None:
    """Every entry that a killed writer was told is there; what it was at is there whole, or not at all."""
    dice, told = random.Random(5), 0
    for _ in range(6):
        run = subprocess.Popen([sys.executable, "-c", _LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert run.stdout
        run.stdout.readline()
        time.sleep(dice.random() * 0.05)
        run.send_signal(signal.SIGKILL)
        told += 1 + run.stdout.read().count("\n")
        run.stdout.close()
        run.wait()
        n = ledger.verify_chain(str(tmp_path))["entries"]
        assert told <= n <= told + 1
        told = n
    ledger.append_entry(str(tmp_path), "verify", "a")
    assert ledger.verify_chain(str(tmp_path))["entries"] == told + 1


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path, 2)
    before, write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:40]))
    with pytest.raises(NoSpace, match="not written") as full:
        ledger.append_entry(str(tmp_path), "verify", "a")
    assert full.value.code == "CKPT0801" and "is kept and used" not in str(full.value)

    def fail(fd: int, data: bytes) -> int:
        write(fd, data[:40])
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(CkpttoolError, match=r"Input/output error \(errno 5\)\. The entry was not written") as failed:
        ledger.append_entry(str(tmp_path), "verify", "a")
    assert type(failed.value) is CkpttoolError, "a disk that fails is not full"
    monkeypatch.undo()
    assert path.read_bytes() == before


def test_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    filled(tmp_path, 2)
    assert synced == [f"{tmp_path}/ledger.jsonl", str(tmp_path), f"{tmp_path}/ledger.jsonl"]


def test_only_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    outside = tmp_path / "outside"
    path.symlink_to(outside)
    for call in (lambda: ledger.append_entry(str(tmp_path), "e", "a"), lambda: ledger.read_entries(str(tmp_path))):
        with pytest.raises(CkpttoolError):
            call()
    assert not outside.exists()
    path.unlink()
    os.mkfifo(path)
    for call in (lambda: ledger.append_entry(str(tmp_path), "e", "a"), lambda: ledger.read_entries(str(tmp_path))):
        with pytest.raises(Unsafe, match="regular"):
            call()
    path.unlink()
    path.mkdir()
    with pytest.raises(CkpttoolError):
        ledger.append_entry(str(tmp_path), "e", "a")
    with pytest.raises(Corrupt, match="no such folder"):
        ledger.append_entry(str(tmp_path / "none"), "e", "a")


def test_a_ledger_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 40 GB takes no room on the disk, and would take all memory."""
    store = str(tmp_path)
    path = filled(tmp_path)
    os.truncate(path, 40 << 30)
    for call in (ledger.read_entries, ledger.verify_chain, ledger.check_writable):
        with pytest.raises(Unsafe, match=r"ledger.jsonl has 42,949,672,960 bytes.*more than 268,435,456 are refused"):
            call(store)
    with ledger.take_turn(store) as turn:
        with pytest.raises(Unsafe, match="are refused"):
            turn.read()
        with pytest.raises(Unsafe, match="is full"):
            turn.append("verify", "a")


def test_a_full_ledger_takes_no_line_and_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = stores.moto().bucket(monkeypatch)
    filled(tmp_path, 3)
    ledger.append_entry(bucket, "export", "a")
    for store in (str(tmp_path), bucket):
        n = len(ledger.read_entries(store))
        monkeypatch.setattr(objects, "MOST_LEDGER_BYTES", 2000 + (1 << 20))
        with pytest.raises(Unsafe, match=r"ledger.jsonl is full: it has \S+ bytes"):
            for _ in range(100):
                ledger.append_entry(store, "verify", "a")
        with pytest.raises(Unsafe, match="is full"):
            ledger.check_writable(store)
        assert n < len(ledger.read_entries(store)) < 100
        assert ledger.verify_chain(store)["entries"] == len(ledger.read_entries(store))


def test_a_lock_that_another_process_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read the ledger can lock it."""
    path = filled(tmp_path, 1)
    monkeypatch.setattr(ledger, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(ledger, "_LOCK_SECONDS", 0.3)
    monkeypatch.setattr(ledger, "_TURN_SECONDS", 0.3)
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    for call in (ledger.read_entries, ledger.check_writable, lambda store: ledger.append_entry(store, "verify", "a")):
        with (
            pytest.warns(ledger.LedgerWait, match="is locked by another process; this one waits") as told,
            pytest.raises(Locked, match=r"is locked by another process, and was so for 0.3 seconds.*`fuser"),
        ):
            call(str(tmp_path))
        assert len(told) == 1
    monkeypatch.setattr(ledger, "_TURN_SECONDS", 60)
    threading.Timer(0.2, os.close, (fd,)).start()
    with pytest.warns(ledger.LedgerWait):
        assert ledger.append_entry(str(tmp_path), "verify", "a")["seq"] == 2


# ------------------------------------------------------------------------------------------------------- object stores


def test_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"{stores.moto().bucket(monkeypatch)}/audit"
    assert ledger.read_entries_or_none(store) is None and ledger.read_entries(store) == []
    first_, second = (
        ledger.append_entry(store, "export", "a"),
        ledger.append_entry(f"{store}/", "verify", "a", sound=True),
    )
    assert ledger.read_entries(store) == [first_, second]
    assert ledger.verify_chain(store, first_["hash"])["entries"] == 2
    url = f"{store}/ledger.jsonl"
    data, token = objects.get_with_token(url)
    objects.put_if_unchanged(url, data.replace(b"true", b"null"), token)
    with pytest.raises(Corrupt, match=f"{url}: line 2 was altered"):
        ledger.append_entry(store, "verify", "a")


def test_a_large_ledger_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a listing has 2 MiB at most; ledgers grow, and a store whose ledger cannot be read is of no use."""
    store = stores.moto().bucket(monkeypatch)
    for k in range(4):
        assert ledger.append_entry(store, "export", "a", note="x" * 900_000)["seq"] == k + 1
    assert len(ledger.check_writable(store)) == 4


def test_writers_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.moto().bucket(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda who: _write(store, who, 5), range(4)))
    entries = ledger.read_entries(store)
    assert len(entries) == 20
    for who in range(4):
        assert [e["k"] for e in entries if e["archive"] == f"a{who}"] == list(range(5))


@pytest.mark.parametrize("what", [500, "drop", "lose"])
def test_in_a_bucket_behind_a_bad_line(monkeypatch: pytest.MonkeyPatch, what: int | str) -> None:
    """An answer that is lost is not a second entry."""
    moto = stores.moto()
    store = moto.bucket(monkeypatch)
    for k in range(3):
        with Flaky(moto.endpoint, first(2, what, "PUT")) as proxy:
            moto.environment(monkeypatch, proxy.endpoint)
            assert ledger.append_entry(store, "verify", "a", k=k)["seq"] == k + 1
            assert proxy.did(what) == 2
    moto.environment(monkeypatch)
    assert [e["k"] for e in ledger.read_entries(store)] == [0, 1, 2]


def test_a_bucket_that_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_SWAPS", 3)
    monkeypatch.setattr(objects, "put_if_unchanged", lambda *_: False)
    store = stores.moto().bucket(monkeypatch)
    with pytest.raises(RemoteError, match="3 times"):
        ledger.append_entry(store, "verify", "a")


def test_stores_without_conditions() -> None:
    with pytest.raises(Unsupported, match="conditional"):
        ledger.append_entry("memory://nobody", "verify", "a")
    assert ledger.read_entries("memory://nobody") == []
