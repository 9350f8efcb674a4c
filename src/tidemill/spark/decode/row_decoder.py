"""JSON objects → rows with fields c0, c1, … by a list of columns; rows → Arrow columns, with the invalid rows named;
columns → one command table: live rows, then deletions with key columns only, with normalized keys.

The fast path is one call per row and one array per column. A block that cannot be converted is bisected down to the
rows that the column cannot represent: the others are decoded as if those did not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shards.api import TIME, Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested, leaf_types
from tidemill.shards.parts.key_hash import normalize_keys
from tidemill.shards.parts.schema import FLOATS, arrow_type
from tidemill.spark.decode.json.nested_values import decode_hook, nested_field
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, command_schema

NESTED_MAX = 500
"""A value nested deeper is rejected. msgspec has a limit that depends on the stack of the caller, which differs between
a driver and a task."""
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_MINUS_ZERO = re.compile(rb"-0\s*[,}\]]")

ToArrow = Callable[[Sequence[Any], Column], pa.Array]


class RecordPlaces(Protocol):
    """Time, offset and partition of every record."""

    @property
    def times(self) -> npt.NDArray[np.int64]: ...
    @property
    def offsets(self) -> npt.NDArray[np.int64]: ...
    def partitions_at(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]: ...


class RowDecoder(Protocol):
    def decode(self, data: bytes, /) -> Any:
        """Return an object with fields c0, c1, …. Raises exceptions of any type, depending on the bytes."""
        ...


def check_nesting(data: bytes) -> None:
    """Raise ValueError for JSON that is nested deeper than NESTED_MAX."""
    if data.count(b"[") + data.count(b"{") <= NESTED_MAX:
        return
    text = np.frombuffer(_STRINGS.sub(b"", data), dtype=np.uint8) | 0x20  # [ and {, ] and } differ in this bit
    steps = (text == ord("{")).astype(np.int32) - (text == ord("}"))
    if int(steps.cumsum().max(initial=0)) > NESTED_MAX:
        raise ValueError(f"nested deeper than {NESTED_MAX}")


def row_decoder(columns: Sequence[Column], kinds: Mapping[str, Any], other: Any, *, exact: bool = False) -> RowDecoder:
    """Return a decoder. `kinds`: column type → Python type. `exact`: an object has exactly these columns."""
    plain = _plain_decoder(columns, kinds, other, exact)
    signed = [(f"c{i}", c.name) for i, c in enumerate(columns) if c.type in FLOATS]
    raw = {**kinds, **dict.fromkeys(FLOATS, msgspec.Raw)}
    nested = [
        (f"c{i}", c.name, msgspec.json.Decoder(_kind_of(c, raw, other), dec_hook=decode_hook))
        for i, c in enumerate(columns)
        if is_nested(c.type) and c.type not in kinds and not {*FLOATS}.isdisjoint(leaf_types(c.type))
    ]
    return _SignedZeroDecoder(plain, signed, nested) if signed or nested else plain


def _kind_of(column: Column, kinds: Mapping[str, Any], other: Any) -> Any:
    if column.type in kinds:
        return kinds[column.type]
    return nested_field(column.type, lambda leaf: kinds.get(leaf, other))


def _plain_decoder(columns: Sequence[Column], kinds: Mapping[str, Any], other: Any, exact: bool) -> RowDecoder:
    types = [_kind_of(c, kinds, other) for c in columns]
    if any(_is_unsupported_name(c.name) for c in columns):
        return _AnyNameDecoder(columns, types, exact)
    fields = [(f"c{i}", t) if exact else (f"c{i}", t, None) for i, t in enumerate(types)]
    rename = {f"c{i}": c.name for i, c in enumerate(columns)}
    kind = msgspec.defstruct("Row", fields, rename=rename, gc=False, kw_only=True, forbid_unknown_fields=exact)
    return msgspec.json.Decoder(kind, dec_hook=decode_hook)


def _is_unsupported_name(name: str) -> bool:
    """Return whether msgspec cannot use the name for a struct field."""
    return '"' in name or "\\" in name or any(ord(c) < 32 for c in name)


class _AnyNameDecoder:
    """Decoder for columns with a quote, a backslash or a control character in a name; several times slower."""

    def __init__(self, columns: Sequence[Column], types: Sequence[Any], exact: bool) -> None:
        self._fields = [
            (f"c{i}", c.name, msgspec.json.Decoder(t, dec_hook=decode_hook))
            for i, (c, t) in enumerate(zip(columns, types, strict=True))
        ]
        self._row: type = msgspec.defstruct("Row", [(f"c{i}", Any, None) for i in range(len(columns))], gc=False)
        self._names = {c.name for c in columns}
        self._object = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._exact = exact

    def decode(self, data: bytes) -> Any:
        found = self._object.decode(data)
        if self._exact and found.keys() != self._names:
            raise msgspec.ValidationError("Object has other fields")
        return self._row(**{c: kind.decode(found[name]) for c, name, kind in self._fields if name in found})


class _SignedZeroDecoder:
    """Decoder that keeps the sign of zero: msgspec reads the number -0 as an integer, so as 0; -0.0 it reads
    correctly."""

    def __init__(
        self, plain: RowDecoder, floats: Sequence[tuple[str, str]], nested: Sequence[tuple[str, str, RowDecoder]]
    ) -> None:
        self._plain = plain
        self._floats = floats
        self._nested = nested
        """Columns with floats inside, with decoders that keep these as text."""
        self._object = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def decode(self, data: bytes) -> Any:
        row = self._plain.decode(data)
        if _MINUS_ZERO.search(data):
            found = self._object.decode(data)
            for field, name in self._floats:
                if getattr(row, field) == 0 and bytes(found[name]) == b"-0":
                    setattr(row, field, -0.0)
            for field, name, decoder in self._nested:
                if name in found:
                    setattr(row, field, decoder.decode(bytes(found[name])))
        return row


def rows_to_columns(
    columns: Sequence[Column], rows: list[Any], places: list[int], dead: list[tuple[int, str]], to_arrow: ToArrow
) -> tuple[dict[str, pa.Array], list[int]]:
    """Return (columns of the valid rows, their places); the others are added to `dead` with the reason."""
    values = ([getattr(row, f"c{i}") for row in rows] for i in range(len(columns)))
    return values_to_columns(columns, values, places, dead, to_arrow)


def values_to_columns(
    columns: Sequence[Column],
    values: Iterable[Sequence[Any]],
    places: list[int],
    dead: list[tuple[int, str]],
    to_arrow: ToArrow,
) -> tuple[dict[str, pa.Array], list[int]]:
    """Convert the values of each column, as `rows_to_columns`; they may be Arrow arrays, too."""
    bad: dict[int, str] = {}
    out: dict[str, pa.Array] = {}
    for column, found in zip(columns, values, strict=True):
        try:
            out[column.name] = to_arrow(found, column)
        except BaseException as error:
            if not is_fault(error):
                raise
            out[column.name] = _convert_by_bisection(found, column, to_arrow, bad)
    if not bad:
        return out, places
    dead += [(places[at], reason) for at, reason in sorted(bad.items())]
    good = [at for at in range(len(places)) if at not in bad]
    taken = pa.array(good, pa.int64())
    return {name: array.take(taken) for name, array in out.items()}, [places[at] for at in good]


def _convert_by_bisection(values: Sequence[Any], column: Column, to_arrow: ToArrow, bad: dict[int, str]) -> pa.Array:
    """Return the whole column, with null for values that it cannot represent, which are added to `bad`.

    Neighbours do not influence a value: a block that fails although each of its values is valid (two forms of a
    timestamp, which one call does not mix) is assembled from its halves.
    """
    parts: list[pa.Array] = []
    open_ranges = [(0, len(values))]
    while open_ranges:
        first, last = open_ranges.pop()
        try:
            parts.append(to_arrow(values[first:last], column))
        except BaseException as error:
            if not is_fault(error):
                raise
            if last - first > 1:
                middle = (first + last) // 2
                open_ranges += [(middle, last), (first, middle)]
                continue
            bad.setdefault(first, f"column={column.name}: {error_sentence(error)}")
            parts.append(pa.nulls(1, arrow_type(column.type)))
    return pa.concat_arrays(parts)


def build_command_table(
    schema: ShardSchema,
    live: Mapping[str, pa.Array],
    live_at: npt.NDArray[np.int64],
    absent: Mapping[str, pa.Array],
    absent_at: npt.NDArray[np.int64],
    records: RecordPlaces,
) -> pa.Table:
    """Build the table. `live_at` and `absent_at` are places in `records`; the mappings hold their columns."""
    at = np.concatenate([live_at, absent_at])
    gone = len(absent_at)
    meta = {
        TIME: pa.array(records.times[at]),
        ORDER: pa.array(records.offsets[at]),
        PARTITION: pa.array(records.partitions_at(at)),
        LIVE: pa.array(np.concatenate([np.ones(len(live_at), dtype=bool), np.zeros(gone, dtype=bool)])),
    }
    target = command_schema(schema)
    arrays = []
    for field in target:
        if field.name in meta:
            arrays.append(meta[field.name])
            continue
        column = live[field.name]
        if gone:
            below = absent[field.name] if field.name in absent else pa.nulls(gone, field.type)
            column = pa.concat_arrays([column, below])
        arrays.append(column)
    return normalize_keys(pa.Table.from_arrays(arrays, schema=target), schema.key)
