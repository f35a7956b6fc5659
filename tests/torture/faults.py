"""System calls of small conversions that fail, through the real command line: one of each kind, every call, every error.

    run(lab, until, log, part, parts)      faults until a time, a line each in `log`

A process that LD_PRELOADs shim.c imports ckpttool once and forks for every run. After a fault the exit code must be a
documented one, without a traceback; the destination must be as before or complete, and no message may say otherwise; the
same command again, with nothing failing, must succeed and leave nothing beside the destination.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 10
KINDS = {
    name: 1 << i
    for i, name in enumerate(
        ("open", "read", "write", "sync", "rename", "mkdir", "unlink", "mmap", "truncate", "statfs", "flock", "stat", "readdir", "close")
    )
}  # fmt: skip
ONCE, ALWAYS, SHORT, NOTHING, KILL = range(5)


class Fault(NamedTuple):
    """Which calls are counted, and what becomes of the Nth."""

    kinds: str
    error: str = "EIO"
    how: int = ONCE

    @property
    def name(self) -> str:
        return f"{self.kinds}-{self.error if self.how < SHORT else ('short', 'nothing', 'kill')[self.how - SHORT]}" + (
            "-always" if self.how == ALWAYS else ""
        )

    @property
    def mask(self) -> int:
        return sum(KINDS[k] for k in self.kinds.split("+"))


FAULTS = (
    *(Fault(k) for k in ("write", "sync", "rename", "mkdir", "unlink", "truncate", "statfs", "flock", "open", "read", "close", "readdir", "stat")),
    Fault("write", "ENOSPC", ALWAYS), Fault("write+mkdir+open", "EDQUOT"), Fault("rename+mkdir+unlink", "EACCES"),
    Fault("open", "EMFILE"), Fault("open", "EACCES"), Fault("mmap", "ENOMEM"), Fault("read+write+sync", "EINTR"),
    Fault("read", "", SHORT), Fault("write", "", SHORT), Fault("read", "", NOTHING), Fault("write", "", NOTHING),
    Fault("sync", "ENOSPC"), Fault("rename", "ENOSPC"),
)  # fmt: skip

#: {name: (arguments, what lies at the destination before, or "+" and what lies around it, where the destination is)}
CONVERSIONS: dict[str, tuple[list[str], str | None, str]] = {
    "dcp-dcp": (["convert", "{s}/dcp", "{o}/out", "--to", "dcp", "-n", "3"], None, "out"),
    "dcp-full": (["convert", "{s}/dcp", "{o}/out.pt"], None, "out.pt"),
    "dcp-hf": (["convert", "{s}/dcp", "{o}/out", "--to", "hf"], None, "out"),
    "dcp-hf-training": (["convert", "{s}/dcp", "{o}/out", "--to", "hf", "--include-optimizer"], None, "out"),
    "dcp-zero3": (["convert", "{s}/dcp", "{o}/out", "--to", "zero3", "-n", "2"], None, "out"),
    "dcp-zero2": (["convert", "{s}/dcp", "{o}/out", "--to", "zero2", "-n", "2"], None, "out"),
    "dcp-universal": (["convert", "{s}/dcp", "{o}/out", "--to", "universal"], None, "out"),
    "dcp-fsdp1": (["convert", "{s}/dcp", "{o}/out", "--to", "fsdp1", "-n", "2", "--wrap", "fc"], None, "out"),
    "full-dcp-force": (["convert", "{s}/in.pt", "{o}/out", "--to", "dcp", "-n", "2", "--force"], "old", "out"),
    "dcp-full-force": (["convert", "{s}/dcp", "{o}/out.pt", "--force"], "old.pt", "out.pt"),
    "export": (["audit", "export", "{s}/dcp", "{o}/out.tar.zst", "--reproducible"], None, "out.tar.zst"),
    "clean": (["clean", "{o}/out"], "+interrupted", "out"),
    "clean-put-back": (["clean", "{o}/out"], "+taken", "out"),
    "restore": (["audit", "restore", "{s}/a.tar.zst", "{o}/out", "--to", "dcp", "-n", "3"], None, "out"),
}


def prepare(folder: Path) -> None:
    """The sources; needs torch, so that is done by whoever starts the processes that inject."""
    import torch

    import ckpttool

    from .seeds import trainable

    folder.mkdir(parents=True)
    torch.save(trainable(), folder / "in.pt")
    torch.save({"model": {"w": torch.ones(20, 3)}, "trainer": {"step": 1}}, folder / "old.pt")
    ckpttool.convert(folder / "in.pt", folder / "dcp", to="dcp", world_size=2)
    ckpttool.convert(folder / "old.pt", folder / "old", to="dcp", world_size=1)
    ckpttool.convert(folder / "in.pt", folder / "a.tar.zst", to="audit")
    # what a run leaves that was killed while it copied, and between the two renames of a --force
    for name, where in (("interrupted", "out"), ("taken", f".out.partial-{'0' * 12}/old")):
        partial = folder / name / f".out.partial-{'0' * 12}"
        partial.mkdir(parents=True)
        partial.chmod(0o700)
        shutil.copytree(folder / "dcp", partial / "tree")
        (partial / "journal").write_text('{"plan": "0"}\n')
        shutil.copytree(folder / "old", folder / name / where)


def compiled(folder: Path) -> Path | None:
    """shim.c as a library, or None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    out = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(out), str(source), "-ldl"], check=True, capture_output=True
    )
    return out


def content(path: Path) -> dict[str, str] | None:
    """{name: digest} of a destination, None where nothing is; without the file that says when it was made."""
    if not os.path.lexists(path):
        return None
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.name != "ckpttool.json"]
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@dataclass
class Ran:
    """What became of one command."""

    code: int  # negative: the signal that ended it
    text: str
    hung: bool
    met: bool  # whether the fault was reached
    where: str
    calls: int


class Lab:
    """Runs commands of `ckpttool` in forked children, on sources in `sources`, with destinations in `out`."""

    def __init__(self, sources: Path, out: Path, names: Sequence[str] = tuple(CONVERSIONS)) -> None:
        self.sources, self.out = sources, out
        self.shim: Any = None
        if "shim.so" in os.environ.get("LD_PRELOAD", ""):
            self.shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
            self.shim.torture_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_uint]
            self.shim.torture_disarm.restype = self.shim.torture_met.restype = ctypes.c_long
            self.shim.torture_where.restype = ctypes.c_char_p
        self.expected: dict[str, dict[str, str]] = {}
        self.beside: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self._import(names)

    def _import(self, names: Sequence[str]) -> None:
        """Everything that a command imports, so that a fork is quick and no import can fail."""
        import importlib.metadata

        import typer.main

        from ckpttool.cli import main as cli

        command = typer.main.get_command(cli.app)  # two thirds of a small conversion's time, and the same every time
        typer.main.get_command = lambda _: command
        importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()  # type: ignore[assignment]
        for name in names:
            self.clean(name)
            ran = self.command(self.arguments(name), here=True)
            assert ran.code == 0, f"{name}: exit {ran.code}"

    def arguments(self, name: str) -> list[str]:
        """The command line of a conversion."""
        return [a.format(s=self.sources, o=self.out) for a in CONVERSIONS[name][0]]

    def target(self, name: str) -> Path:
        return self.out / CONVERSIONS[name][2]

    def clean(self, name: str) -> dict[str, str] | None:
        """The folder of destinations as it is before a conversion; what lies at the destination then."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        old = CONVERSIONS[name][1]
        if old:
            source, around = self.sources / old.removeprefix("+"), old.startswith("+")
            if around:
                shutil.copytree(source, self.out, dirs_exist_ok=True)
            else:
                (shutil.copytree if source.is_dir() else shutil.copy)(source, self.target(name))
        return content(self.target(name))

    def learn(self, name: str) -> dict[str, str]:
        """What a conversion writes when nothing fails; how long it takes."""
        if name not in self.expected:
            self.clean(name)
            began = time.time()
            ran = self.command(self.arguments(name))
            assert ran.code == 0, f"{name}: {ran.text}"
            self.seconds[name] = time.time() - began
            found = content(self.target(name))
            assert found
            self.expected[name] = found
            self.beside[name] = set(os.listdir(self.out))
        return self.expected[name]

    def command(
        self, arguments: Sequence[str], fault: Fault | None = None, n: int = 0, kill_after: float | None = None,
        here: bool = False, no_exchange: bool = False,
    ) -> Ran:  # fmt: skip
        """`ckpttool` with these arguments, in a child; `here` in this process, which then has imported all it needs."""
        out, put = os.pipe()
        facts, tell = os.pipe()
        if here:
            return self._here(arguments, out, put, facts, tell)
        pid = os.fork()
        if pid == 0:
            os.close(out)
            os.close(facts)
            os._exit(self._child(arguments, fault, n, put, tell, no_exchange))
        os.close(put)
        os.close(tell)
        return self._wait(pid, out, facts, kill_after)

    def start(self, arguments: Sequence[str], no_exchange: bool = False) -> tuple[int, int, int]:
        """(process, its output, facts) of a command that runs beside us; `finish` waits for it."""
        out, put = os.pipe()
        facts, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os._exit(self._child(arguments, None, 0, put, tell, no_exchange))
        os.close(put)
        os.close(tell)
        return pid, out, facts

    def finish(self, started: tuple[int, int, int]) -> Ran:
        return self._wait(*started, None)

    def _here(self, arguments: Sequence[str], out: int, put: int, facts: int, tell: int) -> Ran:
        from ckpttool.cli import main as cli

        for fd in (out, put, facts, tell):
            os.close(fd)
        real, sys.argv = sys.argv, ["ckpttool", *arguments]
        streams = sys.stdout, sys.stderr
        code = 0
        with open(os.devnull, "w") as nowhere:
            sys.stdout = sys.stderr = nowhere
            try:
                cli.main()
            except SystemExit as e:
                code = int(e.code or 0)
            finally:
                sys.argv = real
                sys.stdout, sys.stderr = streams
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return Ran(code, "", False, False, "", 0)

    def _child(
        self, arguments: Sequence[str], fault: Fault | None, n: int, put: int, tell: int, no_exchange: bool
    ) -> int:
        code = 98
        try:
            from ckpttool.cli import main as cli
            from ckpttool.engine.copy import fill
            from ckpttool.storage.local_destination import LocalDestination

            os.dup2(put, 1)
            os.dup2(put, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            sys.argv = ["ckpttool", *arguments]
            fill._JOURNAL_BYTES, LocalDestination.max_open_finished = 1, 3  # a line in the journal after every tensor
            if no_exchange:
                self.shim.torture_no_exchange(1)
            if fault is not None:
                error = getattr(errno, fault.error) if fault.error else 0
                self.shim.torture_arm(os.fsencode(self.out.parent), n, error, fault.how, fault.mask)
            try:
                cli.main()
                code = 0
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
            finally:
                if fault is not None:
                    calls = self.shim.torture_disarm()
                    where = self.shim.torture_where().decode(errors="replace")
                    os.write(tell, json.dumps([calls, self.shim.torture_met(), where]).encode())
            sys.stdout.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        return code

    def _wait(self, pid: int, out: int, facts: int, kill_after: float | None) -> Ran:
        text, hung, began = b"", False, time.time()
        while True:
            passed = time.time() - began
            if kill_after is not None and passed >= kill_after:
                os.kill(pid, signal.SIGKILL)
                kill_after = None
            if passed > SECONDS:
                os.kill(pid, signal.SIGKILL)
                hung = True
                break
            left = min(SECONDS - passed, SECONDS if kill_after is None else kill_after - passed)
            if select.select([out], [], [], max(left, 0) + 0.0005)[0]:
                part = os.read(out, 1 << 16)
                if not part:
                    break
                text += part
        _, status = os.waitpid(pid, 0)
        said = os.read(facts, 1 << 14)
        os.close(out)
        os.close(facts)
        calls, met, where = json.loads(said) if said else (0, 1, "")
        return Ran(os.waitstatus_to_exitcode(status), text.decode(errors="replace"), hung, bool(met), where, calls)

    # ------------------------------------------------------------------------------------------------- judging

    def judge(self, name: str, before: dict[str, str] | None, ran: Ran, killed: bool = False) -> list[str]:
        """What is wrong after a command that was disturbed, and after the same one again."""
        from ckpttool.errors import EXIT_CODES

        new = self.expected[name]
        found = content(self.target(name))
        bad = []
        if found not in (before, new):
            bad.append(f"half-written: {sorted(found or ())[:5]}")
        if ran.hung:
            bad.append("hang")
        elif not killed:
            if ran.code not in dict(EXIT_CODES):
                bad.append(f"exit {ran.code}")
            if "Traceback" in ran.text or "bug of ckpttool" in ran.text:
                bad.append("an unexpected exception")
            if ran.code == 0 and found != new:
                bad.append("exit 0, but the destination is not the new one")
            if ran.code == 0 and (more := self._unnamed(name, ran.text)):
                bad.append(f"exit 0, and beside it, not named: {more}")
            if ran.code != 0 and found == new != before and "untouched" in ran.text:
                bad.append('says "untouched", but the destination is the new one')
        again = self.arguments(name)
        if found is not None and "--force" not in again and again[0] == "convert":
            again.append("--force")
        elif found is not None and again[0] == "audit":  # has no --force: whole already, or not there
            self.target(name).unlink() if self.target(name).is_file() else shutil.rmtree(self.target(name))
        second = self.command(again)
        if second.code != 0:
            bad.append(f"the rerun ends with {second.code}: {second.text[-300:]}")
        elif content(self.target(name)) != new:
            bad.append("the rerun writes something else")
        if left := self._unnamed(name, ran.text + second.text):
            bad.append(f"left behind and not named: {left}")
        return bad

    def _unnamed(self, name: str, text: str) -> list[str]:
        """What lies beside the destination and should not, and is in no message; a lock file that is free is nothing."""
        joined = "".join(text.split())  # messages are wrapped
        left = set(os.listdir(self.out)) - self.beside[name]
        return sorted(x for x in left if x not in joined and not x.endswith(".partial-lock"))

    def fault(self, name: str, fault: Fault, n: int) -> dict[str, Any] | None:
        """One fault, judged; None where the conversion has fewer such calls."""
        self.learn(name)
        before = self.clean(name)
        ran = self.command(self.arguments(name), fault, n)
        if not ran.met:
            return None
        bad = self.judge(name, before, ran)
        return {
            "id": f"fault:{name}:{fault.name}:{n}", "said": f"{ran.where.replace(str(self.out.parent), '')}, exit {ran.code}",
            "status": "; ".join(bad) or "fine", "bad": bool(bad), "code": ran.code, "detail": ran.text[-400:] if bad else "",
        }  # fmt: skip


def every(names: Sequence[str], faults: Sequence[Fault] = FAULTS) -> Iterator[tuple[str, Fault, int]]:
    """Every call of every conversion with every fault, in turns; send False to say that there are no more of one."""
    pairs = list(itertools.product(names, faults))
    for n in itertools.count(1):
        for pair in list(pairs):
            if (yield (*pair, n)) is False:
                pairs.remove(pair)
        if not pairs:
            return


def run(lab: Lab, until: float, log: Path, part: int = 0, parts: int = 1, most: int = 1 << 30) -> bool:
    """Faults until a time or a number; whether that was all there are."""
    names = list(CONVERSIONS)[part::parts]
    rounds = every(names)
    with open(log, "a") as lines:
        done, what = 0, next(rounds)
        while time.time() < until and done < most:
            found = lab.fault(*what)
            if found:
                done += 1
                lines.write(json.dumps(found) + "\n")
                lines.flush()
            try:
                what = rounds.send(found is not None)
            except StopIteration:
                return True
    return False


def by_name(name: str) -> Fault:
    """A fault by the name that reports give it."""
    return next(f for f in FAULTS if f.name == name)
