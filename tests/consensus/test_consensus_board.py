from __future__ import annotations

from typing import Any

import pytest

from contracts.consensus import run
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import Corrupt, Invalid, Unknown
from tidemill.base.marks import Mark, Report
from tidemill.consensus.api import Versioned
from tidemill.consensus.board import FORGET_AFTER_MS, Board
from tidemill.consensus.memory import MemoryConsensus


def report(process: str, at_ms: int) -> Report:
    return Report(process, at_ms, (Mark("capture/shop", at_ms, at_ms + 1, held_by="pg"),), {"rates": {"in": 1.5}})


class Lossy(MemoryConsensus):
    fates: list[str] = []

    async def cas(self, *args: Any, **kwargs: Any) -> Versioned:
        fate = self.fates.pop(0) if self.fates else ""
        if fate == "before":
            raise Unknown("lost")
        version = await super().cas(*args, **kwargs)
        if fate == "after":
            raise Unknown("lost")
        return version


def test_the_newest_report_of_every_process_is_shown() -> None:
    async def body() -> None:
        consensus = MemoryConsensus(SystemClock())
        one, two, reader = (Board(consensus, Rand(seed)) for seed in range(3))
        for at_ms in (1, 2, 3):
            await one.publish(report("one", at_ms))
        await two.publish(report("two", 2))
        assert await reader.reports() == [report("one", 3), report("two", 2)]

    run(body())


def test_a_restarted_process_goes_on_under_its_name() -> None:
    async def body() -> None:
        consensus = MemoryConsensus(SystemClock())
        await Board(consensus, Rand(1)).publish(report("one", 1))
        await Board(consensus, Rand(2)).publish(report("one", 2))
        assert await Board(consensus, Rand(3)).reports() == [report("one", 2)]

    run(body())


@pytest.mark.parametrize("fate", ["before", "after"])
def test_a_lost_acknowledgement_does_not_hide_a_report(fate: str) -> None:
    async def body() -> None:
        consensus = Lossy(SystemClock())
        board = Board(consensus, Rand(1))
        await board.publish(report("one", 1))
        consensus.fates = [fate, fate]
        await board.publish(report("one", 2))
        assert await board.reports() == [report("one", 2)]
        await board.publish(report("one", 3))
        assert await board.reports() == [report("one", 3)]

    run(body())


def test_a_report_older_than_an_hour_is_removed_and_may_come_back() -> None:
    async def body() -> None:
        consensus = MemoryConsensus(SystemClock())
        board = Board(consensus, Rand(1))
        await board.publish(report("gone", 1))
        await board.publish(report("here", FORGET_AFTER_MS))
        assert [r.process for r in await board.reports(now_ms=FORGET_AFTER_MS + 2)] == ["here"]
        assert [r.process for r in await board.reports()] == ["here"]
        await board.publish(report("gone", FORGET_AFTER_MS))
        assert [r.process for r in await board.reports()] == ["gone", "here"]

    run(body())


def test_a_report_that_cannot_be_read_is_corrupt_and_a_shared_name_is_refused() -> None:
    class Contested(MemoryConsensus):
        async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
            await super().cas(key, expected_seq, b"other", "other")
            return await super().cas(key, expected_seq, data, nonce)

    async def body() -> None:
        consensus = MemoryConsensus(SystemClock())
        await consensus.cas("marks/x", 0, b"\xc1", "n")
        with pytest.raises(Corrupt):
            await Board(consensus, Rand(1)).reports()
        with pytest.raises(Invalid):
            await Board(Contested(SystemClock()), Rand(1)).publish(report("one", 1))

    run(body())
