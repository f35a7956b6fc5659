"""What `doctor --report` puts into a file for a bug report: how a checkpoint is made, without anything that it holds.

Names of files, tensors and values are in it, dtypes, shapes, sizes, kinds of values and kinds of findings. Numbers,
texts, configs, paths above the checkpoint, URLs, and messages, which quote all of these, are not.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from ... import layouts
from ...errors import CkpttoolError
from ...formats.pickles import Opaque
from ...options import OpenOptions
from ...printable import count_noun
from ..opening import open_checkpoint
from .examine import Diagnosis

__all__ = ["describe_checkpoint"]

_MOST_FILES = 5000  # folders that are begun are listed to their end
_OURS = f"{os.sep}ckpttool{os.sep}"


def describe_checkpoint(path: str, options: OpenOptions, found: Diagnosis | Exception) -> dict[str, object]:
    """Return a description of a checkpoint for a bug report, without its data: {"files", "layout", "trainer",
    "world_size", "tensors", "values", "findings", "error"}.

    Keys whose content cannot be read are missing; "error" has the code and type of the error, and the places in
    ckpttool where it was raised.

    Args:
        options: how to open the checkpoint.
        found: the result of `doctor`, or the error that it raised.
    """
    out: dict[str, Any] = {"files": _list_files(path)}
    if isinstance(found, Diagnosis):
        rows = (
            {"kind": f.kind, "severity": f.severity, "file": f.file, "tensors": len(f.tensors)} for f in found.findings
        )
        out["findings"] = list(rows)
    else:
        out["error"] = _describe_error(found)
    try:
        with open_checkpoint(path, options, check_hints=False) as opened:
            ckpt = opened.locate()
            out |= {"layout": ckpt.layout, "trainer": ckpt.trainer, "world_size": ckpt.world_size}
            out["tensors"] = {
                n: f"{t.dtype} {list(t.shape)}, {count_noun(len(t.chunks), 'chunk')}" for n, t in ckpt.tensors.items()
            }
            out["values"] = {n: _describe_type(v.data) for n, v in ckpt.values.items()}
    except Exception as e:  # a bug of ours is what reports are for
        out.setdefault("error", _describe_error(e))
    return out


def _describe_error(error: Exception) -> dict[str, object]:
    """Return {"code", "kind", "raised"} of an error: its CKPT code or None, the name of its class, and the places in
    ckpttool where it was raised. The message is left out."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{f.filename.rpartition(_OURS)[2]}:{f.lineno} {f.name}" for f in frames if _OURS in f.filename]
    code = error.code if isinstance(error, CkpttoolError) else None
    return {"code": code, "kind": type(error).__name__, "raised": places}


def _list_files(path: str) -> dict[str, int]:
    """Return {name below the checkpoint: bytes} of its files, until `_MOST_FILES` are found or a folder cannot be
    listed."""
    out: dict[str, int] = {}
    with suppress(CkpttoolError), (where := layouts.place(path)).source as source:
        if where.file is not None:
            return {f"FILE{PurePath(where.file).suffix}": source.size(where.file)}
        folders = [""]
        while folders and len(out) < _MOST_FILES:
            folder = folders.pop()
            for entry in sorted(source.list(folder)):
                name = f"{folder}/{entry}" if folder else entry
                is_folder, size = source.glance(name)
                if is_folder:
                    folders.append(name)
                else:
                    out[name] = size or 0
    return out


def _describe_type(x: object) -> str:
    """Return the type of a value and its number of elements, without its content: "dict of 3 elements"."""
    if isinstance(x, Opaque):
        return f"object of {x.cls}"
    kind = type(x).__name__
    if isinstance(x, (str, bytes)):
        return f"{kind} of length {len(x)}"
    if isinstance(x, (list, tuple, set, frozenset, Mapping)):
        return f"{kind} of {count_noun(len(x), 'element')}"
    return kind
