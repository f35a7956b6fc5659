"""Find the deltas at a path, put them in the order in which they are applied, and describe them: what `inspect` and
`verify` say of one, and what `--apply` begins with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from .. import layouts
from ..errors import Unsupported
from ..formats.delta_streams import check_payload
from ..formats.deltas import Delta, find_delta, find_deltas_below
from ..options import silent
from ..printable import Shown, count_noun, list_first, quote_path
from ..storage import urls
from .copy.tensor_digests import tensor_digests
from .discover.unread_files import human
from .own_deltas import get_delta_facts, open_own_delta
from .recorded import explain_other_digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .opening import OpenCheckpoint

__all__ = ["DeltaSummary", "find_deltas", "sort_delta_chain", "summarise_deltas"]


def find_deltas(where: layouts.Place, shown: str) -> list[Delta]:
    """Find the delta that a file is, or all deltas in a folder in the order in which they are applied; [] if there are
    none.

    Args:
        shown: path of the place, for messages.

    Raises:
        Corrupt, Unsafe, Unsupported: a delta cannot be read, or those of a folder are no chain.
    """
    found = find_delta(where.source, where.file, shown)
    if found is not None:
        return [found]
    return [] if where.file is not None else sort_delta_chain(find_deltas_below(where.source, shown), shown)


def sort_delta_chain(deltas: list[Delta], where: str) -> list[Delta]:
    """Return the deltas of a folder in the order in which they are applied: each one after the delta of its base
    version.

    Args:
        where: path of the folder, for messages.

    Raises:
        Unsupported: they are of several programs, lack versions, or a version is missing or occurs twice.
    """
    if len(deltas) < 2:
        return deltas
    programs, versions = {d.program for d in deltas}, [d.version for d in deltas]
    if len(programs) > 1 or None in versions or len(set(versions)) < len(versions):
        why = "of several programs" if len(programs) > 1 else "without a version, or two of one version"
        raise Unsupported(
            f"{where} holds deltas {why}: {list_first([d.where for d in deltas], 4)}. Give them one by one, in order.",
            code="CKPT0342",
        )
    bases = {d.version: _get_base_version(d) for d in deltas}
    first = [d for d in deltas if bases[d.version] not in bases]
    after = {bases[d.version]: d for d in deltas}
    chain = first[:1]
    while chain and chain[-1].version in after:
        chain.append(after[chain[-1].version])
    if len(chain) < len(deltas):
        roots = sorted({f"{d.version} on {bases[d.version]}" for d in first})
        raise Unsupported(
            f"{where} holds {len(deltas)} deltas that are no chain: a version is missing, or several are made from "
            f"one. They begin with {list_first(roots, 4)}. Fetch what is missing, or give those that belong together "
            "one by one.",
            code="CKPT0342",
        )
    return chain


def _get_base_version(delta: Delta) -> str | None:
    """Return the version that a delta applies to; None if it is unknown.

    If the delta does not record that version, and the delta's own version is a number, the number before that is
    returned.
    """
    if delta.base_version is None and (delta.version or "").isdigit():
        return str(int(str(delta.version)) - 1)
    return delta.base_version


@dataclass(repr=False)
class DeltaSummary(Shown):
    """What a delta, or a chain of deltas, is. Sizes are in bytes.

    `deltas` has a row for each, in the order in which they are applied: path, version, base_version, tensors, bytes.
    `checksums` is their kind, None where there are none; they are those of the tensors after the delta was applied.
    `read` is whether every byte of the changes was decoded.
    """

    path: str
    program: str
    version: str | None
    base_version: str | None
    tensors: int
    bytes: int
    checksums: str | None
    read: bool
    deltas: list[dict[str, object]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain data, {name of a field: value}, and "kind": "delta"."""
        return {"kind": "delta", **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield lines of text: kind and version, versions of a chain, sizes, what was checked, and the command that
        applies it."""
        several = len(self.deltas) > 1
        on = f" on version {self.base_version}" if self.base_version is not None else ""
        version = f", version {self.version}{on}" if self.version is not None else ""
        what = f"a chain of {len(self.deltas)} deltas" if several else "a delta"
        yield f"{self.path}: {what} of {self.program}{version}, not a checkpoint"
        for row in self.deltas if several else ():
            yield f"  version {row['version']}  {count_noun(int(str(row['tensors'])), 'tensor')}  {row['path']}"
        yield f"{count_noun(self.tensors, 'tensor')} changed, {human(self.bytes)}"
        if self.read:
            yield "ok: every change was decoded, and nothing is missing or left over"
        if self.checksums is None:
            yield "it has no checksums: what it is applied to can be compared by names and dtypes only"
        else:
            yield (
                f"its checksums ({self.checksums}) are those of the tensors after it was applied, and are compared then"
            )
        yield f"next: ckpttool convert BASE OUT --apply {quote_path(self.path)}"


def summarise_deltas(path: str, read_data: bool) -> DeltaSummary | None:
    """Describe the delta or the chain of deltas at a path or URL; None if there is none.

    Args:
        read_data: also decode all changes, to find damage.

    Raises:
        Corrupt, Unsafe, Unsupported: a delta cannot be read, or a change is damaged.
    """
    where, shown = layouts.place(path), urls.redact_url(path) if urls.is_url(path) else path
    with where.source:
        if (own := open_own_delta(where)) is not None:
            return _summarise_own_delta(own, shown, read_data)
        deltas = find_deltas(where, shown)
        if not deltas:
            return None
        for delta in deltas if read_data else ():
            for patch in delta.patches.values():
                check_payload(delta, patch)
        kinds = {p.checksum[0] for d in deltas for p in d.patches.values() if p.checksum}
        kinds |= {"sha256 of all weights" for d in deltas if d.sha256}
        return DeltaSummary(
            path=shown,
            program=deltas[0].program,
            version=deltas[-1].version,
            base_version=deltas[0].base_version,
            tensors=len({n for d in deltas for n in d.patches}),
            bytes=sum(p.stored_bytes for d in deltas for p in d.patches.values()),
            checksums=", ".join(sorted(kinds)) or None,
            read=read_data,
            deltas=[_describe_delta(d) for d in deltas],
        )


def _summarise_own_delta(own: OpenCheckpoint, shown: str, read_data: bool) -> DeltaSummary:
    """Describe a delta that ckpttool wrote.

    Args:
        shown: its path, for messages.
        read_data: also compare the digests of all its tensors.

    Raises:
        Corrupt: a tensor does not have the recorded digest.
    """
    ckpt, facts = own.checkpoint, get_delta_facts(own)
    found = tensor_digests(ckpt.tensors, own.source, ckpt.files, ckpt.records, silent, "verify") if read_data else {}
    if wrong := sorted(n for n, digest in found.items() if digest != ckpt.recorded[n]):
        raise explain_other_digests(ckpt, wrong, len(found))
    same = {
        n for n, (origin, digest) in facts["tensors"].items() if origin and facts["base_tensors"][origin][2] == digest
    }
    row: dict[str, object] = {
        "path": shown,
        "version": facts["result"][:16],
        "base_version": facts["base"][:16],
        "tensors": len(ckpt.tensors) - len(same),
        "bytes": sum(i[2] for i in own.source.identities().values()),
    }
    return DeltaSummary(
        path=shown,
        program="ckpttool",
        version=facts["result"][:16],
        base_version=facts["base"][:16],
        tensors=len(ckpt.tensors) - len(same),
        bytes=int(str(row["bytes"])),
        checksums="blake3",
        read=read_data,
        deltas=[row],
    )


def _describe_delta(delta: Delta) -> dict[str, object]:
    """Return the entry of a delta in `DeltaSummary.deltas`."""
    return {
        "path": delta.where,
        "version": delta.version,
        "base_version": delta.base_version,
        "tensors": len(delta.patches),
        "bytes": sum(p.stored_bytes for p in delta.patches.values()),
    }
