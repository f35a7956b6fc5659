"""The Hub: the real huggingface_hub against the small one of hub.py, and ckpttool reading from it, pinned to a commit and
by ranges."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from fake_hub import OWNER, STRANGER, Hub, _Handler
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfFileSystem,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import close_session
from peers import FIXTURES, files_of
from safetensors.torch import load_file, save_file
from stores import Flaky

import ckpttool
from ckpttool.errors import CkpttoolError, NotRecognised, RemoteError, SourceChanged, Unsafe
from ckpttool.hub import client
from ckpttool.huggingface.model_files import fetch_from_hub
from ckpttool.storage import answer_limits, hub_limits, retries
from ckpttool.storage.remote import RemoteSource

MIB = 1 << 20
LLAMA = FIXTURES / "hf_llama" / "ckpt"
SHARDED = FIXTURES / "hf_llama" / "ckpt_sharded"
URL = "hf://org/name"

# huggingface_hub itself says that to httpx with every PUT
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path)
        yield hub
        close_session()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 12 MiB in one file."""
    folder = tmp_path_factory.mktemp("large")
    shutil.copy(LLAMA / "config.json", folder)
    dice = torch.Generator().manual_seed(7)
    tensors = {f"model.layers.{k}.weight": torch.randn(3, 256, 1024, generator=dice) for k in range(4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other(folder: Path, to: Path) -> Path:
    """The same model with other weights of the same size."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        save_file({k: t + 1 for k, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return to


def digest(path: object) -> Any:
    return ckpttool.digest(str(path)).digest


command = ckpttool_here


# ---------------------------------------------------------------------------------------------------- the real client


def test_create_repo(hub: Hub) -> None:
    api = hub.api()
    assert api.whoami()["name"] == "owner"
    assert api.create_repo("org/name", private=True).repo_id == "org/name"
    with pytest.raises(HfHubHTTPError) as e:
        api.create_repo("org/name")
    assert e.value.response.status_code == 409
    assert api.create_repo("org/name", exist_ok=True).repo_id == "org/name"
    info = api.model_info("org/name")
    assert info.private and info.sha == hub.repos["org/name"].refs["main"]
    assert api.repo_exists("org/name") and not api.repo_exists("org/other")
    api.delete_repo("org/name")
    assert not api.repo_exists("org/name")


def test_who_may(hub: Hub) -> None:
    hub.commit("org/private", {"a": b"x"})
    hub.commit("org/public", {"a": b"x"}, private=False)
    for token, status in ((STRANGER, 404), (False, 401), ("hf_wrong", 401)):
        with pytest.raises(HfHubHTTPError) as e:
            hub.api(token).model_info("org/private")
        assert e.value.response.status_code == status
        assert isinstance(e.value, RepositoryNotFoundError) == (token != "hf_wrong")
    assert hub.api(STRANGER).model_info("org/public").private is False
    for token in (STRANGER, False):
        with pytest.raises(HfHubHTTPError) as e:
            hub.api(token).upload_file(path_or_fileobj=b"y", path_in_repo="a", repo_id="org/public")
        assert e.value.response.status_code in (401, 403)
    assert hub.bytes_at("org/public", "a") == b"x"


def test_upload_folder(hub: Hub, large: Path, tmp_path: Path) -> None:
    """Files in git, in LFS in one PUT and in many; sent once, and not again where the Hub has them."""
    folder = tmp_path / "up"
    shutil.copytree(large, folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "tiny.safetensors").write_bytes(b"\1" * 100)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "README.md").write_text("---\ntags: [x]\n---\n# A model\n")
    api = hub.api()
    api.create_repo("org/name")
    done = api.upload_folder(repo_id="org/name", folder_path=folder, commit_message="first")
    for name, data in files_of(folder).items():
        assert hub.bytes_at("org/name", name) == data
    parts = [p for m, p, _, _ in hub.seen if m == "PUT" and "/part/" in p]
    size = (folder / "model.safetensors").stat().st_size
    assert len(parts) == -(-size // hub.part)
    assert sum(hub.taken.values()) == size + 100
    blobs = hub.repos["org/name"].at("main").files
    assert blobs["model.safetensors"].sha256 and not blobs["config.json"].sha256
    assert hub.repos["org/name"].at("main").oid == done.oid

    hub.forget()
    (folder / "config.json").write_text("{}")
    api.upload_folder(repo_id="org/name", folder_path=folder)
    assert not hub.taken and hub.bytes_at("org/name", "config.json") == b"{}"
    assert [c.title for c in api.list_repo_commits("org/name")][1:] == ["first", "initial commit"]


def test_an_upload_through_failures(hub: Hub, large: Path) -> None:
    """Each PUT, batch and completion fails once; a client of the Hub tries these again."""
    times: dict[str, int] = {}
    whats = iter([500, "drop", "lose", 503] * 100)

    def rule(method: str, path: str) -> int | str | None:
        times[method + path] = k = times.get(method + path, 0) + 1
        return next(whats) if k == 1 and "lfs" in path else None

    hub.commit("org/name", {"a": b"x"})
    hub.rule = rule
    hub.api().upload_folder(repo_id="org/name", folder_path=large)
    assert hub.did(500) > 2 and hub.did("drop") > 2 and hub.did("lose") > 2
    assert hub.bytes_at("org/name", "model.safetensors") == (large / "model.safetensors").read_bytes()


def test_bytes_that_are_not_what_was_announced(hub: Hub) -> None:
    hub.commit("org/name", {"a": b"x"})
    add = CommitOperationAdd("a.safetensors", b"0123456789")
    add.upload_info.sha256 = bytes(32)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'a\.safetensors'"):
        hub.api().create_commit("org/name", [add], commit_message="m")
    assert set(hub.repos["org/name"].at("main").files) == {"a"}


def test_create_commit(hub: Hub) -> None:
    api, first = hub.api(), hub.commit("org/name", {"a": b"1", "d/b": b"2", "d/c": b"3"})
    done = api.create_commit(
        "org/name",
        [CommitOperationAdd("a", b"11"), CommitOperationDelete("d/b")],
        commit_message="second",
        commit_description="why",
        parent_commit=first,
    )
    assert set(hub.repos["org/name"].at(done.oid).files) == {"a", "d/c"}
    assert hub.repos["org/name"].at(done.oid).parent == first
    with pytest.raises(HfHubHTTPError) as e:
        api.create_commit("org/name", [CommitOperationAdd("a", b"12")], commit_message="late", parent_commit=first)
    assert e.value.response.status_code == 412
    assert api.model_info("org/name").sha == done.oid
    with pytest.raises(HfHubHTTPError, match="doesn't exist"):
        api.create_commit("org/name", [CommitOperationDelete("none")], commit_message="m")


def test_branches_tags_and_pull_requests(hub: Hub) -> None:
    api, first = hub.api(), hub.commit("org/name", {"a": b"1"})
    api.create_branch("org/name", branch="dev/x")
    with pytest.raises(HfHubHTTPError):
        api.create_branch("org/name", branch="dev/x")
    api.create_branch("org/name", branch="dev/x", exist_ok=True)
    api.create_tag("org/name", tag="v1")
    api.upload_file(path_or_fileobj=b"2", path_in_repo="a", repo_id="org/name", revision="dev/x")
    pull = api.upload_file(path_or_fileobj=b"3", path_in_repo="a", repo_id="org/name", create_pr=True)
    assert pull.pr_revision == "refs/pr/1" and pull.pr_num == 1
    refs = api.list_repo_refs("org/name", include_pull_requests=True)
    assert [b.name for b in refs.branches] == ["dev/x", "main"]
    assert [(t.name, t.target_commit) for t in refs.tags] == [("v1", first)]
    assert [(p.ref, p.target_commit) for p in refs.pull_requests or []] == [("refs/pr/1", pull.oid)]
    for revision, data in (("main", b"1"), ("v1", b"1"), ("dev/x", b"2"), ("refs/pr/1", b"3"), (first[:9], b"1")):
        assert Path(hf_hub_download("org/name", "a", revision=revision)).read_bytes() == data
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/name", revision="nope")


def test_listings(hub: Hub) -> None:
    """In pages, of one folder or of all, with what LFS knows; a Hub that lies about a SHA-256."""
    hub.page = 2
    data = bytes(range(256)) * 8192
    files = {"a b.bin": data, "d/e/f.txt": b"f", "d/g#%.txt": b"g", "z": b"z"}
    hub.commit("org/name", dict(files))
    api = hub.api()
    shown = {e.path: e for e in api.list_repo_tree("org/name", recursive=True)}
    assert set(shown) == {*files, "d", "d/e"}
    assert [e.path for e in api.list_repo_tree("org/name")] == ["a b.bin", "d", "z"]
    assert [e.path for e in api.list_repo_tree("org/name", "d", expand=True)] == ["d/e", "d/g#%.txt"]
    assert shown["a b.bin"].lfs.size == len(data) == shown["a b.bin"].size
    honest = shown["a b.bin"].lfs.sha256
    hub.lies["a b.bin"] = "0" * 64
    (told,) = api.get_paths_info("org/name", ["a b.bin", "nope"], expand=True)
    assert told.lfs.sha256 == "0" * 64 != honest and told.last_commit.title == "commit"
    assert api.file_exists("org/name", "d/g#%.txt") and not api.file_exists("org/name", "nope")
    assert sorted(api.list_repo_files("org/name")) == sorted(files)


@pytest.mark.parametrize("what", [None, "cut", "drop", 503])
def test_downloads(hub: Hub, large: Path, what: int | str | None) -> None:
    head = hub.upload("org/name", large)
    left = [1]

    def rule(method: str, path: str) -> int | str | None:
        if method == "GET" and "/resolve/" in path and "safetensors" in path and left:
            left.pop()
            return what
        return None

    hub.rule = rule
    if what == 503:  # a GET of a file is not tried again by huggingface_hub itself
        with pytest.raises(HfHubHTTPError):
            snapshot_download("org/name")
    folder = Path(snapshot_download("org/name"))
    assert not left
    assert folder.name == head and files_of(folder) == files_of(large)


def test_from_pretrained(hub: Hub, tmp_path: Path) -> None:
    """transformers in a process of its own loads what huggingface_hub uploaded."""
    api = hub.api()
    api.create_repo("org/llama", private=True)
    api.upload_folder(repo_id="org/llama", folder_path=LLAMA)
    code = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("org/llama", dtype="auto")
save_file({k: t.contiguous() for k, t in model.state_dict().items()}, sys.argv[1])
"""
    out = tmp_path / "out.safetensors"
    done = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, wanted = load_file(out), load_file(LLAMA / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


# ------------------------------------------------------------------------------------------------------------ reading


def test_inspect_reads_kilobytes(hub: Hub, large: Path) -> None:
    """Of 12 MiB the header, and of no file the whole."""
    hub.upload("org/name", large)
    found = ckpttool.inspect(URL)
    assert found.layout == "hf" and found.tensors == 4
    assert found.bytes == ckpttool.inspect(large).bytes > 12 * MIB - 1
    assert 0 < hub.bytes_of("model.safetensors") <= 64 << 10
    assert sum(hub.sent.values()) < 128_000
    assert all(asked for m, p, _, asked in hub.seen if "/resolve/" in p and m == "GET")


@pytest.mark.parametrize("folder", [LLAMA, SHARDED], ids=["one", "many"])
@pytest.mark.parametrize("where", ["", "@main", "@dev", "@v1", "@refs/pr/1", "@{head}"])
def test_digest(hub: Hub, folder: Path, where: str, tmp_path: Path) -> None:
    """By a branch, a tag, a pull request and a commit; the main branch holds something else meanwhile."""
    head = hub.upload("org/name", folder)
    for ref in ("dev", "v1", "refs/pr/1"):
        hub.repos["org/name"].refs[ref] = head
    if where not in ("", "@main"):
        hub.upload("org/name", other(folder, tmp_path / "other"))
    assert digest(URL + where.format(head=head)) == digest(folder)


def test_folder_in_a_repository_and_one_file(hub: Hub) -> None:
    hub.commit("org/name", {f"deep/er/{p}": d for p, d in files_of(LLAMA).items()})
    wanted = digest(LLAMA)
    for url in (f"{URL}/deep/er", f"{URL}@main/deep/er/", f"{URL}/deep/er/model.safetensors"):
        assert digest(url) == wanted
    with pytest.raises(NotRecognised, match="org/name/deep"):
        digest(f"{URL}/deep")


def test_convert_diff_and_verify(hub: Hub, large: Path, tmp_path: Path) -> None:
    hub.upload("org/name", large)
    size = (large / "model.safetensors").stat().st_size
    ckpttool.convert(URL, tmp_path / "dcp", to="dcp", world_size=3)
    assert ckpttool.inspect(tmp_path / "dcp").ranks == 3
    assert digest(tmp_path / "dcp") == digest(large)
    assert size <= hub.bytes_of("model.safetensors") < 1.05 * size  # each byte once
    assert ckpttool.diff(URL, large).equal and ckpttool.diff(tmp_path / "dcp", URL).equal
    assert not ckpttool.diff(URL, other(large, tmp_path / "other")).equal
    assert ckpttool.verify(URL).structure == "ok"
    said = ckpttool.verify(URL, read_data=True, against=tmp_path / "dcp")
    assert said.data == "ok" and said.against is not None and said.against["verdict"] == "equal"
    assert max(hub.sent.values()) and all(asked for m, p, _, asked in hub.seen if "/resolve/" in p and m == "GET")


def test_ranges_and_no_more(hub: Hub, large: Path) -> None:
    data = (large / "model.safetensors").read_bytes()
    hub.upload("org/name", large)
    source = RemoteSource(URL)
    assert source.size("model.safetensors") == len(data)
    for start, n in ((0, 8), (5_000_000, 100_000), (len(data) - 7, 7), (0, 9 * MIB)):
        hub.forget()
        assert source.read("model.safetensors", start, n) == data[start : start + n]
        assert hub.bytes_of() == n
        asked = sorted(str(r) for _, p, _, r in hub.seen if "/resolve/" in p)
        assert asked == sorted(
            f"bytes={at}-{min(at + RemoteSource.sizes.request_bytes, start + n) - 1}"
            for at in range(start, start + n, RemoteSource.sizes.request_bytes)
        )


def test_many_names(hub: Hub) -> None:
    """Listings of several pages, of folders, and names that URLs must quote."""
    hub.page = 3
    names = [f"f{k}" for k in range(10)] + ["a b", "ü", "x?y", "h#1", "p%20", "sub/c", "sub/deep/d"]
    hub.commit("org/name", {n: n.encode() for n in names})
    source = RemoteSource(URL)
    assert source.list() == sorted([n for n in names if "/" not in n] + ["sub"])
    assert source.list("sub") == ["c", "deep"] and source.list("none") == []
    assert all(source.read(n, 0, len(n.encode())) == n.encode() for n in names)
    assert source.exists("sub/c") and not source.exists("sub") and not source.exists("nope")


# ------------------------------------------------------------------------------------------------------- one commit


def test_a_commit_in_between_mixes_nothing(hub: Hub, tmp_path: Path) -> None:
    """A source looks at one commit, which is the branch as it was at first."""
    hub.upload("org/name", SHARDED)
    newer = other(SHARDED, tmp_path / "newer")
    source = RemoteSource(URL)
    names = source.list()
    ids = {n: source.size(n) for n in names}
    hub.upload("org/name", newer)
    hub.commit("org/name", {"config.json": None, "extra": b"x"})
    assert source.list() == names and {n: source.size(n) for n in names} == ids
    assert {n: source.read_all(n, MIB) for n in names} == files_of(SHARDED)
    assert not source.exists("extra")
    source.assert_unchanged()
    again = RemoteSource(URL)
    assert "extra" in again.list() and not again.exists("config.json")
    shard = next(n for n in names if n.endswith(".safetensors"))
    assert again.read_all(shard, MIB) == (newer / shard).read_bytes()
    again.size(shard)
    assert again.identities()[shard] != source.identities()[shard]


def test_threads_see_one_commit(hub: Hub) -> None:
    """All of them ask for the first time at once, and every question finds the branch one commit further."""
    hub.commit("org/name", {"a": b"%04d" % 0})
    lock, count, seen = threading.Lock(), [0], set()

    def rule(method: str, path: str) -> None:
        with lock:
            count[0] += 1
            hub.commit("org/name", {"a": b"%04d" % count[0]})

    source = RemoteSource(URL)
    hub.rule = rule
    threads = [threading.Thread(target=lambda: seen.add(source.read("a", 0, 4))) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(seen) == 1 and count[0] > 8


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_commit_while_it_is_converted(hub: Hub, tmp_path: Path, at: int) -> None:
    """With every request that reads a file, from the first on, the branch may move; the result is one of the two."""
    hub.upload("org/name", SHARDED)
    newer = other(SHARDED, tmp_path / "newer")
    lock, count = threading.Lock(), [0]

    def rule(method: str, path: str) -> None:
        with lock:
            count[0] += "/resolve/" in path
            if count[0] == at:
                count[0] += 1
                hub.upload("org/name", newer)

    hub.rule = rule
    try:
        ckpttool.convert(URL, tmp_path / "dcp", to="dcp", world_size=2)
    except SourceChanged:
        return
    assert count[0] > at and len(hub.repos["org/name"].commits) == 2
    assert digest(tmp_path / "dcp") == digest(SHARDED)
    assert digest(URL) == digest(newer)


def test_a_commit_that_goes_away(hub: Hub) -> None:
    """A repository that is deleted while it is read is an error that names it."""
    hub.upload("org/name", LLAMA)
    source = RemoteSource(URL)
    source.size("model.safetensors")
    hub.repos.clear()
    with pytest.raises((SourceChanged, RemoteError), match=r"hf://org/name/model\.safetensors"):
        source.read("model.safetensors", 0, 8)


def test_what_was_missing_may_be_there_later(hub: Hub) -> None:
    """Nothing is kept of earlier answers."""
    with pytest.raises(NotRecognised):
        digest(URL)
    hub.upload("org/name", LLAMA)
    assert digest(URL) == digest(LLAMA)


# -------------------------------------------------------------------------------------------- what passes, what not


@pytest.mark.parametrize("what", ["cut", "drop", 500, 503, 429])
def test_failures_in_between(hub: Hub, tmp_path: Path, what: int | str) -> None:
    """Every third request fails, whatever it asks for."""
    hub.upload("org/name", SHARDED)
    lock, count = threading.Lock(), [0]

    def rule(method: str, path: str) -> int | str | None:
        with lock:
            count[0] += 1
            return what if count[0] % 3 == 0 else None

    hub.rule = rule
    ckpttool.convert(URL, tmp_path / "dcp", to="dcp", world_size=3)
    assert hub.did(what) > 3
    assert digest(tmp_path / "dcp") == digest(SHARDED)


def test_a_hub_that_stays_away(hub: Hub) -> None:
    hub.upload("org/name", LLAMA)
    source = RemoteSource(URL)
    source.size("model.safetensors")
    hub.rule = lambda method, path: 500
    with pytest.raises(RemoteError, match=r"hf://org/name/model\.safetensors: no answer in 5 tries") as e:
        source.read("model.safetensors", 0, 8)
    assert e.value.exit_code == 9
    with pytest.raises(RemoteError, match=r"hf://org/name.*no answer in 5 tries"):
        digest(URL)


@pytest.mark.parametrize(
    ("url", "token", "kind", "words"),
    [
        (URL, "hf_WrongWrongWrongWrongWrong0123456", RemoteError, "Check the credentials"),
        (f"{URL}@main", "hf_WrongWrongWrongWrongWrong0123456", RemoteError, "Check the credentials"),
        (URL, STRANGER, NotRecognised, "the Hub has no such repository, or the token may not see it"),
        ("hf://org/missing", OWNER, NotRecognised, "the Hub has no such repository, or the token"),
        ("hf://org/missing@dev", OWNER, NotRecognised, "the Hub has no such repository, or the token"),
        (f"{URL}@nope", OWNER, NotRecognised, "has the repository, and no such revision"),
        (f"{URL}/nowhere", OWNER, NotRecognised, "has the repository, and no such file or folder"),
    ],
)
def test_refusals(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, url: str, token: str, kind: type[CkpttoolError], words: str
) -> None:
    hub.upload("org/name", LLAMA)
    monkeypatch.setenv("HF_TOKEN", token)
    for call in (ckpttool.inspect, digest):
        with pytest.raises(kind) as e:
            call(url)
        assert url in str(e.value) and words in str(e.value)
        assert token not in str(e.value)
    assert len(hub.seen) < 24  # none of them is asked again and again


def test_refusals_of_the_command(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that finds the Hub by its environment."""
    hub.upload("org/name", LLAMA)
    done = command("inspect", "--json", URL)
    assert done.returncode == 0 and json.loads(done.stdout)["layout"] == "hf", done.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_WrongWrongWrongWrongWrong0123456")
    done = command("inspect", URL)
    assert done.returncode == 9 and URL in done.stderr and "hf_Wrong" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_server_echoes_the_token(hub: Hub) -> None:
    hub.upload("org/name", LLAMA)
    hub.rule = lambda method, path: (403, f"denied for Authorization: Bearer {OWNER}, {OWNER}".encode())
    with pytest.raises(RemoteError, match="hf://org/name") as e:
        digest(URL)
    assert OWNER not in str(e.value) and e.value.exit_code == 9


def test_files_of_fsspec(hub: Hub) -> None:
    """HfFileSystem itself, for which the Hub is a store like others."""
    hub.commit("org/name", {"d/a": b"0123456789"})
    fs = HfFileSystem()
    assert fs.ls("org/name", detail=False) == ["org/name/d"] and fs.cat_file("org/name/d/a", 2, 5) == b"234"
    assert os.environ["HF_ENDPOINT"] == fs.endpoint == hub.endpoint


# ------------------------------------------------------------------------- files of a model that --config ID names


Answer = tuple[int, bytes, dict[str, str]]


def answer_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Answer], Answer]) -> None:
    """Let the Hub send what `change` makes of (path of a request, answer to it)."""
    route = _Handler._route
    monkeypatch.setattr(_Handler, "_route", lambda self, body: change(self.path, route(self, body)))


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize("where", ["ETag", "X-Linked-ETag", "X-Repo-Commit", "sha", "sha in UTF-16", "lfs"])
@pytest.mark.parametrize("climbs", [False, True])
def test_no_hash_of_the_hub_is_used_as_a_path(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, climbs: bool
) -> None:
    """huggingface_hub makes names of files of ETags, commits and, with Xet, of SHA-256s in listings."""
    from huggingface_hub import constants

    hub.commit("org/name", {"config.json": b"{}"})
    outside = tmp_path / "outside"
    outside.mkdir()
    path = "../../../../outside/x" if climbs else str(outside / "x")

    def change(at: str, answer: Answer) -> Answer:
        status, body, headers = answer
        if where.startswith("sha") and "/revision/" in at:
            told = json.dumps({**json.loads(body), "sha": path})
            return status, told.encode("utf-16" if where == "sha in UTF-16" else "utf-8"), headers
        if where == "lfs" and "/tree/" in at:
            more = {"lfs": {"oid": path, "size": 2, "pointerSize": 3}, "xetHash": "0" * 64}
            return status, json.dumps([row | more for row in json.loads(body)]).encode(), headers
        told = f'"{path}"' if "ETag" in where else path
        return status, body, {**headers, where: told} if "/resolve/" in at else headers

    answer_otherwise(monkeypatch, change)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    if where == "lfs":  # the file comes without Xet
        assert (Path(fetch_from_hub("org/name", ["*.json"])) / "config.json").read_bytes() == b"{}"
    else:
        words = "the Hub's answer: not JSON" if where == "sha in UTF-16" else "the Hub says '.*' where .* should be"
        with pytest.raises(RemoteError, match=f"there is no such folder.*{words}") as e:
            fetch_from_hub("org/name", ["*.json"])
        assert e.value.code == "CKPT0906"
    assert files_below(tmp_path) - {"outside"} <= {n for n in files_below(tmp_path) if n.startswith("hf")}
    assert constants.HF_HUB_DISABLE_XET is False


def test_a_model_is_found_offline_once_it_was_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.commit("org/name", {"config.json": b'{"sha": "/of/a/config"}', "tokenizer.json": b" " * (7 * MIB)})
    there = fetch_from_hub("org/name", ["*.json"])
    assert {p.name: p.stat().st_size for p in Path(there).iterdir()} == {"config.json": 23, "tokenizer.json": 7 * MIB}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget()
    assert fetch_from_hub("org/name", ["*.json"]) == there and not hub.seen


@pytest.mark.parametrize(
    "told", ['W/"0123-4567"', '"0x8DC:1+2="', f'"{"0f" * 20}"', f'W/"{"0f" * 20}"', f'"{"0f" * 32}"', '"d41d8cd98f00-5"', "0f0f"]
)  # fmt: skip
def test_other_hubs_may_have_other_etags(hub: Hub, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    """The Hub itself redirects to below /api/, where a file may have more bytes than an answer of the API."""
    data = b'{"sha": "/of/a/config"}' + b" " * (7 * MIB)
    hub.commit("org/name", {"config.json": data})

    def change(at: str, answer: Answer) -> Answer:
        status, body, headers = answer
        if at.startswith("/org/name/resolve/"):
            return 307, b"", {"Location": f"/api/resolve-cache/models{at}", "X-Repo-Commit": headers["X-Repo-Commit"]}
        return status, body, {**headers, "X-Repo-Commit": "main"}  # of the API, where nobody looks at it

    answer_otherwise(monkeypatch, change)
    cached = _Handler._route

    def route(self: _Handler, body: bytes) -> Answer:
        if self.path.startswith("/api/resolve-cache/"):
            commit = hub.repos["org/name"].refs["main"]
            return 200, data, {"ETag": told, "X-Repo-Commit": commit, "Content-Type": "application/json"}
        return cached(self, body)

    monkeypatch.setattr(_Handler, "_route", route)
    assert (Path(fetch_from_hub("org/name", ["*.json"])) / "config.json").read_bytes() == data


@pytest.mark.parametrize("linked", [f'"{"0f" * 32}"', f'W/"{"0f" * 32}"', '"../x"'])
def test_the_etag_of_a_linked_file_is_the_one_that_counts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    """A redirect to a CDN, whose own ETag, of HEAD and GET, may have any characters."""
    commit = hub.commit("org/name", {"config.json": b"{}"})

    def change(at: str, answer: Answer) -> Answer:
        if at.startswith("/org/name/resolve/"):
            headers = {"Location": f"{cdn.endpoint}/lfs", "X-Repo-Commit": commit, "X-Linked-Size": "2"}
            return 302, b"", {**headers, "ETag": '"a/b"', "X-Linked-ETag": linked}
        return answer

    answer_otherwise(monkeypatch, change)
    with Flaky(hub.endpoint, lambda method, path: (200, b"{}", {"ETag": '"CJ/+8Z2=="', "Content-Type": "x/y"})) as cdn:
        if ".." not in linked:
            assert (Path(fetch_from_hub("org/name", ["*.json"])) / "config.json").read_bytes() == b"{}"
            return
        with pytest.raises(RemoteError, match="where an ETag that can name a file should be"):
            fetch_from_hub("org/name", ["*.json"])


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_the_etag_of_an_error_is_not_looked_at(hub: Hub, status: int) -> None:
    """Of a file that is refused, as of one in a gated repository."""
    hub.commit("org/name", {"config.json": b"{}"})
    hub.rule = lambda method, path: status if "/resolve/" in path else None
    with pytest.raises(CkpttoolError) as e:
        fetch_from_hub("org/name", ["*.json"])
    assert "ETag" not in str(e.value) and e.value.code != "CKPT0906"


@pytest.mark.parametrize(
    "where", ["/org/name/resolve/main/config.json", "/api/models/../../org/name/x", "/api/datasets/a/tree"]
)
def test_the_next_page_of_a_listing_is_one_of_the_api(hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As a file, it would be parsed however much memory that takes."""
    hub.commit("org/name", {"config.json": b"{}"})
    link = {"Link": f'<{hub.endpoint}{where}>; rel="next"'}
    answer_otherwise(monkeypatch, lambda at, a: (a[0], a[1], {**a[2], **link}) if "/tree/" in at else a)
    hub.rule = lambda method, path: None if "/api/models/org/" in path else (200, b"[" + b"[]," * 300_000 + b"[]]")
    with pytest.raises(RemoteError, match="where the address of the next page of a listing should be") as e:
        fetch_from_hub("org/name", ["*.json"])
    assert e.value.code == "CKPT0906" and all("/api/models/org/" in path for _, path, _, _ in hub.seen)


def test_a_refused_redirect_keeps_its_code(hub: Hub) -> None:
    hub.commit("org/name", {"config.json": b"{}"})
    with pytest.MonkeyPatch.context() as patch:
        answer_otherwise(patch, lambda at, a: (307, b"", {"Location": "ftp://h/x"}) if "/tree/" in at else a)
        with pytest.raises(Unsafe, match=r"there is no such folder.*redirects to ftp://") as e:
            fetch_from_hub("org/name", ["*.json"])
    assert e.value.code == "CKPT0706" and e.value.exit_code == 7


def test_xet_is_off_until_the_last_of_two_threads_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    one, two = hub_limits.disabled_xet(), hub_limits.disabled_xet()
    one.__enter__(), two.__enter__(), one.__exit__(None, None, None)
    assert constants.HF_HUB_DISABLE_XET is True
    two.__exit__(None, None, None)
    assert constants.HF_HUB_DISABLE_XET is False


@pytest.mark.parametrize("coding", ["gzip", "zstd", ", ".join(["gzip"] * 9), None])
def test_an_error_that_cannot_be_read_is_told_by_its_status(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, coding: str | None
) -> None:
    """Its body is not unpacked, whatever it is, nor parsed if that would fill the memory."""
    hub.commit("org/name", {"config.json": b"{}"})
    answers, body = [503, 404], gzip.compress(bytes(1 << 20)) if coding else b"[" * 60_000
    headers = {"Content-Encoding": coding} if coding else {}

    def change(at: str, answer: Answer) -> Answer:
        return (answers.pop(0), body, headers) if "/tree/" in at else answer

    answer_otherwise(monkeypatch, change)
    with pytest.raises(retries.NotFound):
        client.Repository("org/name").read_state()
    assert not answers


def test_an_answer_of_the_api_is_bounded_while_files_are_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("org/name", {"config.json": b"{}"})
    answer_otherwise(monkeypatch, lambda at, a: (a[0], a[1] + b" " * (7 * MIB), a[2]) if "/tree/" in at else a)
    with pytest.raises(RemoteError, match="more than the 6,291,456 bytes"):
        fetch_from_hub("org/name", ["*.json"])


# ---------------------------------------------------------------------------------------- who gets the credentials


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://hub.test/api/x", True), ("https://hub.test:443/x", True), ("https://hub.test:8443/x", False),
        ("https://store.test/x", False), ("https://hub.test.evil/x", False), ("http://hub.test/x", None), ("http://store.test/x", None),
    ],
)  # fmt: skip
def test_only_the_hub_gets_the_token(monkeypatch: pytest.MonkeyPatch, url: str, kept: bool | None) -> None:
    """None: the request is refused."""
    from huggingface_hub import constants, get_session

    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.test")
    request = get_session().build_request("POST", url, headers={"authorization": "Bearer x", "Cookie": "a=b"})
    with answer_limits.within_budget(answer_limits.RequestBudget(URL)):
        if kept is None:
            with pytest.raises(Unsafe, match="names an address with http://") as e:
                hub_limits._before_request(request)
            assert e.value.code == "CKPT0706"
            return
        hub_limits._before_request(request)
    assert ("Authorization" in request.headers, "Cookie" in request.headers) == (kept, kept)


def test_a_hub_that_never_says_a_byte_of_tls(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    limits = answer_limits.Limits(stall_seconds=0.2, question_seconds=0.3)
    for module in (answer_limits, client, hub_limits):
        monkeypatch.setattr(module, "LIMITS", limits)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"https://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RemoteError, match=r"does not answer|has not given a whole answer"):
            client.Repository("org/name").read_state()
    assert time.monotonic() - began < 10
