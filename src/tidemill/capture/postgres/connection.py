"""One PostgreSQL connection over libpq's asynchronous calls (psycopg's `pq` layer): queries, COPY out, replication.

Everything is text and the simple query protocol, because a replication connection supports nothing else and because
rows must read exactly as the stream prints them: snapshot and stream share `DISPLAY_SETTINGS`.

One task uses a `PgConnection` at a time, with one exception: while one task receives the stream, another may `send`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from tidemill.base.errors import ClosedError, InvalidError, UnavailableError
from tidemill.capture.postgres.errors import translate_connect_error, translate_statement_error

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

DISPLAY_SETTINGS: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "bytea_output": "hex",
    "DateStyle": "ISO, DMY",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "IntervalStyle": "iso_8601",
}
"""Settings of every connection that reads rows of a captured database. Otherwise snapshot and stream would differ in
their text.
"""

UNCHECKED_ENCODING = "SQL_ASCII"
"""Encoding of a database that can contain any bytes. PostgreSQL rejects such values for a client of any other encoding,
so a single value would end the stream of all tables. Unconverted, each value can be checked separately.
"""

NO_TIMEOUTS: Mapping[str, tuple[int, str]] = {
    "statement_timeout": (0, "0"),
    "lock_timeout": (0, "0"),
    "idle_in_transaction_session_timeout": (0, "0"),
    "idle_session_timeout": (140_000, "0"),
    "transaction_timeout": (170_000, "0"),
}
"""Setting → (first server version that has it, value). A default of the role or database would interrupt a long copy or
end the session that holds the capture's lock. Statements that need a time limit set it themselves.
"""

PLAIN_STATEMENTS: Mapping[str, str] = {
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "synchronous_commit": "local",
}
"""Settings against defaults of the role or database that would reject the set-up's statements, let a transaction see
the catalogue from before it had its lock, or spell the names of types differently. Row-level security would hide rows
of a table from its readers: switched off, it makes each such query an error for a role that it binds. And while a
synchronous standby is missing, no commit would return, not even that of a heartbeat, although the stream depends only
on what the primary has flushed.
"""

CONNECT_TIMEOUT_S = 10
TCP: Mapping[str, int] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""libpq's settings, unless the DSN sets them: a peer that disappears silently ends a connection within 15 s. A peer
whose kernel still answers is detected by control_connection.py.
"""
BURST_BYTES = 256 << 10
_APPLICATION_NAME_BYTES = 63

SqlRow = tuple[str | None, ...]


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def qualified_identifier(schema: str, table: str) -> str:
    return f"{identifier(schema)}.{identifier(table)}"


def from_clause_name(schema: str, table: str, *, partitioned: bool) -> str:
    """Return the table for FROM and LOCK, with the rows that the stream carries under it. Rows of inheriting tables
    arrive under their own tables.
    """
    return f"{'' if partitioned else 'ONLY '}{qualified_identifier(schema, table)}"


def literal(text: str) -> str:
    quoted = "'" + text.replace("'", "''") + "'"
    return f" E{quoted}".replace("\\", "\\\\") if "\\" in text else quoted


def describe_dsn(dsn: str) -> str:
    """Return server, database and user of a DSN for messages, never the password. Raises InvalidError if it cannot be
    parsed.
    """
    parts = _parse_dsn(dsn)
    names = ("dbname", "user")
    return " ".join([f"server={server_address(dsn)}", *(f"{name}={parts[name]}" for name in names if parts.get(name))])


def server_address(dsn: str) -> str:
    """Return `host:port` (or the directory of the socket), as libpq will use it. Raises InvalidError if it cannot be
    parsed.
    """
    parts = _parse_dsn(dsn)
    host = parts.get("host") or parts.get("hostaddr")
    if host is None and parts.get("service"):
        return f"service {parts['service']}"
    host = host or os.environ.get("PGHOST") or "localhost"
    return f"{host}:{parts.get('port') or os.environ.get('PGPORT') or 5432}"


def database_name(dsn: str) -> str:
    """Return the database of a DSN, as libpq will use it: the user's name if it names none. Raises InvalidError if it
    cannot be parsed.
    """
    parts = _parse_dsn(dsn)
    user = parts.get("user") or os.environ.get("PGUSER") or "postgres"
    return str(parts.get("dbname") or os.environ.get("PGDATABASE") or user)


def _parse_dsn(dsn: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        # libpq quotes the offending text, which may contain a password: name only the kind of error.
        raise InvalidError(
            "the DSN cannot be read.",
            fix="Write it as postgresql://user:password@host:5432/database. Percent-encode spaces (%20) and reserved"
            " characters (@ is %40).",
        ) from error
    # libpq ends the password at its first reserved character: the rest, which no message may show, became host or name.
    names = [str(parts.get(name, "")) for name in ("host", "port", "dbname")]
    if "://" in dsn and any("@" in name and name in dsn for name in names):
        raise InvalidError(
            "the user or the password in the DSN has a reserved character.",
            fix="Percent-encode it: % is %25, : is %3A, / is %2F, @ is %40, # is %23, ? is %3F.",
        )
    return parts


def application_name(purpose: str, capture: str = "") -> str:
    """Return the name that identifies this process in pg_stat_activity: `tidemill PROCESS [CAPTURE] PURPOSE HOST/PID`,
    truncated where PostgreSQL would. The second word, eight hex digits of HOST/PID, and the name of a capture are
    always complete, because sessions are found by them.
    """
    process = f"{socket.gethostname()}/{os.getpid()}"
    token = hashlib.blake2b(process.encode(), digest_size=4).hexdigest()
    words = ("tidemill", token, capture, purpose, process)
    return " ".join(filter(None, words))[:_APPLICATION_NAME_BYTES]


def session_settings(version: int) -> dict[str, str]:
    """Return the settings of every session on a captured database, which override the defaults of its role and
    database.
    """
    untimed = {name: value for name, (since, value) in NO_TIMEOUTS.items() if version >= since}
    return {**DISPLAY_SETTINGS, **PLAIN_STATEMENTS, **untimed}


def settings_statement(settings: Mapping[str, str]) -> str:
    """Return the statement that sets them for the rest of the session. (Not as `options` of the connection, which the
    DSN may have, too.)
    """
    return f"SELECT {', '.join(f'set_config({literal(n)}, {literal(v)}, false)' for n, v in settings.items())}"


class PgConnection:
    def __init__(self, connection: Any, target: str) -> None:
        self._connection = connection
        self._pgconn: PGconn = connection.pgconn
        self._target = target
        self._pgconn.nonblocking = 1
        self._copy_ended = False
        self._broke: Exception | None = None

    @classmethod
    async def connect(cls, dsn: str, *, replication: bool = False, purpose: str, capture: str = "") -> Self:
        """Connect, and set `session_settings`. PostgreSQL sees `purpose` and the name of the capture, if any. Raises
        InvalidError (DSN, credentials, database) or UnavailableError.
        """
        import psycopg

        target, given = describe_dsn(dsn), _parse_dsn(dsn)
        extra: dict[str, Any] = {name: value for name, value in TCP.items() if name not in given}
        if replication:
            extra["replication"] = "database"
        try:
            connection = await psycopg.AsyncConnection.connect(
                dsn, autocommit=True, application_name=application_name(purpose, capture), **extra
            )
        except psycopg.Error as error:
            raise translate_connect_error(str(error), target) from error
        wire = cls(connection, target)
        try:
            encoding = {"client_encoding": UNCHECKED_ENCODING} if wire.is_encoding_unchecked else {}
            await wire.query(settings_statement({**session_settings(wire.server_version), **encoding}))
        except BaseException:
            await wire.aclose()
            raise
        return wire

    @property
    def target(self) -> str:
        """Server, database and user, for messages."""
        return self._target

    @property
    def backend_pid(self) -> int:
        return self._pgconn.backend_pid

    @property
    def database(self) -> str:
        """Name of the database, even if the DSN does not contain it."""
        return self._pgconn.db.decode()

    @property
    def is_encoding_unchecked(self) -> bool:
        """True if the database can contain any bytes (SQL_ASCII)."""
        return self._pgconn.parameter_status(b"server_encoding") == UNCHECKED_ENCODING.encode()

    @property
    def server_version(self) -> int:
        """Server version, for example 180006 for 18.6."""
        return self._pgconn.server_version

    async def query(self, sql: str) -> list[SqlRow]:
        """Run one statement, return its rows as text; a byte that is not UTF-8 becomes a surrogate.

        Raises errors by SQLSTATE (errors.py). The wire stays usable after a failed statement, but not after a cancelled
        call.
        """
        from psycopg.pq import ExecStatus

        self._send_query(sql)
        rows: list[SqlRow] = []
        failure: Exception | None = None
        while (result := await self._next_result()) is not None:
            if result.status == ExecStatus.TUPLES_OK:
                rows = _decode_rows(result)
            elif result.status not in (ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY):
                failure = failure or self._translate_failure(result, sql)
            result.clear()
        if failure is not None:
            raise failure
        return rows

    async def value(self, sql: str) -> str | None:
        rows = await self.query(sql)
        return rows[0][0] if rows else None

    async def copy_out(self, sql: str) -> AsyncIterator[list[bytes]]:
        """Run COPY … TO STDOUT; yield bursts of rows in COPY's text format, each with its newline."""
        from psycopg.pq import ExecStatus

        self._send_query(sql)
        result = await self._next_result()
        if result is None or result.status != ExecStatus.COPY_OUT:
            error = self._translate_failure(result, sql)
            await self._drain_results()
            raise error
        result.clear()
        while burst := await self._next_burst():
            yield burst
        failure = await self._drain_results()
        if failure is not None:
            raise failure

    async def start_copy_both(self, command: str) -> None:
        """Run START_REPLICATION …; afterwards only `receive` and `send` may be called."""
        from psycopg.pq import ExecStatus

        self._send_query(command)
        result = await self._next_result()
        if result is None or result.status != ExecStatus.COPY_BOTH:
            error = self._translate_failure(result, command)
            await self._drain_results()
            raise error
        result.clear()

    async def receive(self) -> list[bytes]:
        """Return the available messages, at least one. Raises when the server ends the stream."""
        burst = await self._next_burst()
        if burst:
            return burst
        raise await self._drain_results() or UnavailableError(f"the server ended the stream: {self._target}.")

    async def send(self, data: bytes) -> None:
        import psycopg

        try:
            while self._pgconn.put_copy_data(data) == 0:
                await self._wait_ready(write=True)
            while self._pgconn.flush() == 1:
                await self._wait_ready(write=True)
        except psycopg.Error as error:
            # "No COPY in progress" is only a consequence of the error by which the server ended it.
            raise self._pending_error() or self._connection_error(error) from error

    async def aclose(self) -> None:
        """Close the connection, which ends the session and releases its locks and the slot. Idempotent."""
        await self._connection.close()

    def _send_query(self, sql: str) -> None:
        import psycopg

        self._copy_ended = False
        try:
            self._pgconn.send_query(sql.encode(errors="surrogateescape"))
        except psycopg.Error as error:
            raise self._connection_error(error) from error

    async def _next_result(self) -> PGresult | None:
        import psycopg

        try:
            while self._pgconn.flush() == 1:
                await self._wait_ready(write=True)
            while self._pgconn.is_busy():
                await self._wait_ready()
                self._pgconn.consume_input()
            return self._pgconn.get_result()
        except psycopg.Error as error:
            raise self._connection_error(error) from error

    async def _next_burst(self) -> list[bytes]:
        """Return the available COPY data, at least one message; empty at the end of the COPY."""
        import psycopg

        # libpq reports the end once; a second call would fail because no COPY is in progress.
        if self._copy_ended:
            self._copy_ended = False
            return []
        if self._broke is not None:
            raise self._broke
        burst: list[bytes] = []
        size = seen = 0
        get = self._pgconn.get_copy_data
        try:
            while size < BURST_BYTES:
                count, data = get(1)
                if count > 0:
                    burst.append(bytes(data))
                    size += count
                elif count < 0:
                    self._copy_ended = bool(burst)
                    break
                elif size > seen:
                    # libpq reads some kilobytes at a time; read the rest as well if it is available without waiting.
                    seen = size
                    self._pgconn.consume_input()
                elif burst:
                    break
                else:
                    await self._wait_ready()
                    self._pgconn.consume_input()
        except psycopg.Error as error:
            if not burst:
                raise self._connection_error(error) from error
            # The messages from before the connection broke are complete; the next call raises the error.
            self._broke = self._connection_error(error)
        return burst

    async def _drain_results(self) -> Exception | None:
        """Read the rest of a statement; return its error, if it had one."""
        from psycopg.pq import ExecStatus

        failure: Exception | None = None
        while (result := await self._next_result()) is not None:
            if result.status in (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE):
                failure = failure or self._translate_failure(result, "")
            elif result.status in (ExecStatus.COPY_BOTH, ExecStatus.COPY_OUT, ExecStatus.COPY_IN):
                break
            result.clear()
        return failure

    def _pending_error(self) -> Exception | None:
        """Return the error with which the server ended a COPY, if it is available without waiting."""
        from psycopg.pq import ExecStatus

        result = None if self._pgconn.is_busy() else self._pgconn.get_result()
        ended = result is not None and result.status == ExecStatus.FATAL_ERROR
        return self._translate_failure(result, "") if ended else None

    def _translate_failure(self, result: PGresult | None, sql: str) -> Exception:
        from psycopg.pq import DiagnosticField

        if result is None:
            return self._connection_error(self._pgconn.error_message)
        sqlstate = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
        text = (result.error_message or self._pgconn.error_message).decode(errors="replace")
        if not sqlstate:
            return self._connection_error(text)
        routine = (result.error_field(DiagnosticField.SOURCE_FUNCTION) or b"").decode()
        return translate_statement_error(sqlstate, text, sql, routine)

    def _connection_error(self, error: object) -> Exception:
        text = error.decode(errors="replace") if isinstance(error, bytes) else str(error)
        message = " ".join(text.split())
        if "closed" in message and self._connection.closed:
            return ClosedError(f"the connection is closed: {self._target}.")
        return UnavailableError(f"the connection to PostgreSQL broke: {self._target} error={message!r}.")

    async def _wait_ready(self, *, write: bool = False) -> None:
        """Wait until the socket is readable (or writable)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        descriptor = self._pgconn.socket

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
        add(descriptor, wake)
        try:
            await future
        finally:
            remove(descriptor)


def _decode_rows(result: PGresult) -> list[SqlRow]:
    columns = range(result.nfields)
    rows: list[SqlRow] = []
    for row in range(result.ntuples):
        values = (result.get_value(row, column) for column in columns)
        rows.append(tuple(None if value is None else value.decode(errors="surrogateescape") for value in values))
    return rows
