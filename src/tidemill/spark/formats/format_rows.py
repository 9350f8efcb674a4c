"""Records of each format → rows and deleted keys, by columns.

    json           value: a JSON object                    key of a deletion: text, or JSON
    json_schema    a frame, then the same                  the same, with a frame or without
    avro, protobuf a frame, then data of the schema        the same as for JSON, or framed data of a schema

A value that is null deletes the key of its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode.block_decoder import Block, join_blocks
from tidemill.spark.decode.newline_text import Places
from tidemill.spark.decode.stream import DecodedRows, StreamDecoder
from tidemill.spark.formats.avro.reader import AvroRecordReader, Dead
from tidemill.spark.formats.avro.schema import AvroSchemaError, parse_avro
from tidemill.spark.formats.conversion import no_columns
from tidemill.spark.formats.debezium.avro_events import DebeziumAvroRows
from tidemill.spark.formats.debezium.json_events import DebeziumJsonRows
from tidemill.spark.formats.framing import FRAME_BYTES, NOT_FRAMED, NOT_FRAMED_TEXT, read_schema_ids
from tidemill.spark.formats.protobuf_reader import ProtobufReader, ProtobufSchemaError
from tidemill.spark.formats.record_format import WITH_SCHEMAS, RecordFormat
from tidemill.spark.formats.schemas.writer_schema import SchemaLookup, WriterSchema
from tidemill.topics.batch import RecordColumns


class FormatRows(Protocol):
    def decode(self, columns: RecordColumns, schemas: SchemaLookup) -> DecodedRows:
        """Return rows, keys and dead letters, each with the places of its records. Raises as `schemas`."""
        ...


class SchemaReader(Protocol):
    """Reader of data of one schema."""

    def read(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> list[Block]:
        """Read the data that starts at `at`, ascending; its records are `places`. Records that cannot be rows are
        added to `dead`."""
        ...


def format_rows(record_format: RecordFormat, schema: ShardSchema) -> FormatRows:
    """Return the reader of a format. `schema`: the columns that are in the records."""
    framed = record_format.format == "json_schema"
    if record_format.envelope == "debezium":
        if record_format.format == "avro":
            return DebeziumAvroRows(schema, record_format.record_sequence)
        return DebeziumJsonRows(schema, framed=framed, sequence=record_format.record_sequence)
    if record_format.format in WITH_SCHEMAS:
        return SchemaRows(schema, WITH_SCHEMAS[record_format.format])
    return JsonRows(schema, framed=framed)


class JsonRows:
    """Rows of JSON objects."""

    def __init__(self, schema: ShardSchema, *, framed: bool) -> None:
        self._decoder = StreamDecoder(schema)
        self._framed_keys = StreamDecoder(schema, text_keys=False)
        self._framed = framed

    def decode(self, columns: RecordColumns, schemas: SchemaLookup) -> DecodedRows:
        if not self._framed:
            return self._decoder.decode_rows(columns)
        valued = columns.value_bytes >= 0
        framed = read_schema_ids(columns.body, columns.value_at, columns.value_bytes) != NOT_FRAMED
        with_keys = read_schema_ids(columns.body, columns.key_at, columns.key_bytes) != NOT_FRAMED
        bare = replace(
            columns,
            value_at=np.where(framed, columns.value_at + FRAME_BYTES, columns.value_at),
            value_bytes=np.where(framed, columns.value_bytes - FRAME_BYTES, columns.value_bytes),
            key_at=np.where(with_keys, columns.key_at + FRAME_BYTES, columns.key_at),
            key_bytes=np.where(with_keys, columns.key_bytes - FRAME_BYTES, columns.key_bytes),
        )
        gone = np.flatnonzero(~valued & with_keys)
        found = decode_some(self._decoder, bare, np.flatnonzero(framed | (~valued & ~with_keys)))
        by_frame = decode_some(self._framed_keys, bare, gone)
        bad = [(place, NOT_FRAMED_TEXT) for place in np.flatnonzero(valued & ~framed).tolist()]
        return DecodedRows(found.live, join_two(found.absent, by_frame.absent), [*found.dead, *by_frame.dead, *bad])


def join_two(first: Block, second: Block) -> Block:
    arrays, places = join_blocks([first, second])
    return Block(places, arrays)


def decode_some(decoder: StreamDecoder, columns: RecordColumns, places: Places) -> DecodedRows:
    """Decode the records at these places only."""
    live, absent, dead, *_ = decoder.decode_rows(columns.select(places))
    return DecodedRows(
        Block(places[live.places], live.arrays),
        Block(places[absent.places], absent.arrays),
        [(int(places[at]), reason) for at, reason in dead],
    )


class SchemaRows:
    """Rows of data that only its writer's schema describes."""

    def __init__(self, schema: ShardSchema, kind: str) -> None:
        self._kind = kind
        self._columns = schema.columns
        self._key_columns = tuple(c for c in schema.columns if c.name in schema.key)
        self._plain_keys = StreamDecoder(schema)
        self._readers: dict[tuple[int, bool], SchemaReader] = {}

    def decode(self, columns: RecordColumns, schemas: SchemaLookup) -> DecodedRows:
        valued = np.flatnonzero(columns.value_bytes >= 0)
        dead: Dead = []
        live = self._read(columns.body, columns.value_at[valued], columns.value_bytes[valued], valued, schemas, dead)
        return DecodedRows(live, self._decode_keys(columns, schemas, dead), dead)

    def _decode_keys(self, columns: RecordColumns, schemas: SchemaLookup, dead: Dead) -> Block:
        gone = np.flatnonzero(columns.value_bytes < 0)
        at, sizes = columns.key_at[gone], columns.key_bytes[gone]
        framed = read_schema_ids(columns.body, at, sizes) != NOT_FRAMED
        if not self._key_columns:
            framed[:] = False
        plain = decode_some(self._plain_keys, columns, gone[~framed])
        dead += plain.dead
        if not framed.any():
            return plain.absent
        found = self._read(columns.body, at[framed], sizes[framed], gone[framed], schemas, dead, keys=True)
        return join_two(plain.absent, found)

    def _read(
        self, body: bytes, at: Places, sizes: Places, places: Places, schemas: SchemaLookup, dead: Dead,
        *, keys: bool = False,
    ) -> Block:  # fmt: skip
        """Read framed fields, grouped by schema."""
        columns = self._key_columns if keys else self._columns
        ids = read_schema_ids(body, at, sizes)
        dead += [(place, NOT_FRAMED_TEXT) for place in places[ids == NOT_FRAMED].tolist()]
        named = np.unique(ids[ids != NOT_FRAMED]).tolist()
        known = schemas.find(named) if named else {}
        blocks = [no_columns(columns)]
        for one in named:
            mine = ids == one
            schema = known[one]
            if schema.kind != self._kind:
                reason = f"schema {one} is {schema.kind}" if schema.kind else f"the registry has no schema {one}"
                dead += [(place, reason) for place in places[mine].tolist()]
                continue
            reader = self._reader(schema, columns, keys)
            blocks += reader.read(body, at[mine] + FRAME_BYTES, sizes[mine] - FRAME_BYTES, places[mine], dead)
        arrays, found = join_blocks(blocks)
        return Block(found, arrays)

    def _reader(self, schema: WriterSchema, columns: Sequence[Column], keys: bool) -> SchemaReader:
        place = (schema.id, keys)
        found = self._readers.get(place)
        if found is None:
            found = self._readers[place] = schema_reader(schema, columns)
        return found


def schema_reader(schema: WriterSchema, columns: Sequence[Column]) -> SchemaReader:
    """Return a reader of the schema's data. One that cannot be read yields a dead letter for every record."""
    try:
        if schema.kind == "PROTOBUF":
            return ProtobufReader(schema, columns)
        kind = parse_avro(schema.text, [one.text for one in schema.references])
        return AvroRecordReader(kind, columns, f"schema {schema.id}")
    except (AvroSchemaError, ProtobufSchemaError) as error:
        return UnreadableSchema(f"schema {schema.id} cannot be read: {error}")


class UnreadableSchema:
    """Reader of a schema whose records cannot be read."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def read(self, body: bytes, at: Places, sizes: Places, places: Places, dead: Dead) -> list[Block]:
        dead += [(place, self.problem) for place in places.tolist()]
        return []
