"""Handler of SyncGroup (14), versions 0 to 5: the answer comes once the leader's assignment is durable."""

from __future__ import annotations

from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.classic.state import SyncAnswer, SyncRequest
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    led = await context.groups.get(body["group_id"] or "")
    ask = SyncRequest(
        member_id=body["member_id"] or "",
        instance_id=body.get("group_instance_id"),
        generation=body["generation_id"],
        protocol_type=body.get("protocol_type"),
        protocol=body.get("protocol_name"),
        assignments=tuple((a["member_id"], bytes(a["assignment"])) for a in body["assignments"]),
    )
    return _body(await led.sync(ask))


def _body(answer: SyncAnswer) -> Body:
    return {
        "error_code": answer.error,
        "protocol_type": answer.protocol_type,
        "protocol_name": answer.protocol,
        "assignment": answer.assignment,
    }


def error_answer(body: Body, code: int) -> Body:
    return _body(SyncAnswer(code))


API = Api(14, "sync_group", 0, 5, begin_decoded(handle, error_answer), abandon=True)
