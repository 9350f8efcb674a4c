"""The L0 writer: batches of many partitions into one object, several uploads in flight.

    stage ──► pending ──(free slot and: idle · size reached · linger over)──► upload ──► uploaded / upload_failed
                 └──(expired, or abandoned by its owner)──► upload_failed, and not part of any object

Invariant (one outcome): a staged batch ends exactly once, as uploaded or as failed. Cancelling its waiter changes
nothing.

Invariant (order): members of one object are notified in the order in which they were staged. Thousands of them are
notified in several loop turns; until the last one is, the object counts as open.

Invariant (unpublished): no log names an object before its upload has ended, so it may be stored by `put_unpublished`.

Invariant (one copy): a member's buffer is read for the last time when its object is assembled. The object's own buffer
then serves the upload, the cache and the fetches, so record bytes are copied once.

Group commit: an idle writer waits briefly for the next batches of producers that it has just answered; while uploads
run, arriving batches are collected (`group_commit`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ClosedError, TidemillError, UnavailableError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.format import L0Region, encode_footer, object_key, parse_writer
from tidemill.topics.l0.group_commit import GATHER_LINES, GroupCommitPolicy
from tidemill.topics.l0.object_cache import ObjectCache

_log = structlog.get_logger()


class StagedBatch(Protocol):
    """A batch as the writer sees it. `abandoned` is read when an object is assembled."""

    topic_id: str
    partition: int
    line: Hashable
    """Sender: a line sends its batches in a partition one after another."""
    buffer: Buffer
    trailer: bytes
    """Stored behind the buffer. `size_bytes` is that of both."""
    size_bytes: int
    staged_s: float
    abandoned: bool

    def uploaded(self, object_key: str, first_byte: int, data: bytearray) -> None: ...

    def upload_failed(self, error: TidemillError) -> None: ...


class Upload(msgspec.Struct, frozen=True):
    """An upload in flight: its members with their first bytes. `since_ms` is wall time, for the stage status."""

    key: str
    since_ms: int
    data: bytearray
    members: deque[tuple[StagedBatch, int]]
    """Members that have not been notified yet."""


class L0Writer:
    def __init__(
        self,
        objects: ObjectStore,
        cache: ObjectCache,
        *,
        node: str,
        epoch: Callable[[], int],
        clock: Clock,
        rand: Rand,
        settings: TopicSettings,
    ) -> None:
        self.name = f"{node}-{rand.nonce()[:8]}"
        """Unique name of this writer, in the keys of its objects."""
        self._objects = objects
        self._cache = cache
        self._epoch = epoch
        self._clock = clock
        self._pace = CoopBudget(clock)
        self._settings = settings
        self._tasks = Tasks(self._on_task_failed)
        self._pending: list[StagedBatch] = []
        self._pending_bytes = 0
        self._uploads: dict[str, Upload] = {}
        self._next_number = 0
        self._uploading_bytes = 0
        self._group_commit = GroupCommitPolicy(settings)
        """Uses the event loop's time, as its timers do."""
        self._first_s = 0.0
        self._expired: deque[StagedBatch] = deque()
        self._flush_due: asyncio.Handle | None = None
        self._flush_now = False
        self._closed = False

    @property
    def staged_bytes(self) -> int:
        return self._pending_bytes + self._uploading_bytes

    @property
    def first_open_number(self) -> int:
        """Number of the oldest object whose upload has not ended, or of the next one: earlier ones have ended."""
        return min((parse_writer(key)[1] for key in self._uploads), default=self._next_number)

    def oldest_upload(self) -> Upload | None:
        return next(iter(self._uploads.values()), None)

    def stage(self, item: StagedBatch) -> None:
        """Add the batch to the next object. A plain call; the item is notified of the outcome.

        Raises UnavailableError, ClosedError.
        """
        if self._closed:
            raise ClosedError("the topic writer was closed.")
        if self.staged_bytes + item.size_bytes > self._settings.staged_bytes and self._pending_bytes:
            raise UnavailableError(
                f"too many bytes wait for upload: staged_bytes={self.staged_bytes}.", fix="Slow down and retry."
            )
        item.staged_s = self._clock.monotonic_s()
        now_s = asyncio.get_running_loop().time()
        if not self._pending:
            self._first_s = now_s
        self._group_commit.batch_arrived(now_s, _line_key(item))
        self._pending.append(item)
        self._pending_bytes += item.size_bytes
        self._schedule()

    def batch_answered(self, item: StagedBatch) -> None:
        """Record that the batch has its result. A plain call: its sender may send the next batch now."""
        loop = asyncio.get_running_loop()
        timer = self._flush_due
        if (
            self._group_commit.batch_answered(loop.time(), _line_key(item))
            and timer is not None
            and not self._flush_now
        ):
            timer.cancel()
            self._flush_due = None
            self._schedule()

    def _schedule(self) -> None:
        """Decide when to flush next.

        The zero delay lets all batches that arrive in this turn of the loop share an object.
        """
        if not self._pending or len(self._uploads) >= self._settings.uploads_in_flight or self._closed:
            return
        if self._flush_now:
            return
        delay_s = self._delay_s()
        if self._flush_due is not None:
            if delay_s > 0:
                return  # Decided again when the timer fires.
            self._flush_due.cancel()
        loop = asyncio.get_running_loop()
        self._flush_now = delay_s <= 0
        self._flush_due = loop.call_soon(self._flush) if self._flush_now else loop.call_later(delay_s, self._on_timer)

    def _delay_s(self) -> float:
        return self._group_commit.delay_s(
            asyncio.get_running_loop().time(),
            waiting_bytes=self._pending_bytes,
            first_s=self._first_s,
            uploads=len(self._uploads),
        )

    def _on_timer(self) -> None:
        """Handle the timer: batches answered since may have extended the wait."""
        self._flush_due = None
        if self._pending and self._delay_s() <= 0:
            self._flush()
        else:
            self._schedule()

    def _flush(self) -> None:
        """Start uploads while slots are free, in chunks of similar size, so that no tiny object follows a full one."""
        self._flush_due, self._flush_now = None, False
        self._drop_expired()
        chunks = max(1, round(self._pending_bytes / self._settings.object_bytes))
        target_bytes = self._pending_bytes / chunks
        for _ in range(min(chunks, self._settings.uploads_in_flight - len(self._uploads))):
            if self._pending:
                self._start(self._remove_pending(target_bytes))
        self._schedule()

    def _remove_pending(self, target_bytes: float) -> list[StagedBatch]:
        taken_bytes = 0
        count = 0
        for item in self._pending:
            if count and taken_bytes + item.size_bytes / 2 > target_bytes:
                break
            taken_bytes += item.size_bytes
            count += 1
        items, self._pending = self._pending[:count], self._pending[count:]
        self._pending_bytes -= taken_bytes
        return items

    def _drop_expired(self) -> None:
        horizon_s = self._clock.monotonic_s() - self._settings.staged_expiry_s
        kept: list[StagedBatch] = []
        telling = bool(self._expired)
        for item in self._pending:
            if item.abandoned:
                self._pending_bytes -= item.size_bytes
            elif item.staged_s < horizon_s:
                self._pending_bytes -= item.size_bytes
                self._expired.append(item)
            else:
                kept.append(item)
        self._pending = kept
        if self._expired and not telling:
            self._tasks.spawn(self._fail_expired_gradually(), name="l0-expired")

    async def _fail_expired_gradually(self) -> None:
        error = UnavailableError("a batch waited too long for its upload.", fix="Retry; the store is slow.")
        while self._expired:
            _fail_batch(self._expired.popleft(), error)
            if self._pace.is_used_up:
                await self._pace.wait_for_turn()

    def _start(self, items: list[StagedBatch]) -> None:
        by_partition: dict[tuple[str, int], list[StagedBatch]] = {}
        for item in items:
            by_partition.setdefault((item.topic_id, item.partition), []).append(item)
        parts: list[Buffer] = []
        regions: list[L0Region] = []
        places: dict[int, int] = {}
        at = 0
        for (topic_id, partition), members in by_partition.items():
            begin = at
            for item in members:
                places[id(item)] = at
                parts += (item.buffer, item.trailer)
                at += item.size_bytes
            regions.append(L0Region(topic_id, partition, begin, at - begin))
        parts.append(encode_footer(regions))
        data = bytearray().join(parts)
        key = object_key(self._epoch(), self.name, self._next_number)
        self._next_number += 1
        upload = Upload(key, self._clock.now_ms(), data, deque((item, places[id(item)]) for item in items))
        self._uploads[key] = upload
        self._uploading_bytes += len(data)
        self._group_commit.upload_started(asyncio.get_running_loop().time())
        self._tasks.spawn(self._upload(upload), name=f"l0-upload {key}")

    async def _upload(self, upload: Upload) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        error: TidemillError | None = None
        try:
            await self._objects.put_unpublished(upload.key, upload.data)
        except TidemillError as failure:
            # Also a ConflictError: an earlier attempt of this upload may have succeeded, but its durability was never
            # confirmed.
            error = UnavailableError(
                f"the upload of an L0 object failed: key={upload.key} cause={failure}", fix="Retry."
            )
        except BaseException as fault:
            if not is_own_fault_of_await(fault):
                raise
            # Every batch must get its outcome, also for an unexpected exception of a library.
            _log.error(
                "the upload of an L0 object failed unexpectedly",
                key=upload.key,
                error=error_sentence(fault),
                exc_info=fault,
            )
            error = UnavailableError(
                f"the upload of an L0 object failed unexpectedly: key={upload.key} cause={fault!r}.", fix="Retry."
            )
        now_s = loop.time()
        self._group_commit.upload_ended(now_s, now_s - begun_s, self._lines_to_await(upload) if error is None else ())
        await self._notify_members(upload, error)

    def _lines_to_await(self, upload: Upload) -> set[Hashable]:
        """Return the lines of the upload's batches that have none pending, and so send again once they are answered.

        Empty if many batches wait anyway.
        """
        if len(self._pending) > GATHER_LINES or len(upload.members) > GATHER_LINES:
            return set()
        going = {_line_key(item) for item, _ in upload.members if not item.abandoned}
        return going - {_line_key(item) for item in self._pending}

    def _on_task_failed(self, name: str, fault: BaseException) -> None:
        """Fail the members that a failed notification has left out: each batch must get an outcome."""
        _log.error(
            "not all members of an L0 upload were notified", task=name, error=error_sentence(fault), exc_info=fault
        )
        error = UnavailableError(f"the upload of an L0 object failed unexpectedly: cause={fault!r}.", fix="Retry.")
        upload = self._uploads.get(name.rpartition(" ")[2])
        if upload is None:
            self._fail_expired(error)
        else:
            self._remove_upload(upload)
            for item, _ in upload.members:
                _fail_batch(item, error)
        self._schedule()

    async def _notify_members(self, upload: Upload, error: TidemillError | None) -> None:
        if error is None:
            self._cache.add(upload.key, upload.data)
        while upload.members:
            item, first_byte = upload.members.popleft()
            if error is not None:
                _fail_batch(item, error)
            elif not item.abandoned:
                item.uploaded(upload.key, first_byte, upload.data)
            if self._pace.is_used_up:
                await self._pace.wait_for_turn()
        self._remove_upload(upload)
        self._schedule()

    def _remove_upload(self, upload: Upload) -> None:
        del self._uploads[upload.key]
        self._uploading_bytes -= len(upload.data)

    def _fail_expired(self, error: TidemillError) -> None:
        expired, self._expired = self._expired, deque()
        for item in expired:
            _fail_batch(item, error)

    async def aclose(self) -> None:
        """Fail the batches that are pending or being uploaded with UnavailableError (none is in a log), and stop."""
        self._closed = True
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        await self._tasks.aclose()
        error = UnavailableError("the node is shutting down; the batch was not written.")
        for upload in list(self._uploads.values()):
            self._remove_upload(upload)
            for item, _ in upload.members:
                _fail_batch(item, error)
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for item in (*self._expired, *pending):
            _fail_batch(item, error)


def _line_key(item: StagedBatch) -> Hashable:
    return item.topic_id, item.partition, item.line


def _fail_batch(item: StagedBatch, error: TidemillError) -> None:
    if not item.abandoned:
        item.upload_failed(error)
