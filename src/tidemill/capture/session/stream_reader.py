"""The reader task of a session: passes the messages of the stream through the converter to the collector, in commit
order. The whole transactions of one read of the socket are handed on as batches.

Back-pressure: nothing is read while the collector is full. A separate task sends the statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tidemill.base.clock import Clock
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.status.histogram import StageHistograms
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.receive_batch import RowRun, split_into_steps
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder
from tidemill.capture.decode.undecodable import UndecodableMessageError, feed_frame
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.deferrable_keys import DeferrableKeys
from tidemill.capture.postgres.connection import BURST_BYTES
from tidemill.capture.postgres.replication_stream import FramedMessage, ReplicationStream
from tidemill.capture.postgres.standby_status import Keepalive
from tidemill.capture.session.bad_rows import BadRowPolicy
from tidemill.capture.session.server_watch import StreamWatch

GATHER_S = 0.008
"""Pause before a read of a dense stream, in which more arrives: a read costs more than a small transaction in it. At
1,500 transactions a second a read delivers twelve."""
DENSE_FRAMES = 24
"""N frames in one read indicate a dense stream; many together are decoded by columns."""
DENSE_COMMITS_PER_S = 750
"""Commit rate of a dense stream: 6 in a pause. At a lower rate the pause would mostly delay a single commit."""
MESSAGES_PER_CHECK = 16
MESSAGE_BYTES_PER_CHECK = 1024
"""Small messages are fed in groups of this number, fewer if they are larger, before the reader may yield."""


class StreamHandlers(msgspec.Struct, frozen=True):
    """Parts that process the messages of the stream. `pause_lock` is locked while a table is being paused.
    `process_description` stores the description of a relation before its rows are read. `bind_soon` is called when the
    server requests a status.
    """

    converter: TransactionBuilder
    deferrable_keys: DeferrableKeys
    bad_rows: BadRowPolicy
    pause_lock: asyncio.Lock
    process_description: Callable[[RelationSeen], Awaitable[None]]
    bind_soon: Callable[[], None]


class ReadPace:
    """Detects a dense stream. `gathers`: the next read is preceded by a pause of GATHER_S."""

    def __init__(self) -> None:
        self.gathers = False
        self._since_s = 0.0
        self._commits = 0
        """Number of commits since then."""

    def record_read(self, frames: Sequence[bytes], commits: int, now_s: float) -> None:
        """Record the frames of one read, and the number of commits among them."""
        self._commits += commits
        elapsed_s = now_s - self._since_s
        if elapsed_s >= GATHER_S:
            self.gathers = self._commits > elapsed_s * DENSE_COMMITS_PER_S
            self._since_s, self._commits = now_s, 0
        if len(frames) >= DENSE_FRAMES:
            self.gathers = sum(map(len, frames)) < BURST_BYTES


class StreamReader:
    """Reader of the stream; `run` is the body of its task."""

    def __init__(
        self,
        stream: ReplicationStream,
        collector: Collector,
        watch: StreamWatch,
        handlers: StreamHandlers,
        stages: StageHistograms,
        clock: Clock,
    ) -> None:
        self._stream = stream
        self._collector = collector
        self._watch = watch
        self._handlers = handlers
        self._converter = handlers.converter
        self._converter.batches = True
        self._stages = stages
        self._clock = clock
        self._pace = CoopBudget(clock)
        self._commits = 0
        """Number of transactions that the present read passed on in batches."""

    async def run(self) -> None:
        """Read until the stream or anything downstream fails, and raise that error."""
        collector, pace = self._collector, ReadPace()
        while True:
            if pace.gathers:
                # The server sends row by row, and reading immediately would decode and pass on row by row.
                await asyncio.sleep(GATHER_S)
            self._watch.record_wait()
            frames = await self._stream.receive()
            self._watch.record_message()
            self._commits = 0
            await self._read_frames(frames)
            await self._pass_on_batch()
            pace.record_read(frames, self._commits, self._clock.monotonic_s())
            if collector.received_time_ms:
                self._stages.add("received", [collector.received_time_ms], self._clock.now_ms())
                collector.received_time_ms = 0

    async def _read_frames(self, frames: Sequence[bytes]) -> None:
        """Process frames in order. Messages that complete nothing are fed without an await in between, during which no
        other task can begin to pause a table.
        """
        unchecked = 0
        for step in split_into_steps(frames, self._converter):
            if isinstance(step, RowRun):
                await self._read_rows(step)
                unchecked = 0
            elif unchecked <= 0 or isinstance(step, Keepalive):
                unchecked = 0 if await self._read_one(step) else MESSAGES_PER_CHECK
            elif await self._feed(step):
                unchecked = 0
            else:
                unchecked -= 1 + len(step.payload) // MESSAGE_BYTES_PER_CHECK

    async def _read_rows(self, run: RowRun) -> None:
        """Process changes of rows that are complete in the buffer. A table among them may be paused between two
        fragments.
        """
        at = run.start
        while at < run.end:
            await self._wait_until_allowed()
            if not self._converter.accepts_segment(run.segment):
                await self._read_one(run.parse_frame_at(at))
                at += 1
                continue
            fragment, at = self._converter.feed_rows(run.segment, at, run.end)
            if fragment is not None:
                await self._pass_on(fragment)

    async def _read_one(self, item: FramedMessage | Keepalive) -> bool:
        """Process one frame; return whether other tasks may have run after it was read."""
        await self._wait_until_allowed()
        if isinstance(item, Keepalive):
            await self._pass_on_batch()
            self._collector.put_keepalive(item, inside_txn=self._converter.inside_txn)
            if item.reply_requested:
                self._handlers.bind_soon()
            return True
        return await self._feed(item)

    async def _feed(self, item: FramedMessage) -> bool:
        """Feed a message; return whether that may have let other tasks run."""
        try:
            out = feed_frame(item, self._converter)
        except UndecodableMessageError as poisoned:
            await self._pass_on_batch()
            await self._handlers.bad_rows.handle_message(item, poisoned)
            return True
        if out is None:
            return False
        if isinstance(out, RelationSeen):
            await self._pass_on_batch()
            await self._handlers.process_description(out)
        else:
            await self._pass_on(out)
        return True

    async def _pass_on_batch(self) -> None:
        batch = self._converter.batch.take_fragment()
        if batch is not None:
            assert batch.batch is not None
            self._commits += len(batch.batch)
            await self._collector.put(batch)

    async def _pass_on(self, fragment: Fragment) -> None:
        await self._pass_on_batch()  # before the fragment, which may itself be a full batch
        fragments: Sequence[Fragment] = (fragment,)
        if self._converter.deferrable:
            fragments = await self._handlers.deferrable_keys.resolve_fragment(fragment)
        for each in fragments:
            await self._collector.put(each)

    async def _wait_until_allowed(self) -> None:
        if self._pace.is_used_up:
            await self._pace.wait_for_turn()  # one receive may bring thousands
        if self._handlers.pause_lock.locked():  # nothing beyond a pause is handed on before it is durable
            async with self._handlers.pause_lock:
                pass
