"""Leader's side of `request_log`: execute each request once, in the order of the log, and reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    CorruptError,
    FencedError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, LogRecord
from tidemill.consensus.state_log.state_log import StateLog
from tidemill.metastore.domain.forwarding.request_log import (
    APPEND_BYTES,
    DONE,
    POSITION_KEY,
    REPLIES_KEPT,
    RETRY_PAUSE_S,
    UNKNOWN,
    Reply,
    Request,
    append_at_end,
    decode_position,
    decode_request,
    encode_position,
    rejection_reply,
    replies_log,
    requests_log,
)
from tidemill.metastore.domain.leader import Leader
from tidemill.metastore.domain.state import DomainState

_log = structlog.get_logger()

READ_REQUESTS = 256
WAIT_S = 30.0
TRUNCATE_AFTER = 64
"""Number of executed requests after which they are truncated. The rest is truncated when no request waits."""

LOAD_RETRY_S = 1.0
FLUSH_TIMEOUT_S = 60.0
REPLY_ATTEMPTS = 5

_encode = msgspec.msgpack.Encoder().encode


class ForwardingServer:
    """Executor of the request log. It runs while the leader leads; an error that ends it ends the leader."""

    def __init__(
        self, consensus: Consensus, clock: Clock, rand: Rand, domain: str, log: StateLog[DomainState], leader: Leader
    ) -> None:
        self._consensus = consensus
        self._clock = clock
        self._rand = rand
        self._requests = requests_log(domain)
        self._replies = replies_log(domain)
        self._log = log
        self._leader = leader
        self.trouble = ""
        """Reason why no request is executed, if a file that has their position is lost or damaged; else ""."""
        self._position = 0
        self._truncated = 0
        self._replies_from = self._replies_at = 0
        self._flushes = Tasks(leader.task_failed)
        self._executing = False

    @property
    def is_busy(self) -> bool:
        """True if a request has been read but not answered."""
        return self._executing or len(self._flushes) > 0

    async def run(self) -> None:
        """Execute requests indefinitely. Raises FencedError when the term ends."""
        async with self._flushes:
            await self._load_position()
            while True:
                try:
                    patience_s = RETRY_PAUSE_S if self._truncated < self._position else WAIT_S
                    if await self._consensus.wait(self._requests, self._position, patience_s):
                        self._executing = True
                        await self._execute_requests()
                    elif self._truncated < self._position:
                        await self._truncate()
                except (UnavailableError, UnknownOutcomeError) as error:
                    _log.warning("requests wait", log=self._requests, cause=error.message)
                    await asyncio.sleep(RETRY_PAUSE_S)
                finally:
                    self._executing = False

    async def _load_position(self) -> None:
        while True:
            try:
                # Neither an unavailable bucket nor a lost file ends the term: most work of a leader needs no file.
                row = await self._leader.database.get_row(POSITION_KEY)
                head = await self._consensus.log_head(self._requests)
                replies = await self._consensus.log_head(self._replies)
                self._replies_from, self._replies_at = replies.start, replies.next
                position = decode_position(self._log.state, row.value if row is not None else None)
                await self._reply_for_previous_leader(head.start, position)
                break
            except (UnavailableError, UnknownOutcomeError, MissingError, CorruptError) as error:
                _log.warning("requests wait", log=self._requests, cause=error.message)
                if isinstance(error, MissingError | CorruptError):
                    # Possibly superseded without knowing: the new leader may have deleted the file.
                    with contextlib.suppress(UnavailableError, UnknownOutcomeError):
                        await self._leader.check_still_leading()
                    self.trouble = str(error)
                await asyncio.sleep(LOAD_RETRY_S)
        self.trouble = ""
        self._position = max(position, head.start)
        self._truncated = head.start

    async def _reply_for_previous_leader(self, start: int, position: int) -> None:
        """Reply UnknownOutcomeError to the requests from `start` up to `position`: the previous leader may have
        ended before replying."""
        while start < position:
            try:
                found = await self._consensus.read(self._requests, start, min(READ_REQUESTS, position - start))
            except MissingError:
                # The previous leader truncates only after replying, so truncated requests were answered.
                start = (await self._consensus.log_head(self._requests)).start
                continue
            if not found.records:
                return
            requests = [request for record in found.records if (request := decode_request(record.data)) is not None]
            text = "the leader that executed this request ended; its reply may be lost."
            replies = [_encode(Reply(r.nonce, UNKNOWN, 0, [], text)) for r in requests]
            if replies and not await self._append_replies(replies):
                raise UnavailableError("the previous leader's requests cannot be answered yet.")
            start += len(found.records)

    async def _execute_requests(self) -> None:
        """Execute the requests of one read: admit all in order, then await them, then reply in one append."""
        try:
            found = await self._consensus.read(self._requests, self._position, READ_REQUESTS)
        except MissingError:
            # Another leader executed and truncated them. The check raises if it has superseded this one.
            await self._leader.check_still_leading()
            raise
        started: list[tuple[Request | None, Reply | None, asyncio.Future[int]]] = []
        for record in found.records:
            started.append(await self._admit_request(record))
            self._position = record.position + 1
        replies, settled = [], True
        for request, refused, executed in started:
            reply = refused
            try:
                seqno = await executed
            except UnavailableError as error:
                settled = False
                reply = rejection_reply(request.nonce, error) if request is not None else None
            else:
                if reply is None and request is not None and request.rows:
                    reply = Reply(request.nonce, DONE, seqno)
            if reply is not None:
                replies.append(_encode(reply))
        if not settled:
            # Unavailable means "did not happen", so the next leader must not execute the request either: the position
            # moves past it before the reply is written.
            await self._persist_position()
        for batch in _split_replies(replies):
            await self._append_replies(batch)
        if self._position - self._truncated >= TRUNCATE_AFTER:
            await self._truncate()

    async def _admit_request(self, record: LogRecord) -> tuple[Request | None, Reply | None, asyncio.Future[int]]:
        """Return (request, its rejection, future of the batch that moves the position past it)."""
        own_rows = self._position_row(record.position + 1)
        request = decode_request(record.data)
        writing = self._leader.writing
        late = request is not None and request.has_expired(self._clock.now_ms())
        if request is not None and late:
            _log.warning("rejecting an expired request", log=self._requests, position=record.position)
        if request is not None and not request.rows and not late:
            # Flushed once, and before there is room: without room, the flush's error shows the requester the reason.
            self._flushes.spawn(self._flush(request), name="metastore requested flush")
        while True:
            try:
                if request is None or not request.rows:
                    return request, None, await writing.admit((), {}, own_rows)
                if late:
                    return (
                        request,
                        rejection_reply(request.nonce, _expired_error(request)),
                        await writing.admit((), {}, own_rows),
                    )
                try:
                    return request, None, await writing.admit(request.rows, request.expects, own_rows)
                except (FencedError, UnavailableError, UnknownOutcomeError):
                    raise
                except TidemillError as error:
                    return request, rejection_reply(request.nonce, error), await writing.admit((), {}, own_rows)
            except UnavailableError as error:
                # There is no room. The request was not executed, so it is retried rather than rejected.
                _log.warning("requests wait", log=self._requests, cause=error.message)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _persist_position(self) -> None:
        """Make the position durable, regardless of the outcome of the requests below it."""
        while True:
            try:
                await (await self._leader.writing.admit((), {}, self._position_row(self._position)))
                return
            except UnavailableError:
                await asyncio.sleep(RETRY_PAUSE_S)

    def _position_row(self, position: int) -> list[tuple[bytes, bytes]]:
        return [(POSITION_KEY, encode_position(self._log.state, position))]

    async def _flush(self, request: Request) -> None:
        try:
            # A superseded leader reads requests too, but does not have the new leader's commits.
            await self._leader.check_still_leading()
            reply = Reply(request.nonce, DONE, await self._leader.flush(FLUSH_TIMEOUT_S))
        except TidemillError as error:
            reply = rejection_reply(request.nonce, error)
        try:
            await self._append_replies([_encode(reply)])
        except TidemillError as error:
            _log.warning("cannot reply to a flush request", log=self._replies, cause=error.message)

    async def _append_replies(self, replies: list[bytes]) -> bool:
        """Append replies, in term 0: a durable outcome stays true after this leader's term. Return False if that failed
        repeatedly."""
        for attempt in range(REPLY_ATTEMPTS):
            try:
                head = await append_at_end(self._consensus, self._rand, self._replies, replies, self._replies_at)
                break
            except (UnavailableError, UnknownOutcomeError) as error:
                # A duplicate reply is harmless. Without any reply the requester ends with UnknownOutcomeError.
                _log.warning("cannot reply to requests", log=self._replies, count=len(replies), cause=error.message)
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
        else:
            return False
        self._replies_at = head.next
        if self._replies_at - self._replies_from > 2 * REPLIES_KEPT:
            start = self._replies_at - REPLIES_KEPT
            with contextlib.suppress(
                UnavailableError, UnknownOutcomeError
            ):  # the next reply retries the truncation; requesters must not wait for it
                await self._consensus.truncate(self._replies, start)
                self._replies_from = start
        return True

    async def _truncate(self) -> None:
        await self._consensus.truncate(self._requests, self._position)
        self._truncated = self._position


def _expired_error(request: Request) -> UnavailableError:
    return UnavailableError(
        f"the request expired and will not be executed: expires_ms={request.expires_ms}.",
        fix="Retry; if that fails in the same way, compare the clocks of the machines.",
    )


def _split_replies(replies: list[bytes]) -> Iterator[list[bytes]]:
    """Split replies in order into batches, each as large as one append may be."""
    batch: list[bytes] = []
    size_bytes = 0
    for reply in replies:
        batch.append(reply)
        size_bytes += len(reply)
        if size_bytes >= APPEND_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
