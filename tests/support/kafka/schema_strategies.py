"""Hypothesis strategies for kio's entities, and the plain values our codec gives for them."""

from __future__ import annotations

import dataclasses
import datetime
import io
import uuid
from typing import Any

from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.serial._introspect import classify_field, get_schema_field_type, is_optional

from tidemill.kafka.schema.primitives import ZERO_UUID

_INTS = {
    "int8": 7,
    "int16": 15,
    "int32": 31,
    "int64": 63,
}
_TEXT = st.text(max_size=12)


def entities(schema: Any) -> st.SearchStrategy[Any]:
    return st.builds(schema, **{field.name: _field(field) for field in dataclasses.fields(schema)})


def _field(field: Any) -> st.SearchStrategy[Any]:
    kind = classify_field(field)
    element = entities(kind.type_) if dataclasses.is_dataclass(kind.type_) else _primitive(field)
    nullable = is_optional(field) and "tag" not in field.metadata
    if kind.is_array:
        arrays = st.lists(element, max_size=3).map(tuple)
        return st.none() | arrays if type(None) in getattr(field.type, "__args__", ()) else arrays
    if dataclasses.is_dataclass(kind.type_) and nullable:
        return st.none() | element
    return element


def _primitive(field: Any) -> st.SearchStrategy[Any]:
    kafka_type = get_schema_field_type(field)
    optional = is_optional(field) and "tag" not in field.metadata and not classify_field(field).is_array
    if kafka_type in _INTS:
        bits = _INTS[kafka_type]
        return st.integers(-(1 << bits), (1 << bits) - 1)
    if kafka_type == "bool":
        return st.booleans()
    if kafka_type == "float64":
        return st.floats(allow_nan=False)
    if kafka_type == "string":
        return st.none() | _TEXT if optional else _TEXT
    if kafka_type == "float64":
        return st.floats(allow_nan=False)
    if kafka_type in ("bytes", "records"):
        return st.none() | st.binary(max_size=40) if optional else st.binary(max_size=40)
    if kafka_type == "uuid":
        return st.uuids() | st.none()
    if kafka_type == "error_code":
        return st.sampled_from(list(ErrorCode))
    if kafka_type == "timedelta_i32":
        return st.integers(-(1 << 31), (1 << 31) - 1).map(lambda ms: datetime.timedelta(milliseconds=ms))
    if kafka_type == "timedelta_i64":
        return st.integers(-(1 << 40), 1 << 40).map(lambda ms: datetime.timedelta(milliseconds=ms))
    if kafka_type == "datetime_i64":
        moments = st.integers(0, 1 << 41).map(
            lambda ms: (
                datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC) + datetime.timedelta(milliseconds=ms % 1000)
            )
        )
        return st.none() | moments if optional else moments
    raise NotImplementedError(kafka_type)


def plain(value: Any, kafka_type: str = "") -> Any:
    """kio's value as our codec writes it: dicts, lists, integers in ms, strings."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name), field.metadata.get("kafka_type", ""))
            for field in dataclasses.fields(value)
        }
    if kafka_type == "uuid" and not isinstance(value, tuple):
        return ZERO_UUID if value is None else str(value)
    if isinstance(value, tuple):
        return [plain(item, kafka_type) for item in value]
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, ErrorCode):
        return int(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    return value


def encoded(entity: Any) -> bytes:
    with io.BytesIO() as buffer:
        entity_writer(type(entity))(buffer, entity)
        return buffer.getvalue()
