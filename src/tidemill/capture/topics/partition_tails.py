"""Open the partitions of a captured table's topic: read their ends, and let their writers count from there on."""

from __future__ import annotations

import asyncio

from tidemill.base.errors import CorruptError, InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import ChangePosition
from tidemill.capture.topics.batch_builder import POSITION_HEADER
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.topics.api import FetchRead, TopicLog
from tidemill.topics.batch import Record, decode_batch, encode_batch

OPEN_ATTEMPTS = 100
TAIL_FETCH_BYTES = 1 << 20


async def open_partition(topics: TopicLog, writer: PartitionWriter, offsets: tuple[int, ...] | None) -> None:
    """Open a partition. `offsets` and errors: as in TopicWriter.open_table."""
    base = offsets[writer.partition] if offsets is not None else 0
    end = await read_high_watermark(topics, writer.topic_id, writer.partition)
    if writer.epoch:
        await _open_epoch(topics, writer, end)
        return
    if offsets is None and end > 0:
        raise CorruptError(f"a new topic already has records: topic={writer.topic} records={end}.")
    last = await read_last_record(topics, writer.topic_id, writer.partition, end) if end > base else None
    tail = read_position(last) if last is not None else None
    writer.start_at(base, end, tail)


async def _open_epoch(topics: TopicLog, writer: PartitionWriter, end: int) -> None:
    """Open the epoch of a resumed copy: write the partition's last record again, which changes nothing for readers
    by key.
    """
    last = await read_last_record(topics, writer.topic_id, writer.partition, end) if end else None
    if last is None:
        raise InvalidError(
            f"an interrupted copy left its topic empty: topic={writer.topic} partition={writer.partition}.",
            fix="It starts over automatically.",
        )
    data = encode_batch(
        [last], producer_id=writer.producer_id, producer_epoch=writer.epoch, base_sequence=0,
    )  # fmt: skip
    for attempt in range(OPEN_ATTEMPTS):
        try:
            # The log patches offsets in place; a batch that landed despite the error is recognised by its sequence.
            made = await topics.produce_nowait(writer.topic_id, writer.partition, bytearray(data))
            writer.start_behind(made.base_offset)
            return
        except (UnavailableError, UnknownOutcomeError):
            if attempt == OPEN_ATTEMPTS - 1:
                raise
            await asyncio.sleep(0.1)


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


def read_position(record: Record) -> ChangePosition:
    """Return the position in a capture's record. Raises CorruptError if it has none."""
    for name, content in record.headers:
        if name == POSITION_HEADER and content is not None:
            try:
                commit_lsn, ordinal = content.split(b"_")
                return ChangePosition(int(commit_lsn), int(ordinal))
            except ValueError:
                break
    raise CorruptError(f"a record of a capture's topic has no position: offset={record.offset}.")
