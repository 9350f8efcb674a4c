"""Fixtures that every room shares: one real PostgreSQL per worker process, one database per test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tidemill.node.postgres import EmbeddedPostgres

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL 18 with wal_level=logical; fsync off, since no test pulls its plug."""
    data_dir = tmp_path_factory.mktemp("postgres") / "data"
    server = EmbeddedPostgres(data_dir, settings={"fsync": "off", "shared_buffers": "32MB"})
    with server:
        yield server


@pytest.fixture
def new_database(postgres_server: EmbeddedPostgres) -> Callable[[], str]:
    """Call it for the DSN of a fresh, empty database."""

    def create() -> str:
        name = f"test_{next(_numbers)}"
        with psycopg.connect(postgres_server.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return postgres_server.dsn_for(name)

    return create


@pytest.fixture
def postgres_dsn(new_database: Callable[[], str]) -> str:
    """The DSN of a database of this test's own."""
    return new_database()
