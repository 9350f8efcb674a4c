"""Taps: their errors affect only themselves, they join and leave between transactions, and nothing waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from support.capture.fragments import change, fragment
from tidemill.base.clock import ManualClock
from tidemill.capture.changes import Fragment
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices, Tap, TapRegistry, TapSession
from tidemill.capture.postgres.standby_status import ReplicationStatus


class NobodyListed(BaseException):
    """An exception as native code raises it, which does not derive from `Exception`."""


class SeeingTap:
    name = ""
    consumer = "tap"

    def __init__(self, error: BaseException | None = None, ending: BaseException | None = None) -> None:
        self.got: list[Fragment] = []
        self.reasons: list[str] = []
        self.error = error
        self.ending = ending

    def begin_session(self, last: Collection[str]) -> None: ...

    def begin_stream(self, stream: TapSession, confirmed_lsn: int, wal_end: int = 0) -> None: ...

    def process_fragment(self, fragment: Fragment) -> Collection[str]:
        if self.error is not None:
            raise self.error
        self.got.append(fragment)
        return ()

    def lost(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        self.reasons.append(f"{oid}: {reason}")
        if self.ending is not None:
            raise self.ending
        return False

    def mark_incomplete(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.ending is not None:
            raise self.ending

    def set_carried_relations(self, oids: Collection[int]) -> None: ...


class GatedSink:
    """A sink that is durable immediately, but accepts nothing before its gate opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.got: list[Fragment] = []

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        await self.gate.wait()
        self.got.append(fragment)
        if fragment.commits:
            notices.report_flushed("sink", fragment.last)
        return ["sink"]

    async def aclose(self) -> None: ...


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running_collector(taps: TapRegistry) -> AsyncIterator[tuple[Collector, GatedSink]]:
    sink = GatedSink()
    collector = Collector([sink], ReplicationStatus(0), ManualClock(), taps=taps)
    task = asyncio.ensure_future(collector.run())
    try:
        yield collector, sink
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("where"), NobodyListed("panic"), asyncio.CancelledError(), RecursionError()]
)
async def test_f425_a_tap_that_raises_ends_alone_and_capture_confirms_on(error: BaseException) -> None:
    taps = TapRegistry(ManualClock())
    bad, good = SeeingTap(error), SeeingTap()
    taps.add(bad)
    taps.add(good)
    async with running_collector(taps) as (collector, sink):
        await collector.put(fragment(5, change(5)))
        await settle()
        assert collector.status.flushed == 5
        assert [f.commit_lsn for f in good.got] == [f.commit_lsn for f in sink.got] == [5]
        assert len(bad.reasons) == 1 and type(error).__name__ in bad.reasons[0]
        assert taps.facts()["tap_failures"] == 1
        # It starts again with the next transaction.
        bad.error = None
        await collector.put(fragment(7, change(7)))
        await settle()
        assert [f.commit_lsn for f in bad.got] == [7]
        assert collector.status.flushed == 7


def test_a_tap_that_failed_gets_nothing_more_of_that_transaction() -> None:
    taps = TapRegistry(ManualClock())
    tap = SeeingTap(ValueError("once"))
    taps.add(tap)
    taps.dispatch_fragment(fragment(5, change(5, 0), commits=False))
    tap.error = None
    taps.dispatch_fragment(fragment(5, change(5, 2), begins=False))
    assert tap.got == [] and tap.reasons == ["ValueError: once"]
    taps.dispatch_fragment(fragment(7, change(7)))
    assert [f.commit_lsn for f in tap.got] == [7]


def test_a_tap_that_cannot_even_end_is_left_out() -> None:
    taps = TapRegistry(ManualClock())
    tap = SeeingTap(ValueError("first"), ending=NobodyListed("again"))
    taps.add(tap)
    taps.dispatch_fragment(fragment(5, change(5)))
    tap.error = None
    taps.dispatch_fragment(fragment(7, change(7)))
    assert tap.got == []
    assert "could not end" in str(taps.facts()["tap_error"])


def test_er3_a_tap_added_in_the_middle_of_a_transaction_joins_the_next_one() -> None:
    taps = TapRegistry(ManualClock())
    late = SeeingTap()
    taps.dispatch_fragment(fragment(5, change(5, 0), commits=False))
    taps.add(late)
    taps.dispatch_fragment(fragment(5, change(5, 2), begins=False))
    taps.dispatch_fragment(fragment(7, change(7)))
    assert [f.commit_lsn for f in late.got] == [7]


async def test_f426_a_tap_removed_while_a_sink_is_awaited_gets_nothing_more() -> None:
    """K4, ER4: the tap is removed while a sink is awaited, in the middle of a transaction."""
    taps = TapRegistry(ManualClock())
    gone, stays = SeeingTap(), SeeingTap()
    taps.add(gone)
    taps.add(stays)
    async with running_collector(taps) as (collector, sink):
        sink.gate.clear()
        await collector.put(fragment(5, change(5, 0), commits=False))
        await settle()
        assert sink.got == [], "the sink is being awaited"
        taps.remove(gone)
        await collector.put(fragment(5, change(5, 2), begins=False))
        sink.gate.set()
        await settle()
        assert len(gone.got) == 1 and len(stays.got) == 2
        assert collector.status.flushed == 5


def test_a_tap_that_removes_another_keeps_it_from_the_fragment_at_hand() -> None:
    taps = TapRegistry(ManualClock())
    victim = SeeingTap()

    class Remover(SeeingTap):
        def process_fragment(self, fragment: Fragment) -> None:
            taps.remove(victim)

    remover: Tap = Remover()
    taps.add(remover)
    taps.add(victim)
    taps.dispatch_fragment(fragment(5, change(5)))
    assert victim.got == []


def test_a_tap_that_raises_when_it_is_told_what_is_carried_on_ends_alone() -> None:
    taps = TapRegistry(ManualClock())
    reported: list[Collection[int]] = []
    bad, good = SeeingTap(), SeeingTap()
    bad.set_carried_relations = lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    good.set_carried_relations = reported.append  # type: ignore[method-assign,assignment]
    taps.add(bad)
    taps.add(good)
    taps.dispatch_fragment(fragment(5, change(5)))
    taps.set_carried_relations({1, 2})
    assert reported == [{1, 2}]
    assert good.reasons == [] and "ZeroDivisionError" in bad.reasons[0]


def test_a_tap_is_told_of_a_relation_that_is_carried_no_more_and_lives_on() -> None:
    seen, joining = SeeingTap(), SeeingTap()
    taps = TapRegistry(ManualClock())
    taps.add(seen)
    taps.dispatch_fragment(fragment(1, change(1)))
    taps.add(joining)
    taps.lose_relation(7, "parked")
    assert seen.reasons == joining.reasons == ["7: parked"]
    taps.dispatch_fragment(fragment(2, change(2), commits=False))
    taps.dispatch_fragment(fragment(2, change(2, 2), begins=False))
    assert [len(tap.got) for tap in (seen, joining)] == [3, 2]


def test_a_tap_that_cannot_take_a_loss_ends_and_no_other_notices() -> None:
    broken, seen = SeeingTap(ending=NobodyListed("no")), SeeingTap()
    taps = TapRegistry(ManualClock())
    taps.add(broken)
    taps.add(seen)
    taps.dispatch_fragment(fragment(1, change(1)))
    taps.lose_relation(7, "parked")
    taps.dispatch_fragment(fragment(2, change(2)))
    assert [len(tap.got) for tap in (broken, seen)] == [1, 2]
