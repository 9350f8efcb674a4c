"""Debezium's change events in JSON, with or without their schema:

    {"before": …, "after": …, "source": …, "op": "u", …}
    {"schema": {…}, "payload": {the event}}                   schemas.enable=true, as Kafka Connect does by default

Records of a block are grouped by their schema, so that each schema is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tidemill.base.runtime.tasks import error_sentence, is_fault
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode.block_decoder import Block
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.row_decoder import RowDecoder, check_nesting, row_decoder
from tidemill.spark.decode.stream import DecodedRows, UnreadableError, reason_of
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.conversion import SourceType
from tidemill.spark.formats.debezium.encodings import UNAVAILABLE_TEXTS, source_of_json_schema
from tidemill.spark.formats.debezium.events import (
    NO_EVENT,
    EventPlan,
    EventRows,
    Events,
    unavailable_columns,
)
from tidemill.spark.formats.framing import FRAME_BYTES, NOT_FRAMED, NOT_FRAMED_TEXT, read_schema_ids
from tidemill.spark.formats.schemas.writer_schema import SchemaLookup
from tidemill.topics.batch import RecordColumns

_PLANS_MAX = 64
_NULL = msgspec.Raw(b"null")


class _Envelope(msgspec.Struct, frozen=True):
    """A change event, or one in a wrapper."""

    op: msgspec.Raw = _NULL
    before: msgspec.Raw = _NULL
    after: msgspec.Raw = _NULL
    schema: msgspec.Raw = _NULL
    payload: msgspec.Raw = _NULL


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_TEXT = msgspec.json.Decoder(str)
_WRAPPED_KEY = msgspec.json.Decoder(dict[str, msgspec.Raw])


class DebeziumJsonRows:
    """Rows of change events in JSON. `framed`: they have Confluent's frame; `sequence`: columns of the table's
    sequence."""

    def __init__(self, schema: ShardSchema, *, framed: bool, sequence: Sequence[str] = ()) -> None:
        self._columns = schema.columns
        self._key_columns = tuple(c for c in schema.columns if c.name in schema.key)
        self._sequence = tuple(c for c in schema.columns if c.name in sequence)
        self._before = (*self._key_columns, *self._sequence)
        self._key = schema.key
        self._framed = framed
        self._row = _any_decoder(self._columns)
        self._key_row = _any_decoder(self._key_columns)
        self._before_row = _any_decoder(self._before)
        self._plans: dict[tuple[bytes, bool], EventPlan] = {}

    def decode(self, columns: RecordColumns, schemas: SchemaLookup) -> DecodedRows:
        found = EventRows(self._columns, self._key_columns, self._sequence)
        for schema, group in self._group_events(columns, found.dead).items():
            found.add(group.events(), self._plan(schema, key=False))
        tombstones = np.flatnonzero(columns.value_bytes < 0)
        rejected = self._decode_keys(columns, found.rejected(columns), [])
        by_key = np.union1d(tombstones, np.array(found.by_record_key, dtype=np.int64))
        keys = self._decode_keys(columns, by_key, found.dead)
        return DecodedRows(
            found.live_block(), found.gone_block(keys, rejected), found.dead, found.truncated, found.partial_rows()
        )

    def _group_events(self, columns: RecordColumns, dead: Dead) -> Mapping[bytes, _EventGroup]:
        groups: dict[bytes, _EventGroup] = {}
        framed = read_schema_ids(columns.body, columns.value_at, columns.value_bytes) != NOT_FRAMED
        for at in np.flatnonzero(columns.value_bytes >= 0).tolist():
            value = columns.value(at) or b""
            try:
                if self._framed:
                    if not framed[at]:
                        raise UnreadableError(NOT_FRAMED_TEXT)
                    value = value[FRAME_BYTES:]
                check_nesting(value)
                schema, event = _unwrap(value)
                if schema not in groups:
                    groups[schema] = _EventGroup(self._columns, self._before)
                op = _TEXT.decode(event.op) if event.op != _NULL else ""
                if not op:
                    raise UnreadableError(NO_EVENT)
                after = self._row.decode(bytes(event.after)) if event.after != _NULL else None
                before = self._before_row.decode(bytes(event.before)) if event.before != _NULL else None
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((at, reason_of(error)))
                continue
            unsent = any(text in value for text in UNAVAILABLE_TEXTS)
            groups[schema].add(at, op, after, before, self._key if unsent else None)
        return groups

    def _decode_keys(self, columns: RecordColumns, places: Places, dead: Dead) -> Block:
        """Decode the keys of records at these places."""
        groups: dict[bytes, _EventGroup] = {}
        if not self._key_columns:
            return Block(places, {})
        for at in places.tolist():
            try:
                key = columns.key(at)
                if key is None:
                    raise UnreadableError("a deletion without a key")
                if self._framed and key[:1] == b"\0":
                    key = key[FRAME_BYTES:]
                check_nesting(key)
                schema, payload = _unwrap_key(key)
                row = self._key_row.decode(payload)
            except BaseException as error:
                if not is_fault(error):
                    raise
                dead.append((at, reason_of(error)))
                continue
            if schema not in groups:
                groups[schema] = _EventGroup(self._key_columns, ())
            groups[schema].add(at, "", row, None, None)
        found = EventRows(self._key_columns, ())
        for schema, group in groups.items():
            events, plan = group.events(), self._plan(schema, key=True)
            if plan.problem:
                dead += [(place, plan.problem) for place in events.places.tolist()]
            else:
                every = np.arange(len(events.places))
                found.live.append(plan.convert(plan.columns, events.after, every, events.places, dead))
        return found.live_block()

    def _plan(self, schema: bytes, *, key: bool) -> EventPlan:
        found = self._plans.get((schema, key))
        if found is None:
            columns = self._key_columns if key else self._columns
            try:
                sources = _sources(schema, key=key) if schema else None
                found = EventPlan(columns, self._key, sources, "the record's schema")
            except BaseException as error:
                if not is_fault(error):
                    raise
                found = EventPlan(columns, self._key, {}, "")
                found.problem = f"the record's schema cannot be read: {error_sentence(error)}"
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            self._plans[schema, key] = found
        return found


class _EventGroup:
    """Values of events with one schema, by column."""

    def __init__(self, columns: Sequence[Column], before_columns: Sequence[Column]) -> None:
        self._columns, self._before_columns = columns, before_columns
        self._places: list[int] = []
        self._ops: list[str] = []
        self._after: list[Any] = []
        self._before: list[Any] = []
        self._unavailable: dict[int, tuple[str, ...]] = {}

    def add(self, place: int, op: str, after: Any, before: Any, key: Sequence[str] | None) -> None:
        """Add an event. `key`: if the row may have values that are unavailable."""
        self._places.append(place)
        self._ops.append(op)
        self._before.append(before)
        self._after.append(after)
        if key is None or after is None:
            return
        row = {column.name: getattr(after, f"c{i}") for i, column in enumerate(self._columns)}
        names = unavailable_columns(row, key)
        if names:
            self._unavailable[place] = names
            for i, column in enumerate(self._columns):
                if column.name in names:
                    setattr(after, f"c{i}", None)

    def events(self) -> Events:
        return Events(
            np.array(self._places, dtype=np.int64),
            self._ops,
            _by_column(self._columns, self._after),
            np.array([row is not None for row in self._after], dtype=bool),
            _by_column(self._before_columns, self._before),
            np.array([row is not None for row in self._before], dtype=bool),
            self._unavailable,
        )


def _by_column(columns: Sequence[Column], rows: Sequence[Any]) -> dict[str, list[Any]]:
    return {
        column.name: [None if row is None else getattr(row, f"c{i}") for row in rows]
        for i, column in enumerate(columns)
    }


def _any_decoder(columns: Sequence[Column]) -> RowDecoder:
    """Return a decoder of values without conversion; decimals and JSON are their text."""
    kinds = {c.type: Any for c in columns if c.type != "json" and not c.type.startswith("decimal")}
    return row_decoder(columns, kinds, msgspec.Raw)


def _unwrap(value: bytes) -> tuple[bytes, _Envelope]:
    """Return (text of the schema or b"", the event)."""
    found = _ENVELOPE.decode(value)
    if found.op != _NULL or found.payload == _NULL:
        return b"", found
    return b"" if found.schema == _NULL else bytes(found.schema), _ENVELOPE.decode(found.payload)


def _unwrap_key(key: bytes) -> tuple[bytes, bytes]:
    """Return (text of the schema or b"", the key)."""
    found = _WRAPPED_KEY.decode(key)
    if found.keys() != {"schema", "payload"}:
        return b"", key
    schema = bytes(found["schema"])
    return b"" if schema == b"null" else schema, bytes(found["payload"])


def _sources(schema: bytes, *, key: bool) -> dict[str, SourceType]:
    """Return the types of the row's fields. Raises exceptions of any type for a text that is no schema."""
    described = msgspec.json.decode(schema)
    if not key:
        rows = [one for one in described["fields"] if one.get("field") in ("after", "before")]
        described = next((one for one in rows if one["field"] == "after"), rows[0] if rows else {})
    return {str(one["field"]): source_of_json_schema(one) for one in described.get("fields", ())}
