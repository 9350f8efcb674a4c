"""Handler of FindCoordinator (10), versions 0 to 6.

For a group or a transactional id, the answer is the node that the live nodes agree on (`api.context`), with
its address at the client's listener. A node without that listener is COORDINATOR_NOT_AVAILABLE. Share groups are
rejected by INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

GROUP: Final = 0
TRANSACTION: Final = 1
SHARE: Final = 2


async def handle(context: Context, request: Request, body: Body) -> Body:
    key_type = body.get("key_type", GROUP)
    if request.version <= 3:
        return _coordinator(context, body["key"] or "", key_type)
    coordinators = []
    for key in body["coordinator_keys"]:
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        coordinators.append(_coordinator(context, key, key_type))
    return {"coordinators": coordinators}


def _coordinator(context: Context, key: str, key_type: int) -> Body:
    if key_type in (GROUP, TRANSACTION):
        owner = (
            context.owners.group_coordinator(key) if key_type == GROUP else context.owners.transaction_coordinator(key)
        )
        node = next((broker for broker in context.brokers() if broker.node_id == owner.node_id), None)
        if node is not None:
            return {
                "key": key,
                "node_id": node.node_id,
                "host": node.host,
                "port": node.port,
                "error_code": 0,
                "error_message": None,
            }
        code, message = error_codes.COORDINATOR_NOT_AVAILABLE, f"The coordinator has no listener {context.listener!r}."
    elif key_type == SHARE:
        code, message = error_codes.INVALID_REQUEST, "Share groups are not supported."
    else:
        code, message = error_codes.INVALID_REQUEST, "Unknown key type."
    return {"key": key, "node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": message}


def error_answer(body: Body, code: int) -> Body:
    nobody: Body = {"node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": None}
    keys = body.get("coordinator_keys") or []
    return {"key": body.get("key", ""), **nobody, "coordinators": [{"key": key, **nobody} for key in keys]}


API = Api(10, "find_coordinator", 0, 6, begin_decoded(handle, error_answer))
