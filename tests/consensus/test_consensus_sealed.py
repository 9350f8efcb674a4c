"""Checksums of records and registers in SQLite: a flipped bit raises CorruptError for its own log or register only."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError
from tidemill.consensus.operations import Append, Cas, Head, Read, Scan
from tidemill.consensus.sqlite import record_storage
from tidemill.consensus.sqlite.engine import SqliteEngine


def filled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two logs whose records are settled, except for the newest commit, and two registers."""
    monkeypatch.setattr(record_storage, "RECENT_BYTES", 0)
    engine = SqliteEngine(path, SystemClock())
    for position in range(3):
        engine.commit(
            [Append(log, 0, position, (b"%s-%d" % (log.encode(), position) * 20,), "n") for log in ("a", "b")]
        )
    engine.commit([Cas("x", 0, b"value of x", "n"), Cas("y", 0, b"\xc1value of y", "n")])
    engine.close()


def damage(path: Path, table: str, column: str, what: bytes) -> None:
    """Flip one bit of `what`; SQLite finds nothing wrong."""
    connection = apsw.Connection(str(path))
    for row, stored in connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
        at = bytes(stored).find(what)
        if at >= 0:
            flipped = bytearray(stored)
            flipped[at] ^= 1
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (bytes(flipped), row))
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
            return
    raise AssertionError(f"{what!r} is not in {table}")


def test_f528_a_flipped_bit_of_a_settled_record_is_corrupt_for_its_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "consensus.db"
    filled(path, monkeypatch)
    damage(path, "settled", "body", b"a-1")
    engine = SqliteEngine(path, SystemClock())
    with pytest.raises(CorruptError, match="chunk of records is damaged"):
        engine.execute_read(Read("a", 0, 100, 1 << 20))
    assert [r.data[:3] for r in engine.execute_read(Read("b", 0, 100, 1 << 20)).records] == [b"b-0", b"b-1", b"b-2"]
    engine.close()


def test_a_flipped_bit_of_a_recent_record_is_corrupt_when_the_database_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "consensus.db"
    engine = SqliteEngine(path, SystemClock())
    engine.commit([Append("a", 0, 0, (b"a-0",), "n")])
    engine.close()
    damage(path, "recent", "body", b"a-0")
    with pytest.raises(CorruptError, match="group of records is damaged"):
        SqliteEngine(path, SystemClock())


def test_a_flipped_bit_of_a_register_is_corrupt_for_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "consensus.db"
    filled(path, monkeypatch)
    damage(path, "registers", "data", b"value of x")
    engine = SqliteEngine(path, SystemClock())
    with pytest.raises(CorruptError, match="key=x"):
        engine.execute_read(Head("x"))
    with pytest.raises(CorruptError, match="key=x"):
        engine.execute_read(Scan(""))
    (refused,) = engine.commit([Cas("x", 1, b"new", "m")])
    assert isinstance(refused, CorruptError)
    assert engine.execute_read(Head("y")).data == b"\xc1value of y"
    engine.close()
