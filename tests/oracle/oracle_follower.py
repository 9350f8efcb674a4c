"""A client of the shape protocol, written only from its description: long polls or an event stream, in a thread.

It holds rows by key, and checks that the server follows the protocol:
- an insert has a new key, an update and a delete have a known one, and an old value equals the value held;
- a handle stays the same until a 409;
- a complete answer ends with the item that marks it as such.

It must cope with 409 (start over), with 503 and an unreachable server (retry), and with 400 while the table does not
exist (retry from the start). An event stream may repeat the items of the last transaction.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from oracle_history import Shown

RETRY_S = 0.2
READ_S = 40.0


class BrokenProtocol(AssertionError):
    """Raised when the server violates the protocol."""


@dataclass(frozen=True)
class View:
    """State of a client at one moment. `seen_lsn`: the LSN that its source had shown it by that moment."""

    rows: dict[str, dict[str, Any]]
    complete: bool
    seen_lsn: int
    refetches: int
    refused: str


class Follower(threading.Thread):
    def __init__(self, address: str, params: dict[str, str], columns: list[str], key: list[str], *, sse: bool) -> None:
        super().__init__(name=f"follower {params['table']} {'sse' if sse else 'poll'}", daemon=True)
        self.params = params
        self.sse = sse
        self.shown: set[tuple[int | None, Shown]] = set()
        """(xid, row) of every row that was ever held; xid None: an initial row."""
        self.left: set[tuple[int, Shown]] = set()
        """(xid, key) of every delete."""
        self.took_over: set[int] = set()
        """xid of every row that took the key of a row that was still shown, as a deferrable key permits."""
        self.failure: BaseException | None = None
        self._address = address
        self.columns = columns
        self._key = key
        self._full = params.get("replica") == "full"
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._rows: dict[str, dict[str, Any]] = {}
        self._handle, self._offset, self._cursor = "", "-1", ""
        self._complete = False
        self._seen_lsn = 0
        self._refetches = 0
        self._refused = ""
        self._repeated_lsn = -1

    # asked from outside ----------------------------------------------------------------------------
    def view(self) -> View:
        if self.failure is not None:
            raise AssertionError(f"{self.name}: {self.failure}") from self.failure
        with self._lock:
            rows = {key: dict(row) for key, row in self._rows.items()}
            return View(rows, self._complete, self._seen_lsn, self._refetches, self._refused)

    def stop(self) -> None:
        self._stopping.set()

    # the thread ------------------------------------------------------------------------------------
    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._ask()
                except (OSError, http.client.HTTPException):
                    self._stopping.wait(RETRY_S)
        except BaseException as error:
            self.failure = error

    def _ask(self) -> None:
        live = self._complete
        query = {**self.params, "offset": self._offset}
        if self._handle:
            query["handle"] = self._handle
        if live:
            query["live"] = "true"
            if self._cursor:
                query["cursor"] = self._cursor
            if self.sse:
                query["live_sse"] = "true"
        connection = http.client.HTTPConnection(self._address, timeout=READ_S)
        try:
            connection.request("GET", f"/v1/shape?{urlencode(query)}")
            answer = connection.getresponse()
            if answer.status != 200:
                self._refused_with(answer, json.loads(answer.read() or b"null"))
                return
            handle = answer.headers["electric-handle"]
            if self._handle and self._offset != "-1" and handle != self._handle:
                raise BrokenProtocol(f"a handle became another without a 409: {self._handle} {handle}")
            if live and self.sse:
                self._stream(answer, handle)
            else:
                self._take(json.loads(answer.read()), answer.headers, handle)
        finally:
            connection.close()

    def _refused_with(self, answer: http.client.HTTPResponse, body: Any) -> None:
        if answer.status == 409:
            with self._lock:
                self._start_over(answer.headers["electric-handle"])
            if not self._handle or body != [{"headers": {"control": "must-refetch"}}]:
                raise BrokenProtocol(f"a 409 without a handle or must-refetch: {body}")
            return
        if answer.status == 400:
            with self._lock:
                self._start_over("")
                self._refused = json.dumps(body)
        elif answer.status not in (429, 503):
            raise BrokenProtocol(f"status {answer.status}: {body}")
        self._stopping.wait(RETRY_S)

    def _start_over(self, handle: str) -> None:
        self._rows, self._offset, self._cursor, self._handle = {}, "-1", "", handle
        self._complete, self._seen_lsn, self._repeated_lsn = False, 0, -1
        self._refetches += 1

    def _take(self, items: list[Any], headers: Any, handle: str) -> None:
        offset = headers["electric-offset"]
        if _place(offset) < _place(self._offset):
            raise BrokenProtocol(f"an offset went back: {self._offset} {offset}")
        with self._lock:
            self._complete = False
            self._apply(items)
            if ("electric-up-to-date" in headers) != self._complete:
                raise BrokenProtocol(f"header and items do not agree on up-to-date: {dict(headers)}")
            self._handle, self._offset = handle, offset
            self._cursor = headers.get("electric-cursor", "")
            self._refused = ""

    def _stream(self, answer: http.client.HTTPResponse, handle: str) -> None:
        batch: list[Any] = []
        for item in _events(answer):
            batch.append(item)
            control = item["headers"].get("control")
            if control == "must-refetch":
                raise BrokenProtocol("must-refetch within a stream is a 409 at the next request")
            if control == "up-to-date":
                with self._lock:
                    self._complete = False
                    self._apply(batch)
                    self._handle = handle
                    self._repeated_lsn = self._seen_lsn
                    self._offset = f"{self._seen_lsn}_0"
                batch = []
            if self._stopping.is_set():
                return

    def _apply(self, items: list[Any]) -> None:
        for item in items:
            headers = item["headers"]
            if "control" in headers:
                if headers["control"] == "up-to-date":
                    self._complete = True
                    self._seen_lsn = max(self._seen_lsn, int(headers["global_last_seen_lsn"]))
                continue
            xid = headers["txids"][0] if headers.get("txids") else None
            repeated = xid is not None and int(headers["lsn"]) <= self._repeated_lsn
            self._change(item, headers["operation"], xid, repeated)

    def _change(self, item: Any, operation: str, xid: int | None, repeated: bool) -> None:
        key, value = item["key"], item["value"]
        held = self._rows.get(key)
        if repeated and (held is None) is (operation != "insert"):
            return
        if held is not None and xid is not None and "key_change_from" in item["headers"] and not repeated:
            self.took_over.add(xid)
        elif (held is None) is (operation != "insert") and not repeated:
            raise BrokenProtocol(f"{operation} of a key that is {'not ' * (held is None)}there: {item}")
        if operation == "delete":
            del self._rows[key]
            assert xid is not None
            self.left.add((xid, tuple(value[name] for name in self._key)))
            return
        if self._full and operation == "update" and not repeated:
            assert held is not None
            wrong = {n: (v, held[n]) for n, v in item["old_value"].items() if held[n] != v}
            if wrong:
                raise BrokenProtocol(f"an old value is not what was: {wrong} {item}")
        whole = operation == "insert" or self._full
        row = value if whole else {**held, **value}  # type: ignore[dict-item]
        self._rows[key] = row
        names = self.columns if row.keys() >= set(self.columns) else []
        if names and not repeated:
            self.shown.add((xid, tuple(row[name] for name in names)))


def _place(offset: str) -> tuple[float, float]:
    first, _, second = offset.partition("_")
    return float(first), float(second or 0)


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    while True:
        line = answer.readline()
        if not line:
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
