"""Handler of EndTxn (26), versions 0 to 5: commit or abort, durable when it is answered, and nearly always complete.

Version 5 belongs to transactions of version 2: the answer contains the producer's next epoch and its producer id, which
is a new one if the epochs are exhausted (KIP-890).
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

FIRST_WITH_FENCED: Final = 2
FIRST_THAT_BUMPS: Final = 5


async def handle(context: Context, request: Request, body: Body) -> Body:
    transactional_id = body["transactional_id"]
    code = coordinator_error(context, transactional_id)
    identity = (body["producer_id"], body["producer_epoch"])
    if not code and request.version >= FIRST_THAT_BUMPS:
        return await _end_bumping(context, transactional_id, identity, commit=body["committed"])
    if not code:
        code = await error_codes.code_of_work(
            context.transactions.end(transactional_id, *identity, commit=body["committed"])
        )
    return error_answer(body, error_codes.fenced_code(code, known=request.version >= FIRST_WITH_FENCED))


async def _end_bumping(context: Context, transactional_id: str, identity: tuple[int, int], *, commit: bool) -> Body:
    try:
        ended = await context.transactions.end_bumping(transactional_id, *identity, commit=commit)
    except TidemillError:
        ended = (error_codes.COORDINATOR_NOT_AVAILABLE, -1, -1)
    return dict(zip(("error_code", "producer_id", "producer_epoch"), ended, strict=True))


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


API = Api(26, "end_txn", 0, 5, begin_decoded(handle, error_answer))
