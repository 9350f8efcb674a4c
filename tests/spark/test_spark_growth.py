"""A topic that gets partitions while a pipeline reads it: with the real binder, their records reach its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.pipelines import running, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.status import StatusTracker
from tidemill.node.topic_binder import TopicBinder
from tidemill.shards.registry import open_remap
from tidemill.topics.partition_reader import LogPartitionReader

pytestmark = pytest.mark.spark

PIPELINE = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""


def test_the_records_of_partitions_added_while_a_pipeline_runs_reach_its_table(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.py"
    file.write_text(PIPELINE)
    stores = harbour.stores
    topic = harbour.create_topic("clicks", 2)

    async def bind() -> TopicBinder:
        binder = TopicBinder(
            harbour.topics,
            lambda: LogPartitionReader(stores.consensus, stores.objects),
            lambda name: open_remap(stores.consensus, SystemClock(), Rand(), name),
            SystemClock(),
            StatusTracker(),
        )
        binder.start()
        return binder

    binder = harbour.portal.call(bind())

    def produce(partition: int, *ids: str) -> None:
        harbour.produce(topic, [(b"k", {"click_id": i, "product_id": partition}) for i in ids], partition)

    def holds(*ids: str) -> bool:
        return harbour.upper("clicks") > 0 and {r["click_id"] for r in harbour.contents("clicks")} == set(ids)

    with running(harbour, spark, tmp_path / "a", file):
        produce(0, "a")
        produce(1, "b")
        until(lambda: holds("a", "b"), "the first partitions are read")
        harbour.portal.call(stores.catalogue.grow_topic("clicks", 4))
        harbour.heads[topic.topic_id] = [1, 1, 0, 0]
        produce(3, "d", "e")
        until(lambda: holds("a", "b", "d", "e"), "a new partition is read")
        produce(2, "c")
        produce(0, "f")
        until(lambda: holds("a", "b", "c", "d", "e", "f"), "old and new ones are read")
    harbour.portal.call(binder.aclose())
