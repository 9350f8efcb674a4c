"""Handler of OffsetForLeaderEpoch (23), versions 2 to 4.

Logs are never truncated by a change of leader, so every requested epoch ends at the high watermark. Metadata reports
epoch −1, so clients seldom send this request. The leader verifies its leadership first: an end below the offset that
the client has read would make the client assume a truncation (KIP-320).
"""

from __future__ import annotations

from functools import partial

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import PartitionOffsets


async def handle(context: Context, request: Request, body: Body) -> Body:
    places = ((asked["topic"], partition["partition"]) for asked in body["topics"] for partition in asked["partitions"])
    await context.cache.settle_topics(places, is_id=False)

    async def topic(asked: Body) -> Body:
        name = asked["topic"]
        one = partial(_partition, context, name)
        return {"topic": name, "partitions": await map_items(asked["partitions"], one, context.pace)}

    return {"topics": await map_items(body["topics"], topic, context.pace)}


def error_answer(body: Body, code: int) -> Body:
    return {
        "topics": [
            {
                "topic": topic["topic"],
                "partitions": [{"error_code": code, "partition": p["partition"]} for p in topic["partitions"]],
            }
            for topic in body["topics"]
        ]
    }


async def _partition(context: Context, name: str, asked: Body) -> Body:
    index = asked["partition"]
    answer: Body = {"error_code": 0, "partition": index}

    async def read_partition(row: TopicRow) -> PartitionOffsets:
        return await context.topics.offsets(row.topic_id, index, proved=True)

    try:
        offsets = await context.cache.call_with_row(name, index, read_partition)
    except TidemillError as error:
        offsets = error_codes.code_of(error)
    if isinstance(offsets, int):
        return {**answer, "error_code": offsets}
    return {**answer, "leader_epoch": asked["leader_epoch"], "end_offset": offsets.high_watermark}


API = Api(23, "offset_for_leader_epoch", 2, 4, begin_decoded(handle, error_answer))
