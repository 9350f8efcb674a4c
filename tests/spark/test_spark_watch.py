"""A feed beside its query: it is woken when there is something to do, and looks at nothing until then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tidemill.base.clock import SystemClock
from tidemill.base.errors import Closed, Unavailable
from tidemill.base.marks import Tracker
from tidemill.spark import feeding
from tidemill.spark.feeding import Feed

BOUND_S = 30.0


class Query:
    """Ends when told. Whoever asks it whether it runs is found out."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def awaitTermination(self) -> None:
        assert self.ended.wait(BOUND_S)
        raise RuntimeError("the query failed")

    def exception(self) -> Exception:
        return RuntimeError("boom\nJVM stack")


class Changed(threading.Event):
    """Notes how long its waiter would wait, and lets the next thing happen instead."""

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
        self.seats = SimpleNamespace(changed=Changed(steps), tables=[])
        self.called = threading.Event()
        self.due_in_s: float | None = None
        self.processed = 0
        self.error = ""

    def use(self, _: Any) -> None: ...

    def latest(self) -> int:
        return 7

    def process(self, _: int) -> None:
        self.called.set()  # as Spark's first batch does
        self.processed += 1
        self.due_in_s = None

    async def arrival(self, timeout_s: float) -> None:
        raise Closed("nothing is bound in this test")


def test_an_idle_feed_waits_for_ever_and_is_woken_by_a_table_that_is_due_a_pause_and_the_querys_end(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(feeding, "WATCH_S", 0.0)
    query = Query()

    def due(in_s: float) -> Callable[[], None]:
        return lambda: setattr(sink, "due_in_s", in_s)

    steps: list[Callable[[], None]] = [due(0), due(0.25), due(0), query.ended.set]
    sink = Sink(steps)
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(name="p"),
        stores=SimpleNamespace(clock=SystemClock()),
        spark=SimpleNamespace(sparkContext=None),
        portal=SimpleNamespace(call=asyncio.run),
        tracker=Tracker(),
        ending=threading.Event(),
    )
    dead: Any = None
    feed = Feed("topic/t", {}, host, dead)
    monkeypatch.setattr(feed, "_query", lambda *_: query)
    host.tracker.fail(feed.mark, "an earlier query ended", now_ms=1)
    anything: Any = sink
    reason = feed._watch_query(anything)
    assert reason.startswith("boom")
    assert sink.seats.changed.waits[:4] == [None, None, 0.25, None], "for ever, but where somebody is due later"
    # one round before the query's first batch is seen, and one for each of the two moments a table was due
    assert sink.processed == 3
    assert host.tracker.failure(feed.mark) is None, "Spark has brought a batch"


def test_a_time_that_is_bound_is_taken_without_a_micro_batch_and_bindings_that_are_away_are_asked_again(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(feeding, "WATCH_S", 0.01)
    query, sink = Query(), Sink([])
    arrivals: list[str] = ["away", "bound", "nothing", "away", "bound"]

    async def arrival(timeout_s: float) -> None:
        match arrivals.pop(0):
            case "away":
                raise Unavailable("consensus is away")
            case "bound":
                sink.due_in_s = 0
                sink.seats.changed.set()
                while sink.due_in_s == 0:
                    await asyncio.sleep(0.001)
        if not arrivals:
            query.ended.set()
            raise Closed("the process ends")

    sink.seats.changed = threading.Event()
    monkeypatch.setattr(sink, "arrival", arrival)
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(name="p"),
        stores=SimpleNamespace(clock=SystemClock()),
        spark=SimpleNamespace(sparkContext=None),
        portal=SimpleNamespace(call=asyncio.run),
        tracker=Tracker(),
        ending=threading.Event(),
    )
    dead, anything = None, sink
    feed = Feed("topic/t", {}, host, dead)  # type: ignore[arg-type]
    monkeypatch.setattr(feed, "_query", lambda *_: query)
    assert feed._watch_query(anything).startswith("boom")  # type: ignore[arg-type]
    assert sink.processed == 3, "once before the query's first batch, and for each of two times"


def test_a_query_whose_first_start_is_in_vain_is_logged_and_the_second_is_told(monkeypatch: Any) -> None:
    """A busy machine may not start a worker in Spark's ten seconds; rows are brought forward meanwhile."""
    ending = threading.Event()
    clock: Any = SystemClock()
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(name="p"),
        stores=SimpleNamespace(clock=clock),
        tracker=Tracker(),
        ending=ending,
        session_is_lost=lambda: False,
        session_ready=threading.Event(),
    )
    dead: Any = None
    feed = Feed("topic/t", {}, host, dead)
    sink: Any = Sink([])
    feed.sink = sink
    batches = [False, False, True, False, False]
    told: list[bool] = []

    def watched(_: Any) -> str:
        told.append(host.tracker.failure(feed.mark) is not None)
        sink.called.clear()
        if not batches:
            ending.set()
        elif batches.pop(0):
            host.tracker.heal(feed.mark)
            sink.called.set()
        return "Python worker failed to connect back."

    monkeypatch.setattr(feed, "_watch_query", watched)
    monkeypatch.setattr(feed, "_bring_forward", lambda *_: None)
    feed._run()
    assert told == [False, False, True, True, True, True]


def test_whoever_waits_is_woken_at_the_end(monkeypatch: Any) -> None:
    host: Any = SimpleNamespace(settings=SimpleNamespace(name="p"), ending=threading.Event())
    dead: Any = None
    feed = Feed("topic/t", {"a": SimpleNamespace(upstream="topic:t")}, host, dead)  # type: ignore[dict-item]
    (unit,) = feed.units
    waits = threading.Event()
    wait = unit._left.wait

    def noted(*timeout_s: float) -> bool:
        waits.set()
        return wait(*timeout_s)

    monkeypatch.setattr(unit._left, "wait", noted)
    seated = threading.Thread(target=unit._seated, daemon=True)
    seated.start()
    assert waits.wait(BOUND_S)
    host.ending.set()
    feed.wake()
    seated.join(BOUND_S)
    assert not seated.is_alive()
