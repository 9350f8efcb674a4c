"""Conversion of records to lines and lines to records. Pure.

text    [headers TAB] [key TAB] value        raw bytes
JSON    {"topic", "partition", "offset", "timestamp", "key", "value", "headers": [[name, value], …]}
        bytes are a string if they are UTF-8, else {"base64": "…"}; what is absent is null
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import orjson

from tidemill.base.errors import InvalidError
from tidemill.cli.output.data_lines import csv_line

Header = tuple[str, bytes | None]


class LineRecord(msgspec.Struct, frozen=True):
    """Record to produce. `partition` −1 means by key; `timestamp_ms` −1 means now."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    partition: int = -1
    timestamp_ms: int = -1


class LineParser(Protocol):
    """Parser of one line to one record."""

    def read(self, line: bytes) -> LineRecord:
        """Parse a line without its line ending. Raises InvalidError."""
        ...


class TextLineParser:
    """Parser of text lines. An empty `separator` means lines without a key."""

    def __init__(self, separator: str, headers: Sequence[tuple[str, str]], *, tombstones: bool) -> None:
        self._separator = separator.encode()
        self._headers = tuple((name, value.encode()) for name, value in headers)
        self._tombstones = tombstones

    def read(self, line: bytes) -> LineRecord:
        key: bytes | None = None
        value: bytes | None = line
        if self._separator:
            key, found, value = line.partition(self._separator)
            if not found:
                raise InvalidError(
                    f"the line has no key: line={line[:80]!r}.",
                    fix=f"Write the key and {self._separator.decode()!r} before the value.",
                )
        if self._tombstones and not value:
            value = None
        return LineRecord(key, value, self._headers)


class JsonLineParser:
    """Reader of JSON lines. It ignores topic and offset: a copy gets new offsets."""

    def __init__(self, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._headers = tuple((name, value.encode()) for name, value in headers)

    def read(self, line: bytes) -> LineRecord:
        try:
            found: Any = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidError(f"the line is not JSON: line={line[:80]!r} cause={error}.") from error
        if not isinstance(found, dict) or not isinstance(found.get("headers", []), list):
            raise InvalidError(f"the line is not a record: line={line[:80]!r}.", fix='Write {"key": …, "value": …}.')
        pairs = found.get("headers") or []
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            raise InvalidError(f"headers are not pairs: line={line[:80]!r}.", fix='Write [["name", "value"], …].')
        headers = tuple((name, _decode_bytes(value, line)) for name, value in pairs)
        return LineRecord(
            _decode_bytes(found.get("key"), line),
            _decode_bytes(found.get("value"), line),
            headers + self._headers,
            _checked_number(found, "partition", line),
            _checked_number(found, "timestamp", line),
        )


def _decode_bytes(value: Any, line: bytes) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error as error:
            raise InvalidError(f"invalid base64: line={line[:80]!r} cause={error}.") from error
    raise InvalidError(
        f"the value is neither text nor base64: line={line[:80]!r}.", fix='Write a string, {"base64": "…"} or null.'
    )


def _checked_number(found: dict[str, Any], name: str, line: bytes) -> int:
    value = found.get(name, -1)
    if value is None:
        return -1
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value < 2**63:
        raise InvalidError(f"not a number: name={name} line={line[:80]!r}.")
    return value


def format_text_line(message: Any, *, keys: bool, headers: bool) -> bytes:
    """Format a `confluent_kafka.Message` as a text line."""
    parts = []
    if headers:
        found = [f"{name}=".encode() + (value or b"") for name, value in message.headers() or ()]
        parts.append(b",".join(found))
    if keys:
        parts.append(message.key() or b"")
    parts.append(message.value() or b"")
    return b"\t".join(parts) + b"\n"


FIELDS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")


def format_json_line(message: Any) -> bytes:
    return orjson.dumps(_record_fields(message)) + b"\n"


def format_csv_line(message: Any) -> bytes:
    """Format a message as a line of CSV with the columns `FIELDS`."""
    return csv_line(_record_fields(message).values()).encode() + b"\n"


def _record_fields(message: Any) -> dict[str, Any]:
    kind, timestamp_ms = message.timestamp()
    return {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": timestamp_ms if kind else None,
        "key": _encode_bytes(message.key()),
        "value": _encode_bytes(message.value()),
        "headers": [[name, _encode_bytes(value)] for name, value in message.headers() or ()],
    }


def _encode_bytes(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
