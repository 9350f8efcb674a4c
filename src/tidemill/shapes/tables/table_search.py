"""Finds the captured table that a request names, and waits for tables and captures that are about to appear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.planner import FieldError, parse_table_name
from tidemill.shapes.tables.captured_database import CapturedDatabase

_log = structlog.get_logger()

MAX_TABLE_WAITS = 50
"""Largest number of requests that wait for new tables; a part of `max_initial`."""

TABLE_WAIT_S = 20.0
"""Time that a request waits for a table to be captured."""
STARTING_WAIT_S = 5.0
"""Time that a request waits for a capture that has not reported its tables yet."""


class CaptureStartingError(UnavailableError):
    """The capture has not reported its tables yet."""


class TablePausedError(UnavailableError):
    """The table is captured, but carries no changes until it is copied. `retry_after_s`: when to retry."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _log_failed_search(name: str, error: BaseException) -> None:
    """Log an unexpected error. Its request gets it only if no other capture answered first."""
    if not isinstance(error, TidemillError):
        _log.error("a search for a table failed", part=name, error=error_sentence(error), exc_info=error)


class NotCapturedError(FieldError):
    """No captured table has that name. `known`: the names of the captured tables."""

    def __init__(self, schema: str, table: str, known: Iterable[tuple[str, str]] = ()) -> None:
        # A name without quotes is in lower case here, as in PostgreSQL.
        meant = sorted(other for schema_of, other in known if schema_of == schema and other.lower() == table.lower())
        hint = f'Did you mean "{schema}"."{meant[0]}", with the quotes? ' if meant else ""
        super().__init__(
            "table",
            f'table "{schema}"."{table}" is not captured.',
            fix=f"{hint}Check the name (quote it if it has capitals) and its state in `tidemill capture list`.",
        )


def several_databases_error(found: Iterable[tuple[str, str, str]]) -> FieldError:
    """Return the error for a table of several databases, each with the schema and the name."""
    names = ", ".join(f"{database}:{schema}.{name}" for database, schema, name in found)
    return FieldError("table", f"the table is in several databases: tables={names}.", fix="Use one of these.")


class TableSearch:
    """Searches `databases`, by name."""

    def __init__(self, databases: Mapping[str, CapturedDatabase]) -> None:
        self._databases = databases
        self.led_elsewhere: Callable[[str], bool] = lambda database: False
        """Returns whether another node captures a database. If so, its tables are not awaited here."""
        self._seeking = 0
        """Number of requests that wait."""

    def find_relation(self, table: str) -> tuple[str, Relation]:
        """Return the database and the captured relation that a table parameter names.

        Raises FieldError (NotCapturedError if no capture has it), TablePausedError, or UnavailableError while a capture
        starts.
        """
        asked, schema, name = self.parse_table(table)
        for database in asked:
            if self._databases[database].sink.restoring and not self._databases[database].suspended:
                raise UnavailableError(f"shapes are still being restored after a restart: database={database}.")
        return self._find_captured(table, asked, schema, name)

    def parse_table(self, table: str) -> tuple[list[str], str, str]:
        """Return the databases that may have the table, its schema and its name. Raises FieldError."""
        prefix, separator, rest = table.partition(":")
        chosen = bool(separator) and prefix in self._databases
        schema, name = parse_table_name(rest if chosen else table)
        return [prefix] if chosen else list(self._databases), schema, name

    async def wait_for_relation(self, table: str, *, waits: bool) -> tuple[str, Relation]:
        """Find a table as `find_relation` does, and wait for a capture between two sessions (STARTING_WAIT_S). With
        `waits`, also wait for a table that was created a moment ago (TABLE_WAIT_S)."""
        sought = True
        while sought:  # a paused table may begin to be copied again between the captures' answer and `find_relation`
            try:
                return self.find_relation(table)
            except NotCapturedError:
                if not waits:
                    raise
                sought = await self._wait_for_capture(*self.parse_table(table))
            except CaptureStartingError:
                sought = await self._wait_for_capture(*self.parse_table(table), STARTING_WAIT_S)
        return self.find_relation(table)

    async def _wait_for_capture(
        self, asked: Sequence[str], schema: str, name: str, within_s: float = TABLE_WAIT_S
    ) -> bool:
        """Return whether one of these captures has the table, or has paused it; the first such answer ends the wait.

        Raises UnavailableError if none has it and one does not know, or if too many requests wait already. The limit
        keeps requests for missing tables from using up all places while a capture is down.
        """
        if self._seeking >= MAX_TABLE_WAITS:
            raise UnavailableError(f"too many requests wait for new tables: limit={MAX_TABLE_WAITS}.")
        seekers = [each.seeker for each in map(self._databases.__getitem__, asked) if each.seeker is not None]
        unsaid: TidemillError | None = None
        self._seeking += 1
        try:
            async with Tasks(_log_failed_search) as tasks:
                looks = [
                    tasks.spawn(each.wait_for_table(schema, name, within_s), name=f"seek {name}") for each in seekers
                ]
                for look in asyncio.as_completed(looks):
                    try:
                        if await look:
                            return True
                    except TidemillError as error:
                        unsaid = error
        finally:
            self._seeking -= 1
        if unsaid is not None:
            raise unsaid
        return False

    def _find_captured(self, table: str, asked: Sequence[str], schema: str, name: str) -> tuple[str, Relation]:
        known = {database: self._databases[database].captured_by_name() for database in asked}
        found = [(database, named[schema, name]) for database, named in known.items() if (schema, name) in named]
        if not found:
            for database in asked:
                standing = self._databases[database].unavailability(schema, name)
                if standing is not None and not standing.passing:
                    raise TablePausedError(standing.reason, standing.retry_after_s)
            starting = [database for database in asked if self._is_awaited(database)]
            if starting:
                raise CaptureStartingError(f"the capture is starting: database={starting[0]}.")
            raise NotCapturedError(schema, name, [each for named in known.values() for each in named])
        if len(found) > 1:
            raise several_databases_error((database, schema, name) for database, _ in found)
        return found[0]

    def _is_awaited(self, name: str) -> bool:
        """Return whether the capture of a database is starting, or will be, on this node."""
        database = self._databases[name]
        return database.is_starting and not (database.suspended and self.led_elsewhere(name))
