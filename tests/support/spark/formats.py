"""Records of topics in every format for the same rows, and their decoding as for a table."""

from __future__ import annotations

import base64
import datetime
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import fastavro

from tidemill.spark.decode.records import Records
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.formats.record_format import PLAIN, declare_topic
from tidemill.spark.formats.schemas.writer_schema import NO_SCHEMAS, SchemaLookup, WriterSchema
from tidemill.spark.formats.topic_decoder import TopicDecoder
from tidemill.topics.batch import Record, decode_columns, encode_batch

Row = dict[str, Any]


def framed(schema_id: int, data: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big") + data


def avro(schema: Any, value: Any, schema_id: int = 7) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return framed(schema_id, out.getvalue())


def avro_schema(schema: Any, schema_id: int = 7) -> WriterSchema:
    return WriterSchema(schema_id, "AVRO", json.dumps(schema))


def as_json(value: Any) -> bytes:
    """A row as a producer of JSON writes it."""

    def text(one: Any) -> Any:
        if isinstance(one, datetime.datetime):
            return one.isoformat()
        if isinstance(one, datetime.date):
            return one.isoformat()
        return (
            base64.b64encode(one).decode() if isinstance(one, bytes) else str(one) if isinstance(one, Decimal) else one
        )

    return json.dumps({name: text(one) for name, one in value.items()}).encode()


def records_of(found: Sequence[Record | tuple[bytes | None, bytes | None]]) -> Records:
    rows = [one if isinstance(one, Record) else Record(*one, (), 1_700_000_000_000) for one in found]
    _, columns = decode_columns(encode_batch(rows, base_offset=10))
    return Records("t", 1, columns.offsets * 100, columns)


def decode(
    found: Sequence[Record | tuple[bytes | None, bytes | None]],
    schemas: SchemaLookup = NO_SCHEMAS,
    *,
    key: str = "id",
    schema: str,
    **options: Any,
) -> tuple[list[Row], list[str]]:
    """Return (rows as dicts without `_time` and `_partition`, ordered by offset; reasons of dead letters)."""
    table, form = declare_topic("t", key, schema, options)  # type: ignore[arg-type]
    records = records_of(found)
    if form == PLAIN:
        commands, dead = StreamDecoder(table).decode(records)
    else:
        commands, dead, stop = TopicDecoder(table, form).decode(records, schemas)
        assert stop is None
    rows = commands.rows.to_pylist()
    rows = [{n: v for n, v in row.items() if n not in ("_time", "_partition")} for row in rows]
    return sorted(rows, key=lambda row: (row["_order"], row["_live"])), dead.column("reason").to_pylist()


def protobuf(message: Any, schema_id: int = 7, path: Sequence[int] = ()) -> bytes:
    """A message in Confluent's framing; `path`: indexes of its type, if it is not the file's first message."""
    zigzag = bytes(number << 1 for number in (len(path), *path)) if path else b"\0"
    return framed(schema_id, zigzag + message.SerializeToString())


def protobuf_schema(file: Any, schema_id: int = 7, **more: Any) -> WriterSchema:
    return WriterSchema(schema_id, "PROTOBUF", "", file.SerializeToString(), **more)
