"""Runner of one group that this node coordinates: sends the core's answers, starts its writes, and runs its timer.

    request ─► core (plain) ─► answers ─► futures of the waiting requests
                   │
                   └─► unstored, commits ─► group_writer ─► stored / committed

Any error that ends the write loop ends this group here and nothing else. Waiting clients must look up the coordinator,
and the next request takes the group over again from its durable state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from tidemill.base.clock import Clock
from tidemill.base.runtime.tasks import Tasks
from tidemill.kafka import error_codes
from tidemill.kafka.groups import protocol_dispatch
from tidemill.kafka.groups.classic.state import (
    GroupLimits,
    HeartbeatAnswer,
    JoinAnswer,
    JoinRequest,
    Phase,
    SyncAnswer,
    SyncRequest,
)
from tidemill.kafka.groups.consumer.state import ConsumerGroup, HeartbeatRequest, TopicSnapshot
from tidemill.kafka.groups.group_records import CLASSIC, CONSUMER, Rows, in_protocol, restore_group
from tidemill.kafka.groups.group_store import GroupStore, GroupTakeover
from tidemill.kafka.groups.group_writer import GroupWriter, send_answers

log = structlog.get_logger()

IDLE_S = 60.0
"""Time for which a group without members stays in memory after its last request."""


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
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        found = restore_group(taken.head, taken.members, limits, self._now())
        self.group = protocol_dispatch.after_takeover(found, self._now())
        self._writer = GroupWriter(rows, taken, lambda: self.group, self._after_change, self.end, clock, tasks)
        self._deleting = False
        self._timer: asyncio.TimerHandle | None = None
        self._used_s = clock.monotonic_s()
        self._topics_left_out = 0
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
        if self._deleting:  # a membership after the deletion would bring the group back
            waiter.set_result(JoinAnswer(error_codes.COORDINATOR_NOT_AVAILABLE, ask.member_id))
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
            send_answers(group)
        if waiter.done() and waiter.result().error == error_codes.GROUP_MAX_SIZE_REACHED:
            log.warning("kafka.group_full", group=group.name, member=ask.member_id, why=waiter.result().message)
        self._report_topics_left_out()
        return waiter

    def _report_topics_left_out(self) -> None:
        left_out = self.group.topics_left_out if isinstance(self.group, ConsumerGroup) else 0
        if left_out and not self._topics_left_out:
            log.warning("kafka.group_topics_left_out", group=self.group.name, topics=left_out)
        self._topics_left_out = left_out

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
        return await self._writer.append(rows)

    async def delete(self, release_offsets: Callable[[], Awaitable[None]]) -> int:
        """Delete all rows of a group without members, and end it here.

        `release_offsets` removes the group's offsets from transactions, once the group writes nothing more. Raises its
        errors.
        """
        if self.group.members:
            return error_codes.NON_EMPTY_GROUP
        if self._deleting:
            return error_codes.COORDINATOR_NOT_AVAILABLE
        self._deleting = True
        try:
            # Earlier requests are written first, so that their rows are among the deleted ones.
            code = await self._writer.append([])
            if not code and self.group.members:
                code = error_codes.NON_EMPTY_GROUP
            if not code:
                await release_offsets()
                code = await self._writer.append(await self._rows.deletion_rows(self.group.name))
        finally:
            self._deleting = False
        if not code:
            self.end(error_codes.COORDINATOR_NOT_AVAILABLE)
        return code

    # time and answers -----------------------------------------------------------------------------
    def _after_change(self) -> None:
        """Send answers, begin a write and set the timer, after every change of the core."""
        self._used_s = self._clock.monotonic_s()
        send_answers(self.group)
        if self.is_closed:
            return
        self._writer.start()
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
        return self.group.is_idle and not self._writer.is_writing and self._clock.monotonic_s() - used_s >= IDLE_S

    def end(self, code: int, fault: BaseException | None = None) -> None:
        """End the group on this node. Waiting requests get `code`. Idempotent."""
        if self.is_closed:
            return
        protocol_dispatch.release(self.group, code)
        if self._timer is not None:
            self._timer.cancel()
        self._writer.end(code)
        self._after_change()
        self._ended(self, fault)
