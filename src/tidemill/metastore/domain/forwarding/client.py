"""Requester's side of the request log: send the commits of one process that does not lead, and wait for the replies.

Waiting requests share an append. The invariants are those of `request_log`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.metastore.domain.commit.write_path import checked_size
from tidemill.metastore.domain.forwarding.request_log import (
    APPEND_BYTES,
    RETRY_PAUSE_S,
    Reply,
    Request,
    append_at_end,
    outcome_of_reply,
    replies_log,
    requests_log,
)

_log = structlog.get_logger()

EXPIRES_AFTER_MS = 300_000
"""Expiry of a request. It exceeds every requester's timeout by more than the clocks of one cluster may differ."""

UNSENT_MAX = 10_000
"""Limit of requests of one process that wait to be sent; further ones are rejected immediately."""

BACKLOG_MAX = 10_000
"""Limit of requests that no leader has executed; a requester that finds more adds none."""

APPEND_REQUESTS = 256
WAIT_S = 5.0

UnsentRequest = tuple[bytes, asyncio.Future[int]]

_encode = msgspec.msgpack.Encoder().encode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


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
        """Commit as `Domain.commit`. Raises UnknownOutcomeError if no reply came in time: it may still be executed."""
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
        request = Request(self._rand.nonce(), rows, expects, self._clock.now_ms() + EXPIRES_AFTER_MS)
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
        """Close. Waiting callers get UnknownOutcomeError: a request that was sent may still be executed."""
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
