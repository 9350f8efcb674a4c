"""FindCoordinator (10), versions 0 to 6.

For a group: this node; any node will do, because committed offsets live in consensus. For a transactional id:
TRANSACTIONAL_ID_AUTHORIZATION_FAILED with a message, which ends a transactional producer's init at once where
COORDINATOR_NOT_AVAILABLE would be retried for ever. Share groups: INVALID_REQUEST.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body

GROUP: Final = 0
TRANSACTION: Final = 1


async def handle(context: Context, request: Request, body: Body) -> Body:
    key_type = body.get("key_type", GROUP)
    if request.version <= 3:
        return _coordinator(context, body["key"] or "", key_type)
    coordinators = []
    for key in body["coordinator_keys"]:
        if context.pace.due:
            await context.pace.rest()
        coordinators.append(_coordinator(context, key, key_type))
    return {"coordinators": coordinators}


def _coordinator(context: Context, key: str, key_type: int) -> Body:
    if key_type == GROUP:
        own = context.own
        return {
            "key": key,
            "node_id": own.node_id,
            "host": own.host,
            "port": own.port,
            "error_code": 0,
            "error_message": None,
        }
    if key_type == TRANSACTION:
        code, message = errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "Transactions are not served yet."
    else:
        code, message = errors.INVALID_REQUEST, "Only consumer groups have a coordinator here."
    return {"key": key, "node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": message}


def failed(body: Body, code: int) -> Body:
    nobody: Body = {"node_id": -1, "host": "", "port": -1, "error_code": code, "error_message": None}
    keys = body.get("coordinator_keys") or []
    return {"key": body.get("key", ""), **nobody, "coordinators": [{"key": key, **nobody} for key in keys]}


API = Api(10, "find_coordinator", 0, 6, cold(handle, failed))
