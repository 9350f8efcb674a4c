"""Read the ends of the partitions of a captured table's topic."""

from __future__ import annotations

import asyncio

from tidemill.base.errors import MissingError, UnavailableError, UnknownOutcomeError
from tidemill.topics.api import FetchRead, TopicLog
from tidemill.topics.batch import Record, decode_batch

OPEN_ATTEMPTS = 100
TAIL_FETCH_BYTES = 1 << 20


async def read_high_watermark(topics: TopicLog, topic_id: str, partition: int) -> int:
    """Return the high watermark. Waits for a partition that is just being opened, or whose creation is not known
    everywhere yet.
    """
    for attempt in range(OPEN_ATTEMPTS):
        try:
            return (await topics.offsets(topic_id, partition)).high_watermark
        except (UnavailableError, UnknownOutcomeError, MissingError):
            if attempt == OPEN_ATTEMPTS - 1:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError("unreachable")


async def read_last_record(topics: TopicLog, topic_id: str, partition: int, end: int) -> Record | None:
    """Return the record before the high watermark `end`; None if retention has removed it."""
    read = FetchRead(topic_id, partition, end - 1, TAIL_FETCH_BYTES)
    for attempt in range(OPEN_ATTEMPTS):
        (fetched,) = await topics.fetch([read], max_wait_s=0.0, min_bytes=0, max_bytes=TAIL_FETCH_BYTES)
        if fetched.error is None:
            break
        if not isinstance(fetched.error, UnavailableError | UnknownOutcomeError) or attempt == OPEN_ATTEMPTS - 1:
            raise fetched.error
        await asyncio.sleep(0.1)
    for batch in fetched.batches:
        for record in decode_batch(batch).records:
            if record.offset == end - 1:
                return record
    return None
