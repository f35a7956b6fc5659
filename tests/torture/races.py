"""What happens at the same time: two runs, a reader during --force, a source that changes; and real full or layered disks.

Every race is a function of (lab, number); it gives what is wrong, [] where nothing is, or raises Skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .faults import Lab, content

NEW_NAMESPACE = 0x00020000
PRIVATE, RECURSIVE, REMOUNT = 1 << 18, 1 << 14, 32


class Skipped(Exception):
    """This machine, or this user, cannot do that."""


def two_runs(lab: Lab, rng: random.Random) -> list[str]:
    """Two of the same command: one writes, the other is told that, or that the destination exists, or replaces it."""
    name = rng.choice(["dcp-dcp", "dcp-full", "full-dcp-force", "dcp-full-force", "dcp-hf"])
    new = lab.learn(name)
    lab.clean(name)
    first = lab.start(lab.arguments(name))
    time.sleep(rng.uniform(0, 1.2) * lab.seconds[name])
    second = lab.start(lab.arguments(name))
    ran = [lab.finish(first), lab.finish(second)]
    bad = [f"exit {r.code}: {r.text[-200:]}" for r in ran if r.code not in (0, 6) or "Traceback" in r.text]
    if not any(r.code == 0 for r in ran):
        bad.append("neither succeeded")
    if content(lab.target(name)) != new:
        bad.append("the destination is not the one that both write")
    if left := sorted(set(os.listdir(lab.out)) - lab.beside[name]):
        bad.append(f"left behind: {left}")
    return bad


def reader(lab: Lab, rng: random.Random) -> list[str]:
    """Somebody who opened the old destination before or while it is replaced reads it, or the new one, whole."""
    name = rng.choice(["full-dcp-force", "dcp-full-force"])
    new = lab.learn(name)
    old = lab.clean(name)
    target = lab.target(name)
    started = lab.start(lab.arguments(name))
    bad: list[str] = []
    looks = 0
    end = time.time() + 2 * lab.seconds[name]
    while time.time() < end and not bad:
        try:
            found = _through_descriptor(target)
        except FileNotFoundError:
            if not target.exists():
                bad.append("there was a moment without a destination")
            continue  # the old one is being removed, and its reader sees that
        looks += 1
        if found not in (old, new):
            bad.append(f"the reader saw a mixture: {sorted(found)}")
    ran = lab.finish(started)
    if ran.code != 0 or content(target) != new:
        bad.append(f"exit {ran.code}: {ran.text[-200:]}")
    return bad


def _through_descriptor(path: Path) -> dict[str, str]:
    """`content`, of the folder that lies there when it is opened."""
    if not path.is_dir():
        return content(path) or {}
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = content(Path(f"/proc/self/fd/{fd}/."))
        assert found is not None
        if not found or ".metadata" not in found:
            raise FileNotFoundError
        return found
    finally:
        os.close(fd)


def changing_source(lab: Lab, rng: random.Random) -> list[str]:
    """A source that another save overwrites while it is read: an error, or one of the two, never a mixture."""
    name = "full-dcp"
    sources = Path(tempfile.mkdtemp(dir=lab.out.parent))
    try:
        first, second = (lab.sources / "in.pt").read_bytes(), _other(lab)
        target = lab.out / "out"
        lab.out.mkdir(exist_ok=True)

        def converted(data: bytes | None) -> dict[str, str]:
            key = f"{name}-{'first' if data is first else 'second'}"
            if key not in lab.expected:
                shutil.rmtree(target, ignore_errors=True)
                (sources / "in.pt").write_bytes(data or b"")
                began = time.time()
                ran = lab.command(command)
                assert ran.code == 0, ran.text
                lab.seconds[name] = time.time() - began
                lab.expected[key] = content(target) or {}
            return lab.expected[key]

        command = ["convert", str(sources / "in.pt"), str(target), "--to", "dcp", "-n", "3"]
        wanted = [converted(first), converted(second)]
        shutil.rmtree(target, ignore_errors=True)
        (sources / "in.pt").write_bytes(first)
        started = lab.start(command)
        time.sleep(rng.uniform(0, 1.1) * lab.seconds[name])
        if rng.random() < 0.5:
            (sources / "new.pt").write_bytes(second)
            os.replace(sources / "new.pt", sources / "in.pt")
        else:
            with open(sources / "in.pt", "r+b") as f:
                for at in range(0, len(second), 997):
                    f.seek(at)
                    f.write(second[at : at + 997])
                f.truncate(len(second))
        ran = lab.finish(started)
        found = content(target)
        if ran.code == 0 and found in wanted:
            return []
        if ran.code != 0 and found is None and "Traceback" not in ran.text and "bug of ckpttool" not in ran.text:
            return []
        return [f"exit {ran.code}, {'a mixture' if found else 'nothing'} there: {ran.text[-300:]}"]
    finally:
        shutil.rmtree(sources, ignore_errors=True)


def _other(lab: Lab) -> bytes:
    """The source with other numbers and with CRC32s that are right: every float32 differs in one bit of its mantissa."""
    import zipfile

    out = lab.out.parent / "other.pt"
    if not out.exists():
        with zipfile.ZipFile(lab.sources / "in.pt") as a, zipfile.ZipFile(out, "w") as b:
            for i in a.infolist():
                data = a.read(i)
                if "/data/" in i.filename and len(data) > 4:
                    data = bytes(c ^ 0x80 if k % 4 == 1 else c for k, c in enumerate(data))
                b.writestr(zipfile.ZipInfo(i.filename), data)
    return out.read_bytes()


def no_exchange(lab: Lab, rng: random.Random) -> list[str]:
    """--force where the file system cannot exchange two folders: as before, or complete."""
    if lab.shim is None:
        raise Skipped("no shim")
    name = "full-dcp-force"
    new = lab.learn(name)
    old = lab.clean(name)
    ran = lab.command(lab.arguments(name), no_exchange=True)
    found = content(lab.target(name))
    if ran.code == 0 and found == new:
        return []
    return [] if ran.code and found == old and "Traceback" not in ran.text else [f"exit {ran.code}: {ran.text[-300:]}"]


def _mounted(act: Callable[[Path, Any], list[str]], where: Path) -> list[str]:
    """`act` in a child with mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    out, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        said: Any = ["the child died"]
        try:
            if libc.unshare(NEW_NAMESPACE) or libc.mount(None, b"/", None, PRIVATE | RECURSIVE, None):
                said = "unshare is not allowed"
            else:
                said = act(where, libc)
        except Skipped as e:
            said = str(e)
        except BaseException as e:
            said = [f"{type(e).__name__}: {e}"]
        finally:
            os.write(put, json.dumps(said).encode())
            os._exit(0)
    os.close(put)
    text = b""
    while part := os.read(out, 1 << 16):
        text += part
    os.close(out)
    os.waitpid(pid, 0)
    said = json.loads(text)
    if isinstance(said, str):
        raise Skipped(said)
    return list(said)


def full_disk(lab: Lab, rng: random.Random) -> list[str]:
    """A tmpfs that is too small: exit 8, nothing at the destination; with more room the same command succeeds."""
    name = rng.choice(["dcp-dcp", "dcp-full", "dcp-hf", "dcp-zero3"])
    new = lab.learn(name)
    total = sum(p.stat().st_size for p in lab.out.rglob("*") if p.is_file())
    size = rng.randrange(8192, max(total, 16384))

    def act(where: Path, libc: Any) -> list[str]:
        if libc.mount(b"torture", os.fsencode(where), b"tmpfs", 0, f"size={size}".encode()):
            raise Skipped("mount is not allowed")
        ran = lab.command(lab.arguments(name))
        found = content(lab.target(name))
        if ran.code == 0:
            return [] if found == new else ["exit 0 and not whole"]
        bad = (
            []
            if ran.code == 8 and found is None
            else [f"exit {ran.code}, {found and sorted(found)}: {ran.text[-300:]}"]
        )
        assert libc.mount(b"torture", os.fsencode(where), b"tmpfs", REMOUNT, b"size=64m") == 0
        again = lab.command(lab.arguments(name))
        if again.code or content(lab.target(name)) != new:
            bad.append(f"with more room: exit {again.code}: {again.text[-300:]}")
        return bad

    lab.clean(name)
    return _mounted(act, lab.out)


def layered(lab: Lab, rng: random.Random) -> list[str]:
    """--force onto what lies in the lower layer of an overlay, where folders cannot be renamed: as before, or complete."""
    name = rng.choice(["full-dcp-force", "dcp-full-force"])
    new = lab.learn(name)
    old = lab.clean(name)

    def act(where: Path, libc: Any) -> list[str]:
        layers = Path(tempfile.mkdtemp(dir=where.parent))
        if libc.mount(b"torture", os.fsencode(layers), b"tmpfs", 0, b"size=64m"):
            raise Skipped("mount is not allowed")
        for part in ("upper", "work"):
            (layers / part).mkdir()
        shutil.copytree(where, layers / "lower")
        options = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work"
        if libc.mount(b"overlay", os.fsencode(where), b"overlay", 0, options.encode()):
            raise Skipped("overlay is not allowed")
        ran = lab.command(lab.arguments(name))
        found = content(lab.target(name))
        if (ran.code == 0 and found == new) or (ran.code and found == old and "Traceback" not in ran.text):
            return []
        return [f"exit {ran.code}, {'old' if found == old else found and sorted(found)}: {ran.text[-300:]}"]

    return _mounted(act, lab.out)


RACES: dict[str, Callable[[Lab, random.Random], list[str]]] = {
    "two runs at one destination": two_runs, "a reader during --force": reader, "a source that changes": changing_source,
    "no RENAME_EXCHANGE": no_exchange, "a full tmpfs": full_disk, "an overlay": layered,
}  # fmt: skip


def race(lab: Lab, name: str, number: int) -> dict[str, Any]:
    """One race, judged."""
    record: dict[str, Any] = {"id": f"race:{name}:{number}", "said": name}
    try:
        bad = RACES[name](lab, random.Random(number))
    except Skipped as e:
        return {**record, "status": f"skipped: {e}", "bad": False, "detail": ""}
    return {**record, "status": "; ".join(bad) or "fine", "bad": bool(bad), "detail": ""}


def run(lab: Lab, until: float, log: Path, part: int = 0, parts: int = 1, most: int = 1 << 30, first: int = 0) -> None:
    """Races in turn, until a time or a number."""
    names = list(RACES)
    with open(log, "a") as lines:
        for k in range(most):
            if time.time() > until:
                break
            number = first + part + k * parts
            lines.write(json.dumps(race(lab, names[k % len(names)], number)) + "\n")
            lines.flush()
