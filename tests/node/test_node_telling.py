"""What `up` tells for children that cannot speak: marks with ages that survive its own restart, each sentence once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.limits import MARK_BLIND_AFTER_MS
from tidemill.base.marks import Report, Tracker
from tidemill.consensus.board import Board
from tidemill.consensus.open import open_consensus
from tidemill.node.telling import Telling


def failing(tracker: Tracker, now_ms: int, error: str) -> None:
    tracker.set("pipeline:shop", 0, 1, now_ms=now_ms)
    tracker.fail("pipeline:shop", error, now_ms=now_ms)


async def told(board: Board, process: str) -> Report | None:
    return next((r for r in await board.reports() if r.process == process), None)


def test_a_child_that_cannot_start_is_told_with_one_age_over_restarts_of_up_and_silence_costs_nothing(
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    clock, rand = SystemClock(), Rand()

    async def scenario() -> None:
        consensus = await open_consensus(url, clock, rand)
        board = Board(consensus, rand)
        since: list[int] = []
        for life, now_ms in enumerate((1_000, 50_000)):
            tracker = Tracker()
            telling = Telling("n1", url, tracker, clock, rand, lambda _: None)
            await telling.adopt()
            if life == 0:
                await telling._publish()
                assert await told(board, "up:n1") is None, "nothing is written while every child runs"
            failing(tracker, now_ms, "the bucket is away.")
            await telling._publish()
            report = await told(board, "up:n1")
            assert report is not None
            (mark,) = report.marks
            since.append(mark.failing_since_ms)
            assert (mark.name, mark.error, mark.tries) == ("pipeline:shop", "the bucket is away.", life + 1)
            if life == 1:
                tracker.heal("pipeline:shop")
                tracker.remove("pipeline:shop")
                await telling._publish()
                report = await told(board, "up:n1")
                assert report is not None and report.marks == ()
            await telling.aclose()
        assert since == [1_000, 1_000]
        await consensus.aclose()

    asyncio.run(scenario())


def test_each_error_of_a_driver_is_printed_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    telling = Telling("n1", f"sqlite://{tmp_path}/c.db", Tracker(), SystemClock(), Rand(), said.append)
    tracker = Tracker()
    tracker.fail("shard:orders", "other columns.", now_ms=1)
    broken, whole = tracker.report("pipeline:shop", 5), Tracker().report("pipeline:shop", 5)
    for reports in ([broken], [broken], [whole], [broken]):
        telling._print(reports)
    telling._print([Report("node:n1", 5, broken.marks)])
    assert said == ["shard:orders: other columns."] * 2


def test_a_driver_that_ends_in_order_is_forgotten_where_a_peer_goes_on_and_blind_where_none_does(
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    clock, rand = SystemClock(), Rand()

    async def scenario() -> None:
        consensus = await open_consensus(url, clock, rand)
        board = Board(consensus, rand)
        now_ms = clock.now_ms()
        silent_ms = now_ms - 10 * MARK_BLIND_AFTER_MS
        for process, at_ms in (
            ("pipeline:two", now_ms), ("pipeline:two:2", now_ms), ("pipeline:one", now_ms), ("node:n1", now_ms),
            ("pipeline:dead", now_ms), ("pipeline:dead:b", silent_ms),
        ):  # fmt: skip
            await board.publish(Report(process, at_ms, ()))
        telling = Telling("n1", url, Tracker(), clock, rand, lambda _: None)
        await telling.retire(["pipeline:two:2", "pipeline:one", "pipeline:dead", "node:n1"])
        left = {report.process for report in await board.reports()}
        assert left == {"pipeline:two", "pipeline:one", "pipeline:dead", "pipeline:dead:b", "node:n1"}
        await board.publish(Report("pipeline:two:2", now_ms, ()))  # it may come again
        assert await told(board, "pipeline:two:2") is not None
        await telling.aclose()
        await consensus.aclose()

    asyncio.run(scenario())
