"""An S3 API that misbehaves on request: moto's server, in a separate process, behind a layer that refuses, loses
answers and is slow.

    python benchmarks/chaos_store.py PORT SEED
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from chaos_thread import end_with_parent
from support.ports import free_port

BUCKET = "chaos"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "chaos", "AWS_SECRET_ACCESS_KEY": "chaos", "AWS_REGION": "us-east-1"}
START_S = 60.0
STOP_S = 30.0
FAULTS_PATH = "/-/faults"
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"

Respond = Callable[..., Any]
App = Callable[[dict[str, Any], Respond], Iterable[bytes]]


class Misbehaving:
    """A WSGI app with faults, which a client puts as JSON to FAULTS_PATH.

    `refuse` and `lose` are the shares of requests that are answered 503 before they are carried out, with S3's code for
    it, or after, like a failing intermediary; `slow_s`: each waits up to this long.
    """

    def __init__(self, app: App, seed: int) -> None:
        self._app = app
        self._rand = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: dict[str, float] = {}
        self._served = {"requests": 0, "refused": 0, "lost": 0}

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        if environ["PATH_INFO"] == FAULTS_PATH:
            return self._reported(environ, respond)
        with self._lock:
            refuse, lose, wait_s = (
                self._rand.random() < self._faults.get("refuse", 0.0),
                self._rand.random() < self._faults.get("lose", 0.0),
                self._rand.uniform(0.0, self._faults.get("slow_s", 0.0)),
            )
            self._served["requests"] += 1
            self._served["refused"] += refuse
            self._served["lost"] += lose and not refuse
        time.sleep(wait_s)
        if refuse:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        elif not lose:
            return self._app(environ, respond)
        else:
            list(self._app(environ, lambda *_: lambda _: None))
        body = SLOW_DOWN if refuse and environ["REQUEST_METHOD"] != "HEAD" else b""
        respond("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def _reported(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        with self._lock:
            if environ["REQUEST_METHOD"] == "PUT":
                self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            body = json.dumps(self._served).encode()
        respond("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


class Store:
    """The process, with an empty bucket. `environ`: what a node needs to be let in."""

    def __init__(self, seed: int, log: Path) -> None:
        port = free_port()
        self._endpoint = f"http://127.0.0.1:{port}"
        self.url = f"s3://{BUCKET}/tidemill?endpoint={self._endpoint}"
        self.environ = CREDENTIALS
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(port), str(seed)], stdout=output, stderr=output
            )
        until_s = time.monotonic() + START_S
        while True:
            try:
                self._put(f"/{BUCKET}", b"")
                return
            except OSError:
                if time.monotonic() > until_s or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.1)

    def faults(self, now: Mapping[str, float]) -> dict[str, int]:
        """Replace the current faults. Return how many requests were served, by fault."""
        return dict(json.loads(self._put(FAULTS_PATH, json.dumps(now).encode())))

    def _put(self, path: str, body: bytes) -> bytes:
        request = urllib.request.Request(f"{self._endpoint}{path}", data=body, method="PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(port: int, seed: int) -> None:
    import logging

    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Misbehaving(DomainDispatcherApplication(create_backend_app), seed)
    make_server("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler).serve_forever()


if __name__ == "__main__":
    end_with_parent()
    serve(int(sys.argv[1]), int(sys.argv[2]))
