"""Manifests and manifest lists.

    manifest       entries of data files, or of delete files, with the sequence numbers under which they were added
    manifest list  the manifests of one snapshot

An unchanged manifest is listed again, with its own sequence numbers. Entries of a new manifest are
`added` and inherit their numbers from its entry in the list, or `existing` and carry them.

Source: the table specification, "Manifests", "Manifest Lists", "Sequence Number Inheritance", "Row Lineage".
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import fastavro
import msgspec

from tidemill.base.errors import CorruptError
from tidemill.lake.format.avro_schemas import entry_schema, list_schema
from tidemill.lake.format.schema import Schema

DATA, DELETES = 0, 1
NAMES = ("data", "deletes")
EXISTING, ADDED = 0, 1
FORMAT_OF_DELETES = {2: "PARQUET", 3: "PUFFIN"}


class ContentFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data file, or a delete file about the data file `referenced`.

    lower, upper   bounds by column id, in Iceberg's single-value encoding
    values, nulls  numbers of values and of nulls by column id
    offset, length place of a deletion vector in its Puffin file
    """

    path: str
    rows: int
    size_bytes: int
    content: int = DATA
    file_format: str = "PARQUET"
    first_row_id: int | None = None
    referenced: str | None = None
    offset: int | None = None
    length: int | None = None
    lower: Mapping[int, bytes] | None = None
    upper: Mapping[int, bytes] | None = None
    values: Mapping[int, int] | None = None
    nulls: Mapping[int, int] | None = None


class Entry(msgspec.Struct, frozen=True):
    """A file in a manifest. An added one has no numbers: they are those of the manifest."""

    file: ContentFile
    status: int = ADDED
    snapshot_id: int | None = None
    sequence: int | None = None


class Manifest(msgspec.Struct, frozen=True):
    """A manifest as a manifest list names it. `first_row_id` is None for deletes, and in format 2.

    `sequence` and `snapshot_id` are those under which it was written; `min_sequence` is the least one of its entries.
    """

    path: str
    size_bytes: int
    content: int
    sequence: int
    min_sequence: int
    snapshot_id: int
    added_files: int
    existing_files: int
    added_rows: int
    existing_rows: int
    first_row_id: int | None = None


def encode_manifest(version: int, schema: Schema, content: int, entries: Sequence[Entry]) -> bytes:
    """Return the bytes of a manifest of DATA or DELETES of an unpartitioned table."""
    metadata = {
        "schema": msgspec.json.encode(schema).decode(),
        "schema-id": str(schema.schema_id),
        "partition-spec": "[]",
        "partition-spec-id": "0",
        "format-version": str(version),
        "content": NAMES[content],
    }
    return _encode(entry_schema(version), metadata, [_entry_out(entry) for entry in entries])


def decode_manifest(data: bytes, manifest: Manifest) -> list[Entry]:
    """Return the entries of a manifest that the list names, with inherited numbers filled in. Raises CorruptError."""
    out: list[Entry] = []
    next_row = manifest.first_row_id
    for record in _decode(data, manifest.path):
        file = record["data_file"]
        inherits = record["status"] == ADDED
        first_row = file.get("first_row_id")
        if manifest.content == DATA and next_row is not None and first_row is None:
            first_row, next_row = next_row, next_row + file["record_count"]
        out.append(
            Entry(
                ContentFile(
                    file["file_path"],
                    file["record_count"],
                    file["file_size_in_bytes"],
                    file["content"],
                    file["file_format"],
                    first_row,
                    file["referenced_data_file"],
                    file.get("content_offset"),
                    file.get("content_size_in_bytes"),
                    *(_map_in(file[name]) for name in _MAPS),
                ),
                record["status"],
                manifest.snapshot_id if inherits and record["snapshot_id"] is None else record["snapshot_id"],
                manifest.sequence if inherits and record["sequence_number"] is None else record["sequence_number"],
            )
        )
    return out


def encode_manifest_list(
    version: int, snapshot_id: int, parent_id: int | None, sequence: int, manifests: Sequence[Manifest],
    first_row_id: int = 0,
) -> bytes:  # fmt: skip
    """Return the bytes of the manifest list of a snapshot. `first_row_id` is the snapshot's, for format 3."""
    metadata = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_id is None else str(parent_id),
        "sequence-number": str(sequence),
        "format-version": str(version),
    }
    if version >= 3:
        metadata["first-row-id"] = str(first_row_id)
    return _encode(list_schema(version), metadata, [_manifest_out(manifest) for manifest in manifests])


def decode_manifest_list(data: bytes, where: str) -> list[Manifest]:
    """Return the manifests of a snapshot. Raises CorruptError."""
    return [
        Manifest(
            record["manifest_path"],
            record["manifest_length"],
            record["content"],
            record["sequence_number"],
            record["min_sequence_number"],
            record["added_snapshot_id"],
            record["added_files_count"],
            record["existing_files_count"],
            record["added_rows_count"],
            record["existing_rows_count"],
            record.get("first_row_id"),
        )
        for record in _decode(data, where)
    ]


_MAPS = ("lower_bounds", "upper_bounds", "value_counts", "null_value_counts")


def _entry_out(entry: Entry) -> dict[str, Any]:
    file = entry.file
    return {
        "status": entry.status,
        "snapshot_id": entry.snapshot_id,
        "sequence_number": entry.sequence,
        "file_sequence_number": entry.sequence,
        "data_file": {
            "content": file.content,
            "file_path": file.path,
            "file_format": file.file_format,
            "partition": {},
            "record_count": file.rows,
            "file_size_in_bytes": file.size_bytes,
            "lower_bounds": _map_out(file.lower),
            "upper_bounds": _map_out(file.upper),
            "value_counts": _map_out(file.values),
            "null_value_counts": _map_out(file.nulls),
            "first_row_id": file.first_row_id,
            "referenced_data_file": file.referenced,
            "content_offset": file.offset,
            "content_size_in_bytes": file.length,
        },
    }


def _manifest_out(manifest: Manifest) -> dict[str, Any]:
    return {
        "manifest_path": manifest.path,
        "manifest_length": manifest.size_bytes,
        "partition_spec_id": 0,
        "content": manifest.content,
        "sequence_number": manifest.sequence,
        "min_sequence_number": manifest.min_sequence,
        "added_snapshot_id": manifest.snapshot_id,
        "added_files_count": manifest.added_files,
        "existing_files_count": manifest.existing_files,
        "deleted_files_count": 0,
        "added_rows_count": manifest.added_rows,
        "existing_rows_count": manifest.existing_rows,
        "deleted_rows_count": 0,
        "first_row_id": manifest.first_row_id,
    }


def _map_out(values: Mapping[int, Any] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [{"key": key, "value": value} for key, value in values.items()]


def _map_in(pairs: list[dict[str, Any]] | None) -> dict[int, Any] | None:
    return None if pairs is None else {pair["key"]: pair["value"] for pair in pairs}


def _encode(schema: Any, metadata: dict[str, str], records: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    fastavro.writer(out, schema, records, codec="deflate", metadata=metadata)
    return out.getvalue()


def _decode(data: bytes, where: str) -> list[dict[str, Any]]:
    try:
        return list(fastavro.reader(io.BytesIO(data)))
    except (ValueError, EOFError, KeyError, IndexError, TypeError) as error:
        raise CorruptError(f"a manifest is unreadable: object={where} bytes={len(data)} ({error}).") from error
