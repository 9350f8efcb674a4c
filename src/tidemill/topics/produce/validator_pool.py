"""Where a produced batch is checked: in the plain call when that is cheap, else in a thread, so that no batch holds the
event loop. Two threads: what they hold decompressed is bounded by twice DECOMPRESSED_BYTES. Where the topic says by
what its batches are compressed, they are compressed anew here, too.

F1  Senders take turns: whoever sends thousands of batches that are dear to check delays each other sender by one.
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
from tidemill.topics.batch.encode import recompressed
from tidemill.topics.batch.header import BatchHeader
from tidemill.topics.batch.validation import check_records
from tidemill.topics.config.configs import AS_SENT

THREADS = 2

INLINE_RECORDS = 4096
"""About 1 ms of the loop, 5 ms when a record is malformed and must be named."""

INLINE_BYTES = 2 << 20
"""0.1 ms of checksum."""

T = TypeVar("T")


class ValidatedBatch(NamedTuple):
    """A batch that may be stored. max_timestamp_ms: the greatest of its records; rewritten: the bytes to be stored in
    place of those that were sent, None for those."""

    max_timestamp_ms: int
    rewritten: bytearray | None = None


Checked = Callable[[ValidatedBatch | TidemillError], None]
"""Hears of a good batch, or why it is refused. Called on the event loop, once."""

log = structlog.get_logger()


class BatchValidator:
    """One process's threads for batches. `close` waits for nothing: a batch that was not checked is not stored."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tidemill-batch")
        self._waiting: dict[Hashable, deque[_Job]] = {}
        """Sender → its work, oldest first. The sender whose turn it is comes first."""
        self._running = 0
        self._closed = False

    def check(
        self,
        header: BatchHeader,
        buffer: Buffer,
        sender: Hashable,
        checked: Checked,
        *,
        keyed: bool = False,
        codec: int = AS_SENT,
    ) -> None:
        """Plain call; `keyed` as in `check_body`; `codec`: by what records are to be compressed. `checked` is called
        before it returns when the batch is small and no codec has to do with it.

        Raises ClosedError.
        """
        if header.codec == 0 and codec <= 0 and header.record_count <= INLINE_RECORDS and len(buffer) <= INLINE_BYTES:
            checked(_outcome(header, buffer, keyed, codec))
            return

        def ended(done: asyncio.Future[ValidatedBatch | TidemillError]) -> None:
            if not done.cancelled():
                checked(done.result())

        self._enter(sender, partial(_outcome, header, buffer, keyed, codec)).add_done_callback(ended)

    async def run(self, sender: Hashable, work: Callable[[], T]) -> T:
        """`work()` in one of the threads, at the sender's turn."""
        return await self._enter(sender, work)

    def close(self) -> None:
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        for jobs in waiting.values():
            for job in jobs:
                job.future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _enter(self, sender: Hashable, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise ClosedError("the topics of this node were closed.")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(_Job(work, future))
        self._pump()
        return future

    def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < THREADS and self._waiting:
            sender, jobs = next(iter(self._waiting.items()))
            del self._waiting[sender]
            job = jobs.popleft()
            if jobs:
                self._waiting[sender] = jobs  # last in the round (F1)
            if job.future.done():
                continue  # nobody waits for it any more
            self._running += 1
            loop.run_in_executor(self._threads, job.work).add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, done: asyncio.Future[Any]) -> None:
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
            self._pump()


class _Job:
    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future


def _outcome(header: BatchHeader, buffer: Buffer, keyed: bool, codec: int) -> ValidatedBatch | TidemillError:
    """A fault of any kind refuses the batch: what could not be checked is not stored."""
    try:
        max_timestamp_ms, records = check_records(header, buffer, keyed=keyed)
        if codec in (AS_SENT, header.codec):
            return ValidatedBatch(max_timestamp_ms)
        return ValidatedBatch(max_timestamp_ms, recompressed(header, records, codec))
    except TidemillError as error:
        # Its frames hold what was decompressed; the error outlives them until the request is answered.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    except BaseException as bug:
        log.error("a batch could not be checked", error=repr(bug), exc_info=bug)
        return UnavailableError(f"the batch could not be checked: cause={bug!r}.")
