"""The options of an export, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ..by_fields import ByFields
from ..errors import UsageError, argument

__all__ = ["ENCRYPTED", "SUFFIX", "ArchiveOptions"]

SUFFIX, ENCRYPTED = ".tar.zst", ".tar.zst.age"  # of the names of archives, plain and encrypted


@dataclass(frozen=True, eq=False, repr=False)
class ArchiveOptions(ByFields):
    """The options of `audit export`.

    `key`, `password`, `certificate`, `chain` sign; `recipients` encrypt; `lock_mode` is that of an object store's lock.
    `epoch` is the time of a reproducible record in seconds (SOURCE_DATE_EPOCH); without it there is none.
    """

    level: int = 1
    shuffle: bool = False
    member_bytes: int = 5_000_000_000
    meta: tuple[tuple[str, str], ...] = ()
    git_commit: str | None = None
    only: tuple[str, ...] | None = None
    reproducible: bool = False
    epoch: int | None = None
    retain: str | None = None
    hold: str | None = None
    lock_mode: str = "governance"
    key: str | None = None
    password: str | None = None
    certificate: str | None = None
    chain: tuple[str, ...] = ()
    recipients: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError if an option is invalid, or lacks another one that it needs."""
        if not 1 <= self.level <= 19:
            raise UsageError(f"{argument('level', self.level)}: it must be from 1 to 19.", code="CKPT0203")
        if self.member_bytes < 1 << 20:
            raise UsageError(
                f"{argument('member_bytes', self.member_bytes)}: it must be at least 1 MiB.", code="CKPT0203"
            )
        if self.lock_mode not in ("governance", "compliance"):
            raise UsageError(
                f"{argument('lock_mode', self.lock_mode)}: it must be governance or compliance.", code="CKPT0203"
            )
        if self.certificate and not self.key:
            raise UsageError(
                f"{argument('certificate')} needs {argument('key')}, the private key of the certificate.",
                code="CKPT0204",
            )
        if self.chain and not self.certificate:
            raise UsageError(f"{argument('chain')} needs {argument('certificate')}.", code="CKPT0204")
        if "" in (self.key, self.certificate, self.git_commit):
            raise UsageError(
                f"{argument('key')}, {argument('certificate')} and {argument('git_commit')} must not be empty.",
                code="CKPT0202",
            )
        if len({k for k, _ in self.meta}) != len(self.meta):
            raise UsageError(f"{argument('meta')}: a key is given twice.", code="CKPT0203")
