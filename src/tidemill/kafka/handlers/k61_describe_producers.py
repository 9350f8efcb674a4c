"""Handler of DescribeProducers (61), version 0: the stored producers of a partition, with the starts of their open
transactions.

The coordinator's epoch is always −1: a marker can be written by any node that completes the transaction.
"""

from __future__ import annotations

from functools import partial

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import ProducerStatus


async def handle(context: Context, request: Request, body: Body) -> Body:
    places = ((topic["name"], index) for topic in body["topics"] for index in topic["partition_indexes"])
    await context.cache.settle_topics(places, is_id=False)
    topics = []
    for topic in body["topics"]:
        one = partial(_partition, context, topic["name"])
        topics.append(
            {"name": topic["name"], "partitions": await map_items(topic["partition_indexes"], one, context.pace)}
        )
    return {"topics": topics}


def _answer(index: int, code: int, message: str | None = None) -> Body:
    return {"partition_index": index, "error_code": code, "error_message": message, "active_producers": []}


async def _partition(context: Context, name: str, index: int) -> Body:

    async def read_partition(row: TopicRow) -> list[ProducerStatus]:
        return await context.topics.producers(row.topic_id, index)

    try:
        found = await context.cache.call_with_row(name, index, read_partition)
        if isinstance(found, int):
            return _answer(index, found)
    except TidemillError as error:
        return _answer(index, error_codes.code_of(error), str(error))
    producers = [
        {
            "producer_id": each.producer_id,
            "producer_epoch": each.epoch,
            "last_sequence": each.last_sequence,
            "last_timestamp": each.last_timestamp_ms,
            "coordinator_epoch": -1,
            "current_txn_start_offset": each.open_since,
        }
        for each in found
    ]
    return {**_answer(index, 0), "active_producers": producers}


def error_answer(body: Body, code: int) -> Body:
    return {
        "topics": [
            {"name": t["name"], "partitions": [_answer(index, code) for index in t["partition_indexes"]]}
            for t in body["topics"]
        ]
    }


API = Api(61, "describe_producers", 0, 0, begin_decoded(handle, error_answer))
