"""Unmodified clients on a topic whose past is in L1, and whose L0 objects are deleted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import confluent_kafka as ck
import pytest

from support.kafka.confluent import consumer, produce_all, producer, read_all
from support.kafka.harness import RealBroker
from support.waiting import eventually
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.l0_garbage import L0GarbageCollector
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.lifecycle.checkpoint import PartitionsStage

PARTITIONS = 2


@pytest.fixture(params=["memory:", "directory"])
def moving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """A broker that moves all batches to L1 immediately, in objects of some ten batches."""
    url = request.param if request.param == "memory:" else f"file://{tmp_path_factory.mktemp('objects')}"
    settings = TopicSettings(
        reconcile=True, reconcile_min_s=0.05, reconcile_max_s=0.2, l1_object_bytes=20_000, cache_bytes=0
    )
    broker = RealBroker(url, topic_settings=settings)
    yield broker
    broker.close()


def states(broker: RealBroker, topic_id: str) -> list[tuple[int, int]]:
    """(reconciled, high watermark) of each partition that is open."""
    led = [led for (topic, _), led in broker.topics._led.items() if topic == topic_id and led.is_open]
    return [(each.state.reconciled, each.state.high_watermark) for each in led]


def moved(broker: RealBroker, topic: TopicRow) -> None:
    """Run checkpoints until everything is in L1, then collect the objects that no log names."""

    async def checkpoint() -> None:
        stage = PartitionsStage(broker.consensus, broker.objects, broker.metastore, broker.clock)
        await stage.load()
        for unit in (await stage.gather()).values():
            for group in unit:
                await broker.metastore.commit(group)

    def all_moved() -> bool:
        broker.portal.call(checkpoint())
        found = states(broker, topic.topic_id)
        return len(found) == PARTITIONS and all(reconciled == end > 0 for reconciled, end in found)

    async def collect() -> list[str]:
        await collector.run(StepBudget(broker.clock, 1))
        return [meta.key async for meta in broker.objects.list("l0/")]

    eventually(all_moved)
    context = JobContext(
        broker.consensus, broker.objects, broker.metastore, broker.clock, broker.rand, Retention(collect_after_s=0)
    )
    collector = L0GarbageCollector(context, quiet_s=0)

    def nothing_left() -> bool:
        broker.portal.call(checkpoint())
        broker.portal.call(broker.metastore.flush(30))
        return not broker.portal.call(collect())

    eventually(nothing_left)


def test_a_consumer_reads_from_l1_what_was_produced_also_after_a_restart(moving: RealBroker) -> None:
    topic = moving.create_topic("past", PARTITIONS)
    records = [(str(i).encode(), b"value-%05d" % i * 20) for i in range(1_000)]
    delivered = produce_all(producer(moving, **{"batch.num.messages": 20}), "past", records)
    moved(moving, topic)
    for _ in range(2):
        found = read_all(consumer(moving), "past", PARTITIONS, len(records))
        assert {p: [(m.offset(), m.key(), m.value()) for m in each] for p, each in found.items()} == {
            p: [(m.offset(), m.key(), m.value()) for m in each] for p, each in delivered.items()
        }
        moving.restart()


def test_offsets_by_time_and_seeks_into_l1_are_exact(moving: RealBroker) -> None:
    topic = moving.create_topic("times", PARTITIONS)
    client = producer(moving)
    for i in range(400):
        client.produce("times", value=b"%d" % i, partition=i % PARTITIONS, timestamp=1_000_000 + i)
        if i % 50 == 49:
            client.flush()
    moved(moving, topic)
    reader = consumer(moving)
    for at in (0, 1, 57, 200, 399):
        wanted = [ck.TopicPartition("times", p, 1_000_000 + at) for p in range(PARTITIONS)]
        for found in reader.offsets_for_times(wanted, timeout=30):
            first = next((i for i in range(at, 400) if i % PARTITIONS == found.partition), None)
            if first is None:
                assert found.offset == ck.OFFSET_END
                continue
            assert found.offset == first // PARTITIONS
            reader.assign([ck.TopicPartition("times", found.partition, found.offset)])
            message = reader.poll(30)
            assert message is not None and message.error() is None
            assert (message.offset(), message.value()) == (found.offset, b"%d" % first)


def test_what_was_aborted_stays_aborted_in_l1(moving: RealBroker) -> None:
    topic = moving.create_topic("settled", PARTITIONS)
    client = ck.Producer({"bootstrap.servers": moving.address, "transactional.id": "tx", "batch.num.messages": 20})
    client.init_transactions(30)
    kept: list[list[bytes]] = [[], []]
    everything: list[list[bytes]] = [[], []]
    for number in range(12):
        client.begin_transaction()
        for i in range(60):
            value = b"%d.%d" % (number, i) * 10
            client.produce("settled", value, partition=i % PARTITIONS)
            everything[i % PARTITIONS].append(value)
            if number % 3:
                kept[i % PARTITIONS].append(value)
        client.flush(30)
        client.commit_transaction(30) if number % 3 else client.abort_transaction(30)
    moved(moving, topic)
    for _ in range(2):
        for level, wanted in (("read_committed", kept), ("read_uncommitted", everything)):
            reader = consumer(moving, **{"isolation.level": level})
            found = read_all(reader, "settled", PARTITIONS, sum(map(len, wanted)))
            assert [[m.value() for m in found[p]] for p in range(PARTITIONS)] == wanted
            reader.close()
        # The same from the middle of an aborted transaction: the list of aborted ones does not depend on where a read
        # begins.
        reader = consumer(moving, **{"isolation.level": "read_committed"})
        reader.assign([ck.TopicPartition("settled", 0, 100)])
        assert eventually(partial(reader.poll, 1)).value() == kept[0][60]
        reader.close()
        moving.restart()
