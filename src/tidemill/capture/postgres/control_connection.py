"""The control connection of a session: one question at a time, each known while it is open.

    Q1  Every question to PostgreSQL is known while it is open (`Answers`), so that one without an answer is told with
        server and question long before it is given up.
    Q2  A question on the control connection is given up after ANSWER_DEADLINE_S, and the session with it.

The control connection also carries the capture's advisory lock, so when it breaks, the session must end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidemill.base.clock import Clock
from tidemill.base.errors import Unavailable
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.timeline import Timeline, identify

ANSWER_DEADLINE_S = 10.0
"""The questions asked here take milliseconds; a busy server may take a second."""
TELL_AFTER_MS = 2_000
"""An open question this old is told as what the capture waits for."""


T = TypeVar("T")


class NoAnswer(Unavailable):
    """A question was given up, and its session with it."""


class Answers:
    """What PostgreSQL was asked and has not answered, each with the time of the question (Q1)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, float] = {}

    @contextmanager
    def expected(self, what: str) -> Iterator[None]:
        """One that is given up stays open until its session is over, else what was told of it would heal in the moment
        between the two, and its age begin anew."""
        self._open[what] = self._clock.monotonic_s()
        try:
            yield
        except NoAnswer:
            raise
        except BaseException:
            self._open.pop(what, None)
            raise
        self._open.pop(what, None)

    def note(self, what: str, asked: bool) -> None:
        """`what` is open from the first `asked` until it is not."""
        if asked:
            self._open.setdefault(what, self._clock.monotonic_s())
        else:
            self._open.pop(what, None)

    def overdue(self) -> tuple[str, int] | None:
        """(question, ms since the epoch when it was asked) of the oldest one that is worth telling. A wall clock that
        jumps makes no question old."""
        if not self._open:
            return None
        what = min(self._open, key=lambda each: self._open[each])
        age_ms = int((self._clock.monotonic_s() - self._open[what]) * 1000)
        return (what, self._clock.now_ms() - age_ms) if age_ms > TELL_AFTER_MS else None


class Control:
    """One question at a time on one connection."""

    def __init__(self, wire: Wire, answers: Answers) -> None:
        self._wire = wire
        self._answers = answers
        self._lock = asyncio.Lock()

    async def ask(self, question: Callable[[Wire], Awaitable[T]]) -> T:
        """Raises Unavailable when no answer comes (Q2): the connection cannot be used any more."""
        async with self._lock:
            return await answered(self._wire, self._answers, "a question", question)

    async def aclose(self) -> None:
        await self._wire.aclose()


async def answered(wire: Wire, answers: Answers, what: str, question: Callable[[Wire], Awaitable[T]]) -> T:
    with answers.expected(what):
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                return await question(wire)
        except TimeoutError as error:
            raise no_answer(wire.target, what, ANSWER_DEADLINE_S) from error


def no_answer(target: str, what: str, waited_s: float) -> NoAnswer:
    return NoAnswer(
        f"PostgreSQL does not answer: {target} waits_for={what!r} waited_s={waited_s:.0f}.",
        fix="See whether the server is stopped or overloaded, or the network swallows packets.",
    )


async def identified(connect: Callable[[], Awaitable[Wire]], answers: Answers) -> Timeline:
    """Of the server that a replication connection leads to."""
    wire = await connect()
    try:
        return await answered(wire, answers, "its timeline", identify)
    finally:
        await wire.aclose()


async def check_same(wire: Wire, answers: Answers, line: Timeline) -> None:
    """A connection leads to the server whose history was compared. Raises Unavailable."""
    now = await answered(wire, answers, "its timeline", identify)
    if (now.system_id, now.history) != (line.system_id, line.history):
        raise Unavailable(f"the DSN leads to another server by now: {wire.target} timeline={now.number}.")
