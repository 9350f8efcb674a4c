"""Relations of the stream as the database has them at present: their descriptions, and their rows by primary key, in
the text of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidemill.capture.catalog.table_discovery import carried_kinds, is_key_carried
from tidemill.capture.changes import Column, Relation, Row
from tidemill.capture.postgres.connection import PgConnection, SqlRow, from_clause_name, identifier, literal
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.pg_snapshot import xid_condition

VISIBLE_POLL_S = 0.01
KEYS_PER_QUERY = 500
LOCK_TIMEOUT_MS = 1_000

_COLUMNS_SQL = """
SELECT c.oid, n.nspname, c.relname, a.attname, a.atttypid, a.atttypmod,
       format_type(a.atttypid, a.atttypmod), coalesce(k.place - 1, -1), a.attnotnull,
       NOT coalesce(i.indimmediate, true) OR coalesce({made_since}, false)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated IN ({kinds})
  LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisprimary AND {is_key_carried}
  LEFT JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
         ON k.attnum = a.attnum AND k.place <= i.indnkeyatts
 WHERE c.oid IN ({oids})
 ORDER BY c.oid, a.attnum
"""


async def describe_after(wire: PgConnection, xid: int, oid: int, *, whole: bool) -> Relation | None:
    """Return a table as PostgreSQL describes it once transaction `xid` of the stream is visible; None if it was
    dropped.

    `whole`: the stream carries whole old rows, so a key that may have been deferrable counts as deferrable: it was
    created by this transaction or a later one, and its former state is unknown. That only costs time
    (deferrable_keys.py). Without whole old rows, rows that share a key cannot be distinguished, and the key's present
    state counts.

    A commit is decoded right after its flush, before new snapshots see it, so an early query would still see the
    catalogue from before its DDL. A transaction releases the lock on its own id only after it has become visible.
    """
    running = (
        "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND granted"
        f" AND mode = 'ExclusiveLock' AND transactionid = '{xid}'::xid)"
    )
    while True:
        if await wire.value(running) != "t":
            return (
                await describe_tables(wire, [oid], made_since=xid_condition("i.xmin", str(xid)) if whole else "false")
            ).get(oid)
        await asyncio.sleep(VISIBLE_POLL_S)


async def describe_tables(wire: PgConnection, oids: Sequence[int], *, made_since: str = "false") -> dict[int, Relation]:
    """Return columns and keys of tables by oid, as the stream carries them; a dropped table is absent. A key of which
    the stream lacks a column counts as none (`is_key_carried`). `made_since`: the condition on a primary key's row i of
    pg_index under which it counts as deferrable in any case.
    """
    if not oids:
        return {}
    kinds, carried = carried_kinds(wire.server_version), is_key_carried(wire.server_version)
    listed = ", ".join(str(int(oid)) for oid in oids)
    rows = await wire.query(
        _COLUMNS_SQL.format(kinds=kinds, is_key_carried=carried, oids=listed, made_since=made_since)
    )
    names: dict[int, tuple[str, str]] = {}
    columns: dict[int, list[Column]] = {}
    deferrable: set[int] = set()
    for oid, schema, table, name, type_oid, type_mod, type_name, key_index, not_null, deferred in rows:
        relation = int(oid or 0)
        names[relation] = (schema or "", table or "")
        if deferred == "t":
            deferrable.add(relation)
        columns.setdefault(relation, []).append(
            Column(
                name=name or "",
                type_oid=int(type_oid or 0),
                type_mod=int(type_mod or "-1"),
                type_name=type_name or "",
                key_index=int(key_index or "-1"),
                not_null=not_null == "t",
            )
        )
    return {oid: Relation(oid, *names[oid], tuple(cols), deferrable=oid in deferrable) for oid, cols in columns.items()}


async def read_current_rows(control: ControlConnection, relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
    """Return one row for each of `rows`, by its key; None if the table has none, or was dropped. KEYS_PER_QUERY rows
    are one query, and each query has its own deadline (control_connection.py), however many rows a transaction moved.

    Raises SqlError, InvalidError or MissingError if the table cannot be read as `relation` describes it, or its lock is
    not available now; UnavailableError if the server does not answer.
    """
    found: list[Row | None] = []
    for at in range(0, len(rows), KEYS_PER_QUERY):
        asked = rows[at : at + KEYS_PER_QUERY]
        found += await control.run(lambda wire, asked=asked: _read_rows_by_key(wire, relation, asked))  # type: ignore[misc]
    return found


async def _read_rows_by_key(wire: PgConnection, relation: Relation, rows: Sequence[Row]) -> list[Row | None]:
    keys, names = relation.key_columns, [column.name for column in relation.columns]
    asked = ", ".join(
        f"({number}, {', '.join(literal(row[c.name] or '') for c in keys)})" for number, row in enumerate(rows)
    )
    await wire.query("BEGIN READ ONLY")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        # The relation may lack the name of a type that no longer existed in the catalogue when the stream described it,
        # and a type may have been renamed since.
        typed = ", ".join(f"({at}, {c.type_oid}::oid, {c.type_mod})" for at, c in enumerate(relation.columns))
        described = await wire.query(
            f"SELECT c.relkind, format_type(v.type, v.mod) FROM pg_class c, (VALUES {typed}) AS v(at, type, mod)"
            f" WHERE c.oid = {relation.oid} ORDER BY v.at"
        )
        if not described:  # dropped: an answer from the future (deferrable_keys.py); the stream brings the drop
            return [None] * len(rows)
        kind, types = described[0][0], {name: type_ for name, (_, type_) in zip(names, described, strict=True)}
        columns = ", ".join(f"t.{identifier(c.name)}::{types[c.name]}" for c in relation.columns)
        same = " AND ".join(f"t.{identifier(c.name)} = k.k{n}::{types[c.name]}" for n, c in enumerate(keys))
        table = from_clause_name(relation.schema, relation.table, partitioned=kind == "p")
        answered = await wire.query(
            f"SELECT k.number, {columns} FROM (VALUES {asked})"
            f" AS k(number, {', '.join(f'k{n}' for n in range(len(keys)))}) JOIN {table} t ON {same}"
        )
    finally:
        await wire.query("ROLLBACK")
    by_number: dict[int, SqlRow] = {int(answer[0] or 0): answer[1:] for answer in answered}
    return [
        dict(zip(names, by_number[number], strict=True)) if number in by_number else None for number in range(len(rows))
    ]
