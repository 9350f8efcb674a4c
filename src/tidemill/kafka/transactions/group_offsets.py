"""Offsets of transactions and the group they are of: taken from its members, and its own once they are committed.

Taken: the group's coordinator looks at the membership again once they are kept. A member of a later generation reads
what is undecided after it was assigned, so either it finds these, or these are refused (KIP-447).

Committed: two nodes may carry one transaction to its end. The one that comes late must not put back what the group has
committed since: it takes the group's turn first, and asks then whether the transaction still wants it. Whoever was
faster has completed it by the time the group's next offsets are known to be undecided no more; and if the group moved
after the turn was taken, the write is fenced (CG1). Deleted meanwhile: what is deleted is wanted no more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.kafka import error_codes
from tidemill.kafka.groups.coordinator import Coordinator, GroupUnavailableError
from tidemill.kafka.transactions.state import Offsets
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

if TYPE_CHECKING:
    from tidemill.kafka.transactions.coordinator import Transactions

_NEVER = (error_codes.INVALID_GROUP_ID, error_codes.INVALID_REQUEST)
NO_FAULTS: frozenset[str] = frozenset()
"""Planted by the simulation: `checked-once`, the membership is not looked at again."""

Identity = tuple[str, int, int]
"""transactional id, producer id, epoch"""
Member = tuple[str, str | None, int]
"""member id, instance id, generation"""


async def keep(
    groups: Coordinator,
    transactions: Transactions,
    identity: Identity,
    group: str,
    member: Member,
    offsets: Offsets,
    *,
    adds: bool,
    faults: frozenset[str] = NO_FAULTS,
) -> int:
    """TxnOffsetCommit at the group's coordinator: a code. Raises InvalidError when it is more than a transaction holds,
    UnavailableError, Unknown: call again."""
    try:
        led = await groups.get(group)
    except GroupUnavailableError as refused:
        return refused.code
    code = led.commit_refusal(*member, in_transaction=True)
    code = code or await transactions.commit_offsets(*identity, group, offsets, adds=adds)
    if code or "checked-once" in faults:
        return code
    if not await led.is_led():
        return error_codes.NOT_COORDINATOR
    return led.commit_refusal(*member, in_transaction=True)


class CoordinatedOffsets:
    """As rows of the group. `owner`: the node that coordinates one."""

    def __init__(self, groups: Coordinator, owner: Callable[[str], str], clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._owner = owner

    def owner_of(self, group: str) -> str:
        return self._owner(group)

    @contextlib.asynccontextmanager
    async def turn(self, group: str) -> AsyncIterator[None]:
        async with self._turns.setdefault(group, asyncio.Lock()):
            yield

    async def commit(self, group: str, wanted: Callable[[], Awaitable[Offsets]]) -> None:
        """Raises UnavailableError; Invalid where they will never be taken."""
        code = 0
        async with self.turn(group):
            try:
                led = await self._groups.get(group)
                if offsets := await wanted():
                    code = await led.write(self._rows(group, offsets))
            except GroupUnavailableError as refused:
                code = refused.code
        if code in _NEVER:
            raise InvalidError(f"the group takes no offsets: group={group!r} code={code}.")
        if code:
            raise UnavailableError(f"the group does not take offsets now: group={group!r} code={code}.")

    def _rows(self, group: str, offsets: Offsets) -> list[tuple[bytes, bytes]]:
        now_ms = self._clock.now_ms()
        return [
            GROUP_OFFSETS.encode(GroupOffsetRow(group, topic_id, p, o.offset, o.leader_epoch, o.metadata, now_ms, 0))
            for topic_id, partitions in offsets.items()
            for p, o in partitions.items()
        ]
