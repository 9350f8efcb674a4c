"""Handler of ListPartitionReassignments (46), version 0: always an empty list (see AlterPartitionReassignments)."""

from __future__ import annotations

from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    return {"error_code": 0, "error_message": None, "topics": []}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "error_message": None, "topics": []}


API = Api(46, "list_partition_reassignments", 0, 0, begin_decoded(handle, error_answer))
