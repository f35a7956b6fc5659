"""Plans as files: what `convert --dry-run --plan` writes for review, and `apply` computes again and compares before the
first byte is written.

    {"ckpttool": version, "id": plan_id,
     "source": {"path", "layout", "trainer", "world_size", "bytes", "files", "tensors", "values"},
     "destination": {"path", "layout", "world_size", "tensors", "values", "bytes", "free_bytes_needed", "dtypes",
                     "files"},
     "options": {"reading", "writing", "layout", "running"},
     "entries": {"kept": how many, "changed": {name: how}, "dropped": {name: {"bytes", "why"}}, "added"},
     "notes"}

Each file, tensor, value and change is a line, so that `git diff` of two plans shows what differs. A file of the source
has its size, time and a digest of its identity, a tensor its dtype, shape and a digest of where it lies, a value the
digest of its data. Paths are absolute, since the identity of the source is that of files at a place. Options that
are not listed have their defaults. How fast it is done (threads, workers, memory) is no part of a plan, and neither are
credentials: a URL with some is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3

from .. import layouts
from .._version import __version__
from ..bounded_json import encode, parse
from ..errors import Differs, SourceChanged, Unsafe, Unsupported, UsageError, argument
from ..index.checkpoint import Checkpoint, TensorEntry, Value
from ..index.draft import Draft
from ..options import OpenOptions, RunOptions, WriteRequest
from ..printable import count_noun, printable_json
from ..storage import urls
from ..storage.local_file import replace_file
from ..storage.source import Identity, Source
from .copy.value_digests import value_digest

if TYPE_CHECKING:
    from .planning import Plan

__all__ = [
    "compute_plan_id",
    "describe_plan",
    "parse_plan",
    "read_plan",
    "refuse_outdated_plan",
    "save_plan",
    "with_absolute_paths",
]

R = TypeVar("R")

_MOST_BYTES = 256 << 20  # 10^6 tensors
_DEPTH = 3  # what is deeper is a line: a file, a tensor, an option
_SHOWN = 5  # differences of one kind in a message
_WHAT = "a file that `Plan.save` or a dry run of `ckpttool convert` wrote"
#: Fields of requests that a plan has no place for: other commands' (merge, average), functions of a program
#: (change), and how fast it is done.
_LEFT_OUT = frozenset(("merge", "average", "change", "options", "max_memory_bytes", "threads", "workers", "progress"))


def with_absolute_paths(reading: OpenOptions) -> OpenOptions:
    """Return the options with absolute paths, so that they do not depend on the current folder; ids of the Hub are
    unchanged."""

    def absolute(path: str | os.PathLike[str] | None) -> str | None:
        """Make the path of a file that exists absolute; anything else, such as a name on the Hub, stays."""
        text = None if path is None else os.fspath(path)
        return urls.make_path_absolute(text) if text is not None and os.path.lexists(text) else text

    return replace(
        reading,
        config=absolute(reading.config),
        like=absolute(reading.like),
        flat_layout=absolute(reading.flat_layout),
        fill_from=absolute(reading.fill_from),
        apply=reading.apply and [str(absolute(path)) for path in reading.apply],
    )


def compute_plan_id(source: Source, draft: Draft, target: layouts.Layout, *asked: object) -> str:
    """Compute a digest, in hex, of everything that decides the bytes of the destination: source, draft, and requests.

    Machines that see the same files compute the same id. The draft says where every byte comes from, so it also covers
    files besides the source, such as a config.json with the sizes of heads. If the source has no version ids, a random
    salt is mixed in, so that the id never matches an earlier run.

    Args:
        asked: dataclasses with the options of the conversion.
    """
    h = blake3(b"" if source.has_versions() else os.urandom(32))
    identities = sorted((name, *identity[1:]) for name, identity in source.identities().items())  # without the device
    h.update(
        json.dumps([__version__, target.name, source.root, identities, list(map(repr, asked))], default=str).encode()
    )
    for f in draft.files:
        h.update(os.fsencode(f"{f.name} {f.size}\n"))
        if not callable(f.head):
            h.update(f.first_bytes())
    for name, entry in draft.checkpoint.tensors.items():
        h.update(os.fsencode(f"{name} {draft.aliases.get(name)}\n"))
        for t in (entry, draft.sources.get(name)):
            if t is not None:
                h.update(_encode_tensor_layout(t))
    return h.hexdigest()


def _encode_tensor_layout(t: TensorEntry) -> bytes:
    """Encode dtype, shape and chunks of a tensor as bytes, for hashing."""
    c = t.chunks
    said = f"{t.dtype} {t.shape} {len(c)} {c.strides or ''} {c.zstd or ''}\n"
    return b"".join((said.encode(), c.file, c.offset, c.length, c.start, c.shape))


def describe_plan(planned: Plan, running: RunOptions) -> dict[str, Any]:
    """Return the content of a plan file for a conversion that has not begun, as plain data: {"ckpttool", "id",
    "source", "destination", "options", "entries", "notes"}, whose contents the module lists. Two descriptions are equal
    if, and only if, the conversions write the same bytes to the same place.

    Args:
        planned: the conversion.
        running: the options of running it, such as `force` and `verify`.

    Raises:
        UsageError: the source was given as an object, functions change it, or a URL has credentials.
        Unsupported: the server of the source gives no versions of its files.
    """
    opened, draft, source = planned.opened, planned.draft, planned.source
    if not isinstance(planned.src, (str, os.PathLike)):
        raise UsageError(
            "A plan file needs the path or URL of its source; this one was given as an open source.", code="CKPT0223"
        )
    if planned.writing.change:
        raise UsageError("A plan file has no place for functions that change tensors.", code="CKPT0223")
    if not opened.source.has_versions():
        raise Unsupported(
            "The server gives no versions of the source's files, so that nothing would show a change before the plan "
            "is applied. Download them first.",
            code="CKPT0340",
        )
    there = draft.checkpoint
    options = {
        "reading": _list_set_fields(planned.reading),
        "writing": _list_set_fields(planned.writing),
        "layout": _list_set_fields(planned.writing.options),
        "running": _list_set_fields(running),
    }
    written = [*there.values.values(), *(Value((n,), x) for n, x in draft.synthesized_values.items())]
    src, dst = urls.make_absolute(os.fspath(planned.src)), urls.make_absolute(planned.dst)
    _refuse_credentials(src, dst, options)
    return {
        "ckpttool": __version__,
        "id": planned.id,
        "source": {
            "path": src,
            "layout": opened.layout.name,
            "trainer": source.trainer,
            "world_size": source.world_size,
            "bytes": source.nbytes,
            "files": {n: _describe_identity(i) for n, i in sorted(opened.source.identities().items())},
            "tensors": {
                n: [t.dtype, list(t.shape), _hash_short(_encode_tensor_layout(t))]
                for n, t in sorted(source.tensors.items())
            },
            "values": {n: value_digest(v)[:32] for n, v in sorted(source.values.items())},
        },
        "destination": {
            "path": dst,
            "layout": planned.target.name,
            "world_size": there.world_size,
            "tensors": planned.held_tensors,
            "values": _hash_short("".join(map(value_digest, written)).encode()),
            "bytes": draft.nbytes,
            "free_bytes_needed": draft.needed_bytes,
            "dtypes": _count_bytes_by_dtype(there),
            "files": {f.name: f.size for f in draft.files},
        },
        "options": {name: given for name, given in options.items() if given},
        "entries": {
            "kept": len(planned.account.kept),
            "changed": dict(sorted(planned.account.changed.items())),
            "dropped": {d.name: {"bytes": d.nbytes, "why": d.why} for d in sorted(planned.account.dropped)},
            "added": sorted(planned.account.added),
        },
        "notes": [*opened.checkpoint.notes, *draft.notes],
    }


def save_plan(path: str | os.PathLike[str], planned: Plan, running: RunOptions) -> None:
    """Write the description of a conversion to a file.

    Args:
        path: the file; an earlier plan there is replaced.

    Raises:
        UsageError: something else is at `path`, or it lies in the source; or as `describe_plan` says.
        Unsupported: as `describe_plan` says.
        CkpttoolError: the file cannot be written.
    """
    found, where = describe_plan(planned, running), urls.make_path_absolute(path)
    inside = not urls.is_url(found["source"]["path"]) and os.path.realpath(found["source"]["path"])
    if inside and os.path.realpath(where).startswith(f"{inside}/"):
        raise UsageError(
            f"{where} is inside the source, which must not change. Write the plan elsewhere.", code="CKPT0211"
        )
    if os.path.lexists(where) and not (os.path.isfile(where) and _begins_as_plan(where)):
        raise UsageError(
            f"{where} is there and is no plan, so it is not replaced. Write the plan to another file.", code="CKPT0211"
        )
    replace_file(where, (printable_json(found, depth=_DEPTH) + "\n").encode())


def read_plan(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read a plan file and return its JSON object, of which only the types of the main keys were checked. Its content
    is not trusted; `refuse_outdated_plan` compares all of it with a new plan.

    Raises:
        UsageError: there is no such file, or it is no plan.
        Corrupt: it is not JSON.
        Unsafe: it is too large or nested too deeply, has a key twice, or has characters that do not print.
    """
    where = urls.make_path_absolute(path)
    if os.path.exists(where) and not os.path.isfile(where):  # reading a FIFO would wait for ever
        raise UsageError(f"{where} is not a regular file. Give {_WHAT}.", code="CKPT0226")
    try:
        with open(where, "rb") as f:
            data = f.read(_MOST_BYTES + 1)
    except OSError as e:
        raise UsageError(f"{where} cannot be read: {e.strerror}. Give {_WHAT}.", code="CKPT0226") from e
    if len(data) > _MOST_BYTES:
        raise Unsafe(f"{where}: more than {_MOST_BYTES >> 20} MiB, which no plan has.", code="CKPT0704")
    found = parse(data, where)
    if not data.decode().translate(dict.fromkeys(map(ord, "\t\r\n"))).isprintable():
        raise Unsafe(
            f"{where} has characters that do not print, which may hide from a reader what it says.", code="CKPT0703"
        )
    wanted = {"ckpttool": str, "id": str, "source": dict, "destination": dict, "options": dict}
    if not isinstance(found, dict) or not all(type(found.get(k)) is kind for k, kind in wanted.items()):
        raise UsageError(f"{where} is no plan of ckpttool. Give {_WHAT}.", code="CKPT0226")
    return found


def parse_plan(plan: Mapping[str, Any]) -> tuple[str, str, OpenOptions, WriteRequest, RunOptions]:
    """Return the arguments of the conversion in a plan: (source, destination, reading, writing, running).

    Raises:
        UsageError: a path is not absolute, or an option is unknown to this version or has another type.
    """
    src, dst = (plan[side].get("path") for side in ("source", "destination"))
    for text in (src, dst):
        if not isinstance(text, str) or urls.make_absolute(text) != text:
            raise UsageError(f"the plan says {text!r} for a path; plans have absolute paths.", code="CKPT0226")
    given = plan["options"]
    if odd := sorted(given.keys() - {"reading", "writing", "layout", "running"}):
        raise UsageError(f"the plan has options for {odd[0]!r}, which this version does not know.", code="CKPT0226")
    writing = _make_request(WriteRequest, given.get("writing", {}))
    if "layout" in given:
        kind = layouts.choose_target_layout(writing.to, dst).options
        if kind is None:
            raise UsageError(f"the plan has options of a layout, and {writing.to} has none.", code="CKPT0226")
        writing = replace(writing, options=_make_request(kind, given["layout"]))
    reading = _make_request(OpenOptions, given.get("reading", {}))
    return src, dst, reading, writing, _make_request(RunOptions, given.get("running", {}))


def refuse_outdated_plan(plan: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise if a plan differs from what would be done now.

    Args:
        plan: as `read_plan` returned it.
        now: the same conversion, as `describe_plan` describes it now.

    Raises:
        SourceChanged: the source is not the one that was planned.
        Differs: the source is the same, but something else would be written, or another version of ckpttool runs.
    """
    rows = list(_list_differences(plan, parse(encode(now), "the plan"), ()))
    if not rows:
        return
    rows = [row for row in rows if row[0] != ("id",)] or rows  # it follows from the others
    changed = any(at[0] == "source" for at, _ in rows)
    of: dict[tuple[str, ...], list[str]] = {}
    for at, text in rows:
        of.setdefault(at[:2], []).append(f"  {'.'.join(at)}: {text}")
    for parts in of.values():
        parts[_SHOWN:] = [f"  ... {len(parts) - _SHOWN:,} more like that"] if len(parts) > _SHOWN else []
    listing = "\n".join(chain.from_iterable(of.values()))
    many = f"{count_noun(len(rows), 'difference')}. Nothing was written. Make the plan again, and review it."
    if changed:
        raise SourceChanged(f"the source is not the one that was planned: {many}", listing=listing, code="CKPT0431")
    raise Differs(f"the plan is not what would be done now: {many}", listing=listing, code="CKPT0506")


def _list_differences(plan: object, now: object, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys that lead to a part, how that part differs) for each part in which a plan differs from a new one.

    Args:
        plan, now: the same part of the plan and of the new plan; at first, both of them completely.
        at: the keys that lead to this part; () at first.
    """
    if isinstance(plan, dict) and isinstance(now, dict):
        for key in {**plan, **now}:
            below = (*at, key)
            if key not in now:
                yield below, f"gone, planned was {_abbreviate(plan[key])}"
            elif key not in plan:
                yield below, f"new, {_abbreviate(now[key])}"
            else:
                yield from _list_differences(plan[key], now[key], below)
    elif plan != now or type(plan) is not type(now):
        yield at, f"{_abbreviate(now)}, planned was {_abbreviate(plan)}"


def _abbreviate(data: object) -> str:
    """Return a part of a plan as text of at most 120 characters."""
    text = json.dumps(data, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _list_set_fields(request: object) -> dict[str, object]:
    """Return {field: value} of a request, or of a layout's options, for fields that differ from their default.

    Args:
        request: an instance of a dataclass of options; None gives {}.

    Raises:
        UsageError: a field is not declared as an option, such as a password of a layout.
    """
    if request is None:
        return {}
    own: tuple[Field[Any], ...] = fields(request)  # type: ignore[arg-type]
    given = {f.name: getattr(request, f.name) for f in own if f.name not in _LEFT_OUT}
    given = {f.name: given[f.name] for f in own if f.name in given and given[f.name] != f.default}
    shared = isinstance(request, (OpenOptions, WriteRequest, RunOptions))
    if odd := [f.name for f in own if f.name in given and not shared and "help" not in f.metadata]:
        raise UsageError(f"{type(request).__name__}.{odd[0]} has no place in a plan file.", code="CKPT0223")
    return {n: list(x) if isinstance(x, tuple) else x for n, x in given.items()}


def _make_request(kind: type[R], given: object) -> R:
    """Make a request of this class from the {field: value} in a plan, as `_list_set_fields` returned it.

    Raises:
        UsageError: an option is unknown to this version, or its value has another type.
    """
    own = {f.name: f for f in fields(kind) if f.name not in _LEFT_OUT}  # type: ignore[arg-type]
    if not isinstance(given, dict):
        raise UsageError(f"the plan says {_abbreviate(given)} for options.", code="CKPT0226")
    for name, value in given.items():
        if name not in own:
            raise UsageError(f"the plan has the option {name!r}, which this version does not know.", code="CKPT0226")
        if not _matches_annotation(str(own[name].type), value):
            raise UsageError(f"the plan says {_abbreviate(value)} for {argument(name)}.", code="CKPT0226")
    return kind(**given)


def _matches_annotation(named: str, value: object) -> bool:
    """Tell whether a value has the type of a field, given by its annotation: "Iterable[str] | None"."""
    if named.startswith("Iterable"):
        return isinstance(value, list) and all(isinstance(x, str) for x in value)
    if named.startswith("Mapping"):
        return isinstance(value, dict) and all(isinstance(x, str) for x in value.values())
    kinds = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}
    return type(value) in kinds[named.partition(" ")[0]]


def _describe_identity(identity: Identity) -> dict[str, object]:
    """Describe the identity of a file as {"bytes", "modified", "version"}.

    "modified" is the time of its last change, left out if there is none; "version" a digest of inode, version in a
    store and time of the last change of attributes, which shows a replacement.
    """
    import numpy as np

    _, version, nbytes, modified, changed = identity
    times = {"modified": str(np.datetime64(modified, "ns"))} if modified else {}
    return {"bytes": nbytes, **times, "version": _hash_short(repr((version, changed)).encode())}


def _count_bytes_by_dtype(ckpt: Checkpoint) -> dict[str, int]:
    """Return {dtype: bytes of the tensors that have it}."""
    out: dict[str, int] = {}
    for t in ckpt.tensors.values():
        out[t.dtype] = out.get(t.dtype, 0) + t.nbytes
    return out


def _hash_short(data: bytes) -> str:
    """Return the first 128 bits of the BLAKE3 of some bytes, in hex."""
    return blake3(data).hexdigest(16)


def _begins_as_plan(path: str) -> bool:
    """Tell whether a file starts with the first bytes of a plan file."""
    with open(path, "rb") as f:
        return f.read(14) == b'{\n "ckpttool":'


def _refuse_credentials(src: str, dst: str, options: Mapping[str, Mapping[str, object]]) -> None:
    """Raise for a URL with a user, a password or a query, which may be credentials.

    Args:
        options: {section: {option: value}}; texts in it are checked too.

    Raises:
        UsageError: with the URL, without these parts.
    """
    given = [x for of in options.values() for x in of.values() if isinstance(x, str)]
    for text in (src, dst, *given):
        if urls.is_url(text) and urls.redact_url(text) != text:
            raise UsageError(
                f"{urls.redact_url(text)} was given with credentials or a query, which a plan file would show to whom "
                "reviews it. Give them by the environment, or convert without a plan.",
                code="CKPT0214",
            )
