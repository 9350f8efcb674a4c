"""Schemas with permanent field ids, manifests, and table metadata."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest

from tidemill.base.errors import CorruptError
from tidemill.lake.format import manifests as m
from tidemill.lake.format.metadata import (
    Snapshot,
    TableMetadata,
    add_snapshot,
    add_tag,
    decode_metadata,
    encode_metadata,
    expire,
    new_metadata,
    with_logged,
    with_schema,
)
from tidemill.lake.format.schema import (
    default_json,
    field_id,
    inexpressible,
    oldest_version,
    publish_schema,
    published_names,
)
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema

SCHEMA = ShardSchema((Column("id", "int64"), Column("price", "decimal(10,2)"), Column("small", "int16")), ("id",))


def decoded(metadata: TableMetadata) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_metadata(metadata))
    return found


def test_columns_begin_at_4_and_the_mapping_names_every_column_of_the_files() -> None:
    metadata = decoded(new_metadata(3, "uuid", "s3://b/lake/x", SCHEMA))
    assert metadata["schemas"] == [
        {
            "type": "struct", "schema-id": 1, "fields": [
                {"id": 4, "name": "id", "required": False, "type": "long"},
                {"id": 5, "name": "price", "required": False, "type": "decimal(10, 2)"},
                {"id": 6, "name": "small", "required": False, "type": "int"},
            ],
        }
    ]  # fmt: skip
    assert metadata["last-column-id"] == 6
    assert json.loads(metadata["properties"]["schema.name-mapping.default"]) == [
        {"field-id": number, "names": [name]}
        for number, name in enumerate(["_hash", "_time", "_diff", "id", "price", "small"], 1)
    ]
    assert metadata["next-row-id"] == 0, "required in format 3"
    assert "next-row-id" not in decoded(new_metadata(2, "uuid", "s3://b/lake/x", SCHEMA))


def test_a_column_keeps_its_id_when_it_is_widened_retired_and_added_back() -> None:
    schema, seen = SCHEMA, [field_id(SCHEMA, "small")]
    metadata = new_metadata(3, "uuid", "l", schema)
    for changes in (
        SchemaChanges(add=(Column("note", "string", "new"),)),
        SchemaChanges(widen=(Column("small", "int64"),)),
        SchemaChanges(retire=("small",)),
        SchemaChanges(add=(Column("more", "date"), Column("small", "int64"))),
    ):
        schema = evolve_schema(schema, changes)
        metadata = with_schema(metadata, schema)
        seen.append(field_id(schema, "small"))
    assert seen == [6] * 5
    assert [s.schema_id for s in metadata.schemas] == [1, 2, 3, 4, 5]
    assert metadata.current_schema_id == 5 and metadata.last_column_id == 8
    fields = {field.name: field for field in metadata.schemas[-1].fields}
    assert (fields["note"].id, fields["note"].initial_default, fields["note"].write_default) == (7, "new", "new")
    assert [{f.name: f.type for f in s.fields}["small"] for s in metadata.schemas] == ["int", "int", *["long"] * 3]
    assert "since schema version 4" in {f.name: f for f in metadata.schemas[3].fields}["small"].doc


def test_names_of_metadata_columns_are_published_under_another_name() -> None:
    schema = ShardSchema((Column("_pos", "int64"), Column("_pos_", "int64"), Column("_file", "string")), ())
    assert published_names(schema) == {"_pos": "_pos__", "_pos_": "_pos_", "_file": "_file_"}
    mapping = json.loads(new_metadata(3, "u", "l", schema).properties["schema.name-mapping.default"])
    assert [entry["names"] for entry in mapping[3:]] == [["_pos"], ["_pos_"], ["_file"]], "as in the files"


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        ("bool", "t", True),
        ("int16", "-7", -7),
        ("int64", "9007199254740993", 9007199254740993),
        ("float32", "0.1", 0.10000000149011612),
        ("float64", "-0", -0.0),
        ("string", "it's", "it's"),
        ("json", '{"a": 1}', '{"a": 1}'),
        ("binary", "\\x00ff", "00ff"),
        ("date", "2026-02-28", "2026-02-28"),
        ("timestamp", "2026-02-28 12:00:00.5+02", "2026-02-28T10:00:00.500000+00:00"),
        ("timestamp_ntz", "2026-02-28 12:00:00", "2026-02-28T12:00:00"),
        ("decimal(10,2)", "-1.50", "-1.50"),
    ],
)
def test_defaults_are_the_json_values_of_their_types(kind: str, default: str, value: object) -> None:
    assert repr(default_json(Column("c", kind, default))) == repr(value)


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("float64", "NaN"),
        ("float32", "-Infinity"),
        ("timestamp", "infinity"),
        ("date", "0044-03-15 BC"),
        ("array<int32>", "{}"),
    ],
)
def test_a_default_that_iceberg_cannot_express_is_not_published(kind: str, default: str) -> None:
    schema = evolve_schema(SCHEMA, SchemaChanges(add=(Column("n", "int32", "1"), Column("c", kind, default))))
    fields = publish_schema(schema, 3).fields
    assert [field.initial_default for field in fields[-2:]] == [1, None]
    assert [column.name for column in inexpressible(schema, 3)] == ["c"]
    assert oldest_version(schema, 3) == schema.version == 2


def test_format_2_has_no_defaults() -> None:
    schema = evolve_schema(SCHEMA, SchemaChanges(add=(Column("n", "int32", "1"),)))
    assert publish_schema(schema, 3).fields[-1].initial_default == 1
    assert publish_schema(schema, 2).fields[-1].initial_default is None
    assert (oldest_version(schema, 3), oldest_version(schema, 2)) == (0, 2)
    empty = evolve_schema(SCHEMA, SchemaChanges(add=(Column("n", "int32"),)))
    assert publish_schema(empty, 2).fields[-1].initial_default is None
    assert oldest_version(empty, 2) == 0


# manifests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_a_manifest_gives_back_its_entries_with_inherited_numbers(version: int) -> None:
    lineage = version >= 3
    files = [
        m.ContentFile(f"s3://b/{n}.parquet", 10 * n, 1000 + n, lower={4: b"\1"}, upper={4: b"\2"}, nulls={4: 0})
        for n in (1, 2)
    ]
    old = m.ContentFile("s3://b/0.parquet", 5, 900, first_row_id=3 if lineage else None)
    entries = [m.Entry(files[0]), m.Entry(old, m.EXISTING, 11, 1), m.Entry(files[1])]
    data = m.encode_manifest(version, publish_schema(SCHEMA, version), m.DATA, entries)
    manifest = m.Manifest("p", len(data), m.DATA, 4, 1, 12, 2, 1, 30, 5, first_row_id=100 if lineage else None)
    found = m.decode_manifest(data, manifest)
    assert [(e.file.path, e.status, e.snapshot_id, e.sequence) for e in found] == [
        ("s3://b/1.parquet", m.ADDED, 12, 4),
        ("s3://b/0.parquet", m.EXISTING, 11, 1),
        ("s3://b/2.parquet", m.ADDED, 12, 4),
    ]
    assert [e.file.first_row_id for e in found] == ([100, 3, 110] if lineage else [None] * 3)
    assert found[0].file.upper == {4: b"\2"} and found[0].file.values is None
    reader = fastavro.reader(io.BytesIO(data))
    assert reader.metadata["format-version"] == str(version) and reader.metadata["content"] == "data"
    assert json.loads(reader.metadata["schema"])["fields"][0]["id"] == 4


def test_every_avro_field_has_its_id() -> None:
    """Readers look fields up by id; fastavro keeps attributes that it does not know."""

    def check(schema: Any) -> int:
        if isinstance(schema, list):
            return sum(map(check, schema))
        if not isinstance(schema, dict):
            return 0
        if schema["type"] == "array":
            assert schema.get("logicalType") == "map" or "element-id" in schema
            return check(schema["items"])
        assert all("field-id" in field for field in schema.get("fields", ()))
        return len(schema.get("fields", ())) + sum(check(field["type"]) for field in schema.get("fields", ()))

    for version, fields in ((2, 25), (3, 28)):
        data = m.encode_manifest(version, publish_schema(SCHEMA, version), m.DELETES, [])
        assert check(fastavro.reader(io.BytesIO(data)).writer_schema) == fields


def test_a_manifest_list_gives_back_its_manifests() -> None:
    listed = [
        m.Manifest("a", 100, m.DATA, 1, 1, 11, 1, 0, 10, 0, first_row_id=0),
        m.Manifest("b", 200, m.DELETES, 2, 2, 12, 1, 0, 3, 0),
    ]
    data = m.encode_manifest_list(3, 12, 11, 2, listed, first_row_id=10)
    assert m.decode_manifest_list(data, "l") == listed
    metadata = fastavro.reader(io.BytesIO(data)).metadata
    assert {k: v for k, v in metadata.items() if not k.startswith("avro.")} == {
        "snapshot-id": "12", "parent-snapshot-id": "11", "sequence-number": "2", "format-version": "3",
        "first-row-id": "10",
    }  # fmt: skip
    with pytest.raises(CorruptError, match="object=l"):
        m.decode_manifest_list(data[:-20], "l")


# table metadata --------------------------------------------------------------------------------


def published(*times: tuple[int, int]) -> TableMetadata:
    """Return metadata with a snapshot of 10 rows for each (time of contents, time of publication)."""
    metadata = new_metadata(3, "uuid", "l", SCHEMA)
    for number, (time_ms, at_ms) in enumerate(times, 1):
        snapshot = Snapshot(number, number, at_ms, f"list-{number}", {"operation": "overwrite"}, 1,
                            first_row_id=10 * (number - 1), added_rows=10)  # fmt: skip
        metadata = add_snapshot(metadata, snapshot, time_ms)
    return metadata


def test_a_snapshot_is_current_and_has_the_tag_of_its_time() -> None:
    found = decoded(published((100, 1000), (200, 2000)))
    assert found["current-snapshot-id"] == 2 and found["last-sequence-number"] == 2
    assert found["next-row-id"] == 20 and found["last-updated-ms"] == 2000
    assert found["refs"] == {
        "main": {"snapshot-id": 2, "type": "branch"},
        "t100": {"snapshot-id": 1, "type": "tag"},
        "t200": {"snapshot-id": 2, "type": "tag"},
    }
    assert found["snapshot-log"] == [
        {"snapshot-id": 1, "timestamp-ms": 1000},
        {"snapshot-id": 2, "timestamp-ms": 2000},
    ]
    assert found["snapshots"][0] == {
        "snapshot-id": 1, "sequence-number": 1, "timestamp-ms": 1000, "manifest-list": "list-1",
        "summary": {"operation": "overwrite"}, "schema-id": 1, "first-row-id": 0, "added-rows": 10,
    }  # fmt: skip


def test_metadata_survives_its_encoding_and_damage_is_found() -> None:
    metadata = published((100, 1000), (200, 2000))
    assert decode_metadata(encode_metadata(metadata), "k") == metadata
    with pytest.raises(CorruptError, match="object=k"):
        decode_metadata(encode_metadata(metadata)[:-1], "k")


def test_a_snapshot_expires_when_it_has_not_been_current_for_a_while() -> None:
    metadata = published((100, 1000), (200, 2000), (300, 3000))
    assert expire(metadata, 5000, 3000) is metadata, "the first snapshot was current until 2000"
    found = expire(metadata, 5001, 3000)
    assert [s.snapshot_id for s in found.snapshots] == [2, 3]
    assert set(found.refs) == {"main", "t200", "t300"}
    assert [entry.snapshot_id for entry in found.snapshot_log] == [2, 3]
    last = expire(metadata, 10**6, 3000)
    assert [s.snapshot_id for s in last.snapshots] == [3], "the current snapshot never expires"
    assert set(last.refs) == {"main", "t300"}


def test_a_later_time_of_equal_contents_gets_a_tag_of_the_same_snapshot() -> None:
    metadata = add_tag(add_tag(published((100, 1000)), 150, 1500), 200, 2000)
    assert metadata.refs["t150"].snapshot_id == 1 and len(metadata.snapshots) == 1
    assert metadata.last_updated_ms == 2000
    assert expire(metadata, 10**6, 50) is metadata, "the first tag was the newest until 150"
    assert set(expire(metadata, 10**6, 49).refs) == {"main", "t150", "t200"}
    assert set(expire(metadata, 10**6, 0).refs) == {"main", "t200"} | {"t150"}, "it was the newest until 200"


def test_schemas_and_metadata_files_are_listed_while_a_snapshot_or_a_reader_may_need_them() -> None:
    metadata = with_schema(published((100, 1000)), evolve_schema(SCHEMA, SchemaChanges(add=(Column("n", "int32"),))))
    metadata = with_logged(metadata, "s3://b/first", 1000)
    snapshot = Snapshot(2, 2, 2000, "list-2", {"operation": "overwrite"}, 2, first_row_id=10, added_rows=10)
    metadata = with_logged(add_snapshot(metadata, snapshot, 200), "s3://b/second", 1500)
    assert expire(metadata, 2500, 1000) is metadata
    found = expire(metadata, 2501, 1000)
    assert [entry.metadata_file for entry in found.metadata_log] == ["s3://b/second"]
    assert [schema.schema_id for schema in found.schemas] == [1, 2]
    assert [schema.schema_id for schema in expire(metadata, 3001, 1000).schemas] == [2]
