"""pyiceberg."""

from typing import Any

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import StaticTable
from serve import serve


def read(request: dict[str, Any]) -> pa.Table:
    if "metadata" in request:
        table: Any = StaticTable.from_metadata(request["metadata"])
    else:
        token = {"token": request["token"]} if "token" in request else {}
        table = RestCatalog("tidemill", uri=request["catalogue"], **token).load_table(("tidemill", request["table"]))
    given: dict[str, Any] = {"snapshot_id": request["snapshot"]} if "snapshot" in request else {}
    if "between" in request:
        column, first, end = request["between"]
        given["row_filter"] = f"{column} >= {first!r} and {column} < {end!r}"
    scan = table.scan(**given)
    return (scan.use_ref(request["tag"]) if "tag" in request else scan).to_arrow()


serve(read)
