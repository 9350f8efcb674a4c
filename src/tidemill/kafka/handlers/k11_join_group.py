"""Handler of JoinGroup (11), versions 0 to 9: the answer comes when all members have joined, or late ones are removed.

A client that disconnects while it waits stays a member until its session times out, but the memory of its request is
released immediately.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.classic.state import JoinAnswer, JoinRequest
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.subscriptions import decode_subscription
from tidemill.kafka.groups.topic_patterns import TopicView
from tidemill.kafka.handlers.k68_consumer_group_heartbeat import topics_view
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.schema.primitives import MalformedFrameError

REBALANCE_MS_MIN: Final = 100
CLIENT_CHARS: Final = 100
"""Characters of the client id within the member id, because a key must have room for it."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    try:
        led = await context.groups.get(body["group_id"] or "")
        context.groups.check_room(led, body["member_id"] or "", body.get("group_instance_id"))
        seen = await _topics_view(context, request, led, body)
    except TidemillError:
        return error_answer(body, error_codes.COORDINATOR_LOAD_IN_PROGRESS)
    instance_id = body.get("group_instance_id")
    session_ms: int = body["session_timeout"]
    rebalance_ms: int = body.get("rebalance_timeout") or session_ms
    prefix = (request.client_id if instance_id is None else instance_id)[:CLIENT_CHARS]
    ask = JoinRequest(
        member_id=body["member_id"] or "",
        new_id=f"{prefix}-{context.groups.new_member_suffix()}",
        instance_id=instance_id,
        client_id=request.client_id,
        client_host=f"/{request.visitor.host}",
        session_ms=session_ms,
        rebalance_ms=max(REBALANCE_MS_MIN, rebalance_ms),
        protocol_type=body["protocol_type"] or "",
        protocols=tuple((p["name"], bytes(p["metadata"])) for p in body["protocols"]),
        knows_first=request.version >= 4,
        may_skip=request.version >= 9,
    )
    return _body(request, await led.join(ask, seen))


async def _topics_view(context: Context, request: Request, led: GroupRunner, body: Body) -> TopicView | None:
    """Return the topics if the group uses the consumer protocol, whose coordinator assigns partitions."""
    if not isinstance(led.group, ConsumerGroup) or not led.group.members:
        return None
    try:
        subscription = decode_subscription(bytes(body["protocols"][0]["metadata"]))
    except (IndexError, MalformedFrameError):
        return await topics_view(context, request, led, ())
    return await topics_view(context, request, led, subscription.topics | {topic for topic, _ in subscription.owned})


def _body(request: Request, answer: JoinAnswer) -> Body:
    nothing = None if request.version >= 7 else ""
    return {
        "error_code": answer.error,
        "generation_id": answer.generation,
        "protocol_type": answer.protocol_type,
        "protocol_name": nothing if answer.protocol is None else answer.protocol,
        "leader": answer.leader,
        "skip_assignment": answer.skip_assignment,
        "member_id": answer.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": instance_id, "metadata": metadata}
            for member_id, instance_id, metadata in answer.members
        ],
    }


def error_answer(body: Body, code: int) -> Body:
    return {
        "error_code": code,
        "generation_id": -1,
        "protocol_type": None,
        "protocol_name": "",
        "leader": "",
        "skip_assignment": False,
        "member_id": body["member_id"] or "",
        "members": [],
    }


API = Api(11, "join_group", 0, 9, begin_decoded(handle, error_answer), abandon=True)
