"""Handler of DeleteRecords (21), versions 0 to 2: moves the log start to the given offset (−1: the high watermark).

The change is durable when it is answered. Records that a pipeline has not read yet are retained, and so are all records
of a captured table's topic and of a topic that is only compacted: POLICY_VIOLATION, and nothing of that partition is
deleted. An offset beyond the end is OFFSET_OUT_OF_RANGE; one below the start changes nothing.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import structlog

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items, run_with_timeout
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import RecordsStillNeededError

log = structlog.get_logger()


async def handle(context: Context, request: Request, body: Body) -> Body:
    places = [(topic["name"], asked) for topic in body["topics"] for asked in topic["partitions"]]
    named = Counter((name, asked["partition_index"]) for name, asked in places)
    await context.cache.settle_topics(named, is_id=False)

    async def answer(place: tuple[str, Body]) -> Body:
        name, asked = place
        if named[name, asked["partition_index"]] > 1:
            return _answer(asked, error_codes.INVALID_REQUEST)
        late = _answer(asked, error_codes.REQUEST_TIMED_OUT)
        return await run_with_timeout(body["timeout"], _delete(context, name, asked), late=late)

    answers = iter(await map_items(places, answer, context.pace))
    return {
        "topics": [{"name": t["name"], "partitions": [next(answers) for _ in t["partitions"]]} for t in body["topics"]]
    }


async def _delete(context: Context, name: str, asked: Body) -> Body:
    index = asked["partition_index"]

    async def delete(row: TopicRow) -> Body:
        return _answer(asked, 0, await context.topics.delete_records(row.topic_id, index, asked["offset"]))

    try:
        found = await context.cache.call_with_row(name, index, delete)
        return _answer(asked, found) if isinstance(found, int) else found
    except RecordsStillNeededError as error:
        # The answer has no field for the message.
        log.warning("kafka.records_not_deleted", topic=name, partition=index, cause=str(error))
        return _answer(asked, error_codes.POLICY_VIOLATION)
    except TidemillError as error:
        return _answer(asked, error_codes.code_of(error))


def _answer(asked: Body, code: int, low_watermark: int = -1) -> Body:
    return {"partition_index": asked["partition_index"], "error_code": code, "low_watermark": low_watermark}


def error_answer(body: Body, code: int) -> Body:
    answer = partial(_answer, code=code)
    return {"topics": [{"name": t["name"], "partitions": [*map(answer, t["partitions"])]} for t in body["topics"]]}


API = Api(21, "delete_records", 0, 2, begin_decoded(handle, error_answer), barrier=True)
