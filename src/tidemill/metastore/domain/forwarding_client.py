"""Commits from processes that do not lead, through two logs that any process may append to (term 0).

    log metastore/<domain>/requests    [nonce, [[key, value]…], {key: seqno}, expires_ms, hears_unknown]
                                       no rows: a flush
    log metastore/<domain>/replies     [nonce, kind, seqno, [[key, seqno, value]…], text]
                                       kind: 0 done, 1 conflict (rows: seqno −1 = there is none; no rows: too many
                                       to send), 2 invalid, 3 unavailable, 4 unknown

    row 00 "requests"                  [position, seqno_delta, epoch_delta]: the next request to execute, on the
                                       request log that this state's own log stands beside

RQ1  A request is executed at most once: the row with the next position is in the very batch that executes it, or
     in one of its own when it was refused. It is executed once if anybody leads afterwards.
RQ2  A reply is written only when what it says is durable.
RQ3  Requests below the position are truncated. Replies are kept for the newest REPLIES_KEPT.
RQ5  What nobody executed by `expires_ms` (the requester's wall clock) is refused, never executed: whoever was told
     Unknown knows after that time that it did not happen, and no leader of tomorrow does the work of today.
RQ6  A request that left the log's position behind and is still in the log may have no answer: its leader may have
     ended in between. The next leader answers it with Unknown at once; where there was an answer, that one is heard
     first.
RQ4  Nobody needs to trust a requester: what cannot be read is passed over; one that died gets a reply nobody reads.

The two deltas name the log: a domain that was restored into empty consensus has the row of its old life.
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
from tidemill.metastore.domain.write_path import measured
from tidemill.metastore.lsm.read_view import Row

POSITION_KEY = b"\x00requests\x00\x01"
REPLIES_KEPT = 1_000
EXPIRES_AFTER_MS = 300_000
"""Longer than any requester waits, by more than clocks of one cluster may differ."""

UNSENT_MAX = 10_000
"""Requests of one process that wait to be sent; one more is refused at once."""

BACKLOG_MAX = 10_000
"""Requests nobody has executed; a requester that finds so many adds none."""

APPEND_REQUESTS = 256
APPEND_BYTES = 4 * MIB
"""One append takes so many requests or replies at most, the last of them aside."""

CONFLICT_BYTES = 1 * MIB
"""Rows of a conflict beyond this are not sent."""

RETRY_PAUSE_S = 0.05
WAIT_S = 5.0

DONE, CONFLICT, INVALID, UNAVAILABLE, UNKNOWN = range(5)


class Request(msgspec.Struct, frozen=True, array_like=True):
    nonce: str
    rows: list[tuple[bytes, bytes]]
    expects: dict[bytes, int] = {}
    expires_ms: int = 0
    """0: never, as processes of an older version ask."""
    hears_unknown: bool = False
    """A process of an older version would take the reply for a refusal: it gets none, and its time runs out."""

    def expired(self, now_ms: int) -> bool:
        return 0 < self.expires_ms < now_ms


class Reply(msgspec.Struct, frozen=True, array_like=True):
    nonce: str
    kind: int
    seqno: int = 0
    rows: list[tuple[bytes, int, bytes]] = []
    text: str = ""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Value of the row at POSITION_KEY."""

    position: int
    seqno_delta: int
    epoch_delta: int


_log = structlog.get_logger()

Unsent = tuple[bytes, asyncio.Future[int]]

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_decode_place = msgspec.msgpack.Decoder(Place).decode


def requests_log(domain: str) -> str:
    return f"metastore/{domain}/requests"


def replies_log(domain: str) -> str:
    return f"metastore/{domain}/replies"


def encode_place(state: DomainState, position: int) -> bytes:
    return _encode(Place(position, state.seqno_delta, state.epoch_delta))


def decode_place(state: DomainState, value: bytes | None) -> int:
    """The next request to execute; 0 when nothing was ever executed from this log."""
    if value is None:
        return 0
    try:
        place: Place = _decode_place(value)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"The position of requests cannot be read: value={value.hex()}.") from error
    same_log = (place.seqno_delta, place.epoch_delta) == (state.seqno_delta, state.epoch_delta)
    return place.position if same_log else 0


def decode_request(data: bytes) -> Request | None:
    """None for what is no request (RQ4)."""
    try:
        request: Request = _decode_request(data)
        return request
    except msgspec.MsgspecError:
        return None


def refusal(nonce: str, error: TidemillError) -> Reply:
    """What a requester is told of a commit that certainly did not happen."""
    if isinstance(error, ConflictError) and isinstance(error.current, Mapping):
        rows = [
            (key, row.seqno if row is not None else -1, row.value if row is not None else b"")
            for key, row in error.current.items()
        ]
        if sum(len(key) + len(value) for key, _, value in rows) > CONFLICT_BYTES:
            rows = []
        return Reply(nonce, CONFLICT, 0, rows, error.message)
    return Reply(nonce, INVALID if isinstance(error, InvalidError) else UNAVAILABLE, 0, [], error.message)


def outcome(reply: Reply) -> int | TidemillError:
    if reply.kind == DONE:
        return reply.seqno
    if reply.kind == CONFLICT:
        current = {key: None if seqno < 0 else Row(seqno, value) for key, seqno, value in reply.rows}
        return ConflictError(reply.text, current=current or None, fix="Read again and decide anew.")
    if reply.kind == UNKNOWN:
        return UnknownOutcomeError(reply.text, fix="Read the rows to see whether it was done.")
    return InvalidError(reply.text) if reply.kind == INVALID else UnavailableError(reply.text, fix="Retry.")


async def append_as_equal(consensus: Consensus, rand: Rand, log: str, records: Sequence[bytes], at: int) -> LogHead:
    """Append wherever the log ends, `at` being a guess; the head's `next` is where the records end.

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
                # Truncated over the answer, or nobody to ask: it may have happened.
                raise unknown from error
            if landed:
                return LogHead(0, at, at + len(records))


class Requester:
    """One process's requests to one domain. `commit` is what callers wait in."""

    def __init__(self, consensus: Consensus, clock: Clock, rand: Rand, domain: str, timeout_s: float) -> None:
        self._consensus = consensus
        self._clock = clock
        self._rand = rand
        self._requests = requests_log(domain)
        self._replies = replies_log(domain)
        self._timeout_s = timeout_s
        self._unsent: list[Unsent] = []
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._sending = False
        self._listening = False
        self._heard = 0  # the next reply to read
        self._guess = 0
        self._backlog = 0  # requests nobody had executed, when last seen
        self._closed: TidemillError | None = None
        self._tasks = Tasks(self._task_failed)

    @property
    def waiting(self) -> bool:
        """Does anybody wait for an answer?"""
        return bool(self._waiting)

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], expects: Mapping[bytes, int]) -> int:
        """As `Domain.commit`. Unknown when no answer came in time: it may still be executed."""
        measured(rows)
        return await self._ask(list(rows), dict(expects), self._timeout_s)

    async def flush(self, timeout_s: float | None) -> int:
        return await self._ask([], {}, self._timeout_s if timeout_s is None else timeout_s)

    async def _ask(self, rows: list[tuple[bytes, bytes]], expects: dict[bytes, int], timeout_s: float) -> int:
        if self._closed is not None:
            raise self._closed
        if len(self._unsent) >= UNSENT_MAX:
            raise UnavailableError(
                f"Too many requests wait to be sent: log={self._requests!r} count={len(self._unsent)}.",
                fix="Look at the consensus database.",
            )
        request = Request(self._rand.nonce(), rows, expects, self._clock.now_ms() + EXPIRES_AFTER_MS, True)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[request.nonce] = future
        self._unsent.append((_encode(request), future))
        if not self._sending:
            self._sending = True
            self._tasks.spawn(self._send(), name=f"requests {self._requests}")
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            if not _withdrawn(self._unsent, future):
                raise UnknownOutcomeError(
                    f"No leader answered in time: log={self._requests!r} timeout_s={timeout_s}.",
                    fix="Read the rows to see whether it was done; it may still be.",
                ) from error
            raise UnavailableError(
                f"The request could not be sent in time: log={self._requests!r} timeout_s={timeout_s}.",
                fix="Look at the consensus database.",
            ) from error
        finally:
            self._waiting.pop(request.nonce, None)

    # sending ------------------------------------------------------------------------------------

    async def _send(self) -> None:
        """Everything unsent, in order, as many requests as wait in one append."""
        try:
            while self._unsent:
                if not self._listening and not await self._begin_to_listen():
                    continue
                if self._backlog > BACKLOG_MAX and not await self._worked_off():
                    continue
                await self._send_batch(self._take_batch())
        finally:
            self._sending = False

    def _take_batch(self) -> list[Unsent]:
        batch: list[Unsent] = []
        size_bytes = 0
        while self._unsent and len(batch) < APPEND_REQUESTS and size_bytes < APPEND_BYTES:
            record, future = self._unsent.pop(0)
            if not future.done():
                batch.append((record, future))
                size_bytes += len(record)
        return batch

    async def _send_batch(self, batch: list[Unsent]) -> None:
        if not batch:
            return
        try:
            head = await append_as_equal(
                self._consensus, self._rand, self._requests, [record for record, _ in batch], self._guess
            )
        except TidemillError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self._guess, self._backlog = head.next, head.next - head.start

    async def _begin_to_listen(self) -> bool:
        """Know where the replies end before the first request is sent. False when nobody could be asked."""
        try:
            self._heard = (await self._consensus.log_head(self._replies)).next
        except TidemillError as error:
            self._fail_unsent(error)
            return False
        if not await self._worked_off():
            return False
        self._listening = True
        self._tasks.spawn(self._listen(), name=f"replies {self._replies}")
        return True

    async def _worked_off(self) -> bool:
        """Is there somebody who executes requests, or at least a bound to those who wait for one?"""
        try:
            requests = await self._consensus.log_head(self._requests)
        except TidemillError as error:
            self._fail_unsent(error)
            return False
        self._guess, self._backlog = requests.next, requests.next - requests.start
        if self._backlog > BACKLOG_MAX:
            self._fail_unsent(
                UnavailableError(
                    f"Too many requests wait for a leader: count={self._backlog}.",
                    fix="Start a node, so that somebody leads the metastore.",
                )
            )
        return self._backlog <= BACKLOG_MAX

    def _fail_unsent(self, error: TidemillError) -> None:
        unsent, self._unsent = self._unsent, []
        for _, future in unsent:
            if not future.done():
                future.set_exception(error)

    # listening ----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Until nobody waits any more."""
        try:
            while self._waiting:
                try:
                    try:
                        if await self._consensus.wait(self._replies, self._heard, WAIT_S):
                            await self._hear()
                    except MissingError:
                        # Truncated before we read it: whose reply that was finds no answer in time.
                        self._heard = (await self._consensus.log_head(self._replies)).start
                except (UnavailableError, UnknownOutcomeError):
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self._listening = False

    async def _hear(self) -> None:
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
            result = outcome(reply)
            if isinstance(result, TidemillError):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Sending or listening met what nobody foresaw: all of this moment hear of it, the next request begins anew."""
        _log.error("requests broke", task=name, exc_info=error)
        self._fail_unsent(
            UnavailableError(f"The request could not be sent: task={name!r} reason={error!r}.", fix="Retry.")
        )
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(UnknownOutcomeError(f"The answer was not heard: task={name!r} reason={error!r}."))

    async def aclose(self) -> None:
        """Those who wait hear Unknown: what was sent may still be done."""
        self._closed = ClosedError(f"The domain was closed: log={self._requests!r}.")
        await self._tasks.aclose()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(
                    UnknownOutcomeError(f"The domain was closed before an answer came: log={self._requests!r}.")
                )


def _withdrawn(unsent: list[Unsent], future: asyncio.Future[int]) -> bool:
    """Take a request back that was never handed to an append."""
    for index, (_, other) in enumerate(unsent):
        if other is future:
            del unsent[index]
            return True
    return False
