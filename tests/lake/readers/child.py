"""Foreign reader in its own process: `child.py pyiceberg|duckdb`.

Each line of the input is JSON: `metadata`, the path of a metadata file; `snapshot`, an id or null; `tag`, a name or
null; `out`, where to write the rows as an Arrow file. Each is answered by a line with "" or an error.
"""

from __future__ import annotations

import glob
import importlib
import json
import sys
from typing import Any

import pyarrow as pa


def pyiceberg_reader() -> Any:
    from pyiceberg.table import StaticTable

    def read(metadata: str, snapshot: int | None, tag: str | None) -> pa.Table:
        table = StaticTable.from_metadata(f"file://{metadata}")
        if tag is not None:
            return table.scan().use_ref(tag).to_arrow()
        return table.scan(snapshot_id=snapshot).to_arrow()

    return read


def duckdb_reader() -> Any:
    import duckdb

    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    for name in ("avro", "iceberg"):
        (folder,) = importlib.import_module(f"duckdb_extension_{name}").__path__
        (file,) = glob.glob(f"{folder}/**/*.duckdb_extension", recursive=True)
        connection.execute(f"LOAD '{file}'")
    connection.execute("SET TimeZone = 'UTC'")

    def read(metadata: str, snapshot: int | None, tag: str | None) -> pa.Table:
        assert tag is None, "the extension knows no tags"
        which = "" if snapshot is None else f", snapshot_from_id = {snapshot}::UBIGINT"
        return connection.execute(f"FROM iceberg_scan('{metadata}'{which})").fetch_arrow_table()

    return read


def main() -> None:
    read = {"pyiceberg": pyiceberg_reader, "duckdb": duckdb_reader}[sys.argv[1]]()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            rows = read(asked["metadata"], asked["snapshot"], asked["tag"])
            with pa.ipc.new_file(asked["out"], rows.schema) as out:
                out.write_table(rows)
            error = ""
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
