"""A path with ".." after a link names for ckpttool what it names for the kernel: the folder above the link's target."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.audit import archive_store, holds, ledger, pruning, verify_in_store
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.export import export, restore
from ckpttool.errors import DestinationExists, UsageError
from ckpttool.storage import partial
from ckpttool.storage.source import Source
from ckpttool.storage.urls import display_path, make_absolute, make_path_absolute


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `link -> ../real/sub`, in which the test runs, and another checkpoint s.pt in each of the two."""
    (tmp_path / "real" / "sub").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to("../real/sub")
    for n, folder in enumerate(("real", "here")):
        torch.save({"model": {"w": torch.full((4,), float(n))}, "step": n}, tmp_path / folder / "s.pt")
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "here"


def test_an_absolute_path_is_of_the_file_that_the_kernel_opens(tmp_path: Path) -> None:
    os.symlink("sub", tmp_path / "real" / "again")
    os.symlink("s.pt", tmp_path / "real" / "newest.pt")
    os.symlink("../here/link", tmp_path / "real" / "far")
    (tmp_path / "real" / "sub" / "deep").mkdir()
    names = ("link", "..", ".", "", "real", "again", "far", "sub", "deep", "s.pt", "newest.pt")
    checked = 0
    for parts in itertools.chain.from_iterable(itertools.product(names, repeat=n) for n in (1, 2, 3, 4)):
        for path in (p for p in ("/".join(parts), f"{tmp_path}/here/{'/'.join(parts)}") if p and os.path.exists(p)):
            said = make_path_absolute(path)
            assert os.path.samefile(said, path), path
            assert said == os.path.abspath(said), path
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    "path, want",
    [
        ("s.pt", "here/s.pt"),
        ("link/x", "here/link/x"),  # a link stays, unless a ".." follows it
        ("./link//x/", "here/link/x"),
        ("../here/link/x", "here/link/x"),
        ("link/../newest.pt", "real/newest.pt"),
        ("link/..", "real"),
        ("link/../out/", "real/out"),
        ("no/../s.pt", "here/s.pt"),
    ],
)
def test_what_stays_of_a_path(tmp_path: Path, path: str, want: str) -> None:
    os.symlink("s.pt", tmp_path / "real" / "newest.pt")
    assert make_path_absolute(path) == make_path_absolute(Path(path)) == str(tmp_path / want)
    assert make_absolute(path) == display_path(path) == str(tmp_path / want)


def test_no_folder_is_above_the_root_and_urls_are_left_alone() -> None:
    assert make_path_absolute("/../..") == "/"
    assert make_path_absolute("/../x") == "/x"
    assert make_absolute("s3://a/b/../c") == display_path("s3://a/b/../c") == "s3://a/b/../c"


def test_the_checkpoint_that_the_kernel_opens_is_read() -> None:
    roots = [ckpttool.digest(p).digest for p in ("link/../s.pt", "../real/s.pt", "s.pt")]
    assert roots[0] == roots[1] != roots[2]
    assert Source("link/..").root == os.path.realpath("../real")


def test_a_result_lands_where_the_kernel_says(tmp_path: Path) -> None:
    ckpttool.convert("s.pt", "link/../out.pt", to="full")
    assert (tmp_path / "real" / "out.pt").is_file() and not os.path.lexists("out.pt")
    assert ckpttool.diff("link/../out.pt", "s.pt").equal


def test_leftovers_beside_that_place_are_cleaned(tmp_path: Path) -> None:
    left = tmp_path / "real" / ".out.partial-0123456789ab"
    left.mkdir(mode=0o700)
    done = partial.clean("link/../out")
    assert [path for path, _ in done.removed] == [str(left)] and not left.exists()


def test_a_plan_is_written_and_applied_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckpttool.plan("link/../s.pt", "link/../out.pt", to="full") as planned:
        planned.save("link/../p.json")
    assert not os.path.lexists("p.json")
    monkeypatch.chdir(tmp_path)
    ckpttool.apply("real/p.json")
    assert ckpttool.diff("real/out.pt", "real/s.pt").equal


def prune(store: str) -> pruning.Pruned:
    """Delete all archives that nothing protects."""
    later = datetime.now(UTC) + timedelta(days=2)
    return pruning.prune(store, keep_within=timedelta(days=1), no_ledger=True, now=later)


def test_prune_judges_the_folder_in_which_it_deletes(tmp_path: Path) -> None:
    export("s.pt", "link/../a.tar.zst", ArchiveOptions(hold="case 1"), in_ledger=False)
    export("s.pt", "a.tar.zst", in_ledger=False)
    assert (tmp_path / "real" / "a.tar.zst").is_file()
    assert "case 1" in prune("link/..").refused["a.tar.zst"]
    assert (tmp_path / "real" / "a.tar.zst").is_file() and Path("a.tar.zst").is_file()
    assert prune(".").deleted == ("a.tar.zst",)
    assert (tmp_path / "real" / "a.tar.zst").is_file() and not Path("a.tar.zst").exists()


def test_an_archive_its_ledger_and_its_hold_are_in_one_folder(tmp_path: Path) -> None:
    export("s.pt", "link/../a.tar.zst")
    export("link/../s.pt", "a.tar.zst")
    assert ledger.read_entries("link/..") == ledger.read_entries("../real") != ledger.read_entries(".")
    holds.hold("link/../a.tar.zst", "case 1")
    assert (tmp_path / "real" / "a.tar.zst.hold.json").is_file() and not Path("a.tar.zst.hold.json").exists()
    for store, held in (("link/..", ("case 1",)), ("../real", ("case 1",)), (".", ())):
        assert [row.held for row in archive_store.list_archives(store)] == [held]
    assert prune("link/..").deleted == ()
    with pytest.raises(DestinationExists, match="case 1"):
        export("s.pt", "link/../a.tar.zst", force=True)
    found = verify_in_store.verify("link/../a.tar.zst")
    assert not found.findings and found.path == "link/../a.tar.zst"
    assert ledger.read_entries("../real")[-1]["event"] == "verify"
    assert ledger.verify_chain("link/..")["entries"] == len(ledger.read_entries("../real"))
    restore("link/../a.tar.zst", "link/../back.pt", to="full")
    assert ckpttool.diff("../real/back.pt", "s.pt").equal
    with pytest.raises(UsageError, match="not under a legal hold"):
        holds.release("a.tar.zst", "over")
    holds.release("link/../a.tar.zst", "over")
    assert prune("link/..").deleted == ("a.tar.zst",)
    assert Path("a.tar.zst").is_file() and not (tmp_path / "real" / "a.tar.zst").exists()
