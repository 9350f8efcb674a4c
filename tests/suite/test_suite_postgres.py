"""The embedded PostgreSQL starts for any user, resumes its directory, and survives a killed supervisor."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from support.postgres import EmbeddedPostgres

pytestmark = pytest.mark.postgres


def test_a_fresh_directory_answers_with_logical_wal(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
        assert connection.execute("SELECT current_setting('server_version_num')::int / 10000").fetchone() == (18,)


def test_a_server_that_outlived_its_supervisor_is_ended_and_its_rows_are_kept(tmp_path: Path) -> None:
    data_dir = tmp_path / "closed" / "data"
    data_dir.parent.mkdir(mode=0o700)
    first = EmbeddedPostgres(data_dir).start()
    with psycopg.connect(first.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (id int PRIMARY KEY)")
        connection.execute("INSERT INTO kept VALUES (1)")
    with EmbeddedPostgres(data_dir) as second, psycopg.connect(second.dsn) as connection:
        assert connection.execute("SELECT id FROM kept").fetchall() == [(1,)]
        assert not first.running
