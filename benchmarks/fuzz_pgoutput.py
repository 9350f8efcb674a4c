"""Mutated pgoutput messages through the real decoder, converter, collector and row encoders.

The good messages come from a real PostgreSQL: every kind of message, wide and TOASTed rows, key changes, truncates,
partitions, types, logical messages, transactions of several fragments. Streams of them are cut at random and mutated:
bits, bytes, counts and lengths, cut, longer, spliced; messages dropped, doubled, swapped. Half of the streams arrive in
bursts, whose rows are read by columns. An unreadable message is treated as in a session: in turns the session ends, or
the table is paused and the stream continues.

Watches: that a message raises only Poisoned and the collector only our errors; that fragments have distinct positions
and none is dropped silently; the CPU time of the most expensive message (which would block a loop); resident memory;
and that afterwards the good stream gives the same fragments.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

import paths  # noqa: F401
from fuzz_found import Found
from support.postgres import EmbeddedPostgres
from tidemill.base.clock import SystemClock
from tidemill.base.errors import TidemillError
from tidemill.base.lsn import BEFORE_ALL
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.receive_batch import RowRun, split_into_steps
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder, merge_relation
from tidemill.capture.decode.undecodable import UndecodableMessageError, feed_frame
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import FlushNotices
from tidemill.capture.encode.row_encoder import RowEncoder
from tidemill.capture.naming import has_invalid_bytes
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.postgres.standby_status import Keepalive, ReplicationStatus

STALL_LIMIT_S = 0.05
MEMORY_LIMIT_MIB = 64
FRAGMENT_CHANGES = 7
LEAST_ROWS = 3
MUTATED = 0.04
SETTINGS = {"wal_level": "logical", "fsync": "off", "shared_buffers": "16MB"}
WRITES = """
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TABLE plain (id int PRIMARY KEY, n numeric(12,2), f float8, t text, b bool, m mood, a int[], ts timestamptz);
CREATE TABLE wide (id bigint, part text, PRIMARY KEY (part, id), toast text);
CREATE TABLE "odd ""name.ä" ("col ""umn" int PRIMARY KEY, "b.c" bytea);
CREATE TABLE parted (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parted_a PARTITION OF parted FOR VALUES IN ('a');
ALTER TABLE plain REPLICA IDENTITY FULL; ALTER TABLE wide REPLICA IDENTITY FULL;
ALTER TABLE "odd ""name.ä" REPLICA IDENTITY FULL; ALTER TABLE parted REPLICA IDENTITY FULL;
ALTER TABLE parted_a REPLICA IDENTITY FULL; ALTER TABLE wide ALTER toast SET STORAGE EXTERNAL;
CREATE PUBLICATION fuzz FOR ALL TABLES WITH (publish_via_partition_root = true);
SELECT pg_create_logical_replication_slot('fuzz', 'pgoutput');
INSERT INTO plain SELECT g, g / 3.0, 'NaN', 'row ' || g, g % 2 = 0, 'sad', ARRAY[g, NULL], now() FROM
 generate_series(1, 40) g;
INSERT INTO wide SELECT g, 'p', repeat('x', 9000) FROM generate_series(1, 3) g;
UPDATE wide SET id = id + 100 WHERE id < 3; UPDATE plain SET t = NULL, id = id + 1000 WHERE id < 20;
INSERT INTO "odd ""name.ä" VALUES (1, '\\x00ff'), (2, NULL); DELETE FROM plain WHERE id % 3 = 0;
INSERT INTO parted VALUES (1, 'a'), (2, 'a'); TRUNCATE plain, wide;
SELECT pg_logical_emit_message(true, 'tidemill', 'tag');
SELECT pg_logical_emit_message(true, 'other', repeat('y', 3000));
SELECT pg_logical_emit_message(false, 'tidemill', 'x');
BEGIN; INSERT INTO plain (id) SELECT generate_series(1, 30); TRUNCATE parted; DELETE FROM "odd ""name.ä"; COMMIT;
"""


def corpus(dsn: str) -> list[bytes]:
    """Real messages, whole transactions, in commit order."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in WRITES.split(";\n"):
            if statement.strip():
                connection.execute(statement)  # type: ignore[call-overload]
        rows = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes('fuzz', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'fuzz', 'messages', 'true')",
            binary=True,
        ).fetchall()
        connection.execute("SELECT pg_drop_replication_slot('fuzz')")
    return [bytes(data) for (data,) in rows]


class Encoding:
    """A durable sink that completes immediately: it encodes every change as the topic writer does, and checks
    that positions are distinct.
    """

    def __init__(self) -> None:
        self.last = BEFORE_ALL
        self.taken = 0
        self.broken = ""
        self._encoders: dict[int, RowEncoder] = {}

    async def deliver(self, fragment: Fragment, notices: FlushNotices) -> list[str]:
        if fragment.last <= self.last or (fragment.changes and fragment.changes[-1].position != fragment.last):
            self.broken = f"P3: {fragment.last} after {self.last}"
        self.last = fragment.last
        for change in fragment.changes:
            encoder = self._encoders.get(change.relation.oid)
            if encoder is None or encoder.relation is not change.relation:
                encoder = self._encoders[change.relation.oid] = RowEncoder(change.relation)
            for row in (change.old, change.new):
                if row is not None:
                    encoder.key(row)
                    encoder.value(row)
        self.taken += 1
        if fragment.commits:
            notices.report_flushed("encoding", fragment.last)
        return ["encoding"]

    async def aclose(self) -> None: ...


class Session:
    """The part of a session that handles messages, without a connection."""

    def __init__(self, found: Findings, *, parks: bool) -> None:
        self._found = found
        self._parks = parks
        self._converter = TransactionBuilder(max_changes=FRAGMENT_CHANGES)
        self.sink = Encoding()
        self.status = ReplicationStatus(0)
        self._put = 0
        self.lsn = 0
        self._collector = Collector([self.sink], self.status, SystemClock())
        self._running = asyncio.ensure_future(self._collector.run())

    async def feed(self, lsn: int, payload: bytes) -> bool:
        """Return False when the session has ended."""
        return await self._take(FramedMessage(lsn, payload))

    async def feed_burst(self, payloads: list[bytes]) -> bool:
        """Feed the messages together, by columns where possible. Return False when the session has ended."""
        frames = [b"w" + bytes(24) + payload for payload in payloads]
        self.lsn += len(frames)
        before_s: float | None = time.process_time()
        for step in split_into_steps(frames, self._converter, LEAST_ROWS):
            if before_s is not None:
                # Before its first step a burst is joined and searched.
                self._found.spent(time.process_time() - before_s, STALL_LIMIT_S, "a burst", frames[0][:64])
                before_s = None
            if not isinstance(step, RowRun):
                if not isinstance(step, FramedMessage) or not await self._take(step):
                    return False
            else:
                at = step.start
                while at < step.end:
                    if not self._converter.accepts_segment(step.segment):
                        one = step.parse_frame_at(at)
                        if not isinstance(one, FramedMessage) or not await self._take(one):
                            return False
                        at += 1
                        continue
                    fragment, at = self._converter.feed_rows(step.segment, at, step.end)
                    if fragment is not None and not await self._hand_on(fragment):
                        return False
        return True

    async def _take(self, item: FramedMessage) -> bool:
        self.lsn = max(self.lsn, item.lsn)
        payload = item.payload
        before_s = time.process_time()
        try:
            out = feed_frame(item, self._converter)
        except UndecodableMessageError as poisoned:
            self._found.poisoned += 1
            if not self._parks or not poisoned.table or poisoned.position is None:
                return False
            self._converter.skip_message(payload)
            self._found.set_aside += 1
            return True
        finally:
            self._found.spent(time.process_time() - before_s, STALL_LIMIT_S, "a message", payload[:64])
        if isinstance(out, RelationSeen):
            if out.changed:
                names = (out.message.schema, out.message.table, *(column.name for column in out.message.columns))
                if any(map(has_invalid_bytes, names)):
                    self._found.poisoned += 1  # a session parks a table whose names are not UTF-8 before it learns it
                    return False
                known = self._converter.relations.get(out.message.oid)
                self._converter.set_relation(merge_relation(out.message, known))
        elif out is not None:
            return await self._hand_on(out)
        return not self._running.done()

    async def _hand_on(self, fragment: Fragment) -> bool:
        before_s = time.process_time()
        self._put += 1
        await self._collector.put(fragment)
        self._collector.put_keepalive(Keepalive(self.lsn, False), inside_txn=self._converter.inside_txn)
        for _ in range(3):
            await asyncio.sleep(0)
        self._found.spent(time.process_time() - before_s, STALL_LIMIT_S, "a fragment", b"")
        return not self._running.done()

    async def aclose(self) -> None:
        self._running.cancel()
        (ended,) = await asyncio.gather(self._running, return_exceptions=True)
        if isinstance(ended, Exception):
            self._found.ended(ended)
        elif self._put != self.sink.taken:
            self._found.failures["fragments were dropped in silence"] += 1
        if self.sink.broken:
            self._found.failures[self.sink.broken] += 1


class Findings(Found):
    def __init__(self) -> None:
        super().__init__()
        self.messages = self.mutated = self.sessions = self.poisoned = self.set_aside = self.fragments = 0
        self.ends: Counter[str] = Counter()

    def ended(self, error: BaseException) -> None:
        self.ends[type(error).__name__] += 1
        if not isinstance(error, TidemillError) or "cannot be delivered" in str(error):
            self.failures[f"the collector raised {error!r}"[:300]] += 1


def mutate(rand: random.Random, message: bytes, messages: list[bytes]) -> bytes:
    data = bytearray(message)
    for _ in range(rand.choice((1, 1, 1, 2, 5))):
        at = rand.randrange(len(data) + 1)
        match rand.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rand.randrange(8)
            case 1 if data:
                data[at % len(data)] = rand.choice((0, 1, 0x7F, 0x80, 0xFF, 0x74, 0x6E, 0x75))
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rand.randbytes(rand.choice((1, 4, 100)))
            case 4:
                data[at : at + 2] = rand.choice((b"\xff\xff", b"\x00\x00", b"\x7f\xff", b"\x80\x00", b"\x00\x01"))
            case 5:
                wide = rand.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", bytes(4)))
                data[at : at + 4] = wide
            case 6:
                other = rand.choice(messages)
                cut = rand.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case _:
                data[at:at] = data[: rand.randrange(64)]
    return bytes(data)


async def replay(messages: list[bytes]) -> tuple[int, int]:
    """(fragments, last commit confirmed) of the good stream."""
    found = Findings()
    session = Session(found, parks=False)
    for lsn, message in enumerate(messages, 1):
        assert await session.feed(lsn, message), "the good stream does not pass"
    for _ in range(10):
        await asyncio.sleep(0)
    await session.aclose()
    assert not found.failures, found.failures
    return session.sink.taken, session.status.confirmed


async def fuzz_bursts(
    session: Session, found: Findings, stream: list[bytes], rate: float, messages: list[bytes], rand: random.Random
) -> int:
    """A stream in bursts of any size; returns how many of its messages were mutated."""
    mutated = [rand.random() < rate for _ in stream]
    stream = [mutate(rand, m, messages) if bad else m for m, bad in zip(stream, mutated, strict=True)]
    while stream:
        size = rand.choice((1, 5, 50))
        burst, stream = stream[:size], stream[size:]
        found.messages += len(burst)
        try:
            if not await session.feed_burst(burst):
                break
        except Exception as error:
            found.fail(f"{type(error).__name__}: {error}", burst[0][:64])
            break
    return sum(mutated)


async def fuzz(messages: list[bytes], seconds: float, seed: int) -> dict[str, Any]:
    """Run until `seconds` have passed. `failures` is empty if everything held."""
    rand, found = random.Random(seed), Findings()
    good = await replay(messages)
    relations = [m for m in messages if m[:1] == b"R"]
    begins = [index for index, m in enumerate(messages) if m[:1] == b"B"]
    for _ in found.rounds(seconds, MEMORY_LIMIT_MIB):
        found.sessions += 1
        session = Session(found, parks=rand.random() < 0.5)
        start, rate = rand.choice(begins), rand.choice((0.0, MUTATED / 8, MUTATED, 0.5))
        stream = relations + messages[start : start + rand.choice((20, 200))]
        if rand.random() < 0.5:
            found.mutated += await fuzz_bursts(session, found, stream, rate, messages, rand)
            found.fragments += session.sink.taken
            await session.aclose()
            continue
        for lsn, good_message in enumerate(stream, 1):
            message = good_message
            if rand.random() < rate:
                found.mutated += 1
                message = mutate(rand, message, messages)
            for _ in range(rand.choice((0, 2)) if rand.random() < rate / 10 else 1):
                found.messages += 1
                try:
                    alive = await session.feed(lsn, message)
                except Exception as error:
                    found.fail(f"{type(error).__name__}: {error}", message[:64])
                    alive = False
            if not alive:
                break
        found.fragments += session.sink.taken
        await session.aclose()
        if found.sessions % 200 == 0 and await replay(messages) != good:
            found.fail("the good stream gives other fragments than before")
    return {
        "corpus": len(messages), "sessions": found.sessions, "messages": found.messages, "mutated": found.mutated,
        "poisoned": found.poisoned, "set_aside": found.set_aside, "fragments": found.fragments,
        "ends": dict(found.ends), "longest_ms": round(found.longest_s * 1000, 2),
        "memory_mib": found.memory_mib, "failures": dict(found.failures),
        "examples": found.examples,
    }  # fmt: skip


@contextmanager
def database(directory: Path) -> Iterator[str]:
    with EmbeddedPostgres(directory / "data", settings=SETTINGS) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE DATABASE fuzz")
        yield server.dsn_for("fuzz")


def run(seconds: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, database(Path(directory)) as dsn:
        messages = corpus(dsn)
    return asyncio.run(fuzz(messages, seconds, seed))
