"""A sample of the lies of lying_servers.py: a right result or an error, soon, and with little memory. `make torture` tells them all."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from lying_servers import GCS_SHAPES, LIES, Liar, Told, child, head, idle, judged, ran, whole

from ckpttool.errors import RemoteError, Unsafe
from ckpttool.storage import answer_limits, remote, retries
from ckpttool.storage.aiohttp_limits import session_settings
from ckpttool.storage.answer_limits import RequestBudget, check_redirect, watch_upload, within_budget
from ckpttool.storage.listings import list_entries, list_tree

SAMPLE = [
    ("web", "gzip_bomb"), ("web", "slow_body"), ("web", "endless_listing"), ("s3", "endless_range"), ("s3", "same_token"), ("s3", "name_climbs"),
    ("s3", "redirects_elsewhere"), ("hub", "endless_whole"), ("hub", "continues_for_ever"), ("hub", "links_for_ever"), ("hub", "name_climbs"),
    ("hub", "come_back_next_year"), ("s3", "huge_tokens"), ("s3", "deep_xml"), ("hub", "error_packed_twice"),
]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lies")


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_lie_is_an_error_or_makes_no_difference(kind: str, name: str, work: Path) -> None:
    pytest.importorskip({"web": "aiohttp", "s3": "s3fs", "hub": "huggingface_hub"}[kind])
    with Liar(kind, name) as liar:
        done = ran(liar, work)
        assert liar.told and judged(liar, done, idle(kind, work).most_bytes) == [], done.text


@pytest.mark.parametrize("kind", ["web", "s3", "hub"])
def test_an_error_comes_in_time_with_the_usual_limits(kind: str, work: Path) -> None:
    """A server that stalls once is asked again, so the longest wait is that of two periods."""
    from ckpttool.storage.answer_limits import LIMITS

    assert LIMITS.stalls * LIMITS.stall_seconds <= 30 and LIMITS.question_seconds <= 60
    with Liar(kind, "silence") as liar:
        done = ran(liar, work, {"stall_seconds": 1.0})
        assert done.code == 9 and "makes no progress: in 1 seconds" in done.text
        assert liar.told == LIMITS.stalls


def test_a_name_of_a_listing_that_is_not_used_is_refused_too(work: Path) -> None:
    with Liar("s3", "name_twice") as liar:
        done = child(["inspect", "s3://b/d"], liar.environment(work), work / "out")
    assert done.code == 9 and "lists 'model.safetensors' twice" in done.text


def test_there_are_more_than_forty() -> None:
    assert all(len(LIES[kind]) >= 50 for kind in ("web", "s3", "gcs", "hub"))


@pytest.mark.parametrize(
    ("method", "at", "location", "result"),
    [
        ("GET", "https://h/a", "/b", True), ("GET", "https://h/a", "https://h:443/b", True), ("GET", "http://h:80/a", "http://h/b", True), ("PUT", "https://h/a", "https://h:444/b", None), ("GET", "https://h/a", "https://other/b", False),
        ("GET", "http://h/a", "https://h/a", False), ("PUT", "https://h/a", "https://h/b", True), ("GET", "https://h/a", "http://h/a", None),
        ("GET", "https://h/a", "ftp://h/a", None), ("GET", "http://h/a", "file:///etc/passwd", None), ("PUT", "https://h/a", "https://other/b", None),
        ("GET", "https://h/a", "http://[", None),
    ],
)  # fmt: skip
def test_where_a_redirect_may_lead(method: str, at: str, location: str, result: bool | None) -> None:
    if result is not None:
        assert check_redirect(method, at, location) is result
        return
    with pytest.raises(Unsafe):
        check_redirect(method, at, location)


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (403, {"Content-Encoding": "gzip, gzip"}, None), (302, {"Content-Encoding": "zstd"}, None),
        (200, {"Content-Encoding": "gzip, gzip"}, "content encoding 'gzip, gzip', which was not asked for"),
        (429, {"Retry-After": "0" * 20 + "31536000"}, "wants us to wait 31,536,000 seconds"),
        (503, {"RateLimit": f'"api";r=0;t={"0" * 20}31536000'}, "wants us to wait 31,536,000 seconds"),
        (429, {"Retry-After": "9" * 5000}, "wants us to wait 999,999,999,999 seconds"), (429, {"Retry-After": "000"}, None),
    ],
)  # fmt: skip
def test_the_header_of_an_error(status: int, headers: dict[str, str], words: str | None) -> None:
    def limit() -> int:
        return RequestBudget("hf://org/name").body_limit("GET", "https://h/a", "", status, headers)

    if words is None:
        assert limit() == 64 << 10
        return
    with pytest.raises(RemoteError, match=words):
        limit()


@pytest.mark.parametrize("url", ["s3://b/d", "az://c/d", "abfss://c/d"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xml_with_a_dtd_is_refused_and_other_xml_is_not(url: str, encoding: str) -> None:
    """Entities make hundreds of megabytes of less than a kilobyte."""
    head, list_ = f'<?xml version="1.0" encoding="{encoding}"?>', "<ListBucketResult><Name>b</Name></ListBucketResult>"
    RequestBudget(url).check_body((head + list_).encode(encoding))
    for dtd in ('<!DOCTYPE x [<!ENTITY a "<b/>">]>', '<!DOCTYPE x SYSTEM "file:///etc/passwd">', "<!DOCTYPE x>"):
        with pytest.raises(RemoteError, match="has XML with a DTD, which no store sends") as e:
            RequestBudget(url).check_body((head + dtd + list_).encode(encoding))
        assert e.value.code == "CKPT0906"


def test_the_body_of_an_error_is_no_bomb() -> None:
    """What would be refused of another answer is not handed on; the status says what the error is."""
    budget = RequestBudget("s3://b/d")
    for body in (b"<!DOCTYPE html><html></html>", b"<a>" * 1000, b"[" * 1000):
        assert budget.filter_error_body(body, False) == b""
    assert budget.filter_error_body(b"<Error/>", False) == b"<Error/>" and budget.filter_error_body(b"x", True) == b""


@pytest.mark.parametrize("kind", ["web", "gcs"])
def test_an_error_with_an_encoding_is_told_by_its_status(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(b"x" * (1 << 20))
    told = Told(lambda q: whole(404 if q.number else 503, packed, {"Content-Encoding": "gzip"}), "any")
    monkeypatch.setitem(LIES[kind], "packed", told)
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    with Liar(kind, "packed") as liar:
        if kind == "web":
            assert not remote.RemoteSource(liar.url).exists("model.safetensors") and liar.told == 2
            return
        with within_budget(RequestBudget("gs://b/d")):  # as gcsfs does
            assert asyncio.run(send(liar.endpoint, b"")) == b""


@pytest.mark.parametrize("page", GCS_SHAPES, ids=lambda page: str(page)[:40])
def test_a_listing_of_another_shape(page: Any) -> None:
    class Store:
        """As much of gcsfs as a listing needs."""

        protocol = ("gs", "gcs")

        def call(self, *_: object, **__: object) -> Any:
            return page

    for listed in (
        lambda: list_entries(Store(), "b/d", "", "gs://b/d"),
        lambda: list(list_tree(Store(), "b/d", "gs://b/d")),
    ):
        with pytest.raises(RemoteError, match="gs://b/d: the store answers with something that is no listing") as e:
            listed()
        assert e.value.code == "CKPT0906"


def test_the_encoding_of_a_page_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's decoders of some, such as punycode, take hours for a long page."""
    page, kind = b'<a href="model.safetensors">', {"Content-Type": "text/html; charset=punycode"}
    monkeypatch.setitem(LIES["web"], "short_page", Told(lambda q: whole(200, page, kind), "list"))
    with Liar("web", "short_page") as liar:
        assert remote.RemoteSource(liar.url).list() == ["model.safetensors"]


async def send(url: str, data: bytes) -> bytes:
    """Send bytes as gcsfs does; no longer than five seconds."""
    async with (
        asyncio.timeout(5),
        aiohttp.ClientSession(**session_settings()) as session,
        session.post(url, data=memoryview(data)) as answer,
    ):
        return await answer.read()


def test_a_server_that_takes_an_upload_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_limits, "LIMITS", answer_limits.Limits(write_seconds=0.3))
    with (
        Liar("gcs", "silence") as liar,
        within_budget(RequestBudget("gs://b/d", writes=True)),
        pytest.raises(answer_limits.Stalled, match=r"gs://b/d: the server makes no progress: in 0\.3 seconds"),
    ):
        asyncio.run(send(f"{liar.endpoint}/upload", b"x"))


def test_a_server_that_takes_an_upload_on_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp has no transport then."""
    monkeypatch.setattr(aiohttp.connector.Connection, "transport", None)
    monkeypatch.setitem(LIES["gcs"], "done", Told(lambda q: whole(200, b"ok"), "any"))
    with Liar("gcs", "done") as liar, within_budget(RequestBudget("gs://b/d", writes=True)):
        assert asyncio.run(send(f"{liar.endpoint}/upload", b"x")) == b"ok"


def test_an_upload_ends_with_the_call_that_waits_for_it() -> None:
    ended: list[str] = []

    async def request() -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def call() -> None:
        waiting = asyncio.create_task(watch_upload(request(), None, RequestBudget("gs://b/d", writes=True)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.01)
        assert ended == ["cancelled"]

    asyncio.run(call())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_slow_upload_goes_on_while_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_limits, "LIMITS", answer_limits.Limits(write_seconds=0.4))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

        def serve() -> None:
            at, _ = server.accept()
            with at:
                got = 0
                while got < 16 << 20 and (data := at.recv(1 << 20, socket.MSG_WAITALL)):
                    got += len(data)
                    time.sleep(0.05)
                at.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")
                at.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with within_budget(RequestBudget("gs://b/d", writes=True)):
            assert asyncio.run(send(f"http://127.0.0.1:{server.getsockname()[1]}/upload", bytes(16 << 20))) == b"ok"
        assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_upload_goes_to_no_other_server(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs sends the bytes, and the credentials, to where the first answer says."""
    begins = Told(lambda q: iter([head(200, {"Location": q.query["to"]}, 0)]), "any")
    monkeypatch.setitem(LIES["gcs"], "begins_an_upload", begins)
    with Liar("gcs", "begins_an_upload") as liar, within_budget(RequestBudget("gs://b/d", writes=True)):
        url = f"{liar.endpoint}/upload?to={liar.other if elsewhere else liar.endpoint}"
        if not elsewhere:
            assert asyncio.run(send(url, b"")) == b""
            return
        with pytest.raises(Unsafe, match="wants what is sent to it to be sent to 127") as e:
            asyncio.run(send(url, b""))
        assert e.value.code == "CKPT0706"


def test_an_etag_may_have_any_characters() -> None:
    assert remote._hash64("") == remote._NO_VERSION and remote._hash64("\ud800") != remote._hash64("\ud801")
