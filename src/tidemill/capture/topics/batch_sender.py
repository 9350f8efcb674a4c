"""Rounds: what waits in the lanes is sent together, several rounds under way, and every batch lands once.

While few rounds are under way a new one is sent at the end of the present turn of the loop, but a small one not before
GAP_S after the last; what arrives meanwhile waits and travels together. A round is durable when it and all rounds
before it are.

A batch that fails takes those behind it in its partition with it. Its lane is repaired: wait until nothing of it
is in flight, look what the log holds after all, send the rest again with the same sequences (partition_writer.py, L1).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ClosedError, CorruptError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import Tasks, sentence
from tidemill.capture.topics.batch_builder import RowRange
from tidemill.capture.topics.partition_writer import LaneBatch, PartitionWriter, Round
from tidemill.topics.api import OutOfOrderSequenceError, ProduceResult, TopicLog
from tidemill.topics.batch import Record

log = structlog.get_logger()

ROUNDS_IN_FLIGHT = 3
"""Fewer than the five batches a partition remembers per producer, so a batch sent again is recognised."""
BACKLOG_BYTES = 16 << 20
"""What waits and what is under way, together: beyond it `room` waits, and with it the collector and the socket."""
ROUND_BYTES = 2 << 20
GAP_S = 0.01
"""What a round costs does not depend on what is in it: a batch for each partition, an object, an append to each log. At
300 transactions a second, each alone, they took a quarter of the loop from those who wait for its turns (shapes)."""
SMALL_BYTES = 64 << 10
RECORD_MEMORY_BYTES = 600
"""What a waiting record takes beside its key and value: objects, headers, its transaction's boundary."""
ROW_MEMORY_BYTES = 250
"""… and what a row of a range takes: places, kinds and sizes of values, the message it came from."""
REPAIR_PAUSE_S = 0.05
REPAIR_PAUSE_MAX_S = 2.0

_RETRIABLE = (UnavailableError, UnknownOutcomeError, OutOfOrderSequenceError)


class BatchSender:
    """`on_durable(position)`: every record added up to this position is in the log. Called in order."""

    def __init__(
        self,
        topics: TopicLog,
        rand: Rand,
        on_durable: Callable[[ChangePosition], None],
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        self._topics = topics
        self._backlog_bytes = backlog_bytes
        self._rand = rand
        self._on_durable = on_durable
        self._under_way: deque[Round] = deque()
        self._dirty: dict[PartitionWriter, None] = {}
        self._position = ChangePosition(0, 0)
        self._open_bytes = 0
        self._flight_bytes = 0
        self.landed_bytes = 0
        """Durable so far: what moves while a large transaction is written."""
        self.repairing: dict[PartitionWriter, None] = {}
        """Lanes whose topic does not take their records just now."""
        self._due: asyncio.Handle | None = None
        """The next round's turn, while it waits for it."""
        self._due_soon = False
        """… which is the end of this turn of the loop."""
        self._next_s = 0.0
        """Of the loop's clock: a small round leaves no earlier."""
        self._changed = asyncio.Event()
        self._failure: TidemillError | None = None
        self._tasks = Tasks(self._task_failed)

    # plain calls ----------------------------------------------------------------------------------
    def add(self, lane: PartitionWriter, record: Record) -> None:
        """Queue the record whose offset `lane.take` has just given."""
        self._open_bytes += lane.add(record) + RECORD_MEMORY_BYTES
        self._dirty[lane] = None

    def add_rows(self, lane: PartitionWriter, rows: RowRange) -> None:
        """Queue rows whose offsets `lane.take_rows` has just given."""
        self._open_bytes += lane.add_rows(rows) + ROW_MEMORY_BYTES * len(rows)
        self._dirty[lane] = None

    def kick(self, position: ChangePosition | None = None) -> None:
        """Everything up to `position` has been added; send it at the end of this turn of the loop, or of the gap behind
        the last round, if there is room.

        Who added it may have waited in between, and rounds have left with it that did not know how far they go: they
        are told, or, where they are durable already, who waits for the position is.
        """
        if position is not None and position > self._position:
            self._position = position
            if not self._dirty and self._under_way:
                self._under_way[-1].position = position
            elif not self._dirty:
                self._on_durable(position)
        if self._dirty and not self._due_soon:
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_soon = self._open_bytes >= SMALL_BYTES or loop.time() >= self._next_s
        if self._due is not None:
            if not self._due_soon:
                return
            self._due.cancel()
        self._due = loop.call_soon(self._send_round) if self._due_soon else loop.call_at(self._next_s, self._send_round)

    def facts(self) -> dict[str, object]:
        """What waits to become durable, and the bound."""
        return {"backlog_bytes": self._open_bytes + self._flight_bytes, "backlog_bytes_limit": self._backlog_bytes}

    def check(self) -> None:
        """Raises what made sending fail."""
        if self._failure is not None:
            raise self._failure

    # waiting --------------------------------------------------------------------------------------
    async def room(self) -> None:
        """Until the backlog is small enough to take more."""
        most_open = min(ROUND_BYTES, self._backlog_bytes // 2)
        while self._open_bytes > most_open and self._open_bytes + self._flight_bytes > self._backlog_bytes:
            await self._change()

    async def drained(self) -> None:
        """Until everything added is durable."""
        while self._dirty or self._under_way:
            await self._change()

    async def failed(self) -> None:
        """Wait for the failure and raise it."""
        while True:
            await self._change()

    async def aclose(self) -> None:
        """Stop sending. What is in flight ends by itself; whoever opens the lanes next finds it or refuses it (L1)."""
        self._fail(ClosedError("the topic writer was closed."))
        if self._due is not None:
            self._due.cancel()
        await self._tasks.aclose()

    # sending --------------------------------------------------------------------------------------
    def _send_round(self) -> None:
        self._due, self._due_soon = None, False
        if not self._dirty or self._failure is not None or len(self._under_way) >= ROUNDS_IN_FLIGHT:
            return
        self._next_s = asyncio.get_running_loop().time() + GAP_S
        round_ = Round(self._position)
        self._under_way.append(round_)
        dirty, self._dirty, self._open_bytes = self._dirty, {}, 0
        try:
            batches = [(lane, batch) for lane in dirty for batch in lane.close_batches(round_)]
        except Exception as error:
            # Its records have offsets, and are in no batch: nothing behind them may be told durable.
            self._fail(UnavailableError(f"records cannot be encoded: {sentence(error)}."))
            return
        for lane, batch in batches:
            self._flight_bytes += len(batch.data)
            if lane not in self.repairing:
                self._send(lane, batch)

    def _send(self, lane: PartitionWriter, batch: LaneBatch) -> None:
        batch.in_flight = True
        # The log patches offsets in place, so a batch that may be sent again is sent as a copy.
        future = self._topics.produce_nowait(lane.topic_id, lane.partition, bytearray(batch.data))
        future.add_done_callback(lambda ended: self._ended(lane, batch, ended))

    def _ended(self, lane: PartitionWriter, batch: LaneBatch, future: asyncio.Future[ProduceResult]) -> None:
        batch.in_flight = False
        self._changed.set()
        error = ClosedError("the produce call was cancelled.") if future.cancelled() else future.exception()
        if error is None:
            if future.result().base_offset != batch.start:
                self._fail(
                    CorruptError(
                        f"somebody else wrote to a capture's topic: topic={lane.topic} partition={lane.partition}"
                        f" expected={batch.start} found={future.result().base_offset}.",
                        fix="Let only the capture write to it; start the capture over.",
                    )
                )
                return
            lane.failures = 0
            batch.done = True
            while lane.pending and lane.pending[0].done:
                self._landed(lane.pending.popleft())
        elif isinstance(error, _RETRIABLE):
            if lane not in self.repairing and self._failure is None:
                self.repairing[lane] = None
                self._tasks.spawn(self._repair(lane, error), name=f"repair {lane.topic}/{lane.partition}")
        else:
            translated = error if isinstance(error, TidemillError) else UnavailableError(f"produce failed: {error!r}.")
            self._fail(translated)

    def _landed(self, batch: LaneBatch) -> None:
        self._flight_bytes -= len(batch.data)
        self.landed_bytes += len(batch.data)
        batch.round.left -= 1
        durable: ChangePosition | None = None
        while self._under_way and self._under_way[0].left == 0:
            durable = self._under_way.popleft().position
        if durable is not None:
            self._on_durable(durable)
            self.kick()
        self._changed.set()

    async def _repair(self, lane: PartitionWriter, cause: BaseException) -> None:
        """A batch failed, and with it what was in line behind it. Wait until nothing of this partition is in flight,
        look what the log holds after all, and send the rest again, same sequences, same order."""
        lane.failures += 1
        log.warning("records not accepted, sending again", topic=lane.topic, failures=lane.failures, cause=str(cause))
        while True:
            pause_s = min(REPAIR_PAUSE_MAX_S, REPAIR_PAUSE_S * 2 ** min(lane.failures, 10))
            await asyncio.sleep(self._rand.uniform(pause_s / 2, pause_s))
            while any(batch.in_flight for batch in lane.pending):
                await self._change()
            try:
                high_watermark = (await self._topics.offsets(lane.topic_id, lane.partition)).high_watermark
            except (UnavailableError, UnknownOutcomeError):
                lane.failures += 1
                continue
            break
        # No await from here on: new batches keep joining the line behind.
        del self.repairing[lane]
        for batch in lane.landed(high_watermark):
            self._landed(batch)
        if high_watermark > lane.expected:
            # A predecessor's batch with other borders landed late: the same records, further than ours. The next
            # session counts from the new tail (and finds out by its position if they were not the same).
            self._fail(UnavailableError(f"the topic moved on its own: topic={lane.topic} partition={lane.partition}."))
            return
        for batch in lane.pending:
            self._send(lane, batch)

    # failure --------------------------------------------------------------------------------------
    async def _change(self) -> None:
        self.check()
        self._changed.clear()
        await self._changed.wait()
        self.check()

    def _task_failed(self, _: str, error: BaseException) -> None:
        self._fail(
            error if isinstance(error, TidemillError) else UnavailableError(f"the topic writer failed: {error!r}.")
        )

    def _fail(self, error: TidemillError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()
