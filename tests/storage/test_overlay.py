"""`JoinedSource`: files of two folders, and zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import CkpttoolError, SourceChanged
from ckpttool.storage.overlay import ZEROS, JoinedSource, name_in_joined
from ckpttool.storage.source import Source


def test_files_of_both_and_zeros(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(name.encode() * 10)
    (tmp_path / "b" / "only").write_bytes(b"1234")
    with JoinedSource(Source(tmp_path / "a"), Source(tmp_path / "b")) as joined:
        assert joined.list() == ["x"] and joined.root == str(tmp_path / "a")
        assert joined.read("x", 2, 3) == b"aaa" and joined.read(name_in_joined("x"), 2, 3) == b"bbb"
        assert (
            joined.exists(name_in_joined("only"))
            and not joined.exists("only")
            and joined.size(name_in_joined("only")) == 4
        )
        assert joined.read(ZEROS, 1 << 50, 5) == bytes(5)
        assert set(joined.identities()) == {"x", name_in_joined("x"), name_in_joined("only")}
        joined.assert_unchanged()
        (tmp_path / "b" / "only").write_bytes(b"12345")
        with pytest.raises(SourceChanged):
            joined.assert_unchanged()
    with JoinedSource(Source(tmp_path / "a")) as alone:
        assert alone.read(ZEROS, 0, 3) == bytes(3)
        with pytest.raises(CkpttoolError):  # no file has such a name
            alone.read(name_in_joined("x"), 0, 1)
