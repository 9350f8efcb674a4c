"""Handler of ListOffsets (2), versions 1 to 10.

Timestamp −1 requests the latest offset (the high watermark, or for read_committed the last stable offset), −2 the
earliest, −4 the earliest local one (the same, as there is no second tier), and ≥ 0 the first record with that timestamp
or a later one. `topics` finds that record exactly, as Kafka's clients expect: an index finds the batch, and a batch of
several records is decoded off the loop. For read_committed no record at or above the last stable offset is found. A
partition that is named twice is INVALID_REQUEST, as in Kafka. A request searches by time for at most BY_TIME_S; the
remaining partitions get REQUEST_TIMED_OUT, which clients retry.

−3 (v7) requests the first record with the greatest timestamp, which is found like a timestamp. −5 (v9), the last offset
of a second tier, has no result, as on a broker without one.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded, map_items
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.metastore.catalogue import TopicRow

LATEST: Final = -1
EARLIEST: Final = -2
EARLIEST_LOCAL: Final = -4
MAX_TIMESTAMP: Final = -3
LATEST_TIERED: Final = -5
FIRST_VERSION: Final = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
READ_COMMITTED: Final = 1

BY_TIME_S: Final = 10.0
"""Longest time of searches by timestamp, below the 30 s after which clients abandon a request."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    until_s = context.clock.monotonic_s() + BY_TIME_S
    committed = body.get("isolation_level", 0) == READ_COMMITTED
    places = [(asked["name"], partition) for asked in body["topics"] for partition in asked["partitions"]]
    named = Counter((name, partition["partition_index"]) for name, partition in places)
    await context.cache.settle_topics(named, is_id=False)

    async def answer(place: tuple[str, Body]) -> Body:
        name, asked = place
        if named[name, asked["partition_index"]] > 1:
            return _answer(asked, error_code=error_codes.INVALID_REQUEST)
        if request.version < FIRST_VERSION.get(asked["timestamp"], 0):
            return _answer(asked, error_code=error_codes.UNSUPPORTED_VERSION)
        return await _find_offset(context, name, asked, until_s, committed=committed)

    answers = iter(await map_items(places, answer, context.pace))
    return {
        "topics": [
            {"name": asked["name"], "partitions": [next(answers) for _ in asked["partitions"]]}
            for asked in body["topics"]
        ]
    }


def error_answer(body: Body, code: int) -> Body:
    return {
        "topics": [
            {"name": topic["name"], "partitions": [_answer(asked, error_code=code) for asked in topic["partitions"]]}
            for topic in body["topics"]
        ]
    }


def _answer(asked: Body, **values: int) -> Body:
    nothing = {"partition_index": asked["partition_index"], "error_code": 0, "timestamp": -1, "offset": -1}
    return {**nothing, **values}


async def _find_offset(context: Context, name: str, asked: Body, until_s: float, *, committed: bool) -> Body:
    index, timestamp_ms = asked["partition_index"], asked["timestamp"]
    topics = context.topics

    async def read_partition(row: TopicRow) -> Body:
        if timestamp_ms == LATEST:
            offsets = await topics.offsets(row.topic_id, index)
            return _answer(asked, offset=offsets.last_stable if committed else offsets.high_watermark)
        if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
            return _answer(asked, offset=(await topics.offsets(row.topic_id, index)).log_start_offset)
        if timestamp_ms == LATEST_TIERED:
            return _answer(asked)
        if timestamp_ms < 0 and timestamp_ms != MAX_TIMESTAMP:
            return _answer(asked, error_code=error_codes.UNSUPPORTED_VERSION)
        if context.clock.monotonic_s() > until_s:
            return _answer(asked, error_code=error_codes.REQUEST_TIMED_OUT)
        if timestamp_ms == MAX_TIMESTAMP:
            found = await topics.newest_timestamp(row.topic_id, index)
        else:
            found = await topics.offset_for_time(row.topic_id, index, timestamp_ms)
        if committed and found is not None:
            stable = (await topics.offsets(row.topic_id, index)).last_stable
            found = found if found[0] < stable else None
        return _answer(asked) if found is None else _answer(asked, offset=found[0], timestamp=found[1])

    try:
        found = await context.cache.call_with_row(name, index, read_partition)
    except TidemillError as error:
        found = error_codes.code_of(error)
    return _answer(asked, error_code=found) if isinstance(found, int) else found


API = Api(2, "list_offsets", 1, 10, begin_decoded(handle, error_answer), abandon=True, at_once=4)
