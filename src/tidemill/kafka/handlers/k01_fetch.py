"""Fetch (1), versions 4 to 17.

One `TopicLog.fetch` for all good partitions: it waits, event-driven, for min_bytes or max_wait. A partition
that fails at once ends the wait, as in Kafka. Batches are whole, the first one holds the asked offset (clients
skip forward), at least one is returned where any is, and their bytes go out as `topics` gave them.

Fetch sessions are declined: the session id is always 0, so clients send full requests. Last stable offset =
high watermark and no aborted transactions, until there are transactions. Left out: follower fetching (KIP-392),
leader epoch checks, divergence (tags of v12), `rack_id`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from tidemill.base.errors import Missing, TidemillError
from tidemill.base.tasks import is_own_fault, sentence
from tidemill.kafka import errors
from tidemill.kafka.context import Context
from tidemill.kafka.request import LARGE_ANSWER_ELEMENTS, Api, Reply, Request, decoded
from tidemill.kafka.schema.fetch import FetchRequest, PartitionRecords, decode, encode
from tidemill.topics.front import Fetched, FetchRead

log = structlog.get_logger()

FIRST_WITH_IDS: Final = 13
FETCH_SESSION_ID_NOT_FOUND: Final = 70


async def begin(context: Context, request: Request) -> Reply:
    """A fault of ours, of whatever type, is this request's: its partitions are asked for again."""
    fetch = await decoded(context.pace, request, lambda _: decode(request.view, request.position, request.version))
    try:
        return await _fetch(context, request.version, fetch)
    except BaseException as error:
        if not is_own_fault(error):
            raise
        fault = error
    log.error("kafka.request_fault", key=1, client_id=request.client_id, error=sentence(fault), exc_info=fault)
    code = errors.code_of(fault)
    failed = [(t.topic, [PartitionRecords(p.partition, code) for p in t.partitions]) for t in fetch.topics]
    return encode(failed, request.version)


async def _fetch(context: Context, version: int, fetch: FetchRequest) -> Reply:
    if fetch.session_id != 0:
        return encode([], version, error_code=FETCH_SESSION_ID_NOT_FOUND)
    answers: list[tuple[str, list[PartitionRecords]]] = []
    reads: list[FetchRead] = []
    places: list[tuple[int, int]] = []
    refused = False
    pace = context.pace
    for topic in fetch.topics:
        row = context.cache.resolve(topic.topic, is_id=version >= FIRST_WITH_IDS)
        partitions: list[PartitionRecords] = []
        for asked in topic.partitions:
            if isinstance(row, int):
                partitions.append(PartitionRecords(asked.partition, row))
                refused = True
            elif not 0 <= asked.partition < row.partitions:
                partitions.append(PartitionRecords(asked.partition, errors.UNKNOWN_TOPIC_OR_PARTITION))
                refused = True
            else:
                places.append((len(answers), len(partitions)))
                reads.append(FetchRead(row.topic_id, asked.partition, asked.offset, max(asked.max_bytes, 1)))
                partitions.append(PartitionRecords(asked.partition, 0))
            if pace.due:
                await pace.rest()
        answers.append((topic.topic, partitions))
    if reads:
        max_wait_s = 0.0 if refused else max(fetch.max_wait_ms, 0) / 1000
        found = await _read(context, fetch, reads, max_wait_s)
        for (topic_number, place), read, got in zip(places, reads, found, strict=True):
            answers[topic_number][1][place] = _answer(context, read, got)
            if pace.due:
                await pace.rest()
    if len(reads) < LARGE_ANSWER_ELEMENTS:
        return encode(answers, version)
    return await asyncio.to_thread(encode, answers, version)


async def _read(context: Context, fetch: FetchRequest, reads: list[FetchRead], max_wait_s: float) -> list[Fetched]:
    try:
        return await context.topics.fetch(
            reads,
            max_wait_s=max_wait_s,
            min_bytes=max(fetch.min_bytes, 0),
            max_bytes=min(max(fetch.max_bytes, 1), context.settings.fetch_bytes_max),
        )
    except TidemillError as error:
        return [Fetched(-1, -1, [], error)] * len(reads)


def _answer(context: Context, read: FetchRead, got: Fetched) -> PartitionRecords:
    if got.error is None:
        return PartitionRecords(read.partition, 0, got.high_watermark, got.log_start_offset, got.batches)
    if isinstance(got.error, Missing):
        # As in Produce: the row was stale.
        row = context.cache.by_id(read.topic_id)
        if row is not None:
            context.cache.forget(row.name)
        return PartitionRecords(read.partition, errors.NOT_LEADER_OR_FOLLOWER)
    if not errors.is_expected(got.error):
        log.error("kafka.fetch_failed", topic_id=read.topic_id, partition=read.partition, error=repr(got.error))
    return PartitionRecords(read.partition, errors.code_of(got.error), got.high_watermark, got.log_start_offset)


API = Api(1, "fetch", 4, 17, begin, abandon=True, at_once=4)
