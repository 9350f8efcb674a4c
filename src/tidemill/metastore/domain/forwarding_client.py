"""Commits of processes that do not lead, through two logs that any process may append to (term 0).

    log metastore/<domain>/requests    [nonce, [[key, value]…], {key: seqno}, expires_ms, hears_unknown]
                                       no rows: a flush
    log metastore/<domain>/replies     [nonce, kind, seqno, [[key, seqno, value]…], text]
                                       kind: 0 done, 1 conflict (rows: seqno −1 = no such row; no rows: too many
                                       to send), 2 invalid, 3 unavailable, 4 unknown

    row 00 "requests"                  [position, seqno_delta, epoch_delta]: the next request to execute, in the
                                       request log that accompanies the log with these deltas

- Invariant (at most once): a request is executed at most once. The row with the next position is written in the same
  batch that executes it, or in a separate batch if it was rejected. It is executed unless it expires
  before a leader exists.
- Invariant (durable replies): a reply is written only when the outcome that it reports is durable.
- Invariant (expiry): a request that was not executed by `expires_ms` (the requester's wall clock) is rejected, never
  executed. So a requester that got Unknown knows after that time that it did not happen, and no later leader executes
  old requests.
- Invariant (unanswered requests): a request below the position that is still in the log may have no reply, since its
  leader may have ended in between. The next leader immediately replies Unknown; an earlier reply is read first.
- Untrusted requesters: undecodable requests are skipped; a requester that died gets a reply that no process reads.
- Requests below the position are truncated. The newest REPLIES_KEPT replies are retained.

The two deltas identify the log: a domain that was restored into empty consensus has a position row of its former log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import MIB
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, LogHead, resolve_append
from tidemill.metastore.domain.state import DomainState
from tidemill.metastore.domain.write_path import checked_size
from tidemill.metastore.lsm.read_view import Row

POSITION_KEY = b"\x00requests\x00\x01"
REPLIES_KEPT = 1_000
EXPIRES_AFTER_MS = 300_000
"""Expiry of a request. It exceeds every requester's timeout by more than the clocks of one cluster may differ."""

UNSENT_MAX = 10_000
"""Limit of requests of one process that wait to be sent; further ones are rejected immediately."""

BACKLOG_MAX = 10_000
"""Limit of requests that no leader has executed; a requester that finds more adds none."""

APPEND_REQUESTS = 256
APPEND_BYTES = 4 * MIB
"""Limit of requests or replies in one append. The last one may exceed it."""

CONFLICT_BYTES = 1 * MIB
"""Limit of the rows sent with a conflict; beyond it none are sent."""

RETRY_PAUSE_S = 0.05
WAIT_S = 5.0

DONE, CONFLICT, INVALID, UNAVAILABLE, UNKNOWN = range(5)


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Request to the leader: a commit, or a flush if it has no rows."""

    nonce: str
    rows: list[tuple[bytes, bytes]]
    expects: dict[bytes, int] = {}
    expires_ms: int = 0
    """0: never, for requests of an older version."""
    hears_unknown: bool = False
    """False for a process of an older version, which would misread the Unknown reply as a rejection. It gets no reply
    and times out."""

    def has_expired(self, now_ms: int) -> bool:
        return 0 < self.expires_ms < now_ms


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to one request, identified by its nonce."""

    nonce: str
    kind: int
    seqno: int = 0
    rows: list[tuple[bytes, int, bytes]] = []
    text: str = ""


class RequestPosition(msgspec.Struct, frozen=True, array_like=True):
    """Value of the row at POSITION_KEY."""

    position: int
    seqno_delta: int
    epoch_delta: int


_log = structlog.get_logger()

UnsentRequest = tuple[bytes, asyncio.Future[int]]

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_decode_position = msgspec.msgpack.Decoder(RequestPosition).decode


def requests_log(domain: str) -> str:
    return f"metastore/{domain}/requests"


def replies_log(domain: str) -> str:
    return f"metastore/{domain}/replies"


def encode_position(state: DomainState, position: int) -> bytes:
    return _encode(RequestPosition(position, state.seqno_delta, state.epoch_delta))


def decode_position(state: DomainState, value: bytes | None) -> int:
    """Return the position of the next request to execute; 0 if none was ever executed from this log."""
    if value is None:
        return 0
    try:
        place: RequestPosition = _decode_position(value)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the position of requests cannot be read: value={value.hex()}.") from error
    same_log = (place.seqno_delta, place.epoch_delta) == (state.seqno_delta, state.epoch_delta)
    return place.position if same_log else 0


def decode_request(data: bytes) -> Request | None:
    """Decode a request; None if the bytes are not a request."""
    try:
        request: Request = _decode_request(data)
        return request
    except msgspec.MsgspecError:
        return None


def rejection_reply(nonce: str, error: TidemillError) -> Reply:
    """Return the reply for a commit that certainly did not happen."""
    if isinstance(error, ConflictError) and isinstance(error.current, Mapping):
        rows = [
            (key, row.seqno if row is not None else -1, row.value if row is not None else b"")
            for key, row in error.current.items()
        ]
        if sum(len(key) + len(value) for key, _, value in rows) > CONFLICT_BYTES:
            rows = []
        return Reply(nonce, CONFLICT, 0, rows, error.message)
    return Reply(nonce, INVALID if isinstance(error, InvalidError) else UNAVAILABLE, 0, [], error.message)


def outcome_of_reply(reply: Reply) -> int | TidemillError:
    if reply.kind == DONE:
        return reply.seqno
    if reply.kind == CONFLICT:
        current = {key: None if seqno < 0 else Row(seqno, value) for key, seqno, value in reply.rows}
        return ConflictError(reply.text, current=current or None, fix="Read again and retry.")
    if reply.kind == UNKNOWN:
        return UnknownOutcomeError(reply.text, fix="Read the rows to see whether it was done.")
    return InvalidError(reply.text) if reply.kind == INVALID else UnavailableError(reply.text, fix="Retry.")


async def append_at_end(consensus: Consensus, rand: Rand, log: str, records: Sequence[bytes], at: int) -> LogHead:
    """Append at the log's end, `at` being a guess of it; return the head, whose `next` is where the records end.

    Raises UnavailableError (it did not happen), UnknownOutcomeError.
    """
    while True:
        nonce = rand.nonce()
        try:
            return await consensus.append(log, 0, at, records, nonce)
        except ConflictError as lost:
            at = lost.current.next if isinstance(lost.current, LogHead) else (await consensus.log_head(log)).next
        except UnknownOutcomeError as unknown:
            try:
                landed = await resolve_append(consensus, log, at, nonce)
            except (MissingError, UnavailableError) as error:
                # The log was truncated beyond the append, or consensus is unavailable: it may have happened.
                raise unknown from error
            if landed:
                return LogHead(0, at, at + len(records))


class ForwardingClient:
    """Requests of one process to one domain. Callers wait in `commit`."""

    def __init__(self, consensus: Consensus, clock: Clock, rand: Rand, domain: str, timeout_s: float) -> None:
        self._consensus = consensus
        self._clock = clock
        self._rand = rand
        self._requests = requests_log(domain)
        self._replies = replies_log(domain)
        self._timeout_s = timeout_s
        self._unsent: list[UnsentRequest] = []
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._sending = False
        self._listening = False
        self._heard = 0  # position of the next reply to read
        self._guess = 0
        self._backlog = 0  # number of requests that no leader had executed, when last checked
        self._closed: TidemillError | None = None
        self._tasks = Tasks(self._task_failed)

    @property
    def has_waiting_callers(self) -> bool:
        """True if a caller waits for a reply."""
        return bool(self._waiting)

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], expects: Mapping[bytes, int]) -> int:
        """Commit as `Domain.commit`. Raises Unknown if no reply came in time: it may still be executed."""
        checked_size(rows)
        return await self._send_and_wait(list(rows), dict(expects), self._timeout_s)

    async def flush(self, timeout_s: float | None) -> int:
        return await self._send_and_wait([], {}, self._timeout_s if timeout_s is None else timeout_s)

    async def _send_and_wait(self, rows: list[tuple[bytes, bytes]], expects: dict[bytes, int], timeout_s: float) -> int:
        if self._closed is not None:
            raise self._closed
        if len(self._unsent) >= UNSENT_MAX:
            raise UnavailableError(
                f"too many requests wait to be sent: log={self._requests!r} count={len(self._unsent)}.",
                fix="Check the consensus database.",
            )
        request = Request(self._rand.nonce(), rows, expects, self._clock.now_ms() + EXPIRES_AFTER_MS, True)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request.nonce] = future
        self._unsent.append((_encode(request), future))
        if not self._sending:
            self._sending = True
            self._tasks.spawn(self._send_unsent(), name=f"requests {self._requests}")
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            if not _withdraw(self._unsent, future):
                raise UnknownOutcomeError(
                    f"no leader answered in time: log={self._requests!r} timeout_s={timeout_s}.",
                    fix="Read the rows to see whether it was done; it may still be executed.",
                ) from error
            raise UnavailableError(
                f"the request could not be sent in time: log={self._requests!r} timeout_s={timeout_s}.",
                fix="Check the consensus database.",
            ) from error
        finally:
            self._waiting.pop(request.nonce, None)

    # sending ------------------------------------------------------------------------------------

    async def _send_unsent(self) -> None:
        """Send everything unsent, in order, with all waiting requests that fit in one append."""
        try:
            while self._unsent:
                if not self._listening and not await self._start_listening():
                    continue
                if self._backlog > BACKLOG_MAX and not await self._check_backlog():
                    continue
                await self._send_batch(self._next_batch())
        finally:
            self._sending = False

    def _next_batch(self) -> list[UnsentRequest]:
        batch: list[UnsentRequest] = []
        size_bytes = 0
        while self._unsent and len(batch) < APPEND_REQUESTS and size_bytes < APPEND_BYTES:
            record, future = self._unsent.pop(0)
            if not future.done():
                batch.append((record, future))
                size_bytes += len(record)
        return batch

    async def _send_batch(self, batch: list[UnsentRequest]) -> None:
        if not batch:
            return
        try:
            head = await append_at_end(
                self._consensus, self._rand, self._requests, [record for record, _ in batch], self._guess
            )
        except TidemillError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self._guess, self._backlog = head.next, head.next - head.start

    async def _start_listening(self) -> bool:
        """Find the end of the replies before the first request is sent. Return False if consensus is unavailable."""
        try:
            self._heard = (await self._consensus.log_head(self._replies)).next
        except TidemillError as error:
            self._fail_unsent(error)
            return False
        if not await self._check_backlog():
            return False
        self._listening = True
        self._tasks.spawn(self._read_replies(), name=f"replies {self._replies}")
        return True

    async def _check_backlog(self) -> bool:
        """Return whether the backlog is within its limit; otherwise fail all unsent requests."""
        try:
            requests = await self._consensus.log_head(self._requests)
        except TidemillError as error:
            self._fail_unsent(error)
            return False
        self._guess, self._backlog = requests.next, requests.next - requests.start
        if self._backlog > BACKLOG_MAX:
            self._fail_unsent(
                UnavailableError(
                    f"too many requests wait for a leader: count={self._backlog}.",
                    fix="Start a node, so that the metastore has a leader.",
                )
            )
        return self._backlog <= BACKLOG_MAX

    def _fail_unsent(self, error: TidemillError) -> None:
        unsent, self._unsent = self._unsent, []
        for _, future in unsent:
            if not future.done():
                future.set_exception(error)

    # listening ----------------------------------------------------------------------------------

    async def _read_replies(self) -> None:
        """Read replies until no caller waits any more."""
        try:
            while self._waiting:
                try:
                    try:
                        if await self._consensus.wait(self._replies, self._heard, WAIT_S):
                            await self._deliver_replies()
                    except MissingError:
                        # Truncated before this process read it: the request that it answered will time out.
                        self._heard = (await self._consensus.log_head(self._replies)).start
                except (UnavailableError, UnknownOutcomeError):
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self._listening = False

    async def _deliver_replies(self) -> None:
        found = await self._consensus.read(self._replies, self._heard)
        for record in found.records:
            self._heard = record.position + 1
            try:
                reply: Reply = _decode_reply(record.data)
            except msgspec.MsgspecError:
                continue
            future = self._waiting.get(reply.nonce)
            if future is None or future.done():
                continue
            result = outcome_of_reply(reply)
            if isinstance(result, TidemillError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Fail all present requests after an unexpected error of sending or listening. The next request restarts
        both."""
        _log.error("request task failed", task=name, exc_info=error)
        self._fail_unsent(
            UnavailableError(f"the request could not be sent: task={name!r} reason={error!r}.", fix="Retry.")
        )
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(UnknownOutcomeError(f"the reply was not read: task={name!r} reason={error!r}."))

    async def aclose(self) -> None:
        """Close. Waiting callers get Unknown: a request that was sent may still be executed."""
        self._closed = ClosedError(f"the domain is closed: log={self._requests!r}.")
        await self._tasks.aclose()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    UnknownOutcomeError(f"the domain was closed before a reply came: log={self._requests!r}.")
                )


def _withdraw(unsent: list[UnsentRequest], future: asyncio.Future[int]) -> bool:
    """Withdraw a request that was never passed to an append; return whether that was possible."""
    for index, (_, other) in enumerate(unsent):
        if other is future:
            del unsent[index]
            return True
    return False
