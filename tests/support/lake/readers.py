"""Foreign readers of Iceberg tables, each in a separate process with separate packages (`tests/lake/readers`)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.waiting import slowness
from tidemill.shards.nested.values import map_leaf_types
from tidemill.spark.session.session import QUICK_JVM

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests/lake/readers"
INSTALLED = ROOT / ".venv/lake-readers"
READERS = ("pyiceberg", "duckdb", "polars", "datafusion", "spark")
WITHOUT_VECTORS = ("clickhouse", "daft")
"""Readers of format 2 only: they refuse deletion vectors."""
FROM_CATALOGUE = ("pyiceberg", "duckdb", "spark")
"""Readers that ask a REST catalogue."""
BY_SNAPSHOT = ("pyiceberg", "duckdb", "polars", "spark", *WITHOUT_VECTORS)
BY_TAG = ("pyiceberg", "spark")


def packages_of(name: str) -> Path:
    """Return the packages of a reader. Skips the test if they are not installed."""
    if not (INSTALLED / name).is_dir():
        pytest.skip(f"{name} is not installed: run tests/lake/readers/install")
    return INSTALLED / name


class ReadError(Exception):
    """The reader refused the table, in its words."""


class ForeignReader:
    """Process of the reader `name`, started with its first request. Skips the test if it is not installed."""

    def __init__(self, name: str, scratch: Path) -> None:
        # Polars and Daft parse metadata with pyiceberg.
        needed = {"polars": ["pyiceberg"], "daft": ["daft", "pyiceberg"], "spark": ["spark/pyspark"]}.get(name, [name])
        self._packages = [packages_of(each) for each in needed]
        self.name = name
        self.format = 2 if name in WITHOUT_VECTORS else 3
        """Newest format that it reads."""
        self._scratch = scratch
        self._numbers = itertools.count()
        self._process: subprocess.Popen[str] | None = None

    def read(self, metadata: str, snapshot: int | None = None, tag: str | None = None, **more: Any) -> pa.Table:
        """Return the rows of the current snapshot, of that id, or of that tag, with plain Arrow types.

        `between` (column, first, end) filters. Raises ReadError.
        """
        return self.ask({"metadata": metadata, "snapshot": snapshot, "tag": tag, **more})

    def read_catalogue(self, url: str, table: str, **more: Any) -> pa.Table:
        """Read a table of the REST catalogue at `url`, as `read` does; `token` is a bearer token."""
        return self.ask({"catalogue": url, "table": table, **more})

    def shown(self, rows: pa.Table) -> pa.Table:
        """Return rows of a table, with plain types, as this reader shows them.

        ClickHouse has no timestamp without a zone, one type for text and bytes, and an empty array, struct or map in
        place of null.
        """
        if self.name != "clickhouse":
            return rows
        columns: dict[str, pa.Array] = {}
        for field, column in zip(rows.schema, rows.columns, strict=True):
            kind = map_leaf_types(field.type, _clickhouse_type)
            kind = field.type if field.type == pa.string() else kind
            columns[field.name] = pa.array([_without_nulls(value, kind) for value in column.to_pylist()], kind)
        return plain_types(pa.table(columns))

    def ask(self, request: dict[str, Any]) -> pa.Table:
        """Return the result of a request of `tests/lake/readers/serve.py`. Raises ReadError."""
        if self._process is None:
            self._process = self._start()
        out = self._scratch / f"{self.name}-{next(self._numbers)}.arrow"
        asked = {name: value for name, value in request.items() if value is not None} | {"out": str(out)}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended: {(self._scratch / 'log').read_text(errors='replace')[-3000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise ReadError(answer["error"])
        table = pa.ipc.open_file(out.read_bytes()).read_all()
        out.unlink()
        return plain_types(table)

    def _start(self) -> subprocess.Popen[str]:
        jars = (INSTALLED / "spark").glob("*.jar") if self.name == "spark" else ()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, self._packages)),
            "TZ": "UTC",
            "JDK_JAVA_OPTIONS": " ".join(QUICK_JVM),
        }
        with (self._scratch / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPTS / f"{self.name}_reader.py"), *map(str, jars)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=self._scratch,
            )

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20 * slowness())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _clickhouse_type(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string():
        return pa.binary()
    return pa.timestamp("us", "UTC") if pa.types.is_timestamp(kind) else kind


def _without_nulls(value: Any, kind: pa.DataType) -> Any:
    """Return the value with every array, struct and map that is null made empty."""
    if pa.types.is_list(kind):
        return [_without_nulls(each, kind.value_type) for each in value or ()]
    if pa.types.is_map(kind):
        return [(key, _without_nulls(each, kind.item_type)) for key, each in value or ()]
    if pa.types.is_struct(kind):
        return {field.name: _without_nulls((value or {}).get(field.name), field.type) for field in kind}
    return value


def plain_types(table: pa.Table) -> pa.Table:
    """Return the table with one Arrow type per Iceberg type: readers choose among large and view types, and units."""
    return table.cast(pa.schema([pa.field(field.name, _plain_type(field.type)) for field in table.schema]))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(pa.field("element", _plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain_type(field.type)) for field in kind])
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    return pa.int32() if pa.types.is_int16(kind) else kind  # Iceberg has no smaller integer
