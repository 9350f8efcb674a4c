"""Daft, which reads format 2, with pyiceberg for the metadata."""

from typing import Any

import daft
import pyarrow as pa
from pyiceberg.table import StaticTable
from serve import serve


def read(request: dict[str, Any]) -> pa.Table:
    if "metadata" not in request or "tag" in request:
        raise NotImplementedError("it reads snapshots by id, not by tag")
    rows = daft.read_iceberg(StaticTable.from_metadata(request["metadata"]), snapshot_id=request.get("snapshot"))
    if "between" in request:
        column, first, end = request["between"]
        rows = rows.where((daft.col(column) >= first) & (daft.col(column) < end))
    return rows.to_arrow()


serve(read)
