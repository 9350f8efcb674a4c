"""The catalogue over three real domains and several processes: no node, one node, a node that is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ConflictError, InvalidError
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.factory import NODE, TOOL, create_metastore
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS, TOPIC_IDS
from tidemill.objects.factory import open_objects

CHILD = Path(__file__).parents[1] / "support" / "metastore" / "catalogue_child.py"
DEADLINE_S = 60


class Stores:
    """Processes with separate clients on one consensus database and one bucket."""

    def __init__(self, consensus_url: str, directory: Path) -> None:
        self._consensus_url = consensus_url
        self._objects_url = str(directory / "objects")
        self._closing: list[Callable[[], Awaitable[None]]] = []

    async def process(self, settings: Any = TOOL, holder: str = "", domains: int = 3) -> Metastore:
        clock, rand = SystemClock(), Rand()
        consensus = await open_consensus(self._consensus_url, clock, rand)
        objects = await open_objects(self._objects_url, clock, rand)
        metastore = create_metastore(
            consensus, objects, clock, rand, domains=domains, settings=settings, holder=holder
        )  # fmt: skip
        self._closing += [objects.aclose, consensus.aclose, metastore.aclose]
        return metastore

    async def aclose(self) -> None:
        for close in reversed(self._closing):
            await close()


@asynccontextmanager
async def stores_at(consensus_url: str, directory: Path) -> AsyncIterator[Stores]:
    stores = Stores(consensus_url, directory)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield stores
    finally:
        await stores.aclose()


def catalogue_of(metastore: Metastore) -> Catalogue:
    return Catalogue(metastore, SystemClock(), Rand())


async def leads(metastore: Metastore, timeout_s: float = 30.0) -> None:
    for domain in await metastore.domains():
        assert isinstance(domain, Domain)
        await domain.wait_until_leading(timeout_s)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def consensus_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'consensus.db'}"
    return str(request.getfixturevalue("postgres_dsn"))


async def test_a_tool_works_with_no_node_up_and_leaves_the_lead_to_whoever_comes_next(
    consensus_url: str, tmp_path: Path
) -> None:
    async with stores_at(consensus_url, tmp_path) as stores:
        tool = await stores.process()
        row = await catalogue_of(tool).create_topic("t", 1)
        await tool.aclose()
        second = await stores.process()
        assert await catalogue_of(second).list(TopicRow) == [row]
        await catalogue_of(second).delete(TopicRow, "t")
        await second.aclose()
        node = await stores.process(replace(NODE, lease_ttl_ms=600_000), "n/1")
        await leads(node, 10.0)
        assert await catalogue_of(node).list(TopicRow) == []


async def test_tools_read_and_write_beside_a_node_that_leads(consensus_url: str, tmp_path: Path) -> None:
    async with stores_at(consensus_url, tmp_path) as stores:
        node = await stores.process(NODE, "n/1")
        await leads(node)
        one, other = await stores.process(), await stores.process()
        made = await asyncio.gather(
            *(catalogue_of(p).create_topic("t", 1) for p in (node, one, other)), return_exceptions=True
        )
        assert sum(isinstance(found, TopicRow) for found in made) == 1
        assert sum(isinstance(found, ConflictError) for found in made) == 2
        await catalogue_of(one).put(PipelineRow("p", {"a": "derived"}))
        for process in (node, one, other):
            assert len(await catalogue_of(process).list(TopicRow)) == 1
            assert await catalogue_of(process).get(PipelineRow, "p") == PipelineRow("p", {"a": "derived"})
        assert all(domain.leading for domain in await node.domains() if isinstance(domain, Domain))


async def test_another_number_of_domains_is_refused_at_the_first_use(consensus_url: str, tmp_path: Path) -> None:
    async with stores_at(consensus_url, tmp_path) as stores:
        await catalogue_of(await stores.process()).list(TopicRow)
        with pytest.raises(InvalidError, match=r"metastore\.domains=2 cluster=3"):
            await catalogue_of(await stores.process(domains=2)).list(TopicRow)


class Killed:
    """The child process, and the names that it reported as created before the kill."""

    def __init__(self, directory: Path, holder: str, ttl_ms: int, count: int) -> None:
        command = [sys.executable, str(CHILD), str(directory), holder, str(ttl_ms)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            first = child.stdout.readline()
            self.acknowledged = [child.stdout.readline().strip() for _ in range(count)]
            child.kill()
            assert first == "leading\n"
            lines = child.stdout.read().split("\n")
        self.acknowledged += [line for line in lines[:-1] if line]


async def check_rows(metastore: Metastore, acknowledged: list[str]) -> None:
    topics = {row.name: row for row in await metastore.rows(TOPIC_IDS)}
    assert {row.name for row in await catalogue_of(metastore).list(TopicRow)} == set(topics)
    assert set(acknowledged) <= set(topics)
    offsets = {row.group: row for row in await metastore.rows(GROUP_OFFSETS)}
    assert set(acknowledged) <= set(offsets), "rows of all domains survive"
    assert all(offsets[name].topic_id == topics[name].topic_id for name in acknowledged)


async def test_what_a_killed_node_acknowledged_is_read_at_once_and_written_after_its_lease(tmp_path: Path) -> None:
    killed = Killed(tmp_path, "n/1", 1_500, 60)
    async with stores_at(f"sqlite:{tmp_path / 'consensus.db'}", tmp_path) as stores:
        tool = await stores.process()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await check_rows(tool, killed.acknowledged)
        await catalogue_of(tool).create_topic("after", 1)
        assert loop.time() - began_s < 15.0, "the lease is 1.5 s, the rest is patience with a busy machine"
        await check_rows(tool, killed.acknowledged)


async def test_a_node_that_was_killed_leads_again_without_waiting_its_own_lease_out(tmp_path: Path) -> None:
    killed = Killed(tmp_path, "n/1", 600_000, 20)
    async with stores_at(f"sqlite:{tmp_path / 'consensus.db'}", tmp_path) as stores:
        node = await stores.process(NODE, "n/2")
        await leads(node)
        await check_rows(node, killed.acknowledged)
        await catalogue_of(node).create_topic("after", 1)


async def test_a_node_of_another_name_waits_for_the_lease(tmp_path: Path) -> None:
    killed = Killed(tmp_path, "n/1", 600_000, 5)
    async with stores_at(f"sqlite:{tmp_path / 'consensus.db'}", tmp_path) as stores:
        node = await stores.process(NODE, "n2/1")
        await check_rows(node, killed.acknowledged)
        assert not any(domain.leading for domain in await node.domains() if isinstance(domain, Domain))
