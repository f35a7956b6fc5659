"""Single objects of a store: requests of S3 (azure.py has Azure's), conditional writes of small objects, removal, legal
holds.

Every write of `put_if_unchanged` carries a condition, If-None-Match or If-Match, so two writers cannot overwrite each
other; a store that ignores conditions, as old imitations of S3 do, is not safe for a ledger that many write to.

Sources: the API reference of S3 (DeleteObject, PutObjectLegalHold, "Conditional writes", AbortMultipartUpload).
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any

from ..errors import DestinationExists, RemoteError, Unsafe, Unsupported, UsageError, argument
from .answer_limits import current_budget, watch_upload
from .azure import AzureObject, is_azure
from .listings import follow_pages, get_protocols
from .remote import RemoteSource, filesystem_for
from .retries import POLICY, BadRange, ConditionFailed, Denied, NotFound, NotOffered, with_retries
from .urls import redact_url, split_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "MOST_LEDGER_BYTES",
    "NO_LOCK",
    "S3Answer",
    "S3Object",
    "conditional_object",
    "delete_object_versions",
    "delete_remote_object",
    "exists_error",
    "get_required_value",
    "get_with_token",
    "put_if_unchanged",
    "s3_object",
    "set_legal_hold",
    "too_large_error",
]

#: An answer of S3's API, or a part of one, as botocore parses it.
S3Answer = dict[str, Any]

#: How many bytes a ledger, or the note of an upload, may have, which are read whole.
MOST_LEDGER_BYTES = 256 << 20
_PIECE_BYTES = 8 << 20  # of one request
_READS = 20  # tries to read an object that others replace meanwhile
_WRITES = frozenset({"upload_part", "put_object", "complete_multipart_upload"})
# How stores say that a bucket has no object lock.
NO_LOCK = re.compile(r"object ?lock|lock configuration|NotImplemented|MethodNotAllowed", re.IGNORECASE)


class S3Object:
    """One object of an S3 store."""

    def __init__(self, fs: AbstractFileSystem, path: str, url: str) -> None:
        self.fs, self.url = fs, redact_url(url)
        self.bucket, _, self.key = path.partition("/")
        if not self.key:
            raise UsageError(f"{redact_url(url)} names a bucket; give an object in it.", code="CKPT0214")

    def request(self, method: str, *, read_body: bool = False, **kwargs: Any) -> S3Answer:
        """Send a request of S3's API for this object's bucket, with retries, and return its answer as botocore parses
        it.

        Args:
            method: of botocore's client, such as "head_object".
            read_body: replace the stream "Body" of the answer by its bytes.
            kwargs: arguments of the method, except Bucket.

        Raises:
            RemoteError: or one of its subclasses in retries.py (NotFound, Denied, ConditionFailed, BadRange).
        """
        from fsspec.asyn import sync

        body = kwargs.get("Body")

        async def call() -> S3Answer:
            """Send the request once, in fsspec's event loop, and return its answer; what is sent begins at the first
            byte of the body again."""
            await self.fs.set_session()
            client = await self.fs.get_s3(self.bucket)
            if body is not None:
                body.seek(0)
            asked = getattr(client, method)(Bucket=self.bucket, **kwargs)
            budget = current_budget()
            get_progress = None if body is None else body.tell
            answer: S3Answer = await (watch_upload(asked, get_progress, budget) if budget and budget.writes else asked)
            if read_body:
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
            return answer

        return with_retries(self.url, lambda: sync(self.fs.loop, call), writes=method in _WRITES)

    def read_range(self, start: int, n: int, token: str | None = None) -> tuple[bytes, int, str]:
        """Read a part of the object: (`n` bytes from byte `start` on, or fewer at the end; bytes of the whole object;
        its ETag).

        Args:
            start, n: first byte and number of bytes.
            token: the ETag that the object must still have; None: any.

        Raises:
            NotFound: there is none. ConditionFailed: it has another ETag. BadRange: it ends before byte `start`.
        """
        condition: S3Answer = {} if token is None else {"IfMatch": token}
        what = f"bytes={start}-{start + n - 1}"
        answer = self.request("get_object", read_body=True, Key=self.key, Range=what, **condition)
        data: bytes = answer["Body"]
        found = re.fullmatch(r"bytes \d+-\d+/(\d{1,19})", answer.get("ContentRange", f"bytes 0-0/{len(data)}"))
        if found is None:
            raise RemoteError(
                f"{self.url}: the store does not say how many bytes it has. Check that it speaks S3.", code="CKPT0906"
            )
        return data, int(found[1]), get_required_value(answer, "ETag", self.url)

    def put(self, data: bytes, token: str | None) -> None:
        """Write a small object on the condition that it is unchanged, or that it does not exist.

        Args:
            data: the new bytes.
            token: the ETag that the object must still have; None if the object must not exist.

        Raises:
            ConditionFailed, NotFound: the condition does not hold.
        """
        condition: S3Answer = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        self.request("put_object", Key=self.key, Body=io.BytesIO(data), **condition)

    def delete(self) -> None:
        """Delete the object; in a bucket with versioning, hide it by a delete marker. A missing object is no error."""
        self.request("delete_object", Key=self.key)

    def pages(self, method: str, following: Mapping[str, str], **kwargs: Any) -> Iterator[S3Answer]:
        """Yield the pages of a listing.

        Args:
            method: of botocore's client, such as "list_parts".
            following: {argument of the next request: key of the previous response that holds its value}.
            kwargs: further arguments of the method, except Bucket.

        Raises:
            RemoteError: or one of its subclasses in retries.py; also if the listing has no end.
        """
        return follow_pages(
            self.url,
            lambda more: self.request(method, **kwargs, **more),
            lambda page: {k: page[name] for k, name in following.items()} if page.get("IsTruncated") else None,
        )

    def list_unfinished_uploads(self, prefix: str, ours: Callable[[str], bool]) -> list[tuple[str, str]]:
        """List the multipart uploads in this bucket that were neither completed nor aborted: [(key, upload id)]; [] if
        the store fails or refuses to list them.

        Args:
            prefix: list only keys that begin with it.
            ours: returns whether an upload to this key is wanted.
        """
        found: list[tuple[str, str]] = []
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        try:
            for page in self.pages("list_multipart_uploads", following, Prefix=prefix):
                for old in page.get("Uploads", []):
                    if ours(key := get_required_value(old, "Key", self.url)):
                        found.append((key, get_required_value(old, "UploadId", self.url)))
        except RemoteError:
            return []
        return found

    def put_part(self, upload: str, number: int, body: IO[bytes]) -> S3Answer:
        """Upload a part, and return its {"PartNumber", "ETag", checksums}, which are needed to complete the upload.

        Args:
            upload: id of the upload.
            number: of the part, from 1 on.
            body: a file of which the complete content is sent.

        Raises:
            NotFound: the upload was completed or aborted.
            RemoteError: the store fails.
        """
        answer = self.request("upload_part", Key=self.key, UploadId=upload, PartNumber=number, Body=body)
        return _make_completed_part(number, answer, self.url)

    def list_parts(self, upload: str, key: str | None = None) -> dict[int, S3Answer]:
        """List the parts of an upload: {part number: {"PartNumber", "ETag", checksums, "Size" in bytes}}.

        Args:
            upload: id of the upload.
            key: of the object; None for this one.

        Raises:
            NotFound: the upload was completed or aborted.
            RemoteError: the store fails.
        """
        out: dict[int, S3Answer] = {}
        for page in self.pages(
            "list_parts", {"PartNumberMarker": "NextPartNumberMarker"}, Key=key or self.key, UploadId=upload
        ):
            for row in page.get("Parts", []):
                number = get_required_value(row, "PartNumber", self.url)
                out[number] = {
                    **_make_completed_part(number, row, self.url),
                    "Size": get_required_value(row, "Size", self.url),
                }
        return out

    def has_parts(self, upload: str, key: str | None = None) -> bool:
        """Return whether the store has any part of an upload; False also if it does not know the upload or refuses to
        list parts.

        Args:
            upload: id of the upload.
            key: of the object; None for this one.

        Raises:
            RemoteError: the store fails.
        """
        try:
            return bool(self.list_parts(upload, key))
        except (NotFound, Denied, NotOffered):
            return False

    def lists_parts(self) -> bool:
        """Return whether the store implements ListParts, which some small ones lack, by asking for the parts of a
        made-up upload.

        Raises:
            RemoteError: the store fails.
        """
        try:
            self.list_parts("ckpttool-asks")
        except NotOffered:
            return False
        except (NotFound, Denied):
            pass
        return True

    def abort(self, upload: str, key: str | None = None) -> None:
        """Abort an upload, repeatedly until the store lists no part of it, since a part that was being sent may arrive
        after the first abort. An unknown upload is no error.

        Args:
            upload: id of the upload.
            key: of the object; None for this one.

        Raises:
            RemoteError: the store still lists parts, or fails.
        """
        key = key or self.key
        for k in range(POLICY.tries):
            try:
                self.request("abort_multipart_upload", Key=key, UploadId=upload)
            except NotFound:
                return
            try:
                if not self.list_parts(upload, key):
                    return
            except (NotFound, Denied, NotOffered):  # or nobody may look
                return
            time.sleep(POLICY.first_wait_seconds * 2**k)
        raise RemoteError(
            f"{self.url}: the store keeps parts of an upload that was aborted {POLICY.tries} times.", code="CKPT0906"
        )

    def head(self) -> S3Answer | None:
        """Return the object's metadata, as S3 answers head_object; None if it does not exist.

        Raises:
            RemoteError: the store fails or does not allow it.
        """
        try:
            return self.request("head_object", Key=self.key)
        except NotFound:
            return None

    def abort_uploads(self, left: Iterable[tuple[str, str]]) -> None:
        """Abort uploads of an earlier run; those that the store refuses to abort remain.

        Args:
            left: (key, upload id) of each.
        """
        for key, upload in left:
            try:
                self.abort(upload, key)
            except RemoteError:
                pass


def _make_completed_part(number: int, answer: Mapping[str, object], url: str) -> S3Answer:
    """Return the description of a part that S3 requires to complete an upload: {"PartNumber", "ETag", checksums}.

    Args:
        number: of the part, from 1 on.
        answer: the store's response to the upload of the part, or its entry in ListParts.
        url: of the object, for messages.

    Raises:
        RemoteError: the store gives no ETag.
    """
    sums = {k: v for k, v in answer.items() if k.startswith("Checksum") and k != "ChecksumType"}
    return {"PartNumber": number, "ETag": get_required_value(answer, "ETag", url), **sums}


def get_required_value(answer: Mapping[str, object], name: str, url: str) -> Any:
    """Return the value of a key that a response of S3 must have.

    Args:
        answer: the response.
        name: the key.
        url: of the object, for messages.

    Raises:
        RemoteError: the key is missing.
    """
    if name not in answer:
        raise RemoteError(
            f"{url}: the store answers without {name}, which S3 always gives. Check that it speaks S3.", code="CKPT0906"
        )
    return answer[name]


def s3_object(url: str) -> S3Object | None:
    """Return the object at a URL if the store speaks S3; otherwise None. It need not exist.

    Raises:
        UsageError: the URL is of no known store, or names a bucket alone.
    """
    fs, path, _ = filesystem_for(url)
    return S3Object(fs, path, url) if "s3" in get_protocols(fs) else None


def conditional_object(url: str) -> S3Object | AzureObject | None:
    """Return the object at a URL if the store has conditional writes, as S3 and Azure have; otherwise None. It need not
    exist.

    Raises:
        UsageError: the URL is of no known store, or names a bucket or container alone.
    """
    fs, path, _ = filesystem_for(url)
    return AzureObject(fs, path, url) if is_azure(fs) else s3_object(url)


def exists_error(url: str) -> DestinationExists:
    """Return the error for an object that is already there; it is not raised."""
    return DestinationExists(
        f"{url} exists. Choose another destination, or {argument('force', True)} to replace it.", code="CKPT0601"
    )


def delete_remote_object(url: str) -> None:
    """Delete the object at a URL; a bucket with versioning keeps its versions and only hides them by a delete marker. A
    missing object is no error.

    Raises:
        RemoteError: the store fails or does not allow it.
    """
    at = conditional_object(url)
    if at is not None:
        at.delete()
        return
    fs, path, _ = filesystem_for(url)
    try:
        with_retries(redact_url(url), lambda: fs.rm_file(path))
    except NotFound:
        pass


def delete_object_versions(url: str) -> None:
    """Delete the object at a URL with every version that an S3 store keeps, oldest first; in other stores only the
    current one. A missing object is no error.

    In a bucket with versioning, a deletion that names no version only hides the object, and no object lock prevents
    that. So every version is named.

    Raises:
        RemoteError: the store refuses, because of an object lock or of missing permissions.
    """
    at = s3_object(url)
    if at is None or not (at.head() or {}).get("VersionId"):
        delete_remote_object(url)
        return
    for version in _list_versions(at):
        at.request("delete_object", Key=at.key, VersionId=version)


def _list_versions(at: S3Object) -> list[str]:
    """List the version ids of an object, delete markers included, oldest first and the latest version last.

    Raises:
        RemoteError: the store fails, or gives no key, id or time of a version.
    """
    found: list[tuple[bool, datetime, str]] = []
    following = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
    for page in at.pages("list_object_versions", following, Prefix=at.key):
        for row in (*page.get("Versions", []), *page.get("DeleteMarkers", [])):
            key, version, when = (get_required_value(row, k, at.url) for k in ("Key", "VersionId", "LastModified"))
            if key == at.key:
                found.append((bool(row.get("IsLatest")), when, version))
    return [version for _, _, version in sorted(found, key=lambda v: v[:2])]


def set_legal_hold(url: str, *, on: bool) -> bool:
    """Set (`on`) or release the legal hold of an object; return False if the store or bucket has no object lock,
    otherwise True.

    Raises:
        RemoteError: the store does not allow it, or fails.
    """
    at = s3_object(url)
    if at is None:
        return False
    try:
        at.request("put_object_legal_hold", Key=at.key, LegalHold={"Status": "ON" if on else "OFF"})
    except (NotFound, Denied):
        raise
    except RemoteError as e:
        if NO_LOCK.search(str(e)):
            return False
        raise
    return True


def too_large_error(path: str, size: int) -> Unsafe:
    """Return the error for a file or object of more than `MOST_LEDGER_BYTES` bytes that would be read whole.

    Args:
        path: of it, or its URL without credentials.
        size: its bytes.
    """
    return Unsafe(
        f"{path} has {size:,} bytes. It is read into memory whole, so more than {MOST_LEDGER_BYTES:,} are refused, and "
        "ckpttool writes no such file. Take another copy.",
        code="CKPT0704",
    )


def get_with_token(url: str) -> tuple[bytes, str | None]:
    """Read an object for a later conditional write: (its bytes, token for `put_if_unchanged`); (b"", None) if it does
    not exist. The token is "" in a store without conditional writes.

    Raises:
        Unsafe: it has more than `MOST_LEDGER_BYTES` bytes.
        RemoteError: the store fails.
    """
    at = conditional_object(url)
    try:
        if at is not None:
            return _read_in_ranges(at)
    except NotFound:
        return b"", None
    folder, name = split_url(url)
    source = RemoteSource(folder)
    if not source.exists(name):
        return b"", None
    if (size := source.size(name)) > MOST_LEDGER_BYTES:
        raise too_large_error(redact_url(url), size)
    return source.read(name, 0, size), ""


def _read_in_ranges(at: S3Object | AzureObject) -> tuple[bytes, str]:
    """Return (all bytes of an object, its ETag). No more is read of any answer than was asked for, and every byte is of
    the object that has this ETag.

    Raises:
        NotFound: there is none.
        Unsafe: it has more than `MOST_LEDGER_BYTES` bytes.
        RemoteError: the store fails, says of one object that it has bytes and no first one, or others replaced the
            object during every try.
    """
    refused: tuple[int, str] | None = None  # bytes and ETag of the object whose first byte the store said is none
    for _ in range(_READS):
        try:
            data, size, token = at.read_range(0, _PIECE_BYTES)
        except BadRange:  # no object without bytes has a first one
            if (found := at.head()) is None:
                continue
            size, token = (get_required_value(found, name, at.url) for name in ("ContentLength", "ETag"))
            if size == 0:
                return b"", token
            if refused == (size, token):
                raise RemoteError(
                    f"{at.url}: the store says that it has {size:,} bytes, and that it has no first one (status 416). "
                    "Check the store and the proxy.",
                    code="CKPT0906",
                ) from None
            refused = size, token
            continue
        if size > MOST_LEDGER_BYTES:
            raise too_large_error(at.url, size)
        pieces = [data]
        try:
            for start in range(_PIECE_BYTES, size, _PIECE_BYTES):
                data, *now = at.read_range(start, _PIECE_BYTES, token)
                if now != [size, token]:  # a store that ignores the condition
                    raise ConditionFailed(f"{at.url} was replaced while it was read.")
                pieces.append(data)
        except (BadRange, ConditionFailed):
            continue
        whole = b"".join(pieces)
        if len(whole) != size:
            raise RemoteError(
                f"{at.url}: the store says that it has {size:,} bytes, and sends {len(whole):,}. Check the store and "
                "the proxy.",
                code="CKPT0906",
            )
        return whole, token
    raise RemoteError(
        f"{at.url}: somebody else replaced it each of the {_READS} times we read it. Try again.", code="CKPT0908"
    )


def put_if_unchanged(url: str, data: bytes, token: str | None) -> bool:
    """Write a small object if it is unchanged since `get_with_token`, and return True; return False if it has changed.

    False may also mean that it was written and the response was lost: read it again before another attempt.

    Args:
        url: of the object.
        data: the new bytes.
        token: what `get_with_token` returned; None if the object must not exist.

    Raises:
        Unsupported: the store has no conditional writes; only S3 (and compatible stores) and Azure have.
        RemoteError: the store fails.
    """
    at = conditional_object(url)
    if at is None:
        raise Unsupported(
            f"{redact_url(url)}: this kind of store has no conditional writes; a ledger needs them. Use S3, "
            "Azure or a folder.",
            code="CKPT0340",
        )
    try:
        at.put(data, token)
    except (ConditionFailed, NotFound):  # with If-Match, missing is another one's deletion
        return False
    return True
