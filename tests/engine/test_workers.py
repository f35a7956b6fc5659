"""Worker processes that are killed, stopped and woken; a coordinator that is killed. Real processes, `ckpttool convert --workers`."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import FIXTURES
from programs import SlowConversion, alive
from test_parts import contents

import ckpttool

pytestmark = pytest.mark.slow

SOURCE = FIXTURES / "fsdp2_w3" / "ckpt"


class Run(SlowConversion):
    """`ckpttool convert SOURCE OUT --workers N`, while it runs."""

    def __init__(self, tmp_path: Path, *words: str, seconds: float = 0.05, disk: Path | None = None) -> None:
        self.out = (disk or tmp_path) / "out"
        super().__init__(tmp_path, SOURCE, self.out, *words, seconds=seconds)

    def parts(self) -> int:
        """How many parts are filled by now."""
        return len(list(self.out.parent.glob(".out.partial-*/parts/*.json")))

    def wait_for(self, parts: int) -> None:
        """Until so many parts are filled."""
        self.wait_until(lambda: self.parts() >= parts)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """The bytes that one process writes."""
    out = tmp_path_factory.mktemp("one") / "out"
    ckpttool.convert(SOURCE, out, to="dcp", world_size=3)
    yield contents(out)


WORDS = ("--to", "dcp", "-n", "3")


def test_workers_that_are_killed_cost_their_parts_only(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", seconds=0.1)
    run.wait_for(1)
    for pid in run.processes()[1]:  # one of them may be between two parts
        os.kill(pid, signal.SIGKILL)
    found = run.result()
    assert contents(run.out) == wanted and found["workers"]["again"] >= 1 and found["workers"]["count"] == 2


def test_a_template_that_is_killed_takes_its_workers_along_and_others_go_on(
    tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", seconds=0.1)
    run.wait_for(1)
    template, workers = run.processes()
    assert len(workers) == 2
    os.kill(template, signal.SIGKILL)
    found = run.result()
    assert contents(run.out) == wanted and found["workers"]["again"] >= 1
    assert not alive(workers)


def test_a_coordinator_that_is_killed_leaves_no_worker_and_any_number_go_on(
    tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    for number, workers in enumerate(("3", "1")):
        run = Run(tmp_path, *WORDS, "--workers", "2")
        run.wait_for(2)
        template, pids = run.processes()
        assert len(pids) == 2
        pids.append(template)
        run.process.kill()
        run.process.communicate()
        end = time.monotonic() + 10
        while alive(pids):
            assert time.monotonic() < end, "workers outlive their coordinator"
            time.sleep(0.02)
        assert not run.out.exists()
        done = run.parts()
        again = Run(tmp_path, *WORDS, "--workers", workers, seconds=0.0).result()
        assert again["workers"]["filled_before"] == done >= 2 and again["verified"]
        assert contents(run.out) == wanted
        run.out.rename(tmp_path / f"done_{number}")


def test_a_worker_that_was_stopped_and_wakes_after_the_commit_does_no_harm(
    tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", "--no-verify")
    run.wait_for(2)
    (stopped, *_) = run.processes()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        found = run.result()  # the other worker does its part, and it is killed at the end
    finally:
        if alive([stopped]):
            os.kill(stopped, signal.SIGCONT)
    assert found["workers"]["again"] >= 1
    time.sleep(0.3)
    assert contents(run.out) == wanted and not alive([stopped])


def test_an_interrupted_run_leaves_no_worker_and_what_was_filled(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2")
    run.wait_for(2)
    template, pids = run.processes()
    pids.append(template)
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 130 and "Run the same command again to continue" in out + err
    assert "Traceback" not in err
    assert not alive(pids)
    assert Run(tmp_path, *WORDS, seconds=0.0).result()["workers"]["filled_before"] >= 2
    assert contents(run.out) == wanted


# ------------------------------------------------------------------------------------------------------- a full disk


def mount(folder: Path, kind: str) -> Path:
    """A file system of 8 MB; skips where nothing can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    if kind == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]]
    else:
        image = folder / "image"
        with image.open("wb") as f:
            f.truncate(8 << 20)
        commands = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(disk)]]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"no {command[0]} on this machine")
        if done.returncode:
            pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    return disk


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system, on which a full disk is a real one. On ext4, blocks may be missed only when a file is synced."""
    # not below tmp_path, which another run of pytest may move away, and then could not remove
    with tempfile.TemporaryDirectory(prefix="ckpttool-disk-") as folder:
        made = mount(Path(folder), request.param)
        try:
            yield made
        finally:
            subprocess.run(["umount", "--lazy", str(made)], check=True)


def fill_up(disk: Path) -> Path:
    """A file that takes every free block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as f:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    f.write(bytes(size))
                    os.fsync(f.fileno())
            except OSError as e:
                assert e.errno == errno.ENOSPC
    return filler


def test_a_disk_that_fills_up_under_workers_keeps_what_is_filled(
    tmp_path: Path, disk: Path, wanted: dict[str, bytes]
) -> None:
    run = Run(tmp_path, *WORDS, "--workers", "2", seconds=0.1, disk=disk)
    run.wait_for(2)
    template, workers = run.processes()
    filler = fill_up(disk)
    out, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 8, err
    error = json.loads(out)["error"]
    assert error["kind"] == "NoSpace" and error["exit_code"] == 8
    assert (
        "No space left on device. The destination is untouched. Free some space and run the same command again" in err
    )
    assert "Traceback" not in err and not alive([template, *workers])
    left = sorted(os.listdir(disk))
    assert not run.out.exists() and len([n for n in left if n.startswith(".out.partial-")]) == 1
    done = run.parts()
    assert done >= 2

    full = Run(tmp_path, *WORDS, "--workers", "2", seconds=0.0, disk=disk)  # the disk is still full
    out, err = full.process.communicate(timeout=60)
    assert full.process.returncode == 8 and "Traceback" not in err, err
    assert full.parts() >= done

    filler.unlink()
    again = Run(tmp_path, *WORDS, "--workers", "3", seconds=0.0, disk=disk).result()
    assert again["workers"]["filled_before"] >= done and again["verified"]
    assert contents(run.out) == wanted
    assert sorted(n for n in os.listdir(disk) if n != "lost+found") == ["out"]
