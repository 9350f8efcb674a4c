"""The sink that writes topics: one topic per captured table, exactly once across crashes.

    key      JSON object of the primary key's columns; null for truncate
    value    JSON object of all columns; null for delete and truncate
    headers  tm.pos = <commit_lsn>_<ordinal>, tm.op, tm.xid          timestamp = commit time, ms

    change              records
    insert, update      upsert
    key-changing update tombstone of the old key @n, upsert @n+1
    delete              tombstone
    truncate            one record, key and value null, tm.op=truncate, in every partition: all keys are gone

Offsets are decided here, before anything is sent (lane.py, L1), hence the offsets at each commit boundary are
known at the commit. Records go out in rounds (rounds.py).

    fragment ─► lanes ─► rounds ─► durable position ─► consumer.flushed ─► boundaries ─► Binder

W1  A boundary reaches the binder only when every record up to it is durable.
W2  The tracker hears of a boundary only after the binding that covers it: confirmed ≤ bound ≤ durable. So the
    newest binding says where the count of offsets starts again after a crash, whatever the tails look like.
W3  A table is parked at a commit LSN: no transaction at or above it is carried, in this session or a later one. A row
    that cannot be written, for whatever reason, parks its table alone; `on_fault` makes that durable before the
    transaction is delivered, hence before it is confirmed. What a parked transaction wrote before stays unbound.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tidemill.base.clock import Rand
from tidemill.base.errors import Corrupt, Invalid, Missing, Unavailable, Unknown
from tidemill.base.frontier import ChangePosition
from tidemill.base.limits import KAFKA_REQUEST_BYTES
from tidemill.base.tasks import is_fault
from tidemill.capture.boundaries import Boundary, in_snapshot
from tidemill.capture.changes import NEVER, Change, Fragment, Relation, Row
from tidemill.capture.consumer import FragmentConsumer
from tidemill.capture.converter import key_changed
from tidemill.capture.lane import Lane
from tidemill.capture.rounds import Rounds
from tidemill.capture.sinks import FlushNotices
from tidemill.capture.values import RowEncoder
from tidemill.metastore.catalogue import TableSnapshot, TopicRow
from tidemill.topics.batch import Record, decode_batch
from tidemill.topics.front import FetchRead, TopicLog

OPEN_ATTEMPTS = 100
TAIL_FETCH_BYTES = 1 << 20
ROW_BYTES = KAFKA_REQUEST_BYTES * 3 // 4
"""Key and value of one record. A larger one could not be fetched by a Kafka client, and costs several times its size
while it is made: it parks its table."""

RETIRE_POLL_S = 0.02

POSITION_HEADER, OP_HEADER, XID_HEADER = "tm.pos", "tm.op", "tm.xid"


class CapturedTable:
    """One table's topic: its lanes, which transactions are in it already, and which are never to be (`parked_lsn`)."""

    def __init__(self, name: str, topic: TopicRow, producer_id: int, *, oid: int, parked_lsn: int = NEVER) -> None:
        self.name = name
        self.oid = oid
        self.parked_lsn = parked_lsn
        self.topic = topic
        self.lanes = [Lane(topic.name, topic.topic_id, p, producer_id) for p in range(topic.partitions)]
        self.snapshot: TableSnapshot | None = None
        self.bound_lsn = -1
        self._encoder: RowEncoder | None = None

    def encoder(self, relation: Relation) -> RowEncoder:
        if self._encoder is None or self._encoder.relation is not relation:
            self._encoder = RowEncoder(relation)
        return self._encoder

    def lane_of(self, key: bytes) -> Lane:
        return self.lanes[zlib.crc32(key) % len(self.lanes)] if len(self.lanes) > 1 else self.lanes[0]

    def holds(self, fragment: Fragment) -> bool:
        """The transaction is bound already, part of the table's snapshot, or beyond where the table was parked."""
        lsn = fragment.commit_lsn
        return lsn <= self.bound_lsn or lsn >= self.parked_lsn or in_snapshot(fragment.xid, lsn, self.snapshot)


OnFault = Callable[[CapturedTable, int, BaseException], Awaitable[None]]
"""on_fault(table, commit LSN, what its row raised): parks it, durably, and calls `TopicWriter.park`."""


async def _raise(table: CapturedTable, lsn: int, error: BaseException) -> None:
    raise error


class TopicWriter:
    """`on_durable(boundaries)` is called, in commit order, when boundaries have become durable."""

    def __init__(
        self,
        consumer_name: str,
        tables: Iterable[CapturedTable],
        topics: TopicLog,
        rand: Rand,
        on_durable: Callable[[Sequence[Boundary]], None],
        on_fault: OnFault = _raise,
    ) -> None:
        self.name = consumer_name
        self.notices: FlushNotices | None = None
        self._tables = {table.oid: table for table in tables}
        self._parked = {t.topic.topic_id: t.parked_lsn for t in self._tables.values() if t.parked_lsn < NEVER}
        self._on_fault = on_fault
        self._topics = topics
        self._on_durable = on_durable
        self._consumer = FragmentConsumer()
        self._boundaries: deque[Boundary] = deque()
        self._rounds = Rounds(topics, rand, lambda position: self._aligned(self._consumer.flushed(position)))
        self._touched: dict[Lane, None] = {}

    # opening --------------------------------------------------------------------------------------
    async def open(self, bound: dict[str, tuple[int, ...]], bound_lsn: int) -> None:
        """Learn every partition's tail. `bound`: offsets and LSN of the newest binding.

        Raises Corrupt (a topic lost bound records), Missing (a topic is gone), Unavailable.
        """
        for table in self._tables.values():
            offsets = bound.get(table.topic.topic_id)
            if offsets is not None:
                table.bound_lsn = bound_lsn
            elif table.snapshot is not None:
                offsets = table.snapshot.offsets
            for lane in table.lanes:
                base = offsets[lane.partition] if offsets is not None else 0
                high_watermark = await self._high_watermark(lane)
                if offsets is None and high_watermark > 0:
                    raise Corrupt(f"a fresh topic holds records: topic={lane.topic} records={high_watermark}.")
                tail = await self._tail(lane, high_watermark) if high_watermark > base else None
                lane.start_at(base, high_watermark, tail)

    async def _high_watermark(self, lane: Lane) -> int:
        """A partition that is just being opened, or whose creation has not got about yet, is waited for."""
        for attempt in range(OPEN_ATTEMPTS):
            try:
                return (await self._topics.offsets(lane.topic_id, lane.partition)).high_watermark
            except (Unavailable, Unknown, Missing):
                if attempt == OPEN_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    async def _tail(self, lane: Lane, high_watermark: int) -> ChangePosition | None:
        """Position of the record before the high watermark; None when retention has removed it."""
        read = FetchRead(lane.topic_id, lane.partition, high_watermark - 1, TAIL_FETCH_BYTES)
        for attempt in range(OPEN_ATTEMPTS):
            (fetched,) = await self._topics.fetch([read], max_wait_s=0.0, min_bytes=0, max_bytes=TAIL_FETCH_BYTES)
            if fetched.error is None:
                break
            if not isinstance(fetched.error, Unavailable | Unknown) or attempt == OPEN_ATTEMPTS - 1:
                raise fetched.error
            await asyncio.sleep(0.1)
        for batch in fetched.batches:
            for record in decode_batch(batch).records:
                if record.offset == high_watermark - 1:
                    return position_of(record)
        return None

    # Sink -----------------------------------------------------------------------------------------
    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        """See sinks.Sink. Waits for room, never for durability. Raises what made the writer fail."""
        self._rounds.check()
        self.notices = notices
        written: ChangePosition | None = None
        for change in fragment.changes:
            table = self._tables.get(change.relation.oid)
            if table is None or table.holds(fragment):
                continue
            try:
                fresh = self._write(table, change, fragment)
            except BaseException as error:
                if not is_fault(error):
                    raise
                await self._on_fault(table, fragment.commit_lsn, error)
                continue
            if fresh:
                written = change.position
        if fragment.commits:
            self._boundary(fragment, written)
        else:
            self._consumer.fragment(written, fragment.last, commits=False)
        self._rounds.kick(written)
        await self._rounds.room()
        return [self.name] if fragment.commits else []

    def progress(self, lsn: int) -> None:
        """A keepalive outside transactions: WAL up to `lsn` (inclusive) holds nothing that was not delivered."""
        last = ChangePosition(lsn, 0)
        if self._boundaries and not self._boundaries[-1].commit:
            self._boundaries.pop()
        self._boundaries.append(Boundary(lsn, last, commit=False))
        self._aligned(self._consumer.fragment(None, last, commits=True))

    async def retire(self, oid: int) -> None:
        """Write nothing more for this table, and wait until nothing of it is under way: its topic is to go."""
        table = self._tables.pop(oid, None)
        for lane in table.lanes if table is not None else ():
            while not lane.quiet:
                self._rounds.check()
                await asyncio.sleep(RETIRE_POLL_S)

    def park(self, oid: int, lsn: int) -> None:
        """Carry no transaction of this table at or above `lsn` any more (W3)."""
        table = self._tables.get(oid)
        if table is not None:
            table.parked_lsn = self._parked[table.topic.topic_id] = min(table.parked_lsn, lsn)

    async def aclose(self) -> None:
        """Stop sending. What is in flight ends by itself; whoever opens the lanes next finds it or refuses it (L1)."""
        await self._rounds.aclose()

    # snapshot -------------------------------------------------------------------------------------
    async def write_rows(self, table: CapturedTable, relation: Relation, rows: Sequence[Row], now_ms: int) -> None:
        """Rows of the initial snapshot, at positions (0, n). Waits for room."""
        self._rounds.check()
        encoder = table.encoder(relation)
        # Encoded before the first offset is taken: see _write.
        for key, value in [(encoder.key(row), encoder.value(row)) for row in rows]:
            self._check_size(table, key, value)
            lane = table.lane_of(key)
            position = ChangePosition(0, lane.next)
            lane.take(position)
            self._put(lane, key, value, position, b"insert", b"0", now_ms)
        self._rounds.kick()
        await self._rounds.room()

    async def drained(self) -> None:
        """Until everything written is durable. Raises what made the writer fail."""
        await self._rounds.drained()

    async def failed(self) -> None:
        """Wait for the writer's failure and raise it."""
        await self._rounds.failed()

    # state for marks ------------------------------------------------------------------------------
    @property
    def held_by(self) -> str:
        """The mark of a topic that does not take its records just now, or ""."""
        for table in self._tables.values():
            for lane in table.lanes:
                if lane.repairing:
                    return f"topic:{lane.topic}"
        return ""

    @property
    def landed_bytes(self) -> int:
        return self._rounds.landed_bytes

    def facts(self) -> dict[str, object]:
        return {**self._rounds.facts(), "boundaries_waiting": len(self._boundaries)}

    # writing --------------------------------------------------------------------------------------
    def _write(self, table: CapturedTable, change: Change, fragment: Fragment) -> bool:
        """Give the change's records their offsets; True when at least one has still to be written.

        Whatever can raise comes before the first offset is taken: an offset without its record would be a hole (L1).
        """
        encoder = table.encoder(change.relation)
        xid, at_ms = b"%d" % fragment.xid, fragment.commit_time_ms
        if change.op == "truncate":
            fresh = [self._record(lane, None, None, change.position, b"truncate", xid, at_ms) for lane in table.lanes]
            return any(fresh)
        if change.op == "delete":
            assert change.old is not None
            key = encoder.key(change.old)
            return self._record(table.lane_of(key), key, None, change.position, b"delete", xid, at_ms)
        assert change.new is not None
        key, value = encoder.key(change.new), encoder.value(change.new)
        self._check_size(table, key, value)
        position, fresh_tombstone = change.position, False
        if key_changed(change):
            assert change.old is not None
            old_key = encoder.key(change.old)
            fresh_tombstone = self._record(table.lane_of(old_key), old_key, None, position, b"delete", xid, at_ms)
            position = ChangePosition(position.commit_lsn, position.ordinal + 1)
        return self._record(table.lane_of(key), key, value, position, change.op.encode(), xid, at_ms) or fresh_tombstone

    @staticmethod
    def _check_size(table: CapturedTable, key: bytes, value: bytes) -> None:
        if len(key) + len(value) > ROW_BYTES:
            raise Invalid(
                f"a row is too large for a record: table={table.name} key={key[:200].decode(errors='replace')}"
                f" bytes={len(value)} limit={ROW_BYTES}.",
                fix="Shorten it, then copy the table again.",
            )

    def _record(
        self, lane: Lane, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes, xid: bytes, at_ms: int
    ) -> bool:
        self._touched[lane] = None
        if not lane.take(at):
            return False
        self._put(lane, key, value, at, op, xid, at_ms)
        return True

    def _put(
        self, lane: Lane, key: bytes | None, value: bytes | None, at: ChangePosition, op: bytes, xid: bytes, at_ms: int
    ) -> None:
        position = b"%d_%d" % (at.commit_lsn, at.ordinal)
        headers = ((POSITION_HEADER, position), (OP_HEADER, op), (XID_HEADER, xid))
        self._rounds.add(lane, Record(key, value, headers, at_ms))

    def _boundary(self, fragment: Fragment, written: ChangePosition | None) -> None:
        offsets = [
            (lane.topic_id, lane.partition, lane.next)
            for lane in self._touched
            if fragment.commit_lsn < self._parked.get(lane.topic_id, NEVER)
        ]
        self._touched.clear()
        tags = tuple(marker.content for marker in fragment.markers)
        self._boundaries.append(
            Boundary(fragment.commit_lsn, fragment.last, True, fragment.commit_time_ms, offsets, tags)
        )
        self._aligned(self._consumer.fragment(written, fragment.last, commits=True))

    def _aligned(self, position: ChangePosition | None) -> None:
        """Everything up to the commit boundary `position` is durable (W1)."""
        if position is None:
            return
        done: list[Boundary] = []
        while self._boundaries and self._boundaries[0].last <= position:
            done.append(self._boundaries.popleft())
        if done:
            self._on_durable(done)


def position_of(record: Record) -> ChangePosition:
    """The position a capture's record carries. Raises Corrupt when it carries none."""
    for name, content in record.headers:
        if name == POSITION_HEADER and content is not None:
            try:
                commit_lsn, ordinal = content.split(b"_")
                return ChangePosition(int(commit_lsn), int(ordinal))
            except ValueError:
                break
    raise Corrupt(f"a record of a capture's topic has no position: offset={record.offset}.")
