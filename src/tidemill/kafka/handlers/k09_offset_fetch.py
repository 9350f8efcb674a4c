"""OffsetFetch (9), versions 1 to 9: what OffsetCommit stored; −1 where nothing is.

One group up to v7, several from v8. Topics null (v2) asks for all of the group's. `require_stable` changes
nothing: there are no transactions.
"""

from __future__ import annotations

from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.topics.group_offsets import Committed, Offsets

_NOTHING = Committed(-1)


async def handle(context: Context, request: Request, body: Body) -> Body:
    if request.version >= 8:
        return {"groups": [await _group(context, group["group_id"], group["topics"]) for group in body["groups"]]}
    answer = await _group(context, body["group_id"], body["topics"])
    if request.version == 1 and answer["error_code"]:
        for topic in answer["topics"]:
            for partition in topic["partitions"]:
                partition["error_code"] = answer["error_code"]
    return answer


async def _group(context: Context, group: str | None, topics: list[Body] | None) -> Body:
    offsets: Offsets = {}
    code = 0
    try:
        offsets = await context.group_offsets.fetch(group or "")
    except TidemillError:
        code = errors.COORDINATOR_NOT_AVAILABLE
    if topics is None:
        topics = [
            {"name": row.name, "partition_indexes": sorted(partitions)}
            for topic_id, partitions in sorted(offsets.items())
            if (row := context.cache.by_id(topic_id)) is not None
        ]
    return {"group_id": group or "", "error_code": code, "topics": [await _topic(context, offsets, t) for t in topics]}


async def _topic(context: Context, offsets: Offsets, asked: Body) -> Body:
    row = context.cache.by_name(asked["name"])
    committed = offsets.get(row.topic_id, {}) if row is not None else {}
    partitions = []
    for index in asked["partition_indexes"]:
        if context.pace.due:
            await context.pace.rest()
        found = committed.get(index, _NOTHING)
        partitions.append(
            {
                "partition_index": index,
                "committed_offset": found.offset,
                "committed_leader_epoch": found.leader_epoch,
                "metadata": found.metadata,
                "error_code": 0,
            }
        )
    return {"name": asked["name"], "partitions": partitions}


def failed(body: Body, code: int) -> Body:
    groups = [{"group_id": g["group_id"], "error_code": code, "topics": []} for g in body.get("groups") or []]
    topics = []
    for asked in body.get("topics") or []:
        nothing = {"committed_offset": -1, "committed_leader_epoch": -1, "metadata": "", "error_code": code}
        partitions = [{"partition_index": index, **nothing} for index in asked["partition_indexes"]]
        topics.append({"name": asked["name"], "partitions": partitions})
    return {"groups": groups, "error_code": code, "topics": topics}


API = Api(9, "offset_fetch", 1, 9, cold(handle, failed))
