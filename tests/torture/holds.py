"""Four processes at one store of archives: export (also with --force), hold, release, prune, with delays where the others could come between.

A hold that reported success stands until a release that lists it: at the end its archive must be there, with the manifest that was
held; no line of the ledger ends a deletion of what a line before holds; and the chain is whole. Every third prune that deletes is
killed in the moment between its line and the deletion. Every fourth store is a bucket without object lock (moto), where nothing but
the order of lines decides.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from .faults import Lab

NAMES = ("a", "b", "c")
SECONDS = {"folder": 2.5, "bucket": 10}
#: How often each is tried in a second; an export takes the longest.
RATES = {"_exports": 1000, "_holds": 100, "_releases": 15, "_prunes": 15}
_FORK = multiprocessing.get_context("fork")


def _state(path: Path, number: int) -> Path:
    """A model of 8 numbers, unlike any other."""
    head = json.dumps({"w": {"dtype": "I64", "shape": [8], "data_offsets": [0, 64]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<8q", *range(number, number + 8)))
    return path


def _delayed(rng: random.Random) -> None:
    """Sleep where another process could come between."""
    from ckpttool.audit import archive_store, holds, ledger, pruning, sidecar

    def slow(where: Any, name: str) -> None:
        act = getattr(where, name)

        def later(*args: Any, **how: Any) -> Any:
            if rng.random() < 0.5:
                time.sleep(rng.expovariate(200))
            return act(*args, **how)

        setattr(where, name, later)

    for where, name in (
        (pruning, "remove_file"), (pruning, "read_archive_facts"), (holds, "remove_file"), (holds, "require_archive"), (holds, "_write_hold_file"),
        (holds, "make_listing_row"), (archive_store, "_refuse_protected"), (sidecar, "write_small_file"), (ledger.Turn, "append"), (ledger, "take_turn"),
    ):  # fmt: skip
        slow(where, name)


def _exports(store: str, work: Path, rng: random.Random) -> str:
    from ckpttool.audit.export import export

    source = _state(work / f"{os.getpid()}.safetensors", rng.randrange(1 << 40))
    export(source, f"{store}/{rng.choice(NAMES)}.tar.zst", force=rng.random() < 0.7)
    return "export"


def _holds(store: str, work: Path, rng: random.Random) -> str:
    from ckpttool.audit.holds import hold

    hold(f"{store}/{rng.choice(NAMES)}.tar.zst", f"case {rng.randrange(3)}")
    return "hold"


def _releases(store: str, work: Path, rng: random.Random) -> str:
    from ckpttool.audit.holds import release

    release(f"{store}/{rng.choice(NAMES)}.tar.zst", "closed")
    return "release"


def _prunes(store: str, work: Path, rng: random.Random) -> str:
    from ckpttool.audit import pruning

    if store.startswith("s3://") or rng.random() < 0.7:  # a killed one blocks holds for an hour there
        return f"prune {len(pruning.prune(store, keep_every=1000).deleted)}"
    pid = os.fork()
    if pid == 0:
        try:
            pruning.remove_file = lambda store, name: os._exit(1)
            pruning.prune(store, keep_every=1000)
        finally:
            os._exit(0)
    return f"prune killed {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"


def _worker(act: Callable[[str, Path, random.Random], str], store: str, work: Path, seed: str, until: float) -> None:
    """Do one thing again and again; a log of what came of it."""
    from ckpttool.errors import DestinationExists, UsageError
    from ckpttool.storage.retries import NotFound

    os.close(2)
    os.open(os.devnull, os.O_WRONLY)
    signal.alarm(int(until - time.time()) + 60)
    rng = random.Random(seed)
    _delayed(rng)
    with open(work / f"{act.__name__}.jsonl", "w") as log:
        while time.time() < until:
            try:
                done, bad = act(store, work, rng), ""
            except (UsageError, DestinationExists, NotFound) as e:
                done, bad = type(e).__name__, ""
            except BaseException:
                done, bad = "exception", traceback.format_exc()[-1500:]
            log.write(json.dumps([done, bad]) + "\n")
            log.flush()
            time.sleep(rng.expovariate(RATES[act.__name__]))


def _judge(store: str, work: Path) -> None:
    """What is wrong with a store in the end, into a file."""
    from ckpttool.audit import archive_store, ledger

    bad: list[str] = []
    lines = ledger.read_entries(store)
    history = archive_store.History.of(store)
    for e in lines:
        if e["event"] in ("deleted", "replaced"):
            before = [
                x for x in lines if x["seq"] < e["seq"] and not (x["event"] == "delete" and x["seq"] == e["begun"])
            ]
            if held := archive_store.find_holds_in_ledger(before, e["archive"])[0]:
                bad.append(
                    f"line {e['seq']} {e['event']} {e['archive']}, held by line {[h['seq'] for h in held.values()]}"
                )
    for name in (f"{n}.tar.zst" for n in NAMES):
        held = archive_store.find_holds_in_ledger(lines, name)[0]
        there = archive_store.list_archive_names(store)
        found = archive_store.read_archive_facts(store, name)[1] if name in there else "it is gone"
        for h in held.values():
            if isinstance(found, str) or found.manifest_sha256 != h["manifest_sha256"]:
                bad.append(
                    f"{name} is held by line {h['seq']}, but {found if isinstance(found, str) else 'another one is there'}"
                )
        beside = {h["reason"] for h in history.files.get(name, ())}
        if held.keys() - beside or (held.keys() != beside and not store.startswith("s3://")):
            bad.append(f"{name}: the ledger holds it for {sorted(held)}, the file for {sorted(beside)}")
    bad += [f"{r.name}: {r.warnings[0]}" for r in archive_store.list_missing_archives(store)]
    ledger.verify_chain(store)
    if bad:
        bad.append(
            "\n".join(
                f"{e['seq']} {e['event']} {e['archive']} {e.get('reason', '')} {e.get('begun', '')}" for e in lines
            )
        )
    (work / "judged.json").write_text(json.dumps([len(lines), bad]))


@cache
def _moto() -> Any:
    """moto's server, or None if it is not installed."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    try:
        import moto  # noqa: F401
        import stores
    except ImportError:
        return None
    preloaded = os.environ.pop("LD_PRELOAD", None)
    server = stores.Moto()
    if preloaded:
        os.environ["LD_PRELOAD"] = preloaded
    return server


def _store(number: int, work: Path) -> tuple[str, str]:
    """(a new store, its kind)."""
    from ckpttool.audit import ledger

    server = _moto() if number % 4 == 3 else None
    if server is None:
        (work / "store").mkdir()
        ledger.append_entry(str(work / "store"), "verify", "x.tar.zst")  # prune refuses a store that has none yet
        return str(work / "store"), "folder"
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        os.environ[name] = value
    bucket = f"holds-{number}-{os.getpid()}-{time.monotonic_ns()}"

    def make() -> None:
        server.client().create_bucket(Bucket=bucket)
        ledger.append_entry(f"s3://{bucket}", "verify", "x.tar.zst")

    made = _FORK.Process(target=make)
    made.start()
    made.join()
    return f"s3://{bucket}", "bucket"


def case(number: int, work: Path) -> dict[str, Any]:
    """One store, judged; `operations` counts what the four did."""

    with contextlib.suppress(ImportError):
        import s3fs  # noqa: F401

    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    store, kind = _store(number, work)
    until = time.time() + SECONDS[kind]
    acts = (_exports, _holds, _releases, _prunes)
    running = [_FORK.Process(target=_worker, args=(a, store, work, f"{number}:{a.__name__}", until)) for a in acts]
    for p in running:
        p.start()
    for p in running:
        p.join()
    bad = [f"{a.__name__} ended with {p.exitcode}" for a, p in zip(acts, running, strict=True) if p.exitcode]
    done = [json.loads(line) for a in acts for line in (work / f"{a.__name__}.jsonl").read_text().splitlines()]
    bad += [e for _, e in done if e]
    judge = _FORK.Process(target=_judge, args=(store, work))
    judge.start()
    judge.join()
    judged = work / "judged.json"
    lines, wrong = (
        json.loads(judged.read_text()) if judged.exists() else (0, [f"the judge ended with {judge.exitcode}"])
    )
    bad += wrong
    shutil.rmtree(work, ignore_errors=True)
    return {
        "id": f"holds:{kind}:{number}", "said": f"{lines} lines", "status": "; ".join(bad)[:300] or "fine", "bad": bool(bad),
        "detail": "\n".join(bad), "operations": len(done),
    }  # fmt: skip


def run(lab: Lab, until: float, log: Path, part: int = 0, parts: int = 1, most: int = 1 << 30, first: int = 0) -> None:
    """Stores in turn, until a time or a number."""
    with open(log, "a") as lines:
        for k in range(most):
            if time.time() > until:
                break
            lines.write(json.dumps(case(first + part + k * parts, lab.out.parent / "holds")) + "\n")
            lines.flush()
