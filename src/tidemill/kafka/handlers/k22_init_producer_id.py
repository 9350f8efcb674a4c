"""InitProducerId (22), versions 0 to 5: a fresh producer id with epoch 0, unique for ever across nodes.

Idempotent clients bump their epoch themselves; an id they send along (v3, KIP-360) matters to transactional
ones only. A transactional id: TRANSACTIONAL_ID_AUTHORIZATION_FAILED until transactions are served.
"""

from __future__ import annotations

from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    answer: Body = {"error_code": 0, "producer_id": -1, "producer_epoch": -1}
    if body["transactional_id"] is not None:
        return {**answer, "error_code": errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    try:
        producer_id = await context.producer_ids.allocate()
    except TidemillError:
        return {**answer, "error_code": errors.COORDINATOR_NOT_AVAILABLE}
    return {**answer, "producer_id": producer_id, "producer_epoch": 0}


def failed(body: Body, code: int) -> Body:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


API = Api(22, "init_producer_id", 0, 5, cold(handle, failed))
