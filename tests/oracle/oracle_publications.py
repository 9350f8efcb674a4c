"""Publications of other owners over the same tables, created and dropped while the writers are paused.

They are plausible for an application: none of them rules out UPDATEs and DELETEs with the identity that the application
itself gave a table. A refused statement is therefore caused by the capture's change to the table. A column list rules
out `REPLICA IDENTITY FULL`; a table that got it from its capture must have its former identity again before the writers
continue.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
from oracle_tables import Table, identifier
from oracle_types import ENUM

from support.waiting import eventually

SAFE_S = 60.0
"""Limit for restoring an identity. The promise is two seconds while the capture runs; it may have been killed, on a
busy machine."""
WHOLE = (
    "SELECT count(*) FROM pg_class c WHERE c.relreplident = 'f' AND c.relkind = 'r' AND (c.oid = %(t)s::regclass"
    " OR c.oid IN (SELECT relid FROM pg_partition_tree(%(t)s::regclass)))"
)
ROOT = "publish_via_partition_root = true"
LISTS_SINCE = 15


class Publications:
    def __init__(self, rand: random.Random, tables: list[Table]) -> None:
        self._rand = rand
        self._tables = tables
        self._held: dict[str, Table | None] = {}
        self._made = 0
        self.counts: Counter[str] = Counter()
        self.safe_s: list[float] = []
        """Durations, in seconds, for which an identity that was ruled out remained."""

    def turn(self, connection: psycopg.Connection[Any]) -> None:
        """Drop some publications and create others, while no writer is within a transaction."""
        rand = self._rand
        for name in [name for name in self._held if rand.random() < 0.5]:
            self._drop(connection, name)
        version = connection.info.server_version // 10_000
        kinds: list[tuple[float, Callable[[psycopg.Connection[Any], str], None]]] = [(2, self._all)]
        if version >= LISTS_SINCE:
            kinds += [(2, self._filter), (3, self._list), (1, self._inserts)]
        for make in rand.choices([k for _, k in kinds], [w for w, _ in kinds], k=rand.randint(1, 3)):
            self._made += 1
            make(connection, f"other_{self._made}")

    def end(self, connection: psycopg.Connection[Any]) -> None:
        for name in [*self._held]:
            self._drop(connection, name)

    @property
    def held(self) -> list[str]:
        return [f"{name} of {table.sql_name if table else 'all tables'}" for name, table in self._held.items()]

    def _drop(self, connection: psycopg.Connection[Any], name: str) -> None:
        connection.execute(f"DROP PUBLICATION {name}")
        table = self._held.pop(name)
        if table is not None and table.listed == name:
            table.listed = ""
        self.counts["dropped"] += 1

    def _all(self, connection: psycopg.Connection[Any], name: str) -> None:
        root = self._rand.choice(["true", "false"])
        publish = self._rand.choice(["insert, update, delete, truncate", "update", "insert"])
        connection.execute(
            f"CREATE PUBLICATION {name} FOR ALL TABLES WITH (publish = '{publish}',"
            f" publish_via_partition_root = {root})"
        )
        self._held[name] = None
        self.counts["of all tables"] += 1

    def _filter(self, connection: psycopg.Connection[Any], name: str) -> None:
        """Create a publication with a row filter on a column of the identity that the application gave the table."""
        table = self._rand.choice([t for t in self._tables if not t.gone])
        names = [c.name for c in table.columns if c.name in table.key or table.whole]
        names = [name for name in names if table.column(name).kind != ENUM]
        if names:
            column = identifier(self._rand.choice(names))
            test = self._rand.choice(["IS NOT NULL", "IS NULL"])
            connection.execute(
                f"CREATE PUBLICATION {name} FOR TABLE {table.sql_name} WHERE ({column} {test}) WITH ({ROOT})"
            )
            self._held[name] = table
            self.counts["with a row filter"] += 1

    def _list(self, connection: psycopg.Connection[Any], name: str) -> None:
        """Create one whose column list rules out FULL."""
        fit = [t for t in self._tables if not (t.gone or t.listed or t.deferrable or t.whole)]
        if not fit:
            return
        table = self._rand.choice(fit)
        publish = self._rand.choice(["insert, update, delete", "update", "delete"])
        self._create_list(connection, name, table, publish)
        table.listed = name
        self.counts["with a column list"] += 1
        began_s = time.monotonic()

        def safe() -> bool:
            return connection.execute(WHOLE, {"t": table.sql_name}).fetchone() == (0,)

        eventually(safe, lambda: f"{table.sql_name} has FULL beside {name}: UPDATE and DELETE are refused", SAFE_S)
        self.safe_s.append(round(time.monotonic() - began_s, 1))

    def _inserts(self, connection: psycopg.Connection[Any], name: str) -> None:
        """Create one with a column list that does not apply to UPDATE and DELETE."""
        table = self._rand.choice([t for t in self._tables if not t.gone])
        self._create_list(connection, name, table, "insert")
        self.counts["with a column list, of inserts"] += 1

    def _create_list(self, connection: psycopg.Connection[Any], name: str, table: Table, publish: str) -> None:
        listed = [c.name for c in table.columns if c.name in table.key or self._rand.random() < 0.5]
        columns = ", ".join(map(identifier, listed))
        connection.execute(
            f"CREATE PUBLICATION {name} FOR TABLE {table.sql_name} ({columns}) WITH (publish = '{publish}', {ROOT})"
        )
        self._held[name] = table
