"""Planners of streams as Spark 4.0 and 4.1 call them: without the start of the next batch and without a limit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.spark.source.bindings import SourceBindings
from tidemill.spark.source.changes import ChangesReader
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.progress_stream import ProgressReader
from tidemill.spark.source.stream import RowReader

SCHEMA = ShardSchema((Column("k", "int64"),), ("k",))


def options(harbour: Any, **given: str) -> SourceOptions:
    return SourceOptions({"objects": harbour.urls.objects, "consensus": harbour.urls.consensus, **given})


def append(harbour: Any, lower: int, upper: int) -> None:
    """Append one row, whose key is `upper`."""
    table = pa.table({name: pa.array([n], pa.int64()) for name, n in {"k": upper, TIME: upper - 1, DIFF: 1}.items()})

    async def run() -> None:
        shard = await harbour.stores.shard("t", SCHEMA)
        await shard.compare_and_append(lower, upper, [await shard.write_part(table)], "")

    harbour.portal.call(run())


def changes_of(harbour: Any) -> ChangesReader:
    schema = StructType().add("k", "long").add(TIME, "long").add(DIFF, "long")
    return ChangesReader(options(harbour, table="t", changes="true", max_rows="1"), schema)


def test_a_stream_of_changes_holds_all_history_until_it_knows_where_it_continues(harbour: Any) -> None:
    append(harbour, 0, 100)
    append(harbour, 100, 200)
    reader = changes_of(harbour)
    first = reader.latestOffset()
    assert first["ts"] == 200, "all that there is, because the start is unknown"
    assert harbour.portal.call(harbour.shard("t").downgrade_since("retention", 1, 199)) == 0
    (partition,) = reader.partitions({**first, "ts": 100}, first)
    assert [row["k"] for batch in reader.read(partition) for row in batch.to_pylist()] == [200]
    append(harbour, 200, 300)
    append(harbour, 300, 400)
    assert [reader.latestOffset()["ts"] for _ in range(3)] == [300, 400, 400], "within the limit"
    harbour.drop_shard("t")
    append(harbour, 0, 500)
    again = changes_of(harbour)
    with pytest.raises(InvalidError, match="the table was dropped, and another has its name: table=t"):
        again.partitions(first, again.latestOffset())


def test_streams_of_records_offer_the_newest_end_first_and_storage_that_is_away_is_no_end(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("t")
    for time_ms in (50, 60, 70):
        harbour.produce(topic, [(b"k", b"v")])
        harbour.mint("topic/t", time_ms, topic)
    rows = RowReader(options(harbour, source="topic/t", max_rows="1"))
    progress = ProgressReader(options(harbour, source="topic/t", rows="false", max_rows="1"))

    async def away(*_: object) -> Any:
        raise UnavailableError("consensus is away.")

    with monkeypatch.context() as patched:
        patched.setattr(SourceBindings, "end", away)
        for reader in (rows, progress):
            with pytest.raises(UnavailableError):
                reader.latestOffset()
    assert (rows.latestOffset(), progress.latestOffset()) == ({"ts": 71}, {"topic/t": 71})
    assert RowReader(options(harbour, source="topic/t", start="90")).latestOffset() == {"ts": 90}
    for time_ms in (80, 90):
        harbour.produce(topic, [(b"k", b"v")])
        harbour.mint("topic/t", time_ms, topic)
    assert (rows.latestOffset(), progress.latestOffset()) == ({"ts": 81}, {"topic/t": 81}), "within the limit"
    with monkeypatch.context() as patched:
        patched.setattr(SourceBindings, "end_within", away)
        assert (rows.latestOffset(), progress.latestOffset()) == ({"ts": 81}, {"topic/t": 81})
