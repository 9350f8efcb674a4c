"""The end of a session leaves none of its connections open, after any interruption."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.histogram import StageHistograms
from tidemill.capture.config import CaptureConfig
from tidemill.capture.delivery.consumers import TapRegistry
from tidemill.capture.session.session import Session, SessionContext


class Closable:
    closed = False

    async def aclose(self) -> None:
        self.closed = True


class EndsSlowly(Session):
    """A session that opens two connections, then fails while one of its tasks ends slowly."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(SessionContext(
            config=CaptureConfig("shop", "postgresql://nowhere/x"), topics=nothing, catalogue=nothing, remap=nothing,
            taps=TapRegistry(SystemClock()), sinks=(), clock=SystemClock(), rand=Rand(1),
            on_phase=lambda reason, held_by: None, states=nothing, stages=StageHistograms(),
        ))  # fmt: skip
        self.stream, self.control = Closable(), Closable()
        self.ending = asyncio.Event()
        self.may_end = asyncio.Event()

    async def _set_up(self, tasks: Tasks) -> None:
        self._stream, self._control = self.stream, self.control  # type: ignore[assignment]
        tasks.spawn(self._linger(), name="lingers")
        await asyncio.sleep(0)
        raise UnavailableError("the topic moved on its own.")

    async def _linger(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()


async def test_a_session_that_is_cancelled_while_it_ends_by_itself_leaves_no_connection_open() -> None:
    """An open connection would hold the slot and the capture's lock against the next session."""
    session = EndsSlowly()
    running = asyncio.ensure_future(session.run())
    await session.ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert session.control.closed and session.stream.closed
    session.may_end.set()
