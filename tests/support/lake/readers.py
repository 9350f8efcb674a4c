"""Foreign readers of Iceberg tables, each in a process of its own with its own packages (tests/lake/readers)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.waiting import slowness

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests/lake/readers"
INSTALLED = ROOT / ".venv/lake-readers"
READERS = ("pyiceberg", "duckdb", "polars", "datafusion", "spark")
FROM_CATALOGUE = ("pyiceberg", "duckdb", "spark")
"""Readers that ask a REST catalogue."""
BY_TAG = ("pyiceberg", "spark")
BY_SNAPSHOT = ("pyiceberg", "duckdb", "polars", "spark")


class RefusedByReaderError(Exception):
    """Error of the reader, in its words."""


class Reader:
    """A reader's process. Started with the first request, which takes Spark some seconds."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name = name
        self._out = scratch
        self._number = count()
        self._process: subprocess.Popen[str] | None = None

    def read(self, **request: Any) -> pa.Table:
        """Return the rows that the reader returns. Raises RefusedByReaderError."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        out = self._out / f"{next(self._number)}.arrow"
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request | {"out": str(out)}) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise AssertionError(f"{self.name} ended: {(self._out / 'log').read_text(errors='replace')[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedByReaderError(answer["error"])
        table = pa.ipc.open_file(out.read_bytes()).read_all()
        out.unlink()
        assert table.num_rows == answer["rows"]
        return table

    def _start(self) -> subprocess.Popen[str]:
        arguments, packages = [], [INSTALLED / self.name]
        if self.name == "spark":
            (jar,) = (INSTALLED / "spark").glob("*.jar")
            arguments, packages = [str(jar)], [INSTALLED / "spark/pyspark"]
        if self.name == "polars":
            packages = [INSTALLED / "pyiceberg"]  # Polars parses metadata with it
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, packages)), "PYTHONHASHSEED": "0"}
        self._out.mkdir(parents=True, exist_ok=True)
        with (self._out / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(SCRIPTS / f"{self.name}_reader.py"), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=self._out,
            )

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(20 * slowness())
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def is_installed(name: str) -> bool:
    return (INSTALLED / ("pyiceberg" if name == "polars" else name)).is_dir()


@contextmanager
def reader(name: str, scratch: Path) -> Iterator[Reader]:
    """A reader, or a skipped test where it is not installed."""
    if not is_installed(name):
        pytest.skip(f"needs tests/lake/readers/install {name}")
    started = Reader(name, scratch)
    try:
        yield started
    finally:
        started.close()
