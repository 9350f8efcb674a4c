"""aiokafka, unmodified, against the endpoint over the real topics room (its loop is not the broker's)."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from support.kafka.harness import RealBroker


async def test_idempotent_produce_and_assigned_consume(broker: RealBroker) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await admin.start()
    await admin.create_topics([NewTopic("aio", 3, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=broker.address, enable_idempotence=True, acks="all")
    await producer.start()
    futures = [await producer.send("aio", str(i).encode(), key=str(i % 5).encode()) for i in range(600)]
    reports = await asyncio.gather(*futures)
    await producer.stop()
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.address, enable_auto_commit=False)
    await consumer.start()
    places = [TopicPartition("aio", p) for p in range(3)]
    consumer.assign(places)
    await consumer.seek_to_beginning(*places)
    found = {}
    while len(found) < 600:
        for messages in (await consumer.getmany(timeout_ms=2000)).values():
            found.update({(m.partition, m.offset): m.value for m in messages})
    assert found == {(r.partition, r.offset): str(i).encode() for i, r in enumerate(reports)}
    assert await consumer.end_offsets(places[:1]) == {
        places[0]: sum(1 for r in reports if r.partition == 0),
    }
    await consumer.stop()


async def test_a_consumer_reads_on_from_its_committed_offset(broker: RealBroker) -> None:
    broker_topic = "aio-group"
    producer = AIOKafkaProducer(bootstrap_servers=broker.address)
    await producer.start()
    for i in range(10):
        await producer.send_and_wait(broker_topic, str(i).encode(), partition=0)
    await producer.stop()
    place = TopicPartition(broker_topic, 0)
    for start, commit in ((0, 4), (4, 9)):
        consumer = AIOKafkaConsumer(
            bootstrap_servers=broker.address,
            group_id="g",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        consumer.assign([place])
        assert (await consumer.getone()).offset == start
        await consumer.commit({place: commit})
        await consumer.stop()
