"""A peer of `upsert_peers`, as a process: python upsert_peer.py delta|delta_json|spark TABLE

Lines of JSON on standard input, each answered by "done": ["append", FILE] rows of new keys, ["merge", FILE] updates,
["contents", FILE] the whole table as one Parquet file. `upsert_peers` describes the contents of a file.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.json as pj
import pyarrow.parquet as pq

from tidemill.shards.parts.schema import contents_schema
from tidemill.spark.types import stream_schema
from upsert_load import KEY, SCHEMA


class Table(Protocol):
    def append(self, path: str) -> None: ...
    def merge(self, path: str) -> None: ...
    def contents(self, path: str) -> None: ...


class Delta:
    def __init__(self, table: Path, *, records: bool) -> None:
        self._table = str(table)
        self._updates = last_of_each if records else feather.read_table

    def append(self, path: str) -> None:
        from deltalake import write_deltalake

        write_deltalake(self._table, feather.read_table(path), mode="append")

    def merge(self, path: str) -> None:
        from deltalake import DeltaTable

        merger = DeltaTable(self._table).merge(
            self._updates(path), f"target.{KEY} = source.{KEY}", source_alias="source", target_alias="target"
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def contents(self, path: str) -> None:
        from deltalake import DeltaTable

        pq.write_table(DeltaTable(self._table).to_pyarrow_table(), path)


def last_of_each(path: str) -> pa.Table:
    """The last record of each key, from JSON lines."""
    options = pj.ParseOptions(explicit_schema=contents_schema(stream_schema(SCHEMA, KEY)))
    rows = pj.read_json(path, parse_options=options)
    numbered = rows.select([KEY]).append_column("at", pa.array(np.arange(rows.num_rows)))
    return rows.take(numbered.group_by(KEY).aggregate([("at", "max")]).column("at_max"))


class Spark:
    """Two directories in turns: Spark does not write over what it reads."""

    def __init__(self, table: Path) -> None:
        from tidemill.spark import build_session

        table.mkdir()
        self._spark: Any = build_session("peer", "local[2]", scratch=table.parent / "scratch", driver_memory="2g")
        self._spark.sparkContext.setLogLevel("ERROR")
        self._here, self._next = str(table / "a"), str(table / "b")

    def append(self, path: str) -> None:
        self._spark.read.parquet(path).write.mode("append").parquet(self._here)

    def merge(self, path: str) -> None:
        table, updates = self._spark.read.parquet(self._here), self._spark.read.parquet(path)
        kept = table.join(updates.select(KEY), KEY, "left_anti")
        kept.unionByName(updates).write.mode("overwrite").parquet(self._next)
        self._here, self._next = self._next, self._here

    def contents(self, path: str) -> None:
        pq.write_table(pq.read_table(self._here), path)


def main() -> None:
    name, table = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(table, ignore_errors=True)
    peer: Table = Spark(table) if name == "spark" else Delta(table, records=name == "delta_json")
    answers = sys.stdout
    sys.stdout = sys.stderr  # for output of libraries
    for line in sys.stdin:
        what, path = json.loads(line)
        getattr(peer, what)(path)
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
