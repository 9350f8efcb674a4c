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
from tidemill.base.errors import Conflict, Corrupt, Unknown
from tidemill.consensus.api import Consensus

METADATA_CHARS_MAX = 4096
PREFIX, SUFFIX = "kafka/group/", "/offsets"


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


async def all_groups(consensus: Consensus) -> dict[str, tuple[int, bytes]]:
    """Every group that ever committed, with the version of its register and what `decode_offsets` reads.

    For the checkpoint.
    """
    found: dict[str, tuple[int, bytes]] = {}
    for key, version in await consensus.scan(PREFIX):
        if version.data and key.endswith(SUFFIX):
            group = key.removeprefix(PREFIX).removesuffix(SUFFIX)
            found[group] = (version.seq, version.data)
    return found


def decode_offsets(data: bytes, group: str) -> Offsets:
    """Raises Corrupt."""
    try:
        offsets: Offsets = msgspec.msgpack.decode(data, type=Offsets)
        return offsets
    except msgspec.DecodeError as error:
        raise Corrupt(f"The committed offsets of a group are unreadable: group={group} cause={error}.") from error


async def replace_group(consensus: Consensus, rand: Rand, group: str, seq: int, offsets: Offsets) -> None:
    """Write the register of a group whose version is `seq`; without offsets it is emptied. Raises Conflict, Unknown."""
    data = msgspec.msgpack.encode(offsets) if offsets else b""
    await consensus.cas(_key(group), seq, data, rand.nonce())


async def restore_group(consensus: Consensus, rand: Rand, group: str, offsets: Offsets) -> None:
    """Write the register of a group into consensus that has none of it. May be repeated."""
    nonce = rand.nonce()
    while True:
        try:
            await consensus.cas(_key(group), 0, msgspec.msgpack.encode(offsets), nonce)
            return
        except Conflict:
            return  # an earlier run was here
        except Unknown:
            continue


def _key(group: str) -> str:
    return f"{PREFIX}{group}{SUFFIX}"
