"""A test that is a coroutine function is awaited: it runs to its end, and can fail there."""

from __future__ import annotations

import asyncio

import pytest

from support.waiting import SCENARIO_S


@pytest.fixture
def given() -> str:
    return "given"


@pytest.mark.parametrize("number", [1, 2])
async def test_it_gets_its_fixtures_and_parameters_on_a_loop_of_its_own(given: str, number: int) -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert given == "given" and number in (1, 2)


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="it has to fail")
async def test_it_fails_after_it_has_waited() -> None:
    await asyncio.sleep(0)
    assert 1 / 0


@pytest.mark.xfail(strict=True, raises=TimeoutError, reason="it has to fail")
async def test_it_ends_after_the_time_of_a_scenario() -> None:
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    loop.time = lambda: now_s + 2 * SCENARIO_S  # type: ignore[method-assign]
    await asyncio.Event().wait()
