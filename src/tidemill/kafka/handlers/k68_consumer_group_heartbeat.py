"""Handler of ConsumerGroupHeartbeat (68), versions 0 and 1: joining, leaving, subscribing and reconciling (KIP-848).

The answer comes once the state that it reports is durable. Named topics that are missing in the cache are looked for in
the catalogue. A pattern matches only topics that the member may describe. The server generates the member ids of
version 0.

A departure is processed also if its client closes the connection immediately, as a consumer that ends does. Any other
heartbeat is abandoned then: a change that its answer would report is not reported to the member's later ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Final

from tidemill.base.errors import InvalidError, TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, PlainOutcome, Reply, Request, begin_decoded
from tidemill.kafka.groups.classic.state import ClassicGroup, HeartbeatAnswer
from tidemill.kafka.groups.consumer.assignors import Partitions
from tidemill.kafka.groups.consumer.requests import request_rejection
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.subscriptions import assigned_topics
from tidemill.kafka.groups.topic_patterns import TopicView
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.schema.primitives import MalformedFrameError, read_i32, read_string
from tidemill.security.acls import Operation, Resource

CLIENT_CHARS: Final = 255


async def handle(context: Context, request: Request, body: Body) -> Body:
    ask = _heartbeat_request(context, request, body)
    refused = request_rejection(ask)
    if refused is not None:
        return _body(refused)
    try:
        joins = ask.epoch == 0
        led = await context.groups.get(body["group_id"] or "", creates=joins)
        if joins:
            context.groups.check_room(led, ask.member_id, ask.instance_id)
        pattern = ask.pattern if ask.epoch >= 0 else None
        seen = await topics_view(context, request, led, _required_topics(led.group, ask), pattern)
    except InvalidError as error:
        return _body(HeartbeatAnswer(error_codes.INVALID_REGULAR_EXPRESSION, str(error)))
    except TidemillError:
        return error_answer(body, error_codes.COORDINATOR_LOAD_IN_PROGRESS)
    return _body(await led.consumer_heartbeat(ask, seen), led.group.limits.consumer_heartbeat_ms)


def _heartbeat_request(context: Context, request: Request, body: Body) -> HeartbeatRequest:
    topics, owned = body["subscribed_topic_names"], body["topic_partitions"]
    pattern = body.get("subscribed_topic_regex")
    member_id = body["member_id"] or ""
    if request.version == 0:
        # Version 0 has no patterns: a joining member sends its full subscription.
        pattern = "" if topics is not None else None
        member_id = member_id or (context.groups.new_member_suffix() if body["member_epoch"] == 0 else "")
    return HeartbeatRequest(
        member_id=member_id,
        epoch=body["member_epoch"],
        instance_id=body["instance_id"],
        rack_id=body["rack_id"],
        rebalance_ms=body["rebalance_timeout"],
        topics=None if topics is None else frozenset(topics),
        pattern=pattern,
        assignor=body["server_assignor"],
        owned=None if owned is None else _partitions(owned),
        client_id=request.client_id[:CLIENT_CHARS],
        client_host=f"/{request.visitor.host}",
    )


def _partitions(topics: list[Body]) -> Partitions:
    found: dict[str, frozenset[int]] = {}
    for topic in topics:
        if topic["partitions"]:
            found[topic["topic_id"]] = found.get(topic["topic_id"], frozenset()) | frozenset(topic["partitions"])
    return found


def _required_topics(group: ClassicGroup | ConsumerGroup, ask: HeartbeatRequest) -> frozenset[str]:
    """Return the topics that must be in the cache: the upgrade of a group needs the ids of its assigned topics."""
    named = ask.topics or frozenset()
    return named | assigned_topics(group) if ask.epoch == 0 and isinstance(group, ClassicGroup) else named


async def topics_view(
    context: Context, request: Request, led: GroupRunner, names: Iterable[str], pattern: str | None = None
) -> TopicView:
    """Return the topics as this node sees them, refreshed if one of `names` is missing.

    Raises the errors of `context.subscribable.topics_view`.
    """

    def patterns() -> set[str]:
        others = led.group.patterns() if isinstance(led.group, ConsumerGroup) else set()
        return others | ({pattern} if pattern else set())

    def may(topic: str) -> bool:
        return context.access.is_visible(request.visitor, Operation.DESCRIBE, Resource.TOPIC, topic)

    cache = context.cache
    group = led.group
    # Another node may just have created the topic, and the state of a group that was just taken over may know more
    # topics than this node.
    is_new_here = isinstance(group, ConsumerGroup) and group.topics is None and bool(group.members)
    if is_new_here or any(cache.find(name, is_id=False) is None for name in names):
        await cache.refresh()
    return await context.subscribable.topics_view(patterns, may)


def _body(answer: HeartbeatAnswer, heartbeat_ms: int = 0) -> Body:
    assigned = answer.assignment
    return {
        "error_code": answer.error,
        "error_message": answer.message or None,
        "member_id": answer.member_id or None,
        "member_epoch": answer.epoch,
        "heartbeat_interval": 0 if answer.error else heartbeat_ms,
        "assignment": None if assigned is None else {"topic_partitions": topic_partitions(assigned)},
    }


def topic_partitions(partitions: Partitions) -> list[Body]:
    return [{"topic_id": topic_id, "partitions": sorted(numbers)} for topic_id, numbers in sorted(partitions.items())]


def error_answer(body: Body, code: int) -> Body:
    return {
        "error_code": code,
        "error_message": None,
        "member_id": None,
        "member_epoch": 0,
        "heartbeat_interval": 0,
        "assignment": None,
    }


_begin_heartbeat: Final = begin_decoded(handle, error_answer)


def begin(context: Context, request: Request) -> Awaitable[Reply] | PlainOutcome:
    with suppress(MalformedFrameError):  # reported by the handler
        request.is_kept = _member_epoch(request) < 0
    return _begin_heartbeat(context, request)


def _member_epoch(request: Request) -> int:
    """Read the epoch, which follows the ids of the group and the member. The rest of the request may be large: a
    consumer that leaves may repeat its subscription. Raises MalformedFrameError."""
    position = request.position
    for _ in ("group_id", "member_id"):
        _, position = read_string(request.view, position, compact=True)
    epoch, _ = read_i32(request.view, position)
    return epoch


API = Api(68, "consumer_group_heartbeat", 0, 1, begin, abandon=True)
