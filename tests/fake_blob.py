"""A small Blob service of Azure on loopback, for the real adlfs and azure-storage-blob: containers, blobs in blocks,
conditions, listings by pages and prefixes, ranges. All of it lies in memory; signatures are not checked.

    with Blobs() as store: store.environment(monkeypatch); store.blobs["c"] = {"name": blob(b"...")}

`rule(method, path)` is asked for every request, with the query in its path: None serves it; (status, headers, body) is
answered as it is; "drop" closes without an answer. `seen` are (method, path).

`azurite()` is Microsoft's own emulator where `azurite-blob` is on the PATH (npm install azurite); tests/storage/
test_azure.py runs on both then.

Source: the reference of Azure's REST API for Blob Storage."""

from __future__ import annotations

import base64
import hashlib
import itertools
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from stores import Served, body_of

ACCOUNT = "devstoreaccount1"
#: The key of every emulator of Azure, which is no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
Rule = Callable[[str, str], Any]
_etags = itertools.count(1)


class Blob(NamedTuple):
    """A blob with its ETag and metadata."""

    data: bytes
    etag: str
    metadata: dict[str, str]


def blob(data: bytes, **metadata: str) -> Blob:
    """A blob with an ETag of its own."""
    return Blob(data, f'"0x{next(_etags):X}"', metadata)


def environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What adlfs finds a store and its credentials by."""
    from adlfs import AzureBlobFileSystem

    values = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": KEY, "BlobEndpoint": endpoint}
    text = ";".join(f"{k}={v}" for k, v in values.items())
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    AzureBlobFileSystem.clear_instance_cache()


class Blobs(Served):
    """The server; it serves between `with` and its end."""

    daemon_threads = True

    def __init__(self, rule: Rule | None = None) -> None:
        super().__init__(_Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/{ACCOUNT}"
        self.rule: Rule = rule or (lambda method, path: None)
        self.blobs: dict[str, dict[str, Blob]] = {}
        self.blocks: dict[tuple[str, str], dict[str, bytes]] = {}  # that are not in a blob yet
        self.seen: list[tuple[str, str]] = []
        self.lock = threading.RLock()


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Blobs

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = body_of(self)
        with self.server.lock:
            self.server.seen.append((self.command, self.path))
        what = self.server.rule(self.command, self.path)
        if what == "drop":
            self.close_connection = True
            return
        try:
            if what is not None:
                status, headers, data = what
            elif not self.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
                raise _Refused(403, "AuthenticationFailed")
            else:
                with self.server.lock:
                    status, headers, data = self._route(body)
        except _Refused as e:
            text = f"<?xml version='1.0'?><Error><Code>{e.code}</Code><Message>{e.code}.</Message></Error>"
            status, data = e.status, text.encode()
            headers = {"x-ms-error-code": e.code, "Content-Type": "application/xml"}
        self.send_response(status)
        for k, v in {"Content-Length": str(len(data)), "x-ms-version": "2021-12-02", **headers}.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_HEAD = do_DELETE = _serve

    def _route(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        at = urlsplit(self.path)
        query = dict(parse_qsl(at.query))
        container, _, name = unquote(at.path).removeprefix(f"/{ACCOUNT}/").partition("/")
        if container not in self.server.blobs:
            raise _Refused(404, "ContainerNotFound")
        blobs = self.server.blobs[container]
        if not name:
            return self._listing(blobs, query)
        old = blobs.get(name)
        if self.command == "PUT":
            return self._write(blobs, (container, name), old, query.get("comp"), query, body)
        if old is None:
            raise _Refused(404, "BlobNotFound")
        if self.command == "DELETE":
            del blobs[name]
            return 202, {}, b""
        return self._read(old)

    def _listing(self, blobs: dict[str, Blob], query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, mark = query.get("prefix", ""), query.get("delimiter", "")
        rows: dict[str, str] = {}
        for name in sorted(n for n in blobs if n.startswith(prefix)):
            first, more, _ = name.removeprefix(prefix).partition(mark) if mark else (name.removeprefix(prefix), "", "")
            shown = escape(prefix + first + more)
            metadata = "".join(f"<{k}>{escape(v)}</{k}>" for k, v in blobs[name].metadata.items())
            rows[prefix + first + more] = (
                f"<BlobPrefix><Name>{shown}</Name></BlobPrefix>"
                if more
                else f"<Blob><Name>{shown}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
                f"<Etag>{blobs[name].etag.strip(chr(34))}</Etag><Content-Length>{len(blobs[name].data)}</Content-Length>"
                f"<BlobType>BlockBlob</BlobType></Properties><Metadata>{metadata}</Metadata></Blob>"
            )
        start, most = int(query.get("marker", 0)), int(query.get("maxresults", 5000))
        more_rows = str(start + most) if start + most < len(rows) else ""
        text = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://x/" ContainerName="c">'
            f"<Blobs>{''.join(list(rows.values())[start : start + most])}</Blobs><NextMarker>{more_rows}</NextMarker>"
            f"</EnumerationResults>"
        )
        return 200, {"Content-Type": "application/xml"}, text.encode()

    def _write(
        self, blobs: dict[str, Blob], at: tuple[str, str], old: Blob | None, comp: str | None, query: dict[str, str],
        body: bytes,
    ) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        sent = self.headers.get("Content-MD5")
        if sent and base64.b64encode(hashlib.md5(body).digest()).decode() != sent:
            raise _Refused(400, "Md5Mismatch")
        if comp == "block":
            if not body:
                raise _Refused(400, "InvalidHeaderValue")
            waiting = self.server.blocks.setdefault(at, {})
            if any(len(k) != len(query["blockid"]) for k in waiting):
                raise _Refused(400, "InvalidBlobOrBlock")
            waiting[query["blockid"]] = body
            return 201, {}, b""
        if self.headers.get("If-None-Match") == "*" and old is not None:
            raise _Refused(409, "BlobAlreadyExists")
        if (match := self.headers.get("If-Match")) and (old is None or old.etag != match):
            raise _Refused(412, "ConditionNotMet")
        if comp == "blocklist":
            waiting = self.server.blocks.pop(at, {})
            ids = [e.text or "" for e in ElementTree.fromstring(body)]
            if not set(ids) <= set(waiting):
                raise _Refused(400, "InvalidBlockList")
            body = b"".join(waiting[k] for k in ids)
        metadata = {k[10:].lower(): v for k, v in self.headers.items() if k.lower().startswith("x-ms-meta-")}
        blobs[at[1]] = blob(body, **metadata)
        return 201, {"ETag": blobs[at[1]].etag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, b""

    def _read(self, found: Blob) -> tuple[int, dict[str, str], bytes]:
        headers = {
            "ETag": found.etag,
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "x-ms-blob-type": "BlockBlob",
            "Content-Type": "application/octet-stream",
            **{f"x-ms-meta-{k}": v for k, v in found.metadata.items()},
        }
        asked, n = self.headers.get("x-ms-range") or self.headers.get("Range", ""), len(found.data)
        if (match := self.headers.get("If-Match")) and found.etag != match:
            raise _Refused(412, "ConditionNotMet")
        if self.command == "HEAD" or not asked:
            return 200, headers, found.data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if int(first) >= n:
            raise _Refused(416, "InvalidRange")
        data = found.data[int(first) : int(last) + 1 if last else n]
        return 206, {**headers, "Content-Range": f"bytes {first}-{int(first) + len(data) - 1}/{n}"}, data


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """While the block runs, lend the endpoint of Microsoft's emulator, which keeps its files in `folder`."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH (npm install azurite)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder)]
    process = subprocess.Popen([*command, "--blobPort", str(port)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        process.terminate()
        process.wait()
