"""Retries, limited concurrency and metrics around any object store.

- Concurrency: at most `concurrency` requests of the inner store run at the same time. Reads and deletes leave a quarter
  of them free, so that a producer's put does not wait behind the thousands of objects that a reader requests.
- UnavailableError is retried with jittered backoff until the time budget of the call is spent.
- MissingError of a read is final only if a HEAD request confirms it: a gateway may lack an object for a moment.
- InvalidError of a read is retried as UnavailableError, since a gateway may reject a valid request for a moment. It is
  final if the key is invalid, or the range is beyond the object.
- UnknownOutcomeError: a put with this outcome is repeated. That is safe however late the lost
  request arrives, because it carries the same bytes under the same nonce to the same write-once key. If the store
  stores nonces, the object is read back first: our object is success, another's is ConflictError. In other stores that
  proves too little: in a directory an object can be visible that power loss would still remove. Only another attempt,
  which loses but first syncs the entry, is proof.
- ConflictError: if an attempt of ours may have landed, a ConflictError is resolved by reading back, so our own success
  is never reported as ConflictError. If the object was deleted in between (by age, as an orphan), the outcome stays
  unknown. If the store stores nonces, a ConflictError of the first attempt is resolved as well: a gateway
  may repeat a create on its own.

Our own object is identified by nonce if the store stores one (`NonceStore`), otherwise by comparing bytes. Two
writers of equal bytes to one key may then both get success, which changes nothing durable.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ConflictError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
    to_unavailable,
)
from tidemill.base.limits import OBJECT_CONCURRENCY, OBJECT_RETRY_BUDGET_S
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects import metrics
from tidemill.objects.health import AttemptKind, StoreHealth
from tidemill.objects.metrics import Operation
from tidemill.objects.reads import RangeRequest, plan_reads, split_response
from tidemill.objects.store import (
    Buffer,
    MisconfiguredError,
    ObjectMeta,
    ObjectStore,
    RangeError,
    as_buffers,
    check_key,
    check_prefix,
    size_of,
)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
PUT_RESERVE_DIVISOR = 4
PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0
"""Time after which an unanswered probe is cancelled and counts as evidence."""

log = structlog.get_logger()

T = TypeVar("T")
Pieces = list[bytes]  # Inside the class, `list` is the method.
Create = Callable[[str, Buffer | Sequence[Buffer]], Awaitable[None]]


@runtime_checkable
class NonceStore(Protocol):
    """A store that stores the nonce of the attempt that created an object."""

    async def put_with_nonce(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> None: ...

    async def nonce_of(self, key: str) -> str | None: ...


class RetryingObjects:
    """Retrying wrapper of a store that was opened successfully. So later errors of permissions, credentials or a
    read-only disk are retriable (UnavailableError, with their fix) instead of fatal (InvalidError).

    `coalesce`: split `get_ranges` into merged requests here (remote stores), otherwise pass it through.
    """

    def __init__(
        self,
        inner: ObjectStore,
        clock: Clock,
        rand: Rand,
        *,
        store: str,
        concurrency: int = OBJECT_CONCURRENCY,
        budget_s: float = OBJECT_RETRY_BUDGET_S,
        coalesce: bool = False,
    ) -> None:
        self._inner = inner
        self._nonced = inner if isinstance(inner, NonceStore) else None
        self._clock = clock
        self._rand = rand
        self._label = store
        self._slots = asyncio.Semaphore(concurrency)
        self._not_puts = asyncio.Semaphore(concurrency - concurrency // PUT_RESERVE_DIVISOR)
        """Acquired before a slot by all calls except puts."""
        self._budget_s = budget_s
        self._coalesce = coalesce
        self._health = StoreHealth(clock)
        self._probe: tuple[str, str] | None = None
        """Key and nonce of a probe that may exist."""
        self.may_delete: Callable[[], Awaitable[None]] | None = None
        """Called before each delete; raises if this process may not delete objects (any more)."""
        self._meters = {operation: metrics.OperationMeter(store, operation, clock) for operation in metrics.OPERATIONS}

    @property
    def inner(self) -> ObjectStore:
        return self._inner

    def trouble(self) -> str:
        """Return in one sentence what does not work now, or "" while the store answers and accepts writes.

        Never waits.
        """
        return self._health.trouble()

    def recent_fault(self) -> str:
        """Return in one sentence what failed recently although the store works. Never waits."""
        return self._health.recent_fault()

    def record_notice(self, what: str) -> None:
        """Record in one sentence a fault that a reader found, although the store works."""
        self._health.record_notice(f"{what.removesuffix('.')} store={self._label}.")

    async def probe_while_suspected(self) -> None:
        """Probe forever: if writes or reads failed or are unanswered, and none has succeeded since, send a request.

        So trouble ends when its cause does, and a request that fails for an individual reason (its size, its key) is no
        trouble. It costs nothing while the store is healthy.
        """
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self._probe_once()
            except (TidemillError, TimeoutError) as error:
                log.debug("the store is still in trouble", store=self._label, cause=str(error))

    async def _probe_once(self) -> None:
        """Try one write and one read, without retries: the next round is the retry.

        A probe that may have landed is repeated under its key, so that at most one is left over.
        """
        if self._health.is_suspected("write"):
            self._probe = self._probe or (f"probe/{self._rand.nonce()}", self._rand.nonce())
            key, nonce = self._probe
            with contextlib.suppress(ConflictError):
                await self._run_attempt("write", lambda: self._attempt_put(key, b"probe", nonce, self._inner.put))
        elif self._probe is not None:
            await self.delete(self._probe[0])
            self._probe = None
        if self._health.is_suspected("read"):
            await self._run_attempt("read", lambda: self._inner.head("probe/none"))

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self._meters["put"].measure(lambda: self._put(key, data, self._inner.put), lambda _: size_of(data))

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self._meters["put"].measure(
            lambda: self._put(key, data, self._inner.put_unpublished), lambda _: size_of(data)
        )

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        return await self._meters["get"].measure(
            lambda: self._run_with_retries("get", lambda: self._read(key, self._inner.get(key, start, end))), len
        )

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        check_key(key)
        return await self._meters["get_ranges"].measure(
            lambda: self._get_ranges(key, ranges), lambda found: sum(map(len, found))
        )

    async def head(self, key: str) -> ObjectMeta | None:
        check_key(key)
        return await self._meters["head"].measure(
            lambda: self._run_with_retries("head", lambda: _accepted(self._inner.head(key)))
        )

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        """List objects; retries continue after the last object yielded.

        Entries that are not after it are skipped: each object is listed once although a store repeats a page.

        Waiting for a page does not count for `concurrency`.
        """
        check_prefix(prefix)
        retry = _Retry(self._clock, self._rand, self._budget_s)
        meter = self._meters["list"]
        number = 0
        while True:
            try:
                number = self._health.begin_attempt("read")
                async for meta in self._inner.list(prefix, start_after):
                    if meta.key <= start_after:
                        self.record_notice(f"the object store lists keys repeatedly or out of order: key={meta.key}")
                        continue
                    start_after = meta.key
                    self._health.end_attempt(number, "read", None)
                    number = 0  # The caller may stop here.
                    yield meta
                    retry = _Retry(self._clock, self._rand, self._budget_s)
                    number = self._health.begin_attempt("read")
                meter.count_outcome("ok")
                self._health.end_attempt(number, "read", None)
                return
            except (UnavailableError, InvalidError) as error:
                failure = to_unavailable(error)
                self._health.end_attempt(number, "read", failure)
                if not await retry.wait_before_retry():
                    meter.count_outcome("unavailable")
                    raise failure from error
                meter.retries.inc()
            except BaseException as error:  # Cancelled or closed: the request is no longer in flight.
                if number:
                    self._health.end_attempt(number, "read", error)
                raise

    async def delete(self, key: str) -> None:
        if self.may_delete is not None:
            await self.may_delete()
        # Unknown is retried too: deleting twice is harmless.
        await self._meters["delete"].measure(
            lambda: self._run_with_retries(
                "delete", lambda: self._inner.delete(key), (UnavailableError, UnknownOutcomeError)
            ),
        )

    async def aclose(self) -> None:
        await self._inner.aclose()

    # ---------------------------------------------------------------------------------------------

    async def _put(self, key: str, data: Buffer | Sequence[Buffer], create: Create) -> None:
        retry = _Retry(self._clock, self._rand, self._budget_s)
        nonce = self._rand.nonce()
        unsettled: UnknownOutcomeError | None = None
        while True:
            try:
                await self._run_attempt("write", lambda: self._attempt_put(key, data, nonce, create))
                return
            except ConflictError as refused:
                if unsettled is None and self._nonced is None:
                    raise
                ours = await self._is_ours(key, data, nonce, retry)
                if ours:
                    if unsettled is None:
                        self._health.record_notice(
                            f"the object store rejected a create that it had done: {refused.message}"
                        )
                    return
                if ours is None and unsettled is None:
                    raise  # It was another writer's, and has been deleted since.
                if ours is None:
                    raise UnknownOutcomeError(
                        f"the object existed, but was deleted before it could be read back: key={key}.",
                        fix="Write under another key.",
                    ) from unsettled
                raise
            except UnknownOutcomeError as error:
                unsettled = error
                failure: TidemillError = error
            except UnavailableError as error:
                failure = error
            if unsettled is not None and self._nonced is not None:
                ours = await self._is_ours(key, data, nonce, retry)
                if ours is not None:
                    if ours:
                        return
                    raise ConflictError(f"the object already exists: key={key}.") from failure
            if not await retry.wait_before_retry():
                raise unsettled or failure
            self._meters["put"].retries.inc()

    async def _attempt_put(self, key: str, data: Buffer | Sequence[Buffer], nonce: str, create: Create) -> None:
        if self._nonced is not None:
            await self._nonced.put_with_nonce(key, data, nonce)
        else:
            await create(key, data)

    async def _is_ours(self, key: str, data: Buffer | Sequence[Buffer], nonce: str, retry: _Retry) -> bool | None:
        """Return whether this put created the object (True), another one did (False), or it does not exist (None).

        If reading back fails or is rejected for the whole budget, the outcome of the put stays unknown.
        """
        while True:
            try:
                ours = await self._run_attempt("read", lambda: self._compare_stored(key, data, nonce))
                break
            except (UnavailableError, InvalidError) as error:
                # InvalidError too: a rejected read proves nothing about the put.
                if not await retry.wait_before_retry():
                    raise UnknownOutcomeError(
                        f"the object may have been written, but cannot be read back: key={key}.",
                        fix="Read the key before writing it again.",
                    ) from error
        found = "absent" if ours is None else "ours" if ours else "other"
        metrics.RESOLVED.labels(self._label, found).inc()
        return ours

    async def _compare_stored(self, key: str, data: Buffer | Sequence[Buffer], nonce: str) -> bool | None:
        if self._nonced is not None:
            theirs = await self._nonced.nonce_of(key)
            if theirs is None:
                return None
            if theirs:
                return theirs == nonce
        found = await self._inner.head(key)
        if found is None:
            return None
        if found.size_bytes != size_of(data):
            return False
        try:
            return await self._inner.get(key) == b"".join(as_buffers(data))
        except MissingError:
            return None

    async def _get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Pieces:
        if not self._coalesce or len(ranges) < 2 or any(not 0 <= start <= end for start, end in ranges):
            return await self._run_with_retries(
                "get_ranges", lambda: self._read(key, self._inner.get_ranges(key, ranges))
            )
        into = [b""] * len(ranges)

        async def fetch(request: RangeRequest) -> None:
            data = await self._run_with_retries(
                "get_ranges", lambda: self._read(key, self._inner.get(key, request.start, request.end))
            )
            split_response(request, data, into)

        # gather raises the first failure; leaving the group then cancels the requests still in flight.
        async with Tasks(on_failure=lambda name, error: None) as tasks:
            await asyncio.gather(*(tasks.spawn(fetch(request), name=f"read {key}") for request in plan_reads(ranges)))
        return into

    async def _read(self, key: str, answer: Awaitable[T]) -> T:
        """Await an answer to a read. Raises MissingError only if a second request does not find the object either."""
        try:
            return await _accepted(answer)
        except MissingError as missing:
            found = await _accepted(self._inner.head(key))
            if found is None:
                raise
            raise UnavailableError(
                f"the object store answered a read of an existing object with 'not found': key={key}."
            ) from missing

    async def _run_with_retries(
        self,
        operation: Operation,
        call: Callable[[], Awaitable[T]],
        kinds: tuple[type[TidemillError], ...] = (UnavailableError,),
    ) -> T:
        retry: _Retry | None = None
        while True:
            try:
                async with self._not_puts:
                    return await self._run_attempt("delete" if operation == "delete" else "read", call)
            except kinds:
                retry = retry or _Retry(self._clock, self._rand, self._budget_s)
                if not await retry.wait_before_retry():
                    raise
                self._meters[operation].retries.inc()

    async def _run_attempt(self, kind: AttemptKind, call: Callable[[], Awaitable[T]]) -> T:
        """Make one attempt within the concurrency limit, and record its result in the store's health."""
        health = self._health
        async with self._slots:
            number = health.begin_attempt(kind)
            failure: BaseException | None = None
            try:
                return await call()
            except MisconfiguredError as error:
                failure = outcome = to_unavailable(error)
                raise outcome from error
            except BaseException as error:
                failure = error
                raise
            finally:
                health.end_attempt(number, kind, failure)


async def _accepted(answer: Awaitable[T]) -> T:
    """Await an answer to a read. Raises UnavailableError if the store rejected the request."""
    try:
        return await answer
    except (MissingError, RangeError):
        raise
    except InvalidError as rejected:
        raise to_unavailable(rejected) from rejected


class _Retry:
    """Backoff of one call: full jitter, doubling up to a limit, until the budget is spent."""

    def __init__(self, clock: Clock, rand: Rand, budget_s: float) -> None:
        self._clock = clock
        self._rand = rand
        self._deadline_s = clock.monotonic_s() + budget_s
        self._ceiling_s = BACKOFF_FIRST_S

    async def wait_before_retry(self) -> bool:
        """Wait before the next attempt; return False if the budget does not last that long."""
        pause_s = self._rand.uniform(self._ceiling_s / 2, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2, BACKOFF_MAX_S)
        if self._clock.monotonic_s() + pause_s > self._deadline_s:
            return False
        await asyncio.sleep(pause_s)
        return True
