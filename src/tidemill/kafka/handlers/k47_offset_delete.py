"""Handler of OffsetDelete (47), version 0: deletes offsets of topics to which no member of the group is subscribed.

These include offsets that an open transaction has yet to commit.
"""

from __future__ import annotations

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.subscriptions import CONSUMER, is_subscribed
from tidemill.kafka.handlers.k08_offset_commit import find_topic, missing_partition_code, settle_topics
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.rows import GROUP_OFFSETS


async def handle(context: Context, request: Request, body: Body) -> Body:
    group = body["group_id"] or ""
    await settle_topics(context, body["topics"], by_id=False)
    try:
        if group and context.owners.coordinates_group(group) and await context.groups.rows.head(group) is None:
            return _error_result(error_codes.GROUP_ID_NOT_FOUND)
        led = await context.groups.get(group)
    except GroupUnavailableError as refused:
        return _error_result(refused.code)
    except TidemillError:
        return _error_result(error_codes.COORDINATOR_NOT_AVAILABLE)
    if _has_other_members(led):
        return _error_result(error_codes.NON_EMPTY_GROUP)
    places: set[tuple[str, int]] = set()
    names: set[str] = set()
    deleted: list[Body] = []
    topics: list[Body] = []
    for topic in body["topics"]:
        row = find_topic(context, topic, by_id=False)
        used = is_subscribed(led.group, topic["name"])
        partitions: list[Body] = []
        for asked in topic["partitions"]:
            index = asked["partition_index"]
            answer: Body = {"partition_index": index, "error_code": 0}
            if isinstance(row, int) or not 0 <= index < row.partitions:
                answer["error_code"] = row if isinstance(row, int) else missing_partition_code(context, row, index)
            elif used:
                answer["error_code"] = error_codes.GROUP_SUBSCRIBED_TO_TOPIC
            else:
                places.add((row.topic_id, index))
                names.add(topic["name"])
                deleted.append(answer)
            partitions.append(answer)
        topics.append({"name": topic["name"], "partitions": partitions})
    code = await _delete(context, led, group, places, names) if places else 0
    for answer in deleted:
        answer["error_code"] = code
    return {"error_code": 0, "topics": topics}


async def _delete(context: Context, led: GroupRunner, group: str, places: set[tuple[str, int]], names: set[str]) -> int:
    rows = [(GROUP_OFFSETS.key(group, *place), b"") for place in sorted(places)]

    async def delete() -> int:
        # Members may have joined since the check; the client asks again.
        if _has_other_members(led) or any(is_subscribed(led.group, name) for name in names):
            return error_codes.COORDINATOR_NOT_AVAILABLE
        return await led.write(rows)

    try:
        return await context.transactions.delete_offsets(group, places, delete)
    except TidemillError:
        return error_codes.COORDINATOR_NOT_AVAILABLE


def _has_other_members(led: GroupRunner) -> bool:
    """Return whether the group has members that are no consumers."""
    return bool(led.group.members) and led.group.protocol_type != CONSUMER


def _error_result(code: int) -> Body:
    return {"error_code": code, "topics": []}


def error_answer(body: Body, code: int) -> Body:
    return _error_result(code)


API = Api(47, "offset_delete", 0, 0, begin_decoded(handle, error_answer), barrier=True)
