"""ListOffsets (2), versions 1 to 10.

−1 latest (the high watermark, for either isolation level), −2 earliest, −4 earliest local (the same: there is
no second tier), ≥ 0 the first record whose timestamp is at or after it. `topics` finds the batch; its records
are looked through here, so the answer is exact to the record, as Kafka's is.

Left out: −3 (record with the greatest timestamp) and −5 (last tiered offset): UNSUPPORTED_VERSION per partition.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tidemill.base.errors import TidemillError
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import Api, Request, cold
from tidemill.kafka.schema.compiled import Body
from tidemill.topics.batch import decode_columns
from tidemill.topics.front import FetchRead

LATEST: Final = -1
EARLIEST: Final = -2
EARLIEST_LOCAL: Final = -4


async def handle(context: Context, request: Request, body: Body) -> Body:
    async def topic(asked: Body) -> Body:
        answers = await asyncio.gather(*(_partition(context, asked["name"], p) for p in asked["partitions"]))
        return {"name": asked["name"], "partitions": answers}

    return {"topics": await asyncio.gather(*(topic(asked) for asked in body["topics"]))}


async def _partition(context: Context, name: str, asked: Body) -> Body:
    index, timestamp_ms = asked["partition_index"], asked["timestamp"]
    answer: Body = {"partition_index": index, "error_code": 0, "timestamp": -1, "offset": -1}
    row = context.cache.resolve(name, is_id=False)
    if isinstance(row, int) or not 0 <= index < row.partitions:
        return {**answer, "error_code": row if isinstance(row, int) else errors.UNKNOWN_TOPIC_OR_PARTITION}
    try:
        if timestamp_ms == LATEST:
            return {**answer, "offset": (await context.topics.offsets(row.topic_id, index)).high_watermark}
        if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
            return {**answer, "offset": (await context.topics.offsets(row.topic_id, index)).log_start_offset}
        if timestamp_ms < 0:
            return {**answer, "error_code": errors.UNSUPPORTED_VERSION}
        found = await _by_time(context, row.topic_id, index, timestamp_ms)
        return answer if found is None else {**answer, "offset": found[0], "timestamp": found[1]}
    except TidemillError as error:
        return {**answer, "error_code": errors.code_of(error)}


async def _by_time(context: Context, topic_id: str, partition: int, timestamp_ms: int) -> tuple[int, int] | None:
    found = await context.topics.offset_for_time(topic_id, partition, timestamp_ms)
    if found is None:
        return None
    read = FetchRead(topic_id, partition, found[0], 1)
    (got,) = await context.topics.fetch([read], max_wait_s=0, min_bytes=0, max_bytes=1)
    if got.error is not None:
        raise got.error
    for batch in got.batches:
        _, columns = decode_columns(batch, check_crc=False)
        for offset, record_ms in zip(columns.offsets, columns.timestamps_ms, strict=True):
            if record_ms >= timestamp_ms:
                return offset, record_ms
    return found


API = Api(2, "list_offsets", 1, 10, cold(handle))
