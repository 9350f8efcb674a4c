"""Values of change events in Avro: the kind of binary value of a column, and the prefix of each record. Pure.

    record   0x00 │ schema id, uint32 │ body      the wire format of registries: key and value each have their schema
    kind     body of a value
    varint   zig-zag varint: int and long have the same form, so that a widened column stays readable
    float    4 bytes IEEE 754, little-endian                     double   8 bytes
    boolean  1 byte
    string   its size as a varint, UTF-8

Forms are those of the JSON (`debezium`), except that a float represents values for which JSON has no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from tidemill.base.pgtypes.debezium import NUMBERS, value_form

AVRO = "debezium-avro"
"""Name of the envelope."""
MAGIC = 0
PREFIX_BYTES = 5
NULL, PRESENT = b"\x00", b"\x02"
"""Branches of the union of null and a type."""

Kind = Literal["varint", "float", "double", "boolean", "string"]
Layout = tuple[tuple[str, Kind, bool], ...]
"""Fields of a row in order: column, kind, whether it may be null."""

_FLOAT4 = 700


class ColumnDescription(Protocol):
    """A column, as described by the stream or the catalogue."""

    @property
    def name(self) -> str: ...
    @property
    def type_oid(self) -> int: ...
    @property
    def type_mod(self) -> int: ...
    @property
    def key_index(self) -> int: ...


def record_prefix(schema_id: int) -> bytes:
    return bytes([MAGIC]) + schema_id.to_bytes(4, "big")


def value_kind(type_oid: int, type_mod: int) -> Kind:
    form = value_form(type_oid, type_mod)
    if form == "number" or form in NUMBERS:
        return "varint"
    if form == "float":
        return "float" if type_oid == _FLOAT4 else "double"
    return "boolean" if form == "bool" else "string"


def row_layout(columns: Sequence[ColumnDescription]) -> Layout:
    """Return the layout of the rows in events. Key columns are never null."""
    return tuple((c.name, value_kind(c.type_oid, c.type_mod), c.key_index < 0) for c in columns)


def key_layout(columns: Sequence[ColumnDescription]) -> Layout:
    """Return the layout of keys, in the order of the primary key."""
    return row_layout(sorted((c for c in columns if c.key_index >= 0), key=lambda c: c.key_index))
