"""Log items as the client reads them: JSON bytes, rendered once when they enter the log.

    {"key": …, "value": {column: text|null}, "old_value"?: …, "headers": {"operation", "relation", …, "last"?}}

Values are PostgreSQL's text or null. Booleans are always `true`/`false`, so that the base and the stream agree
(Electric itself writes `t`/`f` in the stream; its clients read both). Keys have the form `"schema"."table"/"v1"/"v2"`:
`/` is doubled, dots are doubled in the relation part, NULL is `_`. Without a primary key all columns belong to the key,
sorted by name, as in Electric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import orjson

from tidemill.shapes.log.log_offset import LogOffset

Values = Mapping[str, str | None]
Operation = Literal["insert", "update", "delete"]

MUST_REFETCH = b'[{"headers":{"control":"must-refetch"}}]'


class LogItem(msgspec.Struct, frozen=True, gc=False):
    """One rendered item of a log."""

    offset: LogOffset
    json: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.json) + ITEM_BYTES


ITEM_BYTES = 200
"""Memory of an item apart from its JSON: the Python objects of its place in the log."""


class KeyWriter:
    """Writes the keys of the rows of one relation."""

    def __init__(self, schema: str, table: str, key_columns: Sequence[str]) -> None:
        self._prefix = ".".join(f'"{part.replace("/", "//").replace(".", "..")}"' for part in (schema, table))
        self._columns = tuple(key_columns)

    def key(self, row: Values) -> str:
        columns = self._columns or sorted(row)
        return self._prefix + "".join([_key_section(row.get(column)) for column in columns])


def _key_section(value: str | None) -> str:
    return "/_" if value is None else f'/"{value.replace("/", "//")}"'


def render_item(
    key: str,
    value: Values,
    headers: Mapping[str, object],
    old_value: Values | None = None,
) -> bytes:
    """Render an item as JSON. Its headers come last, so that `mark_last` can add to them."""
    item: dict[str, object] = {"key": key, "value": value}
    if old_value is not None:
        item["old_value"] = old_value
    item["headers"] = headers
    return orjson.dumps(item)


def mark_last(item: bytes) -> bytes:
    """Return the item with `last: true`: it ends its transaction."""
    return item[:-2] + b',"last":true}}'


def up_to_date_item(last_seen: int) -> bytes:
    """Return the control item that ends a complete response; `last_seen` is written in decimal, as the client reads
    it."""
    return b'{"headers":{"control":"up-to-date","global_last_seen_lsn":"%d"}}' % max(0, last_seen)


def snapshot_end_item(xmin: int, xmax: int, in_progress: Sequence[int]) -> bytes:
    return orjson.dumps(
        {
            "headers": {
                "control": "snapshot-end",
                "xmin": str(xmin),
                "xmax": str(xmax),
                "xip_list": [str(xid) for xid in in_progress],
            }
        }
    )


_BOOLEAN_TEXT = {"t": "true", "f": "false"}


def spell_booleans(row: dict[str, str | None], columns: Sequence[str]) -> None:
    """Replace `t`/`f` in the named columns by `true`/`false`, in place."""
    for column in columns:
        value = row.get(column)
        if value is not None:
            row[column] = _BOOLEAN_TEXT.get(value, value)
