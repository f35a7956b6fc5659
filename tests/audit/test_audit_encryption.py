"""Encryption: what age makes of it and back, every way of damage, and threads that always end."""

from __future__ import annotations

import builtins
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.audit import encryption
from ckpttool.audit.encryption import Encryptor, decrypt, parse_identities, parse_recipients
from ckpttool.errors import CkpttoolError, Corrupt, UsageError
from ckpttool.storage.source import Source

pyrage = pytest.importorskip("pyrage")
KIB, MIB = 1 << 10, 1 << 20
AGE = shutil.which("age")
needs_age = pytest.mark.skipif(AGE is None, reason="no `age` on this machine; pyrage is the only witness")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "ckpttool-age"]


class Key:
    """An age identity in a file."""

    def __init__(self, folder: Path, name: str = "id.txt") -> None:
        made = pyrage.x25519.Identity.generate()
        self.secret, self.public = str(made), str(made.to_public())
        self.file = str(folder / name)
        Path(self.file).write_text(f"# created: today\n# public key: {self.public}\n{self.secret}\n")

    @property
    def identities(self) -> list[Any]:
        return parse_identities([self.file])


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return Key(tmp_path)


def sealed(data: bytes, *recipients: str, cuts: Callable[[int], int] = lambda at: MIB) -> bytes:
    out: list[bytes] = []
    encryptor = Encryptor(out.append, recipients)
    at = 0
    while at < len(data):
        n = cuts(at)
        encryptor.append(memoryview(data)[at : at + n])
        at += n
    encryptor.finish()
    encryptor.close()
    return b"".join(out)


def opened(folder: Path, data: bytes, identities: list[Any], steps: list[tuple[int, int]] | None = None) -> bytes:
    (folder / "x.age").write_bytes(data)
    out: list[bytes] = []
    with Source(folder) as source:
        decrypt(source, "x.age", identities, out.append, lambda a, b: None if steps is None else steps.append((a, b)))
    return b"".join(out)


def payload(data: bytes) -> int:
    """Where the pieces begin: behind the line of the MAC and the nonce."""
    return data.index(b"\n", data.index(b"\n--- ") + 1) + 1 + 16


SIZES = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 2 * MIB, 5 * MIB + 7]


@pytest.mark.parametrize("size", SIZES)
def test_round_trip(tmp_path: Path, key: Key, size: int) -> None:
    data = random.Random(size).randbytes(size)
    found = sealed(data, key.public)
    pieces = max(1, -(-size // (64 * KIB)))
    assert len(found) == payload(found) + size + 16 * pieces
    steps: list[tuple[int, int]] = []
    assert opened(tmp_path, found, key.identities, steps) == data
    assert steps[-1] == (len(found), len(found))
    assert steps == sorted(steps)
    assert pyrage.decrypt(found, key.identities) == data
    assert opened(tmp_path, pyrage.encrypt(data, parse_recipients([key.public])), key.identities) == data


@pytest.mark.parametrize("size", SIZES)
@needs_age
def test_the_standard_tool_reads_ours_and_we_read_its(tmp_path: Path, key: Key, size: int) -> None:
    data = random.Random(size).randbytes(size)
    ran = subprocess.run(
        [str(AGE), "-d", "-i", key.file], input=sealed(data, key.public), capture_output=True, check=True
    )
    assert ran.stdout == data
    made = subprocess.run([str(AGE), "-r", key.public], input=data, capture_output=True, check=True).stdout
    assert opened(tmp_path, made, key.identities) == data


def test_appends_of_any_length(tmp_path: Path, key: Key) -> None:
    data = random.Random(1).randbytes(3 * MIB + 11)
    dice = random.Random(2)
    for cuts in (lambda at: 3 * MIB + 11, lambda at: dice.choice([1, 10, 1000, 65536, 65537, 1 << 20]), lambda at: 401):
        assert opened(tmp_path, sealed(data, key.public, cuts=cuts), key.identities) == data
    shorts = memoryview(data[: 2 * MIB]).cast("H")
    out: list[bytes] = []
    encryptor = Encryptor(out.append, [key.public])
    encryptor.append(shorts)
    encryptor.append(b"")
    encryptor.finish()
    with pytest.raises(AssertionError, match="after the end"):
        encryptor.append(b"more")
    encryptor.close()
    assert opened(tmp_path, b"".join(out), key.identities) == data[: 2 * MIB]


def test_data_is_not_kept(tmp_path: Path, key: Key) -> None:
    out: list[bytes] = []
    encryptor = Encryptor(out.append, [key.public])
    buffer = bytearray(b"a" * 100_000)
    encryptor.append(memoryview(buffer))
    buffer[:] = b"b" * 100_000
    encryptor.append(buffer)
    encryptor.finish()
    encryptor.close()
    assert opened(tmp_path, b"".join(out), key.identities) == b"a" * 100_000 + b"b" * 100_000


def test_forty_mebibytes_in_bounded_queues(tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(3).randbytes(MIB) * 40
    most = [0, 0]
    threads = set()
    out: list[bytes] = []

    def write(piece: bytes) -> None:
        threads.add(threading.current_thread())
        time.sleep(0.001)  # a slow disk
        most[1] = max(most[1], len(piece), encryptor._encrypted_bytes, sum(map(len, list(encryptor._encrypted))))
        out.append(piece)

    encryptor = Encryptor(write, [key.public])
    for at in range(0, len(data), 3 * MIB):
        encryptor.append(data[at : at + 3 * MIB])
        with encryptor._changed:
            assert encryptor._plain_bytes == sum(map(len, encryptor._plain))
            most[0] = max(most[0], encryptor._plain_bytes)
    encryptor.finish()
    encryptor.close()
    assert threads == {threading.current_thread()}
    assert 0 < most[0] <= encryption.WAITING == 4 * MIB and 0 < most[1] <= 4 * MIB
    assert len(out) > 9
    assert opened(tmp_path, b"".join(out), key.identities) == data


def test_memory_is_constant_for_half_a_gibibyte(tmp_path: Path, key: Key) -> None:
    code = f"""
import resource
from ckpttool.audit.encryption import Encryptor, parse_identities, decrypt
from ckpttool.storage.source import Source
piece = bytes(range(256)) * 8192
total = 0
with open({str(tmp_path / "big.age")!r}, "wb") as f:
    encryptor = Encryptor(f.write, [{key.public!r}])
    encryptor.append(piece)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(255):
        encryptor.append(piece)
    encryptor.finish()
    encryptor.close()
def write(data):
    global total
    total += len(data)
with Source({str(tmp_path)!r}) as source:
    decrypt(source, "big.age", parse_identities([{key.file!r}]), write, lambda a, b: None)
print(total, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total, kib = map(int, ran.stdout.split())
    assert total == 512 * MIB
    assert kib < 40 * KIB


def test_a_queue_of_many_small_pieces_is_bounded_too(key: Key) -> None:
    encryptor = Encryptor(lambda data: None, [key.public])
    for _ in range(20_000):
        encryptor.append(b"x")
        assert len(encryptor._plain) <= 256
    encryptor.finish()
    encryptor.close()


# -------------------------------------------------------------------------------------------------------- recipients


@pytest.fixture(scope="session")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen on this machine")
    folder = tmp_path_factory.mktemp("ssh")
    for name, kind, password in (
        ("ed", "ed25519", ""),
        ("rsa", "rsa", ""),
        ("locked", "ed25519", "pw"),
        ("ec", "ecdsa", ""),
    ):
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", password, "-f", folder / name], check=True)
    return folder


def test_several_recipients_each_open_it(tmp_path: Path, ssh: Path) -> None:
    one, two, stranger = Key(tmp_path, "1"), Key(tmp_path, "2"), Key(tmp_path, "3")
    listed = tmp_path / "recipients.txt"
    listed.write_text(f"# who may read\n\n{two.public}\r\n  {(ssh / 'rsa.pub').read_text()}")
    found = sealed(b"data", one.public, str(listed), (ssh / "ed.pub").read_text())
    for file in (one.file, two.file, ssh / "rsa", ssh / "ed"):
        assert opened(tmp_path, found, parse_identities([str(file)])) == b"data"
        assert opened(tmp_path, found, parse_identities([stranger.file, str(file)])) == b"data"
    with pytest.raises(UsageError, match=r"x\.age: none of the 1 identities opens it\. It was encrypted for others"):
        opened(tmp_path, found, stranger.identities)
    both = tmp_path / "both"
    both.write_text(stranger.secret + "\n" + one.secret + "\n")
    assert len(parse_identities([str(both)])) == 2
    assert opened(tmp_path, found, parse_identities([str(both)])) == b"data"


def test_recipients_that_are_none(tmp_path: Path, key: Key, ssh: Path) -> None:
    cases: list[tuple[str, str]] = [
        (key.public[:-1] + ("q" if key.public[-1] != "q" else "p"), r"^the recipient, is not a public key of age"),
        ("age1", "is not a public key of age"), ("ssh-ed25519 AAAA", "is not a public key of age"),
        ((ssh / "ec.pub").read_text(), "no such file|cannot be read"),
        (str(tmp_path / "nowhere"), "cannot be read: No such file"), (str(tmp_path), "cannot be read: Is a directory"),
        ("\0", "cannot be read"),
    ]  # fmt: skip
    for text, reason in cases:
        with pytest.raises(UsageError, match=reason):
            parse_recipients([text])
    bad = tmp_path / "bad.txt"
    bad.write_text(f"# one\n{key.public}\nage1oops\n")
    with pytest.raises(UsageError, match=r"bad\.txt, line 3, the recipient, is not a public key"):
        parse_recipients([str(bad)])
    bad.write_text("# none\n")
    with pytest.raises(UsageError, match=r"bad\.txt holds no recipients"):
        parse_recipients([str(bad)])
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bad\.txt is not text"):
        parse_recipients([str(bad)])
    with pytest.raises(UsageError, match="encryption needs a recipient"):
        Encryptor(lambda data: None, [])


def test_secret_keys_are_never_shown(tmp_path: Path, key: Key, ssh: Path) -> None:
    secrets = [key.secret, key.secret.lower(), (ssh / "ed").read_text(), "x" + key.secret[1:]]
    calls: list[Callable[[], Any]] = [lambda t=t: parse_recipients([t]) for t in secrets]  # type: ignore[misc]
    calls += [lambda t=t: parse_identities([t]) for t in secrets]  # type: ignore[misc]
    calls += [lambda: parse_recipients([key.file]), lambda: parse_recipients([str(ssh / "ed")])]
    broken = tmp_path / "broken"
    broken.write_text(key.secret[:-1] + "\n")
    calls += [lambda: parse_identities([str(broken)])]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        said = str(caught.value)
        assert key.secret[20:40].lower() not in said.lower() and "OPENSSH" not in said
    with pytest.raises(UsageError, match=r"id\.txt, line 3, the recipient, is a secret key; give the public one"):
        parse_recipients([key.file])


def test_identities_that_are_none(tmp_path: Path, key: Key, ssh: Path) -> None:
    empty, public, itself = tmp_path / "empty", tmp_path / "public", tmp_path / "itself"
    empty.write_text("# nothing\n")
    public.write_text(key.public)
    itself.write_bytes(sealed(key.secret.encode(), key.public))
    for file, reason in (
        (ssh / "locked", "it has a password; take a copy without"), (ssh / "ec", "neither an age identity nor an ssh"),
        (empty, "empty holds no identity"), (public, "neither an age identity"), (itself, "is encrypted itself"),
        (tmp_path / "nowhere", "the identity file '.*' cannot be read: No such file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=reason):
            parse_identities([str(file)])
    with pytest.raises(UsageError, match="decryption needs an identity"):
        parse_identities([])


def test_without_pyrage(tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def missing(what: str, *args: Any, **more: Any) -> Any:
        if what == "pyrage":
            raise ModuleNotFoundError("No module named 'pyrage'")
        return there(what, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    for call in (
        lambda: Encryptor(lambda data: None, [key.public]), lambda: parse_identities([key.file]),
        lambda: opened(tmp_path, b"", []),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"pip install 'ckpttool\[audit\]'"):
            call()


# ------------------------------------------------------------------------------------------------------------ damage


def test_every_kind_of_truncation_is_refused(tmp_path: Path, key: Key) -> None:
    data = random.Random(4).randbytes(200_000)
    found = sealed(data, key.public)
    start, piece = payload(found), 64 * KIB + 16
    cuts = [
        *range(start + 40),
        *(start + k * piece + d for k in range(1, 4) for d in (-17, -16, -1, 0, 1, 15, 16, 17)),
    ]
    cuts += [len(found) - d for d in (1, 15, 16, 17, 3000)]
    for cut in cuts:
        with pytest.raises(Corrupt, match=r"x\.age"):
            opened(tmp_path, found[:cut], key.identities)
    for more in (b"\0", bytes(16), bytes(70_000), found):
        with pytest.raises(Corrupt, match=rf"damaged or cut at bytes {start + 3 * piece}\.\."):
            opened(tmp_path, found + more, key.identities)


def test_flipped_bits_are_all_refused_and_located(tmp_path: Path, key: Key) -> None:
    data = random.Random(5).randbytes(500_000)
    found = sealed(data, key.public)
    start, piece = payload(found), 64 * KIB + 16
    dice = random.Random(6)
    places = [dice.randrange(len(found)) for _ in range(200)] + list(range(start))
    for place in places:
        damaged = bytearray(found)
        damaged[place] ^= 1 << dice.randrange(8)
        got: list[bytes] = []
        (tmp_path / "x.age").write_bytes(damaged)
        with Source(tmp_path) as source, pytest.raises((Corrupt, UsageError)) as caught:
            decrypt(source, "x.age", key.identities, got.append, lambda a, b: None)
        assert data.startswith(b"".join(got))
        if place >= start:
            first = start + (place - start) // piece * piece
            end = min(first + piece, len(found))
            assert isinstance(caught.value, Corrupt)
            assert f"damaged or cut at bytes {first}..{end} of {len(found)} " in str(caught.value)
            assert f"the {(first - start) // piece * 64 * KIB} plain bytes before that are intact" in str(caught.value)
        elif isinstance(caught.value, UsageError):
            assert "or its header is damaged" in str(caught.value)


def test_pieces_in_another_order_or_of_another_file(tmp_path: Path, key: Key) -> None:
    found, other = sealed(bytes(300_000), key.public), sealed(bytes(300_000), key.public)
    start, piece = payload(found), 64 * KIB + 16
    one, two = found[start : start + piece], found[start + piece : start + 2 * piece]
    mine = payload(other)
    for bad in (
        found[:start] + two + one + found[start + 2 * piece :], found[:start] + found[start + piece :],
        found[:start] + one + one + found[start + 2 * piece :], found[:start] + other[mine : mine + piece] + found[start + piece :],
    ):  # fmt: skip
        with pytest.raises(Corrupt, match="damaged or cut at bytes"):
            opened(tmp_path, bad, key.identities)


def test_what_is_no_age_file(tmp_path: Path, key: Key) -> None:
    for data in (b"", b"\x28\xb5\x2f\xfd" * 100, b"age-encryption.org/v2\n", sealed(b"x", key.public)[1:]):
        with pytest.raises(Corrupt, match=r"x\.age is not an age file"):
            opened(tmp_path, data, key.identities)
    endless = b"age-encryption.org/v1\n" + b"-> X25519 " + b"A" * (3 * MIB)
    with pytest.raises(Corrupt, match="the header of the age file does not end within 262144 bytes"):
        opened(tmp_path, endless, key.identities)


# --------------------------------------------------------------------------------------------------- errors, threads


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), Corrupt("x")])
def test_a_write_that_fails_ends_cleanly(key: Key, after: int, error: BaseException) -> None:
    calls = 0

    def write(data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    encryptor = Encryptor(write, [key.public])
    with pytest.raises(type(error)) as caught:
        for _ in range(100):
            encryptor.append(bytes(MIB))
    assert caught.value is error
    for again in (lambda: encryptor.append(b"x"), encryptor.finish):
        with pytest.raises(CkpttoolError, match="is incomplete"):
            again()
    encryptor.close()
    encryptor.close()
    assert calls == after + 1


def test_a_write_that_fails_in_finish(key: Key) -> None:
    def write(data: bytes) -> None:
        raise OSError(28, "full")

    encryptor = Encryptor(write, [key.public])
    encryptor.append(b"few")
    with pytest.raises(OSError, match="full"):
        encryptor.finish()
    encryptor.close()


@pytest.mark.parametrize("amount", [0, 1, 4 * MIB, 9 * MIB])
def test_close_in_the_middle(key: Key, amount: int) -> None:
    out: list[bytes] = []
    encryptor = Encryptor(out.append, [key.public])
    encryptor.append(bytes(amount))
    encryptor.close()
    with pytest.raises(CkpttoolError, match="abandoned"):
        encryptor.append(b"x")


def test_an_error_of_the_cipher_comes_out(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(reader: Any, writer: Any, keys: Any) -> None:
        reader.read(8192)
        raise pyrage.EncryptError("broken")

    monkeypatch.setattr(pyrage, "encrypt_io", fails)
    encryptor = Encryptor(lambda data: None, [key.public])
    with pytest.raises(CkpttoolError, match=r"encryption failed \(broken\)"):
        for _ in range(100):
            encryptor.append(bytes(MIB))
    with pytest.raises(CkpttoolError, match=r"encryption failed \(broken\)"):
        encryptor.finish()
    encryptor.close()


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), Corrupt("x")])
@pytest.mark.parametrize("where", ["write", "progress", "read"])
def test_errors_on_the_way_out_are_what_they_were(
    tmp_path: Path, key: Key, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.age").write_bytes(sealed(bytes(4 * MIB), key.public))

    def fail(*_: Any) -> Any:
        raise error

    class Failing(Source):
        def read(self, name: str, offset: int, length: int) -> bytes:
            return fail() if where == "read" and offset else super().read(name, offset, length)

    with Failing(tmp_path) as source, pytest.raises(type(error)) as caught:
        decrypt(
            source, "x.age", key.identities, fail if where == "write" else lambda data: None,
            fail if where == "progress" else lambda a, b: None,
        )  # fmt: skip
    assert caught.value is error


def test_remote_sources_give_reads_of_a_mebibyte(tmp_path: Path, key: Key) -> None:
    (tmp_path / "x.age").write_bytes(sealed(os.urandom(3 * MIB), key.public))
    asked: list[tuple[int, int]] = []

    class Counting(Source):
        def read(self, name: str, offset: int, length: int) -> bytes:
            asked.append((offset, length))
            return super().read(name, offset, length)

    with Counting(tmp_path) as source:
        decrypt(source, "x.age", key.identities, lambda data: None, lambda a, b: None)
        size = source.size("x.age")
    assert asked == [(0, MIB >> 2), (0, MIB), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, size - 3 * MIB)]
