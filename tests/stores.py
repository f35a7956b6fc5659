"""Object stores for tests, on loopback: moto's S3 server in a process of its own, and a proxy that loses what it is
told to.

    store = moto()                  started once a test run
    url = store.bucket(monkeypatch) s3://bucket of its own; the environment says where it is and who asks
    with Flaky(store.endpoint, rule) as proxy: monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

`rule(method, path)` is asked for every request: None passes it on; a number is answered as that HTTP status, a pair
with a body; "cut" sends half of the answer's body and closes; "drop" closes without asking the store; "lose" asks the
store, but loses the answer."""

from __future__ import annotations

import atexit
import http.client
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest

KEY_ID, SECRET = "AKIATESTTESTTEST1234", "hunter2/Secret+Access+Key/0123456789abcd"
What = int | tuple[int, bytes] | str | None
Rule = Callable[[str, str], What]

_SERVE = """
import sys, time, logging
logging.getLogger("werkzeug").disabled = True
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Moto:
    """moto's server; it ends with the test run, since its standard input does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # S3 wants parts of 5 MiB; tests send less in as many. The other is what moto makes of that number
            env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 << 20)},
        )
        assert self.process.stdout
        port = self.process.stdout.readline()
        assert port.strip(), "moto's server did not start"
        self.endpoint = f"http://127.0.0.1:{int(port)}"
        atexit.register(self.stop)

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.process.terminate()
        self.process.wait()

    def environment(self, monkeypatch: pytest.MonkeyPatch, endpoint: str = "") -> None:
        """What s3fs finds its store and its credentials by."""
        set_environment(monkeypatch, endpoint or self.endpoint)

    def bucket(self, monkeypatch: pytest.MonkeyPatch, lock: bool = False) -> str:
        """The URL of a new bucket, with object lock where asked for."""
        self.environment(monkeypatch)
        name = f"b-{uuid.uuid4().hex}"
        self.client().create_bucket(Bucket=name, ObjectLockEnabledForBucket=lock)
        return f"s3://{name}"

    def client(self) -> Any:
        """boto3's client, that looks at what ours did."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


def set_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What s3fs finds the store at `endpoint` and its credentials by."""
    values = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    forget()


def forget() -> None:
    """Drop the file systems that fsspec keeps: they hold the endpoint they were made with."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


@cache
def moto() -> Moto:
    """The server of this test run."""
    pytest.importorskip("moto", reason="needs moto[s3,server]")
    pytest.importorskip("s3fs")
    return Moto()


class Served(ThreadingHTTPServer):
    """A server on a free port of this machine, in a thread of its own while the block runs."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Cut connections are what this is for."""


class Flaky(Served):
    """A proxy before a server, that fails as its rule says. `seen` are (method, path, what was done) of requests."""

    daemon_threads = True

    def __init__(self, endpoint: str, rule: Rule) -> None:
        super().__init__(_Proxy)
        self.target, self.rule = endpoint.removeprefix("http://"), rule
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.seen: list[tuple[str, str, What]] = []
        self.headers: list[dict[str, str]] = []

    def did(self, what: What) -> int:
        return sum(d == what for _, _, d in self.seen)


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """The body of a request, whole or in chunks."""
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    out = b""
    while n := int(request.rfile.readline().split(b";")[0], 16):
        out += request.rfile.read(n)
        request.rfile.readline()
    request.rfile.readline()
    return out


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Flaky

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = body_of(self)
        what = self.server.rule(self.command, self.path)
        self.server.seen.append((self.command, self.path, what))
        self.server.headers.append({k.lower(): v for k, v in self.headers.items()})
        if isinstance(what, (int, tuple)):
            status, text, headers = (*(what if isinstance(what, tuple) else (what, b"")), {})[:3]
            self.send_response(status)
            for k, v in headers.items():
                self.send_header(k, v)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)
            return
        if what == "drop":
            self.close_connection = True
            return
        there = http.client.HTTPConnection(self.server.target, timeout=60)
        headers = {
            k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect", "connection")
        }
        headers["Content-Length"] = str(len(body))
        there.request(self.command, self.path, body, headers)
        answer = there.getresponse()
        data = answer.read()
        there.close()
        if what == "lose":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for k, v in answer.getheaders():
            if k.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(k, v)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if what == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve


class Cutting:
    """A proxy of bytes before a server: whenever `every` bytes have passed, in either direction and over whatever
    connections, the one that carries them breaks. `cuts` counts them."""

    def __init__(self, endpoint: str, every: int) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self.target, self.every, self.passed, self.cuts = (host, int(port)), every, 0, 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> Cutting:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:
                return
            there = socket.create_connection(self.target)
            for a, b in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                with self.lock:
                    self.passed += len(data)
                    cut = self.passed >= self.every
                    if cut:
                        self.passed, self.cuts = 0, self.cuts + 1
                if cut:
                    break
                b.sendall(data)
        except OSError:
            pass
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()


def first(n: int, what: What, *only: str) -> Rule:
    """The first `n` requests (of these methods) fail."""
    left = [n]
    lock = threading.Lock()

    def rule(method: str, path: str) -> What:
        with lock:
            if (only and method not in only) or not left[0]:
                return None
            left[0] -= 1
            return what

    return rule


class Lean:
    """bench/s3.py, an S3 server whose objects are files of a folder, while the block runs. `asked()` are the lines of its log:
    method, path, range.

    Args:
        root: the folder; a bucket is a folder below it.
        seconds: before each answer.
        rate: bytes a second of each connection; 0 for no limit.
    """

    def __init__(self, root: Path, seconds: float = 0, rate: float = 0) -> None:
        self.root, self.log = root, root / ".log"
        self.log.touch()
        command = [sys.executable, str(Path(__file__).parents[1] / "bench" / "s3.py"), root, self.log, seconds, rate]
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        self.endpoint = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        self.process.wait()

    def asked(self) -> list[str]:
        """What was asked since this was called last."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines
