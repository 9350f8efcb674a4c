"""A model of PostgreSQL as a capture sees it: transactions that begin, commit and become visible, one publication, one
slot, snapshots; and what every reader of it has to come to.

    begin ──► xid        write ──► edits, under locks        commit ──► LSN, in the stream        show ──► in snapshots

Commits are in the order of LSNs, xids in that of beginnings, visibility in any: two that do not conflict may become
visible the other way round. A change is carried by the stream where its table was published when it was written.
In some worlds keys are deferrable: rows swap and rotate theirs, and two hold one key in between.
A standby that is behind may take the place of the database (`standby`, `fail_over`): what committed since is gone, xids
and LSNs are given once more.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Column, Op, Relation, Row
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.postgres.pgoutput import POSTGRES_EPOCH_MS
from tidemill.capture.postgres.replication_stream import HEAD_BYTES, FramedMessage
from tidemill.sim.world import World

COLUMNS = (
    Column("id", 23, -1, "integer", 0, True),
    Column("v", 25, -1, "text", -1),
    Column("b", 25, -1, "text", -1),
)
WRITERS = 3
"""Each has keys of its own, so that only a TRUNCATE ever waits for another one."""
KEYS = 9
WIDE = "w" * 400
"""A value that no record of this world may have: the topic writer parks the table."""
VANISHING = "gone"
"""A row whose message comes without its body: the reader parks the table."""

STRANGER = 99
"""A table that somebody published by hand, and nobody captures: in half of the worlds."""

Contents = dict[str, Row]
"""By the primary key's text."""


class Edit(NamedTuple):
    oid: int
    op: Op
    old: Row | None
    new: Row | None
    carried: bool


class Wanted(NamedTuple):
    """A record that a topic has to hold."""

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
        """The stream tells it: it has something that is published, or a message."""
        self.taken: set[tuple[int, str]] = set()
        """Keys, with their tables, that rows took in it: these rows leave them no more, or only the database knew."""

    def of(self, oid: int) -> list[Edit]:
        return [edit for edit in self.edits if edit.oid == oid]

    def truncates(self, oid: int) -> bool:
        return any(edit.oid == oid and edit.op == "truncate" for edit in self.edits)


class Taken(NamedTuple):
    """A snapshot: what it says of itself, the xids that it really sees, and all rows in it."""

    seen: PgSnapshot
    lsn: int
    visible: frozenset[int]
    rows: dict[int, Contents]


class Standby(NamedTuple):
    """How far one has come that follows no more."""

    commits: int
    lsn: int
    xid: int
    publication: frozenset[int] | None
    confirmed: int | None
    """Of the slot, as it was kept in step; None = it was not"""
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
        """What committed, in order."""
        self.lsn = 100
        """Of the newest commit; the next record begins behind it."""
        self.moved = asyncio.Event()
        self.publication: set[int] | None = None
        self.history: tuple[tuple[int, int], ...] = ((1, 0),)
        """Its timelines (capture/postgres/timeline.py)."""
        self.fork_lsn: int | None = None
        """Where the newest of them began; None = it is the first one."""
        self.confirmed: int | None = None
        """What the slot was told, inclusive; None = there is no slot."""
        self.slot_lsn = 0
        """Where the slot began: what committed up to there is not in its stream."""
        self.snapshots: dict[tuple[PgSnapshot, int], Taken] = {}
        self.copies: list[int] = []
        """LSNs of those that tables were copied from."""
        self._xid = 700
        self._running: dict[int, Txn] = {}
        """Begun, and not visible yet."""
        self._current: dict[int, Contents] = {oid: {} for oid in self.relations}
        self._visible: dict[int, Contents] = {oid: {} for oid in self.relations}
        self._shown: set[int] = set()

    # transactions ---------------------------------------------------------------------------------
    def begin(self) -> Txn:
        self._xid += 1
        txn = self._running[self._xid] = Txn(self._xid)
        return txn

    def lives(self, txn: Txn) -> bool:
        """False: the server that it was begun on is gone."""
        return self._running.get(txn.xid) is txn

    def writers_of(self, oid: int) -> list[Txn]:
        """Who has its lock."""
        return [txn for txn in self._running.values() if any(edit.oid == oid for edit in txn.edits)]

    def write(self, txn: Txn, writer: int, text: str, oid: int = 0) -> None:
        """One random statement of `txn`, on any table unless it is named, if no lock is in its way."""
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
        """One statement that gives the writer's rows each other's keys, in any order: the key is checked at its end."""
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
        """Of one table, by one statement."""
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
        """From now on snapshots see it."""
        if not self.lives(txn):
            return
        del self._running[txn.xid]
        self._shown.add(txn.xid)
        for oid, rows in self._visible.items():
            applied(rows, txn.of(oid))

    def mend(self) -> None:
        """Rows that nobody can copy are taken away, so that in the end every table can be captured."""
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
        """No transaction is open."""
        return not self._running

    @property
    def settled(self) -> bool:
        """All that committed is visible."""
        return all(not txn.lsn for txn in self._running.values())

    def snapshot(self) -> Taken:
        running = frozenset(self._running)
        seen = PgSnapshot(min(running, default=self._xid + 1), self._xid + 1, running)
        rows = {oid: dict(found) for oid, found in self._visible.items()}
        taken = Taken(seen, self.lsn + 1, frozenset(self._shown), rows)
        self.snapshots[seen, taken.lsn] = taken
        return taken

    # another server in its place ------------------------------------------------------------------
    def standby(self) -> Standby:
        """One that has replayed all so far, and follows no more."""
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

    # what readers have to come to -------------------------------------------------------------------
    def select(self, oid: int, also: frozenset[int], lsn: int) -> Contents:
        """The table as of all transactions up to `lsn`, and those of `also`."""
        rows: Contents = {}
        for txn in self.log:
            if txn.lsn <= lsn or txn.xid in also:
                applied(rows, txn.of(oid))
        return rows

    def wanted(self, oid: int, held: frozenset[int], end_lsn: int, partitions: int) -> list[list[Wanted]]:
        """The records of each partition, of the transactions below `end_lsn` that the copy did not hold."""
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
    """Change the rows; of each edit, the row that holds the key that it leaves. In between two may hold one."""
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
    """The transaction as pgoutput tells it on a connection that has `described` these relations."""
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
    """A value of column b that an update left alone is TOASTed."""
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
