"""Reports of `up` for children that cannot report: ages of marks survive its restart, and each sentence appears
once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import StatusReport, StatusTracker, this_process
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.node.supervise.driver_instances import DRIVER_MODULE, OwnDrivers
from tidemill.node.supervise.status import SupervisorStatus


def failing(tracker: StatusTracker, now_ms: int, error: str) -> None:
    tracker.set("pipeline:shop", 0, 1, now_ms=now_ms)
    tracker.fail("pipeline:shop", error, now_ms=now_ms)


async def reported(board: StatusBoard, process: str) -> StatusReport | None:
    return next((r for r in await board.reports() if r.process == process), None)


async def test_a_child_that_cannot_start_is_told_with_one_age_over_restarts_of_up_and_silence_costs_nothing(
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(url, clock, rand)
    board = StatusBoard(consensus, rand)
    since: list[int] = []
    for life, now_ms in enumerate((1_000, 50_000)):
        tracker = StatusTracker()
        telling = SupervisorStatus("n1", url, tracker, clock, rand, lambda _: None, OwnDrivers())
        await telling.adopt()
        if life == 0:
            await telling._publish()
            assert await reported(board, "up:n1") is None, "nothing is written while every child runs"
        failing(tracker, now_ms, "the bucket is away.")
        await telling._publish()
        report = await reported(board, "up:n1")
        assert report is not None
        (mark,) = report.marks
        since.append(mark.failing_since_ms)
        assert (mark.name, mark.error, mark.tries) == ("pipeline:shop", "the bucket is away.", life + 1)
        if life == 1:
            tracker.clear_failure("pipeline:shop")
            tracker.remove("pipeline:shop")
            await telling._publish()
            assert await reported(board, "up:n1") is None, "an empty report would turn blind, while all is well"
        await telling.aclose()
    assert since == [1_000, 1_000]
    await consensus.aclose()


async def test_a_restart_is_told_while_it_is_recent_and_no_more_once_everything_ended_in_order(tmp_path: Path) -> None:
    clock, rand = SystemClock(), Rand()
    restarts: dict[str, object] = {"pipeline:shop": {"at_ms": 1, "count": 1, "reason": "killed by SIGKILL."}}
    telling = SupervisorStatus(
        "n1", f"sqlite://{tmp_path}/c.db", StatusTracker(), clock, rand, lambda _: None, OwnDrivers()
    )
    telling.restarts = lambda: restarts
    board = await telling._open_board()
    await telling._publish()
    report = await reported(board, "up:n1")
    assert report is not None and report.facts == {"restarts": restarts}
    await telling.forget_ended(["pipeline:shop"])
    assert await reported(board, "up:n1") is None
    await telling.aclose()


def test_each_error_of_a_driver_is_printed_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    tracker, url = StatusTracker(), f"sqlite://{tmp_path}/c.db"
    telling = SupervisorStatus("n1", url, StatusTracker(), SystemClock(), Rand(), said.append, OwnDrivers())
    tracker.fail("shard:orders", "other columns.", now_ms=1)
    broken, whole = tracker.report("pipeline:shop", 5), StatusTracker().report("pipeline:shop", 5)
    for reports in ([broken], [broken], [whole], [broken]):
        telling._print_errors(reports)
    telling._print_errors([StatusReport("node:n1", 5, broken.marks)])
    assert said == ["shard:orders: other columns."] * 2


async def test_an_empty_report_of_an_earlier_life_is_taken_away(tmp_path: Path) -> None:
    clock, rand = SystemClock(), Rand()
    telling = SupervisorStatus(
        "n1", f"sqlite://{tmp_path}/consensus.db", StatusTracker(), clock, rand, lambda _: None, OwnDrivers()
    )
    board = await telling._open_board()
    await board.publish(StatusReport("up:n1", 1, ()))
    await telling.adopt()
    await telling._publish()
    assert await reported(board, "up:n1") is None
    await telling.aclose()


def test_what_may_have_been_told_is_taken_away_though_nobody_knows_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report left on the board without renewal would turn blind although all is well."""
    clock, rand = SystemClock(), Rand()
    publish = StatusBoard.publish

    async def publishes_unknown(self: StatusBoard, report: StatusReport) -> None:
        await publish(self, report)
        raise UnknownOutcomeError("no answer came.")

    async def away(self: StatusBoard) -> list[StatusReport]:
        raise UnavailableError("consensus is away.")

    async def scenario(found: str) -> None:
        tracker = StatusTracker()
        url = f"sqlite://{tmp_path}/{found}.db"
        telling = SupervisorStatus("n1", url, tracker, clock, rand, lambda _: None, OwnDrivers())
        board = await telling._open_board()
        if found == "publish":
            failing(tracker, 1_000, "the bucket is away.")
            with monkeypatch.context() as patch:
                patch.setattr(StatusBoard, "publish", publishes_unknown)
                with pytest.raises(UnknownOutcomeError):
                    await telling._publish()
            tracker.clear_failure("pipeline:shop")
            tracker.remove("pipeline:shop")
        else:
            await board.publish(StatusReport("up:n1", 1, ()))
            with monkeypatch.context() as patch:
                patch.setattr(StatusBoard, "reports", away)
                await telling.adopt()
        assert await reported(board, "up:n1") is not None
        await telling._publish()
        assert await reported(board, "up:n1") is None
        await telling.aclose()

    for found in ("publish", "adopt"):
        asyncio.run(scenario(found))


async def test_a_driver_that_ends_in_order_is_forgotten_where_a_peer_goes_on_and_blind_where_none_does(
    tmp_path: Path,
) -> None:
    url = f"sqlite://{tmp_path}/consensus.db"
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(url, clock, rand)
    board = StatusBoard(consensus, rand)
    now_ms = clock.now_ms()
    silent_ms = now_ms - 10 * STATUS_BLIND_AFTER_MS
    for process, at_ms in (
        ("pipeline:two", now_ms), ("pipeline:two:2", now_ms), ("pipeline:one", now_ms), ("node:n1", now_ms),
        ("pipeline:dead", now_ms), ("pipeline:dead:b", silent_ms),
    ):  # fmt: skip
        await board.publish(StatusReport(process, at_ms, ()))
    tracker = StatusTracker()
    tracker.fail("pipeline:two:2", "killed by SIGKILL.", now_ms=now_ms)
    telling = SupervisorStatus("n1", url, tracker, clock, rand, lambda _: None, OwnDrivers())
    await telling._publish()
    assert await reported(board, "up:n1") is not None
    await telling.forget_ended(["pipeline:two:2", "pipeline:one", "pipeline:dead", "node:n1"])
    await telling._publish()  # its rounds continue until it is closed
    left = {report.process for report in await board.reports()}
    assert left == {"pipeline:two", "pipeline:one", "pipeline:dead", "pipeline:dead:b", "node:n1"}
    await board.publish(StatusReport("pipeline:two:2", now_ms, ()))  # it may come again
    assert await reported(board, "pipeline:two:2") is not None
    await telling.aclose()
    await consensus.aclose()


def test_drivers_that_are_not_started_any_more_are_forgotten_once_they_are_dead(tmp_path: Path) -> None:
    """`up` with three drivers was killed, and is started with one. The second driver is frozen, not dead."""
    clock, rand = SystemClock(), Rand()
    argv = [sys.executable, "-c", "input()", DRIVER_MODULE]

    async def scenario(frozen_pid: int, dead_pid: int) -> None:
        drivers = OwnDrivers(["shop"])
        telling = SupervisorStatus(
            "n1", f"sqlite://{tmp_path}/c.db", StatusTracker(), clock, rand, lambda _: None, drivers
        )
        board = await telling._open_board()
        host, now_ms = this_process()[1], clock.now_ms()
        silent_ms = now_ms - 2 * STATUS_BLIND_AFTER_MS
        for process, at_ms, pid, where in (
            ("pipeline:shop", now_ms, 1, host), ("pipeline:shop:2", silent_ms, frozen_pid, host),
            ("pipeline:shop:3", silent_ms, dead_pid, host), ("pipeline:shop:4", now_ms, dead_pid, host),
            ("pipeline:shop:5", silent_ms, dead_pid, "elsewhere"), ("pipeline:shop:b-3", silent_ms, dead_pid, host),
            ("pipeline:other:3", silent_ms, dead_pid, host), ("node:n1", silent_ms, dead_pid, host),
        ):  # fmt: skip
            await board.publish(StatusReport(process, at_ms, (), {}, pid, where))
        before = {report.process for report in await board.reports()}
        await telling._read_driver_reports(board)
        assert {report.process for report in await board.reports()} == before, "whom it starts is not known yet"
        drivers.started = ["pipeline:shop", "node:n1"]
        await telling._read_driver_reports(board)
        assert before - {report.process for report in await board.reports()} == {"pipeline:shop:3"}
        await telling.aclose()

    with subprocess.Popen(argv, stdin=subprocess.PIPE) as frozen, subprocess.Popen(["true"]) as dead:
        dead.wait()
        frozen.send_signal(signal.SIGSTOP)
        try:
            asyncio.run(scenario(frozen.pid, dead.pid))
        finally:
            frozen.kill()
