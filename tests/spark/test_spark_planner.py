"""Planners of streams, called like Spark does: they wait for a binding instead of being polled."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from tidemill.base.errors import CorruptError, TidemillError, UnavailableError
from tidemill.shards.api import HistoryLostError
from tidemill.shards.bindings.remap import LogRemap
from tidemill.spark.decode.records import SliceDescriptor
from tidemill.spark.source import stream
from tidemill.spark.source.bindings import SourceBindings
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.progress_stream import ProgressReader
from tidemill.spark.source.stream import PACE_MS, WAIT_S, RowReader
from tidemill.spark.stores import Stores, shared_stores


def reader_of(harbour: Any, **options: str) -> RowReader:
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    return RowReader(SourceOptions({"source": "topic/t", **urls, **options}))


def times_of(harbour: Any, source: str = "topic/t", **options: str) -> ProgressReader:
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    return ProgressReader(SourceOptions({"source": source, "rows": "false", **urls, **options}))


def latest_times(reader: ProgressReader, start: dict[str, int]) -> dict[str, int]:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


def latest(reader: RowReader, start: int) -> int:
    return int(reader.latestOffset({"ts": start}, reader.getDefaultReadLimit())["ts"])


class Naps:
    """A clock for the planner's loop that records its sleeps without sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s: list[float] = []
        monkeypatch.setattr(stream, "asyncio", self)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


def test_a_binding_of_any_source_that_comes_seconds_later_is_the_answer_to_the_same_question(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {name: harbour.create_topic(name) for name in ("a", "b", "c")}
    harbour.produce(topics["b"], [(b"k", b"v")])
    harbour.mint("topic/b", 40, topics["b"])
    reader = times_of(harbour, "topic/a,topic/b,topic/c", pace_ms="0")
    assert reader.initialOffset() == {}
    wait, asked = LogRemap.wait, list[str]()

    async def waited(self: LogRemap, beyond_ms: int, timeout_s: float) -> bool:
        asked.append(self.name)
        if self.name == "topic/a":
            raise UnavailableError("its log cannot be read")
        if self.name == "topic/c":
            harbour.produce(topics["c"], [(b"k", b"v")])
            await asyncio.to_thread(harbour.mint, "topic/c", 50, topics["c"])
        return await wait(self, beyond_ms, timeout_s)

    monkeypatch.setattr(LogRemap, "wait", waited)
    first = latest_times(reader, {})
    assert first == {"topic/a": 0, "topic/b": 41, "topic/c": 0} and asked == [], "at once: the query begins"
    assert latest_times(reader, first) == {"topic/a": 0, "topic/b": 41, "topic/c": 51}
    assert sorted(asked) == ["topic/a", "topic/b", "topic/c"]


def test_bindings_that_cannot_be_read_keep_no_other_source_from_its_time_but_are_not_the_end_of_what_is_there(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {name: harbour.create_topic(name) for name in ("a", "b")}
    for name, topic in topics.items():
        harbour.produce(topic, [(b"k", b"v")])
        harbour.mint(f"topic/{name}", 50, topic)
    within = SourceBindings.end_within

    async def damaged(self: SourceBindings, *given: Any) -> int:
        if self.source == "topic/a":
            raise CorruptError("a binding of it is damaged")
        return await within(self, *given)

    reader = times_of(harbour, "topic/a,topic/b", start="7")
    with monkeypatch.context() as patched:
        patched.setattr(SourceBindings, "end_within", damaged)
        assert latest_times(reader, {}) == {"topic/a": 7, "topic/b": 51}
        reader.prepareForTriggerAvailableNow()
        with pytest.raises(CorruptError):
            latest_times(reader, {"topic/a": 7, "topic/b": 51})
    assert latest_times(reader, {"topic/a": 7, "topic/b": 51}) == {"topic/a": 51, "topic/b": 51}
    assert latest_times(reader, {"ts": 20}) == {"topic/a": 51, "topic/b": 51}, "a checkpoint of an earlier release"


def test_a_binding_that_is_there_and_cannot_be_read_is_asked_for_at_the_pace_of_batches(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"k", b"v")])
    harbour.mint("topic/t", 50, topic)

    async def away(self: SourceBindings, *given: Any) -> int:
        raise UnavailableError("the object store is away")

    monkeypatch.setattr(SourceBindings, "end_within", away)
    reader, start = times_of(harbour, pace_ms="300"), {"topic/t": 7}
    began_s = time.monotonic()
    assert latest_times(reader, start) == start
    assert time.monotonic() - began_s >= 0.3


@pytest.mark.parametrize("method", ["end_within", "wait_for_binding"])
@pytest.mark.parametrize("error", [CorruptError("a binding is damaged"), HistoryLostError("older than what is kept")])
def test_what_time_does_not_heal_ends_a_stream_of_one_source(
    harbour: Any, monkeypatch: pytest.MonkeyPatch, error: TidemillError, method: str
) -> None:
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"k", b"v")])
    harbour.mint("topic/t", 50, topic)

    async def fails(self: SourceBindings, *given: Any) -> int:
        raise error

    monkeypatch.setattr(SourceBindings, method, fails)
    with pytest.raises(type(error), match=str(error)):
        latest_times(times_of(harbour, pace_ms="0"), {"topic/t": 7})


def test_a_stream_reads_from_the_stores_that_its_process_opened_last(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consensus was restored to an earlier state: the former stores are closed, and all their calls raise."""
    topic = harbour.create_topic("t")
    harbour.mint("topic/t", 50, topic)
    reader = times_of(harbour, pace_ms="0")
    assert latest_times(reader, {}) == {"topic/t": 51}
    _, before = shared_stores(reader._options.urls)
    monkeypatch.setattr(Stores, "is_rolled_back", property(lambda self: self is before))
    harbour.mint("topic/t", 60, topic)
    assert latest_times(reader, {"topic/t": 51}) == {"topic/t": 61}


def test_an_error_of_a_wait_that_nobody_expected_ends_the_question(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harbour.create_topic("t")

    async def broken(self: LogRemap, beyond_ms: int, timeout_s: float) -> bool:
        raise ValueError("planted")

    monkeypatch.setattr(LogRemap, "wait", broken)
    with pytest.raises(ValueError, match="planted"):
        latest_times(times_of(harbour), {"topic/t": 7})


def test_a_stream_of_rows_may_stand_beside_others_and_keeps_them_waiting_for_a_moment_only(
    harbour: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harbour.create_topic("t")
    reader = reader_of(harbour)
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
    times = times_of(harbour, max_rows="3")
    assert latest_times(times, {}) == {"topic/t": 21}
    assert latest_times(times_of(harbour), {}) == {"topic/t": 41}, "who fetches for himself bounds what he fetches"


def test_what_nobody_reads_is_not_planned(harbour: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, other = harbour.create_topic("t", 2), harbour.create_topic("other")
    harbour.produce(topic, [(b"k", b"v")] * 3, 1)
    harbour.mint("topic/t", 50, topic)
    harbour.mint("topic/other", 50, other)
    reader = times_of(harbour, "topic/other,topic/t")

    async def refused(*_: Any) -> Any:
        raise AssertionError("planned")

    with monkeypatch.context() as patched:
        patched.setattr(SourceBindings, "plan_slices", refused)
        (partition,) = reader.partitions({"topic/other": 51, "topic/t": 0}, {"topic/other": 51, "topic/t": 51})
    (batch,) = reader.read(partition)
    (row,) = batch.to_pylist()
    assert (row["topic"], row["partition"], row["start"], row["end"]) == ("t", 1, 0, 3)
    found = msgspec.msgpack.decode(row["descriptor"], type=SliceDescriptor)
    assert found.slice.times == (50,) and len(found.refs) == 1
