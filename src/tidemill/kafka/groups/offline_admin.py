"""What is done to a group from outside, without its coordinator: by a command, also while no node is up.

A group is taken over first, so that whoever coordinates it writes nothing in between; its next request takes it back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, InvalidError, MissingError
from tidemill.kafka.groups.group_records import Rows
from tidemill.kafka.groups.group_store import GroupFencedError, GroupRows
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

PART_ROWS = 5_000


class OfflineGroupAdmin:
    """Raises Unavailable and Unknown besides what is said."""

    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._rows = GroupRows(metastore, f"command/{rand.nonce()[:12]}", clock, rand)

    async def reset(self, group: str, offsets: Sequence[GroupOffsetRow]) -> None:
        """Commit these; a group that nobody knows begins. Raises InvalidError while somebody is in it,
        ConflictError."""
        await self._write(group, [GROUP_OFFSETS.encode(row) for row in offsets])

    async def delete(self, group: str, let_go: Callable[[], Awaitable[None]]) -> None:
        """With everything it has committed; `let_go`: of what transactions hold of it. Raises MissingError,
        InvalidError while somebody is in it, ConflictError."""
        if await self._rows.head(group) is None:
            raise MissingError(f"no such group: group={group}.", fix="List them with: tidemill group list")
        await self._write(group, None, let_go)

    async def _write(self, group: str, rows: Rows | None, let_go: Callable[[], Awaitable[None]] | None = None) -> None:
        """`rows` None: delete all that there are once the group is taken over."""
        head = await self._rows.head(group)
        if head is not None and head.members:
            raise _in_use(group, head.members)
        taken = await self._rows.take_over(group)
        if taken.members:
            raise _in_use(group, len(taken.members))
        if let_go is not None:
            await let_go()
        try:
            if rows is None:
                rows = await self._rows.all_of(group)
            for at in range(0, len(rows), PART_ROWS):
                await self._rows.write(group, rows[at : at + PART_ROWS], taken.seqno)
        except GroupFencedError as lost:
            raise ConflictError(f"somebody joined or committed meanwhile: group={group}.", fix="Try again.") from lost


def _in_use(group: str, members: int) -> InvalidError:
    return InvalidError(
        f"the group has members: group={group} members={members}.",
        fix="Stop them first; one that was killed leaves at its session timeout.",
    )
