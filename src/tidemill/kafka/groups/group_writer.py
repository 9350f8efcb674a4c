"""Writer of one group's rows: one write at a time, in the order of the requests, fenced by the head row's seqno.

    rows of offsets ─────┐
                         ├─► queue of parts ─► one write ─► codes of the parts ─► `written`
    unstored membership ─┘

Each write holds as many parts from the front of the queue as fit. A write is retried for WRITE_BUDGET_S. An error that
ends the loop is passed to `failed`, which ends the group here.

Invariant (order of acceptance): a membership is durable after every commit of offsets that was accepted before it was
queued. Otherwise a member could receive a partition and read its offset, and an accepted commit of the former member
would replace that offset afterwards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, is_own_fault_of_await
from tidemill.kafka import error_codes
from tidemill.kafka.groups.classic import requests as classic
from tidemill.kafka.groups.consumer import requests as consumer
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.group_records import Rows, StoredMembers
from tidemill.kafka.groups.group_store import GroupFencedError, GroupStore, GroupTakeover
from tidemill.kafka.groups.protocol_dispatch import AnyGroup

log = structlog.get_logger()

WRITE_BUDGET_S = 10.0
"""Time after which a failing write ends the group here; its members retry with its coordinator at that time."""
RETRY_PAUSE_S = 0.1
PART_ROWS = 5_000
PART_BYTES = 1 << 20
"""Limits of one write of offsets; the metastore accepts a multiple of them."""
WRITE_BYTES = 2 << 20
"""Target size of a combined write.

A larger membership is written alone; `consumer.sizes` and `GroupLimits.bytes` keep it below the metastore's limit
(METASTORE_BATCH_BYTES).
"""


class _WritePart:
    """Rows that become durable together, and the callback for their error code.

    `members` are the members that are stored after a membership; None marks a part of a commit of offsets.
    """

    __slots__ = ("completed", "members", "rows", "size_bytes")

    def __init__(self, rows: Rows, completed: Callable[[int], None], members: StoredMembers | None = None) -> None:
        self.rows = rows
        self.size_bytes = sum(len(key) + len(value) for key, value in rows)
        self.completed = completed
        self.members = members


class GroupWriter:
    """Writer of the group that `group()` returns, which `taken` found.

    `written()` is called after each write, `failed(code, error)` when the group cannot continue here.
    """

    def __init__(
        self,
        rows: GroupStore,
        taken: GroupTakeover,
        group: Callable[[], AnyGroup],
        written: Callable[[], None],
        failed: Callable[[int, BaseException | None], None],
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        self._rows = rows
        self._seqno = taken.seqno
        self._group = group
        self._name = group().name
        self._written = written
        self._failed = failed
        self._clock = clock
        self._tasks = tasks
        self._stored = taken.stored
        self._parts: deque[_WritePart] = deque()
        """Queue of parts. It has at most one membership, so the rows of that are computed from what is stored."""
        self.is_writing = False
        self._ended = False

    async def append(self, rows: Rows) -> int:
        """Write rows other than the membership, and return the error code once they are durable or failed.

        Nothing is awaited before the rows have their place.
        """
        if self._ended:
            return error_codes.NOT_COORDINATOR
        several: list[Rows] = []
        some: Rows = []
        size_bytes = 0
        for key, value in rows:
            if some and (len(some) >= PART_ROWS or size_bytes > PART_BYTES):
                several.append(some)
                some, size_bytes = [], 0
            some.append((key, value))
            size_bytes += len(key) + len(value)
        several.append(some)
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[int]] = [loop.create_future() for _ in several]
        self._parts += [
            _WritePart(some, partial(_resolve_future, done)) for some, done in zip(several, waiting, strict=True)
        ]
        self.start()
        codes = [await done for done in waiting]
        return next((code for code in codes if code), 0)

    def start(self) -> None:
        """Begin to write what is not stored, unless that is under way."""
        if self._has_work and not self.is_writing:
            self.is_writing = True
            self._tasks.spawn(self._write_all(), name=f"group {self._name}")

    @property
    def _has_work(self) -> bool:
        return not self._ended and (self._group().unstored or bool(self._parts))

    async def _write_all(self) -> None:
        try:
            while self._has_work:
                await self._write_some()
        except BaseException as error:
            if not is_own_fault_of_await(error):
                raise
            self._failed(_code_of(error), error)
        finally:
            self.is_writing = False

    async def _write_some(self) -> None:
        """Write the membership if it changed, together with the waiting offsets.

        If the write is rejected, each part is written alone, so that no commit is rejected because of another one.
        """
        group = self._group()
        parts = deque(self._collect_parts(group))
        together, is_lost = len(parts), False
        try:
            while parts:
                some = list(islice(parts, together))
                code = await self._write_parts(some)
                if code and len(some) > 1:
                    together = 1
                    continue
                for part in some:
                    parts.popleft().completed(code)
                    is_lost = is_lost or (code != 0 and part.members is not None)
        except BaseException as error:
            for part in parts:
                part.completed(_code_of(error))
            raise
        self._written()
        if is_lost and isinstance(group, ConsumerGroup):
            # The reported state is not durable, so the group restarts from the durable one.
            self._failed(error_codes.COORDINATOR_NOT_AVAILABLE, None)

    def _collect_parts(self, group: AnyGroup) -> list[_WritePart]:
        """Return the parts of the next write: at least one, and at most WRITE_BYTES if there are several."""
        if group.unstored and all(part.members is None for part in self._parts):
            self._parts.append(self._membership_part(group))
        parts: list[_WritePart] = []
        rows = size_bytes = 0
        while self._parts:
            rows += len(self._parts[0].rows)
            size_bytes += self._parts[0].size_bytes
            if parts and (rows > PART_ROWS or size_bytes > WRITE_BYTES):
                break
            parts.append(self._parts.popleft())
        return parts

    def _membership_part(self, group: AnyGroup) -> _WritePart:
        rows, members, stored = self._begin_store(group)

        def completed(code: int) -> None:
            stored(code)
            send_answers(group)

        return _WritePart(rows, completed, members)

    async def _write_parts(self, parts: Sequence[_WritePart]) -> int:
        """Write the parts.

        Return 0, or a code if the rows are invalid and nothing was written. Raises what `_commit_rows` raises.
        """
        rows = {key: value for part in parts for key, value in part.rows}
        if not rows:
            return 0
        try:
            seqno = await self._commit_rows(list(rows.items()))
        except InvalidError as error:
            log.error("kafka.group_write_refused", group=self._name, parts=len(parts), error=str(error))
            # INVALID_REQUEST ends a client, but the membership is not derived from its request alone.
            is_membership = any(part.members is not None for part in parts)
            return error_codes.COORDINATOR_NOT_AVAILABLE if is_membership else error_codes.INVALID_REQUEST
        for part in parts:
            if part.members is not None:
                self._seqno, self._stored = seqno, part.members
        return 0

    def _begin_store(self, group: AnyGroup) -> tuple[Rows, StoredMembers, Callable[[int], None]]:
        """Return the rows of the group in its current state, what is stored once they are written, and the callback for
        the error code of their write.
        """
        if isinstance(group, ConsumerGroup):
            changes = consumer.begin_store(group)
            rows, members = self._rows.membership_rows(group, self._stored, changes.changed)
            return rows, members, lambda code: consumer.complete_store(group, self._now_ms(), changes, code)
        storing = classic.begin_store(group)
        rows, members = self._rows.membership_rows(group, self._stored)
        return rows, members, lambda code: classic.complete_store(group, self._now_ms(), storing, code)

    async def _commit_rows(self, rows: Rows) -> int:
        """Write the rows, with retries.

        Raises GroupFencedError, InvalidError, or UnavailableError after WRITE_BUDGET_S.
        """
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        error: TidemillError
        while True:
            try:
                return await self._rows.write(self._name, rows, self._seqno)
            except (FencedError, UnavailableError) as failed:
                error = failed
            except UnknownOutcomeError as failed:
                error = failed
                self._seqno = await self._rows.fence_unknown_write(self._name, self._seqno)
            if self._clock.monotonic_s() > until_s:
                raise UnavailableError(f"the group cannot be written: group={self._name} cause={error.message!r}.")
            await asyncio.sleep(RETRY_PAUSE_S)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)

    def end(self, code: int) -> None:
        """Write nothing more. Waiting calls of `append` return `code`."""
        self._ended = True
        for part in self._parts:
            part.completed(code)
        self._parts.clear()


def send_answers(group: AnyGroup) -> None:
    """Send the answers, even of a group that has changed to the other protocol."""
    outbox = list(group.outbox)
    group.outbox.clear()
    for waiter, answer in outbox:
        assert isinstance(waiter, asyncio.Future)
        if not waiter.done():
            waiter.set_result(answer)


def _resolve_future(done: asyncio.Future[int], code: int) -> None:
    if not done.done():
        done.set_result(code)


def _code_of(error: BaseException) -> int:
    return error_codes.NOT_COORDINATOR if isinstance(error, GroupFencedError) else error_codes.COORDINATOR_NOT_AVAILABLE
