"""Handler of AlterReplicaLogDirs (34), versions 1 and 2, which never moves anything.

A broker has one directory, the bucket, and every partition is already there: moving a partition to it succeeds, and
there is no other directory (LOG_DIR_NOT_FOUND).
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers.k35_describe_log_dirs import BUCKET
from tidemill.kafka.schema.codec_compiler import Body


async def handle(context: Context, request: Request, body: Body) -> Body:
    topics = [topic for directory in body["dirs"] for topic in directory["topics"]]
    await context.cache.settle_topics(((t["name"], index) for t in topics for index in t["partitions"]), is_id=False)
    results = []
    for directory in body["dirs"]:
        known = directory["path"] == BUCKET
        for topic in directory["topics"]:
            codes = [(i, _code(context, topic["name"], i, known=known)) for i in topic["partitions"]]
            results.append(_result(topic["name"], codes))
    return {"results": results}


def _code(context: Context, name: str, index: int, *, known: bool) -> int:
    row = context.cache.resolve(name, is_id=False)
    if isinstance(row, int):
        return row
    if not 0 <= index < row.partitions:
        return context.cache.missing_partition_code(row, index)
    return error_codes.NONE if known else error_codes.LOG_DIR_NOT_FOUND


def _result(name: str, codes: list[tuple[int, int]]) -> Body:
    partitions = [{"partition_index": index, "error_code": code} for index, code in codes]
    return {"topic_name": name, "partitions": partitions}


def error_answer(body: Body, code: int) -> Body:
    topics = [topic for directory in body["dirs"] for topic in directory["topics"]]
    return {"results": [_result(topic["name"], [(index, code) for index in topic["partitions"]]) for topic in topics]}


API = Api(34, "alter_replica_log_dirs", 1, 2, begin_decoded(handle, error_answer))
