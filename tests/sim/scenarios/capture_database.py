"""Model of PostgreSQL as a capture sees it: transactions that begin, commit and become visible, one publication, one
slot, snapshots; and the state that every reader has to arrive at.

    begin ──► xid        write ──► edits, under locks        commit ──► LSN, in the stream        show ──► in snapshots

Commits are in the order of LSNs, xids in the order of beginnings, and visibility in any order: two transactions that do
not conflict may become visible in reverse. The stream carries a change if its table was published when it was written.
In some worlds keys are deferrable: rows swap and rotate their keys, and two rows hold one key in between.
A standby that is behind may replace the database (`standby`, `fail_over`): later commits are lost, and their xids and
LSNs are used again.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sim.world import World
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Column, Op, Relation, Row
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.postgres.pgoutput import POSTGRES_EPOCH_MS
from tidemill.capture.postgres.replication_stream import HEAD_BYTES, FramedMessage

COLUMNS = (
    Column("id", 23, -1, "integer", 0, True),
    Column("v", 25, -1, "text", -1),
    Column("b", 25, -1, "text", -1),
)
WRITERS = 3
"""Number of writers. Each has its own keys, so that only a TRUNCATE waits for another writer."""
KEYS = 9
WIDE = "w" * 400
"""Value that is too large for a record in this world: the topic writer pauses the table."""
VANISHING = "gone"
"""Value of a row whose message comes without its body: the reader pauses the table."""

STRANGER = 99
"""Table that was published by hand and is not captured, in half of the worlds."""

Contents = dict[str, Row]
"""Rows by the text of their primary key."""


class Edit(NamedTuple):
    oid: int
    op: Op
    old: Row | None
    new: Row | None
    carried: bool


class Wanted(NamedTuple):
    """Record that a topic must hold."""

    position: ChangePosition
    key: bytes | None
    value: bytes | None


class Txn:
    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.lsn = 0
        self.edits: list[Edit] = []
        self.tag = ""
        self.sent = False
        """True if the stream sends it: it contains a published change or a message."""
        self.taken: set[tuple[int, str]] = set()
        """(Table, key) that rows took in this transaction. They keep these keys; else only the database would know."""

    def of(self, oid: int) -> list[Edit]:
        return [edit for edit in self.edits if edit.oid == oid]

    def truncates(self, oid: int) -> bool:
        return any(edit.oid == oid and edit.op == "truncate" for edit in self.edits)


class Taken(NamedTuple):
    """Snapshot: its PostgreSQL description, the xids that it really sees, and all its rows."""

    seen: PgSnapshot
    lsn: int
    visible: frozenset[int]
    rows: dict[int, Contents]


class Standby(NamedTuple):
    """State of a standby that has stopped following."""

    commits: int
    lsn: int
    xid: int
    publication: frozenset[int] | None
    confirmed: int | None
    """Confirmed position of the slot, if the slot was synchronized, otherwise None."""
    slot_lsn: int


class Database:
    def __init__(self, world: World, tables: int, *, deferrable: bool = False) -> None:
        self.world = world
        self.rivals = random.Random(f"rivals {world.seed}") if deferrable else None
        self.relations = {
            oid: Relation(oid, "public", f"t{oid}", COLUMNS, deferrable=deferrable) for oid in range(1, tables + 1)
        }
        self.captured = list(self.relations)
        if world.source.random() < 0.5:
            self.relations[STRANGER] = Relation(STRANGER, "public", f"t{STRANGER}", COLUMNS)
        self.log: list[Txn] = []
        """Committed transactions, in order."""
        self.lsn = 100
        """LSN of the newest commit; the next record begins after it."""
        self.moved = asyncio.Event()
        self.publication: set[int] | None = None
        self.history: tuple[tuple[int, int], ...] = ((1, 0),)
        """Timelines of the server (capture/postgres/timeline.py)."""
        self.fork_lsn: int | None = None
        """LSN at which the newest timeline began; None for the first one."""
        self.confirmed: int | None = None
        """LSN confirmed to the slot, inclusive; None without a slot."""
        self.slot_lsn = 0
        """LSN at which the slot began: earlier commits are not in its stream."""
        self.snapshots: dict[tuple[PgSnapshot, int], Taken] = {}
        self.copies: list[int] = []
        """LSNs of the snapshots from which tables were copied."""
        self._xid = 700
        self._running: dict[int, Txn] = {}
        """Transactions that have begun and are not visible yet, by xid."""
        self._current: dict[int, Contents] = {oid: {} for oid in self.relations}
        self._visible: dict[int, Contents] = {oid: {} for oid in self.relations}
        self._shown: set[int] = set()

    # transactions ---------------------------------------------------------------------------------
    def begin(self) -> Txn:
        self._xid += 1
        txn = self._running[self._xid] = Txn(self._xid)
        return txn

    def lives(self, txn: Txn) -> bool:
        """Return False if the server on which the transaction began is gone."""
        return self._running.get(txn.xid) is txn

    def writers_of(self, oid: int) -> list[Txn]:
        """Return the transactions that hold the lock of the table."""
        return [txn for txn in self._running.values() if any(edit.oid == oid for edit in txn.edits)]

    def write(self, txn: Txn, writer: int, text: str, oid: int = 0) -> None:
        """Execute one random statement of `txn`, on `oid` or any table, unless a lock prevents it."""
        if not self.lives(txn):
            return
        source = self.world.source
        oid = oid or source.choice(list(self.relations))
        others = [other for other in self.writers_of(oid) if other is not txn]
        if any(other.truncates(oid) for other in others):
            return
        rows = self._current[oid]
        if source.random() < 0.04 and not others:
            self._edit(txn, Edit(oid, "truncate", None, None, self._carried(oid)))
            return
        number = source.randrange(writer, KEYS, WRITERS)
        old = rows.get(str(number))
        if old is None:
            new: Row = {"id": str(number), "v": text, "b": source.choice((None, "b" * 30))}
            self._edit(txn, Edit(oid, "insert", None, new, self._carried(oid)))
        elif (stays := (oid, str(number)) in txn.taken) or source.random() >= 0.3:
            free = [n for n in range(writer, KEYS, WRITERS) if str(n) not in rows and not stays]
            moved = {"id": str(source.choice(free))} if free and source.random() < 0.3 else {}
            self._edit(txn, Edit(oid, "update", old, {**old, "v": text, **moved}, self._carried(oid)))
        else:
            self._edit(txn, Edit(oid, "delete", old, None, self._carried(oid)))

    def permute(self, txn: Txn, writer: int, text: str) -> None:
        """Execute one statement that permutes the keys of the writer's rows; the key is checked at its end."""
        if self.rivals is None or self.rivals.random() < 0.5 or not self.lives(txn):
            return
        source, oid = self.rivals, self.rivals.choice(self.captured)
        if any(other.truncates(oid) for other in self.writers_of(oid) if other is not txn):
            return
        own, rows = [str(n) for n in range(writer, KEYS, WRITERS)], self._current[oid]
        moving = [k for k in own if k in rows and (oid, k) not in txn.taken and rows[k]["v"] not in (WIDE, VANISHING)]
        targets = source.sample([k for k in own if k in moving or k not in rows], len(moving))
        source.shuffle(moving)
        edits = [
            Edit(oid, "update", rows[k], {**rows[k], "id": target, "v": f"{text}.{k}"}, self._carried(oid))
            for k, target in zip(moving, targets, strict=True)
        ]
        self._edit(txn, *[edit for edit in edits if edit.old is not None and edit.new is not None])

    def _carried(self, oid: int) -> bool:
        return self.publication is not None and oid in self.publication

    def _edit(self, txn: Txn, *edits: Edit) -> None:
        """Apply the edits of one statement to one table."""
        for edit in edits:
            txn.edits.append(edit)
            if self.rivals is not None and edit.new is not None and (edit.old or {}).get("id") != edit.new["id"]:
                txn.taken.add((edit.oid, edit.new["id"] or ""))
        if edits:
            applied(self._current[edits[0].oid], edits)

    def commit(self, txn: Txn, *, message: bool = False) -> None:
        if not self.lives(txn):
            return
        self.lsn += self.world.source.randint(1, 4)
        txn.lsn = self.lsn
        txn.sent = message or bool(txn.tag) or any(edit.carried for edit in txn.edits)
        self.log.append(txn)
        self.world.trace(f"database commits {txn.xid} at {txn.lsn} edits={len(txn.edits)} tag={txn.tag}")
        self.moved.set()

    def show(self, txn: Txn) -> None:
        """Make the transaction visible to snapshots."""
        if not self.lives(txn):
            return
        del self._running[txn.xid]
        self._shown.add(txn.xid)
        for oid, rows in self._visible.items():
            applied(rows, txn.of(oid))

    def mend(self) -> None:
        """Delete the rows that cannot be copied, so that in the end every table can be captured."""
        txn = self.begin()
        for oid, rows in self._current.items():
            for row in [row for row in rows.values() if row["v"] in (WIDE, VANISHING)]:
                self._edit(txn, Edit(oid, "delete", row, None, self._carried(oid)))
        self.commit(txn)
        self.show(txn)

    def visible(self, xids: Iterable[int]) -> bool:
        return self._shown.issuperset(xids)

    @property
    def idle(self) -> bool:
        """True if no transaction is open."""
        return not self._running

    @property
    def settled(self) -> bool:
        """True if all committed transactions are visible."""
        return all(not txn.lsn for txn in self._running.values())

    def snapshot(self) -> Taken:
        running = frozenset(self._running)
        seen = PgSnapshot(min(running, default=self._xid + 1), self._xid + 1, running)
        rows = {oid: dict(found) for oid, found in self._visible.items()}
        taken = Taken(seen, self.lsn + 1, frozenset(self._shown), rows)
        self.snapshots[seen, taken.lsn] = taken
        return taken

    # failover to another server ------------------------------------------------------------------
    def standby(self) -> Standby:
        """Return a standby that has replayed everything so far and stops following."""
        published = None if self.publication is None else frozenset(self.publication)
        confirmed = self.confirmed if self.world.source.random() < 0.8 else None
        return Standby(len(self.log), self.lsn, self._xid, published, confirmed, self.slot_lsn)

    def fail_over(self, to: Standby) -> None:
        number, self.fork_lsn = self.history[-1][0], to.lsn + 1
        self.history = (*self.history[:-1], (number, self.fork_lsn), (number + 1, 0))
        self.world.trace(f"database fails over at {to.lsn}, {self.lsn - to.lsn} behind, slot at {to.confirmed}")
        del self.log[to.commits :]
        self.lsn, self._xid, self.confirmed, self.slot_lsn = to.lsn, to.xid, to.confirmed, to.slot_lsn
        self.publication = None if to.publication is None else set(to.publication)
        self.copies = [lsn for lsn in self.copies if lsn <= self.fork_lsn]
        self._running.clear()
        self._shown = {txn.xid for txn in self.log}
        for oid in self.relations:
            self._current[oid] = self.select(oid, frozenset(), self.lsn)
            self._visible[oid] = dict(self._current[oid])
        self.moved.set()

    # expected results of readers -------------------------------------------------------------------
    def select(self, oid: int, also: frozenset[int], lsn: int) -> Contents:
        """Return the table as of all transactions up to `lsn`, and those in `also`."""
        rows: Contents = {}
        for txn in self.log:
            if txn.lsn <= lsn or txn.xid in also:
                applied(rows, txn.of(oid))
        return rows

    def wanted(self, oid: int, held: frozenset[int], end_lsn: int, partitions: int) -> list[list[Wanted]]:
        """Return the records of each partition, from the transactions below `end_lsn` that the copy did not contain."""
        found: list[list[Wanted]] = [[] for _ in range(partitions)]

        def put(at: ChangePosition, key: Row, value: Row | None) -> None:
            data = _json({"id": int(key["id"] or 0)})
            row = None if value is None else _json({**value, "id": int(value["id"] or 0)})
            found[zlib.crc32(data) % partitions].append(Wanted(at, data, row))

        rows: Contents = {}
        for txn in self.log:
            stay = iter(applied(rows, txn.of(oid)))
            if txn.lsn >= end_lsn or txn.xid in held:
                continue
            ordinal = 0
            for edit in txn.edits:
                at = ChangePosition(txn.lsn, ordinal)
                ordinal += 2 * edit.carried
                if edit.oid != oid:
                    continue
                stays = next(stay)
                if edit.op == "truncate":
                    for partition in found:
                        partition.append(Wanted(at, None, None))
                elif edit.new is None:
                    put(at, edit.old or {}, stays)
                else:
                    if edit.old is not None and edit.old["id"] != edit.new["id"]:
                        put(at, edit.old, stays)
                        at = ChangePosition(at.commit_lsn, at.ordinal + 1)
                    put(at, edit.new, edit.new)
        return found


def applied(rows: Contents, edits: Iterable[Edit]) -> list[Row | None]:
    """Apply edits to the rows. Return for each edit the row that holds the key it leaves; two rows may share a key."""
    holders = {key: [row] for key, row in rows.items()}
    stay: list[Row | None] = []
    for edit in edits:
        if edit.op == "truncate":
            holders.clear()
        if edit.old is not None:
            left = holders[edit.old["id"] or ""]
            left.remove(edit.old)
        stay.append(left[-1] if edit.old is not None and left else None)
        if edit.new is not None:
            holders.setdefault(edit.new["id"] or "", []).append(edit.new)
    rows.clear()
    for key, found in holders.items():
        assert len(found) < 2, f"two rows have one key: {found}"
        if found:
            rows[key] = found[0]
    return stay


def _json(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode()


# the wire ---------------------------------------------------------------------------------------------


def messages(txn: Txn, described: set[int], relations: dict[int, Relation]) -> list[FramedMessage]:
    """Return the transaction as pgoutput sends it on a connection that has `described` these relations."""
    time_us = (txn.lsn + 1_000_000_000_000 - POSTGRES_EPOCH_MS) * 1000
    out = [FramedMessage(txn.lsn, b"B" + struct.pack(">qqI", txn.lsn, time_us, txn.xid))]
    if txn.tag:
        out.append(_message(txn, txn.tag.encode()))
    for edit in txn.edits:
        if not edit.carried:
            continue
        if edit.oid not in described:
            described.add(edit.oid)
            out.append(FramedMessage(txn.lsn, _described(relations[edit.oid])))
        data = _change(edit)
        vanishes = edit.new is not None and edit.new["v"] == VANISHING
        out.append(FramedMessage(txn.lsn, data[:HEAD_BYTES], 1 << 30) if vanishes else FramedMessage(txn.lsn, data))
    if len(out) == 1:
        out.append(_message(txn, b""))
    out.append(FramedMessage(txn.lsn, b"C" + struct.pack(">Bqqq", 0, txn.lsn, txn.lsn + 1, time_us)))
    return out


def _message(txn: Txn, content: bytes) -> FramedMessage:
    head = b"M" + struct.pack(">Bq", 1, txn.lsn) + b"tidemill\0"
    return FramedMessage(txn.lsn, head + struct.pack(">I", len(content)) + content)


def _described(relation: Relation) -> bytes:
    columns = b"".join(
        b"\1" + column.name.encode() + b"\0" + struct.pack(">Ii", column.type_oid, column.type_mod)
        for column in relation.columns
    )
    names = f"{relation.schema}\0{relation.table}\0f".encode()
    return b"R" + struct.pack(">I", relation.oid) + names + struct.pack(">H", len(relation.columns)) + columns


def _change(edit: Edit) -> bytes:
    oid = struct.pack(">I", edit.oid)
    match edit.op:
        case "insert":
            return b"I" + oid + b"N" + _values(edit.new, None)
        case "update":
            return b"U" + oid + b"O" + _values(edit.old, None) + b"N" + _values(edit.new, edit.old)
        case "delete":
            return b"D" + oid + b"O" + _values(edit.old, None)
        case "truncate":
            return b"T" + struct.pack(">IB", 1, 0) + oid


def _values(row: Row | None, old: Row | None) -> bytes:
    """Encode a row. A value of column b that an update did not change is sent as TOASTed."""
    assert row is not None
    out = struct.pack(">H", len(COLUMNS))
    for column in COLUMNS:
        value = row[column.name]
        if value is None:
            out += b"n"
        elif column.name == "b" and old is not None and old["b"] == value:
            out += b"u"
        else:
            out += b"t" + struct.pack(">I", len(value)) + value.encode()
    return out
