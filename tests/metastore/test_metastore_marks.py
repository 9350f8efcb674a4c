"""Status of a domain's leader: behind only when the bucket is, not while rows wait for their interval."""

from __future__ import annotations

from tidemill.base.clock import ManualClock, Rand
from tidemill.base.status.status import StageState, StageStatus, StatusTracker, derive_status
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.persist_loop import OVERDUE_S
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.objects.memory import MemoryObjects

INTERVAL_S = 600.0


async def test_rows_that_wait_for_their_interval_are_on_time_and_late_ones_are_named() -> None:
    clock, tracker = ManualClock(), StatusTracker()
    settings = DomainSettings(persist_interval_s=INTERVAL_S)
    domain = await Domain.open(
        DomainContext(
            MemoryConsensus(clock),
            MemoryObjects(clock),
            "0",
            holder="n/1",
            clock=clock,
            rand=Rand(1),
            settings=settings,
            tracker=tracker,
        )
    )
    await domain.wait_until_leading(10.0)

    def mark() -> StageStatus:
        assert domain._leader is not None
        domain._leader.mark()
        [found] = tracker.report("p", clock.now_ms()).marks
        return found

    def state() -> StageState:
        return derive_status(mark(), "p", clock.now_ms(), clock.now_ms()).state

    seqno = await domain.commit([(b"\x01k\x00\x01", b"v")])
    assert state() is StageState.IDLE
    assert f"seqno {seqno} " in mark().reason
    clock.advance(int(INTERVAL_S * 1000))
    assert state() is StageState.IDLE
    clock.advance(int(OVERDUE_S * 1000) + 1)
    assert (mark().position, mark().target) == (0, seqno)
    assert state() is StageState.MOVING, "late from this moment on"
    clock.advance(10_000)
    assert state() is StageState.WAITING
    clock.advance(int((INTERVAL_S + settings.flush_timeout_s) * 1000))
    assert state() is StageState.STUCK
    await domain.flush(10.0)
    assert mark().position == mark().target == seqno
    assert state() is StageState.IDLE
    await domain.aclose()
