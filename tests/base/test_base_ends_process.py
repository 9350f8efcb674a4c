"""Errors that mean "stop" leave every loop that retries."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.errors import ClusterReplacedError, StoreRolledBackError, TidemillError
from tidemill.base.runtime.tasks import run_unit, run_unit_thread
from tidemill.base.status.status import StatusTracker
from tidemill.consensus.client_base import run_supervised

ENDS = [
    StoreRolledBackError("Consensus returned to an earlier state."),
    ClusterReplacedError("The bucket belongs to another cluster."),
]


@pytest.mark.parametrize("error", ENDS)
def test_f519_no_supervisor_retries_an_error_that_ends_the_process_and_its_mark_tells_it(error: TidemillError) -> None:
    tracker, clock, tries = StatusTracker(), SystemClock(), 0

    async def body() -> None:
        nonlocal tries
        tries += 1
        raise error

    def in_thread() -> None:
        nonlocal tries
        tries += 1
        raise error

    async def scenario() -> None:
        with pytest.raises(type(error)):
            await run_unit("unit", body, tracker=tracker, clock=clock)
        with pytest.raises(type(error)):
            await run_supervised("loop", body, lambda _: None)

    asyncio.run(asyncio.wait_for(scenario(), 5))
    failure = tracker.failure("unit")
    assert failure is not None
    assert failure.error == error.message
    with pytest.raises(type(error)):
        run_unit_thread("thread", in_thread, tracker=tracker, clock=clock, ending=threading.Event())
    assert tries == 3
