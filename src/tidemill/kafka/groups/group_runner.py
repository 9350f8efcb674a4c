"""One group that this node coordinates: the core's answers go out, its writes go down in order, its timer ticks.

    request ─► core (plain) ─► answers ─► futures of those who wait
                   │
                   └─► unstored, commits ─► one write at a time ─► stored / committed

Whatever ends the write loop, of whatever type, ends this group here and nothing else: everybody who waits is told to
look for the coordinator, and the next request takes the group over anew from what is durable.
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
from tidemill.base.runtime.tasks import Tasks, is_own_fault
from tidemill.kafka import error_codes
from tidemill.kafka.groups import classic, consumer, protocol_dispatch
from tidemill.kafka.groups.classic_state import (
    BeatAnswer,
    Group,
    GroupLimits,
    Join,
    JoinAnswer,
    Phase,
    Sync,
    SyncAnswer,
)
from tidemill.kafka.groups.consumer_state import ConsumerGroup, HeartbeatRequest, TopicSnapshot
from tidemill.kafka.groups.group_records import CLASSIC, CONSUMER, Rows, emptied, group_from
from tidemill.kafka.groups.group_store import GroupFencedError, GroupRows, GroupTakeover

log = structlog.get_logger()

WRITE_BUDGET_S = 10.0
"""A write that cannot be made for so long ends the group here: its members ask again, wherever it is by then."""
RETRY_PAUSE_S = 0.1
PART_ROWS = 5_000
PART_BYTES = 1 << 20
"""What goes into one write of offsets; the metastore takes some times as much at once."""
WRITE_BYTES = 2 << 20
"""What is put together into one write. A membership at its largest (`GroupLimits.bytes`) is little above it and goes
alone, so every write is far below what the metastore takes (METASTORE_BATCH_BYTES)."""
IDLE_S = 60.0
"""A group in which nobody is stays in memory for so long after its last request."""


class _Part:
    """Rows that become durable together, and who is told the code of it. `members`: of the group's membership, who is
    in it; None: some offsets of one commit."""

    __slots__ = ("members", "rows", "size_bytes", "told")

    def __init__(self, rows: Rows, told: Callable[[int], None], members: set[str] | None = None) -> None:
        self.rows = rows
        self.size_bytes = sum(len(key) + len(value) for key, value in rows)
        self.told = told
        self.members = members


class GroupRunner:
    """Made by the coordinator from what a take-over found. `ended(self, fault)` is called once, when it is over."""

    def __init__(
        self,
        rows: GroupRows,
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
        found = group_from(taken.head, taken.members, limits, self._now())
        self.group = protocol_dispatch.taken_over(found, self._now())
        self._seqno = taken.seqno
        self._stored = set(self.group.members)
        self._parts: deque[_Part] = deque()
        self._offsets_wait = False
        """The membership was written without them, which were there: it is their turn, however often it changes."""
        self._writing = False
        self._deleting = False
        self._timer: asyncio.TimerHandle | None = None
        self._used_s = clock.monotonic_s()
        self._settle()

    @property
    def is_over(self) -> bool:
        return self.group.phase is Phase.DEAD

    def _now(self) -> int:
        return int(self._clock.monotonic_s() * 1000)

    # requests -------------------------------------------------------------------------------------
    def join(self, ask: Join, seen: TopicSnapshot | None = None) -> asyncio.Future[JoinAnswer]:
        """`seen` None: who asks took this for a group of the classic protocol."""
        waiter: asyncio.Future[JoinAnswer] = self._loop.create_future()
        if self.is_over:
            waiter.set_result(JoinAnswer(error_codes.NOT_COORDINATOR, ask.member_id))
            return waiter
        self._turn(CLASSIC)
        self.group = protocol_dispatch.join(self.group, self._now(), ask, waiter, seen)
        self._settle()
        return waiter

    def sync(self, ask: Sync) -> asyncio.Future[SyncAnswer]:
        waiter: asyncio.Future[SyncAnswer] = self._loop.create_future()
        if self.is_over:
            waiter.set_result(SyncAnswer(error_codes.NOT_COORDINATOR))
            return waiter
        protocol_dispatch.sync(self.group, self._now(), ask, waiter)
        self._settle()
        return waiter

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> int:
        code = protocol_dispatch.heartbeat(self.group, self._now(), member_id, instance_id, generation)
        if code == error_codes.REBALANCE_IN_PROGRESS and isinstance(self.group, ConsumerGroup):
            # By when it is to join.
            self._settle()
        return code

    def beat(self, ask: HeartbeatRequest, seen: TopicSnapshot) -> asyncio.Future[BeatAnswer]:
        """Of the consumer protocol."""
        waiter: asyncio.Future[BeatAnswer] = self._loop.create_future()
        if self.is_over:
            waiter.set_result(BeatAnswer(error_codes.NOT_COORDINATOR))
            return waiter
        if self._deleting and ask.epoch == 0:
            waiter.set_result(BeatAnswer(error_codes.COORDINATOR_NOT_AVAILABLE, "The group is being deleted."))
            return waiter
        if ask.epoch == 0:
            self._turn(CONSUMER)
            if "empty-handed" in self._rows.faults and isinstance(self.group, Group):
                for member in self.group.members.values():
                    member.assignment = b""
        self.group = group = protocol_dispatch.beat(self.group, self._now(), ask, waiter, seen)
        session_end_s = self._loop.time() + group.limits.consumer_session_ms / 1000
        if self.group.unstored or self._timer is None or self._timer.when() > session_end_s:
            self._settle()
        else:
            # Nothing changed but that it was heard of: the timer looks at that when it is time. (It is set too late
            # where sessions were longer when it was set.)
            self._used_s = self._clock.monotonic_s()
            _answer(group)
        return waiter

    def _turn(self, kind: str) -> None:
        """Whoever comes first into a group in which nobody is says which protocol it speaks."""
        if self.group.is_vacant and not self._deleting and not self.is_over:
            self.group = emptied(self.group, kind)

    def leave(self, members: Sequence[tuple[str, str | None]]) -> list[int]:
        now = self._now()
        codes = [protocol_dispatch.leave(self.group, now, *member) for member in members]
        self._settle()
        return codes

    def commit_refusal(
        self, member_id: str, instance_id: str | None, generation: int, *, in_transaction: bool = False
    ) -> int:
        self._used_s = self._clock.monotonic_s()
        if isinstance(self.group, ConsumerGroup) and "stale-commit" in self._rows.faults:
            return 0
        return protocol_dispatch.commit_refusal(
            self.group, self._now(), member_id, instance_id, generation, in_transaction=in_transaction
        )

    async def is_led(self) -> bool:
        """Has nobody else taken it over? Else it is over here, for the next request to take it back: where nodes are of
        two minds about who owns it, the other may give it up unnoticed, and heartbeats alone write nothing that would
        be refused. Raises UnavailableError."""
        head = await self._rows.head(self.group.name)
        if (head is None or not self._rows.wrote(head)) and "stays-replaced" not in self._rows.faults:
            self.end(error_codes.NOT_COORDINATOR)
        return head is not None and self._rows.wrote(head) and not self.is_over

    async def write(self, rows: Rows) -> int:
        """Rows of the group beside its membership (offsets). The error code once they are durable, or are not.

        Called in a row, they are appended in that order (CG3): nothing is awaited before their place is taken.
        """
        if self._deleting:
            return error_codes.COORDINATOR_NOT_AVAILABLE
        if self.is_over:
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
        self._parts += [_Part(some, partial(_end, done)) for some, done in zip(several, waiting, strict=True)]
        self._used_s = self._clock.monotonic_s()
        self._nudge()
        codes = [await done for done in waiting]
        return next((code for code in codes if code), 0)

    async def delete(self, let_go: Callable[[], Awaitable[None]]) -> int:
        """All rows of the group, if nobody is in it; it is over here afterwards. `let_go`: of what transactions hold of
        it, called once nothing of it is written any more; what it raises is raised."""
        if self.group.members or (isinstance(self.group, Group) and self.group.expected):
            return error_codes.NON_EMPTY_GROUP
        if self._deleting:
            return error_codes.COORDINATOR_NOT_AVAILABLE
        self._deleting = True
        try:
            # What was asked for before is written before, so that it is among what is deleted.
            code = await self._append([])
            if not code and self.group.members:
                code = error_codes.NON_EMPTY_GROUP
            if not code:
                await let_go()
                code = await self._append(await self._rows.all_of(self.group.name))
        finally:
            self._deleting = False
        if not code:
            self.end(error_codes.COORDINATOR_NOT_AVAILABLE)
        return code

    # time and answers -----------------------------------------------------------------------------
    def _settle(self) -> None:
        """After every change of the core: answers go out, what must be durable is begun, the timer is set."""
        self._used_s = self._clock.monotonic_s()
        _answer(self.group)
        if self.is_over:
            return
        self._nudge()
        due = protocol_dispatch.due(self.group)
        delay_s = IDLE_S if due is None else max(0.0, (due - self._now()) / 1000)
        at_s = self._loop.time() + delay_s
        if self._timer is not None and not self._timer.cancelled() and self._timer.when() <= at_s:
            return  # it looks again by then
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        used_s = self._used_s
        now = self._now()
        due = protocol_dispatch.due(self.group)
        if due is not None and due <= now:
            self.group = protocol_dispatch.tick(self.group, now)
        elif due is None and self._is_idle(used_s):
            self.end(error_codes.NOT_COORDINATOR)
            return
        self._settle()
        self._used_s = used_s

    def _is_idle(self, used_s: float) -> bool:
        return self.group.idle and not self._writing and self._clock.monotonic_s() - used_s >= IDLE_S

    # writing --------------------------------------------------------------------------------------
    def _nudge(self) -> None:
        if not self._writing and (self.group.unstored or self._parts) and not self.is_over:
            self._writing = True
            self._tasks.spawn(self._write_all(), name=f"group {self.group.name}")

    async def _write_all(self) -> None:
        try:
            while not self.is_over and (self.group.unstored or self._parts):
                await self._write_some()
        except BaseException as error:
            if not is_own_fault(error):
                raise
            self.end(_code_of(error), error)
        finally:
            self._writing = False

    async def _write_some(self) -> None:
        """One write: the membership if it changed, and the offsets that came meanwhile. Where it is refused, each of
        them by itself: nobody is told that what is theirs is refused for what was put beside it."""
        group = self.group
        parts = deque(self._begin_write(group))
        together, is_lost = len(parts), False
        try:
            while parts:
                some = list(islice(parts, together))
                code = await self._written(some)
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
        self._settle()
        if is_lost and isinstance(group, ConsumerGroup):
            # What its members were to be told is not durable: it goes on from what is.
            self.end(error_codes.COORDINATOR_NOT_AVAILABLE)

    def _begin_write(self, group: Group | ConsumerGroup) -> list[_Part]:
        """What is written next, together if it can be: at least one part, and no more than WRITE_BYTES of several."""
        parts: list[_Part] = []
        if group.unstored and not (self._offsets_wait and self._parts):
            parts.append(self._begin_membership(group))
        rows, size_bytes = (len(parts[0].rows), parts[0].size_bytes) if parts else (0, 0)
        while self._parts:
            rows += len(self._parts[0].rows)
            size_bytes += self._parts[0].size_bytes
            if parts and (rows > PART_ROWS or size_bytes > WRITE_BYTES):
                break
            parts.append(self._parts.popleft())
        self._offsets_wait = bool(self._parts) and len(parts) == 1 and parts[0].members is not None
        return parts

    def _begin_membership(self, group: Group | ConsumerGroup) -> _Part:
        members = set(group.members)
        rows, stored = self._begin_store(group)
        if "early-assignment" in self._rows.faults:
            stored(0)
            _answer(group)

        def told(code: int) -> None:
            stored(code)
            _answer(group)

        return _Part(rows, told, members)

    async def _written(self, parts: Sequence[_Part]) -> int:
        """0, or the code of a write that would never be taken: then none of it was. Raises as `_durable`."""
        rows = {key: value for part in parts for key, value in part.rows}
        if not rows:
            return 0
        try:
            seqno = await self._durable(list(rows.items()))
        except InvalidError as error:
            log.error("kafka.group_write_refused", group=self.group.name, parts=len(parts), error=str(error))
            return error_codes.INVALID_REQUEST
        for part in parts:
            if part.members is not None:
                self._seqno, self._stored = seqno, part.members
        return 0

    def _begin_store(self, group: Group | ConsumerGroup) -> tuple[Rows, Callable[[int], None]]:
        """The rows of the group as it is now, and what is to be called with the error code of having written them."""
        if isinstance(group, ConsumerGroup):
            changes = consumer.begin_store(group)
            rows = self._rows.encoded_consumers(group, self._stored, changes.changed)
            return rows, lambda code: consumer.stored(group, self._now(), changes, code)
        storing = classic.begin_store(group)
        rows = self._rows.encoded(group, self._stored)
        return rows, lambda code: classic.stored(group, self._now(), storing, code)

    async def _durable(self, rows: Rows) -> int:
        """Raises GroupFencedError; Invalid; Unavailable when it was tried for too long."""
        until_s = self._clock.monotonic_s() + WRITE_BUDGET_S
        error: TidemillError
        while True:
            try:
                return await self._rows.write(self.group.name, rows, self._seqno)
            except (FencedError, UnavailableError) as failed:
                error = failed
            except UnknownOutcomeError as failed:
                error = failed
                self._seqno = await self._rows.renew(self.group.name, self._seqno)
            if self._clock.monotonic_s() > until_s:
                raise UnavailableError(f"A group cannot be written: group={self.group.name} cause={error.message!r}.")
            await asyncio.sleep(RETRY_PAUSE_S)

    def end(self, code: int, fault: BaseException | None = None) -> None:
        """This node does not coordinate it any more. Idempotent; whoever waits is answered with `code`."""
        if self.is_over:
            return
        protocol_dispatch.abandon(self.group, code)
        if self._timer is not None:
            self._timer.cancel()
        for part in self._parts:
            part.told(code)
        self._parts.clear()
        self._settle()
        self._ended(self, fault)


def _answer(group: Group | ConsumerGroup) -> None:
    """Also of one that went over to the other protocol meanwhile."""
    outbox = list(group.outbox)
    group.outbox.clear()
    for waiter, answer in outbox:
        assert isinstance(waiter, asyncio.Future)
        if not waiter.done():
            waiter.set_result(answer)


def _end(done: asyncio.Future[int], code: int) -> None:
    if not done.done():
        done.set_result(code)


def _code_of(error: BaseException) -> int:
    return error_codes.NOT_COORDINATOR if isinstance(error, GroupFencedError) else error_codes.COORDINATOR_NOT_AVAILABLE
