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
from typing import IO, TYPE_CHECKING, Any

from ..errors import DestinationExists, RemoteError, Unsupported, UsageError, argument
from .answer_limits import current_budget, watch_upload
from .azure import AzureObject, is_azure
from .listings import follow_pages
from .remote import filesystem_for
from .retries import POLICY, ConditionFailed, Denied, NotFound, NotOffered, with_retries
from .urls import redact_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "NO_LOCK",
    "S3Answer",
    "S3Object",
    "conditional_object",
    "exists_error",
    "get_with_token",
    "hide_object",
    "put_if_unchanged",
    "remove_object",
    "required_value",
    "s3_object",
    "set_legal_hold",
]

#: An answer of S3's API, or a part of one, as botocore parses it.
S3Answer = dict[str, Any]

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
            answer: S3Answer = await (watch_upload(asked, body, budget) if budget and budget.writes else asked)
            if read_body:
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
            return answer

        return with_retries(self.url, lambda: sync(self.fs.loop, call), writes=method in _WRITES)

    def read(self) -> tuple[bytes, str]:
        """Return (bytes of a small object, its ETag).

        Raises:
            NotFound: there is none.
        """
        answer = self.request("get_object", read_body=True, Key=self.key)
        return answer["Body"], required_value(answer, "ETag", self.url)

    def put(self, data: bytes, token: str | None) -> None:
        """Write a small object.

        Args:
            data: the new bytes.
            token: the ETag that the object must have; None if there must be no such object.

        Raises:
            ConditionFailed, NotFound: it is another one by now.
        """
        condition: S3Answer = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        self.request("put_object", Key=self.key, Body=io.BytesIO(data), **condition)

    def delete(self) -> None:
        """Remove the object from sight; a missing one is no error."""
        self.request("delete_object", Key=self.key)

    def pages(self, method: str, following: Mapping[str, str], **kwargs: Any) -> Iterator[S3Answer]:
        """Yield the answers to a request that lists something, page by page.

        Args:
            method: of botocore's client, such as "list_parts".
            following: {argument for the next page: the key of an answer that has its value}.
            kwargs: further arguments of the method, except Bucket.

        Raises:
            RemoteError: or one of its subclasses in retries.py; the listing has no end.
        """
        return follow_pages(
            self.url,
            lambda more: self.request(method, **kwargs, **more),
            lambda page: {k: page[name] for k, name in following.items()} if page.get("IsTruncated") else None,
        )

    def list_unfinished_uploads(self, prefix: str, ours: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Return [(key, id)] of the uploads in this bucket that were begun and never completed; [] if the store fails
        or does not allow listing them.

        Args:
            prefix: what their keys begin with.
            ours: tells by its key whether an upload is to be listed.
        """
        found: list[tuple[str, str]] = []
        following = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        try:
            for page in self.pages("list_multipart_uploads", following, Prefix=prefix):
                found += [(old["Key"], old["UploadId"]) for old in page.get("Uploads", []) if ours(old["Key"])]
        except RemoteError:
            return []
        return found

    def put_part(self, upload: str, number: int, body: IO[bytes]) -> S3Answer:
        """Send a part of an upload, and return its number, ETag and checksums, which complete the upload later.

        Args:
            upload: id of the upload.
            number: of the part, from 1 on.
            body: a file whose whole content is sent.

        Raises:
            NotFound: the upload was completed or aborted.
            RemoteError: the store fails.
        """
        answer = self.request("upload_part", Key=self.key, UploadId=upload, PartNumber=number, Body=body)
        return _completed_part(number, answer, self.url)

    def list_parts(self, upload: str, key: str | None = None) -> dict[int, S3Answer]:
        """Return the parts of an upload that the store has: {number: its number, ETag, checksums and "Size" in bytes}.

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
                number = required_value(row, "PartNumber", self.url)
                out[number] = {**_completed_part(number, row, self.url), "Size": required_value(row, "Size", self.url)}
        return out

    def has_parts(self, upload: str, key: str | None = None) -> bool:
        """Return whether the store has parts of an upload (its id) to the object `key`, this one where None; False if
        the store does not know the upload or does not allow looking."""
        try:
            return bool(self.list_parts(upload, key))
        except (NotFound, Denied, NotOffered):
            return False

    def lists_parts(self) -> bool:
        """Return whether the store has ListParts, which some small ones lack. It is asked about an upload that is not.

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
        """Abort an upload, again until the store lists no part of it: a part that was on its way may arrive after the
        first time. An upload that is gone already is no error.

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
        """Abort uploads, [(key, id)], which an earlier run left; what cannot be aborted stays."""
        for key, upload in left:
            try:
                self.abort(upload, key)
            except RemoteError:
                pass


def _completed_part(number: int, answer: Mapping[str, Any], url: str) -> S3Answer:
    """Return what S3 wants to know of a part when the upload is completed: its number, ETag and checksums.

    Args:
        number: of the part, from 1 on.
        answer: what the store says of the part.
        url: of the object, for messages.

    Raises:
        RemoteError: the store gives no ETag.
    """
    sums = {k: v for k, v in answer.items() if k.startswith("Checksum") and k != "ChecksumType"}
    return {"PartNumber": number, "ETag": required_value(answer, "ETag", url), **sums}


def required_value(answer: Mapping[str, Any], name: str, url: str) -> Any:
    """Return the value `name` of an answer of S3; `url` is for messages.

    Raises:
        RemoteError: the store does not give it.
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
    protocol = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
    return S3Object(fs, path, url) if "s3" in protocol else None


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


def hide_object(url: str) -> None:
    """Remove an object from sight; a bucket that keeps versions keeps those that were there. A missing object is no
    error.

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


def remove_object(url: str) -> None:
    """Remove an object, with every version that an S3 store keeps of it, the oldest first; a missing object is not an
    error. Those of other stores are left to the rules of the account.

    In a bucket with versions, a deletion that names no version only hides the object, and no lock prevents that. So
    every version is named.

    Raises:
        RemoteError: the store refuses, because of an object lock or of missing permissions.
    """
    at = s3_object(url)
    if at is None or not (at.head() or {}).get("VersionId"):
        hide_object(url)
        return
    for version in _list_versions(at):
        at.request("delete_object", Key=at.key, VersionId=version)


def _list_versions(at: S3Object) -> list[str]:
    """Return the ids of the object's versions and of the marks of its deletion, the oldest first."""
    found: list[S3Answer] = []
    following = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
    for page in at.pages("list_object_versions", following, Prefix=at.key):
        found += [v for v in (*page.get("Versions", []), *page.get("DeleteMarkers", [])) if v["Key"] == at.key]
    return [v["VersionId"] for v in sorted(found, key=lambda v: (bool(v.get("IsLatest")), v["LastModified"]))]


def set_legal_hold(url: str, *, on: bool) -> bool:
    """Put the object under a legal hold of the store (`on`), or end it; returns False if the store or bucket has no
    such thing.

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


def get_with_token(url: str) -> tuple[bytes, str | None]:
    """Return (bytes of a small object, token that `put_if_unchanged` takes); (b"", None) if it does not exist. The
    token is "" in a store without conditional writes.

    Raises:
        RemoteError: the store fails.
    """
    at = conditional_object(url)
    try:
        if at is None:
            fs, path, _ = filesystem_for(url)
            return with_retries(redact_url(url), lambda: fs.cat_file(path)), ""
        return at.read()
    except NotFound:
        return b"", None


def put_if_unchanged(url: str, data: bytes, token: str | None) -> bool:
    """Write a small object if it is still the one that `get_with_token` saw, and return True; False if it is not.

    False may also mean that it was written and the answer was lost: look again before you write again.

    Args:
        data: the new bytes.
        token: what `get_with_token` returned; None if there must be no such object.

    Raises:
        Unsupported: the store has no conditional writes; only S3 and its like, and Azure, do.
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
