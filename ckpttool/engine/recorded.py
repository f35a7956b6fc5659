"""ckpttool.json in a checkpoint: where it came from, and the digest that every tensor had when ckpttool wrote it.

`make_record` makes it. It is read once, where a folder is opened to be copied, loaded or verified, and it may be
anybody's: a damaged one, or one about other files than those that are there, is a note and not an error. One that is
about these files must agree with them in names, dtypes, shapes and digests, unless the user says that it should be
ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..bounded_json import parse
from ..by_fields import ByFields
from ..errors import Corrupt, SourceChanged, Unreadable, Unsafe, argument
from ..formats import values
from ..index.checkpoint import Checkpoint, TensorEntry, Value
from ..index.selection import EntrySelection
from ..printable import printable_json
from ..storage.source import Source
from .conservation import list_written_values
from .copy.value_digests import digest_values_without_arrays, state_roots
from .discover import unread_files

if TYPE_CHECKING:
    from .planning import Plan

__all__ = [
    "MOST_RECORD_BYTES",
    "RECORD",
    "RECORD_SCHEMA",
    "Recorded",
    "encode_record",
    "explain_missing",
    "explain_other_digests",
    "make_record",
    "read_record",
]

RECORD = "ckpttool.json"
RECORD_SCHEMA = "ckpttool.record/1"  # records of before 1.0 do not say it
MOST_RECORD_BYTES = 256 << 20  # 10^6 tensors


@dataclass(frozen=True, eq=False, repr=False)
class Recorded(ByFields):
    """What a ckpttool.json says.

    `tensors`   {name: (dtype, shape, BLAKE3 hex)}, tied names without bytes of their own included
    `tied`      those names
    `added_or_dropped`
                names that the layout added, which were not in the source of the conversion, and those it dropped:
                a reader may find others under them, as the step of a whole group
    `made`      {name: data} of values likewise
    `values`    {name: value_digests.value_digest}; None in a record of before they were recorded
    `whole`     values that the files hold as several entries: torch's DCP makes text of the keys of a dict, and an
                entry of each
    `changed`   names of entries that the conversion changed, as its user or the layout asked for
    `files`     the files that were written; None where the record does not say
    `selection` the part of a checkpoint that was written; None where it is a whole one
    `salvage`   {name: "exact", "rebuilt: how" or "missing: why"} of a copy of what was left of a damaged checkpoint
    `problem`   why it cannot be used; None where it can
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...], str]] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    added_or_dropped: frozenset[str] = frozenset()
    made: Mapping[str, object] = field(default_factory=dict)
    values: Mapping[str, str] | None = None
    whole: Mapping[str, Value] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    files: frozenset[str] | None = None
    salvage: Mapping[str, str] = field(default_factory=dict)
    selection: EntrySelection | None = None
    problem: str | None = None

    def expected(self, ckpt: Checkpoint, selection: EntrySelection) -> dict[str, tuple[str, tuple[int, ...], str]]:
        """Return the entries of `tensors` that an opened checkpoint must have, {name: (dtype, shape, digest)}.

        Args:
            selection: the part of it that was opened.
        """
        return {
            n: t for n, t in self.tensors.items() if (n in ckpt.tensors or n not in self.tied) and selection.holds(n)
        }

    def values_of(self, selection: EntrySelection) -> dict[str, str]:
        """Return {canonical name: recorded digest} of the values in a selection; {} if the record has no values."""
        return {n: d for n, d in (self.values or {}).items() if selection.holds(n)}

    def about(self, ckpt: Checkpoint) -> bool:
        """Tell whether this record describes files of the checkpoint; True if it lists no files.

        A DeepSpeed folder may hold the save that ckpttool wrote, and later ones.
        """
        return self.files is None or not ckpt.files or not self.files.isdisjoint(ckpt.files)


def read_record(source: Source) -> Recorded | None:
    """Read ckpttool.json in a folder; None if there is none. If it is damaged, the result has only a `problem`.

    Raises:
        SourceChanged, Unreadable: the file changes while it is read, or the disk fails.
    """
    if not source.exists(RECORD):
        return None
    try:
        found = parse(source.read_all(RECORD, MOST_RECORD_BYTES), RECORD)
        if (schema := found.get("schema", RECORD_SCHEMA)) != RECORD_SCHEMA:
            return Recorded(
                problem=f"{RECORD} is of schema {str(schema)[:60]!r}; this ckpttool knows {RECORD_SCHEMA!r}"
            )
        files, part = found.get("files"), found.get("selection")
        digests = found.get("values")
        return Recorded(
            {n: _parse_tensor_entry(*t) for n, t in found["tensors"].items()},
            tied=frozenset(found["tied"]),
            added_or_dropped=frozenset(
                map(str, [*found.get("added", ()), *(name for name, *_ in found.get("dropped", ()))])
            ),
            made=found.get("made")
            or {n: v.data for n, v in values.from_json_tree(found.get("added_values", {})).items()},
            values=None if digests is None else {str(n): str(d) for n, d in digests.items()},
            whole=values.from_json_tree(found.get("whole_values", {})),
            changed=frozenset(found.get("changed", ())),
            files=frozenset(files) if files else None,
            selection=part
            and EntrySelection(part["only"] and tuple(map(str, part["only"])), tuple(map(str, part["left_out"]))),
            salvage={str(n): str(state) for n, state in found.get("salvage", {}).get("tensors", {}).items()},
        )
    except (SourceChanged, Unreadable):
        raise
    except (Corrupt, Unsafe) as e:
        return Recorded(problem=str(e).rstrip("."))
    except (TypeError, LookupError, ValueError, AttributeError) as e:
        return Recorded(problem=f"{RECORD}: not a record of ckpttool ({type(e).__name__}: {str(e)[:80]})")


def _parse_tensor_entry(dtype: object, shape: Any, digest: object) -> tuple[str, tuple[int, ...], str]:
    """Check the types of a tensor's entry in a record, and return it as (dtype, shape, digest).

    Raises:
        ValueError, TypeError: the entry has other types.
    """
    if type(dtype) is not str or type(digest) is not str or not all(type(n) is int for n in shape):
        raise ValueError("an entry of a tensor is not [dtype, shape, digest]")
    return dtype, tuple(shape), digest


def explain_missing(ckpt: Checkpoint, names: list[str], total: int) -> Corrupt:
    """Return the error for tensors that a record lists and the checkpoint does not have.

    Args:
        names: the missing tensors, at least one.
        total: how many tensors the record lists.
    """
    parts = sorted({n.partition(".")[0] for n in names})
    left = sorted({n.partition(".")[0] for n in ckpt.tensors} - set(parts))
    hint = f"{argument('only', left)}, " if left else ""
    return Corrupt(
        f'{ckpt.root}: {len(names)} of the {total} tensors that {RECORD} lists are not there, first "{names[0]}": '
        "files were removed or replaced after it was written. Take another copy. If it was on purpose, use "
        f"{hint}{argument('ignore_recorded_digests', True)}, or remove {RECORD}.",
        code="CKPT0414",
    )


def explain_other_digests(ckpt: Checkpoint, names: list[str], total: int) -> Corrupt:
    """Return the error for tensors whose digests are not the recorded ones.

    Args:
        names: the tensors, at least one; they are in the checkpoint.
        total: how many tensors were compared.
    """
    chunks = ckpt.tensors[names[0]].chunks
    where = f" in {ckpt.files[chunks.file[0]]}" if len(chunks) else ""
    return Corrupt(
        f"{ckpt.root}: {len(names)} of {total} tensors do not have the digest that was recorded for them, first "
        f'"{names[0]}"{where}. They were damaged or changed after the record was written. Take another copy. If they '
        f"were changed on purpose, use {argument('ignore_recorded_digests', True)}, or remove the "
        f"{RECORD} beside them.",
        code="CKPT0414",
    )


def make_record(planned: Plan, wanted: Mapping[str, TensorEntry], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what ckpttool.json says of a destination, as plain data: where it came from (on the Hub: from which
    commit), the digest of every tensor and value, and what of the source was changed or dropped.

    Args:
        wanted: the source's tensors that the destination holds, with the dtypes they have there.
        digests: {tensor: BLAKE3 in hex}, by canonical name.
    """
    ckpt, draft, account = planned.opened.checkpoint, planned.draft, planned.account
    commit, held = planned.opened.source.commit, list_written_values(draft, wanted)
    rebuilt, selection = ckpt.salvage.rebuilt if ckpt.salvage else {}, planned.opened.selection
    digests = {n: d for n, d in digests.items() if n not in rebuilt}  # of what is exact
    return {
        "schema": RECORD_SCHEMA,
        "tool": "ckpttool",
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "layout": draft.checkpoint.layout,
        "world_size": draft.checkpoint.world_size,
        "source": {
            "name": os.path.basename(ckpt.root),
            "layout": ckpt.layout,
            "world_size": ckpt.world_size,
            "trainer": ckpt.trainer,
            **({"url": ckpt.root, "commit": commit} if commit else {}),
            **({"recorded_digests": "ignored"} if ckpt.ignored_digests else {}),
        },
        **({"merged": ckpt.merged} if ckpt.merged else {}),
        **({} if selection.by_component else {"selection": asdict(selection)}),
        **({"renamed": planned.opened.renamed} if planned.opened.renamed else {}),
        **(ckpt.derived or {}),
        "digest": state_roots(
            replace(ckpt, tensors={n: t for n, t in wanted.items() if n not in rebuilt}, values=held), digests
        ),
        **(
            {"salvage": {"problems": ckpt.salvage.problems, "tensors": ckpt.salvage.states(wanted, held)}}
            if ckpt.salvage and (ckpt.salvage.problems or ckpt.salvage.missing or rebuilt)
            else {}
        ),
        **(
            {"not_carried": aside}
            if (aside := [d for d in draft.dropped if d.why.endswith(unread_files.NOT_READ)])
            else {}
        ),
        **({"lost": draft.lost} if draft.lost else {}),
        **({"quantized": about} if (about := draft.summary.get("quantized")) else {}),
        "tied": draft.aliases,
        "added": draft.synthesized_tensors,
        "added_values": values.to_json_tree({n: Value((n,), x) for n, x in draft.synthesized_values.items()}),
        "whole_values": values.to_json_tree(draft.taken_apart),
        "changed": {**draft.changed, **account.changed},
        "dropped": account.dropped,
        "files": {f.name: {"bytes": f.size} for f in draft.files},
        "values": digest_values_without_arrays(held),
        "tensors": {n: [wanted[n].dtype, list(wanted[n].shape), d] for n, d in digests.items()},
    }


def encode_record(record: Mapping[str, object]) -> bytes:
    """Encode ckpttool.json; a byte of a path that is not UTF-8 becomes a JSON escape."""
    return (printable_json(record) + "\n").encode()
