"""Handler of ConsumerGroupDescribe (69), versions 0 and 1: groups of the consumer protocol, in the state of their core.

A group of the classic protocol is GROUP_ID_NOT_FOUND, and clients then send DescribeGroups.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.groups.classic.state import GroupLimits
from tidemill.kafka.groups.consumer.assignors import Partitions
from tidemill.kafka.groups.consumer.state import ConsumerGroup, ConsumerGroupMember
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.groups.group_records import CONSUMER, restore_group
from tidemill.kafka.handlers.k15_describe_groups import NO_OPERATIONS
from tidemill.kafka.handlers.k68_consumer_group_heartbeat import topic_partitions
from tidemill.kafka.schema.codec_compiler import Body

OF_CLASSIC_PROTOCOL: Final = 0
OF_CONSUMER_PROTOCOL: Final = 1


async def handle(context: Context, request: Request, body: Body) -> Body:
    async def one(group: str) -> Body:
        return await _describe_group(context, group)

    return {"groups": await map_items(body["group_ids"], one, context.pace)}


async def _describe_group(context: Context, name: str) -> Body:
    if not name:
        return _answer(name, error_codes.INVALID_GROUP_ID)
    led = context.groups.loaded_group(name)
    try:
        if led is None:
            head = await context.groups.rows.head(name)
            if head is None:
                return _answer(name, error_codes.GROUP_ID_NOT_FOUND, f"Group {name} not found.")
            if not context.owners.coordinates_group(name):
                return _answer(name, error_codes.NOT_COORDINATOR)
            if not head.members or head.kind != CONSUMER:
                return _group(context, restore_group(head, [], GroupLimits(), 0))
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


def _member(context: Context, member: ConsumerGroupMember) -> Body:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.reported_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "subscribed_topic_regex": member.pattern or None,
        "assignment": _named_partitions(context, member.assigned),
        "target_assignment": _named_partitions(context, member.target),
        "member_type": OF_CONSUMER_PROTOCOL if member.classic is None else OF_CLASSIC_PROTOCOL,
    }


def _named_partitions(context: Context, partitions: Partitions) -> Body:
    """Return the partitions with topic names. Deleted topics are left out."""
    found = [(context.cache.by_id(topic["topic_id"]), topic) for topic in topic_partitions(partitions)]
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


def error_answer(body: Body, code: int) -> Body:
    return {"groups": [_answer(name, code) for name in body["group_ids"]]}


API = Api(69, "consumer_group_describe", 0, 1, begin_decoded(handle, error_answer))
