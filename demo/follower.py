"""A small client of the shape protocol, which measures the latency that a live app would see.

It follows one shape by long-polling on a separate thread. A lost connection is retried. A must-refetch (409) starts
over, as the protocol requires of every client.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from tidemill.base.address import Address
from tidemill.base.clock import Clock

Row = dict[str, str | None]
TIMEOUT_S = 40.0
RETRY_S = 0.2


class Follower:
    """`rows` mirrors the shape. Every live change is passed to `on_row(operation, row, received_ms)`."""

    def __init__(
        self,
        address: str,
        parameters: dict[str, str],
        clock: Clock,
        on_row: Callable[[str, Row, int], None] = lambda *_: None,
    ) -> None:
        self._home = Address.parse(address)
        self._host, self._port = self._home
        self._parameters = parameters
        self._clock = clock
        self._on_row = on_row
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self.rows: dict[str, Row] = {}
        self.first_row_ms: int | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        connection: HTTPConnection | None = None
        position: dict[str, str] = {"offset": "-1"}
        live = False
        while not self._stopping.is_set():
            try:
                if connection is None:
                    connection = HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
                query = {**self._parameters, **position, **({"live": "true"} if live else {})}
                connection.request("GET", f"/v1/shape?{urlencode(query)}")
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, HTTPException):
                connection = None
                self._host, self._port = self._home
                self._stopping.wait(RETRY_S)
                continue
            if answer.status == 307:
                self._redirect(answer.headers["location"])
                connection.close()
                connection = None
                continue
            if answer.status == 409:
                self.rows.clear()
                position, live = {"offset": "-1"}, False
                continue
            if answer.status != 200:
                self._host, self._port = self._home
                connection.close()
                connection = None
                self._stopping.wait(RETRY_S)
                continue
            self._apply(json.loads(body) if body else [], live)
            position = {
                "offset": answer.headers["electric-offset"],
                "handle": answer.headers["electric-handle"],
            }
            if "electric-cursor" in answer.headers:
                position["cursor"] = answer.headers["electric-cursor"]
            live = live or "electric-up-to-date" in answer.headers

    def _redirect(self, location: str) -> None:
        """Follow another node, which captures this table. After an error the first node is used again."""
        url = urlsplit(location)
        self._host, self._port = url.hostname or self._host, url.port or self._port

    def _apply(self, items: list[dict[str, Any]], live: bool) -> None:
        received_ms = self._clock.now_ms()
        for item in items:
            operation = item["headers"].get("operation")
            if operation is None:
                continue
            if operation == "delete":
                self.rows.pop(item["key"], None)
            else:
                self.rows[item["key"]] = {**self.rows.get(item["key"], {}), **item["value"]}
                if self.first_row_ms is None:
                    self.first_row_ms = received_ms
            if live:
                self._on_row(operation, item.get("value", {}), received_ms)
