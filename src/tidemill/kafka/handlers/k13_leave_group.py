"""Handler of LeaveGroup (13), versions 0 to 5: one member, several from v3.

A static member may be named by its instance id alone.
"""

from __future__ import annotations

from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    led = await context.groups.get(body["group_id"] or "")
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


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "members": []}


API = Api(13, "leave_group", 0, 5, begin_decoded(handle, error_answer))
