"""Handler of Metadata (3), versions 0 to 13.

Topics are requested by name, by id (v12), or all (null; in v0 the empty list). The catalogue is read for every answer,
so a topic created through another node is visible immediately. The answer also fills the cache from which Produce
resolves. While the catalogue cannot be read, cached topics are answered from the cache and others with
LEADER_NOT_AVAILABLE. A missing topic is created if the settings and the request (v4; always before that) allow it: at
most AUTO_CREATED_MAX per request, within the cluster's `partitions_max`.

The controller is the answering node: every node accepts admin requests, and the client reaches this one. The leader
epoch is −1: clients do not see terms yet, and −1 disables their epoch checks. Replicas and in-sync replicas are the
leader alone, because the bucket provides durability.
"""

from __future__ import annotations

from typing import Final

import structlog

from tidemill.base.errors import ConflictError, InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Broker, Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.api.required_operations import is_creation_allowed
from tidemill.kafka.metadata.encoded_partitions import NO_LEADER
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.schema.primitives import ZERO_UUID
from tidemill.metastore.catalogue import TopicRow, check_topic_name

log = structlog.get_logger()

_ONE_BY_ONE_MAX: Final = 8
"""Number of topics up to which they are read from the catalogue one by one; more are read in one scan."""

_IDS_FROM: Final = 12
"""First version that may request by id. v10 and v11 have a field for ids but require the name, so that answers name
every topic.
"""

AUTO_CREATED_MAX: Final = 16
"""Topics that one request may create. The others are unknown to it; clients ask again."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    brokers = context.brokers()
    asked = body["topics"]
    every = asked is None or (request.version == 0 and not asked)
    just_read = every or len(asked) > _ONE_BY_ONE_MAX
    if just_read:
        try:
            await context.cache.refresh()
        except TidemillError as error:
            log.warning("kafka.catalogue_not_read", error=str(error))
            just_read = False
    answering = _MetadataAnswers(context, request, brokers, just_read)
    if context.settings.section.auto_create_topics and body.get("allow_auto_topic_creation", True):
        answering.may_create = AUTO_CREATED_MAX
    topics: list[Body] = []
    for topic in context.cache.rows() if every else asked:
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        topics.append(
            await (answering.describe(topic) if isinstance(topic, TopicRow) else answering.answer_topic(topic))
        )
    return {
        "brokers": [{"node_id": b.node_id, "host": b.host, "port": b.port} for b in brokers],
        "cluster_id": context.settings.cluster_id,
        "controller_id": context.own.node_id,
        "topics": topics,
        "error_code": 0,
    }


def error_answer(body: Body, code: int) -> Body:
    asked = body["topics"] or []
    topics = [_error_topic(topic.get("name"), topic.get("topic_id", ZERO_UUID), code) for topic in asked]
    return {"brokers": [], "cluster_id": None, "controller_id": -1, "topics": topics, "error_code": code}


class _CreationDeniedError(TidemillError):
    """The client may not create the topic."""


class _MetadataAnswers:
    """Answers of one request. `just_read`: the cache was read from the catalogue for this request."""

    def __init__(self, context: Context, request: Request, brokers: list[Broker], just_read: bool) -> None:
        self._context = context
        self._request = request
        self._node_ids = {broker.name: broker.node_id for broker in brokers}
        self._version = request.version
        self._just_read = just_read
        self.may_create = 0

    async def answer_topic(self, asked: Body) -> Body:
        cache = self._context.cache
        name, topic_id = asked.get("name"), asked.get("topic_id", ZERO_UUID)
        if self._request.version < _IDS_FROM and name is None:
            return _error_topic("", topic_id, error_codes.INVALID_REQUEST)
        if name == "" and topic_id == ZERO_UUID:
            return _error_topic(name, topic_id, error_codes.INVALID_TOPIC_EXCEPTION)
        row: TopicRow | None
        try:
            row = await self._find(name, topic_id)
        except _CreationDeniedError:
            return _error_topic(name, topic_id, error_codes.TOPIC_AUTHORIZATION_FAILED)
        except InvalidError:
            return _error_topic(name, topic_id, error_codes.INVALID_TOPIC_EXCEPTION)
        except TidemillError:
            row = cache.by_name(name) if name else cache.by_id(topic_id)
            if row is None:
                return _error_topic(name, topic_id, error_codes.LEADER_NOT_AVAILABLE)
        if row is None:
            unknown = error_codes.UNKNOWN_TOPIC_OR_PARTITION if name else error_codes.UNKNOWN_TOPIC_ID
            return _error_topic(name, topic_id, unknown)
        return await self.describe(row)

    async def _find(self, name: str | None, topic_id: str) -> TopicRow | None:
        cache = self._context.cache
        if not name:
            row = cache.by_id(topic_id)
            if row is None and not self._just_read:
                await cache.refresh()
                self._just_read = True
                row = cache.by_id(topic_id)
            return row
        known = cache.by_name(name)
        if self._just_read:
            row = known
        else:
            row = await self._context.catalogue.get(TopicRow, name)
        if row is None:
            row = await self._create(name)
        if row is not None:
            cache.add(row)
        elif known is not None:
            cache.remove(known)
        return row

    async def _create(self, name: str) -> TopicRow | None:
        """Create a topic; return None if it cannot be created. Raises InvalidError for an invalid name."""
        context, settings = self._context, self._context.settings
        check_topic_name(name)
        if self.may_create <= 0:
            return None
        if not is_creation_allowed(context, self._request, name):
            raise _CreationDeniedError(f"not authorized to create the topic: topic={name}.")
        if context.cache.partitions + settings.section.default_partitions > settings.section.partitions_max:
            log.warning(
                "kafka.topic_not_created", topic=name, key="kafka.partitions_max", limit=settings.section.partitions_max
            )
            self.may_create = 0
            return None
        self.may_create -= 1
        try:
            return await context.catalogue.create_topic(
                name, settings.section.default_partitions, config=settings.topic_defaults
            )
        except ConflictError as lost:
            return lost.current if isinstance(lost.current, TopicRow) else None

    async def describe(self, row: TopicRow) -> Body:
        """Return the answer for one topic.

        Thousands of partitions take some ms, and many requests may reach this point together, so it may pause first.
        """
        if self._context.pace.is_used_up:
            await self._context.pace.wait_for_turn()
        leader_of, node_ids, topic_id = self._context.topics.leader_of, self._node_ids, row.topic_id
        leaders = tuple([node_ids.get(leader_of(topic_id, index), NO_LEADER) for index in range(row.partitions)])
        layouts, version = self._context.layouts, self._version
        partitions = layouts.cached(version, leaders) or await layouts.partitions(version, leaders)
        return {"error_code": 0, "name": row.name, "topic_id": row.topic_id, "partitions": partitions}


def _error_topic(name: str | None, topic_id: str, code: int) -> Body:
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": []}


API = Api(3, "metadata", 0, 13, begin_decoded(handle, error_answer), at_once=32)
