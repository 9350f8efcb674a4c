"""Client that asks the brokers for the first offset of a time, while batches move into L1 and retention removes others.

Oracle: for the time of a record that was acknowledged before and known to the leader, the answer is at or before that
record, and not below the log start; "none" is answered only if retention removed the record.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from sim.world import Down, Link, Violated
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.partition_reader import LogPartitionReader

if TYPE_CHECKING:
    from sim.scenarios.topics import Cluster

Answer = tuple[tuple[int, int] | None, int, int]
"""((offset, timestamp) or None, log start before, log start after)."""


async def ask_for_times(cluster: Cluster, partition: int, stop: asyncio.Event) -> None:
    source = random.Random(f"times/{cluster.world.seed}/{partition}")
    pause_s = source.choice((0.02, 0.3, 0.3, 0.3)) if not cluster.fault else 0.02
    while not stop.is_set():
        await asyncio.sleep(source.uniform(0, pause_s))
        known = [(v, at) for v, (p, at) in cluster.acknowledged.items() if p == partition and v in cluster.times]
        broker = cluster.pick(partition)
        if broker is None or not known:
            continue
        value, offset = source.choice(known[-3:] if source.random() < 0.7 else known)  # the newest are still moving
        link = Link(broker)
        try:
            async with asyncio.timeout(5.0):
                answer = await link.request(lambda node: _asked(node, cluster, partition, value, offset))  # noqa: B023
        except (TimeoutError, Down):
            continue
        except TidemillError as error:
            if isinstance(error, CorruptError):
                raise Violated(f"records are gone: partition={partition} asked by time, error={error}") from error
            continue
        finally:
            link.close()
        if answer is not None:
            await _check(cluster, partition, offset, cluster.times[value], answer)


async def _asked(node: LocalTopics, cluster: Cluster, partition: int, value: bytes, offset: int) -> Answer | None:
    """Ask one node. Return None if it may have been fenced before the record was written."""
    topic_id = cluster.topic.topic_id
    led = await node._partitions.opened(topic_id, partition)
    before, knows = led.state.log_start, led.state.high_watermark > offset
    found = await node.offset_for_time(topic_id, partition, cluster.times[value])
    return (found, before, led.state.log_start) if knows and node._led.get((topic_id, partition)) is led else None


async def _check(cluster: Cluster, partition: int, offset: int, asked_ms: int, answer: Answer) -> None:
    found, before, after = answer
    late = found is None or found[0] > offset
    if late and after <= offset:
        # A leader that was fenced in between does not know its successor's log start.
        reader = LogPartitionReader(cluster.world.consensus, cluster.world.objects)
        after = await reader.log_start(cluster.topic.topic_id, partition)
    if (late and after <= offset) or (found is not None and (found[0] < before or found[1] < asked_ms)):
        raise Violated(
            f"a time is answered wrongly: partition={partition} asked_ms={asked_ms} known_at={offset} answer={found} "
            f"log_start={before}..{after}"
        )
