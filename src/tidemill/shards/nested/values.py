"""Nested values by columns: numbers that are equal exactly for equal values, sizes in memory, and maps in normal form.

Equality is bit by bit: NaN equals itself, 0.0 differs from -0.0, null equals null, and an empty array differs from
null. Maps are compared entry by entry, which is right because both are in normal form.

    normal map   no key is null, none occurs twice, and the keys ascend (texts byte by byte)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NULL = -1
DUPLICATE_KEY = "a map has a key twice"


def leaf_bits(array: Any) -> Any:
    """Return floats and times as the integers of their bits, which exist for every value; others unchanged."""
    if not (pa.types.is_floating(array.type) or pa.types.is_temporal(array.type)):
        return array
    return array.view({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[array.type.bit_width])


def values_equal(left: pa.Array, right: pa.Array) -> Mask:
    """Return for each place whether the two values are equal; null equals null."""
    numbers = value_numbers(pa.concat_arrays([left, right]))
    return np.asarray(numbers[: len(left)] == numbers[len(left) :], dtype=bool)


def value_numbers(array: pa.Array) -> Numbers:
    """Return a number for each value, equal exactly if the values are; -1 for null.

    Exact, without hashes: a number is an index into the distinct values, and a nested value is the sequence of the
    numbers inside of it.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        numbers = _rows_numbers([value_numbers(field) for field in array.flatten()], len(array))
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        inner = [value_numbers(child) for child in _children(array, offsets)]
        entries = inner[0] if len(inner) == 1 else _rows_numbers(inner, len(inner[0]))
        ends = pa.py_buffer((offsets - offsets[0]) * 8)
        texts = pa.Array.from_buffers(pa.large_binary(), len(array), [None, ends, pa.py_buffer(entries)])
        numbers = _indexes(texts)
    else:
        numbers = _indexes(leaf_bits(array))
    if array.null_count:
        numbers = np.where(_nulls(array), _NULL, numbers)
    return numbers


def _rows_numbers(columns: list[Numbers], count: int) -> Numbers:
    """Return a number for each row of columns of numbers."""
    if len(columns) == 1:
        return columns[0]
    rows = np.ascontiguousarray(np.stack(columns, axis=1))
    kind = pa.binary(8 * len(columns))
    return _indexes(pa.Array.from_buffers(kind, count, [None, pa.py_buffer(rows)]))


def _indexes(array: pa.Array) -> Numbers:
    found = array.dictionary_encode().indices
    return np.asarray(found.fill_null(_NULL) if found.null_count else found, dtype=np.int64)


def _nulls(array: pa.Array) -> Mask:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)


def _offsets(array: pa.Array) -> Numbers:
    """Return where each value of a list or map begins among the children, and where the last one ends."""
    if not len(array):
        return np.zeros(1, dtype=np.int64)
    found = np.frombuffer(array.buffers()[1], dtype=np.int32, count=len(array) + 1, offset=4 * array.offset)
    return found.astype(np.int64)


def _children(array: pa.Array, offsets: Numbers) -> list[pa.Array]:
    """Return the elements, or the keys and the values, from the first to the last offset."""
    every = [array.keys, array.items] if pa.types.is_map(array.type) else [array.values]
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    return [child.slice(first, count) for child in every]


def value_sizes(array: pa.Array) -> Numbers:
    """Return the size of each value in memory, in bytes."""
    kind = array.type
    if pa.types.is_struct(kind):
        return np.asarray(sum(value_sizes(field) for field in array.flatten()), dtype=np.int64)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        inner = np.add.reduce([value_sizes(child) for child in _children(array, offsets)], dtype=np.int64)
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(inner)])
        places = offsets - offsets[0]
        return np.asarray(4 + sums[places[1:]] - sums[places[:-1]], dtype=np.int64)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return np.asarray(4 + np.diff(_offsets(array)), dtype=np.int64)
    return np.full(len(array), -(-kind.bit_width // 8), dtype=np.int64)


# types --------------------------------------------------------------------------------------------
def inner_fields(kind: pa.DataType) -> list[pa.Field]:
    """Return the fields directly within a type: element, key and value, or fields; none of a scalar type."""
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(at) for at in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def map_leaf_types(kind: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with each scalar type within it converted; a scalar type itself converted."""
    if not pa.types.is_nested(kind):
        return convert(kind)
    fields = [field.with_type(map_leaf_types(field.type, convert)) for field in inner_fields(kind)]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    return pa.map_(*fields) if pa.types.is_map(kind) else pa.list_(*fields)


def contains_map(kind: pa.DataType) -> bool:
    """Return whether a map is anywhere within the type."""
    return pa.types.is_map(kind) or any(contains_map(field.type) for field in inner_fields(kind))


# normal maps --------------------------------------------------------------------------------------


def normalize_maps(array: pa.Array) -> pa.Array:
    """Return the values with all maps in normal form. Raises ValueError if a map has a key twice."""
    kind = array.type
    if not contains_map(kind):
        return array
    if pa.types.is_struct(kind):
        fields = [normalize_maps(field) for field in array.flatten()]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=_null_mask(array))
    offsets = _offsets(array)
    children = _children(array, offsets)
    if array.null_count:  # a null value may have entries
        lengths = np.where(_nulls(array), 0, np.diff(offsets))
        kept = pa.array(np.repeat(~_nulls(array), np.diff(offsets)))
        children = [child.filter(kept) for child in children]
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    places = pa.array((offsets - offsets[0]).astype(np.int32))
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(places, normalize_maps(children[0]), type=kind, mask=_null_mask(array))
    keys, items = _sorted_entries(children[0], normalize_maps(children[1]), offsets)
    return pa.MapArray.from_arrays(places, keys, items, type=kind, mask=_null_mask(array))


def _null_mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


def _sorted_entries(keys: pa.Array, items: pa.Array, offsets: Numbers) -> tuple[pa.Array, pa.Array]:
    if len(keys) < 2:
        return keys, items
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    same = rows[1:] == rows[:-1]
    if not (same & ~_ascends(keys)).any():
        return keys, items
    order = pc.sort_indices(pa.table({"row": rows, "key": keys}), [("row", "ascending"), ("key", "ascending")])
    keys, items = keys.take(order), items.take(order)
    if (same & ~_ascends(keys)).any():  # `same` is still right, because rows stay together
        raise ValueError(DUPLICATE_KEY)
    return keys, items


def _ascends(keys: pa.Array) -> Mask:
    """Return for each key but the last whether it is less than the next one."""
    return np.asarray(pc.less(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False), dtype=bool)
