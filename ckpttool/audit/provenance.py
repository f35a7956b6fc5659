"""PROVENANCE.json: where a state came from, who kept it and why, and what other layouts need to restore it as it was.

It contains nothing of the state itself: two archives of one state differ here and nowhere else. `order`, `origin` and
`tied` are hints for writers (the model's order of tensors, the user's own keys, names that were one tensor); they are
used only if the manifest confirms them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from .. import bounded_json
from .._version import __version__
from ..errors import Corrupt, Unsafe
from ..extras import get_installed_version
from ..huggingface import model_files
from ..index.checkpoint import Checkpoint, joined, tied_weights
from ..index.names import COMPONENTS, step_count
from ..storage.source import Source
from . import manifest, retention, tarball
from .archive_options import ArchiveOptions

__all__ = [
    "collect_provenance",
    "decode_config_files",
    "decode_provenance",
    "encode_provenance",
    "get_member_mtime",
]

_PACKAGES = ("torch", "transformers", "deepspeed", "safetensors", "zstandard", "blake3")
_DEEPEST = 64  # parts of a path
_Check = Callable[[Any], bool]  # of a value in a record; any error of it says no, too


def collect_provenance(
    how: ArchiveOptions, now: datetime, mtime: int, ckpt: Checkpoint, source: Source, config: str | None
) -> dict[str, object]:
    """Return the content of PROVENANCE.json for an export.

    A reproducible export records nothing about the files of the source, the machine or the user.

    Args:
        how: the options of the export.
        now: the time of the export.
        mtime: when the source was last written, in seconds.
        ckpt, source: the checkpoint that is exported, and its files.
        config: folder with config.json and tokenizer, if one was named on the command line; None: those in the source.

    Raises:
        CkpttoolError: a configuration file cannot be read.
    """
    import platform
    import socket

    out: dict[str, object] = {"schema": manifest.SCHEMA, "tool": "ckpttool", "version": __version__}
    out["created"] = retention.format_time(now) if not how.reproducible or how.epoch is not None else None
    out["only"] = list(how.only) if how.only else None
    out["meta"] = dict(how.meta)
    out["git_commit"] = how.git_commit
    if ckpt.derived and "delta" in ckpt.derived:
        out["delta"] = ckpt.derived["delta"]
    if ckpt.salvage is not None:
        states = ckpt.salvage.states(ckpt.tensors, ckpt.values)
        out["salvage"] = {n: state for n, state in states.items() if state != "exact"}
    if how.reproducible:
        return out
    sizes = source.identities()
    out["source"] = {
        "path": source.root,
        "layout": ckpt.layout,
        "trainer": ckpt.trainer,
        "world_size": ckpt.world_size,
        "files": len(sizes),
        "bytes": sum(i[2] for i in sizes.values()),
        "modified": retention.format_time(datetime.fromtimestamp(mtime, UTC)),
    }
    out["step"] = step_count(ckpt.value)
    out["made_on"] = {"host": socket.gethostname(), "user": retention.get_current_user(), "system": platform.platform()}
    installed = {name: found for name in _PACKAGES if (found := get_installed_version(name))}
    out["versions"] = {"python": platform.python_version(), **installed}
    out["notes"] = list(ckpt.notes)
    out["order"] = list(ckpt.tensors)
    origin = ([list(a), list(b)] for a, b in sorted(ckpt.origin.items(), key=lambda kv: joined(kv[0])))
    out["origin"] = [pair for pair in origin if _is_list_of_path_pairs([pair])]
    out["tied"] = tied_weights(ckpt.tensors)
    out["config_files"] = {
        n: _encode_config_file(data) for n, data in model_files.read_training_files(source, config).items()
    }
    return out


def _encode_config_file(data: bytes) -> dict[str, str]:
    """Return a configuration file as plain data: {"sha256": in hex, and "text" or, if it is not UTF-8, "base64"}."""
    known = {"sha256": manifest.sha256_hex(data)}
    try:
        return known | {"text": data.decode()}
    except UnicodeDecodeError:
        return known | {"base64": base64.b64encode(data).decode()}


def encode_provenance(record: Mapping[str, object]) -> bytes:
    """Return PROVENANCE.json with this content. Paths that are not UTF-8 are kept, as JSON escapes."""
    return bounded_json.encode(record, indent=1) + b"\n"


def decode_provenance(data: bytes, what: str) -> dict[str, Any]:
    """Return the content of PROVENANCE.json, its types checked.

    Args:
        what: the path, for messages.

    Raises:
        Corrupt, Unsafe: it has other content, or another formatting, than ckpttool writes.
    """
    parsed = bounded_json.parse(data, what)
    if not isinstance(parsed, dict) or parsed.get("schema") != manifest.SCHEMA:
        raise Corrupt(f"{what} is of another schema than {manifest.SCHEMA!r}.", code="CKPT0425")
    if unknown := sorted(set(parsed) - _KINDS.keys()):
        raise Corrupt(f"{what} has an entry {tarball.shorten_name(unknown[0])}, which no archive has.", code="CKPT0425")
    for key, fits in _KINDS.items():
        if key in parsed or key in _ALWAYS:
            try:
                good = fits(parsed[key])
            except (TypeError, ValueError, AttributeError, KeyError, IndexError):
                good = False
            if not good:
                raise Corrupt(f"{what}: its entry {key!r} is damaged or missing.", code="CKPT0425")
    if encode_provenance(parsed) != data:
        raise Corrupt(f"{what} is not formatted as ckpttool writes it.", code="CKPT0425")
    return parsed


def decode_config_files(record: Mapping[str, Any], what: str) -> dict[str, bytes]:
    """Return {name: bytes} of the configuration files in the content of PROVENANCE.json.

    Args:
        what: the path, for messages.

    Raises:
        Unsafe: one has a name that is not a plain file name. Corrupt: one does not have its SHA-256.
    """
    out = {}
    for name, f in (record.get("config_files") or {}).items():
        if not model_files.is_plain_file_name(name):
            raise Unsafe(
                f"{what}: {tarball.shorten_name(name)} is not the name of a configuration file.", code="CKPT0702"
            )
        try:
            data = f["text"].encode() if "text" in f else base64.b64decode(f["base64"], validate=True)
        except ValueError:
            data = b""
        if manifest.sha256_hex(data) != f["sha256"]:
            raise Corrupt(
                f"{what}: the configuration file {tarball.shorten_name(name)} does not have its SHA-256.",
                code="CKPT0425",
            )
        out[name] = data
    return out


def _is_text(x: object) -> bool:
    """Return whether a value is a string."""
    return isinstance(x, str)


def _is_list_of_texts(x: object) -> bool:
    """Return whether a value is a list of strings; it may be empty."""
    return isinstance(x, list) and all(map(_is_text, x))


def _is_dict_of_texts(x: object) -> bool:
    """Return whether a value is a dict whose values are all strings; its keys are not checked."""
    return isinstance(x, dict) and all(map(_is_text, x.values()))


def _is_count(x: object) -> bool:
    """Return whether a value is an int (not a bool) from 0 to 2**62 - 1."""
    return type(x) is int and 0 <= x < 1 << 62


def _is_time(x: str) -> bool:
    """Return True if a text is a time in the format of records; raises ValueError or TypeError if not."""
    return bool(retention.parse_time(x))


def get_member_mtime(record: Mapping[str, Any]) -> int:
    """Return the modification time, in seconds, that all members of an archive with this provenance have.

    It is when the source was last written or, for a reproducible export, the time of the export; 0 if neither is
    recorded.
    """
    when = (record.get("source") or {}).get("modified") or record["created"]
    return int(retention.parse_time(when).timestamp()) if when else 0


def _allow_none(fits: _Check) -> _Check:
    """Return a check that accepts None and what the check `fits` accepts."""
    return lambda x: x is None or fits(x)


def _is_entry_path(x: object) -> bool:
    """Return whether a value is the path of an entry in a checkpoint: a list of strings and counts, not empty."""
    return isinstance(x, list) and 0 < len(x) <= _DEEPEST and all(type(p) is str or _is_count(p) for p in x)


def _is_list_of_path_pairs(x: object) -> bool:
    """Return whether a value is a list of [path, path], of entries in a checkpoint."""
    return isinstance(x, list) and all(
        isinstance(r, list) and len(r) == 2 and _is_entry_path(r[0]) and _is_entry_path(r[1]) for r in x
    )


def _is_source_record(x: object) -> bool:
    """Return whether a value describes the source of an export: a dict with exactly the expected fields and types."""
    kinds = {
        "path": _is_text,
        "layout": _is_text,
        "trainer": _allow_none(_is_text),
        "world_size": _allow_none(_is_count),
        "files": _is_count,
        "bytes": _is_count,
        "modified": _is_time,
    }
    return isinstance(x, dict) and x.keys() == kinds.keys() and all(fits(x[k]) for k, fits in kinds.items())


def _is_dict_of_files(x: object) -> bool:
    """Return whether a value is {name: {"sha256", and "text" or "base64"}}, all texts."""
    return isinstance(x, dict) and all(
        _is_dict_of_texts(f) and (f.keys() == {"sha256", "text"} or f.keys() == {"sha256", "base64"})
        for f in x.values()
    )


def _is_delta_record(x: object) -> bool:
    """Return whether a value describes what a delta is made from, with the fields that `engine.difference` gives it."""
    return (
        isinstance(x, dict)
        and x.keys() == {"base", "result", "base_tensors", "tensors"}
        and all(_is_text(x[key]) for key in ("base", "result"))
        and all(
            _is_text(dtype) and _is_text(digest) and all(map(_is_count, shape))
            for dtype, shape, digest in x["base_tensors"].values()
        )
        and all(_is_text(digest) and (of is None or of in x["base_tensors"]) for of, digest in x["tensors"].values())
    )


_ALWAYS = ("schema", "tool", "version", "created", "only", "meta", "git_commit")
_KINDS: dict[str, _Check] = {
    "schema": _is_text,
    "tool": _is_text,
    "version": _is_text,
    "created": _allow_none(_is_time),
    "only": _allow_none(
        lambda x: (
            _is_list_of_texts(x)
            and x
            and {p for p in x if p.isidentifier()} <= set(COMPONENTS)
            and len(set(x)) == len(x)
        )
    ),
    "meta": _is_dict_of_texts,
    "git_commit": _allow_none(_is_text),
    "source": _is_source_record,
    "step": _allow_none(_is_count),
    "made_on": _is_dict_of_texts,
    "versions": _is_dict_of_texts,
    "notes": _is_list_of_texts,
    "order": _is_list_of_texts,
    "origin": _is_list_of_path_pairs,
    "tied": _is_dict_of_texts,
    "config_files": _is_dict_of_files,
    "delta": _is_delta_record,
    "salvage": lambda x: _is_dict_of_texts(x) and all(s.startswith(("rebuilt: ", "missing: ")) for s in x.values()),
}
