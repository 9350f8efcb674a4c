"""Faults planted into the coordination of groups: each replaces one of its parts."""

from __future__ import annotations

import contextlib
from asyncio import Future
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from sim.world import swapped
from tidemill.base.errors import ConflictError
from tidemill.kafka.groups import coordinator, group_runner
from tidemill.kafka.groups.classic.state import ClassicGroup
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.coordinator import GroupCoordinator, GroupUnavailableError
from tidemill.kafka.groups.group_records import Rows, StoredMembers
from tidemill.kafka.groups.group_runner import GroupRunner
from tidemill.kafka.groups.group_store import GroupFencedError, GroupStore
from tidemill.kafka.groups.group_writer import GroupWriter, send_answers
from tidemill.kafka.transactions.coordinator import TransactionCoordinator
from tidemill.kafka.transactions.group_offsets import Identity, Member
from tidemill.kafka.transactions.state import Offsets
from tidemill.metastore.rows import GROUPS


class UnfencedStore(GroupStore):
    """Planted fault unfenced-offset: a replaced coordinator writes offsets, too."""

    async def write(self, group: str, rows: Rows, seqno: int) -> int:
        if any(key == GROUPS.key(group) for key, _ in rows):
            return await super().write(group, rows, seqno)
        try:
            return await self._metastore.commit(rows, expects={})
        except ConflictError as conflict:
            raise GroupFencedError from conflict


class EarlyWriter(GroupWriter):
    """Planted fault early-assignment: members receive their assignment before it is durable."""

    def _begin_store(self, group: ClassicGroup | ConsumerGroup) -> tuple[Rows, StoredMembers, Callable[[int], None]]:
        rows, members, stored = super()._begin_store(group)
        stored(0)
        send_answers(group)
        return rows, members, stored


class EmptyHandedRunner(GroupRunner):
    """Planted fault empty-handed: a group changes its protocol without the partitions that its members hold."""

    def consumer_heartbeat(self, ask: Any, seen: Any) -> Future[Any]:
        if ask.epoch == 0 and isinstance(self.group, ClassicGroup) and not self.is_closed and not self._deleting:
            for member in self.group.members.values():
                member.assignment = b""
        return super().consumer_heartbeat(ask, seen)


class StaleRunner(GroupRunner):
    """Planted fault stale-commit: commits of the consumer protocol are accepted with any epoch."""

    def commit_error(
        self, member_id: str, instance_id: str | None, generation: int, *, in_transaction: bool = False
    ) -> int:
        if isinstance(self.group, ConsumerGroup):
            self._used_s = self._clock.monotonic_s()
            return 0
        return super().commit_error(member_id, instance_id, generation, in_transaction=in_transaction)


class StayingRunner(GroupRunner):
    """Planted fault stays-replaced: the coordinator reports that it was replaced, and stays."""

    async def check_leadership(self) -> bool:
        head = await self._rows.head(self.group.name)
        return head is not None and self._rows.is_own_head(head) and not self.is_closed


async def store_offsets_checked_once(
    groups: GroupCoordinator,
    transactions: TransactionCoordinator,
    identity: Identity,
    group: str,
    member: Member,
    offsets: Offsets,
    *,
    adds: bool,
) -> int:
    """Plant the fault checked-once: the membership is not checked again after the offsets were stored."""
    try:
        led = await groups.get(group)
    except GroupUnavailableError as refused:
        return refused.code
    code = led.commit_error(*member, in_transaction=True)
    return code or await transactions.commit_offsets(*identity, group, offsets, adds=adds)


PLACES: dict[str, tuple[ModuleType, str, object]] = {
    "unfenced-offset": (coordinator, "GroupStore", UnfencedStore),
    "early-assignment": (group_runner, "GroupWriter", EarlyWriter),
    "empty-handed": (coordinator, "GroupRunner", EmptyHandedRunner),
    "stale-commit": (coordinator, "GroupRunner", StaleRunner),
    "stays-replaced": (coordinator, "GroupRunner", StayingRunner),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of the faults that replace a part of the coordinator."""
    with swapped(*PLACES[fault]) if fault in PLACES else contextlib.nullcontext():
        yield
