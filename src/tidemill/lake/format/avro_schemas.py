"""Avro schemas of manifests and manifest lists, with Iceberg's field ids.

Only fields that are written or that readers require are present; all others are optional in the specification
("Manifests", "Manifest Lists").
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import fastavro

AvroSchema = Any


def _field(name: str, kind: Any, number: int) -> dict[str, Any]:
    field = {"name": name, "type": kind, "field-id": number}
    return field | {"default": None} if isinstance(kind, list) else field


def _optional(kind: Any) -> list[Any]:
    return ["null", kind]


def _map_by_id(key: int, value: int, kind: str) -> list[Any]:
    """Return a map by column id, which Iceberg stores as an array of pairs."""
    pair = {
        "type": "record",
        "name": f"k{key}_v{value}",
        "fields": [_field("key", "int", key), _field("value", kind, value)],
    }
    return _optional({"type": "array", "logicalType": "map", "items": pair})


@lru_cache(maxsize=2)
def entry_schema(version: int) -> AvroSchema:
    """Return the schema of a manifest's entries in format `version`."""
    file = [
        _field("content", "int", 134),
        _field("file_path", "string", 100),
        _field("file_format", "string", 101),
        _field("partition", {"type": "record", "name": "r102", "fields": []}, 102),
        _field("record_count", "long", 103),
        _field("file_size_in_bytes", "long", 104),
        _field("value_counts", _map_by_id(119, 120, "long"), 109),
        _field("null_value_counts", _map_by_id(121, 122, "long"), 110),
        _field("lower_bounds", _map_by_id(126, 127, "bytes"), 125),
        _field("upper_bounds", _map_by_id(129, 130, "bytes"), 128),
        _field("sort_order_id", _optional("int"), 140),
        _field("referenced_data_file", _optional("string"), 143),
    ]
    if version >= 3:
        file += [
            _field("first_row_id", _optional("long"), 142),
            _field("content_offset", _optional("long"), 144),
            _field("content_size_in_bytes", _optional("long"), 145),
        ]
    return fastavro.parse_schema(
        {
            "type": "record",
            "name": "manifest_entry",
            "fields": [
                _field("status", "int", 0),
                _field("snapshot_id", _optional("long"), 1),
                _field("sequence_number", _optional("long"), 3),
                _field("file_sequence_number", _optional("long"), 4),
                _field("data_file", {"type": "record", "name": "r2", "fields": file}, 2),
            ],
        }
    )


@lru_cache(maxsize=2)
def list_schema(version: int) -> AvroSchema:
    """Return the schema of a manifest list's entries in format `version`."""
    summary = {
        "type": "record",
        "name": "r508",
        "fields": [
            _field("contains_null", "boolean", 509),
            _field("contains_nan", _optional("boolean"), 518),
            _field("lower_bound", _optional("bytes"), 510),
            _field("upper_bound", _optional("bytes"), 511),
        ],
    }
    fields = [
        _field("manifest_path", "string", 500),
        _field("manifest_length", "long", 501),
        _field("partition_spec_id", "int", 502),
        _field("content", "int", 517),
        _field("sequence_number", "long", 515),
        _field("min_sequence_number", "long", 516),
        _field("added_snapshot_id", "long", 503),
        _field("added_files_count", "int", 504),
        _field("existing_files_count", "int", 505),
        _field("deleted_files_count", "int", 506),
        _field("added_rows_count", "long", 512),
        _field("existing_rows_count", "long", 513),
        _field("deleted_rows_count", "long", 514),
        _field("partitions", _optional({"type": "array", "items": summary, "element-id": 508}), 507),
        _field("key_metadata", _optional("bytes"), 519),
    ]
    if version >= 3:
        fields.append(_field("first_row_id", _optional("long"), 520))
    return fastavro.parse_schema({"type": "record", "name": "manifest_file", "fields": fields})
