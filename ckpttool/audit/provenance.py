"""PROVENANCE.json: where a state came from, who kept it and why, and what other layouts need to restore it as it was.

It contains nothing of the state itself: two archives of one state differ here and nowhere else. `order`, `origin` and
`tied` are hints for writers (the model's order of tensors, the user's own keys, names that were one tensor); they are
used only if the manifest confirms them.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from .. import bounded_json
from .._version import __version__
from ..errors import Corrupt, Unsafe
from ..huggingface import model_files
from ..index.checkpoint import Checkpoint, joined, tied_weights
from ..index.names import COMPONENTS, step_count
from ..storage.source import Source
from . import manifest, retention, tarball
from .archive_options import ArchiveOptions

__all__ = ["collect", "config_files", "decode", "encode", "mtime"]

_PACKAGES = ("torch", "transformers", "deepspeed", "safetensors", "zstandard", "blake3")
_DEEPEST = 64  # parts of a path


def collect(
    how: ArchiveOptions, now: datetime, mtime: int, ckpt: Checkpoint, source: Source, config: str | None
) -> dict[str, Any]:
    """The record of an export; `mtime`, in seconds, is when the source was last written. If it is reproducible, it
    contains only what was given on the command line."""
    import platform
    import socket

    out: dict[str, Any] = {"schema": manifest.SCHEMA, "tool": "ckpttool", "version": __version__}
    out["created"] = retention.stamp(now) if not how.reproducible or how.epoch is not None else None
    out["only"] = list(how.only) if how.only else None
    out["meta"] = dict(how.meta)
    out["git_commit"] = how.git_commit
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
        "modified": retention.stamp(datetime.fromtimestamp(mtime, UTC)),
    }
    out["step"] = step_count(ckpt.value)
    out["made_on"] = {"host": socket.gethostname(), "user": _user(), "system": platform.platform()}
    installed = {name: found for name in _PACKAGES if (found := _installed(name))}
    out["versions"] = {"python": platform.python_version(), **installed}
    out["notes"] = list(ckpt.notes)
    out["order"] = list(ckpt.tensors)
    out["origin"] = [[list(a), list(b)] for a, b in sorted(ckpt.origin.items(), key=lambda kv: joined(kv[0]))]
    out["tied"] = tied_weights(ckpt.tensors)
    out["config_files"] = {n: _config_file(data) for n, data in model_files.read_training_files(source, config).items()}
    return out


def _config_file(data: bytes) -> dict[str, str]:
    known = {"sha256": manifest.sha256(data)}
    try:
        return known | {"text": data.decode()}
    except UnicodeDecodeError:
        return known | {"base64": base64.b64encode(data).decode()}


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def encode(record: Mapping[str, Any]) -> bytes:
    """The bytes of the record. Paths that are not UTF-8 are kept, as JSON escapes."""
    return bounded_json.encode(record, indent=1) + b"\n"


def decode(data: bytes, what: str) -> dict[str, Any]:
    """The content of a record, with all types as `collect` writes them.

    Raises:
        Corrupt, Unsafe: it has other content, or another formatting.
    """
    parsed = bounded_json.parse(data, what)
    if not isinstance(parsed, dict) or parsed.get("schema") != manifest.SCHEMA:
        raise Corrupt(f"{what} is of another schema than {manifest.SCHEMA!r}.")
    if unknown := sorted(set(parsed) - _KINDS.keys()):
        raise Corrupt(f"{what} has an entry {tarball.short(unknown[0])}, which no archive has.")
    for key, fits in _KINDS.items():
        if key in parsed or key in _ALWAYS:
            try:
                good = fits(parsed[key])
            except (TypeError, ValueError, AttributeError, KeyError, IndexError):
                good = False
            if not good:
                raise Corrupt(f"{what}: its entry {key!r} is damaged or missing.")
    if encode(parsed) != data:
        raise Corrupt(f"{what} is not formatted as ckpttool writes it.")
    return parsed


def config_files(record: Mapping[str, Any], what: str) -> dict[str, bytes]:
    """{name: bytes} of the configuration files in a record.

    Raises:
        Unsafe: one has a name that is not a plain file name. Corrupt: one does not have its SHA-256.
    """
    out = {}
    for name, f in (record.get("config_files") or {}).items():
        if os.path.basename(name) != name or name in ("", ".", "..") or not name.isprintable() or "\\" in name:
            raise Unsafe(f"{what}: {tarball.short(name)} is not the name of a configuration file.")
        try:
            data = f["text"].encode() if "text" in f else base64.b64decode(f["base64"], validate=True)
        except ValueError:
            data = b""
        if manifest.sha256(data) != f["sha256"]:
            raise Corrupt(f"{what}: the configuration file {tarball.short(name)} does not have its SHA-256.")
        out[name] = data
    return out


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _texts(x: Any) -> bool:
    return isinstance(x, list) and all(map(_text, x))


def _named(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_text, x.values()))


def _count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 1 << 62


def _time(x: Any) -> bool:
    return bool(retention.time_of(x))


def mtime(record: Mapping[str, Any]) -> int:
    """The time of the members of an archive: when its source was last written or, if reproducible, that of the
    record."""
    when = (record.get("source") or {}).get("modified") or record["created"]
    return int(retention.time_of(when).timestamp()) if when else 0


def _optional(fits: Any) -> Any:
    return lambda x: x is None or fits(x)


def _path(x: Any) -> bool:
    return isinstance(x, list) and 0 < len(x) <= _DEEPEST and all(type(p) is str or _count(p) for p in x)


def _pairs(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(r, list) and len(r) == 2 and _path(r[0]) and _path(r[1]) for r in x)


def _source(x: Any) -> bool:
    kinds = {
        "path": _text,
        "layout": _text,
        "trainer": _optional(_text),
        "world_size": _optional(_count),
        "files": _count,
        "bytes": _count,
        "modified": _time,
    }
    return isinstance(x, dict) and x.keys() == kinds.keys() and all(fits(x[k]) for k, fits in kinds.items())


def _files(x: Any) -> bool:
    return isinstance(x, dict) and all(
        _named(f) and (f.keys() == {"sha256", "text"} or f.keys() == {"sha256", "base64"}) for f in x.values()
    )


_ALWAYS = ("schema", "tool", "version", "created", "only", "meta", "git_commit")
_KINDS: dict[str, Any] = {
    "schema": _text,
    "tool": _text,
    "version": _text,
    "created": _optional(_time),
    "only": _optional(lambda x: _texts(x) and x and set(x) <= set(COMPONENTS) and len(set(x)) == len(x)),
    "meta": _named,
    "git_commit": _optional(_text),
    "source": _source,
    "step": _optional(_count),
    "made_on": _named,
    "versions": _named,
    "notes": _texts,
    "order": _texts,
    "origin": _pairs,
    "tied": _named,
    "config_files": _files,
}
