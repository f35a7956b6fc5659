"""Object stores: reading by ranges, writing whole or not at all, swaps, locks, and what a bad connection changes:
nothing."""

from __future__ import annotations

import gzip
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import stores
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from stores import KEY_ID, SECRET, Flaky, Moto, first

from ckpttool.engine import conversion, planning, verification
from ckpttool.errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    RemoteError,
    SourceChanged,
    Unsafe,
    Unsupported,
    UsageError,
)
from ckpttool.storage import answer_limits, listings, objects, remote, retries, upload, urls
from ckpttool.storage.prefetch import FetchSizes
from ckpttool.storage.remote import RemoteSource, filesystem_for
from ckpttool.storage.upload import ObjectUpload, UploadSizes

FIXTURES = Path(__file__).parents[2] / "fixtures"
MIB = 1 << 20
LOCKED = {
    "ObjectLockMode": "GOVERNANCE",
    "ObjectLockRetainUntilDate": datetime(2044, 1, 1, tzinfo=UTC),
    "ObjectLockLegalHoldStatus": "ON",
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))


def put(s3: Moto, url: str, data: bytes, **how: Any) -> None:
    name, _, key = url.removeprefix("s3://").partition("/")
    s3.client().put_object(Bucket=name, Key=key, Body=data, **how)


def get(s3: Moto, url: str) -> bytes | None:
    name, _, key = url.removeprefix("s3://").partition("/")
    client = s3.client()
    try:
        return bytes(client.get_object(Bucket=name, Key=key)["Body"].read())
    except client.exceptions.NoSuchKey:
        return None


def unfinished(s3: Moto, url: str) -> list[str]:
    found = s3.client().list_multipart_uploads(Bucket=url.removeprefix("s3://").partition("/")[0])
    return [u["Key"] for u in found.get("Uploads", [])]


def noise(n: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(n)


# -------------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    "url", ["s3://b/x", "gs://b", "hf://o/n@r", "http://h/x", "HTTPS://h/x", "memory://x", "file:///x"]
)
def test_urls(url: str) -> None:
    assert urls.is_url(url)


@pytest.mark.parametrize("path", ["s3:/b/x", "/a/b", "://x", "x/s3://b", "C:\\x", "", "1s://x", ".", "a:b"])
def test_paths(path: str) -> None:
    assert not urls.is_url(path)
    assert not urls.is_url(Path(path))


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("s3://b/d/a.tar.zst", "s3://b/d", "a.tar.zst"),
        ("s3://b/a?b", "s3://b", "a?b"),
        ("s3://b/d%20e/a%20b", "s3://b/d%20e", "a%20b"),
        ("https://h/d/a%20b?sig=x/y", "https://h/d?sig=x/y", "a b"),
    ],
)
def test_split(url: str, folder: str, name: str) -> None:
    assert urls.split_url(url) == (folder, name)


@pytest.mark.parametrize(
    "url", ["nope://b/x", "file:///x", "local://x", "simplecache::s3://b/x", "zip://a::s3://b/x.zip"]
)
def test_no_such_store(url: str) -> None:
    with pytest.raises(UsageError) as e:
        RemoteSource(url)
    assert url.partition("?")[0] in str(e.value) or "nope" in str(e.value)


@pytest.mark.parametrize(
    ("absent", "url", "how"),
    [
        ("s3fs", "s3://b/x", "pip install 'ckpttool[s3]'"),
        ("gcsfs", "gs://b/x", "pip install 'ckpttool[gcs]'"),
        ("fsspec", "s3://b/x", "pip install 'ckpttool[s3]'"),
        ("adlfs", "az://b/x", "pip install 'ckpttool[azure]'"),
    ],
)
def test_package_missing(absent: str, url: str, how: str) -> None:
    code = f"""
import sys
sys.modules[{absent!r}] = None
from ckpttool.storage.remote import RemoteSource
from ckpttool.errors import UsageError
try:
    RemoteSource({url!r})
except UsageError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert how in done.stdout and done.stderr == ""


# ----------------------------------------------------------------------------------------------------------- reading


def test_reads_ranges(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(3 * MIB + 5)
    put(s3, f"{bucket}/run/a.bin", data)
    monkeypatch.setattr(RemoteSource, "sizes", FetchSizes(request_bytes=1 << 20))
    with Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with RemoteSource(f"{bucket}/run/") as source:
            assert source.root == f"{bucket}/run" and source.local is False
            assert source.size("a.bin") == len(data)
            assert source.read("a.bin", 17, 100) == data[17:117]
            assert [h["range"] for h in proxy.headers if "range" in h] == ["bytes=17-116"]
            out = bytearray(3 * MIB)
            source.readinto("a.bin", 5, memoryview(out))
            assert out == data[5:]
            assert sorted([h["range"] for h in proxy.headers if "range" in h][1:]) == sorted(
                f"bytes={5 + k * MIB}-{4 + (k + 1) * MIB}" for k in range(3)
            )
            source.readinto("a.bin", 0, memoryview(bytearray()))
            wide = memoryview(bytearray(80)).cast("d")
            source.readinto("a.bin", 0, wide)
            assert wide.tobytes() == data[:80]
            assert source.read_all("a.bin", 4 * MIB) == data
            with pytest.raises(Corrupt, match="at most 10"):
                source.read_all("a.bin", 10)


@pytest.mark.parametrize(("offset", "n"), [(-1, 2), (9, 2), (11, 0), (0, 11), (1 << 62, 1)])
def test_beyond_the_end(s3: Moto, bucket: str, offset: int, n: int) -> None:
    put(s3, f"{bucket}/a", b"0123456789")
    source = RemoteSource(bucket)
    with pytest.raises(Corrupt, match="10"):
        source.readinto("a", offset, memoryview(bytearray(n)))
    with pytest.raises(Corrupt, match="10"):
        source.read("a", offset, n)


def test_lists_what_lies_directly_below(s3: Moto, bucket: str) -> None:
    for key in ("run/a", "run/b b", "run/sub/c", "run/sub/deep/d", "run2/e", "running", "run/ü?#%20"):
        put(s3, f"{bucket}/{key}", b"x")
    source = RemoteSource(f"{bucket}/run")
    assert source.list() == ["a", "b b", "sub", "ü?#%20"]
    assert source.list("sub") == ["c", "deep"]
    assert source.list("nowhere") == [] and source.list("a") == []
    assert source.read("ü?#%20", 0, 1) == b"x"
    assert source.exists("a") and not source.exists("sub") and not source.exists("c") and not source.exists("")
    assert source.exists("sub/c")
    put(s3, f"{bucket}/run/new", b"x")
    assert "new" not in source.list() and not source.exists("new")  # one checkpoint: what was there at first
    assert "new" in RemoteSource(f"{bucket}/run").list()
    assert RemoteSource(f"{bucket}/nothing").list() == []


@pytest.mark.parametrize("row", ["<Contents><Size>3</Size></Contents>", "<CommonPrefixes></CommonPrefixes>"])
def test_a_listing_without_names(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    told = f"<ListBucketResult>{row}</ListBucketResult>".encode()
    with Flaky(s3.endpoint, lambda m, p: (200, told)) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match=f"{bucket}: the store answers with something that is no listing") as e:
            RemoteSource(bucket).list()
        assert e.value.code == "CKPT0906"


def test_a_listing_of_all_objects_counts_folders_too(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of S3 has names of more than 900,000 folders."""
    monkeypatch.setattr(remote, "LIMITS", answer_limits.Limits(names=50))
    put(s3, f"{bucket}/a/{'b/' * 20}c", b"")
    put(s3, f"{bucket}/a/{'b/' * 20}d/e", b"")
    put(s3, f"{bucket}/z/{'b/' * 50}c", b"")
    source = RemoteSource(f"{bucket}/a")
    assert source.list_ahead() and source.list("/".join("b" * 20)) == ["c", "d"]
    source = RemoteSource(f"{bucket}/z")
    assert not source.list_ahead() and not source._listed and source.list() == ["b"]


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "a//b", "", ".", "..", "a\0b", "s3://other/x", "a\\..\\b", "a?versionId=1", "a\ud800"]
)  # fmt: skip
def test_names_that_lead_out(s3: Moto, bucket: str, name: str) -> None:
    put(s3, f"{bucket}/x", b"secret")
    source, words = RemoteSource(f"{bucket}/run"), "surrogate pair" if "\ud800" in name else "leads out of"
    with pytest.raises(Unsafe, match=words):
        source.size(name)
    with pytest.raises(Unsafe, match=words):
        source.read(name, 0, 1)
    assert not source.exists(name)


def test_missing(bucket: str) -> None:
    source = RemoteSource(bucket)
    with pytest.raises(Corrupt, match="run/x is missing") as e:
        source.size("run/x")
    assert f"{bucket}/run/x" in str(e.value)
    with pytest.raises(RemoteError, match="NoSuchBucket"):
        RemoteSource("s3://no-such-bucket-9/x").list()
    with pytest.raises(CkpttoolError, match="no-such-bucket-9"):
        RemoteSource("s3://no-such-bucket-9/x").size("a")


def test_changed_object(s3: Moto, bucket: str) -> None:
    put(s3, f"{bucket}/a", b"0123456789")
    put(s3, f"{bucket}/b", b"0123456789")
    source = RemoteSource(bucket)
    source.size("a"), source.size("b")
    ids = source.identities()
    assert set(ids) == {"a", "b"} and ids["a"] != ids["b"] and all(i[2] == 10 for i in ids.values())
    source.assert_unchanged()
    assert RemoteSource(bucket).identities() == {}
    put(s3, f"{bucket}/a", b"012345678X")  # same size, same second
    with pytest.raises(SourceChanged, match=f"{bucket}/a changed"):
        source.assert_unchanged()
    put(s3, f"{bucket}/b", b"short")
    with pytest.raises(SourceChanged, match="b changed"):
        source.read("b", 2, 8)
    s3.client().delete_object(Bucket=bucket[5:], Key="b")
    with pytest.raises(SourceChanged, match="b changed"):
        source.read("b", 0, 1)
    put(s3, f"{bucket}/a", b"0123456789")
    again = RemoteSource(bucket)
    again.size("a")
    assert again.identities()["a"] == ids["a"]  # the same bytes at the same place are the same version


def test_many_threads(s3: Moto, bucket: str) -> None:
    data = noise(2 * MIB)
    put(s3, f"{bucket}/a", data)
    source, wrong = RemoteSource(bucket), []

    def look(k: int) -> None:
        dice = random.Random(k)
        for _ in range(20):
            at = dice.randrange(len(data) - 1000)
            if source.read("a", at, 1000) != data[at : at + 1000]:
                wrong.append(at)

    threads = [threading.Thread(target=look, args=(k,)) for k in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == []


# ----------------------------------------------------------------------------------------------- what passes, what not


@pytest.mark.parametrize("what", [500, 502, 503, 429, "drop", "cut", "lose"])
def test_reading_through_failures(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, what: int | str) -> None:
    data = noise(MIB)
    put(s3, f"{bucket}/a", data)
    with Flaky(s3.endpoint, first(4, what, "GET")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        source = RemoteSource(bucket)
        assert source.read("a", 0, MIB) == data
        assert proxy.did(what) == 4


@pytest.mark.parametrize(("what", "tries"), [(500, 5), (503, 10), (429, 10), ("drop", 5), ("cut", 5)])
def test_tries_are_bounded(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, what: int | str, tries: int) -> None:
    """A store that says that it is asked too much is asked for longer."""
    put(s3, f"{bucket}/a", noise(1000))
    with Flaky(s3.endpoint, first(1000, what, "GET")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        source = RemoteSource(bucket)
        with pytest.raises(RemoteError, match=f"{bucket}/a: no answer in {tries} tries") as e:
            source.read("a", 0, 1000)
        assert e.value.exit_code == 9
        # aiohttp asks once more by itself where a connection that it had used before was closed
        assert tries <= sum(m == "GET" for m, _, _ in proxy.seen) <= (10 if what == "drop" else tries)


def test_cut_every_so_often(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third answer breaks off; the bytes are the same."""
    data = noise(4 * MIB + 3)
    monkeypatch.setattr(RemoteSource, "sizes", FetchSizes(request_bytes=100_000))
    # pieces are asked for by several threads: that one of 42 is cut five times in a row has a chance of one in six
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(tries=14, first_wait_seconds=0.0001))
    count = [0]

    def rule(method: str, path: str) -> str | None:
        count[0] += 1
        return "cut" if count[0] % 3 == 0 and method != "HEAD" else None

    put(s3, f"{bucket}/a", data)
    with Flaky(s3.endpoint, rule) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        assert RemoteSource(bucket).read("a", 0, len(data)) == data
        assert proxy.did("cut") > 15


@pytest.mark.parametrize("what", [400, 403, 404, 405, 501])
def test_refusals_are_not_asked_again(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, what: int) -> None:
    put(s3, f"{bucket}/a", noise(1000))
    with Flaky(s3.endpoint, first(1000, what, "HEAD")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(Corrupt if what == 404 else RemoteError) as e:
            RemoteSource(bucket).size("a")
        assert f"{bucket}/a" in str(e.value)
        assert sum(path.endswith("/a") for _, path, _ in proxy.seen) == 1
        assert what != 403 or "Check the credentials" in str(e.value)


def test_nobody_listens(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    stores.forget()
    with pytest.raises(RemoteError, match="no answer in 5 tries"):
        RemoteSource(bucket).size("a")


def test_no_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    stores.forget()
    with pytest.raises(RemoteError, match="Unable to locate credentials"):
        RemoteSource(bucket).size("a")


# ---------------------------------------------------------------------------------------------------- nothing is told


def test_no_credential_in_any_message(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that echo what they were sent."""
    told = (
        f"<Error><Code>SignatureDoesNotMatch</Code><Message>key {KEY_ID} secret {SECRET} AWS4-HMAC-SHA256 "
        "Credential=AKIAXXXXXXXXXXXXXXXX/2026/us-east-1/s3/aws4_request, Signature=0123deadbeef at "
        "https://user:pass@h.example/x?X-Amz-Signature=feedface&amp;X-Amz-Credential=AKIAYYYYYYYYYYYYYYYY"
        "</Message></Error>"
    ).encode()
    put(s3, f"{bucket}/a", b"0123456789")
    with Flaky(s3.endpoint, first(1000, (403, told), "GET", "PUT", "POST")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        calls = [
            lambda: RemoteSource(bucket).read("a", 0, 1),
            lambda: RemoteSource(bucket).list(),
            lambda: ObjectUpload(f"{bucket}/n", force=True).commit(),
            lambda: objects.put_if_unchanged(f"{bucket}/n", b"x", None),
            lambda: objects.get_with_token(f"{bucket}/n"),
            lambda: objects.set_legal_hold(f"{bucket}/a", on=True),
        ]
        for call in calls:
            with pytest.raises(RemoteError) as e:
                call()
            text = str(e.value)
            assert "SignatureDoesNotMatch" in text and bucket in text
            for secret in (KEY_ID, SECRET, "AKIAX", "AKIAY", "0123deadbeef", "feedface", "user:pass", "aws4_request"):
                assert secret not in text, text


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@127.0.0.1:9/d?sig=hunter2",
        "http://127.0.0.1:9/d?token=hunter2&x=1",
        "http://hunter2@127.0.0.1:9/d",
    ],
)
def test_no_credential_of_a_url(url: str) -> None:
    source = RemoteSource(url)
    assert "hunter2" not in source.root
    for call in (lambda: source.size("a"), lambda: source.list(), lambda: objects.get_with_token(f"{url}/a")):
        with pytest.raises(RemoteError) as e:
            call()
        assert "hunter2" not in str(e.value) and "127.0.0.1:9/d" in str(e.value)
    with pytest.raises(Unsupported) as e2:
        ObjectUpload(url, force=True)
    assert "hunter2" not in str(e2.value)


# -------------------------------------------------------------------------------------------------------- other stores


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("NoSuchKey: The specified key does not exist.", "NoSuchKey: The specified key does not exist"),
        ("ExpiredToken: The provided token has expired.", "ExpiredToken: The provided token has expired"),
        ("Authorization: Bearer abc.def-1, x", "Authorization: Bearer ***, x"),
        ("header 'Authorization': 'abc'", "header 'Authorization': '***'"),
        ("get https://u:p@h/x?sig=1&b=2 (x)", "get https://h/x (x)"),
        ("AWSAccessKeyId=abc&Signature=d%2Fe&x=1", "AWSAccessKeyId=***&Signature=***&x=1"),
        ("two\nlines\tand   more", "two lines and more"),
        ("", "OSError"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_words(said: str, shown: str) -> None:
    assert retries.redact_message(OSError(said)) == shown


class _Ranges(SimpleHTTPRequestHandler):
    """http.server with ranges; `whole` ignores them, `shift` sends others, and without `dated` nothing tells a version."""

    whole, shift, dated = False, 0, True

    def send_header(self, keyword: str, value: str) -> None:
        if self.dated or keyword != "Last-Modified":
            super().send_header(keyword, value)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not found or self.whole or not path.is_file():
            return super().do_GET()
        a, b = int(found[1]) + self.shift, int(found[2]) + 1 + self.shift
        data = path.read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {a}-{b - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data[a:b])))
        self.end_headers()
        self.wfile.write(data[a:b])


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(100_000)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a b#c").write_bytes(data)
    with Flaky(web, first(3, "cut", "GET")) as proxy:
        source = RemoteSource(f"{proxy.endpoint}/d?sig=abc")
        assert source.size("a b#c") == len(data)
        assert source.read("a b#c", 1000, 50_000) == data[1000:51_000]
        assert all(path == "/d/a%20b%23c?sig=abc" for _, path, _ in proxy.seen)
        assert source.exists("a b#c") and not source.exists("none")
        source.assert_unchanged()
        with pytest.raises(Corrupt, match="missing"):
            source.size("none")
    assert RemoteSource(f"{web}/d").list() == ["a b#c"]
    monkeypatch.setattr(_Ranges, "whole", True)
    with pytest.raises(RemoteError, match="ignores Range requests and sends the whole object"):
        RemoteSource(f"{web}/d").read("a b#c", 1000, 50_000)
    monkeypatch.setattr(_Ranges, "whole", False)
    monkeypatch.setattr(_Ranges, "shift", 7)  # a proxy that sends what it has
    with pytest.raises(RemoteError, match="requested bytes from 1000 on, but the server sent 'bytes 1007-51006/"):
        RemoteSource(f"{web}/d").read("a b#c", 1000, 50_000)
    with pytest.raises(Unsupported, match="for reading only"):
        ObjectUpload(f"{web}/d/new", force=True)
    with pytest.raises(Unsupported, match="conditional"):
        objects.put_if_unchanged(f"{web}/d/new", b"", None)


def test_checkpoints_over_http(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a listing, with and without the slash; a file; and a server that tells no versions."""
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "run")
    there = verification.digest(str(tmp_path / "run")).digest
    for url in (f"{web}/run", f"{web}/run/"):
        done = conversion.convert(url, tmp_path / "out", to="full", force=True)
        assert done.digest == there and not any("no version" in n for n in done.notes)
    conversion.convert(str(tmp_path / "run"), tmp_path / "a.pt")
    assert verification.digest(f"{web}/a.pt").digest == there
    monkeypatch.setattr(_Ranges, "dated", False)
    done = conversion.convert(f"{web}/run", tmp_path / "out", to="full", force=True)
    assert done.digest == there and any("no version" in n for n in done.notes)
    plans = []
    for _ in range(2):
        planned = planning.plan(f"{web}/run", "x", to="full")
        opened, draft, target = planned.opened, planned.draft, planned.target
        plans.append(planning.compute_plan_id(opened.source, draft, target, {}))
    assert plans[0] != plans[1]  # so that nothing is continued that may be of other bytes


class Plain(MemoryFileSystem):
    """A store as fsspec describes one: a file opened with autocommit=False is not there before `commit`."""

    protocol = "plain"
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("plain://").strip("/")

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        self._intrans = not autocommit
        try:
            return super()._open(path, mode)
        finally:
            self._intrans = False


def test_any_store_of_fsspec() -> None:
    fsspec.register_implementation("plain", Plain, clobber=True)
    url = "plain://t"
    up = ObjectUpload(f"{url}/a", force=False)
    up.append(b"01234")
    up.append(memoryview(b"56789"))
    source = RemoteSource(url)
    assert not source.exists("a")
    up.commit()
    assert source.exists("a") and source.list() == ["a"] and source.read("a", 3, 4) == b"3456"
    with pytest.raises(DestinationExists):
        ObjectUpload(f"{url}/a", force=False)
    up = ObjectUpload(f"{url}/a", force=True)
    up.append(b"other")
    up.abort()
    source.assert_unchanged()
    up = ObjectUpload(f"{url}/a", force=True)
    up.append(b"9876543210")
    up.commit()
    with pytest.raises(SourceChanged):
        source.assert_unchanged()
    one, two = ObjectUpload(f"{url}/b", force=False), ObjectUpload(f"{url}/b", force=False)
    one.commit()
    with pytest.raises(DestinationExists):
        two.commit()
    with pytest.raises(Unsupported, match="object locks"):
        ObjectUpload(f"{url}/c", force=False, lock=LOCKED)
    assert objects.get_with_token(f"{url}/a") == (b"9876543210", "")
    assert objects.get_with_token(f"{url}/none") == (b"", None)
    assert objects.set_legal_hold(f"{url}/a", on=True) is False
    objects.delete_object_versions(f"{url}/a")
    objects.delete_object_versions(f"{url}/a")
    assert RemoteSource(url).list() == ["b"]


class Begun(Plain):
    """A store whose upload has an address (`location`), which gcsfs asks for first; the first time in vain."""

    protocol = "begun"
    asked: ClassVar[list[str]] = []

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **how: Any) -> Any:
        return BegunFile(self, path, mode, autocommit=autocommit, cache_type="none", **how)


class BegunFile(AbstractBufferedFile):
    location = None

    def _initiate_upload(self) -> None:
        self.fs.asked.append("begin")
        if len(self.fs.asked) == 1:
            raise answer_limits.Stalled("no progress")
        self.location = "there"

    def _upload_chunk(self, final: bool = False) -> bool:
        assert self.location == "there"
        self.fs.asked.append(self.buffer.getvalue().decode())
        return True


@pytest.mark.parametrize("data", [b"0123", b"0123456789"])
def test_an_upload_that_begins_at_the_second_try(data: bytes) -> None:
    """fsspec calls the file closed when the first one fails, be it in the middle or at the end of the file."""
    fsspec.register_implementation("begun", Begun, clobber=True)
    Begun.asked.clear()
    up = upload.FileUpload("begun://t/a", force=True, block_bytes=8)
    up.append(data)
    up.flush()
    assert Begun.asked[:2] == ["begin", "begin"] and "".join(Begun.asked[2:]) == data.decode()


def test_memory_is_read_only() -> None:
    fsspec.filesystem("memory").pipe("/t/a", b"0123")
    source = RemoteSource("memory://t")
    assert source.list() == ["a"] and source.read("a", 1, 2) == b"12"
    with pytest.raises(Unsupported, match="for reading only"):
        ObjectUpload("memory://t/b", force=True)
    assert RemoteSource("memory://t").list() == ["a"]


# ----------------------------------------------------------------------------------------------------------- writing


def test_upload_in_parts(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=5 * MIB))
    data = noise(13 * MIB + 77)
    url = f"{bucket}/run/a.tar.zst"
    with Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(url, force=False)
        for at in range(0, len(data), 999_999):
            up.append(memoryview(data)[at : at + 999_999])
        assert get(s3, url) is None and unfinished(s3, url) == ["run/a.tar.zst"]
        up.commit()
        assert get(s3, url) == data and unfinished(s3, url) == []
        sizes = [
            int(h["content-length"])
            for (m, p, _), h in zip(proxy.seen, proxy.headers, strict=True)
            if m == "PUT" and "partNumber" in p
        ]
        assert sorted(sizes) == [3 * MIB + 77, 5 * MIB, 5 * MIB]
    with pytest.raises(DestinationExists, match="force=True"):
        ObjectUpload(url, force=False)
    assert unfinished(s3, url) == []
    up = ObjectUpload(url, force=True)
    up.commit()
    assert get(s3, url) == b""


@pytest.mark.parametrize(
    ("expect", "part"),
    [(0, 16 * MIB), (160_000 * MIB, 16 * MIB), (160_000 * MIB + 1, 17 * MIB), (5 << 40, 525 * MIB)],
)
def test_size_of_parts(bucket: str, expect: int, part: int) -> None:
    up = ObjectUpload(f"{bucket}/a", force=False, expect_bytes=expect)
    assert up._to.size == part and part * 10_000 >= expect
    assert up._to.size * up._to.pool.many <= max(48 * MIB, part)
    up.abort()


def test_more_than_expected(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=1 * MIB, parts=2))
    up = ObjectUpload(f"{bucket}/a", force=False)
    with pytest.raises(RemoteError, match="2 parts of 1,048,576 bytes are full"):
        up.append(bytes(3 * MIB + 1))
    up.abort()


def test_abort_leaves_nothing(s3: Moto, bucket: str) -> None:
    url = f"{bucket}/a"
    up = ObjectUpload(url, force=False)
    up.append(bytes(17 * MIB))
    up.abort()
    assert get(s3, url) is None and unfinished(s3, url) == []
    up.abort()  # twice is no error


def test_abandoned_parts_are_removed(s3: Moto, bucket: str) -> None:
    name, client = bucket[5:], s3.client()
    for key in ("a", "a", "ab"):
        upload = client.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        client.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=b"left behind")
    assert unfinished(s3, bucket) == ["a", "a", "ab"]
    up = ObjectUpload(f"{bucket}/a", force=False)
    assert unfinished(s3, bucket) == ["ab"]
    up.append(bytes(17 * MIB))
    assert sorted(unfinished(s3, bucket)) == ["a", "ab"]
    up.commit()
    assert unfinished(s3, bucket) == ["ab"] and get(s3, f"{bucket}/a") == bytes(17 * MIB)


def test_two_runs_at_one_object(s3: Moto, bucket: str) -> None:
    """In parts, the first loses them to the second; in one request, the second finds the first's."""
    one = ObjectUpload(f"{bucket}/a", force=False)
    one.append(bytes(17 * MIB))
    two = ObjectUpload(f"{bucket}/a", force=False)
    two.append(b"two")
    with pytest.raises(RemoteError, match=f"{bucket}/a"):
        one.commit()
    one.abort()
    three = ObjectUpload(f"{bucket}/a", force=False)
    three.append(b"three")
    two.commit()
    with pytest.raises(DestinationExists):
        three.commit()
    assert get(s3, f"{bucket}/a") == b"two"


def test_somebody_was_first(s3: Moto, bucket: str) -> None:
    up = ObjectUpload(f"{bucket}/a", force=False)
    up.append(b"ours")
    put(s3, f"{bucket}/a", b"theirs")
    with pytest.raises(DestinationExists):
        up.commit()
    assert get(s3, f"{bucket}/a") == b"theirs" and unfinished(s3, bucket) == []


@pytest.mark.parametrize("what", [500, 503, "drop", "lose", "cut"])
def test_writing_through_failures(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, what: int | str) -> None:
    """Each request fails once or twice, whether or not the store had done what it was asked."""
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=5 * MIB))
    data = noise(11 * MIB)
    url = f"{bucket}/a"
    times: dict[str, int] = {}

    def rule(method: str, path: str) -> int | str | None:
        path = re.sub(r"uploadId=[^&]*", "", path)
        times[method + path] = k = times.get(method + path, 0) + 1
        return what if k <= 2 and method != "HEAD" else None

    with Flaky(s3.endpoint, rule) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(url, force=False)
        up.append(data)
        up.commit()
        assert proxy.did(what) >= 6
    assert get(s3, url) == data


@pytest.mark.parametrize("then", [(412, b"PreconditionFailed"), (404, b"NoSuchUpload")])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("parts", [True, False])
def test_completed_though_nobody_heard(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, then: tuple[int, bytes], done: bool, parts: bool
) -> None:
    """The store completes the upload, its answer is lost, and asked again it says what S3 says."""
    told = (then[0], b"<Error><Code>" + then[1] + b"</Code><Message>x</Message></Error>")
    answers: list[Any] = ["lose" if done else "drop", told]

    def rule(method: str, path: str) -> Any:
        mine = method == "POST" and "uploadId" in path if parts else method == "PUT"
        return answers.pop(0) if mine and answers else None

    with Flaky(s3.endpoint, rule) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=False)
        data = bytes(16 * MIB) + b"ours" if parts else b"ours"
        up.append(data)
        if done:
            up.commit()
            assert get(s3, f"{bucket}/a") == data
        else:
            with pytest.raises(DestinationExists if then[0] == 412 else RemoteError):
                up.commit()
            assert get(s3, f"{bucket}/a") is None
        assert answers == []


def test_parts_that_never_get_through(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Flaky(s3.endpoint, first(1000, 500, "PUT")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=False)
        with pytest.raises(RemoteError, match="no answer in 5 tries"):
            up.append(bytes(16 * MIB))
            up.commit()
        up.abort()
    assert get(s3, f"{bucket}/a") is None and unfinished(s3, bucket) == []


def test_a_bucket_is_no_object(bucket: str) -> None:
    with pytest.raises(UsageError, match="names a bucket"):
        ObjectUpload(bucket, force=True)


# ----------------------------------------------------------------------------------------------------- locks, deletion


def test_lock_is_asked_for(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 wants it, with the upload's creation; moto itself forgets it on multipart uploads."""
    bucket = s3.bucket(monkeypatch, lock=True)
    with Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=False, lock=LOCKED)
        assert up.locked
        sent = [h for (m, p, _), h in zip(proxy.seen, proxy.headers, strict=True) if m == "POST" and "uploads" in p]
        up.abort()
    assert len(sent) == 1
    assert sent[0]["x-amz-object-lock-mode"] == "GOVERNANCE"
    assert sent[0]["x-amz-object-lock-retain-until-date"].startswith("2044-01-01T00:00:00")
    assert sent[0]["x-amz-object-lock-legal-hold"] == "ON"


def test_bucket_without_lock(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = b"<Error><Code>InvalidRequest</Code><Message>Bucket is missing Object Lock Configuration</Message></Error>"
    with Flaky(s3.endpoint, first(1, (400, told), "POST")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=False, lock=LOCKED)
        assert up.locked is False
        assert "x-amz-object-lock-mode" not in proxy.headers[-1]
        up.append(b"x")
        up.commit()
    assert get(s3, f"{bucket}/a") == b"x"
    with Flaky(s3.endpoint, first(1, (400, told.replace(b"Object Lock", b"Something")), "POST")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match="Something"):
            ObjectUpload(f"{bucket}/b", force=False, lock={k: v for k, v in LOCKED.items() if "Mode" in k})


@pytest.mark.parametrize("mode", ["retention", "hold"])
def test_lock_refuses_deletion(s3: Moto, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    bucket = s3.bucket(monkeypatch, lock=True)
    url, client = f"{bucket}/a", s3.client()
    put(s3, url, b"kept")
    if mode == "hold":
        assert objects.set_legal_hold(url, on=True) is True
    else:
        client.put_object_retention(
            Bucket=bucket[5:],
            Key="a",
            Retention={"Mode": "GOVERNANCE", "RetainUntilDate": datetime(2044, 1, 1, tzinfo=UTC)},
        )
    with pytest.raises(RemoteError, match="AccessDenied") as e:
        objects.delete_object_versions(url)
    assert e.value.exit_code == 9 and url in str(e.value)
    assert get(s3, url) == b"kept"  # and no mark hides it
    if mode == "hold":
        assert objects.set_legal_hold(url, on=False) is True
        objects.delete_object_versions(url)
        assert get(s3, url) is None


def test_removes_every_version(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3.bucket(monkeypatch, lock=True)
    client, name = s3.client(), bucket[5:]
    for k in range(3):
        put(s3, f"{bucket}/a", b"%d" % k)
    put(s3, f"{bucket}/ab", b"other")
    objects.delete_object_versions(f"{bucket}/a")
    left = client.list_object_versions(Bucket=name)
    assert [v["Key"] for v in left.get("Versions", [])] == ["ab"] and not left.get("DeleteMarkers")


def test_a_locked_older_version_keeps_the_newer(s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3.bucket(monkeypatch, lock=True)
    put(s3, f"{bucket}/a", b"old", ObjectLockLegalHoldStatus="ON")
    put(s3, f"{bucket}/a", b"new")
    with pytest.raises(RemoteError, match="AccessDenied"):
        objects.delete_object_versions(f"{bucket}/a")
    assert get(s3, f"{bucket}/a") == b"new"


def test_hold_where_there_are_none(s3: Moto, bucket: str) -> None:
    put(s3, f"{bucket}/a", b"x")
    assert objects.set_legal_hold(f"{bucket}/a", on=True) is False


def test_remove(s3: Moto, bucket: str) -> None:
    put(s3, f"{bucket}/a", b"x")
    put(s3, f"{bucket}/ab", b"x")
    objects.delete_object_versions(f"{bucket}/a")
    objects.delete_object_versions(f"{bucket}/a")
    assert get(s3, f"{bucket}/a") is None and get(s3, f"{bucket}/ab") == b"x"


# --------------------------------------------------------------------------------------------------------------- swaps


def test_swap(s3: Moto, bucket: str) -> None:
    url = f"{bucket}/l"
    assert objects.get_with_token(url) == (b"", None)
    assert objects.put_if_unchanged(url, b"1", None) is True
    assert objects.put_if_unchanged(url, b"2", None) is False
    data, token = objects.get_with_token(url)
    assert data == b"1" and token
    assert objects.put_if_unchanged(url, b"12", token) is True
    assert objects.put_if_unchanged(url, b"13", token) is False
    assert get(s3, url) == b"12"
    _, token = objects.get_with_token(url)
    objects.delete_object_versions(url)
    assert objects.put_if_unchanged(url, b"14", token) is False
    assert get(s3, url) is None


def test_swap_in_threads(bucket: str) -> None:
    """Of writers that saw the same object, one gets through."""
    url = f"{bucket}/l"
    objects.put_if_unchanged(url, b"0", None)
    _, token = objects.get_with_token(url)
    won: list[int] = []

    def write(k: int) -> None:
        if objects.put_if_unchanged(url, b"%d" % k, token):
            won.append(k)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(1, 9)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(won) == 1 and objects.get_with_token(url)[0] == b"%d" % won[0]


def test_a_large_object_is_read_in_ranges(
    s3: Moto, bucket: str, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a listing has 2 MiB at most, a ledger 256."""
    data = noise(17 * MIB)
    put(s3, f"{bucket}/l", data)
    with Flaky(s3.endpoint, first(1, "cut", "GET")) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        found, token = objects.get_with_token(f"{bucket}/l")
        assert found == data
        asked = [h["range"] for (method, _, what), h in zip(proxy.seen, proxy.headers, strict=True) if method == "GET"]
        assert asked == [f"bytes={k * 8 * MIB}-{(k + 1) * 8 * MIB - 1}" for k in (0, 0, 1, 2)]
        assert objects.put_if_unchanged(f"{bucket}/l", b"", token)
        found, token = objects.get_with_token(f"{bucket}/l")
        assert found == b"" and objects.put_if_unchanged(f"{bucket}/l", b"1", token)
    (tmp_path / "l").write_bytes(data)
    assert objects.get_with_token(f"{web}/l") == (data, "") and objects.get_with_token(f"{web}/k") == (b"", None)
    monkeypatch.setattr(objects, "MOST_LEDGER_BYTES", 17 * MIB - 1)
    put(s3, f"{bucket}/l", data)
    with Flaky(s3.endpoint, lambda method, path: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(Unsafe, match=r"has 17,825,792 bytes.*more than 17,825,791 are refused"):
            objects.get_with_token(f"{bucket}/l")
        assert [method for method, _, _ in proxy.seen] == ["GET"], "no more than the first range"
    with pytest.raises(Unsafe, match="are refused"):
        objects.get_with_token(f"{web}/l")


@pytest.mark.parametrize("conditions", [True, False])
def test_an_object_that_changes_while_it_is_read(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, conditions: bool
) -> None:
    """The token is that of all bytes, also in a store that ignores conditions of reads."""
    monkeypatch.setattr(objects, "_PIECE_BYTES", 10)
    url, new = f"{bucket}/l", iter([b"2" * 25, b"3" * 5, b"", b"4" * 25])
    put(s3, url, b"1" * 25)
    read = objects.S3Object.read_range

    def replaced(at: objects.S3Object, start: int, n: int, token: str | None = None) -> Any:
        if start == 10 and (data := next(new, None)) is not None:
            put(s3, url, data)
        return read(at, start, n, token if conditions else None)

    monkeypatch.setattr(objects.S3Object, "read_range", replaced)
    found, token = objects.get_with_token(url)
    assert found == b"3" * 5 and objects.put_if_unchanged(url, b"5" * 30, token)
    found, token = objects.get_with_token(url)
    assert found == b"" and objects.put_if_unchanged(url, b"6" * 25, token)
    monkeypatch.setattr(objects, "_READS", 3)
    new = (b"%d" % k * 25 for k in range(7, 20))
    with pytest.raises(RemoteError, match="each of the 3 times"):
        objects.get_with_token(url)
    new = iter([])
    found, token = objects.get_with_token(url)
    assert found == get(s3, url) and objects.put_if_unchanged(url, b"", token)


def test_a_store_that_says_that_an_object_has_no_first_byte(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/l"
    put(s3, url, b"1" * 25)
    with Flaky(s3.endpoint, lambda method, path: 416 if method == "GET" else None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match="says that it has 25 bytes, and that it has no first one") as e:
            objects.get_with_token(url)
        assert e.value.code == "CKPT0906" and len(proxy.seen) == 4
    new = iter([b"2" * 26, b"3" * 27])

    def replaced(method: str, path: str) -> int | None:
        """It was empty, and somebody wrote it before we asked again; twice."""
        if method == "GET" and (data := next(new, None)) is not None:
            put(s3, url, data)
            return 416
        return None

    with Flaky(s3.endpoint, replaced) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        assert objects.get_with_token(url)[0] == b"3" * 27


PAGE = b"<!DOCTYPE html><html><body>Bad gateway</body></html>"


@pytest.mark.parametrize(
    "rest", [(PAGE,), (gzip.compress(bytes(1 << 20)), {"Content-Encoding": "gzip"}), (b"x", {"Content-Encoding": "br, gzip"})]
)  # fmt: skip
def test_an_error_of_a_proxy_is_told_by_its_status(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, rest: tuple[Any, ...]
) -> None:
    """A page with a DTD, or an encoded one, comes instead of XML of S3."""
    put(s3, f"{bucket}/d/l", b"1")
    answers = iter([(502, *rest), None] * 2)
    with Flaky(s3.endpoint, lambda method, path: next(answers, None)) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        assert RemoteSource(f"{bucket}/d").list() == ["l"] and objects.get_with_token(f"{bucket}/d/l")[0] == b"1"
        assert proxy.did((502, *rest)) == 2
    with Flaky(s3.endpoint, lambda method, path: (404, *rest)) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        assert objects.get_with_token(f"{bucket}/d/l") == (b"", None)


# ------------------------------------------------------------------------------------------- stores that lie when written to


def completes_otherwise(s3: Moto, url: str, parts: slice) -> Any:
    """A rule: the store completes an upload with some of its parts, and says that all is well."""
    name, _, key = url.removeprefix("s3://").partition("/")

    def rule(method: str, path: str) -> Any:
        found = re.search(r"[?&]uploadId=([^&]+)", path)
        if method != "POST" or not found:
            return None
        client = s3.client()
        listed = client.list_parts(Bucket=name, Key=key, UploadId=found[1])["Parts"][parts]
        client.complete_multipart_upload(
            Bucket=name, Key=key, UploadId=found[1],
            MultipartUpload={"Parts": [{k: p[k] for k in ("PartNumber", "ETag")} for p in listed]},
        )  # fmt: skip
        return 200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"

    return rule


@pytest.mark.parametrize("parts", [slice(0, -1), slice(1, None)])
def test_an_upload_that_the_store_completes_without_a_part(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, parts: slice
) -> None:
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=5 * MIB))
    url = f"{bucket}/a"
    with Flaky(s3.endpoint, completes_otherwise(s3, url, parts)) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(url, force=False)
        up.append(noise(13 * MIB))
        with pytest.raises(RemoteError, match=rf"{url}: the store made it of [\d,]+ bytes, not of the 13,631,488 that"):
            up.commit()
    assert get(s3, url) is None  # and half of it stays nowhere


@pytest.mark.parametrize(
    "said",
    [
        b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
        b"   \n  <?xml version='1.0'?><Error><Code>SlowDown</Code></Error>", b"<Error/>", b"", b"not xml",
    ],
)  # fmt: skip
def test_a_completion_that_is_an_error_with_status_200(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """Once: it is asked again. Always: it is an error, and nothing is there."""
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=5 * MIB))
    data = noise(6 * MIB)
    for times in (1, 1000):
        with Flaky(s3.endpoint, lambda m, p, left=[times]: left.append(left.pop() - 1) or (200, said) if m == "POST" and "uploadId=" in p and left[0] > 0 else None) as proxy:  # fmt: skip
            s3.environment(monkeypatch, proxy.endpoint)
            up = ObjectUpload(f"{bucket}/{times}", force=False)
            up.append(data)
            try:
                up.commit()
                assert get(s3, f"{bucket}/{times}") == data
            except RemoteError as e:
                assert get(s3, f"{bucket}/{times}") is None and f"{bucket}/{times}" in str(e)
            assert proxy.did((200, said)) >= 1
    assert get(s3, f"{bucket}/1000") is None


@pytest.mark.parametrize(
    ("method", "part_of_path"), [("POST", "uploads"), ("PUT", "partNumber"), ("GET", "uploads"), ("HEAD", "/a")]
)
def test_answers_without_what_they_are_asked_for(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, method: str, part_of_path: str
) -> None:
    """Status 200 and nothing else."""
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=5 * MIB))
    rule = lambda m, p: (200, b"") if m == method and part_of_path in p else None  # noqa: E731
    with Flaky(s3.endpoint, rule) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        try:
            up = ObjectUpload(f"{bucket}/a", force=True)
            up.append(noise(6 * MIB))
            up.commit()
        except CkpttoolError as e:
            assert f"{bucket}/a" in str(e)
            assert get(s3, f"{bucket}/a") in (None, noise(6 * MIB))
        else:
            assert get(s3, f"{bucket}/a") == noise(6 * MIB)


def test_a_listing_of_parts_without_an_end(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>a</NextKeyMarker>"
        b"<NextUploadIdMarker>b</NextUploadIdMarker></ListMultipartUploadsResult>"
    )
    with Flaky(s3.endpoint, lambda m, p: (200, told) if m == "GET" and "uploads" in p else None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        at = objects.s3_object(f"{bucket}/a")
        assert at is not None and at.list_unfinished_uploads("a", lambda _: True) == []
        assert len(proxy.seen) == 2


UPLOADS = "<ListMultipartUploadsResult>{}</ListMultipartUploadsResult>"
MORE = "<IsTruncated>true</IsTruncated><NextKeyMarker>{0}</NextKeyMarker><NextUploadIdMarker>{0}</NextUploadIdMarker>"


@pytest.mark.parametrize(
    ("page", "asked"),
    [
        (lambda n: "<Upload><Key>a</Key></Upload>", 1), (lambda n: "<Upload><UploadId>7</UploadId></Upload>", 1),
        (lambda n: MORE.format(n) + f"<Upload><Key>a</Key><UploadId>{n}</UploadId></Upload>" * 40, 3),
    ],
)  # fmt: skip
def test_uploads_without_a_name_or_without_an_end_are_left_alone(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, page: Any, asked: int
) -> None:
    monkeypatch.setattr(listings, "LIMITS", answer_limits.Limits(names=100))
    with Flaky(s3.endpoint, lambda m, p: (200, UPLOADS.format(page(len(proxy.seen))).encode())) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        at = objects.s3_object(f"{bucket}/a")
        assert at is not None and at.list_unfinished_uploads("a", lambda _: True) == []
        assert len(proxy.seen) == asked


@pytest.mark.parametrize("lost", ["Key", "VersionId", "LastModified"])
def test_versions_without_what_they_are_removed_by(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    row = {"Key": "a", "VersionId": "7", "LastModified": "2026-01-01T00:00:00.000Z"}
    said = "".join(f"<{k}>{v}</{k}>" for k, v in row.items() if k != lost)
    told = f"<ListVersionsResult><Version>{said}</Version></ListVersionsResult>".encode()
    with Flaky(s3.endpoint, lambda m, p: (200, told)) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        at = objects.s3_object(f"{bucket}/a")
        assert at is not None
        with pytest.raises(RemoteError, match=f"{bucket}/a: the store answers without {lost}") as e:
            objects._list_versions(at)
        assert e.value.code == "CKPT0906"


def test_a_store_may_take_its_time_after_an_upload(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 300 seconds, while s3fs gives up after 15."""
    from s3fs import S3FileSystem

    monkeypatch.setattr(S3FileSystem, "read_timeout", 0.2)
    with Flaky(s3.endpoint, lambda m, p: time.sleep(0.5) if m == "PUT" else None) as proxy:  # type: ignore[func-returns-value]
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=True)
        up.append(b"x")
        up.commit()
        assert [m for m, _, _ in proxy.seen].count("PUT") == 1


@pytest.mark.parametrize("reads", [True, False])
def test_a_store_that_takes_no_part(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """It takes all of it and says nothing, or stops to take it."""
    monkeypatch.setattr(answer_limits, "LIMITS", answer_limits.Limits(write_seconds=0.5))
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=20 * MIB))
    rule: Any = lambda m, p: time.sleep(3) if m == "PUT" else None  # noqa: E731
    with Flaky(s3.endpoint, rule) as proxy:
        if not reads:
            monkeypatch.setattr(
                stores, "body_of", lambda request: time.sleep(3) or b"" if request.command == "PUT" else b""
            )
        s3.environment(monkeypatch, proxy.endpoint)
        up = ObjectUpload(f"{bucket}/a", force=True)
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"makes no progress: in 0\.5 seconds"):
            up.append(bytes(21 * MIB))
            up.commit()
        assert time.monotonic() - began < 9


def test_folders_of_a_bucket_share_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fs = filesystem_for("s3://bucket")[0]
    fs.connect()  # botocore adds to a dict in the arguments of the client that it makes
    assert filesystem_for("s3://bucket/folder")[0] is fs
