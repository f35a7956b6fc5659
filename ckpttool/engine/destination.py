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
    "can_fill_in_parallel",
    "check_destination",
    "normalise_destination",
    "open_destination",
    "refuse_destination",
    "refuse_overlapping_destination",
    "restore_old_destination",
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
    """Raise if the destination exists and may not be replaced, or is in a store that cannot be written to.

    Args:
        dst: its path or URL, as it was given.
        where: the same without credentials, for messages.
        force: whether a checkpoint there may be replaced; anything else is not replaced.

    Raises:
        DestinationExists: something is there that may not be replaced.
        UsageError: the store of the URL cannot be written to.
    """
    if urls.is_url(dst):
        _refuse_unwritable_store(where)
    elif os.path.lexists(where):
        refuse_target(where, not os.path.isdir(where), force)
    if force:
        _refuse_non_checkpoint(dst)
        layouts.check_replaceable(dst)


def check_destination(src: CheckpointPath, dst: str | os.PathLike[str], planned: Plan, force: bool) -> int | None:
    """Check a destination as `convert` does before it writes; nothing is written.

    Args:
        planned: the conversion, for the layout and the size of the destination.
        force: whether a checkpoint there may be replaced.

    Returns:
        The free bytes of its file system; None for an object store.

    Raises:
        DestinationExists, UsageError: nothing may be written there.
        NoSpace: the destination does not fit.
    """
    dst = normalise_destination(dst)
    refuse_overlapping_destination(src, dst)
    where = urls.display_path(dst)
    refuse_destination(dst, where, force)
    if urls.is_url(dst):
        return None
    refuse_target(where, planned.target.is_file, force)
    return check_free_space(os.path.dirname(where), planned.draft.needed_bytes)


def can_fill_in_parallel(dst: str, is_file: bool, draft: Draft) -> bool:
    """Tell whether several processes can fill a destination at the same time: a local path, or S3 without object lock.

    Args:
        dst: its path or URL; it is not opened.
        is_file: whether the layout is one file, and no folder.
        draft: the destination, which says whether its objects are to be locked.
    """
    return not urls.is_url(dst) or (
        not draft.object_lock and s3_object(dst if is_file else f"{dst}/{UNFINISHED}") is not None
    )


def refuse_overlapping_destination(src: CheckpointPath, dst: str | os.PathLike[str]) -> None:
    """Raise if the destination is the source, lies in the source, or contains it.

    Raises:
        UsageError: the message says how the two are related.
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


def _refuse_unwritable_store(url: str) -> None:
    """Raise for a URL that a conversion cannot write to: hf:// or http.

    Raises:
        UsageError: the message says what to use instead.
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


def _refuse_non_checkpoint(target: str) -> None:
    """Raise if a path or URL that is to be replaced is neither a checkpoint nor empty.

    Raises:
        DestinationExists: it is a file or folder of other things.
        CkpttoolError: its kind cannot be determined: it is not readable, or the store does not answer.
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


def restore_old_destination(target: str) -> list[str]:
    """Put back an old destination that an interrupted run had moved away.

    Returns:
        Sentences on what was done; [] if nothing was.

    Raises:
        CkpttoolError: the file system refuses it.
    """
    try:
        return partial.recover_old_target(target)
    except OSError as e:
        raise write_error(
            e,
            target,
            f"An earlier run left the old checkpoint beside it; `{partial.clean_command(target)}` puts it back.",
        ) from e


def open_destination(dst: str, is_file: bool, draft: Draft, plan: str, force: bool) -> Destination:
    """Open the destination of a draft: a local path, an object, or a prefix of objects.

    Args:
        is_file: whether the layout is one file, and no folder.
        plan: id of the conversion (`compute_plan_id`); a later run with the same id continues an interrupted one.
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
