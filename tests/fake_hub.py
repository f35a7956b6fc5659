"""A small Hugging Face Hub on loopback, for the real huggingface_hub: repositories with commits, branches and pull
requests, LFS in one part and in many, resolve with ranges. All of it lies in memory; there is no Xet.

    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path)      this process and its children find it, and their token
        head = hub.commit("org/name", {"config.json": b"{}", "gone.txt": None})     without a client
        hub.rule = lambda method, path: 500 if "/resolve/" in path else None

`rule(method, path)` is asked for every request, with the query in its path: None serves it; a number is answered as
that HTTP status, a pair with a body; "cut" sends half of the answer's body and closes; "drop" closes and does nothing;
"lose" does what was asked and closes without an answer. `seen` are (method, path, what was done, Range) of requests,
`sent` {path without query: bytes of bodies}, `taken` {SHA-256: bytes that were PUT}, `lies` {file: the SHA-256 that
listings tell}.

Who sends no token may read public repositories only (401 for the others, as for missing ones); OWNER may do anything;
STRANGER sees public ones (404 for the others); any other token gets 401.

huggingface_hub reads its environment when it is imported, so `environment` sets both: variables for children, and the
attributes of `huggingface_hub.constants` for this process (and what two of its modules copied from there). `HfApi()` made afterwards and the functions that ask an api
of their own (hf_hub_download, snapshot_download) follow them; the functions bound to the api that was made at import
(huggingface_hub.create_repo and the like), `hffs`, and what other packages copied at import (transformers) do not: take
`hub.api()`, or run those in a child."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from stores import Served, body_of

OWNER, STRANGER = "hf_OwnerOwnerOwnerOwnerOwner012345", "hf_StrangerStrangerStranger012345"
What = int | tuple[int, bytes] | str | None
Rule = Callable[[str, str], What]


class Blob(NamedTuple):
    """A file of a commit; the bytes of one in LFS are found by its SHA-256."""

    oid: str  # as git has it: of the pointer, where the file is in LFS
    size: int
    sha256: str | None
    data: bytes | None
    pointer: int = 0


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    message: str
    date: str
    files: dict[str, Blob]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "main", other branches, tags, "refs/pr/1"
    tags: set[str] = field(default_factory=set)

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag, a pull request or the beginning of an oid stands for."""
        name = revision.removeprefix("refs/heads/")
        found = [self.refs[name]] if name in self.refs else [c for c in self.commits if c.startswith(name)]
        if len(found) != 1:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[found[0]]

    def add(self, ref: str, changes: dict[str, Blob | None], title: str, message: str = "") -> Commit:
        """One more commit on a ref; None removes a file, or all below a folder."""
        parent = self.refs.get(ref)
        files = dict(self.commits[parent].files) if parent else {}
        for path, blob in changes.items():
            if blob is not None:
                files[path] = blob
                continue
            gone = [p for p in files if p == path or p.startswith(path.rstrip("/") + "/")]
            if not gone:
                raise Refused(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
            for p in gone:
                del files[p]
        text = json.dumps([parent, len(self.commits), title, sorted((p, b.oid) for p, b in files.items())])
        oid = hashlib.sha1(text.encode()).hexdigest()
        date = f"2026-01-{1 + len(self.commits) // 60 % 28:02d}T00:{len(self.commits) % 60:02d}:00.000Z"
        self.commits[oid] = Commit(oid, parent, title, message, date, files)
        self.refs[ref] = oid
        return self.commits[oid]


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def regular(data: bytes) -> Blob:
    """A file as git keeps it."""
    return Blob(hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(), len(data), None, data)


def pointed(sha256: str, size: int) -> Blob:
    """A file that lies in LFS."""
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    return Blob(regular(text).oid, size, sha256, None, len(text))


class Hub(Served):
    """The server; it serves between `with` and its end.

    `threshold` bytes and more, and safetensors of any size, go to LFS; objects of more than `part` bytes in parts;
    listings come in pages of `page` entries.
    """

    daemon_threads = True

    def __init__(
        self, rule: Rule | None = None, threshold: int = 1 << 20, part: int = 1 << 20, page: int = 1000
    ) -> None:
        super().__init__(_Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.rule: Rule = rule or (lambda method, path: None)
        self.threshold, self.part, self.page = threshold, part, page
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}  # "org/name", "datasets/org/name"
        self.buckets: dict[str, dict[str, bytes]] = {}  # "org/name": files, that only OWNER sees
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, int, dict[int, bytes]]] = {}  # signature: (SHA-256, size, parts)
        self.seen: list[tuple[str, str, What, str | None]] = []
        self.sent: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.lies: dict[str, str] = {}

    # ------------------------------------------------------------------------------------------ what a test asks for

    def environment(self, monkeypatch: pytest.MonkeyPatch, home: Path, token: str = OWNER) -> None:
        """Children and this process talk to this Hub, with caches below `home`, and do not wait long between tries."""
        from huggingface_hub import HfFileSystem, constants, file_download
        from huggingface_hub.utils import _http

        cache = home / "hf" / "hub"
        for name, value in {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": token,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "TRANSFORMERS_OFFLINE", "HUGGINGFACE_CO_STAGING"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_URL_HOSTS": frozenset({"127.0.0.1"}),
            "HF_HOME": str(home / "hf"),
            "HF_HUB_CACHE": str(cache),
            "HUGGINGFACE_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(home / "hf" / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "hf" / "stored_tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(constants, name, value, raising=False)
        monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", True)
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", _Hurried())
        HfFileSystem.clear_instance_cache()

    def api(self, token: str = OWNER) -> Any:
        """huggingface_hub's client of this Hub."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=token)

    def commit(
        self,
        repo_id: str,
        files: dict[str, bytes | None],
        ref: str = "main",
        title: str = "commit",
        private: bool = True,
    ) -> str:
        """The oid of a new commit, made without a client; the repository is made where there is none."""
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repo(private))
            return repo.add(ref, {p: None if d is None else self._blob(p, d) for p, d in files.items()}, title).oid

    def upload(self, repo_id: str, folder: Path, ref: str = "main", private: bool = True) -> str:
        """The oid of a commit of the files below a folder."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        return self.commit(repo_id, dict(files), ref, private=private)

    def bytes_of(self, file: str = "") -> int:
        """Bytes of a file that were sent since `forget`; of all files where none is named."""
        return sum(
            n
            for path, n in self.sent.items()
            if "/resolve/" in path and (not file or unquote(path).endswith(f"/{file}"))
        )

    def forget(self) -> None:
        """Count anew."""
        with self.lock:
            self.seen.clear(), self.sent.clear(), self.taken.clear()

    def did(self, what: What) -> int:
        """How many requests that was done to."""
        return sum(d == what for _, _, d, _ in self.seen)

    # ----------------------------------------------------------------------------------------------------- the store

    def _in_lfs(self, path: str, size: int) -> bool:
        return size > 0 and (size >= self.threshold or path.endswith(".safetensors"))

    def _blob(self, path: str, data: bytes) -> Blob:
        if not self._in_lfs(path, len(data)):
            return regular(data)
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[sha256] = data
        return pointed(sha256, len(data))

    def bytes_at(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        """The bytes of a file of a commit."""
        blob = self.repos[repo_id].at(revision).files[path]
        return self.objects[blob.sha256] if blob.sha256 else blob.data or b""


class _Hurried:
    """The module `time` as huggingface_hub sees it: 1, 2, 4, 8 and 8 seconds of waiting are milliseconds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / 1000)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are written one after the other
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    # ------------------------------------------------------------------------------------------------------ plumbing

    def _serve(self) -> None:
        hub, body = self.server, body_of(self)
        what = hub.rule(self.command, self.path)
        with hub.lock:
            hub.seen.append((self.command, self.path, what, self.headers.get("Range")))
        if isinstance(what, (int, tuple)):
            status, data = what if isinstance(what, tuple) else (what, b"")
            self._answer(status, data, {})
            return
        if what == "drop":
            self.close_connection = True
            return
        try:
            with hub.lock:
                status, data, headers = self._route(body)
        except Refused as e:
            status, data = e.status, json.dumps({"error": str(e)}).encode()
            headers = {"X-Error-Code": e.code, "X-Error-Message": str(e), "Content-Type": "application/json"}
            headers = {k: v for k, v in headers.items() if v}
        if what == "lose":
            self.close_connection = True
            return
        self._answer(status, data, headers, cut=what == "cut")

    def _answer(self, status: int, data: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        if status >= 400 or self.path.startswith("/api/"):  # as Express makes it, of base64
            headers = {"ETag": f'W/"{len(data):x}-vndQfbspAL31/eKATEOf36LyR8k"', **headers}
        for k, v in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command == "HEAD":
            return
        out = memoryview(data)[: len(data) // 2 if cut else len(data)]
        with self.server.lock:
            self.server.sent[self.path.partition("?")[0]] += len(out)
        self.wfile.write(out)
        self.close_connection |= cut

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _user(self) -> str | None:
        """Who asks; None without a token."""
        told = self.headers.get("Authorization")
        if told is None:
            return None
        user = {f"Bearer {OWNER}": "owner", f"Bearer {STRANGER}": "stranger"}.get(told)
        if user is None:
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return user

    def _repo(self, repo_id: str, write: bool = False) -> Repo:
        user, repo = self._user(), self.server.repos.get(repo_id)
        if repo is None or (repo.private and user != "owner"):
            raise Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and user != "owner":
            raise Refused(403 if user else 401, "", "You do not have the rights to write here.")
        return repo

    # -------------------------------------------------------------------------------------------------------- routes

    def _route(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers) of one request."""
        at = urlsplit(self.path)
        query = {k: v[-1] for k, v in parse_qs(at.query).items()}
        parts = [unquote(p) for p in at.path.split("/") if p]
        match parts:
            case ["lfs", signature, *what]:  # signed: no token is sent
                return self._lfs(signature, what, body)
            case ["api", "whoami-v2"]:
                if (user := self._user()) is None:
                    raise Refused(401, "", "Invalid username or password.")
                return _json(
                    {"type": "user", "name": user, "orgs": [{"name": "org"}], "auth": {"type": "access_token"}}
                )
            case ["api", "repos", "create" | "delete" as what]:
                return self._repos(what, json.loads(body))
            case ["api", "validate-yaml"]:
                return _json({"errors": [], "warnings": []})
            case ["api", "models", org, name, *rest]:
                return self._api(f"{org}/{name}", rest, query, body)
            case ["api", "datasets", org, name, *rest]:
                return self._api(f"datasets/{org}/{name}", rest, query, body)
            case ["datasets", org, name, "resolve", *rest]:
                revision, path = _revision(rest)
                return self._resolve(self._repo(f"datasets/{org}/{name}").at(revision), path)
            case ["api", "buckets", org, name, *rest]:
                return self._bucket(f"{org}/{name}", rest, query, body)
            case ["buckets", org, name, "resolve", *rest]:
                files = self._bucket_files(f"{org}/{name}")
                if (path := "/".join(rest)) not in files:
                    raise Refused(404, "EntryNotFound", f"{path} does not exist")
                return self._ranged(files[path], {"ETag": f'"{_xet_hash(files[path])}"'})
            case [org, name, "info", "lfs", "objects", "batch"] if name.endswith(".git"):
                self._repo(repo_id := f"{org}/{name.removesuffix('.git')}", write=True)
                return self._batch(repo_id, json.loads(body))
            case [org, name, "resolve", *rest]:
                revision, path = _revision(rest)
                return self._resolve(self._repo(f"{org}/{name}").at(revision), path)
        raise Refused(404, "", f"Not found: {self.command} {at.path}")

    def _repos(self, what: str, asked: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        if self._user() != "owner":
            raise Refused(401 if self._user() is None else 403, "", "You do not have the rights to do that.")
        repos, repo_id = self.server.repos, f"{asked.get('organization') or 'owner'}/{asked['name']}"
        if what == "delete":
            self._repo(repo_id)
            del repos[repo_id]
            return _json({})
        url = {"url": f"{self.server.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in repos:
            return _json({"error": "You already created this model repo", **url}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        repos[repo_id] = repo = Repo(private)
        repo.add("main", {".gitattributes": regular(b"*.safetensors filter=lfs\n")}, "initial commit")
        return _json(url)

    def _api(
        self, repo_id: str, rest: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        what = rest[0] if rest else "revision"
        repo = self._repo(repo_id, write=what in ("preupload", "commit", "branch", "tag"))
        if what in ("branch", "tag"):
            return self._ref(repo, what, "/".join(rest[1:]), json.loads(body or b"{}"))
        revision, path = _revision(rest[1:] or ["main"])
        if what == "refs":
            return self._refs(repo)
        if what == "commit":
            return self._commit(repo_id, repo, revision, bool(query.get("create_pr")), body)
        commit = repo.at(revision)
        if what == "revision":
            return _json(
                {
                    "_id": repo_id,
                    "id": repo_id,
                    "modelId": repo_id,
                    "author": repo_id.split("/")[0],
                    "sha": commit.oid,
                    "lastModified": commit.date,
                    "private": repo.private,
                    "tags": [],
                    "gated": False,
                    "disabled": False,
                    "downloads": 0,
                    "likes": 0,
                    "createdAt": commit.date,
                    "siblings": [{"rfilename": p} for p in sorted(commit.files)],
                }
            )
        if what == "tree":
            return self._tree(commit, path, query)
        if what == "commits":
            return self._commits(repo, commit)
        if what == "paths-info":
            asked = parse_qs(body.decode())
            entries = _entries(commit, "", True)
            found = [entries[p] for p in asked.get("paths", []) if p in entries]
            return _json([self._shown(commit, e, asked.get("expand") == ["true"]) for e in found])
        if what == "preupload":
            asked = json.loads(body)
            there = commit.files.get(".gitignore", regular(b"")).data or b""
            ignored = asked.get("gitIgnore", there.decode()).split()
            return _json({"files": [self._mode(commit, f, ignored) for f in asked["files"]], "commitOid": commit.oid})
        raise Refused(404, "", f"Not found: {what}")

    def _mode(self, commit: Commit, file: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        """Whether a file goes to LFS, and what there is of it; `ignored` are the lines of a .gitignore."""
        mode = "lfs" if self.server._in_lfs(file["path"], file["size"]) else "regular"
        out: dict[str, Any] = {"path": file["path"], "uploadMode": mode}
        out["shouldIgnore"] = any(fnmatch(file["path"], pattern) for pattern in ignored)
        if old := commit.files.get(file["path"]):
            out["oid"] = old.sha256 or old.oid
        return out

    def _shown(self, commit: Commit, entry: tuple[str, Blob | None], expand: bool) -> dict[str, Any]:
        """A file or folder as listings tell it."""
        path, blob = entry
        out: dict[str, Any] = {"path": path}
        if blob is None:
            out |= {"type": "directory", "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
        else:
            out |= {"type": "file", "size": blob.size, "oid": blob.oid}
            if blob.sha256:
                told = self.server.lies.get(path, blob.sha256)
                out["lfs"] = {"oid": told, "size": blob.size, "pointerSize": blob.pointer}
        if expand:
            out["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": commit.date}
        return out

    def _tree(self, commit: Commit, path: str, query: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        entries = _entries(commit, path, query.get("recursive", "").lower() == "true")
        if path and not entries:
            raise Refused(404, "EntryNotFound", f"{path} does not exist")
        shown = [self._shown(commit, e, query.get("expand", "").lower() == "true") for _, e in sorted(entries.items())]
        return self._page(shown, query)

    def _page(self, shown: list[dict[str, Any]], query: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        """One page of a listing, with a link to the next one."""
        start = int(query.get("cursor", 0))
        end = start + self.server.page
        headers = {}
        if end < len(shown):
            more = "&".join(f"{k}={quote(v)}" for k, v in {**query, "cursor": str(end)}.items())
            headers["Link"] = f'<{self.server.endpoint}{self.path.partition("?")[0]}?{more}>; rel="next"'
        return _json(shown[start:end], headers=headers)

    def _commits(self, repo: Repo, commit: Commit) -> tuple[int, bytes, dict[str, str]]:
        out, at = [], commit
        while True:
            authors = [{"user": "owner"}]
            out.append({"id": at.oid, "title": at.title, "message": at.message, "date": at.date, "authors": authors})
            if at.parent is None:
                return _json(out)
            at = repo.commits[at.parent]

    def _refs(self, repo: Repo) -> tuple[int, bytes, dict[str, str]]:
        def told(prefix: str, names: list[str]) -> list[dict[str, str]]:
            return [{"name": n, "ref": prefix + n, "targetCommit": repo.refs[n]} for n in sorted(names)]

        pulls = [n for n in repo.refs if n.startswith("refs/pr/")]
        heads = [n for n in repo.refs if n not in pulls and n not in repo.tags]
        return _json(
            {
                "branches": told("refs/heads/", heads),
                "tags": told("refs/tags/", list(repo.tags)),
                "converts": [],
                "pullRequests": told("", pulls),
            }
        )

    def _ref(self, repo: Repo, what: str, name: str, asked: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        if self.command == "DELETE":
            repo.at(name)
            repo.tags.discard(name)
            del repo.refs[name]
            return _json({})
        if what == "tag":  # its URL names what is tagged
            target, name = name, asked["tag"]
            repo.tags.add(name)
        else:
            target = asked.get("startingPoint", "main")
        if name in repo.refs:
            return _json({"error": f"Reference already exists: {name}"}, 409)
        repo.refs[name] = repo.at(target).oid
        return _json({})

    def _commit(self, repo_id: str, repo: Repo, ref: str, pull: bool, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        head = repo.at(ref)
        title = message = ""
        changes: dict[str, Blob | None] = {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    title, message = value["summary"], value.get("description", "")
                    if value.get("parentCommit", head.oid) != head.oid:
                        raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
                case "file":
                    changes[value["path"]] = regular(base64.b64decode(value["content"]))
                case "lfsFile":
                    if value["oid"] not in self.server.objects:
                        raise Refused(400, "", f"LFS object {value['oid']} was never uploaded.")
                    changes[value["path"]] = pointed(value["oid"], len(self.server.objects[value["oid"]]))
                case "deletedFile" | "deletedFolder":
                    changes[value["path"]] = None
        out = {}
        if pull:
            number = 1 + sum(n.startswith("refs/pr/") for n in repo.refs)
            ref = f"refs/pr/{number}"
            repo.refs[ref] = head.oid
            out["pullRequestUrl"] = f"{self.server.endpoint}/{repo_id}/discussions/{number}"
        elif ref not in repo.refs:
            raise Refused(400, "", f"{ref} is no branch.")
        oid = repo.add(ref, changes, title, message).oid
        return _json(
            {"success": True, "commitOid": oid, "commitUrl": f"{self.server.endpoint}/{repo_id}/commit/{oid}", **out}
        )

    def _bucket_files(self, bucket_id: str) -> dict[str, bytes]:
        user = self._user()
        if user != "owner" or bucket_id not in self.server.buckets:
            raise Refused(404 if user else 401, "RepoNotFound", "Bucket not found")
        return self.server.buckets[bucket_id]

    def _bucket(
        self, bucket_id: str, rest: list[str], query: dict[str, str], body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """A bucket, the listing of a folder of it, or some of its files. A folder also lists what begins like its
        name, as the Hub does."""
        files = self._bucket_files(bucket_id)

        def shown(path: str) -> dict[str, Any]:
            data = files[path]
            return {
                "type": "file", "path": path, "size": len(data), "xetHash": _xet_hash(data),
                "uploadedAt": "2026-01-01T00:00:00.000Z",
            }  # fmt: skip

        match rest:
            case []:
                return _json({"id": bucket_id, "private": True, "createdAt": "2026-01-01T00:00:00.000Z",
                              "size": sum(map(len, files.values())), "totalFiles": len(files)})  # fmt: skip
            case ["paths-info"]:
                return _json([shown(p) for p in json.loads(body)["paths"] if p in files])
            case ["tree", *below]:
                prefix = "/".join(below)
                found: dict[str, dict[str, Any]] = {}
                for path in sorted(p for p in files if p.startswith(prefix)):
                    end = path.find("/", len(prefix) + bool(prefix))
                    found[path[:end] if end > 0 else path] = (
                        {"type": "directory", "path": path[:end]} if end > 0 else shown(path)
                    )
                return self._page(list(found.values()), query)
        raise Refused(404, "", f"Not found: {rest}")

    # ----------------------------------------------------------------------------------------------------------- LFS

    def _batch(self, repo_id: str, asked: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        hub, out = self.server, []
        for o in asked["objects"]:
            oid, size = o["oid"], o["size"]
            told: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in hub.objects:
                signature = secrets.token_hex(16)
                hub.uploads[signature] = oid, size, {}
                base = f"{hub.endpoint}/lfs/{signature}"
                upload: dict[str, Any] = {"href": base}
                if size > hub.part:
                    count = -(-size // hub.part)
                    parts = {str(k): f"{base}/part/{k}" for k in range(1, count + 1)}
                    upload = {"href": f"{base}/complete", "header": {"chunk_size": str(hub.part), **parts}}
                told["actions"] = {"upload": upload, "verify": {"href": f"{base}/verify"}}
            out.append(told)
        chosen = "multipart" if "multipart" in asked["transfers"] else "basic"
        return _json({"transfer": chosen, "objects": out}, kind="application/vnd.git-lfs+json")

    def _lfs(self, signature: str, what: list[str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        hub = self.server
        if signature not in hub.uploads:
            raise Refused(403, "", "No such signature.")
        oid, size, parts = hub.uploads[signature]
        match self.command, what:
            case "PUT", []:
                hub.taken[oid] += len(body)
                self._keep(oid, size, body)
                return 200, b"", {}
            case "PUT", ["part", number]:
                hub.taken[oid] += len(body)
                parts[int(number)] = body
                return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
            case "POST", ["complete"]:
                told = [(p["partNumber"], p["etag"]) for p in json.loads(body)["parts"]]
                if told != [(k, f'"{hashlib.md5(parts[k]).hexdigest()}"') for k in sorted(parts)]:
                    raise Refused(400, "", "Parts that were not uploaded, or other ones.")
                self._keep(oid, size, b"".join(parts[k] for k in sorted(parts)))
                return _json({})
            case "POST", ["verify"]:
                asked = json.loads(body)
                if len(hub.objects.get(asked["oid"], b"")) != asked["size"]:
                    raise Refused(404, "", "No such object, or of another size.")
                return _json({})
        raise Refused(404, "", "Not found")

    def _keep(self, oid: str, size: int, data: bytes) -> None:
        if len(data) != size or hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, "", "These are not the bytes of that SHA-256.")
        self.server.objects[oid] = data

    # ------------------------------------------------------------------------------------------------------- resolve

    def _resolve(self, commit: Commit, path: str) -> tuple[int, bytes, dict[str, str]]:
        blob = commit.files.get(path)
        if blob is None:
            raise Refused(404, "EntryNotFound", f"{path} does not exist")
        data = self.server.objects[blob.sha256] if blob.sha256 else blob.data or b""
        headers = {
            "ETag": f'"{blob.sha256 or blob.oid}"',
            "X-Repo-Commit": commit.oid,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if blob.sha256:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        return self._ranged(data, headers)

    def _ranged(self, data: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        """The bytes of a file that were asked for."""
        asked = self.headers.get("Range", "")
        if self.command == "HEAD" or not asked.startswith("bytes="):
            return 200, data, headers
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            return 416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"}
        return 206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}


def _xet_hash(data: bytes) -> str:
    """What stands for Xet's hash of a file."""
    return hashlib.sha256(b"xet" + data).hexdigest()


def _json(
    data: Any, status: int = 200, headers: dict[str, str] | None = None, kind: str = "application/json"
) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps(data).encode(), {"Content-Type": kind, **(headers or {})}


def _revision(parts: list[str]) -> tuple[str, str]:
    """(revision, path) of what stands after resolve/ and its like; refs/pr/1 may have been quoted or not."""
    n = 3 if parts[:2] == ["refs", "pr"] else 1
    return "/".join(parts[:n]), "/".join(parts[n:])


def _entries(commit: Commit, below: str, recursive: bool) -> dict[str, tuple[str, Blob | None]]:
    """Files and folders below a folder of a commit, by path."""
    out: dict[str, tuple[str, Blob | None]] = {}
    prefix = f"{below}/" if below else ""
    for path, blob in commit.files.items():
        if not path.startswith(prefix):
            continue
        folders = path.removeprefix(prefix).split("/")[:-1]
        for k in range(len(folders)):
            name = prefix + "/".join(folders[: k + 1])
            if recursive or k == 0:
                out[name] = name, None
        if recursive or not folders:
            out[path] = path, blob
    return out
