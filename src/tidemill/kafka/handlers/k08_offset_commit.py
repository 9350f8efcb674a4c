"""Handler of OffsetCommit (8), versions 2 to 10: commits by members of a group, or by any client while it has no
members.

The offsets of one request are appended in one write of the group (several if the request is large), after those of
every earlier request for the group. A retention that versions 2 to 4 specify is stored; otherwise the cluster's
retention applies.
"""

from __future__ import annotations

from typing import Any

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.security.acls import Operation

METADATA_CHARS_MAX = 4096
BY_ID = 10
MEMBER_EPOCHS = 9
"""First version that members of the consumer protocol may use."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    group = body["group_id"] or ""
    by_id = request.version >= BY_ID
    retention_ms = body.get("retention_time", -1)
    now_ms = context.clock.now_ms()
    expire_ms = now_ms + retention_ms if retention_ms >= 0 else 0
    await settle_topics(context, body["topics"], by_id=by_id)
    rows: dict[bytes, bytes] = {}
    answers: list[Body] = []
    accepted: list[Body] = []
    for topic in body["topics"]:
        row = find_topic(context, topic, by_id=by_id)
        if by_id:  # the id was perhaps not known here when the request was checked
            row = context.access.topic(request.visitor, Operation.READ, topic["topic_id"], row, is_id=True)
        partitions: list[Body] = []
        for asked in topic["partitions"]:
            if context.pace.is_used_up:
                await context.pace.wait_for_turn()
            index, metadata = asked["partition_index"], asked.get("committed_metadata") or ""
            answer: Body = {"partition_index": index, "error_code": 0}
            if isinstance(row, int):
                answer["error_code"] = row
            elif not 0 <= index < row.partitions:
                answer["error_code"] = missing_partition_code(context, row, index)
            elif len(metadata) > METADATA_CHARS_MAX:
                answer["error_code"] = error_codes.OFFSET_METADATA_TOO_LARGE
            else:
                epoch = asked.get("committed_leader_epoch", -1)
                offset = asked["committed_offset"]
                committed = GroupOffsetRow(
                    group, row.topic_id, index, offset, epoch, metadata, now_ms, expire_ms
                )  # fmt: skip
                key, value = GROUP_OFFSETS.encode(committed)
                rows[key] = value
                accepted.append(answer)
            partitions.append(answer)
        answers.append({"name": topic.get("name"), "topic_id": topic.get("topic_id"), "partitions": partitions})
    code = await _commit(context, request.version, group, body, rows)
    for answer in accepted:
        answer["error_code"] = code
    return {"topics": answers}


async def _commit(context: Context, version: int, group: str, body: Body, rows: dict[bytes, bytes]) -> int:
    if not rows:
        return 0
    member_id, generation = body.get("member_id") or "", body.get("generation_id_or_member_epoch", -1)
    try:
        led = await context.groups.get(group, creates=generation < 0)
    except GroupUnavailableError as refused:
        return refused.code
    code = led.commit_error(member_id, body.get("group_instance_id"), generation)
    found = led.group
    if not code and version < MEMBER_EPOCHS and isinstance(found, ConsumerGroup) and found.members:
        code = 0 if found.speaks_classic(member_id) else error_codes.UNSUPPORTED_VERSION
    return code or await led.write(list(rows.items()))


async def settle_topics(context: Context, topics: list[Body], *, by_id: bool) -> None:
    """Wait for one shared refresh if a topic, or a partition of it, is missing here and not looked for yet."""
    key = "topic_id" if by_id else "name"
    places = [(topic[key], max((p["partition_index"] for p in topic["partitions"]), default=0)) for topic in topics]
    await context.cache.settle_topics(places, is_id=by_id)


def find_topic(context: Context, topic: Body, *, by_id: bool) -> Any:
    """Return the topic's row or an error code.

    While no refresh has looked for the topic, the code is COORDINATOR_LOAD_IN_PROGRESS, which every client retries at a
    group's coordinator.
    """
    row = context.cache.find(topic["topic_id"] if by_id else topic["name"], is_id=by_id)
    return error_codes.COORDINATOR_LOAD_IN_PROGRESS if row is None else row


def missing_partition_code(context: Context, row: TopicRow, index: int) -> int:
    """Return the code for a partition that `row` does not have, with the same retriable code as `find_topic`."""
    looked = index < 0 or context.cache.check_growth(row) is not None
    return error_codes.UNKNOWN_TOPIC_OR_PARTITION if looked else error_codes.COORDINATOR_LOAD_IN_PROGRESS


def error_answer(body: Body, code: int) -> Body:
    return {
        "topics": [
            {
                "name": topic.get("name"),
                "topic_id": topic.get("topic_id"),
                "partitions": [
                    {"partition_index": p["partition_index"], "error_code": code} for p in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


API = Api(8, "offset_commit", 2, 10, begin_decoded(handle, error_answer))
