"""One model repository on the Hub, through huggingface_hub.

Endpoint, token, proxy and retries are huggingface_hub's business: HF_ENDPOINT, HF_TOKEN, `hf auth login`. Its
exceptions become errors of errors.py that say what to do; its own progress and its messages about retries, which
contain signed URLs, are not shown. Requests are repeated after transient errors, except a commit, which may have
succeeded although no answer came.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import CkpttoolError, RemoteError, UsageError, argument
from ..storage import remote, retries, urls
from ..storage.answer_limits import LIMITS, RequestBudget, Stalled, within_budget, within_budget_in_all_threads
from ..storage.hub_limits import bound_hub_client, get_commit_hash, make_hub_answer_error

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

__all__ = [
    "CommitConflict",
    "FileToSend",
    "RejectedError",
    "RemoteFile",
    "Repository",
    "RepositoryState",
    "TransientError",
    "parse_target",
    "silence_hub_client",
]

T = TypeVar("T")

_TRIES, _WAIT = 5, 0.5  # seconds before the second try, doubled before each further one
_BATCH = 500  # paths in one question
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_TARGET = re.compile(rf"(?:hf://)?(?P<id>{_NAME}/{_NAME})(?:@(?P<revision>[^@\s]+))?/?")
_FAULTS = (AssertionError, AttributeError, LookupError, TypeError)  # also of who reads an answer of another shape
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels", "models")


class CommitConflict(RemoteError):
    """Somebody else committed first."""

    code = "CKPT0908"


class TransientError(RemoteError):
    """An error that may be temporary, but persisted through all retries."""

    code = "CKPT0901"


class RejectedError(RemoteError):
    """The Hub rejects the request itself, whoever sends it."""

    code = "CKPT0905"


class RemoteFile(NamedTuple):
    """A file of a commit: bytes, SHA-256 if it is in LFS, and the id of its git blob."""

    size: int
    sha256: str | None
    oid: str


class RepositoryState(NamedTuple):
    """A repository at one commit."""

    private: bool
    commit: str
    files: dict[str, RemoteFile]


class FileToSend(NamedTuple):
    """One file to send: a file object, bytes or a path, with its size, first bytes and SHA-256 (hex)."""

    name: str
    what: Any
    size: int
    sample: bytes
    sha256: str


def parse_target(text: str) -> tuple[str, str | None]:
    """Parse the address of a model repository, "hf://org/name@revision", "hf://org/name" or "org/name", and return
    ("org/name", revision or None).

    Raises:
        UsageError: it is none of these.
    """
    kind, _, rest = text.removeprefix("hf://").partition("/")
    if kind in ("datasets", "buckets") and "/" in rest:
        writing = " To fill one, convert to a folder and run `hf buckets sync FOLDER URL`." if kind == "buckets" else ""
        raise UsageError(
            f"{urls.redact_url(text)} is a {kind[:-1]} on the Hub; push and pull take model repositories, "
            f"hf://org/name. `ckpttool convert` reads it.{writing}",
            code="CKPT0214",
        )
    found = _TARGET.fullmatch(text)
    if not found or found["id"].split("/")[0] in _OTHER_KINDS or ".." in text or "--" in found["id"]:
        raise UsageError(
            f"{urls.redact_url(text)!r} is not a model repository; write hf://org/name or hf://org/name@branch.",
            code="CKPT0214",
        )
    revision = found["revision"]
    return found["id"], None if revision is None else revision.replace("%2F", "/").replace("%2f", "/")


class Repository:
    """A model repository, which may not exist yet."""

    def __init__(self, repo_id: str) -> None:
        """Prepare to ask the Hub about the repository "org/name"; nothing is sent yet."""
        from huggingface_hub import HfApi

        self.repo_id, self.url = repo_id, f"hf://{repo_id}"
        self.api: Any = HfApi(library_name="ckpttool")

    @property
    def page(self) -> str:
        """Return the address of the repository for a browser."""
        return f"{urls.redact_url(self.api.endpoint)}/{self.repo_id}"

    def ask(self, call: Callable[[], T], tries: int = _TRIES, *, writes: bool = False) -> T:
        """Call a function that uses huggingface_hub and return its result; after transient errors, call it again. The
        size of answers and the time to wait for them are limited (storage/answer_limits.py).

        Args:
            call: the function.
            tries: the largest number of calls.
            writes: whether the call sends data, so that an answer may take long.

        Raises:
            NotFound: there is no such repository, revision or file, or the token may not see it.
            CommitConflict, TransientError, RejectedError, RemoteError: other errors of the Hub; the message says what
                to do.
            CkpttoolError: as raised inside the call.
        """
        bound_hub_client()
        budget, stalls = RequestBudget(self.url, writes=writes), 0
        for k in range(tries):
            budget.start_try()
            try:
                with silence_hub_client(), within_budget_in_all_threads(budget) if writes else within_budget(budget):
                    return call()
            except Exception as e:
                if isinstance(e, _FAULTS) and _was_raised_by_ckpttool(e):
                    raise
                error = self._convert_error(e, writes)
            if isinstance(error, Stalled):
                stalls += 1
            again = isinstance(error, TransientError) or (isinstance(error, Stalled) and stalls < LIMITS.stalls)
            if not again or k + 1 == tries:
                raise error from None
            time.sleep(_WAIT * 2**k)
        raise AssertionError

    def _convert_error(self, e: Exception, writes: bool) -> CkpttoolError:
        """Convert an exception that `ask` has caught to an error of ckpttool, whose message says what to do; `writes`
        as in `ask`."""
        for inner in _iterate_error_chain(e):
            if isinstance(inner, CkpttoolError):
                return inner
            if type(inner).__name__ == "OfflineModeIsEnabled":
                return RemoteError(
                    f"{self.url}: HF_HUB_OFFLINE is set, so the Hub is not contacted. Unset it.", code="CKPT0901"
                )
        if isinstance(e, _FAULTS):
            return RemoteError(
                f"{self.url}: {urls.redact_url(self.api.endpoint)} does not answer like a Hub ({type(e).__name__}: "
                f"{retries.redact_message(e)}). Check HF_ENDPOINT and the proxy, then run the same command again.",
                code="CKPT0906",
            )
        kind, by = retries.classify_error(e)
        if isinstance(e, JSONDecodeError):  # an answer that is no JSON is of something in between
            kind = None
        words, status = _shorten_message(by), getattr(getattr(by, "response", None), "status_code", None)
        again = "run the same command again" + "; files that were uploaded are not uploaded again" * writes
        if kind is None and status == 429:
            return TransientError(
                f"{self.url}: too many requests to the Hub ({words}). Wait a few minutes, then {again}.",
                code="CKPT0902",
            )
        if kind is None:
            return TransientError(
                f"{self.url}: the Hub at {urls.redact_url(self.api.endpoint)} does not answer ({words}). Check the "
                f"network and HF_ENDPOINT, then {again}.",
                code="CKPT0901",
            )
        if kind is retries.ConditionFailed or status == 409:
            return CommitConflict(
                f"{self.url}: somebody else is writing to the repository ({words}). Run the same command again; what "
                "was sent is not sent again."
            )
        if status == 401:
            return RemoteError(
                f"{self.url}: not authenticated, or there is no such repository ({words}). Log in with "
                "`hf auth login` or set HF_TOKEN; a Hub of your own is named by HF_ENDPOINT.",
                code="CKPT0903",
            )
        if status == 403:
            return RemoteError(
                f"{self.url}: the token does not allow this ({words}). Use one with write access to this repository "
                f"(`hf auth login`, HF_TOKEN), or use {argument('pull_request', True)}, which proposes the files.",
                code="CKPT0903",
            )
        if kind is retries.NotFound:
            return retries.NotFound(
                f"{self.url}: not found, or the token may not see it ({words}). Check the name and the "
                "revision; log in with `hf auth login` or set HF_TOKEN."
            )
        return RejectedError(f"{self.url}: the Hub refuses ({words}).")

    # ----------------------------------------------------------------------------------------------------- questions

    def read_state(self, revision: str | None = None) -> RepositoryState | None:
        """Return the visibility, commit and files of the repository at a revision; None if the token sees no such
        repository or revision.

        Args:
            revision: branch, tag or commit; None: main.

        Raises:
            RemoteError: the Hub cannot be asked, or its answer makes no sense. Unsafe: a file's name leads elsewhere.
        """
        try:
            found = self.ask(lambda: self.api.repo_info(self.repo_id, revision=revision, expand=["private", "sha"]))
        except retries.NotFound:
            return None
        private, commit, files = self._read_visibility(found), get_commit_hash(found.sha, self.url), {}
        for f in self.ask(lambda: self._list_files(commit)):
            files[f.path] = self._convert_file(f)
        return RepositoryState(private, commit, files)

    def _read_visibility(self, found: Any) -> bool:
        """Return whether a repository is private, from the answer of huggingface_hub's `repo_info`; one that does not
        say so counts as public.

        Raises:
            RemoteError: the Hub says something else than yes or no.
        """
        if not isinstance(found.private, bool | None):
            raise make_hub_answer_error(self.url, found.private, "true or false (private)")
        return bool(found.private)

    def _list_files(self, commit: str) -> list[RepoFile]:
        """Return the files of a commit as objects of huggingface_hub, with their names checked.

        Raises:
            RemoteError: the Hub lists a file twice, too many, or one without a name.
            Unsafe: a file's name leads elsewhere.
        """
        found: dict[str, RepoFile] = {}
        for f in self.api.list_repo_tree(self.repo_id, recursive=True, revision=commit):
            if not hasattr(f, "blob_id"):
                continue
            name = urls.check_object_name(self._check_name(f.path), self.url)
            if name in found or len(found) >= LIMITS.names:
                many = f"{name!r} twice" if name in found else f"more than {LIMITS.names:,} files"
                raise RemoteError(f"{self.url}: the Hub lists {many}. Check HF_ENDPOINT.", code="CKPT0906")
            found[name] = f
        return list(found.values())

    def _check_name(self, name: object) -> str:
        """Return the name of a file or branch, from an answer of the Hub, as it is.

        Raises:
            RemoteError: it is not a string.
        """
        if not isinstance(name, str):
            raise make_hub_answer_error(self.url, name, "the name of a file or branch")
        return name

    def _convert_file(self, f: RepoFile) -> RemoteFile:
        """Convert a file, given as an object of huggingface_hub, to its size and hashes.

        Raises:
            RemoteError: these have unexpected types.
        """
        out = RemoteFile(f.size, f.lfs.sha256 if f.lfs else None, f.blob_id)
        if (
            not isinstance(out.size, int)
            or out.size < 0
            or not isinstance(out.oid, str)
            or not isinstance(out.sha256, str | None)
        ):
            raise RemoteError(
                f"{self.url}: the Hub lists {str(f.path)[:200]!r} without a size and hashes. Check HF_ENDPOINT.",
                code="CKPT0906",
            )
        return out

    def is_private(self) -> bool:
        """Whether the repository is private now; asks the Hub, and raises RemoteError if that fails."""
        return self._read_visibility(self.ask(lambda: self.api.repo_info(self.repo_id, expand=["private"])))

    def list_branches(self) -> set[str]:
        """Return the names of the repository's branches; raises RemoteError if the Hub cannot be asked."""
        return {self._check_name(b.name) for b in self.ask(lambda: self.api.list_repo_refs(self.repo_id)).branches}

    def read_file(self, name: str, commit: str, most_bytes: int) -> bytes:
        """Return the content of a small file of a commit.

        Raises:
            CkpttoolError: there is no such file, it has more than `most_bytes` bytes, or the Hub cannot be asked.
        """
        with remote.RemoteSource(f"{self.url}@{commit}") as source:
            return source.read_all(name, most_bytes)

    def file_infos(self, names: Sequence[str], commit: str) -> dict[str, RemoteFile]:
        """Ask the Hub for some files of a commit, and return {name: size and hashes}; missing files are left out.

        Raises:
            RemoteError: the Hub cannot be asked, or its answer makes no sense.
        """
        out: dict[str, RemoteFile] = {}
        for k in range(0, len(names), _BATCH):
            part = list(names[k : k + _BATCH])
            found = self.ask(lambda part=part: self.api.get_paths_info(self.repo_id, part, revision=commit))  # type: ignore[misc]
            for f in found:
                if hasattr(f, "blob_id"):
                    out[self._check_name(f.path)] = self._convert_file(f)
        return out

    # ------------------------------------------------------------------------------------------------------- actions

    def create_repository(self, private: bool) -> None:
        """Create the repository, unless it exists; an existing one keeps its visibility. Raises RemoteError if that
        fails."""
        self.ask(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))

    def create_branch(self, name: str) -> None:
        """Create a branch from the head of main, unless it exists; raises RemoteError if that fails."""
        self.ask(lambda: self.api.create_branch(self.repo_id, branch=name, exist_ok=True))

    def check_write_access(self, revision: str | None, pull: bool) -> None:
        """Check that the token may upload files, with the first request of an upload.

        Args:
            revision: the branch; None: main.
            pull: whether the files would go into a pull request.

        Raises:
            RemoteError: it may not, or the Hub cannot be asked.
        """
        from huggingface_hub import CommitOperationAdd

        small = [CommitOperationAdd("ckpttool.json", b"{}")]
        self.ask(lambda: self.api.preupload_lfs_files(self.repo_id, small, revision=revision, create_pr=pull))

    def upload_files(
        self, files: Sequence[FileToSend], revision: str | None, pull: bool, jobs: int
    ) -> Sequence[object]:
        """Upload the files that belong into LFS (git's storage for large files) and are not on the Hub yet; nothing is
        committed.

        Returns one operation of huggingface_hub for each file, for `commit`.

        Args:
            revision: the branch; None: main.
            pull: whether the files go into a pull request.
            jobs: files at the same time.

        Raises:
            TransientError: try again; complete files are on the Hub. RejectedError, RemoteError: the Hub refuses.
            CkpttoolError: what reading a file raises.
        """
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        class Add(CommitOperationAdd):
            """A file with a known hash, which huggingface_hub would otherwise compute by reading it once more."""

            def __post_init__(self) -> None:
                file = by_name[self.path_in_repo]
                self.upload_info = UploadInfo(sha256=bytes.fromhex(file.sha256), size=file.size, sample=file.sample)

        by_name = {f.name: f for f in files}
        adds = [Add(f.name, f.what) for f in files]
        # the repository's .gitignore would leave files out silently; ours is empty
        self.ask(
            lambda: self.api.preupload_lfs_files(
                self.repo_id, adds, revision=revision, create_pr=pull, num_threads=jobs, gitignore_content=""
            ),
            tries=3,
            writes=True,
        )
        return adds

    def commit(
        self, adds: Sequence[object], gone: Sequence[str], message: str, parent: str, revision: str | None, pull: bool
    ) -> tuple[str, str | None]:
        """Make one commit; returns (its id, the address of the pull request or None).

        Args:
            adds: the operations that `upload_files` returned.
            gone: names of files to delete.
            message: title of the commit.
            parent: the commit that must be the head of the branch.
            revision: the branch; None for main.
            pull: whether to open a pull request instead of committing to the branch.

        Raises:
            CommitConflict: the head is another commit than `parent`. TransientError: no answer, or one that names no
                commit; the commit may exist. RejectedError, RemoteError: the Hub refuses.
        """
        from huggingface_hub import CommitOperationDelete

        operations = [*adds, *(CommitOperationDelete(n, is_folder=False) for n in gone)]

        def create() -> Any:
            """Make the commit; raises RemoteError if huggingface_hub cannot parse an answer that is no error."""
            try:
                return self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=message,
                    revision=revision,
                    create_pr=pull,
                    parent_commit=parent,
                )
            except (ValueError, RuntimeError) as e:
                if isinstance(e, JSONDecodeError) or any(
                    isinstance(x, CkpttoolError) or hasattr(x, "response") for x in _iterate_error_chain(e)
                ):
                    raise
                raise RemoteError(f"{self.url}: {_shorten_message(e).rstrip('.')}.", code="CKPT0906") from None

        try:
            done = self.ask(create, tries=1, writes=True)
            return get_commit_hash(done.oid, self.url), done.pr_url  # the latter was parsed already
        except RemoteError as e:
            if e.code != "CKPT0906":
                raise
            raise TransientError(
                f"{e} That was the answer to a commit, which may have been made: look at {self.page} first.",
                code="CKPT0906",
            ) from None


def _was_raised_by_ckpttool(e: BaseException) -> bool:
    """Whether an exception was raised in the code of ckpttool, and is thus a bug, and not in that of
    huggingface_hub."""
    at = e.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).startswith("ckpttool.")


def _iterate_error_chain(e: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then its cause or else its context, then that of the latter, and so on; nothing for None."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        yield e
        e = e.__cause__ or e.__context__


def _shorten_message(e: BaseException) -> str:
    """Return the message of an exception of huggingface_hub without secrets and boilerplate."""
    text = retries.redact_message(e)
    text = re.sub(r"(Client|Server) error '(\d+ [^']*)' for url '[^']*'", r"\2", text)
    text = re.sub(r" ?For more information check: \S+| ?\(Request ID: [^)]*\)", "", text)
    text = re.sub(r"[. ]*Cannot access content at: \S+ Make sure your token has the correct permissions\.?", "", text)
    return re.sub(r"(?<=[A-Za-z]) (?=[A-Z]\w+ \w)", ": ", text, count=1) if re.match(r"\d{3} ", text) else text


@contextmanager
def silence_hub_client() -> Iterator[None]:
    """Turn off huggingface_hub's progress bars and its log messages below errors, which contain signed URLs, while
    the block runs."""
    from huggingface_hub import utils

    bars: Any = utils
    logger, forced = logging.getLogger("huggingface_hub"), "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ
    level, shown = logger.level, not forced and not bars.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if shown:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            bars.enable_progress_bars()
