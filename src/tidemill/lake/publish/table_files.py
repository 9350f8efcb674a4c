"""Files of a snapshot: parts of which some rows count, and one file of the rows that have no place in a part.

    data file   a part, listed by the URI of its object
    loose rows  rows of inline parts that count, and further copies of rows: in a file under the table's prefix

A file of which no row counts is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.lake.format.manifests import ContentFile
from tidemill.lake.settings import LakeSettings
from tidemill.lake.vectors.evaluation import Evaluation
from tidemill.shards.api import HASH, Part, ShardSchema
from tidemill.shards.parts.parts import decode_part
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.stored_types import file_schema


class SnapshotFiles(msgspec.Struct, frozen=True):
    """Data files by URI, and the vectors of those of which some rows do not count, with the numbers of such rows.

    `parts` are those that the data files are, all but the loose rows.
    """

    data: Mapping[str, ContentFile]
    parts: Mapping[str, Part]
    vectors: Mapping[str, bytes]
    dead: Mapping[str, int]


def files_of(settings: LakeSettings, found: Evaluation) -> SnapshotFiles:
    """Return the parts to list."""
    data, parts, vectors, dead = {}, {}, {}, {}
    for state in found.states.values():
        part = state.view.part
        if not part.object_key or not state.counting:
            continue
        uri = settings.uri(part.object_key)
        data[uri], parts[uri] = ContentFile(uri, part.rows, part.size_bytes), part
        if state.blob:
            vectors[uri], dead[uri] = state.blob, state.dead
    return SnapshotFiles(data, parts, vectors, dead)


def loose_rows(schema: ShardSchema, found: Evaluation) -> pa.Table:
    """Return the rows without a place in a part. Raises CorruptError."""
    tables = [contents_schema(schema).empty_table(), found.copies.drop_columns([HASH])]
    for state in found.states.values():
        part = state.view.part
        if not part.object_key and state.counting:
            rows = decode_part(schema, part.inline, part).select(contents_schema(schema).names)
            tables.append(rows.filter(pa.array(~state.mask())) if state.blob else rows)
    return pa.concat_tables(tables)


def encode_loose_rows(schema: ShardSchema, rows: pa.Table) -> bytes:
    """Return the rows as Parquet, with the types of parts."""
    target = file_schema(rows.schema, schema)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, target, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(rows.cast(target))
    return bytes(sink.getvalue())
