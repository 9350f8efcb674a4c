"""Watches of a session over its server: blockers of the set-up, the heartbeat, the slot, and a silent stream.

A connection that drops packets looks like an idle one, so silence has to be tested.

A silent stream is sent a request for a keepalive. If it stays silent, the session ends. Time counts only while the
reader waits for the stream, because under back-pressure of the collector the reader receives nothing either.

A walsender that decodes a transaction without published changes is silent, too. It is reported as busy until the
session's patience ends, not as a server that does not answer.

Of the slot: how much WAL it retains, how fast that grows, and when PostgreSQL would remove it.

    retained     WAL since the slot's restart position
    headroom     until max_slot_wal_keep_size invalidates it; None = unlimited, and the disk is the limit
    grows        over the last WINDOW_S at least: a checkpoint moves the restart position in steps
    full in      headroom / growth, while it grows

The restart position is not the confirmed one. Decoding restarts with the oldest transaction that was open, so a
transaction that stays open retains all WAL since it began, however fast the capture confirms. The session that has it
open is queried only once PIN_BYTES are between the two positions.
https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection, OpenQueries, no_answer_error, run_tracked
from tidemill.capture.setup.blockers import Blocker, find_blockers, find_oldest_transaction
from tidemill.capture.setup.server_checks import SlotState, check_slot, emit_heartbeat, read_slot_state

log = structlog.get_logger()

SLOT_POLL_S = 1.0
SLOT_POLL_IDLE_S = 4.0
"""The slot is polled less often without commits. A missing server is still reported within the freshness budget."""
ASK_AFTER_S = 2.0
"""A stream that is silent for this long is sent a request for a keepalive, which costs two packets. Without a keepalive
the walsender is checked. A busy walsender is recognized before the capture counts as stuck."""
SILENCE_S = 20.0
SILENCE_OF_TIMEOUT = 0.75
"""A walsender that skips a large transaction reads its input only after half of wal_sender_timeout. Without a timeout
it never does, so its silence is reported but does not end the session."""
RECONNECT_S = 3.0
BLOCKER_POLL_S = 0.3
BLOCKER_REMEMBERED_S = 3.0
"""The set-up waits for the lock of a table for one second, then lets writers proceed for another. So its blocker is
visible half of the time."""
WINDOW_S = 60.0
PIN_BYTES = 64 << 20
"""Four segments: a smaller distance can be that of two checkpoints."""


class WaitReport:
    """Report of what a session waits for, with `on_phase(reason, held_by)`. `server`: the stage of its server."""

    def __init__(self, clock: Clock, server: str, on_phase: Callable[[str, str], None]) -> None:
        self._clock = clock
        self._server = server
        self._on_phase = on_phase
        self._blocked_s = float("-inf")
        self._doing = ""
        self.seen_at_work = 0
        """Number of times a silent walsender was found busy. It counts as progress of the capture's stage."""

    def report_wait(self, reason: str, holder: Blocker | None) -> None:
        self._on_phase(f"{reason}: {holder}" if holder is not None else reason, holder.name if holder else self._server)

    def record_blockers(self, found: Sequence[Blocker]) -> None:
        now_s = self._clock.monotonic_s()
        if found:
            self._blocked_s = now_s
            self.report_wait("the set-up waits for another session", found[0])
        elif now_s - self._blocked_s > BLOCKER_REMEMBERED_S:
            self._on_phase(self._doing, "")

    def report_step(self, doing: str) -> None:
        """Report what the set-up does, unless it waits for another session."""
        self._doing = doing
        self._on_phase(doing, "")

    def record_walsender(self, at_work: Blocker | None) -> None:
        if at_work is None:
            self._on_phase("", "")
            return
        self.seen_at_work += 1
        self.report_wait("the walsender works through WAL and has sent nothing for a while", at_work)


async def watch_blockers(
    connect: Callable[[], Awaitable[PgConnection]],
    answers: OpenQueries,
    capture: str,
    on_blockers: Callable[[list[Blocker]], None],
) -> None:
    """Report the blockers of the set-up and of the first copy, on a separate connection. Statements of the set-up may
    wait for writers and have no deadline; this query detects a server that does not answer.

    A server without a free connection does not end the set-up: the connection is retried."""
    while True:
        try:
            wire = await connect()
            break
        except UnavailableError as error:
            log.warning("the blockers of the set-up are not watched", cause=str(error))
            await asyncio.sleep(RECONNECT_S)
    try:
        while True:
            on_blockers(
                await run_tracked(wire, answers, "the blockers of the set-up", lambda w: find_blockers(w, capture))
            )
            await asyncio.sleep(BLOCKER_POLL_S)
    finally:
        await wire.aclose()


async def send_heartbeats(
    control: ControlConnection, config: CaptureConfig, last_commit_lsn: Callable[[], int]
) -> None:
    """Send one heartbeat at the start, so that the stream crosses the snapshot's LSN, and then one whenever no commit
    has arrived for heartbeat_s.
    """
    await control.run(emit_heartbeat)
    while True:
        before = last_commit_lsn()
        await asyncio.sleep(config.heartbeat_s)
        if last_commit_lsn() == before:
            await control.run(emit_heartbeat)


async def watch_slot(
    control: ControlConnection,
    config: CaptureConfig,
    on_state: Callable[[SlotState, Blocker | None], None],
    idle: Callable[[], bool],
) -> None:
    """Report the slot periodically: retained WAL, the session that pins it, WAL end. Raises SlotLostError as soon as
    the slot is lost.
    """
    while True:
        state = check_slot(config, await control.run(lambda wire: read_slot_state(wire, config.slot)))
        pinned = state.pinned_bytes > PIN_BYTES
        on_state(state, await control.run(find_oldest_transaction) if pinned else None)
        await asyncio.sleep(SLOT_POLL_IDLE_S if idle() else SLOT_POLL_S)


class WalRetention:
    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()
        self._headroom: int | None = None

    def record(self, now_s: float, retained_bytes: int, headroom_bytes: int | None) -> None:
        """Note what the server reported at `now_s`, of a monotonic clock."""
        self._seen.append((now_s, retained_bytes))
        self._headroom = headroom_bytes
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()

    @property
    def grows_bytes_per_s(self) -> float:
        """Growth in bytes per second; 0 while it does not grow, or is not known yet."""
        if not self._seen:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < self._window_s / 2:
            return 0.0
        return max(0.0, (last - first) / (last_s - first_s))

    @property
    def full_in_s(self) -> int | None:
        """Seconds until the headroom is used up at the present growth; None = no limit, or no growth."""
        growth = self.grows_bytes_per_s
        return int(max(0, self._headroom) / growth) if self._headroom is not None and growth > 0 else None


class SlotReport:
    """Newest state of the slot, and what retains its WAL. `pinned_by`: the session whose open transaction retains
    confirmed WAL; None while that WAL is small.
    """

    def __init__(self) -> None:
        self.state: SlotState | None = None
        self.retained = WalRetention()
        self.pinned_by: Blocker | None = None

    def record(self, now_s: float, state: SlotState, pinned_by: Blocker | None) -> None:
        self.state = state
        self.retained.record(now_s, state.retained_bytes, state.headroom_bytes)
        if pinned_by is not None and (self.pinned_by is None or self.pinned_by.name != pinned_by.name):
            log.warning("an open transaction retains WAL", bytes=state.pinned_bytes, held_by=str(pinned_by))
        self.pinned_by = pinned_by

    def facts(self) -> dict[str, object]:
        state = self.state
        if state is None:
            return {}
        return {
            "slot_retained_bytes": state.retained_bytes,
            "slot_headroom_bytes": state.headroom_bytes,
            "slot_wal_status": state.wal_status,
            "slot_grows_bytes_per_s": round(self.retained.grows_bytes_per_s),
            "slot_full_in_s": self.retained.full_in_s,
            "slot_pinned_bytes": state.pinned_bytes,
            "slot_pinned_by": str(self.pinned_by or ""),
        }


class StreamWatch:
    """Detector of a silent stream while the reader waits for it. `ask()` requests a keepalive. `busy()` looks for a
    walsender at work. `tell` receives that walsender (None: it spoke, or is no longer at work).
    """

    def __init__(
        self,
        target: str,
        clock: Clock,
        answers: OpenQueries,
        ask: Callable[[], None],
        wal_sender_timeout_ms: int,
        *,
        busy: Callable[[], Awaitable[Blocker | None]],
        tell: Callable[[Blocker | None], None],
    ) -> None:
        self._target = target
        self._clock = clock
        self._answers = answers
        self._ask = ask
        self._busy = busy
        self._tell = tell
        self._reported: Blocker | None = None
        self._patience_s = max(SILENCE_S, wal_sender_timeout_ms / 1000 * SILENCE_OF_TIMEOUT)
        self._deadline_s = self._patience_s if wal_sender_timeout_ms > 0 else float("inf")
        self._waiting_since_s: float | None = None
        self._asked_since_s: float | None = None
        """Start of the wait during which a keepalive was last requested."""

    def record_wait(self) -> None:
        """Note that the reader begins to wait for the next bytes."""
        self._waiting_since_s = self._clock.monotonic_s()

    def record_message(self) -> None:
        self._waiting_since_s = None
        self._answers.set_open("a keepalive of the stream", False)
        self._report_busy(None)

    async def run(self) -> None:
        """Run until cancelled. Raises UnavailableError when the stream stays silent."""
        while True:
            await asyncio.sleep(ASK_AFTER_S / 2)
            since_s = self._waiting_since_s
            if since_s is None:
                continue
            silent_s = self._clock.monotonic_s() - since_s
            if silent_s > self._deadline_s:
                raise no_answer_error(self._target, "a keepalive of the stream", silent_s)
            if silent_s > ASK_AFTER_S and self._asked_since_s != since_s:
                self._asked_since_s = since_s
                self._ask()
            elif silent_s > ASK_AFTER_S:
                busy = await self._busy() if silent_s <= self._patience_s else None
                if self._waiting_since_s != since_s:
                    continue  # the stream was heard in the meantime
                self._report_busy(busy)
                self._answers.set_open("a keepalive of the stream", busy is None)
                self._ask()

    def _report_busy(self, busy: Blocker | None) -> None:
        if busy is not None or self._reported is not None:
            self._reported = busy
            self._tell(busy)
