"""ListOffsets (2), versions 1 to 10.

−1 latest (the high watermark, for either isolation level), −2 earliest, −4 earliest local (the same: there is
no second tier), ≥ 0 the first record whose timestamp is at or after it: `topics` answers, exact to the record, with
one batch decoded a partition, off the loop. A partition named twice is INVALID_REQUEST, as in Kafka. A request looks
for times for BY_TIME_S at most; what is left is REQUEST_TIMED_OUT, which clients ask again.

Left out: −3 (record with the greatest timestamp) and −5 (last tiered offset): UNSUPPORTED_VERSION per partition.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold, each
from tidemill.kafka.schema.compiled import Body

LATEST: Final = -1
EARLIEST: Final = -2
EARLIEST_LOCAL: Final = -4

BY_TIME_S: Final = 10.0
"""Below the 30 s after which clients give a request up."""


async def handle(context: Context, request: Request, body: Body) -> Body:
    until_s = context.clock.monotonic_s() + BY_TIME_S
    places = [(asked["name"], partition) for asked in body["topics"] for partition in asked["partitions"]]
    named = Counter((name, partition["partition_index"]) for name, partition in places)

    async def answer(place: tuple[str, Body]) -> Body:
        name, asked = place
        if named[name, asked["partition_index"]] > 1:
            return _answer(asked, error_code=errors.INVALID_REQUEST)
        return await _partition(context, name, asked, until_s)

    answers = iter(await each(places, answer, context.pace))
    return {
        "topics": [
            {"name": asked["name"], "partitions": [next(answers) for _ in asked["partitions"]]}
            for asked in body["topics"]
        ]
    }


def failed(body: Body, code: int) -> Body:
    return {
        "topics": [
            {"name": topic["name"], "partitions": [_answer(asked, error_code=code) for asked in topic["partitions"]]}
            for topic in body["topics"]
        ]
    }


def _answer(asked: Body, **values: int) -> Body:
    nothing = {"partition_index": asked["partition_index"], "error_code": 0, "timestamp": -1, "offset": -1}
    return {**nothing, **values}


async def _partition(context: Context, name: str, asked: Body, until_s: float) -> Body:
    index, timestamp_ms = asked["partition_index"], asked["timestamp"]
    row = context.cache.resolve(name, is_id=False)
    if isinstance(row, int) or not 0 <= index < row.partitions:
        return _answer(asked, error_code=row if isinstance(row, int) else errors.UNKNOWN_TOPIC_OR_PARTITION)
    try:
        if timestamp_ms == LATEST:
            return _answer(asked, offset=(await context.topics.offsets(row.topic_id, index)).high_watermark)
        if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
            return _answer(asked, offset=(await context.topics.offsets(row.topic_id, index)).log_start_offset)
        if timestamp_ms < 0:
            return _answer(asked, error_code=errors.UNSUPPORTED_VERSION)
        if context.clock.monotonic_s() > until_s:
            return _answer(asked, error_code=errors.REQUEST_TIMED_OUT)
        found = await context.topics.offset_for_time(row.topic_id, index, timestamp_ms)
        return _answer(asked) if found is None else _answer(asked, offset=found[0], timestamp=found[1])
    except TidemillError as error:
        return _answer(asked, error_code=errors.code_of(error))


API = Api(2, "list_offsets", 1, 10, cold(handle, failed), abandon=True, at_once=4)
