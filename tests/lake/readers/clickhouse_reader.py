"""ClickHouse as a library (chdb), which reads format 2 and only files below its working directory."""

import os
from typing import Any

import chdb
import pyarrow as pa
from serve import serve


def read(request: dict[str, Any]) -> pa.Table:
    if "metadata" not in request or "tag" in request:
        raise NotImplementedError("the library reads a metadata file, and snapshots by id")
    path = request["metadata"].removeprefix("file://")
    os.chdir(path.partition("/lake/")[0])
    table, _, file = path.rpartition("/metadata/")
    source = f"icebergLocal('{table}', SETTINGS iceberg_metadata_file_path = 'metadata/{file}')"
    where = ""
    if "between" in request:
        column, first, end = request["between"]
        where = f'WHERE "{column}" >= {first!r} AND "{column}" < {end!r}'
    settings = ["session_timezone = 'UTC'", "output_format_arrow_string_as_string = 0"]
    if "snapshot" in request:
        settings.append(f"iceberg_snapshot_id = {request['snapshot']}")
    found = chdb.query(f"SELECT * FROM {source} {where} SETTINGS {', '.join(settings)}", "ArrowTable")
    assert isinstance(found, pa.Table)
    return pa.table({name: as_text(found[name]) for name in found.column_names})


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return bytes as text if all of them are: ClickHouse has one type for both."""
    try:
        return column.cast(pa.string()) if column.type == pa.binary() else column
    except pa.ArrowInvalid:
        return column


serve(read)
