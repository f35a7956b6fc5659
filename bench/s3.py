"""A lean S3 server on loopback, for bench/stores.py: `python bench/s3.py FOLDER [LOG [SECONDS RATE]]` prints its port and
serves until its standard input ends. It knows what s3fs asks when ckpttool reads and writes; objects are files, parts are
written where they belong. Objects can also be read as files of a web server.

Each request is a line of the file LOG: method, path with query, bytes that were asked for, and when it came and was answered. An answer begins after SECONDS, and
each connection sends or receives at most RATE bytes a second."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
import uuid
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ROOT = Path(sys.argv[1])
LOG = open(sys.argv[2], "a", buffering=1) if len(sys.argv) > 2 else None  # noqa: SIM115
SECONDS, RATE = (float(x) for x in sys.argv[3:5]) if len(sys.argv) > 4 else (0.0, 0.0)
_SLICE = 256 << 10
LOCK = threading.Lock()
UPLOADS: dict[str, dict[int, Path]] = {}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """An answer that is in memory."""
        self.send_response(status)
        for k, v in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(k.replace("_", "-"), v)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def receive(self, path: Path) -> None:
        """The body into a file; botocore sends it in signed chunks."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as f:
            if "aws-chunked" in self.headers.get("Content-Encoding", ""):
                while n := int(self.rfile.readline().split(b";")[0], 16):
                    self.copy(n, f)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
            else:
                self.copy(int(self.headers.get("Content-Length", 0)), f)

    def copy(self, left: int, to: object) -> None:
        """So many bytes of the connection."""
        while left:
            began = time.monotonic()
            data = self.rfile.read(min(left, _SLICE if RATE else 1 << 20))
            if not data:
                raise ConnectionError
            to.write(data)  # type: ignore[attr-defined]
            left -= len(data)
            slow_down(len(data), began)

    def serve(self) -> None:
        """One request."""
        began = time.monotonic()
        try:
            time.sleep(SECONDS)
            self.reply()
        finally:
            if LOG:
                asked = self.headers.get("Range", "-")
                LOG.write(f"{self.command} {self.path} {asked} {began:.4f} {time.monotonic():.4f}\n")

    def reply(self) -> None:
        """The answer to one request."""
        at = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(at.query, keep_blank_values=True).items()}
        path = ROOT / unquote(at.path).lstrip("/")
        upload = query.get("uploadId", "")
        if self.command == "PUT" and upload:
            part = path.parent / f".part-{upload}-{query['partNumber']}"
            self.receive(part)
            with LOCK:
                known = UPLOADS.get(upload)
                if known is not None:
                    known[int(query["partNumber"])] = part
            if known is None:
                part.unlink()
                self.answer(404, _NO_UPLOAD)
            else:
                self.answer(200, ETag=tag_of_part(part))
        elif self.command == "PUT" and path.parent == ROOT:
            path.mkdir(exist_ok=True)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(200)
        elif self.command == "PUT":
            self.receive(path)
            self.answer(200, ETag=tag(path))
        elif self.command == "POST" and "uploads" in query:
            upload = uuid.uuid4().hex
            UPLOADS[upload] = {}
            self.answer(200, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                             "</InitiateMultipartUploadResult>".encode())  # fmt: skip
        elif self.command == "POST" and upload:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = [p for _, p in sorted(UPLOADS.pop(upload).items())]
            with open(parts[0], "ab") as to:
                for p in parts[1:]:
                    with open(p, "rb") as f:
                        shutil.copyfileobj(f, to, 1 << 20)
                    p.unlink()
            parts[0].rename(path)
            self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        elif upload and upload not in UPLOADS:
            self.answer(404, _NO_UPLOAD)
        elif upload and self.command == "DELETE":
            for part in UPLOADS.pop(upload).values():
                part.unlink()
            self.answer(204)
        elif upload:
            rows = [f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(tag_of_part(p))}</ETag><Size>{p.stat().st_size}</Size></Part>"
                    for n, p in sorted(UPLOADS[upload].items())]  # fmt: skip
            self.answer(
                200, f"<ListPartsResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListPartsResult>".encode()
            )
        elif self.command == "DELETE":
            path.unlink(missing_ok=True)
            self.answer(204)
        elif "list-type" in query or "uploads" in query:
            self.list(path, query)
        elif not path.is_file():
            self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
        else:
            self.get(path)

    def list(self, bucket: Path, query: dict[str, str]) -> None:
        """Keys and common prefixes."""
        prefix, out, folders = query.get("prefix", ""), [], set()
        for p in sorted(p for p in bucket.rglob("*") if p.is_file() and not p.name.startswith(".part-")):
            key = str(p.relative_to(bucket))
            if "uploads" in query or not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if query.get("delimiter") and "/" in rest:
                folders.add(prefix + rest.partition("/")[0] + "/")
                continue
            out.append(f"<Contents><Key>{escape(key)}</Key><ETag>{escape(tag(p))}</ETag><Size>{p.stat().st_size}</Size>"
                       "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>")  # fmt: skip
        out += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)]
        kind = "ListMultipartUploadsResult" if "uploads" in query else "ListBucketResult"
        count = f"<KeyCount>{len(out)}</KeyCount><IsTruncated>false</IsTruncated>"
        self.answer(200, f"<{kind}>{count}{''.join(out)}</{kind}>".encode())

    def get(self, path: Path) -> None:
        """An object, or a range of it."""
        size = path.stat().st_size
        said = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(said[1]) if said else 0
        end = min(size, int(said[2]) + 1) if said and said[2] else size
        self.send_response(206 if said else 200)
        headers = {"ETag": tag(path), "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        if said:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        for k, v in {**headers, "Content-Length": str(end - first)}.items():
            self.send_header(k, v)
        self.end_headers()
        if self.command == "HEAD":
            return
        with open(path, "rb") as f:
            while first < end:
                began = time.monotonic()
                sent = os.sendfile(
                    self.connection.fileno(), f.fileno(), first, min(end - first, _SLICE) if RATE else end - first
                )
                first += sent
                slow_down(sent, began)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve


def slow_down(n: int, began: float) -> None:
    """Wait until `n` bytes have had their time since `began`."""
    if RATE:
        time.sleep(max(0.0, began + n / RATE - time.monotonic()))


_NO_UPLOAD = b"<Error><Code>NoSuchUpload</Code><Message>none</Message></Error>"


def tag_of_part(path: Path) -> str:
    """The ETag of a part: its name, which holds the upload and the number. It is no MD5, as with SSE-KMS."""
    return f'"{path.name}"'


def tag(path: Path) -> str:
    """The ETag: size and time."""
    st = path.stat()
    return f'"{st.st_size:x}{st.st_mtime_ns:x}"'


class Server(ThreadingHTTPServer):
    """The server."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Cut connections."""


server = Server(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_address[1], flush=True)
sys.stdin.read()
