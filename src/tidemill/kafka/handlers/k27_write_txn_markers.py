"""Handler of WriteTxnMarkers (27), versions 1 and 2: an operator ends a transaction in a partition that this node
leads.

Nodes do not send this request to each other: a partition's leader reads itself which transactions have ended.
`kafka-transactions.sh abort` and `Admin.abortTransaction` send it for a hanging transaction. Transactions should not
hang here, so this is for emergencies. A marker without an open transaction of its epoch, or an older epoch, writes
nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.topics.api import Marker

FIRST_THAT_BUMPS: Final = 2
"""Version of transactions from which epochs are incremented at the end; version 2 of this API specifies it."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    topics = [topic for asked in body["markers"] for topic in asked["topics"]]
    await context.cache.settle_topics(
        ((t["name"], index) for t in topics for index in t["partition_indexes"]), is_id=False
    )
    answers = []
    for asked in body["markers"]:
        marker = Marker(
            asked["producer_id"],
            asked["producer_epoch"],
            asked["transaction_result"],
            asked["coordinator_epoch"],
            asked.get("transaction_version", 0) >= FIRST_THAT_BUMPS,
        )
        topics = []
        for topic in asked["topics"]:
            one = partial(_write_marker, context, topic["name"], marker)
            partitions = await map_items(topic["partition_indexes"], one, context.pace)
            topics.append({"name": topic["name"], "partitions": partitions})
        answers.append({"producer_id": asked["producer_id"], "topics": topics})
    return {"markers": answers}


async def _write_marker(context: Context, name: str, marker: Marker, index: int) -> Body:
    row = context.cache.resolve(name, is_id=False)
    if isinstance(row, int) or not 0 <= index < row.partitions:
        code = row if isinstance(row, int) else error_codes.UNKNOWN_TOPIC_OR_PARTITION
    else:
        try:
            await context.topics.mark(row.topic_id, index, marker)
            code = 0
        except TidemillError as error:
            code = error_codes.code_of(error)
    return {"partition_index": index, "error_code": code}


def error_answer(body: Body, code: int) -> Body:
    return {
        "markers": [
            {
                "producer_id": asked["producer_id"],
                "topics": [
                    {
                        "name": topic["name"],
                        "partitions": [
                            {"partition_index": index, "error_code": code} for index in topic["partition_indexes"]
                        ],
                    }
                    for topic in asked["topics"]
                ],
            }
            for asked in body["markers"]
        ]
    }


API = Api(27, "write_txn_markers", 1, 2, begin_decoded(handle, error_answer))
