"""The fold of a topic: the last record of each key up to a time, malformed ones counted, against a shard."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from msgspec.structs import replace

from tidemill.base.clock import Rand, SystemClock
from tidemill.cli.verify import topic_fold
from tidemill.cli.verify.table import verify_expected
from tidemill.cli.verify.topic_fold import TopicFold
from tidemill.consensus.memory import MemoryConsensus
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME, Binding, Column, ShardSchema
from tidemill.shards.parts.schema import arrow_type
from tidemill.shards.registry import open_remap, open_shard
from tidemill.spark.formats.record_format import RecordFormat
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.predicates.expectations import Expectation, Expectations
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch

SCHEMA = ShardSchema((Column("id", "string"), Column("n", "int64"), Column("x", "float64")), ("id",))


class Topic:
    """Two partitions of one-record batches, read as executors read."""

    def __init__(self) -> None:
        self.records: list[list[tuple[bytes, bytes | None]]] = [[], []]

    def add(self, partition: int, key: str, value: str | None) -> None:
        self.records[partition].append((key.encode(), None if value is None else value.encode()))

    @property
    def ends(self) -> dict[str, tuple[int, ...]]:
        return {"tid": tuple(len(r) for r in self.records)}

    async def last_stable(self, topic_id: str, partition: int) -> int:
        return len(self.records[partition])

    async def plan(self, topic_id: str, partition: int, start: int, end: int) -> list[BatchRef]:
        return [BatchRef(str(partition), 0, 0, offset, 1, 0) for offset in range(start, end)]

    async def read(self, refs: Sequence[BatchRef]) -> list[bytes]:
        found = [(self.records[int(r.object_key)][r.base_offset], r.base_offset) for r in refs]
        return [encode_batch([Record(k, v, (), 0, 0)], base_offset=offset) for (k, v), offset in found]


async def test_a_topic_folds_to_what_its_shard_should_hold_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_fold, "BINDINGS_AT_ONCE", 2)
    clock, rand = SystemClock(), Rand()
    consensus = MemoryConsensus(clock)
    topic = Topic()
    remap = await open_remap(consensus, clock, rand, "topic/t")
    topic.add(0, "a", '{"id": "a", "n": 1}')
    topic.add(1, "b", '{"id": "b", "n": 2, "x": 0.5}')
    await remap.mint(Binding(10, topic.ends))
    topic.add(0, "a", '{"id": "a", "n": 7}')
    topic.add(0, "a", '{"id": "a", "n": 8}')
    topic.add(1, "b", None)
    topic.add(1, "z", '{"id": "z", "n": "malformed"}')
    await remap.mint(Binding(20, topic.ends))
    topic.add(1, "b", '{"id": "b", "n": 3}')
    await remap.mint(Binding(30, topic.ends))
    feed = TopicFeed("t", "tid", 2, False, SCHEMA)

    shard = await open_shard(consensus, MemoryObjects(clock), clock, rand, "t", SCHEMA)
    updates = [
        ("a", 1, None, 10, 1),
        ("b", 2, 0.5, 10, 1),
        ("a", 1, None, 20, -1),
        ("a", 8, None, 20, 1),
        ("b", 2, 0.5, 20, -1),
        ("b", 3, None, 30, 1),
    ]
    columns = list(zip(*updates, strict=True))
    rows = pa.table(dict(zip(("id", "n", "x", TIME, DIFF), (pa.array(c) for c in columns), strict=True)))
    await shard.compare_and_append(0, 31, [await shard.write_part(rows)], "")

    counts = {}
    for time_ms in (9, 10, 20, 25, 30):
        folded = TopicFold(remap, topic, feed, time_ms)
        found = await verify_expected(shard, time_ms, folded.rows)
        assert found.clean, found
        counts[time_ms] = (found.rows, folded.records, folded.malformed)
    assert counts == {9: (0, 0, 0), 10: (2, 2, 0), 20: (1, 6, 1), 25: (1, 6, 1), 30: (2, 7, 1)}

    expected = Expectations((Expectation("not two", "n <> 2"),), "drop")
    strict = TopicFold(remap, topic, replace(feed, expectations=expected), 10)
    found = await verify_expected(shard, 10, strict.rows)
    assert (found.missing, found.extra) == (0, 1), "a record that violates an expectation is not expected in the table"

    topic.records[0][2] = (b"a", b'{"id": "a", "n": 9}')
    wrong = await verify_expected(shard, 30, TopicFold(remap, topic, feed, 30).rows)
    assert (wrong.rows, wrong.missing, wrong.extra, wrong.different) == (2, 0, 0, 1)


async def test_nested_values_and_a_sequence_are_compared() -> None:
    clock, rand = SystemClock(), Rand()
    consensus, topic = MemoryConsensus(clock), Topic()
    columns = (
        Column("id", "string"),
        Column("n", "int64"),
        Column("v", "struct<a:array<int32>,m:map<string,float64>,t:timestamp,d:array<decimal(9,2)>,b:binary>"),
    )
    schema = ShardSchema(columns, ("id",))
    remap = await open_remap(consensus, clock, rand, "topic/t")
    topic.add(
        0,
        "a",
        '{"id": "a", "n": 2, "v": {"a": [1, null], "m": {"y": 0.5, "x": null}, "t": "2024-01-31T10:20:30Z",'
        ' "d": [1.5], "b": "AAE="}}',
    )
    topic.add(0, "a", '{"id": "a", "n": 1, "v": {"a": [], "m": {}}}')
    topic.add(1, "b", '{"id": "b", "n": 1, "v": null}')
    await remap.mint(Binding(10, topic.ends))
    shard = await open_shard(consensus, MemoryObjects(clock), clock, rand, "t", schema)
    value = {
        "a": [1, None], "m": [("x", None), ("y", 0.5)], "t": datetime(2024, 1, 31, 10, 20, 30, tzinfo=UTC),
        "d": [Decimal("1.50")], "b": b"\0\1",
    }  # fmt: skip
    rows = pa.table({
        "id": ["a", "b"], "n": pa.array([2, 1], pa.int64()),
        "v": pa.array([value, None], arrow_type(columns[2].type)),
        TIME: pa.array([10, 10], pa.int64()), DIFF: pa.array([1, 1], pa.int64()),
    })  # fmt: skip
    await shard.compare_and_append(0, 11, [await shard.write_part(rows)], "")
    plain = TopicFeed("t", "tid", 2, False, schema)
    found = await verify_expected(shard, 10, TopicFold(remap, topic, plain, 10).rows)
    assert (found.rows, found.different) == (2, 1), "without a sequence the last record counts"
    ordered = replace(plain, record_format=RecordFormat(sequence_by="n"))
    found = await verify_expected(shard, 10, TopicFold(remap, topic, ordered, 10).rows)
    assert found.clean and found.rows == 2, found
