"""The contract of a domain as the catalogue uses it, on the stand-in of unit tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from memory_rows import MemoryRows, Shared
from tests.contracts.rows import OpenDomain, OpenProcess, RowsContract

from tidemill.metastore.front import Rows


@asynccontextmanager
async def memory_domain() -> AsyncIterator[OpenProcess]:
    shared = Shared()

    async def process() -> Rows:
        return MemoryRows(shared)

    yield process


class TestStandIn(RowsContract):
    @pytest.fixture
    def open_domain(self) -> OpenDomain:
        return memory_domain
