"""Nested values in JSON: as the types that msgspec decodes, and from its objects to Arrow.

    array    list                  element null: null
    struct   object                an absent field is null, unknown fields are ignored; of a field that occurs twice
                                   the last counts, as in a record
    map      object                its names are the keys, of an integer key as digits; a name that occurs twice: error

The values inside follow the rules of columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import ArrayType, MapType, StructType, nested_type
from tidemill.shards.nested.values import normalize_maps
from tidemill.shards.parts.schema import FLOATS, arrow_type

LeafToArrow = Callable[[Sequence[Any], Column], pa.Array]

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


class MapKey:
    """Name in a map. All are different, so that a name that occurs twice is seen."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def decode_hook(kind: type, value: Any) -> Any:
    """Convert a name of a map, for msgspec's `dec_hook`."""
    if kind is MapKey:
        return MapKey(value)
    raise NotImplementedError(kind)


def nested_field(type_name: str, leaf: Callable[[str], Any]) -> Any:
    """Return the Python type of a column; `leaf` returns that of a scalar type. Null is allowed everywhere."""
    kind = nested_type(type_name)
    if kind is None:
        return leaf(type_name)
    if isinstance(kind, ArrayType):
        return list[nested_field(kind.element, leaf)] | None  # type: ignore[misc]
    if isinstance(kind, MapType):
        return dict[MapKey, nested_field(kind.value, leaf)] | None  # type: ignore[misc]
    fields = [(f"f{at}", nested_field(inner, leaf), None) for at, (_, inner) in enumerate(kind.fields)]
    rename = {f"f{at}": name for at, (name, _) in enumerate(kind.fields)}
    return msgspec.defstruct("Nested", fields, rename=rename, gc=False, kw_only=True) | None


def nested_to_arrow(values: Sequence[Any], type_name: str, leaf: LeafToArrow) -> pa.Array:
    """Convert decoded values. `leaf`: converts values of a scalar type.

    Raises ValueError for a map with a key twice, and what `leaf` raises.
    """
    return normalize_maps(_to_arrow(values, type_name, leaf))


def _to_arrow(values: Sequence[Any], type_name: str, leaf: LeafToArrow) -> pa.Array:
    kind = nested_type(type_name)
    if kind is None:
        found = [_signed(value) for value in values] if type_name in FLOATS else values
        return leaf(found, Column("", type_name))
    target = arrow_type(type_name)
    mask = nulls_of(values)
    if isinstance(kind, StructType):
        fields = [
            _to_arrow([None if value is None else getattr(value, f"f{at}") for value in values], inner, leaf)
            for at, (_, inner) in enumerate(kind.fields)
        ]
        return pa.StructArray.from_arrays(fields, fields=list(target), mask=mask)
    places = offsets_of(values)
    filled = [value for value in values if value is not None]
    if isinstance(kind, ArrayType):
        inner = _to_arrow(list(chain.from_iterable(filled)), kind.element, leaf)
        return pa.ListArray.from_arrays(places, inner, type=target, mask=mask)
    keys = _keys_to_arrow([key.text for value in filled for key in value], kind.key)
    items = _to_arrow([item for value in filled for item in value.values()], kind.value, leaf)
    return pa.MapArray.from_arrays(places, keys, items, type=target, mask=mask)


def nulls_of(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def offsets_of(values: Sequence[Any]) -> pa.Array:
    """Return the offsets of lists or maps among their elements or entries. A null has none."""
    return pa.array(np.cumsum([0, *(0 if value is None else len(value) for value in values)]), pa.int32())


def _keys_to_arrow(texts: list[str], type_name: str) -> pa.Array:
    if type_name == "string":
        return pa.array(texts, pa.string())
    odd = next((text for text in texts if not _INTEGER.fullmatch(text)), None)
    if odd is not None:
        raise ValueError(f"the key of a map is not an integer: key={odd[:80]!r}")
    return pa.array([int(text) for text in texts], arrow_type(type_name))


def _signed(value: Any) -> Any:
    """Return a float that was kept as text, because msgspec reads the number -0 as an integer; others unchanged."""
    if not isinstance(value, msgspec.Raw):
        return value
    text = bytes(value)
    return None if text == b"null" else float(text)
