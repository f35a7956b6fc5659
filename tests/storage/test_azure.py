"""Checkpoints in Azure's Blob Storage, by adlfs and azure-storage-blob, on the server of fake_blob.py and, where it is
installed, on azurite; not on Azure itself."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("adlfs")
from fake_blob import KEY, Blobs, azurite, blob, environment

from ckpttool.audit import ledger
from ckpttool.audit.export import export
from ckpttool.engine.conversion import convert
from ckpttool.engine.diff import diff
from ckpttool.engine.verification import verify
from ckpttool.errors import CkpttoolError, DestinationExists, RemoteError, SourceChanged, Unsafe, UsageError
from ckpttool.layouts import place
from ckpttool.storage import answer_limits, listings, objects, retries, upload, urls
from ckpttool.storage.answer_limits import Limits
from ckpttool.storage.remote import RemoteSource
from ckpttool.storage.upload import ObjectUpload, UploadSizes

DCP = str(Path(__file__).parents[2] / "fixtures" / "fsdp2_w3" / "ckpt")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blobs]:
    with Blobs() as store:
        environment(monkeypatch, store.endpoint)
        store.blobs["c"] = {}
        yield store


@pytest.fixture(params=["ours", "azurite"])
def container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a new container."""
    if request.param == "ours":
        request.getfixturevalue("store")
        yield "az://c"
        return
    from azure.storage.blob import BlobServiceClient

    with azurite(tmp_path / "azurite") as endpoint:
        environment(monkeypatch, endpoint)
        text = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        BlobServiceClient.from_connection_string(text).create_container("ccc")
        yield "az://ccc"


def test_there_and_back(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and a file, in blocks and in one, replaced, found again by another URL of the same place."""
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=20_000, smallest_part_bytes=20_000))
    for to, ranks in (("dcp", 3), ("zero3", 2), ("full", None)):
        url = f"{container}/run 1/ü-{to}" + (".pt" if to == "full" else "")
        sent = convert(DCP, url, to=to, world_size=ranks)
        back = convert(url, tmp_path / to, to="dcp", world_size=3)
        assert sent.verified and back.digest == sent.digest and diff(DCP, str(tmp_path / to)).equal
    folder = f"{container}/run 1/ü-dcp"
    assert verify(folder, read_data=True, against=DCP).recorded == "equal"
    with pytest.raises(DestinationExists, match="holds 5 objects"):
        convert(DCP, folder, to="dcp", world_size=2)
    assert convert(DCP, folder, to="dcp", world_size=2, force=True).verified
    other = folder.replace("az://", "abfss://").replace("/run", "@devstoreaccount1.dfs.core.windows.net/run", 1)
    source = RemoteSource(other)
    assert source.root == other and len(source.list()) == 4 and source.has_versions()
    assert RemoteSource(container).list_ahead() and urls.UNFINISHED not in source.list()


def test_conditions(container: str) -> None:
    """Of two runs one wins, whatever their order; nothing that is there is replaced unasked."""
    one, two = (ObjectUpload(f"{container}/a", force=False) for _ in "12")
    one.append(b"1"), two.append(b"2"), one.commit()
    with pytest.raises(DestinationExists):
        two.commit()
    with pytest.raises(DestinationExists):
        ObjectUpload(f"{container}/a", force=False)
    one, two = (ObjectUpload(f"{container}/a", force=True) for _ in "12")
    one.append(b"1"), two.append(b"2"), one._to.flush()  # type: ignore[union-attr]
    two.commit()
    with pytest.raises(RemoteError, match="its parts are gone"):
        one.commit()
    data, token = objects.get_with_token(f"{container}/a")
    assert data == b"2" and token and objects.put_if_unchanged(f"{container}/a", b"3", token)
    assert not objects.put_if_unchanged(f"{container}/a", b"4", token)
    assert not objects.put_if_unchanged(f"{container}/a", b"4", None)
    assert not objects.put_if_unchanged(f"{container}/none", b"4", token)
    empty = ObjectUpload(f"{container}/empty", force=False)
    empty.commit()
    assert objects.get_with_token(f"{container}/empty")[0] == b""
    objects.delete_object_versions(f"{container}/a")
    objects.delete_remote_object(f"{container}/a")
    assert objects.get_with_token(f"{container}/a") == (b"", None)


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # of aiohttp, about its event loop
def test_a_large_blob_is_read_in_ranges(store: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * (17 << 12)
    store.blobs["c"]["l"] = blob(data)
    found, token = objects.get_with_token("az://c/l")
    assert found == data and [method for method, _ in store.seen] == ["GET"] * 3
    assert objects.put_if_unchanged("az://c/l", data + b"1", token)
    changes = iter([blob(b"2" * (9 << 20)), blob(b"3")])

    def replace(method: str, path: str) -> None:
        if len(store.seen) % 2 == 0 and (new := next(changes, None)) is not None:
            store.blobs["c"]["l"] = new

    store.seen.clear()
    store.rule = replace
    found, token = objects.get_with_token("az://c/l")
    assert found == b"3" and token == store.blobs["c"]["l"].etag
    monkeypatch.setattr(objects, "MOST_LEDGER_BYTES", 1000)
    store.blobs["c"]["l"] = blob(b"4" * 1001)
    with pytest.raises(Unsafe, match=r"has 1,001 bytes.*more than 1,000 are refused"):
        objects.get_with_token("az://c/l")


def test_a_ledger(store: Blobs) -> None:
    """Archives and their ledger, whose lines are written under conditions."""
    for name in ("a", "b"):
        export(DCP, f"az://c/store/{name}.tar.zst", in_ledger=True)
    chain = ledger.verify_chain("az://c/store")
    assert chain["entries"] >= 2 and ledger.check_writable("az://c/store")
    verify("az://c/store/a.tar.zst", read_data=True, against=DCP)
    assert sorted(store.blobs["c"]) == ["store/a.tar.zst", "store/b.tar.zst", "store/ledger.jsonl"]


def test_a_blob_that_changes_is_an_error(store: Blobs) -> None:
    store.blobs["c"] = {"a": blob(b"x" * 100), "f/b": blob(b"y")}
    source = RemoteSource("az://c")
    assert source.list() == ["a", "f"] and source.read("a", 50, 10) == b"x" * 10
    source.assert_unchanged()
    store.blobs["c"]["a"] = blob(b"z" * 100)
    with pytest.raises(SourceChanged, match="az://c/a changed"):
        source.assert_unchanged()
    source = RemoteSource("az://c")
    assert source.size("a") == 100
    store.blobs["c"]["a"] = blob(b"z")
    with pytest.raises(SourceChanged, match="az://c/a changed"):
        source.read("a", 50, 10)


def test_folders_of_a_hierarchical_namespace(store: Blobs) -> None:
    """Such an account lists a folder as a blob of no bytes, too."""
    store.blobs["c"] = {"f": blob(b"", hdi_isfolder="true"), "f/a": blob(b"1"), "g": blob(b"", hdi_isfolder="true")}
    source = RemoteSource("az://c")
    assert source.list() == ["f", "g"] and source.glance("f") == (True, None) and source.list("f") == ["a"]
    assert source.list_ahead() and source.list() == ["f", "g"] and source.list("f") == ["a"] and not source.exists("g")


def test_a_failure_leaves_nothing(store: Blobs) -> None:
    """The store fails while blocks are sent: no blob is visible; the same command then starts over."""
    store.rule = lambda method, path: (500, {}, b"") if "comp=block&" in path + "&" else None
    with pytest.raises(RemoteError, match=r"no answer in 5 tries"):
        convert(DCP, "az://c/new", to="dcp", world_size=2)
    assert not store.blobs["c"]
    store.rule = lambda method, path: None
    assert convert(DCP, "az://c/new", to="dcp", world_size=2).verified


def test_the_marker_is_seen_last(store: Blobs) -> None:
    convert(DCP, "az://c/new", to="dcp", world_size=2)
    made = [path.partition("?")[0].rpartition("/")[2] for method, path in store.seen if "comp=blocklist" in path]
    assert made[-1] == ".metadata"
    puts = [path for method, path in store.seen if method in ("PUT", "DELETE") and urls.UNFINISHED in path]
    assert len(puts) == 2 and urls.UNFINISHED not in str(store.blobs)


def test_lost_requests_are_sent_again(store: Blobs, tmp_path: Path) -> None:
    lost = iter(["drop", None] * 4)  # fewer than the tries of one request
    store.rule = lambda method, path: next(lost, None)
    assert convert(DCP, "az://c/new", to="dcp", world_size=2).verified
    lost = iter([(503, {}, b""), None] * 4)
    assert convert("az://c/new", tmp_path / "out", to="dcp", world_size=2).verified


HTML = b"<!DOCTYPE html><html><body>Bad gateway</body></html>"


@pytest.mark.parametrize(
    "answer", [(502, {}, HTML), (503, {"Content-Encoding": "gzip"}, gzip.compress(bytes(1 << 20)))]
)
def test_an_error_of_a_proxy_is_told_by_its_status(store: Blobs, answer: Any) -> None:
    """A page with a DTD, or an encoded one, comes instead of XML of Azure."""
    store.blobs["c"] = {"a": blob(b"x" * 100)}
    answers = iter([answer, None] * 2)
    store.rule = lambda method, path: next(answers, None)
    source = RemoteSource("az://c")
    assert source.list() == ["a"] and source.read("a", 0, 100) == b"x" * 100 and next(answers, 0) == 0
    store.rule = lambda method, path: (404, *answer[1:])
    assert objects.get_with_token("az://c/a") == (b"", None)


XML = {"Content-Type": "application/xml"}


def page(names: list[str], marker: str = "") -> tuple[int, dict[str, str], bytes]:
    rows = "".join(
        f"<Blob><Name>{n}</Name><Properties><Etag>0x1</Etag><Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
        for n in names
    )
    text = f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
    return 200, XML, text.encode()


@pytest.mark.parametrize(
    ("lie", "kind", "text"),
    [
        (lambda n: page([f"d/a{n}"], "same"), RemoteError, "comes back to a page|no end"),
        (lambda n: page([f"d/a{n}"], f"m{n}"), RemoteError, "more than 30 pages"),
        (lambda n: page([f"d/a{n}-{k}" for k in range(60)], f"m{n}"), RemoteError, "more than 100 names"),
        (lambda n: page(["d/a"], "m" * 20_000), RemoteError, "names the next page"),
        (lambda n: page(["d/a", "d/a"]), RemoteError, "lists 'a' twice"),
        (lambda n: page(["d/../../x"]), Unsafe, "leads out of"),
        (lambda n: page(["elsewhere"]), Unsafe, "does not lie there"),
        (lambda n: (200, XML, b"<a>" * 100_000), RemoteError, "nested deeper"),
        (lambda n: (200, XML, b" " * (3 << 20)), RemoteError, "sends more than the"),
        (lambda n: (200, {**XML, "Content-Encoding": "gzip"}, b"x"), RemoteError, "content encoding 'gzip'"),
        (lambda n: (302, {"Location": "http://127.0.0.1:1/"}, b""), RemoteError, "Found"),
        (lambda n: (503, {"Retry-After": "9000"}, b""), RemoteError, "wants us to wait 9,000 seconds"),
        (lambda n: (200, XML, b"no xml"), RemoteError, "az://c/d"),
    ],
)
def test_a_lie_in_a_listing_is_an_error(
    store: Blobs, monkeypatch: pytest.MonkeyPatch, lie: Any, kind: type[CkpttoolError], text: str
) -> None:
    few = Limits(answers=30, names=100)
    monkeypatch.setattr(answer_limits, "LIMITS", few)
    monkeypatch.setattr(listings, "LIMITS", few)
    store.rule = lambda method, path: lie(len(store.seen))
    with pytest.raises(kind, match=text):
        RemoteSource("az://c/d").list()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((200, {"ETag": '"1"'}, b"x" * 5000), "ignores Range requests"),
        ((206, {"ETag": '"1"', "Content-Range": "bytes 7-106/1000"}, b"x" * 100), "but the server sent 'bytes 7-"),
        ((206, {"ETag": '"1"', "Content-Range": "bytes 0-99/1000"}, b"x" * 5000), "sends more than the 100 bytes"),
    ],
)
def test_a_lie_about_a_range_is_an_error(store: Blobs, answer: Any, text: str) -> None:
    store.blobs["c"] = {"a": blob(b"x" * 1000)}
    store.rule = lambda method, path: answer if method == "GET" else None
    with pytest.raises(RemoteError, match=text):
        RemoteSource("az://c").read("a", 0, 100)


def test_no_message_has_a_credential(store: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    store.rule = lambda method, path: (
        403, {"x-ms-error-code": "AuthenticationFailed"}, f"AccountKey={KEY};sig=abcdefghij%3D no".encode()
    )  # fmt: skip
    with pytest.raises(RemoteError, match="does not allow it") as e:
        RemoteSource("az://c/d").list()
    assert KEY not in str(e.value) and "abcdefghij" not in str(e.value)
    with pytest.raises(UsageError, match="set AZURE_STORAGE_SAS_TOKEN") as u:
        place("az://c/d?sv=1&sig=abcdefghij")
    assert "abcdefghij" not in str(u.value)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    from adlfs import AzureBlobFileSystem

    AzureBlobFileSystem.clear_instance_cache()
    with pytest.raises(UsageError, match="Set AZURE_STORAGE_ACCOUNT_NAME"):
        place("az://c/d")


def test_what_is_missing(store: Blobs) -> None:
    with pytest.raises(CkpttoolError, match="no such object, and no objects below it"):
        place("az://c/none")
    for do in (lambda: place("az://none/x"), lambda: convert(DCP, "az://none/x", to="dcp", world_size=2)):
        with pytest.raises(RemoteError, match="ContainerNotFound"):
            do()
    with pytest.raises(UsageError, match="names a container; give an object in it"):
        convert(DCP, "az://c", to="full")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("abfss://c@a.dfs.core.windows.net/x?sig=1", "abfss://c@a.dfs.core.windows.net/x"),
        ("az://user:word@c/x", "az://c/x"),
        ("s3://key:word@b/x", "s3://b/x"),
    ],
)
def test_urls_without_credentials(url: str, shown: str) -> None:
    assert urls.redact_url(url) == shown
