"""Handler of DescribeTopicPartitions (75), version 0: topics by name, one page of partitions at a time (KIP-966).

A page has at most PARTITIONS_PER_PAGE partitions, over topics in the order of their names; `next_cursor` names the
start of the next page. An empty list of topics requests all that the client may describe: neither a page nor its cursor
names another one. Leader epoch and replicas are as in Metadata; there are no eligible leader replicas.
"""

from __future__ import annotations

from typing import Any, Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.schema.primitives import ZERO_UUID
from tidemill.metastore.catalogue import TopicRow
from tidemill.security.acls import Operation, Resource

PARTITIONS_PER_PAGE: Final = 2_000
"""Limit of partitions per page; Kafka's default of max.request.partition.size.limit."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    cursor: Any = body["cursor"]
    begin, first = (cursor["topic_name"], cursor["partition_index"]) if cursor else ("", 0)
    if first < 0:
        return error_answer(body, error_codes.INVALID_REQUEST)
    asked = sorted({topic["name"] for topic in body["topics"]})
    try:
        await context.cache.refresh()
    except TidemillError:
        return error_answer(body, error_codes.LEADER_NOT_AVAILABLE)
    node_ids = {broker.name: broker.node_id for broker in context.brokers()}
    left = min(max(body["response_partition_limit"], 1), PARTITIONS_PER_PAGE)
    topics: list[Body] = []
    for name in asked or sorted(row.name for row in context.cache.rows()):
        if name < begin:
            continue
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        if not asked and not context.access.is_visible(request.visitor, Operation.DESCRIBE, Resource.TOPIC, name):
            continue
        row = context.cache.by_name(name)
        if row is None:
            if asked:
                topics.append(_topic(name, ZERO_UUID, error_codes.UNKNOWN_TOPIC_OR_PARTITION))
            continue
        start = first if name == begin else 0
        if not left:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": start}}
        end = min(row.partitions, start + left)
        left -= max(0, end - start)
        found = [_partition(context, node_ids, row, index) for index in range(start, end)]
        topics.append(_topic(row.name, row.topic_id, error_codes.NONE, found))
        if end < row.partitions:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": end}}
    return {"topics": topics, "next_cursor": None}


def _partition(context: Context, node_ids: dict[str, int], row: TopicRow, index: int) -> Body:
    leader = node_ids.get(context.topics.leader_of(row.topic_id, index))
    replicas = [] if leader is None else [leader]
    return {
        "error_code": error_codes.LEADER_NOT_AVAILABLE if leader is None else error_codes.NONE,
        "partition_index": index,
        "leader_id": -1 if leader is None else leader,
        "replica_nodes": replicas,
        "isr_nodes": replicas,
        "eligible_leader_replicas": [],
        "last_known_elr": [],
        "offline_replicas": [],
    }


def _topic(name: str, topic_id: str, code: int, partitions: list[Body] | None = None) -> Body:
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic_id,
        "is_internal": False,
        "partitions": partitions or [],
        "topic_authorized_operations": -(2**31),
    }


def error_answer(body: Body, code: int) -> Body:
    return {"topics": [_topic(topic["name"], ZERO_UUID, code) for topic in body["topics"]], "next_cursor": None}


API = Api(75, "describe_topic_partitions", 0, 0, begin_decoded(handle, error_answer))
