"""The control connection of a session: one query at a time, and a record of the queries without an answer.

Every query is recorded while it is open (`OpenQueries`). A query without an answer is reported, with its server, long
before its deadline. A query that exceeds ANSWER_DEADLINE_S fails, and the session ends.

The control connection also holds the advisory lock of the capture. If it breaks, the session must end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.timeline import Timeline, identify_timeline

ANSWER_DEADLINE_S = 10.0
"""Queries on this connection take milliseconds, or a second on a busy server."""
OVERDUE_AFTER_MS = 2_000
"""An open query of this age is reported as the blocker of the capture."""

T = TypeVar("T")


class NoAnswerError(UnavailableError):
    """A query exceeded its deadline. The session ends."""


class OpenQueries:
    """Open queries, each with the time when it was sent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, float] = {}

    @contextmanager
    def track(self, what: str) -> Iterator[None]:
        """Record a query while it is open. A query that exceeded its deadline stays open until its session ends.
        Otherwise its status would recover for a moment, and its age would start again at zero.
        """
        self._open[what] = self._clock.monotonic_s()
        try:
            yield
        except NoAnswerError:
            raise
        except BaseException:
            self._open.pop(what, None)
            raise
        self._open.pop(what, None)

    def set_open(self, what: str, asked: bool) -> None:
        """Record `what` as open from the first call with `asked` until the first call without."""
        if asked:
            self._open.setdefault(what, self._clock.monotonic_s())
        else:
            self._open.pop(what, None)

    def oldest_overdue(self) -> tuple[str, int] | None:
        """Return the oldest open query above OVERDUE_AFTER_MS: (query, ms since the epoch when it was sent). Jumps of
        the wall clock do not change its age.
        """
        if not self._open:
            return None
        what = min(self._open, key=lambda each: self._open[each])
        age_ms = int((self._clock.monotonic_s() - self._open[what]) * 1000)
        return (what, self._clock.now_ms() - age_ms) if age_ms > OVERDUE_AFTER_MS else None


class ControlConnection:
    """Connection that runs one query at a time."""

    def __init__(self, wire: PgConnection, answers: OpenQueries) -> None:
        self._wire = wire
        self._answers = answers
        self._lock = asyncio.Lock()

    async def run(self, question: Callable[[PgConnection], Awaitable[T]]) -> T:
        """Run one query. Raises NoAnswerError after the deadline. The connection is unusable then."""
        async with self._lock:
            return await run_tracked(self._wire, self._answers, "a query", question)

    async def aclose(self) -> None:
        await self._wire.aclose()


async def run_tracked(
    wire: PgConnection, answers: OpenQueries, what: str, question: Callable[[PgConnection], Awaitable[T]]
) -> T:
    """Run `question`, recorded as `what`. Raises NoAnswerError after ANSWER_DEADLINE_S."""
    with answers.track(what):
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                return await question(wire)
        except TimeoutError as error:
            raise no_answer_error(wire.target, what, ANSWER_DEADLINE_S) from error


def no_answer_error(target: str, what: str, waited_s: float) -> NoAnswerError:
    return NoAnswerError(
        f"PostgreSQL does not answer: {target} waits_for={what!r} waited_s={waited_s:.0f}.",
        fix="Check whether the server is stopped or overloaded, or the network drops packets.",
    )


async def identify_server(connect: Callable[[], Awaitable[PgConnection]], answers: OpenQueries) -> Timeline:
    """Return the timeline of the server behind a replication connection. Raises NoAnswerError."""
    wire = await connect()
    try:
        return await run_tracked(wire, answers, "its timeline", identify_timeline)
    finally:
        await wire.aclose()


async def check_same_server(wire: PgConnection, answers: OpenQueries, line: Timeline) -> None:
    """Check that a connection leads to the server whose history was compared. Raises UnavailableError if it does
    not."""
    now = await run_tracked(wire, answers, "its timeline", identify_timeline)
    if (now.system_id, now.history) != (line.system_id, line.history):
        raise UnavailableError(f"the DSN now leads to another server: {wire.target} timeline={now.number}.")
