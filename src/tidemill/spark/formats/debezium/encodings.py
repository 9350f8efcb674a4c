"""Values of Debezium's connectors → columns: by the schema's names where records carry their schema, otherwise by the
declared type alone.

    io.debezium.time.Date                days                io.debezium.time.Time, MicroTime, NanoTime    of a day
    io.debezium.time.Timestamp, MicroTimestamp, NanoTimestamp                       a local date and time
    io.debezium.time.ZonedTimestamp      text with a zone    io.debezium.time.Iso…  text
    org.apache.kafka.connect.data.…      Date, Time, Timestamp in milliseconds, Decimal as unscaled bytes
    io.debezium.data.VariableScaleDecimal                    {"scale": …, "value": unscaled bytes}

Source: Debezium's reference, "Data type mappings" of the connectors for MySQL, SQL Server and PostgreSQL.

JSON without a schema does not say in which of several encodings a value is. A value that fits only one of them is
read, and any other is refused: a wrong reading would look like data.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import pyarrow as pa

from tidemill.shards.api import Column
from tidemill.shards.parts.numbers import decimals_to_arrow
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.stream import UnreadableError, convert_plain_values
from tidemill.spark.formats.conversion import SourceType, find_conversion, raw_type, unscaled_decimal

ToArrow = Callable[[Sequence[Any]], pa.Array]
"""Conversion of the values of one field, as JSON or Avro gives them. Raises exceptions of any type for a value that the
column cannot hold."""

UNAVAILABLE = "__debezium_unavailable_value"
"""Debezium's default placeholder for a value that PostgreSQL did not send, because an update left it unchanged."""
_UNAVAILABLE_BYTES = UNAVAILABLE.encode()
UNAVAILABLE_TEXTS = (_UNAVAILABLE_BYTES, base64.b64encode(_UNAVAILABLE_BYTES))
_UNAVAILABLE_VALUES = frozenset(
    {UNAVAILABLE, _UNAVAILABLE_BYTES, *(form % text for form in (b'"%b"', b'["%b"]') for text in UNAVAILABLE_TEXTS)}
    | {UNAVAILABLE_TEXTS[1].decode()}
)

_BY_NAME = {
    "io.debezium.time.Date": "date",
    "org.apache.kafka.connect.data.Date": "date",
    "io.debezium.time.Time": "clock_millis",
    "org.apache.kafka.connect.data.Time": "clock_millis",
    "io.debezium.time.MicroTime": "clock_micros",
    "io.debezium.time.NanoTime": "clock_nanos",
    "io.debezium.time.Timestamp": "local_millis",
    "io.debezium.time.MicroTimestamp": "local_micros",
    "io.debezium.time.NanoTimestamp": "local_nanos",
    "org.apache.kafka.connect.data.Timestamp": "connect_timestamp",
    "io.debezium.time.IsoDate": "iso",
    "io.debezium.time.IsoTimestamp": "iso",
    "io.debezium.data.VariableScaleDecimal": "variable_decimal",
}
_CONNECT_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_BY_TYPE = dict.fromkeys(("int8", "int16", "int32", "int64"), "int") | {
    "boolean": "bool", "float": "float", "float32": "float", "double": "double", "float64": "double",
    "string": "string", "bytes": "bytes", "struct": "json", "array": "json", "map": "json",
}  # fmt: skip
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_HEX = re.compile(r"(?:[0-9a-f]{2})*|(?:[0-9A-F]{2})*")
_FLOATS = frozenset({"float32", "float64"})
_SCHEMA_FIX = "let the records carry their schema"


def source_of_name(name: str) -> SourceType | None:
    """Return the source that a schema's name means; None if the type alone counts."""
    return SourceType(_BY_NAME[name]) if name in _BY_NAME else None


def source_of_json_schema(field: dict[str, Any]) -> SourceType:
    """Return the source of a field that Connect's JSON converter describes."""
    name, kind = str(field.get("name", "")), str(field.get("type", ""))
    if name == _CONNECT_DECIMAL:
        return SourceType("decimal", int(field.get("parameters", {}).get("scale", 0)))
    return source_of_name(name) or SourceType(_BY_TYPE.get(kind, "json"))


def is_unavailable(value: Any) -> bool:
    """Return whether a value is the placeholder, as text, bytes, base64, or the only item of an array; or the JSON of
    one of these."""
    return (
        isinstance(value, str | bytes | msgspec.Raw)
        and (bytes(value) if isinstance(value, msgspec.Raw) else value) in _UNAVAILABLE_VALUES
    )


def find_event_conversion(source: SourceType | None, column: Column) -> ToArrow | None:
    """Return the conversion of values, or None if no value of the source can be one of the column. `source`: None if
    the record does not carry its schema."""
    if source is None:
        return lambda values: _from_unknown(values, column)
    kind = source.kind
    if kind == "connect_timestamp":
        kind = "local_millis" if column.type == "timestamp_ntz" else "millis"
    elif kind == "iso":
        if column.type not in ("date", "timestamp_ntz"):
            kind = "string"
        else:
            return lambda values: convert_plain_values([_without_zone(v) for v in _items(values)], column)
    elif kind == "variable_decimal":
        return _from_variable(column)
    elif kind == "int" and column.type == "bool":
        return lambda values: pa.array([_from_bit(v) for v in _items(values)], pa.bool_())
    elif kind == "double" and column.type.startswith("decimal"):
        return lambda values: _to_decimals([_from_double(v) for v in _items(values)], column)
    source = source._replace(kind=kind)
    convert = find_conversion(source, column)
    if convert is None:
        return None
    return lambda values: convert(raw_array(values, source))


def _items(values: Sequence[Any]) -> Sequence[Any]:
    return values.to_pylist() if isinstance(values, pa.Array) else values


def raw_array(values: Sequence[Any], source: SourceType) -> pa.Array:
    """Return values of JSON or Avro as an array of the source's raw type."""
    if isinstance(values, pa.Array):
        return values
    kind = raw_type(source)
    if source.kind == "json":
        return pa.array([None if _is_null(v) else _json_text(v) for v in values], kind)
    values = [_plain(v) for v in values]
    if kind == pa.binary():
        return pa.array([_from_base64(v) for v in values], kind)
    if pa.types.is_floating(kind):
        return pa.array([None if v is None else float(v) for v in values], kind)
    expected = {pa.bool_(): bool, pa.string(): str}.get(kind, int)
    for value in values:
        if value is not None and type(value) is not expected:
            raise UnreadableError(f"not {source.kind}: {value!r}"[:100])
    return pa.array(values, kind)


# without a schema -------------------------------------------------------------------------------------


def _from_unknown(values: Sequence[Any], column: Column) -> pa.Array:
    kind = column.type
    if kind == "json":
        return pa.array([None if _is_null(v) else _inner_json(v) for v in values], pa.string())
    if kind.startswith("decimal"):
        return _to_decimals([_any_decimal(_decimal_value(v)) for v in values], column)
    values = [_plain(v) for v in values]
    if kind == "bool":
        return pa.array([_from_bit(v) for v in values], pa.bool_())
    if kind in _FLOATS:
        values = [float(v) if v in ("NaN", "Infinity", "-Infinity") else v for v in values]
        if any(isinstance(v, float) and v != v for v in values):
            return pa.array(values, pa.float64()).cast(arrow_type(kind))
    elif kind == "date":
        return pa.array([_any_date(v) for v in values], pa.date32())
    elif kind == "binary":
        return pa.array([None if v is None else _any_binary(v) for v in values], pa.binary())
    elif kind in ("timestamp", "timestamp_ntz") and any(isinstance(v, int) for v in values):
        raise UnreadableError(
            f"a number may be milliseconds, microseconds or nanoseconds; {_SCHEMA_FIX}, or declare the column as bigint"
        )
    return convert_plain_values(values, column)


def _any_date(value: Any) -> datetime.date | None:
    if value is None or isinstance(value, str):
        return convert_plain_values([_without_zone(value)], Column("", "date"))[0].as_py()  # type: ignore[no-any-return]
    if type(value) is not int:
        raise UnreadableError(f"not a date: {value!r}"[:100])
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=value)


def _any_binary(value: Any) -> bytes:
    if isinstance(value, str) and value and _HEX.fullmatch(value) and _BASE64.fullmatch(value):
        raise UnreadableError(f"a text may be hexadecimal or base64; {_SCHEMA_FIX}, or declare the column as string")
    found = _from_base64(value)
    assert found is not None
    return found


def _decimal_value(value: Any) -> Any:
    """Return a number of JSON as its exact decimal, and any other value unchanged."""
    if isinstance(value, msgspec.Raw):
        text = bytes(value)
        return _plain(value) if text[:1] in (b'"', b"{", b"n") else Decimal(text.decode())
    return value


def _any_decimal(value: Any) -> Decimal | None:
    if value is None or isinstance(value, Decimal):
        return value
    if isinstance(value, dict):
        return _variable_decimal(value)
    if not isinstance(value, str):
        raise UnreadableError(f"not a decimal: {value!r}"[:100])
    try:
        found = Decimal(value)
    except InvalidOperation as error:
        raise UnreadableError(f"not the text of a decimal; {_SCHEMA_FIX}: {value!r}"[:200]) from error
    if value and _BASE64.fullmatch(value):
        raise UnreadableError(f"a text may be digits or base64; {_SCHEMA_FIX}, or declare the column as string")
    return found


# values -----------------------------------------------------------------------------------------------


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, msgspec.Raw) and bytes(value) == b"null")


def _plain(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _json_text(value: Any) -> str:
    return bytes(value).decode() if isinstance(value, msgspec.Raw) else msgspec.json.encode(value).decode()


def _inner_json(value: Any) -> str:
    """Return the JSON of a field: that in a text, as connectors write a JSON column, or else the value's own."""
    if isinstance(value, msgspec.Raw) and bytes(value)[:1] != b'"':
        return _json_text(value)
    text = str(_plain(value))
    msgspec.json.decode(text)
    return text


def _without_zone(value: Any) -> Any:
    return value.removesuffix("Z") if isinstance(value, str) else value


def _from_bit(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):
        return value == 1
    raise UnreadableError(f"not a boolean: {value!r}"[:100])


def _from_base64(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UnreadableError(f"not bytes in base64: {value!r}"[:100])
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise UnreadableError(f"not bytes in base64: {value!r}"[:100]) from error


def _from_double(value: Any) -> Decimal | None:
    value = _decimal_value(value)
    return value if value is None or isinstance(value, Decimal) else Decimal(repr(float(value)))


def _from_variable(column: Column) -> ToArrow | None:
    if column.type == "string":
        return lambda values: pa.array(
            [None if (v := _variable_decimal(_plain(one))) is None else f"{v:f}" for one in values], pa.string()
        )
    if column.type.startswith("decimal"):
        return lambda values: _to_decimals([_variable_decimal(_plain(one)) for one in values], column)
    return None


def _variable_decimal(value: Any) -> Decimal | None:
    if value is None:
        return None
    if not isinstance(value, dict) or type(value.get("scale")) is not int or abs(value["scale"]) > 10_000:
        raise UnreadableError(f"not a decimal with a scale: {value!r}"[:100])
    return unscaled_decimal(_from_base64(value.get("value")) or b"", value["scale"])


def _to_decimals(values: Sequence[Decimal | None], column: Column) -> pa.Array:
    return decimals_to_arrow(values, arrow_type(column.type))
