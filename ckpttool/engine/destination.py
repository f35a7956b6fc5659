"""Where a conversion may write, and what writes there.

What must not be replaced is refused before anything is opened; `open_destination` chooses between a local path, an
object and a prefix of objects.
"""

from __future__ import annotations

import os

from .. import layouts
from ..errors import CkpttoolError, DestinationExists, NotRecognised, UsageError, argument
from ..formats import other_files
from ..index.draft import Draft
from ..storage import partial, urls
from ..storage.destination_protocol import Destination, write_error
from ..storage.local_destination import LocalDestination, check_free_space, refuse_target
from ..storage.object_destinations import ObjectDestination, PrefixDestination
from ..storage.objects import s3_object
from ..storage.urls import UNFINISHED
from .opening import CheckpointPath, show_path
from .planning import Plan
from .recorded import RECORD

__all__ = [
    "can_share",
    "check_destination",
    "normalise_destination",
    "open_destination",
    "recover_old",
    "refuse_destination",
    "refuse_source",
]


def normalise_destination(dst: str | os.PathLike[str]) -> str:
    """Return the path or URL of a destination as text, with the scheme of a URL in small letters.

    Raises:
        UsageError: it is "-", empty, or has a null byte.
    """
    text = os.fspath(dst)
    if text == "-":
        raise UsageError(
            "A checkpoint cannot be written to standard output. Give the path of a file or folder.", code="CKPT0211"
        )
    if not text or "\0" in text:
        raise UsageError(f"{text!r} cannot be a destination. Give the path of the new checkpoint.", code="CKPT0211")
    return urls.lower_scheme(text) if urls.is_url(text) else text


def refuse_destination(dst: str, where: str, force: bool) -> None:
    """Refuse what is at a destination, before anything is opened.

    Args:
        dst: its path or URL, as it was given.
        where: the same for people, without passwords.
        force: whether a checkpoint there may be replaced.

    Raises:
        DestinationExists: something is there that may not be replaced.
        UsageError: the store of the URL cannot be written to.
    """
    if urls.is_url(dst):
        _refuse_store(where)
    elif os.path.lexists(where):
        refuse_target(where, not os.path.isdir(where), force)
    if force:
        _refuse_foreign(dst)


def check_destination(src: CheckpointPath, dst: str | os.PathLike[str], planned: Plan, force: bool) -> int | None:
    """Refuse a destination as `convert` would refuse it, and write nothing.

    Args:
        force: whether a checkpoint there may be replaced.

    Returns:
        The free bytes of its file system; None for an object store.

    Raises:
        DestinationExists, UsageError: nothing may be written there.
        NoSpace: the destination does not fit.
    """
    dst = normalise_destination(dst)
    refuse_source(src, dst)
    where = urls.display_path(dst)
    refuse_destination(dst, where, force)
    if force:
        planned.target.check_replaceable(dst)
    if urls.is_url(dst):
        return None
    refuse_target(where, planned.target.is_file, force)
    return check_free_space(os.path.dirname(where), planned.draft.needed_bytes)


def can_share(dst: str, is_file: bool, draft: Draft) -> bool:
    """Tell whether several processes can fill a destination, a path or URL, at the same time; it is not opened.
    `is_file` is whether the layout is one file."""
    return not urls.is_url(dst) or (
        not draft.object_lock and s3_object(dst if is_file else f"{dst}/{UNFINISHED}") is not None
    )


def refuse_source(src: CheckpointPath, dst: str | os.PathLike[str]) -> None:
    """Refuse a destination that is the source, lies in it or holds it.

    Raises:
        UsageError: with how the two are related.
    """
    src = show_path(src)
    if urls.is_url(dst) != urls.is_url(src):
        return
    a, b = (urls.redact_url(os.fspath(p)) if urls.is_url(p) else os.path.realpath(p) for p in (src, dst))
    a, b = a.rstrip("/") + "/", b.rstrip("/") + "/"
    relation = ""
    if a == b:
        relation = f"is the source {src}"
    elif b.startswith(a) and (urls.is_url(src) or os.path.isdir(a)):
        relation = f"is inside the source {src}"
    elif a.startswith(b):
        relation = f"contains the source {src}"
    if relation:
        raise UsageError(
            f"The destination {dst} {relation}, which must not change. Choose a destination elsewhere.", code="CKPT0211"
        )


def _refuse_store(url: str) -> None:
    """Refuse URLs of stores that a conversion cannot write to: hf:// and http.

    Raises:
        UsageError: with what to use instead.
    """
    if url.startswith("hf://buckets/"):
        raise UsageError(
            f"{url}: ckpttool reads buckets of the Hub and does not write to them, since the Hub takes their files by "
            "its Xet client only. Convert to a folder and run `hf buckets sync FOLDER URL`.",
            code="CKPT0211",
        )
    if url.startswith("hf://datasets/"):
        raise UsageError(
            f"{url}: ckpttool reads datasets of the Hub and does not write to them. Push to a model repository "
            "(`ckpttool push`), or convert to a folder.",
            code="CKPT0211",
        )
    if url.startswith("hf://"):
        raise UsageError(
            f"{url}: the Hub is written to by `ckpttool push`, which makes one commit of it.", code="CKPT0211"
        )
    if url.startswith("http"):
        raise UsageError(
            f"{url}: http is for reading only. Write to a folder or to s3://, gs:// or az://.", code="CKPT0211"
        )


def _refuse_foreign(target: str) -> None:
    """Refuse to replace what is no checkpoint: --force replaces a checkpoint, an empty folder or an empty file; not a
    folder or a file of other things.

    Raises:
        DestinationExists: it is no checkpoint.
        CkpttoolError: what is there cannot be told: it may not be read, or a store does not answer.
    """
    if urls.is_url(target):
        try:
            where = layouts.place(target)
        except NotRecognised:
            return
        with where.source as source:
            names = [] if where.file else source.list()
    else:
        try:
            names = os.listdir(target) if os.path.isdir(target) else [target] if os.path.getsize(target) else []
        except FileNotFoundError:
            return
    if not names or RECORD in names or UNFINISHED in names:
        return
    try:
        there = layouts.place(target)
        with there.source as source:
            layouts.detect(there)
            head = source.read(there.file, 0, min(source.size(there.file), 64)) if there.file else b"\0"
            if other_files.is_text(head):
                raise NotRecognised("a text file, whatever its name says", code="CKPT0301")
    except CkpttoolError as e:
        if e.keeps_work:  # it says nothing of what is there
            raise
        what = f"a folder of {len(names)} entries"
        if names == [target]:
            what = f"a file of {os.path.getsize(target):,} bytes"
        raise DestinationExists(
            f"{urls.redact_url(target)} is {what} and not a checkpoint, so {argument('force', True)} does not replace "
            "it. Remove it yourself, or choose another destination.",
            code="CKPT0602",
        ) from None


def recover_old(target: str) -> list[str]:
    """Put back an old destination that an interrupted run had taken away; return sentences for people on what was done.

    Raises:
        CkpttoolError: the system does not let us.
    """
    try:
        return partial.recover(target)
    except OSError as e:
        raise write_error(
            e,
            target,
            f"An earlier run left the old checkpoint beside it; `{partial.clean_command(target)}` puts it back.",
        ) from e


def open_destination(dst: str, is_file: bool, draft: Draft, plan: str, force: bool) -> Destination:
    """Open the destination of a draft.

    Args:
        is_file: whether the layout is one file, and no folder.
        plan: what identifies the conversion (`plan_id`), so that the same one continues what was interrupted.
        force: whether a checkpoint there may be replaced.

    Raises:
        DestinationExists: something is there and `force` is not set.
        Locked: another run writes there.
        NoSpace: the file system has less room than the draft needs.
    """
    if not urls.is_url(dst):
        return LocalDestination(dst, is_file, plan, draft.needed_bytes, force)
    if is_file:
        return ObjectDestination(dst, draft.needed_bytes, force, draft.object_lock)
    return PrefixDestination(dst, draft, force)
