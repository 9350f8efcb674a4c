"""A server with Google Cloud Storage's XML API: moto's S3 server behind a translation of headers.

The XML API is interoperable with S3: the same paths, listings and error documents. Three differences are translated:
the precondition on an object's generation, the prefix of metadata, and the deletion of an absent object, which Google
answers with 404. Emulators of the JSON API do not help, because obstore uses the XML API: fake-gcs-server 1.56 rejects
its uploads and reads preconditions only from JSON requests.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

S3_META, GCS_META = "x-amz-meta-", "x-goog-meta-"
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""moto checks only that a request is signed."""
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def translated(inner: Wsgi, *, conditions: bool = True) -> Wsgi:
    """Wrap the S3 application `inner`. Without `conditions` it ignores preconditions, like a bad emulator."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        environ = dict(environ)
        environ["HTTP_AUTHORIZATION"] = SIGNED
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation is not None and conditions:
            assert generation == "0", "only creates are conditional"
            environ["HTTP_IF_NONE_MATCH"] = "*"
        for name in [name for name in environ if name.startswith("HTTP_X_GOOG_META_")]:
            environ[name.replace("X_GOOG_META", "X_AMZ_META")] = environ.pop(name)

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            out = [(name.lower().replace(S3_META, GCS_META), value) for name, value in headers]
            return start(status, out, *rest)

        if environ["REQUEST_METHOD"] == "DELETE":
            found: list[str] = []
            head = {**environ, "REQUEST_METHOD": "HEAD"}
            for _ in inner(head, lambda status, *_: found.append(status)):
                pass
            if found[0].startswith("404"):
                body = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>"
                start("404 Not Found", [("content-type", "application/xml"), ("content-length", str(len(body)))])
                return [body]
        return inner(environ, begin)

    return answer


@contextmanager
def gcs_server(*, conditions: bool = True) -> Iterator[tuple[str, Callable[[], str]]]:
    """Run the server; yields its address and a function that creates a bucket and returns its name."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    google = translated(application, conditions=conditions)

    def choose(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        signed = "AWS4-HMAC" in environ.get("HTTP_AUTHORIZATION", "")
        return (application if signed else google)(environ, start)

    server = make_server("127.0.0.1", 0, choose, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    numbers = itertools.count()

    def create() -> str:
        name = f"gcs{server.server_port}x{next(numbers)}"  # moto does not decode names, and obstore encodes hyphens
        client.create_bucket(Bucket=name)
        return name

    try:
        yield endpoint, create
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
