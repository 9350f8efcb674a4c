"""An HTTP endpoint in place of a node's."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import BaseRequestHandler, TCPServer
from urllib.parse import parse_qs, urlsplit


@contextmanager
def node_answering(
    code: int, body: str, tls: ssl.SSLContext | None = None, secret: str = "", headers: Mapping[str, str] = {}
) -> Iterator[str]:
    """Yield the address of an HTTP server with one answer for every path; over TLS with a context. With a secret it
    answers 401 to requests without that secret."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = parse_qs(urlsplit(self.path).query).get("secret", [""])
            refused = bool(secret) and given != [secret]
            self.send_response(401 if refused else code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b'{"message": "Unauthorized"}' if refused else body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def server_sending(data: bytes) -> Iterator[str]:
    """Yield the address of a server of another protocol: it sends each client the same bytes and closes."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(data)

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
