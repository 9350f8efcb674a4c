"""Synchronous use of an asynchronous context: it is entered once and exited once, also when the caller forgets it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tidemill.base.errors import ClosedError, InvalidError
from tidemill.base.runtime.blocking_portal import BlockingPortal, SyncContext
from tidemill.base.runtime.tasks import Tasks


class Door:
    def __init__(self) -> None:
        self.inside = 0
        self.left = threading.Event()

    @asynccontextmanager
    async def open(self, refuse: bool = False) -> AsyncIterator[str]:
        if refuse:
            raise InvalidError("closed today.")
        self.inside += 1
        try:
            yield "inside"
        finally:
            self.inside -= 1
            self.left.set()


def test_it_is_left_once_when_told_and_when_the_block_ends() -> None:
    with BlockingPortal() as portal:
        door = Door()
        entered = SyncContext(portal, door.open())
        assert (entered.value, door.inside) == ("inside", 1)
        entered.exit()
        entered.exit()
        assert door.inside == 0
        with SyncContext(portal, door.open()) as value:
            assert (value, door.inside) == ("inside", 1)
        assert door.inside == 0


def test_what_refuses_to_be_entered_says_so_here() -> None:
    with BlockingPortal() as portal, pytest.raises(InvalidError, match="closed today"):
        SyncContext(portal, Door().open(refuse=True))


def test_one_that_is_forgotten_is_left_by_itself() -> None:
    with BlockingPortal() as portal:
        door = Door()
        SyncContext(portal, door.open())
        gc.collect()
        assert door.left.wait(30) and door.inside == 0


def test_closing_the_portal_leaves_it_and_nothing_waits_afterwards() -> None:
    portal, door = BlockingPortal(), Door()
    entered = SyncContext(portal, door.open())
    portal.close()
    assert door.inside == 0
    entered.exit()
    with pytest.raises(ClosedError):
        SyncContext(portal, door.open())


def test_the_portals_own_thread_leaves_without_waiting_and_may_not_call() -> None:
    with BlockingPortal() as portal:
        door = Door()
        entered = SyncContext(portal, door.open())

        async def leave() -> None:
            entered.exit()
            with pytest.raises(RuntimeError, match="wait for itself"):
                portal.call(asyncio.sleep(0))

        portal.call(leave(), 30)
        assert door.left.wait(30)


def test_who_enters_while_the_portal_closes_does_not_wait_for_ever() -> None:
    portal = BlockingPortal()
    door = Door()
    spawn = Tasks.spawn

    def cut_off(self: Tasks, *arguments: Any, **options: Any) -> Any:
        task = spawn(self, *arguments, **options)
        task.cancel()  # before its first step, as a portal that closes does
        return task

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tasks, "spawn", cut_off)
        with pytest.raises(CancelledError):
            SyncContext(portal, door.open())
    portal.close()
    assert door.inside == 0
