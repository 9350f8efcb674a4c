"""Steps by Spark tasks: decoded once, exchanged by hash range, resolved by range, with the contents of inline steps.

The tasks' functions run in this process too, under every schedule; test_spark_streaming.py runs them through real
Spark.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.local_tasks import LocalTasks, Rows
from support.spark.sinks import clicks_sink, shop_sink
from support.spark.upsert_world import SCHEMA
from tidemill.shards.parts.row_hash import bucket_of, hash_rows
from tidemill.spark.decode.records import Slice, SliceDescriptor
from tidemill.spark.ingest.step_planner import Step, split_descriptors
from tidemill.spark.ingest.steps import distributed_step, shuffle
from tidemill.spark.merge import range_mirror
from tidemill.spark.merge.range_mirror import HashRange, RangeMirrorCache, cut_by_hash
from tidemill.topics.api import BatchRef


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_step, "PIECE_BYTES", 1)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> RangeMirrorCache:
    """Simulate executors on another machine, where the driver's mirror does not exist."""
    monkeypatch.setattr(distributed_step, "mirror_identity", lambda _: "of the driver")
    monkeypatch.setattr(range_mirror, "PROCESS_CACHE", RangeMirrorCache())
    monkeypatch.setattr(shuffle.os, "access", lambda *_: False)
    return range_mirror.PROCESS_CACHE


def by_tasks(harbour: Any, scratch: Path, over: int = 0) -> Any:
    """Return a sink whose steps are all run by tasks; `over` of them may be run again inline."""
    found = clicks_sink(harbour, scratch)
    found.steps.use_spark(LocalTasks(), inline_rows=0)
    run = found.steps._by_tasks.run
    inline: list[str] = []

    def noting(work: Any) -> Any:
        results = run(work)
        inline.extend(name for name, result in results.items() if result.inline)
        assert len(inline) <= over, "the tasks decide it"
        return results

    found.steps._by_tasks.run = noting
    return found


class Clicks:
    """Produces writes, deletions and broken records of 40 keys in two partitions."""

    def __init__(self, harbour: Any) -> None:
        self.harbour, self.draw, self.n, self.broken = harbour, random.Random(5), 0, 0
        self.topic = harbour.create_topic("clicks", 2)
        self.expected: dict[str, int] = {}

    def more(self) -> None:
        self.n += 1
        for partition in range(2):
            rows: list[tuple[Any, Any]] = []
            for _ in range(self.draw.randrange(1, 30)):
                key = f"k{self.draw.randrange(20) * 2 + partition}"
                number = self.draw.randrange(1000)
                if number % 7 == 0:
                    rows.append((key.encode(), None))
                    self.expected.pop(key, None)
                else:
                    rows.append((key.encode(), {"click_id": key, "product_id": number}))
                    self.expected[key] = number
            if self.draw.randrange(3) == 0:
                rows.append((b"", b"broken"))
                self.broken += 1
            for at in range(0, len(rows), 6):
                self.harbour.produce(self.topic, rows[at : at + 6], partition)
        self.harbour.mint("topic/clicks", self.n * 10, self.topic)

    def check(self) -> None:
        found = {row["click_id"]: row["product_id"] for row in self.harbour.contents("clicks")}
        assert found == self.expected
        assert len(self.harbour.contents("p.dead_letters") if self.broken else []) == self.broken


def mirrored(sink: Any) -> dict[str, int]:
    rows = sink.seats.tables[0].operator.mirror.live_rows().to_pylist()
    return {row["click_id"]: row["product_id"] for row in rows}


def test_tasks_and_inline_steps_take_turns_on_one_shard(harbour: Any, tmp_path: Path) -> None:
    """Each follows the other's appends, and several concurrent times give the same result."""
    clicks = Clicks(harbour)
    tasks, inline = by_tasks(harbour, tmp_path / "1"), clicks_sink(harbour, tmp_path / "2")
    for turn in range(14):
        for _ in range(clicks.draw.randrange(1, 4)):
            clicks.more()
        for sink in ((tasks,), (inline,), (tasks, inline), (inline, tasks))[turn % 4]:
            sink.process(sink.latest())
        clicks.check()
    for sink in (tasks, inline):
        sink.process(sink.latest())
        assert not sink.seats.failed and sink.seats.tables[0].won > 3
        assert mirrored(sink) == clicks.expected
    assert not list((tmp_path / "1").rglob("pending-*"))


def test_an_executor_elsewhere_makes_its_ranges_once_and_follows_the_shard(
    harbour: Any, tmp_path: Path, kept: RangeMirrorCache
) -> None:
    clicks = Clicks(harbour)
    tasks, inline = by_tasks(harbour, tmp_path / "1"), clicks_sink(harbour, tmp_path / "2")
    for turn in range(10):
        clicks.more()
        sink = inline if turn % 3 == 1 else tasks
        sink.process(sink.latest())
        clicks.check()
    tasks.process(tasks.latest())
    assert mirrored(tasks) == clicks.expected
    assert kept.made == 4 and kept.followed > 12


def test_what_an_executor_keeps_is_bounded(harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_step, "mirror_identity", lambda _: "of the driver")
    monkeypatch.setattr(range_mirror, "PROCESS_CACHE", RangeMirrorCache(most_bytes=1))
    clicks = Clicks(harbour)
    tasks = by_tasks(harbour, tmp_path / "1")
    for _ in range(4):
        clicks.more()
        tasks.process(tasks.latest())
    clicks.check()
    assert len(range_mirror.PROCESS_CACHE._kept) == 1


def test_truncations_and_stops_are_done_over_inline(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.capture("shop", {"public.t": [("id", "integer", 0), ("v", "text", -1)]})["public.t"]
    sink = shop_sink(harbour, tmp_path / "s", ["t"])
    sink.steps.use_spark(LocalTasks(), inline_rows=0)

    def commit(time: int, *rows: tuple[Any, Any]) -> list[int]:
        harbour.produce(topic, rows)
        harbour.mint("capture/shop", time, topic)
        sink.process(sink.latest())
        return [row["id"] for row in harbour.contents("t")]

    assert commit(1, *[({"id": i}, {"id": i, "v": "a"}) for i in range(9)]) == list(range(9))
    harbour.truncate(topic)
    assert commit(2, ({"id": 3}, {"id": 3, "v": "b"})) == [3]
    assert commit(3, ({"id": 4}, {"id": 4, "v": "c"})) == [3, 4]
    harbour.produce(topic, [({"id": 5}, {"id": 5, "v": "d"})])
    harbour.mint("capture/shop", 4, topic)
    assert commit(5, ({"id": 6}, {"id": 6, "v": "e", "new": 1})) == [3, 4, 5]
    assert "columns differ" in str(sink.seats.failed["t"])


def test_a_job_that_fails_is_done_over_inline(harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clicks = Clicks(harbour)
    tasks = by_tasks(harbour, tmp_path / "1", over=1)
    monkeypatch.setattr(Rows, "collect", lambda _: 1 / 0)
    clicks.more()
    tasks.process(tasks.latest())
    clicks.check()
    assert not tasks.seats.failed


@settings(deadline=None)
@given(sizes=st.lists(st.lists(st.integers(1, 50), max_size=12), max_size=4), most=st.integers(1, 120))
def test_every_batch_is_in_one_piece(sizes: list[list[int]], most: int) -> None:
    descriptors = []
    for partition, found in enumerate(sizes):
        refs = tuple(BatchRef("o", 0, size, n, 1, 0) for n, size in enumerate(found))
        piece = Slice("t", "id", partition, 0, len(refs), (len(refs),), (1,), 1)
        descriptors.append(SliceDescriptor(piece, refs))
    out = list(split_descriptors(descriptors, most))
    for descriptor in descriptors:
        mine = [p for p in out if p.slice.partition == descriptor.slice.partition]
        assert tuple(ref for p in mine for ref in p.refs) == descriptor.refs
        assert [p.slice.begins_ms for p in mine] == [1] + [-1] * (len(mine) - 1)
        assert all(len(p.refs) <= 1 or sum(r.size_bytes for r in p.refs) <= most for p in mine)
    shares = list(distributed_step._pack_pieces(Step(0, 1, descriptors=tuple(descriptors)), most))
    assert [d for share in shares for d in share] == out
    total = sum(size for found in sizes for size in found)
    assert len(shares) <= 1 + 2 * total // most, "two that follow each other are more than one share may be"


@settings(deadline=None)
@given(keys=st.lists(st.integers(0, 1000), max_size=60), count=st.integers(1, 9))
def test_rows_are_cut_by_hash_range_in_order(keys: list[int], count: int) -> None:
    rows = pa.table({"k": pa.array(keys, pa.int64()), "v": pa.array(range(len(keys)), pa.int64())})
    found = cut_by_hash(rows, SCHEMA.key, count)
    assert len(found) == count
    hashes = hash_rows(rows, SCHEMA.key)
    for number, mine in enumerate(found):
        assert mine.equals(rows.filter(pa.array(bucket_of(hashes, count) == number)).combine_chunks()) or not len(mine)
        assert HashRange(number, count).mask(hashes).to_pylist().count(True) == len(mine)
    assert sum(len(mine) for mine in found) == len(keys)
