"""What lies beside a destination: whose it is, what is believed of it, what is put back, what is kept, what is removed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.export import export
from ckpttool.cli import main as cli
from ckpttool.engine import conversion
from ckpttool.engine.copy import fill
from ckpttool.errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    Interrupted,
    Locked,
    NoSpace,
    RemoteError,
    Unreadable,
    UsageError,
)
from ckpttool.storage import buffers, local_destination, lock, partial, source

NOBODY = 65534
ROOT = os.geteuid() == 0
HOW: dict[str, Any] = {"to": "dcp", "world_size": 2}


def saved(path: Path, seed: int = 1) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"l{i}.weight": torch.randn(131, 40, generator=generator) for i in range(6)}
    torch.save({"model": {**weights, "e": torch.empty(0, 3), "s": torch.tensor(seed)}, "step": seed}, path)
    return path


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return saved(tmp_path / "in.pt")


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    return tmp_path / "to" / "out"


@pytest.fixture(autouse=True)
def every_tensor_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "_JOURNAL_BYTES", 1)


class After:
    """A progress that raises something once so many blocks were copied."""

    def __init__(self, n: int, what: BaseException | None = None) -> None:
        self.n, self.what, self.seen = n, what or KeyboardInterrupt(), 0
        self.passes: list[str] = []

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self.passes:
            self.passes.append(what)
        self.seen += what == "copy"
        if self.seen == self.n + 1:
            raise self.what


def interrupted(src: Path, dst: Path, n: int = 4, **how: Any) -> Path:
    """The partial folder that a run leaves."""
    with pytest.raises(Interrupted, match="Run the same command again"):
        ckpttool.convert(src, dst, progress=After(n), **{**HOW, **how})
    (left,) = beside(dst)
    assert not os.path.lexists(dst)
    return left


def beside(dst: Path) -> list[Path]:
    prefix = os.path.basename(partial.LeftoverFiles(str(dst)).prefix)
    return sorted(p for p in dst.parent.iterdir() if p.name.startswith(prefix))


def same(src: Path, dst: Path) -> bool:
    return bool(ckpttool.digest(src).digest == ckpttool.digest(dst).digest)


def said(done: conversion.ConvertResult) -> str:
    return "\n".join(done.notes)


# ----------------------------------------------------------------------------------------------------------- whose


def planted(kind: str, left: Path, tmp_path: Path) -> None:
    """Make of a partial folder one that somebody else may have put there."""
    if kind == "owner":
        os.chown(left, NOBODY, NOBODY)
    elif kind == "mode":
        left.chmod(0o777)
    elif kind == "link":
        left.rename(tmp_path / "elsewhere")
        left.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        left.rename(tmp_path / "elsewhere")
        left.write_text("x")
    elif kind == "other entry":
        (left / "notes.txt").write_text("x")


@pytest.mark.parametrize("kind", ["owner", "mode", "link", "file", "other entry"])
def test_a_partial_folder_that_others_may_have_made_is_named_and_not_used(
    kind: str, src: Path, dst: Path, tmp_path: Path
) -> None:
    if kind == "owner" and not ROOT:
        pytest.skip("only root can give a folder away; `mode` tests the same where this is not run by root")
    left = interrupted(src, dst)
    for file in (left / "tree").glob("*.distcp"):  # the attacker's weights
        file.write_bytes(bytes(file.stat().st_size))
    planted(kind, left, tmp_path)
    assert ckpttool.clean(dst).kept[0][0] == str(left)
    done = ckpttool.convert(src, dst, verify=False, **HOW)
    assert str(left) in said(done) and "rm -r" in said(done) and "continued" not in said(done)
    assert same(src, dst)
    assert beside(dst) == [left] and os.lstat(dst).st_uid == os.geteuid()


@pytest.mark.parametrize("kind", ["file's owner", "tree's owner", "hard link", "link inside", "can be entered"])
def test_a_folder_of_ours_with_anything_of_others_in_it_is_begun_anew(
    kind: str, src: Path, dst: Path, tmp_path: Path
) -> None:
    if "owner" in kind and not ROOT:
        pytest.skip("only root can give a file away")
    left = interrupted(src, dst)
    file = next((left / "tree").glob("*.distcp"))
    if kind == "file's owner":
        os.chown(file, NOBODY, NOBODY)
    elif kind == "tree's owner":
        os.chown(left / "tree", NOBODY, NOBODY)
    elif kind == "hard link":
        os.link(file, tmp_path / "held")
    elif kind == "link inside":
        file.rename(tmp_path / "held")
        file.symlink_to(tmp_path / "held")
    else:
        left.chmod(0o755)
    done = ckpttool.convert(src, dst, **HOW)
    assert "continued" not in said(done)
    assert same(src, dst) and beside(dst) == []


def test_a_rerun_finds_what_it_left_under_another_name(src: Path, dst: Path) -> None:
    left = interrupted(src, dst)
    left.rename(f"{left}-1")
    left.write_text("planted")
    again = After(1)
    with pytest.raises(Interrupted):
        ckpttool.convert(src, dst, progress=again, **HOW)
    assert again.passes == ["reread", "copy"]
    assert beside(dst) == [left, Path(f"{left}-1")]
    assert "continued" in said(ckpttool.convert(src, dst, **HOW))
    assert same(src, dst) and beside(dst) == [left]


def test_a_child_of_a_killed_run_does_not_keep_its_lock(dst: Path) -> None:
    """Workers of a ProcessPoolExecutor are forked, and outlive a coordinator that is killed."""
    code = """
import os, sys, time
from ckpttool.storage import lock, partial
fd = lock.take_lock(beside := partial.LeftoverFiles(sys.argv[1]))
if os.fork() == 0:
    lock.unlock(beside, fd)  # not its own
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    run = subprocess.Popen([sys.executable, "-c", code, dst], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    child = int(run.stdout.readline())
    try:
        with pytest.raises(Locked, match=f"is being written by process {run.pid} on"):
            lock.take_lock(partial.LeftoverFiles(str(dst)))
        run.kill()
        run.wait()
        lock.unlock(beside := partial.LeftoverFiles(str(dst)), lock.take_lock(beside))
        assert not os.path.exists(beside.lock)
    finally:
        run.kill()
        os.kill(child, signal.SIGKILL)
        run.stdout.close()


@pytest.mark.parametrize("kind", ["owner", "link", "fifo", "hard link"])
def test_a_lock_that_is_not_ours_is_named(kind: str, src: Path, dst: Path, tmp_path: Path) -> None:
    if kind == "owner" and not ROOT:
        pytest.skip("only root can give a file away")
    lock, precious = dst.parent / ".out.partial-lock", tmp_path / "precious"
    precious.write_text("precious")
    if kind == "owner":
        lock.write_text("process 1 on host\n")
        os.chown(lock, NOBODY, NOBODY)
    elif kind == "link":
        lock.symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        os.link(precious, lock)
    with pytest.raises(Locked, match=r"\.out\.partial-lock .*remove it, or write elsewhere"):
        ckpttool.convert(src, dst, **HOW)
    assert precious.read_text() == "precious" and os.path.lexists(lock) and not dst.exists()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o777])
def test_nobody_else_enters_a_partial_folder_and_the_destination_has_the_users_mode(
    umask: int, src: Path, dst: Path
) -> None:
    before = os.umask(umask)
    try:
        left = interrupted(src, dst)
        assert stat.S_IMODE(left.stat().st_mode) == 0o700
        assert stat.S_IMODE((left / "journal").stat().st_mode) == 0o600
        assert "continued" in said(ckpttool.convert(src, dst, **HOW))
    finally:
        os.umask(before)
    assert stat.S_IMODE(dst.stat().st_mode) == 0o777 & ~umask | 0o700
    for file in dst.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask | 0o600


# ------------------------------------------------------------------------------------------------ what is believed


def test_what_a_journal_calls_done_is_read_again_and_the_result_read_back_even_with_no_verify(
    src: Path, dst: Path
) -> None:
    left = interrupted(src, dst)
    assert b"digests" not in (left / "journal").read_bytes() and b"crcs" not in (left / "journal").read_bytes()
    again = After(1000)
    done = ckpttool.convert(src, dst, verify=False, progress=again, **HOW)
    assert again.passes == ["reread", "copy", "verify"]
    assert done.verified and "read back" in said(done)
    assert same(src, dst) and beside(dst) == []


def test_bytes_of_a_finished_tensor_that_are_others_are_found_with_no_verify_too(src: Path, dst: Path) -> None:
    left = interrupted(src, dst, to="hf", world_size=None)
    file = left / "tree" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[10_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(Differs, match="read back, differs"):
        ckpttool.convert(src, dst, to="hf", world_size=None, verify=False)
    assert not dst.exists() and beside(dst) == []


@pytest.mark.parametrize("how", [{"to": "full", "world_size": None}, HOW, {"to": "zero3", "world_size": 2}])
def test_literal_bytes_that_are_others_and_files_that_are_shorter_are_made_anew(
    how: dict[str, Any], src: Path, dst: Path
) -> None:
    ckpttool.convert(src, dst.parent / "want", **how)
    want = contents(dst.parent / "want")
    for harm in (lambda f: f.write(b"\xff" * 9), lambda f: f.truncate(50), lambda f: f.truncate(0)):
        left = interrupted(src, dst, **how)
        for file in sorted((left / "tree").rglob("*")):
            if file.is_file():
                with open(file, "r+b") as f:
                    harm(f)
        done = ckpttool.convert(src, dst, **how)
        assert "was written again" in said(done) and "continued" not in said(done)
        assert contents(dst) == want and beside(dst) == []
        partial.shutil.rmtree(dst) if dst.is_dir() else dst.unlink()


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.name != "ckpttool.json"]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


@pytest.mark.parametrize(
    "line",
    ['{"done": 999}', '{"done": -1}', '{"done": true}', '{"done": "2"}', '{"done": []}', "[]", "1", "{}", "[" * 5000,
     '{"done": 2, "sinks": 3}', '{"done": 2, "digests": [1]}', '{"committed": true}', "\xff"],
)  # fmt: skip
def test_a_journal_that_makes_no_sense_is_begun_anew(line: str, src: Path, dst: Path) -> None:
    left = interrupted(src, dst)
    with open(left / "journal", "ab") as f:
        f.write(line.encode("latin-1") + b"\n")
    assert "continued" not in said(ckpttool.convert(src, dst, **HOW))
    assert same(src, dst) and beside(dst) == []


def test_a_line_that_was_cut_off_does_not_spoil_the_journal(src: Path, dst: Path) -> None:
    left = interrupted(src, dst)
    with open(left / "journal", "a") as f:
        f.write('{"done": 5, "sin')
    interrupted(src, dst, 1)
    assert all(map(json.loads, (left / "journal").read_text().splitlines()))
    assert "continued" in said(ckpttool.convert(src, dst, **HOW))
    assert same(src, dst)


def test_a_source_that_is_far_away_is_not_read_twice(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.Source, "is_remote", True)
    left = interrupted(src, dst)
    read = 0

    def counted(
        self: source.Source, name: str, offset: int, into: memoryview, real: Any = source.Source.readinto
    ) -> None:
        nonlocal read
        if name == src.name:
            read += len(into)
        real(self, name, offset, into)

    monkeypatch.setattr(source.Source, "readinto", counted)
    done = ckpttool.convert(src, dst, **HOW)
    assert "continued" in said(done)
    assert read < 0.7 * src.stat().st_size
    assert same(src, dst)
    # and the digests are those of the bytes that are there
    partial.shutil.rmtree(dst)
    left = interrupted(src, dst)
    for file in (left / "tree").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[3000] ^= 1
        file.write_bytes(data)
    done = ckpttool.convert(src, dst, **HOW)
    assert "was written again" in said(done) and same(src, dst)


@pytest.mark.slow
def test_frames_of_an_archive_are_unfolded_and_compared(src: Path, dst: Path) -> None:
    weights = {f"l{i}": torch.randn(1024, 300) for i in range(4)}
    torch.save({"model": weights}, src)
    how = ArchiveOptions(reproducible=True, member_bytes=1 << 20)
    archive = dst.with_suffix(".tar.zst")
    want = dst.parent / "want.tar.zst"
    export(src, str(want), how, in_ledger=False)
    harms: list[Callable[[Path], object] | None] = [None, spoil_frame, lambda left: (left / "journal").write_text(
        (left / "journal").read_text().replace('"frames":"', '"frames":"AAAA'))]  # fmt: skip
    for harm in harms:
        with pytest.raises(Interrupted):
            export(src, str(archive), how, in_ledger=False, progress=After(3))
        (left,) = beside(archive)
        if harm:
            harm(left)
        notes = "\n".join(export(src, str(archive), how, in_ledger=False, verify=False).result.notes)
        assert ("written again" in notes) == (harm is spoil_frame)
        assert ("continued" in notes) == (harm is not spoil_frame)
        assert archive.read_bytes() == want.read_bytes() and beside(archive) == []
        archive.unlink()


def spoil_frame(left: Path) -> None:
    (file,) = (left / "tree").iterdir()
    data = bytearray(file.read_bytes())
    data[20_000] ^= 1
    file.write_bytes(data)


# --------------------------------------------------------------------------------------- without RENAME_EXCHANGE


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "rename_with_flags", lambda *args: False)


class Killed(BaseException):
    """What nothing catches but to let go."""


@contextmanager
def second_rename(what: Callable[[], BaseException], also_back: bool) -> Iterator[None]:
    """os.rename fails from the second time on, or that time alone."""
    real, seen = os.rename, []

    def rename(*args: Any, **kwargs: Any) -> None:
        seen.append(args)
        if len(seen) == 2 or (also_back and len(seen) > 2):
            raise what()
        real(*args, **kwargs)

    os.rename = rename  # type: ignore[assignment]
    try:
        yield
    finally:
        os.rename = real


def test_an_error_between_the_two_renames_puts_the_old_one_back(src: Path, dst: Path, no_exchange: None) -> None:
    ckpttool.convert(saved(dst.parent / "old.pt", 2), dst, **HOW)
    before = contents(dst)
    with (
        second_rename(lambda: OSError(errno.EIO, "Input/output error"), False),
        pytest.raises(CkpttoolError, match="destination is untouched"),
    ):
        ckpttool.convert(src, dst, force=True, **HOW)
    assert contents(dst) == before
    assert "continued" in said(ckpttool.convert(src, dst, force=True, **HOW))
    assert same(src, dst) and beside(dst) == []


@pytest.fixture
def between(src: Path, dst: Path, no_exchange: None) -> dict[str, bytes]:
    """A run that was killed between the two renames; what the old destination held."""
    ckpttool.convert(saved(dst.parent / "old.pt", 2), dst, **HOW)
    before = contents(dst)
    with second_rename(Killed, True), pytest.raises(Killed):
        ckpttool.convert(src, dst, force=True, **HOW)
    assert not dst.exists()
    (left,) = beside(dst)
    assert contents(left / "old") == before
    return before


def test_the_next_run_puts_the_old_one_back_before_anything_else(
    between: dict[str, bytes], dst: Path, tmp_path: Path
) -> None:
    broken = saved(tmp_path / "broken.pt", 3)
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    with pytest.raises(Corrupt) as e:
        ckpttool.convert(broken, dst, force=True, to="hf")
    assert any("the old one was put back from" in n for n in e.value.__notes__)
    assert contents(dst) == between


def test_a_run_with_a_source_that_is_not_there_puts_it_back_and_without_force_it_stays(
    between: dict[str, bytes], src: Path, dst: Path
) -> None:
    with pytest.raises(CkpttoolError):
        ckpttool.convert(dst.parent / "nowhere", dst, force=True, **HOW)
    assert contents(dst) == between
    with pytest.raises(DestinationExists):
        ckpttool.convert(src, dst, **HOW)
    ckpttool.convert(src, dst, force=True, **HOW)
    assert same(src, dst) and beside(dst) == []


def test_clean_puts_it_back(between: dict[str, bytes], dst: Path) -> None:
    (left,) = beside(dst)
    dry = ckpttool.clean(dst.parent, dry_run=True)
    assert dry.put_back == [(str(left / "old"), str(dst))] and left.exists() and not dst.exists()
    assert ckpttool.clean(dst.parent).put_back == dry.put_back
    assert contents(dst) == between and beside(dst) == []


def test_what_cannot_be_put_back_is_kept_and_said(src: Path, dst: Path, no_exchange: None) -> None:
    ckpttool.convert(saved(dst.parent / "old.pt", 2), dst, **HOW)
    before = contents(dst)
    with (
        second_rename(lambda: OSError(errno.EIO, "Input/output error"), True),
        pytest.raises(CkpttoolError, match=r"ckpttool clean .*/to/out") as e,
    ):
        ckpttool.convert(src, dst, force=True, **HOW)
    assert "untouched" not in str(e.value)
    (left,) = beside(dst)
    assert contents(left / "old") == before
    assert partial.remove_partial_folder(str(left), str(dst)) is not None and contents(left / "old") == before
    ckpttool.convert(src, dst, force=True, **HOW)
    assert same(src, dst)


# -------------------------------------------------------------------------------------------- what --force replaces


@pytest.mark.parametrize("kind", ["fifo", "socket", "text", "text named .pt", "bytes"])
def test_force_replaces_no_file_that_is_not_a_checkpoint(
    kind: str, src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = dst.with_suffix(".pt") if kind == "text named .pt" else dst
    with socket.socket(socket.AF_UNIX) as s:
        if kind == "fifo":
            os.mkfifo(target)
        elif kind == "socket":
            monkeypatch.chdir(target.parent)  # the name of a socket is short
            s.bind(target.name)
        elif kind == "bytes":
            target.write_bytes(bytes(range(256)))
        else:
            target.write_text("precious notes of a whole year\n")
        before = os.lstat(target)
        word = {"fifo": "a FIFO", "socket": "a socket"}.get(kind, "a file of")
        with pytest.raises(DestinationExists, match=word):
            ckpttool.convert(src, target, to="full", force=True)
        assert os.path.samestat(before, os.lstat(target))
        with pytest.raises(DestinationExists):
            ckpttool.convert(src, target, to="full")


def test_force_replaces_an_empty_file_and_an_empty_folder(src: Path, dst: Path) -> None:
    dst.touch()
    ckpttool.convert(src, dst, to="full", force=True)
    assert same(src, dst)
    dst.unlink()
    dst.mkdir()
    ckpttool.convert(src, dst, force=True, **HOW)
    assert same(src, dst)


# ------------------------------------------------------------------------------------------------ after the rename


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, CkpttoolError), (errno.ENOSPC, NoSpace)])
@pytest.mark.parametrize("force", [False, True])
def test_an_error_after_the_rename_says_that_the_new_one_is_in_place(
    code: int, kind: type[CkpttoolError], force: bool, src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if force:
        ckpttool.convert(saved(dst.parent / "old.pt", 2), dst, **HOW)
    real = local_destination.sync_folder

    def sync(path: str) -> None:
        if path == str(dst.parent):
            raise OSError(code, os.strerror(code))
        real(path)

    monkeypatch.setattr(local_destination, "sync_folder", sync)
    with pytest.raises(kind, match="new checkpoint is in place") as e:
        ckpttool.convert(src, dst, force=force, **HOW)
    assert type(e.value) is kind and "untouched" not in str(e.value) and "power cut" in str(e.value)
    assert same(src, dst)
    assert bool(beside(dst)) == force, "the old one is kept where the rename may be undone"
    ckpttool.clean(dst)
    assert beside(dst) == []


def test_an_interruption_of_the_cleanup_says_so(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(partial, "remove_partial_folder", stop)
    with pytest.raises(Interrupted, match="new checkpoint is in place") as e:
        ckpttool.convert(src, dst, **HOW)
    assert "untouched" not in str(e.value)
    assert same(src, dst)


def test_what_cannot_be_removed_is_named_with_the_command_that_does(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpttool.convert(saved(dst.parent / "old.pt", 2), dst, **HOW)
    real = os.rmdir

    def fail(path: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "rmdir", fail)
    done = ckpttool.convert(src, dst, force=True, **HOW)
    (left,) = beside(dst)
    assert f"{left} could not be removed" in said(done) and f"ckpttool clean {dst}" in said(done)
    assert ckpttool.clean(dst).kept[0][0] == str(left)
    monkeypatch.setattr(os, "rmdir", real)
    ckpttool.clean(dst)
    assert same(src, dst) and beside(dst) == []


# ------------------------------------------------------------------------------------------ which errors keep work


@pytest.mark.parametrize("error", [RemoteError("gone"), NoSpace("full"), Unreadable("EIO"), CkpttoolError("x")])
def test_an_error_that_says_nothing_of_the_bytes_keeps_them(error: CkpttoolError, src: Path, dst: Path) -> None:
    with pytest.raises(type(error)):
        ckpttool.convert(src, dst, progress=After(4, error), **HOW)
    assert beside(dst) and not dst.exists()
    assert "continued" in said(ckpttool.convert(src, dst, **HOW))
    assert same(src, dst)


@pytest.mark.parametrize("error", [Corrupt("x"), Differs("x")])
def test_an_error_of_the_bytes_removes_them(error: CkpttoolError, src: Path, dst: Path) -> None:
    with pytest.raises(type(error)):
        ckpttool.convert(src, dst, progress=After(4, error), **HOW)
    assert beside(dst) == []


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_too_many_open_files_while_reading_back_are_no_corruption_and_keep_the_work(
    code: int, src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fail(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if ".partial-" in str(path) and str(path).endswith(".distcp") and not flags & os.O_RDWR:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(NoSpace, match=r"ulimit -n|too many|not enough memory"):
        ckpttool.convert(src, dst, **HOW)
    monkeypatch.setattr(os, "open", real)
    assert "continued" in said(ckpttool.convert(src, dst, **HOW))
    assert same(src, dst)


def test_an_error_about_a_descriptor_names_the_destination(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, *args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), fd)  # as os.stat(fd) has it

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkpttoolError, match=f"{re.escape(str(dst.parent))}.*Input/output error"):
        ckpttool.convert(src, dst, **HOW)


def test_a_result_that_cannot_be_read_back_is_removed(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fail(fd: int, *args: Any) -> int:
        if ".partial-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(Corrupt, match="cannot be read back"):
        ckpttool.convert(src, dst, **HOW)
    assert beside(dst) == []


def test_no_memory_for_the_buffers_is_exit_8(src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(buffers.mmap, "mmap", none)
    with pytest.raises(NoSpace, match="max_memory_bytes"):
        ckpttool.convert(src, dst, **HOW)


@pytest.mark.slow
def test_a_file_that_may_not_grow_so_far_is_exit_8(src: Path, dst: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); from ckpttool.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", src, dst, "--to", "full", "-q"], capture_output=True, text=True
    )
    assert done.returncode == 8, done.stderr
    assert "ulimit -f" in done.stderr


# ----------------------------------------------------------------------------------------------- names, and clean


@pytest.mark.parametrize("name", ["x" * 255, "x" * 231, "ä" * 127, "模" * 85, "x" * 240 + ".pt"])
def test_a_name_may_have_255_bytes(name: str, src: Path, dst: Path) -> None:
    target = dst.parent / name
    how = {"to": "full", "world_size": None} if name.endswith(".pt") else {}
    left = interrupted(src, target, **how)
    assert len(os.fsencode(left.name)) <= 252
    assert "continued" in said(ckpttool.convert(src, target, **{**HOW, **how}))
    assert same(src, target) and beside(target) == []
    (target.unlink if target.is_file() else lambda: partial.shutil.rmtree(target))()
    left = interrupted(src, target, **how)
    assert ckpttool.clean(target.parent).removed[0][0] == str(left)
    assert beside(target) == []


def test_a_longer_name_is_a_usage_error_before_any_work(src: Path, dst: Path) -> None:
    with pytest.raises(UsageError, match="256 bytes"):
        ckpttool.convert(dst.parent / "not there", dst.parent / ("x" * 256), **HOW)


def test_a_folder_without_a_journal_is_removed_by_any_run(src: Path, dst: Path) -> None:
    left = dst.parent / ".out.partial-aaaaaaaaaaaa"
    (left / "tree").mkdir(parents=True)
    (left / "tree" / "__0_0.distcp").write_bytes(bytes(1000))
    done = ckpttool.convert(src, dst, **HOW)
    assert left.name in said(done)
    assert beside(dst) == []


def test_clean_removes_what_is_ours_and_dead_and_names_the_rest(src: Path, dst: Path) -> None:
    interrupted(src, dst)
    other = dst.parent / "other"
    left = interrupted(src, other)
    stale = dst.parent / ".third.partial-lock"
    stale.touch()
    foreign = dst.parent / ".out.partial-bbbbbbbbbbbb"
    foreign.mkdir(mode=0o700)
    foreign.chmod(0o777)
    unrelated = [
        dst.parent / n for n in (".out.partial-x", ".partial-aaaaaaaaaaaa", "x.partial-aaaaaaaaaaaa", ".out.tmp")
    ]
    for path in unrelated:
        path.mkdir()
    before = sorted(dst.parent.iterdir())
    dry = ckpttool.clean(dst.parent, dry_run=True)
    assert sorted(dst.parent.iterdir()) == before
    command = [sys.executable, "-m", "ckpttool", "clean", str(dst.parent), "--json"]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [r["path"] for r in done["removed"]] == [p for p, _ in dry.removed] and str(left) in {
        p for p, _ in dry.removed
    }
    assert [r["path"] for r in done["kept"]] == [str(foreign)] == [p for p, _ in dry.kept]
    assert sorted(dst.parent.iterdir()) == sorted([*unrelated, foreign])
    with pytest.raises(UsageError):
        ckpttool.clean(dst.parent / "nowhere" / "out")


def test_clean_that_could_not_remove_something_is_no_success(
    src: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left = interrupted(src, dst)
    monkeypatch.setattr(
        partial, "remove_partial_folder", lambda folder, target: f"{folder} could not be removed (busy)"
    )
    monkeypatch.setattr(sys, "argv", ["ckpttool", "clean", str(dst)])
    for name in ("stdout", "stderr"):  # main wraps them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert f"kept {left}" in capfd.readouterr().err


def test_clean_leaves_what_a_live_run_writes(src: Path, dst: Path) -> None:
    found: list[partial.Cleaned] = []

    def look(what: str, done: int, total: int) -> None:
        if not found:
            found.append(ckpttool.clean(dst))
            found.append(ckpttool.clean(dst, dry_run=True))

    ckpttool.convert(src, dst, progress=look, **HOW)
    assert all(f.removed == [] and f"process {os.getpid()}" in f.kept[0][1] for f in found)
    assert same(src, dst) and beside(dst) == []
