"""Frames of Spark: their rows, and how a test saves them to a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill.shards.api import staged_key
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.write.commit import CommitLimits, WriteCommit
from tidemill.spark.write.schema_match import WriteFrame
from tidemill.spark.write.staging import stage_rows


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(r) for r in frame.collect()), key=repr)


@pytest.fixture
def config(harbour: Any, tmp_path: Path) -> str:
    file = tmp_path / "tidemill.toml"
    urls = harbour.urls
    file.write_text(f"[objects]\nurl = '{urls.objects}'\n[consensus]\nurl = '{urls.consensus}'\n")
    return str(file)


def save(frame: Any, config: str, name: str, mode: str = "append", **options: Any) -> None:
    frame.write.format("tidemill").mode(mode).options(config=config, **options).save(name)


SMALL = CommitLimits(range_rows=3, wanted_rows=2)

Row = tuple[Any, ...]


def batches(frame: WriteFrame, rows: Sequence[Row], size: int = 3) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(rows), size):
        columns = zip(*rows[at : at + size], strict=True)
        arrays = [pa.array(v, arrow_type(c.type)) for v, c in zip(columns, frame.columns, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=[c.name for c in frame.columns])


def write(
    harbour: Any, frame: WriteFrame, *tasks: Sequence[Row], token: str = "", limits: CommitLimits | None = SMALL
) -> int:
    """Write as a job of these tasks does; return the shard's upper."""
    portal, stores = harbour.portal, harbour.stores

    def put(data: bytes) -> str:
        key = staged_key("test", stores.clock.now_ms(), stores.rand.nonce())
        portal.call(stores.objects.put(key, data))
        return key

    found = [one for rows in tasks for one in stage_rows(frame, batches(frame, rows), put)]
    return WriteCommit(portal, stores, frame, token or stores.rand.nonce(), limits).run(found)
