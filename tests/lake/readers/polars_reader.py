"""Polars' native scan."""

from typing import Any

import polars as pl
import pyarrow as pa
from serve import serve


def read(request: dict[str, Any]) -> pa.Table:
    if "metadata" not in request or "tag" in request:
        raise NotImplementedError("Polars reads a metadata file, and snapshots by id")
    scan = pl.scan_iceberg(request["metadata"], snapshot_id=request.get("snapshot"), reader_override="native")
    if "between" in request:
        column, first, end = request["between"]
        scan = scan.filter((pl.col(column) >= first) & (pl.col(column) < end))
    return scan.collect().to_arrow()


serve(read)
