"""Handler of Heartbeat (12), versions 0 to 4."""

from __future__ import annotations

from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    led = await context.groups.get(body["group_id"] or "")
    code = led.heartbeat(body["member_id"] or "", body.get("group_instance_id"), body["generation_id"])
    return {"error_code": code}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code}


API = Api(12, "heartbeat", 0, 4, begin_decoded(handle, error_answer))
