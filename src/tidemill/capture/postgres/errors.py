"""Translate PostgreSQL's errors to those of base.errors: mistakes of the operator, and failures that may pass without
action.
"""

from __future__ import annotations

from tidemill.base.errors import (
    ClosedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)

_CONNECT_FIXES: tuple[tuple[str, str], ...] = (
    ("password authentication failed", "Correct the user or password in the DSN."),
    ("no password supplied", "Put a password into the DSN, PGPASSWORD or ~/.pgpass."),
    ("no pg_hba.conf entry", "Allow this host, user and database (and `replication`) in pg_hba.conf."),
    ("pg_hba.conf rejects", "Allow this host, user and database (and `replication`) in pg_hba.conf."),
    ("is not permitted to log in", "Run ALTER ROLE … LOGIN for this role, or correct the user in the DSN."),
    ("permission denied for database", "Run GRANT CONNECT ON DATABASE … TO this role."),
    ("must be superuser or replication role", "Run ALTER ROLE … REPLICATION for this role."),
    ("permission denied to start WAL sender", "Run ALTER ROLE … REPLICATION for this role."),
    ("not currently accepting connections", "Run ALTER DATABASE … ALLOW_CONNECTIONS true, or correct the DSN."),
    ("cannot connect to invalid database", "Drop the database and create it again, or correct its name in the DSN."),
    ("role", "Create the role, or correct the user in the DSN."),
    ("database", "Create the database, or correct its name in the DSN."),
    ("permission denied", "Grant the role what the message says."),
)
"""The first entry that the message contains applies, so specific entries come before general ones."""
_TRANSIENT_CONNECT = (
    "Connection refused",
    "could not translate host name",
    "failed to resolve host",
    "Name or service not known",
    "timeout",
    "timed out",
    "starting up",
    "shutting down",
    "recovery mode",
    "too many clients",
    "too many connections for",
    "remaining connection slots",
    "server closed the connection",
    "No such file or directory",
    "Network is unreachable",
    "No route to host",
)


class SlotLostError(InvalidError):
    """The slot does not exist or was invalidated: only a new snapshot can fill the gap in the stream."""


class UndecodableSlotError(SlotLostError):
    """PostgreSQL cannot decode the WAL of the slot: its initial catalogue snapshot, built while other transactions
    rewrote tables, lacks one of them. The same WAL fails at every retry.
    """


class LockHeldError(UnavailableError):
    """Another session captures under this name."""


class SqlError(UnavailableError):
    """A statement failed and changed nothing, mostly for a temporary reason (`is_transient`). `sqlstate`: as PostgreSQL
    reported it.
    """

    def __init__(self, message: str, *, sqlstate: str = "", fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.sqlstate = sqlstate


_TRANSIENT_SQLSTATES = ("", "08", "25", "40", "53", "55", "57", "72")
"""Classes of SQLSTATE: connection, transaction state, rollback, resources, object not ready, intervention, an old
snapshot.
"""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later without any correction, because the call itself is not at fault.
    For a statement, PostgreSQL's error class decides: damaged data (XX001), a value beyond its limits (54000, XX000),
    or an error raised by a function (P0001) recur at every retry.
    """
    if isinstance(error, SqlError):
        return error.sqlstate[:2] in _TRANSIENT_SQLSTATES
    return isinstance(error, (UnavailableError, UnknownOutcomeError, ClosedError))


def translate_connect_error(text: str, where: str) -> TidemillError:
    """Return InvalidError for an error that only the operator can correct, UnavailableError for one that may pass."""
    message = " ".join(text.split())
    if any(word in message for word in _TRANSIENT_CONNECT):
        return UnavailableError(
            f"PostgreSQL does not answer: {where} error={message!r}.",
            fix="Start the server, or correct host and port in the DSN.",
        )
    for word, fix in _CONNECT_FIXES:
        if word in message:
            return InvalidError(f"PostgreSQL refused the connection: {where} error={message!r}.", fix=fix)
    return UnavailableError(f"cannot connect to PostgreSQL: {where} error={message!r}.", fix="Check the DSN.")


def permission_fix(routine: str) -> str:
    """Return the remedy for SQLSTATE 42501. `routine`: the function of PostgreSQL that reported it; unlike the message,
    it is not translated to other languages.
    """
    if routine == _ROW_SECURITY_ROUTINE:
        return (
            "Run ALTER ROLE … BYPASSRLS for the role in the DSN; if it owns the table, ALTER TABLE … NO FORCE ROW LEVEL"
            " SECURITY is enough."
        )
    return "Grant it, or let the owner run the statement."


_ROW_SECURITY_ROUTINE = "check_enable_rls"


def translate_statement_error(sqlstate: str, text: str, statement: str, routine: str = "") -> TidemillError:
    """Classify an error by SQLSTATE (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""
    message = " ".join(text.split())
    facts = f"sqlstate={sqlstate or '?'} error={message!r} statement={statement[:120]!r}"
    if _is_slot_lost(sqlstate, message):
        return SlotLostError(
            f"the replication slot lost its WAL: {facts}.",
            fix="Raise max_slot_wal_keep_size and drop the capture's publication: all its tables are copied again.",
        )
    if sqlstate == "XX000" and _UNDECODABLE_MESSAGE in message:
        return UndecodableSlotError(
            f"PostgreSQL cannot decode the replication slot: {facts}.",
            fix="Drop the capture's publication: all its tables are then copied again.",
        )
    if sqlstate == "42501":
        return InvalidError(f"PostgreSQL denied a permission: {facts}.", fix=permission_fix(routine))
    if sqlstate in ("42P01", "42704", "3F000"):
        return MissingError(f"PostgreSQL does not know an object: {facts}.")
    if sqlstate[:2] in ("42", "22", "0A"):
        return InvalidError(f"PostgreSQL rejected a statement: {facts}.")
    return SqlError(f"a statement failed: {facts}.", sqlstate=sqlstate)


_UNDECODABLE_MESSAGE = "could not map filen"
"""Start of "could not map filenumber …" (16 and newer) or "filenode "base/5/16404" to relation OID": reorderbuffer.c,
an internal error that is not translated to other languages.
"""


def _is_slot_lost(sqlstate: str, message: str) -> bool:
    words = ("exceeded the maximum reserved size", "invalidated", "can no longer get changes", "can no longer access")
    if sqlstate in ("55000", "58P01") and (any(w in message for w in words) or "requested WAL segment" in message):
        return True
    return "replication slot" in message and "does not exist" in message
