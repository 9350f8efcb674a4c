"""Handler of ElectLeaders (43), versions 0 to 2, which never elects.

Leaders follow the live nodes, so an election would change nothing: each existing partition is ELECTION_NOT_NEEDED, as
if its preferred replica led it.
"""

from __future__ import annotations

from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.schema.codec_compiler import Body

MESSAGE = "Leaders follow the live nodes; there is nothing to elect."


async def handle(context: Context, request: Request, body: Body) -> Body:
    topics = body["topic_partitions"] or ()
    await context.cache.settle_topics(((t["topic"], index) for t in topics for index in t["partitions"]), is_id=False)
    results = []
    for topic in topics:
        found = []
        for index in topic["partitions"]:
            row = context.cache.resolve(topic["topic"], is_id=False)
            code = error_codes.ELECTION_NOT_NEEDED
            if isinstance(row, int):
                code = row
            elif not 0 <= index < row.partitions:
                code = context.cache.missing_partition_code(row, index)
            found.append(_result(index, code))
        results.append({"topic": topic["topic"], "partition_result": found})
    return {"error_code": 0, "replica_election_results": results}


def _result(index: int, code: int) -> Body:
    message = MESSAGE if code == error_codes.ELECTION_NOT_NEEDED else None
    return {"partition_id": index, "error_code": code, "error_message": message}


def error_answer(body: Body, code: int) -> Body:
    return {
        "error_code": code,
        "replica_election_results": [
            {"topic": topic["topic"], "partition_result": [_result(index, code) for index in topic["partitions"]]}
            for topic in body["topic_partitions"] or ()
        ],
    }


API = Api(43, "elect_leaders", 0, 2, begin_decoded(handle, error_answer))
