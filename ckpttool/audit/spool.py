"""The plain bytes of an encrypted archive while it is read, in a file without a name.

ckpttool decrypts age files only from start to end, and restoring and verifying need random access. So they read from a
spool: a file that is unlinked before the first byte is written, so that the plain bytes disappear with the process,
however it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence

from ..errors import Corrupt, NoSpace, argument, kind_of_failure
from ..storage.destination_protocol import write_error
from ..storage.source import Identity, Source, closed_on_error
from . import encryption
from .archive import ENCRYPTED, SUFFIX

__all__ = ["Spool", "decrypt_to_spool"]


class Spool(Source):
    """One file without a name."""

    local = False

    def __init__(self, folder: str, root: str, name: str) -> None:
        """Create an empty file without a name in `folder`. It stands for the file `name` of the store `root`.

        Raises:
            CkpttoolError: the folder cannot be written to.
        """
        self.root, self.name = root, name
        self._end = 0
        try:
            self._fd, path = tempfile.mkstemp(prefix=".ckpttool-", dir=folder)
            os.unlink(path)
        except OSError as e:
            raise write_error(e, folder) from e

    def append(self, data: bytes) -> None:
        """Append plain bytes to the file.

        Raises:
            NoSpace: they do not fit. CkpttoolError: they cannot be written.
        """
        done = 0
        while done < len(data):
            try:
                done += os.write(self._fd, data[done:])
            except OSError as e:
                if kind_of_failure(e) is not NoSpace:
                    raise write_error(e, self.root) from e
                raise NoSpace(
                    f"{self.root}: the plain bytes of {self.name} do not fit ({e.strerror}); choose a larger "
                    f"{argument('scratch')}.",
                    code="CKPT0803",
                ) from e
        self._end += len(data)

    def list(self, folder: str = "") -> list[str]:
        """Return the name of the one file; [] for any other folder than "", the top one."""
        return [] if folder else [self.name]

    def exists(self, name: str) -> bool:
        """Return whether the one file has this name."""
        return name == self.name

    def size(self, name: str) -> int:
        """Return the number of bytes that were appended so far."""
        return self._end

    def readinto(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; `name` is not looked at.

        Raises:
            Corrupt: the file ends before that.
        """
        got = 0
        while got < len(into):
            n = os.preadv(self._fd, [into[got:]], offset + got)
            if not n:
                raise Corrupt(f"{self.root}/{self.name} ends at byte {offset + got}.", code="CKPT0425")
            got += n

    def identities(self) -> dict[str, Identity]:
        """Return {}: nobody else can reach the file."""
        return {}

    def assert_unchanged(self) -> None:
        """Do nothing: nobody else can reach the file."""

    def close(self) -> None:
        """Delete the bytes, by closing the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def decrypt_to_spool(
    source: Source, file: str, identities: Sequence[str], folder: str, progress: Callable[[str, int, int], None]
) -> tuple[Spool, str]:
    """Decrypt an archive into a temporary file that has no name.

    Args:
        source, file: the store, and the name of the encrypted archive in it.
        identities: files with age identities or ssh private keys.
        folder: where to create the temporary file; it needs as much space as the archive.
        progress: called with ("decrypt", bytes read, bytes in all).

    Returns:
        (a source of the decrypted bytes, the name of the archive in that source).

    Raises:
        UsageError: no identity fits.
        Corrupt: the ciphertext is damaged.
        NoSpace: the folder is full.
    """
    name = file.removesuffix(ENCRYPTED) + SUFFIX
    spool = Spool(folder, source.root, name)
    with closed_on_error([spool]):
        encryption.decrypt(
            source, file, encryption.parse_identities(identities), spool.append, lambda a, b: progress("decrypt", a, b)
        )
    return spool, name
