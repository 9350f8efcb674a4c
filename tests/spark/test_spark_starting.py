"""Streaming queries of one JVM: a few start at once, the others wait their turn, one that hangs holds up none."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.marks import Tracker
from tidemill.spark import feeding
from tidemill.spark.feeding import Feed
from tidemill.spark.starting import Starts


def test_so_many_begin_at_once_and_the_next_when_one_has_begun_or_hangs() -> None:
    starts = Starts(2, 100.0)
    assert [starts.begin(who, 0.0) for who in "abc"] == [True, True, False]
    assert starts.begin("a", 50.0), "it is started again: its place is its own"
    assert (starts.waits("c"), starts.waits("a")) == (True, False)
    starts.end("b")
    assert starts.begin("c", 60.0) and not starts.waits("c")
    assert not starts.begin("d", 60.0) and starts.waits("d")
    starts.end("d")
    assert not starts.waits("d"), "its pipeline has ended"
    assert not starts.begin("e", 149.9) and starts.begin("e", 150.1), "a has hung for long enough"
    assert not starts.begin("d", 159.9)
    for who in "cae":
        starts.end(who)
    assert [starts.begin(who, 160.0) for who in "xy"] == [True, True]


class Sink:
    """What `Feed._feed` needs of one."""

    def __init__(self) -> None:
        self.called, self.error = threading.Event(), ""
        self.forward = 0
        self.seats = SimpleNamespace(tables=["t"], changed=threading.Event())

    def latest(self) -> int:
        return 0

    def process(self, _: int) -> None:
        self.forward += 1


def test_f333_queries_of_many_feeds_start_a_few_at_once_while_rows_of_all_come_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeding, "STARTS", Starts(2))
    monkeypatch.setattr(feeding, "WARM_POLL_S", 0.005)
    ready, ending = threading.Event(), threading.Event()
    ready.set()
    host: Any = SimpleNamespace(
        settings=SimpleNamespace(name="p"), stores=SimpleNamespace(clock=SystemClock()), tracker=Tracker(),
        ending=ending, session_ready=ready, session_is_lost=lambda: False,
    )  # fmt: skip
    lock, may_run = threading.Lock(), threading.Semaphore(0)
    starting = most = 0
    started: list[Feed] = []
    feeds = [Feed(f"topic/t{number}", {}, host, None) for number in range(8)]  # type: ignore[arg-type]

    def watched(feed: Feed) -> Any:
        def watch(sink: Any) -> str:
            nonlocal starting, most
            with lock:
                starting += 1
                most = max(most, starting)
            may_run.acquire()
            with lock:
                starting -= 1
                started.append(feed)
            feeding.STARTS.end(feed)  # as its first batch does
            ending.wait()
            return ""

        return watch

    for feed in feeds:
        feed.sink = Sink()  # type: ignore[assignment]
        monkeypatch.setattr(feed, "_watch_query", watched(feed))
    threads = [threading.Thread(target=feed._run, daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    until(lambda: starting == 2 and sum(feed.waits_to_start for feed in feeds) == 6)
    before = [feed.sink.forward for feed in feeds]  # type: ignore[union-attr]
    until(lambda: sum(f.sink.forward > was for f, was in zip(feeds, before, strict=True)) >= 6)  # type: ignore[union-attr]
    for _ in feeds:
        may_run.release()
    until(lambda: len(started) == 8)
    assert most == 2 and not any(feed.waits_to_start for feed in feeds)
    ending.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)
