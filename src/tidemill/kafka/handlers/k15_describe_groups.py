"""Handler of DescribeGroups (15), versions 0 to 6.

It reports the state of the group's core. A group that does not exist is reported as Dead, and so is one of the consumer
protocol, which ConsumerGroupDescribe reports.

Authorized operations are filled in by `api.required_operations`.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.groups.classic.state import ClassicGroup, ClassicMember, Phase
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.groups.group_records import CLASSIC
from tidemill.kafka.schema.codec_compiler import Body

NO_OPERATIONS: Final = -(1 << 31)


async def handle(context: Context, request: Request, body: Body) -> Body:
    async def one(group: str) -> Body:
        return await _describe_group(context, request, group)

    return {"groups": await map_items(body["groups"], one, context.pace)}


async def _describe_group(context: Context, request: Request, name: str) -> Body:
    led = context.groups.loaded_group(name)
    if led is None:
        try:
            head = await context.groups.rows.head(name) if name else None
            if head is None:
                missing = error_codes.GROUP_ID_NOT_FOUND if request.version >= 6 else 0
                return _answer(name, missing, Phase.DEAD, message=f"Group {name} not found.")
            if not context.owners.coordinates_group(name):
                return _answer(name, error_codes.NOT_COORDINATOR, None)
            if head.kind != CLASSIC:
                return _of_other_protocol(request, name)
            if not head.members:
                return _answer(name, 0, Phase.EMPTY, protocol_type=head.protocol_type)
            led = await context.groups.get(name)
        except GroupUnavailableError as refused:
            return _answer(name, refused.code, None)
        except TidemillError:
            return _answer(name, error_codes.COORDINATOR_NOT_AVAILABLE, None)
    group = led.group
    if not isinstance(group, ClassicGroup):
        return _of_other_protocol(request, name)
    stable = group.phase is Phase.STABLE
    return {
        **_answer(name, 0, group.phase, protocol_type=group.protocol_type),
        "protocol_data": group.protocol if stable else "",
        "members": [_member(group, member, stable=stable) for member in group.members.values()],
    }


def _of_other_protocol(request: Request, name: str) -> Body:
    code = error_codes.GROUP_ID_NOT_FOUND if request.version >= 6 else 0
    return _answer(name, code, Phase.DEAD, message=f"Group {name} is not a classic group.")


def _member(group: ClassicGroup, member: ClassicMember, *, stable: bool) -> Body:
    return {
        "member_id": member.member_id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.metadata(group.protocol) if stable else b"",
        "member_assignment": member.assignment if stable else b"",
    }


def _answer(name: str, code: int, phase: Phase | None, *, protocol_type: str = "", message: str = "") -> Body:
    return {
        "error_code": code,
        "error_message": message if code and message else None,
        "group_id": name,
        "group_state": phase.value if phase is not None else "",
        "protocol_type": protocol_type,
        "protocol_data": "",
        "members": [],
        "authorized_operations": NO_OPERATIONS,
    }


def error_answer(body: Body, code: int) -> Body:
    return {"groups": [_answer(name, code, None) for name in body["groups"]]}


API = Api(15, "describe_groups", 0, 6, begin_decoded(handle, error_answer))
