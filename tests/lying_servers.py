"""Servers that lie, on loopback: a web server, a store of S3, a store of Google's and a Hub, each with one small checkpoint.

    with Liar("web", "gzip_bomb", after=2) as liar:
        done = ran(liar, tmp_path)            the command of that kind of server, in a process of its own
        problems = judged(liar, done)         [] if it behaved

Requests before number `after` of those that a lie is about are answered honestly. A lie is a function from a request to what is
sent, byte for byte: pieces of bytes, and numbers, which are seconds to wait. `LIES` are those of each kind of server.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

Piece = bytes | float
KEY_ID, SECRET, TOKEN, PASSWORD = (
    "AKIATESTTESTTEST1234",
    "hunter2/Secret/Access/Key/0123456789abcdef",
    "hf_LiarLiarLiarLiarLiarLiar012345",
    "PASSW0RDx",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: What a child runs with: limits that end soon, and the program.
_CHILD = """
import atexit, os, sys

def note():
    with open("/proc/self/status") as status, open({peak!r}, "w") as peak:
        peak.write(next(line for line in status if line.startswith("VmHWM")).split()[1])

atexit.register(note)
from ckpttool.storage import answer_limits, retries
for name, value in {limits!r}.items():
    object.__setattr__(answer_limits.LIMITS, name, value)
retries.POLICY = retries.RetryPolicy(first_wait_seconds=0.01)
from ckpttool.hub import client
client._WAIT = 0.01
from ckpttool.cli.main import main
sys.argv[0] = "ckpttool"
main()
"""
SHORT = {"stall_seconds": 0.7, "write_seconds": 1.5, "question_seconds": 3.0}
#: Seconds in which a command ends: two stalls of each of two questions, what huggingface_hub waits between its own tries, and the start of Python
#: on a machine with other work.
DEADLINE = 30.0
MOST_BYTES = 200 << 20


class Request(NamedTuple):
    method: str
    path: str  # without the query, unquoted
    query: dict[str, str]
    headers: dict[str, str]  # keys in lower case
    body: bytes
    number: int  # of those that the lie is about
    liar: Liar

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last byte that are asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2])) if found else None


Lie = Callable[[Request], Iterator[Piece]]


@dataclass
class Told:
    """A lie; `about` says which requests it is told to, `right` whether a right result is one that it may have."""

    lie: Lie
    about: str
    right: bool = False


LIES: dict[str, dict[str, Told]] = {"web": {}, "s3": {}, "gcs": {}, "hub": {}}


def lie(*kinds: str, about: str = "range", right: bool = False) -> Callable[[Lie], Lie]:
    """Register a lie for kinds of servers."""

    def register(what: Lie) -> Lie:
        for kind in kinds:
            LIES[kind][what.__name__] = Told(what, about, right)
        return what

    return register


STORES = ("web", "s3", "gcs", "hub")


@cache
def checkpoint() -> bytes:
    """model.safetensors: four tensors of 40 kB."""
    header, data = {}, bytearray()
    for k in range(4):
        part = hashlib.shake_128(b"%d" % k).digest(40_000)
        header[f"l{k}.weight"] = {
            "dtype": "U8",
            "shape": [100, 400],
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def head(status: int, headers: dict[str, Any] | None = None, length: int | None = None) -> bytes:
    """The beginning of an answer."""
    lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def whole(status: int, body: bytes, headers: dict[str, Any] | None = None) -> Iterator[Piece]:
    """An answer."""
    yield head(status, headers, len(body)) + body


# ------------------------------------------------------------------------------------------------------ honest answers

ETAG = {"ETag": f'"{hashlib.md5(checkpoint()).hexdigest()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


def part(q: Request, data: bytes | None = None, shift: int = 0) -> tuple[bytes, dict[str, Any]]:
    """(bytes, headers) of the range that is asked for."""
    data = checkpoint() if data is None else data
    assert q.range
    a, z = q.range[0] + shift, min(q.range[1] + shift, len(data) - 1)
    return data[a : z + 1], {**ETAG, "Content-Range": f"bytes {a}-{z}/{len(data)}", "X-Repo-Commit": COMMIT}


def object_answer(q: Request) -> Iterator[Piece]:
    """The checkpoint, or a range of it."""
    if q.range:
        body, headers = part(q)
        return whole(206, body, headers)
    return iter(
        [
            head(200, {**ETAG, "Accept-Ranges": "bytes", "X-Repo-Commit": COMMIT}, len(checkpoint())),
            b"" if q.method == "HEAD" else checkpoint(),
        ]
    )


def page_of_s3(
    q: Request, names: list[str], more: str = "<IsTruncated>false</IsTruncated>", size: Any = None
) -> Iterator[Piece]:
    """A listing."""
    rows = "".join(
        f"<Contents><Key>{n}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{ETAG['ETag']}</ETag><Size>{len(checkpoint()) if size is None else size}</Size></Contents>"
        for n in names
    )
    text = f'<?xml version="1.0"?><ListBucketResult><Name>b</Name>{more}{rows}</ListBucketResult>'
    return whole(200, text.encode("utf-8", "surrogatepass"), {"Content-Type": "application/xml"})


def page_of_gcs(names: list[str], size: Any = None, **more: Any) -> Iterator[Piece]:
    """A listing."""
    items = [
        {
            "name": n,
            "bucket": "b",
            "size": str(len(checkpoint())) if size is None else size,
            "etag": "e",
            "generation": "1",
        }
        for n in names
    ]
    return whole(
        200,
        json.dumps({"kind": "storage#objects", "items": items, **more}).encode(),
        {"Content-Type": "application/json"},
    )


def page_of_hub(names: list[Any], headers: dict[str, str] | None = None, **other: Any) -> Iterator[Piece]:
    """A listing."""
    sha = hashlib.sha256(checkpoint()).hexdigest()
    row = {
        "type": "file",
        "size": len(checkpoint()),
        "oid": "1" * 40,
        "lfs": {"oid": sha, "size": len(checkpoint()), "pointerSize": 134},
    }
    rows = [{**row, "path": n, **other} for n in names]
    return whole(200, json.dumps(rows).encode(), {"Content-Type": "application/json", **(headers or {})})


def kind_of(q: Request) -> str:
    """What a request asks for: "list", "range", "info" (metadata of an object or a repository), or "other"."""
    kind, path = q.liar.kind, q.path
    if q.range:
        return "range"
    if kind == "web":
        return "info" if path.endswith(".safetensors") else "list" if path.rstrip("/") == "/d" else "other"
    if kind == "s3":
        return "list" if "list-type" in q.query else "info"
    if kind == "gcs":
        return "list" if path.endswith("/o") else "info"
    if "/tree/" in path:
        return "list"
    return "info"


def honest(q: Request) -> Iterator[Piece]:
    """What a server of that kind answers."""
    kind, path, name = q.liar.kind, q.path, "model.safetensors"
    about = kind_of(q)
    if about == "range":
        return object_answer(q)
    if kind == "web":
        if path.endswith("/d/" + name):
            return object_answer(q)
        if path.rstrip("/") == "/d":
            return whole(
                200, f'<a href="../">up</a><a href="{name}">{name}</a>'.encode(), {"Content-Type": "text/html"}
            )
    if kind == "s3":
        if about == "list":
            found = [n for n in [f"d/{name}"] if n.startswith(q.query.get("prefix", "")) and q.query.get("prefix") != n]
            return page_of_s3(q, found)
        if path.endswith("/d/" + name):
            return object_answer(q)
    if kind == "gcs":
        if about == "list":
            prefix = q.query.get("prefix", "")
            return page_of_gcs([n for n in [f"d/{name}"] if n.startswith(prefix) and n != prefix])
        if path.endswith("/d/" + name):
            row = {"name": f"d/{name}", "bucket": "b", "size": str(len(checkpoint())), "etag": "e", "generation": "1"}
            return (
                whole(200, json.dumps(row).encode(), {"Content-Type": "application/json"})
                if q.query.get("alt") != "media"
                else object_answer(q)
            )
    if kind == "hub":
        if about == "list":
            return page_of_hub([name])
        if "/paths-info/" in path:
            asked = parse_qs(q.body.decode()).get("paths", [])
            return page_of_hub([p for p in asked if p == name])
        if "/resolve/" in path and path.endswith(name):
            return object_answer(q)
        if re.search(r"/api/models/org/name(/revision/[^/]+)?$", path):
            return whole(
                200,
                json.dumps(
                    {
                        "id": "org/name",
                        "modelId": "org/name",
                        "sha": COMMIT,
                        "private": True,
                        "tags": [],
                        "siblings": [{"rfilename": name}],
                    }
                ).encode(),
                {"Content-Type": "application/json"},
            )
    return whole(404, b"", {"X-Error-Code": "EntryNotFound"} if kind == "hub" else {})


# --------------------------------------------------------------------------------------------------------------- lies


def endlessly(piece: bytes, wait: float = 0.0) -> Iterator[Piece]:
    """The same for ever."""
    while True:
        yield piece
        if wait:
            yield wait


@lie(*STORES)
def gzip_bomb(q: Request) -> Iterator[Piece]:
    body = _bomb()
    yield head(206, {**part(q)[1], "Content-Encoding": "gzip"}, len(body)) + body


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(1500)), packer.flush()])


@lie(*STORES)
def encoded(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    packed = gzip.compress(body)
    yield head(206, {**headers, "Content-Encoding": "gzip"}, len(packed)) + packed


@lie(*STORES)
def endless_range(q: Request) -> Iterator[Piece]:
    yield head(206, {**part(q)[1], "Connection": "close"})
    yield from endlessly(bytes(1 << 20))


@lie(*STORES)
def endless_chunks(q: Request) -> Iterator[Piece]:
    yield head(206, {**part(q)[1], "Transfer-Encoding": "chunked"})
    yield from endlessly(b"100000\r\n" + bytes(1 << 20) + b"\r\n")


@lie(*STORES)
def endless_whole(q: Request) -> Iterator[Piece]:
    yield head(200, {**ETAG, "Connection": "close"})
    yield from endlessly(bytes(1 << 20))


@lie(*STORES)
def endless_chunk_extension(q: Request) -> Iterator[Piece]:
    yield head(206, {**part(q)[1], "Transfer-Encoding": "chunked"}) + b"4;x="
    yield from endlessly(b"y" * (1 << 20))


@lie(*STORES)
def endless_trailers(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield head(206, {**headers, "Transfer-Encoding": "chunked"}) + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    for k in range(1 << 30):
        yield b"".join(b"X-%d-%d: y\r\n" % (k, i) for i in range(2000))


@lie(*STORES)
def chunk_of_a_terabyte(q: Request) -> Iterator[Piece]:
    yield head(206, {**part(q)[1], "Transfer-Encoding": "chunked"}) + b"10000000000\r\n"
    yield from endlessly(bytes(1 << 20))


@lie(*STORES, about="any")
def slow_headers(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 200 OK\r\n"
    yield from endlessly(b"X-a: b\r\n", 0.1)


@lie(*STORES, about="any")
def slow_header_bytes(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 200 OK\r\nX-a: "
    yield from endlessly(b"b", 0.1)


@lie(*STORES, about="any")
def slow_status_line(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 "
    yield from endlessly(b"2", 0.1)


@lie(*STORES)
def slow_body(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield head(206, headers, len(body))
    for k in range(len(body)):
        yield body[k : k + 1]
        yield 0.1


@lie(*STORES, about="list")
def slow_listing(q: Request) -> Iterator[Piece]:
    yield head(200, {"Content-Type": "text/html", "Connection": "close"})
    yield from endlessly(b" ", 0.1)


@lie(*STORES, about="any")
def silence(q: Request) -> Iterator[Piece]:
    yield 3600.0


@lie(*STORES, about="any")
def silence_after_headers(q: Request) -> Iterator[Piece]:
    yield head(200, {**ETAG, "Content-Type": "application/json"}, 1000)
    yield 3600.0


@lie(*STORES, about="any")
def hangs_up(q: Request) -> Iterator[Piece]:
    yield from ()


@lie(*STORES, about="any")
def many_headers(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 200 OK\r\n"
    for k in range(1 << 30):
        yield b"".join(b"X-%d-%d: %b\r\n" % (k, i, b"y" * 1000) for i in range(100))


@lie(*STORES, about="any")
def huge_header(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 200 OK\r\nX-a: "
    yield from endlessly(b"y" * (1 << 20))


@lie(*STORES, about="any")
def huge_status_line(q: Request) -> Iterator[Piece]:
    yield b"HTTP/1.1 200 "
    yield from endlessly(b"y" * (1 << 20))


@lie(*STORES, about="any")
def no_http(q: Request) -> Iterator[Piece]:
    yield from endlessly(os.urandom(1 << 16))


@lie(*STORES, about="any")
def continues_for_ever(q: Request) -> Iterator[Piece]:
    yield from endlessly(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


@lie(*STORES, about="any")
def early_hints_for_ever(q: Request) -> Iterator[Piece]:
    yield from endlessly(b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n", 0.02)


@lie(*STORES)
def switches_protocols(q: Request) -> Iterator[Piece]:
    yield head(101, {"Upgrade": "x", "Connection": "Upgrade"})
    yield from endlessly(bytes(1 << 16))


@lie(*STORES)
def no_content(q: Request) -> Iterator[Piece]:
    yield from whole(204, b"")


@lie(*STORES)
def not_modified(q: Request) -> Iterator[Piece]:
    yield head(304, ETAG)


@lie(*STORES)
def other_range(q: Request) -> Iterator[Piece]:
    body, headers = part(q, shift=8)
    yield from whole(206, body, headers)


@lie(*STORES)
def no_content_range(q: Request) -> Iterator[Piece]:
    body, headers = part(q, shift=8)
    yield from whole(206, body, {k: v for k, v in headers.items() if k != "Content-Range"})


@lie(*STORES)
def content_range_of_nonsense(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield from whole(206, body, {**headers, "Content-Range": "bytes " + "9" * 5000 + "-1/*"})


@lie(*STORES)
def longer(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield from whole(206, body + b"Z" * 64, headers)


@lie(*STORES)
def longer_in_chunks(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    body += b"Z" * 64
    yield head(206, {**headers, "Transfer-Encoding": "chunked"}) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@lie(*STORES)
def shorter(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield from whole(206, body[:-3], headers)


@lie(*STORES)
def promises_more(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield head(206, headers, len(body) + 500) + body


@lie(*STORES)
def promises_less(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield head(206, headers, len(body) - 5) + body


@lie(*STORES)
def two_lengths(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield head(206, {**headers, "content-length": len(body) + 7}, len(body)) + body


@lie(*STORES)
def ignores_ranges(q: Request) -> Iterator[Piece]:
    yield from whole(200, checkpoint(), ETAG)


@lie(*STORES)
def many_ranges(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    text = b"--B\r\nContent-Range: %b\r\n\r\n%b\r\n--B--\r\n" % (headers.pop("Content-Range").encode(), body)
    yield from whole(206, text, {**headers, "Content-Type": "multipart/byteranges; boundary=B"})


@lie(*STORES, right=True)
def etags_change(q: Request) -> Iterator[Piece]:
    body, headers = part(q)
    yield from whole(206, body, {**headers, "ETag": f'"{q.number}"'})


@lie("web", "s3", about="any")
def everything_changes(q: Request) -> Iterator[Piece]:
    for piece in honest(q):
        assert isinstance(piece, bytes)
        yield re.sub(
            rb'"?[0-9a-f]{32}"?(?=[\r<])',
            b'"%032x"' % q.number,
            re.sub(
                rb"Last-Modified: [^\r]*", b"Last-Modified: Thu, 01 Jan 2026 00:00:%02d GMT" % (q.number % 60), piece
            ),
        )


@lie("web", "gcs", "hub")
def redirects_for_ever(q: Request) -> Iterator[Piece]:
    yield from whole(302, b"", {"Location": f"{q.liar.endpoint}{q.path}?x={q.number}"})


@lie(*STORES)
def redirects_to_a_file(q: Request) -> Iterator[Piece]:
    yield from whole(302, b"", {"Location": "file:///etc/passwd"})


@lie(*STORES)
def redirects_to_no_url(q: Request) -> Iterator[Piece]:
    yield from whole(302, b"", {"Location": "http://[::1:bad/%zz"})


@lie(*STORES, right=True)
def redirects_elsewhere(q: Request) -> Iterator[Piece]:
    """Another server has the same bytes: the answer is right, and nothing that says who asks may go there."""
    yield from whole(307, b"", {"Location": f"{q.liar.other}{q.path}?alt=media"})


@lie("web", "gcs", "hub")
def endless_redirect_body(q: Request) -> Iterator[Piece]:
    yield head(302, {"Location": f"{q.liar.endpoint}{q.path}?x={q.number}", "Connection": "close"})
    yield from endlessly(bytes(1 << 20))


@lie(*STORES, about="any")
def endless_error(q: Request) -> Iterator[Piece]:
    yield head(403, {"Content-Type": "application/json", "Connection": "close"})
    yield from endlessly(b"x" * (1 << 20))


@lie(*STORES, about="any")
def always_busy(q: Request) -> Iterator[Piece]:
    yield from whole(503, b"")


@lie(*STORES, about="any")
def come_back_next_year(q: Request) -> Iterator[Piece]:
    yield from whole(429, b"", {"Retry-After": 31_536_000, "RateLimit": '"api";r=0;t=31536000'})


@lie(*STORES, about="any")
def zeros_before_the_wait(q: Request) -> Iterator[Piece]:
    yield from whole(429, b"", {"Retry-After": "0" * 16 + "31536000", "RateLimit": f'"api";r=0;t={"0" * 16}31536000'})


@lie(*STORES, about="any")
def error_packed_twice(q: Request) -> Iterator[Piece]:
    body = gzip.compress(_bomb())
    yield head(403, {"Content-Encoding": "gzip, gzip", "Content-Type": "application/json"}, len(body)) + body


@lie(*STORES, about="any")
def error_packed(q: Request) -> Iterator[Piece]:
    body = gzip.compress(bytes(50 << 20))
    sent = b"" if q.method == "HEAD" else body
    yield head(403, {"Content-Encoding": "gzip", "Content-Type": "application/json"}, len(body)) + sent


@lie(*STORES, about="list")
def endless_listing(q: Request) -> Iterator[Piece]:
    yield head(
        200, {"Content-Type": "text/html" if q.liar.kind == "web" else "application/json", "Connection": "close"}
    )
    yield from endlessly({"web": b"<a href='x'>", "s3": b"<a>", "gcs": b"[", "hub": b"[{},"}[q.liar.kind] * 9000)


@lie("web", about="list")
def page_that_a_regular_expression_hates(q: Request) -> Iterator[Piece]:
    body = (b"<a " * 60_000 + b"href" + b" " * 60_000 + b"href='" * 20_000 + b"http://" * 20_000) * 10
    yield from whole(200, body[: 5 << 20], {"Content-Type": "text/html"})


@lie("web", about="list", right=True)
def page_of_strange_links(q: Request) -> Iterator[Piece]:
    links = [
        "../../../etc/passwd", "/etc/shadow", "%2e%2e/%2e%2e/x", "a\nb", "x" * 60_000, "//evil/x.pt", f"{q.liar.other}/x", "a%00b", "a%5c..%5cb",
        "model.safetensors", "model.safetensors", "\x1b[31m.pt", "http://[bad/", "javascript:alert(1)", "?C=N;O=D", "%ff%fe", "&#x2e;&#x2e;/up",
    ]  # fmt: skip
    yield from whole(200, "".join(f'<a href="{x}">x</a>' for x in links).encode(), {"Content-Type": "text/html"})


@lie("web", about="list")
def page_of_a_million_links(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"".join(b"<a href='%x'>" % k for k in range(300_000)), {"Content-Type": "text/html"})


@lie("web", about="list", right=True)
def page_in_punycode(q: Request) -> Iterator[Piece]:
    """Python's decoder of that takes hours for a page of this length."""
    page = b'<a href="model.safetensors"></a>-' + b"9a" * 2_900_000
    yield from whole(200, page, {"Content-Type": "text/html; charset=punycode"})


@lie("web", about="info")
def size_of_an_exabyte(q: Request) -> Iterator[Piece]:
    yield head(200, {**ETAG, "Accept-Ranges": "bytes"}, 1 << 62)


@lie("web", about="info")
def negative_size(q: Request) -> Iterator[Piece]:
    yield head(200, {**ETAG, "Accept-Ranges": "bytes"}, -5)


@lie("web", "s3", about="info")
def shrunken_size(q: Request) -> Iterator[Piece]:
    yield head(200, {**ETAG, "Accept-Ranges": "bytes"}, 1000)


# listings of S3

XML = {"Content-Type": "application/xml"}
_MORE = "<IsTruncated>true</IsTruncated><NextContinuationToken>{}</NextContinuationToken>"


@lie("s3", about="list")
def same_token(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, ["d/model.safetensors"] if q.number == 0 else [], _MORE.format("same"))


@lie("s3", about="list")
def two_tokens_in_turn(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, [], _MORE.format("ab"[q.number % 2]))


@lie("s3", about="list")
def new_tokens(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, [f"d/{q.number}"], _MORE.format(f"t{q.number}"))


@lie("s3", about="list")
def huge_tokens(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, [], _MORE.format("t" * (1 << 20) + str(q.number)))


@lie("s3", about="list")
def no_token(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, ["d/model.safetensors"], "<IsTruncated>true</IsTruncated>")


@lie("s3", about="list")
def many_names(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, [f"d/{q.number:x}-{k:x}" for k in range(5000)], _MORE.format(f"t{q.number}"))


@lie("s3", about="list")
def billion_laughs(q: Request) -> Iterator[Piece]:
    entities = "".join(f'<!ENTITY l{k} "{f"&l{k - 1};" * 10}">' for k in range(1, 12))
    text = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY l0 "lol">{entities}]><ListBucketResult><Name>&l11;</Name></ListBucketResult>'
    yield from whole(200, text.encode(), {"Content-Type": "application/xml"})


@lie("s3", about="list")
def xml_with_elements_in_an_entity(q: Request) -> Iterator[Piece]:
    """Below the amplification that expat itself refuses."""
    dtd = f'<!DOCTYPE x [<!ENTITY a "{"<b/>" * 1000}"><!ENTITY c "{"&a;" * 1000}">]>'
    text = f'<?xml version="1.0"?>{dtd}<ListBucketResult><x>&c;&c;</x></ListBucketResult>'
    yield from whole(200, text.encode(), {"Content-Type": "application/xml"})


@lie("s3", about="list")
def deep_xml(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"<a>" * 600_000, {"Content-Type": "application/xml"})


@lie("s3", about="list")
def flat_xml(q: Request) -> Iterator[Piece]:
    yield from whole(
        200, b"<ListBucketResult>" + b"<a/>" * 520_000 + b"</ListBucketResult>", {"Content-Type": "application/xml"}
    )


def _names_of(kind: str) -> Callable[[list[str]], Lie]:
    def of(names: list[str]) -> Lie:
        def told(q: Request) -> Iterator[Piece]:
            if kind == "s3":
                yield from page_of_s3(
                    q, ["d/model.safetensors", *names] if q.query.get("prefix", "").rstrip("/") == "d" else []
                )
            elif kind == "gcs":
                yield from page_of_gcs(
                    ["d/model.safetensors", *names] if q.query.get("prefix", "").rstrip("/") == "d" else []
                )
            else:
                yield from page_of_hub(["model.safetensors", *names])

        return told

    return of


_BAD = {
    "climbs": "../../../x", "half_a_pair": "x\ud800", "absolute": "/etc/x", "nul": "a\0b", "backslash": "..\\x", "dot": "./x", "empty_part": "a//b", "very_long": "x" * 5000, "twice": "model.safetensors",
}  # fmt: skip
for _kind in ("s3", "gcs", "hub"):
    for _what, _name in _BAD.items():
        if _kind == "s3" and _what in ("nul", "half_a_pair"):
            continue  # XML cannot say it
        _full = _name if _kind == "hub" or _what == "absolute" else f"d/{_name}"
        LIES[_kind][f"name_{_what}"] = Told(_names_of(_kind)([_full]), "list")
for _kind in ("s3", "gcs"):
    LIES[_kind]["name_elsewhere"] = Told(_names_of(_kind)(["e/other"]), "list")


@lie("s3", about="list", right=True)
def sizes_that_are_none(q: Request) -> Iterator[Piece]:
    yield from page_of_s3(q, ["d/model.safetensors"], size="-7")


@lie("s3", about="list")
def row_without_a_key(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"<ListBucketResult><Contents><Size>3</Size></Contents></ListBucketResult>", XML)


@lie("s3", about="list")
def prefix_without_a_name(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"<ListBucketResult><CommonPrefixes></CommonPrefixes></ListBucketResult>", XML)


# listings of GCS

#: Pages that are none.
GCS_SHAPES: tuple[Any, ...] = (
    [1],
    7,
    {"items": 7},
    {"items": [7]},
    {"items": [{}]},
    {"prefixes": 7},
    {"items": [{"name": "d/model.safetensors", "size": "9" * 5000, "etag": "e"}]},
)


@lie("gcs", about="list")
def shapes_that_are_wrong(q: Request) -> Iterator[Piece]:
    said = json.dumps(GCS_SHAPES[q.number % len(GCS_SHAPES)])
    yield from whole(200, said.encode(), {"Content-Type": "application/json"})


@lie("gcs", about="list")
def same_page_token(q: Request) -> Iterator[Piece]:
    yield from page_of_gcs(["d/model.safetensors"] if q.number == 0 else [], nextPageToken="same")


@lie("gcs", about="list")
def new_page_tokens(q: Request) -> Iterator[Piece]:
    yield from page_of_gcs([f"d/{q.number}"], nextPageToken=f"t{q.number}")


@lie("gcs", "hub", about="list")
def deep_json(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"[" * 5_000_000, {"Content-Type": "application/json"})


@lie("gcs", "hub", about="list")
def flat_json(q: Request) -> Iterator[Piece]:
    yield from whole(200, b"[" + b"{}," * 1_900_000 + b"{}]", {"Content-Type": "application/json"})


@lie("gcs", "hub", about="list")
def numbers_without_end(q: Request) -> Iterator[Piece]:
    yield from whole(
        200,
        b'[{"path":"x","type":"file","oid":"1","size":' + b"9" * 3_000_000 + b"}]",
        {"Content-Type": "application/json"},
    )


# the Hub


@lie("hub", about="list")
def link_to_itself(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(
        ["model.safetensors"] if q.number == 0 else [], {"Link": f'<{q.liar.endpoint}{q.path}>; rel="next"'}
    )


@lie("hub", about="list")
def links_for_ever(q: Request) -> Iterator[Piece]:
    yield from page_of_hub([], {"Link": f'<{q.liar.endpoint}{q.path}?cursor={q.number}>; rel="next"'})


@lie("hub", about="list")
def links_and_names_for_ever(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(
        [f"{q.number}-{k}" for k in range(2000)], {"Link": f'<{q.liar.endpoint}{q.path}?cursor={q.number}>; rel="next"'}
    )


@lie("hub", about="list")
def link_elsewhere(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(["model.safetensors"], {"Link": f'<{q.liar.other}{q.path}?cursor=1>; rel="next"'})


@lie("hub", about="info")
def commit_that_is_a_path(q: Request) -> Iterator[Piece]:
    yield from whole(
        200,
        json.dumps({"id": "org/name", "sha": "../../../etc", "private": True, "tags": []}).encode(),
        {"Content-Type": "application/json"},
    )


@lie("hub", about="info")
def types_that_are_wrong(q: Request) -> Iterator[Piece]:
    said: list[Any] = [
        [],
        "x",
        7,
        None,
        {"id": 7, "sha": {"a": 1}, "private": "no", "tags": 3, "siblings": "x"},
        {"sha": 5},
    ]
    yield from whole(200, json.dumps(said[q.number % len(said)]).encode(), {"Content-Type": "application/json"})


@lie("hub", about="list")
def rows_that_are_wrong(q: Request) -> Iterator[Piece]:
    rows: list[Any] = [
        7,
        None,
        "x",
        {"type": "file"},
        {"type": "file", "path": ["a"], "size": "big", "oid": {}},
        {"type": "file", "path": "model.safetensors", "size": -1, "oid": "1" * 40},
    ]
    yield from whole(200, json.dumps([rows[q.number % len(rows)]]).encode(), {"Content-Type": "application/json"})


@lie("hub", about="list")
def path_is_a_list(q: Request) -> Iterator[Piece]:
    yield from page_of_hub([["model.safetensors"]])


@lie("hub", about="list")
def path_is_a_dict(q: Request) -> Iterator[Piece]:
    yield from page_of_hub([{"a": 1}])


@lie("hub", about="list", right=True)
def oid_with_half_a_pair(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(["model.safetensors"], oid="\ud800")


@lie("gcs", about="list", right=True)
def etag_with_half_a_pair(q: Request) -> Iterator[Piece]:
    size, prefix = str(len(checkpoint())), q.query.get("prefix", "")
    row = {"name": "d/model.safetensors", "bucket": "b", "size": size, "etag": "\ud800"}
    items = [row] if row["name"].startswith(prefix) and row["name"] != prefix else []
    yield from whole(200, json.dumps({"items": items}).encode(), {"Content-Type": "application/json"})


@lie("hub", about="list")
def size_of_a_pointer(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(["model.safetensors"], size=134)


@lie("hub", about="list")
def size_beyond_the_file(q: Request) -> Iterator[Piece]:
    yield from page_of_hub(["model.safetensors"], size=len(checkpoint()) + 1000)


# ------------------------------------------------------------------------------------------------------------- server


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 64
    answer: Callable[[_Handler, str, str, dict[str, str], bytes], Iterator[Piece]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is what this is for."""


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while line := self.rfile.readline(1 << 24):
            method, target, _ = [*line.decode("latin-1").split(" "), "", ""][:3]
            headers: dict[str, str] = {}
            while (field := self.rfile.readline(1 << 20).strip()) != b"":
                name, _, value = field.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            body = self.rfile.read(int(headers.get("content-length", 0)))
            sent = b""
            for piece in self.server.answer(self, method, target, headers, body):
                if isinstance(piece, bytes):
                    self.connection.sendall(piece)
                    sent += piece[:4096] if len(sent) < 4096 else b""
                else:
                    time.sleep(min(piece, 60.0))
            if b"content-length:" not in sent.lower() and b" 304 " not in sent[:20]:
                return


@dataclass
class Liar:
    """A server of that kind, which tells a lie from request number `after` on; `seen` are (whether at the other server, method, path, headers)."""

    kind: str
    name: str = ""
    after: int = 0
    seen: list[tuple[bool, str, str, dict[str, str]]] = field(default_factory=list)

    def __enter__(self) -> Liar:
        self._told, self._count, self._lock = 0, 0, threading.Lock()
        self._servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(2)]
        self._servers[0].answer = self._answer  # type: ignore[assignment]
        self._servers[1].answer = self._elsewhere  # type: ignore[assignment]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.endpoint, self.other = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def told(self) -> int:
        """How often the lie was told."""
        return self._told

    def _answer(self, handler: Any, method: str, target: str, headers: dict[str, str], body: bytes) -> Iterator[Piece]:
        self.seen.append((False, method, target, headers))
        at = urlsplit(target)
        query = {k: v[-1] for k, v in parse_qs(at.query, keep_blank_values=True).items()}
        q = Request(method, unquote(at.path), query, headers, body, 0, self)
        told = LIES[self.kind].get(self.name)
        if told is None or told.about not in ("any", kind_of(q)):
            return honest(q)
        with self._lock:
            self._count += 1
            number = self._count - 1 - self.after
            self._told += number >= 0
        return told.lie(q._replace(number=number)) if number >= 0 else honest(q)

    def _elsewhere(
        self, handler: Any, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Iterator[Piece]:
        self.seen.append((True, method, target, headers))
        return object_answer(Request(method, urlsplit(target).path, {}, headers, body, 0, self))

    @property
    def url(self) -> str:
        """The folder that the checkpoint is in."""
        return {
            "web": self.endpoint.replace("//", f"//user:{PASSWORD}@") + "/d/", "s3": "s3://b/d", "gcs": "gs://b/d", "hub": "hf://org/name",
        }[self.kind]  # fmt: skip

    def environment(self, work: Path) -> dict[str, str]:
        """What a child finds the server by."""
        return {
            **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}, "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "session-" + SECRET, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "STORAGE_EMULATOR_HOST": self.endpoint, "FSSPEC_GCS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(work / "hf"), "XDG_CACHE_HOME": str(work / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip


class Ran(NamedTuple):
    """What a command did: exit code (None: it was stopped), seconds, the most memory in bytes, what it printed."""

    code: int | None
    seconds: float
    most_bytes: int
    text: str
    out: Path


def ran(liar: Liar, work: Path, limits: dict[str, float] | None = None) -> Ran:
    """The checkpoint of the server, converted on this machine by a process of its own."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    command = (
        ["pull", liar.url, str(out), "--to", "hf"]
        if liar.kind == "hub"
        else ["convert", liar.url, str(out), "--to", "hf"]
    )
    return child(command, liar.environment(work), out, limits)


def child(command: list[str], environment: dict[str, str], out: Path, limits: dict[str, float] | None = None) -> Ran:
    """`ckpttool` with these arguments, with limits that end soon."""
    began = time.monotonic()
    peak = out.with_name("peak")
    peak.unlink(missing_ok=True)
    code = _CHILD.format(limits=SHORT if limits is None else limits, peak=str(peak))
    with open(out.with_name("said"), "w+b") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command], env=environment, stdout=said, stderr=said, cwd=out.parent
        )
        most = 0
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            if time.monotonic() - began > DEADLINE + 15 or most > 3 << 30:
                process.kill()
            time.sleep(0.02)
        said.seek(0)
        text = said.read().decode(errors="replace")
    most = max(most, int(peak.read_text()) << 10 if peak.exists() else 0)
    return Ran(None if process.returncode == -9 else process.returncode, time.monotonic() - began, most, text, out)


def _memory(pid: int) -> int:
    """The most memory that a process had so far. (What wait4 tells begins with what its parent had.)"""
    try:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


@cache
def idle(kind: str, work: Path) -> Ran:
    """The same command with an honest server."""
    with Liar(kind) as liar:
        done = ran(liar, work / "honest")
    if done.code != 0:
        raise AssertionError(f"the command fails with an honest server: {done.text}")
    return done


def judged(liar: Liar, done: Ran, idle_bytes: int) -> list[str]:
    """What a command did wrong."""
    told, bad = LIES[liar.kind][liar.name], []
    if done.code is None or done.seconds > DEADLINE:
        bad.append(f"it took {done.seconds:.1f} s")
    if done.most_bytes > MOST_BYTES:
        bad.append(f"{done.most_bytes >> 20} MiB of memory; {idle_bytes >> 20} MiB with an honest server")
    if "Traceback" in done.text or "bug of ckpttool" in done.text:
        bad.append("a traceback")
    if done.code == 0:
        written = done.out / "model.safetensors"
        if not written.exists() or sorted(_tensors(written.read_bytes())) != sorted(_tensors(checkpoint())):
            bad.append("another result, without an error")
        elif not told.right and liar.told and not liar.after and liar.name not in ("hangs_up", "always_busy"):
            # a lie that begins later may be about what is known already: then the bytes are the right ones
            bad.append("it believed the lie")
    elif done.code is not None:
        if done.out.exists():
            bad.append("a destination in spite of an error")
        if told.right and liar.after < 1 << 20 and not liar.name.startswith("etag"):
            bad.append("an error although the answer is right")
        if "error: " not in done.text:
            bad.append("no message")
    if left := [
        p.name for p in done.out.parent.glob(".out*") if "partial" not in p.name and not p.name.endswith("lock")
    ]:
        bad.append(f"left behind: {left}")
    for secret in (SECRET, TOKEN, PASSWORD, KEY_ID):
        if secret in done.text:
            bad.append("a credential on the terminal")
        if any(other and secret in json.dumps([path, headers]) for other, _, path, headers in liar.seen):
            bad.append("a credential went to another server")
    if any(other and "authorization" in headers for other, _, _, headers in liar.seen):
        bad.append("an Authorization header went to another server")
    return bad


def _tensors(data: bytes) -> list[tuple[str, bytes]]:
    """(name, bytes) of the tensors of a safetensors file."""
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    return [
        (k, data[8 + n + v["data_offsets"][0] : 8 + n + v["data_offsets"][1]])
        for k, v in header.items()
        if k != "__metadata__"
    ]


def case(number: int, work: Path) -> dict[str, Any]:
    """Case `number`: a lie, and when it begins."""
    kinds = [k for k in LIES if k != "gcs" or _has_gcsfs()]
    every = [(k, n) for k in kinds for n in LIES[k]]
    kind, name = every[number % len(every)]
    after = random.Random(number).choice((0, 0, 0, 0, 1, 1, 2, 3))
    with Liar(kind, name, after) as liar:
        done = ran(liar, work)
        bad = judged(liar, done, idle(kind, work).most_bytes)
        told = liar.told
    return {
        "id": f"servers:{kind}-{name}:{number}", "status": "; ".join(bad) or "fine", "bad": bool(bad), "told": told, "code": done.code, "seconds": round(done.seconds, 1),
        "mib": done.most_bytes >> 20, "said": f"{kind} {name} from request {after} on", "detail": done.text[-600:],
    }  # fmt: skip


def _has_gcsfs() -> bool:
    from importlib.util import find_spec

    return find_spec("gcsfs") is not None
