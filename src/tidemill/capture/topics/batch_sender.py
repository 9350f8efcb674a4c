"""Send the queued records of all partitions together in rounds, several of them in flight, so that every batch lands
once.

While few rounds are in flight, a new one is sent at the end of the current turn of the event loop, but a small one not
before `linger_s` after the last; records that arrive in between wait and are sent together. The cost of a round does
not depend on its size: a batch for each partition, an object, an append to each log, a binding, and a step of each
pipeline that reads it. A transaction after a longer pause is sent immediately. `send_now` ends the wait. A round is
durable when it and all rounds before it are.

If a batch fails, the later ones in its partition fail too. Its partition writer is repaired: wait until nothing of it
is in flight, check what the log contains after all, and send the rest again with the same sequences
(partition_writer.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import ClosedError, CorruptError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.capture.topics.batch_builder import RowRange
from tidemill.capture.topics.partition_writer import PartitionBatch, PartitionWriter, SendRound
from tidemill.topics.api import OutOfOrderSequenceError, ProduceResult, TopicLog
from tidemill.topics.batch import Record

log = structlog.get_logger()

ROUNDS_IN_FLIGHT = 3
"""Fewer than the five batches that a partition remembers per producer, so a repeated batch is recognised."""
BACKLOG_BYTES = 16 << 20
"""Limit of queued and in-flight bytes together: above it `wait_for_room` waits, and with it the collector and the
socket."""
ROUND_BYTES = 2 << 20
SMALL_ROUND_BYTES = 64 << 10
"""Size from which a round does not wait."""
RECORD_MEMORY_BYTES = 600
"""Memory of a waiting record in addition to its key and value: objects, headers, its transaction's boundary."""
ROW_MEMORY_BYTES = 250
"""Memory of a row of a range: places, kinds and sizes of values, the message from which it came."""
REPAIR_PAUSE_S = 0.05
REPAIR_PAUSE_MAX_S = 2.0

_RETRIABLE = (UnavailableError, UnknownOutcomeError, OutOfOrderSequenceError)


class SendPace(msgspec.Struct, frozen=True):
    """`linger_s`: minimum time between small rounds. `backlog_bytes`: limit of queued and in-flight bytes together."""

    linger_s: float = 0.0
    backlog_bytes: int = BACKLOG_BYTES


class BatchSender:
    """Sender of rounds. `on_durable(position)`: every record added up to this position is in the log. Called in
    order.
    """

    def __init__(
        self,
        topics: TopicLog,
        rand: Rand,
        on_durable: Callable[[ChangePosition], None],
        pace: SendPace = SendPace(),
    ) -> None:
        self._topics = topics
        self._linger_s = pace.linger_s
        self._backlog_bytes = pace.backlog_bytes
        self._rand = rand
        self._on_durable = on_durable
        self._under_way: deque[SendRound] = deque()
        self._dirty: dict[PartitionWriter, None] = {}
        self._position = ChangePosition(0, 0)
        self._open_bytes = 0
        self._flight_bytes = 0
        self.landed_bytes = 0
        """Durable bytes so far, as a measure of progress while a large transaction is written."""
        self.repairing: dict[PartitionWriter, None] = {}
        """Partitions whose topic currently does not accept their records."""
        self._due: asyncio.Handle | None = None
        """Handle of the next round's call, while it is scheduled."""
        self._due_soon = False
        """True if that call is at the end of this turn of the event loop."""
        self._next_s = 0.0
        """Earliest time of a small round, by the event loop's clock."""
        self._changed = asyncio.Event()
        self._failure: TidemillError | None = None
        self._tasks = Tasks(self._on_task_failed)

    # synchronous calls ----------------------------------------------------------------------------
    def add(self, writer: PartitionWriter, record: Record) -> None:
        """Queue the record that `writer.assign_offset` has just assigned an offset to."""
        self._open_bytes += writer.add(record) + RECORD_MEMORY_BYTES
        self._dirty[writer] = None

    def add_rows(self, writer: PartitionWriter, rows: RowRange) -> None:
        """Queue rows that `writer.assign_offsets` has just assigned offsets to."""
        self._open_bytes += writer.add_rows(rows) + (ROW_MEMORY_BYTES + rows.rows.bytes_per_row) * len(rows)
        self._dirty[writer] = None

    def schedule_round(self, position: ChangePosition | None = None) -> None:
        """Note that everything up to `position` has been added, and send it at the end of this turn of the event loop,
        or when `linger_s` has passed since the last round, if there is room.

        The caller may have waited in between, and rounds may have left with the records without knowing the position.
        In that case the last round gets the position; if all are already durable, `on_durable` is called.
        """
        if self._failure is not None:
            return
        if position is not None and position > self._position:
            self._position = position
            if not self._dirty and self._under_way:
                self._under_way[-1].position = position
            elif not self._dirty:
                self._on_durable(position)
        if self._dirty and not self._due_soon:
            self._schedule_round()

    def _schedule_round(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_soon = self._open_bytes >= SMALL_ROUND_BYTES or loop.time() >= self._next_s
        if self._due is not None:
            if not self._due_soon:
                return
            self._due.cancel()
        self._due = loop.call_soon(self._send_round) if self._due_soon else loop.call_at(self._next_s, self._send_round)

    def send_now(self) -> None:
        """Let no record that was added so far wait for `linger_s`: something waits for it."""
        self._next_s = 0.0
        if self._dirty and not self._due_soon:
            self._schedule_round()

    def facts(self) -> dict[str, object]:
        """Return the size of what waits to become durable, and its limit."""
        return {"backlog_bytes": self._open_bytes + self._flight_bytes, "backlog_bytes_limit": self._backlog_bytes}

    def raise_failure(self) -> None:
        """Raise the error that made sending fail, if any."""
        if self._failure is not None:
            raise self._failure

    # waiting --------------------------------------------------------------------------------------
    async def wait_for_room(self) -> None:
        """Wait until the backlog is small enough to add more."""
        most_open = min(ROUND_BYTES, self._backlog_bytes // 2)
        while self._open_bytes > most_open and self._open_bytes + self._flight_bytes > self._backlog_bytes:
            await self._wait_for_change()

    async def wait_drained(self) -> None:
        """Wait until everything added is durable."""
        self.send_now()
        while self._dirty or self._under_way:
            await self._wait_for_change()

    async def failed(self) -> None:
        """Wait for the failure and raise it."""
        while True:
            await self._wait_for_change()

    async def aclose(self) -> None:
        """Stop sending. Batches in flight end on their own; the next writer that opens the partitions finds or rejects
        them.
        """
        self._fail(ClosedError("the topic writer is closed."))
        if self._due is not None:
            self._due.cancel()
        await self._tasks.aclose()

    # sending --------------------------------------------------------------------------------------
    def _send_round(self) -> None:
        self._due, self._due_soon = None, False
        if not self._dirty or self._failure is not None or len(self._under_way) >= ROUNDS_IN_FLIGHT:
            return
        self._next_s = asyncio.get_running_loop().time() + self._linger_s
        round_ = SendRound(self._position)
        self._under_way.append(round_)
        dirty, self._dirty, self._open_bytes = self._dirty, {}, 0
        try:
            batches = [(writer, batch) for writer in dirty for batch in writer.close_batches(round_)]
        except Exception as error:
            # Its records have offsets and are in no batch, so nothing behind them may be reported as durable.
            self._fail(UnavailableError(f"records cannot be encoded: {error_sentence(error)}."))
            return
        for writer, batch in batches:
            self._flight_bytes += batch.size_bytes
            if writer not in self.repairing:
                self._send_batch(writer, batch)

    def _send_batch(self, writer: PartitionWriter, batch: PartitionBatch) -> None:
        batch.in_flight = True
        # The log patches offsets in place, so a batch that may be sent again is sent as a copy.
        future = self._topics.produce_nowait(
            writer.topic_id, writer.partition, bytearray(batch.data), trailer=batch.trailer
        )
        future.add_done_callback(lambda ended: self._on_batch_ended(writer, batch, ended))

    def _on_batch_ended(
        self, writer: PartitionWriter, batch: PartitionBatch, future: asyncio.Future[ProduceResult]
    ) -> None:
        batch.in_flight = False
        self._changed.set()
        error = ClosedError("the produce call was cancelled.") if future.cancelled() else future.exception()
        if error is None:
            if future.result().base_offset != batch.start:
                self._fail(
                    CorruptError(
                        f"another client wrote to a capture's topic: topic={writer.topic} partition={writer.partition}"
                        f" expected={batch.start} found={future.result().base_offset}.",
                        fix="Let only the capture write to it; start the capture over.",
                    )
                )
                return
            writer.failures = 0
            batch.done = True
            while writer.pending and writer.pending[0].done:
                self._on_batch_durable(writer.pending.popleft())
        elif isinstance(error, _RETRIABLE):
            if writer not in self.repairing and self._failure is None:
                self.repairing[writer] = None
                self._tasks.spawn(
                    self._repair_partition(writer, error), name=f"repair {writer.topic}/{writer.partition}"
                )
        else:
            translated = error if isinstance(error, TidemillError) else UnavailableError(f"produce failed: {error!r}.")
            self._fail(translated)

    def _on_batch_durable(self, batch: PartitionBatch) -> None:
        self._flight_bytes -= batch.size_bytes
        self.landed_bytes += len(batch.data)
        batch.round.left -= 1
        durable: ChangePosition | None = None
        while self._under_way and self._under_way[0].left == 0:
            durable = self._under_way.popleft().position
        if durable is not None:
            self._on_durable(durable)
            self.schedule_round()
        self._changed.set()

    async def _repair_partition(self, writer: PartitionWriter, cause: BaseException) -> None:
        """Repair a partition after a failed batch, with which the later ones failed: wait until nothing of this
        partition is in flight, check what the log contains after all, and send the rest again, with the same sequences
        in the same order.
        """
        writer.failures += 1
        log.warning(
            "records are not accepted and are sent again",
            topic=writer.topic,
            failures=writer.failures,
            cause=str(cause),
        )
        while True:
            pause_s = min(REPAIR_PAUSE_MAX_S, REPAIR_PAUSE_S * 2 ** min(writer.failures, 10))
            await asyncio.sleep(self._rand.uniform(pause_s / 2, pause_s))
            while any(batch.in_flight for batch in writer.pending):
                await self._wait_for_change()
            try:
                high_watermark = (await self._topics.offsets(writer.topic_id, writer.partition)).high_watermark
            except (UnavailableError, UnknownOutcomeError):
                writer.failures += 1
                continue
            break
        # No await from here on: new batches are still added to `pending`.
        del self.repairing[writer]
        for batch in writer.remove_landed(high_watermark):
            self._on_batch_durable(batch)
        if high_watermark > writer.expected_high_watermark:
            # A predecessor's batch with other boundaries landed late: the same records, further than ours. The next
            # session counts from the new tail, and detects by its position if they were not the same.
            self._fail(
                UnavailableError(
                    f"the topic moved without this session: topic={writer.topic} partition={writer.partition}."
                )
            )
            return
        for batch in writer.pending:
            self._send_batch(writer, batch)

    # failure --------------------------------------------------------------------------------------
    async def _wait_for_change(self) -> None:
        self.raise_failure()
        self._changed.clear()
        await self._changed.wait()
        self.raise_failure()

    def _on_task_failed(self, _: str, error: BaseException) -> None:
        self._fail(
            error if isinstance(error, TidemillError) else UnavailableError(f"the topic writer failed: {error!r}.")
        )

    def _fail(self, error: TidemillError) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()
