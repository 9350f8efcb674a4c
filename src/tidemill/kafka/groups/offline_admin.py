"""Administration of a group without its coordinator, by a command, even while no node is running.

The group is taken over first, so that its coordinator writes nothing in between; its next request takes it back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, InvalidError, MissingError
from tidemill.kafka.groups.group_records import Rows
from tidemill.kafka.groups.group_store import GroupFencedError, GroupStore
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

PART_ROWS = 5_000


class OfflineGroupAdmin:
    """Administration of groups. All methods may raise UnavailableError and UnknownOutcomeError."""

    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._rows = GroupStore(metastore, f"command/{rand.nonce()[:12]}", clock, rand)

    async def check_unused(self, group: str, *, exists: bool = False) -> None:
        """Check that `reset`, or with `exists` `delete`, would not refuse the group now. Raises the same errors, and
        changes nothing."""
        head = await self._rows.head(group)
        if head is None and exists:
            raise MissingError(f"no such group: group={group}.", fix="List them with: tidemill group list")
        members = head.members if head is not None else 0
        if found := members or len(await self._metastore.rows(GROUP_MEMBERS, group)):
            raise _group_in_use_error(group, found)

    async def reset(self, group: str, offsets: Sequence[GroupOffsetRow]) -> None:
        """Commit these offsets; an unknown group is created.

        Raises InvalidError if the group has members, ConflictError if it changed concurrently.
        """
        await self._write(group, [GROUP_OFFSETS.encode(row) for row in offsets])

    async def delete(self, group: str, let_go: Callable[[], Awaitable[None]]) -> None:
        """Delete a group with all its offsets; `let_go` removes them from transactions.

        Raises MissingError, InvalidError if the group has members, ConflictError if it changed concurrently.
        """
        await self.check_unused(group, exists=True)
        await self._write(group, None, let_go)

    async def _write(self, group: str, rows: Rows | None, let_go: Callable[[], Awaitable[None]] | None = None) -> None:
        """Write the rows after a takeover; with `rows` None, delete all rows that exist then."""
        await self.check_unused(group)
        taken = await self._rows.take_over(group)
        if taken.members:
            raise _group_in_use_error(group, len(taken.members))
        if let_go is not None:
            await let_go()
        try:
            if rows is None:
                rows = await self._rows.deletion_rows(group)
            for at in range(0, len(rows), PART_ROWS):
                await self._rows.write(group, rows[at : at + PART_ROWS], taken.seqno)
        except GroupFencedError as lost:
            raise ConflictError(f"the group changed concurrently: group={group}.", fix="Try again.") from lost


def _group_in_use_error(group: str, members: int) -> InvalidError:
    return InvalidError(
        f"the group has members: group={group} members={members}.",
        fix="Stop them first; a killed member leaves at its session timeout.",
    )
