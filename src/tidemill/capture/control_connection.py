"""The control connection of a session and those who share it: heartbeat, slot watch, table watch; and the watch
over PostgreSQL's answers, because a connection that swallows packets looks exactly like an idle one.

    Q1  Every question to PostgreSQL is known while it is open (`Answers`), so that one without an answer is told with
        server and question long before it is given up.
    Q2  A question on the control connection is given up after ANSWER_DEADLINE_S, and the session with it.
    Q3  A stream that is silent is asked for a keepalive; one that stays silent ends the session. Only while somebody
        waits for it: a reader that is held back by the collector hears nothing either.
    Q4  A walsender that works through a transaction of which nothing is published is silent, too. For as long as the
        session has patience it is told as what it is, not as one that does not answer.

The control connection also carries the capture's advisory lock, so when it breaks, the session must end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import Unavailable
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.timeline import Timeline, identify
from tidemill.capture.setup.blockers import Holder, blockers, pinning
from tidemill.capture.setup.server_checks import SlotState, check_slot, heartbeat, slot_state
from tidemill.capture.snapshot.slot_retention import PIN_BYTES

log = structlog.get_logger()

SLOT_POLL_S = 1.0
SLOT_POLL_IDLE_S = 4.0
"""Without commits the slot is looked at less often; a server that is gone is still told well within its budget."""
ANSWER_DEADLINE_S = 10.0
"""The questions asked here take milliseconds; a busy server may take a second."""
TELL_AFTER_MS = 2_000
"""An open question this old is told as what the capture waits for."""
ASK_AFTER_S = 2.0
"""A stream silent for this long is asked for a keepalive: two packets, no work for the server. Only where none comes is
the walsender looked at, still well within the freshness budget: one at work is seen before the capture is stuck."""
SILENCE_S = 20.0
SILENCE_OF_TIMEOUT = 0.75
"""A walsender that skips a large transaction looks at its input only after half of wal_sender_timeout; without one it
does not look at all, and its silence is told but ends nothing."""
RECONNECT_S = 3.0
BLOCKER_POLL_S = 0.3
BLOCKER_REMEMBERED_S = 3.0
"""The set-up asks for a table's lock for a second and lets writers pass for another: who blocks it is seen in turns."""

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


async def watch_set_up(
    connect: Callable[[], Awaitable[Wire]], answers: Answers, capture: str, on_blockers: Callable[[list[Holder]], None]
) -> None:
    """While a capture is set up and first copied: name whom it waits for, from a connection of its own. The statements
    of the set-up have no deadline, for they may wait for writers; that the server is there at all is seen here.

    A server without a connection to spare is no reason to end the set-up: it is asked again."""
    while True:
        try:
            wire = await connect()
            break
        except Unavailable as error:
            log.warning("nobody watches the set-up", cause=str(error))
            await asyncio.sleep(RECONNECT_S)
    try:
        while True:
            on_blockers(await answered(wire, answers, "who blocks the set-up", lambda w: blockers(w, capture)))
            await asyncio.sleep(BLOCKER_POLL_S)
    finally:
        await wire.aclose()


async def keep_beating(control: Control, config: CaptureConfig, last_commit_lsn: Callable[[], int]) -> None:
    """One heartbeat at the start, so that the snapshot's LSN is crossed; then one whenever no commit came for
    heartbeat_s."""
    await control.ask(heartbeat)
    while True:
        before = last_commit_lsn()
        await asyncio.sleep(config.heartbeat_s)
        if last_commit_lsn() == before:
            await control.ask(heartbeat)


async def watch_slot(
    control: Control,
    config: CaptureConfig,
    on_state: Callable[[SlotState, Holder | None], None],
    idle: Callable[[], bool],
) -> None:
    """The server's side of the story: retained WAL and who pins it, WAL end. Raises SlotLost as soon as it is."""
    while True:
        state = check_slot(config, await control.ask(lambda wire: slot_state(wire, config.slot)))
        pinned = state.pinned_bytes > PIN_BYTES
        on_state(state, await control.ask(pinning) if pinned else None)
        await asyncio.sleep(SLOT_POLL_IDLE_S if idle() else SLOT_POLL_S)


class StreamWatch:
    """When the stream was last heard while somebody waited for it (Q3). `ask()` requests a keepalive, `busy()` looks
    for a walsender at work, and `tell` has the one that was seen (None: it spoke, or is at work no more)."""

    def __init__(
        self,
        target: str,
        clock: Clock,
        answers: Answers,
        ask: Callable[[], None],
        wal_sender_timeout_ms: int,
        *,
        busy: Callable[[], Awaitable[Holder | None]],
        tell: Callable[[Holder | None], None],
    ) -> None:
        self._target = target
        self._clock = clock
        self._answers = answers
        self._ask = ask
        self._busy = busy
        self._tell = tell
        self._told: Holder | None = None
        self._patience_s = max(SILENCE_S, wal_sender_timeout_ms / 1000 * SILENCE_OF_TIMEOUT)
        self._deadline_s = self._patience_s if wal_sender_timeout_ms > 0 else float("inf")
        self._waiting_since_s: float | None = None
        self._asked_since_s: float | None = None
        """Begin of the wait in which a keepalive was asked for last."""

    def waiting(self) -> None:
        """The reader begins to wait for the next bytes."""
        self._waiting_since_s = self._clock.monotonic_s()

    def heard(self) -> None:
        self._waiting_since_s = None
        self._answers.note("a keepalive of the stream", False)
        self._seen(None)

    async def run(self) -> None:
        """For ever. Raises Unavailable when the stream stays silent."""
        while True:
            await asyncio.sleep(ASK_AFTER_S / 2)
            since_s = self._waiting_since_s
            if since_s is None:
                continue
            silent_s = self._clock.monotonic_s() - since_s
            if silent_s > self._deadline_s:
                raise no_answer(self._target, "a keepalive of the stream", silent_s)
            if silent_s > ASK_AFTER_S and self._asked_since_s != since_s:
                self._asked_since_s = since_s
                self._ask()
            elif silent_s > ASK_AFTER_S:
                busy = await self._busy() if silent_s <= self._patience_s else None
                if self._waiting_since_s != since_s:
                    continue  # it was heard meanwhile
                self._seen(busy)
                self._answers.note("a keepalive of the stream", busy is None)
                self._ask()

    def _seen(self, busy: Holder | None) -> None:
        if busy is not None or self._told is not None:
            self._told = busy
            self._tell(busy)
