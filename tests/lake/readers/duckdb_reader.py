"""DuckDB with its extensions from PyPI, which loads nothing from elsewhere."""

import importlib
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from serve import serve

connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
for name in ("avro", "httpfs", "iceberg"):
    package = Path(importlib.import_module(f"duckdb_extension_{name}").__path__[0])
    (file,) = package.rglob("*.duckdb_extension")
    connection.execute(f"LOAD '{file}'")
connection.execute("SET TimeZone = 'UTC'")


def read(request: dict[str, Any]) -> pa.Table:
    if "tag" in request:
        raise NotImplementedError("DuckDB 1.5 reads snapshots by id, not by tag")
    if "parquet" in request:
        source = f"read_parquet('{request['parquet']}/*.parquet')"
    elif "metadata" in request:
        path = request["metadata"].removeprefix("file://")
        version = f", snapshot_from_id = {request['snapshot']}::UBIGINT" if "snapshot" in request else ""
        source = f"iceberg_scan('{path}'{version})"
    else:
        token = f"TOKEN '{request['token']}'" if "token" in request else "AUTHORIZATION_TYPE 'none'"
        connection.execute("DETACH DATABASE IF EXISTS lake")
        connection.execute(f"ATTACH '' AS lake (TYPE iceberg, ENDPOINT '{request['catalogue']}', {token})")
        version = f" AT (VERSION => {request['snapshot']})" if "snapshot" in request else ""
        source = f'lake.tidemill."{request["table"]}"{version}'
    where = ""
    if "between" in request:
        column, first, end = request["between"]
        where = f' WHERE "{column}" >= {first!r} AND "{column}" < {end!r}'
    return connection.execute(f"SELECT {request.get('select', '*')} FROM {source}{where}").to_arrow_table()


serve(read)
