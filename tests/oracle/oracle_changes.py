"""Random changes of the tables' descriptions, concurrent with the writers and through their gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from oracle_load import Worker
from oracle_tables import LEDGER, Column, Table, identifier, random_column
from oracle_types import ENUM, MOODS, VALUES, WIDER


class Changer(Worker):
    """Changes descriptions, and notes each change in the tables once it is committed."""

    def __init__(self, *args: Any, make: Callable[[], Table]) -> None:
        super().__init__(*args)
        self._make = make

    def step(self, connection: psycopg.Connection[Any]) -> None:
        if self.paused:
            return
        rand = self.rand
        weighed: list[tuple[float, Callable[[psycopg.Cursor[Any], Table], Callable[[], None] | None]]] = [
            (5, self._add), (5, self._widen), (1, self._rename), (1, self._remove), (0.7, self._table_gone),
            (1, self._table_new), (1.5, self._partition), (0.5, self._mood),
        ]  # fmt: skip
        (kind,) = rand.choices([k for _, k in weighed], [w for w, _ in weighed])
        cursor = connection.cursor()
        done = kind(cursor, rand.choice(self.there()))
        if done is None:
            connection.rollback()
            return
        cursor.execute(LEDGER, (f"ddl {kind.__name__[1:]}",))
        connection.commit()
        done()
        self.counts[kind.__name__[1:]] += 1

    def _changed(
        self, cursor: psycopg.Cursor[Any], table: Table, columns: list[Column], what: str, breaks: bool
    ) -> Any:
        after = Table(table.number, table.schema, table.name, columns, table.key, table.partitions)
        for statement in [after.watcher(), *after.written_down_again()]:
            cursor.execute(statement)

        def done() -> None:
            before, now = set(table.names), set(after.names)
            table.again |= (now - before) & table.left
            table.left |= before - now
            table.columns = columns
            table.changed.append(what)
            if breaks:
                table.broken.append(what)
                table.breaks += 1

        return done

    def _add(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        column = random_column(self.rand, table.names)
        if self.rand.random() < 0.5:
            column.default = VALUES[column.kind](self.rand)
        cursor.execute(f"ALTER TABLE {table.sql_name} ADD COLUMN {column.sql}")
        return self._changed(cursor, table, [*table.columns, column], f"add {column.name!r} {column.kind}", False)

    def _widen(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        wide = [c for c in table.columns if c.kind in WIDER and not (table.partitions and c.name in table.key)]
        if not wide:
            return None
        column = self.rand.choice(wide)
        kind = WIDER[column.kind]
        table.rewritten = table.rewritten or kind in ("integer", "bigint", "double precision")
        cursor.execute(f"ALTER TABLE {table.sql_name} ALTER COLUMN {identifier(column.name)} TYPE {kind}")
        columns = [Column(c.name, kind, c.default) if c is column else c for c in table.columns]
        return self._changed(cursor, table, columns, f"widen {column.name!r} to {kind}", False)

    def _rename(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        if not table.others:
            return None
        column = self.rand.choice(table.others)
        name = random_column(self.rand, table.names, column.kind).name
        change = f"RENAME COLUMN {identifier(column.name)} TO {identifier(name)}"
        cursor.execute(f"ALTER TABLE {table.sql_name} {change}")
        columns = [Column(name, c.kind, c.default) if c is column else c for c in table.columns]
        return self._changed(cursor, table, columns, f"rename {column.name!r} to {name!r}", True)

    def _remove(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        if not table.others:
            return None
        column = self.rand.choice(table.others)
        cursor.execute(f"ALTER TABLE {table.sql_name} DROP COLUMN {identifier(column.name)}")
        columns = [c for c in table.columns if c is not column]
        return self._changed(cursor, table, columns, f"drop {column.name!r}", True)

    def _table_gone(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        if len(self.there()) < 3:
            return None
        cursor.execute(f"DROP TABLE {table.sql_name}")

        def done() -> None:
            table.gone = True

        return done

    def _table_new(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        if len(self.there()) > 5:
            return None
        made = self._make()
        for statement in made.ddl():
            cursor.execute(statement)
        return lambda: self._tables.append(made)  # type: ignore[attr-defined]

    def _partition(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        """Add a partition, if possible. Rows written before it gets an identity may park the table."""
        if not table.partitions or table.partitions > 3:
            return None
        cursor.execute(table.partition(table.partitions))

        def done() -> None:
            table.partitions += 1
            table.broken.append("a new partition")
            table.changed.append("a new partition")

        return done

    def _mood(self, cursor: psycopg.Cursor[Any], table: Table) -> Any:
        cursor.execute(f"ALTER TYPE {ENUM} ADD VALUE IF NOT EXISTS '{MOODS[-1]}'")
        return lambda: None
