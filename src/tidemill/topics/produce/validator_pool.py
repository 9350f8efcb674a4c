"""Validate produced batches: in the plain call if that is cheap, otherwise in a thread, so that no batch blocks the
event loop. Two threads bound the decompressed bytes to twice DECOMPRESSED_BYTES. If the topic's config names a codec,
batches are also recompressed here.

Invariant (fairness): senders take turns. A sender of thousands of expensive batches delays each other sender by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from tidemill.base.errors import ClosedError, TidemillError, UnavailableError
from tidemill.objects.store import Buffer
from tidemill.topics.batch.encode import recompress_batch
from tidemill.topics.batch.header import BatchHeader
from tidemill.topics.batch.validation import check_records
from tidemill.topics.config.configs import AS_SENT

THREADS = 2

INLINE_RECORDS = 4096
"""Limit of records that are validated inline: about 1 ms of the loop, 5 ms if a malformed record must be located."""

INLINE_BYTES = 2 << 20
"""Limit of bytes that are validated inline: 0.1 ms of checksum."""

T = TypeVar("T")


class ValidatedBatch(NamedTuple):
    """A batch that may be stored.

    max_timestamp_ms: the greatest of its records. rewritten: the bytes to store instead of those received, or None.
    """

    max_timestamp_ms: int
    rewritten: bytearray | None = None


ValidationCallback = Callable[[ValidatedBatch | TidemillError], None]
"""Called once, on the event loop, with a valid batch or the error that rejects it."""

log = structlog.get_logger()


class BatchValidator:
    """Validation threads of one process. `close` waits for nothing: a batch that was not validated is not stored."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tidemill-batch")
        self._waiting: dict[Hashable, deque[_Job]] = {}
        """Sender to its jobs, oldest first. The sender whose turn it is comes first."""
        self._running = 0
        self._closed = False

    def validate(
        self,
        header: BatchHeader,
        buffer: Buffer,
        sender: Hashable,
        checked: ValidationCallback,
        *,
        keyed: bool = False,
        codec: int = AS_SENT,
    ) -> None:
        """Validate a batch. A plain call.

        `keyed` as in `check_body`; `codec`: the codec to store the batch with. `checked` is called before this returns
        if the batch is small and neither compressed nor to be compressed.

        Raises ClosedError.
        """
        if header.codec == 0 and codec <= 0 and header.record_count <= INLINE_RECORDS and len(buffer) <= INLINE_BYTES:
            checked(_validate_batch(header, buffer, keyed, codec))
            return

        def ended(done: asyncio.Future[ValidatedBatch | TidemillError]) -> None:
            if not done.cancelled():
                checked(done.result())

        self._enqueue(sender, partial(_validate_batch, header, buffer, keyed, codec)).add_done_callback(ended)

    async def run_in_thread(self, sender: Hashable, work: Callable[[], T]) -> T:
        """Run `work()` in one of the threads, at the sender's turn."""
        return await self._enqueue(sender, work)

    def close(self) -> None:
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        for jobs in waiting.values():
            for job in jobs:
                job.future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, sender: Hashable, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise ClosedError("the topics of this node were closed.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(_Job(work, future))
        self._start_jobs()
        return future

    def _start_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < THREADS and self._waiting:
            sender, jobs = next(iter(self._waiting.items()))
            del self._waiting[sender]
            job = jobs.popleft()
            if jobs:
                self._waiting[sender] = jobs  # Last in the round, so that senders take turns.
            if job.future.done():
                continue  # Its caller no longer waits.
            self._running += 1
            loop.run_in_executor(self._threads, job.work).add_done_callback(partial(self._on_job_ended, job))

    def _on_job_ended(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._running -= 1
        error = None if done.cancelled() else done.exception()
        if job.future.done():
            pass
        elif done.cancelled():
            job.future.cancel()
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(done.result())
        if not self._closed:
            self._start_jobs()


class _Job:
    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future


def _validate_batch(header: BatchHeader, buffer: Buffer, keyed: bool, codec: int) -> ValidatedBatch | TidemillError:
    """Validate and, if necessary, recompress.

    Any exception rejects the batch: a batch that was not validated is not stored.
    """
    try:
        max_timestamp_ms, records = check_records(header, buffer, keyed=keyed)
        if codec in (AS_SENT, header.codec):
            return ValidatedBatch(max_timestamp_ms)
        return ValidatedBatch(max_timestamp_ms, recompress_batch(header, records, codec))
    except TidemillError as error:
        # Its frames hold the decompressed bytes, and the error outlives them until the request is answered.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    except BaseException as bug:
        log.error("a batch could not be checked", error=repr(bug), exc_info=bug)
        return UnavailableError(f"the batch could not be checked: cause={bug!r}.")
