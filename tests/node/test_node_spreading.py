"""Captures are spread over the nodes that may run them: when a node claims one, and when it hands one over."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Lease
from tidemill.consensus.leader_election import LeaseRequest, run_while_leading
from tidemill.consensus.memory import MemoryConsensus
from tidemill.node.captures import balancer
from tidemill.node.captures.balancer import CaptureBalancer

LEASE = Lease("capture/a", "n1/1", 1, 1, 60_000, True)


async def test_s2_what_who_should_have_it_does_not_take_is_taken_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "TRY_INTERVAL_S", 0.05)

    async def look() -> tuple[dict[str, str], dict[str, list[str]]]:
        await asyncio.sleep(0.005)
        return {"b": "n1/1", "c": "n1/1"}, {"n1": ["a", "b", "c"], "dead": ["a"]}

    async with asyncio.timeout(30):
        await CaptureBalancer("n1/2", look, SystemClock()).wait_for_turn("a")
        await CaptureBalancer("unknown/2", look, SystemClock()).wait_for_turn(
            "a"
        )  # not in the view at all: it tries nevertheless
        await CaptureBalancer("n1/2", look, SystemClock()).wait_for_turn("b")  # an earlier life's
    waits = asyncio.create_task(CaptureBalancer("n1/1", look, SystemClock()).wait_for_turn("b"))
    await asyncio.wait([waits], timeout=0.1)
    assert not waits.done()  # it has just handed over this capture: others come first
    waits.cancel()


async def test_a_capture_that_another_should_have_ends_before_its_lease_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "HANDOVER_DELAY_S", 0.0)
    consensus = MemoryConsensus(SystemClock())
    uneven, at_end = asyncio.Event(), list[bool]()

    async def look() -> tuple[dict[str, str], dict[str, list[str]]]:
        await uneven.wait()
        await asyncio.sleep(0)
        return {"a": "n1/1", "b": "n1/1"}, {"n1": ["a", "b"], "n2": ["a"]}

    async def run(_: Lease) -> None:
        uneven.set()
        try:
            await asyncio.sleep(3600)
        finally:
            at_end.extend(lease.live for lease in await consensus.leases("capture/"))

    body = CaptureBalancer("n1/1", look, SystemClock()).with_handover("a", run)
    async with asyncio.timeout(30):
        await run_while_leading(consensus, LeaseRequest("capture/a", "n1/1"), body)
    assert at_end == [True]
    assert not any(lease.live for lease in await consensus.leases("capture/"))


async def test_what_a_capture_raises_is_raised_to_who_holds_the_lease() -> None:
    async def look() -> tuple[dict[str, str], dict[str, list[str]]]:
        await asyncio.sleep(3600)
        return {}, {}

    async def run(_: Lease) -> None:
        raise RuntimeError("of whatever type")

    async with Tasks(print):
        with pytest.raises(RuntimeError, match="of whatever type"):
            await CaptureBalancer("n1/1", look, SystemClock()).with_handover("a", run)(LEASE)
