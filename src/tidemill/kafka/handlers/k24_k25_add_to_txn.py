"""Handlers of AddPartitionsToTxn (24), versions 0 to 3, and AddOffsetsToTxn (25), versions 0 to 4: partitions that a
transaction is about to write to, and the group whose offsets it is about to commit.

All partitions are added or none: if one is unknown, the others are OPERATION_NOT_ATTEMPTED. Versions 4 and 5 of
AddPartitionsToTxn are for requests between brokers, which do not exist here: a partition's leader reads the transaction
itself.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k08_offset_commit import find_topic, missing_partition_code
from tidemill.kafka.schema.codec_compiler import Body

FIRST_WITH_FENCED: Final = 2


async def add_partitions(context: Context, request: Request, body: Body) -> Body:
    topics = body["v3_and_below_topics"]
    await context.cache.settle_topics(((t["name"], max(t["partitions"], default=0)) for t in topics), is_id=False)
    transactional_id = body["v3_and_below_transactional_id"]
    places: dict[str, tuple[int, ...]] = {}
    codes: dict[tuple[str, int], int] = {}
    for topic in body["v3_and_below_topics"]:
        row = find_topic(context, topic, by_id=False)
        for partition in topic["partitions"]:
            if context.pace.is_used_up:
                await context.pace.wait_for_turn()
            if isinstance(row, int):
                codes[topic["name"], partition] = row
            elif row.kind == "capture":
                codes[topic["name"], partition] = error_codes.TOPIC_AUTHORIZATION_FAILED
            elif not 0 <= partition < row.partitions:
                codes[topic["name"], partition] = missing_partition_code(context, row, partition)
            else:
                places[row.topic_id] = (*places.get(row.topic_id, ()), partition)
    code = coordinator_error(context, transactional_id)
    if not code and codes:
        code = error_codes.OPERATION_NOT_ATTEMPTED
    elif not code:
        identity = (body["v3_and_below_producer_id"], body["v3_and_below_producer_epoch"])
        code = await error_codes.code_of_work(context.transactions.add(transactional_id, *identity, partitions=places))
        code = error_codes.fenced_code(code, known=request.version >= FIRST_WITH_FENCED)
    return _partitions_answer(body, code, codes if code == error_codes.OPERATION_NOT_ATTEMPTED else {})


def _partitions_answer(body: Body, code: int, codes: dict[tuple[str, int], int]) -> Body:
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic["name"],
                "results_by_partition": [
                    {"partition_index": index, "partition_error_code": codes.get((topic["name"], index), code)}
                    for index in topic["partitions"]
                ],
            }
            for topic in body["v3_and_below_topics"]
        ]
    }


def _partitions_error(body: Body, code: int) -> Body:
    return _partitions_answer(body, code, {})


async def add_group(context: Context, request: Request, body: Body) -> Body:
    transactional_id = body["transactional_id"]
    code = coordinator_error(context, transactional_id)
    if not code:
        identity = (body["producer_id"], body["producer_epoch"])
        code = await error_codes.code_of_work(
            context.transactions.add_group(transactional_id, *identity, body["group_id"])
        )
    return {"error_code": error_codes.fenced_code(code, known=request.version >= FIRST_WITH_FENCED)}


def _group_error(body: Body, code: int) -> Body:
    return {"error_code": code}


APIS: Final = (
    Api(24, "add_partitions_to_txn", 0, 3, begin_decoded(add_partitions, _partitions_error)),
    Api(25, "add_offsets_to_txn", 0, 4, begin_decoded(add_group, _group_error)),
)
