"""The Avro schemas of a table's change events, named as by Debezium's PostgreSQL connector and Avro's converter.

    subject          TOPIC-key                     TOPIC-value
    record           TOPIC.Key                     TOPIC.Envelope, with TOPIC.Value as the type of `before` and `after`
    fields           the primary key's columns     before, after, source, transaction, op, ts_ms

Invariant (stable key schema): the schema of a key does not change as long as its topic has records. Its id is in the
key's bytes, so it affects the partition of a key and which keys compaction considers equal.

Invariant (nullable columns): every column except those of the key may be null, regardless of NOT NULL, which can change
without a description of the table in the stream.

Invariant (registered first): a schema is registered before the first record that names its id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.avro import ColumnDescription, Kind, value_kind
from tidemill.base.pgtypes.debezium import value_form

CONNECTOR = "io.debezium.connector.postgresql"
SNAPSHOT_VALUES = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"

_SMALLINT = 21
_WIDE_FORMS = frozenset({"millis", "micros", "clock_micros"})
_WIDE_OIDS = frozenset({20, 26})
_SEMANTIC_TYPES = {
    "days": "io.debezium.time.Date",
    "millis": "io.debezium.time.Timestamp",
    "micros": "io.debezium.time.MicroTimestamp",
    "clock_millis": "io.debezium.time.Time",
    "clock_micros": "io.debezium.time.MicroTime",
    "zoned": "io.debezium.time.ZonedTimestamp",
}
_SEMANTIC_TYPES_BY_OID = {
    114: "io.debezium.data.Json",
    3802: "io.debezium.data.Json",
    142: "io.debezium.data.Xml",
    2950: "io.debezium.data.Uuid",
}
_INVALID_NAME_CHARS = re.compile(r"[^A-Za-z0-9_]")


def subjects_of(topic: str) -> tuple[str, str]:
    return f"{topic}-key", f"{topic}-value"


def schemas_of(topic: str, columns: Sequence[ColumnDescription]) -> tuple[str, str]:
    """Return the texts of the schemas of key and value."""
    space = ".".join(_valid_name(part) for part in topic.split("."))
    names = field_names([c.name for c in columns])
    fields = [_build_field(c, name) for c, name in zip(columns, names, strict=True)]
    key = [field for _, field in sorted((c.key_index, n) for n, c in enumerate(columns) if c.key_index >= 0)]
    of_key = _build_record("Key", space, [fields[n] for n in key])
    row = _build_record("Value", space, fields)
    del row["namespace"]  # that of the envelope
    envelope = _build_record(
        "Envelope", space,
        [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": _source_schema()},
            {"name": "transaction", "type": ["null", _transaction_schema()], "default": None},
            {"name": "op", "type": "string"},
            _nullable_field("ts_ms", "long"),
        ],
    )  # fmt: skip
    return orjson.dumps(of_key).decode(), orjson.dumps(envelope).decode()


def key_kinds(columns: Sequence[ColumnDescription]) -> list[tuple[str, Kind, Any]]:
    """Return the parts of the key's schema, which must not change."""
    key = sorted((c for c in columns if c.key_index >= 0), key=lambda c: c.key_index)
    return [(c.name, value_kind(c.type_oid, c.type_mod), _build_type(c)) for c in key]


def field_names(columns: Sequence[str]) -> list[str]:
    """Return a valid Avro name for each column; a number distinguishes equal names."""
    out: list[str] = []
    taken: set[str] = set()
    for column in columns:
        name = fit = _valid_name(column)
        number = 2
        while name in taken:
            name, number = f"{fit}_{number}", number + 1
        taken.add(name)
        out.append(name)
    return out


def _valid_name(name: str) -> str:
    fit = _INVALID_NAME_CHARS.sub("_", name)
    return fit if fit and not fit[0].isdigit() else f"_{fit}"


def _build_field(column: ColumnDescription, name: str) -> dict[str, Any]:
    kind = _build_type(column)
    field: dict[str, Any] = {"name": name, "type": kind}
    if column.key_index < 0:
        field |= {"type": ["null", kind], "default": None}
    if name != column.name:
        field["doc"] = column.name
    return field


def _build_type(column: ColumnDescription) -> Any:
    form, kind = value_form(column.type_oid, column.type_mod), value_kind(column.type_oid, column.type_mod)
    plain: str = kind
    if kind == "varint":
        plain = "long" if form in _WIDE_FORMS or column.type_oid in _WIDE_OIDS else "int"
    meant = _SEMANTIC_TYPES.get(form) or _SEMANTIC_TYPES_BY_OID.get(column.type_oid)
    if meant is not None:
        return {"type": plain, "connect.version": 1, "connect.name": meant}
    return {"type": plain, "connect.type": "int16"} if column.type_oid == _SMALLINT else plain


def _build_record(name: str, space: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": space, "fields": fields, "connect.name": f"{space}.{name}"}


def _nullable_field(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": ["null", kind], "default": None}


def _source_schema() -> dict[str, Any]:
    snapshot = {
        "type": "string", "connect.version": 1, "connect.parameters": {"allowed": SNAPSHOT_VALUES},
        "connect.default": "false", "connect.name": "io.debezium.data.Enum",
    }  # fmt: skip
    return _build_record(
        "Source", CONNECTOR,
        [
            {"name": "version", "type": "string"},
            {"name": "connector", "type": "string"},
            {"name": "name", "type": "string"},
            {"name": "ts_ms", "type": "long"},
            {"name": "snapshot", "type": [snapshot, "null"], "default": "false"},
            {"name": "db", "type": "string"},
            _nullable_field("sequence", "string"),
            _nullable_field("ts_us", "long"),
            _nullable_field("ts_ns", "long"),
            {"name": "schema", "type": "string"},
            {"name": "table", "type": "string"},
            _nullable_field("txId", "long"),
            _nullable_field("lsn", "long"),
            _nullable_field("xmin", "long"),
        ],
    )  # fmt: skip


def _transaction_schema() -> dict[str, Any]:
    numbers = [{"name": name, "type": "long"} for name in ("total_order", "data_collection_order")]
    return _build_record("block", "event", [{"name": "id", "type": "string"}, *numbers])


class SchemaRegistrar(Protocol):
    async def register(self, subject: str, schema: str) -> int:
        """Register an Avro schema for the subject and return its id. A repeated registration returns the same id.

        Raises InvalidError if it is rejected, UnavailableError, UnknownOutcomeError.
        """
        ...


class NoSchemaRegistrar:
    """Implementation for a cluster without a registry."""

    async def register(self, subject: str, schema: str) -> int:
        raise InvalidError(
            f"the schema of a topic cannot be registered because the registry is disabled: subject={subject}.",
            fix="Set registry.enabled = true, or use another envelope.",
        )


async def register_schemas(
    schemas: SchemaRegistrar, topic: str, columns: Sequence[ColumnDescription]
) -> tuple[int, int]:
    """Register the schemas of the key and the value of a table's topic, and return their ids. Raises the errors of
    `SchemaRegistrar.register`.
    """
    ids = []
    for subject, schema in zip(subjects_of(topic), schemas_of(topic, columns), strict=True):
        try:
            ids.append(await schemas.register(subject, schema))
        except InvalidError as error:
            raise InvalidError(
                f"the registry rejected the schema of a topic: subject={subject} cause={error.message}",
                fix=error.fix or f"Give the subject {subject} a compatibility that allows it (NONE), or delete it.",
            ) from error
    return ids[0], ids[1]
