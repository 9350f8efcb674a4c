"""Random transactions, on separate connections.

Writers pass through a gate between two transactions, so that the world can stop all of them there. Statements that
PostgreSQL refuses (a key that exists, a deadlock, a column that has been dropped) are rolled back and counted. A
statement that fails because of a capture's change to its table is a defect of ours.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from oracle_tables import LEDGER, Column, Table, identifier
from oracle_types import VALUES, key_value

IDENTITY_REFUSED = ("55000", "42P10")
"""Errors of an UPDATE or DELETE on a table that has no replica identity, or one that a publication rules out
(`object_not_in_prerequisite_state`, `invalid_column_reference`)."""
SYNTAX_ERROR = "42601"
DISPLAY = (
    ("datestyle", "ISO, DMY"), ("timezone", "UTC"), ("intervalstyle", "iso_8601"), ("bytea_output", "hex"),
    ("extra_float_digits", "1"),
)  # fmt: skip


def connect(dsn: str, **options: Any) -> psycopg.Connection[Any]:
    settings = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in DISPLAY)
    return psycopg.connect(dsn, options=settings, **options)


class Gate:
    """A gate for writers; `closed()` waits until none is within a transaction."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._inside = 0

    @contextmanager
    def passing(self):  # type: ignore[no-untyped-def]
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self, timeout_s: float = 60.0):  # type: ignore[no-untyped-def]
        with self._changed:
            self._open = False
            assert self._changed.wait_for(lambda: self._inside == 0, timeout_s), "a writer hangs in its transaction"
        try:
            yield
        finally:
            with self._changed:
                self._open = True
                self._changed.notify_all()


def _check_who(connection: psycopg.Connection[Any], deadlock: str) -> None:
    """Check that no process of ours is part of a deadlock; transactions of the application may block each other. Raises
    AssertionError."""
    pids = [int(pid) for pid in re.findall(r"[Pp]rocess (\d+)", deadlock)]
    found = connection.execute("SELECT application_name FROM pg_stat_activity WHERE pid = ANY(%s)", [pids]).fetchall()
    connection.commit()
    assert not any(name.startswith("tidemill") for (name,) in found), f"{found}: {deadlock}"


class Worker(threading.Thread):
    """One connection and one source of randomness. `step` runs through the gate until `stop`."""

    def __init__(self, name: str, dsn: str, seed: str, tables: Sequence[Table], gate: Gate, pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self.rand = random.Random(f"{seed} {name}")
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.dsn = dsn
        """Address of the server, read between two transactions; a change leads to another server."""
        self.paused = False
        self._tables = tables
        self._gate = gate
        self._pause_s = pause_s
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._work(self.dsn)
        except BaseException as error:
            self.failure = error

    def _work(self, dsn: str) -> None:
        """Execute transactions until the work ends or moves to another server."""
        connection = connect(dsn)
        try:
            connection.execute("SET lock_timeout = '5s'")
            connection.commit()
            while not self._stopping.wait(self.rand.random() * 2 * self._pause_s):
                with self._gate.passing():
                    if self.dsn != dsn:
                        return
                    self._attempt(connection)
        finally:
            connection.close()

    def _attempt(self, connection: psycopg.Connection[Any]) -> None:
        try:
            self.step(connection)
        except psycopg.Error as error:
            connection.rollback()
            if error.sqlstate is None or error.sqlstate in (*IDENTITY_REFUSED, SYNTAX_ERROR):
                raise
            if isinstance(error, psycopg.errors.DeadlockDetected):
                _check_who(connection, str(error))
            self.counts[f"refused: {type(error).__name__}"] += 1

    def step(self, connection: psycopg.Connection[Any]) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)
        if self.failure is not None:
            raise self.failure

    def there(self) -> list[Table]:
        return [table for table in self._tables if not table.gone]


class Writer(Worker):
    truncates = True

    def step(self, connection: psycopg.Connection[Any]) -> None:
        rand, cursor = self.rand, connection.cursor()
        for _ in range(rand.choice([1, 1, 2, 3, 6])):
            table = rand.choice(self.there())
            if rand.random() < 0.2:
                cursor.execute("SAVEPOINT oracle")
                self._statement(cursor, table)
                if rand.random() < 0.6:
                    cursor.execute("ROLLBACK TO SAVEPOINT oracle")
                    continue
                cursor.execute("RELEASE SAVEPOINT oracle")
            else:
                self._statement(cursor, table)
        if rand.random() < 0.1:
            connection.rollback()
            self.counts["rolled back"] += 1
            return
        cursor.execute(LEDGER, (self.name,))
        connection.commit()
        self.counts["committed"] += 1

    def _statement(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        rand = self.rand
        weighed: list[tuple[float, Callable[[psycopg.Cursor[Any], Table], None]]] = [
            (10, self._insert), (10, self._update), (4, self._move), (2, self._swap), (2, self._without_change),
            (4, self._remove_row), (1.2, self._sweep), (0.5, self._many), (0.12 * self.truncates, self._truncate),
        ]  # fmt: skip
        if table.deferrable:
            weighed += [(6, self._shift), (3, self._exchange), (3, self._meet)]
        (kind,) = rand.choices([k for _, k in weighed], [w for w, _ in weighed])
        kind(cursor, table)
        self.counts[kind.__name__[1:] + " of a deferrable key" * (table.deferrable != "")] += 1

    def _value(self, table: Table, column: Column) -> str | None:
        if column.name in table.key:
            return key_value(self.rand, column.kind)
        if column.default is None and self.rand.random() < 0.2:
            return None
        return VALUES[column.kind](self.rand)

    def _key(self, table: Table) -> tuple[str, list[str | None]]:
        columns = [table.column(name) for name in table.key]
        test = " AND ".join(f"{_name(c)} = %s::{c.bare}" for c in columns)
        return test, [self._value(table, c) for c in columns]

    def _insert(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        rand = self.rand
        if table.deferrable:
            self._insert_free(cursor, table)
            return
        given = [c for c in table.columns if c.name in table.key or rand.random() < 0.8]
        count = rand.choice([1, 1, 2, 5, 40])
        row = f"({', '.join(f'%s::{c.bare}' for c in given)})"
        values = [self._value(table, c) for _ in range(count) for c in given]
        others = [c for c in given if c.name not in table.key]
        update = ", ".join(f"{_name(c)} = EXCLUDED.{_name(c)}" for c in others)
        upsert = f"({', '.join(map(_identifier, table.key))}) DO UPDATE SET {update}"
        conflict = upsert if others and count == 1 and rand.random() < 0.4 else "DO NOTHING"
        names = ", ".join(_name(c) for c in given)
        rows = ", ".join([row] * count)
        cursor.execute(f"INSERT INTO {_sql(table)} ({names}) VALUES {rows} ON CONFLICT {conflict}", values)

    def _insert_free(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Insert rows without ON CONFLICT, which cannot name a deferrable key. Some rows differ only in their key."""
        rand = self.rand
        given = [c for c in table.columns if c.name in table.key or rand.random() < 0.6]
        same = {c.name: self._value(table, c) for c in given}
        for _ in range(rand.choice([1, 1, 2, 5, 20])):
            test, key = self._key(table)
            values = {**same, **dict(zip(table.key, key, strict=True))}
            names, row = ", ".join(map(_name, given)), ", ".join(f"%s::{c.bare}" for c in given)
            cursor.execute(
                f"INSERT INTO {_sql(table)} ({names}) SELECT {row}"
                f" WHERE NOT EXISTS (SELECT FROM {_sql(table)} WHERE {test})",
                [*(values[c.name] for c in given), *key],
            )

    def _update(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        others = table.others
        changed = self.rand.sample(others, self.rand.randint(1, len(others))) if others else []
        if changed:
            test, key = self._key(table)
            change = ", ".join(f"{_name(c)} = %s::{c.bare}" for c in changed)
            values = [self._value(table, c) for c in changed]
            cursor.execute(f"UPDATE {_sql(table)} SET {change} WHERE {test}", [*values, *key])

    def _move(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Move a row to another key; occasionally a later move in the same transaction takes it to a third."""
        test, key = self._key(table)
        column = table.column(self.rand.choice(table.key))
        change = f"{_name(column)} = %s::{column.bare}"
        cursor.execute(f"UPDATE {_sql(table)} SET {change} WHERE {test}", [self._value(table, column), *key])

    def _swap(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        first = table.column(table.key[0])
        if first.kind not in ("integer", "bigint", "smallint") or len(table.key) > 1 or table.partitions:
            return
        a, b = self.rand.sample(range(1, 90), 2)
        for old, new in ((a, -7), (b, a), (-7, b)):
            change = f"UPDATE {_sql(table)} SET {_name(first)} = {new} WHERE {_name(first)} = {old}"
            cursor.execute(change, ())

    def _shift(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Move each row to the key of the next one, which leaves it later in the same statement."""
        numbers = [c for c in map(table.column, table.key) if c.kind in ("integer", "bigint", "smallint", "date")]
        if not numbers:
            return
        name = _name(self.rand.choice(numbers))
        order = f"(SELECT {name} FROM {_sql(table)} ORDER BY {name} OFFSET {self.rand.randint(0, 20)} LIMIT 1)"
        step = self.rand.choice(["+ 1", "- 1"])
        cursor.execute(f"UPDATE {_sql(table)} SET {name} = {name} {step} WHERE {name} >= {order}", ())

    def _exchange(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Let two rows exchange their keys in one statement, or three in a ring."""
        names = ", ".join(map(_identifier, table.key))
        cursor.execute(
            f"WITH chosen AS (SELECT {names} FROM {_sql(table)} ORDER BY random() LIMIT {self.rand.choice([2, 3])}),"
            f" ring AS (SELECT {names}, row_number() OVER (ORDER BY {names}) AS at FROM chosen),"
            f" pairs AS (SELECT a.*, {', '.join(f'b.{n} AS to_{i}' for i, n in enumerate(map(_identifier, table.key)))}"
            " FROM ring a JOIN ring b ON b.at = a.at %% (SELECT count(*) FROM ring) + 1)"
            f" UPDATE {_sql(table)} t SET"
            f" {', '.join(f'{n} = pairs.to_{i}' for i, n in enumerate(map(_identifier, table.key)))} FROM pairs WHERE"
            f" {' AND '.join(f't.{n} = pairs.{n}' for n in map(_identifier, table.key))}",
            (),
        )

    def _meet(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Let two rows hold one key across statements, then let the first leave it: for the other's key, or by its
        deletion. PostgreSQL refuses the first statement if the key is not deferred."""
        names = ", ".join(map(_identifier, table.key))
        cursor.execute("SET CONSTRAINTS ALL DEFERRED") if self.rand.random() < 0.5 else None
        cursor.execute(f"SELECT ctid::text, {names} FROM {_sql(table)} ORDER BY random() LIMIT 2 FOR UPDATE", ())
        rows = cursor.fetchall()
        if len(rows) < 2:
            return
        (a, *a_key), (b, *b_key) = rows
        taken = ", ".join(f"{n} = %s" for n in map(_identifier, table.key))
        change = f"UPDATE {_sql(table)} SET {taken} WHERE ctid = %s::tid"
        cursor.execute(change, [*b_key, a])
        if self.rand.random() < 0.7:
            cursor.execute(change, [*a_key, b])
        else:
            cursor.execute(f"DELETE FROM {_sql(table)} WHERE ctid = %s::tid", [b])

    def _without_change(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        column = _name(self.rand.choice(table.columns))
        cursor.execute(f"UPDATE {_sql(table)} SET {column} = {column}", ())

    def _remove_row(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        test, key = self._key(table)
        cursor.execute(f"DELETE FROM {_sql(table)} WHERE {test}", key)

    def _sweep(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Change many rows in one statement."""
        column = self.rand.choice(table.columns)
        if column.name in table.key:
            odds = f"hashtext({_name(column)}::text) %% 3 = {self.rand.randint(-2, 2)}"
            cursor.execute(f"DELETE FROM {_sql(table)} WHERE {odds}", ())
        else:
            change = f"{_name(column)} = %s::{column.bare}"
            cursor.execute(f"UPDATE {_sql(table)} SET {change}", [self._value(table, column)])

    def _many(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        """Insert more rows than a fragment holds; most of them are deleted in the same or a later transaction."""
        first = table.column(table.key[0])
        if first.kind not in ("integer", "bigint") or len(table.key) > 1 or table.partitions:
            return
        start = self.rand.choice([1_000, 2_000])
        free = f"WHERE NOT EXISTS (SELECT FROM {_sql(table)} WHERE {_name(first)} = g)"
        cursor.execute(
            f"INSERT INTO {_sql(table)} ({_name(first)}) SELECT g FROM generate_series({start}, {start + 700}) g"
            f" {free if table.deferrable else 'ON CONFLICT DO NOTHING'}",
            (),
        )
        if self.rand.random() < 0.6:
            cursor.execute(f"DELETE FROM {_sql(table)} WHERE {_name(first)} >= {start + 20}", ())

    def _truncate(self, cursor: psycopg.Cursor[Any], table: Table) -> None:
        table.rewritten = True
        cursor.execute(f"TRUNCATE {_sql(table)}", ())


def _identifier(name: str) -> str:
    """Quote an identifier for a statement with parameters, in which a percent sign has a meaning."""
    return identifier(name).replace("%", "%%")


def _name(column: Column) -> str:
    return _identifier(column.name)


def _sql(table: Table) -> str:
    return table.sql_name.replace("%", "%%")
