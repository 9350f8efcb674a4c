"""The blocking portal to the event loop: results, errors, and a shutdown that leaves no caller waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from tidemill.base.errors import ClosedError, InvalidError
from tidemill.base.runtime import blocking_portal as portal_module
from tidemill.base.runtime.blocking_portal import BlockingPortal


def test_the_portal_returns_results_and_raises_errors_of_its_loop() -> None:
    async def fail() -> None:
        raise InvalidError("no.")

    with BlockingPortal() as portal:
        assert portal.call(asyncio.sleep(0, "result")) == "result"
        with pytest.raises(InvalidError, match="no"):
            portal.call(fail())


def waiting_in(portal: BlockingPortal, began: threading.Event, coroutine: object) -> tuple[threading.Thread, list[str]]:
    reported: list[str] = []

    def work() -> None:
        try:
            portal.call(coroutine)  # type: ignore[arg-type]
        except CancelledError:
            reported.append("cancelled")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert began.wait(30)
    return thread, reported


def test_closing_ends_who_waits_in_a_call_and_lets_the_task_clean_up() -> None:
    began, cleaned = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    portal = BlockingPortal()
    thread, reported = waiting_in(portal, began, forever())
    portal.close()
    thread.join(30)
    assert not thread.is_alive() and reported == ["cancelled"] and cleaned.is_set()


def test_a_task_that_does_not_end_holds_nobody_up_when_the_portal_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portal_module, "CLOSE_TIMEOUT_S", 0.1)
    began = threading.Event()

    async def stubborn() -> None:
        began.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    portal = BlockingPortal()
    thread, reported = waiting_in(portal, began, stubborn())
    portal.close()
    thread.join(30)
    assert not thread.is_alive() and reported == ["cancelled"]


def test_a_portal_that_was_closed_refuses_calls() -> None:
    portal = BlockingPortal()
    portal.close()
    portal.close()
    with pytest.raises(ClosedError):
        portal.call(asyncio.sleep(0))
