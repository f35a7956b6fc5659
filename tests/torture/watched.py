"""`python -m tests.torture.watched [FOLDER]`: 100 saves by three real trainers, 30 faults, and a watcher beside each.

Each trainer saves every few seconds (watched_jobs.py). As soon as a save has returned, a fault is done to it
(watched_faults.py), or none; the watcher reads it when its files have rested for a second. It fails if a fault is not
named, with its step, kind and file or tensor, before the next save begins; if anything is said of the other saves; or if
a file below the run is touched by anybody but trainer and fault: sizes, bytes, times and inodes of all files are
compared at the end with what they were after the fault.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.torture.watched_faults import FAULTS, Fault

JOBS = Path(__file__).with_name("watched_jobs.py")
SAVES = {"fsdp2": 34, "zero3": 33, "trainer": 33}
RANKS = {"fsdp2": 3, "zero3": 3, "trainer": 1}
FOLDER = {"fsdp2": "step-{}", "zero3": "global_step{}", "trainer": "checkpoint-{}"}
PAUSE = float(os.environ.get("PAUSE", "6"))  # seconds between saves; a busy machine needs more
#: How long files must rest before they are read; the fault is done within it.
SETTLE = 1.0


def snapshot(folder: Path) -> dict[str, Any]:
    """{path: (bytes, times, inode, digest)} of all files below a folder."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        st = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        out[str(path)] = (st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino, st.st_mode, digest)
    return out


def choose(kind: str, rng: random.Random) -> dict[int, Fault]:
    """{step: fault}: each fault once, at random steps, none of the first three."""
    steps = sorted(rng.sample(range(4, SAVES[kind] + 1), len(FAULTS[kind])))
    return dict(zip(steps, rng.sample(FAULTS[kind], len(FAULTS[kind])), strict=True))


def run(kind: str, home: Path, rng: random.Random) -> dict[str, Any]:
    """Trains, damages and watches; returns what came of it."""
    folder = home / kind
    command = [sys.executable, str(JOBS)]
    if RANKS[kind] > 1:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(RANKS[kind]), str(JOBS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    with open(home / f"{kind}.log", "w") as log:
        trainer = subprocess.Popen(
            [*command, kind, folder, str(SAVES[kind]), str(PAUSE)], env=environment, stdout=log, stderr=log
        )
        watcher = subprocess.Popen(
            ["ckpttool", "watch", folder, "--json", "--settle", str(SETTLE), "--poll", "0.25", "--job-metrics", "0"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    said: list[str] = []
    assert watcher.stderr is not None
    threading.Thread(target=lambda: said.extend(watcher.stderr or ()), daemon=True).start()
    events: list[tuple[float, dict[str, Any]]] = []

    def listen() -> None:
        assert watcher.stdout is not None
        for line in watcher.stdout:
            events.append((time.time(), json.loads(line)))

    threading.Thread(target=listen, daemon=True).start()
    faults = choose(kind, rng)
    hits: dict[int, str] = {}
    times: dict[int, float] = {}
    trees: dict[str, Any] = {}
    notes = Path(f"{folder}.saved")
    while len(times) < SAVES[kind] and trainer.poll() is None:
        for line in notes.read_text().splitlines() if notes.exists() else ():
            step, at = line.split()
            if int(step) in times:
                continue
            times[int(step)] = float(at)
            save = folder / FOLDER[kind].format(step)
            if (fault := faults.get(int(step))) is not None:
                hits[int(step)] = fault.do(save, folder / FOLDER[kind].format(int(step) - 1))
            trees |= snapshot(save)
        time.sleep(0.02)
    assert trainer.wait() == 0, (home / f"{kind}.log").read_text()[-3000:]
    time.sleep(3 * SETTLE)
    port = next(line for line in said if "metrics at" in line).rpartition(":")[2].split("/")[0]
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    watcher.terminate()
    watcher.wait(20)
    after = {p: v for p, v in snapshot(folder).items() if p in trees or Path(p).parent != folder}
    changed = sorted(p for p in {*trees, *after} if trees.get(p) != after.get(p))
    return judge(kind, faults, hits, times, events) | {
        "changed": changed,
        "metrics": metrics,
        "code": watcher.returncode,
    }


def judge(
    kind: str,
    faults: dict[int, Fault],
    hits: dict[int, str],
    times: dict[int, float],
    events: list[tuple[float, dict[str, Any]]],
) -> dict[str, Any]:
    """Compares what was said with what was done."""
    rows, missed, false = [], [], []
    about: dict[int, list[tuple[float, dict[str, Any]]]] = {}
    for at, event in events:
        if event.get("step") is not None:
            about.setdefault(event["step"], []).append((at, event))
    for step in sorted(times):
        heard = about.get(step, [])
        verdict = [e for _, e in heard]
        if step not in faults:
            if len(verdict) != 1 or verdict[0]["event"] != "verified" or verdict[0]["findings"]:
                false.append((step, verdict))
            continue
        fault, hit = faults[step], hits[step]
        findings = [f for e in verdict if e["event"] == "failed" for f in e["findings"]]
        named = [f for f in findings if f["kind"] in fault.kinds]
        places = " ".join(f"{f['file']} {f['tensors']} {f['text']}" for f in named)
        in_time = bool(heard) and heard[0][0] < times.get(step + 1, times[step] + PAUSE)
        good = bool(named) and in_time and any(word.removeprefix("master.") in places for word in hit.split())
        late = heard[0][0] - times[step] if heard else None
        rows.append((step, fault.name, hit, sorted({f["kind"] for f in findings}), late))
        if not good:
            missed.append((step, fault.name, hit, heard))
    return {"kind": kind, "saves": len(times), "faults": rows, "missed": missed, "false": false}


def main() -> None:
    home = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="watched-"))
    home.mkdir(parents=True, exist_ok=True)
    rng = random.Random(int(os.environ.get("SEED", "30")))
    bad, saves, named, quiet = False, 0, 0, 0
    for kind in FAULTS:
        shutil.rmtree(home / kind, ignore_errors=True)
        found = run(kind, home, rng)
        for step, name, hit, kinds, late in found["faults"]:
            print(f"{kind:8s} step {step:3d}  {name:46s} {','.join(kinds):32s} {late or -1:5.1f} s  {hit}")
        for what in ("missed", "false", "changed"):
            if found[what]:
                bad = True
                print(f"{kind}: {what}: {json.dumps(found[what], indent=1, default=str)[:4000]}")
        print(
            f"{kind}: watcher ended with {found['code']}; "
            + "; ".join(line for line in found["metrics"].splitlines() if "saves{" in line or "verdicts_total{" in line)
        )
        saves += found["saves"]
        named += len(found["faults"]) - len(found["missed"])
        quiet += found["saves"] - len(found["faults"]) - len(found["false"])
    faults = sum(map(len, FAULTS.values()))
    print(
        f"{saves} saves, {named} of {faults} faults named before the next save, {quiet} of {saves - faults} other saves proved without a word"
    )
    if bad or saves != sum(SAVES.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
