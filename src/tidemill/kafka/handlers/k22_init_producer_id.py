"""Handler of InitProducerId (22), versions 0 to 5: a new producer id with epoch 0, never assigned again on any node.

A transactional id gets its producer id in a new epoch, which fences the previous producer. Its open transaction is
aborted first; if this takes long, the answer is CONCURRENT_TRANSACTIONS. A producer that sends its own identity (v3,
KIP-360) must be the current one. Idempotent clients increment their epoch themselves.
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

FIRST_WITH_FENCED: Final = 4


async def handle(context: Context, request: Request, body: Body) -> Body:
    answer: Body = {"error_code": 0, "producer_id": -1, "producer_epoch": -1}
    if body["transactional_id"] is not None:
        code, producer_id, epoch = await _init_transactional(context, body)
        code = error_codes.fenced_code(code, known=request.version >= FIRST_WITH_FENCED)
        return {"error_code": code, "producer_id": producer_id, "producer_epoch": epoch}
    try:
        producer_id = await context.producer_ids.allocate()
    except TidemillError:
        return {**answer, "error_code": error_codes.COORDINATOR_NOT_AVAILABLE}
    return {**answer, "producer_id": producer_id, "producer_epoch": 0}


async def _init_transactional(context: Context, body: Body) -> tuple[int, int, int]:
    """Initialize a transactional producer and return (code, producer id, epoch)."""
    code = coordinator_error(context, body["transactional_id"])
    if code:
        return code, -1, -1
    try:
        return await context.transactions.init(
            body["transactional_id"],
            timeout_ms=body["transaction_timeout"],
            producer_id=body.get("producer_id", -1),
            epoch=body.get("producer_epoch", -1),
        )
    except TidemillError:
        return error_codes.COORDINATOR_NOT_AVAILABLE, -1, -1


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


API = Api(22, "init_producer_id", 0, 5, begin_decoded(handle, error_answer))
