"""Handler of DescribeLogDirs (35), versions 1 to 4: one directory, the bucket, with the partitions that this broker
leads.

Sizes are those of the newest checkpoint, some seconds old. A bucket's total and usable bytes are unknown (−1).
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

BUCKET: Final = "/bucket"
"""Name of the directory, as the path that clients expect."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    wanted = None if body["topics"] is None else {t["topic"]: set(t["partitions"]) for t in body["topics"]}
    topics: list[Body] = []
    try:
        await context.cache.refresh()
        for row in sorted(context.cache.rows(), key=lambda row: row.name):
            asked = range(row.partitions) if wanted is None else sorted(wanted.get(row.name, ()))
            led = [
                index
                for index in asked
                if 0 <= index < row.partitions and context.topics.leader_of(row.topic_id, index) == context.own.name
            ]
            if led:
                sizes = await context.catalogue.partition_bytes(row.topic_id)
                topics.append({"name": row.name, "partitions": [_partition(i, sizes.get(i, 0)) for i in led]})
            if context.pace.is_used_up:
                await context.pace.wait_for_turn()
    except TidemillError as error:
        return error_answer(body, error_codes.code_of(error))
    return {"error_code": 0, "results": [_directory(topics, error_codes.NONE)]}


def _partition(index: int, size_bytes: int) -> Body:
    return {"partition_index": index, "partition_size": size_bytes, "offset_lag": 0, "is_future_key": False}


def _directory(topics: list[Body], code: int) -> Body:
    return {"error_code": code, "log_dir": BUCKET, "topics": topics, "total_bytes": -1, "usable_bytes": -1}


def error_answer(body: Body, code: int) -> Body:
    return {"error_code": code, "results": [_directory([], code)]}


API = Api(35, "describe_log_dirs", 1, 4, begin_decoded(handle, error_answer))
