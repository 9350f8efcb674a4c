"""Handlers of the requests of a member of a classic group, after JoinGroup: Heartbeat (12), versions 0 to 4, LeaveGroup
(13), versions 0 to 5, and SyncGroup (14), versions 0 to 5.

SyncGroup is answered once the leader's assignment is durable. LeaveGroup names one member, from v3 on several; a static
member may be named by its instance id alone. None of them creates a group.

While the group is being loaded, Kafka answers SyncGroup with REBALANCE_IN_PROGRESS, so that the client joins again, and
Heartbeat with success: the Java client retries neither after COORDINATOR_LOAD_IN_PROGRESS (Kafka's
`GroupCoordinator.doSyncGroup` and `handleHeartbeat`).
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.classic.state import SyncAnswer, SyncRequest
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.schema.codec_compiler import Body


async def heartbeat(context: Context, request: Request, body: Body) -> Body:
    try:
        led = await context.groups.get(body["group_id"] or "", creates=False)
    except GroupUnavailableError as unavailable:
        return {"error_code": 0 if unavailable.code == error_codes.COORDINATOR_LOAD_IN_PROGRESS else unavailable.code}
    code = led.heartbeat(body["member_id"] or "", body.get("group_instance_id"), body["generation_id"])
    return {"error_code": code}


def _heartbeat_error(body: Body, code: int) -> Body:
    return {"error_code": code}


async def leave_group(context: Context, request: Request, body: Body) -> Body:
    led = await context.groups.get(body["group_id"] or "", creates=False)
    if request.version < 3:
        return {"error_code": led.remove_members([(body["member_id"] or "", None)])[0], "members": []}
    members = [(member["member_id"] or "", member["group_instance_id"]) for member in body["members"]]
    return {
        "error_code": 0,
        "members": [
            {"member_id": member_id, "group_instance_id": instance_id, "error_code": code}
            for (member_id, instance_id), code in zip(members, led.remove_members(members), strict=True)
        ],
    }


def _leave_error(body: Body, code: int) -> Body:
    return {"error_code": code, "members": []}


async def sync(context: Context, request: Request, body: Body) -> Body:
    try:
        led = await context.groups.get(body["group_id"] or "", creates=False)
    except GroupUnavailableError as unavailable:
        loading = unavailable.code == error_codes.COORDINATOR_LOAD_IN_PROGRESS
        return _assignment(SyncAnswer(error_codes.REBALANCE_IN_PROGRESS if loading else unavailable.code))
    ask = SyncRequest(
        member_id=body["member_id"] or "",
        instance_id=body.get("group_instance_id"),
        generation=body["generation_id"],
        protocol_type=body.get("protocol_type"),
        protocol=body.get("protocol_name"),
        assignments=tuple((a["member_id"], bytes(a["assignment"])) for a in body["assignments"]),
    )
    return _assignment(await led.sync(ask))


def _assignment(answer: SyncAnswer) -> Body:
    return {
        "error_code": answer.error,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "assignment": answer.assignment,
    }


def _sync_error(body: Body, code: int) -> Body:
    return _assignment(SyncAnswer(code))


APIS: Final = (
    Api(12, "heartbeat", 0, 4, begin_decoded(heartbeat, _heartbeat_error)),
    Api(13, "leave_group", 0, 5, begin_decoded(leave_group, _leave_error)),
    Api(14, "sync_group", 0, 5, begin_decoded(sync, _sync_error), abandon=True),
)
