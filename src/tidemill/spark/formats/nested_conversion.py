"""Values of a writer's arrays, maps and records → columns of nested types.

    array     list of values                     array<T>
    map       dict from text or an integer       map<K,V>
    record    dict from the name of a field      struct<…>: a field that the writer lacks is null, others are ignored

The type of the column decides how deep the two types are compared, so a recursive type of a writer is no problem. The
values inside are converted as those of a column (conversion.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import ArrayType, MapType, StructType, is_nested, nested_type
from tidemill.shards.nested.values import normalize_maps
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.json.nested_values import nulls_of, offsets_of

if TYPE_CHECKING:
    from tidemill.spark.formats.conversion import SourceType

ELEMENT, VALUE = "element", "value"
_KINDS: Mapping[type, str] = {ArrayType: "array", MapType: "map", StructType: "record"}


class Parts(NamedTuple):
    """Inside of a writer's type. `kind`: array, map or record; `fields`: its fields, or the type of its elements or
    values under ELEMENT or VALUE; `key`: of a map, string or int."""

    kind: str
    fields: Mapping[str, SourceType]
    key: str = "string"


ConvertValues = Callable[[Sequence[Any]], pa.Array]
FindLeaf = Callable[["SourceType", Column], ConvertValues | None]


def nested_conversion(source: SourceType, type_name: str, find_leaf: FindLeaf) -> ConvertValues | None:
    """Return the conversion of decoded values to a nested type, or None if no value of the source can be one of it."""
    convert = _find(source, type_name, find_leaf)
    if convert is None:
        return None
    return lambda values: normalize_maps(convert(values))


def _find(source: SourceType, type_name: str, find_leaf: FindLeaf) -> ConvertValues | None:
    if source.kind == "null":
        return lambda values: pa.nulls(len(values), arrow_type(type_name))
    if not is_nested(type_name):
        return find_leaf(source, Column("", type_name))
    kind, parts = nested_type(type_name), source.parts() if source.parts is not None else None
    target = arrow_type(type_name)
    if parts is None or parts.kind != _KINDS[type(kind)]:
        return None
    if isinstance(kind, ArrayType):
        element = _find(parts.fields[ELEMENT], kind.element, find_leaf)
        return None if element is None else lambda values: _arrays(values, element, target)
    if isinstance(kind, MapType):
        value = _find(parts.fields[VALUE], kind.value, find_leaf)
        if value is None or (parts.key == "string") != (kind.key == "string"):
            return None
        return lambda values: _maps(values, value, target)
    assert isinstance(kind, StructType)
    fields: list[tuple[str, ConvertValues]] = []
    for name, inner in kind.fields:
        found = _find(parts.fields[name], inner, find_leaf) if name in parts.fields else _nulls(arrow_type(inner))
        if found is None:
            return None
        fields.append((name, found))
    return lambda values: _structs(values, fields, target)


def _nulls(kind: pa.DataType) -> ConvertValues:
    return lambda values: pa.nulls(len(values), kind)


def _arrays(values: Sequence[Any], element: ConvertValues, target: pa.DataType) -> pa.Array:
    inner = element(list(chain.from_iterable(value for value in values if value is not None)))
    return pa.ListArray.from_arrays(offsets_of(values), inner, type=target, mask=nulls_of(values))


def _maps(values: Sequence[Any], convert: ConvertValues, target: pa.DataType) -> pa.Array:
    keys = [key for value in values if value is not None for key in value]
    items = convert([item for value in values if value is not None for item in value.values()])
    arrays = offsets_of(values), pa.array(keys, target.key_type), items
    return pa.MapArray.from_arrays(*arrays, type=target, mask=nulls_of(values))


def _structs(values: Sequence[Any], fields: list[tuple[str, ConvertValues]], target: pa.DataType) -> pa.Array:
    columns = [convert([None if value is None else value.get(name) for value in values]) for name, convert in fields]
    return pa.StructArray.from_arrays(columns, fields=list(target), mask=nulls_of(values))
