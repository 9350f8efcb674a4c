"""Table metadata: the JSON object that every reader begins with.

    add_snapshot   a new current snapshot, its schema, and a tag for its time
    add_tag        a tag of a later time whose contents are those of the current snapshot
    expire         drops snapshots that were replaced before a time, with their tags and schemas

Source: the table specification, "Table Metadata and Snapshots", "Snapshot References", "Row Lineage".
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tidemill.base.errors import CorruptError
from tidemill.lake.format.schema import MAPPING_PROPERTY, Schema, last_column_id, name_mapping, publish_schema
from tidemill.shards.api import ShardSchema

MAIN = "main"
LAST_PARTITION_ID = 999
"""Value for a table that never had a partition field."""


class Snapshot(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """`timestamp_ms` is when it was published; the time of its contents is in `summary`. `first_row_id` and
    `added_rows` are of format 3."""

    snapshot_id: int
    sequence_number: int
    timestamp_ms: int
    manifest_list: str
    summary: dict[str, str]
    schema_id: int
    parent_snapshot_id: int | UnsetType = UNSET
    first_row_id: int | UnsetType = UNSET
    added_rows: int | UnsetType = UNSET


class Reference(msgspec.Struct, frozen=True, rename="kebab"):
    snapshot_id: int
    type: str


class LogEntry(msgspec.Struct, frozen=True, rename="kebab"):
    snapshot_id: int
    timestamp_ms: int


class MetadataLogEntry(msgspec.Struct, frozen=True, rename="kebab"):
    metadata_file: str
    timestamp_ms: int


class PartitionSpec(msgspec.Struct, frozen=True, rename="kebab"):
    spec_id: int = 0
    fields: tuple[()] = ()


class SortOrder(msgspec.Struct, frozen=True, rename="kebab"):
    order_id: int = 0
    fields: tuple[()] = ()


class TableMetadata(msgspec.Struct, frozen=True, rename="kebab"):
    """Metadata of one table. Snapshots are in the order of their publication; the last one is current."""

    format_version: int
    table_uuid: str
    location: str
    last_sequence_number: int
    last_updated_ms: int
    last_column_id: int
    schemas: tuple[Schema, ...]
    current_schema_id: int
    properties: dict[str, str]
    partition_specs: tuple[PartitionSpec, ...] = (PartitionSpec(),)
    default_spec_id: int = 0
    last_partition_id: int = LAST_PARTITION_ID
    sort_orders: tuple[SortOrder, ...] = (SortOrder(),)
    default_sort_order_id: int = 0
    next_row_id: int | UnsetType = UNSET
    current_snapshot_id: int | UnsetType = UNSET
    snapshots: tuple[Snapshot, ...] = ()
    refs: dict[str, Reference] = {}
    snapshot_log: tuple[LogEntry, ...] = ()
    metadata_log: tuple[MetadataLogEntry, ...] = ()
    statistics: tuple[()] = ()
    partition_statistics: tuple[()] = ()

    @property
    def current(self) -> Snapshot | None:
        return self.snapshots[-1] if self.snapshots else None


def new_metadata(version: int, table_uuid: str, location: str, schema: ShardSchema) -> TableMetadata:
    """Return the metadata of a table without snapshots."""
    return TableMetadata(
        version, table_uuid, location, 0, 0, last_column_id(schema), (publish_schema(schema, version),),
        schema.version, {MAPPING_PROPERTY: name_mapping(schema)}, next_row_id=0 if version >= 3 else UNSET,
    )  # fmt: skip


def with_schema(metadata: TableMetadata, schema: ShardSchema) -> TableMetadata:
    """Return the metadata with `schema` as its current schema."""
    if metadata.current_schema_id == schema.version:
        return metadata
    others = tuple(known for known in metadata.schemas if known.schema_id != schema.version)
    return replace(
        metadata,
        schemas=(*others, publish_schema(schema, metadata.format_version)),
        current_schema_id=schema.version,
        last_column_id=max(metadata.last_column_id, last_column_id(schema)),
        properties=metadata.properties | {MAPPING_PROPERTY: name_mapping(schema)},
    )


def tag_of(time_ms: int) -> str:
    """Return the name of the tag of a time."""
    return f"t{time_ms}"


def add_snapshot(metadata: TableMetadata, snapshot: Snapshot, time_ms: int) -> TableMetadata:
    """Return the metadata with a new current snapshot of the contents at `time_ms`."""
    refs = {
        MAIN: Reference(snapshot.snapshot_id, "branch"),
        tag_of(time_ms): Reference(snapshot.snapshot_id, "tag"),
    }
    added = snapshot.added_rows
    next_row = metadata.next_row_id
    return replace(
        metadata,
        last_sequence_number=snapshot.sequence_number,
        last_updated_ms=snapshot.timestamp_ms,
        current_snapshot_id=snapshot.snapshot_id,
        snapshots=(*metadata.snapshots, snapshot),
        snapshot_log=(*metadata.snapshot_log, LogEntry(snapshot.snapshot_id, snapshot.timestamp_ms)),
        refs=metadata.refs | refs,
        next_row_id=UNSET if next_row is UNSET or added is UNSET else next_row + added,
    )


def add_tag(metadata: TableMetadata, time_ms: int, now_ms: int) -> TableMetadata:
    """Return the metadata with a tag of `time_ms`, at which the contents are still those of the current snapshot."""
    assert metadata.current is not None, "a table is tagged after its first publication"
    tag = {tag_of(time_ms): Reference(metadata.current.snapshot_id, "tag")}
    return replace(metadata, refs=metadata.refs | tag, last_updated_ms=max(now_ms, metadata.last_updated_ms))


def expire(metadata: TableMetadata, now_ms: int, keep_ms: int) -> TableMetadata:
    """Return the metadata without the snapshots that another replaced more than `keep_ms` ago.

    Of the tags of one snapshot, those that were followed by another go when that is `keep_ms` older than the newest
    time, since a table may be far behind the clock. The current snapshot and its newest tag always stay.
    """
    before_ms = now_ms - keep_ms
    replaced_ms = [later.timestamp_ms for later in metadata.snapshots[1:]]
    gone = {old.snapshot_id for old, at_ms in zip(metadata.snapshots, replaced_ms, strict=False) if at_ms < before_ms}
    times = sorted((time_of(name) for name in metadata.refs if name != MAIN), reverse=True)
    oldest_ms = times[0] - keep_ms if times else 0
    followed: dict[int, int] = {}
    refs = {name: ref for name, ref in metadata.refs.items() if name == MAIN}
    for time_ms in times:
        ref = metadata.refs[tag_of(time_ms)]
        if ref.snapshot_id not in gone and followed.get(ref.snapshot_id, oldest_ms) >= oldest_ms:
            refs[tag_of(time_ms)] = ref
        followed[ref.snapshot_id] = time_ms
    replaced_ms = [later.timestamp_ms for later in metadata.metadata_log[1:]] + [metadata.last_updated_ms]
    log = tuple(e for e, at_ms in zip(metadata.metadata_log, replaced_ms, strict=False) if at_ms >= before_ms)
    if not gone and refs == metadata.refs and log == metadata.metadata_log:
        return metadata
    kept = tuple(s for s in metadata.snapshots if s.snapshot_id not in gone)
    used = {snapshot.schema_id for snapshot in kept} | {metadata.current_schema_id}
    return replace(
        metadata,
        snapshots=kept,
        snapshot_log=tuple(entry for entry in metadata.snapshot_log if entry.snapshot_id not in gone),
        refs=refs,
        metadata_log=log,
        schemas=tuple(schema for schema in metadata.schemas if schema.schema_id in used),
    )


def with_logged(metadata: TableMetadata, location: str, timestamp_ms: int) -> TableMetadata:
    """Return the metadata that replaces the file `location`, which was last updated at `timestamp_ms`."""
    return replace(metadata, metadata_log=(*metadata.metadata_log, MetadataLogEntry(location, timestamp_ms)))


def time_of(tag: str) -> int:
    """Return the time of a tag that `tag_of` named."""
    return int(tag[1:])


def encode_metadata(metadata: TableMetadata) -> bytes:
    return msgspec.json.encode(metadata)


def decode_metadata(data: bytes, where: str) -> TableMetadata:
    """Return the metadata that `encode_metadata` was given. Raises CorruptError."""
    try:
        return msgspec.json.decode(data, type=TableMetadata)
    except msgspec.DecodeError as error:
        raise CorruptError(f"table metadata is unreadable: object={where} bytes={len(data)} ({error}).") from error
