from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import run, slowness
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import PAGE_BYTES, PAGE_ENTRY_BYTES
from tidemill.base.status.status import StageStatus, StatusReport
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus
from tidemill.consensus.status.board import CLEANUP_INTERVAL_MS, DROP_SILENT_AFTER_MS, READ_TIMEOUT_S, StatusBoard
from tidemill.consensus.status.pages import Pager


def report(process: str, at_ms: int) -> StatusReport:
    return StatusReport(
        process, at_ms, (StageStatus("capture/shop", at_ms, at_ms + 1, held_by="pg"),), {"rates": {"in": 1.5}}
    )


class Lossy(MemoryConsensus):
    fates: list[str] = []

    async def cas(self, *args: Any, **kwargs: Any) -> Versioned:
        fate = self.fates.pop(0) if self.fates else ""
        if fate == "before":
            raise UnknownOutcomeError("lost")
        version = await super().cas(*args, **kwargs)
        if fate == "after":
            raise UnknownOutcomeError("lost")
        return version


class Silent(MemoryConsensus):
    """A consensus behind a black hole: no request is ever answered."""

    async def _submit(self, op: Any) -> Any:
        await asyncio.Event().wait()


async def test_f619_a_board_that_is_not_answered_is_unavailable_within_two_seconds() -> None:
    board = StatusBoard(Silent(SystemClock()), Rand(1))
    before_s = time.monotonic()
    with pytest.raises(UnavailableError, match="consensus does not answer"):
        await board.reports_or_raise(lambda: "")
    assert time.monotonic() - before_s + 0.01 >= READ_TIMEOUT_S
    assert READ_TIMEOUT_S == 2


async def test_the_newest_report_of_every_process_is_shown() -> None:
    consensus = MemoryConsensus(SystemClock())
    one, two, reader = (StatusBoard(consensus, Rand(seed)) for seed in range(3))
    for at_ms in (1, 2, 3):
        await one.publish(report("one", at_ms))
    await two.publish(report("two", 2))
    assert await reader.reports() == [report("one", 3), report("two", 2)]


async def test_a_restarted_process_goes_on_under_its_name() -> None:
    consensus = MemoryConsensus(SystemClock())
    await StatusBoard(consensus, Rand(1)).publish(report("one", 1))
    await StatusBoard(consensus, Rand(2)).publish(report("one", 2))
    assert await StatusBoard(consensus, Rand(3)).reports() == [report("one", 2)]


async def test_a_process_that_was_forgotten_while_it_slept_shows_all_of_its_report_again() -> None:
    consensus = MemoryConsensus(SystemClock())
    sleeper, other = StatusBoard(consensus, Rand(1)), StatusBoard(consensus, Rand(2))
    await sleeper.publish(report("one", 1))
    now_ms = 1 + DROP_SILENT_AFTER_MS + CLEANUP_INTERVAL_MS
    await other.publish(report("two", now_ms))
    assert [found.process for found in await other.reports()] == ["two"]
    again = msgspec.structs.replace(report("one", 1), at_ms=now_ms)  # the same statuses as before
    await sleeper.publish(again)
    assert again in await other.reports()


async def test_a_report_from_the_future_is_dropped_after_an_hour_without_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, future_ms = 1_000.0, 1 << 50
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    consensus = MemoryConsensus(SystemClock())
    gone, alive, here = (StatusBoard(consensus, Rand(seed)) for seed in range(3))
    await gone.publish(report("gone", future_ms))
    for number in range(1, 8):
        await alive.publish(report("alive", future_ms + number))  # its clock is as fast
        await here.publish(report("here", number * (CLEANUP_INTERVAL_MS + 1)))
        left = [found.process for found in await here.reports()]
        assert left == (["alive", "gone", "here"] if number < 7 else ["alive", "here"])
        now_s += DROP_SILENT_AFTER_MS / 6_000
    assert [key for key in consensus.state.registers if "gone" in key] == []


@pytest.mark.parametrize("fate", ["before", "after"])
async def test_a_lost_acknowledgement_does_not_hide_a_report(fate: str) -> None:
    consensus = Lossy(SystemClock())
    board = StatusBoard(consensus, Rand(1))
    await board.publish(report("one", 1))
    consensus.fates = [fate, fate]
    await board.publish(report("one", 2))
    assert await board.reports() == [report("one", 2)]
    await board.publish(report("one", 3))
    assert await board.reports() == [report("one", 3)]


async def test_what_a_process_left_is_dropped_an_hour_later_and_it_may_come_back() -> None:
    consensus = MemoryConsensus(SystemClock())
    gone, here = StatusBoard(consensus, Rand(1)), StatusBoard(consensus, Rand(2))
    await gone.publish(report("gone", 1))
    await here.publish(report("here", DROP_SILENT_AFTER_MS))
    assert [r.process for r in await here.reports()] == ["gone", "here"]
    await here.publish(report("here", DROP_SILENT_AFTER_MS + 2))
    # silent processes are removed only at intervals
    assert [r.process for r in await here.reports()] == ["gone", "here"]
    await here.publish(report("here", DROP_SILENT_AFTER_MS + CLEANUP_INTERVAL_MS + 1))
    assert [r.process for r in await here.reports()] == ["here"]
    assert [key for key in consensus.state.registers if "gone" in key] == []
    await gone.publish(report("gone", DROP_SILENT_AFTER_MS + 5))
    assert await here.reports() == [
        report("gone", DROP_SILENT_AFTER_MS + 5),
        report("here", DROP_SILENT_AFTER_MS + CLEANUP_INTERVAL_MS + 1),
    ]


async def test_a_report_that_cannot_be_read_hides_no_other_and_a_shared_name_is_refused() -> None:
    class Contested(MemoryConsensus):
        async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
            await super().cas(key, expected_seq, b"other", "other")
            return await super().cas(key, expected_seq, data, nonce)

    consensus = MemoryConsensus(SystemClock())
    await consensus.cas("board/broken", 0, b"\xc1", "n")
    await consensus.cas("board/nobody\x1f000000", 0, b"a page without its head", "n")
    await StatusBoard(consensus, Rand(1)).publish(report("well", 1))
    broken, well = await StatusBoard(consensus, Rand(1)).reports()
    assert (broken.process, broken.at_ms, broken.marks) == ("broken", 0, ())
    assert "cannot be read" in str(broken.facts)
    assert well == report("well", 1)
    with pytest.raises(InvalidError):
        await StatusBoard(Contested(SystemClock()), Rand(1)).publish(report("one", 1))


def marks(count: int, position: int = 0) -> list[StageStatus]:
    return [
        StageStatus(f"topic:shop.a_table_with_a_long_name_{n:06d}", position, 1, reason="r" * 20) for n in range(count)
    ]


class Counting(MemoryConsensus):
    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.written: list[str] = []
        self.largest = 0

    async def cas(self, key: str, expected_seq: int, data: bytes, nonce: str) -> Versioned:
        self.written.append(key)
        self.largest = max(self.largest, len(data))
        return await super().cas(key, expected_seq, data, nonce)


async def test_f514_twenty_thousand_marks_are_published_in_bounded_registers_and_an_idle_one_costs_nothing() -> None:
    consensus = Counting()
    board, reader = StatusBoard(consensus, Rand(1)), StatusBoard(consensus, Rand(2))
    all_marks = marks(20_000)
    await board.publish(StatusReport("node", 1, tuple(all_marks), {"rates": 1}))
    pages = len(consensus.written) - 1
    assert pages > 10 and consensus.largest < 2 * PAGE_BYTES + PAGE_ENTRY_BYTES
    (found,) = await reader.reports()
    assert sorted(found.marks, key=lambda m: m.name) == all_marks and found.facts == {"rates": 1}
    # Nothing changed: the head alone, with its time.
    consensus.written.clear()
    await board.publish(StatusReport("node", 2, tuple(all_marks), {"rates": 1}))
    assert consensus.written == ["board/node"]
    assert (await reader.reports())[0].at_ms == 2
    # One status changed: its page and the head are written.
    consensus.written.clear()
    all_marks[777] = StageStatus(all_marks[777].name, 5, 9)
    await board.publish(StatusReport("node", 3, tuple(all_marks), {"rates": 1}))
    assert len(consensus.written) == 2
    assert all_marks[777] in (await reader.reports())[0].marks
    # A shorter report deletes its surplus pages, also those of an earlier process.
    await board.publish(StatusReport("node", 4, tuple(all_marks[:10]), {}))
    assert len(consensus.state.registers) == 2
    await board.publish(StatusReport("node", 5, tuple(all_marks), {}))
    await StatusBoard(consensus, Rand(3)).publish(StatusReport("node", 6, tuple(all_marks[:10]), {}))
    assert len(consensus.state.registers) == 2
    assert len((await reader.reports())[0].marks) == 10


async def test_f514_an_oversized_or_odd_fact_is_cut_with_a_note_and_never_an_error() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ZeroDivisionError("a bug")

    nested: list[object] = []
    for _ in range(5_000):
        nested = [nested]
    consensus = Counting()
    board = StatusBoard(consensus, Rand(1))
    facts = {
        "long": "x" * (5 << 20),
        "tables": {f"table_{n}": {"rows": n, "state": "captured"} for n in range(20_000)},
        "odd": {"value": Odd()},
        "set": {1, 2},
        "huge": 1 << 200,
        "nested": nested,
        "fine": {"a": [1, 2.5, None]},
        **{f"capture:{n}": {"bytes": "y" * 20_000} for n in range(200)},
    }
    long = StageStatus("m" * 2_000, 1, 2, held_by="h" * 5_000, reason="r" * 100_000, error="e" * 1_000_000)
    await board.publish(StatusReport("node", 1, (long,), facts))
    (found,) = await board.reports()
    assert found.facts["fine"] == {"a": [1, 2.5, None]}
    assert "limit_bytes" in str(found.facts["long"]) and len(str(found.facts["long"])) < 100
    tables = found.facts["tables"]
    assert isinstance(tables, dict) and "entries=20000" in tables["cut"] and tables["table_0"]["rows"] == 0
    assert all("error" in str(found.facts[name]) for name in ("odd", "huge"))
    assert len([name for name in found.facts if name.startswith("capture:")]) == 200
    assert found.marks[0].name.startswith("mmm") and len(found.marks[0].error) < 1_000
    assert consensus.largest < 2 * PAGE_BYTES + PAGE_ENTRY_BYTES


def test_cutting_a_report_of_many_marks_does_not_hold_the_loop_up() -> None:
    pager, all_marks = Pager(), marks(10_000)
    pager.split(StatusReport("node", 1, tuple(all_marks), {}))
    fastest_s = 1.0
    for turn in range(5):
        for n in range(100):
            all_marks[n] = StageStatus(all_marks[n].name, turn, 9)
        started_s = time.thread_time()
        pager.split(StatusReport("node", 2, tuple(all_marks), {}))
        fastest_s = min(fastest_s, time.thread_time() - started_s)
    assert fastest_s < 0.04 * slowness()


class Action(NamedTuple):
    """One publish: the number of statuses, their size, and the fate of its writes."""

    marks: int
    size: int
    facts: int
    fate: str


@given(
    st.lists(
        st.builds(
            Action,
            st.integers(0, 400),
            st.sampled_from([1, 100, 600]),
            st.integers(0, 8),
            st.sampled_from(["", "", "", "before", "after", "restart"]),
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_published_last_is_what_is_read(actions: list[Action]) -> None:
    async def body() -> None:
        consensus = Lossy(SystemClock())
        board, reader = StatusBoard(consensus, Rand(1)), StatusBoard(consensus, Rand(2))
        for at_ms, action in enumerate(actions):
            shown = tuple(StageStatus(f"m{n}", at_ms, 1, reason="r" * action.size) for n in range(action.marks))
            facts = {f"f{n}": "x" * 20_000 for n in range(action.facts)}
            if action.fate == "restart":
                board = StatusBoard(consensus, Rand(at_ms))
            elif action.fate:
                consensus.fates = [action.fate] * 3
            await board.publish(StatusReport("p", at_ms, shown, facts))
            consensus.fates = []
            (found,) = await reader.reports()
            assert found.at_ms == at_ms and set(found.marks) == set(shown) and found.facts == facts

    run(body())
