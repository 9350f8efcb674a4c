"""Prints nested Arrow values as JSON, each part of a value as PostgreSQL's `to_json` prints it.

array, struct, map   array, object, object     date, binary         string of its text
bool, numbers        unchanged                 timestamp            string: 2024-01-31T10:20:30.5+00:00
NaN, Infinity        strings                   null on any level    null
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from tidemill.shapes.shards.pg_text import column_text

if TYPE_CHECKING:
    import pyarrow as pa


def nested_texts(array: pa.Array) -> list[str | None]:
    """Return the values as JSON, None for NULL."""
    return [None if text == "null" else text for text in _texts(array)]


def _texts(array: pa.Array) -> list[str]:
    import pyarrow as pa

    kind = array.type
    if not pa.types.is_nested(kind):
        spell = _leaf_spelling(kind)
        return ["null" if text is None else spell(text) for text in column_text(array)]
    valid = array.is_valid().to_pylist()
    if pa.types.is_struct(kind):
        names = [_string(field.name) for field in kind]
        columns = [_texts(field) for field in array.flatten()]
        rows = (_object(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        return [row if is_valid else "null" for row, is_valid in zip(rows, valid, strict=True)]
    offsets = array.offsets.to_pylist()
    first, count = offsets[0], offsets[-1] - offsets[0]
    bounds = [(start - first, end - first) for start, end in pairwise(offsets)]
    if pa.types.is_map(kind):
        keys = [_string(cast(str, text)) for text in column_text(array.keys.slice(first, count))]
        items = _texts(array.items.slice(first, count))
        texts = [_object(zip(keys[start:end], items[start:end], strict=True)) for start, end in bounds]
    else:
        elements = _texts(array.values.slice(first, count))
        texts = [f"[{','.join(elements[start:end])}]" for start, end in bounds]
    return [text if is_valid else "null" for text, is_valid in zip(texts, valid, strict=True)]


def _object(pairs: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}"


def _leaf_spelling(kind: pa.DataType) -> Callable[[str], str]:
    """Return how the text of a scalar value is spelled in JSON."""
    import pyarrow as pa

    if pa.types.is_floating(kind):
        return lambda text: text if text[-1].isdigit() else f'"{text}"'  # NaN, Infinity
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return str
    if pa.types.is_timestamp(kind):
        return _moment_zoned if kind.tz else _moment
    return _string


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _moment(text: str) -> str:
    return f'"{text.replace(" ", "T", 1)}"'


def _moment_zoned(text: str) -> str:
    return _moment(text.replace("+00", "+00:00", 1))
