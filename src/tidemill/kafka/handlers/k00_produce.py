"""Handler of Produce (0), versions 3 to 13; advertised from 0.

`begin_produce` is one plain call that reserves every partition batch of the request, in order, through
`TopicLog.produce_nowait`. The session calls it while it handles the frame, so the order of requests on a connection is
the order of reservations, however long the uploads take. A request of very many partitions reserves in several steps,
and no other request of its connection begins before the last step.

The endpoint never rejects a request for a temporary internal reason, because later requests would overtake
it. A topic that is not looked up yet stalls the connection. A row that turned out to be stale closes it, and the client
sends its unanswered requests again, in order.

The API is advertised from version 0 because older librdkafka silently stops compressing otherwise (KAFKA-18659); a
request below version 3 closes the connection. Each partition has one record batch v2. Its header is checked here, and
its records are checked where it is stored. Batches without producer id keep the order of their connection. acks 1 and
all are the same: the batch is durable, then acknowledged. With acks=0 there is no response, and a failure closes the
connection, as in Kafka.

A batch of a transaction is accepted only while the coordinator reports its transaction as open and containing the
partition (KIP-890); from version 12 on the coordinator adds the partition itself. A rejected batch gets
INVALID_TXN_STATE, which ends the producer, or from version 11 on TRANSACTION_ABORTABLE, which ends only the
transaction.

Not supported: the request's timeout (the store's own retry budget is shorter), KIP-951 tags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from tidemill.base.errors import MissingError, UnavailableError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.kafka import error_codes
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, PlainOutcome, Request, Stall
from tidemill.kafka.metadata.topic_cache import TopicCache
from tidemill.kafka.schema.primitives import I32
from tidemill.kafka.schema.produce import PartitionAnswer, PartitionData, ProduceRequest, TopicData, decode, encode
from tidemill.metastore.catalogue import TopicRow
from tidemill.security.acls import Operation, Resource
from tidemill.topics.api import InvalidRecordsError, InvalidTransactionError, ProduceResult, ProduceTransaction

log = structlog.get_logger()

FIRST_WITH_IDS: Final = 13
FIRST_WITH_ZSTD: Final = 7
FIRST_THAT_ABORTS: Final = 11
FIRST_THAT_ADDS: Final = 12
_BATCH_HEADER_BYTES: Final = 61
_ZSTD: Final = 4
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
UNSUPPORTED_COMPRESSION_TYPE: Final = 76


def begin_produce(context: Context, request: Request) -> PlainOutcome:
    produce = decode(request.view, request.position, request.version)
    request.answered = produce.acks != 0
    is_id = request.version >= FIRST_WITH_IDS
    rows = [_find_topic(context.cache, topic, is_id=is_id) for topic in produce.topics]
    if context.access.is_enforced:
        rows = _authorize_rows(context, request, produce, rows, is_id=is_id)
    if None in rows:
        raise Stall(context.cache.next_refresh())
    gathering = _ProduceAnswers(context, request, produce)
    work = _reserve(gathering, rows)
    pace = context.pace
    for _ in work:
        if pace.is_used_up:
            request.reserving = _reserve_rest(work, pace, gathering)
            return gathering.outcome
    return gathering.finish_reserving()


def _find_topic(cache: TopicCache, topic: TopicData, *, is_id: bool) -> TopicRow | int | None:
    """Return the topic's row if it has all named partitions, its error code, or None if no refresh has looked for it
    yet.
    """
    row = cache.find(topic.topic, is_id=is_id)
    if isinstance(row, TopicRow) and any(data.partition >= row.partitions for data in topic.partitions):
        return cache.check_growth(row)
    return row


def _authorize_rows(
    context: Context,
    request: Request,
    produce: ProduceRequest,
    rows: Sequence[TopicRow | int | None],
    *,
    is_id: bool,
) -> list[TopicRow | int | None]:
    """Return the rows, with a code in place of topics that the client may not write, existing or not."""
    access, visitor, transaction = context.access, request.visitor, produce.transactional_id
    if transaction is not None and not access.is_allowed(
        visitor, Operation.WRITE, Resource.TRANSACTIONAL_ID, transaction
    ):
        return [error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED] * len(rows)
    return [
        access.topic(visitor, Operation.WRITE, topic.topic, row, is_id=is_id)
        for topic, row in zip(produce.topics, rows, strict=True)
    ]


async def _reserve_rest(work: Iterator[None], pace: CoopBudget, gathering: _ProduceAnswers) -> None:
    """Reserve the rest of a long request.

    No other request of its connection begins in the meantime (`Request.reserving`).
    """
    try:
        await pace.wait_for_turn()
        for _ in work:
            if pace.is_used_up:
                await pace.wait_for_turn()
    except BaseException as error:
        if not gathering.outcome.done():
            gathering.outcome.set_exception(error)  # its frame is released; reserved batches complete
        raise
    gathering.finish_reserving()


def _reserve(gathering: _ProduceAnswers, rows: Sequence[TopicRow | int | None]) -> Iterator[None]:
    """Reserve or reject one partition's batch at each step, in order."""
    for topic_number, (topic, row) in enumerate(zip(gathering.produce.topics, rows, strict=True)):
        for place, data in enumerate(topic.partitions):
            _reserve_one(gathering, row, topic_number, place, data)
            yield


def _reserve_one(
    gathering: _ProduceAnswers, row: TopicRow | int | None, topic_number: int, place: int, data: PartitionData
) -> None:
    request, produce = gathering.request, gathering.produce
    refused: tuple[int, str | None] | None
    if row is None or isinstance(row, int):
        refused = (row or error_codes.UNKNOWN_TOPIC_OR_PARTITION, None)
    elif row.kind == "capture":
        refused = (error_codes.TOPIC_AUTHORIZATION_FAILED, f"written by capture only: topic={row.name}")
    elif not 0 <= data.partition < row.partitions:
        refused = (error_codes.UNKNOWN_TOPIC_OR_PARTITION, None)
    else:
        refused = _batch_error(produce, data.records, request.version)
    if refused is not None or data.records is None or row is None or isinstance(row, int):
        code, message = refused or (error_codes.INVALID_RECORD, None)
        gathering.set_answer(topic_number, place, PartitionAnswer(data.partition, code, error_message=message))
        return
    try:
        within = None
        if produce.transactional_id is not None:
            within = ProduceTransaction(produce.transactional_id, request.version >= FIRST_THAT_ADDS)
        future = gathering.context.topics.produce_nowait(
            row.topic_id, data.partition, data.records, sender=request.sender, within=within
        )
    except Exception as error:
        # Batches before this one are reserved, so the request must be completed even after an internal error.
        gathering.set_error(topic_number, place, data.partition, error, row)
        return
    gathering.add_future(topic_number, place, data.partition, future, row)


def _batch_error(produce: ProduceRequest, records: memoryview | None, version: int) -> tuple[int, str | None] | None:
    """Return (code, message) if the request or the batch header alone is invalid, else None."""
    if produce.acks not in (-1, 0, 1):
        return error_codes.INVALID_REQUIRED_ACKS, None
    if records is None or not records:
        return error_codes.INVALID_RECORD, "no record batch"
    if len(records) < _BATCH_HEADER_BYTES:
        return error_codes.CORRUPT_MESSAGE, "shorter than a batch header"
    if records[16] != 2:
        return error_codes.INVALID_RECORD, f"only record batches v2 are accepted: magic={records[16]}"
    size = 12 + I32.unpack_from(records, 8)[0]
    if size < len(records):
        return error_codes.INVALID_RECORD, "more than one batch for a partition"
    if size > len(records):
        return error_codes.CORRUPT_MESSAGE, "batch is truncated"
    if records[22] & _CONTROL:
        return error_codes.INVALID_RECORD, "control batches are not accepted"
    if records[22] & _TRANSACTIONAL and produce.transactional_id is None:
        return error_codes.INVALID_RECORD, "transactional batch without a transactional id"
    if records[22] & 0x07 == _ZSTD and version < FIRST_WITH_ZSTD:
        return UNSUPPORTED_COMPRESSION_TYPE, "zstd needs Produce version 7"
    return None


_NO_ANSWER: Final = PartitionAnswer(-1, error_codes.UNKNOWN_SERVER_ERROR)
"""Placeholder of an answer until it arrives; never sent."""


class _ProduceAnswers:
    """Answers of a request, which ends with the last one. It uses callbacks only: a Produce costs no task."""

    def __init__(self, context: Context, request: Request, produce: ProduceRequest) -> None:
        self.context = context
        self.request = request
        self.produce = produce
        self._names = [topic.topic for topic in produce.topics]
        self._answers = [[_NO_ANSWER] * len(topic.partitions) for topic in produce.topics]
        self._missing = sum(len(t.partitions) for t in produce.topics)
        self.outcome = PlainOutcome()
        self._begun = False
        self._stale = ""
        self._failed = 0
        """Error code of the first partition that failed."""

    def set_answer(self, topic: int, place: int, answer: PartitionAnswer) -> None:
        self._answers[topic][place] = answer
        self._failed = self._failed or answer.error_code
        self._missing -= 1
        if self._begun and not self._missing:
            self._finish()

    def add_future(
        self, topic: int, place: int, index: int, future: asyncio.Future[ProduceResult], row: TopicRow
    ) -> None:
        def ended(done: asyncio.Future[ProduceResult]) -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                self.set_error(topic, place, index, error, row)
            else:
                result = done.result()
                at = result.base_offset, result.log_start_offset
                self.set_answer(topic, place, PartitionAnswer(index, 0, *at, None, (), result.append_time_ms))

        future.add_done_callback(ended)

    def set_error(self, topic: int, place: int, index: int, error: BaseException, row: TopicRow) -> None:
        if isinstance(error, MissingError):
            self.context.cache.remove(row)
            self._stale = row.name
        elif not error_codes.is_expected(error):
            log.error("kafka.produce_failed", topic=row.name, partition=index, error=repr(error), exc_info=error)
        record_errors = error.record_errors if isinstance(error, InvalidRecordsError) else ()
        code = error_codes.code_of(error)
        if isinstance(error, InvalidTransactionError) and self.request.version >= FIRST_THAT_ABORTS:
            code = error_codes.TRANSACTION_ABORTABLE
        answer = PartitionAnswer(index, code, error_message=str(error), record_errors=record_errors)
        self.set_answer(topic, place, answer)

    def finish_reserving(self) -> PlainOutcome:
        self._begun = True
        if not self._missing:
            self._finish()
        return self.outcome

    def _finish(self) -> None:
        if self._stale:
            self.outcome.set_exception(UnavailableError(f"the topic was deleted or re-created: topic={self._stale}."))
            return
        if not self.request.answered and self._failed:
            failed = UnavailableError(f"Produce without acknowledgement failed: error_code={self._failed}.")
            self.outcome.set_exception(failed)
            return
        self.outcome.set_result([encode(zip(self._names, self._answers, strict=True), self.request.version)])


API = Api(0, "produce", 3, 13, begin_produce, advertised_min=0)
