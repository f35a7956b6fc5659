"""The repository and branch that a push goes to: whether it may be pushed to, what else is in it, what it contains
afterwards."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from ..engine.recorded import RECORD
from ..errors import Differs, Unsupported, UsageError, argument
from .client import RemoteFile, Repository, RepositoryState
from .push_file import PushFile

__all__ = ["PushTarget"]

_CARD = "README.md"
_STALE = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|training_state/.+")
_PICKLES = re.compile(r".+\.(bin|pt|pth|ckpt|pkl|pickle)")
_MOST_CARD_BYTES = 8 << 20


@dataclass(frozen=True)
class PushTarget:
    """A repository that may not exist yet, and the branch of it that is pushed to (None: main).

    `names` are the files of the draft, `adapter` says whether they are an adapter alone.
    """

    repository: Repository
    repo_id: str
    revision: str | None
    public: bool
    adapter: bool
    names: frozenset[str]

    def refuse_visibility(self, state: RepositoryState | None) -> RepositoryState | None:
        """Check that the repository has the visibility that this push asks for, and return `state` unchanged.

        Args:
            state: the repository; None if it does not exist, which is allowed.

        Raises:
            UsageError: it is public and a private one was asked for, or the reverse.
        """
        url = self.repository.url
        if state is not None and not state.private and not self.public:
            raise UsageError(
                f"{url} is public: everybody could read what is pushed. Pass {argument('public', True)} if you want "
                "that, or push to another repository; new ones are private.",
                code="CKPT0222",
            )
        if state is not None and state.private and self.public:
            raise UsageError(
                f"{url} is private, and a push does not change that. Push without {argument('public', True)}, then "
                f"make it public: `hf repos settings {self.repo_id} --public`, or {self.repository.page}/settings.",
                code="CKPT0222",
            )
        return state

    def needs_branch(self) -> bool:
        """Whether the branch of the push has to be created. The Hub is asked, except for main and for pull requests.

        Raises:
            UsageError: the revision is not a branch and cannot become one. RemoteError: the Hub cannot be asked.
        """
        if self.revision in (None, "main") or str(self.revision).startswith("refs/pr/"):
            return False
        if re.fullmatch(r"[0-9a-f]{40}", str(self.revision)) or str(self.revision).startswith("refs/"):
            raise UsageError(
                f"{argument('revision', self.revision)}: commits cannot be added to this; give the name of a branch.",
                code="CKPT0203",
            )
        return self.revision not in self.repository.list_branches()

    def list_warnings(self, state: RepositoryState, files: Container[str]) -> list[str]:
        """Return warnings, one sentence each, about files that stay in the repository and affect those who load the
        pushed files.

        Args:
            state: the repository before the push.
            files: names of the files of this push.
        """
        out: list[str] = []
        pickles = sorted(n for n in state.files if _PICKLES.fullmatch(n))
        if pickles:
            out.append(
                f"{self.repository.url} contains pickles, which run code when they are loaded; this push leaves them "
                f"there: {_describe_names(pickles)}"
            )
        if not self.adapter and "adapter_config.json" in state.files:
            out.append(
                "the repository contains adapter_config.json: from_pretrained would load that adapter on top of the "
                "weights"
            )
        stale = self.list_stale(state)
        others = sorted(
            n for n in state.files if n.endswith(".safetensors") and "/" not in n and n not in files and n not in stale
        )
        if others:
            out.append(f"the repository contains other weights, which stay there: {_describe_names(others)}")
        if self.adapter and any(_STALE.fullmatch(n) for n in state.files):
            out.append(
                "the repository contains the weights of a model, which `pull` and `digest` read, but from now on "
                f"{RECORD} has the digests of the adapter. To keep the two apart, push to another repository or with "
                f"{argument('revision')}"
            )
        return out

    def list_stale(self, state: RepositoryState) -> list[str]:
        """Return the sorted names of weight files in the repository that do not belong to this push, which deletes
        them. A push of an adapter alone deletes none."""
        return sorted(n for n in state.files if n not in self.names and not self.adapter and _STALE.fullmatch(n))

    def read_card(self, state: RepositoryState) -> bytes | None:
        """Return the README.md of the repository; None if there is none.

        Raises:
            Unsupported: it is too large or not UTF-8, so our section cannot be added to it. RemoteError: it cannot be
                read.
        """
        known = state.files.get(_CARD)
        if known is None:
            return None
        what = ""
        if known.size > _MOST_CARD_BYTES:
            what = f"has {known.size} bytes, more than {_MOST_CARD_BYTES}"
        else:
            data = self.repository.read_file(_CARD, state.commit, _MOST_CARD_BYTES)
            try:
                data.decode()
                return data
            except UnicodeDecodeError as e:
                what = f"is not UTF-8 (byte {e.start})"
        raise Unsupported(
            f"{self.repository.url}: the existing {_CARD} {what}, so the model card cannot be updated. Repair or "
            "remove it, then run the same command again."
        )

    def check_commit(self, files: Sequence[PushFile], commit: str) -> None:
        """Check, by asking the Hub, that a commit contains these files.

        Raises:
            Differs: a file is missing or differs. RemoteError: the Hub cannot be asked.
        """
        there = self.repository.file_infos([f.name for f in files], commit)
        for f in files:
            known = there.get(f.name)
            if not f.is_same(known):
                is_there = "is missing" if known is None else f"has {known.size} bytes and {_describe_hash(known)}"
                raise Differs(
                    f"{self.repository.url}: {f.name} {is_there} at commit {commit}, but {f.size} bytes with SHA-256 "
                    f"{f.sha256} were pushed. Do not use that commit. Run the same command again, and contact the "
                    "operators of the Hub if this persists.",
                    code="CKPT0503",
                )

    def became_public_message(self, commit: str) -> str:
        """Return the message of the error for a repository that somebody has made public during the push, which made
        `commit`."""
        return (
            f"{self.repository.url} has the commit {commit}, but in the meantime somebody made the repository public: "
            f"everybody can read what was pushed. To make it private: `hf repos settings {self.repo_id} --private`, or "
            f"{self.repository.page}/settings."
        )


def _describe_hash(known: RemoteFile) -> str:
    """Return the SHA-256 of a file on the Hub, or the id of its git blob if it has none, as text for a message."""
    return f"SHA-256 {known.sha256}" if known.sha256 else f"git blob {known.oid}"


def _describe_names(names: Sequence[str]) -> str:
    """Return a text for a message with the first five names, and the number of files if there are more."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} files)" if len(names) > 5 else "")
