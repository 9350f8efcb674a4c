"""The contract of a domain as the catalogue uses it, on real domains and on the fake of unit tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from contracts.rows import OpenDomain, OpenProcess, RowsContract
from support.metastore.memory_rows import MemoryRows, Shared
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.api import DomainRows
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext
from tidemill.metastore.factory import NODE, TOOL
from tidemill.objects.factory import open_objects
from tidemill.objects.memory import MemoryObjects


@asynccontextmanager
async def memory_domain() -> AsyncIterator[OpenProcess]:
    shared = Shared()

    async def process() -> DomainRows:
        return MemoryRows(shared)

    yield process


class TestStandIn(RowsContract):
    @pytest.fixture
    def open_domain(self) -> OpenDomain:
        return memory_domain


@asynccontextmanager
async def real_domain(directory: Path | None, nodes: int) -> AsyncIterator[OpenProcess]:
    """Open a real domain. The first `nodes` processes try to lead, all others are tools. Without a directory it is in
    memory."""
    clock, rand = SystemClock(), Rand()
    state = MemoryState()
    objects = MemoryObjects(clock) if directory is None else await open_objects(str(directory / "objects"), clock, rand)
    opened: list[Domain] = []
    stores = []

    async def process() -> DomainRows:
        if directory is None:
            consensus = MemoryConsensus(clock, state)
        else:
            consensus = await open_consensus(f"sqlite:{directory / 'consensus.db'}", clock, rand)
        stores.append(consensus)
        settings = NODE if len(opened) < nodes else TOOL
        domain = await Domain.open(
            DomainContext(
                consensus, objects, "0", holder=f"p{len(opened)}/1", clock=clock, rand=rand, settings=settings
            )
        )
        opened.append(domain)
        return domain

    try:
        yield process
    finally:
        for domain in opened:
            await domain.aclose()
        for store in stores:
            await store.aclose()
        await objects.aclose()


class TestDomainInMemory(RowsContract):
    @pytest.fixture(params=[0, 1, 2], ids=["tools", "node", "nodes"])
    def open_domain(self, request: pytest.FixtureRequest) -> OpenDomain:
        return partial(real_domain, None, request.param)


class TestDomainOnSqlite(RowsContract):
    @pytest.fixture(params=[0, 1], ids=["tools", "node"])
    def open_domain(self, request: pytest.FixtureRequest, tmp_path: Path) -> OpenDomain:
        return partial(real_domain, tmp_path, request.param)
