"""Foreign readers of Iceberg tables, each in its own process (`tests/lake/readers`)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

READERS = Path(__file__).parents[2] / "lake" / "readers"
INSTALLED = Path(__file__).parents[3] / ".venv" / "lake-readers"


class ForeignReader:
    """Process of the reader `name`. Skips the test if it is not installed."""

    def __init__(self, name: str, scratch: Path) -> None:
        if not (INSTALLED / name).is_dir():
            pytest.skip(f"{name} is not installed: run tests/lake/readers/install")
        self.name = name
        self._scratch = scratch
        self._numbers = itertools.count()
        env = {**os.environ, "PYTHONPATH": str(INSTALLED / name), "TZ": "UTC"}
        self._process = subprocess.Popen(
            [sys.executable, str(READERS / "child.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=scratch,
        )
        assert self._line() == "ready"

    def read(self, metadata: str, snapshot: int | None = None, tag: str | None = None) -> pa.Table:
        """Return the rows of the current snapshot, of that id, or of that tag, with plain Arrow types."""
        out = self._scratch / f"{self.name}-{next(self._numbers)}.arrow"
        asked = {"metadata": metadata.removeprefix("file://"), "snapshot": snapshot, "tag": tag, "out": str(out)}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        error = json.loads(self._line())
        if error:
            raise ReadError(error)
        with pa.memory_map(str(out)) as source:
            return plain_types(pa.ipc.open_file(source).read_all())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended: {self._process.wait()}"
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class ReadError(Exception):
    """The reader refused the table."""


def plain_types(table: pa.Table) -> pa.Table:
    """Return the table with one Arrow type per Iceberg type: readers choose among large and view types."""
    fields = []
    for field in table.schema:
        kind = field.type
        if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            kind = pa.string()
        elif pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
            kind = pa.binary()
        elif pa.types.is_timestamp(kind) and kind.tz:
            kind = pa.timestamp(kind.unit, "UTC")
        elif pa.types.is_int16(kind):
            kind = pa.int32()  # Iceberg has no smaller integer
        fields.append(pa.field(field.name, kind))
    return table.cast(pa.schema(fields))
