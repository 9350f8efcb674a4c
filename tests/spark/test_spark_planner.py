"""The planner of a stream of records, asked as Spark asks it: it waits for a binding instead of being asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tidemill.shards.remap import LogRemap
from tidemill.spark.decode.slices import Descriptor
from tidemill.spark.source import stream
from tidemill.spark.source.options import Options
from tidemill.spark.source.stream import PACE_MS, WAIT_S, FeedReader

ARRIVES_S = 3.0
"""A binding that comes so long after the planner was asked."""


def reader_of(harbour: Any, **options: str) -> FeedReader:
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    return FeedReader(Options({"source": "topic/t", "rows": "false", **urls, **options}))


def latest(reader: FeedReader, start: int) -> int:
    return int(reader.latestOffset({"ts": start}, reader.getDefaultReadLimit())["ts"])


class Naps:
    """Stands in for the clock of the planner's loop: what it would sleep for, and no sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s: list[float] = []
        monkeypatch.setattr(stream, "asyncio", self)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


def test_a_binding_that_comes_seconds_later_is_the_answer_to_the_same_question(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"k", b"v")])
    reader = reader_of(harbour)
    assert reader.initialOffset() == {"ts": 0}

    async def wait(self: LogRemap, beyond_ms: int, timeout_s: float) -> bool:
        if timeout_s < ARRIVES_S:
            return False
        await asyncio.to_thread(harbour.mint, "topic/t", 50, topic)
        return True

    naps = Naps(monkeypatch)
    monkeypatch.setattr(LogRemap, "wait", wait)
    assert latest(reader, 0) == 0, "the first question is answered at once: the query begins"
    assert latest(reader, 0) == 51
    assert naps.slept_s == []


def test_a_stream_of_rows_may_stand_beside_others_and_keeps_them_waiting_for_a_moment_only(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harbour.create_topic("t")
    reader = reader_of(harbour, rows="true")
    waited_s = []

    async def wait(self: LogRemap, beyond_ms: int, timeout_s: float) -> bool:
        waited_s.append(timeout_s)
        return False

    monkeypatch.setattr(LogRemap, "wait", wait)
    assert [latest(reader, 0) for _ in range(3)] == [0, 0, 0]
    assert waited_s == [WAIT_S] * 3


def test_only_a_batch_that_was_offered_keeps_the_next_one_waiting(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("t")
    naps = Naps(monkeypatch)
    monkeypatch.setattr(stream, "WAIT_S", 0.0)
    reader = reader_of(harbour)
    assert [latest(reader, 0) for _ in range(3)] == [0, 0, 0]
    harbour.produce(topic, [(b"k", b"v")])
    harbour.mint("topic/t", 50, topic)
    assert latest(reader, 0) == 51
    assert naps.slept_s == [], "it was idle until then"
    latest(reader, 51)
    assert len(naps.slept_s) == 1 and 0 < naps.slept_s[0] <= PACE_MS / 1000


def test_a_batch_has_at_most_so_many_records_and_one_time_at_least(harbour: Any) -> None:
    topic = harbour.create_topic("t")
    for n in range(1, 5):
        harbour.produce(topic, [(b"k", b"v")] * n)
        harbour.mint("topic/t", n * 10, topic)
    reader = reader_of(harbour, max_rows="3", pace_ms="0")
    ends = [0]
    for _ in range(3):
        ends.append(latest(reader, ends[-1]))
    assert ends == [0, 21, 31, 41]


def test_what_nobody_reads_is_not_planned(harbour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = harbour.create_topic("t", 2)
    harbour.produce(topic, [(b"k", b"v")] * 3, 1)
    harbour.mint("topic/t", 50, topic)
    reader = reader_of(harbour)

    async def refused(*_: Any) -> Any:
        raise AssertionError("planned")

    with monkeypatch.context() as patched:
        patched.setattr(FeedReader, "_plan", refused)
        (partition,) = reader.partitions({"ts": 0}, {"ts": 51})
    (batch,) = reader.read(partition)
    (row,) = batch.to_pylist()
    assert (row["topic"], row["partition"], row["start"], row["end"]) == ("t", 1, 0, 3)
    found = msgspec.msgpack.decode(row["descriptor"], type=Descriptor)
    assert found.slice.times == (50,) and len(found.refs) == 1
