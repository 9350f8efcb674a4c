"""Runner of one group that this node coordinates: sends the core's answers, writes in order, and runs its timer.

    request ─► core (plain) ─► answers ─► futures of the waiting requests
                   │
                   └─► unstored, commits ─► one write at a time ─► stored / committed

Any error that ends the write loop ends this group here and nothing else. Waiting clients must look up the coordinator,
and the next request takes the group over again from its durable state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import FencedError, InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, is_own_fault_of_await
from tidemill.kafka import error_codes
from tidemill.kafka.groups import protocol_dispatch
from tidemill.kafka.groups.classic import requests as classic
from tidemill.kafka.groups.classic.state import (
    ClassicGroup,
    GroupLimits,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    Phase,
    SyncAnswer,
    SyncRequest,
)
from tidemill.kafka.groups.consumer import requests as consumer
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, TopicSnapshot
from tidemill.kafka.groups.group_records import CLASSIC, CONSUMER, Rows, in_protocol, restore_group
from tidemill.kafka.groups.group_store import GroupFencedError, GroupStore, GroupTakeover

log = structlog.get_logger()

WRITE_BUDGET_S = 10.0
"""Time after which a failing write ends the group here; its members retry with its coordinator at that time."""
RETRY_PAUSE_S = 0.1
PART_ROWS = 5_000
PART_BYTES = 1 << 20
"""Limits of one write of offsets; the metastore accepts a multiple of them."""
WRITE_BYTES = 2 << 20
"""Target size of a combined write.

A membership of the maximum size (`GroupLimits.bytes`) slightly exceeds it and is written alone, so every write is far
below the metastore's limit (METASTORE_BATCH_BYTES).
"""
IDLE_S = 60.0
"""Time for which a group without members stays in memory after its last request."""


class _WritePart:
    """Rows that become durable together, and the callback for their error code.

    `members` are the members of a written membership; None marks a part of a commit of offsets.
    """

    __slots__ = ("members", "rows", "size_bytes", "told")

    def __init__(self, rows: Rows, told: Callable[[int], None], members: set[str] | None = None) -> None:
        self.rows = rows
        self.size_bytes = sum(len(key) + len(value) for key, value in rows)
        self.told = told
        self.members = members


class GroupRunner:
    """One coordinated group, created by the coordinator from a takeover.

    `ended(self, fault)` is called once, when the group ends here.
    """

    def __init__(
        self,
        rows: GroupStore,
        taken: GroupTakeover,
        limits: GroupLimits,
        clock: Clock,
        tasks: Tasks,
        ended: Callable[[GroupRunner, BaseException | None], None],
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._tasks = tasks
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        found = restore_group(taken.head, taken.members, limits, self._now())
        self.group = protocol_dispatch.after_takeover(found, self._now())
        self._seqno = taken.seqno
        self._stored = set(self.group.members)
        self._parts: deque[_WritePart] = deque()
        self._offsets_wait = False
        """True if waiting offsets were not part of the last write of the membership: they have priority in the next
        one, however often the membership changes.
        """
        self._writing = False
        self._deleting = False
        self._timer: asyncio.TimerHandle | None = None
        self._used_s = clock.monotonic_s()
        self._after_change()

    @property
    def is_closed(self) -> bool:
        return self.group.phase is Phase.DEAD

    def _now(self) -> int:
        return int(self._clock.monotonic_s() * 1000)

    # requests -------------------------------------------------------------------------------------
    def join(self, ask: JoinRequest, seen: TopicSnapshot | None = None) -> asyncio.Future[JoinAnswer]:
        """Join a member. `seen` may be omitted if the caller assumed a group of the classic protocol."""
        waiter: asyncio.Future[JoinAnswer] = self._loop.create_future()
        if self.is_closed:
            waiter.set_result(JoinAnswer(error_codes.NOT_COORDINATOR, ask.member_id))
            return waiter
        self._choose_protocol(CLASSIC)
        self.group = protocol_dispatch.join(self.group, self._now(), ask, waiter, seen)
        self._after_change()
        return waiter

    def sync(self, ask: SyncRequest) -> asyncio.Future[SyncAnswer]:
        waiter: asyncio.Future[SyncAnswer] = self._loop.create_future()
        if self.is_closed:
            waiter.set_result(SyncAnswer(error_codes.NOT_COORDINATOR))
            return waiter
        protocol_dispatch.sync(self.group, self._now(), ask, waiter)
        self._after_change()
        return waiter

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> int:
        code = protocol_dispatch.heartbeat(self.group, self._now(), member_id, instance_id, generation)
        if code == error_codes.REBALANCE_IN_PROGRESS and isinstance(self.group, ConsumerGroup):
            # The heartbeat set a deadline for the member to join.
            self._after_change()
        return code

    def consumer_heartbeat(self, ask: HeartbeatRequest, seen: TopicSnapshot) -> asyncio.Future[HeartbeatAnswer]:
        """Process a heartbeat of the consumer protocol."""
        waiter: asyncio.Future[HeartbeatAnswer] = self._loop.create_future()
        if self.is_closed:
            waiter.set_result(HeartbeatAnswer(error_codes.NOT_COORDINATOR))
            return waiter
        if self._deleting and ask.epoch == 0:
            waiter.set_result(HeartbeatAnswer(error_codes.COORDINATOR_NOT_AVAILABLE, "The group is being deleted."))
            return waiter
        if ask.epoch == 0:
            self._choose_protocol(CONSUMER)
        self.group = group = protocol_dispatch.consumer_heartbeat(self.group, self._now(), ask, waiter, seen)
        session_end_s = self._loop.time() + group.limits.consumer_session_ms / 1000
        if self.group.unstored or self._timer is None or self._timer.when() > session_end_s:
            self._after_change()
        else:
            # Nothing changed but the end of the session, which the timer checks in time. (It would be late if sessions
            # were longer when it was set.)
            self._used_s = self._clock.monotonic_s()
            _send_answers(group)
        return waiter

    def _choose_protocol(self, kind: str) -> None:
        """Let the first member of an empty group determine the protocol."""
        if self.group.is_vacant and not self._deleting and not self.is_closed:
            self.group = in_protocol(self.group, kind)

    def remove_members(self, members: Sequence[tuple[str, str | None]]) -> list[int]:
        now = self._now()
        codes = [protocol_dispatch.leave_group(self.group, now, *member) for member in members]
        self._after_change()
        return codes

    def commit_error(
        self, member_id: str, instance_id: str | None, generation: int, *, in_transaction: bool = False
    ) -> int:
        self._used_s = self._clock.monotonic_s()
        return protocol_dispatch.commit_error(
            self.group, self._now(), member_id, instance_id, generation, in_transaction=in_transaction
        )

    async def check_leadership(self) -> bool:
        """Return whether no other node has taken the group over; else end it here, so that the next request takes it
        back.

        While nodes disagree about the owner, another node may have taken and released the group unnoticed, and
        heartbeats alone write nothing that would be rejected. Raises UnavailableError.
        """
        head = await self._rows.head(self.group.name)
        if head is None or not self._rows.is_own_head(head):
            self.end(error_codes.NOT_COORDINATOR)
        return head is not None and self._rows.is_own_head(head) and not self.is_closed

    async def write(self, rows: Rows) -> int:
        """Write rows of the group other than its membership (offsets), and return the error code once they are durable
        or failed.

        Calls are appended in their order: nothing is awaited before a call has its place.
        """
        if self._deleting:
            return error_codes.COORDINATOR_NOT_AVAILABLE
        if self.is_closed:
            return error_codes.NOT_COORDINATOR
        return await self._append(rows)

    async def _append(self, rows: Rows) -> int:
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
        waiting: list[asyncio.Future[int]] = [self._loop.create_future() for _ in several]
        self._parts += [
            _WritePart(some, partial(_resolve_future, done)) for some, done in zip(several, waiting, strict=True)
        ]
        self._used_s = self._clock.monotonic_s()
        self._start_writing()
        codes = [await done for done in waiting]
        return next((code for code in codes if code), 0)

    async def delete(self, let_go: Callable[[], Awaitable[None]]) -> int:
        """Delete all rows of a group without members, and end it here.

        `let_go` removes the group's offsets from transactions, once the group writes nothing more; its errors are
        raised.
        """
        if self.group.members or (isinstance(self.group, ClassicGroup) and self.group.expected):
            return error_codes.NON_EMPTY_GROUP
        if self._deleting:
            return error_codes.COORDINATOR_NOT_AVAILABLE
        self._deleting = True
        try:
            # Earlier requests are written first, so that their rows are among the deleted ones.
            code = await self._append([])
            if not code and self.group.members:
                code = error_codes.NON_EMPTY_GROUP
            if not code:
                await let_go()
                code = await self._append(await self._rows.deletion_rows(self.group.name))
        finally:
            self._deleting = False
        if not code:
            self.end(error_codes.COORDINATOR_NOT_AVAILABLE)
        return code

    # time and answers -----------------------------------------------------------------------------
    def _after_change(self) -> None:
        """Send answers, begin a write and set the timer, after every change of the core."""
        self._used_s = self._clock.monotonic_s()
        _send_answers(self.group)
        if self.is_closed:
            return
        self._start_writing()
        due = protocol_dispatch.next_due_ms(self.group)
        delay_s = IDLE_S if due is None else max(0.0, (due - self._now()) / 1000)
        at_s = self._loop.time() + delay_s
        if self._timer is not None and not self._timer.cancelled() and self._timer.when() <= at_s:
            return  # the timer runs earlier anyway
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        used_s = self._used_s
        now = self._now()
        due = protocol_dispatch.next_due_ms(self.group)
        if due is not None and due <= now:
            self.group = protocol_dispatch.tick(self.group, now)
        elif due is None and self._is_idle(used_s):
            self.end(error_codes.NOT_COORDINATOR)
            return
        self._after_change()
        self._used_s = used_s

    def _is_idle(self, used_s: float) -> bool:
        return self.group.is_idle and not self._writing and self._clock.monotonic_s() - used_s >= IDLE_S

    # writing --------------------------------------------------------------------------------------
    def _start_writing(self) -> None:
        if not self._writing and (self.group.unstored or self._parts) and not self.is_closed:
            self._writing = True
            self._tasks.spawn(self._write_all(), name=f"group {self.group.name}")

    async def _write_all(self) -> None:
        try:
            while not self.is_closed and (self.group.unstored or self._parts):
                await self._write_some()
        except BaseException as error:
            if not is_own_fault_of_await(error):
                raise
            self.end(_code_of(error), error)
        finally:
            self._writing = False

    async def _write_some(self) -> None:
        """Write the membership if it changed, together with the waiting offsets.

        If the write is rejected, each part is written alone, so that no commit is rejected because of another one.
        """
        group = self.group
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
                    parts.popleft().told(code)
                    is_lost = is_lost or (code != 0 and part.members is not None)
        except BaseException as error:
            for part in parts:
                part.told(_code_of(error))
            raise
        self._after_change()
        if is_lost and isinstance(group, ConsumerGroup):
            # The reported state is not durable, so the group restarts from the durable one.
            self.end(error_codes.COORDINATOR_NOT_AVAILABLE)

    def _collect_parts(self, group: ClassicGroup | ConsumerGroup) -> list[_WritePart]:
        """Return the parts of the next write: at least one, and at most WRITE_BYTES if there are several."""
        parts: list[_WritePart] = []
        if group.unstored and not (self._offsets_wait and self._parts):
            parts.append(self._membership_part(group))
        rows, size_bytes = (len(parts[0].rows), parts[0].size_bytes) if parts else (0, 0)
        while self._parts:
            rows += len(self._parts[0].rows)
            size_bytes += self._parts[0].size_bytes
            if parts and (rows > PART_ROWS or size_bytes > WRITE_BYTES):
                break
            parts.append(self._parts.popleft())
        self._offsets_wait = bool(self._parts) and len(parts) == 1 and parts[0].members is not None
        return parts

    def _membership_part(self, group: ClassicGroup | ConsumerGroup) -> _WritePart:
        members = set(group.members)
        rows, stored = self._begin_store(group)

        def completed(code: int) -> None:
            stored(code)
            _send_answers(group)

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
            log.error("kafka.group_write_refused", group=self.group.name, parts=len(parts), error=str(error))
            return error_codes.INVALID_REQUEST
        for part in parts:
            if part.members is not None:
                self._seqno, self._stored = seqno, part.members
        return 0

    def _begin_store(self, group: ClassicGroup | ConsumerGroup) -> tuple[Rows, Callable[[int], None]]:
        """Return the rows of the group in its current state, and the callback for the error code of their write."""
        if isinstance(group, ConsumerGroup):
            changes = consumer.begin_store(group)
            rows = self._rows.consumer_group_rows(group, self._stored, changes.changed)
            return rows, lambda code: consumer.complete_store(group, self._now(), changes, code)
        storing = classic.begin_store(group)
        rows = self._rows.classic_group_rows(group, self._stored)
        return rows, lambda code: classic.complete_store(group, self._now(), storing, code)

    async def _commit_rows(self, rows: Rows) -> int:
        """Write the rows, with retries.

        Raises GroupFencedError, InvalidError, or UnavailableError after WRITE_BUDGET_S.
        """
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        error: TidemillError
        while True:
            try:
                return await self._rows.write(self.group.name, rows, self._seqno)
            except (FencedError, UnavailableError) as failed:
                error = failed
            except UnknownOutcomeError as failed:
                error = failed
                self._seqno = await self._rows.fence_unknown_write(self.group.name, self._seqno)
            if self._clock.monotonic_s() > until_s:
                raise UnavailableError(f"the group cannot be written: group={self.group.name} cause={error.message!r}.")
            await asyncio.sleep(RETRY_PAUSE_S)

    def end(self, code: int, fault: BaseException | None = None) -> None:
        """End the group on this node. Waiting requests get `code`. Idempotent."""
        if self.is_closed:
            return
        protocol_dispatch.release(self.group, code)
        if self._timer is not None:
            self._timer.cancel()
        for part in self._parts:
            part.told(code)
        self._parts.clear()
        self._after_change()
        self._ended(self, fault)


def _send_answers(group: ClassicGroup | ConsumerGroup) -> None:
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
