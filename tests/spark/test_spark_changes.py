"""Planners of streams, asked as Spark asks them, without a session: first answer, hold, storage that is away."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from support.waiting import eventually
from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import DIFF, TIME, Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.read.holds import MovingHold
from tidemill.shards.state.state import ReadHold
from tidemill.spark.source import changes
from tidemill.spark.source.changes import ChangesReader
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.stream import RowReader

SCHEMA = ShardSchema((Column("k", "int64"),), ("k",))


def append(harbour: Any, lower: int, upper: int, key: int) -> None:
    kinds = {"k": key, TIME: upper - 1, DIFF: 1}
    table = pa.table({name: pa.array([value], pa.int64()) for name, value in kinds.items()})

    async def run() -> None:
        shard = await harbour.stores.shard("t", SCHEMA)
        await shard.compare_and_append(lower, upper, [await shard.write_part(table)], "")

    harbour.portal.call(run())


def forget(harbour: Any, since: int) -> int:
    """Move since like the maintenance job, and return the shard's since."""
    return int(harbour.portal.call(harbour.shard("t").downgrade_since("retention", 1, since)))


def reader_of(harbour: Any, **options: str) -> ChangesReader:
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    schema = StructType().add("k", "long").add(TIME, "long").add(DIFF, "long")
    return ChangesReader(SourceOptions({"shard": "t", "changes": "true", **urls, **options}), schema)


def latest(reader: Any, start: Any) -> dict[str, int]:
    """Return the latest offset in the form of versions that did not name the shard."""
    found: dict[str, int] = reader.latestOffset(start, reader.getDefaultReadLimit())
    return {"ts": found["ts"]}


def read(reader: ChangesReader, start: dict[str, int], end: dict[str, int]) -> list[tuple[int, ...]]:
    batches = [b for partition in reader.partitions(start, end) for b in reader.read(partition)]
    return sorted((row["k"], row[TIME], row[DIFF]) for b in batches for row in b.to_pylist())


def stream_hold(harbour: Any) -> ReadHold | None:
    shard = harbour.shard("t")
    harbour.portal.call(shard.frontiers())
    return next((h for h in shard.state.holds if h.reader.startswith("stream/")), None)


def test_a_changelog_begins_with_the_contents_where_older_history_is_forgotten(harbour: Any) -> None:
    append(harbour, 0, 100, 1)
    append(harbour, 100, 200, 2)
    assert forget(harbour, 150) == 150
    reader = reader_of(harbour)
    end = latest(reader, reader.initialOffset())
    assert end == {"ts": 200}
    append(harbour, 200, 300, 3)
    assert forget(harbour, 299) == 199, "held from the moment that it was answered"
    assert read(reader, {"ts": 0}, end) == [(1, 199, 1), (2, 199, 1)]
    assert latest(reader, end) == {"ts": 300}
    assert read(reader, end, {"ts": 300}) == [(3, 299, 1)]


@pytest.mark.parametrize("upper", [150, 300])
def test_a_stream_that_comes_back_to_another_shard_of_the_name_is_told_so(harbour: Any, upper: int) -> None:
    append(harbour, 0, 200, 1)
    reader = reader_of(harbour)
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert latest(reader_of(harbour), end) == {"ts": 200}, "after a restart of its driver"
    harbour.drop_shard("t")
    with pytest.raises(MissingError):
        latest(reader, end)
    append(harbour, 0, upper, 2)
    back = reader_of(harbour)
    for ask in (lambda: latest(back, end), lambda: back.partitions({"ts": 0}, end)):
        with pytest.raises(InvalidError, match="the table was dropped, and another has its name: table=t"):
            ask()
    assert latest(reader_of(harbour), {"ts": 0}) == {"ts": upper}


def test_a_stream_whose_shard_gets_a_column_ends_and_goes_on_from_its_checkpoint(harbour: Any) -> None:
    append(harbour, 0, 100, 1)
    reader, late = reader_of(harbour), reader_of(harbour)
    end = latest(reader, reader.initialOffset())
    assert latest(late, {"ts": 0}) == end

    async def evolve() -> None:
        shard = await harbour.stores.shard("t")
        await shard.evolve(SchemaChanges((Column("n", "int64", "7"),)))
        shard = await harbour.stores.shard("t")
        rows = pa.table({name: pa.array([2], pa.int64()) for name in ("k", "n")})
        times = {TIME: pa.array([150], pa.int64()), DIFF: pa.array([1], pa.int64())}
        for name, column in times.items():
            rows = rows.append_column(name, column)
        await shard.compare_and_append(100, 200, [await shard.write_part(rows)], "")

    harbour.portal.call(evolve())
    assert latest(reader, end) == {"ts": 200} == latest(late, {"ts": 0})
    for asked, start in ((reader, 100), (late, 0)):
        with pytest.raises(
            SchemaEvolvedError, match=r"schema changed since this query started: table=t\. Restart the query"
        ):
            asked.partitions({"ts": start}, {"ts": 200})
    assert read(reader_of(harbour), end, {"ts": 200}) == [(2, 150, 1)]


def test_a_schema_given_by_hand_names_what_the_shard_has(harbour: Any) -> None:
    append(harbour, 0, 100, 1)
    for column, kind in (("k", "string"), ("x", "long"), (TIME, "timestamp")):
        reader = reader_of(harbour)
        reader._schema = StructType().add(column, kind)
        with pytest.raises(InvalidError, match=f"the table's column differs: table=t column={column}"):
            latest(reader, {"ts": 0})


def test_a_planner_that_nobody_asks_keeps_its_place_until_it_is_gone(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "HOLD_TTL_MS", 6000)
    ended: list[MovingHold] = []
    keep: Callable[[MovingHold], Any] = MovingHold.renew_until_cancelled

    async def watched(hold: MovingHold) -> None:
        try:
            await keep(hold)
        finally:
            ended.append(hold)

    monkeypatch.setattr(MovingHold, "renew_until_cancelled", watched)
    append(harbour, 0, 100, 1)
    reader = reader_of(harbour, start="100")
    begun_ms = SystemClock().now_ms()
    assert latest(reader, {"ts": 100}) == {"ts": 100}, "nothing is there yet"
    eventually(lambda: (hold := stream_hold(harbour)) and hold.expires_ms > begun_ms + 6000 + 1500)
    append(harbour, 100, 200, 2)
    assert forget(harbour, 199) == 99
    assert latest(reader, {"ts": 100}) == {"ts": 200}
    assert read(reader, {"ts": 100}, {"ts": 200}) == [(2, 199, 1)]
    assert not ended
    del reader
    gc.collect()
    eventually(lambda: ended)


@pytest.mark.parametrize("error", [UnavailableError, UnknownOutcomeError])
def test_storage_that_is_away_is_waited_for_but_is_not_the_end_of_what_is_there_now(
    harbour: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    append(harbour, 0, 100, 1)
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"k", b"v")])
    harbour.mint("topic/t", 50, topic)
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    changelog, records = reader_of(harbour), RowReader(SourceOptions({"source": "topic/t", **urls}))

    async def away(*_: object) -> Any:
        raise error("consensus is away.")

    for reader in (changelog, records):
        with monkeypatch.context() as patched:
            patched.setattr("tidemill.shards.read.read_handle.ShardReadHandle.wait_upper", away)
            patched.setattr(RowReader, "_latest_end", away)
            assert latest(reader, {"ts": 10}) == {"ts": 10}, "a stream that goes on asks again"
        reader.prepareForTriggerAvailableNow()
        with monkeypatch.context() as patched:
            patched.setattr("tidemill.shards.read.read_handle.ShardReadHandle.wait_upper", away)
            patched.setattr(RowReader, "_latest_end", away)
            with pytest.raises(error):
                latest(reader, {"ts": 10})
    assert (latest(changelog, {"ts": 10}), latest(records, {"ts": 10})) == ({"ts": 100}, {"ts": 51})
