"""Handler of ConsumerGroupDescribe (69), versions 0 and 1: groups of the consumer protocol, in the state of their core.

A group of the classic protocol is GROUP_ID_NOT_FOUND, and clients then send DescribeGroups.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, cold, each
from tidemill.kafka.groups.assignors import Partitions
from tidemill.kafka.groups.classic_state import GroupLimits
from tidemill.kafka.groups.consumer_state import Consumer, ConsumerGroup
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.groups.group_records import CONSUMER, group_from
from tidemill.kafka.handlers.k15_describe_groups import NO_OPERATIONS
from tidemill.kafka.handlers.k68_consumer_group_heartbeat import listed
from tidemill.kafka.schema.codec_compiler import Body

OF_CLASSIC_PROTOCOL: Final = 0
OF_CONSUMER_PROTOCOL: Final = 1


async def handle(context: Context, request: Request, body: Body) -> Body:
    async def one(group: str) -> Body:
        return await _described(context, group)

    return {"groups": await each(body["group_ids"], one, context.pace)}


async def _described(context: Context, name: str) -> Body:
    if not name:
        return _answer(name, error_codes.INVALID_GROUP_ID)
    led = context.groups.found(name)
    try:
        if led is None:
            head = await context.groups.rows.head(name)
            if head is None:
                return _answer(name, error_codes.GROUP_ID_NOT_FOUND, f"Group {name} not found.")
            if not context.owners.is_own(name):
                return _answer(name, error_codes.NOT_COORDINATOR)
            if not head.members or head.kind != CONSUMER:
                return _group(context, group_from(head, [], GroupLimits(), 0))
            led = await context.groups.get(name)
    except GroupUnavailableError as refused:
        return _answer(name, refused.code)
    except TidemillError:
        return _answer(name, error_codes.COORDINATOR_NOT_AVAILABLE)
    return _group(context, led.group)


def _group(context: Context, group: object) -> Body:
    if not isinstance(group, ConsumerGroup):
        name: str = group.name  # type: ignore[attr-defined]
        return _answer(name, error_codes.GROUP_ID_NOT_FOUND, f"Group {name} is not a consumer group.")
    return {
        **_answer(group.name, 0),
        "group_state": group.phase.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [_member(context, member) for member in group.members.values()],
    }


def _member(context: Context, member: Consumer) -> Body:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.told_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "subscribed_topic_regex": member.pattern or None,
        "assignment": _named(context, member.assigned),
        "target_assignment": _named(context, member.target),
        "member_type": OF_CONSUMER_PROTOCOL if member.classic is None else OF_CLASSIC_PROTOCOL,
    }


def _named(context: Context, partitions: Partitions) -> Body:
    """Return the partitions with topic names. Deleted topics are left out."""
    found = [(context.cache.by_id(topic["topic_id"]), topic) for topic in listed(partitions)]
    return {"topic_partitions": [{**topic, "topic_name": row.name} for row, topic in found if row is not None]}


def _answer(name: str, code: int, message: str = "") -> Body:
    return {
        "error_code": code,
        "error_message": message or None,
        "group_id": name,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "authorized_operations": NO_OPERATIONS,
    }


def failed(body: Body, code: int) -> Body:
    return {"groups": [_answer(name, code) for name in body["group_ids"]]}


API = Api(69, "consumer_group_describe", 0, 1, cold(handle, failed))
