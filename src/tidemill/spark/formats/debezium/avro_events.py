"""Debezium's change events in Avro, as Confluent's converter writes them: a record with the fields before, after, op.

Events whose schema is flat are read by columns, others one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.runtime.tasks import is_fault
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode.block_decoder import MIN_BLOCK_VALUES, Block
from tidemill.spark.decode.newline_text import Mask, Places
from tidemill.spark.decode.stream import DecodedRows, reason_of
from tidemill.spark.formats.avro.columns import FlatColumn, FlatCursors, is_flat
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.avro.schema import AvroSchemaError, AvroType, parse_avro
from tidemill.spark.formats.avro.values import AvroValueReader
from tidemill.spark.formats.conversion import SourceType, no_columns
from tidemill.spark.formats.debezium.encodings import UNAVAILABLE, source_of_name
from tidemill.spark.formats.debezium.events import NO_EVENT, EventPlan, EventRows, Events, unavailable_columns
from tidemill.spark.formats.framing import FRAME_BYTES, NOT_FRAMED, NOT_FRAMED_TEXT, read_schema_ids
from tidemill.spark.formats.schemas.writer_schema import SchemaLookup, WriterSchema
from tidemill.topics.batch import RecordColumns

_NESTED = frozenset({"json", "variable_decimal"})


class DebeziumAvroRows:
    """Rows of change events in Avro. `sequence`: columns of the table's sequence."""

    def __init__(self, schema: ShardSchema, sequence: Sequence[str] = ()) -> None:
        self._columns = schema.columns
        self._key_columns = tuple(c for c in schema.columns if c.name in schema.key)
        self._sequence = tuple(c for c in schema.columns if c.name in sequence)
        self._key = schema.key
        self._readers: dict[tuple[int, bool], _EventReader] = {}

    def decode(self, columns: RecordColumns, schemas: SchemaLookup) -> DecodedRows:
        valued = np.flatnonzero(columns.value_bytes >= 0)
        tombstones = np.flatnonzero(columns.value_bytes < 0)
        found = EventRows(self._columns, self._key_columns, self._sequence)
        at, sizes = columns.value_at[valued], columns.value_bytes[valued]
        for reader, mine in self._by_schema(columns.body, at, sizes, valued, schemas, found.dead, key=False):
            for events in reader.read(columns.body, at[mine], sizes[mine], valued[mine], found.dead):
                found.add(events, reader.plan)
        rejected = self._decode_keys(columns, found.rejected(columns), schemas, [])
        by_key = np.union1d(tombstones, np.array(found.by_record_key, dtype=np.int64))
        keys = self._decode_keys(columns, by_key, schemas, found.dead)
        return DecodedRows(
            found.live_block(), found.gone_block(keys, rejected), found.dead, found.truncated, found.partial_rows()
        )

    def _decode_keys(self, columns: RecordColumns, places: Places, schemas: SchemaLookup, dead: Dead) -> Block:
        if not self._key_columns:
            return Block(places, {})
        found = EventRows(self._key_columns, ())
        found.live.append(no_columns(self._key_columns))
        at, sizes = columns.key_at[places], columns.key_bytes[places]
        for reader, mine in self._by_schema(columns.body, at, sizes, places, schemas, dead, key=True):
            for events in reader.read(columns.body, at[mine], sizes[mine], places[mine], dead):
                every = np.arange(len(events.places))
                plan = reader.plan
                if plan.problem:
                    dead += [(place, plan.problem) for place in events.places.tolist()]
                else:
                    found.live.append(plan.convert(plan.columns, events.after, every, events.places, dead))
        return found.live_block()

    def _by_schema(
        self, body: bytes, at: Places, sizes: Places, places: Places, schemas: SchemaLookup, dead: Dead, *, key: bool
    ) -> list[tuple[_EventReader, Mask]]:
        """Return the reader of each schema, with a mask of its records; the others are added to `dead`."""
        ids = read_schema_ids(body, at, sizes)
        without = "a deletion without a key" if key else NOT_FRAMED_TEXT
        dead += [(place, without) for place in places[ids == NOT_FRAMED].tolist()]
        named = np.unique(ids[ids != NOT_FRAMED]).tolist()
        known = schemas.find(named) if named else {}
        out = []
        for one in named:
            reader, mine = self._reader(known[one], key=key), ids == one
            if reader.problem:
                dead += [(place, reader.problem) for place in places[mine].tolist()]
            else:
                out.append((reader, mine))
        return out

    def _reader(self, schema: WriterSchema, *, key: bool) -> _EventReader:
        found = self._readers.get((schema.id, key))
        if found is None:
            in_before = () if key else (*self._key_columns, *self._sequence)
            columns = self._key_columns if key else self._columns
            found = _EventReader(schema, columns, in_before, self._key, is_key=key)
            if schema.kind:
                self._readers[schema.id, key] = found
        return found


class _EventReader:
    """Reader of the events of one schema, or of keys: then the key's row is `after`.

    `problem`: why its events cannot be read.
    """

    def __init__(
        self, schema: WriterSchema, columns: Sequence[Column], before: Sequence[Column], key: Sequence[str],
        *, is_key: bool,
    ) -> None:  # fmt: skip
        self._columns, self._before, self._key = columns, before, key
        self._is_key = is_key
        self._kind, self.problem = _parse(schema)
        row = self._kind if is_key else _row_of(self._kind)
        if not self.problem and not is_key and (row is None or self._kind.field("op") is None):
            self.problem = NO_EVENT
        sources = {name: _source_of(kind) for name, kind in row.fields} if row is not None else {}
        self.plan = EventPlan(columns, key, sources, f"schema {schema.id}")
        wanted = [source for name, source in sources.items() if name in {c.name for c in columns}]
        self._flat = is_flat(self._kind) and all(source.kind not in _NESTED for source in wanted)
        self._json = {name for name, source in sources.items() if source.kind == "json"}
        self._has = [column.name for column in columns if column.name in sources]

    def read(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> list[Events]:
        begins, ends = at + FRAME_BYTES, at + sizes
        slow, out = np.ones(len(at), dtype=bool), []
        if self._flat and len(at) >= MIN_BLOCK_VALUES:
            walk = FlatCursors(body, begins, ends)
            root = walk.read_type(self._kind, slow)
            walk.check_end()
            good = walk.good
            try:
                events = self._events(root, body, good, places[good]) if good.any() else None
            except pa.ArrowInvalid:  # a text is not UTF-8: find out which
                events = None
            if events is not None:
                slow = ~good
                out.append(events)
        if slow.any():
            out.append(self._read_one_by_one(body, begins[slow], ends[slow], places[slow], dead))
        return out

    def _events(self, root: FlatColumn, body: bytes, good: Mask, places: Places) -> Events | None:
        """Return the events; None if some may have values that are unavailable."""
        count = int(good.sum())
        after = root if self._is_key else root.fields["after"]
        before = root.fields.get("before") if not self._is_key else None
        nothing = np.zeros(count, dtype=bool)
        rows = self._arrays(after, self._columns, body, good)
        for array in rows.values():
            if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
                unsent = pc.any(pc.match_substring(array, UNAVAILABLE), min_count=0)
                if unsent.as_py():
                    return None
        return Events(
            places,
            [""] * count if self._is_key else root.fields["op"].array(body, good).to_pylist(),
            rows,
            after.there[good],
            self._arrays(before, self._before, body, good) if before is not None else {},
            before.there[good] if before is not None else nothing,
        )

    def _arrays(self, row: FlatColumn, columns: Sequence[Column], body: bytes, good: Mask) -> dict[str, pa.Array]:
        count = int(good.sum())
        return {
            column.name: row.fields[column.name].array(body, good) if column.name in row.fields else pa.nulls(count)
            for column in columns
        }

    def _read_one_by_one(self, body: bytes, at: Places, ends: Places, places: Places, dead: Dead) -> Events:
        good, ops, after, before = list[int](), list[str](), list[Any](), list[Any]()
        unavailable: dict[int, tuple[str, ...]] = {}
        for begin, end, place in zip(at.tolist(), ends.tolist(), places.tolist(), strict=True):
            try:
                op, new, old = self._read_event(AvroValueReader(body, begin, end))
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((place, reason_of(error)))
                continue
            if new is not None:
                names = unavailable_columns({name: new[name] for name in self._has}, self._key)
                if names:
                    unavailable[place] = names
                    new = new | dict.fromkeys(names)
            good.append(place)
            ops.append(op)
            after.append(new)
            before.append(old)
        return Events(
            np.array(good, dtype=np.int64),
            ops,
            _by_column(self._columns, after),
            np.array([row is not None for row in after], dtype=bool),
            _by_column(self._before, before),
            np.array([row is not None for row in before], dtype=bool),
            unavailable,
        )

    def _read_event(self, reader: AvroValueReader) -> tuple[str, Any, Any]:
        if self._is_key:
            row = self._read_row(reader, self._kind)
            reader.check_end()
            return "", row, None
        found: dict[str, Any] = {}
        for name, kind in self._kind.fields:
            if name in ("after", "before"):
                inner: AvroType | None = kind
                if kind.kind == "union":
                    branch = reader.read_varint()
                    inner = kind.branches[branch] if 0 <= branch < len(kind.branches) else None
                found[name] = self._read_row(reader, inner) if inner is not None and inner.kind == "record" else None
            else:
                found[name] = reader.read(kind, depth=1)
        reader.check_end()
        return str(found["op"]), found.get("after"), found.get("before")

    def _read_row(self, reader: AvroValueReader, row: AvroType) -> dict[str, Any]:
        return {name: reader.read(kind, for_json=name in self._json, depth=2) for name, kind in row.fields}


def _by_column(columns: Sequence[Column], rows: Sequence[Any]) -> dict[str, list[Any]]:
    return {c.name: [None if row is None else row.get(c.name) for row in rows] for c in columns}


def _parse(schema: WriterSchema) -> tuple[AvroType, str]:
    """Return (type, why its data cannot be read)."""
    if schema.kind != "AVRO":
        reason = f"schema {schema.id} is {schema.kind}" if schema.kind else f"the registry has no schema {schema.id}"
        return AvroType("record"), reason
    try:
        kind = parse_avro(schema.text, [one.text for one in schema.references])
    except AvroSchemaError as error:
        return AvroType("record"), f"schema {schema.id} cannot be read: {error}"
    return kind, "" if kind.kind == "record" else f"schema {schema.id} is no record"


def _row_of(envelope: AvroType) -> AvroType | None:
    for name in ("after", "before"):
        field = envelope.field(name)
        row = field.without_null() if field is not None else None
        if row is not None and row.kind == "record":
            return row
    return None


def _source_of(kind: AvroType) -> SourceType:
    """Return the source of a field: Debezium's name of its type counts before the logical type."""
    inner = kind.without_null()
    named = source_of_name(inner.connect) if inner is not None else None
    return named or kind.source_type()
