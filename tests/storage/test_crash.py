"""A conversion that is killed, interrupted, starved or raced leaves the old state or the new one, and can be run again."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY, load_dcp, load_full, same_value

import ckpttool

HERE = Path(__file__).resolve().parent
CLI = [sys.executable, "-m", "ckpttool"]
KILLS = 5  # of the real program with 64 MB; `make torture` does hundreds with small ones

# The command line with something that happens once, when half of the bytes are copied.
HOOKED = """
import os, signal, sys
from pathlib import Path
from ckpttool.cli import main as cli, terminal
from ckpttool.engine.copy import fill
fill._JOURNAL_BYTES = 1
what, happened = sys.argv.pop(1), []
def act():
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "append":
        with open(sys.argv[2], "ab") as f:
            f.write(b"x")
    elif what == "rewrite":
        with open(sys.argv[2], "r+b") as f:
            f.seek(os.path.getsize(sys.argv[2]) // 2)
            f.write(b"x")
    elif what == "fill":
        with open(Path(sys.argv[3]).parent / "filler", "wb") as f:
            try:
                while f.write(b"x" * 65536):
                    f.flush()
            except OSError:
                pass
    elif what == "create":
        Path(sys.argv[3]).write_text("somebody else's")
def hook(self, name, done, total):
    if name == "copy" and 2 * done >= total and not happened:
        happened.append(name)
        act()
terminal.Meter.__call__ = hook
cli.main()
"""


run = ckpttool_here


def hooked(what: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HOOKED, what, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


def fingerprint(path: Path) -> dict[str, str] | None:
    """{file: SHA-256} of a file or folder but for the record with the time in it; None where nothing is."""
    if not os.path.lexists(path):
        return None
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.name != "ckpttool.json"]
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def left_beside(path: Path) -> list[str]:
    return [n for n in os.listdir(path.parent) if n.startswith(f".{path.name}.")]


@pytest.fixture(scope="session")
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs cost nothing there."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    folder = Path("/dev/shm") / f"ckpttool-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def write_full(path: Path, seed: int, tensors: int, rows: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{i}.weight": torch.randn(rows, 1024, generator=generator) for i in range(tensors)}
    torch.save({"model": weights, "step": seed}, path)
    return path


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of weights in 16 tensors."""
    return write_full(tmp_path_factory.mktemp("big") / "in.pt", 1, 16, 1024)


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An older checkpoint of the same model, as a DCP folder."""
    folder = tmp_path_factory.mktemp("old")
    write_full(folder / "in.pt", 2, 16, 64)
    ckpttool.convert(folder / "in.pt", folder / "old", to="dcp", world_size=3)
    return folder / "old"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """1 MB of weights in 4 tensors."""
    return write_full(tmp_path / "in.pt", 3, 4, 64)


@pytest.fixture
def room(shared_memory: Path, tmp_path: Path) -> Path:
    """An empty folder on the fast disk."""
    folder = shared_memory / tmp_path.name
    folder.mkdir()
    return folder


# ------------------------------------------------------------------------------------------ every call, one by one


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.pt, four tensors of which one is empty and one longer than a page, and with old states."""
    folder = tmp_path_factory.mktemp("tiny")
    weights = {
        "a.weight": torch.randn(41, 50),
        "a.bias": torch.randn(7),
        "b": torch.randn(3, 5),
        "c": torch.empty(0, 3),
    }
    torch.save({"model": weights, "step": 3}, folder / "in.pt")
    torch.save({"model": {"a.weight": torch.randn(41, 50)}, "step": 2}, folder / "old.pt")
    ckpttool.convert(folder / "old.pt", folder / "old", to="dcp", world_size=3)
    return folder


def drive(room: Path, tiny: Path, to: str, old: str, kind: str, step: int = 1) -> dict[str, int]:
    command = [
        sys.executable,
        HERE / "crash_driver.py",
        room,
        tiny / "in.pt",
        to,
        tiny / old if old else "-",
        kind,
        step,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for engines with flat tensors: three trained parameters in two groups, a frozen one, a buffer, random state."""
    folder = tmp_path_factory.mktemp("engine")
    model = {"a.weight": torch.randn(41, 50), "a.bias": torch.randn(7), "b": torch.randn(3, 5)}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in model.items()}
    groups = [{"lr": 0.1, "params": ["b", "a.weight"]}, {"lr": 0.2, "params": ["a.bias"]}]
    model |= {"frozen.weight": torch.randn(4, 3), "seen": torch.tensor(3)}
    tree = {"model": model, "optim": {"state": state, "param_groups": groups}, "step": 3, "rng": torch.arange(900)}
    torch.save(tree, folder / "in.pt")
    for name in ("zero3", "zero2"):
        ckpttool.convert(folder / "in.pt", folder / f"old_{name}", to=name, world_size=3)
    return folder


@pytest.mark.parametrize(
    ("to", "old", "step"), [("zero3", "old_zero3", 2), ("zero2", "", 5), ("universal", "", 4), ("fsdp1", "", 5)]
)
def test_death_before_a_call_of_a_save_of_ranks_leaves_the_old_or_the_new_one_and_the_next_run_goes_on(
    to: str, old: str, step: int, room: Path, engine: Path
) -> None:
    counts = drive(room, engine, to, old, "kill", step)
    assert counts["calls"] > 60
    assert counts["continued"] > 30 // step


@pytest.mark.parametrize(("to", "error", "step"), [("zero3", "ENOSPC", 7), ("universal", "EIO", 11)])
def test_failure_of_a_call_of_a_deepspeed_save_is_an_error_of_ours(
    to: str, error: str, step: int, room: Path, engine: Path
) -> None:
    counts = drive(room, engine, to, "", error, step)
    assert counts["calls"] > 60
    assert counts["failed"] > 60 // step


@pytest.mark.parametrize(("to", "old"), [("full", ""), ("full", "old.pt"), ("dcp", ""), ("dcp", "old"), ("hf", "")])
def test_death_before_any_call_leaves_the_old_or_the_new_state_and_the_next_run_goes_on(
    to: str, old: str, room: Path, tiny: Path
) -> None:
    counts = drive(room, tiny, to, old, "kill")
    assert counts["calls"] > 30
    assert counts["continued"] > 5


@pytest.mark.parametrize(("error", "step"), [("ENOSPC", 1), ("EIO", 4)])
@pytest.mark.parametrize(("to", "old"), [("full", ""), ("full", "old.pt"), ("dcp", "old"), ("hf", "")])
def test_failure_of_any_call_is_an_error_of_ours_and_the_same_process_can_run_again(
    to: str, old: str, error: str, step: int, room: Path, tiny: Path
) -> None:
    counts = drive(room, tiny, to, old, error, step)
    assert counts["calls"] > 30
    assert counts["failed"] > 20 // step


# --------------------------------------------------------------------------------------------------------- signals


def kill_at_random(source: Path, target: Path, reference: Path, before: Path | None, seed: int) -> None:
    """SIGKILL a conversion at KILLS random moments; after each the state is old or new, and a rerun completes it."""
    options = ["--to", "dcp", "-n", "3", "-q"]
    new, was = fingerprint(reference), fingerprint(before) if before else None
    began = time.monotonic()
    subprocess.run([*CLI, "convert", source, target, *options], check=True, cwd=REPOSITORY)
    duration = time.monotonic() - began
    assert fingerprint(target) == new
    dice = random.Random(seed)
    for _ in range(KILLS):
        shutil.rmtree(target)
        if before:
            shutil.copytree(before, target)
        force = ["--force"] if before else []
        process = subprocess.Popen(
            [*CLI, "convert", str(source), str(target), *options, *force],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=REPOSITORY,
        )  # fmt: skip
        time.sleep(dice.uniform(0.1, 1.0) * duration)
        process.kill()
        process.wait()
        found = fingerprint(target)
        assert found in (was, new)
        again = run("convert", source, target, *options, *(["--force"] if found else []))
        assert again.returncode == 0, again.stderr
        assert fingerprint(target) == new
        assert left_beside(target) == []


@pytest.fixture(scope="session")
def converted(big: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("reference") / "out"
    ckpttool.convert(big, target, to="dcp", world_size=3)
    return target


@pytest.mark.slow
def test_sigkill_at_random_moments_leaves_a_fresh_destination_absent_or_complete(
    big: Path, converted: Path, tmp_path: Path
) -> None:
    kill_at_random(big, tmp_path / "out", converted, None, 1)


@pytest.mark.slow
def test_sigkill_at_random_moments_leaves_a_replaced_destination_old_or_complete(
    big: Path, old: Path, converted: Path, tmp_path: Path
) -> None:
    kill_at_random(big, tmp_path / "out", converted, old, 2)


def test_an_interrupted_deepspeed_save_is_continued_to_the_same_bytes(engine: Path, tmp_path: Path) -> None:
    command = ["convert", engine / "in.pt", tmp_path / "out", "--to", "zero3", "-n", "2"]
    assert run(*command[:2], tmp_path / "once", *command[3:]).returncode == 0
    stopped = hooked("interrupt", *command)
    assert stopped.returncode == 130, stopped.stderr
    assert not (tmp_path / "out").exists() and left_beside(tmp_path / "out")
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert "continued an interrupted run: " in again.stderr
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "once")
    assert left_beside(tmp_path / "out") == []


@pytest.mark.parametrize("signal_name", ["interrupt", "terminate"])
def test_a_signal_exits_130_and_the_next_run_continues(signal_name: str, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    stopped = hooked(signal_name, "convert", small, target, "--to", "dcp", "-n", "2")
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "same command again" in stopped.stderr
    assert not target.exists()
    assert left_beside(target)
    again = run("convert", small, target, "--to", "dcp", "-n", "2")
    assert again.returncode == 0, again.stderr
    assert "continued an interrupted run: " in again.stderr
    assert same_value(load_dcp(target)["model"], load_full(small)["model"])
    assert left_beside(target) == []


def test_what_an_interrupted_run_left_is_not_used_for_a_source_that_changed_since(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert hooked("interrupt", "convert", small, target, "--to", "dcp", "-n", "2").returncode == 130
    write_full(small, 4, 4, 64)
    again = run("convert", small, target, "--to", "dcp", "-n", "2")
    assert again.returncode == 0, again.stderr
    assert "continued" not in again.stderr
    assert same_value(load_dcp(target)["model"], load_full(small)["model"])
    assert left_beside(target) == []


# ----------------------------------------------------------------------------------------------------------- disks


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 4 MB; not below tmp_path, where another run of pytest cleans up."""
    disk = Path(tempfile.mkdtemp(prefix="ckpttool-small-disk-"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        disk.rmdir()
        pytest.skip("mount is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
    disk.rmdir()


def test_a_disk_that_is_too_small_is_refused_before_a_byte_is_written(big: Path, small_disk: Path) -> None:
    done = run("convert", big, small_disk / "out.pt", "--to", "full")
    assert done.returncode == 8
    assert "bytes free" in done.stderr
    assert os.listdir(small_disk) == []


def test_a_disk_that_fills_up_meanwhile_leaves_no_destination_and_the_next_run_continues(
    small: Path, small_disk: Path
) -> None:
    target = small_disk / "out.pt"
    done = hooked("fill", "convert", small, target, "--to", "full")
    assert done.returncode == 8, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not target.exists()
    (small_disk / "filler").unlink()
    again = run("convert", small, target, "--to", "full")
    assert again.returncode == 0, again.stderr
    assert same_value(load_full(target)["model"], load_full(small)["model"])
    assert os.listdir(small_disk) == ["out.pt"]


@pytest.mark.parametrize("parent", ["/sys", "/proc"])
def test_a_parent_that_cannot_be_written_to_is_named_and_is_no_bug_of_ours(parent: str, small: Path) -> None:
    done = run("convert", small, f"{parent}/out.pt", "--to", "full")
    assert done.returncode in (*range(1, 9), 14)
    assert parent in done.stderr
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


# ----------------------------------------------------------------------------------------------------------- races


def test_of_two_runs_at_one_destination_one_wins_and_the_other_names_it(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", HOOKED, "stop", "convert", str(small), str(target), "--to", "dcp", "-n", "2", "-q"]
    first = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    try:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
        second = run("convert", small, target, "--to", "full")
        assert second.returncode == 6
        assert f"process {first.pid} on " in second.stderr
        assert not target.exists()
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert same_value(load_dcp(target)["model"], load_full(small)["model"])
    assert left_beside(target) == []


def test_the_lock_of_a_run_that_was_killed_holds_nobody_up(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [sys.executable, "-c", HOOKED, "stop", "convert", str(small), str(target), "--to", "dcp", "-n", "2", "-q"]
    first = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    first.kill()
    first.wait()
    assert run("convert", small, target, "--to", "dcp", "-n", "3").returncode == 0  # other options than the first
    assert same_value(load_dcp(target)["model"], load_full(small)["model"])
    assert left_beside(target) == []


@pytest.mark.parametrize("change", ["append", "rewrite"])
def test_a_source_that_is_written_to_meanwhile_is_an_error_and_gives_no_destination(
    change: str, small: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    done = hooked(change, "convert", small, target, "--to", "dcp", "-n", "2")
    assert done.returncode == 4, done.stderr
    assert f"{small} changed while it was read" in done.stderr
    assert not target.exists()
    assert left_beside(target) == []


def test_what_somebody_else_creates_at_the_destination_meanwhile_is_not_replaced(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt"
    done = hooked("create", "convert", small, target, "--to", "full")
    assert done.returncode == 6, done.stderr
    assert target.read_text() == "somebody else's"


# --------------------------------------------------------------------------------------------------- destinations


def ranks_of(to: str) -> list[str]:
    """The option of a layout that has a world size."""
    return ["-n", "2"] if to == "dcp" else []


@pytest.mark.parametrize("to", ["full", "dcp", "hf"])
def test_an_existing_destination_is_refused_without_force_and_replaced_whole_with_it(
    to: str, small: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    if to == "full":
        torch.save({"model": {"old": torch.ones(2)}}, target)
    else:
        target.mkdir()
        (target / "model.safetensors").write_text("old")
        (target / "other").write_text("old")
    before = fingerprint(target)
    refused = run("convert", small, target, "--to", to, *ranks_of(to))
    assert refused.returncode == 6
    assert "--force" in refused.stderr
    assert fingerprint(target) == before
    assert run("convert", small, target, "--to", to, *ranks_of(to), "--force").returncode == 0
    assert not (target / "other").exists()
    assert ckpttool.digest(target).digest["model"] == ckpttool.digest(small).digest["model"]
    assert left_beside(target) == []


def test_a_folder_does_not_replace_a_file_and_says_so_before_the_work(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    done = run("convert", small, target, "--to", "dcp", "-n", "2", "--force")
    assert done.returncode == 6
    assert target.read_text() == "old"
    assert left_beside(target) == []


def test_a_link_that_leads_nowhere_is_not_followed(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt"
    target.symlink_to(tmp_path / "elsewhere.pt")
    for force in ([], ["--force"]):
        assert run("convert", small, target, "--to", "full", *force).returncode == 6
    assert not (tmp_path / "elsewhere.pt").exists()
    assert target.is_symlink()


def test_what_a_link_at_the_destination_leads_to_is_never_written_to(small: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.pt"
    real.write_text("precious")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept").write_text("precious")
    for name, to, leads_to in (("a", "full", real), ("b", "dcp", folder), ("c", "dcp", real), ("d", "full", folder)):
        target = tmp_path / name
        target.symlink_to(leads_to)
        assert run("convert", small, target, "--to", to, *ranks_of(to)).returncode == 6
        forced = run("convert", small, target, "--to", to, *ranks_of(to), "--force")
        assert forced.returncode in (0, 6)
        if forced.returncode == 0:
            assert not target.is_symlink()
            assert ckpttool.digest(target).digest["model"] == ckpttool.digest(small).digest["model"]
        else:
            assert target.is_symlink()
            assert "link" in forced.stderr
        assert left_beside(target) == []
    assert real.read_text() == "precious"
    assert os.listdir(folder) == ["kept"]


def test_a_parent_that_is_a_link_is_followed(small: Path, tmp_path: Path) -> None:
    (tmp_path / "disk2").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk2")
    assert run("convert", small, tmp_path / "link" / "out.pt", "--to", "full").returncode == 0
    assert os.listdir(tmp_path / "disk2") == ["out.pt"]


def test_a_parent_that_is_missing_is_named(small: Path, tmp_path: Path) -> None:
    done = run("convert", small, tmp_path / "nowhere" / "out.pt", "--to", "full")
    assert done.returncode == 2
    assert str(tmp_path / "nowhere") in done.stderr


def test_force_never_replaces_the_source_or_a_folder_it_lies_in(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", runs / "a" / "ckpt")
    (runs / "notes").write_text("precious")
    before = fingerprint(runs / "a" / "ckpt")
    (tmp_path / "link").symlink_to(runs)
    for target in (runs / "a" / "ckpt", runs / "a", runs, tmp_path / "link", runs / "a" / "ckpt" / "model.safetensors"):
        done = run("convert", runs / "a" / "ckpt", target, "--to", "dcp", "-n", "2", "--force")
        assert done.returncode in (2, 6), (target, done.stderr)
        assert fingerprint(runs / "a" / "ckpt") == before
    assert (runs / "notes").read_text() == "precious"
    full = tmp_path / "in.pt"
    write_full(full, 5, 1, 2)
    assert run("convert", full, full, "--to", "full", "--force").returncode == 2
    assert run("convert", full, tmp_path, "--to", "dcp", "-n", "2", "--force").returncode == 2
    assert load_full(full)["step"] == 5


def test_an_error_that_the_library_raised_lets_the_same_process_try_again(small: Path, tmp_path: Path) -> None:
    calls = []

    def interrupt(what: str, done: int, total: int) -> None:
        calls.append(what)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(ckpttool.CkpttoolError, match="interrupted"):
        ckpttool.convert(small, tmp_path / "out", to="dcp", world_size=2, progress=interrupt)
    ckpttool.convert(small, tmp_path / "out", to="dcp", world_size=2)
    assert left_beside(tmp_path / "out") == []
