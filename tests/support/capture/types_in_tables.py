"""The values that a table stores for texts of PostgreSQL, of every type, by SQL and Python alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from support.capture.column_types import quoted
from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.nested.values import map_leaf_types
from tidemill.shards.parts.pg_columns import element_type
from tidemill.shards.parts.schema import TIMESTAMPS

INFINITE = {"timestamp": 2**63 - 1, "timestamp_ntz": 2**63 - 1, "date": 2**31 - 1}


def expression(column: Column) -> str:
    """SQL for the number that a shard stores for a time, and for the JSON of an array of such texts; for other types
    the value itself.
    """
    name = quoted(column.name)
    if is_nested(column.type):
        return elements(name, number_of(f"{name}[n]", element_type(column.type)))
    return number_of(name, column.type)


def number_of(name: str, kind: str) -> str:
    if kind in TIMESTAMPS:
        number = f"(extract(epoch FROM {name}) * 1000000)::bigint"
    elif kind == "date":
        number = f"({name} - DATE '1970-01-01')"
    else:
        return name
    return f"CASE WHEN isfinite({name}) THEN {number}::text ELSE {name}::text END"


def elements(name: str, expression: str) -> str:
    text = f"CASE WHEN {name}[n] IS NOT DISTINCT FROM NULL THEN NULL ELSE format('%s', {expression}) END"
    listed = f"SELECT {text} FROM generate_subscripts({name}, 1) AS n ORDER BY n"
    return f"CASE WHEN {name} IS NOT NULL THEN to_json(ARRAY({listed})) END"


def expected(text: str | None, column: Column) -> Any:
    if text is None:
        return None
    if is_nested(column.type):
        return [expected(each, Column(column.name, element_type(column.type))) for each in json.loads(text)]
    if column.type in INFINITE:
        return {"infinity": INFINITE[column.type], "-infinity": -INFINITE[column.type]}.get(text) or int(text)
    if column.type.startswith("int"):
        return int(text)
    if column.type == "float32":
        return float(np.float32(text))
    if column.type == "float64":
        return float(text)
    if column.type.startswith("decimal"):
        return Decimal(text)
    if column.type == "binary":
        return bytes.fromhex(text.removeprefix("\\x"))
    return text == "t" if column.type == "bool" else text


def kept(array: pa.ChunkedArray, column: Column) -> list[Any]:
    widths = {64: pa.int64(), 32: pa.int32()}
    array = array.cast(map_leaf_types(array.type, lambda t: widths[t.bit_width] if pa.types.is_temporal(t) else t))
    found: list[Any] = array.to_pylist()
    return found


def same(left: Any, right: Any) -> bool:
    """Compare values: NaN equals itself, and 0.0 differs from -0.0."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, float) and isinstance(right, float) and math.copysign(1, left) != math.copysign(1, right):
        return False
    return type(left) is type(right) and bool(left == right)


def check_columns(rows: pa.Table, schema: Sequence[Column], wanted: dict[str | None, list[str | None]]) -> None:
    """Compare the columns with `wanted`, the rows of SELECT by the text of their id."""
    ids = [str(i) for i in rows.column("id").to_pylist()]
    for n, column in enumerate(schema):
        for i, value in zip(ids, kept(rows.column(column.name), column), strict=True):
            assert same(value, expected(wanted[i][n], column)), (column, i, value, wanted[i][n])
