"""Completion of a prepared transaction: its markers, then the offsets that it commits.

    prepared ─► a marker in every partition ─► its offsets to every group ─► what was written, for the register

One call writes what it can and returns that; the coordinator records it and calls again until nothing is left. A
partition that another node leads is not written here: its leader is notified by `remind`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import structlog

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.kafka.transactions import transitions
from tidemill.kafka.transactions.state import Offsets, State, Transaction
from tidemill.kafka.transactions.store import read
from tidemill.topics.api import Marker, NotLeaderError, TopicLog, TransactionSnapshot

log = structlog.get_logger()

CONCURRENT_MARKERS_MAX = 64

OpenResult = TransactionSnapshot | TidemillError


class GroupOffsetStore(Protocol):
    def owner_of(self, group: str) -> str:
        """Return the node that accepts commits of the group; "" if any does."""
        ...

    async def commit(self, group: str, wanted: Callable[[], Awaitable[Offsets]]) -> None:
        """Commit the offsets that `wanted` returns.

        `wanted` is called when no other call can change the group; it returns the offsets that are still to be
        committed. Raises UnavailableError: call again, repetition is safe. Raises InvalidError if the offsets can never
        be accepted.
        """
        ...

    def exclusive(self, group: str) -> AbstractAsyncContextManager[None]:
        """Exclude commits of the group while the context is open."""
        ...


class Progress(NamedTuple):
    """Partitions (by topic id) and groups of a transaction that one call has written."""

    marked: Mapping[str, Sequence[int]]
    groups: Sequence[str]


class TransactionCompletion:
    """Writer of the markers and offsets of prepared transactions.

    `remind`: notify the leader of a partition about a transaction; a plain call that may do nothing.
    """

    def __init__(self, consensus: Consensus, topics: TopicLog, groups: GroupOffsetStore) -> None:
        self.groups = groups
        self.remind: Callable[[str, str], None] = lambda node, transactional_id: None
        self._consensus = consensus
        self._topics = topics

    async def write(self, transactional_id: str, seen: Transaction) -> Progress | None:
        """Write what is left of a prepared transaction. Return None if the register now holds another transaction."""
        marker = Marker(seen.producer_id, seen.epoch, seen.state is State.PREPARE_COMMIT, bumped=seen.bumped)
        places = [(topic_id, partition) for topic_id, several in seen.partitions.items() for partition in several]
        marked: dict[str, list[int]] = {}
        for at in range(0, len(places), CONCURRENT_MARKERS_MAX):
            some = places[at : at + CONCURRENT_MARKERS_MAX]
            here: dict[tuple[str, int], OpenResult] = {}
            if not seen.bumped:
                here = await self._read_open(some, marker)
                # Invariant: the register is read after the open transactions. So a marker ends only a transaction that
                # was open while the register was still prepared, never the next one of the same epoch.
                found = await read(self._consensus, transactional_id)
                if found is None or not transitions.is_same_transaction(found, seen):
                    return None
            for place, done in zip(some, await self._write_markers(transactional_id, some, marker, here), strict=True):
                if done:
                    marked.setdefault(place[0], []).append(place[1])
        groups: list[str] = []
        if sum(map(len, marked.values())) == len(places):
            # Groups are last: a client that sees the offsets may read the records.
            for group in seen.offsets:
                if await self._commit_group(transactional_id, seen, group):
                    groups.append(group)
        return Progress(marked, groups)

    async def _read_open(self, places: Sequence[tuple[str, int]], marker: Marker) -> dict[tuple[str, int], OpenResult]:
        async def one(topic_id: str, partition: int) -> OpenResult:
            try:
                return await self._topics.transaction_snapshot(topic_id, partition, marker.producer_id)
            except TidemillError as error:
                return error

        return dict(zip(places, await asyncio.gather(*(one(*place) for place in places)), strict=True))

    async def _write_markers(
        self,
        transactional_id: str,
        places: Sequence[tuple[str, int]],
        marker: Marker,
        here: Mapping[tuple[str, int], OpenResult],
    ) -> list[bool]:
        async def one(topic_id: str, partition: int) -> bool:
            try:
                seen = here.get((topic_id, partition))
                if isinstance(seen, TidemillError):
                    raise seen
                await self._topics.mark(topic_id, partition, marker, seen)
            except MissingError:
                return True  # deleted: no client reads it
            except TidemillError as error:
                if not isinstance(error, NotLeaderError):  # most partitions are not led here
                    log.info("transaction.not_marked", id=transactional_id, topic_id=topic_id, partition=partition,
                             cause=str(error))  # fmt: skip
                self.remind(self._topics.leader_of(topic_id, partition), transactional_id)
                return False
            return True

        return list(await asyncio.gather(*(one(*place) for place in places)))

    async def _commit_group(self, transactional_id: str, seen: Transaction, group: str) -> bool:
        async def pending_offsets() -> Offsets:
            found = await read(self._consensus, transactional_id)
            return (
                found.offsets.get(group, {})
                if found is not None and transitions.is_same_transaction(found, seen)
                else {}
            )

        try:
            await self.groups.commit(group, pending_offsets)
        except InvalidError as error:
            # The offsets can never be accepted, but their transaction is committed: log the error and continue.
            log.error("transaction.offsets_refused", group=group, error=str(error))
        except TidemillError as error:
            log.info("transaction.offsets_wait", id=transactional_id, group=group, cause=str(error))
            self.remind(self.groups.owner_of(group), transactional_id)
            return False
        return True
