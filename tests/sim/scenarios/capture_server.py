"""Model of PostgreSQL in place of connections and SQL: the answers to a session's queries, and its replication stream.

Every query takes a while. Connections are refused and cut until the world is healed. A status in flight at the end of
its connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from typing import Any
from zlib import crc32

from sim.scenarios.capture_database import STRANGER, Contents, Database, Standby, Taken, messages
from sim.world import swapped
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog import catalog_cache
from tidemill.capture.catalog.columns import ColumnAttributes, TableAttributes
from tidemill.capture.catalog.foreign_publications import Objection
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.changes import Relation, Row
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres import control_connection
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.postgres.standby_status import Keepalive
from tidemill.capture.postgres.timeline import Timeline
from tidemill.capture.session import bootstrap, continuity_check, relation_tracker, server_watch, session, table_adder
from tidemill.capture.setup import session_lock
from tidemill.capture.setup.publication import PublishedTable, PublishRequest, PublishResult
from tidemill.capture.setup.server_checks import ServerFacts, SlotState
from tidemill.capture.snapshot import copier
from tidemill.capture.tables import catalog_watcher, context, publication_repair, schema_change

POLL_S = 0.02
KEEPALIVE_S = 1.0
LOCK_WAIT_S = 0.5
BLOCKS = 8
"""Number of blocks of each table."""


class Server:
    """Server of one database. `on_status(flushed)` is called for a status: everything up to `flushed` is durable."""

    def __init__(self, db: Database, on_status: Callable[[int], None], *, late_publication: bool = False) -> None:
        self.db = db
        self.world = db.world
        self.on_status = on_status
        self.late_publication = late_publication
        self.looks = 0
        self.late: set[int] = set()
        """Tables to publish after the snapshot was read (planted fault late-publication)."""
        self.servers = 1
        """Number of servers that this address has had."""
        self.cuts = self.world.source.choice((0.0, 0.0, 0.01, 0.04))
        self.unreadable = self.world.source.choice((0.0, 0.0, 0.3))

    async def asked(self) -> None:
        """Delay a query, or cut the connection. Raises UnavailableError."""
        source = self.world.source
        await asyncio.sleep(source.uniform(0, 0.02) if source.random() < 0.5 else 0)
        self.cut("a question")

    def cut(self, what: str) -> None:
        if not self.world.faults.healed and self.world.source.random() < self.cuts:
            raise UnavailableError(f"the connection was cut: at={what!r}.")

    def infos(self) -> list[TableInfo]:
        return [
            TableInfo(r.oid, r.schema, r.table, "r", "p", "f", True, digest=str(r.oid))
            for r in self.db.relations.values()
        ]

    async def publish(self, oids: Sequence[int], settle: Container[int]) -> set[int]:
        """Publish tables once no transaction writes them (SHARE lock), and wait for the writers of tables that are
        published already. Return the tables whose writers did not end in time."""
        published = self.db.publication
        assert published is not None
        failed: set[int] = set()
        for oid in oids:
            new, waited_s = oid not in published, 0.0
            behind = self.db.writers_of(oid) if new or oid in settle else []
            while behind and waited_s < LOCK_WAIT_S:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
                writers = self.db.writers_of(oid)
                behind = [txn for txn in writers if new or any(txn is each for each in behind)]
            if behind:
                failed.add(oid)
            elif self.late_publication and oid not in published:
                self.late.add(oid)
            else:
                published.add(oid)
        return failed

    def fail_over(self, to: Standby) -> None:
        """Cut every connection, and move the address to another server."""
        self.servers += 1
        self.late.clear()
        self.db.fail_over(to)

    def publish_late(self) -> None:
        if self.db.publication is not None:
            self.db.publication |= self.late
        self.late.clear()


class ServerWire:
    """Ordinary connection. It answers only plain SQL; the functions below replace the other queries."""

    target = "server=sim"
    server_version = 180_000
    database = "sim"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._number = server.servers

    @property
    def server(self) -> Server:
        """Server of this connection. Raises UnavailableError if the address has moved to another server."""
        if self._number != self._server.servers:
            raise UnavailableError("the server is gone, and the connection with it.")
        return self._server

    async def query(self, sql: str) -> list[tuple[str | None, ...]]:
        await self.server.asked()
        return []

    async def value(self, sql: str) -> str | None:
        await self.server.asked()
        assert "pg_current_wal_insert_lsn" in sql, sql
        return str(Lsn(self.server.db.lsn + 1))

    async def aclose(self) -> None:
        return None


class Connections:
    """Replacement of the class PgConnection."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def connect(self, dsn: str, *, replication: bool = False, purpose: str, capture: str = "") -> ServerWire:
        await self._server.asked()
        return ServerWire(self._server)


class Stream:
    """Replacement of ReplicationStream: transactions from the slot's position on, with keepalives in between."""

    def __init__(self, wire: ServerWire) -> None:
        self._wire = wire
        self._queue: deque[FramedMessage | Keepalive] = deque()
        self._described: set[int] = set()
        self._closed = False
        self._reads = random.Random(f"reads {wire.server.world.seed}")  # the rest of a world does not depend on it
        self._depth = self._reads.choice((30, 200)) if wire.server.world.seed % 7 in (3, 4) else 1
        """Number of messages up to which the server writes ahead. In the worlds above 1 a read delivers several
        transactions; the others include every seed that once failed for a real fault."""

    @property
    def _server(self) -> Server:
        return self._wire.server

    @property
    def _db(self) -> Database:
        return self._wire.server.db

    async def start(self, slot: str, publication: str) -> None:
        await self._server.asked()
        assert self._db.confirmed is not None
        self._sent = self._db.confirmed
        self._at = next((i for i, txn in enumerate(self._db.log) if txn.lsn > self._sent), len(self._db.log))

    async def receive(self) -> list[bytes]:
        source, world = self._server.world.source, self._server.world
        await asyncio.sleep(source.uniform(0, 0.1) if source.random() < 0.3 else 0)
        self._server.cut("the stream")
        if not self._queue and self._at == len(self._db.log):
            self._db.moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S):
                    await self._db.moved.wait()
        if not self._queue:
            self._fill()
        some = source.choice((1, 2, 50))
        if self._depth > 1 and self._reads.random() < 0.8:
            await asyncio.sleep(self._reads.uniform(0, 0.5))
            self._fill()
            some = self._depth
        items = [self._queue.popleft() for _ in range(min(some, len(self._queue)))]
        world.trace(
            f"stream gives {[str(i.lsn) + chr(i.payload[0]) if isinstance(i, FramedMessage) else i for i in items]}"
        )
        return [_frame(item) for item in items]

    def _fill(self) -> None:
        source, queue = self._server.world.source, self._queue
        while self._at < len(self._db.log) and len(queue) < self._depth:
            txn = self._db.log[self._at]
            self._at += 1
            if not txn.sent:
                continue
            if source.random() < 0.3 and self._sent < txn.lsn:
                # The next record may be this commit, so the server can promise nothing beyond its start.
                queue.append(Keepalive(source.randint(self._sent + 1, txn.lsn), False))
            for number, item in enumerate(messages(txn, self._described, self._db.relations)):
                if number and source.random() < 0.1:
                    queue.append(Keepalive(txn.lsn + 1, False))
                queue.append(item)
            self._sent = txn.lsn
        if not queue:
            self._sent = self._db.lsn
            queue.append(Keepalive(self._sent + 1, False))

    async def send_status(self, update: bytes) -> None:
        _, _, flushed, _, _, _ = struct.unpack(">cqqqqB", update)
        world = self._server.world
        world.trace(f"status flushed={flushed - 1}")
        self._server.on_status(flushed - 1)
        # In this life's context: a status in flight at the end of the connection is lost.
        world.loop.call_later(world.source.uniform(0, 0.05), self._reported, flushed - 1)

    def _reported(self, flushed: int) -> None:
        with contextlib.suppress(UnavailableError):
            if not self._closed and self._db.confirmed is not None:
                self._db.confirmed = max(self._db.confirmed, flushed)

    async def aclose(self) -> None:
        self._closed = True


def _frame(item: FramedMessage | Keepalive) -> bytes:
    """Encode an item as sent over the wire (status.py)."""
    if isinstance(item, FramedMessage):
        return struct.pack(">cqqq", b"w", item.lsn, item.lsn, 0) + item.payload
    return struct.pack(">cqqB", b"k", item.wal_end, 0, item.reply_requested)


class ServerSnapshot:
    """Replacement of copier.ExportedSnapshot."""

    def __init__(self, wire: ServerWire, tables: Sequence[TableInfo], progress: object) -> None:
        self._wire = wire
        self._taken: Taken | None = None
        self.tables = list(tables)
        self.relations: dict[int, Relation] = {}
        self.partitions: dict[int, tuple[int, ...]] = {}
        self.attributes: dict[int, TableAttributes] = {}

    @property
    def _server(self) -> Server:
        return self._wire.server

    async def open_snapshot(self) -> dict[str, TidemillError]:
        await self._server.asked()
        db = self._server.db
        self._taken = taken = db.snapshot()
        db.copies.append(taken.lsn)
        self.seen, self.lsn = taken.seen, taken.lsn
        self.relations = {table.oid: db.relations[table.oid] for table in self.tables}
        self.attributes = {oid: attributes(relation) for oid, relation in self.relations.items()}
        db.world.trace(f"snapshot {taken.seen} lsn={taken.lsn} tables={[table.name for table in self.tables]}")
        return {}

    async def estimate_rows(self) -> int:
        return 0

    async def count_blocks(self, table: TableInfo) -> tuple[int, int]:
        await self._server.asked()
        return BLOCKS, BLOCKS

    async def has_partition_attached_since(self, table: TableInfo, xid: int) -> bool:
        await self._server.asked()
        return False

    async def export(self) -> str:
        await self._server.asked()
        return "exported"

    async def join(self, wire: ServerWire, exported: str) -> None:
        await self._server.asked()

    async def rows(self, wire: ServerWire, table: TableInfo, condition: str = "") -> AsyncIterator[list[bytes]]:
        assert self._taken is not None
        world = self._server.world
        found: Contents = self._taken.rows[table.oid]
        low, high = _bounds(condition)
        for row in [row for row in found.values() if low <= _block(row) < high]:
            await self._server.asked()
            yield [_line(row)]
        if not world.faults.healed and world.source.random() < self._server.unreadable:
            raise InvalidError("a row cannot be read.")

    async def end(self) -> None:
        await asyncio.sleep(self._server.world.source.uniform(0, 0.2))
        self._server.publish_late()
        await self._server.asked()


def _block(row: Row) -> int:
    """Return the block of a row's version; an update moves the row."""
    return crc32(_line(row)) % BLOCKS


def _bounds(condition: str) -> tuple[int, int]:
    """Return the range of blocks that a chunk's condition selects."""
    low, high = re.search(r">= '\((\d+),0\)'", condition), re.search(r"< '\((\d+),0\)'", condition)
    return int(low[1]) if low is not None else 0, int(high[1]) if high is not None else BLOCKS


def _line(row: Row) -> bytes:
    """Format a row as COPY does; no value of this world needs an escape."""
    return ("\t".join("\\N" if value is None else value for value in row.values()) + "\n").encode()


# SQL ------------------------------------------------------------------------------------------------


async def _check_server(wire: ServerWire, config: CaptureConfig) -> ServerFacts:
    await wire.server.asked()
    return ServerFacts(wire.server_version, "sim", 60_000)


async def _identify(wire: ServerWire) -> Timeline:
    await wire.server.asked()
    return Timeline("sim", wire.server.db.history, wire.server.db.lsn + 1)


async def _yes(wire: ServerWire, config: CaptureConfig) -> bool:
    await wire.server.asked()
    return True


async def _no_name(wire: ServerWire) -> str:
    return ""


async def _nobody(wire: ServerWire, *_: object) -> None:
    await wire.server.asked()


async def _rows_now(*_: object) -> None:
    raise AssertionError("rows of this world have different contents")


async def _for_ever(*_: object) -> None:
    await asyncio.get_running_loop().create_future()


async def _slot_state(wire: ServerWire, slot: str) -> SlotState | None:
    await wire.server.asked()
    db = wire.server.db
    if db.confirmed is None:
        return None
    return SlotState(db.confirmed + 1, None, "reserved", 0, None, db.lsn + 1)


async def _create_slot(wire: ServerWire, config: CaptureConfig) -> SlotState:
    """Create the slot at a position where all committed transactions are visible."""
    db = wire.server.db
    db.confirmed = None
    await wire.server.asked()
    await db.world.until(lambda: db.settled, every_s=0.001)
    assert wire.server.db is db
    db.confirmed = db.slot_lsn = db.lsn
    db.world.trace(f"slot begins behind {db.lsn}")
    found = await _slot_state(wire, config.slot)
    assert found is not None
    return found


async def _create_publication(wire: ServerWire, publication: str) -> None:
    await wire.server.asked()
    wire.server.db.publication = {STRANGER} & wire.server.db.relations.keys()


async def _published_tables(
    wire: ServerWire, publication: str, *, manual: bool = False
) -> dict[int, PublishedTable] | None:
    await wire.server.asked()
    found = wire.server.db.publication
    return None if found is None else {oid: PublishedTable(f"t{oid}") for oid in sorted(found | wire.server.late)}


async def _publish(
    wire: ServerWire, config: CaptureConfig, request: PublishRequest, store: object, begin_table: object = None
) -> PublishResult:
    await wire.server.asked()
    tables = request.tables
    failed = await wire.server.publish([table.oid for table in tables], request.settle)
    newly = frozenset(table.oid for table in tables) - failed - {*request.published}
    locked = UnavailableError("its lock cannot be had.")
    return PublishResult(newly, {table.name: locked for table in tables if table.oid in failed})


async def _unpublish(wire: ServerWire, config: CaptureConfig, name: str) -> bool:
    await wire.server.asked()
    db, oid = wire.server.db, int(name.removeprefix("t"))
    if db.publication is None or db.writers_of(oid):
        return False
    db.publication.discard(oid)
    return True


async def _list_tables(wire: ServerWire) -> list[TableInfo]:
    await wire.server.asked()
    return wire.server.infos()


async def _list_tables_unless(wire: ServerWire, known: str, tables: list[TableInfo]) -> tuple[str, list[TableInfo]]:
    found = await _list_tables(wire)
    return (known, tables) if repr(found) == known else (repr(found), found)


async def _visible(wire: ServerWire) -> str:
    """Return a new number for each call, since the model alters tables outside of transactions."""
    wire.server.looks += 1
    return str(wire.server.looks)


async def _describe(wire: ServerWire, oids: Sequence[int]) -> dict[int, Relation]:
    await wire.server.asked()
    return {oid: wire.server.db.relations[oid] for oid in oids}


async def _describe_after(wire: ServerWire, xid: int, oid: int, *, whole: bool) -> Relation | None:
    await wire.server.asked()
    return wire.server.db.relations.get(oid)


async def _attributes_of(wire: ServerWire, oids: Sequence[int]) -> dict[int, TableAttributes]:
    await wire.server.asked()
    return {oid: attributes(relation) for oid, relation in wire.server.db.relations.items() if oid in oids}


def attributes(relation: Relation) -> TableAttributes:
    """Return the attributes of a table that is never altered."""
    columns = tuple(
        ColumnAttributes(c.name, number, c.type_oid, c.type_mod, c.type_name, c.key_index)
        for number, c in enumerate(relation.columns, 1)
    )
    return TableAttributes(columns, len(columns), 0, "files")


async def _objections(wire: ServerWire, config: CaptureConfig) -> dict[int, Objection]:
    return {}


async def _hazards(wire: ServerWire, publication: str, whole: bool) -> list[Any]:
    await wire.server.asked()
    return []


async def _heartbeat(wire: ServerWire) -> None:
    await wire.server.asked()
    db = wire.server.db
    txn = db.begin()
    db.commit(txn, message=True)
    db.show(txn)


@contextlib.contextmanager
def answering(server: Server) -> Iterator[None]:
    """Connect all sessions to this server while the context is active."""
    connections = Connections(server)
    with contextlib.ExitStack() as stack:
        for module, names in (
            (session, {
                "PgConnection": connections, "check_server": _check_server, "read_own_session": _no_name,
                "watch_blockers": _for_ever, "find_busy_walsender": _nobody, "ReplicationStream": Stream,
                "read_current_rows": _rows_now,
            }),
            (session_lock, {"try_advisory_lock": _yes}),
            (relation_tracker, {"describe_after": _describe_after}),
            (schema_change, {
                "read_attributes": _attributes_of, "describe_tables": _describe, "emit_heartbeat": _heartbeat,
            }),
            (control_connection, {"identify_timeline": _identify}),
            (server_watch, {"read_slot_state": _slot_state, "emit_heartbeat": _heartbeat}),
            (continuity_check, {"read_slot_state": _slot_state}),
            (bootstrap, {
                "read_slot_state": _slot_state, "create_slot": _create_slot, "create_publication": _create_publication,
                "publish_tables": _publish, "read_published_tables": _published_tables, "list_tables": _list_tables,
                "describe_tables": _describe, "read_attributes": _attributes_of, "find_objections": _objections,
            }),
            (context, {"read_published_tables": _published_tables, "find_objections": _objections}),
            (publication_repair, {
                "publish_tables": _publish, "unpublish_table": _unpublish, "find_hazards": _hazards,
            }),
            (catalog_cache, {"list_tables_if_changed": _list_tables_unless, "read_snapshot": _visible}),
            (catalog_watcher, {"describe_tables": _describe, "read_attributes": _attributes_of}),
            (table_adder, {
                "PgConnection": connections, "publish_tables": _publish, "describe_tables": _describe,
                "find_table_blocker": _nobody, "emit_heartbeat": _heartbeat,
            }),
            (copier, {"PgConnection": connections, "ExportedSnapshot": ServerSnapshot}),
        ):  # fmt: skip
            for name, value in names.items():
                stack.enter_context(swapped(module, name, value))
        yield
