"""Handler of TxnOffsetCommit (28), versions 0 to 5: offsets that the group receives when the transaction is committed.

The offsets are stored in the transaction itself, so that one write decides both. The transaction must be open and
contain the group (AddOffsetsToTxn); from version 5 on this request opens it and adds the group (KIP-890). From version
3 on a member specifies its generation (KIP-447).
"""

from __future__ import annotations

from typing import Final

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k08_offset_commit import (
    METADATA_CHARS_MAX,
    find_topic,
    missing_partition_code,
    settle_topics,
)
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.kafka.transactions.group_offsets import store_offsets
from tidemill.kafka.transactions.state import GroupOffset, Offsets

FIRST_THAT_ADDS: Final = 5


async def handle(context: Context, request: Request, body: Body) -> Body:
    await settle_topics(context, body["topics"], by_id=False)
    offsets: Offsets = {}
    answers: list[Body] = []
    accepted: list[Body] = []
    for topic in body["topics"]:
        row = find_topic(context, topic, by_id=False)
        partitions: list[Body] = []
        for asked in topic["partitions"]:
            if context.pace.is_used_up:
                await context.pace.wait_for_turn()
            index, metadata = asked["partition_index"], asked.get("committed_metadata") or ""
            answer: Body = {"partition_index": index, "error_code": 0}
            if isinstance(row, int) or not 0 <= index < row.partitions:
                answer["error_code"] = row if isinstance(row, int) else missing_partition_code(context, row, index)
            elif len(metadata) > METADATA_CHARS_MAX:
                answer["error_code"] = error_codes.OFFSET_METADATA_TOO_LARGE
            else:
                epoch = asked.get("committed_leader_epoch", -1)
                offsets.setdefault(row.topic_id, {})[index] = GroupOffset(asked["committed_offset"], epoch, metadata)
                accepted.append(answer)
            partitions.append(answer)
        answers.append({"name": topic["name"], "partitions": partitions})
    if offsets:
        code = await _store_offsets(context, body, offsets, adds=request.version >= FIRST_THAT_ADDS)
        for answer in accepted:
            answer["error_code"] = code
    return {"topics": answers}


async def _store_offsets(context: Context, body: Body, offsets: Offsets, *, adds: bool) -> int:
    identity = (body["transactional_id"], body["producer_id"], body["producer_epoch"])
    member = (body.get("member_id", ""), body.get("group_instance_id"), body.get("generation_id", -1))
    keeping = store_offsets(
        context.groups, context.transactions, identity, body["group_id"], member, offsets, adds=adds
    )
    code = await error_codes.code_of_work(keeping, too_large=error_codes.OFFSET_METADATA_TOO_LARGE)
    # The code of Kafka's group coordinators for a fenced producer.
    return error_codes.INVALID_PRODUCER_EPOCH if code == error_codes.PRODUCER_FENCED else code


def error_answer(body: Body, code: int) -> Body:
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    {"partition_index": p["partition_index"], "error_code": code} for p in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


API = Api(28, "txn_offset_commit", 0, 5, begin_decoded(handle, error_answer))
