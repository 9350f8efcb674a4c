"""Wake-ups: hints that a log has grown; immediate within this client, by NOTIFY from others, and by polling.

NOTIFY inside a commit takes a lock that serialises the commits of the whole server (measured 2-10 times slower), so one
task announces the growth at most every few milliseconds, in transactions that write nothing. A lost notification costs
one poll interval. Any role that may connect to the database may notify: an unreadable payload is ignored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import LogHead
from tidemill.consensus.client_base import run_supervised
from tidemill.consensus.postgres import connections

NOTIFY_INTERVAL_S = 0.005
POLL_INTERVAL_S = 0.5
PAYLOAD_CHARS = 3_000
"""Limit in characters: PostgreSQL accepts payloads below 8,000 bytes, and JSON escapes may lengthen a name."""

log = structlog.get_logger()

Heads = Callable[[list[str]], Awaitable[dict[str, LogHead]]]

_decode = msgspec.json.Decoder(list[tuple[str, int]]).decode


class LogWakeups:
    """Waiters for the growth of logs. `notify` sends payloads; `heads` reads the heads of logs; both may raise
    TidemillError.

    The callback `report` receives the error of a loop that restarted.
    """

    def __init__(
        self,
        url: str,
        rand: Rand,
        notify: Callable[[list[str]], Awaitable[None]],
        heads: Heads,
        report: Callable[[str], None],
    ) -> None:
        self._url = url
        self._rand = rand
        self._notify = notify
        self._heads = heads
        self._report = report
        self._waiters: dict[str, set[tuple[int, asyncio.Future[bool]]]] = {}
        self._grown: dict[str, int] = {}
        self._has_grown = asyncio.Event()

    def start(self, tasks: Tasks) -> None:
        for name, body in (("tell", self._send_notifications), ("listen", self._listen), ("poll", self._poll)):
            tasks.spawn(
                run_supervised(f"consensus-postgres-{name}", body, self._report), name=f"consensus-postgres-{name}"
            )

    async def wait(self, name: str, beyond: int, timeout_s: float) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (beyond, future)
        # Registered before the read, so that growth in between wakes it.
        self._waiters.setdefault(name, set()).add(entry)
        try:
            async with asyncio.timeout(timeout_s):
                head = (await self._heads([name])).get(name)
                if future.done() or (head is not None and head.next > beyond):
                    return future.result() if future.done() else True
                return await future
        except TimeoutError:
            return False
        finally:
            if not future.cancel() and not future.cancelled():
                # If the future has an error, it is the one being raised from the read.
                future.exception()
            waiting = self._waiters.get(name, set())
            waiting.discard(entry)
            if not waiting:
                self._waiters.pop(name, None)

    def announce_growth(self, name: str, next_position: int) -> None:
        """Announce an acknowledged append of this client: wake local waiters now, notify other clients soon."""
        self._wake_waiters(name, next_position)
        self._grown[name] = max(next_position, self._grown.get(name, 0))
        self._has_grown.set()

    def fail_all(self, error: Exception) -> None:
        for waiting in self._waiters.values():
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)

    def _wake_waiters(self, name: str, next_position: int) -> None:
        for beyond, future in self._waiters.get(name, ()):
            if next_position > beyond and not future.done():
                future.set_result(True)

    async def _send_notifications(self) -> None:
        while True:
            await self._has_grown.wait()
            self._has_grown.clear()
            grown, self._grown = self._grown, {}
            try:
                await self._notify(_payloads(grown))
            except TidemillError as error:
                # Other clients poll.
                log.debug("wake-ups not sent", error=str(error))
            await asyncio.sleep(NOTIFY_INTERVAL_S)

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_once()
            except Exception as error:
                # Any error, also one that the driver raises about a payload: reconnect, and rely on polling until then.
                log.info("reconnecting to listen for wake-ups", reason=str(error))
            await asyncio.sleep(self._rand.uniform(0.5, 1.0) * connections.BACKOFF_MOST_S)

    async def _listen_once(self) -> None:
        """Listen until the connection ends."""
        connection = await connections.connect(self._url)
        try:
            await connection.execute("LISTEN tidemill")
            await self._poll_once()
            async for notification in connection.notifies():
                self._handle_notification(notification.payload)
        finally:
            await connection.close()

    def _handle_notification(self, payload: str) -> None:
        """Wake waiters. Positions are a hint: a forged one costs its waiters a read, an unreadable payload costs
        nothing.
        """
        try:
            grown = _decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            log.debug("an unreadable notification was ignored", reason=str(error), payload=payload[:80])
            return
        for name, next_position in grown:
            self._wake_waiters(name, next_position)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._rand.uniform(0.8, 1.2) * POLL_INTERVAL_S)
            await self._poll_once()

    async def _poll_once(self) -> None:
        if not self._waiters:
            return
        try:
            found = await self._heads(list(self._waiters))
        except TidemillError as error:
            log.debug("poll for wake-ups failed", error=str(error))
            return
        for name, head in found.items():
            self._wake_waiters(name, head.next)


def _payloads(grown: dict[str, int]) -> list[str]:
    """Encode as JSON lists of [log, next], each short enough for one notification."""
    payloads: list[str] = []
    batch: list[tuple[str, int]] = []
    chars = 0
    for name, next_position in grown.items():
        size = len(json.dumps(name)) + 24
        if batch and chars + size > PAYLOAD_CHARS:
            payloads.append(json.dumps(batch))
            batch, chars = [], 0
        batch.append((name, next_position))
        chars += size
    if batch:
        payloads.append(json.dumps(batch))
    return payloads
