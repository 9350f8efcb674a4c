"""Servers of the PostgreSQL versions that are installed for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.postgres import EmbeddedPostgres

INSTALLED = Path(__file__).parents[2] / "clients" / "node_modules"

SETTINGS = {"fsync": "off", "shared_buffers": "16MB"}


@pytest.fixture(scope="module", params=["18", "15"])
def postgres_server(
    request: pytest.FixtureRequest, postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedPostgres]:
    """The newest, and the oldest with column lists."""
    if request.param == "18":
        yield postgres_server
        return
    binaries = INSTALLED / f"postgres-{request.param}" / "native" / "bin"
    if not (binaries / "postgres").exists():
        pytest.skip(f"PostgreSQL {request.param} is not here: tests/clients/install")
    data_dir = tmp_path_factory.mktemp(f"postgres{request.param}") / "data"
    with EmbeddedPostgres(data_dir, settings=SETTINGS, binaries=binaries) as server:
        yield server
