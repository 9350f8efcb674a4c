"""A transaction coordinator and the records of a partition that a transaction writes."""

from __future__ import annotations

import asyncio

from support.topics.world import World, batch, values_of
from tidemill.base.errors import TidemillError
from tidemill.spark.decode.records import Slice, cut_blocks
from tidemill.topics.api import Fetched, FetchRead, InvalidTransactionError, ProduceTransaction
from tidemill.topics.batch.control_batch import as_transactional
from tidemill.topics.batch.header import CONTROL, parse_header
from tidemill.topics.local_topics import LocalTopics

WITHIN = ProduceTransaction("tx")


class Coordinator:
    """Says which transactions are open; an answer may be held back."""

    def __init__(self) -> None:
        self.open: set[tuple[int, int]] = set()
        self.asked = 0
        self.gate: asyncio.Event | None = None
        self.error: TidemillError | None = None

    async def confirm(
        self, within: ProduceTransaction, producer_id: int, epoch: int, topic_id: str, partition: int
    ) -> None:
        self.asked += 1
        found = (producer_id, epoch) in self.open
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if not found:
            raise InvalidTransactionError(f"not open: producer_id={producer_id} epoch={epoch}.")


def open_node(world: World, coordinator: Coordinator) -> LocalTopics:
    node = world.node()
    node.set_coordinator(coordinator.confirm)
    return node


def data(*values: str, pid: int, epoch: int = 0, seq: int = 0) -> bytes:
    return as_transactional(batch(*values, pid=pid, epoch=epoch, seq=seq))


async def committed(node: LocalTopics, topic_id: str, offset: int = 0, wait_s: float = 0.0) -> Fetched:
    read = FetchRead(topic_id, 0, offset, 1 << 20, committed=True)
    (found,) = await node.fetch([read], max_wait_s=wait_s, min_bytes=1, max_bytes=1 << 24)
    return found


def shown(found: Fetched) -> list[str]:
    """Return the values that a Kafka consumer shows: aborted producers are hidden from their first offset to
    their next marker.
    """
    waiting = list(found.aborted)
    aborted: set[int] = set()
    out: list[str] = []
    for each in found.batches:
        header = parse_header(each)
        while waiting and waiting[0][1] <= header.next_offset - 1:
            aborted.add(waiting.pop(0)[0])
        if header.attributes & CONTROL:
            aborted.discard(header.producer_id)
        elif not (header.attributes & 0x10 and header.producer_id in aborted):
            out += [value for _, value in values_of([each])]
    return out


async def planned(world: World, topic_id: str) -> list[str]:
    """Return the values for readers of the log, such as the Spark source."""
    end = await world.reader.last_stable(topic_id, 0)
    refs = await world.reader.plan(topic_id, 0, 0, end)
    piece = Slice("t", topic_id, 0, 0, end, (end,), (1,))
    return [
        (value or b"").decode()
        for block in cut_blocks([(piece, await world.reader.read(refs), refs)])
        for value in block.values
    ]
