"""A lane: one connection that does one piece of work at a time, and determines the outcome when the connection is lost.

    the server returned an error        it was rolled back: UnavailableError (or InvalidError about rights)
    the driver cannot encode the work   it was not sent: UnavailableError
    connection lost before sending      UnavailableError after retries
    connection lost after sending       writes: UnknownOutcomeError, and the lane is `owing`; reads: retried

A backend may continue with a commit after its client is gone. So a lane that lost a write first ends that backend: it
waits for the session lock of the old session, which is free only once the old backend has ended. Until then the lane is
`owing`, and reads of this client wait, so that a reader that resolves an UnknownOutcomeError sees the final state.

A commit of the old backend may not be on a synchronous standby: see `lost_writes`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pgerrors

from tidemill.base.clock import Rand
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError, to_unavailable
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.postgres import lost_writes, schema

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]

CONNECT_TIMEOUT_S = 10.0
UNAVAILABLE_AFTER_S = 15.0
"""Time that an operation waits for a connection before it ends with UnavailableError."""

WORK_TIMEOUT_S = 30.0
"""Timeout of one piece of work, above the session's statement_timeout: only a dead network reaches it."""

HANG_UP_TIMEOUT_S = 1.0
"""Time for work to end after its socket was shut down: it only has to read the end of the stream."""

BACKOFF_FIRST_S = 0.02
BACKOFF_MOST_S = 1.0

KEEPALIVES = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "application_name": "tidemill-consensus",
}


_UNREADABLE = "(unreadable)"
_UNREADABLE_REASON = "it is not postgresql://user:password@host:5432/database with reserved characters percent-encoded"
"""Reason for any failure to connect to an unreadable URL: libpq's reason quotes it, possibly with the password."""


async def connect(url: str) -> Connection:
    """Return a prepared session. Raises psycopg.Error."""
    parameters = {
        **KEEPALIVES,
        "connect_timeout": str(int(CONNECT_TIMEOUT_S)),
        **psycopg.conninfo.conninfo_to_dict(url),
        # Keys are texts. Without it psycopg returns bytes for them from a database with the encoding SQL_ASCII.
        "client_encoding": "UTF8",
    }
    connection = await psycopg.AsyncConnection.connect(**parameters, autocommit=True, prepare_threshold=0)  # type: ignore[arg-type]
    try:
        await schema.prepare_session(connection)
    except BaseException:
        await connection.close()
        raise
    return connection


class ConnectionLane:
    def __init__(
        self, url: str, rand: Rand, *, writes: bool, admit: Callable[[Connection], Awaitable[None]] | None = None
    ) -> None:
        """Set up a lane that connects on first use.

        `admit(connection)` runs before anything else on a new session. It raises psycopg.Error or TidemillError.
        """
        self._url = url
        self._admit = admit
        self._rand = rand
        self._writes = writes
        # Identifies the sessions of this lane to each other, on the server.
        self._session_lock = rand.below(1 << 62)
        self._connection: Connection | None = None
        self._previous_backend = 0
        self._one_at_a_time = asyncio.Lock()
        self._tasks = Tasks(_ignore_failure)
        self.owing = False
        self._renew = False
        self.refusal = ""
        """The server's error for the last work, "" if it succeeded. It has been failing since `refused_s`."""
        self.refused_s = float("-inf")
        self.began_s: float | None = None
        """Start of the work in flight, which may still wait for a connection."""
        self.away = ""
        """Reason why the last attempt got no answer, set at `away_s`. The server last answered at `answered_s`."""
        self.away_s = self.answered_s = float("-inf")

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` on the connection.

        Raises the errors of `work`, InvalidError, UnavailableError, or UnknownOutcomeError (writes).
        """
        async with self._one_at_a_time:
            self.began_s = asyncio.get_running_loop().time()
            try:
                return await self._run(work)
            finally:
                self.began_s = None

    async def _run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        deadline_s = asyncio.get_running_loop().time() + UNAVAILABLE_AFTER_S
        while True:
            connection = await self._connect_with_retry(deadline_s)
            try:
                done = await self._answer_of(connection, work)
                self._record_answer("")
                return done
            except (psycopg.Error, TimeoutError, OSError) as error:
                lost = await self._outcome_of_failure(error)
                if lost is None and asyncio.get_running_loop().time() > deadline_s:
                    lost = UnavailableError(
                        f"the connection to PostgreSQL keeps breaking: reason={_first_line(error)!r}."
                    )
                if lost is not None:
                    raise lost from error
            except TidemillError:
                self._record_answer("")  # an outcome: the server did the work, and its answer is a rejection
                raise
            except BaseException:
                # Work interrupted in the middle leaves a connection in an unknown state.
                await self._close_connection(owing=self._writes)
                raise

    async def _answer_of(self, connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` within its timeout. Raises its errors, or TimeoutError."""
        if not self._writes:
            async with asyncio.timeout(WORK_TIMEOUT_S):
                return await work(connection)

        async def write() -> T:
            return await work(connection)

        # A separate task: when a task is cancelled, the driver cancels its statement, and that ends the wait of a
        # commit for its standbys.
        working: asyncio.Task[T] = self._tasks.spawn(write(), name="consensus-postgres-write")
        try:
            await asyncio.wait((working,), timeout=WORK_TIMEOUT_S)
            if working.done():
                return working.result()
        finally:
            if not working.done():
                lost_writes.hang_up(connection)
                await asyncio.wait((working,), timeout=HANG_UP_TIMEOUT_S)
                working.cancel()
        raise TimeoutError(f"no answer within {WORK_TIMEOUT_S:g} s")

    def _record_answer(self, refusal: str) -> None:
        self.answered_s = asyncio.get_running_loop().time()
        if refusal and not self.refusal:
            self.refused_s = self.answered_s
        self.refusal = refusal

    def _record_unanswered(self, why: str) -> None:
        self.away, self.away_s = why, asyncio.get_running_loop().time()

    async def _outcome_of_failure(self, error: BaseException) -> TidemillError | None:
        """Return the outcome of failed work; None if nothing happened and it can be retried."""
        connection = self._connection
        refused = isinstance(error, psycopg.Error) and error.sqlstate is not None
        if refused and connection is not None and not connection.closed and not connection.broken:
            assert isinstance(error, psycopg.Error)
            refused_for = to_unavailable(translate_server_error(error))
            self._record_answer(refused_for.message)
            return refused_for
        if isinstance(error, psycopg.DataError) and error.sqlstate is None:
            # Raised before the statement was sent; decoding raises it only for types that no statement here returns.
            return UnavailableError(f"the driver cannot encode this for PostgreSQL: reason={_first_line(error)!r}.")
        self._record_unanswered(f"the connection to PostgreSQL was lost: reason={_first_line(error)!r}.")
        await self._close_connection(owing=self._writes)
        if isinstance(error, psycopg.ProgrammingError) and not self._writes:
            return UnavailableError(f"the driver rejected a statement: reason={_first_line(error)!r}.")
        if self._writes:
            return UnknownOutcomeError(
                f"the connection to PostgreSQL was lost before the answer: reason={_first_line(error)!r}."
            )
        return None

    async def _connect_with_retry(self, deadline_s: float) -> Connection:
        if self._renew:
            # Between two pieces of work no outcome of this session is open.
            self._renew = False
            await self._close_connection(owing=False)
        if self._connection is not None and not self._connection.closed:
            return self._connection
        loop = asyncio.get_running_loop()
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                self._connection = await self.reconnect()
                self._renew = False
                return self._connection
            except (psycopg.Error, TimeoutError, OSError) as error:
                # The configuration was right at the start, so a fault of it now may be repaired: retry.
                outcome = to_unavailable(translate_connect_error(error, self._url))
                self._record_unanswered(outcome.message)
                if loop.time() + backoff_s > deadline_s:
                    raise outcome from error
            await asyncio.sleep(self._rand.uniform(backoff_s / 2, backoff_s))
            backoff_s = min(backoff_s * 2, BACKOFF_MOST_S)

    async def reconnect(self) -> Connection:
        """Return a new, admitted session. For a writing lane, the lock proves that the previous session has ended, and
        after a lost write a commit proves that what it left is replicated.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S * 2):
            connection = await connect(self._url)
            try:
                if self._admit is not None:
                    await self._admit(connection)
                if not self._writes:
                    return connection
                await lost_writes.end_session(connection, self._previous_backend, self._session_lock)
                if self.owing:
                    await lost_writes.prove_replication(connection)
            except BaseException:
                await connection.close()
                raise
            self._previous_backend = connection.info.backend_pid
            self.owing = False
            return connection

    def request_new_session(self) -> None:
        """Use a new session for the next work."""
        self._renew = True

    async def _close_connection(self, *, owing: bool) -> None:
        connection, self._connection = self._connection, None
        if owing:
            self.owing = True
        if connection is not None:
            with contextlib.suppress(psycopg.Error, OSError):
                await connection.close()

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self._close_connection(owing=False)


def _ignore_failure(name: str, error: BaseException) -> None:
    """Ignore the error of a write: its lane reads it, or has reported the outcome as unknown."""


def translate_server_error(error: psycopg.Error) -> TidemillError:
    """Translate an error that the server returned after it rolled back."""
    if isinstance(error, (pgerrors.InsufficientPrivilege, pgerrors.UndefinedTable, pgerrors.InvalidSchemaName)):
        return InvalidError(
            f"the role of consensus.url may not use the schema tidemill: reason={_first_line(error)!r}.",
            fix="Run GRANT CREATE ON DATABASE for the role before the first start, or make it the schema's owner.",
        )
    return UnavailableError(f"PostgreSQL returned an error: sqlstate={error.sqlstate} reason={_first_line(error)!r}.")


def translate_connect_error(error: BaseException, url: str) -> TidemillError:
    """Translate a failure to connect. libpq gives no code here, so rights and names are recognised by the server's
    wording.
    """
    where = without_password(url)
    reason = _first_line(error) if where != _UNREADABLE else _UNREADABLE_REASON
    wrong = (
        "authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "permission denied",
        "invalid", "missing \"=\"", "not permitted to log in",
    )  # fmt: skip
    unresolved = any(words in str(error) for words in ("could not translate host name", "failed to resolve"))
    mistaken = isinstance(error, psycopg.ProgrammingError) or any(words in str(error) for words in wrong)
    if mistaken and not unresolved:
        return InvalidError(
            f"PostgreSQL rejected the login: consensus.url={where!r} reason={reason!r}.",
            fix="Correct user, password, host and database in consensus.url.",
        )
    if isinstance(error, lost_writes.NotReplicatedError):
        return UnavailableError(
            f"PostgreSQL's synchronous standby does not confirm commits: consensus.url={where!r} reason={reason!r}.",
            fix="Compare pg_stat_replication with synchronous_standby_names, and bring a standby back.",
        )
    if isinstance(error, TimeoutError | pgerrors.ConnectionTimeout):
        # No connection was refused: the server is slow, or its packets are dropped.
        return UnavailableError(
            f"PostgreSQL does not answer: consensus.url={where!r} reason={reason!r}.",
            fix="Check whether its server is overloaded, and whether a firewall drops its packets.",
        )
    # An unknown host name is retried like a server that is down: if both start together, the name appears later.
    return UnavailableError(
        f"PostgreSQL cannot be reached: consensus.url={where!r} reason={reason!r}.",
        fix="Start it, or correct host and port in consensus.url.",
    )


def without_password(url: str) -> str:
    """Return the URL as error texts may name it, without secrets."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        return _UNREADABLE
    # libpq ends the password at its first reserved character: the rest became host, port or database.
    names = [str(parts.get(name, "")) for name in ("host", "port", "dbname")]
    if "://" in url and any("@" in name and name in url for name in names):
        return _UNREADABLE
    host = f"{parts.get('user', '')}@{parts.get('host', '')}:{parts.get('port', 5432)}"
    return f"postgresql://{host}/{parts.get('dbname', '')}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
