"""Calls that cannot be cancelled: no work of the loop, no end of a loop and no end of a process waits for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.waiting import DEADLINE_S, run
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.daemon_threads import call_in_daemon_thread, resolve_names_in_daemon_threads

MORE_THAN_AN_EXECUTOR_HAS = 40
"""asyncio's has at most 32 threads."""


def resolving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "getaddrinfo"]


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No name but `known` is resolved until the event is set, at the latest at the end of the test."""
    ending = threading.Event()

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host != "known":
            ending.wait()
            raise socket.gaierror("the test has ended")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield ending
    ending.set()
    for thread in resolving_threads():
        thread.join()


def test_names_without_an_answer_delay_neither_other_names_nor_other_work_nor_the_end_of_a_loop(
    unresolved: threading.Event,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        resolve_names_in_daemon_threads(loop)
        waiting = [asyncio.create_task(loop.getaddrinfo(f"unknown{n}", 1)) for n in range(MORE_THAN_AN_EXECUTOR_HAS)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(DEADLINE_S):
                found = await loop.getaddrinfo("known", 7, type=socket.SOCK_STREAM)
                assert await asyncio.to_thread(lambda: "done") == "done"
        except TimeoutError:
            unresolved.set()  # so that the loop ends, and the test fails
            raise
        assert found[0][4] == ("127.0.0.1", 7)
        assert not any(task.done() for task in waiting)

    run(scenario())
    threads = resolving_threads()
    assert len(threads) == MORE_THAN_AN_EXECUTOR_HAS
    assert all(thread.daemon for thread in threads), "the end of the interpreter joins the others"


def test_equal_questions_share_a_thread_also_after_their_callers_gave_up(
    unresolved: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        resolve_names_in_daemon_threads(loop)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.getaddrinfo("unknown", 1), 0.01)
        assert len(resolving_threads()) == 1
        other = asyncio.create_task(loop.getaddrinfo("unknown", 2))
        await asyncio.sleep(0)
        assert len(resolving_threads()) == 2, "another question"
        unresolved.set()
        with pytest.raises(socket.gaierror):
            await loop.getaddrinfo("unknown", 1)
        with pytest.raises(socket.gaierror):
            await other
        assert (await loop.getaddrinfo("known", 7))[0][4] == ("127.0.0.1", 7)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ["moved"])
        assert await loop.getaddrinfo("known", 7) == ["moved"], "an answer is not stored"

    run(scenario())


@pytest.mark.usefixtures("unresolved")
def test_a_portal_resolves_names_in_daemon_threads() -> None:
    async def resolve() -> None:
        await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo("unknown", 1), 0.01)

    with BlockingPortal() as portal, pytest.raises(TimeoutError):
        portal.call(resolve())
    assert [thread.daemon for thread in resolving_threads()] == [True]


def test_the_caller_gets_the_error_and_a_cancelled_caller_leaves_the_thread_without_a_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    released, ended = threading.Event(), threading.Event()

    def work() -> str:
        released.wait()
        ended.set()
        return "late"

    async def scenario() -> None:
        with pytest.raises(ZeroDivisionError):
            await call_in_daemon_thread(lambda: 1 // 0, "failing")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call_in_daemon_thread(work, "left"), 0.01)

    run(scenario())
    (left,) = [thread for thread in threading.enumerate() if thread.name == "left"]
    released.set()
    left.join()
    assert ended.is_set() and capsys.readouterr().err == ""
