"""One file of a push: its name, size and hashes, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass

from .client import RemoteFile
from .hashing import compute_git_oid
from .virtual_files import Content, VirtualFile

__all__ = ["PushFile"]


@dataclass(frozen=True)
class PushFile:
    """A file to push: its bytes are `data`, the file at `path`, or a content."""

    name: str
    size: int
    sha256: str
    data: bytes | None = None
    path: str | None = None
    content: Content | None = None

    def is_same(self, known: RemoteFile | None) -> bool:
        """Return whether a file on the Hub is this one, by size and hash; False for None, a file that is not there."""
        if known is None or known.size != self.size:
            return False
        return known.sha256 == self.sha256 if known.sha256 is not None else known.oid == self.oid()

    def oid(self) -> str:
        """Compute the id, in hex, of the file's git blob, by reading all of the file. The Hub has it for small
        files, which it keeps in git."""
        if self.data is not None:
            return compute_git_oid(self.data)
        if self.path is not None:
            with open(self.path, "rb") as f:
                return compute_git_oid(f.read())
        assert self.content is not None
        with VirtualFile(self.content) as f:
            return compute_git_oid(f.read())

    def sample(self) -> bytes:
        """Return the first 512 bytes of the file, or fewer, by which the Hub recognises text."""
        if self.path is not None:
            with open(self.path, "rb") as f:
                return f.read(512)
        if self.data is None:
            assert self.content is not None
            return self.content.head[:512]
        return self.data[:512]
