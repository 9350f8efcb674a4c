"""Nested columns in Iceberg: ids and the name mapping, and foreign readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.lake.readers import ForeignReader, plain_types
from support.lake.world import LakeWorld
from tidemill.lake.format.schema import last_column_id, name_mapping, publish_schema
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.schema import check_schema, contents_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema

TYPES = {
    "tags": "array<string>",
    "who": "struct<name:string,`a.b`:int16,at:timestamp,more:array<struct<d:decimal(5,2),x:binary>>>",
    "m": "map<string,map<int32,float64>>",
}
SCHEMA = check_schema(
    ShardSchema((Column("id", "int64"), *(Column(name, kind) for name, kind in TYPES.items())), ("id",))
)


def ids_of(kind: Any) -> list[int]:
    """Return the ids within an Iceberg type."""
    if isinstance(kind, str):
        return []
    if kind["type"] == "struct":
        return [each for field in kind["fields"] for each in (field["id"], *ids_of(field["type"]))]
    parts = ["element"] if kind["type"] == "list" else ["key", "value"]
    return [each for part in parts for each in (kind[f"{part}-id"], *ids_of(kind[part]))]


def mapped_ids(entries: list[dict[str, Any]]) -> list[int]:
    return [each for entry in entries for each in (entry["field-id"], *mapped_ids(entry.get("fields", [])))]


def test_every_field_has_a_permanent_id_and_a_name() -> None:
    now = publish_schema(SCHEMA, 3)
    assert now.fields[1].type == {"type": "list", "element-id": 101_000, "element": "string", "element-required": False}
    assert [field["name"] for field in now.fields[2].type["fields"]] == ["name", "a.b", "at", "more"]
    found = [each for field in now.fields for each in (field.id, *ids_of(field.type))]
    assert len(set(found)) == len(found) == 16 and max(found) == last_column_id(SCHEMA)
    mapping = json.loads(name_mapping(SCHEMA))
    assert sorted(mapped_ids(mapping)) == sorted([1, 2, 3, *found])
    assert mapping[4]["fields"] == [{"field-id": 101_000, "names": ["element"]}]
    later = evolve_schema(SCHEMA, SchemaChanges(add=(Column("n", "int64"), Column("w", "array<int64>"))))
    fields = publish_schema(later, 3).fields
    assert fields[: len(now.fields)] == now.fields and last_column_id(later) == 105_000


def values(key: int) -> dict[str, Any]:
    inner = {"d": None, "x": b"\x00"} if key % 2 else None
    who = {"name": f"n{key}", "a.b": -key % 1000, "at": key * 1_000_000, "more": [inner] if key % 5 else []}
    entries = [("a", [(-1, 0.5), (key, None)]), ("b", None), ("ä", [])]
    return {
        "id": key,
        "tags": None if key % 7 == 0 else ["x", None][: key % 3],
        "who": None if key % 11 == 0 else who,
        "m": None if key % 13 == 0 else entries[: key % 4],
    }


def rows(keys: range, time: int, diff: int) -> pa.Table:
    table = pa.Table.from_pylist([values(key) for key in keys], contents_schema(SCHEMA))
    for name, value in ((TIME, time), (DIFF, diff)):
        table = table.append_column(name, pa.array([value] * len(keys), pa.int64()))
    return table


@pytest.mark.lake
@pytest.mark.processes
@pytest.mark.parametrize("inline", [False, True])
async def test_readers_have_the_nested_values(reader: ForeignReader, tmp_path: Path, inline: bool, format: int) -> None:
    """Rows of parts of which some are deleted, and with `inline` rows that are written for the reader."""
    world = LakeWorld(tmp_path, format=format)
    shard = await world.table(schema=SCHEMA)
    count = 7 if inline else 3000
    parts = [await shard.write_part(rows(range(count), 1, 1)), await shard.write_part(rows(range(0, count, 3), 1, -1))]
    assert (parts[0].object_key == "") == inline
    await shard.compare_and_append(0, 2, parts, "")
    await world.publish(await world.publisher())
    found = plain_types(reader.read(await world.location()))
    wanted = reader.shown(plain_types(await shard.snapshot(1)))
    assert found.schema.types == wanted.schema.types
    assert sorted(found.to_pylist(), key=lambda row: row["id"]) == sorted(wanted.to_pylist(), key=lambda row: row["id"])
