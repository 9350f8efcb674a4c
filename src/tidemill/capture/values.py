"""Rows as JSON bytes for topics: numbers, booleans and null as such, everything else in PostgreSQL's text form.

    smallint integer bigint          JSON number, the digits of PostgreSQL's text
    real, double precision           JSON number; NaN and ±Infinity have none and travel as strings
    boolean                          true / false
    anything else                    JSON string (numeric, temporal, text, uuid, json, arrays, domains …)
    NULL                             null

One encoder per relation: names are escaped once, and a row costs one join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring

from tidemill.capture.changes import Column, Relation, Row

_escape: Callable[[str], str] = encode_basestring

BOOL, INT8, INT2, INT4, FLOAT4, FLOAT8 = 16, 20, 21, 23, 700, 701
_NOT_JSON_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})


def _integer(text: str) -> str:
    return text


def _float(text: str) -> str:
    return f'"{text}"' if text in _NOT_JSON_NUMBERS else text


def _boolean(text: str) -> str:
    return "true" if text[0] == "t" else "false"


_ENCODERS: dict[int, Callable[[str], str]] = {
    INT2: _integer,
    INT4: _integer,
    INT8: _integer,
    FLOAT4: _float,
    FLOAT8: _float,
    BOOL: _boolean,
}


class RowEncoder:
    """`key(row)` = object of the key columns in key order; `value(row)` = object of all columns in table order."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        self._value = _plan(relation.columns)
        self._key = _plan(relation.key_columns)

    def key(self, row: Row) -> bytes:
        return _encode(self._key, row)

    def value(self, row: Row) -> bytes:
        return _encode(self._value, row)


_Plan = list[tuple[str, str, Callable[[str], str]]]


def _plan(columns: Sequence[Column]) -> _Plan:
    return [(c.name, f"{_escape(c.name)}:", _ENCODERS.get(c.type_oid, _escape)) for c in columns]


def _encode(plan: _Plan, row: Row) -> bytes:
    parts = []
    for name, prefix, encode in plan:
        text = row[name]
        parts.append(f"{prefix}null" if text is None else prefix + encode(text))
    return ("{" + ",".join(parts) + "}").encode()
