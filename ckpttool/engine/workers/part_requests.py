"""What the coordinator of a conversion asks of its workers, and what they answer: JSON, less than a kilobyte a request.

    {"fill": {"job": {"src", "dst", "reading", "writing", "plan"}, "part", "there", "tree", "threads", "buffer_bytes"}}
    {"digests", "crcs", "seen", "bytes", "seconds", "node"}, of objects also {"cells", "kept"}

    {"cells": {"job", "tree", "cells", "threads", "buffer_bytes"}}        those of objects that no part fills alone
    {"cells", "kept", "node"}

    {"digest": {"open": {"path", "options", "index"}, "first", "stop", "statistics", "threads", "buffer_bytes"}}
    {"digests", "seen"}, where asked for also {"statistics"}

    {"error": {"kind", "code", "message", "notes"}}

A worker plans, or opens, for itself from what is the same in all requests, and refuses if its plan or its index is
another one: another version, or other files.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from blake3 import blake3

from ... import errors, layouts
from ...errors import CkpttoolError
from ...index.checkpoint import Checkpoint
from ...options import OpenOptions, WriteRequest
from ...storage import urls
from ...storage.source import Source

__all__ = [
    "compute_index_id",
    "describe_job",
    "encode_error",
    "parse_answer",
    "read_job",
]


#: A request, an answer, or a part of one.
Json = dict[str, Any]


def describe_job(src: object, dst: str, reading: OpenOptions, writing: WriteRequest, plan: str) -> Json | None:
    """Return a conversion as plain data, from which a worker plans the same conversion; None if a worker cannot plan it
    by itself, since it merges, averages or salvages, or its source is neither a path nor a URL.

    Args:
        src: what the user gave as the source.
        dst: the path or URL of the destination.
        reading, writing: how the source is read, and what is written.
        plan: what `compute_plan_id` returned for the plan of this process; that of a worker must be equal.

    Returns:
        {"src" and "dst": absolute path or URL, "plan": `plan`, "reading" and "writing": {field: value} of the two}.
    """
    computed = reading.merge is not None or reading.average is not None
    if not isinstance(src, (str, os.PathLike)) or computed or reading.salvage:
        return None
    asked = {f.name: getattr(writing, f.name) for f in fields(writing)}
    options = asked.pop("options")
    return {
        "src": urls.make_absolute(os.fspath(src)),
        "dst": urls.make_absolute(dst),
        "plan": plan,
        "reading": asdict(reading),
        "writing": {**asked, "options": None if options is None else asdict(options)},
    }


def read_job(job: Json) -> tuple[str, str, OpenOptions, WriteRequest]:
    """Return (source, destination, how to read, what to write) of a conversion that `describe_job` returned."""
    asked = dict(job["writing"])
    options = asked.pop("options")
    if options is not None:
        kind = layouts.choose_target_layout(asked["to"], job["dst"]).options
        assert kind is not None
        options = kind(**options)
    return job["src"], job["dst"], OpenOptions(**job["reading"]), WriteRequest(**asked, options=options)


def compute_index_id(ckpt: Checkpoint, source: Source) -> str:
    """Return a hex digest of a checkpoint's index (names, dtypes, shapes) and of the identities of its files, without
    their device numbers."""
    identities = source.identities()
    files = [(name, identities.get(name, (0,))[1:]) for name in ckpt.files]
    h = blake3(json.dumps([ckpt.layout, files, ckpt.sizes], default=str).encode())
    for name, t in ckpt.tensors.items():
        h.update(f"{name} {t.dtype} {t.shape}\n".encode())
    return h.hexdigest()


def encode_error(e: CkpttoolError) -> str:
    """Encode an error as a worker's answer, a JSON text; `parse_answer` raises it again."""
    notes = list(getattr(e, "__notes__", ()))
    return json.dumps({"error": {"kind": e.kind, "code": e.code, "message": str(e), "notes": notes}})


def parse_answer(text: str) -> Json:
    """Parse the answer of a worker, a JSON text.

    Raises:
        CkpttoolError: the answer is an error that the worker raised; of the same class.
    """
    found: Json = json.loads(text)
    if "error" in found:
        said = found["error"]
        kind = getattr(errors, said["kind"], CkpttoolError) if said["kind"] in errors.__all__ else CkpttoolError
        e: CkpttoolError = kind(said["message"], code=said.get("code"))
        for note in said["notes"]:
            e.add_note(note)
        raise e
    return found
