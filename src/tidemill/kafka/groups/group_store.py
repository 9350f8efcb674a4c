"""Rows of groups in the metastore, and the takeover of a group by a node.

A takeover changes the head row and nothing else. From then on the former coordinator can write nothing, because its
writes expect the old seqno. The row contains a name that is unique to this process and attempt, so a takeover of
unknown outcome is resolved by reading the head row again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, UnknownOutcomeError
from tidemill.kafka.groups.classic.state import ClassicGroup
from tidemill.kafka.groups.consumer.state import ConsumerGroup
from tidemill.kafka.groups.group_records import Rows, StoredMembers, count_stored, head_row, member_rows
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS, GROUP_PARTITIONS, GROUPS
from tidemill.metastore.rows.groups import GroupMemberRow, GroupOffsetRow, GroupRow, with_partitions

PAUSE_S = 0.05
READ_ROWS_MAX = 1_000


class GroupFencedError(Exception):
    """Another node coordinates the group now, or it was deleted."""


class GroupTakeover(NamedTuple):
    """State found by a takeover: the new seqno of the head row, the members with their partitions, and their rows."""

    seqno: int
    head: GroupRow
    members: list[GroupMemberRow]
    stored: StoredMembers


class GroupStore:
    """Rows of all groups, for one life of a node. Methods may raise UnavailableError, ClosedError, CorruptError."""

    def __init__(self, metastore: Metastore, owner: str, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rand = rand
        self.owner = owner

    async def take_over(self, group: str) -> GroupTakeover:
        """Become the group's coordinator; an unknown group is created. It waits while the metastore is unavailable."""
        key = GROUPS.key(group)
        while True:
            found = await self._metastore.get_row(key)
            old = GROUPS.decode(key, found.value) if found is not None and found.value else None
            head = msgspec.structs.replace(
                old or GroupRow(group, since_ms=self._clock.now_ms()), owner=self._new_owner()
            )
            seqno = await self._write_head(head, found.seqno if found is not None else 0)
            if seqno:
                members = await self._metastore.rows(GROUP_MEMBERS, group, fresh=False)
                # No other coordinator writes between the two reads: it is fenced.
                partitions = await self._metastore.rows(GROUP_PARTITIONS, group, fresh=False)
                stored = count_stored(members, partitions)
                return GroupTakeover(seqno, old or GroupRow(group), with_partitions(members, partitions), stored)

    async def fence_unknown_write(self, group: str, seqno: int) -> int:
        """Fence a write of unknown outcome that expected `seqno`, and return the seqno for the next write.

        The content of the head row stays, because the member rows belong to the same write. Raises GroupFencedError.
        """
        key = GROUPS.key(group)
        while True:
            found = await self._metastore.get_row(key)
            if found is None or not found.value:
                raise GroupFencedError
            head = GROUPS.decode(key, found.value)
            if found.seqno != seqno and not self.is_own_head(head):
                raise GroupFencedError
            seqno = found.seqno
            renewed = await self._write_head(msgspec.structs.replace(head, owner=self._new_owner()), seqno)
            if renewed:
                return renewed

    def is_own_head(self, head: GroupRow) -> bool:
        """Return whether this life of the node wrote the head row."""
        return head.owner.startswith(f"{self.owner}/")

    def _new_owner(self) -> str:
        """Return a unique owner, so that a head row can be recognised as the result of one attempt."""
        return f"{self.owner}/{self._rand.nonce()[:16]}"

    async def _write_head(self, head: GroupRow, expected: int) -> int:
        """Write a head row and return its seqno.

        Return 0 after a conflict or an unknown outcome: the caller reads again.
        """
        key, value = GROUPS.encode(head)
        try:
            return await self._metastore.commit([(key, value)], expects={key: expected})
        except (ConflictError, FencedError, UnknownOutcomeError):
            await asyncio.sleep(self._rand.uniform(0, PAUSE_S))
        found = await self._metastore.get_row(key)
        return found.seqno if found is not None and found.value == value else 0

    async def write(self, group: str, rows: Rows, seqno: int) -> int:
        """Write rows of the group if its head row still has this seqno.

        Raises GroupFencedError, FencedError, UnknownOutcomeError, InvalidError.
        """
        try:
            return await self._metastore.commit(rows, expects={GROUPS.key(group): seqno})
        except ConflictError as conflict:
            raise GroupFencedError from conflict

    def membership_rows(
        self, group: ClassicGroup | ConsumerGroup, stored: StoredMembers, changed: frozenset[str] = frozenset()
    ) -> tuple[Rows, StoredMembers]:
        """Return the head row and the rows of the members, and what is stored afterwards (`member_rows`)."""
        head = GROUPS.encode(head_row(group, self._new_owner(), self._clock.now_ms()))
        rows, stored = member_rows(group, stored, changed)
        return [head, *rows], stored

    # reading --------------------------------------------------------------------------------------
    async def head(self, group: str) -> GroupRow | None:
        return await self._metastore.get(GROUPS, group)

    async def heads(self) -> list[GroupRow]:
        """Return the head rows of all groups of the cluster, at most a second old."""
        return await self._metastore.rows(GROUPS, fresh=False)

    async def offsets(self, group: str) -> list[GroupOffsetRow]:
        return await self._metastore.rows(GROUP_OFFSETS, group)

    async def offsets_of(self, group: str, places: list[tuple[str, int]]) -> dict[tuple[str, int], GroupOffsetRow]:
        """Return the committed offsets by (topic id, partition), without partitions that have none."""
        found: dict[tuple[str, int], GroupOffsetRow] = {}
        for at in range(0, len(places), READ_ROWS_MAX):
            some = places[at : at + READ_ROWS_MAX]
            keys = [GROUP_OFFSETS.key(group, *place) for place in some]
            rows = await self._metastore.get_rows(keys, fresh=not at)
            for place, key, row in zip(some, keys, rows, strict=True):
                if row is not None and row.value:
                    found[place] = GROUP_OFFSETS.decode(key, row.value)
        return found

    async def deletion_rows(self, group: str) -> Rows:
        """Return deletions of all rows of a group, the head row last."""
        families = (GROUP_MEMBERS, GROUP_PARTITIONS, GROUP_OFFSETS)
        keys = [key for family in families for key in await self._keys(family.prefix(group))]
        return [(key, b"") for key in keys] + [(GROUPS.key(group), b"")]

    async def _keys(self, prefix: bytes) -> list[bytes]:
        return [key async for keys, _ in self._metastore.prefix(prefix) for key in keys]
