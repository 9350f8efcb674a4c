"""OffsetCommit (8), versions 2 to 9: for consumers that assign partitions themselves.

Only "simple" commits are taken: no member id, generation −1; anything else names a member of a group that does
not exist, hence UNKNOWN_MEMBER_ID. Offsets live in one consensus register per group (`group_offsets`). Group
membership comes with the group APIs. Left out: retention of offsets.
"""

from __future__ import annotations

from tidemill.base.errors import Invalid, TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.topics.group_offsets import METADATA_CHARS_MAX, Committed, Offsets


async def handle(context: Context, request: Request, body: Body) -> Body:
    refusal = 0
    if body.get("generation_id_or_member_epoch", -1) >= 0 or body.get("member_id"):
        refusal = errors.UNKNOWN_MEMBER_ID
    commits: Offsets = {}
    answers: list[Body] = []
    accepted: list[Body] = []
    for topic in body["topics"]:
        row = context.cache.resolve(topic["name"], is_id=False)
        partitions: list[Body] = []
        for asked in topic["partitions"]:
            if context.pace.due:
                await context.pace.rest()
            index, metadata = asked["partition_index"], asked.get("committed_metadata") or ""
            answer: Body = {"partition_index": index, "error_code": refusal}
            if refusal:
                pass
            elif isinstance(row, int) or not 0 <= index < row.partitions:
                answer["error_code"] = row if isinstance(row, int) else errors.UNKNOWN_TOPIC_OR_PARTITION
            elif len(metadata) > METADATA_CHARS_MAX:
                answer["error_code"] = errors.OFFSET_METADATA_TOO_LARGE
            else:
                commits.setdefault(row.topic_id, {})[index] = Committed(
                    asked["committed_offset"], asked.get("committed_leader_epoch", -1), metadata
                )
                accepted.append(answer)
            partitions.append(answer)
        answers.append({"name": topic["name"], "partitions": partitions})
    if commits:
        code = await _commit(context, body["group_id"] or "", commits)
        for answer in accepted:
            answer["error_code"] = code
    return {"topics": answers}


async def _commit(context: Context, group: str, commits: Offsets) -> int:
    try:
        await context.group_offsets.commit(group, commits)
    except Invalid:
        return errors.OFFSET_METADATA_TOO_LARGE
    except TidemillError:
        return errors.COORDINATOR_NOT_AVAILABLE
    return 0


def failed(body: Body, code: int) -> Body:
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


API = Api(8, "offset_commit", 2, 9, cold(handle, failed))
