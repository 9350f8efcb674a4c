"""One live shape: its log, the requests that wait for it, and how it ends.

loading ──ready()──► live ──drop()──► dropped         loading, live ──fail()──► failed

Invariant (no missed news): a waiter subscribes first and reads the log after that, so no change slips in between.
Invariant (final): after drop or fail nothing is appended, every waiter is woken, and the handle answers 409.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from tidemill.base.errors import CorruptError, TidemillError, UnavailableError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.log.chunks import Chunk
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.memory_budget import OverBudgetError

_log = structlog.get_logger()


class SharedFrames(NamedTuple):
    """Rendered frames, shared by all event streams that had read up to `after`: the items after it, up to `end`."""

    after: LogOffset
    end: LogOffset
    frames: bytes


class LiveShape:
    """One shape. `last_seen` is the newest transaction (LSN, or time in ms) whose effect on this shape is in the
    log."""

    def __init__(self, handle: str, definition: ShapeDefinition, schema_json: bytes, log: ShapeLog) -> None:
        self.handle = handle
        self.definition = definition
        self.schema_json = schema_json
        self.log = log
        self.last_seen = 0
        self.used_s = 0.0
        self.started_s = 0.0
        self.restored = False
        """The log is from an earlier run: only now can its readers return with their last offsets."""
        self.broken = False
        """True if the shape ended with an unexpected exception."""
        self.rows_loaded = 0
        self.error: TidemillError | None = None
        self.end_reason = ""
        self.shared_frames: SharedFrames | None = None
        """Frames shared by all event streams that wait for one transaction. They are woken in one turn of the event
        loop, after which the frames are released; they do not count as the shape's memory."""
        self.choose_ending: Callable[[LiveShape], LiveShape] = lambda shape: shape
        """Returns the shape that ends if there is no room for a change of the given one."""
        self._state = "loading"
        self._waiters: set[asyncio.Future[None]] = set()
        self._over = asyncio.Event()

    @property
    def state(self) -> str:
        return self._state

    @property
    def has_ended(self) -> bool:
        return self._state in ("dropped", "failed")

    @property
    def waiting_count(self) -> int:
        """Number of requests that wait for news now."""
        return len(self._waiters)

    def mark_ready(self) -> None:
        if self._state == "loading":
            self._state = "live"
            self._wake()

    def fail(self, error: TidemillError, *, broken: bool = False) -> None:
        """End the shape with `error`. Later requests and those that wait now get this error."""
        if not self.has_ended:
            self.error = error
            self.broken = broken
            self._end("failed", str(error))

    def drop(self, reason: str) -> None:
        """End the shape because its log cannot be continued; clients refetch."""
        if not self.has_ended:
            self._end("dropped", reason)

    def _end(self, state: str, reason: str) -> None:
        self._state = state
        self.end_reason = reason
        self.log.drop()
        self._over.set()
        self._wake()

    def stage(self, item: LogItem) -> None:
        """Append an item of the open transaction to the log, not yet visible. A log that exceeds its limit ends the
        shape; without room for the item, this shape or another one ends."""
        while True:
            try:
                self.log.stage(item)
                break
            except OverBudgetError as error:
                if not self.make_room(error):
                    return
        if self.log.is_overgrown:
            self.drop(f"the log outgrew its limit: log_bytes={self.log.log_bytes}")

    def append(self, items: list[LogItem], last_seen: int) -> None:
        """Append the items of whole transactions up to `last_seen` and make them visible; the last item of each
        transaction is marked already.
        """
        try:
            self.log.stage_all(items)
        except OverBudgetError:
            for item in items:
                self.stage(item)
        if self.log.is_overgrown:
            self.drop(f"the log outgrew its limit: log_bytes={self.log.log_bytes}")
        self.publish(last_seen)

    def make_room(self, error: OverBudgetError) -> bool:
        """End the shape whose log has grown most, this one or another. Return whether this one continues and may try
        again."""
        self.choose_ending(self).drop(str(error))
        return not self.has_ended

    def publish(self, last_seen: int, *, mark: bool = False) -> None:
        """Make the staged transaction visible as a whole; ignored once the shape has ended."""
        if self.has_ended:
            return
        if last_seen > self.last_seen:
            self.last_seen = last_seen
        if self.log.publish(mark=mark) and self._waiters:
            self._wake()

    async def fetch(self, after: LogOffset) -> Chunk:
        """Return the next chunk of the log (`ShapeLog.fetch`). Damaged storage ends the shape: check `has_ended`
        afterwards."""
        try:
            return await self.log.fetch(after)
        except CorruptError as error:
            _log.error("a shape's stored log is damaged", handle=self.handle, error=str(error))
            self.drop(error.message)
            return Chunk((), after, False)

    def subscribe(self) -> asyncio.Future[None]:
        """Return a future that resolves at the next change of log or state. Subscribe first, then check the log
        again."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        future.add_done_callback(self._waiters.discard)
        return future

    def share_frames(self, after: LogOffset, end: LogOffset, frames: bytes) -> None:
        if self.shared_frames is None:
            asyncio.get_running_loop().call_soon(self._clear_frames)
        self.shared_frames = SharedFrames(after, end, frames)

    def _clear_frames(self) -> None:
        self.shared_frames = None

    def _wake(self) -> None:
        for future in list(self._waiters):
            if not future.done():
                future.set_result(None)

    async def wait_loaded(self, timeout_s: float) -> bool:
        """Return True once the shape is no longer loading, False after `timeout_s`. Check `has_ended` and `error`
        afterwards."""
        if self._state != "loading":
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while self._state == "loading":
                    await self.subscribe()
        except TimeoutError:
            return False
        return True

    async def wait_ended(self) -> None:
        await self._over.wait()


def unexpected_failure(error: BaseException) -> TidemillError:
    """Return the error that clients get when a shape ended with an unexpected exception."""
    return UnavailableError(f"the shape failed and starts over: error={error_sentence(error)}.")
