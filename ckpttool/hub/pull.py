"""pull: a repository on the Hub becomes a training checkpoint, by ranged reads, without a copy of its files.

The revision is resolved to one commit first, and everything is read from it. If the repository has the ckpttool.json of
a push, every tensor's digest is compared with it, provided that it describes the current weights: the Hub's SHA-256 of
each file is the one listed in ckpttool.json. Otherwise somebody has replaced the weights since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from ..bounded_json import parse
from ..engine import conversion
from ..engine.conversion import ConvertResult
from ..engine.recorded import MOST_RECORD_BYTES, RECORD
from ..errors import Corrupt, Unsafe
from ..options import (
    DEFAULT_LAYOUT,
    OpenOptions,
    PullKeywords,
    RunOptions,
    WriteRequest,
    list_keywords,
    split_keywords,
)
from ..storage import retries
from .client import RemoteFile, Repository, RepositoryState, parse_target

__all__ = ["Pulled", "pull", "pull_repository"]


@dataclass
class Pulled:
    """The result of a pull."""

    url: str
    commit: str
    compared: int  # tensors whose digest was recorded when they were pushed, and is that
    notes: list[str]
    result: ConvertResult


@list_keywords
def pull(
    repository: str,
    dst: str | os.PathLike[str],
    *,
    revision: str | None = None,
    to: str | None = DEFAULT_LAYOUT,
    **keywords: Unpack[PullKeywords],
) -> Pulled:
    """Make a training checkpoint of a repository on the Hugging Face Hub, pinned to one commit.

    Args:
        repository: "hf://org/name", or "hf://org/name@revision".
        dst: where to write the checkpoint.
        revision: branch, tag or commit; None: that of `repository`, or main.
        to: name of the layout to write; None to choose it by the suffix of `dst`.
        (the others): as `convert`.

    Raises:
        Corrupt: a tensor does not have its recorded digest. CkpttoolError: one of errors.py; the
            destination is as it was before.
    """
    reading, writing, running = split_keywords({"to": to, **keywords})
    return pull_repository(repository, dst, revision=revision, reading=reading, writing=writing, running=running)


def pull_repository(
    repository: str,
    dst: str | os.PathLike[str],
    *,
    revision: str | None,
    reading: OpenOptions,
    writing: WriteRequest,
    running: RunOptions,
) -> Pulled:
    """Make a training checkpoint of a repository on the Hugging Face Hub, pinned to one commit; the command line calls
    this.

    Args:
        repository: "hf://org/name", or "hf://org/name@revision".
        dst: where to write the checkpoint.
        revision: branch, tag or commit; None: that of `repository`, or main.
        reading, writing, running: how to read the repository, what to write, and how to carry it out, as in `convert`.

    Raises:
        NotFound: there is no such repository or revision. Corrupt: a tensor does not have its recorded digest.
        CkpttoolError: the destination is as it was before.
    """
    repo_id, named = parse_target(repository)
    hub = Repository(repo_id)
    state = hub.read_state(revision or named)
    if state is None:
        at = f"@{revision or named}" if revision or named else ""
        raise retries.NotFound(
            f"hf://{repo_id}{at}: the repository or the revision does not exist, or the token may not see it. Check "
            "the name; log in with `hf auth login` or set HF_TOKEN."
        )
    notes: list[str] = []
    expected = None if writing.ignore_recorded_digests else _read_recorded_digests(hub, state, notes)
    result = conversion.run_conversion(
        f"{hub.url}@{state.commit}", dst, reading, replace(writing, expected=expected), running
    )
    aside = any(r["component"] in ("optim", "extra") for r in result.not_read)
    whole = reading.only is None and reading.drop_matching is None and not result.dropped
    if set(result.digest) == {"all", "model"} and whole and not aside:
        notes.append("the repository contains only weights: training from it starts with a new optimizer")
    if expected and not result.compared:
        notes.append(f"{RECORD} in the repository belongs to other weights, so there were no digests to compare")
    return Pulled(hub.url, state.commit, result.compared, notes, result)


def _read_recorded_digests(hub: Repository, state: RepositoryState, notes: list[str]) -> dict[str, str]:
    """Return {tensor: digest} from the ckpttool.json of the repository; {}, with a note, if there is none or it
    describes other weights.

    Args:
        hub: the repository.
        state: the repository at the commit that is pulled.
        notes: gets the note.

    Raises:
        RemoteError: the Hub cannot be asked.
    """
    if RECORD not in state.files:
        notes.append(f"{hub.url} has no {RECORD}, so digests were not compared; it was not pushed by ckpttool")
        return {}
    try:
        record = parse(hub.read_file(RECORD, state.commit, MOST_RECORD_BYTES), RECORD)
        files, tensors = record["files"], {str(n): str(t[2]) for n, t in record["tensors"].items()}
        other = _find_changed_weights(files, state.files)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, Corrupt, Unsafe):
        notes.append(f"{RECORD} in the repository is not what a push writes; digests were not compared")
        return {}
    if other is not None:
        notes.append(
            f"{other} is not the file that {RECORD} describes: it was changed after the push. Digests were not compared"
        )
        return {}
    return tensors


def _find_changed_weights(listed: Mapping[str, Any], there: Mapping[str, RemoteFile]) -> str | None:
    """Return the first file of weights that was changed since the push; None if there is none. Other files are not
    compared.

    Args:
        listed: {name: {"sha256", "bytes"}}, as ckpttool.json has them.
        there: {name: size and hashes} of the files in the repository.
    """
    for name in sorted(n for n in listed if n.endswith(".safetensors")):
        pushed, known = listed[name], there.get(name)
        if known is None or known.sha256 != pushed["sha256"] or known.size != pushed["bytes"]:
            return name
    return None
