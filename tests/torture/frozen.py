"""SIGKILL and SIGSTOP of one process of a conversion with workers, at a random moment, on each engine.

    python -m tests.torture.frozen --trials 60 [--engine dask] [--first 0] [--log FILE]

A trial is one conversion of a small checkpoint in about 30 slow parts. One process is hit: a worker, the template that
forks local workers, or the scheduler (dask's, Ray's raylet). The conversion must end within BOUND seconds, right or with
an error or a warning that names what does not answer; a stopped process is woken at the end. Whatever happened, the same command with
local workers must then give the right bytes, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import programs  # noqa: E402
from peers import FIXTURES  # noqa: E402

SOURCE = FIXTURES / "fsdp2_w3" / "ckpt"
BOUND = 150.0  # seconds: `clusters.WAIT`, those of a busy machine, and then some
MARK = "CKPTTOOL_FROZEN"  # in the environment of every process of a trial
WORDS = ("--to", "dcp", "-n", "3", "--json", "--jobs", "1")
BIN = Path(sys.executable).parent


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the record, which names the workers."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "ckpttool.json"}


def marked(text: str) -> list[int]:
    """The processes whose environment has the mark of a trial, but for this one."""
    out = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={text}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                out.append(int(folder.name))
        except OSError:
            pass
    return programs.alive(out)


def command_of(pid: int) -> str:
    """The words that a process was started with."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def dask(env: dict[str, str], folder: Path) -> Iterator[str]:
    """A scheduler and three workers of one thread each, without nannies, which would replace them."""
    file = folder / "scheduler.json"
    quiet: dict[str, Any] = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    scheduler = [
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        "--port",
        "0",
        "--no-dashboard",
        "--no-jupyter",
    ]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    running = [subprocess.Popen([*scheduler, "--scheduler-file", str(file)], **quiet)]
    try:
        running += [subprocess.Popen([*worker, "--scheduler-file", str(file)], **quiet) for _ in range(3)]
        yield f"dask:{file}"
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def ray(env: dict[str, str], folder: Path) -> Iterator[str]:
    """A cluster of this machine with three CPUs."""
    files = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets have paths of at most 107 bytes
    words = ["start", "--head", "--num-cpus=3", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    try:
        run = subprocess.run([BIN / "ray", *words, f"--temp-dir={files}"], env=env, capture_output=True, text=True)
        address = run.stdout.partition("--address='")[2].partition("'")[0]
        if not address:
            raise SystemExit(f"ray start failed: {run.stdout[-800:]} {run.stderr[-800:]}")
        yield f"ray:{address}"
    finally:
        for pid in marked(env[MARK]):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(files, ignore_errors=True)


@contextmanager
def alone(env: dict[str, str], folder: Path) -> Iterator[str]:
    """Nothing has to be there before: local processes, or ranks of MPI."""
    yield "3"


ENGINES: dict[str, Any] = {"local": alone, "dask": dask, "ray": ray, "mpi": alone}
#: What is hit, and how its command line is recognised; the fork of a template has the words of the template.
VICTIMS = {
    "local": ["worker", "template"], "dask": ["worker", "worker", "scheduler"], "ray": ["worker", "worker", "raylet"], "mpi": ["worker"],
}  # fmt: skip


def find_victims(engine: str, kind: str, main: int, mark: str) -> list[int]:
    """The processes of a kind that run now."""
    if engine == "local":
        below = programs.children(main)
        forked = [p for t in below for p in programs.children(t)]
        return below[:1] if kind == "template" else forked or below
    words = {
        ("dask", "worker"): "dask_worker", ("dask", "scheduler"): "dask_scheduler", ("ray", "worker"): "ray::run",
        ("ray", "raylet"): "raylet/raylet", ("mpi", "worker"): "--workers mpi",
    }[engine, kind]  # fmt: skip
    found = [p for p in marked(mark) if words in command_of(p) and "mpiexec" not in command_of(p)]
    return [p for p in found if not is_rank_0(p)] if engine == "mpi" else found


def is_rank_0(pid: int) -> bool:
    """Whether a process is no rank of MPI but the first: a launcher, a proxy or the coordinator."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return b"PMI_RANK=0" in words or not any(w.startswith(b"PMI_RANK=") for w in words)


def trial(
    engine: str, number: int, folder: Path, wanted: dict[str, bytes], signals: list[signal.Signals]
) -> dict[str, Any]:
    """One conversion, one signal, judged."""
    rng = random.Random(f"{engine} {number}")
    kind, how = rng.choice(VICTIMS[engine]), rng.choice(signals)
    mark = f"{os.getpid()}-{engine}-{number}"
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(programs._SITE)
    env = os.environ | {
        "PYTHONPATH": str(folder / "site"), "SECONDS_A_BLOCK": "0.02", MARK: mark, "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    out = folder / "out"
    said: dict[str, Any] = {"engine": engine, "number": number, "victim": kind, "signal": how.name}
    with ENGINES[engine](env, folder) as spec:
        command = [sys.executable, "-m", "ckpttool", "convert", str(SOURCE), str(out), *WORDS, "--workers"]
        command += ["mpi"] if engine == "mpi" else [spec]
        if engine == "mpi":
            command = [str(BIN / "mpiexec"), "-n", "4", *command]
        began = time.monotonic()
        with open(folder / "text", "w+") as text:
            run = subprocess.Popen(command, env=env, stdout=text, stderr=subprocess.STDOUT, cwd=folder)
            hit = strike(run, engine, kind, how, mark, out, rng)
            struck = time.monotonic()
            try:
                code: int | None = run.wait(BOUND)
            except subprocess.TimeoutExpired:
                code = None
            said |= {"hit": hit is not None, "code": code, "seconds": round(time.monotonic() - struck, 1)}
            said["before"] = round(struck - began, 1)
            if hit is not None and how == signal.SIGSTOP and programs.alive([hit]):
                os.kill(hit, signal.SIGCONT)
            if code is None:  # would it have ended?
                try:
                    said["after_waking"] = run.wait(30)
                except subprocess.TimeoutExpired:
                    run.kill()
                    run.wait()
            text.seek(0)
            said["text"] = text.read()
    return said | judge(said, out, env, mark, wanted)


def strike(
    run: subprocess.Popen[Any], engine: str, kind: str, how: signal.Signals, mark: str, out: Path, rng: random.Random
) -> int | None:
    """Send a signal to one of the processes of a kind at a random moment; return which, None where it was too late."""
    end, parts = time.monotonic() + 90, rng.randrange(0, 16)
    while run.poll() is None and time.monotonic() < end:
        there = find_victims(engine, kind, run.pid, mark)
        done = len(list(out.parent.glob(".out.partial-*/parts/*.json")))
        if there and (done >= parts if parts else rng.random() < 0.1):
            pid = rng.choice(there)
            os.kill(pid, how)
            return pid
        time.sleep(0.01)
    return None


def judge(said: dict[str, Any], out: Path, env: dict[str, str], mark: str, wanted: dict[str, bytes]) -> dict[str, Any]:
    """What became of it: "right", "named" (an error or a warning that says what it was), "hang", "wrong", "unnamed"; and what is left."""
    if said["code"] is None:
        verdict = "named" if "has been at work for" in said["text"] else "hang"
    elif said["code"] == 0:
        verdict = "right" if contents(out) == wanted else "wrong"
    else:
        verdict = "wrong" if out.exists() and contents(out) != wanted else "named"
        # a launcher of MPI ends all ranks when one ends, and says so
        known = '"code": "CKPT' in said["text"] or "BAD TERMINATION" in said["text"]
        if "Traceback" in said["text"] or not known:
            verdict = "wrong" if verdict == "wrong" else "unnamed"
    left = marked(mark)
    end = time.monotonic() + 10
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = marked(mark)
    orphans = [command_of(p)[:100] for p in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if not out.exists():
        again = [sys.executable, "-m", "ckpttool", "convert", str(SOURCE), str(out), *WORDS, "--workers", "2"]
        run = subprocess.run(again, env=env | {"SECONDS_A_BLOCK": "0"}, capture_output=True, text=True, timeout=120)
        if run.returncode or contents(out) != wanted:
            verdict = f"wrong after a second run: {run.stderr[-500:]}"
    said["text"] = said["text"][-1500:]
    beside = [p.name for p in out.parent.iterdir() if p.name.startswith(".out")]
    return {"verdict": verdict, "orphans": orphans, "left": beside}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.frozen", description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--signal", choices=["SIGKILL", "SIGSTOP"], action="append")
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    engines = given.engine or list(ENGINES)
    signals = [signal.Signals[name] for name in given.signal or ("SIGKILL", "SIGSTOP")]
    count: Counter[tuple[str, ...]] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="ckpttool-frozen-") as work:
        first = Path(work, "wanted")
        subprocess.run(
            [sys.executable, "-m", "ckpttool", "convert", SOURCE, first, *WORDS], check=True, capture_output=True
        )
        wanted = contents(first)
        for k in range(given.first, given.first + given.trials):
            engine = engines[k % len(engines)]
            found = trial(engine, k, Path(work, str(k)), wanted, signals)
            count[engine, found["victim"] if found["hit"] else "none", found["signal"], found["verdict"]] += 1
            failed = found["verdict"] not in ("right", "named") or bool(found["orphans"] or found["left"])
            bad += failed
            line = json.dumps(found)
            print(line if failed else json.dumps({n: v for n, v in found.items() if n != "text"}), flush=True)
            if given.log:
                with given.log.open("a") as log:
                    log.write(line + "\n")
            shutil.rmtree(Path(work, str(k)), ignore_errors=True)
    for row, n in sorted(count.items()):
        print(f"{n:4d}  {'  '.join(row)}")
    print(f"{sum(count.values())} trials, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
