"""Spark's own Kafka connector, unmodified, on tidemill's topics: batch and streaming, reading and writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient

from support.spark.connector import JARS
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.spark

BASE_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker() -> Iterator[Any]:
    if not JARS:
        pytest.skip("Spark's Kafka connector is not installed: tests/clients/install brings it where Maven is")
    from support.kafka.harness import RealBroker

    broker = RealBroker()
    yield broker
    broker.close()


def load(spark: Any, broker: Any, **options: str) -> Any:
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", broker.address)
    return reader.options(**options).load()


def follow(spark: Any, broker: Any, **options: str) -> Any:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker.address)
    return reader.options(**options).load()


def rows(frame: Any) -> list[tuple[Any, ...]]:
    found = frame.selectExpr("partition", "offset", "CAST(key AS STRING)", "CAST(value AS STRING)").collect()
    return sorted(map(tuple, found))


def produce(broker: Any, topic: str, first: int, count: int, partitions: int = 2) -> None:
    """Produce records: record n is in partition n % partitions with the timestamp BASE_MS + 1000 n."""
    producer = ck.Producer({"bootstrap.servers": broker.address})
    for n in range(first, first + count):
        producer.produce(topic, str(n), f"k{n}", n % partitions, timestamp=BASE_MS + 1000 * n, headers={"n": str(n)})
    assert producer.flush(30) == 0


def numbers(frame: Any) -> list[int]:
    return sorted(int(row[3]) for row in rows(frame))


def test_a_dataframe_is_written_and_read_back_with_keys_headers_and_nulls(spark: Any, broker: Any) -> None:
    broker.create_topic("frame", 2)
    schema = "key string, value string, partition int, headers array<struct<key: string, value: binary>>"
    made = [("a", "1", 0, [("h", b"x")]), (None, "2", 1, None), ("c", None, 0, None)]
    frame = spark.createDataFrame(made, schema)
    writer = frame.write.format("kafka").option("kafka.bootstrap.servers", broker.address)
    writer.option("topic", "frame").option("includeHeaders", "true").save()
    found = load(spark, broker, subscribe="frame", includeHeaders="true")
    assert {(*row[0::2], row[3]) for row in rows(found)} == {(0, "a", "1"), (1, None, "2"), (0, "c", None)}
    [row] = found.where("CAST(key AS STRING) = 'a'").select("headers").collect()
    assert [(header.key, bytes(header.value)) for header in row.headers] == [("h", b"x")]


def test_offsets_and_timestamps_bound_what_is_read(spark: Any, broker: Any) -> None:
    broker.create_topic("bounded", 2)
    produce(broker, "bounded", 0, 40)
    at = {"bounded": {"0": 5, "1": -2}}
    until = {"bounded": {"0": -1, "1": 3}}
    found = load(spark, broker, subscribe="bounded", startingOffsets=json.dumps(at), endingOffsets=json.dumps(until))
    assert numbers(found) == sorted([*range(10, 40, 2), 1, 3, 5])
    start, end = str(BASE_MS + 10_000), str(BASE_MS + 20_000)
    assert numbers(load(spark, broker, subscribe="bounded", startingTimestamp=start, endingTimestamp=end)) == [
        *range(10, 20)
    ]
    by_time = json.dumps({"bounded": {"0": BASE_MS + 30_000, "1": BASE_MS + 10**9}})
    latest = {"startingOffsetsByTimestamp": by_time, "startingOffsetsByTimestampStrategy": "latest"}
    assert numbers(load(spark, broker, subscribe="bounded", **latest)) == [*range(30, 40, 2)]
    assert numbers(load(spark, broker, subscribePattern="boun.*", minPartitions="7")) == [*range(40)]
    assert numbers(load(spark, broker, assign=json.dumps({"bounded": [1]}))) == [*range(1, 40, 2)]


def test_a_stream_from_topic_to_topic_goes_on_where_it_ended_and_sees_new_partitions(
    spark: Any, broker: Any, tmp_path: Path
) -> None:
    broker.create_topic("from", 2)
    broker.create_topic("to", 1)

    def run(**options: str) -> None:
        stream = follow(spark, broker, subscribe="from", **options).select("key", "value").writeStream.format("kafka")
        stream = stream.option("kafka.bootstrap.servers", broker.address).option("topic", "to")
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        assert query.awaitTermination(60)
        assert query.exception() is None

    start = {"startingTimestamp": str(BASE_MS + 10_000), "maxOffsetsPerTrigger": "7"}
    produce(broker, "from", 0, 30)
    run(**start)
    assert numbers(load(spark, broker, subscribe="to")) == [*range(10, 30)]
    produce(broker, "from", 30, 10)
    admin = AdminClient({"bootstrap.servers": broker.address})
    for done in admin.create_partitions([ck.admin.NewPartitions("from", 3)]).values():
        done.result(DEADLINE_S)
    produce(broker, "from", 40, 9, partitions=3)
    run(**start)
    assert numbers(load(spark, broker, subscribe="to")) == [*range(10, 49)]


def test_lost_records_end_a_stream_or_not_as_it_was_told(spark: Any, broker: Any, tmp_path: Path) -> None:
    broker.create_topic("cut", 1)
    admin = AdminClient({"bootstrap.servers": broker.address})

    def run(checkpoint: str, fail: bool) -> list[int]:
        found: list[int] = []
        frame = follow(spark, broker, subscribe="cut", startingOffsets="earliest", failOnDataLoss=str(fail).lower())
        stream = frame.writeStream.foreachBatch(lambda batch, _: found.extend(numbers(batch)))
        stream = stream.option("checkpointLocation", str(tmp_path / checkpoint))
        stream.trigger(availableNow=True).start().awaitTermination(60)
        return sorted(found)

    produce(broker, "cut", 0, 10, partitions=1)
    assert run("a", True) == [*range(10)]
    assert run("b", False) == [*range(10)]
    produce(broker, "cut", 10, 10, partitions=1)
    for done in admin.delete_records([ck.TopicPartition("cut", 0, 15)]).values():
        assert done.result(DEADLINE_S).low_watermark == 15
    assert run("b", False) == [*range(15, 20)]
    with pytest.raises(Exception, match=r"(?i)data.?loss|some data may have been lost|offset.*out of range"):
        run("a", True)


def test_a_failed_batch_of_a_stream_is_written_again_whole(spark: Any, broker: Any, tmp_path: Path) -> None:
    """The connector's sink is at least once; every record of a batch that failed half-way arrives."""
    broker.create_topic("again-from", 1)
    broker.create_topic("again-to", 1)
    produce(broker, "again-from", 0, 20, partitions=1)
    failed: list[int] = []

    def write(frame: Any, number: int) -> None:
        frame.write.format("kafka").option("kafka.bootstrap.servers", broker.address).option("topic", "again-to").save()
        if not failed:
            failed.append(number)
            raise RuntimeError("after the write")

    def run() -> None:
        frame = follow(spark, broker, subscribe="again-from", startingOffsets="earliest").select("key", "value")
        stream = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "again"))
        stream.trigger(availableNow=True).start().awaitTermination(60)

    with pytest.raises(Exception, match="after the write"):
        run()
    run()
    assert numbers(load(spark, broker, subscribe="again-to")) == sorted([*range(20), *range(20)])
