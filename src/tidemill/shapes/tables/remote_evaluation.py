"""Lets PostgreSQL evaluate a clause on rows on which the local evaluator fails.

The local evaluator rejects more than PostgreSQL does (numbers of thousands of digits, an enum label that was added
later). So a failure ends a shape only if PostgreSQL fails on the same values. Until the answer, its consumer does not
evaluate further changes, which count against the bounds of the backlog like any others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.capture.changes import Relation, Row
from tidemill.capture.postgres.connection import identifier
from tidemill.shapes.where import EvaluationError, Where

if TYPE_CHECKING:
    import psycopg

    from tidemill.shapes.tables.capture_tap import ShapeTap
    from tidemill.shapes.tables.initial_snapshot import PostgresSource
    from tidemill.shapes.tables.table_consumer import TableConsumer

    Connection = psycopg.AsyncConnection[tuple[object, ...]]

_log = structlog.get_logger()

RETRY_S = 0.5
CONNECTION_IDLE_S = 1.0
"""Time for which a connection waits for the next question: a row with a new label seldom arrives alone."""
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
"""Selects the type of each column and, if it is not the type's default, its collation, as a clause uses the column's
collation."""
Verdict = bool | EvaluationError


class EvaluationRequest(NamedTuple):
    relation: Relation
    where: Where
    rows: tuple[Row, ...]


class WhereWithVerdicts:
    """A clause with PostgreSQL's verdicts on some rows."""

    def __init__(self, where: Where, verdicts: Sequence[tuple[Row, Verdict]]) -> None:
        self._where = where
        self._verdicts = verdicts

    def matches(self, row: Mapping[str, str | None]) -> bool:
        """Return whether the row matches. Raises EvaluationError."""
        for judged, verdict in self._verdicts:
            if judged is row:
                if isinstance(verdict, EvaluationError):
                    raise verdict
                return verdict
        return self._where.matches(row)


BeforeRequest = Callable[["Connection", "TableConsumer", EvaluationRequest], Awaitable[None]]


async def answer_requests(sink: ShapeTap, source: PostgresSource, look: BeforeRequest) -> None:
    """Answer the questions of the tap's consumers, forever. While the database does not answer, the consumers wait.

    One connection is reused while questions arrive. `look` is called before each question, and may end the shape.
    """
    while True:
        await sink.turns.asked.wait()
        while sink.turns.asking:
            try:
                async with source.evaluation_connection() as connection:
                    while await _wait_for_request(sink):
                        await _answer_first(sink, connection, look)
            except UnavailableError as error:
                handle = sink.turns.asking[0].shape.handle if sink.turns.asking else ""
                _log.warning("the database cannot evaluate a row", handle=handle, why=str(error))
                sink.turns.asking.rotate(-1)  # questions behind a slow one go first
                await asyncio.sleep(RETRY_S)
            except InvalidError as error:
                question = sink.turns.asking[0].question
                _deliver_verdicts(
                    sink, question, [EvaluationError(error.message)] * len(question.rows if question else ())
                )


async def _wait_for_request(sink: ShapeTap) -> bool:
    """Return whether there is a question, or one arrives within CONNECTION_IDLE_S."""
    sink.turns.asked.clear()
    if not sink.turns.asking:
        try:
            async with asyncio.timeout(CONNECTION_IDLE_S):
                await sink.turns.asked.wait()
        except TimeoutError:
            return False
    return True


async def _answer_first(sink: ShapeTap, connection: Connection, look: BeforeRequest) -> None:
    """Answer the first question. It remains the first until it is answered, so that errors can be assigned to it."""
    consumer = sink.turns.asking[0]
    question = consumer.question
    if question is not None and not consumer.shape.has_ended:
        await look(connection, consumer, question)
    if question is None or consumer.shape.has_ended:
        sink.turns.asking.popleft()
        return
    _deliver_verdicts(sink, question, await evaluate_rows(connection, question))


def _deliver_verdicts(sink: ShapeTap, question: EvaluationRequest | None, verdicts: Sequence[Verdict]) -> None:
    """Deliver the verdicts to the first waiting consumer, unless its question is void."""
    consumer = sink.turns.asking.popleft()
    if question is not None and consumer.question is question:
        consumer.resume_with_verdicts(verdicts)
        sink.turns.resume(consumer)


async def evaluate_rows(connection: Connection, question: EvaluationRequest) -> list[Verdict]:
    """Evaluate the rows of a question on a dedicated connection. Raises psycopg.Error for failures that no row
    causes."""
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
