"""Decide how the description of a captured table may change while it flows: which version a message of the stream has,
and whether a new description can be carried. Pure.

    a column at the end that older rows read as NULL or a constant          the next version
    smallint → integer → bigint, real → double precision                    the next version
    numeric(p,s) → numeric(q,s) with q > p, varchar(n) → varchar(m) → text  the next version, if no row was rewritten
    a wider number in the key of a topic whose records are Avro             the table is paused (avro_schemas.py)
    another type of the same name, as of an enum that was re-created        the table is paused and re-snapshotted
    anything else                                                           the table is paused

Invariant (versions by LSN): the stream sends old transactions again, under the description of that time. Version n + 2
is in force from the commit LSN evolved[n] on, and at that LSN the one before it as well, because a transaction may
contain its DDL and rows of both.

Invariant (catalogue ahead of stream): names and types come from the stream, numbers and missing values from the
catalogue, which may be ahead. If the catalogue no longer confirms a column (it has another number or does not exist, or
a column was added and dropped since), the table is paused. A missing value and a number never change, so they may be
read late.

Invariant (NULL in old rows): a new column without a missing value is NULL in older rows only if these were not
rewritten since the table last matched its description. A volatile default, an identity or a stored generated column
rewrites them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.avro import AVRO
from tidemill.capture.catalog.columns import ColumnAttributes, TableAttributes
from tidemill.capture.catalog.type_dependencies import is_compatible_type, serialize_type
from tidemill.capture.encode.avro_schemas import key_kinds
from tidemill.capture.naming import has_invalid_bytes
from tidemill.capture.postgres.pgoutput import RelationMessage
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow, FormerType
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.pg_columns import column_for, columns_for
from tidemill.shards.parts.schema import check_schema
from tidemill.shards.parts.schema_evolution import canonical_default, evolve_schema, schema_changes

TEXT, VARCHAR, NUMERIC = 25, 1043, 1700
_WIDENING_TYPES = {(21, 23), (21, 20), (23, 20), (700, 701)}
"""int2 → int4 → int8, float4 → float8"""
_TYPE_MODIFIER_HEADER = 4
"""Header size that is included in a type modifier of numeric and varchar."""

TypeWithModifier = tuple[int, int]
"""(type oid, type modifier)"""


class TargetColumn(msgspec.Struct, frozen=True):
    """One column of the description to reach."""

    name: str
    type_oid: int
    type_mod: int
    type_name: str


class SchemaStep(msgspec.Struct, frozen=True):
    """The next version of a description, derived from `of`. `attributes` and `storage`: as in CaptureTableRow."""

    of: tuple[CapturedColumn, ...]
    columns: tuple[CapturedColumn, ...]
    attributes: int
    storage: str

    def __str__(self) -> str:
        old = {c.name: c for c in self.of}
        said = [f"+{c.name} {c.type_name}" for c in self.columns if c.name not in old]
        said += [
            f"{c.name} {old[c.name].type_name}→{c.type_name}"
            for c in self.columns
            if c.name in old and old[c.name].type_name != c.type_name
        ]
        return ", ".join(said)


def find_version(row: CaptureTableRow, message: RelationMessage, lsn: int) -> int:
    """Return the version that the message describes in a transaction that commits at `lsn`; 0 = none that is possible
    there.
    """
    theirs = [(c.name, c.type_oid, c.type_mod) for c in message.columns]
    if any(not c.type_oid or not c.attnum for c in row.columns):  # row of an older tidemill: one version, in any order
        known = all(c.type_oid for c in row.columns)
        ours = {(c.name, c.type_oid, c.type_mod) if known else (c.name, 0, 0) for c in row.columns}
        return int(ours == ({*theirs} if known else {(name, 0, 0) for name, _, _ in theirs}))
    first = 1 + sum(at < lsn for at in row.evolved)
    last = 1 + sum(at <= lsn for at in row.evolved)
    for version in range(last, first - 1, -1):
        if theirs == [(c.name, c.type_oid, c.type_mod) for c in columns_at_version(row.columns, version)]:
            return version
    return 0


def columns_at_version(columns: Sequence[CapturedColumn], version: int) -> list[CapturedColumn]:
    """Return the columns as of a version of their description."""
    out = []
    for column in columns:
        if column.version <= version:
            former = next((f for f in column.was if version <= f.version), None)
            out.append(
                column
                if former is None
                else replace(column, type_name=former.type_name, type_oid=former.type_oid, type_mod=former.type_mod)
            )
    return out


def targets_of_message(message: RelationMessage, names: Mapping[TypeWithModifier, str]) -> list[TargetColumn]:
    return [
        TargetColumn(c.name, c.type_oid, c.type_mod, names.get((c.type_oid, c.type_mod), f"oid {c.type_oid}"))
        for c in message.columns
    ]


def targets_of_attributes(found: TableAttributes) -> list[TargetColumn]:
    return [TargetColumn(c.name, c.type_oid, c.type_mod, c.type_name) for c in found.columns]


def describe_recreated_columns(row: CaptureTableRow, found: TableAttributes | None) -> str:
    """Return the columns that the database has re-created under the name of a stored one; "" = none."""
    now = found.by_name if found is not None else {}
    other = [c.name for c in row.columns if c.attnum and c.name in now and now[c.name].attnum != c.attnum]
    return "; ".join(f"column {name!r} is now a different column" for name in other)


def serialize_types(found: TableAttributes) -> dict[int, str]:
    """Return the component types in the form of CaptureTableRow."""
    return {oid: serialize_type(members) for oid, members in found.types.items()}


def describe_altered_types(row: CaptureTableRow, found: TableAttributes) -> str:
    """Return the columns whose older values now read differently, because a type of which they consist was altered; ""
    = none.
    """
    altered = [
        c.name
        for c in row.columns
        if c.type_oid in row.types
        and c.type_oid in found.types
        and not is_compatible_type(row.types[c.type_oid], found.types[c.type_oid])
    ]
    return "; ".join(
        f"a type of column {name!r} was altered, and its old values now read differently" for name in altered
    )


def describe_replaced_types(row: CaptureTableRow, found: TableAttributes | None) -> str:
    """Return the columns whose type is now another one of the same name, as when an enum is re-created; "" = none."""
    now = found.by_name if found is not None else {}
    return "; ".join(
        f"the type of column {c.name!r} was replaced by another one of the same name: {c.type_name}"
        for c in row.columns
        if c.name in now and is_replaced_type(c, now[c.name])
    )


def is_replaced_type(column: CapturedColumn, now: ColumnAttributes) -> bool:
    """Return whether the column has another type of the same name. Its shards lose nothing: they know types by name."""
    known, found = (column.type_oid, column.type_mod), (now.type_oid, now.type_mod)
    return bool(column.type_oid) and known != found and column.type_name == now.type_name


def plan_next_version(
    row: CaptureTableRow, target: Sequence[TargetColumn], found: TableAttributes | None
) -> SchemaStep | str:
    """Return the step from the newest version to `target`, or the reason why it is impossible ("" if the difference
    itself explains it).
    """
    if not row.attributes or not row.storage or any(not c.attnum or not c.type_oid for c in row.columns):
        return "it was described by an older tidemill, which cannot distinguish a new column from a renamed one"
    if found is None:
        return "and the table was dropped in the meantime"
    if any(map(has_invalid_bytes, [text for t in target for text in (t.name, t.type_name)])):
        return "and a name of them is not UTF-8"
    if [t.name for t in target[: len(row.columns)]] != [c.name for c in row.columns]:
        return ""
    if found.key != [c.name for c in sorted((c for c in row.columns if c.key_index >= 0), key=lambda c: c.key_index)]:
        return ""
    rewritten = found.storage != row.storage
    widened = _widen_columns(row, target, found, rewritten)
    if isinstance(widened, str):
        return widened
    added = _add_columns(row, target[len(row.columns) :], found, rewritten)
    if isinstance(added, str):
        return added
    columns = (*widened, *added)
    if row.envelope == AVRO and key_kinds(columns) != key_kinds(row.columns):
        return "its key has another schema from there on, so its records would have other keys"
    try:
        have = shard_schema_of(row.columns)
        evolve_schema(have, schema_changes(have, shard_schema_of(columns)))
    except InvalidError as error:
        return f"the pipeline's table cannot follow: {error.message.rstrip('.')}"
    if targets_of_attributes(found) == list(target):
        return SchemaStep(row.columns, columns, found.count, found.storage)
    return SchemaStep(row.columns, columns, max(row.attributes, *(c.attnum for c in columns)), row.storage)


def shard_schema_of(columns: Sequence[CapturedColumn]) -> ShardSchema:
    """Return the schema of a shard of these columns, with the defaults of added ones. Raises InvalidError."""
    key = sorted((c for c in columns if c.key_index >= 0), key=lambda c: c.key_index)
    schema = check_schema(ShardSchema(columns_for(columns), tuple(c.name for c in key)))
    filled = [replace(s, default=c.default) for s, c in zip(schema.columns, columns, strict=True)]
    return replace(schema, columns=tuple(filled))


def classify_type_change(old: TypeWithModifier, new: TypeWithModifier) -> tuple[bool, bool]:
    """Return (whether every value remains exactly the same, whether the rows are rewritten for it)."""
    (kind, mod), (kind_now, mod_now) = old, new
    if (kind, kind_now) in _WIDENING_TYPES:
        return True, True
    if kind == kind_now == NUMERIC and mod >= _TYPE_MODIFIER_HEADER and mod_now >= _TYPE_MODIFIER_HEADER:
        (digits, scale), (digits_now, scale_now) = (divmod(m - _TYPE_MODIFIER_HEADER, 1 << 16) for m in (mod, mod_now))
        return digits < digits_now and scale == scale_now, False
    if kind == VARCHAR and kind_now == VARCHAR:
        return mod_now == -1 or 0 <= mod < mod_now, False
    return kind == VARCHAR and kind_now == TEXT, False


def _widen_columns(
    row: CaptureTableRow, target: Sequence[TargetColumn], found: TableAttributes, rewritten: bool
) -> list[CapturedColumn] | str:
    out = []
    now = found.by_name
    for column, wanted in zip(row.columns, target, strict=False):
        if column.name not in now or now[column.name].attnum != column.attnum:
            return f"and the database has no such column {column.name!r} any more"
        old, new = (column.type_oid, column.type_mod), (wanted.type_oid, wanted.type_mod)
        if old == new:
            out.append(column)
            continue
        exact, anew_ = classify_type_change(old, new)
        if not exact:
            return ""
        if rewritten and not anew_:
            return "the rows were rewritten as well, with values that are not in the stream"
        former = FormerType(row.version, column.type_name, *old)
        out.append(
            replace(
                column, type_name=wanted.type_name, type_oid=new[0], type_mod=new[1], was=(*column.was, former)
            )
        )  # fmt: skip
    return out


def _add_columns(
    row: CaptureTableRow, target: Sequence[TargetColumn], found: TableAttributes, rewritten: bool
) -> list[CapturedColumn] | str:
    """Return the added columns, or why they cannot be carried."""
    out = []
    now = found.by_name
    keyed = any(c.key_index >= 0 for c in row.columns)
    if target and found.dropped > row.attributes:
        return "a column was added and dropped in the meantime, so it is unknown which one older rows lack"
    for wanted in target:
        seen = now.get(wanted.name)
        if seen is None:
            return f"and the database has no such column {wanted.name!r} any more"
        old, new = (wanted.type_oid, wanted.type_mod), (seen.type_oid, seen.type_mod)
        # The catalogue is ahead of the stream: a column that was added and then widened is described twice.
        if old != new and not classify_type_change(old, new)[0]:
            return f"and column {wanted.name!r} now has another type in the database"
        if seen.attnum <= row.attributes:
            return f"column {wanted.name!r} existed before under another name"
        if seen.mixed or (rewritten and (seen.missing is None or found.partitioned)):
            return (
                "the rows were rewritten (by a volatile default, an identity or a generated column),"
                " with values that are not in the stream"
            )
        kind = column_for(wanted.name, wanted.type_name, arrays=keyed).type
        if has_invalid_bytes(seen.missing or ""):
            return f"the default of column {wanted.name!r} is not UTF-8"
        try:
            default = canonical_default(Column(wanted.name, kind, seen.missing))
        except InvalidError as error:
            return f"its default cannot be carried: {error.message.rstrip('.')}"
        out.append(
            CapturedColumn(
                wanted.name, wanted.type_name, -1, wanted.type_oid, wanted.type_mod, seen.attnum, row.version + 1,
                default,
            )
        )  # fmt: skip
    return out
