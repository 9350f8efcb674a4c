"""iceberg-rust, as DataFusion's table provider."""

from typing import Any

import pyarrow as pa
from datafusion import SessionContext
from pyiceberg_core.datafusion import IcebergDataFusionTable
from serve import serve


def read(request: dict[str, Any]) -> pa.Table:
    if "metadata" not in request or "tag" in request or "snapshot" in request:
        raise NotImplementedError("the table provider reads the current snapshot of a metadata file")
    context = SessionContext()
    context.register_table("t", IcebergDataFusionTable(["tidemill", "t"], request["metadata"], {}))
    where = ""
    if "between" in request:
        column, first, end = request["between"]
        where = f' WHERE "{column}" >= {first!r} AND "{column}" < {end!r}'
    return context.sql(f"SELECT * FROM t{where}").to_arrow_table()


serve(read)
