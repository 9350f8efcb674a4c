"""Handler of AddPartitionsToTxn (24), versions 0 to 3: partitions that a transaction is about to write to.

All partitions are added or none: if one is unknown, the others are OPERATION_NOT_ATTEMPTED. Versions 4 and 5 are for
requests between brokers, which do not exist here: a partition's leader reads the transaction itself.
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context, coordinator_error
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k08_offset_commit import find_topic, missing_partition_code
from tidemill.kafka.schema.codec_compiler import Body

FIRST_WITH_FENCED: Final = 2


async def handle(context: Context, request: Request, body: Body) -> Body:
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
    return _answer(body, code, codes if code == error_codes.OPERATION_NOT_ATTEMPTED else {})


def _answer(body: Body, code: int, codes: dict[tuple[str, int], int]) -> Body:
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


def error_answer(body: Body, code: int) -> Body:
    return _answer(body, code, {})


API = Api(24, "add_partitions_to_txn", 0, 3, begin_decoded(handle, error_answer))
