"""tests/tools.sh: `make test` installs nothing on the machine of somebody who did not ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from peers import REPOSITORY


@pytest.mark.parametrize(("asked", "installs"), [({}, False), ({"CI": "true"}, True), ({"TOOLS": "1"}, True)])
def test_apt_get_runs_only_where_it_was_asked_for(asked: dict[str, str], installs: bool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("apt-get", "sudo", "dpkg-deb"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $* >> {ran}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("sh", "id", "mktemp", "rm", "tail", "install", "mkdir", "env"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    done = subprocess.run(
        ["sh", REPOSITORY / "tests" / "tools.sh", tmp_path / "bin"], env={"PATH": str(tmp_path), **asked},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ran.exists() is installs, done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("not installed: chromium chromedriver promtool age zstd shellcheck (")
    assert ("skipped: pages in a browser" in last) is (asked.get("CI") != "true")
    if not installs:
        assert len(done.stderr.splitlines()) == 1 and "TOOLS=1" in last
    assert os.listdir(tmp_path).count("bin") == 0
