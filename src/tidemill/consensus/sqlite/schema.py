"""The database file: how it is opened, its layout, and the statements that create it.

meta           one row: layout version, and a lower bound of the engine's clock
registers      one row per key: its current version, sealed
logs           one row per log: term, [start, next), and `swept`: records below it are physically deleted
recent         one row per group commit, in order, so that a commit of many logs fills few pages (`record_storage`)
settled        one row per chunk of consecutive records of one log
leases         one row per lease; a released one has holder ''

SQLite does not checksum its pages, so stored values are sealed:

    0xC1 | crc32c uint32, little-endian | body

The checksum covers a context and the body.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import apsw
import crc32c

from tidemill.base.errors import CorruptError, InvalidError, TidemillError, UnavailableError
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.consensus.sqlite import lock_holders

LAYOUT_VERSION = 4
OLDEST_SQLITE = (3, 51, 3)
"""Oldest safe version: 3.7.0 to 3.51.2 can corrupt a database whose connections write and checkpoint a WAL concurrently
(WAL-reset bug).
"""

CHECKPOINT_PAGES = 4000

BUSY_MS = 1_000
"""Time that a statement waits for another process's lock on the file. Only the sequencer should ever hold one."""

_CONFIGURATION = {
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
}  # fmt: skip
"""Errors that a retry cannot fix. Any other may pass: no descriptors, no space, a disk that became read-only."""

SEAL = b"\xc1"
_HEAD_BYTES = 5
FIX = "Restore the database from a copy, or the cluster from its bucket."

OPEN_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_NOFOLLOW

LAYOUT = """
CREATE TABLE IF NOT EXISTS meta (
    id INTEGER PRIMARY KEY CHECK (id = 1), layout INTEGER NOT NULL, clock_ms INTEGER NOT NULL);
INSERT OR IGNORE INTO meta (id, layout, clock_ms) VALUES (1, 4, 0);
CREATE TABLE IF NOT EXISTS registers (
    key TEXT PRIMARY KEY, seq INTEGER NOT NULL, nonce TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS logs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, term INTEGER NOT NULL,
    start INTEGER NOT NULL, next INTEGER NOT NULL, swept INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS recent (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS settled (id INTEGER PRIMARY KEY, count INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    name TEXT PRIMARY KEY, holder TEXT NOT NULL, term INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL, info BLOB NOT NULL) WITHOUT ROWID;
"""


def check_library() -> None:
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < OLDEST_SQLITE:
        raise InvalidError(
            f"this SQLite can corrupt a WAL database: version={apsw.sqlite_lib_version()}.",
            fix="Install apsw 3.51.3 or newer, which carries its own SQLite.",
        )


def open_database(path: Path) -> apsw.Connection:
    """Open or create the database, durable in every commit. Raises InvalidError, CorruptError or UnavailableError."""
    check_library()
    make_directory(path.parent)
    try:
        _create_private_file(path)
        connection = apsw.Connection(str(path), OPEN_FLAGS, statementcachesize=256)
    except OSError as error:
        raise translate_os_error(error, "the database of consensus.url cannot be created", path) from error
    except apsw.Error as error:
        raise _explain_open_failure(error, path) or translate_sqlite_error(error, path, opening=True) from error
    try:
        connection.set_busy_timeout(BUSY_MS)
        # Takes effect in a new file only.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0]
        if mode != "wal":
            raise InvalidError(
                f"the file system does not support SQLite's WAL: path={path} journal_mode={mode}.",
                fix="Put the database on a local disk.",
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("BEGIN IMMEDIATE")
        made = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchall()
        layout = connection.execute("SELECT layout FROM meta").fetchall()[0][0] if made else LAYOUT_VERSION
        if layout != LAYOUT_VERSION:
            raise InvalidError(
                f"the database has another layout: path={path} layout={layout} known={LAYOUT_VERSION}.",
                fix="Run the tidemill version that wrote it, or point consensus.url at a new file.",
            )
        connection.execute(LAYOUT)
        connection.execute("COMMIT")
    except apsw.Error as error:
        connection.close(True)
        raise _explain_open_failure(error, path) or translate_sqlite_error(error, path, opening=True) from error
    except TidemillError:
        connection.close(True)
        raise
    return connection


def translate_sqlite_error(error: apsw.Error, path: Path, *, opening: bool = False) -> TidemillError:
    """Translate an apsw error. Except for COMMIT, the failed statement certainly took no effect.

    While `opening`, an invalid path is an InvalidError for the operator. Later it is retried, since the path was valid
    once.
    """
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return CorruptError(
            f"SQLite finds the database damaged: path={path} reason={error}.", fix="Restore it from a copy."
        )
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return UnavailableError(
            f"another process has locked the database: path={path} {lock_holders.describe_lock_holder(path)}.",
            fix="Wait for that process to end its transaction, or kill it; only tidemill may open this file.",
        )
    if isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError)):
        kind = InvalidError if opening else UnavailableError
        return kind(
            f"the database of consensus.url cannot be written: path={path} reason={error}.",
            fix="Point consensus.url at a file in a directory this user may write.",
        )
    if isinstance(error, apsw.FullError):
        return UnavailableError(f"the disk is full: path={path}.", fix="Free space on the database's disk.")
    return UnavailableError(f"SQLite returned an error: path={path} reason={error}.")


def translate_os_error(error: OSError, what: str, path: Path) -> TidemillError:
    """Translate an operating system error on the way to the database."""
    if error.errno in _CONFIGURATION:
        return InvalidError(
            f"{what}: path={path} reason={error.strerror}.",
            fix="Point consensus.url at a file in a directory this user may write.",
        )
    return UnavailableError(f"{what}: path={path} reason={error.strerror}.", fix="Check the disk and the open files.")


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, durably and private to this user. Raises InvalidError or UnavailableError."""
    try:
        make_private_directory(directory)
    except OSError as error:
        raise translate_os_error(error, "the directory of consensus.url cannot be created", directory) from error


def _create_private_file(path: Path) -> None:
    """Create a new database that only its user can read.

    An existing one is not opened here: closing any descriptor of a file releases all locks that this process holds on
    it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        return


def _explain_open_failure(error: apsw.Error, path: Path) -> TidemillError | None:
    """Return the operating system's reason, since SQLite reports only a failure to open.

    None if the file can be opened.
    """
    if not isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError, apsw.IOError)):
        return None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as cause:
        return translate_os_error(cause, "the database of consensus.url cannot be opened", path)
    return None


def seal(body: bytes, context: bytes = b"") -> bytes:
    return b"".join((SEAL, _crc(body, context), body))


def unseal(stored: bytes, what: str, context: bytes = b"") -> bytes:
    """Return the body. Raises CorruptError, also if there is no seal."""
    body = stored[_HEAD_BYTES:]
    if stored[:1] != SEAL or stored[1:_HEAD_BYTES] != _crc(body, context):
        raise CorruptError(f"{what} bytes={len(stored)}.", fix=FIX)
    return body


def register_context(key: str, seq: int, nonce: str) -> bytes:
    """Return the context of a register, which binds the checksum to this version of this key."""
    return f"{key}\0{seq}\0{nonce}\0".encode()


def unseal_register(key: str, seq: int, nonce: str, stored: bytes) -> bytes:
    """Return the body of a register. Raises CorruptError, also if there is no seal."""
    return unseal(stored, f"a register is damaged: key={key}", register_context(key, seq, nonce))


def _crc(body: bytes, context: bytes) -> bytes:
    return int(crc32c.crc32c(body, crc32c.crc32c(context))).to_bytes(4, "little")
