"""Permitted changes of a shard's schema, under which its contents stay the same (RFC 0003). Pure.

    add     a column: rows that were written before have its default (a constant, or null)
    widen   int16 → int32 → int64 · float32 → float64 · decimal(p,s) → decimal(q,s), q > p
    retire  a column that the source has no more: it stays, and is null in rows that are written from then on.
            If the source has it again, with null in the rows in between, it is added back
    else    rejected: a rename, a narrower or another type, another key

Invariant (exact values): a row reads the same under every later version, except for columns added since.

Invariant (equal rows): equal rows stay equal and have one hash, so a retraction under a new version cancels an
insertion under an old one.

Invariant (convergence): repeated or concurrent changes end in one schema; the last change to a column decides whether
it is retired.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.shards.api import Batch, Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.nested.type_names import ArrayType, is_nested, nested_type
from tidemill.shards.parts.pg_columns import parse_column
from tidemill.shards.parts.schema import arrow_type, canonical_type, check_name, describe_difference
from tidemill.shards.parts.stored_types import restored_column

_WIDER = {("int16", "int32"), ("int16", "int64"), ("int32", "int64"), ("float32", "float64")}
_BOOLS = {"true": "t", "false": "f"}

EVOLUTION_FIX = "A table takes new columns and wider types only."


class SchemaChanges(msgspec.Struct, frozen=True):
    """Columns to add, columns with their wider types, and names of columns that the source has no more."""

    add: tuple[Column, ...] = ()
    widen: tuple[Column, ...] = ()
    retire: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.widen or self.retire)

    def __str__(self) -> str:
        said = [f"+{c.name} {c.type}" + ("" if c.default is None else f" default {c.default}") for c in self.add]
        said += [f"{c.name}→{c.type}" for c in self.widen]
        return ", ".join(said + [f"{name} is null from then on" for name in self.retire])


def is_widening(old: str, new: str) -> bool:
    """Return whether every value of type `old` is exactly one of type `new`, with the same hash.

    False for equal types.
    """
    if (old, new) in _WIDER:
        return True
    before, after = arrow_type(old), arrow_type(new)
    return pa.types.is_decimal(before) and pa.types.is_decimal(after) and _is_arrow_widening(before, after)


def schema_changes(have: ShardSchema, want: ShardSchema, may_retire: Collection[str] = ()) -> SchemaChanges:
    """Return the changes that make `have` contain every column of `want`, in any order.

    A default matters only while its column is new. `may_retire` are columns whose absence in `want` was accepted.
    Raises InvalidError with the difference.
    """
    types = {c.name: c.type for c in have.columns}
    retired, wanted = {c.name for c in have.columns if c.retired}, {c.name for c in want.columns}
    add = tuple(c for c in want.columns if c.name not in types or c.name in retired)
    other = [c for c in want.columns if types.get(c.name, c.type) != c.type]
    gone = tuple(name for name in types if name not in wanted and name not in retired)
    same = have.key == want.key and have.buckets == want.buckets
    if not {*gone} <= {*may_retire} or not same or any(not is_widening(types[c.name], c.type) for c in other):
        raise InvalidError(
            f"a table's schema cannot become this one: difference=[{describe_difference(have, want)}].",
            fix=EVOLUTION_FIX,
        )
    changes = SchemaChanges(add, tuple(c for c in other if c.name not in retired), gone)
    evolve_schema(have, changes)  # a column that is added back may have a default other than null
    return changes


def evolve_schema(schema: ShardSchema, changes: SchemaChanges) -> ShardSchema:
    """Return the next version, or `schema` itself if it has all of the changes.

    Raises InvalidError if a value would change.
    """
    columns = {column.name: column for column in schema.columns}
    for asked in changes.add:
        check_name(asked.name)
        column = Column(asked.name, canonical_type(asked.type), canonical_default(asked), schema.version + 1)
        found = columns.setdefault(column.name, column)
        if found.retired:
            if column.default is not None:
                raise InvalidError(
                    f"rows are null in a column that was retired: column={column.name} default={column.default!r}.",
                    fix="Give the column another name.",
                )
            columns[column.name] = replace(_widen_to(found, column.type), retired=0)
        elif found is not column:
            if found.default != column.default:
                raise InvalidError(
                    f"the column exists with another default: column={column.name} default={found.default!r}"
                    f" wanted={column.default!r}.",
                    fix="Give the column another name: stored rows have the old default.",
                )
            columns[column.name] = _widen_to(found, column.type)
    for asked in changes.widen:
        if asked.name not in columns:
            raise InvalidError(f"no such column to widen: column={asked.name}.", fix="Add it instead.")
        columns[asked.name] = _widen_to(columns[asked.name], canonical_type(asked.type))
    for name in changes.retire:
        if name not in columns or name in schema.key or not schema.key:
            raise InvalidError(
                f"the column cannot be retired: column={name} key={','.join(schema.key)}.", fix=EVOLUTION_FIX
            )
        if not columns[name].retired:
            columns[name] = replace(columns[name], retired=schema.version + 1)
    now = tuple(columns.values())
    return schema if now == schema.columns else replace(schema, columns=now, version=schema.version + 1)


def _widen_to(column: Column, kind: str) -> Column:
    if column.type == kind or is_widening(kind, column.type):
        return column
    if not is_widening(column.type, kind):
        raise InvalidError(
            f"some values would change: column={column.name} type={column.type} wanted={kind}.", fix=EVOLUTION_FIX
        )
    return replace(column, type=kind)


def canonical_default(column: Column) -> str | None:
    """Return the canonical text of a column's default, with the same value under every wider type. That of an array is
    PostgreSQL's text: `{}`, `{a,"b c"}`.

    Raises InvalidError.
    """
    text = column.default
    if text is None:
        return None
    kind = canonical_type(column.type)
    if is_nested(kind) and not _is_array_of_scalars(kind):
        raise InvalidError(
            f"a column of this nested type cannot have a default: column={column.name} type={kind}.",
            fix="Add it without a default: earlier rows are null in it.",
        )
    if kind == "json":
        _check_json(column.name, text)
    if kind == "bool":
        text = _BOOLS.get(text.lower(), text)
    value = parse_column([text], replace(column, type=kind))[0]
    if pa.types.is_decimal(value.type):
        return f"{value.as_py():f}"
    if pa.types.is_floating(value.type) or pa.types.is_integer(value.type):
        return str(value.as_py())  # for a float32, all digits of its float64
    return text


def _is_array_of_scalars(kind: str) -> bool:
    found = nested_type(kind)
    return isinstance(found, ArrayType) and not is_nested(found.element)


def _check_json(name: str, text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise InvalidError(
            f"the default is not a JSON value: column={name} default={text[:80]!r}.", fix="Quote it."
        ) from error


@lru_cache(maxsize=1024)
def default_value(column: Column) -> Any:
    """Return the value of rows that were written before the column existed: one Arrow scalar of its type."""
    if column.default is None:
        return pa.scalar(None, arrow_type(column.type))
    return parse_column([column.default], column)[0]


def check_schema_known(schema: ShardSchema, batch: Batch) -> None:
    """Raise SchemaEvolvedError if rows of the batch may have columns that `schema` does not know."""
    if batch.schema_version > schema.version:
        raise SchemaEvolvedError(
            f"rows of a newer schema: version={batch.schema_version} known={schema.version}.",
            fix="Reopen the table.",
        )


def convert_to_schema(schema: ShardSchema, rows: pa.Table, target: pa.Schema) -> pa.Table:
    """Convert stored rows of any earlier version to `target`, an Arrow schema with the columns of `schema`.

    Missing columns get their default, narrower ones are widened. Raises CorruptError otherwise: if a column of all
    versions is missing, or has a type that never widened to this one.
    """
    if rows.schema.equals(target):
        return rows
    added = {column.name: column for column in schema.columns if column.version > 1}
    columns = []
    for field in target:
        index = rows.schema.get_field_index(field.name)
        if index < 0 and field.name in added:
            columns.append(_default_column(added[field.name], rows.num_rows))
        elif index < 0:
            raise CorruptError(f"stored rows lack a column: column={field.name}.")
        else:
            columns.append(_widen_column(_restored(rows.column(index), field), field))
    return pa.Table.from_arrays(columns, schema=target)


def _default_column(column: Column, count: int) -> pa.Array:
    value = default_value(column)
    return pa.repeat(value, count) if value.is_valid else pa.nulls(count, value.type)


def _restored(column: Any, field: pa.Field) -> Any:
    try:
        return restored_column(field.name, column, field.type)
    except pa.ArrowInvalid as error:
        raise CorruptError(f"a stored number is too large: column={field.name} ({error}).") from error


def _widen_column(column: Any, field: pa.Field) -> Any:
    if column.type.equals(field.type):
        return column
    if not _is_arrow_widening(column.type, field.type):
        raise CorruptError(
            f"stored rows have another type: column={field.name} type={column.type} wanted={field.type}."
        )
    return pc.cast(column, field.type)


def _is_arrow_widening(old: pa.DataType, new: pa.DataType) -> bool:
    kinds = pa.types
    if kinds.is_signed_integer(old) and kinds.is_signed_integer(new):
        return bool(old.bit_width < new.bit_width)
    if kinds.is_decimal128(old) and kinds.is_decimal128(new):
        return bool(old.scale == new.scale and old.precision < new.precision)
    return bool(kinds.is_float32(old) and kinds.is_float64(new))
