"""Offsets inside transactions: received from a member of the group, and written to the group after the commit.

Receive: the group's coordinator checks the membership again after it has stored the offsets in the transaction. A
member of a later generation reads the undecided offsets after it received its assignment. So it either finds these
offsets, or they are rejected (KIP-447).

Commit: two nodes may complete the same transaction. The later one must not overwrite offsets that the group has
committed since, so it waits for the group's turn and then checks whether the transaction still contains the offsets.
The earlier node has completed the transaction before the group's next offsets are known to be decided. If the group
moved after the turn was taken, the write is fenced by the head row of the group. Offsets that were deleted in the
meantime are not wanted any more.
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
from tidemill.kafka.groups.coordinator import GroupCoordinator, GroupUnavailableError
from tidemill.kafka.transactions.state import Offsets
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

if TYPE_CHECKING:
    from tidemill.kafka.transactions.coordinator import TransactionCoordinator

_NEVER = (error_codes.INVALID_GROUP_ID, error_codes.INVALID_REQUEST)

Identity = tuple[str, int, int]
"""Transactional id, producer id, epoch."""
Member = tuple[str, str | None, int]
"""Member id, instance id, generation."""


async def store_offsets(
    groups: GroupCoordinator,
    transactions: TransactionCoordinator,
    identity: Identity,
    group: str,
    member: Member,
    offsets: Offsets,
    *,
    adds: bool,
) -> int:
    """Process a TxnOffsetCommit at the group's coordinator and return a code.

    Raises InvalidError if the transaction becomes too large. After UnavailableError and UnknownOutcomeError call again.
    """
    _, _, generation = member
    try:
        led = await groups.get(group, creates=generation < 0)
    except GroupUnavailableError as refused:
        return refused.code
    code = led.commit_error(*member, in_transaction=True)
    code = code or await transactions.commit_offsets(*identity, group, offsets, adds=adds)
    if code:
        return code
    if not await led.check_leadership():
        return error_codes.NOT_COORDINATOR
    return led.commit_error(*member, in_transaction=True)


class CoordinatedOffsets:
    """Store of offsets in the rows of groups. `owner` returns the coordinating node of a group."""

    def __init__(self, groups: GroupCoordinator, owner: Callable[[str], str], clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._owner = owner

    def owner_of(self, group: str) -> str:
        return self._owner(group)

    @contextlib.asynccontextmanager
    async def exclusive(self, group: str) -> AsyncIterator[None]:
        async with self._turns.setdefault(group, asyncio.Lock()):
            yield

    async def commit(self, group: str, wanted: Callable[[], Awaitable[Offsets]]) -> None:
        """Commit the wanted offsets. Raises UnavailableError, or InvalidError if they can never be accepted."""
        code = 0
        async with self.exclusive(group):
            try:
                led = await self._groups.get(group)
                if offsets := await wanted():
                    code = await led.write(self._rows(group, offsets))
            except GroupUnavailableError as refused:
                code = refused.code
        if code in _NEVER:
            raise InvalidError(f"the group accepts no offsets: group={group!r} code={code}.")
        if code:
            raise UnavailableError(f"the group does not accept offsets now: group={group!r} code={code}.")

    def _rows(self, group: str, offsets: Offsets) -> list[tuple[bytes, bytes]]:
        now_ms = self._clock.now_ms()
        return [
            GROUP_OFFSETS.encode(GroupOffsetRow(group, topic_id, p, o.offset, o.leader_epoch, o.metadata, now_ms, 0))
            for topic_id, partitions in offsets.items()
            for p, o in partitions.items()
        ]
