"""Look up the present rows of a table by primary key, in the text of the stream."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.capture.changes import Relation, Row
from tidemill.capture.postgres.connection import PgConnection, SqlRow, from_clause_name, identifier, literal
from tidemill.capture.postgres.control_connection import ControlConnection

KEYS_PER_QUERY = 500
LOCK_TIMEOUT_MS = 1_000


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
