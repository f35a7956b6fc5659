"""Encryption with age: plain bytes in, ciphertext out, in constant memory, for the public keys of those who may read.

    header    "age-encryption.org/v1", a line or two for each recipient, "--- " and its MAC
    payload   16 bytes of nonce, then chunks of 64 KiB, each with 16 bytes that authenticate it; the last one is marked

So every byte is authenticated before it is returned, and so is the end of the file. `age -d -i key FILE` reads it.

pyrage pulls plain bytes and pushes ciphertext itself. `Encryptor` therefore runs it in a thread, between two bounded
queues; only the caller's thread touches anything else. Reading needs no thread.

Source: the age format, https://age-encryption.org/v1 (C2SP, age.md).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CkpttoolError, Corrupt, UsageError, kind_of_failure
from ..extras import explain_missing_package
from ..storage.source import Source

__all__ = ["Encryptor", "decrypt", "parse_identities", "parse_recipients"]

WAITING = 4 << 20  # bytes of a queue at most: plain ones before the cipher, sealed ones behind it
_MOST = 256  # pieces of a queue at most, however small
_PIECE = 1 << 20
_CHUNK, _TAG, _NONCE = 64 << 10, 16, 16
_MAGIC = b"age-encryption.org/v1\n"
_MAX_HEADER = 256 << 10  # 2,600 recipients; pyrage parses in quadratic time: a second, and 15 for a MiB


# --------------------------------------------------------------------------------------------------------- writing


class _Closed(Exception):
    """The caller has given up."""


class _CallbackFile:
    """A file object for pyrage, to read from or to write to."""

    def __init__(self, give: Callable[[int], bytes] | None = None, take: Callable[[bytes], None] | None = None) -> None:
        """Make a file object that pyrage reads from or writes to.

        Args:
            give: called by `read` with a number of bytes; returns at most so many bytes, b"" at the end. None if the
                file is not read.
            take: called by `write` with the bytes to write. None if the file is not written.
        """
        self._read_plain_bytes, self._queue_ciphertext = give, take

    def read(self, size: int) -> bytes:
        """Return the next bytes of the file, at most `size`; b"" at the end."""
        assert self._read_plain_bytes is not None
        return self._read_plain_bytes(size)

    def write(self, data: bytes) -> int:
        """Pass `data` to the callback, and return its number of bytes."""
        assert self._queue_ciphertext is not None
        self._queue_ciphertext(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: this object has no buffer of its own."""
        return None


class Encryptor:
    """A sink for plain bytes, in front of a sink for ciphertext.

    `write` is called in the threads that call `append` and `finish`, never in one of our own.
    """

    def __init__(self, write: Callable[[bytes], None], recipients: Sequence[str]) -> None:
        """Start a thread that encrypts.

        Args:
            write: called with ciphertext, in order.
            recipients: public keys of age or ssh, or files with some.

        Raises:
            UsageError: a recipient is not one, or there are none. MissingPackage: pyrage is not installed.
        """
        self._keys = parse_recipients(recipients)
        self._write = write
        self._changed = threading.Condition()
        self._plain: deque[bytes] = deque()
        self._encrypted: deque[bytes] = deque()
        self._plain_bytes = self._encrypted_bytes = 0
        self._ended = self._closed = self._done = False
        self._error: BaseException | None = None
        self._at_hand = memoryview(b"")  # of the thread alone
        self._thread = threading.Thread(target=self._encrypt, name="ckpttool-age", daemon=True)
        self._thread.start()

    def append(self, data: bytes | memoryview) -> None:
        """Encrypt more plain bytes; `data` is not kept. Waits while a queue is full, and may call `write`.

        Raises:
            CkpttoolError: encryption failed.
        """
        if self._ended:
            raise AssertionError("plain bytes after the end")
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE):
            piece = bytes(view[at : at + _PIECE])
            while not self._try_to_queue_piece(piece):
                pass

    def finish(self) -> None:
        """Encrypt the rest and pass it to `write`.

        Raises:
            CkpttoolError: encryption failed; what was written is incomplete.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        while not self._write_remaining():
            pass
        self._thread.join()

    def close(self) -> None:
        """Stop the thread; ciphertext that was not passed on is lost."""
        self._stop_encryption()
        self._thread.join()
        self._plain.clear()
        self._encrypted.clear()

    def _try_to_queue_piece(self, piece: bytes) -> bool:
        """Queue a piece of plain bytes, or instead pass ciphertext to `write`, if enough of it is ready.

        Returns:
            Whether the piece was queued; if not, call it again.

        Raises:
            CkpttoolError: encryption failed or was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(piece) or self._should_write() or self._done or self._closed)
            self._raise_if_failed()
            if not self._should_write():
                self._plain.append(piece)
                self._plain_bytes += len(piece)
                self._changed.notify_all()
                return True
        self._write_ready()
        return False

    def _has_room(self, piece: bytes) -> bool:
        """Return whether a piece fits into the queue of plain bytes."""
        return self._plain_bytes + len(piece) <= WAITING and len(self._plain) < _MOST

    def _should_write(self) -> bool:
        """Return whether there is enough ciphertext for a call of `write`: switching threads every 64 KiB is slow."""
        return self._encrypted_bytes >= _PIECE

    def _write_remaining(self) -> bool:
        """Wait for ciphertext after the last plain bytes, and pass it to `write`.

        Returns:
            Whether all ciphertext has been written; if not, call it again.

        Raises:
            CkpttoolError: encryption failed or was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._should_write() or self._done or self._closed)
            self._raise_if_failed()
            if not self._encrypted:
                return True
        self._write_ready()
        return False

    def _write_ready(self) -> None:
        """Pass all ciphertext that is ready to `write`. If `write` raises, encryption is stopped and the exception
        passed on."""
        with self._changed:
            ready = b"".join(self._encrypted)
            self._encrypted.clear()
            self._encrypted_bytes = 0
            self._changed.notify_all()
        try:
            self._write(ready)
        except BaseException:
            self._stop_encryption()
            raise

    def _raise_if_failed(self) -> None:
        """Raise CkpttoolError if encryption failed or was given up."""
        if self._closed:
            raise CkpttoolError("encryption was abandoned; the file that was written is incomplete.")
        if self._error is not None:
            raise CkpttoolError(f"encryption failed ({self._error}); the file that was written is incomplete.")

    def _stop_encryption(self) -> None:
        """Make the thread that encrypts stop, and later calls fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # what follows runs in the thread

    def _encrypt(self) -> None:
        """Encrypt until the plain bytes end. This is what the thread runs; an exception is kept in `_error` for the
        other threads."""
        error: BaseException | None = None
        try:
            _import_pyrage().encrypt_io(
                _CallbackFile(give=self._read_plain_bytes), _CallbackFile(take=self._queue_ciphertext), self._keys
            )
        except BaseException as e:
            error = e
        with self._changed:
            self._done, self._error = True, error
            self._changed.notify_all()

    def _read_plain_bytes(self, size: int) -> bytes:
        """Return the next plain bytes from the queue, at most `size`; b"" at the end. pyrage calls this, and it waits
        for them."""
        if not self._at_hand:
            with self._changed:
                self._changed.wait_for(lambda: self._plain or self._ended or self._closed)
                if self._closed:
                    raise _Closed
                if self._plain:
                    self._at_hand = memoryview(self._plain.popleft())
                    self._plain_bytes -= len(self._at_hand)
                    self._changed.notify_all()
        out = bytes(self._at_hand[:size])
        self._at_hand = self._at_hand[len(out) :]
        return out

    def _queue_ciphertext(self, data: bytes) -> None:
        """Add ciphertext from pyrage to the queue; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._encrypted_bytes + len(data) <= WAITING or self._closed)
            if self._closed:
                raise _Closed
            self._encrypted.append(data)
            self._encrypted_bytes += len(data)
            if self._should_write():
                self._changed.notify_all()


# --------------------------------------------------------------------------------------------------------- reading


class _ReadAhead:
    """The bytes of a file, read ahead; keeps errors, which pyrage would turn into text."""

    def __init__(self, source: Source, file: str, progress: Callable[[int, int], None]) -> None:
        """Prepare to read a file; `progress` is called with (bytes read, bytes of the file)."""
        self.source, self.file, self.progress = source, file, progress
        self.size = source.size(file)
        self.at = 0  # of what is read ahead
        self.ahead = memoryview(b"")
        self.error: BaseException | None = None

    def give(self, size: int) -> bytes:
        """Return the next bytes of the file to pyrage, at most `size`; b"" at the end."""
        try:
            if not self.ahead and self.at < self.size:
                n = min(_PIECE, self.size - self.at)
                self.ahead = memoryview(self.source.read(self.file, self.at, n))
                self.at += n
                self.progress(self.at, self.size)
        except BaseException as e:
            self.error = e
            raise
        out = bytes(self.ahead[:size])
        self.ahead = self.ahead[len(out) :]
        return out


class _PieceWriter:
    """Collects plain bytes, so that `write` gets large pieces."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Collect plain bytes for `write`, which is called with at least 1 MiB of them, and with the rest."""
        self.out, self.total = write, 0
        self.held = bytearray()
        self.error: BaseException | None = None

    def take(self, data: bytes) -> None:
        """Collect plain bytes from pyrage, and pass them to `write` when there is 1 MiB of them."""
        self.held += data
        self.total += len(data)
        if len(self.held) >= _PIECE:
            self.flush()

    def flush(self) -> None:
        """Pass the collected bytes to `write`; what that raises is also kept in `error`."""
        data, self.held = bytes(self.held), bytearray()
        try:
            if data:
                self.out(data)
        except BaseException as e:
            self.error = e
            raise


def decrypt(
    source: Source,
    file: str,
    identities: Sequence[object],
    write: Callable[[bytes], None],
    progress: Callable[[int, int], None],
) -> None:
    """Decrypt a file, in constant memory.

    Bytes written before an error are authentic but incomplete: discard them.

    Args:
        identities: keys, as `parse_identities` returns them.
        write: called with the plain bytes, in order.
        progress: called with (bytes of the file read, bytes of the file).

    Raises:
        Corrupt: it is not an age file, or is damaged or cut; with the place. UsageError: no identity opens it.
        MissingPackage: pyrage is not installed. Anything that reading, `write` or `progress` raises.
    """
    pyrage = _import_pyrage()
    what = f"{source.root}/{file}"
    start = _find_payload_start(source, file, what)
    reader, out = _ReadAhead(source, file, progress), _PieceWriter(write)
    try:
        pyrage.decrypt_io(_CallbackFile(give=reader.give), _CallbackFile(take=out.take), list(identities))
        out.flush()
    except Exception as e:
        for inner in (reader.error, out.error):
            if inner is not None:
                raise inner from None
        if isinstance(e, pyrage.DecryptError):
            if "matching keys" in str(e):
                raise UsageError(
                    f"{what}: none of the {len(identities)} identities opens it. It was encrypted for others, or its "
                    "header is damaged.",
                    code="CKPT0218",
                ) from None
            raise Corrupt(
                f"{what}: the header of the age file (bytes 0..{start}) is damaged: {e}.", code="CKPT0425"
            ) from None
        if not isinstance(e, OSError):
            raise
        place = start + out.total // _CHUNK * (_CHUNK + _TAG)
        end = min(place + _CHUNK + _TAG, reader.size)
        raise Corrupt(
            f"{what}: the ciphertext is damaged or cut at bytes {place}..{end} of {reader.size} ({e}); the {out.total} "
            "plain bytes before that are intact. Fetch the file again.",
            code="CKPT0425",
        ) from None


def _find_payload_start(source: Source, file: str, what: str) -> int:
    """Return the offset in an age file at which the encrypted chunks begin, after its header.

    Args:
        what: the path of the file, for messages.

    Raises:
        Corrupt: the file has no header, the header does not end, or the file ends right after it.
    """
    size = source.size(file)
    head = source.read(file, 0, min(size, _MAX_HEADER))
    if not head.startswith(_MAGIC):
        raise Corrupt(f"{what} is not an age file, or its first bytes are damaged.", code="CKPT0425")
    mac = head.find(b"\n--- ")
    end = head.find(b"\n", mac + 1)
    if mac < 0 or end < 0:
        raise Corrupt(
            f"{what}: the header of the age file does not end within {len(head)} bytes; damaged or cut.",
            code="CKPT0425",
        )
    if end + 1 + _NONCE + _TAG > size:
        raise Corrupt(
            f"{what} ends at byte {size}, before the first piece of ciphertext. The copy is incomplete.",
            code="CKPT0403",
        )
    return end + 1 + _NONCE


# ------------------------------------------------------------------------------------------------------------- keys


def parse_recipients(texts: Sequence[str]) -> list[object]:
    """Return public keys as objects of pyrage.

    Args:
        texts: "age1...", "ssh-ed25519 ...", "ssh-rsa ...", or files with such a key a line and comments after "#".

    Raises:
        UsageError: one is none of these, or there are none, or too many. MissingPackage: pyrage is not installed.
    """
    pyrage = _import_pyrage()
    out: list[object] = []
    for text in texts:
        if text.startswith(("age1", "ssh-")):
            out.append(_parse_recipient(text, "the recipient"))
            continue
        lines = _parse_key_lines(_read_key_file(text, "recipient"), text)
        found = [_parse_recipient(line, f"{text}, line {i}, the recipient") for i, line in lines]
        if not found:
            raise UsageError(f"{text} holds no recipients.", code="CKPT0218")
        out += found
    if not out:
        raise UsageError(
            "encryption needs a recipient: age1..., an ssh public key, or a file with some.", code="CKPT0218"
        )
    if len(pyrage.encrypt(b"", out)) > _MAX_HEADER:
        raise UsageError(
            f"{len(out)} recipients are too many: their lines in the header of the age file exceed "
            f"{_MAX_HEADER} bytes.",
            code="CKPT0218",
        )
    return out


def _parse_recipient(text: str, what: str) -> object:
    """Parse one public key, and return it as an object of pyrage.

    Args:
        text: the key, "age1..." or "ssh-...".
        what: how messages name it.

    Raises:
        UsageError: it is not a public key, or is a secret key.
    """
    import pyrage

    if _is_secret_key(text):
        raise UsageError(f"{what}, is a secret key; give the public one.", code="CKPT0218")
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError:
        raise UsageError(
            f"{what}, is not a public key of age (age1...) or ssh (ssh-ed25519, ssh-rsa), or contains a typing error. "
            "Keys of age plugins are not supported.",
            code="CKPT0218",
        ) from None


def parse_identities(files: Sequence[str]) -> list[object]:
    """Return secret keys as objects of pyrage.

    Args:
        files: age identity files, or ssh private keys without a password.

    Raises:
        UsageError: one of them is neither, or there are none. MissingPackage: pyrage is not installed.
    """
    pyrage = _import_pyrage()
    out: list[object] = []
    for file in files:
        data = _read_key_file(file, "identity")
        try:
            if data.lstrip().startswith(b"-----BEGIN") and b"PRIVATE KEY" in data[:200]:
                out.append(pyrage.ssh.Identity.from_buffer(data))
                continue
            found = [pyrage.x25519.Identity.from_str(line) for _, line in _parse_key_lines(data, file)]
        except pyrage.IdentityError as e:
            locked = "decrypted first" in str(e)
            more = (
                "it has a password; take a copy without"
                if locked
                else "neither an age identity nor an ssh-ed25519 or ssh-rsa key"
            )
            raise UsageError(f"{file} cannot be used as an identity: {more}.", code="CKPT0218") from None
        if not found:
            raise UsageError(f"{file} holds no identity.", code="CKPT0218")
        out += found
    if not out:
        raise UsageError("decryption needs an identity: a file with an age or ssh private key.", code="CKPT0218")
    return out


def _parse_key_lines(data: bytes, file: str) -> list[tuple[int, str]]:
    """Return (line number, text) of the lines of a key file that are neither empty nor comments.

    Args:
        data: the content of the file.
        file: its name, for messages.

    Raises:
        UsageError: the content is encrypted or not text.
    """
    if data.startswith((_MAGIC, b"-----BEGIN AGE ENCRYPTED FILE")):
        raise UsageError(f"{file} is encrypted itself; decrypt it first (age -d).", code="CKPT0218")
    try:
        lines = [line.strip() for line in data.decode().split("\n")]
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not text; keys are.", code="CKPT0218") from None
    return [(i, line) for i, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _read_key_file(file: str, kind: str) -> bytes:
    """Return the first MiB of a key file.

    Args:
        kind: "recipient" or "identity", for messages.

    Raises:
        UsageError: the file cannot be read, or `file` is a secret key instead of a file name.
    """
    if _is_secret_key(file):
        raise UsageError(f"this is a secret key; give the name of the {kind} file.", code="CKPT0218")
    try:
        with open(os.path.expanduser(file), "rb") as f:
            return f.read(1 << 20)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        kind_of = kind_of_failure(e, UsageError) if isinstance(e, OSError) else UsageError
        raise kind_of(f"the {kind} file {file[:80]!r} cannot be read: {reason}.") from None


def _is_secret_key(text: str) -> bool:
    """Return whether a text is a secret key of age or ssh."""
    return "SECRET-KEY-" in text.upper() or "PRIVATE KEY" in text


def _import_pyrage() -> Any:
    """Return the module pyrage; raises MissingPackage if it is not installed."""
    try:
        import pyrage
    except ImportError as e:
        raise explain_missing_package("encryption", "pyrage", why=str(e)) from None
    return pyrage
