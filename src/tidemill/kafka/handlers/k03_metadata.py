"""Metadata (3), versions 0 to 13.

Topics by name, by id (v12), or all (null; in v0 the empty list). The catalogue is read for every answer, so a
topic created through another node is seen at once; the answer also fills the cache Produce resolves from. While
the catalogue cannot be read, known topics are answered from that cache, others with LEADER_NOT_AVAILABLE.
A missing topic is created when the settings and the request (v4; before that always) allow it.

Leader epoch is −1: terms are not shown to clients yet, and −1 switches their epoch checks off. Replicas and
in-sync replicas are the leader alone: durability is the bucket's. Left out: authorized operations.
"""

from __future__ import annotations

from typing import Final

import structlog

from tidemill.base.errors import Conflict, Invalid, TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Broker, Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.kafka.schema.wire import ZERO_UUID
from tidemill.metastore.catalogue import TopicRow

log = structlog.get_logger()

_ONE_BY_ONE_MAX: Final = 8
"""More topics than this are read from the catalogue in one scan."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    brokers = context.brokers()
    asked = body["topics"]
    every = asked is None or (request.version == 0 and not asked)
    if every or len(asked) > _ONE_BY_ONE_MAX:
        try:
            await context.cache.refresh()
        except TidemillError as error:
            log.warning("kafka.catalogue_not_read", error=str(error))
    if every:
        topics = [_describe(context, row, brokers) for row in context.cache.rows()]
    else:
        may_create = context.settings.auto_create_topics and body.get("allow_auto_topic_creation", True)
        just_read = len(asked) > _ONE_BY_ONE_MAX
        topics = []
        for topic in asked:
            row = context.cache.by_name(topic.get("name") or "") if just_read else None
            if row is not None:
                topics.append(_describe(context, row, brokers))
            else:
                topics.append(await _one(context, brokers, topic, may_create))
    return {
        "brokers": [{"node_id": b.node_id, "host": b.host, "port": b.port} for b in brokers],
        "cluster_id": context.settings.cluster_id,
        "controller_id": brokers[0].node_id,
        "topics": topics,
        "error_code": 0,
    }


async def _one(context: Context, brokers: list[Broker], asked: Body, may_create: bool) -> Body:
    name, topic_id = asked.get("name"), asked.get("topic_id", ZERO_UUID)
    row: TopicRow | None
    try:
        row = await _find(context, name, topic_id, may_create)
    except Invalid:
        return _refused(name, topic_id, errors.INVALID_TOPIC_EXCEPTION)
    except TidemillError:
        row = context.cache.by_name(name) if name else context.cache.by_id(topic_id)
        if row is None:
            return _refused(name, topic_id, errors.LEADER_NOT_AVAILABLE)
    if row is None:
        unknown = errors.UNKNOWN_TOPIC_OR_PARTITION if name else errors.UNKNOWN_TOPIC_ID
        return _refused(name, topic_id, unknown)
    return _describe(context, row, brokers)


async def _find(context: Context, name: str | None, topic_id: str, may_create: bool) -> TopicRow | None:
    if not name:
        row = context.cache.by_id(topic_id)
        if row is None:
            await context.cache.refresh()
            row = context.cache.by_id(topic_id)
        return row
    row = await context.catalogue.get(TopicRow, name)
    if row is None and may_create:
        try:
            row = await context.catalogue.create_topic(name, context.settings.default_partitions)
        except Conflict as lost:
            row = lost.current if isinstance(lost.current, TopicRow) else None
    if row is None:
        context.cache.forget(name)
    else:
        context.cache.learn(row)
    return row


def _refused(name: str | None, topic_id: str, code: int) -> Body:
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": []}


def _describe(context: Context, row: TopicRow, brokers: list[Broker]) -> Body:
    by_name = {broker.name: broker.node_id for broker in brokers}
    partitions = []
    for index in range(row.partitions):
        leader = by_name.get(context.topics.leader_of(row.topic_id, index))
        replicas = [] if leader is None else [leader]
        partitions.append(
            {
                "error_code": errors.LEADER_NOT_AVAILABLE if leader is None else 0,
                "partition_index": index,
                "leader_id": -1 if leader is None else leader,
                "replica_nodes": replicas,
                "isr_nodes": replicas,
            }
        )
    return {"error_code": 0, "name": row.name, "topic_id": row.topic_id, "partitions": partitions}


API = Api(3, "metadata", 0, 13, cold(handle))
