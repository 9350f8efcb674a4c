"""Position deletes of Iceberg v2: one Parquet file per data file, with its path and the positions of deleted rows.

    file_path  string, field id 2147483546      the same in all rows
    pos        int64, field id 2147483545       ascending

Readers exist that take only files about one data file, with that path as both bounds of `file_path` in the manifest.

Source: the table specification, "Position Delete Files".
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.shards.parts.arrow_rows import Mask, int64s

PATH_FIELD = 2147483546
POSITION_FIELD = 2147483545

SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(PATH_FIELD)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(POSITION_FIELD)}),
    ]
)


def encode_position_deletes(path: str, mask: Mask) -> bytes:
    """Return the file that deletes the True rows of the data file `path`."""
    positions = np.flatnonzero(mask)
    columns = [pa.repeat(pa.scalar(path), len(positions)), pa.array(positions, pa.int64())]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
    return bytes(sink.getvalue())


def decode_position_deletes(data: bytes, rows: int) -> Mask:
    """Return the mask of a data file of `rows` rows. Raises CorruptError."""
    try:
        positions = int64s(pq.ParquetFile(pa.BufferReader(data)).read(columns=["pos"], use_threads=False), "pos")
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"a position delete file is unreadable: bytes={len(data)} ({error}).") from error
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < rows:
        raise CorruptError(f"a position delete file has positions beyond its data file: rows={rows}.")
    mask = np.zeros(rows, dtype=bool)
    mask[positions] = True
    return mask
