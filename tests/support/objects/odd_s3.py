"""An S3 server whose answers are odd: repeated pages of listings, short ranges, objects that are absent once."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

NAMES = '<?xml version="1.0"?><ListBucketResult><Name>bucket</Name>'
TIME = "2026-01-01T00:00:00.000Z"


class OddS3:
    """Bucket `bucket` in memory. Each attribute makes the next answers odd, and counts down with each of them.

    short_reads       ranges whose answer lacks its second half, though the header promises it
    absent_reads      reads answered with 404
    unanswered_puts   creates that take effect and are answered with 503
    refused_gets      GET requests answered with the status `refusal`
    refused_heads     HEAD requests answered with the status `refusal`
    repeats_pages     every listing has a second page equal to the first one
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.short_reads = self.absent_reads = self.unanswered_puts = self.refused_gets = self.refused_heads = 0
        self.refusal = 403
        self.repeats_pages = False
        self.reads = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._get(self)

            def do_HEAD(self) -> None:
                outer._head(self)

            def do_PUT(self) -> None:
                outer._put(self)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = (data, "")

    def _due(self, name: str) -> bool:
        left: int = getattr(self, name)
        setattr(self, name, max(left - 1, 0))
        return left > 0

    def _get(self, to: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(to.path)
        query = parse_qs(parts.query)
        if self._due("refused_gets"):
            _answer(to, self.refusal, b"<html>upstream</html>")
            return
        if "list-type" in query:
            _answer(to, 200, self._page(query.get("prefix", [""])[0], "continuation-token" in query))
            return
        self.reads += 1
        found = self.objects.get(_key(to))
        if found is None or self._due("absent_reads"):
            _answer(to, 404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data = found[0]
        wanted = to.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            _answer(to, 200, data)
            return
        first, last = (int(part) for part in wanted.split("-"))
        body = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(data)}"}
        if not body:
            _answer(to, 416, b"<Error><Code>InvalidRange</Code></Error>")
        else:
            _answer(to, 206, body[: len(body) // 2] if self._due("short_reads") else body, headers)

    def _page(self, prefix: str, second: bool) -> bytes:
        more = self.repeats_pages and not second
        next_token = "<NextContinuationToken>t</NextContinuationToken>" if more else ""
        items = "".join(
            f'<Contents><Key>{key}</Key><LastModified>{TIME}</LastModified><ETag>"x"</ETag><Size>{len(data)}</Size>'
            "</Contents>"
            for key, (data, _) in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        head = f"{NAMES}<IsTruncated>{'true' if more else 'false'}</IsTruncated>{next_token}"
        return f"{head}{items}</ListBucketResult>".encode()

    def _head(self, to: BaseHTTPRequestHandler) -> None:
        found = self.objects.get(_key(to))
        if self._due("refused_heads"):
            _answer(to, self.refusal, b"")
        elif found is None:
            _answer(to, 404, b"")
        else:
            _answer(to, 200, b"", {"x-amz-meta-tidemill-nonce": found[1]}, size_bytes=len(found[0]))

    def _put(self, to: BaseHTTPRequestHandler) -> None:
        data = to.rfile.read(int(to.headers.get("content-length", 0)))
        key = _key(to)
        if key in self.objects:
            _answer(to, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.objects[key] = (data, to.headers.get("x-amz-meta-tidemill-nonce", ""))
        _answer(to, 503 if self._due("unanswered_puts") else 200, b"")


def _key(to: BaseHTTPRequestHandler) -> str:
    return urlsplit(to.path).path.removeprefix("/bucket/")


def _answer(
    to: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    size_bytes: int | None = None,
) -> None:
    to.send_response(status)
    to.send_header("Content-Length", str(len(body) if size_bytes is None else size_bytes))
    to.send_header("ETag", '"x"')
    to.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
    for name, value in (headers or {}).items():
        to.send_header(name, value)
    to.end_headers()
    to.wfile.write(body)
