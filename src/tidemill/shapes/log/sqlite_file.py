"""The file of one captured database's shape logs. Synchronous; whoever calls it does so on a thread.

    owner   one row: the layout, and the name under which the capture's row knows this file
    shapes  id · handle · record (opaque to this room) · snapshot that the base was read in ·
            chunks of the base · newest item's place · sizes
    base    id · chunk → JSON objects, joined
    items   id · tx · op → JSON object
    crc     in each row of the three: CRC32C of its record or JSON and of its place, for SQLite has no checksums

D1  A flush is one transaction, and durable when it returns: new shapes with their base, items, ends, the owner's name.
D2  A shape is there when its row is. Rows of `base` and `items` without it are leftovers: nobody reads them, ids are
    not given twice while there are any, and `clear` takes them away a little at a time.
D3  A file that cannot be read, or is of another layout, is thrown away: what it held can be fetched again.
D5  What was damaged is never read as something else: a shape whose record is ends when it is restored, one whose rows
    are ends with the first read of them (Corrupt).
D4  One process at a time: the lock beside the file goes with its process.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import crc32c
import msgspec

from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.runtime.private_directories import make_private_directory

LAYOUT = 3
TABLES = """
CREATE TABLE owner (one INTEGER PRIMARY KEY CHECK (one = 1), layout INTEGER, name TEXT);
CREATE TABLE shapes (id INTEGER PRIMARY KEY, handle TEXT, record BLOB, snapshot TEXT, chunks INTEGER,
                     tx INTEGER, op INTEGER, base_bytes INTEGER, log_bytes INTEGER, crc INTEGER);
CREATE TABLE base (id INTEGER, chunk INTEGER, json BLOB, crc INTEGER, PRIMARY KEY (id, chunk));
CREATE TABLE items (id INTEGER, tx INTEGER, op INTEGER, json BLOB, crc INTEGER, PRIMARY KEY (id, tx, op)) WITHOUT ROWID;
"""
LEFTOVERS = """
WITH RECURSIVE seen(id) AS (
    SELECT min(id) FROM {table}
    UNION ALL SELECT (SELECT min(id) FROM {table} WHERE id > seen.id) FROM seen WHERE seen.id IS NOT NULL)
SELECT id FROM seen WHERE id < ? AND NOT EXISTS (SELECT 1 FROM shapes WHERE shapes.id = seen.id)
"""
NO_ID = (1 << 63) - 1

CLEARED_ROWS = 2_000
"""Taken away in one transaction, so that a flush never waits for long."""

VACUUM_PAGES = 256
"""Given back to the file system after each of these."""

DAMAGED = b""
"""In place of a record that is not what was written: no record reads like that."""

BUSY_MS = 5_000

SYNCHRONOUS = "FULL"
"""A flush that returned is durable, whatever happens to the machine."""


class Item(msgspec.Struct, frozen=True, gc=False):
    tx: int
    op: int
    json: bytes


class Saved(msgspec.Struct, frozen=True):
    """A shape as the file holds it. `end`: tx and op of its newest item, (0, 0) without one."""

    id: int
    handle: str
    record: bytes
    snapshot: str
    chunks: int
    end: tuple[int, int]
    base_bytes: int
    log_bytes: int


class Written(msgspec.Struct, frozen=True):
    """What one flush writes of one shape. `saved`: its row, when it is new; before that it has a base only."""

    id: int
    base: Sequence[tuple[int, bytes]]
    items: Sequence[Item]
    log_bytes: int
    saved: Saved | None = None


class Flush(msgspec.Struct, frozen=True):
    """`anew`: nothing that the file held before is there any more."""

    owner: str
    anew: bool
    written: Sequence[Written]
    ended: Sequence[int]


class ShapeFile:
    """Raises UnavailableError from every method but `close` when the disk or SQLite does not do it; a flush that raised
    may have happened, and does no harm when it is made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._readers: list[apsw.Connection] = []
        self._writer: apsw.Connection | None = None
        self.holds_shapes = False
        """When it was opened."""
        self.next_id = 1
        """Above every id that anything in the file had then (D2)."""
        try:
            make_private_directory(path.parent)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"shapes cannot be kept: path={path} error={error.strerror!r}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UnavailableError(
                f"another process keeps its shapes here: path={path}.", fix="Give each node a name of its own."
            ) from error

    # -- opening -----------------------------------------------------------------------------------------------

    def open(self) -> str:
        """The owner's name; "" of a new file. What cannot be read goes (D3)."""
        try:
            return self._open()
        except (apsw.CorruptError, apsw.NotADBError, _OtherLayout):
            self.remove()
        except apsw.Error as error:
            raise self._failed(error) from error
        try:
            return self._open()
        except (apsw.Error, _OtherLayout) as error:
            raise self._failed(error) from error

    def known_as(self) -> str:
        """The owner's name of a file that is not open; "" of one that holds nothing, or cannot be read (D3)."""
        if not self.path.exists():
            return ""
        connection: apsw.Connection | None = None
        try:
            connection = self._connect()
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)  # it may be much, and for nothing
            return "".join(str(name) for (name,) in connection.execute("SELECT name FROM owner"))
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
            return ""
        except apsw.Error as error:
            raise self._failed(error) from error
        finally:
            if connection is not None:
                connection.close(True)

    def _open(self) -> str:
        writer = self._connect()
        self._writer = writer
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        writer.execute("PRAGMA journal_size_limit = 16777216")
        writer.execute("BEGIN IMMEDIATE")
        if not writer.execute("SELECT 1 FROM sqlite_schema WHERE name = 'owner'").fetchall():
            writer.execute(TABLES)
            writer.execute("INSERT INTO owner VALUES (1, ?, '')", (LAYOUT,))
        layout, name = writer.execute("SELECT layout, name FROM owner").fetchall()[0]
        writer.execute("COMMIT")
        if layout != LAYOUT:
            raise _OtherLayout(f"layout={layout} known={LAYOUT}")
        newest = [_number(writer, f"SELECT max(id) FROM {table}") for table in ("shapes", "base", "items")]
        self.holds_shapes = newest[0] > 0
        self.next_id = 1 + max(newest)
        return str(name)

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(BUSY_MS)
        return connection

    def saved(self) -> list[Saved]:
        rows: list[tuple[Any, ...]] = self._run(
            "SELECT id, handle, record, snapshot, chunks, tx, op, base_bytes, log_bytes, crc FROM shapes ORDER BY id"
        )
        return [
            Saved(
                key, handle, record if _crc(record, key) == crc else DAMAGED, snapshot, chunks, (tx, op), base_bytes,
                log_bytes,
            )
            for key, handle, record, snapshot, chunks, tx, op, base_bytes, log_bytes, crc in rows
        ]  # fmt: skip

    # -- writing -----------------------------------------------------------------------------------------------

    def flush(self, flush: Flush) -> None:
        """D1."""
        writer = self._writing()
        try:
            writer.execute("BEGIN IMMEDIATE")
            try:
                if flush.anew:
                    writer.execute("DELETE FROM shapes")
                writer.executemany("DELETE FROM shapes WHERE id = ?", [(gone,) for gone in flush.ended])
                self._write(writer, flush.written)
                writer.execute("UPDATE owner SET name = ?", (flush.owner,))
                writer.execute("COMMIT")
            finally:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
        except apsw.Error as error:
            raise self._failed(error) from error

    @staticmethod
    def _write(writer: apsw.Connection, written: Sequence[Written]) -> None:
        """Of all of them together: a statement for each would cost more than the rows."""
        bases = [(each.id, n, json, _crc(json, each.id, n)) for each in written for n, json in each.base]
        writer.executemany("INSERT OR REPLACE INTO base VALUES (?, ?, ?, ?)", bases)
        items = [
            (each.id, item.tx, item.op, item.json, _crc(item.json, each.id, item.tx, item.op))
            for each in written
            for item in each.items
        ]
        writer.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", items)
        rows = [
            (s.id, s.handle, s.record, s.snapshot, s.chunks, *s.end, s.base_bytes, s.log_bytes, _crc(s.record, s.id))
            for s in (each.saved for each in written)
            if s is not None
        ]
        writer.executemany("INSERT OR REPLACE INTO shapes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        known = [each for each in written if each.saved is None]
        ends = [(each.items[-1].tx, each.items[-1].op, each.log_bytes, each.id) for each in known if each.items]
        writer.executemany("UPDATE shapes SET tx = ?, op = ?, log_bytes = ? WHERE id = ?", ends)

    def leftovers(self, before: int = NO_ID) -> list[int]:
        """Ids below `before` that have something in `base` or `items`, and no row (D2); one step of an index for each
        id that is there."""
        writer = self._writing()
        found: set[int] = set()
        try:
            for table in ("base", "items"):
                found.update(int(key) for (key,) in writer.execute(LEFTOVERS.format(table=table), (before,)))
        except apsw.Error as error:
            raise self._failed(error) from error
        return sorted(found)

    def clear(self, key: int) -> bool:
        """Take away some of what is left of a shape that is over. Whether there is more."""
        writer = self._writing()
        try:
            for table, order, rows in (("items", "tx, op", CLEARED_ROWS), ("base", "chunk", 1)):
                some = f"SELECT {order} FROM {table} WHERE id = ? ORDER BY {order} LIMIT ?"
                writer.execute(f"DELETE FROM {table} WHERE id = ? AND ({order}) IN ({some})", (key, key, rows))
                if writer.changes():
                    writer.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
                    return True
        except apsw.Error as error:
            raise self._failed(error) from error
        return False

    # -- reading -----------------------------------------------------------------------------------------------

    def base(self, key: int, chunk: int) -> bytes:
        """b"" when it is gone: its shape is over. Raises CorruptError as well."""
        found = self._run("SELECT json, crc FROM base WHERE id = ? AND chunk = ?", (key, chunk))
        if not found:
            return b""
        json, crc = found[0]
        if _crc(json, key, chunk) != crc:
            raise self._damaged(f"id={key} chunk={chunk}")
        return bytes(json)

    def items(self, key: int, after: tuple[int, int], upto: tuple[int, int], size_bytes: int) -> list[Item]:
        """In order, later than `after` and not later than `upto`, until they are `size_bytes`; at least one, if any.
        Raises CorruptError as well."""
        connection, found, size = self._reading(), list[Item](), 0
        try:
            rows = connection.execute(
                "SELECT tx, op, json, crc FROM items WHERE id = ? AND (tx, op) > (?, ?) AND (tx, op) <= (?, ?)"
                " ORDER BY tx, op",
                (key, *after, *upto),
            )
            for tx, op, json, crc in rows:
                if _crc(json, key, tx, op) != crc:
                    raise self._damaged(f"id={key} tx={tx} op={op}")
                found.append(Item(tx, op, bytes(json)))
                size += len(json)
                if size >= size_bytes:
                    break
            rows.close()
        except apsw.Error as error:
            raise self._failed(error) from error
        return found

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Idempotent. No call is under way."""
        for connection in [*self._readers, *([self._writer] if self._writer is not None else [])]:
            with suppress(apsw.Error):
                connection.close(True)
        self._readers, self._writer, self._local = [], None, threading.local()

    def release(self) -> None:
        """Close, and let another process have the file."""
        self.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self, aside: Path | None = None) -> None:
        """Close it and throw it away; or put it `aside`, where that would take long."""
        self.close()
        try:
            if aside is not None:
                self.path.replace(aside)
            for end in ("", "-wal", "-shm"):
                Path(f"{self.path}{end}").unlink(missing_ok=True)
        except OSError as error:
            raise UnavailableError(f"shapes cannot be kept: path={self.path} error={error.strerror!r}.") from error

    def size_bytes(self) -> int:
        """Of the file and its write-ahead log."""
        total = 0
        for end in ("", "-wal"):
            with suppress(FileNotFoundError):
                total += os.stat(f"{self.path}{end}").st_size
        return total

    def _writing(self) -> apsw.Connection:
        if self._writer is None:
            self.open()
        assert self._writer is not None
        return self._writer

    def _reading(self) -> apsw.Connection:
        """This thread's own connection."""
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if self._lock < 0:
            raise UnavailableError("the shapes' file was let go of.")
        if connection is None:
            try:
                connection = self._connect()
            except apsw.Error as error:
                raise self._failed(error) from error
            self._local.connection = connection
            self._readers.append(connection)
        return connection

    def _run(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._reading().execute(sql, values).fetchall()
        except apsw.Error as error:
            raise self._failed(error) from error

    def _damaged(self, where: str) -> CorruptError:
        return CorruptError(
            f"a shape's stored log is damaged: path={self.path} {where}.", fix="Check the health of its disk."
        )

    def _failed(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"the shapes' file failed: path={self.path} error={error}.", fix="Check the space and health of its disk."
        )


def _crc(data: bytes, *place: int) -> int:
    return int(crc32c.crc32c(data, sum(place) & 0xFFFFFFFF))


def _number(db: apsw.Connection, sql: str) -> int:
    ((value,),) = db.execute(sql).fetchall()
    return int(value or 0)


class _OtherLayout(Exception):
    pass
