"""The SQLite database returns the space of truncated records to the file system."""

from __future__ import annotations

from pathlib import Path

import apsw

from tidemill.base.clock import ManualClock
from tidemill.consensus.operations import Append, Read, Truncate
from tidemill.consensus.sqlite.engine import SPACE_CHECK_INTERVAL_S, SqliteEngine

RECORD = b"r" * 100_000
COUNT = 200
AT_ONCE = 20


def test_a_database_whose_records_are_truncated_becomes_small_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "consensus.db", ManualClock()
    engine = SqliteEngine(path, clock)
    try:
        for position in range(0, COUNT, AT_ONCE):
            engine.commit([Append("big", 0, position, (RECORD,) * AT_ONCE, f"n{position}")])
        large = pages(path)
        engine.commit([Truncate("big", COUNT)])
        for position in range(100):
            clock.advance(int(SPACE_CHECK_INTERVAL_S * 1000))
            engine.commit([Append("small", 0, position, (b"x",), f"s{position}")])
        assert large > COUNT * len(RECORD) // 4096
        assert pages(path) < large // 2
        assert len(engine.execute_read(Read("small", 0, 1_000, 1 << 20)).records) == 100
    finally:
        engine.close()


def pages(path: Path) -> int:
    connection = apsw.Connection(str(path), apsw.SQLITE_OPEN_READONLY)
    try:
        count: int = connection.execute("PRAGMA page_count").fetchall()[0][0]
        return count
    finally:
        connection.close()
