"""An Iceberg table in a directory, written by the format package alone from rows and masks of deleted rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.lake.format.deletion_vectors import encode_puffin, encode_vector
from tidemill.lake.format.manifests import (
    DATA,
    DELETES,
    FORMAT_OF_DELETES,
    ContentFile,
    Entry,
    Manifest,
    encode_manifest,
    encode_manifest_list,
)
from tidemill.lake.format.metadata import Snapshot, add_snapshot, encode_metadata, new_metadata, with_schema
from tidemill.lake.format.position_deletes import encode_position_deletes
from tidemill.shards.api import DIFF, TIME, ShardSchema
from tidemill.shards.parts.parts import encode_part

Mask = npt.NDArray[np.bool_]


class WrittenTable:
    """`metadata` is the URL of the newest metadata file; `snapshots` are the ids, oldest first."""

    def __init__(self, directory: Path, schema: ShardSchema, version: int = 3) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._version = version
        self._schema = schema
        self._metadata = new_metadata(version, "4e6ad1b9-1f4d-4a4e-8d5d-c9ac90a3f9cd", directory.as_uri(), schema)
        self._files: list[ContentFile] = []
        self._number = 0
        self.snapshots: list[int] = []
        self.metadata = ""

    def evolve(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._metadata = with_schema(self._metadata, schema)

    def add_part(self, rows: pa.Table, time_ms: int) -> pa.Table:
        """Add a data file of insertions at `time_ms`; return the rows in the order of the file."""
        marks = {TIME: pa.array([time_ms] * len(rows), pa.int64()), DIFF: pa.array([1] * len(rows), pa.int64())}
        for name, values in marks.items():
            rows = rows.append_column(name, values)
        part = encode_part(self._schema, rows)
        ordered = pq.read_table(pa.BufferReader(part.data)).select([column.name for column in self._schema.columns])
        self._files.append(ContentFile(self._write("part.parquet", part.data.to_pybytes()), part.rows, part.data.size))
        return ordered

    def publish(self, deleted: Sequence[Mask], time_ms: int) -> None:
        """Publish all files, each with its mask of deleted rows, as a snapshot of `time_ms`."""
        sequence = self._metadata.last_sequence_number + 1
        snapshot_id = 1000 + sequence
        schema = next(s for s in self._metadata.schemas if s.schema_id == self._metadata.current_schema_id)
        manifests = []
        for content, name, files in (
            (DATA, "data", list(self._files)),
            (DELETES, "deletes", self._delete_files(deleted)),
        ):
            if files:
                data = encode_manifest(
                    self._version, schema, "data" if content == DATA else "deletes", [Entry(file) for file in files]
                )
                path = self._write(f"{name}.avro", data)
                rows = sum(file.rows for file in files)
                first = self._metadata.next_row_id if content == DATA and self._version >= 3 else None
                assert first is None or isinstance(first, int)
                manifests.append(
                    Manifest(path, len(data), content, sequence, sequence, snapshot_id, len(files), 0, rows, 0, first)
                )
        before = self._metadata.next_row_id
        first_row = before if isinstance(before, int) else 0
        parent = self.snapshots[-1] if self.snapshots else None
        listed = encode_manifest_list(self._version, snapshot_id, parent, sequence, manifests, first_row)
        added = sum(file.rows for file in self._files)
        lineage = {"first_row_id": first_row, "added_rows": added} if self._version >= 3 else {}
        snapshot = Snapshot(
            snapshot_id, sequence, time_ms, self._write("list.avro", listed),
            {"operation": "overwrite", "tidemill.time": str(time_ms)}, self._metadata.current_schema_id, **lineage,
        )  # fmt: skip
        self._metadata = add_snapshot(self._metadata, snapshot, time_ms)
        self.snapshots.append(snapshot_id)
        self.metadata = self._write("metadata.json", encode_metadata(self._metadata))

    def _delete_files(self, deleted: Sequence[Mask]) -> list[ContentFile]:
        masks = [(file.path, mask) for file, mask in zip(self._files, deleted, strict=True) if mask.any()]
        kind = FORMAT_OF_DELETES[self._version]
        out = []
        for path, mask in masks if self._version >= 3 else ():
            # A file for each vector: DuckDB 1.5 may read the first vector of a file in place of another.
            data, (place,) = encode_puffin([encode_vector(path, mask)])
            out.append(
                ContentFile(
                    self._write("vector.puffin", data), place.count, len(data), 1, kind,
                    referenced=path, offset=place.offset, length=place.length,
                )
            )  # fmt: skip
        if self._version < 3:
            for path, mask in masks:
                data = encode_position_deletes(path, mask)
                bounds = {2147483546: path.encode()}
                out.append(
                    ContentFile(
                        self._write("deletes.parquet", data), int(mask.sum()), len(data), 1, kind,
                        referenced=path, lower=bounds, upper=bounds,
                    )
                )  # fmt: skip
        return out

    def _write(self, name: str, data: bytes) -> str:
        self._number += 1
        path = self._directory / f"{self._number:03}-{name}"
        if name == "metadata.json":
            path = self._directory / f"v{self._number}.metadata.json"
        path.write_bytes(data)
        return path.as_uri()
