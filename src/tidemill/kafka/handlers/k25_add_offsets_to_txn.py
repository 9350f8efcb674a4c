"""Handler of AddOffsetsToTxn (25), versions 0 to 4: adds the group whose offsets a transaction is about to commit."""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

FIRST_WITH_FENCED: Final = 2


async def handle(context: Context, request: Request, body: Body) -> Body:
    transactional_id = body["transactional_id"]
    code = coordinator_error(context, transactional_id)
    if not code:
        identity = (body["producer_id"], body["producer_epoch"])
        code = await error_codes.code_of_work(
            context.transactions.add_group(transactional_id, *identity, body["group_id"])
        )
    return {"error_code": error_codes.fenced_code(code, known=request.version >= FIRST_WITH_FENCED)}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code}


API = Api(25, "add_offsets_to_txn", 0, 4, begin_decoded(handle, error_answer))
