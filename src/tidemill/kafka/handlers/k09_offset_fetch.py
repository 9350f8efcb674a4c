"""Handler of OffsetFetch (9), versions 1 to 10: the offsets that OffsetCommit stored, else −1.

A request names one group up to v7, several from v8. Topics null (v2) requests all of the group's. Rows are read after a
barrier, so any node answers with everything that was acknowledged before. While a topic or the group cannot be looked
up, its committed offsets are unknown: the answer is COORDINATOR_LOAD_IN_PROGRESS, the only code apart from
NOT_COORDINATOR that Java clients of every version retry here. With `require_stable` (v7, KIP-447), an offset that an
open or prepared transaction may still commit is UNSTABLE_OFFSET_COMMIT, which the reader retries.
"""

from __future__ import annotations

from typing import Any

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.coordinator import GroupUnavailableError
from tidemill.kafka.handlers.k08_offset_commit import find_topic, missing_partition_code
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.rows.groups import GroupOffsetRow

BY_ID = 10
_NOTHING = GroupOffsetRow("", "", 0, -1)
Found = dict[tuple[str, int], GroupOffsetRow]


async def handle(context: Context, request: Request, body: Body) -> Body:
    by_id = request.version >= BY_ID
    if request.version >= 8:
        stable = body["require_stable"]
        return {"groups": [await _checked_group(context, g, by_id=by_id, stable=stable) for g in body["groups"]]}
    stable = body.get("require_stable", False)
    return await _group(context, body["group_id"] or "", body["topics"], by_id=False, stable=stable)


async def _checked_group(context: Context, asked: Body, *, by_id: bool, stable: bool) -> Body:
    """Answer for one group.

    From version 9 on, the group's coordinator checks the member id and epoch of the consumer protocol.
    """
    group, member_id, epoch = asked["group_id"] or "", asked.get("member_id") or "", asked.get("member_epoch", -1)
    if member_id and epoch >= 0:
        try:
            led = await context.groups.get(group, creates=False)
            code = led.commit_error(member_id, None, epoch) if isinstance(led.group, ConsumerGroup) else 0
        except GroupUnavailableError as refused:
            # A group that does not exist has no offsets, which is no error.
            code = 0 if refused.code == error_codes.UNKNOWN_MEMBER_ID else refused.code
            if code == error_codes.COORDINATOR_NOT_AVAILABLE:
                code = error_codes.COORDINATOR_LOAD_IN_PROGRESS
        if code:
            return {"group_id": group, "error_code": code, "topics": []}
    return await _group(context, group, asked["topics"], by_id=by_id, stable=stable)


async def _group(context: Context, group: str, topics: list[Body] | None, *, by_id: bool, stable: bool) -> Body:
    code, offsets, found = 0, Found(), list[Any]()
    """The row or error code of each topic, looked up once: a topic that appears later has no offsets here."""
    undecided: set[tuple[str, int]] = set()
    try:
        if stable:
            # Read these before the offsets, so that one of the two reads finds an offset committed in between.
            undecided = await context.transactions.undecided(group)
        if topics is None:
            rows = await context.groups.rows.offsets(group)
            offsets = {(row.topic_id, row.partition): row for row in rows}
            topics = _committed_topics(context, rows)
            found = [find_topic(context, topic, by_id=by_id) for topic in topics]
        else:
            places = [(topic["topic_id" if by_id else "name"], _highest(topic)) for topic in topics]
            await context.cache.settle_topics(places, is_id=by_id)
            found = [find_topic(context, topic, by_id=by_id) for topic in topics]
            if not all(_is_resolved(context, row, topic) for row, topic in zip(found, topics, strict=True)):
                code = error_codes.COORDINATOR_LOAD_IN_PROGRESS
            else:
                offsets = await context.groups.rows.offsets_of(group, _known_places(found, topics))
    except TidemillError:
        code = error_codes.COORDINATOR_LOAD_IN_PROGRESS
    topics = topics or []
    if code:
        found = [code for _ in topics]
    answers = [await _topic(context, offsets, undecided, topic, row) for row, topic in zip(found, topics, strict=True)]
    return {"group_id": group, "error_code": code, "topics": answers}


def _highest(topic: Body) -> int:
    return max(topic["partition_indexes"], default=0)


def _is_resolved(context: Context, row: Any, topic: Body) -> bool:
    """Return whether it is known of everything that the topic names whether it exists."""
    code = row
    if not isinstance(row, int):
        highest = _highest(topic)
        code = 0 if highest < row.partitions else missing_partition_code(context, row, highest)
    return bool(code != error_codes.COORDINATOR_LOAD_IN_PROGRESS)


def _known_places(found: list[Any], topics: list[Body]) -> list[tuple[str, int]]:
    places: list[tuple[str, int]] = []
    for row, topic in zip(found, topics, strict=True):
        if not isinstance(row, int):
            places += [(row.topic_id, index) for index in topic["partition_indexes"] if 0 <= index < row.partitions]
    return places


def _committed_topics(context: Context, rows: list[GroupOffsetRow]) -> list[Body]:
    """Return the committed partitions of a group's existing topics, in the form of a request."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row.topic_id, []).append(row.partition)
    topics = [(context.cache.by_id(topic_id), indexes) for topic_id, indexes in found.items()]
    return [
        {"name": row.name, "topic_id": row.topic_id, "partition_indexes": indexes}
        for row, indexes in topics
        if row is not None
    ]


async def _topic(context: Context, offsets: Found, undecided: set[tuple[str, int]], asked: Body, row: Any) -> Body:
    # A name without a topic has no offsets, which is not an error.
    unknown = row if isinstance(row, int) and row != error_codes.UNKNOWN_TOPIC_OR_PARTITION else 0
    partitions = []
    for index in asked["partition_indexes"]:
        if context.pace.is_used_up:
            await context.pace.wait_for_turn()
        committed, code = _NOTHING, unknown
        if not isinstance(row, int):
            committed = offsets.get((row.topic_id, index), _NOTHING)
            if (row.topic_id, index) in undecided:
                committed, code = _NOTHING, error_codes.UNSTABLE_OFFSET_COMMIT
        partitions.append(
            {
                "partition_index": index,
                "committed_offset": committed.offset,
                "committed_leader_epoch": committed.leader_epoch,
                "metadata": committed.metadata,
                "error_code": code,
            }
        )
    return {"name": asked.get("name"), "topic_id": asked.get("topic_id"), "partitions": partitions}


def error_answer(body: Body, code: int) -> Body:
    groups = [{"group_id": g["group_id"], "error_code": code, "topics": []} for g in body.get("groups") or []]
    topics = []
    for asked in body.get("topics") or []:
        nothing = {"committed_offset": -1, "committed_leader_epoch": -1, "metadata": "", "error_code": code}
        partitions = [{"partition_index": index, **nothing} for index in asked["partition_indexes"]]
        topics.append({"name": asked["name"], "partitions": partitions})
    return {"groups": groups, "error_code": code, "topics": topics}


API = Api(9, "offset_fetch", 1, 10, begin_decoded(handle, error_answer))
