"""A part that only its operator can mend waits for him under its mark; everything beside it goes on."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.errors import Corrupt, Invalid, Unavailable
from tidemill.base.marks import Mark, Tracker
from tidemill.node.tending import tended


def shown(tracker: Tracker) -> list[Mark]:
    return list(tracker.report("p", 0).marks)


def test_what_an_operator_must_mend_is_said_under_the_mark_and_tried_again() -> None:
    async def scenario() -> None:
        tracker, seen = Tracker(), []
        errors = [Invalid("the slot is gone.", fix="Start over."), Corrupt("a record cannot be read.")]

        async def body() -> None:
            seen.append([(mark.held_by, mark.reason) for mark in shown(tracker)])
            if errors:
                raise errors.pop(0)

        async with asyncio.timeout(20):
            await tended(body, tracker, "capture:shop", SystemClock(), retry_s=0.01)
        assert seen == [
            [],
            [("operator", "the slot is gone. Start over.")],
            [("operator", "a record cannot be read.")],
        ]

    asyncio.run(scenario())


def test_a_loser_of_the_lease_takes_its_mark_along_and_other_errors_are_raised() -> None:
    async def scenario() -> None:
        tracker, failed = Tracker(), asyncio.Event()

        async def refused() -> None:
            failed.set()
            raise Invalid("no such table.")

        waiting = asyncio.ensure_future(tended(refused, tracker, "capture:shop", SystemClock(), retry_s=3_600))
        await failed.wait()
        await asyncio.sleep(0)
        assert [mark.name for mark in shown(tracker)] == ["capture:shop"]
        waiting.cancel()
        await asyncio.wait([waiting])
        assert shown(tracker) == []

        async def away() -> None:
            raise Unavailable("a bug below: sessions try again by themselves.")

        with pytest.raises(Unavailable):
            await tended(away, tracker, "capture:shop", SystemClock())

    asyncio.run(scenario())
