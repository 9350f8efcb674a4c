"""The shards that a pipeline keeps of a world's tables, read as by any Python program: without `verify`.

This module parses the output of SELECT by the rules of docs/reference/types.md, without code of the platform. A row
with a value that its column cannot hold must be absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from oracle_tables import Table

import tidemill
from tidemill.capture.naming import table_name

PIPELINE = "world"
UNTIL_S = 240.0
"""Limit for a driver that was killed and starts while the world recovers from other faults."""
_MOMENT = re.compile(r"(.+?)(?:\+00)?$")
_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_UNITS = {"D": (1 << 31) - 1, "us": (1 << 63) - 1}


class _Absent(Exception):
    """Raised for a row whose value its column cannot hold."""


def pipeline_of(capture: str, tables: Sequence[Table]) -> str:
    """Return a pipeline file that keeps all these tables."""
    lines = [f"    p.table({shard_of(t)!r}, p.capture({capture!r}).table({_name(t)!r}))" for t in tables]
    return "\n".join(["def build(p):", *lines, ""])


def shard_of(table: Table) -> str:
    return f"t{table.number}"


def wanted_of(table: Table, rows: Sequence[Sequence[str | None]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return key → values from the output of `table.select()`."""
    makers = {column.name: _maker(column.bare) for column in table.columns}
    out = {}
    for values in rows:
        texts = dict(zip(table.names, values, strict=True))
        try:
            made = {name: None if text is None else makers[name](text) for name, text in texts.items()}
        except _Absent:
            continue
        out[tuple(made[name] for name in table.key)] = made
    return out


def found_of(config: Path, table: Table) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return key → values from the shard, as of its latest time."""
    with tidemill.connect(config) as cluster:
        read = cluster.table(shard_of(table)).to_arrow()
    columns = {name: _plain(read.column(name)) for name in table.names}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {tuple(row[name] for name in table.key): row for row in rows}


def unlike(
    wanted: dict[tuple[Any, ...], dict[str, Any]], found: dict[tuple[Any, ...], dict[str, Any]]
) -> list[tuple[Any, Any, Any]]:
    """Return (key, wanted, found) of each row that differs; NaN equals NaN, and −0 differs from 0."""
    return [
        (key, wanted.get(key), found.get(key))
        for key in wanted.keys() | found.keys()
        if key not in wanted or key not in found or repr(wanted[key]) != repr(found[key])
    ]


def _name(table: Table) -> str:
    return table_name(table.schema, table.name)


def _plain(column: pa.ChunkedArray) -> list[Any]:
    """Return dates and times as numbers: Python has none beyond the year 9999."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_float32(column.type):
        column = column.cast(pa.float64())
    return list(column.to_pylist())


def _maker(kind: str) -> Callable[[str], Any]:
    """Return the function that converts a value's text to the value in its shard."""
    if kind.endswith("[]"):
        element = _maker(kind.removesuffix("[]"))
        return lambda text: _elements(text, element)
    if kind in ("smallint", "integer", "bigint"):
        return int
    if kind == "double precision":
        return float
    if kind == "real":
        return lambda text: float(np.float32(text))
    if kind == "boolean":
        return lambda text: text == "true"
    if kind.startswith("numeric("):
        return _decimal
    if kind == "date":
        return lambda text: _number(text, "D")
    if kind.startswith("timestamp"):
        return lambda text: _number(text, "us")
    if kind == "bytea":
        return lambda text: bytes.fromhex(text[2:])
    return str


def _elements(text: str, element: Callable[[str], Any]) -> list[Any]:
    """Return the elements of an array of one dimension."""
    return [
        element(_ESCAPED.sub(r"\1", quoted)) if plain is None else None if plain == "NULL" else element(plain)
        for quoted, plain in (found.groups() for found in _ELEMENT.finditer(text))
    ]


def _decimal(text: str) -> Decimal:
    if text == "NaN":
        raise _Absent
    return Decimal(text)


def _number(text: str, unit: str) -> int:
    if text.endswith("infinity"):
        return -_UNITS[unit] if text.startswith("-") else _UNITS[unit]
    found = _MOMENT.match(text)
    assert found is not None
    moment, _, era = found[1].partition(" BC")
    if text.endswith(" BC"):
        year, _, rest = moment.partition("-")
        moment = f"{1 - int(year):05d}-{rest}" if int(year) > 1 else f"0000-{rest}"
    assert not era
    return int(np.datetime64(moment, unit).astype(np.int64))
