"""LSNs, tasks and the portal."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.clock import ManualClock, Rand, SystemClock, _parse_test_clock
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.lsn import ChangePosition, Lsn
from tidemill.base.runtime.tasks import Tasks


@given(st.integers(0, 2**64 - 1))
def test_an_lsn_reads_back_what_it_prints(value: int) -> None:
    assert Lsn.parse(str(Lsn(value))) == Lsn(value)


@pytest.mark.parametrize("text", ["", "0", "0/", "x/y", "1/2/3"])
def test_text_that_is_no_lsn_is_refused_with_the_text_and_an_example(text: str) -> None:
    with pytest.raises(InvalidError, match="0/16B3748") as caught:
        Lsn.parse(text)
    assert repr(text) in str(caught.value)


def test_positions_of_changes_order_by_commit_and_then_by_ordinal() -> None:
    assert ChangePosition(5, 9) < ChangePosition(6, 0) < ChangePosition(6, 1)


def test_one_seed_gives_one_sequence_of_ids() -> None:
    def draw(rand: Rand) -> list[object]:
        return [rand.nonce(), rand.uuid(), rand.below(100), rand.uniform(0, 1)]

    assert draw(Rand(7)) == draw(Rand(7)) != draw(Rand(8))


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(1_000)
    clock.advance(500)
    assert (clock.now_ms(), clock.monotonic_s()) == (1_500, 1.5)
    clock.jump(-1_000)
    clock.suspend(2_000)
    assert (clock.now_ms(), clock.monotonic_s(), clock.boot_s()) == (2_500, 1.5, 3.5)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
def test_the_boot_clock_counts_the_time_of_suspends() -> None:
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= SystemClock().boot_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_an_error_says_what_is_wrong_and_then_what_to_do() -> None:
    assert str(InvalidError("bad port: port=x.", fix="Use a number.")) == "bad port: port=x. Use a number."
    assert issubclass(UnavailableError, TidemillError)


def test_closing_a_task_group_ends_what_runs_and_a_failure_does_not_end_its_siblings() -> None:
    async def scenario() -> list[str]:
        heard: list[str] = []

        async def fail() -> None:
            raise UnavailableError("away")

        async with Tasks(lambda name, error: heard.append(f"{name}: {error}")) as tasks:
            sibling = tasks.spawn(asyncio.sleep(3600), name="sibling")
            failing = tasks.spawn(fail(), name="failing")
            await asyncio.wait([failing])
            assert not sibling.done()
        assert sibling.cancelled()
        return heard

    assert asyncio.run(scenario()) == ["failing: away"]


def test_a_process_of_a_test_may_be_started_so_long_ago() -> None:
    moved = _parse_test_clock("-3600000")
    assert moved is not None and _parse_test_clock("") is None
    assert abs(SystemClock().now_ms() - moved.now_ms() - 3_600_000) < 60_000
