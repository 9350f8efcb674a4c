"""The S3 server of the tests, with atomic creates as in S3, and the credentials that it accepts."""

from __future__ import annotations

import threading
from typing import Any

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

_creating = threading.Lock()


def start_server(address: str = "127.0.0.1", port: int = 0) -> Any:
    """Start moto's server in threads of this process."""
    from moto.server import ThreadedMotoServer

    _make_creates_atomic()
    server = ThreadedMotoServer(ip_address=address, port=port, verbose=False)
    server.start()
    return server


def _make_creates_atomic() -> None:
    """Serialize the conditional puts. moto looks for the object and stores another one afterwards, so two of racing
    creates could succeed.
    """
    from moto.s3.responses import S3Response

    plain = S3Response.put_object
    if getattr(plain, "is_atomic", False):
        return

    def put_object(self: Any) -> Any:
        if self.headers.get("If-None-Match") is None:
            return plain(self)
        with _creating:
            return plain(self)

    put_object.is_atomic = True  # type: ignore[attr-defined]
    S3Response.put_object = put_object
