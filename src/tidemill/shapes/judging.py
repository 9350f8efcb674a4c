"""Asks PostgreSQL for what a clause says of rows on which the evaluator here fails.

The evaluator refuses more than PostgreSQL does (numbers of thousands of digits, an enum label that came later). So a
failure ends a shape only where PostgreSQL fails on the same values; its consumer waits for the answer with what it has
not evaluated, and the bounds of the backlog count for it as for any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tidemill.base.errors import Invalid, Unavailable
from tidemill.capture.changes import Relation, Row
from tidemill.capture.wire.connection import identifier
from tidemill.shapes.where import EvaluationError, Where

if TYPE_CHECKING:
    import psycopg

    from tidemill.shapes.postgres_source import PostgresSource
    from tidemill.shapes.sink import ShapeSink

_log = structlog.get_logger()

RETRY_S = 0.5
TYPES_SQL = """
SELECT format_type(c.type, c.mod),
       CASE WHEN l.oid IS NULL THEN '' ELSE format(' COLLATE %%I.%%I', s.nspname, l.collname) END
FROM unnest(%s::text[], %s::oid[], %s::int[]) WITH ORDINALITY AS c(name, type, mod, place)
LEFT JOIN pg_type t ON t.oid = c.type
LEFT JOIN pg_attribute a ON a.attrelid = %s AND a.attname = c.name AND NOT a.attisdropped
     AND t.typcollation <> 0 AND a.attcollation <> t.typcollation
LEFT JOIN pg_collation l ON l.oid = a.attcollation
LEFT JOIN pg_namespace s ON s.oid = l.collnamespace
ORDER BY c.place
"""
"""Of each column its type and, where that is not the type's own, its collation: a clause is of the column's."""
Verdict = bool | EvaluationError


class Question(NamedTuple):
    relation: Relation
    where: Where
    rows: tuple[Row, ...]


class Judged:
    """A clause as a consumer asks it, with PostgreSQL's verdicts on some rows."""

    def __init__(self, where: Where, verdicts: Sequence[tuple[Row, Verdict]]) -> None:
        self._where = where
        self._verdicts = verdicts

    def matches(self, row: Mapping[str, str | None]) -> bool:
        """Raises EvaluationError."""
        for judged, verdict in self._verdicts:
            if judged is row:
                if isinstance(verdict, EvaluationError):
                    raise verdict
                return verdict
        return self._where.matches(row)


async def answer(sink: ShapeSink, source: PostgresSource) -> None:
    """Answer what the sink's consumers ask, for ever. While the database does not answer they wait."""
    while True:
        await sink.asked.wait()
        sink.asked.clear()
        while sink.asking:
            consumer = sink.asking[0]
            question = consumer.question
            if question is not None and not consumer.shape.gone:
                try:
                    verdicts = await source.judge(question)
                except Unavailable as error:
                    _log.warning("a row cannot be asked of the database", handle=consumer.shape.handle, why=str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                except Invalid as error:
                    verdicts = [EvaluationError(error.message)] * len(question.rows)
                if consumer.question is question:
                    consumer.answered(verdicts)
                    sink.resume(consumer)
            sink.asking.popleft()


async def judge(connection: psycopg.AsyncConnection[tuple[object, ...]], question: Question) -> list[Verdict]:
    """On a connection of its own. Raises psycopg.Error for what is no fault of a row."""
    import psycopg

    await connection.execute("SET search_path = pg_catalog")
    columns = [column for column in question.relation.columns if column.name in question.where.columns]
    names = [column.name for column in columns]
    cursor = await connection.execute(
        TYPES_SQL,
        (names, [column.type_oid for column in columns], [column.type_mod for column in columns],
         question.relation.oid),
    )  # fmt: skip
    types = await cursor.fetchall()
    params = question.where.params
    values = [
        f"CAST(${number} AS {type_}){collation} AS {identifier(column.name)}"
        for number, (column, (type_, collation)) in enumerate(zip(columns, types, strict=True), len(params) + 1)
    ]
    query = f"SELECT coalesce(({question.where.sql}), false) FROM (SELECT {', '.join(values)}) AS asked"
    found: list[Verdict] = []
    for row in question.rows:
        raw = psycopg.AsyncRawCursor(connection)
        try:
            await raw.execute(query.encode(), (*params, *(row[column.name] for column in columns)))
        except psycopg.DataError as error:
            found.append(EvaluationError(error.diag.message_primary or str(error)))
        else:
            (matches,) = await raw.fetchone() or (False,)
            found.append(bool(matches))
    return found
