"""Format of a topic's records: the checked options of `p.topic`.

    schema=            columns of the records
      columns=, except_columns=    which of them the table has
      include=                     more columns of the table, with metadata of Kafka
    delete_when=       may use all of them
    sequence_by=       columns of the table

The format belongs to a table's identity: records that were read in one format are not read again in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, unknown_name_fix
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.schema import check_schema
from tidemill.spark.formats.protobuf_reader import check_protobuf
from tidemill.spark.merge.sequence import SequenceRule, tombstone_schema
from tidemill.spark.merge.sequence_ranks import is_ordered
from tidemill.spark.predicates.predicate import compile_predicate
from tidemill.spark.types import Names, declared_columns, key_names, split_names

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMATS = ("json", "avro", "protobuf", "json_schema")
ENVELOPES = ("none", "debezium")
FRAMED = frozenset({"avro", "protobuf", "json_schema"})
WITH_SCHEMAS = {"avro": "AVRO", "protobuf": "PROTOBUF"}
"""Formats whose records cannot be read without the writer's schema, with the registry's name of the type."""

MIN_KEEP_S, MAX_KEEP_S = 1.0, 3_650 * 86_400.0
KEEP_S = 172_800.0
"""Default of `sequence_keep_s`: two days, as of pipelines.cdc.tombstoneGCThresholdInSeconds in Databricks."""

METADATA: dict[str, tuple[str, ...]] = {
    "timestamp": ("timestamp",),
    "offset": ("int64",),
    "partition": ("int32",),
    "key": ("string", "binary"),
    "headers": ("json",),
}
"""Metadata of a record, and the types that its column may have; the first is the default."""
_TYPE_NAMES = {"string": "string", "binary": "binary", "timestamp": "timestamp", "json": "json"} | {
    "bigint": "int64", "long": "int64", "int": "int32", "integer": "int32",
}  # fmt: skip


class TopicOptions(TypedDict, total=False):
    """Options of `p.topic`.

    format           "json", "avro", "protobuf" or "json_schema"; all but the first with Confluent's framing
    envelope         "debezium": change events of Debezium
    registry         URL of another registry than the cluster's
    delete_when      condition on a record's columns under which it deletes its key
    columns, except_columns    the columns of `schema` that the table has, or does not have
    include          metadata of Kafka → name of its column: {"timestamp": "sent_at"}
    sequence_by      columns of the table that order the records of a key, instead of the topic's order
    sequence_keep_s  how long a deletion counts against later records with a lower sequence
    """

    format: str
    envelope: str
    registry: str
    delete_when: str
    columns: Names
    except_columns: Names
    include: Mapping[str, str]
    sequence_by: Names
    sequence_keep_s: float


class RecordFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Checked options. `include`: pairs of metadata and column; `hidden`: columns of the records that only
    `delete_when` uses; `sequence_by`: empty for the topic's order."""

    format: str = "json"
    envelope: str = "none"
    registry: str = ""
    delete_when: str = ""
    include: tuple[tuple[str, str], ...] = ()
    hidden: tuple[Column, ...] = ()
    sequence_by: tuple[str, ...] = ()
    sequence_keep_s: float = KEEP_S

    @property
    def sequence_rule(self) -> SequenceRule | None:
        return SequenceRule(self.sequence_by, round(self.sequence_keep_s * 1000)) if self.sequence_by else None

    @property
    def record_sequence(self) -> tuple[str, ...]:
        """Columns of the sequence that are in the records themselves."""
        included = {name for _, name in self.include}
        return tuple(name for name in self.sequence_by if name not in included)

    def value_schema(self, schema: ShardSchema) -> ShardSchema:
        """Return the columns and keys that are in the records themselves; the key may be empty."""
        included = {name for _, name in self.include}
        columns = tuple(c for c in schema.columns if c.name not in included)
        return ShardSchema((*columns, *self.hidden), tuple(name for name in schema.key if name not in included))

    def encode(self) -> str:
        """Return the format for the catalogue, without the password of a registry; "" for plain JSON objects."""
        url = urlsplit(self.registry)
        public = replace(self, registry=urlunsplit(url._replace(netloc=url.netloc.rpartition("@")[2])))
        return "" if public == PLAIN else msgspec.json.encode(public).decode()


PLAIN = RecordFormat()


def decode_format(text: str) -> RecordFormat:
    """Return a format from the catalogue."""
    return msgspec.json.decode(text, type=RecordFormat) if text else PLAIN


def format_difference(before: str, now: str) -> str:
    """Return how the rows of a table would differ between two formats in the catalogue; "" if they do not: another
    registry, and additional columns of metadata, change no row."""
    old, new = decode_format(before), decode_format(now)
    out = [
        f"{name}: {_format_option(getattr(old, name))} became {_format_option(getattr(new, name))}"
        for name in ("format", "envelope", "delete_when", "sequence_by", "sequence_keep_s")
        if getattr(old, name) != getattr(new, name)
    ]
    out += [
        f"include: {meta} is no longer {column}" for meta, column in old.include if (meta, column) not in new.include
    ]
    return ", ".join(out)


def _format_option(option: object) -> str:
    return ", ".join(option) if isinstance(option, tuple) and option else str(option or "none")


def declare_topic(
    topic: str, key: Names, schema: str | StructType, options: TopicOptions
) -> tuple[ShardSchema, RecordFormat]:
    """Return the schema of the table, and the format of the records. Raises InvalidError."""
    unknown = sorted(options.keys() - TopicOptions.__annotations__.keys())
    if unknown:
        raise InvalidError(
            f"unknown option of a topic: topic={topic} option={unknown[0]}.",
            fix=unknown_name_fix(unknown[0], sorted(TopicOptions.__annotations__)),
        )
    found = RecordFormat(
        _one_of(topic, "format", options.get("format", "json"), FORMATS),
        _one_of(topic, "envelope", options.get("envelope", "none"), ENVELOPES),
        _registry(topic, options),
    )
    if found.format == "protobuf":
        check_protobuf()
        if found.envelope != "none":
            raise InvalidError(
                f"change events are not read in this format: topic={topic} format=protobuf envelope={found.envelope}.",
                fix="Let the connector write JSON or Avro.",
            )
    declared = declared_columns(schema)
    chosen = _chosen_columns(topic, declared, options)
    included = _included_columns(topic, options.get("include", {}))
    taken = next((c.name for _, c in included if c.name in {d.name for d in declared}), None)
    if taken is not None:
        raise InvalidError(
            f"the schema has a column of this name already: topic={topic} column={taken}.",
            fix="Give the column of include= another name.",
        )
    table = check_schema(ShardSchema((*chosen, *(c for _, c in included)), key_names(key)))
    nested = next((c for c in table.columns if is_nested(c.type)), None)
    if nested is not None and found.envelope != "none":
        raise InvalidError(
            f"nested columns are not read from change events: topic={topic} column={nested.name} type={nested.type}.",
            fix="Declare the column as json, which keeps the value's text.",
        )
    condition = options.get("delete_when", "")
    hidden = _hidden_columns(topic, condition, declared, table) if condition else ()
    return table, replace(
        found,
        delete_when=condition,
        include=tuple((meta, c.name) for meta, c in included),
        hidden=hidden,
        **_sequence(topic, table, options),
    )


class _SequenceFields(TypedDict, total=False):
    sequence_by: tuple[str, ...]
    sequence_keep_s: float


def _sequence(topic: str, table: ShardSchema, options: TopicOptions) -> _SequenceFields:
    names = tuple(name for name in split_names(options.get("sequence_by", ())) if name)
    keep_s = options.get("sequence_keep_s", KEEP_S)
    if not names:
        if "sequence_by" in options or "sequence_keep_s" in options:
            raise InvalidError(f"sequence_by names no column: topic={topic}.", fix="Name columns of the table.")
        return {}
    types = {column.name: column.type for column in table.columns}
    for name in names:
        if name not in types:
            raise InvalidError(
                f"the table has no such column: topic={topic} sequence_by={name}.",
                fix="The sequence is compared with that of the table's row: name only columns that the table has. "
                + unknown_name_fix(name, list(types)),
            )
        if name in table.key:
            raise InvalidError(
                f"a key column orders no records of its key: topic={topic} sequence_by={name}.",
                fix="Name columns that are not in the key.",
            )
        if not is_ordered(types[name]):
            raise InvalidError(
                f"values of this type have no order: topic={topic} sequence_by={name} type={types[name]}.",
                fix="Use numbers, dates, timestamps, text or binary.",
            )
    if len(set(names)) < len(names):
        raise InvalidError(f"sequence_by names a column twice: topic={topic} sequence_by={', '.join(names)}.")
    if not isinstance(keep_s, int | float) or not MIN_KEEP_S <= keep_s <= MAX_KEEP_S:
        raise InvalidError(
            f"sequence_keep_s is out of range: topic={topic} sequence_keep_s={keep_s}.",
            fix=f"Give seconds, from {MIN_KEEP_S:g} to {MAX_KEEP_S:g}.",
        )
    tombstone_schema(table, SequenceRule(names, 1))
    return {"sequence_by": names, "sequence_keep_s": float(keep_s)}


def _hidden_columns(topic: str, condition: str, declared: tuple[Column, ...], table: ShardSchema) -> tuple[Column, ...]:
    """Return the columns that the condition uses and the table does not have."""
    if not isinstance(condition, str):
        raise InvalidError(
            f"delete_when is no SQL text: topic={topic} delete_when={condition!r}.",
            fix='Give it as delete_when="deleted".',
        )
    have = {column.name for column in table.columns}
    others = [column for column in declared if column.name not in have]
    try:
        used = compile_predicate(condition, (*table.columns, *others)).columns
    except InvalidError as error:
        raise InvalidError(f"{error.message.rstrip('.')} topic={topic} option=delete_when.", fix=error.fix) from error
    return tuple(column for column in others if column.name in used)


def _one_of(topic: str, option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise InvalidError(
            f"unknown {option} of a topic: topic={topic} {option}={given!r}.", fix=f"Use one of: {', '.join(known)}."
        )
    return given


def _registry(topic: str, options: TopicOptions) -> str:
    url, form = options.get("registry", ""), options.get("format", "json")
    if url and form not in WITH_SCHEMAS:
        raise InvalidError(f"this format needs no registry: topic={topic} format={form}.", fix="Leave registry= out.")
    if url and not url.startswith(("http://", "https://")):
        raise InvalidError(
            f"not the URL of a registry: topic={topic} registry={url!r}.", fix='Give it as registry="http://HOST:PORT".'
        )
    return url.rstrip("/")


def _chosen_columns(topic: str, declared: tuple[Column, ...], options: TopicOptions) -> tuple[Column, ...]:
    if "columns" in options and "except_columns" in options:
        raise InvalidError(
            f"columns and except_columns exclude each other: topic={topic}.", fix="Use one of them, or neither."
        )
    option = "columns" if "columns" in options else "except_columns"
    names = split_names(options.get("columns", options.get("except_columns", ())))
    have = [c.name for c in declared]
    for name in names:
        if name not in have:
            raise InvalidError(
                f"the schema has no such column: topic={topic} {option}={name}.", fix=unknown_name_fix(name, have)
            )
    if option == "columns":
        return tuple(c for c in declared if c.name in names)
    return tuple(c for c in declared if c.name not in names)


def _included_columns(topic: str, include: Mapping[str, str]) -> list[tuple[str, Column]]:
    out = []
    if not isinstance(include, Mapping) or not all(isinstance(given, str) for given in include.values()):
        raise InvalidError(
            f"include maps no metadata to columns: topic={topic} include={include!r}.",
            fix='Give it as include={"timestamp": "sent_at"}.',
        )
    for meta, given in include.items():
        if meta not in METADATA:
            raise InvalidError(
                f"unknown metadata of a record: topic={topic} include={meta}.", fix=unknown_name_fix(meta, [*METADATA])
            )
        name, _, last = given.strip().rpartition(" ")
        kind = _TYPE_NAMES.get(last.lower(), "") if name else ""
        if not kind:
            name, kind = given.strip(), METADATA[meta][0]
        if kind not in METADATA[meta]:
            raise InvalidError(
                f"this metadata has another type: topic={topic} include={meta} type={kind}.",
                fix=f"Use one of: {', '.join(METADATA[meta])}.",
            )
        out.append((meta, Column(name.strip(), kind)))
    return out
