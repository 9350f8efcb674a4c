"""The rows of groups in the metastore, and how a node takes a group over.

A take-over changes the head row and nothing else; from then on whoever coordinated the group before can write nothing
(CG1). It is told apart from everybody else's by the name of this life, so one of unknown outcome is resolved by
reading the head row again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, UnknownOutcomeError
from tidemill.kafka.groups.classic_state import Group
from tidemill.kafka.groups.consumer_state import ConsumerGroup
from tidemill.kafka.groups.group_records import Rows, classic_rows, consumer_rows, gone_rows, head_row
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import GROUP_MEMBERS, GROUP_OFFSETS, GROUPS
from tidemill.metastore.rows.groups import GroupMemberRow, GroupOffsetRow, GroupRow

NO_FAULTS: frozenset[str] = frozenset()
"""Planted by the simulation, which must find each.

unfenced-offset     offsets are written whoever coordinates the group by now: newer ones are lost at a move
early-assignment    members are told their assignment before it is durable
stale-commit        commits of the consumer protocol are taken whatever epoch they name
empty-handed        a group goes over to the consumer protocol without what its members hold
"""
PAUSE_S = 0.05
READ_AT_ONCE = 1_000


class GroupFencedError(Exception):
    """Another node coordinates the group now, or it was deleted."""


class GroupTakeover(NamedTuple):
    """What was found, and the seqno of the head row since."""

    seqno: int
    head: GroupRow
    members: list[GroupMemberRow]


class GroupRows:
    """The rows of all groups, for one life of a node. Every method may raise Unavailable, Closed, Corrupt."""

    def __init__(
        self, metastore: Metastore, owner: str, clock: Clock, rand: Rand, faults: frozenset[str] = NO_FAULTS
    ) -> None:
        self.faults = faults
        self._metastore = metastore
        self._clock = clock
        self._rand = rand
        self.owner = owner

    async def take_over(self, group: str) -> GroupTakeover:
        """Coordinate it from now on; a group that nobody knows begins. May not end while the metastore is away."""
        key = GROUPS.key(group)
        while True:
            found = await self._metastore.get_row(key)
            old = GROUPS.decode(key, found.value) if found is not None and found.value else None
            head = msgspec.structs.replace(old or GroupRow(group, since_ms=self._clock.now_ms()), owner=self._own())
            seqno = await self._write_head(head, found.seqno if found is not None else 0)
            if seqno:
                members = await self._metastore.rows(GROUP_MEMBERS, group, fresh=False)
                return GroupTakeover(seqno, old or GroupRow(group), members)

    async def renew(self, group: str, seqno: int) -> int:
        """After a write of unknown outcome that expected `seqno`: fence it, and give the seqno to go on with (CG4).

        What the head row says stays: the member rows beside it are of the same write. Raises GroupFencedError.
        """
        key = GROUPS.key(group)
        while True:
            found = await self._metastore.get_row(key)
            if found is None or not found.value:
                raise GroupFencedError
            head = GROUPS.decode(key, found.value)
            if found.seqno != seqno and not self.wrote(head):
                raise GroupFencedError
            seqno = found.seqno
            renewed = await self._write_head(msgspec.structs.replace(head, owner=self._own()), seqno)
            if renewed:
                return renewed

    def wrote(self, head: GroupRow) -> bool:
        """Is it of this life?"""
        return head.owner.startswith(f"{self.owner}/")

    def _own(self) -> str:
        """Unlike any other, so that a head row can be recognised as what one attempt wrote."""
        return f"{self.owner}/{self._rand.nonce()[:16]}"

    async def _write_head(self, head: GroupRow, expected: int) -> int:
        """Its seqno; 0 where somebody was faster or nobody knows: the caller reads again."""
        key, value = GROUPS.encode(head)
        try:
            return await self._metastore.commit([(key, value)], expects={key: expected})
        except (ConflictError, FencedError, UnknownOutcomeError):
            await asyncio.sleep(self._rand.uniform(0, PAUSE_S))
        found = await self._metastore.get_row(key)
        return found.seqno if found is not None and found.value == value else 0

    async def write(self, group: str, rows: Rows, seqno: int) -> int:
        """Write rows of the group, if its head row still has this seqno. Raises GroupFencedError, FencedError,
        UnknownOutcomeError, Invalid."""
        key = GROUPS.key(group)
        expects = {key: seqno}
        if "unfenced-offset" in self.faults and not any(row[0] == key for row in rows):
            expects = {}
        try:
            return await self._metastore.commit(rows, expects=expects)
        except ConflictError as conflict:
            raise GroupFencedError from conflict

    def encoded(self, group: Group, stored: set[str]) -> Rows:
        """The head row and the member rows of a group of the classic protocol as it is to be durable; those who were
        `stored` and are gone are deleted."""
        return [self._head(group), *gone_rows(group, stored), *classic_rows(group)]

    def encoded_consumers(self, group: ConsumerGroup, stored: set[str], changed: frozenset[str]) -> Rows:
        """As `encoded`, with those members who changed."""
        return [self._head(group), *gone_rows(group, stored), *consumer_rows(group, changed)]

    def _head(self, group: Group | ConsumerGroup) -> tuple[bytes, bytes]:
        return GROUPS.encode(head_row(group, self._own(), self._clock.now_ms()))

    # reading --------------------------------------------------------------------------------------
    async def head(self, group: str) -> GroupRow | None:
        return await self._metastore.get(GROUPS, group)

    async def heads(self) -> list[GroupRow]:
        """Of all groups of the cluster, as of a second ago at worst."""
        return await self._metastore.rows(GROUPS, fresh=False)

    async def offsets(self, group: str) -> list[GroupOffsetRow]:
        return await self._metastore.rows(GROUP_OFFSETS, group)

    async def offsets_of(self, group: str, places: list[tuple[str, int]]) -> dict[tuple[str, int], GroupOffsetRow]:
        """By (topic id, partition); what was never committed is left out."""
        found: dict[tuple[str, int], GroupOffsetRow] = {}
        for at in range(0, len(places), READ_AT_ONCE):
            some = places[at : at + READ_AT_ONCE]
            keys = [GROUP_OFFSETS.key(group, *place) for place in some]
            rows = await self._metastore.get_rows(keys, fresh=not at)
            for place, key, row in zip(some, keys, rows, strict=True):
                if row is not None and row.value:
                    found[place] = GROUP_OFFSETS.decode(key, row.value)
        return found

    async def all_of(self, group: str) -> Rows:
        """Deletions of all rows of a group, the head row last."""
        keys = [key for family in (GROUP_MEMBERS, GROUP_OFFSETS) for key in await self._keys(family.prefix(group))]
        return [(key, b"") for key in keys] + [(GROUPS.key(group), b"")]

    async def _keys(self, prefix: bytes) -> list[bytes]:
        return [key async for keys, _ in self._metastore.prefix(prefix) for key in keys]
