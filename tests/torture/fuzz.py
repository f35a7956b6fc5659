"""One mutant: made, read by ckpttool in a sandbox, judged by the real reader, converted, judged again.

A worker is forked from a process that has imported everything. It has a limit of address space, an alarm clock of ten
seconds and an audit hook that sees what is executed, imported, started, connected to or written outside its folder.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ckpttool.converters.dcp import dcp_metadata

import ckpttool
from ckpttool.errors import CkpttoolError
from ckpttool.formats import sandbox

from . import mutations, oracle
from . import trainer_readers as trainer_readers  # adds to oracle.READERS
from .seeds import SEEDS

SECONDS = 10
_LARGE_BYTES = dcp_metadata._LARGE_BYTES
MEMORY_BYTES = 1 << 30  # more than the worker has when it begins

#: {target: (suffix, oracle of the result, arguments of convert)}
TARGETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dcp": ("", "dcp", {"to": "dcp", "world_size": 3}),
    "full": (".pt", "torch", {"to": "full"}),
    "hf": ("", "hf_model", {"to": "hf"}),  # tied weights are written once, and config.json says so
    "hf-training": ("", "hf_model", {"to": "hf", "options": ckpttool.HfOptions(include_optimizer=True)}),
    "zero3": ("", "zero3", {"to": "zero3", "world_size": 2}),
    "zero2": ("", "zero12", {"to": "zero2", "world_size": 3}),
    "zero1": ("", "seed", {"to": "zero1", "world_size": 4}),  # experts and stages on two ranks each
    "universal": ("", "universal", {"to": "universal"}),
    "fsdp1": ("", "seed", {"to": "fsdp1", "world_size": 2, "wrap": ["fc"]}),
    "audit": (".tar.zst", "seed", {"to": "audit"}),
    "checkpointing": ("", "seed", {"to": "torch_checkpointing", "world_size": 2}),
    "megatron": ("", "seed", {"to": "megatron"}),
    "torchtitan": ("", "dcp_model", {"to": "torchtitan", "world_size": 2}),
    "trainer": ("", "fsdp_parts", {"to": "trainer", "world_size": 2}),
    "lightning": ("", "lightning", {"to": "lightning", "world_size": 2}),
}
EQUAL, OTHER, REFUSED, UNJUDGED, ALONE = (
    "accepted: equal to the original",
    "accepted: another valid checkpoint, equal to what its reader reads",
    "refused with a clear error",
    "accepted: differs from the original, no reader to ask",
    "accepted: its reader refuses",
)
#: Nothing is left and nothing is wrong, but ckpttool did not foresee it: its read-back refused what it had written.
OWN_FAULT = "an error that asks to be reported"
#: Statuses that must never be.
FAILURES = (
    "other numbers than its reader", "converted to other numbers", "executed or touched something", "unexpected exception",
    "hang", "died", "source changed", "something left behind", "a file left open", OWN_FAULT,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- sandbox

_ALWAYS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", "socket.bind",
           "socket.getaddrinfo", "ctypes.dlopen", "pty.spawn", "webbrowser.open")  # fmt: skip
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.chown",
    "os.truncate",
)


class Sandbox:
    """Sees what is done while it is `watching`, "ckpttool" or "oracle"; nothing is prevented.

    The child processes with limits that ckpttool itself starts (formats/sandbox.py), for large `.metadata` and for what
    transformers knows of a config.json, are no find.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.watching = ""
        self.seen: list[str] = []
        self.known = {n.partition(".")[0] for n in sys.modules} | set(sys.stdlib_module_names) | {"ml_dtypes"}
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event in _ALWAYS:
            ours = event == "subprocess.Popen" and list(arguments[1])[:4] == [sys.executable, "-P", "-c", sandbox._CODE]
            if not ours and (event != "ctypes.dlopen" or arguments[0] is not None):
                self.seen.append(f"{event} {arguments!r:.150}")
        elif event == "import":
            top = str(arguments[0]).partition(".")[0]
            if top not in self.known or "canary" in top:
                self.seen.append(f"import {arguments[0]}")
        elif self.watching == "oracle":
            return
        elif event == "pickle.find_class":
            self.seen.append(f"{event} {arguments!r:.150}")
        elif event in ("exec", "compile"):
            code = getattr(arguments[0], "co_filename", None) if event == "exec" else arguments[1]
            if not isinstance(code, (str, bytes)) or not os.path.isabs(code):
                self.seen.append(f"{event} of {code!r:.100}")
        elif event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and not os.path.isdir(path):  # a file without a name in a folder is gone when it is closed
                self._within(event, path)
        elif event in _CHANGES:
            self._within(event, arguments[0])

    def _within(self, event: str, path: Any) -> None:
        if isinstance(path, (str, bytes)):
            whole = os.path.abspath(os.fsdecode(path))
            if os.path.isabs(os.fsdecode(path)) and not whole.startswith(self.folder) and whole != "/dev/null":
                self.seen.append(f"{event} {whole}")

    @contextmanager
    def watch(self, who: str) -> Iterator[None]:
        """While it lasts, what `who` does is seen."""
        self.watching = who
        try:
            yield
        finally:
            self.watching = ""


def _ring(*_: object) -> None:
    raise oracle.Stopped


# ------------------------------------------------------------------------------------------------------------ verdict


class Bench:
    """Judges mutants of seeds below `seeds` in `work`, a folder of its own."""

    def __init__(self, seeds: dict[str, Path], work: Path) -> None:
        self.seeds, self.work = seeds, work
        self.cwd = work / "cwd"
        shutil.rmtree(work, ignore_errors=True)
        self.cwd.mkdir(parents=True)
        os.chdir(self.cwd)
        self.base = {n: oracle.ours(SEEDS[n].path(folder), **SEEDS[n].arguments(folder)) for n, folder in seeds.items()}
        self.sandbox = Sandbox(work)
        self.phase = ""
        self.own_faults: list[str] = []

    def mutant(self, name: str, number: int) -> dict[str, Any]:
        """{"id", "said", "status", "detail", ...}: what came of one mutant."""
        rng = random.Random(f"{name}/{number}")
        dcp_metadata._LARGE_BYTES = 0 if SEEDS[name].large else _LARGE_BYTES
        source = self.work / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(self.seeds[name], source)
        said = mutations.mutate(rng, source)
        out: dict[str, Any] = {"id": f"fuzz:{name}:{number}", "said": said}
        before, files = _state(source), _descriptors()
        self.sandbox.seen.clear()
        self.own_faults.clear()
        try:
            out["status"], out["detail"] = self._judged(name, rng, source, out)
        except Exception as e:
            out["status"] = "unexpected exception"
            out["detail"] = f"{self.phase}: {type(e).__name__}: {e!s:.200}\n" + "".join(traceback.format_exc()[-1500:])
        except oracle.Stopped:
            out["status"], out["detail"] = "hang", f"{self.phase}\n{traceback.format_exc()[-1500:]}"
        finally:
            signal.alarm(0)
            self.sandbox.watching = ""
        made = sorted(p.name for p in self.cwd.iterdir())
        if made or self.sandbox.seen:
            out["status"], out["detail"] = "executed or touched something", f"{self.sandbox.seen[:5]} {made}"
            shutil.rmtree(self.cwd)
            self.cwd.mkdir()
            os.chdir(self.cwd)
        elif _state(source) != before:
            out["status"], out["detail"] = "source changed", self.phase
        elif left := sorted(p.name for p in self.work.iterdir() if p.name not in ("source", "cwd", "at")):
            for p in left:
                _removed(self.work / p)
            out["status"], out["detail"] = "something left behind", f"{self.phase}: {left}, {out['detail']:.300}"
        elif _descriptors() > files and (gc.collect(), _descriptors())[1] > files and out["status"] not in FAILURES:
            out["status"], out["detail"] = "a file left open", self.phase
        elif self.own_faults and out["status"] not in FAILURES:
            out["status"], out["detail"] = OWN_FAULT, "; ".join(self.own_faults)
        return out

    def _do(self, phase: str, act: Any) -> Any:
        """`act` by ckpttool, watched and timed; an error that asks to be reported is written down, since it is no refusal."""
        self.phase = phase
        signal.alarm(SECONDS)
        with self.sandbox.watch("ckpttool"):
            try:
                done = act()
            except CkpttoolError as e:
                if "please report this" in str(e):
                    self.own_faults.append(f"{phase}: {e!s:.300}")
                raise
        signal.alarm(0)
        return done

    def _theirs(self, kind: str, path: Path) -> oracle.Tree:
        """What the real reader reads, in this process: what stops it inside C ends the process (`supervised`)."""
        self.phase = f"oracle {kind}"
        at = self.work / "at"
        mutant = at.read_text() if at.exists() else ""
        at.write_text(f"{mutant} oracle")
        signal.alarm(SECONDS)
        with self.sandbox.watch("oracle"):
            try:
                return oracle.theirs(kind, path)
            except oracle.Stopped:
                raise oracle.Refused(f"Stopped: not done after {SECONDS} s") from None
            finally:
                signal.alarm(0)
                at.write_text(mutant)

    def _judged(self, name: str, rng: random.Random, source: Path, out: dict[str, Any]) -> tuple[str, str]:
        seed = SEEDS[name]
        path, how = seed.path(source), seed.arguments(source)
        mine: oracle.Reading | None
        try:
            mine = self._do("open", lambda: oracle.ours(path, **how))
        except CkpttoolError as e:
            mine, status, detail = None, REFUSED, f"{type(e).__name__}: {e!s:.300}"
        equal = mine is not None and mine == self.base[name]
        tree: oracle.Tree | None = None
        if mine is not None:
            status, detail = (EQUAL, "") if equal else (UNJUDGED, "")
            if seed.oracle in oracle.READERS:
                try:
                    tree = self._theirs(seed.oracle, path)
                except oracle.Refused as e:
                    out["oracle"] = str(e)
                    status, detail = (EQUAL, str(e)) if equal else (ALONE, str(e))
                else:
                    if wrong := oracle.differences(mine, tree, seed.oracle):
                        return "other numbers than its reader", "; ".join(wrong[:4])
                    status = EQUAL if equal else OTHER
            elif name == "audit" and not equal:
                return "other numbers than its reader", "an archive that is not what was archived"
        elif seed.oracle in oracle.READERS and rng.random() < 0.1:
            try:
                self._theirs(seed.oracle, path)
                out["oracle"] = "reads it"
            except oracle.Refused as e:
                out["oracle"] = str(e)
        # what differs is always converted; of the rest, and of what is refused when all of it is read, a part
        if rng.random() < (0.12 if mine is None else 0.3 if equal else 1.0):
            target = rng.choice(list(TARGETS))
            if wrong := self._converted(path, how, target, mine, tree, seed.oracle):
                return "converted to other numbers", f"to {target}: {'; '.join(wrong[:4])}"
            out["converted"] = target
        if mine is not None and not seed.deltas and rng.random() < 0.15:
            try:
                self._do("verify", lambda: ckpttool.verify(path, read_data=True, **how))
            except CkpttoolError as e:
                out["verify"] = f"{type(e).__name__}: {e!s:.200}"
        return status, detail

    def _converted(
        self,
        path: Path,
        how: dict[str, Any],
        target: str,
        mine: oracle.Reading | None,
        tree: oracle.Tree | None,
        kind: str,
    ) -> list[str]:
        """In what a conversion's result is not what its real reader reads, or not the source; [] where it is, or refused."""
        suffix, reader, options = TARGETS[target]
        out = self.work / f"out{suffix}"
        try:
            done = self._do(
                f"convert to {target}",
                lambda: ckpttool.convert(
                    path, out, drop=True, threads=1, max_memory_bytes=72 << 20, **{**how, **options}
                ),
            )
        except CkpttoolError:
            return [f"it was refused, and {out.name} is there"] if os.path.lexists(out) else []
        try:
            result = self._do("open the result", lambda: oracle.ours(out))
            if reader in oracle.READERS:
                entries = result
                if reader == "dcp":  # values that DCP holds in pieces, which the record puts together again
                    (out / "ckpttool.json").unlink()
                    entries = self._do("open the result without its record", lambda: oracle.ours(out))
                if reader == "hf":  # what objects of torchao are, which safetensors keeps in the metadata
                    entries = {n: x for n, x in result.items() if not n.endswith(".__class__")}
                gone = {d[0] for d in done.dropped} - entries.keys()  # of an element of a list, None is left there
                theirs = {p: x for p, x in self._theirs(reader, out).items() if oracle.joined(p) not in gone}
                if wrong := oracle.differences(entries, theirs, reader):
                    return wrong
            if mine is None and tree is None and kind in oracle.READERS:
                try:
                    tree = self._theirs(kind, path)
                except oracle.Refused:
                    tree = None
            if mine is None:  # a part of it could be read: what was, must be what the real reader has
                if tree is None:
                    return []
                plain = {oracle.joined(p): oracle.entry(x) for p, x in tree.items()}
                gone = {d[0] for d in done.dropped}  # what an engine needs there, its writer has put there
                common = {n for n in result if n in plain and isinstance(plain[n], tuple) and n not in gone}
                return [
                    f"{n}: {result[n]} is not the oracle's {plain[n]}"
                    for n in common
                    if not _alike(result[n], plain[n])
                ]
            dropped = {d[0] for d in done.dropped}
            return [
                f"{n}: {result[n]} was {mine[n]}"
                for n in result
                if n in mine and n not in dropped and isinstance(mine[n], tuple) and not _alike(result[n], mine[n])
            ]
        except oracle.Refused as e:
            if reader.startswith(
                ("dcp", "zero", "universal", "lightning", "fsdp")
            ) and "Weights only load failed" in str(e):
                return []  # a class, kept as data, that DeepSpeed and DCP build, which unpickle anything, and the oracle does not
            if "(torchao." in str(e):
                return []  # torch builds the objects with torchao's classes, which are not installed here
            return [f"its reader refuses the result: {e}"]
        except CkpttoolError as e:
            return [f"the result cannot be opened: {e}"]
        finally:
            _removed(out)


def _alike(a: Any, b: Any) -> bool:
    """Equal tensors, tensors that an engine keeps in another precision, or a step that it keeps as a number."""
    if isinstance(a, str) and a.startswith("float ") and a != "float nan":
        a = oracle.of_tensor(torch.tensor(struct.unpack(">d", bytes.fromhex(a[6:]))[0], dtype=torch.float32))
    return bool(a == b) or (isinstance(a, tuple) and a[0] != b[0] and a[1] == b[1])


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _state(folder: Path) -> list[tuple[Any, ...]]:
    """Of every file: name, size, time of change, and the bytes of small ones."""
    out: list[tuple[Any, ...]] = []
    for p in sorted(folder.rglob("*")):
        s = p.lstat()
        out.append((str(p), s.st_mode, s.st_size, s.st_mtime_ns))
    return out


# ------------------------------------------------------------------------------------------------------------ workers


def warm(seeds: dict[str, Path], work: Path, targets: Iterable[str] = TARGETS) -> None:
    """Import whatever a conversion imports, before anything is forked or watched."""
    oracle.restrict()
    for part in ("audit", "converters", "engine", "formats", "huggingface", "index", "storage"):
        package = importlib.import_module(f"ckpttool.{part}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    importlib.import_module("numpy.ma")  # which numpy imports when it writes into a view, and which compiles signatures
    name = "full-numbered"
    work.mkdir(parents=True, exist_ok=True)
    for suffix, reader, options in (TARGETS[t] for t in targets):
        out = work / f"warm{suffix}"
        ckpttool.convert(SEEDS[name].path(seeds[name]), out, drop=True, **SEEDS[name].arguments(seeds[name]), **options)
        oracle.ours(out)
        if reader in oracle.READERS:
            oracle.theirs(reader, out)
        ckpttool.verify(out, read_data=True)
        _removed(out)
    importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()  # type: ignore[assignment]  # no third-party layouts; it is slow


def limit() -> None:
    """Address space, and no core dumps."""
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def numbers(seeds: dict[str, Path], first: int, step: int) -> Iterator[tuple[str, int]]:
    """(seed, number) of the mutants of one worker."""
    chosen = list(seeds)
    weights = [SEEDS[n].weight for n in chosen]
    for n in itertools.count(first, step):
        yield random.Random(n).choices(chosen, weights)[0], n


def run(seeds: dict[str, Path], work: Path, first: int, step: int, until: float, most: int, log: Path) -> None:
    """A worker: mutants until a time or a number, a line each in `log`."""
    limit()
    signal.signal(signal.SIGALRM, _ring)
    bench = Bench(seeds, work)
    at = work / "at"
    with open(log, "a") as lines:
        for done, (name, n) in enumerate(numbers(seeds, first, step)):
            if time.time() > until or done >= most:
                break
            at.write_text(f"{name} {n}")
            lines.write(json.dumps(bench.mutant(name, n)) + "\n")
            lines.flush()
            if done % 50 == 0:
                gc.collect()
    at.write_text("end 0")


def supervised(
    seeds: dict[str, Path], work: Path, first: int, until: float, log: Path, workers: int = 2, most: int = 1 << 30
) -> None:
    """Workers until a time or a number of mutants each; one that dies or hangs is written down, and another goes on."""
    where = [(work / f"worker{k}", log.with_suffix(f".{k}.jsonl")) for k in range(workers)]
    pids: dict[int, int] = {}

    def start(k: int, number: int) -> None:
        folder, lines = where[k]
        shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                run(seeds, folder, number, workers, until, most, lines)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids[pid] = k

    for k in range(workers):
        start(k, first + k)
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            k = pids.pop(pid)
            name, n, phase = _at(where[k][0])
            if name not in ("", "end"):
                killed = {"id": f"fuzz:{name}:{n}", "said": "", "status": "died", "detail": f"status {status}"}
                if phase == "oracle":  # what ckpttool accepted, torch cannot be stopped at
                    killed |= {"status": ALONE, "detail": f"Stopped: the reader hangs, or died (status {status})"}
                with open(where[k][1], "a") as f:
                    f.write(json.dumps(killed) + "\n")
                if time.time() < until:
                    start(k, n + workers)
            continue
        for pid, k in pids.items():
            with_at = where[k][0] / "at"
            if with_at.exists() and time.time() - with_at.stat().st_mtime > 9 * SECONDS:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _at(folder: Path) -> tuple[str, int, str]:
    """(seed, number, "oracle" while the real reader reads) of the mutant that a worker is at; ("", 0, "") before the first."""
    try:
        name, n, *phase = (folder / "at").read_text().split()
        return name, int(n), phase[0] if phase else ""
    except (OSError, ValueError):
        return "", 0, ""
