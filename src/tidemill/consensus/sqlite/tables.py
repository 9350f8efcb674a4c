"""The database file: opening it, its layout, and the statements the engine runs.

meta           one row: layout version, the last time the engine's clock is known to have shown
registers      one row per key: its current version
logs           one row per log: term, [start, next), and `swept`: rows below it are physically gone
log_records    one row per record, in order of arrival, so that a group commit of many logs fills few pages
leases         one row per lease; a released one has holder ''
"""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from tidemill.base.errors import Corrupt, Invalid, TidemillError, Unavailable

LAYOUT_VERSION = 3
OLDEST_SQLITE = (3, 51, 3)
"""3.7.0 to 3.51.2 can corrupt a database whose connections write and checkpoint a WAL at once (WAL-reset bug)."""

CHECKPOINT_PAGES = 4000

LAYOUT = """
CREATE TABLE IF NOT EXISTS meta (
    id INTEGER PRIMARY KEY CHECK (id = 1), layout INTEGER NOT NULL, clock_ms INTEGER NOT NULL);
INSERT OR IGNORE INTO meta (id, layout, clock_ms) VALUES (1, 3, 0);
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
        raise Invalid(
            f"This SQLite can corrupt a WAL database: version={apsw.sqlite_lib_version()}.",
            fix="Install apsw 3.51.3 or newer, which carries its own SQLite.",
        )


def connect(path: Path) -> apsw.Connection:
    """Open or create the database, durable in every commit. Raises Invalid, Corrupt or Unavailable."""
    check_library()
    try:
        _make_parents(path.parent)
        connection = apsw.Connection(str(path), statementcachesize=256)
    except OSError as error:
        raise Invalid(
            f"The directory of consensus.url cannot be made: path={path.parent} reason={error.strerror}.",
            fix="Point consensus.url at a writable directory.",
        ) from error
    except apsw.Error as error:
        raise translate(error, path) from error
    try:
        connection.set_busy_timeout(5_000)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0]
        if mode != "wal":
            raise Invalid(
                f"The file system does not support SQLite's WAL: path={path} journal_mode={mode}.",
                fix="Put the database on a local disk.",
            )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("BEGIN IMMEDIATE")
        made = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'meta'").fetchall()
        layout = connection.execute("SELECT layout FROM meta").fetchall()[0][0] if made else LAYOUT_VERSION
        if layout != LAYOUT_VERSION:
            raise Invalid(
                f"The database has another layout: path={path} layout={layout} known={LAYOUT_VERSION}.",
                fix="Run the tidemill version that wrote it, or point consensus.url at a new file.",
            )
        connection.execute(LAYOUT)
        connection.execute("COMMIT")
    except apsw.Error as error:
        connection.close(True)
        raise translate(error, path) from error
    except TidemillError:
        connection.close(True)
        raise
    return connection


def translate(error: apsw.Error, path: Path) -> TidemillError:
    """An apsw error as one of ours; certain that the statement it came from took no effect, except for COMMIT."""
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError)):
        return Corrupt(f"SQLite finds the database damaged: path={path} reason={error}.", fix="Restore it from a copy.")
    if isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError)):
        return Invalid(
            f"The database of consensus.url cannot be written: path={path} reason={error}.",
            fix="Point consensus.url at a file in a directory this user may write.",
        )
    if isinstance(error, apsw.FullError):
        return Unavailable(f"The disk is full: path={path}.", fix="Free space on the database's disk.")
    return Unavailable(f"SQLite refused: path={path} reason={error}.")


def _make_parents(directory: Path) -> None:
    """mkdir -p whose new entries survive power loss."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for child in reversed(missing):
        child.mkdir(exist_ok=True)
        fd = os.open(child.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
