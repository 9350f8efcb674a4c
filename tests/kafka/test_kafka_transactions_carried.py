"""Completion of a transaction: the answers of nodes for partitions that other nodes lead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import UnavailableError
from tidemill.consensus.api import Versioned
from tidemill.consensus.memory import MemoryConsensus
from tidemill.kafka.transactions.completion import TransactionCompletion
from tidemill.kafka.transactions.coordinator import TransactionCoordinator, TransactionLimits
from tidemill.kafka.transactions.state import Offsets, State
from tidemill.topics.api import Marker, NotLeaderError, TransactionSnapshot
from tidemill.topics.produce.producer_ids import ProducerIds


class Led:
    """Partition leaders: this node leads partition 0, another node 1. This node also leads 2, which fails once."""

    def __init__(self) -> None:
        self.marked: list[int] = []
        self.reported: set[str] = set()
        self._fails = True

    def leader_of(self, topic_id: str, partition: int) -> str:
        return "other" if partition == 1 else "own"

    async def transaction_snapshot(self, topic_id: str, partition: int, producer_id: int) -> TransactionSnapshot:
        return (-1, None)

    async def mark(
        self, topic_id: str, partition: int, marker: Marker, here: TransactionSnapshot | None = None
    ) -> None:
        if partition == 1 and "other" not in self.reported:
            raise NotLeaderError("another node leads.", leader="other")
        if partition == 2 and self._fails:
            self._fails = False
            raise UnavailableError("the store is away.")
        self.marked.append(partition)


class NoGroups:
    def owner_of(self, group: str) -> str:
        return ""

    async def commit(self, group: str, offsets: Offsets, wanted: Callable[[], Awaitable[bool]]) -> None:
        raise AssertionError("no offsets were committed")


def test_a_partition_led_elsewhere_is_its_leaders_to_mark_and_nothing_to_log() -> None:
    async def body() -> None:
        consensus, rand, topics = MemoryConsensus(SystemClock()), Rand(7), Led()
        made: Any = topics
        transactions = TransactionCoordinator(
            consensus, TransactionCompletion(consensus, made, NoGroups()), ProducerIds(consensus, rand), SystemClock(),
            rand, coordinates=lambda _: True, limits=TransactionLimits(timeout_max_ms=60_000, expires_ms=1 << 40),
        )  # fmt: skip
        transactions.completion.remind = lambda node, _: topics.reported.add(node)
        code, producer_id, epoch = await transactions.init("id", timeout_ms=60_000)
        assert code == 0
        assert await transactions.add("id", producer_id, epoch, partitions={"t": (0, 1, 2)}) == 0
        assert await transactions.end("id", producer_id, epoch, commit=True) == 0
        assert set(topics.marked) == {0, 1, 2}
        await transactions.aclose()

    with capture_logs() as logs:
        asyncio.run(asyncio.wait_for(body(), 60))
    assert [(line["event"], line["partition"]) for line in logs] == [("transaction.not_marked", 2)]


class Overtaken(MemoryConsensus):
    """`peer` runs once, between a read of one register or of all, and its answer."""

    peer: tuple[str, Callable[[], Awaitable[object]]] | None = None

    async def head(self, key: str) -> Versioned | None:
        found = await super().head(key)
        await self._overtake("head")
        return found

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        found = await super().scan(prefix)
        await self._overtake("scan")
        return found

    async def _overtake(self, read: str) -> None:
        if self.peer is not None and self.peer[0] == read:
            (_, peer), self.peer = self.peer, None
            await peer()


@pytest.mark.parametrize("read", ["scan", "head"])
async def test_a_transaction_that_opens_while_all_are_taken_over_is_aborted_at_its_timeout(read: str) -> None:
    consensus, rand, nothing = Overtaken(SystemClock()), Rand(7), cast(Any, Led())
    transactions = TransactionCoordinator(
        consensus, TransactionCompletion(consensus, nothing, NoGroups()), ProducerIds(consensus, rand), SystemClock(),
        rand, coordinates=lambda _: True, limits=TransactionLimits(timeout_max_ms=60_000, expires_ms=1 << 40),
    )  # fmt: skip
    _, producer_id, epoch = await transactions.init("id", timeout_ms=300)
    opened: list[asyncio.Task[int]] = []

    async def open_transaction() -> None:
        adding = transactions.add("id", producer_id, epoch, partitions={"t": (0,)})
        opened.append(asyncio.create_task(adding))
        await asyncio.wait(opened, timeout=0.2)  # it may have to wait for the check

    consensus.peer = (read, open_transaction)
    await (transactions.take_over() if read == "scan" else transactions.check("id"))
    assert await opened[0] == 0

    async def is_aborted() -> bool:
        found = await transactions.read("id")
        return found is not None and found.state is State.COMPLETE_ABORT

    await until(is_aborted, "its producer has gone")
    await transactions.aclose()
