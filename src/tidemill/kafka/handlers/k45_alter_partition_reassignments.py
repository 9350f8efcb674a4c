"""Handler of AlterPartitionReassignments (45), version 0, which never moves anything.

There are no replicas to move: replicas other than the leader are INVALID_REPLICA_ASSIGNMENT, the leader alone is the
current state, and canceling a reassignment (null) is NO_REASSIGNMENT_IN_PROGRESS.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

Code = Callable[[str, Body], int]
"""Function of a topic and the requested partition; returns the partition's code."""

MESSAGE = "Records are in the bucket and leaders follow the live nodes: there are no replicas to move."


async def handle(context: Context, request: Request, body: Body) -> Body:
    places = ((t["name"], p["partition_index"]) for t in body["topics"] for p in t["partitions"])
    await context.cache.settle_topics(places, is_id=False)
    node_ids = {broker.name: broker.node_id for broker in context.brokers()}

    def code(name: str, partition: Body) -> int:
        index, replicas = partition["partition_index"], partition["replicas"]
        row = context.cache.resolve(name, is_id=False)
        if isinstance(row, int):
            return row
        if not 0 <= index < row.partitions:
            return context.cache.missing_partition_code(row, index)
        if replicas is None:
            return error_codes.NO_REASSIGNMENT_IN_PROGRESS
        there = [node_ids.get(context.topics.leader_of(row.topic_id, index))]
        return error_codes.NONE if list(replicas) == there else error_codes.INVALID_REPLICA_ASSIGNMENT

    return _answer(body, code)


def _answer(body: Body, code: Code, error_code: int = 0) -> Body:
    responses = []
    for topic in body["topics"]:
        partitions = []
        for partition in topic["partitions"]:
            found = code(topic["name"], partition)
            message = MESSAGE if found == error_codes.INVALID_REPLICA_ASSIGNMENT else None
            index = partition["partition_index"]
            partitions.append({"partition_index": index, "error_code": found, "error_message": message})
        responses.append({"name": topic["name"], "partitions": partitions})
    return {"error_code": error_code, "error_message": None, "responses": responses}


def error_answer(body: Body, code: int) -> Body:
    return _answer(body, lambda *_: code, code)


API = Api(45, "alter_partition_reassignments", 0, 0, begin_decoded(handle, error_answer))
