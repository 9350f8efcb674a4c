"""One engine and one bucket with any number of `Domain` handles, each with separate clients, as nodes have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import pytest

from support.waiting import DEADLINE_S
from tidemill.base.clock import Clock, Rand, SystemClock
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.memory import MemoryConsensus, MemoryState
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectStore

LEADS = DomainSettings(lease_ttl_ms=60_000)
"""The lease is renewed every 20 s only, so that a deposed leader does not learn it from its lease."""

FOLLOWS = DomainSettings(lead=False, may_lead=False)


class DomainWorld:
    """`consensus_url` "memory:" is one engine for all handles of this world."""

    def __init__(self, consensus_url: str = "memory:", directory: Path | None = None) -> None:
        self.clock: Clock = SystemClock()
        self.rand = Rand()
        self.memory = MemoryState()
        self._url = consensus_url
        self._directory = directory
        self._memory_objects = MemoryObjects(self.clock)
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def client(self) -> Consensus:
        if self._url == "memory:":
            client: Consensus = MemoryConsensus(self.clock, self.memory)
        else:
            client = await open_consensus(self._url, self.clock, self.rand)
        self._closing.append(client.aclose)
        return client

    def objects(self) -> ObjectStore:
        if self._directory is None:
            return self._memory_objects
        store = LocalObjects.open(str(self._directory), self.clock, self.rand)
        self._closing.append(store.aclose)
        return store

    async def node(
        self,
        settings: DomainSettings = LEADS,
        *,
        consensus: Consensus | None = None,
        objects: ObjectStore | None = None,
        **options: Any,
    ) -> Domain:
        """Return a new handle, after it leads if it may lead."""
        domain = await Domain.open(
            DomainContext(
                consensus or await self.client(),
                objects or self.objects(),
                "main",
                holder="node",
                clock=self.clock,
                rand=self.rand,
                settings=settings,
                **options,
            )
        )
        self._closing.append(domain.aclose)
        if settings.lead:
            await domain.wait_until_leading(20)
        return domain

    async def lease(self) -> Lease | None:
        client = await self.client()
        return next((lease for lease in await client.leases("metastore/main") if lease.live), None)

    async def depose(self, domain: Domain) -> None:
        """Take the lease away without telling: the next node that asks for it gets it, in a newer term."""
        lease = await self.lease()
        assert lease is not None and domain.leading and lease.term == domain.term
        await (await self.client()).release(lease.name, lease.holder, lease.term)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await self.aclose()

    async def aclose(self) -> None:
        for close in reversed(self._closing):
            await close()


async def rows_of(domain: Domain) -> dict[bytes, bytes]:
    """Everything in the domain but its own rows, after a sync."""
    await domain.sync()
    found: dict[bytes, bytes] = {}
    async for keys, values in domain.scan(b"\x01"):
        found.update(zip(keys, values, strict=True))
    return found


BACKENDS = [
    ("memory", "sqlite"),
    ("local", "sqlite"),
    pytest.param(("memory", "postgres"), marks=pytest.mark.postgres),
    pytest.param(("local", "postgres"), marks=pytest.mark.postgres),
]


@pytest.fixture(params=BACKENDS, ids=lambda backend: "-".join(backend))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> DomainWorld:
    objects, consensus = request.param
    url = request.getfixturevalue("postgres_dsn") if consensus == "postgres" else f"sqlite://{tmp_path}/consensus.db"
    return DomainWorld(url, tmp_path / "bucket" if objects == "local" else None)
