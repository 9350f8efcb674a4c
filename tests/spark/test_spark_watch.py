"""Waiting threads: a feed is woken when it has work, the query's watch when the query ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import ClosedError, UnavailableError
from tidemill.base.status.status import StatusTracker
from tidemill.spark.ingest import feed as feeding
from tidemill.spark.ingest.feed import Feed
from tidemill.spark.pipeline.streaming_query import SparkSessionLostError, StreamingQuery, batch_function

BOUND_S = 30.0


class Changed(threading.Event):
    """An event that records the timeouts of its waiter, and triggers the next action instead of waiting."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self.steps, self.waits = steps, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if self.steps:
            self.steps.pop(0)()
            return True
        return super().wait(BOUND_S)


class Sink:
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        self.seats = SimpleNamespace(changed=Changed(steps), attached=threading.Event(), tables=[])
        self.due_in_s: float | None = None
        self.forwarded = 0
        self.error = ""
        self.records = 0
        self.waited = 0
        self.steps = SimpleNamespace(use_spark=lambda _: None)

    def advance(self) -> None:
        self.forwarded += 1
        self.due_in_s = None

    async def wait_for_binding(self, timeout_s: float) -> None:
        raise ClosedError("nothing is bound in this test")

    def wait_until_reached(self, timeout_s: float) -> None:
        self.waited += 1


def host(**more: Any) -> Any:
    ready = threading.Event()
    ready.set()
    return SimpleNamespace(
        settings=SimpleNamespace(name="p", instance="", freshness_ms=0),
        stores=SimpleNamespace(clock=SystemClock()),
        spark=SimpleNamespace(sparkContext=None),
        portal=SimpleNamespace(call=asyncio.run),
        tracker=StatusTracker(),
        ending=threading.Event(),
        session_ready=ready,
        session_is_lost=lambda: False,
        **more,
    )


@pytest.mark.parametrize(
    ("freshness_s", "took_s", "records", "interval_s"),
    [
        (0.1, 0.002, 10, 0.1),  # a small round: records gather for the freshness
        (0.1, 0.1, 10, 0.2),  # a small round of a busy machine: it takes half of the time
        (0.1, 2.0, 10, 0.5),  # a stall is not repeated
        (10.0, 2.0, 10, 10.0),
        (0.1, 2.0, 5_000, 0.1),  # a backlog waits for nothing
        (0.0, 0.0, 0, 0.0),
    ],
)
def test_a_feed_gathers_records_for_the_freshness_and_longer_where_small_rounds_fill_the_machine(
    freshness_s: float, took_s: float, records: int, interval_s: float
) -> None:
    assert feeding.round_interval_s(freshness_s, took_s, records) == pytest.approx(interval_s)


def feed_of(found: Any, sink: Sink) -> Feed:
    dead: Any = None
    feed = Feed("topic/t", {}, found, dead)
    feed.sink = sink  # type: ignore[assignment]
    return feed


def test_an_idle_feed_waits_for_ever_and_is_woken_by_a_table_that_is_due_and_by_a_pause() -> None:
    found = host()

    def due(in_s: float) -> Callable[[], None]:
        return lambda: setattr(sink, "due_in_s", in_s)

    steps: list[Callable[[], None]] = [due(0), due(0.25), due(0), found.ending.set]
    sink = Sink(steps)
    feed = feed_of(found, sink)
    found.tracker.fail(feed.mark, "an earlier round was at fault", now_ms=1)
    feed._advance_tables()
    assert sink.seats.changed.waits == [None, None, 0.25, None], "for ever, but where somebody is due later"
    assert sink.forwarded == 2, "once for each moment a table was due"
    assert found.tracker.failure(feed.mark) is None, "nothing was left to do"


@pytest.mark.parametrize("ready", [False, True])
def test_a_time_that_is_bound_is_taken_with_or_without_spark_and_bindings_that_are_away_are_asked_again(
    monkeypatch: Any, ready: bool
) -> None:
    for pause in ("WATCH_S", "WARM_ROUND_S"):
        monkeypatch.setattr(feeding, pause, 0.01)
    sink, found = Sink([]), host()
    if not ready:
        found.session_ready.clear()
    arrivals: list[str] = ["away", "bound", "nothing", "away", "bound"]

    async def arrival(timeout_s: float) -> None:
        match arrivals.pop(0):
            case "away":
                raise UnavailableError("consensus is away")
            case "bound":
                sink.due_in_s = 0
                sink.seats.changed.set()
                await until(lambda: sink.due_in_s != 0)
        if not arrivals:
            found.ending.set()
            sink.seats.changed.set()
            raise ClosedError("the process ends")

    sink.seats.changed = threading.Event()
    monkeypatch.setattr(sink, "wait_for_binding", arrival)
    feed_of(found, sink)._advance_tables()
    assert sink.forwarded == 2, "for each of two times"
    assert sink.waited == 2, "bindings are followed again once the tables have reached the newest one"


class Query:
    """A query that ends when `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def awaitTermination(self) -> None:
        assert self.ended.wait(BOUND_S)
        raise RuntimeError("the query failed")

    def exception(self) -> Exception:
        return RuntimeError("boom\nJVM stack")


def test_a_query_that_brings_a_batch_is_well_and_its_end_wakes_its_watch(monkeypatch: Any) -> None:
    found, began = host(), Query()
    watched = StreamingQuery(found, ["topic/t"], lambda _: None, lambda: True)
    monkeypatch.setattr(watched, "_start", lambda: began)
    found.tracker.fail(watched.mark, "an earlier query ended", now_ms=1)

    def ends() -> None:
        watched._on_batch()
        watched._changed.steps.append(began.ended.set)  # type: ignore[attr-defined]

    watched._changed = Changed([ends])
    assert watched._run_query().startswith("boom")
    assert found.tracker.failure(watched.mark) is None
    assert watched._changed.waits[1] is None, "it looks at nothing until then"


def test_a_query_whose_first_start_is_in_vain_is_logged_and_the_second_is_told(monkeypatch: Any) -> None:
    """A busy machine may not start a worker within Spark's ten seconds; rows advance in the meantime."""
    found = host()
    watched = StreamingQuery(found, ["topic/t"], lambda _: None, lambda: True)
    batches = [False, False, True, False, False]
    reported: list[bool] = []

    def watch() -> str:
        reported.append(found.tracker.failure(watched.mark) is not None)
        watched.called.clear()
        if not batches:
            found.ending.set()
        elif batches.pop(0):
            found.tracker.clear_failure(watched.mark)
            watched.called.set()
        return "Python worker failed to connect back."

    monkeypatch.setattr(watched, "_run_query", watch)
    watched._restarts = SimpleNamespace(pause_s=lambda _: 0.0)  # type: ignore[assignment]
    watched.run()
    assert reported == [False, False, True, True, True, True]


def test_a_query_that_ends_with_its_session_ends_the_process(monkeypatch: Any) -> None:
    found = host()
    found.session_is_lost = lambda: True
    watched = StreamingQuery(found, ["topic/t"], lambda _: None, lambda: True)
    monkeypatch.setattr(watched, "_run_query", lambda: "connection refused")
    with pytest.raises(SparkSessionLostError, match="connection refused"):
        watched.run()
    assert found.tracker.failure(watched.mark) is None


def test_a_query_starts_after_the_first_round_of_the_derived_tables_or_a_limit(monkeypatch: Any) -> None:
    answers, asked = [False, False, True], list[bool]()

    def may_start() -> bool:
        asked.append(answers.pop(0) if answers else False)
        return asked[-1]

    def run_query() -> str:
        found.ending.set()
        return ""

    for expected in ([False, False, True], [False]):
        found = host()
        watched = StreamingQuery(found, ["topic/t"], lambda _: None, may_start)
        monkeypatch.setattr(watched, "_run_query", run_query)
        watched.run()
        assert found.ending.is_set() and asked == expected
        asked.clear()
        monkeypatch.setattr("tidemill.spark.pipeline.streaming_query.DERIVED_FIRST_S", 0.0)


def test_a_batch_brings_the_sources_forward_that_it_has_a_new_time_of(tmp_path: Any) -> None:
    (tmp_path / "offsets").mkdir()
    came: list[tuple[str, int]] = []

    def sink_of(source: str) -> Any:
        known = source != "topic/unopened"
        return SimpleNamespace(advance_to=lambda end: came.append((source, end))) if known else None

    def failed(source: str, error: BaseException) -> None:
        raise AssertionError(source) from error

    run = batch_function(tmp_path, sink_of, failed)
    for batch, ends in enumerate(['{"a": 0, "b": 5, "topic/unopened": 7}', '{"a": 3, "b": 5}', '{"a": 3, "b": 6}']):
        (tmp_path / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{ends}")
        run(None, batch)
    assert came == [("b", 5), ("a", 3), ("b", 6)]
    run(None, 99)
    assert len(came) == 3, "its ends cannot be read: feeds follow the bindings themselves"


def test_a_sink_that_raises_in_a_batch_is_told_and_the_sources_after_it_continue(tmp_path: Any) -> None:
    (tmp_path / "offsets").mkdir()
    came: list[str] = []
    reported: list[tuple[str, str]] = []
    raised: dict[str, BaseException] = {"b": ValueError("of no known kind"), "d": KeyboardInterrupt()}

    def sink_of(source: str) -> Any:
        def time_comes(end: int) -> None:
            came.append(source)
            if source in raised:
                raise raised[source]

        return SimpleNamespace(advance_to=time_comes)

    run = batch_function(tmp_path, sink_of, lambda source, error: reported.append((source, str(error))))
    (tmp_path / "offsets" / "0").write_text('v1\n{}\n{"a": 1, "b": 1, "c": 1}')
    run(None, 0)
    assert (came, reported) == (["a", "b", "c"], [("b", "of no known kind")])
    (tmp_path / "offsets" / "1").write_text('v1\n{}\n{"d": 1}')
    with pytest.raises(KeyboardInterrupt):
        run(None, 1)


def test_whoever_waits_is_woken_at_the_end(monkeypatch: Any) -> None:
    found: Any = SimpleNamespace(settings=SimpleNamespace(name="p"), ending=threading.Event())
    dead: Any = None
    feed = Feed("topic/t", {"a": SimpleNamespace(upstream="topic:t")}, found, dead)  # type: ignore[dict-item]
    (unit,) = feed.units
    waits = threading.Event()
    wait = unit._left.wait

    def noted(*timeout_s: float) -> bool:
        waits.set()
        return wait(*timeout_s)

    monkeypatch.setattr(unit._left, "wait", noted)
    seated = threading.Thread(target=unit._wait_attached, daemon=True)
    seated.start()
    assert waits.wait(BOUND_S)
    found.ending.set()
    feed.wake()
    seated.join(BOUND_S)
    assert not seated.is_alive()
