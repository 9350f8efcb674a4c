"""JSON values and CSV lines for programs. Pure.

CSV is RFC 4180 with "\\n", in UTF-8. As in PostgreSQL's COPY, an empty field is null and "" is the empty string. Lists
and objects are JSON in one field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

Row = Mapping[str, Any]

_QUOTED = frozenset(',"\r\n')


def to_json(value: Any) -> str:
    """Return a value as one line of JSON. A float that JSON does not have is a string, such as "NaN"."""
    try:
        return json.dumps(value, default=_to_plain, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(_with_plain_parts(value), default=_to_plain)


def _to_plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date | datetime | time) else str(value)


def _with_plain_parts(value: Any) -> Any:
    """Return a value without floats and keys that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(_to_plain(key)): _with_plain_parts(v) for key, v in value.items()}
    return [_with_plain_parts(part) for part in value] if isinstance(value, list | tuple) else value


def csv_lines(rows: Sequence[Row], fields: Sequence[str] = ()) -> Iterator[str]:
    """Yield the header and one line per row, each without its line ending. Columns are `fields`, then further keys of
    the rows. Nothing is yielded without columns."""
    columns = list(dict.fromkeys([*fields, *(key for row in rows for key in row)]))
    if not columns:
        return
    yield csv_line(columns)
    for row in rows:
        yield csv_line(row.get(column) for column in columns)


def csv_line(values: Iterable[Any]) -> str:
    return ",".join(_csv_field(value) for value in values)


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list | tuple):
        text = to_json(value)
    else:
        text = str(_to_plain(value))
    if not text or text != text.strip() or not _QUOTED.isdisjoint(text):
        return '"' + text.replace('"', '""') + '"'
    return text
