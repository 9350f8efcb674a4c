"""Committed offsets of consumer groups that assign for themselves: one register per group.

    kafka/group/<group>/offsets    {topic id: {partition: [offset, leader epoch, metadata]}}

Keyed by topic id, so that a re-created topic starts without the old one's offsets.

G1  A commit is answered after its compare-and-set won; commits of one group in one process take effect in
    call order (one lock per group).
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

import msgspec

from tidemill.base.clock import Rand
from tidemill.base.errors import Conflict, Unknown
from tidemill.consensus.api import Consensus

METADATA_CHARS_MAX = 4096


class Committed(msgspec.Struct, frozen=True, array_like=True):
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


Offsets = dict[str, dict[int, Committed]]
"""topic id → partition → committed"""


class GroupOffsets:
    def __init__(self, consensus: Consensus, rand: Rand) -> None:
        self._consensus = consensus
        self._rand = rand
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, group: str) -> Offsets:
        found = await self._consensus.head(_key(group))
        return msgspec.msgpack.decode(found.data, type=Offsets) if found is not None and found.data else {}

    async def commit(self, group: str, commits: Offsets) -> None:
        """Merge `commits` into the group's offsets. Raises Unavailable, Invalid (register full) or Closed.

        Repeating a commit is harmless, so an unknown outcome is simply tried again.
        """
        lock = self._locks.setdefault(group, asyncio.Lock())
        async with lock:
            while True:
                found = await self._consensus.head(_key(group))
                offsets: Offsets = (
                    msgspec.msgpack.decode(found.data, type=Offsets) if found is not None and found.data else {}
                )
                for topic_id, partitions in commits.items():
                    offsets.setdefault(topic_id, {}).update(partitions)
                try:
                    await self._consensus.cas(
                        _key(group), found.seq if found else 0, msgspec.msgpack.encode(offsets), self._rand.nonce()
                    )
                except (Conflict, Unknown):
                    continue
                return


def _key(group: str) -> str:
    return f"kafka/group/{group}/offsets"
