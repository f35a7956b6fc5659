"""push: any layout becomes a repository on the Hub that from_pretrained loads, without a copy on disk.

    plan -> screen -> repository -> hash -> look, card, ckpttool.json -> send -> one commit -> check

The draft of the hf layout determines the bytes of each file. They are read twice: once for hashes (SHA-256, which the
Hub wants before the upload, and BLAKE3 of every tensor, which ckpttool.json records), and once for the upload. Hashes
are kept (journal.py), so an interrupted push hashes nothing again and uploads only files that the Hub does not have.
With a staging folder, the draft is written to disk first and uploaded from there, by Xet if the Hub offers it.

Whatever cannot be written, must not be pushed or is not allowed with the token is refused before the source is read.
Everything becomes visible in one commit on top of the commit that was inspected; if somebody else commits meanwhile,
everything is inspected again. Afterwards the Hub is asked for the hash of every file at the new commit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, TypeVar, Unpack

from .._version import __version__
from ..bounded_json import parse
from ..engine import conversion, plan_files, planning, recorded, verification
from ..engine.copy.fill import describe_cast_losses, record_cast_losses
from ..engine.copy.tensor_digests import reporting
from ..engine.recorded import MOST_RECORD_BYTES, RECORD
from ..errors import Corrupt, DestinationExists, Interrupted, RemoteError, Unsafe, UsageError, argument, note_change
from ..index.names import step_count
from ..options import (
    HUB_LAYOUT,
    OpenOptions,
    Progress,
    PushKeywords,
    RunOptions,
    WriteRequest,
    list_keywords,
    split_keywords,
)
from ..storage.buffers import IOBudget
from ..storage.source import closed_on_error
from ..storage.urls import make_path_absolute
from . import model_card, screening
from .client import CommitConflict, FileToSend, RejectedError, Repository, RepositoryState, TransientError, parse_target
from .hashing import ByteCounter, FileHashes, hash_contents, hash_paths
from .journal import Journal
from .push_file import PushFile
from .push_target import PushTarget
from .virtual_files import Content, VirtualFile, make_contents

__all__ = ["Push", "Pushed", "push", "push_checkpoint"]

T = TypeVar("T")

_CARD = "README.md"
_ROUNDS = 3  # times that all is looked at anew when somebody else commits meanwhile


@dataclass
class Pushed:
    """The result of a push. Names of files are sorted; bytes are those on the Hub."""

    source: str
    layout_from: str
    url: str
    revision: str | None
    private: bool
    created: bool  # whether the repository was made
    commit: str | None = None  # None where nothing was committed
    page: str | None = None  # of the commit or of the pull request
    files: dict[str, int] = field(default_factory=dict)  # {name: bytes} of all that belong to the push
    sent: dict[str, int] = field(default_factory=dict)  # those whose bytes went over the network, or would
    there: list[str] = field(default_factory=list)  # those that the Hub had
    deleted: list[str] = field(default_factory=list)
    digest: dict[str, str] = field(default_factory=dict)
    dropped: list[tuple[str, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_read: list[dict[str, object]] = field(default_factory=list)  # files of the source that no layout read


@list_keywords
def push(
    src: str | os.PathLike[str],
    target: str,
    *,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
    stage: str | None = None,
    threads: int = 4,
    dry_run: bool = False,
    **keywords: Unpack[PushKeywords],
) -> Pushed:
    """Push a checkpoint, in any layout, to a model repository of the Hugging Face Hub.

    Args:
        src: path or URL of the checkpoint.
        target: "hf://org/name", with "@branch" if that is not main.
        options: an `HfOptions`: the adapter alone, the optimizer too, the size of files.
        public: whether a new repository is public. The visibility of an existing one is not changed.
        revision: a branch, which is created if it is missing; None: that of `target`, or main.
        pull_request: open a pull request instead of a commit on the branch.
        message: title of the commit; None: one that names the checkpoint and step.
        stage: folder to write the files to first; None: upload them as they are read.
        threads: number of files that are hashed, and uploaded, at the same time.
        dry_run: ask the Hub, but read no tensor, upload and create nothing.
        (the others): as `convert`.

    Raises:
        CkpttoolError: one of errors.py. Before the commit, nothing in the repository changes, except that it or the
            branch may have been created. Differs: the Hub does not have what was uploaded.
    """
    reading, writing, running = split_keywords(keywords)
    return push_checkpoint(
        os.fspath(src),
        target,
        reading,
        writing,
        revision=revision,
        public=public,
        pull_request=pull_request,
        message=message,
        stage=stage,
        threads=threads,
        dry_run=dry_run,
        progress=running.progress,
    )


def push_checkpoint(
    src: str,
    target: str,
    reading: OpenOptions,
    writing: WriteRequest,
    *,
    revision: str | None,
    public: bool,
    pull_request: bool,
    message: str | None,
    stage: str | None,
    threads: int,
    dry_run: bool,
    progress: Progress,
) -> Pushed:
    """Push a checkpoint, in any layout, to a model repository of the Hugging Face Hub; the command line calls this.

    Args:
        src: path or URL of the checkpoint.
        target: "hf://org/name", or "hf://org/name@branch".
        reading, writing: how to read the checkpoint, and what to write, with the options of the hf layout.
        revision: a branch, which is created if it is missing; None: that of `target`, or main.
        public: whether a new repository is public; an existing one must be so.
        pull_request: open a pull request instead of a commit on the branch.
        message: title of the commit; None: one that names the checkpoint and step.
        stage: folder to write the files to first; None: upload them as they are read.
        threads: files that are hashed, and uploaded, at the same time.
        dry_run: ask the Hub, but read no tensor, upload and create nothing.
        progress: called with (stage, bytes done, bytes in all).

    Raises:
        CkpttoolError: no commit was made, but the repository or the branch may have been created; or the commit was
            made and not checked, which the message says.
        Differs: the Hub does not have what was uploaded.
    """
    with (
        reporting(progress),
        Push(
            src,
            target,
            reading,
            writing,
            revision=revision,
            public=public,
            pull_request=pull_request,
            message=message,
            threads=threads,
        ) as run,
    ):
        return run.preview() if dry_run else run.push(stage, progress)


class Push:
    """One push: the source is open and its draft is planned; nothing has been uploaded. Use it in a `with`
    statement."""

    def __init__(
        self,
        src: str,
        target: str,
        reading: OpenOptions,
        writing: WriteRequest,
        *,
        revision: str | None = None,
        public: bool = False,
        pull_request: bool = False,
        message: str | None = None,
        threads: int = 4,
    ) -> None:
        """Open the source, plan the files, and refuse what is never pushed; the Hub is not asked yet.

        Args:
            src: path or URL of the checkpoint.
            target: "hf://org/name", or "hf://org/name@branch".
            reading, writing: how to read the checkpoint, and what to write.
            revision: the branch; None: that of `target`, or main.
            public: whether a new repository is public; an existing one must be so.
            pull_request: open a pull request instead of a commit on the branch.
            message: title of the commit; None: one that names the checkpoint and step.
            threads: files that are hashed, and uploaded, at the same time.

        Raises:
            UsageError: an argument is invalid, or two contradict each other. Unsafe: a file contains a pickle or a
                secret.
            CkpttoolError: the checkpoint cannot be read or converted.
        """
        if threads < 1:
            raise UsageError(f"{argument('threads', threads)}: it must be at least 1.", code="CKPT0203")
        repo_id, named = parse_target(target)
        if named and revision and named != revision:
            raise UsageError(
                f"{target} names the revision {named}, {argument('revision', revision)}; give one of them.",
                code="CKPT0204",
            )
        self.src, self.repo_id, self.revision = src, repo_id, revision or named
        self.public, self.pull, self.message, self.jobs = public, pull_request, message, threads
        self.reading, self.writing = reading, replace(writing, to=HUB_LAYOUT)
        self.planned = planned = planning.plan_conversion(src, f"{repo_id}/", reading, self.writing, False)
        self.opened, self.draft, self.layout = planned.opened, planned.draft, planned.target
        with closed_on_error([self.opened.source]):
            self.files = make_contents(self.opened, self.draft, IOBudget(1))
            screening.refuse_forbidden((c.name, _select_searchable_bytes(c)) for c in self.files)
            screening.refuse_forbidden([(RECORD, "\n".join(self.draft.sources).encode("utf-8", "replace"))])
            self.repository = Repository(repo_id)
        ckpt = self.opened.checkpoint
        self.notes = [*ckpt.notes, *self.draft.notes]
        if not self.opened.source.has_versions():
            self.notes.append(
                "the server gives no versions of its files: a change while they are read would not be noticed, and "
                "hashes are not kept for another run"
            )
        self.adapter = bool(getattr(writing.options, "adapter", False))
        self.target = PushTarget(
            self.repository, repo_id, self.revision, public, self.adapter, frozenset(c.name for c in self.files)
        )
        self.taken_over = False  # whether hashes are those of an earlier run
        self.made: str | None = None  # the commit, once it is there

    def __enter__(self) -> Push:
        """Return this push, for a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the source at the end of the `with` block; an exception of the block is raised again."""
        self.opened.source.close()

    # ------------------------------------------------------------------------------------------------- two answers

    def preview(self) -> Pushed:
        """Return the result as far as it is known without reading tensors, creating or uploading anything. `sent` are
        the files that would be uploaded.

        Raises:
            UsageError: the repository has another visibility, or the revision cannot be a branch. Unsupported: its
                README.md cannot be updated. RemoteError: the Hub cannot be asked.
        """
        state = self.target.refuse_visibility(self.repository.read_state())
        if state is not None and self.target.needs_branch():
            self.notes.append(f"the branch {self.revision} would be created")
        elif state is not None and self.revision:
            state = self.repository.read_state(self.revision)
        if state is not None:
            self.target.read_card(state)
        out = self.initial_result(state, state is None)
        out.files = {c.name: c.size for c in self.files}
        journal = self.open_journal()
        for c in self.files:
            known = state.files.get(c.name) if state else None
            hashed = journal.files.get(c.name) if c.jobs else FileHashes(sha256(c.head).hexdigest(), {}, {})
            if hashed and PushFile(c.name, c.size, hashed.sha256, content=c).is_same(known):
                out.there.append(c.name)
            else:
                out.sent[c.name] = c.size
        self._add_warnings(state, out)
        return out

    def push(self, stage: str | None, progress: Progress) -> Pushed:
        """Create the repository and branch, if they are missing, hash, upload, commit, and check the commit.

        Args:
            stage: folder to write the files to first; None: upload them as they are read.
            progress: called with (stage, bytes done, bytes in all).

        Raises:
            Interrupted: the message says whether a commit was made. Differs: the Hub does not have what was uploaded.
            CkpttoolError: the source, the Hub or its answer is not as it should be.
        """
        state = self.target.refuse_visibility(self.repository.read_state())
        created = state is None
        if created:
            self.repository.create_repository(private=not self.public)
            # somebody else may have made it, or the Hub made it otherwise
            state = self.target.refuse_visibility(self.repository.read_state())
        if self.target.needs_branch():
            assert self.revision is not None
            self.repository.create_branch(self.revision)
        if not created:
            self.repository.check_write_access(self.revision, self.pull)
            if self.revision:
                state = self.repository.read_state(self.revision)
        if state is not None:
            self.target.read_card(state)
        try:
            weights, record = self.stage_files(stage, progress) if stage is not None else self.hash_files(progress)
            self.notes += describe_cast_losses(record.get("lost", {}))
            return self.commit_in_rounds(weights, record, created, progress)
        except KeyboardInterrupt:
            if self.made is not None:
                raise Interrupted(
                    f"interrupted; {self.repository.url} has the commit {self.made}, but it was not checked. Run the "
                    "same command again for that."
                ) from None
            raise Interrupted(
                f"interrupted; {self.repository.url} has no new commit. Run the same command again: complete "
                "files are not hashed and uploaded again."
            ) from None

    def _add_warnings(self, state: RepositoryState | None, out: Pushed) -> None:
        """Add the files that the push deletes, and warnings about other files in the repository, to the result
        `out`; `state` is None if the repository does not exist."""
        if state is not None:
            out.deleted = self.target.list_stale(state)
            out.notes += self.target.list_warnings(state, out.files)

    # ------------------------------------------------------------------------------------------------------- hashes

    def open_journal(self) -> Journal:
        """Open the journal with the hashes from earlier runs with the same source and options. If the source cannot
        tell whether its files changed, the journal is empty and keeps nothing."""
        if not self.opened.source.has_versions():
            return Journal(None)
        return Journal(
            plan_files.compute_plan_id(
                self.opened.source, self.draft, self.layout, "push 1", self.reading, self.writing
            )
        )

    def hash_files(self, progress: Progress) -> tuple[list[PushFile], dict[str, Any]]:
        """Hash the files that no earlier run has hashed, and compare with what the source records.

        Returns (every planned file with its hashes, the content of ckpttool.json).

        Raises:
            Corrupt, SourceChanged: the source is damaged, or was written to. Differs: a tensor does not have its
                recorded digest.
        """
        journal = self.open_journal()
        missing = [c for c in self.files if c.name not in journal.files]
        self.taken_over = len(missing) < len(self.files)
        if missing:
            hash_contents(self.opened, missing, self.jobs, progress, journal.add_hashes)
        if journal.record is None:
            found: dict[str, str] = {}
            for c in self.files:
                found |= journal.files[c.name].tensors
                record_cast_losses(self.draft, journal.files[c.name].lost)
            found |= {name: found[other] for name, other in self.draft.aliases.items()}
            budget = IOBudget(self.jobs)
            wanted, digests = verification.check_source_digests(
                self.opened, self.draft, found, self.writing, progress, budget
            )
            record = recorded.make_record(self.planned, wanted, digests)
            journal.add_record(record)
        else:
            self.opened.source.assert_unchanged()
        assert journal.record is not None
        files = [
            PushFile(c.name, c.size, journal.files[c.name].sha256, content=c)
            if c.jobs
            else PushFile(c.name, c.size, journal.files[c.name].sha256, data=c.head)
            for c in self.files
        ]
        return files, journal.record

    def stage_files(self, stage: str, progress: Progress) -> tuple[list[PushFile], dict[str, Any]]:
        """Convert into the folder `stage` and hash its files, or reuse the folder if an earlier run wrote it and it is
        unchanged.

        Returns (every planned file with its path and hash, the content of ckpttool.json).

        Args:
            stage: the folder.
            progress: called with (phase, bytes done, bytes in all).

        Raises:
            DestinationExists: something else is at that path. CkpttoolError: the conversion failed.
        """
        journal, folder = self.open_journal(), make_path_absolute(stage)
        paths = {c.name: os.path.join(folder, c.name) for c in self.files}
        known = journal.staged.get(folder)
        self.taken_over = known is not None
        if known is None or not _is_unchanged(folder, known):
            if os.path.lexists(folder):
                raise DestinationExists(
                    f"{argument('stage', stage)} exists and is not what an earlier run of this push left there. Give a "
                    "folder that does not exist, or remove it.",
                    code="CKPT0602",
                )
            running = RunOptions(threads=min(self.jobs, 4), progress=progress)
            conversion.run_conversion(self.src, folder, self.reading, self.writing, running)
            with open(os.path.join(folder, RECORD), "rb") as f:
                record = parse(f.read(), RECORD)
            sums = hash_paths(paths, self.jobs, progress)
            known = {
                "files": {n: [sums[n], os.stat(p).st_size, os.stat(p).st_mtime_ns] for n, p in paths.items()},
                "record": record,
            }
            journal.add_staged(folder, known)
        hashed = known["files"]
        return [PushFile(n, hashed[n][1], hashed[n][0], path=p) for n, p in paths.items()], known["record"]

    # ------------------------------------------------------------------------------------------------------- sending

    def commit_in_rounds(
        self, weights: Sequence[PushFile], record: dict[str, Any], created: bool, progress: Progress
    ) -> Pushed:
        """Inspect the repository, upload what it lacks, commit and check; begin again, at most twice, if somebody else
        commits in between or the Hub does not answer.

        Args:
            weights: the planned files, with hashes.
            record: the content of ckpttool.json.
            created: whether the repository was created by this push.
            progress: called with ("upload", bytes done, bytes in all).

        Raises:
            Corrupt: the repository was removed. CommitConflict, TransientError: in the last round, too.
            UsageError: its visibility was changed. SourceChanged, RemoteError, Differs: the source or the commit is not
                as it should be.
        """
        sent: dict[str, int] = {}
        for k in range(_ROUNDS):
            state = self.target.refuse_visibility(self.repository.read_state(self.revision))
            if state is None:
                raise Corrupt(
                    f"{self.repository.url} is gone; somebody has removed it in the meantime.", code="CKPT0401"
                )
            files = self.add_card_and_record(weights, record, state)
            out = self.initial_result(state, created)
            out.digest, out.files = record["digest"], {f.name: f.size for f in files}
            self._add_warnings(state, out)
            changed = [f for f in files if not f.is_same(state.files.get(f.name))]
            out.sent = {f.name: f.size for f in files if f.name in sent}
            if not changed and not out.deleted:
                if sent:  # the commit had been done, only the answer was lost
                    out.commit, out.page = state.commit, f"{self.repository.page}/commit/{state.commit}"
                    self.target.check_commit(files, state.commit)
                out.there = sorted(f.name for f in files if f.name not in out.sent)
                return out
            try:
                adds = self.upload(changed, sent, progress)
                self.opened.source.assert_unchanged()
                message = self.message or self.default_message(record)
                # the upload may have taken hours, in which somebody may have made the repository public
                self.target.refuse_visibility(state._replace(private=self.repository.is_private()))
                done = self.repository.commit(adds, out.deleted, message, state.commit, self.revision, self.pull)
            except (CommitConflict, TransientError) as e:
                if k + 1 == _ROUNDS or (self.pull and isinstance(e, TransientError)):
                    raise
                continue
            self.made, pull = done
            out.page = pull or f"{self.repository.page}/commit/{self.made}"
            out.sent = {f.name: f.size for f in files if f.name in sent}
            out.there = sorted(f.name for f in files if f.name not in sent)
            self.check_commit(self.made, files, out)
            return out
        raise AssertionError

    def check_commit(self, commit: str, files: Sequence[PushFile], out: Pushed) -> None:
        """Check that the new commit has the files of the push, and that a private repository is still private. The
        commit and the visibility are written into the result, `out`.

        Raises:
            Differs: a file is missing or differs. RemoteError: the Hub cannot be asked, or the repository became
                public.
        """
        out.commit = commit
        note_change(f"{self.repository.url} has the commit {commit}.")
        try:
            self.target.check_commit(files, commit)
            out.private = self.repository.is_private()
        except RemoteError as e:
            raise RemoteError(f"the commit {commit} is there, but was not checked: {e}") from None
        if not out.private and not self.public:
            raise RemoteError(self.target.became_public_message(commit))

    def upload(self, changed: Sequence[PushFile], sent: dict[str, int], progress: Progress) -> Sequence[object]:
        """Upload the large files among those that the repository lacks, and return the operations that commit all of
        them.

        Args:
            changed: the files that the repository lacks, or has with other bytes.
            sent: {name: bytes}, to which the files whose bytes were sent are added, also before an error.
            progress: called with ("upload", bytes done, bytes in all).

        Raises:
            RejectedError: the Hub refuses; hashes from an earlier run are deleted then.
            TransientError, RemoteError: it does not answer. Corrupt, SourceChanged: the source cannot be read.
        """
        counter = ByteCounter("upload", sum(f.size for f in changed if f.data is None), progress)
        stop, sending = threading.Event(), []
        opened: dict[str, VirtualFile] = {}
        for f in changed:
            if f.content is not None:
                opened[f.name] = VirtualFile(f.content, counter.add, stop)
            what = f.path or f.data if f.content is None else opened[f.name]
            sending.append(FileToSend(f.name, b"" if what is None else what, f.size, f.sample(), f.sha256))
        try:
            send = self.repository.upload_files
            adds = _run_stoppable(lambda: send(sending, self.revision, self.pull, self.jobs), stop)
        except RejectedError as e:
            if not self.taken_over:
                raise
            self.open_journal().drop()
            raise RejectedError(
                f"{e} The bytes may not be those that an earlier run hashed, so its hashes were deleted. Run the same "
                "command again, which computes them again."
            ) from None
        finally:
            for name, file in opened.items():
                if file.furthest:
                    sent[name] = file.content.size
        sent.update((f.name, f.size) for f in changed if f.content is None)
        if counter.passed < counter.total:
            progress("upload", counter.total, counter.total)
        return adds

    def add_card_and_record(
        self, weights: Sequence[PushFile], record: Mapping[str, object], state: RepositoryState
    ) -> list[PushFile]:
        """Return all files of the push: the planned ones, README.md, and ckpttool.json, which lists the planned ones.

        Args:
            weights: the planned files, with hashes.
            record: the content of ckpttool.json without that list.
            state: the repository before the push.

        Raises:
            Unsupported: its README.md cannot be updated. RemoteError: the Hub cannot be asked.
        """
        data = self.updated_card(record, state)
        listed = {f.name: {"sha256": f.sha256, "bytes": f.size} for f in weights}
        content = {**record, "files": listed}
        if RECORD in state.files:
            try:
                old = parse(self.repository.read_file(RECORD, state.commit, MOST_RECORD_BYTES), RECORD)
                if isinstance(old, dict):
                    # as text, since JSON has no tuples: the same push, only later, keeps its time and is no new commit
                    earlier = {**content, "created": old.get("created")}
                    content = earlier if recorded.encode_record(earlier) == recorded.encode_record(old) else content
            except (LookupError, Corrupt, Unsafe):
                pass  # damaged: it is replaced
        text = recorded.encode_record(content)
        extra = {_CARD: data, RECORD: text}
        return [*weights, *(PushFile(n, len(d), sha256(d).hexdigest(), data=d) for n, d in extra.items())]

    def updated_card(self, record: Mapping[str, Any], state: RepositoryState) -> bytes:
        """Return the README.md of the push, made from the one in the repository, if there is one; `record` is the
        content of ckpttool.json.

        Raises:
            Unsupported: the one that is there cannot be updated. RemoteError: it cannot be read.
        """
        old = self.target.read_card(state)
        dtypes: dict[str, int] = {}
        for t in self.draft.checkpoint.tensors.values():
            if t.component == "model":
                dtypes[t.dtype] = dtypes.get(t.dtype, 0) + t.numel
        ckpt, tensors = self.opened.checkpoint, self.draft.checkpoint.tensors
        cast = any(tensors[n].dtype != t.dtype for n, t in self.draft.sources.items() if n in tensors)
        configs = {
            c.name: _parse_config(c.head) for c in self.files if c.name in ("config.json", "adapter_config.json")
        }
        facts = model_card.CardFacts(
            repo_id=self.repo_id,
            version=__version__,
            layout=ckpt.layout,
            world_size=ckpt.world_size,
            trainer=ckpt.trainer,
            step=step_count(ckpt.value),
            dtypes=dtypes,
            digest=record["digest"],
            training=bool(getattr(self.writing.options, "include_optimizer", False)),
            changed=cast or self.adapter,
            config=configs.get("config.json", {}),
            adapter=configs.get("adapter_config.json", {}) if self.adapter else {},
            branch=None if self.revision in (None, "main") or str(self.revision).startswith("refs/") else self.revision,
        )
        return model_card.update_card(old, facts)

    def default_message(self, record: Mapping[str, Any]) -> str:
        """Return the title of a commit if the user gave none; it names the source and the training step."""
        step = step_count(self.opened.checkpoint.value)
        return f"ckpttool push of {record['source']['name']}" + ("" if step is None else f", step {step}")

    def initial_result(self, state: RepositoryState | None, created: bool) -> Pushed:
        """Return a result with everything that is known before anything is hashed or sent.

        Args:
            state: the repository; None if it does not exist yet.
            created: whether it is created by this push.
        """
        return Pushed(
            self.opened.source.root,
            self.opened.layout.name,
            self.repository.url,
            self.revision,
            state.private if state else not self.public,
            created,
            dropped=[(d.name, d.nbytes, d.why) for d in self.draft.dropped],
            notes=list(self.notes),
            not_read=[r.to_json() for r in self.opened.checkpoint.unread],
        )


def _run_stoppable(call: Callable[[], T], stop: threading.Event) -> T:
    """Call a function in another thread and return its result. On an interrupt or an error, set `stop` and wait for
    the function's end."""
    with ThreadPoolExecutor(1, "ckpttool-push") as pool:
        try:
            return pool.submit(call).result()
        except BaseException:
            stop.set()
            raise


def _select_searchable_bytes(content: Content) -> bytes:
    """Return the part of a file that is searched for secrets and pickles: the header of a safetensors file, which
    has the names; all bytes of any other file."""
    return content.head[8:] if content.jobs and content.name.endswith(".safetensors") else content.head


def _parse_config(data: bytes) -> dict[str, object]:
    """Return the content of a config file; {} if it is not a JSON object."""
    try:
        found = parse(data, "a config")
    except (Corrupt, Unsafe):
        return {}
    return found if isinstance(found, dict) else {}


def _is_unchanged(folder: str, known: Mapping[str, Any]) -> bool:
    """Return whether the files of a staging folder have the size and time that they had when they were hashed.

    Args:
        known: {"files": {name: [SHA-256, size in bytes, time of modification in ns]}}, as the journal keeps it.
    """
    try:
        for name, (_, size, when) in known["files"].items():
            st = os.stat(os.path.join(folder, name))
            if (st.st_size, st.st_mtime_ns) != (size, when):
                return False
    except (OSError, LookupError, TypeError, ValueError):
        return False
    return True
